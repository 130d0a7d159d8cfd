"""All that a machine with a GPU has to show, in order, and one page about it.

    bash run.sh gpu                 tests, the quick table, profiles, devices, the study: an hour
    bash run.sh gpu --rehearse      the same programs, tiny, where there is no GPU: minutes

Each step is a process of its own; one that fails stops none after it. The page says what was
tested, what was measured, and what to commit. In a rehearsal, whose "GPU" is
tests/cuda_rehearsal.py, no number counts. Written to --out: gpu.md, gpu.json, logs/, and the
records of the programs.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import processes
import program
import run_dirs
import tables
import torch
from run_dirs import ROOT, shown

SHARED = ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]  # side by side on the GPU
NOT_STUDIED = r"^(skipped: .*|.*: no kernel.*)$"


class Step(NamedTuple):
    """A program, and what makes it short enough to be rehearsed."""

    name: str
    command: list[str]
    rehearsed: list[str]
    shows: str  # a regular expression: the lines of its output that the page quotes
    writes: bool = True  # it takes --out
    threads: int | None = None  # of each process, where several share the cores


STEPS = [
    Step(
        "tests",
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests", *SHARED],
        ["-k", "captured_updates and eager-td3"],
        r"^(FAILED.*|ERROR.*|.*\d+ (?:passed|failed).*)$",
        writes=False,
        threads=2,
    ),
    Step(
        "speed-up",
        ["plots/measure/speedup.py", "--quick"],
        ["--tiny"],
        r"^(FAILED.*)$",
    ),
    Step(
        "devices",
        ["plots/measure/devices.py", "--rounds", "1", "--steps", "131072"],
        ["--steps", "8192"],
        r"^(FAILED.*)$",
    ),
    Step("study", ["plots/measure/env_scaling.py"], ["--quick"], NOT_STUDIED),
]


def run_step(step: Step, options: argparse.Namespace, environment: dict) -> dict:
    """Its seconds, exit status, and what of its output belongs on the page."""
    command = [sys.executable, *step.command]
    if step.writes:
        command += ["--out", shown(options.out)]
    if options.rehearse:
        command += step.rehearsed
    log = options.out / "logs" / f"gpu-{step.name.replace(' ', '-')}.log"
    print(f"{step.name}: {shlex.join(command[1:])}", flush=True)
    if step.threads:
        environment = environment | {"OMP_NUM_THREADS": str(step.threads)}
    begin = time.monotonic()
    status = processes.run_logged(command, log, environment=environment)
    said = re.findall(step.shows, log.read_text(errors="replace"), re.MULTILINE)
    return {
        "step": step.name,
        "command": shlex.join(["python", *command[1:]]),
        "seconds": time.monotonic() - begin,
        "status": status,
        "said": list(dict.fromkeys(said)),
        "log": shown(log),
    }


def profiles(options: argparse.Namespace) -> list[Step]:
    """Of each run that the speed-up table has traced."""
    record = options.out / "speedup.json"
    if not record.exists():  # the step has failed
        return []
    steps = []
    for path in json.loads(record.read_text())["traced"]:
        name = f"profile of {Path(path).name}"
        command = ["plots/cross_stack.py", path]
        steps.append(Step(name, command, [], r"^(\d+\. .*)$", writes=False))
    return steps


def cells(results: list[dict]) -> list[list[str]]:
    table = [["step", "seconds", "ended", "says"]]
    for result in results:
        ended = "well" if result["status"] == 0 else f"with status {result['status']}"
        said = result["said"] or [""]
        table.append([result["step"], f"{result['seconds']:,.0f}", ended, said[0]])
        table += [["", "", "", line] for line in said[1:]]
    return table


def write_page(
    results: list[dict], problems: list[str], begun: float, options: argparse.Namespace
) -> None:
    """What these steps have shown, which were begun at this time."""
    title = "A rehearsal: no number counts" if options.rehearse else "What this GPU shows"
    below = []
    below += [f"CUDA would refuse: {line}" for line in problems]
    files = ("speedup", "breakdown", "utilization", "devices_continuous", "env_scaling")
    paths = [options.out / f"{name}.md" for name in files]
    made = [shown(path) for path in paths if path.exists() and path.stat().st_mtime > begun]
    below.append(f"records to commit, with the GPU in their names: {', '.join(made) or 'none'}")
    record = {
        "schema": 1,
        "command": processes.call("gpu.py", options, "rehearse"),
        "machine": run_dirs.measured_here(torch.get_num_threads()),
        "steps": results,
        "rehearsed": options.rehearse,
    }
    tables.write_report(options.out / "gpu", title, cells(results), record, below=below)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out")
    parser.add_argument("--rehearse", action="store_true", help="tiny, and without a GPU")
    options = parser.parse_args(arguments)
    results = []
    begun = time.time()
    (options.out / "speedup.json").unlink(missing_ok=True)  # of an earlier call
    with tempfile.TemporaryDirectory() as folder:
        environment = {}
        if options.rehearse:
            environment = {
                "PYTHONPATH": str(ROOT / "tests/rehearsed"),
                "REHEARSED_PROBLEMS": folder,
            }
        elif not torch.cuda.is_available():
            parser.error("no CUDA device for torch; --rehearse needs none")
        for step in STEPS:
            results.append(run_step(step, options, environment))
            if step.name == "speed-up":
                results += [run_step(each, options, environment) for each in profiles(options)]
        problems = set()
        for path in Path(folder).iterdir():
            problems.update(path.read_text().splitlines())
    write_page(results, sorted(problems), begun, options)
    return int(any(result["status"] for result in results) or bool(problems))


if __name__ == "__main__":
    program.start(main)
