"""Where the time goes, as RL-Scope draws it: stages, resources, layers, transitions between them.

    python plots/breakdown.py runs/                 every traced run (--stopwatch trace) in runs/
    python plots/breakdown.py runs/A runs/B --out plots/results/breakdown_cpu

Written, for the rows that were traced, to --out: NAME.md and NAME.json with the numbers, and as PNG
and SVG

    NAME_stages       per script and row: microseconds per environment step of simulation,
                      inference, backpropagation and the rest, by resource (colour) and layer
                      (hatch); above them the total on a log axis, below them the transitions per
                      iteration (figure 4 of RL-Scope, our rows in place of frameworks)
    NAME_algorithms   the same in percent over the scripts (figure 5)
    NAME_simulators   the same in percent over the simulators (figure 7)

An iteration is one environment step of the agent: of all its environments side by side. Seconds per
stage are those of the steady window, which was not traced; the trace divides them into layers. What
a run without a GPU cannot tell is left out, never drawn as 0. After Gleeson et al., "RL-Scope:
Cross-Stack Profiling for Deep Reinforcement Learning Workloads", MLSys 2021.
"""

import argparse
import sys
from pathlib import Path

import run_dirs
from run_dirs import ROOT, ROWS, Run, label, per_step, read_runs, shown

LAYERS = {  # field of the trace -> name, hatch
    "simulator_s": ("simulator", ""),
    "python_s": ("Python", "///"),
    "backend_s": ("backend", "..."),
    "cuda_launch_s": ("CUDA API", "xxx"),
    "cuda_wait_s": ("waiting for the GPU", "---"),
}
RESOURCES = {"CPU": "#E69F00", "CPU + GPU": "#009E73", "GPU": "#56B4E9"}  # Okabe and Ito
STAGES = ("simulation", "inference", "backpropagation", "rest")
SHORT = ("sim", "inf", "bp", "rest")
LEGEND = "sim: simulation, inf: inference, bp: backpropagation, rest: storing, logging, untracked"
TRANSITIONS = {  # what crosses which border, in words
    "to_simulator": ("Python to simulator", "#0072B2"),
    "to_backend": ("Python to backend", "#D55E00"),
    "to_cuda": ("backend to CUDA", "#CC79A7"),
}
OFF_POLICY = ("sac", "td3")


def reduce(run: Run) -> dict:
    """A traced run -> seconds per environment step, transitions per iteration, shares."""
    trace, num_envs = run.stages["trace"], run.config["args"].get("num_envs", 1)
    cells, calls = {stage: {} for stage in STAGES}, dict.fromkeys(TRANSITIONS, 0)
    calls["to_simulator"] = 1  # one call steps all environments
    for name, fields in per_step(run.stages).items():
        stage = cells[name if name in STAGES else "rest"]
        for layer in LAYERS:
            beside = fields.get(f"gpu_with_{layer}", 0)
            alone = fields.get(layer, 0) - beside
            resource = "GPU" if layer == "cuda_wait_s" else "CPU + GPU"
            for key, seconds in ((f"{layer} CPU", alone), (f"{layer} {resource}", beside)):
                if seconds:
                    stage[key] = stage.get(key, 0) + seconds
        calls["to_backend"] += fields["backend_calls"] * num_envs
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
        "sps_steady": run.stages["sps_steady"],
        "inflation": trace["inflation"],
        "seconds_per_step": total,
        "cells": cells,
        "transitions_per_iteration": calls,
        "cpu_share": 1 - gpu_alone / total if trace["gpu_busy"] is not None else None,
        "gpu_busy": trace["gpu_busy"],
        "simulation_share": sum(cells["simulation"].values()) / total,
    }


def short(x: float) -> str:
    """Three digits, and never 1e+03."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def newest(runs: list[Run]) -> list[dict]:
    """The traced runs, reduced: of each script, environment and row the newest."""
    found = {}
    for run in runs:
        if run.stages.get("trace"):
            found[run.script, run.env_id, run.row] = reduce(run)
    order = {row: i for i, row in enumerate(ROWS)}
    return sorted(found.values(), key=lambda r: (r["script"], r["env_id"], order[r["row"]]))


def cells(rows: list[dict]) -> list[list[str]]:
    """The numbers as a table; RL-Scope's headline shares are its last columns."""
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


