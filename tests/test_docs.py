"""What README and the docstrings say exists: paths, flags, commands."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import readme
import torch
import tyro
from conftest import ROOT
from test_mujoco import CPU, NEEDS_WARP
from test_sac import read_scalars

from leanrl import ppo_mujoco_worlds
from leanrl.stopwatch import NOT_SCRIPTS

README = (ROOT / "README.md").read_text()
MANUAL = (ROOT / "leanrl/README.md").read_text()
ACT = (ROOT / ".github/ACT.md").read_text()
SCRIPTS = {
    path.stem: importlib.import_module(f"leanrl.{path.stem}")
    for path in sorted((ROOT / "leanrl").glob("*.py"))
    if path.name not in NOT_SCRIPTS
}
PROGRAMS = [ROOT / "leanrl/sweep.py", *sorted((ROOT / "plots").rglob("*.py"))]
OTHER_FLAGS = {
    *("--standalone", "--nproc-per-node", "--max-restarts"),  # torchrun's
    *("--nnodes", "--node-rank", "--master-addr"),
    "--generate",  # Ray's
    "--head",
    "--node-ip-address",
    "--dashboard-host",
    "--help",
    "--logdir",
    "--stamp",
    "--check",
    "--slow",
    "--full",
    "--no-cuda",
}


def test_paths_exist():
    paths = set(
        re.findall(
            r"(?<![\w/<])((?:leanrl|plots|tests|requirements|\.ci|\.github)/[\w./-]*)", README
        )
    )
    assert len(paths) > 5
    made_by_runs = {"plots/out/"}
    missing = [p for p in paths - made_by_runs if not (ROOT / p.rstrip(".")).exists()]
    assert not missing


TORCHRUNS = [
    line.replace("torchrun", "python").replace(words, " ")
    for line, words in re.findall(r"(torchrun( .*? )leanrl/.*)", README)
]


def test_every_script_is_named():
    for path in (ROOT / "leanrl").glob("*.py"):
        assert path.name in README, f"{path.name} is not in README"


def flags_of(module) -> set[str]:
    flags = set()
    for field in dataclasses.fields(module.Args):
        name = field.name.replace("_", "-")
        flags |= {f"--{name}", f"--no-{name}"}
    return flags


def test_flags_exist():
    known = OTHER_FLAGS.union(*(flags_of(module) for module in SCRIPTS.values()))
    for program in PROGRAMS:
        known |= set(re.findall(r"\"(--[a-z-]+)\"", program.read_text()))
    unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", README)) - known
    assert not unknown


def commands() -> list[str]:
    """Those of README and of the scripts' docstrings that run a script, each in a line."""
    text = README + "".join(module.__doc__ for module in SCRIPTS.values()).replace("\\\n", " ")
    lines = re.findall(r"python leanrl/(?!stopwatch|sweep)\S+\.py.*", text) + TORCHRUNS
    return sorted({" ".join(line.split("#")[0].strip("`").split()) for line in lines})


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line):
    """Each command names a script and flags that the script has."""
    script, *words = line.split()[1:]
    module = SCRIPTS[script.removeprefix("leanrl/").removesuffix(".py")]
    for flag in (word for word in words if word.startswith("--")):
        assert flag in flags_of(module) | {"--help"}, f"{flag} in {line!r}"


def test_numbers_are_those_of_the_records():
    """README as it is, and as plots/readme.py would write it."""
    assert set(re.findall(r"<!-- record: (\w+) -->", README)) == set(readme.REGIONS)
    for region in readme.REGION.finditer(README):
        assert region[3] == readme.REGIONS[region[2]](), f"{region[2]}: run plots/readme.py"


def test_no_measured_number_stands_outside_of_the_regions():
    prose = re.sub(r"```.*?```", "", readme.REGION.sub("", README), flags=re.DOTALL)
    prose = prose.replace("bash run.sh          # sets up", "")
    assert len(prose) < len(README) - 3000
    claims = r"\d[\d,.]*x\b|\d[\d,.]*( [kM])? steps/s|\d[\d,.]* (us|ms|MB|GB)\b|\d[\d.]*%"
    found = [match[0] for match in re.finditer(claims, prose)]
    assert found == ["95%"]  # the interval of a mean


