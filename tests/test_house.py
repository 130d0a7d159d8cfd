"""The house around the scripts: run.sh, the requirements, benchmarks, paths that are named.

Nothing here installs or needs a network.
"""

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import ablation
import devices
import field
import growth
import pytest
import run_dirs
import torch
from conftest import ROOT

PIN = re.compile(r"[\w-]+(\[\w+\])?==[\w.]+")


# The field benchmark


def test_field_ratios_are_within_a_round():
    def result(sps):
        return {"sps_steady": sps, "warmup_seconds": 1.0}

    ours, sb3 = "LeanRL compile", "Stable-Baselines3"
    rounds = [{sb3: result(10), ours: result(20)}, {sb3: result(40), ours: result(120)}]
    rounds.append({ours: result(1000)})
    rows = {row["entrant"]: row for row in field.summarize(rounds)}
    assert rows[ours]["ratio_to_sb3"] == 2.5
    assert rows[ours]["sps_steady"] == {"mean": 380, "median": 120, "min": 20, "max": 1000}
    assert rows["SBX"]["skipped"] == "no finished run"
    assert len({len(line) for line in field.cells(list(rows.values()))}) == 1


def test_the_libraries_window_has_as_many_trainings_as_rollouts(monkeypatch, capsys):
    library = pytest.importorskip("stable_baselines3")
    happened = []
    train = library.PPO.train

    def recorded(self):
        happened.append("train")
        train(self)

    def clock():
        happened.append("clock")
        return float(len(happened))

    monkeypatch.setattr(library.PPO, "train", recorded)
    monkeypatch.setattr(field, "time", SimpleNamespace(perf_counter=clock))
    tiny = {"n_steps": 32, "batch_size": 32, "n_epochs": 1, "device": "cpu"}
    settings = replace(field.PPO, theirs=tiny, steady_after=64, env_id="Pendulum-v1")
    monkeypatch.setitem(field.ALGORITHMS, "ppo", settings)
    told = {"worker": "stable_baselines3", "algorithm": "ppo", "steps": 5 * 32, "seed": 1}
    field.work(argparse.Namespace(**told, cores=1))
    assert happened == ["clock", *["train"] * 2, "clock", *["train"] * 3, "clock"]
    assert json.loads(capsys.readouterr().out)["sps_steady"] == 3 * 32 / 4


def test_a_peers_speed_is_that_of_its_tensorboard_files(tmp_path, monkeypatch):
    """From the end of the warm-up on; a script that fails, or leaves nothing, is one line."""
    monkeypatch.setattr(run_dirs, "ROOT", tmp_path)
    (tmp_path / "runs/before").mkdir(parents=True)
    script = tmp_path / "peer.py"
    rows = [("charts/SPS", 100 * k, k, 100.0) for k in range(1, 11)]
    source = f"import sys; sys.path += {[str(ROOT / part) for part in ('plots', 'tests')]}\n"
    source += "import fake_runs\n"
    source += f"fake_runs.write_events({str(tmp_path / 'runs/mine')!r}, {rows})\n"
    script.write_text(source)

    def run():
        command = [sys.executable, str(script), "--seed", "1"]
        return field.run_peer(command, tmp_path / "log", None, "CleanRL round 1", 300)

    found = run()
    assert found["command"] == "python peer.py --seed 1"
    assert found["sps_steady"] == pytest.approx(100, rel=0.01)
    assert found["warmup_seconds"] == pytest.approx(3, abs=0.5)
    for text, said in ("pass", "has made no run directory"), ("1 / 0", "ended with exit status 1"):
        script.write_text(text)
        with pytest.raises(ValueError, match=f"CleanRL round 1 {said}"):
            run()


# Growth


def test_growth_compares_a_point_with_itself():
    def result(sps):
        return {"sps_steady": sps, "warmup_seconds": 1.0}

    names = list(growth.points("width*"))
    assert len(names) == 15 and growth.points("*")["compile"] == growth.USUAL | {
        "entrant": "compile"
    }
    speeds = {"Stable-Baselines3": 50, "baseline": 100, "compile": 300, "compile, width 64": 1}
    speeds |= {"Stable-Baselines3, width 1,024": 5, "baseline, width 1,024": 8}
    speeds |= {"compile, width 1,024": 10}
    rows = growth.summarize([{name: result(speed) for name, speed in speeds.items()}], names)
    table = {line[0]: line[1:] for line in growth.cells(rows)}
    assert table["width 256"] == table["batch 256"] == ["50", "100", "300", "3.00x"]
    assert table["width 1,024"] == ["5", "8", "10", "1.25x"]
    assert table["width 64"] == ["-", "-", "1", "-"] and "width 128" not in table


