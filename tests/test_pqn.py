"""PQN for Atari, both scripts: returns, optimizer, exploration, parity, what `main` does."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_games import A, FakeGames, whole_games
from helpers import CPU, read_checkpoint, read_scalars
from test_atari import assert_learned_alike
from test_sac_parity import assert_hunks_are_marked, backend  # noqa: F401

envpool = pytest.importorskip("envpool", reason="needs requirements/envpool.txt")

from leanrl import pqn_atari_envpool as baseline  # noqa: E402
from leanrl import pqn_atari_envpool_torchcompile as variant  # noqa: E402

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
STEPS, ENVS, ROLLOUTS = 20, 3, 4
SMALL = {"env_id": "Breakout-v5", "num_envs": ENVS, "num_steps": STEPS, "num_minibatches": 3}
SMALL |= {"update_epochs": 2, "seed": 7, "gamma": 0.9, "q_lambda": 0.8, "learning_rate": 1e-3}
SMALL |= {"total_timesteps": STEPS * ENVS * ROLLOUTS, "exploration_fraction": 0.5, "cuda": False}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: small batches are not worth more."""
    monkeypatch.chdir(tmp_path)


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


# Mathematics


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


def test_the_optimizer_is_pytorchs(float64):
    """From the first steps, which are not rectified, to those that are; and it can be resumed."""
    torch.manual_seed(0)
    mine = [torch.randn(3, 2), torch.randn(5)]
    theirs = [parameter.clone().requires_grad_() for parameter in mine]
    reference = torch.optim.RAdam(theirs, lr=0.01)
    optimizer = variant.RAdam(mine, lr=0.01)
    for step in range(12):
        gradients = [torch.randn_like(parameter) for parameter in mine]
        if step == 8:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = variant.RAdam(mine, lr=0.01)
            optimizer.load_state_dict(state)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        reference.step()
        optimizer.step(gradients)
        for one, other in zip(theirs, mine, strict=True):
            torch.testing.assert_close(one.detach(), other, atol=1e-7, rtol=1e-6)


@SCRIPTS
def test_exploration_decays_and_is_random(module):
    args = module.Args(num_envs=10, num_steps=4, total_timesteps=1000, exploration_fraction=0.1)
    epsilons = module.exploration(args, 40, CPU)
    assert epsilons.shape == (4, 1)
    expected = [1 - 0.99 * share for share in (0.5, 0.6, 0.7, 0.8)]
    torch.testing.assert_close(epsilons[:, 0], torch.tensor(expected))
    assert module.exploration(args, 120, CPU).unique().tolist() == [pytest.approx(0.01)]
    agent = module.PQN(module.Args(), A, CPU)
    obs = torch.randint(0, 256, (6, 4, 84, 84), dtype=torch.uint8)
    explores = torch.tensor([1, 0] * 3).bool()
    with torch.no_grad():
        best = agent.model(obs)
    others = (best.argmax(dim=1) + 1) % A
    actions, values = agent.act(obs, explores, others)
    torch.testing.assert_close(values, best.amax(dim=1))
    torch.testing.assert_close(agent.value(obs), values)
    assert torch.equal(actions == others, explores)
    assert torch.equal(actions == best.argmax(dim=1), ~explores)


# Parity


def make_batch(size):
    obs = torch.randint(0, 256, (size, 4, 84, 84), dtype=torch.uint8)
    actions = torch.randint(0, A, (size,))
    return baseline.Batch(obs=obs, actions=actions, returns=torch.randn(size))


def make_pair(**flags):
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    reference = baseline.PQN(baseline.Args(**SMALL), A, CPU)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    agent = variant.PQN(variant.Args(**SMALL, **flags), A, CPU)
    agent.load_state_dict(reference.state_dict())
    return reference, agent


def run_updates(reference, agent, count, tolerance, size=128):
    """`count` minibatch updates on both, then all metrics, parameters and moments must agree."""
    batch = make_batch(size)
    for _ in range(count):
        index = torch.randperm(size)[: size // 2]
        expected, found = (each.update(batch, index) for each in (reference, agent))
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    parameters = zip(reference.parameters(), agent.parameters(), strict=True)
    for one, other in parameters:
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)
    states = [reference.optimizer.state[parameter] for parameter in reference.parameters()]
    for name, mine in (("exp_avg", "exp_avgs"), ("exp_avg_sq", "exp_avg_sqs")):
        for state, tensor in zip(states, getattr(agent.optimizer, mine), strict=True):
            torch.testing.assert_close(state[name], tensor, atol=tolerance, rtol=0)


