r"""Twin Delayed DDPG (TD3) for continuous actions, in plain eager PyTorch: the baseline.

    python leanrl/td3_continuous_action.py                          # HalfCheetah-v5, 1 M steps
    python leanrl/td3_continuous_action.py --env-id Pendulum-v1 --total-timesteps 10000 \
        --learning-starts 1000                                      # minutes
    python leanrl/td3_continuous_action.py --resume runs/RUN        # go on from its checkpoint.pt

Algorithm 1 of Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods",
2018 (arXiv:1802.09477), with CleanRL's defaults: twin Q-networks, target policy smoothing, one
update per environment step and, on every second one, one of the policy and of all targets. A
truncated episode bootstraps, a terminated one does not. The updates come between action and
environment step: a GPU works on them while the simulator steps.

Its twin td3_continuous_action_torchcompile.py is this file with the hunks marked `# speed:`;
`diff` with sac_continuous_action.py shows what distinguishes the algorithms.
Shapes: N environments, B batch, O observation, A action.
"""

import copy
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tqdm
import tyro
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.optim import Adam
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

    env_id: str = "HalfCheetah-v5"  # id of the Gymnasium environment
    total_timesteps: int = 1_000_000  # environment steps of the whole run, over all environments
    num_envs: int = 1  # environments stepped side by side
    utd_ratio: float = 1.0  # update-to-data ratio: updates per environment step
    buffer_size: int = 1_000_000  # capacity of the replay buffer, in transitions
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # share of the networks that enters their targets at each target update
    batch_size: int = 256  # transitions per update
    learning_starts: int = 25_000  # environment steps with random actions before the first update
    learning_rate: float = 3e-4  # learning rate of the policy and of the Q-networks
    policy_frequency: int = 2  # every n-th update updates the policy and all targets: the delay
    exploration_noise: float = 0.1  # standard deviation of acting's noise, in half action ranges
    policy_noise: float = 0.2  # the same of the noise that smooths the target policy
    noise_clip: float = 0.5  # bound of the smoothing noise, in half action ranges


# >>> stopwatch: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>
import json  # noqa: E402, F811
import sys  # noqa: E402, F811
from contextlib import contextmanager, nullcontext, suppress  # noqa: E402, F811
from time import perf_counter  # noqa: E402, F811

import torch  # noqa: E402, F811


class Stage:
    """Self-time (seconds) and entries of a stage; one that opens inside another pauses it."""

    def __init__(self, watch):
        self.watch, self.seconds, self.count = watch, 0.0, 0

    def __enter__(self):
        watch, now = self.watch, perf_counter()
        watch.open[-1].seconds += now - watch.since
        watch.since = now
        watch.open.append(self)

    def __exit__(self, kind, value, traceback):
        watch, now = self.watch, perf_counter()
        watch.open.pop().seconds += now - watch.since
        watch.since = now
        self.count += 1


