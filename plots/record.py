"""Reduces run directories to a committed record: what was run, on what, how fast, what it learned.

    python plots/record.py plots/results/NAME.json runs/RUN [runs/RUN ...] [--note "what to know"]

A record holds, per run, config.json and stages.json whole, every episodic return and evaluation
with its step, and the mean of the last 10 returns (of episodes, or of rollouts where a script logs
the mean of each). What config.json does not say of the machine is in machine.json, or else
what this machine says of itself, if it has as many cores and the same GPU.
"""

import json
from pathlib import Path

import run_dirs


def read_run(run_dir: Path) -> dict:
    """Config, stages and episodic returns [[step, return], ...] of a finished run."""
    rows: dict = {"charts/episodic_return": [], "charts/eval_return": []}
    for tag, series in run_dirs.read_series(run_dir, list(rows)).items():
        for step, value in zip(series.steps, series.values, strict=True):
            rows[tag].append([int(step), round(value, 2)])
    returns, evaluations = rows.values()
    if not returns:
        raise SystemExit(f"error: {run_dirs.shown(run_dir)} has logged no episodic return")
    here = run_dirs.this_machine() | {"load_average": None}  # what it was then, nobody knows
    config = run_dirs.read_config(run_dir)
    if here["gpu"] == config["gpu"] and here["cpu"]["cores"] == config["cpu"]["cores"]:
        config = run_dirs.read_config(run_dir, machine=here)
    return {
        "run": run_dir.name,
        "mean_return_last_10": sum(value for _, value in returns[-10:]) / len(returns[-10:]),
        "config": config,
        "stages": run_dirs.read_json(run_dir / "stages.json"),
        "episodic_returns": returns,
        "eval_returns": evaluations,
    }


def main() -> None:
    parser = run_dirs.make_parser(__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    runs = [read_run(run_dir) for run_dir in args.runs]
    record = json.dumps({"note": args.note, "runs": runs}, indent=1) + "\n"
    args.record.write_text(record.replace(f"{run_dirs.ROOT}/", ""))  # no folders of a machine
    for run in runs:
        print(f"{run['run']}: mean of the last 10 returns {run['mean_return_last_10']:,.1f}")


if __name__ == "__main__":
    main()
