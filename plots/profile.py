"""What a run spent its time on, and what to change: a stopwatch's report read out in words.

    python plots/profile.py runs/RUN                after --stopwatch trace: layers and transitions
    python plots/profile.py my/folder/stages.json   of a script of your own with a copied stopwatch

Needs nothing but stages.json. Prints a stage x layer table, in microseconds per environment step,
and findings, the most expensive first. Each says what it rests on and the most that could be
gained, so that a small one is known to be small. Seconds per stage are those of the steady window,
which was not traced; the trace tells how each stage's divide into layers. Without a trace there are
stages but no layers; without a GPU nothing is said about one. Exit status 1 if there is no report
to read.
"""

import argparse
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from run_dirs import CPU_LAYERS, as_text, per_step, read_json, short, shown

SHORT_OPERATOR = 20e-6  # seconds; below it an operator costs what its dispatch costs
NOTHING = 0.02  # of the time; a finding that could gain less is not worth reading
REQUIRED = ("sps_steady", "stages", "window", "gpu")


@dataclass
class Finding:
    """A sentence, what to do, and the share of the time that it is about."""

    share: float
    what: str
    advice: str


def read(path: Path) -> dict:
    """The stopwatch's report in a run directory or file; ValueError says what is wrong with it."""
    report = read_json(path / "stages.json" if path.is_dir() else path)
    if missing := [name for name in REQUIRED if name not in report]:
        raise ValueError(f"is no report of the stopwatch: it has no {missing[0]!r}")
    if not isinstance(report["stages"], dict) or not report["window"].get("env_steps"):
        raise ValueError("is the report of a run that made no steps")
    return report


def microseconds(seconds: float) -> str:
    return f"{short(seconds * 1e6)} us"


def table(stages: dict[str, dict[str, float]]) -> list[list[str]]:
    """Stage x layer, what nobody measured left out."""
    total = sum(fields["total"] for fields in stages.values())
    layers = [name for name in CPU_LAYERS if any(fields.get(name) for fields in stages.values())]
    extra = {"gpu_s": "GPU", "gpu_overlap_s": "beside GPU"}
    extra = {k: v for k, v in extra.items() if any(k in fields for fields in stages.values())}
    counts = {"backend_calls": "operators", "kernel_launches": "launches"}
    counts |= {"graph_replays": "replays"}
    counts = {k: v for k, v in counts.items() if any(k in fields for fields in stages.values())}
    heading = ["us per step", *(CPU_LAYERS[name] for name in layers), "total", "share"]
    rows = [[*heading, *extra.values(), *counts.values()]]
    whole: dict[str, float] = {}
    for fields in stages.values():
        for name, value in fields.items():
            whole[name] = whole.get(name, 0) + value
    for stage, fields in [*stages.items(), ("total", whole)]:
        times = [1e6 * fields.get(name, 0) for name in (*layers, "total")]
        cells = [stage, *map(short, times), f"{100 * fields['total'] / total:.0f}%"]
        cells += [short(1e6 * fields.get(name, 0)) for name in extra]
        rows.append(cells + [short(fields.get(name, 0)) for name in counts])
    return rows


def at_most(share: float) -> str:
    """The speed-up if `share` of the time were gone (Amdahl's law)."""
    return f"{1 / (1 - share):.2f}x at most" if share < 0.99 else "100x or more"


def findings(report: dict) -> list[Finding]:
    """What the numbers say, the largest share first."""
    stages, found = per_step(report), []
    total = sum(fields["total"] for fields in stages.values())
    if not total:
        return found

    def add(share: float, what: str, advice: str) -> None:
        if share >= NOTHING:
            found.append(Finding(share, what, advice))

    for name, fields in stages.items():
        share = fields["total"] / total
        if name == "simulation" and fields.get("backend_s", 0) > fields["total"] / 2:
            # environments that are tensors or kernels, perhaps with acting in the same function
            found += computation("simulation, made of operators,", fields, total)
        elif name == "simulation":
            add(
                share,
                f"simulation takes {share:.0%} of the time, {microseconds(fields['total'])} per "
                "environment step",
                f"without it the script would gain {at_most(share)}. Try more "
                "environments in other processes or threads (EnvPool), environments as tensors on "
                "the GPU, or step them while the GPU updates",
            )
        elif name == "logging":
            add(share, f"logging takes {share:.0%} of the time", "log every n-th time only")
        elif name == "checkpoint":
            add(share, f"checkpoints take {share:.0%} of the time", "write them less often")
        elif name == "untracked":
            if share > 0.1:
                add(
                    share,
                    f"{share:.0%} of the time is in no stage",
                    "open stages around what the loop does besides, and look again",
                )
        else:
            found += computation(name, fields, total)
    found += gpu_findings(report, stages, total)
    return sorted(found, key=lambda finding: -finding.share)


