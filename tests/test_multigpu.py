"""PPO for Atari in several processes: they compute what one does, and what happens if one dies.

What `main` does, resuming and a single update are tested in test_on_policy, for all scripts.
"""

import inspect
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from fake_games import FakeGames
from helpers import PATIENCE, read_checkpoint, read_scalars, wait_until

envpool = pytest.importorskip("envpool", reason="needs requirements/envpool.txt")

from leanrl import ppo_atari_envpool as single  # noqa: E402
from leanrl import ppo_atari_envpool_multigpu as baseline  # noqa: E402
from leanrl import ppo_atari_envpool_multigpu_torchcompile as variant  # noqa: E402
from leanrl import ppo_atari_envpool_torchcompile as single_variant  # noqa: E402

SMALL = {"env_id": "Breakout-v5", "num_envs": 4, "num_steps": 32, "num_minibatches": 4}
SMALL |= {"update_epochs": 2, "cuda": False, "save_model": True}
ROLLOUT, UPDATES = 128, 8  # steps and updates of a rollout
SLOW = pytest.mark.slow


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


TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"


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


def ask(module, *totals: int, flags: dict = SMALL, **wishes) -> tuple:
    """The command of two processes that run the script, of the lengths `totals` in turns."""
    wishes = {"module": Path(module.__file__).stem, "flags": flags, "totals": totals} | wishes
    return ROOT / "tests" / "multigpu_worker.py", json.dumps(wishes)


def finish(process) -> tuple[int, str]:
    """Its status and standard error."""
    _, err = process.communicate(timeout=PATIENCE)
    return process.returncode, err


def run_two(*command) -> tuple[int, str]:
    with started(*command) as process:
        return finish(process)


def read_ranks(folder=".") -> list[dict]:
    """What the two end with."""
    return [torch.load(Path(folder, f"rank{rank}.pt"), weights_only=True) for rank in range(2)]


def assert_close(expected: dict, found: dict, tolerance: float, *keys: str) -> None:
    """Parts of checkpoints, or of what ranks end with."""
    for key in keys or ("agent",):
        torch.testing.assert_close(expected[key], found[key], atol=tolerance, rtol=0)


def assert_same_rows(expected: Path, found: Path) -> None:
    """All that is logged but speed; games that end in the same step may be in another order."""
    expected, found = read_scalars(expected), read_scalars(found)
    assert expected.keys() == found.keys()
    for tag in expected.keys() - {"charts/SPS", "charts/cpu_seconds", "charts/gpu_percent"}:
        rows = sorted(expected[tag]), sorted(found[tag])
        np.testing.assert_allclose(*rows, atol=1e-5, rtol=1e-4, err_msg=tag)


# Two processes and one

ENDINGS = {"num_steps": 16, "eval_every": 128, "eval_episodes": 3}
GAMES = {"eval_every": 512, "eval_episodes": 1}
ONE_EPOCH = {"target_kl": 1e-9}
CASES = {  # script, flags, speed, lengths; 1e-14 is what rounding makes in 56 updates
    "endings": (baseline, ENDINGS, {}, [128, 256]),  # as after torchrun's restart
    "baseline": (baseline, GAMES, {}, [7 * ROLLOUT]),
    "eager": (variant, GAMES | ONE_EPOCH, {"channels_last": True}, [7 * ROLLOUT]),
    "compiled": (variant, GAMES, {"compile": True}, [7 * ROLLOUT]),
}


def each(*names):
    """A test of these; only the first one is fast, whose games end in every way."""
    cases = [pytest.param(name, marks=SLOW if name != "endings" else ()) for name in names]
    return pytest.mark.parametrize("both", cases, indirect=True)


@pytest.fixture(scope="module")
def both(request, tmp_path_factory):
    """Runs of two processes and of one.

    The second of the two starts with other flags, another stream and other weights.
    """
    module, flags, speed, totals = CASES[request.param]
    fake, folder, alone = flags is ENDINGS, tmp_path_factory.mktemp("both"), None
    together = SMALL | flags | speed | {"exp_name": "together"}
    command = ask(module, *totals, flags=together, out=str(folder), fake=fake)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if fake:
            patch.setattr(envpool, "make_gymnasium", FakeGames)
        with started(*command) as process, union_of_shares(2):
            for total in totals:
                resume = alone and str(alone)
                alone = train(single, **flags, total_timesteps=total, resume=resume)
            status, err = finish(process)
    assert status == 0, err
    (run_dir,) = (folder / "runs").glob("*together*")
    ranks = read_ranks(folder)
    return SimpleNamespace(alone=folder / alone, dir=run_dir, ranks=ranks, err=err)


