"""What a trace amounts to, and what is said in words of a run's stages."""

import json
import random
import subprocess
import sys

import cross_stack
import pytest
import torch
import traces
from conftest import ROOT
from fake_runs import config, event, make_run, make_traced_run, report, trace_events, write_trace
from traces import CPU_LAYERS, FIELDS, reduce_trace

from leanrl.stopwatch import Stopwatch


def note(stage, start, end):
    return "user_annotation", traces.STAGE + stage, start, end


def mark(number, start, end):
    return "user_annotation", f"{traces.ITERATION}{number}", start, end


def op(start, end, thread=1):
    return "cpu_op", "aten::mm", start, end, 0, thread


WINDOW = [
    mark(1, 0, 1000),
    note("simulation", 100, 300),
    note("backpropagation", 400, 800),
]
EVERYTHING = [
    *WINDOW,
    ("gpu_user_annotation", traces.STAGE + "backpropagation", 500, 990),
    ("gpu_user_annotation", "ProfilerStep#1", 500, 990),
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
    ("Trace", "PyTorch Profiler (0)", -100, 2000),
    ("python_function", "train.py(1): main", 0, 1000),
]


def reduced(events):
    made = [event(*e) for e in events]
    made.append({"ph": "M", "name": "process_name", "ts": 0.0, "pid": 1, "args": {"name": "x"}})
    made.append({"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 7, "pid": 0, "tid": 7, "ts": 0.5})
    random.Random(0).shuffle(made)  # a file has them in no order
    return reduce_trace(made)


def rounded(trace, stage):
    """A stage's fields, its seconds in whole ns."""
    fields = trace["stages"].get(stage, dict.fromkeys(FIELDS, 0))
    return {f: v and round(v * 1e9) if f.endswith("_s") else v for f, v in fields.items()}


# Reducing a trace


def test_a_trace_of_everything():
    trace = reduced(EVERYTHING)
    assert rounded(trace, "backpropagation") == dict(
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
    simulation, untracked = rounded(trace, "simulation"), rounded(trace, "untracked")
    assert (simulation["python_s"], simulation["simulator_s"]) == (0, 200)
    assert (untracked["gpu_overlap_s"], untracked["gpu_s"]) == (20, 0)
    assert trace["gpu_busy"] == pytest.approx((140 + 10 + 20 + 20) / 1000)
    assert trace["seconds"] == pytest.approx((1000 - 10) / 1e9) and trace["iterations"] == 1
    assert set(trace["stages"]) == {"simulation", "backpropagation", "untracked"}


def test_layers_add_up_to_self_times():
    trace = reduced([*EVERYTHING, op(250, 450, thread=2)])
    own = dict(simulation=200, backpropagation=400 - 10, untracked=400)  # without Kineto's
    sums = {stage: sum(rounded(trace, stage)[f] for f in CPU_LAYERS) for stage in own}
    assert sums == own


def test_an_evaluation_is_no_training():
    training = [*WINDOW[1:], op(410, 450)]
    whole = reduced([mark(1, 0, 1000), *training])
    evaluated = reduced([mark(1, 0, 5000), *training, note("evaluation", 1000, 5000)])
    assert evaluated["seconds"] == whole["seconds"]
    assert evaluated["stages"]["backpropagation"] == whole["stages"]["backpropagation"]


def test_operators_against_a_look_at_every_nanosecond():
    """Trees of operators on three threads, some of which hold annotations."""
    rng, events, covered, calls = random.Random(1), [], set(), 0
    for begin in range(0, 20_000, 5_000):
        events.append(note("inference", begin + 100, begin + 4_500))
        events.append(note("replay", begin + 2_000, begin + 2_300))
        for thread in (1, 2, 3):
            spans = [(begin + 200, begin + 4_000)]
            for depth in range(20):
                start, end = rng.choice(spans)
                if end - start > 20:
                    inner = tuple(sorted(rng.sample(range(start + 1, end), 2)))
                    if depth == 0:  # all others are inside of this one
                        spans, calls = [], calls + (not 2_000 <= inner[0] - begin < 2_300)
                        covered |= set(range(*inner))
                    spans.append(inner)
                    events.append(op(*inner, thread=thread))
    trace = reduced([*(mark(i, 5_000 * i, 5_000 * (i + 1)) for i in range(4)), *events])
    assert trace["iterations"] == 4
    replay = {at for at in range(20_000) if 2_000 <= at % 5_000 < 2_300}
    assert rounded(trace, "inference")["backend_s"] == len(covered - replay)
    assert rounded(trace, "replay")["backend_s"] == len(covered & replay)
    assert rounded(trace, "inference")["backend_calls"] == calls


def launch(start, correlation, thread=1):
    return "cuda_runtime", "cudaLaunchKernel", start, start + 10, correlation, thread


def kernel(start, end, correlation):
    return "kernel", "gemm", start, end, correlation


UPDATE, STRAY = "backpropagation", "untracked"
TRACES = {  # what is beside the window: what a stage's fields and gpu_busy are
    "stage-in-itself": (
        [note("replay", 500, 700), note(UPDATE, 550, 600)],
        {(UPDATE, "python_s"): 250, ("replay", "python_s"): 150},
        None,
    ),
    "kernel-of-a-backward-thread": (
        [op(500, 700, thread=9), launch(520, 3, thread=9), kernel(810, 860, 3)],
        {(UPDATE, "kernels"): 1, (UPDATE, "gpu_s"): 50, (STRAY, "gpu_overlap_s"): 50},
        0.05,
    ),
    "outside-of-stages": (
        [op(320, 350), launch(900, 3), kernel(920, 930, 3)],
        {(STRAY, "backend_calls"): 1, (STRAY, "kernel_launches"): 1, (STRAY, "gpu_s"): 10},
        0.01,
    ),
    "outside-of-the-window": (  # but for the GPU's time in it
        [launch(-20, 4), kernel(-5, 20, 4), op(-50, 10), op(1000, 1200), note("replay", -90, -30)],
        {(STRAY, "backend_calls"): 0, (STRAY, "kernel_launches"): 0, (STRAY, "kernels"): 0},
        0.02,
    ),
    "streams": (  # both stages have the GPU, which is busy once
        [launch(150, 1), launch(410, 2), kernel(500, 600, 1), kernel(500, 600, 2)],
        {(UPDATE, "gpu_s"): 100, ("simulation", "gpu_s"): 100},
        0.1,
    ),
}


@pytest.mark.parametrize(("events", "expected", "gpu_busy"), TRACES.values(), ids=TRACES)
def test_calls_belong_to_the_stage_that_made_them(events, expected, gpu_busy):
    trace = reduced([*WINDOW, *events])
    assert {(x, field): rounded(trace, x)[field] for x, field in expected} == expected
    assert trace["gpu_busy"] == pytest.approx(gpu_busy)
    assert trace["stages"].keys() <= {"simulation", "replay", UPDATE, STRAY}


def test_synchronizations_and_blocking_copies_are_waits():
    waits = "cudaDeviceSynchronize cudaStreamSynchronize cudaEventSynchronize cuCtxSynchronize"
    waits += " cudaMemcpy cuMemcpyDtoH_v2"
    others = "cudaMemcpyAsync cuMemcpyDtoHAsync_v2 cudaLaunchKernel cudaStreamWaitEvent"
    for names, expected in ((waits, (100, 0)), (others, (0, 100))):
        for name in names.split():
            for category in ("cuda_runtime", "cuda_driver"):
                trace = reduced([*WINDOW, (category, name, 500, 600, 1)])
                stage = rounded(trace, "backpropagation")
                assert (stage["cuda_wait_s"], stage["cuda_launch_s"]) == expected, name


def test_stages_that_rounding_lets_overlap_stay_apart():
    """The times of a long-running machine have more digits than a float."""
    trace = reduced([mark(1, 0, 1000), note("a", 0, 501), note("b", 500, 1000)])
    assert rounded(trace, "b")["python_s"] == pytest.approx(500, abs=1)
    assert rounded(trace, "a")["python_s"] == pytest.approx(500, abs=1)


ITERATION = [note("simulation", 0, 300), note("logging", 500, 900)]


def test_an_iteration_that_the_end_of_the_run_cuts_off_does_not_count():
    whole = [mark(1, 0, 1000), *ITERATION, op(310, 320)]
    second = [mark(2, 1010, 2000), note("simulation", 1100, 1200), op(1300, 1400)]
    for cut in (second, second[:1]):  # interrupted, and ended by itself
        trace = reduced([*whole, *cut])
        assert trace["iterations"] == 1 and trace["seconds"] == pytest.approx(1e-6)
        assert rounded(trace, "untracked")["backend_calls"] == 1
    trace = reduced([*whole, *second, note("logging", 1500, 1600)])
    assert trace["iterations"] == 2 and trace["seconds"] == pytest.approx(1.99e-6)
    assert rounded(trace, "untracked")["python_s"] == 1000 - 700 - 10 + 990 - 200 - 100
    with pytest.raises(ValueError, match="ended before one iteration of its trace did"):
        reduced(second[:1])


def test_without_marks_every_stage_counts_and_nothing_else():
    trace = reduced([*ITERATION, op(310, 320), op(510, 520)])
    assert set(trace["stages"]) == {"simulation", "logging"}
    assert trace["iterations"] == 1 and trace["seconds"] == pytest.approx(0.7e-6)


def test_a_file_that_is_no_trace(tmp_path):
    path = tmp_path / "trace.json.gz"
    with pytest.raises(ValueError, match="has no trace.json.gz"):
        traces.read_events(path)
    write_trace(path, trace_events())
    whole = path.read_bytes()
    for content in (whole[:-20], b"", b"{}", whole[:20] + b"x" * 50):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is damaged"):
            traces.read_events(path)
    with pytest.raises(ValueError, match="without annotations"):
        reduced([op(0, 10)])


# Real traces


def traced_loop(path, work, iterations):
    """The reduced trace of `work`, which begins stages, run under the stopwatch."""
    watch = traced_watch(2, iterations)
    for i in range(iterations + 10):
        work(watch.stage)
        watch.tick(2 * (i + 1))
    return traces.read_trace(path, leave_records(watch, path))


def traced_watch(after, iterations):
    device = torch.device("cpu")
    return Stopwatch(device, 1, True, trace_after=after, trace_iterations=iterations)


def leave_records(watch, path):
    """As Run.close does -> the report."""
    report = watch.measure()
    (path / "stages.json").write_text(json.dumps(report))
    if watch.profiler:
        watch.profiler.stop()
        watch.profiler.export_chrome_trace(str(path / "trace.json.gz"))
    return report


def cpu_work(stage):
    weights = torch.tensor([[0.5]], requires_grad=True)
    stage("simulation")
    sum(range(2000))
    stage("inference")
    with torch.no_grad():
        weights @ weights
    stage("backpropagation")
    (weights @ weights).sum().backward()


@pytest.fixture(scope="module")
def small_loop(tmp_path_factory):
    """The folder of a report and a trace, and the latter reduced."""
    path = tmp_path_factory.mktemp("loop")
    return path, traced_loop(path, cpu_work, 5)


def test_a_real_trace_of_a_small_loop(small_loop):
    _, trace = small_loop
    stages = trace["stages"]
    assert trace["iterations"] == 5 and trace["env_steps"] == 10
    assert trace["inflation"] > 0 and trace["gpu_busy"] is None
    assert stages["inference"]["backend_calls"] == 5
    assert stages["backpropagation"]["backend_calls"] > 10
    assert stages["simulation"]["backend_calls"] == 0
    assert stages["untracked"]["backend_calls"] >= 5  # torch.tensor
    assert stages["simulation"]["simulator_s"] > 0 and stages["simulation"]["python_s"] == 0
    assert stages["backpropagation"]["kernels"] is stages["backpropagation"]["gpu_s"] is None
    parts = [stage[part] or 0 for stage in stages.values() for part in CPU_LAYERS]
    assert sum(parts) == pytest.approx(trace["seconds"])


def test_a_script_of_your_own_is_read_out(small_loop, capsys):
    """No config.json, no TensorBoard: a report and its trace are enough."""
    path, _ = small_loop
    for place in (path / "stages.json", path):
        status, said, _ = read_out(capsys, place)
        assert status == 0 and "backpropagation: " in said and "steps/s" in said


@pytest.mark.parametrize("iterations", [2, 4, 7])
def test_a_run_that_ends_before_its_trace_does(tmp_path, iterations):
    """After 1 iteration of warm-up, 2 of the window and 1 for the profiler come 5 to trace."""
    watch = traced_watch(2, 5)
    for i in range(iterations):
        cpu_work(watch.stage)
        watch.tick(i + 1)
    report = leave_records(watch, tmp_path)
    try:
        found = traces.read_trace(tmp_path, report)
    except ValueError:
        found = {"iterations": 0}
    assert (found and found["iterations"]) == {2: None, 4: 0, 7: 3}[iterations]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_traced_cuda_graph(tmp_path):
    weights = torch.randn(256, 256, device="cuda")
    result = weights @ weights
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (weights @ weights).relu()

    def work(stage):
        stage("backpropagation")
        graph.replay()
        stage("logging")
        result[0, 0].item()

    trace = traced_loop(tmp_path, work, 10)
    update = trace["stages"]["backpropagation"]
    assert update["graph_replays"] == 10
    assert update["kernels"] >= update["graph_replays"] and update["gpu_s"] > 0
    assert 0 < trace["gpu_busy"] <= 1
    assert trace["stages"]["logging"]["cuda_wait_s"] > 0


# In words


def read_out(capsys, path, *flags):
    """What plots/cross_stack.py says of a path: exit status, output, errors."""
    status = cross_stack.main([str(path), *flags])
    said = capsys.readouterr()
    return status, said.out if flags else " ".join(said.out.split()), said.err


def cells(said):
    return {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.strip()}


def test_a_run_is_read_out(tmp_path):
    """As a process of its own."""
    path = make_traced_run(tmp_path, 1, config())
    command = [sys.executable, "plots/cross_stack.py", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said = done.stdout
    assert max(map(len, said.splitlines()[1:])) <= 100
    heading = "us per step share simulator Python backend total operators".split()
    assert said.splitlines()[2].split() == heading
    assert cells(said)["backpropagation"][:5] == ["60%", "0", "20,000", "40,000", "60,000"]
    assert cells(said)["total"][:5] == ["100%", "10,000", "45,000", "45,000", "100,000"]
    said = " ".join(said.split())
    assert "1. backpropagation: 200 operators per step of 200 us: 40% of the time" in said
    assert "without it 1.67x at most" in said  # Amdahl's law for 40%
    assert "simulation, 10,000 us per step: 10% of the time" in said and "GPU:" not in said


def test_short_operators_are_called_overhead(tmp_path, capsys):
    path = make_traced_run(tmp_path, 1, config(), operators=40_000)
    _, said, _ = read_out(capsys, path)
    assert "4,000 operators per step of 10 us and Python between them: 60% of the time" in said
    assert "torch.compile" in said


def test_synchronizations_and_what_the_gpu_waits_for_are_named(tmp_path, capsys):
    path = make_traced_run(tmp_path, 1, config(gpu="H"))
    status, said, _ = read_out(capsys, path)
    waits = "backpropagation: waiting for the GPU, 30,000 us per step: 30% of the time"
    assert status == 0 and waits in said and ".item()" in said
    assert "CUDA's API, 38 launches and 1 replays per step" in said and "one CUDA graph" in said
    assert said.count("count the FLOPs") == 1  # the same advice of two stages is given once
    # busy for 66 ms of a traced step, and so of the 100 ms of one that is not traced
    assert "the GPU idles, mostly in backpropagation and inference: 34% of the time" in said


def said_of(capsys, tmp_path, **changes):
    """What is said of a run whose report has these changes."""
    return read_out(capsys, make_run(tmp_path, 1, config(), report() | changes))


def test_a_run_without_a_trace_has_stages(tmp_path, capsys):
    _, said, _ = said_of(capsys, tmp_path)
    assert "--stopwatch trace" in said and "until the trace is complete" in said
    assert "backpropagation, 60,000 us per step: 60%" in said
    _, said, _ = said_of(capsys, tmp_path / "mine", stages={"wait": 5.0, "untracked": 1.0})
    assert "wait, 50,000 us" in said and ".item()" not in said
    _, said, _ = said_of(capsys, tmp_path / "early", sps_steady=None, warmup_seconds=None)
    assert "note: the warm-up did not end" in said


def test_the_last_part_of_a_resumed_run_counts(tmp_path, capsys):
    path = make_run(tmp_path, 1, config(), report())
    for name, speed in (("9", 10.0), ("10", 7.0), ("collector_11", 3.0)):
        (path / f"stages_{name}.json").write_text(json.dumps(report() | {"sps_steady": speed}))
    assert "7 environment steps/s" in read_out(capsys, path)[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"iterations": None}, "is no report of the stopwatch"),
        ({"stages": {"untracked": 10.0, "evaluation": 3.0}}, "has no stages, only `untracked`"),
        ({"env_steps": 0}, "the run ended before"),
    ],
)
def test_a_report_that_lacks_something_is_one_line(tmp_path, capsys, changes, said):
    path = tmp_path / "stages.json"
    write_trace(tmp_path / "trace.json.gz", trace_events())
    path.write_text(json.dumps(report() | changes))
    status, out, error = read_out(capsys, path)
    assert (status, out) == (1, "") and said in error and error.count("\n") == 1
