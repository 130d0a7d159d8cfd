"""Proximal Policy Optimization (PPO) for Atari on EnvPool, on several GPUs: the eager baseline.

    torchrun --standalone --nproc-per-node 2 leanrl/ppo_atari_envpool_multigpu.py       # 2 GPUs
    torchrun --standalone --nproc-per-node 2 leanrl/ppo_atari_envpool_multigpu.py --no-cuda
    torchrun --standalone --nproc-per-node 2 leanrl/ppo_atari_envpool_multigpu.py --resume runs/RUN
    python leanrl/ppo_atari_envpool_multigpu.py                 # one process, without torchrun
    python leanrl/ppo_atari_envpool_multigpu.py --help          # every flag

On two nodes run the line on each, on HOST itself with torchrun's `--nnodes 2 --node-rank 0
--master-addr HOST` in place of `--standalone`, on the other one with `--node-rank 1`. On one node,
with torchrun's `--max-restarts 3` and the script's `--checkpoint-every 100000`, a process that dies
costs no more than the way since the last checkpoint.

The algorithm is that of ppo_atari_envpool.py, which says where it comes from; `diff` shows what
several processes need. torchrun starts one per GPU, or shares the CPU's cores among them. Each
plays its part of the games and computes the gradient of its part of every minibatch; the gradients
are averaged before they are clipped, so that all processes take the same step.

--num-envs, --total-timesteps, --num-minibatches and all that is logged count what the processes do
together: W processes compute what one would, but for rounding and for which steps meet in a
minibatch, where each process has an equal share of its own. More processes make a run faster, not
larger: for a larger one, raise --num-envs.

- The initial weights are those of rank 0, since equal seeds do not make them equal everywhere.
- Every process has the same random stream, draws for all and uses its part.
- Advantages are normalized over a whole minibatch, of all processes.
- Rank 0 alone logs, evaluates, saves and reads the checkpoint to go on from; the others wait as
  soon as they need it, for an hour at most.
- When a process dies, all others end, each with a line that says so; on GPUs torchrun may have to
  end them by force, after 30 seconds.

Its twin ppo_atari_envpool_multigpu_torchcompile.py is this file with the hunks marked `# speed:`,
so `diff` shows what each trick costs in code.

Not measured on GPUs.

Shapes: W processes, T steps of a rollout, N environments of a process, B batch, A actions, O = 4 x
84 x 84. A run writes runs/<env>__<name>__<seed>__<time>/ with config.json, TensorBoard event files
and stages.json, and where asked for with checkpoint.pt and videos/.
"""

import difflib
import importlib.util
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tqdm
import tyro
from torch.optim import Adam
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

    env_id: str = "Breakout-v5"
    """id of the game in EnvPool"""
    total_timesteps: int = 10_000_000
    """environment steps of the whole run, over all environments; rounded down to whole rollouts"""
    learning_rate: float = 2.5e-4
    """learning rate of the optimizer, at first"""
    anneal_lr: bool = True
    """lower the learning rate from rollout to rollout, linearly to zero at the end of the run"""
    num_envs: int = 8
    """environments stepped side by side, in all processes together"""
    num_steps: int = 128
    """steps of a rollout in each environment"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over a rollout"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.1
    """how far the ratio of new to old probabilities may go from 1 before its gradient ends"""
    clip_vloss: bool = True
    """clip the change of the value in the same way"""
    ent_coef: float = 0.01
    """weight of the entropy in the loss"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """longest gradient; longer ones are scaled down to it"""
    target_kl: float | None = None
    """end the epochs when the policy has gone so far, in KL divergence, from the old one"""


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


class World(NamedTuple):
    """This process among all that train together; without torchrun it is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those on this machine
    local_size: int = 1

    @classmethod
    def of_torchrun(cls) -> "World":
        variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        return cls(*(int(os.environ.get(name, alone)) for name, alone in variables.items()))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


