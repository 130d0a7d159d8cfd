"""PPO for Atari, both scripts: what EnvPool does, mathematics, parity, whole runs, bad input."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_ppo import assert_same_model
from test_resume import assert_same, command_line, read_checkpoint
from test_sac import read_run, read_scalars, run
from test_sac_parity import assert_hunks_are_marked

from leanrl import ppo_atari_envpool as baseline
from leanrl import ppo_atari_envpool_torchcompile as variant

envpool = pytest.importorskip("envpool", reason="needs requirements/envpool.txt")

BASELINE, VARIANT = baseline.SCRIPT, variant.SCRIPT
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
SMALL = {"env_id": "Breakout-v5", "num_envs": 4, "num_steps": 32, "num_minibatches": 2}
TRAINING = {"episodic_life": True, "reward_clip": True}
A, CPU = 4, torch.device("cpu")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: small batches are not worth more."""
    monkeypatch.chdir(tmp_path)


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


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
    """On which the variant's groups rely: two pools play what one pool plays."""
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


@SCRIPTS
def test_a_game_is_scored_whole_and_episodes_reset_in_their_last_step(module):
    """Against EnvPool itself, one game at a time, reset in the step after."""
    envs = module.AtariEnvs("Breakout-v5", 4, 1, **TRAINING)
    pools = [make_pool(num_envs=1, seed=1 + i) for i in range(4)]
    rng, scores, lengths = np.random.default_rng(0), np.zeros(4), np.zeros(4)
    obs, expected = envs.reset(), np.concatenate([pool.reset()[0] for pool in pools])
    np.testing.assert_array_equal(obs, expected)
    ends, games = 0, 0
    for _ in range(500):
        actions = rng.integers(0, A, 4)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for i, pool in enumerate(pools):
            last, reward, done, _, info = pool.step(actions[i : i + 1])
            scores[i], lengths[i] = scores[i] + info["reward"][0], lengths[i] + 1
            assert (reward, done) == (rewards[i], terminated[i]) and not truncated[i]
            if done:
                np.testing.assert_array_equal(infos["final_obs"][i], last[0])
                last, ends = pool.step(np.zeros(1, int))[0], ends + 1
            if info["terminated"][0]:
                (k,) = np.flatnonzero(infos["over"] == i)
                assert (infos["returns"][k], infos["lengths"][k]) == (scores[i], lengths[i])
                scores[i], lengths[i], games = 0, 0, games + 1
            np.testing.assert_array_equal(obs[i], last[0])
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
        others = torch.arange(59) != 29
        assert rollout.ended[29].all() and not rollout.final_values[others].any()
        assert rollout.ended[others].any(), "no life was lost"
        raise KeyboardInterrupt

    monkeypatch.setattr(module.PPO, "value", valued)
    monkeypatch.setattr(module.PPO, "prepare", prepared)
    with pytest.raises(SystemExit):
        train(module, num_steps=59, num_minibatches=1, total_timesteps=236)


# Mathematics


