"""PPO for Atari in several processes: they compute what one does, and what happens if one dies."""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from fake_games import FakeGames
from helpers import read_checkpoint, read_scalars
from test_sac_parity import assert_hunks_are_marked, backend  # noqa: F401

envpool = pytest.importorskip("envpool", reason="needs requirements/envpool.txt")

import test_atari  # noqa: E402

from leanrl import ppo_atari_envpool as single  # noqa: E402
from leanrl import ppo_atari_envpool_multigpu as baseline  # noqa: E402
from leanrl import ppo_atari_envpool_multigpu_torchcompile as variant  # noqa: E402
from leanrl import ppo_atari_envpool_torchcompile as single_variant  # noqa: E402

SMALL = {"env_id": "Breakout-v5", "num_envs": 4, "num_steps": 32, "num_minibatches": 4}
SMALL |= {"update_epochs": 2, "cuda": False, "save_model": True}
FEW = [f"--{name.replace('_', '-')}={SMALL[name]}" for name in list(SMALL)[:5]] + ["--no-cuda"]
ROLLOUT, UPDATES = 128, 8  # steps and updates of a rollout
PATIENCE = 400  # seconds that only a test which fails takes, however busy the machine


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: small batches are not worth more."""
    monkeypatch.chdir(tmp_path)
    yield
    if dist.is_initialized():  # a run that a check ended
        dist.destroy_process_group()


def train(module, **flags) -> Path:
    """A run in this process and in float64, as those of the worker."""
    torch.set_default_dtype(torch.float64)
    try:
        return module.main(module.Args(**SMALL | flags))
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def union_of_shares(world: int):
    """Lets one process draw the minibatches that so many draw together, from the same stream.

    Of T N steps, processes have N / W columns each: step t of column i of process r is number
    t N / W + i of its own and number t N + r N / W + i of all.
    """
    randperm, envs = torch.randperm, SMALL["num_envs"]

    def drawn(size, **options):
        shares = []
        for rank in range(world):
            t, i = np.divmod(randperm(size // world, **options).numpy(), envs // world)
            index = torch.from_numpy(t * envs + rank * envs // world + i)
            shares.append(index.view(SMALL["num_minibatches"], -1))
        return torch.cat(shares, dim=1).flatten()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", drawn)
        yield


def torchrun(*command, **options):
    """torchrun with two processes."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    options = ["--standalone", "--nproc-per-node=2", *options]
    return started("-m", "torch.distributed.run", *options, *command)