@contextmanager
def quiet():
    """Within it, what is printed is lost."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def connect(world: World, device: torch.device) -> None:
    """Waits for all processes and connects them."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif world.local_size > 1:  # torchrun leaves one thread to each
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))
    # NCCL for tensors on GPUs; what else is gathered stays on the CPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()
    if world.size > 1:
        store, _, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
        # torchrun's store outlives a restart, and so do the addresses of the processes before it
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(
        backend, timeout=PATIENCE, store=store, rank=world.rank, world_size=world.size
    )


def collective(function: Callable, *arguments) -> None:
    """Calls a function of torch.distributed in which all processes take part.

    When another process is gone, this one says so and ends.
    """
    try:
        function(*arguments)
    except RuntimeError as error:
        reason = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split()))
        if not re.search("closed|reset|broken pipe|timed? ?out|remote", reason, re.IGNORECASE):
            raise  # something else is wrong
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would interrupt the end
        said = f"{World.of_torchrun()} stops: another process is gone ({reason})"
        print(f"\nerror: {said}", file=sys.__stderr__, flush=True)
        if torch.cuda.is_initialized():
            os._exit(1)  # whatever else would wait for kernels that wait for that process
        raise SystemExit(1) from None


def agree(value):
    """What rank 0 has as `value`."""
    values = [value]
    collective(dist.broadcast_object_list, values)
    return values[0]


def gather(rows: list[tuple]) -> list[tuple]:
    """The rows of all processes, ordered by their first field, on rank 0; elsewhere none."""
    gathered = [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    collective(dist.gather_object, rows, gathered)
    return sorted(chain(*gathered or []), key=itemgetter(0))


def moments(*samples: torch.Tensor) -> torch.Tensor:
    """Samples (K, B) of this process -> mean and standard deviation (K, 2) over all processes.

    Each argument may have its own B. In float64, in which the difference of two sums loses little.
    """

    def sums(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.ones_like(x), x, x.square()]).sum(dim=2)

    totals = torch.cat([sums(x.double()) for x in samples], dim=1)  # (3, K)
    collective(dist.all_reduce, totals)
    count, total, squares = totals
    mean = total / count
    variance = (squares - total * mean) / (count - 1)
    return torch.stack([mean, variance.clamp(min=0).sqrt()], dim=1)


