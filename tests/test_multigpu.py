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
from multigpu_worker import use_float64
from test_resume import assert_same, read_checkpoint, scalars
from test_sac import read_scalars
from test_sac_parity import assert_hunks_are_marked

from leanrl import ppo_atari_envpool as single
from leanrl import ppo_atari_envpool_multigpu as baseline
from leanrl import ppo_atari_envpool_multigpu_torchcompile as variant
from leanrl import ppo_atari_envpool_torchcompile as single_variant

pytest.importorskip("envpool", reason="needs requirements/envpool.txt")

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
SMALL = {"env_id": "Breakout-v5", "num_envs": 4, "num_steps": 32, "num_minibatches": 4}
SMALL |= {"update_epochs": 2, "cuda": False, "save_model": True}
FEW = [f"--{name.replace('_', '-')}={SMALL[name]}" for name in list(SMALL)[:5]] + ["--no-cuda"]
ROLLOUT, ROLLOUTS = 128, 7
UPDATES = ROLLOUTS * 8
WHOLE = SMALL | {"total_timesteps": ROLLOUT * ROLLOUTS, "eval_every": 512, "eval_episodes": 1}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    """Each test has a directory, and one thread: small batches are not worth more."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not dist.is_initialized()


def train(module, **flags) -> Path:
    """A run in this process and in float64, as those of the worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Rollout", module.Rollout)
        use_float64(module)
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


@contextmanager
def torchrun(*command, folder=".", **options):
    """torchrun with two processes, as a Popen whose pipes are text; ends all that it started."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = ["--standalone", "--nproc-per-node=2", *options, *command]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, command)],
        cwd=folder,
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
    name = module.SCRIPT.removesuffix(".py")
    wishes = {"module": name, "flags": flags} | wishes
    return ROOT / "tests" / "multigpu_worker.py", json.dumps(wishes)


def finish(process, timeout=120) -> tuple[int, str, str]:
    """Status, standard output and standard error of torchrun."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


