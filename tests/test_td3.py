"""TD3, both scripts: mathematics, parity, whole runs, resuming and learning.

What TD3 shares with SAC to the letter is tested there; that it is shared is tested in test_shared.
"""

import copy
import itertools
import json
import math
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, SMALL, evaluation_seeds, read_checkpoint, read_scalars, train
from test_sac import (
    assert_loop,
    assert_process_computes_as_its_flags_say,
    assert_refused,
    count_updates_before_the_window,
)
from test_sac_parity import (  # noqa: F401
    WITHOUT_OR_COMPILED,
    assert_hunks_are_marked,
    backend,
    run_captured,
)

from leanrl import td3_continuous_action as baseline
from leanrl import td3_continuous_action_torchcompile as variant

COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
LOW, HIGH = (-1.0, 2.0), (3.0, 2.5)  # a box neither centred nor of unit size


@pytest.fixture(params=[baseline, variant], ids=["baseline", "variant"])
def module(request):
    return request.param


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread, as small batches are not worth more."""
    monkeypatch.chdir(tmp_path)


# Mathematics


@pytest.fixture
def make_agent(module, float64):
    """Makes an agent in float64 whose target networks are not the networks themselves."""

    def make(**flags):
        torch.manual_seed(0)
        space = gym.spaces.Box(np.float32(LOW), np.float32(HIGH))
        agent = module.TD3(module.Args(**flags), 3, space, CPU)
        with torch.no_grad():
            for target in (*agent.actor_target.parameters(), *agent.qf_target.parameters()):
                target.add_(0.02 * torch.randn_like(target))
        return agent

    return make


def make_batch():
    """5 transitions, two of which end their episode."""
    terminated = torch.tensor([0.0, 1, 0, 0, 1])
    return baseline.Batch(
        obs=torch.randn(5, 3),
        actions=torch.randn(5, 2),
        next_obs=torch.randn(5, 3),
        rewards=torch.randn(5),
        terminated=terminated,
    )


def perturbed_by_hand(actor, obs, noise):
    """The definition in plain numbers: a list of actions, and how many of them met each bound."""
    linear = actor.network[0::2]
    layers = [(each.weight.detach().numpy(), each.bias.detach().numpy()) for each in linear]
    actions, bounded = [], [0, 0]
    for x, noise_row in zip(obs.numpy(), noise.tolist(), strict=True):
        for weight, bias in layers[:2]:
            x = np.maximum(weight @ x + bias, 0)
        action = []
        x = layers[2][0] @ x + layers[2][1]
        for mu, n, low, high in zip(x, noise_row, LOW, HIGH, strict=True):
            half = (high - low) / 2
            free = low + half + half * math.tanh(mu) + half * n
            action.append(min(max(free, low), high))
            bounded = [bounded[0] + (free < low), bounded[1] + (free > high)]
        actions.append(action)
    return actions, bounded


def test_noise_counts_in_half_ranges_and_actions_stay_in_the_box(make_agent):
    agent = make_agent(exploration_noise=0.3)
    obs, noise = torch.randn(50, 3), torch.randn(50, 2)
    expected, bounded = perturbed_by_hand(agent.actor, obs, noise)
    assert min(bounded) > 5 and sum(bounded) < 50, "not a test of both bounds and of the inside"
    assert agent.actor.perturbed(obs, noise).tolist() == [pytest.approx(row) for row in expected]
    expected, _ = perturbed_by_hand(agent.actor, obs, 0 * noise)
    assert agent.actor(obs).tolist() == [pytest.approx(row) for row in expected]
    expected, _ = perturbed_by_hand(agent.actor, obs, 0.3 * noise)
    actions = agent.act(obs, noise)
    assert actions.tolist() == [pytest.approx(row) for row in expected]
    assert not actions.requires_grad


def critic_losses_by_hand(agent, batch, noise, gamma):
    """Algorithm 1 with plain loops over the batch; `noise` in half ranges, clipped."""
    expected = [0.0, 0.0]
    for i in range(5):
        row = slice(i, i + 1)
        next_actions, _ = perturbed_by_hand(agent.actor_target, batch.next_obs[row], noise[row])
        next_values = agent.qf_target(batch.next_obs[row], torch.tensor(next_actions))
        goal = batch.rewards[i].item()
        if not batch.terminated[i]:
            goal += gamma * min(next_values[:, 0].tolist())
        for k, value in enumerate(agent.qf(batch.obs[row], batch.actions[row])[:, 0].tolist()):
            expected[k] += (value - goal) ** 2 / 5
    return expected


def test_critic_losses_match_the_paper(module, make_agent):
    agent, batch, noise = make_agent(), make_batch(), 0.4 * torch.randn(5, 2)
    expected = critic_losses_by_hand(agent, batch, noise, 0.9)
    losses, values = module.critic_loss(agent, batch, noise, 0.9)
    assert losses.tolist() == pytest.approx(expected) and abs(expected[0] - expected[1]) > 1e-3
    torch.testing.assert_close(values, agent.qf(batch.obs, batch.actions))


def to_numbers(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """What an update returns: no shape, and no graph that would keep its memory."""
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    return {tag: value.item() for tag, value in metrics.items()}


def test_smoothing_noise_is_clipped(make_agent):
    """`update_critic` makes it from standard normal noise: scaled first, then clipped."""
    agent = make_agent(policy_noise=0.4, noise_clip=0.3, gamma=0.9)
    batch, noise = make_batch(), torch.randn(5, 2)
    clipped = [[min(max(0.4 * n, -0.3), 0.3) for n in row] for row in noise.tolist()]
    share = np.mean(np.abs(clipped) == 0.3)
    assert 0 < share < 1, "not a test of the clipped and of the others"
    expected = critic_losses_by_hand(agent, batch, torch.tensor(clipped), 0.9)
    values = agent.qf(batch.obs, batch.actions).mean(dim=1).tolist()
    assert to_numbers(agent.update_critic(batch, noise)) == {
        "losses/qf1_loss": pytest.approx(expected[0]),
        "losses/qf2_loss": pytest.approx(expected[1]),
        "losses/qf_loss": pytest.approx(sum(expected) / 2),
        "losses/qf1_values": pytest.approx(values[0]),
        "losses/qf2_values": pytest.approx(values[1]),
    }


def test_actor_loss_is_minus_the_first_network_value(module, make_agent):
    agent, obs, losses = make_agent(), torch.randn(5, 3), []
    for changed in (None, 1, 0):  # the second network does not matter, the first does
        if changed is not None:
            one = isinstance(agent, variant.TD3)
            networks = agent.qf.parameters() if one else agent.qf[changed].parameters()
            with torch.no_grad():
                for tensor in networks:
                    (tensor[changed] if one else tensor).add_(0.1)
        actions, _ = perturbed_by_hand(agent.actor, obs, torch.zeros(5, 2))
        values = agent.qf(obs, torch.tensor(actions))[0]
        losses.append(module.actor_loss(agent, obs).item())
        assert losses[-1] == pytest.approx(-sum(values.tolist()) / 5)
    assert losses[0] == pytest.approx(losses[1]) and losses[0] != pytest.approx(losses[2])


def test_each_update_moves_its_own_networks(module, make_agent):
    agent, batch = make_agent(tau=0.1, learning_rate=1e-3), make_batch()
    fresh = module.TD3(agent.args, 3, gym.spaces.Box(np.float32(LOW), np.float32(HIGH)), CPU)
    for target, network in ((fresh.actor_target, fresh.actor), (fresh.qf_target, fresh.qf)):
        assert all(map(torch.equal, target.parameters(), network.parameters()))

    def moved(update, *inputs):
        """The networks of which every tensor changed; none may change in part."""
        before = {name: tensor.clone() for name, tensor in agent.named_parameters()}
        update(*inputs)
        changed = {}
        for name, tensor in agent.named_parameters():
            equal = torch.equal(before[name], tensor)
            changed.setdefault(name.partition(".")[0], set()).add(not equal)
        assert all(len(kinds) == 1 for kinds in changed.values()), changed
        return before, [name for name, kinds in changed.items() if kinds == {True}]

    def longest(before, network):
        """Of all changes: in the first step of Adam, the learning rate."""
        now = [(name, x) for name, x in agent.named_parameters() if name.startswith(network + ".")]
        return max((x - before[name]).abs().max().item() for name, x in now)

    before, changed = moved(agent.update_critic, batch, torch.randn(5, 2))
    assert changed == ["qf"] and longest(before, "qf") == pytest.approx(1e-3, rel=1e-3)
    loss = module.actor_loss(agent, batch.obs).item()
    before = {name: tensor.clone() for name, tensor in agent.named_parameters()}
    assert to_numbers(agent.update_actor(batch.obs)) == {"losses/actor_loss": pytest.approx(loss)}
    assert longest(before, "actor") == pytest.approx(1e-3, rel=1e-3)
    assert module.actor_loss(agent, batch.obs).item() < loss
    assert moved(agent.update_actor, batch.obs)[1] == ["actor"]
    before, changed = moved(agent.update_target)
    assert changed == ["actor_target", "qf_target"]
    after = dict(agent.named_parameters())
    for name in [name for name in after if "_target" in name]:
        expected = 0.9 * before[name] + 0.1 * before[name.replace("_target", "")]
        torch.testing.assert_close(after[name], expected, check_device=False)


def test_evaluation_acts_without_noise(module):
    """Against a loop over single environments without any of the script's machinery."""
    args = module.Args(**SMALL, eval_episodes=2, seed=4, exploration_noise=9.0)
    torch.manual_seed(0)
    agent = module.TD3(args, 3, gym.spaces.Box(-2, 2, (1,), np.float32), CPU)
    returns = []
    for seed in evaluation_seeds(4, 2):
        env = gym.make("Pendulum-v1")
        obs, _ = env.reset(seed=seed)
        total, truncated = 0.0, False
        while not truncated:
            action = agent.actor(torch.tensor(obs)[None])[0].detach().numpy()
            obs, reward, _, truncated, _ = env.step(action)
            total += reward
        returns.append(total)
    agent.act = None  # compiled or captured, it would be for another number of environments
    assert module.evaluate(agent, args, None) == pytest.approx(np.mean(returns), rel=1e-4)


