"""Proximal Policy Optimization (PPO) for Atari on EnvPool, with torch.compile and CUDA graphs.

    python leanrl/ppo_atari_envpool_torchcompile.py --compile --cudagraphs
    python leanrl/ppo_atari_envpool_torchcompile.py --compile --bf16 --overlap --env-id Pong-v5
    python leanrl/ppo_atari_envpool_torchcompile.py --help          # every flag

The algorithm is that of its twin, ppo_atari_envpool.py, which says where it comes from and what the
shapes mean; the hunks that differ start with `# speed:` and say what they buy, the rest is the same
to the letter. Without a CUDA device --cudagraphs says so in one line and the run goes on. The first
rollouts pay for compilation: seconds, reported as warm-up, fewer with a warm cache.

Measured (plots/results/): Pong-v5, 952,000 steps, seed 1: mean score -5.6 over the last 10 games,
from -20.4. 326 steps/s with --compile --channels-last on 2 cores of an AMD EPYC (AVX2), 1.25 times
the baseline. --overlap adds nothing there, where games and network share the cores, and --bf16
needs a processor that has it. On a GPU: not measured.
"""

# speed: CudaGraphModule captures a function as a CUDA graph; partial binds its fixed arguments
import difflib
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
    """replay acting, the advantages and all epochs as CUDA graphs"""
    bf16: bool = False
    """compute the network in bfloat16; weights, losses and optimizer stay float32"""
    channels_last: bool = False
    """keep images and convolutions in the order height, width, channel"""
    overlap: bool = False
    """let one half of the environments play on while the policy looks at the other half"""

    env_id: str = "Breakout-v5"
    """id of the game in EnvPool"""
    total_timesteps: int = 10_000_000
    """environment steps of the whole run, over all environments; rounded down to whole rollouts"""
    learning_rate: float = 2.5e-4
    """learning rate of the optimizer, at first"""
    anneal_lr: bool = True
    """lower the learning rate from rollout to rollout, linearly to zero at the end of the run"""
    num_envs: int = 8
    """environments stepped side by side"""
    num_steps: int = 128
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
    clip_coef: float = 0.1
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
    if importlib.util.find_spec("envpool") is None:
        fail("Atari needs EnvPool: pip install -r requirements/envpool.txt")
    if args.num_envs > CROWD * (os.cpu_count() or 1):
        print(
            f"hint: {args.num_envs} environments share {os.cpu_count()} CPU cores: "
            f"more than {CROWD} per core make a rollout larger rather than faster",
            file=sys.stderr,
        )
    # speed: no graphs without CUDA: a contradiction is refused, a missing device only mentioned
    if args.cudagraphs and not args.cuda:
        fail("--cudagraphs contradicts --no-cuda")
    if args.cudagraphs and not torch.cuda.is_available():
        print("warning: no CUDA device, --cudagraphs has no effect", file=sys.stderr)
    on_cpu = not args.cuda or not torch.cuda.is_available()
    if args.bf16 and on_cpu and not torch.cpu.get_capabilities().get("avx512_bf16", False):
        print("warning: this CPU has no bfloat16 arithmetic, --bf16 makes it slow", file=sys.stderr)
    if args.overlap and args.num_envs % 2:
        fail(f"--overlap needs an even number of environments, got --num-envs {args.num_envs}")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs wandb: pip install -r requirements/wandb.txt")
    if args.capture_video and importlib.util.find_spec("moviepy") is None:
        fail("--capture-video needs moviepy: pip install -r requirements/video.txt")