@each(*CASES)
def test_two_processes_learn_what_one_does(both):
    assert_close(read_checkpoint(both.alone), read_checkpoint(both.dir), 1e-10)


@each("endings", "baseline")
def test_two_processes_keep_what_one_does(both):
    expected, found = read_checkpoint(both.alone), read_checkpoint(both.dir)
    assert_close(expected, found, 1e-10, "optimizers", "generators")


@each(*CASES)
def test_two_processes_log_what_one_does(both):
    assert_same_rows(both.alone, both.dir)


@each(*CASES)
def test_processes_are_equal_bit_for_bit(both):
    assert_close(*both.ranks, 0, "agent", "optimizers", "firsts")


@each(*CASES)
def test_both_play_games_that_are_logged(both):
    games = [rank["games"] for rank in both.ranks]
    assert min(games) > 0
    assert sum(games) == len(read_scalars(both.dir)["charts/episodic_length"])


@each("endings")
def test_one_process_writes(both):
    assert len(list(both.dir.parent.iterdir())) == 2 and both.err.count(" steps/s, runs/") == 2
    names = {path.name for path in both.dir.iterdir() if not path.name.startswith("events")}
    records = {"config.json", "stages.json", "config_128.json", "stages_128.json"}
    assert names == records | {"checkpoint.pt"}
    assert len(list(both.dir.glob("events*"))) == 2
    assert [rank["run_dir"] for rank in both.ranks] == [f"runs/{both.dir.name}", "None"]


@each("endings")
def test_one_process_evaluates(both):
    evaluations = [[seed for seed in rank["seeds"] if seed > 2**29] for rank in both.ranks]
    assert [len(seeds) for seeds in evaluations] == [2, 0]
    assert len(read_scalars(both.dir)["charts/eval_return"]) == 2


@each("compiled")
def test_all_is_compiled_in_the_first_rollout(both):
    """Acting, gradient and step, without a break."""
    for rank in both.ranks:
        assert len(rank["counts"]) == UPDATES * 7 and set(rank["counts"][1:]) == {(3, 0)}


# One process


@pytest.mark.parametrize("names", ["baseline", "variant"])
@pytest.mark.usefixtures("backend")
def test_one_process_is_the_script_for_one(names, monkeypatch):
    """Also when it goes on after the first rollout, with new games and an agent of its own."""
    monkeypatch.setattr(envpool, "make_gymnasium", FakeGames)
    reference, module, speed, flags = {
        "baseline": (single, baseline, {}, {"target_kl": 1e-9, "norm_adv": False}),
        "variant": (single_variant, variant, {"compile": True}, {"channels_last": True}),
    }[names]
    flags |= {"num_steps": 8, "clip_vloss": not speed}
    runs = []
    for script, more in ((reference, {}), (module, speed)):
        run_dir = train(script, **flags, total_timesteps=32, exp_name=script.__name__)
        runs.append(train(script, **flags, **more, total_timesteps=64, resume=str(run_dir)))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 3 * len(speed)  # acting, gradient, step
    assert not counters["graph_break"]
    assert_close(*map(read_checkpoint, runs), 1e-6, "agent", "optimizers", "generators")
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


def test_what_one_process_needs_is_the_same_to_the_letter():
    for one, other in ((single, baseline), (single_variant, variant)):
        for name in ("act", "value", "prepare"):
            sources = [inspect.getsource(getattr(module.PPO, name)) for module in (one, other)]
            assert sources[0] == sources[1]


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, {"bf16": True, "channels_last": True}], ids=str)
def test_graphed_runs_agree_with_eager(flags):
    """One process and NCCL: rollouts before, at and after the capture of every graph."""
    flags = SMALL | flags | {"total_timesteps": ROLLOUT * 5, "cuda": True}
    agents = []
    for more in (
        {"learning_rate": 0.0},
        {},
        {"cudagraphs": True},
        {"cudagraphs": True, "compile": True},
    ):
        run_dir = variant.main(variant.Args(**flags | more, exp_name=f"{len(agents)}"))
        agents.append(read_checkpoint(run_dir)["agent"])
    start, *others = agents
    eager, *graphed = (torch.cat([(x[name] - start[name]).flatten() for name in x]) for x in others)
    for moves in graphed:
        assert torch.cosine_similarity(eager, moves, dim=0) > 0.9
        assert 0.8 < (moves.norm() / eager.norm()).item() < 1.25


