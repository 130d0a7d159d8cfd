"""The speed-up table and its figures: each algorithm as it is, rewritten, compiled and captured.

    python plots/measure/speedup.py --quick                 six scripts, a run per row: minutes
    python plots/measure/speedup.py --full                  every script, 3 seeds, full length: days
    python plots/measure/speedup.py --full --only 'ppo*compile' --seeds 1 --steps 100000

Every run is a process of its own, one at a time, and the rows take turns, so that the drift of a
shared machine hits all alike; round n has seed n. --quick makes runs that are too short to learn
anything, longer ones on a GPU, and leaves out the row eager. --full goes on where it stopped: a run
that is finished, with the same command, on the same machine and versions, by a script that has not
changed since, is kept. With --full or a GPU, a short run per row is traced.

    steps/s         mean over the seeds, and range, of the steady environment steps per second
    speed-up        ratio of that mean to the baseline's, both over the rounds that both have
    warm-up s       random exploration, compilation and capture, but not the imports. `first` is the
                    row's first run, for which --full empties the compiler's cache
    all steps/s     mean of all steps / all seconds

Written to --out: speedup.md and .json, the figures speedup, breakdown, utilization and, not with
--quick, curves_learning, and logs/. Exit status 1 if a run failed; the others count nevertheless.
"""

import argparse
import fnmatch
import io
import math
import re
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import processes
import program
import run_dirs
import tables
from run_dirs import ROOT, ROWS, VARIANT, Run, read_runs, shown, this_machine
from tables import in_units, spread

TRACED = ["--stopwatch", "trace"]
UTILIZED = ("ppo_continuous_action", "ppo_mujoco_worlds")  # those that --quick draws


class Lengths(NamedTuple):
    """Flags of a script's runs, and about how many steps/s it makes, for the progress bar."""

    quick: str  # a window of some seconds
    traced: str  # just long enough for the steady window and the trace
    speed: int


TINY = {  # flags of a rehearsal, in which a step takes a hundred times as long
    "ppo_continuous_action": "--num-steps 64 --num-minibatches 2 --total-timesteps 1024",
    "sac_continuous_action": "--learning-starts 50 --total-timesteps 250",
    "td3_continuous_action": "--learning-starts 50 --total-timesteps 250",
    "ppo_mujoco_worlds": "--physics c --num-envs 8 --num-steps 16 --total-timesteps 1024",
    "sac_mujoco_worlds": "--physics c --num-envs 8 --learning-starts 100 --total-timesteps 1200",
    "ppo_cartpole_gpu": "--num-envs 64 --num-steps 16 --total-timesteps 40960",
    "ppo_atari_envpool": "--num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 1024",
}
EARLY = "--learning-starts 100 --total-timesteps 600"
OFF_POLICY = Lengths(EARLY, EARLY, 100)
CONTINUOUS = Lengths("--total-timesteps 20480", "--total-timesteps 24576", 2000)
ATARI = Lengths("--total-timesteps 32768", "--total-timesteps 8192", 300)
# Without --compile the trace of a rollout of 2,048 steps is a file that takes half a minute to
# write. Rollouts of 512, also in minibatches of 64, have the same operations per step.
SHORT = "--num-steps 512 --num-minibatches 8 --total-timesteps 6144"
FEW_WORLDS = "--learning-starts 1000 --total-timesteps 8192"
SCRIPTS = {
    "sac_continuous_action": OFF_POLICY,
    "td3_continuous_action": OFF_POLICY,
    "ppo_continuous_action": CONTINUOUS,
    "ppo_continuous_action_async": CONTINUOUS,
    "ppo_lstm": Lengths("--total-timesteps 20480", "--total-timesteps 8192", 1000),
    "ppo_atari_envpool": ATARI,
    "ppo_atari_envpool_multigpu": ATARI,
    "pqn_atari_envpool": ATARI,
    "ppo_cartpole_gpu": Lengths("--total-timesteps 1310720", "--total-timesteps 1048576", 200_000),
    "ppo_mujoco_worlds": Lengths("--total-timesteps 131072", "--total-timesteps 49152", 10_000),
    "sac_mujoco_worlds": Lengths(FEW_WORLDS, "--total-timesteps 50000", 2000),
}
CAPTURED = "--learning-starts 500 --total-timesteps 8000"
MANY_WORLDS = "--num-envs 4096 --num-steps 16 --total-timesteps"
LARGE_BATCH = "--num-envs 4096 --utd-ratio 0.001 --batch-size 8192 --total-timesteps"
ON_A_GPU = {  # in their place: a row that is captured would be over in less than a second
    "sac_continuous_action": Lengths(CAPTURED, EARLY, 500),
    "td3_continuous_action": Lengths(CAPTURED, EARLY, 500),
    "ppo_cartpole_gpu": Lengths(
        "--total-timesteps 52428800", "--total-timesteps 2097152", 4_000_000
    ),
    "ppo_mujoco_worlds": Lengths(f"{MANY_WORLDS} 13107200", f"{MANY_WORLDS} 786432", 400_000),
    "sac_mujoco_worlds": Lengths(f"{LARGE_BATCH} 4096000", f"{LARGE_BATCH} 819200", 100_000),
}


