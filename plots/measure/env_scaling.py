"""The scaling study: what a step of CartPole costs when there are 1 to a million of them.

    bash run.sh study                                   sets up, then measures, in minutes
    python plots/measure/env_scaling.py --only '*GPU' --seconds 0.1      some arms, all points

After "Increasing Sample Throughput for RL Environments" (CS267, Berkeley). CartPole-v1 is stepped
by each arm in turn as its users would call it, with random actions drawn beforehand; an arm that
cannot run here is named with the reason. Measured are the seconds of one step of all environments
against their number. A straight line a + b N is fitted to them in relative error; its turning point
from flat to linear is N = a / b. What memory allows are the bytes/s of a copy.

Written to --out: env_scaling.json with every sample, env_scaling.md, and the figures
env_scaling_throughput and, on a GPU, _blocks: threads per block.
"""

import fnmatch
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import processes
import program
import run_dirs
import torch
from env_kernel import KernelCartPole

from leanrl.ppo_cartpole_gpu import CartPole

SAMPLES = 5  # per point; the median counts
NUMBERS = sorted({32} | {4**k for k in range(11)})  # of environments; 32 is where processes end
PACKAGES = ["torch", "gymnasium", "numpy", "envpool", "stable-baselines3"]
BLOCKS = (1, 16, 32, 64, 256, 1024)  # threads per block of the study
CAPTURED_STEPS = 32  # of a CUDA graph, as in a rollout of the scripts' default length
POOL = 16  # sets of random actions, used in turn


class Stepper(NamedTuple):
    """`step()` makes `steps` steps of all environments; they are done when `wait()` returns."""

    step: Callable[[], object]
    steps: int = 1
    wait: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Arm:
    """One way to step CartPole."""

    name: str
    make: Callable  # (num_envs) -> context of a Stepper
    most: int  # environments: more do not fit, or take minutes
    needs: tuple[str, ...] = ()  # packages, and "cuda" for a device

    def missing(self) -> str | None:
        """Why it cannot run here."""
        for need in self.needs:
            if need == "cuda" and not torch.cuda.is_available():
                return "no CUDA device"
            if need != "cuda" and importlib.util.find_spec(need) is None:
                return f"no {need}: pip install -r requirements/study.txt"
        return None


def random_actions(num_envs: int, convert: Callable = np.asarray, **settings) -> Iterator:
    """Sets of int64 actions (N,), each as `convert` makes it with `settings`: for a device, say."""
    generator = np.random.default_rng(1)
    return cycle([convert(generator.integers(0, 2, num_envs), **settings) for _ in range(POOL)])


def waiting(device: torch.device) -> Callable[[], object]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


# Environments on the CPU, one after another or in processes and threads


@contextmanager
def stepping(envs, actions: Iterator[np.ndarray], **reset) -> Iterator[Stepper]:
    """`envs`, started by reset(**reset), and closed at the end."""
    try:
        envs.reset(**reset)
        yield Stepper(lambda: envs.step(next(actions)))
    finally:
        envs.close()


def of_stable_baselines3(num_envs: int, env: str | Callable = "CartPole-v1"):
    """A process per environment, as the study's first arm."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = make_vec_env(env, num_envs, seed=1, vec_env_cls=SubprocVecEnv)
    return stepping(envs, random_actions(num_envs))


def of_gymnasium(mode: str, num_envs: int, env_id: str = "CartPole-v1", **options):
    """`sync` steps one environment after the other, `async` has a process for each."""
    settings = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    envs = gym.make_vec(env_id, num_envs, mode, vector_kwargs=settings, **options)
    return stepping(envs, random_actions(num_envs), seed=1)


def of_envpool(num_envs: int):
    """A pool of threads in C++."""
    import envpool

    envs = envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, seed=1)
    return stepping(envs, random_actions(num_envs, np.int32))


# Environments as tensors


@contextmanager
def of_tensors(
    device_type: str, compiled: bool, num_envs: int, make: Callable = CartPole
) -> Iterator[Stepper]:
    """The environments of the scripts."""
    device = torch.device(device_type)
    envs = make(num_envs, device)
    envs.reset(seed=1)
    step, actions = envs.step, random_actions(num_envs, torch.tensor, device=device)
    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, fullgraph=True, dynamic=False)
    yield Stepper(lambda: step(next(actions)), 1, waiting(device))


# Environments as a kernel


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """CAPTURED_STEPS calls of `step` as one CUDA graph -> its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED_STEPS):
            step()
    return graph.replay


@contextmanager
def of_kernel(
    device_type: str, threads: int, num_envs: int, substeps: int = 1
) -> Iterator[Stepper]:
    """On the CPU a loop in as many threads as torch has; on a GPU captured, as in training.

    Tensors are launched from Python there: below their turning point that is what counts.
    """
    device = torch.device(device_type)
    envs = KernelCartPole(num_envs, device, threads_per_block=threads, substeps=substeps)
    envs.reset(seed=1)
    actions = random_actions(num_envs, torch.tensor, device=device)
    if device.type == "cpu":
        yield Stepper(lambda: envs.step(next(actions)))
    else:
        replay = captured(lambda: envs.step(next(actions)))
        yield Stepper(replay, CAPTURED_STEPS, waiting(device))


