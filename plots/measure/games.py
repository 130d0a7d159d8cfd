"""EnvPool's Atari games alone, which bound what a script for them can make.

    python plots/measure/games.py

Steps/s of Breakout, with and without a pause before each step, which stands for a policy that acts:
EnvPool's threads fall asleep meanwhile. Two halves are two pools of half the games, of which one is
simulated during the other's pause.

Written to --out: games.md and .json.
"""

import time
from itertools import product

import envpool
import numpy as np
import processes
import program
import run_dirs
import tables

PAUSE = 0.9e-3  # seconds
GAMES = ((8, 8), (8, 16), (16, 16), (64, 16))  # and threads


def steps_per_second(games: int, threads: int, halves: int, pause: float, seconds: float) -> float:
    actions = np.zeros(games // halves, dtype=np.int64)
    pools = []
    for _ in range(halves):
        options = {"num_envs": len(actions), "num_threads": threads // halves, "seed": 1}
        pool = envpool.make_gymnasium("Breakout-v5", **options)
        pool.reset()
        pool.send(actions)
        pools.append(pool)
    steps = 0
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        for pool in pools:
            pool.recv()
            acted = time.perf_counter() + pause
            while time.perf_counter() < acted:  # awake, as a policy
                pass
            pool.send(actions)
        steps += games
    spent = time.perf_counter() - begin
    for pool in pools:
        pool.recv()
        pool.close()
    return steps / spent


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out")
    parser.add_argument("--seconds", type=float, default=3, help="of each row")
    options = parser.parse_args(arguments)
    rows = []
    for (games, threads), halves, pause in product(GAMES, (1, 2), (0, PAUSE)):
        row = {"games": games, "threads": threads, "pools": halves, "pause us": 1e6 * pause}
        row["steps/s"] = steps_per_second(games, threads, halves, pause, options.seconds)
        rows.append(row)
    record = {
        "schema": 1,
        "command": processes.call("games.py", options, "seconds"),
        "machine": run_dirs.measured_here(1, ["envpool"]),
        "rows": rows,
    }
    columns = {name: lambda row, name=name: f"{row[name]:,.0f}" for name in rows[0]}
    tables.write_report(
        options.out / "games", "EnvPool alone", tables.lay_out(rows, [], columns), record, labels=0
    )
    return 0


if __name__ == "__main__":
    program.start(main)
