"""The stopwatch: what it counts, and that all scripts carry it alike."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from leanrl import stopwatch  # noqa: E402
from leanrl.stopwatch import STAGES, Stopwatch, table  # noqa: E402

CPU = torch.device("cpu")
ALL = (*STAGES, "untracked")


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves `clock.now` (seconds)."""
    fake = SimpleNamespace(now=100.0)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: fake.now))
    return fake


def spend(watch, clock, **seconds):
    """Let each named stage take its seconds, one after the other."""
    for name, duration in seconds.items():
        with watch.stage(name):
            clock.now += duration


# Counting


def test_nested_stages_keep_self_time(clock, capsys):
    watch = Stopwatch(CPU)
    watch.tick(1)
    with watch.stage("backpropagation"):
        clock.now += 1.0
        with watch.stage("replay"):
            clock.now += 4.0
            with watch.stage("simulation"):
                clock.now += 8.0
        clock.now += 2.0
    clock.now += 16.0
    watch.tick(2)
    stages = watch.report()["stages"]
    seconds = {name: stage["seconds"] for name, stage in stages.items()}
    spent = dict(simulation=8, replay=4, backpropagation=3, untracked=16)
    assert seconds == pytest.approx(dict.fromkeys(ALL, 0) | spent)
    assert [stages[name]["count"] for name in STAGES] == [1, 0, 1, 1, 0, 0, 0]


def test_an_exception_closes_the_stages_it_leaves(clock, capsys):
    watch = Stopwatch(CPU)
    watch.tick(1)
    with pytest.raises(KeyboardInterrupt), watch.stage("inference"), watch.stage("replay"):
        clock.now += 3.0
        raise KeyboardInterrupt
    spend(watch, clock, logging=5.0)
    clock.now += 7.0
    watch.tick(2)
    stages = watch.report()["stages"]
    assert watch.current is watch.untracked
    assert stages["inference"]["seconds"] == pytest.approx(0.0)
    assert stages["replay"]["seconds"] == pytest.approx(3.0)
    assert stages["logging"]["seconds"] == pytest.approx(5.0)
    assert stages["untracked"]["seconds"] == pytest.approx(7.0)


def test_a_stage_inside_itself_and_an_unknown_stage_are_errors(clock):
    watch = Stopwatch(CPU)
    with pytest.raises(RuntimeError, match="'replay' is open"), watch.stage("replay"):
        with watch.stage("replay"):
            pass
    spend(watch, clock, replay=1.0)
    for mode in ("off", "time"):
        with pytest.raises(KeyError, match="training"):
            Stopwatch(CPU, mode).stage("training")
    with pytest.raises(ValueError, match="off, time or trace"):
        Stopwatch(CPU, "fast")


def test_stage_hands_out_one_object_again_and_again():
    for mode in ("off", "time"):
        watch = Stopwatch(CPU, mode)
        assert watch.stage("replay") is watch.stage("replay")


def test_the_warm_up_is_left_out_of_the_steady_window(clock, capsys):
    watch = Stopwatch(CPU, warmup_steps=20)
    for step in (10, 20):  # the tick that reaches 20 ends the warm-up
        assert watch.steady_sps() is None
        spend(watch, clock, simulation=50.0)
        watch.tick(step)
    assert watch.steady_sps() is None
    for step in (30, 40, 50):
        spend(watch, clock, simulation=1.0, inference=3.0)
        clock.now += 1.0
        watch.tick(step)
    assert watch.steady_sps() == pytest.approx(30 / 15)
    assert watch.inclusive_sps() == pytest.approx(50 / 115)
    report = watch.report()
    assert report["sps_steady"] == pytest.approx(30 / 15)
    assert report["sps_inclusive"] == pytest.approx(50 / 115)
    assert report["warmup_seconds"] == pytest.approx(100.0)
    assert report["wall_seconds"] == pytest.approx(115.0)
    assert report["window"] == dict(steady=True, seconds=15.0, env_steps=30, iterations=3)
    assert report["stages"]["simulation"] == dict(seconds=3.0, count=3, gpu_span_seconds=None)
    assert report["stages"]["inference"]["seconds"] == pytest.approx(9.0)
    assert report["stages"]["untracked"]["seconds"] == pytest.approx(3.0)


