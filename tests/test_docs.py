"""What README says exists: paths, flags, commands."""

import dataclasses
import importlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from leanrl.stopwatch import NOT_SCRIPTS

README = (ROOT / "README.md").read_text()
SCRIPTS = {
    path.stem: importlib.import_module(f"leanrl.{path.stem}")
    for path in sorted((ROOT / "leanrl").glob("*.py"))
    if path.name not in NOT_SCRIPTS
}
OTHER_FLAGS = {
    "--algorithm",
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
    unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", README)) - known
    assert not unknown


@pytest.mark.parametrize("line", re.findall(r"python leanrl/(?!stopwatch)\S+\.py.*", README))
def test_commands_parse(line):
    """Each command of README names a script and flags that the script has."""
    script, *words = line.split("#")[0].strip("`").split()[1:]
    module = SCRIPTS[script.removeprefix("leanrl/").removesuffix(".py")]
    for flag in (word for word in words if word.startswith("--")):
        assert flag in flags_of(module) | {"--help"}, f"{flag} in {line!r}"


def test_the_policy_of_a_checkpoint_acts(tmp_path, monkeypatch, capsys):
    """README's lines, as they are but for the run's name, on a run of either script."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    settings = {"env_id": "Pendulum-v1", "batch_size": 16, "learning_starts": 20}
    for name in ("sac_continuous_action", "sac_continuous_action_torchcompile"):
        module = SCRIPTS[name]
        run_dir = module.main(module.Args(**settings, total_timesteps=30, save_model=True))
        capsys.readouterr()
        exec(code.replace("sac_continuous_action", name).replace("runs/RUN", str(run_dir)), {})
        assert -2000 < float(capsys.readouterr().out) < 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_import_have_no_side_effects(script, tmp_path):
    path = ROOT / "leanrl" / f"{script}.py"
    result = subprocess.run(
        [sys.executable, path, "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0 and "--env-id" in result.stdout
    assert not list(tmp_path.iterdir())
    # every flag is explained
    for field in dataclasses.fields(SCRIPTS[script].Args):
        assert f"--{field.name.replace('_', '-')}" in result.stdout
