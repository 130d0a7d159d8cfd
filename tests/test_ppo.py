"""PPO, both scripts: mathematics, parity, normalization, whole runs, resume, learning."""

import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_resume import assert_same, command_line, read_checkpoint, scalars
from test_sac import TwoEnds, read_run, run
from test_sac_parity import assert_hunks_are_marked

from leanrl import ppo_continuous_action as baseline
from leanrl import ppo_continuous_action_torchcompile as variant

BASELINE, VARIANT = Path(baseline.__file__).name, Path(variant.__file__).name
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
SMALL = {"env_id": "Pendulum-v1", "num_steps": 64, "num_minibatches": 4, "update_epochs": 2}
OBS, A, CPU = 5, 3, torch.device("cpu")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: the variant's main goes on with one, and the first
    weights, an orthogonal matrix each, differ in their last bit by the number of threads."""
    monkeypatch.chdir(tmp_path)


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


# Mathematics


@SCRIPTS
@pytest.mark.parametrize("steps", [1, 2, 5, 64, 100])
def test_advantages_match_a_loop_in_float64(module, steps):
    """Over random terminations and truncations, both on one step included."""
    rng = np.random.default_rng(steps)
    rewards, values, following = rng.normal(size=(3, steps, 4))
    final_values, last = rng.normal(size=(steps, 4)), rng.normal(size=4)
    terminated, truncated = rng.random((2, steps, 4)) < 0.2
    gamma, lam = 0.97, 0.9
    for t in range(steps):
        follows = values[t + 1] if t + 1 < steps else last
        following[t] = np.where(truncated[t], final_values[t], follows)
        following[t] = np.where(terminated[t], 0.0, following[t])
    expected, advantage = np.zeros((steps, 4)), np.zeros(4)
    for t in reversed(range(steps)):
        going_on = 1 - (terminated[t] | truncated[t])
        delta = rewards[t] + gamma * following[t] - values[t]
        advantage = delta + gamma * lam * going_on * advantage
        expected[t] = advantage
    inputs = [torch.tensor(x, dtype=torch.float32) for x in (rewards, values, following)]
    ended = torch.tensor(terminated | truncated, dtype=torch.float32)
    found = module.compute_gae(*inputs, ended, gamma, lam)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@SCRIPTS
def test_losses_match_plain_loops(module):
    """Equations 7 and 9 and the clipped value loss, as Stable-Baselines3 and CleanRL have them."""
    torch.manual_seed(0)
    args = module.Args(ent_coef=0.01, clip_coef=0.1)
    model = module.ActorCritic(OBS, A).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    columns = [torch.randn(6, OBS), torch.randn(6, A), *(torch.randn(6) for _ in range(4))]
    batch = module.Batch(*(column.double() for column in columns))
    mean, log_std, values = model(batch.obs)
    normal = torch.distributions.Normal(mean, log_std.exp())
    log_probs = normal.log_prob(batch.actions).sum(dim=1)
    batch = batch._replace(log_probs=(log_probs + 0.2 * torch.randn(6)).detach())

    advantages = batch.advantages.numpy()
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    of_policy = of_value = kl = old_kl = clipped = 0.0
    for i in range(6):
        log_ratio = (log_probs[i] - batch.log_probs[i]).item()
        ratio, old, goal = math.exp(log_ratio), batch.values[i].item(), batch.returns[i].item()
        bounded = min(max(ratio, 0.9), 1.1)
        of_policy += -min(ratio * advantages[i], bounded * advantages[i]) / 6
        moved = old + min(max(values[i].item() - old, -0.1), 0.1)
        of_value += 0.5 * max((values[i].item() - goal) ** 2, (moved - goal) ** 2) / 6
        old_kl, kl = old_kl - log_ratio / 6, kl + (ratio - 1 - log_ratio) / 6
        clipped += (abs(ratio - 1) > 0.1) / 6
    entropy = normal.entropy()[0].sum().item()
    loss, metrics = module.ppo_loss(model, batch, args)
    expected = [of_policy, of_value, entropy, old_kl, kl, clipped]
    assert metrics.tolist() == pytest.approx(expected)
    assert loss.item() == pytest.approx(of_policy - 0.01 * entropy + 0.5 * of_value)
    args.clip_vloss = args.norm_adv = False
    plain = module.ppo_loss(model, batch, args)[1]
    assert plain[1].item() == pytest.approx(0.5 * (values - batch.returns).square().mean().item())
    ratios, raw = (log_probs - batch.log_probs).exp(), batch.advantages
    surrogate = torch.min(ratios * raw, ratios.clamp(0.9, 1.1) * raw).mean().item()
    assert plain[0].item() == pytest.approx(-surrogate)


class Noisy(gym.Env):
    """Random observations and rewards; ends by either kind of end, or both at once."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (A,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(3, 2, OBS), {}

    def step(self, action):
        obs, reward = self.np_random.normal(3, 2, OBS), self.np_random.normal(1, 5)
        terminated, truncated = self.np_random.random(2) < 0.1
        return obs, reward, bool(terminated), bool(truncated), {}


