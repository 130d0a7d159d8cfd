"""Where the time goes, as RL-Scope draws it: stages, resources, layers, transitions between them.

    python plots/breakdown.py runs/         every run in runs/ with a trace (--stopwatch trace)
    python plots/breakdown.py runs/A runs/B --out plots/results/breakdown_cpu

Written to --out: NAME.md and NAME.json with the numbers, and NAME_stages as PNG and SVG: per script
and row the microseconds per environment step of simulation, inference, backpropagation and the
rest, by resource (colour) and layer (hatch); above them the total on a log axis, below them the
transitions per iteration (figure 4 of RL-Scope, our rows in place of frameworks). Of several traced
runs of a row the newest counts.

An iteration is one environment step of the agent: of all its environments side by side. Scripts
that act, simulate and store in one captured function have one stage for it, the simulation. Seconds
per stage are those of the steady window, which was not traced; the trace divides them into layers.
What a run without a GPU cannot tell is left out, never drawn as 0. After Gleeson et al., "RL-Scope:
Cross-Stack Profiling for Deep Reinforcement Learning Workloads", MLSys 2021.
"""

import signal
import sys
from pathlib import Path

import curves
import matplotlib.pyplot as plt
import run_dirs
from matplotlib.patches import Patch
from run_dirs import ROOT, ROWS, Run, label, per_step, read_run, read_runs, short, shown
from traces import CPU_LAYERS

EDGES = {"edgecolor": "black", "linewidth": 0.5}
HATCHES = dict(zip(CPU_LAYERS, ("", "///", "...", "xxx", "---"), strict=True))
RESOURCES = {"CPU": "#E69F00", "CPU + GPU": "#009E73", "GPU": "#56B4E9"}  # Okabe and Ito
STAGES = {"simulation": "sim", "inference": "inf", "backpropagation": "bp", "rest": "rest"}
LEGEND = "sim: simulation, inf: inference, bp: backpropagation, rest: storing, logging, untracked"
TRANSITIONS = {  # what crosses which border, in words
    "to_simulator": ("Python to simulator", "#0072B2"),
    "to_backend": ("Python to backend", "#D55E00"),
    "to_cuda": ("backend to CUDA", "#CC79A7"),
}


def reduce(run: Run) -> dict:
    """A traced run -> seconds per environment step, transitions per iteration, shares."""
    trace, num_envs = run.trace, run.config["args"].get("num_envs", 1)
    cells, calls = {stage: {} for stage in STAGES}, dict.fromkeys(TRANSITIONS, 0)
    calls["to_simulator"] = 1  # one call steps all environments
    for name, fields in per_step(run.stages, trace).items():
        stage = cells[name if name in STAGES else "rest"]
        for layer in CPU_LAYERS:
            beside = fields.get(f"gpu_with_{layer}", 0)
            alone = fields.get(layer, 0) - beside
            resource = "GPU" if layer == "cuda_wait_s" else "CPU + GPU"
            for key, seconds in ((f"{layer} CPU", alone), (f"{layer} {resource}", beside)):
                if seconds:
                    stage[key] = stage.get(key, 0) + seconds
        calls["to_backend"] += fields.get("backend_calls", 0) * num_envs
        calls["to_cuda"] += fields.get("cuda_api_calls", 0) * num_envs
    if trace["gpu_busy"] is None:
        calls["to_cuda"] = None
    total = sum(sum(stage.values()) for stage in cells.values())
    gpu_alone = sum(stage.get("cuda_wait_s GPU", 0) for stage in cells.values())
    return {
        "script": run.script,
        "row": run.row,
        "env_id": run.env_id,
        "run": shown(run.path),
        "seconds_per_step": total,
        "cells": cells,
        "transitions_per_iteration": calls,
        "cpu_share": 1 - gpu_alone / total if trace["gpu_busy"] is not None else None,
        "gpu_busy": trace["gpu_busy"],
    }


def reduce_all(runs: list[Run]) -> list[tuple[Run, dict]]:
    """The newest traced run of each script, environment and row, and what `reduce` makes of it.

    `runs` are in the order in which they were made. All are of the newest one's machine: others,
    and those that are damaged, are named.
    """
    found: dict = {}
    for run in reversed(runs):
        key = run.script, run.env_id, list(ROWS).index(run.row)
        if key in found:
            continue
        try:
            row = reduce(run) if run.trace else None
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            reason = error if isinstance(error, ValueError) else "has a report that lacks something"
            print(f"skipped: {shown(run.path)} {reason}", file=sys.stderr)
            continue
        newest = next(iter(found.values()), (run,))[0]
        if row and run_dirs.differences(run.config, newest.config):
            print(f"skipped: {shown(run.path)} is of another machine", file=sys.stderr)
        elif row:
            found[key] = run, row
    return [found[key] for key in sorted(found)]


def cells(rows: list[dict]) -> list[list[str]]:
    """The numbers as a table."""
    table = [["script", "environment", "row", "us/step", *STAGES, "to simulator", "to backend"]]
    table[0] += ["to CUDA", "CPU %", "GPU busy %"]
    for row in rows:
        total, calls = row["seconds_per_step"], row["transitions_per_iteration"]
        shares = [f"{100 * sum(row['cells'][stage].values()) / total:.0f}%" for stage in STAGES]
        counts = [calls[name] for name in TRANSITIONS]
        percents = [row["cpu_share"], row["gpu_busy"]]
        table.append(
            [row["script"], row["env_id"], row["row"], f"{1e6 * total:,.1f}", *shares]
            + ["-" if count is None else short(count) for count in counts]
            + ["-" if share is None else f"{100 * share:.0f}%" for share in percents]
        )
    return table


