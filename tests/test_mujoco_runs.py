"""PPO and SAC on worlds: their updates, and whole runs against what the environments have said.

Each script has a run whose calls are recorded, and one that goes on from it; a test looks at one
rule of them. They are without --compile: test_parity asks that compiled runs agree with these.
Records, stages and what a checkpoint restores are the business of test_runs.
"""

import copy
import functools
import importlib.util
import itertools
import linecache
import math
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import mujoco
import mujoco_worlds
import numpy as np
import pytest
import torch
from helpers import (
    CPU,
    clipped_averages,
    evaluation_seeds,
    read_checkpoint,
    read_scalars,
    run,
    spaces,
)
from mujoco_worlds import MuJoCoWorlds
from torch import nn
from torch.utils._pytree import tree_map_only

from leanrl import ppo_mujoco_worlds as ppo
from leanrl import ppo_mujoco_worlds_torchcompile as ppo_variant
from leanrl import sac_continuous_action as sac_of_one
from leanrl import sac_continuous_action_torchcompile as sac_of_one_variant
from leanrl import sac_mujoco_worlds as sac
from leanrl import sac_mujoco_worlds_torchcompile as sac_variant


def name_of(module):
    return Path(module.__file__).stem


def scripts(*modules):
    return pytest.mark.parametrize("module", modules, ids=name_of)


PPO_SCRIPTS = scripts(ppo, ppo_variant)
HAS_WARP = importlib.util.find_spec("mujoco_warp") is not None
NEEDS_WARP = pytest.mark.skipif(not HAS_WARP, reason="needs requirements/mujoco-warp.txt")
pytestmark = pytest.mark.filterwarnings("ignore:nconmax")  # small_worlds tells of overflows
ALL_SCRIPTS = scripts(ppo, ppo_variant, sac, sac_variant)
COMMON = {"env_id": "Small-v0", "physics": "c", "cuda": False, "seed": 3}
PPO = {"num_envs": 8, "num_steps": 16, "num_minibatches": 4, "update_epochs": 3, "gamma": 0.9}
PPO |= {"gae_lambda": 0.8, "clip_coef": 0.02, "learning_rate": 0.01, "total_timesteps": 384}
PPO |= {"end_gamma": 0.99}
SAC = {"num_envs": 4, "batch_size": 16, "learning_starts": 162, "buffer_size": 230, "tau": 0.1}
SAC |= {"utd_ratio": 0.375, "policy_frequency": 3, "target_network_frequency": 2}
SAC |= {"total_timesteps": 403, "gamma": 0.95, "nstep": 4}
CAPACITY = 228  # of SAC's buffer: 57 whole steps of 4
LOW, HIGH = torch.tensor([-1.0, 0.0, -2.0]), torch.tensor([3.0, 0.5, -1.0])
BOX = gym.spaces.Box(LOW.numpy(), HIGH.numpy())


def small_worlds(**kwargs):
    """Hoppers with episodes of 25 steps at most and a lopsided box; two counters are 3 and 2."""
    envs = MuJoCoWorlds(mujoco_worlds.Hopper(), **kwargs | {"max_episode_steps": 25})
    envs.low, envs.high, envs.single_action_space = LOW, HIGH, BOX
    envs.broken.fill_(3)
    envs.overflows = lambda: 2  # only Warp has any
    return envs


gym.register("Small-v0", vector_entry_point=small_worlds)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)


def is_sac(module) -> bool:
    return hasattr(module, "SAC")


def train(module, **flags) -> Path:
    flags = COMMON | (SAC if is_sac(module) else PPO) | flags
    return module.main(module.Args(**flags))


def make_agent(module, *known, **flags):
    torch.manual_seed(0)
    kind = module.SAC if is_sac(module) else module.PPO
    return kind(module.Args(**flags), spaces(*known), CPU)


def whole_state(agent):
    optimizers = [optimizer.state_dict()["state"] for optimizer in agent.optimizers]
    return copy.deepcopy((agent.state_dict(), optimizers))


def assert_close(found, expected, tolerance=1e-4):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def assert_equal(found, expected):
    assert_close(found, expected, 0)


# Recorded runs

METHODS = {
    "MuJoCoWorlds": "reset step",
    "PPO": "act prepare learn update adapt",
    "ActorCritic": "update_statistics",
    "SAC": "act update_statistics update update_critic update_actor update_target",
    "ReplayBuffer": "sample add",
}


class Call(NamedTuple):
    name: str
    owner: Any
    args: tuple  # as they were when it was called
    result: Any


def copied(tree):
    return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), tree)


def record(patch, module) -> list[Call]:
    """A list to which each call of METHODS adds itself, in the order in which they begin."""
    calls = []

    def wrap(owner, name):
        method = getattr(owner, name)

        def watched(self, *args, **kwargs):
            place = len(calls)
            calls.append(Call(name, self, copied((*args, *kwargs.values())), None))
            result = method(self, *args, **kwargs)
            calls[place] = calls[place]._replace(result=copied(result))
            return result

        patch.setattr(owner, name, watched)

    for kind, names in METHODS.items():
        owner = getattr(module, kind, None) or getattr(mujoco_worlds, kind, None)
        for name in names.split() if owner else ():
            wrap(owner, name)
    return calls


