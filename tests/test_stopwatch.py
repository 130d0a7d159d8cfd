"""The stopwatch: what it counts, and that all scripts carry it alike."""

import gzip
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import traces
from helpers import CPU

from leanrl import stopwatch
from leanrl.stopwatch import Run, Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves `clock.now`."""
    fake = SimpleNamespace(now=100.0)
    monkeypatch.setattr(stopwatch, "perf_counter", lambda: fake.now)
    return fake


def spend(watch, clock, **seconds):
    """Let each named stage take its seconds, one after the other."""
    for name, duration in seconds.items():
        watch.stage(name)
        clock.now += duration


# Counting


def test_stage_ends_at_the_next_or_the_tick(clock):
    watch = Stopwatch(CPU)
    clock.now += 1.0
    watch.tick(1)  # without a warm-up the first tick begins the window
    spend(watch, clock, backpropagation=1.0, replay=4.0, simulation=8.0)
    spend(watch, clock, backpropagation=2.0, planning=0.5)  # a name is enough for another stage
    watch.tick(2)
    clock.now += 16.0
    watch.tick(3)
    assert watch.measure()["stages"] == {
        "untracked": 16.0,
        "backpropagation": 3.0,
        "replay": 4.0,
        "simulation": 8.0,
        "planning": 0.5,
    }


def test_steady_window(clock):
    watch = Stopwatch(CPU, warmup_steps=20)
    for step in (10, 20):  # the tick that reaches 20 ends the warm-up
        spend(watch, clock, simulation=5.0, evaluation=30.0)
        assert watch.measure()["sps_steady"] is None
        watch.tick(step)
    for step in (30, 40, 50):
        spend(watch, clock, simulation=2.0, checkpoint=1.0, evaluation=100.0)
        watch.tick(step)
        clock.now += 1.0
    assert watch.measure()["sps"] == pytest.approx(50 / 382)
    assert watch.measure()["sps_steady"] == pytest.approx(30 / 12)
    spend(watch, clock, evaluation=50.0)  # after the last tick
    assert watch.measure() == {
        "sps": 50 / 432,
        "sps_steady": 30 / 12,
        "warmup_seconds": 10.0,
        "wall_seconds": 432.0,
        "env_steps": 30,
        "iterations": 3,
        "seconds": 12.0,
        "stages": dict(simulation=6.0, checkpoint=3.0, untracked=3.0, evaluation=350.0),
        "gpu_stages": {},  # not measured, never 0
    }


def test_warm_up_without_end(clock):
    watch = Stopwatch(CPU, warmup_steps=1000)
    spend(watch, clock, simulation=2.0)
    assert watch.measure()["sps"] == watch.measure()["env_steps"] == 0
    spend(watch, clock, evaluation=1.0)
    watch.tick(10)
    report = watch.measure()
    assert report["sps_steady"] is report["warmup_seconds"] is None
    assert (report["env_steps"], report["iterations"], report["seconds"]) == (10, 1, 2.0)
    assert report["stages"]["simulation"] == 2.0


class FakeEvent:
    """A CUDA event on the fake clock, which completes when the device is waited for."""

    clock, done = None, True

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.clock.now

    def elapsed_time(self, last):
        assert self.done and last.done
        return 1e3 * (last.at - self.at)


@pytest.fixture
def fake_cuda(clock, monkeypatch):
    """Its queue of seconds of work, which `synchronize` waits for and notes."""
    cuda = SimpleNamespace(queue=[], waits=0)

    def synchronize():
        clock.now += sum(cuda.queue)
        cuda.queue.clear()
        cuda.waits += 1
        FakeEvent.done = True

    monkeypatch.setattr(FakeEvent, "clock", clock)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return cuda


def test_gpu_samples(clock, fake_cuda):
    watch = Stopwatch(torch.device("cuda"))
    clock.now += 1.0
    watch.tick(0)
    waits = fake_cuda.waits
    for step in range(4 * 61):
        FakeEvent.done = False
        watch.stage("inference")
        clock.now += 0.5 if step % 61 == 0 else 0.25  # what is sampled can be told apart
        watch.stage("replay")
        clock.now += 0.25
        watch.tick(step + 1)
        assert len(watch.events) <= 3
    assert fake_cuda.waits == waits + 4, "only samples wait for the device"
    report = watch.measure()
    assert report["stages"]["inference"] == 4 * 61 * 0.25 + 4 * 0.25
    # the mean of the samples, of all iterations
    assert report["gpu_stages"] == pytest.approx({"inference": 4 * 61 * 0.5, "replay": 61.0})


def test_queued_work_counts(clock, fake_cuda):
    """What is queued is part of every measurement: of a row, of the warm-up and of the report."""
    watch = Stopwatch(torch.device("cuda"), warmup_steps=10)

    def launch(seconds):
        watch.stage("backpropagation")
        clock.now += 1.0
        fake_cuda.queue.append(seconds)

    launch(4.0)
    watch.stage("logging")
    row = watch.measure()
    assert row["seconds"] == 5.0
    assert row["stages"] == {"untracked": 0.0, "backpropagation": 1.0, "logging": 4.0}
    launch(6.0)
    watch.tick(10)
    assert watch.warmup_seconds == 12.0 and not fake_cuda.queue
    launch(7.0)
    watch.tick(26)
    assert watch.measure()["sps_steady"] == 16 / 8
    launch(8.0)
    report = watch.measure()
    assert report["seconds"] == 17.0 and report["wall_seconds"] == 29.0 and report["sps"] == 26 / 29


@pytest.mark.parametrize(("per_iteration", "every"), [(3, 10), (4, 6), (1, 7), (8, 5), (5, 5)])
def test_due_once_per_multiple(per_iteration, every):
    """Also where the steps of an iteration do not divide it, and from any step of a resumed run."""
    run = SimpleNamespace(steps_per_iteration=per_iteration, ending=False)
    for start in (0, per_iteration * 3):
        for step in range(start + per_iteration, per_iteration * 40, per_iteration):
            run.step, passed = step, step // every > (step - per_iteration) // every
            assert Run.due(run, every) == Run.due(run, every, at_end=True) == passed, step
            assert not Run.due(run, 0) and not Run.due(run, 0, at_end=True)
    run.ending = True
    assert [Run.due(run, *asked) for asked in ((0, False), (0, True), (every, False))] == [0, 1, 1]


# A trace


@pytest.mark.parametrize(("iterations", "traced"), [(6, 1), (30, 5)])
def test_trace_holds_whole_iterations(iterations, traced, tmp_path):
    """After 3 of the window and 1 for the profiler's start, 5 or as many as there are."""
    watch = Stopwatch(CPU, trace=True, trace_after=3, trace_iterations=5)
    for step in range(1, iterations + 1):
        watch.stage("inference")
        watch.stage("replay")
        torch.ones(1) + 1
        watch.tick(10 * step)
    report = watch.measure()
    assert report["sps_steady"] > 0 and report["warmup_seconds"] > 0
    assert report["iterations"] == report["env_steps"] / 10 == 3
    watch.profiler.stop()
    watch.profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("stopwatch:inference") == names.count("stopwatch:replay") == traced
    assert traces.layer_of("user_annotation", "stopwatch:untracked") is None  # no stage
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    adds = [event["ts"] for event in events if event["name"] == "aten::add"]
    for step in steps[:traced]:
        assert sum(step["ts"] < at < step["ts"] + step["dur"] for at in adds) == 1