class AtariEnvs:
    """N games on EnvPool, each of which resets in the step that ends its episode (`SAME_STEP`).

    EnvPool by itself resets in the step after, whose action and reward count for nothing. Here the
    games that ended take that step at once, so that a rollout holds none of them.
    """

    def __init__(self, env_id: str, num_envs: int, seed: int, **options):
        import envpool
        from envpool.registration import registry

        games = [name for name, (path, *_) in registry.specs.items() if path == "envpool.atari"]
        if env_id not in games:
            near = difflib.get_close_matches(env_id, games, 3, cutoff=0.4) or ["Breakout-v5"]
            fail(f"EnvPool has no Atari game {env_id!r}; the nearest: {', '.join(near)}")
        self.envs = envpool.make_gymnasium(env_id, num_envs=num_envs, seed=seed, **options)
        self.action_space = self.envs.action_space
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, dtype=int)

    def reset(self) -> np.ndarray:
        """Starts all games -> observations (N, O)."""
        return self.envs.reset()[0]

    # speed: in two parts, so that the games go on while somebody else computes
    def send(self, actions: np.ndarray) -> None:
        """The first half of `step`: starts it."""
        self.envs.send(actions)

    def step(self, actions: np.ndarray) -> tuple:
        """Actions (N,) -> observations (N, O), rewards, terminated, truncated, each (N,), infos.

        infos has, where an episode ended, `final_obs` (N, O), the observations before the resets,
        and where whole games did, the arrays `over`, which, `returns`, their scores, and `lengths`,
        in steps.
        """
        # speed: in two parts
        self.send(actions)
        return self.recv()

    def recv(self) -> tuple:
        """The second half of `step`: waits for its end."""
        obs, rewards, terminated, truncated, step_infos = self.envs.recv()
        over = step_infos["terminated"] == 1  # the game, not only a life
        truncated &= ~over
        ended, infos = terminated | truncated | over, {}
        self.returns += step_infos["reward"]  # not clipped
        self.lengths += 1
        if ended.any():
            infos["final_obs"], obs = obs, obs.copy()
            index = np.flatnonzero(ended)
            obs[index] = self.envs.step(np.zeros(len(index), dtype=int), index)[0]
            whole = over | truncated
            if whole.any():
                infos["over"] = np.flatnonzero(whole)
                infos["returns"], infos["lengths"] = self.returns[whole], self.lengths[whole]
                self.returns[whole] = self.lengths[whole] = 0
        return obs, rewards, ended & ~truncated, truncated, infos

    def close(self) -> None:
        self.envs.close()


