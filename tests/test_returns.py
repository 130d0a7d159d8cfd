"""The changes of SAC that plots/measure/returns.py compares: each does what its source says."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import returns
import timed
import torch

from leanrl import sac_mujoco_worlds_torchcompile

GAMMA = 0.9


@pytest.fixture
def module(monkeypatch):
    """The script, which is whole again after the test."""
    script = sac_mujoco_worlds_torchcompile
    for name in ("mlp", "critic_loss", "actor_loss"):
        monkeypatch.setattr(script, name, getattr(script, name))
    for kind, names in {
        "ReplayBuffer": ["add"],
        "SAC": ["normalize", "scale"],
    }.items():
        found = getattr(script, kind)
        for name in names:
            monkeypatch.setattr(found, name, getattr(found, name))
    return script


def transitions(module, num_steps, num_envs):
    """Steps of environments whose episodes end: some by a real end, some by a limit of time."""
    generator = np.random.default_rng(1)
    steps = []
    obs = torch.tensor(generator.normal(size=(num_envs, 3))).float()
    for _ in range(num_steps):
        draw = generator.random(num_envs)
        terminated = torch.tensor(draw < 0.2)
        ended = torch.tensor(draw < 0.4)
        final_obs = torch.tensor(generator.normal(size=(num_envs, 3))).float()
        first_obs = torch.tensor(generator.normal(size=(num_envs, 3))).float()
        batch = module.Batch(
            obs=obs,
            actions=torch.zeros(num_envs, 1),
            next_obs=final_obs,
            rewards=torch.tensor(generator.normal(size=num_envs)).float(),
            terminated=terminated.float(),
        )
        steps.append((batch, ended))
        obs = first_obs.where(ended[:, None], final_obs)
    return steps


def test_three_steps_are_summed_to_the_end_of_an_episode(module):
    """Targets, as critic_loss makes them, are those of a loop over each environment."""
    stored = []
    module.ReplayBuffer.add = lambda self, batch: stored.append(batch)
    returns.sum_steps(3, module)
    buffer = SimpleNamespace(args=SimpleNamespace(gamma=GAMMA))
    steps = transitions(module, 40, 5)
    for batch, _ in steps:
        module.ReplayBuffer.add(buffer, batch)
    assert len(stored) == 38
    endings = set()
    for t, batch in enumerate(stored):
        values = batch.next_obs.sum(1)  # in the place of a Q-network
        targets = batch.rewards + GAMMA * (1 - batch.terminated) * values
        assert torch.equal(batch.obs, steps[t][0].obs)
        for i in range(5):
            expected = 0.0
            for k in range(3):
                one, ended = steps[t + k]
                expected += GAMMA**k * one.rewards[i].item()
                if ended[i] or k == 2:
                    value = one.next_obs[i].sum().item()
                    expected += GAMMA ** (k + 1) * (1 - one.terminated[i].item()) * value
                    endings.add((k, bool(ended[i]), bool(one.terminated[i])))
                    break
            assert targets[i].item() == pytest.approx(expected, abs=1e-5)
    assert len(endings) == 7, "each way to end at each step has come"


def agent_of(module, obs_dim=3, **flags):
    torch.manual_seed(1)
    args = module.Args(batch_size=8, num_envs=500, **flags)
    space = gym.spaces.Box(-np.ones(2, np.float32), np.ones(2, np.float32))
    seen = SimpleNamespace(shape=(obs_dim,))
    envs = SimpleNamespace(
        actor_dim=obs_dim, single_action_space=space, single_observation_space=seen
    )
    return module.SAC(args, envs, torch.device("cpu"))


def batch_of(module, agent):
    return module.Batch(
        obs=torch.randn(8, 3),
        actions=torch.rand(8, 2),
        next_obs=torch.randn(8, 3),
        rewards=torch.rand(8) / 100,
        terminated=(torch.arange(8) % 3 == 0).float(),
    )


def test_a_categorical_critic_keeps_the_mean_of_its_targets(module):
    """Minimizing its loss makes the expected value the classic target, where nothing is clipped."""
    returns.categorical_critic(module)
    agent = agent_of(module)
    batch = batch_of(module, agent)
    noise = torch.randn(8, 2)
    loss, values = module.critic_loss(agent, batch, noise, GAMMA)
    assert loss.shape == (2,) and values.shape == (2, 8)
    grid = torch.linspace(-5, 5, 101)
    with torch.no_grad():
        actions, log_probs = agent.actor.sample(batch.next_obs, noise)
        logits = agent.qf_target(batch.next_obs, actions)
        means = (logits.softmax(-1) * grid).sum(-1).amin(0)
        soft = means - agent.log_alpha.exp() * log_probs
        targets = batch.rewards + GAMMA * (1 - batch.terminated) * soft
    optimizer = torch.optim.Adam(agent.qf.parameters(), lr=3e-3)
    for _ in range(400):
        loss, values = module.critic_loss(agent, batch, noise, GAMMA)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    # atoms at the ends gather what lies beyond: little, with weights as they are drawn
    torch.testing.assert_close(values[0], targets, rtol=0, atol=0.15)
    loss, log_probs = module.actor_loss(agent, batch.obs, noise)
    assert loss.shape == () and log_probs.shape == (8,)


def test_the_critics_alone_are_normalized(module):
    returns.normalize_critics(module)
    agent = agent_of(module)
    kinds = [type(part) for part in agent.qf.modules()]
    assert kinds.count(torch.nn.LayerNorm) == 2  # one network stands for both
    assert torch.nn.LayerNorm not in [type(part) for part in agent.actor.modules()]


def test_layers_are_normalized_and_what_is_observed_raw(module):
    returns.normalize_layers(returns.RMSNorm, module)
    agent = agent_of(module)
    x = torch.randn(4, 256) * 7
    norm = returns.RMSNorm(256)
    torch.testing.assert_close(norm(x), torch.nn.RMSNorm(256, eps=1e-5)(x))
    assert sum(isinstance(part, returns.RMSNorm) for part in agent.actor.modules()) == 2
    observations = 3 + 5 * torch.randn(500, 3)
    agent.observe(observations, 9 * torch.rand(500), torch.zeros(500).bool())
    seen = []
    agent.actor.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    agent.act(observations, torch.zeros(500, 2))
    torch.testing.assert_close(seen[0].mean(0), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen[0].std(0), torch.ones(3), rtol=0, atol=1e-2)
    returns.take_raw_observations(module)
    agent.act(observations, torch.zeros(500, 2))
    assert torch.equal(seen[1], observations)
    assert agent.scale(torch.ones(1)) < 0.9 and agent.log_alpha < -4
    flags = returns.take_raw_rewards(module)
    assert agent.scale(torch.ones(1)) == 1 and agent_of(module, **flags).log_alpha == 0


def test_a_residual_block_adds_to_what_it_is_given(module):
    returns.add_blocks(module)
    first, *blocks, last = module.mlp(3, 2)
    x = torch.randn(4, 3)
    hidden = first(x)
    for block in blocks:
        assert torch.equal(block(hidden), hidden + block.layer(hidden.relu()))
        hidden = block(hidden)
    assert last(hidden).shape == (4, 2) and len(blocks) == 2


def test_the_table_is_of_the_last_evaluations(tmp_path):
    log = tmp_path / "log"
    bar = "x\n 0%| | 0/9 [00:00<?, ?step/s]"
    first = "after 1 min: 900 updates, return 5.0"
    log.write_text(f"{bar}{first}\nafter 2 min: 1800 updates, return -7.5\n")
    assert timed.read(log)["evaluations"] == [[1, 900, 5], [2, 1800, -7.5]]
    log.write_text("after no minute")
    with pytest.raises(ValueError, match="was not evaluated"):
        timed.read(log)
    runs = []
    for seed, reached in ((1, 100.0), (2, 300.0)):
        rows = [[1, 900, 5], [2, 1700, reached - 20], [3, 1800, reached + 20]]
        runs.append({"change": "3 steps", "task": "Walker2d-v5", "seed": seed, "evaluations": rows})
    table = returns.cells(returns.summarize(runs))
    assert table[1:] == [["3 steps", "-", "-", "200 (100 to 300)", "1,800", "-", "-"]]
