"""Reads the directories that the scripts leave in runs/: what every program here starts from.

A run is a directory with config.json, stages.json and TensorBoard files. Whatever else lies beside
it, or is damaged, empty or half written, is passed over with its name and the reason.
"""

import json
import logging
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
FREE_ARGS |= {"wandb_entity", "stopwatch"}
CPU_LAYERS = {  # of a trace: field -> title
    "simulator_s": "simulator",
    "python_s": "Python",
    "backend_s": "backend",
    "cuda_launch_s": "CUDA API",
    "cuda_wait_s": "waiting",
}


@dataclass
class Run:
    """A finished run: what its two files say."""

    path: Path
    config: dict
    stages: dict

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

    @property
    def hardware(self) -> str:
        cpu = self.config["cpu"]
        return self.config["gpu"] or f"{cpu['model'] or 'unknown CPU'}, {cpu['cores']} cores"


def shown(path: Path) -> str:
    """`path` as seen from the repository, so that no record names a machine's folders."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def label(script: str) -> str:
    """A script's name as a figure has room for it."""
    algorithm, _, rest = script.partition("_")
    where = {"continuous_action": "", "atari_envpool": " Atari"}
    where |= {"continuous_action_async": " async", "atari_envpool_multigpu": " Atari, multi-GPU"}
    where |= {"cartpole_gpu": " CartPole", "pendulum_gpu": " Pendulum"}
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


def read_run(path: Path) -> Run:
    """The run in the directory `path`; ValueError says what is wrong with one that did not end.

    A resumed run is described by its last part, in config_STEP.json and stages_STEP.json.
    """
    parts = (re.fullmatch(r"config_(\d+)\.json", file.name) for file in path.glob("config_*.json"))
    before = max((int(part[1]) for part in parts if part), default=0)
    suffix = f"_{before}.json" if before else ".json"
    run = Run(path, read_json(path / f"config{suffix}"), read_json(path / f"stages{suffix}"))
    try:
        args = run.config["args"]
        run.row, run.script, run.env_id, run.hardware  # noqa: B018  they read what they need
        steps = before + round(run.stages["sps_inclusive"] * run.stages["wall_seconds"])
        steady = run.stages["sps_steady"]
        whole = args.get("num_steps", 1) * args.get("num_envs", 1)  # PPO ends with a whole rollout
        if steps < 0.99 * (args["total_timesteps"] // whole * whole):
            raise ValueError(f"stopped after {steps} of {args['total_timesteps']} steps")
    except (KeyError, TypeError, AttributeError, ZeroDivisionError, IndexError):
        raise ValueError("holds the files of some other program") from None
    if not steady:
        raise ValueError("ended before its warm-up did: no steady steps/s")
    return run


def find_runs(paths: list[Path]) -> list[Path]:
    """The directories among `paths` that may be runs, and those directly below the others.

    The run of a sweep's variant is a floor below. In the order in which they were made.
    """

    def directories(path: Path) -> set[Path]:
        return {below for below in path.glob("*") if below.is_dir()}

    found = set()
    for path in paths:
        files = (path / name for name in ("config.json", "stages.json", "variant.json"))
        for each in [path] if any(file.exists() for file in files) else directories(path):
            of_variant = (each / "variant.json").exists()
            found |= (of_variant and directories(each / "runs")) or {each}
    return sorted(found, key=lambda path: (path.name.rpartition("__")[2].zfill(12), path.name))


def read_runs(paths: list[Path]) -> tuple[list[Run], list[str]]:
    """The runs at or below `paths`, and for each directory that is none what is wrong with it."""
    runs, skipped = [], []
    for path in find_runs(paths):
        try:
            runs.append(read_run(path))
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


def per_step(report: dict) -> dict[str, dict[str, float]]:
    """A stopwatch's report -> {stage: {field of the trace, or "total": per environment step}}.

    `total`, in seconds, is what the stage took in the steady window, which was not traced. A trace
    divides it into layers: annotations slow some stages down more than others, so each is scaled to
    its own total. Stages without time are left out, and the evaluation, which is no training.
    """
    steps, trace, found = report["window"]["env_steps"], report.get("trace"), {}
    for name, stage in report["stages"].items():
        if name == "evaluation" or not stage["seconds"]:
            continue
        total = stage["seconds"] / steps
        found[name] = {"total": total}
        if trace:
            fields = {k: v for k, v in trace["stages"][name].items() if v is not None}
            traced = sum(fields.get(layer, 0) for layer in CPU_LAYERS) / trace["env_steps"]
            for field, value in fields.items():
                scale = total / traced if field.endswith("_s") and traced else 1
                found[name][field] = value * scale / trace["env_steps"]
            if not traced:  # too rare to have been in the window
                found[name]["simulator_s" if name == "simulation" else "python_s"] = total
    return found


def incomparable(runs: list[Run]) -> str | None:
    """Why `runs` do not belong into one table, or None if they do."""
    for run in runs:
        for other in runs:
            configs = run.config, other.config
            pairs = {key: [config.get(key) for config in configs] for key in ("gpu", "versions")}
            # how many threads to take is a script's own choice
            pairs["cpu"] = [config["cpu"] | {"threads": None} for config in configs]
            if run.script == other.script:
                pairs["processes"] = [config.get("processes", 1) for config in configs]
                one, another = (config["args"] for config in configs)
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
    """Hardware, versions, commit and load of the runs with these config.json."""
    first, loads = configs[0], [config["load_average"][0] for config in configs]
    return {
        **{key: first[key] for key in ("cpu", "gpu", "gpu_driver", "python", "versions")},
        "git_commits": list(dict.fromkeys(config["git_commit"] for config in configs)),
        "load_average_1min": {"min": min(loads), "max": max(loads)},
    }


def describe(machine: dict) -> list[str]:
    """`machine` as lines for a reader."""
    cpu, gpu, load = machine["cpu"], machine["gpu"], machine["load_average_1min"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return [
        f"CPU: {cpu['model'] or 'unknown'}, {cpu['cores']} cores, {cpu['threads']} torch threads",
        f"GPU: {gpu}, driver {machine['gpu_driver']}" if gpu else "GPU: none",
        f"Python {machine['python']}, {versions}",
        f"Commit: {', '.join(commit or 'unknown' for commit in machine['git_commits'])}",
        f"Load average before the runs: {load['min']:.1f} to {load['max']:.1f}",
    ]


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
    stem: Path,
    above: list[str],
    table: list[list[str]],
    below: list[str],
    record: dict,
    labels: int = 2,
) -> None:
    """Prints the report and writes it to `stem`.md and, with all numbers, `stem`.json."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    markdown, record_file = (stem.with_name(f"{stem.name}.{kind}") for kind in ("md", "json"))
    below = [*below, f"files: {shown(markdown)}, {shown(record_file)}"]
    print("\n".join(["", *above, "", as_text(table, labels), "", *below]))
    lists = ["\n".join(f"- {line}" for line in lines) for lines in (above, below)]
    markdown.write_text(f"{lists[0]}\n\n{as_markdown(table, labels)}\n\n{lists[1]}\n")
    record_file.write_text(json.dumps(record, indent=2) + "\n")
