"""The race: what each entrant has learned after so many minutes of one core.

    bash run.sh race                                        hours; files in plots/out/
    bash run.sh race --entrants "PPO on worlds" --tasks Humanoid-v5 --seeds 1     one line of it
    bash run.sh race --tasks HalfCheetahNoVel-v5 --minutes 10      with memory, velocities unseen
    bash run.sh race --tasks Hopper-v5 Ant-v5 --seeds 3            two robots, on worlds alone
    taskset -c 0,2,4,6 bash run.sh race        where a core is two processors: one of each
    bash run.sh race --pace 0.5                where a core makes half of the steps in STEPS

Every second counts from the start of the program: imports, compilation with an empty cache,
exploration, training; only evaluations do not. Minutes are of processor time, of the process and of
those that it has waited for, so that one run may stand on each core. Nothing else may work there:
it slows a run by its caches, the zoo's PPO by a third and more. All have one core and one thread,
no GPU, and the same seeds, and are evaluated in Gymnasium's own environments, ten episodes without
noise: our PPO by the mean of its clipped actions, the libraries' by their deterministic action.
race.json keeps what is done, and the next call goes on from there: a run that a changed script or
another --pace would make otherwise is deleted from it by hand.

    ours            the variants with --compile and their defaults. On worlds the flags are those
                    of leanrl/README.md, PPO's steps such that its rate comes down within the time
    zoo             Stable-Baselines3 with the hyperparameters of RL Baselines3 Zoo, which has tuned
                    them for these tasks' v3: commit 00128b5 of DLR-RM/rl-baselines3-zoo,
                    hyperparams/{ppo,sac}.yml. Of SB3-Contrib's RecurrentPPO those of ppo_lstm.yml,
                    commit 22e3ff2; for the cheetah, which it has not tuned, those of our script
    SBX             (JAX) TQC with the library's defaults
    CleanRL         not run: a dotted line, the return of its SAC in training after 1 M steps of the
                    v4 task as it publishes it (docs.cleanrl.dev)

    after N min     return: mean of the seeds, and range. An entrant that has made its steps stays,
                    in the figure from a dot on. Where an entrant has no run of --minutes, its
                    longest shorter ones are told of
    minutes to      until the first evaluation at the level: mean of the seeds that reach it

Written to --out: race.md, race.json, race.png and .svg, and logs/. Exit status 1 if a run failed.
"""

import argparse
import importlib
import json
import os
import queue
import re
import shlex
import statistics
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import processes
import program
import run_dirs
import tables
import tqdm

