"""What faster environments are worth in training: reward against time, for four kinds of CartPole.

    python plots/measure/env_learning.py                five runs each; minutes

After figure 7 of "Increasing Sample Throughput for RL Environments" (CS267, Berkeley). The learner
is ppo_cartpole_gpu.py, whose environments are replaced: by the processes of Stable-Baselines3, by
EnvPool's threads, by tensors (its own) and by the kernel. Each kind trains with 16 environments
and, but for processes, with 256; where there is a GPU with 4,096, too. With 16 and 256 discounting
is that of RL Baselines3 Zoo for this task, with 4,096 the script's. Seconds count from the set-up
of the run on, imports do not.

    of tensors      median over the rounds of steps/s divided by that of as many tensors
    simulating      part of the steady window in which environments are stepped, median
    seconds to 475  until the mean return of ten rollouts is that, at which Gymnasium calls the task
                    solved: median over the rounds that get there, and range
"""

import atexit
import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import processes
import program
import rounds
import run_dirs
import torch
from env_kernel import KernelCartPole

import leanrl.ppo_cartpole_gpu as script

SOLVED = 475
RETURN = "charts/episodic_return"
ZOO = {"gamma": 0.98, "gae_lambda": 0.8, "ent_coef": 0.0}
SETTINGS = {  # number of environments -> flags of the learner
    16: {
        **ZOO,
        "total_timesteps": 100_000,
        "learning_rate": 1e-3,
        "num_minibatches": 2,
        "update_epochs": 10,
    },
    256: {**ZOO, "total_timesteps": 700_000},
    4096: {},  # for which the script's defaults are
}


# Environments of others, as the learner takes them: dense tensors


class OthersCartPole(script.CartPole):
    """Environments of a library on the CPU, `envs`."""

    def close_extras(self, **kwargs) -> None:
        self.envs.close()

    def told(self, **arrays: np.ndarray) -> tuple:
        """What `step` returns, of obs, final_obs, lengths, terminated and truncated (N, ...)."""
        found = {}
        for name, array in arrays.items():
            found[name] = torch.as_tensor(array, device=self.device)
        terminated, truncated = found["terminated"], found["truncated"]
        ended = terminated | truncated
        lengths = found["lengths"]
        infos = {
            "final_obs": found["final_obs"],
            "_final_obs": ended,
            "episode": {"r": lengths.float(), "l": lengths},
            "_episode": ended,
        }
        rewards = torch.ones_like(infos["episode"]["r"])
        return found["obs"], rewards, terminated, truncated, infos


class ProcessesCartPole(OthersCartPole):
    """A process per environment, by Stable-Baselines3."""

    def __init__(self, num_envs: int, device: torch.device):
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import SubprocVecEnv

        super().__init__(num_envs, device)
        self.envs = make_vec_env(
            "CartPole-v1",
            num_envs,
            vec_env_cls=SubprocVecEnv,
            vec_env_kwargs={"start_method": "fork"},  # others import torch in each process
        )
        atexit.register(self.close)  # the processes have the run's signal handlers: no SIGTERM ends

    def reset(self, *, seed=None, options=None) -> tuple:
        self.envs.seed(seed)
        return torch.as_tensor(self.envs.reset(), device=self.device), {}

    def step(self, actions, starts=None) -> tuple:
        obs, _, ended, infos = self.envs.step(actions.cpu().numpy())
        final_obs = obs.copy()
        truncated = np.zeros_like(ended)
        self.lengths += 1
        lengths = self.lengths.clone()
        for i in np.flatnonzero(ended):
            final_obs[i] = infos[i]["terminal_observation"]
            truncated[i] = infos[i]["TimeLimit.truncated"]
            self.lengths[i] = 0
        return self.told(
            obs=obs,
            final_obs=final_obs,
            lengths=lengths,
            terminated=ended & ~truncated,
            truncated=truncated,
        )


