"""PPO for Atari, both scripts: games, what `main` does, mathematics, parity, runs, bad input."""

import atexit
import copy
import functools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_games import A, FakeGames, whole_games
from helpers import CPU, read_checkpoint, read_scalars
from test_cartpole import assert_updates_are_clipped_steps_of_adam
from test_sac import read_run, run
from test_sac_parity import assert_hunks_are_marked, backend  # noqa: F401

envpool = pytest.importorskip("envpool", reason="needs requirements/envpool.txt")

from leanrl import ppo_atari_envpool as baseline  # noqa: E402
from leanrl import ppo_atari_envpool_torchcompile as variant  # noqa: E402

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
SMALL = {"env_id": "Breakout-v5", "num_envs": 4, "num_steps": 32, "num_minibatches": 2}
TRAINING = {"episodic_life": True, "reward_clip": True}
LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: small batches are not worth more."""
    monkeypatch.chdir(tmp_path)


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


# The environments of the scripts


def test_a_game_is_scored_whole_and_episodes_reset_in_their_last_step():
    """Against EnvPool itself, one game at a time, reset in the step after: game i has seed + i."""
    options = {"episodic_life": True, "reward_clip": True, "max_episode_steps": 150}
    envs = baseline.AtariEnvs("Breakout-v5", 4, 1, **options)
    make = functools.partial(envpool.make_gymnasium, "Breakout-v5", num_envs=1, **options)
    pools = [make(seed=1 + i) for i in range(4)]
    rng, scores, lengths = np.random.default_rng(0), np.zeros(4), np.zeros(4)
    obs, expected = envs.pool.reset()[0], np.concatenate([pool.reset()[0] for pool in pools])
    np.testing.assert_array_equal(obs, expected)
    lives = games = limits = 0
    for _ in range(220):
        actions = rng.integers(0, A, 4)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        over = []
        for i, pool in enumerate(pools):
            last, reward, done, limit, info = pool.step(actions[i : i + 1])
            scores[i], lengths[i] = scores[i] + info["reward"][0], lengths[i] + 1
            assert (reward, done, limit) == (rewards[i], terminated[i], truncated[i])
            np.testing.assert_array_equal(infos["final_obs"][i], last[0])
            if done or limit:
                last = pool.step(np.full(1, 3))[0]  # whatever the action is
            if info["terminated"][0] or limit:
                over.append((scores[i], lengths[i]))
                scores[i], lengths[i] = 0, 0
            lives, limits = lives + done, limits + limit
            np.testing.assert_array_equal(obs[i], last[0])
        assert infos["games"] == over
        games += len(over)
    assert 1 < limits < games and lives > 3 * games


@SCRIPTS
def test_lives_games_and_limits_may_end_at_once(module, monkeypatch):
    """What learning sees of each step, with ends that EnvPool's own games never have."""
    monkeypatch.setattr(envpool, "make_gymnasium", FakeGames)
    for options in TRAINING, {}:
        envs = module.AtariEnvs("Breakout-v5", 5, 1, **options)
        obs, rng, games = envs.pool.reset()[0], np.random.default_rng(0), []
        for t in range(200):
            before, actions = obs.copy(), rng.integers(0, A, 5)
            obs, *found, infos = envs.step(actions)
            played = [steps[t] for steps in envs.pool.played]
            for row, name in zip(found, ("reward", "terminated", "truncated"), strict=True):
                assert row.tolist() == [getattr(step, name) for step in played]
            assert [step.action for step in played] == actions.tolist()
            np.testing.assert_array_equal(before, [step.obs for step in played])
            np.testing.assert_array_equal(infos["final_obs"], [step.final_obs for step in played])
            games += [(t, *game) for game in infos["games"]]
        assert games == whole_games(envs.pool) and len(games) > 40
        ends = {(x.terminated, x.truncated, x.whole) for steps in envs.pool.played for x in steps}
        assert len(ends) == 3 + bool(options), "a life, a game, a limit, nothing"


@pytest.mark.parametrize("game", ["Breakout", "Pong"])
def test_games_are_seen_as_gymnasium_shows_them(game):
    """Every pixel and reward, over 300 random steps, beside AtariPreprocessing on ale-py."""
    gym = pytest.importorskip("gymnasium")
    gym.register_envs(pytest.importorskip("ale_py"))
    pytest.importorskip("cv2")
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=1, terminal_on_life_loss=False)
    env = gym.wrappers.FrameStackObservation(env, 4, padding_type="reset")
    starts = {"noop_max": 1, "use_fire_reset": False}  # the only ones that Gymnasium has
    envs, clipping = (
        baseline.AtariEnvs(f"{game}-v5", 1, 1, reward_clip=clip, **starts) for clip in (False, True)
    )
    expected, _ = env.reset(seed=1)
    obs, _ = envs.pool.reset()
    clipping.pool.reset()
    rng, score = np.random.default_rng(0), 0
    for step in range(1, 301):
        assert obs.shape == (1, 4, 84, 84) and obs.dtype == expected.dtype == np.uint8
        np.testing.assert_array_equal(obs[0], expected)
        action = rng.integers(env.action_space.n)
        expected, reward, over, _, _ = env.step(action)
        obs, found, terminated, _, infos = envs.step(np.array([action]))
        clipped, score = clipping.step(np.array([action])), score + reward
        assert clipped[1] == np.sign(reward) and found == reward and terminated == over
        if over:
            assert infos["games"] == clipped[4]["games"] == [(score, step)]
            break
    assert score


