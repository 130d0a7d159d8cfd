"""SAC: how its actions are distributed, its losses and its steps.

What it shares with TD3 is in test_off_policy; its variant is compared with it in test_parity.
"""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, assert_critic_step, changed, to_numbers
from pairs import PAIRS, A

from leanrl import sac_continuous_action as baseline

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def agent(float64):
    """With a temperature of its own, and targets that are not the networks."""
    agent = PAIRS["sac"].make(baseline, gamma=0.9, policy_lr=1e-4, q_lr=1e-3)
    with torch.no_grad():
        agent.log_alpha.fill_(-0.7)
        for target in agent.qf_target.parameters():
            target.add_(0.1 * torch.randn_like(target))
    return agent


@pytest.fixture
def batch(agent):
    batch, *_ = PAIRS["sac"].draw(PAIRS["sac"], agent, CPU)
    return batch


def test_networks_have_two_hidden_layers():
    network, x = baseline.mlp(3, 2), torch.randn(5, 3)
    first, second, last = network[::2]
    assert first.weight.shape == (256, 3) and second.weight.shape == (256, 256)
    torch.testing.assert_close(network(x), last(second(first(x).relu()).relu()))


def test_log_probs_match_the_density(float64):
    """By change of variables, for a box neither centred nor of unit size."""
    torch.manual_seed(0)
    actor = baseline.Actor(4, gym.spaces.Box(np.float32([-1, 2]), np.float32([3, 2.5])))
    obs, noise = torch.randn(1000, 4), torch.randn(1000, 2)
    mean, log_std = actor.network(obs).chunk(2, dim=-1)
    std = (-5 + 7 * (log_std.tanh() + 1) / 2).exp()  # log_std between -5 and 2
    stretch = torch.distributions.AffineTransform(torch.tensor([1, 2.25]), torch.tensor([2, 0.25]))
    squash = [torch.distributions.TanhTransform(), stretch]
    normal = torch.distributions.Normal(mean, std)
    density = torch.distributions.TransformedDistribution(normal, squash)
    expected = stretch((mean + std * noise).tanh())
    actions, log_probs = actor.sample(obs, noise)
    torch.testing.assert_close(actions, expected)
    torch.testing.assert_close(log_probs, density.log_prob(expected).sum(dim=-1))


def test_log_probs_of_saturated_actions_are_finite():
    actor = baseline.Actor(4, gym.spaces.Box(-1, 1, (2,)))
    actions, log_probs = actor.sample(torch.full((3, 4), 1e3), torch.full((3, 2), 5.0))
    assert (actions.abs() == 1).any() and log_probs.isfinite().all()


def test_critic_step(agent, batch):
    """Equation 5 of the paper, doubled, with a plain loop; Adam's first step is a rate long."""
    noise, losses = torch.randn_like(batch.actions), torch.zeros(2)
    for i, terminated in enumerate(batch.terminated):
        row = slice(i, i + 1)
        next_action, log_prob = agent.actor.sample(batch.next_obs[row], noise[row])
        soft_value = agent.qf_target(batch.next_obs[row], next_action).min()
        soft_value = soft_value - math.exp(-0.7) * log_prob
        goal = batch.rewards[i] + (0.0 if terminated else 0.9 * soft_value)
        losses += (agent.qf(batch.obs[row], batch.actions[row])[:, 0] - goal).square()
    assert_critic_step(agent, batch, noise, losses / len(noise))


def test_actor_and_alpha_step(agent, batch):
    """Equations 9 and 18."""
    noise, alpha, losses, entropy = torch.randn_like(batch.actions), math.exp(-0.7), [], []
    for i in range(len(noise)):
        action, log_prob = agent.actor.sample(batch.obs[i : i + 1], noise[i : i + 1])
        value = agent.qf(batch.obs[i : i + 1], action).min()
        losses.append((alpha * log_prob - value).item())
        entropy.append(-log_prob.item())
    expected = {
        "losses/actor_loss": np.mean(losses),
        "losses/alpha_loss": alpha * (np.mean(entropy) + A),  # the goal is minus the dimensions
        "losses/alpha": alpha,  # that of the loss, before its step
        "losses/entropy": np.mean(entropy),
    }
    changes, metrics = changed(agent, agent.update_actor, batch.obs, noise)
    assert to_numbers(metrics) == pytest.approx(expected)
    assert changes == pytest.approx({"actor": 1e-4, "log_alpha": 1e-3}, rel=1e-3)


def test_the_temperature_begins_as_it_is_told():
    tuned, fixed = (PAIRS["sac"].make(baseline, autotune=x, alpha=0.3) for x in (True, False))
    assert tuned.log_alpha.item() == 0.0
    assert fixed.log_alpha.exp().item() == pytest.approx(0.3)
