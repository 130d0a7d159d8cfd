"""What the `main` of on-policy scripts does, watched in one run of each, and their updates."""

import copy
import importlib.util
import math
import re
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_games import A, FakeGames, Played, whole_games
from helpers import CPU, note, read_checkpoint, read_scalars
from pairs import PAIRS

T, ROLLOUTS, EPOCHS, MINIBATCHES = 20, 4, 2, 3  # T steps of N environments in a rollout
N = {"atari": 3, "cartpole": 66}
UPDATES = EPOCHS * MINIBATCHES
LIMIT = 15  # steps of an episode of CartPole
EPISODES = 5  # of an evaluation
SEED, RATE, GAMMA, LAMBDA = 7, 1e-3, 0.9, 0.8
SCRIPTS = ["ppo_cartpole_gpu", "ppo_atari_envpool", "ppo_atari_envpool_multigpu"]
SCRIPTS += ["pqn_atari_envpool"]
SCRIPTS = [script + kind for script in SCRIPTS for kind in ("", "_torchcompile")]
SCRIPTS.append("ppo_continuous_action")  # its variant learns from arrays, and alike: test_parity
MISSING = importlib.util.find_spec("envpool") is None
ENVPOOL = pytest.mark.skipif(MISSING, reason="needs requirements/envpool.txt")
close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-5)
pytestmark = pytest.mark.usefixtures("one_thread")


def each(pattern="", name="seen"):
    """A test for each script whose name begins so; `seen` is one run of it for all tests."""
    found = [script for script in SCRIPTS if re.match(pattern, script)]
    return pytest.mark.parametrize(name, found, indirect=True)


def load(script):
    if "atari" in script:
        pytest.importorskip("envpool", reason="needs requirements/envpool.txt")
    return importlib.import_module(f"leanrl.{script}")


@pytest.fixture
def module(request):
    return load(request.param)


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    return watch(load(request.param), tmp_path_factory.mktemp("runs"))


