"""PPO whose acting, learning and evaluation are processes of their own, both scripts."""

import copy
import inspect
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import envs_for_workers  # noqa: F401  which the processes find as well: they get this sys.path
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from test_sac import Named, read_run, read_scalars, run, what_named_does
from test_sac_parity import assert_hunks_are_marked, backend  # noqa: F401

from leanrl import ppo_continuous_action as sync_baseline
from leanrl import ppo_continuous_action_async as baseline
from leanrl import ppo_continuous_action_async_torchcompile as variant
from leanrl import ppo_continuous_action_torchcompile as sync_variant

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
ENDING = {"env_id": "envs_for_workers:Ending-v0", "num_steps": 32, "num_envs": 2}
SMALL = ENDING | {"num_minibatches": 4, "update_epochs": 2}
OBS, A, CPU, META = 5, 3, torch.device("cpu"), torch.device("meta")
OF_TWO = {"charts/staleness", "charts/learner_waits_seconds", "charts/collector_waits_seconds"}
LOSSES = {"losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/old_approx_kl"}
LOSSES |= {"losses/approx_kl", "losses/clipfrac", "losses/explained_variance"}
PATIENCE = 300  # seconds that only a test which fails takes, however busy the machine
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


def read_checkpoint(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def assert_same(one: dict, other: dict, tolerance: float = 0) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_near(expected: dict, found: dict) -> None:
    """Two runs of one program may differ in the last bits, of which Adam can make a small step."""
    assert expected.keys() - {"learning_rate"} == found.keys() - {
        "learning_rate"
    }  # only one's state
    for name, x in expected.items():
        if name not in found:
            continue
        error = (x - found[name]).abs()
        assert error.max() < 1e-3 and error.mean() < 1e-5, name


# The same algorithm


@FORKED
@pytest.mark.parametrize("kind", ["baseline", "eager"])
def test_sync_is_the_synchronous_script(kind):
    assert_sync_is_the_synchronous_script(kind)


@FORKED
@pytest.mark.usefixtures("backend")
def test_compiled_sync_is_the_synchronous_script():
    assert_sync_is_the_synchronous_script("compiled")


def assert_sync_is_the_synchronous_script(kind):
    """Over 5 iterations with all kinds of ends: metrics, evaluations, checkpoints."""
    module, reference = (baseline, sync_baseline) if kind == "baseline" else (variant, sync_variant)
    flags = {"total_timesteps": 5 * 64, "save_model": True, "eval_every": 128, "eval_episodes": 2}
    flags |= {"target_kl": 1e-9} if kind == "compiled" else {}
    speed = {"compile": True} if kind == "compiled" else {}
    one = train(reference, **flags, exp_name="one")
    torch._dynamo.utils.counters.clear()
    other = train(module, **flags, **speed, exp_name="other", sync=True)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == (kind == "compiled")
    assert not counters["graph_break"]
    expected, found = read_scalars(one), read_scalars(other)
    assert {value for _, value in found["charts/staleness"]} == {0}
    assert found.keys() - OF_TWO == expected.keys()
    for tag in expected.keys() - {"charts/SPS", "charts/cpu_seconds"}:
        np.testing.assert_allclose(found[tag], expected[tag], rtol=1e-3, atol=1e-3, err_msg=tag)
    assert len(found["losses/policy_loss"]) == 5
    assert [step for step, _ in found["charts/eval_return"]] == [128, 256, 320]
    assert len(found["charts/episodic_return"]) > 20
    expected, found = read_checkpoint(one), read_checkpoint(other)
    assert_near(expected["agent"], found["agent"])
    for name in ("optimizers", "statistics"):
        assert_same(found[name], expected[name], 1e-3)
    assert found["global_step"] == expected["global_step"]
    assert torch.equal(found["generators"][0], expected["generators"][0])
    if kind == "baseline":  # and it is no accident: another seed has other results
        different = train(module, **flags, exp_name="different", sync=True, seed=2)
        with pytest.raises(AssertionError):
            assert_near(expected["agent"], read_checkpoint(different)["agent"])


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
    flags = {"total_timesteps": 6 * 64, "max_staleness": staleness, "save_model": True}
    run_dir = train(module, **flags, eval_every=128, eval_episodes=2)
    expected = in_one_process(baseline.Args(**SMALL | flags), staleness).model.state_dict()
    checkpoint, found = read_checkpoint(run_dir), read_scalars(run_dir)
    weights = {name: checkpoint["agent"][f"model.{name}"] for name in expected}
    assert_near(expected, weights)
    if module is baseline:  # and it is no accident: with another staleness it has other weights
        other = in_one_process(baseline.Args(**SMALL | flags), staleness - 1).model.state_dict()
        with pytest.raises(AssertionError):
            assert_near(other, weights)
    stale = [value for _, value in found["charts/staleness"]]
    assert stale == [min(i, staleness) for i in range(6)]
    assert [step for step, _ in found["charts/eval_return"]] == [128, 256, 384]
    args = module.Args(**SMALL, eval_episodes=2)
    agent = module.PPO(args, OBS, A, CPU)
    agent.load_state_dict(checkpoint["agent"])
    eval_return = module.evaluate(agent, args, checkpoint["statistics"], None)
    assert found["charts/eval_return"][-1][1] == pytest.approx(eval_return, rel=1e-4)


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


@FORKED
@SCRIPTS
def test_a_run_is_resumed(module):
    """Networks, optimizer, statistics and counters come back; episodes begin, nothing is stale."""
    run_dir = train(module, total_timesteps=256, save_model=True)
    before = read_checkpoint(run_dir)
    flags = {"total_timesteps": 600, "learning_rate": 0.0, "num_steps": 48, "max_staleness": 2}
    train(module, **flags, save_model=True, resume=str(run_dir))
    after, values = read_checkpoint(run_dir), read_scalars(run_dir)
    assert after["global_step"] == 256 + 4 * 96  # the first multiple of a rollout from 600 on
    assert_same(after["agent"], before["agent"])  # at a learning rate of 0
    updates = 4 * 4 * 2, (4 + 4) * 4 * 2  # rollouts, minibatches, epochs
    if module is baseline:
        steps = [checkpoint["optimizers"][0][0]["step"] for checkpoint in (before, after)]
    else:
        powers = [checkpoint["optimizers"][0][-1] for checkpoint in (before, after)]
        steps = [power.log() / np.log(0.999) for power in powers]
    assert [round(step.item()) for step in steps] == list(updates)
    counts = [checkpoint["statistics"]["return_rms_count"] for checkpoint in (before, after)]
    assert [round(count.max().item()) for count in counts] == [256 / 2, (256 + 4 * 96) / 2]
    assert sorted(value for _, value in values["charts/staleness"]) == [0, 0, 1, 1, 1, 1, 2, 2]
    assert max(step for step, _ in values["charts/episodic_return"]) > 256
    for name in ("config", "stages", "stages_collector"):
        assert (run_dir / f"{name}.json").exists() and (run_dir / f"{name}_256.json").exists()


@SCRIPTS
def test_a_collector_makes_what_it_is_told_and_says_what_happened(module, monkeypatch):
    """Five rollouts of a resumed run, in this process: who asks and who answers is the test."""
    spec = gym.envs.registration.EnvSpec("Named-v0", entry_point=lambda **_: Named())
    monkeypatch.setitem(gym.registry, "Named-v0", spec)
    flags = {"env_id": "Named-v0", "num_envs": 2, "num_steps": 8, "num_minibatches": 4}
    args = module.Args(**flags, gamma=0.9, seed=7)
    agent, make_envs, gammas = module.PPO(args, 3, 2, CPU), module.make_envs, []

    def made(env_id, num_envs, gamma):
        gammas.append(gamma)
        return make_envs(env_id, num_envs, gamma)

    before = make_envs("Named-v0", 2, 0.9)
    before.reset(seed=1)
    for _ in range(30):
        before.step(np.zeros((2, 2), np.float32))
    statistics = module.get_statistics(before)
    slots, rollouts, reports = [module.Slot(args, 3, 2, agent.model) for _ in range(5)], [], []
    for slot in slots:
        slot.weights.normal_(std=0.3)
        slot.noise.normal_()
    messages = iter([(40, statistics), 3, 1, 2, 0, 4])

    def receive(pipe):
        for message in messages:
            rollouts.extend([] if isinstance(message, tuple) else [slots[message]])
            return message
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "make_envs", made)
    monkeypatch.setattr(module, "receive", receive)
    monkeypatch.setattr(module, "send", lambda pipe, report: reports.append(report))
    with pytest.raises(KeyboardInterrupt):
        module.collect(None, args, slots, Path("stages.json"))
    assert gammas == [0.9] and len(reports) == len(rollouts) == 5
    truncations, episodes, worlds = [], [], [what_named_does(47 + i, 40) for i in range(2)]
    for number, (slot, report) in enumerate(zip(rollouts, reports, strict=True)):
        torch.nn.utils.vector_to_parameters(slot.weights, agent.parameters())
        mean, log_std, _ = agent.model(torch.as_tensor(slot.obs[:-1]))  # the variant's are arrays
        actions = (mean + log_std.exp() * slot.noise).detach()
        np.testing.assert_allclose(slot.actions, actions, atol=1e-5, rtol=1e-5)
        if number + 1 < 5:  # what follows a rollout begins the next one
            np.testing.assert_array_equal(slot.obs[-1], rollouts[number + 1].obs[0])
        counts = report.statistics["return_rms_count"] - statistics["return_rms_count"]
        assert counts.flatten().tolist() == pytest.approx([8 * (number + 1)] * 2)
        truncations += [(8 * number + t, n) for t, n, _ in report.truncations]
        for step, row in report.episodes:
            found = float(row["charts/episodic_return"]), int(row["charts/episodic_length"])
            episodes.append((step, *found))
        ends = [[t in ends for _, ends in worlds] for t in range(8 * number + 1, 8 * number + 9)]
        assert slot.ended.tolist() == ends
    expected, truncated = [], []
    for n, (rows, ends) in enumerate(worlds):
        for t, total in ends.items():
            expected.append((40 + 2 * t, total, 3 + 2 * ((47 + n) % 2)))
            truncated += [] if rows[t - 1][3] else [(t - 1, n)]
    assert sorted(episodes) == sorted(expected) and sorted(truncations) == sorted(truncated)
    stages = json.loads(Path("stages.json").read_text())
    assert (stages["env_steps"], stages["iterations"]) == (32, 2)  # after three rollouts of 16


