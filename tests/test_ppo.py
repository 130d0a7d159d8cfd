"""PPO for continuous actions: its mathematics and its environments.

Its loop and its updates are in test_on_policy; its variant is compared with it in test_parity.
"""

import functools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from envs_for_workers import Ending
from helpers import CPU, assert_orthogonal, to_numbers

from leanrl import ppo_continuous_action as baseline
from leanrl import ppo_continuous_action_torchcompile as variant

OBS, A = 5, 3
pytestmark = pytest.mark.usefixtures("one_thread")

# Mathematics


@pytest.mark.parametrize("module", [baseline, variant], ids=["loop", "scan"])
@pytest.mark.parametrize("steps", [1, 2, 5, 64, 100])
def test_advantages_match_a_loop(module, steps):
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, steps, 4))
    ended = rng.random((steps, 4)) < 0.2
    expected = np.zeros((steps + 1, 4))
    for t in reversed(range(steps)):
        delta = rewards[t] + 0.97 * next_values[t] - values[t]
        expected[t] = delta + 0.97 * 0.9 * ~ended[t] * expected[t + 1]
    inputs = [torch.tensor(x).float() for x in (rewards, values, next_values, ended)]
    found = module.compute_gae(*inputs, 0.97, 0.9)
    np.testing.assert_allclose(found, expected[:-1], atol=1e-5)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "plain"])
def test_losses(whole, float64):
    """Equations 7 and 9 of the paper; the value is clipped as in CleanRL, if it is."""
    torch.manual_seed(0)
    mean, actions = torch.randn(2, 64, A)
    log_std, (values, old, returns, advantages, noise) = torch.randn(A), torch.randn(5, 64)
    policy = torch.distributions.Normal(mean, log_std.exp())
    log_ratios = 0.2 * noise
    batch = baseline.Batch(
        obs=mean,
        actions=actions,
        log_probs=policy.log_prob(actions).sum(dim=1) - log_ratios,
        values=old,
        advantages=advantages,
        returns=returns,
    )
    flags = {"clip_coef": 0.1, "ent_coef": 0.03, "vf_coef": 0.7}
    args = baseline.Args(**flags, norm_adv=whole, clip_vloss=whole)
    loss, metrics = baseline.ppo_loss(lambda obs: (mean, log_std, values), batch, args)

    ratios, errors = log_ratios.exp(), (values - returns).square()
    if whole:
        advantages = (advantages - advantages.mean()) / advantages.std()
        moved = old + (values - old).clip(-0.1, 0.1)
        errors = errors.maximum((moved - returns).square())
    objectives = (ratios * advantages).minimum(ratios.clip(0.9, 1.1) * advantages)
    expected = {
        "losses/policy_loss": -objectives.mean(),
        "losses/value_loss": errors.mean() / 2,
        "losses/entropy": policy.entropy()[0].sum(),
        "losses/old_approx_kl": -log_ratios.mean(),
        "losses/approx_kl": (ratios - 1 - log_ratios).mean(),
        "losses/clipfrac": ((ratios - 1).abs() > 0.1).double().mean(),
    }
    assert to_numbers(metrics) == pytest.approx(to_numbers(expected))
    of_policy, of_value, entropy, *_ = expected.values()
    torch.testing.assert_close(loss, of_policy - 0.03 * entropy + 0.7 * of_value)


def test_weights_are_orthogonal_at_first():
    """By sqrt 2 in hidden layers, 0.01 in the policy's last layer and 1 in the value's."""
    model = baseline.PPO(baseline.Args(), OBS, A, CPU).model
    for network, gain in ((model.actor_mean, 0.01), (model.critic, 1.0)):
        first, second, last = network[::2]
        assert first.out_features == second.out_features == 64
        assert_orthogonal(first, math.sqrt(2))
        assert_orthogonal(second, math.sqrt(2))
        assert_orthogonal(last, gain)
    assert model.actor_logstd.tolist() == [0.0] * A


# Environments


class Leaping(Ending):
    """The last step leads far away."""

    left = 301

    def step(self, action):
        obs, reward, *others = super().step(action)
        self.left -= 1
        return (obs, reward, *others) if self.left else (obs + 1e6, reward - 1e6, False, False, {})


gym.register("Leaping-v0", entry_point=Leaping)


@functools.cache
def play(module) -> list:
    """What 300 steps of 3 environments return; after 150 their statistics are put back."""
    envs, actions = module.make_envs("Leaping-v0", 3, gamma=0.97), np.full((3, A), 2.0, np.float32)
    found = [envs.reset(seed=1)[0]]
    for step in range(300):
        if step == 150:
            kept = module.get_statistics(envs)
            envs.step(actions)
            module.set_statistics(envs, kept)
        *columns, infos = envs.step(actions)
        found += columns
        for i in np.flatnonzero(columns[2] | columns[3]):
            episode = infos["final_info"]["episode"]
            found += [infos["final_obs"][i], episode["r"][i], episode["l"][i]]
    return found


