"""PPO whose acting, learning and evaluation are processes of their own, both scripts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import envs_for_workers  # noqa: F401  which the processes find as well: they get this sys.path
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from test_ppo import Noisy
from test_resume import assert_same, command_line, read_checkpoint, scalars
from test_sac import read_run, read_scalars, run
from test_sac_parity import assert_hunks_are_marked

from leanrl import ppo_continuous_action as sync_baseline
from leanrl import ppo_continuous_action_async as baseline
from leanrl import ppo_continuous_action_async_torchcompile as variant
from leanrl import ppo_continuous_action_torchcompile as sync_variant

BASELINE, VARIANT = baseline.SCRIPT, variant.SCRIPT
SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
SMALL = {"env_id": "Pendulum-v1", "num_steps": 64, "num_minibatches": 4, "update_epochs": 2}
FEW = ("--env-id=Pendulum-v1", "--num-steps=64", "--num-minibatches=4", "--update-epochs=2")
CPU, META = torch.device("cpu"), torch.device("meta")
OF_TWO = {"charts/staleness", "charts/learner_waits_seconds", "charts/collector_waits_seconds"}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: the number is part of what is computed."""
    monkeypatch.chdir(tmp_path)


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


def metrics(run_dir: Path) -> dict:
    """What TensorBoard shows, without what tells time or needs two processes."""
    return {tag: rows for tag, rows in scalars(run_dir).items() if tag not in OF_TWO}


# The same algorithm


@pytest.mark.parametrize("compiled", [False, True, None], ids=["eager", "compiled", "baseline"])
@pytest.mark.parametrize("flags", [{}, {"num_envs": 3, "target_kl": 1e-9}], ids=str)
def test_sync_is_the_synchronous_script(compiled, flags):
    """Bit for bit over 5 iterations: metrics, evaluations, network, optimizer, environments."""
    module, reference = (
        (variant, sync_variant) if compiled is not None else (baseline, sync_baseline)
    )
    flags = flags | {"save_model": True, "eval_every": 128, "eval_episodes": 2}
    flags |= {"total_timesteps": 64 * flags.get("num_envs", 1) * 5}
    flags |= {"compile": compiled} if compiled else {}
    torch._dynamo.reset()
    one = train(reference, **flags)
    torch._dynamo.reset()
    other = train(module, **flags, sync=True)
    assert metrics(one) == metrics(other) and len(metrics(one)["losses/policy_loss"]) == 5
    assert len(metrics(one)["charts/eval_return"]) >= 2
    expected, found = read_checkpoint(one), read_checkpoint(other)
    assert_same(
        {**expected, "script": ""}, {name: found[name] for name in expected} | {"script": ""}
    )
    assert {value for _, value in scalars(other)["charts/staleness"]} == {0}


def test_another_seed_is_another_run():
    """What the comparison above notices."""
    one = train(sync_baseline, total_timesteps=320, save_model=True)
    other = train(baseline, total_timesteps=320, save_model=True, sync=True, seed=2)
    assert metrics(one) != metrics(other)
    with pytest.raises(AssertionError, match="differs"):
        assert_same(read_checkpoint(one)["agent"], read_checkpoint(other)["agent"])


def in_one_process(args, staleness: int):
    """What the asynchronous script must compute, in one loop: acting lags, and nothing else."""
    policy = baseline.Policy(3, 1, CPU)  # of another process, with random numbers of its own
    torch.manual_seed(args.seed)
    agent = baseline.PPO(args, 3, 1, CPU)
    envs = baseline.DeviceEnv(
        baseline.NormalizedEnvs(baseline.make_envs(args.env_id, args.num_envs), args.gamma), CPU
    )
    obs, _ = envs.reset(seed=args.seed)
    iterations, granted = args.total_timesteps // args.num_steps // args.num_envs, []

    def grant():
        noise = torch.randn(args.num_steps, args.num_envs, 1)
        granted.append((agent.weights().clone(), noise))

    for _ in range(staleness):
        grant()
    for i in range(iterations):
        agent.set_learning_rate(args.learning_rate * (1 - i / iterations))
        grant()
        weights, noise = granted[i]
        policy.load(weights)
        rollout = baseline.Rollout(args.num_steps, args.num_envs, 3, 1, CPU)
        for t in range(args.num_steps):
            actions, log_probs, values = policy.act(obs, noise[t])
            rollout.obs[t], rollout.actions[t] = obs, actions
            rollout.log_probs[t], rollout.values[t] = log_probs, values
            obs, rollout.rewards[t], _, truncated, infos = envs.step(actions)
            rollout.ended[t] = truncated  # Pendulum never terminates
            if truncated.any():
                rollout.final_values[t] = policy.value(infos["final_obs"]) * truncated
        rollout.obs[-1], rollout.values[-1] = obs, policy.value(obs)
        size = args.num_steps * args.num_envs
        orders = torch.stack([torch.randperm(size) for _ in range(args.update_epochs)])
        agent.learn(agent.prepare(rollout, stale=i > 0), orders)
    return agent