@SCRIPTS
def test_actions_are_drawn_as_the_policy_says(module):
    torch.manual_seed(0)
    model = module.ActorCritic(A)
    with torch.no_grad():
        model.actor.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0]))
    obs = torch.randint(0, 256, (1, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        log_policy, values = model(obs)
        model.forward = lambda obs: (log_policy.expand(len(obs), -1), values.expand(len(obs)))
        noise = torch.empty(100_000, A).exponential_()
        actions, log_probs, _ = module.sample(model, obs.expand(100_000, -1, -1, -1), noise)
    shares = torch.bincount(actions, minlength=A) / 100_000
    torch.testing.assert_close(shares, log_policy[0].exp(), atol=0.01, rtol=0)
    torch.testing.assert_close(log_probs, log_policy[0, actions])


@SCRIPTS
def test_losses_match_plain_loops(module):
    """The policy's terms; the value loss and the advantages are those that test_ppo tests."""
    torch.manual_seed(0)
    args = module.Args(ent_coef=0.03, vf_coef=0.7)
    batch = make_batch(module, 6)
    logits, values = torch.randn(6, A), torch.randn(6)
    log_policy = logits.log_softmax(dim=1)
    loss, metrics = module.ppo_loss(lambda obs: (log_policy, values), batch, args)
    advantages = batch.advantages.double().numpy()
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    policy = entropy = 0.0
    for i in range(6):
        probabilities = np.exp(logits[i].double().numpy())
        probabilities /= probabilities.sum()
        ratio = probabilities[batch.actions[i]] / np.exp(batch.log_probs[i].item())
        bounded = min(max(ratio, 0.9), 1.1)
        policy -= min(ratio * advantages[i], bounded * advantages[i]) / 6
        entropy -= (probabilities * np.log(probabilities)).sum() / 6
    of_value = module.value_loss(values, batch.values, batch.returns, 0.1).item()
    assert metrics[:3].tolist() == pytest.approx([policy, of_value, entropy], rel=1e-5)
    assert loss.item() == pytest.approx(policy - 0.03 * entropy + 0.7 * of_value, rel=1e-5)


# Parity


def make_batch(module, size, model=None):
    obs = torch.randint(0, 256, (size, 4, 84, 84), dtype=torch.uint8)
    actions, values = torch.randint(0, A, (size,)), torch.randn(size)
    log_probs = torch.full((size,), -np.log(A)) + 0.1 * torch.randn(size)
    if model is not None:
        with torch.no_grad():
            log_policy, values = model(obs)
            log_probs = log_policy.gather(1, actions[:, None]).squeeze(1)
    columns = log_probs, values, torch.randn(size), values + torch.randn(size)
    return module.Batch(obs, actions, *columns)


def make_pair(**flags):
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**SMALL), A, CPU)
    with torch.no_grad():
        for parameter in reference.parameters:
            parameter.add_(0.01 * torch.randn_like(parameter))
    agent = variant.PPO(variant.Args(**SMALL, **flags), A, CPU)
    agent.model.load_state_dict(reference.model.state_dict())
    return reference, agent


def compile_agent(agent):
    torch._dynamo.reset()
    variant.compile_agent(agent)
    return agent


def run_updates(reference, agent, count, tolerance):
    """`count` minibatch updates on both, then all metrics and parameters must agree."""
    batch = make_batch(baseline, 64, reference.model)
    for _ in range(count):
        index = torch.randperm(64)[:32]
        expected = reference.update(baseline.Batch(*(column[index] for column in batch)))
        found = agent.update(variant.Batch(*batch), index)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert_same_model(reference, agent, tolerance)


LAYOUT = pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@LAYOUT
@COMPILED
def test_one_update_agrees(compiled, channels_last):
    reference, agent = make_pair(channels_last=channels_last)
    assert_same_model(reference, agent, 0.0)
    run_updates(reference, compile_agent(agent) if compiled else agent, 1, 1e-5)


@COMPILED
def test_twenty_updates_agree(compiled, float64):
    reference, agent = make_pair()
    run_updates(reference, compile_agent(agent) if compiled else agent, 20, 1e-9)


def test_a_wrong_update_is_noticed():
    for flag, value in (("clip_coef", 0.01), ("max_grad_norm", 0.1), ("ent_coef", 0.0)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_updates(reference, agent, 3, 1e-5)


def test_bfloat16_is_near():
    """Within what 8 bits of precision leave, and not exact: the flag does something."""
    reference, agent = make_pair(bf16=True)
    obs = make_batch(baseline, 2).obs
    (expected, values), (found, found_values) = reference.model(obs), agent.model(obs)
    assert found.dtype == torch.float32 and not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0)
    torch.testing.assert_close(found_values, values, atol=0.05, rtol=0.05)


