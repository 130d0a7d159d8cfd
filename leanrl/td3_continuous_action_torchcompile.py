r"""Twin Delayed DDPG (TD3) for continuous actions, with torch.compile and CUDA graphs.

    python leanrl/td3_continuous_action_torchcompile.py --compile --cudagraphs
    python leanrl/td3_continuous_action_torchcompile.py --compile --env-id Pendulum-v1 \
        --total-timesteps 10000 --learning-starts 1000              # learns in a minute or two

The algorithm is that of its twin, td3_continuous_action.py, which says where it comes from and
what the shapes mean; the hunks that differ start with `# speed:` and say what they buy, the rest
is the same to the letter. Without a CUDA device --cudagraphs says so in one line and the run goes
on. The first updates pay for compilation, which is reported as warm-up: less with a warm cache.
"""

# speed: CudaGraphModule captures a function as a CUDA graph; partial binds its fixed arguments
import copy
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback until the run begins

# speed: tensordict would log two lines for each graph that it captures, amid the progress
os.environ.setdefault("TD_LOGGING_LEVEL", "WARNING")

import gymnasium as gym
import numpy as np
import torch
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
    cudagraphs: bool = False  # replay acting, sampling and updating as CUDA graphs

    env_id: str = "HalfCheetah-v5"  # id of the Gymnasium environment
    total_timesteps: int = 1_000_000  # environment steps over all environments, rounded down
    num_envs: int = 1  # environments stepped side by side
    utd_ratio: float = 1.0  # update-to-data ratio: updates per environment step
    buffer_size: int = 1_000_000  # capacity of the replay buffer, in transitions
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # share of the networks that enters their targets at each target update
    batch_size: int = 256  # transitions per update
    learning_starts: int = 25_000  # environment steps with random actions before the first update
    learning_rate: float = 3e-4  # learning rate of the policy and of the Q-networks
    policy_frequency: int = 2  # every n-th update updates the policy and all targets: the delay
    exploration_noise: float = 0.1  # standard deviation of the actions' noise, in half their ranges
    policy_noise: float = 0.2  # standard deviation of the noise that smooths the target policy
    noise_clip: float = 0.5  # bound of the smoothing noise, in half action ranges


LOG_EVERY = 100  # environment steps per row of metrics: reading them waits for the device
STEADY_AFTER = 100  # updates; at the default frequencies a variant has captured all by then


# Environment


def make_envs(env_id: str, num_envs: int, video: Path | None = None) -> gym.vector.VectorEnv:
    """N environments that reset in the step that ends an episode; `video` films the first one."""

    def make_env(**options) -> gym.Env:
        env = gym.make(env_id, **options)
        if "render_mode" in options:
            env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        return gym.wrappers.RecordEpisodeStatistics(env)

    makers = [make_env] * num_envs
    if video is not None:
        makers[0] = lambda: make_env(render_mode="rgb_array")
    envs = gym.vector.SyncVectorEnv(makers, autoreset_mode="SameStep")
    actions = envs.single_action_space
    flat_obs = len(envs.single_observation_space.shape or ()) == 1
    flat_actions = isinstance(actions, Box) and len(actions.shape) == 1
    if not (flat_obs and flat_actions and actions.is_bounded()):
        raise SystemExit("--env-id: needs flat observations and bounded, flat continuous actions")
    return envs


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


class TwinQ(nn.ModuleList):
    """Two independent Q-networks behind one call (Fujimoto et al., 2018, arXiv:1802.09477)."""

    # speed: stacked parameters make both networks one batched product per layer instead of two; the
    # first network is the template for them and cannot be called by itself any more
    def __init__(self, networks):
        first, second = networks
        super().__init__([first])
        stacked, _ = torch.func.stack_module_state([first, second])
        for name, parameter in first.named_parameters():
            parameter.data = stacked[name].data
            # gradients of batched products come transposed; with weights and averages of Adam laid
            # in the same way, all are read in order
            if name.endswith("weight"):
                parameter.data = parameter.data.mT.contiguous().mT

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
    """Tanh-squashed deterministic policy whose actions fill the box [low, high]."""

    def __init__(self, obs_dim: int, action_space: Box):
        super().__init__()
        action_dim = action_space.shape[0]
        self.network = mlp(obs_dim, action_dim)
        low = torch.tensor(action_space.low).float()
        high = torch.tensor(action_space.high).float()
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_bias", (high + low) / 2)

    def forward(self, obs: Tensor) -> Tensor:
        """obs (B, O) -> actions (B, A)."""
        squashed = torch.tanh(self.network(obs))
        return squashed * self.action_scale + self.action_bias

    def perturbed(self, obs: Tensor, noise: Tensor) -> Tensor:
        """obs (B, O), noise (B, A) in half action ranges -> actions in the box (B, A)."""
        actions = self(obs) + noise * self.action_scale
        low = self.action_bias - self.action_scale
        high = self.action_bias + self.action_scale
        return actions.clamp(low, high)


