"""Proximal Policy Optimization (PPO) on thousands of CartPoles that are one tensor: the baseline.

    python leanrl/ppo_cartpole_gpu.py                               # 4,096 environments, 5 M steps
    python leanrl/ppo_cartpole_gpu.py --eval-every 1000000          # on Gymnasium's own CartPole-v1
    python leanrl/ppo_cartpole_gpu.py --resume runs/RUN             # go on from its checkpoint.pt

Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv:1707.06347), with
generalized advantage estimation (arXiv:1506.02438) and the defaults of CleanRL's ppo.py other than
these: num_envs 4096, num_steps 32, learning_rate 2.5e-3 and total_timesteps 5,000,000, so that a
minibatch has 32,768 steps. Unlike in CleanRL, a truncated episode bootstraps from the value of
its final observation; a terminated one does not bootstrap. Gymnasium's CartPole-v1 is written as
PyTorch operations over all environments: it lives where the networks live, and nothing but metrics
leaves that device.
Its twin ppo_cartpole_gpu_torchcompile.py is this file with the hunks marked `# speed:`.
Shapes: T steps of a rollout, N environments, B batch, O = 4 observation, A = 2 actions.
"""

import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback until the run begins

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tqdm
import tyro
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import default_collate
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

    env_id: Literal["CartPole-v1"] = "CartPole-v1"  # the environment, in Gymnasium's words
    total_timesteps: int = 5_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 4096  # environments stepped side by side
    num_steps: int = 32  # steps of a rollout in each environment
    learning_rate: float = 2.5e-3  # learning rate of the optimizer, at first
    anneal_lr: bool = True  # lower it from rollout to rollout, linearly towards zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over a rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the ratio of new to old probabilities may go from 1
    clip_vloss: bool = True  # also clip how far a value may go from its old one
    ent_coef: float = 0.01  # weight of the entropy in the loss
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it
    target_kl: float | None = None  # stop after an epoch whose last minibatch's KL exceeds it


STEADY_AFTER = 3  # rollouts; a variant has compiled and captured all by then


# Environment


class CartPole(gym.vector.VectorEnv):
    """N environments CartPole-v1 as tensors on `device`, which reset in the step that ends them.

    What `step` returns are tensors on `device`, infos included: `final_obs` is the observation
    before any reset, `episode` has return and length so far, `_final_obs` and `_episode` are the
    mask of those that ended. Nothing waits for the device, and `state` and `lengths` are changed in
    place, as CUDA graphs need it. If you change the rewards, add them up for `episode` as well.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    gravity = 9.8
    pole_mass = 0.1
    total_mass = 1.1
    half_length = 0.5
    force = 10.0
    tau = 0.02  # seconds between two steps
    x_limit = 2.4
    theta_limit = math.radians(12)
    max_steps = 500

    def __init__(self, num_envs: int, device: torch.device | str):
        self.num_envs = num_envs
        self.device = torch.device(device)
        high = np.float32([2 * self.x_limit, np.inf, 2 * self.theta_limit, np.inf])
        self.single_observation_space = gym.spaces.Box(-high, high)
        self.single_action_space = gym.spaces.Discrete(2)
        batch_space = gym.vector.utils.batch_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.state = torch.zeros(num_envs, 4, device=device)  # x, x', theta, theta'
        self.lengths = torch.zeros(num_envs, dtype=torch.int32, device=device)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Starts all episodes, drawn from torch's generator if not by seed -> obs (N, 4), {}."""
        generator = None
        if seed is not None:
            generator = torch.Generator(self.device).manual_seed(seed)
        self.state.uniform_(-0.05, 0.05, generator=generator)
        self.lengths.zero_()
        return self.state.clone(), {}

    def step(self, actions: Tensor, starts: Tensor | None = None) -> tuple:
        """Actions (N,) -> observations (N, 4), rewards, terminated, truncated, each (N,), infos.

        New episodes begin at `starts` (N, 4), uniform in [-0.05, 0.05); drawn here if not given.
        """
        final_obs = self.dynamics(self.state, actions)
        self.lengths += 1
        x, _, theta, _ = final_obs.unbind(dim=1)
        terminated = (x.abs() > self.x_limit) | (theta.abs() > self.theta_limit)
        truncated = self.lengths >= self.max_steps
        ended = terminated | truncated
        lengths = self.lengths.clone()
        if starts is None:
            starts = torch.empty_like(final_obs).uniform_(-0.05, 0.05)
        next_state = torch.where(ended[:, None], starts, final_obs)
        self.state.copy_(next_state)
        self.lengths.masked_fill_(ended, 0)
        infos = {
            "final_obs": final_obs,
            "_final_obs": ended,
            "episode": {"r": lengths.float(), "l": lengths},  # each step is worth 1
            "_episode": ended,
        }
        return self.state.clone(), torch.ones_like(x), terminated, truncated, infos

    def dynamics(self, state: Tensor, actions: Tensor) -> Tensor:
        """States (N, 4), actions (N,) -> next states (N, 4), by Euler's method."""
        _, x_dot, theta, theta_dot = state.unbind(dim=1)
        cos = theta.cos()
        sin = theta.sin()
        moment = self.pole_mass * self.half_length
        force = self.force * (2 * actions - 1)
        push = (force + moment * theta_dot.square() * sin) / self.total_mass
        length = self.half_length * (4 / 3 - self.pole_mass * cos.square() / self.total_mass)
        theta_acc = (self.gravity * sin - cos * push) / length
        x_acc = push - moment * theta_acc * cos / self.total_mass
        changes = torch.stack([x_dot, x_acc, theta_dot, theta_acc], dim=1)
        return state + self.tau * changes


