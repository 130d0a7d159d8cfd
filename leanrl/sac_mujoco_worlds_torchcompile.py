"""SAC on many MuJoCo worlds in one batch, with torch.compile and CUDA graphs.

    python leanrl/sac_mujoco_worlds_torchcompile.py --compile --cudagraphs

The algorithm is that of its twin, sac_mujoco_worlds.py, which says where it comes from, which
defaults are not CleanRL's and what the shapes mean; the hunks that differ start with `# speed:` and
say what they buy, the rest is the same to the letter. Without a CUDA device --cudagraphs says so in
one line and the run goes on. The first updates pay for compilation, which is reported as warm-up.
"""

# speed: CudaGraphModule captures a function as a CUDA graph, one for each `product` of what is due
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
from collections import Counter, defaultdict, deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise, product
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

    # speed: compiled code fuses operations and spares Python between them, a CUDA graph launches at
    # once all that it has recorded; any combination of the flags works, none too
    compile: bool = False  # compile acting, updating and the worlds around their physics
    cudagraphs: bool = False  # replay acting, statistics, updates and worlds as CUDA graphs

    env_id: str = "worlds/HalfCheetah-v5"  # one of mujoco_worlds.py, or MODULE:ID, a task of yours
    physics: Literal["auto", "c", "warp"] = "auto"  # MuJoCo's C or mujoco_warp; auto: C on a CPU
    euler_timestep: float = 0.0  # s, longest step of Euler's method in training; 0: as the model
    randomize: float = 0.0  # 0.2: each world's masses, friction, motors are 0.8 to 1.2 the model's
    total_timesteps: int = 5_000_000  # environment steps over all environments, rounded down
    num_envs: int = 64  # environments stepped side by side
    utd_ratio: float = 0.25  # update-to-data ratio: updates per environment step
    buffer_size: int = 1_000_000  # capacity of the replay buffer, in transitions
    gamma: float = 0.99  # discount factor, which stored transitions keep
    nstep: int = 3  # rewards of so many steps are in a target, fewer where an episode ends
    tau: float = 0.005  # share of the Q-networks that enters their targets at each target update
    batch_size: int = 64  # transitions per update
    learning_starts: int = 5_000  # environment steps with random actions before the first update
    policy_lr: float = 3e-4  # learning rate of the policy
    q_lr: float = 1e-3  # learning rate of the Q-networks and of the temperature
    policy_frequency: int = 2  # every n-th update updates the policy, once
    target_network_frequency: int = 1  # every n-th update updates the target networks
    alpha: float = 0.01  # entropy temperature, at first where it is tuned; a resumed run's stays
    autotune: bool = True  # tune the temperature towards an entropy of minus the action dimensions
    clipped_double_q: bool = True  # take the smaller of both Q-networks' values, else their mean

    def __post_init__(self):
        if not (0 <= self.gamma <= 1 and 0 <= self.tau <= 1):
            raise ValueError("--gamma and --tau lie between 0 and 1")
        if self.nstep < 1:
            raise ValueError("--nstep is at least 1")
        if not 0 < self.learning_starts < self.total_timesteps:
            raise ValueError("--learning-starts lies between 0 and --total-timesteps")


LOG_EVERY = 100  # steps of all environments per row of metrics, which waits for the device
STEADY_AFTER = 50  # updates of each kind; a variant has compiled and captured all by then
LOG_STD_MIN = -5.0  # of the policy, as in CleanRL
LOG_STD_MAX = 2.0


# Networks


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """A network with two hidden layers of 256."""
    return nn.Sequential(
        nn.Linear(inputs, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, outputs),
    )


def q_network(inputs: int) -> nn.Sequential:
    """The same for values, with layer normalization (Ba et al., 2016, arXiv:1607.06450)."""
    norm = nn.LayerNorm(256, elementwise_affine=False)  # without weights
    return nn.Sequential(
        nn.Linear(inputs, 256),
        norm,
        nn.ReLU(),
        nn.Linear(256, 256),
        norm,
        nn.ReLU(),
        nn.Linear(256, 1),
    )


class TwinQ(nn.ModuleList):
    """Two independent Q-networks behind one call (Fujimoto et al., 2018, arXiv:1802.09477)."""

    # speed: stacked parameters make both networks one batched product per layer instead of two; the
    # first network is the template for them and cannot be called by itself any more
    def __init__(self, networks):
        first, second = networks
        super().__init__([first])
        stacked, _ = torch.func.stack_module_state([first, second])
        for name, parameter in first.named_parameters():
            data = stacked[name].data
            # transposed in memory, as gradients come, so that Adam reads all in the same order
            parameter.data = data.mT.contiguous().mT if data.ndim == 3 else data

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """obs (B, O), actions (B, A) -> values (2, B)."""
        x = torch.cat([obs, actions], dim=-1)

        # speed: vmap maps the call, written for one network, over the stacked parameters
        def call(parameters):
            return torch.func.functional_call(self[0], parameters, x)

        parameters = dict(self[0].named_parameters())
        values = torch.func.vmap(call)(parameters)
        return values.squeeze(-1)


