"""What the programs here share: a command line, and runs in processes of their own.

Importing it makes the modules of plots/ and leanrl importable.
"""

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tqdm

PLOTS = Path(__file__).resolve().parents[1]
sys.path += [str(PLOTS), str(PLOTS.parent), str(PLOTS.parent / "leanrl")]
from run_dirs import ROOT, Run, differences, read_run, shown, this_machine  # noqa: E402

# The command line


def call(program: str, options: argparse.Namespace, *names: str) -> str:
    """The command line that makes the same measurement again; --out does not matter."""
    words = ["python", f"plots/measure/{program}"]
    for name in names:
        value = getattr(options, name)
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None and value is not False:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def check_field(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> None:
    """Ends the program where the other libraries' Python is missing, which run.sh makes."""
    if not (ROOT / options.field_python).exists():
        parser.error(f"no {options.field_python}: `bash run.sh {name}` makes it")


GOES_ON = "interrupted; the next call goes on from there"


def on_cores(count: int) -> list[str]:
    """What before a command keeps it, and all its threads, on `count` cores."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    return ["taskset", "-c", ",".join(map(str, cores))]


# One run


def progress_in(log: Path) -> tuple[int, str]:
    """Steps that the run that writes `log` has made, and its speed and return, by its own bar."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        found = re.findall(rb"(\d+)/\d+ \[([^\]\r\n]*)", file.read())
    steps, said = found[-1] if found else (0, b"")
    return int(steps), said.decode(errors="replace").partition(", ")[2].strip()


def last_lines(log: Path, count: int = 12) -> str:
    """The end of what a run printed, without its progress bars."""
    lines = re.split(r"[\r\n]+", log.read_text(errors="replace"))
    kept = [line for line in lines if line.strip() and not re.search(r"\d+/\d+ \[", line)]
    return "\n".join(f"    {line}" for line in kept[-count:])


@contextmanager
def logged(command: list[str], log: Path, environment: dict | None = None):
    """A process that runs `command`, its output in `log`, and machine.json in its run directory.

    It leads a group of its own. Whatever ends the context, an interrupt included, ends it: first as
    on Ctrl-C, so that the run closes its files, then, with its helpers, by force.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    machine = json.dumps(this_machine(), indent=2)
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield child
        finally:
            try:
                if child.poll() is None:
                    child.terminate()  # the scripts end after the iteration
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(timeout=20)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                with suppress(ValueError, OSError):  # it has made none
                    (run_directory(log) / "machine.json").write_text(machine)


def run_logged(
    command: list[str], log: Path, progress=None, environment=None, limit: float = math.inf
) -> int | None:
    """Exit status of `command`, whose output goes to `log`; calls progress(log) meanwhile.

    After `limit` seconds it is interrupted, which has no exit status.
    """
    end = time.monotonic() + limit
    with logged(command, log, environment) as child:
        while time.monotonic() < end:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=0.5)
            if progress:
                progress(log)
    return None


def run_directory(log: Path) -> Path:
    """Where the run that wrote `log` says that its records are; ValueError if it does not."""
    found = re.findall(r"^\S+ steps/s, (.+)$", log.read_text(errors="replace"), re.MULTILINE)
    if not found:
        raise ValueError("names no run directory")
    return ROOT / found[-1]


def read_logged(log: Path, whole: bool = True) -> Run:
    run = read_run(run_directory(log), whole)
    if not run.stages:
        raise ValueError(run.missing)
    return run


def read_log(status: int | None, log: Path, what: str, read=read_logged):
    """The run that wrote `log`, which is `what`; ValueError says what went wrong with it."""
    try:
        if status:
            raise ValueError(f"ended with exit status {status}")
        return read(log)
    except ValueError as reason:
        raise ValueError(f"{what} {reason}, see {shown(log)}:\n{last_lines(log)}") from None


def run_and_read(
    command: list[str], log: Path, progress, what: str, environment=None, limit: float = math.inf
) -> Run:
    """The run that `command` makes, which is `what`; ValueError says what went wrong with it."""
    status = run_logged(command, log, progress, environment, limit)
    return read_log(status, log, what, partial(read_logged, whole=limit == math.inf))


def find_made(commands: dict[str, list[str]], runs: list[Run], here: dict) -> dict[str, Run]:
    """{name: the last of `runs` that its command has made here}, of those that need not run again.

    A command is what follows `python`; its script, and the worlds that it imports, have not changed
    since. `here` is `this_machine`.
    """
    found = {}
    for name, command in commands.items():
        sources = [ROOT / command[0]]
        if "worlds" in command[0]:
            sources.append(ROOT / "leanrl/mujoco_worlds.py")
        changed = max(path.stat().st_mtime for path in sources)
        for run in runs:
            same = run.config["command"] == " ".join(command) and not differences(run.config, here)
            if same and changed < (run.path / "config.json").stat().st_mtime:
                found[name] = run
    return found


def numbers(run: Run, command: list[str]) -> dict:
    """What a comparison keeps of a run."""
    words = [word.replace(sys.executable, "python") for word in command]
    result = {key: run.stages[key] for key in ("sps_steady", "warmup_seconds")}
    return result | {"command": shlex.join(words), "config": run.config}


# Many runs


class Turn(NamedTuple):
    """A run to make. Its weight is its share of the progress bar: about how long it takes."""

    name: str
    steps: int
    weight: float
    measure: Callable  # progress -> result; ValueError says what went wrong


def make_all(turns: list[Turn]) -> tuple[dict, list[str]]:
    """Makes the runs one after the other -> {name: result}, and what went wrong with the others."""
    results = {}
    failures = []
    before = 0.0
    form = "{percentage:3.0f}% |{bar:20}| {elapsed}, {remaining} left{postfix}"
    with tqdm.tqdm(total=sum(turn.weight for turn in turns), bar_format=form) as bar:
        for number, turn in enumerate(turns, start=1):
            title = f"{number}/{len(turns)} {turn.name}"
            bar.set_postfix_str(title)

            def progress(log: Path, turn=turn, title=title, before=before) -> None:
                steps, said = progress_in(log)
                bar.n = before + turn.weight * min(steps / turn.steps, 1)
                bar.set_postfix_str(f"{title}: {said or 'starts, and compiles'}")

            try:
                results[turn.name] = turn.measure(progress)
            except ValueError as failure:
                failures.append(str(failure))
            before += turn.weight
            bar.n = before
    return results, failures


def say_failures(failures: list[str]) -> int:
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return int(bool(failures))
