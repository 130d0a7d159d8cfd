"""The replay buffers of SAC, alone and on worlds; TD3 has the same as SAC (test_shared)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import CPU

from leanrl import sac_continuous_action as baseline
from leanrl import sac_continuous_action_torchcompile as variant
from leanrl import sac_mujoco_worlds as worlds
from leanrl import sac_mujoco_worlds_torchcompile as worlds_variant

OBS, A = 17, 6
MODULES = [baseline, variant, worlds, worlds_variant]
IDS = ["baseline", "variant", "worlds", "worlds variant"]
SCRIPTS = pytest.mark.parametrize("module", MODULES, ids=IDS)


def make_buffer(module, device=CPU, **flags):
    return module.ReplayBuffer(module.Args(**flags), OBS, A, device)


def transitions(count, num_envs, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield baseline.Batch(
            obs=rng.normal(size=(num_envs, OBS)),
            actions=rng.uniform(-1, 1, size=(num_envs, A)).astype(np.float32),
            next_obs=rng.normal(size=(num_envs, OBS)),
            rewards=rng.normal(size=num_envs),
            terminated=rng.random(num_envs) < 0.2,
        )


def put(rb, step):
    """Worlds give tensors, Gymnasium's environments arrays."""
    if "worlds" in type(rb).__module__:
        step = step._make([torch.tensor(np.float32(part)) for part in step])
    rb.add(step)


@pytest.fixture(params=MODULES, ids=IDS)
def wrapped(request):
    """A ring of 48 rows into which 60 transitions were put -> (ring, {reward: transition})."""
    rb = make_buffer(request.param, buffer_size=50, num_envs=4, batch_size=48)
    stored = {}
    for i, step in enumerate(transitions(15, 4)):
        put(rb, step)
        for n in range(4):
            stored[(i * 4 + n) % 48] = [np.float32(part[n]) for part in step]
    return rb, {float(parts[3]): parts for parts in stored.values()}


def copy_of(rb, **flags):
    copy = type(rb)(replace(rb.args, **flags), OBS, A, CPU)
    copy.load_state_dict(rb.state_dict())
    return copy


def test_samples_are_what_was_stored(wrapped):
    rb, stored = wrapped
    seen = set()
    for _ in range(50):
        batch = rb.sample()
        for row in range(48):
            expected = stored[batch.rewards[row].item()]  # KeyError: overwritten or never stored
            for part, value in zip(batch, expected, strict=True):
                np.testing.assert_array_equal(part[row].numpy(), value)
            seen.add(batch.rewards[row].item())
    assert len(seen) == 48


def test_a_copy_goes_on_alike(wrapped):
    rb, _ = wrapped
    other = copy_of(rb)
    for step in transitions(3, 4, seed=1):
        put(rb, step)
        put(other, step)
    torch.manual_seed(0)
    expected = rb.sample().obs.clone()
    torch.manual_seed(0)
    assert torch.equal(other.sample().obs, expected)


@SCRIPTS
def test_a_copy_knows_how_much_is_filled(module):
    steps = list(transitions(3, 4))
    rb = make_buffer(module, buffer_size=50, num_envs=4, batch_size=1000)
    for step in steps:
        put(rb, step)
    known = {float(np.float32(reward)) for step in steps for reward in step.rewards}
    assert set(copy_of(rb).sample().rewards.tolist()) == known


@pytest.mark.parametrize("buffer_size", [44, 52])
def test_a_ring_of_another_length_is_refused(wrapped, buffer_size):
    """It would lose transitions or mix them up."""
    with pytest.raises(ValueError, match="^--buffer-size: the checkpoint has 48$"):
        copy_of(wrapped[0], buffer_size=buffer_size)


@SCRIPTS
def test_samples_are_uniform_while_it_grows(module):
    """The size must not freeze at the first draw."""
    torch.manual_seed(0)
    rb = make_buffer(module, buffer_size=1000, num_envs=1)
    for number, step in enumerate(transitions(40, 1)):
        put(rb, step._replace(rewards=np.array([number])))
        if number + 1 in (10, 40):
            drawn = torch.cat([rb.sample().rewards.clone() for _ in range(100)])
            counts = torch.bincount(drawn.long(), minlength=number + 1)
            expected = len(drawn) / (number + 1)
            assert ((counts - expected).abs() < 6 * expected**0.5).all(), counts


@SCRIPTS
def test_memory_is_that_of_the_transitions(module):
    """1 M transitions of HalfCheetah: at most 170 MB, float32, no second copy."""
    storages = {}
    for value in vars(make_buffer(module)).values():
        for tensor in value if isinstance(value, tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert 4 * 42 * 1_000_000 <= sum(storages.values()) <= 170e6


@pytest.mark.gpu
def test_graphed_draws_differ_and_cover_a_growing_buffer():
    from tensordict.nn import CudaGraphModule

    rb = make_buffer(variant, torch.device("cuda"), buffer_size=1000)
    rb.draw = CudaGraphModule(rb.draw, warmup=3)
    batches = []
    for i, step in enumerate(transitions(500, 1)):
        rb.add(step._replace(rewards=np.array([float(i)])))
        batches.append(rb.sample().rewards.clone())
    drawn = torch.stack(batches[100:])
    assert not torch.equal(drawn[-1], drawn[-2])
    assert drawn[-1].max() > 400, "the size froze at capture"
    share = drawn / torch.arange(101, 501, device="cuda")[:, None]
    assert abs(share.mean().item() - 0.5) < 0.01
