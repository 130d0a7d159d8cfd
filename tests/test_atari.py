"""Atari: the games as the scripts see them, networks, and the losses of a categorical policy.

What `main` does with them is in test_on_policy.
"""

import functools
import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_games import A
from helpers import CPU, assert_orthogonal
from pairs import PAIRS, images

envpool = pytest.importorskip("envpool", reason="needs requirements/envpool.txt")

from leanrl import ppo_atari_envpool as baseline  # noqa: E402
from leanrl import ppo_atari_envpool_torchcompile as variant  # noqa: E402
from leanrl import pqn_atari_envpool as pqn  # noqa: E402
from leanrl import pqn_atari_envpool_torchcompile as pqn_variant  # noqa: E402

TRAINING = {"episodic_life": True, "reward_clip": True}
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
pytestmark = pytest.mark.usefixtures("one_thread")

# The environments of the scripts, the same to the letter


def test_games_reset_in_their_last_step():
    """Against EnvPool itself, one game at a time, reset in the step after: game i has seed + i."""
    options = TRAINING | {"max_episode_steps": 150}
    envs = baseline.AtariEnvs("Breakout-v5", 4, 1, **options)
    make = functools.partial(envpool.make_gymnasium, "Breakout-v5", num_envs=1, **options)
    pools = [make(seed=1 + i) for i in range(4)]
    rng, scores, lengths, kinds = np.random.default_rng(0), np.zeros(4), np.zeros(4), Counter()
    expected = np.concatenate([pool.reset()[0] for pool in pools])
    np.testing.assert_array_equal(envs.pool.reset()[0], expected)
    for _ in range(220):
        actions, games = rng.integers(0, A, 4), []
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for i, pool in enumerate(pools):
            last, reward, done, limit, info = pool.step(actions[i : i + 1])
            assert (reward, done, limit) == (rewards[i], terminated[i], truncated[i])
            np.testing.assert_array_equal(infos["final_obs"][i], last[0])
            if done or limit:
                last = pool.step(np.full(1, 3))[0]  # whatever the action is
            np.testing.assert_array_equal(obs[i], last[0])
            scores[i], lengths[i] = scores[i] + info["reward"][0], lengths[i] + 1
            if info["terminated"][0] or limit:
                games.append((scores[i], lengths[i]))
                scores[i] = lengths[i] = 0
            kinds.update(lives=int(done[0]), limits=int(limit[0]))
        assert infos["games"] == games
    assert kinds["limits"] > 1 and kinds["lives"] > 15


