"""The robot of the first command: which checkpoints it keeps, what it draws, and its film."""

import math
import shutil
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import processes
import pytest
import robot
import torch
from fake_runs import config, make_run, read_record, stages, write_events

from leanrl import ppo_mujoco_worlds_torchcompile as script

TASK = "InvertedPendulum-v5"


def test_checkpoints_are_kept_when_they_are_due():
    kept = []
    for seconds in (0, 30, 119, 120, 700):
        if robot.is_kept([0, 2, 10], kept, seconds):
            kept.append(seconds)
    assert kept == [0, 120, 700] and not robot.is_kept([0, 2, 10], kept, 10**6)
    assert not robot.is_kept([0, math.inf], [0], 10**6)


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """A run of which the checkpoints of the first rollout and of the end are kept."""
    worlds = gym.make_vec(f"worlds/{TASK}", num_envs=1)
    agent = script.PPO(script.Args(), worlds, torch.device("cpu"))

    def run_and_read(command, log, progress, what, limit):
        assert command[1:3] == [f"leanrl/{robot.SCRIPT}.py", "--compile"]
        assert command[3:5] == ["--env-id", f"worlds/{TASK}"]
        name = command[command.index("--exp-name") + 1]
        path = tmp_path / f"runs/worlds_{TASK}__{name}__1__1"
        shutil.move(make_run(tmp_path, 1, config(), stages(50.0)), path)
        rows = [("charts/eval_return", step, step / 10, float(step)) for step in (10, 20, 30)]
        write_events(path, rows)
        saved = {"agent": agent.state_dict(), "args": vars(script.Args(env_id=f"worlds/{TASK}"))}
        torch.save(saved, path / "checkpoint.pt")
        log.parent.mkdir()
        log.write_text("10/30 [00:01, 5step/s, return 3]")
        progress(log)
        progress(log)
        return processes.read_run(path, whole=False)

    with monkeypatch.context() as patch:
        patch.setattr(processes, "run_and_read", run_and_read)
        patch.setattr(robot.run_dirs, "ROOT", tmp_path)
        patch.setitem(robot.race.STEPS["PPO on worlds"], TASK, 1000)
        patch.setattr(robot, "try_to_shoot", lambda path: f"no film of {path.name}")
        assert robot.main(["--tasks", TASK, "--steps", "30", "--out", str(tmp_path / "out")]) == 0
    (found,) = read_record(tmp_path / "out/robot")["robots"]
    return found, capsys.readouterr()


def test_a_robot_is_trained_and_drawn(trained, tmp_path):
    found, said = trained
    assert f"{TASK}: a return of 30 after" in said.out and "no film of robot.json" in said.out
    assert f"{TASK}  33%" in said.err and "step/s, return 3" in said.err
    assert [row[1:] for row in found["evaluations"]] == [[10, 10], [20, 20], [30, 30]]
    shots = [shot["checkpoint"] for shot in found["shots"]]
    assert shots == [f"out/robot/{TASK}-{number}.pt" for number in (0, 1)]
    assert all((tmp_path / shot).exists() for shot in (*shots, "out/robot.png"))


def test_a_film_that_cannot_be_is_one_line(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    assert robot.try_to_shoot(tmp_path / "out/robot.json").startswith("no film: ")


class Standing:
    """A pendulum that stands for 30 steps of 0.04 s, which needs no OpenGL."""

    observation_space = SimpleNamespace(shape=(4,))
    action_space = SimpleNamespace(shape=(1,), low=-3.0, high=3.0)
    unwrapped = SimpleNamespace(dt=0.04)

    def reset(self, seed):
        self.steps = 0
        return np.zeros(4), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(4), 2.0, self.steps == 30, False, {}

    def render(self):
        return np.full((180, 240, 3), self.steps, np.uint8)

    def close(self):
        pass


def test_a_film_has_twelve_pictures_a_second_up_to_the_fall(trained, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    found, _ = trained
    monkeypatch.setattr(gym, "make", lambda *_, **__: Standing())
    monkeypatch.setattr(robot.run_dirs, "ROOT", tmp_path)
    pictures, total = robot.play(TASK, tmp_path / found["shots"][0]["checkpoint"])
    assert total == 60 and len(pictures) == 48
    assert [int(picture[0, 0, 0]) for picture in pictures[:4]] == [0, 3, 5, 7]
    assert pictures[-1][0, 0, 0] == 30
    robot.shoot([found, found], tmp_path / "robot.gif")
    assert [shot["return"] for shot in found["shots"]] == [60, 60]
    with image.open(tmp_path / "robot.gif") as film:
        assert film.size == (480, 360)
