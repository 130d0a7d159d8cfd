r"""Proximal Policy Optimization (PPO) for Atari on EnvPool, with torch.compile and CUDA graphs.

    python leanrl/ppo_atari_envpool_torchcompile.py --compile --cudagraphs
    python leanrl/ppo_atari_envpool_torchcompile.py --compile --bf16 --channels-last \
        --env-id Pong-v5 --num-envs 32 --num-minibatches 16 --learning-rate 5e-4 \
        --total-timesteps 2400000                                   # Pong

The algorithm is that of its twin, ppo_atari_envpool.py, which says where it comes from and what the
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
import torch.nn.functional as F
import tqdm
import tyro
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
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


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, ended: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16) -> advantages (T, N).

    All (T, N). `next_values` is the value of what follows each step in its own episode: 0 after a
    termination, that of the final observation after a truncation. `ended` is 1 after either.
    """
    deltas = rewards + gamma * next_values - values
    weights = gamma * lam * (1 - ended)
    # speed: log2(T) vector operations instead of T: every sum begins with its own step's delta, and
    # each pass adds to it the sum that begins where it ends, so that it covers twice as many steps
    advantages = deltas
    distance = 1
    while distance < len(advantages):
        begin = advantages[:-distance]
        end = advantages[-distance:]
        more = weights[: len(begin)] * advantages[distance:]
        advantages = torch.cat([begin + more, end])
        weights = weights[:-distance] * weights[distance:]
        distance *= 2
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
    # speed: a tensor: of a number that is annealed, a compiled clamp would keep the second value
    clip_coef = advantages.new_ones(()) * args.clip_coef
    of_policy = policy_loss(log_ratios, advantages, clip_coef)
    value_clip = clip_coef if args.clip_vloss else None
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
        return default_collate(rows)


# speed: acting and an update, optimizer included, become one compiled call each. Advantages, once a
# rollout, would take seconds to compile and gain nothing that one could measure
def compile_agent(agent: PPO) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process.

    `main` flushes denormal numbers to zero: averages of units that are never active decay to such
    numbers, with which a CPU is ten times slower.
    """
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    torch._inductor.config.reorder_for_locality = False  # True moves reads past writes (torch 2.11)
    torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs (torch 2.11)
    torch._inductor.config.cpp.vec_isa_ok = True  # to try the CPU's vectors first takes 4 seconds
    for name in ("act", "update"):
        method = getattr(agent, name)
        setattr(agent, name, torch.compile(method, fullgraph=True))


# speed: for a GPU, one launch instead of many; a third call captures, when all is compiled
def capture_agent(agent: PPO) -> None:
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
    if batch_size % args.num_minibatches or batch_size == args.num_minibatches:
        steps = f"{batch_size:,} steps"
        raise SystemExit(f"--num-minibatches: does not divide {steps} into two or more each")
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
    agent = PPO(args, num_actions, device)
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
            shape = args.num_steps, args.num_envs, num_actions
            noise = torch.empty(shape, device=device).exponential_()
            # speed: into the CPU's memory, which is copied below
            rollout.host["final_values"].zero_()
            for t in range(args.num_steps):
                with run.stage("inference"):
                    # speed: a copy for which the CPU does not wait
                    upload(torch.from_numpy(obs), rollout.obs[t])
                    sample, log_probs, values = agent.act(rollout.obs[t], noise[t])
                    actions = sample.cpu().numpy()
                with run.stage("simulation"):
                    obs, rewards, terminated, truncated, infos = envs.step(actions)
                with run.stage("replay"):
                    ended = terminated | truncated
                    rollout.actions[t] = sample
                    rollout.log_probs[t] = log_probs
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
                clipfracs = []
                for _ in range(args.update_epochs):
                    order = torch.randperm(batch_size, device=device)
                    metrics = agent.learn(batch, order)
                    clipfracs.append(metrics["losses/clipfrac"])
                    approx_kl = metrics["losses/approx_kl"][-1]
                    if args.target_kl is not None and approx_kl > args.target_kl:
                        break

            # 3. Log the last minibatch's losses; clipfrac is the mean over all of them.
            # A reward that is not finite shows in the losses.
            row = {tag: values[-1] for tag, values in metrics.items()}
            row["losses/clipfrac"] = torch.cat(clipfracs).mean()
            unexplained = (batch.returns - batch.values).var()
            unexplained /= batch.returns.var().clamp(min=1e-12)
            row["losses/explained_variance"] = 1 - unexplained
            row["charts/learning_rate"] = learning_rate
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