# What `main` does


class Seen(NamedTuple):
    """What `main` has asked for, in its order."""

    pools: list  # FakeGames, that of training first
    acts: list  # (obs, noise, result)
    rollouts: list  # (batch, and of then: model, rollout, next_values, batch)
    epochs: list  # (learning rate, batch, arguments) of `learn`
    indices: list  # of `update`
    generators: list  # states before a pool is reset


def watch(module, monkeypatch) -> Seen:
    """Lets `main` play FakeGames and writes down what it does."""
    seen, agent = Seen([], [], [], [], [], []), module.PPO
    originals = {name: getattr(agent, name) for name in ("act", "prepare", "learn", "update")}

    def make(*arguments, **options):
        seen.pools.append(FakeGames(*arguments, **options))
        return seen.pools[-1]

    def reset(self):
        seen.generators.append(torch.get_rng_state())
        return self.current.copy(), {}

    def act(self, obs, noise):
        found = originals["act"](self, obs, noise)
        seen.acts.append((obs.clone(), noise.clone(), found))
        return found

    def prepare(self, rollout, next_values):
        batch = originals["prepare"](self, rollout, next_values)
        copies = {name: getattr(rollout, name).clone() for name in ROLLOUT}
        columns = module.Batch._make(values.clone() for values in batch)
        row = copy.deepcopy(self.model), SimpleNamespace(**copies), next_values.clone(), columns
        seen.rollouts.append((batch, *row))
        return batch

    def learn(self, batch, *arguments):
        rate = self.optimizer.lr.item() if hasattr(self.optimizer, "lr") else None
        rate = rate or self.optimizer.param_groups[0]["lr"]
        seen.epochs.append((rate, batch, arguments))
        return originals["learn"](self, batch, *arguments)

    def update(self, batch, index, *advantages):
        seen.indices.append(index.clone())
        return originals["update"](self, batch, index, *advantages)

    monkeypatch.setattr(envpool, "make_gymnasium", make)
    monkeypatch.setattr(FakeGames, "reset", reset)
    for function in act, prepare, learn, update:
        monkeypatch.setattr(agent, function.__name__, function)
    return seen


ROLLOUT = "obs actions log_probs values rewards ended final_values".split()
STEPS, ENVS, ROLLOUTS = 20, 3, 4
WATCHED = {"num_envs": ENVS, "num_steps": STEPS, "num_minibatches": 3, "update_epochs": 2}
WATCHED |= {"seed": 7, "gamma": 0.9, "gae_lambda": 0.8, "learning_rate": 1e-3, "cuda": False}
WATCHED |= {"env_id": "Breakout-v5", "total_timesteps": STEPS * ENVS * ROLLOUTS + 5}
WATCHED |= {"eval_every": 2 * STEPS * ENVS, "eval_episodes": 5, "save_model": True}


@SCRIPTS
def test_main_does_what_it_says(module, monkeypatch):
    assert_main_does_what_it_says(module, monkeypatch)


def assert_main_does_what_it_says(module, monkeypatch):
    """A whole run, step by step, beside the account of the games that it plays."""
    seen = watch(module, monkeypatch)
    rows = read_scalars(module.main(module.Args(**WATCHED)))
    pool, *evaluations = seen.pools
    asked = {"env_id": "Breakout-v5", "num_envs": ENVS, "seed": 7}
    assert pool.made == asked | TRAINING and len(seen.rollouts) == ROLLOUTS
    torch.manual_seed(7)
    agent = module.PPO(module.Args(**WATCHED), A, CPU)
    torch.testing.assert_close(seen.rollouts[0][1].state_dict(), agent.model.state_dict())
    acts = [act for act in seen.acts if len(act[0]) == ENVS]
    assert_rollouts_hold_what_was_played(pool, acts, seen)
    assert_epochs_shuffle_all_and_rates_fall(seen)
    assert_rows_are_of_what_happened(pool, seen, rows)
    acts = [act for act in seen.acts if len(act[0]) == 5]
    assert_evaluations_are_of_whole_games(evaluations, acts, rows)


def column(pool, name, rows) -> torch.Tensor:
    """Of these steps (T) of all games -> (T, N, ...)."""
    values = [[getattr(step, name) for step in steps[rows]] for steps in pool.played]
    return torch.from_numpy(np.swapaxes(np.array(values), 0, 1))