LEVELS = {  # of return, that tell a robot that has learned its task from one that has not
    "HalfCheetah-v5": 8000,
    "Walker2d-v5": 4500,
    "Humanoid-v5": 5000,
    "Hopper-v5": 3000,
    "Ant-v5": 4000,
    "CartPoleNoVel-v1": 475,
    "PendulumNoVel-v1": -250,
    "HalfCheetahNoVel-v5": 3000,
}
NO_VELOCITIES = {  # task -> the environment, and what of its observations is seen
    "CartPoleNoVel-v1": ("CartPole-v1", [0, 2]),
    "PendulumNoVel-v1": ("Pendulum-v1", [0, 1]),
    "HalfCheetahNoVel-v5": ("HalfCheetah-v5", [*range(8)]),
}
ON_WORLDS = ("Hopper-v5", "Ant-v5")  # tasks where nothing else races
CLEANRL = {"HalfCheetah-v5": 9635, "Walker2d-v5": 3591, "Humanoid-v5": 4996}
PUBLISHED = "CleanRL's SAC (published; in training, 1 M steps)"
OURS = {  # entrant -> script
    "PPO on worlds": "ppo_mujoco_worlds",
    "SAC on worlds": "sac_mujoco_worlds",
    "PPO": "ppo_continuous_action",
    "SAC": "sac_continuous_action",
    "TD3": "td3_continuous_action",
    "PPO with memory": "ppo_lstm",
}
LIBRARIES = {  # entrant -> package and algorithm
    "zoo's PPO": ("stable_baselines3", "PPO"),
    "zoo's SAC": ("stable_baselines3", "SAC"),
    "SBX TQC": ("sbx", "TQC"),
    "zoo's RecurrentPPO": ("sb3_contrib", "RecurrentPPO"),
}
ENTRANTS = (*OURS, *LIBRARIES)
WITH_MEMORY = ("PPO with memory", "zoo's RecurrentPPO")
COLOURS = {entrant: f"C{i}" for i, entrant in enumerate(ENTRANTS)}
STEPS = {  # that PPO makes in about a minute of a core, so that it is at its end in time
    "PPO on worlds": {
        "HalfCheetah-v5": 1_300_000,
        "Walker2d-v5": 560_000,
        "Humanoid-v5": 470_000,
        "Hopper-v5": 500_000,
        "Ant-v5": 430_000,
    },
    "PPO": {
        "HalfCheetah-v5": 250_000,
        "Walker2d-v5": 200_000,
        "Humanoid-v5": 60_000,
        "PendulumNoVel-v1": 250_000,
        "HalfCheetahNoVel-v5": 200_000,
    },
    "PPO with memory": {
        "CartPoleNoVel-v1": 60_000,
        "PendulumNoVel-v1": 60_000,
        "HalfCheetahNoVel-v5": 70_000,
    },
    "zoo's RecurrentPPO": {
        "CartPoleNoVel-v1": 40_000,
        "PendulumNoVel-v1": 40_000,
        "HalfCheetahNoVel-v5": 45_000,
    },
}
FLAGS = {
    ("PPO on worlds", "Humanoid-v5"): {
        "euler_timestep": 0.005,
        "num_steps": 64,
        "desired_kl": 0.02,
    },
    ("PPO on worlds", "Ant-v5"): {"euler_timestep": 0.005, "num_steps": 32, "desired_kl": 0.02},
    ("PPO on worlds", "Hopper-v5"): {"end_gamma": 0.997},
    ("SAC on worlds", "Ant-v5"): {"nstep": 1},
    ("SAC on worlds", "HalfCheetah-v5"): {"clipped_double_q": False},
    ("PPO", "PendulumNoVel-v1"): {"gamma": 0.9},
    ("PPO with memory", "CartPoleNoVel-v1"): {"compile": False},  # it takes longer than to learn
    ("PPO with memory", "PendulumNoVel-v1"): {
        "gamma": 0.9,
        "num_envs": 32,
        "num_steps": 128,
        "num_minibatches": 8,
        "target_kl": 0.03,
    },
}
# The zoo's networks, all with ReLU, which the worker adds
WIDE = {
    "log_std_init": -2,
    "ortho_init": False,
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}
MEMORY = {
    "ortho_init": False,
    "lstm_hidden_size": 64,
    "enable_critic_lstm": True,
    "net_arch": {"pi": [64], "vf": [64]},
}
ZOO = {  # what the zoo has tuned; SAC's is 10,000 random steps for all tasks
    "HalfCheetah-v5": {
        "n_steps": 512,
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": WIDE,
    },
    "Walker2d-v5": {
        "n_steps": 512,
        "batch_size": 32,
        "gamma": 0.99,
        "learning_rate": 5.05041e-05,
        "ent_coef": 0.000585045,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.95,
        "max_grad_norm": 1,
        "vf_coef": 0.871923,
    },
    "Humanoid-v5": {
        "n_steps": 512,
        "batch_size": 256,
        "gamma": 0.95,
        "learning_rate": 3.56987e-05,
        "ent_coef": 0.00238306,
        "clip_range": 0.3,
        "n_epochs": 5,
        "gae_lambda": 0.9,
        "max_grad_norm": 2,
        "vf_coef": 0.431892,
        "policy_kwargs": WIDE,
    },
    "CartPoleNoVel-v1": {
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "learning_rate": lambda left: 1e-3 * left,
        "clip_range": lambda left: 0.2 * left,
        "policy_kwargs": MEMORY,
    },
    "PendulumNoVel-v1": {
        "n_envs": 4,
        "n_steps": 1024,
        "gae_lambda": 0.95,
        "gamma": 0.9,
        "n_epochs": 10,
        "learning_rate": 1e-3,
        "clip_range": 0.2,
        "use_sde": True,
        "sde_sample_freq": 4,
        "policy_kwargs": MEMORY,
    },
    "HalfCheetahNoVel-v5": {  # not tuned there: of our script
        "n_envs": 16,
        "n_steps": 64,
        "batch_size": 256,
        "gamma": 0.99,
        "learning_rate": lambda left: 1e-3 * left,
        "policy_kwargs": {"lstm_hidden_size": 64, "net_arch": [64]},
    },
}
VERSIONS = re.compile("^versions (.*)$", re.MULTILINE)
PACKAGES = ("torch", "gymnasium", "mujoco", "stable-baselines3", "sb3-contrib", "sbx-rl", "jax")
# on a line of its own or after the progress bar
LINE = re.compile(r"after ([\d.]+) min: (\d+) \w+, return (\S+)$", re.MULTILINE)


