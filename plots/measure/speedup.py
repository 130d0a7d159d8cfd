"""The speed-up table and the figures: each algorithm as it is, rewritten, compiled and captured.

    python plots/measure/speedup.py --quick   three scripts, two short runs per row: minutes
    python plots/measure/speedup.py --full                  every script, 3 seeds, full length: days
    python plots/measure/speedup.py --full --only 'ppo*compile' --seeds 1 --steps 100000
    python plots/measure/speedup.py --table-only runs/...   table and figures of runs that exist

Every run is a process of its own, one at a time, and the rows take turns (A B C, A B C), so that
the drift of a shared machine hits all alike; round n has seed n. --full goes on where it stopped:
a run that is finished, with the same command, on the same machine and versions, by a script that
has not changed since, is kept. --only takes the runs whose "SCRIPT ROW" matches. In --quick each
run ends with a traced part, in --full each row with a short traced run, for plots/breakdown.py. All
numbers come from config.json and stages.json of the runs:

    steps/s         mean over the seeds, and range, of the steady environment steps per second
    speed-up        ratio of that mean to the baseline's
    warm-up s       what steps/s leaves out: random exploration, compilation and capture, but not
                    the imports. `first` is the row's first run, for which the compiler's cache is
                    empty (--table-only, --full: as the run found it), `best` the fastest
    all steps/s     mean of all steps / all seconds

Written to plots/out/: speedup.md and .json, the figures of plots/curves.py and
plots/breakdown.py, and logs/ with what each run printed. Exit status 1 if a run failed; the others
count nevertheless.
"""

import argparse
import fnmatch
import re
import shlex
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import processes
import run_dirs
import tqdm
from run_dirs import (
    FREE_ARGS,
    ROWS,
    VARIANT,
    Run,
    incomparable,
    read_runs,
    shown,
    spread,
    this_machine,
)

ROOT = run_dirs.ROOT
QUICK = ("sac_continuous_action", "ppo_continuous_action", "ppo_cartpole_gpu")
SHORT = {  # flags of a run that is just long enough for the steady window and the trace
    "sac_continuous_action": {"--learning-starts": 300, "--total-timesteps": 1000},
    "td3_continuous_action": {"--learning-starts": 300, "--total-timesteps": 1000},
    "ppo_continuous_action": {"--total-timesteps": 8 * 2048},
    "ppo_continuous_action_async": {"--total-timesteps": 12 * 2048},
    "ppo_atari_envpool": {"--total-timesteps": 8 * 8 * 128},
    "ppo_atari_envpool_multigpu": {"--total-timesteps": 8 * 8 * 128},
    "ppo_cartpole_gpu": {"--total-timesteps": 8 * 4096 * 32},
    "ppo_pendulum_gpu": {"--total-timesteps": 8 * 4096 * 16},
}
TRACED = ["--stopwatch", "trace"]


@dataclass
class Job:
    """A run to make: its row of the table, its command, and how far its progress bar goes."""

    script: str
    row: str
    seed: int
    command: list[str]
    steps: int

    @property
    def name(self) -> str:
        traced = " traced" if "trace" in self.command else ""
        return f"{self.script} {self.row} seed {self.seed}{traced}"


def timed(runs: list[Run]) -> list[Run]:
    """The runs that tell a script's speed: traced ones only where it has no others."""
    plain = {run.script for run in runs if not traced(run)}
    return [run for run in runs if not traced(run) or run.script not in plain]


def traced(run: Run) -> bool:
    return run.config["args"].get("stopwatch") == "trace"


