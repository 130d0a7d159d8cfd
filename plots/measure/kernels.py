"""Kernels that a GPU would have to run per environment step, counted without a GPU.

    pip install -r requirements/triton.txt
    python plots/measure/kernels.py

Each script runs with --compile for some steps on HalfCheetah, on a CPU, and torch.compile gets
Triton's code as for an sm_90, which Triton's interpreter runs (tests/triton_on_cpu.py). Counted
between two steps of the environment, long after all is compiled:

    Inductor        launches of Triton kernels
    products        calls of libraries: cuBLAS on a GPU, ATen here
    others          operators outside of compiled code that are not views: a kernel each at least
    in all          the sum: launches per step without CUDA graphs
    with graphs     replays, the copies of their inputs, and what is outside of captured functions
    MB              that these read and write, each argument once

Arithmetic, not a measurement: us per step on an H100 = kernels at 2 to 3 us per node of a graph and
MB at 3.35 TB/s. Copies between CPU and GPU and the host's waits are not in it, since a CPU's
tensors need none; test_rehearsal.py has our waits. PPO: rollouts of 256 steps in 4 minibatches,
which are as many updates of 64 rows per step as the default's 2,048 in 32.

Written to --out: kernels.md and .json.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import processes
import run_dirs
from run_dirs import ROOT

NODE_US = (2, 3)  # of a kernel in a graph, on H100s: shared by many reports, measured nowhere here
BYTES_PER_SECOND = 3.35e12
OFF_POLICY = ["--learning-starts", "20", "--buffer-size", "1000", "--total-timesteps", "34"]
ON_POLICY = ["--num-steps", "256", "--num-minibatches", "4", "--total-timesteps", "1024"]
SCRIPTS = {  # -> flags, first and last step of the window
    "sac_continuous_action": (OFF_POLICY, 26, 30),
    "td3_continuous_action": (OFF_POLICY, 26, 30),
    "ppo_continuous_action": (ON_POLICY, 512, 768),
}
CAPTURED = {  # methods of our agents that become CUDA graphs; `draw` is the replay buffer's
    "sac_continuous_action": ("act", "update", "draw"),
    "td3_continuous_action": ("act", "update", "draw"),
    "ppo_continuous_action": ("prepare", "learn"),
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "convolution", "convolution_backward"}
NOTHING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach"}
NOTHING |= {"_unsafe_view", "_local_scalar_dense", "set_", "resize_", "lift_fresh", "alias"}


# A worker, in which torch and Triton are changed for good


def work(script: str) -> dict:
    """Counts per environment step."""
    sys.path.append(str(ROOT / "tests"))
    triton_on_cpu = import_module("triton_on_cpu")  # before anything else imports Triton
    import torch
    from gymnasium.envs.mujoco.mujoco_env import MujocoEnv
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    counts = Counter()
    state = {"paused": 0, "captured": 0, "steps": 0}

    @contextmanager
    def more(key):
        state[key] += 1
        try:
            yield
        finally:
            state[key] -= 1

    def size(tree) -> int:
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def count(kind: str, moved: int) -> None:
        counts[kind] += 1
        counts["bytes"] += moved
        if not state["captured"]:
            counts["outside"] += 1

    class Operators(TorchDispatchMode):
        @classmethod
        def is_infra_mode(cls):  # torch.compile refuses to work in other modes
            return True

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            name = function._schema.name.split("::")[1]
            if not state["paused"] and not function.is_view and name not in NOTHING:
                kind = "products" if name in PRODUCTS else "others"
                count(kind, size((args, kwargs, result)))
            return result

    def paused(function):
        def call(*args, **kwargs):
            with more("paused"):
                return function(*args, **kwargs)

        return call

    def captured(function):
        """Its first call per step of a stack of them is a replay, with copies of its inputs."""

        def call(*args, **kwargs):
            if not state["captured"]:
                tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                counts["replays"] += 1
                counts["copies"] += len(tensors)
            with more("captured"):
                return function(*args, **kwargs)

        return call

    launch = triton_on_cpu.CachingAutotuner.run

    def counted(kernel, *args, **kwargs):
        count("Inductor", size(args))
        return paused(launch)(kernel, *args, **kwargs)

    triton_on_cpu.CachingAutotuner.run = counted
    frames = import_module("torch._dynamo.convert_frame")
    frames._compile = paused(frames._compile)

    flags, first, last = SCRIPTS[script]
    found = {}
    simulate = MujocoEnv.do_simulation

    def step(*args):
        state["steps"] += 1
        if state["steps"] in (first, last):
            found[state["steps"]] = counts.copy()
        return simulate(*args)

    MujocoEnv.do_simulation = step
    names = CAPTURED[script]
    path = ROOT / f"leanrl/{script}_torchcompile.py"
    sys.argv = [str(path), "--compile", *flags, "--no-cuda"]
    module = import_module(f"leanrl.{script}_torchcompile")
    compile_agent = module.compile_agent

    def compile_and_capture(agent):
        compile_agent(agent)
        for name in names:
            if name != "draw":
                setattr(agent, name, captured(getattr(agent, name)))

    module.compile_agent = compile_and_capture
    if "draw" in names:
        module.ReplayBuffer.draw = captured(module.ReplayBuffer.draw)
    with Operators():
        module.main(module.parse_args(module.Args))
    steps = last - first
    total = found[last] - found[first]
    return {name: number / steps for name, number in total.items()}


# The table


def measure(script: str, logs: Path) -> dict:
    """The row of a worker; ValueError says what went wrong."""
    command = [sys.executable, __file__, "--worker", script]
    log = logs / f"kernels-{script}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(
            command, cwd=log.parent, stdout=subprocess.PIPE, stderr=file, text=True
        )
    if done.returncode:
        raise ValueError(f"{script} failed:\n{processes.last_lines(log)}")
    counts = json.loads(done.stdout.splitlines()[-1])
    row = {"script": script}
    kinds = ("Inductor", "products", "others")
    row |= {kind: counts.get(kind, 0) for kind in kinds}
    row["in all"] = sum(row[kind] for kind in kinds)
    row["with graphs"] = sum(counts.get(kind, 0) for kind in ("replays", "copies", "outside"))
    row["bytes"] = counts["bytes"]
    moved = 1e6 * row["bytes"] / BYTES_PER_SECOND
    row["us on an H100"] = [row["in all"] * node + moved for node in NODE_US]
    row["command"] = shlex.join(["python", "plots/measure/kernels.py", *command[2:]])
    return row


def cells(rows: list[dict]) -> list[list[str]]:
    table = [["script", "Inductor", "products", "others", "in all", "with graphs", "MB"]]
    table[0].append("us on an H100, by arithmetic")
    for row in rows:
        line = [row["script"]]
        for kind in table[0][1:6]:
            line.append(f"{row[kind]:.1f}")
        low, high = row["us on an H100"]
        table.append([*line, f"{row['bytes'] / 1e6:.1f}", f"{low:,.0f}-{high:,.0f}"])
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = run_dirs.make_parser(__doc__, "--out")
    parser.add_argument("--worker", choices=SCRIPTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        print(json.dumps(work(options.worker)))
        return 0
    rows = []
    failures = []
    for script in SCRIPTS:
        try:
            rows.append(measure(script, options.out / "logs"))
        except ValueError as failure:
            failures.append(str(failure))
    machine = run_dirs.measured_here(threads=1, packages=["triton"])
    record = {"schema": 1, "machine": machine, "rows": rows}
    above = ["Kernels per environment step, counted", *run_dirs.describe(machine)]
    run_dirs.write_report(options.out / "kernels", above, cells(rows), [], record)
    return processes.say_failures(failures)


if __name__ == "__main__":
    processes.start(main)
