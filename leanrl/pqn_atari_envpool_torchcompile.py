r"""Parallelised Q-Network (PQN) for Atari on EnvPool, with torch.compile and CUDA graphs.

    python leanrl/pqn_atari_envpool_torchcompile.py --compile --cudagraphs
    python leanrl/pqn_atari_envpool_torchcompile.py --compile --bf16 --channels-last \
        --env-id Pong-v5 --num-envs 32 --num-steps 64 --num-minibatches 8 --update-epochs 2 \
        --learning-rate 5e-4 --q-lambda 0.85 --total-timesteps 2400000      # Pong

The algorithm is that of its twin, pqn_atari_envpool.py, which says where it comes from and what the
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
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Literal, NamedTuple

# speed: tensordict would log two lines for each graph that it captures, amid the progress
os.environ.setdefault("TD_LOGGING_LEVEL", "WARNING")

import envpool
import numpy as np
import torch
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
    bf16: bool = False  # convolutions, hidden layer in bfloat16; weights and losses stay float32
    channels_last: bool = False  # keep images and convolutions in the order height, width, channel

    env_id: str = "Breakout-v5"  # id of the game in EnvPool
    total_timesteps: int = 10_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 8  # environments stepped side by side
    num_steps: int = 128  # steps of a rollout in each environment
    learning_rate: float = 2.5e-4  # learning rate of the optimizer, at first
    anneal_lr: bool = True  # lower it from rollout to rollout, linearly towards zero
    gamma: float = 0.99  # discount factor
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over a rollout
    max_grad_norm: float = 10.0  # longest gradient; longer ones are scaled down to it
    start_e: float = 1.0  # probability of a random action, at first
    end_e: float = 0.01  # probability of a random action, after the decay, and in evaluations
    exploration_fraction: float = 0.1  # share of all steps in which it decays, linearly
    q_lambda: float = 0.65  # lambda of the returns: 0 is one step, 1 the whole rollout

    def __post_init__(self):
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches:
            raise ValueError(f"--num-minibatches: {batch_size:,} steps, as many in each")
        if self.total_timesteps < batch_size:
            raise ValueError(f"--total-timesteps: a rollout has {batch_size:,} steps")
        if not (0 <= self.gamma <= 1 and 0 <= self.q_lambda <= 1):
            raise ValueError("--gamma and --q-lambda lie between 0 and 1")


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


# Networks


def layer_init(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights, zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


# speed: images with channels last would be copied to the other order and back by nn.LayerNorm
class LayerNorm(nn.LayerNorm):
    """Layer norm that also takes images (B, C, H, W) that lie in memory as (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_contiguous():
            return super().forward(x)
        weight = self.weight.movedim(0, -1)
        bias = self.bias.movedim(0, -1)
        x = x.movedim(1, -1)
        x = torch.layer_norm(x, weight.shape, weight, bias, self.eps)
        return x.movedim(-1, 1)


class QNetwork(nn.Module):
    """Values of the actions, by a network that normalizes its layers (the paper's section 3)."""

    # speed: the convolutions' number format and memory layout
    def __init__(self, num_actions: int, bf16: bool, channels_last: bool):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            LayerNorm([32, 20, 20]),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            LayerNorm([64, 9, 9]),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            LayerNorm([64, 7, 7]),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            LayerNorm(512),
            nn.ReLU(),
        )
        self.head = layer_init(nn.Linear(512, num_actions))
        # speed: GPUs convolve faster in bfloat16; they and some CPUs also with channels last
        self.bf16 = bf16
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=self.layout)

    def forward(self, obs: Tensor) -> Tensor:
        """obs (B, O) uint8 -> values (B, A)."""
        # speed: the head stays in float32: 8 bits are few for a value
        images = obs / 255.0
        images = images.contiguous(memory_format=self.layout)
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            features = self.network(images)
        features = features.to(self.head.weight.dtype)
        return self.head(features)


# Storage


class Batch(NamedTuple):
    """B steps of a rollout."""

    obs: Tensor  # (B, O) uint8
    actions: Tensor  # (B,) int64
    returns: Tensor  # (B,)


