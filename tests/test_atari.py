"""PPO for Atari, both scripts: what EnvPool does, mathematics, parity, whole runs, bad input."""

import copy
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_sac import read_run, read_scalars, run
from test_sac_parity import assert_hunks_are_marked, backend  # noqa: F401

envpool = pytest.importorskip("envpool", reason="needs requirements/envpool.txt")

from leanrl import ppo_atari_envpool as baseline  # noqa: E402
from leanrl import ppo_atari_envpool_torchcompile as variant  # noqa: E402

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
SMALL = {"env_id": "Breakout-v5", "num_envs": 4, "num_steps": 32, "num_minibatches": 2}
TRAINING = {"episodic_life": True, "reward_clip": True}
LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
A, CPU = 4, torch.device("cpu")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: small batches are not worth more."""
    monkeypatch.chdir(tmp_path)


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


def checkpoint_of(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


# What EnvPool does


def make_pool(**options):
    return envpool.make_gymnasium("Breakout-v5", **{"num_envs": 4, "seed": 1} | TRAINING | options)


def test_a_life_is_an_episode_and_the_next_step_resets():
    """A game goes on after a lost life, and starts anew after the last one; elapsed_step tells."""
    pool, rng = make_pool(), np.random.default_rng(0)
    pool.reset()
    seen = {"life": 0, "game": 0}
    for _ in range(400):
        _, _, terminated, truncated, infos = pool.step(rng.integers(0, A, 4))
        assert not truncated.any()
        for i in np.flatnonzero(terminated):
            over = infos["lives"][i] == 0
            assert over == (infos["terminated"][i] == 1)
            _, reward, *ends, after = pool.step(np.array([0]), np.array([i]))
            assert reward == 0 and not any(ends) and after["env_id"] == [i]
            assert after["lives"] == (5 if over else infos["lives"][i])
            assert after["elapsed_step"] == (0 if over else infos["elapsed_step"][i])
            seen["game" if over else "life"] += 1
    assert seen["life"] > 10 and seen["game"] > 2


def test_the_action_of_a_resetting_step_counts_for_nothing():
    finals = []
    for action in range(A):
        pool, rng = make_pool(), np.random.default_rng(0)
        pool.reset()
        frames = []
        for _ in range(200):
            obs, _, terminated, _, _ = pool.step(rng.integers(0, A, 4))
            if terminated.any():
                index = np.flatnonzero(terminated)
                frames.append(pool.step(np.full(len(index), action), index)[0])
        finals.append(np.concatenate([*frames, obs]))
    assert len(finals[0]) > 8
    for other in finals[1:]:
        np.testing.assert_array_equal(finals[0], other)


def test_the_limit_of_frames_truncates_whole_games():
    pool = make_pool(max_episode_steps=30)
    pool.reset()
    for step in range(1, 31):
        _, _, terminated, truncated, infos = pool.step(np.zeros(4, int))
        if terminated.any():  # a life
            pool.step(np.zeros(terminated.sum(), int), np.flatnonzero(terminated))
        assert truncated.all() == truncated.any() == (step == 30)
    assert not terminated.any() and not infos["terminated"].any() and infos["lives"].all()
    obs, *_, infos = pool.step(np.zeros(4, int))
    assert (infos["elapsed_step"] == 0).all() and (infos["lives"] == 5).all()


def test_game_i_has_the_seed_plus_i():
    """On which several processes rely: two pools play what one pool plays."""
    one, halves = make_pool(), [make_pool(num_envs=2), make_pool(num_envs=2, seed=3)]
    rng = np.random.default_rng(0)
    frames = one.reset()[0], np.concatenate([half.reset()[0] for half in halves])
    for _ in range(100):
        np.testing.assert_array_equal(*frames)
        actions = rng.integers(0, A, 4)
        rest = [half.step(actions[2 * i : 2 * i + 2])[0] for i, half in enumerate(halves)]
        frames = one.step(actions)[0], np.concatenate(rest)


@pytest.mark.parametrize("game", ["Breakout", "Pong", "SpaceInvaders"])
def test_preprocessing_is_gymnasiums(game):
    """Every pixel, reward and life, over 300 random steps, beside AtariPreprocessing on ale-py."""
    gym = pytest.importorskip("gymnasium")
    gym.register_envs(pytest.importorskip("ale_py"))
    pytest.importorskip("cv2")
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=1, terminal_on_life_loss=False)
    env = gym.wrappers.FrameStackObservation(env, 4, padding_type="reset")
    pool = envpool.make_gymnasium(f"{game}-v5", num_envs=1, noop_max=1, use_fire_reset=False)
    clipping = envpool.make_gymnasium(
        f"{game}-v5", num_envs=1, noop_max=1, use_fire_reset=False, reward_clip=True
    )
    expected, _ = env.reset(seed=1)
    obs, _ = pool.reset()
    clipping.reset()
    rng, rewards = np.random.default_rng(0), []
    for _ in range(300):
        assert obs.shape == (1, 4, 84, 84) and obs.dtype == expected.dtype == np.uint8
        np.testing.assert_array_equal(obs[0], expected)
        action = rng.integers(env.action_space.n)
        expected, reward, over, _, info = env.step(action)
        obs, found, terminated, _, infos = pool.step(np.array([action]))
        clipped, rewards = clipping.step(np.array([action])), [*rewards, reward]
        assert clipped[1] == np.sign(reward) and clipped[4]["reward"] == found == reward
        assert (terminated, infos["lives"]) == (over, info["lives"])
        if over:
            break
    assert any(rewards)


# The environments of the scripts


def test_a_game_is_scored_whole_and_episodes_reset_in_their_last_step():
    """Against EnvPool itself, one game at a time, reset in the step after."""
    envs = baseline.AtariEnvs("Breakout-v5", 4, 1, **TRAINING)
    pools = [make_pool(num_envs=1, seed=1 + i) for i in range(4)]
    rng, scores, lengths = np.random.default_rng(0), np.zeros(4), np.zeros(4)
    obs, expected = envs.pool.reset()[0], np.concatenate([pool.reset()[0] for pool in pools])
    np.testing.assert_array_equal(obs, expected)
    ends, games = 0, 0
    for _ in range(500):
        actions = rng.integers(0, A, 4)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        over = []
        for i, pool in enumerate(pools):
            last, reward, done, _, info = pool.step(actions[i : i + 1])
            scores[i], lengths[i] = scores[i] + info["reward"][0], lengths[i] + 1
            assert (reward, done) == (rewards[i], terminated[i]) and not truncated[i]
            if done:
                np.testing.assert_array_equal(infos["final_obs"][i], last[0])
                last, ends = pool.step(np.zeros(1, int))[0], ends + 1
            if info["terminated"][0]:
                over.append((scores[i], lengths[i]))
                scores[i], lengths[i] = 0, 0
            np.testing.assert_array_equal(obs[i], last[0])
        assert infos["games"] == over
        games += len(over)
    assert games > 3 and ends > 4 * games


@SCRIPTS
def test_only_the_limit_of_frames_bootstraps(module, monkeypatch):
    """What `main` hands to learning, with a limit of 30 steps."""
    make, finals = module.AtariEnvs.__init__, []
    monkeypatch.setattr(
        module.AtariEnvs,
        "__init__",
        lambda self, *args, **options: make(self, *args, **options, max_episode_steps=30),
    )
    value = module.PPO.value

    def valued(self, obs):
        finals.append(value(self, obs))
        return finals[-1]

    def prepared(self, rollout, next_values):
        torch.testing.assert_close(rollout.final_values[29], torch.cat(finals[:-1]))
        assert next_values is finals[-1] and len(finals) == 4 + 1
        others = torch.arange(59) != 29
        assert rollout.ended[29].all() and not rollout.final_values[others].any()
        assert rollout.ended[others].any(), "no life was lost"
        raise KeyboardInterrupt

    monkeypatch.setattr(module.PPO, "value", valued)
    monkeypatch.setattr(module.PPO, "prepare", prepared)
    with pytest.raises(SystemExit, match="interrupted after 236 steps"):
        train(module, num_steps=59, num_minibatches=1, total_timesteps=236)


# Mathematics


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


@pytest.mark.parametrize("clip_vloss", [True, False])
def test_losses_match_plain_loops(clip_vloss):
    torch.manual_seed(0)
    args = baseline.Args(ent_coef=0.03, vf_coef=0.7, clip_vloss=clip_vloss)
    batch, logits, values = make_batch(6), torch.randn(6, A), torch.randn(6)
    log_policy = logits.log_softmax(dim=1)
    loss, metrics = baseline.ppo_loss(lambda obs: (log_policy, values), batch, args)
    advantages = batch.advantages.double().numpy()
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


def run_updates(reference, agent, count, tolerance):
    """`count` minibatch updates on both, then all metrics, parameters and moments must agree."""
    batch = make_batch(128, reference.model)
    for _ in range(count):
        index = torch.randperm(128)[:64]
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
        reference.args.ent_coef = agent.args.ent_coef = ent_coef
        run_updates(reference, agent, 1, 1e-9)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == min(count, 2)


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
        found.append((checkpoint_of(run_dir), read_scalars(run_dir)))
    assert len(counts) == 3 and counts[1] == counts[2], counts
    (expected, rows), *others = found
    for checkpoint, its_rows in others:
        assert its_rows.keys() == rows.keys()
        for tag in (tag for tag in rows if not tag.startswith("charts/S")):
            np.testing.assert_allclose(its_rows[tag], rows[tag], rtol=1e-2, atol=1e-3, err_msg=tag)
        assert_near(expected["agent"], checkpoint["agent"])


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, {"bf16": True, "channels_last": True}], ids=str)
def test_graphed_runs_agree_with_eager(flags):
    """Rollouts before, at and after the capture of every graph."""
    flags = flags | {"total_timesteps": 128 * 5, "save_model": True}
    eager = checkpoint_of(train(variant, **flags, exp_name="eager"))["agent"]
    for compiled in (False, True):
        name = f"graphed-{compiled}"
        graphed = train(variant, **flags, cudagraphs=True, compile=compiled, exp_name=name)
        for name, x in checkpoint_of(graphed)["agent"].items():
            tolerance = 0.05 if "bf16" in flags else 1e-2
            torch.testing.assert_close(x, eager[name], atol=tolerance, rtol=0)


# Whole runs


@SCRIPTS
def test_run_from_end_to_end(module, tmp_path, capsys):
    """The baseline in a process of its own, the variant in this one."""
    flags = SMALL | {"total_timesteps": 1000, "update_epochs": 1}
    flags |= {"eval_every": 800, "eval_episodes": 1}
    if module is baseline:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        name = Path(baseline.__file__).name
        err = run(tmp_path, name, *words, "--save-model", "--capture-video").stderr
    else:
        flags |= {"cudagraphs": True, "channels_last": True}
        train(variant, **flags, save_model=True, capture_video=True)
        err = capsys.readouterr().err
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
    assert (run_dir / "checkpoint.pt").exists()
    (video,) = (run_dir / "videos/step-896").iterdir()
    assert video.stat().st_size > 1000


def test_metrics_of_updates_and_target_kl(monkeypatch):
    """As in CleanRL: the last update's, but clipfrac's mean; --target-kl ends after an epoch."""
    updates, update = [], baseline.PPO.update

    def noted(self, *arguments):
        updates.append(update(self, *arguments))
        return updates[-1]

    monkeypatch.setattr(baseline.PPO, "update", noted)
    for target_kl, count in (None, 8), (1e-12, 2):
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


@SCRIPTS
def test_evaluation_changes_nothing_and_a_run_goes_on_with_new_games(module, capsys, monkeypatch):
    """With an evaluation the weights are the same; all that a checkpoint holds comes back."""
    flags = {"total_timesteps": 256, "save_model": True, "eval_episodes": 1, "update_epochs": 1}
    part = train(module, **flags, exp_name="part")
    evaluated = train(module, **flags, exp_name="evaluated", eval_every=128)
    before, other = checkpoint_of(part), checkpoint_of(evaluated)
    assert_near(before["agent"], other["agent"])
    agent = module.PPO(module.Args(**SMALL), A, CPU)
    agent.load_state_dict(other["agent"])
    again = module.evaluate(agent, module.Args(**SMALL, eval_episodes=1), Path("unused"))
    assert again == read_scalars(evaluated)["charts/eval_return"][-1][1]

    restored, act = {}, module.PPO.act

    def acted(self, *arguments):
        if not restored:
            restored["agent"] = copy.deepcopy(dict(self.state_dict()))
            states = [each.state_dict()["state"] for each in self.optimizers]
            restored["optimizers"] = copy.deepcopy(states)
        return act(self, *arguments)

    monkeypatch.setattr(module.PPO, "act", acted)
    resumed = train(module, **flags | {"total_timesteps": 512}, resume=str(part))
    assert resumed == part and "resumed at step 256, with fresh episodes" in capsys.readouterr().err
    for name, state in restored.items():
        torch.testing.assert_close(state, before[name], atol=0, rtol=0)
    assert checkpoint_of(part)["global_step"] == 512
    assert [step for step, _ in read_scalars(part)["charts/learning_rate"]] == [128, 256, 384, 512]
    assert (part / "config.json").exists() and (part / "stages_256.json").exists()
    with pytest.raises(SystemExit, match="no iteration is left after 512 steps"):
        train(module, **flags | {"total_timesteps": 512}, resume=str(part))


# Bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"env_id": "Breakot-v5"}, "--env-id: EnvPool has no Atari game Breakot-v5; Breakout-v5"),
        ({"env_id": "CartPole-v1"}, "--env-id: EnvPool has no Atari game CartPole-v1"),
        ({"num_steps": 3, "num_envs": 2, "num_minibatches": 4}, "--num-minibatches: does not"),
        ({"num_minibatches": 128}, "--num-minibatches: does not divide 128 steps into two or more"),
        ({"total_timesteps": 127}, "--total-timesteps: no iteration is left after 0 steps"),
        ({"learning_rate": float("nan")}, "--learning-rate: nan is out of range"),
        ({"clip_coef": 0.0}, "--clip-coef: 0.0 is out of range"),
        ({"num_envs": -1}, "--num-envs: -1 is out of range"),
        ({"gae_lambda": 1.5}, "--gae-lambda: 1.5 is out of range"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(flags, words, monkeypatch):
    given = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | flags).items()]
    monkeypatch.setattr(sys, "argv", [variant.__file__, *given])
    with pytest.raises(SystemExit) as stopped:
        variant.main(variant.parse_args(variant.Args))
    assert stopped.value.code.startswith(words) and "\n" not in stopped.value.code
    assert not Path("runs").exists()


def test_a_reward_that_is_not_finite_ends_the_run_and_the_checkpoint_stays(monkeypatch):
    part = train(baseline, total_timesteps=128, checkpoint_every=128)
    before, step = (part / "checkpoint.pt").read_bytes(), baseline.AtariEnvs.step

    def spoiled(self, actions):
        obs, rewards, *rest = step(self, actions)
        rewards[0] = np.nan
        return obs, rewards, *rest

    monkeypatch.setattr(baseline.AtariEnvs, "step", spoiled)
    with pytest.raises(SystemExit, match="step 256: losses/.* is not finite: nan"):
        train(baseline, total_timesteps=256, checkpoint_every=128, resume=str(part))
    assert (part / "checkpoint.pt").read_bytes() == before
