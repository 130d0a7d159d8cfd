"""PPO, both scripts: mathematics, normalization, parity, whole runs, resuming and learning.

What PPO shares with SAC to the letter is tested there; that it is shared is tested in test_shared.
"""

import math
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from helpers import evaluation_seeds
from test_sac import Named, Uneven, read_run, read_scalars, run, what_named_does
from test_sac_parity import WITHOUT_OR_COMPILED, assert_hunks_are_marked, backend  # noqa: F401

from leanrl import ppo_continuous_action as baseline
from leanrl import ppo_continuous_action_async as async_baseline
from leanrl import ppo_continuous_action_async_torchcompile as async_variant
from leanrl import ppo_continuous_action_torchcompile as variant

BASELINE, VARIANT = Path(baseline.__file__).name, Path(variant.__file__).name
SMALL = {"env_id": "Pendulum-v1", "num_steps": 64, "num_minibatches": 4, "update_epochs": 2}
OBS, A, CPU = 5, 3, torch.device("cpu")
LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
LOSSES = tuple(f"losses/{name}" for name in LOSSES)
KINDS = [baseline, variant, async_baseline, async_variant]
ALL = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.partition("_")[2])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture(params=[baseline, variant], ids=["baseline", "variant"])
def module(request):
    return request.param


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread, which is what --compile goes on with."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def registered():
    """Registers an environment -> its id."""

    def register(make) -> str:
        gym.register("Test-v0", entry_point=lambda **_: make())
        return "Test-v0"

    yield register
    gym.registry.pop("Test-v0")


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


