r"""Soft Actor-Critic (SAC) on thousands of MuJoCo worlds in one batch: the baseline.

    python leanrl/sac_mujoco_gpu.py --eval-every 500000             # 64 HalfCheetahs, 5 M steps
    python leanrl/sac_mujoco_gpu.py --num-envs 4096 --utd-ratio 0.001 --batch-size 8192 \
        --buffer-size 10_000_000                                     # for a GPU, on mujoco_warp

Physics is MuJoCo's C engine in threads on a CPU and mujoco_warp on a GPU; observations, rewards and
terminations are functions of its state, those of Gymnasium's environments, in which the policy is
evaluated. Otherwise it is sac_continuous_action.py with two differences, after FastTD3
(arXiv:2505.22642): 16 environment steps for each update, not one, and one policy step, not two, for
every two updates. Replay is on the device, too. Its twin
sac_mujoco_gpu_torchcompile.py is this file with the hunks marked `# speed:`.
Shapes: N environments, B batch, O observation, A action.
"""

import ast
import copy
import ctypes
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import gymnasium as gym
import mujoco
import numpy as np
import torch
import torch.nn.functional as F
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

    env_id: str = "HalfCheetah-v5"  # one of Gymnasium's MuJoCo environments: those in TASKS
    physics: Literal["auto", "c", "warp"] = "auto"  # MuJoCo's C or mujoco_warp; auto: C on a CPU
    total_timesteps: int = 5_000_000  # environment steps of the whole run, over all environments
    num_envs: int = 64  # environments stepped side by side
    utd_ratio: float = 0.0625  # update-to-data ratio: updates per environment step
    buffer_size: int = 1_000_000  # capacity of the replay buffer, in transitions
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # share of the Q-networks that enters their targets at each target update
    batch_size: int = 256  # transitions per update
    learning_starts: int = 5_000  # environment steps with random actions before the first update
    policy_lr: float = 3e-4  # learning rate of the policy
    q_lr: float = 1e-3  # learning rate of the Q-networks and of the temperature
    policy_frequency: int = 2  # every n-th update updates the policy, once
    target_network_frequency: int = 1  # every n-th update updates the target networks
    alpha: float = 0.2  # entropy temperature where it is not tuned
    autotune: bool = True  # tune the temperature towards an entropy of minus the action dimensions


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
METRICS += ("actor_loss", "alpha_loss", "alpha", "entropy")  # of update_actor
LOG_EVERY = 100  # steps of all environments per row of metrics, which waits for the device
STEADY_AFTER = 100  # updates: with the default frequencies all is compiled and captured by then
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # the range of the policy's log_std, as in CleanRL


def check_args(args: Args) -> None:
    """What a user gets wrong, in one line each; libraries' own errors say the rest."""
    may_be_zero = ("seed", "checkpoint_every", "eval_every", "policy_lr", "q_lr", "gamma", "tau")
    for name, x in asdict(args).items():
        if type(x) in (int, float) and not (0 < x < 1e12 or x == 0 and name in may_be_zero):
            raise SystemExit(f"--{name.replace('_', '-')}: {x} is out of range")
    if args.env_id not in TASKS:
        raise SystemExit(f"--env-id: {args.env_id} is none of {', '.join(TASKS)}")


def half_cheetah(s: SimpleNamespace, speed: Tensor, actions: Tensor) -> tuple:
    obs = torch.cat([s.qpos[:, 1:], s.qvel], dim=1)
    return obs, speed - 0.1 * actions.square().sum(1), torch.zeros_like(speed, dtype=torch.bool)


def hopper(s: SimpleNamespace, speed: Tensor, actions: Tensor) -> tuple:
    z, angle, others = s.qpos[:, 1], s.qpos[:, 2], torch.cat([s.qpos[:, 2:], s.qvel], dim=1)
    healthy = (z > 0.7) & (angle.abs() < 0.2) & (others.abs() < 100).all(1)
    obs = torch.cat([s.qpos[:, 1:], s.qvel.clamp(-10, 10)], dim=1)
    return obs, speed + healthy.float() - 1e-3 * actions.square().sum(1), ~healthy


