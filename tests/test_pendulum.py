"""PPO on Pendulum as tensors and as a kernel: environments against Gymnasium's, parity, runs.

What is shared with CartPole's scripts to the letter is tested there; that it is shared is tested in
test_td3. Where a test of CartPole's asks nothing that only CartPole has, these are put through it.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import test_cartpole
import torch
from test_cartpole import CPU, SMALL, in_tmp_path, train  # noqa: F401
from test_ppo import assert_same_model
from test_resume import assert_same, read_checkpoint
from test_sac import read_run, run
from test_sac_parity import assert_hunks_are_marked

from leanrl import ppo_pendulum_gpu as baseline
from leanrl import ppo_pendulum_gpu_torchcompile as variant

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
FORMS = pytest.mark.parametrize(
    "make",
    [
        baseline.Pendulum,
        lambda count, device: variant.Pendulum(count, device, "torch"),
        lambda count, device: variant.Pendulum(count, device, "kernel"),
    ],
    ids=["baseline", "torch", "kernel"],
)


@pytest.fixture
def cartpoles_tests(monkeypatch):
    """CartPole's tests that name the scripts themselves find Pendulum's."""
    monkeypatch.setattr(test_cartpole, "baseline", baseline)
    monkeypatch.setattr(test_cartpole, "variant", variant)
    return test_cartpole


# The environment


def random_states_and_actions(count, rng):
    """Angles of many turns, speeds at the bound, torques out of range."""
    states = rng.uniform([-10, -8], [10, 8], (count, 2))
    states[: count // 4, 0] *= 100
    states[::5, 1] = np.sign(states[::5, 1]) * 8
    return states.astype(np.float32), rng.uniform(-3, 3, (count, 1)).astype(np.float32)


def envs_at(make, states):
    envs = make(len(states), CPU)
    envs.reset(seed=1)
    envs.state.copy_(torch.as_tensor(states))
    return envs


@FORMS
def test_a_step_is_gymnasiums(make):
    """Same states and actions: observations and rewards within 1e-6, no end."""
    count = 2000
    states, actions = random_states_and_actions(count, np.random.default_rng(0))
    envs = envs_at(make, states)
    obs, rewards, terminated, truncated, infos = envs.step(torch.from_numpy(actions))
    assert not (terminated | truncated | infos["_final_obs"]).any()
    assert torch.equal(obs, infos["final_obs"]) and obs.dtype == rewards.dtype == torch.float32
    env = gym.make("Pendulum-v1").unwrapped
    at_bound = 0
    for i in range(count):
        env.reset(seed=0)
        env.state = states[i].astype(np.float64)
        expected, reward, *_ = env.step(actions[i])
        np.testing.assert_allclose(obs[i], expected, atol=1e-6, rtol=1e-6)
        np.testing.assert_allclose(rewards[i], reward, atol=1e-6, rtol=1e-6)
        at_bound += abs(expected[2]) == 8
    assert at_bound > 200 and (np.abs(actions) > 2).sum() > 200
    assert (np.abs(states[:, 0]) > math.pi).sum() > 1000


@FORMS
def test_the_angle_stays_wrapped_and_exact(make):
    """A pendulum that keeps turning, and angles next to where the turn ends."""
    starts = [3.1415925, 3.1415928, -3.1415925, -3.1415928, 9.424778, 80.0, -500.25]
    exact, speeds = np.array(starts, np.float32).astype(np.float64), np.full(7, 8.0)
    envs = envs_at(make, np.stack([exact, speeds], axis=1))
    for _ in range(100):
        envs.step(torch.full((7, 1), 2.0))
        speeds = np.clip(speeds + 0.05 * (15 * np.sin(exact) + 6), -8, 8)
        exact += 0.05 * speeds
        theta = envs.state[:, 0].numpy().astype(np.float64)
        assert np.abs(theta).max() < math.pi + 1e-6
        # 100 sums, each of which rounds by 2.4e-7 or so
        assert np.abs(np.exp(1j * theta) - np.exp(1j * exact)).max() < 3e-5
    assert (exact - starts > 4 * math.pi).all(), "not pendulums that turn"


@FORMS
def test_what_is_not_a_number_does_not_become_one(make):
    """A policy that has diverged must show, not act at a bound."""
    envs = envs_at(make, torch.zeros(2, 2))
    obs, rewards, *_ = envs.step(torch.tensor([[math.nan], [0.0]]))
    assert obs[0].isnan().all() and rewards[0].isnan()
    assert obs[1].tolist() == [1, 0, 0] and rewards[1] == 0


@FORMS
def test_the_limit_truncates(make):
    envs = envs_at(make, torch.ones(2, 2))
    envs.lengths[0] = 199
    envs.returns[0] = -100.0
    obs, rewards, terminated, truncated, infos = envs.step(torch.zeros(2, 1))
    assert gym.spec("Pendulum-v1").max_episode_steps == 200
    assert truncated.tolist() == [True, False] and not terminated.any()
    assert infos["_final_obs"].tolist() == infos["_episode"].tolist() == [True, False]
    assert infos["episode"]["l"].tolist() == [200, 1] and envs.lengths.tolist() == [0, 1]
    returns = [-100 + rewards[0].item(), rewards[1].item()]
    assert infos["episode"]["r"].tolist() == pytest.approx(returns)
    assert envs.returns.tolist() == [0, rewards[1].item()]
    # both were in one state: where the first went, the second still is
    assert torch.equal(infos["final_obs"][0], infos["final_obs"][1])
    assert torch.equal(infos["final_obs"][1], obs[1]) and (obs[0] != obs[1]).any()
    torch.testing.assert_close(obs, envs.observe(envs.state), atol=1e-6, rtol=0)


@FORMS
def test_returns_and_lengths_are_those_of_whole_episodes(make):
    envs, generator = make(50, CPU), torch.Generator().manual_seed(0)
    envs.reset(seed=1)
    envs.lengths.copy_(4 * torch.arange(50))  # one ends every fourth step
    lengths, returns, ends = 4 * np.arange(50), np.zeros(50), 0
    for _ in range(450):
        actions = 2 * torch.randn(50, 1, generator=generator)
        _, rewards, _, truncated, infos = envs.step(actions)
        lengths, returns = lengths + 1, returns + rewards.double().numpy()
        np.testing.assert_array_equal(infos["episode"]["l"], lengths)
        np.testing.assert_array_equal(truncated, lengths == 200)
        np.testing.assert_allclose(infos["episode"]["r"], returns, rtol=1e-5)
        ended = infos["_episode"].numpy()
        lengths[ended], returns[ended] = 0, 0
        ends += ended.sum()
    assert ends >= 100


@FORMS
def test_resets_are_uniform_and_independent(make):
    """Of `reset` and of ended episodes: each variable by Kolmogorov-Smirnov, and correlations."""
    count = 20_000
    envs = make(count, CPU)
    started, _ = envs.reset(seed=1)
    draws = [envs.state.clone()]
    torch.testing.assert_close(started, envs.observe(draws[0]))
    for _ in range(2):
        envs.lengths.fill_(199)  # all end
        obs, *_ = envs.step(torch.zeros(count, 1))
        draws.append(envs.state.clone())
        torch.testing.assert_close(obs, envs.observe(draws[-1]))
    ranks = (np.arange(count) + 0.5) / count
    for draw in draws:
        for variable, limit in zip(draw.T.numpy(), (math.pi, 1.0), strict=True):
            distance = np.abs((np.sort(variable) / limit + 1) / 2 - ranks).max()
            assert distance < 1.95 / math.sqrt(count)  # p = 0.001
    columns = torch.cat(draws, dim=1).numpy().T  # 6 variables, those of later episodes included
    correlations = np.corrcoef(columns) - np.eye(6)
    assert np.abs(correlations).max() < 4.5 / math.sqrt(count)
    neighbours = np.corrcoef(draws[1][:-1, 0], draws[1][1:, 0])[0, 1]
    assert abs(neighbours) < 4.5 / math.sqrt(count)


@FORMS
def test_the_seed_decides_and_a_state_brings_back(make):
    def roll(envs):
        """Observations and returns so far of 220 steps, (220, 20, 4)."""
        steps = [envs.step(torch.ones(20, 1)) for _ in range(220)]
        columns = (torch.cat([obs, i["episode"]["r"][:, None]], dim=1) for obs, *_, i in steps)
        return torch.stack(list(columns))

    envs, again, other = (make(20, CPU) for _ in range(3))
    for each, seed in ((envs, 1), (again, 1), (other, 2)):
        each.reset(seed=seed)
    first = roll(envs)
    assert torch.equal(first, roll(again)) and not torch.equal(first[200], roll(other)[200])
    state = {name: value.clone() for name, value in envs.state_dict().items()}
    expected = roll(envs)
    unused = make(20, CPU)
    unused.load_state_dict(state)
    assert torch.equal(roll(unused), expected)


@FORMS
def test_actions_of_another_shape_are_refused(make):
    envs = envs_at(make, torch.ones(3, 2))
    for shape in ((2, 1), (3,), (3, 2), (3, 1, 1)):
        with pytest.raises(RuntimeError):
            envs.step(torch.zeros(shape))
    assert (envs.state == 1).all() and not envs.lengths.any()
    other, actions = envs_at(make, torch.ones(3, 2)), torch.tensor([[0.5], [-1.0], [2.0]])
    assert torch.equal(envs.step(actions)[0], other.step(actions.double())[0])


@FORMS
def test_it_is_a_vector_environment(make):
    envs = make(3, CPU)
    assert isinstance(envs, gym.vector.VectorEnv) and envs.num_envs == 3
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
    theirs = gym.make_vec("Pendulum-v1", 3)
    for kind in ("observation_space", "action_space"):
        for name in (kind, f"single_{kind}"):
            assert getattr(envs, name) == getattr(theirs, name)
    obs, _ = envs.reset(seed=1)
    assert envs.observation_space.contains(obs.numpy()) and obs.dtype == torch.float32


@SCRIPTS
def test_gymnasium_makes_it_by_name(module, monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("PendulumTensors-v1", vector_entry_point=module.Pendulum)
    envs = gym.make_vec("PendulumTensors-v1", num_envs=3, device="cpu")
    obs, _ = envs.reset(seed=1)
    direct, _ = module.Pendulum(3, CPU).reset(seed=1)
    assert type(envs) is module.Pendulum and torch.equal(obs, direct)


@pytest.mark.parametrize("count", [1, 2, 255, 257])
def test_the_kernel_stays_within_its_tensors(count, tmp_path):
    """Under the address sanitizer, with as many environments as no block size divides."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(variant.__file__).parents[1])!r})