class Job(NamedTuple):
    """A run to make: its row of the table, its command and its length."""

    script: str
    row: str
    seed: int
    command: list[str]
    steps: int
    speed: int  # about so many steps/s

    @property
    def name(self) -> str:
        traced = " traced" if "trace" in self.command else ""
        return f"{self.script} {self.row} seed {self.seed}{traced}"


def timed(runs: list[Run]) -> list[Run]:
    """The runs that tell a script's speed."""
    return [run for run in runs if not traced(run)]


def traced(run: Run) -> bool:
    return run.config["args"].get("stopwatch") == "trace"


def speeds_beside(others: list[Run], runs: list[Run]) -> list[float]:
    """Of those `runs` whose round `others` have as well: not all rounds were equally fast."""
    rounds = {run.config["args"]["seed"] for run in others}
    return [run.stages["sps_steady"] for run in runs if run.config["args"]["seed"] in rounds]


def summarize(runs: list[Run], names: list[str]) -> list[dict]:
    """One dict per script and row of `names`; a row without runs says why in `skipped`."""
    rows = []
    on_cpu = all(run.config["gpu"] is None for run in runs)
    for script in dict.fromkeys(run.script for run in runs):
        baseline: list[Run] = []
        for row in names:
            mine = [run for run in runs if (run.script, run.row) == (script, row)]
            if not mine:
                captured = "--cudagraphs" in ROWS[row]
                reason = "no CUDA device" if captured and on_cpu else "no finished run"
                rows.append({"script": script, "row": row, "skipped": reason})
                continue
            if row == "baseline":
                baseline = mine
            fast = speeds_beside(baseline, mine)
            slow = speeds_beside(mine, baseline)
            warmups = [run.stages["warmup_seconds"] for run in mine]
            rows.append(
                {
                    "script": script,
                    "row": row,
                    "sps_steady": spread([run.stages["sps_steady"] for run in mine]),
                    "speedup": fmean(fast) / fmean(slow) if fast else None,
                    "warmup_seconds": {"first": warmups[0], "best": min(warmups)},
                    "sps": spread([run.stages["sps"] for run in mine]),
                    "runs": [shown(run.path) for run in mine],
                    "seeds": [run.config["args"]["seed"] for run in mine],
                    "commands": [run.config["command"] for run in mine],
                }
            )
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    columns = {
        "steps/s": lambda row: f"{row['sps_steady']['mean']:,.1f}",
        "min-max": lambda row: "{min:,.1f}-{max:,.1f}".format(**row["sps_steady"]),
        "speed-up": lambda row: f"{row['speedup']:.2f}x" if row["speedup"] else "-",
        "warm-up s first": lambda row: f"{row['warmup_seconds']['first']:.1f}",
        "best": lambda row: f"{row['warmup_seconds']['best']:.1f}",
        "all steps/s": lambda row: f"{row['sps']['mean']:,.1f}",
        "runs": lambda row: str(len(row["runs"])),
    }
    return tables.lay_out(rows, ["script", "row"], columns)


def run_all(
    jobs: list[Job], logs: Path, empty: bool, limit: float = math.inf
) -> tuple[list[Run], list[str]]:
    """Makes the runs one after the other; the finished ones, and for each other one what it was.

    The compiler's cache is `empty` for a row's first run, or the user's. A run ends after `limit`
    seconds, which is no failure.
    """
    turns = []
    with tempfile.TemporaryDirectory() as caches:
        for job in jobs:
            log = logs / f"{job.name.replace(' ', '-')}.log"
            cache = Path(caches, f"{job.script}-{job.row}")
            environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} if empty else {}
            keywords = {"what": job.name, "environment": environment, "limit": limit}
            make = partial(processes.run_and_read, job.command, log, **keywords)
            seconds = min(10 + job.steps / job.speed, limit)
            turns.append(processes.Turn(job.name, job.steps, seconds, make))
        results, failures = processes.make_all(turns)
    return list(results.values()), failures


