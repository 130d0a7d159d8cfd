"""CartPole with more work in a step: one motion in all arms, and what its report says."""

import env_work
import gymnasium as gym
import numpy as np
import pytest
import torch
from env_kernel import KernelCartPole
from helpers import CPU


@pytest.mark.parametrize("work", [1, 5])
def test_all_arms_move_alike(work):
    """Tensors, the kernel and Gymnasium's environment from the same states until all have ended."""
    torch.manual_seed(0)
    count = 7
    tensors = env_work.FineCartPole(count, CPU, work)
    kernel = KernelCartPole(count, CPU, substeps=work)
    tensors.reset(seed=1)
    kernel.reset(seed=1)
    tensors.state.mul_(4)
    kernel.state.copy_(tensors.state)
    single = [gym.make(env_work.ENV_ID, work=work).unwrapped for _ in range(count)]
    for env, state in zip(single, tensors.state.tolist(), strict=True):
        env.reset(seed=1)
        env.state = np.array(state)
    ended = torch.zeros(count, dtype=bool)
    for _ in range(60):
        actions = torch.ones(count, dtype=torch.int64)
        found = [envs.step(actions) for envs in (tensors, kernel)]
        for i in np.flatnonzero(~ended):
            obs, _, terminated, _, _ = single[i].step(1)
            for _, _, terminations, _, infos in found:
                assert bool(terminations[i]) == terminated
                tolerance = 0.5 if terminated else 1e-4  # where it ends, the rest is left out
                np.testing.assert_allclose(infos["final_obs"][i], obs, atol=tolerance)
        ended |= found[0][2]
        kernel.state.copy_(tensors.state)
    assert ended.all()


def test_growth_and_turning_points_by_hand():
    """a + b N seconds, a = 1e-4, b = 1e-6 for 1 substep, 16e-6 for 16: a / b is 100 and 6."""
    rows = []
    for work in (1, 16):
        for n in (1, 64, 4096):
            seconds = 1e-4 + work * 1e-6 * n
            rows.append({"arm": "tensors, CPU", "work": work, "num_envs": n, "seconds": [seconds]})
    assert env_work.growth(rows, "tensors, CPU", 1) == pytest.approx(
        np.log((1e-4 + 16e-6) / (1e-4 + 1e-6)) / np.log(16)
    )
    assert env_work.growth(rows[:3], "tensors, CPU", 1) is None
    record = {"rows": rows, "skipped": {"kernel, TPB 256": "no CUDA device"}}
    table = env_work.cells(record)
    assert [line[-2] for line in table[1:3]] == ["100", "6"]
    assert table[3][:2] == ["kernel, TPB 256", "skipped: no CUDA device"]
    assert len(env_work.draw(record).axes) == 4
