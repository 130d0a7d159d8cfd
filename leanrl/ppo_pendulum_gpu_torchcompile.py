"""PPO on thousands of pendulums that are one kernel, with torch.compile and CUDA graphs.

    python leanrl/ppo_pendulum_gpu_torchcompile.py --compile --cudagraphs
    python leanrl/ppo_pendulum_gpu_torchcompile.py --compile --env-backend torch
    python leanrl/ppo_pendulum_gpu_torchcompile.py --compile --cudagraphs --num-envs 1048576 \\
        --threads-per-block 64 --num-minibatches 256 --total-timesteps 1000000000
    python leanrl/ppo_pendulum_gpu_torchcompile.py --help           # every flag

The algorithm is that of its twin, ppo_pendulum_gpu.py, which says where it comes from and what the
shapes mean; the hunks that differ start with `# speed:` and say what they buy, the rest is the same
to the letter. The environment's step is one C function for one environment: NVRTC compiles it for
the GPU, a thread per environment, and g++ the same text for the CPU, a loop over environments. Its
resets are drawn by a generator of its own, so that episodes are others than the baseline's. Without
a CUDA device --cudagraphs says so in one line and the run goes on.

Measured (plots/results/): 114,000 steps/s with --compile on 2 cores of an AMD EPYC (AVX2), 1.4
times the baseline. On a GPU: not measured.
"""

