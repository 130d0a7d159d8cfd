"""Proximal Policy Optimization (PPO) for continuous actions, with torch.compile and CUDA graphs.

Two of its three largest steps on a CPU are no compilation: NumPy computes the actions, and one
object steps and normalizes all environments. The third is the compiled update.

    python leanrl/ppo_continuous_action_torchcompile.py --compile --cudagraphs

The algorithm is that of its twin, ppo_continuous_action.py, which says where it comes from and what
the shapes mean; the hunks that differ start with `# speed:` and say what they buy, the rest is the
same to the letter. Without a CUDA device --cudagraphs says so in one line and the run goes on. The
first rollouts pay for compilation.
"""

# speed: CudaGraphModule captures a function as a CUDA graph
import argparse
import atexit
import copy
import json
import math
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, count, pairwise
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Literal, NamedTuple

# speed: tensordict would log two lines for each graph that it captures, amid the progress
os.environ.setdefault("TD_LOGGING_LEVEL", "WARNING")

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
    # speed: compiled code fuses operations and spares Python between them, a CUDA graph launches at
    # once all that it has recorded; any combination of the flags works, none too
    compile: bool = False  # compile the update with torch.compile
    cudagraphs: bool = False  # replay the preparation of a rollout and an epoch as CUDA graphs

    def __post_init__(self):
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches or batch_size == self.num_minibatches:
            raise ValueError(f"--num-minibatches: {batch_size:,} steps, two or more in each")
        if self.total_timesteps < batch_size:
            raise ValueError(f"--total-timesteps: a rollout has {batch_size:,} steps")
        if not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1):
            raise ValueError("--gamma and --gae-lambda lie between 0 and 1")


STEADY_AFTER = 3  # rollouts; a variant has compiled and captured all by then


# Environment


# speed: clips and normalizes for all environments at once, and spares copies and infos that nobody
# reads
class NormalizedVectorEnv(gym.vector.VectorEnv):
    """N environments that reset in the step that ends an episode; infos are about its end."""

    def __init__(self, envs: list[gym.Env], gamma: float):
        self.envs = envs
        self.num_envs = len(envs)
        self.gamma = gamma
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space
        (obs_dim,) = self.single_observation_space.shape
        shape = len(envs), obs_dim + 1
        self.x = np.zeros(shape)  # observations and, last, the discounted sum of rewards
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = np.full(shape, 1e-4)

    def center(self, x: np.ndarray, where: object) -> tuple:
        """Takes x into the statistics at the index `where` -> x - means, standard deviations."""
        mean = self.mean[where]
        var = self.var[where]
        count = self.count[where]
        count += 1
        delta = x - mean
        mean += delta / count
        centered = x - mean
        var += (delta * centered - var) / count
        std = np.sqrt(var + 1e-8)
        return centered, std

    def start(self, i: int, seed: int | None = None) -> np.ndarray:
        """Begins an episode of environment i -> its first observation, normalized (O,)."""
        obs, _ = self.envs[i].reset(seed=seed)
        centered, std = self.center(obs, (i, slice(-1)))
        normalized = centered / std
        return normalized.clip(-10, 10)

    def reset(self, seed: int) -> tuple:
        obs = [self.start(i, seed + i) for i in range(self.num_envs)]
        return np.float32(obs), {}

    def step(self, actions: np.ndarray) -> tuple:
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=bool)
        discounted = self.x[:, -1]
        infos = {}
        returns = {}
        lengths = {}
        actions = np.maximum(actions, self.single_action_space.low)  # clip takes longer
        actions = np.minimum(actions, self.single_action_space.high)
        for i, env in enumerate(self.envs):
            obs, reward, terminated[i], truncated[i], info = env.step(actions[i])
            discounted[i] *= 0 if terminated[i] else self.gamma
            discounted[i] += reward
            rewards[i] = reward
            self.x[i, :-1] = obs
            if terminated[i] or truncated[i]:
                episode = info["episode"]
                returns[i] = episode["r"]
                lengths[i] = episode["l"]
        x, std = self.center(self.x, ...)
        x[:, -1] = rewards  # divided by the deviation of their discounted sum
        x = np.maximum(x / std, -10)
        x = np.minimum(x, 10)
        x = x.astype(np.float32)
        obs = x[:, :-1]
        rewards = x[:, -1]
        if returns:
            infos["final_obs"] = obs.copy()
            infos["final_info"] = {"episode": {"r": returns, "l": lengths}}
            for i in returns:
                obs[i] = self.start(i)
        return obs, rewards, terminated, truncated, infos


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
        # speed: in training, the class above clips and normalizes
        return gym.wrappers.RecordEpisodeStatistics(env)

    makers = [make_env] * num_envs
    if video is not None:
        makers[0] = lambda: make_env(render_mode="rgb_array")
    # speed: in training, one object steps all environments
    if gamma is not None:
        envs = [make() for make in makers]
        return NormalizedVectorEnv(envs, gamma)
    return gym.vector.SyncVectorEnv(makers, autoreset_mode="SameStep")


