"""Kernels that a GPU would have to run per step of all environments, counted without a GPU.

    pip install -r requirements/triton.txt
    python plots/measure/kernels.py
    python plots/measure/kernels.py --only td3_continuous_action --peer LeanRL \
        "1 PYTHON SCRIPT --compile --cudagraphs --total-timesteps 40"

Each script runs with --compile for some steps, on a CPU, and torch.compile gets Triton's code as
for an sm_90, which Triton's interpreter runs (tests/triton_on_cpu.py). Counted between two
iterations of the training loop, long after all is compiled:

    Inductor        launches of Triton kernels
    products        calls of libraries: cuBLAS on a GPU, ATen here
    others          operators outside of compiled code that are not views: at most a kernel each
    MB              that these read and write, each argument once

and, in the rehearsal of the path of CUDA (tests/cuda_rehearsal.py), with graphs and with logging:

    with graphs     replays, and operators outside of graphs
    to GPU, to host copies that Python asks for, of those
    waits           how often Python waits for the GPU

us on an H100 is arithmetic: kernels at 2 to 3 us per node of a graph and MB at 3.35 TB/s. The
physics of worlds is not in it. There are as many updates per step as by default, of shorter
rollouts, but a quarter of them of SAC's worlds. CartPoles are 64, PPO's worlds 8, games 2.

A --peer is a name and a command: the steps of an iteration, an interpreter that has Triton and the
packages of another project, a script of it whose main loop has a bar of tqdm, its flags.
"""

import argparse
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import processes
import program
import run_dirs
import tables
from run_dirs import ROOT