def watch(module, folder, rollouts=ROLLOUTS, **more) -> SimpleNamespace:
    """Lets `main` run, on FakeGames if it plays any; evaluations must change nothing."""
    num_envs = N["cartpole" if hasattr(module, "CartPole") else "atari"]
    size = T * num_envs
    flags = {"num_steps": T, "num_envs": num_envs, "total_timesteps": size * rollouts, "seed": SEED}
    flags |= {"num_minibatches": MINIBATCHES, "update_epochs": EPOCHS, "learning_rate": RATE}
    flags |= {"gamma": GAMMA, "eval_every": 2 * size, "eval_episodes": EPISODES}
    flags |= {"save_model": True, "cuda": False}
    if "continuous" in module.__name__:
        flags["env_id"] = "Named-v0"
    if hasattr(module, "PPO"):
        flags |= {"gae_lambda": LAMBDA, "clip_coef": 0.01}
    else:
        flags |= {"q_lambda": LAMBDA, "exploration_fraction": 0.5}
    agent = getattr(module, "PPO", None) or module.PQN
    seen = SimpleNamespace(module=module, agent=agent, size=size, args=module.Args(**flags | more))
    seen.pools = []  # FakeGames: those of training, a variant's in two halves, then of evaluations
    seen.acts = []  # observations, draws, actions
    seen.steps = []  # CartPole's actions and starts
    seen.returned = []  # by `reset` and `step` of other environments
    seen.generators = []  # states when `main` asks for the first observations
    seen.learned = []  # model, rollout, batch; and the batch itself
    seen.epochs = []  # learning rate, batch, order
    seen.updates = []  # index, metrics

    def acted(found, agent, obs, *draws):
        seen.acts.append((obs.clone(), [draw.clone() for draw in draws], found[0].clone()))

    def returned(found, envs, *_, **__):
        if envs.num_envs != EPISODES:
            seen.gammas = envs.get_attr("gamma")
            seen.returned.append(found)

    def prepared(batch, agent, rollout, *_):
        if not seen.learned:
            states = [each.state_dict()["state"] for each in agent.optimizers]
            seen.begun = copy.deepcopy((dict(agent.state_dict()), states))
        copies = copy.deepcopy({"model": agent.model, "rollout": rollout, "batch": batch})
        seen.learned.append(SimpleNamespace(**copies, original=batch))

    def learned(_, agent, batch, *rest):
        optimizer = agent.optimizer
        rate = optimizer.lr if hasattr(optimizer, "lr") else optimizer.param_groups[0]["lr"]
        seen.epochs.append((float(rate), batch, rest[-1].flatten()))

    def updated(metrics, agent, batch, index, *_):
        seen.updates.append((index, {tag: x.item() for tag, x in metrics.items()}))

    def evaluate(agent, *rest):
        before = torch.get_rng_state(), copy.deepcopy(agent.state_dict())
        found = original_evaluate(agent, *rest)
        after = torch.get_rng_state(), agent.state_dict()
        torch.testing.assert_close(after, before, atol=0, rtol=0)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if hasattr(module, "CartPole"):
            patch.setattr(module.CartPole, "max_steps", LIMIT)
            note(patch, module.CartPole, "step", lambda _, envs, *rest: seen.steps.append(rest))
            seen.sizes = 4, 2
        elif not hasattr(module, "envpool"):
            note(patch, gym.vector.SyncVectorEnv, "reset", returned)
            note(patch, gym.vector.SyncVectorEnv, "step", returned)
            seen.sizes = 3, 2
        else:
            seen.sizes = (A,)
            patch.setattr(module.envpool, "make_gymnasium", FakeGames)
            note(
                patch,
                module.envpool,
                "make_gymnasium",
                lambda pool, *_, **__: seen.pools.append(pool),
            )
        envs = getattr(module, "CartPole", FakeGames)
        note(patch, envs, "reset", lambda *_, **__: seen.generators.append(torch.get_rng_state()))
        note(patch, agent, "act", acted)
        note(patch, agent, "prepare", prepared)
        note(patch, agent, "learn", learned)
        note(patch, agent, "update", updated)
        original_evaluate = module.evaluate
        patch.setattr(module, "evaluate", evaluate)
        try:
            seen.run_dir = module.main(seen.args).absolute()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    seen.rows, seen.checkpoint = read_scalars(seen.run_dir), read_checkpoint(seen.run_dir)
    return seen


# Rollouts


def simulated(seen) -> dict:
    """CartPole's steps, given what was drawn."""
    envs, rows, lengths = seen.module.CartPole(N["cartpole"], CPU), [], torch.zeros(N["cartpole"])
    obs, _ = envs.reset(seed=SEED)
    for actions, starts in seen.steps:
        final_obs = envs.dynamics(obs, actions)
        terminated = (final_obs[:, 0].abs() > 2.4) | (final_obs[:, 2].abs() > math.radians(12))
        lengths += 1
        row = {
            "obs": obs,
            "action": actions,
            "reward": torch.ones_like(lengths),
            "terminated": terminated,
            "truncated": (lengths == LIMIT) & ~terminated,
            "final_obs": final_obs,
            "length": lengths.clone(),
        }
        rows.append(row)
        ended = terminated | row["truncated"]
        obs = torch.where(ended[:, None], starts, final_obs)
        lengths[ended] = 0
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def normalized(seen) -> dict:
    """What vectors of environments have returned, given what was done."""
    (obs, _), *steps = seen.returned
    rows = []
    for next_obs, rewards, terminated, truncated, infos in steps:
        final_obs = next_obs.copy()
        for n in np.flatnonzero(terminated | truncated):
            final_obs[n] = infos["final_obs"][n]
        rows.append((obs, rewards.astype(np.float32), terminated, truncated, final_obs))
        obs = next_obs
    names = "obs", "reward", "terminated", "truncated", "final_obs"
    columns = zip(*rows, strict=True)
    found = {name: torch.tensor(np.array(x)) for name, x in zip(names, columns, strict=True)}
    return found | {"action": torch.stack([actions for _, _, actions in seen.acts])}


def games_of_training(seen) -> list:
    """What was played in each of them."""
    return [game for pool in seen.pools if pool.reward_clip for game in pool.played]


def evaluated(seen) -> list[FakeGames]:
    """A pool per evaluation."""
    return [pool for pool in seen.pools if not pool.reward_clip]


