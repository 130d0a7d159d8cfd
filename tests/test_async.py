"""PPO whose acting, learning and evaluation are processes of their own, both scripts."""

import copy
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import envs_for_workers  # which the processes find as well: they get this sys.path
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import CPU, PATIENCE, read_checkpoint, read_scalars, wait_until

from leanrl import ppo_continuous_action as sync_baseline
from leanrl import ppo_continuous_action_async as baseline
from leanrl import ppo_continuous_action_async_torchcompile as variant
from leanrl import ppo_continuous_action_torchcompile as sync_variant

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
ENDING = {"env_id": "envs_for_workers:Ending-v0", "num_steps": 32, "num_envs": 2}
SMALL = ENDING | {"num_minibatches": 4, "update_epochs": 2, "save_model": True}
ONE = {"num_steps": 8, "num_envs": 1, "update_epochs": 1}
OBS, A, META = 5, 3, torch.device("meta")
OF_TWO = {"charts/staleness", "charts/learner_waits_seconds", "charts/collector_waits_seconds"}
SECONDS = 30  # a run that has lost a worker ends sooner, on a busy machine too


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: the number is part of what is computed."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def forked(monkeypatch):
    """Workers are forks of one process that has imported what they need: seconds less for each."""
    context = multiprocessing.get_context("forkserver")
    modules = [baseline.__name__, variant.__name__, "envs_for_workers", "torch._dynamo"]
    context.set_forkserver_preload(modules)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")  # sys.path comes after imports
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


FORKED = pytest.mark.usefixtures("forked")
SLOW = pytest.mark.slow


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


def assert_near(expected: dict, found: dict) -> None:
    """Two runs of one program may differ in the last bits, of which Adam can make a small step."""
    for name, x in expected.items():
        error = (x - found[name]).abs()
        assert error.max() < 1e-3 and error.mean() < 1e-5, name


# The same algorithm


@FORKED
@pytest.mark.parametrize(
    ("module", "reference"),
    [(baseline, sync_baseline), (variant, sync_variant)],
    ids=["baseline", "eager"],
)
def test_sync_is_the_synchronous_script(module, reference):
    assert_sync_is_the_synchronous_script(module, reference)


@FORKED
@pytest.mark.usefixtures("backend")
def test_compiled_sync_is_the_synchronous_script():
    assert_sync_is_the_synchronous_script(variant, sync_variant, compile=True, target_kl=1e-9)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]  # runs


def assert_sync_is_the_synchronous_script(module, reference, compile=False, **flags):
    """Over 3 iterations and 2 more of the resumed run, with all kinds of ends.

    The environments draw from generators that all share, too.
    """
    flags |= {"env_id": "envs_for_workers:Drawing-v0", "eval_every": 128, "eval_episodes": 2}
    runs = []
    for script, more in ((reference, {}), (module, {"sync": True})):
        if script is variant:
            more["compile"] = compile
        run_dir = train(script, **flags, **more, total_timesteps=3 * 64)
        runs.append(run_dir)
        train(script, **flags, **more, total_timesteps=5 * 64, resume=str(run_dir))
    expected, found = map(read_scalars, runs)
    assert {value for _, value in found["charts/staleness"]} == {0}
    assert found.keys() - OF_TWO == expected.keys()
    for tag in expected.keys() - {"charts/SPS", "charts/cpu_seconds"}:
        np.testing.assert_allclose(found[tag], expected[tag], rtol=1e-3, atol=1e-3, err_msg=tag)
    assert [step for step, _ in found["charts/eval_return"]] == [128, 192, 256, 320]
    assert len(found["charts/episodic_return"]) > 20
    expected, found = map(read_checkpoint, runs)
    assert_near(expected["agent"], found["agent"])
    for name in ("optimizers", "statistics"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-3)
    assert found["global_step"] == expected["global_step"]
    assert torch.equal(found["generators"]["cpu"], expected["generators"]["cpu"])


