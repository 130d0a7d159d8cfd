"""Reads the directories that the scripts leave in runs/: what every program here starts from.

A run is a directory with config.json, stages.json and TensorBoard files. Whatever else lies beside
it, or is damaged, empty or half written, is passed over with its name and the reason.
"""

import argparse
import functools
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from traces import CPU_LAYERS, read_trace

PLOTS = Path(__file__).resolve().parent
ROOT = PLOTS.parent
# Python puts the folder of the program first. It must come last: cProfile, which torch.compile
# imports, looks for Python's own module `profile` and would find the one here.
_others = [path for path in sys.path if Path(path).resolve() not in (ROOT, PLOTS)]
sys.path[:] = [str(ROOT), *_others, str(PLOTS)]

VARIANT = "_torchcompile"
ROWS = {  # name -> flags of the variant; the baseline is another file
    "baseline": (),
    "eager": (),
    "compile": ("--compile",),
    "cudagraphs": ("--cudagraphs",),
    "compile+cudagraphs": ("--compile", "--cudagraphs"),
}
# what may differ between runs of one table: the rest of args are settings that must agree
FREE_ARGS = {"exp_name", "seed", "compile", "cudagraphs", "track", "wandb_project_name"}
FREE_ARGS |= {"wandb_entity", "stopwatch", "resume"}


@dataclass
class Run:
    """A run: what config.json, with machine.json, and stages.json say."""

    path: Path
    config: dict
    stages: dict
    missing: str = ""  # to its end

    @property
    def script(self) -> str:
        """The script of the collection; for what other programs ran, the name that they gave it."""
        program = Path(self.config["command"].split()[0])
        name = program.stem if program.parent.name == "leanrl" else self.config["args"]["exp_name"]
        return name.removesuffix(VARIANT)

    @property
    def row(self) -> str:
        args = self.config["args"]
        if "compile" not in args:
            return "baseline"
        # without a device --cudagraphs has no effect
        graphs = args["cudagraphs"] and self.config["gpu"]
        return "+".join(["compile"] * args["compile"] + ["cudagraphs"] * bool(graphs)) or "eager"

    @property
    def env_id(self) -> str:
        return self.config["args"]["env_id"]

    @functools.cached_property
    def trace(self) -> dict | None:
        """The reduced trace, None without one; ValueError if its file is gone or damaged."""
        return read_trace(self.path, self.stages)

    @property
    def hardware(self) -> str:
        cpu = self.config["cpu"]
        return self.config["gpu"] or f"{cpu['model'] or 'unknown CPU'}, {cpu['cores']} cores"


def make_parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose --help is the program's docstring."""
    plain = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=plain)


def shown(path: Path) -> str:
    """`path` as seen from the repository, so that no record names a machine's folders."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def label(script: str) -> str:
    """A script's name as a figure has room for it."""
    algorithm, _, rest = script.partition("_")
    where = {"continuous_action": "", "atari_envpool": " Atari"}
    where |= {"continuous_action_async": " async", "atari_envpool_multigpu": " Atari, multi-GPU"}
    where |= {"cartpole_gpu": " CartPole", "mujoco_gpu": " MuJoCo"}
    return algorithm.upper() + where.get(rest, f" {rest}")


def read_json(path: Path) -> dict:
    """The object in the file at `path`; ValueError says what is wrong with it."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"has no {path.name}: killed, still running, or not a run") from None
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
    except ValueError:  # not JSON, or not even text
        raise ValueError(f"{path.name} is damaged") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is damaged")
    return found


def this_machine() -> dict:
    """What config.json does not say: the processor, the driver, the load and the commit, now."""
    import torch  # here, because to read runs it is not needed

    def output(*command: str) -> str | None:
        try:
            done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
            return done.stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    cpuinfo = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    cpu = {"model": model and model[1], "vectors": torch.backends.cpu.get_cpu_capability()}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "cpu": cpu | {"cores": os.cpu_count()},
        "gpu": gpu,
        "gpu_driver": driver,
        "python": sys.version.split()[0],
        "load_average": os.getloadavg(),
        "git_commit": output(*"git describe --always --dirty --abbrev=40 --exclude=*".split()),
    }


def versions(packages: list[str]) -> dict:
    """Those of `packages` that are installed here, with their versions."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def read_config(path: Path, suffix: str = ".json", machine: dict | None = None) -> dict:
    """config.json of the run in `path` and what machine.json beside it, or else `machine`, adds."""
    config, beside = read_json(path / f"config{suffix}"), path / "machine.json"
    machine = read_json(beside) if beside.exists() else machine or {}
    unknown = {"gpu_driver": None, "load_average": None, "git_commit": None}
    cpu = {"model": None, "vectors": None} | machine.get("cpu", {}) | config.get("cpu", {})
    return unknown | machine | config | {"cpu": cpu}


