r"""PPO on thousands of CartPoles that are one tensor, with torch.compile and CUDA graphs.

    python leanrl/ppo_cartpole_gpu_torchcompile.py --compile --cudagraphs
    python leanrl/ppo_cartpole_gpu_torchcompile.py --compile --cudagraphs --num-envs 1048576 \
        --num-minibatches 64 --total-timesteps 1000000000

The algorithm is that of its twin, ppo_cartpole_gpu.py, which says where it comes from and what the
shapes mean; the hunks that differ start with `# speed:` and say what they buy, the rest is the same
to the letter. Without a CUDA device --cudagraphs says so in one line and the run goes on. The first
rollouts pay for compilation: seconds, reported as warm-up, fewer with a warm cache.
"""

# speed: threads that wait for each other soon go to sleep; on a core that another program shares,
# waiting awake made SAC 18 times slower. OpenMP reads this when torch is imported
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# speed: CudaGraphModule captures a function as a CUDA graph
import json
import math
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FunctionType, MethodType
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tqdm
import tyro
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

    # speed: each works alone, together and not at all
    compile: bool = False  # compile the rollout's steps and the updates with torch.compile
    cudagraphs: bool = False  # replay whole rollouts and epochs as CUDA graphs

    env_id: Literal["CartPole-v1"] = "CartPole-v1"  # the environment, in Gymnasium's words
    total_timesteps: int = 5_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 4096  # environments stepped side by side
    num_steps: int = 32  # steps of a rollout in each environment
    learning_rate: float = 2.5e-3  # learning rate of the optimizer, at first
    anneal_lr: bool = True  # lower it from rollout to rollout, linearly to zero at the end
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over a rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the ratio of new to old probabilities may go from 1
    clip_vloss: bool = True  # clip the change of the value in the same way
    ent_coef: float = 0.01  # weight of the entropy in the loss
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it
    target_kl: float | None = None  # end the epochs at such a KL divergence from the old policy


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
STEADY_AFTER = 3  # rollouts, then compilation and capture are long over
# speed: activations of so many rows, 1 MB per layer, stay in a CPU's caches
CACHED_ROWS = 4096


def check_args(args: Args) -> None:
    """What a user gets wrong, in one line each; libraries' own errors say the rest."""
    may_be_zero = ("seed", "checkpoint_every", "eval_every", "learning_rate", "gamma", "gae_lambda")
    may_be_zero += ("ent_coef", "vf_coef")
    for name, x in asdict(args).items():
        if type(x) in (int, float) and not (0 < x < 1e12 or x == 0 and name in may_be_zero):
            raise SystemExit(f"--{name.replace('_', '-')}: {x} is out of range")
    rollout = args.num_envs * args.num_steps
    if args.total_timesteps < rollout:
        raise SystemExit(f"--total-timesteps: less than one rollout of {rollout:,} steps")
    if rollout % args.num_minibatches or rollout == args.num_minibatches:
        raise SystemExit(f"--num-minibatches: does not divide {rollout:,} steps into two or more")
    # speed: no graphs without CUDA: a contradiction is refused, a missing device only mentioned
    if args.cudagraphs and not args.cuda:
        raise SystemExit("--cudagraphs: contradicts --no-cuda")
    if args.cudagraphs and not torch.cuda.is_available():
        print("--cudagraphs: no CUDA device, it has no effect", file=sys.stderr)


