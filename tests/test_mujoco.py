"""MuJoCo's worlds against Gymnasium's environments, and tasks of one's own."""

import ctypes
import functools
import importlib
import importlib.util
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import mujoco_worlds
import numpy as np
import pytest
import torch
from conftest import ROOT
from gymnasium.utils.env_checker import check_env
from mujoco_worlds import MuJoCoWorlds, Task, join

HAS_WARP = importlib.util.find_spec("mujoco_warp") is not None
NEEDS_WARP = pytest.mark.skipif(not HAS_WARP, reason="needs requirements/mujoco-warp.txt")
PHYSICS = [
    "c",
    pytest.param("warp", marks=[NEEDS_WARP, pytest.mark.slow]),  # its kernels compile for a minute
    pytest.param("warp on cuda", marks=[NEEDS_WARP, pytest.mark.gpu]),
]
ENV_IDS = [env_id.removeprefix("worlds/") for env_id in gym.registry if "worlds/" in env_id]
# in which nothing terminates
ENDLESS = {"HalfCheetah-v5", "Swimmer-v5", "HumanoidStandup-v5", "Reacher-v5", "Pusher-v5"}
MANY_CONTACTS = {"Ant-v5", "Humanoid-v5", "HumanoidStandup-v5"}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)


def make_envs(env_id="HalfCheetah-v5", num_envs=4, physics="c", **options):
    physics, _, device = physics.partition(" on ")
    worlds = {"num_envs": num_envs, "device": device or "cpu", "physics": physics}
    return gym.make_vec(f"worlds/{env_id}", **worlds, **options)


def set_states(envs, qpos, qvel):
    """Begins episodes at these positions and velocities (N, .), or all at the same (.)."""
    shapes = (envs.num_envs, -1), (envs.num_envs, len(envs.qvel))
    qpos, qvel = (
        torch.as_tensor(np.asarray(x)).to(envs.qpos).expand(shape)
        for x, shape in zip((qpos, qvel), shapes, strict=True)
    )
    all_worlds = torch.ones(envs.num_envs, dtype=torch.bool, device=qpos.device)
    envs.physics.begin(all_worlds, qpos, qvel)
    return envs.first_obs(all_worlds, envs.look())


def set_state(env, qpos, qvel):
    """The same of Gymnasium's: an episode of which nothing is left."""
    mujoco.mj_resetData(env.model, env.data)  # Humanoid's solver remembers the step before
    env.set_state(np.float64(qpos), np.float64(qvel))


# Gymnasium's tasks


@pytest.mark.parametrize("physics", PHYSICS)
@pytest.mark.parametrize("env_id", ENV_IDS)
def test_steps_are_gymnasiums(env_id, physics):
    """The state set before each of 200 random steps of 4 worlds: observation, reward, end."""
    envs = make_envs(env_id, 4, physics)
    own = [gym.make(env_id).unwrapped for _ in range(4)]
    for i, env in enumerate(own):
        env.reset(seed=i)
    space, rng = own[0].action_space, np.random.default_rng(0)
    errors, terminations, differ = [], 0, 0
    for _ in range(200):
        qpos, qvel = (np.float32([getattr(env.data, x) for env in own]) for x in ("qpos", "qvel"))
        set_states(envs, qpos, qvel)
        actions = rng.uniform(space.low, space.high, (4, *space.shape)).astype(np.float32)
        _, rewards, terminated, _, infos = envs.step(actions)
        for i, env in enumerate(own):
            set_state(env, qpos[i], qvel[i])
            obs, reward, ended, _, _ = env.step(actions[i])
            scale = np.maximum(np.abs(obs), 1)  # Humanoid's forces go into the thousands
            error = np.abs(infos["final_obs"][i].cpu().numpy() - obs) / scale
            errors.append((error.max(), abs(rewards[i].item() - reward)))
            terminations += ended
            differ += ended != terminated[i].item()
            if ended:
                env.reset()
    assert terminations > 5 or env_id in ENDLESS
    if physics == "c":
        assert np.max(errors) < 1e-5 and differ == 0
    else:  # mujoco_warp is in float32
        scale = 10 if env_id in MANY_CONTACTS else 1
        assert (np.quantile(errors, 0.99, axis=0) < (scale * 1e-2, scale * 1e-3)).all()
        assert differ <= 1


