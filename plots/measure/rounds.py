"""What programs share that compare: rounds in which all take turns, and a table.

Each run is a process of its own, one at a time; round n has seed n, and a ratio of speeds is of
runs of one round, so that the drift of a shared machine hits both alike.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import processes
import run_dirs
import tables
from tables import short, spread

OPTIONS = ("--out", "--rounds", "--steps")


def take_turns(names: list[str], options: argparse.Namespace, measure) -> tuple[list, list]:
    """Calls measure(name, seed, options, progress) for all names, round after round.

    Returns the rounds, {name: result} each, and for each call that raised ValueError what it says.
    """
    turns = []
    for seed in range(1, options.rounds + 1):
        for name in names:
            make = partial(measure, name, seed, options)
            turns.append(processes.Turn(f"{name}, round {seed}", options.steps, 1, make))
    results, failures = processes.make_all(turns)
    rounds = []
    for seed in range(1, options.rounds + 1):
        found = {name: results.get(f"{name}, round {seed}") for name in names}
        rounds.append({name: result for name, result in found.items() if result})
    return rounds, failures


def summarize(
    rounds: list[dict], title: str, ratio: str, references: dict[str, str], others: tuple = ()
) -> list[dict]:
    """One dict per name, under `title`, from rounds in which a failed run's result is missing.

    `references` has the name that each is compared with: `ratio` is the median over the rounds of
    speed / its speed, worth_us what a step takes longer. Of all numbers, `others` too, the spread.
    """
    rows = []
    for name, reference in references.items():
        mine = [results[name] for results in rounds if name in results]
        if not mine:
            rows.append({title: name, "skipped": "no finished run"})
            continue
        row = {title: name, "runs": len(mine)}
        for key in ("sps_steady", "warmup_seconds", *others):
            found = [result[key] for result in mine if result.get(key) is not None]
            row[key] = spread(found) if found else None
        ratios = []
        worths = []
        for results in rounds:
            speed = results.get(name, {}).get("sps_steady")
            other = results.get(reference, {}).get("sps_steady")
            if speed and other:
                ratios.append(speed / other)
                worths.append(1e6 / speed - 1e6 / other)
        row[ratio] = statistics.median(ratios) if ratios else None
        row["worth_us"] = spread(worths) if worths else None
        rows.append(row)
    return rows


def middle(found: dict | None, which: str = "median") -> str:
    return short(found[which]) if found else "-"


def ends(found: dict | None, between: str = "-") -> str:
    return f"{short(found['min'])}{between}{short(found['max'])}" if found else "-"


def cells(rows: list[dict], title: str, columns: dict[str, Callable[[dict], str]]) -> list:
    """A table, heading first: the row's title, its speed, `columns` and the warm-up."""
    columns = {
        "steps/s": lambda row: middle(row["sps_steady"]),
        "min-max": lambda row: ends(row["sps_steady"]),
        **columns,
        "warm-up s": lambda row: middle(row["warmup_seconds"]),
    }
    return tables.lay_out(rows, [title], columns)


def ratio(name: str) -> Callable[[dict], str]:
    """A column of the ratio under this name."""
    return lambda row: f"{row[name]:.2f}x" if row[name] else "-"


def report(
    name: str, above: list[str], table: list[list[str]], record: dict, options: argparse.Namespace
) -> int:
    """Prints and writes NAME.md and NAME.json; the exit status. `above` begins with a title."""
    configs = []
    for results in record["rounds"]:
        configs += [result["config"] for result in results.values() if "config" in result]
    if configs:
        title, *above = above
        below = [f"logs: {run_dirs.shown(options.out / 'logs')}/"]
        record = {"schema": 1, "machine": run_dirs.machine(configs)} | record
        tables.write_report(options.out / name, title, table, record, above, below, labels=1)
    return processes.say_failures(record["failures"])
