"""Learning curves, and scores of sweeps.

    python plots/curves.py runs/                    all runs in runs/ and in folders there
    python plots/curves.py runs/gae_lambda --band std --target 1000
    python plots/curves.py plots/results/learning/p*_pong__*.json --by script --band none

A panel is a script and environment, or with --by script an environment. A line is what differs
within it: the row of the speed-up table (baseline, compile, ...) and the settings that vary, or
those that --by names. Seeds never are; threads and --exp-name only there. Records of
plots/record.py have curves, too: of returns and evaluations. Written as PNG and SVG to --out:

    NAME_learning     --metric (episodic return) over environment steps and over wall-clock time, or
                      over --x
    NAME_scores       of more than one line with two runs or more: interquartile mean of
                      the last values with 95% intervals (of less than 10 runs they are too narrow)
                      and performance profile; NAME_scores.json also has, with --target, the steps
                      after which each run has first reached it

Lines are the mean over the runs, where all have values, with --band around it and each run thin. A
curve is the mean of the last --last values of the metric, or of the last tenth of a run's values,
10 at most. Runs that were interrupted are named and have curves, which end in a cross, but no
scores; where others are finished, they are not in the mean. Of runs with the same settings and seed
the newest counts. Scores are those of Agarwal et al., "Deep Reinforcement Learning at the Edge of
the Statistical Precipice", NeurIPS 2021, of a task each.
"""

import argparse
import statistics
import sys
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
import program
import run_dirs
import tables
from cycler import cycler
from run_dirs import FREE_ARGS, ROOT, Run, Series, label, shown

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

plt.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "axes.xmargin": 0,
        "grid.color": "0.9",
    }
)
Array = np.ndarray
Interval = tuple[Array, Array]  # low and high
POINTS = 1000  # of a curve at most
SAMPLES = 2000  # of a bootstrap
RETURN = "charts/episodic_return"
MEAN_OF = 10  # values of a curve at most, where --last does not say otherwise
COLOURS = {  # of the rows, in every figure the same; Okabe and Ito's
    "Stable-Baselines3": "#E69F00",
    "baseline": "black",
    "eager": "#56B4E9",
    "compile": "#D55E00",
    "cudagraphs": "#009E73",
    "compile+cudagraphs": "#0072B2",
}
ORDER = list(COLOURS)
LEGEND = {
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
    "fontsize": 8,
    "frameon": False,
}
BANDS = {
    "bootstrap": "band: 95% bootstrap interval of the mean",
    "std": "band: standard deviation",
    "none": "a line per run",
}
AXES = {"steps": "environment steps", "seconds": "wall-clock time (seconds)"}


# Statistics over runs: arrays are (s, g), s runs on a grid of g points


