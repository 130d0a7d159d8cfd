"""Evaluations of the scripts on Gymnasium's environments: the mean action, and what counts."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, clipped_averages, evaluation_seeds

from leanrl import sac_continuous_action as sac

SEED = 4
pytestmark = pytest.mark.usefixtures("one_thread")
# What the two environments of a training have seen, far apart: as after other episodes
SEEN = np.random.default_rng(0).normal(size=(2, 100, 3)) * [[[0.3, 0.01, 1.7]], [[0.5, 0.02, 1.4]]]
SEEN += [[[0.5, 0.3, 2.0]], [[-0.7, 0.3, -1.0]]]


def sac_mean(agent, obs):
    mean, _ = agent.actor.network(obs).chunk(2)
    return 2 * mean.tanh()


def td3_mean(agent, obs):
    return 2 * agent.actor.network(obs).tanh()


def ppo_mean(agent, obs):
    """Normalized by all that was seen, as one set; the second number is clipped, and the action."""
    rows = SEEN.reshape(-1, 3)
    normalized = ((obs.numpy() - rows.mean(axis=0)) / rows.std(axis=0)).clip(-10, 10)
    mean, log_std, _ = agent.model(torch.tensor(normalized).float()[None])
    return clipped_averages(mean, log_std, torch.tensor([-2.0]), torch.tensor([2.0]))[0]


MEANS = {  # Pendulum's observation (O,) -> mean action (A,), which in its box is at most 2
    "sac_continuous_action": sac_mean,
    "td3_continuous_action": td3_mean,
    "ppo_continuous_action": ppo_mean,
    "ppo_continuous_action_torchcompile": ppo_mean,  # whose environments differ
    "ppo_continuous_action_async": ppo_mean,
}
SCRIPTS = pytest.mark.parametrize("script", MEANS)


def prepare(script: str, env_id: str, episodes: int) -> tuple:
    """An agent with weights of its own, and the evaluation of it."""
    module, env = importlib.import_module(f"leanrl.{script}"), gym.make(env_id)
    (obs_dim,) = env.observation_space.shape
    args = module.Args(env_id=env_id, eval_episodes=episodes, seed=SEED)
    torch.manual_seed(0)
    if script.startswith("ppo"):
        agent = module.PPO(args, obs_dim, 1, CPU)
        # At first it hardly depends on what it sees; beyond their bounds actions would be the same
        agent.model.actor_mean[4].weight.data.mul_(100)
        means, variances = (torch.tensor(x[:, :obs_dim]) for x in (SEEN.mean(1), SEEN.var(1)))
        more = [{"obs_rms_mean": means, "obs_rms_var": variances}]
    else:
        kind = module.SAC if script.startswith("sac") else module.TD3
        agent, more = kind(args, obs_dim, env.action_space, CPU), []
    agent.act = None  # compiled or captured, it would be for another number of environments
    return agent, lambda: module.evaluate(agent, args, *more, None)


@SCRIPTS
def test_mean_actions_from_fixed_starts(script):
    """Against a loop over single environments without any of the script's machinery."""
    agent, evaluate = prepare(script, "Pendulum-v1", 2)
    returns = []
    for seed in evaluation_seeds(SEED, 2):
        env = gym.make("Pendulum-v1")
        obs, _ = env.reset(seed=seed)
        total, truncated = 0.0, False
        while not truncated:
            action = MEANS[script](agent, torch.tensor(obs)).detach().numpy()
            obs, reward, _, truncated, _ = env.step(action)
            total += reward
        returns.append(total)
    expected = pytest.approx(np.mean(returns), rel=1e-4)
    assert [evaluate(), evaluate()] == [expected, expected]


class Uneven(gym.Env):
    """Episodes of 5, 9, 21, 41 steps by the seed, with a reward of 1 each; odd seeds truncate."""

    observation_space = gym.spaces.Box(-9, 9, (1,))
    action_space = gym.spaces.Box(-0.01, 0.01, (1,))  # PPO's actions are larger, and clipped

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.odd, self.length = seed % 2 == 1, 5 + 4 * (seed % 4) ** 2
        self.left = self.length
        return np.full(1, 9, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.left -= 1
        end = self.left == 0
        return np.full(1, 9, np.float32), 1.0, end and not self.odd, end and self.odd, {}


gym.register("Uneven-v0", entry_point=Uneven)


@SCRIPTS
def test_each_episode_counts_once(script):
    """Short episodes must not be favoured: the first of each environment, however it ends."""
    lengths = [5 + 4 * (seed % 4) ** 2 for seed in evaluation_seeds(SEED, 12)]
    assert set(lengths) == {5, 9, 21, 41}
    _, evaluate = prepare(script, "Uneven-v0", 12)
    assert evaluate() == pytest.approx(np.mean(lengths))


class Endless:
    """A vector environment, as quick as can be."""

    action_space = gym.spaces.Box(-1, 1, (2, 1))
    close = staticmethod(lambda: None)
    reset = staticmethod(lambda seed: (np.zeros((2, 1)), {}))
    step = staticmethod(lambda actions: (actions, np.ones(2), *np.zeros((2, 2), bool), {}))


def test_endless_episodes_are_cut(monkeypatch):
    _, evaluate = prepare("sac_continuous_action", "Uneven-v0", 2)
    monkeypatch.setattr(sac, "make_envs", lambda *_: Endless)
    monkeypatch.setattr(sac.SAC, "act", lambda agent, obs, noise: noise)
    assert evaluate() == 50_000
