"""What does the stopwatch cost? Runs with it against runs that it does not instrument.

    python plots/measure/overhead.py   every script, 3 seeds; files in plots/out/
    python plots/measure/overhead.py --only 'ppo_cont*'     of every 'SCRIPT ROW', those that match

Per script, row and seed two runs of the same length: one with --stopwatch off, which counts steps
and reads the clock twice, and one with --stopwatch time, the default. (A trace takes no part: what
it tells is scaled to the untraced seconds.) Without a GPU they run at the same moment on a core
each, so that the drift of a shared machine hits both alike, and change cores with each seed; with
one, or on a single core, one after the other.

    off             microseconds per environment step without the stopwatch, mean over the seeds
    with            the same with it
    bias            with / off - 1: mean over the seeds, and range. It is to stay below 1%; RL-Scope
                    reports -17% to +11% after its own correction

Written to --out: overhead.md, overhead.json and logs/. Rows that a former call has left there and
this one does not measure stay. Exit status 1 if a run failed or a mean bias is beyond 1%.
"""

import argparse
import fnmatch
import json
import os
import shutil
import signal
import statistics
import sys
from pathlib import Path

import processes
import run_dirs
import speedup
import tqdm
from run_dirs import ROOT
from speedup import TRACED, Job

LIMIT = 0.01
SCHEMA = 2  # of the record; in the first one the bias was of seconds that were corrected
TIMES = {"off_seconds": "off us", "on_seconds": "with us", "corrected_seconds": "corrected us"}
LENGTH = {  # steps; after the warm-up about ten seconds or more
    "sac_continuous_action": 2000,
    "td3_continuous_action": 2500,
    "ppo_continuous_action": 18 * 2048,
    "ppo_continuous_action_async": 18 * 2048,
    "ppo_atari_envpool": 6 * 8 * 128,
    "ppo_atari_envpool_multigpu": 6 * 8 * 128,
    "ppo_cartpole_gpu": 12 * 4096 * 32,
    "ppo_pendulum_gpu": 20 * 4096 * 16,
}


def commands(job: Job) -> dict[str, list[str]]:
    """The pair: with names of their own, so that runs/ keeps both and no table takes them in."""
    words = job.command[: -len(TRACED)]
    words[words.index("--total-timesteps") + 1] = str(LENGTH[job.script])
    return {
        "off": [*words, "--exp-name", "uninstrumented", "--stopwatch", "off"],
        "on": [*words, "--exp-name", "instrumented"],
    }


def measure(job: Job, side_by_side: bool, logs: Path) -> dict:
    """One pair of runs -> seconds per step; ValueError says what went wrong."""
    stem = job.name.replace(" ", "-")
    pair = commands(job)
    files = {name: logs / f"overhead-{stem}-{name}.log" for name in pair}
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(logs / f"cache-{job.script}-{job.row}")}
    if side_by_side:
        environment["OMP_NUM_THREADS"] = "1"
        cores = sorted(os.sched_getaffinity(0))[:2]
        for core, name in zip(cores[:: (-1) ** job.seed], pair, strict=True):
            pair[name] = ["taskset", "-c", str(core), *pair[name]]
        with processes.logged(pair["off"], files["off"], environment) as one:
            with processes.logged(pair["on"], files["on"], environment) as other:
                statuses = {"off": one.wait(), "on": other.wait()}
    else:
        statuses = {}
        for name, command in pair.items():
            with processes.logged(command, files[name], environment) as child:
                statuses[name] = child.wait()
    runs = {
        name: processes.read_log(statuses[name], log, f"{job.name}, stopwatch {name},")
        for name, log in files.items()
    }
    off, on = (1 / runs[name].stages["sps_steady"] for name in ("off", "on"))
    times = {"off_seconds": off, "on_seconds": on, "bias": on / off - 1}
    return times | {"config": runs["on"].config}


def summarize(pairs: dict[tuple[str, str], list[dict]]) -> list[dict]:
    """One dict per script and row."""
    rows = []
    for (script, row), results in pairs.items():
        means = {
            name: statistics.fmean(result[name] for result in results)
            for name in ("off_seconds", "on_seconds")
        }
        bias = run_dirs.spread([result["bias"] for result in results])
        rows.append({"script": script, "row": row, **means, "bias": bias, "seeds": len(results)})
    return rows


def former(path: Path) -> list[dict]:
    """The pairs that a former call has recorded."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return found["pairs"] if found.get("schema") == SCHEMA else []


def merge(before: list[dict], pairs: dict[tuple[str, str], list[dict]], command: str) -> dict:
    """The record: `pairs` in the place of those that were measured `before`."""
    kept = [pair for pair in before if (pair["script"], pair["row"]) not in pairs]
    for (script, row), results in pairs.items():
        kept += [{**each, "script": script, "row": row, "command": command} for each in results]
    kept.sort(key=lambda pair: (pair["script"], pair["row"]))
    grouped: dict = {}
    for pair in kept:
        grouped.setdefault((pair["script"], pair["row"]), []).append(pair)
    record = {"schema": SCHEMA, "commands": list(dict.fromkeys(pair["command"] for pair in kept))}
    record |= {"machine": run_dirs.machine([pair["config"] for pair in kept])}
    return record | {"rows": summarize(grouped), "pairs": kept}


def short(x: float) -> str:
    """Four digits, and never 1e+04."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def cells(rows: list[dict]) -> list[list[str]]:
    times = [name for name in TIMES if name in rows[0]]
    table = [["script", "row", *(TIMES[name] for name in times), "bias", "min-max", "seeds"]]
    for row in rows:
        bias = row["bias"]
        table.append(
            [row["script"], row["row"]]
            + [short(1e6 * row[name]) for name in times]
            + [f"{bias['mean']:+.1%}", f"{bias['min']:+.1%} to {bias['max']:+.1%}"]
            + [str(row["seeds"])]
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", metavar="GLOB", help="of every 'SCRIPT ROW'")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out", help="folder of the report")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    cuda = speedup.this_machine()["gpu"] is not None
    rows = ["baseline", "compile+cudagraphs" if cuda else "compile"]
    jobs = speedup.make_jobs(sorted(LENGTH), rows, options.seeds, short=True)
    jobs = [job for job in jobs if fnmatch.fnmatch(f"{job.script} {job.row}", options.only)]
    if not jobs:
        parser.error(f"--only {options.only!r} matches no 'SCRIPT ROW'")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    side_by_side = not cuda and cores > 1 and shutil.which("taskset") is not None

    pairs, failures = {}, []
    try:
        for job in tqdm.tqdm(sorted(jobs, key=lambda job: (job.script, job.row)), unit="pair"):
            try:
                result = measure(job, side_by_side, options.out / "logs")
                pairs.setdefault((job.script, job.row), []).append(result)
            except ValueError as failure:
                failures.append(str(failure))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130

    if pairs:
        command = f"python plots/measure/overhead.py --seeds {options.seeds}"
        command += f" --only '{options.only}'" if options.only != "*" else ""
        how = "side by side, one core each" if side_by_side else "one after the other"
        record = merge(former(options.out / "overhead.json"), pairs, command)
        worst = max(abs(row["bias"]["mean"]) for row in record["rows"])
        above = [f"What the stopwatch costs; pairs {how}"]
        above += [f"Command: {command}" for command in record["commands"]]
        above += run_dirs.describe(record["machine"])
        below = [f"largest mean bias: {worst:.1%} (limit {LIMIT:.0%})"]
        table = cells(record["rows"])
        run_dirs.write_report(options.out / "overhead", above, table, below, record)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return int(bool(failures) or not pairs or worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
