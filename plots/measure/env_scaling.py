"""The scaling study: what a step of CartPole costs when there are 1 to a million of them.

    bash run.sh study                                   sets up, then measures, in minutes
    python plots/measure/env_scaling.py --quick         a few points, short samples

After "Increasing Sample Throughput for RL Environments" (CS267, Berkeley). The arms are those of
plots/measure/env_arms.py, one after the other; one that cannot run here is named with the reason.
Measured are the seconds of one step of all environments against their number. A straight line
a + b N is fitted to them in relative error; its turning point from flat to linear is N = a / b. Of
each device it is also measured how many bytes/s a copy reads and writes: what memory allows. What
PPO makes of such environments is in the speed-up table, by ppo_cartpole_gpu.

Written to --out: env_scaling.json with every sample, env_scaling.md, and the figure
env_scaling_throughput.
"""

import math
import shlex
import statistics
import sys
import time

import env_arms
import env_report
import processes
import run_dirs
import torch
from env_arms import ARMS, Stepper

SAMPLES = 5  # per point; the median counts
NUMBERS = sorted({32} | {4**k for k in range(11)})  # of environments; 32 is where processes end
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


def measure_limits() -> dict[str, float]:
    """Bytes/s that a copy of 256 MB reads and writes, of each device.

    The best of several: a limit is what the hardware does undisturbed.
    """
    found = {}
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        wait = env_arms.waiting(torch.device(device))
        source = torch.zeros(2**26, device=device)
        target = torch.zeros_like(source)
        copies = time_steps(Stepper(lambda s=source, t=target: t.copy_(s), 1, wait), 1.0, 10)
        found[device] = 2 * 4 * 2**26 / min(copies)
        print(f"{device}: {found[device]:.3g} bytes/s")
    return found


def measure_steps(numbers: list[int], seconds: float) -> dict:
    """The arms that can run here, each with as many environments as it takes of `numbers`."""
    skipped = {arm.name: why for arm in ARMS if (why := arm.missing())}
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}")
    rows = []
    for arm in [arm for arm in ARMS if arm.name not in skipped]:
        for num_envs in [n for n in numbers if n <= arm.most]:
            row = {"arm": arm.name, "num_envs": num_envs}
            try:
                with arm.make(num_envs) as stepper:
                    row["seconds"] = time_steps(stepper, seconds)
                said = f"{statistics.median(row['seconds']) * 1e6:,.1f} us"
            except (RuntimeError, MemoryError, OSError, ValueError) as error:
                # it does not fit, or its kernel does not compile
                said = row["failed"] = " ".join(str(error).split())[:200]
            print(f"{arm.name}, {num_envs:,}: {said}", flush=True)
            rows.append(row)
    return {"rows": rows, "skipped": skipped}


def main(arguments: list[str] | None = None) -> int:
    parser = processes.make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few points, short samples")
    options = parser.parse_args(arguments)
    said = sys.argv[1:] if arguments is None else arguments
    here = run_dirs.this_machine() | {"versions": run_dirs.versions(PACKAGES)}
    here["cpu"]["threads"] = torch.get_num_threads()
    record = {
        "schema": 2,
        "command": shlex.join(["python", "plots/measure/env_scaling.py", *said]),
        "machine": run_dirs.machine([here]),
        "bytes_per_second": measure_limits(),
    }
    record |= measure_steps(*(([1, 64, 4096], 0.05) if options.quick else (NUMBERS, 0.5)))
    env_report.write(record, options.out / "env_scaling")
    return 0


if __name__ == "__main__":
    processes.start(main)
