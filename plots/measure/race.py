"""The race: what each entrant has learned after so many minutes of one core.

    bash run.sh race                                        hours; files in plots/out/
    bash run.sh race --entrants "PPO on worlds" --tasks Humanoid-v5 --seeds 1     one line of it
    taskset -c 0,2,4,6 bash run.sh race        where a core is two processors: one of each
    python plots/measure/race.py --minutes 60 --entrants "SAC on worlds" "PPO on worlds"

Every second counts from the start of the program: imports, compilation with an empty cache,
exploration, training; only evaluations do not. Minutes are of processor time, so that one run may
stand on each core. Nothing else may work there: it slows a run by its caches, the zoo's PPO by a
third and more. All have one core and one thread, no GPU, and the same seeds, and are evaluated in
Gymnasium's own environments: ten episodes by the mean action. What is made is kept, and the next
call goes on from there.

    ours            the variants with --compile and their defaults. On worlds PPO's flags are those
                    of README, and PPO's steps such that its rate comes down within the time
    zoo             Stable-Baselines3 with the hyperparameters of RL Baselines3 Zoo, which has tuned
                    them for these tasks' v3: commit 00128b5 of DLR-RM/rl-baselines3-zoo,
                    hyperparams/{ppo,sac}.yml
    SBX             (JAX) TQC and CrossQ with the library's defaults
    CleanRL         not run: a dotted line, the return of its SAC in training after 1 M steps of the
                    v4 task as it publishes it (docs.cleanrl.dev); such a run takes hours

    processor       its vector instructions: those with AVX512 are faster
    after N min     return: mean of the seeds, and range. An entrant that has made its steps stays,
                    in the figure from a dot on. Where an entrant has no run of --minutes, its
                    longest shorter ones are told of
    minutes to      until the first evaluation at the level: mean of the seeds that reach it, and
                    how many of them do; or how long it was raced

Written to --out: race.md, race.json, race.png and .svg, and logs/. Exit status 1 if a run failed.
"""

import importlib
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import processes
import program
import run_dirs
import tables
import timed

LEVELS = {  # of return, that tell a robot that has learned its task from one that has not
    "HalfCheetah-v5": 8000,
    "Walker2d-v5": 4500,
    "Humanoid-v5": 5000,
    "Hopper-v5": 3000,
    "Ant-v5": 3500,
}
CLEANRL = {"HalfCheetah-v5": 9635, "Walker2d-v5": 3591, "Humanoid-v5": 4996, "Hopper-v5": 2310}
PUBLISHED = "CleanRL's SAC (published; in training, 1 M steps)"
RACED = ("HalfCheetah-v5", "Walker2d-v5", "Humanoid-v5")
OURS = {  # entrant -> script
    "PPO on worlds": "ppo_mujoco_worlds",
    "SAC on worlds": "sac_mujoco_worlds",
    "PPO": "ppo_continuous_action",
    "SAC": "sac_continuous_action",
    "TD3": "td3_continuous_action",
}
LIBRARIES = {  # entrant -> package and algorithm
    "zoo's PPO": ("stable_baselines3", "PPO"),
    "zoo's SAC": ("stable_baselines3", "SAC"),
    "SBX TQC": ("sbx", "TQC"),
    "SBX CrossQ": ("sbx", "CrossQ"),
}
ENTRANTS = (*OURS, *LIBRARIES)
COLOURS = {entrant: f"C{i}" for i, entrant in enumerate(ENTRANTS)}
STEPS = {  # that PPO makes in about a minute of a core, so that it is at its end in time
    "PPO on worlds": {
        "HalfCheetah-v5": 1_400_000,
        "Walker2d-v5": 560_000,
        "Humanoid-v5": 180_000,
        "Hopper-v5": 700_000,
        "Ant-v5": 230_000,
    },
    "PPO": {
        "HalfCheetah-v5": 250_000,
        "Walker2d-v5": 200_000,
        "Humanoid-v5": 60_000,
        "Hopper-v5": 200_000,
        "Ant-v5": 100_000,
    },
}
LARGE = {"num_steps": 64, "desired_kl": 0.02}  # PPO on worlds of robots with four limbs
FLAGS = {("PPO on worlds", "Ant-v5"): LARGE, ("PPO on worlds", "Humanoid-v5"): LARGE}
ZOO = {  # what the zoo has tuned; SAC's is 10,000 random steps for all tasks
    "HalfCheetah-v5": {
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
    },
    "Walker2d-v5": {
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
        "batch_size": 256,
        "gamma": 0.95,
        "learning_rate": 3.56987e-05,
        "ent_coef": 0.00238306,
        "clip_range": 0.3,
        "n_epochs": 5,
        "gae_lambda": 0.9,
        "max_grad_norm": 2,
        "vf_coef": 0.431892,
    },
    "Hopper-v5": {
        "batch_size": 32,
        "gamma": 0.999,
        "learning_rate": 9.80828e-05,
        "ent_coef": 0.00229519,
        "clip_range": 0.2,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
    },
}
WIDE = ("HalfCheetah-v5", "Humanoid-v5", "Hopper-v5")  # the zoo's networks of 256 for PPO


