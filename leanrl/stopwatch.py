"""Stopwatch: where does a training script's time go, from the simulator to the GPU?

    python leanrl/stopwatch.py --stamp      copy the fenced region into every script beside this one
    python leanrl/stopwatch.py --check      exit 1 and name each script whose copy differs

Every script carries the region between the two fences, byte for byte, so that one file still runs
alone. Edit it here, never in a script, then stamp. A script uses it like this:

    watch = Stopwatch(device, mode=args.stopwatch, warmup_steps=args.learning_starts)
    while env_steps < args.total_timesteps:
        with watch.stage("simulation"):
            ...
        watch.tick(env_steps)               # end of one iteration, outside of every stage
    stages = watch.report()                 # right after the loop: table, and dict for stages.json

Stages, the same everywhere: simulation, inference, replay (rollout or replay storage, sampling),
backpropagation (all updates), logging; `untracked` is what none of them covers. A stage opened
inside another one pauses it, so every moment belongs to one stage and the seconds add up to the
wall time. A stage cannot be opened inside itself. Open stages on the main thread, outside of
compiled or captured callables.

The first tick with `env_steps >= warmup_steps` ends the warm-up (compilation, graph capture,
random exploration) and starts the steady window. `steady_sps()`, the stages and the overhead are
about that window; it ends with the last tick or, in trace mode, where the trace begins.

Modes
    off     steps per second only; `stage()` hands out a context manager that does nothing
    time    seconds and entries per stage. With CUDA also, on every 64th iteration, a pair of CUDA
            events per stage and, once a second, NVML's utilization. Nothing in the loop waits
    trace   the same, and after `trace_after` iterations of the steady window, which is closed
            first, `trace_iterations` under the Kineto profiler, reduced at once to a few numbers.
            One iteration in between takes the profiler's start and counts for neither. The trace
            window begins and ends with a synchronization, so that it holds its GPU work whole

What the numbers mean; null is "not measured", never 0
    sps_steady          environment steps per second of the steady window
    sps_inclusive       all steps / all seconds since construction, as in CleanRL's charts/SPS
    warmup_seconds      construction to the steady window: what sps_steady leaves out
    wall_seconds        construction to the report
    window              what the stages are about: the steady window or, if the warm-up did not end
                        (`steady` false), the run so far; its seconds, env_steps, iterations
    stages              (empty in mode off) `untracked` counts iterations
      seconds           self-time on the CPU. Waiting for the GPU shows in the stage that waits
      gpu_span_seconds  mean span between a stage's CUDA events on the sampled iterations, gaps and
                        nested stages included, times all iterations
    overhead_pct        the stopwatch's share of the window: entries x the cost of an empty stage,
                        timed at construction, + the measured cost of samples. The seconds are
                        corrected for it: a stage for what its timer costs inside, `untracked` for
                        what it costs around it (a nested stage costs its parent, in truth)
    gpu                 nvml_util: percent of time with any kernel running, nvidia-smi's number, 100
                        of which may be 1% of the chip. sm_util: percent of SMs busy over the window
                        (NVML GPM: Hopper or newer, and nvidia-ml-py). memory_peak_bytes: of torch's
                        allocator
    trace               all seconds are for its whole window as measured, with the profiler running.
                        Divide by `inflation` (traced / untraced seconds per iteration, Kineto's own
                        overhead taken out) to apply the window's fractions to the untraced time
      overhead_s, cuda_wait_s, cuda_launch_s, backend_s, python_s, simulator_s
                        CPU time, each without those before it: Kineto's own; synchronizations and
                        blocking copies; other CUDA API calls; operators and compiled code on any
                        thread; the rest, called simulator_s in the simulation and python_s
                        elsewhere. Their sum is the stage's self-time
      gpu_s, gpu_overlap_s
                        union of kernels, copies and fills that the stage launched (by correlation
                        id); and of those that ran while it was open, whoever launched them
      backend_calls     outermost operators per thread, Python to backend in RL-Scope's transitions
      cuda_api_calls, kernel_launches, graph_replays, kernels
                        backend to CUDA; all kernels of a replay count as kernels
      gpu_busy          union over all streams / wall time of the trace window

Stage x resource, transitions and overhead correction follow RL-Scope (Gleeson et al., "RL-Scope:
Cross-Stack Profiling for Deep Reinforcement Learning Workloads", MLSys 2021).
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

OPENING = (
    b"# >>> stopwatch: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>\n"
)
CLOSING = b"# <<< stopwatch <<<\n"
NOT_SCRIPTS = ("stopwatch.py", "sweep.py")


# >>> stopwatch: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>
import re  # noqa: E402, F811
import time  # noqa: E402, F811
from bisect import bisect_right  # noqa: E402, F811
from collections import Counter, defaultdict  # noqa: E402, F811
from contextlib import contextmanager, nullcontext, suppress  # noqa: E402, F811

import torch  # noqa: E402, F811

STAGES = ("simulation", "inference", "replay", "backpropagation", "logging")
GPU_SAMPLE_EVERY = 64  # iterations; one in so many carries CUDA events
TRACE_PREFIX = "stopwatch:"  # of the annotations that mark the stages in a trace


class Stage:
    """Self-time (seconds) and entries of one stage, kept by `with watch.stage(name): ...`."""

    __slots__ = ("watch", "name", "seconds", "count", "gpu_ms", "begin", "parent")

    def __init__(self, watch, name):
        self.watch, self.name, self.parent = watch, name, None
        self.seconds, self.count, self.gpu_ms = 0.0, 0, 0.0

    def __enter__(self):
        watch = self.watch
        if self.parent is not None:
            raise RuntimeError(f"stage {self.name!r} is open already")
        if watch.marker is not None:
            watch.mark(self)
        begin = watch.clock()  # the last call, so that Ctrl-C cannot leave the rest half done
        self.begin, self.parent, watch.current = begin, watch.current, self

    def __exit__(self, kind, value, traceback):
        watch, parent = self.watch, self.parent
        watch.current, self.parent = parent, None  # first, so that Ctrl-C cannot prevent it
        spent = watch.clock() - self.begin
        self.seconds += spent
        parent.seconds -= spent
        self.count += 1
        if watch.marks:
            watch.mark()


class Stopwatch:
    """Seconds per stage and environment steps per second; leanrl/stopwatch.py is the manual.

    `mode`: off, time or trace. The first tick with `env_steps` >= `warmup_steps` starts the steady
    window; trace mode ends it `trace_after` iterations later and profiles `trace_iterations` more.
    """

    # what a stage looks up is faster in slots; the rest may lie in the dictionary
    __slots__ = ("clock", "contexts", "current", "marker", "marks", "__dict__")

    def __init__(self, device, mode="time", warmup_steps=0, trace_after=200, trace_iterations=20):
        if mode not in ("off", "time", "trace"):
            raise ValueError(f"stopwatch mode {mode!r}: choose off, time or trace")
        self.device, self.mode = device, mode
        self.on_gpu, self.clock = device.type == "cuda", time.perf_counter
        self.synchronize = (lambda: torch.cuda.synchronize(device)) if self.on_gpu else lambda: None
        self.sampling = self.on_gpu and mode != "off"
        self.stages = {name: Stage(self, name) for name in (*STAGES, "untracked")}
        self.contexts = {s: nullcontext() if mode == "off" else self.stages[s] for s in STAGES}
        self.untracked = self.current = self.stages["untracked"]
        self.marker, self.marks = None, []
        self.cost = self._calibrate()
        self.env_steps, self.iterations, self.steady = 0, 0, False
        self.result, self.trace = None, None
        self.course = self._course(warmup_steps, trace_after, trace_iterations)
        self._open_window()
        self.born = self.start

    def stage(self, name):
        """The context manager of one of STAGES; KeyError for any other name."""
        try:
            return self.contexts[name]
        except KeyError:
            raise KeyError(f"no stage {name!r}; the stages are {', '.join(STAGES)}") from None

    def tick(self, env_steps):
        """End an iteration, outside of every stage; `env_steps` counts them all since the start."""
        self.env_steps = env_steps
        self.iterations += 1
        self.ticked = self.clock()
        next(self.course, None)

    def steady_sps(self):
        """Environment steps per second of the steady window so far; None before it has any."""
        if self.result:
            return self.result["sps_steady"]
        steps = self.env_steps - self.first_step
        return steps / (self.ticked - self.start) if self.steady and steps else None

    def inclusive_sps(self):
        """All environment steps / all seconds since construction."""
        return self.env_steps / (self.clock() - self.born)

    def report(self):
        """Print the table; return the dict of stages.json (SI units, None where not measured)."""
        self.course.close()  # gives up a trace window that is still open
        self.marker = None
        self._close_window()
        run = {"wall_seconds": self.clock() - self.born, "sps_inclusive": self.inclusive_sps()}
        report = {"schema": 1, "mode": self.mode, **run, **self.result, "trace": self.trace}
        print(table(report))
        return report

    def _course(self, warmup_steps, trace_after, trace_iterations):
        """The course of a run, one `yield` per tick."""
        while self.env_steps < warmup_steps:
            yield
        self.steady = True
        self._open_window()
        while self.mode != "trace" or self.iterations - self.first_iteration < trace_after:
            if self.sampling and self.iterations % GPU_SAMPLE_EVERY == 0:
                self.marker = self._gpu_span
                yield
                self.marker = None
                self.samples += 1
                self._collect()
            else:
                yield
        self._close_window()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds[: 1 + self.on_gpu]) as profiler:
            with torch.profiler.record_function("warm-up"):  # as slow as a first use is
                yield  # this iteration pays for the profiler's buffers and does not count
            self.synchronize()
            first_step = self.env_steps
            with self._annotation(self.untracked):
                self.marker = self._annotation
                for _ in range(trace_iterations):
                    yield
                self.marker = None
                self.synchronize()
        events = profiler.profiler.kineto_results.events()
        untraced = self.result["window"]["seconds"] / max(trace_after, 1)
        steps = self.env_steps - first_step
        self.trace = reduce_trace(events, trace_iterations, steps, untraced)

    def _open_window(self):
        """Count anew: at construction and at the end of the warm-up."""
        for stage in self.stages.values():
            stage.seconds, stage.count, stage.gpu_ms = 0.0, 0, 0.0
        self.own, self.samples, self.spans, self.nvml = 0.0, 0, [], []
        self.first_step, self.first_iteration = self.env_steps, self.iterations
        self.gpm = gpm(self.device) if self.sampling else None
        self.synchronize()
        self.start = self.ticked = self.asked = self.clock()

    def _close_window(self):
        """Settle, once, the steady window or (its warm-up never ended) the run so far."""
        if self.result:
            return
        begin = self.clock()
        self.synchronize()  # GPU work still queued belongs to the window
        self.ticked += self.clock() - begin
        self._collect()
        wall, iterations = self.clock() - self.start, self.iterations - self.first_iteration
        self.untracked.count = iterations  # as if a tick cost what a stage does: a little less
        calls = sum(stage.count for stage in self.stages.values())
        inside, outside = self.cost
        self.untracked.seconds += wall - calls * outside  # the stages have subtracted theirs
        overhead = self.own + calls * (inside + outside)
        span = iterations / max(self.samples, 1) / 1e3
        counts = {"env_steps": self.env_steps - self.first_step, "iterations": iterations}
        peak = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None
        self.result = {
            "sps_steady": self.steady_sps(),
            "warmup_seconds": self.start - self.born if self.steady else None,
            "overhead_pct": 100 * overhead / wall,
            "window": {"steady": self.steady, "seconds": self.ticked - self.start, **counts},
            "stages": {
                stage.name: {
                    "seconds": max(0.0, stage.seconds - stage.count * inside),
                    "count": stage.count,
                    "gpu_span_seconds": stage.gpu_ms * span if stage.gpu_ms else None,
                }
                for stage in self.stages.values()
            },
            "gpu": {
                "nvml_util": sum(self.nvml) / len(self.nvml) if self.nvml else None,
                "sm_util": gpm(self.device, self.gpm) if self.gpm else None,
                "memory_peak_bytes": peak,
            },
        }
        if self.mode == "off":
            self.result |= {"overhead_pct": None, "stages": {}}

    def _collect(self):
        """Add up the CUDA event pairs that have completed, and ask NVML once a second."""
        begin = self.clock()
        while self.spans and self.spans[0][2].query():
            stage, first, last = self.spans.pop(0)
            stage.gpu_ms += first.elapsed_time(last)
        if self.sampling and begin - self.asked > 1.0:
            self.asked = begin
            with suppress(Exception):  # nvidia-ml-py is optional
                self.nvml.append(torch.cuda.utilization(self.device))
        self._discount(begin)

    @contextmanager
    def _gpu_span(self, stage):
        """CUDA events around a stage, unless a graph is being captured: it would contain them."""
        capturing = torch.cuda.is_current_stream_capturing()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not capturing:
            first.record()
        yield
        if not capturing:
            last.record()
            self.spans.append((stage, first, last))

    def mark(self, stage=None):
        """Open what a sampled or traced iteration puts around a stage, or close the last."""
        begin = self.clock()
        if stage:
            self.marks.append(self.marker(stage))
            self.marks[-1].__enter__()
        else:
            self.marks.pop().__exit__(None, None, None)
        self._discount(begin)

    def _annotation(self, stage):
        return torch.profiler.record_function(TRACE_PREFIX + stage.name)

    def _discount(self, begin):
        """Book the time since `begin` as the stopwatch's own instead of the current stage's."""
        spent = self.clock() - begin
        self.own += spent
        self.current.seconds -= spent

    def _calibrate(self):
        """Seconds that an empty stage adds to itself and to its parent, the least of 5 trials."""
        stage, trials = self.stages["simulation"], []
        for _ in range(5):
            stage.seconds, begin = 0.0, self.clock()
            for _ in range(1000):
                with self.stage("simulation"):
                    pass
            trials.append((self.clock() - begin, stage.seconds))
        both, inside = min(trials)
        return inside / 1000, (both - inside) / 1000


def gpm(device, first=None):
    """A sample of NVML's GPU performance monitor; after a `first`, percent of busy SMs since."""
    with suppress(Exception):  # needs Hopper or newer, and nvidia-ml-py, which is optional
        import pynvml as nvml

        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        sample = nvml.nvmlGpmSampleGet(handle, nvml.nvmlGpmSampleAlloc())
        if first is None:
            return sample
        query = nvml.c_nvmlGpmMetricsGet_t(nvml.NVML_GPM_METRICS_GET_VERSION, 1, first, sample)
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        return nvml.nvmlGpmMetricsGet(query).metrics[0].value