def in_one_process(args, staleness: int):
    """What the asynchronous baseline must compute, in one loop: acting lags, nothing else does."""
    acting = baseline.PPO(args, OBS, A, CPU)  # of another process, with random numbers of its own
    envs = baseline.make_envs(args.env_id, args.num_envs, args.gamma)
    torch.manual_seed(args.seed)
    agent = baseline.PPO(args, OBS, A, CPU)
    obs, _ = envs.reset(seed=args.seed)
    size = args.num_steps * args.num_envs
    iterations, published = args.total_timesteps // size, []
    for i in range(iterations):
        agent.optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - i / iterations)
        while len(published) <= min(i + staleness, iterations - 1):
            noise = torch.randn(args.num_steps, args.num_envs, A)
            published.append((copy.deepcopy(agent.model.state_dict()), noise))
        weights, noise = published[i]
        acting.model.load_state_dict(weights)
        rollout = baseline.Rollout(args, OBS, A, CPU)
        for t in range(args.num_steps):
            inputs = torch.as_tensor(obs)  # rows of `rollout.obs` lie elsewhere, to the last bit
            sample = acting.act(inputs, noise[t])
            rollout.obs[t] = inputs
            rollout.actions[t], rollout.log_probs[t], rollout.values[t] = sample
            obs, rewards, terminated, truncated, infos = envs.step(sample[0].numpy())
            rollout.rewards[t] = torch.as_tensor(rewards)
            rollout.ended[t] = torch.as_tensor(terminated | truncated)
            for n in np.flatnonzero(truncated & ~terminated):  # by the weights that learn
                rollout.final_values[t, n] = agent.value(torch.as_tensor(infos["final_obs"][n]))
        rollout.obs[-1] = torch.as_tensor(obs)
        batch = agent.prepare(rollout, stale=min(i, staleness) > 0)
        for _ in range(args.update_epochs):
            agent.learn(batch, torch.randperm(size))
    return agent


@FORKED
@pytest.mark.parametrize(("module", "staleness"), [(baseline, 1), (baseline, 2), (variant, 1)])
def test_acting_lags_by_so_many_updates_and_nothing_else_differs(module, staleness):
    """Which rollout is made with which weights, noise and order of minibatches, each time.

    And an evaluation is that of the weights and statistics which it names, although the training
    has gone on: the last one is that of the checkpoint.
    """
    flags = {"total_timesteps": 6 * 64, "max_staleness": staleness}
    run_dir = train(module, **flags, eval_every=128, eval_episodes=2)
    expected = in_one_process(baseline.Args(**SMALL | flags), staleness).model.state_dict()
    checkpoint, found = read_checkpoint(run_dir), read_scalars(run_dir)
    assert_near({f"model.{name}": x for name, x in expected.items()}, checkpoint["agent"])
    stale = [value for _, value in found["charts/staleness"]]
    assert stale == [min(i, staleness) for i in range(6)]
    args = module.Args(**SMALL, eval_episodes=2)
    agent = module.PPO(args, OBS, A, CPU)
    agent.load_state_dict(checkpoint["agent"])
    eval_return = module.evaluate(agent, args, checkpoint["statistics"], None)
    assert [step for step, _ in found["charts/eval_return"]] == [128, 256, 384]
    assert found["charts/eval_return"][-1][1] == pytest.approx(eval_return, rel=1e-4)


@FORKED
def test_nothing_is_stale_when_a_run_goes_on():
    run_dir = train(baseline, total_timesteps=3 * 64, max_staleness=2)
    train(baseline, total_timesteps=6 * 64, max_staleness=2, resume=str(run_dir))
    stale = sorted(read_scalars(run_dir)["charts/staleness"])
    assert [value for _, value in stale] == [0, 1, 2, 0, 1, 2]
    assert_reports(run_dir, "", "_192")


@SCRIPTS
def test_a_stale_rollout_is_corrected(module):
    """Ratios about the policy from which learning departs, times the importance of each step."""
    torch.manual_seed(0)
    args = module.Args(**SMALL | {"num_steps": 8, "num_envs": 1}, norm_adv=False, clip_vloss=False)
    agent, acted = module.PPO(args, OBS, A, CPU), module.PPO(args, OBS, A, CPU)
    rollout = module.Rollout(args, OBS, A, CPU)
    for tensor in vars(rollout).values():
        tensor.normal_()
    rollout.ended.copy_(torch.arange(8)[:, None] == 3)

    def evaluated(model):
        mean, log_std, values = model(rollout.obs)
        normal = torch.distributions.Normal(mean[:-1], log_std.exp())
        return normal.log_prob(rollout.actions).sum(dim=2).flatten(), values.flatten()

    with torch.no_grad():
        acted.model.actor_mean[4].weight.mul_(30)
        drawn_with, _ = evaluated(acted.model)
        departure, values = evaluated(agent.model)
        rollout.log_probs[:] = drawn_with[:, None]
        batch = agent.prepare(rollout, **{"stale": True} if module is baseline else {})
        following = torch.where(rollout.ended.bool(), rollout.final_values, values[1:, None])
        columns = rollout.rewards, values[:-1, None], following, rollout.ended
        advantages = module.compute_gae(*columns, args.gamma, args.gae_lambda).flatten()
        importance = (departure - drawn_with).exp()
        assert importance.std() > 0.1, "nothing to correct"
        expected = {"values": values[:-1], "advantages": advantages, "importance": importance}
        expected |= {"returns": advantages + values[:-1], "log_probs": departure}
        for name, column in expected.items():
            torch.testing.assert_close(getattr(batch, name), column, msg=name)
        agent.model.actor_mean[4].weight.mul_(30)  # an epoch later
        ratios = (evaluated(agent.model)[0] - departure).exp()
        surrogate = torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        assert (ratios - 1).abs().max() > 0.2, "nothing to bound"
        loss = module.ppo_loss(agent.model, batch, args)[1]["losses/policy_loss"]
        torch.testing.assert_close(loss, -(importance * surrogate).mean())


