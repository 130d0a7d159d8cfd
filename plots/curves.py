"""Learning curves, and scores of sweeps.

    python plots/curves.py runs/                    all runs in runs/ and in folders there
    python plots/curves.py runs/gae_lambda --band std --target 1000
    python plots/curves.py runs/batch_size --by num_steps --where seed=1 seed=2 --x seconds
    python plots/curves.py runs/A runs/B --out plots/results/ppo_halfcheetah_learning_cpu

A panel is a script and environment. A line is what differs within it: the row of the speed-up table
(baseline, compile, ...) and the settings that vary, or those that --by names; seeds never do. Runs
of CleanRL, which are TensorBoard files in a directory with its name, are a line beside ours.
Written as PNG and SVG to --out:

    NAME_learning     --metric (episodic return) over environment steps and over wall-clock time, or
                      over --x
    NAME_scores       of more than one line with two runs or more per task: interquartile mean of
                      the last values with 95% intervals (of less than 5 runs they are too narrow)
                      and performance profile; NAME_scores.json also has, with --target, the steps
                      after which each run has first reached it

Lines are the mean over the runs, with --band around it and each run thin. A learning curve is the
mean of the last --last values of the metric, linear between two of them, and ends with its run: of
the last tenth of a run's values, 10 at most, where --last does not say otherwise. The mean is over
the runs that have a value, bands are where two or more do. Runs that were interrupted are named and
have curves, but no scores. Scores are those of Agarwal et al.,
"Deep Reinforcement Learning at the Edge of the Statistical Precipice", NeurIPS 2021.
"""

import argparse
import json
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import matplotlib
import numpy as np
import run_dirs
from cycler import cycler
from run_dirs import FREE_ARGS, ROOT, Run, Series, label, read_runs, read_series, shown

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

plt.rcParams |= {"axes.grid": True, "grid.color": "0.9", "axes.axisbelow": True}
plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "axes.xmargin": 0}
plt.rcParams["axes.titlesize"] = 10
POINTS = 1000  # of a curve at most
SAMPLES = 2000  # of a bootstrap
RETURN = "charts/episodic_return"
MEAN_OF = 10  # values of a curve at most, where --last does not say otherwise
COLOURS = {  # of the rows, in every figure the same; Okabe and Ito's
    "baseline": "black",
    "eager": "#56B4E9",
    "compile": "#D55E00",
    "cudagraphs": "#009E73",
    "compile+cudagraphs": "#0072B2",
    "CleanRL": "#CC79A7",
}
BANDS = {
    "bootstrap": "95% interval of the mean",
    "std": "standard deviation",
}
AXES = {"steps": "environment steps", "seconds": "wall-clock time (seconds)"}


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


def union_grid(xs: list[np.ndarray]) -> np.ndarray:
    """Every x of every run, thinned to `POINTS`, and the middles in between: (n,) each -> (g,).

    In a middle it shows that no run has a value between the end of one and the start of another.
    """
    grid = np.unique(np.concatenate(xs))
    grid = grid[np.unique(np.linspace(0, len(grid) - 1, POINTS).round().astype(int))]
    return np.sort(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))


def mean_of_known(values: np.ndarray) -> np.ndarray:
    """(s, g) -> (g,), NaN where no run is known."""
    return np.ma.masked_invalid(values).mean(0).filled(np.nan)