def walker2d(s: SimpleNamespace, speed: Tensor, actions: Tensor) -> tuple:
    healthy = (s.qpos[:, 1] > 0.8) & (s.qpos[:, 1] < 2) & (s.qpos[:, 2].abs() < 1)
    obs = torch.cat([s.qpos[:, 1:], s.qvel.clamp(-10, 10)], dim=1)
    return obs, speed + healthy.float() - 1e-3 * actions.square().sum(1), ~healthy


def ant(s: SimpleNamespace, speed: Tensor, actions: Tensor) -> tuple:
    forces = s.cfrc_ext.clamp(-1, 1).flatten(1)  # the world's six, then six of each body
    healthy = (s.qpos[:, 2] >= 0.2) & (s.qpos[:, 2] <= 1)
    costs = 0.5 * actions.square().sum(1) + 5e-4 * forces.square().sum(1)
    obs = torch.cat([s.qpos[:, 2:], s.qvel, forces[:, 6:]], dim=1)
    return obs, speed + healthy.float() - costs, ~healthy


def humanoid(s: SimpleNamespace, speed: Tensor, actions: Tensor) -> tuple:
    healthy = (s.qpos[:, 2] > 1) & (s.qpos[:, 2] < 2)
    contact_costs = (5e-7 * s.cfrc_ext.square().sum((1, 2))).clamp(max=10)
    costs = 0.1 * actions.square().sum(1) + contact_costs
    parts = s.cinert[:, 1:], s.cvel[:, 1:], s.qfrc_actuator[:, 6:], s.cfrc_ext[:, 1:]
    obs = torch.cat([s.qpos[:, 2:], s.qvel, *(x.flatten(1) for x in parts)], dim=1)
    return obs, 1.25 * speed + 5 * healthy.float() - costs, ~healthy


def inverted_pendulum(s: SimpleNamespace, speed: Tensor, actions: Tensor) -> tuple:
    fallen = s.qpos[:, 1].abs() > 0.2
    return torch.cat([s.qpos, s.qvel], dim=1), (~fallen).float(), fallen


def double_pendulum(s: SimpleNamespace, speed: Tensor, actions: Tensor) -> tuple:
    x, _, y = s.site_xpos[:, 0].unbind(1)  # of the tip
    costs = 0.01 * x.square() + (y - 2).square()
    costs = costs + 1e-3 * s.qvel[:, 1].square() + 5e-3 * s.qvel[:, 2].square()
    angles, others = s.qpos[:, 1:], torch.cat([s.qvel, s.qfrc_constraint[:, :1]], dim=1)
    obs = torch.cat([s.qpos[:, :1], angles.sin(), angles.cos(), others.clamp(-10, 10)], dim=1)
    return obs, 10 * (y > 1).float() - costs, y <= 1


# A task judges N worlds after a step: fields of mujoco.MjData, float32 (N, ...), speed forward (N,)
# in m/s, actions (N, A) -> observations (N, O), rewards (N,), terminated (N,). With it come what it
# reads of MjData besides qpos and qvel, and which noise velocities have when an episode begins.
TASKS = {
    "HalfCheetah-v5": (half_cheetah, (), "normal"),
    "Hopper-v5": (hopper, (), "uniform"),
    "Walker2d-v5": (walker2d, (), "uniform"),
    "Ant-v5": (ant, ("xpos", "cfrc_ext"), "normal"),
    "Humanoid-v5": (humanoid, ("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext"), "uniform"),
    "InvertedPendulum-v5": (inverted_pendulum, (), "uniform"),
    "InvertedDoublePendulum-v5": (double_pendulum, ("site_xpos", "qfrc_constraint"), "normal"),
}


