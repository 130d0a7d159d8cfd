"""Proximal Policy Optimization (PPO) on many MuJoCo worlds in one batch: the baseline.

    python leanrl/ppo_mujoco_worlds.py --eval-every 1000000            # 64 HalfCheetahs, 5 M steps
    python leanrl/ppo_mujoco_worlds.py --num-envs 4096 --num-steps 16  # for a GPU, on mujoco_warp

Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv:1707.06347).

Physics is MuJoCo's C engine in threads on a CPU and mujoco_warp on a GPU; observations, rewards and
terminations are functions of its state, those of Gymnasium's environments, in which the policy is
evaluated. What differs from ppo_continuous_action.py: running statistics on the device normalize
observations and returns, not rewards; the first rollout only measures them. The policy's deviation
is exp(-1) at first, not 1. The learning rate rises or falls so that the KL divergence of a
rollout's updates stays near desired_kl (as in rl_games and rsl_rl, but once a rollout and from the
last minibatch), and desired_kl is annealed. Gamma may rise to end_gamma in the middle half of a run
(arXiv:1512.02011): with a long horizon from the start Hopper may learn to stand still, with a
short one until the end to leap and fall. There is no norm_adv, clip_vloss or target_kl: advantages
are always normalized, the value loss is never clipped, no divergence ends the epochs. Defaults that
are not CleanRL's: env_id worlds/HalfCheetah-v5, total_timesteps 5,000,000, num_envs 64,
num_steps 128, learning_rate 1e-3, num_minibatches 16, update_epochs 4, gae_lambda 0.9.
Its twin ppo_mujoco_worlds_torchcompile.py is this file with the hunks marked `# speed:`.
Shapes: T steps of a rollout, N environments, B batch, O observation, A action.
"""

import argparse
import atexit
import copy
import json
import math
import random
import re
import signal
import sys
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

import gymnasium as gym
import mujoco_worlds  # noqa: F401  # registers worlds/HalfCheetah-v5 and others
import numpy as np
import torch
import tqdm
import tyro
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run directory's name
    seed: int = 1  # seed of the environments and of every random generator
    torch_deterministic: bool = True  # use deterministic cuDNN kernels
    cuda: bool = True  # train on CUDA where there is a device
    device: str | None = None  # train there instead, whatever --cuda says: mps, xpu
    torch_threads: int = 1  # of a CPU; more pay only while nothing else wants the cores
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32 products
    track: bool = False  # also send the run to Weights & Biases
    wandb_project_name: str = "leanRL"  # the wandb project
    wandb_entity: str | None = None  # the wandb team
    capture_video: bool = False  # film an episode of each evaluation; there is one at the end
    save_model: bool = False  # write checkpoint.pt at the end of the run, also if it is interrupted
    checkpoint_every: int = 0  # also write it every so many environment steps; 0: never
    resume: str | None = None  # go on with this run directory; flags that are not given stay
    eval_every: int = 0  # evaluate every so many environment steps, and at the end; 0: never
    eval_episodes: int = 10  # episodes per evaluation, each in an environment of its own
    stopwatch: Literal["time", "trace"] = "time"  # time stages, or also write a trace

    env_id: str = "worlds/HalfCheetah-v5"  # one of mujoco_worlds.py, or MODULE:ID, a task of yours
    physics: Literal["auto", "c", "warp"] = "auto"  # MuJoCo's C or mujoco_warp; auto: C on a CPU
    euler_timestep: float = 0.0  # s, longest step of Euler's method in training; 0: as the model
    randomize: float = 0.0  # 0.2: each world's masses, friction, motors are 0.8 to 1.2 the model's
    total_timesteps: int = 5_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 64  # environments stepped side by side
    num_steps: int = 128  # steps of a rollout in each environment
    learning_rate: float = 1e-3  # at first; then by desired_kl, 1e-5 to 1e-2, also after --resume
    desired_kl: float = 0.03  # KL divergence that updates of a rollout should have; 0: any
    anneal_lr: bool = True  # lower desired_kl linearly until MIN_KL; without one, the rate to 0
    gamma: float = 0.99  # discount factor at first
    end_gamma: float | None = None  # to which it rises in the middle half of the run
    gae_lambda: float = 0.9  # lambda of generalized advantage estimation
    num_minibatches: int = 16  # minibatches per epoch
    update_epochs: int = 4  # passes over a rollout
    clip_coef: float = 0.2  # how far the ratio of new to old probabilities may go from 1
    ent_coef: float = 0.0  # weight of the entropy in the loss
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it

    def __post_init__(self):
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches or batch_size == self.num_minibatches:
            raise ValueError(f"--num-minibatches: {batch_size:,} steps, two or more in each")
        if self.total_timesteps < 2 * batch_size:  # the first rollout only measures
            raise ValueError(f"--total-timesteps: two rollouts have {2 * batch_size:,} steps")
        if not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1):
            raise ValueError("--gamma and --gae-lambda lie between 0 and 1")
        if self.end_gamma is not None and not self.gamma <= self.end_gamma < 1:
            raise ValueError("--end-gamma is at least --gamma, and below 1")


