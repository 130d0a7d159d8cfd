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
- `Worker`: a process that ends with this one and whose death ends this one at once. Evaluation has
  its own and does not stop training, unless several are waiting. A resumed run begins with fresh
  episodes and weights that are not stale.
- `DeviceEnv`: an environment on the CPU that takes and gives tensors on a device.

Its twin ppo_continuous_action_async_torchcompile.py is this file with the hunks marked `# speed:`.
Shapes: T steps of a rollout, N environments, B batch, O observation, A action. The collector's
times are in stages_collector.json; `untracked` is mostly the wait for the other process.
"""

import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count, pairwise
from multiprocessing import resource_tracker
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback until the run begins

import gymnasium as gym
import numpy as np
import torch
import tqdm
import tyro
from gymnasium.spaces import Box
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

    learner_device: str | None = None  # where the network learns, if --cuda is not to decide
    collector_device: str = "cpu"  # where its copy acts: cpu, cuda or cuda:N
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


STEADY_AFTER = 3  # rollouts; a variant has compiled and captured all by then


# Environment


def make_envs(
    env_id: str,
    num_envs: int,
    gamma: float | None = None,
    video: Path | None = None,
) -> gym.vector.VectorEnv:
    """N environments that reset in the step that ends an episode; `video` films the first one.

    With a gamma, for training, each normalizes observations and rewards by its own statistics.
    """

    def make_env(**options) -> gym.Env:
        env = gym.make(env_id, **options)
        if "render_mode" in options:
            env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        actions = env.action_space
        flat_obs = len(env.observation_space.shape or ()) == 1
        if not (flat_obs and isinstance(actions, Box) and len(actions.shape) == 1):
            raise SystemExit("--env-id: needs flat observations and flat continuous actions")
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = gym.wrappers.ClipAction(env)
        if gamma is not None:
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
    known = len(statistics["obs_rms_mean"])
    if known != envs.num_envs:
        raise SystemExit(f"--num-envs: the checkpoint is of {known}")
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


def ppo_loss(model: ActorCritic, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a minibatch (equation 9) and what is logged of it -> loss (), {name: tensor ()}.

    The policy's part is the decoupled objective of Hilton et al. (arXiv:2110.00641, section 3).
    """
    mean, log_std, values = model(batch.obs)
    log_ratios = gaussian_log_prob(batch.actions, mean, log_std) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    of_policy = policy_loss(log_ratios, batch.importance * advantages, args.clip_coef)
    value_clip = args.clip_coef if args.clip_vloss else None
    of_value = value_loss(values, batch, value_clip)
    entropies = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)
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
        return default_collate(rows)


# Training


