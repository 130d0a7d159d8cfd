"""Curves over the length of a run: learning, speed and GPU utilization.

    python plots/curves.py runs/                    all finished runs in runs/
    python plots/curves.py runs/A runs/B --out plots/results/ppo_halfcheetah_learning_cpu

Runs of one script, environment and row are one line, a row of panels per script and environment.
Written as PNG and SVG to --out:

    NAME_learning     episodic return over environment steps and over wall-clock time: mean over the
                      seeds, 95% interval of that mean by bootstrap over the seeds, each seed thin
    NAME_speed        steps/s over wall-clock time, warm-up and logging included
    NAME_gpu          GPU utilization (NVML) over wall-clock time and the area under it: the
                      GPU-seconds in which at least one kernel ran

A learning curve is the mean of the last 10 episodes (of rollouts, where a script logs the mean of
each), linear between two of them. Beyond a run's own first and last value it has none; the mean is
over the seeds that have one, the interval where there are two or more.
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import numpy as np
from run_dirs import ROOT, ROWS, Run, Series, label, read_runs, read_series, shown

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

LAST = 10  # episodes of which a curve is the mean
POINTS = 200  # of a curve
BOOTSTRAP = 2000  # samples
STYLES = {  # Okabe and Ito's colours; dashes tell them apart in print
    "baseline": {"color": "black", "linestyle": "-"},
    "eager": {"color": "#56B4E9", "linestyle": "--"},
    "compile": {"color": "#D55E00", "linestyle": "-"},
    "cudagraphs": {"color": "#009E73", "linestyle": "-."},
    "compile+cudagraphs": {"color": "#0072B2", "linestyle": "-"},
}
TAGS = ["charts/episodic_return", "charts/SPS"]


def running_mean(values: np.ndarray, count: int) -> np.ndarray:
    """Mean of each value and up to `count` - 1 before it: (n,) -> (n,)."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - count, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def on_grid(grid: np.ndarray, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`values` at `x`, linear in between, NaN outside of them: (n,) -> (g,)."""
    return np.interp(grid, x, values, left=np.nan, right=np.nan)


