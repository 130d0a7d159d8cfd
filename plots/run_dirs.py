"""Reads the directories that the scripts leave in runs/: what every program here starts from.

A run is a directory with config.json, stages.json and TensorBoard files; one that was killed has no
stages.json. A record of plots/record.py stands for the runs that it was made of. Whatever else lies
beside them, or is damaged, empty or half written, is passed over with its name and the reason.
"""

import argparse
import functools
import json
import logging
import math
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from traces import CPU_LAYERS, read_trace

ROOT = Path(__file__).resolve().parents[1]
VARIANT = "_torchcompile"
ROWS = {  # name -> flags of the variant; the baseline is another file
    "baseline": (),
    "eager": (),
    "compile": ("--compile",),
    "cudagraphs": ("--cudagraphs",),
    "compile+cudagraphs": ("--compile", "--cudagraphs"),
}
SHOWN = (  # the scripts of README's table, in its order
    "ppo_continuous_action",
    "sac_continuous_action",
    "td3_continuous_action",
    "ppo_mujoco_worlds",
    "sac_mujoco_worlds",
    "ppo_cartpole_gpu",
)
# the race's entrants, where a reader knows them by another name
PEERS = {
    "zoo's PPO": "Stable-Baselines3 PPO",
    "zoo's SAC": "Stable-Baselines3 SAC",
    "zoo's RecurrentPPO": "SB3-Contrib RecurrentPPO",
}
# what may differ between runs of one table: the rest of args are settings that must agree
FREE_ARGS = {"exp_name", "seed", "compile", "cudagraphs", "track", "wandb_project_name"}
FREE_ARGS |= {"wandb_entity", "stopwatch", "resume", "save_model"}
SPEED = "charts/SPS"  # of TensorBoard
RECORDED = {  # metric -> its name in a record
    "charts/episodic_return": "episodic_returns",
    "charts/eval_return": "eval_returns",
}
# what reading a file raises that holds something else than it should
DAMAGED = (ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError)


def real(text: str | Path) -> Path:
    """A path without links: by its name a run is told from others."""
    if not str(text):
        raise argparse.ArgumentTypeError("is empty, as where a variable of the shell is not set")
    return Path(os.path.realpath(text))


@dataclass
class Run:
    """A run: what config.json, with machine.json, and stages.json say."""

    path: Path
    config: dict
    stages: dict  # empty if it was killed
    missing: str = ""  # to its end

    @property
    def script(self) -> str:
        """The script of the collection; for what other programs ran, the name that they gave it."""
        first = re.match(r".*?\.py(?= |$)|\S*", self.config["command"])  # folders may have spaces
        program = Path(first[0])
        ours = program.parent.name == "leanrl"
        name = program.stem if ours else self.config["args"]["exp_name"]
        return name.removesuffix(VARIANT)

    @property
    def row(self) -> str:
        args = self.config["args"]
        if "compile" not in args:
            return args.get("library", "baseline")
        found = []
        if args["compile"]:
            found.append("compile")
        if args["cudagraphs"] and self.config["gpu"]:  # without a device it has no effect
            found.append("cudagraphs")
        return "+".join(found) or "eager"

    @property
    def env_id(self) -> str:
        return self.config["args"]["env_id"]

    @property
    def settings(self) -> dict:
        """What was run, and what it was told; in older runs torch's threads were no flag."""
        found = {"script": self.script, "torch_threads": self.config.get("threads")}
        return found | self.config["args"]

    @functools.cached_property
    def trace(self) -> dict | None:
        """The reduced trace, None without one; ValueError if its file is damaged."""
        if not self.stages:
            raise ValueError(self.missing)
        return read_trace(self.path, self.stages)

    @property
    def hardware(self) -> str:
        device = self.config["args"].get("device")  # of another accelerator than CUDA
        return self.config["gpu"] or device or processor(self.config["cpu"])

    def series(self, tags: list[str] | None = None) -> dict[str, "Series"]:
        """Those of the metrics `tags`, or all."""
        return read_series(self.path, tags)


@dataclass
class RecordedRun(Run):
    """A run of a record: its directory is not needed any more."""

    metrics: dict[str, "Series"] | None = None

    def series(self, tags: list[str] | None = None) -> dict[str, "Series"]:
        names = self.metrics if tags is None else self.metrics.keys() & set(tags)
        return {name: self.metrics[name] for name in names}


# Names


def shown(path: Path) -> str:
    """`path` as seen from the repository, so that no record names a machine's folders."""
    path = real(path)
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def label(script: str) -> str:
    """A script's name as a figure has room for it."""
    algorithm, _, rest = script.partition("_")
    where = {
        "continuous_action": "",
        "continuous_action_async": " async",
        "atari_envpool": " Atari",
        "atari_envpool_multigpu": " Atari, multi-GPU",
        "cartpole_gpu": " CartPole",
        "mujoco_worlds": " on worlds",
    }
    return algorithm.upper() + where.get(rest, f" {rest}")


