"""Sweeps: expansion, identity, the launcher on this machine, its commands."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from conftest import ROOT

from leanrl import sweep

PATIENCE = 300  # seconds that only a test which fails takes, however busy the machine

# Expansion


def test_every_combination():
    assert sweep.expand({"a": [1, 2], "b": [True]}) == [{"a": 1, "b": True}, {"a": 2, "b": True}]


def test_functions_of_other_parameters_in_any_order():
    wanted = {(1000, 10, 10_010), (1000, 20, 20_020), (2500, 4, 10_004), (2500, 8, 20_008)}
    params = {
        "batch_size": [1000, 2500],
        "n_iters": lambda batch_size: [10_000 // batch_size, 20_000 // batch_size],
        "check": lambda n_iters, batch_size: [n_iters * batch_size + n_iters],
    }
    for order in itertools.permutations(params):
        found = sweep.expand({name: params[name] for name in order})
        assert all(tuple(variant) == order for variant in found)  # names as they were written
        assert {tuple(v[name] for name in ("batch_size", "n_iters", "check")) for v in found} == (
            wanted
        )


def test_what_makes_no_sense_is_refused_in_one_line():
    for params, why in [
        ({}, "at least one parameter"),
        ([("a", 1)], "must be a dict"),
        ({"a": lambda b: [b], "b": lambda a: [a]}, "circle"),
        ({"a": lambda a: [a]}, "circle: a needs a"),
        ({"a": lambda b: [b], "b": lambda c: [c], "c": lambda a: [a]}, "a needs b needs c"),
        ({"a": lambda c: [c]}, "a needs 'c', which is no parameter"),
        ({"a": lambda *c: [c]}, "a needs 'c'"),
        ({"a": 3}, "a is 3, not a list"),
        ({"a": "text"}, "not a list"),
        ({"a": (1, 2)}, "not a list"),
        ({"a": [1], "b": lambda a: a}, "b is 1, not a list"),
        ({"a": []}, "with at least one value"),
        ({"a": [1e-3, *np.logspace(-3, -2, 2)]}, "a has 0.001 twice"),
        ({"a": [1, np.int64(1)]}, "a has 1 twice"),
        ({"a": [0], "b": lambda a: [1 // a]}, "b: its function fails: ZeroDivisionError"),
        ({"a": [0], "b": lambda a: sys.exit(a)}, "b: its function fails: SystemExit"),
        ({"a": [[1]]}, "only numbers, text"),
        ({"a": [float("nan")]}, "finite"),
        ({"a": [float("-inf")]}, "finite"),
        ({"a": [1, 1]}, "1 twice"),
        ({"a": ["a\0b"]}, "zero byte"),
        ({"a": ["x" * 300_000]}, "a has a value of 300000 bytes"),  # no process would start
        ({"a": ["\ud800"]}, "a has a value that is no text"),
        ({"a": [10**5000]}, "a has a value that is no text"),
        ({"a b": [1]}, "no name"),
        ({3: [1]}, "no name"),
    ]:
        with pytest.raises(sweep.SweepError, match=why) as error:
            sweep.expand(params)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200
    assert len(sweep.expand({"a": ["nan", "inf", "infinity"]})) == 3  # they are words


def test_variants_are_counted_before_they_are_made():
    """10**10 and more, which would take all memory, and a list that is long by itself."""
    many, ten = list(range(100_000)), list(range(10))
    calls = []

    def of(a):
        calls.append(a)
        return ten

    for params, scripts, number in [
        ({"a": many, "b": many}, 1, "10000000000 variants"),
        ({f"p{i}": ten for i in range(30)}, 2, f"{2 * 10**30} variants"),
        ({"a": ten, "b": of, "c": many}, 1, "more than 20 variants"),
        ({"a": ten, "b": of}, 3, "more than 20 variants"),
        ({"a": ten}, 3, "30 variants"),
    ]:
        with pytest.raises(sweep.SweepError, match=f"^{number}, 20 at most") as error:
            sweep.expand(params, scripts, 20)
        assert "--max-variants" in str(error.value)
    assert len(calls) < 20
    assert len(sweep.expand({"a": [1, 2], "b": of}, 1, 20)) == 20


def test_true_and_one_are_two_values():
    assert len(sweep.expand({"a": [1, True, 1.0]})) == 3


def test_the_examples_expand(capsys):
    for name, count in [("gae_lambda", 9), ("batch_size", 12), ("baselines", 12), ("seeds", 10)]:
        path = ROOT / f"leanrl/sweeps/{name}.py"
        assert sweep.main(["run", str(path), "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{count} variants" and len(lines) == count + 1


def test_the_flags_of_the_examples_exist():
    import importlib

    import tyro

    for path in (ROOT / "leanrl/sweeps").glob("*.py"):
        for variant in sweep.load(path, 20):
            module = importlib.import_module(variant.script[:-3].replace("/", "."))
            args = tyro.cli(module.Args, args=variant.flags)
            for name, value in variant.params.items():
                assert getattr(args, name) == value, (path, name)


# Identity


def variant(**params):
    return sweep.Variant("group", "leanrl/x.py", params)


def test_a_variant_is_known_by_script_and_parameters():
    one = variant(a=1, b=0.5)
    assert one.id == variant(b=0.5, a=1).id
    others = [variant(a=1), variant(a=1, b="0.5"), variant(a=True, b=0.5), variant(a=2, b=0.5)]
    others.append(sweep.Variant("group", "leanrl/y.py", {"a": 1, "b": 0.5}))
    assert len({one.id, *(other.id for other in others)}) == 6
    assert re.fullmatch("[0-9a-f]{10}", one.id)


HOSTILE = [
    "a b",
    "'",
    '"',
    "line\nbreak",
    "--seed",
    "-1",
    ";true",
    "$(true)",
    "`x`",
    "*",
    "",
    "é",
    "=",
]


def test_flags_carry_any_value_as_one_word():
    flags = variant(exp_name="a b", lr=1e-05, on=True, off=False, nothing=None).flags
    assert flags == ["--exp-name=a b", "--lr=1e-05", "--on", "--no-off", "--nothing=None"]


# The launcher, with scripts that only say what they were given

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
flags = dict(w[2:].split("=", 1) if "=" in w else (w[2:], True) for w in sys.argv[1:])
signal.signal(signal.SIGTERM, signal.default_int_handler)
print("started", flush=True)
if "dies" in flags:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(float(flags.get("sleep", 0)))
while "until" in flags and not Path(flags["until"]).exists():
    time.sleep(0.02)
if "fails" in flags and not Path(flags["fails"]).exists():
    raise SystemExit("what went wrong")
names = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RAY_AUTH_TOKEN", "PYTHONPATH"
keep = {k: v for k, v in os.environ.items() if k in names}
Path("runs/the_run").mkdir(parents=True)
Path("runs/the_run/found.json").write_text(json.dumps({"flags": flags, "environment": keep}))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository with sweep.py and a script that writes what it was given; the current folder."""
    root = tmp_path / "a place"
    (root / "leanrl").mkdir(parents=True)
    shutil.copy(ROOT / "leanrl/sweep.py", root / "leanrl")
    (root / "leanrl/x.py").write_text(STAND_IN)
    monkeypatch.chdir(root)
    return root