def get_statistics(envs: gym.vector.VectorEnv) -> dict[str, Tensor]:
    """What normalization has learned, a row per environment: for checkpoints and evaluation."""
    statistics = {}
    # speed: the arrays of all environments
    for name in ("mean", "var", "count"):
        rows = torch.tensor(getattr(envs, name))
        statistics[f"obs_rms_{name}"] = rows[:, :-1]
        statistics[f"return_rms_{name}"] = rows[:, -1]
    return statistics


def set_statistics(envs: gym.vector.VectorEnv, statistics: dict[str, Tensor]) -> None:
    """Puts back what `get_statistics` has returned."""
    # speed: into the arrays of all environments
    for name in ("mean", "var", "count"):
        rows = getattr(envs, name)
        rows[:, :-1] = statistics[f"obs_rms_{name}"]
        rows[:, -1] = statistics[f"return_rms_{name}"]


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
    """B steps of a rollout, float32; log_probs and values as they were when it was made."""

    obs: Tensor  # (B, O)
    actions: Tensor  # (B, A)
    log_probs: Tensor  # (B,)
    values: Tensor  # (B,)
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,)


class Rollout:
    """T steps of N environments.

    `ended` is 1 where an episode ended; there, `final_values` has the value of its last
    observation, 0 if it terminated.
    """

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        shape = args.num_steps, args.num_envs
        # speed: NumPy stores a step without PyTorch's dispatch; `main` copies all to the device
        obs_shape = args.num_steps + 1, args.num_envs, obs_dim  # with what follows the last step
        self.obs = torch.zeros(obs_shape).numpy()
        self.actions = torch.zeros(*shape, action_dim).numpy()
        self.rewards = torch.zeros(shape).numpy()
        self.ended = torch.zeros(shape).numpy()
        self.final_values = torch.zeros(shape).numpy()


# Losses


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of actions (B, A) under a diagonal Gaussian -> (B,)."""
    z = (actions - mean) * (-log_std).exp()
    log_probs = -0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)
    return log_probs.sum(dim=-1)


# speed: the recurrence of compute_gae by doubling, for its last line
def reverse_scan(x: Tensor, weights: Tensor) -> Tensor:
    """y[t] = x[t] + weights[t] y[t + 1] for every t, by doubling -> y (T, N); x, weights (T, N).

    Hillis and Steele, "Data Parallel Algorithms", 1986: each sum begins as one step long, and each
    pass adds to it the sum that begins where it ends.
    """
    distance = 1
    while distance < len(x):
        begin = x[:-distance]
        end = x[-distance:]
        more = weights[: len(begin)] * x[distance:]
        x = torch.cat([begin + more, end])
        weights = weights[:-distance] * weights[distance:]
        distance *= 2
    return x


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, ended: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16) -> advantages (T, N).

    All (T, N). `next_values` is the value of what follows each step in its own episode: 0 after a
    termination, that of the final observation after a truncation. `ended` is 1 after either.
    """
    deltas = rewards + gamma * next_values - values
    weights = gamma * lam * (1 - ended)
    # speed: log2(T) vector operations instead of T
    return reverse_scan(deltas, weights)


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
    """Loss of a minibatch (equation 9) and what is logged of it -> loss (), {name: tensor ()}."""
    mean, log_std, values = model(batch.obs)
    log_ratios = gaussian_log_prob(batch.actions, mean, log_std) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
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


