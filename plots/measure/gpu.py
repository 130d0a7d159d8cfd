"""What a machine with a GPU has to show in half an hour, the most important first, and a page.

    bash run.sh gpu                         all steps, after a plan of their minutes
    bash run.sh gpu --minutes 10            those that fit; the same command then goes on
    bash run.sh gpu --leanrl PYTHON FOLDER  also Meta's LeanRL, by its interpreter and checkout
    bash run.sh gpu --rehearse              the same programs, tiny, where there is no GPU

Each step is a process of its own with a limit of time. One that fails stops none after it, and one
whose package is missing is skipped. The page says what was tested, measured, and is to be
committed. In a rehearsal, whose "GPU" is tests/cuda_rehearsal.py, no number counts. Written to
--out: gpu.md, gpu.json, speedup.json, logs/, and a folder of records per step.
"""

import argparse
import importlib.util
import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import processes
import program
import run_dirs
import tables
import torch
from run_dirs import ROOT, shown

SHARED = ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]  # side by side on the GPU
FAILED = r"^(FAILED.*)$"
CAPTURED = "compile+cudagraphs"
SPEED = ["plots/measure/speedup.py", "--quick"]
WORLDS = "leanrl/ppo_mujoco_worlds_torchcompile.py"
MANY = ["--num-envs", "4096", "--num-steps", "16", "--total-timesteps", "1000000000"]
TINY = ["--tiny", "--limit", "900"]
FEW = ["--physics", "c", "--num-envs", "8", "--total-timesteps", "512", "--eval-every", "0"]


class Step(NamedTuple):
    """A program, and what makes it short enough to be rehearsed."""

    name: str
    minutes: float  # its limit
    command: list[str]
    rehearsed: list[str]
    shows: str = FAILED  # a regular expression: the lines of its output that the page quotes
    needs: str = "torch"  # a package
    writes: bool = True  # it takes --out
    environment: dict = {}


def speed(script: str, needs: str = "torch") -> Step:
    """Baseline, captured variant, baseline, captured variant."""
    only = [f"{script} baseline", f"{script} {CAPTURED}"]
    command = [*SPEED, "--limit", "28", "--seeds", "2", "--only", *only]
    return Step(f"speed of {script}", 2.2, command, TINY, needs=needs)


def learning(task: str) -> Step:
    command = [WORLDS, "--compile", "--cudagraphs", "--env-id", f"worlds/{task}", *MANY]
    command += ["--eval-every", "5000000"]
    shows = r"(evaluation at .*)$"
    return Step(f"learning {task}", 1.5, command, FEW, shows, "mujoco_warp", writes=False)


STEPS = [
    Step(
        "tests",
        3.5,
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests", *SHARED],
        ["-k", "captured_updates and eager-td3"],
        r"^(FAILED.*|ERROR.*|.*\d+ (?:passed|failed).*)$",
        "xdist",
        writes=False,
        environment={"OMP_NUM_THREADS": "2"},  # of each process: several share the cores
    ),
    Step("host", 2.5, ["plots/measure/host.py"], ["--seconds", "30"]),
    speed("sac_continuous_action"),
    speed("td3_continuous_action"),
    speed("ppo_continuous_action"),
    speed("ppo_cartpole_gpu"),
    speed("ppo_atari_envpool", "envpool"),
    speed("ppo_mujoco_worlds", "mujoco_warp"),
    speed("sac_mujoco_worlds", "mujoco_warp"),
    Step(
        "fused products",
        1.2,
        [*SPEED, "--limit", "65", "--only", f"sac_continuous_action {CAPTURED}"],
        TINY,
        environment={"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1"},  # also what follows a product
    ),
    Step("games", 1, ["plots/measure/games.py"], ["--seconds", "0.2"], needs="envpool"),
    Step("traces", 1.5, [*SPEED, "--only", f"[ps]*_continuous_action {CAPTURED}"], TINY),
    Step(
        "devices",
        1.5,
        ["plots/measure/devices.py", "--rounds", "1", "--steps", "131072"],
        ["--steps", "8192"],
    ),
    learning("Humanoid-v5"),
    learning("Ant-v5"),
]
LEANRL = Step("LeanRL", 4.5, ["plots/measure/metas_leanrl.py"], ["--seconds", "2"])


def plan(options: argparse.Namespace) -> list[Step]:
    """All steps; LeanRL's, where there is one, follow the speeds that they are compared with."""
    steps = list(STEPS)
    if options.leanrl:
        last = max(i for i, step in enumerate(steps) if step.name.startswith("speed"))
        steps.insert(last + 1, LEANRL._replace(command=[*LEANRL.command, *options.leanrl]))
    return steps


def missing(step: Step) -> bool:
    return importlib.util.find_spec(step.needs) is None


