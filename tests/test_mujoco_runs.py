"""Whole runs on worlds against what they must be: rollouts, replay, learning, evaluation, resuming.

All four scripts, without --compile: test_mujoco asks that compiled runs agree with these. Calls of
the methods between `main` and its environment, agent and buffer are recorded, and their arguments
are compared with what the environment has said, step by step.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import mujoco_worlds
import numpy as np
import pytest
import torch
from helpers import evaluation_seeds
from mujoco_worlds import MuJoCoWorlds
from test_cartpole import in_tmp_path, read_checkpoint  # noqa: F401
from test_mujoco import ALL_SCRIPTS, CPU, SCRIPTS, name_of, sac_baseline, sac_variant, spaces
from test_sac import read_scalars
from torch.utils._pytree import tree_map_only

from leanrl import sac_continuous_action as sac_of_one
from leanrl import sac_continuous_action_torchcompile as sac_of_one_variant

pytestmark = pytest.mark.filterwarnings("ignore:nconmax")  # small_worlds tells of overflows
SAC_SCRIPTS = pytest.mark.parametrize("module", [sac_baseline, sac_variant], ids=name_of)
COMMON = {"env_id": "worlds/Hopper-v5", "physics": "c", "cuda": False, "seed": 3}
COMMON |= {"eval_episodes": 2}
PPO = {"num_envs": 8, "num_steps": 16, "num_minibatches": 4, "update_epochs": 3, "gamma": 0.9}
PPO |= {"gae_lambda": 0.8, "clip_coef": 0.02, "learning_rate": 0.01, "total_timesteps": 384}
SAC = {"num_envs": 4, "batch_size": 16, "learning_starts": 162, "buffer_size": 230, "tau": 0.1}
SAC |= {"utd_ratio": 0.375, "policy_frequency": 3, "target_network_frequency": 2}
SAC |= {"total_timesteps": 403}
LOW, HIGH = torch.tensor([-1.0, 0.0, -2.0]), torch.tensor([3.0, 0.5, -1.0])  # a box for SAC


def is_sac(module) -> bool:
    return hasattr(module, "SAC")


def train(module, **flags) -> Path:
    flags = COMMON | (SAC if is_sac(module) else PPO) | flags
    return module.main(module.Args(**flags))


class Call(NamedTuple):
    name: str
    owner: Any
    args: tuple  # as they were when it was called
    found: Any  # what the note that belongs to the name has found then
    result: Any


def copied(tree):
    return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), tree)


@pytest.fixture
def record(monkeypatch):
    """record(module, "Class.method", ..., **notes): a list to which each call adds itself.

    A note, which has a method's name, is called with what the method gets, before it.
    """

    def watch(module, *paths, **notes):
        calls = []

        def wrap(owner, name):
            method, note = getattr(owner, name), notes.get(name.strip("_"))

            def watched(self, *args, **kwargs):
                given = copied((*args, *kwargs.values()))
                found = note and note(self, *given)
                place = len(calls)
                calls.append(None)  # calls stand in the order in which they begin
                result = method(self, *args, **kwargs)
                calls[place] = Call(name, self, given, found, copied(result))
                return result

            monkeypatch.setattr(owner, name, watched)

        for path in paths:
            owner, name = path.split(".")
            wrap(getattr(module, owner, None) or getattr(mujoco_worlds, owner), name)
        return calls

    return watch


def of(calls, name):
    return [call for call in calls if call.name == name]


@pytest.fixture
def small_worlds(monkeypatch):
    """Episodes of 25 steps at most; charts' counters are 3 and 2; SAC's box is lopsided."""

    def change(module):
        init = MuJoCoWorlds.__init__

        def changed(self, *args, **kwargs):
            init(self, *args, **kwargs)
            self.max_steps = 25
            self.broken.fill_(3)
            if is_sac(module):
                self.low, self.high = LOW, HIGH
                self.single_action_space = gym.spaces.Box(LOW.numpy(), HIGH.numpy())

        monkeypatch.setattr(MuJoCoWorlds, "__init__", changed)
        monkeypatch.setattr(MuJoCoWorlds, "overflows", lambda envs: 2)  # only Warp has any

    return change


@pytest.fixture(autouse=True)
def evaluations_end(monkeypatch):
    """An evaluation that overlooks ends would go on for ever, and a test with it."""
    step, steps = gym.vector.SyncVectorEnv.step, []

    def counted(self, actions):
        steps.append(len(actions))
        assert len(steps) < 5000, "an evaluation does not end"
        return step(self, actions)

    monkeypatch.setattr(gym.vector.SyncVectorEnv, "step", counted)


class Account(NamedTuple):
    """S steps of N environments, as the environments told them."""

    obs: torch.Tensor  # (S + 1, N, O)
    actions: torch.Tensor
    rewards: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    finals: torch.Tensor
    returns: torch.Tensor  # of the episodes so far, counted here
    lengths: torch.Tensor

    @property
    def ended(self):
        return self.terminated | self.truncated

    def mean_of_ended(self, begin, end):
        """Mean return and length of the episodes that ended in these steps, if any did."""
        known = self.ended[begin:end] & self.returns[begin:end].isfinite()
        each = self.returns[begin:end][known], self.lengths[begin:end][known]
        return [x.mean().item() for x in each if len(x)]


def account(calls) -> Account:
    (reset,), steps = of(calls, "reset"), of(calls, "step")
    obs, rewards, terminated, truncated, infos = zip(*(x.result for x in steps), strict=True)
    num_envs = len(rewards[0])
    lengths = torch.arange(num_envs) * 25 // num_envs  # the first episodes are under way
    returns = torch.zeros(num_envs).masked_fill(lengths > 0, math.nan)
    so_far = []
    for t in range(len(steps)):
        returns, lengths = returns + rewards[t], lengths + 1
        so_far.append((returns, lengths.float()))
        ended = terminated[t] | truncated[t]
        returns, lengths = (x.masked_fill(ended, 0) for x in (returns, lengths))
    returns, lengths = map(torch.stack, zip(*so_far, strict=True))
    kept = [torch.stack([step.args[0] for step in steps])]
    kept += map(
        torch.stack, (rewards, terminated, truncated, [info["final_obs"] for info in infos])
    )
    return Account(torch.stack([reset.result[0], *obs]), *kept, returns, lengths)


def assert_close(found, expected, atol=1e-4):
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4, equal_nan=True)


def assert_noise(z):
    """z (S, N, A) has a normal distribution, and no step or world has that of another one."""
    x, size = z.flatten().double(), z.numel()
    assert len(x.unique()) > 0.99 * size
    assert x.mean().abs() < 4.5 / size**0.5 and (x.std() - 1).abs() < 3.2 / size**0.5
    assert ((x.abs() > 1).double().mean() - 0.3173).abs() < 2.1 / size**0.5
    for one, other in ((z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[..., 1:], z[..., :-1])):
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert correlation.abs() < 4.5 / one.numel() ** 0.5


def assert_rows(found, expected):
    """A series of TensorBoard: [(step, value), ...]."""
    assert [step for step, _ in found] == [step for step, _ in expected]
    values = [[float(value) for _, value in rows] for rows in (found, expected)]
    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6)


def add_row(rows, step, row, ends):
    """What is logged at this step; of episodes only if any ended."""
    if ends:
        row = row | dict(zip(EPISODES, ends, strict=True))
    for tag, value in row.items():
        rows.setdefault(tag, []).append((step, value))


EPISODES = "charts/episodic_return", "charts/episodic_length"
OTHER_TAGS = {"charts/SPS", "charts/cpu_seconds", "charts/eval_return"}


# PPO


PPO_CALLS = "reset step", "begin", "__init__ act prepare learn update adapt", "observe"
PPO_CALLS = [
    f"{owner}.{name}"
    for owner, names in zip(
        ("MuJoCoWorlds", "CPhysics", "PPO", "ActorCritic"), PPO_CALLS, strict=True
    )
    for name in names.split()
]


def rate(agent, *_):
    optimizer = agent.optimizer
    return optimizer.param_groups[0]["lr"] if hasattr(optimizer, "param_groups") else optimizer.lr


def model_of(agent, *_):
    return copy.deepcopy(agent.model)


@pytest.mark.parametrize(("desired_kl", "annealed"), [(0.03, [0.02, 0.015]), (0.01, [0.01, 0.01])])
@SCRIPTS
def test_ppo_learns_from_what_happened(
    module, desired_kl, annealed, record, small_worlds, monkeypatch
):
    """Three rollouts, with both ends and with both at once, and three epochs of each."""
    small_worlds(module)
    monkeypatch.setattr(module, "STEADY_AFTER", 1)
    monkeypatch.setattr(module, "MIN_KL", 0.015)  # below which annealing does not bring it
    calls = record(module, *PPO_CALLS, prepare=model_of, learn=lambda *x: float(rate(*x)))
    more = {"total_timesteps": 500, "eval_every": 200, "save_model": True}  # 3 rollouts of 128
    run_dir = train(module, **more, seed=1, desired_kl=desired_kl)
    happened, agent = account(calls), of(calls, "__init__")[0].owner
    prepares = of(calls, "prepare")
    kinds = happened.terminated, happened.truncated
    assert (kinds[0] & ~kinds[1]).any() and (kinds[1] & ~kinds[0]).any()
    assert (kinds[0] & kinds[1]).any() and len(happened.actions) == 48 and len(prepares) == 3

    # what a rollout holds
    columns = zip(*(call.args[0] for call in prepares), strict=True)
    rollout = module.Rollout._make(map(torch.cat, columns))
    for name, expected in (
        ("obs", happened.obs[:-1]),
        ("actions", happened.actions),
        ("rewards", happened.rewards),
        ("final_obs", happened.finals),
        ("terminated", happened.terminated),
        ("ended", happened.ended),
        ("episode_returns", happened.returns),
        ("episode_lengths", happened.lengths),
    ):
        assert_close(getattr(rollout, name), expected)
    noise = []
    for k, prepare in enumerate(prepares):
        steps, model = slice(16 * k, 16 * k + 16), prepare.found
        with torch.no_grad():
            mean, log_std = model(happened.obs[steps].flatten(0, 1))
        mean = mean.view(16, 8, 3)
        noise.append((happened.actions[steps] - mean) / log_std.exp())
        normal = torch.distributions.Normal(mean, log_std.exp())
        assert_close(rollout.log_probs[steps], normal.log_prob(happened.actions[steps]).sum(-1))
        if k == 0:
            assert log_std.eq(-1).all() and mean.abs().max() < 0.1
    assert_noise(torch.cat(noise))
    starts = happened.obs[1:][happened.ended]
    assert len(starts.unique(dim=0)) == len(starts)
    drawn = torch.cat([call.args[1] for call in of(calls, "begin")])
    begins = 1 + happened.ended.any(dim=1).sum()  # the first ones, and where an episode ended
    assert len(drawn.unique(dim=0)) == len(drawn) == begins * 8
    assert (starts - torch.tensor([1.25] + 10 * [0.0])).abs().max() < 5.1e-3

    # what is learned from, in which order and at which rate; the first rollout only measures
    learning = [x for x in calls if x.name in ("prepare", "learn", "observe")]
    names = ["prepare", "observe"] + ["prepare", *3 * ["learn"], "observe"] * 2
    assert [x.name for x in learning] == names
    updates, orders, rows, scalars = of(calls, "update"), [], {}, read_scalars(run_dir)
    assert len(updates) == 2 * 3 * 4
    expected_rate = next_rate = 0.01
    for k, prepare in enumerate(prepares):
        (rollout,), batch, model = prepare.args, prepare.result, prepare.found
        with torch.no_grad():
            values = model.value(rollout.obs.flatten(0, 1)).view(16, 8)
            next_values = model.value(rollout.final_obs.flatten(0, 1)).view(16, 8)
        next_values *= ~rollout.terminated
        assert_close(batch.values.view(16, 8), values)
        ended, advantage = rollout.ended.double(), torch.zeros(8, dtype=torch.float64)
        deltas = rollout.rewards + 0.9 * next_values.double() - values
        for t in reversed(range(16)):
            advantage = deltas[t] + 0.9 * 0.8 * (1 - ended[t]) * advantage
            assert_close(batch.advantages.view(16, 8)[t].double(), advantage)
        assert_close(batch.returns, batch.advantages + batch.values)
        for name in ("obs", "actions", "log_probs"):
            assert torch.equal(getattr(batch, name), getattr(rollout, name).flatten(0, 1))
        learning.pop(0)  # the preparation
        epochs = [learning.pop(0) for _ in range(3 if k > 0 else 0)]
        observe = learning.pop(0)
        torch.testing.assert_close(observe.args[0], batch, atol=0, rtol=0)
        clipped = []
        for epoch in epochs:
            torch.testing.assert_close(epoch.args[0], batch, atol=0, rtol=0)
            assert epoch.found == pytest.approx(expected_rate)
            orders.append(tuple(epoch.args[1].tolist()))
            mine, updates = updates[:4], updates[4:]
            assert tuple(torch.cat([x.args[1] for x in mine]).tolist()) == orders[-1]
            assert {len(x.args[1]) for x in mine} == {32}
            for tag, found in epoch.result.items():
                assert_close(found, torch.stack([x.result[tag] for x in mine]))
            clipped.append(epoch.result["losses/clipfrac"])
        # and what is logged of it
        row = {}
        if epochs:
            row = {tag: values[-1] for tag, values in epochs[-1].result.items()}
            row["losses/clipfrac"] = torch.cat(clipped).mean()
            assert row["losses/clipfrac"] > 0 and row["losses/clipfrac"] != clipped[-1].mean()
            desired, kl = annealed[k - 1], row["losses/approx_kl"]
            assert_close(of(calls, "adapt")[k - 1].args, (kl, desired))
            factor = 1 / 1.5 if kl > 2 * desired else 1.5 if kl < desired / 2 else 1
            next_rate = min(expected_rate * factor, 0.01)
        row["losses/explained_variance"] = (
            1 - (batch.returns - batch.values).var() / batch.returns.var()
        )
        row |= {"charts/learning_rate": expected_rate}
        expected_rate = next_rate
        row |= {"charts/broken_worlds": 3, "charts/overflows": 2}
        ends = happened.mean_of_ended(16 * k, 16 * k + 16)
        add_row(rows, 128 * (k + 1), row, ends)
    for tag, expected in rows.items():
        assert_rows(scalars[tag], expected)
    assert scalars.keys() == rows.keys() | OTHER_TAGS and len(rows) == 12
    assert len(rows["charts/episodic_return"]) == 2  # no known episode ends in the first rollout
    assert len(set(orders)) == 6 and all(sorted(x) == [*range(128)] for x in orders)
    assert all(sum(a == b for a, b in zip(x, range(128), strict=True)) < 10 for x in orders)

    stages = json.loads((run_dir / "stages.json").read_text())
    assert (stages["iterations"], stages["env_steps"]) == (2, 256)  # after the first rollout

    # the statistics of all rollouts, and what is saved and evaluated at the end
    saved = read_checkpoint(run_dir)["agent"]
    torch.testing.assert_close(saved, agent.state_dict(), atol=0, rtol=0)
    means = torch.stack([prepare.result.obs.mean(0) for prepare in prepares]).mean(0)
    assert_close(saved["model.obs_norm.running_mean"], means)
    assert saved["model.return_norm.num_batches_tracked"] == 3
    found = scalars["charts/eval_return"]
    assert [step for step, _ in found] == [256, 384]
    assert found[-1][1] == pytest.approx(own_evaluation(agent, "Hopper-v5", 2, 1), rel=1e-3)


@SCRIPTS
def test_an_update_is_the_papers(module, float64):
    """Equations 7 and 9 over the rows of an index, then clipping and torch's Adam."""
    torch.manual_seed(0)
    flags = {"clip_coef": 0.1, "ent_coef": 0.02, "vf_coef": 0.7, "max_grad_norm": 0.3}
    agent = module.PPO(module.Args(**flags, learning_rate=0.01), spaces(5, 2), CPU)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    columns = {"obs": (40, 5), "actions": (40, 2), "log_probs": (40,), "values": (40,)}
    columns |= {"advantages": (40,), "returns": (40,)}
    batch = module.Batch(**{name: 3 * torch.randn(shape) for name, shape in columns.items()})
    agent.model.observe(batch)
    values = agent.value(batch.obs[None])[0]
    with torch.no_grad():
        mean, log_std = agent.model(batch.obs)
        actions = mean + log_std.exp() * torch.randn(40, 2)
        log_probs = torch.distributions.Normal(mean, log_std.exp()).log_prob(actions).sum(1)
        log_probs += 0.2 * torch.randn(40)  # as if some updates had been made
    batch = batch._replace(actions=actions, log_probs=log_probs, values=values)
    model = copy.deepcopy(agent.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    for _ in range(3):
        index = torch.randperm(40)[:10]
        mean, log_std = model(batch.obs[index])
        values = model.value(batch.obs[index])
        normal = torch.distributions.Normal(mean, log_std.exp())
        log_ratios = normal.log_prob(batch.actions[index]).sum(1) - batch.log_probs[index]
        advantages = batch.advantages[index]
        advantages = (advantages - advantages.mean()) / advantages.std()
        gains, clipped = [], 0
        for log_ratio, advantage in zip(log_ratios, advantages, strict=True):
            ratio = log_ratio.exp()
            gains.append(torch.min(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage))
            clipped += abs(ratio.item() - 1) > 0.1
        of_policy = -torch.stack(gains).mean()
        of_value = 0.5 * (values - batch.returns[index]).square().mean() / batch.returns.var()
        entropy = normal.entropy().sum(1).mean()
        optimizer.zero_grad()
        (of_policy + 0.7 * of_value - 0.02 * entropy).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3) > 0.3
        optimizer.step()
        metrics = agent.update(batch, index)
        expected = [of_policy, of_value, entropy, -log_ratios.mean()]
        expected += [(log_ratios.exp() - 1 - log_ratios).mean(), clipped / 10]
        names = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac"
        assert list(metrics) == [f"losses/{name}" for name in names.split()] and clipped
        for found, one in zip(metrics.values(), expected, strict=True):
            assert_close(found.double(), torch.as_tensor(one).detach().double())
    torch.testing.assert_close(agent.model.state_dict(), model.state_dict(), atol=1e-5, rtol=1e-4)


