"""What a run spent its time on, and what to change: a stopwatch's report read out in words.

    python plots/cross_stack.py runs/RUN              after --stopwatch trace: layers, transitions
    python plots/cross_stack.py my/folder/stages.json     of a script of your own with a stopwatch

Prints a stage x layer table, in microseconds per environment step, and findings, the most expensive
first, each with the most that could be gained (Amdahl's law). Without a trace there are stages but
no layers; without a GPU nothing is said about one. Exit status 1 if there is no report to read.
"""

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import program
import run_dirs
import tables
import traces
from run_dirs import per_step, read_json, shown
from tables import as_text, short
from traces import CPU_LAYERS

SHORT_OPERATOR = 20e-6  # seconds; below it an operator costs what its dispatch costs
NOTHING = 0.05  # of the time; a finding that could gain less is not worth reading
TIMES = {**CPU_LAYERS, "total": "total", "gpu_s": "GPU", "gpu_overlap_s": "beside GPU"}
COUNTS = {"backend_calls": "operators", "kernel_launches": "launches", "graph_replays": "replays"}
ADVICE = {
    "simulation": "more environments in other processes or threads (EnvPool), environments that "
    "are tensors on the GPU, or stepping them while the GPU updates",
    "logging": "log every n-th time only",
    "checkpoint": "write it less often",
    "untracked": "open stages around what the loop does besides, and look again",
    "untraced": "--stopwatch trace tells whether that is Python, operators or waiting, if the run "
    "goes on until the trace is complete",
    "dispatch": "operators that short are mostly overhead: torch.compile the whole function, so "
    "that it is one call",
    "arithmetic": "calls that long are arithmetic or memory: count the FLOPs, then look at "
    "threads, precision, layout, batch size",
    "python": "NumPy, conversions, attribute look-ups and loops: move them out of the step, or do "
    "them once per rollout",
    "launch": "one CUDA graph instead of many launches: a replay is one call; fewer copies",
    "wait": "a synchronization: look for .item(), .cpu(), .numpy(), print, `if` on a tensor and "
    "copies from memory that is not pinned; log from the GPU once per many steps",
    "idle": "launch the update, then simulate while it runs; capture what is small",
}
WHOLE = ("simulation", "logging", "checkpoint", "untracked")  # stages with advice of their own


class Finding(NamedTuple):
    """What could be gained."""

    share: float  # of the time
    what: str
    advice: str


def read(path: Path) -> dict:
    """The report of a run directory or file, its trace reduced; ValueError says what is wrong."""
    if not path.exists():
        raise ValueError("does not exist")
    if path.is_dir():
        parts = run_dirs.parts(path, "stages")
        path = parts[max(parts)]
    report = read_json(path)
    if not report["env_steps"]:
        raise ValueError("has no step in its steady window: the run ended before")
    return report | {"trace": traces.read_trace(path.parent, report)}


def table(stages: dict[str, dict[str, float]]) -> list[list[str]]:
    """Stage x layer, what nobody measured left out."""
    whole = sum(map(Counter, stages.values()), Counter())
    known = {name: title for name, title in (TIMES | COUNTS).items() if whole[name]}
    rows = [["us per step", "share", *known.values()]]
    for stage, fields in (stages | {"total": whole}).items():
        line = [stage, f"{fields['total'] / whole['total']:.0%}"]
        for name in known:
            unit = 1e6 if name in TIMES else 1
            line.append(short(fields.get(name, 0) * unit))
        rows.append(line)
    return rows


def findings(report: dict) -> list[Finding]:
    """What the numbers say, the largest share first."""
    trace = report["trace"]
    stages = per_step(report, trace)
    total = sum(fields["total"] for fields in stages.values())
    found = []
    for name, fields in stages.items():
        for seconds, what, advice in of_stage(name, fields):
            found.append(Finding(seconds / total, what, advice))
    if trace and trace["gpu_busy"] is not None:
        idle = {name: f["total"] - f.get("gpu_overlap_s", 0) for name, f in stages.items()}
        worst = sorted(idle, key=idle.get, reverse=True)[:2]
        what = f"the GPU idles, mostly in {' and '.join(worst)}"
        found.append(Finding(1 - trace["gpu_busy"], what, "idle"))
    found = [finding for finding in found if finding.share >= NOTHING]
    return sorted(found, key=lambda finding: -finding.share)