def moments(minutes: int) -> list[float]:
    """When to evaluate: at once, each minute up to 5, every second up to 30, then every fifth."""
    found = [*range(6), *range(6, 30, 2), *range(30, minutes + 5, 5)]
    return [moment for moment in found if moment < minutes] + [minutes]


# Workers


def train_ours(entrant: str, task: str, seed: int, minutes: int) -> None:
    script = importlib.import_module(f"leanrl.{OURS[entrant]}_torchcompile")
    flags = FLAGS.get((entrant, task), {})
    steps = STEPS[entrant][task] * minutes if entrant in STEPS else 10**9
    args = script.Args(
        exp_name=f"race-{entrant}",  # so that no table of the script takes it in
        env_id=f"worlds/{task}" if "worlds" in entrant else task,
        seed=seed,
        total_timesteps=steps,
        eval_every=1,
        cuda=False,
        torch_threads=1,
        compile=True,
        **flags,
    )
    timed.train(script, args, moments(minutes))


def train_library(entrant: str, task: str, seed: int, minutes: int) -> None:
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    clock = timed.Clock()
    waiting = moments(minutes)
    package, algorithm = LIBRARIES[entrant]
    normalized = algorithm == "PPO"

    class Evaluation(BaseCallback):
        def _on_step(self) -> bool:
            shown = clock.seconds()
            if shown < 60 * waiting[0]:
                return True
            test_env = make_vec_env(task, 10)
            if normalized:
                test_env = VecNormalize(test_env, training=False, norm_reward=False)
                test_env.obs_rms = self.training_env.obs_rms
            mean_return, _ = evaluate_policy(self.model, test_env, 10)
            test_env.close()
            clock.go_back(shown)
            timed.say(shown, self.num_timesteps, mean_return)
            waiting.pop(0)
            return bool(waiting)

    make = getattr(importlib.import_module(package), algorithm)
    env = make_vec_env(task, 1)
    settings = {}
    if normalized:
        import torch

        settings = {"n_steps": 512, **ZOO[task]}
        env = VecNormalize(env, gamma=settings["gamma"])
        if task in WIDE:
            layers = [256, 256]
            settings["policy_kwargs"] = {
                "log_std_init": -2,
                "ortho_init": False,
                "activation_fn": torch.nn.ReLU,
                "net_arch": {"pi": layers, "vf": layers},
            }
    elif package == "stable_baselines3":
        settings = {"learning_starts": 10_000}
    on = {"device": "cpu"} if package == "stable_baselines3" else {}
    agent = make("MlpPolicy", env, seed=seed, **settings, **on)
    agent.learn(10**9, callback=Evaluation())


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
                values.append(curves.on_grid(grid, times, returns))
            values = np.array(values)
            known = np.isfinite(values).any(0)
            colour = COLOURS[entrant]
            style = "-" if entrant in OURS else "--"
            middle = curves.mean_of_known(values)
            ax.plot(grid, middle, style, color=colour)
            ends[entrant] = middle[known][-1]
            end = max(run["evaluations"][-1][0] for run in mine)
            if end < 0.95 * mine[0]["minutes"]:  # it has made its steps
                ax.plot(end, np.interp(end, grid, middle), "o", color=colour, markersize=4)
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


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out", "--seeds", "--seed", "--field-python")
    parser.set_defaults(seeds=2)
    parser.add_argument("--minutes", type=program.few, default=30, help="per run")
    parser.add_argument("--entrants", nargs="+", choices=ENTRANTS, default=list(ENTRANTS))
    parser.add_argument("--tasks", nargs="+", choices=LEVELS, default=list(RACED))
    parser.add_argument("--worker", choices=ENTRANTS, help="internal: one run")
    options = parser.parse_args(arguments)
    if options.worker:
        timed.say_versions()
        train = train_ours if options.worker in OURS else train_library
        (task,) = options.tasks
        train(options.worker, task, options.seed, options.minutes)
        return 0
    theirs = [name for name in options.entrants if name in LIBRARIES]
    if theirs:
        processes.check_field(parser, options, "race")
    wanted = timed.plan(options.entrants, options)
    for task in options.tasks:
        if "zoo's PPO" in options.entrants and task not in ZOO:
            wanted = [run for run in wanted if run[:2] != ("zoo's PPO", task)]
            print(f"the zoo has tuned no PPO for {task}", file=sys.stderr)

    def python(name: str) -> str | None:
        return options.field_python if name in LIBRARIES else None

    runs, failures = timed.make("entrant", wanted, options, python)
    mine = longest(runs, options.minutes)
    rows = summarize(mine, options.minutes)
    stem = options.out / "race"
    if mine:
        draw(mine, options.minutes, stem)
    timed.report("entrant", "The race", runs, mine, options.minutes, cells(rows), rows, stem)
    return processes.say_failures(failures)


if __name__ == "__main__":
    program.start(main, processes.GOES_ON)