MIN_KL = 0.004  # annealing stops here: smaller updates would waste the rest of the run
STEADY_AFTER = 3  # rollouts; with the default epochs a variant has captured all by then


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
    """Gaussian policy, whose deviation does not depend on the state, and the value of a state.

    Observations and returns are normalized by the mean statistics of all rollouts so far. The
    policy sees the first actor_dim numbers of an observation, which is all unless a task says so.
    """

    def __init__(self, obs_dim: int, actor_dim: int, action_dim: int):
        super().__init__()
        self.actor_dim = actor_dim
        self.obs_norm = nn.BatchNorm1d(obs_dim, affine=False, momentum=None)
        self.return_norm = nn.BatchNorm1d(1, affine=False, momentum=None)
        self.critic = mlp(obs_dim, 1, gain=1.0)
        self.actor_mean = mlp(actor_dim, action_dim, gain=0.01)
        # Wide noise at first throws HalfCheetah on its back, where it would learn to slide
        log_std = torch.full((action_dim,), -1.0)
        self.actor_logstd = nn.Parameter(log_std)
        self.eval()

    def update_statistics(self, batch: "Batch") -> None:
        """Takes in a rollout; nothing else changes them."""
        self.train()
        self.obs_norm(batch.obs)  # on a GPU both wait, to read how many they have seen
        self.return_norm(batch.returns[:, None])
        self.eval()

    def normalize(self, obs: Tensor) -> Tensor:
        """obs (B, O) -> what the networks see (B, O)."""
        return self.obs_norm(obs).clamp(-10, 10)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs (B, O) -> mean of the actions (B, A), their log deviation (A,)."""
        mean = self.actor_mean(self.normalize(obs)[:, : self.actor_dim])
        return mean, self.actor_logstd

    def value(self, obs: Tensor) -> Tensor:
        """obs (B, O) -> values (B,), in the units of returns."""
        returns = self.return_norm
        values = self.critic(self.normalize(obs)).squeeze(-1)
        return values * returns.running_var.sqrt() + returns.running_mean


def clipped_mean(mean: Tensor, log_std: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Mean of Gaussian actions (B, A) that are clipped to [low, high], both (A,) -> (B, A).

    Training's actions are that on average. A mean beyond a bound, clipped by itself, would lie at
    the bound, but noise brings some of its actions back inside.
    """
    std = log_std.exp()
    raised = mean_of_positive((low - mean) / std)
    lowered = mean_of_positive((mean - high) / std)
    return mean + std * (raised - lowered)


def mean_of_positive(x: Tensor) -> Tensor:
    """Mean of max(x + noise, 0) over standard normal noise."""
    x = x.clamp(min=-10)  # there it is 0; -inf, where there is no bound, would give nan
    cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    pdf = (-0.5 * x.square()).exp() / math.sqrt(2 * math.pi)
    return x * cdf + pdf


# Storage


class Batch(NamedTuple):
    """B steps of a rollout, float32; log_probs and values as they were when it was made."""

    obs: Tensor  # (B, O)
    actions: Tensor  # (B, A)
    log_probs: Tensor  # (B,)
    values: Tensor  # (B,)
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,)


