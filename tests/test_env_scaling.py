"""The scaling study: what its arms step, its reductions and its report."""

import argparse
import json
import os
import subprocess
import sys

import env_arms
import env_scaling
import env_tables
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT

CPU = torch.device("cpu")
ON_CPU = [arm for arm in env_arms.ARMS if arm.missing() is None]


# Arms


@pytest.mark.parametrize("arm", ON_CPU, ids=lambda arm: arm.name)
def test_an_arm_steps(arm):
    with arm.make(3) as stepper:
        for _ in range(3):
            stepper.step()
        stepper.wait()
    assert stepper.steps >= 1


def test_all_arms_of_the_study_are_there():
    names = [arm.name for arm in env_arms.ARMS]
    assert len(set(names)) == len(names)
    for part in ("SubprocVecEnv", "sync", "async", "EnvPool", "tensors,", "tensors compiled"):
        assert any(part in name for name in names)
    for threads in (1, 16, 32, 64, 256, 1024):
        assert {f"kernel, TPB {threads}", f"Numba-CUDA, TPB {threads}"} < set(names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is missing with a GPU")
def test_an_arm_that_cannot_run_says_why():
    missing = {arm.name: arm.missing() for arm in env_arms.ARMS}
    assert missing["kernel, TPB 64"] == missing["tensors, GPU"] == "no CUDA device"
    assert missing["kernel, CPU threads"] is None
    arm = env_arms.Arm("nothing", None, 1, ("no_such_package",))
    assert "no_such_package" in arm.missing() and "requirements/study.txt" in arm.missing()


def euler(states, actions, work):
    """Gymnasium's CartPole with so many steps of a `work`-th of the time."""
    env = gym.make("CartPole-v1").unwrapped
    env.tau /= work
    expected = []
    for state, action in zip(states, actions, strict=True):
        env.reset(seed=0)
        env.state = state.astype(np.float64)
        for _ in range(work):
            env.steps_beyond_terminated = None
            env.step(int(action))
        expected.append(env.state)
    return np.array(expected)


def some_states(count):
    generator = np.random.default_rng(0)
    states = generator.uniform([-2, -1, -0.15, -1], [2, 1, 0.15, 1], (count, 4))
    return states.astype(np.float32), generator.integers(0, 2, count)


@pytest.mark.parametrize("form", ["tensors", "kernel"])
@pytest.mark.parametrize("work", [1, 7])
def test_repeated_work_is_a_finer_integration(form, work):
    """And not something that a compiler may leave out."""
    states, actions = some_states(50)
    if form == "kernel":
        envs = env_arms.KernelCartPole(50, CPU, work=work)
    else:
        envs = env_arms.Tensors(50, CPU, work)
    envs.reset(seed=1)
    envs.state.copy_(torch.from_numpy(states))
    infos = envs.step(torch.from_numpy(actions))[-1]
    expected = euler(states, actions, work)
    np.testing.assert_allclose(infos["final_obs"], expected, atol=1e-6, rtol=1e-6)
    assert work == 1 or np.abs(expected - euler(states, actions, 1)).max() > 1e-4


def test_numbas_kernel_is_gymnasiums():
    """In Numba's simulator, which needs a process of its own."""
    code = f"""
import sys
sys.path[:0] = [{str(ROOT / "plots/measure")!r}, {str(ROOT / "tests")!r}]
import numpy as np
from env_numba import NumbaCartPole, cuda
from test_env_scaling import euler, some_states
states, actions = some_states(40)
states[0, 0], states[1, 2] = 2.45, 0.25  # off the track, fallen
for work in (1, 3):
    envs = NumbaCartPole(40, 16, work)
    envs.state.copy_to_device(states)
    lengths = np.zeros(40, np.int32)
    lengths[2] = 499
    envs.lengths.copy_to_device(lengths)
    envs.step(cuda.to_device(actions))
    obs = envs.obs.copy_to_host()
    np.testing.assert_allclose(obs, euler(states, actions, work), atol=1e-6, rtol=1e-6)
    after, terminated = envs.state.copy_to_host(), envs.terminated.copy_to_host()
    assert terminated.tolist() == [i < 2 for i in range(40)]
    assert envs.truncated.copy_to_host().tolist() == [i == 2 for i in range(40)]
    assert (np.abs(after[:3]) <= 0.05).all() and (after[3:] == obs[3:]).all()
    assert envs.lengths.copy_to_host().tolist() == [0] * 3 + [1] * 37
print("done")
"""
    pytest.importorskip("numba.cuda")
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gymnasiums_environments_look_like_the_scripts(compiled):
    """The same states, actions and ends give the same tensors."""
    theirs, ours = env_arms.OnGymnasium(20, CPU), env_arms.baseline.CartPole(20, CPU)
    obs, _ = theirs.reset(seed=1)
    ours.reset(seed=1)
    ours.state.copy_(obs)
    torch._dynamo.reset()
    step = torch.compile(theirs.step, fullgraph=True) if compiled else theirs.step
    actions = torch.zeros(20, dtype=torch.int64)
    ends, running = 0, torch.ones(20, dtype=torch.bool)  # until a reset, which is drawn otherwise
    for _ in range(12):  # all fall
        expected, found = ours.step(actions), step(actions)
        for one, other in zip(expected[1:4], found[1:4], strict=True):
            assert one.dtype == other.dtype and torch.equal(one[running], other[running])
        one, other = expected[-1], found[-1]
        difference = one["final_obs"][running] - other["final_obs"][running]
        assert difference.abs().max() < 1e-5
        for key, value in one["episode"].items():
            assert value.dtype == other["episode"][key].dtype
            assert torch.equal(value[running], other["episode"][key][running])
        assert torch.equal(found[0], theirs.state)
        ends += int((other["_final_obs"] & running).sum())
        running &= ~other["_final_obs"]
        if not running.any():
            break
    theirs.close()
    assert ends == 20


# Reductions


def test_the_turning_point_is_found():
    numbers = [4**k for k in range(11)]
    generator = np.random.default_rng(0)
    seconds = [(2e-5 + 1e-9 * n) * generator.uniform(0.95, 1.05) for n in numbers]
    fit = env_tables.turning_point(numbers, seconds)
    assert fit["flat"] == pytest.approx(2e-5, rel=0.1)
    assert fit["per_env"] == pytest.approx(1e-9, rel=0.1)
    assert fit["turning"] == pytest.approx(20_000, rel=0.2)
    assert env_tables.describe_turning(fit, numbers) == f"{fit['turning']:,.0f}"


def test_flat_and_linear_times_have_no_turning_point():
    numbers = [1, 10, 100, 1000]
    for seconds in ([5.0] * 4, [0.1 * n for n in numbers]):
        fit = env_tables.turning_point(numbers, seconds)
        inside = fit["turning"] and 1 < fit["turning"] < 1000
        assert not inside, fit
        assert env_tables.describe_turning(fit, numbers) in ("none", "below 1", "above 1,000")


def test_samples_are_per_step():
    """A stepper that makes 10 steps per call, each of at least 2 ms."""
    import time

    stepper = env_scaling.Stepper(lambda: time.sleep(0.02), 10)
    samples = env_scaling.time_steps(stepper, 0.1, 3)
    assert len(samples) == 3 and all(0.002 <= seconds < 0.02 for seconds in samples)


def test_the_arithmetic_per_step():
    """Counted by PyTorch over one minibatch of the baseline."""
    from torch.utils.flop_counter import FlopCounterMode

    module = env_arms.baseline
    args, rows = module.Args(), 64
    agent, obs = module.PPO(args, 4, 2, CPU), torch.randn(64, 4)
    columns = [torch.zeros(rows), torch.zeros(rows), torch.randn(rows), torch.randn(rows)]
    with FlopCounterMode(display=False) as counter:
        agent.act(obs, torch.ones(rows, 2))
        with torch.no_grad():
            agent.model.critic(obs)
        batch = module.Batch(obs, torch.zeros(rows, dtype=torch.int64), *columns)
        for _ in range(args.update_epochs):
            agent.update(batch, torch.arange(rows))
    assert counter.get_total_flops() / rows == pytest.approx(env_scaling.STEP_FLOP, rel=0.01)


def test_the_bytes_per_step():
    """Of the tensors that the kernel is given, but the count of ended episodes, seldom touched."""
    envs, seen = env_arms.KernelCartPole(1000, CPU), []
    envs.reset(seed=1)
    envs.launch = lambda threads, tensors: seen.extend(tensors)
    envs.step(torch.zeros(1000, dtype=torch.int64))
    state, lengths = envs.state, envs.lengths  # read as well as written
    found = sum(x.nbytes for x in (*seen, state, lengths) if x is not envs.episodes) - 8
    assert found == 1000 * env_tables.STEP_BYTES


# The report


def test_a_quick_study_from_end_to_end(tmp_path, monkeypatch, capsys):
    """Two parts, then figures from the record alone; of the arms two that run here and one."""
    pytest.importorskip("matplotlib")
    names = ["kernel, CPU threads", "tensors, CPU", "kernel, TPB 64"]
    arms = [arm for arm in env_arms.ARMS if arm.name in names]
    monkeypatch.setattr(env_scaling, "ARMS", arms)
    call, parts = ["--quick", "--out", f"{tmp_path}/study"], ["limits", "steps"]
    assert env_scaling.main([*parts, *call]) == 0
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "study.json").read_text())
    assert list(record) == parts and record["limits"]["devices"]["cpu"]["flops"] > 1e9
    rows = record["steps"]["rows"]
    assert {row["num_envs"] for row in rows if row["arm"] == names[0]} == {1, 64, 4096}
    assert all(len(row["seconds"]) == env_scaling.SAMPLES for row in rows)
    if not torch.cuda.is_available():
        assert "skipped: kernel, TPB 64: no CUDA device" in said
    report = (tmp_path / "study.md").read_text()
    assert "turning" in report and names[0] in report and str(ROOT) not in report
    assert env_scaling.main(["figures", *call]) == 0
    figures = {path.name for path in tmp_path.glob("*.png")}
    assert figures == {"study_step_time.png", "study_throughput.png"}


