"""Meta's LeanRL on this GPU: what its own bars say of its speed.

    python plots/measure/metas_leanrl.py PYTHON FOLDER

FOLDER is its checkout, PYTHON an interpreter with what it needs (at 8dbb633: tensordict 0.6.2,
torchrl 0.6, gymnasium 0.29, numpy below 2.5). Each script runs twice for so many seconds, compiled
and captured; steps/s are the median of those that its bar shows in the last half of that time.

Written to --out: metas_leanrl.md and .json, and logs/.
"""

import argparse
import re
import statistics
from pathlib import Path

import processes
import program
import run_dirs
import tables

FLAGS = {
    "sac_continuous_action": ["--learning-starts", "500"],
    "td3_continuous_action": ["--learning-starts", "500"],
    "ppo_continuous_action": [],
    "ppo_atari_envpool": [],
}


def measure(script: str, seed: int, options: argparse.Namespace) -> dict:
    """A row; it says why, if the bar has shown no speed."""
    path = Path(options.folder, "leanrl", f"{script}_torchcompile.py").absolute()
    command = [options.python, str(path), "--compile", "--cudagraphs", "--seed", str(seed)]
    command += [*FLAGS[script], "--total-timesteps", "10000000"]
    log = options.out / f"logs/leanrl-{script}-{seed}.log"
    shown = []  # speeds, as the bar changes

    def look(log: Path) -> None:
        found = re.findall(r"([\d.]+) sps", log.read_text(errors="replace")[-2000:])
        shown.extend(map(float, found[-1:]))

    processes.run_logged(command, log, look, {"WANDB_MODE": "offline"}, limit=options.seconds)
    row = {"script": script, "seed": seed}
    if not shown:
        return row | {"skipped": processes.last_lines(log, 1).strip() or "its bar shows no speed"}
    return row | {"sps_steady": statistics.median(shown[len(shown) // 2 :])}


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out")
    parser.add_argument("python")
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=32, help="of each run")
    options = parser.parse_args(arguments)
    rows = [measure(script, seed, options) for seed in (1, 2) for script in FLAGS]
    record = {
        "schema": 1,
        "command": "python plots/measure/metas_leanrl.py PYTHON FOLDER",
        "machine": run_dirs.measured_here(1),
        "rows": rows,
    }
    columns = {
        "steps/s": lambda row: tables.short(row["sps_steady"]),
        "seed": lambda row: str(row["seed"]),
    }
    found = tables.lay_out(rows, ["script"], columns)
    tables.write_report(options.out / "metas_leanrl", "Meta's LeanRL", found, record)
    return 0


if __name__ == "__main__":
    program.start(main)