def moments(minutes: int) -> list[float]:
    """When to evaluate: at once, each minute up to 5, every second up to 30, then every fifth."""
    found = [*range(6), *range(6, 30, 2), *range(30, minutes + 5, 5)]
    return [moment for moment in found if moment < minutes] + [minutes]


# Workers


def make_without_velocities(task: str, **settings) -> gymnasium.Env:
    """The environment of one of NO_VELOCITIES."""
    env_id, seen = NO_VELOCITIES[task]
    env = gymnasium.make(env_id, **settings)
    box = env.observation_space
    box = gymnasium.spaces.Box(box.low[seen], box.high[seen], dtype=box.dtype)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: obs[seen], box)


for hidden in NO_VELOCITIES:
    entry_point = partial(make_without_velocities, hidden)
    gymnasium.register(hidden, entry_point, disable_env_checker=True, order_enforce=False)


class Clock:
    """Seconds of processor time since the process began, or since a new start."""

    def __init__(self):
        self.left_out = 0.0

    def seconds(self) -> float:
        times = os.times()
        mine = times.user + times.system
        of_children = times.children_user + times.children_system
        return mine + of_children - self.left_out

    def go_back(self, seconds: float) -> None:
        """What has passed since it showed these seconds does not count."""
        self.left_out += self.seconds() - seconds


def say(seconds: float, steps: int, mean_return: float) -> None:
    """Tells an evaluation, as `read` finds it."""
    print(f"after {seconds / 60:.2f} min: {steps} steps, return {mean_return:.1f}", flush=True)


def read(log: Path) -> dict:
    """{evaluations: [[minutes, steps, return], ...], versions}; ValueError without."""
    text = log.read_text(errors="replace")
    found = LINE.findall(text)
    if not found:
        raise ValueError("was not evaluated")
    evaluations = [list(map(float, numbers)) for numbers in found]
    versions = VERSIONS.search(text)
    return {"evaluations": evaluations, "versions": json.loads(versions[1]) if versions else {}}


def train_and_evaluate(script, args, moments: list[float]) -> None:
    """Trains by a script of ours, a module, and evaluates after each of these minutes.

    It ends after the last of them, or when its steps are made.
    """
    clock = Clock()
    waiting = list(moments)
    shown = 0.0  # by the clock, when an evaluation begins

    class TimedRun(script.Run):
        def due(self, every, at_end=False):
            """An evaluation after each of the moments and at the end."""
            nonlocal shown
            if every != self.flags["eval_every"]:
                return super().due(every, at_end)
            shown = clock.seconds()
            return shown >= 60 * waiting[0] or self.step >= self.total_steps

        def write(self, row, step=None):
            super().write(row, step)
            if "charts/eval_return" not in row:
                return
            clock.go_back(shown)
            say(shown, self.step, row["charts/eval_return"])
            while waiting and shown >= 60 * waiting[0]:
                waiting.pop(0)
            self.ending = self.ending or not waiting

    script.Run = TimedRun
    script.main(args)


def steps_of(entrant: str, task: str, minutes: float) -> int:
    """What an entrant makes in these minutes if its rate comes down, else more than it can."""
    return int(STEPS[entrant][task] * minutes) if entrant in STEPS else 10**9


def train_ours(entrant: str, task: str, seed: int, minutes: int, pace: float) -> None:
    script = importlib.import_module(f"leanrl.{OURS[entrant]}_torchcompile")
    flags = {"compile": True} | FLAGS.get((entrant, task), {})
    args = script.Args(
        exp_name=f"race-{entrant}",  # so that no table of the script takes it in
        env_id=f"worlds/{task}" if "worlds" in entrant else task,
        seed=seed,
        total_timesteps=steps_of(entrant, task, pace * minutes),
        eval_every=1,
        cuda=False,
        torch_threads=1,
        **flags,
    )
    train_and_evaluate(script, args, moments(minutes))


