"""Every number of README, from the records in plots/results/.

    python plots/readme.py          writes them into README.md
    python plots/readme.py --check  exit status 1 if README.md says something else

README has regions, `<!-- record: NAME -->` to `<!-- end -->`; the functions here of that NAME make
their text; what a record lacks is called not measured, or is a dash. A test runs --check, and
another one refuses numbers of speed outside of the regions. CleanRL's returns are its
documentation's.
"""

import re
import statistics
import sys
from typing import NamedTuple

import numpy as np
import run_dirs
from run_dirs import ROOT, as_markdown, in_units, processor, short, shown, with_range

RESULTS = ROOT / "plots/results"
REGION = re.compile(r"(<!-- record: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "not measured"
CLEANRL = "CleanRL {}, training, 1 M"  # docs.cleanrl.dev
LEARNED = [  # algorithm, records, what others have published
    ("SAC", ["sac_halfcheetah_300k"], CLEANRL.format("9,635 +- 1,424")),
    ("TD3", ["td3_halfcheetah_1m"], CLEANRL.format("9,583 +- 126")),
    ("PPO", ["ppo_halfcheetah_1m_baseline", "ppo_halfcheetah_1m"], CLEANRL.format("1,443 +- 46")),
    ("PPO for Atari", ["ppo_atari_pong"], "21 is the most"),
    ("PQN", ["pqn_atari_pong"], "21 is the most"),
    ("PPO for Atari", ["ppo_atari_breakout"], "-"),
    ("PQN", ["pqn_atari_breakout"], "-"),
    ("PPO on CartPoles", ["ppo_cartpole_learning"], "500 is the most"),
]
WORLDS = ("halfcheetah", "hopper", "walker2d", "ant", "humanoid")
PUBLISHED = {  # returns of SAC, TD3 and PPO after 1 M steps; the zoo's Humanoid after 2 M
    "CleanRL's SAC / TD3 / PPO in training, v4": {
        "HalfCheetah-v5": "9,635 / 9,583 / 1,443",
        "Hopper-v5": "2,310 / 3,135 / 2,383",
        "Walker2d-v5": "3,591 / 4,058 / 2,288",
        "Humanoid-v5": "4,996 / 5,035 / 716",
    },
    "the zoo's SAC / TD3 / PPO, v3": {
        "HalfCheetah-v5": "9,535 / 9,656 / 5,819",
        "Hopper-v5": "2,326 / 3,606 / 2,410",
        "Walker2d-v5": "3,863 / 4,718 / 3,479",
        "Ant-v5": "4,616 / 5,813 / 1,327",
        "Humanoid-v5": "6,232 / 5,567 / -",
    },
    "[FlashSAC](https://arxiv.org/abs/2604.04539), v4": {
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
    place = f"{processor(cpu)}{vectors}, {machine['gpu'] or 'no GPU'}"
    return f"{place}; Python {machine['python']}, torch {machine['versions']['torch']}"


def speedup() -> str:
    """The speed-up table, a line per pair of scripts; what another day said stands beside it."""
    other = {}
    earlier = record("speedup_earlier_cpu")
    vectors = earlier["machine"]["cpu"]["vectors"]
    for row in earlier["rows"]:
        if row.get("speedup"):
            other[row["script"], row["row"]] = f"{row['speedup']:.2f}x"
    found = record("speedup_cpu")
    rows = {(row["script"], row["row"]): row for row in found["rows"]}
    scripts = dict.fromkeys(script for script, _ in rows)
    table = [["script", "baseline", "`--compile`", "speed-up", "speed-up earlier", "warm-up s"]]
    for script in sorted(scripts, key=lambda name: "gpu" in name or "worlds" in name):
        baseline, best = rows[script, "baseline"], rows[script, "compile"]
        table.append(
            [
                f"`{script}`",
                with_range(baseline["sps_steady"]),
                with_range(best["sps_steady"]),
                f"**{best['speedup']:.2f}x**",
                other.get((script, best["row"]), NOT_MEASURED),
                f"{best['warmup_seconds']['first']:.1f}",
            ]
        )
    seeds = max(len(row["runs"]) for row in rows.values() if "runs" in row)
    said = "Environment steps/s after the warm-up, all but CartPole's on HalfCheetah-v5, seeds per "
    said += f"row: {seeds}, on {where(found['machine'])} (`speedup_cpu.md`); earlier: on a "
    said += f"slower day, {vectors}, by the scripts of that day (`speedup_earlier_cpu.md`); "
    said += "warm-up: of the first run."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def worlds_on_gpu() -> tuple[dict, int, float]:
    """The run of PPO on HalfCheetahs on a GPU, and the seconds until it was at the race's level."""
    rows = record("race_cpu")["rows"]
    level = next(row["level"] for row in rows if row["task"] == "HalfCheetah-v5")
    (run,) = record("ppo_mujoco_halfcheetah_h200")["runs"]
    seconds = next(seconds for _, value, seconds in run["episodic_returns"] if value >= level)
    return run, level, seconds


def gpu() -> str:
    """The speed-up table of a GPU, and the share of the time that it is busy."""
    captured = "compile+cudagraphs"
    unknown = "-"
    rows: dict = {}
    found = record("speedup_h200")
    for row in found["rows"]:
        rows.setdefault(row["script"], {})[row["row"]] = row
    former = {}
    for row in record("speedup_earlier_h200")["rows"]:
        if row.get("speedup"):
            former[row["script"], row["row"]] = row
    windows = {}
    busy = {}
    for row in record("utilization_h200")["rows"]:
        if row["script"] in rows:
            windows[row["script"], row["row"]] = row["window"]
        if "GPU" in row:
            busy[row["script"], row["row"]] = f"{row['GPU']['mean']:.0f}%"
    table = [["script", "baseline", "`--compile --cudagraphs`", "speed-up", "warm-up s"]]
    table[0] += ["speed-up earlier: `--compile`", "and `--cudagraphs`"]
    table[0] += ["GPU busy: baseline", "captured"]
    for script in dict.fromkeys([*rows, *(script for script, _ in former)]):
        cells = [unknown] * 4
        if script in rows:
            slow, fast = rows[script]["baseline"], rows[script][captured]
            cells = [in_units(row["sps_steady"]["mean"]) for row in (slow, fast)]
            cells.append(f"**{fast['speedup']:.1f}x**")
            cells.append(f"{fast['warmup_seconds']['first']:.0f}")
        for row in ("compile", captured):
            then = former.get((script, row))
            cells.append(f"{then['speedup']:.1f}x" if then else unknown)
        for row in ("baseline", captured):
            cells.append(busy.get((script, row), unknown))
        table.append([f"`{script}`", *cells])
    worlds, level, arrived = worlds_on_gpu()
    (peer,) = record("leanrl_h200")["rows"]
    steps, seconds = np.ptp(peer["points"], axis=0)
    before = former["sac_continuous_action", captured]["sps_steady"]["mean"]
    ours = former["td3_continuous_action", captured]["sps_steady"]["mean"]
    said = f"""Environment steps/s after the warm-up, one run each with a window of
    {min(windows.values()):.0f} to {max(windows.values()):.0f} s, on {where(found["machine"])}
    (`speedup_h200.md`). Earlier: by former scripts, PPO's baseline while files were unpacked
    on other cores (`speedup_earlier_h200.md`); Atari's busy time is of then, too. Captured SAC made
    {short(before)} then; why it made less now was not examined. The warm-up is of the captured run,
    with an empty cache but for worlds. Busy: NVML, every second. {unknown}: not measured, or by
    fewer than three samples. Worlds are 4,096 of mujoco_warp, on a second H200, SAC's with
    `--utd-ratio 0.001 --batch-size 8192`, its baseline ended after a window of
    {windows["sac_mujoco_worlds", "baseline"]:.1f} s. PPO returned {level:,} in training
    {arrived:.0f} s after its start and {short(worlds["mean_return_last_10"])} after
    {in_units(worlds["episodic_returns"][-1][0])} steps and
    {worlds["stages"]["wall_seconds"]:.0f} s, imports not counted, kernels and compiled code cached
    (`ppo_mujoco_halfcheetah_h200.json`). Meta's LeanRL, on the earlier day: its TD3 made
    {short(steps / seconds)} on HalfCheetah-v4, ours {short(ours)} on v5; with NumPy 2.5 and
    tensordict 0.6.2 its SAC ended in an error, and its PPO had logged nothing after 150 s
    (`leanrl_h200.json`)."""
    return f"{as_markdown(table, labels=1)}\n\n{' '.join(said.split())}\n"


FIELD = {  # algorithm -> records: of two machines where there are two
    "SAC": ["sac_field_fast_cpu", "sac_field_awake_cpu"],  # the fastest machine, the slowest
    "TD3": ["td3_field_cpu", "td3_field_avx2_cpu"],
    "PPO": ["ppo_field_cpu"],
    "PPO for Atari": ["ppo_atari_field_cpu"],
    "PPO for Atari, 64 environments": ["ppo_atari_64_field_cpu"],
    "PQN for Atari": ["pqn_atari_field_cpu"],
    "PPO, 64 worlds against 1": ["ppo_mujoco_field_cpu"],
    "PPO, 64 worlds each": ["ppo_mujoco_64_field_cpu"],
}


def against_others(title: str, found: dict, compiled: str) -> list[str]:
    """A line of a field benchmark: speeds, and how many times the others' `compiled` has."""
    speeds = {row["entrant"]: short(row["sps_steady"]["median"]) for row in found["rows"]}
    other = found["rows"][0]["entrant"]
    line = [title, found["machine"]["cpu"]["vectors"]]
    for entrant in (other, "SBX", "LeanRL baseline", compiled):
        line.append(speeds.get(entrant, "-"))
    if other == "CleanRL":
        line[2] += " (CleanRL)"
    for library in (other, "SBX"):
        line.append(times_as_fast(found["rounds"], compiled, library))
    return [*line, str(len(found["rounds"]))]


def field() -> str:
    """Against other libraries: a line per record, or two."""
    heading = ["algorithm", "vectors", "Stable-Baselines3", "SBX (JAX)", "baseline", "`--compile`"]
    table = [[*heading, "against Stable-Baselines3", "against SBX", "rounds"]]
    for title, names in FIELD.items():
        for name in names:
            found = record(name)
            entrants = [row["entrant"] for row in found["rows"]]
            compiled = "LeanRL compile"
            if f"{compiled}, channels last" in entrants:
                compiled += ", channels last"
            awake = f"{compiled}, threads awake"
            if awake in entrants:
                table.append(against_others(f"{title}, threads asleep", found, compiled))
                table.append(against_others(f"{title}, threads awake", found, awake))
            else:
                table.append(against_others(title, found, compiled))
    said = "Environment steps/s on HalfCheetah-v5 or Breakout-v5, and ratios of the same round: "
    said += "medians (and ranges) over rounds in turns (`*_field*_cpu.md`; "
    said += "`bash run.sh field --algorithm td3` makes one). Atari "
    said += "with `--channels-last`, its Stable-Baselines3 on that library's own environments; PQN "
    said += "against CleanRL's file. SAC and TD3 on AVX2, Atari and PQN are of former "
    said += "scripts, whose threads slept while they waited, unless the line says awake. Only our "
    said += "PPO normalizes what it sees. Against one environment PPO on worlds makes a twentieth "
    said += "of the updates per step: each has its defaults. Against 64 it makes as many, but "
    said += "Stable-Baselines3 steps them one after the other, ours are on both cores."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def times_as_fast(rounds: list[dict], name: str, other: str) -> str:
    """How many times the other's steps/s of the same round: median and range, or a dash."""
    ratios = []
    for turn in rounds:
        if other in turn:
            ratios.append(turn[name]["sps_steady"] / turn[other]["sps_steady"])
    if not ratios:
        return "-"
    return f"**{statistics.median(ratios):.2f}x** ({min(ratios):.2f} to {max(ratios):.2f})"


def physics() -> str:
    """Whole steps/s of MuJoCo's worlds without a policy, beside EnvPool's."""
    found = record("physics_cpu")
    rows = {(row["task"], row["worlds"], row["cores"]): row for row in found["rows"]}
    table = [["task", "worlds"]]
    for cores in (1, 2):
        counted = "1 core" if cores == 1 else f"{cores} cores"
        table[0] += [f"{counted}: ours", "EnvPool", "against EnvPool"]
    for task, worlds in dict.fromkeys(key[:2] for key in rows):
        line = [task, f"{worlds:,}"]
        for cores in (1, 2):
            row = rows[task, worlds, cores]
            for arm in ("whole step", "EnvPool"):
                line.append(short(row["steps_per_second"][arm]["median"]))
            line.append(f"{row['of_envpool']:.2f}x")
        table.append(line)
    said = "Environment steps/s in blocks of 64 steps of all worlds, from the start of episodes, "
    said += f"on {where(found['machine'])} (`physics_cpu.md`)."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def overhead() -> str:
    """The bias of the stopwatch in each script that was measured."""
    told = []
    for row in record("overhead_cpu")["rows"]:
        bias = row["bias"]
        told.append(
            f"`{row['script']}` {bias['mean']:+.1%} ({bias['min']:+.1%} to {bias['max']:+.1%})"
        )
    said = "Of a step of compiled scripts on a CPU, means (and ranges) of pairs of runs: "
    return f"{said}{', '.join(told)} (`overhead_cpu.md`).\n"


def learning() -> str:
    """What was learned, by baseline and variant."""
    table = [["environment", "algorithm", "steps", "baseline", "variant", "elsewhere"]]
    for algorithm, names, elsewhere in LEARNED:
        runs = []
        for name in names:
            runs += map(reached, record(f"{name}_cpu")["runs"])
        ends = [run.steps for run in runs]
        said = " to ".join(f"{end:,}" for end in sorted({min(ends), max(ends)}))
        line = [runs[0].env_id, algorithm, said]
        for variant in (False, True):
            of_one = [run for run in runs if run.variant == variant]
            line.append(learned(of_one) if of_one else "-")
        table.append([*line, elsewhere])
    return f"{as_markdown(table, labels=2)}\n"


def worlds() -> str:
    """What PPO on worlds learns in minutes of a core, beside what others have published."""
    heading = ["environment", "flags", "steps", "minutes", "by 5 minutes", "at the end"]
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
                " / ".join(early),
                " / ".join(last),
                *(returns.get(env_id, "-") for returns in PUBLISHED.values()),
            ]
        )
    return f"{as_markdown(table, labels=2)}\n"


def race() -> str:
    """What each has learned after minutes of a core: a line per entrant, columns per task."""
    found = record("race_cpu")
    rows = {(row["entrant"], row["task"]): row for row in found["rows"]}
    levels = {row["task"]: row["level"] for row in found["rows"]}
    arrivals = {}  # the last cell without the level: "8,000: 3.0"
    for task, entrant, *_, last in found["table"]:
        arrivals[task, entrant] = last.partition(": ")[2]
    columns = [name for name in found["rows"][0] if name.startswith("after")]
    minutes = [re.sub(r"\D", "", column) for column in columns]
    heading = ["entrant", "processor", "steps of a run"]
    for task in levels:
        heading += [f"{task} after {' / '.join(minutes)}", f"minutes to {levels[task]:,}"]
    table = [heading]
    for entrant in dict.fromkeys(row["entrant"] for row in found["rows"]):
        vectors = set()
        for row in found["rows"]:
            if row["entrant"] == entrant:
                vectors |= {*row["processor"].split(", ")}
        mine = [run for run in found["runs"] if run["entrant"] == entrant]
        longest = max(run["minutes"] for run in mine)
        ends = [run["evaluations"][-1] for run in mine if run["minutes"] == longest]
        steps = sorted(made for _, made, _ in ends)
        line = [entrant, ", ".join(sorted(vectors, reverse=True))]
        line.append(" to ".join(dict.fromkeys([in_units(steps[0]), in_units(steps[-1])])))
        for task in levels:
            row = rows.get((entrant, task))
            if row is None:
                line += ["-", "-"]
                continue
            means = [row[column]["mean"] if row[column] else None for column in columns]
            line.append(" / ".join("-" if mean is None else short(mean) for mean in means))
            line.append(arrivals[task, entrant])
        table.append(line)
    vectors = dict.fromkeys(run["machine"]["cpu"]["vectors"] for run in found["runs"])
    last = found["runs"][-1]["machine"]
    machine = where(last | {"cpu": last["cpu"] | {"vectors": " or ".join(vectors)}})
    seeds = sorted({row["seeds"] for row in found["rows"]})
    first = rows["PPO on worlds", "HalfCheetah-v5"]
    title = f"On one core, without a GPU, PPO on worlds reaches a return of {first['level']:,} on "
    title += f"HalfCheetah after {statistics.fmean(first['reached']):.1f} minutes"
    theirs = [rows[name, "HalfCheetah-v5"] for name in ("zoo's PPO", "zoo's SAC", "SBX TQC")]
    if not any(row["reached"] for row in theirs):
        title += f"; Stable-Baselines3's PPO and SAC and SBX's TQC do not in {minutes[-1]}"
    title += ". Compilation counts, evaluations do not. "
    _, _, arrived = worlds_on_gpu()
    title += "[On an H200](#speed), with everything compiled before and imports not counted, one "
    title += f"run on 4,096 worlds returned as much in training after {arrived:.0f} seconds."
    said = f"Returns: means of {' or '.join(map(str, seeds))} seeds; minutes to a level: to the "
    said += "first evaluation there, one in every minute or two; steps: of all worlds. Our PPO's "
    said += "steps are used up long before: its line is flat after the dot. Speed depends "
    said += "on the processor and the day. With AVX2, which is slower, ran the second seeds of "
    said += "worlds, one of SAC on Humanoid, and there the second ones of zoo's SAC and SBX TQC. "
    said += f"On {machine} (`race_cpu.md`, with ranges)."
    return f"{title}\n\n{as_markdown(table, labels=2)}\n\n{said}\n"


class Reached(NamedTuple):
    """What is told of a run."""

    env_id: str
    variant: bool
    steps: int
    evaluated: float | None  # the last return of an evaluation
    trained: float  # the mean of the last episodes in training


def reached(run: dict) -> Reached:
    args = run["config"]["args"]
    evaluated = run.get("eval_returns")
    steps, *_ = (evaluated or run["episodic_returns"])[-1]
    return Reached(
        env_id=str(args["env_id"]),
        variant="compile" in args,
        steps=steps,
        evaluated=float(evaluated[-1][1]) if evaluated else None,
        trained=float(run["mean_return_last_10"]),
    )


def learned(runs: list[Reached]) -> str:
    """Last returns, from five runs on their mean and its 95% interval."""
    from curves import bootstrap

    evaluated = None not in [run.evaluated for run in runs]
    ends = [run.evaluated if evaluated else run.trained for run in runs]
    said = ", ".join(map(short, ends))
    if len(ends) >= 5:
        low, high = bootstrap(np.array(ends)[:, None])
        said = f"{short(np.mean(ends))} ({short(*low)} to {short(*high)}), runs: {len(ends)}"
    return said if evaluated else f"{said} in training"


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
    said = f"Memory allows {in_units(most)} steps/s; arms with a process per environment end at "
    said += "32. On H200s a million "
    on_gpu = record("env_scaling_h200")
    made = {}
    for arm in env_report.arms(on_gpu["rows"]):
        (made[arm],) = env_report.speeds(env_report.medians(on_gpu["rows"], arm), shown[-1:])
    most = on_gpu["bytes_per_second"]["cuda"] / env_report.STEP_BYTES
    said += f"environments make {made['tensors, GPU']} steps/s as tensors and "
    said += f"{made['tensors compiled, GPU']} compiled, both launched step by step from Python, by "
    said += f"former scripts; as a kernel in a CUDA graph {made['kernel, TPB 1']} with one thread "
    said += f"per block and {made['kernel, TPB 32']} with 32; memory allows "
    said += f"{in_units(most)} (`env_scaling_h200.md`)."
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
    rounds = found["rounds"]
    for row in found["rows"]:
        line = [names[row["row"]], with_range(row["sps_steady"], "median")]
        reference = row["row"].partition(" (")[0]
        in_turns = row["row"] == reference
        line.append("1.00x" if in_turns else times_as_fast(rounds, row["row"], reference))
        line.append(with_range(row["return"]))
        for waits in (row["learner_waits"], row["collector_waits"]):
            line.append(f"{100 * waits['median']:.0f}%" if waits else "-")
        table.append(line)
    steps = rounds[0]["variant"]["config"]["args"]["total_timesteps"]
    said = f"HalfCheetah-v5, {steps:,} steps, {len(rounds)} rounds on "
    said += f"{where(found['machine'])}: median and range of steps/s, mean and range of the last "
    said += "10 episodes' mean return, of which few seeds say little (`devices_continuous_cpu.md`, "
    said += "`python plots/measure/devices.py`)."
    return f"{as_markdown(table, labels=1)}\n\n{said} On a GPU: {NOT_MEASURED}.\n"


FUNCTIONS = (race, speedup, gpu, field, learning, worlds, overhead, environments)
FUNCTIONS += (devices, physics)
REGIONS = {function.__name__: function for function in FUNCTIONS}


def filled(text: str) -> str:
    """`text` with each region made anew; ValueError for unknown names."""
    unknown = {match[2] for match in REGION.finditer(text)} - REGIONS.keys()
    if unknown:
        raise ValueError(f"no regions: {', '.join(sorted(unknown))}")
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
        where_from = shown(READ[-1]) if READ else path.name
        raise SystemExit(f"error: {where_from} lacks something: {problem!r}") from None
    if options.check:
        if new != text:
            print("README.md differs from the records: python plots/readme.py", file=sys.stderr)
        return int(new != text)
    partial = path.with_suffix(".partial")
    partial.write_text(new)
    partial.replace(path)
    return 0


if __name__ == "__main__":
    run_dirs.start(main)