class Rollout(NamedTuple):
    """A step of N environments, (N, ...) each, or T of them."""

    obs: Tensor  # (T, N, O)
    actions: Tensor  # (T, N, A)
    log_probs: Tensor  # (T, N)
    rewards: Tensor  # (T, N)
    final_obs: Tensor  # (T, N, O) what follows in the same episode
    terminated: Tensor  # (T, N) bool
    ended: Tensor  # (T, N) bool, of either kind
    episode_returns: Tensor  # (T, N) of the episode so far
    episode_lengths: Tensor  # (T, N) of the episode so far


# Losses


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of actions (B, A) under a diagonal Gaussian -> (B,)."""
    z = (actions - mean) * (-log_std).exp()
    log_probs = -0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)
    return log_probs.sum(dim=-1)


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


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """How much of the variance of the returns (B,) the values (B,) explain: 1 is all -> ()."""
    return 1 - (returns - values).var() / returns.var().clamp(min=1e-12)


def ppo_loss(model: ActorCritic, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a minibatch (equation 9) and what is logged of it -> loss (), {name: tensor ()}."""
    mean, log_std = model(batch.obs)
    values = model.value(batch.obs)
    log_ratios = gaussian_log_prob(batch.actions, mean, log_std) - batch.log_probs
    advantages = batch.advantages
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
    errors = (values - batch.returns).square()
    v_loss = 0.5 * errors.mean() / model.return_norm.running_var[0]
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    with torch.no_grad():
        ratios = log_ratios.exp()
        clipped = (ratios - 1).abs() > args.clip_coef
        metrics = {
            "losses/policy_loss": pg_loss.detach(),
            "losses/value_loss": v_loss.detach(),
            "losses/entropy": entropy.detach(),
            "losses/old_approx_kl": -log_ratios.mean(),
            "losses/approx_kl": (ratios - 1 - log_ratios).mean(),  # joschu.net/blog/kl-approx.html
            "losses/clipfrac": clipped.float().mean(),
        }
    return loss, metrics


# Agent


