"""PPO with memory: states, resets, masks and minibatches, against loops over single episodes."""

import copy
import json
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, Named, clipped_averages, note

from leanrl import ppo_lstm as baseline
from leanrl import ppo_lstm_torchcompile as variant

T, N, ROLLOUTS, EPISODES = 9, 4, 3, 3
GAMMA, LAMBDA, SEED = 0.9, 0.8, 7
BOTH = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("one_thread")


class Mixed(Named):
    """Of episodes that end in the same step some are terminated and some truncated."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if self.name // 2 % 2:
            terminated, truncated = truncated, terminated
        return obs, reward, terminated, truncated, info


class Precise(Mixed):
    """Numbers that float32 would round."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def observe(self):
        return np.array([self.name, self.episode, self.steps]) / 3


class Choosing(Mixed):
    """One of three actions, of which each step makes one invalid."""

    action_space = gym.spaces.Discrete(3)

    def told(self) -> dict:
        self.mask = np.arange(3) != (self.name + self.episode + self.steps) % 3
        return {"action_mask": self.mask.astype(np.int8)}

    def reset(self, **options):
        return super().reset(**options)[0], self.told()

    def step(self, action):
        assert self.mask[action], "an invalid action"
        *rest, _ = super().step(action)
        return *rest, self.told()


