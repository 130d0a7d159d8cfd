"""The stopwatch: what it counts, how it reduces a trace, and that all scripts carry it alike."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from leanrl import stopwatch  # noqa: E402
from leanrl.stopwatch import STAGES, TRACE_PREFIX, Stopwatch, reduce_trace, table  # noqa: E402

CPU = torch.device("cpu")
ALL = (*STAGES, "untracked")
CPU_PARTS = ("cuda_wait_s", "cuda_launch_s", "backend_s", "python_s", "simulator_s")


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


# Traces


class Event:
    """What reduce_trace asks of a Kineto event, as torch 2.11 offers it; times in ns."""

    def __init__(self, activity, name, start, end, correlation=0, thread=1):
        self.activity = activity
        self.on_gpu = activity in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
        values = dict(name=name, start_ns=start, duration_ns=end - start)
        values |= dict(correlation_id=correlation, start_thread_id=thread)
        values |= dict(is_user_annotation=activity in ("user_annotation", "gpu_user_annotation"))
        types = torch.autograd.DeviceType
        values |= dict(device_type=types.CUDA if self.on_gpu else types.CPU)
        for method, value in values.items():
            setattr(self, method, lambda value=value: value)


class NewEvent(Event):
    """The same from torch 2.12 on."""

    def activity_type(self):
        return self.activity


def note(stage, start, end):
    return "user_annotation", TRACE_PREFIX + stage, start, end


def op(name, start, end, **more):
    return ("cpu_op", name, start, end, *more.values())


WINDOW = [
    note("untracked", 0, 1000),
    note("simulation", 100, 300),
    note("backpropagation", 400, 800),
]
EVERYTHING = [
    *WINDOW,
    ("gpu_user_annotation", TRACE_PREFIX + "backpropagation", 500, 990),
    ("user_annotation", "Optimizer.step#Adam.step", 600, 700),
    ("cpu_op", "aten::mm", 410, 500, 7),  # operator ids 7 and 8 collide with API ids
    ("cpu_op", "aten::empty", 420, 440, 8),
    ("cuda_runtime", "cudaLaunchKernel", 450, 470, 7),
    ("cuda_runtime", "cudaGraphLaunch", 510, 530, 8),
    ("cuda_driver", "cuLaunchKernelEx", 540, 550, 9),
    ("overhead", "Activity Buffer Request", 455, 465),
    ("cuda_runtime", "cudaMemcpyAsync", 560, 590, 10),
    ("cuda_runtime", "cudaStreamSynchronize", 700, 790, 11),
    ("kernel", "gemm", 480, 560, 7),
    ("kernel", "graph_a", 540, 600, 8),
    ("kernel", "graph_b", 580, 620, 8),
    ("kernel", "graph_c", 580, 620, 8),
    ("kernel", "triton", 640, 650, 9),
    ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 660, 680, 10),
    ("gpu_memset", "Memset (Device)", 820, 840, 7),
]


def reduced(events, kind=NewEvent, iterations=2, env_steps=4, untraced=1e-7):
    return reduce_trace([kind(*event) for event in events], iterations, env_steps, untraced)


def ns(trace, stage, field):
    return pytest.approx(trace["stages"][stage][field] * 1e9, abs=1e-3)


@pytest.mark.parametrize("kind", [Event, NewEvent])
def test_a_trace_of_everything(kind):
    trace = reduced(EVERYTHING, kind)
    update = {
        f: round(v * 1e9) if f.endswith("_s") else v
        for f, v in trace["stages"]["backpropagation"].items()
    }
    assert update == dict(
        cuda_wait_s=30 + 90,  # the copy to pageable memory blocks
        cuda_launch_s=10 + 20 + 10,
        backend_s=90 - 20,
        python_s=400 - 10 - 120 - 40 - 70,
        simulator_s=0,
        gpu_s=(620 - 480) + 10 + 20 + 20,  # unions; the memset runs after the stage but is its work
        gpu_overlap_s=140 + 10 + 20,
        gpu_with_cuda_wait_s=10 + 20,
        gpu_with_cuda_launch_s=20 + 10,
        gpu_with_backend_s=20,
        gpu_with_python_s=10 + 10 + 30 + 20 + 10 + 10,
        gpu_with_simulator_s=0,
        backend_calls=1,
        cuda_api_calls=5,
        kernel_launches=2,
        graph_replays=1,
        kernels=5,
    )
    assert 0 == ns(trace, "simulation", "python_s") and 200 == ns(
        trace, "simulation", "simulator_s"
    )
    assert 20 == ns(trace, "untracked", "gpu_overlap_s") and 0 == ns(trace, "untracked", "gpu_s")
    assert trace["gpu_busy"] == pytest.approx((140 + 10 + 20 + 20) / 1000)
    assert trace["inflation"] == pytest.approx((1000 - 10) / 2 / 100)
    assert (trace["iterations"], trace["env_steps"]) == (2, 4)


@pytest.mark.parametrize("kind", [Event, NewEvent])
def test_the_parts_of_every_stage_add_up_to_its_self_time(kind):
    trace = reduced([*EVERYTHING, ("cpu_op", "aten::add", 250, 450, 1, 2)], kind)
    own = dict(simulation=200, backpropagation=400 - 10, untracked=400)  # without Kineto's
    for stage in ALL:
        total = sum(trace["stages"][stage][part] for part in CPU_PARTS)
        assert total * 1e9 == pytest.approx(own.get(stage, 0), abs=1e-3), stage


def test_the_innermost_stage_owns_the_time_and_the_calls():
    inner = [note("replay", 500, 600), note("logging", 500, 520), note("inference", 600, 800)]
    calls = [
        op("aten::a", 450, 550),
        op("aten::b", 505, 510, c=0, thread=2),
        op("aten::c", 610, 620),
    ]
    trace = reduced([*WINDOW, *inner, *calls])
    assert 50 == ns(trace, "backpropagation", "backend_s") and 50 == ns(
        trace, "backpropagation", "python_s"
    )
    assert 20 == ns(trace, "logging", "backend_s") and 0 == ns(trace, "logging", "python_s")
    assert 30 == ns(trace, "replay", "backend_s") and 50 == ns(trace, "replay", "python_s")
    assert 190 == ns(trace, "inference", "python_s")
    calls = {stage: trace["stages"][stage]["backend_calls"] for stage in ALL}
    assert calls == dict.fromkeys(ALL, 0) | dict(inference=1, backpropagation=1, logging=1)


def test_skipping_the_parts_of_operators_changes_nothing():
    """Random trees of operators on three threads, some of which hold annotations."""
    rng = random.Random(1)
    events = [note("untracked", 0, 100_000)]
    for stage in range(9):
        events.append(note("inference", 10_000 * stage + 100, 10_000 * stage + 9_000))
        for thread in (1, 2, 3):
            spans = [(10_000 * stage + 200, 10_000 * stage + 8_000)]
            for _ in range(30):
                begin, end = rng.choice(spans)
                if end - begin > 20:
                    inner = sorted(rng.sample(range(begin + 1, end), 2))
                    spans = [span for span in spans if span != (begin, end)] + [tuple(inner)]
                    events.append(op(f"aten::{thread}", *inner, c=0, thread=thread))
        events.append(note("replay", 10_000 * stage + 4_000, 10_000 * stage + 4_500))
    events.sort(key=lambda event: (event[2], -event[3]))
    made = [NewEvent(*event) for event in events]
    whole, without = (reduce_trace(made, 9, 9, 1e-7, on_gpu) for on_gpu in (True, False))
    assert whole == without and whole["stages"]["inference"]["backend_calls"] > 9


def test_only_outermost_operators_count_and_threads_do_not_count_twice():
    backward = [
        op("autograd::engine", 500, 700, c=0, thread=9),
        op("aten::mm", 510, 690, c=0, thread=9),
    ]
    forward = [op("aten::linear", 450, 600), op("aten::addmm", 450, 600), op("aten::t", 460, 470)]
    stage = reduced([*WINDOW, *backward, *forward])["stages"]["backpropagation"]
    assert stage["backend_calls"] == 2  # linear here and the engine on its own thread
    assert stage["backend_s"] * 1e9 == pytest.approx(700 - 450)


def test_what_starts_outside_every_stage_is_untracked_and_outside_the_window_ignored():
    strays = [op("aten::a", 320, 350), op("aten::before", -50, 10), op("aten::after", 1000, 1200)]
    launches = [("cuda_runtime", "cudaLaunchKernel", 900, 910, 3), ("kernel", "k", 920, 930, 3)]
    early = [("cuda_runtime", "cudaLaunchKernel", -20, -10, 4), ("kernel", "k", -5, 20, 4)]
    trace = reduced([*WINDOW, *strays, *launches, *early])
    stray = trace["stages"]["untracked"]
    assert (stray["backend_calls"], stray["kernel_launches"], stray["kernels"]) == (1, 1, 1)
    assert 10 == ns(trace, "untracked", "gpu_s")
    assert trace["gpu_busy"] == pytest.approx((20 + 10) / 1000)


def test_overlapping_streams_count_as_a_union():
    api = [("cuda_runtime", "cudaLaunchKernel", 410 + i, 411 + i, i) for i in range(1, 4)]
    kernels = [
        ("kernel", "k", 500, 600, 1),
        ("kernel", "k", 500, 600, 2),
        ("kernel", "k", 590, 650, 3),
    ]
    trace = reduced([*WINDOW, *api, *kernels])
    assert 150 == ns(trace, "backpropagation", "gpu_s")
    assert trace["gpu_busy"] == pytest.approx(0.15)
    assert trace["stages"]["backpropagation"]["kernels"] == 3


@pytest.mark.parametrize("kind", [Event, NewEvent])
@pytest.mark.parametrize(
    "name, waits",
    [
        ("cudaDeviceSynchronize", True),
        ("cudaStreamSynchronize", True),
        ("cudaEventSynchronize", True),
        ("cuCtxSynchronize", True),
        ("cudaMemcpy", True),
        ("cuMemcpyDtoH_v2", True),
        ("cudaMemcpyAsync", False),
        ("cuMemcpyDtoHAsync_v2", False),
        ("cudaLaunchKernel", False),
        ("cudaStreamWaitEvent", False),
    ],
)
def test_synchronizations_and_blocking_copies_are_waits(kind, name, waits):
    stage = reduced([*WINDOW, ("cuda_runtime", name, 500, 600, 1)], kind)["stages"][
        "backpropagation"
    ]
    assert stage["cuda_wait_s"] * 1e9 == pytest.approx(100 if waits else 0)
    assert stage["cuda_launch_s"] * 1e9 == pytest.approx(0 if waits else 100)


def test_without_cuda_events_gpu_fields_are_null():
    trace = reduced([*WINDOW, op("aten::mm", 410, 500)])
    assert trace["gpu_busy"] is None
    for stage in trace["stages"].values():
        for field, value in stage.items():
            on_gpu = field.startswith(("cuda", "gpu", "kernel", "graph"))
            assert (value is None) == on_gpu, field


def test_a_real_trace_of_a_small_loop(capsys):
    watch = Stopwatch(CPU, "trace", warmup_steps=4, trace_after=3, trace_iterations=5)
    weights = torch.randn(32, 32, requires_grad=True)
    for step in range(1, 41):
        with watch.stage("simulation"):
            sum(range(2000))
        with watch.stage("inference"), torch.no_grad():
            weights @ weights
        with watch.stage("backpropagation"):
            (weights @ weights).sum().backward()
        torch.ones(1)
        watch.tick(2 * step)
        if watch.result:
            frozen = watch.steady_sps()
    report = watch.report()
    trace = report["trace"]
    assert (trace["iterations"], trace["env_steps"]) == (5, 10)
    assert report["window"]["iterations"] == 3 and report["sps_steady"] == frozen
    assert trace["inflation"] > 0 and trace["gpu_busy"] is None
    stages = trace["stages"]
    assert stages["inference"]["backend_calls"] == 5
    assert stages["backpropagation"]["backend_calls"] > 10
    assert stages["simulation"]["backend_calls"] == 0
    assert stages["untracked"]["backend_calls"] == 5  # the stages before it were closed
    assert stages["simulation"]["simulator_s"] > 0 and stages["simulation"]["python_s"] == 0
    assert stages["backpropagation"]["kernels"] is stages["backpropagation"]["gpu_s"] is None
    parts = [stage[part] or 0 for stage in stages.values() for part in CPU_PARTS]
    untraced = report["window"]["seconds"] / report["window"]["iterations"]
    assert sum(parts) == pytest.approx(trace["inflation"] * untraced * trace["iterations"])
    json.dumps(report, allow_nan=False)
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if "simulator" in line)
    assert "operators" in "".join(lines) and max(map(len, lines)) <= 80
    assert "GPU" not in header and "CUDA" not in "".join(lines)  # not measured, not shown


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_traced_cuda_graph(capsys):
    device = torch.device("cuda")
    weights = torch.randn(256, 256, device=device)
    result = weights @ weights
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (weights @ weights).relu()
    watch = Stopwatch(device, "trace", trace_after=200, trace_iterations=10)
    for step in range(1, 301):
        with watch.stage("backpropagation"):
            graph.replay()
        with watch.stage("logging"):
            result[0, 0].item()
        watch.tick(step)
    report = watch.report()
    trace, update = report["trace"], report["trace"]["stages"]["backpropagation"]
    assert update["graph_replays"] == trace["iterations"] == 10
    assert update["kernels"] >= update["graph_replays"] and update["gpu_s"] > 0
    assert 0 < trace["gpu_busy"] <= 1
    assert trace["stages"]["logging"]["cuda_wait_s"] > 0
    assert report["stages"]["backpropagation"]["gpu_span_seconds"] > 0
    assert report["gpu"]["memory_peak_bytes"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80


def test_the_widest_table_fits_80_columns():
    stage = dict(seconds=98765.432, count=10**8, gpu_span_seconds=98765.432)
    traced = dict.fromkeys(reduced(EVERYTHING)["stages"]["replay"], 0.99)
    trace = dict(iterations=20, env_steps=1000, inflation=12.3, gpu_busy=0.5)
    report = dict(
        mode="trace", sps_steady=1e7, sps_inclusive=1e7, warmup_seconds=1e5, overhead_pct=0.1
    )
    report |= dict(window=dict(steady=True, seconds=1e5, env_steps=10**5, iterations=10))
    report |= dict(
        stages=dict.fromkeys(ALL, stage),
        gpu=dict(nvml_util=99.0, sm_util=3.0, memory_peak_bytes=10**11),
    )
    report |= dict(trace=trace | dict(stages=dict.fromkeys(ALL, traced)))
    lines = table(report).splitlines()
    assert max(map(len, lines)) <= 80
    text = "".join(lines)
    assert all(
        word in text for word in ("GPU us", "CUDA wait", "replays", "GPU util. %", "GPU busy")
    )
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