class CPhysics:
    """N worlds in MuJoCo's C engine: on the CPU, in float64, stepped by a thread per core."""

    def __init__(self, env: gym.Env, num_envs: int, reads: tuple[str, ...], device: torch.device):
        if num_envs * 20e3 > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise SystemExit(f"--num-envs: {num_envs:,} worlds of 20 kB each do not fit in memory")
        self.model, self.frame_skip = env.model, env.frame_skip
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET  # it would hide NaN
        # A robot is one tree of bodies: looking for islands, to be solved apart, finds nothing
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND
        # Python's bindings let each part of a step read a clock, for timers that nobody looks at
        ctypes.c_void_p.in_dll(ctypes.CDLL(mujoco._callbacks.__file__), "mjcb_time").value = None
        self.parts = np.array_split(range(num_envs), min(os.cpu_count(), num_envs))
        self.pool = ThreadPoolExecutor(len(self.parts))
        # Worlds are rows, which take turns in the MjData of a thread: it stays in the core's cache
        self.data = [mujoco.MjData(env.model) for _ in self.parts]
        names = "QPOS", "QVEL", "WARMSTART", "CTRL"  # all that a step needs, in MuJoCo's order
        parts = [int(getattr(mujoco.mjtState, f"mjSTATE_{name}")) for name in names]
        ends = np.cumsum([mujoco.mj_stateSize(env.model, part) for part in parts])
        self.row, self.worlds = sum(parts), np.zeros((num_envs, ends[-1]))
        qpos, qvel, _, self.ctrl = np.split(self.worlds, ends[:-1], axis=1)  # views
        shapes = {name: getattr(self.data[0], name).shape for name in reads[2:]}
        self.derived = {name: np.zeros((num_envs, *shape)) for name, shape in shapes.items()}
        self.arrays = {"qpos": qpos, "qvel": qvel, **self.derived}
        self.overflow = torch.zeros(num_envs, device=device)  # it has room for all contacts
        self.state = SimpleNamespace()  # the arrays in float32 on the device
        for name, array in self.arrays.items():
            setattr(self.state, name, torch.zeros(array.shape, device=device))

    def step(self, actions: Tensor) -> None:
        """Steps each world by a frame skip with actions (N, A), from the x that `state` has."""
        self.worlds[:, 0], self.ctrl[:] = self.state.qpos[:, 0].cpu(), actions.cpu()
        list(self.pool.map(self.step_part, self.data, self.parts))
        for name, array in self.arrays.items():
            getattr(self.state, name).copy_(torch.from_numpy(array))

    def step_part(self, data: mujoco.MjData, part: np.ndarray) -> None:
        for i in part:  # MuJoCo lets the other threads run meanwhile
            mujoco.mj_setState(self.model, data, self.worlds[i], self.row)
            mujoco.mj_step(self.model, data, self.frame_skip)
            if "cfrc_ext" in self.derived:  # contact forces, which a step leaves out
                mujoco.mj_rnePostConstraint(self.model, data)
            self.keep(i, data)

    def keep(self, i: int, data: mujoco.MjData) -> None:
        """Keeps what is now in `data` as world i."""
        mujoco.mj_getState(self.model, data, self.worlds[i], self.row)
        for name, array in self.derived.items():
            array[i] = getattr(data, name)

    def begin(self, ended: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Begins episodes where `ended` (N,), at these positions and velocities (N, .)."""
        data = self.data[0]
        for i in ended.nonzero()[:, 0].tolist():
            mujoco.mj_resetData(self.model, data)
            data.qpos, data.qvel = qpos[i].cpu(), qvel[i].cpu()
            mujoco.mj_forward(self.model, data)
            self.keep(i, data)
            for name, array in self.arrays.items():
                getattr(self.state, name)[i] = torch.from_numpy(array[i])


class WarpPhysics:
    """N worlds in mujoco_warp: on `device`, in float32, each step a launch of a graph of Warp's."""

    def __init__(self, env: gym.Env, num_envs: int, reads: tuple[str, ...], device: torch.device):
        try:
            import mujoco_warp as mjw
            import warp as wp
        except ImportError as error:
            raise SystemExit(f"{error}: pip install -r requirements/mujoco-warp.txt") from None
        if env.model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:  # Humanoid's, which Warp lacks
            env.model.opt.solver, env.model.opt.iterations = mujoco.mjtSolver.mjSOL_NEWTON, 100
        # On steep capsules, Ant's feet, mujoco_warp 4.0.0 takes other directions of friction
        # than C, by which Ant's velocities differ in the first decimal
        capsule = mjw._src.collision_primitive_core.plane_capsule.adj
        capsule.source = capsule.source.replace("b_norm < 0.5", "b_norm < 1e-6")
        capsule.tree = ast.parse(capsule.source)
        wp.init()
        with wp.ScopedDevice(str(device)):
            try:
                self.data = mjw.make_data(env.model, nworld=num_envs)
            except (RuntimeError, ValueError) as error:  # of memory
                raise SystemExit(f"--num-envs: {num_envs:,} worlds: {error}") from None
            self.model = mjw.put_model(env.model)  # CUDA's graphs do not keep it
            self.model.opt.warn_overflow = 0  # kernels would print; the chart counts

            def capture(*functions: Callable) -> wp.Graph:
                for function in functions:  # compiles
                    function(self.model, self.data)
                with wp.ScopedCapture() as recorded:
                    for function in functions:
                        function(self.model, self.data)
                return recorded.graph

            forces = [mjw.rne_postconstraint] * ("cfrc_ext" in reads)
            self.steps = capture(*[mjw.step] * env.frame_skip, *forces)
            self.derive = capture(mjw.kinematics, mjw.com_pos, mjw.com_vel)  # from qpos and qvel
        self.warp, self.on_gpu = wp, device.type == "cuda"
        tensors = {name: wp.to_torch(getattr(self.data, name)) for name in reads}  # no copies
        self.state, self.ctrl = SimpleNamespace(**tensors), wp.to_torch(self.data.ctrl)
        self.overflow = wp.to_torch(self.data.overflow)  # not 0 once at a limit
        self.forces = [tensors[name] for name in reads if "frc" in name]
        self.forces.append(wp.to_torch(self.data.qacc_warmstart))

    def step(self, actions: Tensor) -> None:
        self.ctrl.copy_(actions)
        self.launch(self.steps)

    def begin(self, ended: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        for field, fresh in ((self.state.qpos, qpos), (self.state.qvel, qvel)):
            field.copy_(torch.where(ended[:, None], fresh, field))
        for field in self.forces:
            field.masked_fill_(ended.view(-1, *[1] * (field.dim() - 1)), 0)
        self.launch(self.derive)

    def launch(self, graph: "wp.Graph") -> None:  # noqa: F821
        stream = self.warp.stream_from_torch() if self.on_gpu else None  # torch's own
        self.warp.capture_launch(graph, stream=stream)


class MuJoCoEnvs(gym.vector.VectorEnv):
    """N of Gymnasium's MuJoCo environments in one batch: all tensors are float32 on `device`.

    An episode that ends begins anew in the same step. A world that is no longer finite ends its
    episode with reward 0 and is counted in `broken`. The first episodes, whose returns are NaN, end
    early, each at another step, so that later ones do not all end at once.
    """

    metadata, max_steps = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}, 1000

    def __init__(self, env_id: str, num_envs: int, device: torch.device, physics: str):
        env = gym.make(env_id).unwrapped
        self.num_envs, self.dt, self.scale = num_envs, env.dt, env._reset_noise_scale
        self.judge, more, self.noise = TASKS[env_id]
        self.moves = "Pendulum" not in env_id  # x grows without end, and is not observed
        self.single_action_space = env.action_space
        self.single_observation_space = env.observation_space
        on_warp = physics == "warp" or physics == "auto" and device.type == "cuda"
        reads = "qpos", "qvel", *more
        self.physics = (WarpPhysics if on_warp else CPhysics)(env, num_envs, reads, device)
        arrays = env.init_qpos, env.init_qvel, env.model.body_mass
        arrays += env.action_space.low, env.action_space.high
        arrays = (torch.tensor(x, dtype=torch.float32, device=device) for x in arrays)
        self.qpos, self.qvel, self.mass, self.low, self.high = arrays
        self.returns, self.position, self.lengths = torch.zeros(3, num_envs, device=device)
        self.broken = torch.zeros((), device=device)

    def draw(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """How far from the usual state episodes begin: (*shape, positions and velocities)."""
        noise = self.qpos.new_empty(*shape, len(self.qpos) + len(self.qvel))
        noise.uniform_(-1, 1, generator=generator)
        if self.noise == "normal":
            noise[..., len(self.qpos) :].normal_(generator=generator)
        return noise * self.scale

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Starts all episodes, drawn from torch's generator if not by seed -> obs (N, O), {}."""
        generator = None if seed is None else torch.Generator(self.qpos.device).manual_seed(seed)
        self.lengths.copy_(torch.arange(self.num_envs) * self.max_steps // self.num_envs)
        self.returns.copy_(torch.where(self.lengths > 0, math.nan, 0.0))
        return self.begin(self.lengths >= 0, self.draw(self.num_envs, generator=generator)), {}

    def step(self, actions: Tensor, noise: Tensor | None = None) -> tuple:
        """Actions (N, A), clipped to their space, and a `draw` for the episodes that begin.

        -> obs (N, O), rewards, terminated, truncated (N,), infos: `final_obs` (N, O) is what the
        step has led to, `episode` its return `r` and length `l`; masks with a _ say where it ended.
        """
        actions = actions.clamp(self.low, self.high)
        self.physics.step(actions)
        *results, infos = self.settle(actions)
        ended = infos["_episode"]
        noise = self.draw(self.num_envs) if noise is None else noise
        obs = torch.where(ended[:, None], self.begin(ended, noise), infos["final_obs"])
        return obs, *results, infos

    def settle(self, actions: Tensor) -> tuple:
        """Judges what the physics has led to -> rewards, terminated, truncated (N,), infos."""
        position = self.find_position()
        speed = (position - self.position) / self.dt
        obs, rewards, terminated = self.judge(self.physics.state, speed, actions)
        finite = obs.isfinite().all(1) & rewards.isfinite()
        obs, rewards = obs.where(finite[:, None], 0), rewards.where(finite, 0)
        terminated = terminated | ~finite
        self.position.copy_(position)
        self.broken += (~finite).sum()
        self.returns += rewards
        self.lengths += 1
        truncated = self.lengths >= self.max_steps
        ended = terminated | truncated
        infos = {"final_obs": obs, "_final_obs": ended, "_episode": ended}
        infos["episode"] = {"r": self.returns.clone(), "l": self.lengths.clone()}
        self.returns.masked_fill_(ended, 0)
        self.lengths.masked_fill_(ended, 0)
        return rewards, terminated, truncated, infos

    def begin(self, ended: Tensor, noise: Tensor) -> Tensor:
        """Begins episodes where `ended` (N,), brings the worlds that move back to x = 0 -> obs."""
        qpos, qvel = noise.split([len(self.qpos), len(self.qvel)], dim=1)
        self.physics.begin(ended, self.qpos + qpos, self.qvel + qvel)
        state, zeros = self.physics.state, torch.zeros_like(noise[:, : len(self.low)])
        obs, _, _ = self.judge(state, zeros[:, 0], zeros)
        self.position.copy_(torch.where(ended, self.find_position(), self.position))
        if self.moves:  # float32 would lose the speed in a large x
            self.position -= state.qpos[:, 0]
            state.qpos[:, 0] = 0
        return obs

    def find_position(self) -> Tensor:
        """x (N,) in m of what is rewarded for moving: the centre of mass, the torso or the root."""
        s = self.physics.state
        if hasattr(s, "xipos"):
            return s.xipos[:, :, 0] @ self.mass / self.mass.sum()
        return s.xpos[:, 1, 0] if hasattr(s, "xpos") else s.qpos[:, 0]


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
    """Tanh-squashed Gaussian policy whose actions fill the box [low, high]."""

    def __init__(self, obs_dim: int, action_space: Box):
        super().__init__()
        self.network = mlp(obs_dim, 2 * action_space.shape[0])
        low, high = torch.tensor(action_space.low), torch.tensor(action_space.high)
        self.register_buffer("action_scale", ((high - low) / 2).float())
        self.register_buffer("action_bias", ((high + low) / 2).float())

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Reparameterized actions and their log-probabilities (paper, appendix C).

        obs (B, O), standard normal noise (B, A) -> actions (B, A), log_probs (B,). The squashing's
        log(1 - tanh(x)^2) is written 2 (log 2 - x - softplus(-2x)), finite for every x.
        """
        mean, log_std = self.network(obs).chunk(2, dim=-1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1)
        x = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_jacobian = 2 * (math.log(2) - x - F.softplus(-2 * x)) + self.action_scale.log()
        actions = torch.tanh(x) * self.action_scale + self.action_bias
        return actions, (log_normal - log_jacobian).sum(dim=-1)


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


def critic_loss(agent: "SAC", batch: Batch, noise: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Soft Bellman error of each Q-network (equation 5, doubled) -> losses (2,), values (2, B)."""
    with torch.no_grad():
        next_actions, next_log_probs = agent.actor.sample(batch.next_obs, noise)
        next_q = agent.qf_target(batch.next_obs, next_actions).amin(dim=0)  # (B,)
        next_values = next_q - agent.log_alpha.exp() * next_log_probs
        targets = batch.rewards + gamma * (1 - batch.terminated) * next_values
    values = agent.qf(batch.obs, batch.actions)
    return (values - targets).square().mean(dim=1), values


def actor_loss(agent: "SAC", obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Distance of the policy to Q's Boltzmann policy (equation 9) -> loss (), log_probs (B,)."""
    actions, log_probs = agent.actor.sample(obs, noise)
    values = agent.qf(obs, actions).amin(dim=0)
    return (agent.log_alpha.exp().detach() * log_probs - values).mean(), log_probs


def alpha_loss(log_alpha: Tensor, log_probs: Tensor, target_entropy: float) -> Tensor:
    """Dual objective of the entropy constraint (equation 18) -> loss ()."""
    return (-log_alpha.exp() * (log_probs.detach() + target_entropy)).mean()


def gradient_step(loss: Tensor, optimizer: Adam) -> None:
    """A step of `optimizer`; backward computes the gradients of its parameters and no others."""
    optimizer.zero_grad()
    loss.backward(inputs=optimizer.param_groups[0]["params"])
    optimizer.step()


class SAC(nn.Module):
    """Networks, optimizers and gradient steps, which return their metrics as one tensor."""

    def __init__(self, args: Args, obs_dim: int, action_space: Box, device: torch.device):
        super().__init__()
        action_dim = action_space.shape[0]
        self.args, self.target_entropy = args, -float(action_dim)
        self.actor = Actor(obs_dim, action_space)
        self.qf = TwinQ(mlp(obs_dim + action_dim, 1) for _ in range(2))
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)
        log_alpha = 0.0 if args.autotune else math.log(args.alpha)
        self.log_alpha = nn.Parameter(torch.tensor([log_alpha]))
        self.to(device)
        self.q_optimizer = Adam(self.qf.parameters(), lr=args.q_lr, fused=True)
        self.actor_optimizer = Adam(self.actor.parameters(), lr=args.policy_lr, fused=True)
        self.alpha_optimizer = Adam([self.log_alpha], lr=args.q_lr, fused=True)
        self.optimizers = self.q_optimizer, self.actor_optimizer, self.alpha_optimizer

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """obs (N, O), noise (N, A) -> actions (N, A)."""
        with torch.no_grad():
            return self.actor.sample(obs, noise)[0]

    def update_critic(self, batch: Batch, noise: Tensor) -> Tensor:
        """One step of both Q-networks -> the first METRICS (5,)."""
        losses, values = critic_loss(self, batch, noise, self.args.gamma)
        gradient_step(losses.sum(), self.q_optimizer)
        return torch.cat([losses, losses.mean(0, keepdim=True), values.mean(dim=1)]).detach()

    def update_actor(self, obs: Tensor, noise: Tensor) -> Tensor:
        """One step of the policy, then one of the temperature -> the other METRICS (4,)."""
        loss, log_probs = actor_loss(self, obs, noise)
        gradient_step(loss, self.actor_optimizer)
        temperature_loss = alpha_loss(self.log_alpha, log_probs, self.target_entropy)
        alpha = self.log_alpha.exp()[0]
        if self.args.autotune:
            gradient_step(temperature_loss, self.alpha_optimizer)
        return torch.stack([loss, temperature_loss, alpha, -log_probs.mean()]).detach()

    def update_target(self) -> None:
        """Polyak averaging of the target networks."""
        with torch.no_grad():
            pairs = zip(self.qf_target.parameters(), self.qf.parameters(), strict=True)
            for target, online in pairs:
                target.lerp_(online, self.args.tau)


def evaluate(agent: SAC, args: Args, video: Path | None) -> float:
    """Mean return of K of Gymnasium's own episodes from always the same starts, without noise."""
    makers = [lambda: gym.make(args.env_id)] * args.eval_episodes
    if video is not None:
        env = gym.make(args.env_id, render_mode="rgb_array")
        makers[0] = lambda: gym.wrappers.RecordVideo(env, str(video), lambda i: i == 0)
    envs = gym.vector.SyncVectorEnv(makers)
    noise = torch.zeros(envs.action_space.shape, device=agent.log_alpha.device)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.reset(seed=args.seed + 2**31)  # not the states of training
    while running.any():  # each has a time limit
        actions = SAC.act(agent, torch.as_tensor(obs).to(noise), noise)  # agent.act may be compiled
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += running * rewards
        running &= ~(terminated | truncated)
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

    envs = MuJoCoEnvs(args.env_id, args.num_envs, device, args.physics)
    obs_dim, action_space = envs.single_observation_space.shape[0], envs.single_action_space
    shape = args.num_envs, action_space.shape[0]  # of the actions of a step
    agent = SAC(args, obs_dim, action_space, device)
    rb = ReplayBuffer(args, obs_dim, shape[1], device)
    metrics, episodic_return = torch.zeros(len(METRICS), device=device), math.nan
    totals = torch.zeros(3, device=device)  # of episodes since the last row: return, length, count

    def update(batch: Batch, actor_due: bool, target_due: bool) -> None:
        metrics[:5] = agent.update_critic(batch, torch.randn_like(batch.actions))
        if actor_due:
            metrics[5:] = agent.update_actor(batch.obs, torch.randn_like(batch.actions))
        if target_due:
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
            with watch.stage("inference"):
                if global_step < args.learning_starts:
                    actions = envs.low + (envs.high - envs.low) * torch.rand(shape, device=device)
                else:
                    actions = agent.act(obs, torch.randn(shape, device=device))

            # 2. Learn from what the replay buffer holds.
            due_updates = int((global_step + args.num_envs - args.learning_starts) * args.utd_ratio)
            while global_step >= args.learning_starts and num_updates < due_updates:
                num_updates += 1
                with watch.stage("replay"):
                    batch = rb.sample()
                with watch.stage("backpropagation"):
                    actor_due = num_updates % args.policy_frequency == 0
                    update(batch, actor_due, num_updates % args.target_network_frequency == 0)

            # 3. Step the environments.
            with watch.stage("simulation"):
                next_obs, rewards, terminated, _, infos = envs.step(actions)

            # 4. Store. Where an episode ended, next_obs is already the next episode's first.
            with watch.stage("replay"):
                rb.add(obs, actions, infos["final_obs"], rewards, terminated)
                obs = next_obs
                known = infos["_episode"] & infos["episode"]["r"].isfinite()  # not the first ones
                of_each = *infos["episode"].values(), torch.ones_like(rewards)
                totals += torch.where(known, torch.stack(of_each), 0).sum(dim=1)
            global_step += args.num_envs

            # 5. Log.
            if due(LOG_EVERY * args.num_envs) or due(args.checkpoint_every):
                with watch.stage("backpropagation"):  # whose work this waits for
                    row = metrics.tolist()
                if not np.isfinite(row).all():
                    raise SystemExit(f"step {global_step:,}: losses are not finite: {row}")
            if due(LOG_EVERY * args.num_envs):
                with watch.stage("logging"):
                    returns, lengths, count = totals.tolist()
                    totals.zero_()
                    if count:
                        episodic_return = returns / count
                        writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                        writer.add_scalar("charts/episodic_length", lengths / count, global_step)
                    sps, steady_sps = watch.speed(global_step - start_step)
                    writer.add_scalar("charts/SPS", sps, global_step)
                    if steady_sps:
                        writer.add_scalar("charts/SPS_steady", steady_sps, global_step)
                        writer.add_scalar(
                            "charts/warmup_seconds", watch.warmup_seconds, global_step
                        )
                    for tag, value in zip(METRICS, row if num_updates else (), strict=False):
                        writer.add_scalar(f"losses/{tag}", value, global_step)
                    writer.add_scalar("charts/broken_worlds", envs.broken.item(), global_step)
                    overflows = envs.physics.overflow.count_nonzero().item()
                    writer.add_scalar("charts/overflows", overflows, global_step)
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
