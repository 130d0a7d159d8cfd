"""A policy as an ONNX file acts as its script does, in the environment's units."""

import importlib
import json

import gymnasium as gym
import mujoco_worlds  # noqa: F401  # before the registry of a test
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import CPU, evaluation_seeds, note, spaces

from leanrl.stopwatch import NOT_SCRIPTS

pytest.importorskip("onnx", reason="needs requirements/onnx.txt")
pytest.importorskip("onnxscript", reason="needs requirements/onnx.txt")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs requirements/onnx.txt")

from leanrl import export  # noqa: E402

EPISODES, SEED = 2, 3
PENDULUM = gym.spaces.Box(-2, 2, (1,))
WORLD = {"env_id": "worlds/InvertedPendulum-v5"}
OF_WORLDS = (spaces(4, gym.spaces.Box(-3, 3, (1,))),)
CASES = {  # the beginning of a script's name -> flags, what the agent is told of its environment
    "sac_continuous": ({"env_id": "Pendulum-v1"}, (3, PENDULUM)),
    "td3_continuous": ({"env_id": "Pendulum-v1"}, (3, PENDULUM)),
    "ppo_continuous": ({"env_id": "Pendulum-v1"}, (3, 1)),
    "ppo_lstm": ({"env_id": "Pendulum-v1", "observed": (1, 0)}, (2, PENDULUM)),
    "ppo_cartpole": ({}, (4, 2)),
    "ppo_mujoco": (WORLD, OF_WORLDS),
    "sac_mujoco": (WORLD, OF_WORLDS),
    "ppo_atari": ({}, (4,)),
    "pqn_atari": ({}, (4,)),
}
DEFAULT = ["ppo_continuous_action", "ppo_lstm", "sac_mujoco_worlds"]  # each file takes seconds
NAMES = sorted(path.stem for path in (ROOT / "leanrl").glob("*.py") if path.name not in NOT_SCRIPTS)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # the exporter's own
]


def make(name: str, **more) -> tuple:
    """An untrained agent, whose weights were moved so that its actions differ, and its flags."""
    if "atari" in name:
        pytest.importorskip("envpool", reason="needs requirements/envpool.txt")
    module = importlib.import_module(f"leanrl.{name}")
    flags, space = next(case for start, case in CASES.items() if name.startswith(start))
    flags = flags | {"exp_name": name, "seed": SEED, "eval_episodes": EPISODES} | more
    args = module.Args(**flags)
    torch.manual_seed(SEED)
    agent = export.agent_class(module)(args, *space, CPU)
    with torch.no_grad():
        for key, tensor in agent.state_dict().items():
            if tensor.is_floating_point() and "action_" not in key and "var" not in key:
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif "var" in key:
                tensor.mul_(2)
    return module, agent, args


def statistics_of(module, agent, args) -> dict:
    """What `evaluate` is given besides, and what a checkpoint holds of it."""
    if module.__name__.startswith("leanrl.ppo_continuous"):
        return {"obs_rms_mean": torch.randn(2, 3), "obs_rms_var": 1 + torch.rand(2, 3)}
    if "lstm" in module.__name__:
        envs = module.NormalizedEnvs(module.make_envs(args.env_id, 2, args.observed), 0.99)
        size = envs.single_observation_space.shape[0]
        envs.obs_rms.mean, envs.obs_rms.var = np.linspace(-1, 1, size), np.linspace(1, 2, size)
        return envs
    return None


def write(folder, agent, args, statistics) -> None:
    state = {"args": vars(args), "agent": agent.state_dict(), "global_step": 64}
    if statistics is not None:
        known = getattr(statistics, "state_dict", lambda: statistics)
        state["statistics"] = known()
    torch.save(state, folder / "checkpoint.pt")


def open_file(path) -> tuple:
    session = onnxruntime.InferenceSession(path)
    metadata = session.get_modelmeta().custom_metadata_map
    return session, {name: json.loads(x) for name, x in metadata.items()}


