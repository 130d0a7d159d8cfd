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
    args = {"total_timesteps": 1000, "env_id": "HalfCheetah-v5", "torch_threads": 2, **args}
    return {
        "args": {"exp_name": name, "seed": seed, **variant, **args},
        "command": f"leanrl/{name}.py --seed {seed}",
        "versions": {"torch": "2.13.0"},
        "gpu": gpu,
    }


def machine(load=0.5):
    """A machine.json as a program that starts runs leaves it beside config.json."""
    return {
        "cpu": {"model": "Abacus", "vectors": "AVX2", "cores": 2},
        "gpu": None,
        "gpu_driver": None,
        "python": "3.11.0",
        "versions": {"torch": "2.13.0", "gymnasium": "1.4.0"},
        "git_commit": "c0ffee",
        "load_average": [load, 0, 0],
    }


def stages(steady, warmup=4.0, steps=1000):
    """A stages.json of empty stages: `steps` in 20 s, at last `steady` steps per second."""
    return {
        "sps": steps / 20,
        "sps_steady": steady,
        "warmup_seconds": warmup,
        "wall_seconds": 20.0,
        "env_steps": 100,
        "stages": {"simulation": 0.0},
    }


def report(steady=10.0, gpu=False):
    """A whole stages.json of 100 steps in 10 s, to be traced for 10 steps at half the speed."""
    seconds = {"simulation": 1.0, "inference": 2.0, "backpropagation": 6.0, "untracked": 1.0}
    return stages(steady) | {
        "env_steps": 100,
        "iterations": 100,
        "seconds": 10.0,
        "stages": seconds,
        "gpu_stages": {"backpropagation": 3.0} if gpu else {},
    }


def usage(*rows, first=900):
    """Events of the last 100 steps of `report`: (second, processor seconds, and percent of a GPU).

    Before them is a row of the warm-up, and after them one that was written while a trace was made.
    """
    found = [("charts/SPS", first - 1, 1.0, first - 1.0)]  # so that seconds are those since set-up
    for i, (second, spent, *percent) in enumerate([(1.0, 0.5, 0), *rows, (20.1, 9.0, 0)]):
        found.append(("charts/cpu_seconds", first + i - 1, second, spent))
        if any(len(row) > 2 for row in rows):
            found.append(("charts/gpu_percent", first + i - 1, second, percent[0]))
    return found


def learning(seed=1, speed=1, count=20):
    """Events of a run: `count` returns, the k-th of k times the seed after k / speed seconds."""
    found = [("charts/SPS", 0, 0, 0.0)]
    for k in range(1, count + 1):
        found.append(("charts/episodic_return", 50 * k, k / speed, float(k * seed)))
        found.append(("charts/SPS", 50 * k, k / speed, 50.0 * speed))
    return found


def event(category, name, start, end, correlation=0, thread=1):
    """An event of a trace; `start` and `end` in ns."""
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    named = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread}
    return named | times | {"args": {"correlation": correlation}}


def trace_events(gpu=False, operators=2000, iterations=10):
    """The trace of `report`: in all `operators` of the backpropagation, 10 of the inference.

    On a GPU the backpropagation's waits, and a tenth of its launches and operators, run beside it.
    """
    ms = 10**6  # ns
    stages = {  # of an iteration: {stage: {layer: ns}}
        "simulation": {"simulator": 20 * ms},
        "inference": {"python": 30 * ms, "backend": 10 * ms},
        "backpropagation": {"python": 40 * ms, "backend": 80 * ms},
        "untracked": {"python": 20 * ms},
    }
    if gpu:
        parts = {"cuda_launch": 30 * ms, "cuda_wait": 60 * ms, "backend": 30 * ms}
        stages["backpropagation"] = parts
    calls = {
        "cuda_launch": ["cudaLaunchKernel"] * 38 + ["cudaGraphLaunch"],
        "cuda_wait": ["cudaStreamSynchronize"],
    }
    found, at = [], 0
    for iteration in range(iterations):
        first = at
        for stage, parts in stages.items():
            begin = at
            calls["backend"] = ["aten::mm"] * (1 if stage == "inference" else operators // 10)
            for layer, length in parts.items():
                if layer == "cuda_launch":
                    launch = len(found)
                if gpu and stage == "backpropagation":
                    beside = length if layer == "cuda_wait" else length // 10
                    found.append(event("kernel", "gemm", at, at + beside, launch + 1, thread=7))
                names = calls.get(layer, [])
                for i, name in enumerate(names):
                    times = (at + k * length // len(names) for k in (i, i + 1))
                    category = "cpu_op" if layer == "backend" else "cuda_runtime"
                    found.append(event(category, name, *times, correlation=len(found)))
                at += length
            if stage != "untracked":
                found.append(event("user_annotation", f"stopwatch:{stage}", begin, at))
        found.append(event("user_annotation", f"ProfilerStep#{iteration + 1}", first, at))
    return found


def write_trace(path, events):
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), 1))


def read_record(stem):
    return json.loads(stem.with_name(f"{stem.name}.json").read_text())


def write_events(path, rows):
    """TensorBoard files in `path` from (tag, step, seconds since the start, value)."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(path) as writer:
        start = time.time()  # not before the second that is in the file's name
        for tag, step, seconds, value in rows:
            writer.add_scalar(tag, value, step, walltime=start + seconds)


def make_run(folder, number, config, stages, events=None):
    """A run directory; `events` are those of its trace."""
    path = folder / f"HalfCheetah-v5__{config['args']['exp_name']}__1__{number}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "machine.json").write_text(json.dumps(machine(0.5 * config["args"]["seed"])))
    if stages:
        (path / "stages.json").write_text(json.dumps(stages))
    if events:
        write_trace(path / "trace.json.gz", events)
    return path


def add_part(path, before, found, **args):
    """What --resume adds to the run in `path` after `before` steps; `found` None: it was killed."""
    made = json.loads((path / "config.json").read_text())
    made["args"] |= {"resume": str(path)} | args
    (path / f"config_{before}.json").write_text(json.dumps(made))
    if found:
        (path / f"stages_{before}.json").write_text(json.dumps(found))


def make_traced_run(folder, number, config, stages=None, operators=2000):
    """A run directory with what `report` and `trace_events` tell."""
    gpu = bool(config["gpu"])
    events = trace_events(gpu, operators)
    return make_run(folder, number, config, stages or report(gpu=gpu), events)
