"""How fast worlds step without a policy: ours, EnvPool's, and those of an earlier commit.

    pip install -r requirements/envpool.txt
    python plots/measure/physics.py                      minutes; files in plots/out/
    python plots/measure/physics.py --earlier CHECKOUT   also physics of another clone of this one

Gymnasium's tasks with random actions, by one core and by all. The arms of a row take turns, a block
of steps each, and ratios are of blocks that follow one another, so that the drift of a shared
machine hits all alike. An arm begins all its episodes anew before each block.

    physics         MuJoCoEnvs without judging: actions in, fields of MjData out
    whole step      MuJoCoEnvs as a script with --compile steps it: observations, rewards, new
                    episodes
    EnvPool         its whole step
    earlier         the physics of the other clone, by all cores

Ratios are of the physics alone. Written to --out: physics.md and physics.json. Exit status 1 if an
arm could not be made.
"""

import importlib.util
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import processes
import run_dirs
import torch
from run_dirs import short, spread

SCRIPT = Path("leanrl/ppo_mujoco_gpu_torchcompile.py")
WORLDS = {  # per task, the numbers of worlds that are measured
    "HalfCheetah-v5": (64, 1024),
    "Hopper-v5": (64,),
    "Walker2d-v5": (64,),
    "Ant-v5": (64,),
    "Humanoid-v5": (64,),
}
BLOCK = 4_000  # steps of a block, over all worlds


def load(checkout: Path):
    """The variant of PPO on worlds as a module; ValueError if there is none."""
    path = checkout / SCRIPT
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    name = f"script_of_{abs(hash(checkout))}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def make_ours(module, env_id: str, num_worlds: int):
    """Two arms, (begin, step) each: the physics, and whole steps as compiled."""
    cpu = torch.device("cpu")
    bare = module.MuJoCoEnvs(env_id, num_worlds, cpu, "c")
    whole = module.MuJoCoEnvs(env_id, num_worlds, cpu, "c")
    module.compile_envs(whole)
    arms = {}
    arms["physics"] = (lambda: bare.reset(seed=1), bare.physics.step)
    arms["whole step"] = (lambda: whole.reset(seed=1), whole.step)
    return arms


def make_earlier(module, env_id: str, num_worlds: int):
    envs = module.MuJoCoEnvs(env_id, num_worlds, torch.device("cpu"), "c")
    return lambda: envs.reset(seed=1), envs.physics.step


def make_envpool(env_id: str, num_worlds: int, threads: int):
    import envpool

    pool = envpool.make_gymnasium(env_id, num_envs=num_worlds, num_threads=threads)
    return pool.reset, lambda actions: pool.step(actions.double().numpy())


def measure_row(arms: dict, num_worlds: int, space, blocks: int) -> dict:
    """Steps/s of each block, {arm: [...]}; the first block, which compiles, does not count."""
    steps = max(BLOCK // num_worlds, 4)
    generator = np.random.default_rng(1)
    shape = steps, num_worlds, *space.shape
    speeds = {name: [] for name in arms}
    for block in range(blocks + 1):
        drawn = generator.uniform(space.low, space.high, shape)
        actions = list(torch.tensor(drawn).float())
        for name, (begin, step) in arms.items():
            begin()
            start = time.perf_counter()
            for action in actions:
                step(action)
            seconds = time.perf_counter() - start
            if block > 0:
                speeds[name].append(steps * num_worlds / seconds)
    return speeds


def summarize(row: dict, speeds: dict) -> dict:
    row["steps_per_second"] = {name: spread(found) for name, found in speeds.items()}
    row["ratio"] = {}
    for name, found in speeds.items():
        pairs = zip(speeds["physics"], found, strict=True)
        row["ratio"][name] = statistics.median(ours / theirs for ours, theirs in pairs)
    row["blocks"] = speeds
    return row


def cells(rows: list[dict]) -> list[list[str]]:
    names = ["physics", "whole step", "EnvPool", "earlier"]
    ratios = ["EnvPool", "earlier"]
    table = [["task", "worlds", "cores", *names, *[f"of {name}" for name in ratios]]]
    for row in rows:
        line = [row["task"], f"{row['worlds']:,}", str(row["cores"])]
        for name in names:
            found = row["steps_per_second"].get(name)
            line.append(short(found["median"]) if found else "-")
        for name in ratios:
            found = row["ratio"].get(name)
            line.append(f"{found:.2f}x" if found else "-")
        table.append(line)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = run_dirs.make_parser(__doc__, "--out")
    parser.add_argument("--blocks", type=run_dirs.few, default=15, help="that count, of each arm")
    parser.add_argument("--earlier", type=run_dirs.real, help="another clone, at another commit")
    parser.add_argument("--tasks", nargs="+", choices=WORLDS, default=list(WORLDS))
    options = parser.parse_args(arguments)
    earlier = None
    if options.earlier:
        try:
            earlier = load(options.earlier)
        except ValueError as reason:
            parser.error(f"--earlier: {reason}")
    ours = load(run_dirs.ROOT)
    torch.set_num_threads(1)  # as in the script's loop
    machine = run_dirs.measured_here(threads=1, packages=["mujoco", "envpool"])
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    failures = []
    for task in options.tasks:
        for num_worlds in WORLDS[task]:
            for count in sorted({1, len(cores)}):
                os.sched_setaffinity(0, cores[:count])
                torch._dynamo.reset()
                arms = make_ours(ours, task, num_worlds)
                space = ours.MuJoCoEnvs(task, 1, torch.device("cpu"), "c").single_action_space
                try:
                    arms["EnvPool"] = make_envpool(task, num_worlds, count)
                except ImportError:
                    failures.append("EnvPool: pip install -r requirements/envpool.txt")
                if earlier and count == len(cores):
                    arms["earlier"] = make_earlier(earlier, task, num_worlds)
                speeds = measure_row(arms, num_worlds, space, options.blocks)
                row = {"task": task, "worlds": num_worlds, "cores": count}
                rows.append(summarize(row, speeds))
                os.sched_setaffinity(0, cores)
    command = processes.call("physics.py", options, "blocks")
    if earlier:
        command += f" --earlier CHECKOUT-OF-{commit_of(options.earlier)}"
    above = [f"Worlds without a policy: {command}", *run_dirs.describe(machine)]
    record = {"schema": 1, "command": command, "machine": machine, "rows": rows}
    run_dirs.write_report(options.out / "physics", above, cells(rows), [], record, labels=1)
    return processes.say_failures(sorted(set(failures)))


if __name__ == "__main__":
    processes.start(main)
