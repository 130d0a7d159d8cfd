"""RL-Scope's survey on this machine: frameworks, algorithms and simulators, where their time goes.

    python plots/measure/survey.py                      all three, about ten minutes on two cores
    python plots/measure/survey.py --only simulators    one of them

After Gleeson et al., "RL-Scope", MLSys 2021, whose question is what share of training is the CPU's,
and what a faster simulator or a faster backend would buy:

    frameworks      its figure 4: SAC and TD3 of Stable-Baselines3, our baseline, our variant with
                    --compile, on Walker2d
    algorithms      its figure 5: PPO, SAC, TD3, PPO on worlds and SAC on worlds, each the variant
                    with --compile, on Walker2d
    simulators      its figure 7: PPO with --compile on CartPoles that are tensors, HalfCheetah,
                    Humanoid and, where EnvPool is installed, Pong

Each is a short traced run; one that is finished, of the same machine and versions, is kept. A
stopwatch of ours stands around what Stable-Baselines3 calls, so that the rest is its loop and
callbacks. Written to --out: survey_NAME.md and .json, and the figure survey_NAME_stages.
"""

import argparse
import fnmatch
import importlib.util
import json
import sys
import time
from functools import partial
from pathlib import Path

import processes
import program
import run_dirs
import tables
from run_dirs import ROOT, label

WALKER = ["--env-id", "Walker2d-v5"]
WALKERS = ["--env-id", "worlds/Walker2d-v5"]
OFF_POLICY = [*WALKER, "--learning-starts", "100", "--total-timesteps", "800"]
ON_POLICY = ["--total-timesteps", "24576"]
ATARI = ["--env-id", "Pong-v5", "--total-timesteps", "8192"]
LIBRARY = "Stable-Baselines3"
FRAMEWORKS = {}  # run -> what follows `python`
for name in ("sac", "td3"):
    file = f"leanrl/{name}_continuous_action"
    FRAMEWORKS |= {
        f"{LIBRARY} {name}": ["plots/measure/survey.py", "--library", name],
        f"{name} baseline": [f"{file}.py", *OFF_POLICY],
        f"{name} compile": [f"{file}_torchcompile.py", "--compile", *OFF_POLICY],
    }


def compiled(script: str, *flags: str) -> list[str]:
    return [f"leanrl/{script}_torchcompile.py", "--compile", *flags]


ALGORITHMS = {
    "ppo": compiled("ppo_continuous_action", *WALKER, *ON_POLICY),
    "sac compile": FRAMEWORKS["sac compile"],
    "td3 compile": FRAMEWORKS["td3 compile"],
    "ppo on worlds": compiled("ppo_mujoco_worlds", *WALKERS, "--total-timesteps", "65536"),
    "sac on worlds": compiled("sac_mujoco_worlds", *WALKERS, "--total-timesteps", "50000"),
}
SIMULATORS = {
    "cartpole": compiled("ppo_cartpole_gpu", "--total-timesteps", "1048576"),
    "halfcheetah": compiled("ppo_continuous_action", *ON_POLICY),
    "humanoid": compiled("ppo_continuous_action", "--env-id", "Humanoid-v5", *ON_POLICY),
    "pong": compiled("ppo_atari_envpool", *ATARI),
}


def by_algorithm(row: dict) -> tuple[str, str]:
    """Where a row stands: its block and the name of its bar."""
    return row["env_id"], label(row["script"])


def by_simulator(row: dict) -> tuple[str, str]:
    return "PPO", row["env_id"]


# name -> runs, title, where a row stands (None: by its script), whether percent are drawn
SURVEYS = {
    "frameworks": (FRAMEWORKS, "Frameworks: where a step's time goes", None, False),
    "algorithms": (ALGORITHMS, "Algorithms: where a step's time goes", by_algorithm, True),
    "simulators": (SIMULATORS, "Simulators: where a step's time goes", by_simulator, True),
}


# Stable-Baselines3, in a process of its own


