"""The speed-up table: each algorithm as baseline, rewritten (eager), compiled and captured.

    python plots/speedup.py --quick                 SAC, two short runs per row: minutes
    python plots/speedup.py --full                  every script, 3 seeds, full length: days
    python plots/speedup.py --table-only runs/...   only the table, from runs that exist

Every run is a process of its own, one at a time, and the rows take turns (A B C, A B C), so that
the drift of a shared machine hits all alike; round n has seed n. All numbers come from config.json
and stages.json of the runs:

    steps/s         median over the runs, and range, of the steady environment steps per second
    speed-up        ratio of that median to the baseline's
    warm-up s       what steps/s leaves out: random exploration, compilation and capture, but not
                    the imports. `first` is the row's first run, for which the compiler's cache is
                    empty (--table-only: as the run found it), `best` the fastest
    all steps/s     median of all steps / all seconds

Written to plots/out/: speedup.md, speedup.json, and logs/ with what each run printed. Exit status 1
if a run failed; the others count nevertheless.
"""

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tqdm

ROOT = Path(__file__).resolve().parents[1]
VARIANT = "_torchcompile"
ROWS = {  # name -> flags of the variant; the baseline is another file
    "baseline": (),
    "eager": (),
    "compile": ("--compile",),
    "cudagraphs": ("--cudagraphs",),
    "compile+cudagraphs": ("--compile", "--cudagraphs"),
}
# what may differ between runs of one table: the rest of args are settings that must agree
FREE_ARGS = {"exp_name", "seed", "compile", "cudagraphs", "track", "wandb_project_name"}
FREE_ARGS |= {"wandb_entity"}


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
        return f"{self.script} {self.row} seed {self.seed}"


@dataclass
class Run:
    """A finished run: what its two files say."""

    path: Path
    config: dict
    stages: dict

    @property
    def script(self) -> str:
        return self.config["args"]["exp_name"].removesuffix(VARIANT)

    @property
    def row(self) -> str:
        args = self.config["args"]
        if not args["exp_name"].endswith(VARIANT):
            return "baseline"
        # without a device --cudagraphs has no effect
        graphs = args["cudagraphs"] and self.config["gpu"]
        return "+".join(["compile"] * args["compile"] + ["cudagraphs"] * bool(graphs)) or "eager"


