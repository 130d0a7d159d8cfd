"""CartPole-v1 as a Numba-CUDA kernel, in which the original study wrote its own.

NUMBA_ENABLE_CUDASIM=1 plays it without a GPU, slowly, for tests. The simulator finds `cuda` among
the globals of a kernel, which is why this is a module of its own.
"""

import math

import numpy as np
from numba import cuda, float32
from numba.cuda.random import create_xoroshiro128p_states, xoroshiro128p_uniform_float32


@cuda.jit
def step(state, lengths, generators, actions, obs, rewards, terminated, truncated):
    i = cuda.grid(1)
    if i >= state.shape[0]:
        return
    x = state[i, 0]
    x_dot = state[i, 1]
    theta = state[i, 2]
    theta_dot = state[i, 3]
    force = float32(10.0) if actions[i] else float32(-10.0)
    tau = float32(0.02)
    sine = math.sin(theta)
    cosine = math.cos(theta)
    push = (force + float32(0.05) * theta_dot * theta_dot * sine) / float32(1.1)
    inertia = float32(0.5) * (float32(4.0 / 3.0) - float32(0.1) * cosine * cosine / float32(1.1))
    theta_acc = (float32(9.8) * sine - cosine * push) / inertia
    x_acc = push - float32(0.05) * theta_acc * cosine / float32(1.1)
    x += tau * x_dot
    x_dot += tau * x_acc
    theta += tau * theta_dot
    theta_dot += tau * theta_acc
    lengths[i] += 1
    terminated[i] = abs(x) > float32(2.4) or abs(theta) > float32(12 * 2 * math.pi / 360)
    truncated[i] = lengths[i] >= 500
    obs[i, 0] = x
    obs[i, 1] = x_dot
    obs[i, 2] = theta
    obs[i, 3] = theta_dot
    rewards[i] = 1.0
    if terminated[i] or truncated[i]:
        lengths[i] = 0
        for k in range(4):
            uniform = xoroshiro128p_uniform_float32(generators, i)
            state[i, k] = float32(0.1) * uniform - float32(0.05)
    else:
        for k in range(4):
            state[i, k] = obs[i, k]


class NumbaCartPole:
    """N environments in device arrays; `obs` is what the step led to, before any reset."""

    def __init__(self, num_envs: int, threads: int):
        start = np.random.default_rng(1).uniform(-0.05, 0.05, (num_envs, 4))
        self.state = cuda.to_device(start.astype(np.float32))
        self.lengths = cuda.to_device(np.zeros(num_envs, np.int32))
        self.generators = create_xoroshiro128p_states(num_envs, seed=1)
        self.obs = cuda.device_array((num_envs, 4), np.float32)
        self.rewards = cuda.device_array(num_envs, np.float32)
        self.terminated = cuda.device_array(num_envs, np.bool_)
        self.truncated = cuda.device_array(num_envs, np.bool_)
        self.kernel = step[-(-num_envs // threads), threads]

    def step(self, actions) -> None:
        self.kernel(
            self.state,
            self.lengths,
            self.generators,
            actions,
            self.obs,
            self.rewards,
            self.terminated,
            self.truncated,
        )
