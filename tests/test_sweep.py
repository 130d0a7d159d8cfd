"""Sweeps: expansion, identity, the launcher on this machine, its commands."""

import importlib
import io
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
import run_dirs
import tyro
from conftest import ROOT
from fake_sweeps import (
    STAND_IN,
    alive,
    attempts,
    call,
    found_in,
    make_place,
    start,
    states,
    write_sweep,
)
from helpers import PATIENCE, wait_until

from leanrl import sweep

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
        assert all(tuple(each) == order for each in found)  # names as they were written
        assert {tuple(each[name] for name in params) for each in found} == wanted


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({}, "at least one parameter"),
        ([("a", 1)], "must be a dict"),
        ({"a": lambda b: [b], "b": lambda a: [a]}, "circle"),
        ({"a": lambda c: [c]}, "a needs 'c', which is no parameter"),
        ({"a": "text"}, "not a list"),
        ({"a": [1], "b": lambda a: a}, "b is 1, not a list"),
        ({"a": []}, "with at least one value"),
        ({"a": [1, np.int64(1)]}, "a has 1 twice"),
        ({"a": [0], "b": lambda a: [1 // a]}, "b: its function fails: ZeroDivisionError"),
        ({"a": [0], "b": lambda a: sys.exit(a)}, "b: its function fails: SystemExit"),
        ({"a": [[1]]}, "only numbers, text"),
        ({"a": [float("nan")]}, "finite"),
        ({"a": ["a\0b"]}, "zero byte"),
        ({"a": ["x" * 300_000]}, "a has a value of 300000 bytes"),  # no process would start
        ({"a": ["\ud800"]}, "a has a value that is no text"),
        ({"a b": [1]}, "no name"),
    ],
)
def test_nonsense_is_refused_in_one_line(params, why):
    with pytest.raises(sweep.SweepError, match=why) as error:
        sweep.expand(params)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_true_and_one_are_two_values():
    assert len(sweep.expand({"a": [1, True, 1.0, "nan"]})) == 4


def test_variants_are_counted_before_they_are_made():
    """10**10 would take all memory."""
    many, ten = list(range(100_000)), list(range(10))
    of_ten = {"a": ten, "b": lambda a: ten}
    for params, scripts, number in [
        ({"a": many, "b": many}, 1, "10000000000 variants"),
        (of_ten | {"c": many}, 1, "more than 20 variants"),
        ({"a": ten}, 3, "30 variants"),
    ]:
        with pytest.raises(sweep.SweepError, match=f"^{number}, 20 at most"):
            sweep.expand(params, scripts, 20)
    assert len(sweep.expand(of_ten | {"a": [1, 2]}, 1, 20)) == 20


@pytest.mark.parametrize(
    ("name", "count"), [("gae_lambda", 9), ("batch_size", 12), ("baselines", 12), ("seeds", 10)]
)
def test_the_examples_have_flags_that_exist(name, count):
    variants = sweep.load(ROOT / f"leanrl/sweeps/{name}.py", 20)
    assert len(variants) == count
    for each in variants:
        module = importlib.import_module(each.script[:-3].replace("/", "."))
        args = tyro.cli(module.Args, args=each.flags)
        assert vars(args).items() >= each.params.items()


# Identity


def variant(script="leanrl/x.py", **params) -> sweep.Variant:
    return sweep.Variant("group", script, params)


def test_a_variant_is_known_by_script_and_parameters():
    one = variant(a=1, b=0.5)
    assert one.id == variant(b=0.5, a=1).id
    others = [variant(a=1), variant(a=1, b="0.5"), variant(a=True, b=0.5), variant(a=2, b=0.5)]
    others.append(variant("leanrl/y.py", a=1, b=0.5))
    assert len({one.id, *(other.id for other in others)}) == 6
    assert re.fullmatch("[0-9a-f]{10}", one.id)


def test_flags_carry_any_value_as_one_word():
    flags = variant(exp_name="a b", lr=1e-05, on=True, off=False, nothing=None).flags
    assert flags == ["--exp-name=a b", "--lr=1e-05", "--on", "--no-off", "--nothing=None"]


# The launcher, with scripts that only say what they were given


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder: a repository with sweep.py and the stand-in."""
    root = make_place(tmp_path)
    monkeypatch.chdir(root)
    monkeypatch.setattr(sweep, "ROOT", root)
    return root


def test_hostile_values_arrive_as_they_are(place):
    hostile = ["a b", "'", '"', "line\nbreak", "--seed", "-1", ";true", "$(true)", "`x`", "*", ""]
    hostile += ["é", "="]
    path = write_sweep(place, {"exp_name": hostile})
    call("run", path, "--workers", 4, check=0)
    assert sorted(each["flags"]["exp-name"] for each in found_in(place).values()) == sorted(hostile)
    dry = call("run", path, "--dry-run", check=0).stdout
    words = shlex.split(dry.partition("\n")[2])  # as a shell would
    assert words == [w for v in hostile for w in ("python", "leanrl/x.py", f"--exp-name={v}")]


@pytest.fixture
def half_failed(place):
    """A sweep, one of whose two variants fails until there is the file `mended`."""
    path = write_sweep(place, {"n": [2], "fails": [str(place / "mended"), "/"]})
    done = call("run", path, "--workers", 2, check=1)
    assert states(place) == ["failed", "finished"]
    return path, done.stdout


def test_a_failure_stops_no_other_and_is_named(half_failed):
    _, out = half_failed
    for words in ("1 failed", "what went wrong", "--n=2 '--fails=", "--retry-failed"):
        assert words in out


def test_what_failed_runs_again_if_that_is_asked_for(half_failed, place):
    path, _ = half_failed
    first = found_in(place)
    (place / "mended").touch()
    assert "2 done before" in call("run", path, check=1).stdout
    assert states(place) == ["failed", "finished"]
    assert "1 done before" in call("run", path, "--retry-failed", check=0).stdout
    assert states(place) == ["finished"] * 2 and found_in(place).items() > first.items()
    (log,) = attempts(place)
    assert "what went wrong" in log.read_text()


def test_what_is_finished_runs_again_if_that_is_asked_for(place):
    path = write_sweep(place, {"n": [1, 2]})
    for words, before in (([], 0), ([], 2), (["--again"], 0), (["--again"], 0)):
        assert f"{before} done before" in call("run", path, *words, check=0).stdout
    assert sorted(log.parent.name for log in attempts(place)) == ["1", "1", "2", "2"]


def test_a_run_that_a_signal_killed_has_failed(place):
    """As one is that has taken all memory: its exit status is below 0."""
    call("run", write_sweep(place, {"dies": [True]}), check=1)
    (path,) = (place / "runs/study").glob("*/status.json")
    status = json.loads(path.read_text())
    assert (status["state"], status["exit_status"]) == ("failed", -signal.SIGKILL)


@pytest.mark.parametrize(
    ("program", "told_to_stop", "state"),
    [
        ("true", True, "finished"),  # it was done before
        ("true", False, "finished"),
        ("false", True, "stopped"),
        ("false", False, "failed"),
        ("sleep 600", True, "stopped"),  # it has not heard
    ],
)
def test_how_a_run_ended(program, told_to_stop, state, place):
    child = subprocess.Popen(program.split(), start_new_session=True)
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1 if "600" in program else PATIENCE)
    one = variant()
    assert sweep.finish(one, child, time.monotonic() if told_to_stop else None) == state
    assert one.status["state"] == state and child.poll() is not None


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


def test_relative_paths_hold_in_a_runs_own_folder(place, monkeypatch):
    """Python's path and files that are parameters; text that is no file stays as it is."""
    monkeypatch.setenv("PYTHONPATH", f"leanrl{os.pathsep}/elsewhere")
    params = {"weights": ["leanrl/x.py"], "env_id": ["worlds/Hopper-v5"], "name": ["leanrl"]}
    call("run", write_sweep(place, params), check=0)
    (found,) = found_in(place).values()
    assert found["environment"]["PYTHONPATH"] == f"{place}/leanrl{os.pathsep}/elsewhere"
    assert found["flags"]["weights"] == f"{place}/leanrl/x.py"
    assert found["flags"]["env-id"] == "worlds/Hopper-v5" and found["flags"]["name"] == "leanrl"


# Cores and GPUs


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


@pytest.mark.parametrize(
    ("workers", "threads"), [(None, 8), (1, 8), (2, 4), (3, 2), (8, 1), (20, 1)]
)
def test_cores_are_shared_out(workers, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    slots = sweep.slots(workers, None, [])
    assert slots == [{"OMP_NUM_THREADS": str(threads)}] * (workers or 1)


@pytest.mark.parametrize(
    ("workers", "gpus_per_run", "gpus", "shares"),
    [
        (3, None, "01", ["0", "1", "0"]),
        (None, None, "01", ["0", "1"]),
        (9, 0.25, "0", ["0"] * 4),
        (None, 0.25, "0", ["0"] * 4),
        (2, 0.25, "0", ["0"] * 2),
        (9, 0.5, "01", ["0", "1", "0", "1"]),
        (9, 1 / 3, "0", ["0"] * 3),
        (9, 0.35, "0", ["0"] * 2),
        (9, 2, "01234", ["0,1", "2,3"]),
    ],
)
def test_gpus_are_shared_out(workers, gpus_per_run, gpus, shares):
    slots = sweep.slots(workers, gpus_per_run, [*gpus])
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots] == shares


@pytest.mark.parametrize(
    ("share", "gpus"), [(0, "0"), (-1, "0"), (1.5, "01"), (1, ""), (2, "0"), (0.5, "")]
)
def test_shares_that_no_gpus_have_are_refused(share, gpus):
    with pytest.raises(sweep.SweepError, match="--gpus-per-run"):
        sweep.slots(1, share, [*gpus])


# Interruptions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_no_orphan_and_the_next_launch_goes_on(place, number):
    path = write_sweep(place, {"n": [1, 2, 3], "sleep": [0.0, 600.0]})
    launcher = start("run", path, "--workers", 3)
    wait_until(lambda: len(alive(place)) == 3 and states(place).count("finished") == 3)
    finished = found_in(place)
    launcher.send_signal(number)
    _, error = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 130 and "Traceback" not in error and "goes on" in error
    assert not alive(place) and "stopped" in states(place) and "running" not in states(place)
    again = write_sweep(place, {"n": [1, 2, 3], "sleep": [0.0]})
    assert "3 done before" in call("run", again, check=0).stdout
    assert found_in(place) == finished


def test_a_launcher_that_is_killed_takes_its_runs_along(place):
    launcher = start("run", write_sweep(place, {"n": [1, 2, 3], "sleep": [600.0]}), "--workers", 2)
    wait_until(lambda: len(alive(place)) == 2)
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not alive(place))
    assert states(place) == ["running"] * 2 + ["waiting"]  # nobody was left to say otherwise
    said = call("jobs", check=0).stdout
    assert said.count("lost") == 2 and said.count("waiting") == 1


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


