"""How the speed of SAC changes with the width of its networks, its batches and its environments.

    python plots/measure/growth.py                      33 runs, about half an hour
    python plots/measure/growth.py --only 'width*'      one of the three

HalfCheetah-v5, one update per step of all environments: Stable-Baselines3 (in .venv-field, which
`bash run.sh field` makes), our baseline and the variant with --compile. All have two hidden layers
of 256, batches of 256 and one environment, but for what the row names. One process at a time, each
on one core with one thread. The larger the products, the fewer updates: from 1,500 to 94.

    steps/s         environment steps, median over the rounds, from the hundredth update to the end
    compile pays    speed with --compile / that of the baseline in the same round, median

Written to plots/out/: growth.md, .json, a figure, and logs/. Exit status 1 if a run failed.
"""

import argparse
import fnmatch
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import field
import processes
import rounds
import run_dirs

AXES = {
    "width": (64, 128, 256, 512, 1024),
    "batch": (64, 256, 1024, 4096),
    "environments": (1, 4, 16, 64),
}
USUAL = {"width": 256, "batch": 256, "environments": 1}
ENTRANTS = ("Stable-Baselines3", "baseline", "compile")
STARTS, WARM = 256, 100  # steps of all environments: at random, then until the window opens


def name_of(entrant: str, axis: str, number: int) -> str:
    """The point that all axes share has one name."""
    return entrant if number == USUAL[axis] else f"{entrant}, {axis} {number:,}"


def points(only: str) -> dict[str, dict]:
    """What runs: name -> width, batch and environments, with the entrant."""
    found = {}
    for axis, numbers in AXES.items():
        for number in numbers:
            if not fnmatch.fnmatch(f"{axis} {number}", only):
                continue
            for entrant in ENTRANTS:
                point = {**USUAL, axis: number, "entrant": entrant}
                found[name_of(entrant, axis, number)] = point
    return found


def length(point: dict) -> int:
    """Environment steps of a run."""
    products = point["width"] ** 2 * point["batch"] / 256**3
    return point["environments"] * (STARTS + WARM + round(min(1500 / products, 1500)))


def work(point: dict, seed: int) -> None:
    """The worker: trains once."""
    width = point["width"]
    batch = point["batch"]
    num_envs = point["environments"]
    starts = STARTS * num_envs
    if point["entrant"] == "Stable-Baselines3":
        theirs = {"learning_starts": starts, "batch_size": batch}
        theirs["policy_kwargs"] = {"net_arch": [width, width]}
        after = (STARTS + WARM) * num_envs
        settings = replace(field.OFF_POLICY, theirs=theirs, steady_after=after, num_envs=num_envs)
        field.ALGORITHMS["sac"] = settings
        told = {"worker": "stable_baselines3", "algorithm": "sac", "steps": length(point)}
        told["cores"] = 1
        field.work(argparse.Namespace(seed=seed, **told))
        return
    suffix = ""
    flags = {}
    if point["entrant"] == "compile":
        suffix = run_dirs.VARIANT
        flags["compile"] = True
    module = importlib.import_module(f"leanrl.sac_continuous_action{suffix}")
    nn = module.nn

    def mlp(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    module.mlp = mlp
    module.STEADY_AFTER = WARM // 2  # of each kind: every second update is one of the policy
    args = module.Args(
        exp_name="growth",
        seed=seed,
        total_timesteps=length(point),
        learning_starts=starts,
        batch_size=batch,
        torch_threads=1,
        num_envs=num_envs,
        utd_ratio=1 / num_envs,
        **flags,
    )
    module.main(args)


def measure(name: str, seed: int, options: argparse.Namespace, progress) -> dict:
    """One run -> its numbers; ValueError says what went wrong."""
    point = points("*")[name]
    theirs = point["entrant"] == "Stable-Baselines3"
    python = options.field_python if theirs else sys.executable
    command = [*processes.on_cores(1), python, "plots/measure/growth.py", "--worker", name]
    command += ["--seed", str(seed)]
    log = options.out / "logs" / f"growth-{name.replace(' ', '-')}-seed-{seed}.log"
    what = f"{name} round {seed}"
    if theirs:
        return field.run_library(command, log, progress, what)
    return processes.numbers(processes.run_and_read(command, log, progress, what), command)


def summarize(results: list[dict], names: list[str]) -> list[dict]:
    """A row per run; `ratio` is --compile / the baseline."""
    references = {name: name.replace("compile", "baseline") for name in names}
    return rounds.summarize(results, "run", "ratio", references)


def cells(rows: list[dict]) -> list[list[str]]:
    """A line per axis and number."""
    found = {row["run"]: row for row in rows if "skipped" not in row}
    heading = [""]
    heading += [f"{entrant} steps/s" for entrant in ENTRANTS]
    table = [[*heading, "compile pays"]]
    for axis, numbers in AXES.items():
        for number in numbers:
            mine = [found.get(name_of(entrant, axis, number)) for entrant in ENTRANTS]
            if not any(mine):
                continue
            line = [f"{axis} {number:,}"]
            for row in mine:
                line.append(rounds.middle(row["sps_steady"]) if row else "-")
            compiled = mine[-1]
            line.append(rounds.ratio("ratio")(compiled) if compiled else "-")
            table.append(line)
    return table


def draw(rows: list[dict], stem: Path) -> None:
    """A panel per axis."""
    import curves
    import matplotlib.pyplot as plt

    found = {row["run"]: row for row in rows if "skipped" not in row}
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True, layout="constrained")
    labels = {"width": "units per hidden layer", "batch": "transitions per batch"}
    for ax, (axis, numbers) in zip(panels, AXES.items(), strict=True):
        for entrant in ENTRANTS:
            speeds = {}
            for number in numbers:
                row = found.get(name_of(entrant, axis, number))
                if row:
                    speeds[number] = row["sps_steady"]["median"]
            colour = curves.COLOURS[entrant]
            ax.plot(speeds.keys(), speeds.values(), "o-", color=colour, label=entrant)
        ax.set(xscale="log", yscale="log", xlabel=labels.get(axis, axis))
        ax.set_xticks(numbers, [f"{number:,}" for number in numbers])
        ax.minorticks_off()
    panels[0].set_ylabel("environment steps per second")
    panels[0].legend(frameon=False)
    curves.save(figure, stem)


def main(arguments: list[str] | None = None) -> int:
    parser = run_dirs.make_parser(__doc__, "--out", "--rounds", "--seed", "--field-python")
    parser.set_defaults(rounds=1)
    parser.add_argument("--only", default="*", metavar="GLOB", help="as 'batch 1024'")
    parser.add_argument("--worker", help="internal: one run")
    options = parser.parse_args(arguments)
    if options.worker:
        work(points("*")[options.worker], options.seed)
        return 0
    names = list(points(options.only))
    if not names:
        parser.error(f"--only {options.only}: there is no such run")
    processes.check_field(parser, options, "field")
    options.steps = STARTS + WARM + 1500  # for the bar
    results, failures = rounds.take_turns(names, options, measure)
    rows = summarize(results, names)
    command = processes.call("growth.py", options, "only", "rounds")
    table = cells(rows)
    record = {
        "command": command,
        "table": table,
        "rows": rows,
        "rounds": results,
        "failures": failures,
    }
    draw(rows, options.out / "growth")
    return rounds.report("growth", ["Growth", "HalfCheetah-v5"], table, record, options)


if __name__ == "__main__":
    run_dirs.start(main)
