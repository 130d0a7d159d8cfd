"""Reduces run directories to a committed record: what was run, on what, how fast, what it learned.

    python plots/record.py plots/results/NAME.json runs/RUN [runs/RUN ...] [--note "what to know"]

A record holds, per run, config.json and stages.json whole (of a resumed run those of its first
part), every episodic return and evaluation as [step, return, seconds since the run was set up], and
the mean of the last 10 returns. What config.json does not say of the machine is in machine.json, or
else what this machine says of itself, if it has the same GPU, or none, and the same torch.
"""

import json
import statistics
import sys
from pathlib import Path

import program
import run_dirs
import tables

RETURN = "charts/episodic_return"


def rows_of(series: run_dirs.Series | None) -> list[list]:
    if series is None:
        return []
    rows = zip(series.steps, series.values, series.seconds, strict=True)
    return [[int(step), float(f"{value:.6g}"), round(seconds, 2)] for step, value, seconds in rows]


def record_of(run_dir: Path) -> dict:
    """Config, stages and returns of a run; ValueError says what it lacks."""
    run = run_dirs.read_part(run_dir, 0)
    if not run.stages:
        raise ValueError(run.missing)
    if run.missing:
        print(f"interrupted: {run_dirs.shown(run_dir)} {run.missing}", file=sys.stderr)
    series = run.series(list(run_dirs.RECORDED))
    if RETURN not in series:
        raise ValueError("has logged no episodic return")
    here = run_dirs.this_machine()
    here |= {"load_average": None, "git_commit": None}  # what they were then, nobody knows
    config = run.config
    if not run_dirs.differences(config, here):
        config = run_dirs.read_config(run_dir, machine=here)
    record = {
        "run": run_dir.name,
        "mean_return_last_10": statistics.fmean(series[RETURN].values[-10:]),
        "config": config,
        "stages": run.stages,
    }
    for metric, name in run_dirs.RECORDED.items():
        record[name] = rows_of(series.get(metric))
    return record


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("record", type=program.stem)
    parser.add_argument("runs", **program.OPTIONS["runs"])
    parser.add_argument("--note", default="")
    args = parser.parse_args(arguments)
    runs = []
    for run_dir in dict.fromkeys(args.runs):
        try:
            runs.append(record_of(run_dir))
        except ValueError as problem:
            raise SystemExit(f"error: {run_dirs.shown(run_dir)} {problem}") from None
    record = json.dumps({"note": args.note, "runs": runs}, ensure_ascii=False)
    record = record.replace(f"{run_dirs.ROOT}/", "")  # no folders of a machine
    tables.write_json(args.record, json.loads(record))
    for run in runs:
        print(f"{run['run']}: mean of the last 10 returns {run['mean_return_last_10']:,.5g}")
    return 0


if __name__ == "__main__":
    program.start(main)
