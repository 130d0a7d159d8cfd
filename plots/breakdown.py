"""Where the time goes, as RL-Scope draws it: stages, resources, layers, transitions between them.

    python plots/breakdown.py runs/         every run in runs/ with a trace (--stopwatch trace)

Written to --out: NAME as PNG and SVG, two bars per script whose colours are stages, which needs no
trace; NAME.md and NAME.json with the numbers of traces, and NAME_stages: per script and row the
microseconds per environment step of each stage, by resource (colour) and layer (hatch), above them
the total, below them the calls per iteration. Of several runs of a row the newest counts.

An iteration is one environment step of the agent: of all its environments side by side. Where one
compiled call acts and simulates, all of it is inference. Seconds per stage are those of the steady
window, which was not traced; the trace divides them into layers. What a run without a GPU cannot
tell is left out, never drawn as 0. After figure 4 of Gleeson et al., "RL-Scope", MLSys 2021.
"""

import sys
from pathlib import Path

import curves
import matplotlib.pyplot as plt
import program
import run_dirs
import tables
from matplotlib.patches import Patch
from run_dirs import DAMAGED, Run, label, per_step, shown
from tables import short
from traces import CPU_LAYERS

EDGES = {"edgecolor": "black", "linewidth": 0.5}
HATCHES = {
    "simulator_s": "",
    "python_s": "///",
    "backend_s": "...",
    "cuda_launch_s": "xxx",
    "cuda_wait_s": "---",
}
RESOURCES = {"CPU": "#E69F00", "CPU + GPU": "#009E73", "GPU": "#56B4E9"}  # Okabe and Ito
COLOURS = {  # of stages in the bars; Okabe and Ito's
    "simulation": "#56B4E9",
    "inference": "#009E73",
    "replay": "#F0E442",
    "backpropagation": "#D55E00",
    "rest": "#BBBBBB",
}
STAGES = ("simulation", "inference", "backpropagation", "rest")
TITLE = "Where a step's time goes, and what crosses the borders"
LEGEND = "rest: storing, sampling, logging and what no stage covers"
TRANSITIONS = {  # what crosses which border, in words
    "to_simulator": ("Python to simulator", "#0072B2"),
    "to_backend": ("Python to backend", "#D55E00"),
    "to_cuda": ("backend to CUDA", "#CC79A7"),
}


def reduce(run: Run) -> dict | None:
    """A traced run -> seconds per environment step, transitions per iteration, shares."""
    trace = run.trace
    if not trace:
        return None
    num_envs = run.config["args"].get("num_envs", 1)
    cells = {stage: {} for stage in STAGES}
    to_backend = to_cuda = 0
    for name, fields in per_step(run.stages, trace).items():
        stage = cells[name if name in STAGES else "rest"]
        for layer in CPU_LAYERS:
            beside = fields.get(f"gpu_with_{layer}", 0)
            alone = fields.get(layer, 0) - beside
            resource = "GPU" if layer == "cuda_wait_s" else "CPU + GPU"
            for key, seconds in ((f"{layer} CPU", alone), (f"{layer} {resource}", beside)):
                if seconds:
                    stage[key] = stage.get(key, 0) + seconds
        to_backend += fields.get("backend_calls", 0) * num_envs
        to_cuda += fields.get("cuda_api_calls", 0) * num_envs
    on_gpu = trace["gpu_busy"] is not None
    total = sum(sum(stage.values()) for stage in cells.values())
    gpu_alone = sum(stage.get("cuda_wait_s GPU", 0) for stage in cells.values())
    return {
        "script": run.script,
        "row": run.row,
        "env_id": run.env_id,
        "block": f"{label(run.script)}: {run.env_id}",
        "bar": run.row,
        "run": shown(run.path),
        "seconds_per_step": total,
        "cells": cells,
        "transitions_per_iteration": {
            "to_simulator": int(bool(cells["simulation"])),  # one call steps all environments
            "to_backend": to_backend,
            "to_cuda": to_cuda if on_gpu else None,
        },
        "cpu_share": 1 - gpu_alone / total if on_gpu else None,
        "gpu_busy": trace["gpu_busy"],
    }


def reduce_all(runs: list[Run], reduce=reduce) -> list[tuple[Run, dict]]:
    """The newest run of each script, environment and row of which `reduce` makes something.

    `runs` are in the order in which they were made; one that was interrupted counts only where no
    other does. All are of the machine of the newest that counts: others, and those that are
    damaged, are named.
    """
    found: dict = {}
    newest = None
    for run in sorted(reversed(runs), key=lambda run: bool(run.missing)):  # whole ones first
        key = run.script, run.env_id, curves.ORDER.index(run.row)
        if key in found:
            continue
        try:
            row = reduce(run)
        except DAMAGED as error:
            reason = error if isinstance(error, ValueError) else "has a report that lacks something"
            print(f"skipped: {shown(run.path)} {reason}", file=sys.stderr)
            continue
        if not row:
            continue
        newest = newest or run
        if run_dirs.differences(run.config, newest.config):
            print(f"skipped: {shown(run.path)} is of another machine", file=sys.stderr)
        else:
            found[key] = run, row
    return [found[key] for key in sorted(found)]