@pytest.mark.parametrize("physics", PHYSICS)
@pytest.mark.parametrize(
    "env_id, longest, substeps",
    [
        ("HalfCheetah-v5", 0.01, 5),  # as its model has it
        ("Pusher-v5", 0.006, 9),
        ("Walker2d-v5", 0.006, 2),
        ("Ant-v5", 0.006, 9),
        ("Humanoid-v5", 0.006, 3),
    ],
)
def test_eulers_integrator_is_that_of_mujoco(env_id, longest, substeps, physics):
    """In the fewest steps of `longest` seconds at most that make one of the environment."""
    env = gym.make(f"worlds/{env_id}").unwrapped
    env.reset(seed=0)
    qpos, qvel = env.data.qpos.copy(), env.data.qvel.copy()
    space = env.action_space
    drawn = np.random.default_rng(0).uniform(space.low, space.high, (5, *space.shape))
    had_rk4 = env.model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4
    assert had_rk4 == (env_id not in ("HalfCheetah-v5", "Pusher-v5"))
    fresh = env_id in MANY_CONTACTS  # of which it sees forces
    if fresh:
        qpos[2] -= 0.28  # onto the floor, from which Ant leaps too high

    def position(data):
        return data.xpos[1, 0] if env_id == "Ant-v5" else data.subtree_com[0, 0]

    found = []
    for euler_timestep in (0, longest):
        if euler_timestep:
            env.model.opt.integrator = mujoco.mjtIntegrator.mjINT_EULER
            env.model.opt.timestep *= env.frame_skip / substeps
            env.frame_skip = substeps
        envs = make_envs(env_id, 1, physics, euler_timestep=euler_timestep)
        envs.autoreset = False
        first_obs = set_states(envs, qpos, qvel)[0].cpu().numpy()
        set_state(env, qpos, qvel)
        tolerance = 1e-4 if physics == "c" else 2e-2
        assert np.abs(first_obs - env._get_obs()).max() < tolerance  # as yet no forces
        for actions in drawn.astype(np.float32):
            before = position(env.data)
            expected, reward, *_ = env.step(actions)
            if fresh and euler_timestep:  # sees the new state, as with RK4
                mujoco.mj_forward(env.model, env.data)
                mujoco.mj_rnePostConstraint(env.model, env.data)
                expected = env._get_obs()
                speed = (position(env.data) - before) / env.dt
                reward, _ = env._get_rew(speed, actions)
            _, rewards, _, _, infos = envs.step(actions[None])
            obs = infos["final_obs"][0].cpu().numpy()
            # Humanoid's forces go into the thousands
            scale = np.maximum(np.abs(expected), 1) if env_id == "Humanoid-v5" else 1
            assert np.abs((obs - expected) / scale).max() < tolerance
            assert abs(rewards.item() - reward) < tolerance
        found.append(obs)
    assert (np.abs(found[0] - found[1]).max() > 0.1) == had_rk4


