"""PPO on thousands of MuJoCo worlds in one batch, with torch.compile and CUDA graphs.

    python leanrl/ppo_mujoco_gpu_torchcompile.py --compile --cudagraphs

The algorithm is that of its twin, ppo_mujoco_gpu.py, which says more; hunks that differ start with
`# speed:`, the rest is the same to the letter. The first rollouts pay for compilation.
"""

# speed: CudaGraphModule captures a function as a CUDA graph
import ast
import ctypes
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Literal, NamedTuple

import gymnasium as gym
import mujoco
import numpy as np
import torch
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
    total_timesteps: int = 5_000_000  # steps in all environments, rounded down to whole rollouts
    num_envs: int = 64  # environments stepped side by side
    num_steps: int = 64  # steps of a rollout in each environment
    learning_rate: float = 1e-3  # learning rate of the optimizer, at first
    anneal_lr: bool = True  # lower it from rollout to rollout, linearly to zero at the end
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 16  # minibatches per epoch
    update_epochs: int = 4  # passes over a rollout
    clip_coef: float = 0.2  # how far the ratio of new to old probabilities may go from 1
    ent_coef: float = 0.0  # weight of the entropy in the loss
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it

    # speed: each works alone, together and not at all
    compile: bool = False  # compile acting, judging the worlds, advantages and updates
    cudagraphs: bool = False  # replay them as CUDA graphs, around those of the physics


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
METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
STEADY_AFTER = 3  # rollouts, then compilation and capture are long over


def check_args(args: Args) -> None:
    """What a user gets wrong, in one line each; libraries' own errors say the rest."""
    may_be_zero = ("seed", "checkpoint_every", "eval_every", "learning_rate", "gamma", "gae_lambda")
    may_be_zero += ("ent_coef", "vf_coef")
    for name, x in asdict(args).items():
        if type(x) in (int, float) and not (0 < x < 1e12 or x == 0 and name in may_be_zero):
            raise SystemExit(f"--{name.replace('_', '-')}: {x} is out of range")
    if args.env_id not in TASKS:
        raise SystemExit(f"--env-id: {args.env_id} is none of {', '.join(TASKS)}")
    rollout = args.num_envs * args.num_steps
    if args.total_timesteps < rollout:
        raise SystemExit(f"--total-timesteps: less than one rollout of {rollout:,} steps")
    if rollout % args.num_minibatches or rollout == args.num_minibatches:
        raise SystemExit(f"--num-minibatches: does not divide {rollout:,} steps into two or more")
    # speed: no graphs without CUDA: a contradiction is refused, a missing device only mentioned
    if args.cudagraphs and not args.cuda:
        raise SystemExit("--cudagraphs: contradicts --no-cuda")
    if args.cudagraphs and not torch.cuda.is_available():
        print("--cudagraphs: no CUDA device, it has no effect", file=sys.stderr)


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


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64; weights are orthogonal at first, `gain` scales the last layer's."""
    layers = nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
    for layer, scale in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Batch(NamedTuple):
    """B steps of a rollout, float32; log_probs and values as they were when it was made."""

    obs: Tensor  # (B, O)
    actions: Tensor  # (B, A)
    log_probs: Tensor  # (B,)
    values: Tensor  # (B,)
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,)


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
        # wide noise at first throws HalfCheetah on its back, where it would learn to slide
        self.actor_logstd = nn.Parameter(torch.full((action_dim,), -1.0))
        self.eval()

    def observe(self, batch: Batch) -> None:
        """Takes a rollout into the statistics, which are otherwise left alone."""
        self.train()
        self.obs_norm(batch.obs), self.return_norm(batch.returns[:, None])
        self.eval()

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """obs (B, O) -> mean of the actions (B, A), their log deviation (A,), values (B,)."""
        inputs, returns = self.obs_norm(obs).clamp(-10, 10), self.return_norm
        values = self.critic(inputs) * returns.running_var.sqrt() + returns.running_mean
        return self.actor_mean(inputs), self.actor_logstd, values.squeeze(-1)