class PPO(nn.Module):
    """Network, optimizer and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, envs: gym.vector.VectorEnv, device: torch.device):
        super().__init__()
        self.args = args
        obs_dim = envs.single_observation_space.shape[0]
        action_dim = envs.single_action_space.shape[0]
        self.model = ActorCritic(obs_dim, envs.actor_dim, action_dim).to(device)
        learning_rate = torch.tensor(args.learning_rate, device=device)
        self.register_buffer("learning_rate", learning_rate)
        gamma = torch.tensor(args.gamma, device=device)
        self.register_buffer("gamma", gamma, persistent=False)  # main sets it for each rollout
        self.optimizer = Adam(self.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
        self.optimizers = (self.optimizer,)

    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """obs (N, O), standard normal noise (N, A) -> actions (N, A), log_probs (N,)."""
        with torch.no_grad():
            mean, log_std = self.model(obs)
            actions = mean + log_std.exp() * noise
            log_probs = gaussian_log_prob(actions, mean, log_std)
            return actions, log_probs

    def value(self, obs: Tensor) -> Tensor:
        """obs (T, N, O) -> values (T, N)."""
        with torch.no_grad():
            values = self.model.value(obs.flatten(0, 1))
            return values.view(obs.shape[:2])

    def prepare(self, rollout: Rollout) -> Batch:
        """A rollout -> B = T N steps to learn from."""
        values = self.value(rollout.obs)
        next_values = self.value(rollout.final_obs) * ~rollout.terminated
        advantages = compute_gae(
            rollout.rewards,
            values,
            next_values,
            rollout.ended.float(),
            self.gamma,
            self.args.gae_lambda,
        )
        batch = Batch(
            obs=rollout.obs,
            actions=rollout.actions,
            log_probs=rollout.log_probs,
            values=values,
            advantages=advantages,
            returns=advantages + values,
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

    def adapt(self, kl: Tensor, desired_kl: float) -> None:
        """The next rollout's rate, by the last minibatch's kl (rsl_rl: after each minibatch)."""
        slower = kl > 2 * desired_kl
        faster = kl < desired_kl / 2
        self.learning_rate.div_(1 + 0.5 * slower)
        self.learning_rate.mul_(1 + 0.5 * faster)
        self.learning_rate.clamp_(1e-5, 1e-2)

    def learn(self, batch: Batch, order: Tensor) -> dict[str, Tensor]:
        """An epoch of M minibatches in the order of a permutation (B,) -> {name: tensor (M,)}."""
        indices = order.view(self.args.num_minibatches, -1)
        rows = [self.update(batch, index) for index in indices]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# Training


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    torch.set_num_threads(args.torch_threads)
    torch.set_flush_denormal(True)  # Adam's averages decay to numbers that are ten times slower
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    default = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    device = torch.device(args.device or default)
    batch_size = args.num_envs * args.num_steps
    steady_after = STEADY_AFTER * batch_size
    run = Run(args, device, batch_size, steady_after, trace_after=3, trace_iterations=1)
    seed = args.seed + run.start_step
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

    envs = gym.make_vec(
        args.env_id,
        num_envs=args.num_envs,
        vectorization_mode="vector_entry_point",
        device=device,
        physics=args.physics,
        euler_timestep=args.euler_timestep,
        randomize=args.randomize,
        seed=args.seed,
    )
    agent = PPO(args, envs, device)
    if args.resume:
        run.restore(agent)

    end_gamma = args.gamma if args.end_gamma is None else args.end_gamma
    obs, _ = envs.reset(seed=seed, options={"stagger": True})
    run.open()
    while not run.ending:
        progress = run.step / run.total_steps
        grown = min(max(2 * progress - 0.5, 0), 1)  # in the middle half the horizon grows
        agent.gamma.fill_(1 - (1 - args.gamma) ** (1 - grown) * (1 - end_gamma) ** grown)
        remaining = 1 - progress if args.anneal_lr else 1.0
        if args.desired_kl == 0:
            agent.learning_rate.fill_(args.learning_rate * remaining)
        agent.optimizer.param_groups[0]["lr"] = agent.learning_rate.item()

        # 1. Roll out: T steps with the policy as it is.
        noise = torch.randn(args.num_steps, *envs.action_space.shape, device=device)
        rows = []
        for t in range(args.num_steps):
            run.stage("inference")
            actions, log_probs = agent.act(obs, noise[t])
            run.stage("simulation")
            next_obs, rewards, terminated, _, infos = envs.step(actions)
            step = Rollout(
                obs=obs,
                actions=actions,
                log_probs=log_probs,
                rewards=rewards,
                final_obs=infos["final_obs"],
                terminated=terminated,
                ended=infos["_episode"],
                episode_returns=infos["episode"]["r"],
                episode_lengths=infos["episode"]["l"],
            )
            rows.append(step)
            obs = next_obs  # where an episode ended, already the next episode's first
        run.stage("replay")
        rollout = Rollout._make([torch.stack(column) for column in zip(*rows, strict=True)])
        run.step += batch_size

        # 2. Learn from it in several epochs. The first rollout only measures.
        run.stage("backpropagation")
        row = {}
        batch = agent.prepare(rollout)
        if run.step > batch_size:
            clipfracs = []
            for _ in range(args.update_epochs):
                order = torch.randperm(batch_size, device=device)
                metrics = agent.learn(batch, order)
                clipfracs.append(metrics["losses/clipfrac"])
            row |= {tag: values[-1] for tag, values in metrics.items()}  # of the last minibatch
            row["losses/clipfrac"] = torch.cat(clipfracs).mean()  # of all
        agent.model.update_statistics(batch)
        known = rollout.ended & rollout.episode_returns.isfinite()  # the first are NaN
        if known.any():  # waits for the device
            row["charts/episodic_return"] = rollout.episode_returns[known].mean()
            row["charts/episodic_length"] = rollout.episode_lengths[known].mean()
        run.tick()

        # 3. Log.
        row["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
        row["charts/learning_rate"] = agent.learning_rate
        row["charts/broken_worlds"] = envs.broken
        row["charts/overflows"] = envs.overflows()
        run.log(row)
        if args.desired_kl and run.step > batch_size:
            desired_kl = max(args.desired_kl * remaining, min(args.desired_kl, MIN_KL))
            agent.adapt(row["losses/approx_kl"], desired_kl)

        # 4. Save and evaluate, now and then and at the end.
        if run.due(args.checkpoint_every, at_end=args.save_model):
            run.stage("checkpoint")
            run.save(agent)
        if run.due(args.eval_every, at_end=args.capture_video) and not run.stopped:
            run.stage("evaluation")
            eval_return = evaluate(agent, args, run.dir / f"videos/step-{run.step}")
            run.write({"charts/eval_return": eval_return})
            run.bar.write(f"evaluation at {run.step:,}: {eval_return:,.5g}", file=sys.stderr)
    run.close()
    return run.dir


# Evaluation


def evaluate(agent: PPO, args: Args, video: Path) -> float:
    """Mean return of K episodes in Gymnasium's environments, always the same, without noise."""
    seeds = np.random.SeedSequence(args.seed).generate_state(args.eval_episodes) >> 1
    seeds = seeds.tolist()  # below 2**31, and not training's
    make = partial(gym.make, args.env_id, randomize=args.randomize)
    makers = [partial(make, seed=seed) for seed in seeds]
    if args.capture_video:
        env = make(seed=seeds[0], render_mode="rgb_array")
        env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        makers[0] = lambda: env
    envs = gym.vector.SyncVectorEnv(makers)
    space = envs.single_action_space
    low, high = (torch.as_tensor(x).to(agent.model.actor_logstd) for x in (space.low, space.high))
    returns = np.zeros(args.eval_episodes)
    running = np.ones(args.eval_episodes, dtype=bool)
    generators = random.getstate(), np.random.get_state()  # environments may draw from them
    random.seed(seeds[0])
    np.random.seed(seeds[0])
    obs, _ = envs.reset(seed=seeds)
    while running.any():  # each has a time limit
        inputs = torch.as_tensor(obs).to(agent.model.actor_logstd)
        with torch.no_grad():
            mean, log_std = agent.model(inputs)
            actions = clipped_mean(mean, log_std, low, high)
        actions = actions.cpu().numpy().clip(space.low, space.high)  # against rounding
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        returns += running * rewards
        running &= ~(terminated | truncated)
    envs.close()
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    return float(returns.mean())