def check_args(args: Args, world: World) -> None:
    """Refuses, before any work starts, settings that cannot run; the message names the flag."""
    for name in (
        "total_timesteps",
        "num_envs",
        "num_steps",
        "num_minibatches",
        "update_epochs",
        "max_grad_norm",
        "eval_episodes",
    ):
        if getattr(args, name) <= 0:
            fail(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    for name in ("checkpoint_every", "eval_every"):
        if getattr(args, name) < 0:
            fail(f"--{name.replace('_', '-')} must not be negative, got {getattr(args, name)}")
    if args.num_envs % world.size:
        fail(f"--num-envs {args.num_envs} cannot be shared equally by {world.size} processes")
    batch_size = args.num_envs * args.num_steps
    if batch_size % (args.num_minibatches * world.size):
        fail(
            f"--num-envs {args.num_envs} x --num-steps {args.num_steps} = {batch_size} steps "
            f"cannot be divided into --num-minibatches {args.num_minibatches} x {world.size} "
            "processes"
        )
    if batch_size == args.num_minibatches and args.norm_adv:
        fail("minibatches of one step have no deviation to normalize by: --no-norm-adv")
    if args.total_timesteps < batch_size:
        fail(f"--total-timesteps {args.total_timesteps} is less than a rollout of {batch_size}")
    if importlib.util.find_spec("envpool") is None:
        fail("Atari needs EnvPool: pip install -r requirements/envpool.txt")
    if args.cuda and 0 < torch.cuda.device_count() < world.local_size:
        fail(
            f"--nproc-per-node {world.local_size} needs {world.local_size} GPUs, "
            f"this machine has {torch.cuda.device_count()}; --no-cuda trains on the CPU"
        )
    num_envs = args.num_envs * world.local_size // world.size
    if num_envs > CROWD * (os.cpu_count() or 1):
        print(
            f"hint: {num_envs} environments share {os.cpu_count()} CPU cores: "
            f"more than {CROWD} per core make a rollout larger rather than faster",
            file=sys.stderr,
        )
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs wandb: pip install -r requirements/wandb.txt")
    if args.capture_video and importlib.util.find_spec("moviepy") is None:
        fail("--capture-video needs moviepy: pip install -r requirements/video.txt")


class AtariEnvs:
    """N games on EnvPool, each of which resets in the step that ends its episode (`SAME_STEP`).

    EnvPool by itself resets in the step after, whose action and reward count for nothing. Here the
    games that ended take that step at once, so that a rollout holds none of them.
    """

    def __init__(self, env_id: str, num_envs: int, seed: int, **options):
        import envpool
        from envpool.registration import registry

        games = [name for name, (path, *_) in registry.specs.items() if path == "envpool.atari"]
        if env_id not in games:
            near = difflib.get_close_matches(env_id, games, 3, cutoff=0.4) or ["Breakout-v5"]
            fail(f"EnvPool has no Atari game {env_id!r}; the nearest: {', '.join(near)}")
        self.envs = envpool.make_gymnasium(env_id, num_envs=num_envs, seed=seed, **options)
        self.action_space = self.envs.action_space
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, dtype=int)

    def reset(self) -> np.ndarray:
        """Starts all games -> observations (N, O)."""
        return self.envs.reset()[0]

    def step(self, actions: np.ndarray) -> tuple:
        """Actions (N,) -> observations (N, O), rewards, terminated, truncated, each (N,), infos.

        infos has, where an episode ended, `final_obs` (N, O), the observations before the resets,
        and where whole games did, the arrays `over`, which, `returns`, their scores, and `lengths`,
        in steps.
        """
        obs, rewards, terminated, truncated, step_infos = self.envs.step(actions)
        over = step_infos["terminated"] == 1  # the game, not only a life
        truncated &= ~over
        ended, infos = terminated | truncated | over, {}
        self.returns += step_infos["reward"]  # not clipped
        self.lengths += 1
        if ended.any():
            infos["final_obs"], obs = obs, obs.copy()
            index = np.flatnonzero(ended)
            obs[index] = self.envs.step(np.zeros(len(index), dtype=int), index)[0]
            whole = over | truncated
            if whole.any():
                infos["over"] = np.flatnonzero(whole)
                infos["returns"], infos["lengths"] = self.returns[whole], self.lengths[whole]
                self.returns[whole] = self.lengths[whole] = 0
        return obs, rewards, ended & ~truncated, truncated, infos

    def close(self) -> None:
        self.envs.close()


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