# speed: at torch.optim.Adam a compiled function breaks apart; with this one an update is one call.
# The powers of beta are state: from a step count compiled code would compute them for each weight
class Adam:
    """Adam (Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1), all parameters in one call.

    Change `lr` in place: a graph goes on with the tensor that it has captured.
    """

    def __init__(self, parameters, lr, eps=1e-8):
        self.parameters = list(parameters)
        self.betas = (0.9, 0.999)
        self.eps = eps
        self.exp_avgs = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.exp_avg_sqs = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.lr = torch.tensor(lr, device=self.parameters[0].device)
        self.beta_powers = [torch.ones_like(self.lr) for _ in self.betas]

    def state_dict(self):
        return {"state": [*self.exp_avgs, *self.exp_avg_sqs, *self.beta_powers]}

    def load_state_dict(self, state):
        torch._foreach_copy_(self.state_dict()["state"], state["state"])

    def step(self, gradients):
        """Updates the parameters in place; `gradients` in their order and shapes."""
        beta1, beta2 = self.betas
        with torch.no_grad():
            beta1_power = self.beta_powers[0].mul_(beta1)
            beta2_power = self.beta_powers[1].mul_(beta2)
            torch._foreach_lerp_(self.exp_avgs, gradients, 1 - beta1)
            torch._foreach_mul_(self.exp_avg_sqs, beta2)
            torch._foreach_addcmul_(self.exp_avg_sqs, gradients, gradients, 1 - beta2)
            denominators = torch._foreach_sqrt(self.exp_avg_sqs)
            torch._foreach_mul_(denominators, (1 - beta2_power).rsqrt())
            torch._foreach_add_(denominators, self.eps)
            changes = torch._foreach_div(self.exp_avgs, denominators)
            torch._foreach_mul_(changes, self.lr / (1 - beta1_power))
            torch._foreach_sub_(self.parameters, changes)