# Processes that die


ENDLESS = 10**6
SHORT = SMALL | {"num_steps": 16, "eval_every": 10**6}  # 64 steps a rollout


@pytest.mark.parametrize(
    ("struck", "method", "call"),
    [(1, "update", UPDATES + 3), (0, "all_gather_object", 1)],
    ids=["while learning", "after they have agreed to go on"],
)
def test_sigterm_to_one_process_ends_all_after_the_same_iteration(struck, method, call):
    """The second one: with a checkpoint, records, equal weights, but without an evaluation."""
    strike = [struck, method, call, signal.SIGTERM]
    status, err = run_two(*ask(baseline, ENDLESS, flags=SHORT, fake=True, out=".", strike=strike))
    assert status == 1, err  # of rank 0 alone, which says why
    assert err.splitlines()[-1] == "interrupted after 128 steps", err
    assert "Traceback" not in err
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] == 128
    assert [step for step, _ in read_scalars(run_dir)["losses/entropy"]] == [64, 128]
    assert json.loads((run_dir / "stages.json").read_text())["iterations"] == 2
    ranks = read_ranks()
    assert [len(rank["counts"]) for rank in ranks] == [UPDATES * 2] * 2
    assert [len(rank["seeds"]) for rank in ranks] == [1, 1], "an evaluation"
    assert_close(*ranks, 0)


@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_when_a_process_is_killed(killed):
    """By an error of their own: nobody else ends them here."""
    strike = [killed, "update", UPDATES + 3, signal.SIGKILL]
    flags = SHORT | {"checkpoint_every": 64}
    status, err = run_two(*ask(baseline, ENDLESS, flags=flags, fake=True, strike=strike))
    assert status == 2
    assert err.count("Traceback") == 1 and "gloo/transport" in err, err
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] == 64
    assert (run_dir / "stages.json").exists() == (killed == 1)


@SLOW
def test_sigterm_to_torchrun_ends_all_with_their_records():
    flags = SMALL | {"checkpoint_every": ROLLOUT}
    with started(*TORCHRUN, *ask(baseline, ENDLESS, flags=flags)) as process:
        wait_until(lambda: list(Path("runs").glob("*/checkpoint.pt")))
        process.terminate()
        status, err = finish(process)
    assert status != 0
    (run_dir,) = Path("runs").iterdir()
    steps = read_checkpoint(run_dir)["global_step"]
    assert f"interrupted after {steps:,} steps" in err, err
    assert "leanrl/ppo" not in "".join(line for line in err.splitlines() if "File " in line), err
    assert read_scalars(run_dir)["charts/SPS"][-1][0] == steps
    assert json.loads((run_dir / "stages.json").read_text())["iterations"] > 0


@SLOW
@pytest.mark.parametrize(("struck", "every"), [(1, ROLLOUT), (0, 0)], ids=["resumed", "begun"])
def test_torchrun_restarts_a_run_that_lost_a_process(struck, every):
    """From its checkpoint or, without one, from the beginning: not from one of another launch."""
    other = train(baseline, total_timesteps=ROLLOUT)
    before = (other / "checkpoint.pt").read_bytes()
    flags = SMALL | {"checkpoint_every": every}
    strike = [struck, "update", UPDATES + 3, signal.SIGKILL]
    command = ask(baseline, ROLLOUT * 3, flags=flags, strike=strike)
    status, err = run_two(*TORCHRUN, "--max-restarts=1", *command)
    assert status == 0, err
    assert (other / "checkpoint.pt").read_bytes() == before
    (run_dir,) = {path.parent for path in Path("runs").glob("*/checkpoint.pt")} - {other}
    assert read_checkpoint(run_dir)["global_step"] == ROLLOUT * 3
    steps = {step for step, _ in read_scalars(run_dir)["charts/learning_rate"]}
    assert steps == {ROLLOUT, ROLLOUT * 2, ROLLOUT * 3}
    assert [path.parent for path in Path("runs").glob("*/config_*.json")] == [run_dir] * bool(every)


# Bad input


@pytest.mark.parametrize(
    ("world_size", "flags"), [(3, {}), (4, {"num_steps": 3})], ids=["envs", "minibatches"]
)
def test_processes_without_equal_shares_are_refused(world_size, flags, monkeypatch):
    monkeypatch.setattr(variant, "WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=f"^--num-envs.* {world_size} processes"):
        train(variant, **flags)
    assert not Path("runs").exists() and not dist.is_initialized()