# Output that nobody reads


def test_the_runs_go_on_when_the_reader_leaves(place):
    """`| head -n 1`"""
    launcher = start("run", write_sweep(place, {"n": [1, 2], "until": [str(place / "now")]}))
    assert launcher.stdout.readline() == "2 variants, 0 done before\n"
    launcher.stdout.close()
    (place / "now").touch()
    assert launcher.wait(timeout=PATIENCE) == 0 and launcher.stderr.read() == ""
    assert states(place) == ["finished"] * 2


def test_the_runs_go_on_when_the_output_is_full(place):
    with open("/dev/full", "w") as full:
        done = call("run", write_sweep(place, {"n": [1, 2]}), stdout=full, check=0)
        call("logs", "-f", next(iter(found_in(place))), stdout=full, check=1)
    assert "No space left" in done.stderr and len(done.stderr.splitlines()) == 1
    assert states(place) == ["finished"] * 2


# Damage


@pytest.mark.parametrize("name", ["variant.json", "status.json"])
@pytest.mark.parametrize(
    "damage", ["", "[]", '{"state": 3, "command": 3}', "\xff", '{"command": null, "started": "no"}']
)
def test_damaged_records_are_named_and_others_listed(name, damage, place, capsys):
    for n in range(2):
        variant(n=n).enqueue()
    path = variant(n=0).folder / name
    path.write_bytes(damage.encode("latin-1"))
    assert sweep.main(["jobs"]) == 0
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert said.keys() == {variant(n=n).name for n in range(2)}
    assert re.search(rf"damaged: \S.*{path.parent.name}/{name}", said[variant(n=0).name])
    assert "damaged" not in said[variant(n=1).name]