# speed: ctypes calls what g++ makes of the kernel; CudaGraphModule captures a function as a graph
import ctypes
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tqdm
import tyro
from tensordict.nn import CudaGraphModule
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """name of this experiment, part of the run directory's name"""
    seed: int = 1
    """seed of the environments and of every random generator"""
    torch_deterministic: bool = True
    """use deterministic cuDNN kernels"""
    cuda: bool = True
    """train on CUDA where there is a device"""
    track: bool = False
    """also send the run to Weights & Biases"""
    wandb_project_name: str = "leanRL"
    """the wandb project"""
    wandb_entity: str | None = None
    """the wandb team"""
    capture_video: bool = False
    """film the first episode of each evaluation; without --eval-every, evaluate at the end"""
    save_model: bool = False
    """write checkpoint.pt at the end of the run"""
    checkpoint_every: int = 0
    """also write it every so many environment steps; 0: never"""
    resume: str | None = None
    """go on with this run (its directory or checkpoint.pt); flags not given stay as they were"""
    eval_every: int = 0
    """evaluate every so many environment steps, and at the end; 0: never"""
    eval_episodes: int = 10
    """episodes per evaluation, each in an environment of its own"""
    stopwatch: Literal["off", "time", "trace"] = "time"
    """what the stopwatch measures: nothing, time per stage, or also a profiler window"""

    # speed: each works alone, together and not at all
    compile: bool = False
    """compile acting and learning with torch.compile"""
    cudagraphs: bool = False
    """replay a whole rollout (of the kernel), its preparation and all epochs as CUDA graphs"""
    env_backend: Literal["kernel", "torch"] = "kernel"
    """step the environments by a kernel of their own or, as the baseline, by tensor operations"""
    threads_per_block: int = 256
    """of the kernel on a GPU, 1 to 1024; one thread steps one environment"""

    env_id: Literal["Pendulum-v1"] = "Pendulum-v1"
    """the environment, in Gymnasium's words"""
    total_timesteps: int = 3_000_000
    """environment steps of the whole run, over all environments; rounded down to whole rollouts"""
    learning_rate: float = 3e-3
    """learning rate of the optimizer, at first"""
    anneal_lr: bool = True
    """lower the learning rate from rollout to rollout, linearly to zero at the end of the run"""
    num_envs: int = 4096
    """environments stepped side by side"""
    num_steps: int = 16
    """steps of a rollout in each environment"""
    gamma: float = 0.95
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 16
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over a rollout"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """how far the ratio of new to old probabilities may go from 1 before its gradient ends"""
    clip_vloss: bool = False
    """clip the change of the value in the same way: little, where values are about -100"""
    ent_coef: float = 0.0
    """weight of the entropy in the loss"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """longest gradient; longer ones are scaled down to it"""
    target_kl: float | None = None
    """end the epochs when the policy has gone so far, in KL divergence, from the old one"""


# >>> stopwatch: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>
import json  # noqa: E402, F811
import sys  # noqa: E402, F811
from contextlib import contextmanager, nullcontext, suppress  # noqa: E402, F811
from time import perf_counter  # noqa: E402, F811

import torch  # noqa: E402, F811


class Stage:
    """Self-time (seconds) and entries of a stage; one that opens inside another pauses it."""

    def __init__(self, watch):
        self.watch, self.seconds, self.count = watch, 0.0, 0

    def __enter__(self):
        watch, now = self.watch, perf_counter()
        watch.open[-1].seconds += now - watch.since
        watch.since = now
        watch.open.append(self)

    def __exit__(self, kind, value, traceback):
        watch, now = self.watch, perf_counter()
        watch.open.pop().seconds += now - watch.since
        watch.since = now
        self.count += 1


class Stopwatch:
    """Seconds per stage and environment steps per second; leanrl/stopwatch.py is the manual."""

    def __init__(self, device, mode="time", warmup_steps=0, trace_after=500, trace_iterations=20):
        self.mode, self.on_gpu, self.born = mode, device.type == "cuda", perf_counter()
        self.synchronize = torch.cuda.synchronize if self.on_gpu else lambda: None
        self.env_steps, self.warmup_seconds, self.result, self.trace = 0, None, None, None
        self._begin_window()
        self.course = self._course(warmup_steps, trace_after, trace_iterations)

    def tick(self, env_steps):
        """Ends an iteration, outside of every stage; `env_steps` counts all since construction."""
        with self.untracked:  # an entry is an iteration
            self.env_steps = env_steps
        next(self.course, None)

    def speed(self, env_steps):
        """Steps per second: of all `env_steps` so far; in the steady window, before it None."""
        now = perf_counter()
        steady = (env_steps - self.first_step) / (now - self.start - self.evaluation.seconds)
        return env_steps / (now - self.born), self.warmup_seconds and steady

    def report(self, path):
        """Writes the report to `path` and a trace beside it, then prints a table -> the report."""
        self.course.close()  # gives up a trace that is not complete
        report = (self.result or self._end_window()) | {"mode": self.mode, "trace": self.trace}
        report["wall_seconds"] = perf_counter() - self.born
        report["sps_inclusive"] = self.env_steps / report["wall_seconds"]
        if self.trace:
            self.trace["file"] = path.name.replace("stages", "trace") + ".gz"
            self.profiler.export_chrome_trace(str(path.with_name(self.trace["file"])))
        path.write_text(json.dumps(report, indent=2))
        steps = max(report["window"]["env_steps"], 1) / 1e6
        lines = [f"{'stage':16}{'seconds':>12}{'us/step':>12}{'GPU us/step':>14}"]
        for name, stage in report["stages"].items():
            seconds, span = stage["seconds"], stage["gpu_span_seconds"]
            gpu = "" if span is None else f"{span / steps:14,.1f}"
            lines.append(f"{name:16}{seconds:12,.2f}{seconds / steps:12,.1f}{gpu}")
        numbers = (report | report["gpu"]).items()
        lines += [f"{name:16}{x:12,.1f}" for name, x in numbers if isinstance(x, float)]
        print(*lines, f"run directory: {path.parent}", sep="\n", file=sys.stderr)
        return report

    def _course(self, warmup_steps, trace_after, trace_iterations):
        """What a run goes through, a `yield` per tick: warm-up, steady window, perhaps a trace."""
        while self.env_steps < warmup_steps:
            yield
        self.warmup_seconds = perf_counter() - self.born - self.evaluation.seconds
        self._begin_window()
        while self.mode != "trace" or self.untracked.count < trace_after:
            sampled = self.on_gpu and self.mode != "off" and self.untracked.count % 64 == 0
            self.stage = self._between_events if sampled else self.contexts.__getitem__
            yield
            if sampled and perf_counter() > self.asked + 1:  # a second: NVML takes its time
                self.asked = perf_counter()
                with suppress(Exception):  # nvidia-ml-py is optional
                    self.nvml.append((round(self.asked - self.born, 1), torch.cuda.utilization()))
        self.result, self.stage = self._end_window(), self.contexts.__getitem__
        with torch.profiler.profile() as self.profiler:
            yield  # an iteration that pays for the profiler's buffers
            first_step, self.stage = self.env_steps, self._annotated
            with torch.profiler.record_function("stopwatch:untracked"):
                for _ in range(trace_iterations):
                    yield
                self.synchronize()
        self.trace = {"iterations": trace_iterations, "env_steps": self.env_steps - first_step}

    def _begin_window(self):
        """Counts anew: at construction and at the end of the warm-up."""
        names = ("simulation", "inference", "replay", "backpropagation", "logging", "checkpoint")
        self.stages = {name: Stage(self) for name in (*names, "untracked", "evaluation")}
        self.untracked, self.evaluation = self.stages["untracked"], self.stages["evaluation"]
        self.contexts, self.open = dict(self.stages), [self.untracked]
        if self.mode == "off":  # but for the evaluation, which is never part of a window
            self.contexts |= dict.fromkeys(names, nullcontext())
        self.stage = self.contexts.__getitem__  # hands out the context manager of a stage
        self.first_step, self.spans, self.nvml = self.env_steps, [], []
        self.synchronize()
        self.start = self.since = self.asked = perf_counter()

    def _end_window(self):
        """What the steady window or, if the warm-up did not end, the whole run has to say."""
        self.synchronize()  # GPU work still queued belongs to the window
        steady, stages = self.speed(self.env_steps)[1], {}
        window = {"steady": steady is not None, "env_steps": self.env_steps - self.first_step}
        window["iterations"] = self.untracked.count
        window["seconds"] = perf_counter() - self.start - self.evaluation.seconds
        run = {"schema": 2, "sps_steady": steady, "warmup_seconds": self.warmup_seconds}
        for name, stage in self.stages.items() if self.mode != "off" else ():
            spans = [a.elapsed_time(b) / 1e3 for label, a, b in self.spans if label == name]
            span = sum(spans) / len(spans) * stage.count if spans else None
            stages[name] = dict(seconds=stage.seconds, count=stage.count, gpu_span_seconds=span)
        utilization = sum(percent for _, percent in self.nvml) / max(len(self.nvml), 1)
        gpu = {"nvml_util": utilization if self.nvml else None, "nvml_samples": self.nvml or None}
        return run | {"window": window, "stages": stages, "gpu": gpu}

    @contextmanager
    def _between_events(self, name):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        with self.contexts[name]:
            yield
        last.record()
        self.spans.append((name, first, last))

    @contextmanager
    def _annotated(self, name):
        with torch.profiler.record_function("stopwatch:" + name), self.contexts[name]:
            yield


# <<< stopwatch <<<


def fail(message: str) -> None:
    """Ends the program with a one-line error and exit status 2, as argument errors do."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args: Args) -> None:
    """Refuses, before any work starts, settings that cannot run; the message names the flag."""
    for name in (
        "total_timesteps",
        "num_envs",
        "num_steps",
        "num_minibatches",
        "update_epochs",
        "max_grad_norm",
        "eval_episodes",
    ):
        if getattr(args, name) <= 0:
            fail(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    for name in ("checkpoint_every", "eval_every"):
        if getattr(args, name) < 0:
            fail(f"--{name.replace('_', '-')} must not be negative, got {getattr(args, name)}")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        fail(
            f"--num-envs {args.num_envs} x --num-steps {args.num_steps} = {batch_size} steps "
            f"cannot be divided into --num-minibatches {args.num_minibatches}"
        )
    if batch_size == args.num_minibatches and args.norm_adv:
        fail("minibatches of one step have no deviation to normalize by: --no-norm-adv")
    if args.total_timesteps < batch_size:
        fail(f"--total-timesteps {args.total_timesteps} is less than a rollout of {batch_size}")
    # speed: no graphs without CUDA: a contradiction is refused, a missing device only mentioned
    if args.cudagraphs and not args.cuda:
        fail("--cudagraphs contradicts --no-cuda")
    if args.cudagraphs and not torch.cuda.is_available():
        print("warning: no CUDA device, --cudagraphs has no effect", file=sys.stderr)
    if not 1 <= args.threads_per_block <= 1024:
        fail(f"--threads-per-block must be 1 to 1024, got {args.threads_per_block}")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs wandb: pip install -r requirements/wandb.txt")
    if args.capture_video and importlib.util.find_spec("moviepy") is None:
        fail("--capture-video needs moviepy: pip install -r requirements/video.txt")


# speed: a step in one pass over the 75 bytes of each environment, where tensors make fifty
KERNEL = r"""
typedef unsigned long long u64;
#define TENSORS \
    const u64 *seed, const float *actions, float *state, float *returns, int *lengths, \
    int *episodes, float *obs, float *final_obs, float *rewards, float *final_returns, \
    int *final_lengths, bool *terminated, bool *truncated
#define NAMES \
    seed, actions, state, returns, lengths, episodes, obs, final_obs, rewards, final_returns, \
    final_lengths, terminated, truncated

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

FUNCTION float wrap(float theta) {  // to [-pi, pi), in double precision
    return theta - 6.283185307179586 * floor(theta / 6.283185307179586 + 0.5);
}

FUNCTION float clip(float x, float bound) {  // fminf and fmaxf would turn a NaN into the bound
    return x < -bound ? -bound : x > bound ? bound : x;
}

FUNCTION float advance(float *s, float action) {  // theta, theta' by Euler's method -> reward
    float theta = wrap(s[0]), torque = clip(action, 2.0f);
    float cost = theta * theta + 0.1f * s[1] * s[1] + 0.001f * torque * torque;
    s[1] = clip(s[1] + 0.05f * (15.0f * sinf(theta) + 3.0f * torque), 8.0f);
    s[0] = wrap(theta + 0.05f * s[1]);
    return -cost;
}

FUNCTION void observe(const float *s, float *obs) {
    obs[0] = cosf(s[0]);
    obs[1] = sinf(s[0]);
    obs[2] = s[1];
}

FUNCTION void step_one(u64 i, TENSORS) {
    float s[2];
    for (int k = 0; k < 2; k++) s[k] = state[2 * i + k];
    rewards[i] = advance(s, actions[i]);
    observe(s, final_obs + 3 * i);
    for (int k = 0; k < 3; k++) obs[3 * i + k] = final_obs[3 * i + k];
    final_returns[i] = returns[i] += rewards[i];
    final_lengths[i] = ++lengths[i];
    terminated[i] = false;
    truncated[i] = lengths[i] >= 200;
    if (truncated[i]) {
        s[0] = 3.14159265f * (2 * uniform(*seed, i, episodes[i], 0) - 1);
        s[1] = 2 * uniform(*seed, i, episodes[i], 1) - 1;
        observe(s, obs + 3 * i);
        returns[i] = lengths[i] = 0;
        episodes[i]++;
    }
    for (int k = 0; k < 2; k++) state[2 * i + k] = s[k];
}
"""
# a loop for g++, a thread per environment for NVRTC
ON_CPU = r"""
#include <math.h>
#define FUNCTION static inline
%s
extern "C" void step(long n, int threads, TENSORS) {
    #pragma omp parallel for num_threads(threads)
    for (long i = 0; i < n; i++) step_one(i, NAMES);
}
"""
ON_GPU = r"""
#define FUNCTION __device__ inline
%s
extern "C" __global__ void step(int n, TENSORS) {
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i < n) step_one(i, NAMES);
}
"""


# speed: compiled once per process
@cache
def build_kernel(device_type: str):
    """`launch(threads, read, changed)` of the kernel; one line says why there is none."""
    if device_type == "cuda":
        compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
        if compile_kernel is None:
            fail(f"torch {torch.__version__} compiles no kernels, 2.9 does; or --env-backend torch")
        try:
            kernel = compile_kernel(ON_GPU % KERNEL, "step")
        except (OSError, RuntimeError) as error:  # no NVRTC, or one that refuses
            fail(f"NVRTC cannot compile the kernel: {' '.join(str(error).split())[:300]}")

        def launch(threads: int, read: list[torch.Tensor], changed: list[torch.Tensor]) -> None:
            n, tensors = len(changed[0]), [*read, *changed]
            kernel(grid=(-(-n // threads), 1, 1), block=(threads, 1, 1), args=[n, *tensors])

        return launch
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        fail("no g++ to compile the kernel for the CPU: install it, or --env-backend torch")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "step.cpp"), Path(folder, "step.so")
        source.write_text(ON_CPU % KERNEL)
        flags = ["-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"]
        flags += os.environ.get("CXXFLAGS", "").split()
        done = subprocess.run(
            [compiler, *flags, str(source), "-o", str(library)], capture_output=True, text=True
        )
        if done.returncode:
            fail(f"{compiler} cannot compile the kernel: {' '.join(done.stderr.split())[:300]}")
        step = ctypes.CDLL(str(library)).step

    def launch(threads: int, read: list[torch.Tensor], changed: list[torch.Tensor]) -> None:
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (*read, *changed))
        step(ctypes.c_long(len(changed[0])), torch.get_num_threads(), *pointers)

    return launch


# speed: an operator of its own, so that compiled code may call it
@cache
def kernel_operator():
    """leanrl::pendulum_step, which changes the tensors of its last argument in place."""

    @torch.library.custom_op("leanrl::pendulum_step", mutates_args={"changed"})
    def pendulum_step(threads: int, read: list[torch.Tensor], changed: list[torch.Tensor]) -> None:
        build_kernel(read[0].device.type)(threads, read, changed)

    pendulum_step.register_fake(lambda *arguments: None)
    return pendulum_step


def free_bytes(device: torch.device) -> int:
    """Memory that is free on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def wrap(theta: torch.Tensor) -> torch.Tensor:
    """Angles -> the same angles in [-pi, pi)."""
    # in float64: float32 has 2 pi wrong by 1.7e-7, which every turn would add to the angle
    return torch.remainder(theta.double() + math.pi, 2 * math.pi).sub(math.pi).to(theta.dtype)


class Pendulum(gym.vector.VectorEnv):
    """N environments Pendulum-v1 as tensors on `device`, which reset in the step that ends them.

    Everything that `step` returns is a tensor there, infos included, and dense: `final_obs` is the
    observation before any reset, `episode` has return and length so far, `_final_obs` and
    `_episode` are the mask of those that ended. Nothing waits for the device.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    gravity, mass, length, tau = 10.0, 1.0, 1.0, 0.05
    max_speed, max_torque, max_steps = 8.0, 2.0, 200

    # speed: with a kernel
    def __init__(
        self,
        num_envs: int,
        device: torch.device | str,
        backend: str = "kernel",
        threads: int = 256,
    ):
        self.num_envs, self.device = num_envs, torch.device(device)
        # speed: compiled here, so that what cannot work ends here
        self.threads, self.kernel = threads, None
        if backend == "kernel":
            self.launch, self.kernel = build_kernel(self.device.type), kernel_operator()
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.episodes = torch.zeros(num_envs, dtype=torch.int32, device=device)  # that ended
        high = np.array([1, 1, self.max_speed], np.float32)
        self.single_observation_space = gym.spaces.Box(-high, high, dtype=np.float32)
        self.single_action_space = gym.spaces.Box(-self.max_torque, self.max_torque, (1,))
        self.observation_space, self.action_space = (
            gym.vector.utils.batch_space(space, num_envs)
            for space in (self.single_observation_space, self.single_action_space)
        )
        self.generator = torch.Generator(device)
        self.state = torch.zeros(num_envs, 2, device=device)  # theta, 0 is upright, and theta'
        self.starts = torch.tensor([math.pi, 1.0], device=device)  # how far from 0 a state starts
        self.returns = torch.zeros(num_envs, device=device)
        self.lengths = torch.zeros(num_envs, dtype=torch.int32, device=device)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Starts all episodes -> observations (N, 3), {}."""
        if seed is not None:
            self.generator.manual_seed(seed)
            # speed: the kernel's own generator
            self.seed.fill_(seed)
            self.episodes.zero_()
        self.state.uniform_(-1, 1, generator=self.generator).mul_(self.starts)
        self.returns.zero_()
        self.lengths.zero_()
        return self.observe(self.state), {}

    def step(self, actions: torch.Tensor) -> tuple:
        """Actions (N, 1) -> observations (N, 3), rewards, terminated, truncated, each (N,), infos.

        An action is a torque in N m; one beyond +-2 counts as +-2.
        """
        actions = actions.to(torch.float32).expand(self.num_envs, 1)  # other shapes fail
        # speed: one kernel
        if self.kernel is not None:
            return self.step_by_kernel(actions)
        final, rewards = self.dynamics(self.state, actions)
        self.returns += rewards
        self.lengths += 1
        truncated = self.lengths >= self.max_steps
        returns, lengths = self.returns.clone(), self.lengths.clone()
        fresh = torch.empty_like(final).uniform_(-1, 1, generator=self.generator) * self.starts
        # speed: in place, where graphs read
        self.state.copy_(torch.where(truncated[:, None], fresh, final))
        self.returns.masked_fill_(truncated, 0)
        self.lengths.masked_fill_(truncated, 0)
        infos = {"final_obs": self.observe(final), "_final_obs": truncated, "_episode": truncated}
        infos["episode"] = {"r": returns, "l": lengths}
        return self.observe(self.state), rewards, torch.zeros_like(truncated), truncated, infos

    # speed: the same by the kernel
    def step_by_kernel(self, actions: torch.Tensor) -> tuple:
        """`step`."""
        obs, final_obs = (torch.empty(self.num_envs, 3, device=self.device) for _ in range(2))
        rewards, returns = (torch.empty_like(self.returns) for _ in range(2))
        lengths = torch.empty_like(self.lengths)
        terminated, truncated = (torch.empty_like(rewards, dtype=torch.bool) for _ in range(2))
        changed = [self.state, self.returns, self.lengths, self.episodes, obs, final_obs, rewards]
        changed += [returns, lengths, terminated, truncated]
        call = self.kernel if torch.compiler.is_compiling() else self.launch  # which costs less
        call(self.threads, [self.seed, actions.contiguous()], changed)
        infos = {"final_obs": final_obs, "_final_obs": truncated, "_episode": truncated}
        infos["episode"] = {"r": returns, "l": lengths}
        return obs, rewards, terminated, truncated, infos

    def dynamics(self, state: torch.Tensor, actions: torch.Tensor) -> tuple:
        """States (N, 2), actions (N, 1) -> next states (N, 2), rewards (N,).

        Semi-implicit Euler: the angle moves with the new speed. The reward is that of the state
        before, as in Gymnasium.
        """
        # Gymnasium lets the angle grow, in float64. In float32 one of 80, some 13 turns, could be
        # stored only to 4e-6; wrapped, to 1.2e-7
        theta, theta_dot = wrap(state[:, 0]), state[:, 1]
        torque = actions[:, 0].clamp(-self.max_torque, self.max_torque)
        costs = theta.square() + 0.1 * theta_dot.square() + 0.001 * torque.square()
        theta_acc = 3 * self.gravity / (2 * self.length) * theta.sin()
        theta_acc = theta_acc + 3 / (self.mass * self.length**2) * torque
        theta_dot = (theta_dot + self.tau * theta_acc).clamp(-self.max_speed, self.max_speed)
        theta = wrap(theta + self.tau * theta_dot)
        return torch.stack([theta, theta_dot], dim=1), -costs

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        """States (N, 2) -> observations (N, 3)."""
        theta, theta_dot = state.unbind(1)
        return torch.stack([theta.cos(), theta.sin(), theta_dot], dim=1)

    def state_dict(self) -> dict:
        names = {"state": self.state, "returns": self.returns, "lengths": self.lengths}
        # speed: with the kernel's generator
        names |= {"seed": self.seed, "episodes": self.episodes}
        return names | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.state.copy_(state["state"])
        self.returns.copy_(state["returns"])
        self.lengths.copy_(state["lengths"])
        self.generator.set_state(state["generator"])
        # speed: the kernel's
        self.seed.copy_(state["seed"])
        self.episodes.copy_(state["episodes"])


def make_envs(env_id: str, num_envs: int, video: Path | None = None) -> gym.vector.SyncVectorEnv:
    """N of Gymnasium's own environments, to evaluate on, which reset in `SAME_STEP` mode.

    The first episode of the first one becomes `video`-episode-0.mp4, if that is given.
    """

    def make_env(index: int) -> gym.Env:
        if video is None or index > 0:
            env = gym.make(env_id)
        else:
            env = gym.make(env_id, render_mode="rgb_array")
            warnings.filterwarnings("ignore", ".*Overwriting existing videos")  # of other names
            env = gym.wrappers.RecordVideo(
                env, str(video.parent), name_prefix=video.name, episode_trigger=lambda i: i == 0
            )
        return gym.wrappers.RecordEpisodeStatistics(env)

    try:
        envs = gym.vector.SyncVectorEnv(
            [partial(make_env, i) for i in range(num_envs)],
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        )
    except (gym.error.Error, ImportError) as error:  # says what is unknown or not installed
        fail(f"cannot make environment {env_id!r}: {' '.join(str(error).split())}")
    return envs


def run_config(args: Args, device: torch.device) -> dict:
    """What it takes to repeat a run and to judge its speed: settings, code, hardware, load."""

    def output(*command: str) -> str | None:
        try:
            return subprocess.check_output(
                command, cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL
            ).strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    cpuinfo = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    packages = ("torch", "tensordict", "gymnasium", "mujoco", "envpool", "numpy")
    gpu, driver = None, None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "args": asdict(args),
        "command": " ".join(sys.argv),
        "git_commit": output(
            "git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
        ),
        "cpu": {
            "model": model[1] if model else None,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
        },
        "gpu": gpu,
        "gpu_driver": driver,
        "load_average": os.getloadavg(),
        "python": sys.version.split()[0],
        "versions": {p: version(p) for p in packages if importlib.util.find_spec(p) is not None},
    }


def layer_init(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights, no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


# speed: nn.Linear copies its bias to every row before the product, here the tanh that follows adds
# it; and MKL makes a weight's gradient from few inputs (O, B) @ (B, 64) three times as fast as its
# transpose, which is what autograd asks for if the weight is laid out so
def run(network: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """network(x)."""
    for layer in network:
        if isinstance(layer, nn.Linear):
            weight = layer.weight.t()
            x = x @ (weight.contiguous() if len(weight) < 8 else weight) + layer.bias
        else:
            x = layer(x)
    return x


class ActorCritic(nn.Module):
    """Gaussian policy, whose deviation does not depend on the state, and the value of a state."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), gain=1.0),
        )
        self.actor_mean = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, action_dim), gain=0.01),
        )
        self.actor_logstd = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """obs (B, O) -> mean of the actions (B, A), their log deviation (A,), values (B,)."""
        # speed: layer by layer
        return run(self.actor_mean, obs), self.actor_logstd, run(self.critic, obs).squeeze(-1)