@SCRIPTS
def test_normalization_is_that_of_gymnasiums_wrappers(module):
    """Per environment and step, final observations included, as CleanRL's stack of wrappers."""

    def wrapped():
        env = gym.wrappers.NormalizeObservation(Noisy())
        return gym.wrappers.NormalizeReward(env, gamma=0.97)

    kwargs = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    reference = gym.vector.SyncVectorEnv([wrapped] * 3, **kwargs)
    envs = gym.vector.SyncVectorEnv([Noisy] * 3, **kwargs)
    normalizer = module.Normalizer(3, OBS, 0.97)
    expected, _ = reference.reset(seed=1)
    found = normalizer.observe(envs.reset(seed=1)[0])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    actions = np.zeros((3, A), np.float32)
    for _ in range(300):
        expected, expected_rewards, _, _, expected_infos = reference.step(actions)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        ended, last_obs = terminated | truncated, obs.copy()
        for i in np.flatnonzero(ended):
            last_obs[i] = infos["final_obs"][i]
        found, rewards = normalizer.observe(last_obs), normalizer.reward(rewards, terminated)
        for i in np.flatnonzero(ended):
            final = np.clip(expected_infos["final_obs"][i], -10, 10)
            np.testing.assert_allclose(found[i], final, atol=1e-5)
        if ended.any():
            found[ended] = normalizer.observe(obs[ended], ended)
        np.testing.assert_allclose(found, np.clip(expected, -10, 10), atol=1e-5)
        np.testing.assert_allclose(rewards, np.clip(expected_rewards, -10, 10), atol=1e-5)


def test_rewards_of_a_whole_rollout_are_normalized_like_one_after_the_other():
    rng = np.random.default_rng(0)
    one, other = variant.Normalizer(3, OBS, 0.97), variant.Normalizer(3, OBS, 0.97)
    for _ in range(4):
        rewards, terminated = rng.normal(5, 3, (50, 3)), rng.random((50, 3)) < 0.1
        expected = [one.reward(*step) for step in zip(rewards, terminated, strict=True)]
        np.testing.assert_allclose(other.reward_all(rewards, terminated), expected, rtol=1e-9)
    for name, array in one.state_dict().items():
        torch.testing.assert_close(array, other.state_dict()[name])


@SCRIPTS
def test_only_a_truncation_bootstraps_from_its_final_observation(module, monkeypatch):
    """What `main` hands to learning: TwoEnds ends every 3 steps, by turns truncated, terminated."""
    gym.register("TwoEnds-v0", entry_point=lambda: TwoEnds())
    seen, observe = [], module.Normalizer.observe

    def keep(self, obs, *envs):
        seen.append((float(obs[0, 0]), observe(self, obs, *envs)))
        return seen[-1][1].copy()

    monkeypatch.setattr(module.Normalizer, "observe", keep)
    rollouts, prepare = [], module.PPO.prepare

    def prepared(self, rollout, *rest):
        value = self.value if module is variant else lambda x: self.value(torch.tensor(x)).numpy()
        finals = [value(obs)[0] for raw, obs in seen if raw == 3]
        get = rollout.host.get if module is variant else lambda name: getattr(rollout, name)
        final_values, ended = (np.asarray(get(name)).copy() for name in ("final_values", "ended"))
        rollouts.append((final_values, ended, finals))
        return prepare(self, rollout, *rest)

    monkeypatch.setattr(module.PPO, "prepare", prepared)
    try:
        train(module, env_id="TwoEnds-v0", num_steps=24, total_timesteps=24)
    finally:
        gym.registry.pop("TwoEnds-v0")
    final_values, ended, finals = (x if isinstance(x, list) else x.ravel() for x in rollouts[0])
    assert [t for t in range(24) if ended[t]] == [2, 5, 8, 11, 14, 17, 20, 23]
    assert [t for t in range(24) if final_values[t]] == [2, 8, 14, 20]  # odd episodes are truncated
    np.testing.assert_allclose(final_values[[2, 8, 14, 20]], finals[::2], rtol=1e-5)


# Parity


