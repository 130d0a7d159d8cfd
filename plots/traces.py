"""Reduces the trace of a training loop to seconds and calls per stage and layer.

A trace is what `torch.profiler.profile().export_chrome_trace` writes. The traced program marked its
stages by `torch.profiler.record_function("stopwatch:NAME")` on one thread; the innermost one owns
the moment. If `profiler.step()` marked iterations, what lies outside of whole ones does not count,
and `untracked` is what no stage covers in them. A stage's fields, without Kineto's own overhead,
and those of the GPU None if the trace shows none:

    cuda_wait_s, cuda_launch_s, backend_s, python_s, simulator_s
                    CPU time, each without those before it: synchronizations and blocking copies;
                    other CUDA API calls; operators and compiled code on any thread; the rest,
                    called simulator_s in the simulation and python_s elsewhere
    gpu_s, gpu_overlap_s
                    union over the streams of kernels, copies and fills that the stage launched (by
                    correlation id); and of those that ran while it was open, whoever launched them
    gpu_with_...    gpu_overlap_s by what the CPU did meanwhile: gpu_with_cuda_wait_s is the GPU
                    alone at work, the others both
    backend_calls   outermost operators per thread, Python to backend in RL-Scope's transitions
    cuda_api_calls, kernel_launches, graph_replays, kernels
                    backend to CUDA; all kernels of a graph replay count as kernels
"""

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

STAGE = "stopwatch:"
ITERATION = "ProfilerStep#"
CPU_LAYERS = {  # field -> title
    "simulator_s": "simulator",
    "python_s": "Python",
    "backend_s": "backend",
    "cuda_launch_s": "CUDA API",
    "cuda_wait_s": "GPU wait",
}
# a moment counts for the first of these that is running
FIRST = ("overhead", "cuda_wait_s", "cuda_launch_s", "backend_s")
CALLS = ("backend_calls", "cuda_api_calls", "kernel_launches", "graph_replays", "kernels")
BESIDE = tuple(f"gpu_with_{layer}" for layer in CPU_LAYERS)
FIELDS = (*CPU_LAYERS, "gpu_s", "gpu_overlap_s", *BESIDE, *CALLS)
LAYERS = {
    "cpu_op": "backend_s",
    "overhead": "overhead",
    "kernel": "gpu_s",
    "gpu_memcpy": "gpu_s",
    "gpu_memset": "gpu_s",
}


class Call(NamedTuple):
    """A range of the trace that counts, in ns."""

    start: int
    end: int
    layer: str
    name: str
    correlation: int | None  # id
    thread: int


def read_trace(folder: Path, report: dict) -> dict | None:
    """The reduced trace of the run with this stages.json; None if the run was not traced."""
    path = folder / "trace.json.gz"
    if not path.exists():
        return None
    trace = reduce_trace(read_events(path))
    untraced = report["seconds"] / report["iterations"]
    trace["inflation"] = trace["seconds"] / trace["iterations"] / untraced
    if trace["gpu_busy"] is not None:  # kernels are no slower under the profiler, all else is
        trace["gpu_busy"] = min(1, trace["gpu_busy"] * trace["inflation"])
    trace["env_steps"] = trace["iterations"] * report["env_steps"] / report["iterations"]
    return trace


def read_events(path: Path) -> list[dict]:
    """The events of a trace file; ValueError says what is wrong with it."""
    try:
        with gzip.open(path, "rt") as file:
            return json.load(file)["traceEvents"]
    except FileNotFoundError:
        raise ValueError(f"has no {path.name}") from None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        raise ValueError(f"{path.name} is damaged") from None


def layer_of(category: str | None, name: str) -> str | None:
    """The field of seconds that an event adds to, or "stage", "overhead" or None."""
    if category == "user_annotation":
        stage = name.startswith((STAGE, ITERATION)) and name != STAGE + "untracked"
        return "stage" if stage else None
    if category in ("cuda_runtime", "cuda_driver"):
        waits = re.search("Synchronize|Memcpy(?!.*Async)", name)
        return "cuda_wait_s" if waits else "cuda_launch_s"
    return LAYERS.get(category)


def reduce_calls(events: list[dict]) -> list[Call]:
    """What counts, parents first.

    Operators inside of others are left out: they change nothing, and most events are that.
    """
    found = []
    kept = []
    for event in events:
        name = event.get("name", "")
        layer = layer_of(event.get("cat"), name)
        if layer and event["ph"] == "X":
            start = round(event["ts"] * 1000)
            end = start + max(1, round(event["dur"] * 1000))
            correlation = event.get("args", {}).get("correlation")
            found.append(Call(start, end, layer, name, correlation, event["tid"]))
    pageable = {call.correlation for call in found if call.name.endswith("-> Pageable)")}
    operators: dict = {}  # {thread: end of the last one}
    for call in sorted(found, key=lambda call: (call.start, -call.end)):
        if call.layer == "backend_s":
            if call.end <= operators.get(call.thread, call.start):
                continue
            operators[call.thread] = call.end
        if call.layer == "cuda_launch_s" and call.correlation in pageable:
            call = call._replace(layer="cuda_wait_s")  # such a copy blocks
        kept.append(call)
    return kept


