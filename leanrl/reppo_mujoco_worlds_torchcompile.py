"""REPPO on thousands of MuJoCo worlds in one batch, with torch.compile and CUDA graphs.

    python leanrl/reppo_mujoco_worlds_torchcompile.py --compile --cudagraphs

The algorithm is that of its twin, reppo_mujoco_worlds.py, which says where it comes from and what
the shapes mean; the hunks that differ start with `# speed:` and say what they buy, the rest is the
same to the letter. Without a CUDA device --cudagraphs says so in one line and the run goes on. The
first rollouts pay for compilation, which is reported as warm-up.
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
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

# speed: tensordict would log two lines for each graph that it captures, amid the progress
os.environ.setdefault("TD_LOGGING_LEVEL", "WARNING")

import gymnasium as gym
import mujoco_worlds  # noqa: F401  # registers worlds/HalfCheetah-v5 and others
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
    compile: bool = False  # compile acting, judging the worlds and updating
    cudagraphs: bool = False  # replay them as CUDA graphs, around those of the physics

    env_id: str = "worlds/HalfCheetah-v5"  # one of mujoco_worlds.py, or MODULE:ID, a task of yours
    physics: Literal["auto", "c", "warp"] = "auto"  # MuJoCo's C or mujoco_warp; auto: C on a CPU
    randomize: float = 0.0  # 0.2: each world's masses, friction, motors are 0.8 to 1.2 the model's
    total_timesteps: int = 5_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 64  # environments stepped side by side
    num_steps: int = 128  # steps of a rollout in each environment
    learning_rate: float = 1e-3  # of the policy and of the Q-function
    multiplier_lr: float = 5e-3  # learning rate of the logarithms of alpha and beta
    gamma: float = 0.99  # discount factor
    q_lambda: float = 0.95  # lambda of the returns: 0 is one step, 1 the whole rollout
    num_minibatches: int = 16  # minibatches per epoch
    update_epochs: int = 4  # passes over a rollout
    kl_bound: float = 0.05  # KL divergence that a rollout's updates should not exceed
    target_entropy: float = -0.5  # entropy that the policy should have, per dimension of actions
    alpha: float = 0.01  # weight of the entropy at first
    beta: float = 0.01  # weight of the KL divergence at first
    num_bins: int = 101  # bins of the Q-function
    max_value: float = 5.0  # they lie between -max_value and max_value, in deviations of returns

    def __post_init__(self):
        batch_size = self.num_envs * self.num_steps
        if batch_size % self.num_minibatches or batch_size == self.num_minibatches:
            raise ValueError(f"--num-minibatches: {batch_size:,} steps, two or more in each")
        if self.total_timesteps < 2 * batch_size:  # the first rollout only measures
            raise ValueError(f"--total-timesteps: two rollouts have {2 * batch_size:,} steps")
        if not (0 <= self.gamma <= 1 and 0 <= self.q_lambda <= 1):
            raise ValueError("--gamma and --q-lambda lie between 0 and 1")


STEADY_AFTER = 3  # rollouts; with the default epochs a variant has captured all by then
LOG_STD_MIN = -5.0  # of the policy, as in CleanRL's SAC
LOG_STD_MAX = 2.0


# Networks


def mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers; the last layer is small at first, so that outputs begin at its bias."""
    last = nn.Linear(width, outputs)
    nn.init.zeros_(last.bias)
    with torch.no_grad():
        last.weight.mul_(0.01)
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.RMSNorm(width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.RMSNorm(width),
        nn.SiLU(),
        last,
    )