# Two processes and one


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run directory of one process, by the script for one."""
    with pytest.MonkeyPatch.context() as patch, union_of_shares(2):
        patch.chdir(tmp_path_factory.mktemp("alone"))
        return train(single, **WHOLE).resolve()


ROWS = {
    "baseline": (baseline, {}),
    "eager": (variant, {}),
    "compiled": (variant, {"compile": True, "overlap": True, "channels_last": True}),
}


@pytest.fixture(scope="module", params=ROWS)
def together(request, tmp_path_factory):
    """The folder in which two processes have trained."""
    (module, flags), folder = ROWS[request.param], tmp_path_factory.mktemp("together")
    with torchrun(*ask(module, WHOLE | flags, out=str(folder)), folder=folder) as process:
        status, out, err = finish(process, 400)
    assert status == 0, err
    (folder / "stdout").write_text(out)
    (folder / "compiled").write_text("yes" if "compile" in flags else "")
    return folder


def read_rank(folder, rank):
    return torch.load(folder / f"rank{rank}.pt", weights_only=True)


def test_two_processes_compute_what_one_does(alone, together):
    """After 56 updates, in the parameters and in all that is logged; rounding makes 1e-14."""
    (run_dir,) = together.glob("runs/*")
    expected, found = read_checkpoint(alone), read_checkpoint(run_dir)
    assert_same(expected["agent"]["model"], found["agent"]["model"], tolerance=1e-10)
    assert_same(expected["rng"]["torch"], found["rng"]["torch"])
    expected, found = scalars(alone), scalars(run_dir)
    assert expected.keys() == found.keys()
    for tag, rows in expected.items():
        steps = [step for step, _ in rows]
        if "episodic" in tag and (together / "compiled").read_text():
            rows, steps = sorted(rows, key=lambda row: row[1]), None  # groups end half a step apart
            found[tag].sort(key=lambda row: row[1])
        assert steps is None or steps == [step for step, _ in found[tag]], tag
        values = [value for _, value in found[tag]]
        assert values == pytest.approx([value for _, value in rows], abs=1e-5, rel=1e-4), tag


def test_all_processes_have_the_same_weights(together):
    ranks = [read_rank(together, rank) for rank in range(2)]
    assert len(ranks[0]["counts"]) == len(ranks[1]["counts"]) == UPDATES >= 50
    assert_same(ranks[0]["model"], ranks[1]["model"])  # bit for bit


def test_processes_that_do_not_average_are_noticed(tmp_path):
    flags = SMALL | {"total_timesteps": ROLLOUT}
    with torchrun(*ask(baseline, flags, out=str(tmp_path), apart=True)) as process:
        assert finish(process)[0] == 0
    models = [read_rank(tmp_path, rank)["model"] for rank in range(2)]
    with pytest.raises(AssertionError):
        assert_same(*models, tolerance=1e-6)


def test_one_process_writes(together):
    """One run directory, one event file, one table, of the episodes and steps of all."""
    (run_dir,) = together.glob("runs/*")
    assert len(list(run_dir.glob("events*"))) == 1
    names = {path.name for path in run_dir.iterdir() if not path.name.startswith("events")}
    assert names == {"config.json", "stages.json", "checkpoint.pt"}
    out = (together / "stdout").read_text()
    assert out.count("run directory: runs/") == out.count("stopwatch: ") == 1
    config = json.loads((run_dir / "config.json").read_text())
    assert config["processes"] == 2 and config["torchrun"]
    stages = json.loads((run_dir / "stages.json").read_text())
    assert stages["window"]["env_steps"] == ROLLOUT * (ROLLOUTS - 3)
    for rank in range(2):
        assert read_rank(together, rank)["run_dir"] == str(run_dir.relative_to(together))


def test_games_of_all_processes_are_logged(together):
    """So that the comparison above is one of games of both halves."""
    (run_dir,) = together.glob("runs/*")
    games = [read_rank(together, rank)["games"] for rank in range(2)]
    assert min(games) > 0 and len(read_scalars(run_dir)["charts/episodic_length"]) == sum(games)


def test_no_graph_break_and_no_recompilation(together):
    """Acting, advantages, gradient, step: four graphs, all made in the first rollout."""
    if not (together / "compiled").read_text():
        pytest.skip("not compiled")
    for rank in range(2):
        counts = read_rank(together, rank)["counts"]
        assert set(counts[1:]) == {(4, 0)}, counts


# One process


@pytest.mark.parametrize(
    ("module", "reference", "flags"),
    [
        (baseline, single, {}),
        (baseline, single, {"target_kl": 1e-9}),
        (baseline, single, {"norm_adv": False, "clip_vloss": False}),
        (variant, single_variant, {}),
        (variant, single_variant, {"overlap": True, "channels_last": True}),
    ],
    ids=["baseline", "target_kl", "no-norm_adv", "variant", "overlap"],
)
def test_one_process_is_the_script_for_one(module, reference, flags):
    flags = {"total_timesteps": ROLLOUT * 2} | flags
    expected, found = train(reference, **flags), train(module, **flags)
    one, other = read_checkpoint(expected), read_checkpoint(found)
    assert one.pop("script") != other.pop("script")
    assert_same(one, other, tolerance=1e-6)
    expected, found = scalars(expected), scalars(found)
    assert expected.keys() == found.keys()
    for tag, rows in expected.items():
        np.testing.assert_allclose(found[tag], rows, atol=1e-5, rtol=1e-4, err_msg=tag)


def test_advantages_are_normalized_by_what_all_have(monkeypatch):
    """Against NumPy on the union of two processes' samples; the other one's sums are added here."""
    rng = np.random.default_rng(0)
    mine, others = rng.normal(3, 2, (2, 3, 5))
    more, alike = torch.randn(1, 9), torch.full((1, 4), 0.1)

    def summed(sums):
        x = torch.from_numpy(others)
        sums[:, :3] += torch.stack([torch.full((3,), 5.0), x.sum(1), x.square().sum(1)])

    for module in (baseline, variant):
        monkeypatch.setattr(module.dist, "all_reduce", summed)
        found = module.moments(torch.from_numpy(mine), more, alike)
        every = np.concatenate([mine, others], axis=1)
        assert found[:3, 0].tolist() == pytest.approx(every.mean(1))
        assert found[:3, 1].tolist() == pytest.approx(every.std(1, ddof=1))
        assert found[3].tolist() == pytest.approx([more.mean().item(), more.std().item()])
        assert found[4].tolist() == pytest.approx([0.1, 0.0], abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, {"overlap": True}, {"bf16": True, "channels_last": True}])
def test_graphed_runs_agree_with_eager(flags):
    """One process and NCCL: rollouts before, at and after the capture of every graph."""
    flags = flags | {"total_timesteps": ROLLOUT * 5, "cuda": True}
    eager = variant.main(variant.Args(**SMALL | flags, exp_name="eager"))
    eager = read_checkpoint(eager)
    for compiled in (False, True):
        torch._dynamo.reset()
        args = variant.Args(**SMALL | flags, cudagraphs=True, compile=compiled)
        graphed = variant.main(args)
        tolerance = 0.05 if "bf16" in flags else 1e-2
        found = read_checkpoint(graphed)["agent"]["model"]
        assert_same(eager["agent"]["model"], found, tolerance=tolerance)


def test_differing_hunks_are_marked():
    assert_hunks_are_marked(baseline, variant)


def test_what_one_process_needs_is_the_same_to_the_letter():
    """Neither pair has a function of the other that differs without need."""
    for one, other in ((single, baseline), (single_variant, variant)):
        for name in ("AtariEnvs", "Rollout", "ActorCritic", "Batch", "sample", "evaluate", "film"):
            assert inspect.getsource(getattr(one, name)) == inspect.getsource(getattr(other, name))
        for name in ("act", "value", "prepare", "state_dict", "load_state_dict"):
            sources = [inspect.getsource(getattr(module.PPO, name)) for module in (one, other)]
            assert sources[0] == sources[1]


# Processes that die


@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_when_a_process_is_killed(killed, tmp_path):
    """Before torchrun, which here looks only now and then, tells them to."""
    endless = SMALL | {"total_timesteps": 10**6, "checkpoint_every": ROLLOUT}
    command = ask(baseline, endless, kill=[killed, 11])  # in the second rollout
    with torchrun(*command, monitor_interval=5) as process:
        status, _, err = finish(process)
    assert status != 0
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    words = f"error: rank {1 - killed} of 2 stops: another process is gone ("
    assert line.startswith(words), line
    assert 'multigpu_worker.py", line' not in err  # torchrun's own traceback is all
    (run_dir,) = Path("runs").iterdir()
    assert read_checkpoint(run_dir)["global_step"] == ROLLOUT
    assert (run_dir / "stages.json").exists() == (killed == 1)


def test_an_interrupt_ends_all_cleanly():
    endless = (*FEW, "--total-timesteps=1000000", f"--checkpoint-every={ROLLOUT}")
    with torchrun(variant.__file__, *endless) as process:
        wait_for(lambda: list(Path("runs").glob("*/checkpoint.pt")), process)
        begin = time.monotonic()
        process.terminate()
        status, out, err = finish(process)
    assert status != 0 and time.monotonic() - begin < 20
    lines = [line for line in err.splitlines() if line.startswith(("rank ", "error: "))]
    said = ("0 of 2: interrupted after", "1 of 2: interrupted after", "another process is gone (")
    assert len(lines) == 2 and all(any(words in line for words in said) for line in lines), lines
    assert "leanrl/ppo" not in "".join(line for line in err.splitlines() if "File " in line), err
    assert out.count("run directory: runs/") == 1
    (run_dir,) = Path("runs").iterdir()
    assert (run_dir / "stages.json").exists() and read_checkpoint(run_dir)


def test_torchrun_restarts_a_run_that_lost_a_process():
    total = ROLLOUT * 3
    flags = SMALL | {"total_timesteps": total, "checkpoint_every": ROLLOUT}
    command = ask(baseline, flags, kill=[1, 11])  # in the second rollout
    with torchrun(*command, max_restarts=1) as process:
        status, out, err = finish(process)
    assert status == 0, err
    (run_dir,) = Path("runs").iterdir()
    assert f"restarted by torchrun: the run goes on with runs/{run_dir.name}" in err
    assert err.count("resumed at step 128") == 1 + 1  # both processes: the worker is not quiet
    assert read_checkpoint(run_dir)["global_step"] == total
    steps = {step for step, _ in read_scalars(run_dir)["charts/learning_rate"]}
    assert steps == set(range(ROLLOUT, total + 1, ROLLOUT))
    assert json.loads((run_dir / "config_128.json").read_text())["processes"] == 2


@SCRIPTS
@pytest.mark.parametrize("run_id", ["none", "job 1"])
def test_a_restart_goes_on_with_the_run_of_its_launch(module, run_id, monkeypatch, capsys):
    """The last one, if it has a checkpoint; not with another launch's, not without a restart."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    mark = module.launch()
    assert mark == (f"process {os.getppid()}" if run_id == "none" else run_id)

    def leave(name, launch, saved):
        run_dir = Path("runs", str(name))
        run_dir.mkdir(parents=True)
        (run_dir / "config.json").write_text(json.dumps({"torchrun": launch}, indent=2))
        os.utime(run_dir / "config.json", (name, name))
        if saved:
            (run_dir / "checkpoint.pt").touch()

    assert module.restarted_run() is None
    leave(1, mark, True)
    leave(3, "job 2", True)
    leave(4, None, True)
    leave(2, mark, True)
    assert module.restarted_run() == "runs/2"
    leave(5, mark, False)  # of a later launch with the name of the first, say
    assert module.restarted_run() is None
    lines = capsys.readouterr().err.splitlines()
    assert ["goes on with runs/2" in line for line in lines] == [False, True, False]
    assert ["starts anew" in line for line in lines] == [True, False, True]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert module.restarted_run() is None and not capsys.readouterr().err