@pytest.mark.usefixtures("backend")
def test_numbers_that_a_copy_anneals_count_in_compiled_code():
    """Each epoch has another coefficient: it compiles once more, then they are inputs."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**SMALL), OBS, A, CPU)
    agent = variant.PPO(variant.Args(**SMALL), OBS, A, CPU)
    agent.model.load_state_dict(reference.model.state_dict())
    variant.compile_agent(agent)
    rollout = baseline.Rollout(reference.args, OBS, A, CPU)
    same_rollout = variant.Rollout(agent.args, OBS, A, CPU)
    for name, tensor in vars(same_rollout).items():
        tensor.normal_()
        getattr(rollout, name).copy_(tensor)

    def agree(**numbers):
        for args in (reference.args, agent.args):
            vars(args).update(numbers)
        order = torch.randperm(64)
        expected = reference.learn(reference.prepare(rollout, stale=True), order)
        found = agent.learn(agent.prepare(same_rollout), order)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    for epoch, coefficient in enumerate((0.3, 0.2, 0.1, 0.05), start=1):
        agree(ent_coef=coefficient, vf_coef=coefficient, gamma=1 - coefficient)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == min(epoch, 2), "compiled for each number"
    for clip_coef in (0.01, 0.5, 0.3):  # compiles for each value: torch keeps the bounds of a clamp
        agree(clip_coef=clip_coef)
    for parameter, other in zip(reference.parameters(), agent.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, atol=1e-5, rtol=0)


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


# At the same time


@FORKED
@SCRIPTS
def test_acting_goes_on_while_learning(module, monkeypatch):
    """The learner does not return before the collector has made steps of the next rollout."""
    learn, learned = module.PPO.learn, []

    def wait_for_the_next_rollout(*args):
        deadline = time.monotonic() + PATIENCE
        learned.append(True)
        while len(learned) < 4 and int(Path("steps").read_text()) <= 8 * len(learned):
            assert time.monotonic() < deadline, "acting waits for learning"
            time.sleep(0.01)
        return learn(*args)

    monkeypatch.setattr(module.PPO, "learn", wait_for_the_next_rollout)
    flags = {"env_id": "envs_for_workers:Counted-v0", "num_steps": 8, "num_envs": 1}
    found = read_scalars(train(module, **flags, update_epochs=1, total_timesteps=4 * 8))
    waited = [value for _, value in found["charts/learner_waits_seconds"]]
    assert len(waited) == 4 and waited[0] > 8 * 0.02  # for the first one it has nothing else to do
    assert min(value for _, value in found["charts/collector_waits_seconds"]) >= 0


# Death


@pytest.mark.parametrize(
    ("module", "env_id", "code"), [(baseline, "Mortal-v0", 1), (variant, "Killed-v0", -9)]
)
def test_a_dead_collector_ends_the_run(module, env_id, code, capfd):
    """In its third rollout, as the learner next waits for it."""
    flags = {"env_id": f"envs_for_workers:{env_id}", "num_steps": 8, "num_envs": 1}
    with pytest.raises(RuntimeError, match=f"^the collector died: exit code {code}$"):
        train(module, **flags, update_epochs=1, total_timesteps=8000, checkpoint_every=8)
    if code == -9:
        assert time.time() - Path("killed").stat().st_mtime < SECONDS
    said = "ArithmeticError: the simulation is unstable" in capfd.readouterr().err
    assert said == (env_id == "Mortal-v0")
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] == 16


@FORKED
@SCRIPTS
def test_workers_draw_from_seeded_generators(module):
    """As the synchronous script's environments, which draw from those that all share.

    And each of the two scripts repeats itself.
    """
    reference = sync_baseline if module is baseline else sync_variant
    flags = {"env_id": "envs_for_workers:Drawing-v0", "total_timesteps": 3 * 64}
    flags |= {"save_model": True, "eval_every": 64, "eval_episodes": 2}
    run_dirs = [train(reference, **flags) for _ in range(2)]
    run_dirs += [train(module, **flags, sync=True) for _ in range(2)]
    plain, again, one, other = (read_checkpoint(each)["statistics"] for each in run_dirs)
    assert_same(again, plain)
    assert_same(one, plain, 1e-3)
    assert_same(other, one)
    scalars = [read_scalars(each) for each in run_dirs]
    for tag in ("charts/eval_return", "charts/episodic_return"):
        plain, again, one, other = (each[tag] for each in scalars)
        assert again == plain and other == one
        np.testing.assert_allclose(one, plain, rtol=1e-3, atol=1e-3)
    assert len(scalars[0]["charts/eval_return"]) == 3


@FORKED
def test_a_nan_ends_the_run_before_a_checkpoint_is_written():
    flags = {"env_id": "envs_for_workers:Broken-v0", "num_steps": 8, "num_envs": 1}
    with pytest.raises(FloatingPointError, match=r"^step 24: losses/\w+ is nan$"):
        train(baseline, **flags, total_timesteps=800, checkpoint_every=8)
    assert read_checkpoint(next(Path("runs").iterdir()))["global_step"] == 16


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


def wait_until(true) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


def start(module, *flags) -> subprocess.Popen:
    """A run that goes on, in a process group of its own, as a terminal starts it."""
    flags += tuple(f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items())
    flags += ("--total-timesteps=10000000", "--eval-every=640")
    command = [sys.executable, module.__file__, *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=env, process_group=0)


def workers_of(process: subprocess.Popen) -> list[int]:
    """In the order of their start."""
    assert process.poll() is None, process.communicate()[1][-2000:]
    spawned = "from multiprocessing.spawn import spawn_main"
    children = children_of(process.pid)
    return sorted(x for x in children if spawned in Path(f"/proc/{x}/cmdline").read_text())


def test_ctrl_c_does_not_reach_workers_that_still_import():
    """Their first rollout is made and learned from, and the checkpoint is written."""
    process = start(baseline, "--save-model")
    wait_until(lambda: len(workers_of(process)) == 2)
    time.sleep(0.2)  # it ignores Ctrl-C itself while it starts them
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and "Traceback" not in errors, errors[-3000:]
    assert re.search(r"^interrupted after [\d,]+ steps$", errors, re.MULTILINE), errors[-3000:]
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] >= 64
    for report in ("stages.json", "stages_collector.json"):
        assert json.loads((run_dir / report).read_text())["stages"]


@pytest.mark.parametrize(
    ("module", "whom", "how", "last_words"),
    [
        pytest.param(baseline, "all", signal.SIGINT, r"interrupted after [\d,]+ steps", marks=SLOW),
        pytest.param(variant, "all", signal.SIGINT, r"interrupted after .*", marks=SLOW),
        pytest.param(baseline, "learner", signal.SIGTERM, r"interrupted after .*", marks=SLOW),
        pytest.param(baseline, "learner", signal.SIGKILL, None, marks=SLOW),
        (variant, "evaluator", signal.SIGKILL, "RuntimeError: the evaluator died: exit code -9"),
        pytest.param(
            baseline,
            "collector",
            signal.SIGTERM,
            "RuntimeError: the collector died: exit code 0",
            marks=SLOW,
        ),
    ],
)
def test_nothing_is_left_behind(module, whom, how, last_words):
    """No process and no shared memory, whatever ends the run; the last line says what did."""
    before = shared_memory()
    process = start(module, "--checkpoint-every=640")
    wait_until(lambda: list(Path("runs").glob("*/checkpoint.pt")) or process.poll() is not None)
    workers = workers_of(process)
    assert len(workers) == 2
    children = children_of(process.pid)
    killed = time.monotonic()
    if whom == "all":  # as a terminal does
        os.killpg(process.pid, how)
    else:
        pids = {"learner": process.pid, "collector": workers[0], "evaluator": workers[1]}
        os.kill(pids[whom], how)
    _, errors = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - killed < SECONDS
    wait_until(lambda: not alive(children))
    assert shared_memory() <= before
    if last_words:
        assert process.returncode == 1, errors[-3000:]
        assert ("Traceback" in errors) == ("Error" in last_words), errors[-3000:]
        assert re.search(f"^{last_words}$", errors, re.MULTILINE), errors[-3000:]
        (run_dir,) = Path("runs").iterdir()
        for report in ("stages.json", "stages_collector.json"):
            assert json.loads((run_dir / report).read_text())["stages"]


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
    """Around Gymnasium's own vector environments."""
    make = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    envs = baseline.DeviceEnv(gym.vector.SyncVectorEnv([Two] * 2, **make), CPU)
    obs, infos = envs.reset(seed=1)
    assert obs.dtype == torch.float32 and obs.tolist() == [[0, 0], [0, 0]] and infos == {}
    for t in range(3):
        actions = torch.tensor([[0.25, t / 10], [0.5, -t / 10]])
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        assert rewards.dtype == torch.float32 and rewards.tolist() == [0.5, 0.5]
        assert terminated.dtype == torch.bool and terminated.all() == (t == 2)
        assert truncated.dtype == torch.bool and not truncated.any()
        torch.testing.assert_close(obs, actions if t < 2 else torch.zeros(2, 2))
    for final, action in zip(infos["final_obs"], actions.numpy(), strict=True):
        np.testing.assert_array_equal(final, action)
    assert envs.num_envs == 2 and envs.single_action_space == Two.action_space
    assert baseline.DeviceEnv(envs.env, META).reset(seed=1)[0].device == META