def activity(event):
    """Kineto's word for what an event is, inferred on torch 2.11, which does not tell."""
    if hasattr(event, "activity_type"):
        return event.activity_type()
    name, on_cpu = event.name(), event.device_type() == torch.autograd.DeviceType.CPU
    if event.is_user_annotation():
        return "user_annotation" if on_cpu else "gpu_user_annotation"
    if name in ("Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource"):
        return "overhead"
    if on_cpu:
        return "cuda_runtime" if re.match("cu(da)?[A-Z]", name) else "cpu_op"
    return "gpu_memcpy" if name.startswith(("Memcpy", "Memset")) else "kernel"


def outermost(calls):
    """The calls (start, end, name, id, thread) that no other call on their thread contains."""
    reach = defaultdict(int)
    for call in sorted(calls, key=lambda call: (call[0], -call[1])):
        if call[1] > reach[call[4]]:
            reach[call[4]] = call[1]
            yield call


def reduce_trace(events, iterations, env_steps, untraced_seconds):
    """Kineto events of a trace window -> "trace" of stages.json; `untraced_seconds` per iteration.

    Annotations TRACE_PREFIX + stage tell the stages, the innermost of which owns the time, and,
    from first to last, the window; a call belongs to the stage in which it starts, whatever its
    thread. A stage's CPU parts add up to its self-time. Without CUDA events GPU fields are None.
    """
    calls = defaultdict(list)
    for e in events:
        call = e.start_ns(), e.start_ns() + e.duration_ns(), e.name(), e.correlation_id()
        calls[activity(e)].append((*call, e.start_thread_id()))
    gpu = calls["kernel"] + calls["gpu_memcpy"] + calls["gpu_memset"]
    cuda = calls["cuda_runtime"] + calls["cuda_driver"]
    api = list(outermost(cuda))

    edges, cuts, owners, stack = [], [], [], ["untracked"]
    for start, end, name, *_ in calls["user_annotation"]:
        if name.startswith(TRACE_PREFIX):
            edges += (start, 1, -end, name[len(TRACE_PREFIX) :]), (end, 0, 0, "")
    for at, opens, _, name in sorted(edges):  # ends before starts, parents before children
        stack.append(name) if opens else stack.pop()
        cuts.append(at)
        owners.append(stack[-1])
    owners[-1] = None  # what comes after the window, like what comes before it

    def owner(call):
        i = bisect_right(cuts, call[0])
        return owners[i - 1] if i else None

    def cover(calls):  # nanoseconds of each stage that the union of the calls takes up
        covered, reach = Counter(), cuts[0]
        for start, end, *_ in sorted(calls):
            start, end = max(start, reach), min(end, cuts[-1])
            reach = max(reach, end)
            while start < end:
                i = bisect_right(cuts, start)
                covered[owners[i - 1]] += min(end, cuts[i]) - start
                start = cuts[i]
        return covered

    to_pageable = {c[3] for c in gpu if c[2].endswith("-> Pageable)")}  # such a copy blocks
    waits = re.compile("Synchronize|Memcpy(?!.*Async)").search
    layers = {
        "overhead_s": calls["overhead"],
        "cuda_wait_s": [c for c in api if c[3] in to_pageable or waits(c[2])],
        "cuda_launch_s": api,
        "backend_s": calls["cpu_op"],
        "python_s": [(cuts[0], cuts[-1])],
    }
    fields, below, seen = {}, Counter(), []
    for field, layer in layers.items():  # each has what it covers beyond the layers before it
        seen = seen + layer
        fields[field], below = cover(seen) - below, cover(seen)
    fields["simulator_s"] = Counter(simulation=fields["python_s"].pop("simulation", 0))
    launcher = {c[3]: owner(c) for c in cuda}  # all kernels of a graph replay share one id
    launched = {s: [c for c in gpu if launcher.get(c[3]) == s] for s in (*STAGES, "untracked")}
    fields["gpu_s"] = {s: sum(cover(work).values()) for s, work in launched.items()}
    fields["gpu_overlap_s"] = cover(gpu)
    fields["backend_calls"] = Counter(map(owner, outermost(calls["cpu_op"])))
    fields["cuda_api_calls"] = Counter(map(owner, api))
    fields["kernel_launches"] = Counter(owner(c) for c in api if re.search("Launch.*Kernel", c[2]))
    fields["graph_replays"] = Counter(owner(c) for c in api if "GraphLaunch" in c[2])
    fields["kernels"] = Counter(launcher.get(c[3]) for c in calls["kernel"])

    def value(field, stage):
        if not (api or gpu) and field.startswith(("cuda", "gpu", "kernel", "graph")):
            return None
        return fields[field][stage] / 1e9 if field.endswith("_s") else fields[field][stage]

    wall, stolen = cuts[-1] - cuts[0], sum(fields["overhead_s"].values())
    traced_seconds = (wall - stolen) / iterations / 1e9
    return {
        "iterations": iterations,
        "env_steps": env_steps,
        "seconds": wall / 1e9,
        "inflation": traced_seconds / untraced_seconds if untraced_seconds else None,
        "gpu_busy": sum(cover(gpu).values()) / wall if api or gpu else None,
        "stages": {stage: {field: value(field, stage) for field in fields} for stage in launched},
    }


