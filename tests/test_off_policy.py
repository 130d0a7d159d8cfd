"""SAC and TD3: what an update is made of, and their loop, of which one run is looked at.

Variants are compared with their baselines in test_parity.
"""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, Named, note, read_checkpoint, read_scalars, what_named_does

from leanrl import sac_continuous_action as sac
from leanrl import td3_continuous_action as td3

SAC = {
    "module": sac,
    "agent": sac.SAC,
    "flags": {"policy_frequency": 3, "target_network_frequency": 2, "tau": 0.1},
    "due": lambda number: (number % 3 == 0, number % 2 == 0),
    "made_of": {
        (False, False): ["critic"],
        (True, False): ["critic", "actor", "actor", "actor"],  # as many as updates since
        (False, True): ["critic", "target"],
    },
}
TD3 = {
    "module": td3,
    "agent": td3.TD3,
    "flags": {"policy_frequency": 3, "tau": 0.1},
    "due": lambda number: (number % 3 == 0,),
    "made_of": {(False,): ["critic"], (True,): ["critic", "actor", "target"]},
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[SAC, TD3], ids=["sac", "td3"])
def kind(request):
    return SimpleNamespace(**request.param)


# Updates


@pytest.fixture
def agent(kind):
    torch.manual_seed(0)
    return kind.agent(kind.module.Args(**kind.flags), 3, Named.action_space, CPU)


def test_targets_begin_as_the_networks_and_follow_by_tau(agent):
    before = {name: tensor.clone() for name, tensor in agent.named_parameters()}
    for name, tensor in agent.named_parameters():
        assert torch.equal(tensor, before[name.replace("_target", "")])
        if "_target" not in name:
            tensor.data.add_(torch.randn_like(tensor))
    expected = {name: tensor.clone() for name, tensor in agent.named_parameters()}
    agent.update_target()
    for name, tensor in agent.named_parameters():
        if "_target" in name:
            expected[name] = 0.9 * before[name] + 0.1 * expected[name.replace("_target", "")]
        torch.testing.assert_close(tensor, expected[name])


def test_updates_have_the_parts_that_are_due(kind, agent, monkeypatch):
    calls, noises = [], []
    for name in ("critic", "actor", "target"):

        def call(*inputs, name=name):
            calls.append((name, inputs))
            return {name: len(calls)}

        monkeypatch.setattr(agent, f"update_{name}", call)
    obs, actions = torch.randn(4000, 3), torch.zeros(4000, 2)
    batch = kind.module.Batch(obs, actions, -obs, obs[:, 0], obs[:, 0])
    needed = {"critic": (batch,), "actor": (obs,), "target": ()}
    for due, names in kind.made_of.items():
        calls.clear()
        metrics = agent.update(batch, *due)
        assert [name for name, _ in calls] == names
        assert metrics.keys() == set(names) - {"target"}
        for name, inputs in calls:
            assert inputs[:1] == needed[name]
            noises += inputs[1:]
    assert_normal(torch.stack(noises))


def assert_normal(noise):
    """And always new."""
    error = 4 / noise.numel() ** 0.5
    assert len(noise.unique()) > 0.99 * noise.numel()
    assert abs(noise.mean()) < error and abs(noise.std() - 1) < error


# The loop

STARTS, RATIO = 12, 0.75
FLAGS = {"env_id": "Named-v0", "num_envs": 2, "learning_starts": STARTS, "utd_ratio": RATIO}
FLAGS |= {"batch_size": 8, "buffer_size": 1000, "save_model": True, "cuda": False, "seed": 7}


@pytest.fixture(scope="module")
def seen(kind, tmp_path_factory):
    """40 environment steps and 20 of a resumed run: what was called, up to `add`, in each pair.

    A call is (name, arguments, result).
    """
    seen, flags = SimpleNamespace(steps=[[]]), FLAGS | kind.flags

    def called(name):
        def look(found, _, *inputs):
            seen.steps[-1].append((name, inputs, found))
            if name == "add":
                seen.steps.append([])

        return look

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        note(patch, kind.agent, "act", called("act"))
        note(patch, kind.agent, "update", called("update"))
        note(patch, kind.module.ReplayBuffer, "add", called("add"))
        patch.setattr(kind.module, "LOG_EVERY", 4)
        run_dir = kind.module.main(kind.module.Args(**flags, total_timesteps=40))
        flags |= {"total_timesteps": 60, "resume": str(run_dir)}
        kind.module.main(kind.module.Args(**flags))
        seen.rows = read_scalars(run_dir)
    assert seen.steps.pop() == []
    return seen


def test_actions_are_random_at_first(seen):
    space = gym.vector.utils.batch_space(Named.action_space, 2)
    space.seed(7)
    stored = [calls[-1][1][0].actions for calls in seen.steps[: STARTS // 2]]
    np.testing.assert_array_equal(stored, [space.sample() for _ in stored])


def test_the_policy_acts_on_what_it_sees_with_noise(seen):
    noises = []
    for (_, (obs, noise), actions), *_, (_, (batch,), _) in seen.steps[STARTS // 2 :]:
        np.testing.assert_array_equal(obs, batch.obs)
        np.testing.assert_array_equal(actions, batch.actions)
        noises.append(noise)
    assert_normal(torch.stack(noises))


def test_transitions_end_with_their_episode(seen):
    """The real last observation, not the next episode's first; `terminated` only at real ends."""
    rows = []
    for begin, count in ((0, 20), (40, 10)):
        rows += zip(*(what_named_does(7 + begin + i, count)[0] for i in range(2)), strict=True)
    for calls, row in zip(seen.steps, rows, strict=True):
        _, (batch,), _ = calls[-1]
        found = [x.tolist() for x in (batch.obs, batch.next_obs, batch.rewards, batch.terminated)]
        assert found == [list(column) for column in zip(*row, strict=True)]


def test_updates_are_due_between_acting_and_storing(kind, seen):
    updates = 0
    for step, calls in zip(range(0, 60, 2), seen.steps, strict=True):
        expected = [("act",)] if step >= STARTS else []
        while updates < int(RATIO * (step + 2 - STARTS)):
            updates += 1
            expected.append(("update", *kind.due(updates)))
        found = [(name, *inputs[1:]) if name == "update" else (name,) for name, inputs, _ in calls]
        assert found == [*expected, ("add",)], step


def test_rows_are_logged(seen):
    returns = []
    for begin, name in ((0, 7), (0, 8), (40, 47), (40, 48)):
        ends = what_named_does(name, 10 if begin else 20)[1]
        returns += [(begin + 2 * t, total) for t, total in ends.items()]
    assert sorted(seen.rows["charts/episodic_return"]) == sorted(returns)
    steps = [*range(16, 41, 4), *range(44, 61, 4)]
    assert sorted(step for step, _ in seen.rows["losses/actor_loss"]) == steps


def test_the_seed_decides_the_weights(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = FLAGS | {"total_timesteps": STARTS + 2, "utd_ratio": 0.1}
    found = read_checkpoint(kind.module.main(kind.module.Args(**flags)))["agent"]
    torch.manual_seed(7)
    fresh = kind.agent(kind.module.Args(), 3, Named.action_space, CPU)
    torch.testing.assert_close(found, fresh.state_dict(), check_dtype=False)