def limits(row: dict) -> str:
    """What a simulator or a backend that took no time would gain (Amdahl's law), in words."""
    total = row["seconds_per_step"]
    layers = ["simulator", "backend"] if row["cells"]["simulation"] else ["backend"]
    spent = dict.fromkeys(layers, 0.0)
    for stage in row["cells"].values():
        for key, seconds in stage.items():
            layer = key.partition("_s ")[0]
            if layer in spent:
                spent[layer] += seconds
    said = []
    for layer, seconds in spent.items():
        share = seconds / total
        said.append(f"the {layer} takes {percent(share)}, without it {tables.gain(share)}")
    return f"{row['block']}, {row['bar']}: {'; '.join(said)}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def cells(rows: list[dict]) -> list[list[str]]:
    """The numbers as a table."""
    heading = ["script", "environment", "row", "us/step", *STAGES]
    heading += ["to simulator", "to backend", "to CUDA", "CPU %", "GPU busy %"]
    table = [heading]
    for row in rows:
        total = row["seconds_per_step"]
        line = [row["script"], row["env_id"], row["row"], f"{1e6 * total:,.1f}"]
        for stage in STAGES:
            spent = row["cells"][stage]
            line.append(percent(sum(spent.values()) / total if spent else None))
        for count in row["transitions_per_iteration"].values():
            line.append("-" if count is None else short(count))
        line += [percent(row["cpu_share"]), percent(row["gpu_busy"])]
        table.append(line)
    return table


def places(rows: list[dict], j: int, of: int, width: float) -> list[float]:
    """Where bar number `j` of a group stands, for each row's group."""
    return [i + (j - (of - 1) / 2) * width for i in range(len(rows))]


def bars(ax, rows: list[dict], shares: bool) -> None:
    """A group of bars per row, a bar per stage, stacked by layer and resource."""
    width = 0.8 / len(STAGES)
    for j, stage in enumerate(STAGES):
        for x, row in zip(places(rows, j, len(STAGES), width), rows, strict=True):
            bottom = 0.0
            scale = 100 / row["seconds_per_step"] if shares else 1e6
            for key, seconds in row["cells"][stage].items():
                layer, resource = key.split(" ", 1)
                height = scale * seconds
                bar = ax.bar(x, height, width * 0.92, bottom=bottom, **EDGES)
                bar[0].set(facecolor=RESOURCES[resource], hatch=HATCHES[layer])
                bottom += height
            if bottom:
                ax.annotate(f" {stage}", (x, bottom), ha="center", rotation=90, fontsize=6.5)
    labels = [row["bar"].replace("+", "\n+ ").replace(": ", ":\n") for row in rows]
    ax.set_xticks(range(len(rows)), labels, fontsize=8)
    ax.set_xlim(-0.6, len(rows) - 0.4)
    ax.grid(False, axis="x")
    ax.margins(y=0.35)  # for the names


def key(figure, rows: list[dict]) -> None:
    """What the hatches and colours of these rows mean, below the figure."""
    layers, resources = set(), set()
    for row in rows:
        for stage in row["cells"].values():
            for name in stage:
                layer, resource = name.split(" ", 1)
                layers.add(layer)
                resources.add(resource)
    patches = []
    for layer, title in CPU_LAYERS.items():
        if layer in layers:
            patches.append(Patch(facecolor="white", hatch=HATCHES[layer], label=title, **EDGES))
    for resource, colour in RESOURCES.items():
        if resource in resources and len(resources) > 1:
            patches.append(Patch(facecolor=colour, label=resource, **EDGES))
    figure.legend(
        handles=patches,
        title=LEGEND,
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        handlelength=2.4,
        handleheight=1.2,
    )