class Stopwatch:
    """Seconds per stage and environment steps per second; leanrl/stopwatch.py is the manual."""

    def __init__(self, device, mode="time", warmup_steps=0, trace_after=500, trace_iterations=20):
        self.mode, self.on_gpu, self.born = mode, device.type == "cuda", perf_counter()
        self.synchronize = torch.cuda.synchronize if self.on_gpu else lambda: None
        self.env_steps, self.warmup_seconds, self.result, self.trace = 0, None, None, None
        self._begin_window()
        self.course = self._course(warmup_steps, trace_after, trace_iterations)

    def tick(self, env_steps):
        """Ends an iteration, outside of every stage; `env_steps` counts all since construction."""
        with self.untracked:  # an entry is an iteration
            self.env_steps = env_steps
        next(self.course, None)

    def speed(self, env_steps):
        """Steps per second: of all `env_steps` so far; in the steady window, before it None."""
        now = perf_counter()
        steady = (env_steps - self.first_step) / (now - self.start - self.evaluation.seconds)
        return env_steps / (now - self.born), self.warmup_seconds and steady

    def report(self, path):
        """Writes the report to `path`, prints a table, writes a trace beside it -> the report."""
        self.course.close()  # gives up a trace that is not complete
        trace = self.trace and {**self.trace, "file": path.name.replace("stages", "trace") + ".gz"}
        report = (self.result or self._end_window()) | {"mode": self.mode, "trace": trace}
        report["wall_seconds"] = perf_counter() - self.born
        report["sps_inclusive"] = self.env_steps / report["wall_seconds"]
        path.write_text(json.dumps(report, indent=2))
        steps = report["window"]["env_steps"] / 1e6 or float("nan")  # nothing is per step of none
        lines = [f"{'stage':16}{'seconds':>12}{'us/step':>12}{'GPU us/step':>14}"]
        for name, stage in report["stages"].items():
            seconds, span = stage["seconds"], stage["gpu_span_seconds"]
            gpu = "" if span is None else f"{span / steps:14,.1f}"
            lines.append(f"{name:16}{seconds:12,.2f}{seconds / steps:12,.1f}{gpu}")
        numbers = (report | report["gpu"]).items()
        lines += [f"{name:16}{x:12,.1f}" for name, x in numbers if isinstance(x, float)]
        print(*lines, f"run directory: {path.parent}", sep="\n", file=sys.stderr)
        if trace:  # last, because it takes seconds, in which Ctrl-C may come
            self.profiler.export_chrome_trace(str(path.with_name(trace["file"])))
        return report

    def _course(self, warmup_steps, trace_after, trace_iterations):
        """What a run goes through, a `yield` per tick: warm-up, steady window, perhaps a trace."""
        while self.env_steps < warmup_steps:
            yield
        self.warmup_seconds = perf_counter() - self.born - self.evaluation.seconds
        self._begin_window()
        while self.mode != "trace" or self.untracked.count < trace_after:
            sampled = self.on_gpu and self.mode != "off" and self.untracked.count % 61 == 0
            self.stage = self._between_events if sampled else self.contexts.__getitem__
            yield
            if sampled and perf_counter() > self.asked + 1:  # a second: NVML takes its time
                self.asked = perf_counter()
                with suppress(Exception):  # nvidia-ml-py is optional
                    self.nvml.append((round(self.asked - self.born, 1), torch.cuda.utilization()))
        self.result, self.stage = self._end_window(), self.contexts.__getitem__
        with torch.profiler.profile() as self.profiler:
            yield  # an iteration that pays for the profiler's buffers
            first_step, self.stage = self.env_steps, self._annotated
            with torch.profiler.record_function("stopwatch:untracked"):
                for _ in range(trace_iterations):
                    yield
                self.synchronize()
        self.trace = {"iterations": trace_iterations, "env_steps": self.env_steps - first_step}

    def _begin_window(self):
        """Counts anew: at construction and at the end of the warm-up."""
        names = ("simulation", "inference", "replay", "backpropagation", "logging", "checkpoint")
        self.stages = {name: Stage(self) for name in (*names, "untracked", "evaluation")}
        self.untracked, self.evaluation = self.stages["untracked"], self.stages["evaluation"]
        self.contexts, self.open = dict(self.stages), [self.untracked]
        if self.mode == "off":  # but for the evaluation, which is never part of a window
            self.contexts |= dict.fromkeys(names, nullcontext())
        self.stage = self.contexts.__getitem__  # hands out the context manager of a stage
        self.first_step, self.spans, self.nvml = self.env_steps, [], []
        self.synchronize()
        self.start = self.since = self.asked = perf_counter()

    def _end_window(self):
        """What the steady window or, if the warm-up did not end, the whole run has to say."""
        self.synchronize()  # GPU work still queued belongs to the window
        steady, stages = self.speed(self.env_steps)[1], {}
        window = {"steady": steady is not None, "env_steps": self.env_steps - self.first_step}
        window["iterations"] = self.untracked.count
        window["seconds"] = perf_counter() - self.start - self.evaluation.seconds
        run = {"schema": 2, "sps_steady": steady, "warmup_seconds": self.warmup_seconds}
        for name, stage in self.stages.items() if self.mode != "off" else ():
            spans = [a.elapsed_time(b) / 1e3 for label, a, b in self.spans if label == name]
            span = sum(spans) / len(spans) * stage.count if spans else None
            stages[name] = dict(seconds=stage.seconds, count=stage.count, gpu_span_seconds=span)
        utilization = sum(percent for _, percent in self.nvml) / max(len(self.nvml), 1)
        gpu = {"nvml_util": utilization if self.nvml else None, "nvml_samples": self.nvml or None}
        return run | {"window": window, "stages": stages, "gpu": gpu}

    @contextmanager
    def _between_events(self, name):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        with self.contexts[name]:
            yield
        last.record()
        self.spans.append((name, first, last))

    @contextmanager
    def _annotated(self, name):
        with torch.profiler.record_function("stopwatch:" + name), self.contexts[name]:
            yield