def test_the_variants_environments_are_those_of_gymnasiums_wrappers():
    assert len(play(baseline)) > 1201 + 3 * 100
    for found, expected in zip(play(variant), play(baseline), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_what_is_far_off_is_clipped_to_ten_deviations():
    obs, rewards, *_ = play(baseline)[-4:]
    assert np.abs(play(baseline)[0]).max() < 5
    assert (obs == 10).all() and (rewards == -10).all()


# Against another implementation


def test_iteration_is_that_of_stable_baselines3():
    """Advantages, 2 epochs of 4 minibatches: equal parameters after, where the settings coincide.

    Its coefficient of the value loss has no half in it, and the value is not clipped. It bootstraps
    at a truncation by adding the discounted value of the final observation to the reward.
    """
    sb3 = pytest.importorskip("stable_baselines3")
    torch.manual_seed(0)
    args = baseline.Args(
        num_steps=64, num_minibatches=4, update_epochs=2, ent_coef=0.01, clip_vloss=False
    )
    theirs = sb3.PPO(
        "MlpPolicy", "Pendulum-v1", n_steps=64, batch_size=16, n_epochs=2, ent_coef=0.01,
        vf_coef=0.5 * args.vf_coef, learning_rate=args.learning_rate, device="cpu",
    )  # fmt: skip
    theirs.set_logger(sb3.common.logger.Logger(None, []))
    mine = baseline.PPO(args, 3, 1, CPU)
    policy = theirs.policy
    layers = (
        *(policy.mlp_extractor.value_net[i] for i in (0, 2)), policy.value_net,
        *(policy.mlp_extractor.policy_net[i] for i in (0, 2)), policy.action_net,
    )  # fmt: skip
    counterparts = [policy.log_std, *(p for layer in layers for p in layer.parameters())]
    parameters = list(zip(mine.parameters(), counterparts, strict=True))
    for parameter, counterpart in parameters:
        parameter.data.add_(0.2 * torch.randn_like(parameter))
        counterpart.data.copy_(parameter)
    initial = [parameter.detach().clone() for parameter, _ in parameters]

    generator = np.random.default_rng(0)
    obs, actions = generator.normal(size=(2, 65, 1, 3)).astype(np.float32)
    actions, rewards = torch.tensor(actions[:64, :, :1]), generator.normal(size=(64, 1))
    terminated, truncated = generator.random((2, 64, 1)) < 0.1
    finals = np.where(truncated & ~terminated, generator.normal(size=(64, 1)), 0)
    rollout = baseline.Rollout(args, 3, 1, CPU)
    rollout.obs.copy_(torch.tensor(obs[:64]))
    rollout.actions.copy_(actions)
    with torch.no_grad():
        mean, log_std, values = mine.model(torch.tensor(obs))
        # of a policy that has moved since, so that ratios are clipped
        log_probs = baseline.gaussian_log_prob(actions, mean[:64] + 0.3, log_std)
    for name, value in (
        ("log_probs", log_probs), ("values", values[:64]), ("rewards", rewards),
        ("ended", terminated | truncated), ("final_values", finals),
    ):  # fmt: skip
        getattr(rollout, name).copy_(torch.as_tensor(value))
    ended = terminated | truncated
    for t in range(64):
        started = ended[t - 1] if t else np.ones(1)
        reward = rewards[t] + args.gamma * finals[t]
        theirs.rollout_buffer.add(
            obs[t], actions[t].numpy(), reward, started, values[t], log_probs[t]
        )
    theirs.rollout_buffer.compute_returns_and_advantage(values[64], ended[63])

    batch = mine.prepare(rollout, values[64])
    advantages = theirs.rollout_buffer.advantages.ravel()
    np.testing.assert_allclose(batch.advantages, advantages, atol=1e-5)
    np.random.seed(0)
    orders = [np.random.permutation(64) for _ in range(2)]
    epochs = [mine.learn(batch, torch.tensor(order)) for order in orders]
    clipfracs = torch.cat([metrics["losses/clipfrac"] for metrics in epochs])
    assert clipfracs.shape == (8,)
    np.random.seed(0)
    theirs.train()
    assert 0.05 < clipfracs.mean() < 0.95, "clipping is not part of the comparison"
    for (parameter, counterpart), before in zip(parameters, initial, strict=True):
        torch.testing.assert_close(parameter, counterpart, atol=1e-6, rtol=0)
        assert (parameter - before).abs().mean() > 1e-4