def table(report):
    """`report` as aligned text of at most 80 columns, with - for what was not measured."""
    window, gpu, trace, lines = report["window"], report["gpu"], report["trace"], []
    on_gpu, steps = gpu["memory_peak_bytes"] is not None, max(window["env_steps"], 1)

    def row(name, *cells, width=12):
        cells = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
        cells = ["-" if cell == "None" else cell for cell in cells]
        lines.append(name.ljust(16) + "".join(cell.rjust(width) for cell in cells))

    row("stopwatch: " + ("steady window" if window["steady"] else "whole run, still warming up"))
    row("stage", "seconds", "share %", "us/step", "count", *["GPU span s"] * on_gpu)
    stages = [(name, *stage.values()) for name, stage in report["stages"].items()]
    total = sum(stage[1] for stage in stages)
    for name, seconds, count, span in [*stages, ("total", total, None, None)]:
        share = 100 * seconds / total if total else None
        row(name, seconds, share, 1e6 * seconds / steps, count, *[span] * on_gpu)
    row("steady steps/s", report["sps_steady"])
    row("all steps/s", report["sps_inclusive"])
    row("warm-up s", report["warmup_seconds"])
    row("stopwatch %", report["overhead_pct"])
    if on_gpu:
        row("GPU nvml_util %", gpu["nvml_util"])
        row("GPU sm_util %", gpu["sm_util"])
        row("GPU peak bytes", gpu["memory_peak_bytes"])
    if trace:
        fields = {"python": "python_s", "simulat": "simulator_s", "backend": "backend_s"}
        fields |= {"launch": "cuda_launch_s", "wait": "cuda_wait_s", "GPU": "gpu_s"}
        fields |= {"ops": "backend_calls", "api": "cuda_api_calls"}
        fields = {k: f for k, f in fields.items() if trace["stages"]["untracked"][f] is not None}
        row("trace: us/step", *fields, width=8)
        for name, stage in trace["stages"].items():
            scaled = (stage[f] * (1e6 if f.endswith("_s") else 1.0) for f in fields.values())
            row(name, *[value / max(trace["env_steps"], 1) for value in scaled], width=8)
        row("trace inflation", trace["inflation"])
        row("GPU busy share", trace["gpu_busy"])
    elif report["mode"] == "trace":
        row("no trace: the run ended before its trace window did")
    return "\n".join(lines)