def check_devices(function, device):
    """`function`, but RuntimeError names a tensor, given or returned, that is elsewhere."""
    signature = inspect.signature(function)

    def check(name, value):
        if isinstance(value, torch.Tensor) and value.device != device:
            where = f"{name} is on {value.device}, expected {device}"
            raise RuntimeError(f"{function.__qualname__}: {where}")
        if isinstance(value, tuple):
            value = value._asdict() if hasattr(value, "_fields") else dict(enumerate(value))
        parts = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for key, part in parts.items():
            check(f"{name}.{key}", part)

    def checked(*args, **kwargs):
        check("arguments", signature.bind(*args, **kwargs).arguments)
        result = function(*args, **kwargs)
        check("result", result)
        return result

    return checked


def test_nothing_lands_on_the_wrong_device(monkeypatch):
    """Acting and learning on meta, which stands for another device, with a check of every call."""
    monkeypatch.setattr(baseline, "Adam", lambda *args, fused, **kw: torch.optim.Adam(*args, **kw))
    args = baseline.Args(**SMALL)
    agent, rollout = baseline.PPO(args, OBS, A, META), baseline.Rollout(args, OBS, A, META)
    act = check_devices(agent.act, META)
    rollout.actions[0], rollout.log_probs[0], rollout.values[0] = act(
        rollout.obs[0], rollout.actions[1]
    )
    batch = check_devices(agent.prepare, META)(rollout, stale=True)
    order = torch.zeros(64, dtype=torch.int64, device=META)
    metrics = check_devices(agent.learn, META)(batch, order)
    assert {value.shape for value in metrics.values()} == {(4,)}
    with pytest.raises(RuntimeError, match=r"^PPO.act: arguments.noise is on cpu, expected meta$"):
        act(rollout.obs[0], torch.zeros(2, A))
    rollout.ended = torch.zeros(32, 2)
    with pytest.raises(RuntimeError, match=r"^PPO.prepare: arguments.rollout.ended is on cpu"):
        check_devices(agent.prepare, META)(rollout, stale=True)