def state_of(env):
    """What `env` holds now, as the state of one world that does nothing."""
    names = ("qpos", "qvel", "xpos", "subtree_com", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    fields = {name: torch.from_numpy(getattr(env.data, name).copy())[None] for name in names}
    s = SimpleNamespace(**{name: field.float() for name, field in fields.items()})
    s.speed, s.actions = torch.zeros(1), torch.zeros(1, *env.action_space.shape)
    s.terminated = torch.zeros(1).bool()
    return s


def task_of(env_id):
    return gym.spec(f"worlds/{env_id}").vector_entry_point.args[0]


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"])
def test_health_is_gymnasiums_on_both_sides_of_bounds(env_id):
    """Which random steps do not reach."""
    env, kinds = gym.make(env_id).unwrapped, set()
    flat = env_id in ("Hopper-v5", "Walker2d-v5")
    height, angles = 1 if flat else 2, (-1.0, -0.2, 0.2, 1.0) if flat else ()
    bounds = [("qpos", height, x) for x in (0.2, 0.7, 0.8, 1.0, 2.0)]
    bounds += [("qpos", 2, x) for x in angles] + [("qvel", -1, x) for x in (-100, 100)]
    bounds += [("qpos", 3, x) for x in (-100, 100) if flat]
    for name, place, value in bounds:
        for side in (-0.01, 0.01):
            state = {"qpos": env.init_qpos.copy(), "qvel": np.zeros(env.model.nv)}
            state[name][place] = value + side
            env.set_state(**state)
            ended = task_of(env_id).terminated(state_of(env)).item()
            assert ended == (not env.is_healthy), (name, place, value + side)
            kinds.add(ended)
    assert kinds == {False, True}


def test_costs_of_contacts_are_gymnasiums():
    """Also where they stop growing."""
    env = gym.make("Humanoid-v5").unwrapped
    for force in (1.0, 100.0, 1e4):
        env.data.cfrc_ext[:] = force
        expected = env.healthy_reward - env.contact_cost
        assert task_of("Humanoid-v5").reward(state_of(env)).item() == pytest.approx(expected)


# Episodes


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Walker2d-v5", "Reacher-v5", "Pusher-v5"])
def test_resets_are_gymnasiums(env_id):
    """Distributions of all numbers; staggered episodes end apart."""
    envs, env = make_envs(env_id, 1000), gym.make(env_id).unwrapped
    obs, _ = envs.reset(seed=3, options={"stagger": True})
    own = np.array([env.reset(seed=i)[0] for i in range(1000)])
    for mine, theirs in zip(obs.double().numpy().T.round(5), own.T.round(5), strict=True):
        levels = np.sort(np.concatenate([mine, theirs]))
        shares = (np.searchsorted(np.sort(x), levels, side="right") / 1000 for x in (mine, theirs))
        assert np.abs(np.subtract(*shares)).max() < 1.95 * (2 / 1000) ** 0.5  # p = 0.001
    assert len(envs.state.steps.unique()) == envs.max_steps == gym.spec(env_id).max_episode_steps
    assert envs.returns[0] == 0 and envs.returns[envs.state.steps > 0].isnan().all()


def test_seeds_decide_what_comes():
    """Whatever else is drawn from torch's generator; without a seed it goes on."""
    envs, again = make_envs("Reacher-v5", 9), make_envs("Reacher-v5", 9)
    first = envs.reset(seed=3)[0].clone()
    assert torch.equal(first, again.reset(seed=3)[0])
    seconds = []
    for each in (envs, again):
        torch.randn(1 + len(seconds))
        each.state.steps.fill_(each.max_steps)
        seconds.append(each.step(np.zeros(each.action_space.shape))[0])
    assert torch.equal(*seconds) and not torch.equal(first, seconds[0])
    assert not torch.equal(seconds[0], again.reset()[0])
    assert torch.equal(again.reset(seed=3)[0], first)


@pytest.mark.parametrize("x", [0.0, 600.0])
def test_rewards_far_from_the_origin_are_gymnasiums(x):
    """A cheetah that runs for an episode comes so far; float32 has 6e-5 m there."""
    envs, env = make_envs(num_envs=1), gym.make("HalfCheetah-v5").unwrapped
    env.reset(seed=0)
    env.set_state(env.data.qpos + np.eye(9)[0] * x, env.data.qvel)
    set_states(envs, env.data.qpos[None], env.data.qvel[None])
    rng = np.random.default_rng(0)
    for _ in range(20):  # after that chaos tells them apart
        action = rng.uniform(-1, 1, 6).astype(np.float32)
        reward = envs.step(action[None])[1].item()
        assert reward == pytest.approx(env.step(action)[1], abs=2.5e-3 if x else 1e-4)


def test_falls_and_limits_end_episodes():
    """In the same steps, in one world and in several; the rest goes on."""
    envs = make_envs("Hopper-v5", 5)
    envs.reset(seed=1)
    qpos = envs.qpos.repeat(5, 1)
    qpos[:2, 1] = 0.3  # they have fallen
    set_states(envs, qpos, envs.qvel)
    envs.state.steps.copy_(torch.tensor([6, 999, 999, 10, 0]))
    envs.returns.copy_(torch.tensor([5.0, 0, 0, 0, math.nan]))
    obs, rewards, terminated, truncated, infos = envs.step(torch.zeros(5, 3))
    assert terminated.tolist() == [True, True, False, False, False]
    assert truncated.tolist() == [False, True, True, False, False]
    assert infos["_final_obs"].tolist() == infos["_episode"].tolist() == [True] * 3 + [False] * 2
    assert infos["episode"]["l"].tolist() == [7, 1000, 1000, 11, 1]
    assert infos["episode"]["r"][0] == 5 + rewards[0] and infos["episode"]["r"][4].isnan()
    assert envs.state.steps.tolist() == [0, 0, 0, 11, 1] and envs.returns[:3].tolist() == [0, 0, 0]
    assert torch.equal(obs[3:], infos["final_obs"][3:])
    assert (obs[:3] != infos["final_obs"][:3]).any(1).all()
    assert (obs[:3, 0] - 1.25).abs().max() < 5.1e-3  # episodes that begin stand upright


@pytest.mark.parametrize("number", [math.nan, 1e7])
def test_a_broken_world_ends_and_no_other_notices(number):
    """Huge numbers are finite, but one such row would spoil running statistics for good."""
    envs = make_envs(num_envs=5)
    rest = []
    for first in (0.0, number):
        envs.reset(seed=0)
        qpos = envs.qpos.repeat(5, 1)
        qpos[0, 1] = first
        set_states(envs, qpos, envs.qvel)
        obs, rewards, terminated, _, infos = envs.step(torch.full((5, 6), 0.3))
        rest.append((obs[1:], rewards[1:]))
    torch.testing.assert_close(*rest, atol=0, rtol=0)  # though threads have one MjData each
    assert terminated.tolist() == [True] + [False] * 4 and envs.broken == 1 and rewards[0] == 0
    assert infos["final_obs"][0].eq(0).all() and obs.abs().max() < 10


def test_an_episode_begins_without_what_came_before():
    """Humanoid sees its actuators' forces, of which the last actions must have left nothing."""
    envs, env = make_envs("Humanoid-v5", 1), gym.make("Humanoid-v5").unwrapped
    envs.reset(seed=0)
    envs.step(torch.full((1, 17), 0.4))
    qpos, qvel = (x[0].double().numpy() for x in envs.starts[0])
    mine = set_states(envs, qpos, qvel)[0].numpy()
    env.reset(seed=0)
    set_state(env, qpos, qvel)
    theirs = env._get_obs()
    assert (np.abs(mine - theirs) / np.maximum(np.abs(theirs), 1)).max() < 1e-4


def test_episodes_begin_by_a_mask():
    envs = make_envs("Hopper-v5", 3)
    envs.reset(seed=0)
    obs = envs.step(np.zeros((3, 3)))[0]
    mask = np.array([False, True, False])
    again, _ = envs.reset(options={"reset_mask": mask})
    assert torch.equal(again[::2], obs[::2]) and not torch.equal(again[1], obs[1])
    assert envs.state.steps.tolist() == [1, 0, 1] and envs.returns[1] == 0 != envs.returns[0]


# Randomized models


def field_of(physics, name):
    """A field of the worlds' models (N, ...)."""
    if hasattr(physics, "batch"):
        return torch.from_numpy(physics.batch.expanded(name).copy()).float()
    warp = pytest.importorskip("warp")
    return warp.to_torch(getattr(physics.model, name))


def test_factors_fill_a_span():
    """Inertia is in proportion to mass, and what actuators pull back to what they push."""
    factors = mujoco_worlds.draw_factors(gym.make("Hopper-v5").unwrapped.model, 1000, 0.5, 7)
    coupled = ("body_mass", "body_inertia"), ("actuator_gainprm", "actuator_biasprm")
    assert factors.keys() == {*coupled[0], *coupled[1], "geom_friction"}
    for factor in factors.values():
        assert 0.5 <= factor.min() < 0.51 and 1.49 < factor.max() <= 1.5
    for one, other in coupled:
        assert torch.equal(factors[one].flatten(1), factors[other].flatten(1))


@pytest.mark.parametrize("physics", PHYSICS[:2])
def test_each_world_has_a_model_of_its_own(physics):
    """With all that MuJoCo derives from what is drawn; and each falls in its own way."""
    names = "body_mass", "geom_friction", "actuator_gainprm", "geom_size"
    ranges = dict.fromkeys(names, (0.5, 1.5))
    worlds = make_envs("Hopper-v5", 4, physics, randomize=ranges, seed=7)
    model = gym.make("Hopper-v5").unwrapped.model
    factors = mujoco_worlds.draw_factors(model, 4, ranges, 7)
    usual = {name: getattr(model, name).copy() for name in factors}
    for i in range(4):
        for name, factor in factors.items():
            getattr(model, name)[:] = usual[name] * factor[i].numpy()
        mujoco.mj_setConst(model, mujoco.MjData(model))
        derived = mujoco_worlds.DERIVED - {"tendon_invweight0"}  # it has none
        for name in (*factors, *derived, *mujoco_worlds.BOUNDS):
            expected = torch.from_numpy(getattr(model, name)).float()
            found = field_of(worlds.physics, name)[i].view(expected.shape)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    worlds.reset(seed=0)
    set_states(worlds, worlds.qpos, worlds.qvel)
    for _ in range(9):
        obs = worlds.step(torch.full((4, 3), 0.3))[0]
    assert len(obs.unique(dim=0)) == 4 and obs.std(0).max() > 0.01


def test_fields_and_their_ranges_are_chosen():
    """Of a world's two geoms a contact takes one friction: their factors are equal."""
    ranges = {"dof_damping": (2.0, 3.0), "geom_friction": (0.1, 0.2)}
    envs = make_envs("Hopper-v5", 50, randomize=ranges)
    usual = torch.from_numpy(envs.model.dof_damping[3:]).float()
    shares = field_of(envs.physics, "dof_damping")[:, 3:] / usual
    assert shares.min() >= 2 and shares.max() <= 3 and shares.unique().numel() > 100
    assert envs.physics.batch.expanded("body_mass") is None
    friction = field_of(envs.physics, "geom_friction") / torch.tensor(envs.model.geom_friction)
    torch.testing.assert_close(friction[:, 0], friction[:, 1])
    assert 0.0999 < friction.min() < friction.max() < 0.2001


def test_evaluations_are_randomized():
    make = functools.partial(gym.make, "worlds/Hopper-v5", randomize=0.5)
    models = [make(seed=seed).unwrapped.model for seed in (1, 1, 2)]
    one, same, other = (model.body_mass for model in models)
    assert (one == same).all() and (one[1:] != other[1:]).all()
    assert models[0].body_subtreemass[0] == pytest.approx(one.sum())
    shares = one[1:] / gym.make("Hopper-v5").unwrapped.model.body_mass[1:]
    assert 0.5 <= shares.min() < shares.max() <= 1.5


# The interface


def test_worlds_are_a_vector_environment_of_gymnasiums():
    envs = make_envs("Reacher-v5", 3)
    obs, infos = envs.reset(seed=0)
    assert obs.numpy() in envs.observation_space and infos == {}
    assert obs[0].numpy() in envs.single_observation_space
    envs.action_space.seed(0)
    obs, rewards, terminated, truncated, _ = envs.step(envs.action_space.sample())
    assert obs.dtype == rewards.dtype == torch.float32
    assert terminated.dtype == truncated.dtype == torch.bool
    assert envs.spec.id == "worlds/Reacher-v5" and envs.unwrapped is envs


def test_actions_are_clipped():
    envs = make_envs(num_envs=2)
    envs.reset(seed=0)
    set_states(envs, envs.qpos, envs.qvel)
    _, rewards, _, _, infos = envs.step(np.array([[1.0] * 6, [7.0] * 6]))
    assert rewards[0] == rewards[1] and torch.equal(*infos["final_obs"])


@pytest.mark.parametrize("physics", PHYSICS)
@pytest.mark.parametrize(
    "fields", [tuple(sorted(mujoco_worlds.QUICK)), ("subtree_com", "cinert", "cvel")], ids=str
)
def test_what_a_task_reads_is_mujocos_data(fields, physics):
    """Matrices and places of the ground, too, so that a task of one's own is the same in all."""

    class Reading(mujoco_worlds.Hopper):
        reads = fields

    physics, _, device = physics.partition(" on ")
    worlds = MuJoCoWorlds(Reading(), 2, device or "cpu", physics)
    worlds.reset(seed=0)
    env = gym.make("Hopper-v5").unwrapped
    qpos, qvel = env.init_qpos + np.linspace(0, 0.1, 6), np.linspace(0, 1, 6)
    set_states(worlds, qpos, qvel)
    env.set_state(qpos, qvel)
    for name in ("qpos", "qvel", *fields):
        found = getattr(worlds.state, name).cpu().numpy()
        expected = [getattr(env.data, name)] * 2
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)