@pytest.mark.parametrize("mode", ["off", "time"])
def test_evaluation_counts_for_neither_the_window_nor_the_warm_up(mode, clock, capsys):
    watch = Stopwatch(CPU, mode, warmup_steps=20)
    for step in (10, 20):
        spend(watch, clock, simulation=5.0, evaluation=30.0)
        watch.tick(step)
    for step in (30, 40, 50):
        spend(watch, clock, simulation=2.0, checkpoint=1.0, evaluation=100.0)
        clock.now += 1.0
        watch.tick(step)
    assert watch.steady_sps() == pytest.approx(30 / 12)
    with watch.stage("evaluation"):  # after the last tick, as on Ctrl-C
        clock.now += 50.0
    report = watch.report()
    assert report["sps_steady"] == pytest.approx(30 / 12)
    assert report["warmup_seconds"] == pytest.approx(10.0)
    assert report["window"]["seconds"] == pytest.approx(12.0)
    assert report["wall_seconds"] == pytest.approx(70.0 + 312.0 + 50.0)
    if mode == "time":
        spent = dict(simulation=6.0, checkpoint=3.0, untracked=3.0, evaluation=350.0)
        seconds = {name: stage["seconds"] for name, stage in report["stages"].items()}
        assert seconds == pytest.approx(dict.fromkeys(ALL, 0.0) | spent)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["checkpoint", "3", "25", "100,000", "3"] in lines  # of the window alone
        assert ["total", "12"] in lines
        assert ["evaluation", "350", "not", "in", "the", "total"] in lines
        assert "replay" not in [line[0] for line in lines], "a stage that nothing entered"


def test_work_after_the_last_tick_does_not_slow_the_steady_sps(clock, capsys):
    watch = Stopwatch(CPU)
    for step in (0, 10):
        clock.now += 1.0
        watch.tick(step)
    clock.now += 1000.0
    assert watch.report()["sps_steady"] == pytest.approx(10.0)


def test_a_run_that_never_leaves_its_warm_up_reports_what_it_did(clock, capsys):
    watch = Stopwatch(CPU, warmup_steps=1000)
    spend(watch, clock, simulation=2.0)
    watch.tick(1)
    report = watch.report()
    assert report["sps_steady"] is None and report["warmup_seconds"] is None
    assert report["window"]["steady"] is False
    assert report["stages"]["simulation"]["seconds"] == pytest.approx(2.0)
    assert "the warm-up did not end" in capsys.readouterr().out


def test_a_report_without_any_tick(clock, capsys):
    clock_free = Stopwatch(CPU)
    clock.now += 1.0
    report = clock_free.report()
    assert report["sps_steady"] is None and report["sps_inclusive"] == 0.0


def test_off_mode_counts_steps_only(clock, capsys):
    watch = Stopwatch(CPU, "off")
    for step in (0, 10, 20):
        with watch.stage("simulation"), watch.stage("simulation"):
            clock.now += 2.0
        watch.tick(step)
    report = watch.report()
    assert report["sps_steady"] == pytest.approx(20 / 4)
    assert report["stages"] == {} and report["overhead_pct"] == 0 and report["trace"] is None


def test_the_calibrated_cost_is_subtracted_from_stage_and_parent(monkeypatch, capsys):
    ticks = iter(range(10**9))  # a clock that takes a second per look: the only cost there is
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    watch = Stopwatch(CPU)
    assert watch.cost == pytest.approx((1.0, 1.0), rel=0.01)
    watch.tick(0)
    for step in range(1, 101):
        with watch.stage("simulation"):
            pass
        watch.tick(step)
    report = watch.report()
    assert report["stages"]["simulation"]["seconds"] == pytest.approx(0.0, abs=1e-6)
    assert report["stages"]["untracked"]["seconds"] < 10  # of the 200 that stages and ticks took
    assert report["overhead_pct"] > 90


def test_the_calibration_is_plausible_and_leaves_no_trace_in_the_counters(capsys):
    watch = Stopwatch(CPU)
    assert 0 < sum(watch.cost) < 1e-4  # far above any machine's, far below a mistake
    watch.tick(1)
    report = watch.report()
    assert all(report["stages"][name]["count"] == 0 for name in STAGES)
    assert report["overhead_pct"] >= 0


def test_report_has_the_schema_and_survives_json(capsys):
    watch = Stopwatch(CPU)
    for step in range(3):
        with watch.stage("simulation"):
            pass
        watch.tick(step)
    report = watch.report()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["schema"] == 1 and report["mode"] == "time" and report["trace"] is None
    assert {"sps_steady", "sps_inclusive", "warmup_seconds", "wall_seconds"} < set(report)
    assert set(report["stages"]) == set(ALL)
    for stage in report["stages"].values():
        assert set(stage) == {"seconds", "count", "gpu_span_seconds"}
        assert stage["gpu_span_seconds"] is None  # never 0 without a GPU
    fields = "nvml_util", "nvml_samples", "sm_util", "memory_peak_bytes"
    assert report["gpu"] == dict.fromkeys(fields)
    again = watch.report()
    assert again["stages"] == report["stages"] and again["sps_steady"] == report["sps_steady"]