def layer_init(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights, no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """Categorical policy and the value of a state, on the features of one network."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, kernel_size=8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, kernel_size=4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, kernel_size=3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs (B, O) uint8 -> log-probabilities of the actions (B, A), values (B,)."""
        features = self.network(obs / 255.0)
        return F.log_softmax(self.actor(features), dim=-1), self.critic(features).squeeze(-1)


class Batch(NamedTuple):
    """B steps of a rollout; log_probs and values as they were when it was made."""

    obs: torch.Tensor  # (B, O) uint8
    actions: torch.Tensor  # (B,) int64
    log_probs: torch.Tensor  # (B,), these and what follows float32
    values: torch.Tensor  # (B,)
    advantages: torch.Tensor  # (B,)
    returns: torch.Tensor  # (B,)


class Rollout:
    """T steps of N environments on `device`, where observations stay uint8."""

    def __init__(self, steps: int, num_envs: int, device: torch.device):
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(steps, num_envs, *shape, dtype=dtype, device=device)

        self.obs = empty(*OBS_SHAPE, dtype=torch.uint8)
        self.actions = empty(dtype=torch.int64)
        self.log_probs, self.values, self.rewards = empty(), empty(), empty()
        self.ended = empty()  # 1 where the step ended an episode, of either kind
        self.final_values = empty()  # of the final observation of a truncated episode; otherwise 0
        self.advantages, self.returns = empty(), empty()
        shape = num_envs, *OBS_SHAPE
        self.new_obs = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def store_obs(self, t: int, obs: np.ndarray) -> torch.Tensor:
        """Brings obs (N, O), those of step t, to the device in one copy, for which nobody waits."""
        self.new_obs.copy_(torch.from_numpy(obs))
        return self.obs[t].copy_(self.new_obs, non_blocking=True)

    def batch(self) -> Batch:
        """All B = T N steps."""
        columns = self.log_probs, self.values, self.advantages, self.returns
        return Batch(*(column.flatten(0, 1) for column in (self.obs, self.actions, *columns)))


def sample(
    model: ActorCritic, obs: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """obs (N, O), exponential noise (N, A) -> actions (N,), log_probs (N,), values (N,).

    With probabilities p and exponential noise q, the largest p / q is a draw from p.
    """
    log_policy, values = model(obs)
    actions = (log_policy - noise.log()).argmax(dim=1)
    return actions, log_policy.gather(1, actions[:, None]).squeeze(1), values


def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    ended: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16) -> advantages (T, N).

    All (T, N). `next_values` is the value of what follows each step in its own episode: 0 after a
    termination, that of the final observation after a truncation. `ended` is 1 after either.
    """
    deltas = rewards + gamma * next_values - values
    advantages, advantage = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + gamma * gae_lambda * (1 - ended[t]) * advantage
        advantages[t] = advantage
    return advantages


def policy_loss(
    log_ratios: torch.Tensor, advantages: torch.Tensor, clip_coef: float
) -> torch.Tensor:
    """Clipped surrogate objective (equation 7), negated -> loss ()."""
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(advantages * ratios, advantages * clipped).mean()


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_coef: float | None
) -> torch.Tensor:
    """Half the squared error, of the worse of the value and its clipped change -> loss ()."""
    errors = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns).square())
    return 0.5 * errors.mean()


METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def ppo_loss(
    model: ActorCritic, batch: Batch, scale: torch.Tensor, args: Args
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of a minibatch (equation 9) -> loss (), METRICS (6,).

    `scale` (2,) is the mean and the standard deviation of the advantages in all processes' shares.
    """
    log_policy, values = model(batch.obs)
    log_ratios = log_policy.gather(1, batch.actions[:, None]).squeeze(1) - batch.log_probs
    advantages = batch.advantages
    if args.norm_adv:
        mean, std = scale
        advantages = (advantages - mean) / (std + 1e-8)
    of_policy = policy_loss(log_ratios, advantages, args.clip_coef)
    clip_coef = args.clip_coef if args.clip_vloss else None
    of_value = value_loss(values, batch.values, batch.returns, clip_coef)
    entropy = -(log_policy.exp() * log_policy).sum(dim=1).mean()
    loss = of_policy - args.ent_coef * entropy + args.vf_coef * of_value
    with torch.no_grad():
        ratios = log_ratios.exp()
        kl = -log_ratios.mean(), (ratios - 1 - log_ratios).mean()  # joschu.net/blog/kl-approx.html
        clipped = ((ratios - 1).abs() > args.clip_coef).float().mean()
        return loss, torch.stack([of_policy, of_value, entropy, *kl, clipped])


class PPO:
    """Network, optimizer and gradient steps, whose metrics are averaged with the gradients."""

    def __init__(self, args: Args, num_actions: int, device: torch.device):
        self.args = args
        self.model = ActorCritic(num_actions).to(device)
        self.parameters = list(self.model.parameters())
        self.optimizer = Adam(self.parameters, lr=args.learning_rate, eps=1e-5, fused=True)
        # what processes average, all gradients and then METRICS: one tensor, so that once suffices
        sizes = [parameter.numel() for parameter in self.parameters]
        self.shared = torch.zeros(sum(sizes) + len(METRICS), device=device)
        *gradients, self.metrics = self.shared.split([*sizes, len(METRICS)])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)

    def state_dict(self) -> dict:
        """Everything that updates change."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state["optimizer"]})

    def set_learning_rate(self, learning_rate: float) -> None:
        self.optimizer.param_groups[0]["lr"] = learning_rate

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """obs (N, O), exponential noise (N, A) -> actions (N,), log_probs (N,), values (N,)."""
        with torch.no_grad():
            return sample(self.model, obs, noise)

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        """obs (N, O) -> values (N,)."""
        with torch.no_grad():
            return self.model(obs)[1]

    def prepare(self, rollout: Rollout, next_values: torch.Tensor) -> None:
        """Advantages and returns of a rollout, from the values of what follows it (N,)."""
        with torch.no_grad():
            following = torch.cat([rollout.values[1:], next_values[None]])
            following = torch.where(rollout.ended.bool(), rollout.final_values, following)
            advantages = compute_gae(
                rollout.rewards,
                rollout.values,
                following,
                rollout.ended,
                self.args.gamma,
                self.args.gae_lambda,
            )
            rollout.advantages.copy_(advantages)
            torch.add(advantages, rollout.values, out=rollout.returns)

    def equalize(self) -> None:
        """Gives all processes the parameters of rank 0, through the gradients' buffer."""
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.grad.copy_(parameter)
            collective(dist.broadcast, self.shared, 0)
            for parameter in self.parameters:
                parameter.copy_(parameter.grad)

    def gradient(self, batch: Batch, scale: torch.Tensor) -> None:
        """Gradients and METRICS of this process's share of a minibatch, into `shared`."""
        loss, metrics = ppo_loss(self.model, batch, scale, self.args)
        self.shared.zero_()
        loss.backward()
        self.metrics.copy_(metrics)

    def average(self) -> None:
        """Averages `shared` over the processes: all shares of a minibatch are of one size."""
        collective(dist.all_reduce, self.shared)
        self.shared /= dist.get_world_size()

    def step(self) -> None:
        """One gradient step."""
        nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        self.optimizer.step()

    def learn(self, batch: Batch, permutations: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Epochs of minibatches in the order of permutations (E, B) -> the last METRICS (6,).

        `scales` (E, M, 2) holds the `scale` of each of an epoch's M minibatches.
        """
        size = permutations.shape[1] // self.args.num_minibatches
        for index, scale in zip(permutations.view(-1, size), scales.flatten(0, 1), strict=True):
            self.gradient(Batch(*(column[index] for column in batch)), scale)
            self.average()
            self.step()
        return self.metrics


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


def evaluate(model: ActorCritic, args: Args, device: torch.device, video: Path | None) -> float:
    """Mean score of K whole games, side by side, in which the policy draws its actions.

    They are the same K games every time, but for what the policy does. Training notices nothing:
    the environments are new and no shared random generator is used. The first one becomes the
    file `video`, if that is given.
    """
    options = {} if video is None else {"render_mode": "rgb_array"}
    envs = AtariEnvs(args.env_id, args.eval_episodes, args.seed + EVAL_SEED, **options)
    generator, frames = np.random.default_rng(args.seed + EVAL_SEED), []
    scores, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs = envs.reset()
    while running.any():
        if video is not None and running[0]:
            frames.append(envs.envs.render(env_ids=0)[0])
        noise = generator.exponential(size=(args.eval_episodes, envs.action_space.n))
        noise = torch.from_numpy(noise.astype(np.float32)).to(device)
        with torch.no_grad():
            actions, _, _ = sample(model, torch.from_numpy(obs).to(device), noise)
        obs, _, _, _, infos = envs.step(actions.cpu().numpy())
        for i, score in zip(infos.get("over", ()), infos.get("returns", ()), strict=True):
            if running[i]:
                scores[i], running[i] = score, False
    envs.close()
    if video is not None:
        film(frames, video)
    return float(scores.mean())


def film(frames: list[np.ndarray], path: Path) -> None:
    """Writes RGB frames (H, W, 3), one per step of 4 at 60 Hz, as mp4; failing costs the video."""
    try:
        from moviepy.video.io.ImageSequenceClip import ImageSequenceClip

        path.parent.mkdir(exist_ok=True)
        ImageSequenceClip(frames, fps=15).write_videofile(str(path), logger=None)
    except Exception as error:  # of whatever kind: the encoder is a program of its own
        reason = " ".join(str(error).split())
        print(f"warning: no video of {len(frames)} frames: {reason}", file=sys.stderr)


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


def launch() -> str | None:
    """Names the launch of torchrun to which this process belongs, and all of its restarts."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    # with --master-addr every launch has the same: then it is that of torchrun's process
    return f"process {os.getppid()}" if run_id == "none" else run_id


def restarted_run() -> str | None:
    """After a restart by torchrun, the launch's last run directory, if it has a checkpoint."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0:
        return None
    mark = f'"torchrun": {json.dumps(launch())}'
    configs = [path for path in Path("runs").glob("*/config.json") if mark in path.read_text()]
    found = max(configs, key=os.path.getmtime).parent if configs else None
    if found is None or not (found / CHECKPOINT).exists():
        print("restarted by torchrun: the run starts anew, it has no checkpoint", file=sys.stderr)
        return None
    print(f"restarted by torchrun: the run goes on with {found}", file=sys.stderr)
    return str(found)


SCRIPT, CHECKPOINT = os.path.basename(__file__), "checkpoint.pt"
OBS_SHAPE = (4, 84, 84)  # frames, height, width
CROWD = 16  # environments per CPU core, above which a hint says what more are good for
EVAL_SEED = 1_000_000_000  # added to --seed: evaluation plays games that training does not
KL = METRICS.index("approx_kl")
STEADY_AFTER = 3  # rollouts, then compilation and capture are over
PATIENCE = timedelta(hours=1)  # for which processes wait for each other, as for an evaluation


def train(args: Args, world: World, device: torch.device) -> Path:
    """Trains and returns the run directory."""
    if agree(asdict(args)) != asdict(args):
        fail(f"{world} has other flags than rank 0")
    loads = args.resume and world.rank == 0
    checkpoint = agree(load_checkpoint(resumed_dir(args) / CHECKPOINT) if loads else None)
    start_step = checkpoint["global_step"] if checkpoint else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as cleanly as on Ctrl-C
    batch_size = args.num_envs * args.num_steps
    total_timesteps = args.total_timesteps // batch_size * batch_size
    watch = Stopwatch(
        device, args.stopwatch, STEADY_AFTER * batch_size, trace_after=3, trace_iterations=1
    )
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    # this process's part of all environments, of which the i-th has seed + i, whoever plays it
    num_envs = args.num_envs // world.size
    own = slice(world.rank * num_envs, (world.rank + 1) * num_envs)
    # EnvPool cannot return to a moment of a game: a resumed run starts new ones
    seed = args.seed + start_step + own.start
    envs = AtariEnvs(args.env_id, num_envs, seed, episodic_life=True, reward_clip=True)
    envs.action_space.seed(args.seed)
    num_actions = int(envs.action_space.n)
    agent = PPO(args, num_actions, device)
    agent.equalize()
    rollout = Rollout(args.num_steps, num_envs, device)
    batch = rollout.batch()

    kind = {"script": SCRIPT, "env_id": args.env_id, "num_actions": num_actions}
    kind |= {"num_envs": args.num_envs}
    obs = envs.reset()
    global_step, episodic_return = start_step, None
    if checkpoint:
        for name, mine in kind.items():
            if checkpoint[name] != mine:
                fail(f"{args.resume} has {name} {checkpoint[name]}, this run has {mine}")
        try:
            agent.load_state_dict(checkpoint["agent"])
        except RuntimeError as error:  # networks of another shape: it names both
            fail(f"{args.resume}: {' '.join(str(error).split())}")
        set_rng_states(checkpoint["rng"], envs.action_space, device)
        print(f"resumed at step {start_step:,} with new games: EnvPool keeps none", file=sys.stderr)

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{agree(int(time.time()))}"
    run_dir = resumed_dir(args) if args.resume else Path("runs", run_name.replace("/", "_"))
    suffix = f"_{start_step}.json" if args.resume else ".json"  # what the run began with stays
    if world.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
        config = run_config(args, device) | {"processes": world.size, "torchrun": launch()}
        (run_dir / f"config{suffix}").write_text(json.dumps(config, indent=2))
        if args.track:
            track(args, run_dir, config)
        # rows that the run wrote after its checkpoint come again: readers drop the first ones
        writer = SummaryWriter(run_dir, purge_step=start_step + 1 if args.resume else None)
    bar = tqdm.tqdm(total=total_timesteps, initial=start_step, unit="step", disable=world.rank > 0)

    def due(every: int) -> bool:
        """Whether this iteration passed a multiple of so many environment steps; 0: never."""
        return every > 0 and global_step % every < batch_size

    def save() -> None:
        """Writes checkpoint.pt, after the metrics that lead to it; a full disk is not the end."""
        begin = time.perf_counter()
        writer.flush()
        state = kind | {
            "args": asdict(args),
            "global_step": global_step,
            "agent": agent.state_dict(),
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
        while global_step < total_timesteps:
            learning_rate = args.learning_rate
            if args.anneal_lr:
                learning_rate *= 1 - global_step / total_timesteps
            agent.set_learning_rate(learning_rate)

            # 1. Roll out: T steps with the policy as it is.
            shape = args.num_steps, args.num_envs, num_actions
            noise = torch.empty(shape, device=device).exponential_()[:, own]
            games = []  # that end: step, score, length
            rollout.final_values.zero_()
            for t in range(args.num_steps):
                with watch.stage("inference"):
                    actions, log_probs, values = agent.act(rollout.store_obs(t, obs), noise[t])
                    chosen = actions.cpu().numpy()
                with watch.stage("simulation"):
                    obs, rewards, terminated, truncated, infos = envs.step(chosen)

                # Where an episode ended, the observation is already the next episode's first.
                with watch.stage("replay"):
                    rollout.actions[t], rollout.values[t] = actions, values
                    rollout.log_probs[t] = log_probs
                    rollout.rewards[t] = torch.as_tensor(rewards)
                    rollout.ended[t] = torch.as_tensor(terminated | truncated)
                    if truncated.any():
                        index = np.flatnonzero(truncated)
                        final_obs = torch.from_numpy(infos["final_obs"][index]).to(device)
                        rollout.final_values[t, index] = agent.value(final_obs)
                global_step += len(rewards) * world.size

                with watch.stage("logging"):
                    for score, length in zip(
                        infos.get("returns", ()), infos.get("lengths", ()), strict=True
                    ):
                        games.append((global_step, float(score), int(length)))

            # 2. Learn from it in several epochs; with --target-kl, look after each.
            with watch.stage("backpropagation"):
                agent.prepare(rollout, agent.value(torch.from_numpy(obs).to(device)))
                # each epoch has one order for each process
                orders = [
                    torch.randperm(batch_size // world.size, device=device)
                    for _ in range(args.update_epochs * world.size)
                ]
                orders = torch.stack(orders[world.rank :: world.size])
                # of the advantages in each minibatch and of what the explained variance needs
                scales = moments(
                    batch.advantages[orders].view(args.update_epochs * args.num_minibatches, -1),
                    torch.stack([batch.returns - batch.values, batch.returns]),
                )
                error, spread = scales[-2:, 1]
                scales = scales[:-2].to(batch.advantages.dtype)
                scales = scales.view(args.update_epochs, args.num_minibatches, 2)
                at_once = args.update_epochs if args.target_kl is None else 1
                for epochs, scale in zip(orders.split(at_once), scales.split(at_once), strict=True):
                    metrics = agent.learn(batch, epochs, scale)
                    if args.target_kl is not None and metrics[KL] > args.target_kl:
                        break

            # 3. Log, on rank 0 alone, as all that follows.
            with watch.stage("logging"):
                games = gather(games)
            if world.rank > 0:
                continue
            with watch.stage("logging"):
                for step, episodic_return, length in games:
                    writer.add_scalar("charts/episodic_return", episodic_return, step)
                    writer.add_scalar("charts/episodic_length", length, step)
                sps, steady_sps = watch.inclusive_sps(), watch.steady_sps()
                writer.add_scalar("charts/SPS", sps, global_step)
                if steady_sps:
                    writer.add_scalar("charts/SPS_steady", steady_sps, global_step)
                writer.add_scalar("charts/learning_rate", learning_rate, global_step)
                explained = 1 - (error / spread) ** 2
                writer.add_scalar("losses/explained_variance", explained.item(), global_step)
                for name, value in zip(METRICS, metrics.tolist(), strict=True):
                    writer.add_scalar(f"losses/{name}", value, global_step)
                shown = f"{steady_sps or sps:,.0f} steps/s"
                if episodic_return is not None:
                    shown += f", return {episodic_return:,.1f}"
                bar.set_postfix_str(shown, refresh=False)
                bar.update(global_step - bar.n)

            # 4. Evaluate and save, now and then and at the end.
            last = global_step >= total_timesteps
            if due(args.eval_every) or last and (args.eval_every or args.capture_video):
                with watch.stage("evaluation"):
                    video = run_dir / "videos" / f"step-{global_step}.mp4"
                    video = video if args.capture_video else None
                    eval_return = evaluate(agent.model, args, device, video)
                    writer.add_scalar("charts/eval_return", eval_return, global_step)
                    said = f"evaluation at step {global_step:,}: mean return {eval_return:,.1f}"
                    bar.write(said, file=sys.stderr)
            if due(args.checkpoint_every) or last and (args.checkpoint_every or args.save_model):
                with watch.stage("checkpoint"):
                    save()
            watch.tick(global_step - start_step)
    except KeyboardInterrupt:
        print(f"\n{world}: interrupted after {global_step:,} steps", file=sys.__stderr__)
        raise SystemExit(130) from None
    finally:
        bar.close()
        envs.close()
        if world.rank == 0:
            report = watch.report()
            if report["warmup_seconds"] is not None:
                writer.add_scalar("charts/warmup_seconds", report["warmup_seconds"], global_step)
            writer.close()
            (run_dir / f"stages{suffix}").write_text(json.dumps(report, indent=2))
            print(f"run directory: {run_dir}")
    return run_dir


def main(args: Args) -> Path:
    """Trains, as one of the processes that torchrun has started, and returns the run directory."""
    world = World.of_torchrun()
    check_args(args, world)
    on_gpu = args.cuda and torch.cuda.is_available()
    device = torch.device("cuda", world.local_rank) if on_gpu else torch.device("cpu")
    connect(world, device)
    try:
        if args.resume is None:
            args = replace(args, resume=agree(restarted_run() if world.rank == 0 else None))
        run_dir = train(args, world, device)
    except BaseException:
        if device.type == "cpu":  # a GPU may be waiting for a process that is gone
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
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
        # what each process of a machine finds wrong, and --help, the first one says for all
        with quiet() if World.of_torchrun().local_rank else nullcontext():
            main(parse_args())
    except OSError as error:  # runs/ is read-only, the disk is full
        fail(f"the run stops: {error}")
