"""Curves over the length of a run, and scores of sweeps: learning, speed, GPU utilization.

    python plots/curves.py runs/                    all finished runs in runs/
    python plots/curves.py runs/gae_lambda --band std --target 1000 --html
    python plots/curves.py runs/batch_size --by num_steps --where seed=1 seed=2 --x seconds
    python plots/curves.py runs/A runs/B --out plots/results/ppo_halfcheetah_learning_cpu

A panel is a script and environment. A line is what differs within it: the row of the speed-up table
(baseline, compile, ...) and the settings that vary, or those that --by names; seeds never do.
Written as PNG and SVG (--pdf: PDF too) to --out:

    NAME_learning     --metric (episodic return) over environment steps and over wall-clock time, or
                      over --x: mean over the runs, --band around it, each run thin
    NAME_speed        steps/s over wall-clock time, warm-up and logging included
    NAME_gpu          GPU utilization (NVML) over the wall-clock time of the steady window, and the
                      area under it: the GPU-seconds in which at least one kernel ran
    NAME_scores       of more than one line with two runs or more per task: interquartile mean of
                      the last values with 95% intervals (of less than 5 runs they are too narrow),
                      performance profile and, with --target, the share of runs that have reached
                      it by then; NAME_scores.md and .json
    NAME.html         --html: the learning curves to explore, in one file that fetches nothing

A curve is the mean of the last --last values of the metric (returns: of episodes; of rollouts,
where a script logs the mean of each), linear between two of them. All runs of a line are looked at
wherever one of them has a value; beyond its own first and last a run has none. The mean is over the
runs that have one, bands where there are two or more. After Agarwal et al., "Deep Reinforcement
Learning at the Edge of the Statistical Precipice", NeurIPS 2021 (interquartile means, stratified
bootstrap, performance profiles).
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np
from run_dirs import (
    FREE_ARGS,
    ROOT,
    ROWS,
    Run,
    Series,
    as_markdown,
    as_text,
    label,
    read_runs,
    read_series,
    shown,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

POINTS = 1000  # of a curve at most
SAMPLES = 2000  # of a bootstrap
RETURN, SPS = "charts/episodic_return", "charts/SPS"
STYLES = {  # Okabe and Ito's colours; dashes tell them apart in print
    "baseline": {"color": "black", "linestyle": "-"},
    "eager": {"color": "#56B4E9", "linestyle": "--"},
    "compile": {"color": "#D55E00", "linestyle": "-"},
    "cudagraphs": {"color": "#009E73", "linestyle": "-."},
    "compile+cudagraphs": {"color": "#0072B2", "linestyle": "-"},
}
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "black")
DASHES = ("-", "--", "-.", ":")


# Statistics over runs: arrays are (s, g), s runs on a grid of g points, NaN where unknown


def running_mean(values: np.ndarray, count: int) -> np.ndarray:
    """Mean of each value and up to `count` - 1 before it: (n,) -> (n,)."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - count, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def on_grid(grid: np.ndarray, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`values` at `x`, linear in between, NaN outside of them: (n,) -> (g,)."""
    return np.interp(grid, x, values, left=np.nan, right=np.nan)


def union_grid(xs: list[np.ndarray], most: int = POINTS) -> np.ndarray:
    """Every x of every run, thinned to `most` of them: (n,) each -> (g,)."""
    grid = np.unique(np.concatenate(xs))
    return grid[thinned(len(grid), most)]


def with_middles(grid: np.ndarray) -> np.ndarray:
    """`grid` and the middles between its points, where a gap between two runs shows."""
    return np.sort(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))