def test_two_processes_resume_what_one_has_begun(tmp_path):
    """And compute what one would have gone on to compute."""
    to_the_end = {"total_timesteps": ROLLOUT * 4, "target_kl": 1e-9}  # which ends each epoch
    with union_of_shares(2):
        part = train(baseline, total_timesteps=ROLLOUT * 2)
        shutil.copytree(part, "alone")
        train(baseline, **to_the_end, resume="alone")
    flags = SMALL | to_the_end | {"resume": str(part)}
    with torchrun(*ask(baseline, flags, out=str(tmp_path))) as process:
        status, _, err = finish(process)
    assert status == 0, err
    expected, found = read_checkpoint(Path("alone")), read_checkpoint(part)
    assert found["global_step"] == ROLLOUT * 4
    assert_same(expected, found, tolerance=1e-10)
    assert found["agent"]["optimizer"][0]["step"].item() == 2 * 8 + 2 * 4
    assert_same(read_rank(tmp_path, 0)["model"], read_rank(tmp_path, 1)["model"])
    assert json.loads((part / "config.json").read_text())["processes"] == 1
    assert json.loads((part / "config_256.json").read_text())["processes"] == 2


# Bad input


@pytest.mark.parametrize(
    ("world", "flags", "words"),
    [
        ((0, 3), {}, "--num-envs 4 cannot be shared equally by 3 processes"),
        ((0, 2), {"num_steps": 3}, "--num-envs 4 x --num-steps 3 = 12 steps cannot be divided"),
        ((0, 4), {"cuda": True}, "--nproc-per-node 4 needs 4 GPUs, this machine has 2; --no-cuda"),
        ((0, 4), {"overlap": True}, "--overlap needs an even number of environments in each of 4"),
        ((0, 1), {"cudagraphs": True}, "--cudagraphs contradicts --no-cuda"),
    ],
)
def test_bad_input_is_one_line_and_status_2(world, flags, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for variables in names:
        for name, number in zip(variables, world, strict=True):
            monkeypatch.setenv(name, str(number))
    modules = [variant] if {"overlap", "cudagraphs"} & flags.keys() else [baseline, variant]
    for module in modules:
        with pytest.raises(SystemExit) as stopped:
            train(module, **flags)
        (line,) = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2 and line.startswith(f"error: {words}")
    assert not Path("runs").exists()


@pytest.mark.parametrize("flags", [("--num-envs=3",), ("--env-id=Breakot-v5",)], ids=str)
def test_one_process_speaks_for_all(flags):
    """One before the processes have met, one after."""
    with torchrun(baseline.__file__, *FEW, *flags, "--total-timesteps=1000") as process:
        status, out, err = finish(process)
    assert status != 0 and not out
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert flags[0].split("=")[1] in line
    assert "exitcode  : 2 " in err and "leanrl/ppo" not in err.split("Traceback")[0]
    assert not Path("runs").exists()


@SCRIPTS
def test_the_hint_counts_the_environments_of_this_machine(module, capsys):
    cores = os.cpu_count()
    args = module.Args(num_envs=32 * cores, cuda=False)
    module.check_args(args, module.World(rank=0, size=4, local_rank=0, local_size=2))
    assert not capsys.readouterr().err
    module.check_args(args, module.World(rank=0, size=2, local_rank=0, local_size=2))
    assert capsys.readouterr().err.startswith(f"hint: {32 * cores} environments share")
