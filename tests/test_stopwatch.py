"""The stopwatch: what it counts, and that all scripts carry it alike."""

import gzip
import json
import shutil
import signal
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import processes
import pytest
import torch

from leanrl import stopwatch
from leanrl.stopwatch import Run, Stopwatch

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves `clock.now`; half of it is processor time."""
    fake = SimpleNamespace(now=100.0)
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: fake.now)
    monkeypatch.setattr(stopwatch.time, "process_time", lambda: fake.now / 2)
    return fake


def spend(watch, clock, **seconds):
    """Let each named stage take its seconds, one after the other."""
    for name, duration in seconds.items():
        with watch.stage(name):
            clock.now += duration


# Counting


def test_stages_keep_self_time_also_nested_and_after_exceptions(clock, tmp_path):
    watch = Stopwatch(CPU)
    clock.now += 1.0
    watch.tick(1)
    with watch.stage("backpropagation"):
        clock.now += 1.0
        with watch.stage("replay"):
            clock.now += 4.0
            with watch.stage("simulation"), watch.stage("simulation"):
                clock.now += 8.0
        clock.now += 2.0
    with pytest.raises(KeyboardInterrupt), watch.stage("inference"), watch.stage("checkpoint"):
        clock.now += 3.0
        raise KeyboardInterrupt
    spend(watch, clock, logging=5.0)
    clock.now += 16.0
    watch.tick(2)
    spend(watch, clock, planning=0.5)  # a name is enough for another stage
    assert watch.report(tmp_path / "stages.json")["stages"] == {
        "simulation": 8.0,
        "inference": 0.0,
        "replay": 4.0,
        "backpropagation": 3.0,
        "logging": 5.0,
        "checkpoint": 3.0,
        "untracked": 16.0,
        "planning": 0.5,
    }


@pytest.mark.parametrize("mode", ["off", "time"])
def test_the_steady_window_leaves_out_warm_up_and_evaluation(mode, clock, tmp_path, capsys):
    watch = Stopwatch(CPU, mode, warmup_steps=20)
    for step in (10, 20):  # the tick that reaches 20 ends the warm-up
        spend(watch, clock, simulation=5.0, evaluation=30.0)
        assert watch.measure(step)["sps_steady"] is None
        watch.tick(step)
    for step in (30, 40, 50):
        spend(watch, clock, simulation=2.0, checkpoint=1.0, evaluation=100.0)
        clock.now += 1.0
        watch.tick(step)
    assert watch.measure(50)["sps"] == pytest.approx(50 / 382)
    assert watch.measure(50)["sps_steady"] == pytest.approx(30 / 12)
    spend(watch, clock, evaluation=50.0)  # after the last tick, as on Ctrl-C
    report = watch.report(tmp_path / "stages.json")
    assert json.loads((tmp_path / "stages.json").read_text()) == json.loads(json.dumps(report))
    assert not (tmp_path / "stages.partial").exists()
    spent = dict(simulation=6.0, checkpoint=3.0, untracked=3.0, evaluation=350.0)
    if mode == "off":
        spent = dict(untracked=12.0, evaluation=350.0)
    assert report == {
        "sps_steady": 30 / 12,
        "warmup_seconds": 10.0,
        "wall_seconds": 432.0,
        "sps": 50 / 432,
        "env_steps": 30,
        "iterations": 3,
        "seconds": 12.0,
        "stages": spent,
        "gpu_stages": {},  # not measured, never 0
        "nvml_percent": [],
        "cpu_seconds": [(at, at / 2 + 50) for at in (70.0, 174.0, 278.0, 382.0, 432.0)],
    }
    out, err = capsys.readouterr()
    lines = [line.split() for line in err.splitlines()]
    assert not out and max(map(len, err.splitlines())) < 80 + len(str(tmp_path))
    assert (["checkpoint", "3.00", "s", "100,000.0", "us/step"] in lines) == (mode == "time")
    assert err.endswith(f"2.5 steps/s, {tmp_path}/stages.json\n")
    (tmp_path / "log").write_text(err)  # where the programs that make runs look for it
    assert processes.run_directory(tmp_path / "log") == tmp_path


@pytest.mark.parametrize("mode", ["off", "time", "trace"])
def test_a_run_that_never_leaves_its_warm_up_reports_what_it_did(mode, clock, tmp_path, capsys):
    watch = Stopwatch(CPU, mode, warmup_steps=1000)
    spend(watch, clock, simulation=2.0)
    report = watch.report(tmp_path / "stages.json")  # without any tick
    assert report["sps_steady"] is None and report["sps"] == 0.0 and report["env_steps"] == 0
    assert capsys.readouterr().err.endswith(f"nan steps/s, {tmp_path}/stages.json\n")
    watch = Stopwatch(CPU, mode, warmup_steps=1000)
    spend(watch, clock, simulation=2.0, evaluation=1.0)
    watch.tick(10)
    report = watch.report(tmp_path / "stages.json")
    assert report["sps_steady"] is None and report["warmup_seconds"] is None
    assert (report["env_steps"], report["iterations"], report["seconds"]) == (10, 1, 2.0)
    assert mode == "off" or report["stages"]["simulation"] == 2.0


class FakeEvent:
    """A CUDA event on the fake clock, which completes when the class is told so."""

    clock, done = None, True

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.clock.now

    def elapsed_time(self, last):
        assert self.done and last.done
        return 1e3 * (last.at - self.at)


def test_cuda_sampling_with_a_fake_cuda(clock, monkeypatch, tmp_path):
    asked, waits = [], []
    FakeEvent.clock = clock
    fakes = dict(Event=FakeEvent, utilization=lambda: asked.append(clock.now) or 40)
    fakes |= dict(synchronize=lambda: waits.append(setattr(FakeEvent, "done", True)))
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    watch = Stopwatch(torch.device("cuda"))
    clock.now += 1.0
    watch.tick(0)
    waited = len(waits)
    for step in range(4 * 61):
        FakeEvent.done = False  # until the window is closed with a synchronization
        with watch.stage("inference"):
            clock.now += 0.5 if step % 61 == 0 else 0.25  # what is sampled can be told apart
            with watch.stage("replay"):
                clock.now += 0.25
        watch.tick(step + 1)
    assert len(waits) == waited, "the loop waited for the device"
    gaps = {later - sooner for sooner, later in pairwise([101.0, *asked])}
    assert gaps <= {1.0, 1.25}, "once a second"
    report = watch.report(tmp_path / "stages.json")
    assert report["stages"]["inference"] == 4 * 61 * 0.25 + 4 * 0.25
    # the mean of the samples, of all iterations; a stage inside of another one pauses it here too
    assert report["gpu_stages"]["inference"] == pytest.approx(4 * 61 * 0.5)
    assert report["gpu_stages"]["replay"] == pytest.approx(4 * 61 * 0.25)
    assert report["nvml_percent"] == [(at - 100.0, 40) for at in asked]
    assert [at + 100.0 for at, _ in report["cpu_seconds"]] == [101.0, *asked, clock.now]


def test_the_clock_is_read_when_the_device_has_done_its_work(clock, monkeypatch, tmp_path):
    """What is queued is part of every measurement: of a row, of the warm-up and of the report."""
    queued = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "clock", clock)
    monkeypatch.setattr(FakeEvent, "done", True)

    def synchronize():
        clock.now += sum(queued)
        queued.clear()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    watch = Stopwatch(torch.device("cuda"), warmup_steps=10)

    def launch(seconds):
        with watch.stage("backpropagation"):
            clock.now += 1.0
            queued.append(seconds)

    launch(4.0)
    with watch.stage("logging"):
        row = watch.measure(5)
    assert row["sps"] == 5 / 5 and row["seconds"] == 5.0
    assert row["stages"] == {"untracked": 0.0, "backpropagation": 1.0, "logging": 4.0}
    launch(6.0)
    watch.tick(10)
    assert watch.warmup_seconds == 12.0 and not queued
    launch(7.0)
    watch.tick(26)
    assert watch.measure(26)["sps_steady"] == 16 / 8
    launch(8.0)
    report = watch.report(tmp_path / "stages.json")
    assert report["seconds"] == 17.0 and report["wall_seconds"] == 29.0 and report["sps"] == 26 / 29


@pytest.mark.parametrize(("per_iteration", "every"), [(3, 10), (4, 6), (1, 7), (8, 5), (5, 5)])
def test_what_is_due_is_due_once_per_multiple(per_iteration, every):
    """Also where the steps of an iteration do not divide it, and from any step of a resumed run."""
    run = SimpleNamespace(steps_per_iteration=per_iteration, total_steps=per_iteration * 40)
    for start in (0, per_iteration * 3):
        for step in range(start + per_iteration, run.total_steps, per_iteration):
            run.step, passed = step, step // every > (step - per_iteration) // every
            assert Run.due(run, every) == Run.due(run, every, at_end=True) == passed, step
            assert not Run.due(run, 0) and not Run.due(run, 0, at_end=True)
    run.step = run.total_steps
    assert [Run.due(run, *asked) for asked in ((0, False), (0, True), (every, False))] == [0, 1, 1]


# A trace


@pytest.mark.parametrize("iterations", [2, 6, 30])
def test_a_trace_holds_whole_iterations(iterations, tmp_path):
    """After 3 iterations of the window and 1 for the profiler's start, 5 are traced."""
    watch = Stopwatch(CPU, "trace", trace_after=3, trace_iterations=5)
    for step in range(1, iterations + 1):
        with watch.stage("inference"), watch.stage("replay"):
            torch.ones(1) + 1
        watch.tick(10 * step)
    report = watch.report(tmp_path / "stages_7.json")
    assert not torch.autograd._profiler_enabled()  # an interrupted window closed its profiler
    assert report["sps_steady"] > 0 and report["warmup_seconds"] > 0
    assert report["iterations"] == min(iterations - 1, 3) == report["env_steps"] / 10
    (begin, _), *_, (end, _) = report["cpu_seconds"]  # until the trace begins
    assert end - begin == pytest.approx(report["seconds"])
    if iterations == 2:  # the trace had not begun
        assert len(list(tmp_path.iterdir())) == 1
        return
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = Counter(
        e["name"].partition("#")[0] for e in events if e.get("cat") == "user_annotation"
    )
    whole = 5 if iterations == 30 else 1  # or as many as there were
    assert names["stopwatch:inference"] == names["stopwatch:replay"] == whole
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    adds = [event["ts"] for event in events if event["name"] == "aten::add"]
    for step in steps[:whole]:
        assert sum(step["ts"] < at < step["ts"] + step["dur"] for at in adds) == 1


