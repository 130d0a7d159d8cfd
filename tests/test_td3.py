"""TD3: the noise of its actions, its losses and its steps.

What it shares with SAC is in test_off_policy; its variant is compared with it in test_parity.
"""

import gymnasium as gym
import pytest
import torch
from helpers import CPU, assert_critic_step, changed, to_numbers
from pairs import PAIRS

from leanrl import td3_continuous_action as baseline

pytestmark = pytest.mark.usefixtures("one_thread")
LOW, HIGH = torch.tensor([-1.0, 2.0]), torch.tensor([3.0, 2.5])  # neither centred nor of unit size


@pytest.fixture
def agent(float64):
    """With targets that are not the networks."""
    flags = {"policy_noise": 0.4, "noise_clip": 0.3, "gamma": 0.9, "learning_rate": 1e-3}
    agent = PAIRS["td3"].make(baseline, **flags)
    with torch.no_grad():
        for target in (*agent.actor_target.parameters(), *agent.qf_target.parameters()):
            target.add_(0.02 * torch.randn_like(target))
    return agent


@pytest.fixture
def batch(agent):
    batch, _ = PAIRS["td3"].draw(PAIRS["td3"], agent, CPU)
    return batch


def test_noise_counts_in_half_ranges_and_actions_stay_in_the_box():
    torch.manual_seed(0)
    space = gym.spaces.Box(LOW.numpy(), HIGH.numpy())
    agent = baseline.TD3(baseline.Args(exploration_noise=0.5), 3, space, CPU)
    obs, noise = torch.randn(50, 3), torch.randn(50, 2)
    half = (HIGH - LOW) / 2
    mean = LOW + half + half * agent.actor.network(obs).tanh()
    free = mean + half * noise
    assert (free < LOW).sum() > 5 and (free > HIGH).sum() > 5
    torch.testing.assert_close(agent.actor(obs), mean)
    torch.testing.assert_close(agent.actor.perturbed(obs, noise), free.maximum(LOW).minimum(HIGH))
    actions = agent.act(obs, 2 * noise)
    torch.testing.assert_close(actions, free.maximum(LOW).minimum(HIGH))
    assert not actions.requires_grad


def test_critic_step(agent, batch):
    """Algorithm 1 of the paper with a plain loop; Adam's first step is a rate long."""
    noise, losses = torch.randn_like(batch.actions), torch.zeros(2)
    smoothing = (0.4 * noise).clip(-0.3, 0.3)
    assert 0 < (smoothing.abs() == 0.3).double().mean() < 1
    for i, terminated in enumerate(batch.terminated):
        row = slice(i, i + 1)
        next_action = agent.actor_target.perturbed(batch.next_obs[row], smoothing[row])
        value = agent.qf_target(batch.next_obs[row], next_action).min()
        goal = batch.rewards[i] + (0.0 if terminated else 0.9 * value)
        losses += (agent.qf(batch.obs[row], batch.actions[row])[:, 0] - goal).square()
    assert_critic_step(agent, batch, noise, losses / len(noise))


def test_actor_step_is_for_the_first_network(agent, batch):
    first, second = agent.qf(batch.obs, agent.actor(batch.obs))
    assert (first > second).any() and (first < second).any()
    changes, metrics = changed(agent, agent.update_actor, batch.obs)
    assert to_numbers(metrics) == {"losses/actor_loss": pytest.approx(-first.mean().item())}
    assert changes == {"actor": pytest.approx(1e-3, rel=1e-3)}
    assert baseline.actor_loss(agent, batch.obs) < -first.mean()
