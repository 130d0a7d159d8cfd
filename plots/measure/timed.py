"""Runs that have the same minutes of a core: what returns and race share.

A run is a process of its own on a core of its own. The minutes are of processor time, of the
process and of those that it has waited for, so that what else the machine does matters less;
evaluations do not count. A file keeps what is done, and the next call goes on from there.
"""

import argparse
import json
import os
import queue
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import run_dirs
import tqdm

# on a line of its own or after the progress bar
LINE = re.compile(r"after ([\d.]+) min: (\d+) \w+, return (\S+)$", re.MULTILINE)


class Clock:
    """Seconds of processor time since the process began, or since a new start."""

    def __init__(self):
        self.left_out = 0.0

    def seconds(self) -> float:
        times = os.times()
        mine = times.user + times.system
        of_children = times.children_user + times.children_system
        return mine + of_children - self.left_out

    def go_back(self, seconds: float) -> None:
        """What has passed since it showed these seconds does not count."""
        self.left_out += self.seconds() - seconds


def say(seconds: float, number: int, unit: str, mean_return: float) -> None:
    """Tells an evaluation, as `read` finds it."""
    print(f"after {seconds / 60:.2f} min: {number} {unit}, return {mean_return:.1f}", flush=True)


def read(log: Path) -> list[list[float]]:
    """[minutes, steps or updates, return] of each evaluation; ValueError if there is none."""
    found = LINE.findall(log.read_text(errors="replace"))
    if not found:
        raise ValueError("was not evaluated")
    return [list(map(float, numbers)) for numbers in found]


def train(
    script,
    args,
    moments: list[float],
    warmup: bool = True,
    count: Callable = lambda run: run.step,
    unit: str = "steps",
) -> None:
    """Trains by a script of ours, a module, and evaluates after each of these minutes.

    It ends after the last of them, or when its steps are made. The `warmup` counts, or does not.
    """
    clock = Clock()
    waiting = list(moments)
    shown = 0.0  # by the clock, when an evaluation begins

    class TimedRun(script.Run):
        def due(self, every, at_end=False):
            """An evaluation after each of the moments and at the end, and nothing else."""
            nonlocal shown
            if every != self.args.eval_every:
                return False
            if not warmup and not self.watch.warmup_seconds:
                clock.go_back(0.0)
                return False
            shown = clock.seconds()
            return shown >= 60 * waiting[0] or self.step >= self.total_steps

        def write(self, row, step=None):
            if "charts/eval_return" not in row:
                return
            clock.go_back(shown)
            say(shown, count(self), unit, row["charts/eval_return"])
            while waiting and shown >= 60 * waiting[0]:
                waiting.pop(0)
            if not waiting:
                raise KeyboardInterrupt

    script.Run = TimedRun
    try:
        script.main(args)
    except SystemExit:
        if waiting:
            raise


def make(
    kind: str, wanted: list[tuple], options: argparse.Namespace, python: Callable = lambda _: None
) -> tuple[list[dict], list[str]]:
    """Makes those runs (name, task, seed) of a `kind` that are not yet in its file.

    The file is options.out/PROGRAM.json. A name's worker is the program itself, by `python`(name)
    or this Python. Returns all runs in the file, and what went wrong with others.
    """
    program = Path(sys.argv[0])
    path = options.out / f"{program.stem}.json"
    runs = run_dirs.read_json(path)["runs"] if path.exists() else []
    mine = [run for run in runs if run["minutes"] == options.minutes]
    made = {(run[kind], run["task"], run["seed"]) for run in mine}
    wanted = [run for run in wanted if run not in made]
    here = run_dirs.this_machine()
    here["cpu"]["threads"] = 1
    here["versions"] |= run_dirs.versions(["mujoco"])
    hardware = run_dirs.machine([here])
    cores: queue.Queue = queue.Queue()
    for core in os.sched_getaffinity(0):
        cores.put(core)
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    failures = []
    writing = threading.Lock()
    bar = tqdm.tqdm(total=len(wanted), unit="run")

    def work(run: tuple) -> None:
        name, task, seed = run
        log = options.out / "logs" / (re.sub(r"\W+", "-", f"{kind}-{name}-{task}-{seed}") + ".log")
        command = [python(name) or sys.executable, str(program), "--worker", name]
        command += ["--tasks", task, "--seed", str(seed), "--minutes", str(options.minutes)]
        core = cores.get()
        try:
            pinned = ["taskset", "-c", str(core), *command]
            status = processes.run_logged(pinned, log, environment=environment)
            rows = processes.read_log(status, log, f"{name}, {task}, seed {seed}", read)
        except ValueError as failure:
            failures.append(str(failure))
            return
        finally:
            cores.put(core)
        result = {kind: name, "task": task, "seed": seed, "minutes": options.minutes}
        with writing:
            bar.update()
            runs.append(result | {"evaluations": rows, "machine": hardware})
            path.write_text(json.dumps({"schema": 1, "runs": runs}, indent=1) + "\n")

    with bar, ThreadPoolExecutor(cores.qsize()) as pool:
        list(pool.map(work, wanted))
    return runs, failures


def describe(runs: list[dict]) -> list[str]:
    """The machines that made the runs, a line for each thing that differs between them."""
    lines = [line for run in runs for line in run_dirs.describe(run["machine"])]
    return list(dict.fromkeys(lines))
