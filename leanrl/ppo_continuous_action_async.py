"""PPO for continuous actions whose acting, learning and evaluation are processes of their own.

    python leanrl/ppo_continuous_action_async.py                    # HalfCheetah-v5, 1 M steps
    python leanrl/ppo_continuous_action_async.py --num-envs 8 --num-steps 256 --eval-every 100000
    python leanrl/ppo_continuous_action_async.py --learner-device cuda:0 --collector-device cuda:1
    python leanrl/ppo_continuous_action_async.py --sync             # as ppo_continuous_action.py

The algorithm is that of ppo_continuous_action.py. There acting and learning take turns; here a
collector process makes the next rollout while the learner learns from the last one. `diff` of the
two files shows what that needs:

- `Slot`: what travels between the two, in CPU memory that both see. The learner writes weights and
  noise, the collector the rollout that it makes with them. There are two, one to be filled while
  the other is learned from (`--max-staleness`).
- A rollout is thus made by weights one iteration, that is, one rollout with its epochs, old. PPO's
  clipping keeps the new policy near the one in the ratio's denominator. Were that the one that has
  acted, the iteration in between would have used up that distance. So the denominator is the policy
  as learning begins, and each step is weighted by how much likelier its action is under that policy
  than under the one that took it (`Batch.importance`; Hilton et al., arXiv:2110.00641). All values,
  those of final observations too, are computed anew.
- The learner draws noise and minibatches, and which weights make which rollout does not depend on
  who is faster: a seed repeats itself. --sync waits for each rollout; on a CPU all is then as in
  ppo_continuous_action.py, but for the last bits. On a GPU that script draws other noise.
- `Worker`: a process that ends with this one and whose death ends this one, when it next waits for
  it. Evaluation has its own and does not stop training, unless several are waiting. A resumed run
  begins with fresh episodes and weights that are not stale.
- `DeviceEnv`: an environment on the CPU that takes and gives tensors on a device.

Its twin ppo_continuous_action_async_torchcompile.py is this file with the hunks marked `# speed:`.
Shapes: T steps of a rollout, N environments, B batch, O observation, A action. The collector's
times are in stages_collector.json; `untracked` is mostly the wait for the other process.
"""

import argparse
import atexit
import copy
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tqdm
import tyro
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of this experiment, part of the run directory's name
    seed: int = 1  # seed of the environments and of every random generator
    torch_deterministic: bool = True  # use deterministic cuDNN kernels
    cuda: bool = True  # train on CUDA where there is a device
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

    learner_device: str | None = None  # where the network learns, if --cuda is not to decide
    collector_device: str = "cpu"  # where its copy acts: cpu, cuda:1, mps
    eval_device: str = "cpu"  # where another copy is evaluated
    sync: bool = False  # act and learn in turns, as ppo_continuous_action.py does
    max_staleness: int = 1  # iterations that the acting weights are behind at most; 0: as --sync

    env_id: str = "HalfCheetah-v5"  # id of the Gymnasium environment
    total_timesteps: int = 1_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 1  # environments stepped side by side
    num_steps: int = 2048  # steps of a rollout in each environment
    learning_rate: float = 3e-4  # learning rate of the optimizer, at first
    anneal_lr: bool = True  # lower it from rollout to rollout, linearly towards zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # passes over a rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the ratio of new to old probabilities may go from 1
    clip_vloss: bool = True  # also clip how far a value may go from its old one
    ent_coef: float = 0.0  # weight of the entropy in the loss
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it
    target_kl: float | None = None  # stop after an epoch whose last minibatch's KL exceeds it

    def __post_init__(self):
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches or batch_size == self.num_minibatches:
            raise ValueError(f"--num-minibatches: {batch_size:,} steps, two or more in each")
        if self.total_timesteps < batch_size:
            raise ValueError(f"--total-timesteps: a rollout has {batch_size:,} steps")
        if not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1):
            raise ValueError("--gamma and --gae-lambda lie between 0 and 1")
        if self.max_staleness < 0:
            raise ValueError("--max-staleness: 0 or more iterations")


