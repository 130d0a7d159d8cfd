"""Reduces run directories to a committed record: what was run, on what, how fast, what it learned.

    python plots/record.py plots/results/NAME.json runs/RUN [runs/RUN ...] [--note "what to know"]

A record holds, per run, config.json and stages.json whole, every episodic return and, where the
run evaluated, every evaluation's mean return, each with its step. It prints the numbers that README
quotes: the mean return of the last 10 episodes (of as many rollouts, where a script logs the mean
of each) and the last evaluation.
"""

import argparse
import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[1]
LAST = 10  # episodes whose mean return stands for a run


def read_run(run_dir: Path) -> dict:
    """Config, stages and episodic returns [[step, return], ...] of a finished run."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()

    def series(tag: str) -> list:
        tags = events.Tags()["scalars"]
        return [[e.step, round(e.value, 2)] for e in events.Scalars(tag)] if tag in tags else []

    returns = series("charts/episodic_return")
    run = {
        name: json.loads((run_dir / f"{name}.json").read_text()) for name in ("config", "stages")
    }
    last = [value for _, value in returns[-LAST:]]
    return (
        {"run": run_dir.name, f"mean_return_last_{LAST}": sum(last) / len(last)}
        | run
        | {"episodic_returns": returns, "eval_returns": series("charts/eval_return")}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    runs = [read_run(run_dir) for run_dir in args.runs]
    args.record.parent.mkdir(parents=True, exist_ok=True)
    record = json.dumps({"note": args.note, "runs": runs}, indent=1) + "\n"
    args.record.write_text(record.replace(f"{ROOT}/", ""))  # no record names a machine's folders
    for run in runs:
        steps = run["episodic_returns"][-1][0]  # less than asked for where the run was interrupted
        said = f"{run['run']}: {run[f'mean_return_last_{LAST}']:,.0f} after {steps:,} steps"
        evaluated = [f"evaluation {value:,.1f}" for _, value in run["eval_returns"][-1:]]
        print(", ".join([said, *evaluated]))


if __name__ == "__main__":
    main()