def draw_stages(rows: list[dict], runs: list[Run], title: str, shares: bool):
    """RL-Scope's figures: a block of three panels for the rows that have the same `block`."""
    blocks: dict = {}
    for row in rows:
        blocks.setdefault(row["block"], []).append(row)
    columns = min(len(blocks), 3)
    floors = -(-len(blocks) // columns)
    widest = max(map(len, blocks.values()))
    size = (max((2 + widest) * columns, 6), 7 * floors + 1)
    figure = plt.figure(figsize=size, layout="constrained")
    curves.headline(figure, title, runs)
    panes = figure.subfigures(floors, columns, squeeze=False)
    for pane, (block, mine) in zip(panes.flat, blocks.items(), strict=False):
        top, middle, bottom = pane.subplots(3, 1, height_ratios=(1, 2.4, 1.2))
        draw_totals(top, mine)
        bars(middle, mine, shares)
        draw_transitions(bottom, mine)
        top.set(title=block, ylabel="total\n(us per step)")
        middle.set_ylabel("% of a step" if shares else "us per environment step")
        bottom.set_ylabel("calls\nper iteration")
        for ax in (top, bottom):
            ax.set(xlim=middle.get_xlim(), xticks=[])
    bottom.legend(fontsize=7, frameon=False, loc="upper left", ncols=2, columnspacing=1)
    key(figure, rows)
    return figure


def draw_totals(ax, rows: list[dict]) -> None:
    """The time of a step."""
    totals = [1e6 * row["seconds_per_step"] for row in rows]
    made = ax.bar(range(len(rows)), totals, 0.5, color="0.6", **EDGES)
    ax.bar_label(made, map(short, totals), fontsize=8)
    ax.margins(y=0.3)  # for the numbers


def draw_transitions(ax, rows: list[dict]) -> None:
    """A group of bars per row."""
    calls = [row["transitions_per_iteration"] for row in rows]
    known = [name for name in TRANSITIONS if calls[0][name] is not None]
    width = 0.7 / len(known)
    heights = []
    for j, name in enumerate(known):
        text, colour = TRANSITIONS[name]
        counts = [each[name] for each in calls]
        xs = places(rows, j, len(known), width)
        made = ax.bar(xs, counts, width * 0.9, color=colour, label=text)
        ax.bar_label(made, map(short, counts), fontsize=7)
        heights += counts
    lowest = min(height for height in heights if height)
    ax.set_ylim(lowest / 3, max(heights) * 8)  # room for the numbers
    ax.set_yscale("log")  # after the limits, or it would guess some
    ax.yaxis.set_major_formatter(lambda y, _: short(y))
    ax.yaxis.set_minor_formatter(lambda *_: "")
    ax.grid(False)


def stages(run: Run) -> dict[str, float]:
    """Microseconds per environment step of the steady window, by the stages that have a colour."""
    found = dict.fromkeys(COLOURS, 0.0)
    for stage, seconds in run.stages["stages"].items():
        found[stage if stage in COLOURS else "rest"] += 1e6 * seconds / run.stages["env_steps"]
    found["rest"] += 1e6 / run.stages["sps_steady"] - sum(found.values())  # what no stage covers
    return found


def draw_bars(runs: list[Run]):
    """A panel per script with a bar per row: percent of the baseline's step, a colour per stage."""
    scripts: dict = {}
    for run in runs:
        scripts.setdefault(run.script, {})[run.row] = run  # the newest of a row
    size = (7, 1.4 + 0.36 * sum(len(rows) + 1 for rows in scripts.values()))
    heights = [len(rows) for rows in scripts.values()]
    figure, panels = plt.subplots(
        len(scripts),
        figsize=size,
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    longest = 0.0
    for ax, (script, rows) in zip(panels.flat, scripts.items(), strict=True):
        ordered = sorted(rows.values(), key=lambda run: curves.ORDER.index(run.row))
        whole = 1e6 / ordered[0].stages["sps_steady"]
        for y, run in enumerate(ordered):
            left = 0.0
            for stage, spent in stages(run).items():
                share = 100 * spent / whole
                ax.barh(y, share, left=left, color=COLOURS[stage], height=0.75)
                left += share
            ax.annotate(f" {short(1e6 / run.stages['sps_steady'])} us", (left, y), va="center")
            longest = max(longest, left)
        ax.set_yticks(range(len(ordered)), [run.row for run in ordered])
        ax.set_title(label(script), loc="left", fontsize=9)
        ax.grid(False, axis="y")
        ax.invert_yaxis()
    ax.set_xlim(0, 1.15 * longest)  # of all panels; room for the numbers
    panels.flat[-1].set_xlabel("time of an environment step, % of the baseline's")
    patches = [Patch(facecolor=colour, label=stage) for stage, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return figure


def write(
    runs: list[Run],
    out: Path,
    name: str = "breakdown",
    title: str = TITLE,
    group=None,
    shares: bool = False,
) -> list[Path]:
    """Tables and figures of the traced ones among `runs`; the files.

    `group(row)` gives another block and bar than script and row; `shares` draws percent of a step.
    """
    timed = [run for run in runs if run.stages.get("sps_steady") and run.stages.get("stages")]
    files = curves.save(draw_bars(timed), out / name) if timed and not group else []
    found = reduce_all(runs)
    if not found:
        print("no layers: no run has a complete trace (--stopwatch trace)", file=sys.stderr)
        return files
    chosen = [run for run, _ in found]
    rows = [row for _, row in found]
    for row in rows if group else ():
        row["block"], row["bar"] = group(row)
    record = run_dirs.record_of(chosen, rows)
    files += curves.save(draw_stages(rows, chosen, title, shares), out / f"{name}_stages")
    below = [limits(row) for row in rows]
    heading = "Where the time goes, from traced runs"
    tables.write_report(out / name, heading, cells(rows), record, below=below, labels=3)
    return files


def main(arguments: list[str] | None = None) -> int:
    return program.draw_runs(__doc__, "breakdown", write, arguments)


if __name__ == "__main__":
    program.start(main)
