"""SAC, both scripts: mathematics, whole runs, bad input, interruption and learning."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from leanrl import sac_continuous_action as baseline
from leanrl import sac_continuous_action_torchcompile as variant

BASELINE, VARIANT = Path(baseline.__file__).name, Path(variant.__file__).name
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
ROWS = pytest.mark.parametrize(
    "command",
    [(BASELINE,), (VARIANT,), (VARIANT, "--compile"), (VARIANT, "--compile", "--cudagraphs")],
    ids=["baseline", "eager", "compile", "compile+cudagraphs"],
)
SMALL = ("--env-id", "Pendulum-v1", "--batch-size", "32", "--learning-starts", "200")


def script(name: str, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "leanrl" / name), *flags]


def run(tmp_path, name, *flags, check=True, **kwargs):
    """Runs a script with its run directory under tmp_path."""
    return subprocess.run(
        script(name, *flags), cwd=tmp_path, capture_output=True, text=True, check=check, **kwargs
    )


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """{tag: [(step, value), ...]} as TensorBoard shows them."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def read_run(tmp_path):
    """The one run under tmp_path: directory, config, stages, scalars."""
    (run_dir,) = (tmp_path / "runs").iterdir()
    config, stages = (
        json.loads((run_dir / name).read_text()) for name in ("config.json", "stages.json")
    )
    return run_dir, config, stages, read_scalars(run_dir)


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
    mean, log_std = actor(obs.double())
    normal = torch.distributions.Normal(mean, log_std.exp())
    squash = [
        torch.distributions.TanhTransform(),
        torch.distributions.AffineTransform(actor.action_bias, actor.action_scale),
    ]
    density = torch.distributions.TransformedDistribution(normal, squash)
    x = squash[1](squash[0](mean + log_std.exp() * noise.double()))
    torch.testing.assert_close(actions.double(), x, atol=1e-5, rtol=0)
    expected = density.log_prob(x).sum(dim=-1)
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-4, rtol=1e-4)


@SCRIPTS
def test_log_probs_are_finite_in_saturation(module):
    actor = module.Actor(4, gym.spaces.Box(-1, 1, (2,)))
    log_probs = actor.sample(torch.full((3, 4), 1e3), torch.full((3, 2), 5.0))[1]
    assert torch.isfinite(log_probs).all()