def acts_of_training(seen) -> list[tuple]:
    """Observations, draws and actions of all environments, whose halves may have acted apart."""
    found = []
    for obs, draws, actions in seen.acts:
        if len(obs) == EPISODES:
            continue
        if found and len(found[-1][0]) < seen.args.num_envs:
            before = found.pop()
            obs = torch.cat([before[0], obs])
            draws = [torch.cat(pair) for pair in zip(before[1], draws, strict=True)]
            actions = torch.cat([before[2], actions])
        found.append((obs, draws, actions))
    return found


def played(seen) -> list[SimpleNamespace]:
    """What happened in each rollout, (T, N, ...); `final_obs` follows, before any reset."""
    if seen.pools:
        games = games_of_training(seen)
        rows = {}
        for name in Played._fields:
            row = np.array([[getattr(step, name) for step in game] for game in games])
            rows[name] = torch.from_numpy(row.swapaxes(0, 1))
    else:
        rows = simulated(seen) if seen.steps else normalized(seen)
    parts = {name: row.split(T) for name, row in rows.items()}
    return [SimpleNamespace(**{name: parts[name][r] for name in parts}) for r in range(ROLLOUTS)]


def rollouts(seen) -> zip:
    """What was learned from, and what happened."""
    return zip(seen.learned, played(seen), strict=True)


def value(model, obs) -> torch.Tensor:
    """(T, N, ...) -> (T, N)."""
    with torch.no_grad():
        found = model(obs.flatten(0, 1))
    values = found[-1] if isinstance(found, tuple) else found.amax(dim=1)
    return values.view(obs.shape[:2])


def following(model, steps) -> torch.Tensor:
    """Values of what follows each step in its own episode."""
    return value(model, steps.final_obs) * ~steps.terminated


def discounted(x, ended, factor) -> torch.Tensor:
    """y[t] = x[t] + factor y[t + 1], where the episode goes on."""
    found, weights = x.clone(), factor * ~ended
    for t in reversed(range(len(x) - 1)):
        found[t] += weights[t] * found[t + 1]
    return found


@each()
def test_the_seed_decides_the_weights(seen):
    torch.manual_seed(SEED)
    model = seen.agent(seen.args, *seen.sizes, CPU).model
    close(seen.learned[0].model.state_dict(), model.state_dict())


@each()
def test_a_rollout_holds_what_happened(seen):
    for learned, steps in rollouts(seen):
        rollout = learned.rollout
        assert torch.equal(rollout.obs, steps.obs)
        assert torch.equal(rollout.actions, steps.action)
        assert torch.equal(rollout.rewards, steps.reward)
        assert torch.equal(rollout.ended.bool(), steps.terminated | steps.truncated)
        assert steps.terminated.any() and steps.truncated.any()
        close(rollout.values, value(learned.model, steps.obs))
        for name in {"obs", "actions", "log_probs", "values"} & set(learned.batch._fields):
            assert torch.equal(getattr(learned.batch, name), getattr(rollout, name).flatten(0, 1))


@each("ppo_(atari|cartpole)")
def test_actions_are_draws_from_the_policy(seen):
    """With exponential noise q, the largest p / q; noise is new in each step."""
    noise = torch.stack([noise for _, (noise,), _ in acts_of_training(seen)])
    assert noise.unique().numel() > 0.99 * noise.numel() and 0.8 < noise.mean() < 1.2
    for (learned, steps), draws in zip(rollouts(seen), noise.split(T), strict=True):
        with torch.no_grad():
            log_policy, _ = learned.model(steps.obs.flatten(0, 1))
        log_policy = log_policy.view(draws.shape)
        assert torch.equal(steps.action, (log_policy.exp() / draws).argmax(dim=2))
        log_probs = log_policy.gather(2, steps.action[..., None]).squeeze(2)
        close(learned.rollout.log_probs, log_probs)