DRAWING = """
import gymnasium as gym, mujoco_worlds, numpy as np
envs = gym.make_vec("worlds/Ant-v5", num_envs=3)
envs.reset(seed=1)
one, other = envs.render(worlds=(0, 2))
assert one.shape == other.shape == (480, 480, 3) and one.dtype == np.uint8
assert one.std() > 9 and (one != other).any()
"""
OPENGL = "import mujoco; mujoco.GLContext(9, 9).make_current()"


def test_worlds_are_drawn():
    """Those that are asked for; MuJoCo chooses its OpenGL when it is imported."""
    environment = os.environ | {"MUJOCO_GL": "egl", "PYTHONPATH": str(ROOT / "leanrl")}
    draw = functools.partial(subprocess.run, env=environment, text=True, capture_output=True)
    if draw([sys.executable, "-c", OPENGL]).returncode:
        pytest.skip("no OpenGL")
    done = draw([sys.executable, "-c", DRAWING])
    assert done.returncode == 0, done.stderr


# Tasks of one's own

CART = """<mujoco>
  <option timestep="0.01" gravity="0 0 0"/>
  <worldbody><body>
    <joint name="slide" type="slide" axis="1 0 0"/><geom size="0.1" mass="1"/>
  </body>{}</worldbody>
  <actuator>{}</actuator>
</mujoco>"""
MOTOR = '<motor joint="slide" gear="1" ctrlrange="-1 1"/>'