def collect(pipe, args: Args, slots: list[Slot], report_path: Path) -> None:
    """What the collector does: makes a rollout in each slot whose index it gets."""
    device = use_device(args.collector_device)
    warmup_steps = STEADY_AFTER * args.num_envs * args.num_steps
    mode = "time" if args.stopwatch == "trace" else args.stopwatch  # the trace is the learner's
    watch = Stopwatch(device, mode, warmup_steps)
    envs = make_envs(args.env_id, args.num_envs, args.gamma)
    obs_dim = envs.single_observation_space.shape[0]
    action_dim = envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    rollout = Rollout(args, obs_dim, action_dim, device)
    device_envs = DeviceEnv(envs, device)
    start_step, statistics = receive(pipe)
    if statistics:
        set_statistics(envs, statistics)
    obs, _ = device_envs.reset(seed=args.seed + start_step)
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
                with watch.stage("inference"):
                    actions, log_probs, values = agent.act(obs, noise[t])
                with watch.stage("simulation"):
                    next_obs, rewards, terminated, truncated, infos = device_envs.step(actions)

                with watch.stage("replay"):
                    rollout.obs[t] = obs
                    rollout.actions[t] = actions
                    rollout.rewards[t] = rewards
                    rollout.ended[t] = terminated | truncated
                    rollout.log_probs[t] = log_probs
                    rollout.values[t] = values
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
        watch.report(report_path)


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    check_args(args)
    check_env(args)
    on_gpu = args.cuda and torch.cuda.is_available()
    default_device = "cuda" if on_gpu else "cpu"
    device = use_device(args.learner_device or default_device)
    max_staleness = 0 if args.sync else args.max_staleness
    if max_staleness:  # one core is the collector's
        torch.set_num_threads(max(torch.get_num_threads() - 1, 1))
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches or batch_size == args.num_minibatches:
        steps = f"{batch_size:,} steps"
        raise SystemExit(f"--num-minibatches: does not divide {steps} into two or more each")
    warmup_steps = STEADY_AFTER * batch_size
    run = Run(args, device, batch_size, warmup_steps, trace_after=3, trace_iterations=1)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    envs = make_envs(args.env_id, 1)  # for their spaces: those to act in are the collector's
    obs_dim = envs.single_observation_space.shape[0]
    action_dim = envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    with one_line("--num-steps"):
        rollout = Rollout(args, obs_dim, action_dim, device)
        slots = [Slot(args, obs_dim, action_dim, agent.model) for _ in range(max_staleness + 1)]
    if run.checkpoint:
        run.restore(agent)
    num_rollouts = math.ceil((run.total_steps - run.start_step) / batch_size)
    handed_out = 0  # rollouts
    unanswered = 0  # evaluations

    workers = []
    with run, supervision(workers):
        report_path = run.dir / f"stages_collector{run.suffix}"
        collector = Worker("collector", collect, args, slots, report_path)
        workers.append(collector)
        collector.send((run.start_step, run.checkpoint.get("statistics")))
        if args.eval_every or args.capture_video:
            evaluator = Worker("evaluator", answer, args, obs_dim, action_dim, run.dir)
            workers.append(evaluator)
        while run.step < run.total_steps:
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - run.step / run.total_steps
            agent.optimizer.param_groups[0]["lr"] = learning_rate

            # 1. Let the collector go on with these weights, and get the rollout that is due.
            version = (run.step - run.start_step) // batch_size  # iterations so far
            with run.stage("replay"):
                while handed_out < min(version + len(slots), num_rollouts):
                    index = handed_out % len(slots)
                    slot = slots[index]
                    slot.weights.copy_(get_weights(agent))
                    slot.version = version
                    slot.noise.normal_()
                    collector.send(index)
                    handed_out += 1
            begin = perf_counter()
            report = collector.receive()
            waited = perf_counter() - begin
            run.step += batch_size

            # 2. Learn from it in several epochs.
            with run.stage("backpropagation"):
                slot = slots[version % len(slots)]
                total = sum(values.sum() for values in report.statistics.values())
                total = total + slot.obs.sum() + slot.rewards.sum()
                if not math.isfinite(total):
                    steps = f"steps {run.step - batch_size:,} to {run.step:,}"
                    raise SystemExit(f"{steps}: observation or reward is not finite")
                for name, tensor in vars(rollout).items():
                    tensor.copy_(getattr(slot, name))
                for t, n, final_obs in report.truncations:  # in the slot all are 0
                    inputs = torch.as_tensor(final_obs, device=device)
                    rollout.final_values[t, n] = agent.value(inputs)
                staleness = version - slot.version
                batch = agent.prepare(rollout, stale=staleness > 0)
                clipfracs = []
                for _ in range(args.update_epochs):
                    order = torch.randperm(batch_size, device=device)
                    metrics = agent.learn(batch, order)
                    clipfracs.append(metrics["losses/clipfrac"])
                    approx_kl = metrics["losses/approx_kl"][-1]
                    if args.target_kl is not None and approx_kl > args.target_kl:
                        break

            # 3. Log the last minibatch's losses; clipfrac is the mean over all of them.
            with run.stage("logging"):
                for step, episode in report.episodes:
                    run.write(episode, step)
            row = {tag: values[-1] for tag, values in metrics.items()}
            row["losses/clipfrac"] = torch.cat(clipfracs).mean()
            unexplained = (batch.returns - batch.values).var()
            unexplained /= batch.returns.var().clamp(min=1e-12)
            row["losses/explained_variance"] = 1 - unexplained
            row["charts/learning_rate"] = learning_rate
            row["charts/staleness"] = staleness
            row["charts/learner_waits_seconds"] = waited
            row["charts/collector_waits_seconds"] = report.waited
            run.log(row)

            # 4. Save and evaluate, now and then and at the end.
            if run.due(args.checkpoint_every, at_end=args.save_model):
                with run.stage("checkpoint"):
                    run.save(agent, statistics=report.statistics)
            with run.stage("evaluation"):
                if run.due(args.eval_every, at_end=args.capture_video):
                    evaluator.send((run.step, get_weights(agent), report.statistics))
                    unanswered += 1
                last = run.step >= run.total_steps
                while unanswered and (last or evaluator.pipe.poll()):
                    step, eval_return = evaluator.receive()
                    unanswered -= 1
                    run.write({"charts/eval_return": eval_return}, step)
                    line = f"evaluation at {step:,}: {eval_return:,.1f}"
                    run.bar.write(line, file=sys.stderr)
            run.tick()
    return run.dir