def run_step(step: Step, options: argparse.Namespace, environment: dict) -> dict:
    """Its seconds, exit status, and what of its output belongs on the page."""
    name = step.name.replace(" ", "-")
    command = [sys.executable, *step.command]
    if step.writes:
        command += ["--out", shown(options.out / name)]
    if options.rehearse:
        command += step.rehearsed
    log = options.out / f"logs/gpu-{name}.log"
    print(f"{step.name}: {shlex.join(command[1:])}", flush=True)
    environment = environment | step.environment
    begin = time.monotonic()
    limit = 60 * step.minutes * (5 if options.rehearse else 1)
    status = processes.run_logged(command, log, environment=environment, limit=limit)
    said = re.findall(step.shows, log.read_text(errors="replace"), re.MULTILINE)
    return {
        "step": step.name,
        "command": shlex.join(["python", *command[1:]]),
        "seconds": time.monotonic() - begin,
        "status": status,
        "said": list(dict.fromkeys(said)),
        "log": shown(log),
    }


def profiles(options: argparse.Namespace) -> list[Step]:
    """Of each run that the step `traces` has traced."""
    record = options.out / "traces/speedup.json"
    steps = []
    for path in json.loads(record.read_text())["traced"] if record.exists() else []:
        command = ["plots/cross_stack.py", path]
        name = f"profile of {Path(path).name}"
        steps.append(Step(name, 0.5, command, [], r"^(\d+\. .*)$", writes=False))
    return steps


def cells(results: list[dict]) -> list[list[str]]:
    table = [["step", "seconds", "ended", "says"]]
    for result in results:
        ended = {0: "well", None: "by its limit"}.get(result["status"], "with an error")
        said = result["said"] or [""]
        table.append([result["step"], f"{result['seconds']:,.0f}", ended, said[0]])
        table += [["", "", "", line] for line in said[1:]]
    return table


def join_speeds(out: Path) -> None:
    """speedup.json: the rows of all scripts, as one record."""
    found = [run_dirs.read_json(path) for path in sorted(out.glob("speed-of-*/speedup.json"))]
    if found:
        joined = found[-1] | {"command": "bash run.sh gpu", "traced": []}
        for name in ("rows", "failures"):
            joined[name] = [row for record in found for row in record[name]]
        tables.write_json(out / "speedup.json", joined)


def write_page(results: list[dict], problems: list[str], options: argparse.Namespace) -> None:
    """What these steps have shown."""
    title = "A rehearsal: no number counts" if options.rehearse else "What this GPU shows"
    below = [f"CUDA would refuse: {line}" for line in problems]
    made = sorted(path for path in options.out.glob("*/*.md"))
    below += [f"to commit, with the GPU in its name: {shown(path)}" for path in made]
    record = {
        "schema": 1,
        "command": processes.call("gpu.py", options, "rehearse"),
        "machine": run_dirs.measured_here(torch.get_num_threads()),
        "steps": results,
        "rehearsed": options.rehearse,
    }
    tables.write_report(options.out / "gpu", title, cells(results), record, below=below)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out")
    parser.set_defaults(out=str(ROOT / "plots/out/gpu"))
    parser.add_argument("--minutes", type=float, default=60, help="of this call")
    parser.add_argument("--again", action="store_true", help="also the steps that are done")
    parser.add_argument("--leanrl", nargs=2, metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--rehearse", action="store_true", help="tiny, and without a GPU")
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("no CUDA device for torch; --rehearse needs none")
    if options.again:
        shutil.rmtree(options.out)
        options.out.mkdir()
    record = options.out / "gpu.json"
    results = run_dirs.read_json(record)["steps"] if record.exists() else []
    done = {result["step"] for result in results}
    steps = plan(options)
    for step in steps:
        state = "done" if step.name in done else f"skipped: no {step.needs}" * missing(step)
        print(f"{step.minutes:5.1f} min  {step.name}  {state}".rstrip())
    print(f"{sum(step.minutes for step in steps if not missing(step)):5.1f} min at most in all")
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        environment = {}
        if options.rehearse:
            environment = {
                "PYTHONPATH": str(ROOT / "tests/rehearsed"),
                "REHEARSED_PROBLEMS": folder,
            }
        problems = set()
        steps = [step for step in steps if step.name not in done and not missing(step)]
        while steps:
            step = steps.pop(0)
            if time.monotonic() + 60 * step.minutes > end:
                print(f"no time for {step.name}: the same command goes on from there")
                break
            results.append(run_step(step, options, environment))
            if step.name == "traces":
                steps = profiles(options) + steps
            for path in Path(folder).iterdir():
                problems.update(path.read_text().splitlines())
            tables.write_json(record, {"steps": results})  # an interrupted call goes on, too
        join_speeds(options.out)
        write_page(results, sorted(problems), options)
    return int(any(result["status"] for result in results) or bool(problems))


if __name__ == "__main__":
    program.start(main)