class Rollout:
    """T steps of N environments on `device`, where observations stay uint8."""

    def __init__(self, steps: int, num_envs: int, device: torch.device):
        shape = steps, num_envs
        self.obs = torch.zeros(*shape, *OBS_SHAPE, dtype=torch.uint8, device=device)
        self.actions = torch.zeros(shape, dtype=torch.int64, device=device)
        self.values = torch.zeros(shape, device=device)  # of the best action
        # speed: for a GPU: the CPU writes the rest into its own memory, copied once per rollout
        device = "cpu"
        self.rewards = torch.zeros(shape, device=device)
        # the last step of an episode has 1 in `ended` and, if it was truncated, in `final_values`
        # the value of the final observation; all others have 0
        self.ended = torch.zeros(shape, device=device)
        self.final_values = torch.zeros(shape, device=device)


# speed: for a GPU: from pinned memory it copies while the CPU goes on
def upload(values: Tensor, target: Tensor) -> None:
    """Copies without waiting; what `values` becomes afterwards is not copied."""
    if target.is_cuda:
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)


# Losses


# speed: the recurrence of lambda_returns by doubling, for its last line
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


def lambda_returns(
    rewards: Tensor, next_values: Tensor, ended: Tensor, gamma: float, lam: float
) -> Tensor:
    """Returns of Q(lambda), as in the paper's algorithm 1 (Peng and Williams, 1994) -> (T, N).

    All (T, N). `next_values` is the best value of what follows each step in its own episode: 0
    after a termination, that of the final observation after a truncation. `ended` is 1 after
    either, and the rollout ends as a truncated episode does.
    """
    # speed: log2(T) vector operations instead of T: the return of step t is a constant and a weight
    # times the return of step t + 1
    weights = gamma * lam * (1 - ended)
    constants = rewards + (gamma - weights) * next_values
    constants[-1] += weights[-1] * next_values[-1]
    return reverse_scan(constants, weights)