@each("ppo_continuous")
def test_actions_are_gaussian(seen):
    """Around the mean, with noise that is new in each step; normalized by the flag's gamma."""
    assert seen.gammas == (GAMMA,) * N["atari"]
    noise = torch.stack([noise for _, (noise,), _ in seen.acts])
    assert noise.unique().numel() > 0.99 * noise.numel()
    assert abs(noise.mean()) < 0.2 and abs(noise.std() - 1) < 0.15
    for (learned, steps), draws in zip(rollouts(seen), noise.split(T), strict=True):
        mean, log_std, _ = learned.model(steps.obs)
        close(steps.action, mean + log_std.exp() * draws)
        normal = torch.distributions.Normal(mean, log_std.exp())
        close(learned.rollout.log_probs, normal.log_prob(steps.action).sum(dim=2))


@each("pqn")
def test_actions_are_the_best_or_random(seen):
    acts = acts_of_training(seen)
    explored, drawn = (torch.stack(x) for x in zip(*(draws for _, draws, _ in acts), strict=True))
    for (learned, steps), explores, actions in zip(
        rollouts(seen), explored.split(T), drawn.split(T), strict=True
    ):
        with torch.no_grad():
            best = learned.model(steps.obs.flatten(0, 1)).argmax(dim=1).view(T, -1)
        assert torch.equal(steps.action, torch.where(explores, actions, best))
    assert explored[:10].float().mean() > 0.7 and explored[40:].float().mean() < 0.15
    assert (drawn[1:] == drawn[:-1]).all(dim=1).float().mean() < 0.2, "each step draws its own"
    epsilons = [pytest.approx(value, abs=1e-6) for value in (0.505, 0.01, 0.01, 0.01)]
    assert [value for _, value in seen.rows["charts/epsilon"]] == epsilons
    in_evaluations = [draws[0] for obs, draws, _ in seen.acts if len(obs) == EPISODES]
    assert torch.stack(in_evaluations).float().mean() < 0.1, "they explore with end_e"


@each("ppo")
def test_advantages_are_of_the_own_episode(seen):
    """Only a truncation bootstraps."""
    for learned, steps in rollouts(seen):
        values = learned.rollout.values
        deltas = steps.reward + GAMMA * following(learned.model, steps) - values
        ended = steps.terminated | steps.truncated
        advantages = discounted(deltas, ended, GAMMA * LAMBDA)
        close(learned.batch.advantages, advantages.flatten())
        close(learned.batch.returns, (advantages + values).flatten())


@each("pqn")
def test_returns_are_of_the_own_episode(seen):
    for learned, steps in rollouts(seen):
        inputs = steps.reward, following(learned.model, steps), learned.rollout.ended
        returns = seen.module.lambda_returns(*inputs, GAMMA, LAMBDA)
        close(learned.batch.returns, returns.flatten())


@each("ppo_cartpole")
def test_starts_are_new_and_uniform(seen):
    starts = torch.stack([starts for _, starts in seen.steps])
    assert 0.049 < starts.abs().max() <= 0.05 and 0.028 < starts.std() < 0.03
    assert starts.unique().numel() > 0.99 * starts.numel()


# Learning and records