def test_ctrl_c_while_the_trace_is_written_leaves_the_report(tmp_path):
    def interrupted(path):
        assert json.loads((tmp_path / "stages.json").read_text())["iterations"] == 1
        raise KeyboardInterrupt

    watch = Stopwatch(CPU, "trace", trace_after=1, trace_iterations=1)
    for step in range(1, 5):
        watch.tick(step)
    watch.profiler.export_chrome_trace = interrupted
    with pytest.raises(KeyboardInterrupt):
        watch.report(tmp_path / "stages.json")


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt(), ValueError("theirs")], ids=repr)
def test_a_failing_record_names_its_own_reason_and_not_what_ended_the_run(ended_by):
    with pytest.raises(SystemExit) as error:
        try:
            raise ended_by
        except type(ended_by):
            with stopwatch.one_line("stages.json"):
                raise OSError("mine")  # noqa: B904
    assert error.value.code == "stages.json: mine"


def test_a_process_that_dies_does_not_interrupt_what_must_not_be():
    """In the middle of TensorBoard's queue the lock would stay locked, and the run hang."""

    def dies(number, frame):
        raise SystemExit("the collector died")

    before = signal.signal(signal.SIGCHLD, dies)
    done = []
    try:
        with pytest.raises(SystemExit, match="the collector died"), stopwatch.undisturbed():
            signal.raise_signal(signal.SIGCHLD)
            done.append("a write")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert done