@contextmanager
def started(*command):
    """Python with these arguments, as a Popen whose pipes are text; ends all that it started."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*workers(process), process.pid]:  # each leads a process group
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            process.communicate()


def workers(process) -> list[int]:
    """The processes that torchrun has started, from one of its threads, and that still run."""
    children = []
    for path in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with suppress(OSError):
            children += [int(pid) for pid in path.read_text().split()]
    return children


def ask(module, flags: dict, **wishes) -> tuple:
    """The arguments of torchrun for multigpu_worker.py."""
    wishes = {"module": Path(module.__file__).stem, "flags": flags} | wishes
    return ROOT / "tests" / "multigpu_worker.py", json.dumps(wishes)


def finish(process) -> tuple[int, str]:
    """Status and standard error of torchrun."""
    _, err = process.communicate(timeout=PATIENCE)
    return process.returncode, err


def assert_close(expected: dict, found: dict, tolerance: float) -> None:
    """Checkpoints or what ranks end with: weights of the same names."""
    torch.testing.assert_close(expected["agent"], found["agent"], atol=tolerance, rtol=0)


def assert_same_rows(expected: Path, found: Path) -> None:
    """All that is logged but speed; games that end in the same step may be in another order."""
    expected, found = read_scalars(expected), read_scalars(found)
    assert expected.keys() == found.keys()
    for tag in expected.keys() - {"charts/SPS", "charts/cpu_seconds", "charts/gpu_percent"}:
        rows = sorted(expected[tag]), sorted(found[tag])
        np.testing.assert_allclose(*rows, atol=1e-5, rtol=1e-4, err_msg=tag)


# Two processes and one


FAKE = {"num_steps": 16, "eval_every": 128, "eval_episodes": 3, "save_model": True}


def test_two_processes_compute_what_one_does(tmp_path, monkeypatch):
    """Two rollouts and, as after torchrun's restart, two more, in all that is learned and logged.

    The second process starts with other flags, another stream and other weights: those of the first
    one count.
    """
    monkeypatch.setattr(envpool, "make_gymnasium", FakeGames)
    wishes = {"out": str(tmp_path), "fake": True, "restarts": [128, 256]}
    together = SMALL | FAKE | {"exp_name": "together"}
    with started(*ask(baseline, together, **wishes)) as process:
        with union_of_shares(2):
            alone = train(single, **FAKE, total_timesteps=128, exp_name="alone")
            half = read_checkpoint(alone)
            train(single, **FAKE, total_timesteps=256, exp_name="alone", resume=str(alone))
        status, err = finish(process)
    assert status == 0, err

    # One process writes: one run directory, and in it all games and steps.
    (run_dir,) = Path("runs").glob("*together*")
    assert len(list(Path("runs").iterdir())) == 2 and err.count(" steps/s, runs/") == 2
    names = {path.name for path in run_dir.iterdir() if not path.name.startswith("events")}
    records = {"config.json", "stages.json", "config_128.json", "stages_128.json"}
    assert names == records | {"checkpoint.pt"}
    assert len(list(run_dir.glob("events*"))) == 2
    expected, found = read_checkpoint(alone), read_checkpoint(run_dir)
    assert found["args"]["learning_rate"] == expected["args"]["learning_rate"]
    assert_close(expected, found, 1e-10)
    for key in "optimizers", "generators":
        torch.testing.assert_close(expected[key], found[key], atol=1e-10, rtol=0)
    assert_same_rows(alone, run_dir)
    assert len(read_scalars(run_dir)["charts/eval_return"]) == 2

    ranks = [torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for key in "agent", "optimizers", "firsts":
        torch.testing.assert_close(ranks[0][key], ranks[1][key], atol=0, rtol=0)  # bit for bit
    assert_close(half, {"agent": ranks[1]["firsts"][0]}, 1e-10)
    assert [rank["run_dir"] for rank in ranks] == [str(run_dir), "None"]
    games = [rank["games"] for rank in ranks]
    assert sum(games) == len(read_scalars(run_dir)["charts/episodic_length"]) and min(games) > 3
    evaluations = [[seed for seed in rank["seeds"] if seed > 2**29] for rank in ranks]
    assert len(evaluations[0]) == 2 and not evaluations[1], "rank 0 alone evaluates"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "flags"),
    [(baseline, {}), (variant, {"channels_last": True}), (variant, {"compile": True})],
    ids=["baseline", "eager", "compiled"],
)
def test_two_processes_play_envpools_games_as_one_does(module, flags, tmp_path):
    """In the parameters and in all that is logged; rounding makes 1e-14 in 56 updates."""
    rollouts = 7
    common = {"total_timesteps": ROLLOUT * rollouts, "eval_every": 512, "eval_episodes": 1}
    with union_of_shares(2):
        alone = train(single, **common, exp_name="alone")
    together = SMALL | common | flags | {"exp_name": "together"}
    with torchrun(*ask(module, together, out=str(tmp_path))) as process:
        status, err = finish(process)
    assert status == 0, err

    (run_dir,) = Path("runs").glob("*together*")
    stages = json.loads((run_dir / "stages.json").read_text())
    assert stages["env_steps"] == ROLLOUT * (rollouts - 3)
    assert_close(read_checkpoint(alone), read_checkpoint(run_dir), 1e-10)
    assert_same_rows(alone, run_dir)
    ranks = [torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert_close(*ranks, 0)  # bit for bit
    assert min(rank["games"] for rank in ranks) > 0, "not a comparison of games of both"
    for rank in ranks:
        assert len(rank["counts"]) == UPDATES * rollouts
        if "compile" in flags:  # acting, gradient, step: all made in the first rollout
            assert set(rank["counts"][1:]) == {(3, 0)}, rank["counts"]


@pytest.mark.slow
def test_processes_that_do_not_average_are_noticed(tmp_path):
    flags = SMALL | {"total_timesteps": ROLLOUT}
    with torchrun(*ask(baseline, flags, out=str(tmp_path), apart=True)) as process:
        assert finish(process)[0] == 0
    ranks = [torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    with pytest.raises(AssertionError):
        assert_close(*ranks, 1e-6)


# One process


BOTH = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])


@BOTH
def test_main_does_what_it_says(module, monkeypatch):
    test_atari.assert_main_does_what_it_says(module, monkeypatch)


@BOTH
def test_evaluation_changes_nothing_and_a_run_goes_on_with_new_games(module, monkeypatch):
    test_atari.assert_a_run_goes_on(module, monkeypatch)


@BOTH
def test_an_update_is_a_clipped_step_of_adam(module):
    def update(agent, batch, index):
        vector, _ = agent.gradient(batch, index, batch.advantages[index])
        agent.step(vector)

    test_atari.assert_an_update_is_a_clipped_step_of_adam(module, update)


def test_one_process_is_the_script_for_one(monkeypatch):
    monkeypatch.setattr(envpool, "make_gymnasium", FakeGames)
    flags = {"target_kl": 1e-9, "norm_adv": False, "clip_vloss": False}
    assert_one_process_is_the_script_for_one(baseline, single, flags)


@pytest.mark.usefixtures("backend")
def test_one_compiled_process_is_the_script_for_one(monkeypatch):
    monkeypatch.setattr(envpool, "make_gymnasium", FakeGames)
    flags = {"channels_last": True}
    assert_one_process_is_the_script_for_one(variant, single_variant, flags, compile=True)


def assert_one_process_is_the_script_for_one(module, reference, flags, **speed):
    """Also when it goes on after the first rollout, with new games and an agent of its own."""
    flags = flags | {"num_steps": 8}
    part = flags | {"total_timesteps": 32}
    whole = flags | {"total_timesteps": 64}
    runs = []
    counters = torch._dynamo.utils.counters
    for each in (reference, module):
        run_dir = train(each, **part, exp_name=each.__name__)
        counters.clear()
        more = speed if each is module else {}
        runs.append(train(each, **whole, **more, resume=str(run_dir)))
    graphs = 3 if module is variant else 0  # acting, gradient, step
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    one, other = map(read_checkpoint, runs)
    assert_close(one, other, 1e-6)
    assert other["global_step"] == 64
    torch.testing.assert_close(one["optimizers"], other["optimizers"], atol=1e-6, rtol=0)
    torch.testing.assert_close(one["generators"], other["generators"])
    assert_same_rows(*runs)


@pytest.mark.parametrize("norm_adv", [True, False])
def test_advantages_are_normalized_by_what_all_have(norm_adv):
    """Against NumPy on the union of the processes' shares of each minibatch."""
    advantages = np.random.default_rng(0).normal(3, 2, (2, 12))
    torch.manual_seed(0)
    orders = torch.stack([torch.randperm(12), torch.randperm(12)])
    args = baseline.Args(num_envs=2, num_steps=12, num_minibatches=3, norm_adv=norm_adv)
    found = baseline.normalize(torch.from_numpy(advantages), orders, args)
    assert found.shape == (2, 3, 4)
    for m in range(3):
        columns = slice(4 * m, 4 * m + 4)
        shares = np.stack([x[order[columns]] for x, order in zip(advantages, orders, strict=True)])
        if norm_adv:
            shares = (shares - shares.mean()) / (shares.std(ddof=1) + 1e-8)
        np.testing.assert_allclose(found[:, m].numpy(), shares, rtol=1e-12)