@each()
def test_epochs_shuffle(seen):
    """Each takes every step of the last rollout once, in an order of its own."""
    orders = [order for *_, order in seen.epochs]
    assert len({tuple(order.tolist()) for order in orders}) == len(orders) == EPOCHS * ROLLOUTS
    for i, (_, batch, order) in enumerate(seen.epochs):
        assert batch is seen.learned[i // EPOCHS].original
        assert torch.equal(order.sort().values, torch.arange(seen.size))
    indices = torch.stack([index for index, _ in seen.updates])
    assert torch.equal(indices, torch.stack(orders).view(-1, seen.size // MINIBATCHES))


@each()
def test_rates_fall(seen):
    expected = [pytest.approx(RATE * (1 - r / ROLLOUTS)) for r in range(ROLLOUTS)]
    assert [value for _, value in seen.rows["charts/learning_rate"]] == expected
    for epoch in range(EPOCHS):
        assert [rate for rate, *_ in seen.epochs[epoch::EPOCHS]] == expected


@each("ppo_continuous", "module")
def test_rates_stay_where_they_are_not_annealed(module, tmp_path):
    seen = watch(module, tmp_path, rollouts=2, eval_every=0, anneal_lr=False)
    assert {rate for rate, *_ in seen.epochs} == {RATE}


@each("ppo")
def test_losses_are_logged(seen):
    """As in CleanRL: the last update's, but clipfrac's mean."""
    metrics = [row for _, row in seen.updates]
    clipfracs = np.reshape([row["losses/clipfrac"] for row in metrics], (ROLLOUTS, -1))
    assert len(set(clipfracs[0])) > 1
    for r, learned in enumerate(seen.learned):
        returns = learned.batch.returns
        unexplained = (returns - learned.batch.values).var() / returns.var()
        expected = metrics[UPDATES * (r + 1) - 1] | {
            "losses/clipfrac": clipfracs[r].mean(),
            "losses/explained_variance": 1 - unexplained.item(),
        }
        assert len(expected) == 7
        for tag, number in expected.items():
            row = seen.size * (r + 1), pytest.approx(number, rel=1e-4, abs=1e-5)
            assert seen.rows[tag][r] == row, tag


@each("pqn")
def test_the_last_loss_is_logged(seen):
    for tag in ("losses/td_loss", "losses/q_values"):
        last = [row[tag] for _, row in seen.updates[UPDATES - 1 :: UPDATES]]
        assert [number for _, number in seen.rows[tag]] == pytest.approx(last)


@each(".*atari")
def test_whole_games_are_logged(seen):
    games = whole_games(games_of_training(seen))
    for tag, which in ("return", 1), ("length", 2):
        expected = sorted(((game[0] + 1) * N["atari"], game[which]) for game in games)
        assert sorted(seen.rows[f"charts/episodic_{tag}"]) == expected


@each("ppo_cartpole")
def test_mean_returns_are_logged(seen):
    for r, (_, steps) in enumerate(rollouts(seen)):
        mean = steps.length[steps.terminated | steps.truncated].mean().item()
        for tag in ("charts/episodic_return", "charts/episodic_length"):
            assert seen.rows[tag][r] == (seen.size * (r + 1), pytest.approx(mean))


@each("ppo_cartpole", "module")
def test_no_episode_no_return(module, tmp_path):
    """Every number that is logged is finite, so it is left out and not written as nan."""
    flags = {"num_steps": 4, "total_timesteps": 4 * N["cartpole"] * 6, "eval_every": 0}
    rows = watch(module, tmp_path, **flags).rows
    returns = rows["charts/episodic_return"]
    assert 0 < len(returns) < len(rows["losses/entropy"]) == 6
    assert all(math.isfinite(value) for _, value in returns)


@each(".*atari")
def test_games_are_those_of_the_paper(seen):
    """A lost life ends an episode of learning; scores are of whole games, not of training's."""
    asked = {"env_id": "Breakout-v5", "episodic_life": True}
    training = [pool.made for pool in seen.pools if pool.reward_clip]
    assert sum(made["num_envs"] for made in training) == N["atari"]
    seed = SEED  # of the first game; game i has seed + i
    for made in training:
        num_envs = made["num_envs"]
        assert made == asked | {"num_envs": num_envs, "seed": seed, "reward_clip": True}
        seed += num_envs
    asked |= {"num_envs": EPISODES, "reward_clip": False}
    evaluations = [pool.made for pool in evaluated(seen)]
    for made in evaluations:
        assert made == asked | {"seed": evaluations[0]["seed"], "render_mode": "rgb_array"}
        assert made["seed"] > 10**6


@each(".*atari")
def test_evaluations_are_of_whole_games(seen):
    """Of the first game in each environment, to its end and no further."""
    pools = evaluated(seen)
    acts, scores = [act for act in seen.acts if len(act[0]) == EPISODES], []
    for pool in pools:
        assert pool.closed
        ends = [[step.whole for step in game].index(True) + 1 for game in pool.played]
        assert min(ends) * 4 < max(ends) == min(map(len, pool.played))
        games = zip(pool.played, ends, strict=True)
        scores.append(np.mean([sum(x.score for x in game[:end]) for game, end in games]))
        for t in range(max(ends)):
            obs, _, actions = acts.pop(0)
            np.testing.assert_array_equal(obs, [game[t].obs for game in pool.played])
            assert actions.tolist() == [game[t].action for game in pool.played]
    assert not acts and len(pools) == 2
    expected = [(2 * seen.size * (i + 1), pytest.approx(score)) for i, score in enumerate(scores)]
    assert seen.rows["charts/eval_return"] == expected


@each("ppo_atari")
def test_evaluations_draw_new_noise(seen):
    noise = torch.stack([draws[0] for obs, draws, _ in seen.acts if len(obs) == EPISODES])
    first = noise[: len(evaluated(seen)[0].played[0])]
    assert first.unique().numel() > 0.99 * first.numel() and 0.6 < first.mean() < 1.4


@each(".*multigpu", "module")
def test_a_resumed_run_goes_on(module, tmp_path):
    """With weights, the optimizer's state and the generator's; games that have not been played."""
    before = watch(module, tmp_path, rollouts=1, eval_every=0)
    seen = watch(module, tmp_path, rollouts=2, eval_every=0, resume=str(before.run_dir))
    assert seen.run_dir == before.run_dir and seen.checkpoint["global_step"] == 2 * seen.size
    assert seen.pools[0].made["seed"] == SEED + seen.size
    saved = dict(before.checkpoint["agent"]), before.checkpoint["optimizers"]
    torch.testing.assert_close(seen.begun, saved, atol=0, rtol=0)
    assert torch.equal(seen.generators[0], before.checkpoint["generators"]["cpu"])
    assert [rate for rate, *_ in seen.epochs] == [pytest.approx(RATE / 2)] * EPOCHS


@each("ppo_(atari_envpool|cartpole_gpu|continuous_action)(_torchcompile)?$", "module")
def test_target_kl_is_of_the_last_minibatch(module, tmp_path, monkeypatch):
    learn = module.PPO.learn
    kls = [torch.tensor(row) for row in ([0.9, 0.25], [0.0, 0.3], [0.0, 0.0])]

    def diverge(agent, batch, order):
        return learn(agent, batch, order) | {"losses/approx_kl": kls.pop(0)}

    monkeypatch.setattr(module.PPO, "learn", diverge)
    watch(module, tmp_path, rollouts=1, eval_every=0, target_kl=0.25, update_epochs=3)
    assert len(kls) == 1


# Updates


def ppo_loss(module, model, batch, args) -> torch.Tensor:
    return module.ppo_loss(model, batch, args)[0]


def squared_error(module, model, batch, args) -> torch.Tensor:
    values = model(batch.obs)[torch.arange(len(batch.obs)), batch.actions]
    return (values - batch.returns).square().mean()


@pytest.mark.parametrize("limit", [0.003, 1e3], ids=["clipped", "whole"])
@pytest.mark.parametrize(
    ("name", "loss", "optimizer"),
    [
        ("ppo", ppo_loss, partial(torch.optim.Adam, eps=1e-5)),
        ("ppo_cartpole", ppo_loss, partial(torch.optim.Adam, eps=1e-5)),
        pytest.param("ppo_atari", ppo_loss, partial(torch.optim.Adam, eps=1e-5), marks=ENVPOOL),
        pytest.param("pqn_atari", squared_error, torch.optim.RAdam, marks=ENVPOOL),
    ],
)
def test_updates_are_clipped_steps(name, loss, optimizer, limit, float64):
    """Of PyTorch's optimizer, by the gradients of the loss. A variant's agree with them."""
    pair = PAIRS[name]
    agent = pair.make(pair.baseline, max_grad_norm=limit)
    args, model = agent.args, copy.deepcopy(agent.model)
    theirs = optimizer(model.parameters(), lr=args.learning_rate)
    for _ in range(4):  # RAdam's first five steps are not rectified
        batch, order = pair.draw(pair, agent, CPU)
        for index in order.view(args.num_minibatches, -1):
            theirs.zero_grad()
            loss(pair.baseline, model, batch._make(x[index] for x in batch), args).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            assert (norm > limit) == (limit < 1)
            theirs.step()
        agent.learn(batch, order)
        close(agent.model.state_dict(), model.state_dict(), atol=1e-7, rtol=0)