@SCRIPTS
def test_a_device_that_is_not_there_is_named(module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.append(index))
    current = []
    for name in ("cpu", "cuda", "cuda:1"):
        assert module.use_device(name) == torch.device(name)
    assert current == [0, 1]
    with pytest.raises(ValueError, match="^this machine has no device cuda:2$"):
        module.use_device("cuda:2")
    with pytest.raises(RuntimeError, match="gpu"):
        module.use_device("gpu")
    for flag in ("learner_device", "collector_device", "eval_device"):  # before anything begins
        with pytest.raises(ValueError, match="^this machine has no device cuda:2$"):
            train(module, cuda=False, **{flag: "cuda:2"})
    assert not Path("runs").exists()


# Whole runs


def test_run_from_end_to_end(tmp_path):
    flags = ("--env-id=Pendulum-v1", "--num-steps=64", "--num-minibatches=4", "--num-envs=2")
    flags += ("--total-timesteps=1000", "--eval-every=384", "--eval-episodes=2", "--save-model")
    result = run(tmp_path, Path(variant.__file__).name, *flags, "--cudagraphs")
    run_dir, config, stages, values = read_run(tmp_path)
    if not torch.cuda.is_available():
        assert "--cudagraphs: without CUDA it has no effect" in result.stderr
    assert f"steps/s, runs/{run_dir.name}" in result.stderr
    assert config["args"]["collector_device"] == "cpu"
    steady = 896 - 3 * 128
    assert stages["env_steps"] == steady and stages["sps_steady"] > 0
    collector = json.loads((run_dir / "stages_collector.json").read_text())
    assert collector["env_steps"] == steady and collector["iterations"] == steady / 128
    for name in ("simulation", "inference", "replay"):
        assert collector["stages"][name] > 0
    rates = [value for _, value in values["charts/learning_rate"]]
    assert rates == pytest.approx([3e-4 * (1 - i / 7) for i in range(7)])
    assert [step for step, _ in values["charts/eval_return"]] == [384, 768, 896]
    assert [step for step, _ in values["charts/episodic_return"]] == [400, 400, 800, 800]
    assert values["charts/episodic_length"] == [(400, 200), (400, 200), (800, 200), (800, 200)]
    losses = {tag for tag in values if tag.startswith("losses/")}
    assert losses == LOSSES
    for tag in losses:
        series = [value for _, value in values[tag]]
        assert len(series) == 7 and np.isfinite(series).all()
    assert len({value for _, value in values["losses/value_loss"]}) == 7
    assert (run_dir / "checkpoint.pt").exists()


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
    assert_same(first, second, tolerance=1e-3)