# What each trick is worth


def test_worth_is_measured_within_a_round():
    def result(steps_per_second):
        return {"sps_steady": steps_per_second, "warmup_seconds": 1.0}

    whole, trick = ablation.WHOLE, "acting in NumPy"
    rounds = [
        {whole: result(1000), trick: result(500)},
        {whole: result(2000), trick: result(1000)},
        {trick: result(1)},  # the whole one failed: this round compares nothing
    ]
    rows = ablation.summarize(rounds, [whole, trick, "no guards"])
    assert rows[1]["of_whole"] == 0.5 and rows[0]["of_whole"] == 1.0
    assert rows[1]["worth_us"] == {"mean": 750, "median": 750, "min": 500, "max": 1000}
    assert rows[2]["skipped"] == "no finished run"
    assert len({len(line) for line in ablation.cells(rows)}) == 1


def test_one_run_of_a_round_goes_on_at_a_time(monkeypatch, tmp_path):
    """Stand-ins for the runs say when they were awake, every 10 ms, and fail."""
    stand_in = tmp_path / "python"
    code = tmp_path / "code.py"
    code.write_text(
        "from time import monotonic, process_time\n"
        "while (seconds := process_time()) < 1.2:\n"
        "    while process_time() < seconds + 0.01: pass\n"
        "    print(monotonic())\n"
        "raise SystemExit(3)\n"
    )
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{code}"\n')
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(ablation, "SLICE", 0.5)
    monkeypatch.setattr(ablation, "TRICKS", {"ppo": {"a trick": None}})
    options = argparse.Namespace(algorithm="ppo", steps=1, out=tmp_path)
    results, failures = ablation.run_round(1, options)
    assert not results and len(failures) == 2 and "'a trick' round 1 ended with" in failures[1]
    logs = [tmp_path / f"logs/ablation-ppo-{number}-seed-1.log" for number in range(2)]
    awake = [(float(line), i) for i, log in enumerate(logs) for line in log.read_text().split()]
    whose = [i for _, i in sorted(awake)]
    turns = sum(one != other for one, other in zip(whose, whose[1:], strict=False))
    assert len(whose) > 150 and 2 < turns < 20


# Devices


def test_devices_are_compared_within_a_round():
    def result(steps_per_second, **more):
        return {"sps_steady": steps_per_second, "warmup_seconds": 1.0} | more

    names = ["baseline", "baseline (asynchronous)", "variant", "variant (asynchronous)"]
    rounds = [dict(zip(names, map(result, (10, 20, 50, 60)), strict=True))]
    rounds.append({"baseline": result(20), names[1]: result(60, learner_waits=0.25)})
    rounds[1]["baseline"]["return"] = -300.0
    rows = devices.summarize(rounds, [*names, "variant (all on the GPU)"])
    assert [row.get("of_first") for row in rows] == [1, 2.5, 1, 1.2, None]
    assert rows[1]["learner_waits"]["median"] == 0.25 and rows[0]["return"]["mean"] == -300
    assert rows[4]["skipped"] == "no finished run"
    assert len({len(line) for line in devices.cells(rows)}) == 1


@pytest.mark.parametrize("gpus", [0, 2])
def test_rows_of_devices_are_commands_of_scripts(gpus):
    commands = devices.commands(gpus)
    assert all(name.partition(" (")[0] in commands for name in commands)
    for command in commands.values():
        (script,) = (word for word in command if word.startswith("leanrl/"))
        assert (ROOT / script).exists()
        assert ("--cudagraphs" in command) == (gpus > 0 and "torchcompile" in script)
    assert any("cuda" in command for command in commands.values()) == (gpus > 0)