def assert_rollouts_hold_what_was_played(pool, acts, seen):
    noise = torch.stack([noise for _, noise, _ in acts])
    assert noise.shape == (STEPS * ROLLOUTS, ENVS, A)
    assert noise.unique().numel() > 0.99 * noise.numel() and 0.8 < noise.mean() < 1.2
    for r, (_, model, rollout, next_values, batch) in enumerate(seen.rollouts):
        rows = slice(STEPS * r, STEPS * (r + 1))
        expected = functools.partial(column, pool, rows=rows)
        terminated, truncated = expected("terminated"), expected("truncated")
        assert terminated.any() and truncated.any()
        with torch.no_grad():
            log_policy, values = model(expected("obs").flatten(0, 1))
            finals = model(expected("final_obs").flatten(0, 1))[1].view(STEPS, ENVS)
            after = (
                model(torch.from_numpy(np.stack([x[rows.stop].obs for x in pool.played])))[1]
                if r < ROLLOUTS - 1
                else model(torch.from_numpy(pool.current))[1]
            )
        log_policy, values = log_policy.view(STEPS, ENVS, A), values.view(STEPS, ENVS)
        assert torch.equal(rollout.obs, expected("obs"))
        assert torch.equal(rollout.actions, expected("action"))
        assert torch.equal(rollout.actions, (log_policy - noise[rows].log()).argmax(dim=2))
        assert torch.equal(rollout.rewards, expected("reward"))
        assert torch.equal(rollout.ended, (terminated | truncated).float())
        close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
        close(rollout.values, values)
        chosen = log_policy.gather(2, expected("action")[..., None]).squeeze(2)
        close(rollout.log_probs, chosen)
        close(rollout.final_values, finals * truncated)
        close(next_values, after)

        following = torch.cat([values[1:], after[None]])
        following = torch.where(truncated, finals, following) * ~terminated
        advantages, advantage = torch.zeros(STEPS, ENVS), torch.zeros(ENVS)
        for t in reversed(range(STEPS)):
            goes_on = ~(terminated[t] | truncated[t])
            delta = rollout.rewards[t] + 0.9 * following[t] - values[t]
            advantage = delta + 0.9 * 0.8 * goes_on * advantage
            advantages[t] = advantage
        close(batch.advantages, advantages.flatten(), atol=1e-4)
        close(batch.returns, (advantages + values).flatten(), atol=1e-4)
        for name in ("obs", "actions", "log_probs", "values"):
            assert torch.equal(getattr(batch, name), getattr(rollout, name).flatten(0, 1))