# Storage


class Batch(NamedTuple):
    """B transitions, float32. `terminated` is 1 at a real end; a truncated episode has 0."""

    obs: Tensor  # (B, O)
    actions: Tensor  # (B, A)
    next_obs: Tensor  # (B, O)
    rewards: Tensor  # (B,)
    terminated: Tensor  # (B,)


class ReplayBuffer:
    """Ring of the last transitions on `device`: 4 (2 O + A + 2) bytes each."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        self.args = args
        whole_steps = max(args.buffer_size // args.num_envs, 1)
        self.capacity = whole_steps * args.num_envs
        self.position = 0
        self.size = 0
        # speed: a transition is one row, so storing is one copy and sampling one gather; a graph
        # needs its batch in a fixed place, and reads on the device how many rows are filled
        widths = obs_dim, action_dim, obs_dim, 1, 1  # in the order of Batch
        with one_line("--buffer-size"):
            # speed: all rows, then those of a batch, whose fields are views of them
            self.data = torch.empty(self.capacity, sum(widths), device=device)
        self.device_size = torch.zeros((), dtype=torch.float64, device=device)
        self.rows = torch.empty(args.batch_size, sum(widths), device=device)
        obs, actions, next_obs, rewards, terminated = self.rows.split(widths, dim=1)
        self.batch = Batch(
            obs=obs,
            actions=actions,
            next_obs=next_obs,
            rewards=rewards.squeeze(1),  # (B,), not (B, 1)
            terminated=terminated.squeeze(1),
        )

    def add(self, transitions: Batch) -> None:
        """Stores N transitions, whose fields are (N, ...)."""
        end = self.position + len(transitions.rewards)
        # speed: one copy, for which the CPU does not wait
        rows = np.column_stack(transitions)
        rows = torch.from_numpy(rows).float()
        if self.data.is_cuda:
            rows = rows.pin_memory()  # not used again before it is copied
        self.data[self.position : end].copy_(rows, non_blocking=True)
        self.device_size.clamp_(min=end)
        self.size = max(self.size, end)
        self.position = end % self.capacity

    def sample(self) -> Batch:
        """B transitions drawn uniformly with replacement."""
        # speed: refills the one batch; `draw` alone is what a graph captures
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
        # speed: one tensor
        data = self.data[: self.size].to("cpu", copy=True)  # a view would save all
        return {"position": self.position, "data": data}

    def load_state_dict(self, state: dict) -> None:
        # speed: one tensor, and its size on the device as well
        saved = state["data"][: self.capacity]  # what fits
        self.size = len(saved)
        self.data[: self.size] = saved
        self.device_size.fill_(self.size)
        whole_steps = state["position"] % self.capacity // self.args.num_envs
        self.position = whole_steps * self.args.num_envs


# Losses


def critic_loss(agent: "TD3", batch: Batch, noise: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Bellman error of each Q-network (algorithm 1: clipped double Q, smoothed target policy).

    noise (B, A), clipped, in half action ranges -> losses (2,), values (2, B).
    """
    with torch.no_grad():
        next_actions = agent.actor_target.perturbed(batch.next_obs, noise)
        next_q = agent.qf_target(batch.next_obs, next_actions)  # (2, B)
        next_values = next_q.amin(dim=0)
        targets = batch.rewards + gamma * (1 - batch.terminated) * next_values
    values = agent.qf(batch.obs, batch.actions)
    losses = (values - targets).square().mean(dim=1)
    return losses, values


def actor_loss(agent: "TD3", obs: Tensor) -> Tensor:
    """Deterministic policy gradient through the first Q-network (algorithm 1) -> loss ()."""
    actions = agent.actor(obs)
    inputs = torch.cat([obs, actions], dim=-1)
    # speed: the first slice of the stacked parameters; the second network is not computed
    first = {name: stacked[0] for name, stacked in agent.qf[0].named_parameters()}
    values = torch.func.functional_call(agent.qf[0], first, (inputs,))
    return -values.mean()


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