def of_stage(name: str, fields: dict[str, float]) -> Iterator[tuple[float, str, str]]:
    """Is it the simulator, Python, dispatch, launching, waiting or arithmetic?

    -> seconds per step that could be gained, what they are, advice.
    """
    total = fields["total"]
    calls = fields.get("backend_calls", 0)
    python = fields.get("python_s", 0)
    backend = fields.get("backend_s", 0)
    made_of_operators = backend > total / 2  # environments that are tensors, perhaps with acting
    alone = name in WHOLE and not (name == "simulation" and made_of_operators)
    if alone or "python_s" not in fields:  # the latter without a trace
        what = f"{name}, {short(total * 1e6)} us per step"
        yield total, what, name if alone else "untraced"
        return
    each = f"{short(calls)} operators per step of {short(1e6 * backend / (calls or 1))} us"
    if calls and backend / calls < SHORT_OPERATOR:
        what = f"{name}: {each} and Python between them"
        yield python + backend, what, "dispatch"
    else:
        yield backend, f"{name}: {each}", "arithmetic"
        what = f"{name}: Python, {short(python * 1e6)} us per step"
        yield python, what, "python"
    launches = short(fields.get("kernel_launches", 0))
    replays = short(fields.get("graph_replays", 0))
    what = f"{name}: CUDA's API, {launches} launches and {replays} replays per step"
    yield fields.get("cuda_launch_s", 0), what, "launch"
    wait = fields.get("cuda_wait_s", 0)
    what = f"{name}: waiting for the GPU, {short(wait * 1e6)} us per step"
    yield wait, what, "wait"


def notes(report: dict) -> list[str]:
    """What to know before believing the numbers."""
    lines = []
    if report["warmup_seconds"] is None:
        lines.append("the warm-up did not end: compilation and random exploration are in all this")
    if report["seconds"] < 2:
        lines.append(f"the window has {short(report['seconds'])} s only, which says little")
    slower = (report["trace"] or {}).get("inflation") or 0
    if slower > 2:
        lines.append(f"tracing made it {slower:.1f} times slower, small operators most")
    return lines


def read_out(report: dict) -> Iterator[str]:
    """Lines for a reader."""
    stages = per_step(report, report["trace"])
    if stages.keys() <= {"untracked"}:
        raise ValueError("has no stages, only `untracked`")
    yield f"\n{as_text(table(stages), labels=1)}\n"
    given = set()
    for number, finding in enumerate(findings(report), start=1):
        share = finding.share
        gain = tables.gain(share)
        what = f"{number}. {finding.what}: {share:.0%} of the time, without it {gain} at most."
        yield textwrap.fill(what, 88, subsequent_indent="   ")
        if finding.advice not in given:
            advice = f"   -> {ADVICE[finding.advice]}."
            yield textwrap.fill(advice, 88, subsequent_indent="      ")
        given.add(finding.advice)
    for line in notes(report):
        yield f"note: {line}."
    yield ""


def main(arguments: list[str] | None = None) -> int:
    options = program.make_parser(__doc__, "runs").parse_args(arguments)
    status = 0
    for path in options.runs:
        try:
            report = read(path)
            lines = list(read_out(report))
            speed = report["sps_steady"]
            speed = f": {short(speed)} environment steps/s" if speed else ""
        except run_dirs.DAMAGED as error:
            reason = error if isinstance(error, ValueError) else "is no report of the stopwatch"
            print(f"{shown(path)} {reason}", file=sys.stderr)
            status = 1
            continue
        print(f"{shown(path)}{speed}", *lines, sep="\n")
    return status


if __name__ == "__main__":
    program.start(main)
