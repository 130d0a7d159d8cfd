"""Environments that misbehave in one way each: `--env-id hostile_envs:NanFirst-v0`.

Unlike those in envs_for_workers.py, they are for whole scripts that are started as processes.
"""

import sys

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete


class Fine(gym.Env):
    """Nothing is wrong: random observations of 5, actions of 3, episodes of 5 steps."""

    observation_space = Box(-np.inf, np.inf, (5,), np.float64)
    action_space = Box(-1, 1, (3,))
    episodes = steps = 0
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        return self.observe(), self.reward(), False, self.steps % 5 == 0, {}

    def observe(self):
        return self.np_random.normal(size=5)

    def reward(self):
        return float(self.np_random.normal())


class Same(Fine):
    """Another environment, whose spaces are the same."""


class Wide(Fine):
    """Another environment, whose spaces are larger."""

    observation_space = Box(-np.inf, np.inf, (7,), np.float64)
    action_space = Box(-1, 1, (4,))

    def observe(self):
        return self.np_random.normal(size=7)


class Large(Fine):
    """Of 10**8 of its observations, no memory holds as many as a buffer asks for."""

    observation_space = Box(-np.inf, np.inf, (1000,), np.float64)

    def observe(self):
        return self.np_random.normal(size=1000)


# What is not finite


class NanFirst(Fine):
    """The first observation of each episode but the first is NaN; no other one is."""

    healthy = 1

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return (obs if self.episodes <= self.healthy else np.full_like(obs, np.nan)), info


class NanFirstLater(NanFirst):
    """The same after 40 steps, when the policy acts."""

    healthy = 8


class NanAtOnce(NanFirst):
    """The same of the first episode, too."""

    healthy = 0


class InfiniteObs(Fine):
    """One number of an observation is infinite after 12 steps."""

    def observe(self):
        obs = super().observe()
        if self.steps > 12:
            obs[1] = np.inf
        return obs


class Rewarding(Fine):
    """Rewards as the class says after 12 steps."""

    what = 0.0

    def reward(self):
        return self.what if self.steps > 12 else super().reward()


class HugeReward(Rewarding):
    what = 1e300


class MinusHugeReward(Rewarding):
    what = -1e300


class NanReward(Rewarding):
    what = np.nan


class InfiniteReward(Rewarding):
    what = np.inf


# What ends the process


class Exits(Fine):
    """Says goodbye as if all were done."""

    def step(self, action):
        if self.steps == 12:
            sys.exit(0)
        return super().step(action)


class ExitsInReset(Fine):
    """The same when the third episode begins."""

    def reset(self, *, seed=None, options=None):
        if self.episodes == 2:
            sys.exit(0)
        return super().reset(seed=seed)


# Spaces. Where a script takes them, actions must come as the space has them.


class Square(Fine):
    """Actions of shape (2, 2), which hold four numbers and not two of them twice."""

    action_space = Box(-1, 1, (2, 2))

    def step(self, action):
        action = np.asarray(action)
        if action.shape != (2, 2):
            raise AssertionError(f"an action of shape {action.shape} instead of (2, 2)")
        inside = action[abs(action) < 1]  # others may have been clipped
        if len(set(inside)) < len(inside):
            raise AssertionError(f"an action with repeated numbers: {action}")
        return super().step(action)


class ZeroDim(Fine):
    """An action is a single number."""

    action_space = Box(-1, 1, ())

    def step(self, action):
        if np.shape(action) != ():
            raise AssertionError(f"an action of shape {np.shape(action)} instead of ()")
        return super().step(action)


class DictObs(Fine):
    """Observations have names, as those of robots."""

    observation_space = Dict({"arm": Box(-9, 9, (2,)), "goal": Box(-9, 9, (3,))})

    def observe(self):
        return {name: space.sample() for name, space in self.observation_space.items()}


class MatrixObs(Fine):
    """Observations have rows and columns."""

    observation_space = Box(-9, 9, (2, 3))

    def observe(self):
        return self.np_random.normal(size=(2, 3)).astype(np.float32)


class ZeroDimObs(Fine):
    """An observation is a single number."""

    observation_space = Box(-9, 9, ())

    def observe(self):
        return np.float32(self.np_random.normal())


class DiscreteObs(Fine):
    observation_space = Discrete(4)

    def observe(self):
        return int(self.np_random.integers(4))


class DiscreteActions(Fine):
    action_space = Discrete(4)


class ManyDiscreteActions(Fine):
    action_space = MultiDiscrete([2, 3])


class WholeActions(Fine):
    """A box of whole numbers."""

    action_space = Box(0, 5, (3,), np.int64)


class Unbounded(Fine):
    """Any action is allowed, so that none can be drawn uniformly."""

    action_space = Box(-np.inf, np.inf, (3,))


class HalfBounded(Fine):
    action_space = Box(np.array([0.0, -1.0], np.float32), np.array([np.inf, 1.0], np.float32))


for environment in list(vars().values()):
    if isinstance(environment, type) and issubclass(environment, Fine):
        name = f"{environment.__name__}-v0"
        gym.register(name, environment, disable_env_checker=True)