class TD3(nn.Module):
    """Networks, optimizers and gradient steps, which return what is logged: {name: tensor ()}."""

    def __init__(self, args: Args, obs_dim: int, action_space: Box, device: torch.device):
        super().__init__()
        action_dim = action_space.shape[0]
        self.args = args
        self.actor = Actor(obs_dim, action_space)
        self.actor_target = copy.deepcopy(self.actor).requires_grad_(False)
        q_networks = [mlp(obs_dim + action_dim, 1) for _ in range(2)]
        self.qf = TwinQ(q_networks)
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)
        self.to(device)
        # speed: the Adam above, which compiles and captures with the rest of an update
        self.q_optimizer = Adam(self.qf.parameters(), lr=args.learning_rate)
        self.actor_optimizer = Adam(self.actor.parameters(), lr=args.learning_rate)
        self.optimizers = self.q_optimizer, self.actor_optimizer

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """obs (N, O), standard normal noise (N, A) -> actions (N, A)."""
        noise = noise * self.args.exploration_noise
        with torch.no_grad():
            return self.actor.perturbed(obs, noise)

    def update_critic(self, batch: Batch, noise: Tensor) -> dict[str, Tensor]:
        """One step of both Q-networks, with standard normal noise (B, A)."""
        # speed: clamp compiles anew for each new number; with a tensor once, then never again
        clip = noise.new_ones(()) * self.args.noise_clip
        noise = (noise * self.args.policy_noise).clamp(-clip, clip)
        losses, values = critic_loss(self, batch, noise, self.args.gamma)
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

    def update_actor(self, obs: Tensor) -> dict[str, Tensor]:
        """One step of the policy."""
        loss = actor_loss(self, obs)
        gradient_step(loss, self.actor_optimizer)
        return {"losses/actor_loss": loss.detach()}

    def update_target(self) -> None:
        """Polyak averaging of the target networks."""
        targets = [*self.actor_target.parameters(), *self.qf_target.parameters()]
        parameters = [*self.actor.parameters(), *self.qf.parameters()]
        with torch.no_grad():
            # speed: one call for all tensors, which compiled would be no faster
            torch._foreach_lerp_(targets, parameters, self.args.tau)

    def update(self, batch: Batch, actor_due: bool) -> dict[str, Tensor]:
        """One step of the Q-networks and, where it is due, of the policy and all targets."""
        metrics = self.update_critic(batch, torch.randn_like(batch.actions))
        if actor_due:
            metrics |= self.update_actor(batch.obs)
            self.update_target()
        return metrics


# speed: acting and both updates, gradients and optimizer included, become one compiled call each
def compile_agent(agent: TD3) -> None:
    """Each method is compiled when it is first called. The settings hold for the whole process.

    `main` flushes denormal numbers to zero: averages of units that are never active decay to such
    numbers, with which a CPU is ten times slower.
    """
    on_cpu = agent.actor.action_scale.is_cpu
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    torch._inductor.config.reorder_for_locality = False  # True moves reads past writes (torch 2.11)
    torch._inductor.config.loop_ordering_after_fusion = False  # True fails on GPUs (torch 2.11)
    torch._inductor.config.cpp.vec_isa_ok = True  # to try the CPU's vectors first takes 4 seconds
    torch._inductor.config.cpp_wrapper = on_cpu  # C++ calls kernels faster
    cpuinfo = Path("/proc/cpuinfo")
    on_zen5 = cpuinfo.exists() and "family\t: 26" in cpuinfo.read_text()
    if on_cpu and on_zen5:  # on Zen 4 it is slower, with AMX it means bfloat16, on a GPU TF32
        torch.set_float32_matmul_precision("medium")  # oneDNN, not MKL: 1.5x on AMD's Zen 5
    for name in ("act", "update_critic", "update_actor"):
        method = getattr(agent, name)
        setattr(agent, name, torch.compile(method, fullgraph=True))


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


# speed: what runs every step becomes CUDA graphs; a third call captures, when all is compiled
def capture_agent(agent: TD3, rb: ReplayBuffer) -> None:
    """Acting, sampling and each kind of update replay what their third call has recorded.

    A graph keeps Python's numbers as they were when it was captured: a change of `args` is refused,
    one of other numbers has no effect.
    """
    update = agent.update
    recorded = dict(vars(agent.args))
    metrics = defaultdict(lambda: rb.data.new_zeros(()))
    capture = partial(CudaGraphModule, warmup=3)

    def update_in_place(actor_due):
        new = update(rb.batch, actor_due)
        kept = [metrics[name] for name in new]  # where the graphs of both kinds leave them
        torch._foreach_copy_(kept, list(new.values()))

    graphs = {}
    for actor_due in (False, True):
        graphs[actor_due] = capture(partial(update_in_place, actor_due))

    def replay(batch, actor_due):
        assert batch is rb.batch, "CUDA graphs read rb.batch: change its tensors in place"
        assert vars(agent.args) == recorded, "CUDA graphs keep args: make what changes a tensor"
        graphs[actor_due]()
        return metrics

    agent.act = capture(agent.act)
    rb.draw = capture(rb.draw)
    agent.update = replay