# Parity: equal weights, batch and noise in, equal updates out

OBS, A, B = 17, 6, 256  # HalfCheetah-v5 and CleanRL's batch


def random_batch(generator, device):
    """B transitions, columns of one tensor as in the variant's replay buffer."""
    rows = torch.randn(B, 2 * OBS + A + 2, generator=generator).to(device)
    obs, actions, next_obs, rewards, terminated = rows.split((OBS, A, OBS, 1, 1), dim=1)
    actions.tanh_()
    terminated.copy_(terminated > 1.3)  # one in ten
    return variant.Batch(
        obs=obs,
        actions=actions,
        next_obs=next_obs,
        rewards=rewards.squeeze(1),
        terminated=terminated.squeeze(1),
    )


def stack(named: dict) -> dict:
    """Both Q-networks' tensors become one, in the place of the first one's."""
    stacked = {}
    for name, tensor in named.items():
        if re.match(r"qf\w*\.0\.", name):
            tensor = torch.stack([tensor, named[name.replace(".0.", ".1.", 1)]])
        if not re.match(r"qf\w*\.1\.", name):
            stacked[name] = tensor
    return stacked


def state(agent) -> tuple[dict, list]:
    """What updates change, networks and optimizers, in the form that the variant loads."""
    networks, optimizers = agent.state_dict(), [each.state_dict() for each in agent.optimizers]
    if isinstance(agent, variant.TD3):
        return networks, [each["state"] for each in optimizers]

    lists = []
    for network, each in zip(("qf", "actor"), optimizers, strict=True):
        names = [name for name, _ in agent.named_parameters() if name.startswith(network + ".")]
        moments, states = [], each["state"].values()
        for key in ("exp_avg", "exp_avg_sq"):
            named = dict(zip(names, (one[key] for one in states), strict=True))
            moments += stack(named).values()
        step = each["state"][0]["step"]
        powers = [torch.tensor(beta, device=step.device) ** step for beta in (0.9, 0.999)]
        lists.append(moments + [power.to(moments[0]) for power in powers])
    return stack(networks), lists


