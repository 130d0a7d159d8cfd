"""Reduces the trace of a training loop to seconds and calls per stage and layer.

A trace is what `torch.profiler.profile().export_chrome_trace` writes. The traced program marked its
stages by `torch.profiler.record_function("stopwatch:NAME")` on one thread, and the whole window as
the stage `untracked`; the innermost stage owns the moment. A stage's fields, without Kineto's own
overhead, and those of the GPU None if the trace shows none:

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

PREFIX = "stopwatch:"
CPU_LAYERS = {  # field -> title
    "simulator_s": "simulator",
    "python_s": "Python",
    "backend_s": "backend",
    "cuda_launch_s": "CUDA API",
    "cuda_wait_s": "GPU wait",
}
FIRST = ("overhead", "cuda_wait_s", "cuda_launch_s", "backend_s")  # a moment is the first's
CALLS = ("backend_calls", "cuda_api_calls", "kernel_launches", "graph_replays", "kernels")
FIELDS = (*CPU_LAYERS, "gpu_s", "gpu_overlap_s", *(f"gpu_with_{x}" for x in CPU_LAYERS), *CALLS)
LAYERS = {"cpu_op": "backend_s", "overhead": "overhead"}
LAYERS |= dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), "gpu_s")


def read_trace(folder: Path, report: dict) -> dict | None:
    """The reduced trace of the run with this stages.json; None if the run was not traced."""
    trace = report.get("trace") or {}
    if "file" not in trace:
        return None
    untraced = report["window"]["seconds"] / report["window"]["iterations"]
    events = read_events(folder / trace["file"])
    return reduce_trace(events, trace["iterations"], trace["env_steps"], untraced)


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
        return "stage" if name.startswith(PREFIX) else None
    if category in ("cuda_runtime", "cuda_driver"):
        waits = re.search("Synchronize|Memcpy(?!.*Async)", name)
        return "cuda_wait_s" if waits else "cuda_launch_s"
    return LAYERS.get(category)


def reduce_calls(events: list[dict]) -> list[tuple]:
    """(start, end, layer, name, correlation id, thread) of what counts, in ns.

    Operators inside of others are left out: they change nothing, and most events are that.
    """
    found, pageable, operators, calls = [], set(), {}, []
    for event in events:
        name = event.get("name", "")
        layer = layer_of(event.get("cat"), name)
        if layer and event["ph"] == "X":
            start, correlation = round(event["ts"] * 1000), event.get("args", {}).get("correlation")
            end = start + max(1, round(event["dur"] * 1000))
            found.append((start, end, layer, name, correlation, event["tid"]))
            if name.endswith("-> Pageable)"):
                pageable.add(correlation)
    in_order = sorted(found, key=lambda call: (call[0], -call[1]))  # parents first
    for start, end, layer, name, correlation, thread in in_order:
        if layer == "backend_s":
            if end <= operators.get(thread, start):
                continue
            operators[thread] = end
        if layer == "cuda_launch_s" and correlation in pageable:
            layer = "cuda_wait_s"  # such a copy blocks
        calls.append((start, end, layer, name, correlation, thread))
    return calls


def reduce_trace(events: list, iterations: int, env_steps: int, untraced: float | None) -> dict:
    """Events of a trace window -> stages and totals; `untraced` is the seconds of an iteration.

    One sweep over time. Kernels belong to the stage with the CUDA call that launched them.
    """
    calls, edges = reduce_calls(events), []
    for i, (start, end, *_) in enumerate(calls):
        edges += (start, 1, -end, i), (end, 0, 0, i)  # sorts ends first, then parents
    stages = defaultdict(Counter)  # {stage, None out of the window: {field: ns or calls}}
    bounds = {PREFIX + "untracked"} & {call[3] for call in calls}  # else all stages count
    stack, owner, launcher = [], None, {}  # launcher: {correlation id: stage}
    layers, lanes, on_gpu = Counter(), Counter(), []  # what runs: by layer, by thread; its ids
    for (at, opens, _, i), (until, *_) in pairwise(sorted(edges)):
        _, _, layer, name, correlation, thread = calls[i]
        layers[layer] += 1 if opens else -1
        if layer == "stage":
            stack.append(name) if opens else stack.remove(name)
            inside = stack and (not bounds or stack[0] in bounds)
            owner = stack[-1][len(PREFIX) :] if inside else None
        elif layer == "gpu_s":
            on_gpu.append(correlation) if opens else on_gpu.remove(correlation)
            if opens and not name.startswith(("Memcpy", "Memset")):
                stages[launcher.get(correlation)]["kernels"] += 1
        elif layer != "overhead":
            lane, stage = (thread, layer[:4]), stages[owner]  # launches and waits are "cuda"
            outermost = opens and not lanes[lane]
            lanes[lane] += 1 if opens else -1
            if outermost and layer == "backend_s":
                stage["backend_calls"] += 1
            elif outermost:
                stage["cuda_api_calls"] += 1
                stage["kernel_launches"] += re.search("Launch.*Kernel", name) is not None
                stage["graph_replays"] += "GraphLaunch" in name
            if opens and layer != "backend_s":
                launcher[correlation] = owner  # all kernels of a graph replay share its id
        if owner is None or until == at:
            continue
        rest = "simulator_s" if owner == "simulation" else "python_s"
        field = next((name for name in FIRST if layers[name]), rest)
        stages[owner][field] += until - at
        if on_gpu:
            stages[owner]["gpu_overlap_s"] += until - at
            stages[owner][f"gpu_with_{field}"] += until - at
            for stage in {launcher.get(correlation) for correlation in on_gpu}:
                stages[stage]["gpu_s"] += until - at

    stages.pop(None, None)
    total = sum(stages.values(), Counter())
    cpu = sum(total[layer] for layer in CPU_LAYERS)
    if not cpu:
        raise ValueError(f"has a trace without annotations {PREFIX}NAME")
    gpu = bool(launcher or total["gpu_overlap_s"])
    fields = [f for f in FIELDS if gpu or not f.startswith(("cuda", "gpu", "kernel", "graph"))]
    return {
        "env_steps": env_steps,
        "inflation": cpu / 1e9 / iterations / untraced if untraced else None,
        "gpu_busy": total["gpu_overlap_s"] / (cpu + total["overhead"]) if gpu else None,
        "stages": {
            name: dict.fromkeys(FIELDS)
            | {f: stage[f] / 1e9 if f.endswith("_s") else stage[f] for f in fields}
            for name, stage in stages.items()
        },
    }