class Actor(nn.Module):
    """Tanh-squashed Gaussian policy whose actions fill the box [low, high].

    It sees the first actor_dim numbers of an observation, which is all unless a task says so.
    """

    def __init__(self, actor_dim: int, action_space: Box):
        super().__init__()
        self.actor_dim = actor_dim
        action_dim = action_space.shape[0]
        self.network = mlp(actor_dim, 2 * action_dim)
        low = torch.tensor(action_space.low).float()
        high = torch.tensor(action_space.high).float()
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_bias", (high + low) / 2)

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Reparameterized actions and their log-probabilities (arXiv:1812.05905, appendix C).

        obs (B, O), standard normal noise (B, A) -> actions (B, A), log_probs (B,). The squashing's
        log(1 - tanh(x)^2) is written 2 (log 2 - x - softplus(-2x)), finite for every x.
        """
        mean, log_std = self.network(obs[:, : self.actor_dim]).chunk(2, dim=-1)
        log_std = LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1) / 2
        x = mean + log_std.exp() * noise
        squashed = torch.tanh(x)
        actions = squashed * self.action_scale + self.action_bias
        log_probs = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_probs = log_probs - 2 * (math.log(2) - x - F.softplus(-2 * x))
        log_probs = log_probs - self.action_scale.log()
        return actions, log_probs.sum(dim=-1)


# Storage


class Batch(NamedTuple):
    """B transitions, float32, each over one or several steps; a truncated episode bootstraps."""

    obs: Tensor  # (B, O)
    actions: Tensor  # (B, A)
    next_obs: Tensor  # (B, O), after the last of the steps
    rewards: Tensor  # (B,), discounted sums over the steps
    discounts: Tensor  # (B,), of next_obs's value: gamma^steps, 0 where the episode terminated


def n_step(steps: deque, gamma: float) -> Batch:
    """Transitions over all of `steps`, or until their episode ends (D4PG, arXiv:1804.08617).

    steps: consecutive; of each N transitions, and which episodes ended there (N,), as bool.
    """
    *before, (result, _) = steps
    for step, ended in reversed(before):
        result = step._replace(
            next_obs=step.next_obs.where(ended[:, None], result.next_obs),
            rewards=step.rewards + gamma * result.rewards.masked_fill(ended, 0),
            discounts=step.discounts.where(ended, gamma * result.discounts),
        )
    return result


class ReplayBuffer:
    """Ring of the last transitions on `device`: 4 (2 O + A + 2) bytes each."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        self.args = args
        self.capacity = args.buffer_size // args.num_envs * args.num_envs
        self.position = 0
        self.size = 0
        # speed: for graphs, whose batch stays in one place: a transition is one row, so storing is
        # one copy and sampling one gather. A graph reads on the device how many rows are filled
        widths = obs_dim, action_dim, obs_dim, 1, 1  # in the order of Batch
        self.data = torch.empty(self.capacity, sum(widths), device=device)
        self.device_size = torch.zeros((), dtype=torch.float64, device=device)
        self.rows = torch.empty(args.batch_size, sum(widths), device=device)
        obs, actions, next_obs, rewards, discounts = self.rows.split(widths, dim=1)
        self.batch = Batch(
            obs=obs,
            actions=actions,
            next_obs=next_obs,
            rewards=rewards.squeeze(1),  # (B,), not (B, 1)
            discounts=discounts.squeeze(1),
        )

    def add(self, transitions: Batch) -> None:
        """Stores N transitions, whose fields are (N, ...)."""
        end = self.position + len(transitions.rewards)
        # speed: one copy
        columns = [new.view(len(new), -1) for new in transitions]
        self.data[self.position : end] = torch.cat(columns, dim=1)
        self.device_size.clamp_(min=end)
        self.size = max(self.size, end)
        self.position = end % self.capacity

    def sample(self) -> Batch:
        """B transitions drawn uniformly with replacement."""
        # speed: refills the one batch; `draw` alone is what the graph of an update begins with
        self.draw()
        return self.batch

    # speed: a graph would freeze randint's bound; this one is on the device. float64, because a
    # draw in float32 is one of 2^24 numbers
    def draw(self):
        """Refills `batch`."""
        device = self.data.device
        uniform = torch.rand(len(self.rows), dtype=torch.float64, device=device)
        index = (uniform * self.device_size).long()
        torch.index_select(self.data, 0, index, out=self.rows)

    def state_dict(self) -> dict:
        state = {"capacity": self.capacity, "position": self.position}
        # speed: one tensor
        state["rows"] = self.data[: self.size].to("cpu", copy=True)  # a view would save all
        return state

    def load_state_dict(self, state: dict) -> None:
        if state["capacity"] != self.capacity:
            raise ValueError(f"--buffer-size: the checkpoint has {state['capacity']:,}")
        self.position = state["position"] // self.args.num_envs * self.args.num_envs
        # speed: one tensor, and its size on the device as well
        self.size = len(state["rows"])
        self.data[: self.size] = state["rows"]
        self.device_size.fill_(self.size)