# Training


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    check_env(args)
    on_gpu = args.cuda and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    warmup_steps = args.learning_starts + int(STEADY_AFTER / args.utd_ratio)
    run = Run(args, device, args.num_envs, warmup_steps)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    # speed: as compile_agent says. Threads inherit it when they start, so it comes before OpenMP's
    torch.set_flush_denormal(args.compile)

    envs = make_envs(args.env_id, args.num_envs)
    obs_dim = envs.single_observation_space.shape[0]
    action_dim = envs.single_action_space.shape[0]
    agent = TD3(args, obs_dim, envs.single_action_space, device)
    rb = ReplayBuffer(args, obs_dim, action_dim, device)
    if run.checkpoint:
        run.restore(agent)
        rb.load_state_dict(run.checkpoint["replay"])
    seed = args.seed + run.start_step
    envs.action_space.seed(seed)
    obs, _ = envs.reset(seed=seed)
    learning_steps = max(run.start_step - args.learning_starts, 0)
    num_updates = int(learning_steps * args.utd_ratio)
    metrics = {}  # of the last updates
    # speed: methods are replaced before the loop, which remains the baseline's
    if args.compile:
        compile_agent(agent)
        if not on_gpu:
            compile_beside(partial(agent.update_actor, rb.batch.obs))
    if args.cudagraphs and on_gpu:
        capture_agent(agent, rb)
    elif args.cudagraphs:
        print("--cudagraphs: without CUDA it has no effect", file=sys.stderr)

    with run:
        while run.step < run.total_steps:
            # 1. Act: uniformly at random at first, then by the policy.
            with run.stage("inference"):  # reading the actions waits for what is still queued
                if run.step < args.learning_starts:
                    actions = envs.action_space.sample()
                else:
                    inputs = torch.as_tensor(obs, dtype=torch.float32)
                    inputs = inputs.to(device, non_blocking=True)
                    noise = torch.randn(args.num_envs, action_dim, device=device)
                    actions = agent.act(inputs, noise)
                    actions = actions.cpu().numpy()

            # 2. Learn from what the replay buffer holds.
            learning_steps = run.step + args.num_envs - args.learning_starts
            due_updates = int(learning_steps * args.utd_ratio)
            while run.step >= args.learning_starts and num_updates < due_updates:
                num_updates += 1
                with run.stage("replay"):
                    batch = rb.sample()
                with run.stage("backpropagation"):
                    actor_due = num_updates % args.policy_frequency == 0
                    metrics |= agent.update(batch, actor_due)

            # 3. Step the environments.
            with run.stage("simulation"):
                next_obs, rewards, terminated, truncated, infos = envs.step(actions)

            # 4. Store. Where an episode ended, next_obs is already the next episode's first.
            with run.stage("replay"):
                ended = np.flatnonzero(terminated | truncated)
                real_next_obs = next_obs.copy()
                for i in ended:
                    real_next_obs[i] = infos["final_obs"][i]
                total = obs.sum() + actions.sum() + real_next_obs.sum() + rewards.sum()
                if not abs(total) < 3e38:  # what float32 holds
                    raise SystemExit(f"step {run.step:,}: action, obs or reward is not finite")
                rb.add(
                    Batch(
                        obs=obs,
                        actions=actions,
                        next_obs=real_next_obs,
                        rewards=rewards,
                        terminated=terminated,
                    )
                )
                obs = next_obs
            run.step += args.num_envs

            # 5. Log.
            with run.stage("logging"):
                for i in ended:
                    episode = infos["final_info"]["episode"]
                    run.write(
                        {
                            "charts/episodic_return": episode["r"][i],
                            "charts/episodic_length": episode["l"][i],
                        }
                    )
            if run.due(LOG_EVERY):
                run.log(metrics)

            # 6. Save and evaluate, now and then and at the end.
            if run.due(args.checkpoint_every, at_end=args.save_model):
                with run.stage("checkpoint"):
                    run.save(agent, replay=rb.state_dict())
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


def evaluate(agent: TD3, args: Args, video: Path) -> float:
    """Mean return of K episodes from always the same starts, acting without noise."""
    if not args.capture_video:
        video = None
    envs = make_envs(args.env_id, args.eval_episodes, video)
    device = agent.actor.action_scale.device
    noise = torch.zeros(envs.action_space.shape, device=device)
    returns = np.zeros(args.eval_episodes)
    running = np.ones(args.eval_episodes, dtype=bool)
    unseen = args.seed + 2**31  # not the states of training
    obs, _ = envs.reset(seed=unseen)
    for _ in range(50_000):  # an episode without end counts with its return so far
        inputs = torch.as_tensor(obs).to(noise)  # its type and device
        actions = TD3.act(agent, inputs, noise)  # agent.act may be compiled
        actions = actions.cpu().numpy()
        obs, rewards, terminated, truncated, _ = envs.step(actions)
        returns += running * rewards
        running &= ~(terminated | truncated)
        if not running.any():
            break
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
