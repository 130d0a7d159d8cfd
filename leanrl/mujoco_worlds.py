"""MuJoCo's worlds: N copies of a robot's task in one batch, as a vector environment of tensors.

    import gymnasium as gym
    import mujoco_worlds  # registers worlds/HalfCheetah-v5 and ten more

    envs = gym.make_vec("worlds/HalfCheetah-v5", num_envs=64, device="cpu")
    obs, _ = envs.reset(seed=1)  # (N, O)
    obs, rewards, terminated, truncated, infos = envs.step(actions)  # (N, A), a tensor or NumPy's

Physics is MuJoCo's C engine in threads on a CPU and mujoco_warp on a GPU. Observations, rewards and
terminations are functions of its state, written for all worlds at once: a Task. The eleven below
are those of Gymnasium's environments; `register` adds your own, which can also be made one at a
time by `gym.make`. Shapes: N worlds, O observation, A action.
"""

import ast
import gc
import math
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import mujoco.batch
import numpy as np
import torch
from gymnasium.envs import mujoco as gymnasium_mujoco
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space

# Tasks


def join(*fields):
    """Fields (N, ...) side by side -> (N, .)."""
    columns = [x.flatten(1) for x in fields]
    return torch.cat(columns, dim=1)


def sum_squares(x):
    """x (N, ...) -> (N,)."""
    return x.square().flatten(1).sum(1)


def uniform_like(x, generator):
    return torch.empty_like(x).uniform_(-1, 1, generator=generator)


def normal_like(x, generator):
    return torch.empty_like(x).normal_(generator=generator)


class Task:
    """What a robot is to do. All methods are of N worlds at once, whose state is `s`:

    s.qpos (N, nq), s.qvel (N, nv), and the fields of mujoco.MjData (N, ...) that `reads` names, as
    in Gymnasium of where the last substep began (by RK4: nearly of the new state); s.actions
    (N, A), the last ones; s.steps (N,), of the episode so far; s.speed (N,), in m/s, of `position`;
    in `reward` also s.terminated (N,); and what `memory` names. Actions, speed and, unless it is
    staggered, steps are 0 where an episode begins.

    `memory` is {name: width} of tensors (N, width) that last from step to step, zeros at first,
    after reset(seed=...), any reset of gym.make's, in a resumed run and in a world that broke. Two
    names are MuJoCo's: xfrc_applied and qfrc_applied are forces that act in the next step; an
    episode begins without.
    """

    model: str  # an MJCF file beside the task's own, or one of Gymnasium's
    frame_skip = 1  # steps of MuJoCo per step of the environment
    max_steps = 1000  # of an episode, which is truncated then
    reads = ()  # fields of mujoco.MjData, besides qpos and qvel
    memory = {}  # what lasts from step to step
    noise = 0.0  # of qpos and qvel where an episode begins: uniform, up to that much
    normal_velocities = False  # its noise of qvel is normal instead

    def start(self, qpos, qvel, generator):
        """Where episodes begin: adds noise, in place, to the usual qpos (..., nq), qvel (..., nv).

        `generator` is the environment's torch.Generator, here and below.
        """
        qpos += self.noise * uniform_like(qpos, generator)
        velocity_like = normal_like if self.normal_velocities else uniform_like
        qvel += self.noise * velocity_like(qvel, generator)

    def position(self, s):
        """x in m (N,) of what has the speed."""
        return s.qpos[:, 0]

    def observe(self, s):
        """Observations (N, O), or two: what the policy sees, and what its critic sees besides."""
        raise NotImplementedError

    def reward(self, s):
        """Rewards (N,)."""
        raise NotImplementedError

    def terminated(self, s):
        """True (N,) where an episode ends for good."""
        return torch.zeros_like(s.terminated)

    def begin(self, s, mask, generator):
        """Changes the memory where an episode begins, by `mask` (N,); `s` is still the last one."""

    def advance(self, s, generator):
        """Changes the memory after a step was rewarded and before it is observed."""


class HalfCheetah(Task):
    model = "half_cheetah.xml"
    frame_skip = 5
    noise = 0.1
    normal_velocities = True

    def observe(self, s):
        return join(s.qpos[:, 1:], s.qvel)

    def reward(self, s):
        return s.speed - 0.1 * sum_squares(s.actions)


