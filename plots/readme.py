"""Every number of README, from the records in plots/results/.

    python plots/readme.py          writes them into README.md
    python plots/readme.py --check  exit status 1 if README.md says something else

README has regions, `<!-- record: NAME -->` to `<!-- end -->`; the functions here of that NAME make
their text; rows that a record lacks are called not measured. A test runs --check, and another one
refuses numbers of speed outside of the regions. CleanRL's returns are its own publication's.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from run_dirs import ROOT, ROWS, VARIANT, as_markdown, short

RESULTS = ROOT / "plots/results"
REGION = re.compile(r"(<!-- record: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "not measured"
# (record, row of it) -> what to call the trick, and words of the line in leanrl/ that has it
TRICKS = {
    ("ppo", "update compiled"): ("the update as one compiled call", "the update alone, which"),
    ("ppo", "acting in NumPy; log-probabilities and values later"): (
        "acting in NumPy, log-probabilities and values once per rollout",
        "one call computes what it left out",
    ),
    ("ppo", "acting in NumPy"): ("acting in NumPy alone", "for a few rows PyTorch's dispatch"),
    ("ppo", "lean vector environment"): (
        "a vector environment without copies",
        "spares copies and infos that nobody reads",
    ),
    ("ppo", "advantages in log2(T) steps"): (
        "advantages in log2(T) steps",
        "log2(T) vector operations instead of T",
    ),
    ("ppo", "one thread"): ("one thread", "layers of 64 are too small to share"),
}
for _name in ("sac", "td3"):
    TRICKS |= {
        (_name, "critic update compiled"): (
            "the critic's update as one compiled call",
            "with this one a whole update is one compiled",
        ),
        (_name, "actor update compiled"): (
            "the actor's update as one compiled call",
            "with this one a whole update is one compiled",
        ),
        (_name, "targets in one call"): ("target networks in one call", "one call for all tensors"),
        (_name, "oneDNN's matrix products on AMD"): (
            "oneDNN's matrix products on AMD",
            "oneDNN, not MKL",
        ),
        (_name, "replay in one tensor, one gather"): (
            "replay in one tensor, one gather",
            "a transition is one row",
        ),
        (_name, "acting compiled"): ("acting compiled", "all compilation and capture is set up"),
    }
TIPS = {
    ("ppo", "eager"): {
        "acting in NumPy; log-probabilities and values later": "Let a small policy act in NumPy, "
        "and compute log-probabilities and values once per rollout",
        "acting in NumPy": "The first half of that alone",
        "lean vector environment": "Step environments without copying what you will not read",
        "advantages in log2(T) steps": "Replace a loop over time by log2(T) vector operations",
        "rewards normalized by rollout": "Normalize rewards once per rollout",
        "one thread": "Give small networks one thread: `torch.set_num_threads(1)`",
    },
    ("sac", "baseline"): {
        "no gradients of the critics in the policy's": "Compute the gradients that you use: "
        "`loss.backward(inputs=parameters)`",
        "temperature by the policy's sample": "Let the temperature's loss reuse the "
        "log-probabilities of the policy's",
        "fused Adam": "`Adam(..., fused=True)`",
    },
}


def record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def with_range(spread: dict, middle: str = "mean") -> str:
    low, high = short(spread["min"]), short(spread["max"])
    return f"{short(spread[middle])} ({low}-{high})"


def where(machine: dict) -> str:
    """The hardware, and what else a speed depends on."""
    cpu, versions = machine["cpu"], machine["versions"]
    vectors = f", {cpu['vectors']}" if cpu.get("vectors") else ""
    place = machine["gpu"] or f"{cpu['model']}, {cpu['cores']} cores{vectors}, no GPU"
    return f"{place}; Python {machine['python']}, torch {versions['torch']}"


def speedup() -> str:
    """The speed-up table, a line per pair of scripts."""
    found = record("speedup_cpu")
    rows = {(row["script"], row["row"]): row for row in found["rows"]}
    scripts = list(dict.fromkeys(script for script, _ in rows))
    captured = [row for row in ROWS if "cudagraphs" in row]
    heading = ["script", "baseline", "eager", "`--compile`", "`--cudagraphs`, alone and with it"]
    table = [[*heading, "overall", "warm-up s, first and best"]]
    for script in scripts:
        line = [f"`{script}`"]
        for row in ("baseline", "eager", "compile"):
            spread = rows[script, row].get("sps_steady")
            line.append(with_range(spread) if spread else NOT_MEASURED)
        spreads = [rows[script, row].get("sps_steady") for row in captured]
        line.append(" ".join(with_range(s) for s in spreads if s) or NOT_MEASURED)
        best = [rows[script, row] for row in ROWS if "speedup" in rows[script, row]][-1]
        warmup = best["warmup_seconds"]
        line += [f"**{best['speedup']:.2f}x**", f"{warmup['first']:.1f}, {warmup['best']:.1f}"]
        table.append(line)
    seeds = max(len(row["runs"]) for row in rows.values() if "runs" in row)
    said = f"Environment steps/s in steady state: mean and range of {seeds} seeds, on "
    said += f"{where(found['machine'])} (`speedup_cpu.md`, `{found['command']}`)."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def field() -> str:
    """Against other libraries, a line per algorithm."""
    heading = ["algorithm", "Stable-Baselines3", "SBX (JAX)", "baseline", "eager", "`--compile`"]
    table = [[*heading, "of Stable-Baselines3", "rounds"]]
    for name in ("sac", "td3", "ppo", "ppo_atari"):
        found = record(f"{name}_field_cpu")
        rows = {row["entrant"]: row for row in found["rows"]}
        best = max((row for row in rows.values() if "LeanRL" in row["entrant"]), key=ratio)
        entrants = ["Stable-Baselines3", "SBX", "LeanRL baseline", "LeanRL eager", best["entrant"]]
        cells = [
            with_range(rows[e]["sps_steady"], "median") if e in rows else "-" for e in entrants
        ]
        rounds = str(rows["LeanRL baseline"]["runs"])
        title = name.upper().replace("_ATARI", " for Atari")
        table.append([title, *cells, f"**{ratio(best):.2f}x**", rounds])
    said = "Environment steps/s: median and range of rounds in turns (`*_field_cpu.md`; "
    said += "`bash run.sh field --algorithm td3` makes such a record). Atari with "
    said += "`--channels-last`, and its Stable-Baselines3 on that library's own environments."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def ratio(row: dict) -> float:
    return row["ratio_to_sb3"]


def ablated(algorithm: str, row: str = "compile") -> list[dict]:
    suffix = "" if row == "compile" else f"_{row}"
    found = record(f"{algorithm}_ablation{suffix}_cpu")
    return [line for line in found["rows"] if "of_whole" in line and line["worth_us"]["max"]]


def tricks() -> str:
    """What the variants with --compile lose without one trick, the most valuable first.

    A trick counts if it was worth something in every round.
    """
    table = [["trick", "script", "speed without it", "us per step", "words to grep"]]
    rows, others = [], {"slower with it here, in every round": [], "lost in the noise": []}
    for algorithm in ("ppo", "td3", "sac"):
        for row in ablated(algorithm):
            if (algorithm, row["without"]) not in TRICKS:  # it has left the scripts since
                continue
            name, words = TRICKS[algorithm, row["without"]]
            of_whole, worth = f"{row['of_whole']:.2f}x", row["worth_us"]
            if worth["min"] > 0:
                cells = [name, algorithm.upper(), of_whole, f"{worth['median']:,.0f}"]
                rows.append((row["of_whole"], [*cells, f"`{words}`"]))
            else:
                verdict = list(others)[worth["max"] > 0]
                others[verdict].append(f"{name} ({algorithm.upper()}, {of_whole})")
    table += [cells for _, cells in sorted(rows)]
    text = f"{as_markdown(table, labels=2)}\n"
    for verdict, names in others.items():
        if names:
            text += f"\n{verdict.capitalize()}: {', '.join(names)}.\n"
    return text


def tips() -> str:
    """What eager code gains, the most valuable first; what was lost in the noise is called that."""
    table = [["in eager code", "measured on", "speed without it", "us per step"]]
    rows = []
    for (algorithm, row), names in TIPS.items():
        for line in ablated(algorithm, row):
            what = "baseline" if row == "baseline" else "variant, eager"
            cells = [names[line["without"]], f"{algorithm.upper()}, {what}"]
            worth = line["worth_us"]
            told = f"{worth['median']:,.0f}" if worth["min"] > 0 else "noise"
            rows.append((line["of_whole"], [*cells, f"{line['of_whole']:.2f}x", told]))
    table += [cells for _, cells in sorted(rows)]
    return f"{as_markdown(table, labels=2)}\n"


def breakdown() -> str:
    """RL-Scope's questions, answered for the quick table's runs."""
    found = record("breakdown_cpu")
    return "\n".join(f"- {line}" for line in found["headlines"]) + "\n"


def overhead() -> str:
    """Pairs of runs with the stopwatch and without it."""
    rows = record("overhead_cpu")["rows"]
    times = {"off_seconds": "off us", "on_seconds": "with us", "corrected_seconds": "corrected us"}
    times = {name: title for name, title in times.items() if name in rows[0]}
    table = [["script", "row", *times.values(), "bias", "min-max", "seeds"]]
    for row in rows:
        line = [row["script"], row["row"], *(four_digits(1e6 * row[name]) for name in times)]
        low, mean, high = (f"{row['bias'][name]:+.1%}" for name in ("min", "mean", "max"))
        table.append([*line, mean, f"{low} to {high}", str(row["seeds"])])
    worst = max(abs(row["bias"]["mean"]) for row in rows)
    said = f"The largest mean bias is {worst:.1%} (`overhead_cpu.md`)."
    return f"{as_markdown(table, labels=2)}\n\n{said}\n"


def four_digits(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def learning() -> str:
    """What was learned, a line per record."""

    def last(run: dict) -> str:
        value = run["mean_return_last_10"]
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"

    def variant(run: dict) -> bool:
        return run["config"]["args"]["exp_name"].endswith(VARIANT)

    sac = {variant(run): last(run) for run in record("sac_halfcheetah_100k_cpu")["runs"]}
    ppo = (record(f"ppo_halfcheetah_1m{name}_cpu")["runs"] for name in ("_baseline", ""))
    td3 = record("td3_halfcheetah_293k_cpu")["runs"][0]
    pong = record("ppo_atari_pong_cpu")["runs"][0]
    first = sum(value for _, value in pong["episodic_returns"][:10]) / 10
    rows = [["environment", "script", "steps", "return", "elsewhere"]]
    rows.append(["HalfCheetah-v5", "SAC baseline; variant", "100,000"])
    rows[-1] += [f"{sac[False]}; {sac[True]}", "CleanRL 9,635 +- 1,424 after 1 M, v4"]
    steps = f"{td3['episodic_returns'][-1][0]:,}"
    rows.append(["HalfCheetah-v5", "TD3 variant", steps, last(td3)])
    rows[-1].append("CleanRL 9,583 +- 126 after 1 M, v4")
    rows.append(["HalfCheetah-v5", "PPO baseline; variant", "1,000,000"])
    seeds = "; ".join(" and ".join(map(last, runs)) for runs in ppo)
    rows[-1] += [seeds, "CleanRL 1,443 +- 46 after 1 M, v4"]
    steps = f"{pong['episodic_returns'][-1][0]:,}"
    rows.append(["Pong-v5", "PPO variant", steps, f"from {first:.1f} to {last(pong)}", ""])
    for name, most in (("cartpole", "500 is the most"), ("pendulum", "")):
        runs = record(f"ppo_{name}_learning_cpu")["runs"]
        ends = sorted(run["eval_returns"][-1][1] for run in runs)
        env_id, steps = runs[0]["config"]["args"]["env_id"], runs[0]["eval_returns"][-1][0]
        cells = [env_id, f"PPO variant, {len(runs)} seeds", f"{steps:,}"]
        rows.append([*cells, f"{ends[0]:.1f} to {ends[-1]:.1f}, evaluated", most])
    return f"{as_markdown(rows, labels=2)}\n"


def environments() -> str:
    """Steps/s of environments alone, and what training gets of them."""
    from env_tables import STEP_BYTES, describe_turning, distinct, medians, turning_point
    from env_tables import short as with_unit

    found = record("env_scaling_cpu")
    part, shown = found["steps"], (1, 64, 4096, 65_536, 1_048_576)
    table = [["environments", *(f"{n:,}" for n in shown), "turning point"]]
    for arm in distinct(part["rows"], "arm"):
        seconds = medians(part["rows"], arm=arm)
        line = [arm, *(with_unit(n / seconds[n]) if n in seconds else "-" for n in shown)]
        fit = turning_point(list(seconds), list(seconds.values())) if len(seconds) > 2 else None
        table.append([*line, describe_turning(fit, list(seconds)) if fit else "-"])
    most = found["limits"]["devices"]["cpu"]["bytes_per_second"] / STEP_BYTES
    said = f"Memory allows {with_unit(most)} steps/s; processes end at 32."
    return f"{as_markdown(table, labels=1)}\n\n{said}\n"


def training() -> str:
    """PPO on environments that are tensors or kernels, from the study's own tables."""
    from env_tables import tables

    found = dict(tables(record("env_scaling_cpu")))
    (heading,) = (name for name in found if name.startswith("Training"))
    text = f"{as_markdown(found[heading], labels=1)}\n\n"
    (heading,) = (name for name in found if name.startswith("Learning"))
    return text + f"{heading}:\n\n{as_markdown(found[heading], labels=1)}\n"


