"""PPO for continuous actions in processes of their own, with torch.compile and CUDA graphs.

    python leanrl/ppo_continuous_action_async_torchcompile.py --compile --cudagraphs

The algorithm is that of its twin, ppo_continuous_action_async.py, which says what acting and
learning at the same time needs; the hunks that differ start with `# speed:` and say what they buy,
the rest is the same to the letter. The first rollouts pay for compilation, reported as warm-up.
"""

# speed: CudaGraphModule captures a function as a CUDA graph; partial binds its fixed arguments
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType, MethodType
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tqdm
import tyro
from gymnasium.spaces import Box
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run directory's name
    seed: int = 1  # seed of the environments and of every random generator
    torch_deterministic: bool = True  # use deterministic cuDNN kernels
    cuda: bool = True  # train on CUDA where there is a device
    track: bool = False  # also send the run to Weights & Biases
    wandb_project_name: str = "leanRL"  # the wandb project
    wandb_entity: str | None = None  # the wandb team
    capture_video: bool = False  # film an episode of each evaluation; there is one at the end
    save_model: bool = False  # write checkpoint.pt at the end of the run, unless it is interrupted
    checkpoint_every: int = 0  # also write it every so many environment steps; 0: never
    resume: str | None = None  # go on with this run directory; flags that are not given stay
    eval_every: int = 0  # evaluate every so many environment steps, and at the end; 0: never
    eval_episodes: int = 10  # episodes per evaluation, each in an environment of its own
    stopwatch: Literal["off", "time", "trace"] = "time"  # time stages, or also write a trace

    learner_device: str | None = None  # where the network learns, if --cuda is not to decide
    collector_device: str = "cpu"  # where its copy acts: cpu, cuda or cuda:N
    eval_device: str = "cpu"  # where another copy is evaluated
    sync: bool = False  # act and learn in turns, as ppo_continuous_action.py does
    max_staleness: int = 1  # how many updates the weights that act are behind those that learn

    env_id: str = "HalfCheetah-v5"  # id of the Gymnasium environment
    total_timesteps: int = 1_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 1  # environments stepped side by side
    num_steps: int = 2048  # steps of a rollout in each environment
    learning_rate: float = 3e-4  # learning rate of the optimizer, at first
    anneal_lr: bool = True  # lower it from rollout to rollout, linearly to zero at the end
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # passes over a rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the ratio of new to old probabilities may go from 1
    clip_vloss: bool = True  # clip the change of the value in the same way
    ent_coef: float = 0.0  # weight of the entropy in the loss
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it
    target_kl: float | None = None  # end the epochs at such a KL divergence from the old policy

    # speed: each works alone, together and not at all
    compile: bool = False  # compile the update with torch.compile
    cudagraphs: bool = False  # replay the preparation of a rollout and an epoch as CUDA graphs


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
        """Writes the report to `path`, prints a table, writes a trace beside it -> the report."""
        self.course.close()  # gives up a trace that is not complete
        trace = self.trace and {**self.trace, "file": path.name.replace("stages", "trace") + ".gz"}
        report = (self.result or self._end_window()) | {"mode": self.mode, "trace": trace}
        report["wall_seconds"] = perf_counter() - self.born
        report["sps_inclusive"] = self.env_steps / report["wall_seconds"]
        path.write_text(json.dumps(report, indent=2))
        steps = report["window"]["env_steps"] / 1e6 or float("nan")  # nothing is per step of none
        lines = [f"{'stage':16}{'seconds':>12}{'us/step':>12}{'GPU us/step':>14}"]
        for name, stage in report["stages"].items():
            seconds, span = stage["seconds"], stage["gpu_span_seconds"]
            gpu = "" if span is None else f"{span / steps:14,.1f}"
            lines.append(f"{name:16}{seconds:12,.2f}{seconds / steps:12,.1f}{gpu}")
        numbers = (report | report["gpu"]).items()
        lines += [f"{name:16}{x:12,.1f}" for name, x in numbers if isinstance(x, float)]
        print(*lines, f"run directory: {path.parent}", sep="\n", file=sys.stderr)
        if trace:  # last, because it takes seconds, in which Ctrl-C may come
            self.profiler.export_chrome_trace(str(path.with_name(trace["file"])))
        return report

    def _course(self, warmup_steps, trace_after, trace_iterations):
        """What a run goes through, a `yield` per tick: warm-up, steady window, perhaps a trace."""
        while self.env_steps < warmup_steps:
            yield
        self.warmup_seconds = perf_counter() - self.born - self.evaluation.seconds
        self._begin_window()
        while self.mode != "trace" or self.untracked.count < trace_after:
            sampled = self.on_gpu and self.mode != "off" and self.untracked.count % 61 == 0
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