def make_pair(device=CPU):
    """A baseline agent that has learned a little, and a variant agent with the same state."""
    torch.manual_seed(0)
    space = gym.spaces.Box(-1, 1, (A,), np.float32)
    reference = baseline.TD3(baseline.Args(), OBS, space, device)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = random_batch(generator, device)
        reference.update_critic(batch, torch.randn(B, A, generator=generator).to(device))
        reference.update_actor(batch.obs)
        reference.update_target()
    with torch.no_grad():
        for target in (*reference.actor_target.parameters(), *reference.qf_target.parameters()):
            target.add_(0.01 * torch.randn_like(target))  # nearly the networks: a mix-up would hide
    agent = variant.TD3(variant.Args(), OBS, space, device)
    networks, optimizers = state(reference)
    agent.load_state_dict(networks)
    for optimizer, values in zip(agent.optimizers, optimizers, strict=True):
        optimizer.load_state_dict({"state": values})
    return reference, agent


def clones(metrics: dict) -> dict:
    """A graph's next replay writes over what it has returned."""
    return {tag: value.clone() for tag, value in metrics.items()}


def run_updates(reference, agent, count, tolerance, device=CPU):
    """The same updates on both; every loss and, at the end, every tensor must agree."""
    generator, close = torch.Generator().manual_seed(2), {"atol": tolerance, "rtol": tolerance}
    for update in range(1, count + 1):
        batch = random_batch(generator, device)
        noise = torch.randn(B, A, generator=generator).to(device)
        metrics = [clones(each.update_critic(batch, noise)) for each in (reference, agent)]
        torch.testing.assert_close(*metrics, **close)
        if update % 2 == 0 or update == count:
            metrics = [clones(each.update_actor(batch.obs)) for each in (reference, agent)]
            torch.testing.assert_close(*metrics, **close)
            for each in (reference, agent):
                each.update_target()
    torch.testing.assert_close(state(agent), state(reference), atol=tolerance, rtol=0)


