r"""Proximal Policy Optimization (PPO) for Atari on EnvPool, with torch.compile and CUDA graphs.

    python leanrl/ppo_atari_envpool_torchcompile.py --compile --cudagraphs
    python leanrl/ppo_atari_envpool_torchcompile.py --compile --bf16 --channels-last \
        --env-id Pong-v5 --num-envs 32 --num-minibatches 16 --learning-rate 5e-4 \
        --total-timesteps 1800000                                   # Pong

The algorithm is that of its twin, ppo_atari_envpool.py, which says where it comes from and what the
shapes mean; the hunks that differ start with `# speed:` and say what they buy, the rest is the same
to the letter. Without a CUDA device --cudagraphs says so in one line and the run goes on. The first
rollouts pay for compilation, which is reported as warm-up: less with a warm cache.
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
from collections import Counter, defaultdict
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count, pairwise, product
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Literal, NamedTuple

# speed: tensordict would log two lines for each graph that it captures, amid the progress
os.environ.setdefault("TD_LOGGING_LEVEL", "WARNING")

import envpool
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
    compile: bool = False  # compile acting and updating with torch.compile
    cudagraphs: bool = False  # replay acting and whole epochs as CUDA graphs
    bf16: bool = False  # compute all but the heads in bfloat16; weights and losses stay float32
    channels_last: bool = False  # keep images and convolutions in the order height, width, channel

    env_id: str = "Breakout-v5"  # id of the game in EnvPool
    total_timesteps: int = 10_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 8  # environments stepped side by side
    num_steps: int = 128  # steps of a rollout in each environment
    learning_rate: float = 2.5e-4  # learning rate of the optimizer, at first
    anneal_lr: bool = True  # lower it from rollout to rollout, linearly towards zero
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over a rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.1  # how far the ratio of new to old probabilities may go from 1
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
OBS_SHAPE = (4, 84, 84)  # frames, height, width


# Environment


class AtariEnvs:
    """N games on EnvPool, each of which resets in the step that ends its episode (`SAME_STEP`).

    EnvPool by itself resets in the step after, whose action and reward count for nothing. Here
    that step is taken at once, so that a rollout holds none.
    """

    def __init__(self, env_id: str, num_envs: int, seed: int, **options):
        known = envpool.registration.registry.specs  # {id: (module, class, options)}
        if "envpool.atari" not in known.get(env_id, ()):
            raise ValueError(f"--env-id: EnvPool has no Atari game {env_id}; Breakout-v5 is one")
        seed %= 2**31  # EnvPool's limit
        self.pool = envpool.make_gymnasium(env_id, num_envs=num_envs, seed=seed, **options)
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, dtype=int)

    def step(self, actions: np.ndarray) -> tuple:
        """Sends actions (N,), receives what they lead to."""
        self.pool.send(actions)
        return self.recv()

    def recv(self) -> tuple:
        """Ends a step -> observations (N, O), rewards, terminated, truncated, each (N,), infos.

        infos: `final_obs` (N, O), from before resets; `whole` (N,), where the game is over, not
        only a life; `games`, their (score, steps), without the frames of resets.
        """
        obs, rewards, terminated, truncated, infos = self.pool.recv()
        over = infos["terminated"] == 1  # the game, not only a life
        terminated |= over  # EnvPool says truncated where it is over just at the limit of frames
        truncated &= ~over
        ended = terminated | truncated
        whole = over | truncated  # games
        self.returns += infos["reward"]  # not clipped
        self.lengths += 1
        games = list(zip(self.returns[whole], self.lengths[whole], strict=True))
        infos = {"final_obs": obs, "whole": whole, "games": games}
        if ended.any():
            index = np.flatnonzero(ended)
            any_action = np.zeros_like(index)
            first_obs, *_ = self.pool.step(any_action, index)
            obs = obs.copy()
            obs[index] = first_obs
            self.returns[whole] = 0
            self.lengths[whole] = 0
        return obs, rewards, terminated, truncated, infos


# speed: EnvPool simulates one half while the policy acts for the other. Pinned once: a GPU copies
# from there while the CPU goes on, which waits for the actions before it writes there again
def start_games(args: Args, seed: int, device: torch.device) -> tuple[list, Tensor]:
    """[(their part of N, pool) of each half], first observations (N, O); game i has seed + i."""
    halves = []
    obs = torch.empty(args.num_envs, *OBS_SHAPE, dtype=torch.uint8)
    if device.type == "cuda":
        obs = obs.pin_memory()
    for start, end in pairwise(sorted({0, args.num_envs // 2, args.num_envs})):
        envs = AtariEnvs(
            args.env_id, end - start, seed + start, episodic_life=True, reward_clip=True
        )
        obs[start:end] = torch.as_tensor(envs.pool.reset()[0])
        halves.append((slice(start, end), envs))
    return halves, obs


# Networks


def layer_init(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights, zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """Categorical policy and the value of a state, on the features of one network."""

    # speed: the convolutions' number format and memory layout
    def __init__(self, num_actions: int, bf16: bool, channels_last: bool):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)
        # speed: GPUs convolve faster in bfloat16; they and some CPUs also with channels last
        self.bf16 = bf16
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=self.layout)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs (B, O) uint8 -> log-probabilities of the actions (B, A), values (B,)."""
        # speed: the heads stay in float32: 8 bits are few for a log-probability or a value
        images = obs / 255.0
        images = images.contiguous(memory_format=self.layout)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            features = self.network(images)
        features = features.to(self.actor.weight.dtype)
        log_policy = F.log_softmax(self.actor(features), dim=-1)
        values = self.critic(features).squeeze(-1)
        return log_policy, values


