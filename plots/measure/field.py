r"""The field benchmark: how fast an algorithm is here and in other libraries, on the same machine.

    bash run.sh field                               makes .venv-field first, then calls this
    bash run.sh field --algorithm ppo --rounds 3 --cores 2

Stable-Baselines3 (PyTorch) and SBX (JAX) against our baseline, the variant eager and the variant
with --compile: HalfCheetah-v5, the settings of `ALGORITHMS`, all else each library's default. SAC
and TD3 make an update per step; only our PPO normalizes. PPO on MuJoCo's worlds: ours on 64, the
library on one (ppo_mujoco), or on 64 as well (ppo_mujoco_64). PPO with an LSTM: SB3-Contrib's, 16
environments. PPO for Atari: Breakout, 8 games (ppo_atari) or 64 (ppo_atari_64), ours on EnvPool.
PQN for Atari: against CleanRL's pqn_atari_envpool.py, which is not part of this project and wants
old packages:

    pip install --target OLD --no-deps gym==0.23.1 gym_notices cloudpickle envpool==0.8.4
    python plots/measure/field.py --algorithm pqn_atari \
        --peer "env PYTHONPATH=OLD python cleanrl/pqn_atari_envpool.py"

All are kept on the same --cores (1 by default) and have as many of torch's threads; JAX and EnvPool
take what they find.

    steps/s         after the warm-up: for ours the stopwatch's steady window, for the others from
                    1,000 steps after learning starts, for all in PPO from the fourth rollout on
    of OTHER        median over the rounds of steps/s divided by the first row's in the same round
    warm-up s       from the program's own start, imports done. It has 1,000 steps with updates for
                    the others and a hundred for ours (not in PPO)
"""

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import processes
import program
import rounds
import run_dirs

PEER = "CleanRL"
LIBRARIES = {"Stable-Baselines3": "stable_baselines3", "SBX": "sbx", "SB3-Contrib": "sb3_contrib"}
SB3 = ("Stable-Baselines3",)
WORLDS = {
    "--env-id": "worlds/HalfCheetah-v5",
    "--total-timesteps": 30 * 64 * 128,  # 30 rollouts of 128 steps
}
OURS = {  # name -> what follows the script's name
    "LeanRL baseline": [".py"],
    "LeanRL eager": ["_torchcompile.py"],
    "LeanRL compile": ["_torchcompile.py", "--compile"],
}
CHANNELS_LAST = ["_torchcompile.py", "--compile", "--channels-last"]


@dataclass
class Algorithm:
    """What all entrants are told, in their own words, and where the libraries' window starts."""

    theirs: dict
    ours: dict
    steps: int
    steady_after: int  # steps, in the libraries; JAX has long compiled by then
    script: str  # in leanrl/, without what makes it the baseline or the variant
    env_id: str = "HalfCheetah-v5"
    libraries: tuple = ("Stable-Baselines3", "SBX")
    rows: dict = field(default_factory=lambda: OURS)
    num_envs: int = 1  # in the libraries

    @property
    def entrants(self) -> list[str]:
        return [*self.libraries, *self.rows]


