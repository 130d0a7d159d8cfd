"""Proximal Policy Optimization (PPO) on thousands of CartPoles that are one tensor: the baseline.

    python leanrl/ppo_cartpole_gpu.py                               # 4,096 environments, 5 M steps
    python leanrl/ppo_cartpole_gpu.py --num-envs 65536 --num-minibatches 16
    python leanrl/ppo_cartpole_gpu.py --eval-every 1000000          # on Gymnasium's own CartPole-v1
    python leanrl/ppo_cartpole_gpu.py --resume runs/RUN             # go on from its checkpoint.pt
    python leanrl/ppo_cartpole_gpu.py --help                        # every flag

Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv:1707.06347), with
generalized advantage estimation (arXiv:1506.02438). The environment is Gymnasium's CartPole-v1
(Barto, Sutton and Anderson, 1983) written as PyTorch operations over all environments at once: it
lives where the network lives, on the GPU if there is one, and nothing but metrics leaves that
device. A truncated episode bootstraps from the value of its final observation; a terminated one
does not bootstrap. `charts/episodic_return` is the mean over the episodes that ended in a rollout.

Measured (plots/results/): 80,000 steps/s on 2 cores of an AMD EPYC (AVX2). On a GPU: not measured.

Shapes: T steps of a rollout, N environments, B batch, A = 2 actions, O = 4. A run writes
runs/<env>__<name>__<seed>__<time>/ with config.json, TensorBoard event files and stages.json, and
where asked for with checkpoint.pt and videos/.
"""

