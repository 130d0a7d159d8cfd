"""PPO on CartPole as tensors: the environment against Gymnasium's, parity, whole runs.

Losses and advantages are those that test_ppo and test_atari test, to the letter (test_shared).
"""

import atexit
import copy
import functools
import inspect
import json
import math
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, evaluation_seeds, read_checkpoint, read_scalars
from test_sac import read_run, run
from test_sac_parity import WITHOUT_OR_COMPILED, assert_hunks_are_marked, backend  # noqa: F401

from leanrl import ppo_cartpole_gpu as baseline
from leanrl import ppo_cartpole_gpu_torchcompile as variant

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
FORMS = pytest.mark.parametrize("make", [baseline.CartPole])  # other tests call these with theirs
SMALL = {"num_envs": 64, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
BASELINE, VARIANT = Path(baseline.__file__).name, Path(variant.__file__).name
LOSSES = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac explained_variance"
TAGS = {f"losses/{name}" for name in LOSSES.split()}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread, as small batches are not worth more."""
    monkeypatch.chdir(tmp_path)


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


# The environment


def random_states(count, rng):
    """Some of them about to leave the track or to fall, some already out."""
    return rng.uniform([-2.5, -3, -0.22, -3.5], [2.5, 3, 0.22, 3.5], (count, 4)).astype(np.float32)


@FORMS
def test_a_step_is_gymnasiums(make):
    """Same states and actions: next states within 1e-6, the same ends, the same rewards."""
    rng, count = np.random.default_rng(0), 2000
    states, actions = random_states(count, rng), rng.integers(0, 2, count)
    envs = make(count, CPU)
    envs.reset(seed=1)
    envs.state.copy_(torch.from_numpy(states))
    obs, rewards, terminated, truncated, infos = envs.step(torch.from_numpy(actions))
    env = gym.make("CartPole-v1").unwrapped
    ends = np.zeros(2, int)
    for i in range(count):
        env.reset(seed=0)
        env.state = states[i].astype(np.float64)
        expected, reward, ended, _, _ = env.step(int(actions[i]))
        np.testing.assert_allclose(infos["final_obs"][i], expected, atol=1e-6, rtol=1e-6)
        assert rewards[i] == reward == 1 and not truncated[i]
        limits = abs(abs(expected[0]) - 2.4), abs(abs(expected[2]) - 12 * math.pi / 180)
        assert terminated[i] == ended or min(limits) < 1e-6  # where rounding decides
        ends[int(ended)] += 1
        if not terminated[i]:
            assert torch.equal(obs[i], infos["final_obs"][i])
        else:
            assert obs[i].abs().max() <= 0.05
    assert ends.min() > 200


@FORMS
@pytest.mark.parametrize("falls", [False, True], ids=["stands", "falls"])
def test_the_limit_truncates_whether_the_pole_stands_or_falls(make, falls):
    envs = make(2, CPU)
    envs.reset(seed=1)
    envs.lengths.copy_(torch.tensor([499, 498]))
    envs.state.zero_()
    envs.state[:, 2] = 0.25 if falls else 0.0
    obs, _, terminated, truncated, infos = envs.step(torch.tensor([0, 1]))
    assert truncated.tolist() == [True, False] and terminated.tolist() == [falls, falls]
    assert infos["_final_obs"].tolist() == infos["_episode"].tolist() == [True, falls]
    assert infos["episode"]["l"].tolist() == infos["episode"]["r"].tolist() == [500, 499]
    assert envs.lengths.tolist() == [0, 0 if falls else 499]
    assert (obs[0] != infos["final_obs"][0]).any() and torch.equal(obs, envs.state)


@FORMS
def test_returns_and_lengths_are_those_of_whole_episodes(make):
    envs, generator = make(50, CPU), torch.Generator().manual_seed(0)
    envs.reset(seed=1)
    lengths, ends = np.zeros(50), 0
    for _ in range(200):
        _, _, terminated, _, infos = envs.step(torch.randint(0, 2, (50,), generator=generator))
        lengths += 1
        np.testing.assert_array_equal(infos["episode"]["r"], lengths)
        lengths[infos["_episode"].numpy()] = 0
        ends += int(terminated.sum())
    assert ends > 200


@FORMS
def test_resets_are_uniform_and_independent(make):
    """Of `reset` and of ended episodes: each variable by Kolmogorov-Smirnov, and correlations."""
    torch.manual_seed(0)
    count = 20_000
    envs = make(count, CPU)
    started, _ = envs.reset(seed=1)
    draws = [started]
    for _ in range(2):
        envs.state[:, 0] = 3.0  # off the track: all end
        draws.append(envs.step(torch.zeros(count, dtype=torch.int64))[0])
    for draw in draws:
        for variable in draw.T.numpy():
            ranks = (np.arange(count) + 0.5) / count
            distance = np.abs((np.sort(variable) + 0.05) / 0.1 - ranks).max()
            assert distance < 1.95 / math.sqrt(count)  # p = 0.001
    columns = torch.cat(draws, dim=1).numpy().T  # 12 variables, those of later steps included
    correlations = np.corrcoef(columns) - np.eye(12)
    assert np.abs(correlations).max() < 4.5 / math.sqrt(count)
    neighbours = np.corrcoef(draws[1][:-1, 0], draws[1][1:, 0])[0, 1]
    assert abs(neighbours) < 4.5 / math.sqrt(count)


@FORMS
def test_actions_of_another_count_are_refused(make):
    envs = make(3, CPU)
    envs.reset(seed=1)
    with pytest.raises(RuntimeError):
        envs.step(torch.zeros(2, dtype=torch.int64))
    one, other = make(3, CPU), make(3, CPU)
    for each in (one, other):
        each.reset(seed=1)
    actions = torch.tensor([0, 1, 1])
    assert torch.equal(one.step(actions)[0], other.step(actions.int())[0])


def test_seeds_decide_and_the_noise_that_is_given():
    """`reset` has a seed, or torch's generator; what is drawn in `step` may be drawn before."""

    def roll(seed, noise=None):
        torch.manual_seed(3)
        envs.reset(seed=seed)
        assert not envs.lengths.any()  # which the rollout before has left
        steps = range(60) if noise is None else noise
        return torch.stack([envs.step(actions, *[n] * (noise is not None))[0] for n in steps])

    envs, actions = baseline.CartPole(20, CPU), torch.zeros(20, dtype=torch.int64)
    state = envs.state
    first = roll(1)
    assert torch.equal(first, roll(1)) and not torch.equal(first, roll(2))
    torch.manual_seed(3)
    noise = torch.stack([torch.empty(20, 4).uniform_(-0.05, 0.05) for _ in range(60)])
    assert torch.equal(first, roll(1, noise)) and torch.equal(roll(None), roll(None))
    starts = (first == noise).all(dim=2)
    assert starts.sum() > 100 and envs.state is state  # all fall within 11 steps or so


def test_it_is_a_vector_environment(monkeypatch):
    """The same in both scripts; Gymnasium makes it by name, with the spaces of its own."""
    assert inspect.getsource(baseline.CartPole) == inspect.getsource(variant.CartPole)
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("CartPoleTensors-v1", vector_entry_point=baseline.CartPole)
    envs, theirs = (
        gym.make_vec("CartPoleTensors-v1", 3, device="cpu"),
        gym.make_vec("CartPole-v1", 3),
    )
    assert type(envs) is baseline.CartPole and envs.num_envs == 3
    assert isinstance(envs, gym.vector.VectorEnv)
    for name in ("single_observation_space", "observation_space", "single_action_space"):
        one, other = getattr(envs, name), getattr(theirs, name)
        assert one == other or np.allclose(one.high, other.high)
    obs, _ = envs.reset(seed=1)
    assert envs.observation_space.contains(obs.numpy()) and obs.dtype == torch.float32
    assert torch.equal(obs, baseline.CartPole(3, CPU).reset(seed=1)[0])


# Learning from it


@pytest.mark.parametrize(
    ("module", "compiled"), [(baseline, None), (variant, False)], ids=["baseline", "eager"]
)
def test_a_rollout_holds_what_happened(module, compiled, monkeypatch):
    assert_a_rollout_holds_what_happened(module, compiled, monkeypatch)


@pytest.mark.usefixtures("backend")
def test_a_compiled_rollout_holds_what_happened(monkeypatch):
    assert_a_rollout_holds_what_happened(variant, True, monkeypatch)


def assert_a_rollout_holds_what_happened(module, compiled, monkeypatch):
    """Against a step by step account, with a limit that truncates poles that others let fall."""
    monkeypatch.setattr(module.CartPole, "max_steps", 15)
    rollouts, prepare = [], module.PPO.prepare

    def watched(self, rollout):
        rollouts.append((copy.deepcopy(self.model), rollout, prepare(self, rollout)))
        return rollouts[-1][-1]

    def compile_steps(agent):  # `prepare` is watched
        agent.step = torch.compile(agent.step, fullgraph=True)

    monkeypatch.setattr(module.PPO, "prepare", watched)
    if compiled:
        monkeypatch.setattr(module, "compile_agent", compile_steps)
    flags = {"total_timesteps": 3 * 1024, "gamma": 0.9, "gae_lambda": 0.8, "num_steps": 16}
    train(module, **flags, **({} if compiled is None else {"compile": compiled}))
    assert len(rollouts) == 3
    columns = zip(*(rollout for _, rollout, _ in rollouts), strict=True)
    rollout = module.Rollout._make(torch.cat(column) for column in columns)
    finals = module.CartPole(64, CPU).dynamics(rollout.obs.flatten(0, 1), rollout.actions.flatten())
    terminated = (finals[:, 0].abs() > 2.4) | (finals[:, 2].abs() > 12 * math.pi / 180)
    terminated, finals, lengths = terminated.view(48, 64), finals.view(48, 64, 4), torch.zeros(64)
    for t in range(48):
        lengths += 1
        ended = terminated[t] | (lengths == 15)
        assert torch.equal(rollout.ended[t], ended)
        assert torch.equal(rollout.episode_returns[t], lengths)
        if t < 47:
            torch.testing.assert_close(rollout.obs[t + 1][~ended], finals[t][~ended])
            assert (rollout.obs[t + 1][ended].abs() <= 0.05).all()
        lengths[ended] = 0
    assert (rollout.ended & terminated).sum() > 40 < (rollout.ended & ~terminated).sum()
    assert rollout.rewards.eq(1).all() and 0.4 < rollout.actions.float().mean() < 0.6
    close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    for r, (model, rollout, batch) in enumerate(rollouts):
        rows = slice(16 * r, 16 * r + 16)
        with torch.no_grad():
            log_policy, values = model(rollout.obs)
            _, next_values = model(finals[rows])
        close(rollout.next_values, next_values * ~terminated[rows])
        close(rollout.values, values)
        chosen = log_policy.gather(2, rollout.actions[..., None]).squeeze(2)
        close(rollout.log_probs, chosen)
        ended, advantage = rollout.ended.double(), torch.zeros(64, dtype=torch.float64)
        deltas = rollout.rewards + 0.9 * rollout.next_values.double() - rollout.values
        for t in reversed(range(16)):
            advantage = deltas[t] + 0.9 * 0.8 * (1 - ended[t]) * advantage
            close(batch.advantages.view(16, 64)[t].double(), advantage)
        close(batch.returns, batch.advantages + batch.values)
        for name in ("obs", "actions", "log_probs", "values"):
            assert torch.equal(getattr(batch, name), getattr(rollout, name).flatten(0, 1))


@SCRIPTS
def test_main_draws_shuffles_anneals_and_logs(module, monkeypatch):
    """All noise is new, an epoch takes every step once in an order of its own, rates fall to 0."""
    noises, starts, rollouts, epochs, updates = [], [], [], [], []
    originals = {name: getattr(module.PPO, name) for name in ("act", "prepare", "learn", "update")}
    simulate = module.CartPole.step

    def act(self, obs, noise):
        found = originals["act"](self, obs, noise)
        noises.append((noise.clone(), self.model(obs)[0].detach(), found[0]))
        return found

    def step(self, actions, noise):
        starts.append(noise.clone())
        assert torch.equal(actions, noises[-1][-1])
        return simulate(self, actions, noise)

    def prepare(self, rollout):
        rollouts.append((rollout, originals["prepare"](self, rollout)))
        return rollouts[-1][-1]

    def learn(self, batch, order):
        optimizer = self.optimizer
        rate = optimizer.lr if hasattr(optimizer, "lr") else optimizer.param_groups[0]["lr"]
        epochs.append((float(rate), batch, order))
        return originals["learn"](self, batch, order)

    def update(self, batch, index):
        updates.append((index, originals["update"](self, batch, index)))
        return updates[-1][-1]

    for function in act, prepare, learn, update:
        monkeypatch.setattr(module.PPO, function.__name__, function)
    monkeypatch.setattr(module.CartPole, "step", step)
    flags = {"num_envs": 32, "num_steps": 12, "num_minibatches": 3, "learning_rate": 1e-2}
    flags |= {"seed": 7, "total_timesteps": 4 * 384 + 100}
    scalars = read_scalars(train(module, **flags))
    torch.manual_seed(7)
    model = module.PPO(module.Args(**flags), 4, 2, CPU).model
    assert torch.equal(model(rollouts[0][0].obs[0])[0], noises[0][1])

    noise, starts = torch.stack([noise for noise, *_ in noises]), torch.stack(starts)
    assert noise.shape == (48, 32, 2) and 0.9 < noise.mean() < 1.1
    assert starts.shape == (48, 32, 4) and 0.049 < starts.abs().max() <= 0.05
    assert 0.028 < starts.std() < 0.03
    for draws in noise, starts:
        assert draws.unique().numel() > 0.99 * draws.numel()
    for draws, log_policy, actions in noises:
        assert torch.equal(actions, (log_policy - draws.log()).argmax(dim=1))
    assert len(rollouts) == 4 and len(epochs) == 8
    orders = [order for *_, order in epochs]
    assert len({tuple(order.tolist()) for order in orders}) == 8
    for i, (rate, batch, order) in enumerate(epochs):
        assert rate == pytest.approx(1e-2 * (1 - i // 2 / 4)) and batch is rollouts[i // 2][1]
        assert torch.equal(order.sort().values, torch.arange(384))
    indices = torch.stack([index for index, _ in updates])
    assert torch.equal(indices, torch.stack(orders).view(24, 128))
    for r, (rollout, batch) in enumerate(rollouts):
        row = {tag: value.item() for tag, value in updates[6 * r + 5][1].items()}
        clipfracs = [metrics["losses/clipfrac"] for _, metrics in updates[6 * r : 6 * r + 6]]
        row["losses/clipfrac"] = np.mean(clipfracs)
        unexplained = (batch.returns - batch.values).var() / batch.returns.var()
        row["losses/explained_variance"] = 1 - unexplained.item()
        row["charts/learning_rate"] = 1e-2 * (1 - r / 4)
        if rollout.ended.any():
            mean = rollout.episode_returns[rollout.ended].mean().item()
            row |= {"charts/episodic_return": mean, "charts/episodic_length": mean}
        for tag, value in row.items():
            assert dict(scalars[tag])[384 * (r + 1)] == pytest.approx(value, rel=1e-4, abs=1e-6)


# Parity


def make_pair(**flags):
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**SMALL), 4, 2, CPU)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    agent = variant.PPO(variant.Args(**SMALL, **flags), 4, 2, CPU)
    agent.load_state_dict(reference.state_dict())
    return reference, agent


def run_updates(reference, agent, count, tolerance):
    """`count` minibatch updates on both, then all metrics and parameters must agree."""
    obs, actions = torch.randn(256, 4), torch.randint(0, 2, (256,))
    with torch.no_grad():
        log_policy, values = reference.model(obs)
        log_probs = log_policy.gather(1, actions[:, None]).squeeze(1)
    columns = {
        "obs": obs,
        "actions": actions,
        "log_probs": log_probs,
        "values": values,
        "advantages": torch.randn(256),
        "returns": values + torch.randn(256),
    }
    for _ in range(count):
        index = torch.randperm(256)[:64]
        found = agent.update(variant.Batch(**columns), index)
        expected = reference.update(baseline.Batch(**columns), index)
        assert len(expected) == 6
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    states = agent.state_dict(), reference.state_dict()
    torch.testing.assert_close(*states, atol=tolerance, rtol=tolerance)


def compile_agent(agent):
    torch._dynamo.reset()
    variant.compile_agent(agent)
    return agent


PIECES = [(False, 64), (False, 16), pytest.param(True, 16, marks=pytest.mark.slow)]


@SCRIPTS
def test_networks_have_two_layers_of_tanh_and_orthogonal_weights_at_first(module):
    torch.manual_seed(0)
    model, obs, found = module.ActorCritic(4, 2), torch.randn(5, 4), []
    for network, gain in ((model.actor, 0.01), (model.critic, 1.0)):
        layers = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
        for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
            singular = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular, torch.full_like(singular, scale))
            assert not layer.bias.any()
        first, second, last = (layer.weight.T for layer in layers)
        found.append(((obs @ first).tanh() @ second).tanh() @ last)
    logits, values = found
    expected = logits - logits.exp().sum(dim=1, keepdim=True).log(), values[:, 0]
    torch.testing.assert_close(model(obs), expected)


