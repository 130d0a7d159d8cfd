"""What a run spent its time on, and what to change: a stopwatch's report read out in words.

    python plots/profile.py runs/RUN                after --stopwatch trace: layers and transitions
    python plots/profile.py my/folder/stages.json   of a script of your own with a copied stopwatch
    python plots/profile.py my/trace.json.gz --steps 1000    of any annotated program (traces.py)

Prints a stage x layer table, in microseconds per environment step, and findings, the most expensive
first, each with the most that could be gained (Amdahl's law). Seconds per stage are those of the
steady window, which was not traced; the trace tells how each stage's divide into layers. Without a
trace there are stages but no layers; without a GPU nothing is said about one. Exit status 1 if
there is no report to read.
"""

import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import traces
from run_dirs import as_text, check_numbers, make_parser, per_step, read_json, short, shown
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
    "untraced": "--stopwatch trace tells whether that is Python, operators or waiting",
    "cut": "the run ended before its trace was complete: a longer run tells whether that is "
    "Python, operators or waiting",
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
Finding = tuple[float, str, str]  # share of the time, what takes it, which advice


def read(path: Path, steps: int) -> dict:
    """The report of a run directory or file, its trace reduced; ValueError says what is wrong."""
    if path.suffix == ".gz":
        trace = traces.reduce_trace(traces.read_events(path), 1, steps, None)
        spent = {name: sum(s[f] or 0 for f in CPU_LAYERS) for name, s in trace["stages"].items()}
        window = {"env_steps": steps, "seconds": sum(spent.values())}
        stages = {name: {"seconds": seconds} for name, seconds in spent.items()}
        return {"sps_steady": None, "window": window, "stages": stages, "trace": trace}
    path = path / "stages.json" if path.is_dir() else path
    report = read_json(path)
    check_numbers(report, "stages.json:")
    return report | {"trace": traces.read_trace(path.parent, report)}


def table(stages: dict[str, dict[str, float]]) -> list[list[str]]:
    """Stage x layer, what nobody measured left out."""
    whole = sum(map(Counter, stages.values()), Counter())
    known = {name: title for name, title in (TIMES | COUNTS).items() if whole[name]}
    rows = [["us per step", "share", *known.values()]]
    for stage, fields in [*stages.items(), ("total", whole)]:
        values = [fields.get(name, 0) * (1e6 if name in TIMES else 1) for name in known]
        share = f"{100 * fields['total'] / whole['total']:.0f}%"
        rows.append([stage, share, *map(short, values)])
    return rows


def findings(report: dict) -> list[Finding]:
    """What the numbers say, the largest share first."""
    stages, trace, found = per_step(report, report["trace"]), report["trace"], []
    total = sum(fields["total"] for fields in stages.values())
    untraced = "cut" if report.get("mode") == "trace" else "untraced"
    for name, fields in stages.items():
        found += ((s / total, what, advice) for s, what, advice in of_stage(name, fields, untraced))
    if trace and trace["gpu_busy"] is not None:
        idle = {name: f["total"] - f.get("gpu_overlap_s", 0) for name, f in stages.items()}
        worst = sorted(idle, key=lambda name: -idle[name])[:2]
        what = f"the GPU idles, mostly in {' and '.join(worst)}"
        found.append((1 - trace["gpu_busy"], what, "idle"))
    return sorted((f for f in found if f[0] >= NOTHING), key=lambda finding: -finding[0])


def of_stage(name: str, fields: dict[str, float], untraced: str) -> Iterator[Finding]:
    """Is it the simulator, Python, dispatch, launching, waiting or arithmetic? In seconds."""
    total, calls = fields["total"], fields.get("backend_calls", 0)
    python, backend = fields.get("python_s", 0), fields.get("backend_s", 0)
    made_of_operators = backend > total / 2  # environments that are tensors, perhaps with acting
    alone = name in ADVICE and not (name == "simulation" and made_of_operators)
    if alone or "python_s" not in fields:  # the latter without a trace
        yield total, f"{name}, {short(total * 1e6)} us per step", name if alone else untraced
        return
    each = f"{short(calls)} operators per step of {short(1e6 * backend / (calls or 1))} us"
    if calls and backend / calls < SHORT_OPERATOR:
        yield python + backend, f"{name}: {each} and Python between them", "dispatch"
    else:
        yield backend, f"{name}: {each}", "arithmetic"
        yield python, f"{name}: Python, {short(python * 1e6)} us per step", "python"
    launches, replays = fields.get("kernel_launches", 0), fields.get("graph_replays", 0)
    what = f"{name}: CUDA's API, {short(launches)} launches and {short(replays)} replays per step"
    yield fields.get("cuda_launch_s", 0), what, "launch"
    wait = fields.get("cuda_wait_s", 0)
    yield wait, f"{name}: waiting for the GPU, {short(wait * 1e6)} us per step", "wait"


def notes(report: dict) -> list[str]:
    """What to know before believing the numbers."""
    lines, window, trace = [], report["window"], report["trace"]
    if not window.get("steady", True):
        lines.append("the warm-up did not end: compilation and random exploration are in all this")
    if window["seconds"] < 2:
        lines.append(f"the window has {short(window['seconds'])} s only, which says little")
    if trace and (trace["inflation"] or 0) > 2:
        lines.append(f"tracing made it {trace['inflation']:.1f} times slower, small operators most")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="or file")
    parser.add_argument("--steps", type=int, default=1, help="in the window of a trace alone")
    options = parser.parse_args(arguments)
    status = 0
    for path in options.runs:
        try:
            report = read(path, options.steps)
            stages = per_step(report, report["trace"])
            if not stages:
                raise ValueError("has no stages: the stopwatch was off")
            rows, found, known = table(stages), findings(report), notes(report)
            speed = report["sps_steady"] and f": {short(report['sps_steady'])} environment steps/s"
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            reason = error if isinstance(error, ValueError) else "is no report of the stopwatch"
            print(f"{shown(path)} {reason}", file=sys.stderr)
            status = 1
            continue
        print(f"{shown(path)}{speed or ''}\n\n{as_text(rows, labels=1)}\n")
        for number, (share, what, advice) in enumerate(found, start=1):
            gain = f"{1 / (1 - share):.2f}x" if share < 0.99 else "100x or more"
            what = f"{number}. {what}: {share:.0%} of the time, without it {gain} at most."
            print(textwrap.fill(what, 88, subsequent_indent="   "))
            if advice not in [given for _, _, given in found[: number - 1]]:
                print(textwrap.fill(f"   -> {ADVICE[advice]}.", 88, subsequent_indent="      "))
        print(*(f"note: {line}." for line in known), "", sep="\n")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet where nobody reads on, as in "| head -1"
    sys.exit(main())