# Losses


def critic_loss(agent: "SAC", batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Soft Bellman error of each Q-network (equation 5, doubled) -> losses (2,), values (2, B).

    The entropy of steps between is left out.
    """
    with torch.no_grad():
        next_actions, next_log_probs = agent.actor.sample(batch.next_obs, noise)
        next_q = agent.qf_target(batch.next_obs, next_actions)  # (2, B)
        next_values = agent.combine(next_q) - agent.log_alpha.exp() * next_log_probs
        targets = batch.rewards + batch.discounts * next_values
    values = agent.qf(batch.obs, batch.actions)
    losses = (values - targets).square().mean(dim=1)
    return losses, values


def actor_loss(agent: "SAC", obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Objective of the policy, reparameterized (equation 9) -> loss (), log_probs (B,)."""
    actions, log_probs = agent.actor.sample(obs, noise)
    values = agent.combine(agent.qf(obs, actions))
    alpha = agent.log_alpha.exp().detach()
    loss = (alpha * log_probs - values).mean()
    return loss, log_probs


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


class SAC(nn.Module):
    """Networks, optimizers and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, envs: gym.vector.VectorEnv, device: torch.device):
        super().__init__()
        obs_dim = envs.single_observation_space.shape[0]
        action_dim = envs.single_action_space.shape[0]
        self.args = args
        self.target_entropy = -float(action_dim)
        self.actor = Actor(envs.actor_dim, envs.single_action_space)
        q_networks = [q_network(obs_dim + action_dim) for _ in range(2)]
        self.qf = TwinQ(q_networks)
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)
        log_alpha = torch.tensor([math.log(args.alpha)])
        self.log_alpha = nn.Parameter(log_alpha)
        self.register_buffer("observed", torch.zeros(()))  # steps of all N worlds, in these means
        self.register_buffer("obs_mean", torch.zeros(obs_dim))
        self.register_buffer("obs_variance", torch.ones(obs_dim))
        self.register_buffer("return_mean", torch.zeros(()))
        self.register_buffer("return_variance", torch.ones(()))
        returns = torch.zeros(args.num_envs)  # discounted, of each episode so far
        self.register_buffer("returns", returns, persistent=False)
        self.to(device)
        # speed: the Adam above, which compiles and captures with the rest of an update
        self.q_optimizer = Adam(self.qf.parameters(), lr=args.q_lr)
        self.actor_optimizer = Adam(self.actor.parameters(), lr=args.policy_lr)
        self.alpha_optimizer = Adam([self.log_alpha], lr=args.q_lr)
        self.optimizers = self.q_optimizer, self.actor_optimizer, self.alpha_optimizer

    def update_statistics(self, obs: Tensor, rewards: Tensor, ended: Tensor) -> None:
        """Takes in a step: obs (N, O), rewards and ends of either kind (N,)."""
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

    def combine(self, values: Tensor) -> Tensor:
        """Both Q-networks' values (2, B) -> the smaller, or means (BRO, arXiv:2405.16158), (B,)."""
        return values.amin(dim=0) if self.args.clipped_double_q else values.mean(dim=0)

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """obs (N, O), noise (N, A) -> actions (N, A)."""
        with torch.no_grad():
            actions, _ = self.actor.sample(self.normalize(obs), noise)
            return actions

    def update_critic(self, batch: Batch, noise: Tensor) -> dict[str, Tensor]:
        """One step of both Q-networks, with standard normal noise (B, A)."""
        batch = batch._replace(
            obs=self.normalize(batch.obs),
            next_obs=self.normalize(batch.next_obs),
            rewards=batch.rewards * (self.return_variance + 1e-4).rsqrt(),
        )
        losses, values = critic_loss(self, batch, noise)
        gradient_step(losses.sum(), self.q_optimizer)
        losses = losses.detach()
        mean_values = values.detach().mean(dim=1)
        return {
            "losses/qf1_loss": losses[0],
            "losses/qf2_loss": losses[1],
            "losses/qf_loss": losses.mean(),
            "losses/qf1_values": mean_values[0],
            "losses/qf2_values": mean_values[1],
        }

    def update_actor(self, obs: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """One step of the policy, then one of the temperature."""
        loss, log_probs = actor_loss(self, self.normalize(obs), noise)
        gradient_step(loss, self.actor_optimizer)
        temperature_loss = alpha_loss(self.log_alpha, log_probs, self.target_entropy)
        alpha = self.log_alpha.detach().exp()[0]
        if self.args.autotune:
            gradient_step(temperature_loss, self.alpha_optimizer)
        return {
            "losses/actor_loss": loss.detach(),
            "losses/alpha_loss": temperature_loss.detach(),
            "losses/alpha": alpha,
            "losses/entropy": -log_probs.detach().mean(),
        }

    def update_target(self) -> None:
        """Polyak averaging of the target networks."""
        targets = self.qf_target.parameters()
        parameters = self.qf.parameters()
        with torch.no_grad():
            # speed: one call for all tensors, which compiled would be no faster
            torch._foreach_lerp_(list(targets), list(parameters), self.args.tau)

    def update(self, batch: Batch, actor_due: bool, target_due: bool) -> dict[str, Tensor]:
        """One step of the Q-networks, and of the rest where it is due."""
        metrics = self.update_critic(batch, torch.randn_like(batch.actions))
        if actor_due:
            metrics |= self.update_actor(batch.obs, torch.randn_like(batch.actions))
        if target_due:
            self.update_target()
        return metrics


# speed: a compiled call checks first what it was compiled for, some 800 guards for a critic's step;
# with these few a core needs 0.1 ms less. What has none must not change in a run: numbers of the
# agent outside of `args`, its modules, functions, globals
def kept_guards(guards: list) -> list[bool]:
    """Whether to keep each: those on tensors, their shapes, PyTorch's modes, and `args`."""
    kept = "TENSOR_MATCH", "SHAPE_ENV", "GLOBAL_STATE"
    return [guard.guard_type in kept or ".args." in guard.name for guard in guards]


# speed: acting, observing and both updates, optimizers included, become one compiled call each
def compile_agent(agent: SAC) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process."""
    torch._dynamo.reset()  # what others have compiled in this process counts against a limit
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    if torch.__version__.startswith("2.11"):
        torch._inductor.config.reorder_for_locality = False  # True moves reads past writes
        torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs
    for name in ("update_statistics", "act", "update_critic", "update_actor"):
        method = getattr(agent, name)
        options = {"guard_filter_fn": kept_guards}  # in the loop: torch.compile takes it out
        setattr(agent, name, torch.compile(method, fullgraph=True, options=options))


# speed: what runs every step becomes CUDA graphs; a third call captures, when all is compiled
def capture_agent(agent: SAC, rb: ReplayBuffer) -> None:
    """Acting, observing and each kind of update replay what their third call has recorded.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused,
    one of other numbers, such as `agent.target_entropy`, has no effect.
    """
    update = agent.update
    torch.compiler.config.force_cudagraph_gc = True  # a graph freed amid a capture would end it
    recorded = dict(vars(agent.args))
    metrics = defaultdict(lambda: rb.data.new_zeros(()))
    capture = partial(CudaGraphModule, warmup=3)

    def update_in_place(*due):
        rb.draw()
        new = update(rb.batch, *due)
        kept = [metrics[name] for name in new]  # where the graphs of all kinds leave them
        torch._foreach_copy_(kept, list(new.values()))

    graphs = {}
    for due in product((False, True), repeat=2):  # of actor and target
        graphs[due] = capture(partial(update_in_place, *due))

    def replay(batch, *due):
        assert batch is rb.batch, "CUDA graphs read rb.batch: change its tensors in place"
        assert vars(agent.args) == recorded, "CUDA graphs keep args: make what changes a tensor"
        graphs[due]()
        return metrics

    agent.update_statistics = capture(agent.update_statistics)
    agent.act = capture(agent.act)
    rb.sample = lambda: rb.batch  # which an update's graph refills, before all else
    agent.update = replay


# Training


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    torch.set_num_threads(args.torch_threads)
    torch.set_flush_denormal(True)  # Adam's averages decay to numbers that are ten times slower
    torch.set_float32_matmul_precision(args.matmul_precision)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    default = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    device = torch.device(args.device or default)
    period = math.lcm(args.policy_frequency, args.target_network_frequency) / args.utd_ratio
    run = Run(args, device, args.num_envs, steady_after=STEADY_AFTER * period)
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
        euler_timestep=args.euler_timestep,
        randomize=args.randomize,
        seed=args.seed,
    )
    agent = SAC(args, envs, device)
    obs_dim = envs.single_observation_space.shape[0]
    action_dim = envs.single_action_space.shape[0]
    rb = ReplayBuffer(args, obs_dim, action_dim, device)
    if args.resume:
        rb.load_state_dict(run.restore(agent)["replay"])

    # speed: methods are replaced before the loop, which remains the baseline's
    if args.compile:
        compile_agent(agent)
        envs.compile()
    if args.cudagraphs and device.type == "cuda":
        capture_agent(agent, rb)
        envs.capture()
    elif args.cudagraphs:
        print("--cudagraphs: without CUDA it has no effect", file=sys.stderr)

    obs, _ = envs.reset(seed=seed, options={"stagger": True})
    learned = run.start_step - args.learning_starts  # the step that passes it makes no update
    num_updates = int(learned * args.utd_ratio) if learned >= args.num_envs else 0
    metrics = {}  # of the last updates
    recent = deque(maxlen=args.nstep)  # transitions of the last steps, and which episodes ended
    totals = torch.zeros(3, device=device)  # of episodes since the last row: return, length, count
    run.open()
    while not run.ending:
        # 1. Act: uniformly at random at first, then by the policy.
        run.stage("inference")
        if run.step < args.learning_starts:
            uniform = torch.rand(args.num_envs, action_dim, device=device)
            actions = envs.low.lerp(envs.high, uniform)
        else:
            noise = torch.randn(args.num_envs, action_dim, device=device)
            actions = agent.act(obs, noise)

        # 2. Learn from what the replay buffer holds.
        due_updates = int((run.step + args.num_envs - args.learning_starts) * args.utd_ratio)
        while run.step >= args.learning_starts and num_updates < due_updates:
            num_updates += 1
            run.stage("replay")
            batch = rb.sample()
            run.stage("backpropagation")
            actor_due = num_updates % args.policy_frequency == 0
            target_due = num_updates % args.target_network_frequency == 0
            metrics |= agent.update(batch, actor_due, target_due)

        # 3. Step the environments.
        run.stage("simulation")
        next_obs, rewards, terminated, _, infos = envs.step(actions)

        # 4. Store. Where an episode ended, next_obs is already the next episode's first.
        run.stage("replay")
        ended = infos["_episode"]
        agent.update_statistics(obs, rewards, ended)
        discounts = args.gamma * (1 - terminated.float())
        recent.append((Batch(obs, actions, infos["final_obs"], rewards, discounts), ended))
        rb.add(n_step(recent, args.gamma))
        obs = next_obs
        episode = infos["episode"]
        known = ended & episode["r"].isfinite()  # the first are NaN
        numbers = torch.stack([episode["r"], episode["l"], torch.ones_like(rewards)])
        totals += numbers.where(known, 0).sum(dim=1)
        run.step += args.num_envs
        run.tick()

        # 5. Log.
        if run.due(LOG_EVERY * args.num_envs):
            run.stage("backpropagation")  # whose work the first read waits for
            total_return, total_length, episodes = totals.tolist()
            totals.zero_()
            if episodes > 0:
                run.write({"charts/episodic_return": total_return / episodes})
                run.write({"charts/episodic_length": total_length / episodes})
            metrics["charts/broken_worlds"] = envs.broken
            metrics["charts/overflows"] = envs.overflows()
            run.log(metrics)

        # 6. Save and evaluate, now and then and at the end.
        if run.due(args.checkpoint_every, at_end=args.save_model):
            run.stage("checkpoint")
            run.save(agent, replay=rb.state_dict())
        if run.due(args.eval_every, at_end=args.capture_video) and not run.stopped:
            run.stage("evaluation")
            eval_return = evaluate(agent, args, run.dir / f"videos/step-{run.step}")
            run.write({"charts/eval_return": eval_return})
            run.bar.write(f"evaluation at {run.step:,}: {eval_return:,.5g}", file=sys.stderr)
    run.close()
    return run.dir


# Evaluation


def evaluate(agent: SAC, args: Args, video: Path) -> float:
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
        actions = SAC.act(agent, inputs, noise)  # agent.act may be compiled
        actions = actions.cpu().numpy()
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        returns += running * rewards
        running &= ~(terminated | truncated)
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
