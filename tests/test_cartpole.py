"""PPO on CartPole as tensors: the environment against Gymnasium's, whole runs, resume, learning."""

import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_resume import assert_same, command_line, read_checkpoint
from test_sac import read_run, read_scalars, run

from leanrl import ppo_cartpole_gpu as baseline

CPU = torch.device("cpu")
SMALL = {"num_envs": 64, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    """Each test has a directory, and one thread: small batches are not worth more."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(**flags) -> Path:
    return baseline.main(baseline.Args(**SMALL | flags))


# The environment


def random_states(count, rng):
    """Some of them about to leave the track or to fall, some already out."""
    return rng.uniform([-2.5, -3, -0.22, -3.5], [2.5, 3, 0.22, 3.5], (count, 4)).astype(np.float32)


def test_a_step_is_gymnasiums():
    """Same states and actions: next states within 1e-6, the same ends, the same rewards."""
    rng, count = np.random.default_rng(0), 2000
    states, actions = random_states(count, rng), rng.integers(0, 2, count)
    envs = baseline.CartPole(count, CPU)
    envs.reset(seed=1)
    envs.state.copy_(torch.from_numpy(states))
    obs, rewards, terminated, truncated, infos = envs.step(torch.from_numpy(actions))
    env = gym.make("CartPole-v1").unwrapped
    ends = np.zeros(2, int)
    for i in range(count):
        env.reset(seed=0)
        env.state = states[i].astype(np.float64)
        expected, reward, ended, _, _ = env.step(int(actions[i]))
        np.testing.assert_allclose(infos["final_obs"][i], expected, atol=1e-6, rtol=1e-6)
        assert rewards[i] == reward == 1 and not truncated[i]
        limits = abs(abs(expected[0]) - 2.4), abs(abs(expected[2]) - 12 * math.pi / 180)
        assert terminated[i] == ended or min(limits) < 1e-6  # where rounding decides
        ends[int(ended)] += 1
        if not terminated[i]:
            assert torch.equal(obs[i], infos["final_obs"][i])
        else:
            assert obs[i].abs().max() <= 0.05
    assert ends.min() > 200


@pytest.mark.parametrize("falls", [False, True], ids=["stands", "falls"])
def test_the_limit_truncates_whether_the_pole_stands_or_falls(falls):
    envs = baseline.CartPole(2, CPU)
    envs.reset(seed=1)
    envs.lengths[0] = 499
    envs.state.zero_()
    envs.state[:, 2] = 0.25 if falls else 0.0
    obs, _, terminated, truncated, infos = envs.step(torch.tensor([0, 1]))
    assert truncated.tolist() == [True, False] and terminated.tolist() == [falls, falls]
    assert infos["_final_obs"].tolist() == infos["_episode"].tolist() == [True, falls]
    assert infos["episode"]["l"].tolist() == infos["episode"]["r"].tolist() == [500, 1]
    assert envs.lengths.tolist() == [0, 0 if falls else 1]
    assert (obs[0] != infos["final_obs"][0]).any() and torch.equal(obs, envs.state)


def test_returns_and_lengths_are_those_of_whole_episodes():
    envs, generator = baseline.CartPole(50, CPU), torch.Generator().manual_seed(0)
    envs.reset(seed=1)
    lengths, ends = np.zeros(50), 0
    for _ in range(200):
        _, _, terminated, _, infos = envs.step(torch.randint(0, 2, (50,), generator=generator))
        lengths += 1
        np.testing.assert_array_equal(infos["episode"]["r"], lengths)
        lengths[infos["_episode"].numpy()] = 0
        ends += int(terminated.sum())
    assert ends > 200


def test_resets_are_uniform_and_independent():
    """Of `reset` and of ended episodes: each variable by Kolmogorov-Smirnov, and correlations."""
    count = 20_000
    envs = baseline.CartPole(count, CPU)
    started, _ = envs.reset(seed=1)
    draws = [started]
    for _ in range(2):
        envs.state[:, 0] = 3.0  # off the track: all end
        draws.append(envs.step(torch.zeros(count, dtype=torch.int64))[0])
    for draw in draws:
        for variable in draw.T.numpy():
            ranks = (np.arange(count) + 0.5) / count
            distance = np.abs((np.sort(variable) + 0.05) / 0.1 - ranks).max()
            assert distance < 1.95 / math.sqrt(count)  # p = 0.001
    columns = torch.cat(draws, dim=1).numpy().T  # 12 variables, those of later steps included
    correlations = np.corrcoef(columns) - np.eye(12)
    assert np.abs(correlations).max() < 4.5 / math.sqrt(count)
    neighbours = np.corrcoef(draws[1][:-1, 0], draws[1][1:, 0])[0, 1]
    assert abs(neighbours) < 4.5 / math.sqrt(count)


def test_the_seed_decides_and_a_state_brings_back():
    def roll(envs, steps=60):
        return torch.stack([envs.step((envs.state[:, 2] > 0).long() * 0)[0] for _ in range(steps)])

    envs, again, other = (baseline.CartPole(20, CPU) for _ in range(3))
    for each, seed in ((envs, 1), (again, 1), (other, 2)):
        each.reset(seed=seed)
    first = roll(envs)
    assert torch.equal(first, roll(again)) and not torch.equal(first, roll(other))
    state = {name: value.clone() for name, value in envs.state_dict().items()}
    expected = roll(envs)
    other.load_state_dict(state)
    assert torch.equal(roll(other), expected)


def test_it_is_a_vector_environment():
    envs = baseline.CartPole(3, CPU)
    assert isinstance(envs, gym.vector.VectorEnv) and envs.num_envs == 3
    theirs = gym.make_vec("CartPole-v1", 3)
    for name in ("single_observation_space", "observation_space", "action_space"):
        one, other = getattr(envs, name), getattr(theirs, name)
        assert one == other or np.allclose(one.high, other.high)
    obs, _ = envs.reset(seed=1)
    assert envs.observation_space.contains(obs.numpy()) and obs.dtype == torch.float32


# Learning from it


def test_only_truncations_bootstrap_from_the_final_observation():
    torch.manual_seed(0)
    agent = baseline.PPO(baseline.Args(**SMALL), 4, 2, CPU)
    rollout = baseline.Rollout(16, 64, 4, CPU)
    rollout.obs.normal_()
    rollout.final_obs.normal_()
    rollout.rewards.normal_()
    terminated, truncated = torch.rand(2, 16, 64) < 0.2
    rollout.terminated.copy_(terminated)
    rollout.ended.copy_(terminated | truncated)
    with torch.no_grad():
        rollout.values.copy_(agent.model(rollout.obs)[1])
        final_values = agent.model(rollout.final_obs)[1]
    agent.prepare(rollout)
    deltas = rollout.rewards + 0.99 * final_values * ~terminated - rollout.values
    expected, advantage = torch.zeros(16, 64), torch.zeros(64)
    for t in reversed(range(16)):
        advantage = deltas[t] + 0.99 * 0.95 * ~(terminated[t] | truncated[t]) * advantage
        expected[t] = advantage
    torch.testing.assert_close(rollout.advantages, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout.returns, expected + rollout.values, atol=1e-5, rtol=0)


# Whole runs


def test_run_from_end_to_end(tmp_path):
    flags = ("--num-envs=64", "--num-steps=16", "--num-minibatches=2", "--total-timesteps=9000")
    flags += ("--eval-every=5000", "--eval-episodes=3", "--save-model", "--capture-video")
    result = run(tmp_path, baseline.SCRIPT, *flags)
    run_dir, config, stages, values = read_run(tmp_path)
    assert str(run_dir.name) in result.stdout and config["args"]["env_id"] == "CartPole-v1"
    assert stages["window"]["env_steps"] == 8192 - 3 * 1024 and stages["sps_steady"] > 0
    assert [step for step, _ in values["charts/eval_return"]] == [5120, 8192]
    assert all(9 < value < 100 for _, value in values["charts/episodic_return"])
    for name in (*baseline.METRICS, "explained_variance"):
        series = [value for _, value in values[f"losses/{name}"]]
        assert len(series) == 8 and np.isfinite(series).all() and len(set(series)) > 1
    assert (run_dir / "checkpoint.pt").exists()
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2


def test_a_resumed_run_is_the_uninterrupted_run():
    """Bitwise, environments included: they are tensors like all else."""
    whole = train(total_timesteps=4096, save_model=True, exp_name="whole")
    part = train(total_timesteps=4096, save_model=True, exp_name="part", checkpoint_every=2048)
    assert_same(read_checkpoint(whole), read_checkpoint(part))
    saved, save = [], baseline.save_checkpoint

    def stop_after_the_first(path, checkpoint):
        saved.append(save(path, checkpoint))
        raise KeyboardInterrupt

    baseline.save_checkpoint = stop_after_the_first
    try:
        with pytest.raises(SystemExit):
            train(total_timesteps=4096, save_model=True, exp_name="cut", checkpoint_every=2048)
    finally:
        baseline.save_checkpoint = save
    (cut,) = Path("runs").glob("*__cut__*")
    assert read_checkpoint(cut)["global_step"] == 2048
    train(total_timesteps=4096, save_model=True, resume=str(cut))
    assert_same(read_checkpoint(whole), read_checkpoint(cut))


def test_evaluation_changes_nothing():
    without = train(total_timesteps=2048, save_model=True, exp_name="without")
    flags = {"eval_every": 1024, "eval_episodes": 2}
    evaluated = train(total_timesteps=2048, save_model=True, exp_name="with", **flags)
    assert_same(read_checkpoint(without)["agent"], read_checkpoint(evaluated)["agent"])
    assert len(read_scalars(evaluated)["charts/eval_return"]) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-envs", "0"), ("--num-envs must be positive",)),
        (("--num-envs", "3", "--num-steps", "3"), ("3 x --num-steps 3 = 9", "--num-minibatches 4")),
        (("--num-envs", "4194304000"), ("--num-envs 4194304000", "GB")),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, words):
    done, lines = command_line(baseline, *flags, "--total-timesteps", "1000000000000")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    error = [line for line in lines if line.startswith("error")]
    assert len(error) == 1 and all(word in error[0] for word in words), lines
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_cartpole_is_solved_on_gymnasiums_own(seed, tmp_path):
    """475 is where Gymnasium calls CartPole-v1 solved; a random policy gets about 22."""
    run(tmp_path, baseline.SCRIPT, f"--seed={seed}", "--eval-every=5000000", "--eval-episodes=100")
    _, _, _, values = read_run(tmp_path)
    assert values["charts/episodic_return"][0][1] < 60, "not a task that starts unsolved"
    assert values["charts/eval_return"][-1][1] >= 475
