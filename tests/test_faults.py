"""What environments do that training must survive: reused arrays, odd boxes, types and seeds."""

import importlib
import json
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, read_checkpoint, read_scalars

NAMES = [
    f"{name}_continuous_action{suffix}"
    for name in ("sac", "td3", "ppo")
    for suffix in ("", "_torchcompile")
]
SCRIPTS = pytest.mark.parametrize(
    "module", [importlib.import_module(f"leanrl.{name}") for name in NAMES], ids=NAMES
)
OFF_POLICY = pytest.mark.parametrize(
    "module", [importlib.import_module(f"leanrl.{name}") for name in NAMES[:4]], ids=NAMES[:4]
)
LOW, HIGH = np.float32([0.1, -0.3]), np.float32([0.7, 0.9])


class Rude(gym.Env):
    """Five steps an episode; returns the same objects, changed in place, as its action is.

    Observes its episode and its step. `contains` and a seed of 32 bits are asked for.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    episode = -1
    seen = []

    def __init__(self, dtype=np.float32, reward=1.0):
        self.action_space = gym.spaces.Box(LOW.astype(dtype), HIGH.astype(dtype), dtype=dtype)
        self.obs, self.info, self.reward = np.zeros(2, np.float32), {}, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=None if seed is None else int(np.int32(seed)))
        self.episode += 1
        self.obs[:] = self.episode, 0
        return self.obs, self.info

    def step(self, action):
        assert self.action_space.contains(action), (action, action.dtype)
        self.seen.append(action.copy())
        action *= 10
        self.obs[1] += 1
        return self.obs, self.reward, False, self.obs[1] == 5, self.info


@pytest.fixture(autouse=True)
def small_world(monkeypatch, tmp_path, registry):
    monkeypatch.chdir(tmp_path)
    gym.register("Rude-v0", Rude, disable_env_checker=True)
    Rude.seen.clear()


def train(module, env_id="Rude-v0", steps=300, **flags):
    if hasattr(module, "PPO"):
        small = {"num_steps": 50, "num_minibatches": 2, "update_epochs": 1}
    else:
        small = {"learning_starts": 100, "batch_size": 8, "buffer_size": 400}
    small |= {"total_timesteps": steps, "save_model": True} | flags
    return module.main(module.Args(env_id=env_id, **small))


def stored(run_dir) -> dict[str, torch.Tensor]:
    """The transitions of either script's replay buffer, by name."""
    replay = read_checkpoint(run_dir)["replay"]
    if "rows" in replay:
        names = "obs", "actions", "next_obs", "rewards", "terminated"
        return dict(zip(names, replay["rows"].split([2, 2, 2, 1, 1], dim=1), strict=True))
    return replay


@pytest.mark.parametrize("num_envs", [1, 2])
@OFF_POLICY
def test_a_truncation_is_stored_with_its_last_observation(module, num_envs):
    """The environment's array holds the next episode's first one by then."""
    replay = stored(train(module, num_envs=num_envs))
    before, after = replay["obs"], replay["next_obs"]
    assert torch.equal(after[:, 0], before[:, 0]) and torch.equal(after[:, 1], before[:, 1] + 1)
    assert after[:, 1].eq(5).sum() == 300 / 5 and after[:, 0].max() > 10


