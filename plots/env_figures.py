"""The figures of the scaling study, from its record; `plots/env_scaling.py figures` calls this."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from env_scaling import SOLVED, STEP_BYTES, distinct, medians, turning_point  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

STYLES = {  # beginning of an arm's name -> colour
    "SB3": "tab:brown",
    "Gymnasium sync": "tab:gray",
    "Gymnasium async": "tab:olive",
    "EnvPool": "tab:pink",
    "tensors, ": "tab:blue",
    "tensors compiled": "tab:cyan",
    "tensors": "tab:blue",  # of the learners
    "kernel, CPU": "tab:red",
    "kernel": "tab:orange",
    "Numba": "tab:green",
}
BLOCK_LINES = {1: ":", 16: "-.", 32: (0, (5, 1)), 64: "-", 256: "--", 1024: (0, (3, 1, 1, 1))}


def style(arm: str) -> dict:
    """A colour for each kind; dashes tell threads per block apart, and tensors on GPU and CPU."""
    colour = next(colour for start, colour in STYLES.items() if arm.startswith(start))
    threads = int(arm.rpartition(" ")[2]) if "TPB" in arm else None
    line = BLOCK_LINES.get(threads, "--" if arm.endswith("GPU") else "-")
    return {"color": colour, "linestyle": line, "marker": "o", "markersize": 3.5, "linewidth": 1.4}


def subtitle(part: dict) -> str:
    machine = part["machine"]
    cpu = f"{machine['cpu']['model']}, {machine['cpu']['cores']} cores"
    return f"CartPole-v1 on {machine['gpu'] or cpu}"


def axes(part: dict, title: str, xlabel: str, ylabel: str):
    figure, ax = plt.subplots(figsize=(8, 5.2), layout="constrained")
    figure.suptitle(title, fontsize=13)
    ax.set_title(subtitle(part), fontsize=9, color="0.35")
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    ax.grid(True, which="major", color="0.9")
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def step_time(record: dict):
    """Seconds of a step against the number of environments, a diamond at each turning point."""
    part = record["steps"]
    labels = "environments", "seconds per step of all environments"
    figure, ax = axes(part, "Time of one step", *labels)
    for arm in distinct(part["rows"], "arm"):
        seconds = medians(part["rows"], arm=arm)
        ax.plot(seconds.keys(), seconds.values(), label=arm, **style(arm))
        if len(seconds) > 2:
            fit = turning_point(list(seconds), list(seconds.values()))
            if fit["turning"] and min(seconds) < fit["turning"] < max(seconds):
                height = 2 * fit["flat"]
                colour = style(arm)["color"]
                ax.plot(fit["turning"], height, "D", color=colour, markersize=8, fillstyle="none")
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
    for device, limits in record.get("limits", {}).get("devices", {}).items():
        rate, memory = limits["bytes_per_second"], {"cpu": "CPU", "cuda": "GPU"}[device]
        label = f"limit of {memory} memory: {STEP_BYTES} bytes\nper step at {rate / 1e9:,.0f} GB/s"
        ax.axhline(
            rate / STEP_BYTES, color="black", linewidth=1, linestyle=(0, (1, 1)), label=label
        )
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def repeated_work(record: dict):
    """Time of a step relative to that with its arithmetic made once."""
    part = record["work"]
    labels = "arithmetic per step, times CartPole's own", "time of a step / time at 1x"
    figure, ax = axes(part, "Repeated work", *labels)
    markers = dict(zip(sorted({row["num_envs"] for row in part["rows"]}), "osD^", strict=False))
    for arm in distinct(part["rows"], "arm"):
        for num_envs, marker in markers.items():
            seconds = medians(part["rows"], arm=arm, num_envs=num_envs)
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
                rate = run["sps_steady"] or run["sps_inclusive"]
                points = [(s if cold else step / rate, v) for s, v, step in run["curve"]]
                curves.append(np.array(points).T)
            grid = np.geomspace(min(c[0, 0] for c in curves), max(c[0, -1] for c in curves), 200)
            values = np.array([np.interp(grid, *curve) for curve in curves])
            colour = style(back_end)["color"]
            num_envs = runs[0]["flags"]["num_envs"]
            ax.plot(
                grid, values.mean(0), color=colour, label=f"{back_end}, {num_envs:,} environments"
            )
            ax.fill_between(
                grid, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0
            )
        ax.axhline(SOLVED, color="black", linewidth=1, linestyle=(0, (1, 1)))
        what = "from the start of the process" if cold else "after warm-up"
        ax.set(xscale="log", xlabel=f"training seconds {what}", ylim=(0, 510))
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(True, which="major", color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel(f"mean return: {len(runs)} seeds, their range")
    both[0].set_title(subtitle(part), fontsize=9, color="0.35", loc="left")
    both[1].legend(loc="lower right", fontsize=8, frameon=False)
    return figure


FIGURES = {
    "step_time": ("steps", step_time),
    "throughput": ("steps", throughput),
    "work": ("work", repeated_work),
    "learning": ("learn", learning),
}


def draw(record: dict, stem: Path) -> list[Path]:
    """NAME_<figure>.png of every part that is there and has rows."""
    paths = []
    for name, (part, function) in FIGURES.items():
        if record.get(part, {}).get("rows"):
            paths.append(stem.with_name(f"{stem.name}_{name}.png"))
            figure = function(record)
            figure.savefig(paths[-1], dpi=150)
            plt.close(figure)
    return paths