def headlines(rows: list[dict]) -> list[str]:
    """RL-Scope's findings, asked of these runs."""

    def span(values: list[float]) -> str:
        low, high = (f"{100 * value:.0f}" for value in (min(values), max(values)))
        return f"{low}%" if low == high else f"{low}% to {high}%"

    lines = []
    shares = [row["cpu_share"] for row in rows if row["cpu_share"] is not None]
    said = span(shares) if shares else "not measured, there was no GPU to share with"
    lines.append(f"share of time with the CPU at work (RL-Scope: about 90%): {said}")
    for policy, off in (("off-policy", True), ("on-policy", False)):
        for best in (False, True):
            shares = [
                row["simulation_share"]
                for row in rows
                if row["script"].startswith(OFF_POLICY) == off
                and (row["row"] not in ("baseline", "eager") if best else row["row"] == "baseline")
            ]
            if shares:
                what = "variants, compiled or captured" if best else "baselines"
                lines.append(f"simulation, {policy}, {what}: {span(shares)} of the time")
    for script, env_id in dict.fromkeys((row["script"], row["env_id"]) for row in rows):
        mine = [row for row in rows if (row["script"], row["env_id"]) == (script, env_id)]
        calls = [row["transitions_per_iteration"] for row in mine]
        if mine[0]["row"] == "baseline" and len(mine) > 1:
            for name in ("to_backend", "to_cuda"):
                one, other = calls[0][name], calls[-1][name]
                if one and other:
                    what = f"{TRANSITIONS[name][0]} per iteration, baseline to {mine[-1]['row']}"
                    lines.append(
                        f"{script}, {env_id}, {what}: {short(one)} to {short(other)}, "
                        f"{short(one / other)} times fewer"
                    )
    return lines


def bars(ax, rows: list[dict], labels: list[str], percent: bool) -> None:
    """A group of bars per row, a bar per stage, stacked by layer and resource."""
    width = 0.8 / len(STAGES)
    for i, row in enumerate(rows):
        scale = (100 / row["seconds_per_step"]) if percent else 1e6
        for j, stage in enumerate(STAGES):
            x, bottom = i + (j - (len(STAGES) - 1) / 2) * width, 0.0
            for key, seconds in row["cells"][stage].items():
                layer, resource = key.split(" ", 1)
                ax.bar(
                    x,
                    seconds * scale,
                    width * 0.92,
                    bottom=bottom,
                    color=RESOURCES[resource],
                    hatch=LAYERS[layer][1],
                    edgecolor="black",
                    linewidth=0.5,
                )
                bottom += seconds * scale
            ax.annotate(
                SHORT[j],
                (x, bottom),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
                color="0.3",
            )
    ax.set_xticks(range(len(rows)), labels, fontsize=8)
    ax.set_xlim(-0.6, len(rows) - 0.4)
    ax.grid(True, axis="y", color="0.9")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def key(figure, rows: list[dict]) -> None:
    """What the hatches and colours of these rows mean, below the figure."""
    from matplotlib.patches import Patch

    used = [k for row in rows for stage in row["cells"].values() for k in stage]
    layers = {name: v for name, v in LAYERS.items() if any(k.startswith(name) for k in used)}
    resources = {k.split(" ", 1)[1] for k in used}
    patches = [
        Patch(facecolor="white", edgecolor="black", linewidth=0.5, hatch=hatch, label=name)
        for name, hatch in layers.values()
    ]
    patches += [
        Patch(facecolor=colour, edgecolor="black", linewidth=0.5, label=name)
        for name, colour in RESOURCES.items()
        if name in resources
    ]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=min(len(patches), 5),
        title=LEGEND,
        title_fontsize=8,
        fontsize=8,
        frameon=False,
        handlelength=2.4,
        handleheight=1.2,
    )


def title(figure, text: str, hardware: str) -> None:
    figure.suptitle(f"{text}\n", fontsize=12)
    figure.text(0.5, 0.945, hardware, ha="center", fontsize=8.5, color="0.35")