def running_mean(values: Array, count: int) -> Array:
    """Mean of each value and up to `count` - 1 before it: (n,) -> (n,)."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - count, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def common_grid(xs: list[Array]) -> Array:
    """Every x of every run, thinned to `POINTS`, where all runs have values: (n,) each -> (g,)."""
    grid = np.unique(np.concatenate(xs))
    places = np.linspace(0, len(grid) - 1, POINTS).round()
    grid = grid[np.unique(places.astype(int))]
    begin = max(x[0] for x in xs)
    end = min(x[-1] for x in xs)
    return grid[(begin <= grid) & (grid <= end)]


def bootstrap(values: Array) -> Interval:
    """95% percentile interval of the mean over runs: (s, g) -> two (g,)."""
    count = len(values)
    rng = np.random.default_rng(0)
    picks = rng.integers(count, size=(SAMPLES, count))
    weights = [np.bincount(pick, minlength=count) for pick in picks]
    means = np.stack(weights) @ values / count  # (b, g)
    return np.percentile(means, (2.5, 97.5), axis=0)


def band(kind: str, values: Array) -> Interval:
    """(s, g) -> low and high (g,), NaN of one run."""
    if len(values) < 2:
        unknown = np.full(values.shape[1], np.nan)
        return unknown, unknown
    if kind == "bootstrap":
        return bootstrap(values)
    mean = values.mean(0)
    width = values.std(0, ddof=1)
    return mean - width, mean + width


def iqm(scores: Array) -> Array:
    """Interquartile mean, that of the middle half: (..., n) -> (...)."""
    ordered = np.sort(scores, axis=-1)
    count = ordered.shape[-1]
    cut = count // 4
    return ordered[..., cut : count - cut].mean(-1)


def iqm_interval(scores: Array) -> tuple[float, float]:
    """95% bootstrap interval of the interquartile mean over runs (s,)."""
    rng = np.random.default_rng(0)
    picks = rng.integers(len(scores), size=(SAMPLES, len(scores)))
    return tuple(np.percentile(iqm(scores[picks]), (2.5, 97.5)))


# Which runs are one line


def varying(runs: list[Run]) -> list[str]:
    """The settings that tell runs of a row apart, as few as do; seeds are none."""
    settings = [run.config["args"] for run in runs]
    found = []
    free = FREE_ARGS | {"env_id", "torch_threads"}
    parts = [(run.row,) for run in runs]
    for name in dict.fromkeys(name for args in settings for name in args):
        if name in free:
            continue
        finer = []
        for part, args in zip(parts, settings, strict=True):
            finer.append((*part, repr(args.get(name))))
        if len(set(finer)) > len(set(parts)):
            found.append(name)
            parts = finer
    return found


def line_of(run: Run, names: list[str], with_row: bool) -> tuple[list, str]:
    """What sorts the line of a run, and its name: rows as in the table, numbers by size."""
    key = [ORDER.index(run.row)]
    texts = [run.row] if with_row else []
    settings = run.settings
    for name in names:
        value = settings.get(name)
        if isinstance(value, int | float):
            key.append((value, ""))
        else:
            key.append((0, str(value)))
        if name == "script":
            texts.insert(0, label(value))
        elif name in settings:
            texts.append(f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}")
    return key, ", ".join(texts) or run.row


def once(runs: list[Run], by: list[str] | None = None) -> list[Run]:
    """Of runs with the same settings and seed the newest, a whole one if there is one.

    `runs` are in the order in which they were made. Threads and names count if they are in `by`.
    """
    free = (FREE_ARGS | {"torch_threads"}) - {"seed", *(by or [])}
    found = {}
    for run in sorted(runs, key=lambda run: not run.missing):  # whole ones last: the last counts
        told = [(name, x) for name, x in run.settings.items() if name not in free and x is not None]
        found[run.script, run.row, repr(sorted(told))] = run
    return list(found.values())


def groups(runs: list[Run], by: list[str] | None = None) -> dict:
    """{(script, environment): {line: runs}}; the script is empty where it makes lines."""
    runs = once(runs, by)
    panels: dict = {}
    for run in runs:
        panel = "" if by and "script" in by else run.script, run.env_id
        panels.setdefault(panel, []).append(run)
    found: dict = {}
    for panel, mine in sorted(panels.items()):
        names = varying(mine) if by is None else by
        several_rows = len({run.row for run in mine}) > 1
        lines: dict = {}
        keys = {}
        for run in mine:
            key, line = line_of(run, names, several_rows)
            keys[line] = key
            lines.setdefault(line, []).append(run)
        in_order = sorted(lines, key=keys.get)
        found[panel] = {line: lines[line] for line in in_order}
    return found


def setting(name: str, runs: list[Run]) -> str:
    """The name in config.json of what a flag is called; ValueError unless some run has it."""
    found = name.lstrip("-").replace("-", "_")
    if not any(found in run.settings for run in runs):
        raise ValueError(f"no run has a setting {found!r}")
    return found


# A run's curves, (x, y) or None


def curve(series: dict[str, Series], metric: str, axis: str, last: int | None) -> tuple | None:
    """A running mean of the metric over `axis`: steps or seconds."""
    if metric not in series:
        return None
    found = series[metric]
    finite = np.isfinite(found.values)
    values = found.values[finite]
    x = getattr(found, axis)[finite]
    tenth = min(max(len(values) // 10, 1), MEAN_OF)
    y = running_mean(values, last or tenth)
    has_x = ~np.isnan(x)
    if not has_x.any():
        return None
    rising = np.argsort(x[has_x], kind="stable")
    return x[has_x][rising], y[has_x][rising]


def learning(found: dict, series: dict, metric: str, axis: str, last: int | None) -> dict:
    """{panel: {line: [(x, y, what is missing to its end), ...]}} of the runs that have a curve."""
    kept: dict = {}
    for panel, lines in found.items():
        for line, runs in lines.items():
            curves = []
            for run in runs:
                if made := curve(series[run.path], metric, axis, last):
                    curves.append((*made, run.missing))
            if curves:
                kept.setdefault(panel, {})[line] = curves
    return kept


# Drawing


def styles(lines: list[str]) -> dict[str, dict]:
    """A colour and dashes per line, the same for the same rows everywhere."""
    if set(lines) <= set(COLOURS):
        return {line: {"color": COLOURS[line]} for line in lines}
    dashes = cycler(linestyle=["-", "--", "-.", ":"])
    colours = cycler(color=[*COLOURS.values()])
    looks = dashes * colours
    return dict(zip(lines, looks(), strict=False))


def headline(figure, text: str, runs: list[Run]) -> None:
    """A title, and below it, smaller, where the runs were measured."""
    lines = textwrap.wrap(text, width=round(11 * figure.get_figwidth()))
    figure.suptitle("\n".join([*lines, ""]), fontsize=12)
    hardware = ", ".join(dict.fromkeys(run.hardware for run in runs))
    below = 1 - (0.23 + 0.2 * len(lines)) / figure.get_figheight()
    figure.text(0.5, below, hardware, ha="center", fontsize=8.5, color="0.35")


def draw_line(ax, curves: list[tuple], kind: str, line: str, look: dict) -> None:
    """The mean of `curves`, its band and each run; of band "none" the runs alone."""
    if max(len(x) for x, *_ in curves) == 1:
        look = look | {"marker": "o"}
    alone = kind == "none"
    thin = {"linewidth": 1.4} if alone else {"linewidth": 0.5, "alpha": 0.45}
    for x, y, _ in curves:
        ax.plot(x, y, **thin, **look)
    ends = [(x[-1], y[-1]) for x, y, missing in curves if missing]
    for x, y in ends:
        ax.plot(x, y, "x", color=look["color"])
    interrupted = f", {len(ends)} interrupted" if ends else ""
    name = f"{line} (n={len(curves)}{interrupted})"
    if alone:
        ax.plot([], [], label=name, **thin, **look)
        return
    finished = [(x, y) for x, y, missing in curves if not missing]
    averaged = finished or [(x, y) for x, y, _ in curves]
    grid = common_grid([x for x, _ in averaged])
    values = np.array([np.interp(grid, x, y) for x, y in averaged])
    low, high = band(kind, values)
    ax.fill_between(grid, low, high, color=look["color"], alpha=0.18, linewidth=0)
    ax.plot(grid, values.mean(0), linewidth=1.8, label=name, **look)


def draw(columns: dict[str, dict], kind: str, what: str, heading: str, runs: list[Run]):
    """A row of panels per script and environment, a column per axis; None without a curve.

    `columns` holds what `learning` returns by the name of its axis; the first has all lines.
    """
    panels = next(iter(columns.values()))
    if not panels:
        return None
    figure, grid = plt.subplots(
        len(panels),
        len(columns),
        figsize=(5.2 * len(columns) + 1.5, 3.1 * len(panels) + 0.7),
        layout="constrained",
        squeeze=False,
    )
    if any(len(curves) > 1 for lines in panels.values() for curves in lines.values()):
        heading += f"; {BANDS[kind]}"
    headline(figure, heading, runs)
    for row, (panel, lines) in zip(grid, panels.items(), strict=True):
        looks = styles(list(lines))
        for ax, (axis, column) in zip(row, columns.items(), strict=True):
            for line, curves in column.get(panel, {}).items():  # old records have no seconds
                draw_line(ax, curves, kind, line, looks[line])
            ax.set_xlabel(AXES[axis])
            ax.set_xlim(left=0)
            ax.xaxis.set_major_formatter(EngFormatter())
        script, env_id = panel
        row[0].set_title(f"{label(script)}: {env_id}" if script else env_id, loc="left")
        row[0].set_ylabel(what)
        handles, names = row[0].get_legend_handles_labels()
        row[-1].legend(handles, names, **LEGEND)
    return figure


# Scores


def score_lines(known: dict, target: float | None) -> list[dict]:
    """A dict per line with two runs or more: its final values, and what they amount to."""
    rows = []
    for (script, env_id), lines in known.items():
        for line, curves in lines.items():
            if len(curves) < 2:
                continue
            finals = [float(y[-1]) for _, y, _ in curves]
            low, high = iqm_interval(np.array(finals))
            row = {
                "script": script,
                "environment": env_id,
                "line": line,
                "finals": finals,
                "iqm": float(iqm(finals)),
                "low": low,
                "high": high,
            }
            if target is not None:  # when each first reached it
                reached = [x[y >= target] for x, y, _ in curves]
                row["times"] = [float(x[0]) if len(x) else None for x in reached]
            rows.append(row)
    return rows


def score_cells(rows: list[dict], target: float | None) -> list[list[str]]:
    def middle(row: dict) -> str:
        times = [np.inf if time is None else time for time in row["times"]]
        found = statistics.median(times)
        return "never" if np.isinf(found) else f"{found:,.0f}"

    columns = {
        "runs": lambda row: str(len(row["finals"])),
        "IQM (95%)": lambda row: "{iqm:,.5g} ({low:,.5g} to {high:,.5g})".format(**row),
    }
    if target is not None:
        columns[f"steps until {target:g}, median"] = middle
        columns["never"] = lambda row: str(row["times"].count(None))
    return tables.lay_out(rows, ["script", "environment", "line"], columns)


def draw_scores(rows: list[dict], what: str):
    """Interquartile means and performance profiles: the share of runs with at least each level."""
    size = (11, max(3.2, 0.4 * len(rows) + 1.6))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained")
    figure.suptitle(f"Final {what}", fontsize=12)
    names = [row["line"] for row in rows]
    if len({(row["script"], row["environment"]) for row in rows}) > 1:
        names = [f"{label(x['script'])}: {x['environment']}, {x['line']}" for x in rows]
    looks = styles(names)
    looks = [looks[name] for name in names]
    finals = [np.array(row["finals"]) for row in rows]
    everything = np.concatenate(finals)
    levels = np.linspace(everything.min(), everything.max(), 200)
    for i, row in enumerate(rows):
        look = looks[i]
        colour = look["color"]
        left.hlines(i, row["low"], row["high"], color=colour, linewidth=6, alpha=0.35)
        left.plot(row["iqm"], i, "|", color=colour, markersize=16, markeredgewidth=2.5)
        shares = (finals[i][:, None] >= levels).mean(0)
        right.plot(levels, 100 * shares, label=names[i], **look)
    left.margins(x=0.1)
    left.set_yticks(range(len(rows)), names, fontsize=8)
    left.set(ylim=(len(rows) - 0.5, -0.5), xlabel="interquartile mean and its 95% interval")
    right.set(xlabel="at least this value", ylabel="% of runs", ylim=(0, 103))
    right.legend(**LEGEND)
    return figure


def save(figure, stem: Path) -> list[Path]:
    """`figure` as `stem`.png and .svg, whose text stays text and whose bytes repeat."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    png = stem.with_name(f"{stem.name}.png")
    svg = stem.with_name(f"{stem.name}.svg")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": stem.name}):
        figure.savefig(png, dpi=130)
        figure.savefig(svg, metadata={"Date": None})
    plt.close(figure)
    return [png, svg]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = program.make_parser(__doc__, "runs")
    default = str(ROOT / "plots/out/curves")
    parser.add_argument("--out", type=program.stem, default=default, help="NAME")
    parser.add_argument("--metric", default=RETURN, help=f"of TensorBoard (default: {RETURN})")
    parser.add_argument("--x", choices=AXES, help="(default: both)")
    parser.add_argument("--by", nargs="+", metavar="NAME", help="settings that make lines")
    parser.add_argument("--band", choices=BANDS, default="bootstrap")
    parser.add_argument("--last", type=program.count, help="values that a curve is the mean of")
    parser.add_argument("--target", type=float, help="value of the metric to reach")
    return parser.parse_args(arguments)


