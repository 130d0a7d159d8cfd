"""Numbers as text, tables, and reports: NAME.md for a reader and NAME.json with all numbers."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from run_dirs import describe, shown


def spread(values: list[float]) -> dict:
    """Mean, median and range."""
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def gain(share: float) -> str:
    """How much faster all is without what takes `share` of the time (Amdahl's law)."""
    return f"{1 / (1 - share):.2f}x" if share < 0.99 else "more than 100x"


def short(x: float) -> str:
    """Three digits or all before the point, and never 1e+03."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def in_units(x: float) -> str:
    """1.23 M rather than 1,234,567."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(x) >= size:
            return f"{short(x / size)}{unit}"
    return short(x)


def with_range(spread: dict, middle: str = "mean") -> str:
    """The middle of a `spread` and, if there is one, its range."""
    low, high = short(spread["min"]), short(spread["max"])
    return short(spread[middle]) + (f" ({low} to {high})" if low != high else "")


def lay_out(
    rows: list[dict], labels: list[str], columns: dict[str, Callable[[dict], str]]
) -> list[list[str]]:
    """A table, heading first: what a row has under `labels`, then `columns`.

    A row that was skipped says why in their place.
    """
    table = [[*labels, *columns]]
    for row in rows:
        if "skipped" in row:
            said = [f"skipped: {row['skipped']}"]
            said += [""] * (len(columns) - 1)
        else:
            said = [cell(row) for cell in columns.values()]
        table.append([*(row[label] for label in labels), *said])
    return table


def as_text(table: list[list[str]], labels: int) -> str:
    """Aligned for a terminal, the first `labels` columns to the left.

    A cell followed by empty ones may run over into their columns.
    """
    widths = []
    for i in range(len(table[0])):
        widths.append(max(len(line[i]) for line in table if line[-1] or i < labels))
    lines = []
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        for i in range(labels):
            cells[i] = line[i].ljust(widths[i])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def as_markdown(table: list[list[str]], labels: int) -> str:
    heading, *rest = table
    rule = ["---"] * labels + ["---:"] * (len(heading) - labels)
    return "\n".join(f"| {' | '.join(line)} |" for line in [heading, rule, *rest])


def write_json(path: Path, value: dict | list, indent: int = 1) -> None:
    """Whenever the process dies, the file is whole, old or new."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=indent) + "\n")
    partial.replace(path)


def write_report(
    stem: Path,
    title: str,
    table: list[list[str]],
    record: dict,
    above: list[str] | tuple = (),
    below: list[str] | tuple = (),
    labels: int = 2,
) -> None:
    """Prints the report and writes it to `stem`.md and, with all numbers, `stem`.json.

    Above the table also stand the command and the machine of the record.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    markdown = stem.with_name(f"{stem.name}.md")
    numbers = stem.with_name(f"{stem.name}.json")
    command = f": {record['command']}" if "command" in record else ""
    machine = describe(record["machine"]) if "machine" in record else []
    above = [f"{title}{command}", *machine, *above]
    below = [*below, f"files: {shown(markdown)}, {shown(numbers)}"]
    before = "\n".join(f"- {line}" for line in above)
    after = "\n".join(f"- {line}" for line in below)
    markdown.write_text(f"{before}\n\n{as_markdown(table, labels)}\n\n{after}\n")
    write_json(numbers, record, indent=2)
    print("", *above, "", as_text(table, labels), "", *below, sep="\n")