# SAC


SAC_CALLS = "reset step", "__init__ observe act update update_critic update_actor update_target"
SAC_CALLS = [
    f"{owner}.{name}"
    for owner, names in zip(
        ("MuJoCoWorlds", "SAC", "ReplayBuffer"), (*SAC_CALLS, "add sample"), strict=True
    )
    for name in names.split()
]


def normalized(agent, obs):
    """By SAC's statistics so far, which assert_sac_run looks at."""
    scale = (agent.obs_variance + 1e-4).rsqrt()  # to the bit: Adam makes much of little
    return ((obs - agent.obs_mean) * scale).clamp(-10, 10)


def intended(agent, obs, noise):
    """What the policy must do, from its network's outputs: actions (N, A)."""
    with torch.no_grad():
        mean, log_std = agent.actor.network(normalized(agent, obs)).chunk(2, dim=-1)
    log_std = -5 + 7 * (log_std.tanh() + 1) / 2
    return LOW + (HIGH - LOW) * ((mean + log_std.exp() * noise).tanh() + 1) / 2


def discounted(happened, gamma):
    """The return of each world's episode up to each step, later rewards counting more (T, N)."""
    found = []
    for world in range(happened.rewards.shape[1]):
        total = 0.0
        for t, reward in enumerate(happened.rewards[:, world].tolist()):
            total = gamma * total + reward
            found.append(total)
            if happened.terminated[t, world] or happened.truncated[t, world]:
                total = 0.0
    return torch.tensor(found, dtype=torch.float64)


