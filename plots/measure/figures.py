"""Every figure of our sources that this machine can make, one after the other.

    bash run.sh figures             twenty to forty minutes on two cores; goes on where it stopped
    bash run.sh figures --list      what there is, and what needs a GPU; runs nothing

The sources are LeanRL, RL-Scope (Gleeson et al., MLSys 2021), "Increasing Sample Throughput for RL
Environments" (CS267, Berkeley), rlstructures and the cloud lab of the Deep RL Bootcamp. A step
whose files are newer than its programs and than all scripts is kept.
"""

import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import processes
import program
import torch
from run_dirs import ROOT, shown


class Figure(NamedTuple):
    """One or more figures of a source, and what makes ours."""

    source: str
    commands: list[list[str]]  # {out} is options.out
    files: list[str]  # of plots/out/, without their endings
    needs_gpu: str = ""  # what of it is missing without one


OUT = ("--out", "{out}")
LAB = ("leanrl/sweep.py", "run", "leanrl/sweeps/cartpole_lambda.py")
FIGURES = [
    Figure(
        "LeanRL: speed-up and utilization; CS267: figure 8, a profile",
        [["plots/measure/speedup.py", "--quick", *OUT]],
        ["speedup", "breakdown_stages", "utilization"],
        "rows with --cudagraphs",
    ),
    Figure(
        "RL-Scope: figures 4, 5 and 7",
        [["plots/measure/survey.py", *OUT]],
        ["survey_frameworks_stages", "survey_algorithms_stages", "survey_simulators_stages"],
        "the GPU's share",
    ),
    Figure(
        "CS267: figure 4, throughput, turning points and threads per block",
        [["plots/measure/env_scaling.py", "--quick", *OUT]],
        ["env_scaling_throughput"],
        "tensors and kernels on the GPU, threads per block",
    ),
    Figure(
        "CS267: figures 5 and 6, the time of a step against the work in it",
        [["plots/measure/env_work.py", *OUT]],
        ["env_work"],
        "tensors and the kernel on the GPU",
    ),
    Figure(
        "CS267: figure 7, reward against training time",
        [["plots/measure/env_learning.py", *OUT]],
        ["env_learning"],
        "4,096 environments",
    ),
    Figure(
        "the lab: mean and standard deviation over variants",
        [
            [*LAB, "--workers", "2", "--again"],
            ["plots/curves.py", "runs/cartpole_lambda", "--band", "std", "--out", "{out}/lab"],
        ],
        ["lab_learning", "lab_scores"],
    ),
    Figure(
        "rlstructures: devices that act, learn and evaluate",
        [["plots/measure/devices.py", "--rounds", "1", "--steps", "65536", *OUT]],
        ["devices_continuous"],
        "acting on the GPU",
    ),
]


def is_made(figure: Figure, out: Path) -> bool:
    """Whether all its files are newer than its programs and than all scripts."""
    programs = [ROOT / command[0] for command in figure.commands]
    sources = [*programs, *(ROOT / "leanrl").glob("*.py")]
    newest = max(path.stat().st_mtime for path in sources)
    found = []
    for name in figure.files:
        made = [out / f"{name}{ending}" for ending in (".png", ".md")]
        found.append(any(path.exists() and path.stat().st_mtime > newest for path in made))
    return all(found)


def make(command: list[str], logs: Path) -> bool:
    """Runs a command, in which {out} is filled in; whether it succeeded."""
    log = logs / f"figures-{Path(command[0]).stem}.log"
    status = processes.run_logged([sys.executable, *command], log)
    print(f"    see {shown(log)}")
    if status:
        print(processes.last_lines(log), file=sys.stderr)
    return not status


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out")
    parser.add_argument("--list", action="store_true", help="say what there is")
    options = parser.parse_args(arguments)
    failed = 0
    for figure in FIGURES:
        print(f"{figure.source}:", flush=True)
        commands = []
        for command in figure.commands:
            commands.append([word.replace("{out}", shown(options.out)) for word in command])
            print(f"    {shlex.join(['python', *commands[-1]])}")
        if figure.needs_gpu and not torch.cuda.is_available():
            print(f"    without a GPU not: {figure.needs_gpu}")
        if options.list:
            continue
        done = options.out / "logs" / f"figures-{figure.files[0]}.done"
        if is_made(figure, options.out) and done.exists():
            print("    kept")
            continue
        done.unlink(missing_ok=True)
        begin = time.monotonic()
        if all(make(command, options.out / "logs") for command in commands):
            done.touch()
        else:
            failed += 1
        print(f"    {time.monotonic() - begin:,.0f} s")
        for name in figure.files:
            path = options.out / f"{name}.png"
            if path.exists():
                print(f"    {shown(path)}")
    return int(failed > 0)


if __name__ == "__main__":
    program.start(main, processes.GOES_ON)