gym.register("Mixed-v0", entry_point=Mixed)
gym.register("Choosing-v0", entry_point=Choosing)
gym.register("Precise-v0", entry_point=Precise)
CASES = [(module, env) for module in (baseline, variant) for env in ("Mixed-v0", "Choosing-v0")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def seen(request, tmp_path_factory):
    """A run and its calls; observations are divided by 8 instead of normalized."""
    module, env_id = request.param
    flags = {"env_id": env_id, "num_steps": T, "num_envs": N, "total_timesteps": T * N * ROLLOUTS}
    flags |= {"num_minibatches": 2, "update_epochs": 2, "gamma": GAMMA, "gae_lambda": LAMBDA}
    flags |= {"cuda": False, "eval_every": T * N, "eval_episodes": EPISODES, "seed": SEED}
    flags["learning_rate"] = 1e-2
    found = SimpleNamespace(module=module, acts=[], steps=[], learned=[], epochs=[], updates=[])

    def stepped(outputs, envs, *_):
        if envs.num_envs == N:
            found.steps.append(copy.deepcopy(outputs))

    def prepared(batch, agent, rollout, last_values):
        found.learned.append((copy.deepcopy(agent.model), rollout, last_values, batch))

    looks = {
        "act": lambda outputs, agent, *inputs: found.acts.append((inputs, outputs)),
        "prepare": prepared,
        "learn": lambda _, agent, *inputs: found.epochs.append(inputs),
        "update": lambda metrics, agent, batch, state, index: found.updates.append(
            (index, metrics)
        ),
    }
    vector = getattr(module, "LeanVectorEnv", gym.vector.SyncVectorEnv)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        patch.setattr(module.NormalizedEnvs, "normalize", lambda _, obs: np.float32(obs) / 8)
        note(patch, vector, "step", stepped)
        for name, look in looks.items():
            note(patch, module.PPO, name, look)
        module.main(module.Args(**flags))
    return found


def lstm_step(network, obs, output, cell) -> tuple:
    """An LSTM's equations as torch.nn.LSTM documents them, for one observation (O,)."""
    lstm = network.lstm
    x = (network.encoder.weight @ obs + network.encoder.bias).tanh()
    gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ output + lstm.bias_hh_l0
    i, f, g, o = gates.chunk(4)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def follow(seen, n: int) -> list[dict]:
    """Environment n alone -> for each rollout what it must hold."""
    zeros = (torch.zeros(baseline.HIDDEN),) * 2
    states = {"actor": zeros, "critic": zeros}
    begins = True
    obs = torch.tensor([SEED + n, 0, 0]) / 8
    found = []
    for r, (model, *_) in enumerate(seen.learned):
        rows = {name: [] for name in ("obs", "starts", "values", "final_values", "outputs")}
        for step in seen.steps[r * T : (r + 1) * T]:
            next_obs, _, terminated, truncated, infos = step
            rows["obs"].append(obs)
            rows["starts"].append(torch.tensor(float(begins)))
            for name, state in states.items():
                network = getattr(model, name)
                states[name] = lstm_step(network, obs, *(zeros if begins else state))
            rows["outputs"].append(model.actor.head(states["actor"][0]))
            rows["values"].append(model.critic.head(states["critic"][0])[0])
            final_value = torch.zeros(())
            if truncated[n]:
                final_obs = torch.tensor(infos["final_obs"][n]) / 8
                features, _ = lstm_step(model.critic, final_obs, *states["critic"])
                final_value = model.critic.head(features)[0]
            rows["final_values"].append(final_value)
            begins = terminated[n] or truncated[n]
            obs = torch.tensor(next_obs[n]) / 8
        features, _ = lstm_step(model.critic, obs, *(zeros if begins else states["critic"]))
        rows = {name: torch.stack(row).detach() for name, row in rows.items()}
        found.append(rows | {"last_value": model.critic.head(features)[0].detach()})
    return found


@pytest.fixture(scope="module")
def followed(seen) -> list[dict]:
    """What all environments must have given to each rollout, (T, N, ...)."""
    every = [follow(seen, n) for n in range(N)]
    return [
        {name: torch.stack([rows[r][name] for rows in every], dim=-1 if name == "last_value" else 1)
         for name in every[0][r]}
        for r in range(ROLLOUTS)
    ]  # fmt: skip


def policy_of(model, outputs, masks):
    """torch's distribution."""
    if not model.discrete:
        normal = torch.distributions.Normal(outputs, model.actor_logstd.exp())
        return torch.distributions.Independent(normal, 1)
    return torch.distributions.Categorical(logits=outputs.masked_fill(~masks, -torch.inf))


def test_each_step_sees_its_own_episode(seen, followed):
    """States go on over rollouts, are zero where an episode begins, and bootstrap its end."""
    for (model, rollout, last_values, _), expected in zip(seen.learned, followed, strict=True):
        for name in ("obs", "starts", "values", "final_values"):
            close(getattr(rollout, name), expected[name], msg=name, atol=1e-5, rtol=1e-4)
        close(last_values, expected["last_value"], atol=1e-5, rtol=1e-4)
        policy = policy_of(model, expected["outputs"], rollout.masks)
        close(rollout.log_probs, policy.log_prob(rollout.actions).detach(), atol=1e-5, rtol=1e-4)
    starts = torch.cat([rollout.starts for _, rollout, *_ in seen.learned])
    ended = torch.cat([rollout.ended for _, rollout, *_ in seen.learned])
    assert torch.equal(starts[1:], ended[:-1])
    assert (seen.learned[0][1].starts.sum(dim=0) > 1).all(), "no reset amid a sequence"
    finals = torch.cat([rollout.final_values for _, rollout, *_ in seen.learned])
    truncated = torch.tensor(np.array([step[3] for step in seen.steps]))
    assert torch.equal(finals != 0, truncated) and 0 < truncated.sum() < ended.sum()


def test_masks_are_those_of_the_step(seen):
    """As the environment told them with the observation that is acted on."""
    for _, rollout, *_ in seen.learned:
        if rollout.actions.dim() == 3:
            assert rollout.masks.all()
            continue
        code = (8 * rollout.obs).round().sum(dim=-1, keepdim=True).long()
        assert torch.equal(rollout.masks, torch.arange(3) != code % 3)
        assert rollout.masks.gather(2, rollout.actions[..., None]).all()


def test_advantages_are_of_the_own_episode(seen):
    for _, rollout, last_values, batch in seen.learned:
        advantage = torch.zeros(N)
        following = last_values
        for t in reversed(range(T)):
            ended = rollout.ended[t].bool()
            following = torch.where(ended, rollout.final_values[t], following)
            delta = rollout.rewards[t] + GAMMA * following - rollout.values[t]
            advantage = delta + GAMMA * LAMBDA * torch.where(ended, 0.0, advantage)
            close(batch.advantages[t], advantage, atol=1e-5, rtol=1e-4)
            following = rollout.values[t]
        close(batch.returns, batch.advantages + rollout.values)


def test_minibatches_are_whole_environments(seen):
    """Each once per epoch, and from the states before the rollout: the first update changes none
    of the probabilities."""
    assert len(seen.epochs) == 2 * ROLLOUTS and len(seen.updates) == 4 * ROLLOUTS
    for r in range(ROLLOUTS):
        (inputs, _), *_ = seen.acts[r * T : (r + 1) * T]
        for batch, state, order in seen.epochs[2 * r : 2 * r + 2]:
            assert torch.equal(state, inputs[3]) and batch is seen.learned[r][3]
            assert sorted(order.tolist()) == list(range(N))
        indices = [index.tolist() for index, _ in seen.updates[4 * r : 4 * r + 4]]
        assert [sum(pair, []) for pair in (indices[:2], indices[2:])] == [
            order.tolist() for _, _, order in seen.epochs[2 * r : 2 * r + 2]
        ]
        first, last = (seen.updates[4 * r + k][1] for k in (0, 3))
        assert abs(first["losses/old_approx_kl"]) < 1e-5 and first["losses/clipfrac"] == 0
        assert abs(last["losses/old_approx_kl"]) > 1e-5


def make(module, space, obs_dim=3):
    torch.manual_seed(0)
    agent = module.PPO(module.Args(num_envs=N), obs_dim, space, CPU)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return agent


@BOTH
def test_unrolling_is_torchs_lstm_from_reset_to_reset(module, float64):
    """Outputs, last states and gradients, with two ends within one sequence."""
    network = make(module, gym.spaces.Discrete(3)).model.actor
    obs, state = torch.randn(T, 2, 3), torch.randn(2, 2, module.HIDDEN)
    starts = torch.zeros(T, 2)
    starts[3, 0] = starts[4, 0] = starts[0, 1] = 1
    outputs, states = [], []
    for n, cuts in ((0, [0, 3, 4, T]), (1, [0, T])):
        now = state[:, None, n : n + 1] * (n == 0)
        parts = []
        for begin, end in pairwise(cuts):
            x = network.encoder(obs[begin:end, n : n + 1]).tanh()
            features, now = network.lstm(x, tuple(now))
            parts.append(network.head(features))
            last, now = torch.stack(now), torch.zeros(2, 1, 1, module.HIDDEN)
        outputs.append(torch.cat(parts))
        states.append(last[:, 0])
    expected = torch.cat(outputs, dim=1), torch.cat(states, dim=1)
    found = network(obs, starts, state)
    close(found, expected)
    weights = list(network.parameters())
    loss = torch.randn(T, 2, 3)
    gradients = [torch.autograd.grad((x[0] * loss).sum(), weights) for x in (found, expected)]
    close(*gradients)
    rows = [network(obs[:1], starts[:1], state)]  # a step at a time, as acting does
    for t in range(1, T):
        rows.append(network(obs[t : t + 1], starts[t : t + 1], rows[-1][1]))
    close((torch.cat([row for row, _ in rows]), rows[-1][1]), expected)


@BOTH
def test_policies_are_torchs_distributions(module, float64):
    outputs = torch.randn(5, 2, 3)
    masks = torch.rand(5, 2, 3) > 0.4
    masks[..., 0] = True
    for space in (gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (3,))):
        model = make(module, space).model
        policy = model.policy(outputs, masks)
        expected = policy_of(model, outputs, masks)
        noise = torch.rand(5, 2, 3)
        actions = policy.sample(noise)
        close(policy.log_prob(actions), expected.log_prob(actions))
        close(policy.entropy().expand(5, 2), expected.entropy())
        if model.discrete:
            assert masks.gather(2, actions[..., None]).all()
            draws = policy._make([policy.log_policy[:1, :1].expand(20_000, 1, 3)])
            actions = draws.sample(torch.empty(20_000, 1, 3).exponential_())
            shares = torch.bincount(actions.flatten(), minlength=3) / 20_000
            close(shares, expected.probs[0, 0], atol=0.02, rtol=0)
        else:
            close(actions, expected.mean + noise * expected.stddev)