def state_of(rb, *_):
    """Of either script's buffer: its rows (those in use), their number and where it goes on."""
    data = rb.data if isinstance(rb.data, torch.Tensor) else torch.cat(as_rows(rb.data), dim=1)
    on_device = getattr(rb, "device_size", torch.tensor(rb.size))
    assert on_device == rb.size
    return data[: rb.size].clone(), rb.position


def as_rows(batch):
    return [x.float().reshape(len(x), -1) for x in batch]


class Ring:
    """What the replay buffer must hold: the last `capacity` transitions, in places of their own."""

    def __init__(self, rows, position, capacity):
        self.rows, self.position, self.capacity = rows[:capacity], position % capacity, capacity

    def add(self, rows):
        end = self.position + len(rows)
        missing = max(end - len(self.rows), 0)
        self.rows = torch.cat([self.rows, rows[:0].new_zeros(missing, rows.shape[1])])
        self.rows[self.position : end] = rows
        self.position = end % self.capacity

    def places(self, batch):
        same = (torch.cat(as_rows(batch), dim=1)[:, None] == self.rows).all(dim=2)
        assert same.any(dim=1).all(), "a transition that the buffer does not hold"
        return same.int().argmax(dim=1)


def assert_sac_run(calls, ring, first_step=0, total=400):
    """Follows a run from its first step on, and leaves `ring` with what it has stored."""
    happened, (_, reset, *rest) = account(calls), calls  # the first one is __init__
    rest = [x for x in rest if x.name != "act" or len(x.args[0]) == 4]  # 2 in an evaluation
    assert reset.name == "reset" and reset.args == (3 + first_step, {"stagger": True})
    parts = "update_critic", "update_actor", "update_target"
    inner = iter([x for x in rest if x.name in parts])
    rest, acted, drawn, noises, shares = [x for x in rest if x.name not in parts], [], [], [], []
    updates = max(int((first_step - 162) * 0.375), 0)
    for t, step in enumerate(range(first_step, total, 4)):
        obs, actions = happened.obs[t], happened.actions[t]
        # 1. Act
        if step < 162:
            shares.append((actions - LOW) / (HIGH - LOW))
        else:
            act = rest.pop(0)
            assert act.name == "act" and torch.equal(act.args[0], obs)
            assert torch.equal(act.result, actions)
            assert_close(actions, act.found)
            acted.append(act.args[1])
        # 2. Learn: as many updates as are due when this step will have been made
        while step >= 162 and updates < int((step + 4 - 162) * 0.375):
            updates += 1
            sample, update = rest.pop(0), rest.pop(0)
            assert (sample.name, update.name) == ("sample", "update"), (step, updates)
            torch.testing.assert_close(update.args[0], sample.result, atol=0, rtol=0)
            assert update.args[1:] == (updates % 3 == 0, updates % 2 == 0)
            places = ring.places(sample.result)
            assert len(places) == 16
            drawn.append((places + 0.5) / len(ring.rows))
            critic, *others = [next(inner) for _ in range(1 + sum(update.args[1:]))]
            names = [name for name, due in zip(parts[1:], update.args[1:], strict=True) if due]
            assert critic.name == parts[0] and [x.name for x in others] == names
            torch.testing.assert_close(critic.args[0], sample.result, atol=0, rtol=0)
            noises.append(critic.args[1])
            if updates % 3 == 0:
                assert torch.equal(others[0].args[0], sample.result.obs)
                noises.append(others[0].args[1])
        # 3. Step, 4. store
        (one, observe, add), rest = rest[:3], rest[3:]
        assert (one.name, observe.name, add.name) == ("step", "observe", "add")
        ended = happened.terminated[t] | happened.truncated[t]
        for found, given in zip(observe.args, (obs, happened.rewards[t], ended), strict=True):
            assert torch.equal(found, given)
        torch.testing.assert_close(add.found, (ring.rows, ring.position), atol=0, rtol=0)
        for name, expected in (
            ("obs", obs),
            ("actions", actions),
            ("next_obs", happened.finals[t]),
            ("rewards", happened.rewards[t]),
            ("terminated", happened.terminated[t].float()),
        ):
            assert torch.equal(getattr(add.args[0], name).float(), expected), name
        ring.add(torch.cat(as_rows(add.args[0]), dim=1))
    assert not rest and not list(inner) and len(happened.actions) == t + 1
    if drawn:
        drawn = torch.cat(drawn)
        assert (drawn.mean() - 0.5).abs() < 4.5 * (12 * len(drawn)) ** -0.5
        assert drawn.min() < 0.1 and drawn.max() > 0.9
        assert_noise(torch.stack(noises))
    if acted:
        assert_noise(torch.stack(acted))
    if shares:
        shares = torch.stack(shares)
        ranks = (torch.arange(shares.numel()) + 0.5) / shares.numel()
        distance = (shares.flatten().sort().values - ranks).abs().max()
        assert distance < 1.95 / shares.numel() ** 0.5  # Kolmogorov-Smirnov, p = 0.001
        assert (
            shares.min() >= 0 and shares.max() <= 1 and len(shares.unique()) > 0.9 * shares.numel()
        )
        for each in shares.unbind(2):
            assert each.min() < 0.1 and each.max() > 0.9
    return happened


