"""PPO on CartPole as tensors: the environment against Gymnasium's, networks, evaluation.

What `main` does is in test_on_policy; losses and advantages are tested in test_ppo and test_atari,
which have them to the letter (test_shared).
"""

import inspect
import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, assert_orthogonal, evaluation_seeds
from pairs import PAIRS

from leanrl import ppo_cartpole_gpu as baseline
from leanrl import ppo_cartpole_gpu_torchcompile as variant

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
FORMS = pytest.mark.parametrize("make", [baseline.CartPole])  # other tests call these with theirs
pytestmark = pytest.mark.usefixtures("one_thread")

# The environment


@FORMS
def test_a_step_is_gymnasiums(make):
    """Same states and actions: next states within 1e-6, the same ends, the same rewards."""
    rng, count = np.random.default_rng(0), 2000
    beyond = [2.5, 3, 0.22, 3.5]  # some are about to leave the track or to fall, or already out
    states = rng.uniform(np.negative(beyond), beyond, (count, 4)).astype(np.float32)
    actions = rng.integers(0, 2, count)
    envs = make(count, CPU)
    envs.reset(seed=1)
    envs.state.copy_(torch.from_numpy(states))
    obs, rewards, terminated, truncated, infos = envs.step(torch.from_numpy(actions))
    env = gym.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    for i in range(count):
        env.state, env.steps_beyond_terminated = states[i].astype(np.float64), None
        expected, _, ended, _, _ = env.step(int(actions[i]))
        np.testing.assert_allclose(infos["final_obs"][i], expected, atol=1e-6, rtol=1e-6)
        limits = abs(abs(expected[0]) - 2.4), abs(abs(expected[2]) - 12 * math.pi / 180)
        assert terminated[i] == ended or min(limits) < 1e-6  # where rounding decides
    assert rewards.eq(1).all() and not truncated.any()
    assert torch.equal(obs[~terminated], infos["final_obs"][~terminated])
    assert obs[terminated].abs().max() <= 0.05
    assert 200 < terminated.sum() < 1800


@FORMS
@pytest.mark.parametrize("falls", [False, True], ids=["stands", "falls"])
def test_the_limit_truncates_whether_the_pole_stands_or_falls(make, falls):
    envs = make(2, CPU)
    envs.reset(seed=1)
    envs.lengths.copy_(torch.tensor([499, 498]))
    envs.state.zero_()
    envs.state[:, 2] = 0.25 if falls else 0.0
    obs, _, terminated, truncated, infos = envs.step(torch.tensor([0, 1]))
    assert truncated.tolist() == [True, False] and terminated.tolist() == [falls, falls]
    assert infos["_final_obs"].tolist() == infos["_episode"].tolist() == [True, falls]
    assert infos["episode"]["l"].tolist() == infos["episode"]["r"].tolist() == [500, 499]
    assert envs.lengths.tolist() == [0, 0 if falls else 499]
    assert (obs[0] != infos["final_obs"][0]).any() and torch.equal(obs, envs.state)


@FORMS
def test_resets_are_uniform_and_independent(make):
    """Of `reset` and of ended episodes: each variable by Kolmogorov-Smirnov, and correlations."""
    torch.manual_seed(0)
    count = 20_000
    envs = make(count, CPU)
    started, _ = envs.reset(seed=1)
    draws = [started]
    for _ in range(2):
        envs.state[:, 0] = 3.0  # off the track: all end
        draws.append(envs.step(torch.zeros(count, dtype=torch.int64))[0])
    columns = torch.cat(draws, dim=1).numpy().T  # 12 variables, those of later steps included
    ranks = (np.arange(count) + 0.5) / count
    distances = np.abs((np.sort(columns) + 0.05) / 0.1 - ranks)
    assert distances.max() < 1.95 / math.sqrt(count)  # p = 0.001
    correlations = np.corrcoef(columns) - np.eye(12)
    neighbours = np.corrcoef(draws[1][:-1, 0], draws[1][1:, 0])[0, 1]
    assert max(np.abs(correlations).max(), abs(neighbours)) < 4.5 / math.sqrt(count)


@FORMS
def test_actions_of_another_count_are_refused(make):
    envs = make(3, CPU)
    envs.reset(seed=1)
    with pytest.raises(RuntimeError):
        envs.step(torch.zeros(2, dtype=torch.int64))


