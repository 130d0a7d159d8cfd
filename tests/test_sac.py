"""SAC, both scripts: mathematics, whole runs, evaluation, bad input and learning."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import CPU, SMALL, evaluation_seeds, read_checkpoint, read_scalars, script, train

from leanrl import sac_continuous_action as baseline
from leanrl import sac_continuous_action_torchcompile as variant

BASELINE, VARIANT = Path(baseline.__file__).name, Path(variant.__file__).name
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
LOSSES = (
    "qf1_loss qf2_loss qf_loss qf1_values qf2_values actor_loss alpha_loss alpha entropy".split()
)


def run(tmp_path, name, *flags, check=True, **kwargs):
    """Runs a script with its run directory under tmp_path."""
    return subprocess.run(
        script(name, *flags), cwd=tmp_path, capture_output=True, text=True, check=check, **kwargs
    )


def read_run(tmp_path):
    """The one run under tmp_path: directory, config, stages, scalars."""
    (run_dir,) = (tmp_path / "runs").iterdir()
    config, stages = (
        json.loads((run_dir / name).read_text()) for name in ("config.json", "stages.json")
    )
    return run_dir, config, stages, read_scalars(run_dir)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread, as small batches are not worth more."""
    monkeypatch.chdir(tmp_path)


# Mathematics


@SCRIPTS
def test_log_probs_match_the_density(module):
    """Against change of variables in float64, for a box neither centred nor of unit size."""
    torch.manual_seed(0)
    low, high = np.array([-1, 2], np.float32), np.array([3, 2.5], np.float32)
    actor = module.Actor(4, gym.spaces.Box(low, high))
    obs, noise = torch.randn(1000, 4), torch.randn(1000, 2)
    actions, log_probs = actor.sample(obs, noise)
    assert (actions >= torch.tensor(low)).all() and (actions <= torch.tensor(high)).all()

    actor = actor.double()
    mean, log_std = actor.network(obs.double()).chunk(2, dim=-1)
    std = (-5 + 7 * (log_std.tanh() + 1) / 2).exp()  # log_std between -5 and 2
    scale, middle = torch.tensor([2, 0.25]).double(), torch.tensor([1, 2.25]).double()
    squash = torch.distributions.TanhTransform(), torch.distributions.AffineTransform(middle, scale)
    density = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, std), list(squash)
    )
    x = squash[1](squash[0](mean + std * noise.double()))
    torch.testing.assert_close(actions.double(), x, atol=1e-5, rtol=0)
    expected = density.log_prob(x).sum(dim=-1)
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-4, rtol=1e-4)

    saturated = actor.sample(torch.full((3, 4), 1e3).double(), torch.full((3, 2), 5.0))
    assert torch.isfinite(saturated[1]).all()