@BOTH
def test_normalization_is_by_all_that_was_seen(module):
    """Observations of all environments are one set; a return begins anew where an episode ends."""
    envs, twin = (module.make_envs("Mixed-v0", N, ()) for _ in range(2))
    envs = module.NormalizedEnvs(envs, GAMMA)
    found, _ = envs.reset(seed=SEED)
    obs, _ = twin.reset(seed=SEED)
    seen, returns, now = [obs], [], np.zeros(N)
    for _ in range(50):
        found, scaled, _, _, infos = envs.step(np.zeros((N, 2)))
        obs, rewards, terminated, truncated, its = twin.step(np.zeros((N, 2)))
        seen.append(obs)
        rows = np.concatenate(seen)
        mean, std = rows.mean(axis=0), np.sqrt(rows.var(axis=0) + 1e-8)
        np.testing.assert_allclose(found, ((obs - mean) / std).clip(-10, 10), atol=1e-3)
        now = GAMMA * now + rewards
        returns.append(now)
        now = np.where(terminated | truncated, 0, now)
        np.testing.assert_allclose(scaled, (rewards / np.std(returns)).clip(-10, 10), atol=0.02)
        for i in np.flatnonzero(terminated | truncated):
            final = (its["final_obs"][i] - mean) / std
            np.testing.assert_allclose(infos["final_obs"][i], final.clip(-10, 10), atol=1e-3)
    other = module.NormalizedEnvs(twin, GAMMA)
    other.load_state_dict(envs.state_dict())
    assert (other.normalize(obs) == envs.normalize(obs)).all()
    assert other.return_rms.var == envs.return_rms.var
    assert {x.dtype for x in other.state_dict().values()} == {torch.float64}
    assert other.normalize(obs + 1e3).max() == 10


