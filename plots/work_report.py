"""The table and the figure of CartPole with more work per step, from env_work.py's record.

python plots/work_report.py plots/results/env_work_cpu.json       draws both anew
"""

import math
from pathlib import Path

import curves
import env_report
import matplotlib.pyplot as plt
import run_dirs


def works_of(rows: list[dict], arm: str) -> list[int]:
    return sorted({row["work"] for row in rows if row["arm"] == arm})


def of_arm(rows: list[dict], arm: str, work: int) -> dict[int, float]:
    """Median seconds of a step by number of environments."""
    return env_report.medians([row for row in rows if row["work"] == work], arm)


def growth(rows: list[dict], arm: str, num_envs: int) -> float | None:
    """How steeply the time grows with the work: the slope between least and most, on log axes.

    1 is in proportion, 0 not at all; None of less than two points.
    """
    found = {}
    for work in works_of(rows, arm):
        if seconds := of_arm(rows, arm, work).get(num_envs):
            found[work] = seconds
    if len(found) < 2:
        return None
    least = min(found)
    most = max(found)
    return math.log(found[most] / found[least]) / math.log(most / least)


def cells(record: dict) -> list[list[str]]:
    """A line per arm and work; the growth stands with the arm's first line."""
    rows = record["rows"]
    numbers = sorted({row["num_envs"] for row in rows})
    heading = ["arm", "substeps"]
    heading += [f"us at {n:,}" for n in numbers]
    named = ", ".join(f"{n:,}" for n in numbers)
    heading += ["turning point", f"growth with work at {named}"]
    table = [heading]
    for arm in env_report.arms(rows):
        slopes = []
        for n in numbers:
            slope = growth(rows, arm, n)
            slopes.append("-" if slope is None else f"{slope:.2f}")
        said = ", ".join(slopes)
        for work in works_of(rows, arm):
            seconds = of_arm(rows, arm, work)
            line = [arm, str(work)]
            for n in numbers:
                line.append(f"{1e6 * seconds[n]:,.1f}" if n in seconds else "-")
            fit = env_report.turning_point(seconds)
            line.append(env_report.describe_turning(fit, seconds) if fit else "-")
            table.append([*line, said])
            said = ""  # in the first line only
    for arm, reason in record["skipped"].items():
        blank = [""] * (len(heading) - 2)
        table.append([arm, f"skipped: {reason}", *blank])
    return table


def draw_points(ax, points: dict, arm: str) -> None:
    """A line of what is known of {substeps: value}."""
    known = {work: value for work, value in points.items() if value}
    if known:
        ax.plot(known.keys(), known.values(), label=arm, **env_report.style(arm))


def draw(record: dict):
    """Left how the time grows with the work, at a few numbers; right the turning points."""
    rows = record["rows"]
    numbers = sorted({row["num_envs"] for row in rows})
    shown = [numbers[0], numbers[len(numbers) // 2], numbers[-1]]
    figure, panels = plt.subplots(1, 4, figsize=(13, 3.8), layout="constrained")
    for ax, num_envs in zip(panels, shown, strict=False):
        plural = "" if num_envs == 1 else "s"
        ax.set(title=f"{num_envs:,} environment{plural}", xlabel="substeps of a step")
    panels[0].set_ylabel("seconds of a step of all")
    panels[3].set(title="turning point", xlabel="substeps of a step", ylabel="environments")
    for arm in env_report.arms(rows):
        seconds = {work: of_arm(rows, arm, work) for work in works_of(rows, arm)}
        for ax, num_envs in zip(panels, shown, strict=False):
            points = {work: found.get(num_envs) for work, found in seconds.items()}
            draw_points(ax, points, arm)
        turning = {}
        for work, found in seconds.items():
            fit = env_report.turning_point(found)
            if fit and fit["turning"] and min(found) < fit["turning"] < max(found):
                turning[work] = fit["turning"]
        draw_points(panels[3], turning, arm)
    for ax in panels:
        ax.set(xscale="log", yscale="log")
        ax.margins(0.05)
    figure.suptitle("CartPole with more work in a step", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
        fontsize=8,
    )
    return figure


def write(record: dict, stem: Path) -> None:
    above = [f"Work per step: {record['command']}"]
    above += run_dirs.describe(record["machine"])
    below = ["growth: from an arm's least work to its most; 1 is in proportion, 0 not at all"]
    below.append("so compare it between arms that have the same numbers of substeps")
    png, _ = curves.save(draw(record), stem)
    below.append(f"figure: {run_dirs.shown(png)}")
    run_dirs.write_report(stem, above, cells(record), below, record)


def main(arguments: list[str] | None = None) -> int:
    return env_report.redraw(__doc__, write, arguments)


if __name__ == "__main__":
    run_dirs.start(main)
