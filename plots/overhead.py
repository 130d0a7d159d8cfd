"""Does the stopwatch tell the truth? Its corrected totals against runs that it does not instrument.

    python plots/overhead.py                        every script, 3 seeds; files in plots/out/
    python plots/overhead.py --only 'ppo_cont*'     of every 'SCRIPT ROW', those that match

Per script, row and seed two runs of the same length: one with --stopwatch off, which counts steps
and reads the clock twice, and one with --stopwatch trace, whose steady window has the same
iterations and is over before tracing begins. Without a GPU they run at the same moment on a core
each, so that the drift of a shared machine hits both alike, and change cores with each seed; with
one, or on a single core, one after the other.

    off             microseconds per environment step without the stopwatch, mean over the seeds
    with            the same with it
    corrected       the same less the overhead that the stopwatch reports of itself: what its stages
                    sum up to
    bias            corrected / off - 1: mean over the seeds, and range. RL-Scope reports -17% to
                    +11% for its own correction; ours is to stay within 5%
    traced          how many times slower the traced iterations were: what the correction by the
                    untraced window takes away

Written to plots/out/: overhead.md, overhead.json and logs/. Exit status 1 if a run failed or a mean
bias is beyond 5%.
"""

import argparse
import fnmatch
import os
import shutil
import signal
import statistics
import sys
from pathlib import Path

import run_dirs
import speedup
import tqdm
from run_dirs import ROOT, shown
from speedup import SHORT, TRACED, Job

LIMIT = 0.05
WINDOW = {  # of the SHORT runs, the part before the trace: steps
    "sac_continuous_action": 1400,
    "td3_continuous_action": 1400,
    "ppo_continuous_action": 6 * 2048,
    "ppo_atari_envpool": 6 * 8 * 128,
    "ppo_cartpole_gpu": 6 * 4096 * 32,
    "ppo_pendulum_gpu": 6 * 4096 * 16,
}


def without(job: Job) -> list[str]:
    """The command of a traced job, ending where its trace begins, without the stopwatch."""
    command = job.command[: -len(TRACED)] + ["--exp-name", "uninstrumented"]  # runs/ keeps both
    command += ["--stopwatch", "off"]
    command[command.index("--total-timesteps") + 1] = str(WINDOW[job.script])
    return command


def measure(job: Job, side_by_side: bool, logs: Path) -> dict:
    """One pair of runs -> seconds per step; ValueError says what went wrong."""
    stem = job.name.replace(" ", "-")
    commands = {"off": without(job), "on": job.command}
    files = {name: logs / f"overhead-{stem}-{name}.log" for name in commands}
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(logs / f"cache-{job.script}-{job.row}")}
    if side_by_side:
        environment["OMP_NUM_THREADS"] = "1"
        for core, name in zip((job.seed % 2, (job.seed + 1) % 2), commands, strict=True):
            commands[name] = ["taskset", "-c", str(core), *commands[name]]
        with speedup.logged(commands["off"], files["off"], environment) as one:
            with speedup.logged(commands["on"], files["on"], environment) as other:
                statuses = {"off": one.wait(), "on": other.wait()}
    else:
        statuses = {}
        for name, command in commands.items():
            with speedup.logged(command, files[name], environment) as child:
                statuses[name] = child.wait()
    runs = {}
    for name, log in files.items():
        try:
            if statuses[name]:
                raise ValueError(f"ended with exit status {statuses[name]}")
            runs[name] = run_dirs.read_run(speedup.run_directory(log))
        except ValueError as reason:
            what = f"{job.name}, stopwatch {name}, {reason}, see {shown(log)}"
            raise ValueError(f"{what}:\n{speedup.last_lines(log)}") from None
    on = runs["on"].stages
    if not on["trace"]:
        raise ValueError(f"{job.name}: the run ended before its trace, see {shown(files['on'])}")
    off, seconds = (1 / runs[name].stages["sps_steady"] for name in ("off", "on"))
    corrected = seconds * (1 - on["overhead_pct"] / 100)
    return {
        "off_seconds": off,
        "on_seconds": seconds,
        "corrected_seconds": corrected,
        "bias": corrected / off - 1,
        "inflation": on["trace"]["inflation"],
        "overhead_pct": on["overhead_pct"],
        "config": runs["on"].config,
    }


def summarize(pairs: dict[tuple[str, str], list[dict]]) -> list[dict]:
    """One dict per script and row."""
    rows = []
    for (script, row), results in pairs.items():
        means = {
            name: statistics.fmean(result[name] for result in results)
            for name in ("off_seconds", "on_seconds", "corrected_seconds", "inflation")
        }
        bias = run_dirs.spread([result["bias"] for result in results])
        rows.append({"script": script, "row": row, **means, "bias": bias, "seeds": len(results)})
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    table = [["script", "row", "off us", "with us", "corrected us", "bias", "min-max", "traced"]]
    for row in rows:
        bias = row["bias"]
        times = [row[name] for name in ("off_seconds", "on_seconds", "corrected_seconds")]
        table.append(
            [row["script"], row["row"]]
            + [f"{1e6 * seconds:,.4g}" for seconds in times]
            + [f"{bias['mean']:+.1%}", f"{bias['min']:+.1%} to {bias['max']:+.1%}"]
            + [f"{row['inflation']:.2f}x"]
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
    jobs = speedup.make_jobs(sorted(SHORT), rows, options.seeds, short=True)
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

    table = summarize(pairs)
    if table:
        configs = [result["config"] for results in pairs.values() for result in results]
        machine = run_dirs.machine(configs)
        command = f"python plots/overhead.py --seeds {options.seeds}"
        command += f" --only '{options.only}'" if options.only != "*" else ""
        how = "side by side, one core each" if side_by_side else "one after the other"
        above = [f"What the stopwatch costs and leaves uncorrected: {command}; pairs {how}"]
        above += run_dirs.describe(machine)
        record = {"schema": 1, "command": command, "machine": machine, "side_by_side": side_by_side}
        record |= {"rows": table, "failures": failures}
        record["pairs"] = [
            {"script": script, "row": row, **result}
            for (script, row), results in pairs.items()
            for result in results
        ]
        worst = max(abs(row["bias"]["mean"]) for row in table)
        below = [f"largest mean bias: {worst:.1%} (limit {LIMIT:.0%})"]
        run_dirs.write_report(options.out / "overhead", above, cells(table), below, record)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return int(bool(failures) or any(abs(row["bias"]["mean"]) > LIMIT for row in table))


if __name__ == "__main__":
    sys.exit(main())