class Hopper(Task):
    model = "hopper.xml"
    frame_skip = 4
    noise = 0.005

    def observe(self, s):
        return join(s.qpos[:, 1:], s.qvel.clamp(-10, 10))

    def reward(self, s):
        return s.speed + ~s.terminated - 1e-3 * sum_squares(s.actions)

    def terminated(self, s):
        _, height, angle, *_ = s.qpos.unbind(1)
        others = join(s.qpos[:, 2:], s.qvel)
        upright = (height > 0.7) & (angle.abs() < 0.2)
        return ~(upright & (others.abs() < 100).all(1))


class Walker2d(Hopper):
    model = "walker2d_v5.xml"

    def terminated(self, s):
        _, height, angle, *_ = s.qpos.unbind(1)
        return (height <= 0.8) | (height >= 2) | (angle.abs() >= 1)


class Swimmer(Task):
    model = "swimmer.xml"
    frame_skip = 4
    noise = 0.1

    def observe(self, s):
        return join(s.qpos[:, 2:], s.qvel)

    def reward(self, s):
        return s.speed - 1e-4 * sum_squares(s.actions)


class Ant(Task):
    model = "ant.xml"
    frame_skip = 5
    reads = ("xpos", "cfrc_ext")
    noise = 0.1
    normal_velocities = True

    def position(self, s):
        return s.xpos[:, 1, 0]  # of the torso

    def observe(self, s):
        forces = s.cfrc_ext[:, 1:]  # (N, bodies, 6), of which the first is the world
        return join(s.qpos[:, 2:], s.qvel, forces.clamp(-1, 1))

    def reward(self, s):
        costs = 0.5 * sum_squares(s.actions) + 5e-4 * sum_squares(s.cfrc_ext.clamp(-1, 1))
        return s.speed + ~s.terminated - costs

    def terminated(self, s):
        height = s.qpos[:, 2]
        return (height < 0.2) | (height > 1)