def shown(path: Path) -> str:
    """`path` as seen from the repository, so that no record names a machine's folders."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def read_run(path: Path) -> Run:
    """The run in the directory `path`; ValueError says what is wrong with one that did not end."""
    try:
        config = json.loads((path / "config.json").read_text())
        stages = json.loads((path / "stages.json").read_text())
    except FileNotFoundError as missing:
        raise ValueError(
            f"has no {Path(missing.filename).name}: killed, or still running"
        ) from None
    steps = round(stages["sps_inclusive"] * stages["wall_seconds"])  # to within a rounding error
    wanted = config["args"]["total_timesteps"]
    if steps < 0.99 * wanted:
        raise ValueError(f"stopped after {steps} of {wanted} steps")
    if not stages["sps_steady"]:
        raise ValueError("ended before its warm-up did: no steady steps/s")
    return Run(path, config, stages)


def find_runs(paths: list[Path]) -> list[Path]:
    """The run directories among `paths` and directly below them, in the order they were made."""
    found = {
        config.parent
        for path in paths
        for config in (*path.glob("config.json"), *path.glob("*/config.json"))
    }
    return sorted(found, key=lambda path: (path.name.rpartition("__")[2].zfill(12), path.name))


def incomparable(runs: list[Run]) -> str | None:
    """Why `runs` do not belong into one table, or None if they do."""
    for run in runs:
        for other in runs:
            configs = run.config, other.config
            pairs = {key: [config.get(key) for config in configs] for key in ("gpu", "versions")}
            # how many threads to take is a script's own choice
            pairs["cpu"] = [config["cpu"] | {"threads": None} for config in configs]
            if run.script == other.script:
                one, another = (config["args"] for config in configs)
                names = one.keys() | another.keys()
                if (run.row == "baseline") != (other.row == "baseline"):
                    names = one.keys() & another.keys()  # the variant has flags of its own
                for key in names - FREE_ARGS:
                    pairs[key] = one.get(key), another.get(key)
            for key, (one, another) in sorted(pairs.items()):
                if one != another:
                    return f"{shown(run.path)} has {key} {one}, {shown(other.path)} {another}"
    return None


def spread(values: list[float]) -> dict:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


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
                baseline = steady["median"]
            warmups = [run.stages["warmup_seconds"] for run in mine]
            rows.append(
                {
                    "script": script,
                    "row": row,
                    "sps_steady": steady,
                    "speedup": steady["median"] / baseline if baseline else None,
                    "warmup_seconds": {"first": warmups[0], "best": min(warmups)},
                    "sps_inclusive": spread([run.stages["sps_inclusive"] for run in mine]),
                    "runs": [shown(run.path) for run in mine],
                    "commands": [run.config["command"] for run in mine],
                }
            )
    return rows


def machine(configs: list[dict]) -> dict:
    """Hardware, versions, commit and load of the runs with these config.json."""
    first, loads = configs[0], [config["load_average"][0] for config in configs]
    return {
        **{key: first[key] for key in ("cpu", "gpu", "gpu_driver", "python", "versions")},
        "git_commits": list(dict.fromkeys(config["git_commit"] for config in configs)),
        "load_average_1min": {"min": min(loads), "max": max(loads)},
    }


def describe(machine: dict) -> list[str]:
    """`machine` as lines for a reader."""
    cpu, gpu, load = machine["cpu"], machine["gpu"], machine["load_average_1min"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return [
        f"CPU: {cpu['model'] or 'unknown'}, {cpu['cores']} cores, {cpu['threads']} torch threads",
        f"GPU: {gpu}, driver {machine['gpu_driver']}" if gpu else "GPU: none",
        f"Python {machine['python']}, {versions}",
        f"Commit: {', '.join(commit or 'unknown' for commit in machine['git_commits'])}",
        f"Load average before the runs: {load['min']:.1f} to {load['max']:.1f}",
    ]


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
                f"{steady['median']:,.1f}",
                f"{steady['min']:,.1f}-{steady['max']:,.1f}",
                f"{row['speedup']:.2f}x" if row["speedup"] else "-",
                f"{warmup['first']:.1f}",
                f"{warmup['best']:.1f}",
                f"{row['sps_inclusive']['median']:,.1f}",
                str(len(row["runs"])),
            ]
        )
    return table


def as_text(table: list[list[str]], labels: int) -> str:
    """Aligned for a terminal, the first `labels` columns to the left.

    A cell followed by empty ones may run over into their columns.
    """
    full = [line for line in table if line[-1]]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    widths[:labels] = [max(len(line[i]) for line in table) for i in range(labels)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < labels else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def as_markdown(table: list[list[str]], labels: int) -> str:
    heading, *rest = table
    rule = ["---"] * labels + ["---:"] * (len(heading) - labels)
    return "\n".join("| " + " | ".join(line) + " |" for line in (heading, rule, *rest))


def write_report(
    stem: Path,
    above: list[str],
    table: list[list[str]],
    below: list[str],
    record: dict,
    labels: int = 2,
) -> None:
    """Prints the report and writes it to `stem`.md and, with all numbers, `stem`.json."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    markdown, record_file = stem.with_suffix(".md"), stem.with_suffix(".json")
    below = [*below, f"files: {shown(markdown)}, {shown(record_file)}"]
    print("\n".join(["", *above, "", as_text(table, labels), "", *below]))
    lists = ["\n".join(f"- {line}" for line in lines) for lines in (above, below)]
    markdown.write_text(f"{lists[0]}\n\n{as_markdown(table, labels)}\n\n{lists[1]}\n")
    record_file.write_text(json.dumps(record, indent=2) + "\n")


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


def run_logged(command: list[str], log: Path, progress, environment: dict | None = None) -> int:
    """Exit status of `command`, whose output goes to `log`; calls progress(steps) meanwhile.

    The process leads a group of its own. Whatever ends this function, an interrupt included, ends
    it: first as on Ctrl-C, so that the run closes its files, then, with its helpers, by force.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
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
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(timeout=0.5)
                progress(steps_done(log))
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


def run_directory(log: Path) -> Path:
    """Where the run that wrote `log` says that it left its files; ValueError if it does not."""
    found = re.findall(r"^run directory: (.+)$", log.read_text(errors="replace"), re.MULTILINE)
    if not found:
        raise ValueError("names no run directory")
    return ROOT / found[-1]


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
            status = run_logged(job.command, log, progress, environment)
            progress(job.steps)
            done += job.steps
            try:
                if status:
                    raise ValueError(f"ended with exit status {status}")
                runs.append(read_run(run_directory(log)))
            except ValueError as reason:
                failures.append(f"{job.name} {reason}, see {shown(log)}:\n{last_lines(log)}")
    return runs, failures


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


def total_timesteps(script: Path) -> int:
    """The script's own default: importing it for that would take seconds."""
    return int(re.search(r"total_timesteps: int = ([\d_]+)", script.read_text()).group(1))