def td_loss(model: QNetwork, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the values of the taken actions -> loss (), what is logged."""
    values = model(batch.obs)
    taken = batch.actions[:, None]
    values = values.gather(1, taken).squeeze(1)
    loss = (values - batch.returns).square().mean()
    metrics = {
        "losses/td_loss": loss.detach(),
        "losses/q_values": values.detach().mean(),
    }
    return loss, metrics


# Agent


# speed: at torch.optim.RAdam a compiled function breaks apart; with this one an update is one call.
# The powers of beta and the count of steps are state, which compiled code and graphs read
class RAdam:
    """RAdam (Liu et al., 2019, arXiv:1908.03265, algorithm 2), all parameters in one call.

    Change `lr` in place: a graph goes on with the tensor that it has captured.
    """

    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.betas = (0.9, 0.999)
        self.exp_avgs = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.exp_avg_sqs = [torch.zeros_like(parameter) for parameter in self.parameters]
        device = self.parameters[0].device
        number = torch.ones((), dtype=torch.float64, device=device)
        self.beta_powers = [number.clone() for _ in self.betas]
        self.steps = torch.zeros_like(number)
        self.lr = torch.tensor(lr, device=device)

    def state_dict(self):
        tensors = [*self.exp_avgs, *self.exp_avg_sqs, *self.beta_powers, self.steps]
        return {"state": tensors}

    def load_state_dict(self, state):
        torch._foreach_copy_(self.state_dict()["state"], state["state"])

    def step(self, gradients):
        """Updates the parameters in place; `gradients` in their order and shapes."""
        beta1, beta2 = self.betas
        with torch.no_grad():
            steps = self.steps.add_(1)
            beta1_power = self.beta_powers[0].mul_(beta1)
            beta2_power = self.beta_powers[1].mul_(beta2)
            torch._foreach_lerp_(self.exp_avgs, gradients, 1 - beta1)
            torch._foreach_mul_(self.exp_avg_sqs, beta2)
            torch._foreach_addcmul_(self.exp_avg_sqs, gradients, gradients, 1 - beta2)
            rho_inf = 2 / (1 - beta2) - 1
            rho = rho_inf - 2 * steps * beta2_power / (1 - beta2_power)  # small: hence float64
            rectification = (rho - 4) * (rho - 2) * rho_inf
            rectification = rectification / ((rho_inf - 4) * (rho_inf - 2) * rho)
            rectification = (rectification * (1 - beta2_power)).sqrt()
            # the first steps, whose second moments are known too badly, do not divide by them
            early = rho <= 5  # as in PyTorch; the paper has 4
            rate = self.lr / (1 - beta1_power) * rectification.masked_fill(early, 1)
            denominators = torch._foreach_sqrt(self.exp_avg_sqs)
            torch._foreach_add_(denominators, 1e-8)
            denominators = [each.masked_fill(early, 1) for each in denominators]
            changes = torch._foreach_div(self.exp_avgs, denominators)
            torch._foreach_mul_(changes, rate.to(self.lr.dtype))
            torch._foreach_sub_(self.parameters, changes)


class PQN(nn.Module):
    """Network, optimizer and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, num_actions: int, device: torch.device):
        super().__init__()
        self.args = args
        # speed: the formats of images; RAdam is the one above
        self.model = QNetwork(num_actions, args.bf16, args.channels_last).to(device)
        self.optimizer = RAdam(self.parameters(), lr=args.learning_rate)
        self.optimizers = (self.optimizer,)

    def act(self, obs: Tensor, explores: Tensor, random_actions: Tensor) -> tuple[Tensor, Tensor]:
        """obs (N, O) -> actions (N,), random where `explores` (N,); best values (N,)."""
        with torch.no_grad():
            values, actions = self.model(obs).max(dim=1)
            actions = torch.where(explores, random_actions, actions)
            return actions, values

    def value(self, obs: Tensor) -> Tensor:
        """obs (N, O) -> best values (N,)."""
        with torch.no_grad():
            return self.model(obs).amax(dim=1)

    def prepare(self, rollout: Rollout, last_values: Tensor) -> Batch:
        """A rollout and the best values of what follows its last step (N,) -> its T N steps."""
        # speed: for a GPU: one copy each of what the CPU has written, instead of one per step
        columns = {name: column.to(last_values.device) for name, column in vars(rollout).items()}
        rollout = SimpleNamespace(**columns)
        next_values = torch.cat([rollout.values[1:], last_values[None]])
        next_values = torch.where(rollout.ended.bool(), rollout.final_values, next_values)
        returns = lambda_returns(
            rollout.rewards,
            next_values,
            rollout.ended,
            self.args.gamma,
            self.args.q_lambda,
        )
        batch = Batch(obs=rollout.obs, actions=rollout.actions, returns=returns)
        return Batch._make([column.flatten(0, 1) for column in batch])

    def update(self, batch: Batch, index: Tensor) -> dict[str, Tensor]:
        """One gradient step on the minibatch `batch[index]`."""
        minibatch = Batch._make([column[index] for column in batch])
        loss, metrics = td_loss(self.model, minibatch)
        # speed: gradients as values: no .grad to fill and to zero, and zero_grad cannot be compiled
        gradients = torch.autograd.grad(loss, self.optimizer.parameters)
        norm = nn.utils.get_total_norm(gradients)
        scale = self.args.max_grad_norm / (norm + 1e-6)
        scale = scale.clamp(max=1)
        gradients = torch._foreach_mul(gradients, scale)
        self.optimizer.step(gradients)
        return metrics

    def learn(self, batch: Batch, order: Tensor) -> dict[str, Tensor]:
        """An epoch in the order of a permutation (B,) -> what its last minibatch logs."""
        for index in order.view(self.args.num_minibatches, -1):
            metrics = self.update(batch, index)
        return metrics


def exploration(args: Args, step: int, device: torch.device) -> Tensor:
    """Probabilities (T, 1) of a random action in the steps of the rollout that begins at `step`."""
    steps = step + args.num_envs * torch.arange(1, args.num_steps + 1, device=device)
    progress = steps / (args.exploration_fraction * args.total_timesteps)
    epsilons = args.start_e + progress.clamp(max=1) * (args.end_e - args.start_e)
    return epsilons[:, None]