@COMPILED
def test_acting_agrees(compiled):
    reference, agent = make_pair()
    obs, noise = make_batch(baseline, 4).obs, torch.empty(4, A).exponential_()
    expected, found = (x.act(obs, noise) for x in (reference, agent))
    if compiled:
        found = compile_agent(agent).act(obs, noise)
    assert torch.equal(expected[0], found[0])
    for one, other in zip(expected[1:], found[1:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "flags",
    [{}, {"overlap": True}, {"compile": True, "overlap": True}, {"target_kl": 1e-9}],
    ids=str,
)
def test_a_whole_iteration_agrees(flags):
    """The two scripts from the command line's settings to the checkpoint, on one seed."""
    flags = {"total_timesteps": 128, "save_model": True} | flags
    common = {name: value for name, value in flags.items() if name not in ("overlap", "compile")}
    torch._dynamo.reset()
    one = read_checkpoint(train(baseline, **common, exp_name="one"))
    other = read_checkpoint(train(variant, **flags))
    one_model, other_model = one["agent"]["model"], other["agent"]["model"]
    # a ReLU about to switch makes a learning rate of a rounding error: few parameters, and no more
    assert_same(one_model, other_model, tolerance=1e-3)
    for name, parameter in one_model.items():
        assert (parameter - other_model[name]).abs().mean() < 1e-5, name
    torch.manual_seed(1)
    initial = baseline.ActorCritic(A).state_dict()
    assert (one_model["actor.weight"] - initial["actor.weight"]).abs().mean() > 1e-4
    if "target_kl" in flags:  # one epoch of the four
        assert one["agent"]["optimizer"][0]["step"].item() == 2


def test_no_graph_break_and_no_recompilation(monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = []
    learn = variant.PPO.learn

    def counted(self, *arguments):
        metrics = learn(self, *arguments)
        counters = torch._dynamo.utils.counters
        counts.append((counters["stats"]["unique_graphs"], len(counters["graph_break"])))
        return metrics

    monkeypatch.setattr(variant.PPO, "learn", counted)
    train(variant, num_steps=8, total_timesteps=96, compile=True, overlap=True)
    assert counts == [(3, 0)] * 3, counts


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, {"overlap": True}, {"bf16": True, "channels_last": True}])
def test_graphed_runs_agree_with_eager(flags):
    """Rollouts before, at and after the capture of every graph."""
    flags = flags | {"total_timesteps": 128 * 5, "save_model": True}
    eager = read_checkpoint(train(variant, **flags, exp_name="eager"))
    for compiled in (False, True):
        torch._dynamo.reset()
        graphed = train(variant, **flags, cudagraphs=True, compile=compiled)
        tolerance = 0.05 if "bf16" in flags else 1e-2
        found = read_checkpoint(graphed)["agent"]["model"]
        assert_same(eager["agent"]["model"], found, tolerance=tolerance)


# Whole runs


ROWS = pytest.mark.parametrize(
    "command",
    [
        (BASELINE,),
        (VARIANT,),
        (VARIANT, "--compile", "--cudagraphs", "--channels-last", "--overlap"),
    ],
    ids=["baseline", "eager", "all"],
)
FEW = ("--num-envs=4", "--num-steps=32", "--num-minibatches=2", "--total-timesteps=1000")


@ROWS
def test_run_from_end_to_end(command, tmp_path):
    flags = (*FEW, "--eval-every=800", "--eval-episodes=2", "--save-model", "--capture-video")
    result = run(tmp_path, *command, *flags)
    run_dir, config, stages, values = read_run(tmp_path)
    assert str(run_dir.name) in result.stdout and config["args"]["env_id"] == "Breakout-v5"
    assert config["versions"]["envpool"] and config["cpu"]["vectors"]
    assert stages["window"]["env_steps"] == 896 - 3 * 128 and stages["sps_steady"] > 0
    rates = [value for _, value in values["charts/learning_rate"]]
    assert rates == pytest.approx([2.5e-4 * (1 - i / 7) for i in range(7)])
    assert all(value == int(value) >= 0 for _, value in values["charts/episodic_return"])
    assert all(value > 20 for _, value in values["charts/episodic_length"])
    assert [step for step, _ in values["charts/eval_return"]] == [896]
    for name in (*baseline.METRICS, "explained_variance"):
        series = [value for _, value in values[f"losses/{name}"]]
        assert len(series) == 7 and np.isfinite(series).all()
    assert len({value for _, value in values["losses/value_loss"]}) == 7
    assert (run_dir / "checkpoint.pt").exists()
    videos = list((run_dir / "videos").iterdir())
    assert [video.name for video in videos] == ["step-896.mp4"]
    assert videos[0].stat().st_size > 1000