def stored(replay):
    """The rows of either script's replay buffer."""
    tensors = [x for x in replay.values() if isinstance(x, torch.Tensor)]
    return tensors[0] if len(tensors) == 1 else torch.cat(as_rows(tensors), dim=1)


def empty_ring(capacity=228):  # 57 whole steps of 4
    return Ring(torch.zeros(0, 2 * 11 + 3 + 2), 0, capacity)


@SAC_SCRIPTS
def test_sac_stores_and_learns_from_what_happened(module, record, small_worlds, monkeypatch):
    """A buffer that is filled more than once, with both kinds of ends."""
    small_worlds(module)
    monkeypatch.setattr(module, "LOG_EVERY", 5)
    monkeypatch.setattr(module, "STEADY_AFTER", 1.5)  # times 6 updates, for which 24 steps are made
    calls = record(module, *SAC_CALLS, act=intended, add=state_of)
    run_dir = train(module, eval_every=150, save_model=True)
    ring, agent = empty_ring(), of(calls, "__init__")[0].owner
    happened = assert_sac_run(calls, ring)
    seen = happened.obs[:-1].double()
    torch.testing.assert_close(agent.obs_mean.double(), seen.mean((0, 1)), atol=1e-5, rtol=1e-5)
    variances = seen.flatten(0, 1).var(0, correction=0)
    torch.testing.assert_close(agent.obs_variance.double(), variances, atol=1e-5, rtol=1e-5)
    returns = discounted(happened, agent.args.gamma)
    found = torch.stack([agent.return_mean, agent.return_variance]).double()
    expected = torch.stack([returns.mean(), returns.var(correction=0)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    kinds = happened.terminated, happened.truncated
    assert (kinds[0] & ~kinds[1]).any() and (kinds[1] & ~kinds[0]).any()

    checkpoint, scalars = read_checkpoint(run_dir), read_scalars(run_dir)
    torch.testing.assert_close(checkpoint["agent"], agent.state_dict(), atol=0, rtol=0)
    assert checkpoint["replay"]["position"] == ring.position == 400 % 228
    data = stored(checkpoint["replay"])
    assert torch.equal(data, ring.rows) and len(data) == 228

    # a row every 5 steps of all environments
    losses, rows, done = {}, {}, iter(calls)
    for step in range(4, 401, 4):
        for call in done:
            if call.name == "update":
                losses |= call.result
            if call.name == "add":
                break
        if step % 20 == 0:
            ends = happened.mean_of_ended(step // 4 - 5, step // 4)
            row = losses | {"charts/broken_worlds": 3, "charts/overflows": 2}
            add_row(rows, step, row, ends)
    assert len(losses) == 9
    for tag, expected in rows.items():
        assert_rows(scalars[tag], expected)
    assert scalars.keys() == rows.keys() | OTHER_TAGS and len(rows) == 13
    found = scalars["charts/eval_return"]
    assert [step for step, _ in found] == [152, 300, 400]
    assert found[-1][1] == pytest.approx(own_evaluation(agent, "Hopper-v5", 2, 3), rel=1e-3)
    stages = json.loads((run_dir / "stages.json").read_text())
    assert stages["env_steps"] == 400 - 188  # 162 and 24, rounded up to whole steps


@SAC_SCRIPTS
@pytest.mark.parametrize("first", [164, 300])
def test_a_resumed_sac_goes_on_from_all_it_had(module, first, record, small_worlds):
    """Just when it learns or later; a buffer of another size is refused."""
    small_worlds(module)
    run_dir = train(module, total_timesteps=first, save_model=True)
    last_state = torch.get_rng_state()
    saved = read_checkpoint(run_dir)
    torch.manual_seed(99)
    agents = []
    notes = {"act": intended, "add": state_of, "init": lambda agent, *_: agents.append(agent)}
    notes["reset"] = lambda *_: (whole_state(agents[-1]), torch.get_rng_state())
    calls = record(module, *SAC_CALLS, **notes)
    more = {"total_timesteps": first + 60, "save_model": True, "resume": str(run_dir)}
    with pytest.raises(ValueError, match="--buffer-size: the checkpoint has 228"):
        train(module, **more, buffer_size=90)
    calls.clear()
    train(module, **more)
    state, generator = of(calls, "reset")[0].found
    torch.testing.assert_close(state, (saved["agent"], saved["optimizers"]), atol=0, rtol=0)
    assert torch.equal(generator, saved["generators"][0]) and torch.equal(generator, last_state)
    data = stored(saved["replay"])
    assert len(data) == min(first, 228) and saved["replay"]["position"] == first % 228
    ring = Ring(data, first % 228, 228)
    assert_sac_run(calls, ring, first, first + 60)
    assert read_checkpoint(run_dir)["global_step"] == first + 60


def whole_state(agent):
    optimizers = [optimizer.state_dict()["state"] for optimizer in agent.optimizers]
    return copy.deepcopy((agent.state_dict(), optimizers))


@pytest.mark.parametrize(
    ("module", "reference"),
    [(sac_baseline, sac_of_one), (sac_variant, sac_of_one_variant)],
    ids=["baseline", "variant"],
)
def test_sacs_updates_are_those_of_one_environment(module, reference):
    """Whose losses and gradient steps test_sac compares with the paper; observations normalized."""
    space = gym.spaces.Box(LOW.numpy(), HIGH.numpy())
    for autotune in (True, False):
        alpha = 0.01 if autotune else 0.3
        flags = {"policy_lr": 2e-3, "q_lr": 4e-3, "tau": 0.2, "gamma": 0.9, "alpha": alpha}
        agents = []
        for each, known in ((module, [spaces(11, space)]), (reference, [11, space])):
            torch.manual_seed(0)
            agents.append(each.SAC(each.Args(**flags, autotune=autotune), *known, CPU))
        mine, classic = agents
        assert mine.log_alpha.exp().item() == pytest.approx(alpha)
        classic.log_alpha.data.copy_(mine.log_alpha)
        means, widths = torch.linspace(-5, 20, 11), torch.logspace(-2, 2, 11)
        for _ in range(3):
            ends = torch.rand(64) < 0.3
            mine.observe(means + widths * torch.randn(64, 11), 5 + 3 * torch.randn(64), ends)
            batch = reference.Batch(
                obs=means + 4 * widths * torch.randn(16, 11),  # some of it beyond 10 deviations
                actions=intended(mine, torch.randn(16, 11), torch.randn(16, 3)),
                next_obs=means + widths * torch.randn(16, 11),
                rewards=torch.randn(16),
                terminated=(torch.rand(16) < 0.3).float(),
            )
            inputs = batch._replace(
                obs=normalized(mine, batch.obs),
                next_obs=normalized(mine, batch.next_obs),
                rewards=batch.rewards * (mine.return_variance + 1e-4).rsqrt(),
            )
            noise, results = torch.randn(2, 16, 3), []
            for agent, seen in ((mine, batch), (classic, inputs)):
                results.append(agent.update_critic(seen, noise[0]))
                results[-1] |= agent.update_actor(seen.obs, noise[1])
                agent.update_target()
            torch.testing.assert_close(*results)
        (weights, steps), (others, other_steps) = map(whole_state, agents)
        for name in ("observed", "obs_mean", "obs_variance", "return_mean", "return_variance"):
            del weights[name]
        # Adam's steps are of 2e-3 and more, also where a gradient is nearly nothing
        torch.testing.assert_close((weights, steps), (others, other_steps), atol=5e-5, rtol=1e-3)
        assert agents[0].target_entropy == -3


# What PPO and SAC have in common: networks, evaluation


@ALL_SCRIPTS
def test_a_policy_does_not_see_what_is_for_its_critic(module):
    """The last two of five numbers: they change values, not actions."""
    torch.manual_seed(0)
    known = spaces(5, 2)
    known.actor_dim = 3
    agent = (module.SAC if is_sac(module) else module.PPO)(module.Args(), known, CPU)
    obs, noise = torch.randn(4, 5), torch.randn(4, 2)
    seen, unseen = obs.clone(), obs.clone()
    seen[:, :3] += 1
    unseen[:, 3:] += 1

    def act_and_judge(obs):
        if is_sac(module):
            return agent.act(obs, noise), agent.qf(obs, noise).T
        return agent.act(obs, noise)[0], agent.value(obs[None])[0]

    actions, values = act_and_judge(obs)
    changed = act_and_judge(seen)
    assert (changed[0] != actions).all() and (changed[1] != values).all()
    changed = act_and_judge(unseen)
    assert torch.equal(changed[0], actions) and (changed[1] != values).all()


def own_evaluation(agent, env_id, episodes, seed):
    """The mean return of single environments with what the policy's mean does in them."""
    returns = []
    for own in evaluation_seeds(seed, episodes):
        env = gym.make(env_id)
        (obs, _), ended, total = env.reset(seed=own), False, 0.0
        while not ended:
            obs = torch.tensor(np.float32(obs))[None]
            if hasattr(agent, "actor"):
                noise = torch.zeros(1, env.action_space.shape[0])
                scale, bias = agent.actor.action_scale, agent.actor.action_bias
                mean, _ = agent.actor.network(normalized(agent, obs)).chunk(2, dim=-1)
                action = mean.tanh() * scale + bias + noise
            else:
                norm = agent.model.obs_norm
                inputs = (obs - norm.running_mean) / (norm.running_var + 1e-5).sqrt()
                action = agent.model.actor_mean(inputs.clamp(-10, 10))
                low, high = map(torch.tensor, (env.action_space.low, env.action_space.high))
                action = action.clamp(low, high)
            obs, reward, terminated, truncated, _ = env.step(action[0].detach().numpy())
            total, ended = total + reward, terminated or truncated
        returns.append(total)
    return np.mean(returns)


class Uneven(gym.Env):
    """Episodes of 2 to 20 steps by the seed, which terminate and are truncated in turn.

    What is done late counts more, and every reward depends on both observation and action.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gym.spaces.Box(-9, 9, (4,))
    action_space = gym.spaces.Box(np.float32([-1, 0]), np.float32([3, 0.5]))
    render_mode = "rgb_array"
    seeds = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.steps, self.truncates = 0, self.np_random.random() < 0.5
        self.length = self.np_random.integers(2, 20)
        return self.observe(), {}

    def observe(self):
        self.obs = self.np_random.normal(3, 2, size=4).astype(np.float32)
        return self.obs

    def step(self, action):
        self.steps += 1
        reward = self.steps * (self.obs.sum() + 10 * np.sin(3 * action).sum())
        end = self.steps == self.length
        return self.observe(), float(reward), end and not self.truncates, end and self.truncates, {}

    def render(self):
        return np.zeros((64, 64, 3), np.uint8)


@ALL_SCRIPTS
def test_evaluation_is_the_mean_action_in_whole_episodes(module, monkeypatch, tmp_path):
    """Against a loop over single environments; always the same ones, and none of training's."""
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    made = []

    def make(**kwargs):
        made.append(kwargs)
        return Uneven()

    gym.register("Uneven-v0", make, disable_env_checker=True)
    torch.manual_seed(0)
    args = module.Args(env_id="Uneven-v0", eval_episodes=6, seed=5, randomize=0.3)
    if is_sac(module):
        agent = module.SAC(args, spaces(4, Uneven.action_space), CPU)
        agent.observe(3 + 2 * torch.randn(64, 4), torch.zeros(64), torch.zeros(64).bool())
        with torch.no_grad():
            for parameter in agent.actor.network.parameters():
                parameter.mul_(3)
    else:
        agent = module.PPO(args, spaces(4, 2), CPU)
        zeros = torch.zeros(100)
        rows = [3 + 2 * torch.randn(100, 4), torch.randn(100, 2), zeros, zeros, zeros]
        agent.model.observe(module.Batch(*rows, returns=torch.randn(100)))
        with torch.no_grad():
            agent.model.actor_mean[-1].weight.mul_(100)  # some leave the box
    before, generator, seeds = whole_state(agent), torch.get_rng_state(), []
    expected = own_evaluation(agent, "Uneven-v0", 6, 5)
    for film in (False, False, True):
        Uneven.seeds.clear()
        made.clear()
        agent.args.capture_video = film
        found = module.evaluate(agent, args, tmp_path / "video")
        assert found == pytest.approx(expected, rel=1e-4)
        seeds.append([seed for seed in Uneven.seeds if seed is not None])
        assert {each["randomize"] for each in made} == {0.3}
        assert [each["seed"] for each in made if "render_mode" not in each] == seeds[-1][film:]
        films = [each["seed"] for each in made if "render_mode" in each]
        assert films == seeds[-1][:film]
    assert seeds == 3 * [evaluation_seeds(5, 6)]
    assert not set(evaluation_seeds(5, 6)) & set(evaluation_seeds(6, 6)) and max(seeds[0]) < 2**31
    assert len(list((tmp_path / "video").glob("*.mp4"))) == 1
    torch.testing.assert_close(whole_state(agent), before, atol=0, rtol=0)
    assert torch.equal(torch.get_rng_state(), generator)


# Resuming, seeds and what is due, for PPO or for both


@SCRIPTS
def test_a_resumed_ppo_goes_on_from_all_it_had(module, record, small_worlds):
    """Its statistics and rates go on as if there had been no end in between."""
    small_worlds(module)
    run_dir = train(module, total_timesteps=256, save_model=True)
    last_state, saved = torch.get_rng_state(), read_checkpoint(run_dir)
    torch.manual_seed(99)
    agents = []
    notes = {"init": lambda agent, *_: agents.append(agent), "learn": lambda *x: float(rate(*x))}
    notes["reset"] = lambda *_: (whole_state(agents[-1]), torch.get_rng_state())
    calls = record(module, *PPO_CALLS, **notes)
    train(module, total_timesteps=512, save_model=True, resume=str(run_dir))
    (reset,) = of(calls, "reset")
    (state, generator), (seed, options) = reset.found, reset.args
    torch.testing.assert_close(state, (saved["agent"], saved["optimizers"]), atol=0, rtol=0)
    assert torch.equal(generator, saved["generators"][0]) and torch.equal(generator, last_state)
    assert seed == 3 + 256 and options == {"stagger": True}
    rates = [call.found for call in of(calls, "learn")]
    assert len(rates) == 6 and rates[:3] == 3 * [saved["agent"]["learning_rate"].item()]
    assert rates[0] != pytest.approx(0.01)
    end = read_checkpoint(run_dir)
    assert end["global_step"] == 512 and end["agent"]["model.obs_norm.num_batches_tracked"] == 4


@ALL_SCRIPTS
def test_worlds_are_randomized_also_when_a_run_goes_on(module, monkeypatch):
    masses = []
    init = MuJoCoWorlds.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        masses.append(self.physics.batch.expanded("body_mass").copy())

    monkeypatch.setattr(MuJoCoWorlds, "__init__", noted)
    run_dir = train(module, total_timesteps=256, randomize=0.5, save_model=True)
    train(module, total_timesteps=512, randomize=0.5, resume=str(run_dir))
    assert np.ptp(masses[0], axis=0).max() > 0.1 and (masses[0] == masses[1]).all()


@ALL_SCRIPTS
def test_the_seed_decides(module, monkeypatch):
    """Weights, starts, noise and draws: all that a run is, whatever was drawn before it."""
    one, again, other = (
        read_checkpoint(train(module, total_timesteps=256, seed=seed, exp_name=f"{i}", **more))
        for i, (seed, more) in enumerate(
            (seed, {"save_model": True, "torch_deterministic": seed == 4}) for seed in (4, 4, 5)
        )
    )
    assert not torch.backends.cudnn.deterministic
    torch.testing.assert_close(one["agent"], again["agent"], atol=1e-4, rtol=1e-4)
    assert torch.equal(one["generators"][0], again["generators"][0])
    assert not torch.equal(one["generators"][0], other["generators"][0])
    changing = [name for name in one["agent"] if name.endswith("weight")]
    assert changing and not any(torch.equal(one["agent"][x], other["agent"][x]) for x in changing)


@ALL_SCRIPTS
def test_what_is_due_is_done(module, monkeypatch):
    """Flags of saving, evaluating and filming do not mean each other; rates may stay."""
    done = []

    def evaluate(agent, args, video):
        done.append(f"evaluate {video.name} {video.parent.name}")
        return 7.0

    monkeypatch.setattr(module, "evaluate", evaluate)
    save = module.Run.save
    monkeypatch.setattr(
        module.Run,
        "save",
        lambda run, *x, **y: (done.append(f"save {run.step}"), save(run, *x, **y)),
    )
    steps = [200, 384] if is_sac(module) else [256, 384]  # every 200
    evaluations, saves = [f"evaluate step-{x} videos" for x in steps], [f"save {x}" for x in steps]
    series = {}
    for i, (flags, expected) in enumerate(
        (
            ({}, []),
            ({"save_model": True}, saves[1:]),
            ({"capture_video": True}, evaluations[1:]),
            ({"checkpoint_every": 200}, saves),
            ({"eval_every": 200}, evaluations),
        )
    ):
        done.clear()
        more = {"utd_ratio": 0.01} if is_sac(module) else {"desired_kl": 0.0, "anneal_lr": False}
        run_dir = train(module, **flags, **more, total_timesteps=387, exp_name=f"{i}")
        assert done == expected, flags
        series = read_scalars(run_dir)
        found = series.get("charts/eval_return", [])
        assert found == [(int(x.split()[1][5:]), 7.0) for x in expected if x in evaluations]
    if not is_sac(module):
        assert_rows(series["charts/learning_rate"], [(128 * k, 0.01) for k in (1, 2, 3)])
        rows = read_scalars(train(module, desired_kl=0.0, total_timesteps=387, exp_name="annealed"))
        expected = [(128 * (k + 1), 0.01 * (1 - k / 3)) for k in range(3)]
        assert_rows(rows["charts/learning_rate"], expected)
