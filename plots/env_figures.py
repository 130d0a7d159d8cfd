"""The figures of the scaling study, from the record that plots/measure/env_scaling.py makes."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from env_tables import SOLVED, STEP_BYTES, distinct, medians, turning_point  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

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
    "kernel": "tab:orange",
}
SHADES = {"kernel, TPB": "Oranges", "Numba-CUDA, TPB": "Greens"}  # by threads per block
plt.rcParams |= {"axes.grid": True, "grid.color": "0.9", "axes.axisbelow": True}
plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}


def style(arm: str) -> dict:
    """A colour for each arm, darker with more threads per block; squares for those on a GPU."""
    colour = next((each for start, each in COLOURS.items() if arm.startswith(start)), "black")
    start, _, threads = arm.rpartition(" ")
    if start in SHADES:
        colour = plt.get_cmap(SHADES[start])(0.3 + 0.07 * np.log2(int(threads)))
    marker = "s" if start in SHADES or "GPU" in arm else "o"
    return {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1.4}


def subtitle(part: dict) -> str:
    cpu, gpu = part["machine"]["cpu"], part["machine"]["gpu"]
    return f"CartPole-v1 on {cpu['model']}, {cpu['cores']} cores" + (f", {gpu}" if gpu else "")


def axes(part: dict, title: str, xlabel: str, ylabel: str):
    figure, ax = plt.subplots(figsize=(8, 5.2), layout="constrained")
    figure.suptitle(title, fontsize=13)
    ax.set_title(subtitle(part), fontsize=9, color="0.35")
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    return figure, ax


def step_time(record: dict):
    """Seconds of a step against the number of environments, a diamond at each turning point."""
    part = record["steps"]
    figure, ax = axes(part, "Time of one step", "environments", "seconds per step of all")
    for arm in distinct(part["rows"], "arm"):
        seconds = medians(part["rows"], arm=arm)
        ax.plot(seconds.keys(), seconds.values(), label=arm, **style(arm))
        if len(seconds) > 2:
            fit = turning_point(list(seconds), list(seconds.values()))
            if fit["turning"] and min(seconds) < fit["turning"] < max(seconds):
                diamond = {"marker": "D", "markersize": 8, "fillstyle": "none"}
                ax.plot(fit["turning"], 2 * fit["flat"], **style(arm) | diamond)
    ax.plot([], [], "D", color="0.3", fillstyle="none", label="turning point of flat + linear fit")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def throughput(record: dict):
    """Steps/s against the number of environments, with what memory allows."""
    part = record["steps"]
    figure, ax = axes(part, "Throughput", "environments", "environment steps per second")
    for arm in distinct(part["rows"], "arm"):
        seconds = medians(part["rows"], arm=arm)
        speeds = [n / t for n, t in seconds.items()]
        ax.plot(seconds.keys(), speeds, label=arm, **style(arm))
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


def learning(record: dict):
    """Evaluation against training time, cold and warm; the mean of the seeds and their range."""
    part = record["learn"]
    figure, both = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
    figure.suptitle("Evaluation on Gymnasium's CartPole-v1 against training time", fontsize=13)
    for ax, cold in zip(both, (True, False), strict=True):
        for back_end in distinct(part["rows"], "back_end"):
            runs = [row for row in part["rows"] if row["back_end"] == back_end]
            curves = []
            for run in runs:
                seconds, values, steps = np.array(run["curve"]).T
                rate = run["sps_steady"] or run["sps_inclusive"]
                curves.append((seconds if cold else steps / rate, values))
            grid = np.geomspace(min(x[0] for x, _ in curves), max(x[-1] for x, _ in curves), 200)
            values = np.array([np.interp(grid, *curve) for curve in curves])
            label = f"{back_end}, {runs[0]['flags']['num_envs']:,} environments"
            look = {"color": style(back_end)["color"]}
            ax.plot(grid, values.mean(0), label=label, **look)
            ax.fill_between(grid, values.min(0), values.max(0), alpha=0.15, linewidth=0, **look)
        ax.axhline(SOLVED, color="black", linewidth=1, linestyle=(0, (1, 1)))
        what = "from the start of the process" if cold else "after warm-up"
        ax.set(xscale="log", xlabel=f"training seconds {what}", ylim=(0, 510))
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    both[0].set_ylabel(f"mean return: {len(runs)} seeds, their range")
    both[0].set_title(subtitle(part), fontsize=9, color="0.35", loc="left")
    both[1].legend(loc="lower right", fontsize=8, frameon=False)
    return figure


FIGURES = {step_time: "steps", throughput: "steps", work: "work", learning: "learn"}


def draw(record: dict, stem: Path) -> list[Path]:
    """NAME_<figure>.png of every part that is there and has rows."""
    paths = []
    for function, part in FIGURES.items():
        if record.get(part, {}).get("rows"):
            paths.append(stem.with_name(f"{stem.name}_{function.__name__}.png"))
            figure = function(record)
            figure.savefig(paths[-1], dpi=150)
            plt.close(figure)
    return paths
