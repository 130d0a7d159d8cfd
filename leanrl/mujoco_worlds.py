"""MuJoCo's worlds: Gymnasium's MuJoCo tasks, N at a time, as one vector environment of tensors."""

import ast
import gc
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import mujoco.batch
import numpy as np
import torch
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space
from tensordict.nn import CudaGraphModule


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
    angle, area = uniform_like(qpos[..., :2], generator).unbind(-1)
    angle *= math.pi
    radius = 0.2 * area.abs().sqrt()  # uniform in a disk
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
        threads = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):  # Linux: those that this process may use
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
        import mujoco_warp as mjw
        import warp as wp

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
            raise ValueError(f"--env-id: {env_id} is none of {', '.join(TASKS)}")
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

    def compile(self):
        """Both halves of a step, before and after the physics begins episodes."""
        self.settle = torch.compile(self.settle, fullgraph=True)
        self.first_obs = torch.compile(self.first_obs, fullgraph=True)

    def capture(self):
        """The same halves as CUDA graphs, and where episodes begin if the worlds are on the GPU."""
        self.settle = CudaGraphModule(self.settle, warmup=3)
        self.first_obs = CudaGraphModule(self.first_obs, warmup=3)
        if isinstance(self.physics, WarpPhysics):
            self.physics.place = CudaGraphModule(self.physics.place, warmup=3)

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


def draw_factors(model, num_envs, spread, seed):
    """Factors for fields of the model, uniform in 1 - spread, 1 + spread -> {name: (N, ...)}."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        uniform = torch.rand(num_envs, *shape, generator=generator, dtype=torch.float64)
        return 1 + spread * (2 * uniform - 1)

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
            raise ValueError(f"--env-id: {task.model} has an actuator without a ctrlrange")
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
