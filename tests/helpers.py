"""What several test files need: small runs, their records, environments that follow a script."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CPU = torch.device("cpu")
SMALL = {"env_id": "Pendulum-v1", "batch_size": 32, "learning_starts": 100, "buffer_size": 5000}
PATIENCE = 600  # seconds that only a test which fails takes, however busy the machine


def script(name: str, *flags: str) -> list[str]:
    """`python leanrl/NAME FLAGS`, for a process of its own."""
    return [sys.executable, str(ROOT / "leanrl" / name), *flags]


def run(folder: Path, name: str, *flags: str, check=True, **options):
    """A script in a process of its own, whose run directory goes below the folder."""
    return subprocess.run(
        script(name, *flags), cwd=folder, capture_output=True, text=True, check=check, **options
    )


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


def read_run(folder: Path) -> tuple:
    """The only run below the folder: directory, config, stages, scalars."""
    (run_dir,) = (folder / "runs").iterdir()
    config, stages = (
        json.loads((run_dir / name).read_text()) for name in ("config.json", "stages.json")
    )
    return run_dir, config, stages, read_scalars(run_dir)


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


class Smooth(gym.Env):
    """HalfCheetah's shapes and no chaos: what two runs differ by does not grow.

    Episodes of 7 steps, which are truncated and terminated in turns.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (17,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (6,), np.float32)
    episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.episodes = 0, self.episodes + 1
        self.state = self.np_random.normal(size=17)
        return self.state, {}

    def step(self, action):
        self.steps += 1
        self.state = 0.9 * self.state + 0.1 * np.resize(action, 17)
        end, odd = self.steps == 7, self.episodes % 2 == 1
        return self.state, -float(np.square(self.state).mean()), end and odd, end and not odd, {}


def spaces(obs_dim: int, action_space, actor_dim: int | None = None) -> SimpleNamespace:
    """What an agent on worlds needs to know of them: a box, or the number of actions in [-1, 1]."""
    if isinstance(action_space, int):
        action_space = gym.spaces.Box(-1, 1, (action_space,))
    return SimpleNamespace(
        single_observation_space=gym.spaces.Box(-np.inf, np.inf, (obs_dim,)),
        single_action_space=action_space,
        actor_dim=actor_dim or obs_dim,
    )


def clipped_averages(mean, log_std, low, high):
    """Means (B, A) of Gaussian actions that are clipped: what is at the bounds, and in between."""
    gaussian = torch.distributions.Normal(mean.double(), log_std.double().exp())
    below, not_above = gaussian.cdf(low), gaussian.cdf(high)
    between = gaussian.mean * (not_above - below)
    between += gaussian.variance * (gaussian.log_prob(low).exp() - gaussian.log_prob(high).exp())
    bounds = (low * below).nan_to_num() + (high * (1 - not_above)).nan_to_num()
    return (bounds + between).float()


class Named(gym.Env):
    """Observations and rewards say which environment it is, its episode and step.

    The first seed is its name. Episodes of 3 or 5 steps, odd ones are truncated, even terminated.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Box(np.float32([-1, 2]), np.float32([3, 2.5]))

    def observe(self):
        return np.float32([self.name, self.episode, self.steps])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.name, self.episode = seed, -1
        self.episode, self.steps = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        end, odd = self.steps == 3 + 2 * (self.name % 2), self.episode % 2 == 1
        return self.observe(), self.name + self.steps / 8, end and not odd, end and odd, {}


gym.register("Named-v0", entry_point=Named)


def what_named_does(name: int, count: int) -> tuple[list, dict]:
    """Its first steps -> [(obs, next_obs, reward, terminated)], {step: return of an episode}."""
    env, rows, returns, total = Named(), [], {}, 0.0
    obs, _ = env.reset(seed=name)
    for step in range(1, count + 1):
        next_obs, reward, terminated, truncated, _ = env.step(None)
        rows.append((obs.tolist(), next_obs.tolist(), reward, terminated))
        total, obs = total + reward, next_obs
        if terminated or truncated:
            returns[step], total = total, 0.0
            obs, _ = env.reset()
    return rows, returns


def changed(agent, update, *inputs) -> tuple[dict, object]:
    """{network: the longest change of a weight}, of those that changed; what `update` returned."""
    before = {name: tensor.detach().clone() for name, tensor in agent.named_parameters()}
    found, changes = update(*inputs), {}
    for name, tensor in agent.named_parameters():
        change = (tensor - before[name]).abs().max().item()
        changes.setdefault(name.partition(".")[0], []).append(change)
    changes = {network: each for network, each in changes.items() if any(each)}
    assert all(map(all, changes.values())), "a network changed in part"
    return {network: max(each) for network, each in changes.items()}, found


def to_numbers(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """What an update returns: no shape, and no graph that would keep its memory."""
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    return {tag: value.item() for tag, value in metrics.items()}


def assert_orthogonal(layer, gain: float) -> None:
    """Weights that stretch by `gain`, as their singular values say; biases are 0."""
    stretched = torch.linalg.svdvals(layer.weight.flatten(1))
    torch.testing.assert_close(stretched, torch.full_like(stretched, gain))
    assert not layer.bias.any()


def assert_critic_step(agent, batch, noise, losses) -> None:
    """An update tells these losses (2,) and moves the Q-networks by their rate, 1e-3, at first."""
    numbers = [*losses, losses.mean(), *agent.qf(batch.obs, batch.actions).mean(dim=1)]
    names = "qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "qf2_values"
    expected = {f"losses/{name}": x.item() for name, x in zip(names, numbers, strict=True)}
    changes, metrics = changed(agent, agent.update_critic, batch, noise)
    assert to_numbers(metrics) == pytest.approx(expected)
    assert changes == {"qf": pytest.approx(1e-3, rel=1e-3)}


def note(patch, owner, name: str, look) -> None:
    """`look` sees the result and the arguments of each call."""
    original = getattr(owner, name)

    def call(*arguments, **options):
        found = original(*arguments, **options)
        look(found, *arguments, **options)
        return found

    patch.setattr(owner, name, call)


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
