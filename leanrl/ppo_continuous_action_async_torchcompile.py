"""PPO for continuous actions in processes of their own, with torch.compile and CUDA graphs.

    python leanrl/ppo_continuous_action_async_torchcompile.py --compile
    python leanrl/ppo_continuous_action_async_torchcompile.py --compile --cudagraphs --num-envs 8 \\
        --num-steps 256
    python leanrl/ppo_continuous_action_async_torchcompile.py --help    # every flag

The algorithm is that of its twin, ppo_continuous_action_async.py, which says what acting and
learning at the same time needs; the hunks that differ start with `# speed:` and say what they buy,
the rest is the same to the letter. With --sync the results are exactly those of
ppo_continuous_action_torchcompile.py, from where the tricks and their figures come. Without a CUDA
device --cudagraphs says so in one line and the run goes on. The first rollouts pay for compilation:
seconds, reported as warm-up, fewer with a warm cache.

Measured (plots/results/): 4,704 steps/s with --compile on 2 cores of an AMD EPYC (AVX2), 1.45 times
what ppo_continuous_action_torchcompile.py makes, at the same return within noise; the collector
never waits and the learner does half of the time. On a GPU: not measured.
"""

# speed: CudaGraphModule captures a function as a CUDA graph
import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial, wraps
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    """learn on CUDA where there is a device, unless --learner-device says where"""
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

    learner_device: str | None = None
    """where the network learns: cpu, cuda or cuda:N"""
    collector_device: str = "cpu"
    """where its copy acts"""
    eval_device: str = "cpu"
    """where another copy is evaluated"""
    sync: bool = False
    """wait for each rollout before the next one begins: the results of ppo_continuous_action.py"""
    max_staleness: int = 1
    """how many updates the weights that make a rollout may be behind those that learn from it"""
    check_devices: bool = False
    """for debugging: stop at the first tensor that is not on the device where it belongs"""

    env_id: str = "HalfCheetah-v5"
    """id of the Gymnasium environment"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, over all environments; rounded down to whole rollouts"""
    learning_rate: float = 3e-4
    """learning rate of the optimizer, at first"""
    anneal_lr: bool = True
    """lower the learning rate from rollout to rollout, linearly to zero at the end of the run"""
    num_envs: int = 1
    """environments stepped side by side"""
    num_steps: int = 2048
    """steps of a rollout in each environment"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 32
    """minibatches per epoch"""
    update_epochs: int = 10
    """passes over a rollout"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """how far the ratio of new to old probabilities may go from 1 before its gradient ends"""
    clip_vloss: bool = True
    """clip the change of the value in the same way"""
    ent_coef: float = 0.0
    """weight of the entropy in the loss"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """longest gradient; longer ones are scaled down to it"""
    target_kl: float | None = None
    """end the epochs when the policy has gone so far, in KL divergence, from the old one"""

    # speed: each works alone, together and not at all
    compile: bool = False
    """compile learning with torch.compile, and acting on a GPU"""
    cudagraphs: bool = False
    """replay the preparation of a rollout and all its epochs as CUDA graphs, and acting on a GPU"""


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
    for name in ("checkpoint_every", "eval_every", "max_staleness"):
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
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs wandb: pip install -r requirements/wandb.txt")
    if args.capture_video and importlib.util.find_spec("moviepy") is None:
        fail("--capture-video needs moviepy: pip install -r requirements/video.txt")
    # speed: no graphs without CUDA: a contradiction is refused, a missing device only mentioned
    if args.cudagraphs and not args.cuda:
        fail("--cudagraphs contradicts --no-cuda")
    if args.cudagraphs and not torch.cuda.is_available():
        print("warning: no CUDA device, --cudagraphs has no effect", file=sys.stderr)
    if args.learner_device not in (None, "cpu") and not args.cuda:
        fail(f"--learner-device {args.learner_device} contradicts --no-cuda")
    for name in ("learner_device", "collector_device", "eval_device"):
        if getattr(args, name) is not None:
            check_device(f"--{name.replace('_', '-')}", getattr(args, name))


def check_device(flag: str, name: str) -> None:
    """Refuses a device that does not exist here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        fail(f"{flag} {name!r}: choose cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
        fail(f"{flag} {name}: this machine has {there}")


def choose_device(name: str) -> torch.device:
    """The device of that name, with its index, as the calling process's current one."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # or a context, of some 100 MB, opens on cuda:0 as well
    return device


class Repeatable(gym.Wrapper):
    """An environment that a checkpoint can bring back, whatever simulates it.

    A simulator's state is nowhere to be had in general, but an episode repeats itself from the same
    random state through the same actions.
    """

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.origin = self.np_random.bit_generator.state if seed is None else seed
        self.actions = []
        return self.env.reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> tuple:
        self.actions.append(action)
        return self.env.step(action)

    def state_dict(self) -> dict:
        """How the episode started, and its actions so far (T, A)."""
        return {"origin": self.origin, "actions": torch.from_numpy(np.array(self.actions))}

    def repeat(self, state: dict) -> np.ndarray:
        """Goes through the episode of `state` again -> its last observation (O,)."""
        if isinstance(state["origin"], int):
            obs, _ = self.reset(seed=state["origin"])
        else:
            self.np_random.bit_generator.state = state["origin"]
            obs, _ = self.reset()
        for action in state["actions"].numpy():
            obs = self.step(action)[0]
        return obs


# speed: most of what Gymnasium's class costs is copying, and merging infos that nobody reads
class LeanVectorEnv(gym.vector.SyncVectorEnv):
    """Steps as its parent does in `SAME_STEP` mode, but returns infos of ended episodes alone."""

    def step(self, actions: np.ndarray) -> tuple:
        infos, rewards = {}, np.empty(self.num_envs)
        obs = np.empty_like(self._observations)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=bool)
        for i, env in enumerate(self.envs):
            obs[i], rewards[i], terminated[i], truncated[i], info = env.step(actions[i])
            if terminated[i] or truncated[i]:
                final = {"final_obs": obs[i].copy(), "final_info": info}
                infos = self._add_info(infos, final, i)
                obs[i], _ = env.reset()
        return obs, rewards, terminated, truncated, infos


def make_envs(env_id: str, num_envs: int, video: Path | None = None) -> gym.vector.SyncVectorEnv:
    """N environments, each of which resets in the step that ends its episode (`SAME_STEP`).

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
        return Repeatable(gym.wrappers.RecordEpisodeStatistics(env))

    try:
        # speed: 35 us a step less than its parent
        envs = LeanVectorEnv(
            [partial(make_env, i) for i in range(num_envs)],
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        )
    except (gym.error.Error, ImportError) as error:  # says what is unknown or not installed
        fail(f"cannot make environment {env_id!r}: {' '.join(str(error).split())}")
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, gym.spaces.Box):
        fail(f"PPO with a Gaussian policy needs continuous actions; {env_id} has {action_space}")
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        fail(f"PPO with an MLP needs flat observations; {env_id} has {obs_space}")
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