def train_library(entrant: str, task: str, seed: int, minutes: int, pace: float) -> None:
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    clock = Clock()
    waiting = moments(minutes)
    package, algorithm = LIBRARIES[entrant]
    normalized = "PPO" in algorithm

    class Evaluation(BaseCallback):
        def _on_step(self) -> bool:
            shown = clock.seconds()
            if shown < 60 * waiting[0]:
                return True
            self.evaluate(shown)
            return bool(waiting)

        def _on_training_end(self) -> None:
            if waiting:  # its steps are made
                self.evaluate(clock.seconds())

        def evaluate(self, shown: float) -> None:
            test_env = make_vec_env(task, 10)
            if normalized:
                test_env = VecNormalize(test_env, training=False, norm_reward=False)
                test_env.obs_rms = self.training_env.obs_rms
            mean_return, _ = evaluate_policy(self.model, test_env, 10)
            test_env.close()
            clock.go_back(shown)
            say(shown, self.num_timesteps, mean_return)
            waiting.pop(0)

    make = getattr(importlib.import_module(package), algorithm)
    settings = dict(ZOO[task]) if normalized else {}
    env = make_vec_env(task, settings.pop("n_envs", 1))
    if normalized:
        import torch

        env = VecNormalize(env, gamma=settings["gamma"])
        networks = settings.get("policy_kwargs", {})
        if "ortho_init" in networks:  # the zoo's
            settings["policy_kwargs"] = networks | {"activation_fn": torch.nn.ReLU}
    elif package == "stable_baselines3":
        settings = {"learning_starts": 10_000}
    on = {} if package == "sbx" else {"device": "cpu"}
    policy = "MlpLstmPolicy" if algorithm == "RecurrentPPO" else "MlpPolicy"
    agent = make(policy, env, seed=seed, **settings, **on)
    agent.learn(steps_of(entrant, task, pace * minutes), callback=Evaluation())


# All runs


def racers(task: str) -> list[str]:
    """Who races there: all without memory, or those on worlds alone.

    With velocities unseen those with memory, and PPO if actions are a box.
    """
    if task in ON_WORLDS:
        return [entrant for entrant in OURS if "worlds" in entrant]
    if task not in NO_VELOCITIES:
        return [entrant for entrant in ENTRANTS if entrant not in WITH_MEMORY]
    return [*WITH_MEMORY, *(["PPO"] if task in STEPS["PPO"] else [])]


def make(wanted: list[tuple], options: argparse.Namespace) -> tuple[list[dict], list[str]]:
    """Makes those runs (entrant, task, seed) that are not yet in race.json.

    Returns all runs in the file, also of other lengths, and what went wrong.
    """
    path = options.out / "race.json"

    def kept() -> list[dict]:
        return run_dirs.read_json(path)["runs"] if path.exists() else []

    try:
        mine = [run for run in kept() if run["minutes"] == options.minutes]
    except run_dirs.DAMAGED as problem:
        raise SystemExit(f"error: {run_dirs.shown(path)}: {problem}") from None
    made = {(run["entrant"], run["task"], run["seed"]) for run in mine}
    wanted = [run for run in wanted if run not in made]
    cores: queue.Queue = queue.Queue()
    for core in os.sched_getaffinity(0):
        cores.put(core)
    failures = []
    writing = threading.Lock()
    interrupted = threading.Event()
    bar = tqdm.tqdm(total=len(wanted), unit="run")

    def go_on(log: Path) -> None:
        if interrupted.is_set():
            raise ValueError("was interrupted")

    def work(run: tuple) -> None:
        entrant, task, seed = run
        name = re.sub(r"\W+", "-", f"race-{entrant}-{task}-{seed}")
        log = options.out / "logs" / f"{name}.log"
        python = options.field_python if entrant in LIBRARIES else sys.executable
        command = [python, "plots/measure/race.py", "--worker", entrant]
        command += ["--tasks", task, "--seed", str(seed)]
        command += ["--minutes", str(options.minutes), "--pace", str(options.pace)]
        here = run_dirs.this_machine()
        here["cpu"]["threads"] = 1
        here |= {"gpu": None, "gpu_driver": None}  # none is used
        core = cores.get()
        try:
            pinned = ["taskset", "-c", str(core), *command]
            with tempfile.TemporaryDirectory() as cache:
                environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
                environment["TMPDIR"] = cache  # where the compiler also keeps its headers
                environment["TORCHINDUCTOR_CACHE_DIR"] = cache  # or one that the user has exported
                environment["CUDA_VISIBLE_DEVICES"] = ""
                status = processes.run_logged(pinned, log, go_on, environment)
            found = processes.read_log(status, log, f"{entrant}, {task}, seed {seed}", read)
        except ValueError as failure:
            failures.append(str(failure))
            return
        finally:
            cores.put(core)
        here["versions"] |= found.pop("versions")
        result = {
            "entrant": entrant,
            "task": task,
            "seed": seed,
            "minutes": options.minutes,
            "pace": options.pace,
            **found,
        }
        result["machine"] = run_dirs.machine([here])
        with writing:
            bar.update()
            tables.write_json(path, {"schema": 1, "runs": [*kept(), result]})

    with bar, ThreadPoolExecutor(cores.qsize()) as pool:
        try:
            list(pool.map(work, wanted))
        except BaseException:
            interrupted.set()  # which the threads see, and end their runs
            pool.shutdown(cancel_futures=True)
            raise
    return kept(), failures


