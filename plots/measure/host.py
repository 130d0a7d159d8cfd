"""What the host does while a GPU trains: why one run is faster than the next.

    python plots/measure/host.py

SAC, compiled and captured, as the system places it, then on the first and on the last core; beside
it, on a core between them, a loop that only counts. A line per second:

    steps/s, counts/s   of the training and of the loop: do both slow down, it is the processor
    steal               percent of the cores' time that another machine took
    GPU                 clocks of its processors and memory in MHz, power state, and the reasons of
                        its clocks, by nvidia-smi

Written to --out: host.md and .json.
"""

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import processes
import program
import run_dirs
import tables

TRAINING = ["leanrl/sac_continuous_action_torchcompile.py", "--compile", "--cudagraphs"]
COUNTING = """
import time
count, end = 0, time.monotonic() + 1
while True:
    count += 1
    if time.monotonic() > end:
        print(count, flush=True)
        end += 1
"""
GPU = "clocks.sm,clocks.mem,pstate,clocks_event_reasons.active"


def ask_gpu() -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={GPU}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, text=True, capture_output=True, timeout=5)
    except OSError:  # there is none
        return ["-"] * 4
    return [word.strip() for word in found.stdout.splitlines()[0].split(",")]


def times_of_cores() -> tuple[int, int]:
    """Ticks of all cores so far, and those that were stolen."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return sum(ticks), ticks[7]


def watch(name: str, core: int | None, counting: int, seconds: float, logs: Path) -> list[dict]:
    """A row per second of a training, on `core` if there is one."""
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    command = [*pinned, sys.executable, *TRAINING]
    loop = ["taskset", "-c", str(counting), sys.executable, "-c", COUNTING]
    log, counts = logs / f"host-{name}.log", logs / f"host-{name}-counts.log"
    samples = []
    with processes.logged(loop, counts), processes.logged(command, log) as child:
        end = time.monotonic() + seconds
        while time.monotonic() < end and child.poll() is None:
            steps, _ = processes.progress_in(log)
            counted = counts.read_text().split()
            samples.append((time.monotonic(), steps, counted, *times_of_cores(), ask_gpu()))
            time.sleep(max(1 - (time.monotonic() - samples[-1][0]), 0))
    rows = []
    for (then, steps, _, ticks, stolen, _), now in pairwise(samples):
        gap = now[0] - then
        rows.append(
            {
                "training": name,
                "second": round(now[0] - samples[0][0], 1),
                "steps/s": round((now[1] - steps) / gap),
                "counts/s": int(now[2][-1]) if now[2] else 0,
                "steal %": round(100 * (now[4] - stolen) / max(now[3] - ticks, 1), 1),
                "GPU": " ".join(now[5]),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out")
    parser.add_argument("--seconds", type=float, default=40, help="of each training")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    places = {"anywhere": None, "first core": cores[0], "last core": cores[-1]}
    rows = []
    for name, core in places.items():
        counting = cores[len(cores) // 2]
        rows += watch(name, core, counting, options.seconds, options.out / "logs")
    record = {
        "schema": 1,
        "command": processes.call("host.py", options, "seconds"),
        "machine": run_dirs.measured_here(1),
        "rows": rows,
    }
    columns = {name: lambda row, name=name: str(row[name]) for name in list(rows[0])[1:]}
    found = tables.lay_out(rows, ["training"], columns)
    tables.write_report(options.out / "host", "A host beside its GPU", found, record)
    return 0


if __name__ == "__main__":
    program.start(main)