def assert_epochs_shuffle_all_and_rates_fall(seen):
    orders = []
    for i, (rate, batch, arguments) in enumerate(seen.epochs):
        assert batch is seen.rollouts[i // 2][0]
        assert rate == pytest.approx(1e-3 * (1 - i // 2 / ROLLOUTS))
        orders.append(arguments[-1].flatten())  # of all processes, where there is one
    assert len(orders) == 2 * ROLLOUTS and len({tuple(order.tolist()) for order in orders}) == 8
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(STEPS * ENVS))
    assert torch.equal(torch.stack(seen.indices), torch.stack(orders).view(-1, STEPS * ENVS // 3))


def assert_rows_are_of_what_happened(pool, seen, rows):
    steps = [STEPS * ENVS * (r + 1) for r in range(ROLLOUTS)]
    rates = [(step, pytest.approx(1e-3 * (1 - r / ROLLOUTS))) for r, step in enumerate(steps)]
    assert rows["charts/learning_rate"] == rates
    games = whole_games(pool)
    for tag, which in ("return", 1), ("length", 2):
        expected = sorted(((game[0] + 1) * ENVS, game[which]) for game in games)
        assert sorted(rows[f"charts/episodic_{tag}"]) == expected
    for r, (*_, batch) in enumerate(seen.rollouts):
        unexplained = (batch.returns - batch.values).var() / batch.returns.var()
        found = rows["losses/explained_variance"][r]
        assert found == (steps[r], pytest.approx(1 - unexplained.item(), abs=1e-4))


def assert_evaluations_are_of_whole_games(pools, acts, rows):
    """Of the first game in each environment, to its end and no further, as in training."""
    assert len(pools) == 2
    found = []
    for pool in pools:
        made = pool.made | {"seed": 0}
        seeds = {pool.made["seed"] + i for i in range(5)}
        assert min(seeds) > 10**6, "games of training, or of a resumed one"
        assert made == {"env_id": "Breakout-v5", "num_envs": 5, "seed": 0} | {
            "render_mode": "rgb_array",
            "episodic_life": True,
            "reward_clip": False,
        }
        scores, lengths = [], []
        for steps in pool.played:
            length = 1 + [step.whole for step in steps].index(True)
            lengths.append(length)
            scores.append(sum(step.score for step in steps[:length]))
        assert min(lengths) * 4 < max(lengths) == min(map(len, pool.played))
        found.append(np.mean(scores))
        mine, acts = acts[: max(lengths)], acts[max(lengths) :]
        for t, (obs, _, (actions, *_)) in enumerate(mine):
            np.testing.assert_array_equal(obs, [steps[t].obs for steps in pool.played])
            assert actions.tolist() == [steps[t].action for steps in pool.played]
        noise = torch.stack([noise for _, noise, _ in mine])
        assert noise.unique().numel() > 0.99 * noise.numel() and 0.6 < noise.mean() < 1.4
        assert pool.closed
    assert not acts and pools[0].made == pools[1].made
    steps = [2 * STEPS * ENVS, 4 * STEPS * ENVS]
    assert rows["charts/eval_return"] == list(zip(steps, map(pytest.approx, found), strict=True))


@pytest.mark.parametrize("life", [True, False])
def test_a_policy_that_never_fires_is_served_a_new_ball(life):
    """In Breakout, where an episode begins; else one that learned with such episodes stalls."""
    envs = baseline.AtariEnvs("Breakout-v5", 1, 1, episodic_life=life)
    envs.pool.reset()
    games = [envs.step(np.zeros(1, dtype=int))[-1]["games"] for _ in range(300)]
    assert any(games) == life


def test_an_evaluation_waits_for_the_longest_game(monkeypatch):
    """EnvPool ends games after 27,000 steps; here with a policy that takes no time."""

    class LongGame:
        def __init__(self, env_id, num_envs, seed, **options):
            self.pool, self.action_space, self.steps = self, SimpleNamespace(n=A), 0

        def reset(self):
            return np.zeros(1), {}

        def step(self, actions):
            self.steps += 1
            ended = np.array([self.steps == 27_000])
            return np.zeros(1), np.ones(1), ended, ~ended & ended, {"whole": ended}

        def close(self):
            pass

    monkeypatch.setattr(baseline, "AtariEnvs", LongGame)
    monkeypatch.setattr(baseline.PPO, "act", lambda *_: (torch.zeros(1), None, None))
    args = baseline.Args(eval_episodes=1)
    assert baseline.evaluate(baseline.PPO(args, A, CPU), args, Path("unused")) == 27_000


@SCRIPTS
def test_the_games_of_main_have_the_settings_of_cleanrl(module, monkeypatch):
    """As EnvPool has understood them, of which most are its own defaults."""
    expected = {"task": "breakout", "num_envs": 4, "seed": 1, "episodic_life": True}
    expected |= {"reward_clip": True, "noop_max": 30, "frame_skip": 4, "stack_num": 4}
    expected |= {"gray_scale": True, "img_height": 84, "img_width": 84, "use_fire_reset": True}
    expected |= {"repeat_action_probability": 0.0, "full_action_space": False}
    expected |= {"max_episode_steps": 108_000 // 4, "zero_discount_on_life_loss": False}

    configs, step = [], module.AtariEnvs.step

    def noted(envs, actions):
        configs.append(envs.pool.config)
        return step(envs, actions)

    monkeypatch.setattr(module.AtariEnvs, "step", noted)
    train(module, total_timesteps=128, update_epochs=1)
    assert {name: configs[0][name] for name in expected} == expected


@SCRIPTS
def test_evaluation_changes_nothing_and_a_run_goes_on_with_new_games(module, monkeypatch):
    assert_a_run_goes_on(module, monkeypatch)


def assert_a_run_goes_on(module, monkeypatch):
    """With an evaluation the weights are the same; all that a checkpoint holds comes back."""
    half = STEPS * ENVS * 2
    flags = WATCHED | {"total_timesteps": half, "eval_every": 0}
    with monkeypatch.context() as patch:
        watch(module, patch)
        part = module.main(module.Args(**flags, exp_name="part"))
        evaluated = module.main(module.Args(**flags | {"eval_every": 50}, exp_name="evaluated"))
        before, other = read_checkpoint(part), read_checkpoint(evaluated)
        assert len(read_scalars(evaluated)["charts/eval_return"]) == 2
        assert_near(before["agent"], other["agent"])
        torch.testing.assert_close(before["generators"], other["generators"])
        agent = module.PPO(module.Args(**flags), A, CPU)
        agent.load_state_dict(other["agent"])
        again = module.evaluate(agent, module.Args(**flags), Path("unused"))
        assert read_scalars(evaluated)["charts/eval_return"][-1][1] == pytest.approx(again)

    seen, restored = watch(module, monkeypatch), {}
    act = module.PPO.act

    def acted(self, *arguments):
        if not restored:
            restored["agent"] = copy.deepcopy(dict(self.state_dict()))
            states = [each.state_dict()["state"] for each in self.optimizers]
            restored["optimizers"] = copy.deepcopy(states)
        return act(self, *arguments)

    monkeypatch.setattr(module.PPO, "act", acted)
    flags |= {"total_timesteps": 2 * half}
    assert module.main(module.Args(**flags, resume=str(part))) == part
    for name, state in restored.items():
        torch.testing.assert_close(state, before[name], atol=0, rtol=0)
    assert torch.equal(seen.generators[0], before["generators"][0])
    assert seen.pools[0].made["seed"] == 7 + half
    assert [rate for rate, *_ in seen.epochs] == pytest.approx([5e-4, 5e-4, 2.5e-4, 2.5e-4])
    after = read_checkpoint(part)
    assert after["global_step"] == 2 * half
    steps = [step for step, _ in read_scalars(part)["charts/learning_rate"]]
    assert sorted(steps) == [half // 2, half, 3 * half // 2, 2 * half]
    assert (part / "config.json").exists() and (part / f"stages_{half}.json").exists()
    module.main(module.Args(**flags, resume=str(part)))  # nothing is left to do
    assert read_checkpoint(part)["global_step"] == 2 * half


# Mathematics


def test_images_become_probabilities_and_values_as_in_mnihs_network():
    """Layer by layer, from pixels between 0 and 1; and the weights that it has at first."""
    torch.manual_seed(0)
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    for model in baseline.ActorCritic(A), variant.ActorCritic(A, False, False):
        with torch.no_grad():
            first, second, third, hidden = (
                layer for layer in model.network if len(list(layer.parameters()))
            )
            x = (obs.double() / 255).float()
            for layer, stride in ((first, 4), (second, 2), (third, 1)):
                x = F.conv2d(x, layer.weight, layer.bias, stride).relu()
            x = F.linear(x.flatten(1), hidden.weight, hidden.bias).relu()
            logits = F.linear(x, model.actor.weight, model.actor.bias)
            expected = logits - logits.exp().sum(dim=1, keepdim=True).log()
            log_policy, values = model(obs)
            torch.testing.assert_close(log_policy, expected)
            torch.testing.assert_close(values, F.linear(x, model.critic.weight)[:, 0])
            assert x.shape == (3, 512) and values.abs().max() > 0.01
            layers = first, second, third, hidden, model.actor, model.critic
            gains = [math.sqrt(2)] * 4 + [0.01, 1]
            for layer, gain in zip(layers, gains, strict=True):
                singular = torch.linalg.svdvals(layer.weight.flatten(1))
                torch.testing.assert_close(singular, torch.full_like(singular, gain))
                assert not layer.bias.any()


@SCRIPTS
def test_an_update_is_a_clipped_step_of_adam(module):
    assert_an_update_is_a_clipped_step_of_adam(module, lambda agent, *rest: agent.update(*rest))


def assert_an_update_is_a_clipped_step_of_adam(module, update):
    """`update` is called with agent, batch and index."""
    torch.manual_seed(0)
    flags = {"learning_rate": 1e-3, "max_grad_norm": 0.3, "norm_adv": False, "ent_coef": 0.0}
    agent = module.PPO(module.Args(**flags), A, CPU)

    def batches():
        for scale in 1, 1e-3:
            batch = make_batch(12, agent.model)
            changes = scale * batch.advantages
            yield batch._replace(advantages=changes, returns=batch.values + changes)

    apply = functools.partial(update, agent)
    assert_updates_are_clipped_steps_of_adam(module, agent, batches(), apply)


def test_actions_are_drawn_as_the_policy_says():
    torch.manual_seed(0)
    agent = baseline.PPO(baseline.Args(), A, CPU)
    log_policy, values = torch.tensor([0.0, 1.0, -1.0, 2.0]).log_softmax(dim=0), torch.zeros(1)
    agent.model.forward = lambda obs: (log_policy.expand(obs, -1), values.expand(obs))
    actions, log_probs, _ = agent.act(100_000, torch.empty(100_000, A).exponential_())
    shares = torch.bincount(actions, minlength=A) / 100_000
    torch.testing.assert_close(shares, log_policy.exp(), atol=0.01, rtol=0)
    torch.testing.assert_close(log_probs, log_policy[actions])


def make_batch(size, model=None):
    """Random steps, whose log_probs and values are those of `model` if there is one."""
    obs = torch.randint(0, 256, (size, 4, 84, 84), dtype=torch.uint8)
    actions, values = torch.randint(0, A, (size,)), torch.randn(size)
    log_probs = torch.full((size,), -math.log(A)) + 0.1 * torch.randn(size)
    if model is not None:
        with torch.no_grad():
            log_policy, values = model(obs)
            log_probs = log_policy.gather(1, actions[:, None]).squeeze(1)
    advantages, returns = torch.randn(size), values + torch.randn(size)
    return baseline.Batch(
        obs=obs,
        actions=actions,
        log_probs=log_probs,
        values=values,
        advantages=advantages,
        returns=returns,
    )


@pytest.mark.parametrize(
    ("clip_vloss", "norm_adv", "scale"), [(True, True, 1), (False, True, 1e-4), (True, False, 1)]
)
def test_losses_match_plain_loops(clip_vloss, norm_adv, scale):
    """Advantages are also so small that what is added to their deviation counts."""
    torch.manual_seed(0)
    args = baseline.Args(ent_coef=0.03, vf_coef=0.7, clip_vloss=clip_vloss, norm_adv=norm_adv)
    batch, logits, values = make_batch(6), torch.randn(6, A), torch.randn(6)
    batch = batch._replace(advantages=scale * batch.advantages)
    log_policy = logits.log_softmax(dim=1)
    loss, metrics = baseline.ppo_loss(lambda obs: (log_policy, values), batch, args)
    advantages = batch.advantages.double().numpy()
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    policy = entropy = value = old_kl = kl = clipfrac = 0.0
    for i in range(6):
        probabilities = np.exp(logits[i].double().numpy())
        probabilities /= probabilities.sum()
        ratio = probabilities[batch.actions[i]] / math.exp(batch.log_probs[i])
        bounded = min(max(ratio, 0.9), 1.1)
        policy -= min(ratio * advantages[i], bounded * advantages[i]) / 6
        entropy -= (probabilities * np.log(probabilities)).sum() / 6
        new, old, goal = (x[i].item() for x in (values, batch.values, batch.returns))
        clipped = old + min(max(new - old, -0.1), 0.1)
        errors = [(new - goal) ** 2, (clipped - goal) ** 2 if clip_vloss else 0]
        value += 0.5 * max(errors) / 6
        old_kl -= math.log(ratio) / 6
        kl += (ratio - 1 - math.log(ratio)) / 6
        clipfrac += (abs(ratio - 1) > 0.1) / 6
    expected = [policy, value, entropy, old_kl, kl, clipfrac]
    assert set(metrics) == {f"losses/{name}" for name in LOSSES}
    found = [metrics[f"losses/{name}"].item() for name in LOSSES]
    assert found == pytest.approx(expected, rel=1e-4) and 0 < clipfrac < 1
    assert loss.item() == pytest.approx(policy - 0.03 * entropy + 0.7 * value, rel=1e-5)


@SCRIPTS
@pytest.mark.parametrize("steps", [1, 2, 13, 128])
def test_advantages_match_plain_loops(module, steps):
    """Equation 16 in float64: sums of discounted errors up to the end of the episode."""
    rng = np.random.default_rng(steps)
    rewards, values, next_values = rng.normal(size=(3, steps, 3))
    ended = (rng.random((steps, 3)) < 0.2).astype(float)
    inputs = (torch.from_numpy(x) for x in (rewards, values, next_values, ended))
    found = module.compute_gae(*inputs, 0.9, 0.8).numpy()
    deltas = rewards + 0.9 * next_values - values
    for n in range(3):
        for t in range(steps):
            total, weight = 0.0, 1.0
            for k in range(t, steps):
                total += weight * deltas[k, n]
                weight *= 0.9 * 0.8
                if ended[k, n]:
                    break
            assert found[t, n] == pytest.approx(total)


# Parity


def assert_near(expected, found):
    """A ReLU about to switch makes a learning rate of a rounding error: few weights, no more."""
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        error = (x - found[name]).abs()
        assert error.max() < 1e-3 and error.mean() < 1e-5, name


def make_pair(**flags):
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**SMALL), A, CPU)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    agent = variant.PPO(variant.Args(**SMALL, **flags), A, CPU)
    agent.load_state_dict(reference.state_dict())
    return reference, agent


def assert_same_model(reference, agent, tolerance):
    for (name, x), y in zip(reference.named_parameters(), agent.parameters(), strict=True):
        torch.testing.assert_close(x, y, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def run_updates(reference, agent, count, tolerance, size=128):
    """`count` minibatch updates on both, then all metrics, parameters and moments must agree."""
    batch = make_batch(size, reference.model)
    for _ in range(count):
        index = torch.randperm(size)[: size // 2]
        expected, found = (each.update(batch, index) for each in (reference, agent))
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert_same_model(reference, agent, tolerance)
    states = [reference.optimizer.state[parameter] for parameter in reference.parameters()]
    for name, mine in (("exp_avg", "exp_avgs"), ("exp_avg_sq", "exp_avg_sqs")):
        for state, tensor in zip(states, getattr(agent.optimizer, mine), strict=True):
            torch.testing.assert_close(state[name], tensor, atol=tolerance, rtol=0)


def test_one_update_agrees():
    for channels_last in (False, True):
        reference, agent = make_pair(channels_last=channels_last)
        assert_same_model(reference, agent, 0.0)
        run_updates(reference, agent, 1, 1e-5)


@pytest.mark.slow
def test_ten_updates_agree(float64):
    run_updates(*make_pair(), 10, 1e-9)


@pytest.mark.slow
def test_compiled_updates_agree():
    """One is as exact as eager; and acting."""
    reference, agent = make_pair()
    variant.compile_agent(agent)
    obs, noise = make_batch(4).obs, torch.empty(4, A).exponential_()
    expected, found = (x.act(obs, noise) for x in (reference, agent))
    assert torch.equal(expected[0], found[0])
    for one, other in zip(expected[1:], found[1:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    run_updates(reference, agent, 1, 1e-5)


@pytest.mark.usefixtures("backend", "float64")
def test_a_coefficient_that_a_copy_anneals_counts_in_compiled_code():
    """Each update has another one: it compiles once more, then the number is an input."""
    reference, agent = make_pair()
    variant.compile_agent(agent)
    for count, ent_coef in enumerate((0.01, 0.1, 0.5, 0.9), start=1):
        for args in (reference.args, agent.args):
            args.ent_coef = ent_coef
        run_updates(reference, agent, 1, 1e-9)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == min(count, 2)
    for clip_coef in (0.01, 0.5, 0.3):  # compiles for each value: torch keeps the bounds of a clamp
        for args in (reference.args, agent.args):
            args.clip_coef = clip_coef
        run_updates(reference, agent, 1, 1e-9)


def test_a_wrong_update_is_noticed():
    for flag, value in (("clip_coef", 0.01), ("max_grad_norm", 0.1), ("ent_coef", 0.0)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_updates(reference, agent, 3, 1e-5)


def test_bfloat16_is_near_and_ends_before_the_heads():
    """Within what 8 bits of precision leave, and not exact: the flag does something."""
    reference, agent = make_pair(bf16=True, channels_last=True)
    inputs = []
    for head in (agent.model.actor, agent.model.critic):
        head.register_forward_hook(lambda _, args, output: inputs.extend([args[0], output]))
    obs = make_batch(2).obs
    (expected, values), (found, found_values) = reference.model(obs), agent.model(obs)
    assert [x.dtype for x in inputs] == [torch.float32] * 4 and not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)
    torch.testing.assert_close(found_values, values, atol=0.05, rtol=0.05)


def test_whole_iterations_agree(backend, monkeypatch):  # noqa: F811
    """Both `main`s on one seed: every row of metrics and the weights; the variant eager, compiled.

    No graph breaks (fullgraph), and nothing compiles again after the first rollout.
    """
    counts, learn = [], variant.PPO.learn

    def counted(self, *arguments):
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return learn(self, *arguments)

    monkeypatch.setattr(variant.PPO, "learn", counted)
    flags = {"total_timesteps": 3 * 128, "update_epochs": 1, "save_model": True}
    found = []
    for module, more in (baseline, {}), (variant, {}), (variant, {"compile": True}):
        counts.clear()
        run_dir = train(module, **flags, **more, exp_name=str(len(found)))
        found.append((read_checkpoint(run_dir), read_scalars(run_dir)))
    assert len(counts) == 3 and counts[1] == counts[2], counts
    (expected, rows), *others = found
    for checkpoint, its_rows in others:
        assert its_rows.keys() == rows.keys()
        for tag in rows.keys() - {"charts/SPS", "charts/cpu_seconds"}:
            np.testing.assert_allclose(its_rows[tag], rows[tag], rtol=1e-2, atol=1e-3, err_msg=tag)
        assert_near(expected["agent"], checkpoint["agent"])


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


def assert_learned_alike(start, eager, graphed):
    """Two agents have gone from `start` about as far, in about the same direction."""
    moves = []
    for agent in (eager, graphed):
        moves.append(torch.cat([(agent[name] - start[name]).flatten() for name in start]))
    assert torch.cosine_similarity(*moves, dim=0) > 0.9
    assert 0.8 < (moves[1].norm() / moves[0].norm()).item() < 1.25


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, {"bf16": True, "channels_last": True}], ids=str)
def test_graphed_runs_agree_with_eager(flags):
    """Rollouts before, at and after the capture of every graph."""
    flags = flags | {"total_timesteps": 128 * 5, "save_model": True}
    start = read_checkpoint(train(variant, **flags, learning_rate=0.0, exp_name="start"))["agent"]
    eager = read_checkpoint(train(variant, **flags, exp_name="eager"))["agent"]
    for compiled in (False, True):
        name = f"graphed-{compiled}"
        graphed = train(variant, **flags, cudagraphs=True, compile=compiled, exp_name=name)
        assert_learned_alike(start, eager, read_checkpoint(graphed)["agent"])


# Whole runs


@SCRIPTS
def test_run_from_end_to_end(module, tmp_path, capsys, monkeypatch):
    """The baseline in a process of its own, the variant in this one, on an older processor."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)
    flags = SMALL | {"total_timesteps": 1000, "update_epochs": 1}
    flags |= {"eval_every": 800, "eval_episodes": 1}
    if module is baseline:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        name = Path(baseline.__file__).name
        err = run(tmp_path, name, *words, "--save-model", "--capture-video").stderr
    else:
        flags |= {"cudagraphs": True, "channels_last": True, "bf16": True}
        train(variant, **flags, save_model=True, capture_video=True)
        err = capsys.readouterr().err
        assert err.count("--bf16: this processor would") == (not torch.cuda.is_available())
        assert err.count("without CUDA it has no effect") == (not torch.cuda.is_available())
    run_dir, config, stages, values = read_run(tmp_path)
    assert run_dir.name in err and config["args"]["env_id"] == "Breakout-v5"
    assert config["versions"]["torch"]
    assert stages["env_steps"] == 896 - 3 * 128 and stages["sps_steady"] > 0
    assert stages["iterations"] == 4 and len(stages["stages"]) == 8
    assert min(stages["stages"].values()) > 0, "a stage that nothing entered"
    rates = [value for _, value in values["charts/learning_rate"]]
    assert rates == pytest.approx([2.5e-4 * (1 - i / 7) for i in range(7)])
    assert all(value == int(value) >= 0 for _, value in values["charts/episodic_return"])
    assert all(value > 20 for _, value in values["charts/episodic_length"])
    assert [step for step, _ in values["charts/eval_return"]] == [896]
    for name in (*LOSSES, "explained_variance"):
        series = [value for _, value in values[f"losses/{name}"]]
        assert len(series) == 7 and np.isfinite(series).all()
    assert len({value for _, value in values["losses/value_loss"]}) == 7
    args = torch.load(run_dir / "checkpoint.pt")["args"]
    if module is variant:
        assert args["bf16"], "as it was given: a machine that has it may go on"
        assert config["args"]["bf16"], "as it was given, too"
    (video,) = (run_dir / "videos/step-896").iterdir()
    assert video.stat().st_size > 1000


def test_metrics_of_updates_and_target_kl(monkeypatch):
    """As in CleanRL: the last update's, but clipfrac's mean; --target-kl ends after an epoch."""
    updates, update = [], baseline.PPO.update

    def noted(self, *arguments):
        updates.append(update(self, *arguments))
        return updates[-1]

    monkeypatch.setattr(baseline.PPO, "update", noted)
    for target_kl, count in (None, 8), (1e-6, 2):  # the first update's is 0, but for rounding
        updates.clear()
        flags = {"target_kl": target_kl, "learning_rate": 1e-3, "exp_name": str(count)}
        rows = read_scalars(train(baseline, total_timesteps=128, **flags))
        assert len(updates) == count
        expected = updates[-1]
        clipfracs = [metrics["losses/clipfrac"] for metrics in updates]
        expected["losses/clipfrac"] = torch.stack(clipfracs).mean()
        for tag, value in expected.items():
            assert rows[tag][0][1] == pytest.approx(value.item(), rel=1e-6)
        assert count == 2 or expected["losses/clipfrac"] > 0


# Bad input


@SCRIPTS
def test_what_would_train_wrongly_is_refused(module, monkeypatch, capsys):
    """On the command line without a traceback, and before there is a run directory."""
    refused = {
        "--num-minibatches: 6 steps": {"num_steps": 3, "num_envs": 2, "num_minibatches": 4},
        "--num-minibatches: 128 steps": {"num_minibatches": 128},
        "--total-timesteps: a rollout has 128 steps": {"total_timesteps": 127},
        "--gamma and --gae-lambda lie": {"gamma": math.nan},
        "--gamma and --gae-lambda lie between": {"gae_lambda": 1.5},
    }
    for message, flags in refused.items():
        flags = SMALL | flags
        with pytest.raises(ValueError, match=f"^{message}"):
            module.Args(**flags)
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        with pytest.raises(SystemExit) as end:
            module.parse_args(module.Args)
        assert end.value.code and message in capsys.readouterr().err
    for game in "Breakot-v5", "CartPole-v1", "D1Basic-v1":  # EnvPool has the last two
        with pytest.raises(ValueError, match=f"^--env-id: EnvPool has no Atari game {game}; Break"):
            train(module, env_id=game)
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="moviepy"):
        patch.setitem(sys.modules, "moviepy", None)  # not after hours, at the first evaluation
        train(module, capture_video=True)
    assert not Path("runs").exists()


@SCRIPTS
def test_a_process_computes_as_its_flags_say(module):
    """Both scripts alike, compiled or not: the variant has no threads or precision of its own."""
    flags = {"num_steps": 4, "total_timesteps": 16, "update_epochs": 1}
    train(module, **flags, torch_threads=2, matmul_precision="high")
    if module is variant:
        variant.compile_agent(make_pair()[1])
    assert torch.get_num_threads() == 2
    assert torch.get_float32_matmul_precision() == "high"
    assert (torch.tensor(1e-39) * 0.5).item() == 0, "denormal numbers are flushed"
    train(module, **flags)
    assert torch.get_num_threads() == 1
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_reward_that_is_not_finite_ends_the_run_and_the_checkpoint_stays(monkeypatch):
    """So do the records of the run, which are written when the process ends."""
    closings = []  # of the process, which goes on here
    monkeypatch.setattr(atexit, "register", closings.append)
    part = train(baseline, total_timesteps=128, checkpoint_every=128)
    before, step = (part / "checkpoint.pt").read_bytes(), baseline.AtariEnvs.step

    def spoiled(self, actions):
        obs, rewards, *rest = step(self, actions)
        rewards[0] = np.nan
        return obs, rewards, *rest

    monkeypatch.setattr(baseline.AtariEnvs, "step", spoiled)
    with pytest.raises(FloatingPointError, match="^step 256: losses/.* is nan$"):
        train(baseline, total_timesteps=256, checkpoint_every=128, resume=str(part))
    assert (part / "checkpoint.pt").read_bytes() == before
    closings[-1]()
    assert json.loads((part / "stages_128.json").read_text())["env_steps"] == 128