def write(runs: list[Run], out: Path, name: str = "curves", options=None) -> list[Path]:
    """The figures that these runs have something to show for; the files."""
    options = options or parse([str(out), "--out", str(out / name)])
    metric = options.metric
    last = options.last
    axes = list(AXES) if options.x is None else [options.x]
    kept = once(runs, options.by)
    for run in runs:
        if run not in kept:
            print(f"{shown(run.path)}: another run has its settings and seed", file=sys.stderr)
    runs = kept
    series = {run.path: run.series([metric]) for run in runs}
    found = groups(runs, options.by)
    what = metric.rpartition("/")[2].replace("_", " ")
    if last == 1:
        mean_of = "each value"
    else:
        mean_of = f"mean of the last {last or f'tenth of a run, {MEAN_OF} values at most'}"
    columns = {axis: learning(found, series, metric, axis, last) for axis in axes}
    drawn = [run for run in runs if metric in series[run.path]]
    figure = draw(columns, options.band, what, f"Learning: {what}, {mean_of}", drawn)
    if not figure:
        logged = sorted(set().union(*(run.series() for run in runs)))
        said = f"no run has {metric} over {' or '.join(axes)}, but {', '.join(logged) or 'nothing'}"
        print(f"no figure: {said}", file=sys.stderr)
        return []
    files = save(figure, out / f"{name}_learning")
    for run in runs:
        if run.missing:  # it has no score
            series[run.path] = {}
    steps = learning(found, series, metric, "steps", last)
    rows = score_lines(steps, options.target)
    if len(rows) > 1:
        files += save(draw_scores(rows, f"{what}, {mean_of}"), out / f"{name}_scores")
        numbers = out / f"{name}_scores.json"
        tables.write_json(numbers, rows)
        files.append(numbers)
        print(f"\n{tables.as_text(score_cells(rows, options.target), labels=3)}\n")
    elif options.target is not None:
        print("no scores: they need two lines of two runs or more that ended", file=sys.stderr)
    return files


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    runs = run_dirs.read_and_tell(options.runs)
    try:
        if not runs:
            raise ValueError(f"no runs in {', '.join(map(shown, options.runs))}")
        options.by = options.by and [setting(name, runs) for name in options.by]
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    files = write(runs, options.out.parent, options.out.name, options)
    for path in files:
        print(f"written: {shown(path)}")
    return int(not files)


if __name__ == "__main__":
    program.start(main)
