"""Runs that have the same minutes of a core: what the race is made of.

A run is a process of its own on a core of its own, whose compilers find nothing that was compiled
before. The minutes are of processor time, of the process and of those that it has waited for, so
that what else the machine does matters less; evaluations do not count. A file keeps what is done,
and the next call goes on from there: a run that a changed script would make otherwise is deleted
from it by hand. Each run has its commit, machine and versions.
"""

import argparse
import json
import os
import queue
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import run_dirs
import tables
import tqdm

VERSIONS = re.compile("^versions (.*)$", re.MULTILINE)
PACKAGES = ("torch", "gymnasium", "mujoco", "stable-baselines3", "sbx-rl", "jax")
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


def say(seconds: float, steps: int, mean_return: float) -> None:
    """Tells an evaluation, as `read` finds it."""
    print(f"after {seconds / 60:.2f} min: {steps} steps, return {mean_return:.1f}", flush=True)


def say_versions() -> None:
    print(f"versions {json.dumps(run_dirs.versions(PACKAGES))}", flush=True)


def read(log: Path) -> dict:
    """{evaluations: [[minutes, steps, return], ...], versions}; ValueError without."""
    text = log.read_text(errors="replace")
    found = LINE.findall(text)
    if not found:
        raise ValueError("was not evaluated")
    evaluations = [list(map(float, numbers)) for numbers in found]
    versions = VERSIONS.search(text)
    return {"evaluations": evaluations, "versions": json.loads(versions[1]) if versions else {}}


def train(script, args, moments: list[float]) -> None:
    """Trains by a script of ours, a module, and evaluates after each of these minutes.

    It ends after the last of them, or when its steps are made.
    """
    clock = Clock()
    waiting = list(moments)
    shown = 0.0  # by the clock, when an evaluation begins

    class TimedRun(script.Run):
        def due(self, every, at_end=False):
            """An evaluation after each of the moments and at the end."""
            nonlocal shown
            if every != self.flags["eval_every"]:
                return super().due(every, at_end)
            shown = clock.seconds()
            return shown >= 60 * waiting[0] or self.step >= self.total_steps

        def write(self, row, step=None):
            super().write(row, step)
            if "charts/eval_return" not in row:
                return
            clock.go_back(shown)
            say(shown, self.step, row["charts/eval_return"])
            while waiting and shown >= 60 * waiting[0]:
                waiting.pop(0)
            self.ending = self.ending or not waiting

    script.Run = TimedRun
    script.main(args)


def plan(names: list[str], options: argparse.Namespace) -> list[tuple]:
    """All runs (name, task, seed), each seed of all before the next one."""
    wanted = []
    for seed in range(1, options.seeds + 1):
        for task in options.tasks:
            wanted += [(name, task, seed) for name in names]
    return wanted


def make(
    kind: str, wanted: list[tuple], options: argparse.Namespace, python: Callable = lambda _: None
) -> tuple[list[dict], list[str]]:
    """Makes those runs (name, task, seed) of a `kind` that are not yet in its file.

    The file is options.out/PROGRAM.json. A name's worker is that program itself, by `python`(name)
    or this Python. Returns all runs in the file, also of other lengths, and what went wrong.
    """
    worker = Path(sys.argv[0]).resolve()
    path = options.out / f"{worker.stem}.json"

    def kept() -> list[dict]:
        return run_dirs.read_json(path)["runs"] if path.exists() else []

    try:
        mine = [run for run in kept() if run["minutes"] == options.minutes]
    except run_dirs.DAMAGED as problem:
        raise SystemExit(f"error: {run_dirs.shown(path)}: {problem}") from None
    made = {(run[kind], run["task"], run["seed"]) for run in mine}
    wanted = [run for run in wanted if run not in made]
    cores: queue.Queue = queue.Queue()
    for core in os.sched_getaffinity(0):
        cores.put(core)
    failures = []
    writing = threading.Lock()
    interrupted = threading.Event()
    bar = tqdm.tqdm(total=len(wanted), unit="run")

    def go_on(log: Path) -> None:
        if interrupted.is_set():
            raise ValueError("was interrupted")

    def work(run: tuple) -> None:
        name, task, seed = run
        log = options.out / "logs" / (re.sub(r"\W+", "-", f"{kind}-{name}-{task}-{seed}") + ".log")
        command = [python(name) or sys.executable, str(worker), "--worker", name]
        command += ["--tasks", task, "--seed", str(seed), "--minutes", str(options.minutes)]
        here = run_dirs.this_machine()
        here["cpu"]["threads"] = 1
        here |= {"gpu": None, "gpu_driver": None}  # none is used
        core = cores.get()
        try:
            pinned = ["taskset", "-c", str(core), *command]
            with tempfile.TemporaryDirectory() as cache:
                environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
                environment["TMPDIR"] = cache  # where the compiler also keeps its headers
                environment["TORCHINDUCTOR_CACHE_DIR"] = cache  # or one that the user has exported
                environment["CUDA_VISIBLE_DEVICES"] = ""
                status = processes.run_logged(pinned, log, go_on, environment)
            found = processes.read_log(status, log, f"{name}, {task}, seed {seed}", read)
        except ValueError as failure:
            failures.append(str(failure))
            return
        finally:
            cores.put(core)
        here["versions"] |= found.pop("versions")
        result = {kind: name, "task": task, "seed": seed, "minutes": options.minutes, **found}
        result["machine"] = run_dirs.machine([here])
        with writing:
            bar.update()
            tables.write_json(path, {"schema": 1, "runs": [*kept(), result]})

    with bar, ThreadPoolExecutor(cores.qsize()) as pool:
        try:
            list(pool.map(work, wanted))
        except BaseException:
            interrupted.set()  # which the threads see, and end their runs
            pool.shutdown(cancel_futures=True)
            raise
    return kept(), failures


def report(
    kind: str,
    title: str,
    runs: list[dict],
    told: list[dict],
    minutes: int,
    table: list[list[str]],
    rows: list[dict],
    stem: Path,
) -> None:
    """Writes all runs in the file, and the table of those that are told of."""
    words = ["python", f"plots/measure/{stem.name}.py", "--minutes", str(minutes)]
    words += ["--seeds", str(max((run["seed"] for run in told), default=1))]
    for option, key in ((f"--{kind}s", kind), ("--tasks", "task")):
        words += [option, *dict.fromkeys(run[key] for run in told)]
    command = shlex.join(words)
    lines = []
    for run in told:  # not the load: minutes are of processor time
        lines += run_dirs.describe(run["machine"] | {"load_average_1min": None})
    lengths = " or ".join(map(str, sorted({run["minutes"] for run in told})))
    above = [f"{title}, as far as it is made: {command}", *dict.fromkeys(lines)]
    above.append(f"{lengths} minutes per run, in processor time, a core each")
    record = {"schema": 1, "command": command, "table": table, "rows": rows, "runs": runs}
    tables.write_report(stem, above, table, [], record)
