"""What is measured in rounds: field, ablation and devices. Nothing here is installed."""

import argparse
import functools
import importlib.util
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import ablation
import devices
import field
import pytest
import run_dirs
import torch
from conftest import ROOT

SB3 = "Stable-Baselines3"


def result(sps: float, **more) -> dict:
    return {"sps_steady": sps, "warmup_seconds": 1.0} | more


# Tables


def test_worth_is_within_a_round():
    whole, trick = ablation.WHOLE, "acting in NumPy"
    rounds = [{whole: result(1000), trick: result(500)}, {whole: result(2000), trick: result(1000)}]
    rounds.append({trick: result(60)})  # the whole one failed: this round compares nothing
    rows = ablation.summarize(rounds, [whole, trick])
    assert rows[1]["of_whole"] == 0.5 and rows[0]["of_whole"] == 1.0
    assert rows[1]["worth_us"] == {"mean": 750, "median": 750, "min": 500, "max": 1000}
    assert rows[1]["sps_steady"] == {"mean": 520, "median": 500, "min": 60, "max": 1000}


def test_devices_are_compared_within_a_round():
    names = ["baseline", "baseline (asynchronous)", "variant", "variant (asynchronous)"]
    rounds = [dict(zip(names, map(result, (10, 20, 50, 60)), strict=True))]
    rounds.append({"baseline": result(20, **{"return": -300.0})})
    rounds[1][names[1]] = result(60, learner_waits=0.25)
    rows = devices.summarize(rounds, names)
    assert [row["of_first"] for row in rows] == [1, 2.5, 1, 1.2]
    assert rows[1]["learner_waits"]["median"] == 0.25 and rows[0]["return"]["mean"] == -300


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (field, [SB3, "LeanRL"]),
        (ablation, [ablation.WHOLE, "no guards"]),
        (devices, ["baseline", "baseline (all on the GPU)"]),
    ],
)
def test_a_row_without_runs_says_so(program, names):
    rows = program.summarize([{names[0]: result(1)}], names)
    assert rows[1]["skipped"] == "no finished run"
    lines = program.cells(rows)
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1


# Runs


def test_window_of_a_library_has_as_many_trainings_as_rollouts(monkeypatch, capsys):
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


def test_speed_of_a_peer_is_that_of_its_tensorboard_files(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dirs, "ROOT", tmp_path)
    (tmp_path / "runs").mkdir()
    peer = tmp_path / "peer.py"
    command = [sys.executable, str(peer), "--seed", "1"]
    rows = [("charts/SPS", 100 * k, k, 100.0) for k in range(1, 11)]
    peer.write_text(
        f"import sys; sys.path += {[str(ROOT / part) for part in ('plots', 'tests')]}\n"
        "import fake_runs\n"
        f"fake_runs.write_events({str(tmp_path / 'runs/mine')!r}, {rows})\n"
    )
    found = field.run_peer(command, tmp_path / "log", None, "CleanRL round 1", 300)
    assert found["command"] == "python peer.py --seed 1"
    assert found["sps_steady"] == pytest.approx(100, rel=0.01)
    assert found["warmup_seconds"] == pytest.approx(3, abs=0.5)
    peer.write_text("")
    with pytest.raises(ValueError, match="CleanRL round 1 has made no run directory"):
        field.run_peer(command, tmp_path / "log", None, "CleanRL round 1", 300)


BUSY = """
from time import monotonic, process_time
while (seconds := process_time()) < 1.2:
    while process_time() < seconds + 0.01: pass
    print(monotonic())
raise SystemExit(3)
"""


def test_runs_of_a_round_take_turns(monkeypatch, tmp_path):
    """Stand-ins for the runs say when they were awake, every 10 ms, and fail."""
    (tmp_path / "busy.py").write_text(BUSY)
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "busy.py"}"\n')
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(ablation, "SLICE", 0.5)
    monkeypatch.setattr(ablation, "TRICKS", {"ppo": {"a trick": None}})
    options = argparse.Namespace(algorithm="ppo", steps=1, out=tmp_path)
    found, failures = ablation.run_round(1, options)
    assert not found and len(failures) == 2 and "'a trick' round 1 ended with" in failures[1]
    awake = []
    for number in range(2):
        log = tmp_path / f"logs/ablation-ppo-{number}-seed-1.log"
        awake += [(float(line), number) for line in log.read_text().split()]
    whose = [number for _, number in sorted(awake)]
    turns = sum(one != other for one, other in zip(whose, whose[1:], strict=False))
    assert len(whose) > 150 and 2 < turns < 20


@pytest.mark.parametrize("gpus", [0, 2])
def test_rows_of_devices_are_commands(gpus):
    commands = devices.commands(gpus)
    assert all(name.partition(" (")[0] in commands for name in commands)
    assert any("cuda" in command for command in commands.values()) == (gpus > 0)
    for command in commands.values():
        (script,) = (word for word in command if word.startswith("leanrl/"))
        assert (ROOT / script).exists()
        assert ("--cudagraphs" in command) == (gpus > 0 and "torchcompile" in script)


# Tricks that are taken away

ON_POLICY = {"num_steps": 32, "num_minibatches": 2, "update_epochs": 1}
OFF_POLICY = {"learning_starts": 16, "batch_size": 8, "buffer_size": 100}
COMPILED = ablation.COMPILED_SAC | ablation.COMPILED_ON_POLICY
TRICKS = [(key, trick) for key, tricks in ablation.TRICKS.items() for trick in tricks]
CASES = [(*case, False) for case in TRICKS if case[1] not in COMPILED]
CASES += [pytest.param(*case, True, marks=pytest.mark.slow) for case in TRICKS]


@pytest.mark.parametrize(("algorithm", "trick", "compile"), CASES)
def test_tricks_can_be_taken_away(algorithm, trick, compile, tmp_path, monkeypatch, one_thread):
    """Each patch fits the script: a fresh copy trains without. Compiled code is only traced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    spec = importlib.util.find_spec(f"leanrl.{algorithm}_continuous_action{run_dirs.VARIANT}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ablation.TRICKS[algorithm][trick](module)
    flags = {"env_id": "Pendulum-v1", "total_timesteps": 64, "compile": compile}
    flags |= ON_POLICY if algorithm == "ppo" else OFF_POLICY
    run_dir = module.main(module.Args(**flags))
    assert json.loads((run_dir / "stages.json").read_text())["sps"] > 0