@WITHOUT_OR_COMPILED
def test_one_update_agrees(backend):  # noqa: F811
    """Compiled: in one graph per method, and nothing compiles again for what follows."""
    reference, agent = make_pair()
    torch.testing.assert_close(state(agent), state(reference), atol=1e-6, rtol=0)
    if backend:
        variant.compile_agent(agent)
    run_updates(reference, agent, 1, 1e-5)
    for _ in range(3):
        obs, noise = torch.randn(1, OBS), torch.randn(1, A)
        actions = [each.act(obs, noise) for each in (reference, agent)]
        torch.testing.assert_close(*actions, atol=1e-5, rtol=0)
    run_updates(reference, agent, 20, 1.0)
    counters, graphs = torch._dynamo.utils.counters, 2 if backend else 0
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]


@WITHOUT_OR_COMPILED
def test_numbers_in_args_may_change_between_updates(backend):  # noqa: F811
    """Who anneals a flag gets what it says: a method compiles once more, and then never again."""
    reference, agent = make_pair()
    if backend:
        variant.compile_agent(agent)
    run_updates(reference, agent, 1, 1e-5)
    counters, found = torch._dynamo.utils.counters, []
    for number in range(1, 5):
        for each in (reference, agent):
            each.args.gamma = 0.99 - 0.1 * number
            each.args.policy_noise = 0.2 + 0.1 * number
            each.args.exploration_noise = 0.1 * number + 0.5
            each.args.tau = 0.01 * number
        obs, noise = torch.randn(1, OBS), torch.randn(1, A)
        actions = [each.act(obs, noise) for each in (reference, agent)]
        torch.testing.assert_close(*actions, atol=1e-5, rtol=0)
        run_updates(reference, agent, 1, 1e-4)
        found.append(counters["stats"]["unique_graphs"])
    assert found[1:] == found[1:2] * 3
    for noise_clip in (0.1, 0.3):  # compiles for each value: torch keeps the bounds of a clamp
        reference.args.noise_clip = agent.args.noise_clip = noise_clip
        run_updates(reference, agent, 1, 1e-4)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_a_hundred_updates_agree(compiled, float64):
    reference, agent = make_pair()
    if compiled:
        variant.compile_agent(agent)
    run_updates(reference, agent, 100, 1e-9)