STEADY_AFTER = 3  # rollouts; a variant has compiled and captured all by then


# Environment


class Copying(gym.Wrapper):
    """Copies what the environment returns: some change it later, in place."""

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return np.array(obs), dict(info)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return np.array(obs), float(reward), terminated, truncated, dict(info)


def make_envs(
    env_id: str,
    num_envs: int,
    gamma: float | None = None,
    video: Path | None = None,
) -> gym.vector.VectorEnv:
    """N environments that reset in the step that ends an episode; `video` films the first one.

    With a gamma, for training, each clips actions, and normalizes observations and rewards by
    statistics of its own.
    """

    def make_env(**options) -> gym.Env:
        env = Copying(gym.make(env_id, **options))
        if "render_mode" in options:
            env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        if not isinstance(env.action_space, Box):
            raise ValueError("--env-id: needs continuous actions")
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if gamma is not None:
            env = gym.wrappers.ClipAction(env)
            env = gym.wrappers.NormalizeObservation(env)
            env = gym.wrappers.TransformObservation(env, lambda obs: obs.clip(-10, 10), None)
            env = gym.wrappers.NormalizeReward(env, gamma)
            env = gym.wrappers.TransformReward(env, lambda reward: reward.clip(-10, 10))
        return env

    makers = [make_env] * num_envs
    if video is not None:
        makers[0] = lambda: make_env(render_mode="rgb_array")
    return gym.vector.SyncVectorEnv(makers, autoreset_mode="SameStep")


def get_statistics(envs: gym.vector.VectorEnv) -> dict[str, Tensor]:
    """What normalization has learned, a row per environment: for checkpoints and evaluation."""
    statistics = {}
    for kind in ("obs_rms", "return_rms"):
        for name in ("mean", "var", "count"):
            rows = [getattr(rms, name) for rms in envs.get_attr(kind)]
            statistics[f"{kind}_{name}"] = torch.as_tensor(np.array(rows))
    return statistics


def set_statistics(envs: gym.vector.VectorEnv, statistics: dict[str, Tensor]) -> None:
    """Puts back what `get_statistics` has returned."""
    for kind in ("obs_rms", "return_rms"):
        for name in ("mean", "var", "count"):
            rows = statistics[f"{kind}_{name}"].numpy()
            for rms, row in zip(envs.get_attr(kind), rows, strict=True):
                setattr(rms, name, row)


class DeviceEnv(gym.vector.VectorWrapper):
    """A vector environment on the CPU that takes and gives tensors on `device`.

    Floating-point numbers become float32, infos stay as they are. On a CPU the tensors share the
    arrays' memory: each step must give new arrays, as Gymnasium's default `copy=True` does.
    """

    def __init__(self, envs: gym.vector.VectorEnv, device: torch.device):
        super().__init__(envs)
        self.device = device

    def reset(self, *, seed=None, options=None) -> tuple:
        obs, infos = self.env.reset(seed=seed, options=options)
        return self.to_device(obs), infos

    def step(self, actions: Tensor) -> tuple:
        *arrays, infos = self.env.step(actions.cpu().numpy())
        tensors = map(self.to_device, arrays)
        return *tensors, infos

    def to_device(self, array: np.ndarray) -> Tensor:
        dtype = torch.float32 if array.dtype.kind == "f" else None
        return torch.as_tensor(array, dtype=dtype, device=self.device)


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
    """Gaussian policy, whose deviation does not depend on the state, and the value of a state."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.critic = mlp(obs_dim, 1, gain=1.0)
        self.actor_mean = mlp(obs_dim, action_dim, gain=0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """obs (B, O) -> mean of the actions (B, A), their log deviation (A,), values (B,)."""
        mean = self.actor_mean(obs)
        values = self.critic(obs).squeeze(-1)
        return mean, self.actor_logstd, values


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
    """B steps of a rollout, float32; log_probs and values are those from which learning departs."""

    obs: Tensor  # (B, O)
    actions: Tensor  # (B, A)
    log_probs: Tensor  # (B,)
    values: Tensor  # (B,)
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,)
    importance: Tensor  # (B,) probability of the actions as learning begins over that when drawn


class Rollout:
    """T steps of N environments on `device`."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        shape = args.num_steps, args.num_envs
        # (T + 1, N, O), the last row for what follows the last step
        self.obs = torch.zeros(args.num_steps + 1, args.num_envs, obs_dim, device=device)
        self.actions = torch.zeros(*shape, action_dim, device=device)  # (T, N, A)
        self.log_probs = torch.zeros(shape, device=device)  # (T, N), as all below
        self.values = torch.zeros(shape, device=device)
        self.rewards = torch.zeros(shape, device=device)
        # 1 where an episode ended; there, the value of its last observation, 0 if it terminated
        self.ended = torch.zeros(shape, device=device)
        self.final_values = torch.zeros(shape, device=device)