def test_a_damaged_state_runs_again(place):
    path = write_sweep(place, {"n": [1, 2]})
    call("run", path, check=0)
    damaged = next((place / "runs/study").glob("*/status.json"))
    damaged.write_text("{")
    assert call("run", path, check=0).stdout.count("it runs again") == 1
    assert states(place) == ["finished"] * 2
    assert [log.parents[2] for log in attempts(place)] == [damaged.parent]


# Commands


@pytest.fixture
def launcher(place):
    """At work on three runs, two at a time, that do not end by themselves."""
    path = write_sweep(place, {"n": [1, 2, 3], "sleep": [600.0]})
    process = start("run", path, "--workers", 2)
    wait_until(lambda: len(alive(place)) == 2)
    yield process
    process.terminate()
    process.communicate()


def one_that_runs() -> str:
    lines = call("jobs", check=0).stdout.splitlines()
    return next(line.split()[0] for line in lines if "running" in line)


def test_jobs(launcher, place):
    said = call("jobs", check=0).stdout
    assert said.count("running") == 2 and said.count("waiting") == 1
    assert said.count("--sleep=600.0") == 3


def test_logs_follow_until_the_end(launcher, place):
    following = start("logs", "-f", one_that_runs())
    assert following.stdout.readline() == "started\n" and following.poll() is None
    call("stop", "study", "--yes", check=0)
    following.communicate(timeout=PATIENCE)
    assert following.returncode == 0