def test_whole_iterations_agree(backend, monkeypatch):  # noqa: F811
    """40 of both scripts with the same draws from the replay buffer, the variant's also compiled.

    Acting, storing, what is updated when, logging.
    """

    def draw(self):
        generator = torch.Generator().manual_seed(self.position)
        return torch.randint(self.size, (B,), generator=generator)

    def sample(self):
        index = draw(self)
        return baseline.Batch._make(stored[index] for stored in self.data)

    def refill(self):
        torch.index_select(self.data, 0, draw(self), out=self.rows)

    monkeypatch.setattr(baseline.ReplayBuffer, "sample", sample)
    monkeypatch.setattr(variant.ReplayBuffer, "draw", refill)
    flags = {"total_timesteps": 140, "learning_starts": 100, "buffer_size": 130, "save_model": True}
    found = []
    for module, more in (baseline, {}), (variant, {}), (variant, {"compile": True}):
        monkeypatch.setattr(module, "LOG_EVERY", 5)
        run_dir = module.main(module.Args(**flags, **more, exp_name=str(len(found))))
        found.append((read_checkpoint(run_dir), read_scalars(run_dir)))
    (expected, scalars), *others = found
    expected["agent"] = stack(expected["agent"])
    columns = [expected["replay"].pop(name).reshape(130, -1) for name in variant.Batch._fields]
    expected["replay"]["rows"] = torch.cat(columns, dim=1)
    assert len(scalars["losses/qf_loss"]) == 8
    for checkpoint, found_scalars in others:
        for tag in (tag for tag in scalars if tag.startswith("losses/")):
            np.testing.assert_allclose(found_scalars[tag], scalars[tag], rtol=1e-3, atol=1e-3)
        for name, tensor in expected["agent"].items():
            # Adam makes much of the last bit of a tiny gradient, here and there
            error = (checkpoint["agent"][name] - tensor).abs().mean().item()
            assert error < 1e-5, f"{name} differs by {error:.1e}"
        torch.testing.assert_close(checkpoint["replay"], expected["replay"], rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("flag", "value"), [("gamma", 0.9), ("tau", 0.01), ("policy_noise", 0.3), ("noise_clip", 0.3)]
)
def test_a_wrong_update_is_noticed(flag, value):
    """The comparison itself: a variant with another setting must fail it."""
    reference, agent = make_pair()
    agent.args = variant.Args(**{flag: value})
    with pytest.raises(AssertionError):
        run_updates(reference, agent, 1, 1e-5)


@pytest.mark.gpu
@COMPILED
def test_graphed_updates_agree_with_eager(compiled, float64):
    from tensordict.nn import CudaGraphModule

    device = torch.device("cuda")
    reference, agent = make_pair(device)
    if compiled:
        variant.compile_agent(agent)
    for name in ("update_critic", "update_actor", "update_target"):
        setattr(agent, name, CudaGraphModule(getattr(agent, name), warmup=3))
    run_updates(reference, agent, 10, 1e-9, device)  # warm-up, capture, replays
    run_updates(reference, agent, 100, 1e-9, device)


@pytest.mark.gpu
@COMPILED
def test_captured_updates_agree(compiled, float64, monkeypatch):
    """As the script captures them: a graph per kind of update, which reads the buffer's batch."""
    dues = [(number % 2 == 0,) for number in range(1, 31)]
    reference, agent = make_pair(torch.device("cuda"))
    run_captured(variant, reference, agent, random_batch, dues, compiled, monkeypatch)
    torch.testing.assert_close(state(agent), state(reference), atol=1e-9, rtol=0)


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


# Whole runs