SCRIPT = Path(__file__).name
METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
KL = METRICS.index("approx_kl")
STATISTICS = [(rms, x) for rms in ("obs_rms", "return_rms") for x in ("mean", "var", "count")]
STEADY_AFTER = 3  # rollouts, then all is compiled and captured


def check_args(args: Args) -> None:
    """What a user gets wrong, in one line each; libraries' own errors say the rest."""
    may_be_zero = ("seed", "checkpoint_every", "eval_every", "learning_rate", "gamma", "gae_lambda")
    may_be_zero += ("ent_coef", "vf_coef", "max_staleness")
    for name, x in asdict(args).items():
        if type(x) in (int, float) and not (0 < x < 1e12 or x == 0 and name in may_be_zero):
            raise SystemExit(f"--{name.replace('_', '-')}: {x} is out of range")
    rollout = args.num_envs * args.num_steps
    if args.total_timesteps < rollout:
        raise SystemExit(f"--total-timesteps: less than one rollout of {rollout:,} steps")
    if rollout % args.num_minibatches or rollout == args.num_minibatches:
        raise SystemExit(f"--num-minibatches: does not divide {rollout:,} steps into two or more")
    count = torch.cuda.device_count()
    devices = ["cpu", *["cuda"][:count], *(f"cuda:{i}" for i in range(count))]
    for name in ("learner_device", "collector_device", "eval_device"):
        if getattr(args, name) not in (None, *devices):
            raise SystemExit(f"--{name.replace('_', '-')}: this machine has {', '.join(devices)}")
    # speed: no graphs without CUDA: a contradiction is refused, a missing device only mentioned
    if args.cudagraphs and not args.cuda:
        raise SystemExit("--cudagraphs: contradicts --no-cuda")
    if args.cudagraphs and not torch.cuda.is_available():
        print("--cudagraphs: no CUDA device, it has no effect", file=sys.stderr)


def use_device(name: str) -> torch.device:
    """The device of that name, as this process's current one: the others cost it no memory."""
    if name.startswith("cuda"):
        torch.cuda.set_device(torch.device(name).index or 0)
    return torch.device(name)