class Sliding(Task):
    def observe(self, s):
        return s.qpos

    def reward(self, s):
        return s.speed


@pytest.fixture
def cart(tmp_path):
    """cart(actuator, kind, others): a task whose model is a mass of 1 kg on rails."""

    def make(actuator=MOTOR, kind=Sliding, others=""):
        task = kind()
        task.model = str(tmp_path / "cart.xml")
        Path(task.model).write_text(CART.format(others, actuator))
        return task

    return make


@pytest.fixture
def register(registry):
    """register(task): a task of one's own as Mine-v0, for this test."""
    return functools.partial(mujoco_worlds.register, "Mine-v0")


@pytest.mark.parametrize("physics", PHYSICS[:2])
def test_an_actuators_delay_ends_with_the_episode(cart, physics):
    delayed = MOTOR.replace("/>", ' delay="0.03" nsample="4"/>')
    envs = MuJoCoWorlds(cart(delayed), 2, physics=physics)
    envs.reset(seed=0)
    for _ in range(5):
        envs.step(torch.ones(2, 1))
    assert (envs.state.qvel > 0.01).all()
    mask = torch.tensor([True, False])
    envs.reset(options={"reset_mask": mask})
    for _ in range(5):
        envs.step(torch.zeros(2, 1))
    assert envs.state.qvel[0] == 0 and envs.state.qvel[1] > 0.049


