"""Kernels that a GPU would have to run per environment step, counted without a GPU.

    pip install -r requirements/triton.txt
    python plots/measure/kernels.py

Each script runs with --compile for some steps, on a CPU, and torch.compile gets Triton's code as
for an sm_90, which Triton's interpreter runs (tests/triton_on_cpu.py). Counted between two
iterations of the training loop, long after all is compiled, per step of all environments:

    Inductor        launches of Triton kernels
    products        calls of libraries: cuBLAS on a GPU, ATen here
    others          operators outside of compiled code that are not views: a kernel each at least
    in all          the sum: launches per step without CUDA graphs
    with graphs     replays, the copies of their inputs, and what is outside of captured functions
    MB              that these read and write, each argument once

Arithmetic, not a measurement: us per step on an H100 = kernels at 2 to 3 us per node of a graph and
MB at 3.35 TB/s. Copies between CPU and GPU and the host's waits are not in it, since a CPU's
tensors need none; test_rehearsal.py has our waits. Nor is the physics of worlds. There are as many
updates per step as by default, of shorter rollouts, but a quarter of them of SAC's worlds, which
are 16. CartPoles are 64, PPO's worlds 8, games 2, so that MB are fewer than by default. PQN is not
counted: its layer norms take the interpreter too long.

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
from typing import NamedTuple

import processes
import run_dirs
from run_dirs import ROOT

NODE_US = (2, 3)  # of a kernel in a graph, on H100s: shared by many reports, measured nowhere here
BYTES_PER_SECOND = 3.35e12
HALFCHEETAH = ["--env-id", "HalfCheetah-v5"]
OFF_POLICY = [*HALFCHEETAH, "--learning-starts", "20", "--buffer-size", "1000"]
OFF_POLICY += ["--total-timesteps", "34"]
ON_POLICY = [*HALFCHEETAH, "--num-steps", "256", "--num-minibatches", "4"]
ON_POLICY += ["--total-timesteps", "1280"]
TENSORS = ["--num-envs", "64", "--num-steps", "8", "--update-epochs", "1"]
TENSORS += ["--total-timesteps", str(5 * 64 * 8)]
ATARI = ["--num-envs", "2", "--num-steps", "16", "--num-minibatches", "2"]
ATARI += ["--update-epochs", "1", "--total-timesteps", str(5 * 2 * 16)]
WORLDS = [*HALFCHEETAH, "--physics", "c"]
PPO_WORLDS = [*WORLDS, "--num-envs", "8", "--num-steps", "16", "--num-minibatches", "2"]
PPO_WORLDS += ["--total-timesteps", str(5 * 8 * 16)]
SAC_WORLDS = [*WORLDS, "--num-envs", "16", "--learning-starts", "64", "--buffer-size", "1000"]
SAC_WORLDS += ["--total-timesteps", "160"]


class Script(NamedTuple):
    """How it runs, and what of it becomes CUDA graphs."""

    flags: list[str]
    iterations: tuple[int, int]  # the window: from the end of one to that of the other
    captured: tuple[str, ...]  # methods of the agent; `draw` is the replay buffer's
    of_envs: tuple[str, ...] = ()  # methods of the environments


SETTLED = ("settle", "observe")
SCRIPTS = {
    "sac_continuous_action": Script(OFF_POLICY, (25, 29), ("act", "update", "draw")),
    "td3_continuous_action": Script(OFF_POLICY, (25, 29), ("act", "update", "draw")),
    "ppo_continuous_action": Script(ON_POLICY, (3, 4), ("prepare", "learn")),
    "ppo_cartpole_gpu": Script(TENSORS, (3, 4), ("roll_out", "learn")),
    "ppo_atari_envpool": Script(ATARI, (3, 4), ("act", "learn")),
    "ppo_mujoco_gpu": Script(PPO_WORLDS, (3, 4), ("act", "prepare", "learn"), SETTLED),
    "sac_mujoco_gpu": Script(SAC_WORLDS, (6, 8), ("observe", "act", "update", "draw"), SETTLED),
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
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    counts = Counter()
    state = {"paused": 0, "captured": 0}

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

    def captured(function, in_place=False):
        """A call from outside is a replay, after copies of its inputs where these move."""

        def call(*args, **kwargs):
            if not state["captured"]:
                tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                counts["replays"] += 1
                counts["copies"] += 0 if in_place else len(tensors)
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

    flags, iterations, names, of_envs = SCRIPTS[script]
    found = []  # after each iteration its step and the counts
    path = ROOT / f"leanrl/{script}_torchcompile.py"
    sys.argv = [str(path), "--compile", *flags, "--no-cuda"]
    module = import_module(f"leanrl.{script}_torchcompile")
    compile_agent = module.compile_agent

    def compile_and_capture(agent):
        compile_agent(agent)
        for name in names:
            if name != "draw":
                in_place = name == "update"  # whose batch is always the buffer's
                setattr(agent, name, captured(getattr(agent, name), in_place))

    def compile_and_capture_envs(envs):
        compile_envs(envs)
        for name in of_envs:
            setattr(envs, name, captured(getattr(envs, name)))

    tick = module.Run.tick

    def ticked(run):
        tick(run)
        found.append((run.step, counts.copy()))

    module.Run.tick = ticked
    module.compile_agent = compile_and_capture
    if of_envs:
        compile_envs = module.compile_envs
        module.compile_envs = compile_and_capture_envs
    if "draw" in names:
        module.ReplayBuffer.draw = captured(module.ReplayBuffer.draw)
    args = module.parse_args(module.Args)
    with Operators():
        module.main(args)
    (before, first), (after, last) = (found[i] for i in iterations)
    steps = (after - before) / getattr(args, "num_envs", 1)
    return {name: number / steps for name, number in (last - first).items()}


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