def total_timesteps(script: Path) -> int:
    """The script's own default: importing it for that would take seconds."""
    return int(re.search(r"total_timesteps: int = ([\d_]+)", script.read_text()).group(1))


def make_jobs(
    scripts: list[str],
    rows: list[str],
    seeds: int,
    length: str,
    steps: int | None = None,
    tiny: bool = False,
    cuda: bool = False,
) -> list[Job]:
    """Round by round, so that rows take turns; `length` is that of Lengths, or full."""
    jobs = []
    known = SCRIPTS | ON_A_GPU if cuda else SCRIPTS
    for seed in range(1, seeds + 1):
        for script in scripts:
            lengths = known[script]
            for row in rows:
                file = f"leanrl/{script}{'' if row == 'baseline' else VARIANT}.py"
                text = "" if length == "full" else getattr(lengths, length)
                if length == "traced" and lengths is CONTINUOUS and "compile" not in row:
                    text = SHORT
                if tiny:
                    text = TINY[script]
                flags, _, count = text.partition("--total-timesteps ")
                count = steps or count
                command = [sys.executable, file, "--seed", str(seed), *ROWS[row], *flags.split()]
                if count:
                    command += ["--total-timesteps", str(count)]
                if length == "traced":
                    command += TRACED
                count = int(count or total_timesteps(ROOT / file))
                jobs.append(Job(script, row, seed, command, count, lengths.speed))
    return jobs


def protocol_rows(options: argparse.Namespace) -> list[str]:
    """The rows that the table has, whether this machine can make them or not."""
    return [row for row in ROWS if row != "eager" or options.only or not options.quick]


def plan(options: argparse.Namespace, cuda: bool) -> list[Job]:
    """All runs of --quick or --full that --only lets through and this machine can make."""
    variants = sorted((ROOT / "leanrl").glob(f"*{VARIANT}.py"))
    scripts = [path.stem.removesuffix(VARIANT) for path in variants]
    scripts = [script for script in scripts if script in SCRIPTS]  # not a user's copies
    if options.quick and not options.only:
        scripts = [script for script in run_dirs.SHOWN if script in scripts]
    if options.tiny:
        scripts = [script for script in scripts if script in TINY]
    rows = [row for row in protocol_rows(options) if cuda or "--cudagraphs" not in ROWS[row]]
    length, seeds = ("quick", 1) if options.quick else ("full", 3)
    seeds = options.seeds or seeds
    tiny = options.tiny
    long = cuda and not tiny  # a rehearsal has a CPU's lengths
    steps = 10**9 if options.limit and not tiny else options.steps
    jobs = make_jobs(scripts, rows, seeds, length, steps, tiny, long)
    if (long and not options.limit) or not options.quick:
        jobs += make_jobs(scripts, rows, 1, "traced", tiny=tiny, cuda=long)
    jobs.sort(key=lambda job: (job.seed, scripts.index(job.script), rows.index(job.row)))
    chosen = []
    for job in jobs:
        name = f"{job.script} {job.row}"
        if not options.only or any(fnmatch.fnmatch(name, glob) for glob in options.only):
            chosen.append(job)
    return chosen


def finished(jobs: list[Job], here: dict) -> dict[str, Run]:
    """{name: run} of the jobs that need not run again; `here` is `this_machine`."""
    runs, _ = read_runs([ROOT / "runs"])
    return processes.find_made({job.name: job.command[1:] for job in jobs}, runs, here)