def summarize(runs: list[Run]) -> list[dict]:
    """One dict per script and row, as in speedup.json; a row without runs says why in `skipped`."""
    rows = []
    for script in dict.fromkeys(run.script for run in runs):
        baseline = None
        for row, flags in ROWS.items():
            mine = [run for run in runs if (run.script, run.row) == (script, row)]
            if not mine:
                on_cpu = all(run.config["gpu"] is None for run in runs)
                no_device = "--cudagraphs" in flags and on_cpu
                reason = "no CUDA device" if no_device else "no finished run"
                rows.append({"script": script, "row": row, "skipped": reason})
                continue
            steady = spread([run.stages["sps_steady"] for run in mine])
            if row == "baseline":
                baseline = steady["mean"]
            warmups = [run.stages["warmup_seconds"] for run in mine]
            rows.append(
                {
                    "script": script,
                    "row": row,
                    "sps_steady": steady,
                    "speedup": steady["mean"] / baseline if baseline else None,
                    "warmup_seconds": {"first": warmups[0], "best": min(warmups)},
                    "sps_inclusive": spread([run.stages["sps_inclusive"] for run in mine]),
                    "runs": [shown(run.path) for run in mine],
                    "seeds": [run.config["args"]["seed"] for run in mine],
                    "commands": [run.config["command"] for run in mine],
                }
            )
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    """The table, heading first, as text."""
    table = ["script", "row", "steps/s", "min-max", "speed-up"]
    table = [[*table, "warm-up s first", "best", "all steps/s", "runs"]]
    for row in rows:
        if "skipped" in row:
            table.append([row["script"], row["row"], f"skipped: {row['skipped']}", *[""] * 6])
            continue
        steady, warmup = row["sps_steady"], row["warmup_seconds"]
        table.append(
            [
                row["script"],
                row["row"],
                f"{steady['mean']:,.1f}",
                f"{steady['min']:,.1f}-{steady['max']:,.1f}",
                f"{row['speedup']:.2f}x" if row["speedup"] else "-",
                f"{warmup['first']:.1f}",
                f"{warmup['best']:.1f}",
                f"{row['sps_inclusive']['mean']:,.1f}",
                str(len(row["runs"])),
            ]
        )
    return table


def run_all(jobs: list[Job], logs: Path) -> tuple[list[Run], list[str]]:
    """Makes the runs one after the other; the finished ones, and for each other one what it was."""
    runs, failures, done = [], [], 0
    total = sum(job.steps for job in jobs)
    with tempfile.TemporaryDirectory() as caches, tqdm.tqdm(total=total, unit="step") as bar:
        for number, job in enumerate(jobs, start=1):
            bar.set_postfix_str(f"run {number}/{len(jobs)}: {job.name}")
            log = logs / f"{job.name.replace(' ', '-')}.log"

            def progress(steps: int, done=done, job=job) -> None:
                bar.update(max(done + min(steps, job.steps), bar.n) - bar.n)

            cache = Path(caches, f"{job.script}-{job.row}")  # so that `first` is a cold start
            environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
            try:
                run = processes.run_and_read(job.command, log, progress, job.name, environment)
                runs.append(run)
            except ValueError as failure:
                failures.append(str(failure))
            progress(job.steps)
            done += job.steps
    return runs, failures


def total_timesteps(script: Path) -> int:
    """The script's own default: importing it for that would take seconds."""
    return int(re.search(r"total_timesteps: int = ([\d_]+)", script.read_text()).group(1))


def make_jobs(
    scripts: list[str], rows: list[str], seeds: int, short: bool = False, steps: int | None = None
) -> list[Job]:
    """Round by round, so that the rows of a script take turns; `short` runs are traced ones."""
    jobs = []
    for seed in range(1, seeds + 1):
        for script in scripts:
            for row in rows:
                file = f"leanrl/{script}{'' if row == 'baseline' else VARIANT}.py"
                flags = dict(SHORT[script]) if short else {}
                if steps:
                    flags["--total-timesteps"] = steps
                command = [sys.executable, file, "--seed", str(seed), *ROWS[row]]
                command += [str(word) for flag in flags.items() for word in flag]
                length = flags.get("--total-timesteps") or total_timesteps(ROOT / file)
                jobs.append(Job(script, row, seed, command + TRACED * short, length))
    return jobs


def plan(options: argparse.Namespace, cuda: bool) -> list[Job]:
    """All runs of --quick or --full that --only lets through and this machine can make."""
    variants = sorted((ROOT / "leanrl").glob(f"*{VARIANT}.py"))
    scripts = [path.stem.removesuffix(VARIANT) for path in variants]
    rows = [row for row, flags in ROWS.items() if cuda or "--cudagraphs" not in flags]
    for row in ROWS:
        if row not in rows:
            print(f"skipped: {row}, no CUDA device")
    if options.quick:
        scripts = [name for name in scripts if options.only or name in QUICK]
        jobs = make_jobs(scripts, rows, options.seeds or 2, True, options.steps)
    else:
        jobs = make_jobs(scripts, rows, options.seeds or 3, False, options.steps)
        jobs += make_jobs(scripts, rows, 1, True)
    only = options.only or "*"
    return [job for job in jobs if fnmatch.fnmatch(f"{job.script} {job.row}", only)]


