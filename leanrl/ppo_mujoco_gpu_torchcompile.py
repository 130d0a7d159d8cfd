"""PPO on thousands of MuJoCo worlds in one batch, with torch.compile and CUDA graphs.

    python leanrl/ppo_mujoco_gpu_torchcompile.py --compile --cudagraphs

The algorithm is that of its twin, ppo_mujoco_gpu.py, which says where it comes from, which defaults
are not CleanRL's and what the shapes mean; the hunks that differ start with `# speed:` and say what
they buy, the rest is the same to the letter. Without a CUDA device --cudagraphs says so in one line
and the run goes on. The first rollouts pay for compilation, which is reported as warm-up.
"""

# speed: CudaGraphModule captures a function as a CUDA graph; a forked child compiles beside
import ast
import gc
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Literal, NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback until the run begins

# speed: tensordict would log two lines for each graph that it captures, amid the progress
os.environ.setdefault("TD_LOGGING_LEVEL", "WARNING")

import gymnasium as gym
import mujoco.batch
import numpy as np
import torch
import tqdm
import tyro
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space
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
    compile: bool = False  # compile acting, judging the worlds and updating
    cudagraphs: bool = False  # replay them as CUDA graphs, around those of the physics
    tf32: bool = False  # on CUDA, multiply in TensorFloat-32: faster, with three digits

    env_id: str = "HalfCheetah-v5"  # one of Gymnasium's MuJoCo environments: those in TASKS
    physics: Literal["auto", "c", "warp"] = "auto"  # MuJoCo's C or mujoco_warp; auto: C on a CPU
    randomize: float = 0.0  # 0.2: each world's masses, friction, gears are 0.8 to 1.2 the model's
    total_timesteps: int = 5_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 64  # environments stepped side by side
    num_steps: int = 128  # steps of a rollout in each environment
    learning_rate: float = 1e-3  # at first; then it follows desired_kl, also after --resume
    desired_kl: float = 0.03  # KL divergence that updates of a rollout should have; 0: any
    anneal_lr: bool = True  # lower desired_kl linearly until MIN_KL; without one, the rate to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 16  # minibatches per epoch
    update_epochs: int = 4  # passes over a rollout
    clip_coef: float = 0.2  # how far the ratio of new to old probabilities may go from 1
    ent_coef: float = 0.0  # weight of the entropy in the loss
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it


MIN_KL = 0.004  # annealing stops here: smaller updates would waste the rest of the run
STEADY_AFTER = 3  # rollouts; with the default epochs a variant has captured all by then


# Environment: the tasks. MuJoCoEnvs, which steps their worlds, stands below main.


def join(*fields):
    """Fields (N, ...) side by side -> (N, .)."""
    columns = [x.flatten(1) for x in fields]
    return torch.cat(columns, dim=1)


def sum_squares(x):
    """x (N, ...) -> (N,)."""
    return x.square().flatten(1).sum(1)


def half_cheetah(s, speed, actions):
    obs = join(s.qpos[:, 1:], s.qvel)
    rewards = speed - 0.1 * sum_squares(actions)
    return obs, rewards, False


def walk(s, speed, actions, healthy):
    velocities = s.qvel.clamp(-10, 10)
    obs = join(s.qpos[:, 1:], velocities)
    rewards = speed + healthy - 1e-3 * sum_squares(actions)
    return obs, rewards, ~healthy


def hopper(s, speed, actions):
    _, height, angle, *_ = s.qpos.unbind(1)
    angles = s.qpos[:, 2:]
    others = join(angles, s.qvel)
    upright = (height > 0.7) & (angle.abs() < 0.2)
    healthy = upright & (others.abs() < 100).all(1)
    return walk(s, speed, actions, healthy)


def walker2d(s, speed, actions):
    _, height, angle, *_ = s.qpos.unbind(1)
    upright = angle.abs() < 1
    healthy = (height > 0.8) & (height < 2) & upright
    return walk(s, speed, actions, healthy)


def swimmer(s, speed, actions):
    obs = join(s.qpos[:, 2:], s.qvel)
    rewards = speed - 1e-4 * sum_squares(actions)
    return obs, rewards, False


def ant(s, speed, actions):
    height = s.qpos[:, 2]
    healthy = (height >= 0.2) & (height <= 1)
    forces = s.cfrc_ext.clamp(-1, 1)  # (N, bodies, 6), of which the first is the world
    costs = 0.5 * sum_squares(actions) + 5e-4 * sum_squares(forces)
    obs = join(
        s.qpos[:, 2:],
        s.qvel,
        forces[:, 1:],
    )
    return obs, speed + healthy - costs, ~healthy


def observe_humanoid(s):
    return join(
        s.qpos[:, 2:],
        s.qvel,
        s.cinert[:, 1:],
        s.cvel[:, 1:],
        s.qfrc_actuator[:, 6:],
        s.cfrc_ext[:, 1:],
    )