class Batch(NamedTuple):
    """B steps of a rollout, float32; log_probs and values as they were when it was made."""

    obs: torch.Tensor  # (B, O)
    actions: torch.Tensor  # (B, A)
    log_probs: torch.Tensor  # (B,)
    values: torch.Tensor  # (B,)
    advantages: torch.Tensor  # (B,)
    returns: torch.Tensor  # (B,)


class Rollout:
    """T steps of N environments on `device`."""

    def __init__(
        self, steps: int, num_envs: int, obs_dim: int, action_dim: int, device: torch.device
    ):
        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(steps, num_envs, *shape, device=device)

        self.obs, self.final_obs = empty(obs_dim), empty(obs_dim)  # what a step saw, and led to
        self.actions = empty(action_dim)
        self.log_probs, self.values, self.rewards = empty(), empty(), empty()
        self.terminated, self.ended = empty(), empty()  # 1 where it did; `ended` by either kind
        self.returns_at_end = empty()  # return of the episode that ended, otherwise 0
        self.advantages, self.returns = empty(), empty()

    def batch(self) -> Batch:
        """All B = T N steps."""
        columns = self.log_probs, self.values, self.advantages, self.returns
        return Batch(*(column.flatten(0, 1) for column in (self.obs, self.actions, *columns)))


