"""The field benchmark: how fast SAC is here and in other libraries, on the same machine.

    bash run.sh field                               makes .venv-field first, then calls this
    python plots/field.py --rounds 3 --steps 3000 --field-python .venv-field/bin/python

Stable-Baselines3 (PyTorch) and SBX (JAX, compiled), each with its own defaults, against our
baseline, the variant eager and the variant with --compile: HalfCheetah-v5, one environment, batches
of 256, one update per step, the same number of steps, of which the first 500 are random. One
process at a time, in rounds (A B C D E, A B C D E), round n with seed n. All use as many threads as
they choose, and a GPU if their build of torch or JAX has one.

    steps/s         median over the rounds, and range, after the warm-up: for ours the stopwatch's
                    steady window, for the others from 1,000 steps after learning starts to the end
    of SB3          median over the rounds of steps/s divided by SB3's in the same round
    warm-up s       median seconds from the program's own start, imports done, to that window. It
                    has 1,000 steps with updates for the others and a hundred for ours

Written to plots/out/: field.md, field.json, and logs/. Exit status 1 if a run failed.
"""

import argparse
import json
import shlex
import signal
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LEARNING_STARTS = 500
STEADY_AFTER = 1000  # steps with updates, in the libraries; JAX has long compiled by then
BATCH_SIZE = 256
ENV_ID = "HalfCheetah-v5"
SAC = "leanrl/sac_continuous_action"
LIBRARIES = {"Stable-Baselines3": "sb3", "SBX": "sbx"}
OURS = {
    "LeanRL baseline": [f"{SAC}.py"],
    "LeanRL eager": [f"{SAC}_torchcompile.py"],
    "LeanRL compile": [f"{SAC}_torchcompile.py", "--compile"],
}
PACKAGES = ("stable-baselines3", "sbx-rl", "torch", "jax", "gymnasium", "mujoco", "numpy")