def assert_updates_are_clipped_steps_of_adam(module, agent, batches, update):
    """`update` is called with a batch and an index; Adam's numbers by hand, from `ppo_loss`.

    The gradients of the first batch are too long, those of the last one are not.
    """
    args, parameters, norms = agent.args, list(agent.parameters()), []
    limit, rate = args.max_grad_norm, args.learning_rate
    first, second = ([torch.zeros_like(x) for x in parameters] for _ in range(2))
    for step, batch in enumerate(batches, start=1):
        index = torch.randperm(len(batch.obs))[: len(batch.obs) // 2]
        loss, _ = module.ppo_loss(agent.model, type(batch)._make(x[index] for x in batch), args)
        gradients = torch.autograd.grad(loss, parameters)
        norms.append(torch.cat([x.flatten() for x in gradients]).norm().item())
        expected = []
        for parameter, gradient, m, v in zip(parameters, gradients, first, second, strict=True):
            gradient = gradient * min(1, limit / norms[-1])
            m.mul_(0.9).add_(0.1 * gradient)
            v.mul_(0.999).add_(0.001 * gradient**2)
            change = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-5)
            expected.append(parameter.detach() - rate * change)
        update(batch, index)
        found = [x.detach() for x in parameters]
        torch.testing.assert_close(found, expected, atol=2e-3 * rate, rtol=0)
    assert norms[0] > 2 * limit and norms[-1] < 0.7 * limit, norms