class RunningMeanStd:
    """Mean and variance of all that each of N environments has shown, as Gymnasium keeps them."""

    def __init__(self, num_envs: int, *shape: int):
        self.mean, self.var = np.zeros((num_envs, *shape)), np.ones((num_envs, *shape))
        self.count = np.full((num_envs, *(1 for _ in shape)), 1e-4)

    def update(self, x: np.ndarray, envs: np.ndarray | slice = slice(None)) -> None:
        """Takes in one value for each of `envs`: x (n, *shape)."""
        count, delta = self.count[envs], x - self.mean[envs]
        total = count + 1
        step = delta / total
        self.mean[envs] += step
        self.var[envs] = (self.var[envs] + step * delta) * (count / total)
        self.count[envs] = total


class Normalizer:
    """Brings observations and rewards to unit scale by what each environment has shown so far.

    Rewards are divided by the deviation of their discounted sum, which a truncation does not end.
    """

    def __init__(self, num_envs: int, obs_dim: int, gamma: float):
        self.obs_stats = RunningMeanStd(num_envs, obs_dim)
        self.return_stats = RunningMeanStd(num_envs)
        self.returns, self.gamma = np.zeros(num_envs), gamma

    def observe(self, obs: np.ndarray, envs: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Takes in and normalizes one observation for each of `envs`: (n, O) -> (n, O) float32."""
        self.obs_stats.update(obs, envs)
        return self.scale(obs, self.obs_stats.mean[envs], self.obs_stats.var[envs])

    def observe_frozen(self, obs: np.ndarray) -> np.ndarray:
        """Normalizes (n, O) by the statistics of all environments together, and learns nothing."""
        mean = self.obs_stats.mean.mean(axis=0)
        var = (self.obs_stats.var + self.obs_stats.mean**2).mean(axis=0) - mean**2
        return self.scale(obs, mean, var)

    def reward(self, rewards: np.ndarray, terminated: np.ndarray) -> np.ndarray:
        """Takes in and normalizes the rewards of a step (N,)."""
        self.returns = self.returns * self.gamma * (1 - terminated) + rewards
        self.return_stats.update(self.returns)
        return np.clip(rewards / np.sqrt(self.return_stats.var + 1e-8), -10, 10)

    # speed: learning alone needs rewards, so those of a rollout can wait for each other: 8 us each
    def reward_all(self, rewards: np.ndarray, terminated: np.ndarray) -> np.ndarray:
        """`reward` for all steps of a rollout: both (T, N) -> (T, N)."""
        stats, returns = self.return_stats, np.empty(rewards.shape)
        weights = self.gamma * (1 - terminated)
        for t in range(len(rewards)):
            self.returns = returns[t] = self.returns * weights[t] + rewards[t]
        counts = stats.count + np.arange(1, len(rewards) + 1)[:, None]
        deltas = returns - stats.mean  # moments about the mean so far
        means, squares = deltas.cumsum(axis=0) / counts, (deltas**2).cumsum(axis=0)
        variances = (stats.var * stats.count + squares) / counts - means**2
        stats.mean, stats.var, stats.count = stats.mean + means[-1], variances[-1], counts[-1]
        return np.clip(rewards / np.sqrt(variances + 1e-8), -10, 10)

    @staticmethod
    def scale(obs: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
        scaled = (obs - mean) / np.sqrt(var + 1e-8)
        return np.minimum(np.maximum(scaled, -10), 10).astype(np.float32)

    def state_dict(self) -> dict:
        arrays = {f"obs_{name}": array for name, array in vars(self.obs_stats).items()}
        arrays |= {f"return_{name}": array for name, array in vars(self.return_stats).items()}
        arrays["discounted_returns"] = self.returns
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: dict) -> None:
        for name in ("mean", "var", "count"):
            getattr(self.obs_stats, name)[:] = state[f"obs_{name}"].numpy()
            getattr(self.return_stats, name)[:] = state[f"return_{name}"].numpy()
        self.returns = state["discounted_returns"].numpy().copy()


class NormalizedEnvs(gym.vector.VectorWrapper):
    """Environments whose actions are clipped and whose observations and rewards are normalized."""

    def __init__(self, envs: gym.vector.SyncVectorEnv, gamma: float):
        super().__init__(envs)
        self.normalizer = Normalizer(self.num_envs, self.single_observation_space.shape[0], gamma)
        self.low, self.high = self.single_action_space.low, self.single_action_space.high

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.raw_obs, infos = self.env.reset(seed=seed, options=options)
        self.obs = self.normalizer.observe(self.raw_obs)
        return self.obs, infos

    def step(self, actions: np.ndarray) -> tuple:
        """Actions (N, A) -> observations (N, O), rewards, terminated, truncated, each (N,), infos.

        Where an episode ended, the observation is already the next episode's first; then infos has
        `final_obs` (N, O), the observations before the resets.
        """
        clipped = np.clip(actions, self.low, self.high)
        next_obs, rewards, terminated, truncated, infos = self.env.step(clipped)
        ended, last_obs = terminated | truncated, next_obs
        if "final_obs" in infos:
            last_obs = next_obs.copy()
            for i in np.flatnonzero(ended):
                last_obs[i] = infos["final_obs"][i]
        # speed: rewards wait for those of the whole rollout, as learning does
        self.raw_obs, self.obs = next_obs, self.normalizer.observe(last_obs)
        if ended.any():
            infos["final_obs"] = self.obs.copy()
            self.obs[ended] = self.normalizer.observe(next_obs[ended], ended)
        return self.obs, rewards, terminated, truncated, infos

    def state_dict(self) -> dict:
        """What a checkpoint needs to bring the environments back to this moment."""
        return {
            "normalizer": self.normalizer.state_dict(),
            "envs": [env.state_dict() for env in self.env.envs],
            "obs": torch.from_numpy(self.raw_obs),
            "normalized_obs": torch.from_numpy(self.obs),
        }

    def load_state_dict(self, checkpoint: dict, seed: int) -> None:
        """Goes there; what does not repeat itself starts afresh, environment i by seed + i."""
        self.normalizer.load_state_dict(checkpoint["normalizer"])
        self.raw_obs = repeat_episodes(self.env, checkpoint, seed)
        self.obs = checkpoint["normalized_obs"].numpy()
        fresh = (self.raw_obs != checkpoint["obs"].numpy()).any(axis=1)
        self.obs[fresh] = self.normalizer.observe(self.raw_obs[fresh], fresh)


# speed: no DeviceEnv: acting takes and gives arrays, as these environments do


class DeviceError(RuntimeError):
    """A tensor is not on the device where it belongs."""


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in `value`, each with the expression that leads to it from `name`."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from named_tensors(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", item)
    elif isinstance(value, (Rollout, nn.Module)):
        items = value.named_parameters() if isinstance(value, nn.Module) else vars(value).items()
        for key, item in items:
            yield from named_tensors(f"{name}.{key}", item)


def check_devices(function: Callable, device: torch.device) -> Callable:
    """For debugging: `function`, which refuses tensors, given or returned, that are elsewhere.

    DeviceError names the tensor, the device on which it is and the one on which it belongs.
    """
    signature = inspect.signature(function)
    title = getattr(function, "__qualname__", type(function).__name__)

    def check(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if tensor.device != device:
                where = f"{title}: {name} is on {tensor.device}"
                raise DeviceError(f"{where}, expected {device}")

    @wraps(function)
    def checked(*args, **kwargs):
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            check(named_tensors(name, value))
        result = function(*args, **kwargs)
        check(named_tensors("result", result))
        return result

    return checked


def layer_init(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights, no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


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
        return self.actor_mean(obs), self.actor_logstd, self.critic(obs).squeeze(-1)


class Batch(NamedTuple):
    """B steps of a rollout, float32; log_probs and values are those from which learning departs."""

    obs: torch.Tensor  # (B, O)
    actions: torch.Tensor  # (B, A)
    log_probs: torch.Tensor  # (B,)
    values: torch.Tensor  # (B,)
    advantages: torch.Tensor  # (B,)
    returns: torch.Tensor  # (B,)
    importance: torch.Tensor  # (B,) how much likelier the actions are than where they were drawn


class Rollout:
    """T steps of N environments on `device`."""

    def __init__(
        self, steps: int, num_envs: int, obs_dim: int, action_dim: int, device: torch.device
    ):
        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(steps, num_envs, *shape, device=device)

        # T + 1 rows, the last one for what follows the rollout
        self.obs = torch.zeros(steps + 1, num_envs, obs_dim, device=device)
        # speed: values and log-probabilities can wait for `prepare`
        self.actions, self.rewards = empty(action_dim), empty()
        self.ended = empty()  # 1 where the step ended an episode, of either kind
        self.final_values = empty()  # of the final observation of a truncated episode; otherwise 0

    def to(self, device: torch.device) -> "Rollout":
        """The same steps on `device`, without a copy where they are there already."""
        there = object.__new__(Rollout)
        vars(there).update({name: tensor.to(device) for name, tensor in vars(self).items()})
        return there

    # speed: for whom PyTorch's dispatch costs too much
    def arrays(self) -> dict[str, np.ndarray]:
        """The same memory for NumPy."""
        return {name: tensor.numpy() for name, tensor in vars(self).items()}


class Slot:
    """What travels between learner and collector, in CPU memory that both see.

    On the way there the weights to act with (P,), their version and standard normal noise
    (T, N, A), on the way back also the rollout that was made with them. Not straight from one GPU
    to another: that would open a context on both in each process.
    """

    def __init__(self, args: Args, obs_dim: int, action_dim: int, num_parameters: int):
        steps, num_envs = args.num_steps, args.num_envs
        self.version, self.weights = torch.zeros((), dtype=torch.int64), torch.zeros(num_parameters)
        self.noise = torch.zeros(steps, num_envs, action_dim)
        self.rollout = Rollout(steps, num_envs, obs_dim, action_dim, torch.device("cpu"))
        for tensor in (*vars(self.rollout).values(), self.version, self.weights, self.noise):
            tensor.share_memory_()  # nothing of it outlives the processes, however they end

    def state_dict(self) -> dict:
        """What the learner has put in."""
        return {name: getattr(self, name) for name in ("version", "weights", "noise")}

    def load_state_dict(self, state: dict) -> None:
        for name, tensor in state.items():
            getattr(self, name).copy_(tensor)


def gaussian_log_prob(
    actions: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor
) -> torch.Tensor:
    """Log-density of actions (B, A) under a diagonal Gaussian -> (B,)."""
    z = (actions - mean) * (-log_std).exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)


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
    """Loss of a minibatch (equation 9) -> loss (), METRICS (6,).

    The policy's part is the decoupled objective of Hilton et al. (arXiv:2110.00641, section 3): the
    ratio is bounded about the policy from which learning departs, and steps that another one made
    count by their importance.
    """
    mean, log_std, values = model(batch.obs)
    log_ratios = gaussian_log_prob(batch.actions, mean, log_std) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    of_policy = policy_loss(log_ratios, batch.importance * advantages, args.clip_coef)
    clip_coef = args.clip_coef if args.clip_vloss else None
    of_value = value_loss(values, batch.values, batch.returns, clip_coef)
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = of_policy - args.ent_coef * entropy + args.vf_coef * of_value
    with torch.no_grad():
        ratios = log_ratios.exp()
        kl = -log_ratios.mean(), (ratios - 1 - log_ratios).mean()  # joschu.net/blog/kl-approx.html
        clipped = ((ratios - 1).abs() > args.clip_coef).float().mean()
        return loss, torch.stack([of_policy, of_value, entropy, *kl, clipped])


class Policy:
    """The copy of the network that acts, or is evaluated, in a process of its own."""

    def __init__(self, obs_dim: int, action_dim: int, device: torch.device):
        self.model = ActorCritic(obs_dim, action_dim).to(device)
        # speed: what acts on a GPU, to be compiled and captured there; on a CPU NumPy does
        self.device = device
        self.on_gpu = {"actor_mean": self.model.actor_mean, "critic": self.model.critic}

    def load(self, weights: torch.Tensor) -> None:
        """Takes over PPO.weights (P,)."""
        parameters = list(self.model.parameters())
        parts = weights.split([parameter.numel() for parameter in parameters])
        with torch.no_grad():
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))
        # speed: once per rollout, so that acting needs no PyTorch
        arrays = {name: p.cpu().numpy().T.copy() for name, p in self.model.state_dict().items()}
        self.layers = {
            network: [
                (arrays[f"{network}.{i}.weight"], arrays[f"{network}.{i}.bias"]) for i in (0, 2, 4)
            ]
            for network in ("actor_mean", "critic")
        }
        self.std = np.exp(arrays["actor_logstd"])

    # speed: for a few rows PyTorch's dispatch costs more than the arithmetic: 114 us a step in all
    def forward(self, network: str, obs: np.ndarray) -> np.ndarray:
        """A network of the model: obs (N, O) -> output of the last layer (N, .)."""
        if self.device.type == "cuda":
            with torch.no_grad():
                return self.on_gpu[network](torch.from_numpy(obs).to(self.device)).cpu().numpy()
        *hidden, (weight, bias) = self.layers[network]
        for hidden_weight, hidden_bias in hidden:
            obs = np.tanh(obs @ hidden_weight + hidden_bias)
        return obs @ weight + bias

    # speed: log-probabilities and values can wait for `prepare`, one call for all: 99 us a step
    def act(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """obs (N, O), standard normal noise (N, A) -> actions (N, A)."""
        return self.forward("actor_mean", obs) + self.std * noise

    # speed: without PyTorch, as `act`
    def value(self, obs: np.ndarray) -> np.ndarray:
        """obs (N, O) -> values (N,)."""
        # speed: without PyTorch
        return self.forward("critic", obs)[:, 0]


# speed: one vector of all parameters: one kernel, where torch.optim.Adam would break the graph. The
# powers of beta are state: computed from a step count, each element pays a pow
class Adam:
    """Adam (Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1) of one vector."""

    def __init__(self, parameters: torch.Tensor, lr: float, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.eps, device = parameters, eps, parameters.device
        self.exp_avg, self.exp_avg_sq = (torch.zeros_like(parameters) for _ in betas)
        self.betas = torch.tensor(betas, device=device)
        self.beta_powers = torch.ones_like(self.betas)
        self.beta1, self.beta2 = betas
        self.lr = torch.tensor(lr, device=device)

    def state_dict(self) -> dict:
        names = "exp_avg", "exp_avg_sq", "beta_powers"
        return {"state": {name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict) -> None:
        for name, tensor in state["state"].items():
            getattr(self, name).copy_(tensor)

    def step(self, gradient: torch.Tensor) -> None:
        """Updates the parameters in place."""
        self.beta_powers.mul_(self.betas)
        self.exp_avg.lerp_(gradient, 1 - self.beta1)
        self.exp_avg_sq.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        unbias1, unbias2 = 1 / (1 - self.beta_powers[0]), (1 - self.beta_powers[1]).rsqrt()
        denominator = self.exp_avg_sq.sqrt() * unbias2 + self.eps
        self.parameters.sub_(self.exp_avg / denominator * (self.lr * unbias1))


class PPO:
    """Network, optimizer and gradient steps, which return their metrics as one tensor."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        self.args = args
        self.model = ActorCritic(obs_dim, action_dim).to(device)
        # speed: the model's parameters become views of one vector
        parameters = dict(self.model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.parameters = torch.cat([p.detach().flatten() for p in parameters.values()])
        for name, view in self.views(self.parameters).items():
            parameters[name].data = view
        self.optimizer = Adam(self.parameters, lr=args.learning_rate, eps=1e-5)
        batch_size, columns = args.num_envs * args.num_steps, obs_dim + action_dim + 5
        self.data = torch.zeros(batch_size, columns, device=device)  # a row per step, as in Batch
        self.widths = (obs_dim, action_dim, 1, 1, 1, 1, 1)

    # speed: what a call of the model takes in place of its parameters
    def views(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """A vector like `parameters` (P,) by the names of the parameters."""
        parts = weights.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(self.shapes[name])
            for name, part in zip(self.shapes, parts, strict=True)
        }

    def state_dict(self) -> dict:
        """Everything that updates change."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state["optimizer"]})

    def set_learning_rate(self, learning_rate: float) -> None:
        # speed: a tensor, which compiled code and graphs read anew
        self.optimizer.lr.fill_(learning_rate)

    def weights(self) -> torch.Tensor:
        """All parameters (P,), for a Policy to load."""
        # speed: one vector as they are
        return self.parameters

    # speed: one call computes what the policy that acted would have said, from its own weights
    def prepare(
        self, rollout: dict[str, torch.Tensor], weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A Rollout's tensors -> returns (B,) and values (B,), and its B = T N steps in `data`."""
        with torch.no_grad():
            # speed: the device's side of what NumPy has filled
            obs, actions, rewards, ended, final_values = rollout.values()
            views = self.views(weights)
            mean, log_std, _ = torch.func.functional_call(self.model, views, (obs,))
            acted = gaussian_log_prob(actions, mean[:-1], log_std)
            mean, log_std, values = self.model(obs)
            log_probs = gaussian_log_prob(actions, mean[:-1], log_std)
            importance = (log_probs - acted).exp()  # 1 to the bit if the weights are the same
            following = torch.where(ended.bool(), final_values, values[1:])
            values = values[:-1]
            # speed: as everywhere, then one row per step, so that a minibatch is one gather
            gamma, gae_lambda = self.args.gamma, self.args.gae_lambda
            advantages = compute_gae(rewards, values, following, ended, gamma, gae_lambda)
            returns = advantages + values
            columns = [obs[:-1], actions]
            scalars = log_probs, values, advantages, returns, importance
            columns += [x[:, :, None] for x in scalars]
            self.data.copy_(torch.cat(columns, dim=-1).flatten(0, 1))
            return returns.flatten(), values.flatten()

    # speed: pure functions of the parameters' views, nothing hidden from the compiler. Four steps
    # per compiled call would save 15% of their time on a CPU and cost 15 s more of compilation
    def update(self, index: torch.Tensor) -> torch.Tensor:
        """One gradient step on the rows of `data` in index (B,) -> METRICS (6,)."""
        with torch.no_grad():
            # speed: one gather, one vector of gradients
            obs, actions, *scalars = self.data.index_select(0, index).split(self.widths, dim=1)
            batch = Batch(obs, actions, *(x.squeeze(1) for x in scalars))
            parameters = self.views(self.parameters)
            gradients, metrics = torch.func.grad(self.loss, has_aux=True)(parameters, batch)
            gradient = torch.cat([x.flatten() for x in gradients.values()])
            norm = gradient.square().sum().sqrt()
            gradient = gradient * (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            self.optimizer.step(gradient)
            return metrics

    # speed: the loss as a function of the parameters, which is what is differentiated
    def loss(
        self, parameters: dict[str, torch.Tensor], batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`ppo_loss` -> loss (), METRICS (6,)."""
        model = partial(torch.func.functional_call, self.model, parameters)
        return ppo_loss(lambda obs: model((obs,)), batch, self.args)

    # speed: the batch is in `data`
    def learn(self, permutations: torch.Tensor) -> torch.Tensor:
        """Epochs of minibatches in the order of permutations (E, B) -> the last METRICS (6,)."""
        for index in permutations.view(-1, permutations.shape[1] // self.args.num_minibatches):
            # speed: so its rows can be gathered within the update
            metrics = self.update(index)
        return metrics


# speed: whatever runs on the device: 370 us a step, all of it the update's, which `learn` calls
# without unrolling
def compile_agent(agent: PPO) -> None:
    """Compiles the preparation of a rollout and the update to one graph each."""
    # in torch 2.11 this pass moves a backward product behind the update of the weights it reads
    torch._inductor.config.reorder_for_locality = False
    torch._inductor.config.cpp.use_decompose_tanh = True  # by exp, which is vectorized better
    agent.prepare = torch.compile(agent.prepare, fullgraph=True)
    agent.update = torch.compile(agent.update, fullgraph=True)


class WorkerError(BaseException):
    """A process of this run died; the message has its traceback, or tells what killed it.

    It comes at any moment, as KeyboardInterrupt does, and passes `except Exception` as that does.
    """


class Worker:
    """A process of this run, with a pipe to it, which dies with this one, however that ends.

    When it dies alone, WorkerError says so: from `send` and `receive`, and from `check`, which
    notices at once where it is called on SIGCHLD. To be used in the main thread, as signals are.
    """

    def __init__(self, name: str, function: Callable, *args):
        """Starts `function(pipe, *args)`, which goes on until `end`."""
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.name, self.reason = name, None
        self.pipe, pipe = context.Pipe()
        self.last_words, last_words = context.Pipe(duplex=False)
        arguments = function, pipe, last_words, *args
        self.process = context.Process(target=work, args=arguments, name=name, daemon=True)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self.process.start()  # inherits this: on Ctrl-C the learner ends it, and nobody else
        finally:
            signal.signal(signal.SIGINT, handler)
        pipe.close()
        last_words.close()

    def check(self) -> None:
        """WorkerError if it has failed or was killed."""
        if self.process.exitcode:
            raise self.error()

    def error(self) -> WorkerError:
        if self.reason is None:
            try:
                self.reason = self.last_words.recv()
            except EOFError:  # it had no time for any
                code = self.process.exitcode or 0
                signal_or_status = signal.Signals(-code).name if code < 0 else f"status {code}"
                self.reason = f"ended by {signal_or_status}" if code else "told to end by SIGTERM"
        return WorkerError(f"the {self.name} died: {self.reason}")

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            self.process.join()
            raise self.error() from None

    def receive(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise self.error() from None

    def end(self) -> None:
        """Ends it, in the middle of whatever it does, and waits until it is gone."""
        self.process.terminate()
        self.process.join(timeout=10)
        self.process.kill()
        self.process.join()


def work(function: Callable, pipe: Connection, last_words: Connection, *args) -> None:
    """What the process of a Worker runs."""

    def die_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # the others are the learner's
    try:
        function(pipe, *args)
    except KeyboardInterrupt:  # Worker.end
        pass
    except Exception:
        last_words.send(traceback.format_exc()[-3000:])  # a pipe takes so much before it is read
        sys.stdout.flush()
        os._exit(1)  # without Python's good-byes, of half a second


def collect(
    pipe: Connection, args: Args, slots: list[Slot], start_step: int, report_path: Path
) -> None:
    """What the collector does: makes rollouts, each in the slot and with the weights that it gets.

    First it gets the state of the environments to go on with, if there is one. Then a request is
    the index of a slot and whether the environments' state after the rollout is wanted; the answer
    is (step, return, length) of each episode that ended, that state and the seconds of waiting for
    the request. States are pickled: tensors would become shared memory on the way.
    """
    # for what an environment draws elsewhere than from its own generator
    random.seed(args.seed + start_step)
    np.random.seed(args.seed + start_step)
    torch.manual_seed(args.seed + start_step)
    device = choose_device(args.collector_device)
    batch_size = args.num_envs * args.num_steps
    watch = Stopwatch(
        device, args.stopwatch, STEADY_AFTER * batch_size, trace_after=3, trace_iterations=1
    )
    normalized = NormalizedEnvs(make_envs(args.env_id, args.num_envs), args.gamma)
    # speed: without DeviceEnv
    envs = normalized
    policy = Policy(
        envs.single_observation_space.shape[0], envs.single_action_space.shape[0], device
    )
    # speed: on a GPU acting becomes few launches, or one
    if args.compile and device.type == "cuda":
        policy.on_gpu = {name: torch.compile(network) for name, network in policy.on_gpu.items()}
    if args.cudagraphs and device.type == "cuda":
        graphs = {name: CudaGraphModule(n, warmup=3) for name, n in policy.on_gpu.items()}
        policy.on_gpu = graphs
    obs, _ = envs.reset(seed=args.seed)
    state = pickle.loads(pipe.recv())
    if state is not None:
        normalized.load_state_dict(state, args.seed + start_step)
        # speed: an array
        obs = normalized.obs
    global_step, begin = start_step, time.perf_counter()
    try:
        while True:
            index, wants_state = pipe.recv()
            waited = time.perf_counter() - begin
            slot, episodes = slots[index], []
            # speed: the shared memory as arrays, without PyTorch
            rollout, noise = slot.rollout.arrays(), slot.noise.numpy()
            all_rewards, all_terminated = np.zeros((2, args.num_steps, args.num_envs))
            rollout["obs"][0] = obs
            policy.load(slot.weights)
            for t in range(args.num_steps):
                with watch.stage("inference"):
                    # speed: without PyTorch
                    actions = policy.act(obs, noise[t])
                with watch.stage("simulation"):
                    next_obs, rewards, terminated, truncated, infos = envs.step(actions)

                # Where an episode ended, next_obs is already the next episode's first.
                with watch.stage("replay"):
                    # speed: without PyTorch
                    rollout["obs"][t + 1], rollout["actions"][t] = next_obs, actions
                    all_rewards[t], all_terminated[t] = rewards, terminated
                    rollout["ended"][t] = terminated | truncated
                    if "final_obs" in infos:
                        final_values = policy.value(infos["final_obs"])
                        # speed: without PyTorch
                        rollout["final_values"][t] = final_values * (~terminated & truncated)
                    obs = next_obs
                global_step += args.num_envs

                with watch.stage("logging"):
                    if "final_info" in infos:
                        episode = infos["final_info"]["episode"]
                        for i in np.flatnonzero(infos["_final_info"]):
                            episodic_return, length = float(episode["r"][i]), int(episode["l"][i])
                            episodes.append((global_step, episodic_return, length))
            # speed: the rewards at once
            with watch.stage("replay"):
                rewards = normalized.normalizer.reward_all(all_rewards, all_terminated)
                rollout["rewards"][:] = rewards
            state = None
            if wants_state:
                with watch.stage("checkpoint"):
                    state = pickle.dumps(normalized.state_dict())
            pipe.send((episodes, state, waited))
            watch.tick(global_step - start_step)
            begin = time.perf_counter()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        print("the collector:")
        report_path.write_text(json.dumps(watch.report(), indent=2))


class Evaluator(Worker):
    """Evaluates weights of one iteration after the other while the training goes on."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, videos: Path | None):
        super().__init__("evaluator", answer, args, obs_dim, action_dim, videos)
        self.requests, self.busy = deque(), False

    def request(self, global_step: int, weights: torch.Tensor, normalizer: dict) -> None:
        """Lines up for the mean return of weights (P,), which `answers` will have."""
        weights = weights.to("cpu", copy=True)  # which go on being learned
        request = {"global_step": global_step, "weights": weights, "normalizer": normalizer}
        self.requests.append(request)

    def answers(self, wait: bool) -> Iterator[tuple[int, float]]:
        """(step, mean return) of what is evaluated by now; with `wait`, of all.

        Sends the next request when the one before is answered, so it must be asked now and then.
        """
        while self.requests:
            if not self.busy:
                self.send(pickle.dumps(self.requests[0]))
                self.busy = True
            if not wait and not self.pipe.poll():
                return
            yield self.receive()
            self.requests.popleft()
            self.busy = False


def answer(
    pipe: Connection, args: Args, obs_dim: int, action_dim: int, videos: Path | None
) -> None:
    """What the evaluator does."""
    device = choose_device(args.eval_device)
    policy = Policy(obs_dim, action_dim, device)
    normalizer = Normalizer(args.num_envs, obs_dim, args.gamma)
    while True:
        request = pickle.loads(pipe.recv())
        policy.load(request["weights"])
        normalizer.load_state_dict(request["normalizer"])
        global_step = request["global_step"]
        video = videos and videos / f"step-{global_step}"
        pipe.send((global_step, evaluate(policy.model, normalizer, args, device, video)))


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


def evaluate(
    model: ActorCritic, normalizer: Normalizer, args: Args, device: torch.device, video: Path | None
) -> float:
    """Mean return of K episodes, side by side, in which the policy acts without noise.

    They start from the same K states every time. Training notices nothing: the environments are
    new, the statistics frozen and no shared random generator is used.
    """
    envs = make_envs(args.env_id, args.eval_episodes, video)
    low, high = envs.single_action_space.low, envs.single_action_space.high
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.reset(seed=args.seed + EVAL_SEED)
    while running.any():
        obs_tensor = torch.from_numpy(normalizer.observe_frozen(obs)).to(device)
        with torch.no_grad():
            actions = model.actor_mean(obs_tensor).cpu().numpy()
        obs, _, _, _, infos = envs.step(np.clip(actions, low, high))
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


def repeat_episodes(envs: gym.vector.SyncVectorEnv, checkpoint: dict, seed: int) -> np.ndarray:
    """Brings the environments to where the checkpoint left them -> observations (N, O).

    One that does not repeat itself starts a fresh episode, and a warning says so.
    """
    obs, fresh = checkpoint["obs"].numpy().copy(), 0
    for i, env in enumerate(envs.envs):
        if not np.array_equal(env.repeat(checkpoint["envs"][i]), obs[i]):
            obs[i], _ = env.reset(seed=seed + i)
            fresh += 1
    if fresh:
        print(
            f"warning: {checkpoint['env_id']} does not repeat itself: "
            f"{fresh} of {len(obs)} environments start a fresh episode",
            file=sys.stderr,
        )
    return obs


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
ENV_STATE = ("normalizer", "envs", "obs", "normalized_obs")  # of a checkpoint: the collector's
EVAL_SEED = 1_000_000  # added to --seed: evaluation starts from states that training does not
KL = METRICS.index("approx_kl")
STEADY_AFTER = 3  # rollouts, then compilation and capture are over


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    check_args(args)
    checkpoint = load_checkpoint(resumed_dir(args) / CHECKPOINT) if args.resume else None
    start_step = checkpoint["global_step"] if checkpoint else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as cleanly as on Ctrl-C
    default_device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    device = choose_device(args.learner_device or default_device)
    max_staleness = 0 if args.sync else args.max_staleness
    if max_staleness > 0:  # one core is the collector's
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    batch_size = args.num_envs * args.num_steps
    total_timesteps = args.total_timesteps // batch_size * batch_size
    watch = Stopwatch(
        device, args.stopwatch, STEADY_AFTER * batch_size, trace_after=3, trace_iterations=1
    )
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    envs = make_envs(args.env_id, 1)  # only for their spaces: the collector has its own
    envs.close()
    envs.action_space.seed(args.seed)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    size = len(agent.weights())
    slots = [Slot(args, obs_dim, action_dim, size) for _ in range(max_staleness + 1)]

    # speed: all compilation and capture is set up here; the loop below does not know of it. Each
    # function compiles when it is first called, and a graph is captured on its third call
    if device.type == "cpu":
        torch.set_num_threads(1)  # layers of 64 are too small to share
    if args.compile:
        compile_agent(agent)
    if args.cudagraphs and device.type == "cuda":
        agent.prepare = CudaGraphModule(agent.prepare, warmup=3)
        agent.learn = CudaGraphModule(agent.learn, warmup=3)

    kind = {"script": SCRIPT, "env_id": args.env_id, "obs_dim": obs_dim, "action_dim": action_dim}
    kind |= {"num_envs": args.num_envs}
    global_step, version, episodic_return, env_state = start_step, 0, None, None
    if checkpoint:
        for name, mine in kind.items():
            if checkpoint[name] != mine:
                fail(f"{args.resume} has {name} {checkpoint[name]}, this run has {mine}")
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as error:  # networks of another shape: it names both
            fail(f"{args.resume}: {' '.join(str(error).split())}")
        version = checkpoint["version"]
        env_state = {name: checkpoint[name] for name in ("env_id", *ENV_STATE)}
        set_rng_states(checkpoint["rng"], envs.action_space, device)

    if args.check_devices:
        agent.prepare, agent.learn = (
            check_devices(f, device) for f in (agent.prepare, agent.learn)
        )

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
    workers, evaluator = [], None

    def look_after_workers(*_) -> None:
        for worker in workers:
            worker.check()

    def due(step: int, every: int, at_end: bool) -> bool:
        """Whether the rollout before `step` passed a multiple of so many steps, or was the last."""
        return every > 0 and step % every < batch_size or at_end and step >= total_timesteps

    def evaluates(step: int) -> bool:
        return due(step, args.eval_every, args.eval_every > 0 or args.capture_video)

    def saves(step: int) -> bool:
        return due(step, args.checkpoint_every, args.checkpoint_every > 0 or args.save_model)

    def slot_of(rollout: int) -> Slot:
        return slots[rollout % len(slots)]

    def end_of(rollout: int) -> int | None:
        """The global step after this rollout; None if the run is over before."""
        begin = global_step + (rollout - version) * batch_size
        return begin + batch_size if begin < total_timesteps else None

    def fill(slot: Slot) -> None:
        """Publishes the weights, and the noise to act with."""
        slot.version.fill_(version)
        slot.weights.copy_(agent.weights())
        slot.noise.copy_(torch.randn(slot.noise.shape, device=device))

    def hand_out(rollout: int) -> None:
        """Lets the collector make it, unless the run is over before."""
        step = end_of(rollout)
        if step is not None:
            collector.send((rollout % len(slots), evaluates(step) or saves(step)))

    def save() -> None:
        """Writes checkpoint.pt, after the metrics that lead to it; a full disk is not the end."""
        begin = time.perf_counter()
        writer.flush()
        handed_out = [n for n in range(version, version + max_staleness) if end_of(n) is not None]
        state = kind | {
            "args": asdict(args),
            "global_step": global_step,
            "version": version,
            "agent": agent.state_dict(),
            **env_state,
            "slots": [slot_of(rollout).state_dict() for rollout in handed_out],
            "evaluations": list(evaluator.requests) if evaluator else [],
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

    handler = signal.signal(signal.SIGCHLD, look_after_workers)  # when a process of ours ends
    try:
        report_path = run_dir / f"stages_collector{suffix}"
        collector = Worker("collector", collect, args, slots, start_step, report_path)
        workers.append(collector)
        if args.eval_every or args.capture_video:
            evaluator = Evaluator(args, obs_dim, action_dim, run_dir / "videos" if films else None)
            evaluator.requests.extend(checkpoint["evaluations"] if checkpoint else ())
            workers.append(evaluator)
        collector.send(pickle.dumps(env_state))
        unfinished = checkpoint["slots"] if checkpoint else []  # rollouts when it was written
        if unfinished and unfinished[0]["noise"].shape != slots[0].noise.shape:
            unfinished = []
        for i, rollout in enumerate(range(version, version + max_staleness)):
            if i < len(unfinished):
                slot_of(rollout).load_state_dict(unfinished[i])
            else:
                fill(slot_of(rollout))
            hand_out(rollout)

        while global_step < total_timesteps:
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - global_step / total_timesteps
            agent.set_learning_rate(learning_rate)

            # 1. Let the collector go on, and get the rollout that is due.
            with watch.stage("replay"):
                fill(slot_of(version + max_staleness))
                hand_out(version + max_staleness)
            begin = time.perf_counter()
            episodes, state, waited = collector.receive()
            waits = {"learner": time.perf_counter() - begin, "collector": waited}
            with watch.stage("replay"):
                slot = slot_of(version)
                rollout, staleness = slot.rollout.to(device), version - slot.version.item()
            env_state = state and pickle.loads(state)
            global_step += batch_size

            # 2. Learn from it in several epochs; with --target-kl, look after each.
            with watch.stage("backpropagation"):
                # speed: from the weights that acted
                returns, values = agent.prepare(vars(rollout), slot.weights.to(device))
                orders = [
                    torch.randperm(batch_size, device=device) for _ in range(args.update_epochs)
                ]
                at_once = args.update_epochs if args.target_kl is None else 1
                for epochs in torch.stack(orders).split(at_once):
                    # speed: on the CPU a call per minibatch; with CUDA graphs one replay for all
                    metrics = agent.learn(epochs)
                    if args.target_kl is not None and metrics[KL] > args.target_kl:
                        break
            version += 1

            # 3. Log.
            with watch.stage("logging"):
                for step, episodic_return, length in episodes:
                    writer.add_scalar("charts/episodic_return", episodic_return, step)
                    writer.add_scalar("charts/episodic_length", length, step)
                sps, steady_sps = watch.inclusive_sps(), watch.steady_sps()
                writer.add_scalar("charts/SPS", sps, global_step)
                if steady_sps:
                    writer.add_scalar("charts/SPS_steady", steady_sps, global_step)
                writer.add_scalar("charts/learning_rate", learning_rate, global_step)
                writer.add_scalar("charts/staleness", staleness, global_step)
                for name, seconds in waits.items():
                    writer.add_scalar(f"charts/{name}_waits_seconds", seconds, global_step)
                # speed: columns of `data`
                explained = 1 - (returns - values).var() / returns.var()
                writer.add_scalar("losses/explained_variance", explained.item(), global_step)
                for name, value in zip(METRICS, metrics.tolist(), strict=True):
                    writer.add_scalar(f"losses/{name}", value, global_step)
                shown = f"{steady_sps or sps:,.0f} steps/s"
                if episodic_return is not None:
                    shown += f", return {episodic_return:,.1f}"
                bar.set_postfix_str(shown, refresh=False)
                bar.update(global_step - bar.n)

            # 4. Evaluate, which others do meanwhile, and save, now and then and at the end.
            if evaluator is not None:
                with watch.stage("evaluation"):
                    if evaluates(global_step):
                        evaluator.request(global_step, agent.weights(), env_state["normalizer"])
                    for step, eval_return in evaluator.answers(wait=global_step >= total_timesteps):
                        writer.add_scalar("charts/eval_return", eval_return, step)
                        said = f"evaluation at step {step:,}: mean return {eval_return:,.1f}"
                        bar.write(said, file=sys.stderr)
            if saves(global_step):
                with watch.stage("checkpoint"):
                    save()
            watch.tick(global_step - start_step)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {global_step:,} steps", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # once is enough: the rest takes seconds
        signal.signal(signal.SIGCHLD, handler)
        bar.close()
        for worker in workers:
            worker.end()
        print("the learner:")
        report = watch.report()
        if report["warmup_seconds"] is not None:
            writer.add_scalar("charts/warmup_seconds", report["warmup_seconds"], global_step)
        writer.close()
        (run_dir / f"stages{suffix}").write_text(json.dumps(report, indent=2))
        print(f"run directory: {run_dir}")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
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
    except (WorkerError, DeviceError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
