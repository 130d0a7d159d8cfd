"""PPO on Pendulum as tensors: the environment against Gymnasium's, parity, whole runs.

What is shared with CartPole's scripts to the letter is tested there (test_shared).
"""

import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_cartpole import SMALL, in_tmp_path, read_checkpoint  # noqa: F401
from test_sac import read_run, read_scalars, run
from test_sac_parity import assert_hunks_are_marked

from leanrl import ppo_pendulum_gpu as baseline
from leanrl import ppo_pendulum_gpu_torchcompile as variant

CPU = torch.device("cpu")
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
Pendulum = baseline.Pendulum  # the same text in both files


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


# The environment


def envs_at(states):
    envs = Pendulum(len(states), CPU)
    envs.reset(seed=1)
    envs.state.copy_(torch.as_tensor(states))
    return envs


def test_a_step_is_gymnasiums():
    """Same states and actions: observations and rewards within 1e-6, no end."""
    count, rng = 2000, np.random.default_rng(0)
    states = rng.uniform([-math.pi, -8], [math.pi, 8], (count, 2))
    states[::5, 1] = np.sign(states[::5, 1]) * 8
    states, actions = states.astype(np.float32), rng.uniform(-3, 3, (count, 1)).astype(np.float32)
    envs = envs_at(states)
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


def test_the_angle_stays_wrapped_and_exact():
    """A pendulum that keeps turning, and angles next to where the turn ends."""
    starts = [3.1415925, 3.1415926, -3.1415925, -3.1415926, 0.0, 1.0, -2.5]
    exact, speeds = np.array(starts, np.float32).astype(np.float64), np.full(7, 8.0)
    envs = envs_at(np.stack([exact, speeds], axis=1))
    for _ in range(100):
        envs.step(torch.full((7, 1), 2.0))
        speeds = np.clip(speeds + 0.05 * (15 * np.sin(exact) + 6), -8, 8)
        exact += 0.05 * speeds
        theta = envs.state[:, 0].numpy().astype(np.float64)
        assert np.abs(theta).max() < math.pi + 1e-6
        # 100 sums, each of which rounds by 2.4e-7 or so
        assert np.abs(np.exp(1j * theta) - np.exp(1j * exact)).max() < 3e-5
    assert (exact - starts > 4 * math.pi).all(), "not pendulums that turn"


def test_what_is_not_a_number_does_not_become_one():
    """A policy that has diverged must show, not act at a bound."""
    envs = envs_at(torch.zeros(2, 2))
    obs, rewards, *_ = envs.step(torch.tensor([[math.nan], [0.0]]))
    assert obs[0].isnan().all() and rewards[0].isnan()
    assert obs[1].tolist() == [1, 0, 0] and rewards[1] == 0


def test_the_limit_truncates():
    envs = envs_at(torch.ones(2, 2))
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


def test_resets_are_uniform_and_seeds_decide():
    envs, again = Pendulum(20_000, CPU), Pendulum(20_000, CPU)
    envs.reset(seed=3)
    obs, _ = again.reset(seed=3)
    assert torch.equal(envs.state, again.state) and torch.equal(obs, envs.observe(envs.state))
    for column, high in zip(envs.state.T, (math.pi, 1.0), strict=True):
        assert column.abs().max() <= high and abs(column.mean()) < 0.05 * high
        assert column.std().item() == pytest.approx(high / 3**0.5, rel=0.02)
    envs.lengths.fill_(199)
    noise = torch.empty(20_000, 2).uniform_(-1, 1)
    obs, *_ = envs.step(torch.zeros(20_000, 1), noise)
    assert torch.equal(obs, envs.observe(noise * torch.tensor([math.pi, 1.0])))
    for actions in (torch.zeros(7, 1), torch.zeros(20_000, 2)):
        with pytest.raises(RuntimeError):
            envs.step(actions)