def train_library(algorithm: str) -> None:
    """A traced run with the settings of OFF_POLICY, and its records in runs/."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from torch.utils.tensorboard import SummaryWriter

    from leanrl.stopwatch import Stopwatch

    torch.set_num_threads(1)  # as our scripts do
    env_id = WALKER[1]
    steps = 800
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    env = make_vec_env(env_id, 1, seed=1)
    agent = getattr(stable_baselines3, algorithm.upper())(
        "MlpPolicy",
        env,
        seed=1,
        learning_starts=100,
        batch_size=256,
        policy_kwargs={"net_arch": [256, 256]},
        device=device,
    )
    script = f"{algorithm}_continuous_action"
    folder = ROOT / "runs" / f"{env_id}__{LIBRARY}-{algorithm}__1__{int(time.time())}"
    folder.mkdir(parents=True)
    config = {
        "args": {
            "exp_name": script,
            "library": LIBRARY,
            "env_id": env_id,
            "seed": 1,
            "num_envs": 1,
            "total_timesteps": steps,
            "torch_threads": 1,
            "stopwatch": "trace",
        },
        "command": f"plots/measure/survey.py --library {algorithm}",
        "versions": {"torch": torch.__version__},
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    watch = Stopwatch(device, warmup_steps=200, trace=True)

    def staged(stage: str, function):
        def call(*args, **kwargs):
            outer = watch.current
            watch.stage(stage)
            result = function(*args, **kwargs)
            watch.stage(outer)
            return result

        return call

    class Ticks(BaseCallback):
        def _on_step(self) -> bool:
            watch.tick(self.num_timesteps)
            return True

    env.step = staged("simulation", env.step)
    agent._sample_action = staged("inference", agent._sample_action)
    agent.replay_buffer.add = staged("replay", agent.replay_buffer.add)
    agent.replay_buffer.sample = staged("replay", agent.replay_buffer.sample)
    agent.train = staged("backpropagation", agent.train)
    agent.learn(steps, callback=Ticks())
    report = watch.measure()
    tables.write_json(folder / "stages.json", report)
    watch.profiler.stop()
    watch.profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    with SummaryWriter(folder) as writer:  # which tells how far the run has come
        writer.add_scalar(run_dirs.SPEED, report["sps"], agent.num_timesteps)
    print(f"{report['sps_steady']:,.1f} steps/s, {run_dirs.shown(folder)}")


# The surveys


def whole_command(name: str, command: list[str]) -> list[str]:
    """What follows `python`: of Stable-Baselines3's runs the trace is part of the program."""
    traced = [] if name.startswith(LIBRARY) else ["--stopwatch", "trace"]
    return [*command, *traced]


def make(name: str, command: list[str], logs: Path) -> processes.Turn:
    log = logs / f"survey-{name.replace(' ', '-')}.log"
    measure = partial(processes.run_and_read, [sys.executable, *command], log, what=name)
    return processes.Turn(name, 1, 1, measure)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out")
    parser.add_argument("--only", default="*", help="surveys whose name matches")
    parser.add_argument("--library", choices=("sac", "td3"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.library:
        train_library(options.library)
        return 0
    chosen = fnmatch.filter(SURVEYS, options.only)
    if not chosen:
        parser.error(f"--only {options.only!r} matches none of {', '.join(SURVEYS)}")
    commands = {}
    for survey in chosen:
        for name, command in SURVEYS[survey][0].items():
            commands[name] = whole_command(name, command)
    if importlib.util.find_spec("envpool") is None and commands.pop("pong", None):
        print("skipped: pong, no envpool: pip install -r requirements/envpool.txt")
    before, _ = run_dirs.read_runs([ROOT / "runs"])
    traced = [run for run in before if (run.path / "trace.json.gz").exists()]
    found = processes.find_made(commands, traced, run_dirs.this_machine())
    logs = options.out / "logs"
    turns = [make(name, commands[name], logs) for name in commands if name not in found]
    results, failures = processes.make_all(turns)
    found |= results
    import breakdown  # which draws, so that --help need not wait for that

    for survey in chosen:
        wanted, title, group, shares = SURVEYS[survey]
        runs = [found[name] for name in wanted if name in found]
        for path in breakdown.write(runs, options.out, f"survey_{survey}", title, group, shares):
            print(f"figure: {run_dirs.shown(path)}")
    return processes.say_failures(failures)


if __name__ == "__main__":
    program.start(main, processes.GOES_ON)