def humanoid_costs(s, actions):
    contact_costs = 5e-7 * sum_squares(s.cfrc_ext)
    return 0.1 * sum_squares(actions) + contact_costs.clamp(max=10)


def humanoid(s, speed, actions):
    height = s.qpos[:, 2]
    healthy = (height > 1) & (height < 2)
    rewards = 1.25 * speed + 5 * healthy - humanoid_costs(s, actions)
    return observe_humanoid(s), rewards, ~healthy


def humanoid_standup(s, speed, actions):
    height = s.qpos[:, 2]
    rewards = height / 0.003 + 1 - humanoid_costs(s, actions)  # Gymnasium divides by a substep
    return observe_humanoid(s), rewards, False


def inverted_pendulum(s, speed, actions):
    fallen = s.qpos[:, 1].abs() > 0.2
    obs = join(s.qpos, s.qvel)
    return obs, (~fallen).float(), fallen


def double_pendulum(s, speed, actions):
    x, _, y = s.site_xpos[:, 0].unbind(1)  # of the tip
    _, lower, upper = s.qvel.unbind(1)
    costs = 0.01 * x.square() + (y - 2).square()
    costs += 1e-3 * lower.square()
    costs += 5e-3 * upper.square()
    fallen = y <= 1
    x_of_cart, angles = s.qpos.tensor_split([1], dim=1)
    others = join(s.qvel, s.qfrc_constraint[:, :1])
    others = others.clamp(-10, 10)
    obs = join(
        x_of_cart,
        angles.sin(),
        angles.cos(),
        others,
    )
    return obs, 10 * ~fallen - costs, fallen


def reacher(s, speed, actions):
    angles, target = s.qpos.split(2, dim=1)
    offset = s.xpos[:, 3] - s.xpos[:, 4]  # of the fingertip from the target
    obs = join(
        angles.cos(),
        angles.sin(),
        target,
        s.qvel[:, :2],
        offset[:, :2],
    )
    rewards = -offset.norm(dim=1) - sum_squares(actions)
    return obs, rewards, False


def pusher(s, speed, actions):
    tips, cylinder, goal = s.xpos[:, -3:].unbind(1)
    to_tips = (cylinder - tips).norm(dim=1)
    to_goal = (cylinder - goal).norm(dim=1)
    obs = join(
        s.qpos[:, :7],
        s.qvel[:, :7],
        s.xpos[:, -3:],
    )
    rewards = -to_goal - 0.1 * sum_squares(actions) - 0.5 * to_tips
    return obs, rewards, False


# Where an episode begins. Each of these adds noise in place to the model's usual qpos (..., nq) and
# qvel (..., nv), for any number of episodes; generator is a torch.Generator or None


def uniform_like(x, generator):
    return torch.empty_like(x).uniform_(-1, 1, generator=generator)


def normal_like(x, generator):
    return torch.empty_like(x).normal_(generator=generator)


def start_near(scale, velocity_like=uniform_like):
    """Positions uniform, up to `scale` from the usual ones; velocities, too, or normal."""

    def start(qpos, qvel, generator):
        qpos += scale * uniform_like(qpos, generator)
        qvel += scale * velocity_like(qvel, generator)

    return start


def start_reacher(qpos, qvel, generator):
    qpos += 0.1 * uniform_like(qpos, generator)
    qvel += 0.005 * uniform_like(qvel, generator)
    angle, share = uniform_like(qpos[..., :2], generator).unbind(-1)
    angle *= math.pi
    radius = 0.2 * share.abs().sqrt()  # uniform in a disk
    qpos[..., 2] = radius * angle.cos()
    qpos[..., 3] = radius * angle.sin()
    qvel[..., 2:] = 0


def start_pusher(qpos, qvel, generator):
    qvel += 0.005 * uniform_like(qvel, generator)
    qvel[..., -4:] = 0
    cylinder = qpos[..., -4:-2]
    for _ in range(20):  # six of ten places are far enough from the goal, which is at 0
        place = 0.2 * uniform_like(cylinder, generator)
        place[..., 0] *= 0.75
        place[..., 0] -= 0.15
        distance = cylinder.norm(dim=-1, keepdim=True)
        place = place.where(distance <= 0.17, cylinder)
        cylinder.copy_(place)


def root(s):
    return s.qpos[:, 0]


def torso(s):
    return s.xpos[:, 1, 0]


def center_of_mass(s):
    return s.subtree_com[:, 1, 0]