@pytest.mark.usefixtures("backend", "float64")
def test_a_coefficient_that_a_copy_anneals_counts_in_compiled_code():
    """Also in the copy of the flags that leaves normalization to all processes."""
    torch.manual_seed(0)
    reference = baseline.PPO(baseline.Args(**SMALL), 4, torch.device("cpu"))
    agent = variant.PPO(variant.Args(**SMALL), 4, torch.device("cpu"))
    agent.load_state_dict(reference.state_dict())
    variant.compile_agent(agent)
    columns = {name: torch.randn(64) for name in ("values", "advantages", "returns")}
    batch = baseline.Batch(
        obs=torch.randint(0, 256, (64, 4, 84, 84), dtype=torch.uint8),
        actions=torch.randint(0, 4, (64,)),
        log_probs=torch.full((64,), -1.4),
        **columns,
    )
    # torch keeps the bounds of a clamp, so it compiles for each clip_coef
    coefs = [(0.01, 0.1), (0.1, 0.1), (0.5, 0.1), (0.9, 0.1), (0.9, 0.01), (0.9, 0.5)]
    for count, (ent_coef, clip_coef) in enumerate(coefs, start=1):
        for args in (reference.args, agent.args):
            args.ent_coef = ent_coef
            args.clip_coef = clip_coef
        index, advantages = torch.randperm(64)[:32], torch.randn(32)
        expected, found = (x.gradient(batch, index, advantages) for x in (reference, agent))
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
        reference.step(expected[0])
        agent.step(found[0])
        assert_close({"agent": reference.state_dict()}, {"agent": agent.state_dict()}, 1e-9)
        # both of these once, and the gradient a second time, from when on the number is an input
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert count > 4 or graphs == min(count + 1, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, {"bf16": True, "channels_last": True}], ids=str)
def test_graphed_runs_agree_with_eager(flags):
    """One process and NCCL: rollouts before, at and after the capture of every graph."""
    flags = SMALL | flags | {"total_timesteps": ROLLOUT * 5, "cuda": True}
    still = variant.Args(**flags | {"learning_rate": 0.0}, exp_name="start")
    start = read_checkpoint(variant.main(still))["agent"]
    eager = read_checkpoint(variant.main(variant.Args(**flags, exp_name="eager")))["agent"]
    for compiled in (False, True):
        name = f"graphed-{compiled}"
        args = variant.Args(**flags, cudagraphs=True, compile=compiled, exp_name=name)
        test_atari.assert_learned_alike(start, eager, read_checkpoint(variant.main(args))["agent"])


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