@pytest.mark.parametrize(
    "back_end",
    [
        name if name == "tensors" else pytest.param(name, marks=pytest.mark.slow)
        for name in env_arms.LEARNERS
    ],
)
def test_training_runs_are_measured(back_end, tmp_path):
    """The curve counts neither evaluation nor what follows it."""
    options = argparse.Namespace(out=tmp_path / "study")
    flags = {"num_envs": 64, "total_timesteps": 5 * 2048, "eval_every": 4096, "eval_episodes": 2}
    run = env_scaling.run_training(back_end, 1, flags, options, cold=False)
    assert run["sps_steady"] > 0 and run["config"]["args"]["seed"] == 1
    seconds, values, steps = zip(*run["curve"], strict=True)
    assert list(steps) == [4096, 8192, 10240] and all(9 < value <= 500 for value in values)
    assert list(seconds) == sorted(seconds) and seconds[0] > run["startup_seconds"] > 0


@pytest.mark.slow
def test_a_failing_training_run_is_named(tmp_path):
    flags = {"num_envs": 64, "num_steps": 0, "total_timesteps": 2048}
    with pytest.raises(ValueError, match="exit status 1"):
        options = argparse.Namespace(out=tmp_path / "study")
        env_scaling.run_training("tensors", 1, flags, options)