def read_run(path: Path, whole: bool = True) -> Run:
    """The run in the directory `path`; ValueError says what is wrong with one that did not end.

    A resumed run has further parts, config_STEP.json and stages_STEP.json. It has ended if one of
    them has; its speed is that of the last part with a steady window. Unless it must be `whole`, a
    run may also have been interrupted, or have ended in its warm-up.
    """
    parts = (re.fullmatch(r"config_(\d+)\.json", file.name) for file in path.glob("config_*.json"))
    ended, problems, begun = False, [], []
    for before in sorted({0, *(int(part[1]) for part in parts if part)}, reverse=True):
        try:
            run = read_part(path, before)
        except ValueError as problem:
            problems.append(problem)
            continue
        if run.missing:
            problems.append(ValueError(run.missing))
        ended = ended or not run.missing
        if ended and run.stages["sps_steady"]:
            return replace(run, missing="")
        begun.append(run)
    if begun and not whole:
        return next((run for run in begun if run.stages["sps_steady"]), begun[0])
    raise (problems or [ValueError("ended before its warm-up did: no steady steps/s")])[0]


def check_numbers(value, name: str) -> None:
    """ValueError unless all that a stopwatch reports as numbers are finite ones, or unknown."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key not in ("mode", "file"):
                check_numbers(part, f"{name} {key}")
    elif isinstance(value, list):
        for part in value:
            check_numbers(part, name)
    elif value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise ValueError(f"has {name} {value!r}, which is no finite number")


def read_part(path: Path, before: int) -> Run:
    """The part of a run that began after `before` steps."""
    suffix = f"_{before}.json" if before else ".json"
    try:
        run = Run(path, read_config(path, suffix), read_json(path / f"stages{suffix}"))
        check_numbers(run.stages, f"stages{suffix}:")
        args = run.config["args"]
        run.row, run.script, run.env_id, run.hardware  # noqa: B018  they read what they need
        steps = before + round(run.stages["sps_inclusive"] * run.stages["wall_seconds"])
        round(run.stages["sps_steady"] or 0)
        for name in ("window", "stages", "gpu", "trace"):
            dict(run.stages.get(name) or {})
        whole = args.get("num_steps", 1) * args.get("num_envs", 1)  # PPO ends with a whole rollout
        if steps < 0.99 * (args["total_timesteps"] // whole * whole):
            run.missing = f"stopped after {steps} of {args['total_timesteps']} steps"
    except (KeyError, TypeError, AttributeError, ArithmeticError, IndexError):
        raise ValueError("holds the files of some other program") from None
    return run


def find_runs(paths: list[Path]) -> list[Path]:
    """The directories at or below `paths` that may be runs, in the order in which they were made.

    What holds no file of a run is searched; of a sweep's variant only its last attempt.
    """
    found, left = set(), [path for path in paths if path.is_dir()]
    files = ("config.json", "stages.json", "events.out.tfevents.*")
    while left:
        path = left.pop()
        pattern = "runs/*" if (path / "variant.json").exists() else "[!.]*"
        below = [each for each in path.glob(pattern) if each.is_dir()]
        if below and not any(any(path.glob(name)) for name in files):
            left += below
        else:
            found.add(path)
    return sorted(found, key=lambda path: (path.name.rpartition("__")[2].zfill(12), path.name))


def read_runs(paths: list[Path], read=read_run) -> tuple[list[Run], list[str]]:
    """The runs at or below `paths`, and for each directory that is none what is wrong with it.

    `read(path)` makes a run of a directory or raises ValueError.
    """
    runs, skipped = [], []
    for path in find_runs(paths):
        try:
            runs.append(read(path))
        except ValueError as reason:
            skipped.append(f"{shown(path)} {reason}")
    skipped += [f"{shown(path)} does not exist" for path in paths if not path.exists()]
    return runs, skipped


@dataclass
class Series:
    """One metric of a run, in the order of its steps."""

    steps: np.ndarray  # (n,) environment steps
    seconds: np.ndarray  # (n,) since the run began to write
    values: np.ndarray  # (n,)


def read_series(path: Path, tags: list[str]) -> dict[str, Series]:
    """Those of the metrics `tags` that the TensorBoard files in `path` hold, up to any damage."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    found = {}
    try:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        start = events.FirstEventTimestamp()
    except Exception:  # none there, or none of TensorBoard's: it raises many kinds
        return found
    for tag in set(tags) & set(events.Tags()["scalars"]):
        rows = [(e.step, e.wall_time - start, e.value) for e in events.Scalars(tag)]
        found[tag] = Series(*np.array(rows, dtype=float).T)
    return found