class Humanoid(Task):
    model = "humanoid.xml"
    frame_skip = 5
    reads = ("subtree_com", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    noise = 0.01

    def position(self, s):
        return s.subtree_com[:, 1, 0]

    def observe(self, s):
        return join(
            s.qpos[:, 2:],
            s.qvel,
            s.cinert[:, 1:],
            s.cvel[:, 1:],
            s.qfrc_actuator[:, 6:],
            s.cfrc_ext[:, 1:],
        )

    def costs(self, s):
        contact_costs = 5e-7 * sum_squares(s.cfrc_ext)
        return 0.1 * sum_squares(s.actions) + contact_costs.clamp(max=10)

    def reward(self, s):
        return 1.25 * s.speed + 5 * ~s.terminated - self.costs(s)

    def terminated(self, s):
        height = s.qpos[:, 2]
        return (height <= 1) | (height >= 2)


class HumanoidStandup(Humanoid):
    model = "humanoidstandup.xml"
    terminated = Task.terminated

    def reward(self, s):
        return s.qpos[:, 2] / 0.003 + 1 - self.costs(s)  # Gymnasium divides by a substep


class InvertedPendulum(Task):
    model = "inverted_pendulum.xml"
    frame_skip = 2
    noise = 0.01

    def observe(self, s):
        return join(s.qpos, s.qvel)

    def reward(self, s):
        return ~s.terminated

    def terminated(self, s):
        return s.qpos[:, 1].abs() > 0.2


class InvertedDoublePendulum(Task):
    model = "inverted_double_pendulum.xml"
    frame_skip = 5
    reads = ("site_xpos", "qfrc_constraint")
    noise = 0.1
    normal_velocities = True

    def observe(self, s):
        x_of_cart, angles = s.qpos.tensor_split([1], dim=1)
        others = join(s.qvel, s.qfrc_constraint[:, :1])
        return join(x_of_cart, angles.sin(), angles.cos(), others.clamp(-10, 10))

    def reward(self, s):
        x, _, y = s.site_xpos[:, 0].unbind(1)  # of the tip
        _, lower, upper = s.qvel.unbind(1)
        costs = 0.01 * x.square() + (y - 2).square()
        costs = costs + 1e-3 * lower.square() + 5e-3 * upper.square()
        return 10 * ~s.terminated - costs

    def terminated(self, s):
        return s.site_xpos[:, 0, 2] <= 1


class Reacher(Task):
    model = "reacher.xml"
    frame_skip = 2
    max_steps = 50
    reads = ("xpos",)

    def start(self, qpos, qvel, generator):
        qpos += 0.1 * uniform_like(qpos, generator)
        qvel += 0.005 * uniform_like(qvel, generator)
        angle, area = uniform_like(qpos[..., :2], generator).unbind(-1)
        angle *= math.pi
        radius = 0.2 * area.abs().sqrt()  # uniform in a disk
        qpos[..., 2] = radius * angle.cos()
        qpos[..., 3] = radius * angle.sin()
        qvel[..., 2:] = 0

    def offset(self, s):
        return s.xpos[:, 3] - s.xpos[:, 4]  # of the fingertip from the target

    def observe(self, s):
        angles, target = s.qpos.split(2, dim=1)
        offset = self.offset(s)[:, :2]
        return join(angles.cos(), angles.sin(), target, s.qvel[:, :2], offset)

    def reward(self, s):
        return -self.offset(s).norm(dim=1) - sum_squares(s.actions)


class Pusher(Task):
    model = "pusher_v5.xml"
    frame_skip = 5
    max_steps = 100
    reads = ("xpos",)

    def start(self, qpos, qvel, generator):
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

    def observe(self, s):
        return join(s.qpos[:, :7], s.qvel[:, :7], s.xpos[:, -3:])

    def reward(self, s):
        tips, cylinder, goal = s.xpos[:, -3:].unbind(1)
        to_tips = (cylinder - tips).norm(dim=1)
        to_goal = (cylinder - goal).norm(dim=1)
        return -to_goal - 0.1 * sum_squares(s.actions) - 0.5 * to_tips


# Physics


def load_spec(task):
    """What the task's MjModel is compiled from."""
    owners = [kind for kind in type(task).__mro__ if "model" in vars(kind)]
    module = sys.modules[(owners or [type(task)])[0].__module__]
    path = Path(getattr(module, "__file__", ".")).parent / task.model
    gymnasiums = Path(gymnasium_mujoco.__file__).parent / "assets" / task.model
    if gymnasiums.exists() and not path.exists():
        path = gymnasiums
    return mujoco.MjSpec.from_file(str(path))


COUPLED = {"body_mass": ["body_inertia"], "actuator_gainprm": ["actuator_biasprm"]}


def draw_factors(model, num_envs, randomize, seed):
    """Factors for fields of the model: {name: (N, ...)}. `randomize` is MuJoCoWorlds's."""
    if not isinstance(randomize, dict):
        span = 1 - randomize, 1 + randomize
        randomize = dict.fromkeys(("body_mass", "geom_friction", "actuator_gainprm"), span)
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for name, (low, high) in randomize.items():
        if not isinstance(getattr(model, name, None), np.ndarray):
            raise ValueError(f"randomize: {name} is no field of mujoco.MjModel")
        # A contact takes the larger friction of its two geoms: all of a world have one factor
        rows = 1 if name == "geom_friction" else len(getattr(model, name))
        uniform = torch.rand(num_envs, rows, generator=generator, dtype=torch.float64)
        for each in (name, *COUPLED.get(name, ())):
            more = (1,) * (getattr(model, each).ndim - 1)
            factors[each] = (low + (high - low) * uniform).view(num_envs, rows, *more)
    return factors


# Fields of mujoco.MjData that a step leaves out: mj_rnePostConstraint computes them afterwards
FORCES = {"cacc", "cfrc_int", "cfrc_ext"}
CALLBACKS = "mjcb_passive mjcb_control mjcb_contactfilter mjcb_sensor".split()
CALLBACKS += "mjcb_act_bias mjcb_act_dyn mjcb_act_gain".split()
# Fields that a task may set, by its memory
INPUTS = {"xfrc_applied", "qfrc_applied"}


def add_sensor(spec):
    """One that needs FORCES, so that MuJoCo computes them within `forward`, in its threads."""
    kind = mujoco.mjtSensor.mjSENS_FRAMELINACC
    spec.add_sensor(type=kind, objtype=mujoco.mjtObj.mjOBJ_XBODY, objname="world")
    spec.option.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_SENSOR)