class Actor(nn.Module):
    """Gaussian policy whose actions are squashed by tanh, to [-1, 1].

    It sees the first obs_dim numbers of an observation, which is all unless a task says so.
    """

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.obs_dim = obs_dim
        self.network = mlp(obs_dim, 128, 2 * action_dim)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs (B, O) -> mean before tanh (B, A), log deviation (B, A), about -0.5 at first."""
        mean, log_std = self.network(obs[:, : self.obs_dim]).chunk(2, dim=-1)
        fraction = torch.sigmoid(log_std + 0.6)
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) * fraction


class Critic(nn.Module):
    """Value of an action as a distribution over bins, learned by cross entropy.

    Targets are Gaussians of 0.75 bins' deviation around a value (HL-Gauss, arXiv:2403.03950).
    """

    def __init__(self, inputs: int, num_bins: int, max_value: float):
        super().__init__()
        self.max_value = max_value
        self.network = mlp(inputs, 256, num_bins)
        edges = torch.linspace(-max_value, max_value, num_bins + 1)
        self.register_buffer("edges", edges)
        self.register_buffer("centers", (edges[1:] + edges[:-1]) / 2)
        self.network[-1].bias.data = -5 * self.centers.square()  # values begin near 0

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """obs (B, O), actions (B, A) -> logits of the bins (B, bins)."""
        return self.network(torch.cat([obs, actions], dim=-1))

    def expect(self, logits: Tensor) -> Tensor:
        """Logits (B, bins) -> values (B,)."""
        return logits.softmax(dim=-1) @ self.centers

    def project(self, values: Tensor) -> Tensor:
        """Values (B,) -> probabilities of the bins (B, bins), of a Gaussian around each."""
        values = values.clamp(-self.max_value, self.max_value)
        deviation = 0.75 * (self.edges[1] - self.edges[0])
        below = torch.special.ndtr((self.edges - values[:, None]) / deviation)
        probs = below[:, 1:] - below[:, :-1]
        return probs / (below[:, -1:] - below[:, :1])


# Storage


class Batch(NamedTuple):
    """B steps of a rollout, float32; mean and log_std are those of the policy that made it."""

    obs: Tensor  # (B, O) normalized
    actions: Tensor  # (B, A)
    targets: Tensor  # (B,) soft lambda-returns
    mean: Tensor  # (B, A)
    log_std: Tensor  # (B, A)


class Rollout(NamedTuple):
    """T steps of N environments on the device."""

    obs: Tensor  # (T, N, O)
    actions: Tensor  # (T, N, A) in [-1, 1]
    rewards: Tensor  # (T, N)
    final_obs: Tensor  # (T, N, O) what follows in the same episode
    terminated: Tensor  # (T, N) bool
    ended: Tensor  # (T, N) bool, of either kind
    episode_returns: Tensor  # (T, N) of the episode so far
    episode_lengths: Tensor  # (T, N) of the episode so far


# Losses


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Reparameterized actions and their log-probabilities (arXiv:1812.05905, appendix C).

    All (B, A), noise standard normal -> actions (B, A), log_probs (B,). log(1 - tanh(x)^2) is
    written 2 (log 2 - x - softplus(-2x)), finite for every x.
    """
    x = mean + log_std.exp() * noise
    log_probs = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_probs = log_probs - 2 * (math.log(2) - x - F.softplus(-2 * x))
    return torch.tanh(x), log_probs.sum(dim=-1)


def gaussian_kl(mean: Tensor, log_std: Tensor, new_mean: Tensor, new_log_std: Tensor) -> Tensor:
    """KL divergence of a new Gaussian (B, A) from the old one -> (B,). tanh does not change it."""
    variance_ratio = (2 * (log_std - new_log_std)).exp()
    z = (mean - new_mean) * (-new_log_std).exp()
    kl = new_log_std - log_std + 0.5 * (variance_ratio + z.square() - 1)
    return kl.sum(dim=-1)


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
    """Returns of Q(lambda) (Peng and Williams, 1994; PQN, algorithm 1) -> (T, N).

    All (T, N). `next_values` is the value of what follows each step in its own episode: 0 after a
    termination, that of the final observation after a truncation. `ended` is 1 after either, and
    the rollout ends as a truncated episode does.
    """
    # speed: log2(T) vector operations instead of T: the return of step t is a constant and a weight
    # times the return of step t + 1
    weights = gamma * lam * (1 - ended)
    constants = rewards + (gamma - weights) * next_values
    constants[-1] += weights[-1] * next_values[-1]
    return reverse_scan(constants, weights)