# speed: for a few rows PyTorch's dispatch costs more than the arithmetic
class NumPyMLP:
    """A network that `mlp` has made; on a CPU the arrays are the parameters, not copies.

    Acting uses it in place of ActorCritic, so a change of ActorCritic must be made here as well.
    """

    def __init__(self, network: nn.Sequential):
        kinds = [type(layer) for layer in network]
        known = [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
        assert kinds == known, "acting computes another network"
        tensors = network.state_dict().values()
        self.arrays = [tensor.cpu().numpy().T for tensor in tensors]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x (..., inputs) -> (..., outputs)."""
        weight1, bias1, weight2, bias2, weight3, bias3 = self.arrays
        x = np.tanh(x @ weight1 + bias1)
        x = np.tanh(x @ weight2 + bias2)
        return x @ weight3 + bias3


class PPO(nn.Module):
    """Network, optimizer and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.args = args
        self.model = ActorCritic(obs_dim, action_dim).to(device)
        # speed: all parameters become views of one vector: one gradient, one norm, one step. Critic
        # and actor take turns in it, so that a layer of both is one stack
        model = self.model
        pairs = zip(model.critic.parameters(), model.actor_mean.parameters(), strict=True)
        parameters = [*chain.from_iterable(pairs), model.actor_logstd]
        flat = nn.utils.parameters_to_vector(parameters)
        # a leaf that is made here, because torch 2.11 cannot compile one that `update` makes
        self.flat = flat.detach().requires_grad_()
        nn.utils.vector_to_parameters(self.flat, parameters)
        hidden = [(2, 64, obs_dim), (2, 1, 64), (2, 64, 64), (2, 1, 64)]
        self.shapes = hidden + [each.shape for each in parameters[8:]]
        self.optimizer = Adam([self.flat], lr=args.learning_rate, eps=1e-5)
        self.optimizers = (self.optimizer,)

    # speed: acting computes the actions alone, without PyTorch
    def publish(self) -> None:
        """Brings the parameters to where acting reads them."""
        log_std = self.model.actor_logstd.detach()
        self.std = log_std.exp().cpu().numpy()
        self.numpy_actor = NumPyMLP(self.model.actor_mean)
        self.numpy_critic = NumPyMLP(self.model.critic)

    def act(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """obs (N, O), standard normal noise (N, A) -> actions (N, A)."""
        return self.numpy_actor(obs) + self.std * noise

    def value(self, obs: np.ndarray) -> np.ndarray:
        """obs (..., O) -> values (...)."""
        return self.numpy_critic(obs).squeeze(-1)

    # speed: a dictionary, whose tensors CudaGraphModule copies to where its graph reads
    def prepare(self, tensors: dict[str, Tensor]) -> Batch:
        """A rollout -> B = T N steps to learn from."""
        with torch.no_grad():
            # speed: the policy has not changed since it acted: one call computes what it left out
            rollout = SimpleNamespace(**tensors)
            mean, log_std, values = self.model(rollout.obs)
            rollout.obs = rollout.obs[:-1]
            rollout.values = values[:-1]
            rollout.log_probs = gaussian_log_prob(rollout.actions, mean[:-1], log_std)
            next_values = values[1:]
            next_values = torch.where(rollout.ended.bool(), rollout.final_values, next_values)
            advantages = compute_gae(
                rollout.rewards,
                rollout.values,
                next_values,
                rollout.ended,
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

    # speed: a layer of both networks is one batched product. Change it together with `mlp`
    def stacked_model(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `model` computes, from `flat`."""
        parts = self.flat.split([math.prod(shape) for shape in self.shapes])
        parts = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        weight1, bias1, weight2, bias2, critic, actor, critic_bias, actor_bias, log_std = parts
        x = obs.expand(2, -1, -1)
        x = torch.baddbmm(bias1, x, weight1.mT).tanh()
        x = torch.baddbmm(bias2, x, weight2.mT).tanh()
        values = nn.functional.linear(x[0], critic, critic_bias).squeeze(-1)
        mean = nn.functional.linear(x[1], actor, actor_bias)
        return mean, log_std, values

    def update(self, batch: Batch, index: Tensor) -> dict[str, Tensor]:
        """One gradient step on the minibatch `batch[index]`."""
        minibatch = Batch._make([column[index] for column in batch])
        # speed: the vector's gradient, not that of each parameter
        loss, metrics = ppo_loss(self.stacked_model, minibatch, self.args)
        (gradient,) = torch.autograd.grad(loss, self.flat)
        norm = gradient.norm()
        scale = self.args.max_grad_norm / (norm + 1e-6)
        gradient = gradient * scale.clamp(max=1)
        self.optimizer.step([gradient])
        return metrics

    def learn(self, batch: Batch, order: Tensor) -> dict[str, Tensor]:
        """An epoch of M minibatches in the order of a permutation (B,) -> {name: tensor (M,)}."""
        indices = order.view(self.args.num_minibatches, -1)
        rows = [self.update(batch, index) for index in indices]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# speed: the update alone, which `learn` calls without unrolling; the rest runs once per rollout
def compile_agent(agent: PPO) -> None:
    """The update is compiled when it is first called. The settings hold for the whole process."""
    torch._dynamo.reset()  # what others have compiled in this process counts against a limit
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    if torch.__version__.startswith("2.11"):
        torch._inductor.config.reorder_for_locality = False  # True moves reads past writes
        torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs
    torch._inductor.config.cpp_wrapper = agent.flat.is_cpu  # C++ calls kernels faster: 5% here
    agent.update = torch.compile(agent.update, fullgraph=True)


# speed: for a GPU, one launch instead of thousands; a third call captures, when all is compiled
def capture_agent(agent: PPO) -> None:
    """Preparing a rollout and learning in an epoch replay what their third call has recorded.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused.
    """
    torch.compiler.config.force_cudagraph_gc = True  # a graph freed amid a capture would end it
    recorded = dict(vars(agent.args))
    learn = CudaGraphModule(agent.learn, warmup=3)

    def replay(batch, order):
        assert vars(agent.args) == recorded, "CUDA graphs keep args: make what changes a tensor"
        return learn(batch, order)

    agent.prepare = CudaGraphModule(agent.prepare, warmup=3)
    agent.learn = replay


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

    envs = make_envs(args.env_id, args.num_envs, args.gamma)
    obs_dim = envs.single_observation_space.shape[0]
    action_dim = envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    rollout = Rollout(args, obs_dim, action_dim, device)
    if args.resume:
        set_statistics(envs, run.restore(agent)["statistics"])

    # speed: methods are replaced before the loop, which remains the baseline's
    if args.compile:
        compile_agent(agent)
    if args.cudagraphs and device.type == "cuda":
        capture_agent(agent)
    elif args.cudagraphs:
        print("--cudagraphs: without CUDA it has no effect", file=sys.stderr)

    obs, _ = envs.reset(seed=seed)
    run.open()
    while not run.ending:
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= 1 - run.step / run.total_steps
        # speed: in place, where compiled code and graphs read it
        agent.optimizer.lr.fill_(learning_rate)

        # 1. Roll out: T steps with the policy as it is.
        # speed: drawn on the CPU, where it is used: with a GPU not as in the baseline. Acting
        # reads the parameters as arrays
        noise = torch.randn(args.num_steps, args.num_envs, action_dim).numpy()
        agent.publish()
        for t in range(args.num_steps):
            run.stage("inference")
            # speed: without PyTorch
            actions = agent.act(obs, noise[t])
            run.stage("simulation")
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)

            run.stage("replay")
            ended = terminated | truncated
            # speed: without PyTorch
            rollout.obs[t] = obs
            rollout.actions[t] = actions
            rollout.rewards[t] = rewards
            rollout.ended[t] = ended
            obs = next_obs
            run.step += args.num_envs
            # Where an episode ended, next_obs is already the next episode's first.
            for i in np.flatnonzero(ended):
                run.stage("inference")
                # speed: without PyTorch
                final_obs = infos["final_obs"][i]
                rollout.final_values[t, i] = 0 if terminated[i] else agent.value(final_obs)
                run.stage("logging")
                episode = infos["final_info"]["episode"]
                run.write({"charts/episodic_return": episode["r"][i]})
                run.write({"charts/episodic_length": episode["l"][i]})

        # 2. Learn from it in several epochs.
        run.stage("backpropagation")
        # speed: a copy per field
        rollout.obs[-1] = obs
        tensors = {}
        for name, array in vars(rollout).items():
            tensors[name] = torch.as_tensor(array, device=device)
        batch = agent.prepare(tensors)
        clipfracs = []
        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size, device=device)
            metrics = agent.learn(batch, order)
            clipfracs.append(metrics["losses/clipfrac"])
            if args.target_kl is not None and metrics["losses/approx_kl"][-1] > args.target_kl:
                break
        run.tick()

        # 3. Log the last minibatch's losses; clipfrac is the mean over all of them.
        row = {tag: values[-1] for tag, values in metrics.items()}
        row["losses/clipfrac"] = torch.cat(clipfracs).mean()
        row["losses/explained_variance"] = explained_variance(batch.values, batch.returns)
        row["charts/learning_rate"] = learning_rate
        run.log(row)

        # 4. Save and evaluate, now and then and at the end.
        if run.due(args.checkpoint_every, at_end=args.save_model):
            run.stage("checkpoint")
            run.save(agent, statistics=get_statistics(envs))
        if run.due(args.eval_every, at_end=args.capture_video) and not run.stopped:
            run.stage("evaluation")
            statistics = get_statistics(envs)
            eval_return = evaluate(agent, args, statistics, run.dir / f"videos/step-{run.step}")
            run.write({"charts/eval_return": eval_return})
            run.bar.write(f"evaluation at {run.step:,}: {eval_return:,.5g}", file=sys.stderr)
    run.close()
    return run.dir


# What a reader may skip: evaluation, then the records around a run


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