class CPhysics:
    """N worlds in mujoco.batch, MuJoCo's C engine in threads: on the CPU, in float64.

    `state` has the fields of mujoco.MjData that are read, as tensors (N, ...) on `device`. If
    `fresh`, all are of the new state; FORCES then need `add_sensor`. Fields of the model in
    `factors` are multiplied by them, (N, ...), for each world.
    """

    def __init__(self, model, task, frame_skip, fresh, num_envs, device, factors, num_threads):
        self.model = model
        self.frame_skip = frame_skip
        self.fresh = fresh
        self.stage = mujoco.mjtStage.mjSTAGE_ACC if fresh else mujoco.mjtStage.mjSTAGE_NONE
        # MuJoCo would reset a world that is NaN by itself, and nobody would see it. Islands are
        # parts that could be solved apart: a robot is one part, so to search for them gains nothing
        disable = mujoco.mjtDisableBit
        model.opt.disableflags |= disable.mjDSBL_AUTORESET | disable.mjDSBL_ISLAND
        # Python's mujoco installs a clock that every part of a step would read
        kept = {name: getattr(mujoco, f"get_{name}")() for name in CALLBACKS}
        mujoco.mj_resetCallbacks()
        for name, callback in kept.items():
            getattr(mujoco, f"set_{name}")(callback)
        # An MjData of its own keeps a world's contacts, which mj_rnePostConstraint needs
        self.forces = FORCES.intersection(task.reads)
        if num_threads == 0 and hasattr(os, "sched_getaffinity"):  # Linux's
            num_threads = len(os.sched_getaffinity(0))  # cores that this process may use
        self.batch = mujoco.batch.Batch(model, num_envs, num_threads, persistent=bool(self.forces))
        for name, factor in factors.items():
            self.batch.expand(name)[:] *= factor.numpy()
        if factors:
            self.batch.set_const()
        self.data = mujoco.MjData(model)
        self.inputs = INPUTS.intersection(task.memory)
        self.state = SimpleNamespace()
        self.copies = []
        for name in ("qpos", "qvel", *task.reads):
            array = self.batch.bind(name)
            array.flags.writeable = True  # forces are written; of the rest PyTorch would warn
            array = torch.from_numpy(array)
            field = torch.zeros_like(array, dtype=torch.float32, device=device)
            self.copies.append((field, array))
            setattr(self.state, name, field)

    def step(self):
        """frame_skip substeps under state.actions (N, A)."""
        self.batch.ctrl[:] = self.state.actions.cpu()
        for name in self.inputs:
            array = self.batch.bind(name)
            array[:] = getattr(self.state, name).cpu().view(array.shape)
        self.batch.step(nstep=self.frame_skip, stage=self.stage)
        if self.forces and not self.fresh:
            for i in range(self.batch.nsim):
                self.batch.get_data(i, self.data)
                mujoco.mj_rnePostConstraint(self.model, self.data)
                for name in self.forces:
                    self.batch.bind(name)[i] = getattr(self.data, name)
        self.copy()

    def begin(self, ended, qpos, qvel):
        """Begins episodes where `ended` (N,), at these positions and velocities (N, .)."""
        ids = ended.nonzero()[:, 0].cpu()
        self.batch.reset(ids, stage=mujoco.mjtStage.mjSTAGE_NONE)
        self.batch.qpos[ids] = qpos[ids].cpu()
        self.batch.qvel[ids] = qvel[ids].cpu()
        self.batch.forward(ids)
        for name in self.forces:
            self.batch.bind(name)[ids] = 0  # as in Gymnasium, where an episode begins
        self.copy()

    def copy(self):
        """Fields to `state`, in float32 on the device."""
        for field, array in self.copies:
            field.copy_(array)


# Where an episode begins, kinematics suffice for these; FORCES are 0 there. A task that reads
# anything else needs all of `forward`
QUICK = FORCES | {"xpos", "xquat", "xmat", "xipos", "ximat"}
QUICK |= {"geom_xpos", "geom_xmat", "site_xpos", "site_xmat"}
# What set_const derives from the masses, and from sizes
DERIVED = {"body_subtreemass", "body_invweight0", "dof_invweight0", "tendon_invweight0"}
DERIVED |= {"actuator_acc0"}
BOUNDS = {"geom_rbound", "geom_aabb"}