class EnvPoolCartPole(OthersCartPole):
    """A pool of threads in C++."""

    def reset(self, *, seed=None, options=None) -> tuple:
        import envpool

        self.envs = envpool.make_gymnasium("CartPole-v1", num_envs=self.num_envs, seed=seed)
        obs, _ = self.envs.reset()
        return torch.as_tensor(obs, device=self.device), {}

    def step(self, actions, starts=None) -> tuple:
        """EnvPool begins an episode in a step of its own, which is made here at once."""
        actions = actions.cpu().numpy().astype(np.int32)
        final_obs, _, terminated, truncated, infos = self.envs.step(actions)
        obs = final_obs.copy()
        ended = np.flatnonzero(terminated | truncated).astype(np.int32)
        if len(ended):
            first_obs, first_infos = self.envs.reset(ended)
            obs[first_infos["env_id"]] = first_obs
        return self.told(
            obs=obs,
            final_obs=final_obs,
            lengths=infos["elapsed_step"],
            terminated=terminated,
            truncated=truncated,
        )


KINDS = {  # of environments -> what makes them, and the most that one takes
    "SB3 SubprocVecEnv": (ProcessesCartPole, 16),
    "EnvPool": (EnvPoolCartPole, 4096),
    "tensors": (script.CartPole, 4096),
    "kernel": (KernelCartPole, 4096),
}
PACKAGES = {
    "SB3 SubprocVecEnv": "stable_baselines3.common.env_util",
    "EnvPool": "envpool",
}


def arms(numbers: Iterable[int] = SETTINGS) -> dict[str, tuple[str, int]]:
    """{name: kind and number of environments}, of these numbers."""
    found = {}
    for num_envs in numbers:
        for kind, (_, most) in KINDS.items():
            if num_envs <= most:
                found[f"{kind}, {num_envs:,}"] = kind, num_envs
    return found


# Runs


def train(name: str, seed: int, exp_name: str) -> None:
    """The worker."""
    kind, num_envs = arms()[name]
    script.CartPole, _ = KINDS[kind]
    if kind in PACKAGES:
        importlib.import_module(PACKAGES[kind])  # before the run's clock begins
    settings = SETTINGS[num_envs]
    script.main(script.Args(exp_name=exp_name, seed=seed, num_envs=num_envs, **settings))


def first_at(curve: run_dirs.Series, level: float) -> dict:
    """When a run has first reached this return: {seconds, steps}, each None if never."""
    reached = np.flatnonzero(curve.values >= level)
    if not len(reached):
        return {"seconds": None, "steps": None}
    first = reached[0]
    return {"seconds": float(curve.seconds[first]), "steps": float(curve.steps[first])}


def read_curve(path: Path) -> run_dirs.Series:
    """Of each rollout the mean return of MEAN_OF of them, up to it."""
    import curves

    curve = run_dirs.read_metric(path, RETURN)
    curve.values = curves.running_mean(curve.values, curves.MEAN_OF)
    return curve


def measure(name: str, seed: int, options, progress) -> dict:
    """One run -> its numbers and its curve; ValueError says what went wrong."""
    stem = re.sub(r"\W+", "-", f"env-learning-{name}-seed-{seed}")
    log = options.out / "logs" / f"{stem}.log"
    command = [sys.executable, "plots/measure/env_learning.py", "--worker", name]
    command += ["--seed", str(seed), "--exp-name", stem]
    run = processes.run_and_read(command, log, progress, f"{name} round {seed}")
    result = processes.numbers(run, command)
    stages = run.stages["stages"]
    result["simulating"] = stages["simulation"] / run.stages["seconds"]
    curve = read_curve(run.path)
    result |= first_at(curve, SOLVED)
    return result | {"curve": [curve.seconds.tolist(), curve.values.tolist()]}


# Reduction