def thinned(count: int, most: int) -> np.ndarray:
    """Up to `most` of `count` indices, evenly, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, most).round().astype(int))


def mean_of_known(curves: np.ndarray) -> np.ndarray:
    """(s, g) -> (g,)."""
    counts = (~np.isnan(curves)).sum(0)
    return np.where(counts, np.nansum(curves, 0) / np.maximum(counts, 1), np.nan)


def bootstrap(curves: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """95% percentile interval of the mean over runs: (s, g) -> two (g,)."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(curves), size=(SAMPLES, len(curves)))
    weights = np.stack([np.bincount(pick, minlength=len(curves)) for pick in picks])  # (b, s)
    known = ~np.isnan(curves)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = weights @ np.nan_to_num(curves) / (weights @ known)  # (b, g); 0 / 0 is unknown
    return np.nanpercentile(means, (2.5, 97.5), axis=0)


def deviation(curves: np.ndarray) -> np.ndarray:
    """Sample standard deviation over runs: (s, g) -> (g,)."""
    counts = (~np.isnan(curves)).sum(0)
    squares = np.nansum((curves - mean_of_known(curves)) ** 2, 0)
    return np.sqrt(squares / np.maximum(counts - 1, 1))


def around_mean(width: np.ndarray, curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return mean_of_known(curves) - width, mean_of_known(curves) + width


BANDS: dict[str, Callable] = {
    "bootstrap": bootstrap,
    "std": lambda c: around_mean(deviation(c), c),
    "se": lambda c: around_mean(deviation(c) / np.sqrt((~np.isnan(c)).sum(0)), c),
    "percentiles": lambda c: np.nanpercentile(c, (10, 90), axis=0),
}
BAND_NAMES = {
    "bootstrap": "95% interval of the mean",
    "std": "standard deviation",
    "se": "standard error",
    "percentiles": "10th to 90th percentile",
    "none": "no band",
}


def band(kind: str, curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s, g) -> low and high (g,), NaN where fewer than two runs are known."""
    low, high = np.full((2, curves.shape[1]), np.nan)
    enough = (~np.isnan(curves)).sum(0) > 1
    if kind != "none" and enough.any():
        low[enough], high[enough] = BANDS[kind](curves[:, enough])
    return low, high


def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean, that of the middle half: (..., n) -> (...)."""
    ordered = np.sort(scores, axis=-1)
    count = ordered.shape[-1]
    cut = count // 4
    return ordered[..., cut : count - cut].mean(-1)


def stratified(scores: list[np.ndarray], statistic: Callable, seed: int = 0) -> tuple[float, float]:
    """95% interval of `statistic` of the runs of all tasks together, drawn anew within each task.

    `scores` holds (runs,) per task.
    """
    rng = np.random.default_rng(seed)
    draws = [task[rng.integers(len(task), size=(SAMPLES, len(task)))] for task in scores]
    return tuple(np.percentile(statistic(np.concatenate(draws, axis=1)), (2.5, 97.5)))


def performance_profile(scores: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Share of the runs with at least each level: (n,), (l,) -> (l,)."""
    return (scores[:, None] >= levels).mean(0)


def first_reached(x: np.ndarray, values: np.ndarray, target: float) -> float:
    """The first x at which `values` are at least `target`; infinity if never."""
    reached = np.flatnonzero(values >= target)
    return float(x[reached[0]]) if len(reached) else np.inf


# Which runs are one line


def varying(runs: list[Run]) -> list[str]:
    """The settings that tell runs of a row apart, as few as do; seeds are none."""
    settings = [run.config["args"] for run in runs]
    names = dict.fromkeys(name for args in settings for name in args)
    names = [name for name in names if name not in FREE_ARGS | {"env_id"}]
    found, parts = [], [(run.row,) for run in runs]
    for name in names:
        finer = [(*part, repr(args.get(name))) for part, args in zip(parts, settings, strict=True)]
        if len(set(finer)) > len(set(parts)):
            found, parts = [*found, name], finer
    return found


def groups(runs: list[Run], by: list[str] | None = None) -> dict[tuple[str, str], dict]:
    """{(script, environment): {line: runs}}: rows in their order, settings in theirs."""
    panels: dict = {}
    for run in runs:
        panels.setdefault((run.script, run.env_id), []).append(run)
    found = {}
    for panel in sorted(panels):
        mine = panels[panel]
        rows = {run.row for run in mine}
        names = varying(mine) if by is None else by
        lines: dict = {}
        for run in sorted(mine, key=lambda run: (order(run, names), run.path.name)):
            values = [f"{name}={shorter(run.config['args'].get(name))}" for name in names]
            parts = [run.row] if len(rows) > 1 or not names else []
            lines.setdefault(", ".join([*parts, *values]), []).append(run)
        found[panel] = lines
    return found


def order(run: Run, names: list[str]) -> tuple:
    """Rows as in the table, numbers by size, all else by its text."""
    values = [run.config["args"].get(name) for name in names]
    keys = [(0, v, "") if isinstance(v, int | float) else (1, 0, str(v)) for v in values]
    return list(ROWS).index(run.row), *keys


def shorter(value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def styles(lines: list[str]) -> dict[str, dict]:
    """A colour and dashes per line, the same for the same rows everywhere."""
    if set(lines) <= set(STYLES):
        return {line: STYLES[line] for line in lines}
    colours = cycle(PALETTE)
    return {
        line: {"color": next(colours), "linestyle": DASHES[i // len(PALETTE) % len(DASHES)]}
        for i, line in enumerate(lines)
    }


def check_names(runs: list[Run], names: list[str]) -> None:
    """ValueError unless some run has each setting."""
    for name in names:
        if not any(name in run.config["args"] for run in runs):
            raise ValueError(f"no run has a setting {name!r}")


def matching(runs: list[Run], conditions: list[str]) -> list[Run]:
    """The runs with these settings, NAME=VALUE; several values of a name are alternatives."""
    wanted: dict = {}
    for condition in conditions:
        name, _, value = condition.partition("=")
        wanted.setdefault(name.lstrip("-").replace("-", "_"), set()).add(value)
    check_names(runs, list(wanted))

    def is_one_of(value, texts: set[str]) -> bool:
        with suppress(ValueError):
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value in [float(text) for text in texts]
        return str(value).lower() in [text.lower() for text in texts]

    return [
        run
        for run in runs
        if all(is_one_of(run.config["args"].get(name), texts) for name, texts in wanted.items())
    ]


def curve(series: dict[str, Series], metric: str, axis: str, last: int) -> tuple | None:
    """A run's (x, y): `axis` is steps, seconds or another metric; None without either."""
    if metric not in series:
        return None
    found, finite = series[metric], np.isfinite(series[metric].values)
    found = Series(found.steps[finite], found.seconds[finite], found.values[finite])
    if not len(found.values):
        return None
    y = running_mean(found.values, last)
    if axis in ("steps", "seconds"):
        return getattr(found, axis), y
    if axis not in series:
        return None
    other = series[axis]
    x = on_grid(found.steps, other.steps, other.values)
    known = ~np.isnan(x)
    rising = np.argsort(x[known], kind="stable")
    return (x[known][rising], y[known][rising]) if known.any() else None


# Drawing


def spread_labels(ys: list[float], least: float) -> list[float]:
    """`ys` moved apart, as little as needed, to be `least` from each other."""
    order, placed = np.argsort(ys), np.array(ys, dtype=float)
    for one, other in zip(order, order[1:], strict=False):
        placed[other] = max(placed[other], placed[one] + least)
    return list(placed - (placed.mean() - np.mean(ys)))


def name_ends(ax, ends: dict[str, tuple[float, float]], looks: dict[str, dict]) -> None:
    """Writes each line's name beside its end (x, y), in its colour, none over another."""
    ax.get_xlim(), ax.get_ylim()  # fixes the limits, and with them what transData does
    to_axes = ax.transData + ax.transAxes.inverted()
    ys = [to_axes.transform(end)[1] for end in ends.values()]
    for (line, end), y in zip(ends.items(), spread_labels(ys, 0.09), strict=True):
        colour, x = looks[line]["color"], to_axes.transform(end)[0]
        ax.annotate(
            line,
            end,
            (min(x, 1) + 0.02, y),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=colour,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": colour, "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def tidy(ax) -> None:
    ax.grid(True, color="0.9")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0)


def draw_band(ax, curves: list[tuple], kind: str, look: dict) -> tuple[float, float]:
    """A line of the mean, its band and each run, from (x, y) each -> the line's end."""
    grid = with_middles(union_grid([x for x, _ in curves]))
    values = np.array([on_grid(grid, *each) for each in curves])
    mean = mean_of_known(values)
    look = look | {"marker": "o" if len(grid) == 1 else None}  # one value is a point
    for x, y in curves:
        ax.plot(x, y, linewidth=0.5, alpha=0.45, **look)
    ax.fill_between(grid, *band(kind, values), color=look["color"], alpha=0.18, linewidth=0)
    ax.plot(grid, mean, linewidth=1.8, **look)
    last = np.flatnonzero(~np.isnan(mean))[-1]
    return float(grid[last]), float(mean[last])


def panels(found: dict, columns: int, heading: str, hardware: str, height: float = 3.1):
    """A figure with a row of `columns` panels per script and environment; both."""
    figure, grid = plt.subplots(
        len(found),
        columns,
        figsize=(5.2 * columns, height * len(found) + 0.7),
        layout="constrained",
        squeeze=False,
    )
    headline(figure, heading, hardware)
    return figure, grid


def headline(figure, text: str, hardware: str) -> None:
    """A title, and below it, smaller, where it was measured."""
    figure.suptitle(f"{text}\n", fontsize=12)
    at = 1 - 0.43 / figure.get_figheight()
    figure.text(0.5, at, hardware, ha="center", fontsize=8.5, color="0.35")


def hardware_of(runs: list[Run]) -> str:
    return ", ".join(dict.fromkeys(run.hardware for run in runs))


def name_of(script: str, env_id: str, lines: dict) -> str:
    seeds = sorted({len(runs) for runs in lines.values()})
    count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"{label(script)}: {env_id}, {count} run{'s' * (seeds[-1] > 1)} a line"


def thousands(x: float, _: int) -> str:
    """1,500,000 as 1.5 M, 20,000 as 20 k."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:g} {unit}"
    return f"{x:g}"


def clock_axis(ax) -> None:
    """Seconds as clocks show them: 90 is 1:30."""
    ax.set_xlabel("wall-clock time (minutes:seconds)")
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 1.5, 2, 3, 6, 10]))
    ax.xaxis.set_major_formatter(lambda s, _: f"{int(s // 60)}:{int(s % 60):02}")


def label_axis(ax, axis: str) -> None:
    if axis == "seconds":
        clock_axis(ax)
    else:
        ax.set_xlabel("environment steps" if axis == "steps" else axis)
        ax.xaxis.set_major_formatter(thousands)


def draw_learning(found: dict, series: dict, options: argparse.Namespace):
    """The metric over each axis; None if no run logged it."""
    axes = [options.x] if options.x else ["steps", "seconds"]
    known, runs = {}, []
    for panel, lines in found.items():
        for line, mine in lines.items():
            for i, axis in enumerate(axes):
                made = (curve(series[run.path], options.metric, axis, options.last) for run in mine)
                if curves := [each for each in made if each is not None]:
                    known.setdefault(panel, {}).setdefault(line, {})[i] = curves
                    runs += mine
    if not known:
        return None
    what = options.metric.rpartition("/")[2].replace("_", " ")
    heading = f"Learning: {what}, mean of the last {options.last}; band: {BAND_NAMES[options.band]}"
    figure, grid = panels(known, len(axes), heading, hardware_of(runs))
    for row, (panel, lines) in zip(grid, known.items(), strict=True):
        looks = styles(list(lines))
        for i, (ax, axis) in enumerate(zip(row, axes, strict=True)):
            ends = {
                line: draw_band(ax, curves[i], options.band, looks[line])
                for line, curves in lines.items()
                if i in curves
            }
            tidy(ax)
            label_axis(ax, axis)
            name_ends(ax, ends, looks)
        row[0].set_title(name_of(*panel, found[panel]), fontsize=10, loc="left")
        row[0].set_ylabel(what)
    return figure


def steps_per_second(sps: Series) -> Series:
    """Speed between consecutive rows, from their steps and times."""
    steps, seconds = np.diff(sps.steps, prepend=0), np.diff(sps.seconds, prepend=0)
    ok = (seconds > 0) & (steps > 0)
    return Series(sps.steps[ok], sps.seconds[ok], steps[ok] / seconds[ok])


def only(found: dict, keep: Callable) -> dict:
    """`found` without the runs that `keep` refuses, and without what is then empty."""
    kept: dict = {}
    for panel, lines in found.items():
        for line, mine in lines.items():
            if chosen := [run for run in mine if keep(run)]:
                kept.setdefault(panel, {})[line] = chosen
    return kept


def draw_speed(found: dict, series: dict):
    """Steps/s over time, on a log axis; None if no run logged any."""
    found = only(found, lambda run: SPS in series[run.path])
    if not found:
        return None
    runs = [run for lines in found.values() for mine in lines.values() for run in mine]
    figure, grid = panels(found, 1, "Speed over the run", hardware_of(runs))
    for ax, (panel, lines) in zip(grid[:, 0], found.items(), strict=True):
        ends, looks = {}, styles(list(lines))
        for line, mine in lines.items():
            for run in mine:
                sps = steps_per_second(series[run.path][SPS])
                if len(sps.values):
                    ax.plot(sps.seconds, sps.values, linewidth=1.1, **looks[line])
                    end = sps.seconds[-1], sps.values[-1]
                    ends[line] = max(end, ends.get(line, end))
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(thousands)
        ax.yaxis.set_minor_formatter(lambda *_: "")
        tidy(ax)
        name_ends(ax, ends, looks)
        ax.set_title(name_of(*panel, lines), fontsize=10, loc="left")
        ax.set_ylabel("environment steps/s")
        clock_axis(ax)
    return figure


def draw_gpu(found: dict):
    """GPU utilization over time, a panel per line; None without a GPU."""
    found = only(found, nvml)
    if not found:
        return None
    runs = [run for lines in found.values() for mine in lines.values() for run in mine]
    columns = max(map(len, found.values()))
    figure, grid = panels(found, columns, "GPU utilization over the run", hardware_of(runs))
    for axes, (panel, lines) in zip(grid, found.items(), strict=True):
        looks = styles(list(lines))
        for ax in axes[len(lines) :]:
            ax.set_visible(False)
        for ax, (line, mine) in zip(axes, lines.items(), strict=False):
            areas = []
            for run in mine:
                seconds, percent = np.array(nvml(run), dtype=float).T
                areas.append(area(seconds, percent))
                colour = looks[line]["color"]
                ax.plot(seconds, percent, linewidth=1, color=colour)
                ax.fill_between(seconds, percent, color=colour, alpha=0.15, linewidth=0)
            tidy(ax)
            ax.set_ylim(0, 100)
            said = f"{line}: {np.mean(areas):,.1f} GPU-seconds"
            ax.set_title(f"{name_of(*panel, {line: mine})}\n{said}", fontsize=9, loc="left")
            clock_axis(ax)
        axes[0].set_ylabel("% of time with a kernel running")
    return figure


def nvml(run: Run) -> list | None:
    return run.stages.get("gpu", {}).get("nvml_samples")


def area(seconds: np.ndarray, percent: np.ndarray) -> float:
    """Area under the utilization (trapezoids), in seconds of a busy GPU."""
    return float(np.sum(np.diff(seconds) * (percent[1:] + percent[:-1]) / 200))


# Scores


def score_lines(found: dict, series: dict, options: argparse.Namespace) -> list[dict]:
    """A dict per line with two runs or more: its final values, per task, and what they amount to.

    Lines of the same name in several panels of one script are one method on several tasks. Values
    of different tasks are averaged as they are: where their scales differ, look at each by --where.
    """
    methods: dict = {}
    axis = score_axis(options)
    for (script, env_id), lines in found.items():
        for line, mine in lines.items():
            made = [curve(series[run.path], options.metric, axis, options.last) for run in mine]
            if curves := [each for each in made if each is not None]:
                methods.setdefault((script, line), {})[env_id] = curves
    rows = []
    for (script, line), tasks in methods.items():
        finals = [np.array([y[-1] for _, y in curves]) for curves in tasks.values()]
        if min(map(len, finals)) < 2:
            continue
        together = np.concatenate(finals)
        row = {"script": script, "line": line, "runs": len(together)}
        row |= {"finals": dict(zip(tasks, (list(f) for f in finals), strict=True))}
        for name, statistic in (("iqm", iqm), ("mean", lambda s: s.mean(-1))):
            interval = stratified(finals, statistic)
            row[name] = {"value": float(statistic(together)), "low": interval[0]}
            row[name]["high"] = interval[1]
        if options.target is not None:
            times = [first_reached(*each, options.target) for c in tasks.values() for each in c]
            reached = [time for time in times if np.isfinite(time)]
            row["target"] = {"times": [t if np.isfinite(t) else None for t in times]}
            row["target"] |= {"never": len(times) - len(reached)}
            # half of the runs were there by then; those that never are count
            middle = float(np.sort(times)[(len(times) - 1) // 2])
            row["target"]["median"] = middle if np.isfinite(middle) else None
        rows.append(row)
    return rows


def score_axis(options: argparse.Namespace) -> str:
    """In what the way to a target is measured; another metric has no order in time."""
    return options.x if options.x in ("steps", "seconds") else "steps"


def score_cells(rows: list[dict], options: argparse.Namespace) -> list[list[str]]:
    table = [["script", "line", "runs", "IQM", "95%", "mean", "95%"]]
    if options.target is not None:
        axis = score_axis(options)
        table[0] += [f"{axis} until {options.target:g}, median", "never"]
    for row in rows:
        cells = [row["script"], row["line"], str(row["runs"])]
        for name in ("iqm", "mean"):
            cells += [f"{row[name]['value']:,.1f}"]
            cells += [f"{row[name]['low']:,.1f} to {row[name]['high']:,.1f}"]
        if options.target is not None:
            median = row["target"]["median"]
            cells += ["-" if median is None else f"{median:,.0f}", str(row["target"]["never"])]
        table.append(cells)
    return table


def draw_scores(rows: list[dict], options: argparse.Namespace):
    """Interquartile means, performance profiles and, with a target, who has reached it when."""
    columns = 3 if options.target is not None else 2
    height = max(3.2, 0.4 * len(rows) + 1.6)
    figure, axes = plt.subplots(1, columns, figsize=(4.6 * columns, height), layout="constrained")
    names = [f"{label(row['script'])}: {row['line']}" for row in rows]
    if len({row["script"] for row in rows}) == 1:
        names = [row["line"] for row in rows]
    looks = styles(names)
    what = options.metric.rpartition("/")[2].replace("_", " ")
    figure.suptitle(f"Final {what}, mean of the last {options.last}", fontsize=12)
    for i, (name, row) in enumerate(zip(names, rows, strict=True)):
        colour, score = looks[name]["color"], row["iqm"]
        axes[0].plot([score["low"], score["high"]], [i, i], color=colour, lw=6, alpha=0.35)
        axes[0].plot(score["value"], i, "|", color=colour, markersize=16, markeredgewidth=2.5)
    axes[0].set_yticks(range(len(rows)), names, fontsize=8)
    axes[0].set(ylim=(len(rows) - 0.5, -0.5), xlabel="interquartile mean and its 95% interval")
    finals = [np.concatenate([np.array(f) for f in row["finals"].values()]) for row in rows]
    levels = np.linspace(min(map(np.min, finals)), max(map(np.max, finals)), 200)
    for name, final in zip(names, finals, strict=True):
        axes[1].plot(levels, 100 * performance_profile(final, levels), label=name, **looks[name])
    axes[1].set(xlabel=f"{what} of at least", ylabel="% of runs", ylim=(0, 103))
    if options.target is not None:
        ends = [t for row in rows for t in row["target"]["times"] if t is not None]
        for name, row in zip(names, rows, strict=True):
            times = sorted(t for t in row["target"]["times"] if t is not None)
            x = [0.0, *times, max(ends, default=1.0) * 1.05]
            y = [*range(len(times) + 1), len(times)]
            axes[2].step(x, 100 * np.array(y) / row["runs"], where="post", **looks[name])
        axes[2].set(ylabel=f"% of runs that have reached {options.target:g}", ylim=(0, 103))
        label_axis(axes[2], score_axis(options))
    for ax in axes:
        tidy(ax)
    axes[0].margins(x=0.1)
    axes[1].legend(fontsize=7, frameon=False)
    return figure


# Files


def save(figure, stem: Path, kinds: tuple = ("png", "svg")) -> list[Path]:
    """`figure` as `stem`.png and .svg, whose text stays text and whose bytes repeat."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": stem.name}):
        for file in files:
            dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
            figure.savefig(file, dpi=130, metadata=dates.get(file.suffix[1:]))
    plt.close(figure)
    return files


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out/curves", help="NAME")
    parser.add_argument("--metric", default=RETURN, help=f"of TensorBoard (default: {RETURN})")
    parser.add_argument("--x", help="steps, seconds or a metric (default: both)")
    parser.add_argument("--by", nargs="+", metavar="NAME", help="settings that make lines")
    parser.add_argument("--where", nargs="+", default=[], metavar="NAME=VALUE", help="only these")
    parser.add_argument("--band", choices=BAND_NAMES, default="bootstrap")
    parser.add_argument("--last", type=int, default=10, help="values that a curve is the mean of")
    parser.add_argument("--target", type=float, help="value of the metric to reach")
    parser.add_argument("--pdf", action="store_true")
    parser.add_argument("--html", action="store_true", help="also a page to explore")
    return parser.parse_args(arguments)


