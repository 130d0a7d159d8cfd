"""Twin Delayed DDPG (TD3) for continuous actions, with torch.compile and CUDA graphs.

    python leanrl/td3_continuous_action_torchcompile.py --compile --cudagraphs
    python leanrl/td3_continuous_action_torchcompile.py --compile --env-id Pendulum-v1 \\
        --total-timesteps 10000 --learning-starts 1000              # learns in a minute or two
    python leanrl/td3_continuous_action_torchcompile.py --help      # every flag

The algorithm is that of its twin, td3_continuous_action.py, which says where it comes from and
what the shapes mean; the hunks that differ start with `# speed:` and say what they buy, the rest
is the same to the letter. Without a CUDA device --cudagraphs says so in one line and the run goes
on. The first updates pay for compilation: seconds, reported as warm-up, fewer with a warm cache.

Measured (plots/results/): HalfCheetah-v5, 293,000 steps, seed 1: mean return 7,553 over the last 10
episodes. 216 steps/s with --compile on 2 cores of an AMD EPYC (AVX2), 1.33 times the baseline.
Compiling the critic's update saves 2.9 ms a step there, the actor's 0.8, updating the targets in
one call 0.3; the other tricks are for GPUs. On a GPU: not measured.
"""

# speed: CudaGraphModule captures a function as a CUDA graph; partial binds its fixed arguments
import copy
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tqdm
import tyro
from tensordict.nn import CudaGraphModule
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """name of this experiment, part of the run directory's name"""
    seed: int = 1
    """seed of the environments and of every random generator"""
    torch_deterministic: bool = True
    """use deterministic cuDNN kernels"""
    cuda: bool = True
    """train on CUDA where there is a device"""
    track: bool = False
    """also send the run to Weights & Biases"""
    wandb_project_name: str = "leanRL"
    """the wandb project"""
    wandb_entity: str | None = None
    """the wandb team"""
    capture_video: bool = False
    """film the first episode of each evaluation; without --eval-every, evaluate at the end"""
    save_model: bool = False
    """write checkpoint.pt at the end of the run"""
    checkpoint_every: int = 0
    """also write it every so many environment steps; 0: never"""
    resume: str | None = None
    """go on with this run (its directory or checkpoint.pt); flags not given stay as they were"""
    eval_every: int = 0
    """evaluate every so many environment steps, and at the end; 0: never"""
    eval_episodes: int = 10
    """episodes per evaluation, each in an environment of its own"""
    stopwatch: Literal["off", "time", "trace"] = "time"
    """what the stopwatch measures: nothing, time per stage, or also a profiler window"""

    env_id: str = "HalfCheetah-v5"
    """id of the Gymnasium environment"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, over all environments"""
    num_envs: int = 1
    """environments stepped side by side"""
    utd_ratio: float = 1.0
    """update-to-data ratio: updates per environment step"""
    buffer_size: int = 1_000_000
    """capacity of the replay buffer, in transitions"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """share of the networks that enters the target networks at each target update"""
    batch_size: int = 256
    """transitions per update"""
    learning_starts: int = 25_000
    """environment steps taken uniformly at random before the first update"""
    learning_rate: float = 3e-4
    """learning rate of policy and Q-networks"""
    policy_frequency: int = 2
    """the policy and all target networks are updated on every n-th update (delayed)"""
    exploration_noise: float = 0.1
    """standard deviation of the noise added to actions, as a share of half their range"""
    policy_noise: float = 0.2
    """the same of the noise that smooths the target policy"""
    noise_clip: float = 0.5
    """bound of the smoothing noise, as a share of half the action's range"""

    # speed: each works alone, together and not at all
    compile: bool = False
    """compile acting and updating with torch.compile"""
    cudagraphs: bool = False
    """replay acting, sampling and updating as CUDA graphs"""


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
        """Writes the report to `path` and a trace beside it, then prints a table -> the report."""
        self.course.close()  # gives up a trace that is not complete
        report = (self.result or self._end_window()) | {"mode": self.mode, "trace": self.trace}
        report["wall_seconds"] = perf_counter() - self.born
        report["sps_inclusive"] = self.env_steps / report["wall_seconds"]
        if self.trace:
            self.trace["file"] = path.name.replace("stages", "trace") + ".gz"
            self.profiler.export_chrome_trace(str(path.with_name(self.trace["file"])))
        path.write_text(json.dumps(report, indent=2))
        steps = max(report["window"]["env_steps"], 1) / 1e6
        lines = [f"{'stage':16}{'seconds':>12}{'us/step':>12}{'GPU us/step':>14}"]
        for name, stage in report["stages"].items():
            seconds, span = stage["seconds"], stage["gpu_span_seconds"]
            gpu = "" if span is None else f"{span / steps:14,.1f}"
            lines.append(f"{name:16}{seconds:12,.2f}{seconds / steps:12,.1f}{gpu}")
        numbers = (report | report["gpu"]).items()
        lines += [f"{name:16}{x:12,.1f}" for name, x in numbers if isinstance(x, float)]
        print(*lines, f"run directory: {path.parent}", sep="\n", file=sys.stderr)
        return report

    def _course(self, warmup_steps, trace_after, trace_iterations):
        """What a run goes through, a `yield` per tick: warm-up, steady window, perhaps a trace."""
        while self.env_steps < warmup_steps:
            yield
        self.warmup_seconds = perf_counter() - self.born - self.evaluation.seconds
        self._begin_window()
        while self.mode != "trace" or self.untracked.count < trace_after:
            sampled = self.on_gpu and self.mode != "off" and self.untracked.count % 64 == 0
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