# speed: normalizes all environments at once, and spares copies and infos that nobody reads
class NormalizedVectorEnv(gym.vector.VectorEnv):
    """N environments that reset in the step that ends an episode; infos are about its end."""

    def __init__(self, envs: list[gym.Env], gamma: float):
        self.envs, self.num_envs, self.gamma = envs, len(envs), gamma
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space
        # observations and, last, the discounted reward: (N, O + 1); their means, variances, counts
        self.x = np.zeros((len(envs), envs[0].observation_space.shape[0] + 1))
        self.rms = np.zeros_like(self.x), np.ones_like(self.x), np.full_like(self.x, 1e-4)
        views = *(rms[:, :-1] for rms in self.rms), *(rms[:, -1] for rms in self.rms)
        self.statistics = {f"{x}_{y}": z for (x, y), z in zip(STATISTICS, views, strict=True)}
        self.statistics["discounted_reward"] = self.x[:, -1]

    def center(self, x: np.ndarray, rms: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Takes x into means, variances, counts, each (...) -> x - means, deviations (...)."""
        mean, var, count = rms
        count += 1
        delta = x - mean
        mean += delta / count
        centered = x - mean
        var += (delta * centered - var) / count
        return centered, np.sqrt(var + 1e-8)

    def start(self, i: int, seed: int | None = None) -> np.ndarray:
        """Begins an episode of environment i -> its first observation, normalized (O,)."""
        x, std = self.center(self.envs[i].reset(seed=seed)[0], [rms[i, :-1] for rms in self.rms])
        return (x / std).clip(-10, 10)

    def reset(self, *, seed: int, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.float32([self.start(i, seed + i) for i in range(self.num_envs)]), {}

    def step(self, actions: np.ndarray) -> tuple:
        rewards, terminated = np.zeros(self.num_envs), np.zeros(self.num_envs, dtype=bool)
        truncated, infos, ended = np.zeros_like(terminated), {}, {}
        for i, env in enumerate(self.envs):
            self.x[i, :-1], rewards[i], terminated[i], truncated[i], info = env.step(actions[i])
            self.x[i, -1] = self.gamma * self.x[i, -1] * (not terminated[i]) + rewards[i]
            if terminated[i] or truncated[i]:
                ended[i] = info["episode"]
        x, std = self.center(self.x, self.rms)
        x[:, -1] = rewards  # divided by the deviation of their discounted sum
        x = np.float32(np.minimum(np.maximum(x / std, -10), 10))  # clip takes longer
        obs, rewards = x[:, :-1], x[:, -1]
        if ended:
            episode = {key: {i: ended[i][key] for i in ended} for key in ("r", "l")}
            infos = {"final_obs": obs.copy(), "final_info": {"episode": episode}}
            obs[list(ended)] = [self.start(i) for i in ended]
        return obs, rewards, terminated, truncated, infos


def make_envs(
    env_id: str, num_envs: int, gamma: float | None = None, video: Path | None = None
) -> gym.vector.VectorEnv:
    """N environments that reset in the step that ends an episode; `video` films the first one."""

    def make_env(index: int) -> gym.Env:
        films = video is not None and index == 0
        env = gym.make(env_id, render_mode="rgb_array") if films else gym.make(env_id)
        if not isinstance(env.action_space, Box) or len(env.observation_space.shape or ()) != 1:
            raise SystemExit("--env-id: PPO needs flat observations and continuous actions")
        if films:
            env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        env = gym.wrappers.ClipAction(gym.wrappers.RecordEpisodeStatistics(env))
        # speed: the class above normalizes
        return env

    makers = [lambda i=i: make_env(i) for i in range(num_envs)]
    # speed: for training
    if gamma is not None:
        return NormalizedVectorEnv([make() for make in makers], gamma)
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def get_statistics(envs: gym.vector.VectorEnv) -> dict[str, Tensor]:
    """What normalization has learned, a row per environment: for checkpoints and evaluation."""
    # speed: the arrays of all environments
    return {name: torch.tensor(rows) for name, rows in envs.statistics.items()}


def set_statistics(envs: gym.vector.VectorEnv, statistics: dict[str, Tensor]) -> None:
    """Puts back what `get_statistics` has returned."""
    # speed: into the arrays of all environments
    for name, rows in envs.statistics.items():
        rows[:] = statistics[name]


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64; weights are orthogonal at first, `gain` scales the last layer's."""
    layers = nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
    for layer, scale in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class ActorCritic(nn.Module):
    """Gaussian policy, whose deviation does not depend on the state, and the value of a state."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.critic = mlp(obs_dim, 1, gain=1.0)
        self.actor_mean = mlp(obs_dim, action_dim, gain=0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """obs (B, O) -> mean of the actions (B, A), their log deviation (A,), values (B,)."""
        return self.actor_mean(obs), self.actor_logstd, self.critic(obs).squeeze(-1)


class Batch(NamedTuple):
    """B steps of a rollout, float32; log_probs and values are those from which learning departs."""

    obs: Tensor  # (B, O)
    actions: Tensor  # (B, A)
    log_probs: Tensor  # (B,)
    values: Tensor  # (B,)
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,)
    importance: Tensor  # (B,) how much likelier the actions are than where they were drawn


class Rollout:
    """T steps of N environments on `device`: (T + 1, N, O), (T, N, A) and otherwise (T, N)."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        shape = args.num_steps, args.num_envs
        self.obs = torch.zeros(shape[0] + 1, shape[1], obs_dim, device=device)  # and what follows
        self.actions = torch.zeros(*shape, action_dim, device=device)
        # speed: `prepare` computes what is missing, for all steps at once
        self.rewards, self.ended, self.final_values = torch.zeros(3, *shape, device=device)


class Slot(Rollout):
    """What travels between learner and collector, in CPU memory that both see."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, model: ActorCritic):
        super().__init__(args, obs_dim, action_dim, torch.device("cpu"))
        self.noise = torch.zeros(args.num_steps, args.num_envs, action_dim)  # standard normal
        self.version = torch.zeros((), dtype=torch.int64)  # how many updates the weights have seen
        self.weights = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
        for tensor in vars(self).values():
            tensor.share_memory_()  # nothing of it outlives the processes, however they end


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of actions (B, A) under a diagonal Gaussian -> (B,)."""
    z = (actions - mean) * (-log_std).exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, ended: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16) -> advantages (T, N).

    All (T, N). `next_values` is the value of what follows each step in its own episode: 0 after a
    termination, that of the final observation after a truncation. `ended` is 1 after either.
    """
    # speed: log2(T) vector operations instead of T: each doubles how far every sum has got
    advantages = rewards + gamma * next_values - values
    weights, distance = gamma * lam * (1 - ended), 1
    while distance < len(advantages):
        begin, end = advantages[:-distance], advantages[-distance:]
        more = weights[: len(begin)] * advantages[distance:]
        advantages = torch.cat([begin + more, end])
        weights, distance = weights[:-distance] * weights[distance:], 2 * distance
    return advantages


def policy_loss(log_ratios: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Clipped surrogate objective (equation 7), negated -> loss ()."""
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(advantages * ratios, advantages * clipped).mean()