# >>> run: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>
class Stopwatch:
    """Seconds per stage and steady steps/s; with CUDA also the GPU's seconds per stage, sampled."""

    def __init__(self, device, warmup_steps=0, trace=False, trace_after=500, trace_iterations=20):
        self.on_cuda = device.type == "cuda"
        self.backend = torch.get_device_module(device)
        self.warmup_steps = warmup_steps
        self.trace_after = trace_after if trace else 0  # iterations of the window
        self.plan = torch.profiler.schedule(wait=0, warmup=1, active=trace_iterations, repeat=1)
        self.warmup_seconds = self.profiler = self.sampling = None
        self.annotation = nullcontext()  # the profiler's, of the current stage
        self.current = "untracked"
        self.steps = 0
        self.born = self.last = perf_counter()
        self.begin_window()

    def begin_window(self):
        self.start = self.last
        self.first_step = self.steps
        self.seconds = Counter()
        self.gpu_seconds = Counter()
        self.iterations = self.samples = 0

    def stage(self, name):
        """Ends the current stage; this one lasts until the next one or the tick."""
        now = perf_counter()
        self.seconds[self.current] += now - self.last
        self.last = now
        if self.sampling:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((self.current, event))
        if self.profiler:
            self.annotation.__exit__(None, None, None)
            self.annotation = torch.profiler.record_function("stopwatch:" + name)
            self.annotation.__enter__()
        self.current = name

    def tick(self, steps):
        """Ends an iteration; `steps` counts the environment steps since construction."""
        self.stage("untracked")
        if self.sampling:
            self.backend.synchronize()
            self.samples += 1
            for (_, begin), (name, end) in pairwise(self.events):
                self.gpu_seconds[name] += begin.elapsed_time(end) / 1e3
        self.steps = steps
        self.iterations += 1
        if self.warmup_seconds is None and steps >= self.warmup_steps:
            self.warmup_seconds = self.measure()["seconds"]
            self.begin_window()
        elif self.profiler:
            self.profiler.step()
        elif self.warmup_seconds and self.iterations == self.trace_after:
            self.untraced = self.measure()
            self.profiler = torch.profiler.profile(schedule=self.plan)
            self.profiler.start()
        self.sampling = self.on_cuda and self.iterations % 61 == 0
        self.events = []

    def measure(self):
        """Of the steady window or, until the warm-up has ended, of the run so far."""
        if self.profiler:
            return self.untraced
        self.backend.synchronize()  # what is still queued belongs to it
        self.stage(self.current)
        steps = self.steps - self.first_step
        seconds = self.last - self.start - self.seconds["evaluation"]
        wall_seconds = self.last - self.born
        scale = self.iterations / max(self.samples, 1)  # a sample stands for so many iterations
        return {
            "sps": self.steps / wall_seconds,
            "sps_steady": self.warmup_seconds and steps / seconds,
            "warmup_seconds": self.warmup_seconds,
            "wall_seconds": wall_seconds,
            "env_steps": steps,
            "iterations": self.iterations,
            "seconds": seconds,
            "stages": dict(self.seconds),
            "gpu_stages": {name: scale * spent for name, spent in self.gpu_seconds.items()},
        }