@pytest.fixture
def calls(module, monkeypatch):
    """What `main` calls of TD3 and of the replay buffer, in order: (name, inputs)."""
    made = []

    def recorded(name, function):
        def call(self, *inputs):
            made.append((name, copy.deepcopy(inputs)))
            return function(self, *inputs)

        return call

    for name in ("act", "update_critic", "update_actor", "update_target"):
        monkeypatch.setattr(module.TD3, name, recorded(name, getattr(module.TD3, name)))
    monkeypatch.setattr(module.ReplayBuffer, "add", recorded("add", module.ReplayBuffer.add))
    return made


def test_run_from_end_to_end(module, calls, capsys):
    """What it calls, stores and writes, through an episode of 200 steps in each environment."""
    run_dir = train(module, total_timesteps=500, num_envs=2, eval_every=500, eval_episodes=2)
    for name, count in (("act", 200), ("update_critic", 400)):  # noise is normal and always new
        noise = torch.stack([inputs[1].flatten() for call, inputs in calls if call == name][:count])
        assert len(noise) == count and len(noise.unique()) > 0.99 * noise.numel()
        error = 4 / noise.numel() ** 0.5
        assert abs(noise.mean()) < error and abs(noise.std() - 1) < error / 2**0.5

    stored = [inputs[0] for call, inputs in calls if call == "add"]
    obs, actions, next_obs, rewards, terminated = (
        np.stack([getattr(transitions, name) for transitions in stored])
        for name in ("obs", "actions", "next_obs", "rewards", "terminated")
    )
    assert len(obs) == 250 and not terminated.any() and (rewards < 0).all()
    angles = np.arctan2(obs[..., 1], obs[..., 0])  # the last step of an episode is no exception
    speeds = obs[..., 2] + 0.05 * (15 * np.sin(angles) + 3 * actions[..., 0])
    angles += 0.05 * np.clip(speeds, -8, 8)
    expected = np.stack([np.cos(angles), np.sin(angles), np.clip(speeds, -8, 8)], axis=-1)
    np.testing.assert_allclose(next_obs, expected, atol=1e-4)
    begins = [t for t in range(1, 250) if not np.array_equal(obs[t], next_obs[t - 1])]
    assert begins == [200]

    config, stages = (json.loads((run_dir / f).read_text()) for f in ("config.json", "stages.json"))
    assert config["args"]["env_id"] == "Pendulum-v1" and stages["sps_steady"] > 0
    assert (stages["env_steps"], stages["iterations"]) == (300, 150)  # steady from step 200 on
    assert 0 < stages["stages"]["backpropagation"] < stages["seconds"]
    assert run_dir.name in capsys.readouterr().err
    scalars = read_scalars(run_dir)
    assert [step for step, _ in scalars["charts/episodic_length"]] == [400, 400]
    assert [step for step, _ in scalars["charts/eval_return"]] == [500]
    losses = {tag: rows for tag, rows in scalars.items() if tag.startswith("losses/")}
    names = "qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "qf2_values", "actor_loss"
    assert losses.keys() == {f"losses/{name}" for name in names}
    for tag, rows in losses.items():
        assert [step for step, _ in rows] == [200, 300, 400, 500]
        assert all(math.isfinite(value) for _, value in rows)
        assert len({value for _, value in rows}) == 4, f"{tag} stayed: no update happened"


@pytest.mark.parametrize(
    ("num_envs", "utd_ratio", "policy_frequency", "updates"),
    [(4, 1.0, 2, 60), (4, 0.25, 2, 15), (1, 2.0, 1, 120), (1, 1.0, 3, 60)],
)
def test_policy_and_targets_are_delayed(
    module, calls, num_envs, utd_ratio, policy_frequency, updates
):
    """Updates = steps after the random phase x ratio; every n-th has one of policy and targets."""
    flags = {"num_envs": num_envs, "utd_ratio": utd_ratio, "policy_frequency": policy_frequency}
    train(module, **flags, total_timesteps=160)
    expected = []
    for number in range(1, updates + 1):
        expected.append("update_critic")
        if number % policy_frequency == 0:
            expected += ["update_actor", "update_target"]
    updates = [(name, inputs) for name, inputs in calls if name.startswith("update")]
    assert [name for name, _ in updates] == expected
    for (before, its), (name, inputs) in itertools.pairwise(updates):
        if name == "update_actor":  # of the same transitions
            assert before == "update_critic" and torch.equal(its[0].obs, inputs[0])


