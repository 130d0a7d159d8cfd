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
    watch.report(run_dir / "stages.json")   # right after the loop: writes the file, prints a table

Stages, the same everywhere: simulation, inference, replay (rollout or replay storage, sampling),
backpropagation (all updates), logging, checkpoint (writing it) and evaluation; `untracked` is what
none of them covers. Evaluation is no part of training: its time counts neither for the steady
window nor for the warm-up. A stage opened inside another one pauses it, so every moment belongs to
one stage. Open stages on the main thread, outside of compiled or captured callables.

The first tick with `env_steps >= warmup_steps` ends the warm-up (compilation, graph capture,
random exploration) and begins the steady window, which lasts until the report or, in trace mode,
until the trace begins.

Modes
    off     steps per second and the seconds of the evaluation only
    time    seconds and entries per stage. With CUDA also, on every 61st iteration, a pair of CUDA
            events per stage and, at most once a second, NVML's utilization. Nothing in the loop
            waits for the device
    trace   the same, and after `trace_after` (at least 1) iterations of the steady window one that
            takes the profiler's start and then `trace_iterations` under Kineto, written in Chrome's
            format next to the report: a range "stopwatch:NAME" per stage, "stopwatch:untracked"
            around them all. plots/profile.py reads it

What the numbers mean; null is "not measured", never 0
    sps_steady        environment steps per second of the steady window
    sps_inclusive     all steps / all seconds since construction, as in CleanRL's charts/SPS
    warmup_seconds    construction to the steady window; wall_seconds: construction to the report
    window            what the stages are about: the steady window or, if the warm-up did not end
                      (`steady` false), the run so far; without evaluation
    stages            seconds: self-time on the CPU. A wait for the GPU shows in the stage that
                      waits, so read metrics in the stage whose work they report.
                      gpu_span_seconds: between a stage's CUDA events, mean of the samples times
                      entries: the work that the stage has launched, gaps included.
                      Empty in mode off; `untracked` counts iterations
    gpu               nvml_samples: [seconds since construction, percent of time with any kernel
                      running, 100 of which may be 1% of the chip]; nvml_util: their mean
    trace             file, iterations and env_steps of the trace

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
        temporary.write_bytes(content)
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
    parser = argparse.ArgumentParser(description="Keep the stopwatch identical in every script.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--stamp", action="store_true", help="copy the region into every script")
    action.add_argument("--check", action="store_true", help="compare; exit 1 if a script differs")
    verdicts = stamp(folder, write=parser.parse_args(arguments).stamp)
    for path, verdict in verdicts.items():
        print(f"{path.name}: {verdict}")
    return int(any(verdict not in ("same", "stamped") for verdict in verdicts.values()))


if __name__ == "__main__":  # above the region, so that stamping needs no torch
    sys.exit(main())


# >>> stopwatch: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>
import json  # noqa: E402, F811
import sys  # noqa: E402, F811
from contextlib import contextmanager, nullcontext, suppress  # noqa: E402, F811
from time import perf_counter  # noqa: E402, F811

import torch  # noqa: E402, F811


class Stage:
    """Self-time (seconds) and entries of a stage; one that opens inside another pauses it."""

    def __init__(self, watch):
        self.watch, self.seconds, self.count = watch, 0.0, 0

    def __enter__(self):
        watch, now = self.watch, perf_counter()
        watch.open[-1].seconds += now - watch.since
        watch.since = now
        watch.open.append(self)

    def __exit__(self, kind, value, traceback):
        watch, now = self.watch, perf_counter()
        watch.open.pop().seconds += now - watch.since
        watch.since = now
        self.count += 1


