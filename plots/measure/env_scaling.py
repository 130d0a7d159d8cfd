"""The scaling study: what a step of CartPole costs when there are 1 to a million of them.

    bash run.sh study                                   sets up, then all of it, in minutes
    python plots/measure/env_scaling.py steps work      only these parts
    python plots/measure/env_scaling.py --quick         a few points of each
    python plots/measure/env_scaling.py figures --out plots/results/env_scaling_cpu

After "Increasing Sample Throughput for RL Environments" (CS267, Berkeley). The arms are those of
plots/measure/env_arms.py; one that cannot run here is named with the reason. One at a time:

    limits      what the machine can do: bytes/s of a copy
    steps       seconds of one step of all environments against their number. A straight line
                a + b N is fitted to it in relative error; its turning point from flat to linear is
                N = a / b
    work        the same against the arithmetic per step, repeated 1 to 1,000 times

What PPO makes of such environments is in the speed-up table, by ppo_cartpole_gpu.

Written to --out: NAME.json with every sample, NAME.md with the tables, and figures. Each part says
on which machine it ran and replaces what a former call has left of it.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from pathlib import Path

import env_arms
import processes
import run_dirs
import torch
from env_arms import ARMS, Arm, Stepper
from env_report import draw, tables
from run_dirs import ROOT, shown

SAMPLES = 5  # per point; the median counts
NUMBERS = sorted({32} | {4**k for k in range(11)})  # of environments; 32 is where processes end
WORK = [1, 3, 10, 30, 100, 300, 1000]
PACKAGES = ["torch", "gymnasium", "numpy", "envpool", "stable-baselines3", "numba-cuda"]


def time_steps(stepper: Stepper, seconds: float, samples: int = SAMPLES) -> list[float]:
    """Seconds per step of all environments, `samples` of at least seconds / samples each."""

    def spend(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            stepper.step()
        stepper.wait()
        return time.perf_counter() - begin

    spend(3)  # compiles
    calls = 1
    while (spent := spend(calls)) < seconds / samples:
        calls = math.ceil(calls * min(10, 1.2 * seconds / samples / max(spent, 1e-9)))
    return [spend(calls) / (calls * stepper.steps) for _ in range(samples)]


def measure_limits(options: argparse.Namespace) -> dict:
    """Bytes/s that a copy of 256 MB reads and writes, of each device.

    The best of several: a limit is what the hardware does undisturbed.
    """
    found = {}
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        wait = env_arms.waiting(torch.device(device))
        source = torch.zeros(2**26, device=device)
        target = torch.zeros_like(source)
        copies = time_steps(Stepper(lambda s=source, t=target: t.copy_(s), 1, wait), 1.0, 10)
        found[device] = {"bytes_per_second": 2 * 4 * 2**26 / min(copies)}
        print(f"{device}: {found[device]['bytes_per_second']:.3g} bytes/s")
    return {"devices": found}


def measure_arms(arms: list[Arm], points, options: argparse.Namespace) -> dict:
    """The arms that can run here at each of points(arm): {num_envs, perhaps work}."""
    skipped = {arm.name: why for arm in arms if (why := arm.missing())}
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    rows = []
    for arm in [arm for arm in arms if arm.name not in skipped]:
        for point in points(arm):
            row = {"arm": arm.name, **point}
            said = ", ".join(f"{name} {value:,}" for name, value in point.items())
            try:
                with arm.make(**point) as stepper:
                    row["seconds"] = time_steps(stepper, options.seconds)
                said += f": {statistics.median(row['seconds']) * 1e6:,.1f} us"
            except (RuntimeError, MemoryError, OSError, ValueError) as error:
                # it does not fit, or its kernel does not compile
                row["failed"] = " ".join(str(error).split())[:200]
                said += f": {row['failed']}"
            print(f"{arm.name}, {said}", flush=True)
            rows.append(row)
    return {"rows": rows, "skipped": skipped}


def measure_steps(options: argparse.Namespace) -> dict:
    def points(arm: Arm) -> list[dict]:
        return [{"num_envs": n} for n in options.numbers if n <= arm.most]

    return measure_arms(ARMS, points, options)


def measure_work(options: argparse.Namespace) -> dict:
    numbers = [4**5, 4**8] + [4**10] * torch.cuda.is_available()
    points = [{"num_envs": n, "work": work} for n in numbers for work in options.work]
    return measure_arms([arm for arm in ARMS if arm.works], lambda arm: points, options)


PARTS = {"limits": measure_limits, "steps": measure_steps, "work": measure_work}
ALL_PARTS = [*PARTS, "figures"]


def write(record: dict, stem: Path) -> None:
    """NAME.json and NAME.md."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    lines = ["# CartPole-v1: the scaling study", ""]
    for name, part in record.items():
        lines.append(f"- {name}: `{part['command']}`")
        lines += [f"    - {line}" for line in run_dirs.describe(part["machine"])]
    for heading, rows in tables(record):
        lines += ["", f"## {heading}", "", run_dirs.as_markdown(rows, labels=1)]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


def machine() -> dict:
    """What a record says of the machine, now."""
    here = run_dirs.this_machine()
    here["cpu"]["threads"] = torch.get_num_threads()
    return run_dirs.machine([here | {"versions": run_dirs.versions(PACKAGES)}])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = processes.make_parser(__doc__)
    parser.set_defaults(out=ROOT / "plots/out/env_scaling")
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(ALL_PARTS))
    parser.add_argument("--quick", action="store_true", help="few points, short samples")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(ALL_PARTS)
    if unknown:
        parser.error(f"no part {unknown.pop()!r}: choose from {', '.join(ALL_PARTS)}")
    options.parts = options.parts or ALL_PARTS
    options.numbers, options.work, options.seconds = NUMBERS, WORK, 0.5
    if options.quick:
        options.numbers, options.work, options.seconds = [1, 64, 4096], [1, 10], 0.05
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    stem, file = options.out, options.out.with_suffix(".json")
    record = json.loads(file.read_text()) if file.exists() else {}
    said = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "plots/measure/env_scaling.py", *said])
    for name in [part for part in PARTS if part in options.parts]:
        print(f"-- {name}", flush=True)
        record[name] = {"command": command, "machine": machine()} | PARTS[name](options)
        write(record, stem)
    if not record:
        return processes.say_failures([f"no record {shown(file)}: run the other parts first"])
    for heading, rows in tables(record):
        print(f"\n{heading}\n{run_dirs.as_text(rows, labels=1)}")
    files = [file, stem.with_suffix(".md")]
    if "figures" in options.parts:
        files += draw(record, stem)
    print(f"files: {', '.join(map(shown, files))}")
    return 0


if __name__ == "__main__":
    processes.start(main)