NODE_US = (2, 3)  # of a kernel in a graph, on H100s: shared by many reports, measured nowhere here
BYTES_PER_SECOND = 3.35e12
WITH_GRAPHS = {
    "launches": "with graphs",
    "uploads": "to GPU",
    "downloads": "to host",
    "waits": "waits",
}
HALFCHEETAH = ["--env-id", "HalfCheetah-v5"]
OFF_POLICY = [*HALFCHEETAH, "--learning-starts", "20", "--buffer-size", "1000"]
ON_POLICY = [*HALFCHEETAH, "--num-steps", "256", "--num-minibatches", "4"]
TENSORS = ["--num-envs", "64", "--num-steps", "8", "--update-epochs", "1"]
ATARI = ["--num-envs", "2", "--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "1"]
WORLDS = ["--env-id", "worlds/HalfCheetah-v5", "--physics", "c"]
PPO_WORLDS = [*WORLDS, "--num-envs", "8", "--num-steps", "16", "--num-minibatches", "2"]
SAC_WORLDS = [*WORLDS, "--num-envs", "16", "--learning-starts", "64", "--buffer-size", "1000"]


class Script(NamedTuple):
    """How it runs."""

    flags: list[str]
    steps: int  # of all environments, per iteration
    window: tuple[int, int] = (3, 4)  # iterations: from the end of one to that of the other
    rehearsed: tuple[int, int] = (4, 5)  # the same, in the rehearsal

    def command(self, window: tuple[int, int]) -> list[str]:
        iterations = window[1] + 2  # the last one, which logs in any case, is not in the window
        return [*self.flags, "--total-timesteps", str(iterations * self.steps)]


def off_policy(*args) -> Script:
    return Script(*args, window=(25, 29), rehearsed=(130, 230))  # with a row of metrics


SCRIPTS = {
    "sac_continuous_action": off_policy(OFF_POLICY, 1),
    "td3_continuous_action": off_policy(OFF_POLICY, 1),
    "ppo_continuous_action": Script(ON_POLICY, 256),
    "ppo_cartpole_gpu": Script(TENSORS, 64 * 8),
    "ppo_atari_envpool": Script(ATARI, 2 * 16),
    "pqn_atari_envpool": Script(ATARI, 2 * 16),
    "ppo_mujoco_worlds": Script(PPO_WORLDS, 8 * 16),
    "sac_mujoco_worlds": Script(SAC_WORLDS, 16, window=(6, 8), rehearsed=(130, 230)),
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "convolution", "convolution_backward"}


# Workers, in which torch and Triton are changed for good


class Counting:
    """Kernels, and the bytes that they move, in `counts`."""

    def __init__(self):
        triton_on_cpu = import_module("triton_on_cpu")  # before anything else imports Triton
        frames = import_module("torch._dynamo.convert_frame")
        self.counts = Counter()
        self.pauses = 0
        launch = self.paused(triton_on_cpu.CachingAutotuner.run)

        def counted(kernel, *args, **kwargs):
            self.count("Inductor", args)
            return launch(kernel, *args, **kwargs)

        triton_on_cpu.CachingAutotuner.run = counted
        frames._compile = self.paused(frames._compile)

    def count(self, kind: str, moved) -> None:
        self.counts[kind] += 1
        # each once: a result may be an argument
        tensors = {id(tensor): tensor for tensor in tensors_in(moved)}
        for tensor in tensors.values():
            self.counts["bytes"] += tensor.numel() * tensor.element_size()

    def paused(self, function):
        def call(*args, **kwargs):
            self.pauses += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.pauses -= 1

        return call

    def operators(self):
        """A context in which operators outside of compiled code are counted."""
        from torch.utils._python_dispatch import TorchDispatchMode

        nothing = import_module("cuda_rehearsal").NOTHING

        class Operators(TorchDispatchMode):
            @classmethod
            def is_infra_mode(cls):  # torch.compile refuses to work in other modes
                return True

            def __torch_dispatch__(mode, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                library, name = function._schema.name.split("::")
                idle = function.is_view or name in nothing or library == "profiler"
                if not self.pauses and not idle:
                    kind = "products" if name in PRODUCTS else "others"
                    self.count(kind, (args, kwargs, result))
                return result

        return Operators()


def tensors_in(tree) -> list:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def count_launches(script: str) -> dict:
    """Kernels per step of all environments, and the bytes that they read and write."""
    counting = Counting()
    chosen = SCRIPTS[script]
    module = load(script, ["--compile", "--no-cuda", *chosen.command(chosen.window)])
    found = watch(module, counting.counts)
    args = module.parse_args(module.Args)
    with counting.operators():
        module.main(args)
    return per_step(found, chosen.window, args.num_envs)


def count_peer_launches(steps: str, *command: str) -> dict:
    """The same of another project's script, with so many `steps` per turn of its bar."""
    counting = Counting()
    return run_peer(int(steps), command, counting.counts, counting.operators())


def count_transfers(script: str) -> dict:
    """Launches, copies and waits per step of all environments, with CUDA graphs."""
    rehearsal = import_module("cuda_rehearsal")
    rehearsal.install()
    chosen = SCRIPTS[script]
    module = load(script, ["--cudagraphs", *chosen.command(chosen.rehearsed)])
    found = watch(module, rehearsal.counts)
    args = module.parse_args(module.Args)
    with rehearsal.Rehearsal():
        module.main(args)
    return transfers_in(per_step(found, chosen.rehearsed, args.num_envs))


def count_peer_transfers(steps: str, *command: str) -> dict:
    """The same of another project's script, which chooses its optimizer by --compile."""
    rehearsal = import_module("cuda_rehearsal")
    rehearsal.install()
    rehearsal.Graph.compare = lambda *_: None  # here nobody asks whether its graphs are right,
    rehearsal.UNWRITTEN = 0  # and numbers that it reads too early are, as on a GPU, numbers
    eager = tuple(word for word in command if word != "--compile")
    counts = run_peer(int(steps), eager, rehearsal.counts, rehearsal.Rehearsal())
    return transfers_in(counts)


def transfers_in(counts: dict) -> dict[str, float]:
    assert counts.get("replays"), "no graph has been captured"
    return {kind: counts.get(kind, 0) for kind in WITH_GRAPHS}


def run_peer(steps: int, command: tuple, counts: Counter, context) -> dict:
    """Runs the script in the context; what was counted meanwhile, per step."""
    tqdm = import_module("tqdm")
    found = []

    class Bar(tqdm.tqdm):
        def __iter__(self):
            for iteration in super().__iter__():
                yield iteration
                found.append((len(found) * steps, counts.copy()))

    tqdm.tqdm = Bar
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    with context:
        runpy.run_path(command[0], run_name="__main__")
    return per_step(found, (-6, -2))  # not the last one, after which something may end


def load(script: str, flags: list[str]):
    """The module of a variant, for whose parser `flags` are the command line."""
    sys.argv = [f"leanrl/{script}_torchcompile.py", *flags]
    return import_module(f"leanrl.{script}_torchcompile")


def watch(module, counts: Counter) -> list[tuple[int, Counter]]:
    """Its list gets, after each iteration, the step and what `counts` holds."""
    found = []
    tick = module.Run.tick

    def ticked(run):
        tick(run)
        found.append((run.step, counts.copy()))

    module.Run.tick = ticked
    return found


def per_step(found: list, window: tuple[int, int], num_envs: int = 1) -> dict[str, float]:
    """What was counted in the window, per step of all environments."""
    (before, first), (after, last) = (found[i] for i in window)
    steps = (after - before) / num_envs
    return {name: (last[name] - first[name]) / steps for name in last}


WORKERS = {
    "launches": count_launches,
    "transfers": count_transfers,
    "peer-launches": count_peer_launches,
    "peer-transfers": count_peer_transfers,
}


# The table


def call_worker(work: str, python: str, command: list[str], log: Path) -> dict:
    """What a worker counts; ValueError says what went wrong."""
    if not shutil.which(python):
        raise ValueError(f"{log.stem} failed: there is no interpreter {python}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(
            [python, __file__, "--worker", work, *command],
            cwd=log.parent,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    if done.returncode:
        raise ValueError(f"{log.stem} failed:\n{processes.last_lines(log)}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, work: str, python: str, command: list[str], logs: Path) -> dict:
    """The row of a script, whose workers are those for launches and transfers of `work`."""
    log = logs / (re.sub(r"\W+", "-", f"kernels {name}") + ".log")
    row = reduce(name, call_worker(f"{work}launches", python, command, log))
    log = log.with_suffix(".transfers.log")
    return row | call_worker(f"{work}transfers", python, command, log)


def measure_ours(script: str, logs: Path) -> dict:
    row = measure(script, "", sys.executable, [script], logs)
    row["command"] = shlex.join(["python", "plots/measure/kernels.py", "--only", script])
    return row


def measure_peer(name: str, words: str, logs: Path) -> dict:
    """That of another project's."""
    steps, python, script, *flags = shlex.split(words)
    python = str(Path(python).absolute())
    command = [steps, str(Path(script).absolute()), *flags]
    row = measure(name, "peer-", python, command, logs)
    row["command"] = shlex.join([steps, Path(script).name, *flags])  # no folders of a machine
    return row


def reduce(name: str, counts: dict) -> dict:
    """A row without the transfers."""
    row = {"script": name}
    kinds = ("Inductor", "products", "others")
    row |= {kind: counts.get(kind, 0) for kind in kinds}
    row["in all"] = sum(row[kind] for kind in kinds)
    row["bytes"] = counts["bytes"]
    moved = 1e6 * row["bytes"] / BYTES_PER_SECOND
    row["us on an H100"] = [row["in all"] * node + moved for node in NODE_US]
    return row


def cells(rows: list[dict]) -> list[list[str]]:
    launches = ["Inductor", "products", "others", "in all"]
    moved = ["MB", "us on an H100, by arithmetic"]
    table = [["script", *launches, *moved, *WITH_GRAPHS.values()]]
    for row in rows:
        line = [row["script"]]
        for kind in launches:
            line.append(f"{row[kind]:.1f}")
        low, high = row["us on an H100"]
        line += [f"{row['bytes'] / 1e6:.1f}", f"{low:,.0f}-{high:,.0f}"]
        for kind in WITH_GRAPHS:
            line.append(f"{row[kind]:.2f}")
        table.append(line)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out")
    parser.add_argument("--only", nargs="*", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work, *command = options.worker
        sys.path.append(str(ROOT / "tests"))
        print(json.dumps(WORKERS[work](*command)))
        return 0
    works = [(measure_ours, script) for script in options.only]
    works += [(measure_peer, *peer) for peer in options.peer]
    rows = []
    failures = []
    for function, *words in works:
        try:
            rows.append(function(*words, options.out / "logs"))
        except ValueError as failure:
            failures.append(str(failure))
    machine = run_dirs.measured_here(threads=1, packages=["triton"])
    record = {"schema": 1, "machine": machine, "rows": rows}
    title = "Kernels per step of all environments, counted"
    tables.write_report(options.out / "kernels", title, cells(rows), record, labels=1)
    return processes.say_failures(failures)


if __name__ == "__main__":
    program.start(main)
