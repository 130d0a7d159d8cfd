"""The scaling study: what CartPole costs when there are 1 to a million of them.

    bash run.sh study                           sets up, then all of it: about half an hour
    python plots/measure/env_scaling.py steps work      only these parts
    python plots/measure/env_scaling.py --quick         a few points of each, in minutes
    python plots/measure/env_scaling.py figures --out plots/results/env_scaling_cpu

After "Increasing Sample Throughput for RL Environments" (CS267, Berkeley). The arms are those of
plots/measure/env_arms.py; one that cannot run here is named with the reason. One at a time:

    limits      what the machine can do: bytes/s of a copy, FLOP/s of a matrix product
    steps       seconds of one step of all environments against their number. A straight line
                a + b N is fitted to it in relative error; its turning point from flat to linear is
                N = a / b
    work        the same against the arithmetic per step, repeated 1 to 1,000 times
    train       PPO end to end at the scripts' defaults, steady steps/s in rounds (A B C, A B C):
                the baseline, the variant, and the variant's learner on the kernel and on
                Gymnasium's SyncVectorEnv
    search      for each back end, the number of environments with which evaluation on Gymnasium's
                own CartPole-v1 first reaches 475 in the least time after warm-up
    learn       evaluation (100 episodes) against training time with that number, 5 seeds, each
                until two evaluations in a row reach 475. `cold` is from the start of the process,
                imports, compilation and capture included; `warm` is steps / steady steps per
                second. Evaluation itself does not count

Written to --out: NAME.json with every sample, NAME.md with the tables, NAME_*.png. Each part says
on which machine it ran and replaces what a former call has left of it.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import env_arms
import processes
import run_dirs
import torch
from env_arms import ARMS, LEARNERS, Arm, Stepper
from env_tables import SOLVED, tables
from run_dirs import shown

ROOT = run_dirs.ROOT
SAMPLES = 5  # per point; the median counts
NUMBERS = sorted({32} | {4**k for k in range(11)})  # of environments; 32 is where processes end
WORK = [1, 3, 10, 30, 100, 300, 1000]
PACKAGES = ["torch", "tensordict", "gymnasium", "numpy", "envpool", "stable-baselines3", "numba"]
STEPS_PER_ROLLOUT = 32
# how many a run may take; what needs more than the first is not the fastest anyway
SEARCH_ROLLOUTS, LEARNING_ROLLOUTS = 60, 150
# of PPO per environment step: forward passes in the rollout (both networks) and of final
# observations (the critic), and 4 epochs of forward and backward passes, backward counting twice;
# not for what the first layer saw
NETWORK = {"first": 2 * 4 * 64, "second": 2 * 64 * 64}
FORWARD = 2 * sum(NETWORK.values()) + 2 * 64 * (1 + 2)
STEP_FLOP = FORWARD + FORWARD / 2 + 4 * (3 * FORWARD - 2 * NETWORK["first"])


# What is measured


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
    """Bytes/s that a copy of 256 MB reads and writes, float32 FLOP/s of a product, of each device.

    The best of several: limits are what the hardware does undisturbed.
    """
    found = {}
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        wait = env_arms.waiting(torch.device(device))
        source = torch.zeros(2**26, device=device)
        target = torch.zeros_like(source)
        a, b = torch.randn(2, 2048, 2048, device=device)
        copies = time_steps(Stepper(lambda s=source, t=target: t.copy_(s), 1, wait), 1.0, 10)
        products = time_steps(Stepper(lambda a=a, b=b: a @ b, 1, wait), 1.0, 10)
        found[device] = {
            "bytes_per_second": 2 * 4 * 2**26 / min(copies),
            "flops": 2 * 2048**3 / min(products),
        }
        print(f"{device}: {', '.join(f'{name} {x:.3g}' for name, x in found[device].items())}")
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
            except (RuntimeError, MemoryError, OSError) as error:  # does not fit
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


# Training, each run a process of its own


class Solved(Exception):
    """Ends a run, which writes its files nevertheless."""


def train(back_end: str, seed: int, flags: dict, started: float, stop_after: int) -> None:
    """The worker: one run, whose last line says when it evaluated what."""
    module, settings = env_arms.learner(back_end)
    evaluate, begun, evaluated, curve = module.evaluate, time.time(), 0.0, []

    def timed_evaluate(*arguments) -> float:
        nonlocal evaluated
        begin = time.time()
        result = evaluate(*arguments)
        curve.append([begin - started - evaluated, result])
        evaluated += time.time() - begin
        last = [value for _, value in curve[-stop_after:]]
        if len(last) == stop_after and min(last) >= SOLVED:
            raise Solved
        return result

    module.evaluate = timed_evaluate
    settings = settings | flags | {"seed": seed, "exp_name": f"study-{back_end.replace(' ', '-')}"}
    with suppress(Solved):
        module.main(module.Args(**settings))
    print(json.dumps({"curve": curve, "startup_seconds": begun - started}))


def run_training(
    back_end: str,
    seed: int,
    flags: dict,
    options: argparse.Namespace,
    stop_after: int = 999,
    cold: bool = True,
) -> dict:
    """One run in a process of its own -> its numbers, in seconds; ValueError says what went wrong.

    It ends early after so many evaluations in a row of at least 475; `cold` gives it a compiler
    cache of its own. Evaluations get the environment step of each: they are regular.
    """
    name = "-".join(["study", *back_end.split(), *map(str, flags.values()), str(seed)])
    log = options.out.parent / "logs" / f"{name}.log"
    worker = {"back_end": back_end, "seed": seed, "flags": flags, "stop_after": stop_after}
    worker = json.dumps(worker | {"started": time.time()})
    command = [sys.executable, "plots/measure/env_scaling.py", "--worker", worker]
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache} if cold else {}
        status = processes.run_logged(command, log, environment=environment)
    run_dir = processes.read_log(status, log, f"{back_end}, seed {seed}", processes.run_directory)
    result = json.loads(log.read_text().rstrip().rpartition("\n")[2])
    stages = run_dirs.read_json(run_dir / "stages.json")
    result |= {name: stages[name] for name in ("sps_steady", "sps_inclusive", "warmup_seconds")}
    for i, point in enumerate(result["curve"], start=1):
        point.append(min(i * flags["eval_every"], flags["total_timesteps"]))
    result["config"] = run_dirs.read_config(run_dir)
    return {"back_end": back_end, "seed": seed, "flags": flags, **result}


def time_to_solve(run: dict) -> dict | None:
    """When evaluation first reached 475: environment steps, seconds cold and warm."""
    for seconds, value, step in run["curve"]:
        if value >= SOLVED:
            rate = run["sps_steady"] or run["sps_inclusive"]  # if it ended within the warm-up
            return {"steps": step, "cold": seconds, "warm": step / rate}
    return None


def measure_training(options: argparse.Namespace) -> dict:
    rows, batch = [], 4096 * STEPS_PER_ROLLOUT
    flags = {"total_timesteps": (3 + options.rollouts) * batch}
    for seed in range(1, options.rounds + 1):
        for back_end in LEARNERS:
            rows.append(run_training(back_end, seed, flags, options))
            print(f"{back_end}, round {seed}: {rows[-1]['sps_steady']:,.0f} steps/s", flush=True)
    return {"rows": rows, "flop_per_step": STEP_FLOP}


def run_learning(back_end: str, num_envs: int, seed: int, rollouts: int, options, **how) -> dict:
    """A run that evaluates every third rollout, and when it had solved the task."""
    batch = num_envs * STEPS_PER_ROLLOUT
    flags = {"num_envs": num_envs, "total_timesteps": rollouts * batch}
    flags |= {"eval_every": 3 * batch, "eval_episodes": 100}
    run = run_training(back_end, seed, flags, options, **how)
    solved = time_to_solve(run)
    said = f"{solved['steps']:,} steps, {solved['warm']:.2f} s" if solved else "not solved"
    print(f"{back_end}, {num_envs:,} environments, seed {seed}: {said}", flush=True)
    return run | {"solved": solved}


def search_numbers(options: argparse.Namespace) -> dict:
    """Seed 0, which `learn` does not use; a run ends when it has solved the task."""
    rows, best = [], {}
    for back_end in LEARNERS:
        how = {"stop_after": 1, "cold": False}
        runs = [
            run_learning(back_end, num_envs, 0, SEARCH_ROLLOUTS, options, **how)
            for num_envs in options.learning_envs
        ]
        solved = [run for run in runs if run["solved"]]
        fastest = min(solved, key=lambda run: run["solved"]["warm"], default=None)
        best[back_end] = fastest["flags"]["num_envs"] if fastest else None
        print(f"{back_end}: best with {best[back_end]} environments", flush=True)
        rows += runs
    return {"rows": rows, "best": best}


def measure_learning(options: argparse.Namespace) -> dict:
    best = options.record.get("search", {}).get("best")
    if not best:
        raise SystemExit("error: learn needs the best numbers of environments: run search as well")
    rows = [
        run_learning(back_end, num_envs, seed, LEARNING_ROLLOUTS, options, stop_after=2)
        for seed in range(1, options.seeds + 1)
        for back_end, num_envs in best.items()
        if num_envs
    ]
    return {"rows": rows}


PARTS = {
    "limits": measure_limits,
    "steps": measure_steps,
    "work": measure_work,
    "train": measure_training,
    "search": search_numbers,
    "learn": measure_learning,
}
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
    parser.add_argument("--rounds", type=int, default=3, help="of train")
    parser.add_argument("--seeds", type=int, default=5, help="of learn")
    parser.add_argument("--worker", help="internal: one training run, as JSON")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(ALL_PARTS)
    if unknown:
        parser.error(f"no part {unknown.pop()!r}: choose from {', '.join(ALL_PARTS)}")
    options.parts = options.parts or ALL_PARTS
    options.numbers, options.work, options.seconds = NUMBERS, WORK, 0.5
    options.rollouts, options.learning_envs = 10, [64, 512, 4096]
    if options.quick:
        options.numbers, options.work, options.seconds = [1, 64, 4096], [1, 10], 0.05
        options.rollouts, options.learning_envs = 2, [64]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        train(**json.loads(options.worker))
        return 0
    stem, file = options.out, options.out.with_suffix(".json")
    options.record = json.loads(file.read_text()) if file.exists() else {}
    said = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "plots/measure/env_scaling.py", *said])
    try:
        for name in [part for part in PARTS if part in options.parts]:
            print(f"-- {name}", flush=True)
            head = {"command": command, "machine": machine()}
            options.record[name] = head | PARTS[name](options)
            write(options.record, stem)
    except ValueError as failure:
        return processes.say_failures([str(failure)])
    for heading, rows in tables(options.record):
        print(f"\n{heading}\n{run_dirs.as_text(rows, labels=1)}")
    if "figures" in options.parts:
        import env_figures

        for path in env_figures.draw(options.record, stem):
            print(f"figure: {shown(path)}")
    if not options.record:
        return processes.say_failures([f"no record {shown(file)}: run the other parts first"])
    print(f"files: {shown(file)}, {shown(stem.with_suffix('.md'))}")
    return 0


if __name__ == "__main__":
    processes.start(main)