# Stamping


SCRIPT = (
    b"import time\n\n\n"
    + stopwatch.OPENING
    + b"old = 1\n"
    + stopwatch.CLOSING
    + b"\n\nprint(time)\n"
)


@pytest.fixture
def folder(tmp_path):
    """A directory with stopwatch.py and two scripts that carry an old region."""
    shutil.copy(stopwatch.__file__, tmp_path / "stopwatch.py")
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_bytes(SCRIPT)
    (tmp_path / "sweep.py").write_text("print('carries no region')\n")
    return tmp_path


def test_stamping_makes_every_region_the_same_and_touches_nothing_else(folder, capsys):
    assert stopwatch.main(["--check"], folder) == 1
    assert "a.py: differs" in capsys.readouterr().out
    assert stopwatch.main(["--stamp"], folder) == 0
    assert "a.py: stamped\nb.py: stamped" in capsys.readouterr().out
    stamped = (folder / "a.py").read_bytes()
    source = (folder / "stopwatch.py").read_bytes()
    begin, end = stopwatch.find_region(source)
    assert stamped == b"import time\n\n\n" + source[begin:end] + b"\n\nprint(time)\n"
    assert stopwatch.main(["--check"], folder) == 0
    assert stopwatch.main(["--stamp"], folder) == 0
    assert (folder / "a.py").read_bytes() == stamped
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.py",
        "b.py",
        "stopwatch.py",
        "sweep.py",
    ]