def gaussian_log_prob(
    actions: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor
) -> torch.Tensor:
    """Log-density of actions (B, A) under a diagonal Gaussian -> (B,)."""
    z = (actions - mean) * (-log_std).exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)


def sample(
    model: ActorCritic, obs: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """obs (N, O), normal noise (N, A) -> actions (N, A), log_probs (N,), values (N,)."""
    mean, log_std, values = model(obs)
    actions = mean + log_std.exp() * noise
    return actions, gaussian_log_prob(actions, mean, log_std), values


def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    ended: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16) -> advantages (T, N).

    All (T, N). `next_values` is the value of what follows each step in its own episode: 0 after a
    termination, that of the final observation after a truncation. `ended` is 1 after either.
    """
    # speed: log2(T) vector operations instead of T: each doubles how far every sum has got
    advantages = rewards + gamma * next_values - values
    weights, distance = gamma * gae_lambda * (1 - ended), 1
    while distance < len(advantages):
        begin, end = advantages[:-distance], advantages[-distance:]
        more = weights[: len(begin)] * advantages[distance:]
        advantages = torch.cat([begin + more, end])
        weights, distance = weights[:-distance] * weights[distance:], 2 * distance
    return advantages


def policy_loss(
    log_ratios: torch.Tensor, advantages: torch.Tensor, clip_coef: float
) -> torch.Tensor:
    """Clipped surrogate objective (equation 7), negated -> loss ()."""
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(advantages * ratios, advantages * clipped).mean()


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_coef: float | None
) -> torch.Tensor:
    """Half the squared error, of the worse of the value and its clipped change -> loss ()."""
    errors = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns).square())
    return 0.5 * errors.mean()


METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def ppo_loss(model: ActorCritic, batch: Batch, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of a minibatch (equation 9) -> loss (), METRICS (6,)."""
    mean, log_std, values = model(batch.obs)
    log_ratios = gaussian_log_prob(batch.actions, mean, log_std) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    of_policy = policy_loss(log_ratios, advantages, args.clip_coef)
    clip_coef = args.clip_coef if args.clip_vloss else None
    of_value = value_loss(values, batch.values, batch.returns, clip_coef)
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = of_policy - args.ent_coef * entropy + args.vf_coef * of_value
    with torch.no_grad():
        ratios = log_ratios.exp()
        kl = -log_ratios.mean(), (ratios - 1 - log_ratios).mean()  # joschu.net/blog/kl-approx.html
        clipped = ((ratios - 1).abs() > args.clip_coef).float().mean()
        return loss, torch.stack([of_policy, of_value, entropy, *kl, clipped])