def bootstrap(curves: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """95% percentile interval of the mean over seeds: (s, g), NaN where unknown -> two (g,)."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(curves), size=(BOOTSTRAP, len(curves)))
    known = ~np.isnan(curves)
    sums, counts = np.nan_to_num(curves)[picks].sum(1), known[picks].sum(1)  # (b, g)
    with np.errstate(invalid="ignore"):
        means = np.where(counts, sums / counts, np.nan)
    low, high = np.full((2, curves.shape[1]), np.nan)
    enough = known.sum(0) > 1
    if enough.any():
        low[enough], high[enough] = np.nanpercentile(means[:, enough], (2.5, 97.5), axis=0)
    return low, high


def mean_of_known(curves: np.ndarray) -> np.ndarray:
    """Mean over seeds of what is there: (s, g) -> (g,)."""
    counts = (~np.isnan(curves)).sum(0)
    return np.where(counts, np.nansum(curves, 0) / np.maximum(counts, 1), np.nan)


def steps_per_second(sps: Series, start: float) -> Series:
    """Speed between consecutive rows, from their steps and times."""
    steps = np.diff(sps.steps, prepend=0)
    seconds = np.diff(sps.seconds, prepend=start)
    ok = (seconds > 0) & (steps > 0)
    return Series(sps.steps[ok], sps.seconds[ok], (steps[ok] / seconds[ok]))


def groups(runs: list[Run]) -> dict[tuple[str, str], dict[str, list[Run]]]:
    """{(script, environment): {row: runs}}, rows in their order."""
    found: dict = {}
    for run in sorted(runs, key=lambda run: (run.script, run.env_id, list(ROWS).index(run.row))):
        rows = found.setdefault((run.script, run.env_id), {})
        rows.setdefault(run.row, []).append(run)
    return found


def spread_labels(ys: list[float], least: float) -> list[float]:
    """`ys` moved apart, as little as needed, to be `least` from each other."""
    order, placed = np.argsort(ys), np.array(ys, dtype=float)
    for one, other in zip(order, order[1:], strict=False):
        placed[other] = max(placed[other], placed[one] + least)
    return list(placed - (placed.mean() - np.mean(ys)))


def name_ends(ax, ends: dict[str, tuple[float, float]]) -> None:
    """Writes each line's name beside its end (x, y), in its colour, none over another."""
    to_axes = ax.transData + ax.transAxes.inverted()
    ys = [to_axes.transform(end)[1] for end in ends.values()]
    for (row, end), y in zip(ends.items(), spread_labels(ys, 0.09), strict=True):
        colour = STYLES[row]["color"]
        x = to_axes.transform(end)[0]
        ax.annotate(
            row,
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


def draw_band(ax, row: str, curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """A line of the mean, its interval and each seed, from (x, values) each -> the line's end."""
    grid = np.linspace(min(x[0] for x, _ in curves), max(x[-1] for x, _ in curves), POINTS)
    values = np.array([on_grid(grid, *curve) for curve in curves])
    mean = mean_of_known(values)
    style = STYLES[row]
    for x, value in curves:
        ax.plot(x, value, linewidth=0.5, alpha=0.45, **style)
    low, high = bootstrap(values)
    ax.fill_between(grid, low, high, color=style["color"], alpha=0.18, linewidth=0)
    ax.plot(grid, mean, linewidth=1.8, **style)
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
    figure.suptitle(f"{heading}\n", fontsize=12)
    at = 1 - 0.43 / figure.get_figheight()
    figure.text(0.5, at, hardware, ha="center", fontsize=8.5, color="0.35")
    return figure, grid


def hardware_of(runs: list[Run]) -> str:
    return ", ".join(dict.fromkeys(run.hardware for run in runs))


def name_of(script: str, env_id: str, rows: dict) -> str:
    seeds = sorted({len(runs) for runs in rows.values()})
    count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"{label(script)}: {env_id}, {count} seed{'s' * (seeds[-1] > 1)}"


def draw_learning(runs: list[Run], series: dict[Path, dict[str, Series]]):
    """Return over steps and over time; None if no run ended an episode."""
    runs = [run for run in runs if TAGS[0] in series[run.path]]
    if not runs:
        return None
    found = groups(runs)
    heading = f"Learning: mean return of the last {LAST} episodes"
    figure, grid = panels(found, 2, heading, hardware_of(runs))
    for (over_steps, over_time), (names, rows) in zip(grid, found.items(), strict=True):
        for ax, axis in ((over_steps, "steps"), (over_time, "seconds")):
            ends = {}
            for row, mine in rows.items():
                returns = [series[run.path][TAGS[0]] for run in mine]
                curves = [(getattr(r, axis), running_mean(r.values, LAST)) for r in returns]
                ends[row] = draw_band(ax, row, curves)
            tidy(ax)
            name_ends(ax, ends)
        over_steps.set_title(name_of(*names, rows), fontsize=10, loc="left")
        over_steps.set_ylabel("episodic return")
        over_steps.set_xlabel("environment steps")
        over_steps.xaxis.set_major_formatter(thousands)
        clock_axis(over_time)
    return figure


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


def draw_speed(runs: list[Run], series: dict[Path, dict[str, Series]]):
    """Steps/s over time, on a log axis; None if no run logged any."""
    runs = [run for run in runs if TAGS[1] in series[run.path]]
    if not runs:
        return None
    found = groups(runs)
    figure, grid = panels(found, 1, "Speed over the run", hardware_of(runs))
    for ax, (names, rows) in zip(grid[:, 0], found.items(), strict=True):
        ends = {}
        for row, mine in rows.items():
            for run in mine:
                sps = steps_per_second(series[run.path][TAGS[1]], 0.0)
                if len(sps.values):
                    ax.plot(sps.seconds, sps.values, linewidth=1.1, **STYLES[row])
                    end = sps.seconds[-1], sps.values[-1]
                    ends[row] = max(end, ends.get(row, end))
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(thousands)
        ax.yaxis.set_minor_formatter(lambda *_: "")
        tidy(ax)
        name_ends(ax, ends)
        ax.set_title(name_of(*names, rows), fontsize=10, loc="left")
        ax.set_ylabel("environment steps/s")
        clock_axis(ax)
    return figure


def draw_gpu(runs: list[Run]):
    """GPU utilization over time, a panel per script, environment and row; None without a GPU."""
    runs = [run for run in runs if run.stages.get("gpu", {}).get("nvml_samples")]
    if not runs:
        return None
    found = groups(runs)
    columns = max(len(rows) for rows in found.values())
    figure, grid = panels(found, columns, "GPU utilization over the run", hardware_of(runs))
    for axes, (names, rows) in zip(grid, found.items(), strict=True):
        for ax in axes[len(rows) :]:
            ax.set_visible(False)
        for ax, (row, mine) in zip(axes, rows.items(), strict=False):
            areas = []
            for run in mine:
                seconds, percent = np.array(run.stages["gpu"]["nvml_samples"], dtype=float).T
                areas.append(area(seconds, percent))
                colour = STYLES[row]["color"]
                ax.plot(seconds, percent, linewidth=1, color=colour)
                ax.fill_between(seconds, percent, color=colour, alpha=0.15, linewidth=0)
            tidy(ax)
            ax.set_ylim(0, 100)
            said = f"{row}: {np.mean(areas):,.1f} GPU-seconds"
            ax.set_title(f"{name_of(*names, {row: mine})}\n{said}", fontsize=9, loc="left")
            clock_axis(ax)
        axes[0].set_ylabel("% of time with a kernel running")
    return figure


def area(seconds: np.ndarray, percent: np.ndarray) -> float:
    """Area under the utilization (trapezoids), in seconds of a busy GPU."""
    return float(np.sum(np.diff(seconds) * (percent[1:] + percent[:-1]) / 200))


def save(figure, stem: Path) -> list[Path]:
    """`figure` as `stem`.png and `stem`.svg, whose text stays text and whose bytes repeat."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": stem.name}):
        figure.savefig(files[0], dpi=130)
        figure.savefig(files[1], metadata={"Date": None})
    plt.close(figure)
    return files


def write(runs: list[Run], out: Path, name: str = "curves") -> list[Path]:
    """The figures that these runs have something to show for; the files."""
    series = {run.path: read_series(run.path, TAGS) for run in runs}
    figures = {
        "learning": draw_learning(runs, series),
        "speed": draw_speed(runs, series),
        "gpu": draw_gpu(runs),
    }
    missing = {
        "learning": "no run ended an episode",
        "speed": "no run logged steps/s",
        "gpu": "not measured, no run had a GPU",
    }
    files = []
    for kind, figure in figures.items():
        if figure:
            files += save(figure, out / f"{name}_{kind}")
        else:
            print(f"no figure of {kind}: {missing[kind]}", file=sys.stderr)
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out/curves", help="NAME")
    options = parser.parse_args(arguments)
    runs, skipped = read_runs(options.runs)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    if not runs:
        parser.error(f"no finished runs in {', '.join(map(str, options.runs))}")
    for path in write(runs, options.out.parent, options.out.name):
        print(f"figure: {shown(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