@SCRIPTS
def test_an_update_is_a_clipped_step_of_adam(module):
    torch.manual_seed(0)
    flags = {"learning_rate": 1e-3, "max_grad_norm": 0.1, "norm_adv": False, "ent_coef": 0.0}
    agent = module.PPO(module.Args(**flags), 4, 2, CPU)

    def batches():
        for scale in 1, 1e-3:
            obs, actions = torch.randn(64, 4), torch.randint(0, 2, (64,))
            with torch.no_grad():
                log_policy, values = agent.model(obs)
            advantages = scale * torch.randn(64)
            yield module.Batch(
                obs=obs,
                actions=actions,
                log_probs=log_policy.gather(1, actions[:, None]).squeeze(1),
                values=values,
                advantages=advantages,
                returns=values + advantages,
            )

    assert_updates_are_clipped_steps_of_adam(module, agent, batches(), agent.update)


@WITHOUT_OR_COMPILED
def test_one_update_agrees(backend):  # noqa: F811
    reference, agent = make_pair()
    run_updates(reference, compile_agent(agent) if backend else agent, 1, 1e-5)


@pytest.mark.parametrize(("compiled", "rows"), PIECES)
def test_a_hundred_updates_agree(compiled, rows, float64, monkeypatch):
    """In 4 pieces, whose advantages are normalized over all of them, as well as at once."""
    monkeypatch.setattr(variant, "CACHED_ROWS", rows)
    reference, agent = make_pair()
    run_updates(reference, compile_agent(agent) if compiled else agent, 100, 1e-9)