# speed: torch.optim.Adam breaks the graph; with this one a whole update compiles to one, fused with
# its neighbours. The powers of beta are state: computed from a step count, each element pays a pow
class Adam:
    """Adam (Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1), all parameters in one call."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.lr, self.betas, self.eps = parameters, lr, betas, eps
        self.exp_avgs = [torch.zeros_like(parameter) for parameter in parameters]
        self.exp_avg_sqs = [torch.zeros_like(parameter) for parameter in parameters]
        self.beta_powers = [torch.ones((), device=parameters[0].device) for _ in betas]

    def state_dict(self) -> dict:
        names = "exp_avgs", "exp_avg_sqs", "beta_powers"
        return {"state": {name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict) -> None:
        for name, tensors in state["state"].items():
            torch._foreach_copy_(getattr(self, name), tensors)

    def step(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Updates the parameters in place; `gradients` in their order and shapes."""
        with torch.no_grad():
            torch._foreach_mul_(self.beta_powers, self.betas)
            beta1_power, beta2_power = self.beta_powers
            torch._foreach_lerp_(self.exp_avgs, gradients, 1 - self.betas[0])
            torch._foreach_mul_(self.exp_avg_sqs, self.betas[1])
            torch._foreach_addcmul_(self.exp_avg_sqs, gradients, gradients, 1 - self.betas[1])
            denominators = torch._foreach_sqrt(self.exp_avg_sqs)
            torch._foreach_mul_(denominators, (1 - beta2_power).rsqrt())
            torch._foreach_add_(denominators, self.eps)
            steps = torch._foreach_div(self.exp_avgs, denominators)
            torch._foreach_mul_(steps, self.lr / (1 - beta1_power))
            torch._foreach_sub_(self.parameters, steps)