@pytest.mark.parametrize("stop_after", [1, 2, 999])
def test_a_solved_run_ends(stop_after, tmp_path, monkeypatch, capsys):
    module, solved = env_arms.baseline, iter([9.0, 480.0, 470.0, 480.0, 490.0, 500.0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "evaluate", lambda *arguments: next(solved))
    flags = {"num_envs": 64, "num_steps": 8, "total_timesteps": 6 * 512, "eval_every": 512}
    env_scaling.train("tensors", 1, flags, started=0.0, stop_after=stop_after)
    result = json.loads(capsys.readouterr().out.rstrip().rpartition("\n")[2])
    assert [value for _, value in result["curve"]][-1] == {1: 480.0, 2: 490.0, 999: 500.0}[
        stop_after
    ]
    assert len(result["curve"]) == {1: 2, 2: 5, 999: 6}[stop_after]


def test_a_solved_run_has_its_moment():
    curve = [[3.0, 120.0, 2048], [4.0, 480.0, 4096], [5.0, 470.0, 6144]]
    run = {"curve": curve, "sps_steady": 2048.0}
    assert env_scaling.time_to_solve(run) == {"steps": 4096, "cold": 4.0, "warm": 2.0}
    assert env_scaling.time_to_solve(run | {"curve": curve[:1]}) is None


def test_tables_say_what_the_record_says():
    machine = {"gpu": None}
    rows = [
        {"back_end": name, "sps_steady": speed}
        for speed_up in (1, 2)
        for name, speed in (("Gymnasium sync", 10.0 * speed_up), ("tensors", 40.0 * speed_up))
    ]
    record = {
        "limits": {"devices": {"cpu": {"bytes_per_second": 1e9, "flops": 1e6}}},
        "train": {"machine": machine, "rows": rows, "flop_per_step": 1000},
    }
    (_, limits), (_, training) = env_tables.tables(record)
    assert limits[1] == ["cpu", "1 G", "1 M"]
    assert training[1] == ["Gymnasium sync", "15", "10-20", "0.25x", "1.00x", "1.5%"]
    assert training[2][-3:] == ["1.00x", "4.00x", "6.0%"]
    assert training[2][1] == "60"


def test_bad_input_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        env_scaling.main(["nothing"])
    assert "error: no part 'nothing'" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit, match="^error: learn needs .*: run search as well$"):
        env_scaling.main(["learn", "--out", f"{tmp_path}/empty"])