def per_step(report: dict, trace: dict | None) -> dict[str, dict[str, float]]:
    """A stopwatch's report -> {stage: {field of the trace, or "total": per environment step}}.

    `total`, in seconds, is what the stage took in the steady window, which was not traced. A trace
    divides it into layers: annotations slow some stages down more than others, so each is scaled to
    its own total. Stages without time are left out, and the evaluation, which is no training.
    """
    steps, found = report["window"]["env_steps"], {}
    for name, stage in report["stages"].items():
        if name == "evaluation" or not stage["seconds"]:
            continue
        total = stage["seconds"] / steps
        found[name] = {"total": total}
        if trace:
            fields = trace["stages"].get(name, {})
            fields = {k: v for k, v in fields.items() if v is not None}
            traced = sum(fields.get(layer, 0) for layer in CPU_LAYERS) / trace["env_steps"]
            for field, value in fields.items():
                scale = total / traced if field.endswith("_s") and traced else 1
                found[name][field] = value * scale / trace["env_steps"]
            if not traced:  # too rare to have been in the window
                found[name]["simulator_s" if name == "simulation" else "python_s"] = total
    return found


def differences(one: dict, other: dict) -> dict[str, tuple]:
    """Where two config.json tell of other machines; what one of them does not know is none."""
    pairs = {key: (one[key], other[key]) for key in ("gpu", "versions")}
    for key in ("model", "cores", "vectors"):
        pair = one["cpu"].get(key), other["cpu"].get(key)
        pairs |= {} if None in pair else {f"cpu {key}": pair}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def incomparable(runs: list[Run]) -> str | None:
    """Why `runs` do not belong into one table, or None if they do."""
    for run in runs:
        for other in runs:
            pairs = differences(run.config, other.config)
            if run.script == other.script:
                pairs["processes"] = [r.config.get("processes", 1) for r in (run, other)]
                one, another = (r.config["args"] for r in (run, other))
                names = one.keys() | another.keys()
                if (run.row == "baseline") != (other.row == "baseline"):
                    names = one.keys() & another.keys()  # the variant has flags of its own
                for key in names - FREE_ARGS:
                    pairs[key] = one.get(key), another.get(key)
            for key, (one, another) in sorted(pairs.items()):
                if one != another:
                    return f"{shown(run.path)} has {key} {one}, {shown(other.path)} {another}"
    return None


def spread(values: list[float]) -> dict:
    """Mean, median and range."""
    middle = {"mean": statistics.fmean(values), "median": statistics.median(values)}
    return middle | {"min": min(values), "max": max(values)}


def machine(configs: list[dict]) -> dict:
    """Hardware, versions, commit and load of the runs with these configs; None where unknown."""
    first, loads = configs[0], [c["load_average"][0] for c in configs if c.get("load_average")]
    return {
        "cpu": {"model": None} | first["cpu"],
        **{key: first.get(key) for key in ("gpu", "gpu_driver", "python", "versions")},
        "git_commits": list(dict.fromkeys(config.get("git_commit") for config in configs)),
        "load_average_1min": {"min": min(loads), "max": max(loads)} if loads else None,
    }


def describe(machine: dict) -> list[str]:
    """`machine` as lines for a reader."""
    cpu, gpu, load = machine["cpu"], machine["gpu"], machine["load_average_1min"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"CPU: {cpu['model'] or 'unknown'}, {cpu['cores']} cores, {cpu['threads']} torch threads",
        f"GPU: {gpu}, driver {machine['gpu_driver']}" if gpu else "GPU: none",
        f"Python {machine['python']}, {versions}",
        f"Commit: {', '.join(commit or 'unknown' for commit in machine['git_commits'])}",
    ]
    said = f"Load average before the runs: {load['min']:.1f} to {load['max']:.1f}" if load else ""
    return [*lines, said] if load else lines


# Reports


def short(x: float) -> str:
    """Three digits or all before the point, and never 1e+03."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def as_text(table: list[list[str]], labels: int) -> str:
    """Aligned for a terminal, the first `labels` columns to the left.

    A cell followed by empty ones may run over into their columns.
    """
    full = [line for line in table if line[-1]]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    widths[:labels] = [max(len(line[i]) for line in table) for i in range(labels)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < labels else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def as_markdown(table: list[list[str]], labels: int) -> str:
    heading, *rest = table
    rule = ["---"] * labels + ["---:"] * (len(heading) - labels)
    return "\n".join("| " + " | ".join(line) + " |" for line in (heading, rule, *rest))


def write_report(
    stem: Path, above: list[str], table: list, below: list[str], record: dict, labels: int = 2
) -> None:
    """Prints the report and writes it to `stem`.md and, with all numbers, `stem`.json."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    markdown, record_file = (stem.with_name(f"{stem.name}.{kind}") for kind in ("md", "json"))
    below = [*below, f"files: {shown(markdown)}, {shown(record_file)}"]
    lists = ["\n".join(f"- {line}" for line in lines) for lines in (above, below)]
    markdown.write_text(f"{lists[0]}\n\n{as_markdown(table, labels)}\n\n{lists[1]}\n")
    record_file.write_text(json.dumps(record, indent=2) + "\n")
    print("\n".join(["", *above, "", as_text(table, labels), "", *below]))
