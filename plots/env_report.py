"""Tables and figures of the scaling study, from the record of plots/measure/env_scaling.py."""

import statistics
from pathlib import Path

import curves
import matplotlib.pyplot as plt
import numpy as np

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
    "kernel, CPU": "tab:red",
}
SHADES = {"kernel, TPB": "Oranges", "Numba-CUDA, TPB": "Greens"}  # by threads per block


# Reductions


def distinct(rows: list[dict], name: str) -> list:
    """The values of `name` in the order in which the rows have them."""
    return list(dict.fromkeys(row[name] for row in rows))


def medians(rows: list[dict], **which) -> dict[int, float]:
    """Median seconds by number of environments, or by work, of the rows that match."""
    key = "work" if "num_envs" in which else "num_envs"
    return {
        row[key]: statistics.median(row["seconds"])
        for row in rows
        if "seconds" in row and all(row[name] == value for name, value in which.items())
    }


def turning_point(num_envs: list[int], seconds: list[float]) -> dict:
    """Fits seconds = flat + per_env * N, all errors relative -> both, N where they are equal.

    Relative weights, because the times span decades: weighted least squares, solved exactly. Both
    coefficients are at least 0; `turning` is None where one of them is 0.
    """
    n, t = np.array(num_envs, float), np.array(seconds)
    columns = np.stack([1 / t, n / t], axis=1)
    flat, per_env = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)[0]
    if flat <= 0:
        flat, per_env = 0.0, columns[:, 1].sum() / np.square(columns[:, 1]).sum()
    elif per_env <= 0:
        flat, per_env = columns[:, 0].sum() / np.square(columns[:, 0]).sum(), 0.0
    turning = float(flat / per_env) if flat and per_env else None
    return {"flat": float(flat), "per_env": float(per_env), "turning": turning}


def describe_turning(fit: dict, num_envs: list[int]) -> str:
    turning = fit["turning"]
    if turning is None:
        return "none"
    if turning > max(num_envs):
        return f"above {max(num_envs):,}"
    return f"{turning:,.0f}" if turning > min(num_envs) else "below 1"


# Tables