# Storage


class Batch(NamedTuple):
    """B steps of a rollout; log_probs and values as they were when it was made."""

    obs: Tensor  # (B, O) uint8
    actions: Tensor  # (B,) int64
    log_probs: Tensor  # (B,), these and what follows float32
    values: Tensor  # (B,)
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,)


class Rollout:
    """T steps of N environments on `device`, where observations stay uint8."""

    def __init__(self, steps: int, num_envs: int, device: torch.device):
        shape = steps, num_envs
        self.obs = torch.zeros(*shape, *OBS_SHAPE, dtype=torch.uint8, device=device)
        self.actions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)
        # speed: for a GPU: the CPU writes the rest into its own memory, copied once per rollout
        device = "cpu"
        self.rewards = torch.zeros(shape, device=device)
        # the last step of an episode has 1 in `ended` and, if it was truncated, in `final_values`
        # the value of the final observation; all others have 0
        self.ended = torch.zeros(shape, device=device)
        self.final_values = torch.zeros(shape, device=device)


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
    """Network, optimizer and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, num_actions: int, device: torch.device):
        super().__init__()
        self.args = args
        # speed: the formats of images; the Adam above compiles and captures with all of an update
        self.model = ActorCritic(num_actions, args.bf16, args.channels_last).to(device)
        self.optimizer = Adam(self.parameters(), lr=args.learning_rate, eps=1e-5)
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
            _, values = self.model(obs)
            return values

    def prepare(self, rollout: Rollout, last_values: Tensor) -> Batch:
        """A rollout and the values of what follows it (N,) -> B = T N steps to learn from."""
        # speed: for a GPU: one copy each of what the CPU has written, instead of one per step
        columns = {name: column.to(last_values.device) for name, column in vars(rollout).items()}
        rollout = SimpleNamespace(**columns)
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
        # speed: gradients as values: no .grad to fill and to zero, and zero_grad cannot be compiled
        gradients = torch.autograd.grad(loss, self.optimizer.parameters)
        norm = nn.utils.get_total_norm(gradients)
        scale = self.args.max_grad_norm / (norm + 1e-6)
        scale = scale.clamp(max=1)
        gradients = torch._foreach_mul(gradients, scale)
        self.optimizer.step(gradients)
        return metrics

    def learn(self, batch: Batch, order: Tensor) -> dict[str, Tensor]:
        """An epoch of M minibatches in the order of a permutation (B,) -> {name: tensor (M,)}."""
        indices = order.view(self.args.num_minibatches, -1)
        rows = [self.update(batch, index) for index in indices]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# speed: acting and an update, optimizer included, become one compiled call each. Advantages, once a
# rollout, would take seconds to compile and gain nothing that one could measure
def compile_agent(agent: PPO) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process."""
    torch._dynamo.reset()  # what others have compiled in this process counts against a limit
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    if torch.__version__.startswith("2.11"):
        torch._inductor.config.reorder_for_locality = False  # True moves reads past writes
        torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs
    for name in ("act", "update"):
        method = getattr(agent, name)
        setattr(agent, name, torch.compile(method, fullgraph=True))