import torch
from leanrl.ppo_pendulum_gpu_torchcompile import Pendulum
envs = Pendulum({count}, torch.device("cpu"))
envs.reset(seed=1)
for _ in range(210):
    envs.step(torch.zeros({count}, 1))
print("done")
"""
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
    if not Path(asan.stdout.strip()).is_absolute():
        pytest.skip("g++ has no address sanitizer here")
    environment = {
        "CXXFLAGS": "-fsanitize=address",
        "LD_PRELOAD": asan.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]


def test_kernel_and_tensors_agree_for_many_steps():
    """From one state, step after step to the end, with what rounding becomes in 30 steps."""
    forms = [variant.Pendulum(500, CPU, backend) for backend in ("torch", "kernel")]
    for envs in forms:
        envs.reset(seed=1)
        envs.lengths.fill_(170)
    forms[1].state.copy_(forms[0].state)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        actions = 2 * torch.randn(500, 1, generator=generator)
        (obs, *found), (other_obs, *expected) = (envs.step(actions) for envs in forms)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    # then each has drawn a state of its own
    truncated, infos = found[2:]
    assert truncated.all() and (obs != infos["final_obs"]).any(dim=1).all()
    assert (obs != other_obs).any(dim=1).all()


# Learning from it


@SCRIPTS
def test_sampled_actions_are_normal_with_their_densities(module):
    torch.manual_seed(0)
    model, obs, noise = module.ActorCritic(3, 1), torch.randn(1000, 3), torch.randn(1000, 1)
    with torch.no_grad():
        model.actor_logstd.fill_(-0.5)
        actions, log_probs, values = module.sample(model, obs, noise)
        normal = torch.distributions.Normal(model.actor_mean(obs), math.exp(-0.5))
        assert torch.equal(values, model.critic(obs).squeeze(-1))
    torch.testing.assert_close((actions - normal.mean) / normal.stddev, noise)
    torch.testing.assert_close(log_probs, normal.log_prob(actions).squeeze(1))


@SCRIPTS
def test_truncations_bootstrap_from_the_final_observation(module):
    torch.manual_seed(0)
    agent = module.PPO(module.Args(**SMALL), 3, 1, CPU)
    rollout = module.Rollout(16, 64, 3, 1, CPU)
    rollout.obs.normal_()
    rollout.final_obs.normal_()
    rollout.rewards.normal_()
    truncated = torch.rand(16, 64) < 0.2
    rollout.ended.copy_(truncated)
    with torch.no_grad():
        rollout.values.copy_(agent.model(rollout.obs)[2])
        final_values = agent.model(rollout.final_obs)[2]
    agent.prepare(rollout)
    deltas = rollout.rewards + 0.95 * final_values - rollout.values
    expected, advantage = torch.zeros(16, 64), torch.zeros(64)
    for t in reversed(range(16)):
        advantage = deltas[t] + 0.95 * 0.95 * ~truncated[t] * advantage
        expected[t] = advantage
    torch.testing.assert_close(rollout.advantages, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout.returns, expected + rollout.values, atol=1e-5, rtol=0)


@SCRIPTS
def test_episodes_are_spread_out_and_only_whole_ones_are_logged(module):
    """64 environments begin 3 or 4 steps apart; in step 201 the first to have begun at 0 ends."""
    run_dir = train(module, total_timesteps=16 * 1024, save_model=True)
    lengths = read_checkpoint(run_dir)["envs"]["lengths"]
    assert torch.equal(lengths, (torch.arange(64) * 200 // 64 + 256) % 200)
    logged = test_cartpole.read_scalars(run_dir)
    episodes = logged["charts/episodic_return"]
    assert [step for step, _ in episodes] == [14 * 1024, 15 * 1024, 16 * 1024]
    assert all(-1900 < value < -600 for _, value in episodes), episodes
    assert {value for _, value in logged["charts/episodic_length"]} == {200}


# Parity


def make_pair(**flags):
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**SMALL), 3, 1, CPU)
    with torch.no_grad():
        for parameter in reference.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    agent = variant.PPO(variant.Args(**SMALL, **flags), 3, 1, CPU)
    agent.model.load_state_dict(reference.model.state_dict())
    return reference, agent


def run_updates(reference, agent, count, tolerance):
    """`count` minibatch updates on both, then all metrics and parameters must agree."""
    obs, noise = torch.randn(256, 3), torch.randn(256, 1)
    with torch.no_grad():
        actions, log_probs, values = baseline.sample(reference.model, obs, noise)
    columns = obs, actions, log_probs, values, torch.randn(256), values + torch.randn(256)
    for _ in range(count):
        index = torch.randperm(256)[:64]
        expected = reference.update(baseline.Batch(*(column[index] for column in columns)))
        found = agent.update(variant.Batch(*columns), index)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert_same_model(reference, agent, tolerance)


@COMPILED
def test_one_update_agrees(compiled, cartpoles_tests):
    reference, agent = make_pair()
    run_updates(reference, cartpoles_tests.compile_agent(agent) if compiled else agent, 1, 1e-5)


@COMPILED
def test_a_hundred_updates_agree(compiled, float64, cartpoles_tests):
    reference, agent = make_pair()
    run_updates(reference, cartpoles_tests.compile_agent(agent) if compiled else agent, 100, 1e-9)


def test_a_wrong_update_is_noticed():
    for flag, value in (("clip_coef", 0.01), ("max_grad_norm", 0.1), ("ent_coef", 0.01)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_updates(reference, agent, 3, 1e-5)


@COMPILED
def test_a_whole_run_on_tensors_agrees(compiled):
    """The two scripts from the command line's settings to the checkpoint, on one seed."""
    torch._dynamo.reset()
    one = read_checkpoint(train(baseline, total_timesteps=2048, save_model=True))
    flags = {"env_backend": "torch", "compile": compiled}
    other = read_checkpoint(train(variant, total_timesteps=2048, save_model=True, **flags))
    assert_same(one["agent"]["model"], other["agent"]["model"], tolerance=1e-4)
    assert_same(one["envs"]["state"], other["envs"]["state"], tolerance=1e-2)
    assert torch.equal(one["envs"]["lengths"], other["envs"]["lengths"])