def write(runs: list[Run], out: Path, name: str = "curves", options=None) -> list[Path]:
    """The figures that these runs have something to show for; the files."""
    options = options or parse([str(out)])
    tags = [options.metric, SPS]
    if options.x and options.x not in ("steps", "seconds"):
        tags.append(options.x)
    series = {run.path: read_series(run.path, tags) for run in runs}
    found = groups(runs, options.by)
    kinds = ("png", "svg", "pdf") if options.pdf else ("png", "svg")
    figures = {
        "learning": (draw_learning(found, series, options), f"no run logged {options.metric}"),
        "speed": (draw_speed(found, series), "no run logged steps/s"),
        "gpu": (draw_gpu(found), "not measured, no run had a GPU"),
    }
    rows = score_lines(found, series, options)
    several = len(rows) > 1
    figures["scores"] = (
        draw_scores(rows, options) if several else None,
        "fewer than two lines of two runs",
    )
    files = []
    for kind, (figure, missing) in figures.items():
        if figure:
            files += save(figure, out / f"{name}_{kind}", kinds)
        else:
            print(f"no figure of {kind}: {missing}", file=sys.stderr)
    if several:
        table, stem = score_cells(rows, options), out / f"{name}_scores"
        print(f"\n{as_text(table, labels=2)}\n")
        texts = {"md": as_markdown(table, labels=2), "json": json.dumps(rows, indent=1)}
        for kind, text in texts.items():
            files.append(stem.with_name(f"{stem.name}.{kind}"))
            files[-1].write_text(text + "\n")
    if options.html:
        from page import write_page

        files.append(write_page(out / f"{name}.html", found, series, options))
    return files


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    runs, skipped = read_runs(options.runs)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    try:
        runs = matching(runs, options.where)
        if options.by:
            options.by = [name.lstrip("-").replace("-", "_") for name in options.by]
            check_names(runs, options.by)
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if not runs:
        print(
            f"error: no such finished runs in {', '.join(map(str, options.runs))}", file=sys.stderr
        )
        return 2
    for path in write(runs, options.out.parent, options.out.name, options):
        print(f"written: {shown(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