def processor(cpu: dict) -> str:
    model = cpu["model"] or "unknown processor"
    return f"{model}, {cpu['cores']} cores" if cpu["cores"] else model


# Machines


def this_machine() -> dict:
    """What config.json does not say: the processor, the driver, the load and the commit, now."""
    import torch  # here, because to read runs it is not needed

    def output(*command: str) -> str | None:
        try:
            done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    model = None
    with suppress(OSError, TypeError):  # TypeError: it does not say
        model = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return {
        "cpu": {
            "model": model,
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
        },
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpu_driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": sys.version.split()[0],
        "versions": versions(["torch", "gymnasium"]),
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


def differences(one: dict, other: dict) -> dict[str, tuple]:
    """Where two config.json tell of other machines; what one of them does not know is none."""
    pairs = {"gpu": (one["gpu"], other["gpu"])}
    for part in ("cpu", "versions"):
        for key in one[part].keys() & other[part].keys() - {"threads"}:
            pairs[f"{part} {key}"] = one[part][key], other[part][key]
    found = {}
    for key, pair in pairs.items():
        if pair[0] != pair[1] and (key == "gpu" or None not in pair):
            found[key] = pair
    return found


def machine(configs: list[dict]) -> dict:
    """Hardware, versions, commit and load of the runs with these configs; None where unknown."""
    first = configs[0]
    loads = [config["load_average"][0] for config in configs if config.get("load_average")]
    found = {"cpu": {"model": None} | first["cpu"]}
    found["cpu"]["threads"] = sorted({config["cpu"]["threads"] for config in configs})
    for key in ("gpu", "gpu_driver", "python", "versions"):
        found[key] = first.get(key)
    found["git_commits"] = list(dict.fromkeys(config.get("git_commit") for config in configs))
    found["load_average_1min"] = {"min": min(loads), "max": max(loads)} if loads else None
    return found


def measured_here(threads: int, packages: list[str] | None = None) -> dict:
    """`machine` of what this process measures itself, with `threads` of torch's."""
    here = this_machine()
    here["cpu"]["threads"] = threads
    here["versions"] |= versions(packages or [])
    return machine([here])


def describe(machine: dict) -> list[str]:
    """`machine` as lines for a reader."""
    cpu = machine["cpu"]
    gpu = machine["gpu"]
    load = machine["load_average_1min"]
    threads = " or ".join(map(str, np.unique(cpu["threads"])))  # a number in older records
    versions = [f"{name} {version}" for name, version in machine["versions"].items()]
    lines = [
        f"CPU: {processor(cpu)}, {threads} torch threads",
        f"GPU: {gpu}, driver {machine['gpu_driver']}" if gpu else "GPU: none",
        f"Python {machine['python'] or 'unknown'}, {', '.join(versions)}",
        f"Commit: {', '.join(commit or 'unknown' for commit in machine['git_commits'])}",
    ]
    if load:
        lines.append(f"Load average before the runs: {load['min']:.1f} to {load['max']:.1f}")
    return lines


# Runs


def read_json(path: Path) -> dict:
    """The object in the file at `path`; ValueError says what is wrong with it."""
    try:
        # what is called worlds was called gpu when some of the records were made
        found = json.loads(path.read_text().replace("mujoco_gpu", "mujoco_worlds"))
    except FileNotFoundError:
        raise ValueError(f"has no {path.name}") from None
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # not JSON, or not even text
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is damaged")
    return found


def read_config(path: Path, suffix: str = ".json", machine: dict | None = None) -> dict:
    """config.json of the run in `path` and what machine.json beside it, or else `machine`, adds.

    Worlds, which are evaluated in Gymnasium's environment, have its name.
    """
    config = read_json(path / f"config{suffix}")
    args = config["args"]
    args["env_id"] = args["env_id"].removeprefix("worlds/")
    beside = path / "machine.json"
    found = {"python": None, "gpu_driver": None, "load_average": None, "git_commit": None}
    found |= read_json(beside) if beside.exists() else machine or {}
    versions = found.get("versions", {}) | config["versions"]
    cpu = {"model": None, "vectors": None, "cores": None} | found.get("cpu", {})
    cpu["threads"] = args["torch_threads"]
    return found | config | {"cpu": cpu, "versions": versions}


def read_run(path: Path, whole: bool = True) -> Run:
    """The run in the directory `path`; ValueError says what is wrong with one that did not end.

    A resumed run has further parts, config_STEP.json and stages_STEP.json. It has ended if one of
    them has; its speed is that of the last part with a steady window. Unless it must be `whole`, a
    run may also have been interrupted or have ended in its warm-up.
    """
    ended = False
    problems = []
    begun = []
    for before in sorted(parts(path, "config"), reverse=True):
        try:
            run = read_part(path, before)
        except ValueError as problem:
            problems.append(problem)
            continue
        if run.missing:
            problems.append(ValueError(run.missing))
        else:
            ended = True
        if ended and run.stages.get("sps_steady"):
            run.missing = ""
            return run
        begun.append(run)
    if begun and not whole:
        steady = [run for run in begun if run.stages.get("sps_steady")]
        return steady[0] if steady else begun[0]
    if problems:
        raise problems[0]
    raise ValueError("ended before its warm-up did: no steady steps/s")


def parts(folder: Path, name: str) -> dict[int, Path]:
    """{steps before: file}: NAME.json of a run and, where it was resumed, NAME_STEP.json."""
    found = {0: folder / f"{name}.json"}
    for path in folder.glob(f"{name}_*.json"):
        step = path.stem.removeprefix(f"{name}_")
        if step.isdecimal():
            found[int(step)] = path
    return found


def read_part(path: Path, before: int) -> Run:
    """The part of a run that began after `before` steps."""
    suffix = f"_{before}.json" if before else ".json"
    try:
        config = read_config(path, suffix)
        args = config["args"]
        run = Run(path, config, {})
        # this and what follows without a use raises where the files are of another program
        " ".join([run.row, run.script, run.env_id, run.hardware, *describe(machine([config]))])
        round(args["seed"])
        try:
            report = read_json(path / f"stages{suffix}")
        except ValueError as problem:
            run.missing = f"{problem}: killed or still running"
            return run
        run.stages = report
        steps = before + round(report["sps"] * report["wall_seconds"])
        if report["sps_steady"]:
            round(report["sps_steady"] + report["warmup_seconds"])
        dict(report.get("stages") or {})
        if args.get("stopwatch") == "trace":  # the report ends where the trace begins
            speeds = read_series(path, [SPEED]).get(SPEED)
            steps = round(speeds.steps[-1]) if speeds else 0
        run.missing = missing_steps(args, steps)
    except (KeyError, TypeError, AttributeError, ArithmeticError, IndexError):
        raise ValueError("holds the files of some other program") from None
    return run


def missing_steps(args: dict, steps: int) -> str:
    """What a run that has made so many steps lacks to its end, or nothing."""
    rollout = args.get("num_steps", 1) * args.get("num_envs", 1)  # PPO ends with a whole one
    if steps < 0.99 * (args["total_timesteps"] // rollout * rollout):
        return f"stopped after {steps} of {args['total_timesteps']} steps"
    return ""


def read_record(path: Path) -> list[RecordedRun]:
    """The runs of a file that plots/record.py has written; ValueError says what is wrong with it.

    The oldest records have no seconds, which are NaN, and another name for `sps`.
    """
    runs = []
    try:
        for entry in read_json(path)["runs"]:
            config = entry["config"]
            metrics = {}
            for metric, name in RECORDED.items():
                if rows := entry[name]:
                    steps, values, *seconds = np.array(rows, dtype=float).T
                    unknown = np.full_like(steps, math.nan)
                    metrics[metric] = Series(steps, seconds[0] if seconds else unknown, values)
            stages = {"sps": entry["stages"].get("sps_inclusive")} | entry["stages"]
            steps = [stages["sps"] * stages["wall_seconds"]]
            steps += [series.steps[-1] for series in metrics.values()]
            missing = missing_steps(config["args"], round(max(steps)))
            at = real(path) / str(len(runs)) / entry["run"]
            runs.append(RecordedRun(at, config, stages, missing, metrics))
    except DAMAGED:
        raise ValueError("is no record of runs") from None
    return runs


def find_runs(paths: list[Path]) -> list[Path]:
    """The directories at or below `paths` that may be runs, in the order in which they were made.

    What holds no file of a run is searched, once, whatever links lead there; of a sweep's variant
    only its last attempt.
    """
    found = set()
    searched = set()
    left = [real(path) for path in paths if path.is_dir()]
    files = ("config.json", "stages.json", "events.out.tfevents.*")
    while left:
        path = left.pop()
        if path in searched:
            continue
        searched.add(path)
        pattern = "runs/*" if (path / "variant.json").exists() else "[!.]*"
        below = [real(each) for each in path.glob(pattern) if each.is_dir()]
        if below and not any(any(path.glob(name)) for name in files):
            left += below
        else:
            found.add(path)
    return sorted(found, key=age)


def age(path: Path) -> tuple[str, str]:
    """What sorts runs in the order in which they were made."""
    made_at = path.name.rpartition("__")[2]
    return made_at.zfill(12), path.name


def read_runs(paths: list[Path], whole: bool = True) -> tuple[list[Run], list[str]]:
    """The runs at or below `paths`, which may be records, and what is wrong with all else.

    The runs are in the order in which they were made.
    """
    runs = []
    skipped = []
    for path in find_runs(paths):
        try:
            runs.append(read_run(path, whole))
        except ValueError as reason:
            skipped.append(f"{shown(path)} {reason}")
    known = {run.path.name for run in runs}
    for path in paths:
        if not path.is_file():
            continue
        try:
            found = read_record(path)
        except ValueError as reason:
            skipped.append(f"{shown(path)} {reason}")
            continue
        for run in found:
            if whole and (run.missing or not run.stages["sps_steady"]):
                reason = run.missing or "has no steady steps/s"
                skipped.append(f"{shown(run.path)} {reason}")
            elif run.path.name not in known:
                runs.append(run)
        known |= {run.path.name for run in found}
    skipped += [f"{shown(path)} does not exist" for path in paths if not path.exists()]
    runs.sort(key=lambda run: age(run.path))
    return runs, skipped


def read_and_tell(paths: list[Path]) -> list[Run]:
    """The runs at or below `paths`, also those that were interrupted, which are named."""
    runs, skipped = read_runs(paths, whole=False)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    for run in runs:
        if run.missing:
            print(f"interrupted: {shown(run.path)} {run.missing}", file=sys.stderr)
    return runs


@dataclass
class Series:
    """One metric of a run, in the order of its steps."""

    steps: np.ndarray  # (n,) environment steps
    seconds: np.ndarray  # (n,) since the run was set up, without lost steps and pauses
    values: np.ndarray  # (n,)


def read_series(path: Path, tags: list[str] | None = None) -> dict[str, Series]:
    """Those of the metrics `tags`, or all, in the TensorBoard files in `path`, up to any damage."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    found = {}
    try:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        start = events.FirstEventTimestamp()
    except Exception:  # none there, or none of TensorBoard's: it raises many kinds
        return found
    rows = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    speeds = rows.get(SPEED)
    if speeds and speeds[0].value:  # steps per second since the run was set up, before any record
        start = speeds[0].wall_time - speeds[0].step / speeds[0].value
    times = {tag: np.array([row.wall_time for row in mine]) for tag, mine in rows.items()}
    everything = np.concatenate([*times.values(), [start]])
    names = " ".join(file.name for file in path.glob("events.out.tfevents.*"))
    resumed = sorted(map(int, re.findall(r"tfevents\.(\d+)", names)))[1:]
    pauses = {at: at - everything[everything < at].max(initial=start) for at in resumed}
    wanted = rows.keys() if tags is None else rows.keys() & set(tags)
    for tag in wanted:
        paused = sum(seconds * (times[tag] >= at) for at, seconds in pauses.items())
        found[tag] = Series(
            steps=np.array([row.step for row in rows[tag]], dtype=float),
            seconds=times[tag] - start - paused,
            values=np.array([row.value for row in rows[tag]]),
        )
    return found


def read_metric(path: Path, tag: str) -> Series:
    """One metric in the TensorBoard files in `path`; ValueError if it is not there."""
    found = read_series(path, [tag])
    if not found:
        raise ValueError(f"has logged no {tag}")
    return found[tag]


def per_step(report: dict, trace: dict | None) -> dict[str, dict[str, float]]:
    """A stopwatch's report -> {stage: {field of the trace, or "total": per environment step}}.

    `total`, in seconds, is what the stage took in the steady window, which was not traced. A trace
    divides it into layers: annotations slow some stages down more than others, so each is scaled to
    its own total. Kernels are not, they are no slower under the profiler. Stages without time are
    left out, and the evaluation, which is no training.
    """
    found = {}
    for name, seconds in report["stages"].items():
        if name == "evaluation" or not seconds:
            continue
        total = seconds / report["env_steps"]
        stage = found[name] = {"total": total}
        if not trace:
            continue
        fields = trace["stages"].get(name, {})
        traced = sum(fields.get(layer) or 0 for layer in CPU_LAYERS)
        for field, value in fields.items():
            if value is not None and traced and field.endswith("_s") and field != "gpu_s":
                stage[field] = total * value / traced
            elif value is not None:
                stage[field] = value / trace["env_steps"]
        if not traced:  # too rare to have been in the window
            stage["simulator_s" if name == "simulation" else "python_s"] = total
    return found


def record_of(runs: list, rows: list[dict]) -> dict:
    """What is written of `runs`, of which `rows` are what a program has made."""
    return {
        "schema": 1,
        "machine": machine([run.config for run in runs]),
        "rows": rows,
        "commands": [run.config["command"] for run in runs],
    }