def finished(jobs: list[Job], here: dict) -> dict[str, Run]:
    """{name: run} of the jobs that need not run again; `here` is `this_machine`."""
    runs, kept = read_runs([ROOT / "runs"])[0], {}
    for job in jobs:
        script = ROOT / job.command[1]
        for run in runs:
            installed = {"versions": run_dirs.versions(run.config["versions"])}
            same = run.config["command"] == " ".join(job.command[1:])
            same = same and not run_dirs.differences(run.config, here | installed)
            same = same and run.config.get("processes", 1) == 1  # torchrun is not in the command
            if same and script.stat().st_mtime < (run.path / "config.json").stat().st_mtime:
                kept[job.name] = run
    return kept


def draw_figures(runs: list[Run], out: Path) -> None:
    """What plots/curves.py and plots/breakdown.py make of these runs."""
    try:
        import breakdown
        import curves
    except ImportError as missing:
        print(f"no figures: {missing}; pip install -r requirements/plots.txt", file=sys.stderr)
        return
    breakdown.write(runs, out)
    curves.write(timed(runs), out)


def write_table(runs: list[Run], failures: list[str], protocol: str, call: str, out: Path) -> None:
    """speedup.md and .json."""
    command = f"python plots/measure/speedup.py {call}"
    record = {"schema": 1, "protocol": protocol, "command": command}
    record |= {"machine": run_dirs.machine([run.config for run in runs])}
    record |= {"rows": summarize(runs), "failures": failures}
    settings = {run.script: run.config["args"] for run in runs}
    record["settings"] = {
        script: {key: value for key, value in args.items() if key not in FREE_ARGS}
        for script, args in settings.items()
    }
    above = [f"Speed-up table ({protocol}): {command}", *run_dirs.describe(record["machine"])]
    for script, args in record["settings"].items():
        length = f"{args['total_timesteps']:,} environment steps per run"
        above.append(f"{script}: {args['env_id']}, {length}")
    below = [f"runs: {', '.join(sorted({shown(run.path.parent) for run in runs}))}/"]
    if (out / "logs").exists():
        below.append(f"logs: {shown(out / 'logs')}/")
    run_dirs.write_report(out / "speedup", above, cells(record["rows"]), below, record)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)}; short runs")
    what.add_argument("--full", action="store_true", help="every script at full length")
    what.add_argument("--table-only", nargs="+", type=Path, metavar="RUNS_DIR", help="run nothing")
    parser.add_argument("--only", metavar="GLOB", help="of every 'SCRIPT ROW', those that match")
    parser.add_argument("--seeds", type=int, help="runs per row (quick: 2, full: 3)")
    parser.add_argument("--steps", type=int, help="environment steps per run")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out", help="folder of the report")
    options = parser.parse_args(arguments)

    failures = []
    if options.table_only:
        protocol = "table only"
        call = shlex.join(["--table-only", *map(shown, options.table_only)])
        runs, skipped = read_runs(options.table_only)
        for line in skipped:
            print(f"skipped: {line}", file=sys.stderr)
        if not runs:
            parser.error(f"no finished runs in {', '.join(map(str, options.table_only))}")
    else:
        here = this_machine()
        jobs = plan(options, here["gpu"] is not None)
        if not jobs:
            parser.error(f"--only {options.only!r} matches no 'SCRIPT ROW'")
        protocol = "quick" if options.quick else "full"
        call = " ".join([f"--{protocol}", *(shlex.join(words) for words in given(options))])
        kept = finished(jobs, here) if options.full else {}
        for name, run in kept.items():
            print(f"kept: {name}, {shown(run.path)}")
        jobs = [job for job in jobs if job.name not in kept]
        print(f"{len(jobs)} runs, {sum(job.steps for job in jobs):,} environment steps in all")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            runs, failures = run_all(jobs, options.out / "logs")
        except KeyboardInterrupt:
            print("\ninterrupted; the runs so far are in runs/", file=sys.stderr)
            return 130
        runs = [*kept.values(), *runs]

    if reason := incomparable(timed(runs)):
        parser.error(f"these runs make no table: {reason}; name those that belong together")
    if runs:
        write_table(timed(runs), failures, protocol, call, options.out)
        draw_figures(runs, options.out)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return int(bool(failures))


def given(options: argparse.Namespace) -> list[list[str]]:
    """The options that narrow a protocol, as words of a command line."""
    names = [name for name in ("only", "seeds", "steps") if getattr(options, name)]
    return [[f"--{name}", str(getattr(options, name))] for name in names]


if __name__ == "__main__":
    sys.exit(main())