def make_jobs(scripts: list[str], rows: list[str], rounds: int, flags: list[str]) -> list[Job]:
    """Round by round, so that the rows of a script take turns; `flags` go to every run."""
    jobs = []
    for seed in range(1, rounds + 1):
        for script in scripts:
            for row in rows:
                file = f"leanrl/{script}{'' if row == 'baseline' else VARIANT}.py"
                command = [sys.executable, file, "--seed", str(seed), *flags, *ROWS[row]]
                if "--total-timesteps" in flags:
                    steps = int(flags[flags.index("--total-timesteps") + 1])
                else:
                    steps = total_timesteps(ROOT / file)
                jobs.append(Job(script, row, seed, command, steps))
    return jobs


def has_cuda() -> bool:
    import torch  # here, because --table-only and the tests do not need it

    return torch.cuda.is_available()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--quick", action="store_true", help="SAC, short runs")
    what.add_argument("--full", action="store_true", help="every script at full length")
    what.add_argument("--table-only", nargs="+", type=Path, metavar="RUNS_DIR", help="run nothing")
    parser.add_argument("--rounds", type=int, help="runs per row (quick: 2, full: 3)")
    parser.add_argument("--steps", type=int, default=3000, help="of a quick run")
    parser.add_argument("--learning-starts", type=int, default=1000, help="of a quick run")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out", help="folder of the report")
    options = parser.parse_args(arguments)

    failures = []
    if options.table_only:
        protocol, runs = "table only", []
        call = shlex.join(["--table-only", *map(shown, options.table_only)])
        for path in find_runs(options.table_only):
            try:
                runs.append(read_run(path))
            except ValueError as reason:
                failures.append(f"{shown(path)} {reason}")
        if not runs and not failures:
            parser.error(f"no runs in {', '.join(map(str, options.table_only))}")
        if reason := incomparable(runs):
            parser.error(f"these runs make no table: {reason}; name those that belong together")
    else:
        cuda = has_cuda()
        rows = [row for row, flags in ROWS.items() if cuda or "--cudagraphs" not in flags]
        for row in ROWS:
            if row not in rows:
                print(f"skipped: {row}, no CUDA device")
        if options.quick:
            protocol, scripts = "quick", ["sac_continuous_action"]
            flags = ["--learning-starts", str(options.learning_starts)]
            flags += ["--total-timesteps", str(options.steps)]
            call = f"--quick --steps {options.steps} --learning-starts {options.learning_starts}"
        else:
            variants = sorted((ROOT / "leanrl").glob(f"*{VARIANT}.py"))
            protocol, flags, call = "full", [], "--full"
            scripts = [path.stem.removesuffix(VARIANT) for path in variants]
        rounds = options.rounds or (2 if options.quick else 3)
        call += f" --rounds {rounds}"
        jobs = make_jobs(scripts, rows, rounds, flags)
        print(f"{len(jobs)} runs, {sum(job.steps for job in jobs):,} environment steps in all")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            runs, failures = run_all(jobs, options.out / "logs")
        except KeyboardInterrupt:
            print("\ninterrupted; the runs so far are in runs/", file=sys.stderr)
            return 130

    if runs:
        hardware, table = machine([run.config for run in runs]), summarize(runs)
        command = f"python plots/speedup.py {call}"
        record = {"schema": 1, "protocol": protocol, "command": command}
        record |= {"machine": hardware, "rows": table, "failures": failures}
        settings = {run.script: run.config["args"] for run in runs}
        record["settings"] = {
            script: {key: value for key, value in args.items() if key not in FREE_ARGS}
            for script, args in settings.items()
        }
        above = [f"Speed-up table ({protocol}): {command}", *describe(hardware)]
        for script, args in record["settings"].items():
            length = f"{args['total_timesteps']:,} environment steps per run"
            above.append(f"{script}: {args['env_id']}, {length}")
        below = [f"runs: {', '.join(sorted({shown(run.path.parent) for run in runs}))}/"]
        if protocol != "table only":
            below.append(f"logs: {shown(options.out / 'logs')}/")
        write_report(options.out / "speedup", above, cells(table), below, record)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