class FakeEvent:
    """A CUDA event on the fake clock, which completes when the class is told so."""

    clock, done = None, True

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.clock.now
        self.clock.now += 2**-10  # what the call itself costs is no stage's time

    def query(self):
        return self.done

    def elapsed_time(self, last):
        assert self.done and last.done
        return 1e3 * (last.at - self.at)


def test_cuda_sampling_with_a_fake_cuda(clock, monkeypatch, capsys):
    asked = []
    FakeEvent.clock = clock
    fakes = dict(Event=FakeEvent, synchronize=lambda device: setattr(FakeEvent, "done", True))
    fakes |= dict(utilization=lambda device: asked.append(clock.now) or 40)
    fakes |= dict(max_memory_allocated=lambda device: 2**30)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    watch = Stopwatch(torch.device("cuda"))
    for step in range(256):  # after 0, 64, 128 and 192 an iteration is sampled
        FakeEvent.done = False  # until the window is closed with a synchronization
        with watch.stage("inference"):
            clock.now += 0.25
            with watch.stage("replay"):
                clock.now += 0.25
        watch.tick(step)
    assert len(asked) == 3, "asked on a sampled iteration, but not twice within a second"
    assert watch.own.seconds == pytest.approx(16 * 2**-10)
    report = watch.report()
    assert report["stages"]["inference"]["seconds"] == pytest.approx(255 * 0.25)
    spans = {name: stage["gpu_span_seconds"] for name, stage in report["stages"].items()}
    assert spans["inference"] == pytest.approx(255 * 0.5, rel=0.01)
    assert spans["replay"] == pytest.approx(255 * 0.25, rel=0.01)
    assert spans["simulation"] is None and spans["untracked"] is None
    samples = [(seconds, 40) for seconds in (33.0, 65.0, 97.0)]
    gpu = dict(nvml_util=40, nvml_samples=samples, sm_util=None, memory_peak_bytes=2**30)
    assert report["gpu"] == gpu
    assert "GPU us" in capsys.readouterr().out


# A trace window


@pytest.mark.parametrize("iterations", [2, 6])
def test_a_run_that_ends_before_its_trace_says_so(iterations, capsys):
    watch = Stopwatch(CPU, "trace", trace_after=3, trace_iterations=5)
    for step in range(1, iterations + 1):
        with watch.stage("inference"):
            torch.ones(1) + 1
        watch.tick(step)
    report = watch.report()
    assert report["trace"] is None and report["sps_steady"] > 0
    assert "ended before the trace window" in capsys.readouterr().out
    assert not torch.autograd._profiler_enabled()  # the interrupted window closed its profiler


def test_the_widest_table_fits_80_columns():
    stage = dict(seconds=98765.432, count=10**8, gpu_span_seconds=98765.432)
    report = dict(
        mode="trace", sps_steady=1e7, sps_inclusive=1e7, warmup_seconds=1e5, overhead_pct=0.1
    )
    report |= dict(window=dict(steady=True, seconds=1e5, env_steps=10**5, iterations=10))
    report |= dict(
        stages=dict.fromkeys(ALL, stage),
        gpu=dict(nvml_util=99.0, sm_util=3.0, memory_peak_bytes=10**11),
    )
    report |= dict(trace=None)
    lines = table(report).splitlines()
    assert max(map(len, lines)) <= 80
    text = "".join(lines)
    assert all(word in text for word in ("GPU us", "GPU util. %"))
    assert all(" " in line for line in lines)


def test_the_table_shows_seconds_share_and_time_per_step(clock, capsys):
    watch = Stopwatch(CPU)
    for step in range(11):  # the first tick ends the warm-up
        spend(watch, clock, simulation=1.0, backpropagation=3.0)
        watch.tick(2 * step)
    watch.report()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["stage", "seconds", "share", "%", "us/step", "entries"] in lines
    assert ["simulation", "10", "25", "500,000", "10"] in lines
    assert ["backpropagation", "30", "75", "1.5e+06", "10"] in lines
    assert ["total", "40"] in lines and ["steady", "steps/s", "0.5"] in lines


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
    (folder / "b.py").write_bytes(
        content.replace(b"GPU_SAMPLE_EVERY = 64", b"GPU_SAMPLE_EVERY = 65")
    )
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
    script = (folder / "a.py").read_text()
    scope = {}
    exec(compile(script.replace("print(time)", ""), "a.py", "exec"), scope)
    watch = scope["Stopwatch"](CPU)
    with watch.stage("replay"):
        watch.clock()
    assert watch.stages["replay"].count == 1


def test_every_script_of_this_repository_carries_the_region():
    command = [sys.executable, stopwatch.__file__, "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