def test_trace_that_has_not_begun():
    watch = Stopwatch(CPU, trace=True, trace_after=3)
    watch.tick(10)
    watch.tick(20)
    assert watch.profiler is None
    assert watch.measure()["iterations"] == 1 and watch.measure()["sps_steady"] > 0


# Stamping

BEFORE = b"import time\n\n\n"
AFTER = b"\n\nprint(time)\n"
SCRIPT = BEFORE + stopwatch.OPENING + b"old = 1\n" + stopwatch.CLOSING + AFTER


@pytest.fixture
def folder(tmp_path):
    """A directory with stopwatch.py, two scripts that carry an old region, and one without any."""
    shutil.copy(stopwatch.__file__, tmp_path)
    (tmp_path / "a.py").write_bytes(SCRIPT)
    (tmp_path / "b.py").write_bytes(SCRIPT)
    (tmp_path / "sweep.py").touch()
    return tmp_path


def test_stamp_makes_regions_the_same(folder, capsys):
    assert stopwatch.main(["--stamp"], folder) == 0
    source = (folder / "stopwatch.py").read_bytes()
    begin, end = stopwatch.find_region(source)
    stamped = BEFORE + source[begin:end] + AFTER
    assert (folder / "a.py").read_bytes() == (folder / "b.py").read_bytes() == stamped
    assert stopwatch.main(["--check"], folder) == 0
    (folder / "b.py").write_bytes(stamped.replace(b"iterations % 61", b"iterations % 64"))
    assert stopwatch.main(["--check"], folder) == 1
    assert capsys.readouterr().out.endswith("a.py: same\nb.py: differs\n")


@pytest.mark.parametrize("fences", [b"", 2 * SCRIPT, stopwatch.CLOSING + stopwatch.OPENING])
def test_broken_fences_are_left_alone(folder, fences, capsys):
    (folder / "b.py").write_bytes(fences)
    assert stopwatch.main(["--stamp"], folder) == 1
    assert "a.py: stamped\nb.py: broken" in capsys.readouterr().out
    assert (folder / "b.py").read_bytes() == fences


def test_scripts_carry_the_region(capsys):
    assert stopwatch.main(["--check"]) == 0, capsys.readouterr().out
