"""What a run spent its time on, and what to change: a stopwatch's report read out in words.

    python plots/profile.py runs/RUN                after --stopwatch trace: layers and transitions
    python plots/profile.py my/folder/stages.json   of a script of your own with a copied stopwatch
    python plots/profile.py my/trace.json.gz --steps 1000    of any annotated program (traces.py)

Needs nothing but stages.json and the trace that it names, or a trace and its environment steps.
Prints a stage x layer table, in microseconds per environment step,
and findings, the most expensive first. Each says what it rests on and the most that could be
gained, so that a small one is known to be small. Seconds per stage are those of the steady window,
which was not traced; the trace tells how each stage's divide into layers. Without a trace there are
stages but no layers; without a GPU nothing is said about one. Exit status 1 if there is no report
to read.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import traces
from run_dirs import as_text, per_step, read_json, short, shown
from traces import CPU_LAYERS

SHORT_OPERATOR = 20e-6  # seconds; below it an operator costs what its dispatch costs
NOTHING = 0.02  # of the time; a finding that could gain less is not worth reading
REQUIRED = ("sps_steady", "stages", "window", "gpu")
Finding = tuple[float, str, str]  # the share of the time that it is about, a sentence, what to do


def read(path: Path, steps: int) -> dict:
    """The stopwatch's report in a run directory or file, its trace reduced, or that of a trace.

    ValueError says what is wrong with it.
    """
    if path.suffix == ".gz":
        trace = traces.reduce_trace(traces.read_events(path), 1, steps, None)
        spent = {name: sum(s[f] or 0 for f in CPU_LAYERS) for name, s in trace["stages"].items()}
        window = {"env_steps": steps, "seconds": sum(spent.values())}
        stages = {name: {"seconds": seconds} for name, seconds in spent.items()}
        return {"sps_steady": None, "window": window, "stages": stages, "trace": trace}
    path = path / "stages.json" if path.is_dir() else path
    report = read_json(path)
    if missing := [name for name in REQUIRED if name not in report]:
        raise ValueError(f"is no report of the stopwatch: it has no {missing[0]!r}")
    if not isinstance(report["stages"], dict) or not report["window"].get("env_steps"):
        raise ValueError("is the report of a run that made no steps")
    return report | {"trace": traces.read_trace(path.parent, report)}


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
    stages, found = per_step(report, report["trace"]), []
    total = sum(fields["total"] for fields in stages.values())
    for name, fields in stages.items():
        found += of_stage(name, fields, total)
    if report["trace"] and report["trace"]["gpu_busy"] is not None:
        found += of_gpu(report["trace"]["gpu_busy"], stages, total)
    return sorted((f for f in found if f[0] >= NOTHING), key=lambda finding: -finding[0])


def of_stage(name: str, fields: dict[str, float], total: float) -> Iterator[Finding]:
    share = fields["total"] / total
    takes = f"{name} takes {share:.0%} of the time"
    if name == "simulation" and fields.get("backend_s", 0) > fields["total"] / 2:
        # environments that are tensors or kernels, perhaps with acting in the same function
        yield from of_computation("simulation, made of operators,", fields, total)
    elif name == "simulation":
        what = f"{takes}, {microseconds(fields['total'])} per environment step"
        advice = f"without it the script would gain {at_most(share)}. Try more environments in "
        advice += "other processes or threads (EnvPool), environments as tensors on the GPU, or "
        yield share, what, advice + "step them while the GPU updates"
    elif name == "logging":
        yield share, takes, "log every n-th time only"
    elif name == "checkpoint":
        yield share, takes, "write it less often"
    elif name == "untracked":
        if share > 0.1:
            advice = "open stages around what the loop does besides, and look again"
            yield share, f"{share:.0%} of the time is in no stage", advice
    elif "python_s" not in fields:
        if share > 0.1:
            advice = "--stopwatch trace tells whether that is Python, operators or waiting"
            yield share, f"{takes}, {microseconds(fields['total'])} per step", advice
    else:
        yield from of_computation(name, fields, total)


def of_computation(name: str, fields: dict[str, float], total: float) -> Iterator[Finding]:
    """Inference, replay, backpropagation: is it Python, dispatch, launching or arithmetic?"""
    python, backend = fields.get("python_s", 0), fields.get("backend_s", 0)
    calls, launches = fields.get("backend_calls", 0), fields.get("kernel_launches", 0)
    length, replays = backend / calls if calls else 0, fields.get("graph_replays", 0)
    if calls and length < SHORT_OPERATOR:
        share = (python + backend) / total
        what = f"{name} takes {share:.0%} of the time for {short(calls)} operators per step of "
        what += f"{microseconds(length)} each and {microseconds(python)} of Python between"
        advice = "operators that short are mostly overhead: torch.compile the whole function, so "
        yield share, what, f"{advice}that it is one call; {at_most(share)}"
    else:
        share, what = backend / total, f"{name} computes on the CPU {backend / total:.0%} of the"
        each = f"{microseconds(length)} each" if calls else "no call ended in the window"
        advice = "calls that long are arithmetic or memory: count the FLOPs, then look at threads, "
        advice += f"precision, layout, batch size; {at_most(share)}"
        yield share, f"{what} time, in {short(calls)} calls per step, {each}", advice
        share, what = python / total, f"{name} is in Python {python / total:.0%} of the time"
        advice = "NumPy, conversions, attribute look-ups and loops: move them out of the step, do "
        advice += f"them once per rollout; {at_most(share)}"
        yield share, f"{what}, {microseconds(python)} per step", advice
    share = fields.get("cuda_launch_s", 0) / total
    what = f"{name} spends {share:.0%} of the time in the CUDA API: {short(launches)} launches and "
    advice = "few calls are left: one graph instead of several, fewer copies"
    if launches > 10 * replays:
        advice = "capture them in one CUDA graph: a replay is one call"
    yield share, f"{what}{short(replays)} replays per step", f"{advice}; {at_most(share)}"


def of_gpu(busy: float, stages: dict[str, dict[str, float]], total: float) -> Iterator[Finding]:
    """Hidden synchronizations, and what an idle GPU waits for."""
    idle = {}
    for name, fields in stages.items():
        waiting = fields.get("cuda_wait_s", 0)
        alone = max(0.0, waiting - fields.get("gpu_with_cuda_wait_s", 0))
        what = f"{name} waits for the GPU {waiting / total:.0%} of the time, "
        what += f"{microseconds(waiting)} per step ({microseconds(alone)} of it with the GPU idle)"
        advice = "look for .item(), .cpu(), .numpy(), print, `if` on a tensor and copies from "
        advice += "memory that is not pinned; log from the GPU once per many steps"
        yield waiting / total, f"{what}: a synchronization", advice
        idle[name] = fields["total"] - fields.get("gpu_overlap_s", 0)
    if busy < 0.8:
        worst = sorted(idle, key=lambda name: -idle[name])[:2]
        whom = " and ".join(f"{name} ({idle[name] / total:.0%})" for name in worst)
        what = f"the GPU works {busy:.0%} of the time; the rest it waits, mostly for {whom}"
        advice = "overlap: launch the update, then simulate while it runs; capture what is small"
        yield 1 - busy, what, advice


def notes(report: dict) -> list[str]:
    """What to know before believing the numbers."""
    lines, window, trace = [], report["window"], report["trace"]
    if not window.get("steady", True):
        lines.append("the warm-up did not end: compilation and random exploration are in all this")
    if window["seconds"] < 2:
        lines.append(f"the window has {short(window['seconds'])} s only: run for longer")
    if trace and (trace["inflation"] or 0) > 2:
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
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="or file")
    parser.add_argument("--steps", type=int, default=1, help="in the window of a trace alone")
    parser.add_argument("--top", type=int, default=5, help="findings to print")
    options = parser.parse_args(arguments)
    status = 0
    for path in options.runs:
        try:
            report = read(path, options.steps)
            stages = per_step(report, report["trace"])
            if not stages:
                raise ValueError("has no stages: the stopwatch was off")
            rows, found, known = table(stages), findings(report), notes(report)
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            reason = error if isinstance(error, ValueError) else "is no report of the stopwatch"
            print(f"{shown(path)} {reason}", file=sys.stderr)
            status = 1
            continue
        speed = report["sps_steady"] and f": {short(report['sps_steady'])} environment steps/s"
        print(f"{shown(path)}{speed or ''}")
        print(f"\n{as_text(rows, labels=1)}\n")
        for number, (_, what, advice) in enumerate(found[: options.top], start=1):
            print(textwrap.fill(f"{number}. {what}.", 88, subsequent_indent="   "))
            print(textwrap.fill(f"   -> {advice}.", 88, subsequent_indent="      "))
        for line in known:
            print(f"note: {line}.")
        print()
    return status


if __name__ == "__main__":
    sys.exit(main())
