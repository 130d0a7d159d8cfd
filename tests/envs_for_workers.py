"""Environments that a process of its own can make: `gym.make("envs_for_workers:Slow-v0")`."""

import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np


class Slow(gym.Env):
    """A step takes 20 ms, in which the processor is free."""

    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        time.sleep(0.02)
        obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return obs, float(action.sum()), False, False, {}


class Mortal(Slow):
    """Fails in its third rollout of 8 steps, and leaves the time of that in the file `death`."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 20:
            Path("death").write_text(str(time.time()))
            self.fail()
        return super().step(action)

    def fail(self):
        raise ArithmeticError("the simulation is unstable")


class Killed(Mortal):
    """As the kernel ends what takes too much memory."""

    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


for environment in (Slow, Mortal, Killed):
    gym.register(f"{environment.__name__}-v0", environment)
