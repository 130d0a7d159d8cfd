"""The scaling study: what CartPole costs when there are 1 to a million of them.

    bash run.sh study                           sets up, then all of it: about half an hour
    python plots/measure/env_scaling.py steps blocks    only these parts
    python plots/measure/env_scaling.py --quick         a few points of each, in minutes
    python plots/measure/env_scaling.py figures --out plots/results/env_scaling_cpu

After "Increasing Sample Throughput for RL Environments" (CS267, Berkeley). The arms are those of
plots/measure/env_arms.py; one that cannot run here is named with the reason. One at a time:

    limits      what the machine can do: bytes/s of a copy, FLOP/s of a matrix product
    steps       seconds of one step of all environments against their number. A straight line
                a + b N is fitted to it in relative error; its turning point from flat to linear is
                N = a / b
    work        the same against the arithmetic per step, repeated 1 to 1,000 times
    blocks      the kernel's best number of threads per block, by search (GPU only)
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
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import env_arms
import numpy as np
import processes
import run_dirs
import torch
from env_arms import ARMS, LEARNERS, Arm, Stepper

ROOT = run_dirs.ROOT
SAMPLES = 5  # per point; the median counts
NUMBERS = sorted({32} | {4**k for k in range(11)})  # of environments; 32 is where processes end
WORK = [1, 3, 10, 30, 100, 300, 1000]
PACKAGES = ["torch", "tensordict", "gymnasium", "numpy", "envpool", "stable-baselines3", "numba"]
SOLVED = 475
STEPS_PER_ROLLOUT = 32
# how many a run may take; what needs more than the first is not the fastest anyway
SEARCH_ROLLOUTS, LEARNING_ROLLOUTS = 60, 150
# per environment: state, length, random seed (shared), action read; state, length, observation,
# final observation, reward, return, final length, terminated, truncated and ended written
STEP_BYTES = (16 + 4 + 8) + (16 + 4 + 16 + 16 + 4 + 4 + 4 + 3)
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


def measure(arm: Arm, num_envs: int, seconds: float, work: int = 1) -> list[float]:
    with arm.make(num_envs, work) as stepper:
        return time_steps(stepper, seconds)


def turning_point(num_envs: list[int], seconds: list[float]) -> dict:
    """Fits seconds = flat + per_env * N, all errors relative -> both, N where they are equal.

    Relative weights, because the times span decades: weighted least squares, solved exactly. Both
    coefficients are at least 0; `turning` is None where one of them is 0.
    """
    n, t = np.array(num_envs, float), np.array(seconds)
    columns = np.stack([1 / t, n / t], axis=1)
    flat, per_env = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)[0]
    if flat <= 0:
        flat, per_env = 0.0, (columns[:, 1].sum() / np.square(columns[:, 1]).sum()).item()
    elif per_env <= 0:
        flat, per_env = (columns[:, 0].sum() / np.square(columns[:, 0]).sum()).item(), 0.0
    turning = flat / per_env if flat and per_env else None
    return {"flat": float(flat), "per_env": float(per_env), "turning": turning}


def best_block(seconds) -> tuple[int, dict[int, float]]:
    """Powers of two from 1 to 1,024, then multiples of 32 between the best one's neighbours.

    `seconds(threads)` measures one -> the best, and all that were tried.
    """
    tried = {threads: seconds(threads) for threads in (2**k for k in range(11))}
    best = min(tried, key=tried.get)
    for threads in (best * 3 // 4, best * 3 // 2):
        if threads % 32 == 0 and 0 < threads <= 1024:
            tried[threads] = seconds(threads)
    return min(tried, key=tried.get), tried


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
    return found


def available(arms: list[Arm]) -> tuple[list[Arm], dict[str, str]]:
    """The arms that can run here, and why the others cannot."""
    skipped = {arm.name: why for arm in arms if (why := arm.missing())}
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    return [arm for arm in arms if arm.name not in skipped], skipped


def measure_steps(options: argparse.Namespace) -> dict:
    arms, skipped = available(ARMS)
    rows = []
    for arm in arms:
        for num_envs in [n for n in options.numbers if n <= arm.most]:
            row = {"arm": arm.name, "num_envs": num_envs}
            try:
                row["seconds"] = measure(arm, num_envs, options.seconds)
            except (RuntimeError, MemoryError, OSError) as error:  # does not fit
                row["failed"] = " ".join(str(error).split())[:200]
                print(f"{arm.name}, {num_envs:,}: {row['failed']}")
            else:
                speed = num_envs / statistics.median(row["seconds"])
                print(f"{arm.name}, {num_envs:,}: {speed:,.0f} steps/s", flush=True)
            rows.append(row)
    return {"rows": rows, "skipped": skipped}


def measure_work(options: argparse.Namespace) -> dict:
    arms, skipped = available([arm for arm in ARMS if arm.works])
    numbers = [4**5, 4**8] + [4**10] * torch.cuda.is_available()
    rows = []
    for arm in arms:
        for num_envs in numbers:
            for work in options.work:
                seconds = measure(arm, num_envs, options.seconds, work)
                rows.append(
                    {"arm": arm.name, "num_envs": num_envs, "work": work, "seconds": seconds}
                )
                median = statistics.median(seconds)
                print(f"{arm.name}, {num_envs:,}, work {work}: {median * 1e6:,.0f} us", flush=True)
    return {"rows": rows, "skipped": skipped}


def measure_blocks(options: argparse.Namespace) -> dict:
    """The best block size at three numbers of environments."""
    if not torch.cuda.is_available():
        print("skipped: blocks: no CUDA device")
        return {"rows": [], "skipped": {"blocks": "no CUDA device"}}
    rows = []
    for num_envs in (4096, 65_536, 4**10):

        def seconds(threads: int, num_envs=num_envs) -> float:
            with env_arms.of_kernel("cuda", threads, num_envs) as stepper:
                return statistics.median(time_steps(stepper, options.seconds))

        best, tried = best_block(seconds)
        rows.append({"num_envs": num_envs, "best": best, "seconds": tried})
        print(f"best block size at {num_envs:,} environments: {best} threads", flush=True)
    return {"rows": rows, "skipped": {}}


# Training, each run a process of its own


class Solved(Exception):
    """Ends a run, which writes its files nevertheless."""


def train(back_end: str, options: argparse.Namespace) -> None:
    """The worker: one run, whose last line says when it evaluated what."""
    module, flags = env_arms.learner(back_end)
    evaluate, begun, evaluated, curve = module.evaluate, time.time(), 0.0, []

    def timed_evaluate(*arguments) -> float:
        nonlocal evaluated
        begin = time.time()
        result = evaluate(*arguments)
        curve.append([begin - options.started - evaluated, result])
        evaluated += time.time() - begin
        last = [value for _, value in curve[-options.stop_after :]]
        if len(last) == options.stop_after and min(last) >= SOLVED:
            raise Solved
        return result

    module.evaluate = timed_evaluate
    flags = flags | json.loads(options.flags) | {"seed": options.seed}
    with suppress(Solved):
        module.main(module.Args(**flags, exp_name=f"study-{back_end.replace(' ', '-')}"))
    print(json.dumps({"curve": curve, "startup_seconds": begun - options.started}))


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
    worker = ["--train", back_end, "--seed", str(seed), "--flags", json.dumps(flags)]
    worker += ["--started", str(time.time()), "--stop-after", str(stop_after)]
    command = [sys.executable, "plots/measure/env_scaling.py", *worker]
    with tempfile.TemporaryDirectory() as cache:
        environment = {"PYTHONUNBUFFERED": "1"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": cache} if cold else {}
        status = processes.run_logged(command, log, lambda steps: None, environment)
    if status:
        raise ValueError(
            f"{back_end}, seed {seed}: exit status {status}, see {run_dirs.shown(log)}:\n"
            + processes.last_lines(log)
        )
    result = json.loads(log.read_text().rstrip().rpartition("\n")[2])
    run_dir = processes.run_directory(log)
    stages = json.loads((run_dir / "stages.json").read_text())
    result |= {name: stages[name] for name in ("sps_steady", "sps_inclusive", "warmup_seconds")}
    result["config"] = run_dirs.read_config(run_dir)
    if "eval_every" in flags:
        steps = [min((i + 1) * flags["eval_every"], flags["total_timesteps"]) for i in range(999)]
        result["curve"] = [[*point, step] for point, step in zip(result["curve"], steps)]  # noqa: B905
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


def learning_flags(num_envs: int, rollouts: int) -> dict:
    batch = num_envs * STEPS_PER_ROLLOUT
    return {
        "num_envs": num_envs,
        "total_timesteps": rollouts * batch,
        "eval_every": 3 * batch,
        "eval_episodes": 100,
    }


def search_numbers(options: argparse.Namespace) -> dict:
    """Seed 0, which `learn` does not use; a run ends when it has solved the task."""
    rows, best = [], {}
    for back_end in LEARNERS:
        for num_envs in options.learning_envs:
            flags = learning_flags(num_envs, SEARCH_ROLLOUTS)
            run = run_training(back_end, 0, flags, options, stop_after=1, cold=False)
            solved = time_to_solve(run)
            rows.append(run | {"solved": solved})
            found = f"{solved['steps']:,} steps, {solved['warm']:.2f} s" if solved else "not solved"
            print(f"{back_end}, {num_envs:,} environments: {found}", flush=True)
        mine = [row for row in rows if row["back_end"] == back_end and row["solved"]]
        fastest = min(mine, key=lambda row: row["solved"]["warm"], default=None)
        best[back_end] = fastest["flags"]["num_envs"] if fastest else None
        print(f"{back_end}: best with {best[back_end]} environments", flush=True)
    return {"rows": rows, "best": best}


def measure_learning(options: argparse.Namespace) -> dict:
    best = options.record.get("search", {}).get("best")
    if not best:
        raise SystemExit("error: learn needs the best numbers of environments: run search as well")
    rows = []
    for seed in range(1, options.seeds + 1):
        for back_end, num_envs in best.items():
            if num_envs is None:
                continue
            flags = learning_flags(num_envs, LEARNING_ROLLOUTS)
            run = run_training(back_end, seed, flags, options, stop_after=2)
            rows.append(run | {"solved": time_to_solve(run)})
            print(f"{back_end}, seed {seed}: {rows[-1]['solved']}", flush=True)
    return {"rows": rows}


PARTS = {
    "limits": measure_limits,
    "steps": measure_steps,
    "work": measure_work,
    "blocks": measure_blocks,
    "train": measure_training,
    "search": search_numbers,
    "learn": measure_learning,
}


# What is said of it


def distinct(rows: list[dict], name: str) -> list:
    """The values of `name` in the order in which the rows have them."""
    return list(dict.fromkeys(row[name] for row in rows))


def medians(rows: list[dict], **which) -> dict[int, float]:
    """Median seconds by number of environments, or by work, of the rows that match."""
    key = "work" if "num_envs" in which else "num_envs"
    return {
        row[key]: statistics.median(row["seconds"])
        for row in rows
        if "seconds" in row and all(row[name] == value for name, value in which.items())
    }


def short(number: float) -> str:
    """1.23 M rather than 1,234,567."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def with_range(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def describe_turning(fit: dict, num_envs: list[int]) -> str:
    turning = fit["turning"]
    if turning is None:
        return "none"
    if turning > max(num_envs):
        return f"above {max(num_envs):,}"
    return f"{turning:,.0f}" if turning > min(num_envs) else "below 1"


