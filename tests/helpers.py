"""What several test files need: small runs, their records, environments that follow a script."""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CPU = torch.device("cpu")
SMALL = {"env_id": "Pendulum-v1", "batch_size": 32, "learning_starts": 100, "buffer_size": 5000}


def script(name: str, *flags: str) -> list[str]:
    """`python leanrl/NAME FLAGS`, for a process of its own."""
    return [sys.executable, str(ROOT / "leanrl" / name), *flags]


def train(module, **flags) -> Path:
    """A small run of SAC or TD3 in this process -> its directory, below the current folder."""
    return module.main(module.Args(**SMALL | flags))


def read_checkpoint(run_dir: Path) -> dict:
    return torch.load(Path(run_dir, "checkpoint.pt"), weights_only=True)


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """{tag: [(step, value), ...]} as TensorBoard shows them."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def evaluation_seeds(seed: int, episodes: int) -> list[int]:
    """Numbers below 2**31, all others for another seed."""
    return [int(x) // 2 for x in np.random.SeedSequence(seed).generate_state(episodes)]


def assert_same(one, other, path="checkpoint", tolerance=0.0):
    """Equal through dicts, lists and tensors; the error names the place."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}", tolerance)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_same(x, y, f"{path}[{i}]", tolerance)
    elif isinstance(one, torch.Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype, path
        if not torch.equal(one, other):
            error = (one.double() - other.double()).abs().max().item()
            assert error <= tolerance, f"{path} differs by {error:.1e}"
    else:
        assert one == other, path


class Scripted(gym.Env):
    """Episodes of 50 steps; `on_step(step, obs)` makes observation and reward of every one."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (2,)), gym.spaces.Box(-1, 1, (1,))
    total = 0

    def __init__(self, on_step):
        self.on_step = on_step

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action):
        self.total += 1
        obs, reward = self.on_step(self.total, self.np_random.normal(size=2).astype(np.float32))
        return obs, reward, False, self.total % 50 == 0, {}
