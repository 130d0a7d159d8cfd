"""What a step costs when there is more work in it: CartPole with 1 to 256 substeps.

    python plots/measure/env_work.py            minutes

After figures 5 and 6 of "Increasing Sample Throughput for RL Environments" (CS267, Berkeley). Work
is the number of Euler's steps into which the 0.02 s of a step are divided, so that the motion stays
the same and only the arithmetic grows. EnvPool's CartPole has no such parameter. Measured as in
env_scaling.py: how the time grows with the work at a number of environments, and how the turning
point, from where on more environments cost more time, moves with the work.

Written to --out: env_work.md and .json, and the figure env_work.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import env_scaling
import gymnasium as gym
import matplotlib.pyplot as plt
import processes  # by which the modules of plots/ are found
import torch
from env_scaling import Arm
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

# isort: split
import curves
import env_report
import program
import run_dirs
import tables

from leanrl.ppo_cartpole_gpu import CartPole

WORK = (1, 4, 16, 64, 256)
NUMBERS = (1, 16, 256, 4096, 65_536, 1_048_576)
THREADS = 256  # per block, on a GPU
ENV_ID = "FineCartPole-v1"


class FineCartPoleEnv(CartPoleEnv):
    """Gymnasium's, in substeps, of which those after the end are left out."""

    def __init__(self, work: int):
        super().__init__()
        self.work = work
        self.tau /= work

    def step(self, action):
        for _ in range(self.work):
            result = super().step(action)
            if result[2]:
                break
        return result


class FineCartPole(CartPole):
    """That of the scripts, in substeps."""

    def __init__(self, num_envs: int, device: torch.device, work: int):
        super().__init__(num_envs, device)
        self.work = work
        self.tau = self.tau / work

    def dynamics(self, state, actions):
        for _ in range(self.work):
            state = super().dynamics(state, actions)
        return state


gym.register(ENV_ID, FineCartPoleEnv, max_episode_steps=500)


# Arms: those of env_scaling.py, of so much work


def of_stable_baselines3(work: int, num_envs: int):
    return env_scaling.of_stable_baselines3(num_envs, partial(FineCartPoleEnv, work))


def of_gymnasium(work: int, num_envs: int):
    return env_scaling.of_gymnasium("sync", num_envs, ENV_ID, work=work)


def of_tensors(device_type: str, compiled: bool, work: int, num_envs: int):
    make = partial(FineCartPole, work=work)
    return env_scaling.of_tensors(device_type, compiled, num_envs, make)


def of_kernel(device_type: str, work: int, num_envs: int):
    return env_scaling.of_kernel(device_type, THREADS, num_envs, work)


CUDA = ("cuda",)
ARMS = {  # arm -> the most work: 64 substeps and more take the compiler minutes
    Arm("SB3 SubprocVecEnv", of_stable_baselines3, 16, ("stable_baselines3",)): 256,
    Arm("Gymnasium sync", of_gymnasium, 256): 256,
    Arm("tensors, CPU", partial(of_tensors, "cpu", False), 2**20): 256,
    Arm("tensors compiled, CPU", partial(of_tensors, "cpu", True), 2**20): 16,
    Arm("kernel, CPU threads", partial(of_kernel, "cpu"), 2**20): 256,
    Arm("tensors, GPU", partial(of_tensors, "cuda", False), 2**20, CUDA): 256,
    Arm("tensors compiled, GPU", partial(of_tensors, "cuda", True), 2**20, CUDA): 16,
    Arm(f"kernel, TPB {THREADS}", partial(of_kernel, "cuda"), 2**20, CUDA): 256,
}


def measure() -> dict:
    """All points, but of an arm and work none after one whose step took two seconds."""
    rows = []
    skipped = {}
    for arm, most in ARMS.items():
        for work in [work for work in WORK if work <= most]:
            print(f"{work} substeps")
            one = replace(arm, make=partial(arm.make, work))
            found = env_scaling.measure_steps([one], NUMBERS, seconds=0.2, slowest=2.0)
            rows += [row | {"work": work} for row in found["rows"]]
            skipped |= found["skipped"]
            if arm.name in skipped:
                break
    return {"rows": rows, "skipped": skipped}


# The table and the figure


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
            table.append([*line, env_report.describe_turning(seconds), said])
            said = ""  # in the first line only
    return table + env_report.skipped(record, len(heading))


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
        turning = {work: env_report.measured_turning(found) for work, found in seconds.items()}
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
    below = ["growth: from an arm's least work to its most; 1 is in proportion, 0 not at all"]
    below.append("so compare it between arms that have the same numbers of substeps")
    png, _ = curves.save(draw(record), stem)
    below.append(f"figure: {run_dirs.shown(png)}")
    tables.write_report(stem, "Work per step", cells(record), record, below=below)


def main(arguments: list[str] | None = None) -> int:
    options = program.make_parser(__doc__, "--out").parse_args(arguments)
    record = {
        "schema": 1,
        "command": processes.call("env_work.py", options),
        "machine": run_dirs.measured_here(torch.get_num_threads(), env_scaling.PACKAGES),
    }
    record |= measure()
    write(record, options.out / "env_work")
    return 0


if __name__ == "__main__":
    program.start(main)