class Rollout(NamedTuple):
    """T steps of N environments on the device."""

    obs: Tensor  # (T, N, O)
    actions: Tensor  # (T, N, A)
    log_probs: Tensor  # (T, N)
    values: Tensor  # (T, N)
    rewards: Tensor  # (T, N)
    next_values: Tensor  # (T, N) of what follows in the same episode, 0 after a termination
    ended: Tensor  # (T, N) bool, of either kind
    episode_returns: Tensor  # (T, N) of the episode so far
    episode_lengths: Tensor  # (T, N) of the episode so far


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of actions (B, A) under a diagonal Gaussian -> (B,)."""
    z = (actions - mean) * (-log_std).exp()
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, ended: Tensor, gamma: float, lam: float
) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16) -> advantages (T, N).

    All (T, N). `next_values` is the value of what follows each step in its own episode: 0 after a
    termination, that of the final observation after a truncation. `ended` is 1 after either.
    """
    # speed: log2(T) vector operations instead of T: each doubles how far every sum has got
    advantages = rewards + gamma * next_values - values
    weights, distance = gamma * lam * (1 - ended), 1
    while distance < len(advantages):
        begin, end = advantages[:-distance], advantages[-distance:]
        more = weights[: len(begin)] * advantages[distance:]
        advantages = torch.cat([begin + more, end])
        weights, distance = weights[:-distance] * weights[distance:], 2 * distance
    return advantages