def fail(message: str) -> None:
    """Ends the program with a one-line error and exit status 2, as argument errors do."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args: Args) -> None:
    """Refuses, before any work starts, settings that cannot run; the message names the flag."""
    for name in (
        "total_timesteps",
        "num_envs",
        "utd_ratio",
        "buffer_size",
        "batch_size",
        "policy_frequency",
        "eval_episodes",
    ):
        if getattr(args, name) <= 0:
            fail(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    for name in (
        "checkpoint_every",
        "eval_every",
        "exploration_noise",
        "policy_noise",
        "noise_clip",
    ):
        if getattr(args, name) < 0:
            fail(f"--{name.replace('_', '-')} must not be negative, got {getattr(args, name)}")
    if args.batch_size > args.learning_starts:
        fail(f"--batch-size {args.batch_size} exceeds --learning-starts {args.learning_starts}")
    if args.buffer_size < max(args.batch_size, args.num_envs):
        fail(f"--buffer-size {args.buffer_size} is smaller than a batch or than --num-envs")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs wandb: pip install -r requirements/wandb.txt")
    if args.capture_video and importlib.util.find_spec("moviepy") is None:
        fail("--capture-video needs moviepy: pip install -r requirements/video.txt")
    # speed: no graphs without CUDA: a contradiction is refused, a missing device only mentioned
    if args.cudagraphs and not args.cuda:
        fail("--cudagraphs contradicts --no-cuda")
    if args.cudagraphs and not torch.cuda.is_available():
        print("warning: no CUDA device, --cudagraphs has no effect", file=sys.stderr)


class Repeatable(gym.Wrapper):
    """An environment that a checkpoint can bring back, whatever simulates it.

    A simulator's state is nowhere to be had in general, but an episode repeats itself from the same
    random state through the same actions.
    """

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self.origin = self.np_random.bit_generator.state if seed is None else seed
        self.actions = []
        return self.env.reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> tuple:
        self.actions.append(action)
        return self.env.step(action)

    def state_dict(self) -> dict:
        """How the episode started, and its actions so far (T, A)."""
        return {"origin": self.origin, "actions": torch.from_numpy(np.array(self.actions))}

    def repeat(self, state: dict) -> np.ndarray:
        """Goes through the episode of `state` again -> its last observation (O,)."""
        if isinstance(state["origin"], int):
            obs, _ = self.reset(seed=state["origin"])
        else:
            self.np_random.bit_generator.state = state["origin"]
            obs, _ = self.reset()
        for action in state["actions"].numpy():
            obs = self.step(action)[0]
        return obs


def make_envs(env_id: str, num_envs: int, video: Path | None = None) -> gym.vector.SyncVectorEnv:
    """N environments, each of which resets in the step that ends its episode (`SAME_STEP`).

    The first episode of the first one becomes `video`-episode-0.mp4, if that is given.
    """

    def make_env(index: int) -> gym.Env:
        if video is None or index > 0:
            env = gym.make(env_id)
        else:
            env = gym.make(env_id, render_mode="rgb_array")
            warnings.filterwarnings("ignore", ".*Overwriting existing videos")  # of other names
            env = gym.wrappers.RecordVideo(
                env, str(video.parent), name_prefix=video.name, episode_trigger=lambda i: i == 0
            )
        return Repeatable(gym.wrappers.RecordEpisodeStatistics(env))

    try:
        envs = gym.vector.SyncVectorEnv(
            [partial(make_env, i) for i in range(num_envs)],
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        )
    except (gym.error.Error, ImportError) as error:  # says what is unknown or not installed
        fail(f"cannot make environment {env_id!r}: {' '.join(str(error).split())}")
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, gym.spaces.Box) or not action_space.is_bounded():
        fail(f"TD3 needs a bounded continuous action space; {env_id} has {action_space}")
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        fail(f"TD3 with an MLP needs flat observations; {env_id} has {obs_space}")
    return envs


def run_config(args: Args, device: torch.device) -> dict:
    """What it takes to repeat a run and to judge its speed: settings, code, hardware, load."""

    def output(*command: str) -> str | None:
        try:
            return subprocess.check_output(
                command, cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL
            ).strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    cpuinfo = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    packages = ("torch", "tensordict", "gymnasium", "mujoco", "envpool", "numpy")
    gpu, driver = None, None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "args": asdict(args),
        "command": " ".join(sys.argv),
        "git_commit": output(
            "git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
        ),
        "cpu": {
            "model": model[1] if model else None,
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
        },
        "gpu": gpu,
        "gpu_driver": driver,
        "load_average": os.getloadavg(),
        "python": sys.version.split()[0],
        "versions": {p: version(p) for p in packages if importlib.util.find_spec(p) is not None},
    }


class QNetwork(nn.Module):
    """State-action value Q(s, a)."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim + action_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 1)

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """obs (B, O), actions (B, A) -> values (B,)."""
        x = torch.cat([obs, actions], dim=-1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x).squeeze(-1)