# Reduction


def longest(runs: list[dict], minutes: int) -> list[dict]:
    """The runs of these minutes and, of an entrant that has none in a task, its longest ones."""
    found = []
    for run in runs:
        rivals = [x for x in runs if (x["entrant"], x["task"]) == (run["entrant"], run["task"])]
        lengths = [x["minutes"] for x in rivals if x["minutes"] <= minutes]
        if lengths and run["minutes"] == max(lengths):
            found.append(run)
    return found


def after(evaluations: list[list], minutes: float) -> float | None:
    """The last return until then: an evaluation begins up to a twentieth later than it is due."""
    found = [value for moment, _, value in evaluations if moment <= 1.05 * minutes]
    return found[-1] if found else None


def summarize(runs: list[dict], minutes: int) -> list[dict]:
    """One dict per task and entrant that has runs."""
    rows = []
    for task in LEVELS:
        for entrant in ENTRANTS:
            mine = [run for run in runs if (run["task"], run["entrant"]) == (task, entrant)]
            if not mine:
                continue
            row = {"task": task, "level": LEVELS[task], "entrant": entrant, "seeds": len(mine)}
            vectors = {run["machine"]["cpu"]["vectors"] for run in mine}
            row["processor"] = ", ".join(sorted(vectors, reverse=True))
            row["minutes"] = max(run["evaluations"][-1][0] for run in mine)  # its steps may end
            for moment in dict.fromkeys([5, 10, 30, minutes]):
                if moment <= minutes:
                    whole = [run for run in mine if run["minutes"] >= moment]
                    known = [after(run["evaluations"], moment) for run in whole]
                    known = [value for value in known if value is not None]
                    row[f"after {moment} min"] = tables.spread(known) if known else None
            row["reached"] = []
            for run in mine:
                times = [at for at, _, value in run["evaluations"] if value >= LEVELS[task]]
                row["reached"] += times[:1]
            rows.append(row)
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    columns = [name for name in rows[0] if name.startswith("after")] if rows else []
    table = [["task", "entrant", "processor", "seeds", *columns, "minutes to"]]
    for row in rows:
        line = [row["task"], row["entrant"], row["processor"], str(row["seeds"])]
        for name in columns:
            found = row[name]
            line.append(tables.with_range(found) if found else "-")
        level = f"{row['level']:,}"
        reached = row["reached"]
        told = f"{level}: not in {row['minutes']:.0f}"
        if reached:
            told = f"{level}: {statistics.fmean(reached):.1f}"
            if len(reached) < row["seeds"]:
                told += f" ({len(reached)} of {row['seeds']})"
        table.append([*line, told])
    return table


def draw(runs: list[dict], minutes: int, stem: Path) -> None:
    """Return over minutes: a panel per task, a line per entrant, its seeds' range as a band.

    Names stand at the ends of the lines, as close to them as others allow.
    """
    import curves
    import matplotlib.pyplot as plt

    tasks = [task for task in LEVELS if any(run["task"] == task for run in runs)]
    size = (4.4 * len(tasks), 3.8)
    figure, panels = plt.subplots(1, len(tasks), figsize=size, squeeze=False, layout="constrained")
    grid = np.linspace(0, minutes, 241)
    for ax, task in zip(panels[0], tasks, strict=True):
        ends = {}
        for entrant in ENTRANTS:
            mine = [run for run in runs if (run["task"], run["entrant"]) == (task, entrant)]
            if not mine:
                continue
            values = []
            for run in mine:
                times, _, returns = np.array(run["evaluations"]).T
                # what has made its steps stays, so that a mean is over the same seeds
                times = np.append(times, max(times[-1], run["minutes"]))
                returns = np.append(returns, returns[-1])
                values.append(np.interp(grid, times, returns, left=np.nan))
            values = np.array(values)
            known = np.isfinite(values).any(0)
            colour = COLOURS[entrant]
            style = "-" if entrant in OURS else "--"
            middle = np.nanmean(values[:, known], axis=0)
            ax.plot(grid[known], middle, style, color=colour)
            ends[entrant] = middle[-1]
            end = max(run["evaluations"][-1][0] for run in mine)
            if end < 0.95 * mine[0]["minutes"]:  # it has made its steps
                ax.plot(end, np.interp(end, grid[known], middle), "o", color=colour, markersize=4)
            low = np.nanmin(values[:, known], axis=0)
            high = np.nanmax(values[:, known], axis=0)
            ax.fill_between(grid[known], low, high, color=colour, alpha=0.15, linewidth=0)
        if task in CLEANRL:
            ax.axhline(CLEANRL[task], color="gray", linestyle=":")
        ax.set(title=task, xlabel="minutes of one core", xlim=(0, minutes))
        apart = 0.055 * np.diff(ax.get_ylim())[0]  # a line of text
        for entrant, y in spread_out(ends, apart).items():
            colour, text = COLOURS[entrant], run_dirs.PEERS.get(entrant, entrant)
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            ax.annotate(text, (minutes, y), color=colour, fontsize=7.5, **place)
    panels[0][0].set_ylabel("return of ten episodes without noise")
    if CLEANRL.keys() & tasks:
        figure.supxlabel(f"dotted: {PUBLISHED}", fontsize=8, color="gray")
    curves.save(figure, stem)