@OFF_POLICY
def test_stored_actions_are_the_policys(module):
    """The environment has multiplied its own by ten."""
    actions = stored(train(module))["actions"].numpy()
    assert (actions > LOW - 1e-6).all() and (actions < HIGH + 1e-6).all()
    np.testing.assert_allclose(actions, Rude.seen[:300], atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@SCRIPTS
def test_actions_lie_in_the_box_also_at_its_corners(module, dtype):
    """While training and while evaluating; a policy that wants the corners finds their rounding."""
    gym.register("Rude-v1", lambda **_: Rude(dtype), disable_env_checker=True)
    training = [0.99] if hasattr(module, "PPO") else []  # whose environments clip
    envs = module.make_envs("Rude-v1", 1, *training)
    envs.reset(seed=1)
    scale = torch.tensor((HIGH - LOW) / 2), torch.tensor((HIGH + LOW) / 2)
    for corner in ([-1, -1], [1, 1], [-1, 1], [1, -1]):
        actions = (torch.tensor([corner]) * scale[0] + scale[1]).numpy()
        envs.step(actions)
    train(module, "Rude-v1", eval_every=100, eval_episodes=2)


@SCRIPTS
def test_episodes_count_although_infos_and_observations_are_reused(module):
    run_dir = train(module, eval_every=300, eval_episodes=3)
    scalars = read_scalars(run_dir)
    assert len(scalars["charts/episodic_return"]) == 60
    assert {value for _, value in scalars["charts/episodic_return"]} == {5}
    assert scalars["charts/eval_return"][-1][1] == 5


class Half(gym.Env):
    """Everything in float16: 3,000 steps with a reward of 1, observations of 200."""

    observation_space = gym.spaces.Box(-300, 300, (400,), np.float16)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.full(400, 200, np.float16), {}

    def step(self, action):
        self.steps += 1
        obs = np.full(400, 200 - self.steps % 2, np.float16)
        return obs, np.float16(1), False, self.steps == 3000, {}


@SCRIPTS
def test_float16_is_summed_in_float32(module):
    gym.register("Half-v0", Half, disable_env_checker=True)
    flags = {} if hasattr(module, "PPO") else {"learning_starts": 2990, "buffer_size": 3000}
    run_dir = train(module, "Half-v0", 3000, **flags)
    assert read_scalars(run_dir)["charts/episodic_return"][-1][1] == 3000


@OFF_POLICY
@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        ([0, 1], [1, 1], "^--env-id: dimension 1 of the actions spans 0"),
        ([-3e38, 0], [3e38, 1], r"^--env-id: dimension 0 of the actions spans 6e\+38"),
        ([0, 0], [1, np.inf], "^--env-id: dimension 1 of the actions spans inf"),
    ],
)
def test_bounds_that_no_policy_fills_are_named(module, low, high, said):
    class Wide(Rude):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.Box(np.float32(low), np.float32(high))

    gym.register("Wide-v0", Wide, disable_env_checker=True)
    with pytest.raises(ValueError, match=said):
        train(module, "Wide-v0")


# Settings, and processes that train more than once


def test_numpy_numbers_are_settings_like_others():
    """In config.json and, to go on from, in the checkpoint."""
    module = importlib.import_module(f"leanrl.{NAMES[0]}")
    run_dir = train(module, steps=np.int64(300), gamma=np.float32(0.5))
    args = json.loads((run_dir / "config.json").read_text())["args"]
    assert (args["total_timesteps"], args["gamma"]) == (300, 0.5)
    assert train(module, steps=400, resume=str(run_dir)) == run_dir
    assert read_checkpoint(run_dir)["global_step"] == 400


def test_a_tenth_agent_of_a_process_is_compiled(monkeypatch):
    """Each has another shape, which Dynamo counts against a limit of eight."""
    module = importlib.import_module("leanrl.sac_continuous_action_torchcompile")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    box = gym.spaces.Box(-1, 1, (2,), np.float32)
    for obs_dim in range(1, 11):
        agent = module.SAC(module.Args(), obs_dim, box, CPU)
        module.compile_agent(agent)
        assert agent.act(torch.randn(8, obs_dim), torch.randn(8, 2)).shape == (8, 2)


@pytest.mark.parametrize("name", NAMES[1:4:2])
def test_a_missing_compiler_is_found_before_exploration(name, monkeypatch):
    def compile_without_compiler(function, **_):
        def called(*_):
            raise RuntimeError("no compiler")

        return called

    monkeypatch.setattr(torch, "compile", compile_without_compiler)
    with pytest.raises(RuntimeError, match="no compiler"):
        train(importlib.import_module(f"leanrl.{name}"), compile=True)
    assert not Rude.seen