def test_a_minibatch_is_cut_into_as_many_equal_pieces_as_fit(monkeypatch):
    monkeypatch.setattr(variant, "CACHED_ROWS", 4)
    _, agent = make_pair()
    column = torch.arange(64.0)
    batch = variant.Batch._make(column for _ in variant.Batch._fields)
    for rows, pieces in ((3, 1), (8, 2), (14, 2), (15, 3), (37, 1)):
        found = agent.gather(batch, torch.arange(rows))
        assert len(found) == pieces
        assert torch.equal(torch.cat([piece.obs for piece in found]), column[:rows])


def test_a_wrong_update_is_noticed():
    for flag, value in (("clip_coef", 0.01), ("max_grad_norm", 0.1), ("ent_coef", 0.0)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_updates(reference, agent, 3, 1e-5)


@pytest.mark.usefixtures("backend")
def test_a_number_that_a_copy_anneals_counts_in_compiled_code():
    """Each update has another weight: it compiles once more, then the number is an input."""
    reference, agent = make_pair()
    compile_agent(agent)
    for count, ent_coef in enumerate((0.01, 0.5, 0.2, 0.1), start=1):
        for args in (reference.args, agent.args):
            args.ent_coef = ent_coef
        run_updates(reference, agent, 1, 1e-5)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == min(count + 2, 4), "gather, gradients, twice, and optimize"
    for clip_coef in (0.01, 0.5, 0.3):  # compiles for each value: torch keeps the bounds of a clamp
        for args in (reference.args, agent.args):
            args.clip_coef = clip_coef
        run_updates(reference, agent, 1, 1e-5)


@pytest.mark.filterwarnings("ignore:This module is instantiated on a machine without CUDA")
def test_a_captured_epoch_refuses_other_args():
    """A graph would go on with the numbers it was captured with."""
    _, agent = make_pair()
    variant.capture_agent(agent)
    obs, zeros = torch.randn(64, 4), torch.zeros(64)
    batch = variant.Batch(
        obs=obs,
        actions=zeros.long(),
        log_probs=zeros,
        values=zeros,
        advantages=obs[:, 0],
        returns=zeros,
    )
    assert agent.learn(batch, torch.arange(64))["losses/entropy"].shape == (2,)
    agent.args.ent_coef = 0.5
    with pytest.raises(AssertionError, match="CUDA graphs keep args"):
        agent.learn(batch, torch.arange(64))


def test_whole_runs_agree(backend, monkeypatch):  # noqa: F811
    """From flags to checkpoint: baseline, variant and compiled variant see the same episodes.

    Compiled, each function is one graph, and nothing compiles again after the first rollout.
    """
    flags, counts, learn = {"total_timesteps": 3072, "save_model": True}, [], variant.PPO.learn

    def counted(self, *arguments):
        metrics, counters = learn(self, *arguments), torch._dynamo.utils.counters
        counts.append((counters["stats"]["unique_graphs"], len(counters["graph_break"])))
        return metrics

    monkeypatch.setattr(variant.PPO, "learn", counted)
    reference = train(baseline, **flags)
    expected, scalars = read_checkpoint(reference), read_scalars(reference)
    for compiled in (False, True):
        run_dir = train(variant, **flags, compile=compiled, exp_name=str(compiled))
        found = read_checkpoint(run_dir)
        torch.testing.assert_close(found["agent"], expected["agent"], atol=1e-4, rtol=0)
        assert torch.equal(found["generators"][0], expected["generators"][0])
        series = read_scalars(run_dir)
        assert series.keys() >= TAGS
        for tag in series.keys() - {"charts/SPS", "charts/cpu_seconds", "charts/gpu_percent"}:
            atol = 0 if tag.startswith("charts") else 1e-3
            np.testing.assert_allclose(series[tag], scalars[tag], rtol=0, atol=atol, err_msg=tag)
    assert counts[:6] == [(0, 0)] * 6 and counts[6:] == [(4, 0)] * 6, counts


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


@pytest.mark.gpu
@COMPILED
def test_graphed_runs_agree_with_eager(compiled):
    """Rollouts before, at and after the capture of every graph: random numbers must go on."""
    torch._dynamo.reset()
    flags = {"total_timesteps": 1024 * 8, "save_model": True}
    eager = read_checkpoint(train(variant, **flags, exp_name="eager"))
    graphed = read_checkpoint(train(variant, **flags, cudagraphs=True, compile=compiled))
    torch.testing.assert_close(eager["agent"], graphed["agent"], atol=1e-3, rtol=0)
    assert torch.equal(eager["generators"][1], graphed["generators"][1])  # the GPU's


# Whole runs


BOTH = pytest.param({"compile": True, "cudagraphs": True}, marks=pytest.mark.slow)


@pytest.mark.parametrize("more", [None, {"cudagraphs": True}, BOTH], ids=str)
def test_run_from_end_to_end(more, tmp_path, capsys):
    """The baseline in a process of its own, the variant in this one."""
    flags = SMALL | {"total_timesteps": 9000, "eval_every": 5000, "eval_episodes": 3}
    if more is None:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        err = run(tmp_path, BASELINE, *words, "--save-model", "--capture-video").stderr
    else:
        variant.main(variant.Args(**flags, **more, save_model=True, capture_video=True))
        err = capsys.readouterr().err
        assert err.count("without CUDA it has no effect") == (not torch.cuda.is_available())
    run_dir, config, stages, values = read_run(tmp_path)
    for text in ("us/step", f"steps/s, runs/{run_dir.name}", "evaluation at 5,120: "):
        assert text in err
    assert config["args"]["env_id"] == "CartPole-v1" and config["versions"]["torch"]
    assert stages["env_steps"] == 8192 - 3 * 1024 and stages["sps_steady"] > 0
    assert stages["iterations"] == 5
    for stage in ("inference", "backpropagation"):
        assert stages["stages"][stage] > 0
    assert [step for step, _ in values["charts/eval_return"]] == [5120, 8192]
    for name in ("charts/episodic_return", "charts/episodic_length"):
        assert len(values[name]) == 8 and all(9 < value < 100 for _, value in values[name])
    rates = [value for _, value in values["charts/learning_rate"]]
    np.testing.assert_allclose(rates, 2.5e-3 * (1 - np.arange(8) / 8), rtol=1e-6)
    for tag in TAGS:
        series = [value for _, value in values[tag]]
        assert len(series) == 8 and np.isfinite(series).all() and len(set(series)) > 1
    assert [step for step, _ in values["charts/cpu_seconds"]] == [1024 * i for i in range(1, 9)]
    assert read_checkpoint(run_dir)["global_step"] == 8192
    assert len(list((run_dir / "videos").glob("*/*.mp4"))) == 2


@SCRIPTS
def test_a_resumed_run_takes_up_what_was_saved(module, monkeypatch):
    """Networks, optimizer, generators and steps; its episodes are new, and it says so."""
    flags = {"total_timesteps": 2048, "save_model": True}
    run_dir = train(module, **flags, exp_name="one")
    busy = train(module, **flags, exp_name="two", eval_every=1024, checkpoint_every=1024)
    one, two = read_checkpoint(run_dir), read_checkpoint(busy)
    torch.testing.assert_close(one["generators"], two["generators"])
    for key in ("agent", "optimizers"):  # evaluating and saving changed nothing but last bits
        torch.testing.assert_close(one[key], two[key], atol=1e-4, rtol=1e-4)
    assert [step for step, _ in read_scalars(busy)["charts/eval_return"]] == [1024, 2048]

    restored, act = [], module.PPO.act

    def acted(self, *arguments):
        state = self.optimizer.state_dict()["state"]
        restored.append(copy.deepcopy(state)) if not restored else None
        return act(self, *arguments)

    monkeypatch.setattr(module.PPO, "act", acted)
    generators, seeds, reset = [], [], module.CartPole.reset
    monkeypatch.setattr(
        module.CartPole,
        "reset",
        lambda self, seed: (
            generators.append(torch.get_rng_state()),
            seeds.append(seed),
            reset(self, seed=seed),
        )[-1],
    )
    flags |= {"total_timesteps": 4096, "learning_rate": 0.0, "resume": str(run_dir)}
    assert train(module, **flags).samefile(run_dir)
    again = read_checkpoint(run_dir)
    assert again["global_step"] == 4096 and seeds == [1 + 2048]
    assert torch.equal(generators[0], one["generators"][0])
    torch.testing.assert_close(restored, one["optimizers"], atol=0, rtol=0)
    torch.testing.assert_close(again["agent"], one["agent"], atol=0, rtol=0)  # at a rate of 0
    if module is baseline:
        steps = [state["step"].item() for state in again["optimizers"][0].values()]
        assert set(steps) == {16}  # 4 rollouts, 2 epochs, 2 minibatches
    else:
        *_, power, _ = again["optimizers"][0]
        assert power.item() == pytest.approx(0.9**16)
    assert (run_dir / "config.json").exists() and (run_dir / "stages_2048.json").exists()
    train(module, **flags)  # nothing is left to do
    assert read_checkpoint(run_dir)["global_step"] == 4096
    steps = [step for step, _ in read_scalars(run_dir)["charts/learning_rate"]]
    assert steps == [1024, 2048, 3072, 4096]


@SCRIPTS
def test_what_is_not_finite_ends_the_run_and_spares_the_checkpoint(module, monkeypatch):
    """Observations, which reach the losses through all that a rollout holds; records are kept."""
    closings = []  # of the process, which goes on here
    monkeypatch.setattr(atexit, "register", closings.append)
    run_dir = train(module, total_timesteps=1024, save_model=True)
    before, dynamics = (run_dir / "checkpoint.pt").read_bytes(), module.CartPole.dynamics
    monkeypatch.setattr(
        module.CartPole, "dynamics", lambda *arguments: dynamics(*arguments).fill_(math.nan)
    )
    flags = {"total_timesteps": 4096, "checkpoint_every": 1024, "resume": str(run_dir)}
    with pytest.raises(FloatingPointError, match="^step 2,048: losses/policy_loss is nan$"):
        train(module, **flags)
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    closings[-1]()
    assert json.loads((run_dir / "stages_1024.json").read_text())["env_steps"] == 1024


@SCRIPTS
def test_target_kl_ends_the_epochs(module):
    run_dir = train(module, total_timesteps=1024, save_model=True, target_kl=1e-9)
    saved = read_checkpoint(run_dir)["optimizers"][0]
    if module is baseline:
        assert {state["step"].item() for state in saved.values()} == {2}  # one epoch of the two
    else:
        assert saved[-2].item() == pytest.approx(0.9**2)


def balance(agent):
    """A policy that holds the pole for a while, and differently often: by -0.15 x + theta + ..."""
    with torch.no_grad():
        for parameter in agent.model.actor.parameters():
            parameter.zero_()
        first, _, second, _, last = agent.model.actor
        first.weight[0] = 0.1 * torch.tensor([-0.15, 0.0, 1.0, 0.3])
        second.weight[0, 0] = 1.0
        last.weight[:, 0] = torch.tensor([-0.1, 0.1])


@SCRIPTS
def test_evaluation_takes_the_likeliest_action_on_gymnasiums_own(module):
    """Of whole episodes, however many steps others go on, until the limit of 500."""
    torch.manual_seed(0)
    agent = module.PPO(module.Args(eval_episodes=6), 4, 2, CPU)
    balance(agent)
    state, found = torch.get_rng_state(), module.evaluate(agent, agent.args, Path("unused"))
    assert torch.equal(torch.get_rng_state(), state)
    returns = []
    for seed in evaluation_seeds(1, 6):
        env = gym.make("CartPole-v1")
        (obs, _), ended = env.reset(seed=seed), False
        returns.append(0.0)
        while not ended:
            action = agent.model.actor(torch.from_numpy(obs)).argmax().item()
            obs, reward, terminated, truncated, _ = env.step(action)
            returns[-1], ended = returns[-1] + reward, terminated or truncated
    assert found == np.mean(returns) and min(returns) < 300 and max(returns) == 500, returns


@SCRIPTS
def test_what_would_train_wrongly_is_refused(module, monkeypatch, capsys):
    """On the command line without a traceback, and before there is a run directory."""
    refused = {
        "--num-minibatches: 9 steps": {"num_envs": 3, "num_steps": 3},
        "--num-minibatches: 4 steps": {"num_envs": 2, "num_steps": 2},
        "--total-timesteps: a rollout has 131,072 steps": {"total_timesteps": 100},
        "--gamma and --gae-lambda lie": {"gamma": math.nan},
        "--gamma and --gae-lambda lie between": {"gae_lambda": 1.01},
    }
    for message, flags in refused.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            module.Args(**flags)
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        with pytest.raises(SystemExit) as end:
            module.parse_args(module.Args)
        assert end.value.code and message in capsys.readouterr().err
    assert not Path("runs").exists()


@SCRIPTS
def test_a_process_computes_as_its_flags_say(module):
    """Both scripts alike, compiled or not: the variant has no threads or precision of its own."""
    train(module, total_timesteps=1024, torch_threads=2, matmul_precision="high")
    assert torch.get_num_threads() == 2
    assert torch.get_float32_matmul_precision() == "high"
    if module is variant:
        variant.compile_agent(make_pair()[1])
    assert torch.get_num_threads() == 2
    assert torch.get_float32_matmul_precision() == "high"
    train(module, total_timesteps=1024)
    assert torch.get_num_threads() == 1
    assert torch.get_float32_matmul_precision() == "highest"


@SCRIPTS
def test_a_rollout_in_which_no_episode_ended_has_no_return(module):
    """Every number that is logged is finite, so it is left out and not written as nan."""
    flags = {"num_steps": 4, "total_timesteps": 64 * 4 * 8}  # a pole falls for 8 steps or more
    series = read_scalars(train(module, **flags))
    returns = series["charts/episodic_return"]
    assert 0 < len(returns) < len(series["losses/entropy"]) == 8 and returns[0][0] > 64 * 4
    assert np.isfinite([value for _, value in returns]).all()
    assert returns == series["charts/episodic_length"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("command", [(BASELINE,), (VARIANT, "--compile")], ids=str)
def test_cartpole_is_solved_on_gymnasiums_own(command, seed, tmp_path):
    """475 is where Gymnasium calls CartPole-v1 solved; a random policy gets about 22."""
    run(tmp_path, *command, f"--seed={seed}", "--eval-every=5000000", "--eval-episodes=100")
    _, _, _, values = read_run(tmp_path)
    assert values["charts/episodic_return"][0][1] < 60, "not a task that starts unsolved"
    assert values["charts/eval_return"][-1][1] >= 475