def test_what_one_process_needs_is_the_same_to_the_letter():
    for one, other in ((single, baseline), (single_variant, variant)):
        for name in ("act", "value", "prepare"):
            sources = [inspect.getsource(getattr(module.PPO, name)) for module in (one, other)]
            assert sources[0] == sources[1]


# Processes that die


ENDLESS = SMALL | {"num_steps": 16, "total_timesteps": 10**6, "eval_every": 10**6}  # 64 a rollout


@pytest.mark.parametrize(
    ("struck", "method", "call"),
    [(1, "update", UPDATES + 3), (0, "all_gather_object", 1)],
    ids=["while learning", "after they have agreed to go on"],
)
def test_sigterm_to_one_process_ends_all_after_the_same_iteration(struck, method, call, tmp_path):
    """The second one: with a checkpoint, records, equal weights, but without an evaluation."""
    strike = [struck, method, call, signal.SIGTERM]
    with started(*ask(baseline, ENDLESS, fake=True, out=str(tmp_path), strike=strike)) as process:
        status, err = finish(process)
    assert status == 1, err  # of rank 0 alone, which says why
    assert err.splitlines()[-1] == "interrupted after 128 steps", err
    assert "Traceback" not in err
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] == 128
    assert [step for step, _ in read_scalars(run_dir)["losses/entropy"]] == [64, 128]
    assert json.loads((run_dir / "stages.json").read_text())["iterations"] == 2
    ranks = [torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert [len(rank["counts"]) for rank in ranks] == [UPDATES * 2] * 2
    assert [len(rank["seeds"]) for rank in ranks] == [1, 1], "an evaluation"
    assert_close(*ranks, 0)


@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_when_a_process_is_killed(killed):
    """By an error of their own: nobody else ends them here."""
    strike = [killed, "update", UPDATES + 3, signal.SIGKILL]
    flags = ENDLESS | {"checkpoint_every": 64}
    with started(*ask(baseline, flags, fake=True, strike=strike)) as process:
        status, err = finish(process)
    assert status == 2
    assert err.count("Traceback") == 1 and "gloo/transport" in err, err
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] == 64
    assert (run_dir / "stages.json").exists() == (killed == 1)