class WarpPhysics:
    """The same in mujoco_warp: on `device`, in float32, each step a launch of a graph of Warp's.

    Each world has room for about nconmax contacts and for njmax constraints.
    """

    def __init__(self, model, task, frame_skip, fresh, num_envs, device, factors, nconmax, njmax):
        import mujoco_warp as mjw
        import warp as wp

        # The humanoids ask for PGS, which Warp lacks
        if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
            model.opt.iterations = 100
        if mjw.__version__ == "4.0.0":
            # Within 30 degrees of the normal of the ground it takes other directions of friction
            # than C for a capsule, Ant's feet; its velocities would differ in the first decimal
            capsule = mjw._src.collision_primitive_core.plane_capsule.adj
            capsule.source = capsule.source.replace("b_norm < 0.5", "b_norm < 1e-6")
            capsule.tree = ast.parse(capsule.source)
        with wp.ScopedDevice(str(device)):
            self.data = mjw.make_data(model, nworld=num_envs, nconmax=nconmax, njmax=njmax)
            # Of these fields each world has its own, all others are one for all
            names = [*factors, *DERIVED] if factors else []
            names += BOUNDS if "geom_size" in factors else []
            rows = dict.fromkeys(names, num_envs)
            # Kept, because CUDA's graphs do not keep its arrays
            self.model = mjw.put_model(model, batch_sizes=rows)
            self.model.opt.warn_overflow = 0  # kernels would print; MuJoCoWorlds warns
            for name, factor in factors.items():
                field = wp.to_torch(getattr(self.model, name))  # no copy
                field *= factor.to(field)
            if factors:
                mjw.set_const(self.model, self.data)
            mask = wp.zeros(num_envs, dtype=bool)
            self.mask = wp.to_torch(mask)

            def run(functions):
                for function in functions:
                    function(self.model, self.data)

            def capture(*functions):
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

            steps = [mjw.step] * frame_skip
            if fresh:
                steps.append(mjw.forward)
            forces = FORCES.intersection(task.reads)
            if forces:
                steps.append(mjw.rne_postconstraint)
            self.simulate = capture(*steps)
            self.clear = capture(partial(mjw.reset_data, reset=mask))
            quick = QUICK.issuperset(task.reads)
            self.refresh = capture(mjw.kinematics if quick else mjw.forward)
        self.ctrl = wp.to_torch(self.data.ctrl)  # no copies
        # (N,), bits: of what lacked room, and of solvers that stopped early, which no room helps
        self.overflow = wp.to_torch(self.data.overflow)
        kinds = mjw.OverflowType
        room = kinds.NEFC | kinds.NJMAX_NNZ | kinds.BROADPHASE | kinds.NARROWPHASE
        self.room_bits = int(room)
        self.overflowed = torch.zeros_like(self.overflow)  # in any episode
        inputs = INPUTS.intersection(task.memory)
        self.inputs = {name: wp.to_torch(getattr(self.data, name)) for name in inputs}
        self.state = SimpleNamespace()
        data = mujoco.MjData(model)
        for name in ("qpos", "qvel", *task.reads):
            field = wp.to_torch(getattr(self.data, name))
            shape = np.shape(getattr(data, name))  # matrices are flat in MjData
            setattr(self.state, name, field.view(num_envs, *shape))
        self.forces = [getattr(self.state, name) for name in forces]

    def step(self):
        self.ctrl.copy_(self.state.actions)
        for name, field in self.inputs.items():
            field.copy_(getattr(self.state, name).view(field.shape))
        self.simulate()
        self.overflowed |= self.overflow

    def begin(self, ended, qpos, qvel):
        self.mask.copy_(ended)
        self.clear()
        self.place(ended, qpos, qvel)
        self.refresh()

    def place(self, ended, qpos, qvel):
        """Sets the state where `ended` (N,); on the device alone, so that a graph may hold it."""
        rows = ended[:, None]
        state = self.state
        state.qpos.copy_(qpos.where(rows, state.qpos))
        state.qvel.copy_(qvel.where(rows, state.qvel))
        for field in self.forces:
            field.masked_fill_(rows[:, :, None], 0)


# Environments