class Task(NamedTuple):
    """How N worlds are judged, and all that MuJoCoEnvs must know for that.

    `judge` takes fields of mujoco.MjData as tensors (N, ...), the speed forward in m/s (N,) and
    actions (N, A) -> observations (N, O), rewards (N,), terminated (N,) or False. Where an episode
    begins, it gets 0 for both, and its observations count. Where the task `moves`, it must not
    depend on x, neither by qpos[:, 0] nor by a place: training sets x back to 0, the environment
    of the evaluation does not. Distances are safe.
    """

    judge: Callable
    start: Callable  # qpos, qvel and a generator, in place: noise where an episode begins
    reads: tuple = ()  # the fields that judge and position read, besides qpos and qvel
    position: Callable = root  # fields -> x in m (N,) of what is rewarded for its speed
    moves: bool = False  # over ground that is the same everywhere: its x goes back to 0 each step
    max_steps: int = 1000  # of an episode, which is truncated then
    model: str | None = None  # an MJCF file; None: that of Gymnasium's environment of this name
    frame_skip: int = 1  # substeps of such a model in a step


HUMANOID = ("subtree_com", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
TASKS = {
    "HalfCheetah-v5": Task(
        half_cheetah,
        start_near(0.1, normal_like),
        moves=True,
    ),
    "Hopper-v5": Task(
        hopper,
        start_near(0.005),
        moves=True,
    ),
    "Walker2d-v5": Task(
        walker2d,
        start_near(0.005),
        moves=True,
    ),
    "Swimmer-v5": Task(
        swimmer,
        start_near(0.1),
        moves=True,
    ),
    "Ant-v5": Task(
        ant,
        start_near(0.1, normal_like),
        reads=("xpos", "cfrc_ext"),
        position=torso,
        moves=True,
    ),
    "Humanoid-v5": Task(
        humanoid,
        start_near(0.01),
        reads=HUMANOID,
        position=center_of_mass,
        moves=True,
    ),
    "HumanoidStandup-v5": Task(
        humanoid_standup,
        start_near(0.01),
        reads=HUMANOID,
        moves=True,
    ),
    "InvertedPendulum-v5": Task(
        inverted_pendulum,
        start_near(0.01),
    ),
    "InvertedDoublePendulum-v5": Task(
        double_pendulum,
        start_near(0.1, normal_like),
        reads=("site_xpos", "qfrc_constraint"),
    ),
    "Reacher-v5": Task(
        reacher,
        start_reacher,
        reads=("xpos",),
        max_steps=50,
    ),
    "Pusher-v5": Task(
        pusher,
        start_pusher,
        reads=("xpos",),
        max_steps=100,
    ),
}


def register(env_id: str, task: Task) -> None:
    """Adds a task with a model of its own, of which gym.make then makes a World."""
    TASKS[env_id] = task
    gym.register(env_id, partial(World, task), max_episode_steps=task.max_steps)


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

    Observations and returns are normalized by the mean statistics of all rollouts so far.
    """

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.obs_norm = nn.BatchNorm1d(obs_dim, affine=False, momentum=None)
        self.return_norm = nn.BatchNorm1d(1, affine=False, momentum=None)
        self.critic = mlp(obs_dim, 1, gain=1.0)
        self.actor_mean = mlp(obs_dim, action_dim, gain=0.01)
        # Wide noise at first throws HalfCheetah on its back, where it would learn to slide
        log_std = torch.full((action_dim,), -1.0)
        self.actor_logstd = nn.Parameter(log_std)
        self.eval()

    def observe(self, batch: "Batch") -> None:
        """Takes a rollout into the statistics, which nothing else changes."""
        self.train()  # on a GPU each of the two waits, to read how many rollouts it has seen
        self.obs_norm(batch.obs)
        self.return_norm(batch.returns[:, None])
        self.eval()

    def normalize(self, obs: Tensor) -> Tensor:
        """obs (B, O) -> what the networks see (B, O)."""
        return self.obs_norm(obs).clamp(-10, 10)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs (B, O) -> mean of the actions (B, A), their log deviation (A,)."""
        mean = self.actor_mean(self.normalize(obs))
        return mean, self.actor_logstd

    def value(self, obs: Tensor) -> Tensor:
        """obs (B, O) -> values (B,), in the units of returns."""
        returns = self.return_norm
        values = self.critic(self.normalize(obs)).squeeze(-1)
        return values * returns.running_var.sqrt() + returns.running_mean


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
    """T steps of N environments on the device."""

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


def ppo_loss(model: ActorCritic, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a minibatch (equation 9) and what is logged of it -> loss (), {name: tensor ()}."""
    mean, log_std = model(batch.obs)
    values = model.value(batch.obs)
    log_ratios = gaussian_log_prob(batch.actions, mean, log_std) - batch.log_probs
    advantages = batch.advantages
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    # speed: a tensor: of a number that is annealed, a compiled clamp would keep the second value
    clip_coef = advantages.new_ones(()) * args.clip_coef
    of_policy = policy_loss(log_ratios, advantages, clip_coef)
    errors = (values - batch.returns).square()
    of_value = 0.5 * errors.mean() / model.return_norm.running_var[0]
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

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.args = args
        self.model = ActorCritic(obs_dim, action_dim).to(device)
        learning_rate = torch.tensor(args.learning_rate, device=device)
        self.register_buffer("learning_rate", learning_rate)
        # speed: the Adam above, which compiles and captures with the rest of an update
        self.optimizer = Adam(self.parameters(), lr=args.learning_rate, eps=1e-5)
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
            self.args.gamma,
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
        # speed: gradients as values: no .grad to fill and to zero, and zero_grad cannot be compiled
        gradients = torch.autograd.grad(loss, self.optimizer.parameters)
        norm = nn.utils.get_total_norm(gradients)
        scale = self.args.max_grad_norm / (norm + 1e-6)
        scale = scale.clamp(max=1)
        gradients = torch._foreach_mul(gradients, scale)
        self.optimizer.step(gradients)
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
        return default_collate(rows)


# speed: acting and an update become one compiled call each. Advantages, once a rollout, would take
# seconds to compile and gain nothing that one could measure
def compile_agent(agent: PPO) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process."""
    args = agent.args
    minibatch = args.num_envs * args.num_steps // args.num_minibatches
    if minibatch < 2048:
        torch.set_num_threads(1)  # layers of 64 for so few steps are too small to share
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    torch._inductor.config.reorder_for_locality = False  # True moves reads past writes (torch 2.11)
    torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs (torch 2.11)
    torch._inductor.config.cpp.vec_isa_ok = True  # to try the CPU's vectors first takes 4 seconds
    for name in ("act", "update"):
        method = getattr(agent, name)
        setattr(agent, name, torch.compile(method, fullgraph=True))


# speed: for compile_beside: nothing takes longer to compile than an update
def update_once(agent: PPO, obs_dim: int, action_dim: int) -> None:
    """An update on zeros."""
    steps = agent.args.num_envs * agent.args.num_steps
    shapes = (obs_dim,), (action_dim,), (), (), (), ()
    batch = Batch._make(torch.zeros(steps, *shape) for shape in shapes)
    agent.update(batch, torch.arange(steps // agent.args.num_minibatches))


# speed: the compilers take tens of seconds of a first run, so two of them work at a time
def compile_beside(call: Callable) -> None:
    """A forked child makes this call, which changes nothing here; what it compiles is cached."""

    def work():
        with suppress(Exception):  # this process will meet it, too, and say so
            call()

    def child():
        settings = copy_context()  # the compiler's
        thread = threading.Thread(target=settings.run, args=[work])  # OpenMP hangs in a forked one
        thread.start()
        thread.join()

    if len(os.sched_getaffinity(0)) > 1:
        multiprocessing.get_context("fork").Process(target=child, daemon=True).start()


# speed: for a GPU, one launch instead of many; a third call captures, when all is compiled
def capture_agent(agent: PPO) -> None:
    """Acting, advantages and an epoch of learning replay what their third call has recorded.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused.
    """
    recorded = dict(vars(agent.args))
    learn = CudaGraphModule(agent.learn, warmup=3)

    def replay(batch, order):
        assert vars(agent.args) == recorded, "CUDA graphs keep args: make what changes a tensor"
        return learn(batch, order)

    agent.act = CudaGraphModule(agent.act, warmup=3)
    agent.prepare = CudaGraphModule(agent.prepare, warmup=3)
    agent.learn = replay


# speed: judging the worlds is many small operations: one compiled call, or one launch on a GPU
def compile_envs(envs: "MuJoCoEnvs") -> None:
    """Both halves of a step, before and after the physics begins episodes."""
    envs.settle = torch.compile(envs.settle, fullgraph=True)
    envs.first_obs = torch.compile(envs.first_obs, fullgraph=True)


def capture_envs(envs: "MuJoCoEnvs") -> None:
    """The same halves, and where episodes begin if the worlds are on the device, too."""
    envs.settle = CudaGraphModule(envs.settle, warmup=3)
    envs.first_obs = CudaGraphModule(envs.first_obs, warmup=3)
    if isinstance(envs.physics, WarpPhysics):
        envs.physics.place = CudaGraphModule(envs.physics.place, warmup=3)


# Training


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    check_env(args)
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

    envs = MuJoCoEnvs(
        args.env_id,
        args.num_envs,
        device,
        args.physics,
        args.randomize,
        args.seed,
    )
    obs_dim = envs.single_observation_space.shape[0]
    action_dim = envs.single_action_space.shape[0]
    agent = PPO(args, obs_dim, action_dim, device)
    if run.checkpoint:
        run.restore(agent)
    # speed: methods are replaced before the loop, which remains the baseline's
    if args.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    if args.compile:
        compile_agent(agent)
        if not on_gpu:
            compile_beside(partial(update_once, agent, obs_dim, action_dim))
        compile_envs(envs)
    if args.cudagraphs and on_gpu:
        capture_agent(agent)
        capture_envs(envs)
    elif args.cudagraphs:
        print("--cudagraphs: without CUDA it has no effect", file=sys.stderr)
    obs, _ = envs.reset(seed=args.seed + run.start_step)

    with run:
        while run.step < run.total_steps:
            remaining = 1.0
            if args.anneal_lr:
                remaining -= run.step / run.total_steps
            if args.desired_kl == 0:
                agent.learning_rate.fill_(args.learning_rate * remaining)
            # speed: in place, where compiled code and graphs read it
            agent.optimizer.lr.copy_(agent.learning_rate)

            # 1. Roll out: T steps with the policy as it is.
            noise = torch.randn(args.num_steps, args.num_envs, action_dim, device=device)
            starts = envs.draw(args.num_steps, args.num_envs)
            steps = []
            for t in range(args.num_steps):
                with run.stage("inference"):
                    actions, log_probs = agent.act(obs, noise[t])
                with run.stage("simulation"):
                    next_obs, rewards, terminated, _, infos = envs.step(actions, starts[t])
                steps.append(
                    Rollout(
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
                )
                obs = next_obs  # where an episode ended, already the next episode's first
            with run.stage("replay"):
                rollout = default_collate(steps)  # stacks each field
            run.step += batch_size

            # 2. Learn from it in several epochs. The first rollout only measures.
            row = {}
            with run.stage("backpropagation"):
                batch = agent.prepare(rollout)
                if run.step > batch_size:
                    clipfracs = []
                    for _ in range(args.update_epochs):
                        order = torch.randperm(batch_size, device=device)
                        metrics = agent.learn(batch, order)
                        clipfracs.append(metrics["losses/clipfrac"])
                    for tag, values in metrics.items():
                        row[tag] = values[-1]  # of the last minibatch, of all for clipfrac
                    row["losses/clipfrac"] = torch.cat(clipfracs).mean()
                agent.model.observe(batch)
                known = rollout.ended & rollout.episode_returns.isfinite()  # the first are NaN
                episode_returns = rollout.episode_returns[known]  # waits for the device
                episode_lengths = rollout.episode_lengths[known]

            # 3. Log.
            unexplained = (batch.returns - batch.values).var()
            unexplained /= batch.returns.var().clamp(min=1e-12)
            row["losses/explained_variance"] = 1 - unexplained
            row["charts/learning_rate"] = agent.learning_rate
            row["charts/broken_worlds"] = envs.broken
            row["charts/overflows"] = envs.physics.overflow.count_nonzero()
            if len(episode_returns):
                row["charts/episodic_return"] = episode_returns.mean()
                row["charts/episodic_length"] = episode_lengths.mean()
            run.log(row)
            if args.desired_kl and run.step > batch_size:
                desired_kl = max(args.desired_kl * remaining, min(args.desired_kl, MIN_KL))
                agent.adapt(row["losses/approx_kl"], desired_kl)

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


# What a reader may skip: physics, environments and evaluation, then the records around a run


# Fields of mujoco.MjData that a step leaves out: mj_rnePostConstraint computes them afterwards
FORCES = {"cacc", "cfrc_int", "cfrc_ext"}


class CPhysics:
    """N worlds in mujoco.batch, MuJoCo's C engine in a thread per core: on the CPU, in float64.

    `state` has the fields of mujoco.MjData that are read, as tensors (N, ...) on `device`. Fields
    of the model in `factors` are multiplied by them, (N, ...), for each world.
    """

    def __init__(self, env, num_envs, task, device, factors):
        self.model = model = env.model
        self.frame_skip = env.frame_skip
        self.moves = task.moves
        # MuJoCo would reset a world that is NaN by itself, and nobody would see it. Islands are
        # parts that could be solved apart: a robot is one part, so to search for them gains nothing
        disable = mujoco.mjtDisableBit
        model.opt.disableflags |= disable.mjDSBL_AUTORESET | disable.mjDSBL_ISLAND
        # Python's mujoco installs a clock that every part of a step would read
        mujoco.mj_resetCallbacks()
        # mj_rnePostConstraint needs a world's contacts, which only an MjData of its own keeps
        self.forces = FORCES.intersection(task.reads)
        size = 200_000 if self.forces else 20_000
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if num_envs * size > memory:
            kilobytes = f"{size // 1000} kB"
            raise SystemExit(f"--num-envs: {num_envs:,} worlds of {kilobytes} do not fit in memory")
        threads = len(os.sched_getaffinity(0))
        self.batch = mujoco.batch.Batch(model, num_envs, threads, persistent=bool(self.forces))
        for name, factor in factors.items():
            self.batch.expand(name)[:] *= factor.numpy()
        self.batch.set_const()
        self.data = mujoco.MjData(model)
        self.state = SimpleNamespace()
        self.copies = []
        for name in ("qpos", "qvel", *task.reads):
            array = self.batch.bind(name)
            array.flags.writeable = True  # forces are written; of the rest PyTorch would warn
            array = torch.from_numpy(array)
            field = torch.zeros_like(array, dtype=torch.float32, device=device)
            self.copies.append((field, array))
            setattr(self.state, name, field)
        self.overflow = torch.zeros(num_envs, device=device)  # counted on Warp alone

    def step(self, actions):
        """frame_skip substeps under actions (N, A), where the task moves from x = 0."""
        if self.moves:
            self.batch.qpos[:, 0] = 0
        self.batch.ctrl[:] = actions.cpu()
        self.batch.step(nstep=self.frame_skip)
        if self.forces:
            for i in range(self.batch.nsim):
                self.batch.get_data(i, self.data)
                mujoco.mj_rnePostConstraint(self.model, self.data)
                for name in self.forces:
                    self.batch.bind(name)[i] = getattr(self.data, name)
        self.copy()

    def begin(self, ended, qpos, qvel):
        """Begins episodes where `ended` (N,), at these positions and velocities (N, .)."""
        ids = ended.nonzero()[:, 0].cpu()
        if len(ids) == 0:
            return
        self.batch.reset(ids, stage=mujoco.mjtStage.mjSTAGE_NONE)
        self.batch.qpos[ids] = qpos[ids].cpu()
        self.batch.qvel[ids] = qvel[ids].cpu()
        self.batch.forward(ids)
        self.copy()

    def copy(self):
        """Fields to `state`, in float32 on the device."""
        for field, array in self.copies:
            field.copy_(array)


# Where an episode begins, kinematics suffice for these; FORCES are 0 there. A task that reads
# anything else needs all of `forward`
QUICK = FORCES | {"xpos", "xquat", "xmat", "xipos", "ximat"}
QUICK |= {"geom_xpos", "geom_xmat", "site_xpos", "site_xmat"}
# What set_const derives from the fields that `randomize` multiplies
DERIVED = {"body_subtreemass", "body_invweight0", "dof_invweight0", "tendon_invweight0"}
DERIVED |= {"actuator_acc0"}


class WarpPhysics:
    """The same in mujoco_warp: on `device`, in float32, each step a launch of a graph of Warp's."""

    def __init__(self, env, num_envs, task, device, factors):
        try:
            import mujoco_warp as mjw
            import warp as wp
        except ImportError as error:
            raise SystemExit(f"{error}: pip install -r requirements/mujoco-warp.txt") from None
        # The humanoids ask for PGS, which Warp lacks
        if env.model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            env.model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
            env.model.opt.iterations = 100
        # On steep capsules, Ant's feet, mujoco_warp 4.0.0 takes other directions of friction than
        # C; without this its velocities differ in the first decimal
        capsule = mjw._src.collision_primitive_core.plane_capsule.adj
        capsule.source = capsule.source.replace("b_norm < 0.5", "b_norm < 1e-6")
        if "b_norm < 1e-6" not in capsule.source:
            raise NotImplementedError("mujoco_warp has changed: test Ant's feet again")
        capsule.tree = ast.parse(capsule.source)
        with wp.ScopedDevice(str(device)):
            with one_line(f"--num-envs: {num_envs:,} worlds", ValueError):  # too little memory
                self.data = mjw.make_data(env.model, nworld=num_envs)
            # Of these fields each world has its own, all others are one for all
            names = [*factors, *DERIVED] if factors else []
            rows = dict.fromkeys(names, num_envs)
            # Kept, because CUDA's graphs do not keep its arrays
            self.model = mjw.put_model(env.model, batch_sizes=rows)
            self.model.opt.warn_overflow = 0  # kernels would print; the chart counts
            for name, factor in factors.items():
                field = wp.to_torch(getattr(self.model, name))  # no copy
                field *= factor.to(field)
            if factors:
                mjw.set_const(self.model, self.data)

            def run(functions):
                for function in functions:
                    function(self.model, self.data)

            def capture(functions):
                run(functions)  # compiles
                gc.collect()  # destroying a stream, even one of PyTorch's, would end the capture
                gc.disable()
                try:
                    with wp.ScopedCapture() as recorded:
                        run(functions)
                finally:
                    gc.enable()

                def replay():
                    stream = wp.stream_from_torch() if device.type == "cuda" else None  # torch's
                    wp.capture_launch(recorded.graph, stream=stream)

                return replay

            steps = [mjw.step] * env.frame_skip
            forces = FORCES.intersection(task.reads)
            if forces:
                steps.append(mjw.rne_postconstraint)
            self.simulate = capture(steps)
            quick = QUICK.issuperset(task.reads)
            self.refresh = capture([mjw.kinematics if quick else mjw.forward])
        self.ctrl = wp.to_torch(self.data.ctrl)  # no copies
        self.overflow = wp.to_torch(self.data.overflow)  # (N,), not 0 once contacts were dropped
        self.state = SimpleNamespace()
        for name in ("qpos", "qvel", *task.reads):
            field = wp.to_torch(getattr(self.data, name))
            shape = np.shape(getattr(env.data, name))  # matrices are flat in MjData
            setattr(self.state, name, field.view(num_envs, *shape))
        # What `refresh` leaves as it was, but not xpos and the like, of which the ground's stay
        cleared = ["time", "ctrl", "qacc_warmstart", *forces]
        if env.model.na:
            cleared.append("act")
        self.cleared = []
        for name in cleared:
            field = wp.to_torch(getattr(self.data, name))
            self.cleared.append(field.view(num_envs, -1))

    def step(self, actions):
        self.ctrl.copy_(actions)
        self.simulate()

    def begin(self, ended, qpos, qvel):
        self.place(ended, qpos, qvel)
        self.refresh()

    def place(self, ended, qpos, qvel):
        """Sets the state where `ended` (N,); on the device alone, so that a graph may hold it."""
        rows = ended[:, None]
        state = self.state
        qpos = qpos.where(rows, state.qpos)
        qvel = qvel.where(rows, state.qvel)
        for field in self.cleared:
            field.masked_fill_(rows, 0)
        state.qpos.copy_(qpos)
        state.qvel.copy_(qvel)


class MuJoCoEnvs(gym.vector.VectorEnv):
    """N worlds of a task in one batch: all tensors are float32 on `device`.

    An episode that ends begins anew in the same step. A world whose observation or reward is not
    finite, or beyond a million, terminates with reward 0 and is counted in `broken`. After `reset`
    all worlds but the first begin late in an episode, each at another time, so that they do not all
    end at once; these episodes have NaN as their return. With `randomize` each world's masses,
    friction and gears are the model's times factors of its own, 1 - randomize to 1 + randomize.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}

    def __init__(self, env_id, num_envs, device, physics, randomize=0.0, seed=0):
        if env_id not in TASKS:
            raise SystemExit(f"--env-id: {env_id} is none of {', '.join(TASKS)}")
        env = gym.make(env_id).unwrapped
        self.spec = env.spec
        self.num_envs = num_envs
        self.task = TASKS[env_id]
        self.dt = env.dt
        self.single_action_space = env.action_space
        self.single_observation_space = Box(-math.inf, math.inf, env.observation_space.shape)
        on_warp = physics == "warp" or physics == "auto" and device.type == "cuda"
        kind = WarpPhysics if on_warp else CPhysics
        factors = draw_factors(env.model, num_envs, randomize, seed) if randomize else {}
        # A physics may lack a field that the task reads, or a feature of the model
        with one_line("--physics", AttributeError, NotImplementedError, ValueError):
            self.physics = kind(env, num_envs, self.task, device, factors)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

        def to_device(array):
            return torch.tensor(array, device=device).float()

        self.qpos = to_device(env.init_qpos)
        self.qvel = to_device(env.init_qvel)
        self.low = to_device(env.action_space.low)
        self.high = to_device(env.action_space.high)
        self.broken = torch.zeros((), device=device)
        self.returns = torch.zeros(num_envs, device=device)
        self.lengths = torch.zeros(num_envs, device=device)
        self.position = torch.zeros(num_envs, device=device)
        env.close()

    def draw(self, *shape, generator=None):
        """Where episodes begin: (*shape, positions and velocities)."""
        qpos = self.qpos.repeat(*shape, 1)
        qvel = self.qvel.repeat(*shape, 1)
        self.task.start(qpos, qvel, generator)
        return torch.cat([qpos, qvel], dim=-1)

    def reset(self, *, seed=None, options=None):
        """Starts all episodes, drawn from torch's generator if not by seed -> obs (N, O), {}."""
        generator = None
        if seed is not None:
            generator = torch.Generator(self.qpos.device).manual_seed(seed)
        worlds = torch.arange(self.num_envs)
        self.lengths.copy_(worlds * self.task.max_steps // self.num_envs)
        self.returns.fill_(0)
        self.returns.masked_fill_(self.lengths > 0, math.nan)
        starts = self.draw(self.num_envs, generator=generator)
        all_worlds = self.lengths >= 0  # True for each
        self.physics.begin(all_worlds, *self.split(starts))
        obs = self.first_obs(all_worlds)
        return obs, {}

    def step(self, actions, starts=None):
        """Actions (N, A), clipped to their space, and a `draw` for the episodes that begin.

        -> obs (N, O), rewards, terminated, truncated (N,), infos: `final_obs` (N, O) is what the
        step has led to, `episode` its return `r` and length `l`; masks with a _ say where it ended.
        """
        actions = actions.clamp(self.low, self.high)
        self.physics.step(actions)
        rewards, terminated, truncated, infos = self.settle(actions)
        ended = infos["_episode"]
        if starts is None:
            starts = self.draw(self.num_envs)
        self.physics.begin(ended, *self.split(starts))
        first_obs = self.first_obs(ended)
        obs = first_obs.where(ended[:, None], infos["final_obs"])
        return obs, rewards, terminated, truncated, infos

    def split(self, starts):
        return starts.tensor_split([len(self.qpos)], dim=1)

    def settle(self, actions):
        """Judges what the physics has led to -> rewards, terminated, truncated (N,), infos."""
        state = self.physics.state
        position = self.task.position(state)
        speed = (position - self.position) / self.dt
        obs, rewards, terminated = self.task.judge(state, speed, actions)
        # Before a world is NaN its numbers are huge, and one would spoil all statistics
        sane = (obs.abs() < 1e6).all(1) & (rewards.abs() < 1e6)
        obs = obs.where(sane[:, None], 0)
        rewards = rewards.where(sane, 0)
        terminated = ~sane | terminated
        self.position.copy_(position)
        self.broken += (~sane).sum()
        self.returns += rewards
        self.lengths += 1
        truncated = self.lengths >= self.task.max_steps
        ended = terminated | truncated
        infos = {
            "final_obs": obs,
            "_final_obs": ended,
            "episode": {"r": self.returns.clone(), "l": self.lengths.clone()},
            "_episode": ended,
        }
        self.returns.masked_fill_(ended, 0)
        self.lengths.masked_fill_(ended, 0)
        return rewards, terminated, truncated, infos

    def first_obs(self, ended):
        """After `begin`: sets `position` where `ended` (N,), moves x back to 0 -> obs (N, O)."""
        state = self.physics.state
        speed = torch.zeros_like(self.position)
        actions = self.low.new_zeros(self.num_envs, len(self.low))
        obs, _, _ = self.task.judge(state, speed, actions)
        position = self.task.position(state)
        self.position.copy_(position.where(ended, self.position))
        if self.task.moves:  # float32 would lose the speed in a large x
            x = state.qpos[:, 0]
            self.position -= x
            x.zero_()
        return obs


def draw_factors(model, num_envs, share, seed):
    """Factors for fields of the model, uniform from 1 - share to 1 + share -> {name: (N, ...)}."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        uniform = torch.rand(num_envs, *shape, generator=generator, dtype=torch.float64)
        return 1 + share * (2 * uniform - 1)

    mass = draw(model.nbody)
    return {
        "body_mass": mass,
        "body_inertia": mass[:, :, None],
        "geom_friction": draw(1, 1),  # one for all geoms: a contact takes the larger of its two
        "actuator_gear": draw(model.nu, 1),
    }


class World(MujocoEnv):
    """A task with a model of its own as an environment of Gymnasium's, in which it is evaluated."""

    def __init__(self, task, **kwargs):
        self.task = task
        path = task.model  # if it is not here, Gymnasium's own of this name
        if Path(path).exists():
            path = str(Path(path).resolve())
        super().__init__(path, task.frame_skip, None, **kwargs)
        if not self.model.actuator_ctrllimited.all():  # Gymnasium would let them do nothing
            raise SystemExit(f"--env-id: {task.model} has an actuator without a ctrlrange")
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / self.dt)}
        obs = self.reset_model()
        self.observation_space = Box(-math.inf, math.inf, obs.shape, np.float64)

    def judge(self, action, begins=False):
        """What `step` returns for the state now -> obs (O,), reward, terminated, False, {}."""
        fields = SimpleNamespace()
        for name in ("qpos", "qvel", *self.task.reads):
            field = torch.tensor(getattr(self.data, name))
            setattr(fields, name, field[None])
        position = self.task.position(fields)
        if begins:
            self.position = position
        speed = (position - self.position) / self.dt
        self.position = position
        actions = torch.tensor(action)[None]
        obs, rewards, terminated = self.task.judge(fields, speed, actions)
        return obs[0].numpy(), rewards.item(), bool(terminated), False, {}

    def step(self, action):
        self.do_simulation(action, self.frame_skip)
        return self.judge(action)

    def reset_model(self):
        seed = self.np_random.integers(2**31)
        generator = torch.Generator().manual_seed(int(seed))
        qpos = torch.tensor(self.init_qpos)
        qvel = torch.tensor(self.init_qvel)
        self.task.start(qpos, qvel, generator)
        self.set_state(qpos.numpy(), qvel.numpy())
        obs, *_ = self.judge(np.zeros(self.model.nu), begins=True)
        return obs


def evaluate(agent: PPO, args: Args, video: Path) -> float:
    """Mean return of K of Gymnasium's own episodes from always the same starts, without noise."""
    makers = [lambda: gym.make(args.env_id)] * args.eval_episodes
    if args.capture_video:
        env = gym.make(args.env_id, render_mode="rgb_array")
        env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        makers[0] = lambda: env
    envs = gym.vector.SyncVectorEnv(makers)
    envs = gym.wrappers.vector.ClipAction(envs)
    returns = np.zeros(args.eval_episodes)
    running = np.ones(args.eval_episodes, dtype=bool)
    unseen = args.seed + 2**31  # not the states of training
    obs, _ = envs.reset(seed=unseen)
    while running.any():  # each has a time limit
        inputs = torch.as_tensor(obs).to(agent.model.actor_logstd)
        with torch.no_grad():
            actions, _ = agent.model(inputs)
        actions = actions.cpu().numpy()
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        returns += running * rewards
        running &= ~(terminated | truncated)
    envs.close()
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