def test_an_iteration_is_that_of_stable_baselines3():
    """Advantages, 2 epochs of 4 minibatches: equal parameters after, where the settings coincide.

    Its coefficient of the value loss has no half in it, and the value is not clipped. It bootstraps
    at a truncation by adding the discounted value of the final observation to the reward.
    """
    sb3 = pytest.importorskip("stable_baselines3")
    args = baseline.Args(
        num_steps=64, num_minibatches=4, update_epochs=2, ent_coef=0.01, clip_vloss=False
    )
    theirs = sb3.PPO(
        "MlpPolicy", "Pendulum-v1", n_steps=64, batch_size=16, n_epochs=2, ent_coef=0.01,
        vf_coef=0.5 * args.vf_coef, learning_rate=args.learning_rate, device="cpu",
    )  # fmt: skip
    theirs.set_logger(sb3.common.logger.Logger(None, []))
    mine = baseline.PPO(args, 3, 1, CPU)
    policy = theirs.policy
    layers = (
        *(policy.mlp_extractor.value_net[i] for i in (0, 2)), policy.value_net,
        *(policy.mlp_extractor.policy_net[i] for i in (0, 2)), policy.action_net,
    )  # fmt: skip
    counterparts = [policy.log_std, *(p for layer in layers for p in layer.parameters())]
    parameters = list(zip(mine.model.parameters(), counterparts, strict=True))
    torch.manual_seed(0)
    for parameter, counterpart in parameters:
        parameter.data.add_(0.2 * torch.randn_like(parameter))
        counterpart.data.copy_(parameter)
    initial = [parameter.detach().clone() for parameter, _ in parameters]

    generator = np.random.default_rng(0)
    obs, actions = generator.normal(size=(2, 65, 1, 3)).astype(np.float32)
    actions, rewards = torch.tensor(actions[:64, :, :1]), generator.normal(size=(64, 1))
    terminated, truncated = generator.random((2, 64, 1)) < 0.1
    finals = np.where(truncated & ~terminated, generator.normal(size=(64, 1)), 0)
    rollout = baseline.Rollout(64, 1, 3, 1, CPU)
    rollout.obs.copy_(torch.tensor(obs[:64]))
    rollout.actions.copy_(actions)
    with torch.no_grad():
        mean, log_std, values = mine.model(torch.tensor(obs))
        # of a policy that has moved since, so that ratios are clipped
        log_probs = baseline.gaussian_log_prob(actions, mean[:64] + 0.3, log_std)
    for name, value in (
        ("log_probs", log_probs), ("values", values[:64]), ("rewards", rewards),
        ("ended", terminated | truncated), ("final_values", finals),
    ):  # fmt: skip
        getattr(rollout, name).copy_(torch.as_tensor(value))
    ended = terminated | truncated
    for t in range(64):
        started = ended[t - 1] if t else np.ones(1)
        reward = rewards[t] + args.gamma * finals[t]
        theirs.rollout_buffer.add(
            obs[t], actions[t].numpy(), reward, started, values[t], log_probs[t]
        )
    theirs.rollout_buffer.compute_returns_and_advantage(values[64], ended[63])

    batch = mine.prepare(rollout, values[64])
    advantages = theirs.rollout_buffer.advantages.ravel()
    np.testing.assert_allclose(batch.advantages, advantages, atol=1e-5)
    np.random.seed(0)
    permutations = np.stack([np.random.permutation(64) for _ in range(2)])
    metrics = mine.learn(batch, torch.tensor(permutations))
    np.random.seed(0)
    theirs.train()
    assert 0.05 < metrics[5] < 0.95, "clipping is not part of the comparison"
    for (parameter, counterpart), before in zip(parameters, initial, strict=True):
        torch.testing.assert_close(parameter, counterpart, atol=1e-6, rtol=0)
        assert (parameter - before).abs().mean() > 1e-4


def make_pair(**flags):
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    flags = {"num_steps": 256, "num_minibatches": 4, "ent_coef": 0.01} | flags
    reference = baseline.PPO(baseline.Args(**flags), OBS, A, CPU)
    with torch.no_grad():
        for parameter in reference.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
    agent = variant.PPO(variant.Args(**flags), OBS, A, CPU)
    agent.model.load_state_dict(reference.model.state_dict())
    agent.publish()
    return reference, agent


def compile_agent(agent):
    torch._dynamo.reset()
    variant.compile_agent(agent)
    return agent


def random_batch(reference, size=256):
    obs, actions = torch.randn(size, OBS), torch.randn(size, A)
    with torch.no_grad():
        mean, log_std, values = reference.model(obs)
        log_probs = baseline.gaussian_log_prob(actions, mean, log_std)
    return baseline.Batch(
        obs, actions, log_probs, values, torch.randn(size), values + torch.randn(size)
    )