def test_games_have_the_settings_of_cleanrl():
    """As EnvPool has understood them, of which most are its own defaults."""
    expected = {"task": "breakout", "num_envs": 4, "seed": 1, "episodic_life": True}
    expected |= {"reward_clip": True, "noop_max": 30, "frame_skip": 4, "stack_num": 4}
    expected |= {"gray_scale": True, "img_height": 84, "img_width": 84, "use_fire_reset": True}
    expected |= {"repeat_action_probability": 0.0, "full_action_space": False}
    expected |= {"max_episode_steps": 108_000 // 4, "zero_discount_on_life_loss": False}
    config = baseline.AtariEnvs("Breakout-v5", 4, 1, **TRAINING).pool.config
    assert {name: config[name] for name in expected} == expected


# Mathematics


def features(network, obs) -> torch.Tensor:
    """Mnih's network, layer by layer, from pixels between 0 and 1; maybe with normalized layers."""
    x = (obs.double() / 255).float()
    layers = [layer for layer in network if len(list(layer.parameters()))]
    per_stage = len(layers) // 4
    for i, stride in enumerate((4, 2, 1, None)):
        layer, *norms = layers[per_stage * i : per_stage * (i + 1)]
        if stride:
            x = F.conv2d(x, layer.weight, layer.bias, stride)
        else:
            x = F.linear(x.flatten(1), layer.weight, layer.bias)
        for norm in norms:
            x = F.layer_norm(x, x.shape[1:], norm.weight, norm.bias)
        x = x.relu()
    return x


@pytest.mark.parametrize("module, flags", [(baseline, ()), (variant, (False, False))])
def test_images_become_probabilities_and_values(module, flags):
    torch.manual_seed(0)
    obs, model = images(3, CPU), module.ActorCritic(A, *flags)
    with torch.no_grad():
        x = features(model.network, obs)
        logits = F.linear(x, model.actor.weight, model.actor.bias)
        expected = logits - logits.exp().sum(dim=1, keepdim=True).log()
        log_policy, values = model(obs)
        torch.testing.assert_close(log_policy, expected)
        torch.testing.assert_close(values, F.linear(x, model.critic.weight)[:, 0])
    assert x.shape == (3, 512) and values.abs().max() > 0.01
    hidden = [layer for layer in model.network if len(list(layer.parameters()))]
    gains = [math.sqrt(2)] * 4 + [0.01, 1]
    for layer, gain in zip([*hidden, model.actor, model.critic], gains, strict=True):
        assert_orthogonal(layer, gain)


@pytest.mark.parametrize("module, flags", [(pqn, ()), (pqn_variant, (False, False))])
def test_images_become_q_values(module, flags):
    """Each layer is normalized, then rectified."""
    torch.manual_seed(0)
    obs, model = images(3, CPU), module.QNetwork(A, *flags)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        expected = F.linear(features(model.network, obs), model.head.weight, model.head.bias)
        torch.testing.assert_close(model(obs), expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.1


@pytest.mark.parametrize(
    ("name", "heads"), [("ppo_atari", ("actor", "critic")), ("pqn_atari", ("head",))]
)
def test_bfloat16_ends_before_the_heads(name, heads):
    """Within what 8 bits of precision leave, and not exact: the flag does something."""
    reference, agent = PAIRS[name].make_both(bf16=True, channels_last=True)
    seen, obs = [], images(2, CPU)
    for head in heads:
        layer = getattr(agent.model, head)
        layer.register_forward_hook(lambda _, args, output: seen.extend([args[0], output]))
    torch.testing.assert_close(agent.model(obs), reference.model(obs), atol=0.05, rtol=0.05)
    assert [x.dtype for x in seen] == [torch.float32] * 2 * len(heads)
    assert not torch.equal(agent.value(obs), reference.value(obs))


@pytest.mark.parametrize(
    ("clip_vloss", "norm_adv", "scale"), [(True, True, 1), (False, True, 1e-4), (True, False, 1)]
)
def test_losses_match_the_paper(clip_vloss, norm_adv, scale):
    """Advantages are also so small that what is added to their deviation counts."""
    torch.manual_seed(0)
    args = baseline.Args(ent_coef=0.03, vf_coef=0.7, clip_vloss=clip_vloss, norm_adv=norm_adv)
    logits, values, returns, advantages = torch.randn(6, A), *torch.randn(3, 6)
    batch = baseline.Batch(
        obs=logits,
        actions=torch.randint(0, A, (6,)),
        log_probs=-math.log(A) + 0.1 * torch.randn(6),
        values=values + 0.5 * torch.randn(6),
        advantages=scale * advantages,
        returns=returns,
    )
    loss, metrics = baseline.ppo_loss(lambda obs: (obs.log_softmax(1), values), batch, args)
    columns = logits, values, *batch[1:]
    logits, new, actions, log_probs, old, advantages, goals = (x.double().numpy() for x in columns)
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    policy = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    ratios = policy[np.arange(6), actions.astype(int)] / np.exp(log_probs)
    objectives = np.minimum(ratios * advantages, ratios.clip(0.9, 1.1) * advantages)
    errors = (new - goals) ** 2
    if clip_vloss:
        errors = np.maximum(errors, (old + (new - old).clip(-0.1, 0.1) - goals) ** 2)
    expected = {
        "losses/policy_loss": -objectives.mean(),
        "losses/value_loss": errors.mean() / 2,
        "losses/entropy": -(policy * np.log(policy)).sum(axis=1).mean(),
        "losses/old_approx_kl": -np.log(ratios).mean(),
        "losses/approx_kl": (ratios - 1 - np.log(ratios)).mean(),
        "losses/clipfrac": (abs(ratios - 1) > 0.1).mean(),
    }
    found = {tag: x.item() for tag, x in metrics.items()}
    assert found == {tag: pytest.approx(x, rel=1e-4) for tag, x in expected.items()}
    assert 0 < found["losses/clipfrac"] < 1
    policy_loss, value_loss, entropy, *_ = expected.values()
    assert loss.item() == pytest.approx(policy_loss - 0.03 * entropy + 0.7 * value_loss, rel=1e-5)