def read_checkpoint(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def flat(statistics: dict) -> dict:
    """Statistics of both scripts, whose counts differ in shape alone, in one form."""
    found = {name: rows.double().reshape(len(rows), -1) for name, rows in statistics.items()}
    return {name: rows[:, :1] if "count" in name else rows for name, rows in found.items()}


# Mathematics


def test_advantages_match_a_loop_in_float64(module):
    """Over random terminations and truncations, both on one step included."""
    rng, gamma, lam = np.random.default_rng(0), 0.97, 0.9
    for steps in (1, 2, 5, 64, 100):
        rewards, values, following = rng.normal(size=(3, steps, 4))
        final_values, last = rng.normal(size=(steps, 4)), rng.normal(size=4)
        terminated, truncated = rng.random((2, steps, 4)) < 0.2
        expected, advantage = np.zeros((steps, 4)), np.zeros(4)
        for t in reversed(range(steps)):
            follows = values[t + 1] if t + 1 < steps else last
            following[t] = np.where(truncated[t], final_values[t], follows)
            following[t] = np.where(terminated[t], 0.0, following[t])
            delta = rewards[t] + gamma * following[t] - values[t]
            advantage = delta + gamma * lam * (1 - (terminated[t] | truncated[t])) * advantage
            expected[t] = advantage
        inputs = [torch.tensor(x, dtype=torch.float32) for x in (rewards, values, following)]
        ended = torch.tensor(terminated | truncated, dtype=torch.float32)
        found = module.compute_gae(*inputs, ended, gamma, lam)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_losses_match_plain_loops(module):
    """Equations 7 and 9 and the clipped value loss, as Stable-Baselines3 and CleanRL have them."""
    torch.manual_seed(0)
    args = module.Args(ent_coef=0.01, clip_coef=0.1)
    model = module.ActorCritic(OBS, A).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    columns = {"obs": torch.randn(6, OBS), "actions": torch.randn(6, A)}
    columns |= {name: torch.randn(6) for name in ("log_probs", "values", "advantages", "returns")}
    batch = module.Batch(**{name: column.double() for name, column in columns.items()})
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
    assert metrics == {name: pytest.approx(x) for name, x in zip(LOSSES, expected, strict=True)}
    assert not any(value.requires_grad or value.shape for value in metrics.values())
    assert loss.item() == pytest.approx(of_policy - 0.01 * entropy + 0.5 * of_value)
    args.clip_vloss = args.norm_adv = False
    _, plain = module.ppo_loss(model, batch, args)
    error = 0.5 * (values - batch.returns).square().mean().item()
    assert plain["losses/value_loss"].item() == pytest.approx(error)
    ratios, raw = (log_probs - batch.log_probs).exp(), batch.advantages
    surrogate = torch.min(ratios * raw, ratios.clamp(0.9, 1.1) * raw).mean().item()
    assert plain["losses/policy_loss"].item() == pytest.approx(-surrogate)


@ALL
def test_weights_are_orthogonal_at_first(kind):
    """Stretched by sqrt 2 in hidden layers, 0.01 in the policy's last layer and 1 in the value's.

    What a layer stretches by are its singular values.
    """
    agent = kind.PPO(kind.Args(), OBS, A, CPU)
    for network, last in ((agent.model.actor_mean, 0.01), (agent.model.critic, 1.0)):
        for layer, gain in zip(network[0::2], (math.sqrt(2), math.sqrt(2), last), strict=True):
            stretched = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(stretched, torch.full_like(stretched, gain))
            assert not layer.bias.any()
    assert agent.model.actor_logstd.tolist() == [0.0] * A


def test_gradients_are_scaled_down_to_the_longest(module):
    """Adam's first average is a tenth of the gradient."""
    lengths = []
    for limit in (1e6, 1e-2):
        torch.manual_seed(0)
        args = module.Args(**LIKE_PAIR, max_grad_norm=limit)
        agent, reference = module.PPO(args, OBS, A, CPU), baseline.PPO(args, OBS, A, CPU)
        agent.update(random_batch(reference), torch.arange(64))
        if module is baseline:
            averages = [each["exp_avg"] for each in agent.optimizer.state.values()]
        else:
            averages = agent.optimizer.exp_avgs
        lengths.append(10 * torch.cat([each.flatten() for each in averages]).norm().item())
    assert lengths[0] > 0.1 and lengths[1] == pytest.approx(1e-2, rel=1e-3)


# Environments


@ALL
def test_what_is_far_off_is_clipped_to_ten_deviations(kind, registered):
    class Jump(Noisy):
        steps = 0

        def step(self, action):
            obs, reward, *_ = super().step(action)
            self.steps += 1
            far = 1e6 if self.steps == 400 else 0.0
            return obs + far, reward - far, False, False, {}

    envs = kind.make_envs(registered(Jump), 2, gamma=0.9)
    envs.reset(seed=1)
    found = [envs.step(np.zeros((2, A), np.float32))[:2] for _ in range(400)]
    assert np.abs(found[398][0]).max() < 5
    assert (found[399][0] == 10).all() and (found[399][1] == -10).all()


class Noisy(gym.Env):
    """Random observations and rewards; ends by either kind of end, or both at once."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float64)
    action_space = gym.spaces.Box(-0.5, 0.5, (A,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.normal(3, 2, OBS), {}

    def step(self, action):
        assert not (np.abs(action) > 0.5).any()
        obs = self.np_random.normal(3, 2, OBS)
        reward = self.np_random.normal(1, 5) - np.square(action).sum()
        terminated, truncated = self.np_random.random(2) < 0.1
        return obs, reward, bool(terminated), bool(truncated), {"unread": 1}


def test_the_variants_environments_are_those_of_gymnasiums_wrappers(registered):
    """Per environment and step, final observations and finished episodes included."""
    env_id, actions = registered(Noisy), np.full((3, A), 2.0, np.float32)  # outside of the box
    reference, envs = (each.make_envs(env_id, 3, gamma=0.97) for each in (baseline, variant))
    close, episodes = {"atol": 1e-5, "rtol": 1e-5}, 0
    np.testing.assert_allclose(envs.reset(seed=1)[0], reference.reset(seed=1)[0], **close)
    for step in range(300):
        if step == 150:  # statistics are put back into others, of which they are all that counts
            kept = variant.get_statistics(envs)
            envs.step(actions)
            variant.set_statistics(envs, kept)
            state = baseline.get_statistics(reference)
            torch.testing.assert_close(flat(kept), flat(state), **close)
            reference.step(actions)
            baseline.set_statistics(reference, state)
        expected, found = reference.step(actions), envs.step(actions)
        for one, other in zip(found[:4], expected[:4], strict=True):
            np.testing.assert_allclose(one, other, **close)
        ended = expected[2] | expected[3]
        assert bool(found[4]) == ended.any() and found[0].dtype == np.float32
        for i in ended.nonzero()[0]:
            one, other = found[4]["final_obs"][i], expected[4]["final_obs"][i]
            np.testing.assert_allclose(one, other, **close)
            for key in ("r", "l"):
                one, other = (x[4]["final_info"]["episode"][key][i] for x in (found, expected))
                assert one == pytest.approx(other)
            episodes += 1
    assert episodes > 100
    raw = [each.make_envs(env_id, 2).reset(seed=1)[0] for each in (baseline, variant)]
    assert np.abs(raw[0]).max() > 3 and (raw[0] == raw[1]).all()  # evaluation's


class TwoEnds(gym.Env):
    """Counts its steps in the observation; ends after 3: odd episodes truncate, even terminate."""

    observation_space, action_space = gym.spaces.Box(0, 10, (1,)), gym.spaces.Box(-1, 1, (1,))
    episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.episode = 0, self.episode + 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        end, odd = self.steps == 3, self.episode % 2 == 1
        return np.full(1, self.steps, np.float32), 1.0, end and not odd, end and odd, {}


def test_only_a_truncation_bootstraps_from_its_final_observation(module, registered, monkeypatch):
    """What `main` hands to learning, the observations of a new episode's beginning included."""
    rollouts, prepare = [], module.PPO.prepare

    def prepared(self, rollout, *rest):
        fields = rollout if isinstance(rollout, dict) else vars(rollout)
        values = self.model(torch.tensor(normalized))[2]
        names = ("obs", "ended", "final_values")
        arrays = [np.asarray(fields[name]).copy().ravel() for name in names]
        rollouts.append((*arrays, values))
        return prepare(self, rollout, *rest)

    monkeypatch.setattr(module.PPO, "prepare", prepared)
    statistics, normalized = RunningMeanStd(shape=(1,)), np.empty((32, 1), np.float32)
    for i, raw in enumerate([0, 1, 2, 3] * 8):  # each 3 is a final observation
        statistics.update(np.array([[raw]]))
        normalized[i] = (raw - statistics.mean) / np.sqrt(statistics.var + 1e-8)
    train(module, env_id=registered(TwoEnds), num_steps=24, total_timesteps=24)
    obs, ended, final_values, values = rollouts[0]
    np.testing.assert_allclose(obs[:24], normalized.reshape(8, 4)[:, :3].ravel(), atol=1e-5)
    assert ended.nonzero()[0].tolist() == [2, 5, 8, 11, 14, 17, 20, 23]
    assert final_values.nonzero()[0].tolist() == [2, 8, 14, 20]  # odd episodes are truncated
    expected = values.detach().numpy()[3::8]
    np.testing.assert_allclose(final_values[[2, 8, 14, 20]], expected, atol=1e-5)


def test_an_evaluation_is_the_mean_action_under_frozen_statistics(module):
    """Against a loop over single environments without any of the script's machinery."""
    args = module.Args(**SMALL, eval_episodes=2, seed=4)
    torch.manual_seed(0)
    agent = module.PPO(args, 3, 1, CPU)
    # At first it hardly depends on what it sees; actions beyond their bounds would hide the rest
    agent.model.actor_mean[4].weight.data.mul_(30)
    envs = module.make_envs("Pendulum-v1", 2, gamma=0.99)
    envs.reset(seed=1)
    statistics = module.get_statistics(envs)
    means = np.array([[0.5, 0.3, 2.0], [-0.7, 0.3, -1.0]])  # far apart, as after other episodes
    variances = np.array([[0.1, 1e-4, 3.0], [0.3, 2e-4, 2.0]])  # the second is clipped at 10
    statistics["obs_rms_mean"], statistics["obs_rms_var"] = map(torch.tensor, (means, variances))
    with pytest.raises(ValueError):
        module.set_statistics(module.make_envs("Pendulum-v1", 1, gamma=0.99), statistics)
    module.set_statistics(envs, statistics)
    statistics, returns = module.get_statistics(envs), []
    samples = np.random.default_rng(0).normal(size=(2, 100_000, 3)) * np.sqrt(variances)[:, None]
    samples = (samples + means[:, None]).reshape(-1, 3)  # of both environments, as one set
    mean, std = means.mean(axis=0), np.sqrt(variances.mean(axis=0) + means.var(axis=0) + 1e-8)
    np.testing.assert_allclose(samples.mean(axis=0), mean, atol=0.05)
    np.testing.assert_allclose(samples.std(axis=0), std, rtol=0.02)
    for seed in evaluation_seeds(4, 2):
        env = gym.make("Pendulum-v1")
        obs, _ = env.reset(seed=seed)
        total, truncated = 0.0, False
        while not truncated:
            inputs = torch.tensor(np.clip((obs - mean) / std, -10, 10), dtype=torch.float32)
            action = agent.model.actor_mean(inputs).detach().numpy()
            obs, reward, _, truncated, _ = env.step(action)
            total += reward
        returns.append(total)
    agent.act = agent.learn = None  # compiled or captured, they would be for another batch
    found = [module.evaluate(agent, args, statistics, None) for _ in range(2)]
    assert found == [pytest.approx(np.mean(returns), rel=1e-3)] * 2
    torch.testing.assert_close(module.get_statistics(envs), statistics, atol=0, rtol=0)


def test_every_episode_of_an_evaluation_counts_once(module, monkeypatch):
    """However long it is and however it ends: the first one of each environment, to its end."""
    spec = gym.envs.registration.EnvSpec("Uneven-v0", entry_point=lambda **_: Uneven())
    monkeypatch.setitem(gym.registry, "Uneven-v0", spec)
    args = module.Args(env_id="Uneven-v0", eval_episodes=12, seed=3)
    agent = module.PPO(args, 1, 1, CPU)
    envs = module.make_envs("Uneven-v0", 2, gamma=0.99)
    envs.reset(seed=1)
    found = module.evaluate(agent, args, module.get_statistics(envs), None)
    lengths = [5 + 4 * (seed % 4) ** 2 for seed in evaluation_seeds(3, 12)]
    assert found == pytest.approx(np.mean(lengths)) and set(lengths) == {5, 9, 21, 41}


# Parity


def test_an_iteration_is_that_of_stable_baselines3():
    """Advantages, 2 epochs of 4 minibatches: equal parameters after, where the settings coincide.

    Its coefficient of the value loss has no half in it, and the value is not clipped. It bootstraps
    at a truncation by adding the discounted value of the final observation to the reward.
    """
    sb3 = pytest.importorskip("stable_baselines3")
    torch.manual_seed(0)
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
    parameters = list(zip(mine.parameters(), counterparts, strict=True))
    for parameter, counterpart in parameters:
        parameter.data.add_(0.2 * torch.randn_like(parameter))
        counterpart.data.copy_(parameter)
    initial = [parameter.detach().clone() for parameter, _ in parameters]

    generator = np.random.default_rng(0)
    obs, actions = generator.normal(size=(2, 65, 1, 3)).astype(np.float32)
    actions, rewards = torch.tensor(actions[:64, :, :1]), generator.normal(size=(64, 1))
    terminated, truncated = generator.random((2, 64, 1)) < 0.1
    finals = np.where(truncated & ~terminated, generator.normal(size=(64, 1)), 0)
    rollout = baseline.Rollout(args, 3, 1, CPU)
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
    orders = [np.random.permutation(64) for _ in range(2)]
    epochs = [mine.learn(batch, torch.tensor(order)) for order in orders]
    clipfracs = torch.cat([metrics["losses/clipfrac"] for metrics in epochs])
    assert clipfracs.shape == (8,)
    np.random.seed(0)
    theirs.train()
    assert 0.05 < clipfracs.mean() < 0.95, "clipping is not part of the comparison"
    for (parameter, counterpart), before in zip(parameters, initial, strict=True):
        torch.testing.assert_close(parameter, counterpart, atol=1e-6, rtol=0)
        assert (parameter - before).abs().mean() > 1e-4


LIKE_PAIR = {"num_steps": 256, "num_minibatches": 4, "ent_coef": 0.01}


def make_pair(device=CPU):
    """A baseline agent and a variant agent with equal parameters that are not quite the initial."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**LIKE_PAIR), OBS, A, device)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    agent = variant.PPO(variant.Args(**LIKE_PAIR), OBS, A, device)
    agent.load_state_dict(reference.state_dict())
    return reference, agent


def random_batch(reference, device=CPU):
    """256 steps that the policy has made."""
    obs, actions, noise = (torch.randn(256, n, device=device) for n in (OBS, A, 2))
    with torch.no_grad():
        mean, log_std, values = reference.model(obs)
        log_probs = baseline.gaussian_log_prob(actions, mean, log_std)
    return baseline.Batch(
        obs=obs,
        actions=actions,
        log_probs=log_probs,
        values=values,
        advantages=noise[:, 0],
        returns=values + noise[:, 1],
    )


def run_epochs(reference, agent, count, tolerance, device=CPU):
    """As many epochs of 4 updates on both; all metrics and, at the end, all tensors must agree."""
    batch, close = random_batch(reference, device), {"atol": tolerance, "rtol": tolerance}
    for _ in range(count):
        order = torch.randperm(256, device=device)
        expected, found = (each.learn(batch, order) for each in (reference, agent))
        assert set(found) == set(LOSSES)
        torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(agent.state_dict(), reference.state_dict(), **close)
    state, moments = reference.optimizer.state.values(), agent.optimizer.state_dict()["state"]
    for key, found in zip(("exp_avg", "exp_avg_sq"), moments[:2], strict=True):
        expected = torch.cat([each[key].flatten() for each in state])
        torch.testing.assert_close(found, expected, **close)


@COMPILED
def test_updates_agree(compiled):
    """Compiled: in one graph, and nothing compiles again."""
    reference, agent = make_pair()
    if compiled:
        torch._dynamo.reset()
        variant.compile_agent(agent)
    counters = torch._dynamo.utils.counters
    counters.clear()
    run_epochs(reference, agent, 1, 1e-5)
    assert not torch.equal(reference.model.actor_logstd, make_pair()[0].model.actor_logstd)
    for _ in range(5):
        agent.learn(random_batch(reference), torch.randperm(256))
    assert counters["stats"]["unique_graphs"] == compiled and not counters["graph_break"]


@WITHOUT_OR_COMPILED
def test_numbers_in_args_may_change_between_updates(backend):  # noqa: F811
    """Who anneals a flag gets what it says: the update compiles once more, and then never again."""
    reference, agent = make_pair()
    if backend:
        variant.compile_agent(agent)
    counters, found = torch._dynamo.utils.counters, []
    for number in range(5):
        for each in (reference, agent):
            each.args.ent_coef = 0.01 * (5 - number)
            each.args.vf_coef = 0.5 + 0.1 * number
            each.args.max_grad_norm = 0.5 - 0.1 * number
        run_epochs(reference, agent, 1, 1e-4)
        found.append(counters["stats"]["unique_graphs"])
    assert found == ([1, 2, 2, 2, 2] if backend else [0] * 5)
    for clip_coef in (0.01, 0.5, 0.3):  # compiles for each value: torch keeps the bounds of a clamp
        for each in (reference, agent):
            each.args.clip_coef = clip_coef
        run_epochs(reference, agent, 1, 1e-4)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_a_hundred_updates_agree(compiled, float64):
    reference, agent = make_pair()
    if compiled:
        variant.compile_agent(agent)
    run_epochs(reference, agent, 25, 1e-9)


@pytest.mark.gpu
@COMPILED
def test_captured_epochs_agree(compiled):
    device = torch.device("cuda")
    reference, agent = make_pair(device)
    if compiled:
        variant.compile_agent(agent)
    variant.capture_agent(agent)
    run_epochs(reference, agent, 10, 1e-3, device)  # warm-up, capture, replays
    agent.args.ent_coef *= 2
    with pytest.raises(AssertionError, match="CUDA graphs keep args"):
        agent.learn(random_batch(reference, device), torch.randperm(256, device=device))


def test_acting_refuses_a_network_that_it_does_not_compute(monkeypatch):
    def mlp(inputs, outputs, gain):
        return torch.nn.Sequential(torch.nn.Linear(inputs, 64), torch.nn.Linear(64, outputs))

    for module in (variant, async_variant):
        monkeypatch.setattr(module, "mlp", mlp)
        agent = module.PPO(module.Args(), 3, 1, torch.device("cpu"))
        with pytest.raises(AssertionError, match="acting computes another network"):
            agent.publish()
    for module in (async_baseline, async_variant):
        with pytest.raises(AssertionError, match="only parameters reach the collector"):
            module.get_weights(torch.nn.BatchNorm1d(3))


def test_a_wrong_update_is_noticed():
    for flag, value in (("clip_coef", 0.01), ("max_grad_norm", 0.1), ("vf_coef", 1.0)):
        reference, agent = make_pair()
        setattr(agent.args, flag, value)
        with pytest.raises(AssertionError):
            run_epochs(reference, agent, 1, 1e-5)


def test_acting_agrees():
    """Also with weights that were changed in place, once they are published."""
    reference, agent = make_pair()
    for _ in range(2):
        agent.publish()
        obs, noise = torch.randn(4, OBS), torch.randn(4, A)
        actions, _, values = reference.act(obs, noise)
        np.testing.assert_allclose(agent.act(obs.numpy(), noise.numpy()), actions, atol=1e-5)
        np.testing.assert_allclose(agent.value(obs.numpy()), values, atol=1e-5)
        one = obs[0]
        np.testing.assert_allclose(agent.value(one.numpy()), reference.value(one), atol=1e-5)
        run_epochs(reference, agent, 1, 1e-5)


@pytest.mark.usefixtures("backend")
def test_whole_compiled_iterations_agree(registered):
    assert_whole_iterations_agree({}, {"compile": True}, registered)


@pytest.mark.parametrize(
    "flags", [{"num_envs": 3}, {"target_kl": 1e-9}], ids=["3 environments", "target_kl"]
)
def test_whole_iterations_agree(flags, registered):
    assert_whole_iterations_agree(flags, {}, registered)


def assert_whole_iterations_agree(flags, more, registered):
    """Both `main`s on one seed: every row of metrics, every tensor of the checkpoint."""
    flags = flags | LIKE_PAIR | {"env_id": registered(Noisy), "save_model": True}
    flags["total_timesteps"] = 512 * flags.get("num_envs", 1)
    found = [train(baseline, **flags, exp_name="one"), train(variant, **flags, **more)]
    one, other = (read_scalars(run_dir) for run_dir in found)
    for tag in (tag for tag in one | other if not tag.startswith(("charts/S", "charts/cpu"))):
        np.testing.assert_allclose(other[tag], one[tag], rtol=1e-2, atol=1e-3, err_msg=tag)
    one, other = map(read_checkpoint, found)
    for name, tensor in one["agent"].items():  # Adam makes much of the last bit of a tiny gradient
        assert (tensor - other["agent"][name]).abs().mean() < 1e-4, name
    expected = flat(one["statistics"])
    torch.testing.assert_close(flat(other["statistics"]), expected, atol=1e-3, rtol=1e-3)
    steps = one["optimizers"][0][0]["step"].item()
    assert steps == (8 if "target_kl" in flags else 16)  # with a limit, one epoch of the two
    assert other["optimizers"][0][2].item() == pytest.approx(0.9**steps)
    torch.testing.assert_close(other["generators"][0], one["generators"][0])


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


# Whole runs

STAGES = {"simulation", "inference", "replay", "backpropagation", "logging", "checkpoint"}
STAGES |= {"evaluation", "untracked"}
GRAPHS = pytest.param({"compile": True, "cudagraphs": True}, marks=pytest.mark.gpu)


@pytest.mark.parametrize("more", [None, {"cudagraphs": True}, GRAPHS], ids=str)
def test_run_from_end_to_end(more, tmp_path, monkeypatch, capsys):
    """The baseline in a process of its own, the variant in this one."""
    flags = SMALL | {"num_steps": 256, "total_timesteps": 2000}
    flags |= {"eval_every": 1000, "eval_episodes": 2}
    rows, learn = [], variant.PPO.learn
    if more is None:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        err = run(tmp_path, BASELINE, *words, "--save-model").stderr
    else:
        monkeypatch.setattr(variant.PPO, "learn", lambda *x: rows.append(learn(*x)) or rows[-1])
        variant.main(variant.Args(**flags, **more, save_model=True))
        out, err = capsys.readouterr()
        assert not out
        assert err.count("without CUDA it has no effect") == (not torch.cuda.is_available())
    run_dir, config, stages, scalars = read_run(tmp_path)
    assert config["args"].items() >= flags.items()
    assert (stages["env_steps"], stages["iterations"]) == (1792 - 3 * 256, 4)  # rollouts
    assert stages["sps_steady"] > 0
    assert stages["stages"].keys() == STAGES and min(stages["stages"].values()) > 0
    assert f"steps/s, runs/{run_dir.name}" in err
    assert [step for step, _ in scalars["charts/episodic_return"]] == list(range(200, 1792, 200))
    assert {value for _, value in scalars["charts/episodic_length"]} == {200}
    assert min(value for _, value in scalars["charts/episodic_return"]) < -100  # not normalized
    rates = [value for _, value in scalars["charts/learning_rate"]]
    assert rates == pytest.approx([3e-4 * (1 - i / 7) for i in range(7)])
    assert [step for step, _ in scalars["charts/eval_return"]] == [1024, 1792]
    assert {"charts/SPS", "charts/cpu_seconds"} < scalars.keys()
    for tag in (*LOSSES, "losses/explained_variance"):
        assert [step for step, _ in scalars[tag]] == list(range(256, 1793, 256))
        assert all(math.isfinite(value) for _, value in scalars[tag])
    assert len({value for _, value in scalars["losses/value_loss"]}) == 7
    if rows and not torch.cuda.is_available():  # a graph does not call `learn` again
        for tag in LOSSES:
            epochs = torch.stack([metrics[tag] for metrics in rows])
            epochs = epochs.unflatten(0, (7, 2))  # (rollouts, epochs, minibatches)
            expected = epochs[:, -1, -1]
            if tag == "losses/clipfrac":
                expected = epochs.mean(dim=(1, 2))
            values = [value for _, value in scalars[tag]]
            assert values == pytest.approx(expected.tolist(), rel=1e-5)
    assert read_checkpoint(run_dir)["global_step"] == 1792


def test_the_loop_acts_and_learns_as_it_says(module, monkeypatch):
    """Two rollouts, then two of a resumed run: seeds, noise, orders, episodes, what is logged."""
    seeds, gammas, noises, orders, batches, counted, purged, first = ([] for _ in range(8))

    class Seeded(Named):
        def reset(self, *, seed=None, options=None):
            seeds.extend([] if seed is None else [seed])
            return super().reset(seed=seed)

    kind, make_envs, tick = module.PPO, module.make_envs, module.Run.tick
    act, learn, prepare, writer = kind.act, kind.learn, kind.prepare, module.SummaryWriter

    def made(env_id, num_envs, gamma):
        gammas.append(gamma)
        return make_envs(env_id, num_envs, gamma)

    def acted(self, obs, noise):
        first.append({name: tensor.clone() for name, tensor in self.state_dict().items()})
        noises.append(torch.as_tensor(noise).clone())
        return act(self, obs, noise)

    def learned(self, batch, order):
        orders.append(order.tolist())
        return learn(self, batch, order)

    def prepared(self, *inputs):
        batch = prepare(self, *inputs)  # a view of the rollout, which the next one overwrites
        batches.append((batch.returns.numpy().copy(), batch.values.numpy().copy()))
        return batch

    def tick_noted(run):
        tick(run)
        counted.append(run.watch.steps)

    def writer_noted(*args, purge_step=None, **kwargs):
        purged.append(purge_step)
        return writer(*args, purge_step=purge_step, **kwargs)

    monkeypatch.setattr(module, "make_envs", made)
    monkeypatch.setattr(module, "SummaryWriter", writer_noted)
    monkeypatch.setattr(module.Run, "tick", tick_noted)
    for name, spy in (("act", acted), ("learn", learned), ("prepare", prepared)):
        monkeypatch.setattr(kind, name, spy)
    spec = gym.envs.registration.EnvSpec("Seeded-v0", entry_point=lambda **_: Seeded())
    monkeypatch.setitem(gym.registry, "Seeded-v0", spec)
    flags = {"env_id": "Seeded-v0", "num_envs": 2, "num_steps": 32, "seed": 7, "gamma": 0.9}
    flags |= {"update_epochs": 3, "save_model": True}
    run_dir = train(module, **flags, total_timesteps=128)
    assert counted == [64, 128]
    counted.clear()
    train(module, **flags, total_timesteps=256, anneal_lr=False, resume=str(run_dir))
    assert counted == [64, 128], "a speed counts the steps of this process"
    assert purged == [1, 129] and set(gammas) == {0.9}
    assert seeds == [7, 8, 135, 136], "a resumed run has other episodes"
    torch.manual_seed(7)
    torch.testing.assert_close(first[0], dict(kind(module.Args(**flags), 3, 2, CPU).state_dict()))
    noise = torch.stack(noises)
    assert noise.shape == (128, 2, 2) and len(noise.unique()) > 500
    assert abs(noise.mean()) < 0.2 and abs(noise.std() - 1) < 0.15
    assert len(orders) == 12 == len({tuple(order) for order in orders})
    assert all(sorted(order) == list(range(64)) != order for order in orders)
    scalars = read_scalars(run_dir)
    expected = []
    for begin in (0, 128):
        for i in range(2):
            ends = what_named_does(7 + begin + i, 64)[1]
            expected += [(begin + 2 * t, total) for t, total in ends.items()]
    assert sorted(scalars["charts/episodic_return"]) == sorted(expected)
    rates = [value for _, value in sorted(scalars["charts/learning_rate"])]
    assert rates == pytest.approx([3e-4, 1.5e-4, 3e-4, 3e-4])
    explained = [value for _, value in sorted(scalars["losses/explained_variance"])]
    for found, (returns, values) in zip(explained, batches, strict=True):
        assert found == pytest.approx(
            1 - np.var(returns - values) / np.var(returns), rel=1e-3, abs=1e-4
        )


def test_epochs_end_at_the_last_minibatchs_divergence(module, monkeypatch):
    """More than the limit ends them, not as much as the limit, nor earlier minibatches."""
    divergences, epochs = [(9.0, 0.25), (9.0, 0.125), (0.0, 0.375), (0.0, 0.0)], []

    def learn(self, batch, order):
        metrics = {tag: torch.tensor([9.0, 9.0]) for tag in LOSSES}
        metrics["losses/old_approx_kl"] = torch.tensor([0.0, 9.0 * (len(epochs) == 3)])
        metrics["losses/approx_kl"] = torch.tensor(divergences[len(epochs)])
        epochs.append(order)
        return metrics

    monkeypatch.setattr(module.PPO, "learn", learn)
    flags = {"num_envs": 1, "update_epochs": 4, "total_timesteps": 64}
    train(module, **flags, target_kl=0.25)
    assert len(epochs) == 3
    epochs.clear()
    train(module, **flags, exp_name="without")
    assert len(epochs) == 4


def test_a_run_leaves_a_trace(module):
    """Of a rollout after three that warm up and three that are timed."""
    run_dir = train(module, stopwatch="trace", total_timesteps=64 * 9)
    assert (run_dir / "trace.json.gz").stat().st_size > 1000


def test_a_resumed_run_goes_on_from_what_was_saved(module, monkeypatch):
    """Networks, optimizer, statistics, counters; a rate that is annealed over the longer run."""
    flags = {"num_envs": 2, "save_model": True}
    run_dir = train(module, **flags, total_timesteps=3 * 128)
    saved = read_checkpoint(run_dir)
    assert saved["global_step"] == 384 and saved["statistics"]["obs_rms_mean"].shape == (2, 3)
    learn, set_statistics, seen = module.PPO.learn, module.set_statistics, []

    def restored(envs, statistics):
        set_statistics(envs, statistics)
        found = module.get_statistics(envs)
        torch.testing.assert_close(found, saved["statistics"], atol=0, rtol=0)

    def learned(self, *inputs):
        if not seen:
            state = dict(self.state_dict())
            torch.testing.assert_close(state, dict(saved["agent"]), atol=0, rtol=0)
            states = [each.state_dict()["state"] for each in self.optimizers]
            torch.testing.assert_close(states, saved["optimizers"], atol=0, rtol=0)
        seen.append(1)
        return learn(self, *inputs)

    monkeypatch.setattr(module, "set_statistics", restored)
    monkeypatch.setattr(module.PPO, "learn", learned)
    train(module, **flags, total_timesteps=5 * 128, resume=str(run_dir))
    assert len(seen) == 2 * 2 and (run_dir / "stages_384.json").exists()
    after, rows = read_checkpoint(run_dir), read_scalars(run_dir)
    rates = sorted(rows["charts/learning_rate"])  # files of one second may be read in any order
    assert after["global_step"] == 640
    counts = flat(after["statistics"])["obs_rms_count"] - flat(saved["statistics"])["obs_rms_count"]
    assert counts.ravel().tolist() == pytest.approx([129.0, 129.0])  # with each fresh episode's
    assert [step for step, _ in rates] == list(range(128, 641, 128))
    assert rates[3][1] == pytest.approx(3e-4 * (1 - 3 / 5))


@pytest.mark.parametrize(
    "fault", ["nan observation", "infinite observation", "nan reward", "infinite reward"]
)
def test_what_is_not_finite_ends_the_run_and_keeps_the_checkpoint(module, fault, registered):
    class Faulty(Noisy):
        steps = 0

        def step(self, action):
            obs, reward, *ends = super().step(action)
            self.steps += 1
            bad = float(fault.split()[0].removesuffix("inite")) if self.steps == 150 else 0.0
            return (obs + bad, reward, *ends) if "obs" in fault else (obs, reward + bad, *ends)

    flags = {"env_id": registered(Faulty), "total_timesteps": 640, "checkpoint_every": 64}
    with pytest.raises(FloatingPointError, match=r"^step 192: losses/\w+ is nan$"):
        with np.errstate(all="ignore"):
            train(module, **flags)
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] == 128


def test_losses_that_are_not_finite_end_the_run(module):
    with pytest.raises(FloatingPointError, match=r"^step 64: losses/\w+ is (nan|inf|-inf)$"):
        train(module, learning_rate=1e11, total_timesteps=640, checkpoint_every=64)
    (run_dir,) = Path("runs").iterdir()
    assert not (run_dir / "checkpoint.pt").exists()


@ALL
def test_what_would_train_wrongly_is_refused(kind, monkeypatch, capsys):
    """On the command line without a traceback, and before any work."""
    refused = {
        "--num-minibatches: 64 steps": ({"num_minibatches": 3}, {"num_minibatches": 64}),
        "--total-timesteps: a rollout has 64 steps": ({"total_timesteps": 63},),
        "--gamma and --gae-lambda lie between": ({"gamma": math.nan}, {"gae_lambda": 1.5}),
    }
    if kind in (async_baseline, async_variant):
        refused["--max-staleness: 0 or more"] = ({"max_staleness": -1},)
    for message, many in refused.items():
        for flags in map(SMALL.__or__, many):
            with pytest.raises(ValueError, match=f"^{message}"):
                kind.Args(**flags)
            words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
            monkeypatch.setattr(sys, "argv", ["script.py", *words])
            with pytest.raises(SystemExit) as end:
                kind.parse_args(kind.Args)
            assert end.value.code and message in capsys.readouterr().err
    with pytest.raises(ValueError, match="^--env-id: needs continuous actions$"):
        train(kind, env_id="CartPole-v1")
    assert not Path("runs").exists()


def test_environments_may_draw_from_generators_that_all_share(module):
    """Equal seeds, equal runs; an evaluation, which draws as well, changes nothing."""
    flags = {"env_id": "envs_for_workers:Drawing-v0", "total_timesteps": 128, "eval_episodes": 2}
    found, returns = [], []
    for seed, eval_every in ((1, 64), (1, 64), (1, 0), (2, 0)):
        run_dir = train(module, **flags, seed=seed, eval_every=eval_every, save_model=True)
        checkpoint = read_checkpoint(run_dir)
        found.append(dict(checkpoint["agent"]) | checkpoint["statistics"])
        returns.append(read_scalars(run_dir).get("charts/eval_return"))
    for other in found[1:3]:
        torch.testing.assert_close(other, found[0], atol=0, rtol=0)
    assert returns[0] == returns[1] and len(returns[0]) == 2
    assert not torch.equal(found[3]["obs_rms_mean"], found[0]["obs_rms_mean"])


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