def without_a_trick(algorithm: str, trick: str, compiled: bool):
    """A short run of a fresh copy of the script, without the trick."""
    name = f"leanrl.{algorithm}_continuous_action{run_dirs.VARIANT}"
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ablation.TRICKS[algorithm][trick](module)
    settings = {"env_id": "Pendulum-v1", "total_timesteps": 64, "exp_name": trick}
    settings["compile"] = compiled
    if algorithm == "ppo":
        settings |= {"num_steps": 32, "num_minibatches": 2, "update_epochs": 1}
    else:
        settings |= {"learning_starts": 16, "batch_size": 8, "buffer_size": 100}
    run_dir = module.main(module.Args(**settings))
    assert json.loads((run_dir / "stages.json").read_text())["sps"] > 0


TRICKS = [(key, trick) for key, tricks in ablation.TRICKS.items() for trick in tricks]
COMPILED = ablation.COMPILED_SAC | ablation.COMPILED_ON_POLICY


@pytest.mark.parametrize(("algorithm", "trick"), [x for x in TRICKS if x[1] not in COMPILED])
def test_every_trick_can_be_taken_away(algorithm, trick, tmp_path, monkeypatch):
    """Each patch fits the script as it is today: a short run goes on without the trick."""
    monkeypatch.chdir(tmp_path)
    without_a_trick(algorithm, trick, compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "trick"), TRICKS)
