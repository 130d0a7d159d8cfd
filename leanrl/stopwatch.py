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
backpropagation (all updates), logging, checkpoint (writing it) and evaluation; `untracked` is what
none of them covers. Evaluation is no part of training: its time counts neither for the steady
window nor for the warm-up. A stage opened inside another one pauses it, so every moment belongs to
one stage; no stage opens inside itself. Open stages on the main thread, outside of compiled or
captured callables.

The first tick with `env_steps >= warmup_steps` ends the warm-up (compilation, graph capture,
random exploration) and starts the steady window, which ends with the last tick or, in trace mode,
where the trace begins.

Modes
    off     steps per second only; `stage()` hands out a context manager that does nothing, except
            for the evaluation, whose time it must know to leave it out
    time    seconds and entries per stage. With CUDA also, on every 64th iteration, a pair of CUDA
            events per stage (10,000 at most) and, at most once a second, NVML's utilization.
            Nothing in the loop waits
    trace   the same, and after `trace_after` (at least 1) iterations of the steady window one that
            takes the profiler's start and then `trace_iterations` under Kineto, between two
            synchronizations, reduced at once to a few numbers

What the numbers mean; null is "not measured", never 0
    sps_steady          environment steps per second of the steady window
    sps_inclusive       all steps / all seconds since construction, as in CleanRL's charts/SPS
    warmup_seconds      construction to the steady window without evaluation; wall_seconds:
                        construction to the report
    overhead_pct        the stopwatch's share of the window: entries x the cost of an empty stage,
                        timed at construction, + the measured cost of samples. The seconds of the
                        stages are corrected for it
    window              what the stages are about: the steady window or, if the warm-up did not end
                        (`steady` false), the run so far; its seconds (without evaluation),
                        env_steps, iterations
    stages              (empty in mode off) `untracked` counts iterations
      seconds           self-time on the CPU. Waiting for the GPU shows in the stage that waits
      gpu_span_seconds  mean over the sampled iterations of the span between a stage's CUDA events,
                        gaps and nested stages included, times all iterations
    gpu                 nvml_util: percent of time with any kernel running, nvidia-smi's number, 100
                        of which may be 1% of the chip. nvml_samples: [seconds since construction,
                        percent], up to 2,000 of those that make up nvml_util. sm_util: percent of
                        SMs busy over the window (NVML GPM: Hopper or newer, and nvidia-ml-py).
                        memory_peak_bytes: of torch's allocator
    trace               seconds of its window, with the profiler running. Divide by `inflation`
                        (traced / untraced seconds per iteration) to get untraced time. Kineto's own
                        overhead is in none of them
      cuda_wait_s, cuda_launch_s, backend_s, python_s, simulator_s
                        CPU time, each without those before it: synchronizations and blocking
                        copies; other CUDA API calls; operators and compiled code on any thread;
                        the rest, called simulator_s in the simulation and python_s elsewhere
      gpu_s, gpu_overlap_s
                        union of kernels, copies and fills that the stage launched (by correlation
                        id); and of those that ran while it was open, whoever launched them
      gpu_with_...      gpu_overlap_s by what the CPU did meanwhile: gpu_with_cuda_wait_s is the GPU
                        alone at work, the others both
      backend_calls     outermost operators per thread, Python to backend in RL-Scope's transitions
      cuda_api_calls, kernel_launches, graph_replays, kernels
                        backend to CUDA; all kernels of a replay count as kernels
      gpu_busy          union over all streams / wall time of the trace window