@SCRIPTS
def test_losses_match_the_paper(module):
    """Equations 3, 5, 9 and 18 in float64 with plain loops over the batch."""
    torch.manual_seed(0)
    agent = module.SAC(module.Args(), 3, gym.spaces.Box(-1, 1, (2,)), CPU).double()
    with torch.no_grad():
        agent.log_alpha.fill_(-0.7)
        for target in agent.qf_target.parameters():
            target.add_(0.1 * torch.randn_like(target))
    obs, next_obs, actions = (torch.randn(5, n, dtype=torch.float64) for n in (3, 3, 2))
    rewards, noise = torch.randn(5, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    terminated = torch.tensor([0, 1, 0, 0, 1], dtype=torch.float64)
    batch = module.Batch(obs, actions, next_obs, rewards, terminated)

    losses, values = module.critic_loss(agent, batch, noise, 0.9)
    policy_loss, log_probs = module.actor_loss(agent, obs, noise)
    temperature_loss = module.alpha_loss(agent.log_alpha, log_probs, -2.0)

    alpha, expected, policy, temperature = math.exp(-0.7), [0.0, 0.0], 0.0, 0.0
    for i in range(5):
        row = slice(i, i + 1)
        next_action, next_log_prob = agent.actor.sample(next_obs[row], noise[row])
        target_q = agent.qf_target(next_obs[row], next_action)[:, 0].tolist()
        soft_value = min(target_q) - alpha * next_log_prob.item()
        goal = rewards[i].item() + (0.0 if terminated[i] else 0.9 * soft_value)
        for k in range(2):
            expected[k] += (agent.qf(obs[row], actions[row])[k, 0].item() - goal) ** 2 / 5
        action, log_prob = agent.actor.sample(obs[row], noise[row])
        policy += (alpha * log_prob.item() - min(agent.qf(obs[row], action)[:, 0].tolist())) / 5
        temperature += -alpha * (log_prob.item() - 2.0) / 5
    assert losses.tolist() == pytest.approx(expected)
    assert policy_loss.item() == pytest.approx(policy)
    assert temperature_loss.item() == pytest.approx(temperature)
    assert values.shape == (2, 5)


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


@SCRIPTS
def test_truncated_episodes_bootstrap_from_their_final_observation(module, monkeypatch):
    """What `main` stores: the real last observation, and `terminated` only at real ends."""
    stored, add = [], module.ReplayBuffer.add
    monkeypatch.setattr(
        module.ReplayBuffer,
        "add",
        lambda self, batch: (stored.append(batch._make(map(np.array, batch))), add(self, batch)),
    )
    gym.register("TwoEnds-v0", entry_point=lambda **_: TwoEnds())
    flags = {"env_id": "TwoEnds-v0", "total_timesteps": 48, "learning_starts": 47, "num_envs": 2}
    try:
        module.main(module.Args(**flags, batch_size=8, buffer_size=100))
    finally:
        gym.registry.pop("TwoEnds-v0")
    assert len(stored) == 24
    for t, batch in enumerate(stored):
        assert batch.obs.ravel().tolist() == [t % 3] * 2
        assert batch.next_obs.ravel().tolist() == [t % 3 + 1] * 2  # never the next episode's 0
        assert batch.rewards.tolist() == [1.0, 1.0]
        # at t % 6 == 2 the episode is truncated
        assert batch.terminated.tolist() == [t % 6 == 5] * 2


@SCRIPTS
def test_an_agent_begins_as_it_is_told_and_each_update_moves_its_own_networks(module, float64):
    """The first step of Adam is a learning rate long; targets follow by tau."""
    space = gym.spaces.Box(-1, 1, (2,), np.float32)
    rates = {"tau": 0.1, "policy_lr": 1e-4, "q_lr": 1e-3, "policy_frequency": 3}
    torch.manual_seed(0)
    agent = module.SAC(module.Args(**rates), 3, space, CPU)
    assert agent.target_entropy == -2.0  # minus the dimensions
    assert agent.log_alpha.item() == 0.0
    fixed = module.SAC(module.Args(autotune=False, alpha=0.3), 3, space, CPU)
    assert fixed.log_alpha.exp().item() == pytest.approx(0.3)
    for target, parameter in zip(*twins(agent), strict=True):
        assert torch.equal(target, parameter)
    columns = torch.randn(5, 3), torch.randn(5, 2).tanh(), torch.randn(5, 3), torch.randn(5)
    batch = module.Batch(*columns, torch.tensor([0.0, 1, 0, 0, 1]))

    def moved(update, *inputs):
        """{network: the longest change of a weight}, of those that changed; what was returned."""
        before = {name: tensor.detach().clone() for name, tensor in agent.named_parameters()}
        found, changes = update(*inputs), {}
        for name, tensor in agent.named_parameters():
            change = (tensor - before[name]).abs().max().item()
            network = name.partition(".")[0]
            changes[network] = max(changes.get(network, 0.0), change)
        return {name: change for name, change in changes.items() if change}, found

    noise = torch.randn(5, 2)
    losses, values = module.critic_loss(agent, batch, noise, 0.99)
    changes, metrics = moved(agent.update_critic, batch, noise)
    assert changes == {"qf": pytest.approx(1e-3, rel=1e-3)}
    expected = [*losses, losses.mean(), *values.mean(dim=1)]
    names = "qf1_loss", "qf2_loss", "qf_loss", "qf1_values", "qf2_values"
    expected = dict(zip(names, expected, strict=True))
    loss, log_probs = module.actor_loss(agent, batch.obs, noise)
    of_alpha = module.alpha_loss(agent.log_alpha, log_probs, -2.0)
    changes, more = moved(agent.update_actor, batch.obs, noise)
    rates = {"actor": pytest.approx(1e-4, rel=1e-3), "log_alpha": pytest.approx(1e-3, rel=1e-3)}
    assert changes == rates
    expected |= {"actor_loss": loss, "alpha_loss": of_alpha, "entropy": -log_probs.mean()}
    expected["alpha"] = torch.ones(())  # that of the loss, before its step
    metrics |= more
    assert metrics.keys() == {f"losses/{name}" for name in expected}
    for name, value in expected.items():
        found = metrics[f"losses/{name}"]
        assert found.shape == () and not found.requires_grad
        assert found.item() == pytest.approx(value.item()), name
    before = [target.clone() for target in twins(agent)[0]]
    agent.update_target()
    for was, target, parameter in zip(before, *twins(agent), strict=True):
        torch.testing.assert_close(target, 0.9 * was + 0.1 * parameter)


def twins(agent) -> tuple[list, list]:
    """Parameters of the target networks and of those which they follow."""
    return list(agent.qf_target.parameters()), list(agent.qf.parameters())


@SCRIPTS
def test_an_update_gives_each_part_what_it_needs(module, monkeypatch):
    """Observations of the batch, noise that is normal and always new, and what is due."""
    calls = []
    for name in ("update_critic", "update_actor", "update_target"):

        def call(self, *inputs, name=name):
            calls.append((name, inputs))
            return {name: len(calls)}

        monkeypatch.setattr(module.SAC, name, call)
    args = module.Args(policy_frequency=3)
    agent = module.SAC(args, 3, gym.spaces.Box(-1, 1, (2,), np.float32), CPU)
    torch.manual_seed(0)
    obs, actions, next_obs = torch.randn(4000, 3), torch.zeros(4000, 2), torch.randn(4000, 3)
    batch = module.Batch(obs, actions, next_obs, obs[:, 0], obs[:, 0])
    assert agent.update(batch, False, False) == {"update_critic": 1}
    assert agent.update(batch, False, True).keys() == {"update_critic"}
    assert agent.update(batch, True, False).keys() == {"update_critic", "update_actor"}
    critic, actor, target = "update_critic", "update_actor", "update_target"
    assert [name for name, _ in calls] == [critic, critic, target, critic, *[actor] * 3]
    noises = [inputs[1] for name, inputs in calls if name != target]
    for name, inputs in calls:
        assert name == target or inputs[0] is (obs if name == actor else batch)
    noise = torch.stack(noises)
    assert len(noise.unique()) > 0.99 * noise.numel()
    for each in noises:
        assert abs(each.mean()) < 0.05 and abs(each.std() - 1) < 0.05


class Named(gym.Env):
    """Observations and rewards say which environment it is, its episode and step.

    The first seed is its name. Episodes of 3 or 5 steps, odd ones are truncated, even terminated.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Box(np.float32([-1, 2]), np.float32([3, 2.5]))

    def observe(self):
        return np.float32([self.name, self.episode, self.steps])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.name, self.episode = seed, -1
        self.episode, self.steps = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        end, odd = self.steps == 3 + 2 * (self.name % 2), self.episode % 2 == 1
        return self.observe(), self.name + self.steps / 8, end and not odd, end and odd, {}


def what_named_does(name: int, count: int):
    """Its first steps -> [(obs, next_obs, reward, terminated)], {step: return of an episode}."""
    env, rows, returns, total = Named(), [], {}, 0.0
    obs, _ = env.reset(seed=name)
    for step in range(1, count + 1):
        next_obs, reward, terminated, truncated, _ = env.step(None)
        rows.append((obs.tolist(), next_obs.tolist(), reward, terminated))
        total, obs = total + reward, next_obs
        if terminated or truncated:
            returns[step], total = total, 0.0
            obs, _ = env.reset()
    return rows, returns


def assert_loop(module, kind, due, losses, warmup, monkeypatch, **flags):
    """Steps 0 to 6, where it is interrupted, 6 to 40 and 40 to 60, each resumed from the last.

    `kind` is the class of the agent, `due(n)` what update n is told, `losses` what rows hold;
    `warmup` environment steps from the first update on are no part of the steady window.
    """
    events, counted, warmups, purged = [], [], [], []

    def noted(function):
        def call(self, *inputs):
            result = function(self, *inputs)
            events.append((function.__name__, inputs, result))
            return result

        return call

    for owner, name in ((kind, "act"), (kind, "update"), (module.ReplayBuffer, "add")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name)))
    tick, writer = module.Run.tick, module.SummaryWriter

    def tick_noted(run):
        if run.step == 6:
            signal.raise_signal(signal.SIGINT)
        tick(run)
        counted.append(run.watch.steps)
        warmups.append(run.watch.warmup_steps)

    def writer_noted(*args, purge_step=None, **kwargs):
        purged.append(purge_step)
        return writer(*args, purge_step=purge_step, **kwargs)

    monkeypatch.setattr(module.Run, "tick", tick_noted)
    monkeypatch.setattr(module, "SummaryWriter", writer_noted)
    monkeypatch.setattr(module, "LOG_EVERY", 4)
    spec = gym.envs.registration.EnvSpec("Named-v0", entry_point=lambda **_: Named())
    monkeypatch.setitem(gym.registry, "Named-v0", spec)
    flags |= {"env_id": "Named-v0", "num_envs": 2, "learning_starts": 12, "utd_ratio": 0.75}
    flags |= {"policy_frequency": 3, "batch_size": 8, "buffer_size": 1000, "save_model": True}
    flags |= {"cuda": False, "seed": 7}
    all_rewards, returns, noises, run_dir = [], [], [], None
    for begin, end in ((0, 6), (6, 40), (40, 60)):
        resume = run_dir and str(run_dir)
        args = module.Args(**flags, total_timesteps=max(end, 40), resume=resume)
        if end == 6:
            with pytest.raises(SystemExit, match="interrupted after 6 steps"):
                module.main(args)
            (run_dir,) = Path("runs").iterdir()
        else:
            run_dir = module.main(args)
        left = iter(events)
        space = gym.vector.SyncVectorEnv([Named] * 2).action_space
        space.seed(7 + begin)  # other actions, and below other episodes, in every part
        updates, count = max(int(0.75 * (begin - 12)), 0), (end - begin) // 2
        worlds = [what_named_does(7 + begin + i, count) for i in range(2)]
        for t in range(count):
            step, rows = begin + 2 * t, [rows[t] for rows, _ in worlds]
            obs, next_obs, rewards, terminated = map(list, zip(*rows, strict=True))
            if step < 12:
                actions = space.sample()
            else:
                name, (inputs, noise), actions = next(left)
                assert (name, inputs.tolist()) == ("act", obs), step
                noises.append(noise)
                while updates < int(0.75 * (step + 2 - 12)):
                    updates += 1
                    name, (_, *told), _ = next(left)
                    assert (name, tuple(told)) == ("update", due(updates)), step
            name, (batch,), _ = next(left)
            found = [part.tolist() for part in (batch.obs, batch.next_obs, batch.rewards)]
            assert (name, *found) == ("add", obs, next_obs, rewards), step
            assert batch.terminated.tolist() == terminated, step
            np.testing.assert_array_equal(batch.actions, actions, err_msg=str(step))
            all_rewards += rewards
        assert not list(left)
        returns += [(begin + 2 * t, x) for _, ends in worlds for t, x in ends.items()]
        checkpoint = read_checkpoint(run_dir)
        replay = checkpoint["replay"]
        stored = replay["rows"][:, -2] if "rows" in replay else replay["rewards"]
        assert stored.tolist() == all_rewards and replay["position"] == end
        assert max(counted) == end - begin, "a speed counts the steps of this process"
        assert set(warmups) == {max(12 - begin, 0) + warmup}, "and so does its warm-up"
        if end == 6:  # weights are drawn from the seed
            torch.manual_seed(7)
            fresh = kind(module.Args(**flags), 3, Named.action_space, CPU)
            torch.testing.assert_close(checkpoint["agent"], dict(fresh.state_dict()))
        events.clear()
        counted.clear()
        warmups.clear()
    assert purged == [1, 7, 41]
    noise = torch.stack(noises)
    assert noise.shape == (24, 2, 2) and len(noise.unique()) == 96
    assert abs(noise.mean()) < 0.4 and abs(noise.std() - 1) < 0.3
    scalars = read_scalars(run_dir)
    assert sorted(scalars["charts/episodic_return"]) == sorted(returns)
    steps = [*range(16, 41, 4), *range(44, 61, 4)]
    for name in losses:
        assert sorted(step for step, _ in scalars[f"losses/{name}"]) == steps, name


@SCRIPTS
def test_the_loop_acts_learns_and_stores_as_it_says(module, monkeypatch):
    def due(number):
        return number % 3 == 0, number % 2 == 0

    more = {"target_network_frequency": 2}
    assert_loop(module, module.SAC, due, LOSSES, 400, monkeypatch, **more)


def count_updates_before_the_window(module, kind, monkeypatch, **flags) -> Counter:
    """{what is due: number of such updates} of a whole run whose updates do nothing."""
    calls, found, begin_window = Counter(), [], module.Stopwatch.begin_window

    def begin(watch):
        found.append(calls.copy())  # at construction, too
        begin_window(watch)

    monkeypatch.setattr(module.Stopwatch, "begin_window", begin)
    monkeypatch.setattr(kind, "update", lambda self, batch, *due: calls.update([due]) or {})
    train(module, **flags, learning_starts=10)
    assert len(found) == 2, "no steady window"
    return found[1]


@SCRIPTS
@pytest.mark.parametrize("frequencies", [(40, 1), (5, 4)])
def test_the_steady_window_begins_when_each_kind_of_update_is_captured(
    module, frequencies, monkeypatch
):
    """50 updates of each kind come before; a CUDA graph is captured at the fourth."""
    flags = dict(zip(("policy_frequency", "target_network_frequency"), frequencies, strict=True))
    flags |= {"total_timesteps": 550, "utd_ratio": 4.0}
    found = count_updates_before_the_window(module, module.SAC, monkeypatch, **flags)
    assert found.total() >= 4 * max(frequencies)
    assert len(found) == (2 if frequencies == (40, 1) else 4) and min(found.values()) == 50


# Whole runs


def closed_stdout(tmp_path, *flags):
    """The baseline's standard error, run as in `python SCRIPT | true`, where nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        script(BASELINE, *flags), cwd=tmp_path, stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    assert done.returncode == 0, done.stderr
    return done.stderr


GRAPHS = pytest.param({"compile": True, "cudagraphs": True}, marks=pytest.mark.gpu)


@pytest.mark.parametrize("more", [None, {"cudagraphs": True}, GRAPHS], ids=str)
def test_run_from_end_to_end(more, tmp_path, capsys):
    """The baseline in a process of its own, the variant in this one."""
    flags = SMALL | {"learning_starts": 200, "total_timesteps": 700}
    flags |= {"eval_every": 500, "eval_episodes": 2}
    if more is None:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        err = closed_stdout(tmp_path, *words, "--save-model")
    else:
        variant.main(variant.Args(**flags, **more, save_model=True))
        out, err = capsys.readouterr()
        assert not out
        assert err.count("without CUDA it has no effect") == (not torch.cuda.is_available())
    run_dir, config, stages, scalars = read_run(tmp_path)
    assert config["args"].items() >= flags.items() and config["versions"]["torch"]
    assert stages["sps_steady"] > 0 and stages["warmup_seconds"] > 0
    assert stages["env_steps"] == stages["iterations"] == 400  # from 300 on
    seconds = stages["stages"]
    assert len(seconds) == 8 and min(seconds.values()) > 0, "a stage that nothing entered"
    inside = sum(seconds.values()) - seconds["evaluation"]
    assert inside == pytest.approx(stages["seconds"], rel=0.01)
    for text in ("simulation", "us/step", f"steps/s, runs/{run_dir.name}", "evaluation at 500: -"):
        assert text in err
    assert all(math.isfinite(value) for rows in scalars.values() for _, value in rows)
    for tag in ("charts/SPS", "charts/cpu_seconds"):
        assert [step for step, _ in scalars[tag]] == [100 * i for i in range(1, 8)]
    assert [step for step, _ in scalars["charts/episodic_return"]] == [200, 400, 600]
    assert scalars["charts/episodic_length"] == [(step, 200) for step in (200, 400, 600)]
    assert [step for step, _ in scalars["charts/eval_return"]] == [500, 700]
    assert scalars.keys() >= {f"losses/{name}" for name in LOSSES}
    for tag in (tag for tag in scalars if tag.startswith("losses/")):
        values = [value for _, value in scalars[tag]]
        assert len(set(values)) > 1, f"{tag} never changed: no update happened"
    assert read_checkpoint(run_dir)["global_step"] == 700
    assert not (run_dir / "checkpoint.partial").exists()


BEFORE_THE_LOOP = """
import importlib, sys, torch
module = importlib.import_module(sys.argv[1])
def look(run):
    denormal = torch.full((2**20,), 71362, dtype=torch.int32).view(torch.float32)
    print("not flushed:", (denormal * 1.0).view(torch.int32).count_nonzero().item())
    raise SystemExit
module.Run.open = look
module.main(module.Args(torch_threads=2))
"""


@pytest.mark.parametrize(
    "name", ["sac_continuous_action", "td3_continuous_action_torchcompile", "sac_mujoco_worlds"]
)
def test_denormal_numbers_are_zero_in_every_thread(name, tmp_path):
    """Each thread has a setting of its own, with which it starts: the one of who starts it."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "leanrl")}
    command = [sys.executable, "-c", BEFORE_THE_LOOP, name]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "not flushed: 0\n", done.stderr


def assert_process_computes_as_its_flags_say(module, agent):
    """Both scripts alike, compiled or not: the variant has no threads or precision of its own."""
    for threads, precision in ((2, "high"), (1, "highest")):
        train(module, total_timesteps=101, torch_threads=threads, matmul_precision=precision)
        if "torchcompile" in module.__name__:
            module.compile_agent(agent)
        assert torch.get_num_threads() == threads
        assert torch.get_float32_matmul_precision() == precision


@SCRIPTS
def test_a_process_computes_as_its_flags_say(module, monkeypatch):
    agent = module.SAC(module.Args(), 3, gym.spaces.Box(-1, 1, (2,), np.float32), CPU)
    assert_process_computes_as_its_flags_say(module, agent)


@pytest.mark.parametrize(
    ("num_envs", "utd_ratio", "updates"), [(1, 1.0, 300), (4, 1.0, 300), (4, 0.25, 75), (1, 2, 600)]
)
def test_update_to_data_ratio(num_envs, utd_ratio, updates, monkeypatch):
    """Updates = steps after the random phase x ratio; the policy gets as many as the critic."""
    calls = []
    for name in ("update_critic", "update_actor", "update_target"):
        monkeypatch.setattr(baseline.SAC, name, lambda *_, n=name: calls.append(n) or {})
    train(baseline, total_timesteps=400, num_envs=num_envs, utd_ratio=utd_ratio)
    assert calls.count("update_critic") == calls.count("update_target") == updates
    assert calls.count("update_actor") == updates // 2 * 2


# Evaluation


@SCRIPTS
def test_evaluation_is_the_mean_action_in_fixed_episodes(module):
    """Against a loop over single environments without any of the script's machinery."""
    args = module.Args(**SMALL, eval_episodes=3, seed=4)
    torch.manual_seed(0)
    agent = module.SAC(args, 3, gym.spaces.Box(-2, 2, (1,), np.float32), CPU)
    returns = []
    for seed in evaluation_seeds(4, 3):
        env = gym.make("Pendulum-v1")
        obs, _ = env.reset(seed=seed)
        total, truncated = 0.0, False
        while not truncated:
            mean, _ = agent.actor.network(torch.tensor(obs))
            obs, reward, _, truncated, _ = env.step(2 * mean[None].tanh().detach().numpy())
            total += reward
        returns.append(total)
    for _ in range(2):  # the same again: evaluations can be compared
        assert module.evaluate(agent, args, Path("unused")) == pytest.approx(
            np.mean(returns), rel=1e-4
        )


class Uneven(gym.Env):
    """Episodes of 5, 9, 21, 41 steps by the seed, with a reward of 1 each; odd ones truncate."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.odd, self.length = seed % 2 == 1, 5 + 4 * (seed % 4) ** 2
        self.left = self.length
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        end = self.left == 0
        return np.zeros(1, np.float32), 1.0, end and not self.odd, end and self.odd, {}


def test_every_episode_of_an_evaluation_counts_once():
    """Short episodes must not be favoured: the first of each environment, however long."""
    gym.register("Uneven-v0", entry_point=lambda **_: Uneven())
    try:
        args = baseline.Args(env_id="Uneven-v0", eval_episodes=12, seed=3)
        agent = baseline.SAC(args, 1, gym.spaces.Box(-1, 1, (1,), np.float32), CPU)
        found = baseline.evaluate(agent, args, None)
    finally:
        gym.registry.pop("Uneven-v0")
    lengths = [5 + 4 * (seed % 4) ** 2 for seed in evaluation_seeds(3, 12)]
    assert found == pytest.approx(np.mean(lengths)) and set(lengths) == {5, 9, 21, 41}


class Endless:
    """A vector environment without any end, as quick as can be."""

    action_space, steps = gym.spaces.Box(-1, 1, (2, 1)), 0
    reset = staticmethod(lambda seed: (np.zeros((2, 1)), {}))
    close = staticmethod(lambda: None)

    def step(self, actions):
        Endless.steps += 1
        return np.zeros((2, 1)), np.ones(2), np.zeros(2, bool), np.zeros(2, bool), {}


def test_an_evaluation_ends_also_where_episodes_do_not(monkeypatch):
    monkeypatch.setattr(baseline, "make_envs", lambda *_: Endless())
    monkeypatch.setattr(baseline.SAC, "act", lambda agent, obs, noise: noise)
    agent = baseline.SAC(baseline.Args(), 1, Endless.action_space, CPU)
    assert baseline.evaluate(agent, baseline.Args(eval_episodes=2), None) == Endless.steps == 50_000


# Bad input


def assert_refused(module, monkeypatch, capsys):
    """What would train wrongly; on the command line without a traceback, and before any work."""
    refused = {
        "--gamma and --tau lie between": ({"tau": 1.5}, {"gamma": 2.0}, {"gamma": math.nan}),
        "--learning-starts lies between": ({"learning_starts": 0}, {"total_timesteps": 100}),
    }
    for message, many in refused.items():
        for flags in map(SMALL.__or__, many):
            with pytest.raises(ValueError, match=f"^{message}"):
                module.Args(**flags)
            words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
            monkeypatch.setattr(sys, "argv", ["script.py", *words])
            with pytest.raises(SystemExit) as end:
                module.parse_args(module.Args)
            assert end.value.code and message in capsys.readouterr().err
    with pytest.raises(ValueError, match="^--env-id: needs continuous actions$"):
        train(module, env_id="CartPole-v1")
    assert not Path("runs").exists()


@SCRIPTS
def test_what_would_train_wrongly_is_refused(module, monkeypatch, capsys):
    assert_refused(module, monkeypatch, capsys)


# Learning


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [(BASELINE,), (VARIANT, "--compile")], ids=["baseline", "variant"]
)
def test_pendulum_is_learned(command, tmp_path):
    """A random policy gets about -1,200 per episode of Pendulum-v1, a solved one about -150."""
    flags = ("--env-id", "Pendulum-v1", "--total-timesteps", "10000", "--learning-starts", "1000")
    run(tmp_path, *command, *flags)
    returns = [value for _, value in read_run(tmp_path)[3]["charts/episodic_return"]]
    assert len(returns) == 50
    assert np.mean(returns[:5]) < -800, "not a task that starts unsolved"
    assert np.mean(returns[-10:]) > -250, returns
