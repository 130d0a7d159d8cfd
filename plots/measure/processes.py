"""What the programs here share: runs in processes of their own, whose output goes to a log.

Importing it first also makes the modules of plots/ importable.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))
from run_dirs import ROOT, Run, read_run, shown, this_machine  # noqa: E402


def steps_done(log: Path) -> int:
    """How far the run that writes `log` is, by the last progress bar in it."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        found = re.findall(rb"(\d+)/\d+ \[", file.read())
    return int(found[-1]) if found else 0


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
            env={**os.environ, **(environment or {})},
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
                    child.terminate()  # the scripts take it like Ctrl-C
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(timeout=20)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                with suppress(ValueError, OSError):  # it has made none
                    (run_directory(log) / "machine.json").write_text(machine)


def run_logged(command: list[str], log: Path, progress, environment: dict | None = None) -> int:
    """Exit status of `command`, whose output goes to `log`; calls progress(steps) meanwhile."""
    with logged(command, log, environment) as child:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=0.5)
            progress(steps_done(log))


def run_directory(log: Path) -> Path:
    """Where the run that wrote `log` says that it left its files; ValueError if it does not."""
    found = re.findall(r"^run directory: (.+)$", log.read_text(errors="replace"), re.MULTILINE)
    if not found:
        raise ValueError("names no run directory")
    return ROOT / found[-1]


def read_log(status: int, log: Path, what: str, read=lambda log: read_run(run_directory(log))):
    """The run that wrote `log`, which is `what`; ValueError says what went wrong with it."""
    try:
        if status:
            raise ValueError(f"ended with exit status {status}")
        return read(log)
    except ValueError as reason:
        raise ValueError(f"{what} {reason}, see {shown(log)}:\n{last_lines(log)}") from None


def run_and_read(
    command: list[str], log: Path, progress, what: str, environment: dict | None = None
) -> Run:
    """The run that `command` makes, which is `what`; ValueError says what went wrong with it."""
    return read_log(run_logged(command, log, progress, environment), log, what)


def take_turns(names: list[str], options: argparse.Namespace, measure) -> tuple[list, list]:
    """Calls measure(name, seed, options, progress) for all names, round after round, one at a time.

    Returns the rounds, {name: result} each, and for each call that raised ValueError what it says.
    """
    rounds, failures = [], []
    with tqdm.tqdm(total=options.rounds * len(names) * options.steps, unit="step") as bar:
        for seed in range(1, options.rounds + 1):
            rounds.append({})
            for i, name in enumerate(names):
                done = ((seed - 1) * len(names) + i) * options.steps
                bar.set_postfix_str(f"round {seed}/{options.rounds}: {name}")

                def progress(steps: int, done=done) -> None:
                    bar.update(max(done + steps, bar.n) - bar.n)

                try:
                    rounds[-1][name] = measure(name, seed, options, progress)
                except ValueError as failure:
                    failures.append(str(failure))
                progress(options.steps)
    return rounds, failures