class Slot(Rollout):
    """What travels between learner and collector, in CPU memory that both see."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, model: ActorCritic):
        super().__init__(args, obs_dim, action_dim, torch.device("cpu"))
        self.noise = torch.zeros_like(self.actions)  # standard normal
        self.weights = get_weights(model)
        for tensor in vars(self).values():
            tensor.share_memory_()  # nothing of it outlives the processes, however they end
        self.version = 0  # iterations that its weights have learned from; the learner's alone

    def hand_out(self, agent: "PPO", version: int) -> None:
        """With what the collector makes the rollout to come."""
        self.weights.copy_(get_weights(agent))
        self.noise.normal_()
        self.version = version

    def hand_in(self, rollout: Rollout, truncations: list, agent: "PPO") -> None:
        """To `rollout` what the collector has made, with the values of final observations."""
        for name, tensor in vars(rollout).items():
            tensor.copy_(getattr(self, name))
        for t, n, final_obs in truncations:  # in the slot all are 0
            inputs = torch.as_tensor(final_obs, device=rollout.obs.device)
            rollout.final_values[t, n] = agent.value(inputs)


def get_weights(model: nn.Module) -> Tensor:
    """All parameters in one vector on the CPU."""
    assert not list(model.buffers()), "only parameters reach the collector"
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


class Report(NamedTuple):
    """What the collector says of a rollout, next to what it leaves in a slot."""

    truncations: list  # (t, n, final observation (O,)) of episodes that were truncated
    episodes: list  # (step, what is logged) of episodes that ended
    statistics: dict  # of the normalization after the rollout, {name: tensor}
    waited: float  # seconds that the collector has waited for this slot


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


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """How much of the variance of the returns (B,) the values (B,) explain: 1 is all -> ()."""
    return 1 - (returns - values).var() / returns.var().clamp(min=1e-12)


def ppo_loss(model: ActorCritic, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a minibatch (equation 9) and what is logged of it -> loss (), {name: tensor ()}.

    The policy's part is the decoupled objective of Hilton et al. (arXiv:2110.00641, section 3).
    """
    mean, log_std, values = model(batch.obs)
    log_ratios = gaussian_log_prob(batch.actions, mean, log_std) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss = policy_loss(log_ratios, batch.importance * advantages, args.clip_coef)
    value_clip = args.clip_coef if args.clip_vloss else None
    v_loss = value_loss(values, batch, value_clip)
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

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.args = args
        self.model = ActorCritic(obs_dim, action_dim).to(device)
        self.optimizer = Adam(self.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
        self.optimizers = (self.optimizer,)

    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """obs (N, O), standard normal noise (N, A) -> actions (N, A), log_probs, values (N,)."""
        with torch.no_grad():
            mean, log_std, values = self.model(obs)
            actions = mean + log_std.exp() * noise
            log_probs = gaussian_log_prob(actions, mean, log_std)
            return actions, log_probs, values

    def value(self, obs: Tensor) -> Tensor:
        """obs (..., O) -> values (...)."""
        with torch.no_grad():
            return self.model.critic(obs).squeeze(-1)

    def prepare(self, rollout: Rollout, stale: bool) -> Batch:
        """A rollout, perhaps `stale`: made by older weights -> B = T N steps to learn from."""
        with torch.no_grad():
            obs = rollout.obs[:-1]
            values = rollout.values
            log_probs = rollout.log_probs
            importance = torch.ones_like(log_probs)
            if stale:  # what these weights have to say
                mean, log_std, values = self.model(obs)
                log_probs = gaussian_log_prob(rollout.actions, mean, log_std)
                importance = (log_probs - rollout.log_probs).exp()
            last_values = self.value(rollout.obs[-1])
            next_values = torch.cat([values[1:], last_values[None]])
            next_values = torch.where(rollout.ended.bool(), rollout.final_values, next_values)
            advantages = compute_gae(
                rollout.rewards,
                values,
                next_values,
                rollout.ended,
                self.args.gamma,
                self.args.gae_lambda,
            )
            batch = Batch(
                obs=obs,
                actions=rollout.actions,
                log_probs=log_probs,
                values=values,
                advantages=advantages,
                returns=advantages + values,
                importance=importance,
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
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# Training


def collect(pipe, args: Args, slots: list[Slot], report_path: Path) -> None:
    """What the collector does: makes a rollout in each slot whose index it gets."""
    device = use_device(args.collector_device)
    watch = Stopwatch(device, warmup_steps=STEADY_AFTER * args.num_envs * args.num_steps)
    start_step, statistics = receive(pipe)
    seed = args.seed + start_step
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

    envs = make_envs(args.env_id, args.num_envs, args.gamma)
    obs_dim = envs.single_observation_space.shape[0]
    action_dim = envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    rollout = Rollout(args, obs_dim, action_dim, device)
    device_envs = DeviceEnv(envs, device)
    if statistics:
        set_statistics(envs, statistics)

    obs, _ = device_envs.reset(seed=seed)
    step = start_step
    try:
        while True:
            begin = perf_counter()
            slot = slots[receive(pipe)]
            waited = perf_counter() - begin
            truncations = []
            episodes = []
            nn.utils.vector_to_parameters(slot.weights.to(device), agent.parameters())
            noise = slot.noise.to(device)
            for t in range(args.num_steps):
                watch.stage("inference")
                actions, log_probs, values = agent.act(obs, noise[t])
                watch.stage("simulation")
                next_obs, rewards, terminated, truncated, infos = device_envs.step(actions)

                watch.stage("replay")
                ended = terminated | truncated
                rollout.obs[t] = obs
                rollout.actions[t] = actions
                rollout.log_probs[t] = log_probs
                rollout.values[t] = values
                rollout.rewards[t] = rewards
                rollout.ended[t] = ended
                obs = next_obs
                step += args.num_envs
                # Where an episode ended, next_obs is already the next episode's first.
                for n in np.flatnonzero(infos.get("_final_obs", ())):
                    if not terminated[n]:
                        truncations.append((t, n, infos["final_obs"][n]))
                    episode = infos["final_info"]["episode"]
                    row = {
                        "charts/episodic_return": episode["r"][n],
                        "charts/episodic_length": episode["l"][n],
                    }
                    episodes.append((step, row))
            rollout.obs[-1] = obs
            for name, tensor in vars(rollout).items():
                getattr(slot, name).copy_(tensor)
            report = Report(
                truncations=truncations,
                episodes=episodes,
                statistics=get_statistics(envs),
                waited=waited,
            )
            send(pipe, report)
            watch.tick(step - start_step)
    finally:
        report_path.write_text(json.dumps(watch.measure(), indent=2))


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    torch.set_num_threads(args.torch_threads)
    torch.set_flush_denormal(True)  # Adam's averages decay to numbers that are ten times slower
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    default_device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    device = use_device(args.learner_device or default_device)
    for name in (args.collector_device, args.eval_device):
        find_device(name)  # here, because an error in a worker ends this process by another one
    batch_size = args.num_envs * args.num_steps
    steady_after = STEADY_AFTER * batch_size
    run = Run(args, device, batch_size, steady_after, trace_after=3, trace_iterations=1)
    seed = args.seed + run.start_step
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

    envs = make_envs(args.env_id, 1)  # for their spaces: those to act in are the collector's
    obs_dim = envs.single_observation_space.shape[0]
    action_dim = envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    max_staleness = 0 if args.sync else args.max_staleness
    slots = [Slot(args, obs_dim, action_dim, agent.model) for _ in range(max_staleness + 1)]
    rollout = Rollout(args, obs_dim, action_dim, device)
    statistics = {}
    if args.resume:
        statistics = copy.deepcopy(run.restore(agent)["statistics"])

    handed_out = 0  # rollouts
    unanswered = 0  # evaluations
    run.open()
    collector = Worker("collector", collect, args, slots, run.dir / f"stages_collector{run.suffix}")
    collector.send((run.start_step, statistics))
    evaluator = None
    if args.eval_every or args.capture_video:
        evaluator = Worker("evaluator", answer, args, obs_dim, action_dim, run.dir)
    while not run.ending:
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= 1 - run.step / run.total_steps
        agent.optimizer.param_groups[0]["lr"] = learning_rate

        # 1. Let the collector go on with these weights, and get the rollout that is due.
        run.stage("replay")
        version = (run.step - run.start_step) // batch_size  # iterations so far
        remaining = math.ceil((run.total_steps - run.step) / batch_size)
        while handed_out < version + min(len(slots), remaining):
            index = handed_out % len(slots)
            slots[index].hand_out(agent, version)
            collector.send(index)
            handed_out += 1
        run.stage("untracked")
        begin = perf_counter()
        report = collector.receive()
        waited = perf_counter() - begin
        run.step += batch_size

        # 2. Learn from it in several epochs.
        run.stage("backpropagation")
        slot = slots[version % len(slots)]
        slot.hand_in(rollout, report.truncations, agent)
        staleness = version - slot.version
        batch = agent.prepare(rollout, stale=staleness > 0)
        clipfracs = []
        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size, device=device)
            metrics = agent.learn(batch, order)
            clipfracs.append(metrics["losses/clipfrac"])
            if args.target_kl is not None and metrics["losses/approx_kl"][-1] > args.target_kl:
                break
        run.tick()

        # 3. Log the last minibatch's losses; clipfrac is the mean over all of them.
        run.stage("logging")
        for step, episode in report.episodes:
            run.write(episode, step)
        row = {tag: values[-1] for tag, values in metrics.items()}
        row["losses/clipfrac"] = torch.cat(clipfracs).mean()
        row["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
        row["charts/learning_rate"] = learning_rate
        row["charts/staleness"] = staleness
        row["charts/learner_waits_seconds"] = waited
        row["charts/collector_waits_seconds"] = report.waited
        run.log(row)

        # 4. Save and evaluate, now and then and at the end.
        if run.due(args.checkpoint_every, at_end=args.save_model):
            run.stage("checkpoint")
            run.save(agent, statistics=report.statistics)
        run.stage("evaluation")
        if run.due(args.eval_every, at_end=args.capture_video) and not run.stopped:
            evaluator.send((run.step, get_weights(agent), report.statistics))
            unanswered += 1
        last = run.ending and not run.stopped
        while evaluator and (last and unanswered or evaluator.pipe.poll()):
            step, eval_return = evaluator.receive()
            unanswered -= 1
            run.write({"charts/eval_return": eval_return}, step)
            run.bar.write(f"evaluation at {step:,}: {eval_return:,.5g}", file=sys.stderr)
    collector.end()
    if evaluator:
        evaluator.end()
    run.close()
    return run.dir


# What a reader may skip: processes and evaluation, then the records around a run


class Worker:
    """A child process and a pipe to it. It ends when this process ends, even by SIGKILL.

    If it dies first, `receive` says so.
    """

    def __init__(self, name: str, function, *args):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.name = name
        self.pipe, pipe = context.Pipe()
        self.process = context.Process(target=work, args=(function, pipe, *args), daemon=True)
        handler = signal.getsignal(signal.SIGINT)
        with suppress(ValueError):  # signals belong to the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: it imports for seconds
        self.process.start()
        with suppress(ValueError):
            signal.signal(signal.SIGINT, handler)
        pipe.close()  # so that no process has this end when the worker is dead

    def send(self, message):
        with suppress(OSError):  # it has died: `receive` says so
            send(self.pipe, message)

    def receive(self):
        try:
            return receive(self.pipe)
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            raise RuntimeError(f"the {self.name} died: exit code {code}") from None

    def end(self):
        """Ends it in the middle of whatever it does, and waits until it is gone."""
        self.process.terminate()
        self.process.join(timeout=10)
        self.process.kill()
        self.process.join()


def work(function, pipe, args: Args, *others):
    """What the process of a Worker runs: `function`, which goes on until Worker.end."""

    def die_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the learner acts
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # KeyboardInterrupt, by Worker.end
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(args.torch_threads)
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision(args.matmul_precision)
    try:
        function(pipe, args, *others)
    except KeyboardInterrupt:
        os._exit(0)  # spares the seconds in which Python takes down what it has imported


def send(pipe, message):
    """Copies what `pipe.send` would share: the memory of tensors."""
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe):
    """Waits for a message."""
    return pickle.loads(pipe.recv_bytes())


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    device = torch.device(name)
    if (device.index or 0) >= torch.get_device_module(device).device_count():
        raise ValueError(f"this machine has no device {name}")
    return device


def use_device(name: str) -> torch.device:
    """The device of that name, as this process's current one: the others cost it no memory."""
    device = find_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device


def answer(pipe, args: Args, obs_dim: int, action_dim: int, run_dir: Path) -> None:
    """What the evaluator does: gets a step, its weights and statistics, answers with the return."""
    device = use_device(args.eval_device)
    agent = PPO(args, obs_dim, action_dim, device)
    while True:
        step, weights, statistics = receive(pipe)
        nn.utils.vector_to_parameters(weights.to(device), agent.parameters())
        torch.manual_seed(args.seed + 2**31)
        eval_return = evaluate(agent, args, statistics, run_dir / f"videos/step-{step}")
        send(pipe, (step, eval_return))


def evaluate(agent: PPO, args: Args, statistics: dict[str, Tensor], video: Path) -> float:
    """Mean return of K episodes from always the same starts, acting without noise.

    Observations are normalized by the statistics of all training environments as one.
    """
    video = video if args.capture_video else None
    envs = make_envs(args.env_id, args.eval_episodes, video=video)
    space = envs.single_action_space
    low, high = (torch.as_tensor(x).to(agent.model.actor_logstd) for x in (space.low, space.high))
    means = statistics["obs_rms_mean"]  # (N, O)
    mean = means.mean(dim=0)
    variance = means.var(dim=0, correction=0)  # between environments, and within them
    variance += statistics["obs_rms_var"].mean(dim=0)
    std = (variance + 1e-8).sqrt()
    returns = np.zeros(args.eval_episodes)
    running = np.ones(args.eval_episodes, dtype=bool)
    seeds = np.random.SeedSequence(args.seed).generate_state(args.eval_episodes) >> 1
    seeds = seeds.tolist()  # below 2**31, and not training's
    generators = random.getstate(), np.random.get_state()  # environments may draw from them
    random.seed(seeds[0])
    np.random.seed(seeds[0])
    obs, _ = envs.reset(seed=seeds)
    for _ in range(50_000):  # an episode without end counts with its return so far
        inputs = (torch.as_tensor(obs) - mean) / std
        inputs = inputs.clamp(-10, 10)
        inputs = inputs.to(agent.model.actor_logstd)
        with torch.no_grad():
            center, log_std, _ = agent.model(inputs)
            actions = clipped_mean(center, log_std, low, high)
        actions = actions.cpu().numpy().clip(space.low, space.high)  # against rounding
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        returns += running * rewards
        running &= ~(terminated | truncated)
        if not running.any():
            break
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