def test_check_names_the_script_of_which_a_byte_changed(folder, capsys):
    stopwatch.main(["--stamp"], folder)
    content = (folder / "b.py").read_bytes()
    (folder / "b.py").write_bytes(content.replace(b"iterations % 61", b"iterations % 64"))
    capsys.readouterr()
    assert stopwatch.main(["--check"], folder) == 1
    assert capsys.readouterr().out == "a.py: same\nb.py: differs\n"


@pytest.mark.parametrize(
    "content",
    [
        b"print('no fence at all')\n",
        SCRIPT + SCRIPT,
        SCRIPT.replace(stopwatch.CLOSING, b""),
        SCRIPT.replace(stopwatch.OPENING, b""),
        stopwatch.CLOSING + stopwatch.OPENING,
        SCRIPT.replace(b">>>\n", b">>> \n"),
    ],
)
def test_broken_fences_are_named_and_left_alone(folder, content, capsys):
    (folder / "b.py").write_bytes(content)
    for action in ("--check", "--stamp"):
        assert stopwatch.main([action], folder) == 1
        assert "b.py: broken" in capsys.readouterr().out
    assert (folder / "b.py").read_bytes() == content
    assert stopwatch.stamp(folder)[folder / "a.py"] == "same"  # the sound one was stamped


def test_a_failing_write_leaves_the_old_script_and_no_litter(folder, monkeypatch):
    def fail(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(stopwatch.os, "replace", fail)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(OSError, match="disk full"):
        stopwatch.stamp(folder)
    assert (folder / "a.py").read_bytes() == SCRIPT
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_stamped_script_runs_alone(folder):
    stopwatch.stamp(folder)
    needs = "from collections import Counter\nfrom contextlib import contextmanager, nullcontext\n"
    needs += (
        "from time import perf_counter\nimport signal\nimport torch\n"  # of all imports of a script
    )
    scope = {}
    exec(needs + (folder / "a.py").read_text().replace("print(time)", ""), scope)
    watch = scope["Stopwatch"](CPU)
    with watch.stage("replay"):
        pass
    assert watch.seconds["replay"] > 0


def test_every_script_of_this_repository_carries_the_region(capsys):
    assert stopwatch.main(["--check"]) == 0, capsys.readouterr().out
