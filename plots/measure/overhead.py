"""What does the stopwatch cost? Runs with it against runs that it does not instrument.

    python plots/measure/overhead.py                      every script; files in plots/out/
    python plots/measure/overhead.py --only 'ppo_cont*'   of every 'SCRIPT ROW', those that match

Per script, row and seed two runs as long as those of the quick table: one of the script as it is,
and one whose stages do nothing: it reads the clock once per iteration and takes no samples of a
GPU. On two cores the two run at the same moment, and change cores with each seed; with a GPU or one
core, one after the other. The bias, with / off - 1, is to stay below 1%; RL-Scope reports -17% to
+11% after its own correction. Exit status 1 if a run failed or a mean bias is beyond 1%.
"""

import argparse
import fnmatch
import importlib
import os
import shutil
import statistics
import sys
from functools import partial
from pathlib import Path
from time import perf_counter

import processes
import program
import run_dirs
import speedup
import tables
from speedup import Job

LIMIT = 0.01
WORKER = "plots/measure/overhead.py"
ARMS = {"off": "uninstrumented", "on": "instrumented"}  # so that no table takes their runs in


def commands(job: Job) -> dict[str, list[str]]:
    """The pair."""
    python, script, *words = (word for word in job.command if word not in speedup.TRACED)
    pair = {}
    for arm, name in ARMS.items():
        flags = [*words, "--exp-name", name, "--torch-threads", "1"]
        pair[arm] = [python, WORKER, "--worker", arm, script, *flags]
    return pair


def switch_off(stopwatch: type) -> None:
    """Leaves of its stages what `tick` and `measure` need: the clock. It takes no samples."""

    def stage(self, name: str) -> None:
        if name == "untracked":
            now = perf_counter()
            self.seconds[name] += now - self.last
            self.last = now

    stopwatch.stage = stage
    stopwatch.sampling = property(lambda self: False, lambda self, value: None)


def work(arm: str, script: str, *flags: str) -> None:
    """The worker: trains once."""
    module = importlib.import_module(f"leanrl.{Path(script).stem}")
    if arm == "off":
        switch_off(module.Stopwatch)
    sys.argv = [WORKER, *flags]
    module.main(module.parse_args(module.Args))


def measure(job: Job, side_by_side: bool, logs: Path, progress=None) -> dict:
    """One pair of runs -> seconds per step; ValueError says what went wrong."""
    pair = commands(job)
    stem = job.name.replace(" ", "-")
    files = {name: logs / f"overhead-{stem}-{name}.log" for name in pair}
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(logs / f"cache-{job.script}-{job.row}")}
    statuses = {}
    if side_by_side:
        cores = sorted(os.sched_getaffinity(0))[:2]
        if job.seed % 2:
            cores.reverse()
        for core, name in zip(cores, pair, strict=True):
            pair[name] = ["taskset", "-c", str(core), *pair[name]]
        with processes.logged(pair["off"], files["off"], environment) as one:
            with processes.logged(pair["on"], files["on"], environment) as other:
                statuses["off"] = one.wait()
                statuses["on"] = other.wait()
    else:
        for name, command in pair.items():
            log = files[name]
            statuses[name] = processes.run_logged(command, log, progress, environment)
    runs = {}
    for name, log in files.items():
        what = f"{job.name}, stopwatch {name},"
        runs[name] = processes.read_log(statuses[name], log, what)
    off = 1 / runs["off"].stages["sps_steady"]
    on = 1 / runs["on"].stages["sps_steady"]
    return {
        "script": job.script,
        "row": job.row,
        "off_seconds": off,
        "on_seconds": on,
        "bias": on / off - 1,
        "config": runs["on"].config,
    }


def summarize(pairs: list[dict]) -> list[dict]:
    """One dict per script and row."""
    groups: dict = {}
    for pair in pairs:
        name = pair["script"], pair["row"]
        groups.setdefault(name, []).append(pair)
    rows = []
    for (script, row), mine in groups.items():
        rows.append(
            {
                "script": script,
                "row": row,
                "off_seconds": statistics.fmean(pair["off_seconds"] for pair in mine),
                "on_seconds": statistics.fmean(pair["on_seconds"] for pair in mine),
                "bias": tables.spread([pair["bias"] for pair in mine]),
                "seeds": len(mine),
            }
        )
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    columns = {
        "off us": lambda row: tables.short(1e6 * row["off_seconds"]),
        "with us": lambda row: tables.short(1e6 * row["on_seconds"]),
        "bias": lambda row: f"{row['bias']['mean']:+.1%}",
        "min-max": lambda row: f"{row['bias']['min']:+.1%} to {row['bias']['max']:+.1%}",
        "seeds": lambda row: str(row["seeds"]),
    }
    return tables.lay_out(rows, ["script", "row"], columns)


def plan(options: argparse.Namespace, cuda: bool) -> list[Job]:
    rows = ["baseline", "compile+cudagraphs" if cuda else "compile"]
    jobs = []
    for script in sorted(speedup.SCRIPTS):
        jobs += speedup.make_jobs([script], rows, options.seeds, "quick", cuda=cuda)
    jobs = [job for job in jobs if fnmatch.fnmatch(f"{job.script} {job.row}", options.only)]
    return sorted(jobs, key=lambda job: (job.script, job.row))


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out", "--seeds")
    parser.set_defaults(seeds=3)
    parser.add_argument("--only", default="*", metavar="GLOB", help="of every 'SCRIPT ROW'")
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(*options.worker)
        return 0
    cuda = run_dirs.this_machine()["gpu"] is not None
    jobs = plan(options, cuda)
    if not jobs:
        parser.error(f"--only {options.only!r} matches no 'SCRIPT ROW'")
    cores = len(os.sched_getaffinity(0))
    side_by_side = not cuda and cores > 1 and shutil.which("taskset") is not None

    turns = []
    for job in jobs:
        make = partial(measure, job, side_by_side, options.out / "logs")
        turns.append(processes.Turn(job.name, job.steps, 1, make))
    results, failures = processes.make_all(turns)
    pairs = list(results.values())
    if not pairs:
        return processes.say_failures(failures)
    rows = summarize(pairs)
    machine = run_dirs.machine([pair["config"] for pair in pairs])
    worst = max(abs(row["bias"]["mean"]) for row in rows)
    command = processes.call("overhead.py", options, "only", "seeds")
    how = "side by side, one core each" if side_by_side else "one after the other"
    below = [f"largest mean bias: {worst:.1%} (limit {LIMIT:.0%})"]
    record = {
        "schema": 2,
        "command": command,
        "machine": machine,
        "rows": rows,
        "pairs": pairs,
    }
    title = f"What the stopwatch costs, pairs {how}"
    tables.write_report(options.out / "overhead", title, cells(rows), record, below=below)
    return processes.say_failures(failures) or int(worst > LIMIT)


if __name__ == "__main__":
    program.start(main)