def test_seeds_decide():
    """`reset` has a seed, or torch's generator; graphs go on with the tensors they know."""
    envs = baseline.CartPole(20, CPU)
    state, lengths = envs.state, envs.lengths
    first, _ = envs.reset(seed=1)
    envs.step(torch.zeros(20, dtype=torch.int64))
    again, _ = envs.reset(seed=1)
    assert torch.equal(again, first) and not lengths.any()
    assert not torch.equal(envs.reset(seed=2)[0], first)
    assert not torch.equal(envs.reset()[0], envs.reset()[0])
    assert envs.state is state and envs.lengths is lengths


def test_it_is_a_vector_environment(registry):
    """The same in both scripts; Gymnasium makes it by name, with the spaces of its own."""
    assert inspect.getsource(baseline.CartPole) == inspect.getsource(variant.CartPole)
    gym.register("CartPoleTensors-v1", vector_entry_point=baseline.CartPole)
    envs = gym.make_vec("CartPoleTensors-v1", 3, device="cpu")
    theirs = gym.make_vec("CartPole-v1", 3)
    assert isinstance(envs, gym.vector.VectorEnv) and envs.num_envs == 3
    for name in ("single_observation_space", "observation_space"):
        np.testing.assert_allclose(getattr(envs, name).high, getattr(theirs, name).high)
    assert envs.single_action_space == theirs.single_action_space
    assert envs.observation_space.contains(envs.reset(seed=1)[0].numpy())


# Networks and pieces of a minibatch


@SCRIPTS
def test_networks_are_two_layers_of_tanh(module):
    torch.manual_seed(0)
    model, obs, found = module.ActorCritic(4, 2), torch.randn(5, 4), []
    for network, gain in ((model.actor, 0.01), (model.critic, 1.0)):
        first, second, last = network[0::2]
        for layer, scale in ((first, 2**0.5), (second, 2**0.5), (last, gain)):
            assert_orthogonal(layer, scale)
        found.append(((obs @ first.weight.T).tanh() @ second.weight.T).tanh() @ last.weight.T)
    logits, values = found
    expected = logits - logits.exp().sum(dim=1, keepdim=True).log(), values[:, 0]
    torch.testing.assert_close(model(obs), expected)


def test_pieces_are_equal_and_fit(monkeypatch):
    """As many as a minibatch can be cut into."""
    monkeypatch.setattr(variant, "CACHED_ROWS", 4)
    agent = variant.PPO(variant.Args(), 4, 2, CPU)
    column = torch.arange(64.0)
    batch = variant.Batch._make(column for _ in variant.Batch._fields)
    for rows, pieces in ((3, 1), (8, 2), (14, 2), (15, 3), (37, 1)):
        found = agent.gather(batch, torch.arange(rows))
        assert len(found) == pieces
        assert torch.equal(torch.cat([piece.obs for piece in found]), column[:rows])


def test_pieces_make_one_update(float64, monkeypatch):
    """Advantages are normalized over all of them."""
    pair = PAIRS["ppo_cartpole"]
    whole, cut = (pair.make(variant) for _ in range(2))
    inputs = pair.draw(pair, whole, CPU)
    expected = whole.update(*inputs)
    monkeypatch.setattr(variant, "CACHED_ROWS", 16)
    torch.testing.assert_close(cut.update(*inputs), expected)
    torch.testing.assert_close(cut.state_dict(), whole.state_dict())


# Evaluation


def test_evaluation_takes_the_likeliest_action():
    """On Gymnasium's own: whole episodes, however many steps others go on, until the limit."""
    agent = baseline.PPO(baseline.Args(eval_episodes=6), 4, 2, CPU)
    balance = torch.tensor([-0.15, 0.0, 1.0, 0.3])  # holds the pole, not always for long
    agent.model.forward = lambda obs: (torch.stack([0 * obs[:, 0], obs @ balance], dim=1), None)
    returns = []
    for seed in evaluation_seeds(1, 6):
        env, ended = gym.make("CartPole-v1"), False
        obs, _ = env.reset(seed=seed)
        returns.append(0.0)
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(int(obs @ balance.numpy() > 0))
            returns[-1], ended = returns[-1] + reward, terminated or truncated
    assert baseline.evaluate(agent, agent.args, Path("unused")) == np.mean(returns)
    assert min(returns) < 300 and max(returns) == 500, returns
