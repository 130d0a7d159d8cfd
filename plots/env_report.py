"""The table and the figure of the scaling study, from the record of plots/measure/env_scaling.py.

python plots/env_report.py plots/results/env_scaling/NAME.json       draws both anew
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import curves
import matplotlib.pyplot as plt
import numpy as np
import program
import run_dirs
import tables
from tables import in_units

# per environment: state, length, random seed (shared), action read; state, length, observation,
# final observation, reward, return, final length, terminated, truncated and ended written
STEP_BYTES = (16 + 4 + 8) + (16 + 4 + 16 + 16 + 4 + 4 + 4 + 3)
SHOWN = (1, 64, 1024, 4096, 65_536, 4**10)  # numbers of environments that have a column
COLOURS = {  # beginning of an arm's name -> colour; the first that fits
    "SB3": "tab:brown",
    "Gymnasium sync": "tab:gray",
    "Gymnasium async": "tab:olive",
    "EnvPool": "tab:pink",
    "tensors, GPU": "navy",
    "tensors compiled, GPU": "tab:purple",
    "tensors compiled": "tab:cyan",
    "tensors": "tab:blue",
    "kernel": "tab:red",
}
SHADES = {"kernel, TPB": "Oranges", "Numba-CUDA, TPB": "Greens"}  # by threads per block


# Reductions


def arms(rows: list[dict]) -> list[str]:
    """Their names, in the order in which the rows have them."""
    return list(dict.fromkeys(row["arm"] for row in rows))


def medians(rows: list[dict], arm: str) -> dict[int, float]:
    """Median seconds of a step by number of environments."""
    found = {}
    for row in rows:
        if row["arm"] == arm and "seconds" in row:
            found[row["num_envs"]] = statistics.median(row["seconds"])
    return found


def turning_point(seconds: dict[int, float]) -> dict | None:
    """Fits seconds of N = flat + per_env * N, all errors relative -> both, N where they are equal.

    Relative weights, because the times span decades: weighted least squares, solved exactly. Both
    coefficients are at least 0; `turning` is None where one of them is 0. Two points are no fit.
    """
    if len(seconds) < 3:
        return None
    n = np.array(list(seconds), float)
    t = np.array(list(seconds.values()))
    columns = np.stack([1 / t, n / t], axis=1)
    flat, per_env = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)[0]
    alone = columns.sum(0) / np.square(columns).sum(0)  # each with the other one 0
    if flat <= 0:
        flat = 0.0
        per_env = alone[1]
    elif per_env <= 0:
        flat = alone[0]
        per_env = 0.0
    turning = float(flat / per_env) if flat and per_env else None
    return {"flat": float(flat), "per_env": float(per_env), "turning": turning}


def describe_turning(fit: dict, seconds: dict[int, float]) -> str:
    turning = fit["turning"]
    if turning is None:
        return "none"
    if turning > max(seconds):
        return f"above {max(seconds):,}"
    least = min(seconds)
    return f"{turning:,.0f}" if turning > least else f"below {least:,}"


def by_threads(rows: list[dict], family: str) -> dict[int, dict[int, float]]:
    """{environments: {threads per block: median seconds}} of "kernel, TPB" or of Numba's.

    Where only one number of threads was measured, there is nothing to compare.
    """
    found: dict = {}
    for arm in arms(rows):
        start, _, threads = arm.rpartition(" ")
        if start != family:
            continue
        for num_envs, seconds in medians(rows, arm).items():
            found.setdefault(num_envs, {})[int(threads)] = seconds
    return {num_envs: seconds for num_envs, seconds in found.items() if len(seconds) > 1}


def describe_threads(rows: list[dict]) -> list[str]:
    """A line per family and number of environments: the best block size, and those as good."""
    lines = []
    for family in SHADES:
        for num_envs, seconds in by_threads(rows, family).items():
            if num_envs not in SHOWN:
                continue
            best = min(seconds, key=seconds.get)
            near = [n for n, found in seconds.items() if found <= 1.05 * seconds[best]]
            lines.append(
                f"{family.partition(',')[0]} at {num_envs:,}: fastest with {best:,} threads per "
                f"block, {1e6 * seconds[best]:,.1f} us; within 5%: {', '.join(map(str, near))}"
            )
    return lines


# The table


def speeds(seconds: dict[int, float], numbers: list[int]) -> list[str]:
    """Steps/s with so many environments."""
    return [in_units(n / seconds[n]) if n in seconds else "-" for n in numbers]


def cells(record: dict) -> list[list[str]]:
    """A line per arm, heading first; what could not run is named."""
    rows = record["rows"]
    numbers = {row["num_envs"] for row in rows}
    shown = [n for n in SHOWN if n in numbers] or sorted(numbers)
    heading = ["arm", *(f"steps/s at {n:,}" for n in shown), "flat, us", "ns per env", "turning"]
    table = [heading]
    for arm in arms(rows):
        seconds = medians(rows, arm)
        line = [arm, *speeds(seconds, shown)]
        fit = turning_point(seconds)
        if fit:
            line.append(f"{fit['flat'] * 1e6:,.1f}")
            line.append(f"{fit['per_env'] * 1e9:,.2f}")
            line.append(describe_turning(fit, seconds))
        else:
            line += ["-", "-", "-"]
        table.append(line)
    for arm, reason in record["skipped"].items():
        blank = [""] * (len(heading) - 2)
        table.append([arm, f"skipped: {reason}", *blank])
    return table


# The figure


def on_gpu(arm: str) -> bool:
    return "GPU" in arm or "TPB" in arm


def style(arm: str) -> dict:
    """A colour for each arm, darker with more threads per block; squares for those on a GPU."""
    colours = [colour for start, colour in COLOURS.items() if arm.startswith(start)]
    colour = colours[0] if colours else "black"
    start, _, threads = arm.rpartition(" ")
    if start in SHADES:
        shade = 0.3 + 0.07 * np.log2(int(threads))
        colour = plt.get_cmap(SHADES[start])(shade)
    return {
        "color": colour,
        "marker": "s" if on_gpu(arm) else "o",
        "markersize": 3.5,
        "linewidth": 1.4,
    }


def throughput(record: dict):
    """Steps/s against their number, a diamond at each turning point, and what memory allows."""
    rows = record["rows"]
    gpu = record["machine"]["gpu"]
    where = f"CartPole-v1 on {run_dirs.processor(record['machine']['cpu'])}"
    if gpu:
        where += f", {gpu}"
    figure, ax = plt.subplots(figsize=(8, 5.2), layout="constrained")
    figure.suptitle("Throughput", fontsize=13)
    if any("TPB" in arm for arm in arms(rows)):
        where += "; TPB: threads per block"
    ax.set_title(where, fontsize=9, color="0.35")
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="environments", ylabel="environment steps per second")
    ax.margins(x=0.05)
    diamond = {"marker": "D", "markersize": 8, "fillstyle": "none"}
    for arm in arms(rows):
        seconds = medians(rows, arm)
        look = style(arm)
        ax.plot(seconds.keys(), [n / t for n, t in seconds.items()], label=arm, **look)
        fit = turning_point(seconds) or {"turning": None}
        turning = fit["turning"]
        if turning and min(seconds) < turning < max(seconds):
            ax.plot(turning, turning / (2 * fit["flat"]), **look | diamond)
    words = "turning point of flat + linear fit"
    ax.plot([], [], color="0.3", linestyle="", label=words, **diamond)
    used = {"cuda" if on_gpu(arm) else "cpu" for arm in arms(rows)}
    limits = record["bytes_per_second"].items()
    for (device, rate), dashes in zip(limits, (":", "-."), strict=False):
        if device not in used:
            continue
        label = f"limit of {device.upper()} memory: {STEP_BYTES} bytes\n"
        label += f"per step at {rate / 1e9:,.0f} GB/s"
        ax.axhline(rate / STEP_BYTES, color="black", linewidth=1, linestyle=dashes, label=label)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def blocks(record: dict):
    """Seconds of a step against threads per block, a panel per family; None if one is all."""
    rows = record["rows"]
    known = {family: by_threads(rows, family) for family in SHADES}
    known = {family: found for family, found in known.items() if found}
    if not known:
        return None
    size = (4.4 * len(known) + 1.4, 4)
    figure, panels = plt.subplots(
        1, len(known), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    figure.suptitle(f"Threads per block on {record['machine']['gpu']}", fontsize=12)
    for ax, (family, found) in zip(panels[0], known.items(), strict=True):
        numbers = [n for n in SHOWN if n in found]
        for shade, num_envs in enumerate(numbers, start=1):
            colour = plt.get_cmap("viridis_r")(shade / len(numbers))
            seconds = found[num_envs]
            ax.plot(seconds.keys(), seconds.values(), "o-", color=colour, label=f"{num_envs:,}")
        threads = sorted({n for seconds in found.values() for n in seconds})
        ax.set(title=family.partition(",")[0], xscale="log", yscale="log")
        ax.set(xlabel="threads per block")
        ax.set_xticks(threads, [str(n) for n in threads])
        ax.minorticks_off()
    panels[0][0].set_ylabel("seconds of a step of all")
    panels[0][-1].legend(title="environments", **curves.LEGEND)
    return figure


def write(record: dict, stem: Path) -> None:
    """Prints and writes NAME.md and NAME.json, and draws NAME_throughput and NAME_blocks."""
    title = f"CartPole-v1, its steps against their number: {record['command']}"
    above = [title, *run_dirs.describe(record["machine"])]
    if "note" in record:
        above.append(record["note"])
    below = []
    for device, rate in record["bytes_per_second"].items():
        below.append(f"{device}: {in_units(rate)} bytes/s copied")
    below += describe_threads(record["rows"])
    curves.save(throughput(record), stem.with_name(f"{stem.name}_throughput"))
    if figure := blocks(record):
        curves.save(figure, stem.with_name(f"{stem.name}_blocks"))
    tables.write_report(stem, above, cells(record), below, record, labels=1)


def redraw(doc: str, write: Callable, arguments: list[str] | None = None) -> int:
    """A program that calls write(record, stem) for the records that it is given."""
    parser = program.make_parser(doc)
    parser.add_argument("records", type=run_dirs.real, nargs="+")
    for path in parser.parse_args(arguments).records:
        try:
            record = run_dirs.read_json(path)
        except ValueError as problem:
            raise SystemExit(f"error: {run_dirs.shown(path.parent)} {problem}") from None
        try:
            write(record, path.with_suffix(""))
        except run_dirs.DAMAGED:
            raise SystemExit(f"error: {run_dirs.shown(path)} is no record of the study") from None
    return 0


def main(arguments: list[str] | None = None) -> int:
    return redraw(__doc__, write, arguments)


if __name__ == "__main__":
    program.start(main)