After RL-Scope (Gleeson et al., "RL-Scope: Cross-Stack Profiling for Deep Reinforcement Learning
Workloads", MLSys 2021).
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


if __name__ == "__main__":  # above the region, so that stamping needs no torch
    sys.exit(main())


# >>> stopwatch: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>
import re  # noqa: E402, F811
import time  # noqa: E402, F811
from collections import Counter, namedtuple  # noqa: E402, F811
from contextlib import contextmanager, nullcontext, suppress  # noqa: E402, F811
from itertools import pairwise  # noqa: E402, F811

import torch  # noqa: E402, F811

STAGES = (
    "simulation",
    "inference",
    "replay",
    "backpropagation",
    "logging",
    "checkpoint",
    "evaluation",  # stays out of the steady window and of the warm-up
)
GPU_SAMPLE_EVERY = 64  # iterations; one in so many carries CUDA events
TRACE_PREFIX = "stopwatch:"  # of the annotations that mark the stages in a trace
# CPU time goes to the first of these fields that a moment belongs to
CPU_FIELDS = ("cuda_wait_s", "cuda_launch_s", "backend_s", "python_s", "simulator_s")
CALL_FIELDS = ("backend_calls", "cuda_api_calls", "kernel_launches", "graph_replays", "kernels")
OVERLAP_FIELDS = tuple("gpu_with_" + field for field in CPU_FIELDS)
TRACE_FIELDS = (*CPU_FIELDS, "gpu_s", "gpu_overlap_s", *OVERLAP_FIELDS, *CALL_FIELDS)


class Stage:
    """Self-time (seconds) and entries of one stage, kept by `with watch.stage(name): ...`."""

    __slots__ = ("watch", "name", "seconds", "count", "begin", "parent")

    def __init__(self, watch, name):
        self.watch, self.name, self.parent = watch, name, None
        self.seconds, self.count = 0.0, 0

    def __enter__(self):
        watch = self.watch
        if self.parent is not None:
            raise RuntimeError(f"stage {self.name!r} is open already")
        begin = watch.clock()  # the last call, so that Ctrl-C cannot leave the rest half done
        self.begin, self.parent, watch.current = begin, watch.current, self

    def __exit__(self, kind, value, traceback):
        watch, parent = self.watch, self.parent
        watch.current, self.parent = parent, None  # first, so that Ctrl-C cannot prevent it
        spent = watch.clock() - self.begin
        self.seconds += spent
        parent.seconds -= spent
        self.count += 1


class Stopwatch:
    """Seconds per stage and environment steps per second; leanrl/stopwatch.py is the manual."""

    __slots__ = ("clock", "contexts", "current", "around", "__dict__")  # slots: looked up faster

    def __init__(self, device, mode="time", warmup_steps=0, trace_after=500, trace_iterations=20):
        if mode not in ("off", "time", "trace"):
            raise ValueError(f"stopwatch mode {mode!r}: choose off, time or trace")
        self.device, self.mode, self.clock = device, mode, time.perf_counter
        self.on_gpu = device.type == "cuda"
        self.sampling = self.on_gpu and mode != "off"
        self.synchronize = (lambda: torch.cuda.synchronize(device)) if self.on_gpu else lambda: None
        self.stages = self.contexts = {name: Stage(self, name) for name in (*STAGES, "untracked")}
        self.untracked = self.current = self.stages["untracked"]
        self.own = Stage(self, "stopwatch")  # what samples cost, kept out of the other stages
        self.evaluation = self.stages["evaluation"]
        self.around = None  # on a sampled or traced iteration: what to put around each stage
        self.cost = self._calibrate()
        if mode == "off":
            self.stages, self.contexts = {}, dict.fromkeys(STAGES, nullcontext())
            self.contexts["evaluation"] = self.evaluation
        self.env_steps, self.steady, self.result, self.trace = 0, False, None, None
        self.course = self._course(warmup_steps, trace_after, trace_iterations)
        self._open_window()
        self.born = self.start

    def stage(self, name):
        """The context manager of one of STAGES; KeyError for any other name."""
        stage = self.contexts[name]
        return self.around(stage) if self.around else stage

    def tick(self, env_steps):
        """End an iteration, outside of every stage; `env_steps` counts them all since the start."""
        self.env_steps, self.ticked = env_steps, self.clock() - self.evaluation.seconds
        self.iterations += 1
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
        self.result = self.result or self._close_window()
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
        while self.mode != "trace" or self.iterations < trace_after:
            due = self.iterations % GPU_SAMPLE_EVERY == 0 and len(self.spans) < 10_000
            self.around = self._between_events if due and self.sampling else None
            yield
            if self.around:
                self.samples += 1
                if self.ticked - self.asked > 1:  # NVML takes its time
                    self.asked = self.ticked
                    with self.own, suppress(Exception):  # nvidia-ml-py is optional
                        percent = torch.cuda.utilization(self.device)
                        self.nvml.append((round(self.ticked - self.born, 1), percent))
        self.result = self._close_window()
        with torch.profiler.profile() as profiler:
            yield  # this iteration pays for the profiler's buffers and does not count
            self.synchronize()
            first_step, self.around = self.env_steps, self._annotated
            with torch.profiler.record_function(TRACE_PREFIX + "untracked"):
                for _ in range(trace_iterations):
                    yield
                self.synchronize()
            self.around = None
        events, steps = profiler.profiler.kineto_results.events(), self.env_steps - first_step
        untraced = self.result["window"]["seconds"] / trace_after
        self.trace = reduce_trace(events, trace_iterations, steps, untraced, self.on_gpu)

    def _open_window(self):
        """Count anew: at construction and at the end of the warm-up."""
        self.evaluated = self.evaluation.seconds  # in the warm-up
        for stage in (*self.stages.values(), self.own, self.evaluation):
            stage.seconds, stage.count = 0.0, 0
        self.samples, self.spans, self.nvml = 0, [], []
        self.first_step, self.iterations = self.env_steps, 0
        self.gpm = gpm(self.device) if self.sampling else None
        self.synchronize()
        self.start = self.ticked = self.asked = self.clock()

    def _close_window(self):
        """What report() tells of the steady window or, if the warm-up did not end, of the run."""
        begin, self.around = self.clock(), None
        self.synchronize()  # GPU work still queued belongs to the window
        self.ticked += self.clock() - begin
        seconds, (inside, outside) = self.ticked - self.start, self.cost
        self.untracked.count = self.iterations  # as if a tick cost what a stage does: a bit less
        calls = sum(stage.count for stage in self.stages.values())
        # the stages have subtracted theirs
        self.untracked.seconds += seconds + self.evaluation.seconds - calls * outside
        overhead = self.own.seconds + calls * (inside + outside)
        spans, stages = Counter(), {}
        for name, first, last in self.spans:
            spans[name] += first.elapsed_time(last) / 1e3 * self.iterations / max(self.samples, 1)
        for name, stage in self.stages.items():
            own, span = max(0.0, stage.seconds - stage.count * inside), spans.get(name)
            stages[name] = {"seconds": own, "count": stage.count, "gpu_span_seconds": span}
        window = {"steady": self.steady, "seconds": seconds, "iterations": self.iterations}
        percents, thin = [percent for _, percent in self.nvml], 1 + len(self.nvml) // 1000
        gpu = {"nvml_util": sum(percents) / len(percents) if percents else None}
        gpu["nvml_samples"] = self.nvml[::thin] or None
        gpu["sm_util"] = gpm(self.device, self.gpm) if self.gpm else None
        peak = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else None
        return {
            "sps_steady": self.steady_sps(),
            "warmup_seconds": self.start - self.born - self.evaluated if self.steady else None,
            "overhead_pct": 100 * overhead / seconds if seconds else None,
            "window": window | {"env_steps": self.env_steps - self.first_step},
            "stages": stages,
            "gpu": gpu | {"memory_peak_bytes": peak},
        }

    @contextmanager
    def _between_events(self, stage):
        with self.own:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        with stage:
            yield
        with self.own:
            last.record()
            self.spans.append((stage.name, first, last))

    @contextmanager
    def _annotated(self, stage):
        with torch.profiler.record_function(TRACE_PREFIX + stage.name), stage:
            yield

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
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        alloc = nvml.nvmlGpmSampleAlloc()
        sample = nvml.nvmlGpmSampleGet(nvml.nvmlDeviceGetHandleByUUID(gpu), alloc)
        if first is None:
            return sample
        query = nvml.c_nvmlGpmMetricsGet_t(nvml.NVML_GPM_METRICS_GET_VERSION, 1, first, sample)
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        return nvml.nvmlGpmMetricsGet(query).metrics[0].value


def layer(event):
    """The seconds in TRACE_FIELDS that a Kineto event adds to, or "stage", "overhead" or None."""
    name, on_cpu = event.name(), event.device_type() == torch.autograd.DeviceType.CPU
    if event.is_user_annotation():
        return "stage" if on_cpu and name.startswith(TRACE_PREFIX) else None
    known = event.activity_type() if hasattr(event, "activity_type") else None  # since torch 2.12
    names = ("Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource")
    if known == "overhead" or name in names:
        return "overhead"
    if on_cpu and re.match("cu(da)?[A-Z]", name):
        waits = re.search("Synchronize|Memcpy(?!.*Async)", name)
        return "cuda_wait_s" if waits else "cuda_launch_s"
    return "backend_s" if on_cpu else "gpu_s"


def reduce_trace(events, iterations, env_steps, untraced_seconds, on_gpu=True):
    """Kineto events of a trace window -> "trace" of stages.json; `untraced_seconds` per iteration.

    One sweep over time: the innermost stage, by its annotation, owns the moment and the calls that
    start in it, on whatever thread. The annotation "untracked" is the window.
    """
    Call = namedtuple("Call", "layer name id thread")
    edges, known, operators, pageable = [], {}, {}, set()
    if on_gpu:
        pageable = {e.correlation_id() for e in events if e.name().endswith("-> Pageable)")}
    for e in events:
        start, thread = e.start_ns(), e.start_thread_id()
        end, (begin, until) = start + max(1, e.duration_ns()), operators.get(thread, (0, 0))
        inside, annotation = begin <= start and end <= until, e.is_user_annotation()
        if inside and not on_gpu and not annotation:
            continue  # a part of an operator changes nothing, and most events are that
        name = e.name()
        signs = name, annotation, e.device_type()
        kind = known[signs] if signs in known else known.setdefault(signs, layer(e))
        if kind == "backend_s":
            if inside:
                continue
            operators[thread] = start, end
        if kind == "cuda_launch_s" and e.correlation_id() in pageable:
            kind = "cuda_wait_s"  # such a copy blocks
        call = Call(kind, name, e.correlation_id(), thread)
        if kind:
            edges += (start, 1, -end, call), (end, 0, 0, call)  # sorts ends first, then parents

    stages = {name: Counter() for name in (*STAGES, "untracked", None)}  # None: out of the window
    stack, running, launcher, kernels = [None], [], {}, []
    for (at, opens, _, call), (until, *_) in pairwise(sorted(edges)):
        if call.layer == "stage":
            stack.append(call.name[len(TRACE_PREFIX) :]) if opens else stack.pop()
        elif not opens:
            running.remove(call)
        else:
            stage, family = stages[stack[-1]], call.layer[:4]  # waits and launches are both "cuda"
            outermost = (call.thread, family) not in [(c.thread, c.layer[:4]) for c in running]
            if family == "cuda":
                launcher[call.id] = stack[-1]  # all kernels of a graph replay share its id
            if family == "cuda" and outermost:
                stage["cuda_api_calls"] += 1
                stage["kernel_launches"] += re.search("Launch.*Kernel", call.name) is not None
                stage["graph_replays"] += "GraphLaunch" in call.name
            elif call.layer == "backend_s" and outermost:
                stage["backend_calls"] += 1
            elif call.layer == "gpu_s" and not call.name.startswith(("Memcpy", "Memset")):
                kernels.append(call.id)
            running.append(call)
        if stack[-1]:
            stage, layers = stages[stack[-1]], {call.layer for call in running}
            span = (until - at) / 1e9
            rest = "simulator_s" if stack[-1] == "simulation" else "python_s"
            field = next((f for f in ("overhead", *CPU_FIELDS) if f in layers), rest)
            stage[field] += span
            for overlap in ("gpu_overlap_s", "gpu_with_" + field):
                stage[overlap] += span * ("gpu_s" in layers)
            for name in {launcher.get(call.id) for call in running if call.layer == "gpu_s"}:
                stages[name]["gpu_s"] += span
    for kernel in kernels:
        stages[launcher.get(kernel)]["kernels"] += 1

    del stages[None]
    total = sum(stages.values(), Counter())
    cpu = sum(total[field] for field in CPU_FIELDS)
    on_gpu = launcher or total["gpu_overlap_s"]
    missing = () if on_gpu else ("cuda", "gpu", "kernel", "graph")
    trace = {"iterations": iterations, "env_steps": env_steps}
    trace["inflation"] = cpu / iterations / untraced_seconds
    trace["gpu_busy"] = total["gpu_overlap_s"] / (cpu + total["overhead"]) if on_gpu else None
    for name, stage in stages.items():
        stages[name] = {f: None if f.startswith(missing) else stage[f] for f in TRACE_FIELDS}
    return trace | {"stages": stages}


def table(report):
    """`report` as text of at most 80 columns; what was not measured does not appear."""

    def short(x):
        return f"{x:,.0f}" if 100 <= x < 1e6 else f"{x:.3g}"

    def rows(stages, columns, steps):  # columns: {title: (field, factor)}, values are per step
        measured = {f for stage in stages.values() for f in stage if stage[f] is not None}
        columns = {title: c for title, c in columns.items() if c[0] in measured}
        yield f"{'stage':15}" + "".join(f"{title:>10}" for title in columns)
        for name, stage in stages.items():
            cells = (short((stage[f] or 0) * factor / steps) for f, factor in columns.values())
            yield f"{name:15}" + "".join(f"{cell:>10}" for cell in cells)

    window, trace, gpu = report["window"], report["trace"], report["gpu"]
    stages, steps = dict(report["stages"]), max(window["env_steps"], 1)
    evaluation = stages.pop("evaluation", {"count": 0})
    stages = {name: stage for name, stage in stages.items() if stage["count"]}
    share = 100 * steps / (sum(stage["seconds"] for stage in stages.values()) or 1)
    columns = {"seconds": ("seconds", steps), "share %": ("seconds", share)}
    columns |= {"us/step": ("seconds", 1e6), "entries": ("count", steps)}
    lines = ["stopwatch: " + ("steady window" if window["steady"] else "the warm-up did not end")]
    if stages:
        lines += rows(stages, columns | {"GPU us": ("gpu_span_seconds", 1e6)}, steps)
        lines.append(f"{'total':15}{short(window['seconds']):>10}")
    if evaluation["count"]:
        lines.append(f"{'evaluation':15}{short(evaluation['seconds']):>10}  not in the total")
    numbers = {"steady steps/s": report["sps_steady"], "all steps/s": report["sps_inclusive"]}
    numbers |= {"warm-up s": report["warmup_seconds"], "stopwatch %": report["overhead_pct"]}
    numbers |= {"GPU util. %": gpu["nvml_util"], "SM util. %": gpu["sm_util"]}
    if trace:
        lines.append("traced, per step: microseconds, then calls")
        titles = "CUDA wait", "launch", "backend", "python", "simulator", "GPU"
        times = {t: (f, 1e6) for t, f in zip(titles, TRACE_FIELDS, strict=False)}
        traced = {name: stage for name, stage in trace["stages"].items() if name in stages}
        lines += rows(traced, times, trace["env_steps"])
        titles = "operators", "CUDA API", "launches", "replays", "kernels"
        calls = {t: (f, 1) for t, f in zip(titles, CALL_FIELDS, strict=True)}
        lines += rows(traced, calls, trace["env_steps"])
        numbers |= {"inflation": trace["inflation"], "GPU busy": trace["gpu_busy"]}
    elif report["mode"] == "trace":
        lines.append("the run ended before the trace window did: no trace")
    lines += [f"{name:15}{short(x):>10}" for name, x in numbers.items() if x is not None]
    return "\n".join(lines)


# <<< stopwatch <<<