def test_the_loop_acts_learns_and_stores_as_it_says(module, monkeypatch):
    losses = "qf1_loss qf2_loss qf_loss qf1_values qf2_values actor_loss".split()
    assert_loop(module, module.TD3, lambda number: (number % 3 == 0,), losses, 200, monkeypatch)


def test_the_steady_window_begins_when_each_kind_of_update_is_captured(module, monkeypatch):
    flags = {"policy_frequency": 40, "total_timesteps": 550, "utd_ratio": 4.0}
    found = count_updates_before_the_window(module, module.TD3, monkeypatch, **flags)
    assert found == {(True,): 50, (False,): 50 * 39}


def test_a_process_computes_as_its_flags_say(module):
    agent = module.TD3(module.Args(), 3, gym.spaces.Box(-1, 1, (2,), np.float32), CPU)
    assert_process_computes_as_its_flags_say(module, agent)


def test_a_resumed_run_goes_on_from_its_checkpoint(module):
    """Learning nothing more, it shows what it started from; a rate that is given replaces it."""
    flags = {"total_timesteps": 150, "save_model": True, "learning_rate": 1e-3}
    run_dir = train(module, **flags)
    before = read_checkpoint(run_dir)
    flags |= {"total_timesteps": 170, "learning_rate": 0.0, "tau": 1.0, "resume": str(run_dir)}
    assert train(module, **flags) == run_dir
    after = read_checkpoint(run_dir)
    assert (before["global_step"], after["global_step"]) == (150, 170)
    for name, tensor in after["agent"].items():  # with tau = 1 targets are the networks
        torch.testing.assert_close(tensor, before["agent"][name.replace("_target", "")])
    for part, updates in zip(range(2), (50, 25), strict=True):  # of critic and policy, then 20, 10
        for checkpoint, count in ((before, updates), (after, updates * 7 / 5)):
            state = checkpoint["optimizers"][part]
            is_list = isinstance(state, list)
            done = math.log(state[-1], 0.999) if is_list else state[0]["step"].item()
            assert done == pytest.approx(count, rel=1e-3)
    assert (before["replay"]["position"], after["replay"]["position"]) == (150, 170)
    for mine, old in zip(*(rows(each) for each in (after, before)), strict=True):
        assert len(mine) == 170 and torch.equal(mine[:150], old)
    assert json.loads((run_dir / "config.json").read_text())["args"]["resume"] is None
    assert json.loads((run_dir / "config_150.json").read_text())["args"]["tau"] == 1.0
    assert (run_dir / "stages.json").exists() and (run_dir / "stages_150.json").exists()
    with pytest.raises(ValueError, match="^--buffer-size: the checkpoint has 5,000$"):
        train(module, **flags | {"total_timesteps": 200}, buffer_size=100)
    assert read_checkpoint(run_dir)["global_step"] == 170


def rows(checkpoint):
    """What a replay buffer saved, as tensors of one row per transition."""
    return [x for x in checkpoint["replay"].values() if isinstance(x, torch.Tensor)]


def test_what_would_train_wrongly_is_refused(module, monkeypatch, capsys):
    assert_refused(module, monkeypatch, capsys)


# Learning


@pytest.mark.slow
@pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
def test_pendulum_is_learned(module):
    """A random policy gets about -1,200 per episode of Pendulum-v1, a solved one about -150."""
    speed = {"compile": True} if module is variant else {}
    flags = {"env_id": "Pendulum-v1", "total_timesteps": 10_000, "learning_starts": 1000}
    scalars = read_scalars(module.main(module.Args(**flags, **speed)))
    returns = [value for _, value in scalars["charts/episodic_return"]]
    assert len(returns) == 50
    assert np.mean(returns[:5]) < -800, "not a task that starts unsolved"
    assert np.mean(returns[-10:]) > -250, returns