def value_loss(values: Tensor, batch: Batch, clip_coef: float | None) -> Tensor:
    """Half the squared error, of the worse of the value and its clipped change -> loss ()."""
    errors = (values - batch.returns).square()
    if clip_coef is not None:
        clipped = batch.values + (values - batch.values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - batch.returns).square())
    return 0.5 * errors.mean()


def ppo_loss(model: ActorCritic, batch: Batch, args: Args) -> tuple[Tensor, Tensor]:
    """Loss of a minibatch (equation 9) -> loss (), METRICS (6,).

    The policy's part is the decoupled objective of Hilton et al. (arXiv:2110.00641, section 3).
    """
    mean, log_std, values = model(batch.obs)
    log_ratios = gaussian_log_prob(batch.actions, mean, log_std) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    of_policy = policy_loss(log_ratios, batch.importance * advantages, args.clip_coef)
    of_value = value_loss(values, batch, args.clip_coef if args.clip_vloss else None)
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = of_policy - args.ent_coef * entropy + args.vf_coef * of_value
    with torch.no_grad():
        ratios = log_ratios.exp()
        kl = -log_ratios.mean(), (ratios - 1 - log_ratios).mean()  # joschu.net/blog/kl-approx.html
        clipped = ((ratios - 1).abs() > args.clip_coef).float().mean()
        return loss, torch.stack([of_policy, of_value, entropy, *kl, clipped])


# speed: torch.compile cannot trace torch.optim.Adam; with this one a whole update is one compiled
# call. The powers of beta are state: from a step count, every weight would pay for a pow
class Adam:
    """Adam (Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1), all parameters in one call."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.betas, self.eps = list(parameters), betas, eps
        self.exp_avgs = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.exp_avg_sqs = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.beta_powers = [torch.ones((), device=self.parameters[0].device) for _ in betas]
        self.lr = torch.tensor(lr, device=self.parameters[0].device)

    def state_dict(self) -> dict:
        return {"state": [*self.exp_avgs, *self.exp_avg_sqs, *self.beta_powers]}

    def load_state_dict(self, state: dict) -> None:
        torch._foreach_copy_(self.state_dict()["state"], state["state"])

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Updates the parameters in place; `gradients` in their order and shapes."""
        with torch.no_grad():
            beta1_power = self.beta_powers[0].mul_(self.betas[0])
            beta2_power = self.beta_powers[1].mul_(self.betas[1])
            torch._foreach_lerp_(self.exp_avgs, gradients, 1 - self.betas[0])
            torch._foreach_mul_(self.exp_avg_sqs, self.betas[1])
            torch._foreach_addcmul_(self.exp_avg_sqs, gradients, gradients, 1 - self.betas[1])
            denominators = torch._foreach_sqrt(self.exp_avg_sqs)
            torch._foreach_mul_(denominators, (1 - beta2_power).rsqrt())
            torch._foreach_add_(denominators, self.eps)
            steps = torch._foreach_div(self.exp_avgs, denominators)
            torch._foreach_mul_(steps, self.lr / (1 - beta1_power))
            torch._foreach_sub_(self.parameters, steps)