class MuJoCoWorlds(gym.vector.VectorEnv):
    """N worlds of a task in one batch, in float32 on `device`.

    An episode that ends begins anew in the same step. infos["final_obs"] (N, O) is what the step
    has led to, infos["episode"] return `r` and length `l` so far (N,), infos["_episode"] is True
    where it ended. A world whose observation or reward is not finite, or beyond a million,
    terminates with reward 0, its final_obs is 0, and `broken` counts it. A policy sees the first
    actor_dim numbers of obs; the rest is for its critic alone.

    physics: "c", "warp", or "auto": C on a CPU. euler_timestep: 0.005 is Euler's integrator in
    steps of 5 ms at most, faster than the RK4 of many models and less exact; 0: the model's own.
    randomize: 0.2 multiplies each world's masses, friction and actuators' strengths by factors of
    its own from 0.8 to 1.2, which are drawn by `seed`; {"body_mass": (0.5, 2.0)} those fields of
    mujoco.MjModel. num_threads: of C; 0: one per core. nconmax, njmax: Warp's room for contacts and
    constraints of a world.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    autoreset = True
    renderer = None

    def __init__(
        self,
        task,
        num_envs,
        device="cpu",
        physics="auto",
        euler_timestep=0.0,
        randomize=0.0,
        seed=0,
        num_threads=0,
        nconmax=None,
        njmax=None,
        max_episode_steps=None,
    ):
        if physics not in ("auto", "c", "warp"):
            raise ValueError(f"physics: {physics!r} is none of auto, c, warp")
        if euler_timestep < 0:
            raise ValueError(f"euler_timestep: {euler_timestep} is below 0")
        self.task = task
        self.num_envs = num_envs
        self.max_steps = max_episode_steps or task.max_steps
        spec = load_spec(task)
        self.dt = spec.option.timestep * task.frame_skip
        frame_skip = task.frame_skip
        fresh = False
        if euler_timestep:
            # After RK4, as in evaluations, what a task reads is nearly of the new state, but after
            # Euler's of where the last substep began
            had_rk4 = spec.option.integrator == mujoco.mjtIntegrator.mjINT_RK4
            fresh = had_rk4 and bool(task.reads)
            frame_skip = math.ceil(self.dt / euler_timestep - 1e-9)  # 0.3 / 0.1 is inexact
            spec.option.integrator = mujoco.mjtIntegrator.mjINT_EULER
            spec.option.timestep = self.dt / frame_skip
        device = torch.device(device)
        self.on_warp = physics == "warp" or physics == "auto" and device.type == "cuda"
        if fresh and FORCES.intersection(task.reads) and not self.on_warp:
            add_sensor(spec)
        self.model = spec.compile()
        if not self.model.actuator_ctrllimited.all():
            raise ValueError(f"model: {task.model} has an actuator without a ctrlrange")
        factors = draw_factors(self.model, num_envs, randomize, seed) if randomize else {}
        worlds = self.model, task, frame_skip, fresh, num_envs, device, factors
        if self.on_warp:
            self.physics = WarpPhysics(*worlds, nconmax, njmax)
        else:
            self.physics = CPhysics(*worlds, num_threads)

        def zeros(*shape):
            return torch.zeros(num_envs, *shape, device=device)

        def to_device(array):
            return torch.tensor(array, dtype=torch.float32, device=device)

        self.state = s = self.physics.state
        s.actions = zeros(self.model.nu)
        s.steps = zeros()
        s.speed = zeros()
        s.terminated = zeros().bool()
        for name, width in task.memory.items():
            setattr(s, name, zeros(width))
        self.position = zeros()
        self.returns = zeros()
        self.broken = torch.zeros((), device=device)
        self.count = 0  # of steps
        self.generator = torch.Generator(device).manual_seed(seed)
        self.starts = []
        self.qpos = to_device(self.model.qpos0)
        self.qvel = torch.zeros(self.model.nv, device=device)
        low, high = self.model.actuator_ctrlrange.T.astype(np.float32)
        self.low = to_device(low)
        self.high = to_device(high)
        obs = self.look()
        self.actor_dim = self.views()[0].shape[1]
        self.advances = type(task).advance is not Task.advance
        self.single_action_space = Box(low, high)
        self.single_observation_space = Box(-math.inf, math.inf, obs.shape[1:])
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, *, seed=None, options=None):
        """Begins all episodes -> obs (N, O), {}. What is drawn from now on is decided by `seed`.

        Options: reset_mask (N,) says which episodes begin. With stagger they begin late, each
        world at another step, so that they do not all end at once; the return of these is NaN.
        """
        options = options or {}
        s = self.state
        mask = torch.as_tensor(options.get("reset_mask", True), device=s.steps.device)
        mask = mask.expand(self.num_envs).contiguous()  # as those of a step: one compilation
        if seed is not None:
            self.generator.manual_seed(seed)
            self.starts = []
            self.clear(self.task.memory, mask)
        self.begin(mask)
        self.first_obs(mask, self.look())
        if options.get("stagger"):
            worlds = torch.arange(self.num_envs, device=mask.device)
            late = worlds * self.max_steps // self.num_envs
            s.steps.copy_(late.where(mask, s.steps))
            self.returns.masked_fill_(mask & (late > 0), math.nan)
        return self.look(), {}

    def step(self, actions):
        """Actions (N, A), clipped to their space -> obs, rewards, terminated, truncated, infos."""
        s = self.state
        actions = torch.as_tensor(actions, dtype=torch.float32, device=s.actions.device)
        if actions.shape != s.actions.shape:
            raise ValueError(f"actions: {tuple(actions.shape)} is not {tuple(s.actions.shape)}")
        s.actions.copy_(actions.clamp(self.low, self.high))
        self.physics.step()
        if self.advances:
            rewards = self.judge()
            self.task.advance(s, self.generator)
            rewards, terminated, truncated, infos = self.conclude(rewards)
        else:
            rewards, terminated, truncated, infos = self.settle()
        ended = infos["_episode"]
        obs = infos["final_obs"]
        if self.autoreset and (self.on_warp or ended.any()):
            self.begin(ended)
            obs = self.first_obs(ended, obs)
        else:
            obs = obs.clone()
        self.count += 1
        # After steps 1, 2, 4, 8 and so on: to read it waits for the device
        if self.count & (self.count - 1) == 0 and self.overflows():
            warnings.warn("nconmax, njmax: there is no room for some contacts", stacklevel=2)
        return obs, rewards, terminated, truncated, infos

    def settle(self):
        """What a step of the physics has led to: rewards, terminated, truncated (N,), infos."""
        return self.conclude(self.judge())

    def judge(self):
        """Rewards (N,)."""
        s = self.state
        position = self.task.position(s)
        s.speed.copy_((position - self.position) / self.dt)
        s.steps.add_(1)
        self.position.copy_(position)
        s.terminated.copy_(self.task.terminated(s))
        return self.task.reward(s).float()

    def conclude(self, rewards):
        """What follows `judge`; a part of its own where a task has `advance` in between."""
        s = self.state
        obs = self.look()
        # Before a world is NaN its numbers are huge, and one would spoil all statistics
        sane = (obs.abs() < 1e6).all(1) & (rewards.abs() < 1e6)
        obs = obs.where(sane[:, None], 0)
        rewards = rewards.where(sane, 0)
        self.clear(self.task.memory, ~sane)
        terminated = ~sane | s.terminated
        truncated = s.steps >= self.max_steps
        ended = terminated | truncated
        self.broken += (~sane).sum()
        self.returns += rewards
        infos = {
            "final_obs": obs,
            "_final_obs": ended,
            "episode": {"r": self.returns.clone(), "l": s.steps.clone()},
            "_episode": ended,
        }
        return rewards, terminated, truncated, infos

    def views(self):
        """What the policy sees and, if the task has it, what its critic sees besides."""
        seen = self.task.observe(self.state)
        return seen if isinstance(seen, tuple) else (seen,)

    def look(self):
        """Both side by side -> (N, O)."""
        return join(*self.views())

    def clear(self, names, mask):
        """Zeros in these fields of the state where `mask` (N,)."""
        for name in names:
            getattr(self.state, name).masked_fill_(mask[:, None], 0)

    def begin(self, ended):
        """Places the worlds whose episodes begin."""
        self.task.begin(self.state, ended, self.generator)
        if not self.starts:  # for 16 steps at once: on a GPU many small draws would take longer
            qpos = self.qpos.repeat(16, self.num_envs, 1)
            qvel = self.qvel.repeat(16, self.num_envs, 1)
            self.task.start(qpos, qvel, self.generator)
            self.starts = list(zip(qpos, qvel, strict=True))
        self.physics.begin(ended, *self.starts.pop())

    def first_obs(self, ended, obs):
        """After `begin`: obs (N, O), where `ended` (N,) the first ones of the episodes."""
        s = self.state
        self.clear(["actions", *self.physics.inputs], ended)
        for field in (s.steps, s.speed, self.returns):
            field.masked_fill_(ended, 0)
        position = self.task.position(s)
        self.position.copy_(position.where(ended, self.position))
        return self.look().where(ended[:, None], obs)

    def compile(self):
        """From now on the parts of a step around the physics are compiled."""
        self.wrap(partial(torch.compile, fullgraph=True))

    def capture(self):
        """From now on they are CUDA graphs; and Warp's placing, which is between them."""
        from tensordict.nn import CudaGraphModule

        self.wrap(partial(CudaGraphModule, warmup=3))
        if self.on_warp:
            self.physics.place = CudaGraphModule(self.physics.place, warmup=3)

    def wrap(self, wrapper):
        parts = ("judge", "conclude") if self.advances else ("settle",)
        for name in (*parts, "first_obs"):
            setattr(self, name, wrapper(getattr(self, name)))

    def overflows(self):
        """In how many worlds Warp has lacked room so far: nconmax or njmax is too small.

        Contacts share theirs, so that all worlds count.
        """
        if not self.on_warp:
            return 0
        lacking = self.physics.overflowed & self.physics.room_bits
        return int(lacking.count_nonzero())

    def render(self, worlds=(0,)):
        """A frame (480, 480, 3) of each of these worlds, seen by a camera that follows it."""
        if self.renderer is None:
            self.renderer = mujoco.Renderer(self.model, 480, 480)
            self.data = mujoco.MjData(self.model)
            self.camera = mujoco.MjvCamera()
            mujoco.mjv_defaultFreeCamera(self.model, self.camera)
            self.camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
            self.camera.trackbodyid = 1
            self.camera.distance /= 2
        frames = []
        for i in worlds:
            self.data.qpos[:] = self.state.qpos[i].cpu()
            mujoco.mj_forward(self.model, self.data)
            self.renderer.update_scene(self.data, self.camera)
            frames.append(self.renderer.render())
        return tuple(frames)