def test_no_graph_break_and_no_recompilation(cartpoles_tests, monkeypatch):
    cartpoles_tests.test_no_graph_break_and_no_recompilation(monkeypatch)


def test_the_kernel_is_an_operator_that_compiled_code_calls():
    """`fullgraph`: policy and environment in one graph, without a break."""
    envs = variant.Pendulum(64, CPU)
    envs.reset(seed=1)
    envs.lengths[::2] = 199
    model, noise = variant.ActorCritic(3, 1), torch.randn(64, 1)

    def step(noise):
        with torch.no_grad():
            actions, _, _ = variant.sample(model, envs.observe(envs.state), noise)
        obs, rewards, _, truncated, infos = envs.step(actions)
        return obs, rewards, truncated, infos["final_obs"], envs.returns, envs.lengths

    torch._dynamo.reset()
    before = {name: value.clone() for name, value in envs.state_dict().items()}
    expected = [tensor.clone() for tensor in step(noise)]
    envs.load_state_dict(before)
    found = torch.compile(step, fullgraph=True)(noise)
    torch.testing.assert_close(list(found), expected, atol=1e-5, rtol=1e-5)


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "kernel"])
def test_graphed_runs_agree_with_eager(backend, cartpoles_tests):
    cartpoles_tests.test_graphed_runs_agree_with_eager(backend)


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [1, 32, 1000, 1024])
def test_the_kernel_on_the_gpu_is_the_one_on_the_cpu(threads):
    one, other = (
        variant.Pendulum(1001, torch.device(d), "kernel", threads) for d in ("cpu", "cuda")
    )
    for envs in (one, other):
        envs.reset(seed=1)
        envs.lengths.fill_(195)
    other.state.copy_(one.state)
    for _ in range(10):  # the fifth resets all
        actions = 2 * torch.randn(1001, 1)
        found, expected = other.step(actions.cuda()), one.step(actions)
        torch.testing.assert_close(found[0].cpu(), expected[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(found[1].cpu(), expected[1], atol=1e-4, rtol=1e-4)


# Whole runs


@pytest.mark.parametrize(
    "command",
    [(baseline.SCRIPT,), (variant.SCRIPT,), (variant.SCRIPT, "--compile", "--cudagraphs")],
    ids=["baseline", "eager", "compile+cudagraphs"],
)
def test_run_from_end_to_end(command, tmp_path):
    flags = ("--num-envs=64", "--num-steps=32", "--num-minibatches=2", "--total-timesteps=17000")
    flags += ("--eval-every=10000", "--eval-episodes=3", "--save-model", "--capture-video")
    result = run(tmp_path, *command, *flags)
    run_dir, config, stages, values = read_run(tmp_path)
    assert str(run_dir.name) in result.stdout and config["args"]["env_id"] == "Pendulum-v1"
    assert stages["window"]["env_steps"] == 16384 - 3 * 2048 and stages["sps_steady"] > 0
    assert [step for step, _ in values["charts/eval_return"]] == [10240, 16384]
    assert all(-1900 < value < -600 for _, value in values["charts/eval_return"])
    for name in (*baseline.METRICS, "explained_variance"):
        series = [value for _, value in values[f"losses/{name}"]]
        assert len(series) == 8 and np.isfinite(series).all() and len(set(series)) > 1
    assert (run_dir / "checkpoint.pt").exists()
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2


@SCRIPTS
def test_evaluation_plays_the_mean_action_on_gymnasiums_own(module):
    torch.manual_seed(0)
    args, model = module.Args(eval_episodes=2), module.ActorCritic(3, 1)
    found = module.evaluate(model, args, CPU, None)
    returns = []
    for i in range(2):
        env = gym.make("Pendulum-v1")
        obs, _ = env.reset(seed=args.seed + module.EVAL_SEED + i)
        returns.append(0.0)
        for _ in range(200):
            with torch.no_grad():
                action = model.actor_mean(torch.from_numpy(obs)).numpy()
            obs, reward, *_ = env.step(action)
            returns[-1] += reward
    assert found == pytest.approx(np.mean(returns), rel=1e-3)


@SCRIPTS
def test_a_resumed_run_is_the_uninterrupted_run(module, cartpoles_tests):
    cartpoles_tests.test_a_resumed_run_is_the_uninterrupted_run(module)


@SCRIPTS
def test_evaluation_changes_nothing(module, cartpoles_tests):
    cartpoles_tests.test_evaluation_changes_nothing(module)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-envs", "3", "--num-steps", "3"), ("3 = 9 steps", "--num-minibatches 16")),
        (("--num-envs", "4194304000"), ("--num-envs 4194304000", "GB")),
        (("--threads-per-block", "1025"), ("1 to 1024, got 1025",)),
        (("--env-id", "CartPole-v1"), ()),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, words, cartpoles_tests):
    cartpoles_tests.test_bad_input_is_one_line_and_status_2(flags, words)


def test_a_missing_compiler_is_one_line(cartpoles_tests):
    cartpoles_tests.test_a_missing_compiler_is_one_line()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("command", [(baseline.SCRIPT,), (variant.SCRIPT, "--compile")], ids=str)
def test_pendulum_is_solved_on_gymnasiums_own(command, seed, tmp_path):
    """A random policy gets about -1,200, one that swings it up and holds it about -150."""
    run(tmp_path, *command, f"--seed={seed}", "--eval-every=3000000", "--eval-episodes=100")
    _, _, _, values = read_run(tmp_path)
    assert values["charts/episodic_return"][0][1] < -800, "not a task that starts unsolved"
    assert values["charts/eval_return"][-1][1] > -200