def play(session, env_id: str, seed: int, steps: int) -> list:
    """Actions of an episode, by the file alone."""
    env = gym.make(env_id)
    obs, _ = env.reset(seed=seed)
    inputs = {"state": np.zeros((2, 1, 64), np.float32)}
    takes_state = len(session.get_inputs()) > 1
    taken = []
    for _ in range(steps):
        inputs["obs"] = np.float32(obs)[None]
        action, *rest = session.run(None, inputs if takes_state else {"obs": inputs["obs"]})
        if takes_state:
            inputs["state"] = rest[-1]
        taken.append(action[0])
        obs, _, terminated, truncated, _ = env.step(action[0])
        if terminated or truncated:
            break
    return taken


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in DEFAULT else pytest.mark.slow) for x in NAMES]
)
def test_a_file_acts_as_its_script_evaluates(name, tmp_path, monkeypatch):
    module, agent, args = make(name)
    statistics = statistics_of(module, agent, args)
    write(tmp_path, agent, args, statistics)
    path = export.main(export.Args(tmp_path))
    session, metadata = open_file(path)
    assert metadata["env_id"] == args.env_id and metadata["script"] == name
    if "atari" in name:
        obs = torch.randint(0, 256, (3, *module.OBS_SHAPE), dtype=torch.uint8)
        action, scores = session.run(None, {"obs": obs.numpy()})
        with torch.no_grad():
            expected = agent.model(obs)
        expected = expected[0] if isinstance(expected, tuple) else expected
        np.testing.assert_allclose(scores, expected, atol=1e-4, rtol=1e-4)
        assert action.tolist() == expected.argmax(dim=1).tolist()
        return

    taken = []
    vector = getattr(module, "LeanVectorEnv", gym.vector.SyncVectorEnv)
    note(monkeypatch, vector, "step", lambda _, envs, actions: taken.append(actions.copy()))
    more = [] if statistics is None else [statistics]
    module.evaluate(agent, args, *more, tmp_path / "videos")
    monkeypatch.undo()
    for i, seed in enumerate(evaluation_seeds(args.seed, EPISODES)):
        found = play(session, args.env_id, seed, 50)
        expected = np.array([actions[i] for actions in taken[: len(found)]])
        if expected.dtype.kind == "f":
            low, high = metadata["action_low"], metadata["action_high"]
            assert (np.array(found) >= low).all() and (np.array(found) <= high).all()
        assert np.unique(expected).size > 1
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_invalid_actions_can_be_masked(tmp_path):
    """An LSTM's discrete actions come with their log-probabilities, of any number of rows."""
    module, agent, args = make("ppo_lstm", env_id="CartPole-v1", observed=())
    agent = module.PPO(args, 4, gym.spaces.Discrete(2), CPU)
    envs = module.NormalizedEnvs(module.make_envs("CartPole-v1", 2, ()), 0.99)
    write(tmp_path, agent, args, envs)
    session, metadata = open_file(export.main(export.Args(tmp_path, out=tmp_path / "x.onnx")))
    assert "action_low" not in metadata
    obs, state = np.random.randn(3, 4).astype(np.float32), np.ones((2, 3, 64), np.float32)
    action, scores, next_state = session.run(None, {"obs": obs, "state": state})
    assert action.dtype == np.int64 and action.tolist() == scores.argmax(axis=1).tolist()
    np.testing.assert_allclose(np.exp(scores).sum(axis=1), 1, atol=1e-5)
    assert next_state.shape == state.shape and (next_state != state).any()


def test_metadata_name_what_moves(tmp_path):
    module, agent, args = make("sac_mujoco_worlds")
    write(tmp_path, agent, args, None)
    _, metadata = open_file(export.main(export.Args(tmp_path)))
    assert metadata["joints"] == ["slider", "hinge"] and metadata["actuators"] == ["slide"]
    assert metadata["control_hz"] == pytest.approx(25)
    assert metadata["action_low"] == [-3] and metadata["action_high"] == [3]


@pytest.mark.parametrize("name", ["ppo_mujoco_worlds", "sac_mujoco_worlds"])
def test_a_robot_gives_what_its_policy_sees(name, tmp_path, joystick):
    """A task of one's own, of whose 66 numbers only the critic sees the last 31."""
    envs = gym.make_vec(joystick, num_envs=1)
    module = importlib.import_module(f"leanrl.{name}")
    args = module.Args(env_id=joystick, exp_name=name)
    agent = export.agent_class(module)(args, envs, CPU)
    if name.startswith("ppo"):
        agent.model.actor_mean[4].weight.data.mul_(100)  # actions leave the box
    write(tmp_path, agent, args, None)
    session, metadata = open_file(export.main(export.Args(tmp_path)))
    assert metadata["control_hz"] == pytest.approx(1 / envs.dt) and len(metadata["joints"]) == 9
    obs = torch.randn(3, 66)
    (actions,) = session.run(None, {"obs": obs[:, :35].numpy()})
    with torch.no_grad():
        if name.startswith("ppo"):
            expected = module.clipped_mean(*agent.model(obs), envs.low, envs.high)
        else:
            expected = agent.act(obs, torch.zeros(3, 8))
    np.testing.assert_allclose(actions, expected, atol=1e-4, rtol=1e-4)


def test_what_has_no_bounds_has_none_in_json(tmp_path, registry):
    """Dict observations are flattened; actions may be float64, and anything."""
    seen = gym.spaces.Dict({name: gym.spaces.Box(-1, 1, (2,)) for name in "ab"})
    free = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    kind = type("Free", (gym.Env,), {"observation_space": seen, "action_space": free})
    gym.register("Free-v0", entry_point=kind)
    module = importlib.import_module("leanrl.ppo_continuous_action")
    args = module.Args(env_id="Free-v0", exp_name="ppo_continuous_action")
    statistics = {"obs_rms_mean": torch.zeros(1, 4), "obs_rms_var": torch.ones(1, 4)}
    write(tmp_path, module.PPO(args, 4, 2, CPU), args, statistics)
    session, metadata = open_file(export.main(export.Args(tmp_path)))
    assert "action_low" not in metadata and "action_high" not in metadata
    (actions,) = session.run(None, {"obs": np.ones((1, 4), np.float32)})
    assert actions.dtype == np.float32 and actions.shape == (1, 2)


def test_a_copy_is_named(tmp_path):
    """A file that has another name, and imports what stands beside it."""
    source = (ROOT / "leanrl/ppo_cartpole_gpu.py").read_text()
    (tmp_path / "mine.py").write_text("import beside\n" + source)
    (tmp_path / "beside.py").write_text("")
    module, agent, args = make("ppo_cartpole_gpu", exp_name="mine")
    write(tmp_path, agent, args, None)
    with pytest.raises(FileNotFoundError, match=r"mine\.py"):
        export.main(export.Args(tmp_path))
    _, metadata = open_file(export.main(export.Args(tmp_path, script=tmp_path / "mine.py")))
    assert metadata["script"] == "mine"