def devices() -> str:
    """Acting and learning at the same time, against in turns."""
    found = record("devices_continuous_cpu")
    heading = ["", "steps/s", "of in turns", "return", "learner waits", "collector waits"]
    table, names, kinds = [heading], {}, ("baseline", "variant")
    for kind in kinds:
        names |= {kind: f"in turns, {kind}", f"{kind} (asynchronous)": f"at the same time, {kind}"}
    names["variant (two processes, in turns)"] = "in turns, variant, in two processes (`--sync`)"
    for row in found["rows"]:
        waits = [row[f"{name}_waits"] for name in ("learner", "collector")]
        line = [names[row["row"]], with_range(row["sps_steady"], "median")]
        line += [f"{row['of_first']:.2f}x", with_range(row["return"])]
        table.append(line + [f"{100 * w['median']:.0f}%" if w else "-" for w in waits])
    rounds, args = len(found["rounds"]), found["rounds"][0]["variant"]["config"]["args"]
    said = f"HalfCheetah-v5, {args['total_timesteps']:,} steps, {rounds} rounds in turns on "
    said += f"{where(found['machine'])}: median and range of steps/s, mean and range of the last "
    said += "10 episodes' mean return (`devices_continuous_cpu.md`, "
    said += "`python plots/measure/devices.py`)."
    plain = {row["row"]: row for row in record("devices_continuous_plain_ratio_cpu")["rows"]}
    ends = [short(plain[f"{kind} (asynchronous)"]["return"]["mean"]) for kind in kinds]
    said += f" With PPO's plain ratio instead, baseline and variant ended at {' and '.join(ends)} "
    said += "(`devices_continuous_plain_ratio_cpu.md`)."
    return f"{as_markdown(table, labels=1)}\n\n{said} On a GPU: {NOT_MEASURED}.\n"


FUNCTIONS = (speedup, breakdown, field, tricks, tips, overhead, learning)
FUNCTIONS += (environments, training, devices)
REGIONS = {function.__name__: function for function in FUNCTIONS}


def filled(text: str) -> str:
    """`text` with each region made anew; KeyError for an unknown name."""
    return REGION.sub(lambda match: match[1] + REGIONS[match[2]]() + match[4], text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    path: Path = ROOT / "README.md"
    text = path.read_text()
    new = filled(text)
    if options.check:
        if new != text:
            print("README.md differs from the records: python plots/readme.py", file=sys.stderr)
        return int(new != text)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