def bootstrap(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% percentile interval of the mean over runs: (s, g) -> two (g,)."""
    picks = np.random.default_rng(0).integers(len(values), size=(SAMPLES, len(values)))
    weights = np.stack([np.bincount(pick, minlength=len(values)) for pick in picks])  # (b, s)
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = weights @ np.nan_to_num(values) / (weights @ known)  # (b, g); 0 / 0 is unknown
    return np.nanpercentile(means, (2.5, 97.5), axis=0)


def band(kind: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(s, g) -> low and high (g,), NaN where fewer than two runs are known."""
    low, high = np.full((2, values.shape[1]), np.nan)
    enough = (~np.isnan(values)).sum(0) > 1
    if not enough.any():
        return low, high
    values = values[:, enough]
    if kind == "bootstrap":
        low[enough], high[enough] = bootstrap(values)
    else:
        mean, width = mean_of_known(values), np.nanstd(values, axis=0, ddof=1)
        low[enough], high[enough] = mean - width, mean + width
    return low, high


def iqm(scores: np.ndarray) -> np.ndarray:
    """Interquartile mean, that of the middle half: (..., n) -> (...)."""
    ordered = np.sort(scores, axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def stratified(scores: list[np.ndarray]) -> tuple[float, float]:
    """95% interval of the interquartile mean, runs drawn anew within each task: (runs,) each."""
    rng = np.random.default_rng(0)
    draws = [task[rng.integers(len(task), size=(SAMPLES, len(task)))] for task in scores]
    return tuple(np.percentile(iqm(np.concatenate(draws, axis=1)), (2.5, 97.5)))


# Which runs there are, and which are one line


class CleanRLRun(Run):
    """A run of CleanRL: its name says what was run, its TensorBoard files what came of it."""

    row = "CleanRL"
    script = property(lambda self: self.config["args"]["exp_name"])
    hardware = "unknown for CleanRL"


def read_any(path: Path) -> Run:
    """A run of ours or, ENV__EXP__SEED__TIME, of CleanRL; ValueError says why it is neither."""
    named = re.fullmatch("(.+)__(.+)__([0-9]+)__([0-9]+)", path.name)
    if not named or (path / "config.json").exists() or not any(path.glob("*.tfevents.*")):
        return run_dirs.read_run(path, whole=False)
    args = {"env_id": named[1], "exp_name": named[2], "seed": int(named[3])}
    return CleanRLRun(path, {"args": args}, {})


def varying(runs: list[Run]) -> list[str]:
    """The settings that tell runs of a row apart, as few as do; seeds are none."""
    settings = [run.config["args"] for run in runs]
    found, parts = [], [(run.row,) for run in runs]
    for name in dict.fromkeys(name for args in settings for name in args):
        finer = [(*part, repr(args.get(name))) for part, args in zip(parts, settings, strict=True)]
        if name not in FREE_ARGS | {"env_id"} and len(set(finer)) > len(set(parts)):
            found, parts = [*found, name], finer
    return found


def groups(runs: list[Run], by: list[str] | None = None) -> dict[tuple[str, str], dict]:
    """{(script, environment): {line: runs}}: rows as in the table, numbers by size."""
    found: dict = {}
    for panel in sorted({(run.script, run.env_id) for run in runs}):
        mine = [run for run in runs if (run.script, run.env_id) == panel]
        names = varying(mine) if by is None else by
        several = len({run.row for run in mine}) > 1
        lines: dict = {}
        for run in mine:
            args = run.config["args"]
            values = [(name, args[name]) for name in names if name in args]
            texts = [f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in values]
            name = ", ".join([run.row] * (several or not texts) + texts)
            keys = [(v, "") if isinstance(v, int | float) else (0, str(v)) for _, v in values]
            key = ([*COLOURS].index(run.row), *keys)
            lines.setdefault((key, name), []).append(run)
        found[panel] = {line: lines[key, line] for key, line in sorted(lines)}
    return found


def setting(name: str, runs: list[Run]) -> str:
    """The name in config.json of what a flag is called; ValueError unless some run has it."""
    found = name.lstrip("-").replace("-", "_")
    if not any(found in run.config["args"] for run in runs):
        raise ValueError(f"no run has a setting {found!r}")
    return found


def matching(runs: list[Run], conditions: list[str]) -> list[Run]:
    """The runs with these settings, NAME=VALUE; several values of a name are alternatives."""
    wanted: dict = {}
    for condition in conditions:
        name, _, text = condition.partition("=")
        values = wanted.setdefault(setting(name, runs), [text])
        with suppress(ValueError):  # numbers, true and false; all else is text
            values.append(json.loads(text.lower()))
    for name, values in wanted.items():
        runs = [run for run in runs if run.config["args"].get(name) in values]
    return runs


# A run's curves, (x, y) or None


def curve(series: dict[str, Series], metric: str, axis: str, last: int | None) -> tuple | None:
    """A running mean of the metric over `axis`: steps, seconds or another metric."""
    if metric not in series or axis not in AXES and axis not in series:
        return None
    found, finite = series[metric], np.isfinite(series[metric].values)
    if axis in AXES:
        x = getattr(found, axis)[finite]
    else:
        x = on_grid(found.steps[finite], series[axis].steps, series[axis].values)
    last = last or min(max(finite.sum() // 10, 1), MEAN_OF)
    y, known = running_mean(found.values[finite], last), ~np.isnan(x)
    rising = np.argsort(x[known], kind="stable")
    return (x[known][rising], y[known][rising]) if known.any() else None


def learning(found: dict, series: dict, metric: str, axis: str, last: int | None) -> dict:
    """{panel: {line: [(x, y), ...]}} of the runs that have such a curve."""
    kept: dict = {}
    for panel, lines in found.items():
        for line, runs in lines.items():
            made = [curve(series[run.path], metric, axis, last) for run in runs]
            if curves := [each for each in made if each is not None]:
                kept.setdefault(panel, {})[line] = curves
    return kept


# Drawing


def styles(lines: list[str]) -> dict[str, dict]:
    """A colour and dashes per line, the same for the same rows everywhere."""
    if set(lines) <= set(COLOURS):
        return {line: {"color": COLOURS[line]} for line in lines}
    looks = cycler(linestyle=("-", "--", "-.", ":")) * cycler(color=[*COLOURS.values()])
    return dict(zip(lines, looks(), strict=False))


def headline(figure, text: str, runs: list[Run]) -> None:
    """A title, and below it, smaller, where the runs were measured."""
    figure.suptitle(f"{text}\n", fontsize=12)
    hardware = ", ".join(dict.fromkeys(run.hardware for run in runs))
    below = 1 - 0.43 / figure.get_figheight()
    figure.text(0.5, below, hardware, ha="center", fontsize=8.5, color="0.35")


def draw_line(ax, curves: list[tuple], kind: str, look: dict) -> None:
    """The mean of (x, y) each, its band and each run."""
    grid = union_grid([x for x, _ in curves])
    values = np.array([on_grid(grid, *each) for each in curves])
    look = look | {"marker": "o" if max(len(x) for x, _ in curves) == 1 else None}
    for x, y in curves:
        ax.plot(x, y, linewidth=0.5, alpha=0.45, **look | {"label": None})
    ax.fill_between(grid, *band(kind, values), color=look["color"], alpha=0.18, linewidth=0)
    ax.plot(grid, mean_of_known(values), linewidth=1.8, **look)


def draw(columns: dict[str, dict], kind: str, what: str, heading: str, runs: list[Run]):
    """A row of panels per script and environment, a column per axis; None without a curve.

    `columns` holds what `learning` returns by the name of its axis: the same lines for each.
    """
    if not (panels := list(next(iter(columns.values())))):
        return None
    shape, size = (len(panels), len(columns)), (5.2 * len(columns) + 1.5, 3.1 * len(panels) + 0.7)
    figure, grid = plt.subplots(*shape, figsize=size, layout="constrained", squeeze=False)
    headline(figure, f"{heading}; band: {BANDS[kind]}", runs)
    for row, panel in zip(grid, panels, strict=True):
        for ax, (axis, column) in zip(row, columns.items(), strict=True):
            looks = styles(list(column[panel]))
            for line, curves in column[panel].items():
                name = f"{line} (n={len(curves)})"
                draw_line(ax, curves, kind, looks[line] | {"label": name})
            ax.set_xlabel(AXES.get(axis, axis))
            ax.xaxis.set_major_formatter(EngFormatter())
        row[0].set_title(f"{label(panel[0])}: {panel[1]}", loc="left")
        row[0].set_ylabel(what)
        row[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    return figure


# Scores


def score_lines(known: dict, target: float | None) -> list[dict]:
    """A dict per line with two runs or more: its final values, per task, and what they amount to.

    Lines of the same name in several panels of one script are one method on several tasks. Values
    of different tasks are averaged as they are: where their scales differ, look at each by --where.
    """
    methods: dict = {}
    for (script, env_id), lines in known.items():
        for line, curves in lines.items():
            methods.setdefault((script, line), {})[env_id] = curves
    rows = []
    for (script, line), tasks in methods.items():
        finals = {env_id: np.array([y[-1] for _, y in curves]) for env_id, curves in tasks.items()}
        if min(map(len, finals.values())) < 2:
            continue
        together, (low, high) = np.concatenate([*finals.values()]), stratified([*finals.values()])
        row = {"script": script, "line": line, "runs": len(together)}
        row |= {"finals": {env_id: list(values) for env_id, values in finals.items()}}
        row |= {"iqm": float(iqm(together)), "low": low, "high": high}
        if target is not None:
            after = [x[y >= target] for curves in tasks.values() for x, y in curves]
            row["times"] = [float(x[0]) if len(x) else None for x in after]
        rows.append(row)
    return rows


def score_cells(rows: list[dict], target: float | None) -> list[list[str]]:
    table = [["script", "line", "runs", "IQM (95%)"]]
    if target is not None:
        table[0] += [f"steps until {target:g}, median", "never"]
    for row in rows:
        score = f"{row['iqm']:,.1f} ({row['low']:,.1f} to {row['high']:,.1f})"
        cells = [row["script"], row["line"], str(row["runs"]), score]
        if target is not None:
            times = sorted(np.inf if time is None else time for time in row["times"])
            median = times[(len(times) - 1) // 2]  # those that never are count
            cells += [f"{median:,.0f}", str(row["times"].count(None))]
        table.append(cells)
    return table


def draw_scores(rows: list[dict], what: str):
    """Interquartile means and performance profiles: the share of runs with at least each level."""
    size = (11, max(3.2, 0.4 * len(rows) + 1.6))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
    figure.suptitle(f"Final {what}", fontsize=12)
    several = len({row["script"] for row in rows}) > 1
    names = [f"{label(row['script'])} " * several + row["line"] for row in rows]
    looks = styles(names)
    finals = [np.concatenate([*row["finals"].values()]) for row in rows]
    levels = np.linspace(min(map(np.min, finals)), max(map(np.max, finals)), 200)
    for i, (name, row, final) in enumerate(zip(names, rows, finals, strict=True)):
        colour = looks[name]["color"]
        left.plot([row["low"], row["high"]], [i, i], color=colour, lw=6, alpha=0.35)
        left.plot(row["iqm"], i, "|", color=colour, markersize=16, markeredgewidth=2.5)
        right.plot(levels, 100 * (final[:, None] >= levels).mean(0), label=name, **looks[name])
    left.margins(x=0.1)
    left.set_yticks(range(len(rows)), names, fontsize=8)
    left.set(ylim=(len(rows) - 0.5, -0.5), xlabel="interquartile mean and its 95% interval")
    right.set(xlabel="at least this value", ylabel="% of runs", ylim=(0, 103))
    right.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    return figure


def save(figure, stem: Path) -> list[Path]:
    """`figure` as `stem`.png and .svg, whose text stays text and whose bytes repeat."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": stem.name}):
        figure.savefig(files[0], dpi=130)
        figure.savefig(files[1], metadata={"Date": None})
    plt.close(figure)
    return files


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = run_dirs.make_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out/curves", help="NAME")
    parser.add_argument("--metric", default=RETURN, help=f"of TensorBoard (default: {RETURN})")
    parser.add_argument("--x", help="steps, seconds or a metric (default: both)")
    parser.add_argument("--by", nargs="+", metavar="NAME", help="settings that make lines")
    parser.add_argument("--where", nargs="+", default=[], metavar="NAME=VALUE", help="only these")
    parser.add_argument("--band", choices=BANDS, default="bootstrap")
    parser.add_argument("--last", type=int, help="values that a curve is the mean of")
    parser.add_argument("--target", type=float, help="value of the metric to reach")
    return parser.parse_args(arguments)


def write(runs: list[Run], out: Path, name: str = "curves", options=None) -> list[Path]:
    """The figures that these runs have something to show for; the files."""
    options = options or parse([str(out)])
    axes = [options.x] if options.x else list(AXES)
    series = {run.path: read_series(run.path, [options.metric, *axes]) for run in runs}
    found = groups(runs, options.by)
    what = options.metric.rpartition("/")[2].replace("_", " ")
    last = options.last or f"tenth of a run, {MEAN_OF} values at most"
    columns = {axis: learning(found, series, options.metric, axis, options.last) for axis in axes}
    figure = draw(columns, options.band, what, f"Learning: {what}, mean of the last {last}", runs)
    if not figure:
        print(f"no figure: these runs have no {options.metric}", file=sys.stderr)
        return []
    files = save(figure, out / f"{name}_learning")
    whole = {run.path: {} if run.missing else series[run.path] for run in runs}
    steps = learning(found, whole, options.metric, "steps", options.last)
    rows = score_lines(steps, options.target)
    if len(rows) > 1:
        files += save(draw_scores(rows, f"{what}, mean of the last {last}"), out / f"{name}_scores")
        files.append(out / f"{name}_scores.json")
        files[-1].write_text(json.dumps(rows, indent=1) + "\n")
        print(f"\n{run_dirs.as_text(score_cells(rows, options.target), labels=2)}\n")
    return files


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    runs, skipped = read_runs(options.runs, read_any)
    said = [f"skipped: {line}" for line in skipped]
    said += [f"interrupted: {shown(run.path)} {run.missing}" for run in runs if run.missing]
    for line in said:
        print(line, file=sys.stderr)
    try:
        runs = matching(runs, options.where)
        options.by = options.by and [setting(name, runs) for name in options.by]
        if not runs:
            raise ValueError(f"no such runs in {', '.join(map(str, options.runs))}")
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    for path in write(runs, options.out.parent, options.out.name, options):
        print(f"written: {shown(path)}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet where nobody reads on, as in "| head -1"
    sys.exit(main())