def tables(record: dict) -> list[tuple[str, list[list[str]]]]:
    """(heading, cells with a heading line, all lines as long) of each part that is there."""
    found = []
    if "limits" in record:
        rows = [["device", "copy, bytes/s", "float32 FLOP/s"]]
        for device, limits in record["limits"]["devices"].items():
            rows.append([device, short(limits["bytes_per_second"]), short(limits["flops"])])
        found.append(("Limits", rows))
    if "steps" in record:
        part = record["steps"]
        numbers = sorted({row["num_envs"] for row in part["rows"]})
        shown = [n for n in (1, 64, 1024, 4096, 65_536, 4**10) if n in numbers] or numbers
        head = ["arm", *(f"steps/s at {n:,}" for n in shown), "flat, us", "ns per env", "turning"]
        rows = [head]
        for arm in distinct(part["rows"], "arm"):
            seconds = medians(part["rows"], arm=arm)
            line = [arm, *(short(n / seconds[n]) if n in seconds else "-" for n in shown)]
            if len(seconds) > 2:
                fit = turning_point(list(seconds), list(seconds.values()))
                line += [f"{fit['flat'] * 1e6:,.1f}", f"{fit['per_env'] * 1e9:,.2f}"]
                line.append(describe_turning(fit, list(seconds)))
            rows.append(line + ["-"] * (len(head) - len(line)))
        rows += [[arm, f"skipped: {why}"] for arm, why in part["skipped"].items()]
        found.append(("Steps", rows))
    if "work" in record:
        part = record["work"]
        works = sorted({row["work"] for row in part["rows"]})
        rows = [["arm", "environments", *(f"us at {work:,}x" for work in works), "last / first"]]
        for arm, num_envs in dict.fromkeys((r["arm"], r["num_envs"]) for r in part["rows"]):
            seconds = medians(part["rows"], arm=arm, num_envs=num_envs)
            line = [arm, f"{num_envs:,}", *(f"{seconds[work] * 1e6:,.1f}" for work in works)]
            rows.append([*line, f"{seconds[works[-1]] / seconds[works[0]]:,.0f}x"])
        rows += [[arm, f"skipped: {why}"] for arm, why in part["skipped"].items()]
        found.append(("Repeated work", rows))
    if "blocks" in record:
        rows = [["environments", "best threads per block", "its us", "worst us"]]
        for row in record["blocks"]["rows"]:
            times = row["seconds"].values()
            cells = (
                f"{row['num_envs']:,}",
                str(row["best"]),
                *(f"{f(times) * 1e6:.2f}" for f in (min, max)),
            )
            rows.append(list(cells))
        rows += [[name, f"skipped: {why}"] for name, why in record["blocks"]["skipped"].items()]
        found.append(("Block sizes", rows))
    if "train" in record:
        part, rates = record["train"], {}
        for row in part["rows"]:
            rates.setdefault(row["back_end"], []).append(row["sps_steady"])
        gpu = part["machine"]["gpu"]
        peak = record.get("limits", {}).get("devices", {}).get("cuda" if gpu else "cpu")
        rows = [["back end", "steps/s", "min-max", "of tensors", "of Gymnasium", "of the FLOP/s"]]
        for back_end, mine in rates.items():
            ratios = [
                statistics.median(a / b for a, b in zip(mine, rates[other], strict=True))
                for other in ("tensors", "Gymnasium sync")
            ]
            line = [
                back_end,
                f"{statistics.median(mine):,.0f}",
                f"{min(mine):,.0f}-{max(mine):,.0f}",
            ]
            line += [f"{ratio:.2f}x" for ratio in ratios]
            share = (
                statistics.median(mine) * part["flop_per_step"] / peak["flops"] if peak else None
            )
            rows.append([*line, f"{share:.1%}" if share else "-"])
        found.append(("Training", rows))
    if "learn" in record:
        part = record["learn"]
        rows = [["back end", "environments", "seeds solved", "steps", "warm s", "cold s"]]
        for back_end in distinct(part["rows"], "back_end"):
            mine = [row for row in part["rows"] if row["back_end"] == back_end]
            solved = [row["solved"] for row in mine if row["solved"]]
            line = [back_end, f"{mine[0]['flags']['num_envs']:,}", f"{len(solved)} of {len(mine)}"]
            for name, form in (("steps", ",.0f"), ("warm", ".2f"), ("cold", ".1f")):
                values = [each[name] for each in solved]
                line.append(with_range(values, form) if values else "-")
            rows.append(line)
        found.append(("Learning: first evaluation of at least 475", rows))
    return [
        (heading, [row + [""] * (len(rows[0]) - len(row)) for row in rows])
        for heading, rows in found
    ]


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join([*PARTS, "figures"]))
    parser.add_argument("--quick", action="store_true", help="few points, short samples")
    parser.add_argument("--rounds", type=int, default=3, help="of train")
    parser.add_argument("--seeds", type=int, default=5, help="of learn")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out/env_scaling")
    for name, kind, default in (("train", str, None), ("seed", int, 1), ("flags", str, "{}")):
        parser.add_argument(f"--{name}", type=kind, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--stop-after", type=int, default=999, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        train(options.train, options)
        return 0
    for part in options.parts:
        if part not in PARTS and part != "figures":
            parser.error(f"no part {part!r}: choose from {', '.join([*PARTS, 'figures'])}")
    quick = options.quick
    options.numbers = [1, 64, 4096] if quick else NUMBERS
    options.work, options.seconds = ([1, 10] if quick else WORK), (0.05 if quick else 0.5)
    options.rollouts = 2 if quick else 10
    options.learning_envs = [64] if quick else [64, 512, 4096]
    parts = options.parts or [*PARTS, "figures"]

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.out = options.out.resolve()
    file = options.out.with_suffix(".json")
    options.record = json.loads(file.read_text()) if file.exists() else {}
    try:
        for name in [part for part in PARTS if part in parts]:
            print(f"-- {name}", flush=True)
            said = [
                "python",
                "plots/measure/env_scaling.py",
                *(sys.argv[1:] if arguments is None else arguments),
            ]
            head = {"command": shlex.join(said), "machine": machine()}
            found = PARTS[name](options)
            options.record[name] = head | ({"devices": found} if name == "limits" else found)
            write(options.record, options.out)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except ValueError as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    for heading, rows in tables(options.record):
        print(f"\n{heading}\n{run_dirs.as_text(rows, labels=1)}")
    if "figures" in parts:
        import env_figures

        if not options.record:
            parser.error(f"no record {run_dirs.shown(file)}: run the other parts first")
        for path in env_figures.draw(options.record, options.out):
            print(f"figure: {run_dirs.shown(path)}")
    print(f"files: {run_dirs.shown(file)}, {run_dirs.shown(options.out.with_suffix('.md'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
