"""Run directories as the scripts write them, for the tests of what reads them."""

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
        "git_commit": "c0ffee",
        "cpu": {"model": "Abacus", "cores": 2, "threads": 2},
        "gpu": gpu,
        "gpu_driver": "1.0" if gpu else None,
        "load_average": [0.5 * seed, 0, 0],
        "python": "3.11.0",
        "versions": {"torch": "2.13.0"},
    }


def stages(steady, warmup=4.0, steps=1000):
    """A stages.json: `steps` in 20 seconds, `steady` steps per second after the warm-up."""
    return {
        "sps_steady": steady,
        "warmup_seconds": warmup,
        "sps_inclusive": steps / 20,
        "wall_seconds": 20.0,
    }


LAYERS = ("cuda_wait", "cuda_launch", "backend", "python", "simulator")
CALLS = ("backend_calls", "cuda_api_calls", "kernel_launches", "graph_replays", "kernels")


def report(steady=10.0, gpu=False):
    """A whole stages.json of 100 steps in 10 s, traced for 10 steps at half the speed.

    On a GPU a tenth of the backpropagation's backend waits, launches and operators runs beside it.
    """
    seconds = {"simulation": 1.0, "inference": 2.0, "backpropagation": 6.0, "untracked": 1.0}
    layers = {  # of a traced step, in units of what an untraced one takes
        "simulation": {"simulator": 0.02},
        "inference": {"python": 0.03, "backend": 0.01},
        "backpropagation": {"python": 0.04, "backend": 0.08},
        "untracked": {"python": 0.02},
    }
    if gpu:
        layers["backpropagation"] = {"cuda_wait": 0.06, "cuda_launch": 0.03, "backend": 0.03}
    found = {}
    for stage, parts in layers.items():
        fields = {f"{layer}_s": 10 * parts.get(layer, 0) for layer in LAYERS}
        fields |= {f"gpu_with_{layer}_s": 1 * parts.get(layer, 0) for layer in LAYERS}
        fields["gpu_with_cuda_wait_s"] = fields["cuda_wait_s"]
        fields |= dict.fromkeys(CALLS, 0)
        on_gpu = sum(fields[f"gpu_with_{layer}_s"] for layer in LAYERS)
        fields |= {"gpu_s": on_gpu, "gpu_overlap_s": on_gpu}
        found[stage] = fields
    found["backpropagation"] |= {"backend_calls": 2000, "cuda_api_calls": 400}
    found["backpropagation"] |= {"kernel_launches": 380, "graph_replays": 10, "kernels": 900}
    if not gpu:
        for fields in found.values():
            fields |= {f: None for f in fields if f.startswith(("cuda", "gpu", "kernel", "graph"))}
    return stages(steady) | {
        "schema": 1,
        "mode": "trace",
        "overhead_pct": 2.0,
        "window": {"steady": True, "seconds": 10.0, "iterations": 100, "env_steps": 100},
        "stages": {
            name: {"seconds": s, "count": 100, "gpu_span_seconds": None}
            for name, s in seconds.items()
        },
        "gpu": {
            "nvml_util": 50.0 if gpu else None,
            "nvml_samples": [[2.0, 0], [4.0, 100], [6.0, 50]] if gpu else None,
            "sm_util": None,
            "memory_peak_bytes": None,
        },
        "trace": {
            "iterations": 10,
            "env_steps": 10,
            "inflation": 2.0,
            "gpu_busy": 0.35 if gpu else None,
            "stages": found,
        },
    }


def write_events(path, rows):
    """TensorBoard files in `path` from (tag, step, seconds since the start, value)."""
    from torch.utils.tensorboard import SummaryWriter

    start = time.time()
    with SummaryWriter(path) as writer:
        for tag, step, seconds, value in rows:
            writer.add_scalar(tag, value, step, walltime=start + seconds)


def make_run(folder, number, config, stages):
    path = folder / f"HalfCheetah-v5__{config['args']['exp_name']}__1__{number}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if stages:
        (path / "stages.json").write_text(json.dumps(stages))
    return path