class Stopwatch:
    """Seconds per stage and environment steps per second; leanrl/stopwatch.py is the manual."""

    def __init__(self, device, mode="time", warmup_steps=0, trace_after=500, trace_iterations=20):
        self.mode, self.on_gpu, self.born = mode, device.type == "cuda", perf_counter()
        self.synchronize = torch.cuda.synchronize if self.on_gpu else lambda: None
        self.env_steps, self.warmup_seconds, self.result, self.trace = 0, None, None, None
        self._begin_window()
        self.course = self._course(warmup_steps, trace_after, trace_iterations)

    def tick(self, env_steps):
        """Ends an iteration, outside of every stage; `env_steps` counts all since construction."""
        with self.untracked:  # an entry is an iteration
            self.env_steps = env_steps
        next(self.course, None)

    def speed(self, env_steps):
        """Steps per second: of all `env_steps` so far; in the steady window, before it None."""
        now = perf_counter()
        steady = (env_steps - self.first_step) / (now - self.start - self.evaluation.seconds)
        return env_steps / (now - self.born), self.warmup_seconds and steady

    def report(self, path):
        """Writes the report to `path`, prints a table, writes a trace beside it -> the report."""
        self.course.close()  # gives up a trace that is not complete
        trace = self.trace and {**self.trace, "file": path.name.replace("stages", "trace") + ".gz"}
        report = (self.result or self._end_window()) | {"mode": self.mode, "trace": trace}
        report["wall_seconds"] = perf_counter() - self.born
        report["sps_inclusive"] = self.env_steps / report["wall_seconds"]
        path.write_text(json.dumps(report, indent=2))
        steps = report["window"]["env_steps"] / 1e6 or float("nan")  # nothing is per step of none
        lines = [f"{'stage':16}{'seconds':>12}{'us/step':>12}{'GPU us/step':>14}"]
        for name, stage in report["stages"].items():
            seconds, span = stage["seconds"], stage["gpu_span_seconds"]
            gpu = "" if span is None else f"{span / steps:14,.1f}"
            lines.append(f"{name:16}{seconds:12,.2f}{seconds / steps:12,.1f}{gpu}")
        numbers = (report | report["gpu"]).items()
        lines += [f"{name:16}{x:12,.1f}" for name, x in numbers if isinstance(x, float)]
        print(*lines, f"run directory: {path.parent}", sep="\n", file=sys.stderr)
        if trace:  # last, because it takes seconds, in which Ctrl-C may come
            self.profiler.export_chrome_trace(str(path.with_name(trace["file"])))
        return report

    def _course(self, warmup_steps, trace_after, trace_iterations):
        """What a run goes through, a `yield` per tick: warm-up, steady window, perhaps a trace."""
        while self.env_steps < warmup_steps:
            yield
        self.warmup_seconds = perf_counter() - self.born - self.evaluation.seconds
        self._begin_window()
        while self.mode != "trace" or self.untracked.count < trace_after:
            sampled = self.on_gpu and self.mode != "off" and self.untracked.count % 61 == 0
            self.stage = self._between_events if sampled else self.contexts.__getitem__
            yield
            if sampled and perf_counter() > self.asked + 1:  # a second: NVML takes its time
                self.asked = perf_counter()
                with suppress(Exception):  # nvidia-ml-py is optional
                    self.nvml.append((round(self.asked - self.born, 1), torch.cuda.utilization()))
        self.result, self.stage = self._end_window(), self.contexts.__getitem__
        with torch.profiler.profile() as self.profiler:
            yield  # an iteration that pays for the profiler's buffers
            first_step, self.stage = self.env_steps, self._annotated
            with torch.profiler.record_function("stopwatch:untracked"):
                for _ in range(trace_iterations):
                    yield
                self.synchronize()
        self.trace = {"iterations": trace_iterations, "env_steps": self.env_steps - first_step}

    def _begin_window(self):
        """Counts anew: at construction and at the end of the warm-up."""
        names = ("simulation", "inference", "replay", "backpropagation", "logging", "checkpoint")
        self.stages = {name: Stage(self) for name in (*names, "untracked", "evaluation")}
        self.untracked, self.evaluation = self.stages["untracked"], self.stages["evaluation"]
        self.contexts, self.open = dict(self.stages), [self.untracked]
        if self.mode == "off":  # but for the evaluation, which is never part of a window
            self.contexts |= dict.fromkeys(names, nullcontext())
        self.stage = self.contexts.__getitem__  # hands out the context manager of a stage
        self.first_step, self.spans, self.nvml = self.env_steps, [], []
        self.synchronize()
        self.start = self.since = self.asked = perf_counter()

    def _end_window(self):
        """What the steady window or, if the warm-up did not end, the whole run has to say."""
        self.synchronize()  # GPU work still queued belongs to the window
        steady, stages = self.speed(self.env_steps)[1], {}
        window = {"steady": steady is not None, "env_steps": self.env_steps - self.first_step}
        window["iterations"] = self.untracked.count
        window["seconds"] = perf_counter() - self.start - self.evaluation.seconds
        run = {"schema": 2, "sps_steady": steady, "warmup_seconds": self.warmup_seconds}
        for name, stage in self.stages.items() if self.mode != "off" else ():
            spans = [a.elapsed_time(b) / 1e3 for label, a, b in self.spans if label == name]
            span = sum(spans) / len(spans) * stage.count if spans else None
            stages[name] = dict(seconds=stage.seconds, count=stage.count, gpu_span_seconds=span)
        utilization = sum(percent for _, percent in self.nvml) / max(len(self.nvml), 1)
        gpu = {"nvml_util": utilization if self.nvml else None, "nvml_samples": self.nvml or None}
        return run | {"window": window, "stages": stages, "gpu": gpu}

    @contextmanager
    def _between_events(self, name):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        with self.contexts[name]:
            yield
        last.record()
        self.spans.append((name, first, last))

    @contextmanager
    def _annotated(self, name):
        with torch.profiler.record_function("stopwatch:" + name), self.contexts[name]:
            yield


# <<< stopwatch <<<