def write_sweep(root, params, name="study"):
    path = root / f"{name}.py"
    path.write_text(f"script = 'leanrl/x.py'\nparams = {params}\n")
    return path


def call(*words, stdin="", check=None):
    done = subprocess.run(
        [sys.executable, "leanrl/sweep.py", *map(str, words)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "Traceback" not in done.stderr, done.stderr
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


def found_in(root, group="study"):
    """{id: what the stand-in wrote}"""
    return {
        path.parts[-4]: json.loads(path.read_text())
        for path in (root / "runs" / group).glob("*/runs/the_run/found.json")
    }


def states(root, group="study"):
    files = (root / "runs" / group).glob("*/status.json")
    return sorted(json.loads(path.read_text())["state"] for path in files)


def test_hostile_values_arrive_as_they_are(place):
    path = write_sweep(place, {"exp_name": HOSTILE})
    call("run", path, "--workers", 4, check=0)
    assert sorted(each["flags"]["exp-name"] for each in found_in(place).values()) == sorted(HOSTILE)
    dry = call("run", path, "--dry-run", check=0).stdout
    words = shlex.split(dry.partition("\n")[2])  # as a shell would
    assert words == [w for v in HOSTILE for w in ("python", "leanrl/x.py", f"--exp-name={v}")]


def test_a_failure_stops_no_other_and_is_named(place):
    path = write_sweep(place, {"n": [1, 2, 3], "fails": [str(place / "mended"), "/"]})
    done = call("run", path, "--workers", 2, check=1)
    assert states(place) == ["failed"] * 3 + ["finished"] * 3
    assert "3 failed" in done.stdout and "what went wrong" in done.stdout
    assert "--n=2 '--fails=" in done.stdout and "--retry-failed" in done.stdout
    first = found_in(place)

    done = call("run", path, check=1)  # nothing is left but what failed
    assert states(place) == ["failed"] * 3 + ["finished"] * 3
    assert "6 done before" in done.stdout

    (place / "mended").touch()
    done = call("run", path, "--retry-failed", check=0)
    assert states(place) == ["finished"] * 6 and "3 done before" in done.stdout
    assert {k: v for k, v in found_in(place).items() if k in first} == first
    attempts = list((place / "runs/study").glob("*/attempts/1/stdout.log"))
    assert len(attempts) == 3 and "what went wrong" in attempts[0].read_text()
    assert "6 done before" in call("run", path, check=0).stdout
    assert "0 done before" in call("run", path, "--again", "--workers", 2, check=0).stdout
    assert states(place) == ["finished"] * 6
    assert len(list((place / "runs/study").glob("*/attempts/*/stdout.log"))) == 3 + 6


def test_attempts_may_be_deleted(tmp_path):
    (tmp_path / "attempts/2").mkdir(parents=True)  # 1 is gone
    for number in (1, 3):
        (tmp_path / "stdout.log").write_text("said")
        sweep.put_away(tmp_path)
        assert (tmp_path / f"attempts/{number}/stdout.log").read_text() == "said"
    sweep.put_away(tmp_path)
    assert len(list((tmp_path / "attempts").iterdir())) == 3


def test_a_run_that_a_signal_killed_has_failed(place):
    """As one is that has taken all memory: its exit status is below 0."""
    done = call("run", write_sweep(place, {"dies": [True]}), check=1)
    assert states(place) == ["failed"] and "1 failed; --retry-failed" in done.stdout
    (path,) = (place / "runs/study").glob("*/status.json")
    assert json.loads(path.read_text())["exit_status"] == -signal.SIGKILL
    assert "1 done before" in call("run", place / "study.py", check=1).stdout


def test_a_run_that_was_done_before_it_was_told_to_stop_is_finished(place):
    for program, deadline, state in [
        ("true", time.monotonic(), "finished"),
        ("true", None, "finished"),
        ("false", time.monotonic(), "stopped"),
        ("false", None, "failed"),
    ]:
        child = subprocess.Popen([program], start_new_session=True)
        child.wait()
        one = variant()
        assert sweep.finish(one, child, deadline) == one.status["state"] == state


def test_the_runs_go_on_when_nobody_reads(place):
    """`| head -n 1`, and a terminal or a log file that takes no more."""
    mended = str(place / "mended")
    path = write_sweep(
        place, {"n": [1, 2, 3], "until": [str(place / "now")], "fails": ["/", mended]}
    )
    launcher = launch(path)
    assert launcher.stdout.readline() == "6 variants, 0 done before\n"
    launcher.stdout.close()
    (place / "now").touch()
    assert launcher.wait(timeout=PATIENCE) == 1  # three have failed
    assert launcher.stderr.read() == ""
    assert states(place) == ["failed"] * 3 + ["finished"] * 3

    command = [sys.executable, "leanrl/sweep.py", "run", "study.py", "--retry-failed"]
    (place / "mended").touch()
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and states(place) == ["finished"] * 6
    assert "No space left" in done.stderr and len(done.stderr.splitlines()) == 1

    # 2>&1 | head, then Ctrl-C: its status is not lost either.
    path = write_sweep(place, {"n": [1], "sleep": [600.0]}, name="other")
    command = [sys.executable, "leanrl/sweep.py", "run", path]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: len(alive(place)) == 1)
    (log,) = (place / "runs/other").glob("*/stdout.log")
    wait_until(log.read_text)
    command = [sys.executable, "leanrl/sweep.py", "logs", "-f", "other"]
    with open("/dev/full", "w") as full:  # here there is nothing to go on for
        done = subprocess.run(command, stdout=full, stderr=full, timeout=PATIENCE)
    assert done.returncode == 1 and len(alive(place)) == 1
    launcher.stdout.close()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=PATIENCE) == 130 and not alive(place)


