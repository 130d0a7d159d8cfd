"""PQN for Atari, both scripts: returns, exploration, flags. `main` is watched in test_on_policy."""

import numpy as np
import pytest
import torch
from fake_games import A
from helpers import CPU
from pairs import images

envpool = pytest.importorskip("envpool", reason="needs requirements/envpool.txt")

from leanrl import pqn_atari_envpool as baseline  # noqa: E402
from leanrl import pqn_atari_envpool_torchcompile as variant  # noqa: E402

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
pytestmark = pytest.mark.usefixtures("one_thread")


def weighted_returns(rewards, next_values, ended, gamma, lam):
    """Mixtures of n-step returns, as the forward view defines them, in float64.

    With weight (1 - lambda) lambda^(n-1) the return of n steps, the rest of the weight for the
    longest one, which ends with the episode or the rollout.
    """
    found = np.zeros_like(rewards)
    for t, n in np.ndindex(rewards.shape):
        rest = 1.0
        total = 0.0
        for k in range(t, len(rewards)):
            total += gamma ** (k - t) * rewards[k, n]
            whole = total + gamma ** (k - t + 1) * next_values[k, n]
            if ended[k, n] or k == len(rewards) - 1:
                found[t, n] += rest * whole
                break
            found[t, n] += rest * (1 - lam) * whole
            rest *= lam
    return found


@SCRIPTS
@pytest.mark.parametrize("steps", [1, 2, 13, 128])
@pytest.mark.parametrize("lam", [0.0, 0.65, 1.0])
def test_returns_are_mixtures_of_all_lengths(module, steps, lam):
    """Episodes end in the middle, by a termination (worth 0 afterwards) or a limit."""
    rng = np.random.default_rng(steps)
    rewards, next_values = rng.normal(size=(2, steps, 3))
    ended = rng.random((steps, 3)) < 0.3
    next_values[ended & (rng.random((steps, 3)) < 0.5)] = 0
    ended = ended.astype(float)
    inputs = [torch.from_numpy(x) for x in (rewards, next_values, ended)]
    expected = weighted_returns(rewards, next_values, ended, 0.9, lam)
    np.testing.assert_allclose(module.lambda_returns(*inputs, 0.9, lam), expected)


@SCRIPTS
def test_exploration_decays(module):
    args = module.Args(num_envs=10, num_steps=4, total_timesteps=1000, exploration_fraction=0.1)
    expected = [[1 - 0.99 * share] for share in (0.5, 0.6, 0.7, 0.8)]
    torch.testing.assert_close(module.exploration(args, 40, CPU), torch.tensor(expected))
    assert module.exploration(args, 120, CPU).unique().tolist() == [pytest.approx(0.01)]


@SCRIPTS
def test_minibatches_may_be_single_steps(module):
    flags = {"num_envs": 2, "num_steps": 3, "num_minibatches": 6}
    assert module.Args(**flags).num_minibatches == 6
    with pytest.raises(ValueError, match="^--gamma and --q-lambda lie between"):
        module.Args(**flags, q_lambda=1.5)


def test_channels_stay_last():
    """No layer copies images to the other order: what a convolution gets and gives."""
    agent = variant.PQN(variant.Args(channels_last=True), A, CPU)
    seen = []
    for layer in agent.model.network:
        if not isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda _, args, out: seen.extend([args[0], out]))
    loss = agent.model(images(3, CPU)).sum()
    maps = [x for x in seen if x.dim() == 4]
    assert len(maps) == 2 * 9 + 1  # the last is what is flattened
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in maps)
    (gradient,) = torch.autograd.grad(loss, maps[2])
    assert gradient.is_contiguous(memory_format=torch.channels_last)