def computation(name: str, fields: dict[str, float], total: float) -> list[Finding]:
    """Inference, replay, backpropagation: is it Python, dispatch, launching or arithmetic?"""
    found = []
    python, backend = fields.get("python_s"), fields.get("backend_s", 0)
    calls, launches = fields.get("backend_calls", 0), fields.get("kernel_launches", 0)
    replays = fields.get("graph_replays", 0)
    if python is None:
        share = fields["total"] / total
        what = f"{name} takes {share:.0%} of the time, {microseconds(fields['total'])} per step"
        advice = "--stopwatch trace tells whether that is Python, operators or waiting"
        return [Finding(share, what, advice)] if share >= 0.1 else []
    overhead, length = python + backend, backend / calls if calls else 0
    if calls and length < SHORT_OPERATOR and overhead / total >= NOTHING:
        found.append(
            Finding(
                overhead / total,
                f"{name} takes {overhead / total:.0%} of the time for {short(calls)} operators per "
                f"step of {microseconds(length)} each and {microseconds(python)} of Python between",
                "operators that short are mostly overhead: torch.compile the whole function, so "
                f"that it is one call; {at_most(overhead / total)}",
            )
        )
    else:
        if backend / total >= NOTHING:
            each = f"{microseconds(length)} each" if calls else "no call ended in the window"
            found.append(
                Finding(
                    backend / total,
                    f"{name} computes on the CPU {backend / total:.0%} of the time, in "
                    f"{short(calls)} calls per step, {each}",
                    "calls that long are arithmetic or memory: count the FLOPs, then look at "
                    f"threads, precision, layout, batch size; {at_most(backend / total)}",
                )
            )
        if python / total >= NOTHING:
            found.append(
                Finding(
                    python / total,
                    f"{name} is in Python {python / total:.0%} of the time, "
                    f"{microseconds(python)} per step",
                    "NumPy, conversions, attribute look-ups and loops: move them out of the step, "
                    f"do them once per rollout; {at_most(python / total)}",
                )
            )
    launching = fields.get("cuda_launch_s", 0)
    if launching / total >= NOTHING:
        if launches > 10 * replays:
            advice = "capture them in one CUDA graph: a replay is one call"
        else:
            advice = "few calls are left: one graph instead of several, fewer copies"
        found.append(
            Finding(
                launching / total,
                f"{name} spends {launching / total:.0%} of the time in the CUDA API: "
                f"{short(launches)} launches and {short(replays)} replays per step",
                f"{advice}; {at_most(launching / total)}",
            )
        )
    return found


def gpu_findings(report: dict, stages: dict[str, dict[str, float]], total: float) -> list[Finding]:
    """Hidden synchronizations, and what an idle GPU waits for."""
    trace, found = report.get("trace"), []
    if not trace or trace["gpu_busy"] is None:
        return found
    for name, fields in stages.items():
        waiting = fields.get("cuda_wait_s", 0)
        if waiting / total >= NOTHING:
            idle = max(0.0, waiting - fields.get("gpu_with_cuda_wait_s", 0))
            found.append(
                Finding(
                    waiting / total,
                    f"{name} waits for the GPU {waiting / total:.0%} of the time, "
                    f"{microseconds(waiting)} per step ({microseconds(idle)} of it with the GPU "
                    "idle): a synchronization",
                    "look for .item(), .cpu(), .numpy(), print, `if` on a tensor and copies from "
                    "memory that is not pinned; log from the GPU once per many steps",
                )
            )
    busy = trace["gpu_busy"]
    if busy < 0.8:
        idle = {
            name: fields["total"] - fields.get("gpu_overlap_s", 0)
            for name, fields in stages.items()
        }
        worst = sorted(idle, key=lambda name: -idle[name])[:2]
        whom = " and ".join(f"{name} ({idle[name] / total:.0%})" for name in worst)
        found.append(
            Finding(
                1 - busy,
                f"the GPU works {busy:.0%} of the time; the rest it waits, mostly for {whom}",
                "overlap: launch the update, then simulate while it runs; capture what is small",
            )
        )
    return found


def notes(report: dict) -> list[str]:
    """What to know before believing the numbers."""
    lines, window, trace = [], report["window"], report.get("trace")
    if not window.get("steady", True):
        lines.append("the warm-up did not end: compilation and random exploration are in all this")
    if window["seconds"] < 2:
        lines.append(f"the window has {short(window['seconds'])} s only: run for longer")
    if (report.get("overhead_pct") or 0) > 1:
        lines.append(f"the stopwatch itself took {report['overhead_pct']:.1f}% of the window")
    if trace and trace["inflation"] > 2:
        lines.append(
            f"tracing made it {trace['inflation']:.1f} times slower: what consists of many small "
            "operators looks larger than it is"
        )
    warmup, wall = report.get("warmup_seconds"), report.get("wall_seconds")
    if warmup and wall and warmup / wall > 0.25:
        lines.append(f"{warmup:.0f} of {wall:.0f} s were warm-up and are not in the table")
    if not trace:
        lines.append("no trace: run it with --stopwatch trace for layers, calls and advice")
    elif trace["gpu_busy"] is None:
        lines.append("no GPU in this run: nothing is known about one")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="or stages.json")
    parser.add_argument("--top", type=int, default=5, help="findings to print")
    options = parser.parse_args(arguments)
    status = 0
    for path in options.runs:
        try:
            report = read(path)
            stages = per_step(report)
            if not stages:
                raise ValueError("has no stages: the stopwatch was off")
            rows, found, known = table(stages), findings(report), notes(report)
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            reason = error if isinstance(error, ValueError) else "is no report of the stopwatch"
            print(f"{shown(path)} {reason}", file=sys.stderr)
            status = 1
            continue
        print(f"{shown(path)}: {short(report['sps_steady'] or 0)} environment steps/s")
        print(f"\n{as_text(rows, labels=1)}\n")
        for number, finding in enumerate(found[: options.top], start=1):
            print(textwrap.fill(f"{number}. {finding.what}.", 88, subsequent_indent="   "))
            print(textwrap.fill(f"   -> {finding.advice}.", 88, subsequent_indent="      "))
        for line in known:
            print(f"note: {line}.")
        print()
    return status


if __name__ == "__main__":
    sys.exit(main())