def spread_out(places: dict[str, float], apart: float) -> dict[str, float]:
    """The same places in the same order, moved until each is `apart` from the next."""
    names = sorted(places, key=places.get)
    moved = dict(places)
    for _ in range(200):
        for low, high in pairwise(names):
            gap = apart - (moved[high] - moved[low])
            if gap > 0:
                moved[low] -= gap / 2
                moved[high] += gap / 2
    return moved


def report(runs: list[dict], told: list[dict], minutes: int, rows: list[dict], out: Path) -> None:
    """Writes all runs in the file, and the table of those that are told of."""
    words = ["python", "plots/measure/race.py", "--minutes", str(minutes)]
    words += ["--seeds", str(max((run["seed"] for run in told), default=1))]
    for pace in {run.get("pace", 1.0) for run in told} - {1.0}:
        words += ["--pace", str(pace)]
    for option, key in (("--entrants", "entrant"), ("--tasks", "task")):
        words += [option, *dict.fromkeys(run[key] for run in told)]
    command = shlex.join(words)
    lines = []
    for run in told:  # not the load: minutes are of processor time
        lines += run_dirs.describe(run["machine"] | {"load_average_1min": None})
    lengths = " or ".join(map(str, sorted({run["minutes"] for run in told})))
    above = [*dict.fromkeys(lines)]
    above.append(f"{lengths} minutes per run, in processor time, a core each")
    table = cells(rows)
    record = {"schema": 1, "command": command, "table": table, "rows": rows, "runs": runs}
    tables.write_report(out / "race", "The race, as far as it is made", table, record, above)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out", "--seeds", "--seed", "--field-python")
    parser.set_defaults(seeds=2)
    parser.add_argument("--minutes", type=program.few, default=30, help="per run")
    parser.add_argument("--pace", type=float, default=1.0, help="of a core, in parts of STEPS")
    parser.add_argument("--entrants", nargs="+", choices=ENTRANTS, help="all that suit the tasks")
    robots = [task for task in LEVELS if task not in (*NO_VELOCITIES, *ON_WORLDS)]
    parser.add_argument("--tasks", nargs="+", choices=LEVELS, default=robots)
    parser.add_argument("--worker", choices=ENTRANTS, help="internal: one run")
    options = parser.parse_args(arguments)
    if options.worker:
        print(f"versions {json.dumps(run_dirs.versions(PACKAGES))}", flush=True)
        train = train_ours if options.worker in OURS else train_library
        (task,) = options.tasks
        train(options.worker, task, options.seed, options.minutes, options.pace)
        return 0
    wanted = []
    for seed in range(1, options.seeds + 1):  # each seed of all before the next one
        for task in options.tasks:
            entrants = [x for x in racers(task) if x in (options.entrants or ENTRANTS)]
            wanted += [(entrant, task, seed) for entrant in entrants]
    if {entrant for entrant, *_ in wanted} & LIBRARIES.keys():
        processes.check_field(parser, options, "race")
    runs, failures = make(wanted, options)
    mine = longest(runs, options.minutes)
    if mine:
        draw(mine, options.minutes, options.out / "race")
    report(runs, mine, options.minutes, summarize(mine, options.minutes), options.out)
    return processes.say_failures(failures)


if __name__ == "__main__":
    program.start(main, processes.GOES_ON)