DAMAGE = ["", "{", "[]", "null", "3", '{"state": 3, "command": 3}', "\xff"]
DAMAGE.append('{"state": "finished", "started": "early", "command": null}')


def test_damaged_records_are_named_and_the_others_listed(place):
    path = write_sweep(place, {"n": list(range(2 * len(DAMAGE) + 3))})
    call("run", path, "--workers", 4, check=0)
    folders = sorted((place / "runs/study").glob("[0-9a-f]*"))
    damaged = []
    for i, folder in enumerate(folders[:-3]):
        damaged.append(folder / ("variant.json", "status.json")[i % 2])
        damaged[-1].write_bytes(DAMAGE[i // 2].encode("latin-1"))
    damaged.append(folders[-3] / "status.json")
    damaged[-1].unlink()
    damaged[-1].mkdir()
    lines = call("jobs", check=0).stdout.splitlines()
    assert len(lines) == len(folders)
    for path, line in zip(damaged, lines, strict=False):
        assert f"damaged: {path}" in line or f"damaged: {path.relative_to(place)}" in line
    assert all("finished" in line and "python leanrl/x.py --n=" in line for line in lines[-2:])
    for folder in folders[:2]:
        assert call("logs", folder.name, check=0).stdout == "started\n"
    assert "nothing that runs" in call("stop", "study", "--yes", check=2).stderr

    said = call("run", "study.py", "--workers", 4, check=0).stdout
    broken = [path for path in damaged if path.name == "status.json"]
    assert said.count("it runs again") == len(broken)
    assert all(f"{path.parent.name}/status.json" in said for path in broken)
    assert states(place) == ["finished"] * len(folders)
    assert len(list((place / "runs/study").glob("*/attempts/1/runs/the_run"))) == len(broken)


def test_what_a_variant_leaves(place, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")  # which no run needs to know
    call("run", write_sweep(place, {"seed": [7], "compile": [True]}), check=0)
    (folder,) = (path.parent for path in (place / "runs/study").glob("*/variant.json"))
    about = json.loads((folder / "variant.json").read_text())
    assert about["params"] == {"seed": 7, "compile": True}
    assert about["command"] == "python leanrl/x.py --seed=7 --compile"
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "finished" and status["exit_status"] == 0
    assert status["ended"] >= status["started"] and not (folder / "attempts").exists()
    assert (folder / "stdout.log").read_text() == "started\n"
    (found,) = found_in(place).values()
    assert "RAY_AUTH_TOKEN" not in found["environment"]
    assert "torch-threads" not in found["flags"], "this script has no such flag"


def test_a_run_is_told_its_share_of_the_cores(place):
    """By a flag if its script has one, which a parameter overrides, and by the environment."""
    cores = str(len(os.sched_getaffinity(0)))
    (place / "leanrl/x.py").write_text(f"torch_threads: int = 1{STAND_IN}")
    for name, params, told in (("share", {"n": [1]}, cores), ("own", {"torch_threads": [7]}, "7")):
        call("run", write_sweep(place, params, name), "--workers", 1, check=0)
        (found,) = found_in(place, name).values()
        assert found["flags"]["torch-threads"] == told
        assert found["environment"]["OMP_NUM_THREADS"] == cores
    (path,) = (place / "runs/share").glob("*/variant.json")  # what a variant is does not change
    assert json.loads(path.read_text())["command"] == "python leanrl/x.py --n=1"


def test_relative_paths_hold_in_a_runs_own_folder(place, monkeypatch):
    """Python's path and files that are parameters; text that is no file stays as it is."""
    monkeypatch.setenv("PYTHONPATH", f"leanrl{os.pathsep}/elsewhere")
    params = {"weights": ["leanrl/x.py"], "env_id": ["worlds/Hopper-v5"], "name": ["leanrl"]}
    call("run", write_sweep(place, params), check=0)
    (found,) = found_in(place).values()
    assert found["environment"]["PYTHONPATH"] == f"{place}/leanrl{os.pathsep}/elsewhere"
    flags = found["flags"]
    assert flags["weights"] == f"{place}/leanrl/x.py"
    assert flags["env-id"] == "worlds/Hopper-v5" and flags["name"] == "leanrl"


def test_a_long_sweep_goes_to_a_cluster_as_a_file(place, monkeypatch):
    """The shell of Ray's head takes 128 KiB in one argument."""
    write_sweep(place, {"n": list(range(700)), "text": ["x" * 200]})
    monkeypatch.setattr(sweep, "ROOT", place)
    monkeypatch.setenv("PYTHONPATH", "lib")
    shipped = []

    def submit(entrypoint, runtime_env, **_):
        assert runtime_env["env_vars"] == {"PYTHONPATH": "lib"}
        assert runtime_env["working_dir"] == str(place)
        name = entrypoint.rpartition(" ")[2]
        shipped.append((len(entrypoint), json.loads((place / name).read_text())))
        raise RuntimeError("that will do")

    client = MagicMock(submit_job=submit)
    client.list_jobs.return_value = []
    ray = MagicMock(JobSubmissionClient=lambda address: client)
    monkeypatch.setitem(sys.modules, "ray.job_submission", ray)
    assert sweep.main(["run", "study.py", "--launcher", "ray", "--yes", "--max-variants=999"]) == 2
    ((length, spec),) = shipped
    assert length < 200 and len(spec["variants"]) == 700 and spec["variants"][9]["params"]["n"] == 9
    assert not list(place.glob("sweep_*.json"))


def test_cores_and_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for workers, threads in ((None, 8), (1, 8), (2, 4), (3, 2), (8, 1), (20, 1)):
        slots = sweep.slots(workers, None, [])
        assert slots == [{"OMP_NUM_THREADS": str(threads)}] * (workers or 1)

    def devices(*arguments):
        return [slot["CUDA_VISIBLE_DEVICES"] for slot in sweep.slots(*arguments)]

    assert devices(3, None, ["0", "1"]) == ["0", "1", "0"]
    assert devices(9, 0.25, ["0"]) == devices(None, 0.25, ["0"]) == ["0"] * 4
    assert devices(2, 0.25, ["0"]) == ["0"] * 2 and devices(None, None, ["0", "1"]) == ["0", "1"]
    assert devices(9, 0.5, ["0", "1"]) == ["0", "1", "0", "1"]
    assert devices(9, 1 / 3, ["0"]) == ["0"] * 3
    assert devices(9, 0.35, ["0"]) == devices(9, 0.5, ["0"]) == ["0"] * 2
    assert devices(9, 2, ["0", "1", "2", "3", "4"]) == ["0,1", "2,3"]
    for share, gpus in ((0, ["0"]), (-1, ["0"]), (1.5, ["0", "1"]), (1, []), (2, ["0"]), (0.5, [])):
        with pytest.raises(sweep.SweepError, match="--gpus-per-run"):
            sweep.slots(1, share, gpus)


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def alive(root):
    """Processes of runs: each works in its variant's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            where = Path(os.readlink(path / "cwd"))
            # not a fork that has yet to become the run
            is_run = b"x.py" in (path / "cmdline").read_bytes()
            if is_run and where.is_relative_to(root / "runs"):
                found.append(int(path.name))
    return found


def launch(path, *words):
    return subprocess.Popen(
        [sys.executable, "leanrl/sweep.py", "run", path, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_no_orphan_and_the_next_launch_goes_on(place, number):
    path = write_sweep(place, {"n": [1, 2, 3], "sleep": [0.0, 600.0]})
    launcher = launch(path, "--workers", "3")
    wait_until(lambda: len(alive(place)) == 3 and states(place).count("finished") == 3)
    finished = found_in(place)
    launcher.send_signal(number)
    _, error = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 130 and "Traceback" not in error and "goes on" in error
    assert not alive(place) and "stopped" in states(place) and "running" not in states(place)
    sweep_again = write_sweep(place, {"n": [1, 2, 3], "sleep": [0.0]})
    call("run", sweep_again, check=0)
    assert {k: v for k, v in found_in(place).items() if k in finished} == finished
    assert len(found_in(place)) == 3


def test_a_stop_during_a_start_is_heard(place, monkeypatch):
    monkeypatch.setattr(signal, "signal", MagicMock())  # this process keeps its own
    popen, told = subprocess.Popen, {"waiting": "stopped", "running": "stopping"}

    def stopped(*words, **options):
        child = popen(*words, **options)
        one.update(state=told[one.status["state"]])  # as the command does
        return child

    def interrupted(*words, **options):
        child = popen(*words, **options)
        born.append(child)
        signal.raise_signal(signal.SIGINT)
        return child

    one, born = variant(sleep=600), []
    for name, Popen, ending in [
        ("stop", stopped, nullcontext()),
        ("Ctrl-C once it is there", interrupted, pytest.raises(KeyboardInterrupt)),
        ("Ctrl-C", MagicMock(side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt)),
        ("no memory", MagicMock(side_effect=OSError), pytest.raises(OSError)),
    ]:
        one.enqueue()
        monkeypatch.setattr(subprocess, "Popen", Popen)
        with ending:
            sweep.run_all([one], [{}], place)
        assert one.status["state"] == "stopped", name
    (child,) = born  # SIGTERM reached it, which the stand-in takes like Ctrl-C as soon as it can
    assert child.returncode in (-signal.SIGTERM, -signal.SIGINT)


def test_a_deleted_folder_ends_no_other_run(place):
    gone, one = variant(n=1), variant(n=2)
    for each in (gone, one):
        each.enqueue()
    shutil.rmtree(gone.folder)
    sweep.run_all([gone, one], [{}], place)
    assert [each.status["state"] for each in (gone, one)] == ["finished"] * 2


def test_what_is_handed_to_a_cluster_has_nothing_in_storage(place, monkeypatch, capsys):
    """Or `sync` would take what a former attempt has left there for the result."""
    pytest.importorskip("pyarrow")
    write_sweep(place, {"n": [1]})
    monkeypatch.setattr(sweep, "ROOT", place)
    (one,) = sweep.load(Path("study.py"), 9)
    kept = place.parent / "kept"
    there = kept / one.name
    there.mkdir(parents=True)
    (there / "status.json").write_text('{"state": "finished"}')
    client = MagicMock()
    client.list_jobs.return_value = []
    client.submit_job.side_effect = RuntimeError("the head hangs up")
    ray = MagicMock(JobSubmissionClient=lambda address: client)
    monkeypatch.setitem(sys.modules, "ray.job_submission", ray)
    words = ["run", "study.py", "--launcher", "ray", "--yes", "--storage", f"file://{kept}"]
    assert sweep.main([*words, "--again"]) == 2
    assert capsys.readouterr().err == "error: the head hangs up\n"
    assert one.state == "on the cluster" and not list(there.iterdir())
    assert sweep.main(["sync", "study", "--storage", f"file://{kept}"]) == 0
    assert one.state == "on the cluster"
    for words in (["stop", "study", "--yes"], ["stop", one.id, "--yes"]):
        assert sweep.main(words) == 2
    assert capsys.readouterr().err.count("nothing that runs or waits") == 2

    def nobody(address):
        raise ValueError("no port")

    ray.JobSubmissionClient = nobody
    assert sweep.main(["run", "study.py", "--launcher", "ray", "--address", "x"]) == 2
    assert capsys.readouterr().err == "error: --address x: no port\n"
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    assert sweep.main(["run", "study.py", "--launcher", "ray"]) == 2
    assert "ray.job_submission" in capsys.readouterr().err


def test_a_full_disk_leaves_no_orphan(place, monkeypatch):
    """The first run has ended, the others take no notice of SIGTERM; no end can be written down."""

    def update(self, **changes):
        if "ended" in changes:
            raise OSError("No space left")

    children = [subprocess.Popen(["true"], start_new_session=True)]
    for _ in range(2):
        command = ["sh", "-c", "trap '' TERM; echo; exec sleep 600"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        children.append(child)
    children[0].wait()
    todo = [variant(n=n) for n in range(3)]
    for one in todo:
        one.enqueue()
    left = list(children)
    monkeypatch.setattr(sweep, "start", lambda *_: left.pop(0))
    monkeypatch.setattr(sweep.Variant, "update", update)
    monkeypatch.setattr(sweep, "GRACE", 0.1)
    monkeypatch.setattr(signal, "signal", MagicMock())  # this process keeps its own
    with pytest.raises(OSError, match="No space left"):
        sweep.run_all(todo, [{}] * 3, place)
    ended = [child.poll() for child in children]
    for child in children:
        child.kill()
    assert ended == [0, -signal.SIGKILL, -signal.SIGKILL]


def test_a_launcher_that_is_killed_takes_its_runs_along(place):
    path = write_sweep(place, {"n": [1, 2, 3], "sleep": [0.0, 600.0]})
    launcher = launch(path, "--workers", "2")
    wait_until(lambda: len(alive(place)) == 2 and states(place).count("finished") == 2)
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not alive(place))
    # nobody was left to say otherwise
    assert states(place) == ["finished"] * 2 + ["running"] * 2 + ["waiting"] * 2
    said = call("jobs", check=0).stdout
    assert said.count("finished") == said.count("lost") == said.count("waiting") == 2
    call("run", write_sweep(place, {"n": [1, 2, 3], "sleep": [0.0]}), check=0)
    assert states(place).count("finished") == 3


def test_two_launchers_of_a_group_are_one_too_many(place, monkeypatch, capsys):
    path = write_sweep(place, {"n": [1], "sleep": [600.0]})
    launcher = launch(path)
    wait_until(lambda: alive(place))
    refusal = call("run", path, check=2).stderr
    assert "has a launcher at work already" in refusal
    monkeypatch.setattr(sweep, "ROOT", place)
    monkeypatch.setitem(sys.modules, "ray.job_submission", MagicMock())  # a cluster without jobs
    assert sweep.main(["run", "study.py", "--launcher", "ray", "--yes"]) == 2
    assert capsys.readouterr().err == refusal
    assert states(place) == ["running"] and len(alive(place)) == 1
    assert not list((place / "runs/study").glob("*/attempts"))
    launcher.terminate()
    launcher.communicate()


# Commands


def test_jobs_and_logs_and_stop(place):
    path = write_sweep(place, {"n": [1, 2, 3, 4], "sleep": [600.0]})
    launcher = launch(path, "--workers", "2")
    wait_until(lambda: len(alive(place)) == 2)
    lines = call("jobs", check=0).stdout.splitlines()
    assert len(lines) == 4 and all("--sleep=600.0" in line for line in lines)
    one, other = (line.split()[0] for line in lines if "running" in line)
    assert sum("waiting" in line for line in lines) == 2

    wait_until(lambda: call("logs", one).stdout == "started\n")
    following = subprocess.Popen(
        [sys.executable, "leanrl/sweep.py", "logs", "-f", one], stdout=subprocess.PIPE, text=True
    )
    assert following.stdout.readline() == "started\n" and following.poll() is None
    assert f"it names ['{one}'" in call("logs", "study", check=2).stderr.replace(other, one)
    assert "it names []" in call("logs", "nothing", check=2).stderr

    for answer in ("n\n", "no\n", "", "what\n"):
        assert "nothing stopped" in call("stop", one, stdin=answer, check=1).stdout
    assert len(alive(place)) == 2
    assert "nothing that runs" in call("stop", "nothing", stdin="y\n", check=2).stderr
    assert call("stop", one, stdin="Y\n", check=0).stdout.count("study/") == 1
    wait_until(lambda: states(place) == ["running", "running", "stopped", "waiting"])
    assert following.wait(timeout=PATIENCE) == 0  # it ended, so following did
    call("stop", "study", "--yes", check=0)  # also what is waiting
    out, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1 and "4 stopped" in out and not alive(place)
    assert states(place) == ["stopped"] * 4
    assert len(list((place / "runs/study").glob("*/stdout.log"))) == 3  # the last never began
    assert call("jobs", check=0).stdout.count("stopped") == 4


def test_a_sweep_that_makes_no_sense_is_one_line(place, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "ROOT", place)
    (place.parent / "x.py").touch()
    (place / "leanrl/y.py").touch()
    (place / "leanrl/out.py").symlink_to(place.parent / "x.py")
    (place / "leanrl/round.py").symlink_to(place / "leanrl/round.py")
    for text, why in {
        "params = {'a': [1]}": "must assign script and params",
        "script = 'leanrl/x.py'": "must assign script and params",
        "": "must assign script and params",
        "script = 'leanrl/gone.py'\nparams = {'a': [1]}": "no such file",
        f"script = {str(place / 'leanrl/x.py')!r}\nparams = {{'a': [1]}}": "in the repository",
        "script = '/etc/passwd'\nparams = {'a': [1]}": "no such file in the repository",
        "script = '../x.py'\nparams = {'a': [1]}": "no such file in the repository",
        "script = 'leanrl/out.py'\nparams = {'a': [1]}": "no such file in the repository",
        "script = 'leanrl/round.py'\nparams = {'a': [1]}": "no such file in the repository",
        "raise ValueError('two\\nlines')": "two lines",
        "script = 'leanrl/x.py'\nparams = {'a': 1}": "not a list",
        "script = ": "invalid syntax (bad.py, line 1)",
        "1 / 0": "bad.py: ZeroDivisionError",
        "import sys\nsys.exit(0)": "bad.py: SystemExit",
        "script = 'leanrl/x.py'\ngroup = '../x'\nparams = {'a': [1]}": "only letters, digits",
        "script = 'leanrl/x.py'\n"
        "params = dict(a=list(range(10**5)), b=list(range(10**5)))": "10000000000 variants",
        "script = ['leanrl/x.py', 'leanrl/y.py']\nparams = {'a': list(range(11))}": "22 variants",
        "script = 'leanrl/x.py'\nparams = {'a': list(range(21))}": "21 variants, 20 at most",
    }.items():
        (place / "bad.py").write_text(text)
        assert sweep.main(["run", "bad.py"]) == 2
        error = capsys.readouterr().err
        assert why in error and len(error.splitlines()) == 1
    assert sweep.main(["run", "bad.py", "--max-variants", "21", "--dry-run"]) == 0
    assert sweep.main(["run", "gone.py"]) == 2
    assert "gone.py: FileNotFoundError" in capsys.readouterr().err
    assert not (place / "runs").exists()
    (place / "bad.py").write_text("import sys\nsys.exit(0)")
    assert "bad.py: SystemExit" in call("run", "bad.py", check=2).stderr

    write_sweep(place, {"a": [1]})
    for flag, value, least in [
        ("--workers", "0", 1),
        ("--workers", "-3", 1),
        ("--max-variants", "-1", 1),
        ("--gpus-per-run", "nan", 0),
        ("--gpus-per-run", "inf", 0),
        ("--cpus-per-run", "-1", 0),
    ]:
        assert sweep.main(["run", "study.py", flag, value]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {flag} {value}")
        assert f"at least {least}" in error and len(error.splitlines()) == 1
    assert not (place / "runs").exists()


def test_runs_that_cannot_be_written_are_one_line(place, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "ROOT", place)
    write_sweep(place, {"a": [1]})
    (place / "runs").mkdir()
    (place / "runs/study").write_text("a file")
    assert sweep.main(["run", "study.py"]) == 2
    errors = [capsys.readouterr().err]
    shutil.rmtree(place / "runs")
    (place / "runs").write_text("a file")
    assert sweep.main(["run", "study.py"]) == 2
    errors.append(capsys.readouterr().err)
    (place / "runs").unlink()
    (place / "runs").symlink_to("/sys")  # not even root may make folders there
    assert sweep.main(["run", "study.py"]) == 2
    errors.append(capsys.readouterr().err)
    assert all("runs/study'" in error and len(error.splitlines()) == 1 for error in errors)


def test_storage_that_is_no_address_is_one_line(place, monkeypatch, capsys):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(sweep, "ROOT", place)
    write_sweep(place, {"a": [1]})
    assert sweep.main(["run", "study.py", "--storage", "no address"]) == 2
    error = capsys.readouterr().err
    assert "--storage no address" in error and len(error.splitlines()) == 1


def test_a_folder_that_could_not_be_fetched_whole_is_fetched_again(place):
    """Its status.json, which says that it is finished, comes last."""
    pytest.importorskip("pyarrow")
    kept = place.parent / "bucket/study/0123456789"
    (kept / "runs/the_run").mkdir(parents=True)
    for name in ("stdout.log", "runs/the_run/found.json", "variant.json"):
        (kept / name).write_text("{}")
    (kept / "status.json").write_text('{"state": "finished"}')
    here = place / "runs/study/0123456789"
    (here / "stdout.log/in the way").mkdir(parents=True)
    words = ["sync", "study", "--storage", f"file://{kept.parents[1]}"]
    assert sweep.main(words) == 2 and not (here / "status.json").exists()
    shutil.rmtree(here / "stdout.log")
    assert sweep.main(words) == 0
    for path in kept.rglob("*.*"):
        assert (here / path.relative_to(kept)).read_text() == path.read_text()


def test_the_template_of_a_cluster_is_one():
    """Ray's own schema, and the promise that idle workers end."""
    pytest.importorskip("ray")
    import jsonschema
    import ray.autoscaler
    import yaml

    config = yaml.safe_load((ROOT / "leanrl/sweeps/cluster.yaml").read_text())
    schema = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
    jsonschema.validate(config, json.loads(schema.read_text()))
    assert config["available_node_types"]["worker"]["min_workers"] == 0
    assert config["idle_timeout_minutes"] <= 5 and not config["provider"]["cache_stopped_nodes"]


@pytest.mark.slow
def test_ppo_runs_of_a_sweep(tmp_path, monkeypatch):
    """Four real short runs, one of which cannot work; plots find them."""
    import run_dirs

    monkeypatch.chdir(tmp_path)
    (tmp_path / "ppo.py").write_text(
        "script = 'leanrl/ppo_continuous_action.py'\n"
        "params = dict(seed=[1, 2, 3, 4], env_id=['Pendulum-v1'], num_steps=[64],\n"
        "    num_minibatches=lambda seed: [4 if seed < 4 else 7], total_timesteps=[320])\n"
    )
    command = [sys.executable, ROOT / "leanrl/sweep.py", "run", "ppo.py", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed" in done.stdout and "3 finished" in done.stdout
    assert "--seed=4 " in done.stdout
    assert "    Error parsing Args: --num-minibatches: 64 steps" in done.stdout
    runs, skipped = run_dirs.read_runs([tmp_path / "runs/ppo"])
    assert sorted(run.config["args"]["seed"] for run in runs) == [1, 2, 3]
    assert len(skipped) == 1  # the one that failed, by its name
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and "4 done before" in again.stdout