def short(number: float) -> str:
    """1.23 M rather than 1,234,567."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def limits_cells(part: dict) -> list[list[str]]:
    return [["device", "copy, bytes/s"]] + [
        [device, short(found["bytes_per_second"])] for device, found in part["devices"].items()
    ]


def steps_cells(part: dict) -> list[list[str]]:
    numbers = {row["num_envs"] for row in part["rows"]}
    shown = [n for n in SHOWN if n in numbers] or sorted(numbers)
    table = [["arm", *(f"steps/s at {n:,}" for n in shown), "flat, us", "ns per env", "turning"]]
    for arm in distinct(part["rows"], "arm"):
        seconds = medians(part["rows"], arm=arm)
        line = [arm, *(short(n / seconds[n]) if n in seconds else "-" for n in shown)]
        if len(seconds) > 2:
            fit = turning_point(list(seconds), list(seconds.values()))
            line += [f"{fit['flat'] * 1e6:,.1f}", f"{fit['per_env'] * 1e9:,.2f}"]
            line.append(describe_turning(fit, list(seconds)))
        table.append(line + ["-"] * (len(table[0]) - len(line)))
    return table


def work_cells(part: dict) -> list[list[str]]:
    works = sorted({row["work"] for row in part["rows"]})
    table = [["arm", "environments", *(f"us at {work:,}x" for work in works), "last / first"]]
    for arm, num_envs in dict.fromkeys((row["arm"], row["num_envs"]) for row in part["rows"]):
        seconds = medians(part["rows"], arm=arm, num_envs=num_envs)
        line = [f"{seconds[work] * 1e6:,.1f}" if work in seconds else "-" for work in works]
        ends = [seconds[work] for work in (works[0], works[-1]) if work in seconds]
        line.append(f"{ends[1] / ends[0]:,.0f}x" if len(ends) == 2 else "-")
        table.append([arm, f"{num_envs:,}", *line])
    return table


TABLES = {  # part -> its heading and what makes its cells, a heading line first
    "limits": ("Limits", limits_cells),
    "steps": ("Steps", steps_cells),
    "work": ("Repeated work", work_cells),
}


def tables(record: dict) -> list[tuple[str, list[list[str]]]]:
    """(heading, cells) of each part that is there; what could not run is named in a line."""
    found = []
    for part, (heading, cells) in TABLES.items():
        if part in record:
            rows = cells(record[part])
            rows += [[n, f"skipped: {why}"] for n, why in record[part].get("skipped", {}).items()]
            width = len(rows[0])
            found.append((heading, [row + [""] * (width - len(row)) for row in rows]))
    return found


# Figures


def style(arm: str) -> dict:
    """A colour for each arm, darker with more threads per block; squares for those on a GPU."""
    colour = next((each for start, each in COLOURS.items() if arm.startswith(start)), "black")
    start, _, threads = arm.rpartition(" ")
    if start in SHADES:
        colour = plt.get_cmap(SHADES[start])(0.3 + 0.07 * np.log2(int(threads)))
    marker = "s" if start in SHADES or "GPU" in arm else "o"
    return {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1.4}


def axes(part: dict, title: str, xlabel: str, ylabel: str):
    """A figure, titled by what was measured and on which machine, and its axes."""
    cpu, gpu = part["machine"]["cpu"], part["machine"]["gpu"]
    figure, ax = plt.subplots(figsize=(8, 5.2), layout="constrained")
    figure.suptitle(title, fontsize=13)
    where = f"CartPole-v1 on {cpu['model']}, {cpu['cores']} cores" + (f", {gpu}" if gpu else "")
    ax.set_title(where, fontsize=9, color="0.35")
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    ax.margins(x=0.05)
    return figure, ax


def throughput(record: dict):
    """Steps/s against their number, a diamond at each turning point, and what memory allows."""
    part = record["steps"]
    figure, ax = axes(part, "Throughput", "environments", "environment steps per second")
    diamond = {"marker": "D", "markersize": 8, "fillstyle": "none"}
    for arm in distinct(part["rows"], "arm"):
        seconds = medians(part["rows"], arm=arm)
        speeds = [n / t for n, t in seconds.items()]
        ax.plot(seconds.keys(), speeds, label=arm, **style(arm))
        fit = turning_point(list(seconds), list(seconds.values())) if len(seconds) > 2 else {}
        turning = fit.get("turning")
        if turning and min(seconds) < turning < max(seconds):
            ax.plot(turning, turning / (2 * fit["flat"]), **style(arm) | diamond)
    ax.plot(
        [], [], color="0.3", linestyle="", label="turning point of flat + linear fit", **diamond
    )
    devices = record.get("limits", {}).get("devices", {})
    for (device, limits), dashes in zip(devices.items(), (":", "-."), strict=False):
        rate, memory = limits["bytes_per_second"], device.upper()
        label = f"limit of {memory} memory: {STEP_BYTES} bytes\nper step at {rate / 1e9:,.0f} GB/s"
        ax.axhline(rate / STEP_BYTES, color="black", linewidth=1, linestyle=dashes, label=label)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def work(record: dict):
    """Time of a step relative to that with its arithmetic made once."""
    part = record["work"]
    labels = "arithmetic per step, times CartPole's own", "time of a step / time at 1x"
    figure, ax = axes(part, "Repeated work", *labels)
    numbers = sorted(distinct(part["rows"], "num_envs"))
    for arm in distinct(part["rows"], "arm"):
        for num_envs, marker in zip(numbers, "osD^", strict=False):
            seconds = medians(part["rows"], arm=arm, num_envs=num_envs)
            if 1 in seconds:  # else it failed
                ratios = [value / seconds[1] for value in seconds.values()]
                look = style(arm) | {"marker": marker}
                ax.plot(seconds.keys(), ratios, label=f"{arm}, {num_envs:,}", **look)
    works = sorted({row["work"] for row in part["rows"]})
    ax.plot(works, works, color="black", linewidth=1, linestyle=(0, (1, 1)), label="linear")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def draw(record: dict, stem: Path) -> list[Path]:
    """NAME_throughput and NAME_work as PNG and SVG, of the parts that are there and have rows."""
    files = []
    for part, function in (("steps", throughput), ("work", work)):
        if record.get(part, {}).get("rows"):
            files += curves.save(
                function(record), stem.with_name(f"{stem.name}_{function.__name__}")
            )
    return files