def whole_iterations(calls: list[Call]) -> list[Call]:
    """Those that are marked, without the last one where the end of the run has cut it off."""
    marks = [call for call in calls if call.name.startswith(ITERATION)]
    ranges = [call for call in calls if call.name.startswith(STAGE)]
    stages = []  # of each
    for mark in marks:
        stages.append({call.name for call in ranges if mark.start <= call.start < mark.end})
    without = bool(marks) and not stages[-1]
    with_fewer = len(marks) > 1 and stages[-1] < stages[-2]
    if without or with_fewer:
        marks.pop()
        if not marks:
            raise ValueError("ended before one iteration of its trace did")
    return marks


def reduce_trace(events: list[dict]) -> dict:
    """Events of a trace -> its stages and totals.

    One sweep over time. Kernels belong to the stage with the CUDA call that launched them.
    """
    calls = reduce_calls(events)
    edges = []
    for i, call in enumerate(calls):
        edges.append((call.start, 1, -call.end, i))  # sorts ends first, then parents
        edges.append((call.end, 0, 0, i))
    edges.sort()
    bounds = {call.name for call in whole_iterations(calls)}  # if none, all stages count
    stages = defaultdict(Counter)  # {stage, None out of the bounds: {field: ns or calls}}
    stack = []
    owner = None  # the stage whose moment it is
    launcher = {}  # {correlation id: stage}
    running = Counter()  # calls by layer
    lanes = Counter()  # calls by thread and layer
    on_gpu = []  # correlation ids
    for edge, following in pairwise(edges):
        at, opens, _, i = edge
        until = following[0]
        call = calls[i]
        running[call.layer] += 1 if opens else -1
        if call.layer == "stage":
            if opens:
                stack.append(call)
            else:
                stack.remove(call)
            inside = stack and (not bounds or stack[0].name in bounds)
            owner = stack[-1].name.removeprefix(STAGE) if inside else None
            if owner in bounds:
                owner = "untracked"
        elif call.layer == "gpu_s":
            if opens:
                on_gpu.append(call.correlation)
            else:
                on_gpu.remove(call.correlation)
            if opens and not call.name.startswith(("Memcpy", "Memset")):
                stages[launcher.get(call.correlation)]["kernels"] += 1
        elif call.layer != "overhead":
            stage = stages[owner]
            lane = call.thread, call.layer[:4]  # launches and waits are "cuda"
            outermost = opens and not lanes[lane]
            lanes[lane] += 1 if opens else -1
            if outermost and call.layer == "backend_s":
                stage["backend_calls"] += 1
            elif outermost:
                stage["cuda_api_calls"] += 1
                stage["kernel_launches"] += re.search("Launch.*Kernel", call.name) is not None
                stage["graph_replays"] += "GraphLaunch" in call.name
            if opens and call.layer != "backend_s":
                launcher[call.correlation] = owner  # all kernels of a graph replay share its id
        if owner is None or until == at:
            continue
        rest = "simulator_s" if owner == "simulation" else "python_s"
        field = next((name for name in FIRST if running[name]), rest)
        stages[owner][field] += until - at
        if on_gpu:
            stages[owner]["gpu_overlap_s"] += until - at
            stages[owner][f"gpu_with_{field}"] += until - at
            for stage in {launcher.get(correlation) for correlation in on_gpu}:
                stages[stage]["gpu_s"] += until - at

    stages.pop(None, None)
    training = [stage for name, stage in stages.items() if name != "evaluation"]
    total = sum(training, Counter())
    cpu = sum(total[layer] for layer in CPU_LAYERS)
    if not cpu:
        raise ValueError(f"has a trace without annotations {STAGE}NAME")
    gpu = bool(launcher or total["gpu_overlap_s"])
    trace = {
        "iterations": max(len(bounds), 1),
        "seconds": cpu / 1e9,
        "gpu_busy": total["gpu_overlap_s"] / (cpu + total["overhead"]) if gpu else None,
        "stages": {},
    }
    for name, stage in stages.items():
        fields = trace["stages"][name] = dict.fromkeys(FIELDS)
        for field in FIELDS:
            if gpu or not field.startswith(("cuda", "gpu", "kernel", "graph")):
                fields[field] = stage[field] / 1e9 if field.endswith("_s") else stage[field]
    return trace