# speed: for a few rows PyTorch's dispatch costs more than the arithmetic
def forward(layers: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """A network of the model in NumPy: x (..., O) -> what its last layer puts out (..., .)."""
    weight1, bias1, weight2, bias2, weight3, bias3 = layers
    x = np.tanh(np.tanh(x @ weight1 + bias1) @ weight2 + bias2)
    return x @ weight3 + bias3


class PPO(nn.Module):
    """Network, optimizer and gradient steps, which return their metrics as one tensor."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.args = args
        self.model = ActorCritic(obs_dim, action_dim).to(device)
        # speed: all parameters become views of one vector: one gradient, one norm, one step
        self.shapes = {name: x.shape for name, x in self.model.named_parameters()}
        self.flat = nn.utils.parameters_to_vector(self.parameters()).detach()
        nn.utils.vector_to_parameters(self.flat, self.parameters())
        self.optimizer = Adam([self.flat], lr=args.learning_rate, eps=1e-5)
        self.optimizers = (self.optimizer,)

    # speed: acting leaves out all but the actions, and PyTorch
    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in a vector by name, as a call of the model can take them."""
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {n: x.view(self.shapes[n]) for n, x in zip(self.shapes, parts, strict=True)}

    def publish(self) -> None:
        """Brings the parameters, in one copy, to where acting reads them in NumPy."""
        self.published = self.flat.cpu()
        log_std, *layers = (x.numpy().T for x in self.views(self.published).values())
        self.std, self.critic_layers, self.actor_layers = np.exp(log_std), layers[:6], layers[6:]

    def act(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """obs (N, O), normal noise (N, A) -> actions (N, A)."""
        if self.flat.is_cuda:  # as --collector-device has it
            mean = self.model.actor_mean(torch.from_numpy(obs).to(self.flat.device)).detach()
            return mean.cpu().numpy() + self.std * noise
        return forward(self.actor_layers, obs) + self.std * noise

    def prepare(self, rollout: Rollout, acted: Tensor) -> Batch:
        """A rollout and the parameters that made it -> B = T N steps to learn from."""
        with torch.no_grad():
            # speed: one call for what the policy that acted said, one for what this one says
            obs, actions, rewards, ended, final_values = vars(rollout).values()
            mean, log_std, _ = torch.func.functional_call(self.model, self.views(acted), (obs,))
            acted_log_probs = gaussian_log_prob(actions, mean[:-1], log_std)
            mean, log_std, all_values = self.model(obs)
            log_probs = gaussian_log_prob(actions, mean[:-1], log_std)
            importance = (log_probs - acted_log_probs).exp()
            values, following = all_values[:-1], all_values[1:]
            following = torch.where(ended.bool(), final_values, following)
            discounts = self.args.gamma, self.args.gae_lambda
            advantages = compute_gae(rewards, values, following, ended, *discounts)
            columns = log_probs, values, advantages, advantages + values, importance
            return Batch(*(column.flatten(0, 1) for column in (obs[:-1], actions, *columns)))

    def update(self, batch: Batch, index: Tensor) -> Tensor:
        """One gradient step on the steps of `batch` in index -> METRICS (6,)."""
        minibatch = Batch(*(column[index] for column in batch))
        # speed: a pure function of the vector, nothing is hidden from the compiler
        flat = self.flat.detach().requires_grad_()
        model = partial(torch.func.functional_call, self.model, self.views(flat))
        loss, metrics = ppo_loss(lambda obs: model((obs,)), minibatch, self.args)
        (gradient,) = torch.autograd.grad(loss, flat)
        scale = (self.args.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1)
        self.optimizer.step([gradient * scale])
        return metrics

    def learn(self, batch: Batch, order: Tensor) -> Tensor:
        """An epoch of minibatches in the order of a permutation (B,) -> METRICS of each (M, 6)."""
        indices = order.view(self.args.num_minibatches, -1)
        return torch.stack([self.update(batch, index) for index in indices])


# speed: the update alone, which `learn` calls without unrolling; the rest runs once per rollout
def compile_agent(agent: PPO) -> None:
    """The update is compiled when it is first called."""
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    torch._inductor.config.reorder_for_locality = False  # True moves reads past writes (torch 2.11)
    torch._inductor.config.cpp.vec_isa_ok = True  # to try the CPU's vectors first takes 4 seconds
    torch._inductor.config.cpp_wrapper = next(agent.parameters()).is_cpu  # C++ calls kernels faster
    torch._inductor.config.cpp.use_decompose_tanh = True  # by exp, which is vectorized better
    # no guards, which ask at each call whether the code still fits: each agent has code of its own
    no_guards = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    own = MethodType(FunctionType(PPO.update.__code__.replace(), globals()), agent)
    agent.update = torch.compile(own, fullgraph=True, options=no_guards)


class Worker:
    """A process of this run, with a pipe to it, that ends with this one, however that ends.

    If it ends before, that ends the run in one line: `check` does so, to be called on SIGCHLD.
    """

    def __init__(self, name: str, function: Callable, *args: object):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.name, (self.pipe, pipe) = name, context.Pipe()
        self.process = context.Process(target=work, args=(function, pipe, *args), daemon=True)
        # A terminal sends these to every process of a run, of which this one ends the others.
        handlers = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGHUP)}
        self.process.start()  # ignores them as well
        for number, handler in handlers.items():
            signal.signal(number, handler)
        pipe.close()

    def check(self) -> None:
        """Ends the run if the process has ended."""
        code = self.process.exitcode
        if code is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise SystemExit(f"the {self.name} died: {how}")

    def send(self, message: object) -> None:
        try:
            self.pipe.send_bytes(pickle.dumps(message))  # `pipe.send` would share tensors' memory
        except OSError:  # SIGCHLD follows
            self.process.join()
            self.check()

    def receive(self) -> tuple:
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            self.check()

    def end(self) -> None:
        """Ends it in the middle of whatever it does, and waits until it is gone."""
        self.process.terminate()
        self.process.join(timeout=10)
        self.process.kill()
        self.process.join()