class Run:
    """Directory, metrics, checkpoints and stopwatch of a training, which goes on until `ending`."""

    def __init__(self, args, device, steps_per_iteration, steady_after, **trace):
        """`steady_after`: environment steps from the first update until all is compiled."""
        # As they were given, for a loop may anneal them, and without NumPy's numbers
        self.flags = json.loads(json.dumps(vars(args), default=np.generic.item))
        self.steps_per_iteration = steps_per_iteration
        self.checkpoint = load_checkpoint(args.resume)
        self.start_step = self.step = self.checkpoint.get("global_step", 0)
        self.total_steps = args.total_timesteps // steps_per_iteration * steps_per_iteration
        warmup_steps = max(getattr(args, "learning_starts", 0) - self.step, 0) + steady_after
        self.watch = Stopwatch(device, warmup_steps, args.stopwatch == "trace", **trace)
        self.stage = self.watch.stage
        self.backends = {device.type: self.watch.backend, "cpu": torch}
        self.stopped = False
        self.ending = self.step >= self.total_steps

    def stop(self, number, frame):
        """The first signal ends the run after its iteration, a second one the process."""
        self.stopped = True
        signal.signal(number, signal.SIG_DFL)

    def open(self):
        """Makes the run directory; whatever ends the process, it leaves records there."""
        args = argparse.Namespace(**self.flags)
        if args.capture_video:
            import moviepy  # noqa: F401  # missing, it would end the first evaluation
        self.dir = Path(args.resume) if args.resume else make_directory(args)
        self.suffix = f"_{self.step}.json" if args.resume else ".json"
        config = {"args": self.flags, "command": " ".join(sys.argv)}
        config["versions"] = {"torch": torch.__version__}
        config["gpu"] = torch.cuda.get_device_name() if self.watch.on_cuda else None
        (self.dir / f"config{self.suffix}").write_text(json.dumps(config, indent=2))
        if args.track:
            import wandb

            wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                id=self.dir.name,
                resume="allow",
                config=config,
                sync_tensorboard=True,
            )
        self.writer = SummaryWriter(self.dir, purge_step=self.step + 1)
        self.bar = tqdm.tqdm(total=self.total_steps, initial=self.step, unit="step", leave=False)
        atexit.register(self.close)
        self.handlers = {}
        with suppress(ValueError):  # signals belong to the main thread
            for number in signal.SIGINT, signal.SIGTERM:
                self.handlers[number] = signal.signal(number, self.stop)

    def tick(self):
        """Ends an iteration; what comes after it knows whether it was the last one."""
        self.watch.tick(self.step - self.start_step)
        self.ending = self.stopped or self.step >= self.total_steps

    def due(self, every, at_end=False):
        """Whether the iteration passed a multiple of `every` steps (0: never), or was the last."""
        if self.ending:
            return at_end or every > 0
        return every > 0 and self.step % every < self.steps_per_iteration

    def log(self, metrics):
        """{tag: number or tensor ()} and the speed; a metric that is not finite ends the run."""
        self.stage("backpropagation")  # reading a tensor waits for the updates that are queued
        row = {tag: float(value) for tag, value in metrics.items()}
        self.stage("logging")
        for tag, value in row.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"step {self.step:,}: {tag} is {value}")
        row["charts/SPS"] = self.watch.measure()["sps"]
        row["charts/cpu_seconds"] = time.process_time()
        with suppress(Exception):  # without a GPU, or without nvidia-ml-py, which is optional
            row["charts/gpu_percent"] = torch.cuda.utilization()
        self.write(row)
        with suppress(OSError):  # nobody reads any more
            self.bar.update(self.step - self.bar.n)

    def write(self, row, step=None):
        """{tag: number} to TensorBoard; the progress bar shows the last return."""
        for tag, value in row.items():
            self.writer.add_scalar(tag, value, step or self.step)
            if tag.endswith("_return"):
                self.bar.set_postfix_str(f"{tag} {value:,.5g}", refresh=False)

    def save(self, agent, **state):
        """checkpoint.pt, with the dictionaries of tensors or numbers that are given by name."""
        for part in agent.state_dict(), *state.values():
            for name, value in part.items():
                if not torch.as_tensor(value).isfinite().all():
                    raise FloatingPointError(f"step {self.step:,}: {name} is not finite")
        state |= {"args": self.flags, "global_step": self.step, "agent": agent.state_dict()}
        state["optimizers"] = [optimizer.state_dict()["state"] for optimizer in agent.optimizers]
        state["generators"] = {name: x.get_rng_state() for name, x in self.backends.items()}
        partial = self.dir / "checkpoint.partial"
        torch.save(state, partial)
        partial.replace(self.dir / "checkpoint.pt")  # a crash leaves the old one or the new one

    def restore(self, agent):
        """Networks, optimizers and generators; learning rates stay flags -> the checkpoint."""
        checkpoint, self.checkpoint = self.checkpoint, None  # or its file would stay in memory
        agent.load_state_dict(checkpoint["agent"])
        for optimizer, state in zip(agent.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": copy.deepcopy(state)})
        for name in self.backends.keys() & checkpoint["generators"]:
            self.backends[name].set_rng_state(checkpoint["generators"][name])
        return checkpoint

    def close(self):
        """Writes the records, and prints the speed unless an error has ended the run."""
        atexit.unregister(self.close)
        report = self.watch.measure()
        steps = report["env_steps"] or 1
        (self.dir / f"stages{self.suffix}").write_text(json.dumps(report, indent=2))
        if self.watch.profiler:
            self.watch.profiler.stop()
            self.watch.profiler.export_chrome_trace(f"{self.dir}/trace.json.gz")
        self.writer.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if not self.ending:
            return
        with suppress(OSError):  # nobody reads any more
            self.bar.close()
            for name, seconds in report["stages"].items():
                print(f"{name:16}{1e6 * seconds / steps:12,.1f} us/step", file=sys.stderr)
            print(f"{report['sps_steady'] or math.nan:,.1f} steps/s, {self.dir}", file=sys.stderr)
        if self.stopped:
            raise SystemExit(f"interrupted after {self.step:,} steps")


def parse_args(kind):
    """The flags; with --resume, those that are not given are the checkpoint's."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--resume")
    resume = parser.parse_known_args()[0].resume
    return tyro.cli(kind, default=kind(**load_checkpoint(resume).get("args", {})))


def load_checkpoint(run_dir):
    return torch.load(f"{run_dir}/checkpoint.pt", map_location="cpu", mmap=True) if run_dir else {}


def make_directory(args):
    """runs/ENVIRONMENT__EXPERIMENT__SEED__SECOND, the first one that is free."""
    for second in count(int(time.time())):
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{second}"
        path = Path("runs", re.sub(r"[^\w.-]", "_", name))
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path


# <<< run <<<


if __name__ == "__main__":
    main(parse_args(Args))