# speed: what `main` knows of a pool of games that takes turns with another one
@dataclass
class Group:
    """Environments that act together, their rows of a rollout and what they show."""

    envs: AtariEnvs
    rows: slice
    obs: np.ndarray | None = None


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
    """Categorical policy and the value of a state, on the features of one network."""

    # speed: how to compute
    def __init__(self, num_actions: int, bf16: bool = False, channels_last: bool = False):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, kernel_size=8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, kernel_size=4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, kernel_size=3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)
        # speed: convolutions are faster in bfloat16 and, for some libraries, with channels last
        self.bf16 = bf16
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=self.layout)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs (B, O) uint8 -> log-probabilities of the actions (B, A), values (B,)."""
        # speed: the network alone in bfloat16
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            features = self.network((obs / 255.0).contiguous(memory_format=self.layout))
            logits, values = self.actor(features), self.critic(features).squeeze(-1)
        dtype = self.actor.weight.dtype
        return F.log_softmax(logits.to(dtype), dim=-1), values.to(dtype)


class Batch(NamedTuple):
    """B steps of a rollout; log_probs and values as they were when it was made."""

    obs: torch.Tensor  # (B, O) uint8
    actions: torch.Tensor  # (B,) int64
    log_probs: torch.Tensor  # (B,), these and what follows float32
    values: torch.Tensor  # (B,)
    advantages: torch.Tensor  # (B,)
    returns: torch.Tensor  # (B,)


class Rollout:
    """T steps of N environments on `device`, where observations stay uint8."""

    def __init__(self, steps: int, num_envs: int, device: torch.device):
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(steps, num_envs, *shape, dtype=dtype, device=device)

        self.obs = empty(*OBS_SHAPE, dtype=torch.uint8)
        self.actions = empty(dtype=torch.int64)
        # speed: the last three are filled by NumPy on the CPU and copied to the device once
        self.log_probs, self.values = empty(), empty()
        pinned = device.type == "cuda"
        self.source = torch.zeros(3, steps, num_envs, pin_memory=pinned)
        self.outcome = self.source.to(device)
        self.rewards, self.ended, self.final_values = self.outcome
        self.host_rewards, self.host_ended, self.host_final_values = self.source.numpy()
        self.advantages, self.returns = empty(), empty()
        shape = num_envs, *OBS_SHAPE
        self.new_obs = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")

    # speed: of the environments in `rows`
    def store_obs(self, t: int, rows: slice, obs: np.ndarray) -> torch.Tensor:
        """Brings obs (n, O), those of step t, to the device in one copy, for which nobody waits."""
        # speed: as above
        new_obs = self.new_obs[rows].copy_(torch.from_numpy(obs))
        return self.obs[t, rows].copy_(new_obs, non_blocking=True)

    # speed: one copy per rollout
    def upload(self) -> None:
        """Brings rewards, ends and final values to the device."""
        self.outcome.copy_(self.source, non_blocking=True)

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

    def __init__(self, args: Args, num_actions: int, device: torch.device):
        self.args = args
        # speed: how to compute
        self.model = ActorCritic(num_actions, args.bf16, args.channels_last).to(device)
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
        """obs (N, O), exponential noise (N, A) -> actions (N,), log_probs (N,), values (N,)."""
        with torch.no_grad():
            return sample(self.model, obs, noise)

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        """obs (N, O) -> values (N,)."""
        with torch.no_grad():
            return self.model(obs)[1]

    def prepare(self, rollout: Rollout, next_values: torch.Tensor) -> None:
        """Advantages and returns of a rollout, from the values of what follows it (N,)."""
        with torch.no_grad():
            following = torch.cat([rollout.values[1:], next_values[None]])
            following = torch.where(rollout.ended.bool(), rollout.final_values, following)
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

    # speed: gathers its rows itself, so that the conversion to floating point is part of the gather
    def update(self, batch: Batch, index: torch.Tensor) -> torch.Tensor:
        """One gradient step on the rows in index (B,) -> METRICS (6,)."""
        # speed: gradients as values, not as .grad: nothing that the compiler cannot see
        minibatch = Batch(*(column.index_select(0, index) for column in batch))
        loss, metrics = ppo_loss(self.model, minibatch, self.args)
        gradients = torch.autograd.grad(loss, self.parameters)
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


# speed: whatever runs on the device; `learn` calls the compiled update without unrolling
def compile_agent(agent: PPO) -> None:
    """Compiles acting, the advantages and the update to one graph each."""
    torch._dynamo.config.trace_autograd_ops = True
    # in torch 2.11 this pass moves a backward product behind the update of the weights it reads
    torch._inductor.config.reorder_for_locality = False
    agent.act = torch.compile(agent.act, fullgraph=True)
    agent.prepare = torch.compile(agent.prepare, fullgraph=True)
    agent.update = torch.compile(agent.update, fullgraph=True)


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
    """Mean score of K whole games, side by side, in which the policy draws its actions.

    They are the same K games every time, but for what the policy does. Training notices nothing:
    the environments are new and no shared random generator is used. The first one becomes the
    file `video`, if that is given.
    """
    options = {} if video is None else {"render_mode": "rgb_array"}
    envs = AtariEnvs(args.env_id, args.eval_episodes, args.seed + EVAL_SEED, **options)
    generator, frames = np.random.default_rng(args.seed + EVAL_SEED), []
    scores, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs = envs.reset()
    while running.any():
        if video is not None and running[0]:
            frames.append(envs.envs.render(env_ids=0)[0])
        noise = generator.exponential(size=(args.eval_episodes, envs.action_space.n))
        noise = torch.from_numpy(noise.astype(np.float32)).to(device)
        with torch.no_grad():
            actions, _, _ = sample(model, torch.from_numpy(obs).to(device), noise)
        obs, _, _, _, infos = envs.step(actions.cpu().numpy())
        for i, score in zip(infos.get("over", ()), infos.get("returns", ()), strict=True):
            if running[i]:
                scores[i], running[i] = score, False
    envs.close()
    if video is not None:
        film(frames, video)
    return float(scores.mean())


def film(frames: list[np.ndarray], path: Path) -> None:
    """Writes RGB frames (H, W, 3), one per step of 4 at 60 Hz, as mp4; failing costs the video."""
    try:
        from moviepy.video.io.ImageSequenceClip import ImageSequenceClip

        path.parent.mkdir(exist_ok=True)
        ImageSequenceClip(frames, fps=15).write_videofile(str(path), logger=None)
    except Exception as error:  # of whatever kind: the encoder is a program of its own
        reason = " ".join(str(error).split())
        print(f"warning: no video of {len(frames)} frames: {reason}", file=sys.stderr)


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
OBS_SHAPE = (4, 84, 84)  # frames, height, width
CROWD = 16  # environments per CPU core, above which a hint says what more are good for
EVAL_SEED = 1_000_000_000  # added to --seed: evaluation plays games that training does not
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

    # EnvPool cannot return to a moment of a game: a resumed run starts new ones
    seed = args.seed + start_step
    # speed: one group, or two that take turns; game i has seed + i in either case
    size, groups = args.num_envs // (1 + args.overlap), []
    for first in range(0, args.num_envs, size):
        envs = AtariEnvs(args.env_id, size, seed + first, episodic_life=True, reward_clip=True)
        groups.append(Group(envs, rows=slice(first, first + size)))
    envs.action_space.seed(args.seed)
    num_actions = int(envs.action_space.n)
    agent = PPO(args, num_actions, device)
    rollout = Rollout(args.num_steps, args.num_envs, device)
    batch = rollout.batch()

    # speed: all compilation and capture is set up here; the loop below does not know of it. Each
    # function compiles when it is first called, and a graph is captured on its third call
    if args.compile:
        compile_agent(agent)
    prepare, learn = partial(agent.prepare, rollout), partial(agent.learn, batch)
    if args.cudagraphs and device.type == "cuda":
        agent.act = CudaGraphModule(agent.act, warmup=3)
        prepare, learn = (CudaGraphModule(each, warmup=3) for each in (prepare, learn))

    kind = {"script": SCRIPT, "env_id": args.env_id, "num_actions": num_actions}
    kind |= {"num_envs": args.num_envs}
    # speed: of each group
    for group in groups:
        group.obs = group.envs.reset()
    global_step, episodic_return = start_step, None
    if checkpoint:
        for name, mine in kind.items():
            if checkpoint[name] != mine:
                fail(f"{args.resume} has {name} {checkpoint[name]}, this run has {mine}")
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as error:  # networks of another shape: it names both
            fail(f"{args.resume}: {' '.join(str(error).split())}")
        set_rng_states(checkpoint["rng"], envs.action_space, device)
        print(f"resumed at step {start_step:,} with new games: EnvPool keeps none", file=sys.stderr)

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = resumed_dir(args) if args.resume else Path("runs", run_name.replace("/", "_"))
    run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
    suffix = f"_{start_step}.json" if args.resume else ".json"  # what the run began with stays
    config = run_config(args, device)
    (run_dir / f"config{suffix}").write_text(json.dumps(config, indent=2))
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
            # speed: one group's games go on, between `send` and `recv`, while the policy looks at
            # the other's; with one group this is the loop of the baseline
            rollout.host_final_values[:] = 0
            turns = [(t, group) for t in range(args.num_steps) for group in groups]
            lag = [None] * (len(groups) - 1)
            for acting, receiving in zip(turns + lag, lag + turns, strict=True):
                if acting is not None:
                    t, group = acting
                    with watch.stage("inference"):
                        obs = rollout.store_obs(t, group.rows, group.obs)
                        actions, log_probs, values = agent.act(obs, noise[t, group.rows])
                        chosen = actions.cpu().numpy()
                    with watch.stage("simulation"):
                        group.envs.send(chosen)
                    with watch.stage("replay"):
                        rollout.actions[t, group.rows] = actions
                        rollout.log_probs[t, group.rows] = log_probs
                        rollout.values[t, group.rows] = values
                if receiving is None:
                    continue
                t, group = receiving
                with watch.stage("simulation"):
                    # speed: of the group that has played on since the last turn
                    group.obs, rewards, terminated, truncated, infos = group.envs.recv()

                # Where an episode ended, the observation is already the next episode's first.
                with watch.stage("replay"):
                    # speed: by NumPy, to the device later
                    rollout.host_rewards[t, group.rows] = rewards
                    rollout.host_ended[t, group.rows] = terminated | truncated
                    if truncated.any():
                        index = np.flatnonzero(truncated)
                        final_obs = torch.from_numpy(infos["final_obs"][index]).to(device)
                        # speed: by NumPy
                        final_values = agent.value(final_obs).cpu().numpy()
                        rollout.host_final_values[t, group.rows][index] = final_values
                global_step += len(rewards)

                with watch.stage("logging"):
                    for score, length in zip(
                        infos.get("returns", ()), infos.get("lengths", ()), strict=True
                    ):
                        episodic_return = float(score)
                        writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                        writer.add_scalar("charts/episodic_length", int(length), global_step)

            # 2. Learn from it in several epochs; with --target-kl, look after each.
            with watch.stage("backpropagation"):
                # speed: the one copy to the device
                rollout.upload()
                obs = np.concatenate([group.obs for group in groups])
                prepare(agent.value(torch.from_numpy(obs).to(device)))
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
                shown = f"{steady_sps or sps:,.0f} steps/s"
                if episodic_return is not None:
                    shown += f", return {episodic_return:,.1f}"
                bar.set_postfix_str(shown, refresh=False)
                bar.update(global_step - bar.n)

            # 4. Evaluate and save, now and then and at the end.
            last = global_step >= total_timesteps
            if due(args.eval_every) or last and (args.eval_every or args.capture_video):
                with watch.stage("evaluation"):
                    video = run_dir / "videos" / f"step-{global_step}.mp4"
                    video = video if args.capture_video else None
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
        # speed: each group's
        for group in groups:
            group.envs.close()
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