def test_observations_are_copies(cart):
    envs = MuJoCoWorlds(cart(), 2)
    first, _ = envs.reset(seed=0)
    kept = first.clone()
    second, *_, infos = envs.step(torch.ones(2, 1))
    second += 1
    assert torch.equal(first, kept) and not torch.equal(second, infos["final_obs"])
    envs.step(torch.ones(2, 1))
    assert torch.equal(second, infos["final_obs"] + 1)


def test_callbacks_of_the_host_program_stay():
    kind = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    own = kind(lambda model, data, i: 7.0)
    user = '<general joint="slide" gaintype="user" ctrlrange="-1 1"/>'
    model = mujoco.MjModel.from_xml_string(CART.format("", user))
    data = mujoco.MjData(model)
    data.ctrl[0] = 1
    mujoco.set_mjcb_act_gain(own)
    try:
        envs = make_envs(num_envs=2)
        mujoco.mj_forward(model, data)
        assert data.actuator_force[0] == 7
    finally:
        mujoco.set_mjcb_act_gain(None)
    envs.reset(seed=0)
    envs.step(torch.zeros(2, 6))
    assert not envs.physics.batch.get_data(0).timer.duration.any()  # but no clock is read


class Smoothed(mujoco_worlds.HalfCheetah):
    """Sees its velocities smoothed, which `begin` leaves as they are."""

    memory = {"smooth": 9}

    def observe(self, s):
        return s.smooth

    def advance(self, s, generator):
        s.smooth.lerp_(s.qvel, 0.1)


