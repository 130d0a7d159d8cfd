"""PPO on CartPole as tensors: environments against Gymnasium's, parity, runs."""

import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_ppo import assert_same_model
from test_resume import assert_same, command_line, read_checkpoint
from test_sac import read_run, read_scalars, run
from test_sac_parity import assert_hunks_are_marked

from leanrl import ppo_cartpole_gpu as baseline
from leanrl import ppo_cartpole_gpu_torchcompile as variant

CPU = torch.device("cpu")
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
FORMS = pytest.mark.parametrize(
    "make",
    [
        baseline.CartPole,
        lambda count, device: variant.CartPole(count, device, "torch"),
    ],
    ids=["baseline", "variant"],
)
SMALL = {"num_envs": 64, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: small batches are not worth more."""
    monkeypatch.chdir(tmp_path)


def train(module=baseline, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


# The environment


def random_states(count, rng):
    """Some of them about to leave the track or to fall, some already out."""
    return rng.uniform([-2.5, -3, -0.22, -3.5], [2.5, 3, 0.22, 3.5], (count, 4)).astype(np.float32)


@FORMS
def test_a_step_is_gymnasiums(make):
    """Same states and actions: next states within 1e-6, the same ends, the same rewards."""
    rng, count = np.random.default_rng(0), 2000
    states, actions = random_states(count, rng), rng.integers(0, 2, count)
    envs = make(count, CPU)
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


@FORMS
@pytest.mark.parametrize("falls", [False, True], ids=["stands", "falls"])
def test_the_limit_truncates_whether_the_pole_stands_or_falls(make, falls):
    envs = make(2, CPU)
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


@FORMS
def test_returns_and_lengths_are_those_of_whole_episodes(make):
    envs, generator = make(50, CPU), torch.Generator().manual_seed(0)
    envs.reset(seed=1)
    lengths, ends = np.zeros(50), 0
    for _ in range(200):
        _, _, terminated, _, infos = envs.step(torch.randint(0, 2, (50,), generator=generator))
        lengths += 1
        np.testing.assert_array_equal(infos["episode"]["r"], lengths)
        lengths[infos["_episode"].numpy()] = 0
        ends += int(terminated.sum())
    assert ends > 200


@FORMS
def test_resets_are_uniform_and_independent(make):
    """Of `reset` and of ended episodes: each variable by Kolmogorov-Smirnov, and correlations."""
    count = 20_000
    envs = make(count, CPU)
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


@FORMS
def test_the_seed_decides_and_a_state_brings_back(make):
    def roll(envs, steps=60):
        actions = torch.zeros(20, dtype=torch.int64)  # all fall within 11 steps or so
        return torch.stack([envs.step(actions)[0] for _ in range(steps)])

    envs, again, other = (make(20, CPU) for _ in range(3))
    for each, seed in ((envs, 1), (again, 1), (other, 2)):
        each.reset(seed=seed)
    first = roll(envs)
    assert torch.equal(first, roll(again)) and not torch.equal(first, roll(other))
    state = {name: value.clone() for name, value in envs.state_dict().items()}
    expected = roll(envs)
    other.load_state_dict(state)
    assert torch.equal(roll(other), expected)


@FORMS
def test_actions_of_another_count_are_refused(make):
    envs = make(3, CPU)
    envs.reset(seed=1)
    with pytest.raises(RuntimeError):
        envs.step(torch.zeros(2, dtype=torch.int64))
    one, other = make(3, CPU), make(3, CPU)
    for each in (one, other):
        each.reset(seed=1)
    actions = torch.tensor([0, 1, 1])
    assert torch.equal(one.step(actions)[0], other.step(actions.int())[0])


@FORMS
def test_it_is_a_vector_environment(make):
    envs = make(3, CPU)
    assert isinstance(envs, gym.vector.VectorEnv) and envs.num_envs == 3
    theirs = gym.make_vec("CartPole-v1", 3)
    for name in ("single_observation_space", "observation_space", "action_space"):
        one, other = getattr(envs, name), getattr(theirs, name)
        assert one == other or np.allclose(one.high, other.high)
    obs, _ = envs.reset(seed=1)
    assert envs.observation_space.contains(obs.numpy()) and obs.dtype == torch.float32


@SCRIPTS
def test_gymnasium_makes_it_by_name(module, monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("CartPoleTensors-v1", vector_entry_point=module.CartPole)
    envs = gym.make_vec("CartPoleTensors-v1", num_envs=3, device="cpu")
    obs, _ = envs.reset(seed=1)
    direct, _ = module.CartPole(3, CPU).reset(seed=1)
    assert type(envs) is module.CartPole and torch.equal(obs, direct)


# Learning from it


@SCRIPTS
def test_only_truncations_bootstrap_from_the_final_observation(module):
    torch.manual_seed(0)
    agent = module.PPO(module.Args(**SMALL), 4, 2, CPU)
    rollout = module.Rollout(16, 64, 4, CPU)
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


# Parity


def make_pair(**flags):
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**SMALL), 4, 2, CPU)
    with torch.no_grad():
        for parameter in reference.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    agent = variant.PPO(variant.Args(**SMALL, **flags), 4, 2, CPU)
    agent.model.load_state_dict(reference.model.state_dict())
    return reference, agent


def run_updates(reference, agent, count, tolerance):
    """`count` minibatch updates on both, then all metrics and parameters must agree."""
    obs, actions = torch.randn(256, 4), torch.randint(0, 2, (256,))
    with torch.no_grad():
        log_policy, values = reference.model(obs)
        log_probs = log_policy.gather(1, actions[:, None]).squeeze(1)
    columns = obs, actions, log_probs, values, torch.randn(256), values + torch.randn(256)
    for _ in range(count):
        index = torch.randperm(256)[:64]
        expected = reference.update(baseline.Batch(*(column[index] for column in columns)))
        found = agent.update(variant.Batch(*columns), index)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert_same_model(reference, agent, tolerance)


def compile_agent(agent):
    torch._dynamo.reset()
    variant.compile_agent(agent)
    return agent


@COMPILED
def test_one_update_agrees(compiled):
    reference, agent = make_pair()
    run_updates(reference, compile_agent(agent) if compiled else agent, 1, 1e-5)


@COMPILED
def test_a_hundred_updates_agree(compiled, float64):
    reference, agent = make_pair()
    run_updates(reference, compile_agent(agent) if compiled else agent, 100, 1e-9)


@COMPILED
def test_an_update_in_pieces_agrees(compiled, float64, monkeypatch):
    """Means of 4 pieces, whose advantages are normalized over all of them."""
    monkeypatch.setattr(variant, "CACHED_ROWS", 16)
    reference, agent = make_pair()
    run_updates(reference, compile_agent(agent) if compiled else agent, 20, 1e-9)


def test_pieces_are_equal_and_fit():
    assert [variant.pieces(rows, 4096) for rows in (32_768, 4096, 5, 10_000)] == [8, 1, 1, 4]
    assert variant.pieces(8191, 4096) == 1  # a prime number


def test_a_wrong_update_is_noticed():
    for flag, value in (("clip_coef", 0.01), ("max_grad_norm", 0.1), ("ent_coef", 0.0)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_updates(reference, agent, 3, 1e-5)


@COMPILED
def test_a_whole_run_on_tensors_agrees(compiled):
    """The two scripts from the command line's settings to the checkpoint, on one seed."""
    torch._dynamo.reset()
    one = read_checkpoint(train(total_timesteps=2048, save_model=True))
    flags = {"env_backend": "torch", "compile": compiled}
    other = read_checkpoint(train(variant, total_timesteps=2048, save_model=True, **flags))
    assert_same(one["agent"]["model"], other["agent"]["model"], tolerance=1e-4)
    assert torch.equal(one["envs"]["lengths"], other["envs"]["lengths"])


def test_no_graph_break_and_no_recompilation(monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = []
    learn = variant.PPO.learn

    def counted(self, *arguments):
        metrics = learn(self, *arguments)
        counters = torch._dynamo.utils.counters
        counts.append((counters["stats"]["unique_graphs"], len(counters["graph_break"])))
        return metrics

    monkeypatch.setattr(variant.PPO, "learn", counted)
    train(variant, total_timesteps=3072, compile=True)
    assert counts == [(5, 0)] * 3, counts


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


@pytest.mark.gpu
def test_graphed_runs_agree_with_eager():
    """Rollouts before, at and after the capture of every graph: random numbers must go on."""
    flags = {"total_timesteps": 1024 * 8, "save_model": True}
    eager = read_checkpoint(train(variant, **flags, exp_name="eager"))
    graphed = read_checkpoint(train(variant, **flags, cudagraphs=True))
    assert torch.equal(eager["envs"]["lengths"], graphed["envs"]["lengths"])
    assert_same(eager["agent"]["model"], graphed["agent"]["model"], tolerance=1e-3)


# Whole runs


@pytest.mark.parametrize(
    "command",
    [(baseline.SCRIPT,), (variant.SCRIPT,), (variant.SCRIPT, "--compile", "--cudagraphs")],
    ids=["baseline", "eager", "compile+cudagraphs"],
)
def test_run_from_end_to_end(command, tmp_path):
    flags = ("--num-envs=64", "--num-steps=16", "--num-minibatches=2", "--total-timesteps=9000")
    flags += ("--eval-every=5000", "--eval-episodes=3", "--save-model", "--capture-video")
    result = run(tmp_path, *command, *flags)
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


@SCRIPTS
def test_a_resumed_run_is_the_uninterrupted_run(module):
    """Bitwise, environments included: they are tensors like all else."""
    flags = {"total_timesteps": 4096, "save_model": True}
    whole = train(module, **flags, exp_name="whole")
    part = train(module, **flags, exp_name="part", checkpoint_every=2048)
    assert_same(read_checkpoint(whole), read_checkpoint(part))
    saved, save = [], module.save_checkpoint

    def stop_after_the_first(path, checkpoint):
        saved.append(save(path, checkpoint))
        raise KeyboardInterrupt

    module.save_checkpoint = stop_after_the_first
    try:
        with pytest.raises(SystemExit):
            train(module, **flags, exp_name="cut", checkpoint_every=2048)
    finally:
        module.save_checkpoint = save
    (cut,) = Path("runs").glob("*__cut__*")
    assert read_checkpoint(cut)["global_step"] == 2048
    train(module, **flags, resume=str(cut))
    assert_same(read_checkpoint(whole), read_checkpoint(cut))


@SCRIPTS
def test_evaluation_changes_nothing(module):
    without = train(module, total_timesteps=2048, save_model=True, exp_name="without")
    flags = {"eval_every": 1024, "eval_episodes": 2}
    evaluated = train(module, total_timesteps=2048, save_model=True, exp_name="with", **flags)
    assert_same(read_checkpoint(without)["agent"], read_checkpoint(evaluated)["agent"])
    assert len(read_scalars(evaluated)["charts/eval_return"]) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-envs", "0"), ("--num-envs must be positive",)),
        (("--num-envs", "3", "--num-steps", "3"), ("3 x --num-steps 3 = 9", "--num-minibatches 4")),
        (("--num-envs", "4194304000"), ("--num-envs 4194304000", "GB")),
        (("--cudagraphs", "--no-cuda"), ("--no-cuda",)),
        (("--env-id", "CartPole-v0"), ()),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, words):
    done, lines = command_line(variant, *flags, "--total-timesteps", "1000000000000")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    error = [line for line in lines if line.startswith("error")]
    if words:  # otherwise the parser of flags has said it
        assert len(error) == 1 and all(word in error[0] for word in words), lines
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("command", [(baseline.SCRIPT,), (variant.SCRIPT, "--compile")], ids=str)
def test_cartpole_is_solved_on_gymnasiums_own(command, seed, tmp_path):
    """475 is where Gymnasium calls CartPole-v1 solved; a random policy gets about 22."""
    run(tmp_path, *command, f"--seed={seed}", "--eval-every=5000000", "--eval-episodes=100")
    _, _, _, values = read_run(tmp_path)
    assert values["charts/episodic_return"][0][1] < 60, "not a task that starts unsolved"
    assert values["charts/eval_return"][-1][1] >= 475