def test_it_is_a_vector_environment(monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", gym.registry.copy())
    gym.register("PendulumTensors-v1", vector_entry_point=Pendulum)
    envs, one = (
        gym.make_vec("PendulumTensors-v1", num_envs=3, device="cpu"),
        gym.make("Pendulum-v1"),
    )
    assert envs.single_observation_space == one.observation_space
    assert envs.single_action_space == one.action_space
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP


# Parity


@SCRIPTS
def test_sampled_actions_are_normal_with_their_densities(module):
    torch.manual_seed(0)
    agent = module.PPO(module.Args(**SMALL), 3, 1, CPU)
    obs, noise = torch.randn(1000, 3), torch.randn(1000, 1)
    with torch.no_grad():
        agent.model.actor_logstd.fill_(-0.5)
        actions, log_probs, values = agent.act(obs, noise)
        normal = torch.distributions.Normal(agent.model.actor_mean(obs), math.exp(-0.5))
        assert torch.equal(values, agent.model.critic(obs).squeeze(-1))
    torch.testing.assert_close((actions - normal.mean) / normal.stddev, noise)
    torch.testing.assert_close(log_probs, normal.log_prob(actions).squeeze(1))


def make_pair(**flags):
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**SMALL), 3, 1, CPU)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    agent = variant.PPO(variant.Args(**SMALL, **flags), 3, 1, CPU)
    agent.load_state_dict(reference.state_dict())
    return reference, agent


def run_updates(reference, agent, count, tolerance):
    """`count` minibatch updates on both, then all metrics and parameters must agree."""
    obs = torch.randn(256, 3)
    actions, log_probs, values = reference.act(obs, torch.randn(256, 1))
    columns = obs, actions, log_probs, values, torch.randn(256), values + torch.randn(256)
    for _ in range(count):
        index = torch.randperm(256)[:64]
        found = agent.update(variant.Batch(*columns), index)
        expected = reference.update(baseline.Batch(*columns), index)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    states = agent.state_dict(), reference.state_dict()
    torch.testing.assert_close(*states, atol=tolerance, rtol=tolerance)


@COMPILED
def test_one_update_agrees(compiled):
    reference, agent = make_pair()
    if compiled:
        torch._dynamo.reset()
        variant.compile_agent(agent)
    run_updates(reference, agent, 1, 1e-5)


def test_a_hundred_updates_agree(float64):
    run_updates(*make_pair(), 100, 1e-9)


def test_a_wrong_update_is_noticed():
    for flag, value in (("clip_coef", 0.01), ("max_grad_norm", 0.1), ("ent_coef", 0.1)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_updates(reference, agent, 3, 1e-5)


def test_whole_runs_agree_and_resume():
    """Baseline, variant and compiled variant see the same episodes; only whole ones are logged."""
    flags, series = {"total_timesteps": 16 * 1024, "save_model": True}, []
    torch._dynamo.reset()
    expected = None
    for module, compiled in ((baseline, {}), (variant, {}), (variant, {"compile": True})):
        run_dir = train(module, **flags, **compiled, exp_name=f"{len(series)}")
        found = read_checkpoint(run_dir)["agent"]
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
        series.append(read_scalars(run_dir))
        episodes = series[-1]["charts/episodic_return"]
        assert [step for step, _ in episodes] == [14 * 1024, 15 * 1024, 16 * 1024]
        assert all(-1900 < value < -600 for _, value in episodes), episodes
        assert {value for _, value in series[-1]["charts/episodic_length"]} == {200}
    np.testing.assert_allclose(episodes, series[0]["charts/episodic_return"], rtol=1e-3)
    again = train(variant, **flags | {"total_timesteps": 18 * 1024}, resume=str(run_dir))
    assert again == run_dir and read_checkpoint(run_dir)["global_step"] == 18 * 1024
    with pytest.raises(SystemExit, match="nothing left to do"):
        train(variant, **flags | {"total_timesteps": 18 * 1024}, resume=str(run_dir))


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("command", [(baseline.SCRIPT,), (variant.SCRIPT, "--compile")], ids=str)
def test_pendulum_is_solved_on_gymnasiums_own(command, seed, tmp_path):
    """A random policy gets about -1,200, one that swings it up and holds it about -150."""
    run(tmp_path, *command, f"--seed={seed}", "--eval-every=3000000", "--eval-episodes=100")
    _, _, _, values = read_run(tmp_path)
    assert values["charts/episodic_return"][0][1] < -800, "not a task that starts unsolved"
    assert values["charts/eval_return"][-1][1] > -200
