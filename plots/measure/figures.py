"""Every figure of our sources that this machine can make, one after the other.

    bash run.sh figures             twenty minutes on two cores; it goes on where it stopped
    bash run.sh figures --only 'RL-Scope*'
    bash run.sh figures --list      what there is, and what needs a GPU; runs nothing

The sources are LeanRL, RL-Scope (Gleeson et al., MLSys 2021), "Increasing Sample Throughput for RL
Environments" (CS267, Berkeley), rlstructures and the cloud lab of the Deep RL Bootcamp. Each step
is a program that can be called by itself and says in its --help what it draws. A step whose files
are there, newer than the program and than all scripts, is kept.

Written to --out: the programs' own files, and logs/. Exit status 1 if a step failed.
"""

import fnmatch
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import processes
import run_dirs
import torch
from run_dirs import ROOT, shown


class Figure(NamedTuple):
    """One or more figures of a source, and what makes ours."""

    source: str
    command: list[str]
    files: list[str]  # of plots/out/, without their endings
    needs_gpu: str = ""  # what of it is missing without one


FIGURES = [
    Figure(
        "LeanRL: speed-up table",
        ["plots/measure/speedup.py", "--quick"],
        ["speedup", "breakdown_stages", "utilization"],
        "rows with --cudagraphs",
    ),
    Figure(
        "RL-Scope: figures 4, 5 and 7",
        ["plots/measure/survey.py"],
        ["survey_frameworks_stages", "survey_algorithms_stages", "survey_simulators_stages"],
        "the GPU's share",
    ),
    Figure(
        "CS267: throughput and turning points, figures 4 and 8",
        ["plots/measure/env_scaling.py", "--quick"],
        ["env_scaling_throughput"],
        "tensors and kernels on the GPU, threads per block",
    ),
    Figure(
        "CS267: the time of a step against the work in it, figures 5 and 6",
        ["plots/measure/env_work.py"],
        ["env_work"],
        "tensors and the kernel on the GPU",
    ),
    Figure(
        "rlstructures: devices that act, learn and evaluate",
        ["plots/measure/devices.py", "--rounds", "1", "--steps", "65536"],
        ["devices_continuous"],
        "acting on the GPU",
    ),
]


def is_made(figure: Figure, out: Path) -> bool:
    """Whether all its files are newer than the program and than all scripts."""
    sources = [ROOT / figure.command[0], *(ROOT / "leanrl").glob("*.py")]
    newest = max(path.stat().st_mtime for path in sources)
    found = []
    for name in figure.files:
        made = [out / f"{name}{ending}" for ending in (".png", ".md")]
        found.append(any(path.exists() and path.stat().st_mtime > newest for path in made))
    return all(found)


def main(arguments: list[str] | None = None) -> int:
    parser = run_dirs.make_parser(__doc__, "--out")
    parser.add_argument("--only", default="*", metavar="GLOB", help="sources that match")
    parser.add_argument("--list", action="store_true", help="say what there is")
    options = parser.parse_args(arguments)
    chosen = [each for each in FIGURES if fnmatch.fnmatch(each.source, options.only)]
    if not chosen:
        parser.error(f"--only {options.only!r} matches no source")
    failed = 0
    for figure in chosen:
        said = shlex.join(["python", *figure.command])
        if figure.needs_gpu and not torch.cuda.is_available():
            said += f" (without a GPU not: {figure.needs_gpu})"
        print(f"{figure.source}: {said}", flush=True)
        if options.list:
            continue
        if is_made(figure, options.out):
            print("    kept")
            continue
        log = options.out / "logs" / f"figures-{Path(figure.command[0]).stem}.log"
        command = [sys.executable, *figure.command, "--out", str(options.out)]
        begin = time.monotonic()
        status = processes.run_logged(command, log)
        print(f"    {time.monotonic() - begin:,.0f} s, see {shown(log)}")
        if status:
            failed += 1
            print(processes.last_lines(log), file=sys.stderr)
        for name in figure.files:
            path = options.out / f"{name}.png"
            if path.exists():
                print(f"    {shown(path)}")
    return int(failed > 0)


if __name__ == "__main__":
    processes.start(main)
