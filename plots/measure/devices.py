"""Acting and learning at the same time or in turns, and on which devices; one process or several.

    python plots/measure/devices.py   PPO: 3 rounds of 500,000 steps; an hour
    python plots/measure/devices.py --rounds 1 --steps 65536    a look
    python plots/measure/devices.py --task atari   PPO for Atari: one process against several

Rounds in turns: every row once, each in a process of its own; round n with seed n. PPO on
HalfCheetah-v5: the synchronous scripts and the asynchronous ones, baseline and variant with
--compile (on a GPU --cudagraphs too). Without a GPU all is on the CPU; with one, acting is on the
CPU or on the GPU as the row says. Atari on Breakout-v5, the variant: the script of one process, and
torchrun with 1 and 2, on a machine with GPUs with as many as it has and 8 games can be shared by.

    steps/s         median over the rounds, and range, of the stopwatch's steady window
    of first        median over the rounds of steps/s divided by the synchronous (Atari: the
                    single process's) row of the same kind in that round
    return          mean over the rounds, and range, of the mean of the last 10 episodes
    learner waits   percent of the time in which the learner waits for a rollout, median
    collector waits and the collector for weights
    warm-up s       median seconds until that window, with a cold compiler cache or a warm one

On a GPU also how much memory a process takes on it that only says hello: what each further one
costs. Written to plots/out/: devices_TASK.md, .json and logs/. Exit status 1 if a run failed.
"""

import argparse
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import processes
import run_dirs
from run_dirs import ROOT, shown, spread

STEPS = {"continuous": 500_000, "atari": 16 * 8 * 128}
LAST = 10  # episodes whose mean is a run's return
HELLO = """
import sys, torch
torch.ones(1, device="cuda").item()
print("hello", flush=True)
sys.stdin.read()
"""


def commands(task: str, gpus: int) -> dict[str, list[str]]:
    """{row: its command without seed, steps and name}.

    A row with something in brackets is compared with the row that has its name without them.
    """
    speed = ["--compile", *["--cudagraphs"] * (gpus > 0)]
    python, torchrun = [sys.executable], [sys.executable, "-m", "torch.distributed.run"]
    if task == "atari":
        script = "leanrl/ppo_atari_envpool{}_torchcompile.py"
        several = script.format("_multigpu")
        rows = {"one script": [*python, script.format(""), *speed]}
        for count in (n for n in range(1, (gpus or 2) + 1) if 8 % n == 0):
            start = [*torchrun, "--standalone", "--nproc-per-node", str(count)]
            rows[f"one script (torchrun, processes: {count})"] = [*start, several, *speed]
        return rows
    rows, script = {}, "leanrl/ppo_continuous_action{}.py"
    for kind, suffix, flags in (("baseline", "", []), ("variant", run_dirs.VARIANT, speed)):
        several = [*python, script.format(f"_async{suffix}"), *flags]
        rows[kind] = [*python, script.format(suffix), *flags]
        rows[f"{kind} (asynchronous)"] = several
        if gpus:
            there = ["--collector-device", "cuda"]
            rows[f"{kind} (asynchronous, all on the GPU)"] = [*several, *there]
        if kind == "variant":
            rows["variant (two processes, in turns)"] = [*several, "--sync"]
    return rows


def measure(row: str, seed: int, options: argparse.Namespace, progress) -> dict:
    """One run -> its numbers; ValueError says what went wrong."""
    number = list(options.commands).index(row)
    stem = f"devices-{options.task}-{number}-seed-{seed}"
    log = options.out / "logs" / f"{stem}.log"
    command = [*options.commands[row], "--seed", str(seed)]
    command += ["--total-timesteps", str(options.steps), "--exp-name", stem]  # no run of a table
    run = processes.run_and_read(command, log, progress, f"{row!r} round {seed}")
    waits = {name: f"charts/{name}_waits_seconds" for name in ("learner", "collector")}
    series = run_dirs.read_series(run.path, ["charts/episodic_return", *waits.values()])
    result = {key: run.stages[key] for key in ("sps_steady", "warmup_seconds")}
    if "charts/episodic_return" in series:
        result["return"] = statistics.fmean(series["charts/episodic_return"].values[-LAST:])
    for name, tag in waits.items():
        if tag in series:
            seconds, waited = series[tag].seconds, series[tag].values
            begin = 2  # the rollout with which the stopwatch's window opens
            whole = seconds[-1] - seconds[begin] if len(seconds) > begin + 1 else None
            result[f"{name}_waits"] = float(waited[begin + 1 :].sum() / whole) if whole else None
    words = [word.replace(sys.executable, "python") for word in command]
    return result | {"command": shlex.join(words), "config": run.config}


