"""Environments that a process of its own can make: `gym.make("envs_for_workers:Ending-v0")`."""

import os
import random
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np


class Ending(gym.Env):
    """Random observations and rewards; ends by either kind of end, or both at once."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float64)
    action_space = gym.spaces.Box(-0.5, 0.5, (3,))

    def __init__(self, render_mode=None):
        pass

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(3, 2, 5), {}

    def step(self, action):
        obs, reward = self.np_random.normal(3, 2, 5), self.np_random.normal(1, 5)
        terminated, truncated = self.np_random.random(2) < 0.1
        return obs, reward - np.square(action).sum(), bool(terminated), bool(truncated), {}


class Counted(Ending):
    """A step takes 20 ms, in which the processor is free; a file has the number of steps."""

    steps = 0

    def step(self, action):
        time.sleep(0.02)
        self.steps += 1
        Path("steps.new").write_text(str(self.steps))
        Path("steps.new").replace("steps")
        return super().step(action)


class Drawing(Ending):
    """Draws from the generators that all share, not from its own."""

    def step(self, action):
        obs, reward, *others = super().step(action)
        return obs + random.random(), reward + np.random.normal(), *others


class Mortal(Ending):
    """Fails in its third rollout of 8 steps."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 20:
            Path("dead").touch()
            self.fail()
        return super().step(action)

    def fail(self):
        raise ArithmeticError("the simulation is unstable")


class Killed(Mortal):
    """As the kernel ends what takes too much memory."""

    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Broken(Mortal):
    """Goes on with observations that are no numbers."""

    def step(self, action):
        obs, *others = super().step(action)
        return np.full(5, np.nan) if self.steps >= 20 else obs, *others

    def fail(self):
        pass


for environment in (Ending, Counted, Drawing, Mortal, Killed, Broken):
    gym.register(f"{environment.__name__}-v0", environment)