def work(function: Callable, pipe: Connection, *args: object) -> None:
    """What the process of a Worker runs: `function`, which goes on until Worker.end."""

    def die_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # the other cores are the learner's
    try:
        function(pipe, *args)
    except KeyboardInterrupt:  # Worker.end
        os._exit(0)  # spares the seconds in which Python takes down what it has imported


def collect(pipe: Connection, args: Args, slots: list[Slot], report_path: Path) -> None:
    """What the collector does: makes a rollout in each slot whose index it gets."""
    device = use_device(args.collector_device)
    warmup_steps = STEADY_AFTER * args.num_envs * args.num_steps
    watch = Stopwatch(device, args.stopwatch, warmup_steps, trace_after=3, trace_iterations=1)
    envs = make_envs(args.env_id, args.num_envs, args.gamma)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    # speed: without DeviceEnv, acting takes and gives arrays, those in shared memory
    device_envs = envs
    for slot in slots:
        vars(slot).update({name: tensor.numpy() for name, tensor in vars(slot).items()})
    start_step, statistics = pickle.loads(pipe.recv_bytes())
    if statistics is not None:
        set_statistics(envs, statistics)
    obs, _ = device_envs.reset(seed=args.seed + start_step)
    global_step = start_step
    try:
        while True:
            begin = time.perf_counter()
            slot = slots[pickle.loads(pipe.recv_bytes())]
            waited = time.perf_counter() - begin
            truncations, episodes = [], []
            # speed: once per rollout
            agent.flat.copy_(torch.from_numpy(slot.weights))
            agent.publish()
            rollout, noise = slot, slot.noise
            for t in range(args.num_steps):
                with watch.stage("inference"):
                    # speed: log-probabilities and values wait for `prepare`
                    actions = agent.act(obs, noise[t])
                with watch.stage("simulation"):
                    next_obs, rewards, terminated, truncated, infos = device_envs.step(actions)

                with watch.stage("replay"):
                    rollout.obs[t], rollout.actions[t] = obs, actions
                    rollout.rewards[t], rollout.ended[t] = rewards, terminated | truncated
                    # speed: no values
                    obs = next_obs
                global_step += args.num_envs
                # Where an episode ended, next_obs is already the next episode's first.
                # speed: without PyTorch
                for i in (terminated | truncated).nonzero()[0]:
                    if not terminated[i]:
                        truncations.append((t, i, infos["final_obs"][i]))
                    episode = infos["final_info"]["episode"]
                    episodes.append((global_step, episode["r"][i], episode["l"][i]))
            rollout.obs[-1] = obs
            # speed: there already
            pipe.send_bytes(pickle.dumps((truncations, episodes, get_statistics(envs), waited)))
            watch.tick(global_step - start_step)
    finally:
        print("the collector:", file=sys.stderr)
        watch.report(report_path)


def evaluate(agent: PPO, args: Args, statistics: dict[str, Tensor], video: Path | None) -> float:
    """Mean return of K episodes from always the same starts, acting without noise."""
    envs = make_envs(args.env_id, args.eval_episodes, video=video)
    means, variances = statistics["obs_rms_mean"], statistics["obs_rms_var"]  # per environment
    mean, std = means.mean(0), (variances.mean(0) + means.var(0, correction=0) + 1e-8).sqrt()
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.reset(seed=args.seed + 2**31)  # not the states of training
    for _ in range(50_000):  # an episode without end counts with its return so far
        inputs = ((torch.as_tensor(obs) - mean) / std).clamp(-10, 10)
        with torch.no_grad():
            actions = agent.model.actor_mean(inputs.to(agent.model.actor_logstd))
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += running * rewards
        running &= ~(terminated | truncated)
        if not running.any():
            break
    envs.close()
    return float(returns.mean())


def answer(pipe: Connection, args: Args, obs_dim: int, action_dim: int, run_dir: Path) -> None:
    """What the evaluator does: gets a step, its weights and statistics, answers with the return."""
    agent = PPO(args, obs_dim, action_dim, use_device(args.eval_device))
    while True:
        global_step, weights, statistics = pickle.loads(pipe.recv_bytes())
        agent.model.load_state_dict(weights)
        video = run_dir / f"videos/step-{global_step}" if args.capture_video else None
        eval_return = evaluate(agent, args, statistics, video)
        pipe.send_bytes(pickle.dumps((global_step, eval_return)))


