"""The arms of the scaling study: CartPole-v1 in N environments, by everyone who can step them.

`plots/measure/env_scaling.py` measures them. An arm's `make(num_envs)` is a context that yields a
`Stepper`: a function that makes so many steps of all environments with random actions drawn
beforehand, each arm as its users would call it.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from env_kernel import KernelCartPole

from leanrl.ppo_cartpole_gpu import CartPole

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


def random_actions(num_envs: int, convert: Callable = np.asarray) -> Iterator:
    """Sets of int64 actions (N,), each as `convert` makes it: for a device, say."""
    generator = np.random.default_rng(1)
    return cycle([convert(generator.integers(0, 2, num_envs)) for _ in range(POOL)])


def random_action_tensors(num_envs: int, device: torch.device) -> Iterator[torch.Tensor]:
    return random_actions(num_envs, partial(torch.as_tensor, device=device))


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


def of_stable_baselines3(num_envs: int):
    """A process per environment, as the study's first arm."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = make_vec_env("CartPole-v1", num_envs, seed=1, vec_env_cls=SubprocVecEnv)
    return stepping(envs, random_actions(num_envs))


def of_gymnasium(mode: str, num_envs: int):
    """`sync` steps one environment after the other, `async` has a process for each."""
    settings = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    envs = gym.make_vec("CartPole-v1", num_envs, vectorization_mode=mode, vector_kwargs=settings)
    return stepping(envs, random_actions(num_envs), seed=1)


def of_envpool(num_envs: int):
    """A pool of threads in C++."""
    import envpool

    envs = envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, seed=1)
    return stepping(envs, random_actions(num_envs, np.int32))


# Environments as tensors


@contextmanager
def of_tensors(device_type: str, compiled: bool, num_envs: int) -> Iterator[Stepper]:
    """The environments of the scripts."""
    device = torch.device(device_type)
    envs = CartPole(num_envs, device)
    envs.reset(seed=1)
    step, actions = envs.step, random_action_tensors(num_envs, device)
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
def of_kernel(device_type: str, threads: int, num_envs: int) -> Iterator[Stepper]:
    """On the CPU a loop in as many threads as torch has; on a GPU captured, as in training."""
    device = torch.device(device_type)
    envs = KernelCartPole(num_envs, device, threads_per_block=threads)
    envs.reset(seed=1)
    actions = random_action_tensors(num_envs, device)
    if device.type == "cpu":
        yield Stepper(lambda: envs.step(next(actions)))
    else:
        replay = captured(lambda: envs.step(next(actions)))
        yield Stepper(replay, CAPTURED_STEPS, waiting(device))


# Numba


@contextmanager
def of_numba(threads: int, num_envs: int) -> Iterator[Stepper]:
    """Launched from Python step by step, as the study did."""
    from env_numba import NumbaCartPole, cuda

    envs = NumbaCartPole(num_envs, threads)
    actions = random_actions(num_envs, cuda.to_device)
    yield Stepper(lambda: envs.step(next(actions)), 1, cuda.synchronize)


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
    kernel, numba = partial(of_kernel, "cuda", threads), partial(of_numba, threads)
    ARMS.append(Arm(f"kernel, TPB {threads}", kernel, MILLION, ("cuda",)))
    ARMS.append(Arm(f"Numba-CUDA, TPB {threads}", numba, MILLION, ("cuda", "numba")))