# speed: acting and an update, optimizer included, become one compiled call each. Returns, once a
# rollout, would take seconds to compile and gain nothing that one could measure
def compile_agent(agent: PQN) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process."""
    torch._dynamo.reset()  # what others have compiled in this process counts against a limit
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    if torch.__version__.startswith("2.11"):
        torch._inductor.config.reorder_for_locality = False  # True moves reads past writes
        torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs
    if next(agent.parameters()).is_cpu:
        # Inductor sums the gradients of a layer norm's weights over the batch column by column,
        # which misses the caches; without its decompositions it calls PyTorch's own kernels
        from torch._inductor.decomposition import decompositions, remove_decompositions

        aten = torch.ops.aten
        norms = [aten.native_layer_norm, aten.native_layer_norm_backward]
        remove_decompositions(decompositions, norms)
    for name in ("act", "update"):
        method = getattr(agent, name)
        setattr(agent, name, torch.compile(method, fullgraph=True))


# speed: for a GPU, one launch instead of many; a third call captures, when all is compiled
def capture_agent(agent: PQN) -> None:
    """Acting and an epoch replay what their third call has recorded.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused.
    """
    torch.compiler.config.force_cudagraph_gc = True  # a graph freed amid a capture would end it
    recorded = dict(vars(agent.args))
    learn = CudaGraphModule(agent.learn, warmup=3)

    def replay(batch, order):
        assert vars(agent.args) == recorded, "CUDA graphs keep args: make what changes a tensor"
        return learn(batch, order)

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

    envs = AtariEnvs(args.env_id, args.num_envs, seed, episodic_life=True, reward_clip=True)
    num_actions = int(envs.pool.action_space.n)
    agent = PQN(args, num_actions, device)
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

    obs, _ = envs.pool.reset()
    run.open()
    while not run.ending:
        learning_rate = args.learning_rate
        if args.anneal_lr:
            learning_rate *= 1 - run.step / run.total_steps
        # speed: in place, where compiled code and graphs read it
        agent.optimizer.lr.fill_(learning_rate)

        # 1. Roll out: T steps with the policy as it is.
        shape = args.num_steps, args.num_envs
        random_actions = torch.randint(num_actions, shape, device=device)
        epsilons = exploration(args, run.step, device)
        explores = torch.rand(shape, device=device) < epsilons
        rollout.final_values.zero_()
        for t in range(args.num_steps):
            run.stage("inference")
            # speed: a copy for which the CPU does not wait
            upload(torch.as_tensor(obs), rollout.obs[t])
            sample, values = agent.act(rollout.obs[t], explores[t], random_actions[t])
            actions = sample.cpu().numpy()
            run.stage("simulation")
            obs, rewards, terminated, truncated, infos = envs.step(actions)

            run.stage("replay")
            ended = terminated | truncated
            rollout.actions[t] = sample
            rollout.values[t] = values
            rollout.rewards[t] = torch.as_tensor(rewards)
            rollout.ended[t] = torch.as_tensor(ended)
            run.step += args.num_envs
            # Where an episode ended, obs is already the next episode's first.
            for i in np.flatnonzero(truncated):
                run.stage("inference")
                final_obs = torch.as_tensor(infos["final_obs"][[i]], device=device)
                rollout.final_values[t, i] = agent.value(final_obs)
            for score, length in infos["games"]:
                run.stage("logging")
                run.write({"charts/episodic_return": score, "charts/episodic_length": length})

        # 2. Learn from it in several epochs.
        run.stage("backpropagation")
        last_values = agent.value(torch.as_tensor(obs, device=device))
        batch = agent.prepare(rollout, last_values)
        for _ in range(args.update_epochs):
            order = torch.randperm(batch_size, device=device)
            metrics = agent.learn(batch, order)
        run.tick()

        # 3. Log the last minibatch's losses.
        metrics["charts/learning_rate"] = learning_rate
        metrics["charts/epsilon"] = epsilons[-1, 0]
        run.log(metrics)

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


def evaluate(agent: PQN, args: Args, video: Path) -> float:
    """Mean score of K whole games from always the same starts, exploring with end_e."""
    unseen = args.seed + 2**30  # not the games of training
    envs = AtariEnvs(
        args.env_id,
        args.eval_episodes,
        unseen,
        episodic_life=True,  # EnvPool serves a new ball only where an episode begins
        render_mode="rgb_array",
    )
    device = agent.model.head.weight.device
    generator = torch.Generator().manual_seed(unseen)
    games = args.eval_episodes
    num_actions = int(envs.pool.action_space.n)
    frames = []
    returns = np.zeros(games)
    running = np.ones(games, dtype=bool)
    obs, _ = envs.pool.reset()
    while running.any():  # EnvPool ends games after 27,000 steps
        if args.capture_video and running[0]:
            frames.append(envs.pool.render(env_ids=0)[0])
        explores = torch.rand(games, generator=generator) < args.end_e
        random_actions = torch.randint(num_actions, (games,), generator=generator)
        inputs = torch.from_numpy(obs).to(device)
        explores = explores.to(device)
        random_actions = random_actions.to(device)
        actions, _ = PQN.act(agent, inputs, explores, random_actions)  # agent.act may be compiled
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
