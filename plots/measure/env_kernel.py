"""CartPole-v1 as a kernel: a function in C that steps one environment, for CPU and GPU.

g++ compiles it for the CPU as a loop in as many threads as torch has, NVRTC for a GPU as a thread
per environment. A machine without a GPU so tests the same function.
"""

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import processes  # noqa: F401  so that Python finds leanrl
import torch

from leanrl.ppo_cartpole_gpu import CartPole

SOURCE = r"""
#ifdef __CUDACC__
#define ENTRY __global__
#define FUNCTION __device__ inline
#define FOR_EACH(i) u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; if (i < n)
#else
#include <math.h>
#define ENTRY
#define FUNCTION static inline
#define FOR_EACH(i) \
    _Pragma("omp parallel for num_threads(threads)") for (u64 i = 0; i < n; i++)
#endif
typedef unsigned long long u64;

FUNCTION u64 mix(u64 z) {  // splitmix64 (Steele, Lea and Flood, 2014)
    z += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

// number k of those that start an episode of environment i: uniform in [0, 1)
FUNCTION float uniform(u64 seed, u64 i, u64 episode, u64 k) {
    return (mix(mix(mix(seed) + i) + 4 * episode + k) >> 40) / 16777216.0f;
}

const float tau = 0.02f / SUBSTEPS;  // seconds

FUNCTION void advance(float *s, float force) {  // x, x', theta, theta' by Euler's method
    float sine = sinf(s[2]), cosine = cosf(s[2]);
    float push = (force + 0.05f * s[3] * s[3] * sine) / 1.1f;
    float inertia = 0.5f * (4.0f / 3 - 0.1f * cosine * cosine / 1.1f);
    float theta_acc = (9.8f * sine - cosine * push) / inertia;
    float x_acc = push - 0.05f * theta_acc * cosine / 1.1f;
    s[0] += tau * s[1];
    s[1] += tau * x_acc;
    s[2] += tau * s[3];
    s[3] += tau * theta_acc;
}

extern "C" ENTRY void step(
    int n, int threads, const u64 *seed, const u64 *actions, float *state, int *lengths,
    int *episodes, float *obs, float *final_obs, float *rewards, float *final_returns,
    int *final_lengths, bool *terminated, bool *truncated, bool *ended
) {
    FOR_EACH(i) {
        float s[4];
        for (int k = 0; k < 4; k++) s[k] = state[4 * i + k];
        for (int k = 0; k < SUBSTEPS; k++) advance(s, actions[i] ? 10.0f : -10.0f);
        for (int k = 0; k < 4; k++) final_obs[4 * i + k] = s[k];
        rewards[i] = 1;
        final_returns[i] = final_lengths[i] = ++lengths[i];  // each step is worth 1
        terminated[i] = fabsf(s[0]) > 2.4f || fabsf(s[2]) > 0.20943951f;
        truncated[i] = lengths[i] >= 500;
        ended[i] = terminated[i] || truncated[i];
        if (ended[i]) {
            for (int k = 0; k < 4; k++) s[k] = 0.1f * uniform(*seed, i, episodes[i], k) - 0.05f;
            lengths[i] = 0;
            episodes[i]++;
        }
        for (int k = 0; k < 4; k++) obs[4 * i + k] = state[4 * i + k] = s[k];
    }
}
"""
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")


@cache
def build_kernel(device_type: str, substeps: int = 1) -> Callable:
    """`launch(threads_per_block, tensors)` of the kernel; ValueError says why there is none."""
    source = f"#define SUBSTEPS {substeps}\n{SOURCE}"
    try:
        return (compile_for_gpu if device_type == "cuda" else compile_for_cpu)(source)
    except (AttributeError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise ValueError(f"no kernel for {device_type}: {' '.join(str(error).split())}") from error


def compile_for_gpu(source: str) -> Callable:
    from torch.utils import cpp_extension

    # torch's include path asks for a CUDA toolkit, which the kernel does not include anything of
    cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME or "/usr/local/cuda"
    kernel = torch.cuda._compile_kernel(source, "step")  # of torch 2.9 and newer

    def launch(threads: int, tensors: list[torch.Tensor]) -> None:
        n = len(tensors[-1])
        kernel(grid=(-(-n // threads), 1, 1), block=(threads, 1, 1), args=[n, threads, *tensors])

    return launch


def compile_for_cpu(source: str) -> Callable:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.cpp")
        library = Path(folder, "step.so")
        file.write_text(source)
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        subprocess.run([*compiler, *FLAGS, file, "-o", library], check=True)
        step = ctypes.CDLL(str(library)).step

    def launch(threads: int, tensors: list[torch.Tensor]) -> None:
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
        step(len(tensors[-1]), torch.get_num_threads(), *pointers)

    return launch


class KernelCartPole(CartPole):
    """The scripts' environments, stepped by the kernel, which draws the starts of episodes itself.

    They depend on the seed, the environment and the number of its episode, a tensor, so that they
    go on when a CUDA graph is replayed. A step is `substeps` of Euler's, in the same time.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str,
        *,
        threads_per_block: int = 256,
        substeps: int = 1,
    ):
        super().__init__(num_envs, device)
        self.threads_per_block = threads_per_block
        self.launch = build_kernel(self.device.type, substeps)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.episodes = torch.zeros(num_envs, dtype=torch.int32, device=device)  # that ended

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        if seed is not None:
            self.seed.fill_(seed)
            self.episodes.zero_()
        return super().reset(seed=seed)

    def step(self, actions: torch.Tensor, noise: torch.Tensor | None = None) -> tuple:
        """As with tensors, but `noise` is for those alone."""
        actions = actions.to(torch.int64).expand(self.num_envs).contiguous()  # as the kernel reads
        obs = torch.empty_like(self.state)
        final = torch.empty_like(self.state)
        lengths = torch.empty_like(self.lengths)
        rewards = torch.empty(self.num_envs, device=self.device)
        returns = torch.empty_like(rewards)
        terminated = torch.empty_like(rewards, dtype=bool)
        truncated = torch.empty_like(terminated)
        ended = torch.empty_like(terminated)
        read = [self.seed, actions]
        changed = [self.state, self.lengths, self.episodes, obs, final, rewards, returns, lengths]
        changed += [terminated, truncated, ended]
        self.launch(self.threads_per_block, [*read, *changed])
        infos = {
            "final_obs": final,
            "_final_obs": ended,
            "episode": {"r": returns, "l": lengths},
            "_episode": ended,
        }
        return obs, rewards, terminated, truncated, infos