class PPO:
    """Network, optimizer and gradient steps, which return their metrics as one tensor."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        self.args = args
        self.model = ActorCritic(obs_dim, action_dim).to(device)
        self.parameters = list(self.model.parameters())
        # speed: the Adam above, with a learning rate that compiled code and graphs read anew
        learning_rate = torch.tensor(args.learning_rate, device=device)
        self.optimizer = Adam(self.parameters, lr=learning_rate, eps=1e-5)

    def state_dict(self) -> dict:
        """Everything that updates change."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state["optimizer"]})

    def set_learning_rate(self, learning_rate: float) -> None:
        # speed: in place
        self.optimizer.lr.fill_(learning_rate)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """obs (N, O), normal noise (N, A) -> actions (N, A), log_probs (N,), values (N,)."""
        with torch.no_grad():
            return sample(self.model, obs, noise)

    def prepare(self, rollout: Rollout) -> None:
        """Advantages and returns of a rollout."""
        with torch.no_grad():
            following = self.model.critic(rollout.final_obs).squeeze(-1) * (1 - rollout.terminated)
            advantages = compute_gae(
                rollout.rewards,
                rollout.values,
                following,
                rollout.ended,
                self.args.gamma,
                self.args.gae_lambda,
            )
            rollout.advantages.copy_(advantages)
            torch.add(advantages, rollout.values, out=rollout.returns)

    # speed: gathers its rows itself, and works on as many at a time as the caches of a CPU hold
    def update(self, batch: Batch, index: torch.Tensor) -> torch.Tensor:
        """One gradient step on the rows in index (B,) -> METRICS (6,)."""
        # speed: the mean of the pieces' gradients is the minibatch's; a GPU has one piece
        minibatch = self.gather(batch, index)
        count = 1 if index.is_cuda else pieces(len(index), CACHED_ROWS)
        chunks = zip(*(column.chunk(count) for column in minibatch), strict=True)
        sums = self.gradients(Batch(*next(chunks)))
        for chunk in chunks:
            torch._foreach_add_(sums, self.gradients(Batch(*chunk)))
        return self.step(sums, 1 / count)

    # speed: the three parts of an update, each compiled to one graph
    def gather(self, batch: Batch, index: torch.Tensor) -> Batch:
        """The rows in index, with normalized advantages."""
        minibatch = Batch(*(column.index_select(0, index) for column in batch))
        advantages = minibatch.advantages
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        return minibatch._replace(advantages=advantages)

    def gradients(self, batch: Batch) -> list[torch.Tensor]:
        """As values, not as .grad: nothing that the compiler cannot see -> and METRICS (6,)."""
        loss, metrics = ppo_loss(self.model, batch, replace(self.args, norm_adv=False))
        return [*torch.autograd.grad(loss, self.parameters), metrics]

    def step(self, sums: list[torch.Tensor], scale: float) -> torch.Tensor:
        """Adam with the scaled, then clipped gradients -> METRICS (6,)."""
        *gradients, metrics = torch._foreach_mul(sums, scale)
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        scale = (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        self.optimizer.step(torch._foreach_mul(gradients, scale))
        return metrics

    def learn(self, batch: Batch, permutations: torch.Tensor) -> torch.Tensor:
        """Epochs of minibatches in the order of permutations (E, B) -> the last METRICS (6,)."""
        for index in permutations.view(-1, permutations.shape[1] // self.args.num_minibatches):
            # speed: gathered within
            metrics = self.update(batch, index)
        return metrics


# speed: so many equal pieces have at most `most` rows each; 1 if the rows cannot be divided so
def pieces(rows: int, most: int) -> int:
    least = -(-rows // most)
    return next((count for count in range(least, 4 * least) if rows % count == 0), 1)


# speed: whatever runs on the device; `update` and `learn` call compiled parts without unrolling
def compile_agent(agent: PPO) -> None:
    """Compiles acting, the advantages and the parts of an update to one graph each."""
    torch._dynamo.config.trace_autograd_ops = True
    # in torch 2.11 this pass moves a backward product behind the update of the weights it reads
    torch._inductor.config.reorder_for_locality = False
    torch._inductor.config.cpp.use_decompose_tanh = True  # by exp, which is vectorized better
    agent.act = torch.compile(agent.act, fullgraph=True)
    agent.prepare = torch.compile(agent.prepare, fullgraph=True)
    agent.gather = torch.compile(agent.gather, fullgraph=True)
    agent.gradients = torch.compile(agent.gradients, fullgraph=True)
    agent.step = torch.compile(agent.step, fullgraph=True)


def track(args: Args, run_dir: Path, config: dict) -> None:
    """Sends what TensorBoard gets to wandb as well; whatever its network does, the run goes on."""
    import wandb

    # at the end, wait so many seconds for a network that is gone; `wandb sync` sends the rest
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")
    try:
        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            id=run_dir.name,
            resume="allow",
            config=config,
            sync_tensorboard=True,
        )
        wandb.save(__file__, base_path=os.path.dirname(__file__), policy="now")
    except wandb.Error as error:  # no network, no login
        reason = " ".join(str(error).split())
        print(f"warning: wandb does not track this run: {reason}", file=sys.stderr)


def evaluate(model: ActorCritic, args: Args, device: torch.device, video: Path | None) -> float:
    """Mean return of K episodes of Gymnasium's environment, in which the policy acts without noise.

    They start from the same K states every time. Training notices nothing: the environments are
    others and no shared random generator is used.
    """
    envs = make_envs(args.env_id, args.eval_episodes, video)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.reset(seed=args.seed + EVAL_SEED)
    while running.any():
        with torch.no_grad():
            actions = model.actor_mean(torch.from_numpy(obs).to(device)).cpu().numpy()
        obs, _, _, _, infos = envs.step(actions)
        if "final_info" in infos:
            ended = running & infos["_final_info"]
            returns[ended] = infos["final_info"]["episode"]["r"][ended]
            running &= ~ended
    envs.close()
    return float(returns.mean())


def can_render(env_id: str) -> bool:
    """Whether this machine can draw the environment; a warning says why not."""
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo; osmesa would draw on the CPU
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        env = gym.make(env_id, render_mode="rgb_array")
        env.reset()
        env.render()
        env.close()
        return True
    except Exception as error:  # of whatever kind: every simulator has its own
        reason = " ".join(str(error).split())
        print(f"warning: no video, {env_id} cannot be rendered here: {reason}", file=sys.stderr)
        return False


def get_rng_states(action_space: gym.Space, device: torch.device) -> dict:
    """The states of all random generators but the environments'."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "action_space": action_space.np_random.bit_generator.state,
    }


def set_rng_states(states: dict, action_space: gym.Space, device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
    action_space.np_random.bit_generator.state = states["action_space"]


def save_checkpoint(path: Path, checkpoint: dict) -> int:
    """Writes all or nothing: whenever the process dies, the file is whole -> its size in bytes."""
    partial_path = path.with_suffix(".partial")
    try:
        with partial_path.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial_path.replace(path)
    except BaseException:
        partial_path.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def load_checkpoint(path: Path) -> dict:
    """The checkpoint at `path`, its tensors on the CPU; one line says why it cannot be used."""
    try:
        with zipfile.ZipFile(path) as file:
            whole = file.testzip() is None  # torch.load does not notice a flipped bit
        checkpoint = torch.load(path, map_location="cpu", weights_only=True) if whole else None
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    except Exception:  # zipfile's, pickle's, torch's: all say that these are not the bytes written
        checkpoint = None
    if not isinstance(checkpoint, dict):
        fail(f"{path} is damaged or was never a checkpoint")
    if checkpoint.get("script") != SCRIPT:
        fail(f"{path} was written by {checkpoint.get('script', 'something else')}, not by {SCRIPT}")
    return checkpoint


def resumed_dir(args: Args) -> Path:
    """The run directory that --resume names, by itself or by the checkpoint in it."""
    return Path(args.resume.removesuffix(CHECKPOINT))


SCRIPT, CHECKPOINT = os.path.basename(__file__), "checkpoint.pt"
STEP_BYTES = 128  # of a rollout per environment step, noise and order of 4 epochs included
EVAL_SEED = 1_000_000  # added to --seed: evaluation starts from states that training does not
KL = METRICS.index("approx_kl")
STEADY_AFTER = 3  # rollouts, then compilation and capture are over
# speed: activations of so many rows, 1 MB per layer, stay in the caches of two cores
CACHED_ROWS = 4096


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    check_args(args)
    checkpoint = load_checkpoint(resumed_dir(args) / CHECKPOINT) if args.resume else None
    start_step = checkpoint["global_step"] if checkpoint else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as cleanly as on Ctrl-C
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    batch_size = args.num_envs * args.num_steps
    total_timesteps = args.total_timesteps // batch_size * batch_size
    watch = Stopwatch(
        device, args.stopwatch, STEADY_AFTER * batch_size, trace_after=3, trace_iterations=1
    )
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    needed, free = batch_size * STEP_BYTES, free_bytes(device)
    if needed > free:
        fail(
            f"--num-envs {args.num_envs} x --num-steps {args.num_steps}: a rollout needs "
            f"{needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free"
        )
    # speed: the kernel, if nothing else is asked for
    envs = Pendulum(args.num_envs, device, args.env_backend, args.threads_per_block)
    envs.action_space.seed(args.seed)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    rollout = Rollout(args.num_steps, args.num_envs, obs_dim, action_dim, device)
    batch = rollout.batch()

    # speed: a rollout as a function of the noise; what it reads and writes stays in its place
    def roll_out(noise: torch.Tensor) -> None:
        """T steps with the policy as it is, from where the environments are."""
        obs = envs.observe(envs.state)
        for t in range(args.num_steps):
            actions, log_probs, values = agent.act(obs, noise[t])
            rollout.obs[t], rollout.actions[t] = obs, actions
            rollout.log_probs[t], rollout.values[t] = log_probs, values
            obs, rewards, terminated, _, infos = envs.step(actions)
            rollout.rewards[t], rollout.final_obs[t] = rewards, infos["final_obs"]
            rollout.terminated[t], rollout.ended[t] = terminated, infos["_final_obs"]
            rollout.returns_at_end[t] = infos["episode"]["r"] * infos["_episode"]

    # speed: all compilation and capture is set up here; the loop below does not know of it. Each
    # function compiles when it is first called, and a graph is captured on its third call
    if args.compile:
        compile_agent(agent)
    prepare, learn = partial(agent.prepare, rollout), partial(agent.learn, batch)
    if args.cudagraphs and device.type == "cuda":
        if args.env_backend == "kernel":  # whose counter goes on in a graph, a Generator does not
            roll_out = CudaGraphModule(roll_out, warmup=3)
        prepare, learn = (CudaGraphModule(each, warmup=3) for each in (prepare, learn))

    kind = {"script": SCRIPT, "env_id": args.env_id, "num_envs": args.num_envs}
    envs.reset(seed=args.seed)
    # all episodes last 200 steps: begun together, they would swing up together and then stand
    # together, and what a rollout teaches of the one would be forgotten over the other
    envs.lengths.copy_(torch.arange(args.num_envs, device=device) * envs.max_steps // args.num_envs)
    global_step, episodic_return = start_step, None
    if checkpoint:
        for name, mine in kind.items():
            if checkpoint[name] != mine:
                fail(f"{args.resume} has {name} {checkpoint[name]}, this run has {mine}")
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as error:  # networks of another shape: it names both
            fail(f"{args.resume}: {' '.join(str(error).split())}")
        envs.load_state_dict(checkpoint["envs"])
        set_rng_states(checkpoint["rng"], envs.action_space, device)

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = resumed_dir(args) if args.resume else Path("runs", run_name.replace("/", "_"))
    run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
    suffix = f"_{start_step}.json" if args.resume else ".json"  # what the run began with stays
    config = run_config(args, device)
    (run_dir / f"config{suffix}").write_text(json.dumps(config, indent=2))
    films = args.capture_video and can_render(args.env_id)
    if args.track:
        track(args, run_dir, config)
    # rows that the run wrote after its checkpoint come again: readers drop the first ones
    writer = SummaryWriter(run_dir, purge_step=start_step + 1 if args.resume else None)
    bar = tqdm.tqdm(total=total_timesteps, initial=start_step, unit="step")

    def due(every: int) -> bool:
        """Whether this iteration passed a multiple of so many environment steps; 0: never."""
        return every > 0 and global_step % every < batch_size

    def save() -> None:
        """Writes checkpoint.pt, after the metrics that lead to it; a full disk is not the end."""
        begin = time.perf_counter()
        writer.flush()
        state = kind | {
            "args": asdict(args),
            "global_step": global_step,
            "agent": agent.state_dict(),
            "envs": envs.state_dict(),
            "rng": get_rng_states(envs.action_space, device),
        }
        try:
            size = save_checkpoint(run_dir / CHECKPOINT, state)
            seconds = time.perf_counter() - begin
            said = f"checkpoint at step {global_step:,}: {size / 1e6:.1f} MB in {seconds:.2f} s"
        except (OSError, RuntimeError) as error:  # torch covers the disk's complaint with its own
            reason = error if isinstance(error, OSError) else error.__context__ or error
            said = f"warning: no checkpoint at step {global_step:,}: {reason}"
        bar.write(said, file=sys.stderr)

    try:
        while global_step < total_timesteps:
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - global_step / total_timesteps
            agent.set_learning_rate(learning_rate)

            # 1. Roll out: T steps with the policy as it is.
            noise = torch.randn(args.num_steps, args.num_envs, action_dim, device=device)
            # speed: acting, simulation and storage at once, which CUDA graphs make one replay
            with watch.stage("simulation"):
                roll_out(noise)
            global_step += batch_size

            # 2. Learn from it in several epochs; with --target-kl, look after each.
            with watch.stage("backpropagation"):
                # speed: as captured
                prepare()
                orders = [
                    torch.randperm(batch_size, device=device) for _ in range(args.update_epochs)
                ]
                at_once = args.update_epochs if args.target_kl is None else 1
                for epochs in torch.stack(orders).split(at_once):
                    # speed: on the CPU a call per minibatch; with CUDA graphs one replay for all
                    metrics = learn(epochs)
                    if args.target_kl is not None and metrics[KL] > args.target_kl:
                        break

            # 3. Log.
            with watch.stage("logging"):
                sps, steady_sps = watch.inclusive_sps(), watch.steady_sps()
                writer.add_scalar("charts/SPS", sps, global_step)
                if steady_sps:
                    writer.add_scalar("charts/SPS_steady", steady_sps, global_step)
                writer.add_scalar("charts/learning_rate", learning_rate, global_step)
                explained = 1 - (batch.returns - batch.values).var() / batch.returns.var()
                writer.add_scalar("losses/explained_variance", explained.item(), global_step)
                for name, value in zip(METRICS, metrics.tolist(), strict=True):
                    writer.add_scalar(f"losses/{name}", value, global_step)
                episodes = rollout.ended.sum().item()
                # what ends in the first 200 steps had not begun at its beginning
                if episodes and global_step - batch_size >= envs.max_steps * args.num_envs:
                    episodic_return = rollout.returns_at_end.sum().item() / episodes
                    writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                    # none ends before the limit
                    writer.add_scalar("charts/episodic_length", envs.max_steps, global_step)
                shown = f"{steady_sps or sps:,.0f} steps/s"
                if episodic_return is not None:
                    shown += f", return {episodic_return:,.1f}"
                bar.set_postfix_str(shown, refresh=False)
                bar.update(global_step - bar.n)

            # 4. Evaluate and save, now and then and at the end.
            last = global_step >= total_timesteps
            if due(args.eval_every) or last and (args.eval_every or args.capture_video):
                with watch.stage("evaluation"):
                    video = run_dir / "videos" / f"step-{global_step}" if films else None
                    eval_return = evaluate(agent.model, args, device, video)
                    writer.add_scalar("charts/eval_return", eval_return, global_step)
                    said = f"evaluation at step {global_step:,}: mean return {eval_return:,.1f}"
                    bar.write(said, file=sys.stderr)
            if due(args.checkpoint_every) or last and (args.checkpoint_every or args.save_model):
                with watch.stage("checkpoint"):
                    save()
            watch.tick(global_step - start_step)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {global_step:,} steps", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        bar.close()
        envs.close()
        report = watch.report()
        if report["warmup_seconds"] is not None:
            writer.add_scalar("charts/warmup_seconds", report["warmup_seconds"], global_step)
        writer.close()
        (run_dir / f"stages{suffix}").write_text(json.dumps(report, indent=2))
        print(f"run directory: {run_dir}")
    return run_dir


def parse_args() -> Args:
    """The command line; with --resume, a flag that is not given is what it was in that run."""
    args = tyro.cli(Args)
    if args.resume is None:
        return args
    checkpoint = load_checkpoint(resumed_dir(args) / CHECKPOINT)
    return tyro.cli(Args, default=Args(**checkpoint["args"]))


def print_unless_raised_again(error: threading.ExceptHookArgs) -> None:
    """An exception in a thread, unless it is the event writer's, which add_scalar raises again."""
    if not isinstance(error.exc_value, OSError):
        threading.__excepthook__(error)


if __name__ == "__main__":
    threading.excepthook = print_unless_raised_again
    try:
        main(parse_args())
    except OSError as error:  # runs/ is read-only, the disk is full
        fail(f"the run stops: {error}")