@pytest.mark.slow
def test_sigterm_to_torchrun_ends_all_with_their_records():
    endless = (*FEW, "--total-timesteps=1000000", f"--checkpoint-every={ROLLOUT}")
    with torchrun(baseline.__file__, *endless) as process:
        deadline = time.monotonic() + PATIENCE
        while not list(Path("runs").glob("*/checkpoint.pt")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.terminate()
        status, err = finish(process)
    assert status != 0
    (run_dir,) = Path("runs").iterdir()
    steps = read_checkpoint(run_dir)["global_step"]
    assert f"interrupted after {steps:,} steps" in err, err
    assert "leanrl/ppo" not in "".join(line for line in err.splitlines() if "File " in line), err
    stages = json.loads((run_dir / "stages.json").read_text())
    assert steps == read_scalars(run_dir)["charts/SPS"][-1][0] and stages["iterations"] > 0


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_lost_a_process():
    total = ROLLOUT * 3
    flags = SMALL | {"total_timesteps": total, "checkpoint_every": ROLLOUT}
    strike = [1, "update", UPDATES + 3, signal.SIGKILL]
    with torchrun(*ask(baseline, flags, strike=strike), max_restarts=1) as process:
        status, err = finish(process)
    assert status == 0, err
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] == total
    steps = {step for step, _ in read_scalars(run_dir)["charts/learning_rate"]}
    assert steps == set(range(ROLLOUT, total + 1, ROLLOUT))
    assert (run_dir / "config_128.json").exists()


@pytest.mark.slow
def test_torchrun_restarts_a_run_without_a_checkpoint_from_its_beginning():
    """Not from the checkpoint of another launch, even one of the same name."""
    flags = SMALL | {"total_timesteps": ROLLOUT * 2}
    other = train(baseline, total_timesteps=ROLLOUT)
    before = (other / "checkpoint.pt").read_bytes()
    strike = [0, "update", UPDATES + 3, signal.SIGKILL]
    with torchrun(*ask(baseline, flags, strike=strike), max_restarts=1) as process:
        status, err = finish(process)
    assert status == 0, err
    assert (other / "checkpoint.pt").read_bytes() == before
    assert not list(Path("runs").glob("*/config_*.json")), "a run that has resumed"
    assert len(list(Path("runs").glob("*/checkpoint.pt"))) == 2


@pytest.mark.slow
def test_two_processes_resume_what_one_has_begun(tmp_path):
    """And compute what one would have gone on to compute."""
    to_the_end = {"total_timesteps": ROLLOUT * 4, "target_kl": 1e-9}  # which ends each epoch
    with union_of_shares(2):
        part = train(baseline, total_timesteps=ROLLOUT * 2)
        shutil.copytree(part, "alone")
        train(baseline, **to_the_end, resume="alone")
    flags = SMALL | to_the_end | {"resume": str(part)}
    with torchrun(*ask(baseline, flags, out=str(tmp_path))) as process:
        status, err = finish(process)
    assert status == 0, err
    expected, found = map(read_checkpoint, ("alone", part))
    assert found["global_step"] == ROLLOUT * 4
    assert_close(expected, found, 1e-10)
    torch.testing.assert_close(expected["optimizers"], found["optimizers"], atol=1e-10, rtol=0)
    assert found["optimizers"][0][0]["step"].item() == 2 * UPDATES + 2 * UPDATES // 2
    assert_close(*(torch.load(f"rank{rank}.pt", weights_only=True) for rank in range(2)), 0)
    assert (part / "config.json").exists() and (part / "config_256.json").exists()


# Bad input


@pytest.mark.parametrize(
    ("world_size", "flags"), [(3, {}), (4, {"num_steps": 3})], ids=["envs", "minibatches"]
)
def test_processes_without_equal_shares_are_refused(world_size, flags, monkeypatch):
    monkeypatch.setattr(variant, "WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=f"^--num-envs.* {world_size} processes"):
        train(variant, **flags)
    assert not Path("runs").exists() and not dist.is_initialized()
