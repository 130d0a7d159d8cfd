r"""PPO on thousands of CartPoles that are one tensor, with torch.compile and CUDA graphs.

    python leanrl/ppo_cartpole_gpu_torchcompile.py --compile --cudagraphs
    python leanrl/ppo_cartpole_gpu_torchcompile.py --compile --cudagraphs --num-envs 1048576 \
        --num-minibatches 64 --total-timesteps 1000000000

The algorithm is that of its twin, ppo_cartpole_gpu.py, which says where it comes from, which
defaults are not CleanRL's and what the shapes mean; the hunks that differ start with `# speed:` and
say what they buy, the rest is the same to the letter. Without a CUDA device --cudagraphs says so in
one line and the run goes on. The first rollouts pay for compilation.
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
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

# speed: tensordict would log two lines for each graph that it captures, amid the progress
os.environ.setdefault("TD_LOGGING_LEVEL", "WARNING")

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

    # speed: compiled code fuses operations and spares Python between them, a CUDA graph launches at
    # once all that it has recorded; any combination of the flags works, none too
    compile: bool = False  # compile the rollout's steps and the updates with torch.compile
    cudagraphs: bool = False  # replay whole rollouts and epochs as CUDA graphs

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

    def __post_init__(self):
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches or batch_size == self.num_minibatches:
            raise ValueError(f"--num-minibatches: {batch_size:,} steps, two or more in each")
        if self.total_timesteps < batch_size:
            raise ValueError(f"--total-timesteps: a rollout has {batch_size:,} steps")
        if not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1):
            raise ValueError("--gamma and --gae-lambda lie between 0 and 1")


STEADY_AFTER = 3  # rollouts; a variant has compiled and captured all by then
# speed: activations of about so many rows, 1 MB per layer, stay in a CPU's caches
CACHED_ROWS = 4096


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
    log_policy, values = model(batch.obs)
    log_probs = log_policy.gather(1, batch.actions[:, None]).squeeze(1)
    log_ratios = log_probs - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
    value_clip = args.clip_coef if args.clip_vloss else None
    v_loss = value_loss(values, batch, value_clip)
    entropies = -(log_policy.exp() * log_policy).sum(dim=1)
    entropy = entropies.mean()
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


class PPO(nn.Module):
    """Networks, optimizer and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, obs_dim: int, num_actions: int, device: torch.device):
        super().__init__()
        self.args = args
        self.model = ActorCritic(obs_dim, num_actions).to(device)
        # speed: all parameters become views of one vector: one gradient, one norm, one step. Critic
        # and actor take turns in it, so that a layer of both is one stack
        pairs = zip(self.model.critic.parameters(), self.model.actor.parameters(), strict=True)
        parameters = list(chain.from_iterable(pairs))
        flat = nn.utils.parameters_to_vector(parameters)
        # a leaf that is made here, because torch 2.11 cannot compile one that `gradient` makes
        self.flat = flat.detach().requires_grad_()
        nn.utils.vector_to_parameters(self.flat, parameters)
        hidden = [(2, 64, obs_dim), (2, 1, 64), (2, 64, 64), (2, 1, 64)]
        self.shapes = hidden + [each.shape for each in parameters[8:]]
        self.optimizer = Adam([self.flat], lr=args.learning_rate, eps=1e-5)
        self.optimizers = (self.optimizer,)

    # speed: without the critic, which sees whole rollouts
    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """obs (N, O), exponential noise (N, A) -> actions (N,), log_probs (N,).

        With probabilities p and exponential noise q, the largest p / q is a draw from p.
        """
        with torch.no_grad():
            # speed: the actor alone
            log_policy = F.log_softmax(self.model.actor(obs), dim=-1)
            actions = (log_policy - noise.log()).argmax(dim=1)
            log_probs = log_policy.gather(1, actions[:, None]).squeeze(1)
            # speed: no values
            return actions, log_probs

    def value(self, obs: Tensor) -> Tensor:
        """obs (N, O) -> values (N,)."""
        with torch.no_grad():
            return self.model.critic(obs).squeeze(-1)

    # speed: one call for acting and simulation, without stages, to be compiled or captured
    def step(self, envs, noise, starts) -> dict[str, Tensor]:
        """A step of `envs` from where they are, given noise (N, A) and starts (N, O)."""
        obs = envs.state.clone()
        actions, log_probs = self.act(obs, noise)
        _, rewards, terminated, _, infos = envs.step(actions, starts)
        return {
            "obs": obs,
            "actions": actions,
            "log_probs": log_probs,
            "rewards": rewards,
            "final_obs": infos["final_obs"],
            "terminated": terminated,
            "ended": infos["_episode"],
            "episode_returns": infos["episode"]["r"],
        }

    def roll_out(self, envs, noise, starts) -> Rollout:
        """Steps of `envs`, given noise (T, N, A) and starts (T, N, O)."""
        rows = [self.step(envs, *draws) for draws in zip(noise, starts, strict=True)]
        columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        # speed: on a CPU one step after the other, which its caches hold; on a GPU all at once
        count = len(rows) if self.flat.is_cpu else 1
        values, next_values = (
            torch.cat([self.value(part) for part in columns[name].chunk(count)])
            for name in ("obs", "final_obs")
        )
        next_values = next_values * ~columns.pop("terminated")
        del columns["final_obs"]
        return Rollout(values=values, next_values=next_values, **columns)

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
        # speed: three compiled parts. On a CPU the middle one takes about as many rows as caches
        # hold; the mean of the pieces' gradients is the minibatch's. A GPU takes all rows at once
        first, *others = self.gather(batch, index)
        gradient, metrics = self.gradient(first)
        for piece in others:
            more, more_metrics = self.gradient(piece)
            gradient += more
            for name in metrics:
                metrics[name] += more_metrics[name]
        return self.optimize(gradient, metrics, 1 + len(others))

    def gather(self, batch: Batch, index: Tensor) -> list[Batch]:
        """The steps of `batch` in index, in pieces, with advantages normalized over all of them."""
        minibatch = Batch._make([column[index] for column in batch])
        # speed: here, because the loss sees a piece at a time
        if self.args.norm_adv:
            advantages = minibatch.advantages
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            minibatch = minibatch._replace(advantages=advantages)
        count = 1
        if index.is_cpu:
            count = max(len(index) // CACHED_ROWS, 1)
        while len(index) % count:  # of one size
            count -= 1
        chunks = [column.chunk(count) for column in minibatch]
        return [Batch._make(piece) for piece in zip(*chunks, strict=True)]

    # speed: a layer of both networks is one batched product. Change it together with `mlp`
    def stacked_model(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """What `model` computes, from `flat`."""
        parts = self.flat.split([math.prod(shape) for shape in self.shapes])
        parts = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        weight1, bias1, weight2, bias2, critic, actor, critic_bias, actor_bias = parts
        x = obs.expand(2, -1, -1)
        x = torch.baddbmm(bias1, x, weight1.mT).tanh()
        x = torch.baddbmm(bias2, x, weight2.mT).tanh()
        values = F.linear(x[0], critic, critic_bias).squeeze(-1)
        log_policy = F.log_softmax(F.linear(x[1], actor, actor_bias), dim=-1)
        return log_policy, values

    def gradient(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient as a value, because zero_grad cannot be compiled, and {name: tensor ()}."""
        args = replace(self.args, norm_adv=False)
        loss, metrics = ppo_loss(self.stacked_model, batch, args)
        (gradient,) = torch.autograd.grad(loss, self.flat)
        return gradient, metrics

    def optimize(self, gradient, metrics, count) -> dict[str, Tensor]:
        """A step of Adam by the clipped mean; gradient, metrics: sums over `count` pieces."""
        norm = gradient.norm() / count
        scale = (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        self.optimizer.step([gradient * (scale / count)])
        return {name: total / count for name, total in metrics.items()}

    def learn(self, batch: Batch, order: Tensor) -> dict[str, Tensor]:
        """An epoch of M minibatches in the order of a permutation (B,) -> {name: tensor (M,)}."""
        indices = order.view(self.args.num_minibatches, -1)
        rows = [self.update(batch, index) for index in indices]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# speed: a step and the critic become one compiled call each, an update three or more. Advantages
# are compiled on a GPU alone: on a CPU that takes seconds and gains nothing that one could measure
def compile_agent(agent: PPO) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process."""
    torch._dynamo.reset()  # what others have compiled in this process counts against a limit
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    torch._inductor.config.cpp.use_decompose_tanh = True  # by exp: a third of the time, to 2e-7
    if torch.__version__.startswith("2.11"):
        torch._inductor.config.reorder_for_locality = False  # True moves reads past writes
        torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs
    names = ["step", "value", "gather", "gradient", "optimize"]
    if not next(agent.parameters()).is_cpu:
        names.append("prepare")
    for name in names:
        method = getattr(agent, name)
        setattr(agent, name, torch.compile(method, fullgraph=True))


# speed: for a GPU, a rollout and an epoch become one CUDA graph each, in which no kernel waits for
# its launch; a third call captures, when all is compiled
def capture_agent(agent: PPO) -> None:
    """Rollouts and epochs replay what their third call has recorded, in the same environments.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused,
    one of the environments', such as `force`, has no effect.
    """
    torch.compiler.config.force_cudagraph_gc = True  # a graph freed amid a capture would end it
    recorded = dict(vars(agent.args))
    learn = CudaGraphModule(agent.learn, warmup=3)

    def replay(batch, order):
        assert vars(agent.args) == recorded, "CUDA graphs keep args: make what changes a tensor"
        return learn(batch, order)

    agent.roll_out = CudaGraphModule(agent.roll_out, warmup=3)
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

    envs = CartPole(args.num_envs, device)
    obs_dim = envs.single_observation_space.shape[0]
    num_actions = envs.single_action_space.n
    agent = PPO(args, obs_dim, num_actions, device)
    if args.resume:
        run.restore(agent)

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
        shape = args.num_steps, args.num_envs
        noise = torch.empty(*shape, num_actions, device=device).exponential_()
        starts = torch.empty(*shape, obs_dim, device=device).uniform_(-0.05, 0.05)
        # speed: acting and simulation are one compiled call per step, captured even one replay for
        # all steps, so they share a stage: that of the networks, which take most of it
        run.stage("inference")
        rollout = agent.roll_out(envs, noise, starts)
        run.step += batch_size

        # 2. Learn from it in several epochs.
        run.stage("backpropagation")
        batch = agent.prepare(rollout)
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
        # speed: one wait for all of them, in the stage of what it waits for
        run.stage("backpropagation")
        row = dict(zip(row, torch.stack(list(row.values())).tolist(), strict=True))
        row["charts/learning_rate"] = learning_rate
        run.stage("backpropagation")  # whose work the next line waits for
        returns = rollout.episode_returns.where(rollout.ended, math.nan)
        mean_return = returns.nanmean().item()
        if math.isfinite(mean_return):  # an episode has ended; each step is worth 1
            row["charts/episodic_return"] = row["charts/episodic_length"] = mean_return
        run.log(row)

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
    seeds = np.random.SeedSequence(args.seed).generate_state(args.eval_episodes) >> 1
    seeds = seeds.tolist()  # below 2**31, and not training's
    obs, _ = envs.reset(seed=seeds)
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