def draw_speedups(rows: list[dict], runs: list[Run], out: Path) -> list[Path]:
    """A bar per row, as high as its speed-up, a group per script: speedup.png and .svg."""
    import curves
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row.get("speedup")]
    scripts = list(dict.fromkeys(row["script"] for row in rows))
    most = max(Counter(row["script"] for row in rows).values())  # bars of a script
    width = 0.8 / most
    figure, ax = plt.subplots(figsize=(2 + 0.7 * len(scripts) * most, 4), layout="constrained")
    for row in rows:
        mine = [other["row"] for other in rows if other["script"] == row["script"]]
        place = mine.index(row["row"]) - (len(mine) - 1) / 2
        x = scripts.index(row["script"]) + place * width
        ax.bar(x, row["speedup"], 0.95 * width, color=curves.COLOURS[row["row"]])
        name = row["row"].replace("+", "+\n")
        speed = in_units(row["sps_steady"]["mean"])
        said = f"{name}\n{row['speedup']:.2f}x\n{speed}/s"
        ax.annotate(said, (x, row["speedup"]), ha="center", va="bottom", fontsize=7)
    ax.set_xticks(range(len(scripts)), [run_dirs.label(script) for script in scripts])
    ax.set_ylabel("steps/s, baseline = 1")
    ax.margins(0.1, 0.2)
    ax.grid(False, axis="x")
    curves.headline(figure, "Speed-up in steady state", runs)
    return curves.save(figure, out / "speedup")


def draw_figures(runs: list[Run], rows: list[dict], out: Path, quick: bool) -> None:
    """What this program, plots/curves.py and plots/breakdown.py make of these runs."""
    import breakdown
    import curves
    import utilization

    files = breakdown.write(runs, out)
    files += utilization.write(timed(runs), out, scripts=UTILIZED if quick else ())
    if not quick:
        files += curves.write(timed(runs), out)
    if any(row.get("speedup") for row in rows):
        files += draw_speedups(rows, runs, out)
    print(f"figures: {', '.join(shown(path) for path in files if path.suffix == '.png')}")


def write_table(
    runs: list[Run], rows: list[dict], failures: list[str], options: argparse.Namespace
) -> None:
    """speedup.md and .json, with the speeds of the runs that `timed` chooses."""
    spent = timed(runs)
    out = options.out
    protocol = "quick" if options.quick else "full"
    names = ("quick", "full", "only", "seeds", "steps", "limit", "tiny")
    call = processes.call("speedup.py", options, *names)
    record = {
        "schema": 1,
        "protocol": protocol,
        "command": call,
        "machine": run_dirs.machine([run.config for run in spent]),
        "rows": rows,
        "failures": failures,
        "traced": [shown(run.path) for run in runs if traced(run)],
    }
    above = []
    for script, args in {run.script: run.config["args"] for run in spent}.items():
        above.append(f"{script}: {args['env_id']}, {args['total_timesteps']:,} steps per run")
    below = [f"runs: {', '.join(sorted({shown(run.path.parent) for run in runs}))}/"]
    if (out / "logs").exists():
        below.append(f"logs: {shown(out / 'logs')}/")
    title = f"Speed-up table ({protocol})"
    tables.write_report(out / "speedup", title, cells(rows), record, above, below)


def report(runs: list[Run], failures: list[str], options: argparse.Namespace) -> int:
    """Table and figures of these runs; the exit status."""
    if timed(runs):
        rows = summarize(timed(runs), protocol_rows(options))
        with redirect_stdout(io.StringIO()) as said:  # where nobody reads, all is written first
            write_table(runs, rows, failures, options)
            draw_figures(runs, rows, options.out, options.quick)
        print(said.getvalue(), end="")
    return processes.say_failures(failures)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out", "--steps", "--seeds")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--quick", action="store_true", help="README's six scripts; minutes")
    what.add_argument("--full", action="store_true", help="every script at full length")
    parser.add_argument(
        "--only", metavar="GLOB", nargs="+", help="of every 'SCRIPT ROW', those that match"
    )
    parser.add_argument("--limit", type=program.few, help="seconds after which a run ends")
    parser.add_argument(
        "--tiny", action="store_true", help="with --quick: speeds that mean nothing"
    )
    options = parser.parse_args(arguments)
    if options.tiny and not options.quick:
        parser.error("--tiny is for the scripts of --quick")
    here = this_machine()
    jobs = plan(options, here["gpu"] is not None)
    if not jobs:
        parser.error(f"--only {' '.join(map(repr, options.only))} matches no 'SCRIPT ROW'")
    kept = finished(jobs, here) if options.full else {}
    for name, run in kept.items():
        print(f"kept: {name}, {shown(run.path)}")
    jobs = [job for job in jobs if job.name not in kept]
    print(f"{len(jobs)} runs, {sum(job.steps for job in jobs):,} environment steps in all")
    limit = options.limit or math.inf
    runs, failures = run_all(jobs, options.out / "logs", options.full, limit)
    return report([*kept.values(), *runs], failures, options)


if __name__ == "__main__":
    program.start(main, "interrupted; with --full the next call goes on from there")