def test_every_trick_can_be_taken_away_from_compiled_code(
    algorithm, trick, tmp_path, monkeypatch, one_thread
):
    """Traced by the compiler; no code is generated for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    without_a_trick(algorithm, trick, compiled=True)


# run.sh, .ci/run, requirements


def bash(*arguments, cwd=ROOT, **environment):
    command = ["bash", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@pytest.mark.parametrize("script", ["run.sh", ".ci/run"])
def test_shell_scripts_parse(script):
    assert bash("-n", script).returncode == 0


def test_help_names_every_command(tmp_path):
    done = bash(ROOT / "run.sh", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("--full", "field", "test", "--help"):
        assert f"bash run.sh {command}" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["bogus"], ["--fulll"], ["--full", "extra"], ["--seeds"], ["--full", "--only"]]
)
def test_unknown_arguments_are_refused_in_one_line(arguments):
    done = bash("run.sh", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and arguments[-1] in done.stderr


@pytest.fixture
def clone(tmp_path):
    """run.sh and what it reads, at a path with spaces, with an environment that logs its calls."""
    root = tmp_path / "a clone"
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    shutil.copy(ROOT / "run.sh", root)
    python = root / "active env/bin/python"
    python.parent.mkdir(parents=True)
    return root, python


def fake_python(python, missing, pip_status=0):
    """An interpreter that lacks `missing`, fails in pip as told, and prints any other call."""
    python.write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in\n'
        f'    "-m pip --version" | -c*) exit 0 ;;\n'
        f'    "-m pip install"*) echo "pip got $(cat)"; exit {pip_status} ;;\n'
        f'    "- requirements"*) printf "%s" "{missing}" ;;\n'
        '    *) echo "called: $*"; exit 7 ;;\n'
        "esac\n"
    )
    python.chmod(0o755)


def test_an_active_environment_is_used(clone, tmp_path):
    root, python = clone
    fake_python(python, missing="")
    workers = "-n auto --maxprocesses 4 --dist loadfile"
    for script in ("run.sh", ".ci/run"):
        arguments = ["test"] if script == "run.sh" else []
        env = {"VIRTUAL_ENV": str(python.parents[1])}
        done = bash(root / script, *arguments, "-k", "two words", cwd=tmp_path, **env)
        assert done.returncode == 7  # pytest's status, which comes through
        assert done.stdout == f"called: -m pytest -q {workers} tests -k two words\n"
    assert not (root / ".venv").exists()


def test_only_missing_packages_are_installed(clone, tmp_path):
    root, python = clone
    fake_python(python, missing="tyro==1.0.17")
    done = bash(root / "run.sh", "test", cwd=tmp_path, VIRTUAL_ENV=str(python.parents[1]))
    assert "pip got tyro==1.0.17\ncalled: -m pytest" in done.stdout


def test_a_failing_step_stops_with_the_reason(clone, tmp_path):
    root, python = clone
    fake_python(python, missing="tyro==1.0.17", pip_status=1)
    done = bash(root / "run.sh", "test", cwd=tmp_path, VIRTUAL_ENV=str(python.parents[1]))
    assert done.returncode == 1 and "pip install failed" in done.stderr
    assert "called" not in done.stdout


def test_links_lead_to_the_checkout(clone, tmp_path):
    """A link to run.sh, a link to that one, and a linked folder; CDPATH leads nowhere else."""
    root, python = clone
    python.write_text('#!/usr/bin/env bash\n[[ $1 != -m ]] || echo "in $PWD"\n')
    python.chmod(0o755)
    (tmp_path / "other place/requirements").mkdir(parents=True)
    (tmp_path / "other place/run").symlink_to(root / "run.sh")
    (tmp_path / "run").symlink_to("other place/run")
    (tmp_path / "requirements").symlink_to(root)
    env = {"VIRTUAL_ENV": str(python.parents[1]), "CDPATH": str(tmp_path / "other place")}
    for script in ("other place/run", "run", tmp_path / "run", "requirements/run.sh"):
        done = bash(script, "test", cwd=tmp_path, **env)
        assert done.stdout == f"in {root.resolve()}\n", done.stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("a file", ".venv is no folder: move it away"),
        ("a dangling link", "cannot write to"),
        ("read-only", "cannot write to"),
        ("no ensurepip", "apt install python3-venv"),
        ("a full disk", "the reason is above"),
    ],
)
def test_what_keeps_an_environment_from_being_made_is_named(clone, tmp_path, wrong, said):
    """python3-venv helps in one case of these only."""
    root, _ = clone
    fakes = {"python3": 'case "$*" in *ensurepip*) exit 0 ;; *venv*) exit 1 ;; esac'}
    if wrong == "a file":
        (root / ".venv").write_text("")
    elif wrong == "a dangling link":
        (root / ".venv").symlink_to("gone/gone")
    elif wrong == "read-only":
        fakes["mkdir"] = "echo mkdir: read-only >&2; exit 1"  # the tests may run as root
    elif wrong == "no ensurepip":
        fakes["python3"] = 'case "$*" in *ensurepip*) exit 1 ;; esac'
    (tmp_path / "tools").mkdir()
    for name, script in fakes.items():
        (tmp_path / "tools" / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / "tools" / name).chmod(0o755)
    env = {"PATH": f"{tmp_path / 'tools'}:{os.environ['PATH']}"}
    done = bash(root / "run.sh", "test", VIRTUAL_ENV="", CONDA_PREFIX="", **env)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and said in last and last.startswith("run.sh: ")
    assert wrong == "a full disk" or done.stderr.count("\n") == 1
    assert (wrong == "no ensurepip") == ("python3-venv" in done.stderr)


def test_an_environment_without_python_is_named(tmp_path):
    done = bash("run.sh", "test", VIRTUAL_ENV=str(tmp_path / "gone"))
    assert done.returncode == 1 and str(tmp_path / "gone") in done.stderr


@pytest.mark.parametrize(
    "file", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda f: f.name
)
def test_requirements_are_pinned(file):
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    assert lines and all(PIN.fullmatch(line) for line in lines), lines


def test_requirements_agree():
    pins = {}
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        for line in file.read_text().splitlines():
            if "==" in line and not line.startswith("#"):
                name, _, number = line.partition("==")
                assert pins.setdefault(name, number) == number, line


# What is named exists

NAMING = ["run.sh", ".ci/run", ".github/CONTRIBUTING.md", ".github/workflows/ci.yml"]
NAMING += [".github/workflows/nightly.yml", ".pre-commit-config.yaml"]
FOLDERS = "leanrl|plots|tests|requirements|\\.ci|\\.github"
MADE = ("plots/out", "plots/results")  # by the first measurement


@pytest.mark.parametrize("file", NAMING)
def test_paths_that_are_named_exist(file):
    text = (ROOT / file).read_text()
    named = set(re.findall(rf"(?<![\w./])(?:{FOLDERS})/[\w./-]+", text))
    named |= set(re.findall(r"(?<![\w./])(?:run\.sh|\.ruff\.toml)", text))
    named = {path.rstrip("./") for path in named if not path.startswith(MADE)}
    assert named and all((ROOT / path).exists() for path in named), named
