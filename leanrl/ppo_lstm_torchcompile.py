"""PPO with memory, an LSTM for what cannot be seen at once, with torch.compile and CUDA graphs.

    python leanrl/ppo_lstm_torchcompile.py --compile --cudagraphs

The algorithm is that of its twin, ppo_lstm.py, which says where it comes from and what the shapes
mean; the hunks that differ start with `# speed:` and say what they buy, the rest is the same to the
letter. Without a CUDA device --cudagraphs says so in one line and the run goes on. The first
rollouts pay for compilation.
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
from itertools import count, pairwise
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
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers.utils import RunningMeanStd
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
    compile: bool = False  # compile acting and the update with torch.compile
    cudagraphs: bool = False  # replay acting and an epoch as CUDA graphs

    env_id: str = "CartPole-v1"  # id of the Gymnasium environment
    observed: tuple[int, ...] = ()  # which numbers of an observation are seen; none given: all
    total_timesteps: int = 1_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 16  # environments stepped side by side
    num_steps: int = 64  # steps of a rollout in each environment
    learning_rate: float = 1e-3  # learning rate of the optimizer, at first
    anneal_lr: bool = True  # lower it from rollout to rollout, linearly towards zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch, of whole environments
    update_epochs: int = 10  # passes over a rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the ratio of new to old probabilities may go from 1
    clip_vloss: bool = True  # also clip how far a value may go from its old one
    ent_coef: float = 0.0  # weight of the entropy in the loss
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it
    target_kl: float | None = None  # stop after an epoch whose last minibatch's KL exceeds it

    def __post_init__(self):
        self.observed = tuple(self.observed)  # a checkpoint's is a list
        batch_size = self.num_envs * self.num_steps
        if self.num_envs % self.num_minibatches or batch_size == self.num_minibatches:
            raise ValueError(f"--num-minibatches: must divide {self.num_envs} environments")
        if self.total_timesteps < batch_size:
            raise ValueError(f"--total-timesteps: a rollout has {batch_size:,} steps")
        if not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1):
            raise ValueError("--gamma and --gae-lambda lie between 0 and 1")


STEADY_AFTER = 3  # rollouts; a variant has compiled and captured all by then
HIDDEN = 64  # units of the encoder and of the LSTM


# Environment


# speed: spares copies and infos that nobody reads
class LeanVectorEnv(gym.vector.VectorEnv):
    """N environments that reset in the step that ends an episode; infos are about its end."""

    def __init__(self, envs: list[gym.Env]):
        self.envs = envs
        self.num_envs = len(envs)
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space

    def reset(self, seed: int | list[int]) -> tuple:
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        rows = [env.reset(seed=x) for env, x in zip(self.envs, seeds, strict=True)]
        self.obs = np.stack([obs for obs, _ in rows])
        return self.obs.copy(), self.gather([info for _, info in rows])

    def gather(self, infos: list[dict]) -> dict:
        """The only one that is needed in each step."""
        if "action_mask" not in infos[0]:
            return {}
        return {"action_mask": np.stack([info["action_mask"] for info in infos])}

    def step(self, actions: np.ndarray) -> tuple:
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=bool)
        infos = []
        final_obs = {}
        returns = {}
        lengths = {}
        for i, env in enumerate(self.envs):
            obs, rewards[i], terminated[i], truncated[i], info = env.step(actions[i])
            if terminated[i] or truncated[i]:
                final_obs[i] = obs
                returns[i] = info["episode"]["r"]
                lengths[i] = info["episode"]["l"]
                obs, info = env.reset()
            self.obs[i] = obs
            infos.append(info)
        infos = self.gather(infos)
        infos["final_obs"] = final_obs
        infos["final_info"] = {"episode": {"r": returns, "l": lengths}}
        return self.obs.copy(), rewards, terminated, truncated, infos

    def close_extras(self, **kwargs) -> None:
        for env in self.envs:
            env.close()


def make_envs(
    env_id: str, num_envs: int, observed: tuple[int, ...], video: Path | None = None
) -> gym.vector.VectorEnv:
    """N environments that reset in the step that ends an episode; `video` films the first one.

    An observation is one vector (O,), of the numbers in `observed`, if there are any.
    """

    def make_env(**options) -> gym.Env:
        env = gym.make(env_id, **options)
        if "render_mode" in options:
            env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        actions = env.action_space
        discrete = isinstance(actions, Discrete) and actions.start == 0
        vector = isinstance(actions, Box) and len(actions.shape) == 1
        if not (discrete or vector):
            raise ValueError("--env-id: needs a vector of actions, or discrete ones from 0")
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = gym.wrappers.FlattenObservation(env)
        if observed:
            seen = list(observed)
            space = env.observation_space
            space = Box(space.low[seen], space.high[seen], dtype=space.dtype)
            env = gym.wrappers.TransformObservation(env, lambda obs: obs[seen], space)
        return env

    makers = [make_env] * num_envs
    if video is not None:
        makers[0] = lambda: make_env(render_mode="rgb_array")
    # speed: the class above
    return LeanVectorEnv([make() for make in makers])


def get_masks(envs: gym.vector.VectorEnv, infos: dict) -> np.ndarray:
    """Which discrete actions are valid now (N, A); all, if no info says it, as each must."""
    num_actions = getattr(envs.single_action_space, "n", 1)
    masks = infos.get("action_mask", np.ones((envs.num_envs, num_actions)))
    return np.stack(masks).astype(bool)


class NormalizedEnvs(gym.vector.VectorWrapper):
    """Clips actions, and normalizes by running statistics of all N environments."""

    def __init__(self, envs: gym.vector.VectorEnv, gamma: float):
        super().__init__(envs)
        self.gamma = gamma
        self.obs_rms = RunningMeanStd(shape=envs.single_observation_space.shape)
        self.return_rms = RunningMeanStd()
        self.returns = np.zeros(envs.num_envs)

    def normalize(self, obs: np.ndarray) -> np.ndarray:
        """obs (N, O) -> float32, between -10 and 10."""
        obs = (obs - self.obs_rms.mean) / np.sqrt(self.obs_rms.var + 1e-8)
        return obs.clip(-10, 10).astype(np.float32)

    def reset(self, seed: int) -> tuple:
        obs, infos = self.env.reset(seed=seed)
        self.obs_rms.update(obs)
        return self.normalize(obs), infos

    def step(self, actions: np.ndarray) -> tuple:
        """In a step that ends an episode infos have `final_obs` (N, O), obs where none ended."""
        space = self.single_action_space
        if isinstance(space, Box):
            actions = actions.clip(space.low, space.high)
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        ended = terminated | truncated
        self.obs_rms.update(obs)
        self.returns = self.returns * self.gamma + rewards
        self.return_rms.update(self.returns)
        self.returns[ended] = 0
        rewards = rewards / np.sqrt(self.return_rms.var + 1e-8)
        if ended.any():
            final_obs = obs.copy()
            for i in np.flatnonzero(ended):
                final_obs[i] = infos["final_obs"][i]
            infos["final_obs"] = self.normalize(final_obs)
        return self.normalize(obs), rewards.clip(-10, 10), terminated, truncated, infos

    def state_dict(self) -> dict[str, Tensor]:
        state = {}
        for kind in ("obs_rms", "return_rms"):
            for name in ("mean", "var", "count"):
                number = np.array(getattr(getattr(self, kind), name))  # float64, also of a count
                state[f"{kind}_{name}"] = torch.as_tensor(number)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for kind in ("obs_rms", "return_rms"):
            for name in ("mean", "var", "count"):
                setattr(getattr(self, kind), name, state[f"{kind}_{name}"].numpy())


# Networks


class Categorical(NamedTuple):
    """One of A actions."""

    log_policy: Tensor  # (..., A), log-probabilities

    def sample(self, noise: Tensor) -> Tensor:
        """Exponential noise (..., A) -> actions (...), the largest probability / noise."""
        return (self.log_policy - noise.log()).argmax(dim=-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """actions (...) -> (...)."""
        return self.log_policy.gather(-1, actions[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_policy.exp() * self.log_policy).sum(dim=-1)


class Gaussian(NamedTuple):
    """A independent numbers."""

    mean: Tensor  # (..., A)
    log_std: Tensor  # (A,), the same in all states

    def sample(self, noise: Tensor) -> Tensor:
        """Standard normal noise (..., A) -> actions (..., A)."""
        return self.mean + self.log_std.exp() * noise

    def log_prob(self, actions: Tensor) -> Tensor:
        """actions (..., A) -> log-density (...)."""
        z = (actions - self.mean) * (-self.log_std).exp()
        log_probs = -0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        return log_probs.sum(dim=-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)


def layer_init(layer: nn.Module, gain: float) -> nn.Module:
    """Orthogonal weights, zero biases."""
    for name, parameter in layer.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(parameter, gain)
        else:
            nn.init.zeros_(parameter)
    return layer


class Memory(nn.Module):
    """Encoder, LSTM and a linear layer; the LSTM's state is a tensor (2, N, H), output and cell."""

    def __init__(self, obs_dim: int, outputs: int, gain: float):
        super().__init__()
        self.encoder = layer_init(nn.Linear(obs_dim, HIDDEN), math.sqrt(2))
        self.lstm = layer_init(nn.LSTM(HIDDEN, HIDDEN), gain=1.0)
        self.head = layer_init(nn.Linear(HIDDEN, outputs), gain)

    def forward(self, obs: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """obs (T, N, O), starts (T, N), state before them -> outputs (T, N, ...), state after them.

        `starts` is 1 where an episode begins: there the state before the step is zero. Between the
        steps at which that happens to any sequence, the LSTM takes all steps in one call.
        """
        x = self.encoder(obs).tanh()
        # speed: a compiled call, and a graph, has the same operations each time, a step in each: a
        # GPU's learn in a graph. On a CPU a call for many steps takes a third of the time
        if len(obs) == 1 or obs.is_cuda:
            features = []
            for row, start in zip(x, starts, strict=True):
                state = state * (1 - start[:, None])
                state = torch.stack(torch.lstm_cell(row, tuple(state), *self.lstm.all_weights[0]))
                features.append(state[0])
            return self.head(torch.stack(features)), state
        later = starts[1:].any(dim=1).nonzero().flatten() + 1
        features = []
        for begin, end in pairwise([0, *later.tolist(), len(obs)]):
            state = state * (1 - starts[begin, :, None])
            output, state = self.lstm(x[begin:end], tuple(state[:, None]))
            state = torch.cat(state)
            features.append(output)
        return self.head(torch.cat(features)), state


class ActorCritic(nn.Module):
    """Policy and value, a network each; their states are one tensor (2, 2, N, H)."""

    def __init__(self, obs_dim: int, action_space: Box | Discrete):
        super().__init__()
        self.discrete = isinstance(action_space, Discrete)
        self.action_dim = int(action_space.n) if self.discrete else action_space.shape[0]
        self.critic = Memory(obs_dim, 1, gain=1.0)
        self.actor = Memory(obs_dim, self.action_dim, gain=0.01)
        if not self.discrete:
            self.actor_logstd = nn.Parameter(torch.zeros(self.action_dim))

    def forward(self, obs: Tensor, starts: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """obs (T, N, O), starts (T, N), states -> outputs (T, N, A), values (T, N), states."""
        outputs, actor_state = self.actor(obs, starts, states[0])
        values, critic_state = self.critic(obs, starts, states[1])
        return outputs, values.squeeze(-1), torch.stack([actor_state, critic_state])

    def policy(self, outputs: Tensor, masks: Tensor) -> Categorical | Gaussian:
        """outputs (..., A), masks of valid actions (..., A)."""
        if not self.discrete:
            return Gaussian(outputs, self.actor_logstd)
        logits = outputs.masked_fill(~masks, -1e8)  # not -inf: its entropy would be nan
        return Categorical(F.log_softmax(logits, dim=-1))


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


class Rollout(NamedTuple):
    """A step of N environments, (N, ...) each, or T of them."""

    obs: Tensor  # (T, N, O)
    starts: Tensor  # (T, N), 1 where an episode begins
    masks: Tensor  # (T, N, A) bool, which discrete actions are valid; (T, N, 1) of others
    actions: Tensor  # (T, N, A), or (T, N) int64
    log_probs: Tensor  # (T, N), as all below
    values: Tensor
    rewards: Tensor
    ended: Tensor  # 1 where an episode ended
    final_values: Tensor  # there, the value of its last observation, 0 if it terminated


class Batch(NamedTuple):
    """Rollouts of N environments; log_probs and values as they were when they were made."""

    obs: Tensor  # (T, N, O)
    starts: Tensor  # (T, N)
    masks: Tensor  # (T, N, A)
    actions: Tensor  # (T, N, A), or (T, N)
    log_probs: Tensor  # (T, N), as all below
    values: Tensor
    advantages: Tensor
    returns: Tensor


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


def ppo_loss(
    policy: Categorical | Gaussian, values: Tensor, batch: Batch, args: Args
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a minibatch (equation 9) and what is logged of it -> loss (), {name: tensor ()}."""
    log_ratios = policy.log_prob(batch.actions) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss = policy_loss(log_ratios, advantages, args.clip_coef)
    value_clip = args.clip_coef if args.clip_vloss else None
    v_loss = value_loss(values, batch, value_clip)
    entropy = policy.entropy().mean()
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
    """Network, optimizer and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, obs_dim: int, action_space: gym.Space, device: torch.device):
        super().__init__()
        self.args = args
        self.model = ActorCritic(obs_dim, action_space).to(device)
        # speed: its gradients are values, not fields of the parameters
        self.optimizer = Adam(self.parameters(), lr=args.learning_rate, eps=1e-5)
        self.optimizers = (self.optimizer,)

    def act(
        self, obs: Tensor, starts: Tensor, masks: Tensor, states: Tensor, noise: Tensor
    ) -> tuple:
        """A step of N environments -> actions, log_probs (N,), values (N,), states after it.

        obs (N, O), starts (N,), masks (N, A), states (2, 2, N, H), noise (N, A) for `sample`.
        """
        with torch.no_grad():
            outputs, values, states = self.model(obs[None], starts[None], states)
            policy = self.model.policy(outputs[0], masks)
            actions = policy.sample(noise)
            return actions, policy.log_prob(actions), values[0], states

    def value(self, obs: Tensor, starts: Tensor, states: Tensor) -> Tensor:
        """obs (N, O), starts (N,), states (2, 2, N, H) before them -> values (N,)."""
        with torch.no_grad():
            values, _ = self.model.critic(obs[None], starts[None], states[1])
            return values[0, :, 0]

    def prepare(self, rollout: Rollout, last_values: Tensor) -> Batch:
        """A rollout and the values of what follows it (N,) -> what to learn from."""
        next_values = torch.cat([rollout.values[1:], last_values[None]])
        next_values = torch.where(rollout.ended.bool(), rollout.final_values, next_values)
        advantages = compute_gae(
            rollout.rewards,
            rollout.values,
            next_values,
            rollout.ended,
            self.args.gamma,
            self.args.gae_lambda,
        )
        return Batch(
            obs=rollout.obs,
            starts=rollout.starts,
            masks=rollout.masks,
            actions=rollout.actions,
            log_probs=rollout.log_probs,
            values=rollout.values,
            advantages=advantages,
            returns=advantages + rollout.values,
        )

    def update(self, batch: Batch, states: Tensor, index: Tensor) -> dict[str, Tensor]:
        """One gradient step on the environments in index, from the states (2, 2, N, H)."""
        minibatch = Batch._make([column[:, index] for column in batch])
        outputs, values, _ = self.model(minibatch.obs, minibatch.starts, states[:, :, index])
        # speed: two compiled parts, before and after the LSTMs' backward pass, which is a library's
        loss, metrics = self.loss(outputs, values, minibatch)
        gradients = torch.autograd.grad(loss, self.optimizer.parameters)
        self.optimize(gradients)
        return metrics

    # speed: what is compiled of it
    def loss(self, outputs: Tensor, values: Tensor, batch: Batch) -> tuple[Tensor, dict]:
        """What `ppo_loss` returns, from the networks' outputs (T, N, A) and values (T, N)."""
        policy = self.model.policy(outputs, batch.masks)
        return ppo_loss(policy, values, batch, self.args)

    def optimize(self, gradients: tuple[Tensor, ...]) -> None:
        """A step of Adam by the clipped gradients."""
        norms = torch.stack(torch._foreach_norm(gradients))
        scale = self.args.max_grad_norm / (norms.norm() + 1e-6)
        self.optimizer.step(torch._foreach_mul(gradients, scale.clamp(max=1)))

    def learn(self, batch: Batch, states: Tensor, order: Tensor) -> dict[str, Tensor]:
        """An epoch of M minibatches in the order of a permutation (N,) -> {name: tensor (M,)}."""
        indices = order.view(self.args.num_minibatches, -1)
        rows = [self.update(batch, states, index) for index in indices]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# speed: a step of the policy, and an update but for the LSTMs, which do not compile, are calls
def compile_agent(agent: PPO) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process."""
    torch._dynamo.reset()  # what others have compiled in this process counts against a limit
    torch._dynamo.config.allow_rnn = True  # it may read the weights of an LSTM
    if torch.__version__.startswith("2.11"):
        torch._inductor.config.reorder_for_locality = False  # True moves reads past writes
        torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs
    for name in ("act", "value", "prepare", "loss", "optimize"):
        method = getattr(agent, name)
        setattr(agent, name, torch.compile(method, fullgraph=True))


# speed: for a GPU, one launch instead of thousands; a third call captures, when all is compiled
def capture_agent(agent: PPO) -> None:
    """Acting and learning in an epoch replay what their third call has recorded.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused.
    """
    torch.compiler.config.force_cudagraph_gc = True  # a graph freed amid a capture would end it
    recorded = dict(vars(agent.args))
    learn = CudaGraphModule(agent.learn, warmup=3)

    def replay(batch, states, order):
        assert vars(agent.args) == recorded, "CUDA graphs keep args: make what changes a tensor"
        return learn(batch, states, order)

    agent.act = CudaGraphModule(agent.act, warmup=3)
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

    envs = NormalizedEnvs(make_envs(args.env_id, args.num_envs, args.observed), args.gamma)
    obs_dim = envs.single_observation_space.shape[0]
    agent = PPO(args, obs_dim, envs.single_action_space, device)
    # speed: methods are replaced before the loop, which remains the baseline's
    if args.compile:
        compile_agent(agent)
    if args.cudagraphs and device.type == "cuda":
        capture_agent(agent)
    elif args.cudagraphs:
        print("--cudagraphs: without CUDA it has no effect", file=sys.stderr)
    if args.resume:
        envs.load_state_dict(run.restore(agent)["statistics"])

    obs, infos = envs.reset(seed=seed)
    starts = torch.ones(args.num_envs, device=device)
    states = torch.zeros(2, 2, args.num_envs, HIDDEN, device=device)
    run.open()
    while not run.ending:
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= 1 - run.step / run.total_steps
        # speed: in place, where compiled code and graphs read it
        agent.optimizer.lr.fill_(learning_rate)

        # 1. Roll out: T steps with the policy as it is.
        noise = torch.randn(args.num_steps, args.num_envs, agent.model.action_dim, device=device)
        if agent.model.discrete:
            noise.exponential_()
        first_states = states
        rows = []
        for t in range(args.num_steps):
            run.stage("inference")
            inputs = torch.as_tensor(obs, device=device)
            masks = torch.as_tensor(get_masks(envs, infos), device=device)
            sample, log_probs, values, states = agent.act(inputs, starts, masks, states, noise[t])
            actions = sample.cpu().numpy()
            run.stage("simulation")
            obs, rewards, terminated, truncated, infos = envs.step(actions)

            # Where an episode ended, obs is already the next episode's first.
            final_values = torch.zeros_like(values)
            if truncated.any():
                run.stage("inference")
                final_obs = torch.as_tensor(infos["final_obs"], device=device)
                final_values = agent.value(final_obs, torch.zeros_like(starts), states)
                final_values *= torch.as_tensor(truncated & ~terminated, device=device)
            run.stage("replay")
            ended = terminated | truncated
            step = Rollout(
                obs=inputs,
                starts=starts,
                masks=masks,
                actions=sample,
                log_probs=log_probs,
                values=values,
                rewards=torch.as_tensor(rewards, dtype=torch.float32, device=device),
                ended=torch.as_tensor(ended, dtype=torch.float32, device=device),
                final_values=final_values,
            )
            rows.append(step)
            starts = step.ended
            run.step += args.num_envs
            for i in np.flatnonzero(ended):
                run.stage("logging")
                episode = infos["final_info"]["episode"]
                run.write({"charts/episodic_return": episode["r"][i]})
                run.write({"charts/episodic_length": episode["l"][i]})

        # 2. Learn from it in several epochs.
        run.stage("backpropagation")
        rollout = Rollout._make([torch.stack(column) for column in zip(*rows, strict=True)])
        last_values = agent.value(torch.as_tensor(obs, device=device), starts, states)
        batch = agent.prepare(rollout, last_values)
        clipfracs = []
        for _ in range(args.update_epochs):
            order = torch.randperm(args.num_envs, device=device)
            metrics = agent.learn(batch, first_states, order)
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
            run.save(agent, statistics=envs.state_dict())
        if run.due(args.eval_every, at_end=args.capture_video) and not run.stopped:
            run.stage("evaluation")
            eval_return = evaluate(agent, args, envs, run.dir / f"videos/step-{run.step}")
            run.write({"charts/eval_return": eval_return})
            run.bar.write(f"evaluation at {run.step:,}: {eval_return:,.5g}", file=sys.stderr)
    run.close()
    return run.dir


# What a reader may skip: evaluation, then the records around a run


def evaluate(agent: PPO, args: Args, training: NormalizedEnvs, video: Path) -> float:
    """Mean return of K episodes from always the same starts, without noise."""
    video = video if args.capture_video else None
    envs = make_envs(args.env_id, args.eval_episodes, args.observed, video)
    device = next(agent.parameters()).device
    space = envs.single_action_space
    if not agent.model.discrete:
        low, high = (torch.as_tensor(x).float().to(device) for x in (space.low, space.high))
    returns = np.zeros(args.eval_episodes)
    running = np.ones(args.eval_episodes, dtype=bool)
    seeds = np.random.SeedSequence(args.seed).generate_state(args.eval_episodes) >> 1
    seeds = seeds.tolist()  # below 2**31, and not training's
    generators = random.getstate(), np.random.get_state()  # environments may draw from them
    random.seed(seeds[0])
    np.random.seed(seeds[0])
    obs, infos = envs.reset(seed=seeds)
    starts = torch.ones(args.eval_episodes, device=device)
    state = torch.zeros(2, args.eval_episodes, HIDDEN, device=device)
    for _ in range(50_000):  # an episode without end counts with its return so far
        inputs = torch.as_tensor(training.normalize(obs), device=device)
        masks = torch.as_tensor(get_masks(envs, infos), device=device)
        with torch.no_grad():
            outputs, state = agent.model.actor(inputs[None], starts[None], state)
            policy = agent.model.policy(outputs[0], masks)
            if agent.model.discrete:
                actions = policy.log_policy.argmax(dim=-1)
            else:
                actions = clipped_mean(policy.mean, policy.log_std, low, high)
        actions = actions.cpu().numpy()
        if not agent.model.discrete:
            actions = actions.clip(space.low, space.high)  # against rounding
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        starts.zero_()  # what follows an episode does not count
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