def versions() -> dict:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def work(library: str, steps: int, seed: int) -> None:
    """The worker, in the field's python: trains and prints what it measured as its last line."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    if library == "sbx":
        import jax
        from sbx import SAC

        device = str(jax.devices()[0])
    else:
        from stable_baselines3 import SAC

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    class Clock(BaseCallback):
        start = None

        def _on_step(self) -> bool:
            if self.num_timesteps == LEARNING_STARTS + STEADY_AFTER:
                self.start = time.perf_counter()
            if self.num_timesteps % 100 == 0:  # for the parent's bar
                print(f"{self.num_timesteps}/{steps} [", file=sys.stderr, flush=True)
            return True

    clock, born = Clock(), time.perf_counter()
    settings = {"learning_starts": LEARNING_STARTS, "batch_size": BATCH_SIZE, "seed": seed}
    SAC("MlpPolicy", ENV_ID, **settings).learn(steps, callback=clock)
    seconds = time.perf_counter() - clock.start
    result = {
        "sps_steady": (steps - LEARNING_STARTS - STEADY_AFTER) / seconds,
        "warmup_seconds": clock.start - born,
        "device": device,
        "torch_threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "versions": versions(),
    }
    print(json.dumps(result))


def measure(entrant: str, seed: int, options: argparse.Namespace, progress) -> dict:
    """One run of `entrant` -> its numbers; ValueError says what went wrong."""
    import os

    import speedup

    log = options.out / "logs" / f"field-{entrant.replace(' ', '-')}-seed-{seed}.log"
    if entrant in LIBRARIES:
        worker = ["--worker", LIBRARIES[entrant], "--steps", str(options.steps)]
        command = [options.field_python, "plots/field.py", *worker, "--seed", str(seed)]
    else:
        flags = {"--env-id": ENV_ID, "--learning-starts": LEARNING_STARTS, "--seed": seed}
        flags |= {"--batch-size": BATCH_SIZE, "--total-timesteps": options.steps}
        command = [sys.executable, *OURS[entrant]]
        command += [str(part) for flag in flags.items() for part in flag]
    load = os.getloadavg()
    status = speedup.run_logged(command, log, progress, {"PYTHONUNBUFFERED": "1"})
    try:
        if status:
            raise ValueError(f"ended with exit status {status}")
        if entrant in LIBRARIES:
            result = json.loads(log.read_text().rstrip().rpartition("\n")[2])
        else:
            run = speedup.read_run(speedup.run_directory(log))
            result = {key: run.stages[key] for key in ("sps_steady", "warmup_seconds")}
            result |= {"run": speedup.shown(run.path), "config": run.config}
    except ValueError as reason:
        where = f"see {speedup.shown(log)}:\n{speedup.last_lines(log)}"
        raise ValueError(f"{entrant} round {seed} {reason}, {where}") from None
    return {"command": shlex.join(["python", *command[1:]]), "load_average": load, **result}


def summarize(rounds: list[dict]) -> list[dict]:
    """One dict per entrant from rounds {entrant: result}, in which a failed one is missing."""
    from speedup import spread

    reference, rows = next(iter(LIBRARIES)), []
    for entrant in (*LIBRARIES, *OURS):
        results = [results[entrant] for results in rounds if entrant in results]
        if not results:
            rows.append({"entrant": entrant, "skipped": "no finished run"})
            continue
        ratios = [
            results[entrant]["sps_steady"] / results[reference]["sps_steady"]
            for results in rounds
            if entrant in results and reference in results
        ]
        rows.append(
            {
                "entrant": entrant,
                "sps_steady": spread([result["sps_steady"] for result in results]),
                "ratio_to_sb3": statistics.median(ratios) if ratios else None,
                "warmup_seconds": spread([result["warmup_seconds"] for result in results]),
                "runs": len(results),
            }
        )
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    table = [["implementation", "steps/s", "min-max", "of SB3", "warm-up s", "runs"]]
    for row in rows:
        if "skipped" in row:
            table.append([row["entrant"], f"skipped: {row['skipped']}", *[""] * 4])
            continue
        steady, ratio = row["sps_steady"], row["ratio_to_sb3"]
        table.append(
            [
                row["entrant"],
                f"{steady['median']:,.1f}",
                f"{steady['min']:,.1f}-{steady['max']:,.1f}",
                f"{ratio:.2f}x" if ratio else "-",
                f"{row['warmup_seconds']['median']:.1f}",
                str(row["runs"]),
            ]
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000, help="environment steps per run")
    parser.add_argument("--field-python", default=".venv-field/bin/python")
    parser.add_argument("--out", type=Path, default=root / "plots/out", help="folder of the report")
    parser.add_argument("--worker", choices=LIBRARIES.values(), help="internal: one library's run")
    parser.add_argument("--seed", type=int, default=1, help="internal: of the worker")
    options = parser.parse_args(arguments)
    least = LEARNING_STARTS + STEADY_AFTER
    if options.steps <= least:
        parser.error(f"--steps {options.steps}: the first {least} are warm-up")
    if options.worker:
        work(options.worker, options.steps, options.seed)
        return 0
    if not (root / options.field_python).exists():
        parser.error(f"no {options.field_python}: `bash run.sh field` makes it")

    # here, because the worker's environment need not have what they need
    import speedup
    import tqdm

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds, failures, entrants = [], [], (*LIBRARIES, *OURS)
    with tqdm.tqdm(total=options.rounds * len(entrants) * options.steps, unit="step") as bar:
        try:
            for seed in range(1, options.rounds + 1):
                rounds.append({})
                for entrant in entrants:
                    done = ((seed - 1) * len(entrants) + entrants.index(entrant)) * options.steps
                    bar.set_postfix_str(f"round {seed}/{options.rounds}: {entrant}")

                    def progress(steps: int, done=done) -> None:
                        bar.update(max(done + steps, bar.n) - bar.n)

                    try:
                        rounds[-1][entrant] = measure(entrant, seed, options, progress)
                    except ValueError as failure:
                        failures.append(str(failure))
                    progress(options.steps)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130

    results = [result for results in rounds for result in results.values()]
    configs = [result["config"] for result in results if "config" in result]
    if configs:
        hardware, rows = speedup.machine(configs), summarize(rounds)
        loads = [result["load_average"][0] for result in results]
        hardware["load_average_1min"] = {"min": min(loads), "max": max(loads)}
        command = f"python plots/field.py --rounds {options.rounds} --steps {options.steps}"
        above = [f"Field benchmark: {command}", *speedup.describe(hardware)]
        above.append(f"{ENV_ID}, {options.steps:,} environment steps per run")
        for library in LIBRARIES:
            for worker in [results[library] for results in rounds if library in results][:1]:
                found = ", ".join(f"{name} {number}" for name, number in worker["versions"].items())
                where = f"{worker['device']}, {worker['torch_threads']} torch threads"
                above.append(f"{library}: Python {worker['python']}, {found}; {where}")
        record = {"schema": 1, "command": command, "machine": hardware, "rows": rows}
        record |= {"rounds": rounds, "failures": failures}
        below = [f"logs: {speedup.shown(options.out / 'logs')}/"]
        speedup.write_report(options.out / "field", above, cells(rows), below, record, labels=1)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
