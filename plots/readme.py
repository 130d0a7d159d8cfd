"""Every number of README, from the records in plots/results/.

    python plots/readme.py          writes them into README.md
    python plots/readme.py --check  exit status 1 if README.md says something else

README has regions, `<!-- record: NAME -->` to `<!-- end -->`; the functions here of that NAME make
their text; rows that a record lacks are called not measured. A test runs --check, and another one
refuses numbers of speed outside of the regions. CleanRL's returns are its documentation's.
"""

import re
import statistics
import sys
from typing import NamedTuple

import numpy as np
import run_dirs
from run_dirs import ROOT, ROWS, as_markdown, processor, short, shown, with_range

RESULTS = ROOT / "plots/results"
REGION = re.compile(r"(<!-- record: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "not measured"
CLEANRL = "CleanRL {}, training, 1 M"  # docs.cleanrl.dev
LEARNED = [  # algorithm, records, what others have published
    ("SAC", ["sac_halfcheetah_300k"], CLEANRL.format("9,635 +- 1,424")),
    ("TD3", ["td3_halfcheetah_1m"], CLEANRL.format("9,583 +- 126")),
    ("PPO", ["ppo_halfcheetah_1m_baseline", "ppo_halfcheetah_1m"], CLEANRL.format("1,443 +- 46")),
    ("PPO for Atari", ["ppo_atari_pong"], ""),
    ("PPO on CartPoles", ["ppo_cartpole_learning"], "500 is the most"),
]
WORLDS = ("halfcheetah", "hopper", "walker2d", "ant", "humanoid")
PUBLISHED = {  # returns of SAC, TD3 and PPO after 1 M steps; the zoo's Humanoid after 2 M
    "CleanRL, v4": {
        "HalfCheetah-v5": "9,635 / 9,583 / 1,443",
        "Hopper-v5": "2,310 / 3,135 / 2,383",
        "Walker2d-v5": "3,591 / 4,058 / 2,288",
        "Humanoid-v5": "4,996 / 5,035 / 716",
    },
    "Stable-Baselines3's zoo, v3": {
        "HalfCheetah-v5": "9,535 / 9,656 / 5,819",
        "Hopper-v5": "2,326 / 3,606 / 2,410",
        "Walker2d-v5": "3,863 / 4,718 / 3,479",
        "Ant-v5": "4,616 / 5,813 / 1,327",
        "Humanoid-v5": "6,232 / 5,567 / -",
    },
    "FlashSAC, v4": {  # its paper's
        "HalfCheetah-v5": "14,465",
        "Hopper-v5": "4,064",
        "Walker2d-v5": "7,346",
        "Ant-v5": "7,590",
        "Humanoid-v5": "12,606",
    },
}


READ = []  # the records so far: what is lacking, the last one lacks


def record(name: str) -> dict:
    path = RESULTS / f"{name}.json"
    READ.append(path)
    try:
        return run_dirs.read_json(path)
    except ValueError as problem:
        raise SystemExit(f"error: {shown(RESULTS)} {problem}") from None


def where(machine: dict) -> str:
    """The hardware, and what else a speed depends on."""
    cpu = machine["cpu"]
    vectors = f", {cpu['vectors']}" if cpu.get("vectors") else ""
    place = machine["gpu"] or f"{processor(cpu)}{vectors}, no GPU"
    return f"{place}; Python {machine['python']}, torch {machine['versions']['torch']}"


def speedup() -> str:
    """The speed-up table, a line per pair of scripts."""
    found = record("speedup_cpu")
    rows = {(row["script"], row["row"]): row for row in found["rows"]}
    scripts = dict.fromkeys(script for script, _ in rows)
    heading = ["script", "baseline", "`--compile`", "`--cudagraphs`, alone and with it"]
    heading += ["overall", "warm-up s"]
    table = [heading]
    for script in sorted(scripts, key=lambda name: "gpu" in name):
        mine = {row: rows[script, row] for row in ROWS}
        speeds = {}
        for name, row in mine.items():
            if "sps_steady" in row:
                speeds[name] = with_range(row["sps_steady"])
        captured = [speeds[name] for name in speeds if "cudagraphs" in name]
        best = [row for row in mine.values() if "speedup" in row][-1]
        table.append(
            [
                f"`{script}`",
                speeds.get("baseline", NOT_MEASURED),
                speeds.get("compile", NOT_MEASURED),
                " ".join(captured) or NOT_MEASURED,
                f"**{best['speedup']:.2f}x**",
                f"{best['warmup_seconds']['first']:.1f}",
            ]
        )
    seeds = max(len(row["runs"]) for row in rows.values() if "runs" in row)
    said = f"Environment steps/s after the warm-up, in quick runs, seeds per row: {seeds}, on "
    said += f"{where(found['machine'])} (`speedup_cpu.md`)."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def field() -> str:
    """Against other libraries, a line per algorithm."""
    heading = ["algorithm", "Stable-Baselines3", "SBX (JAX)", "baseline", "variant"]
    table = [[*heading, "`--compile`", "of Stable-Baselines3", "of SBX", "rounds"]]
    titles = {"sac": "SAC", "td3": "TD3", "ppo": "PPO", "ppo_atari": "PPO for Atari"}
    titles |= {"ppo_mujoco": "PPO, 64 worlds against 1", "ppo_mujoco_64": "PPO, 64 worlds each"}
    for name, title in titles.items():
        found = record(f"{name}_field_cpu")
        rows = {row["entrant"]: row for row in found["rows"]}
        ours = [row for name, row in rows.items() if "LeanRL" in name]
        best = max(ours, key=lambda row: row["ratio_to_sb3"])
        fastest = best["entrant"]
        line = [title]
        for entrant in ("Stable-Baselines3", "SBX", "LeanRL baseline", "LeanRL eager", fastest):
            known = entrant in rows
            line.append(with_range(rows[entrant]["sps_steady"], "median") if known else "-")
        of_sbx = []
        for turn in found["rounds"]:
            if "SBX" in turn:
                of_sbx.append(turn[fastest]["sps_steady"] / turn["SBX"]["sps_steady"])
        line.append(f"**{best['ratio_to_sb3']:.2f}x**")
        line.append(f"{statistics.median(of_sbx):.2f}x" if of_sbx else "-")
        line.append(str(len(found["rounds"])))
        table.append(line)
    said = "Environment steps/s, and ratios of the same round: medians (and ranges) over rounds in "
    said += "turns (`*_field_cpu.md`; `bash run.sh field --algorithm td3` makes one). Atari "
    said += "with `--channels-last`, and its Stable-Baselines3 on that library's own environments."
    found = record("sac_mujoco_field_cpu")
    returns = [f"{row['entrant']}: {short(row['return']['median'])}" for row in found["rows"]]
    minutes = found["command"].split()[-1]
    threads = found["machine"]["cpu"]["threads"]
    said += f" What SAC has learned on HalfCheetah after {minutes} minutes, evaluated, threads: "
    said += f"{threads}, seeds: {len(found['rounds'])}, each with its own defaults, which matter "
    said += f"as much as speed: {'; '.join(returns)}."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def ablated(algorithm: str) -> list[tuple]:
    """(speed without the trick, its name, microseconds that it saves) of a record of ablations.

    A trick counts that was worth something in every round; the others are called noise.
    """
    found = []
    for line in record(f"{algorithm}_ablation_cpu")["rows"]:
        if "of_whole" in line and line["worth_us"]["max"]:  # not the script with all tricks
            worth = line["worth_us"]
            told = f"{worth['median']:,.0f}" if worth["min"] > 0 else "noise"
            found.append((line["of_whole"], line["without"], told))
    return found


def tricks() -> str:
    """What the variants lose without one trick, the most valuable first; a tenth or more."""
    rows = []
    for algorithm in ("ppo", "td3", "sac"):
        for of_whole, name, worth in ablated(algorithm):
            if worth != "noise" and of_whole <= 0.9:
                rows.append((of_whole, [name, algorithm.upper(), f"{of_whole:.2f}x", worth]))
    table = [["trick", "script", "speed without it", "us per step"]]
    table += [cells for _, cells in sorted(rows)]
    return f"{as_markdown(table, labels=2)}\n"


def changes() -> str:
    """What changes of SAC on worlds are worth."""
    found = record("sac_mujoco_ablation_cpu")
    length = found["runs"][0]["minutes"]
    said = f"Return after {length} minutes, mean of the second half of the evaluations, and "
    said += (
        "updates, before rewards were scaled (`sac_mujoco_ablation_cpu.md`). Residual blocks, a "
    )
    said += "categorical critic and 3 steps had been far behind (`sac_mujoco_screening_cpu.md`)."
    return f"{as_markdown(found['table'], labels=1)}\n\n{said}\n"


def physics() -> str:
    """Steps/s of MuJoCo's worlds alone, beside EnvPool's."""
    found = record("physics_cpu")
    table = [["task", "worlds", "cores", "physics", "whole step", "EnvPool", "of EnvPool"]]
    for row in found["rows"]:
        line = [row["task"], f"{row['worlds']:,}", str(row["cores"])]
        for arm in ("physics", "whole step", "EnvPool"):
            line.append(short(row["steps_per_second"][arm]["median"]))
        table.append([*line, f"{row['ratio']['EnvPool']:.2f}x"])
    said = f"Environment steps/s on {where(found['machine'])} (`physics_cpu.md`)."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def overhead() -> str:
    """The least and the largest bias of the stopwatch over all scripts."""
    rows = record("overhead_cpu")["rows"]
    means = [row["bias"]["mean"] for row in rows]
    said = f"{min(means):+.1%} to {max(means):+.1%} of a step, means of {len(rows)} rows, "
    return f"{said}where a single pair differs by more (`overhead_cpu.md`).\n"


def learning() -> str:
    """What was learned, by baseline and variant, and the minutes of a run."""
    heading = ["environment", "algorithm", "steps", "baseline", "minutes", "variant", "minutes"]
    table = [[*heading, "elsewhere"]]
    for algorithm, names, elsewhere in LEARNED:
        runs = []
        for name in names:
            runs += map(reached, record(f"{name}_cpu")["runs"])
        steps = runs[0].steps
        line = [runs[0].env_id, algorithm, f"{steps:,}"]
        for variant in (False, True):
            of_one = [run for run in runs if run.variant == variant]
            line += learned(of_one, steps) if of_one else ["-", "-"]
        table.append([*line, elsewhere])
    return f"{as_markdown(table, labels=2)}\n"


def worlds() -> str:
    """What PPO on worlds learns in minutes of a core, beside what others have published."""
    heading = ["environment", "flags", "steps", "minutes", "after 5 minutes", "at the end"]
    table = [[*heading, *PUBLISHED]]
    for name in WORLDS:
        runs = record(f"ppo_mujoco_{name}_cpu")["runs"]
        args = runs[0]["config"]["args"]
        env_id = args["env_id"]
        flags = []
        for flag in ("num_steps", "desired_kl"):
            if f"--{flag.replace('_', '-')} " in runs[0]["config"]["command"]:
                flags.append(f"`--{flag.replace('_', '-')} {args[flag]}`")
        early = []
        last = []
        for run in runs:
            evaluated = run["eval_returns"]
            before = [value for _, value, seconds in evaluated if seconds <= 300]
            early.append(short(before[-1]) if before else "-")
            last.append(short(evaluated[-1][1]))
        minutes = sorted(round(run["stages"]["wall_seconds"] / 60) for run in runs)
        low, high = minutes[0], minutes[-1]
        table.append(
            [
                env_id,
                " ".join(flags) or "-",
                f"{runs[0]['eval_returns'][-1][0]:,}",
                f"{low} to {high}" if low < high else str(low),
                ", ".join(early),
                ", ".join(last),
                *(returns.get(env_id, "-") for returns in PUBLISHED.values()),
            ]
        )
    return f"{as_markdown(table, labels=2)}\n"


def race() -> str:
    """What each has learned after minutes of a core."""
    found = record("race_cpu")
    last = found["runs"][-1]
    said = (
        f"Minutes are of processor time, all counted but evaluations, on {where(last['machine'])} "
    )
    said += "(`race_cpu.md`)."
    return f"{as_markdown(found['table'], labels=2)}\n\n{said}\n"


class Reached(NamedTuple):
    """What is told of a run."""

    env_id: str
    variant: bool
    steps: int
    evaluated: float | None  # the last return of an evaluation
    trained: float  # the mean of the last episodes in training
    minutes: int
    made: float  # steps in these minutes: of a run that was resumed there is only the first part


def reached(run: dict) -> Reached:
    args = run["config"]["args"]
    evaluated = run.get("eval_returns")
    steps, *_ = (evaluated or run["episodic_returns"])[-1]
    part = run["stages"]
    seconds = part["wall_seconds"]
    return Reached(
        env_id=str(args["env_id"]),
        variant="compile" in args,
        steps=steps,
        evaluated=float(evaluated[-1][1]) if evaluated else None,
        trained=float(run["mean_return_last_10"]),
        minutes=round(seconds / 60),
        made=seconds * (part["sps"] if "sps" in part else part["sps_inclusive"]),  # the oldest
    )


def learned(runs: list[Reached], steps: int) -> list[str]:
    """Returns after so many steps, from five runs on their mean and its 95% interval; minutes."""
    from curves import bootstrap

    evaluated = None not in [run.evaluated for run in runs]
    ends = [run.evaluated if evaluated else run.trained for run in runs]
    minutes = [run.minutes for run in runs]
    whole = all(run.made > 0.99 * steps for run in runs)
    said = ", ".join(map(short, ends))
    if len(ends) >= 5:
        low, high = bootstrap(np.array(ends)[:, None])
        said = f"{short(np.mean(ends))} ({short(*low)} to {short(*high)}), runs: {len(ends)}"
    took = " to ".join(map(str, sorted({min(minutes), max(minutes)}))) if whole else "-"
    return [said if evaluated else f"{said} in training", took]


def environments() -> str:
    """Steps/s of environments alone."""
    import env_report

    found = record("env_scaling_cpu")
    shown = [1, 64, 4096, 65_536, 1_048_576]
    table = [["environments", *(f"{n:,}" for n in shown), "turning point"]]
    for arm in env_report.arms(found["rows"]):
        seconds = env_report.medians(found["rows"], arm)
        fit = env_report.turning_point(seconds)
        turning = env_report.describe_turning(fit, seconds) if fit else "-"
        table.append([arm, *env_report.speeds(seconds, shown), turning])
    most = found["bytes_per_second"]["cpu"] / env_report.STEP_BYTES
    said = f"Memory allows {env_report.short(most)} steps/s; processes end at 32."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def devices() -> str:
    """Acting and learning at the same time, against in turns."""
    found = record("devices_continuous_cpu")
    heading = ["", "steps/s", "against in turns", "return", "learner waits", "collector waits"]
    table = [heading]
    names = {
        "baseline": "in turns, baseline",
        "baseline (asynchronous)": "at the same time, baseline",
        "variant": "in turns, variant",
        "variant (asynchronous)": "at the same time, variant",
        "variant (two processes, in turns)": "in turns, variant, in two processes (`--sync`)",
    }
    for row in found["rows"]:
        line = [names[row["row"]], with_range(row["sps_steady"], "median")]
        line += [f"{row['of_first']:.2f}x", with_range(row["return"])]
        for waits in (row["learner_waits"], row["collector_waits"]):
            line.append(f"{100 * waits['median']:.0f}%" if waits else "-")
        table.append(line)
    rounds = found["rounds"]
    steps = rounds[0]["variant"]["config"]["args"]["total_timesteps"]
    said = f"HalfCheetah-v5, {steps:,} steps, {len(rounds)} rounds on "
    said += f"{where(found['machine'])}: median and range of steps/s, mean and range of the last "
    said += "10 episodes' mean return (`devices_continuous_cpu.md`, "
    said += "`python plots/measure/devices.py`)."
    return f"{as_markdown(table, labels=1)}\n\n{said} On a GPU: {NOT_MEASURED}.\n"


FUNCTIONS = (race, speedup, field, learning, worlds, tricks, overhead, environments)
FUNCTIONS += (devices, changes, physics)
REGIONS = {function.__name__: function for function in FUNCTIONS}


def filled(text: str) -> str:
    """`text` with each region made anew; KeyError for an unknown name."""
    return REGION.sub(lambda match: match[1] + REGIONS[match[2]]() + match[4], text)


def main(arguments: list[str] | None = None) -> int:
    parser = run_dirs.make_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    path = ROOT / "README.md"
    text = path.read_text()
    try:
        new = filled(text)
    except run_dirs.DAMAGED as problem:
        raise SystemExit(f"error: {shown(READ[-1])} lacks something: {problem!r}") from None
    if options.check:
        if new != text:
            print("README.md differs from the records: python plots/readme.py", file=sys.stderr)
        return int(new != text)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    run_dirs.start(main)
