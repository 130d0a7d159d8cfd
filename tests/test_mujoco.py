"""MuJoCo's worlds against Gymnasium's environments; PPO and SAC on them: parity, whole runs.

What is shared with other scripts to the letter is tested there (test_shared), as SAC's updates are.
"""

import ctypes
import importlib
import importlib.util
import inspect
import linecache
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
from test_cartpole import in_tmp_path, read_checkpoint  # noqa: F401
from test_sac import read_scalars, run
from test_sac_parity import assert_hunks_are_marked, backend, draw_alike, stack_twins  # noqa: F401

from leanrl import ppo_mujoco_worlds as baseline
from leanrl import ppo_mujoco_worlds_torchcompile as variant
from leanrl import sac_mujoco_worlds as sac_baseline
from leanrl import sac_mujoco_worlds_torchcompile as sac_variant


def name_of(module):
    return Path(module.__file__).name


CPU = torch.device("cpu")
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
ALL_SCRIPTS = pytest.mark.parametrize(
    "module", [baseline, variant, sac_baseline, sac_variant], ids=name_of
)
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
SMALL = {"num_envs": 8, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
SAC = {"num_envs": 8, "batch_size": 16, "learning_starts": 200, "buffer_size": 500}
OBS, A = 17, 6
RANDOMIZED = "body_mass body_inertia geom_friction actuator_gainprm actuator_biasprm".split()
HAS_WARP = importlib.util.find_spec("mujoco_warp") is not None
NEEDS_WARP = pytest.mark.skipif(not HAS_WARP, reason="needs requirements/mujoco-warp.txt")
PHYSICS = [
    "c",
    pytest.param("warp", marks=[NEEDS_WARP, pytest.mark.slow]),  # its kernels compile for a minute
    pytest.param("warp on cuda", marks=[NEEDS_WARP, pytest.mark.gpu]),
]
# task -> how far mujoco_warp's observations and rewards may be from C's: 99% of them, all of them
WARP_BOUNDS = {
    "HalfCheetah-v5": (1e-2, 1e-3),
    "Hopper-v5": (1e-3, 1e-4),
    "Walker2d-v5": (1e-2, 1e-3),
    "Ant-v5": (1e-1, 1e-2),
    "Humanoid-v5": (1e-1, 1e-2),
    "InvertedPendulum-v5": (1e-4, 1e-6),
    "InvertedDoublePendulum-v5": (1e-2, 1e-3),
    "Swimmer-v5": (1e-3, 1e-4),
    "HumanoidStandup-v5": (1e-1, 1e-2),
    "Reacher-v5": (1e-3, 1e-4),
    "Pusher-v5": (1e-3, 1e-4),
}
# in which nothing terminates
ENDLESS = {"HalfCheetah-v5", "Swimmer-v5", "HumanoidStandup-v5", "Reacher-v5", "Pusher-v5"}


def task_of(env_id):
    return gym.spec(f"worlds/{env_id}").vector_entry_point.args[0]


def make_envs(env_id="HalfCheetah-v5", num_envs=4, physics="c", **options):
    physics, _, device = physics.partition(" on ")
    worlds = {"num_envs": num_envs, "device": device or "cpu", "physics": physics}
    return gym.make_vec(f"worlds/{env_id}", **worlds, **options)


def spaces(obs_dim, action_space):
    """What an agent needs to know of its environment."""
    if isinstance(action_space, int):
        action_space = gym.spaces.Box(-1, 1, (action_space,))
    obs_space = gym.spaces.Box(-math.inf, math.inf, (obs_dim,))
    known = {"single_observation_space": obs_space, "single_action_space": action_space}
    return SimpleNamespace(**known, actor_dim=obs_dim)


def train(module, **flags) -> Path:
    small = SAC if module in (sac_baseline, sac_variant) else SMALL
    return module.main(module.Args(**small | flags))


def set_states(envs, qpos, qvel):
    """Begins episodes at these positions and velocities."""
    qpos, qvel = (torch.as_tensor(np.asarray(x)).to(envs.qpos) for x in (qpos, qvel))
    all_worlds = torch.ones_like(qpos[:, 0], dtype=torch.bool)
    envs.physics.begin(all_worlds, qpos, qvel)
    return envs.first_obs(all_worlds, envs.look())


# The environments


@pytest.mark.parametrize("physics", PHYSICS)
@pytest.mark.parametrize("env_id", WARP_BOUNDS)
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
        for env, *state in zip(own, qpos, qvel, strict=True):
            mujoco.mj_resetData(env.model, env.data)  # Humanoid's solver remembers the step before
            env.set_state(*map(np.float64, state))
        set_states(envs, qpos, qvel)
        actions = rng.uniform(space.low, space.high, (4, *space.shape)).astype(np.float32)
        _, rewards, terminated, truncated, infos = envs.step(actions)
        assert not truncated.any()
        for i, env in enumerate(own):
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
        assert np.max(errors) < 1e-5 and not differ
        assert not envs.physics.batch.get_data(0).timer.duration.any()
    else:
        bounds = WARP_BOUNDS[env_id]
        assert (np.quantile(errors, 0.99, axis=0) < bounds).all() and differ <= 1


def state_of(env):
    """What `env` holds now, as the state of one world that does nothing."""
    names = ("qpos", "qvel", "xpos", "subtree_com", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    fields = {name: torch.from_numpy(getattr(env.data, name).copy())[None] for name in names}
    s = SimpleNamespace(**{name: field.float() for name, field in fields.items()})
    s.speed, s.actions = torch.zeros(1), torch.zeros(1, *env.action_space.shape)
    return s


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5"])
def test_health_and_costs_are_gymnasiums_on_both_sides_of_each_bound(env_id):
    """Which random steps do not reach."""
    env = gym.make(env_id).unwrapped
    env.reset(seed=0)
    task = task_of(env_id)
    qpos, qvel = env.init_qpos.copy(), np.zeros_like(env.init_qvel)
    flat = env_id in ("Hopper-v5", "Walker2d-v5")
    states = [(qpos, qvel)]
    bounds = {1 if flat else 2: (0.2, 0.7, 0.8, 1.0, 2.0)}  # heights
    bounds |= {2: (-1.0, -0.2, 0.2, 1.0), 3: (-100.0, 100.0)} if flat else {}  # angles
    for place, values in bounds.items():
        for value in (x + side for x in values for side in (-0.01, 0.01)):
            states.append((qpos.copy(), qvel))
            states[-1][0][place] = value
    for value in (-100.1, -99.9, 99.9, 100.1):
        states.append((qpos, qvel.copy()))
        states[-1][1][-1] = value
    kinds = set()
    for state in states:
        env.set_state(*state)
        ended = task.terminated(state_of(env))
        assert ended.item() == (not env.is_healthy), state
        kinds.add(ended.item())
    assert kinds == {False, True}
    if env_id == "Humanoid-v5":
        env.set_state(qpos, qvel)
        for force in (1.0, 100.0, 1e4):
            env.data.cfrc_ext[:] = force
            s = state_of(env)
            s.terminated = torch.zeros(1).bool()
            expected = env.healthy_reward - env.contact_cost
            assert task.reward(s).item() == pytest.approx(expected, rel=1e-5)


def test_an_episode_begins_without_what_came_before():
    """Humanoid sees its actuators' forces, of which the last actions must have left nothing."""
    envs = make_envs("Humanoid-v5", 2)
    envs.reset(seed=0, options={"stagger": True})
    assert envs.returns[0] == 0 and envs.returns[1:].isnan().all()  # that one begins now
    envs.step(torch.full((2, 17), 0.4))
    qpos, qvel = envs.starts[0]
    obs = set_states(envs, qpos, qvel)
    env = gym.make("Humanoid-v5").unwrapped
    for i in range(2):
        env.reset(seed=0)
        mujoco.mj_resetData(env.model, env.data)
        env.set_state(qpos[i].double().numpy(), qvel[i].double().numpy())
        mine, theirs = obs[i].numpy(), env._get_obs()
        error = np.abs(mine - theirs) / np.maximum(np.abs(theirs), 1)
        assert error.max() < 1e-4


def test_ends_limits_and_returns():
    """Falls and limits in the same steps, in one world and in several; the rest goes on."""
    envs = make_envs("Hopper-v5", 5)
    envs.reset(seed=1)
    usual, still = np.tile(envs.qpos, (5, 1)), np.zeros((5, 6))
    usual[[0, 1, 2], 1] = 0.3, 0.3, 1.25  # the first two have fallen
    set_states(envs, usual, still)
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
    # a world that is not finite ends, and no other notices, though threads have one MjData each
    rows = envs.physics.batch.state.copy()
    first = torch.tensor([True, False, False, False, False])
    envs.physics.begin(first, torch.full((5, 6), math.nan), torch.zeros(5, 6))
    envs.first_obs(first, envs.look())
    obs, rewards, terminated, _, infos = envs.step(torch.zeros(5, 3))
    assert terminated.tolist() == [True] + [False] * 4 and envs.broken == 1 and rewards[0] == 0
    assert obs.isfinite().all() and infos["final_obs"].isfinite().all()
    found = envs.physics.batch.state[1:].copy()
    envs.physics.batch.state[:] = rows
    envs.physics.step()
    again = envs.physics.batch.state[1:]
    assert (again == found).all() and (found != rows[1:]).any(1).all()


def test_a_world_of_huge_numbers_ends():
    """They are finite, but one such row would spoil running statistics for good."""
    envs = make_envs(num_envs=3)
    envs.reset(seed=0)
    qvel = torch.zeros(3, 9)
    qvel[0, 3] = 2e4
    set_states(envs, envs.qpos.repeat(3, 1), qvel)
    obs, rewards, terminated, _, infos = envs.step(torch.zeros(3, 6))
    assert terminated.tolist() == [True, False, False] and envs.broken == 1 and rewards[0] == 0
    assert infos["final_obs"][0].eq(0).all() and obs.abs().max() < 1


@pytest.mark.parametrize("x", [0.0, 600.0])
def test_far_from_the_origin_rewards_are_gymnasiums(x):
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


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Walker2d-v5", "Reacher-v5", "Pusher-v5"])
def test_resets_are_gymnasiums_and_seeds_decide(env_id):
    """All that comes, whatever else is drawn from torch's generator."""
    envs, again = (make_envs(env_id, 1000) for _ in range(2))
    late = {"stagger": True}
    obs, _ = envs.reset(seed=3, options=late)
    assert torch.equal(obs, again.reset(seed=3, options=late)[0])
    env = gym.make(env_id).unwrapped
    own = np.array([env.reset(seed=i)[0] for i in range(1000)])
    for mine, theirs in zip(obs.double().numpy().T.round(5), own.T.round(5), strict=True):
        levels = np.sort(np.concatenate([mine, theirs]))
        shares = (np.searchsorted(np.sort(x), levels, side="right") / 1000 for x in (mine, theirs))
        assert np.abs(np.subtract(*shares)).max() < 1.95 * (2 / 1000) ** 0.5  # p = 0.001
    ages = np.unique(envs.state.steps.numpy())  # the first episodes end apart
    assert len(ages) == envs.max_steps == gym.spec(env_id).max_episode_steps
    firsts = []
    for each in (envs, again):
        torch.randn(len(firsts))
        each.state.steps.fill_(envs.max_steps)
        firsts.append(each.step(np.zeros(each.action_space.shape))[0])
    assert torch.equal(*firsts) and not torch.equal(firsts[0], obs)
    assert not torch.equal(firsts[0], again.reset()[0])  # without a seed it goes on
    assert torch.equal(again.reset(seed=3, options=late)[0], obs)


def test_episodes_begin_by_a_mask():
    envs = make_envs("Hopper-v5", 3)
    envs.reset(seed=0)
    obs = envs.step(np.zeros((3, 3)))[0]
    before = envs.state.qpos.clone()
    mask = np.array([False, True, False])
    again, _ = envs.reset(options={"reset_mask": mask})
    assert torch.equal(again[::2], obs[::2]) and not torch.equal(again[1], obs[1])
    assert (envs.state.qpos != before).any(1).tolist() == mask.tolist()
    assert envs.state.steps.tolist() == [1, 0, 1] and envs.returns[1] == 0 != envs.returns[0]


def test_more_than_their_space_is_clipped_and_wrong_shapes_fail():
    envs = make_envs(num_envs=2)
    envs.reset(seed=0)
    set_states(envs, envs.qpos.repeat(2, 1), envs.qvel.repeat(2, 1))
    _, rewards, _, _, infos = envs.step(np.array([[1.0] * 6, [7.0] * 6]))
    assert rewards[0] == rewards[1] and torch.equal(*infos["final_obs"])
    for wrong in (torch.zeros(2, 3), np.zeros(6)):
        with pytest.raises(ValueError, match=r"^actions: \(.*\) is not \(2, 6\)"):
            envs.step(wrong)


def field_of(physics, name):
    """A field of the worlds' models (N, ...)."""
    if hasattr(physics, "batch"):
        return torch.from_numpy(physics.batch.expanded(name).copy()).float()
    warp = pytest.importorskip("warp")
    return warp.to_torch(getattr(physics.model, name))


@pytest.mark.parametrize("physics", PHYSICS[:2])
def test_each_world_has_a_model_of_its_own(physics):
    """Every world falls and runs as Gymnasium's environment does with that world's model."""
    steps, bound = (30, 2e-5) if physics == "c" else (12, 2e-3)
    worlds = make_envs("Hopper-v5", 4, physics, randomize=0.5, seed=7)
    env = gym.make("Hopper-v5").unwrapped
    usual = {name: getattr(env.model, name).copy() for name in RANDOMIZED}
    factors = mujoco_worlds.draw_factors(env.model, 4, 0.5, 7)
    assert set(factors) == set(usual)
    for factor in factors.values():
        assert ((0.5 <= factor) & (factor <= 1.5)).all() and factor.unique().numel() > 3
    masses = mujoco_worlds.draw_factors(env.model, 1000, 0.5, 7)["body_mass"]
    assert 0.5 <= masses.min() < 0.51 and 1.49 < masses.max() <= 1.5
    assert torch.equal(factors["body_inertia"][:, :, 0], factors["body_mass"])
    expected = torch.from_numpy(usual["body_mass"]) * factors["body_mass"]
    torch.testing.assert_close(field_of(worlds.physics, "body_mass"), expected.float())
    worlds.reset(seed=0)
    qpos, qvel = np.tile(env.init_qpos, (4, 1)), np.zeros((4, env.model.nv))
    qpos[:, 1] += 0.02
    set_states(worlds, qpos, qvel)
    for step in range(steps):  # it lands meanwhile
        actions = torch.full((4, 3), 0.3 if step % 2 else -0.3)
        worlds.state.steps.zero_()
        obs_of_worlds = worlds.step(actions)[4]["final_obs"]
    differ = []
    for i in range(4):
        for name, factor in factors.items():
            getattr(env.model, name)[:] = usual[name] * factor[i].numpy()
        mujoco.mj_setConst(env.model, env.data)
        for name in mujoco_worlds.DERIVED:
            expected = torch.from_numpy(getattr(env.model, name)).float()
            if expected.numel():  # the hopper has no tendons
                found = field_of(worlds.physics, name)[i].view(expected.shape)
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        env.reset(seed=0)
        mujoco.mj_resetData(env.model, env.data)
        env.set_state(qpos[i], qvel[i])
        for step in range(steps):
            obs = env.step(np.full(3, 0.3 if step % 2 else -0.3))[0]
        np.testing.assert_allclose(obs_of_worlds[i], obs, atol=bound)
        differ.append(obs)
    assert np.ptp(differ, axis=0).max() > 0.01
    again = make_envs("Hopper-v5", 4, physics, randomize=0.5, seed=7)
    masses, expected = (field_of(each.physics, "body_mass") for each in (again, worlds))
    assert torch.equal(masses, expected)


def test_fields_and_their_ranges_are_chosen_and_evaluations_have_them():
    ranges = {"dof_damping": (2.0, 3.0), "geom_friction": (0.1, 0.2)}
    envs = make_envs("Hopper-v5", 50, randomize=ranges)
    usual = envs.model.dof_damping
    shares = field_of(envs.physics, "dof_damping")[:, 3:] / torch.tensor(usual[3:]).float()
    assert shares.min() >= 2 and shares.max() <= 3 and shares.unique().numel() > 100
    assert envs.physics.batch.expanded("body_mass") is None
    friction = field_of(envs.physics, "geom_friction") / torch.tensor(envs.model.geom_friction)
    torch.testing.assert_close(friction[:, 0], friction[:, 1])
    assert 0.0999 < friction.min() < friction.max() < 0.2001
    dampings = [
        gym.make("worlds/Hopper-v5", randomize=ranges, seed=seed).unwrapped.model.dof_damping
        for seed in (1, 1, 2)
    ]
    assert (dampings[0] == dampings[1]).all() and (dampings[0] != dampings[2]).any()
    assert (dampings[0][3:] >= 2 * usual[3:]).all()
    model = gym.make("worlds/Hopper-v5", randomize=0.5).unwrapped.model
    assert model.body_subtreemass[0] == pytest.approx(model.body_mass.sum())
    shares = model.body_mass[1:] / envs.model.body_mass[1:]
    assert 0.5 <= shares.min() < shares.max() <= 1.5
    with pytest.raises(ValueError, match="^randomize: mass is no field"):
        make_envs("Hopper-v5", 2, randomize={"mass": (1, 2)})


def test_worlds_are_a_vector_environment_of_gymnasiums():
    envs = make_envs("Reacher-v5", 3)
    obs, infos = envs.reset(seed=0)
    assert obs.numpy() in envs.observation_space
    assert obs[0].numpy() in envs.single_observation_space
    assert infos == {} and envs.spec.id == "worlds/Reacher-v5" and envs.unwrapped is envs
    envs.action_space.seed(0)
    obs, rewards, terminated, truncated, _ = envs.step(envs.action_space.sample())
    assert obs.numpy() in envs.observation_space and obs.dtype == rewards.dtype == torch.float32
    assert terminated.dtype == truncated.dtype == torch.bool
    envs.close()
    assert envs.closed


def test_what_a_user_gets_wrong_is_named():
    with pytest.raises(ValueError, match="^physics: 'wrap' is none of auto, c, warp"):
        make_envs(physics="wrap")
    with pytest.raises(gym.error.Error, match="`Cheetah` doesn't exist in namespace worlds"):
        gym.make_vec("worlds/Cheetah-v6", num_envs=2)


def test_callbacks_of_the_host_program_stay():
    kind = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    own = kind(lambda model, data, i: 7.0)
    user = '<general joint="slide" gaintype="user" ctrlrange="-1 1"/>'
    model = mujoco.MjModel.from_xml_string(CART.format(user))
    data = mujoco.MjData(model)
    data.ctrl[0] = 1
    mujoco.set_mjcb_act_gain(own)
    try:
        make_envs(num_envs=2)
        mujoco.mj_forward(model, data)
        assert data.actuator_force[0] == 7
    finally:
        mujoco.set_mjcb_act_gain(None)


@pytest.fixture
def register(monkeypatch):
    """register(task): a task of one's own as Mine-v0, for this test."""
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    return lambda task: mujoco_worlds.register("Mine-v0", task)


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
    qpos = env.init_qpos + np.linspace(0, 0.1, env.model.nq)
    qvel = np.linspace(0, 1, env.model.nv)
    set_states(worlds, np.tile(qpos, (2, 1)), np.tile(qvel, (2, 1)))
    env.set_state(qpos, qvel)
    for name in ("qpos", "qvel", *fields):
        found = getattr(worlds.state, name).cpu().numpy()
        expected = [getattr(env.data, name)] * 2
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("physics", PHYSICS[:2])
def test_what_a_physics_cannot_give_is_refused(physics):
    class Reading(mujoco_worlds.HalfCheetah):
        reads = ("xposs",)

    with pytest.raises((AttributeError, ValueError), match="xposs"):
        MuJoCoWorlds(Reading(), 2, physics=physics)


# Tasks of one's own

CART = """<mujoco>
  <option timestep="0.01" gravity="0 0 0"/>
  <worldbody><body>
    <joint name="slide" type="slide" axis="1 0 0"/><geom size="0.1" mass="1"/>
  </body></worldbody>
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
    """cart(actuator, kind): a task whose model is a mass of 1 kg on rails."""

    def make(actuator=MOTOR, kind=Sliding):
        task = kind()
        task.model = str(tmp_path / "cart.xml")
        Path(task.model).write_text(CART.format(actuator))
        return task

    return make


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


def test_servos_of_other_strength_reach_the_same_place(cart):
    servo = '<position joint="slide" kp="100" kv="20" ctrlrange="-1 1"/>'
    envs = MuJoCoWorlds(cart(servo), 8, randomize=0.5)
    envs.reset(seed=0)
    paths = []
    for _ in range(300):
        paths.append(envs.step(torch.full((8, 1), 0.5))[0])
    assert (paths[-1] - 0.5).abs().max() < 1e-3 and paths[10].std() > 0.01


class Commanded(Task):
    """Follows a command, which changes every third step; the critic sees the force, too."""

    memory = {"command": 2, "last_actions": 1, "episodes": 1, "error": 1, "qfrc_applied": 1}
    max_steps = 7
    drawn = []

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
        self.drawn.append((mask, s.steps.clone(), new))

    def advance(self, s, generator):
        s.last_actions.copy_(s.actions)
        s.error.uniform_(-0.5, 0.5, generator=generator)
        s.command[:, 1] += (s.steps % 3 == 0).float()
        s.qfrc_applied.fill_(2.0)


@pytest.mark.usefixtures("backend")
@COMPILED
def test_a_task_remembers_from_step_to_step(cart, compiled):
    """A command, actions, a count over episodes, a push; noise is only in what the policy sees."""
    task = cart(kind=Commanded)
    task.drawn.clear()
    envs = MuJoCoWorlds(task, 3, seed=5)
    if compiled:
        envs.compile()
    obs, _ = envs.reset(seed=5)
    assert obs.shape == (3, 6) and envs.actor_dim == 4
    assert envs.single_observation_space.shape == (6,)
    command, last, noises = obs[:, 1:3].clone(), torch.zeros(3), []
    assert torch.equal(command, task.drawn[0][2].float()) and obs[:, 3].eq(0).all()
    assert torch.equal(command, envs.reset(seed=5)[0][:, 1:3]) and envs.state.episodes.eq(1).all()
    velocity = 0.0
    for step in range(1, 10):
        actions = torch.full((3, 1), 0.1 * step)
        obs, rewards, _, truncated, infos = envs.step(actions)
        torch.testing.assert_close(rewards, 10 * command[:, 0] + actions[:, 0] - last)
        assert truncated.all() == (step == 7)
        final = infos["final_obs"]
        noises.append(final[:, 0] - final[:, 4])
        velocity += 0.01 * (0.1 * step + (2.0 if step not in (1, 8) else 0))  # pushed by the last
        if step == 7:
            mask, steps, new = task.drawn[-1]
            assert mask.all() and steps.eq(7).all() and envs.state.episodes.eq(2).all()
            command, last, velocity = new.float(), torch.zeros(3), 0.0
            assert torch.equal(obs[:, 1:3], command) and obs[:, 3].eq(0).all()
            assert not torch.equal(final[:, 1], obs[:, 1]) and final[:, 3].eq(actions[:, 0]).all()
        else:
            command[:, 1] += ((step if step < 7 else step - 7) % 3 == 0) * 1.0
            last = actions[:, 0]
            torch.testing.assert_close(obs[:, 1:4], join(command, last[:, None]))
            torch.testing.assert_close(envs.state.qvel[:, 0], torch.full((3,), velocity))
    noises = torch.stack(noises)
    assert noises.abs().max() < 0.5 and noises.unique().numel() == 27 and noises.std() > 0.2


def test_one_world_is_an_environment_of_gymnasiums(register, cart):
    """What its vector of worlds says, of each alone; and what Gymnasium asks of one."""
    register(cart())
    env = gym.make("Mine-v0", render_mode="rgb_array")
    check_env(env.unwrapped, skip_render_check=True)
    assert env.spec.max_episode_steps == 1000 and env.unwrapped.metadata["render_fps"] == 100
    envs = gym.make_vec("Mine-v0", num_envs=1)
    rng = np.random.default_rng(0)
    obs, _ = env.reset(seed=3)
    assert obs == envs.reset(seed=4)[0].numpy()[0]  # both begin at 0
    for step in range(1, 1001):
        action = rng.uniform(-1, 1, 1).astype(np.float32)
        obs, reward, terminated, truncated, _ = env.step(action)
        _, rewards, _, ends, infos = envs.step(action[None])
        assert obs == infos["final_obs"].numpy()[0] and reward == rewards.item()
        assert not terminated and truncated == ends.item() == (step == 1000)


DRAWING = """
import gymnasium as gym, mujoco, mujoco_worlds, numpy as np, sys
try:
    mujoco.GLContext(9, 9).make_current()
except Exception as problem:
    sys.exit(f"no OpenGL: {problem}")
envs = gym.make_vec("worlds/Ant-v5", num_envs=3)
envs.reset(seed=1)
one, other = envs.render(worlds=(0, 2))
assert one.shape == other.shape == (480, 480, 3) and one.dtype == np.uint8
assert one.std() > 9 and (one != other).any()
assert (gym.make("worlds/Ant-v5", render_mode="rgb_array").unwrapped.dt) == envs.dt
"""


def test_worlds_are_drawn():
    """Those that are asked for; MuJoCo chooses its OpenGL when it is imported."""
    environment = os.environ | {"MUJOCO_GL": "egl", "PYTHONPATH": str(ROOT / "leanrl")}
    command = [sys.executable, "-c", DRAWING]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    if "no OpenGL: " in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr


def test_a_model_is_found_beside_its_task(tmp_path, monkeypatch, register):
    """Also when a run has another current folder, as a sweep's have."""
    (tmp_path / "rails.xml").write_text(CART.format(MOTOR))
    (tmp_path / "rails.py").write_text(
        "import mujoco_worlds\n\n\nclass Rails(mujoco_worlds.InvertedPendulum):\n"
        "    model = 'rails.xml'\n\n\nmujoco_worlds.register('Rails-v0', Rails())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/slow.py").write_text(
        "import mujoco_worlds, rails\n\n\nclass Slow(rails.Rails):\n    frame_skip = 9\n\n\n"
        "mujoco_worlds.register('Slow-v0', Slow())\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert gym.make_vec("slow:Slow-v0", num_envs=2).dt == pytest.approx(0.09)
    envs = gym.make_vec("rails:Rails-v0", num_envs=2)
    assert envs.reset(seed=0)[0].shape == (2, 2) and gym.make("rails:Rails-v0").reset(seed=0)
    # a motor without bounds would have an action space of [0, 0]
    (tmp_path / "rails.xml").write_text(CART.format('<motor joint="slide"/>'))
    with pytest.raises(ValueError, match="^model: rails.xml has an actuator without a ctrlrange"):
        gym.make_vec("Rails-v0", num_envs=2)


BOXES = "".join(
    f'<body pos="0 0 {0.2 + 0.25 * i}"><freejoint/><geom type="box" size=".1 .1 .1"/></body>'
    for i in range(30)
)


@NEEDS_WARP
@pytest.mark.slow
def test_contacts_that_do_not_fit_are_noticed(tmp_path):
    """By default thirty boxes in a tower fall through the floor on Warp."""
    path = tmp_path / "boxes.xml"
    motor = '<motor joint="slide" ctrlrange="-1 1"/>'
    hinge = '<body pos="5 0 1"><joint name="slide" type="slide"/><geom size="0.1"/></body>'
    floor = '<geom type="plane" size="9 9 1"/>'
    world = f"<worldbody>{floor}{hinge}{BOXES}</worldbody><actuator>{motor}</actuator>"
    path.write_text(f"<mujoco>{world}</mujoco>")

    class Boxes(Task):
        model = str(path)
        frame_skip = 10

        def observe(self, s):
            return s.qpos

        def reward(self, s):
            return s.speed

    heights = []
    for room in ({}, {"nconmax": 300, "njmax": 1200}):
        envs = MuJoCoWorlds(Boxes(), 1, physics="warp", **room)
        envs.reset(seed=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(64):
                envs.step(torch.zeros(1, 1))
        said = [str(x.message) for x in caught if "nconmax" in str(x.message)]
        assert bool(said) == bool(envs.overflows()) == (not room)
        heights.append(envs.state.qpos[0, 3::7].min().item())
    assert heights[1] > 0


# Parity


def rollout_of(obs, returns):
    unused = dict.fromkeys(("actions", "log_probs", "values", "advantages"), torch.zeros(len(obs)))
    return baseline.Batch(obs=obs, returns=returns, **unused)


@SCRIPTS
def test_statistics_and_values(module):
    """Statistics are those of all rollouts; values are in the units of returns."""
    torch.manual_seed(0)
    model = (agent := module.PPO(module.Args(**SMALL), spaces(OBS, A), CPU)).model
    rollouts = [i + (2 + i) * torch.randn(500, OBS) for i in range(3)]
    for rows in rollouts:
        model.observe(rollout_of(rows, 100 + 10 * rows[:, 0]))
    means = torch.stack([rows.mean(0) for rows in rollouts]).mean(0)
    variances = torch.stack([rows.var(0) for rows in rollouts]).mean(0)
    torch.testing.assert_close(model.obs_norm.running_mean, means, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.obs_norm.running_var, variances, atol=1e-3, rtol=1e-3)
    before = {name: x.clone() for name, x in agent.state_dict().items() if "running" in name}
    obs, noise = rollouts[0][:50], torch.randn(50, A)
    inputs = ((obs - means) / variances.sqrt()).clamp(-10, 10)
    with torch.no_grad():
        model.actor_logstd.fill_(-0.5)
        actions, log_probs = agent.act(obs, noise)
        values = model.value(obs)
        own, mean = model.critic(inputs).squeeze(-1), model.actor_mean(inputs)
        normal = torch.distributions.Normal(mean, math.exp(-0.5))
    expected = 100 + 10 * means[0] + 10 * variances[0].sqrt() * own
    torch.testing.assert_close(values, expected, atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(agent.value(obs.view(5, 10, OBS)), values.view(5, 10))
    torch.testing.assert_close((actions - mean) / normal.stddev, noise, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(log_probs, normal.log_prob(actions).sum(1), atol=1e-3, rtol=1e-3)
    after = agent.state_dict()
    assert len(before) == 4 and all(torch.equal(after[name], before[name]) for name in before)


def make_pair():
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**SMALL), spaces(OBS, A), CPU)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    reference.model.observe(rollout_of(torch.randn(100, OBS), 3 * torch.randn(100)))
    agent = variant.PPO(variant.Args(**SMALL), spaces(OBS, A), CPU)
    agent.load_state_dict(reference.state_dict())
    return reference, agent


def run_updates(reference, agent, count, tolerance):
    """`count` minibatch updates on both, then all metrics and parameters must agree."""
    obs = torch.randn(256, OBS)
    actions, log_probs = reference.act(obs, torch.randn(256, A))
    values = reference.value(obs[None])[0]
    columns = {
        "obs": obs,
        "actions": actions,
        "log_probs": log_probs,
        "values": values,
        "advantages": torch.randn(256),
        "returns": values + torch.randn(256),
    }
    for _ in range(count):
        index = torch.randperm(256)[:64]
        found = agent.update(variant.Batch(**columns), index)
        expected = reference.update(baseline.Batch(**columns), index)
        assert len(expected) == 6
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    states = agent.state_dict(), reference.state_dict()
    torch.testing.assert_close(*states, atol=tolerance, rtol=tolerance)


@SCRIPTS
def test_the_rate_follows_the_divergence(module):
    """Half and double of the wanted one are the bounds, between which it stays; it has limits."""
    agent = module.PPO(module.Args(**SMALL, learning_rate=1e-3), spaces(OBS, A), CPU)
    rates = []
    for kl in (0.13, 0.11, 0.04, 0.02, 0.02, 0.0, *10 * [0.0], *20 * [1.0]):
        agent.adapt(torch.tensor(kl), 0.06)
        rates.append(agent.learning_rate.item())
    first = [2 / 3, 2 / 3, 2 / 3, 1, 1.5, 2.25]
    assert rates[:6] == pytest.approx([1e-3 * x for x in first])
    assert rates[15] == pytest.approx(1e-2) and rates[-1] == pytest.approx(1e-5)


@COMPILED
def test_one_update_agrees(compiled):
    reference, agent = make_pair()
    if compiled:
        variant.compile_agent(agent)
    run_updates(reference, agent, 1, 1e-5)


def test_a_hundred_updates_agree(float64):
    run_updates(*make_pair(), 100, 1e-9)


def test_a_wrong_update_is_noticed():
    for flag, value in (("clip_coef", 0.01), ("max_grad_norm", 0.1), ("ent_coef", 0.1)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_updates(reference, agent, 3, 1e-5)


@pytest.mark.usefixtures("backend")
def test_numbers_that_a_copy_of_ppo_anneals_count():
    """Weights and the longest gradient change between updates, in compiled code as well."""
    reference, agent = make_pair()
    variant.compile_agent(agent)
    for ent_coef, max_grad_norm in ((0.01, 0.5), (0.5, 0.1), (0.2, 0.05), (0.1, 1.0)):
        for args in (reference.args, agent.args):
            args.ent_coef, args.max_grad_norm = ent_coef, max_grad_norm
            args.clip_coef = ent_coef
        run_updates(reference, agent, 1, 1e-5)


def test_whole_runs_agree_evaluate_and_resume():
    """Baseline, variant and compiled variant see the same episodes, which end in Hopper soon."""
    flags = {
        "total_timesteps": 1024,
        "save_model": True,
        "env_id": "worlds/Hopper-v5",
        "physics": "c",
    }
    flags |= {"eval_every": 1024, "eval_episodes": 2}
    series, expected = [], None
    for module, compiled in ((baseline, {}), (variant, {}), (variant, {"compile": True})):
        run_dir = train(module, **flags, **compiled, exp_name=f"{len(series)}")
        found = read_checkpoint(run_dir)["agent"]
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-2)
        series.append(read_scalars(run_dir))
        for tag in ("charts/episodic_return", "charts/eval_return", "charts/broken_worlds"):
            assert series[-1][tag] and len(series[-1][tag]) == len(series[0][tag])
        for tag in series[0]:
            if not tag.startswith(("charts/S", "charts/cpu", "charts/eval")):
                found = series[-1][tag]
                np.testing.assert_allclose(found, series[0][tag], 1e-2, 1e-3, err_msg=tag)
    again = train(variant, **flags | {"total_timesteps": 1280}, resume=str(run_dir))
    assert again == run_dir and read_checkpoint(run_dir)["global_step"] == 1280


def test_whole_runs_of_sac_agree_evaluate_and_resume(monkeypatch):
    """Three runs with the same draws from the replay buffer, which is filled more than once."""
    draw_alike(monkeypatch, sac_baseline, sac_variant)
    flags = {"total_timesteps": 800, "save_model": True, "env_id": "worlds/InvertedPendulum-v5"}
    flags |= {"physics": "c", "eval_every": 800, "eval_episodes": 2, "tau": 0.1, "utd_ratio": 0.25}
    for module in (sac_baseline, sac_variant):
        monkeypatch.setattr(module, "LOG_EVERY", 5)
    found = []
    for module, more in ((sac_baseline, {}), (sac_variant, {}), (sac_variant, {"compile": True})):
        run_dir = train(module, **flags, **more, exp_name=f"{len(found)}")
        found.append((read_checkpoint(run_dir), read_scalars(run_dir)))
    (expected, rows), *others = found
    timed = "charts/S", "charts/cpu", "charts/eval"  # a pole's fall counts whole steps
    assert len(rows["losses/qf_loss"]) == 15 and len(rows["charts/episodic_return"]) > 15
    assert len(rows["charts/eval_return"]) == 1 and len(rows["charts/broken_worlds"]) == 20
    for checkpoint, its_rows in others:
        assert its_rows.keys() == rows.keys()
        for tag in (tag for tag in rows if not tag.startswith(timed)):
            np.testing.assert_allclose(its_rows[tag], rows[tag], rtol=1e-2, atol=1e-3)
        for part in ("actor", "qf_target"):
            theirs, mine = (
                [x for name, x in each["agent"].items() if name.partition(".")[0] == part]
                for each in (expected, checkpoint)
            )
            theirs = stack_twins(theirs) if part == "qf_target" else theirs
            for x, y in zip(mine, theirs, strict=True):
                assert (
                    x - y
                ).abs().mean() < 1e-4  # Adam makes much of the last bit, here and there
        fields = [x for x in expected["replay"].values() if isinstance(x, torch.Tensor)]
        stored = torch.cat([x.reshape(496, -1) for x in fields], dim=1)
        torch.testing.assert_close(checkpoint["replay"]["rows"], stored, rtol=1e-2, atol=1e-2)
    flags |= {"total_timesteps": 900, "exp_name": "2"}
    again = train(sac_variant, **flags, resume=str(run_dir))
    assert again == run_dir and read_checkpoint(run_dir)["global_step"] == 896  # 112 steps of 8


@pytest.mark.usefixtures("backend")
def test_numbers_that_a_copy_of_sac_anneals_count():
    """Discount and target rate change between updates, in the baseline and in compiled code."""
    space = gym.spaces.Box(-1, 1, (A,), np.float32)
    agents = []
    for module in (sac_baseline, sac_variant):
        torch.manual_seed(0)
        agents.append(module.SAC(module.Args(), spaces(OBS, space), CPU))
    sac_variant.compile_agent(agents[1])
    torch.manual_seed(1)
    for gamma, tau in ((0.99, 0.005), (0.9, 0.1), (0.8, 0.2), (0.5, 0.3)):
        batch = sac_baseline.Batch(
            obs=torch.randn(64, OBS),
            actions=torch.randn(64, A).tanh(),
            next_obs=torch.randn(64, OBS),
            rewards=torch.randn(64),
            terminated=torch.zeros(64),
        )
        seed = torch.random.get_rng_state()
        metrics = []
        for agent in agents:
            agent.args.gamma, agent.args.tau = gamma, tau
            torch.random.set_rng_state(seed)  # the same noise for both
            metrics.append(agent.update(batch, actor_due=True, target_due=True))
        torch.testing.assert_close(*metrics, atol=1e-5, rtol=1e-5)
    reference, agent = agents
    target = stack_twins(list(reference.qf_target.parameters()))
    torch.testing.assert_close(list(agent.qf_target.parameters()), target, atol=1e-5, rtol=1e-5)


# On a GPU


@pytest.mark.gpu
@COMPILED
@pytest.mark.parametrize("module", [variant, sac_variant], ids=name_of)
def test_graphed_runs_agree_with_eager(module, compiled):
    """With MuJoCo's C engine, which does the same every time; and before and after each capture."""
    flags = {"env_id": "worlds/InvertedPendulum-v5", "physics": "c", "save_model": True}
    flags |= {"total_timesteps": 1024, "compile": compiled}  # or a pole falls a step later
    called = read_checkpoint(train(module, **flags, exp_name="called"))
    graphed = read_checkpoint(train(module, **flags, cudagraphs=True))
    torch.testing.assert_close(called["agent"], graphed["agent"], atol=1e-3, rtol=0)
    assert torch.equal(called["generators"][1], graphed["generators"][1])  # the GPU's


PPO_ON_GPU = {"num_envs": 4096, "num_steps": 16, "total_timesteps": 4096 * 16 * 10}
SAC_ON_GPU = {"num_envs": 4096, "utd_ratio": 0.001, "batch_size": 8192, "learning_starts": 8192}
SAC_ON_GPU |= {"buffer_size": 500_000, "total_timesteps": 4096 * 250}
PPO_WAITS = (
    "row = {tag: float(value) for",
    "exponential_average_factor = 1.0 / float(",  # BatchNorm's
    "if known.any():",
    'row["charts/episodic_return"] = rollout.episode_returns[known]',
    'row["charts/episodic_length"] = rollout.episode_lengths[known]',
)
SAC_WAITS = "total_return, total_length, episodes = totals.tolist()", "row = {tag: float(value) for"


def test_the_lines_that_may_wait_are_there():
    """What the next test allows, which only a GPU runs."""
    batch_norm = inspect.getsource(torch.nn.modules.batchnorm)
    for module, waiting in ((variant, PPO_WAITS), (sac_variant, SAC_WAITS)):
        text = inspect.getsource(module) + batch_norm
        assert all(line in text for line in waiting)


@pytest.mark.gpu
@NEEDS_WARP
@pytest.mark.parametrize(
    ("module", "flags", "captured", "waiting"),
    [(variant, PPO_ON_GPU, 5, PPO_WAITS), (sac_variant, SAC_ON_GPU, 50, SAC_WAITS)],
    ids=["PPO", "SAC"],
)
def test_only_rows_of_metrics_wait_for_the_device(module, flags, captured, waiting, monkeypatch):
    """4,096 worlds of mujoco_warp, from the iteration on by which all graphs are captured."""

    class Watch(module.Stopwatch):
        def tick(self, env_steps):
            super().tick(env_steps)
            steady = captured * 4096 <= env_steps / flags.get("num_steps", 1)
            last = env_steps >= flags["total_timesteps"]
            torch.cuda.set_sync_debug_mode("warn" if steady and not last else "default")

    monkeypatch.setattr(module, "Stopwatch", Watch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.main(module.Args(**flags, cudagraphs=True))
    waits = [x for x in caught if "synchronizing CUDA operation" in str(x.message)]
    lines = {linecache.getline(wait.filename, wait.lineno).strip() for wait in waits}
    assert lines and all(line.startswith(waiting) for line in lines), lines


@ALL_SCRIPTS
def test_a_run_that_cannot_begin_leaves_nothing(module, monkeypatch):
    with pytest.raises(gym.error.Error, match="Hopper-v5 because it doesn't have a vector entry"):
        train(module, env_id="Hopper-v5")  # Gymnasium's, not worlds/Hopper-v5
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(ImportError, match="mujoco_warp"):
        train(module, total_timesteps=1024, physics="warp")
    assert not Path("runs").exists()


@SCRIPTS
def test_minibatches_have_two_steps_or_more(module):
    with pytest.raises(ValueError, match="^--total-timesteps: two rollouts have 256 steps"):
        train(module, total_timesteps=255)  # the first one only measures
    for num_envs, num_steps, num_minibatches in ((7, 5, 2), (2, 2, 4)):
        sizes = {"num_envs": num_envs, "num_steps": num_steps, "num_minibatches": num_minibatches}
        steps = num_envs * num_steps
        with pytest.raises(ValueError, match=f"^--num-minibatches: {steps} steps, two or more"):
            train(module, total_timesteps=1024, **sizes)


@NEEDS_WARP
def test_warp_finds_the_cuda_device_that_torch_has_without_a_number(monkeypatch):
    class AskedFor(Exception):
        pass

    def ask(device):
        raise AskedFor(device)

    monkeypatch.setattr("warp.ScopedDevice", ask)
    with pytest.raises(AskedFor, match="^cuda$"):
        make_envs(num_envs=2, physics="warp on cuda")


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)
    assert_hunks_are_marked(sac_baseline, sac_variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        (name_of(baseline),),
        (name_of(variant), "--compile"),
        (name_of(sac_variant), "--compile", "--utd-ratio=0.02"),
    ],
    ids=" ".join,
)
def test_it_learns(command, tmp_path):
    """HalfCheetah: a random policy gets about -300; what is learned is worth as much in Warp."""
    flags = "--total-timesteps=1000000", "--eval-every=1000000", "--save-model"
    run(tmp_path, *command, *flags)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert read_scalars(run_dir)["charts/eval_return"][-1][1] > 2000
    if HAS_WARP:
        on_c, on_warp = (play(run_dir, physics).mean().item() for physics in ("c", "warp"))
        assert on_c > 2000 and on_warp == pytest.approx(on_c, rel=0.1)


def play(run_dir, physics, num_envs=32):
    """Returns (N,) of whole episodes by the mean actions of a run's checkpoint."""
    checkpoint = read_checkpoint(run_dir)
    module = importlib.import_module(f"leanrl.{checkpoint['args']['exp_name']}")
    args, envs = module.Args(**checkpoint["args"]), make_envs("HalfCheetah-v5", num_envs, physics)
    of_sac = hasattr(module, "SAC")
    agent = (module.SAC if of_sac else module.PPO)(args, envs, CPU)
    agent.load_state_dict(checkpoint["agent"])
    returns, (obs, _) = torch.zeros(num_envs), envs.reset(seed=2**31)
    for _ in range(1000):
        actions = agent.act(obs, torch.zeros(num_envs, A))
        obs, rewards, _, truncated, _ = envs.step(actions if of_sac else actions[0])
        returns += rewards
    assert truncated.all() and envs.broken == 0
    return returns
