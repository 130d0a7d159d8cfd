"""Run directories as the scripts write them, for the tests of what reads them."""

import gzip
import json
import time

import run_dirs

SCRIPT = "sac_continuous_action"


def config(row="baseline", seed=1, gpu=None, script=SCRIPT, **args):
    """A config.json as a script of that row writes it."""
    variant = (
        {f: f in row.split("+") for f in ("compile", "cudagraphs")} if row != "baseline" else {}
    )
    name = script + (run_dirs.VARIANT if variant else "")
    args = {"total_timesteps": 1000, "env_id": "HalfCheetah-v5", **args}
    return {
        "args": {"exp_name": name, "seed": seed, **variant, **args},
        "command": f"leanrl/{name}.py --seed {seed}",
        "cpu": {"cores": 2, "threads": 2},
        "gpu": gpu,
        "python": "3.11.0",
        "versions": {"torch": "2.13.0"},
    }


def machine(load=0.5):
    """A machine.json as a program that starts runs leaves it beside config.json."""
    cpu = {"model": "Abacus", "vectors": "AVX2", "cores": 2}
    about = {"cpu": cpu, "gpu": None, "gpu_driver": None, "git_commit": "c0ffee"}
    return about | {"load_average": [load, 0, 0]}


def stages(steady, warmup=4.0, steps=1000):
    """A stages.json: `steps` in 20 seconds, `steady` steps per second after the warm-up."""
    return {
        "sps_steady": steady,
        "warmup_seconds": warmup,
        "sps_inclusive": steps / 20,
        "wall_seconds": 20.0,
    }


def report(steady=10.0, gpu=False):
    """A whole stages.json of 100 steps in 10 s, traced for 10 steps at half the speed."""
    seconds = {"simulation": 1.0, "inference": 2.0, "backpropagation": 6.0, "untracked": 1.0}
    return stages(steady) | {
        "schema": 2,
        "mode": "trace",
        "window": {"steady": True, "seconds": 10.0, "iterations": 100, "env_steps": 100},
        "stages": {
            name: {"seconds": s, "count": 100, "gpu_span_seconds": None}
            for name, s in seconds.items()
        },
        "gpu": {
            "nvml_util": 50.0 if gpu else None,
            "nvml_samples": [[2.0, 0], [4.0, 100], [6.0, 50]] if gpu else None,
            "memory_peak_bytes": None,
        },
        "trace": {"file": "trace.json.gz", "iterations": 10, "env_steps": 10},
    }


def event(category, name, start, end, correlation=0, thread=1):
    """An event of a trace; `start` and `end` in ns."""
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    named = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread}
    return named | times | {"args": {"correlation": correlation}}


def trace_events(gpu=False, operators=2000):
    """The trace of `report`: `operators` of the backpropagation, 10 of the inference.

    On a GPU the backpropagation's waits, and a tenth of its launches and operators, run beside it.
    """
    ms = 10**6  # ns
    stages = {  # {stage: {layer: ns}}
        "simulation": {"simulator": 200 * ms},
        "inference": {"python": 300 * ms, "backend": 100 * ms},
        "backpropagation": {"python": 400 * ms, "backend": 800 * ms},
        "untracked": {"python": 200 * ms},
    }
    if gpu:
        parts = {"cuda_launch": 300 * ms, "cuda_wait": 600 * ms, "backend": 300 * ms}
        stages["backpropagation"] = parts
    launches = ["cudaLaunchKernel"] * 380 + ["cudaGraphLaunch"] * 10
    found, at, launch = [], 0, None
    for stage, parts in stages.items():
        begin = at
        for layer, length in parts.items():
            count = 10 if stage == "inference" else operators
            names = {"backend": ["aten::mm"] * count, "cuda_launch": launches}
            names["cuda_wait"] = ["cudaStreamSynchronize"] * 10
            calls = names.get(layer, [])
            if layer == "cuda_launch":
                launch = len(found)
            if gpu and stage == "backpropagation":
                beside = length if layer == "cuda_wait" else length // 10
                found.append(event("kernel", "gemm", at, at + beside, launch + 1, thread=7))
            for i, name in enumerate(calls):
                times = (at + k * length // len(calls) for k in (i, i + 1))
                category = "cpu_op" if layer == "backend" else "cuda_runtime"
                found.append(event(category, name, *times, correlation=len(found)))
            at += length
        if stage != "untracked":
            found.append(event("user_annotation", f"stopwatch:{stage}", begin, at))
    return [event("user_annotation", "stopwatch:untracked", 0, at), *found]


def write_trace(path, events):
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), 1))


def write_events(path, rows):
    """TensorBoard files in `path` from (tag, step, seconds since the start, value)."""
    from torch.utils.tensorboard import SummaryWriter

    start = time.time()
    with SummaryWriter(path) as writer:
        for tag, step, seconds, value in rows:
            writer.add_scalar(tag, value, step, walltime=start + seconds)


def make_run(folder, number, config, stages, events=None):
    """A run directory; one whose stages name a trace has `events` in it, or what `report` tells."""
    path = folder / f"HalfCheetah-v5__{config['args']['exp_name']}__1__{number}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "machine.json").write_text(json.dumps(machine(0.5 * config["args"]["seed"])))
    if stages:
        (path / "stages.json").write_text(json.dumps(stages))
    if stages and stages.get("trace"):
        write_trace(path / "trace.json.gz", events or trace_events(bool(config["gpu"])))
    return path