# At the same time


@FORKED
def test_acting_goes_on_while_learning(monkeypatch):
    """The learner does not return before the collector has made steps of the next rollout."""
    learn, learned = baseline.PPO.learn, []

    def wait_for_the_next_rollout(*args):
        learned.append(True)
        if len(learned) < 4:
            wait_until(lambda: int(Path("steps").read_text()) > 8 * len(learned))
        return learn(*args)

    monkeypatch.setattr(baseline.PPO, "learn", wait_for_the_next_rollout)
    run_dir = train(baseline, **ONE, env_id="envs_for_workers:Counted-v0", total_timesteps=4 * 8)
    found = read_scalars(run_dir)
    waited = [value for _, value in found["charts/learner_waits_seconds"]]
    assert len(waited) == 4 and waited[0] > 8 * 0.02  # for the first one it has nothing else to do
    assert min(value for _, value in found["charts/collector_waits_seconds"]) >= 0
    report = json.loads((run_dir / "stages_collector.json").read_text())
    assert (report["env_steps"], report["iterations"]) == (8, 1)  # after three rollouts
    assert report["stages"]["simulation"] > 8 * 0.02
    assert report["stages"]["inference"] > 0 and report["stages"]["replay"] > 0


# Death


@pytest.mark.parametrize(
    ("module", "env_id", "code", "said"),
    [
        (baseline, "Mortal-v0", 1, "ArithmeticError: the simulation is unstable"),
        (variant, "Killed-v0", -9, ""),
    ],
)
def test_a_dead_collector_ends_the_run(module, env_id, code, said, capfd):
    """In its third rollout, as the learner next waits for it."""
    flags = ONE | {"env_id": f"envs_for_workers:{env_id}", "checkpoint_every": 8}
    with pytest.raises(RuntimeError, match=f"^the collector died: exit code {code}$"):
        train(module, **flags, total_timesteps=8000)
    assert time.time() - Path("dead").stat().st_mtime < SECONDS
    assert said in capfd.readouterr().err
    assert read_checkpoint(next(Path("runs").iterdir()))["global_step"] == 16


@FORKED
def test_a_nan_ends_the_run_before_a_checkpoint_is_written():
    flags = {"env_id": "envs_for_workers:Broken-v0", "num_steps": 8, "num_envs": 1}
    with pytest.raises(FloatingPointError, match=r"^step 24: losses/\w+ is nan$"):
        train(baseline, **flags, total_timesteps=800, checkpoint_every=8)
    assert read_checkpoint(next(Path("runs").iterdir()))["global_step"] == 16