def test_stop_ends_one(launcher, place):
    said = call("stop", one_that_runs(), stdin="Y\n", check=0).stdout
    assert said.count("study/") == 1
    wait_until(lambda: states(place) == ["running", "running", "stopped"])  # the third one began


def test_stop_ends_all(launcher, place):
    """Also what is waiting; and a sweep that was stopped is no success."""
    call("stop", "study", "--yes", check=0)
    out, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1 and "3 stopped" in out and not alive(place)
    assert states(place) == ["stopped"] * 3
    assert len(list((place / "runs/study").glob("*/stdout.log"))) == 2  # the last never began


def test_stop_asks(launcher, place):
    assert "nothing stopped" in call("stop", "study", stdin="n\n", check=1).stdout
    assert len(alive(place)) == 2


@pytest.mark.parametrize(
    ("answer", "yes"),
    [("\n", True), ("Y\n", True), ("n\n", False), ("no\n", False), ("what\n", False), ("", False)],
)
def test_answers(answer, yes, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert sweep.confirm("Stop?") == yes


def test_two_launchers_of_a_group_are_one_too_many(launcher, place, refused, ray):
    for words in ([], ["--launcher", "ray", "--yes"]):
        assert "has a launcher at work already" in refused("run", "study.py", *words)
    assert len(alive(place)) == 2 and not attempts(place)


# What makes no sense


@pytest.fixture
def refused(place, capsys):
    """Calls sweep.py, which does nothing -> what it says, one line."""

    def call(*words) -> str:
        assert sweep.main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and len(error.splitlines()) == 1
        return error

    return call


PARAMS = "\nparams = {'a': list(range(11))}"
SCRIPT = "script = 'leanrl/x.py'\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (SCRIPT, "must assign script and params"),
        (f"script = 'leanrl/gone.py'{PARAMS}", "no such file in the repository"),
        (f"script = '../x.py'{PARAMS}", "no such file in the repository"),
        (f"script = 'leanrl/out.py'{PARAMS}", "no such file in the repository"),
        ("raise ValueError('two\\nlines')", "two lines"),
        (f"{SCRIPT}params = {{'a': 1}}", "not a list"),
        ("script = ", "invalid syntax (bad.py, line 1)"),
        ("import sys\nsys.exit(0)", "bad.py: SystemExit"),
        (f"{SCRIPT}group = '../x'{PARAMS}", "only letters, digits"),
        (f"script = ['leanrl/x.py', 'leanrl/y.py']{PARAMS}", "22 variants, 20 at most"),
    ],
)
def test_files_that_are_no_sweep_are_refused(text, why, place, refused):
    (place.parent / "x.py").touch()
    (place / "leanrl/y.py").touch()
    (place / "leanrl/out.py").symlink_to(place.parent / "x.py")
    (place / "bad.py").write_text(text)
    assert why in refused("run", "bad.py")
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("flag", "value", "least"),
    [
        ("--workers", "0", 1),
        ("--max-variants", "-1", 1),
        ("--gpus-per-run", "nan", 0),
        ("--gpus-per-run", "inf", 0),
        ("--cpus-per-run", "-1", 0),
    ],
)
def test_options_out_of_range_are_refused(flag, value, least, place, refused):
    error = refused("run", write_sweep(place, {"a": [1]}), flag, value)
    assert f"{flag} {value}" in error and f"at least {least}" in error
    assert not (place / "runs").exists()


