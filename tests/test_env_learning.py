"""One learner with environments of several kinds: what it sees of them, and the reduction."""

import json
import multiprocessing
import subprocess
import sys

import env_learning
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import CPU
from run_dirs import Series


@pytest.mark.parametrize("kind", list(env_learning.KINDS))
def test_what_the_learner_sees(kind):
    """Pushed to the right a pole falls: where an episode ends, its length, and where it goes on."""
    pytest.importorskip("stable_baselines3" if "SB3" in kind else "envpool")
    make, _ = env_learning.KINDS[kind]
    others = multiprocessing.active_children()  # of tests before
    num_envs = 3
    envs = make(num_envs, CPU)
    envs.reset(seed=1)
    steps = np.zeros(num_envs, dtype=int)
    endings = 0
    for _ in range(40):
        actions = torch.ones(num_envs, dtype=torch.int64)
        next_obs, rewards, terminated, truncated, infos = envs.step(actions, torch.zeros(3, 4))
        final_obs = infos["final_obs"]
        assert next_obs.shape == final_obs.shape == (num_envs, 4)
        assert next_obs.dtype == final_obs.dtype == rewards.dtype == torch.float32
        assert torch.equal(infos["_episode"], terminated) and not truncated.any()
        assert rewards.tolist() == [1] * num_envs
        steps += 1
        assert infos["episode"]["r"].tolist() == infos["episode"]["l"].tolist() == steps.tolist()
        fallen = final_obs[:, 2].abs() > envs.theta_limit
        assert torch.equal(fallen, terminated)
        for i in np.flatnonzero(terminated):
            endings += 1
            steps[i] = 0
            assert next_obs[i].abs().max() <= 0.05
    assert endings >= 2 * num_envs
    envs.close()
    assert set(multiprocessing.active_children()) <= set(others)


def test_a_worker_ends_though_its_environments_are_processes(tmp_path):
    """They are made after the run, so that its handler takes the signals that should end them."""
    pytest.importorskip("stable_baselines3")
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "plots")!r}, {str(ROOT / "plots/measure")!r}]
import env_learning
env_learning.SETTINGS[16]["total_timesteps"] = 4096
env_learning.train("SB3 SubprocVecEnv, 16", 1, "short")
"""
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=100)
    (stages,) = tmp_path.glob("runs/*__short__1__*/stages.json")
    stages = json.loads(stages.read_text())
    assert stages["env_steps"] == 4096 - 3 * 512 and stages["stages"]["simulation"] > 0


def test_the_time_to_a_return_is_that_of_the_first_rollout_there():
    curve = Series(np.array([10.0, 20, 30]), np.array([1.0, 2, 3]), np.array([100.0, 480, 490]))
    assert env_learning.first_at(curve, 475) == {"seconds": 2.0, "steps": 20.0}
    assert env_learning.first_at(curve, 500) == {"seconds": None, "steps": None}


def test_the_table_compares_within_a_round():
    """And a run that does not arrive is told of."""

    def run(speed, seconds, steps):
        curve = [[1.0, 2.0], [100.0, 490.0]]
        known = {"sps_steady": speed, "warmup_seconds": 1.0, "simulating": 0.25, "curve": curve}
        return known | {"seconds": seconds, "steps": steps}

    results = [
        {"tensors, 16": run(100.0, 4.0, 400.0), "kernel, 16": run(150.0, 2.0, 300.0)},
        {"tensors, 16": run(200.0, None, None), "kernel, 16": run(500.0, 6.0, 3000.0)},
    ]
    rows = env_learning.summarize(results, list(env_learning.arms([16]))[2:])
    heading, *lines = env_learning.cells(rows)
    tensors, kernel = (dict(zip(heading, line, strict=True)) for line in lines)
    assert kernel["of tensors"] == "2.00x" and kernel["simulating"] == "25%"
    assert kernel["seconds to 475"] == "4.0 (2.0 to 6.0)"
    assert tensors["seconds to 475"] == "4.0 (4.0 to 4.0, 1 of 2)"