def assert_same_model(reference, agent, tolerance):
    expected, found = reference.model.state_dict(), agent.model.state_dict()
    assert expected.keys() == found.keys()
    for name in expected:
        error = (expected[name] - found[name]).abs().max().item()
        assert error <= tolerance, f"{name} differs by {error:.1e}"


def run_updates(reference, agent, count, tolerance):
    """`count` minibatch updates on both, then all metrics and parameters must agree."""
    batch = random_batch(reference)
    agent.data.copy_(torch.cat([x.reshape(len(x), -1) for x in batch], dim=1))
    for _ in range(count):
        index = torch.randperm(256)[:64]
        expected = reference.update(baseline.Batch(*(column[index] for column in batch)))
        torch.testing.assert_close(agent.update(index), expected, atol=tolerance, rtol=tolerance)
    assert_same_model(reference, agent, tolerance)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_update_agrees(compiled):
    reference, agent = make_pair()
    assert_same_model(reference, agent, 0.0)
    run_updates(reference, compile_agent(agent) if compiled else agent, 1, 1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_hundred_updates_agree(compiled, float64):
    reference, agent = make_pair()
    run_updates(reference, compile_agent(agent) if compiled else agent, 100, 1e-9)


def test_a_wrong_update_is_noticed():
    for flag, value in (("clip_coef", 0.01), ("max_grad_norm", 0.1), ("vf_coef", 1.0)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_updates(reference, agent, 3, 1e-5)


def test_adam_matches_torch():
    torch.manual_seed(0)
    mine = torch.randn(20)
    theirs = torch.nn.Parameter(mine.double())
    adam = variant.Adam(mine, lr=1e-2, eps=1e-5)
    reference = torch.optim.Adam([theirs], lr=1e-2, eps=1e-5)
    for _ in range(500):
        gradient = torch.randn(20) * torch.rand(())
        adam.step(gradient)
        theirs.grad = gradient.double()
        reference.step()
    torch.testing.assert_close(mine.double(), theirs.detach(), atol=1e-4, rtol=0)


def test_acting_agrees():
    reference, agent = make_pair()
    obs, noise = torch.randn(4, OBS), torch.randn(4, A)
    actions, _, values = reference.act(obs, noise)
    np.testing.assert_allclose(agent.act(obs.numpy(), noise.numpy()), actions, atol=1e-5)
    np.testing.assert_allclose(agent.value(obs.numpy()), values, atol=1e-5)


@pytest.mark.parametrize("flags", [{}, {"num_envs": 3}, {"target_kl": 1e-9}], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_whole_iteration_agrees(compiled, flags):
    """The two scripts from the command line's settings to the checkpoint, on one seed."""
    flags |= {"num_steps": 240, "total_timesteps": 240 * flags.get("num_envs", 1)}
    torch._dynamo.reset()
    one = read_checkpoint(train(baseline, **flags, save_model=True, exp_name="one"))
    compiled = {"compile": True} if compiled else {}
    other = read_checkpoint(train(variant, **flags, save_model=True, **compiled))
    assert_same(one["agent"]["model"], other["agent"]["model"], tolerance=1e-4)
    assert_same(one["normalizer"], other["normalizer"], tolerance=1e-3)
    initial = baseline.ActorCritic(3, 1).state_dict()
    assert (one["agent"]["model"]["actor_logstd"] != initial["actor_logstd"]).all()
    if "target_kl" in flags:  # one epoch of the two
        steps = one["agent"]["optimizer"][0]["step"].item()
        assert steps == 4
        assert other["agent"]["optimizer"]["beta_powers"][0].item() == pytest.approx(0.9**4)


def test_no_graph_break_and_no_recompilation():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counts = []
    learn = variant.PPO.learn

    def counted(self, order):
        metrics = learn(self, order)
        counters = torch._dynamo.utils.counters
        counts.append((counters["stats"]["unique_graphs"], len(counters["graph_break"])))
        return metrics

    variant.PPO.learn = counted
    try:
        train(variant, total_timesteps=320, compile=True)
    finally:
        variant.PPO.learn = learn
    assert counts == [(2, 0)] * 5, counts


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


# Whole runs

ROWS = pytest.mark.parametrize(
    "command",
    [(BASELINE,), (VARIANT,), (VARIANT, "--compile", "--cudagraphs")],
    ids=["baseline", "eager", "compile+cudagraphs"],
)
FEW = ("--env-id=Pendulum-v1", "--num-steps=256", "--num-minibatches=4", "--update-epochs=2")


@ROWS
def test_run_from_end_to_end(command, tmp_path):
    flags = ("--total-timesteps=2000", "--eval-every=1000", "--eval-episodes=2", "--save-model")
    result = run(tmp_path, *command, *FEW, *flags)
    run_dir, config, stages, values = read_run(tmp_path)
    assert str(run_dir.name) in result.stdout and config["args"]["env_id"] == "Pendulum-v1"
    assert stages["window"]["env_steps"] == 1792 - 3 * 256 and stages["sps_steady"] > 0
    assert [step for step, _ in values["charts/episodic_length"]] == list(range(200, 1792, 200))
    rates = [value for _, value in values["charts/learning_rate"]]
    assert rates == pytest.approx([3e-4 * (1 - i / 7) for i in range(7)])
    assert [step for step, _ in values["charts/eval_return"]] == [1024, 1792]
    for name in (*baseline.METRICS, "explained_variance"):
        series = [value for _, value in values[f"losses/{name}"]]
        assert len(series) == 7 and all(math.isfinite(value) for value in series)
    assert len({value for _, value in values["losses/value_loss"]}) == 7
    assert (run_dir / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-steps", "100"), ("1 x --num-steps 100 = 100", "--num-minibatches 32")),
        (("--num-envs", "0"), ("--num-envs must be positive",)),
        (("--total-timesteps", "1000"), ("1000", "rollout of 2048")),
        (("--num-minibatches", "2048"), ("--no-norm-adv",)),
        (("--env-id", "CartPole-v1"), ("continuous actions", "CartPole-v1")),
        (("--cudagraphs", "--no-cuda"), ("--no-cuda",)),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, words):
    done, lines = command_line(variant, *flags)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    error = [line for line in lines if line.startswith("error")]
    assert len(error) == 1 and all(word in error[0] for word in words), lines
    assert not Path("runs").exists()


@SCRIPTS
@pytest.mark.parametrize("flags", [{}, {"num_envs": 3, "env_id": "Hopper-v5"}], ids=["1", "3"])
def test_a_resumed_run_is_the_uninterrupted_run(module, flags):
    """Bitwise: in the middle of an episode, normalization and annealed rate included."""
    flags |= {"save_model": True, "total_timesteps": 64 * 5 * flags.get("num_envs", 1)}
    whole = train(module, **flags, exp_name="whole")
    part = train(module, **flags, exp_name="part", checkpoint_every=flags["total_timesteps"] // 2)
    assert_same(read_checkpoint(whole), read_checkpoint(part))

    saved, save = [], module.save_checkpoint

    def stop_after_the_first(path, checkpoint):
        saved.append(save(path, checkpoint))
        raise KeyboardInterrupt

    module.save_checkpoint = stop_after_the_first
    try:
        with pytest.raises(SystemExit):
            train(module, **flags, exp_name="cut", checkpoint_every=flags["total_timesteps"] // 2)
    finally:
        module.save_checkpoint = save
    (cut,) = Path("runs").glob("*__cut__*")
    assert 0 < read_checkpoint(cut)["global_step"] < flags["total_timesteps"]
    train(module, **flags, resume=str(cut))
    assert_same(read_checkpoint(whole), read_checkpoint(cut))
    assert scalars(whole) == scalars(cut)


@SCRIPTS
def test_evaluation_uses_frozen_statistics(module):
    normalizer = module.Normalizer(2, 3, 0.99)
    for _ in range(50):
        normalizer.observe(np.random.default_rng(1).normal(5, 3, (2, 3)))
    before = {name: array.clone() for name, array in normalizer.state_dict().items()}
    model, args = module.ActorCritic(3, 1), module.Args(**SMALL, eval_episodes=2)
    found = [module.evaluate(model, normalizer, args, CPU, None) for _ in range(2)]
    assert found[0] == found[1] < 0
    assert_same(before, normalizer.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [(BASELINE,), (VARIANT, "--compile")], ids=["baseline", "variant"]
)
def test_inverted_pendulum_is_learned(command, tmp_path):
    """A random policy keeps the pole up for some 6 steps, a solved one for all 1,000."""
    flags = ("--env-id", "InvertedPendulum-v5", "--total-timesteps", "100000")
    run(tmp_path, *command, *flags, "--eval-every", "50000")
    values = read_run(tmp_path)[3]
    returns = [value for _, value in values["charts/episodic_return"]]
    assert np.mean(returns[:20]) < 30, "not a task that starts unsolved"
    assert np.mean(returns[-10:]) > 700, returns[-10:]
    assert values["charts/eval_return"][-1][1] > 700