# Networks


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64; weights are orthogonal at first, `gain` scales the last layer's."""
    first = nn.Linear(inputs, 64)
    second = nn.Linear(64, 64)
    last = nn.Linear(64, outputs)
    layers = first, second, last
    gains = math.sqrt(2), math.sqrt(2), gain
    for layer, scale in zip(layers, gains, strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(
        first,
        nn.Tanh(),
        second,
        nn.Tanh(),
        last,
    )


class ActorCritic(nn.Module):
    """Categorical policy and the value of a state, a network each."""

    def __init__(self, obs_dim: int, num_actions: int):
        super().__init__()
        self.critic = mlp(obs_dim, 1, gain=1.0)
        self.actor = mlp(obs_dim, num_actions, gain=0.01)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs (B, O) -> log-probabilities of the actions (B, A), values (B,)."""
        log_policy = F.log_softmax(self.actor(obs), dim=-1)
        values = self.critic(obs).squeeze(-1)
        return log_policy, values


# Storage


class Batch(NamedTuple):
    """B steps of a rollout; log_probs and values as they were when it was made."""

    obs: Tensor  # (B, O)
    actions: Tensor  # (B,) int64
    log_probs: Tensor  # (B,), these and what follows float32
    values: Tensor  # (B,)
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,)


class Rollout(NamedTuple):
    """A step of N environments or, with T as first dimension, T of them; float32 on the device."""

    obs: Tensor  # (N, O)
    actions: Tensor  # (N,) int64
    log_probs: Tensor  # (N,)
    values: Tensor  # (N,)
    rewards: Tensor  # (N,)
    next_values: Tensor  # (N,) of what follows in the same episode, 0 after a termination
    ended: Tensor  # (N,) bool, of either kind
    episode_returns: Tensor  # (N,) of the episode so far


# Losses


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, ended: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16) -> advantages (T, N).

    All (T, N). `next_values` is the value of what follows each step in its own episode: 0 after a
    termination, that of the final observation after a truncation. `ended` is 1 after either.
    """
    deltas = rewards + gamma * next_values - values
    weights = gamma * lam * (1 - ended)
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + weights[t] * advantage
        advantages[t] = advantage
    return advantages


def policy_loss(log_ratios: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Clipped surrogate objective (arXiv:1707.06347, equation 7), negated -> loss ()."""
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    objectives = torch.min(advantages * ratios, advantages * clipped)
    return -objectives.mean()


def value_loss(values: Tensor, batch: Batch, clip_coef: float | None) -> Tensor:
    """Half the mean squared error of the values -> loss ().

    With a clip_coef, the larger of this and the error of the old value plus its clipped change.
    """
    errors = (values - batch.returns).square()
    if clip_coef is not None:
        change = (values - batch.values).clamp(-clip_coef, clip_coef)
        clipped_errors = (batch.values + change - batch.returns).square()
        errors = torch.max(errors, clipped_errors)
    return 0.5 * errors.mean()


def ppo_loss(model: ActorCritic, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a minibatch (equation 9) and what is logged of it -> loss (), {name: tensor ()}."""
    log_policy, values = model(batch.obs)
    log_probs = log_policy.gather(1, batch.actions[:, None]).squeeze(1)
    log_ratios = log_probs - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    of_policy = policy_loss(log_ratios, advantages, args.clip_coef)
    value_clip = args.clip_coef if args.clip_vloss else None
    of_value = value_loss(values, batch, value_clip)
    entropies = -(log_policy.exp() * log_policy).sum(dim=1)
    entropy = entropies.mean()
    loss = of_policy - args.ent_coef * entropy + args.vf_coef * of_value
    with torch.no_grad():
        ratios = log_ratios.exp()
        clipped = (ratios - 1).abs() > args.clip_coef
        metrics = {
            "losses/policy_loss": of_policy.detach(),
            "losses/value_loss": of_value.detach(),
            "losses/entropy": entropy.detach(),
            "losses/old_approx_kl": -log_ratios.mean(),
            "losses/approx_kl": (ratios - 1 - log_ratios).mean(),  # joschu.net/blog/kl-approx.html
            "losses/clipfrac": clipped.float().mean(),
        }
    return loss, metrics


# Agent


class PPO(nn.Module):
    """Networks, optimizer and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, obs_dim: int, num_actions: int, device: torch.device):
        super().__init__()
        self.args = args
        self.model = ActorCritic(obs_dim, num_actions).to(device)
        self.optimizer = Adam(self.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
        self.optimizers = (self.optimizer,)

    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """obs (N, O), exponential noise (N, A) -> actions (N,), log_probs (N,), values (N,).

        With probabilities p and exponential noise q, the largest p / q is a draw from p.
        """
        with torch.no_grad():
            log_policy, values = self.model(obs)
            actions = (log_policy - noise.log()).argmax(dim=1)
            log_probs = log_policy.gather(1, actions[:, None]).squeeze(1)
            return actions, log_probs, values

    def value(self, obs: Tensor) -> Tensor:
        """obs (N, O) -> values (N,)."""
        with torch.no_grad():
            return self.model.critic(obs).squeeze(-1)

    def prepare(self, rollout: Rollout) -> Batch:
        """A rollout -> B = T N steps to learn from."""
        advantages = compute_gae(
            rollout.rewards,
            rollout.values,
            rollout.next_values,
            rollout.ended.float(),
            self.args.gamma,
            self.args.gae_lambda,
        )
        batch = Batch(
            obs=rollout.obs,
            actions=rollout.actions,
            log_probs=rollout.log_probs,
            values=rollout.values,
            advantages=advantages,
            returns=advantages + rollout.values,
        )
        return Batch._make([column.flatten(0, 1) for column in batch])

    def update(self, batch: Batch, index: Tensor) -> dict[str, Tensor]:
        """One gradient step on the minibatch `batch[index]`."""
        minibatch = Batch._make([column[index] for column in batch])
        loss, metrics = ppo_loss(self.model, minibatch, self.args)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        return metrics

    def learn(self, batch: Batch, order: Tensor) -> dict[str, Tensor]:
        """An epoch of M minibatches in the order of a permutation (B,) -> {name: tensor (M,)}."""
        indices = order.view(self.args.num_minibatches, -1)
        rows = [self.update(batch, index) for index in indices]
        return default_collate(rows)


# Training


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    check_env(args)
    on_gpu = args.cuda and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches or batch_size == args.num_minibatches:
        steps = f"{batch_size:,} steps"
        raise SystemExit(f"--num-minibatches: does not divide {steps} into two or more each")
    warmup_steps = STEADY_AFTER * batch_size
    run = Run(args, device, batch_size, warmup_steps, trace_after=3, trace_iterations=1)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    envs = CartPole(args.num_envs, device)
    obs_dim = envs.single_observation_space.shape[0]
    num_actions = envs.single_action_space.n
    agent = PPO(args, obs_dim, num_actions, device)
    if run.checkpoint:
        run.restore(agent)
    obs, _ = envs.reset(seed=args.seed + run.start_step)

    with run:
        while run.step < run.total_steps:
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - run.step / run.total_steps
            agent.optimizer.param_groups[0]["lr"] = learning_rate

            # 1. Roll out: T steps with the policy as it is.
            shape = args.num_steps, args.num_envs
            noise = torch.empty(*shape, num_actions, device=device).exponential_()
            starts = torch.empty(*shape, obs_dim, device=device).uniform_(-0.05, 0.05)
            rows = []
            for t in range(args.num_steps):
                with run.stage("inference"):
                    actions, log_probs, values = agent.act(obs, noise[t])
                with run.stage("simulation"):
                    next_obs, rewards, terminated, _, infos = envs.step(actions, starts[t])
                with run.stage("inference"):
                    next_values = agent.value(infos["final_obs"]) * ~terminated
                rows.append(
                    Rollout(
                        obs=obs,
                        actions=actions,
                        log_probs=log_probs,
                        values=values,
                        rewards=rewards,
                        next_values=next_values,
                        ended=infos["_episode"],
                        episode_returns=infos["episode"]["r"],
                    )
                )
                obs = next_obs  # where an episode ended, already the next episode's first
            with run.stage("replay"):
                rollout = default_collate(rows)  # stacks each field
            run.step += batch_size

            # 2. Learn from it in several epochs.
            with run.stage("backpropagation"):
                batch = agent.prepare(rollout)
                clipfracs = []
                for _ in range(args.update_epochs):
                    order = torch.randperm(batch_size, device=device)
                    metrics = agent.learn(batch, order)
                    clipfracs.append(metrics["losses/clipfrac"])
                    approx_kl = metrics["losses/approx_kl"][-1]
                    if args.target_kl is not None and approx_kl > args.target_kl:
                        break

            # 3. Log the last minibatch's losses; clipfrac is the mean over all of them.
            row = {tag: values[-1] for tag, values in metrics.items()}
            row["losses/clipfrac"] = torch.cat(clipfracs).mean()
            unexplained = (batch.returns - batch.values).var()
            unexplained /= batch.returns.var().clamp(min=1e-12)
            row["losses/explained_variance"] = 1 - unexplained
            row["charts/learning_rate"] = learning_rate
            returns = rollout.episode_returns.where(rollout.ended, math.nan)
            with run.stage("backpropagation"):  # whose work this waits for
                mean_return = returns.nanmean().item()
            if math.isfinite(mean_return):  # an episode has ended; each step is worth 1
                row["charts/episodic_return"] = mean_return
                row["charts/episodic_length"] = mean_return
            run.log(row)

            # 4. Save and evaluate, now and then and at the end.
            if run.due(args.checkpoint_every, at_end=args.save_model):
                with run.stage("checkpoint"):
                    run.save(agent)
            if run.due(args.eval_every, at_end=args.capture_video):
                with run.stage("evaluation"):
                    video = run.dir / f"videos/step-{run.step}"
                    eval_return = evaluate(agent, args, video)
                    run.write({"charts/eval_return": eval_return})
                    line = f"evaluation at {run.step:,}: {eval_return:,.1f}"
                    run.bar.write(line, file=sys.stderr)
            run.tick()
    return run.dir


# What a reader may skip: evaluation, then the records around a run


def evaluate(agent: PPO, args: Args, video: Path) -> float:
    """Mean return of K of Gymnasium's own episodes from always the same starts.

    Each action is the likeliest one.
    """
    makers = [lambda: gym.make(args.env_id)] * args.eval_episodes
    if args.capture_video:
        env = gym.make(args.env_id, render_mode="rgb_array")
        env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        makers[0] = lambda: env
    envs = gym.vector.SyncVectorEnv(makers)
    device = next(agent.parameters()).device
    returns = np.zeros(args.eval_episodes)
    running = np.ones(args.eval_episodes, dtype=bool)
    unseen = args.seed + 2**31  # not the states of training
    obs, _ = envs.reset(seed=unseen)
    while running.any():  # each has a time limit
        inputs = torch.as_tensor(obs, device=device)
        with torch.no_grad():
            log_policy, _ = agent.model(inputs)
        actions = log_policy.argmax(dim=1).cpu().numpy()
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        returns += running * rewards
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


# >>> run: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
RANGES = {  # flags -> the least and the most
    "num_envs num_steps batch_size": (1, 1e7),
    """total_timesteps num_minibatches update_epochs eval_episodes buffer_size learning_starts
    policy_frequency target_network_frequency""": (1, 1e12),
    "utd_ratio clip_coef max_grad_norm target_kl alpha exploration_fraction": (1e-12, 1e12),
    "gamma gae_lambda q_lambda start_e end_e tau": (0, 1),
    "randomize": (0, 0.9),
    """seed checkpoint_every eval_every learning_rate policy_lr q_lr ent_coef vf_coef max_staleness
    exploration_noise policy_noise noise_clip desired_kl""": (0, 1e12),
}


class Stopwatch:  # seconds per stage, steps per second; leanrl/stopwatch.py is the manual
    def __init__(self, device, mode="time", warmup_steps=0, trace_after=500, trace_iterations=20):
        self.mode = mode
        self.on_gpu = device.type == "cuda"
        self.warmup_steps = warmup_steps
        self.trace_after = trace_after
        self.plan = torch.profiler.schedule(wait=0, warmup=1, active=trace_iterations, repeat=1)
        self.warmup_seconds = self.profiler = self.untraced = None
        self.born = perf_counter()
        self.env_steps = 0
        self.begin_window()

    def begin_window(self):  # at construction and after the warm-up
        self.seconds = Counter()
        self.open = ["untracked"]
        self.ranges = []  # of the profiler, one per open stage
        self.samples = []  # of sampled iterations: a CUDA event wherever a stage begins or ends
        self.sampled = False
        self.nvml = []
        self.first_step = self.env_steps
        self.iterations = 0
        self.start = self.since = perf_counter()
        self.cpu = [(self.since - self.born, time.process_time())]

    def charge(self):  # the time since the last call belongs to the innermost open stage
        now = perf_counter()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now
        if self.sampled:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((self.open[-1], event))

    def stage(self, name):  # with watch.stage("replay"): a stage inside another one pauses it
        if self.mode == "off" and name != "evaluation":
            return nullcontext()
        self.charge()
        self.open.append(name)
        if self.profiler:
            self.ranges.append(torch.profiler.record_function("stopwatch:" + name).__enter__())
        return self

    def __enter__(self):
        pass

    def __exit__(self, *error):
        if self.ranges:
            self.ranges.pop().__exit__(*error)
        self.charge()
        self.open.pop()

    def tick(self, env_steps):  # ends an iteration; `env_steps` counts all since construction
        self.charge()
        if self.sampled:
            self.samples.append(self.events)
        self.env_steps = env_steps
        self.iterations += 1
        if self.warmup_seconds is None and env_steps >= self.warmup_steps:
            self.warmup_seconds = self.measure(env_steps)["seconds"]
            self.begin_window()
        elif self.profiler:
            self.profiler.step()
        elif self.mode == "trace" and self.warmup_seconds and self.iterations == self.trace_after:
            self.untraced = self.measure(env_steps)
            self.profiler = torch.profiler.profile(schedule=self.plan).__enter__()
        now = self.since - self.born
        if now - self.cpu[-1][0] >= 1 and not self.profiler:
            self.cpu.append((now, time.process_time()))
            if self.on_gpu:
                with suppress(Exception):  # nvidia-ml-py is optional
                    self.nvml.append((now, torch.cuda.utilization()))
        timed = self.on_gpu and self.mode != "off" and not self.profiler
        self.sampled = timed and self.iterations % 61 == 0
        if self.sampled:
            self.events = []
            self.charge()

    def measure(self, env_steps):  # of the steady window or, in the warm-up, of the run so far
        if self.on_gpu:
            torch.cuda.synchronize()  # what is still queued belongs to it
        self.charge()
        steps = env_steps - self.first_step
        seconds = self.since - self.start - self.seconds["evaluation"]
        return {
            "sps": env_steps / (self.since - self.born),
            "sps_steady": self.warmup_seconds and steps / seconds,
            "warmup_seconds": self.warmup_seconds,
            "env_steps": steps,
            "iterations": self.iterations,
            "seconds": seconds,
            "stages": dict(self.seconds),
            "cpu_seconds": [*self.cpu, (self.since - self.born, time.process_time())],
        }

    def report(self, path):  # writes the report and a trace beside it, then prints a table
        report = self.untraced or self.measure(self.env_steps)
        report["wall_seconds"] = perf_counter() - self.born
        report["nvml_percent"] = self.nvml
        report["gpu_stages"] = Counter()
        for events in self.samples:
            for (_, first), (name, last) in pairwise(events):
                scale = report["iterations"] / len(self.samples)  # one stands for so many
                report["gpu_stages"][name] += first.elapsed_time(last) / 1e3 * scale
        write_json(path, report)
        if self.profiler:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(path.with_name("trace.json.gz")))
        for name, seconds in report["stages"].items():  # last, because nobody may be reading
            share = f"{1e6 * seconds / max(report['env_steps'], 1):12,.1f} us/step"
            print(f"{name:16}{seconds:12,.2f} s{share}", file=sys.stderr)
        print(f"{report['sps_steady'] or math.nan:,.1f} steps/s, {path}", file=sys.stderr)
        return report


class Run:  # around a training: directory, metrics, checkpoints, signals, stopwatch
    def __init__(self, args, device, steps_per_iteration, warmup_steps, **trace):
        self.args = args
        self.flags = dict(vars(args))  # as they were given: a loop may anneal them
        self.checkpoint = load_checkpoint(args) if args.resume is not None else {}
        self.start_step = self.step = self.checkpoint.get("global_step", 0)  # environment steps
        self.steps_per_iteration = steps_per_iteration
        self.total_steps = args.total_timesteps // steps_per_iteration * steps_per_iteration
        begin = max(self.step, getattr(args, "learning_starts", 0))
        if begin >= self.total_steps:
            raise SystemExit(f"--total-timesteps: no iteration is left after {begin:,} steps")
        env_id = self.checkpoint.get("args", vars(args))["env_id"]
        if env_id != args.env_id:
            raise SystemExit(f"--env-id: the checkpoint is of {env_id}")
        self.watch = Stopwatch(device, args.stopwatch, warmup_steps, **trace)
        self.stage = self.watch.stage

    def restore(self, agent):  # networks, optimizers and generators of the checkpoint
        with one_line("--resume", KeyError):  # a part is missing or of another size
            agent.load_state_dict(self.checkpoint["agent"])
            states = self.checkpoint["optimizers"]
            for optimizer, state in zip(agent.optimizers, states, strict=True):
                state = optimizer.state_dict() | {"state": state}  # rates are flags
                optimizer.load_state_dict(state)
            cpu_state, *gpu_states = self.checkpoint["generators"]
            torch.set_rng_state(cpu_state)
            torch.cuda.set_rng_state_all(gpu_states[: torch.cuda.device_count()])
        print(f"resumed at step {self.step:,}, with fresh episodes", file=sys.stderr)

    def save(self, agent, **checkpoint):  # checkpoint.pt: also what is given by name
        if not all(parameter.isfinite().all() for parameter in agent.parameters()):
            raise SystemExit(f"step {self.step:,}: weights are not finite; the checkpoint stays")
        checkpoint |= {
            "made_by": Path(__file__).name,
            "args": self.flags,
            "global_step": self.step,
            "agent": agent.state_dict(),
            "optimizers": [each.state_dict()["state"] for each in agent.optimizers],
            "generators": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()],
        }
        with replacing(self.dir / "checkpoint.pt") as file:
            torch.save(checkpoint, file)

    def __enter__(self):  # makes the run directory and opens its records
        args = self.args
        resumed = args.resume is not None
        self.dir = Path(args.resume) if resumed else make_directory(args)
        with one_line(self.dir):  # the lock is held until the process has ended
            self.lock = open(self.dir / ".lock", "w")
            os.lockf(self.lock.fileno(), os.F_TLOCK, 0)
        self.suffix = f"_{self.step}.json" if resumed else ".json"
        config = {
            "args": vars(args),
            "command": " ".join(sys.argv),
            "versions": {"torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if self.watch.on_gpu else None,
            "processor": None,
            "vectors": torch.backends.cpu.get_cpu_capability(),
        }
        with suppress(OSError, TypeError):  # not Linux, or it does not say
            cpus = Path("/proc/cpuinfo").read_text()
            config["processor"] = re.search("model name.*: (.*)", cpus)[1]
        write_json(self.dir / f"config{self.suffix}", config)
        if args.track:
            with one_line("--track", ImportError):
                import wandb

            wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                id=self.dir.name,
                resume="allow",
                config=config,
                sync_tensorboard=True,
            )
        threading.excepthook = print_unless_disk_is_full
        self.over = threading.Event()
        self.core_watcher = threading.Thread(target=watch_cores, args=[self.over], daemon=True)
        with one_line(self.dir):
            self.core_watcher.start()
            self.writer = SummaryWriter(self.dir, purge_step=self.step + 1 if resumed else None)
        self.bar = tqdm.tqdm(
            total=self.total_steps,
            initial=self.step,
            unit="step",
            disable=sys.stderr is None,  # it has been closed
        )
        self.caught = catch_signals()

    def __exit__(self, kind, error, traceback):  # whatever has ended the run, it leaves records
        with undisturbed(forget=True):
            self.over.set()
            with suppress(OSError):  # the disk may be full
                self.writer.close()
            with suppress(OSError):  # nobody may be reading
                self.bar.close()
            self.watch.report(self.dir / f"stages{self.suffix}")
            self.core_watcher.join()
        for number in self.caught:
            signal.signal(number, signal.SIG_DFL)
        if kind is KeyboardInterrupt or kind is SystemExit and not error.code:
            raise SystemExit(f"interrupted after {self.step:,} steps")
        if "allocate" in str(error):  # as PyTorch says on each device
            raise SystemExit(f"step {self.step:,}: {error}".splitlines()[0])

    def due(self, every, at_end=False):  # every so many steps (0: never), and when the run ends
        if self.step >= self.total_steps:
            return at_end or every > 0
        return every > 0 and self.step % every < self.steps_per_iteration

    def log(self, metrics):  # {tag: number or tensor ()}; one that is not finite ends the run
        row = {}
        with self.stage("backpropagation"):  # whose work the first of these reads waits for
            for tag, value in metrics.items():
                row[tag] = float(value)
                if not math.isfinite(row[tag]):
                    raise SystemExit(f"step {self.step:,}: {tag} is not finite: {row[tag]}")
        with self.stage("logging"):
            speed = self.watch.measure(self.step - self.start_step)
            row["charts/SPS"] = speed["sps"]
            if speed["sps_steady"]:
                row["charts/SPS_steady"] = speed["sps_steady"]
            self.write(row)
            self.bar.update(self.step - self.bar.n)

    def write(self, row, step=None):  # {tag: number} to TensorBoard, at this step or another one
        if "charts/episodic_return" in row:
            self.bar.set_postfix_str(f"return {row['charts/episodic_return']:,.1f}", refresh=False)
        with one_line(self.dir), undisturbed():  # a signal inside would keep TensorBoard's lock
            for tag, value in row.items():
                self.writer.add_scalar(tag, value, step or self.step)

    def tick(self):  # ends an iteration, outside of every stage
        self.watch.tick(self.step - self.start_step)


def watch_cores(over):  # OpenMP's threads wait awake, but asleep while others want the cores
    before = seconds_without_core()
    teams = []  # libgomp's threads sleep while its teams have more of them than there are cores
    quiet = patience = 0  # seconds
    ended = False
    while not ended:
        ended = over.wait(1)
        now = seconds_without_core()
        threads = torch.get_num_threads()
        crowded = threads > 1 and now - before > 0.1 * threads
        before = now
        quiet = 0 if crowded else quiet + 1
        if crowded and not teams and not ended:
            patience = min(2 * patience + 1, 60)  # the others may be a simulator's, and come back
            calm = threading.Event()
            for _ in range(math.ceil(len(os.sched_getaffinity(0)) / (threads - 1))):
                teams.append(threading.Thread(target=keep_team, args=[calm], daemon=True))
                teams[-1].start()
        elif teams and (ended or quiet >= patience):
            calm.set()
            for team in teams:  # at the end of the process none may be inside of PyTorch
                team.join()
            teams = []


def keep_team(calm):  # of OpenMP: each thread that computes has its own
    torch.ones(100_000).sum()
    calm.wait()


def seconds_without_core():  # how long threads of this process, summed, were ready but had no core
    nanoseconds = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            nanoseconds += int(path.read_text().split()[1])
    return nanoseconds / 1e9


def catch_signals():  # KeyboardInterrupt for all but those that are ignored, as under nohup
    caught = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in caught:
        signal.signal(number, interrupt)
    return caught


def interrupt(number, frame):  # once: a second one would come in the middle of the records
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def parse_args(kind):  # with --resume, flags that are not given stay as they were
    args = tyro.cli(kind)
    if args.resume is not None:
        args = tyro.cli(kind, default=kind(**load_checkpoint(args)["args"]))
    for names, (least, most) in RANGES.items():  # other flags, of a copy, may be anything
        for name in names.split():
            value = getattr(args, name, None)
            if value is not None and not least <= value <= most:
                raise SystemExit(f"--{name.replace('_', '-')}: {value} is out of range")
    return args


def load_checkpoint(args):  # of the run directory --resume; tensors are read when they are used
    path = Path(args.resume, "checkpoint.pt")
    try:
        found = torch.load(path, map_location="cpu", mmap=True)
        made_by = found["made_by"]
        changed = set(found["args"]) ^ set(vars(args))
    except Exception:
        raise SystemExit(f"--resume: there is no {path} of this version") from None
    if made_by != Path(__file__).name:
        raise SystemExit(f"--resume: {path} was made by {made_by}")
    if changed:
        raise SystemExit(f"--resume: {path} is of other flags: {', '.join(sorted(changed))}")
    return found


def print_unless_disk_is_full(failure):  # TensorBoard's thread has met it; `write` says so, too
    if failure.exc_type is not OSError:
        threading.__excepthook__(failure)


def make_directory(args):  # runs/ENVIRONMENT__EXPERIMENT__SEED__SECOND; the first that is free
    runs = Path("runs")
    with one_line(runs):
        runs.mkdir(exist_ok=True)
    for second in count(int(time.time())):
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{second}"
        path = runs / re.sub(r"[^\w.-]", "_", name)
        with one_line(path), suppress(FileExistsError):
            path.mkdir()
            return path


def check_env(args):  # says before the training what the environment or its videos lack
    errors = Exception if args.capture_video else ImportError  # OpenGL has errors of all kinds
    filmed = {"render_mode": "rgb_array"} if args.capture_video else {}
    with one_line("--env-id", errors, gym.error.Error):
        env = gym.make(args.env_id, **filmed)
    if args.capture_video:
        with one_line("--capture-video", Exception):
            import moviepy  # noqa: F401

            env.reset()
            env.render()
    env.close()


@contextmanager
def undisturbed(forget=False):  # a signal that comes meanwhile counts afterwards, or not at all
    came = []
    handlers = {}
    for number in (*SIGNALS, signal.SIGCHLD):  # the last: a process of the run has died
        handlers[number] = signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if not forget:
            for number in came:
                signal.raise_signal(number)


@contextmanager
def one_line(what, *errors):  # no traceback where the disk, the memory or these are to blame
    try:
        yield
    except BlockingIOError:
        raise SystemExit(f"--resume: the run in {what} is still at work") from None
    except (OSError, RuntimeError, *errors) as error:
        if isinstance(error.__context__, OSError):  # torch.save hides it behind one of its own
            error = error.__context__
        text = str(error) or type(error).__name__
        text = text.replace(":\n\t", ": ")  # which part does not fit is in PyTorch's second line
        raise SystemExit(f"{what}: {text}".splitlines()[0]) from None


@contextmanager
def replacing(path):  # a file to write to: whenever the process dies, `path` is whole, old or new
    partial = path.with_suffix(".partial")
    try:
        with one_line(path), partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path, content):
    with replacing(path) as file:
        file.write(json.dumps(content, indent=2).encode())


# <<< run <<<


if __name__ == "__main__":
    main(parse_args(Args))