@SCRIPTS
def test_evaluation_changes_nothing_and_repeats_itself(module, tmp_path):
    flags = {"total_timesteps": 256, "save_model": True, "eval_episodes": 2}
    without = train(module, **flags, exp_name="without")
    evaluated = train(module, **flags, exp_name="with", eval_every=128)
    assert_same(read_checkpoint(without), read_checkpoint(evaluated))
    model = module.ActorCritic(A)
    model.load_state_dict(read_checkpoint(evaluated)["agent"]["model"])
    args = module.Args(**SMALL, eval_episodes=2)
    expected = read_scalars(evaluated)["charts/eval_return"][-1][1]
    assert module.evaluate(model, args, CPU, None) == expected


@SCRIPTS
def test_a_resumed_run_goes_on_with_new_games(module, capsys):
    """All that EnvPool lets a checkpoint bring back: agent, generators, counters, metrics."""
    part = train(module, total_timesteps=256, save_model=True)
    before = read_checkpoint(part)
    resumed = train(module, total_timesteps=512, save_model=True, resume=str(part))
    after = read_checkpoint(resumed)
    assert resumed == part and after["global_step"] == 512
    assert "resumed at step 256 with new games" in capsys.readouterr().err
    assert not torch.equal(before["rng"]["torch"], after["rng"]["torch"])
    steps = [step for step, _ in read_scalars(part)["charts/learning_rate"]]
    assert sorted(steps) == [128, 256, 384, 512]
    agent = module.PPO(module.Args(**SMALL), A, CPU)
    agent.load_state_dict(before["agent"])
    assert_same(agent.state_dict(), before["agent"])
    with pytest.raises(SystemExit):
        train(module, total_timesteps=512, env_id="Pong-v5", resume=str(part))


# Bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--env-id", "Breakot-v5"), ("'Breakot-v5'", "Breakout-v5")),
        (("--env-id", "BreakoutNoFrameskip-v4"), ("Breakout-v5",)),
        (("--env-id", "CartPole-v1"), ("no Atari game 'CartPole-v1'",)),
        (("--num-steps", "3", "--num-envs", "2"), ("2 x --num-steps 3 = 6", "--num-minibatches 4")),
        (("--overlap", "--num-envs", "3", "--num-steps", "4"), ("even", "--num-envs 3")),
        (("--cudagraphs", "--no-cuda"), ("--no-cuda",)),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, words):
    done, lines = command_line(variant, *flags)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    error = [line for line in lines if line.startswith("error")]
    assert len(error) == 1 and all(word in error[0] for word in words), lines
    assert not Path("runs").exists()


def test_missing_envpool_names_the_pip_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find_spec = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'envpool' "
        "else find_spec(name, *a)\n"
    )
    result = subprocess.run(
        [sys.executable, baseline.__file__],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "pip install -r requirements/envpool.txt" in result.stderr


@SCRIPTS
def test_a_crowd_of_environments_is_a_hint(module, capsys):
    module.check_args(module.Args(num_envs=16 * os.cpu_count()))
    assert not capsys.readouterr().err
    module.check_args(module.Args(num_envs=32 * os.cpu_count()))
    assert capsys.readouterr().err.startswith("hint: ")


def test_bfloat16_without_the_instructions_is_a_warning(monkeypatch, capsys):
    for has, said in ((True, ""), (False, "warning: this CPU has no bfloat16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"avx512_bf16": has})
        variant.check_args(variant.Args(bf16=True, cuda=False))
        assert capsys.readouterr().err.startswith(said) and bool(said) != has