def processes_of(group: int) -> list[int]:
    """Those of a process group that run, in the order of their start."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state != "Z":
                found.append(int(stat.parent.name))
    return sorted(found)


def workers_of(process: subprocess.Popen) -> list[int]:
    assert process.poll() is None, process.communicate()[1][-2000:]
    spawned = "from multiprocessing.spawn import spawn_main"
    pids = processes_of(process.pid)
    return [pid for pid in pids if spawned in Path(f"/proc/{pid}/cmdline").read_text()]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


def start(module, *flags) -> subprocess.Popen:
    """A run that goes on, in a process group of its own, as a terminal starts it."""
    settings = SMALL | {"total_timesteps": 10_000_000, "eval_every": 640}
    del settings["save_model"]
    flags += tuple(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())
    command = [sys.executable, module.__file__, "--save-model", *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=env, process_group=0)


def assert_reports(run_dir: Path, *suffixes: str) -> None:
    """Learner and collector have written their times."""
    for suffix in suffixes or ("",):
        for name in ("stages", "stages_collector"):
            assert json.loads((run_dir / f"{name}{suffix}.json").read_text())["stages"]


def assert_interrupted(status: int, errors: str) -> None:
    """By the learner, which has written all, the last words too."""
    assert status == 1 and "Traceback" not in errors, errors[-3000:]
    assert re.search(r"^interrupted after [\d,]+ steps$", errors, re.MULTILINE), errors[-3000:]
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] >= 64
    assert_reports(run_dir)


def test_ctrl_c_does_not_reach_workers_that_still_import():
    """Their first rollout is made and learned from, and the checkpoint is written."""
    process = start(baseline)
    wait_until(lambda: len(workers_of(process)) == 2)
    time.sleep(0.2)  # it ignores Ctrl-C itself while it starts them
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert_interrupted(process.returncode, errors)


def end(module, whom: str, number: int) -> tuple[int, str]:
    """A signal to a run -> its status and last words. No process and no shared memory is left."""
    before = shared_memory()
    process = start(module, "--checkpoint-every=640")
    wait_until(lambda: list(Path("runs").glob("*/checkpoint.pt")) or process.poll() is not None)
    collector, evaluator = workers_of(process)
    pids = {"learner": process.pid, "collector": collector, "evaluator": evaluator}
    pids["all"] = -process.pid  # the group: as a terminal does
    killed = time.monotonic()
    os.kill(pids[whom], number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - killed < SECONDS
    wait_until(lambda: not processes_of(process.pid))
    assert shared_memory() <= before
    return process.returncode, errors


@SLOW
@pytest.mark.parametrize(
    ("module", "whom", "number"),
    [
        (baseline, "all", signal.SIGINT),
        (variant, "all", signal.SIGINT),
        (baseline, "learner", signal.SIGTERM),
    ],
)
def test_an_interrupted_run_leaves_nothing(module, whom, number):
    assert_interrupted(*end(module, whom, number))


@SLOW
def test_a_killed_run_leaves_nothing():
    assert end(baseline, "learner", signal.SIGKILL)[0] == -signal.SIGKILL


@pytest.mark.parametrize(
    ("module", "whom", "number", "code"),
    [
        (variant, "evaluator", signal.SIGKILL, -9),
        pytest.param(baseline, "collector", signal.SIGTERM, 0, marks=SLOW),
    ],
)
def test_a_run_that_lost_a_worker_leaves_nothing(module, whom, number, code):
    status, errors = end(module, whom, number)
    assert status == 1 and "Traceback" in errors
    assert f"\nRuntimeError: the {whom} died: exit code {code}\n" in errors
    assert_reports(next(Path("runs").iterdir()))


# Devices


def test_device_env_takes_and_gives_tensors():
    """Around Gymnasium's own vector environments."""
    same = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    plain, other = (gym.vector.SyncVectorEnv([envs_for_workers.Ending] * 2, **same) for _ in "12")
    envs = baseline.DeviceEnv(other, CPU)
    rows = [(plain.reset(seed=1), envs.reset(seed=1))]
    for _ in range(20):
        actions = torch.rand(2, A)
        rows.append((plain.step(actions.numpy()), envs.step(actions)))
    for (*arrays, expected_infos), (*tensors, infos) in rows:
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.dtype == (torch.bool if array.dtype == bool else torch.float32)
            np.testing.assert_allclose(tensor, array, rtol=1e-6)
        assert repr(infos) == repr(expected_infos)
    assert any("final_obs" in infos for _, (*_, infos) in rows)
    assert baseline.DeviceEnv(plain, META).reset(seed=1)[0].device == META


def test_all_lands_on_the_device(monkeypatch):
    """Acting and learning on meta, which stands for one that is not the CPU."""
    monkeypatch.setattr(baseline, "Adam", lambda *args, fused, **kw: torch.optim.Adam(*args, **kw))
    args = baseline.Args(**SMALL)
    agent, rollout = baseline.PPO(args, OBS, A, META), baseline.Rollout(args, OBS, A, META)
    sample = agent.act(rollout.obs[0], rollout.actions[1])
    batch = agent.prepare(rollout, stale=True)
    metrics = agent.learn(batch, torch.zeros(64, dtype=torch.int64, device=META))
    for tensor in (*vars(rollout).values(), *sample, *batch, *metrics.values()):
        assert tensor.device == META


def test_devices_that_are_not_there_are_refused(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cpu", "cuda", "cuda:1"):
        assert baseline.use_device(name) == torch.device(name)
    assert current == [0, 1]
    for flag in ("learner_device", "collector_device", "eval_device"):  # before anything begins
        with pytest.raises(ValueError, match="^this machine has no device cuda:2$"):
            train(baseline, cuda=False, **{flag: "cuda:2"})
    assert not Path("runs").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cuda", "cuda"), ("cpu", "cuda")], ids=str)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_devices_do_not_change_what_is_learned(devices, graphs):
    """On a CPU and on a GPU, eager and replayed."""
    learner, collector = devices
    flags = {"total_timesteps": 320, "save_model": True, "learner_device": learner}
    flags |= {"collector_device": collector, "eval_device": collector, "eval_every": 128}
    one = train(baseline, **flags, exp_name="one")
    other = train(variant, **flags, exp_name="other", compile=graphs, cudagraphs=graphs)
    first, second = (dict(read_checkpoint(each)["agent"]) for each in (one, other))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)
