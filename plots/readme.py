"""The tables of README.md and plots/README.md, from the records in plots/results/.

    python plots/readme.py          writes them
    python plots/readme.py --check  exit status 1 if one of the pages says something else

A page has regions, `<!-- record: NAME -->` to `<!-- end -->`; the function here of that NAME makes
their text: a table, a line of hardware and the `note` of the record, if it has one. What a record
lacks is a dash. CleanRL's returns are its documentation's.
"""

import re
import statistics
import sys
from pathlib import Path

import numpy as np
import program
import run_dirs
from run_dirs import ROOT, processor, shown
from tables import as_markdown, in_units, short, with_range

PAGES = ROOT / "README.md", ROOT / "plots/README.md"
RESULTS = ROOT / "plots/results"
REGION = re.compile(r"(<!-- record: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CAPTURED = "compile+cudagraphs"
CLEANRL = "CleanRL {}, training, 1 M"  # docs.cleanrl.dev
LEARNED = [  # algorithm, records, what others have published
    ("SAC", ["sac_halfcheetah"], CLEANRL.format("9,635 +- 1,424")),
    ("TD3", ["td3_halfcheetah"], CLEANRL.format("9,583 +- 126")),
    ("PPO", ["ppo_halfcheetah_baseline", "ppo_halfcheetah"], CLEANRL.format("1,443 +- 46")),
    ("PPO for Atari", ["ppo_atari_pong"], "21 is the most"),
    ("PQN", ["pqn_atari_pong"], "21 is the most"),
    ("PPO for Atari", ["ppo_atari_breakout"], "-"),
    ("PQN", ["pqn_atari_breakout"], "-"),
    ("PPO on CartPoles", ["ppo_cartpole"], "500 is the most"),
    ("PPO with an LSTM, no velocities", ["ppo_lstm_cartpole"], "500 is the most"),
    ("PPO with an LSTM, no velocities", ["ppo_lstm_pendulum"], "-"),
]
WORLDS = (
    "halfcheetah_lambda__xeon",
    "hopper_end_gamma__xeon",
    "walker2d_lambda__xeon",
    "ant_lambda__xeon",
    "humanoid_lambda__xeon",
)
HALF_HOURS = {  # record -> what is not today's default
    "halfcheetah__xeon": "-",
    "sac_halfcheetah_means__xeon": "`--no-clipped-double-q`",
    "hopper__xeon": "`--end-gamma 0.997`, 5 M steps",
    "hopper_15m__xeon": "`--end-gamma 0.997`, 15 M steps",
    "walker2d__xeon": "-",
    "ant__xeon": "`--num-steps 32` `--desired-kl 0.02`",
    "humanoid__xeon": "`--num-steps 64` `--desired-kl 0.02`",
    "humanoid_euler__epyc": "`--euler-timestep 0.005` `--num-steps 64` `--desired-kl 0.02`",
}
# Of PPO on worlds; flags are named where they differ
DEFAULTS = {"num_steps": 128, "desired_kl": 0.03, "gae_lambda": 0.9, "end_gamma": None}
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
FIELD = {  # record -> algorithm
    "field/sac__epyc-avx2": "SAC",
    "field/td3__epyc-avx2": "TD3",
    "field/ppo__epyc-avx2": "PPO",
    "field/ppo__epyc-avx512": "PPO",
    "field/ppo_lstm__xeon": "PPO with an LSTM",
    "field/ppo_atari__epyc": "PPO for Atari",
    "field/pqn_atari__epyc": "PQN for Atari",
    "field/ppo_worlds_64__epyc": "PPO, 64 worlds each",
}
TRICKS = [  # what README says of a trick, and where a record says what it is worth
    ("An update is one compiled call: gradients, clipping and Adam", "ppo", "update compiled"),
    ("Environments step without a layer per wrapper", "ppo", "lean vector environment"),
    ("Acting in NumPy: networks of 64 are too small for PyTorch's calls", "ppo", "acting in NumPy"),
    ("A rollout is stored by NumPy, and copied once", "ppo", "rollout stored by NumPy"),
    ("An Adam of our own, which compiles with the rest", "sac", "an Adam that compiles"),
    ("Gradients and step of the Q-networks are one compiled call", "sac", "critic update compiled"),
    ("Both Q-networks in one batched product, by `vmap`", "sac", "critics stacked by vmap"),
]
READ = []  # the records so far: what is lacking, the last one lacks


def path_of(name: str) -> Path:
    """The newest record PROGRAM/ALGORITHM__MACHINE; its date ends the name of its file."""
    found = sorted(RESULTS.glob(f"{name}*.json"), key=lambda path: path.stem[-10:])
    return found[-1] if found else RESULTS / f"{name}.json"


def link(name: str) -> str:
    path = path_of(name).relative_to(RESULTS)
    return f"[{path.with_suffix('')}](results/{path})"


def record(name: str) -> dict:
    path = path_of(name)
    READ.append(path)
    try:
        return run_dirs.read_json(path)
    except ValueError as problem:
        raise SystemExit(f"error: {shown(RESULTS)} {problem}") from None


def with_vectors(cpu: dict) -> str:
    return f"{processor(cpu)}, {cpu['vectors']}" if cpu.get("vectors") else processor(cpu)


def where(machine: dict) -> str:
    """The hardware, and what else a speed depends on."""
    place = f"{with_vectors(machine['cpu'])}, {machine['gpu'] or 'no GPU'}"
    return f"{place}; Python {machine['python']}, torch {machine['versions']['torch']}"


def below(table: list[list[str]], name: str, labels: int = 1) -> str:
    """A table, and what the record of this name says of its hardware and of itself."""
    found = record(name)
    machine = found["machine"] if "machine" in found else found["runs"][-1]["machine"]
    lines = [as_markdown(table, labels), ""]
    lines.append(f"On {where(machine)}. Record: {link(name)}.")
    if "note" in found:
        lines.append(found["note"])
    return "\n".join(lines) + "\n"


def of_three_seeds(table: list[list[str]], names: list[str], labels: int) -> str:
    """A table with a row of each of these records of the race."""
    records = ", ".join(map(link, names))
    cpus = [with_vectors(record(name)["runs"][0]["machine"]["cpu"]) for name in names]
    processors = "; ".join(dict.fromkeys(cpus))
    said = f"Mean and range of three seeds. {processors}. Records: {records}."
    return f"{as_markdown(table, labels)}\n\n{said}\n"


def by_row(name: str) -> dict[tuple[str, str], dict]:
    """The rows of a speed-up record that were measured, by script and row."""
    rows = record(name)["rows"]
    return {(row["script"], row["row"]): row for row in rows if row.get("speedup")}


# README.md


def speed() -> str:
    """Baseline and variant of each script, on a CPU and on a GPU."""
    on_cpu, on_gpu = by_row("speedup/all__epyc"), by_row("speedup/all__h200")
    heading = ["steps/s", "CPU: baseline", "variant", "speed-up"]
    table = [[*heading, "GPU: baseline", "variant", "speed-up"]]
    for script in run_dirs.SHOWN:
        line = [f"`{script}`"]
        for rows, best in ((on_cpu, "compile"), (on_gpu, CAPTURED)):
            for row in ("baseline", best):
                line.append(in_units(rows[script, row]["sps_steady"]["mean"]))
            line.append(f"**{rows[script, best]['speedup']:.1f}x**")
        table.append(line)
    cpu, gpu = (record(name)["machine"] for name in ("speedup/all__epyc", "speedup/all__h200"))
    said = f"{processor(cpu['cpu'])}, torch {cpu['versions']['torch']}; "
    said += f"{gpu['gpu']}, torch {gpu['versions']['torch']}."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def tricks() -> str:
    """How many times as fast the variant is with a trick as without it."""
    table = [["trick", "script", "with it"]]
    for words, algorithm, name in TRICKS:
        rows = {row["without"]: row for row in record(f"ablation/{algorithm}__epyc-avx2")["rows"]}
        table.append([words, algorithm.upper(), f"{1 / rows[name]['of_whole']:.2f}x"])
    rows = by_row("speedup/earlier__h200")
    for title, script in (("SAC", "sac_continuous_action"), ("CartPole", "ppo_cartpole_gpu")):
        ratio = rows[script, CAPTURED]["speedup"] / rows[script, "compile"]["speedup"]
        table.append(["CUDA graphs: one launch for hundreds", f"{title}, GPU", f"{ratio:.1f}x"])
    return as_markdown(table, labels=2) + "\n"


class Raced:
    """The record of the race: its rows by entrant and task, and the columns of returns."""

    def __init__(self):
        self.found = record("race/all__epyc")
        self.rows = {(row["entrant"], row["task"]): row for row in self.found["rows"]}
        self.entrants = list(dict.fromkeys(entrant for entrant, _ in self.rows))
        self.tasks = list(dict.fromkeys(row["task"] for row in self.found["rows"]))
        self.columns = [name for name in self.found["rows"][0] if name.startswith("after")]

    def returns(self, entrant: str, task: str, columns: list[str]) -> str:
        """Means after some minutes; a dash where nothing is known."""
        row = self.rows.get((entrant, task), {})
        known = [row.get(column) for column in columns]
        return " / ".join(short(x["mean"]) if x else "-" for x in known)


def minutes_of(columns: list[str]) -> str:
    return " / ".join(re.sub(r"\D", "", column) for column in columns)


def returns() -> str:
    """What each has learned after minutes of a core, in short."""
    raced = Raced()
    columns = raced.columns[-2:]
    table = [[f"return after {minutes_of(columns)} minutes", *raced.tasks]]
    for entrant in raced.entrants:
        means = [raced.returns(entrant, task, columns) for task in raced.tasks]
        table.append([run_dirs.PEERS.get(entrant, entrant), *means])
    machine = raced.found["runs"][-1]["machine"]
    said = f"Means of two seeds, each on one core of {processor(machine['cpu'])}."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


# plots/README.md


def race() -> str:
    """What each has learned after minutes of a core: a line per entrant, columns per task."""
    raced = Raced()
    arrivals = {}  # the last cell without the level: "8,000: 3.0"
    for task, entrant, *_, last in raced.found["table"]:
        arrivals[entrant, task] = last.partition(": ")[2]
    table = [["entrant", "processor", "steps of a run"]]
    for task in raced.tasks:
        level = next(row["level"] for row in raced.rows.values() if row["task"] == task)
        table[0] += [f"{task} after {minutes_of(raced.columns)}", f"minutes to {level:,}"]
    for entrant in raced.entrants:
        said = ", ".join(row["processor"] for key, row in raced.rows.items() if entrant in key)
        vectors = sorted({*said.split(", ")}, reverse=True)
        mine = [run for run in raced.found["runs"] if run["entrant"] == entrant]
        longest = max(run["minutes"] for run in mine)
        ends = [run["evaluations"][-1] for run in mine if run["minutes"] == longest]
        steps = sorted(made for _, made, _ in ends)
        line = [run_dirs.PEERS.get(entrant, entrant), ", ".join(vectors)]
        line.append(" to ".join(dict.fromkeys([in_units(steps[0]), in_units(steps[-1])])))
        for task in raced.tasks:
            line.append(raced.returns(entrant, task, raced.columns))
            line.append(arrivals.get((entrant, task), "-"))
        table.append(line)
    return below(table, "race/all__epyc", labels=2)


def half_hours() -> str:
    """What has been learned on worlds after minutes of a core, three seeds of a robot."""
    columns = [f"after {minutes} min" for minutes in (5, 10, 30)]
    table = [["environment", "algorithm", "flags", "core", *columns]]
    for name, flags in HALF_HOURS.items():
        (row,) = record(f"race/{name}")["rows"]
        core = "Xeon" if "xeon" in name else "EPYC"
        cells = [with_range(row[column]) if column in row else "-" for column in columns]
        table.append([row["task"], row["entrant"], flags, core, *cells])
    return of_three_seeds(table, [f"race/{name}" for name in HALF_HOURS], labels=4)


def memory() -> str:
    """PPO with an LSTM and others where velocities are not seen, after minutes of a core."""
    entrants = ["PPO with memory", "zoo's RecurrentPPO", "PPO"]
    table = [["velocities unseen", "minutes", *(run_dirs.PEERS.get(x, x) for x in entrants)]]
    names = [f"race/no_velocities_{task}__epyc" for task in ("cartpole", "pendulum", "halfcheetah")]
    for name in names:
        rows = {row["entrant"]: row for row in record(name)["rows"]}
        last = [column for column in rows[entrants[0]] if column.startswith("after")][-1]
        line = [rows[entrants[0]]["task"].replace("NoVel", ""), minutes_of([last])]
        for entrant in entrants:
            line.append(with_range(rows[entrant][last]) if entrant in rows else "-")
        table.append(line)
    return of_three_seeds(table, names, labels=1)


def speedup() -> str:
    """Baseline and variant on a CPU, with ranges and warm-up."""
    rows = by_row("speedup/all__epyc")
    table = [["script", "baseline", "`--compile`", "speed-up", "warm-up s", "runs"]]
    for script in run_dirs.SHOWN:
        baseline, best = rows[script, "baseline"], rows[script, "compile"]
        table.append(
            [
                f"`{script}`",
                with_range(baseline["sps_steady"]),
                with_range(best["sps_steady"]),
                f"**{best['speedup']:.2f}x**",
                f"{best['warmup_seconds']['first']:.1f}",
                str(len(best["runs"])),
            ]
        )
    return below(table, "speedup/all__epyc")


def gpu() -> str:
    """The speed-up table of a GPU, and the share of the time that it is busy."""
    rows = by_row("speedup/all__h200")
    busy = {}
    for row in record("utilization/all__h200")["rows"]:
        if "GPU" in row:
            busy[row["script"], row["row"]] = f"{row['GPU']['mean']:.0f}%"
    heading = ["script", "baseline", "`--compile --cudagraphs`", "speed-up", "warm-up s"]
    table = [[*heading, "GPU busy: baseline", "captured"]]
    for script in dict.fromkeys(script for script, _ in rows):
        slow, fast = rows[script, "baseline"], rows[script, CAPTURED]
        cells = [in_units(row["sps_steady"]["mean"]) for row in (slow, fast)]
        cells.append(f"**{fast['speedup']:.1f}x**")
        cells.append(f"{fast['warmup_seconds']['first']:.0f}")
        for row in ("baseline", CAPTURED):
            cells.append(busy.get((script, row), "-"))
        table.append([f"`{script}`", *cells])
    return below(table, "speedup/all__h200")


def against_others(title: str, found: dict, compiled: str) -> list[str]:
    """A line of a field benchmark: speeds, and how many times the others' `compiled` has."""
    speeds = {row["entrant"]: short(row["sps_steady"]["median"]) for row in found["rows"]}
    other = found["rows"][0]["entrant"]
    line = [title, found["machine"]["cpu"]["vectors"]]
    for entrant in (other, "SBX", "LeanRL baseline", compiled):
        line.append(speeds.get(entrant, "-"))
    if other != "Stable-Baselines3":
        line[2] += f" ({other})"
    for library in (other, "SBX"):
        line.append(times_as_fast(found["rounds"], compiled, library))
    return [*line, str(len(found["rounds"]))]


def field() -> str:
    """Against other libraries: a line per record."""
    heading = ["algorithm", "vectors", "Stable-Baselines3", "SBX (JAX)", "baseline", "`--compile`"]
    table = [[*heading, "against Stable-Baselines3", "against SBX", "rounds"]]
    notes = []
    for name, title in FIELD.items():
        found = record(name)
        entrants = [row["entrant"] for row in found["rows"]]
        compiled = "LeanRL compile"
        if f"{compiled}, channels last" in entrants:
            compiled += ", channels last"
        table.append(against_others(title, found, compiled))
        notes.append(f"- {link(name)}" + (f": {found['note']}" if "note" in found else ""))
    return as_markdown(table, labels=1) + "\n\n" + "\n".join(notes) + "\n"


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
    rows = {}
    for row in record("physics/worlds__epyc")["rows"]:
        rows[row["task"], row["worlds"], row["cores"]] = row
    table = [["task", "worlds"]]
    for cores in (1, 2):
        counted = "1 core" if cores == 1 else f"{cores} cores"
        table[0] += [f"{counted}: ours", "by Euler", "EnvPool", "against EnvPool"]
    for task, worlds in dict.fromkeys(key[:2] for key in rows):
        line = [task, f"{worlds:,}"]
        for cores in (1, 2):
            row = rows[task, worlds, cores]
            for arm in ("whole step", "by Euler", "EnvPool"):
                speed = row["steps_per_second"].get(arm)
                line.append(short(speed["median"]) if speed else "-")
            line.append(f"{row['of_envpool']:.2f}x")
        table.append(line)
    return below(table, "physics/worlds__epyc")


def overhead() -> str:
    """The bias of the stopwatch in each script that was measured."""
    table = [["script", "a step takes longer by"]]
    for row in record("overhead/all__epyc")["rows"]:
        bias = row["bias"]
        spread = f"{bias['mean']:+.1%} ({bias['min']:+.1%} to {bias['max']:+.1%})"
        table.append([f"`{row['script']}`", spread])
    return below(table, "overhead/all__epyc")


def learning() -> str:
    """What was learned, by baseline and variant."""
    table = [["environment", "algorithm", "steps", "baseline", "variant", "elsewhere"]]
    for algorithm, names, elsewhere in LEARNED:
        runs = []
        for name in names:
            runs += record(f"learning/{name}__epyc")["runs"]
        ends = [run["eval_returns"][-1][0] for run in runs]
        said = " to ".join(f"{end:,}" for end in sorted({min(ends), max(ends)}))
        line = [runs[0]["config"]["args"]["env_id"], algorithm, said]
        for variant in (False, True):
            line.append(learned([run for run in runs if is_variant(run) == variant]))
        table.append([*line, elsewhere])
    return f"{as_markdown(table, labels=2)}\n"


def is_variant(run: dict) -> bool:
    return "compile" in run["config"]["args"]


def learned(runs: list[dict]) -> str:
    """The last evaluations, from five runs on what they have `reached`."""
    ends = [run["eval_returns"][-1][1] for run in runs]
    if len(ends) < 5:
        return ", ".join(map(short, ends)) or "-"
    return f"{reached(ends)}, runs: {len(ends)}"


def reached(ends: list[float]) -> str:
    """Interquartile mean over runs and its 95% bootstrap interval (Agarwal et al., 2021)."""
    from curves import iqm, iqm_interval

    if not ends:
        return "-"
    scores = np.array(ends)
    low, high = iqm_interval(scores)
    return f"{short(iqm(scores))} ({short(low)} to {short(high)})"


def worlds() -> str:
    """What PPO on worlds learns in minutes of a core, beside what others have published."""
    heading = ["environment", "flags", "steps", "minutes", "seeds", "by 5 minutes", "at the end"]
    table = [[*heading, "worst seed", *PUBLISHED]]
    for name in WORLDS:
        runs = record(f"learning/ppo_worlds_{name}")["runs"]
        args = runs[0]["config"]["args"]
        env_id = args["env_id"]
        flags = []
        for flag, value in DEFAULTS.items():
            if args.get(flag, value) != value:
                flags.append(f"`--{flag.replace('_', '-')} {args[flag]}`")
        early = []
        last = {}
        for run in runs:
            evaluated = run["eval_returns"]
            early += [value for _, value, seconds in evaluated if seconds <= 300][-1:]
            last[run["config"]["args"]["seed"]] = evaluated[-1][1]
        worst = min(last, key=last.get)
        minutes = sorted(round(run["stages"]["wall_seconds"] / 60) for run in runs)
        low, high = minutes[0], minutes[-1]
        table.append(
            [
                env_id,
                " ".join(flags) or "-",
                f"{runs[0]['eval_returns'][-1][0]:,}",
                f"{low} to {high}" if low < high else str(low),
                str(len(runs)),
                reached(early),
                reached(list(last.values())),
                f"{short(last[worst])} (seed {worst})",
                *(returns.get(env_id, "-") for returns in PUBLISHED.values()),
            ]
        )
    return f"{as_markdown(table, labels=2)}\n"


def devices() -> str:
    """Acting and learning at the same time, against in turns."""
    found = record("devices/ppo__epyc")
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
    return below(table, "devices/ppo__epyc")


FUNCTIONS = (speed, tricks, returns, race, speedup, gpu, field, learning, worlds, overhead)
FUNCTIONS += (half_hours, memory, devices, physics)
REGIONS = {function.__name__: function for function in FUNCTIONS}


def filled(text: str) -> str:
    """`text` with each region made anew; ValueError for unknown names."""
    unknown = {match[2] for match in REGION.finditer(text)} - REGIONS.keys()
    if unknown:
        raise ValueError(f"no regions: {', '.join(sorted(unknown))}")
    return REGION.sub(lambda match: match[1] + REGIONS[match[2]]() + match[4], text)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    differing = []
    for path in PAGES:
        text = path.read_text()
        try:
            new = filled(text)
        except run_dirs.DAMAGED as problem:
            where_from = shown(READ[-1]) if READ else path.name
            raise SystemExit(f"error: {where_from} lacks something: {problem!r}") from None
        if new != text:
            differing.append(path)
            if not options.check:
                path.write_text(new)
    if options.check and differing:
        names = ", ".join(map(shown, differing))
        print(f"differing from the records: {names}; python plots/readme.py", file=sys.stderr)
    return int(options.check and bool(differing))


if __name__ == "__main__":
    program.start(main)