def policy_loss(log_ratios: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Clipped surrogate objective (equation 7), negated -> loss ()."""
    ratios = log_ratios.exp()
    clipped = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(advantages * ratios, advantages * clipped).mean()


def ppo_loss(model: ActorCritic, batch: Batch, args: Args) -> tuple[Tensor, Tensor]:
    """Loss of a minibatch (equation 9) -> loss (), METRICS (6,)."""
    mean, log_std, values = model(batch.obs)
    log_ratios = gaussian_log_prob(batch.actions, mean, log_std) - batch.log_probs
    advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    of_policy = policy_loss(log_ratios, advantages, args.clip_coef)
    of_value = 0.5 * (values - batch.returns).square().mean() / model.return_norm.running_var[0]
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = of_policy - args.ent_coef * entropy + args.vf_coef * of_value
    with torch.no_grad():
        ratios = log_ratios.exp()
        kl = -log_ratios.mean(), (ratios - 1 - log_ratios).mean()  # joschu.net/blog/kl-approx.html
        clipped = ((ratios - 1).abs() > args.clip_coef).float().mean()
        return loss, torch.stack([of_policy, of_value, entropy, *kl, clipped])


# speed: torch.compile cannot trace torch.optim.Adam; with this one a whole update is one compiled
# call. The powers of beta are state: from a step count, every weight would pay for a pow
class Adam:
    """Adam (Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1), all parameters in one call."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, betas=(0.9, 0.999), eps=1e-8):
        self.parameters, self.betas, self.eps = list(parameters), betas, eps
        self.exp_avgs = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.exp_avg_sqs = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.beta_powers = [torch.ones((), device=self.parameters[0].device) for _ in betas]
        self.lr = torch.tensor(lr, device=self.parameters[0].device)

    def state_dict(self) -> dict:
        return {"state": [*self.exp_avgs, *self.exp_avg_sqs, *self.beta_powers]}

    def load_state_dict(self, state: dict) -> None:
        torch._foreach_copy_(self.state_dict()["state"], state["state"])

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Updates the parameters in place; `gradients` in their order and shapes."""
        with torch.no_grad():
            beta1_power = self.beta_powers[0].mul_(self.betas[0])
            beta2_power = self.beta_powers[1].mul_(self.betas[1])
            torch._foreach_lerp_(self.exp_avgs, gradients, 1 - self.betas[0])
            torch._foreach_mul_(self.exp_avg_sqs, self.betas[1])
            torch._foreach_addcmul_(self.exp_avg_sqs, gradients, gradients, 1 - self.betas[1])
            denominators = torch._foreach_sqrt(self.exp_avg_sqs)
            torch._foreach_mul_(denominators, (1 - beta2_power).rsqrt())
            torch._foreach_add_(denominators, self.eps)
            steps = torch._foreach_div(self.exp_avgs, denominators)
            torch._foreach_mul_(steps, self.lr / (1 - beta1_power))
            torch._foreach_sub_(self.parameters, steps)


class PPO(nn.Module):
    """Network, optimizer and gradient steps, which return their metrics as one tensor."""

    def __init__(self, args: Args, obs_dim: int, action_dim: int, device: torch.device):
        super().__init__()
        self.args, self.model = args, ActorCritic(obs_dim, action_dim).to(device)
        # speed: the Adam above, which compiles and captures with the rest of an update
        self.optimizer = Adam(self.parameters(), lr=args.learning_rate, eps=1e-5)
        self.optimizers = (self.optimizer,)

    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """obs (N, O), normal noise (N, A) -> actions (N, A), log_probs (N,), values (N,)."""
        with torch.no_grad():
            mean, log_std, values = self.model(obs)
            actions = mean + log_std.exp() * noise
            return actions, gaussian_log_prob(actions, mean, log_std), values

    def value(self, obs: Tensor) -> Tensor:
        """obs (N, O) -> values (N,)."""
        with torch.no_grad():
            return self.model(obs)[2]

    def prepare(self, rollout: Rollout) -> Batch:
        """A rollout -> B = T N steps to learn from."""
        estimates = rollout.rewards, rollout.values, rollout.next_values, rollout.ended.float()
        advantages = compute_gae(*estimates, self.args.gamma, self.args.gae_lambda)
        columns = *rollout[:4], advantages, advantages + rollout.values
        return Batch(*(x.flatten(0, 1) for x in columns))

    def update(self, batch: Batch, index: Tensor) -> Tensor:
        """One gradient step on the rows in index (B,) -> METRICS (6,)."""
        loss, metrics = ppo_loss(self.model, Batch(*(x[index] for x in batch)), self.args)
        # speed: gradients as values, not as .grad: nothing to zero, nothing the compiler cannot see
        gradients = torch.autograd.grad(loss, self.optimizer.parameters)
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        scale = (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        self.optimizer.step(torch._foreach_mul(gradients, scale))
        return metrics

    def learn(self, batch: Batch, order: Tensor) -> Tensor:
        """An epoch of minibatches in the order of a permutation (B,) -> METRICS of each (M, 6)."""
        indices = order.view(self.args.num_minibatches, -1)
        return torch.stack([self.update(batch, index) for index in indices])


# speed: acting, values, advantages and an update, optimizer included, become one graph each
def compile_agent(agent: PPO) -> None:
    """Each method is compiled when it is first called."""
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in compiled code
    torch._inductor.config.reorder_for_locality = False  # True moves reads past writes (torch 2.11)
    torch._inductor.config.cpp.vec_isa_ok = True  # to try the CPU's vectors first takes 4 seconds
    torch._inductor.config.cpp.use_decompose_tanh = True  # by exp, which is vectorized better
    # no guards, which ask at each call whether the code still fits: each agent has code of its own
    for name in ("act", "value", "prepare", "update"):
        method = getattr(type(agent), name)
        own = MethodType(FunctionType(method.__code__.replace(), globals()), agent)
        no_guards = {"guard_filter_fn": lambda guards: [False] * len(guards)}  # it gets emptied
        setattr(agent, name, torch.compile(own, fullgraph=True, options=no_guards))


def evaluate(agent: PPO, args: Args, video: Path | None) -> float:
    """Mean return of K of Gymnasium's own episodes from always the same starts, without noise."""
    makers = [lambda: gym.make(args.env_id)] * args.eval_episodes
    if video is not None:
        env = gym.make(args.env_id, render_mode="rgb_array")
        makers[0] = lambda: gym.wrappers.RecordVideo(env, str(video), lambda i: i == 0)
    envs = gym.vector.SyncVectorEnv(makers)
    noise = torch.zeros(envs.action_space.shape, device=agent.model.actor_logstd.device)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    obs, _ = envs.reset(seed=args.seed + 2**31)  # not the states of training
    while running.any():  # each has a time limit
        actions, _, _ = PPO.act(agent, torch.as_tensor(obs).to(noise), noise)
        actions = actions.cpu().numpy().clip(envs.action_space.low, envs.action_space.high)
        obs, rewards, terminated, truncated, _ = envs.step(actions)
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
    batch_size = args.num_envs * args.num_steps
    total_timesteps = args.total_timesteps // batch_size * batch_size
    if start_step >= total_timesteps:
        raise SystemExit(f"--resume: nothing left to do, {start_step:,} steps are done")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    warmup_steps = STEADY_AFTER * batch_size
    watch = Stopwatch(device, args.stopwatch, warmup_steps, trace_after=3, trace_iterations=1)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic

    envs = MuJoCoEnvs(args.env_id, args.num_envs, device, args.physics)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent, episodic_return = PPO(args, obs_dim, action_dim, device), math.nan

    # speed: the loop does not know what is compiled or captured; a third call captures a graph
    if args.compile:
        torch.set_num_threads(1)  # layers of 64 are too small to share
        compile_agent(agent)
        envs.settle = torch.compile(envs.settle, fullgraph=True)
    if args.cudagraphs and device.type == "cuda":
        agent.act = CudaGraphModule(agent.act, warmup=3)
        agent.value = CudaGraphModule(agent.value, warmup=3)
        envs.settle = CudaGraphModule(envs.settle, warmup=3)
        agent.learn = CudaGraphModule(agent.learn, warmup=3)

    if checkpoint:
        agent.load_state_dict(checkpoint["agent"])
        for optimizer, state in zip(agent.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})  # rates are flags
        torch.set_rng_state(checkpoint["generators"][0])
        torch.cuda.set_rng_state_all(checkpoint["generators"][1][: torch.cuda.device_count()])
        print(f"resumed at step {start_step:,}, with fresh episodes", file=sys.stderr)
    obs, _ = envs.reset(seed=args.seed + start_step)

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
    bar = tqdm.tqdm(total=total_timesteps, initial=start_step, unit="step")

    def due(every: int) -> bool:
        """Whether this iteration passed a multiple of so many steps or ends the run; 0: never."""
        last = global_step >= total_timesteps
        return every > 0 and (last or global_step % every < batch_size)

    try:
        while global_step < total_timesteps:
            share_done = global_step / total_timesteps if args.anneal_lr else 0
            learning_rate = args.learning_rate * (1 - share_done)
            # speed: in place, where compiled code and graphs read it
            agent.optimizer.lr.fill_(learning_rate)

            # 1. Roll out: T steps with the policy as it is.
            shape, rows = (args.num_steps, args.num_envs), []
            noise = torch.randn(*shape, action_dim, device=device)
            starts = envs.draw(*shape)
            for t in range(args.num_steps):
                with watch.stage("inference"):
                    actions, log_probs, values = agent.act(obs, noise[t])
                with watch.stage("simulation"):
                    next_obs, rewards, terminated, _, infos = envs.step(actions, starts[t])
                with watch.stage("inference"):
                    next_values = agent.value(infos["final_obs"]) * ~terminated
                row = obs, actions, log_probs, values, rewards, next_values
                rows.append((*row, infos["_episode"], *infos["episode"].values()))
                obs = next_obs  # where an episode ended, already the next episode's first
            with watch.stage("replay"):
                rollout = Rollout(*map(torch.stack, zip(*rows, strict=True)))
            global_step += batch_size

            # 2. Learn from it in several epochs.
            with watch.stage("backpropagation"):
                batch, metrics = agent.prepare(rollout), []
                for _ in range(args.update_epochs):
                    metrics.append(agent.learn(batch, torch.randperm(batch_size, device=device)))
                agent.model.observe(batch)
                losses = *metrics[-1][-1, :-1], torch.cat(metrics)[:, -1].mean()  # clipfrac of all
                explained = 1 - (batch.returns - batch.values).var() / batch.returns.var()
                known = rollout.ended & rollout.episode_returns.isfinite()  # not the first ones
                of_ended = torch.stack(rollout[-2:]).where(known, math.nan).nanmean(dim=(1, 2))
                overflows = envs.physics.overflow.count_nonzero()  # worlds once at a limit
                numbers = torch.stack([*losses, explained, *of_ended, envs.broken, overflows])
                *losses, explained, returns, length, broken, overflows = numbers.tolist()  # waits

            # 3. Log.
            with watch.stage("logging"):
                if not np.isfinite(losses).all():
                    raise SystemExit(f"step {global_step:,}: losses are not finite: {losses}")
                sps, steady_sps = watch.speed(global_step - start_step)
                writer.add_scalar("charts/SPS", sps, global_step)
                if steady_sps:
                    writer.add_scalar("charts/SPS_steady", steady_sps, global_step)
                    writer.add_scalar("charts/warmup_seconds", watch.warmup_seconds, global_step)
                writer.add_scalar("charts/learning_rate", learning_rate, global_step)
                writer.add_scalar("losses/explained_variance", explained, global_step)
                for tag, value in zip(METRICS, losses, strict=True):
                    writer.add_scalar(f"losses/{tag}", value, global_step)
                if not math.isnan(returns):
                    episodic_return = returns
                    writer.add_scalar("charts/episodic_return", episodic_return, global_step)
                    writer.add_scalar("charts/episodic_length", length, global_step)
                writer.add_scalar("charts/broken_worlds", broken, global_step)
                writer.add_scalar("charts/overflows", overflows, global_step)
                bar.set_postfix_str(f"return {episodic_return:,.1f}", refresh=False)
                bar.update(global_step - bar.n)

            # 4. Save and evaluate, now and then and at the end.
            last = global_step >= total_timesteps
            if due(args.checkpoint_every) or args.save_model and last:
                with watch.stage("checkpoint"):
                    save(run_dir / "checkpoint.pt", agent, global_step)
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