def cost_of_a_process() -> int:
    """Bytes of the GPU's memory that a process takes which computes on one number."""
    import torch

    torch.ones(1, device="cuda").item()
    free, _ = torch.cuda.mem_get_info()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HELLO], **pipes, text=True) as process:
        if process.stdout.readline() != "hello\n":
            raise RuntimeError("another process cannot use the GPU")
        left, _ = torch.cuda.mem_get_info()
        process.stdin.close()
    return free - left


def summarize(rounds: list[dict], names: list[str]) -> list[dict]:
    """One dict per row from rounds {row: result}, in which a failed one is missing."""
    rows = []
    for name in names:
        first = name.partition(" (")[0]
        mine = [results[name] for results in rounds if name in results]
        if not mine:
            rows.append({"row": name, "skipped": "no finished run"})
            continue
        row = {"row": name, "sps_steady": spread([result["sps_steady"] for result in mine])}
        pairs = [(r[name], r[first]) for r in rounds if name in r and first in r]
        ratios = [one["sps_steady"] / other["sps_steady"] for one, other in pairs]
        row["of_first"] = statistics.median(ratios) if ratios else None
        for key in ("return", "learner_waits", "collector_waits", "warmup_seconds"):
            found = [result[key] for result in mine if result.get(key) is not None]
            row[key] = spread(found) if found else None
        rows.append(row)
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    table = [["row", "steps/s", "min-max", "of first", "return", "min-max"]]
    table[0] += ["learner waits", "collector waits", "warm-up s"]
    for row in rows:
        if "skipped" in row:
            table.append([row["row"], f"skipped: {row['skipped']}", *[""] * 7])
            continue
        steady, returns = row["sps_steady"], row["return"]
        line = [
            row["row"],
            f"{steady['median']:,.0f}",
            f"{steady['min']:,.0f}-{steady['max']:,.0f}",
        ]
        line.append(f"{row['of_first']:.2f}x" if row["of_first"] else "-")
        line.append(f"{returns['mean']:,.0f}" if returns else "-")
        line.append(f"{returns['min']:,.0f} to {returns['max']:,.0f}" if returns else "-")
        for name in ("learner", "collector"):
            waits = row[f"{name}_waits"]
            line.append(f"{100 * waits['median']:.0f}%" if waits else "-")
        table.append([*line, f"{row['warmup_seconds']['median']:.1f}"])
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=STEPS, default="continuous")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="environment steps per run")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out", help="folder of the report")
    options = parser.parse_args(arguments)
    options.steps = options.steps or STEPS[options.task]
    import torch  # here, so that --help is quick

    gpus = torch.cuda.device_count()
    options.commands = commands(options.task, gpus)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        rounds, failures = processes.take_turns(list(options.commands), options, measure)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130

    configs = [result["config"] for results in rounds for result in results.values()]
    if configs:
        hardware, rows = run_dirs.machine(configs), summarize(rounds, list(options.commands))
        command = f"python plots/measure/devices.py --task {options.task} "
        command += f"--rounds {options.rounds} --steps {options.steps}"
        env_id = configs[0]["args"]["env_id"]
        above = [f"Acting and learning on devices: {command}", *run_dirs.describe(hardware)]
        above.append(f"{env_id}, {options.steps:,} environment steps per run")
        record = {"schema": 1, "command": command, "machine": hardware, "rows": rows}
        record |= {"rounds": rounds, "failures": [text.splitlines()[0] for text in failures]}
        if gpus:
            record["cuda_process_bytes"] = cost_of_a_process()
            above.append(
                f"Each CUDA process: {record['cuda_process_bytes'] / 1e6:,.0f} MB and more"
            )
        below = [f"logs: {shown(options.out / 'logs')}/"]
        report = options.out / f"devices_{options.task}"
        run_dirs.write_report(report, above, cells(rows), below, record, labels=1)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