def test_one_update_agrees():
    for channels_last in (False, True):
        run_updates(*make_pair(channels_last=channels_last), 1, 1e-5)


def test_channels_stay_last():
    """No layer copies images to the other order: what a convolution gets and gives."""
    _, agent = make_pair(channels_last=True)
    seen = []
    for layer in agent.model.network:
        if not isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda _, args, out: seen.extend([args[0], out]))
    loss = agent.model(make_batch(3).obs).sum()
    images = [x for x in seen if x.dim() == 4]
    assert len(images) == 2 * 9 + 1  # the last is what is flattened
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in images)
    (gradient,) = torch.autograd.grad(loss, images[2])
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.usefixtures("backend")
def test_ten_compiled_updates_agree(float64):
    """Six are not rectified, four are; and acting."""
    reference, agent = make_pair(channels_last=True)
    variant.compile_agent(agent)
    inputs = make_batch(4).obs, torch.tensor([1, 0, 0, 1]).bool(), torch.tensor([3, 2, 1, 0])
    for one, other in zip(reference.act(*inputs), agent.act(*inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)
    run_updates(reference, agent, 10, 1e-7)


@SCRIPTS
def test_an_update_is_a_clipped_step_on_the_squared_error(module, float64):
    """From its definition, a transition at a time, and PyTorch's RAdam."""
    torch.manual_seed(0)
    agent = module.PQN(module.Args(learning_rate=0.01, max_grad_norm=0.5), A, CPU)
    model = copy.deepcopy(agent.model)
    batch = make_batch(12)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.01)
    for _ in range(8):
        index = torch.randperm(12)[:6]
        loss = 0.0
        for i in index.tolist():
            value = model(batch.obs[[i]])[0, batch.actions[i]]
            loss = loss + (value - batch.returns[i]) ** 2 / 6
        optimizer.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        optimizer.step()
        found = agent.update(batch, index)
        assert found["losses/td_loss"].item() == pytest.approx(loss.item())
    torch.testing.assert_close(agent.model.state_dict(), model.state_dict(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("module, flags", [(baseline, ()), (variant, (False, False))])
def test_images_become_values_as_in_the_paper(module, flags):
    """Layer by layer, from pixels between 0 and 1: each normalized, then rectified."""
    torch.manual_seed(0)
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    model = module.QNetwork(A, *flags)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        layers = [layer for layer in model.network if len(list(layer.parameters()))]
        x = (obs.double() / 255).float()
        for number, stride in ((0, 4), (2, 2), (4, 1)):
            layer, norm = layers[number : number + 2]
            x = F.conv2d(x, layer.weight, layer.bias, stride)
            x = F.layer_norm(x, x.shape[1:], norm.weight, norm.bias).relu()
        layer, norm = layers[6:]
        x = F.linear(x.flatten(1), layer.weight, layer.bias)
        x = F.layer_norm(x, (512,), norm.weight, norm.bias).relu()
        expected = F.linear(x, model.head.weight, model.head.bias)
        torch.testing.assert_close(model(obs), expected, atol=1e-4, rtol=1e-4)
        assert expected.std() > 0.1


def test_a_wrong_update_is_noticed():
    reference, agent = make_pair()
    agent.args.max_grad_norm = 0.1
    with pytest.raises(AssertionError):
        run_updates(reference, agent, 3, 1e-5)


def test_bfloat16_is_near_and_ends_before_the_head():
    reference, agent = make_pair(bf16=True, channels_last=True)
    inputs = []
    agent.model.head.register_forward_hook(lambda _, args, out: inputs.extend([args[0], out]))
    obs = make_batch(2).obs
    expected, found = reference.model(obs), agent.model(obs)
    assert [x.dtype for x in inputs] == [torch.float32] * 2 and not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


# What `main` does


@SCRIPTS
def test_main_does_what_it_says(module, monkeypatch):
    """A whole run beside the account of the games that it plays."""
    pools, acts, drawn, rollouts, epochs = [], [], [], [], []
    act, prepare, learn = module.PQN.act, module.PQN.prepare, module.PQN.learn

    def make(*arguments, **options):
        pools.append(FakeGames(*arguments, **options))
        return pools[-1]

    def watched_act(self, obs, explores, random_actions):
        found = act(self, obs, explores, random_actions)
        acts.append((len(obs), explores.clone(), found[0].clone()))
        if len(obs) == ENVS:
            drawn.append(random_actions.clone())
        return found

    def watched_prepare(self, rollout, last_values):
        batch = prepare(self, rollout, last_values)
        copies = {name: x.clone() for name, x in vars(rollout).items()}
        rollouts.append((copy.deepcopy(self), copies, last_values.clone(), batch))
        return batch

    def watched_learn(self, batch, order):
        rate = self.optimizer.lr if module is variant else self.optimizer.param_groups[0]["lr"]
        epochs.append((float(rate), batch, order.tolist()))
        return learn(self, batch, order)

    monkeypatch.setattr(envpool, "make_gymnasium", make)
    monkeypatch.setattr(module.PQN, "learn", watched_learn)
    monkeypatch.setattr(module.PQN, "act", watched_act)
    monkeypatch.setattr(module.PQN, "prepare", watched_prepare)
    rows = read_scalars(train(module, eval_every=2 * STEPS * ENVS, eval_episodes=5))
    pool, *evaluations = pools

    def column(name, part):
        values = [[getattr(step, name) for step in steps[part]] for steps in pool.played]
        return torch.from_numpy(np.swapaxes(np.array(values), 0, 1))

    assert len(rollouts) == ROLLOUTS
    for r, (agent, rollout, last_values, batch) in enumerate(rollouts):
        part = slice(STEPS * r, STEPS * (r + 1))
        terminated, truncated = column("terminated", part), column("truncated", part)
        assert terminated.any() and truncated.any()
        values = agent.value(column("obs", part).flatten(0, 1)).view(STEPS, ENVS)
        finals = agent.value(column("final_obs", part).flatten(0, 1)).view(STEPS, ENVS)
        following = torch.cat([values[1:], last_values[None]])
        following = torch.where(truncated, finals, following) * ~terminated
        ended = (terminated | truncated).float()
        inputs = (column("reward", part).numpy(), following.numpy(), ended.numpy())
        expected = weighted_returns(*(x.astype(float) for x in inputs), 0.9, 0.8)
        found = batch.returns.view(STEPS, ENVS)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(rollout["obs"], column("obs", part))
        assert torch.equal(rollout["actions"], column("action", part))
        torch.testing.assert_close(rollout["values"], values, atol=1e-5, rtol=1e-5)
    explored = torch.stack([explores for count, explores, _ in acts if count == ENVS])
    assert explored[:10].float().mean() > 0.7 and explored[40:].float().mean() < 0.15
    drawn = torch.stack(drawn)
    assert (drawn[1:] == drawn[:-1]).all(dim=1).float().mean() < 0.2, "each step draws its own"
    explored = torch.stack([explores for count, explores, _ in acts if count == 5])
    assert explored.float().mean() < 0.1, "evaluations explore with end_e"
    assert len(epochs) == 2 * ROLLOUTS == len({tuple(order) for *_, order in epochs})
    for i, (rate, batch, order) in enumerate(epochs):
        assert rate == pytest.approx(1e-3 * (1 - i // 2 / ROLLOUTS))
        assert batch is rollouts[i // 2][3] and sorted(order) == list(range(STEPS * ENVS))
    steps = [STEPS * ENVS * (r + 1) for r in range(ROLLOUTS)]
    rates = [(step, pytest.approx(1e-3 * (1 - r / ROLLOUTS))) for r, step in enumerate(steps)]
    assert rows["charts/learning_rate"] == rates
    epsilons = [pytest.approx(value, abs=1e-6) for value in (0.505, 0.01, 0.01, 0.01)]
    assert [value for _, value in rows["charts/epsilon"]] == epsilons
    assert {"losses/td_loss", "losses/q_values"} <= set(rows)
    expected = sorted(((t + 1) * ENVS, score) for t, score, _ in whole_games(pool))
    assert sorted(rows["charts/episodic_return"]) == expected
    means = []
    for games in evaluations:
        assert games.episodic_life and not games.reward_clip and games.closed
        scores = []
        for played in games.played:
            length = 1 + [step.whole for step in played].index(True)
            scores.append(sum(step.score for step in played[:length]))
        means.append(pytest.approx(np.mean(scores)))
    assert [value for _, value in rows["charts/eval_return"]] == means and len(means) == 2


@SCRIPTS
def test_minibatches_may_be_single_steps_and_have_to_be_equal(module):
    flags = {"num_steps": 2, "total_timesteps": 2 * ENVS}
    rows = read_scalars(train(module, **flags, num_minibatches=2 * ENVS))
    assert len(rows["losses/td_loss"]) == 1
    refused = {
        f"--num-minibatches: {2 * ENVS} steps": {"num_minibatches": 4},
        f"--total-timesteps: a rollout has {2 * ENVS} steps": {"total_timesteps": 2 * ENVS - 1},
        "--gamma and --q-lambda lie between": {"q_lambda": 1.5},
    }
    for message, more in refused.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            module.Args(**SMALL | flags | more)


def test_whole_runs_agree_and_go_on(backend):  # noqa: F811
    """Both `main`s on one seed, the variant eager and compiled, to the end and in two parts."""
    found = []
    for module, more in (baseline, {}), (variant, {}), (variant, {"compile": True}):
        run_dir = train(module, save_model=True, exp_name=str(len(found)), **more)
        found.append((read_checkpoint(run_dir), read_scalars(run_dir)))
    (expected, rows), *others = found
    for checkpoint, its_rows in others:
        assert its_rows.keys() == rows.keys()
        for tag in ("losses/td_loss", "losses/q_values", "charts/epsilon"):
            np.testing.assert_allclose(its_rows[tag], rows[tag], rtol=2e-2, atol=1e-3, err_msg=tag)
        for name, x in expected["agent"].items():
            assert (x - checkpoint["agent"][name]).abs().mean() < 1e-4, name
    for module in (baseline, variant):
        half = STEPS * ENVS * 2
        part = train(module, total_timesteps=half, save_model=True, exp_name="part")
        before = read_checkpoint(part)
        flags = SMALL | {"total_timesteps": 2 * half}
        assert module.main(module.Args(**flags, save_model=True, resume=str(part))) == part
        after = read_checkpoint(part)
        assert after["global_step"] == 2 * half > before["global_step"]


@SCRIPTS
def test_a_resumed_run_takes_up_what_was_saved(module, monkeypatch):
    """Weights and the optimizer's state, and games that have not been played."""
    pools, restored = [], []
    act = module.PQN.act

    def make(*arguments, **options):
        pools.append(FakeGames(*arguments, **options))
        return pools[-1]

    def acted(self, *inputs):
        states = [each.state_dict()["state"] for each in self.optimizers]
        restored.append(copy.deepcopy((dict(self.state_dict()), states)))
        return act(self, *inputs)

    monkeypatch.setattr(envpool, "make_gymnasium", make)
    half = STEPS * ENVS * 2
    part = train(module, total_timesteps=half, save_model=True)
    before = read_checkpoint(part)
    monkeypatch.setattr(module.PQN, "act", acted)
    train(module, total_timesteps=2 * half, resume=str(part))
    expected = dict(before["agent"]), before["optimizers"]
    torch.testing.assert_close(restored[0], expected, atol=0, rtol=0)
    assert pools[0].made["seed"] == 7 and pools[-1].made["seed"] == 7 + half


@pytest.mark.gpu
def test_graphed_runs_agree_with_eager():
    """Rollouts before, at and after the capture of every graph."""
    flags = {"save_model": True, "total_timesteps": STEPS * ENVS * 5, "cuda": True}
    still = flags | {"learning_rate": 0.0}
    start = read_checkpoint(train(variant, **still, exp_name="start"))["agent"]
    eager = read_checkpoint(train(variant, **flags, exp_name="eager"))["agent"]
    for compiled in (False, True):
        name = f"graphed-{compiled}"
        graphed = train(variant, **flags, cudagraphs=True, compile=compiled, exp_name=name)
        assert_learned_alike(start, eager, read_checkpoint(graphed)["agent"])