class World(gym.Env):
    """One world of a task as an environment that takes and gives NumPy arrays and numbers."""

    def __init__(self, task, render_mode=None, **kwargs):
        kwargs |= {"physics": "c", "num_threads": 1, "max_episode_steps": math.inf}
        self.worlds = MuJoCoWorlds(task, 1, **kwargs)
        self.worlds.autoreset = False
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / self.worlds.dt)}
        self.action_space = self.worlds.single_action_space
        self.observation_space = self.worlds.single_observation_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, infos = self.worlds.reset(seed=int(self.np_random.integers(2**31)))
        return obs[0].numpy(), infos

    def step(self, action):
        obs, rewards, terminated, _, _ = self.worlds.step(action[None])
        return obs[0].numpy(), rewards.item(), terminated.item(), False, {}

    def render(self):
        return self.worlds.render()[0]


def register(env_id, task, entry_point=None):
    """Gives a task to gym.make_vec, which makes MuJoCoWorlds of it, and to gym.make: a World."""
    gym.register(
        env_id,
        entry_point=entry_point or partial(World, task),
        vector_entry_point=partial(MuJoCoWorlds, task),
        max_episode_steps=task.max_steps,
    )


def make_gymnasiums(env_id, randomize=0.0, seed=0, **kwargs):
    """Gymnasium's own environment, on a model that is randomized as that of a world."""
    env = gym.make(env_id, **kwargs).unwrapped
    if randomize:
        for name, factor in draw_factors(env.model, 1, randomize, seed).items():
            field = getattr(env.model, name)
            field *= factor[0].numpy()
        mujoco.mj_setConst(env.model, env.data)
    return env


for task in (
    HalfCheetah(),
    Hopper(),
    Walker2d(),
    Swimmer(),
    Ant(),
    Humanoid(),
    HumanoidStandup(),
    InvertedPendulum(),
    InvertedDoublePendulum(),
    Reacher(),
    Pusher(),
):
    name = f"{type(task).__name__}-v5"
    register(f"worlds/{name}", task, partial(make_gymnasiums, name))