class TwinQ(nn.Module):
    """Two independent Q-networks behind one call (Fujimoto et al., 2018, arXiv:1802.09477)."""

    def __init__(self, qf1: QNetwork, qf2: QNetwork):
        super().__init__()
        # speed: stacked parameters make both networks one batched GEMM per layer instead of two
        self.qf = qf1
        stacked, _ = torch.func.stack_module_state([qf1, qf2])
        for name, parameter in self.qf.named_parameters():
            parameter.data = stacked[name].data

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """obs (B, O), actions (B, A) -> values (2, B)."""
        # speed: vmap maps over the stacked parameters, so QNetwork is written once, for one network
        return torch.func.vmap(
            lambda parameters: torch.func.functional_call(self.qf, parameters, (obs, actions))
        )(dict(self.qf.named_parameters()))

    def first(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """obs (B, O), actions (B, A) -> values of the first network (B,)."""
        # speed: the first slice of the stacked parameters; the second network is not computed
        parameters = {name: stacked[0] for name, stacked in self.qf.named_parameters()}
        return torch.func.functional_call(self.qf, parameters, (obs, actions))


class Actor(nn.Module):
    """Deterministic policy whose tanh fills the box [low, high]."""

    def __init__(self, obs_dim: int, action_space: gym.spaces.Box):
        super().__init__()
        self.fc1 = nn.Linear(obs_dim, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc_mu = nn.Linear(256, action_space.shape[0])
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_scale", ((high - low) / 2).float())
        self.register_buffer("action_bias", ((high + low) / 2).float())

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """obs (B, O) -> actions (B, A)."""
        x = F.relu(self.fc1(obs))
        x = F.relu(self.fc2(x))
        return torch.tanh(self.fc_mu(x)) * self.action_scale + self.action_bias

    def perturbed(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """obs (B, O), noise (B, A) in half ranges of the actions -> actions in the box (B, A)."""
        actions = self(obs) + noise * self.action_scale
        low, high = self.action_bias - self.action_scale, self.action_bias + self.action_scale
        return actions.clamp(low, high)


class Batch(NamedTuple):
    """B transitions, float32. `terminated` is 1 at a real end; a truncated episode has 0."""

    obs: torch.Tensor  # (B, O)
    actions: torch.Tensor  # (B, A)
    next_obs: torch.Tensor  # (B, O)
    rewards: torch.Tensor  # (B,)
    terminated: torch.Tensor  # (B,)


class ReplayBuffer:
    """Ring of the last `capacity` transitions on `device`: 4 (2 O + A + 2) bytes each."""

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_dim: int,
        action_dim: int,
        batch_size: int,
        device: torch.device,
    ):
        self.capacity = capacity // num_envs * num_envs  # so that N rows never wrap around
        self.batch_size, self.device = batch_size, device
        # speed: a transition is one row, so storing is one copy and sampling one gather; a graph
        # needs a batch with a fixed place and a size that it reads from the device
        self.position, self.size = 0, torch.zeros((), dtype=torch.float64, device=device)
        widths = (obs_dim, action_dim, obs_dim, 1, 1)
        self.data = torch.empty(self.capacity, sum(widths), device=device)
        self.new_rows = np.empty((num_envs, sum(widths)), dtype=np.float32)
        self.rows = torch.empty(batch_size, sum(widths), device=device)
        obs, actions, next_obs, rewards, terminated = self.rows.split(widths, dim=1)
        self.batch = Batch(obs, actions, next_obs, rewards.squeeze(1), terminated.squeeze(1))

    def add(self, *transitions: np.ndarray) -> None:
        """Stores N transitions: arrays in the order of `Batch`, any float type."""
        end = self.position + len(transitions[0])
        # speed: one copy, for which the CPU does not wait: CUDA has read the rows when it returns
        columns = [np.reshape(new, (len(new), -1)) for new in transitions]
        np.concatenate(columns, axis=1, out=self.new_rows)
        new_rows = torch.from_numpy(self.new_rows)
        self.data[self.position : end].copy_(new_rows, non_blocking=True)
        self.size.clamp_(min=end)
        self.position = end % self.capacity

    def state_dict(self) -> dict:
        """The transitions stored so far, on the CPU."""
        # speed: one tensor
        data = self.data[: int(self.size)].to("cpu", copy=True)
        return {"position": self.position, "data": data}

    def load_state_dict(self, state: dict) -> None:
        # speed: in place, where graphs read
        self.position, size = state["position"], len(state["data"])
        self.data[:size].copy_(state["data"])
        self.size.fill_(size)

    def sample(self) -> Batch:
        """B transitions drawn uniformly with replacement."""
        # speed: refills the one batch; `draw` alone is what a graph captures
        self.draw()
        return self.batch

    def draw(self) -> None:
        """Refills `batch`."""
        # speed: random numbers below a size on the device; in float64 as uniform as randint's
        uniform = torch.rand(self.batch_size, dtype=torch.float64, device=self.device)
        torch.index_select(self.data, 0, (uniform * self.size).long(), out=self.rows)


def critic_loss(
    qf: TwinQ,
    qf_target: TwinQ,
    actor_target: Actor,
    batch: Batch,
    noise: torch.Tensor,
    gamma: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped double Q-learning with target policy smoothing (algorithm 1).

    `noise` (B, A) is clipped already -> losses (2,), values (2, B).
    """
    with torch.no_grad():
        next_actions = actor_target.perturbed(batch.next_obs, noise)
        next_values = qf_target(batch.next_obs, next_actions).amin(dim=0)  # (B,)
        targets = batch.rewards + gamma * (1 - batch.terminated) * next_values
    values = qf(batch.obs, batch.actions)
    return (values - targets).square().mean(dim=1), values


def actor_loss(actor: Actor, qf: TwinQ, obs: torch.Tensor) -> torch.Tensor:
    """Deterministic policy gradient through the first Q-network (algorithm 1) -> loss ()."""
    return -qf.first(obs, actor(obs)).mean()


# speed: torch.optim.Adam breaks the graph; with this one a whole update compiles to one, fused with
# its neighbours. The powers of beta are state: computed from a step count, each element pays a pow
class Adam:
    """Adam (Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1), all parameters in one call."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.lr, self.betas, self.eps = parameters, lr, betas, eps
        self.exp_avgs = [torch.zeros_like(parameter) for parameter in parameters]
        self.exp_avg_sqs = [torch.zeros_like(parameter) for parameter in parameters]
        self.beta_powers = [torch.ones((), device=parameters[0].device) for _ in betas]

    def state_dict(self) -> dict:
        names = "exp_avgs", "exp_avg_sqs", "beta_powers"
        return {"state": {name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict) -> None:
        for name, tensors in state["state"].items():
            torch._foreach_copy_(getattr(self, name), tensors)

    def step(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Updates the parameters in place; `gradients` in their order and shapes."""
        with torch.no_grad():
            torch._foreach_mul_(self.beta_powers, self.betas)
            beta1_power, beta2_power = self.beta_powers
            torch._foreach_lerp_(self.exp_avgs, gradients, 1 - self.betas[0])
            torch._foreach_mul_(self.exp_avg_sqs, self.betas[1])
            torch._foreach_addcmul_(self.exp_avg_sqs, gradients, gradients, 1 - self.betas[1])
            denominators = torch._foreach_sqrt(self.exp_avg_sqs)
            torch._foreach_mul_(denominators, (1 - beta2_power).rsqrt())
            torch._foreach_add_(denominators, self.eps)
            steps = torch._foreach_div(self.exp_avgs, denominators)
            torch._foreach_mul_(steps, self.lr / (1 - beta1_power))
            torch._foreach_sub_(self.parameters, steps)


def gradient_step(loss: torch.Tensor, parameters: list[nn.Parameter], optimizer: Adam) -> None:
    """A step of `optimizer`; backward computes the gradients of `parameters` and no others."""
    # speed: gradients as values, not as .grad: nothing to zero, nothing the compiler cannot see
    optimizer.step(torch.autograd.grad(loss, parameters))


CRITIC_METRICS = ("qf1_loss", "qf2_loss", "qf1_values", "qf2_values")
ACTOR_METRICS = ("actor_loss",)
NETWORKS = ("actor", "actor_target", "qf", "qf_target")
OPTIMIZERS = ("q_optimizer", "actor_optimizer")


class TD3:
    """Networks, optimizers and gradient steps, which return their metrics as one tensor."""

    def __init__(
        self, args: Args, obs_dim: int, action_space: gym.spaces.Box, device: torch.device
    ):
        self.args, action_dim = args, action_space.shape[0]
        self.actor = Actor(obs_dim, action_space).to(device)
        self.actor_target = copy.deepcopy(self.actor).requires_grad_(False)
        self.qf = TwinQ(QNetwork(obs_dim, action_dim), QNetwork(obs_dim, action_dim)).to(device)
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)
        self.actor_parameters = list(self.actor.parameters())
        self.q_parameters = list(self.qf.parameters())
        self.parameters = self.actor_parameters + self.q_parameters
        self.target_parameters = [*self.actor_target.parameters(), *self.qf_target.parameters()]
        # speed: the Adam above, which compiles and captures with the rest of an update
        self.q_optimizer = Adam(self.q_parameters, lr=args.learning_rate)
        self.actor_optimizer = Adam(self.actor_parameters, lr=args.learning_rate)

    def state_dict(self) -> dict:
        """Everything that updates change; of the optimizers no settings: those are the run's."""
        networks = {name: getattr(self, name).state_dict() for name in NETWORKS}
        optimizers = {name: getattr(self, name).state_dict()["state"] for name in OPTIMIZERS}
        return networks | optimizers

    def load_state_dict(self, state: dict) -> None:
        for name in NETWORKS:
            getattr(self, name).load_state_dict(state[name])
        for name in OPTIMIZERS:
            optimizer = getattr(self, name)
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state[name]})

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """obs (N, O), standard normal noise (N, A) -> actions (N, A)."""
        with torch.no_grad():
            return self.actor.perturbed(obs, noise * self.args.exploration_noise)

    def update_critic(self, batch: Batch, noise: torch.Tensor) -> torch.Tensor:
        """One step of both Q-networks, with standard normal noise (B, A) -> CRITIC_METRICS (4,)."""
        clip = self.args.noise_clip
        noise = (noise * self.args.policy_noise).clamp(-clip, clip)
        losses, values = critic_loss(
            self.qf, self.qf_target, self.actor_target, batch, noise, self.args.gamma
        )
        gradient_step(losses.sum(), self.q_parameters, self.q_optimizer)
        return torch.cat([losses, values.mean(dim=1)]).detach()

    def update_actor(self, obs: torch.Tensor) -> torch.Tensor:
        """One step of the policy -> ACTOR_METRICS (1,)."""
        loss = actor_loss(self.actor, self.qf, obs)
        gradient_step(loss, self.actor_parameters, self.actor_optimizer)
        return loss.detach()[None]

    def update_target(self) -> None:
        """Polyak averaging of the target networks."""
        with torch.no_grad():
            # speed: all tensors in one call, which compiled would take longer than it does
            torch._foreach_lerp_(self.target_parameters, self.parameters, self.args.tau)


def keeps_float32(precision: str) -> bool:
    # speed: `main` lowers the setting only where this holds; with AMX, say, it does not
    """Whether matrix products on this CPU keep float32's accuracy at this precision setting."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    error = (x @ x - (x.double() @ x.double())).abs().max()
    torch.set_float32_matmul_precision(before)
    return bool(error < 1e-3)  # float32: 5e-5; bfloat16: 1e-1


def compile_agent(agent: TD3) -> None:
    """Compiles acting and both updates, gradients and optimizer included, to one graph each."""
    torch._dynamo.config.trace_autograd_ops = True
    # in torch 2.11 this pass moves a backward product behind the update of the weights it reads
    torch._inductor.config.reorder_for_locality = False
    agent.act = torch.compile(agent.act, fullgraph=True)
    agent.update_critic = torch.compile(agent.update_critic, fullgraph=True)
    agent.update_actor = torch.compile(agent.update_actor, fullgraph=True)


def track(args: Args, run_dir: Path, config: dict) -> None:
    """Sends what TensorBoard gets to wandb as well; whatever its network does, the run goes on."""
    import wandb

    # at the end, wait so many seconds for a network that is gone; `wandb sync` sends the rest
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")
    try:
        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            id=run_dir.name,
            resume="allow",
            config=config,
            sync_tensorboard=True,
        )
        wandb.save(__file__, base_path=os.path.dirname(__file__), policy="now")
    except wandb.Error as error:  # no network, no login
        reason = " ".join(str(error).split())
        print(f"warning: wandb does not track this run: {reason}", file=sys.stderr)


def evaluate(actor: Actor, args: Args, device: torch.device, video: Path | None) -> float:
    """Mean return of K episodes, side by side, in which the policy acts without noise.

    They start from the same K states every time. Training notices nothing: the environments are
    new and no shared random generator is used.
    """
    envs = make_envs(args.env_id, args.eval_episodes, video)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.reset(seed=args.seed + EVAL_SEED)
    while running.any():
        obs_tensor = torch.as_tensor(obs, dtype=torch.float32).to(device)
        with torch.no_grad():
            actions = actor(obs_tensor).cpu().numpy()
        obs, _, _, _, infos = envs.step(actions)
        if "final_info" in infos:
            ended = running & infos["_final_info"]
            returns[ended] = infos["final_info"]["episode"]["r"][ended]
            running &= ~ended
    envs.close()
    return float(returns.mean())


def can_render(env_id: str) -> bool:
    """Whether this machine can draw the environment; a warning says why not."""
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo; osmesa would draw on the CPU
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        env = gym.make(env_id, render_mode="rgb_array")
        env.reset()
        env.render()
        env.close()
        return True
    except Exception as error:  # of whatever kind: every simulator has its own
        reason = " ".join(str(error).split())
        print(f"warning: no video, {env_id} cannot be rendered here: {reason}", file=sys.stderr)
        return False


def get_rng_states(action_space: gym.Space, device: torch.device) -> dict:
    """The states of all random generators but the environments'."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "action_space": action_space.np_random.bit_generator.state,
    }


def set_rng_states(states: dict, action_space: gym.Space, device: torch.device) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
    action_space.np_random.bit_generator.state = states["action_space"]


def repeat_episodes(envs: gym.vector.SyncVectorEnv, checkpoint: dict, seed: int) -> np.ndarray:
    """Brings the environments to where the checkpoint left them -> observations (N, O).

    One that does not repeat itself starts a fresh episode, and a warning says so.
    """
    obs, fresh = checkpoint["obs"].numpy().copy(), 0
    for i, env in enumerate(envs.envs):
        if not np.array_equal(env.repeat(checkpoint["envs"][i]), obs[i]):
            obs[i], _ = env.reset(seed=seed + i)
            fresh += 1
    if fresh:
        print(
            f"warning: {checkpoint['env_id']} does not repeat itself: "
            f"{fresh} of {len(obs)} environments start a fresh episode",
            file=sys.stderr,
        )
    return obs


def save_checkpoint(path: Path, checkpoint: dict) -> int:
    """Writes all or nothing: whenever the process dies, the file is whole -> its size in bytes."""
    partial_path = path.with_suffix(".partial")
    try:
        with partial_path.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial_path.replace(path)
    except BaseException:
        partial_path.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def load_checkpoint(path: Path) -> dict:
    """The checkpoint at `path`, its tensors on the CPU; one line says why it cannot be used."""
    try:
        with zipfile.ZipFile(path) as file:
            whole = file.testzip() is None  # torch.load does not notice a flipped bit
        checkpoint = torch.load(path, map_location="cpu", weights_only=True) if whole else None
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    except Exception:  # zipfile's, pickle's, torch's: all say that these are not the bytes written
        checkpoint = None
    if not isinstance(checkpoint, dict):
        fail(f"{path} is damaged or was never a checkpoint")
    if checkpoint.get("script") != SCRIPT:
        fail(f"{path} was written by {checkpoint.get('script', 'something else')}, not by {SCRIPT}")
    return checkpoint


def resumed_dir(args: Args) -> Path:
    """The run directory that --resume names, by itself or by the checkpoint in it."""
    return Path(args.resume.removesuffix(CHECKPOINT))


SCRIPT, CHECKPOINT = os.path.basename(__file__), "checkpoint.pt"
EVAL_SEED = 1_000_000  # added to --seed: evaluation starts from states that training does not
LOG_EVERY = 100  # environment steps per row of metrics: reading them waits for the device
STEADY_AFTER = 50  # policy updates come due, then compilation and capture are long over


def main(args: Args) -> Path:
    """Trains and returns the run directory."""
    check_args(args)
    checkpoint = load_checkpoint(resumed_dir(args) / CHECKPOINT) if args.resume else None
    start_step = checkpoint["global_step"] if checkpoint else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as cleanly as on Ctrl-C
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    warmup_steps = max(args.learning_starts - start_step, 0)
    warmup_steps += int(STEADY_AFTER * args.policy_frequency / args.utd_ratio)
    watch = Stopwatch(device, args.stopwatch, warmup_steps)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    envs = make_envs(args.env_id, args.num_envs)
    envs.action_space.seed(args.seed)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent = TD3(args, obs_dim, envs.single_action_space, device)
    rb = ReplayBuffer(args.buffer_size, args.num_envs, obs_dim, action_dim, args.batch_size, device)

    def policy(obs: torch.Tensor) -> torch.Tensor:
        return agent.act(obs, torch.randn(args.num_envs, action_dim, device=device))

    metrics = torch.zeros(len(CRITIC_METRICS + ACTOR_METRICS), device=device)

    def update(batch: Batch, actor_due: bool) -> None:
        metrics[: len(CRITIC_METRICS)] = agent.update_critic(batch, torch.randn_like(batch.actions))
        if actor_due:
            metrics[len(CRITIC_METRICS) :] = agent.update_actor(batch.obs)
            agent.update_target()

    # speed: all compilation and capture is set up here; the loop below does not know of it. Each
    # function compiles when it is first called, and a graph is captured on its third call
    if device.type == "cpu" and keeps_float32("medium"):
        torch.set_float32_matmul_precision("medium")  # oneDNN instead of MKL, slower on AMD
    if args.compile:
        compile_agent(agent)
    if args.cudagraphs and device.type == "cuda":
        policy = CudaGraphModule(policy, warmup=3)
        rb.draw = CudaGraphModule(rb.draw, warmup=3)
        graphs = {
            actor_due: CudaGraphModule(partial(update, rb.batch, actor_due), warmup=3)
            for actor_due in (False, True)
        }

        def update(batch: Batch, actor_due: bool) -> None:
            graphs[actor_due]()

    kind = {"script": SCRIPT, "env_id": args.env_id, "obs_dim": obs_dim, "action_dim": action_dim}
    kind |= {"num_envs": args.num_envs, "buffer_size": args.buffer_size}
    obs, _ = envs.reset(seed=args.seed)
    global_step, num_updates, update_credit, episodic_return = start_step, 0, 0.0, None
    if checkpoint:
        for name, mine in kind.items():
            if checkpoint[name] != mine:
                fail(f"{args.resume} has {name} {checkpoint[name]}, this run has {mine}")
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as error:  # networks of another shape: it names both
            fail(f"{args.resume}: {' '.join(str(error).split())}")
        rb.load_state_dict(checkpoint["replay_buffer"])
        metrics.copy_(checkpoint["metrics"])
        num_updates, update_credit = checkpoint["num_updates"], checkpoint["update_credit"]
        obs = repeat_episodes(envs, checkpoint, args.seed + start_step)
        set_rng_states(checkpoint["rng"], envs.action_space, device)
    del checkpoint  # as large as the replay buffer

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = resumed_dir(args) if args.resume else Path("runs", run_name.replace("/", "_"))
    run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
    suffix = f"_{start_step}.json" if args.resume else ".json"  # what the run began with stays
    config = run_config(args, device)
    (run_dir / f"config{suffix}").write_text(json.dumps(config, indent=2))
    films = args.capture_video and can_render(args.env_id)
    if args.track:
        track(args, run_dir, config)
    # rows that the run wrote after its checkpoint come again: readers drop the first ones
    writer = SummaryWriter(run_dir, purge_step=start_step + 1 if args.resume else None)
    bar = tqdm.tqdm(total=args.total_timesteps, initial=start_step, unit="step")

    def due(every: int) -> bool:
        """Whether this iteration passed a multiple of so many environment steps; 0: never."""
        return every > 0 and global_step % every < args.num_envs

    def save() -> None:
        """Writes checkpoint.pt, after the metrics that lead to it; a full disk is not the end."""
        begin = time.perf_counter()
        writer.flush()
        state = kind | {
            "args": asdict(args),
            "global_step": global_step,
            "num_updates": num_updates,
            "update_credit": update_credit,
            "agent": agent.state_dict(),
            "replay_buffer": rb.state_dict(),
            "metrics": metrics,
            "envs": [env.state_dict() for env in envs.envs],
            "obs": torch.from_numpy(obs),
            "rng": get_rng_states(envs.action_space, device),
        }
        try:
            size = save_checkpoint(run_dir / CHECKPOINT, state)
            seconds = time.perf_counter() - begin
            said = f"checkpoint at step {global_step:,}: {size / 1e6:.1f} MB in {seconds:.2f} s"
        except (OSError, RuntimeError) as error:  # torch covers the disk's complaint with its own
            reason = error if isinstance(error, OSError) else error.__context__ or error
            said = f"warning: no checkpoint at step {global_step:,}: {reason}"
        bar.write(said, file=sys.stderr)

    try:
        while global_step < args.total_timesteps:
            # 1. Act: uniformly at random at first, then by the policy.
            with watch.stage("inference"):
                if global_step < args.learning_starts:
                    actions = envs.action_space.sample()
                else:
                    obs_tensor = torch.as_tensor(obs, dtype=torch.float32)
                    actions = policy(obs_tensor.to(device, non_blocking=True)).cpu().numpy()

            # 2. Learn from what the replay buffer holds.
            if global_step >= args.learning_starts:
                update_credit += args.num_envs * args.utd_ratio
            while update_credit >= 1:
                update_credit -= 1
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
                last_obs = next_obs
                if "final_obs" in infos:
                    last_obs = next_obs.copy()
                    for i in np.flatnonzero(infos["_final_obs"]):
                        last_obs[i] = infos["final_obs"][i]
                rb.add(obs, actions, last_obs, rewards, terminated)
                obs = next_obs
            global_step += args.num_envs

            # 5. Log.
            with watch.stage("logging"):
                if "final_info" in infos:
                    episode = infos["final_info"]["episode"]
                    for i in np.flatnonzero(infos["_final_info"]):
                        episodic_return, length = float(episode["r"][i]), int(episode["l"][i])
                        writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                        writer.add_scalar("charts/episodic_length", length, global_step)
                if due(LOG_EVERY):
                    sps, steady_sps = watch.inclusive_sps(), watch.steady_sps()
                    writer.add_scalar("charts/SPS", sps, global_step)
                    if steady_sps:
                        writer.add_scalar("charts/SPS_steady", steady_sps, global_step)
                    if num_updates:
                        names = CRITIC_METRICS + ACTOR_METRICS
                        for name, value in zip(names, metrics.tolist(), strict=True):
                            writer.add_scalar(f"losses/{name}", value, global_step)
                    shown = f"{steady_sps or sps:,.0f} steps/s"
                    if episodic_return is not None:
                        shown += f", return {episodic_return:,.1f}"
                    bar.set_postfix_str(shown, refresh=False)
                    bar.update(global_step - bar.n)

            # 6. Evaluate and save, now and then and at the end.
            last = global_step >= args.total_timesteps
            if due(args.eval_every) or last and (args.eval_every or args.capture_video):
                with watch.stage("evaluation"):
                    video = run_dir / "videos" / f"step-{global_step}" if films else None
                    eval_return = evaluate(agent.actor, args, device, video)
                    writer.add_scalar("charts/eval_return", eval_return, global_step)
                    said = f"evaluation at step {global_step:,}: mean return {eval_return:,.1f}"
                    bar.write(said, file=sys.stderr)
            if due(args.checkpoint_every) or last and (args.checkpoint_every or args.save_model):
                with watch.stage("checkpoint"):
                    save()
            watch.tick(global_step - start_step)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {global_step:,} steps", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        bar.close()
        envs.close()
        report = watch.report()
        if report["warmup_seconds"] is not None:
            writer.add_scalar("charts/warmup_seconds", report["warmup_seconds"], global_step)
        writer.close()
        (run_dir / f"stages{suffix}").write_text(json.dumps(report, indent=2))
        print(f"run directory: {run_dir}")
    return run_dir


def parse_args() -> Args:
    """The command line; with --resume, a flag that is not given is what it was in that run."""
    args = tyro.cli(Args)
    if args.resume is None:
        return args
    checkpoint = load_checkpoint(resumed_dir(args) / CHECKPOINT)
    return tyro.cli(Args, default=Args(**checkpoint["args"]))


def print_unless_raised_again(error: threading.ExceptHookArgs) -> None:
    """An exception in a thread, unless it is the event writer's, which add_scalar raises again."""
    if not isinstance(error.exc_value, OSError):
        threading.__excepthook__(error)


if __name__ == "__main__":
    threading.excepthook = print_unless_raised_again
    try:
        main(parse_args())
    except OSError as error:  # runs/ is read-only, the disk is full
        fail(f"the run stops: {error}")