# <<< stopwatch <<<


def find_region(source):
    """(begin, end) of the fenced region in the bytes `source`, both fences included.

    Raises ValueError unless there is one opening fence and, after it, one closing fence.
    """
    lines = source.splitlines(keepends=True)
    opens = [i for i, line in enumerate(lines) if line == OPENING]
    closes = [i for i, line in enumerate(lines) if line == CLOSING]
    if len(opens) != 1 or len(closes) != 1:
        raise ValueError(
            f"{len(opens)} opening and {len(closes)} closing fences instead of one each"
        )
    if opens[0] > closes[0]:
        raise ValueError("the closing fence stands before the opening one")
    return sum(map(len, lines[: opens[0]])), sum(map(len, lines[: closes[0] + 1]))


def write_atomically(path, content):
    """Replace the file at `path` by the bytes `content`; a crash leaves the old file or the new."""
    temporary = path.with_name(f".{path.name}.stamping")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def stamp(folder, write=True):
    """Bring the region of `folder`/stopwatch.py into the scripts beside it; `write=False` compares.

    Returns {path: verdict}, a verdict being "same", "stamped", "differs" or "broken: why"; a broken
    script is left alone. Raises ValueError if the region of stopwatch.py itself is broken.
    """
    source = (Path(folder) / "stopwatch.py").read_bytes()
    region = slice(*find_region(source))
    verdicts = {}
    for path in sorted(Path(folder).glob("*.py")):
        if path.name in NOT_SCRIPTS:
            continue
        script = path.read_bytes()
        try:
            begin, end = find_region(script)
        except ValueError as problem:
            verdicts[path] = f"broken: {problem}"
            continue
        if script[begin:end] == source[region]:
            verdicts[path] = "same"
        elif write:
            write_atomically(path, script[:begin] + source[region] + script[end:])
            verdicts[path] = "stamped"
        else:
            verdicts[path] = "differs"
    return verdicts


def main(arguments=None, folder=Path(__file__).parent):
    """The command: 0 if every script carries the region afterwards, 1 otherwise."""
    parser = argparse.ArgumentParser(
        description="Keep the stopwatch identical in every script of this directory."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--stamp", action="store_true", help="copy the region into every script")
    action.add_argument(
        "--check", action="store_true", help="only compare; exit 1 if a script differs"
    )
    verdicts = stamp(folder, write=parser.parse_args(arguments).stamp)
    for path, verdict in verdicts.items():
        print(f"{path.name}: {verdict}")
    return int(any(verdict not in ("same", "stamped") for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