@SCRIPTS
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_acting_lags_by_so_many_updates_and_nothing_else_differs(module, staleness):
    """Which rollout is made with which weights, noise and order of minibatches."""
    flags = {"total_timesteps": 768, "num_envs": 2, "max_staleness": staleness}
    found = train(module, **flags, save_model=True)
    expected = in_one_process(baseline.Args(**SMALL | flags), staleness)
    tolerance = 0 if module is baseline else 1e-4
    model = read_checkpoint(found)["agent"]["model"]
    assert_same(dict(expected.model.state_dict()), dict(model), tolerance=tolerance)
    stale = [value for _, value in scalars(found)["charts/staleness"]]
    assert stale == [min(i, staleness) for i in range(6)]


@SCRIPTS
def test_a_stale_rollout_is_corrected(module):
    """Ratios about the policy from which learning departs, times the importance of each step."""
    torch.manual_seed(0)
    args = module.Args(**SMALL | {"num_steps": 8, "norm_adv": False, "clip_vloss": False})
    agent, acted = module.PPO(args, 5, 3, CPU), module.ActorCritic(5, 3)
    rollout = module.Rollout(8, 1, 5, 3, CPU)
    for tensor in vars(rollout).values():
        tensor.normal_()
    rollout.ended.zero_()
    rollout.ended[3] = 1

    def log_probs(model):
        mean, log_std, values = model(rollout.obs)
        normal = torch.distributions.Normal(mean[:-1], log_std.exp())
        return normal.log_prob(rollout.actions).sum(dim=2).flatten(), values.flatten()

    with torch.no_grad():
        acted.actor_mean[4].weight.mul_(30)
        drawn_with, _ = log_probs(acted)
        departure, values = log_probs(agent.model)
        if module is baseline:
            rollout.log_probs[:] = drawn_with[:, None]
            batch = agent.prepare(rollout, stale=True)
        else:
            weights = torch.nn.utils.parameters_to_vector(acted.parameters())
            agent.prepare(vars(rollout), weights)
            obs, actions, *scalars = agent.data.split(agent.widths, dim=1)
            batch = module.Batch(obs, actions, *(x.squeeze(1) for x in scalars))
        following = torch.where(rollout.ended.bool(), rollout.final_values, values[1:, None])
        advantages = module.compute_gae(
            rollout.rewards, values[:-1, None], following, rollout.ended, 0.99, 0.95
        )
        importance = (departure - drawn_with).exp()
        assert importance.std() > 0.1, "nothing to correct"
        torch.testing.assert_close(batch.advantages, advantages.flatten())
        torch.testing.assert_close(batch.log_probs, departure)
        torch.testing.assert_close(batch.importance, importance)
        agent.model.actor_mean[4].weight.mul_(30)  # an epoch later
        ratios = (log_probs(agent.model)[0] - departure).exp()
        surrogate = torch.min(ratios * batch.advantages, ratios.clamp(0.8, 1.2) * batch.advantages)
        assert (ratios - 1).abs().max() > 0.2, "nothing to bound"
        found = module.ppo_loss(agent.model, batch, args)[1][0]
        torch.testing.assert_close(found, -(importance * surrogate).mean())