def test_names_that_nothing_has_are_refused(launcher, refused):
    assert "nothing that runs" in refused("stop", "nothing", "--yes")
    assert "it names []" in refused("logs", "nothing")
    assert len(re.findall("study/", refused("logs", "study"))) == 2


@pytest.mark.parametrize("name", ["runs", "runs/study"])
def test_runs_that_cannot_be_written_are_named(name, place, refused):
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text("a file")
    assert "runs/study'" in refused("run", write_sweep(place, {"a": [1]}))


# Clusters: what is said to Ray


@pytest.fixture
def ray(monkeypatch):
    """The client of a cluster without jobs, which hangs up when it gets one."""
    client = MagicMock()
    client.list_jobs.return_value = []
    client.submit_job.side_effect = RuntimeError("the head hangs up")
    module = MagicMock(JobSubmissionClient=lambda address: client)
    monkeypatch.setitem(sys.modules, "ray.job_submission", module)
    return client


def on_ray(place, *words):
    return "run", write_sweep(place, {"n": [1]}), "--launcher", "ray", *words


def test_a_launch_on_a_cluster_asks(place, ray, refused, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda: "n")
    assert "nothing launched" in refused(*on_ray(place))
    assert not ray.submit_job.called and not states(place)


def test_a_cluster_without_ray_is_named(place, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    assert "ray.job_submission" in refused(*on_ray(place))


def test_a_cluster_that_is_not_there_is_named(place, ray, refused, monkeypatch):
    client = MagicMock(side_effect=ValueError("no port"))
    monkeypatch.setattr(sys.modules["ray.job_submission"], "JobSubmissionClient", client)
    assert refused(*on_ray(place, "--address", "x")) == "error: --address x: no port\n"


def test_a_long_sweep_goes_to_a_cluster_as_a_file(place, ray, refused, monkeypatch):
    """The shell of Ray's head takes 128 KiB in one argument."""
    path = write_sweep(place, {"n": list(range(700)), "text": ["x" * 200]})
    assert "20 at most; --max-variants allows more" in refused("run", path)
    monkeypatch.setenv("PYTHONPATH", "lib")
    shipped = []

    def submit(entrypoint, runtime_env, **_):
        assert runtime_env["env_vars"] == {"PYTHONPATH": "lib"}
        assert runtime_env["working_dir"] == str(place)
        name = entrypoint.rpartition(" ")[2]
        shipped.append((len(entrypoint), json.loads((place / name).read_text())))
        raise RuntimeError("that will do")

    ray.submit_job = submit
    refused("run", path, "--launcher", "ray", "--yes", "--max-variants=999")
    ((length, spec),) = shipped
    assert length < 200 and [each["params"]["n"] for each in spec["variants"]] == [*range(700)]
    assert not list(place.glob("sweep_*.json"))


# Storage of a cluster


@pytest.fixture
def kept(place):
    """The folder in storage of the only variant, with what a former attempt has left."""
    pytest.importorskip("pyarrow")
    (one,) = sweep.load(write_sweep(place, {"n": [1]}), 9)
    folder = place.parent / "bucket" / one.name
    (folder / "runs/the_run").mkdir(parents=True)
    for name in ("stdout.log", "runs/the_run/found.json", "variant.json"):
        (folder / name).write_text("{}")
    (folder / "status.json").write_text('{"state": "finished"}')
    return one, folder, ["--storage", f"file://{place.parent}/bucket"]


def test_a_launch_empties_its_storage(kept, place, ray, refused):
    """Or `sync` would take what a former attempt has left there for the result."""
    one, folder, storage = kept
    words = on_ray(place, "--yes", "--again", *storage)
    assert refused(*words) == "error: the head hangs up\n"
    assert one.state == "on the cluster" and not list(folder.iterdir())
    assert sweep.main(["sync", "study", *storage]) == 0
    assert one.state == "on the cluster"
    assert "nothing that runs or waits" in refused("stop", "study", "--yes")


def test_a_folder_that_could_not_be_fetched_whole_is_fetched_again(kept, place):
    """Its status.json, which says that it is finished, comes last."""
    one, folder, storage = kept
    (one.folder / "stdout.log/in the way").mkdir(parents=True)
    assert sweep.main(["sync", "study", *storage]) == 2
    assert not (one.folder / "status.json").exists()
    shutil.rmtree(one.folder / "stdout.log")
    assert sweep.main(["sync", "study", *storage]) == 0
    for path in folder.rglob("*.*"):
        assert (one.folder / path.relative_to(folder)).read_text() == path.read_text()


def test_storage_that_is_no_address_is_named(place, refused):
    pytest.importorskip("pyarrow")
    path = write_sweep(place, {"a": [1]})
    assert "--storage no address" in refused("run", path, "--storage", "no address")


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
    """Four, one of which cannot work: that is said, and the plots find the others."""
    monkeypatch.chdir(tmp_path)
    Path("ppo.py").write_text(
        "script = 'leanrl/ppo_continuous_action.py'\n"
        "params = dict(seed=[1, 2, 3, 4], env_id=['Pendulum-v1'], num_steps=[64],\n"
        "    num_minibatches=lambda seed: [4 if seed < 4 else 7], total_timesteps=[320])\n"
    )
    command = [sys.executable, ROOT / "leanrl/sweep.py", "run", "ppo.py", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed" in done.stdout and "3 finished" in done.stdout
    assert "--seed=4 " in done.stdout
    assert "    Error parsing Args: --num-minibatches: 64 steps" in done.stdout
    runs, skipped = run_dirs.read_runs([Path("runs/ppo")])
    assert sorted(run.config["args"]["seed"] for run in runs) == [1, 2, 3]
    assert len(skipped) == 1  # the one that failed, by its name
