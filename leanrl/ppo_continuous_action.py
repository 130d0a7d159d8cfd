"""Proximal Policy Optimization (PPO) for continuous actions, in plain eager PyTorch: the baseline.

    python leanrl/ppo_continuous_action.py                          # HalfCheetah-v5, 1 M steps
    python leanrl/ppo_continuous_action.py --env-id InvertedPendulum-v5 --total-timesteps 100000
    python leanrl/ppo_continuous_action.py --num-envs 8 --num-steps 256   # the same batch of 2,048
    python leanrl/ppo_continuous_action.py --checkpoint-every 100000 --eval-every 100000
    python leanrl/ppo_continuous_action.py --resume runs/RUN        # go on from its checkpoint.pt
    python leanrl/ppo_continuous_action.py --help                   # every flag

Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv:1707.06347), with CleanRL's
defaults: rollouts of 2,048 steps, generalized advantage estimation (arXiv:1506.02438), 10 epochs of
32 minibatches, clipped value loss, annealed learning rate, observations and rewards normalized by
running statistics, one set per environment. Other than in CleanRL, a truncated episode bootstraps
from the value of its final observation; a terminated one does not bootstrap.

Its twin ppo_continuous_action_torchcompile.py is this file with the hunks marked `# speed:`, so
`diff` shows what each trick costs in code.

Measured (plots/results/): 1,210 steps/s on 2 cores of an AMD EPYC (AVX2), where Stable-Baselines3
makes 931. On a GPU: not measured.

Shapes: T steps of a rollout, N environments, B batch, O observation, A action. A run writes
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
        envs = gym.vector.SyncVectorEnv(
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

        self.obs, self.actions = empty(obs_dim), empty(action_dim)
        self.log_probs, self.values, self.rewards = empty(), empty(), empty()
        self.ended = empty()  # 1 where the step ended an episode, of either kind
        self.final_values = empty()  # of the final observation of a truncated episode; otherwise 0


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


class PPO:
    """Network, optimizer and gradient steps, which return their metrics as one tensor."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        self.args = args
        self.model = ActorCritic(obs_dim, action_dim).to(device)
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
        """obs (N, O), normal noise (N, A) -> actions (N, A), log_probs (N,), values (N,)."""
        with torch.no_grad():
            mean, log_std, values = self.model(obs)
            actions = mean + log_std.exp() * noise
            return actions, gaussian_log_prob(actions, mean, log_std), values

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        """obs (N, O) -> values (N,)."""
        with torch.no_grad():
            return self.model(obs)[2]

    def prepare(self, rollout: Rollout, next_values: torch.Tensor) -> Batch:
        """A rollout and the values of what follows it (N,) -> B = T N steps to learn from."""
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
            columns = (rollout.log_probs, rollout.values, advantages, advantages + rollout.values)
            columns = rollout.obs, rollout.actions, *columns
            return Batch(*(column.flatten(0, 1) for column in columns))

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

    envs = make_envs(args.env_id, args.num_envs)
    envs.action_space.seed(args.seed)
    low, high = envs.single_action_space.low, envs.single_action_space.high
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    normalizer = Normalizer(args.num_envs, obs_dim, args.gamma)
    rollout = Rollout(args.num_steps, args.num_envs, obs_dim, action_dim, device)

    kind = {"script": SCRIPT, "env_id": args.env_id, "obs_dim": obs_dim, "action_dim": action_dim}
    kind |= {"num_envs": args.num_envs}
    raw_obs, _ = envs.reset(seed=args.seed)
    global_step, episodic_return = start_step, None
    if checkpoint:
        for name, mine in kind.items():
            if checkpoint[name] != mine:
                fail(f"{args.resume} has {name} {checkpoint[name]}, this run has {mine}")
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as error:  # networks of another shape: it names both
            fail(f"{args.resume}: {' '.join(str(error).split())}")
        normalizer.load_state_dict(checkpoint["normalizer"])
        raw_obs = repeat_episodes(envs, checkpoint, args.seed + start_step)
        obs = checkpoint["normalized_obs"].numpy()
        fresh = (raw_obs != checkpoint["obs"].numpy()).any(axis=1)
        obs[fresh] = normalizer.observe(raw_obs[fresh], fresh)
        set_rng_states(checkpoint["rng"], envs.action_space, device)
    else:
        obs = normalizer.observe(raw_obs)

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
            "normalizer": normalizer.state_dict(),
            "envs": [env.state_dict() for env in envs.envs],
            "obs": torch.from_numpy(raw_obs),
            "normalized_obs": torch.from_numpy(obs),
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
            for t in range(args.num_steps):
                with watch.stage("inference"):
                    obs_tensor = torch.from_numpy(obs).to(device, non_blocking=True)
                    actions, log_probs, values = agent.act(obs_tensor, noise[t])
                    clipped = np.clip(actions.cpu().numpy(), low, high)
                with watch.stage("simulation"):
                    next_obs, rewards, terminated, truncated, infos = envs.step(clipped)

                # Where an episode ended, next_obs is already the next episode's first.
                with watch.stage("replay"):
                    ended, last_obs = terminated | truncated, next_obs
                    if "final_obs" in infos:
                        last_obs = next_obs.copy()
                        for i in np.flatnonzero(ended):
                            last_obs[i] = infos["final_obs"][i]
                    rollout.obs[t], rollout.actions[t] = obs_tensor, actions
                    rollout.log_probs[t], rollout.values[t] = log_probs, values
                    rewards = normalizer.reward(rewards, terminated)
                    rollout.rewards[t] = torch.as_tensor(rewards, dtype=torch.float32)
                    rollout.ended[t] = torch.as_tensor(ended)
                    raw_obs, obs = next_obs, normalizer.observe(last_obs)
                    if ended.any():
                        final_values = agent.value(torch.from_numpy(obs).to(device))
                        only_truncated = torch.as_tensor(~terminated & truncated).to(device)
                        rollout.final_values[t] = final_values * only_truncated
                        obs[ended] = normalizer.observe(next_obs[ended], ended)
                global_step += args.num_envs

                with watch.stage("logging"):
                    if "final_info" in infos:
                        episode = infos["final_info"]["episode"]
                        for i in np.flatnonzero(infos["_final_info"]):
                            episodic_return, length = float(episode["r"][i]), int(episode["l"][i])
                            writer.add_scalar(
                                "charts/episodic_return", episodic_return, global_step
                            )
                            writer.add_scalar("charts/episodic_length", length, global_step)

            # 2. Learn from it in several epochs; with --target-kl, look after each.
            with watch.stage("backpropagation"):
                batch = agent.prepare(rollout, agent.value(torch.from_numpy(obs).to(device)))
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
                    eval_return = evaluate(agent.model, normalizer, args, device, video)
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