def summarize(results: list[dict], names: list[str]) -> list[dict]:
    references = {}
    for name in names:
        _, num_envs = arms()[name]
        references[name] = f"tensors, {num_envs:,}"
    others = ("simulating", "seconds", "steps")
    rows = rounds.summarize(results, "environments", "of_tensors", references, others)
    for row in rows:
        mine = [found[row["environments"]] for found in results if row["environments"] in found]
        row["solved"] = sum(result["seconds"] is not None for result in mine)
    return rows


def solved(row: dict) -> str:
    """Seconds, and of how many runs where not all have solved it."""
    found = row["seconds"]
    if not found:
        return "never"
    some = f", {row['solved']} of {row['runs']}" if row["solved"] < row["runs"] else ""
    return f"{found['median']:.1f} ({found['min']:.1f} to {found['max']:.1f}{some})"


def cells(rows: list[dict]) -> list[list[str]]:
    columns = {
        "of tensors": rounds.ratio("of_tensors"),
        "simulating": lambda row: f"{100 * row['simulating']['median']:.0f}%",
        f"seconds to {SOLVED}": solved,
        f"steps to {SOLVED}": lambda row: rounds.middle(row["steps"]),
    }
    return rounds.cells(rows, "environments", columns)


def draw(results: list[dict], stem: Path) -> None:
    """Return over seconds: a panel per number of environments, mean and deviation of each kind.

    A curve ends with the shortest of its runs.
    """
    import curves
    import env_report
    import matplotlib.pyplot as plt

    made = {name for found in results for name in found}
    numbers = [num_envs for num_envs in SETTINGS if made & arms([num_envs]).keys()]
    size = (4.6 * len(numbers) + 1.8, 3.8)
    figure, panels = plt.subplots(1, len(numbers), figsize=size, squeeze=False)
    figure.set_layout_engine("constrained")
    for ax, num_envs in zip(panels[0], numbers, strict=True):
        for name, (kind, _) in arms([num_envs]).items():
            runs = [found[name]["curve"] for found in results if name in found]
            if not runs:
                continue
            begin = max(seconds[0] for seconds, _ in runs)
            end = min(seconds[-1] for seconds, _ in runs)
            grid = np.linspace(begin, end, 200)
            values = np.array([np.interp(grid, *run) for run in runs])
            low, high = curves.band("std", values)
            colour = env_report.style(kind)["color"]
            ax.plot(grid, values.mean(0), color=colour, label=kind)
            ax.fill_between(grid, low, high.clip(max=500), color=colour, alpha=0.13, linewidth=0)
        ax.axhline(SOLVED, color="gray", linestyle=":", linewidth=1, label=f"solved: {SOLVED}")
        ax.set(title=f"{num_envs:,} environments", xlabel="seconds of training", ylim=(0, 510))
    panels[0][0].set_ylabel("return, mean of ten rollouts")
    panels[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    title = "CartPole: the same learner, other environments; mean and deviation over rounds"
    figure.suptitle(f"{title}: {len(results)}", fontsize=12)
    curves.save(figure, stem)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out", "--rounds", "--seed")
    parser.set_defaults(rounds=5)
    parser.add_argument("--worker", help="internal: one run")
    parser.add_argument("--exp-name", help="internal: of the worker")
    options = parser.parse_args(arguments)
    if options.worker:
        train(options.worker, options.seed, options.exp_name)
        return 0
    on_gpu = torch.cuda.is_available()
    names = list(arms(num_envs for num_envs in SETTINGS if num_envs <= 256 or on_gpu))
    options.steps = 1_000_000  # for the bar
    results, failures = rounds.take_turns(names, options, measure)
    rows = summarize(results, names)
    if any(results):
        draw(results, options.out / "env_learning")
    record = {
        "command": processes.call("env_learning.py", options, "rounds"),
        "rows": rows,
        "rounds": results,
        "failures": failures,
    }
    above = ["CartPole-v1, the same learner with environments of several kinds"]
    return rounds.report("env_learning", above, cells(rows), record, options)


if __name__ == "__main__":
    program.start(main)
