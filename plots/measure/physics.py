"""How fast worlds step without a policy: ours, and EnvPool's.

    pip install -r requirements/envpool.txt
    python plots/measure/physics.py                      minutes; files in plots/out/

Gymnasium's tasks with random actions, by one core and by all. The arms of a row take turns, a block
of 64 steps of all worlds each, and ratios are of blocks that follow one another. An arm begins all
its episodes anew before each block.

    physics         MuJoCoWorlds without judging: actions in, fields of MjData out
    whole step      MuJoCoWorlds as a script with --compile steps it: observations, rewards, new
                    episodes
    by Euler        the same with --euler-timestep, where the model has RK4
    of the model    by Euler against whole step, median over the blocks
    of EnvPool      whole step against whole step, in the same way
"""

import os
import statistics
import time

import gymnasium as gym
import numpy as np
import processes
import program
import rounds
import run_dirs
import tables
import torch
from tables import spread

WORLDS = {  # per task, the numbers of worlds that are measured
    "HalfCheetah-v5": (64, 1024),
    "Hopper-v5": (64,),
    "Walker2d-v5": (64,),
    "Ant-v5": (64,),
    "Humanoid-v5": (64,),
}
EULER_TIMESTEP = {  # s, that a robot bears; HalfCheetah's model has Euler's anyway
    "Hopper-v5": 0.004,
    "Walker2d-v5": 0.002,
    "Ant-v5": 0.005,
    "Humanoid-v5": 0.005,
}
BLOCKS = 15  # that count, of each arm
BLOCK = 64  # steps of a block: a robot that has fallen takes longer, so as many for all


def make_ours(env_id: str, num_worlds: int, threads: int):
    """Arms, (begin, step) each: the physics, and whole steps as compiled; and their actions."""
    name = f"mujoco_worlds:worlds/{env_id}"
    settings = {"num_envs": num_worlds, "physics": "c", "num_threads": threads}
    bare = gym.make_vec(name, **settings)
    whole = gym.make_vec(name, **settings)
    whole.compile()

    def simulate(actions):
        bare.state.actions.copy_(actions)
        bare.physics.step()

    arms = {}
    arms["physics"] = (lambda: bare.reset(seed=1), simulate)
    if env_id in EULER_TIMESTEP:
        by_euler = gym.make_vec(name, euler_timestep=EULER_TIMESTEP[env_id], **settings)
        by_euler.compile()
        arms["by Euler"] = (lambda: by_euler.reset(seed=1), by_euler.step)
    arms["whole step"] = (lambda: whole.reset(seed=1), whole.step)
    return arms, whole.single_action_space


def make_envpool(env_id: str, num_worlds: int, threads: int):
    import envpool

    pool = envpool.make_gymnasium(env_id, num_envs=num_worlds, num_threads=threads)
    return pool.reset, lambda actions: pool.step(actions.double().numpy())


def measure_row(arms: dict, num_worlds: int, space) -> dict:
    """Steps/s of each block, {arm: [...]}; the first block, which compiles, does not count."""
    generator = np.random.default_rng(1)
    shape = BLOCK, num_worlds, *space.shape
    speeds = {name: [] for name in arms}
    for block in range(BLOCKS + 1):
        drawn = generator.uniform(space.low, space.high, shape)
        actions = list(torch.tensor(drawn).float())
        for name, (begin, step) in arms.items():
            begin()
            start = time.perf_counter()
            for action in actions:
                step(action)
            seconds = time.perf_counter() - start
            if block > 0:
                speeds[name].append(BLOCK * num_worlds / seconds)
    return speeds


def summarize(row: dict, speeds: dict) -> dict:
    row["steps_per_second"] = {name: spread(found) for name, found in speeds.items()}
    for name, one, other in (
        ("of_model", "by Euler", "whole step"),
        ("of_envpool", "whole step", "EnvPool"),
    ):
        if speeds.keys() >= {one, other}:
            pairs = zip(speeds[one], speeds[other], strict=True)
            row[name] = statistics.median(mine / theirs for mine, theirs in pairs)
    row["blocks"] = speeds
    return row


def cells(rows: list[dict]) -> list[list[str]]:
    def speed(arm: str):
        return lambda row: rounds.middle(row["steps_per_second"].get(arm))

    def ratio(name: str):
        return lambda row: f"{row[name]:.2f}x" if name in row else "-"

    columns = {
        "worlds": lambda row: f"{row['worlds']:,}",
        "cores": lambda row: str(row["cores"]),
        "physics": speed("physics"),
        "by Euler": speed("by Euler"),
        "whole step": speed("whole step"),
        "of the model": ratio("of_model"),
        "EnvPool": speed("EnvPool"),
        "of EnvPool": ratio("of_envpool"),
    }
    return tables.lay_out(rows, ["task"], columns)


def main(arguments: list[str] | None = None) -> int:
    options = program.make_parser(__doc__, "--out").parse_args(arguments)
    torch.set_num_threads(1)  # as in the script's loop
    machine = run_dirs.measured_here(threads=1, packages=["mujoco", "envpool"])
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    failures = []
    for task, numbers in WORLDS.items():
        for num_worlds in numbers:
            for count in sorted({1, len(cores)}):
                os.sched_setaffinity(0, cores[:count])
                torch._dynamo.reset()
                arms, space = make_ours(task, num_worlds, count)
                try:
                    arms["EnvPool"] = make_envpool(task, num_worlds, count)
                except ImportError:
                    failures.append("EnvPool: pip install -r requirements/envpool.txt")
                speeds = measure_row(arms, num_worlds, space)
                row = {"task": task, "worlds": num_worlds, "cores": count}
                rows.append(summarize(row, speeds))
                os.sched_setaffinity(0, cores)
    command = processes.call("physics.py", options)
    record = {"schema": 1, "command": command, "machine": machine, "rows": rows}
    title = "Worlds without a policy"
    tables.write_report(options.out / "physics", title, cells(rows), record, labels=1)
    return processes.say_failures(sorted(set(failures)))


if __name__ == "__main__":
    program.start(main)