# <<< stopwatch <<<


SCRIPT = Path(__file__).name
METRICS = ("qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "qf2_values")  # of update_critic
METRICS += ("actor_loss",)  # of update_actor
LOG_EVERY = 100  # environment steps per row of metrics: reading them waits for the device
STEADY_AFTER = 100  # updates: with the default frequencies all is compiled and captured by then


def check_args(args: Args) -> None:
    """What a user gets wrong, in one line each; libraries' own errors say the rest."""
    may_be_zero = ("seed", "checkpoint_every", "eval_every", "learning_rate", "gamma", "tau")
    may_be_zero += ("exploration_noise", "policy_noise", "noise_clip")
    for name, x in asdict(args).items():
        if type(x) in (int, float) and not (0 < x < 1e12 or x == 0 and name in may_be_zero):
            raise SystemExit(f"--{name.replace('_', '-')}: {x} is out of range")


def make_envs(env_id: str, num_envs: int, video: Path | None = None) -> gym.vector.SyncVectorEnv:
    """N environments that reset in the step that ends an episode; `video` films the first one."""

    def make_env(index: int) -> gym.Env:
        films = video is not None and index == 0
        env = gym.make(env_id, render_mode="rgb_array") if films else gym.make(env_id)
        if films:
            env = gym.wrappers.RecordVideo(env, str(video), episode_trigger=lambda i: i == 0)
        return gym.wrappers.RecordEpisodeStatistics(env)

    makers = [lambda i=i: make_env(i) for i in range(num_envs)]
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """A network with two hidden layers of 256."""
    hidden = (nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(256, outputs))


class TwinQ(nn.ModuleList):
    """Two independent Q-networks behind one call (Fujimoto et al., 2018, arXiv:1802.09477)."""

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """obs (B, O), actions (B, A) -> values (2, B)."""
        x = torch.cat([obs, actions], dim=-1)
        return torch.stack([network(x) for network in self]).squeeze(-1)


class Actor(nn.Module):
    """Deterministic policy whose tanh fills the box [low, high]."""

    def __init__(self, obs_dim: int, action_space: Box):
        super().__init__()
        self.network = mlp(obs_dim, action_space.shape[0])
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_scale", ((high - low) / 2).float())
        self.register_buffer("action_bias", ((high + low) / 2).float())

    def forward(self, obs: Tensor) -> Tensor:
        """obs (B, O) -> actions (B, A)."""
        return torch.tanh(self.network(obs)) * self.action_scale + self.action_bias

    def perturbed(self, obs: Tensor, noise: Tensor) -> Tensor:
        """obs (B, O), noise (B, A) in half action ranges -> actions in the box (B, A)."""
        actions = self(obs) + noise * self.action_scale
        low, high = self.action_bias - self.action_scale, self.action_bias + self.action_scale
        return actions.clamp(low, high)


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
        self.capacity = max(args.buffer_size // args.num_envs, 1) * args.num_envs  # whole steps
        self.args, self.position, self.size = args, 0, 0
        shapes = (obs_dim,), (action_dim,), (obs_dim,), (), ()
        self.data = Batch(*(torch.empty(self.capacity, *s, device=device) for s in shapes))

    def add(self, *fields: np.ndarray | Tensor) -> None:
        """Stores N transitions: fields (N, ...) in the order of `Batch`, of any type."""
        end = self.position + len(fields[0])
        for stored, new in zip(self.data, fields, strict=True):
            stored[self.position : end] = torch.as_tensor(new, dtype=torch.float32)
        self.size = max(self.size, end)
        self.position = end % self.capacity

    def sample(self) -> Batch:
        """B transitions drawn uniformly with replacement."""
        index = torch.randint(self.size, (self.args.batch_size,), device=self.data.obs.device)
        return Batch(*(stored[index] for stored in self.data))

    def state_dict(self) -> dict:
        data = [x[: self.size].to("cpu", copy=True) for x in self.data]  # not the storage of all
        return {"position": self.position, "data": data}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"] % self.capacity // self.args.num_envs * self.args.num_envs
        self.size = min(len(state["data"][0]), self.capacity)  # what fits
        for stored, saved in zip(self.data, state["data"], strict=True):
            stored[: self.size] = saved[: self.size]


def critic_loss(agent: "TD3", batch: Batch, noise: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Bellman error of each Q-network (algorithm 1: clipped double Q, smoothed target policy).

    noise (B, A), clipped, in half action ranges -> losses (2,), values (2, B).
    """
    with torch.no_grad():
        next_actions = agent.actor_target.perturbed(batch.next_obs, noise)
        next_values = agent.qf_target(batch.next_obs, next_actions).amin(dim=0)  # (B,)
        targets = batch.rewards + gamma * (1 - batch.terminated) * next_values
    values = agent.qf(batch.obs, batch.actions)
    return (values - targets).square().mean(dim=1), values


def actor_loss(agent: "TD3", obs: Tensor) -> Tensor:
    """Deterministic policy gradient through the first Q-network (algorithm 1) -> loss ()."""
    inputs = torch.cat([obs, agent.actor(obs)], dim=-1)
    return -agent.qf[0](inputs).mean()


def gradient_step(loss: Tensor, optimizer: Adam) -> None:
    """A step of `optimizer`; backward computes the gradients of its parameters and no others."""
    optimizer.zero_grad()
    loss.backward(inputs=optimizer.param_groups[0]["params"])
    optimizer.step()


class TD3(nn.Module):
    """Networks, optimizers and gradient steps, which return their metrics as one tensor."""

    def __init__(self, args: Args, obs_dim: int, action_space: Box, device: torch.device):
        super().__init__()
        action_dim = action_space.shape[0]
        self.args = args
        self.actor = Actor(obs_dim, action_space)
        self.actor_target = copy.deepcopy(self.actor).requires_grad_(False)
        self.qf = TwinQ(mlp(obs_dim + action_dim, 1) for _ in range(2))
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)
        self.to(device)
        self.q_optimizer = Adam(self.qf.parameters(), lr=args.learning_rate, fused=True)
        self.actor_optimizer = Adam(self.actor.parameters(), lr=args.learning_rate, fused=True)
        self.optimizers = self.q_optimizer, self.actor_optimizer

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """obs (N, O), standard normal noise (N, A) -> actions (N, A)."""
        with torch.no_grad():
            return self.actor.perturbed(obs, noise * self.args.exploration_noise)

    def update_critic(self, batch: Batch, noise: Tensor) -> Tensor:
        """One step of both Q-networks, with noise (B, A) as in `act` -> the first METRICS (5,)."""
        clip = self.args.noise_clip
        noise = (noise * self.args.policy_noise).clamp(-clip, clip)
        losses, values = critic_loss(self, batch, noise, self.args.gamma)
        gradient_step(losses.sum(), self.q_optimizer)
        return torch.cat([losses, losses.mean(0, keepdim=True), values.mean(dim=1)]).detach()

    def update_actor(self, obs: Tensor) -> Tensor:
        """One step of the policy -> the last of METRICS (1,)."""
        loss = actor_loss(self, obs)
        gradient_step(loss, self.actor_optimizer)
        return loss.detach()[None]

    def update_target(self) -> None:
        """Polyak averaging of the target networks."""
        with torch.no_grad():
            targets = [*self.actor_target.parameters(), *self.qf_target.parameters()]
            online = [*self.actor.parameters(), *self.qf.parameters()]
            for target, parameter in zip(targets, online, strict=True):
                target.lerp_(parameter, self.args.tau)


def evaluate(agent: TD3, args: Args, video: Path | None) -> float:
    """Mean return of K episodes from always the same starts, acting without noise."""
    envs = make_envs(args.env_id, args.eval_episodes, video)
    noise = torch.zeros(envs.action_space.shape, device=agent.actor.action_scale.device)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.reset(seed=args.seed + 2**31)  # not the states of training
    for _ in range(50_000):  # an episode without end counts with its return so far
        actions = TD3.act(agent, torch.as_tensor(obs).to(noise), noise)  # agent.act may be compiled
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += running * rewards
        running &= ~(terminated | truncated)
        if not running.any():
            break
    envs.close()
    return float(returns.mean())


def save(path: Path, agent: nn.Module, global_step: int, **more: object) -> None:
    """Writes all or nothing: whenever the process dies, there is a whole file, old or new."""
    if not all(parameter.isfinite().all() for parameter in agent.parameters()):
        raise SystemExit(f"step {global_step:,}: weights are not finite; the checkpoint stays")
    checkpoint = {"script": SCRIPT, "args": asdict(agent.args), "global_step": global_step, **more}
    checkpoint["agent"] = agent.state_dict()
    checkpoint["optimizers"] = [each.state_dict()["state"] for each in agent.optimizers]
    checkpoint["generators"] = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    with path.with_suffix(".partial").open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".partial").replace(path)


def load(path: Path) -> dict:
    """What `save` has written, its tensors on the CPU."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
    if checkpoint.get("script") != SCRIPT or checkpoint["args"].keys() != asdict(Args()).keys():
        raise SystemExit(f"--resume: {path.parent} has no checkpoint of this version of {SCRIPT}")
    return checkpoint


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    check_args(args)
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as cleanly as on Ctrl-C
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup, SIGHUP is ignored
            signal.signal(number, signal.default_int_handler)
    checkpoint = load(Path(args.resume, "checkpoint.pt")) if args.resume else None
    start_step = global_step = checkpoint["global_step"] if checkpoint else 0
    if start_step >= args.total_timesteps:
        raise SystemExit(f"--resume: nothing left to do, {start_step:,} steps are done")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    warmup_steps = max(args.learning_starts - start_step, 0) + int(STEADY_AFTER / args.utd_ratio)
    watch = Stopwatch(device, args.stopwatch, warmup_steps)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    envs = make_envs(args.env_id, args.num_envs)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    bounded = isinstance(action_space, Box) and action_space.is_bounded()
    if not bounded or len(obs_space.shape) != 1:
        raise SystemExit("--env-id: TD3 needs flat observations and bounded continuous actions")
    obs_dim, action_dim = obs_space.shape[0], action_space.shape[0]
    agent = TD3(args, obs_dim, action_space, device)
    rb = ReplayBuffer(args, obs_dim, action_dim, device)
    metrics, episodic_return = torch.zeros(len(METRICS), device=device), math.nan

    def update(batch: Batch, actor_due: bool) -> None:
        metrics[:5] = agent.update_critic(batch, torch.randn_like(batch.actions))
        if actor_due:
            metrics[5:] = agent.update_actor(batch.obs)
            agent.update_target()

    if checkpoint:
        agent.load_state_dict(checkpoint["agent"])
        for optimizer, state in zip(agent.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})  # rates are flags
        rb.load_state_dict(checkpoint["replay"])
        torch.set_rng_state(checkpoint["generators"][0])
        torch.cuda.set_rng_state_all(checkpoint["generators"][1][: torch.cuda.device_count()])
        print(f"resumed at step {start_step:,}, with fresh episodes", file=sys.stderr)
    del checkpoint  # it is as large as the replay buffer
    obs, _ = envs.reset(seed=args.seed + start_step)
    envs.action_space.seed(args.seed + start_step)
    num_updates = int(max(start_step - args.learning_starts, 0) * args.utd_ratio)

    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.resume or Path("runs", re.sub(r"[^\w.-]", "_", name)))
    run_dir.mkdir(parents=True, exist_ok=bool(args.resume))
    suffix = f"_{start_step}.json" if args.resume else ".json"  # the first part keeps its files
    config = {"args": asdict(args), "command": " ".join(sys.argv)}
    config["versions"] = {"torch": torch.__version__, "gymnasium": gym.__version__}
    config["cpu"] = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    config["gpu"] = torch.cuda.get_device_name() if device.type == "cuda" else None
    (run_dir / f"config{suffix}").write_text(json.dumps(config, indent=2))
    if args.track:
        import wandb

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        wandb.init(**names, id=run_dir.name, resume="allow", config=config, sync_tensorboard=True)
    writer = SummaryWriter(run_dir, purge_step=start_step + 1 if args.resume else None)
    bar = tqdm.tqdm(total=args.total_timesteps, initial=start_step, unit="step")

    def due(every: int) -> bool:
        """Whether this iteration passed a multiple of so many steps or ends the run; 0: never."""
        last = global_step >= args.total_timesteps
        return every > 0 and (last or global_step % every < args.num_envs)

    try:
        while global_step < args.total_timesteps:
            # 1. Act: uniformly at random at first, then by the policy.
            with watch.stage("inference"):  # reading the actions waits for earlier updates, too
                if global_step < args.learning_starts:
                    actions = envs.action_space.sample()
                else:
                    inputs = torch.as_tensor(obs, dtype=torch.float32).to(device, non_blocking=True)
                    noise = torch.randn(args.num_envs, action_dim, device=device)
                    actions = agent.act(inputs, noise).cpu().numpy()

            # 2. Learn from what the replay buffer holds.
            due_updates = int((global_step + args.num_envs - args.learning_starts) * args.utd_ratio)
            while global_step >= args.learning_starts and num_updates < due_updates:
                num_updates += 1
                with watch.stage("replay"):
                    batch = rb.sample()
                with watch.stage("backpropagation"):
                    update(batch, actor_due=num_updates % args.policy_frequency == 0)

            # 3. Step the environments.
            with watch.stage("simulation"):
                next_obs, rewards, terminated, truncated, infos = envs.step(actions)

            # 4. Store. Where an episode ended, next_obs is already the next episode's first.
            with watch.stage("replay"):
                last_obs = next_obs.copy()
                for i in np.flatnonzero(infos.get("_final_obs", ())):
                    last_obs[i] = infos["final_obs"][i]
                if not np.isfinite(actions.sum() + last_obs.sum() + rewards.sum()):
                    raise SystemExit(f"step {global_step:,}: action, obs or reward not finite")
                rb.add(obs, actions, last_obs, rewards, terminated)
                obs = next_obs
            global_step += args.num_envs

            # 5. Log.
            if due(LOG_EVERY) or due(args.checkpoint_every):
                with watch.stage("backpropagation"):  # whose work this waits for
                    row = metrics.tolist()
                if not np.isfinite(row).all():
                    raise SystemExit(f"step {global_step:,}: losses are not finite: {row}")
            with watch.stage("logging"):
                for i in np.flatnonzero(infos.get("_final_info", ())):
                    episodic_return = infos["final_info"]["episode"]["r"][i]
                    writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                    length = infos["final_info"]["episode"]["l"][i]
                    writer.add_scalar("charts/episodic_length", length, global_step)
                if due(LOG_EVERY):
                    sps, steady_sps = watch.speed(global_step - start_step)
                    writer.add_scalar("charts/SPS", sps, global_step)
                    if steady_sps:
                        writer.add_scalar("charts/SPS_steady", steady_sps, global_step)
                        writer.add_scalar(
                            "charts/warmup_seconds", watch.warmup_seconds, global_step
                        )
                    for tag, value in zip(METRICS, row if num_updates else (), strict=False):
                        writer.add_scalar(f"losses/{tag}", value, global_step)
                    bar.set_postfix_str(f"return {episodic_return:,.1f}", refresh=False)
                    bar.update(global_step - bar.n)

            # 6. Save and evaluate, now and then and at the end.
            last = global_step >= args.total_timesteps
            if due(args.checkpoint_every) or args.save_model and last:
                with watch.stage("checkpoint"):
                    save(run_dir / "checkpoint.pt", agent, global_step, replay=rb.state_dict())
            if due(args.eval_every) or args.capture_video and last:
                with watch.stage("evaluation"):
                    video = run_dir / f"videos/step-{global_step}" if args.capture_video else None
                    eval_return = evaluate(agent, args, video)
                    writer.add_scalar("charts/eval_return", eval_return, global_step)
                    bar.write(f"evaluation at {global_step:,}: {eval_return:,.1f}", file=sys.stderr)
            watch.tick(global_step - start_step)
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted after {global_step:,} steps") from None
    finally:
        bar.close()
        writer.close()
        watch.report(run_dir / f"stages{suffix}")
    return run_dir


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.resume:  # flags that are not given stay as they were
        args = tyro.cli(Args, default=Args(**load(Path(args.resume, "checkpoint.pt"))["args"]))
    main(args)