def blocks(language: str, page: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def blocks_with(word: str) -> str:
    (block,) = (block for block in blocks("python", MANUAL) if word in block)
    return block


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))


@pytest.fixture
def balance(tmp_path, monkeypatch, registry):
    """The manual's own task, in a folder that is not the current one."""
    (xml,) = blocks("xml", MANUAL)
    (tmp_path / "balance.xml").write_text(xml)
    (tmp_path / "balance.py").write_text(blocks_with("class Balance"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "balance", raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return mujoco.MjModel.from_xml_path(str(tmp_path / "balance.xml"))


@pytest.mark.parametrize(
    "physics", ["c", pytest.param("warp", marks=[NEEDS_WARP, pytest.mark.slow])]
)
def test_a_task_of_your_own_is_what_mujoco_says_and_can_be_learned(physics, balance):
    envs = gym.make_vec("balance:Balance-v0", num_envs=3, physics=physics)
    obs, _ = envs.reset(seed=1, options={"stagger": True})
    assert obs.abs().max() < 0.02 and obs.unique().numel() == 12
    states = [mujoco.MjData(balance) for _ in range(3)]

    def begin(data, row):
        mujoco.mj_resetData(balance, data)
        data.qpos, data.qvel = row.numpy().reshape(2, 2)

    for data, row in zip(states, obs, strict=True):
        begin(data, row)
    ends = 0
    for _ in range(100):
        actions = torch.rand(3, 1) * 2 - 1
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for i, data in enumerate(states):
            x = data.qpos[0]
            data.ctrl[0] = actions[i].item()
            mujoco.mj_step(balance, data, 2)
            final, height = [*data.qpos, *data.qvel], data.site_xpos[0, 2]
            np.testing.assert_allclose(infos["final_obs"][i], final, atol=1e-3)
            expected = height - 1 - 0.1 * abs(data.qpos[0] - x) / 0.02
            assert rewards[i].item() == pytest.approx(expected, abs=1e-3)
            assert terminated[i].item() == (height < 1.3)
            ends += terminated[i].item()
            if terminated[i] or truncated[i]:
                begin(data, obs[i])
    assert ends > 3 and envs.state.steps.max() < 200
    flags = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 96}
    flags |= {"physics": physics, "env_id": "balance:Balance-v0"}
    args = ppo_mujoco_worlds.Args(**flags, eval_every=96, eval_episodes=2)
    run_dir = ppo_mujoco_worlds.main(args)
    assert run_dir.name.startswith("balance_Balance-v0__")
    assert 0 < read_scalars(run_dir)["charts/eval_return"][-1][1] < 200 * 0.6


@pytest.mark.parametrize("script", ["ppo_mujoco_worlds", "sac_mujoco_worlds_torchcompile"])
def test_the_joystick_trains_a_policy_that_sees_sensors_alone(
    script, monkeypatch, registry, tmp_path
):
    monkeypatch.syspath_prepend(ROOT / "leanrl/tasks")
    monkeypatch.delitem(sys.modules, "joystick", raising=False)
    monkeypatch.chdir(tmp_path)
    module = SCRIPTS[script]
    flags = {"num_steps": 8, "num_minibatches": 2} if script[0] == "p" else {"learning_starts": 40}
    flags |= {"env_id": "joystick:AntJoystick-v0", "num_envs": 4, "total_timesteps": 96}
    flags |= {"randomize": 0.2, "eval_every": 96, "eval_episodes": 2, "save_model": True}
    run_dir = module.main(module.Args(**flags))
    assert np.isfinite(read_scalars(run_dir)["charts/eval_return"][-1][1])
    weights = torch.load(run_dir / "checkpoint.pt")["agent"]
    first = next(x for name, x in weights.items() if re.match(r"(model\.)?actor.*weight", name))
    assert first.shape[1] == 35
    envs = gym.make_vec("AntJoystick-v0", num_envs=4)
    agent = (module.PPO if script[0] == "p" else module.SAC)(module.Args(**flags), envs, CPU)
    agent.load_state_dict(weights)
    obs, noise = torch.randn(4, 66), torch.zeros(4, 8)
    acted = agent.act(obs, noise)
    obs[:, 35:] += 1
    torch.testing.assert_close(agent.act(obs, noise), acted)
    obs[:, :35] += 1
    with pytest.raises(AssertionError):
        torch.testing.assert_close(agent.act(obs, noise), acted)


def test_other_libraries_train_on_worlds(registry):
    """By the manual's adapters: episodes of the right length, whose ends they tell apart."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    names = {"gym": gym, "stable_baselines3": sys.modules["stable_baselines3"]}
    exec(blocks_with("class SB3Worlds"), names)
    exec(blocks_with("class CleanRLWorlds"), names)
    worlds = gym.make_vec("worlds/Reacher-v5", num_envs=3)
    envs = vec_env.VecMonitor(names["SB3Worlds"](worlds))
    obs = envs.reset()
    for _ in range(50):
        obs, rewards, ended, infos = envs.step(np.zeros((3, 2), np.float32))
    assert ended.all() and {info["episode"]["l"] for info in infos} == {50}
    assert all(info["TimeLimit.truncated"] for info in infos)
    assert not np.allclose([info["terminal_observation"] for info in infos], obs)
    envs = names["CleanRLWorlds"](worlds)
    obs, _ = envs.reset(seed=1)
    for _ in range(50):
        obs, rewards, _, truncated, infos = envs.step(np.zeros((3, 2), np.float32))
    assert isinstance(obs, np.ndarray) and truncated.all() and len(infos["final_info"]) == 3
    assert {info["episode"]["l"] for info in infos["final_info"]} == {50}


def test_the_policy_of_a_checkpoint_acts(tmp_path, monkeypatch, capsys):
    """Those of .github/ACT.md, as they are but for the run's name, on a run of either script."""
    (code,) = blocks("python", ACT)
    monkeypatch.chdir(tmp_path)
    settings = {"env_id": "Pendulum-v1", "batch_size": 16, "learning_starts": 20}
    for name in ("sac_continuous_action", "sac_continuous_action_torchcompile"):
        module = SCRIPTS[name]
        run_dir = module.main(module.Args(**settings, total_timesteps=30, save_model=True))
        capsys.readouterr()
        exec(code.replace("sac_continuous_action", name).replace("runs/RUN", str(run_dir)), {})
        assert -2000 < float(capsys.readouterr().out) < 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_flag(script, capsys, monkeypatch):
    """In the words of the comments behind the fields of Args."""
    monkeypatch.setenv("COLUMNS", "200")
    module = SCRIPTS[script]
    with pytest.raises(SystemExit) as end:
        tyro.cli(module.Args, args=["--help"])
    assert end.value.code in (0, None)
    shown = " ".join(re.sub("[^ -~]", " ", capsys.readouterr().out).split())
    source = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(module.Args), re.M))
    for field in dataclasses.fields(module.Args):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert " ".join(source[field.name].split()) in shown, field.name


BETWEEN_0_AND_1 = {"gamma", "gae_lambda", "q_lambda", "tau"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_would_train_wrongly_is_refused_by_its_flag(script, monkeypatch, capsys):
    """A discount of more than 1, say, or a run that ends before it has learned."""
    module = SCRIPTS[script]
    names = BETWEEN_0_AND_1 & {field.name for field in dataclasses.fields(module.Args)}
    assert names
    bad = [(name, x) for name in names for x in (-0.001, 1.001)] + [("total_timesteps", 1)]
    for name, x in bad:
        flag = f"--{name.replace('_', '-')}"
        monkeypatch.setattr(sys, "argv", [script, f"{flag}={x}"])
        with pytest.raises(SystemExit) as end:
            module.parse_args(module.Args)
        assert end.value.code and flag in capsys.readouterr().err, (name, x)


def test_imports_have_no_side_effects(tmp_path):
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    command = [sys.executable, "-c", code, *(module.__name__ for module in SCRIPTS.values())]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'leanrl'}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert not list(tmp_path.iterdir())