def bars(ax, rows: list[dict]) -> None:
    """A group of bars per row, a bar per stage, stacked by layer and resource."""
    width = 0.8 / len(STAGES)
    for i, row in enumerate(rows):
        for j, (stage, name) in enumerate(STAGES.items()):
            x, bottom = i + (j - (len(STAGES) - 1) / 2) * width, 0.0
            for key, seconds in row["cells"][stage].items():
                layer, resource = key.split(" ", 1)
                look = {"color": RESOURCES[resource], "hatch": HATCHES[layer]}
                ax.bar(x, 1e6 * seconds, width * 0.92, bottom=bottom, **look, **EDGES)
                bottom += 1e6 * seconds
            ax.text(x, bottom, name, ha="center", va="bottom", fontsize=6.5, color="0.3")
    labels = [row["row"].replace("+", "\n+ ") for row in rows]
    ax.set_xticks(range(len(rows)), labels, fontsize=8)
    ax.set_xlim(-0.6, len(rows) - 0.4)
    ax.grid(False, axis="x")


def key(figure, rows: list[dict]) -> None:
    """What the hatches and colours of these rows mean, below the figure."""
    used = [k.split(" ", 1) for row in rows for stage in row["cells"].values() for k in stage]
    layers, resources = map(set, zip(*used, strict=True))
    looks = {name: {"hatch": HATCHES[k]} for k, name in CPU_LAYERS.items() if k in layers}
    looks |= {name: {"facecolor": RESOURCES[name]} for name in RESOURCES if name in resources}
    patches = [
        Patch(label=name, **{"facecolor": "white"} | look | EDGES) for name, look in looks.items()
    ]
    sizes = {"fontsize": 8, "title_fontsize": 8, "handlelength": 2.4, "handleheight": 1.2}
    place = {"loc": "outside lower center", "ncols": 5, "frameon": False}
    figure.legend(handles=patches, title=LEGEND, **place, **sizes)


def draw_stages(rows: list[dict], runs: list[Run]):
    """RL-Scope's figure 4: a block of three panels per script and environment."""
    blocks: dict = {}
    for row in rows:
        blocks.setdefault((row["script"], row["env_id"]), []).append(row)
    columns = min(len(blocks), 3)
    floors = -(-len(blocks) // columns)
    size = (max(4.0 * columns, 6), 6.5 * floors + 1)
    figure = plt.figure(figsize=size, layout="constrained")
    curves.headline(figure, "Where a step's time goes, and what crosses the borders", runs)
    panes = figure.subfigures(floors, columns, squeeze=False).flat
    for pane, ((script, env_id), mine) in zip(panes, blocks.items(), strict=False):
        top, middle, bottom = pane.subplots(3, 1, height_ratios=(1, 2.4, 1.2))
        top.set(title=f"{label(script)}: {env_id}", ylabel="total\n(us per step)")
        bars(middle, mine)
        middle.set_ylabel("us per environment step")
        draw_totals(top, bottom, mine)
        bottom.set_ylabel("transitions\nper iteration")
        for ax in (top, bottom):
            ax.set(xlim=middle.get_xlim(), xticks=[])
    bottom.legend(fontsize=7, frameon=False, loc="upper left", ncols=2, columnspacing=1)
    key(figure, rows)
    return figure


def draw_totals(top, bottom, rows: list[dict]) -> None:
    """Of one script, on log axes: the time of a step, and the transitions per iteration."""
    totals = [1e6 * row["seconds_per_step"] for row in rows]
    made = top.bar(range(len(rows)), totals, 0.5, color="0.6", **EDGES)
    top.bar_label(made, map(short, totals), fontsize=8)
    calls = [row["transitions_per_iteration"] for row in rows]
    known = [name for name in TRANSITIONS if calls[0][name] is not None]
    width = 0.7 / len(known)
    for j, name in enumerate(known):
        text, colour = TRANSITIONS[name]
        xs = [i + (j - (len(known) - 1) / 2) * width for i in range(len(rows))]
        counts = [each[name] for each in calls]
        made = bottom.bar(xs, counts, width * 0.9, color=colour, label=text)
        bottom.bar_label(made, map(short, counts), fontsize=7)
    for ax, heights in ((top, totals), (bottom, [each[name] for each in calls for name in known])):
        ax.set_ylim(min(height for height in heights if height) / 3, max(heights) * 8)
        ax.set_yscale("log")  # after the limits, or it would guess some
        ax.yaxis.set_major_formatter(lambda y, _: short(y))
        ax.yaxis.set_minor_formatter(lambda *_: "")
        ax.grid(False)


def write(runs: list[Run], out: Path, name: str = "breakdown") -> list[Path]:
    """Tables and figures of the traced ones among `runs`; the files."""
    found = reduce_all(runs)
    if not found:
        print("no breakdown: no run has a complete trace (--stopwatch trace)", file=sys.stderr)
        return []
    chosen, rows = [run for run, _ in found], [row for _, row in found]
    machine = run_dirs.machine([run.config for run in chosen])
    above = ["Where the time goes, from traced runs", *run_dirs.describe(machine)]
    record = {"schema": 1, "machine": machine, "rows": rows}
    record["commands"] = [run.config["command"] for run in chosen]
    run_dirs.write_report(out / name, above, cells(rows), [], record, labels=3)
    return curves.save(draw_stages(rows, chosen), out / f"{name}_stages")


def main(arguments: list[str] | None = None) -> int:
    parser = run_dirs.make_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out/breakdown", help="NAME")
    options = parser.parse_args(arguments)
    runs, skipped = read_runs(options.runs, lambda path: read_run(path, whole=False))
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    files = write(runs, options.out.parent, options.out.name)
    for path in files:
        print(f"figure: {shown(path)}")
    return int(not files)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet where nobody reads on, as in "| head -1"
    sys.exit(main())