def test_a_broken_world_forgets():
    """Otherwise a number that is not finite would break all of its episodes."""
    envs = MuJoCoWorlds(Smoothed(), 2)
    envs.reset(seed=0)
    envs.state.smooth[0, 0] = math.nan
    for ends in (True, False):
        obs, _, terminated, _, _ = envs.step(torch.zeros(2, 6))
        assert terminated.tolist() == [ends, False] and obs.isfinite().all()


def test_the_first_observations_are_compiled_once(one_thread):
    """Of the reset, and of the first episodes that end."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    envs = make_envs("Hopper-v5", 3)
    envs.wrap(functools.partial(torch.compile, backend=backend, fullgraph=True))
    envs.reset(seed=0)
    envs.step(torch.zeros(3, 3))
    set_states(envs, 0 * envs.qpos.repeat(3, 1), envs.qvel)
    _, _, _, _, infos = envs.step(torch.zeros(3, 3))
    assert infos["_episode"].all() and len(graphs) == 2  # and `settle`


class Commanded(Task):
    """Follows a command, which changes every third step; the critic sees the force, too."""

    memory = {"command": 2, "last_actions": 1, "episodes": 1, "error": 1, "qfrc_applied": 1}
    max_steps = 7

    def observe(self, s):
        policy = join(s.qpos + s.error, s.command, s.last_actions)
        return policy, join(s.qpos, s.qfrc_applied)

    def reward(self, s):
        return 10 * s.command[:, 0] + (s.actions - s.last_actions)[:, 0]

    def begin(self, s, mask, generator):
        new = torch.randint(1, 9, s.command.shape, generator=generator, device=mask.device)
        s.command.copy_(new.where(mask[:, None], s.command))
        s.last_actions.masked_fill_(mask[:, None], 0)
        s.episodes += mask[:, None]

    def advance(self, s, generator):
        s.last_actions.copy_(s.actions)
        s.error.uniform_(-0.5, 0.5, generator=generator)
        s.command[:, 1] += (s.steps % 3 == 0).float()
        s.qfrc_applied.fill_(2.0)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_task_remembers_from_step_to_step(cart, compiled):
    """A command, the last actions, a push; noise is only in what the policy sees."""
    envs = MuJoCoWorlds(cart(kind=Commanded), 3, seed=5)
    if compiled:
        envs.compile()
    first = envs.reset(seed=5)[0].clone()
    obs, _ = envs.reset(seed=5)
    assert torch.equal(obs, first) and envs.state.episodes.eq(1).all()
    assert obs.shape[1:] == envs.single_observation_space.shape == (6,) and envs.actor_dim == 4
    last, velocity, noise = torch.zeros(3, 1), 0.0, []
    for step in range(1, 10):
        actions, command = torch.full((3, 1), 0.1 * step), obs[:, 1:3].clone()
        pushed = step not in (1, 8)  # by the step before
        velocity += 0.01 * (0.1 * step + 2 * pushed)
        obs, rewards, _, truncated, infos = envs.step(actions)
        torch.testing.assert_close(rewards, 10 * command[:, 0] + (actions - last)[:, 0])
        command[:, 1] += step in (3, 6)
        final = infos["final_obs"]
        assert torch.equal(final[:, 1:4], join(command, actions)) and final[:, 5].eq(2).all()
        assert truncated.all() == (step == 7)
        noise.append(final[:, 0] - final[:, 4])
        last = actions
        if step == 7:
            last, velocity = torch.zeros(3, 1), 0.0
            assert (obs[:, 1:3] != command).any() and obs[:, [3, 5]].eq(0).all()
        torch.testing.assert_close(envs.state.qvel, torch.full((3, 1), velocity))
    noise = torch.stack(noise)
    assert envs.state.episodes.eq(2).all()
    assert noise.abs().max() < 0.5 and noise.unique().numel() == 27 and noise.std() > 0.2


def test_one_world_is_an_environment_of_gymnasiums(register, cart):
    """What its vector of worlds says, of each alone; and what Gymnasium asks of one."""
    register(cart())
    env, envs = gym.make("Mine-v0", render_mode="rgb_array"), gym.make_vec("Mine-v0", num_envs=1)
    check_env(env.unwrapped, skip_render_check=True)
    assert env.spec.max_episode_steps == 1000 and env.unwrapped.metadata["render_fps"] == 100
    obs, _ = env.reset(seed=3)
    assert obs == envs.reset(seed=4)[0].numpy()[0]  # both begin at 0
    for action in np.linspace(-1, 1, 1000, dtype=np.float32)[:, None]:
        obs, reward, terminated, truncated, _ = env.step(action)
        _, rewards, _, ends, infos = envs.step(action[None])
        assert obs == infos["final_obs"].numpy()[0] and reward == rewards.item()
        assert not terminated and truncated == ends.item()
    assert truncated


RAILS = """
import mujoco_worlds
class Rails(mujoco_worlds.InvertedPendulum):
    model = "rails.xml"