@BOTH
@pytest.mark.parametrize("env_id", ["Mixed-v0", "Choosing-v0"])
def test_evaluation_remembers_and_does_not_explore(module, env_id, monkeypatch):
    """The likeliest valid actions, or means of clipped ones, from a state of each environment's."""
    training = SimpleNamespace(normalize=lambda obs: np.float32(obs) / 8)
    space = gym.make(env_id).action_space
    agent = make(module, space)
    args = module.Args(env_id=env_id, eval_episodes=EPISODES)
    taken = []
    kind = Choosing if env_id == "Choosing-v0" else Mixed
    step = kind.step
    monkeypatch.setattr(
        kind, "step", lambda env, action: taken.append((env.name, action)) or step(env, action)
    )
    module.evaluate(agent, args, training, None)
    monkeypatch.undo()
    for seed in {name for name, _ in taken}:
        env, state = gym.make(env_id), (torch.zeros(module.HIDDEN),) * 2
        obs, info = env.reset(seed=seed)
        ended = False
        for action in (action for name, action in taken if name == seed):
            state = lstm_step(agent.model.actor, torch.tensor(np.float32(obs)) / 8, *state)
            outputs = agent.model.actor.head(state[0]).detach()
            if agent.model.discrete:
                expected = np.where(info["action_mask"], outputs, -np.inf).argmax()
            else:
                bounds = torch.tensor(space.low), torch.tensor(space.high)
                expected = clipped_averages(outputs, agent.model.actor_logstd, *bounds).detach()
            np.testing.assert_allclose(action, expected, atol=1e-5)
            obs, _, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                ended = True
                break
        assert ended


