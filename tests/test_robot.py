"""The robot of the first command: which checkpoints it keeps, what it draws, and its film."""

import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import processes
import pytest
import robot
import torch
from conftest import ROOT
from fake_runs import config, make_run, stages, write_events

from leanrl import ppo_mujoco_worlds_torchcompile as script


def test_checkpoints_are_kept_when_they_are_due():
    kept = []
    for seconds in (0, 30, 119, 120, 700):
        if robot.is_kept([0, 2, 10], kept, seconds):
            kept.append(seconds)
    assert kept == [0, 120, 700] and not robot.is_kept([0, 2, 10], kept, 10**6)
    assert not robot.is_kept([0, math.inf], [0], 10**6)


def test_a_robot_is_trained_drawn_and_filmed(tmp_path, monkeypatch, capsys):
    """A run of which the checkpoint of the first rollout and of the end are kept."""
    task = "InvertedPendulum-v5"
    worlds = gym.make_vec(f"worlds/{task}", num_envs=1)
    agent = script.PPO(script.Args(), worlds, torch.device("cpu"))

    def run_and_read(command, log, progress, what, limit):
        assert command[1:3] == [f"leanrl/{robot.SCRIPT}.py", "--compile"]
        assert command[3:5] == ["--env-id", f"worlds/{task}"]
        name = command[command.index("--exp-name") + 1]
        path = tmp_path / f"runs/worlds_{task}__{name}__1__1"
        made = make_run(tmp_path, 1, config(), stages(50.0))
        shutil.move(made, path)
        rows = [("charts/eval_return", step, step / 10, float(step)) for step in (10, 20, 30)]
        write_events(path, rows)
        saved = {"agent": agent.state_dict(), "args": vars(script.Args(env_id=f"worlds/{task}"))}
        torch.save(saved, path / "checkpoint.pt")
        log.parent.mkdir()
        log.write_text("10/30 [00:01, 5step/s, return 3]")
        progress(log)
        progress(log)
        return processes.read_run(path, whole=False)

    monkeypatch.setattr(processes, "run_and_read", run_and_read)
    monkeypatch.setattr(robot.run_dirs, "ROOT", tmp_path)
    monkeypatch.setitem(robot.race.LEVELS, task, 1000)
    filmed = []
    monkeypatch.setattr(robot, "try_to_shoot", lambda path: filmed.append(path) or "no film: x")
    assert robot.main(["--tasks", task, "--steps", "30", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert f"{task}: a return of 30 after" in said.out and "no film: x" in said.out
    assert f"{task}  33%" in said.err and "step/s, return 3" in said.err
    record = json.loads((tmp_path / "out/robot.json").read_text())
    (one,) = record["robots"]
    assert [row[1:] for row in one["evaluations"]] == [[10, 10], [20, 20], [30, 30]]
    shots = [shot["checkpoint"] for shot in one["shots"]]
    assert shots == [f"out/robot/{task}-{number}.pt" for number in (0, 1)]
    assert all((tmp_path / shot).exists() for shot in shots)
    assert (tmp_path / "out/robot.png").exists() and filmed == [tmp_path / "out/robot.json"]
    # a film of what OpenGL cannot draw is one line
    monkeypatch.undo()
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    assert robot.try_to_shoot(tmp_path / "out/robot.json").startswith("no film: ")

    class Environment:
        """A pendulum that stands, which needs no OpenGL."""

        observation_space = SimpleNamespace(shape=(4,))
        action_space = SimpleNamespace(shape=(1,), low=-3.0, high=3.0)
        unwrapped = SimpleNamespace(dt=0.04)

        def reset(self, seed):
            self.steps = 0
            return torch.zeros(4).numpy(), {}

        def step(self, action):
            self.steps += 1
            return torch.zeros(4).numpy(), 2.0, self.steps == 30, False, {}

        def render(self):
            return torch.full((180, 240, 3), self.steps, dtype=torch.uint8).numpy()

        def close(self):
            pass

    monkeypatch.setattr("gymnasium.make", lambda *_, **__: Environment())
    pictures, total = robot.play(task, tmp_path / shots[0])
    assert total == 60 and len(pictures) == 48
    # twelve pictures a second of 25 steps a second, up to the fall after 1.2 seconds
    assert [int(picture[0, 0, 0]) for picture in pictures[:4]] == [0, 3, 5, 7]
    assert pictures[-1][0, 0, 0] == 30
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(robot.run_dirs, "ROOT", tmp_path)
    robot.shoot([one, one], tmp_path / "robot.gif")
    assert [shot["return"] for shot in one["shots"]] == [60, 60]
    with image.open(tmp_path / "robot.gif") as film:
        assert film.size == (480, 360)


def test_help_and_wrong_tasks(tmp_path):
    command = [sys.executable, "plots/measure/robot.py", "--tasks", "no"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
