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
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback until the run begins

# speed: tensordict would log two lines for each graph that it captures, amid the progress
os.environ.setdefault("TD_LOGGING_LEVEL", "WARNING")

import envpool
import gymnasium as gym
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
            raise SystemExit(f"--env-id: EnvPool has no Atari game {env_id}; Breakout-v5 is one")
        seed %= 2**31  # EnvPool's limit
        with one_line("--num-envs", MemoryError):
            self.pool = envpool.make_gymnasium(env_id, num_envs=num_envs, seed=seed, **options)
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, dtype=int)

    def step(self, actions: np.ndarray) -> tuple:
        """Actions (N,) -> observations (N, O), rewards, terminated, truncated, each (N,), infos.

        infos: `final_obs` (N, O), from before resets; `whole` (N,), where the game is over, not
        only a life; `games`, their (score, steps), without the frames of resets.
        """
        obs, rewards, terminated, truncated, infos = self.pool.step(actions)
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
class ChannelsLastNorm(nn.LayerNorm):
    """Layer norm of images (B, C, H, W) that lie in memory as (B, H, W, C)."""

    def forward(self, images: Tensor) -> Tensor:
        weight = self.weight.movedim(0, -1)
        bias = self.bias.movedim(0, -1)
        images = images.movedim(1, -1)
        images = torch.layer_norm(images, weight.shape, weight, bias, self.eps)
        return images.movedim(-1, 1)


class QNetwork(nn.Module):
    """Values of the actions, by a network that normalizes its layers (the paper's section 3)."""

    # speed: the convolutions' number format and memory layout
    def __init__(self, num_actions: int, bf16: bool, channels_last: bool):
        super().__init__()
        # speed: GPUs convolve faster in bfloat16; they and some CPUs also with channels last
        self.bf16 = bf16
        self.layout = torch.contiguous_format
        norm = nn.LayerNorm
        if channels_last:
            self.layout = torch.channels_last
            norm = ChannelsLastNorm
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            # speed: a norm for the layout chosen above
            norm([32, 20, 20]),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            # speed: a norm for that layout
            norm([64, 9, 9]),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            # speed: a norm for that layout
            norm([64, 7, 7]),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.LayerNorm(512),
            nn.ReLU(),
        )
        self.head = layer_init(nn.Linear(512, num_actions))
        # speed: the convolutions' weights
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
        self.rewards = torch.zeros(shape, device=device)
        # the last step of an episode has 1 in `ended` and, if it was truncated, in `final_values`
        # the value of the final observation; all others have 0
        self.ended = torch.zeros(shape, device=device)
        self.final_values = torch.zeros(shape, device=device)
        # speed: for a GPU: the CPU writes into its own memory, which is copied once per rollout
        self.host = {name: torch.zeros(shape) for name in ("rewards", "ended", "final_values")}


# speed: for a GPU: from pinned memory it copies while the CPU goes on
def upload(values: Tensor, target: Tensor) -> None:
    """Copies without waiting; what `values` becomes afterwards is not copied."""
    if target.is_cuda:
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)


# Losses


def lambda_returns(
    rewards: Tensor, next_values: Tensor, ended: Tensor, gamma: float, lam: float
) -> Tensor:
    """Returns of Q(lambda), as in the paper's algorithm 1 (Peng and Williams, 1994) -> (T, N).

    All (T, N). `next_values` is the best value of what follows each step in its own episode: 0
    after a termination, that of the final observation after a truncation. `ended` is 1 after
    either, and the rollout ends as a truncated episode does.
    """
    # speed: log2(T) vector operations instead of T: the return of step t is a constant and a weight
    # times the return of step t + 1. Every sum begins with its own step's constant, and each pass
    # adds to it the sum that begins where it ends, so that it covers twice as many steps
    weights = gamma * lam * (1 - ended)
    returns = rewards + (gamma - weights) * next_values
    returns[-1] += weights[-1] * next_values[-1]
    distance = 1
    while distance < len(returns):
        begin = returns[:-distance]
        end = returns[-distance:]
        more = weights[: len(begin)] * returns[distance:]
        returns = torch.cat([begin + more, end])
        weights = weights[:-distance] * weights[distance:]
        distance *= 2
    return returns


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
    share = steps / (args.exploration_fraction * args.total_timesteps)
    epsilons = args.start_e + share.clamp(max=1) * (args.end_e - args.start_e)
    return epsilons[:, None]