# speed: for a GPU, one launch instead of many; a third call captures, when all is compiled
def capture_agent(agent: PPO) -> None:
    """Acting and an epoch replay what their third call has recorded.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused.
    """
    torch.compiler.config.force_cudagraph_gc = True  # a graph freed amid a capture would end it
    recorded = dict(vars(agent.args))
    act = agent.act
    learn = CudaGraphModule(agent.learn, warmup=3)

    def replay(batch, order):
        assert vars(agent.args) == recorded, "CUDA graphs keep args: make what changes a tensor"
        return learn(batch, order)

    graphs = defaultdict(lambda: CudaGraphModule(act, warmup=3))  # of each number of games
    agent.act = lambda obs, noise: graphs[len(obs)](obs, noise)
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
    # speed: a processor that emulates bfloat16 is many times slower than in float32
    if args.bf16 and device.type == "cpu":
        cpu = torch.cpu.get_capabilities()
        on_arm = cpu.get("bf16", False) and torch.backends.mkldnn.is_available()
        args.bf16 = cpu.get("avx512_bf16", False) or on_arm
        if not args.bf16:
            print("--bf16: this processor would emulate it, so it has no effect", file=sys.stderr)
    seed = args.seed + run.start_step
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

    # speed: two pools
    halves, obs = start_games(args, seed, device)
    num_actions = int(halves[0][1].pool.action_space.n)
    agent = PPO(args, num_actions, device)
    rollout = Rollout(args.num_steps, args.num_envs, device)
    if args.resume:
        run.restore(agent)

    # speed: methods are replaced before the loop, which remains the baseline's
    if args.compile:
        compile_agent(agent)
    if args.cudagraphs and device.type == "cuda":
        capture_agent(agent)
    elif args.cudagraphs:
        print("--cudagraphs: without CUDA it has no effect", file=sys.stderr)

    run.open()
    while not run.ending:
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= 1 - run.step / run.total_steps
        # speed: in place, where compiled code and graphs read it
        agent.optimizer.lr.fill_(learning_rate)

        # 1. Roll out: T steps with the policy as it is.
        shape = args.num_steps, args.num_envs, num_actions
        noise = torch.empty(shape, device=device).exponential_()
        rollout.final_values.zero_()
        # speed: the halves take turns: one receives what its last actions led to, acts, and sends,
        # while EnvPool simulates the other; at first there is nothing to receive, at last to send
        for t, (games, envs) in product(range(args.num_steps + 1), halves):
            if t > 0:
                run.stage("simulation")
                next_obs, rewards, terminated, truncated, infos = envs.recv()
                run.stage("replay")
                obs[games] = torch.as_tensor(next_obs)
                ended = terminated | truncated
                rollout.rewards[t - 1, games] = torch.as_tensor(rewards)
                rollout.ended[t - 1, games] = torch.as_tensor(ended)
                if games.start == 0:  # of both halves, so that episodes have the baseline's step
                    run.step += args.num_envs
                # Where an episode ended, obs is already the next episode's first.
                for i in np.flatnonzero(truncated):
                    run.stage("inference")
                    final_obs = torch.as_tensor(infos["final_obs"][[i]], device=device)
                    rollout.final_values[t - 1, games][i] = agent.value(final_obs)
                for score, length in infos["games"]:
                    run.stage("logging")
                    run.write({"charts/episodic_return": score, "charts/episodic_length": length})
            if t < args.num_steps:
                run.stage("inference")
                # speed: a copy for which the CPU does not wait
                rollout.obs[t, games].copy_(obs[games], non_blocking=True)
                sample, log_probs, values = agent.act(rollout.obs[t, games], noise[t, games])
                envs.pool.send(sample.cpu().numpy())
                run.stage("replay")
                rollout.actions[t, games] = sample
                rollout.log_probs[t, games] = log_probs
                rollout.values[t, games] = values

        # 2. Learn from it in several epochs.
        run.stage("backpropagation")
        last_values = agent.value(torch.as_tensor(obs, device=device))
        batch = agent.prepare(rollout, last_values)
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
    """Mean score of K whole games from always the same starts, acting as in training."""
    unseen = args.seed + 2**30  # not the games of training
    envs = AtariEnvs(
        args.env_id,
        args.eval_episodes,
        unseen,
        episodic_life=True,  # EnvPool serves a new ball only where an episode begins
        render_mode="rgb_array",
    )
    device = agent.model.actor.weight.device
    generator = torch.Generator().manual_seed(unseen)
    noise = torch.empty(args.eval_episodes, envs.pool.action_space.n)
    frames = []
    returns = np.zeros(args.eval_episodes)
    running = np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.pool.reset()
    while running.any():  # EnvPool ends games after 27,000 steps
        if args.capture_video and running[0]:
            frames.append(envs.pool.render(env_ids=0)[0])
        noise.exponential_(generator=generator)
        inputs = torch.from_numpy(obs).to(device)
        actions, _, _ = PPO.act(agent, inputs, noise.to(device))  # agent.act may be compiled
        actions = actions.cpu().numpy()
        obs, rewards, _, _, infos = envs.step(actions)
        returns += running * rewards
        running &= ~infos["whole"]
    envs.pool.close()
    if frames:
        from gymnasium.utils.save_video import save_video

        save_video(frames, video, fps=15)  # a step is 4 of 60 frames
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