class CartPole(gym.vector.VectorEnv):
    """N environments CartPole-v1 as tensors on `device`, which reset in the step that ends them.

    What `step` returns are dense tensors there, infos included: `final_obs` is the observation
    before any reset, `episode` has return and length so far, `_final_obs` and `_episode` are the
    mask of those that ended. Nothing waits for the device; the state stays where it is, for graphs.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    gravity, pole_mass, total_mass, half_length, force, tau = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
    x_limit, theta_limit, max_steps = 2.4, 12 * math.pi / 180, 500

    def __init__(self, num_envs: int, device: torch.device | str):
        self.num_envs, self.device = num_envs, torch.device(device)
        high = np.array([2 * self.x_limit, np.inf, 2 * self.theta_limit, np.inf], np.float32)
        spaces = gym.spaces.Box(-high, high), gym.spaces.Discrete(2)
        self.single_observation_space, self.single_action_space = spaces
        batched = (gym.vector.utils.batch_space(space, num_envs) for space in spaces)
        self.observation_space, self.action_space = batched
        self.state = torch.zeros(num_envs, 4, device=device)  # x, x', theta, theta'
        self.lengths = torch.zeros(num_envs, dtype=torch.int32, device=device)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Starts all episodes, drawn from torch's generator if not by seed -> obs (N, 4), {}."""
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        self.state.uniform_(-0.05, 0.05, generator=generator)
        self.lengths.zero_()
        return self.state.clone(), {}

    def step(self, actions: Tensor, noise: Tensor | None = None) -> tuple:
        """Actions (N,) -> observations (N, 4), rewards, terminated, truncated, each (N,), infos.

        New episodes start at `noise` (N, 4), uniform in [-0.05, 0.05); drawn here if not given.
        """
        final = self.dynamics(self.state, actions)
        self.lengths += 1
        x, _, theta, _ = final.unbind(1)
        terminated = (x.abs() > self.x_limit) | (theta.abs() > self.theta_limit)
        truncated = self.lengths >= self.max_steps
        ended, lengths = terminated | truncated, self.lengths.clone()
        noise = torch.empty_like(final).uniform_(-0.05, 0.05) if noise is None else noise
        self.state.copy_(torch.where(ended[:, None], noise, final))
        self.lengths.masked_fill_(ended, 0)
        infos = {"final_obs": final, "_final_obs": ended, "_episode": ended}
        infos["episode"] = {"r": lengths.float(), "l": lengths}  # each step is worth 1
        return self.state.clone(), torch.ones_like(x), terminated, truncated, infos

    def dynamics(self, state: Tensor, actions: Tensor) -> Tensor:
        """States (N, 4), actions (N,) -> next states (N, 4), by Euler's method."""
        x, x_dot, theta, theta_dot = state.unbind(1)
        cos, sin, moment = theta.cos(), theta.sin(), self.pole_mass * self.half_length
        force = self.force * (2 * actions - 1)
        push = (force + moment * theta_dot.square() * sin) / self.total_mass
        inertia = self.half_length * (4 / 3 - self.pole_mass * cos.square() / self.total_mass)
        theta_acc = (self.gravity * sin - cos * push) / inertia
        x_acc = push - moment * theta_acc * cos / self.total_mass
        changes = torch.stack([x_dot, x_acc, theta_dot, theta_acc], dim=1)
        return state + self.tau * changes


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64; weights are orthogonal at first, `gain` scales the last layer's."""
    layers = nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
    for layer, scale in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class ActorCritic(nn.Module):
    """Categorical policy and the value of a state, a network each."""

    def __init__(self, obs_dim: int, num_actions: int):
        super().__init__()
        self.critic = mlp(obs_dim, 1, gain=1.0)
        self.actor = mlp(obs_dim, num_actions, gain=0.01)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs (B, O) -> log-probabilities of the actions (B, A), values (B,)."""
        return F.log_softmax(self.actor(obs), dim=-1), self.critic(obs).squeeze(-1)


class Batch(NamedTuple):
    """B steps of a rollout; log_probs and values as they were when it was made."""

    obs: Tensor  # (B, O)
    actions: Tensor  # (B,) int64
    log_probs: Tensor  # (B,), these and what follows float32
    values: Tensor  # (B,)
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,)


class Rollout(NamedTuple):
    """T steps of N environments on the device."""

    obs: Tensor  # (T, N, O)
    actions: Tensor  # (T, N) int64
    log_probs: Tensor  # (T, N), these and what follows float32
    values: Tensor  # (T, N)
    rewards: Tensor  # (T, N)
    next_values: Tensor  # (T, N) of what follows in the same episode, 0 after a termination
    ended: Tensor  # (T, N) bool, of either kind
    episode_returns: Tensor  # (T, N) of the episode so far


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
    """Loss of a minibatch (equation 9) -> loss (), METRICS (6,)."""
    log_policy, values = model(batch.obs)
    log_ratios = log_policy.gather(1, batch.actions[:, None]).squeeze(1) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    of_policy = policy_loss(log_ratios, advantages, args.clip_coef)
    of_value = value_loss(values, batch, args.clip_coef if args.clip_vloss else None)
    entropy = -(log_policy.exp() * log_policy).sum(dim=1).mean()
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


class PPO(nn.Module):
    """Network, optimizer and gradient steps, which return their metrics as one tensor."""

    def __init__(self, args: Args, obs_dim: int, num_actions: int, device: torch.device):
        super().__init__()
        self.args, self.model = args, ActorCritic(obs_dim, num_actions).to(device)
        # speed: the Adam above, which compiles and captures with the rest of an update
        self.optimizer = Adam(self.parameters(), lr=args.learning_rate, eps=1e-5)
        self.optimizers = (self.optimizer,)

    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """obs (N, O), exponential noise (N, A) -> actions (N,), log_probs (N,), values (N,).

        With probabilities p and exponential noise q, the largest p / q is a draw from p.
        """
        with torch.no_grad():
            log_policy, values = self.model(obs)
            actions = (log_policy - noise.log()).argmax(dim=1)
            return actions, log_policy.gather(1, actions[:, None]).squeeze(1), values

    def value(self, obs: Tensor) -> Tensor:
        """obs (N, O) -> values (N,)."""
        with torch.no_grad():
            return self.model.critic(obs).squeeze(-1)

    def prepare(self, rollout: Rollout) -> Batch:
        """A rollout -> B = T N steps to learn from."""
        estimates = rollout.rewards, rollout.values, rollout.next_values, rollout.ended.float()
        advantages = compute_gae(*estimates, self.args.gamma, self.args.gae_lambda)
        columns = *rollout[:4], advantages, advantages + rollout.values
        return Batch(*(x.flatten(0, 1) for x in columns))

    def update(self, batch: Batch, index: Tensor) -> Tensor:
        """One gradient step on the rows in index (B,) -> METRICS (6,)."""
        # speed: three compiled parts, the middle one for as many rows as a CPU's caches have room
        # for: the mean of the pieces' gradients is the minibatch's. A GPU gets all rows at once
        count = 1 if index.is_cuda else math.gcd(len(index), max(len(index) // CACHED_ROWS, 1))
        columns = self.gather(batch, index)
        first, *pieces = zip(*(x.chunk(count) for x in columns), strict=True)
        sums = self.gradients(Batch(*first))
        for piece in pieces:
            torch._foreach_add_(sums, self.gradients(Batch(*piece)))
        return self.optimize(sums, 1 / count)

    def gather(self, batch: Batch, index: Tensor) -> Batch:
        """The rows in index (B,), with advantages that are normalized over all of them."""
        rows = Batch(*(x.index_select(0, index) for x in batch))
        advantages = rows.advantages
        if self.args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        return rows._replace(advantages=advantages)

    def gradients(self, batch: Batch) -> list[Tensor]:
        """As values, not as .grad: nothing that the compiler cannot see -> and METRICS (6,)."""
        loss, metrics = ppo_loss(self.model, batch, replace(self.args, norm_adv=False))
        return [*torch.autograd.grad(loss, self.optimizer.parameters), metrics]

    def optimize(self, sums: list[Tensor], scale: float) -> Tensor:
        """Adam with the scaled, then clipped gradients -> METRICS (6,)."""
        *gradients, metrics = torch._foreach_mul(sums, scale)
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        scale = (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        self.optimizer.step(torch._foreach_mul(gradients, scale))
        return metrics

    def learn(self, batch: Batch, order: Tensor) -> Tensor:
        """An epoch of minibatches in the order of a permutation (B,) -> METRICS of each (M, 6)."""
        indices = order.view(self.args.num_minibatches, -1)
        return torch.stack([self.update(batch, index) for index in indices])


# speed: the advantages and an update, gradients and optimizer included, become one graph each
def compile_agent(agent: PPO) -> None:
    """Each method is compiled when it is first called."""
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    torch._inductor.config.reorder_for_locality = False  # True moves reads past writes (torch 2.11)
    torch._inductor.config.cpp.vec_isa_ok = True  # to try the CPU's vectors first takes 4 seconds
    torch._inductor.config.cpp.use_decompose_tanh = True  # by exp, which is vectorized better
    # no guards, which ask at each call whether the code still fits: each agent has code of its own
    for name in ("prepare", "gather", "gradients", "optimize"):
        method = getattr(type(agent), name)
        own = MethodType(FunctionType(method.__code__.replace(), globals()), agent)
        no_guards = {"guard_filter_fn": lambda guards: [False] * len(guards)}  # it gets emptied
        setattr(agent, name, torch.compile(own, fullgraph=True, options=no_guards))


def evaluate(agent: PPO, args: Args, video: Path | None) -> float:
    """Mean return of K of Gymnasium's own episodes from always the same starts, without noise."""
    makers = [lambda: gym.make(args.env_id)] * args.eval_episodes
    if video is not None:
        env = gym.make(args.env_id, render_mode="rgb_array")
        makers[0] = lambda: gym.wrappers.RecordVideo(env, str(video), lambda i: i == 0)
    envs = gym.vector.SyncVectorEnv(makers)
    noise = torch.ones(args.eval_episodes, 2, device=next(agent.parameters()).device)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.reset(seed=args.seed + 2**31)  # not the states of training
    while running.any():  # each has a time limit
        actions, _, _ = PPO.act(agent, torch.as_tensor(obs).to(noise), noise)
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += running * rewards
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


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
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    warmup_steps = STEADY_AFTER * batch_size
    watch = Stopwatch(device, args.stopwatch, warmup_steps, trace_after=3, trace_iterations=1)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    envs = CartPole(args.num_envs, device)
    obs_dim, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    agent = PPO(args, obs_dim, num_actions, device)

    # speed: the rollout as functions without stages in them, to compile and to capture. A step is
    # one call, and what the next one reads stays in its place
    def step(noise: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        obs = envs.state.clone()
        actions, log_probs, values = agent.act(obs, noise)
        _, rewards, terminated, _, infos = envs.step(actions, starts)
        next_values = agent.value(infos["final_obs"]) * ~terminated
        row = obs, actions, log_probs, values, rewards, next_values
        return *row, infos["_final_obs"], infos["episode"]["r"]

    def roll_out() -> Rollout:
        shape = args.num_steps, args.num_envs
        noise = torch.empty(*shape, num_actions, device=device).exponential_()
        starts = torch.empty(*shape, obs_dim, device=device).uniform_(-0.05, 0.05)
        rows = [step(noise[t], starts[t]) for t in range(args.num_steps)]
        return Rollout(*map(torch.stack, zip(*rows, strict=True)))

    # speed: the loop does not know what is compiled or captured; a third call captures a graph
    if args.compile:
        compile_agent(agent)
        step = torch.compile(step, fullgraph=True)
        cpuinfo = Path("/proc/cpuinfo")  # on Zen 4 slower, with AMX bfloat16, on a GPU TF32
        if device.type == "cpu" and cpuinfo.exists() and "family\t: 26" in cpuinfo.read_text():
            torch.set_float32_matmul_precision("medium")  # oneDNN, not MKL: 1.5x on AMD's Zen 5
    if args.cudagraphs and device.type == "cuda":
        roll_out = CudaGraphModule(roll_out, warmup=3)
        agent.learn = CudaGraphModule(agent.learn, warmup=3)

    if checkpoint:
        agent.load_state_dict(checkpoint["agent"])
        for optimizer, state in zip(agent.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})  # rates are flags
        torch.set_rng_state(checkpoint["generators"][0])
        torch.cuda.set_rng_state_all(checkpoint["generators"][1][: torch.cuda.device_count()])
        print(f"resumed at step {start_step:,}, with fresh episodes", file=sys.stderr)
    obs, _ = envs.reset(seed=args.seed + start_step)

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

    try:
        while global_step < total_timesteps:
            share_done = global_step / total_timesteps if args.anneal_lr else 0
            learning_rate = args.learning_rate * (1 - share_done)
            # speed: in place, where compiled code and graphs read it
            agent.optimizer.lr.fill_(learning_rate)

            # 1. Roll out: T steps with the policy as it is.
            # speed: acting and simulation are one compiled call per step, captured even one replay
            # for all steps, so they share a stage: that of the networks, which take most of it
            with watch.stage("inference"):
                rollout = roll_out()
            global_step += batch_size

            # 2. Learn from it in several epochs.
            with watch.stage("backpropagation"):
                batch, metrics = agent.prepare(rollout), []
                for _ in range(args.update_epochs):
                    metrics.append(agent.learn(batch, torch.randperm(batch_size, device=device)))
                    if args.target_kl is not None and metrics[-1][-1, KL] > args.target_kl:
                        break
                losses = *metrics[-1][-1, :-1], torch.cat(metrics)[:, -1].mean()  # clipfrac of all
                explained = 1 - (batch.returns - batch.values).var() / batch.returns.var()
                mean_return = rollout.episode_returns.where(rollout.ended, math.nan).nanmean()
                numbers = torch.stack([*losses, explained, mean_return])  # nan if none ended
                *losses, explained, episodic_return = numbers.tolist()  # the CPU waits once

            # 3. Log. An observation that is not finite makes losses that are not.
            with watch.stage("logging"):
                if not np.isfinite(losses).all():
                    raise SystemExit(f"step {global_step:,}: losses are not finite: {losses}")
                sps, steady_sps = watch.speed(global_step - start_step)
                writer.add_scalar("charts/SPS", sps, global_step)
                if steady_sps:
                    writer.add_scalar("charts/SPS_steady", steady_sps, global_step)
                    writer.add_scalar("charts/warmup_seconds", watch.warmup_seconds, global_step)
                writer.add_scalar("charts/learning_rate", learning_rate, global_step)
                writer.add_scalar("losses/explained_variance", explained, global_step)
                for tag, value in zip(METRICS, losses, strict=True):
                    writer.add_scalar(f"losses/{tag}", value, global_step)
                if not math.isnan(episodic_return):  # if one ended; each step is worth 1
                    writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                    writer.add_scalar("charts/episodic_length", episodic_return, global_step)
                bar.set_postfix_str(f"return {episodic_return:,.1f}", refresh=False)
                bar.update(global_step - bar.n)

            # 4. Save and evaluate, now and then and at the end.
            last = global_step >= total_timesteps
            if due(args.checkpoint_every) or args.save_model and last:
                with watch.stage("checkpoint"):
                    save(run_dir / "checkpoint.pt", agent, global_step)
            if due(args.eval_every) or args.capture_video and last:
                with watch.stage("evaluation"):
                    video = run_dir / f"videos/step-{global_step}" if args.capture_video else None
                    eval_return = evaluate(agent, args, video)
                    writer.add_scalar("charts/eval_return", eval_return, global_step)
                    bar.write(f"evaluation at {global_step:,}: {eval_return:,.1f}", file=sys.stderr)
            watch.tick(global_step - start_step)
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted after {global_step:,} steps") from None
    finally:
        bar.close()
        writer.close()
        watch.report(run_dir / f"stages{suffix}")
    return run_dir


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.resume:  # flags that are not given stay as they were
        args = tyro.cli(Args, default=Args(**load(Path(args.resume, "checkpoint.pt"))["args"]))
    main(args)