import importlib.util
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tqdm
import tyro
from torch.optim import Adam
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

    env_id: Literal["CartPole-v1"] = "CartPole-v1"
    """the environment, in Gymnasium's words"""
    total_timesteps: int = 5_000_000
    """environment steps of the whole run, over all environments; rounded down to whole rollouts"""
    learning_rate: float = 2.5e-3
    """learning rate of the optimizer, at first"""
    anneal_lr: bool = True
    """lower the learning rate from rollout to rollout, linearly to zero at the end of the run"""
    num_envs: int = 4096
    """environments stepped side by side"""
    num_steps: int = 32
    """steps of a rollout in each environment"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over a rollout"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """how far the ratio of new to old probabilities may go from 1 before its gradient ends"""
    clip_vloss: bool = True
    """clip the change of the value in the same way"""
    ent_coef: float = 0.01
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
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs wandb: pip install -r requirements/wandb.txt")
    if args.capture_video and importlib.util.find_spec("moviepy") is None:
        fail("--capture-video needs moviepy: pip install -r requirements/video.txt")


def free_bytes(device: torch.device) -> int:
    """Memory that is free on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class CartPole(gym.vector.VectorEnv):
    """N environments CartPole-v1 as tensors on `device`, which reset in the step that ends them.

    Everything that `step` returns is a tensor there, infos included, and dense: `final_obs` is the
    observation before any reset, `episode` has return and length so far, `_final_obs` and
    `_episode` are the mask of those that ended. Nothing waits for the device.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    gravity, pole_mass, total_mass, half_length, force, tau = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
    x_limit, theta_limit, max_steps = 2.4, 12 * math.pi / 180, 500

    def __init__(self, num_envs: int, device: torch.device | str):
        self.num_envs, self.device = num_envs, torch.device(device)
        high = np.array([2 * self.x_limit, np.inf, 2 * self.theta_limit, np.inf], np.float32)
        self.single_observation_space = gym.spaces.Box(-high, high, dtype=np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space, self.action_space = (
            gym.vector.utils.batch_space(space, num_envs)
            for space in (self.single_observation_space, self.single_action_space)
        )
        self.generator = torch.Generator(device)
        self.state = torch.zeros(num_envs, 4, device=device)  # x, x', theta, theta'
        self.lengths = torch.zeros(num_envs, dtype=torch.int32, device=device)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Starts all episodes -> observations (N, 4), {}."""
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state.uniform_(-0.05, 0.05, generator=self.generator)
        self.lengths.zero_()
        return self.state.clone(), {}

    def step(self, actions: torch.Tensor) -> tuple:
        """Actions (N,) -> observations (N, 4), rewards, terminated, truncated, each (N,), infos."""
        final = self.dynamics(self.state, actions)
        self.lengths += 1
        x, _, theta, _ = final.unbind(1)
        terminated = (x.abs() > self.x_limit) | (theta.abs() > self.theta_limit)
        truncated = self.lengths >= self.max_steps
        ended, lengths = terminated | truncated, self.lengths.clone()
        fresh = torch.empty_like(final).uniform_(-0.05, 0.05, generator=self.generator)
        self.state = torch.where(ended[:, None], fresh, final)
        self.lengths.masked_fill_(ended, 0)
        infos = {"final_obs": final, "_final_obs": ended, "_episode": ended}
        infos["episode"] = {"r": lengths.float(), "l": lengths}  # each step is worth 1
        return self.state.clone(), torch.ones_like(x), terminated, truncated, infos

    def dynamics(self, state: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """States (N, 4), actions (N,) -> next states (N, 4), by Euler's method."""
        x, x_dot, theta, theta_dot = state.unbind(1)
        cos, sin = theta.cos(), theta.sin()
        moment = self.pole_mass * self.half_length
        force = self.force * (2 * actions - 1)
        push = (force + moment * theta_dot.square() * sin) / self.total_mass
        inertia = self.half_length * (4 / 3 - self.pole_mass * cos.square() / self.total_mass)
        theta_acc = (self.gravity * sin - cos * push) / inertia
        x_acc = push - moment * theta_acc * cos / self.total_mass
        changes = torch.stack([x_dot, x_acc, theta_dot, theta_acc], dim=1)
        return state + self.tau * changes

    def state_dict(self) -> dict:
        names = {"state": self.state, "lengths": self.lengths}
        return names | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.state.copy_(state["state"])
        self.lengths.copy_(state["lengths"])
        self.generator.set_state(state["generator"])


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


class ActorCritic(nn.Module):
    """Categorical policy and the value of a state, a network each."""

    def __init__(self, obs_dim: int, num_actions: int):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), gain=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, num_actions), gain=0.01),
        )

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs (..., O) -> log-probabilities of the actions (..., A), values (...)."""
        return F.log_softmax(self.actor(obs), dim=-1), self.critic(obs).squeeze(-1)


class Batch(NamedTuple):
    """B steps of a rollout; log_probs and values as they were when it was made."""

    obs: torch.Tensor  # (B, O)
    actions: torch.Tensor  # (B,) int64
    log_probs: torch.Tensor  # (B,), these and what follows float32
    values: torch.Tensor  # (B,)
    advantages: torch.Tensor  # (B,)
    returns: torch.Tensor  # (B,)


class Rollout:
    """T steps of N environments on `device`."""

    def __init__(self, steps: int, num_envs: int, obs_dim: int, device: torch.device):
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(steps, num_envs, *shape, dtype=dtype, device=device)

        self.obs, self.final_obs = empty(obs_dim), empty(obs_dim)  # what a step saw, and led to
        self.actions = empty(dtype=torch.int64)
        self.log_probs, self.values, self.rewards = empty(), empty(), empty()
        self.terminated, self.ended = empty(), empty()  # 1 where it did; `ended` by either kind
        self.returns_at_end = empty()  # return of the episode that ended, otherwise 0
        self.advantages, self.returns = empty(), empty()

    def batch(self) -> Batch:
        """All B = T N steps."""
        columns = self.log_probs, self.values, self.advantages, self.returns
        return Batch(*(column.flatten(0, 1) for column in (self.obs, self.actions, *columns)))


def sample(
    model: ActorCritic, obs: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """obs (N, O), exponential noise (N, A) -> actions (N,), log_probs (N,), values (N,).

    With probabilities p and exponential noise q, the largest p / q is a draw from p.
    """
    log_policy, values = model(obs)
    actions = (log_policy - noise.log()).argmax(dim=1)
    return actions, log_policy.gather(1, actions[:, None]).squeeze(1), values


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
    deltas = rewards + gamma * next_values - values
    advantages, advantage = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + gamma * gae_lambda * (1 - ended[t]) * advantage
        advantages[t] = advantage
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
    log_policy, values = model(batch.obs)
    log_ratios = log_policy.gather(1, batch.actions[:, None]).squeeze(1) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    of_policy = policy_loss(log_ratios, advantages, args.clip_coef)
    clip_coef = args.clip_coef if args.clip_vloss else None
    of_value = value_loss(values, batch.values, batch.returns, clip_coef)
    entropy = -(log_policy.exp() * log_policy).sum(dim=1).mean()
    loss = of_policy - args.ent_coef * entropy + args.vf_coef * of_value
    with torch.no_grad():
        ratios = log_ratios.exp()
        kl = -log_ratios.mean(), (ratios - 1 - log_ratios).mean()  # joschu.net/blog/kl-approx.html
        clipped = ((ratios - 1).abs() > args.clip_coef).float().mean()
        return loss, torch.stack([of_policy, of_value, entropy, *kl, clipped])


class PPO:
    """Network, optimizer and gradient steps, which return their metrics as one tensor."""

    def __init__(self, args: Args, obs_dim: int, num_actions: int, device: torch.device):
        self.args = args
        self.model = ActorCritic(obs_dim, num_actions).to(device)
        self.parameters = list(self.model.parameters())
        self.optimizer = Adam(self.parameters, lr=args.learning_rate, eps=1e-5, fused=True)

    def state_dict(self) -> dict:
        """Everything that updates change."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state["optimizer"]})

    def set_learning_rate(self, learning_rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = learning_rate

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """obs (N, O), exponential noise (N, A) -> actions (N,), log_probs (N,), values (N,)."""
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

    def update(self, batch: Batch) -> torch.Tensor:
        """One gradient step -> METRICS (6,)."""
        loss, metrics = ppo_loss(self.model, batch, self.args)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        self.optimizer.step()
        return metrics

    def learn(self, batch: Batch, permutations: torch.Tensor) -> torch.Tensor:
        """Epochs of minibatches in the order of permutations (E, B) -> the last METRICS (6,)."""
        for index in permutations.view(-1, permutations.shape[1] // self.args.num_minibatches):
            metrics = self.update(Batch(*(column[index] for column in batch)))
        return metrics


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
    """Mean return of K episodes of Gymnasium's environment, in which the likeliest action is taken.

    They start from the same K states every time. Training notices nothing: the environments are
    others and no shared random generator is used.
    """
    envs = make_envs(args.env_id, args.eval_episodes, video)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.reset(seed=args.seed + EVAL_SEED)
    while running.any():
        with torch.no_grad():
            actions = model.actor(torch.from_numpy(obs).to(device)).argmax(dim=1).cpu().numpy()
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
    envs = CartPole(args.num_envs, device)
    envs.action_space.seed(args.seed)
    obs_dim, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.n
    agent = PPO(args, obs_dim, num_actions, device)
    rollout = Rollout(args.num_steps, args.num_envs, obs_dim, device)
    batch = rollout.batch()

    kind = {"script": SCRIPT, "env_id": args.env_id, "num_envs": args.num_envs}
    envs.reset(seed=args.seed)
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
            shape = args.num_steps, args.num_envs, num_actions
            noise = torch.empty(shape, device=device).exponential_()
            obs = envs.state.clone()
            for t in range(args.num_steps):
                with watch.stage("inference"):
                    actions, log_probs, values = agent.act(obs, noise[t])
                with watch.stage("replay"):
                    rollout.obs[t], rollout.actions[t] = obs, actions
                    rollout.log_probs[t], rollout.values[t] = log_probs, values
                with watch.stage("simulation"):
                    obs, rewards, terminated, _, infos = envs.step(actions)

                # Where an episode ended, obs is already the next episode's first.
                with watch.stage("replay"):
                    rollout.rewards[t], rollout.final_obs[t] = rewards, infos["final_obs"]
                    rollout.terminated[t], rollout.ended[t] = terminated, infos["_final_obs"]
                    rollout.returns_at_end[t] = infos["episode"]["r"] * infos["_episode"]
            global_step += batch_size

            # 2. Learn from it in several epochs; with --target-kl, look after each.
            with watch.stage("backpropagation"):
                agent.prepare(rollout)
                orders = [
                    torch.randperm(batch_size, device=device) for _ in range(args.update_epochs)
                ]
                at_once = args.update_epochs if args.target_kl is None else 1
                for epochs in torch.stack(orders).split(at_once):
                    metrics = agent.learn(batch, epochs)
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
                if episodes:
                    episodic_return = rollout.returns_at_end.sum().item() / episodes
                    writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                    # each step is worth 1
                    writer.add_scalar("charts/episodic_length", episodic_return, global_step)
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
