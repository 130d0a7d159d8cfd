"""What the programs of the scaling study share: turning points, colours, its table and figures."""

import statistics
from pathlib import Path

import curves
import matplotlib.pyplot as plt
import numpy as np
import run_dirs
import tables
from tables import in_units

# per environment: state, length, random seed (shared), action read; state, length, observation,
# final observation, reward, return, final length, terminated, truncated and ended written
STEP_BYTES = (16 + 4 + 8) + (16 + 4 + 16 + 16 + 4 + 4 + 4 + 3)
SHOWN = (1, 64, 1024, 4096, 65_536, 4**10)  # numbers of environments that have a column
BLOCKS = "kernel, TPB "  # with which the names of arms begin that differ in threads per block
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


def fit_line(seconds: dict[int, float]) -> tuple[float, float] | None:
    """Fits seconds of N = flat + per_env * N, all errors relative -> flat, per_env.

    Relative weights, because the times span decades: weighted least squares, solved exactly. Both
    are at least 0. Two points are no fit.
    """
    if len(seconds) < 3:
        return None
    n = np.array(list(seconds), float)
    t = np.array(list(seconds.values()))
    columns = np.stack([1 / t, n / t], axis=1)
    flat, per_env = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)[0]
    alone = columns.sum(0) / np.square(columns).sum(0)  # each with the other one 0
    if flat <= 0:
        return 0.0, float(alone[1])
    if per_env <= 0:
        return float(alone[0]), 0.0
    return float(flat), float(per_env)


def turning_point(seconds: dict[int, float]) -> float | None:
    """N where both parts of the fit are equal; None without a fit, or where one of them is 0."""
    flat, per_env = fit_line(seconds) or (0.0, 0.0)
    return flat / per_env if flat and per_env else None


def measured_turning(seconds: dict[int, float]) -> float | None:
    """The turning point, if it is among the numbers that were measured."""
    turning = turning_point(seconds)
    return turning if turning and min(seconds) < turning < max(seconds) else None


def describe_turning(seconds: dict[int, float]) -> str:
    if fit_line(seconds) is None:
        return "-"
    turning = turning_point(seconds)
    if turning is None:
        return "none"
    if turning > max(seconds):
        return f"above {max(seconds):,}"
    least = min(seconds)
    return f"{turning:,.0f}" if turning > least else f"below {least:,}"


def by_threads(rows: list[dict]) -> dict[int, dict[int, float]]:
    """{environments: {threads per block: median seconds}}, where several were measured."""
    found: dict = {}
    for arm in arms(rows):
        if arm.startswith(BLOCKS):
            threads = int(arm.removeprefix(BLOCKS))
            for num_envs, seconds in medians(rows, arm).items():
                found.setdefault(num_envs, {})[threads] = seconds
    return {n: found[n] for n in SHOWN if len(found.get(n, ())) > 1}


def describe_threads(rows: list[dict]) -> list[str]:
    """A line per number of environments: the best block size, and those as good."""
    lines = []
    for num_envs, seconds in by_threads(rows).items():
        best = min(seconds, key=seconds.get)
        near = [n for n, found in seconds.items() if found <= 1.05 * seconds[best]]
        lines.append(
            f"kernel at {num_envs:,}: fastest with {best:,} threads per block, "
            f"{1e6 * seconds[best]:,.1f} us; within 5%: {', '.join(map(str, near))}"
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
        line = [arm, *speeds(seconds, shown), "-", "-", describe_turning(seconds)]
        if fit := fit_line(seconds):
            flat, per_env = fit
            line[-3:-1] = f"{flat * 1e6:,.1f}", f"{per_env * 1e9:,.2f}"
        table.append(line)
    return table + skipped(record, len(heading))


def skipped(record: dict, width: int) -> list[list[str]]:
    """A line of a table of this width for each arm that could not run."""
    blank = [""] * (width - 2)
    return [[arm, f"skipped: {why}", *blank] for arm, why in record["skipped"].items()]


# Figures


def on_gpu(arm: str) -> bool:
    return "GPU" in arm or "TPB" in arm


def style(arm: str) -> dict:
    """A colour for each arm, darker with more threads per block; squares for those on a GPU."""
    if arm.startswith(BLOCKS):
        threads = int(arm.removeprefix(BLOCKS))
        colour = plt.get_cmap("Oranges")(0.3 + 0.07 * np.log2(threads))
    else:
        colours = [colour for start, colour in COLOURS.items() if arm.startswith(start)]
        colour = colours[0] if colours else "black"
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
        if turning := measured_turning(seconds):
            flat, _ = fit_line(seconds)
            ax.plot(turning, turning / (2 * flat), **look | diamond)
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
    """Seconds of a step against threads per block; None where there is nothing to compare."""
    found = by_threads(record["rows"])
    if not found:
        return None
    figure, ax = plt.subplots(figsize=(5.8, 4), layout="constrained")
    figure.suptitle(f"Threads per block on {record['machine']['gpu']}", fontsize=12)
    for shade, (num_envs, seconds) in enumerate(found.items(), start=1):
        colour = plt.get_cmap("viridis_r")(shade / len(found))
        ax.plot(seconds.keys(), seconds.values(), "o-", color=colour, label=f"{num_envs:,}")
    threads = sorted({n for seconds in found.values() for n in seconds})
    ax.set(title="kernel", xscale="log", yscale="log")
    ax.set(xlabel="threads per block", ylabel="seconds of a step of all")
    ax.set_xticks(threads, [str(n) for n in threads])
    ax.minorticks_off()
    ax.legend(title="environments", **curves.LEGEND)
    return figure


def write(record: dict, stem: Path) -> None:
    """Prints and writes NAME.md and NAME.json, and draws NAME_throughput and NAME_blocks."""
    title = "CartPole-v1, its steps against their number"
    below = []
    for device, rate in record["bytes_per_second"].items():
        below.append(f"{device}: {in_units(rate)} bytes/s copied")
    below += describe_threads(record["rows"])
    curves.save(throughput(record), stem.with_name(f"{stem.name}_throughput"))
    if figure := blocks(record):
        curves.save(figure, stem.with_name(f"{stem.name}_blocks"))
    tables.write_report(stem, title, cells(record), record, below=below, labels=1)
