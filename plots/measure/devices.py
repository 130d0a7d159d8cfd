"""Acting and learning at the same time or in turns, and on which devices.

    python plots/measure/devices.py                             PPO, 500,000 steps; an hour

PPO on HalfCheetah-v5: the synchronous scripts and the asynchronous ones, baseline and variant with
--compile (on a GPU --cudagraphs too). With a GPU, acting is on the CPU or on the GPU as the row
says.

    of first        median over the rounds of steps/s divided by the synchronous row of the same
                    kind in that round
    return          mean over the rounds, and range, of the mean of the last 10 episodes
    learner waits   percent of the time in which the learner waits for a rollout, median
    collector waits and the collector for weights
"""

import argparse
import statistics
import sys

import processes
import program
import rounds
import run_dirs

STEPS = 500_000
LAST = 10  # episodes whose mean is a run's return


def commands(gpus: int) -> dict[str, list[str]]:
    """{row: its command without seed, steps and name}.

    A row with something in brackets is compared with the row that has its name without them.
    """
    rows = {}
    for kind in ("baseline", "variant"):
        suffix = ""
        flags = []
        if kind == "variant":
            suffix = run_dirs.VARIANT
            flags.append("--compile")
            if gpus:
                flags.append("--cudagraphs")
        alone = [sys.executable, f"leanrl/ppo_continuous_action{suffix}.py", *flags]
        several = [sys.executable, f"leanrl/ppo_continuous_action_async{suffix}.py", *flags]
        rows[kind] = alone
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
    stem = f"devices-continuous-{number}-seed-{seed}"
    log = options.out / "logs" / f"{stem}.log"
    command = [*options.commands[row], "--seed", str(seed)]
    command += ["--total-timesteps", str(options.steps), "--exp-name", stem]  # no run of a table
    run = processes.run_and_read(command, log, progress, f"{row!r} round {seed}")
    result = processes.numbers(run, command)
    waits = {name: f"charts/{name}_waits_seconds" for name in ("learner", "collector")}
    returns = "charts/episodic_return"
    series = run_dirs.read_series(run.path, [returns, *waits.values()])
    if returns in series:
        result["return"] = statistics.fmean(series[returns].values[-LAST:])
    for name, tag in waits.items():
        if tag in series:
            begin = 2  # the rollout with which the stopwatch's window opens
            seconds = series[tag].seconds[begin:]
            waited = series[tag].values[begin:]
            share = None
            if len(seconds) > 1:
                share = float(waited[1:].sum() / (seconds[-1] - seconds[0]))
            result[f"{name}_waits"] = share
    return result


def summarize(results: list[dict], names: list[str]) -> list[dict]:
    references = {name: name.partition(" (")[0] for name in names}
    others = ("return", "learner_waits", "collector_waits")
    return rounds.summarize(results, "row", "of_first", references, others)


def cells(rows: list[dict]) -> list[list[str]]:
    def waits(name: str):
        return lambda row: f"{100 * row[name]['median']:.0f}%" if row[name] else "-"

    columns = {
        "of first": rounds.ratio("of_first"),
        "return": lambda row: rounds.middle(row["return"], "mean"),
        "return, min-max": lambda row: rounds.ends(row["return"], " to "),
        "learner waits": waits("learner_waits"),
        "collector waits": waits("collector_waits"),
    }
    return rounds.cells(rows, "row", columns)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, *rounds.OPTIONS)
    options = parser.parse_args(arguments)
    options.steps = options.steps or STEPS
    import torch  # here, so that --help is quick

    gpus = torch.cuda.device_count()
    options.commands = commands(gpus)
    names = list(options.commands)
    results, failures = rounds.take_turns(names, options, measure)
    rows = summarize(results, names)
    command = processes.call("devices.py", options, "rounds", "steps")
    record = {"command": command, "rows": rows, "rounds": results, "failures": failures}
    steps = f"HalfCheetah-v5, {options.steps:,} environment steps per run"
    above = ["Acting and learning on devices", steps]
    return rounds.report("devices_continuous", above, cells(rows), record, options)


if __name__ == "__main__":
    program.start(main)