def test_a_compiled_run_is_the_eager_one():
    eager = train(variant, total_timesteps=320, save_model=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = train(variant, total_timesteps=320, save_model=True, compile=True)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    one, other = (read_checkpoint(each)["agent"]["model"] for each in (eager, compiled))
    assert_same(dict(one), dict(other), tolerance=1e-4)


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (baseline, {"sync": True}),
        (baseline, {}),
        (baseline, {"max_staleness": 2}),
        (variant, {}),
    ],
    ids=["sync", "baseline", "older", "variant"],
)
def test_a_run_resumes_to_the_last_bit(module, flags, monkeypatch):
    """Although it was interrupted while rollouts were being made, and with two evaluations."""
    flags |= {"total_timesteps": 512, "num_envs": 2, "num_steps": 32, "checkpoint_every": 192}
    flags |= {"eval_every": 64, "eval_episodes": 2}
    whole = train(module, **flags, exp_name="whole")
    save = module.save_checkpoint

    def save_and_interrupt(*args):
        save(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(module, "save_checkpoint", save_and_interrupt)
        train(module, **flags, exp_name="part")
    (part,) = Path("runs").glob("*part*")
    assert read_checkpoint(part)["global_step"] == 192
    assert len(read_checkpoint(part)["slots"]) == (
        0 if "sync" in flags else flags.get("max_staleness", 1)
    )
    time.sleep(1)  # readers order event files by name, and the name has the second
    train(module, **flags, exp_name="part", resume=str(part))
    assert_same(read_checkpoint(whole), read_checkpoint(part))
    one, other = metrics(whole), metrics(part)
    # answers to what was asked before the checkpoint may have come before as well
    evaluations = [dict(each.pop("charts/eval_return")) for each in (one, other)]
    assert one == other and evaluations[0] == evaluations[1] and len(evaluations[0]) == 8


def test_evaluations_that_nobody_has_answered_are_in_the_checkpoint(monkeypatch):
    """A crash before the answer costs none."""
    flags = {"num_envs": 2, "num_steps": 32, "total_timesteps": 256, "eval_episodes": 2}
    flags |= {"eval_every": 64, "checkpoint_every": 64}
    whole = train(baseline, **flags, exp_name="whole")
    save = baseline.save_checkpoint

    def save_and_interrupt(path, checkpoint):
        save(path, checkpoint)
        assert len(checkpoint["evaluations"]) == 1  # the evaluator has only just started
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(baseline, "save_checkpoint", save_and_interrupt)
        train(baseline, **flags, exp_name="part")
    (part,) = Path("runs").glob("*part*")
    time.sleep(1)  # readers order event files by name, and the name has the second
    train(baseline, **flags, exp_name="part", resume=str(part))
    one, other = (dict(read_scalars(each)["charts/eval_return"]) for each in (whole, part))
    assert one == other and list(one) == [64, 128, 192, 256]


@pytest.mark.parametrize(
    "more",
    [
        {"num_steps": 48, "num_minibatches": 4},  # begins at a step that is no multiple of it
        {"sync": True},
        {"max_staleness": 2},
        {},
    ],
    ids=str,
)
def test_a_run_goes_on_with_other_settings(more):
    """For longer; with others nothing hangs, and what was handed out is not mistaken."""
    part = train(baseline, total_timesteps=256, save_model=True, exp_name="part")
    train(baseline, **{"total_timesteps": 520, "save_model": True, "resume": str(part)} | more)
    steps = more.get("num_steps", 64)
    expected = 256 + -(-(520 // steps * steps - 256) // steps) * steps
    assert read_checkpoint(part)["global_step"] == expected


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


# At the same time


@pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
def test_acting_and_learning_overlap(module, monkeypatch):
    """Made equally long, both together take at most 0.6 of the time of one after the other."""
    learn = module.PPO.learn

    def slow_learn(*args):
        time.sleep(0.16 / 2)  # called once per epoch with --target-kl
        return learn(*args)

    monkeypatch.setattr(module.PPO, "learn", slow_learn)
    flags = {"env_id": "envs_for_workers:Slow-v0", "num_steps": 8, "total_timesteps": 8 * 18}
    flags |= {"num_minibatches": 1, "target_kl": 1e9}

    def seconds(**more):
        report = json.loads((train(module, **flags, **more) / "stages.json").read_text())
        assert report["window"]["iterations"] == 15
        return report["window"]["seconds"]

    apart, together = seconds(sync=True, exp_name="apart"), seconds(exp_name="together")
    print(f"\ntogether {together:.2f} s, one after the other {apart:.2f} s: {together / apart:.2f}")
    assert together < 0.6 * apart


@SCRIPTS
def test_who_waits_is_logged(module):
    """Here the learner, for an environment that takes 20 ms a step."""
    flags = {"env_id": "envs_for_workers:Slow-v0", "num_steps": 8, "total_timesteps": 8 * 6}
    values = read_scalars(train(module, **flags))
    waits = {
        name: sum(value for _, value in values[f"charts/{name}_waits_seconds"][2:])
        for name in ("learner", "collector")
    }
    assert waits["collector"] < waits["learner"]
    assert waits["learner"] > 0.3 * 4 * 8 * 0.02


@SCRIPTS
def test_evaluations_are_those_of_the_weights_that_they_name(module):
    """Although the training has gone on: the last one is that of the checkpoint."""
    run_dir = train(
        module, total_timesteps=320, num_envs=2, eval_every=128, eval_episodes=2, save_model=True
    )
    evaluations = read_scalars(run_dir)["charts/eval_return"]
    assert [step for step, _ in evaluations] == [128, 256]
    checkpoint = read_checkpoint(run_dir)
    assert checkpoint["global_step"] == 256
    model, normalizer = module.ActorCritic(3, 1), module.Normalizer(2, 3, 0.99)
    model.load_state_dict(checkpoint["agent"]["model"])
    normalizer.load_state_dict(checkpoint["normalizer"])
    args = module.Args(**SMALL, eval_episodes=2)
    expected = module.evaluate(model, normalizer, args, CPU, None)
    assert evaluations[-1][1] == pytest.approx(expected) != evaluations[0][1]


# Death


def children_of(pid: int) -> set[int]:
    """The processes that `pid` started, and those that they did."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            child = int(stat.parent.name)
            found |= {child} | children_of(child)
    return found


def alive(pids: set[int]) -> set[int]:
    def running(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return {pid for pid in pids if running(pid)}


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*")}


@pytest.mark.parametrize(
    ("module", "env_id", "words"),
    [
        (baseline, "Mortal-v0", ("Traceback", "envs_for_workers.py", "the simulation is unstable")),
        (baseline, "Killed-v0", ("ended by SIGKILL",)),
        (variant, "Mortal-v0", ("Traceback", "envs_for_workers.py", "the simulation is unstable")),
    ],
)
def test_a_dead_collector_is_noticed_while_learning(module, env_id, words, monkeypatch):
    """The third rollout dies while the learner is busy with the second for a minute."""

    def learn_for_long(self, *_):
        if Path("death").exists() or len(list(Path().glob("learning*"))) > 0:
            time.sleep(60)
        Path("learning").touch()
        return torch.zeros(len(module.METRICS))

    monkeypatch.setattr(module.PPO, "learn", learn_for_long)
    flags = {"env_id": f"envs_for_workers:{env_id}", "num_steps": 8, "total_timesteps": 8000}
    with pytest.raises(module.WorkerError) as raised:
        train(module, **flags)
    noticed = time.time() - float(Path("death").read_text())
    print(f"\nnoticed, cleaned up and reported within {noticed:.2f} s")
    assert noticed < 30, "not before the learner looked for a rollout"
    message = str(raised.value)
    assert message.startswith("the collector died: ") and all(word in message for word in words)
    (run_dir,) = Path("runs").iterdir()
    assert (run_dir / "stages.json").exists()
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


def start(name: str, *flags: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "leanrl" / name), *FEW, "--total-timesteps=1000000"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    process = subprocess.Popen([*command, *flags], **output, text=True, env=env, process_group=0)
    deadline = time.monotonic() + 120
    while not list(Path("runs").glob("*/checkpoint.pt")):
        assert process.poll() is None, process.communicate()[1][-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 20
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pids)


FOR_A_WHILE = ("--checkpoint-every=640", "--eval-every=640", "--eval-episodes=2")


@pytest.mark.parametrize(
    ("name", "how"),
    [(BASELINE, "ctrl-c"), (BASELINE, "SIGTERM"), (BASELINE, "SIGKILL"), (VARIANT, "ctrl-c")],
)
def test_nothing_is_left_behind(name, how):
    """No process and no segment of shared memory, whatever ends the first process."""
    before = shared_memory()
    process = start(name, *FOR_A_WHILE)
    children = children_of(process.pid)
    assert len(children) >= 3  # collector, evaluator, multiprocessing's tracker
    if how == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)  # a terminal tells them all
    else:
        process.send_signal(getattr(signal, how))
    output, errors = process.communicate(timeout=60)
    wait_until_gone(children)
    assert shared_memory() <= before
    if how != "SIGKILL":
        assert process.returncode == 130 and "Traceback" not in errors, errors[-3000:]
        assert re.search(r"interrupted after [\d,]+ steps", errors)
        assert "the collector:" in output and "the learner:" in output
        (run_dir,) = Path("runs").iterdir()
        for report in ("stages.json", "stages_collector.json"):
            assert json.loads((run_dir / report).read_text())["stages"]


@pytest.mark.parametrize("name", ["collector", "evaluator"])
def test_a_killed_process_ends_the_run_in_one_line_and_status_1(name):
    process = start(BASELINE, *FOR_A_WHILE)
    children = children_of(process.pid)
    command = "from multiprocessing.spawn import spawn_main"  # in the order of their start
    workers = sorted(pid for pid in children if command in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(workers[["collector", "evaluator"].index(name)], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    wait_until_gone(children)
    assert process.returncode == 1 and "Traceback" not in errors
    assert errors.splitlines()[-1] == f"error: the {name} died: ended by SIGKILL"


def endless(pipe):
    """An exception that has much to tell."""
    raise ValueError("x" * 1_000_000)


def wait_for_ever(pipe):
    time.sleep(600)


@SCRIPTS
def test_last_words_fit_into_a_pipe(module):
    worker = module.Worker("teller", endless)
    with pytest.raises(module.WorkerError, match="the teller died: .*xxx"):
        worker.receive()
    worker.end()


def test_a_death_is_no_exception_that_somebody_else_may_take():
    """From within `except Exception`, as around a checkpoint or in a compiler."""
    worker = baseline.Worker("sleeper", wait_for_ever)
    handler = signal.signal(signal.SIGCHLD, lambda *_: worker.check())
    try:
        with pytest.raises(baseline.WorkerError, match="the sleeper died: ended by SIGKILL"):
            try:
                os.kill(worker.process.pid, signal.SIGKILL)
                time.sleep(60)
            except Exception:
                pytest.fail("taken for an error of its own")
    finally:
        signal.signal(signal.SIGCHLD, handler)
        worker.end()


# Devices


class Two(gym.Env):
    """What arrives, and what leaves: observations tell the last action."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2), {}

    def step(self, action):
        self.steps += 1
        return np.array(action, np.float64), 0.5, self.steps == 3, False, {}


def test_device_env_takes_and_gives_tensors():
    """Around Gymnasium's own vector environments, whose final_obs is an array of objects."""
    make = partial(gym.vector.SyncVectorEnv, [Two] * 2)
    envs = baseline.DeviceEnv(make(autoreset_mode=gym.vector.AutoresetMode.SAME_STEP), CPU)
    obs, infos = envs.reset(seed=1)
    assert obs.dtype == torch.float32 and obs.tolist() == [[0, 0], [0, 0]] and infos == {}
    for t in range(3):
        actions = torch.tensor([[0.25, t / 10], [0.5, -t / 10]])
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        assert rewards.dtype == torch.float32 and rewards.tolist() == [0.5, 0.5]
        assert terminated.dtype == torch.bool and terminated.all() == (t == 2)
        assert truncated.dtype == torch.bool and not truncated.any()
        if t < 2:
            torch.testing.assert_close(obs, actions)
    assert obs.tolist() == [[0, 0], [0, 0]]
    for final, action in zip(infos["final_obs"], actions.numpy(), strict=True):
        np.testing.assert_array_equal(final, action)
    assert envs.num_envs == 2 and envs.single_action_space == Two.action_space


class MetaEnv(baseline.DeviceEnv):
    """As on another device, but that tensors of meta have no content to play with."""

    def to_numpy(self, tensor):
        assert tensor.device == META
        return np.zeros(tuple(tensor.shape), np.float32)


def on_meta(**flags):
    """Collector and learner as the script builds them, on the meta device."""
    args = baseline.Args(**SMALL | {"num_envs": 2} | flags)
    envs = gym.vector.SyncVectorEnv([Noisy] * 2, autoreset_mode="SameStep")
    envs = MetaEnv(baseline.NormalizedEnvs(envs, args.gamma), META)
    return args, envs, baseline.Policy(5, 3, META)


def test_nothing_lands_on_the_wrong_device(monkeypatch):
    """A rollout and its epochs with the check of every call switched on, on meta."""
    monkeypatch.setattr(baseline, "Adam", lambda *args, fused, **kw: torch.optim.Adam(*args, **kw))
    args, envs, policy = on_meta()
    agent = baseline.PPO(args, 5, 3, META)
    checked = partial(baseline.check_devices, device=META)
    reset, step = checked(envs.reset), checked(envs.step)
    act, value = checked(policy.act), checked(policy.value)
    slot = baseline.Slot(args, 5, 3, len(agent.weights()))
    rollout, noise = slot.rollout, slot.noise.to(META)
    obs, _ = reset(seed=1)
    final_values = 0
    for t in range(args.num_steps):
        actions, _, _ = act(obs, noise[t])
        obs, rewards, *_, infos = step(actions)
        if "final_obs" in infos:
            final_values += value(infos["final_obs"]).shape[0]
    assert final_values > 0 and rewards.device == META
    assert value(obs).device == META and rollout.obs.device == CPU
    batch = checked(agent.prepare)(rollout.to(META), stale=True)
    metrics = checked(agent.learn)(batch, torch.zeros(2, 128, dtype=torch.int64, device=META))
    assert metrics.device == META and metrics.shape == (6,)
    assert (
        {p.device for p in agent.parameters}
        == {META}
        == {p.device for p in policy.model.parameters()}
    )
    assert {
        t.device for _, t in baseline.named_tensors("x", agent.optimizer.state_dict()["state"])
    } >= {META}


def test_the_check_names_tensor_device_and_expectation():
    args, envs, policy = on_meta()
    act = baseline.check_devices(policy.act, META)
    with pytest.raises(baseline.DeviceError) as raised:
        act(torch.zeros(2, 5, device=META), torch.zeros(2, 3))
    assert str(raised.value) == "Policy.act: noise is on cpu, expected meta"
    step = baseline.check_devices(envs.step, META)
    with pytest.raises(
        baseline.DeviceError, match="MetaEnv.step|DeviceEnv.step: actions is on cpu"
    ):
        step(torch.zeros(2, 3))

    def prepare(rollout, *, steps):
        return {"batch": [baseline.Batch(*(torch.zeros(1, device=META) for _ in range(6)), steps)]}

    prepare.__qualname__ = "prepare"
    rollout = baseline.Rollout(2, 1, 5, 3, META)
    prepare = baseline.check_devices(prepare, META)
    with pytest.raises(baseline.DeviceError) as raised:
        prepare(rollout, steps=torch.zeros(1))
    assert str(raised.value) == "prepare: steps is on cpu, expected meta"
    with pytest.raises(baseline.DeviceError) as raised:
        baseline.check_devices(prepare.__wrapped__, CPU)(rollout.to(META), steps=None)
    assert str(raised.value) == "prepare: rollout.obs is on meta, expected cpu"
    with pytest.raises(baseline.DeviceError) as raised:
        baseline.check_devices(prepare.__wrapped__, CPU)(None, steps=None)
    assert str(raised.value) == "prepare: result['batch'][0].obs is on meta, expected cpu"


@SCRIPTS
def test_the_check_changes_nothing(module):
    one, other = (
        train(module, total_timesteps=256, save_model=True, check_devices=on, exp_name=str(on))
        for on in (False, True)
    )
    assert_same(read_checkpoint(one), read_checkpoint(other))


def test_an_astray_tensor_ends_a_run_in_one_line(monkeypatch, tmp_path):
    """--check-devices from the command line, with a batch that a bug brings elsewhere."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('async' in word for word in sys.argv):\n"
        "    import torch\n"
        "    stack = torch.stack\n"
        "    def astray(tensors, *args):\n"
        "        to = 'meta' if tensors[0].dtype == torch.int64 else 'cpu'\n"
        "        return stack(tensors, *args).to(to)\n"
        "    torch.stack = astray\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done, lines = command_line(baseline, *FEW, "--check-devices", "--total-timesteps=256")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert lines[-1] == "error: PPO.learn: permutations is on meta, expected cpu"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--learner-device", "gpu"), ("--learner-device 'gpu'", "cpu, cuda or cuda:N")),
        (("--collector-device", "cuda:x"), ("--collector-device 'cuda:x'",)),
        (("--eval-device", "meta"), ("--eval-device 'meta'",)),
        (("--eval-device", ""), ("--eval-device ''",)),
        (("--learner-device", "cuda:0", "--no-cuda"), ("contradicts --no-cuda",)),
        (("--max-staleness", "-1"), ("--max-staleness must not be negative",)),
        (("--env-id", "Nothing-v7"), ("Nothing",)),
        (("--env-id", "CartPole-v1"), ("continuous actions",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_is_one_line_and_status_2(flags, words):
    done, lines = command_line(baseline, *flags)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    error = [line for line in lines if line.startswith("error")]
    assert len(error) == 1 and all(word in error[0] for word in words), lines
    assert not Path("runs").exists()


@SCRIPTS
@pytest.mark.parametrize(
    ("count", "name", "message"),
    [
        (0, "cuda", "--collector-device cuda: this machine has no CUDA device"),
        (2, "cuda:2", "--collector-device cuda:2: this machine has cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_named(module, count, name, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(SystemExit) as stopped:
        module.check_args(module.Args(collector_device=name))
    assert stopped.value.code == 2 and capsys.readouterr().err == f"error: {message}\n"
    if count:
        module.check_args(module.Args(collector_device="cuda:1"))


# Whole runs

ROWS = pytest.mark.parametrize(
    "command",
    [(BASELINE,), (VARIANT,), (VARIANT, "--compile", "--cudagraphs")],
    ids=["baseline", "eager", "all"],
)


@ROWS
def test_run_from_end_to_end(command, tmp_path):
    flags = (
        *FEW,
        "--total-timesteps=1000",
        "--num-envs=2",
        "--eval-every=384",
        "--eval-episodes=2",
    )
    result = run(tmp_path, *command, *flags, "--save-model", "--check-devices")
    run_dir, config, stages, values = read_run(tmp_path)
    assert run_dir.name in result.stdout and config["args"]["collector_device"] == "cpu"
    assert stages["window"]["env_steps"] == 896 - 3 * 128 and stages["sps_steady"] > 0
    collector = json.loads((run_dir / "stages_collector.json").read_text())
    assert collector["window"]["env_steps"] == 896 - 3 * 128
    assert collector["stages"]["simulation"]["count"] == (896 - 3 * 128) / 2
    rates = [value for _, value in values["charts/learning_rate"]]
    assert rates == pytest.approx([3e-4 * (1 - i / 7) for i in range(7)])
    assert [step for step, _ in values["charts/eval_return"]] == [384, 768, 896]
    assert [step for step, _ in values["charts/episodic_return"]] == [400, 400, 800, 800]
    for name in (*baseline.METRICS, "explained_variance"):
        series = [value for _, value in values[f"losses/{name}"]]
        assert len(series) == 7 and np.isfinite(series).all()
    assert len({value for _, value in values["losses/value_loss"]}) == 7
    assert (run_dir / "checkpoint.pt").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cuda", "cuda"), ("cpu", "cuda")], ids=str)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_devices_do_not_change_what_is_learned(devices, graphs):
    """On a CPU and on a GPU, eager and replayed, with the check where there are no graphs."""
    flags = {"total_timesteps": 320, "save_model": True}
    learner, collector = devices
    flags |= {"learner_device": learner, "collector_device": collector, "eval_device": collector}
    found = [train(baseline, **flags, check_devices=True)]
    found += [train(variant, **flags, compile=graphs, cudagraphs=graphs)]
    first, second = (dict(read_checkpoint(each)["agent"]["model"]) for each in found)
    assert_same(first, second, tolerance=1e-3)