# speed: acting and an update, optimizer included, become one compiled call each. Returns, once a
# rollout, would take seconds to compile and gain nothing that one could measure
def compile_agent(agent: PQN) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process.

    `main` flushes denormal numbers to zero: averages of units that are never active decay to such
    numbers, with which a CPU is ten times slower.
    """
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    torch._inductor.config.reorder_for_locality = False  # True moves reads past writes (torch 2.11)
    torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs (torch 2.11)
    torch._inductor.config.cpp.vec_isa_ok = True  # to try the CPU's vectors first takes 4 seconds
    if next(agent.parameters()).is_cpu:
        # Inductor sums the gradients of a layer norm's weights over the batch column by column,
        # which misses the caches; without its decompositions it calls PyTorch's own kernels
        from torch._inductor.decomposition import decompositions, remove_decompositions

        aten = torch.ops.aten
        norms = [aten.native_layer_norm, aten.native_layer_norm_backward]
        remove_decompositions(decompositions, norms)
    agent.act = torch.compile(agent.act, fullgraph=True)
    agent.update = torch.compile(agent.update, fullgraph=True)


# speed: for a GPU, one launch instead of many; a third call captures, when all is compiled
def capture_agent(agent: PQN) -> None:
    """Acting and an epoch replay what their third call has recorded.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused.
    """
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
    if args.capture_video and not find_spec("moviepy"):
        raise SystemExit("--capture-video: pip install -r requirements/video.txt")
    on_gpu = args.cuda and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches:
        raise SystemExit(f"--num-minibatches: does not divide {batch_size:,} steps")
    warmup_steps = STEADY_AFTER * batch_size
    run = Run(args, device, batch_size, warmup_steps, trace_after=3, trace_iterations=1)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    # speed: a processor that emulates bfloat16 is many times slower than in float32
    if args.bf16 and not on_gpu:
        cpu = torch.cpu.get_capabilities()
        on_arm = cpu.get("bf16", False) and torch.backends.mkldnn.is_available()
        args.bf16 = cpu.get("avx512_bf16", False) or on_arm
        if not args.bf16:
            print("--bf16: this processor would emulate it, so it has no effect", file=sys.stderr)
    # speed: as compile_agent says. Threads inherit it when they start, so it comes before OpenMP's
    torch.set_flush_denormal(args.compile)

    seed = args.seed + run.start_step
    envs = AtariEnvs(
        args.env_id,
        args.num_envs,
        seed,
        episodic_life=True,  # the loss of a life ends an episode
        reward_clip=True,  # to its sign
    )
    num_actions = int(envs.pool.action_space.n)
    agent = PQN(args, num_actions, device)
    with one_line("--num-steps"):
        rollout = Rollout(args.num_steps, args.num_envs, device)
    if run.checkpoint:
        run.restore(agent)
    obs, _ = envs.pool.reset()
    # speed: methods are replaced before the loop, which remains the baseline's
    if args.compile:
        compile_agent(agent)
    if args.cudagraphs and on_gpu:
        capture_agent(agent)
    elif args.cudagraphs:
        print("--cudagraphs: without CUDA it has no effect", file=sys.stderr)

    with run:
        while run.step < run.total_steps:
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
            # speed: into the CPU's memory, which is copied below
            rollout.host["final_values"].zero_()
            for t in range(args.num_steps):
                with run.stage("inference"):
                    # speed: a copy for which the CPU does not wait
                    upload(torch.from_numpy(obs), rollout.obs[t])
                    sample, values = agent.act(rollout.obs[t], explores[t], random_actions[t])
                    actions = sample.cpu().numpy()
                with run.stage("simulation"):
                    obs, rewards, terminated, truncated, infos = envs.step(actions)
                with run.stage("replay"):
                    ended = terminated | truncated
                    rollout.actions[t] = sample
                    rollout.values[t] = values
                    # speed: into the CPU's memory, which is copied below
                    rollout.host["rewards"][t] = torch.from_numpy(rewards)
                    rollout.host["ended"][t] = torch.from_numpy(ended)
                run.step += args.num_envs
                # Where an episode ended, obs is already the next episode's first.
                for i in np.flatnonzero(truncated):
                    with run.stage("inference"):
                        final_obs = torch.from_numpy(infos["final_obs"][[i]])
                        final_value = agent.value(final_obs.to(device))
                        # speed: into the CPU's memory, which is copied below
                        rollout.host["final_values"][t, i] = final_value
                with run.stage("logging"):
                    for score, length in infos["games"]:
                        run.write(
                            {
                                "charts/episodic_return": score,
                                "charts/episodic_length": length,
                            }
                        )

            # 2. Learn from it in several epochs.
            with run.stage("backpropagation"):
                # speed: one copy each, instead of one per step
                for name, values in rollout.host.items():
                    upload(values, getattr(rollout, name))
                inputs = torch.from_numpy(obs).to(device)
                batch = agent.prepare(rollout, agent.value(inputs))
                for _ in range(args.update_epochs):
                    order = torch.randperm(batch_size, device=device)
                    metrics = agent.learn(batch, order)

            # 3. Log the last minibatch's losses, which are not finite if a reward is not.
            metrics["charts/learning_rate"] = learning_rate
            metrics["charts/epsilon"] = epsilons[-1, 0]
            run.log(metrics)

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
