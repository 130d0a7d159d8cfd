"""Reduces run directories to a committed record: what was run, on what, how fast, what it learned.

    python plots/record.py plots/results/NAME.json runs/RUN [runs/RUN ...] [--note "what to know"]

A record holds, per run, config.json and stages.json whole, every episodic return and, where the
run evaluated, every evaluation's mean return, each with its step. What config.json does not say of
the machine is in machine.json, if a program of this folder has started the run; otherwise this
machine and commit are taken for those of the run, if it has as many cores and the same GPU. It
prints the numbers that README quotes: the mean return of the last 10 episodes (of as many rollouts,
where a script logs the mean of each) and the last evaluation.
"""

import argparse
import json
from pathlib import Path

import run_dirs

LAST = 10  # episodes whose mean return stands for a run


def read_run(run_dir: Path) -> dict:
    """Config, stages and episodic returns [[step, return], ...] of a finished run."""
    tags = "charts/episodic_return", "charts/eval_return"
    series = run_dirs.read_series(run_dir, tags)
    rows = {tag: zip(s.steps, s.values, strict=True) for tag, s in series.items()}
    returns, evaluations = (
        [[int(step), round(value, 2)] for step, value in rows.get(tag, ())] for tag in tags
    )
    here = run_dirs.this_machine() | {"load_average": None}  # what it was then, nobody knows
    config = run_dirs.read_config(run_dir)
    if here["gpu"] == config["gpu"] and here["cpu"]["cores"] == config["cpu"]["cores"]:
        config = run_dirs.read_config(run_dir, machine=here)
    last = [value for _, value in returns[-LAST:]]
    return {
        "run": run_dir.name,
        f"mean_return_last_{LAST}": sum(last) / len(last),
        "config": config,
        "stages": run_dirs.read_json(run_dir / "stages.json"),
        "episodic_returns": returns,
        "eval_returns": evaluations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    runs = [read_run(run_dir) for run_dir in args.runs]
    args.record.parent.mkdir(parents=True, exist_ok=True)
    record = json.dumps({"note": args.note, "runs": runs}, indent=1) + "\n"
    args.record.write_text(record.replace(f"{run_dirs.ROOT}/", ""))  # no folders of a machine
    for run in runs:
        steps = run["episodic_returns"][-1][0]  # less than asked for where the run was interrupted
        said = f"{run['run']}: {run[f'mean_return_last_{LAST}']:,.0f} after {steps:,} steps"
        evaluated = [f"evaluation {value:,.1f}" for _, value in run["eval_returns"][-1:]]
        print(", ".join([said, *evaluated]))


if __name__ == "__main__":
    main()