"""


def test_a_model_is_found_beside_its_task(tmp_path, monkeypatch):
    """Also by a task that inherits it, elsewhere."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/rails.xml").write_text(CART.format("", MOTOR))
    (tmp_path / "tasks/rails.py").write_text(RAILS)
    monkeypatch.syspath_prepend(tmp_path / "tasks")
    task = importlib.import_module("rails").Rails
    heir = type("Heir", (task,), {"frame_skip": 9, "__module__": __name__})
    assert [MuJoCoWorlds(kind(), 2).dt for kind in (task, heir)] == pytest.approx([0.02, 0.09])


def test_what_does_not_fit_is_refused(cart):
    """A motor without bounds would have an action space of [0, 0]."""
    endless = cart('<motor joint="slide"/>')
    for message, make in (
        ("model: .* has an actuator without a ctrlrange", lambda: MuJoCoWorlds(endless, 2)),
        ("physics: 'wrap' is none of auto, c, warp", lambda: make_envs(physics="wrap")),
        ("euler_timestep: -1 is below 0", lambda: make_envs(euler_timestep=-1)),
        ("randomize: mass is no field", lambda: make_envs(randomize={"mass": (1, 2)})),
        (r"actions: \(6,\) is not \(4, 6\)", lambda: make_envs().step(np.zeros(6))),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            make()


@NEEDS_WARP
@pytest.mark.slow
def test_a_solver_that_stops_early_lacks_no_room(monkeypatch):
    """Warp notes it among what overflows, from one iteration on nearly always."""
    load_spec = mujoco_worlds.load_spec

    def load(task):
        spec = load_spec(task)
        spec.option.iterations = 1
        spec.option.solver = mujoco.mjtSolver.mjSOL_NEWTON
        return spec

    monkeypatch.setattr(mujoco_worlds, "load_spec", load)
    envs = make_envs("Ant-v5", 4, "warp")
    envs.reset(seed=0)
    for _ in range(20):
        envs.step(torch.ones(4, 8))
    assert envs.physics.overflowed.any() and envs.overflows() == 0


@NEEDS_WARP
@pytest.mark.slow
def test_contacts_that_do_not_fit_are_noticed(cart):
    """By default thirty boxes in a tower fall through the floor on Warp."""
    box = '<body pos="0 5 {}"><freejoint/><geom type="box" size=".1 .1 .1"/></body>'
    tower = "".join(box.format(0.25 * i - 0.8) for i in range(30))
    task = cart(others=f'<geom type="plane" size="9 9 1" pos="0 0 -1"/>{tower}')
    path = Path(task.model)
    path.write_text(path.read_text().replace('timestep="0.01" gravity="0 0 0"', ""))
    heights = []
    for room in ({}, {"nconmax": 300, "njmax": 1200}):
        envs = MuJoCoWorlds(task, 1, physics="warp", **room)
        envs.reset(seed=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(640):
                envs.step(torch.zeros(1, 1))
        said = [str(x.message) for x in caught if "nconmax" in str(x.message)]
        assert bool(said) == bool(envs.overflows()) == (not room)
        heights.append(envs.state.qpos[0, 3::7].min().item())
        envs.reset(seed=0)
        assert bool(envs.overflows()) == (not room)  # also of an episode that has ended
    assert heights[0] < -1 < heights[1]