def save(path: Path, agent: nn.Module, global_step: int, **more: object) -> None:
    """Writes all or nothing: whenever the process dies, there is a whole file, old or new."""
    if not all(parameter.isfinite().all() for parameter in agent.parameters()):
        raise SystemExit(f"step {global_step:,}: weights are not finite; the checkpoint stays")
    checkpoint = {"script": SCRIPT, "args": asdict(agent.args), "global_step": global_step, **more}
    checkpoint["agent"] = agent.state_dict()
    checkpoint["optimizers"] = [each.state_dict()["state"] for each in agent.optimizers]
    checkpoint["generators"] = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    with path.with_suffix(".partial").open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".partial").replace(path)


def load(path: Path) -> dict:
    """What `save` has written, its tensors on the CPU."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
    if checkpoint.get("script") != SCRIPT or checkpoint["args"].keys() != asdict(Args()).keys():
        raise SystemExit(f"--resume: {path.parent} has no checkpoint of this version of {SCRIPT}")
    return checkpoint


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    check_args(args)
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as cleanly as on Ctrl-C
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup, SIGHUP is ignored
            signal.signal(number, signal.default_int_handler)
    checkpoint = load(Path(args.resume, "checkpoint.pt")) if args.resume else None
    start_step = global_step = checkpoint["global_step"] if checkpoint else 0
    batch_size = args.num_envs * args.num_steps
    total_timesteps = args.total_timesteps // batch_size * batch_size
    if start_step >= total_timesteps:
        raise SystemExit(f"--resume: nothing left to do, {start_step:,} steps are done")
    num_rollouts = math.ceil((total_timesteps - start_step) / batch_size)
    default_device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    device = use_device(args.learner_device or default_device)
    max_staleness = 0 if args.sync else args.max_staleness
    if max_staleness > 0:  # one core is the collector's
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    warmup_steps = STEADY_AFTER * batch_size
    watch = Stopwatch(device, args.stopwatch, warmup_steps, trace_after=3, trace_iterations=1)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    envs = make_envs(args.env_id, 1)  # for their spaces: those to act in are the collector's
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    rollout, episodic_return = Rollout(args, obs_dim, action_dim, device), math.nan
    slots = [Slot(args, obs_dim, action_dim, agent.model) for _ in range(max_staleness + 1)]
    statistics, handed_out, unanswered = None, 0, 0  # rollouts handed out, evaluations unanswered

    # speed: the loop does not know what is compiled or captured; a third call captures a graph
    if args.compile:
        torch.set_num_threads(1)  # layers of 64 are too small to share
        compile_agent(agent)
    if args.cudagraphs and device.type == "cuda":
        agent.prepare = CudaGraphModule(agent.prepare, warmup=3)
        agent.learn = CudaGraphModule(agent.learn, warmup=3)

    if checkpoint:
        agent.load_state_dict(checkpoint["agent"])
        for optimizer, state in zip(agent.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})  # rates are flags
        statistics = checkpoint["statistics"]
        torch.set_rng_state(checkpoint["generators"][0])
        torch.cuda.set_rng_state_all(checkpoint["generators"][1][: torch.cuda.device_count()])
        print(f"resumed at step {start_step:,}, with fresh episodes", file=sys.stderr)

    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.resume or Path("runs", re.sub(r"[^\w.-]", "_", name)))
    run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
    suffix = f"_{start_step}.json" if args.resume else ".json"  # the first part keeps its files
    config = {"args": asdict(args), "command": " ".join(sys.argv)}
    config["versions"] = {"torch": torch.__version__, "gymnasium": gym.__version__}
    config["cpu"] = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    config["gpu"] = torch.cuda.get_device_name() if device.type == "cuda" else None
    (run_dir / f"config{suffix}").write_text(json.dumps(config, indent=2))
    if args.track:
        import wandb

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        wandb.init(**names, id=run_dir.name, resume="allow", config=config, sync_tensorboard=True)
    writer = SummaryWriter(run_dir, purge_step=start_step + 1 if args.resume else None)
    bar = tqdm.tqdm(total=total_timesteps, initial=start_step, unit="step")

    def due(every: int) -> bool:
        """Whether this iteration passed a multiple of so many steps or ends the run; 0: never."""
        last = global_step >= total_timesteps
        return every > 0 and (last or global_step % every < batch_size)

    workers = []
    signal.signal(signal.SIGCHLD, lambda *_: [worker.check() for worker in workers])
    try:
        collector = Worker("collector", collect, args, slots, run_dir / f"stages_collector{suffix}")
        workers.append(collector)
        collector.send((start_step, statistics))
        if args.eval_every or args.capture_video:
            evaluator = Worker("evaluator", answer, args, obs_dim, action_dim, run_dir)
            workers.append(evaluator)
        while global_step < total_timesteps:
            share_done = global_step / total_timesteps if args.anneal_lr else 0
            learning_rate = args.learning_rate * (1 - share_done)
            # speed: a tensor, which compiled code and graphs read anew
            agent.optimizer.lr.fill_(learning_rate)
            agent.publish()

            # 1. Let the collector go on with these weights, and get the rollout that is due.
            version = (global_step - start_step) // batch_size  # updates so far
            with watch.stage("replay"):
                while handed_out < min(version + len(slots), num_rollouts):
                    slot = slots[handed_out % len(slots)]
                    slot.version.fill_(version)
                    # speed: they are on the CPU already
                    slot.weights.copy_(agent.published)
                    slot.noise.normal_()
                    collector.send(handed_out % len(slots))
                    handed_out += 1
            begin = time.perf_counter()
            truncations, episodes, statistics, collector_waited = collector.receive()
            waited = time.perf_counter() - begin
            global_step += batch_size

            # 2. Learn from it in several epochs.
            with watch.stage("backpropagation"):
                slot = slots[version % len(slots)]
                slot.final_values.zero_()
                for t, i, final_obs in truncations:
                    # speed: without PyTorch
                    slot.final_values[t, i] = float(*forward(agent.critic_layers, final_obs))
                for name, tensor in vars(rollout).items():
                    tensor.copy_(getattr(slot, name), non_blocking=True)
                if not math.isfinite(slot.obs.sum() + slot.rewards.sum()):
                    steps = f"steps {global_step - batch_size:,} to {global_step:,}"
                    raise SystemExit(f"{steps}: observation or reward is not finite")
                staleness = version - slot.version.item()
                # speed: from the weights that acted
                acted = slot.weights.to(device, non_blocking=True)
                batch, metrics = agent.prepare(rollout, acted), []
                for _ in range(args.update_epochs):
                    metrics.append(agent.learn(batch, torch.randperm(batch_size, device=device)))
                    if args.target_kl is not None and metrics[-1][-1, KL] > args.target_kl:
                        break
                losses = *metrics[-1][-1, :-1], torch.cat(metrics)[:, -1].mean()  # clipfrac of all
                explained = 1 - (batch.returns - batch.values).var() / batch.returns.var()
                *losses, explained = torch.stack([*losses, explained]).tolist()  # waits once

            # 3. Log.
            with watch.stage("logging"):
                if not np.isfinite(losses).all():
                    raise SystemExit(f"step {global_step:,}: losses are not finite: {losses}")
                for step, episodic_return, length in episodes:
                    writer.add_scalar("charts/episodic_return", episodic_return, step)
                    writer.add_scalar("charts/episodic_length", length, step)
                sps, steady_sps = watch.speed(global_step - start_step)
                writer.add_scalar("charts/SPS", sps, global_step)
                if steady_sps:
                    writer.add_scalar("charts/SPS_steady", steady_sps, global_step)
                    writer.add_scalar("charts/warmup_seconds", watch.warmup_seconds, global_step)
                writer.add_scalar("charts/learning_rate", learning_rate, global_step)
                writer.add_scalar("charts/staleness", staleness, global_step)
                writer.add_scalar("charts/learner_waits_seconds", waited, global_step)
                writer.add_scalar("charts/collector_waits_seconds", collector_waited, global_step)
                writer.add_scalar("losses/explained_variance", explained, global_step)
                for tag, value in zip(METRICS, losses, strict=True):
                    writer.add_scalar(f"losses/{tag}", value, global_step)
                bar.set_postfix_str(f"return {episodic_return:,.1f}", refresh=False)
                bar.update(global_step - bar.n)

            # 4. Save and evaluate, now and then and at the end.
            last = global_step >= total_timesteps
            if due(args.checkpoint_every) or args.save_model and last:
                with watch.stage("checkpoint"):
                    save(run_dir / "checkpoint.pt", agent, global_step, statistics=statistics)
            with watch.stage("evaluation"):
                if due(args.eval_every) or args.capture_video and last:
                    weights = {name: x.cpu() for name, x in agent.model.state_dict().items()}
                    evaluator.send((global_step, weights, statistics))
                    unanswered += 1
                while unanswered and (last or evaluator.pipe.poll()):
                    step, eval_return = evaluator.receive()
                    unanswered -= 1
                    writer.add_scalar("charts/eval_return", eval_return, step)
                    bar.write(f"evaluation at {step:,}: {eval_return:,.1f}", file=sys.stderr)
            watch.tick(global_step - start_step)
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted after {global_step:,} steps") from None
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        bar.close()
        for worker in workers:
            worker.end()
        writer.close()
        watch.report(run_dir / f"stages{suffix}")
    return run_dir


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.resume:  # flags that are not given stay as they were
        args = tyro.cli(Args, default=Args(**load(Path(args.resume, "checkpoint.pt"))["args"]))
    main(args)