# What a reader may skip: processes, evaluation and checks, then the records around a run


class Worker:
    """A child process and a pipe to it. It ends when this process ends, even by SIGKILL.

    If it dies first, the run ends in one line: `supervision` calls `check` on SIGCHLD for that.
    """

    def __init__(self, name: str, function, *args):
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.name = name
        self.pipe, pipe = context.Pipe()
        self.process = context.Process(target=work, args=(function, pipe, *args), daemon=True)
        # A terminal sends these to every process of a run, of which this one ends the others.
        numbers = signal.SIGINT, signal.SIGHUP
        resource_tracker.ensure_running()  # its start would unblock them again
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        self.process.start()  # they stay blocked in it
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        pipe.close()

    def check(self):
        """Ends the run if the process has ended."""
        code = self.process.exitcode
        if code is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise SystemExit(f"the {self.name} died: {how}")

    def send(self, message):
        with suppress(OSError):  # it has died: SIGCHLD or `receive` ends the run
            send(self.pipe, message)

    def receive(self):
        try:
            return receive(self.pipe)
        except (EOFError, OSError):
            self.process.join()
            self.check()

    def end(self):
        """Ends it in the middle of whatever it does, and waits until it is gone."""
        self.process.terminate()
        self.process.join(timeout=10)
        self.process.kill()
        self.process.join()


@contextmanager
def supervision(workers):
    """Workers that are in the list end with the block, and one that ends before ends the run."""

    def check(number, frame):
        for worker in workers:
            worker.check()

    try:
        signal.signal(signal.SIGCHLD, check)
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in workers:
            worker.end()


def work(function, pipe, *args):
    """What the process of a Worker runs: `function`, which goes on until Worker.end."""

    def die_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGTERM, interrupt)  # once: a second one would end its report
    threading.Thread(target=die_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # the other cores are the learner's
    try:
        function(pipe, *args)
    except KeyboardInterrupt:  # Worker.end
        os._exit(0)  # spares the seconds in which Python takes down what it has imported


def send(pipe, message):
    """Copies what `pipe.send` would share: the memory of tensors."""
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe):
    """Waits for a message."""
    return pickle.loads(pipe.recv_bytes())


def answer(pipe, args: Args, obs_dim: int, action_dim: int, run_dir: Path) -> None:
    """What the evaluator does: gets a step, its weights and statistics, answers with the return."""
    device = use_device(args.eval_device)
    agent = PPO(args, obs_dim, action_dim, device)
    while True:
        step, weights, statistics = receive(pipe)
        nn.utils.vector_to_parameters(weights.to(device), agent.parameters())
        video = run_dir / f"videos/step-{step}"
        eval_return = evaluate(agent, args, statistics, video)
        send(pipe, (step, eval_return))


def evaluate(agent: PPO, args: Args, statistics: dict[str, Tensor], video: Path) -> float:
    """Mean return of K episodes from always the same starts, acting without noise.

    Observations are normalized by the statistics of all training environments as one.
    """
    if not args.capture_video:
        video = None
    envs = make_envs(args.env_id, args.eval_episodes, video=video)
    means = statistics["obs_rms_mean"]  # (N, O)
    mean = means.mean(dim=0)
    variance = means.var(dim=0, correction=0)  # between environments, and within them
    variance += statistics["obs_rms_var"].mean(dim=0)
    std = (variance + 1e-8).sqrt()
    returns = np.zeros(args.eval_episodes)
    running = np.ones(args.eval_episodes, dtype=bool)
    unseen = args.seed + 2**31  # not the states of training
    obs, _ = envs.reset(seed=unseen)
    for _ in range(50_000):  # an episode without end counts with its return so far
        inputs = (torch.as_tensor(obs) - mean) / std
        inputs = inputs.clamp(-10, 10)
        inputs = inputs.to(agent.model.actor_logstd)
        with torch.no_grad():
            actions, _, _ = agent.model(inputs)
        actions = actions.cpu().numpy()
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        returns += running * rewards
        running &= ~(terminated | truncated)
        if not running.any():
            break
    envs.close()
    return float(returns.mean())


def use_device(name: str) -> torch.device:
    """The device of that name, as this process's current one: the others cost it no memory."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    return device


def check_args(args: Args) -> None:
    """Refuses devices that this machine does not have."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    devices = ["cpu", "cuda", *gpus] if gpus else ["cpu"]
    for name in ("learner_device", "collector_device", "eval_device"):
        if getattr(args, name) not in (None, *devices):
            flag = name.replace("_", "-")
            raise SystemExit(f"--{flag}: this machine has {', '.join(devices)}")


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