@BOTH
def test_actions_are_clipped_in_training(module, monkeypatch):
    taken = []
    note(monkeypatch, Mixed, "step", lambda _, env, action: taken.append(action))
    envs = module.NormalizedEnvs(module.make_envs("Mixed-v0", 2, ()), GAMMA)
    envs.reset(seed=SEED)
    envs.step(np.float32([[9, 9], [-9, 2.2]]))
    np.testing.assert_allclose(taken, [[3, 2.5], [-1, 2.2]])


@BOTH
def test_only_what_is_observed_is_seen(module):
    envs = module.make_envs("Mixed-v0", 2, (2, 0))
    obs, _ = envs.reset(seed=[5, 6])
    assert obs.tolist() == [[0, 5], [0, 6]]
    assert envs.single_observation_space.shape == (2,)
    obs, _, _, _, _ = envs.step(np.zeros((2, 2)))
    assert obs.tolist() == [[1, 5], [1, 6]]
    envs = module.make_envs("Taxi-v4", 2, ())
    obs, infos = envs.reset(seed=[1, 2])
    assert obs.shape == (2, 500) and module.get_masks(envs, infos).shape == (2, 6)


def test_both_vectors_of_environments_tell_the_same():
    """The variant's, without copies, is Gymnasium's."""
    for env_id, observed in (("Mixed-v0", ()), ("Choosing-v0", ()), ("Precise-v0", (0, 2))):
        both = [module.make_envs(env_id, 3, observed) for module in (baseline, variant)]
        results = [envs.reset(seed=4) for envs in both]
        for _ in range(12):
            for (obs, infos), envs in zip(results, both, strict=True):
                np.testing.assert_array_equal(obs, results[0][0])
                assert obs.dtype == results[0][0].dtype
                masks = baseline.get_masks(envs, infos)
                np.testing.assert_array_equal(masks, baseline.get_masks(both[0], results[0][1]))
            actions = masks.argmax(axis=1) if env_id == "Choosing-v0" else np.zeros((3, 2))
            (one, *ends), (other, *same) = (envs.step(actions) for envs in both)
            for x, y in zip([one, *ends[:3]], [other, *same[:3]], strict=True):
                np.testing.assert_array_equal(x, y)
            for i in np.flatnonzero(ends[1] | ends[2]):
                np.testing.assert_array_equal(ends[3]["final_obs"][i], same[3]["final_obs"][i])
                for name in "rl":
                    episodes = [infos["final_info"]["episode"] for infos in (ends[3], same[3])]
                    assert episodes[0][name][i] == episodes[1][name][i]
            results = [(one, ends[3]), (other, same[3])]
        closed = [[], []]
        for envs, names in zip(both, closed, strict=True):
            for env in envs.envs:
                env.unwrapped.close = partial(names.append, env.unwrapped.name)
            envs.close()
        assert closed[0] == closed[1] and len(closed[0]) == 3


@BOTH
def test_what_does_not_fit_is_refused(module, registry):
    with pytest.raises(ValueError, match="^--num-minibatches: "):
        module.Args(num_envs=6, num_minibatches=4)
    spaces = gym.spaces
    for space in (
        spaces.MultiDiscrete([2, 2]),
        spaces.Discrete(3, start=1),
        spaces.Box(0, 1, (2, 2)),
    ):
        kind = type("Other", (Named,), {"action_space": space})
        gym.register("Other-v0", entry_point=kind)
        with pytest.raises(ValueError, match="^--env-id: needs "):
            module.make_envs("Other-v0", 1, ())


@BOTH
def test_masks_may_be_lists(module):
    envs = SimpleNamespace(num_envs=2, single_action_space=gym.spaces.Discrete(2))
    rows = np.empty(2, dtype=object)
    rows[:] = [1, 0], [0, 1]
    masks = module.get_masks(envs, {"action_mask": rows})
    assert masks.tolist() == [[True, False], [False, True]]
    assert module.get_masks(envs, {}).all()


@BOTH
def test_a_checkpoints_flags_are_those_of_the_run(module):
    args = module.Args(observed=(1, 0))
    assert module.Args(**json.loads(json.dumps(vars(args)))) == args