class Recorded:
    """A run in `folder`, its calls and what the environments have told: columns (T, N, ...)."""

    def __init__(self, module, folder, **flags):
        self.module = module
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(module, "LOG_EVERY", 5, raising=False)
            patch.setattr(module, "MIN_KL", 0.015, raising=False)
            self.calls = record(patch, module)
            flags |= {"save_model": True, "randomize": 0.5, "euler_timestep": 0.005}
            self.dir = folder / train(module, **flags)
        self.agent = self.of("act")[0].owner
        self.checkpoint = read_checkpoint(self.dir)
        (self.reset,), steps = self.of("reset"), self.of("step")
        obs, rewards, terminated, truncated, infos = zip(*(x.result for x in steps), strict=True)
        columns = {
            "obs": [self.reset.result[0], *obs[:-1]],
            "actions": [step.args[0] for step in steps],
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "final_obs": [info["final_obs"] for info in infos],
            "ended": [info["_episode"] for info in infos],
            "episode_returns": [info["episode"]["r"] for info in infos],
            "episode_lengths": [info["episode"]["l"] for info in infos],
        }
        self.told = SimpleNamespace(**{name: torch.stack([*x]) for name, x in columns.items()})

    def of(self, *names):
        return [call for call in self.calls if call.name in names]

    def worlds(self, steps):
        """What is logged of a slice of steps besides losses."""
        row = {"charts/broken_worlds": 3, "charts/overflows": 2}
        returns, lengths = self.told.episode_returns[steps], self.told.episode_lengths[steps]
        known = self.told.ended[steps] & returns.isfinite()
        if known.any():
            row["charts/episodic_return"] = returns[known].mean()
            row["charts/episodic_length"] = lengths[known].mean()
        return row


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """recorded(module): its run of 384 or 400 steps."""
    return functools.cache(lambda module: Recorded(module, tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def resumed(recorded, tmp_path_factory):
    """resumed(module): two rollouts or 15 steps more; PPO wants a divergence below MIN_KL."""

    @functools.cache
    def resume(module):
        folder = tmp_path_factory.mktemp("more")
        shutil.copytree(recorded(module).dir, folder, dirs_exist_ok=True)
        more = {"total_timesteps": 640, "desired_kl": 0.01}
        more = {"total_timesteps": 460} if is_sac(module) else more
        return Recorded(module, folder, resume=str(folder), **more)

    return resume


@pytest.fixture(params=[ppo, ppo_variant], ids=name_of)
def ppo_run(request, recorded):
    return recorded(request.param)


@pytest.fixture(params=[sac, sac_variant], ids=name_of)
def sac_run(request, recorded):
    return recorded(request.param)


def assert_noise(*tensors):
    """A normal distribution, of which no number comes twice."""
    x = torch.cat([tensor.flatten() for tensor in tensors]).double()
    assert len(x.unique()) > 0.99 * len(x)
    assert x.mean().abs() < 4.5 / len(x) ** 0.5 and (x.std() - 1).abs() < 3.2 / len(x) ** 0.5
    assert ((x.abs() > 1).double().mean() - 0.3173).abs() < 2.1 / len(x) ** 0.5


def assert_logged(run, rows):
    """`rows`, {step: {tag: value}}, are all that TensorBoard shows besides times."""
    scalars, tags = read_scalars(run.dir), {tag for row in rows.values() for tag in row}
    assert scalars.keys() == tags | {"charts/SPS", "charts/cpu_seconds"}
    for tag in tags:
        expected = [(step, float(row[tag])) for step, row in rows.items() if tag in row]
        np.testing.assert_allclose(scalars[tag], expected, rtol=1e-4, atol=1e-6, err_msg=tag)


# PPO


def look(model, obs):
    """Means, deviations and values (T, N, ...) by the networks' outputs and the statistics."""
    norm, returns = model.obs_norm, model.return_norm
    seen = ((obs - norm.running_mean) / (norm.running_var + 1e-5).sqrt()).clamp(-10, 10)
    with torch.no_grad():
        values = model.critic(seen)[..., 0] * returns.running_var.sqrt() + returns.running_mean
        return model.actor_mean(seen), model.actor_logstd.exp(), values


@pytest.fixture
def first_rollout(ppo_run, resumed):
    """The model that was saved, and its first rollout and batch when the run went on."""
    agent = make_agent(ppo_run.module, 11, 3)
    agent.load_state_dict(ppo_run.checkpoint["agent"])
    prepare = resumed(ppo_run.module).of("prepare")[0]
    return agent.model, prepare.args[0], prepare.result


def test_rollouts_hold_what_happened(ppo_run):
    """Also where episodes end, of either kind and of both at once."""
    told, prepares = ppo_run.told, ppo_run.of("prepare")
    for kind in (told.terminated > told.truncated, told.truncated > told.terminated):
        assert kind.any()
    assert (told.terminated & told.truncated).any()
    columns = zip(*(call.args[0] for call in prepares), strict=True)
    rollout = ppo_run.module.Rollout._make(map(torch.cat, columns))._asdict()
    del rollout["log_probs"]
    for name, column in rollout.items():
        assert_equal(column, getattr(told, name))
    starts = told.obs[1:][told.ended[:-1]]
    assert len(starts.unique(dim=0)) == len(starts) > 10


def test_actions_are_a_gaussian_policys(first_rollout):
    model, rollout, _ = first_rollout
    mean, deviation, _ = look(model, rollout.obs)
    assert_noise((rollout.actions - mean) / deviation)
    log_probs = torch.distributions.Normal(mean, deviation).log_prob(rollout.actions)
    assert_close(rollout.log_probs, log_probs.sum(-1))


def test_advantages_end_with_episodes_and_values_with_terminations(first_rollout, ppo_run):
    model, rollout, batch = first_rollout
    assert rollout.terminated.any() and (rollout.ended & ~rollout.terminated).any()
    values, next_values = (look(model, x)[2] for x in (rollout.obs, rollout.final_obs))
    next_values = next_values * ~rollout.terminated
    numbers = rollout.rewards, values, next_values, rollout.ended.float()
    gamma = 1 - 0.1**0.3 * 0.01**0.7  # after 384 of 640 steps
    advantages = ppo_run.module.compute_gae(*numbers, gamma, 0.8)
    columns = [rollout.obs, rollout.actions, rollout.log_probs, values, advantages]
    columns.append(advantages + values)
    assert_close([*batch], [column.flatten(0, 1) for column in columns])


@PPO_SCRIPTS
def test_gamma_stays_unless_it_is_to_rise(module, monkeypatch):
    """From a quarter of the run, here of five rollouts, until three quarters."""
    gammas = []
    prepare = module.PPO.prepare
    record = lambda agent, rollout: gammas.append(agent.gamma.item()) or prepare(agent, rollout)  # noqa: E731
    monkeypatch.setattr(module.PPO, "prepare", record)
    for end_gamma in (None, 0.99):
        train(module, num_steps=4, total_timesteps=160, update_epochs=1, end_gamma=end_gamma)
    rising = [1 - 0.1**0.7 * 0.01**0.3, 1 - 0.1**0.3 * 0.01**0.7]
    assert gammas == pytest.approx([*7 * [0.9], *rising, 0.99])


@PPO_SCRIPTS
def test_the_mean_of_clipped_actions(module):
    """Inside of the bounds, at them, far beyond, and where there is none."""
    mean = torch.tensor([[0.1, 0.4, -3.0, 70.0], [-0.4, 1.2, -0.2, -5.0]])
    log_std = torch.tensor([-2.0, -1.3, 0.0, 0.5])
    low = torch.tensor([-0.4, -0.4, -1.0, -math.inf])
    high = torch.tensor([0.4, 0.4, 3.0, math.inf])
    found = module.clipped_mean(mean, log_std, low, high)
    assert_close(found, clipped_averages(mean, log_std, low, high), 1e-5)
    assert found[0, 1] < 0.31 and found[0, 3] == 70


@PPO_SCRIPTS
def test_a_policy_begins_narrow_and_in_the_middle(module):
    model = make_agent(module, 11, 3).model
    assert model.actor_logstd.eq(-1).all() and model.actor_mean[-1].weight.norm(dim=1).max() < 0.011


def test_the_first_rollout_only_measures(ppo_run):
    names = [call.name for call in ppo_run.of("prepare", "learn", "update_statistics")]
    rollout = ["prepare", *3 * ["learn"], "update_statistics"]
    assert names == ["prepare", "update_statistics", *2 * rollout]
    batches = [call.result for call in ppo_run.of("prepare")]
    assert_equal([call.args[0] for call in ppo_run.of("update_statistics")], batches)
    learned = [call.args[0] for call in ppo_run.of("learn")]
    assert_equal(learned, 3 * [batches[1]] + 3 * [batches[2]])


def test_epochs_are_shuffled_minibatches(ppo_run):
    epochs, updates = ppo_run.of("learn"), ppo_run.of("update")
    orders, ids = torch.stack([epoch.args[1] for epoch in epochs]), torch.arange(128)
    assert torch.equal(orders.sort().values, ids.expand(6, 128))
    assert len(orders.unique(dim=0)) == 6 and (orders == ids).sum(1).max() < 10
    assert torch.equal(torch.stack([x.args[1] for x in updates]), orders.view(24, 32))
    for tag in updates[0].result:
        found = torch.cat([epoch.result[tag] for epoch in epochs])
        assert_equal(found, torch.stack([update.result[tag] for update in updates]))


def test_rates_follow_the_last_minibatch(ppo_run, resumed):
    """The wanted divergence falls until MIN_KL, but does not rise to it."""
    kls = [epoch.result["losses/approx_kl"][-1] for epoch in ppo_run.of("learn")[2::3]]
    assert_close([x.args for x in ppo_run.of("adapt")], [(kls[0], 0.02), (kls[1], 0.015)])
    more = resumed(ppo_run.module)
    assert [x.args[1] for x in more.of("adapt")] == 2 * [0.01]


def test_ppo_logs_its_last_minibatches(ppo_run):
    """But clipping of all, and rates before they are adapted."""
    rows, epochs = {}, ppo_run.of("learn")
    for k, prepare in enumerate(ppo_run.of("prepare"), start=1):
        mine, batch = epochs[: 3 * k - 3][-3:], prepare.result
        row = {tag: values[-1] for epoch in mine for tag, values in epoch.result.items()}
        if mine:
            clipped = torch.cat([epoch.result["losses/clipfrac"] for epoch in mine])
            row["losses/clipfrac"] = clipped.mean()
        unexplained = (batch.returns - batch.values).var() / batch.returns.var()
        row["losses/explained_variance"] = 1 - unexplained
        row["charts/learning_rate"] = 0.01 / 1.5 if k == 3 else 0.01
        rows[128 * k] = row | ppo_run.worlds(slice(16 * k - 16, 16 * k))
    assert_logged(ppo_run, rows)
    assert rows[384]["losses/clipfrac"] not in (0, epochs[-1].result["losses/clipfrac"].mean())
    assert "charts/episodic_return" in rows[384]


def test_statistics_are_of_all_rollouts(ppo_run):
    batches, saved = [x.result for x in ppo_run.of("prepare")], ppo_run.checkpoint["agent"]
    assert_equal(saved, ppo_run.agent.state_dict())
    for name, columns in (
        ("obs", [batch.obs for batch in batches]),
        ("return", [batch.returns[:, None] for batch in batches]),
    ):
        means, variances = torch.stack([torch.stack([x.mean(0), x.var(0)]) for x in columns]).mean(
            0
        )
        assert_close(saved[f"model.{name}_norm.running_mean"], means)
        assert_close(saved[f"model.{name}_norm.running_var"], variances)


@PPO_SCRIPTS
def test_an_update_is_the_papers(module, float64):
    """Equations 7 and 9 over the rows of an index, then clipping and torch's Adam."""
    flags = {"clip_coef": 0.1, "ent_coef": 0.02, "vf_coef": 0.7, "max_grad_norm": 0.3}
    agent = make_agent(module, 5, 2, **flags, learning_rate=0.01)
    shapes = {name: (40,) for name in module.Batch._fields} | {"obs": (40, 5), "actions": (40, 2)}
    batch = module.Batch(**{name: 3 * torch.randn(shape) for name, shape in shapes.items()})
    agent.model.update_statistics(batch)
    actions, log_probs = agent.act(batch.obs, torch.randn(40, 2))
    log_probs += 0.2 * torch.randn(40)  # as if some updates had been made
    batch = batch._replace(actions=actions, log_probs=log_probs)
    model = copy.deepcopy(agent.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    for _ in range(3):
        index = torch.randperm(40)[:10]
        rows = module.Batch._make(column[index] for column in batch)
        mean, log_std = model(rows.obs)
        log_ratios = module.gaussian_log_prob(rows.actions, mean, log_std) - rows.log_probs
        ratios = log_ratios.exp()
        advantages = (rows.advantages - rows.advantages.mean()) / rows.advantages.std()
        of_policy = module.policy_loss(log_ratios, advantages, 0.1)
        errors = (model.value(rows.obs) - rows.returns).square() / batch.returns.var()
        of_value = 0.5 * errors.mean()
        entropy = torch.distributions.Normal(mean, log_std.exp()).entropy().sum(1).mean()
        optimizer.zero_grad()
        (of_policy + 0.7 * of_value - 0.02 * entropy).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3) > 0.3
        optimizer.step()
        expected = {
            "losses/policy_loss": of_policy,
            "losses/value_loss": of_value,
            "losses/entropy": entropy,
            "losses/old_approx_kl": -log_ratios.mean(),
            "losses/approx_kl": (ratios - 1 - log_ratios).mean(),
            "losses/clipfrac": ((ratios - 1).abs() > 0.1).double().mean(),
        }
        metrics = agent.update(batch, index)
        assert_close({tag: value.double() for tag, value in metrics.items()}, expected)
        assert expected["losses/clipfrac"] > 0
    assert_close(agent.model.state_dict(), model.state_dict())


@PPO_SCRIPTS
def test_the_rate_follows_the_divergence(module):
    """Half and double of the wanted one are the bounds, between which it stays; it has limits."""
    agent = make_agent(module, 17, 6, learning_rate=1e-3)
    rates = []
    for kl in (0.13, 0.11, 0.04, 0.02, 0.02, 0.0, *10 * [0.0], *20 * [1.0]):
        agent.adapt(torch.tensor(kl), 0.06)
        rates.append(agent.learning_rate.item())
    first = [2 / 3, 2 / 3, 2 / 3, 1, 1.5, 2.25]
    assert rates[:6] == pytest.approx([1e-3 * x for x in first])
    assert rates[15] == pytest.approx(1e-2) and rates[-1] == pytest.approx(1e-5)


@PPO_SCRIPTS
@pytest.mark.parametrize(("anneal_lr", "expected"), [(False, [3, 3, 3]), (True, [3, 2, 1])])
def test_without_a_divergence_rates_are_given(module, anneal_lr, expected):
    small = {"num_steps": 4, "total_timesteps": 96, "update_epochs": 1}
    run_dir = train(module, **small, desired_kl=0.0, anneal_lr=anneal_lr, learning_rate=0.03)
    rates = [rate for _, rate in read_scalars(run_dir)["charts/learning_rate"]]
    assert rates == pytest.approx([0.01 * x for x in expected])


# SAC


def normalized(agent, obs):
    """By the statistics so far."""
    scale = (agent.obs_variance + 1e-4).rsqrt()  # to the bit: Adam makes much of little
    return ((obs - agent.obs_mean) * scale).clamp(-10, 10)


def intended(agent, obs, noise):
    """What the policy must do, by its network's outputs."""
    mean, log_std = agent.actor.network(normalized(agent, obs)).detach().chunk(2, dim=-1)
    log_std = -5 + 7 * (log_std.tanh() + 1) / 2
    return LOW + (HIGH - LOW) * ((mean + log_std.exp() * noise).tanh() + 1) / 2


def side_by_side(columns):
    return torch.cat([x.float().reshape(len(x), -1) for x in columns], dim=1)


def stored(replay):
    """The rows of either script's replay buffer, from its state."""
    return side_by_side([x for x in replay.values() if isinstance(x, torch.Tensor)])


def transitions(run):
    """What replay has to take in: after each step, for each world, a transition over the last four.

    Or to the first end among them. The first steps of a run have fewer before them.
    """
    told, rows = run.told, []
    for t, n in itertools.product(range(len(told.obs)), range(4)):
        first = last = max(t - 3, 0)
        while last < t and not told.ended[last, n]:
            last += 1
        total = sum(0.95**k * told.rewards[first + k, n] for k in range(last - first + 1))
        discount = 0.95 ** (last - first + 1) * ~told.terminated[last, n]
        ends = told.final_obs[last, n], total[None], discount[None]
        rows.append(torch.cat([told.obs[first, n], told.actions[first, n], *ends]))
    return torch.stack(rows)


def added(run):
    """What it has taken in."""
    return torch.cat([side_by_side(add.args[0]) for add in run.of("add")])


def held(rows, count):
    """What a ring of CAPACITY holds of `rows` when so many have been added."""
    ids = torch.arange(max(count - CAPACITY, 0), count)
    ring = rows[: len(ids)].clone()
    ring[ids % CAPACITY] = rows[ids]
    return ring


def schedule(first, last):
    """Names of the calls of a run from step to step."""
    names, updates = [], int((first - 162) * 0.375) * (first - 162 >= 4)
    for step in range(first, last, 4):
        learns = step >= 162
        names += ["act"] * learns
        while learns and updates < int((step + 4 - 162) * 0.375):
            updates += 1
            names += ["sample", "update", "update_critic"]
            names += ["update_actor"] * (updates % 3 == 0)
            names += ["update_target"] * (updates % 2 == 0)
        names += ["step", "update_statistics", "add"]
    return names


def test_updates_are_due_by_steps(sac_run):
    assert [call.name for call in sac_run.calls] == ["reset", *schedule(0, 400)]


def test_actions_are_random_at_first(sac_run):
    """Uniform in the box."""
    shares = (sac_run.told.actions[:41] - LOW) / (HIGH - LOW)
    assert len(shares.unique()) > 0.9 * shares.numel()
    for each in (shares, *shares.unbind(2)):
        ranks = (torch.arange(each.numel()) + 0.5) / each.numel()
        distance = (each.flatten().sort().values - ranks).abs().max()
        assert distance < 1.95 / each.numel() ** 0.5  # Kolmogorov-Smirnov, p = 0.001


def test_then_the_policy_acts(sac_run):
    acts = sac_run.of("act")
    assert_equal(torch.stack([act.args[0] for act in acts]), sac_run.told.obs[41:])
    assert_equal(torch.stack([act.result for act in acts]), sac_run.told.actions[41:])
    assert_noise(*(act.args[1] for act in acts))


def test_replay_holds_what_happened(sac_run):
    """In a ring that is filled more than once, with both kinds of ends, also amid four steps."""
    told = sac_run.told
    assert (told.terminated > told.truncated).any() and (told.truncated > told.terminated).any()
    rows = added(sac_run)
    assert_close(rows, transitions(sac_run), 1e-6)
    assert_equal(stored(sac_run.checkpoint["replay"]), held(rows, 400))


@scripts(sac, sac_variant)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_n_steps_end_with_the_first_end(module, count, float64):
    """Which may be of either kind, or both, and not the only one."""
    torch.manual_seed(0)
    steps = []
    for _ in range(count):
        terminated, truncated = torch.rand(2, 500) < 0.3
        step = module.Batch(
            obs=torch.randn(500, 3),
            actions=torch.randn(500, 2),
            next_obs=torch.randn(500, 3),
            rewards=torch.randn(500),
            discounts=0.9 * ~terminated,
        )
        steps.append((step, terminated | truncated))
    found = module.n_step(steps, 0.9)
    for n in range(500):
        total = 0.0
        for k, (step, ended) in enumerate(steps):
            total += 0.9**k * step.rewards[n]
            if ended[n]:
                break
        first = steps[0][0]
        parts = first.obs[n], first.actions[n], step.next_obs[n], total, 0.9**k * step.discounts[n]
        assert_close([x[n] for x in found], [*parts], 1e-12)


def test_updates_learn_from_uniform_draws(sac_run):
    """All parts of an update from the same one, with noise of their own."""
    count, places, rows = 0, [], added(sac_run)
    for call in sac_run.calls:
        count += 4 * (call.name == "add")
        if call.name == "sample":
            batch, ring = call.result, held(rows, count)
            same = (side_by_side(batch)[:, None] == ring).all(dim=2)
            assert len(same) == 16 and same.any(dim=1).all()
            places.append((same.int().argmax(dim=1) + 0.5) / len(ring))
        if call.name in ("update", "update_critic"):
            assert_equal(call.args[0], batch)
        if call.name == "update_actor":
            assert_equal(call.args[0], batch.obs)
    places = torch.cat(places)
    assert (places.mean() - 0.5).abs() < 4.5 * (12 * len(places)) ** -0.5
    assert places.min() < 0.1 and places.max() > 0.9
    assert_noise(*(call.args[1] for call in sac_run.of("update_critic", "update_actor")))


def test_statistics_are_of_all_steps(sac_run):
    """Of observations, and of discounted returns so far."""
    agent, told, total, returns = sac_run.agent, sac_run.told, torch.zeros(4), []
    for rewards, ended in zip(told.rewards, told.ended, strict=True):
        total = 0.95 * total + rewards
        returns.append(total)
        total = total.masked_fill(ended, 0)
    for mean, variance, values in (
        (agent.obs_mean, agent.obs_variance, told.obs.double().flatten(0, 1)),
        (agent.return_mean, agent.return_variance, torch.cat(returns).double()),
    ):
        assert_close(mean.double(), values.mean(0), 1e-5)
        assert_close(variance.double(), values.var(0, correction=0), 1e-5)


def test_sac_logs_every_fifth_step(sac_run):
    losses, rows, steps = {}, {}, 0
    for call in sac_run.of("update", "add"):
        losses = losses | (call.result or {})  # `add` has none
        steps += call.name == "add"
        if call.name == "add" and steps % 5 == 0:
            rows[4 * steps] = losses | sac_run.worlds(slice(steps - 5, steps))
    assert len(rows) == 20 and len(losses) == 9
    assert_logged(sac_run, rows)


class Normalized(nn.Module):
    """Layer normalization (Ba et al., 2016, arXiv:1607.06450, equation 3)."""

    def forward(self, x):
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt()


def normalize_q_networks(module, monkeypatch):
    plain = module.mlp

    def mlp(inputs, outputs):
        first, relu, second, _, last = plain(inputs, outputs)
        norms = [Normalized()] if outputs == 1 else []
        return nn.Sequential(first, *norms, relu, second, *norms, relu, last)

    monkeypatch.setattr(module, "mlp", mlp)


@pytest.mark.parametrize("autotune", [True, False])
@pytest.mark.parametrize(
    ("module", "reference"), [(sac, sac_of_one), (sac_variant, sac_of_one_variant)], ids=name_of
)
def test_sacs_updates_are_those_of_one_environment(
    module, reference, autotune, monkeypatch, float64
):
    """Whose losses and gradient steps test_sac compares with the paper; here observations and the
    Q-networks' layers are normalized."""
    normalize_q_networks(reference, monkeypatch)
    flags = {"policy_lr": 2e-3, "q_lr": 4e-3, "tau": 0.2, "gamma": 0.9, "alpha": 0.3}
    flags["autotune"] = autotune
    mine = make_agent(module, 11, BOX, **flags)
    torch.manual_seed(0)
    classic = reference.SAC(reference.Args(**flags | {"gamma": 0.7}), 11, BOX, CPU)
    assert mine.log_alpha.exp().item() == pytest.approx(0.3) and mine.target_entropy == -3
    classic.log_alpha.data.copy_(mine.log_alpha)
    means, widths = torch.linspace(-5, 20, 11), torch.logspace(-2, 2, 11)
    statistics = {"obs_mean": means, "obs_variance": widths.square()}
    mine.load_state_dict(statistics | {"return_variance": torch.tensor(9.0)}, strict=False)
    obs = means + 4 * widths * torch.randn(16, 11)  # some of it beyond 10 deviations
    noise = torch.randn(2, 16, 3)
    assert_close(mine.act(obs, noise[0]), intended(mine, obs, noise[0]))
    batch = module.Batch(
        obs=obs,
        actions=intended(mine, torch.randn(16, 11), torch.randn(16, 3)),
        next_obs=means + widths * torch.randn(16, 11),
        rewards=torch.randn(16),
        discounts=0.7 * (torch.rand(16) > 0.3),
    )
    inputs = reference.Batch(
        obs=normalized(mine, obs),
        actions=batch.actions,
        next_obs=normalized(mine, batch.next_obs),
        rewards=batch.rewards * (mine.return_variance + 1e-4).rsqrt(),
        terminated=1 - batch.discounts / 0.7,
    )
    for _ in range(3):
        results = []
        for agent, seen in ((mine, batch), (classic, inputs)):
            results.append(agent.update_critic(seen, noise[0]))
            results[-1] |= agent.update_actor(seen.obs, noise[1])
            agent.update_target()
        torch.testing.assert_close(*results)
    (weights, steps), (others, other_steps) = map(whole_state, (mine, classic))
    weights = {name: weights[name] for name in others}  # without statistics
    torch.testing.assert_close((weights, steps), (others, other_steps))


@pytest.mark.parametrize("module", [sac, sac_variant], ids=name_of)
def test_without_clipped_double_q_values_are_means(module, float64):
    agent = make_agent(module, 11, BOX, clipped_double_q=False, alpha=0.3)
    obs, next_obs, noise = torch.randn(16, 11), torch.randn(16, 11), torch.randn(16, 3)
    rewards, discounts = torch.randn(16), torch.rand(16)
    actions, log_probs = agent.actor.sample(obs, noise)
    batch = module.Batch(obs, actions.detach(), next_obs, rewards, discounts)
    loss, _ = module.actor_loss(agent, obs, noise)
    torch.testing.assert_close(loss, 0.3 * log_probs.mean() - agent.qf(obs, actions).mean())
    next_actions, next_log_probs = agent.actor.sample(next_obs, noise)
    next_values = sum(agent.qf_target(next_obs, next_actions)) / 2 - 0.3 * next_log_probs
    losses, values = module.critic_loss(agent, batch, noise)
    errors = values - rewards - discounts * next_values
    torch.testing.assert_close(losses, errors.square().mean(dim=1))


# What PPO and SAC have in common


@ALL_SCRIPTS
def test_a_policy_does_not_see_what_is_for_its_critic(module):
    """The last two of five numbers: they change values, not actions."""
    agent = make_agent(module, 5, 2, 3)
    noise, obs = torch.randn(4, 2), torch.randn(4, 5)
    unseen, seen = obs + torch.tensor([0.0, 0, 0, 1, 1]), obs + torch.tensor([1.0, 1, 1, 0, 0])
    if is_sac(module):
        results = [(agent.act(x, noise), agent.qf(x, noise)) for x in (obs, unseen, seen)]
    else:
        results = [(agent.act(x, noise)[0], agent.value(x[None])) for x in (obs, unseen, seen)]
    (actions, _), (same, _), (others, _) = results
    assert torch.equal(actions, same) and (actions != others).all()
    assert all((results[0][1] != values).all() for _, values in results[1:])


def evaluated(agent, make, seeds):
    """Mean return of single environments without noise, and which kinds of ends came."""
    box = -torch.ones(3), torch.ones(3)
    total, ends = 0.0, set()
    for seed in seeds:
        env = make(seed=seed)
        (obs, _), terminated, truncated = env.reset(seed=seed), False, False
        while not (terminated or truncated):
            obs = torch.tensor(np.float32(obs))[None]
            if hasattr(agent, "actor"):
                action = agent.act(obs, torch.zeros(1, 3))
            else:
                action = clipped_averages(*agent.model(obs), *box).detach()
            obs, reward, terminated, truncated, _ = env.step(action[0].numpy())
            total += reward
        ends.add((terminated, truncated))
    return total / len(seeds), ends


@ALL_SCRIPTS
def test_evaluation_is_the_mean_action_in_whole_episodes(module, monkeypatch, registry):
    """Of the same randomized Hoppers each time, the first of which is filmed."""
    hopper = functools.partial(mujoco_worlds.make_gymnasiums, "Hopper-v5")
    gym.register("Short-v0", hopper, max_episode_steps=6)
    films = []
    record_video = lambda env, path, **_: films.append((path, env.render_mode)) or env  # noqa: E731
    monkeypatch.setattr(gym.wrappers, "RecordVideo", record_video)
    flags = {"env_id": "Short-v0", "eval_episodes": 6, "seed": 5, "randomize": 0.8}
    agent = make_agent(module, 11, 3, **flags)
    network = agent.actor.network if is_sac(module) else agent.model.actor_mean
    network[-1].weight.data.mul_(-200 if is_sac(module) else 1000)  # actions leave the box
    make = functools.partial(gym.make, "Short-v0", randomize=0.8)
    expected, ends = evaluated(agent, make, evaluation_seeds(5, 6))
    assert ends >= {(True, False), (False, True)}
    before = *whole_state(agent), torch.get_rng_state()
    for film in (False, True):
        agent.args.capture_video = film
        found = module.evaluate(agent, agent.args, Path("video"))
        assert found == pytest.approx(expected, rel=1e-3)
    assert films == [("video", "rgb_array")]
    assert_equal((*whole_state(agent), torch.get_rng_state()), before)


@ALL_SCRIPTS
def test_worlds_have_the_integrator_that_a_flag_names(module, recorded):
    option = recorded(module).reset.owner.model.opt
    assert option.integrator == mujoco.mjtIntegrator.mjINT_EULER and option.timestep == 0.004


@ALL_SCRIPTS
def test_randomized_worlds_stay_when_a_run_goes_on(module, recorded, resumed):
    """But episodes are others, whose ends are spread in time."""
    first, second = recorded(module).reset, resumed(module).reset
    masses, same = (x.owner.physics.batch.expanded("body_mass") for x in (first, second))
    assert np.ptp(masses, axis=0).max() > 0.1 and (masses == same).all()
    assert first.args == (3, {"stagger": True})
    assert second.args == (3 + recorded(module).checkpoint["global_step"], {"stagger": True})


def test_a_resumed_ppo_learns_at_once(ppo_run, resumed):
    """And its rates go on."""
    more = resumed(ppo_run.module)
    assert [call.name for call in more.of("prepare", "learn")][:2] == ["prepare", "learn"]
    rate = read_scalars(more.dir)["charts/learning_rate"][3][1]
    assert rate == pytest.approx(ppo_run.checkpoint["agent"]["learning_rate"].item())
    assert rate < 0.009


def test_a_resumed_sac_counts_updates_and_rows_from_the_start(sac_run, resumed):
    more = resumed(sac_run.module)
    assert [call.name for call in more.calls] == ["reset", *schedule(400, 460)]
    assert_close(added(more), transitions(more), 1e-6)
    rows = torch.cat([added(sac_run), added(more)])
    assert_equal(stored(more.checkpoint["replay"]), held(rows, 460))


@scripts(sac, sac_variant)
def test_a_sac_resumed_before_its_first_update_makes_all_of_them(module, monkeypatch, tmp_path):
    """Those of the steps from 162 to 172; the first of them ends the first run."""
    flags = {"utd_ratio": 2.0, "total_timesteps": 172, "checkpoint_every": 164}
    updates = []
    update = module.SAC.update

    def crash_once(agent, *rest):
        updates.append(agent)
        assert len(updates) > 1, "crash"
        return update(agent, *rest)

    monkeypatch.setattr(module.SAC, "update", crash_once)
    with pytest.raises(AssertionError, match="crash"):
        train(module, **flags)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] == 164
    train(module, resume=str(run_dir), **flags)
    assert len(updates) == 1 + 20


@ALL_SCRIPTS
def test_the_seed_decides(module):
    """Weights, starts, noise and draws: all that a run is, whatever was drawn before it."""
    small = {"learning_starts": 20} if is_sac(module) else {"num_steps": 4}
    small |= {"total_timesteps": 64, "save_model": True}
    one, again, other = (
        read_checkpoint(train(module, **small, seed=seed, torch_deterministic=seed == 4))
        for seed in (4, 4, 5)
    )
    assert not torch.backends.cudnn.deterministic
    assert_close(one["agent"], again["agent"])
    assert torch.equal(one["generators"]["cpu"], again["generators"]["cpu"])
    changing = [name for name in one["agent"] if name.endswith("weight")]
    assert changing and not any(torch.equal(one["agent"][x], other["agent"][x]) for x in changing)


@ALL_SCRIPTS
@pytest.mark.parametrize("saves_often", [False, True])
def test_what_is_due_is_done(module, saves_often, monkeypatch):
    """Flags of saving, evaluating and filming do not mean each other."""
    saves, films = [], []
    monkeypatch.setattr(module.Run, "save", lambda run, *_, **__: saves.append(run.step))
    monkeypatch.setattr(module, "evaluate", lambda *args: films.append(args[-1].name) or 7.0)
    each = [200, 384] if is_sac(module) else [256, 384]  # every 200 steps, and at the end
    flags = {"utd_ratio": 0.01} if is_sac(module) else {"update_epochs": 1}
    if saves_often:
        flags |= {"checkpoint_every": 200, "capture_video": True}
        due = each, each[1:]
    else:
        flags |= {"eval_every": 200, "save_model": True}
        due = each[1:], each
    run_dir = train(module, **flags, total_timesteps=387)
    assert (saves, films) == (due[0], [f"step-{step}" for step in due[1]])
    assert read_scalars(run_dir)["charts/eval_return"] == [(step, 7.0) for step in due[1]]


@ALL_SCRIPTS
def test_a_run_that_cannot_begin_leaves_nothing(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(ImportError, match="mujoco_warp"):
        train(module, physics="warp", env_id="worlds/Hopper-v5")
    assert not Path("runs").exists()


@PPO_SCRIPTS
def test_two_rollouts_are_the_least(module):
    with pytest.raises(ValueError, match="^--total-timesteps: two rollouts have 256"):
        train(module, total_timesteps=255)


# Devices and learning

PPO_ON_GPU = {"num_envs": 4096, "num_steps": 16, "total_timesteps": 4096 * 16 * 10}
SAC_ON_GPU = {"num_envs": 4096, "utd_ratio": 0.001, "batch_size": 8192, "learning_starts": 8192}
SAC_ON_GPU |= {"buffer_size": 500_000, "total_timesteps": 4096 * 250}
PPO_WAITS = (
    "row = {tag: float(value) for",
    "exponential_average_factor = 1.0 / float(",  # BatchNorm's
    "if known.any():",
    'row["charts/episodic_return"] = rollout.episode_returns[known]',
    'row["charts/episodic_length"] = rollout.episode_lengths[known]',
)
SAC_WAITS = "total_return, total_length, episodes = totals.tolist()", "row = {tag: float(value) for"


@pytest.mark.gpu
@NEEDS_WARP
@pytest.mark.parametrize(
    ("module", "flags", "captured", "waiting"),
    [(ppo_variant, PPO_ON_GPU, 5, PPO_WAITS), (sac_variant, SAC_ON_GPU, 50, SAC_WAITS)],
    ids=["PPO", "SAC"],
)
def test_only_rows_of_metrics_wait_for_the_device(module, flags, captured, waiting, monkeypatch):
    """4,096 worlds of mujoco_warp, from the iteration on by which all graphs are captured."""

    class Watch(module.Stopwatch):
        def tick(self, env_steps):
            super().tick(env_steps)
            steady = captured * 4096 <= env_steps / flags.get("num_steps", 1)
            last = env_steps >= flags["total_timesteps"]
            torch.cuda.set_sync_debug_mode("warn" if steady and not last else "default")

    monkeypatch.setattr(module, "Stopwatch", Watch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.main(module.Args(**flags, cudagraphs=True))
    waits = [x for x in caught if "synchronizing CUDA operation" in str(x.message)]
    lines = {linecache.getline(wait.filename, wait.lineno).strip() for wait in waits}
    assert lines and all(line.startswith(waiting) for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (ppo, ()),
        (ppo_variant, ("--compile",)),
        (sac_variant, ("--compile", "--utd-ratio=0.02")),
    ],
    ids=["ppo", "ppo compiled", "sac compiled"],
)
def test_it_learns(module, flags, tmp_path):
    """HalfCheetah: a random policy gets about -300; what is learned is worth as much in Warp."""
    flags += "--total-timesteps=1000000", "--eval-every=1000000", "--save-model"
    run(tmp_path, f"{name_of(module)}.py", *flags)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert read_scalars(run_dir)["charts/eval_return"][-1][1] > 2000
    checkpoint = read_checkpoint(run_dir)
    agent = make_agent(module, 17, 6, **checkpoint["args"])
    agent.load_state_dict(checkpoint["agent"])
    on_c, *on_warp = (play(agent, physics) for physics in ("c", "warp")[: 1 + HAS_WARP])
    assert on_c > 2000 and on_warp == HAS_WARP * [pytest.approx(on_c, rel=0.1)]


def play(agent, physics):
    """Mean return of whole episodes by the mean actions."""
    envs = gym.make_vec("worlds/HalfCheetah-v5", num_envs=32, physics=physics)
    total, (obs, _) = 0.0, envs.reset(seed=2**31)
    for _ in range(1000):
        result = agent.act(obs, torch.zeros(32, 6))
        actions = result if hasattr(agent, "actor") else result[0]
        obs, rewards, _, truncated, _ = envs.step(actions)
        total += rewards.mean().item()
    assert truncated.all() and envs.broken == 0
    return total