MILLION = 4**10
ARMS = [
    Arm("SB3 SubprocVecEnv", of_stable_baselines3, 32, ("stable_baselines3",)),
    Arm("Gymnasium sync", partial(of_gymnasium, "sync"), 4**7),
    Arm("Gymnasium async", partial(of_gymnasium, "async"), 32),
    Arm("EnvPool", of_envpool, 4**8, ("envpool",)),
    Arm("tensors, CPU", partial(of_tensors, "cpu", False), MILLION),
    Arm("tensors compiled, CPU", partial(of_tensors, "cpu", True), MILLION),
    Arm("kernel, CPU threads", partial(of_kernel, "cpu", 1), MILLION),
    Arm("tensors, GPU", partial(of_tensors, "cuda", False), MILLION, ("cuda",)),
    Arm("tensors compiled, GPU", partial(of_tensors, "cuda", True), MILLION, ("cuda",)),
]
for threads in BLOCKS:
    kernel = partial(of_kernel, "cuda", threads)
    ARMS.append(Arm(f"kernel, TPB {threads}", kernel, MILLION, ("cuda",)))


# What is measured


def time_steps(stepper: Stepper, seconds: float, samples: int = SAMPLES) -> list[float]:
    """Seconds per step of all environments, `samples` of at least seconds / samples each."""

    def spend(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            stepper.step()
        stepper.wait()
        return time.perf_counter() - begin

    spend(3)  # compiles
    calls = 1
    while (spent := spend(calls)) < seconds / samples:
        calls = math.ceil(calls * min(10, 1.2 * seconds / samples / max(spent, 1e-9)))
    return [spend(calls) / (calls * stepper.steps) for _ in range(samples)]


def measure_limits() -> dict[str, float]:
    """Bytes/s that a copy of 256 MB reads and writes, of each device.

    The best of several: a limit is what the hardware does undisturbed.
    """
    found = {}
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        wait = waiting(torch.device(device))
        source = torch.zeros(2**26, device=device)
        target = torch.zeros_like(source)
        copy = partial(target.copy_, source)
        copies = time_steps(Stepper(copy, wait=wait), seconds=1.0, samples=10)
        found[device] = 2 * 4 * 2**26 / min(copies)
        print(f"{device}: {found[device]:.3g} bytes/s")
    return found


def measure_steps(
    arms: list[Arm], numbers: list[int], seconds: float, slowest: float = math.inf
) -> dict:
    """Those of `arms` that can run here, each with as many environments as it takes of `numbers`.

    None are more than those of which a step took `slowest` seconds.
    """
    skipped = {}
    rows = []
    for arm in arms:
        reason = arm.missing()
        if reason:
            skipped[arm.name] = reason
            print(f"skipped: {arm.name}: {reason}")
            continue
        for num_envs in [n for n in numbers if n <= arm.most]:
            row = {"arm": arm.name, "num_envs": num_envs}
            try:
                with arm.make(num_envs) as stepper:
                    row["seconds"] = time_steps(stepper, seconds)
                median = statistics.median(row["seconds"])
                said = f"{1e6 * median:,.1f} us"
            except Exception as error:  # whatever ails one arm, the others are measured
                said = " ".join(str(error).split())[:200] or type(error).__name__
                row["failed"] = said
            print(f"{arm.name}, {num_envs:,}: {said}", flush=True)
            rows.append(row)
            if "failed" not in row and median > slowest:
                break
    return {"rows": rows, "skipped": skipped}


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out")
    parser.add_argument("--quick", action="store_true", help="few points, short samples")
    parser.add_argument("--only", metavar="GLOB", help="the arms that match")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a point, without --quick")
    options = parser.parse_args(arguments)
    names = ["quick", "only"] if options.quick else ["only", "seconds"]
    arms = [arm for arm in ARMS if fnmatch.fnmatch(arm.name, options.only or "*")]
    if not arms:
        parser.error(f"--only {options.only!r} matches none of: {', '.join(a.name for a in ARMS)}")
    numbers, seconds = NUMBERS, options.seconds
    if options.quick:
        numbers, seconds = [1, 64, 4096], 0.05
    record = {
        "schema": 2,
        "command": processes.call("env_scaling.py", options, *names),
        "machine": run_dirs.measured_here(torch.get_num_threads(), PACKAGES),
        "bytes_per_second": measure_limits(),
    }
    record |= measure_steps(arms, numbers, seconds)
    import env_report  # which draws, so that --help need not wait for that

    env_report.write(record, options.out / "env_scaling")
    return 0


if __name__ == "__main__":
    program.start(main)