OFF_POLICY = Algorithm(
    theirs={"learning_starts": 500, "batch_size": 256, "policy_kwargs": {"net_arch": [256, 256]}},
    ours={"--learning-starts": 500, "--batch-size": 256},
    steps=3000,
    steady_after=1500,
    script="sac_continuous_action",
)
PPO = Algorithm(
    theirs={"policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}},
    ours={},
    steps=14 * 2048,
    steady_after=3 * 2048,
    script="ppo_continuous_action",
)
ATARI = Algorithm(
    theirs={
        "learning_rate": 2.5e-4,
        "n_steps": 128,
        "batch_size": 256,
        "n_epochs": 4,
        "clip_range": 0.1,
        "ent_coef": 0.01,
    },
    ours={},
    steps=11 * 1024,
    steady_after=3 * 1024,
    script="ppo_atari_envpool",
    env_id="Breakout-v5",
    libraries=SB3,
    num_envs=8,
    rows=OURS | {"LeanRL compile, channels last": CHANNELS_LAST},
)
LSTM = replace(
    PPO,
    theirs={
        "n_steps": 64,
        "batch_size": 256,
        "policy_kwargs": {"lstm_hidden_size": 64, "net_arch": [64]},
    },
    steps=20 * 1024,
    steady_after=3 * 1024,
    script="ppo_lstm",
    libraries=("SB3-Contrib",),
    num_envs=16,
)
ON_WORLDS = replace(PPO, script="ppo_mujoco_worlds", ours=WORLDS, libraries=SB3)
ALGORITHMS = {
    "sac": OFF_POLICY,
    "td3": replace(OFF_POLICY, script="td3_continuous_action"),
    "ppo": PPO,
    "ppo_lstm": LSTM,
    "ppo_mujoco": ON_WORLDS,
    "ppo_mujoco_64": replace(
        ON_WORLDS,
        theirs=PPO.theirs | {"n_steps": 128, "batch_size": 512, "n_epochs": 4},
        steps=14 * 8192,
        steady_after=3 * 8192,
        num_envs=64,
    ),
    "ppo_atari": ATARI,
    "ppo_atari_64": replace(
        ATARI,
        theirs=ATARI.theirs | {"n_steps": 32},
        ours={"--num-envs": 64, "--num-steps": 32, "--num-minibatches": 8},
        steps=7 * 2048,
        steady_after=3 * 2048,
        num_envs=64,
        rows=ATARI.rows | {"LeanRL compile, --bf16": [*CHANNELS_LAST, "--bf16"]},
    ),
    "pqn_atari": replace(
        ATARI,
        script="pqn_atari_envpool",
        steps=9 * 1024,
        libraries=(PEER,),
        rows={name: row for name, row in ATARI.rows.items() if name != "LeanRL eager"},
    ),
}
PACKAGES = (
    "stable-baselines3",
    "sb3-contrib",
    "sbx-rl",
    "torch",
    "jax",
    "gymnasium",
    "mujoco",
    "ale-py",
    "numpy",
)


def work(options: argparse.Namespace) -> None:
    """The worker, in the field's python: trains and prints what it measured as its last line."""
    import importlib

    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    library = options.worker
    algorithm = options.algorithm
    steps = options.steps
    seed = options.seed
    settings = ALGORITHMS[algorithm]
    if library == "sbx":
        import jax

        device = str(jax.devices()[0])
    else:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    class Clock(BaseCallback):
        start = None

        def _on_rollout_start(self) -> None:  # all rollouts before have been learned from
            if self.start is None and self.num_timesteps >= settings.steady_after:
                self.first = self.num_timesteps
                self.start = time.perf_counter()

        def _on_step(self) -> bool:
            if self.num_timesteps % 100 < self.training_env.num_envs:  # for the parent's bar
                print(f"{self.num_timesteps}/{steps} [", file=sys.stderr, flush=True)
            return True

    torch.set_num_threads(options.cores)
    born = time.perf_counter()
    clock = Clock()
    recurrent = settings.script == LSTM.script
    name = "RecurrentPPO" if recurrent else algorithm.partition("_")[0].upper()
    make = getattr(importlib.import_module(library), name)
    if settings.script == ATARI.script:
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        env = VecFrameStack(
            make_atari_env("BreakoutNoFrameskip-v4", settings.num_envs, seed=seed), 4
        )
        policy = "CnnPolicy"
    else:
        env = make_vec_env(settings.env_id, settings.num_envs)
        policy = "MlpLstmPolicy" if recurrent else "MlpPolicy"
    agent = make(policy, env, seed=seed, **settings.theirs).learn(steps, callback=clock)
    seconds = time.perf_counter() - clock.start
    result = {
        "sps_steady": (agent.num_timesteps - clock.first) / seconds,
        "warmup_seconds": clock.start - born,
        "device": device,
        "torch_threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "versions": run_dirs.versions(PACKAGES),
    }
    print(json.dumps(result))


def run_library(command: list[str], log: Path, progress, what: str) -> dict:
    """A worker in the field's python -> what it printed last; ValueError says what went wrong.

    The command is `taskset` and its two words, then the worker's.
    """
    status = processes.run_logged(command, log, progress)
    result = processes.read_log(
        status, log, what, lambda log: json.loads(log.read_text().rstrip().rpartition("\n")[2])
    )
    return {"command": shlex.join([*command[:3], "python", *command[4:]]), **result}


def run_peer(
    command: list[str], log: Path, progress, what: str, steady_after: int, threads: int = 1
) -> dict:
    """A script with CleanRL's flags -> its speed, by its TensorBoard files, a row per rollout."""
    runs = run_dirs.ROOT / "runs"
    before = set(runs.glob("*"))
    environment = {"OMP_NUM_THREADS": str(threads)}  # it has no flag for that
    status = processes.run_logged(command, log, progress, environment)

    def read(log: Path) -> dict:
        for path in set(runs.glob("*")) - before:
            rows = run_dirs.read_metric(path, run_dirs.SPEED)
            late = rows.steps >= steady_after
            steps = np.ptp(rows.steps[late])
            seconds = np.ptp(rows.seconds[late])
            return {"sps_steady": steps / seconds, "warmup_seconds": rows.seconds[late][0]}
        raise ValueError("has made no run directory")

    result = processes.read_log(status, log, what, read)
    script = next(i for i, word in enumerate(command) if word.endswith(".py"))
    said = ["python", Path(command[script]).name, *command[script + 1 :]]  # no folders of a machine
    return {"command": shlex.join(said), **result}


def measure(entrant: str, seed: int, options: argparse.Namespace, progress) -> dict:
    """One run of `entrant` -> its numbers; ValueError says what went wrong."""
    settings = ALGORITHMS[options.algorithm]
    what = f"{entrant} round {seed}"
    name = f"field-{options.algorithm}-{entrant.replace(' ', '-')}-seed-{seed}.log"
    log = options.out / "logs" / name
    if entrant in LIBRARIES:
        flags = {"--worker": LIBRARIES[entrant], "--algorithm": options.algorithm}
        flags |= {"--steps": options.steps, "--seed": seed, "--cores": options.cores}
        command = [options.field_python, "plots/measure/field.py"]
    else:
        flags = {"--env-id": settings.env_id, "--seed": seed, "--total-timesteps": options.steps}
        flags |= settings.ours
        command = shlex.split(options.peer or "")
        if entrant != PEER:
            suffix, *switches = settings.rows[entrant]
            command = [sys.executable, f"leanrl/{settings.script}{suffix}", *switches]
            flags["--torch-threads"] = options.cores
    command = processes.on_cores(options.cores) + command
    command += [str(part) for flag in flags.items() for part in flag]
    if entrant in LIBRARIES:
        return run_library(command, log, progress, what)
    if entrant == PEER:
        return run_peer(command, log, progress, what, settings.steady_after, options.cores)
    run = processes.run_and_read(command, log, progress, what)
    return processes.numbers(run, command)


def summarize(results: list[dict], entrants: list[str] = (*LIBRARIES, *OURS)) -> list[dict]:
    """The first entrant is what all are compared with."""
    compared = dict.fromkeys(entrants, entrants[0])
    return rounds.summarize(results, "entrant", "ratio_to_sb3", compared)


def cells(rows: list[dict]) -> list[list[str]]:
    columns = {
        f"of {rows[0]['entrant']}": rounds.ratio("ratio_to_sb3"),
        "runs": lambda row: str(row["runs"]),
    }
    return rounds.cells(rows, "entrant", columns)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, *rounds.OPTIONS, "--seed", "--field-python")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="sac")
    parser.add_argument("--cores", type=program.few, default=1, help="and threads, of a run")
    parser.add_argument("--peer", help="what runs CleanRL's file, for PQN")
    parser.add_argument("--worker", choices=LIBRARIES.values(), help="internal: one library's run")
    options = parser.parse_args(arguments)
    settings = ALGORITHMS[options.algorithm]
    options.steps = options.steps or settings.steps
    if options.steps <= settings.steady_after:
        parser.error(f"--steps {options.steps}: the first {settings.steady_after} are warm-up")
    if options.worker:
        work(options)
        return 0
    here = len(os.sched_getaffinity(0))
    if options.cores > here:
        parser.error(f"--cores {options.cores}: there are {here}")
    if PEER in settings.libraries:
        if not options.peer:
            parser.error(f"--peer: {options.algorithm} is compared with a script of CleanRL's")
    else:
        processes.check_field(parser, options, "field")
    results, failures = rounds.take_turns(settings.entrants, options, measure)
    rows = summarize(results, settings.entrants)
    command = processes.call("field.py", options, "algorithm", "rounds", "steps", "cores")
    record = {"command": command, "rows": rows, "rounds": results, "failures": failures}
    above = ["Field benchmark", f"{settings.env_id}, {options.steps:,} steps per run"]
    above.append(f"each run on {options.cores} of the cores, with as many of torch's threads")
    above += [f"LeanRL: {flag} {value}" for flag, value in settings.ours.items()]
    for library in settings.libraries:
        if library == PEER:
            continue  # its command is in the record
        for worker in [result[library] for result in results if library in result][:1]:
            found = ", ".join(f"{name} {number}" for name, number in worker["versions"].items())
            where = f"{worker['device']}, {worker['torch_threads']} torch threads"
            above.append(f"{library}: Python {worker['python']}, {found}; {where}")
    return rounds.report(f"field_{options.algorithm}", above, cells(rows), record, options)


if __name__ == "__main__":
    program.start(main)
