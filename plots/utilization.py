"""How busy the machine is while a script trains: GPU and processor over time, and their area.

    python plots/utilization.py runs/               every run in runs/

As LeanRL shows it for the GPU. Written to --out: NAME.md and NAME.json, and the figure: a panel per
script and environment, a line per row of the speed-up table, the GPU above the processor, over the
steady window. Of several runs of a row the newest counts.

    GPU             percent of the time in which any kernel runs, which NVML is asked about at each
                    row of metrics: 100% may be 1% of the chip. "-" without a GPU or nvidia-ml-py
    processor       percent of one core that the process takes with all its threads: 200% are two
                    cores. Other processes of a run are not in it, evaluations are
    area            percent-seconds under the line. Of two runs of as many steps that with less has
                    taken less of the machine

Both are of TensorBoard, charts/gpu_percent and charts/cpu_seconds. A run that was resumed is left
out: its second process counts anew.
"""

import sys
from itertools import pairwise
from pathlib import Path

import breakdown
import curves
import matplotlib.pyplot as plt
import numpy as np
import program
import run_dirs
import tables
from run_dirs import Run, label, shown
from tables import short

TITLE = "How busy the machine is while it trains"
SHORTEST = 0.5  # seconds that a step of a line lasts
SEEN = 2.0  # seconds: NVML tells of the last one at most, which is little of a shorter window
CPU, GPU = "charts/cpu_seconds", "charts/gpu_percent"
Step = tuple[float, float, float]  # seconds where it begins and ends, percent
KINDS = {"GPU": "GPU busy (%)", "processor": "processor (% of a core)"}


def percents(times: np.ndarray, spent: np.ndarray) -> list[Step]:
    """Seconds spent up to these times -> percent between each two of them.

    Those that follow too soon to tell are passed over, but for the last one, which joins the gap
    before.
    """
    kept = [0]
    for i, at in enumerate(times):
        if at - times[kept[-1]] >= SHORTEST:
            kept.append(i)
    kept[max(len(kept) - 1, 1) :] = [len(times) - 1]
    found = []
    for i, k in pairwise(kept):
        begin, end = float(times[i]), float(times[k])
        found.append((begin, end, 100 * float(spent[k] - spent[i]) / (end - begin)))
    return found


def area(line: list[Step]) -> float:
    """Percent-seconds under the line."""
    return sum((end - begin) * percent for begin, end, percent in line)


def window(run: Run, tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and values of a metric in the steady window, which ends where a trace begins."""
    series = run.series([tag]).get(tag)
    report = run.stages
    if series is None or not report or len(run_dirs.parts(run.path, "config")) > 1:
        return np.empty(0), np.empty(0)
    first = round(report["sps"] * report["wall_seconds"]) - report["env_steps"]
    inside = (series.steps >= first) & (series.seconds <= report["wall_seconds"])
    return series.seconds[inside], series.values[inside]


def reduce(run: Run) -> dict | None:
    """A run -> its lines and their areas; None if it has fewer than two rows of metrics."""
    times, spent = window(run, CPU)
    if len(times) < 2:
        return None
    begin, end = float(times[0]), float(times[-1])
    lines = {"processor": percents(times, spent)}
    times, busy = window(run, GPU)
    if len(times) > 2 and end - begin > SEEN:  # each row tells of the time since the one before
        gaps = np.diff(times, prepend=times[0])
        lines["GPU"] = percents(times, np.cumsum(busy / 100 * gaps))
    row = {
        "script": run.script,
        "env_id": run.env_id,
        "row": run.row,
        "run": shown(run.path),
        "window": end - begin,
        "steps_per_second": run.stages["sps_steady"],
        "lines": lines,
    }
    for kind, line in lines.items():
        found = area(line)
        row[kind] = {"area": found, "mean": found / (end - begin)}
    return row


def cells(rows: list[dict]) -> list[list[str]]:
    columns = {
        "environment": lambda row: row["env_id"],
        "row": lambda row: row["row"],
        "window s": lambda row: f"{row['window']:,.0f}",
        "steps/s": lambda row: short(row["steps_per_second"]) if row["steps_per_second"] else "-",
    }
    table = tables.lay_out(rows, ["script"], columns)
    for kind in KINDS:
        table[0] += [f"{kind} %", "area"]
        for line, row in zip(table[1:], rows, strict=True):
            found = row.get(kind)
            line += [f"{found['mean']:.0f}", f"{found['area']:,.0f}"] if found else ["-", "-"]
    return table


def draw(rows: list[dict], runs: list[Run]):
    """Blocks of a script and environment, four side by side: a panel per kind that any run has."""
    blocks: dict = {}
    for row in rows:
        blocks.setdefault(f"{label(row['script'])}: {row['env_id']}", []).append(row)
    kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
    columns = min(len(blocks), 4)
    floors = -(-len(blocks) // columns)
    figure, panels = plt.subplots(
        floors * len(kinds),
        columns,
        figsize=(1.2 + 3.6 * columns, 0.9 + 2.6 * floors * len(kinds)),
        squeeze=False,
        layout="constrained",
    )
    curves.headline(figure, TITLE, runs)
    for i, (title, mine) in enumerate(blocks.items()):
        floor, column = divmod(i, columns)
        first = floor * len(kinds)
        block = panels[first : first + len(kinds), column]
        block[0].set_title(title)
        block[-1].set_xlabel("seconds of training")
        for ax, kind in zip(block, kinds, strict=True):
            draw_panel(ax, mine, kind)
            if column == 0:
                ax.set_ylabel(KINDS[kind])
    for i in range(len(blocks), floors * columns):  # places that are left
        for ax in panels[-len(kinds) :, i % columns]:
            ax.remove()
    return figure


def draw_panel(ax, rows: list[dict], kind: str) -> None:
    """A line per row over the seconds since its steady window began, and its area."""
    lines = []
    for row in rows:
        if kind not in row:
            continue
        line = row["lines"][kind]
        edges = [0.0, *(end - line[0][0] for _, end, _ in line)]
        percents = [percent for *_, percent in line]
        colour = curves.COLOURS[row["row"]]
        text = f"{row['row']}: area {short(row[kind]['area'])} %s"
        edge = ax.stairs(percents, edges, color=colour, linewidth=1.2, baseline=None, label=text)
        ax.stairs(percents, edges, color=colour, fill=True, alpha=0.12, linewidth=0)
        lines.append(edge)
    ax.set_ylim(0, 100 if kind == "GPU" else None)
    ax.legend(handles=lines, fontsize=8, frameon=False, labelcolor="linecolor", handlelength=1)


def write(
    runs: list[Run], out: Path, name: str = "utilization", scripts: tuple[str, ...] = ()
) -> list[Path]:
    """Table of those `runs` that have samples, and figure of these scripts or all; its files."""
    found = breakdown.reduce_all(runs, reduce)
    if not found:
        print("no utilization: no run has written what its processor did", file=sys.stderr)
        return []
    chosen = [run for run, _ in found]
    rows = [row for _, row in found]
    record = run_dirs.record_of(chosen, rows)
    drawn = [row for row in rows if row["script"] in scripts] or rows
    files = curves.save(draw(drawn, chosen), out / name)
    tables.write_report(out / name, TITLE, cells(rows), record, labels=3)
    return files


def main(arguments: list[str] | None = None) -> int:
    return program.draw_runs(__doc__, "utilization", write, arguments)


if __name__ == "__main__":
    program.start(main)