def critic_loss(critic: Critic, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross entropy between the bins and a Gaussian around each target -> loss (), values (B,)."""
    logits = critic(batch.obs, batch.actions)
    log_probs = logits.log_softmax(dim=-1)
    loss = -(critic.project(batch.targets) * log_probs).sum(dim=-1).mean()
    return loss, critic.expect(logits)


def actor_loss(agent: "REPPO", batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Objective of the policy (section 3.2) -> loss (), log_probs (B,), divergences (B,)."""
    mean, log_std = agent.actor(batch.obs)
    actions, log_probs = squash(mean, log_std, noise)
    values = agent.critic.expect(agent.critic(batch.obs, actions))
    kl = gaussian_kl(batch.mean, batch.log_std, mean, log_std)
    alpha = agent.log_alpha.exp().detach()
    beta = agent.log_beta.exp().detach()
    loss = torch.where(kl < agent.args.kl_bound, alpha * log_probs - values, beta * kl)
    return loss.mean(), log_probs, kl


def alpha_loss(log_alpha: Tensor, log_probs: Tensor, target_entropy: float) -> Tensor:
    """Dual objective of the entropy constraint (equation 18) -> loss ()."""
    return -(log_alpha.exp() * (log_probs.detach() + target_entropy)).mean()


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


def gradient_step(loss: Tensor, optimizer: Adam) -> None:
    """A step of `optimizer`; backward computes the gradients of its parameters and no others."""
    # speed: gradients as values: no .grad to fill and to zero, and zero_grad cannot be compiled
    gradients = torch.autograd.grad(loss, optimizer.parameters)
    optimizer.step(gradients)


def take_in(mean: Tensor, variance: Tensor, seen: Tensor, weight: Tensor) -> None:
    """Running statistics (...) take in rows `seen` (N, ...) with this weight (Welford, 1962)."""
    before = seen - mean
    mean.lerp_(seen.mean(dim=0), weight)
    products = before * (seen - mean)
    variance.lerp_(products.mean(dim=0), weight)


class REPPO(nn.Module):
    """Networks, optimizers and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, envs: gym.vector.VectorEnv, device: torch.device):
        super().__init__()
        obs_dim = envs.single_observation_space.shape[0]
        action_dim = envs.single_action_space.shape[0]
        self.args = args
        self.target_entropy = args.target_entropy * action_dim
        self.actor = Actor(envs.actor_dim, action_dim)
        self.critic = Critic(obs_dim + action_dim, args.num_bins, args.max_value)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)))
        self.log_beta = nn.Parameter(torch.tensor(math.log(args.beta)))
        self.register_buffer("observed", torch.zeros(()))  # steps of all N worlds, in these means
        self.register_buffer("obs_mean", torch.zeros(obs_dim))
        self.register_buffer("obs_variance", torch.ones(obs_dim))
        self.register_buffer("return_mean", torch.zeros(()))
        self.register_buffer("return_variance", torch.ones(()))
        returns = torch.zeros(args.num_envs)  # discounted, of each episode so far
        self.register_buffer("returns", returns, persistent=False)
        self.to(device)
        multipliers = [self.log_alpha, self.log_beta]
        # speed: the Adam above, which compiles and captures with the rest of an update
        self.actor_optimizer = Adam(self.actor.parameters(), lr=args.learning_rate)
        self.critic_optimizer = Adam(self.critic.parameters(), lr=args.learning_rate)
        self.multiplier_optimizer = Adam(multipliers, lr=args.multiplier_lr)
        self.optimizers = self.actor_optimizer, self.critic_optimizer, self.multiplier_optimizer

    def observe(self, obs: Tensor, rewards: Tensor, ended: Tensor) -> None:
        """Takes a step into the statistics: obs (N, O), rewards and ends of either kind (N,)."""
        self.observed += 1
        weight = 1 / self.observed
        take_in(self.obs_mean, self.obs_variance, obs, weight)
        self.returns.mul_(self.args.gamma).add_(rewards)
        take_in(self.return_mean, self.return_variance, self.returns, weight)
        self.returns.masked_fill_(ended, 0)

    def normalize(self, obs: Tensor) -> Tensor:
        """obs (B, O) -> what the networks see (B, O): SimBa's (arXiv:2410.09754), but clipped."""
        obs = (obs - self.obs_mean) * (self.obs_variance + 1e-4).rsqrt()
        return obs.clamp(-10, 10)

    def scale(self, rewards: Tensor) -> Tensor:
        """Rewards (B,) in deviations of discounted returns (SimbaV2's, but without its G_max)."""
        return rewards * (self.return_variance + 1e-4).rsqrt()

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """obs (N, O), standard normal noise (N, A) -> actions (N, A) in [-1, 1]."""
        with torch.no_grad():
            mean, log_std = self.actor(self.normalize(obs))
            actions, _ = squash(mean, log_std, noise)
            return actions

    def prepare(self, rollout: Rollout, noise: Tensor) -> Batch:
        """A rollout, noise (T N, A) for the actions that follow -> B = T N steps to learn from."""
        with torch.no_grad():
            obs = self.normalize(rollout.obs.flatten(0, 1))
            next_obs = self.normalize(rollout.final_obs.flatten(0, 1))
            next_mean, next_log_std = self.actor(next_obs)
            next_actions, next_log_probs = squash(next_mean, next_log_std, noise)
            next_values = self.critic.expect(self.critic(next_obs, next_actions))
            next_entropies = -self.log_alpha.exp() * next_log_probs
            shape = rollout.rewards.shape
            goes_on = ~rollout.terminated
            targets = lambda_returns(
                self.scale(rollout.rewards)
                + self.args.gamma * goes_on * next_entropies.view(shape),
                goes_on * next_values.view(shape),
                rollout.ended.float(),
                self.args.gamma,
                self.args.q_lambda,
            )
            mean, log_std = self.actor(obs)
            return Batch(
                obs=obs,
                actions=rollout.actions.flatten(0, 1),
                targets=targets.flatten(),
                mean=mean,
                log_std=log_std,
            )

    def update(self, batch: Batch, index: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """A step of each optimizer on the minibatch `batch[index]`, with noise (B, A)."""
        minibatch = Batch._make([column[index] for column in batch])
        qf_loss, values = critic_loss(self.critic, minibatch)
        gradient_step(qf_loss, self.critic_optimizer)
        loss, log_probs, kl = actor_loss(self, minibatch, noise)
        gradient_step(loss, self.actor_optimizer)
        alpha = self.log_alpha.detach().exp()
        beta = self.log_beta.detach().exp()
        excess = kl.detach().mean() - self.args.kl_bound
        multiplier_loss = alpha_loss(self.log_alpha, log_probs, self.target_entropy)
        multiplier_loss = multiplier_loss - self.log_beta.exp() * excess
        gradient_step(multiplier_loss, self.multiplier_optimizer)
        beyond = kl.detach() >= self.args.kl_bound
        return {
            "losses/qf_loss": qf_loss.detach(),
            "losses/qf_values": values.detach().mean(),
            "losses/actor_loss": loss.detach(),
            "losses/entropy": -log_probs.detach().mean(),
            "losses/kl": kl.detach().mean(),
            "losses/clipfrac": beyond.float().mean(),
            "losses/alpha": alpha,
            "losses/beta": beta,
        }

    def learn(self, batch: Batch, order: Tensor) -> dict[str, Tensor]:
        """An epoch in the order of a permutation (B,) -> what its last minibatch logs."""
        indices = order.view(self.args.num_minibatches, -1)
        noise = torch.randn(*indices.shape, batch.actions.shape[1], device=order.device)
        for index, minibatch_noise in zip(indices, noise, strict=True):
            metrics = self.update(batch, index, minibatch_noise)
        return metrics


# speed: acting, observing and an update with its optimizers become one compiled call each. What is
# made once a rollout would take seconds to compile and gain nothing that one could measure
def compile_agent(agent: REPPO) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process."""
    torch._dynamo.reset()  # what others have compiled in this process counts against a limit
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    if torch.__version__.startswith("2.11"):
        torch._inductor.config.reorder_for_locality = False  # True moves reads past writes
        torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs
    for name in ("observe", "act", "update"):
        method = getattr(agent, name)
        setattr(agent, name, torch.compile(method, fullgraph=True))


# speed: for a GPU, one launch instead of many; a third call captures, when all is compiled
def capture_agent(agent: REPPO) -> None:
    """Acting, observing, targets and an epoch of learning replay what their third call recorded.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused,
    one of other numbers, such as `agent.target_entropy`, has no effect.
    """
    torch.compiler.config.force_cudagraph_gc = True  # a graph freed amid a capture would end it
    recorded = dict(vars(agent.args))
    learn = CudaGraphModule(agent.learn, warmup=3)

    def replay(batch, order):
        assert vars(agent.args) == recorded, "CUDA graphs keep args: make what changes a tensor"
        return learn(batch, order)

    agent.act = CudaGraphModule(agent.act, warmup=3)
    agent.observe = CudaGraphModule(agent.observe, warmup=3)
    agent.prepare = CudaGraphModule(agent.prepare, warmup=3)
    agent.learn = replay


# Training


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    torch.set_num_threads(args.torch_threads)
    torch.set_flush_denormal(True)  # Adam's averages decay to numbers that are ten times slower
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    batch_size = args.num_envs * args.num_steps
    steady_after = STEADY_AFTER * batch_size
    run = Run(args, device, batch_size, steady_after, trace_after=3, trace_iterations=1)
    seed = args.seed + run.start_step
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

    envs = gym.make_vec(
        args.env_id,
        num_envs=args.num_envs,
        vectorization_mode="vector_entry_point",
        device=device,
        physics=args.physics,
        randomize=args.randomize,
        seed=args.seed,
    )
    agent = REPPO(args, envs, device)
    if args.resume:
        run.restore(agent)

    # speed: methods are replaced before the loop, which remains the baseline's
    if args.compile:
        compile_agent(agent)
        envs.compile()
    if args.cudagraphs and device.type == "cuda":
        capture_agent(agent)
        envs.capture()
    elif args.cudagraphs:
        print("--cudagraphs: without CUDA it has no effect", file=sys.stderr)

    obs, _ = envs.reset(seed=seed, options={"stagger": True})
    run.open()
    while not run.ending:
        # 1. Roll out: T steps with the policy as it is.
        noise = torch.randn(args.num_steps, *envs.action_space.shape, device=device)
        rows = []
        for t in range(args.num_steps):
            run.stage("inference")
            actions = agent.act(obs, noise[t])
            run.stage("simulation")
            controls = envs.low.lerp(envs.high, (actions + 1) / 2)
            next_obs, rewards, terminated, _, infos = envs.step(controls)
            run.stage("replay")
            agent.observe(obs, rewards, infos["_episode"])
            step = Rollout(
                obs=obs,
                actions=actions,
                rewards=rewards,
                final_obs=infos["final_obs"],
                terminated=terminated,
                ended=infos["_episode"],
                episode_returns=infos["episode"]["r"],
                episode_lengths=infos["episode"]["l"],
            )
            rows.append(step)
            obs = next_obs  # where an episode ended, already the next episode's first
        rollout = Rollout._make([torch.stack(column) for column in zip(*rows, strict=True)])
        run.step += batch_size

        # 2. Learn from it in several epochs. The first rollout only measures.
        run.stage("backpropagation")
        row = {}
        if run.step > batch_size:
            batch = agent.prepare(rollout, torch.randn_like(rollout.actions).flatten(0, 1))
            for _ in range(args.update_epochs):
                order = torch.randperm(batch_size, device=device)
                row = agent.learn(batch, order)
        known = rollout.ended & rollout.episode_returns.isfinite()  # the first are NaN
        if known.any():  # waits for the device
            row["charts/episodic_return"] = rollout.episode_returns[known].mean()
            row["charts/episodic_length"] = rollout.episode_lengths[known].mean()
        run.tick()

        # 3. Log.
        row["charts/broken_worlds"] = envs.broken
        row["charts/overflows"] = envs.overflows()
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


# Evaluation


def evaluate(agent: REPPO, args: Args, video: Path) -> float:
    """Mean return of K episodes in Gymnasium's environments, always the same, without noise."""
    seeds = np.random.SeedSequence(args.seed).generate_state(args.eval_episodes) >> 1
    seeds = seeds.tolist()  # below 2**31, and not training's
    make = partial(gym.make, args.env_id, randomize=args.randomize)
    makers = [partial(make, seed=seed) for seed in seeds]
    if args.capture_video:
        env = make(seed=seeds[0], render_mode="rgb_array")
        env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        makers[0] = lambda: env
    envs = gym.vector.SyncVectorEnv(makers)
    low, high = envs.single_action_space.low, envs.single_action_space.high
    device = agent.log_alpha.device
    noise = torch.zeros(envs.action_space.shape, device=device)
    returns = np.zeros(args.eval_episodes)
    running = np.ones(args.eval_episodes, dtype=bool)
    generators = random.getstate(), np.random.get_state()  # environments may draw from them
    random.seed(seeds[0])
    np.random.seed(seeds[0])
    obs, _ = envs.reset(seed=seeds)
    while running.any():  # each has a time limit
        inputs = torch.as_tensor(obs).to(noise)  # its type and device
        actions = REPPO.act(agent, inputs, noise)  # agent.act may be compiled
        actions = low + (high - low) * (actions.cpu().numpy() + 1) / 2
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        returns += running * rewards
        running &= ~(terminated | truncated)
    envs.close()
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    return float(returns.mean())


# >>> run: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>
class Stopwatch:
    """Seconds per stage and steady steps/s; on a GPU also its seconds per stage, sampled."""

    def __init__(self, device, warmup_steps=0, trace=False, trace_after=500, trace_iterations=20):
        self.on_gpu = device.type == "cuda"
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
            torch.cuda.synchronize()
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
        self.sampling = self.on_gpu and self.iterations % 61 == 0
        self.events = []

    def measure(self):
        """Of the steady window or, until the warm-up has ended, of the run so far."""
        if self.profiler:
            return self.untraced
        if self.on_gpu:
            torch.cuda.synchronize()  # what is still queued belongs to it
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
        config["gpu"] = torch.cuda.get_device_name() if self.watch.on_gpu else None
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
        state["generators"] = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        partial = self.dir / "checkpoint.partial"
        torch.save(state, partial)
        partial.replace(self.dir / "checkpoint.pt")  # a crash leaves the old one or the new one

    def restore(self, agent):
        """Networks, optimizers and generators; learning rates stay flags -> the checkpoint."""
        checkpoint, self.checkpoint = self.checkpoint, None  # or its file would stay in memory
        agent.load_state_dict(checkpoint["agent"])
        for optimizer, state in zip(agent.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": copy.deepcopy(state)})
        cpu_state, *gpu_states = checkpoint["generators"]
        torch.set_rng_state(cpu_state)
        torch.cuda.set_rng_state_all(gpu_states[: torch.cuda.device_count()])
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
