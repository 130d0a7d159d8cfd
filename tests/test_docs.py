"""What README and the docstrings say exists: paths, flags, commands."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import readme
import torch
import tyro
from conftest import ROOT
from test_mujoco import NEEDS_WARP
from test_sac import read_scalars

from leanrl import ppo_mujoco_worlds
from leanrl.stopwatch import NOT_SCRIPTS

README = (ROOT / "README.md").read_text()
TASKS = (ROOT / ".github/TASKS.md").read_text()
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


@pytest.mark.parametrize(
    "physics", ["c", pytest.param("warp", marks=[NEEDS_WARP, pytest.mark.slow])]
)
def test_a_task_of_your_own_can_be_learned(physics, monkeypatch, tmp_path):
    """That of .github/TASKS.md: worlds of both kinds, and one of Gymnasium's, say the same."""
    (xml,) = blocks("xml", TASKS)
    (code,) = blocks("python", TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    monkeypatch.setattr(ppo_mujoco_worlds, "TASKS", dict(ppo_mujoco_worlds.TASKS))
    Path("balance.xml").write_text(xml)
    exec(code, {"__name__": "balance"})
    envs = ppo_mujoco_worlds.MuJoCoEnvs("Balance-v0", 3, torch.device("cpu"), physics)
    obs, _ = envs.reset(seed=1)
    assert obs.abs().max() < 0.02 and obs.unique().numel() == 12
    own = [gym.make("Balance-v0") for _ in range(3)]

    def begin(env, row):
        env.reset(seed=0)
        env.unwrapped.set_state(*row.double().numpy().reshape(2, 2))
        env.unwrapped.position = row[:1].double()

    for env, row in zip(own, obs, strict=True):
        begin(env, row)
    ends = 0
    for _ in range(100):
        actions = torch.rand(3, 1) * 2 - 1
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for i, env in enumerate(own):
            final, reward, ended, _, _ = env.step(actions[i].numpy())
            np.testing.assert_allclose(infos["final_obs"][i], final, atol=1e-3)
            assert reward == pytest.approx(rewards[i].item(), abs=1e-3)
            assert ended == terminated[i].item()
            ends += ended
            if ended or truncated[i]:  # a first episode may be cut short before the pole falls
                begin(env, obs[i])
    assert ends > 3 and envs.lengths.max() < 200
    flags = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 96}
    flags |= {"physics": physics, "env_id": "Balance-v0", "eval_every": 96, "eval_episodes": 2}
    run_dir = ppo_mujoco_worlds.main(ppo_mujoco_worlds.Args(**flags))
    assert 0 < read_scalars(run_dir)["charts/eval_return"][-1][1] < 200 * 0.6
    # a motor without limits would do nothing: its action space would be [0, 0]
    Path("balance.xml").write_text(xml.replace('ctrlrange="-1 1" ctrllimited="true"', ""))
    with pytest.raises(ValueError, match=r"^--env-id: balance.xml has an actuator without a ctrl"):
        ppo_mujoco_worlds.MuJoCoEnvs("Balance-v0", 3, torch.device("cpu"), physics)


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
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert not list(tmp_path.iterdir())