@SCRIPTS
def test_losses_match_the_paper(module):
    """Equations 3, 5, 9 and 18 in float64 with plain loops over the batch."""
    torch.manual_seed(0)
    args, space = module.Args(), gym.spaces.Box(-1, 1, (2,))
    agent = module.SAC(args, 3, space, torch.device("cpu"))
    for part in (agent.actor, agent.qf, agent.qf_target):
        part.double()
    with torch.no_grad():
        for target in agent.target_parameters:
            target.add_(0.1 * torch.randn_like(target))
    log_alpha = torch.tensor([-0.7], dtype=torch.float64, requires_grad=True)
    obs, next_obs, actions = (torch.randn(5, n, dtype=torch.float64) for n in (3, 3, 2))
    rewards, noise = torch.randn(5, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    terminated = torch.tensor([0, 1, 0, 0, 1], dtype=torch.float64)
    batch = module.Batch(obs, actions, next_obs, rewards, terminated)

    losses, values = module.critic_loss(
        agent.qf, agent.qf_target, agent.actor, log_alpha, batch, noise, 0.9
    )
    policy_loss, log_probs = module.actor_loss(agent.actor, agent.qf, log_alpha, obs, noise)
    temperature_loss = module.alpha_loss(log_alpha, log_probs, -2.0)

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
def test_truncated_episodes_bootstrap_from_their_final_observation(module, tmp_path, monkeypatch):
    """What `main` stores: the real last observation, and `terminated` only at real ends."""
    monkeypatch.chdir(tmp_path)
    stored, add = [], module.ReplayBuffer.add
    monkeypatch.setattr(
        module.ReplayBuffer,
        "add",
        lambda self, *parts: (stored.append([np.array(p) for p in parts]), add(self, *parts)),
    )
    gym.register("TwoEnds-v0", entry_point=lambda: TwoEnds())
    flags = {"env_id": "TwoEnds-v0", "total_timesteps": 48, "learning_starts": 60, "num_envs": 2}
    try:
        module.main(module.Args(**flags, batch_size=8, buffer_size=100))
    finally:
        gym.registry.pop("TwoEnds-v0")
    assert len(stored) == 24
    for t, (obs, _, next_obs, rewards, terminated) in enumerate(stored):
        assert obs.ravel().tolist() == [t % 3] * 2
        assert next_obs.ravel().tolist() == [t % 3 + 1] * 2  # never the next episode's 0
        assert rewards.tolist() == [1.0, 1.0]
        assert terminated.tolist() == [t % 6 == 5] * 2  # at t % 6 == 2 the episode is truncated


# Whole runs


@ROWS
def test_run_from_end_to_end(command, tmp_path):
    result = run(tmp_path, *command, *SMALL, "--total-timesteps", "700")
    run_dir, config, stages, scalars = read_run(tmp_path)
    assert str(run_dir.name) in result.stdout
    assert config["args"]["env_id"] == "Pendulum-v1" and config["versions"]["torch"]
    assert config["args"].get("compile", False) == ("--compile" in command)
    assert stages["schema"] == 1 and stages["sps_steady"] > 0 and stages["warmup_seconds"] > 0
    assert stages["stages"]["backpropagation"]["count"] == 400  # steady from step 300 to 700
    for text in ("simulation", "backpropagation", "steady", "warm-up"):
        assert text in result.stdout
    for tag in ("charts/episodic_return", "charts/episodic_length", "charts/SPS"):
        assert all(math.isfinite(value) for _, value in scalars[tag])
    assert "charts/SPS_steady" in scalars and "charts/warmup_seconds" in scalars
    assert [step for step, _ in scalars["charts/episodic_length"]] == [200, 400, 600]
    for name in ("qf1_loss", "qf2_loss", "qf1_values", "actor_loss", "alpha", "entropy"):
        values = [value for _, value in scalars[f"losses/{name}"]]
        assert all(math.isfinite(value) for value in values)
        assert len(set(values)) > 1, f"{name} never changed: no update happened"
    if "--cudagraphs" in command and not torch.cuda.is_available():
        assert result.stderr.count("no CUDA device") == 1


@SCRIPTS
@pytest.mark.parametrize(
    ("num_envs", "utd_ratio", "updates"), [(1, 1.0, 300), (4, 1.0, 300), (4, 0.25, 75), (1, 2, 600)]
)
def test_update_to_data_ratio(module, num_envs, utd_ratio, updates, tmp_path, monkeypatch):
    """Updates = steps after the random phase x ratio; the policy gets as many as the critic."""
    monkeypatch.chdir(tmp_path)
    calls = {"update_critic": 0, "update_actor": 0, "update_target": 0}

    def count(name, function):
        def counted(self, *inputs):
            calls[name] += 1
            return function(self, *inputs)

        return counted

    for name in calls:
        monkeypatch.setattr(module.SAC, name, count(name, getattr(module.SAC, name)))
    flags = {"env_id": "Pendulum-v1", "total_timesteps": 400, "learning_starts": 100}
    module.main(module.Args(**flags, num_envs=num_envs, utd_ratio=utd_ratio, batch_size=16))
    assert calls["update_critic"] == calls["update_target"] == updates
    assert calls["update_actor"] == updates // 2 * 2


# Bad input


def bad_input(name, *flags):
    result = subprocess.run(script(name, *flags), capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1 and "Traceback" not in result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--env-id", "NoSuchEnv-v0"), "NoSuchEnv"),
        (("--env-id", "HalfCheetah-v17"), "v17"),
        (("--env-id", "CartPole-v1"), "continuous action space"),
        (("--total-timesteps", "0"), "--total-timesteps must be positive"),
        (("--num-envs", "-1"), "--num-envs must be positive"),
        (("--utd-ratio", "0"), "--utd-ratio must be positive"),
        (("--batch-size", "6000"), "--learning-starts"),
        (("--buffer-size", "10"), "--buffer-size"),
        (("--cudagraphs", "--no-cuda"), "--no-cuda"),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, message, tmp_path):
    before = set((ROOT / "runs").glob("*"))
    assert message in bad_input(VARIANT, *flags)
    assert set((ROOT / "runs").glob("*")) == before  # no work was started


def test_an_unknown_flag_is_refused():
    result = subprocess.run(script(BASELINE, "--no-such-flag"), capture_output=True, text=True)
    assert result.returncode == 2 and "no-such-flag" in result.stderr


@pytest.mark.parametrize(
    ("package", "flags", "message"),
    [
        ("wandb", ("--track",), "pip install -r requirements/wandb.txt"),
        ("mujoco", (), 'pip install "gymnasium[mujoco]"'),
    ],
)
def test_missing_extra_names_the_pip_line(package, flags, message, tmp_path):
    """With the package hidden: a finder that does not find it, as on a machine without it."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == {package!r} else find_spec(name, *a)
sys.modules[{package!r}] = None
"""
    )
    result = subprocess.run(
        script(BASELINE, *flags),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_interrupted_run_ends_cleanly(number, tmp_path):
    process = subprocess.Popen(
        script(BASELINE, *SMALL, "--total-timesteps", "1000000"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        events = list(tmp_path.glob("runs/*/events*"))
        if events and events[0].stat().st_size > 0:
            break
        time.sleep(0.2)
    time.sleep(3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert "interrupted after" in err and "simulation" in out and "run directory" in out
    _, _, stages, scalars = read_run(tmp_path)
    assert stages["wall_seconds"] > 0 and len(scalars["charts/SPS"]) > 0


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