def draw_stages(rows: list[dict], hardware: str):
    """RL-Scope's figure 4: a column per script and environment."""
    import matplotlib.pyplot as plt

    columns = list(dict.fromkeys((row["script"], row["env_id"]) for row in rows))
    figure, grid = plt.subplots(
        3,
        len(columns),
        figsize=(max(4.0 * len(columns), 6), 7.5),
        layout="constrained",
        height_ratios=(1, 2.4, 1.2),
        squeeze=False,
    )
    title(figure, "Where a step's time goes, and what crosses the borders", hardware)
    for (top, middle, bottom), column in zip(grid.T, columns, strict=True):
        mine = [row for row in rows if (row["script"], row["env_id"]) == column]
        names = [row["row"].replace("+", "\n+ ") for row in mine]
        bars(middle, mine, names, percent=False)
        totals = [1e6 * row["seconds_per_step"] for row in mine]
        top.bar(range(len(mine)), totals, 0.5, color="0.6", edgecolor="black", linewidth=0.5)
        top.set_title(f"{label(column[0])}: {column[1]}", fontsize=10)
        counts = [row["transitions_per_iteration"] for row in mine]
        known = [name for name in TRANSITIONS if counts[0][name] is not None]
        width = 0.7 / len(known)
        for j, name in enumerate(known):
            text, colour = TRANSITIONS[name]
            for i, count in enumerate(counts):
                x = i + (j - (len(known) - 1) / 2) * width
                bottom.bar(x, count[name], width * 0.9, color=colour, label="" if i else text)
                bottom.annotate(
                    short(count[name]),
                    (x, count[name]),
                    (0, 1),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
        for i, total in enumerate(totals):
            top.annotate(
                short(total), (i, total), (0, 1), textcoords="offset points", ha="center", size=8
            )
        most = max(count[name] for count in counts for name in known)
        for ax, low, high in ((top, min(totals), max(totals)), (bottom, 1, most)):
            ax.set(yscale="log", xlim=middle.get_xlim(), ylim=(low / 3, high * 5))
            ax.set_xticks([])
            ax.yaxis.set_major_formatter(lambda y, _: short(y))
            ax.yaxis.set_minor_formatter(lambda *_: "")
            ax.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("total\n(us per step)")
    grid[1, 0].set_ylabel("us per environment step")
    grid[2, 0].set_ylabel("transitions\nper iteration")
    grid[2, 0].legend(fontsize=7, frameon=False, loc="upper left", ncols=2, columnspacing=1)
    key(figure, rows)
    return figure


def draw_shares(rows: list[dict], hardware: str, over: str):
    """RL-Scope's figures 5 and 7: percent of the time, a panel for the baselines and one after."""
    import matplotlib.pyplot as plt

    last = {(row["script"], row["env_id"]): row for row in rows if row["row"] != "baseline"}
    panels = {
        "baseline": [row for row in rows if row["row"] == "baseline"],
        "variant, with all that ran here": list(last.values()),
    }
    panels = {name: mine for name, mine in panels.items() if mine}
    most = max(map(len, panels.values()))
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(max(1.9 * most, 6), 3.3 * len(panels) + 0.6),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    title(figure, f"Share of the time, over {over}", hardware)
    for ax, (name, mine) in zip(axes[:, 0], panels.items(), strict=True):
        if over == "simulators":
            mine = sorted(mine, key=lambda row: row["env_id"])
        lines = [(label(row["script"]), row["env_id"]) for row in mine]
        named = [f"{b}\n{a}" if over == "simulators" else f"{a}\n{b}" for a, b in lines]
        bars(ax, mine, named, percent=True)
        ax.set_title(name, fontsize=10)
        ax.set_ylabel("% of the time")
        ax.set_ylim(0, 105)
    key(figure, rows)
    return figure


def write(runs: list[Run], out: Path, name: str = "breakdown") -> list[Path]:
    """Tables and figures of the traced ones among `runs`; the files."""
    from curves import save

    rows = newest(runs)
    if not rows:
        print("no breakdown: no run was traced (--stopwatch trace)", file=sys.stderr)
        return []
    chosen = [run for run in runs if shown(run.path) in {row["run"] for row in rows}]
    hardware = ", ".join(dict.fromkeys(run.hardware for run in chosen))
    machine = run_dirs.machine([run.config for run in chosen])
    above = ["Where the time goes, from traced runs", *run_dirs.describe(machine)]
    below = headlines(rows)
    record = {"schema": 1, "machine": machine, "rows": rows, "headlines": below}
    record["commands"] = [run.config["command"] for run in chosen]
    run_dirs.write_report(out / name, above, cells(rows), below, record, labels=3)
    files = save(draw_stages(rows, hardware), out / f"{name}_stages")
    for over in ("algorithms", "simulators"):
        files += save(draw_shares(rows, hardware, over), out / f"{name}_{over}")
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out/breakdown", help="NAME")
    options = parser.parse_args(arguments)
    runs, skipped = read_runs(options.runs)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    files = write(runs, options.out.parent, options.out.name)
    for path in files:
        print(f"figure: {shown(path)}")
    return int(not files)


if __name__ == "__main__":
    sys.exit(main())
