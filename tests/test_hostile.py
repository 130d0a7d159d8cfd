"""Hostile cases: each script is started with each of them, and what is neither one line nor right
is printed.

    python tests/test_hostile.py --jobs 2               all of them, in about 15 minutes
    python tests/test_hostile.py --only "sac* resume*"  those whose "SCRIPT CASE" matches
    python tests/test_hostile.py --list                 the names of all cases
    python -m pytest --slow tests/test_hostile.py       the same as tests, one per script

A case is right if the process ends within a minute and with the right status; if, beside progress
bar and stopwatch, it says nothing when all is well, and otherwise one line that names the flag or
the file; if a run that never began leaves no directory; and if one that did leaves whole records:
config, events and stages that can be read, no partial file, a checkpoint without NaN.

A case is a process, but importing torch takes seconds: this program imports once what all scripts
need, and each case is a fork of it that runs a script as `__main__`. Where the start itself is
tested (Ctrl-C during imports, OpenGL's libraries), it is a Python of its own.
"""

import argparse
import atexit
import contextlib
import ctypes.util
import faulthandler
import fnmatch
import gc
import importlib.util
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = Path(__file__).parent
LIMIT = 60  # seconds, of which a case that is right needs a few
SILENCE = 20  # the same where it should not even begin


# Scripts


class Script:
    """A script, what kind of environment it takes, and flags that make its runs tiny."""

    def __init__(self, path: Path):
        self.path = path
        self.name = path.stem
        self.variant = self.name.endswith("_torchcompile")
        self.off_policy = self.name.startswith(("sac", "td3"))
        self.worlds = "mujoco_gpu" in self.name
        self.cartpole = "cartpole" in self.name
        self.atari = "atari" in self.name
        self.processes = "multigpu" in self.name
        self.workers = "async" in self.name
        self.gym = "continuous_action" in self.name
        if self.off_policy:
            self.small = {"buffer_size": 1000, "batch_size": 8, "learning_starts": 20}
            if self.worlds:
                self.small["utd_ratio"] = 0.25
        else:
            self.small = {"num_steps": 8, "num_minibatches": 2, "update_epochs": 1}
        self.small |= {"num_envs": 2, "total_timesteps": 64, "eval_episodes": 2, "cuda": False}
        if self.gym:
            self.small["env_id"] = "hostile_envs:Fine-v0"

    def flags(self, **changes) -> list[str]:
        """The command line; None leaves a flag away."""
        words = []
        for name, value in (self.small | changes).items():
            flag = name.replace("_", "-")
            if value is True or value is False:
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                words.append(f"--{flag}={value}")
        return words


def find_scripts() -> list[Script]:
    paths = sorted((ROOT / "leanrl").glob("*.py"))
    return [Script(path) for path in paths if "\nclass Args" in path.read_text()]


# Processes


class Process:
    """A script that runs in a directory and writes both streams into a file."""

    def __init__(self, lab, command, own_python=False, out=None, group=0, before=None, env=None):
        self.lab = lab
        self.log = lab.folder / f"output-{len(lab.processes)}.txt"
        self.log.touch()
        self.status = None
        self.born = time.monotonic()
        lab.processes.append(self)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(0, group)
            enter(lab.place, self.log, out, env or {})
            become(command, own_python, before)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(self.pid, group)

    def poll(self):
        """The exit status, negative for a signal, or None as long as it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, limit=LIMIT) -> "Outcome":
        ended = wait_until(lambda: self.poll() is not None, self.born + limit - time.monotonic())
        if not ended:
            self.signal(signal.SIGABRT)  # for faulthandler, which writes where it hangs
            time.sleep(0.5)
        self.kill()
        text = self.log.read_text(errors="replace")
        return Outcome(self.status if ended else None, text, time.monotonic() - self.born)

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def signal_group(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self):
        """Ends it and what it has started."""
        self.signal_group(signal.SIGKILL)
        if self.status is None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.status = -signal.SIGKILL


def enter(place: Path, log: Path, out: int | None, env: dict) -> None:
    """In a new process: directory, streams and environment, and signals as in a terminal."""
    os.chdir(place)
    for name, value in env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if out is None:
        out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def become(command: list[str], own_python: bool, before) -> None:
    """In a new process: runs the command, a script and its flags, and ends as Python would."""
    sys.argv = [str(word) for word in command]
    faulthandler.enable(os.dup(1), all_threads=True)
    if before:
        before()
    if own_python:
        os.execv(sys.executable, [sys.executable, *map(str, command)])
    code = 0
    try:
        script = types.ModuleType("__main__")
        script.__file__ = sys.argv[0]
        # What processes of multiprocessing send was made in a module of the second name
        sys.modules["__main__"] = sys.modules["__mp_main__"] = script
        exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), vars(script))
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            with contextlib.suppress(OSError):
                print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream:
                stream.flush()
    except BaseException as error:
        code = code or 120
        with contextlib.suppress(BaseException):
            traceback.print_exception(error)
    os._exit(code & 255)


@dataclass
class Outcome:
    status: int | None  # None: it did not end in time
    text: str
    seconds: float

    def lines(self) -> list[str]:
        """What it has said beside bar, table and the warnings of others."""
        said = []
        text = NUMPY.sub("", re.sub(r"\x1b\[[\d;]*[mA-K]", "", self.text))
        for line in re.split(r"[\r\n]", text):
            line = BAR.sub("", line)
            if line.strip() and not EXPECTED.fullmatch(line):
                said.append(line)
        return said


BAR = re.compile(r" *\d+%\|[^|\r\n]*\| [\d.kM]+/[\d.kM]+ \[[^\]\r\n]*\]")
NUMPY = re.compile(  # where Gymnasium normalizes what is not finite: a line and its source
    r"\S+/(gymnasium/wrappers|numpy/_core|leanrl)/\S+: RuntimeWarning: "
    r"(overflow|invalid value) encountered in [^\n]*\n  [^\n]*\n"
)
EXPECTED = re.compile(
    "|".join(
        [
            r" *\S+ +[\d,.]+ s *[\d,.]+ us/step",  # a row of the stopwatch
            r" *\d+%\|[^|]*\| .*<\?, *",  # the bar, before its first refresh
            r"(nan|[\d,.]+) steps/s, .*",
            r"resumed at step [\d,]+, with fresh episodes",
            r"evaluation at [\d,]+: (nan|[\d,.-]+)",
            r".*GLFWError: .*|  warnings\.warn\(message, GLFWError\)",  # its line follows
            r"WARNING: compiler attribute 'settotalmass' is deprecated .*",  # MuJoCo
        ]
    )
)


def wait_until(true, limit) -> bool:
    deadline = time.monotonic() + limit
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# Judgement


class Lab:
    """A script, a fresh directory to run it in, and what was found wrong in a case."""

    def __init__(self, script: Script, folder: Path):
        self.script = script
        self.folder = folder
        self.place = folder / "a place"
        self.place.mkdir(parents=True)
        self.runs = self.place / "runs"
        self.processes = []
        self.wrong = []

    def start(self, how=None, **flags) -> Process:
        """The script with small flags and these; `how` are options of Process."""
        command = [self.script.path, *self.script.flags(**flags)]
        return Process(self, command, **how or {})

    def run(self, how=None, limit=LIMIT, **flags) -> Outcome:
        return self.start(how, **flags).wait(limit)

    def base(self, cache={}) -> Path:  # noqa: B006
        """A copy of a finished run with a checkpoint, made once, in this place."""
        key = self.script.name
        if key not in cache:
            folder = self.folder.parent / "base"
            shutil.rmtree(folder, ignore_errors=True)
            lab = Lab(self.script, folder)
            outcome = lab.run(save_model=True)
            found = list(lab.runs.glob("*"))
            if outcome.status != 0 or len(found) != 1:
                raise RuntimeError(f"no base to resume from:\n{outcome.text[-2000:]}")
            cache[key] = found[0]
        shutil.copytree(cache[key], self.runs / "base")
        return self.runs / "base"

    def endless(self, how=None, **flags) -> Process:
        """A run that goes on until it is ended, and has written a checkpoint."""
        flags = {"total_timesteps": 10**8, "checkpoint_every": 64} | flags
        process = self.start(how, **flags)

        def begun():
            return list(self.runs.glob("*/checkpoint.pt")) or process.poll() is not None

        if not wait_until(begun, LIMIT) or process.poll() is not None:
            text = process.wait(0).text[-2000:]
            raise RuntimeError(f"a run without a fault did not get to its checkpoint:\n{text}")
        return process

    def expect(self, true, what, outcome=None):
        if not true:
            tail = [line[:300] for line in tail_of(outcome)] if outcome else []
            self.wrong.append((what, tail))

    def expect_lines(self, outcome: Outcome, names: str | None):
        """One line that names something, or none."""
        lines = [] if is_tyro(outcome.text, names) else outcome.lines()
        traces = outcome.text.count("Traceback")
        self.expect(not traces, f"{traces} tracebacks in {len(lines)} lines", outcome)
        if traces or is_tyro(outcome.text, names):
            return
        if names is None:
            self.expect(not lines, f"{len(lines)} lines", outcome)
        elif len(lines) != 1:
            self.expect(False, f"{len(lines)} lines instead of one", outcome)
        else:
            named = re.search(names, lines[0], re.IGNORECASE)
            self.expect(named, f"the line does not name {names}", outcome)

    def ended(self, outcome: Outcome) -> bool:
        said = "".join(outcome.lines()).partition("Fatal Python error")[0]
        silent = "" if said else " and silent"
        words = f"still running{silent} after {outcome.seconds:.0f} s"
        self.expect(outcome.status is not None, words, outcome)
        return outcome.status is not None

    def expect_failure(self, outcome: Outcome):
        """A second Ctrl-C may end Python while it ends; by then all is written and said."""
        good = 0 < outcome.status < 120 or outcome.status == -signal.SIGINT
        self.expect(good, f"exit status {outcome.status}", outcome)

    def refused(self, outcome: Outcome, names: str, before: dict | None = None):
        """The run never began: one line, and `runs` is as it was."""
        if self.ended(outcome):
            self.expect_failure(outcome)
            self.expect_lines(outcome, names)
        after = self.snapshot()
        left = after.keys() - (before or {}).keys()
        left = [name for name in left if not name.endswith("lock")]
        self.expect(not left, f"left behind: {len(left)} files, {min(left, default='')}")
        for name, content in (before or {}).items():
            self.expect(after.get(name) == content, f"changed: {name}")

    def stopped(self, outcome: Outcome, names: str, **what):
        """The run began and ended early, in one line and with whole records."""
        if self.ended(outcome):
            self.expect_failure(outcome)
            self.expect_lines(outcome, names)
            self.expect_records(**what)

    def finished(self, outcome: Outcome, **what):
        if self.ended(outcome):
            self.expect(outcome.status == 0, f"exit status {outcome.status}", outcome)
            self.expect_lines(outcome, None)
            self.expect_records(**what)

    def snapshot(self) -> dict:
        """All that is in runs, with its content."""
        files = {}
        if self.runs.is_dir():
            for path in self.runs.rglob("*"):
                name = str(path.relative_to(self.runs))
                files[name] = path.read_bytes() if path.is_file() else None
        return files

    def expect_records(self, runs=1, checkpoint=False, stages=True, partial=False, folder=None):
        """Whole records in so many run directories; stages and checkpoints where they must be."""
        found = [folder] if folder else [path for path in self.runs.glob("*") if path.is_dir()]
        self.expect(len(found) == runs, f"{len(found)} run directories instead of {runs}")
        for run_dir in found:
            for path in run_dir.rglob("*"):
                if "partial" in path.name and not partial:
                    self.expect(False, f"left behind: {path.name}")
            for kind in ("config", "stages"):
                reports = list(run_dir.glob(f"{kind}*.json"))
                if kind == "config" or stages:
                    self.expect(reports, f"no {kind}.json")
                for path in reports:
                    try:
                        json.loads(path.read_text())
                    except ValueError:
                        size = path.stat().st_size
                        self.expect(False, f"{path.name} of {size} bytes cannot be read")
            configs = len(list(run_dir.glob("config*.json")))
            reports = len([p for p in run_dir.glob("stages*.json") if "coll" not in p.name])
            if stages:
                self.expect(configs == reports, f"{configs} configs, but {reports} stages")
            events = list(run_dir.glob("events.*"))
            self.expect(events, "no events")
            for path in events:
                broken = broken_records(path)
                self.expect(not broken or partial, f"events: {broken}")
            path = run_dir / "checkpoint.pt"
            self.expect(path.exists() or not checkpoint, "no checkpoint.pt")
            if path.exists():
                fault = fault_of(path)
                self.expect(not fault, f"checkpoint.pt: {fault}")

    def end(self):
        for process in self.processes:
            process.kill()


def tail_of(outcome: Outcome) -> list[str]:
    """The last lines; of a process that hung, the innermost frames, which come first."""
    lines = outcome.lines()
    for i, line in enumerate(lines):
        if line.startswith("Fatal Python error: Aborted"):
            return lines[max(i - 2, 0) : i] + lines[i + 1 : i + 27]
    return lines[-6:]


def is_tyro(text: str, names: str | None) -> bool:
    """Whether it is tyro's own answer, a few lines, to a flag that it cannot parse."""
    short = len(text.strip().splitlines()) < 16 and "Traceback" not in text
    its_own = "For full helptext, " in text
    return bool(short and its_own and names is not None and re.search(names, text, re.IGNORECASE))


def broken_records(path: Path) -> str:
    """What is wrong with a file of TensorBoard's, whose records have their length in front."""
    content = path.read_bytes()
    position = 0
    while position < len(content):
        if position + 12 > len(content):
            return "the last record has no header"
        (size,) = struct.unpack_from("<Q", content, position)
        position += 12 + size + 4
    return "" if position == len(content) else "the last record is cut off"


def fault_of(path: Path) -> str:
    """What is wrong with a checkpoint."""
    import torch

    def faults(value, name):
        if isinstance(value, dict):
            for key, each in value.items():
                yield from faults(each, f"{name}.{key}")
        elif isinstance(value, (list, tuple)):
            for i, each in enumerate(value):
                yield from faults(each, f"{name}.{i}")
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            bad = (~value.double().isfinite()).sum().item()
            if bad:
                yield f"{bad} numbers of {name} are not finite"

    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        return f"cannot be loaded: {str(error).splitlines()[0][:100]}"
    for part in ("agent", "optimizers", "replay", "statistics"):
        for fault in faults(found.get(part), part):
            return fault
    return ""


# Cases


CASES = {}


def case(name, scripts=lambda script: True, of=None):
    """Registers `function(lab, value)`, for each value of `of` if there are any."""

    def register(function):
        for value in of or [None]:
            full = name if value is None else f"{name} {value}"

            def call(lab, value=value):
                function(lab) if value is None else function(lab, value)

            CASES[full] = (scripts, call)
        return function

    return register


def takes_gym(script):
    return script.gym


def off_policy(script):
    return script.off_policy


# Flags


# Of these, 0 is a sensible value; of others that are numbers it is not, or may be either
ZERO_IS_FINE = "seed checkpoint_every eval_every learning_rate policy_lr q_lr gamma gae_lambda tau"
ZERO_IS_FINE += " ent_coef vf_coef exploration_noise policy_noise noise_clip max_staleness"
ZERO_IS_FINE += " learning_starts clip_coef alpha target_kl"


@case("flags: values")
def flag_values(lab):
    """Every flag that is a number, with numbers that make no sense, in one process."""

    def check():
        spec = importlib.util.spec_from_file_location("script", lab.script.path)
        module = sys.modules["script"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        report = io.StringIO()
        for field in fields(module.Args):
            kind = str(getattr(field.type, "__name__", field.type))
            if not re.search(r"\b(int|float)\b", kind):
                continue
            bad = ["-1", "-0.5", "nan", "inf", "-inf", "1e400", "1e13", "many", "", "1e-400x"]
            bad += ["0"] * (field.name not in ZERO_IS_FINE.split())
            bad += ["1.5", "1.0000001"] * (field.name in ("gamma", "gae_lambda", "tau"))
            bad += ["0.5"] * ("int" in kind)
            for value in bad:
                flag = field.name.replace("_", "-")
                sys.argv = [str(lab.script.path), *lab.script.flags(**{field.name: value})]
                said, code = io.StringIO(), None
                try:
                    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                        module.parse_args(module.Args)
                except SystemExit as end:
                    code = end.code
                except Exception as error:
                    code = f"Traceback: {type(error).__name__}"
                text = code if isinstance(code, str) else said.getvalue()
                good = code is not None and code != 0 and flag in text.replace("_", "-")
                good &= is_tyro(text, "") or len(text.splitlines()) == 1
                if not good or "Traceback" in text:
                    text = " ".join(text.split())[:150] or "accepted"
                    print(f"--{flag} {value!r}: {text}", file=report)
        sys.stderr.write(report.getvalue())
        os._exit(0)

    outcome = Process(lab, [], before=check).wait()
    lines = outcome.lines()
    for line in lines[:8]:
        lab.expect(False, line)
    lab.expect(len(lines) <= 8, f"and {len(lines) - 8} other values")
    lab.expect(outcome.status == 0, f"exit status {outcome.status}", outcome)


FLAGS = {
    "unknown": ({"no_such_flag": 1}, "no-such-flag"),
    "steps of no rollout": ({"total_timesteps": 1, "num_envs": 4}, "total-timesteps"),
    "environments in text": ({"num_envs": "two"}, "num-envs"),
    "stopwatch": ({"stopwatch": "maybe"}, "stopwatch"),
    "seed of 2**40": ({"seed": 2**40}, "seed"),
}


@case("flags:", of=FLAGS)
def flag_errors(lab, which):
    flags, names = FLAGS[which]
    if which == "seed of 2**40":  # may be fine
        outcome = lab.run(**flags)
        if outcome.status == 0:
            return lab.finished(outcome)
        return lab.refused(outcome, names)
    lab.refused(lab.run(**flags), names)


@case("flags: minibatches that do not divide", scripts=lambda script: not script.off_policy)
def minibatches(lab):
    lab.refused(lab.run(num_minibatches=7), "num-minibatches")


@case("flags: no step to learn in", off_policy)
def too_short(lab):
    lab.refused(lab.run(learning_starts=1000), "total-timesteps|learning-starts")


@case("env-id", of=["HalfCheetah-v55", "HalfCheeta-v5", "no_such_module:X-v0", "''", "../x", "ü"])
def unknown_environment(lab, name):
    if lab.script.gym and name == "no_such_module:X-v0":
        lab.refused(lab.run(env_id="hostile_envs:NoSuch-v0"), "env-id")
    lab.refused(lab.run(env_id=name.strip("'")), "env-id")


SPACES = "Square ZeroDim DictObs MatrixObs ZeroDimObs DiscreteObs DiscreteActions WholeActions"
SPACES += " ManyDiscreteActions Unbounded HalfBounded"


@case("space", takes_gym, of=SPACES.split())
def spaces(lab, name):
    """Either it is refused, or it works."""
    outcome = lab.run(env_id=f"hostile_envs:{name}-v0", save_model=True)
    if outcome.status == 0:
        lab.finished(outcome, checkpoint=True)
    else:
        lab.refused(outcome, "env-id")


SIZES = {}
for power in (8, 12):
    for flag in ("buffer_size", "batch_size", "num_steps", "num_envs"):
        SIZES[f"{flag} of 10**{power}"] = (flag, 10**power)


def has_flag(flag):
    return lambda script: f"\n    {flag}:" in script.path.read_text()


def size_case(lab, flag, size):
    flags = {"total_timesteps": 10**12, flag: size}
    if lab.script.gym:
        flags["env_id"] = "hostile_envs:Large-v0"
    if lab.script.cartpole or lab.script.worlds:  # whose observations are small
        if flag != "num_steps":
            flags.setdefault("num_steps", 1024)
        if flag != "num_envs":
            flags.setdefault("num_envs", 64)
    if lab.script.off_policy:
        flags.pop("num_steps", None)
        if flag == "batch_size":
            flags["learning_starts"] = 20
    outcome = lab.run({"before": limit_memory}, SILENCE, **flags)
    # so many steps may be more than a run can have
    lab.refused(outcome, f"--{flag.replace('_', '-')}|--total-timesteps")


def limit_memory():
    """Others use this machine, too: what asks for half of it, or for 8 GiB, gets an error."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    most = min(half, 2**33)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


for size_name, (size_flag, size_value) in SIZES.items():

    @case(f"size: {size_name}", has_flag(size_flag))
    def sizes(lab, flag=size_flag, size=size_value):
        size_case(lab, flag, size)


NAMES = {
    "slashes": "a/b/../../../c",
    "spaces": "a b  c ",
    "umlauts": "größe-名前",
    "300 characters": "x" * 300,
    "dots": "..",
    "empty": "",
    "new line": "a\nb",
    "a surrogate": "\udcff",
    "brackets": "[a-b]*?",
}


@case("exp-name: with", of=NAMES)
def experiment_names(lab, which):
    outcome = lab.run(exp_name=NAMES[which], save_model=True)
    if outcome.status == 0:
        lab.finished(outcome, checkpoint=True)
        of_mujoco = "MUJOCO_LOG.TXT"  # it writes there what it warns of
        beside = [path.name for path in lab.place.iterdir()]
        beside = [name for name in beside if name not in ("runs", of_mujoco)]
        lab.expect(not beside, f"beside runs: {beside}")
    else:
        lab.refused(outcome, "exp-name|File name too long")


# Resuming


@case("resume: an empty name")
def resume_nothing(lab):
    lab.refused(lab.run(resume=""), "resume")


@case("resume: a folder that is not there")
def resume_missing(lab):
    lab.refused(lab.run(resume="runs/none"), "resume")
    lab.expect(not lab.runs.exists(), "runs was made")


DAMAGES = "truncated", "shorter by a byte", "empty", "random", "text", "zeros", "directory"
DAMAGES += "a number", "a list", "without a part", "unreadable link", "another version"


@case("resume: a checkpoint that is", of=DAMAGES)
def resume_damaged(lab, how):
    import torch

    run_dir = lab.base()
    path = run_dir / "checkpoint.pt"
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "shorter by a byte":
        path.write_bytes(content[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "random":
        path.write_bytes(random.Random(0).randbytes(5000))
    elif how == "text":
        path.write_text("hello\n" * 100)
    elif how == "zeros":
        path.write_bytes(bytes(len(content)))
    elif how == "directory":
        path.unlink()
        path.mkdir()
    elif how == "a number":
        torch.save(5, path)
    elif how == "a list":
        torch.save([torch.zeros(3)], path)
    elif how == "unreadable link":
        path.unlink()
        path.symlink_to("checkpoint.pt")
    else:
        found = torch.load(path, weights_only=True)
        if how == "without a part":
            del found["optimizers"]
        else:
            found["args"].pop("seed")
            found["args"]["seeds"] = 1
        torch.save(found, path)
    before = lab.snapshot()
    lab.refused(lab.run(resume="runs/base", total_timesteps=128), "resume", before)


@case("resume: damaged in the middle")
def resume_flipped(lab):
    """Bytes of a tensor, which no format notices, may be accepted; all else is one line."""
    path = lab.base() / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = random.Random(0).randbytes(64)
    path.write_bytes(content)
    before = lab.snapshot()
    outcome = lab.run(resume="runs/base", total_timesteps=128)
    lab.expect("Traceback" not in outcome.text, "traceback", outcome)
    if outcome.status != 0 and before == lab.snapshot():
        lab.refused(outcome, "resume", before)


@case("resume: a run of another script")
def resume_other_script(lab):
    import torch

    path = lab.base() / "checkpoint.pt"
    found = torch.load(path, weights_only=True)
    name = lab.script.path.name
    twin = name.replace("_torchcompile", "") if lab.script.variant else name[:-3] + "_torch.py"
    found["made_by"] = twin
    torch.save(found, path)
    before = lab.snapshot()
    lab.refused(lab.run(resume="runs/base", total_timesteps=128), "resume", before)


@case("resume: another environment", lambda script: not script.cartpole, of=["same", "other"])
def resume_other_environment(lab, shapes):
    lab.base()
    before = lab.snapshot()
    if lab.script.gym:
        name = "hostile_envs:Same-v0" if shapes == "same" else "hostile_envs:Wide-v0"
    elif lab.script.worlds:
        name = "Walker2d-v5" if shapes == "same" else "Hopper-v5"
    else:
        name = "Tennis-v5" if shapes == "same" else "Pong-v5"
    outcome = lab.run(resume="runs/base", env_id=name, total_timesteps=128)
    lab.refused(outcome, "env-id|resume", before)


@case("resume: a run that is over")
def resume_over(lab):
    lab.base()
    before = lab.snapshot()
    outcome = lab.run(resume="runs/base", total_timesteps=64)
    lab.refused(outcome, "total-timesteps|resume", before)


@case("resume: a run that is at work")
def resume_at_work(lab):
    first = lab.endless()
    (run_dir,) = lab.runs.iterdir()
    flags = {"resume": f"runs/{run_dir.name}", "checkpoint_every": 64, "total_timesteps": 10**8}
    second = lab.run(limit=SILENCE, **flags)
    if lab.ended(second):
        lab.expect_failure(second)
        lab.expect_lines(second, "resume")
    lab.expect(first.poll() is None, "the first run has ended")
    configs = [path.name for path in run_dir.glob("config*.json")]
    lab.expect(configs == ["config.json"], f"two runs have written {configs}")
    first.signal(signal.SIGINT)
    lab.stopped(first.wait(), "interrupted", checkpoint=True)


@case("resume: as it should be")
def resume_good(lab):
    run_dir = lab.base()
    outcome = lab.run(resume="runs/base", total_timesteps=128, save_model=True)
    lab.finished(outcome, checkpoint=True)
    lab.expect((run_dir / "config_64.json").exists(), "config_64.json is not there", outcome)


# Environments


def name_of(fault):
    return f"hostile_envs:{fault}-v0"


FAULTS = "NanFirst NanFirstLater NanAtOnce InfiniteObs HugeReward MinusHugeReward NanReward"
FAULTS += " InfiniteReward"


@case("not finite:", takes_gym, of=FAULTS.split())
def not_finite(lab, fault):
    flags = {"env_id": name_of(fault), "total_timesteps": 256, "checkpoint_every": 16}
    outcome = lab.run(**flags, save_model=True)
    if fault == "NanAtOnce" and not lab.runs.exists():
        lab.refused(outcome, "finite")
    else:
        lab.stopped(outcome, "finite")


@case("not finite, while exploring:", lambda s: s.gym and s.off_policy, of=FAULTS.split())
def not_finite_exploring(lab, fault):
    flags = {"env_id": name_of(fault), "total_timesteps": 256, "checkpoint_every": 16}
    outcome = lab.run(**flags, save_model=True, learning_starts=250)
    if fault == "NanAtOnce" and not lab.runs.exists():
        lab.refused(outcome, "finite")
    else:
        lab.stopped(outcome, "finite")


@case("environment ends the process:", takes_gym, of=["Exits", "ExitsInReset"])
def environment_exits(lab, fault):
    outcome = lab.run(env_id=name_of(fault), total_timesteps=256)
    lab.stopped(outcome, "environment|exit|died|interrupted")


# Ends


@case("Ctrl-C")
def interrupt(lab):
    process = lab.endless()
    process.signal_group(signal.SIGINT)
    lab.stopped(process.wait(), "interrupted", checkpoint=True)


@case("Ctrl-C before the checkpoint")
def interrupt_early(lab):
    process = lab.start(total_timesteps=10**8)
    wait_until(lambda: list(lab.runs.glob("*/config.json")), LIMIT)
    process.signal_group(signal.SIGINT)
    outcome = process.wait()
    if outcome.status != -signal.SIGINT:  # before the run has begun, there is nothing to say
        lab.stopped(outcome, "interrupted")


@case("Ctrl-C twice,", of=["0.02 s apart", "0.1 s apart", "0.3 s apart", "at once"])
def interrupt_twice(lab, apart):
    process = lab.endless()
    process.signal_group(signal.SIGINT)
    time.sleep(0 if apart == "at once" else float(apart.split()[0]))
    process.signal_group(signal.SIGINT)
    lab.stopped(process.wait(), "interrupted", checkpoint=True)


@case("Ctrl-C ten times")
def interrupt_often(lab):
    process = lab.endless()
    for _ in range(10):
        process.signal_group(signal.SIGINT)
        time.sleep(0.03)
    lab.stopped(process.wait(), "interrupted", checkpoint=True)


@case("Ctrl-C after", of=["0.5 s", "1 s", "2 s"])
def interrupt_imports(lab, seconds):
    """Of the start of Python, most of which are imports."""
    process = lab.start({"own_python": True}, total_timesteps=10**8)
    time.sleep(float(seconds.split()[0]))
    process.signal_group(signal.SIGINT)
    outcome = process.wait()
    if lab.ended(outcome):
        lab.expect(outcome.status != 0, "exit status 0", outcome)
        lines = outcome.lines()
        lab.expect("Traceback" not in outcome.text, f"traceback in {len(lines)} lines", outcome)
        lab.expect(len(lines) <= 1, f"{len(lines)} lines", outcome)
    if lab.runs.exists():
        lab.expect_records()


@contextlib.contextmanager
def reader(lab, *command):
    """What reads both streams of a script -> a descriptor to write to, a process group, a log."""
    inside, outside = os.pipe()
    log = lab.folder / "read.txt"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdin=inside, stdout=file, process_group=0)
    os.close(inside)
    try:
        yield outside, process, log
    finally:
        with contextlib.suppress(OSError):
            os.close(outside)
        process.kill()
        process.wait()


@case("Ctrl-C under 2>&1 | tee log")
def interrupt_pipe(lab):
    """The terminal sends it to tee as well."""
    with reader(lab, "tee", str(lab.folder / "log")) as (out, tee, log):
        process = lab.endless({"out": out, "group": tee.pid})
        os.close(out)
        os.killpg(tee.pid, signal.SIGINT)
        outcome = process.wait()
        outcome.text = log.read_text()
    if lab.ended(outcome):
        lab.expect(outcome.status not in (0, None), f"exit status {outcome.status}")
        lab.expect("Traceback" not in outcome.text, "traceback", outcome)
        lab.expect_records(checkpoint=True)


@case("2>&1 | head -n 1")
def under_head(lab):
    with reader(lab, "head", "-n", "1") as (out, head, log):
        process = lab.start({"out": out}, total_timesteps=1024, save_model=True)
        os.close(out)
        outcome = process.wait()
        outcome.text = log.read_text()
    if lab.ended(outcome):
        lab.expect("Traceback" not in outcome.text, "traceback", outcome)
        if lab.runs.exists():  # it has begun before its reader went
            lab.expect_records()


@case("2>&1 | head -c 1, endless")
def under_dead_reader(lab):
    """Where nobody reads any more, it goes on or ends; Ctrl-C ends it, with its records."""
    with reader(lab, "head", "-c", "1") as (out, head, log):
        process = lab.start({"out": out}, total_timesteps=10**8, checkpoint_every=64)
        os.close(out)
        head.wait()
        wait_until(lambda: process.poll() is not None, 2)
        process.signal_group(signal.SIGINT)
        outcome = process.wait()
    if lab.ended(outcome):
        lab.expect(outcome.status != 0, "exit status 0")
        if lab.runs.exists():  # it has begun before its reader went
            lab.expect_records()


@case("signal", of=["SIGTERM", "SIGHUP", "SIGTERM to the group", "SIGTERM, then SIGINT"])
def signals(lab, which):
    process = lab.endless()
    name = which.split()[0].strip(",")
    number = getattr(signal, name)
    if "group" in which:
        process.signal_group(number)
    else:
        process.signal(number)
    if "then" in which:
        time.sleep(0.05)
        process.signal(signal.SIGINT)
    # a worker that gets the signal may be noticed first
    lab.stopped(process.wait(), "interrupted|died", checkpoint=True)


@case("kill -9 and resume")
def killed(lab):
    process = lab.endless()
    process.signal(signal.SIGKILL)
    process.wait()
    (run_dir,) = lab.runs.iterdir()
    fault = fault_of(run_dir / "checkpoint.pt")
    lab.expect(not fault, f"checkpoint.pt: {fault}")
    import torch

    step = torch.load(run_dir / "checkpoint.pt", weights_only=True)["global_step"]
    flags = {"resume": f"runs/{run_dir.name}", "total_timesteps": step + 64}
    outcome = lab.run(**flags, save_model=True)
    if lab.ended(outcome):
        lab.expect(outcome.status == 0, f"exit status {outcome.status}", outcome)
        lab.expect_lines(outcome, None)
        lab.expect_records(checkpoint=True, stages=False, partial=True)
        lab.expect(list(run_dir.glob("stages_*.json")), "no stages of the second part")


@case("kill -9 of the", lambda script: script.workers, of=["collector", "evaluator"])
def worker_killed(lab, whom):
    process = lab.endless(eval_every=64, eval_episodes=1)

    def workers():
        found = []
        for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
            for pid in map(int, task.read_text().split()):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return sorted(found)

    wait_until(lambda: len(workers()) == 2, 10)
    os.kill(workers()[whom == "evaluator"], signal.SIGKILL)
    lab.stopped(process.wait(), whom, checkpoint=True)


@case("kill -9 of rank", lambda script: script.processes, of=["0", "1"])
def rank_killed(lab, rank):
    """torchrun has a report and a traceback of its own, so that only the ranks' lines count."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = {"total_timesteps": 10**8, "checkpoint_every": 64, "num_envs": 4}
    command += [lab.script.path, *lab.script.flags(**flags)]
    process = Process(lab, command, own_python=True, env={"OMP_NUM_THREADS": "1"})

    def begun():
        return list(lab.runs.glob("*/checkpoint.pt")) or process.poll() is not None

    wait_until(begun, LIMIT)
    ranks = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environ = path.read_bytes().split(b"\0")
            parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == process.pid:
                for word in environ:
                    if word.startswith(b"RANK="):
                        ranks[word[5:].decode()] = int(path.parent.name)
    if set(ranks) != {"0", "1"}:
        raise RuntimeError(f"ranks {ranks}: {process.log.read_text()[-500:]}")
    os.kill(ranks[rank], signal.SIGKILL)
    outcome = process.wait()
    for pid in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if lab.ended(outcome):
        lab.expect(outcome.status != 0, "exit status 0")
        frames = re.findall(r'File ".*leanrl/ppo\w+\.py", line.*', outcome.text)
        lab.expect(not frames, f"a traceback of a rank: {frames[-1:]}")
        said = [line for line in outcome.lines() if "rank" in line and "gone" in line]
        lab.expect(said, "no rank says that the other one is gone", outcome)
        lab.expect_records(checkpoint=True, stages=rank == "1", partial=rank == "0")


@case("two runs in the same second")
def same_second(lab):
    time.sleep(1.0 - time.time() % 1.0)
    processes = [lab.start(save_model=True) for _ in range(2)]
    outcomes = [process.wait() for process in processes]
    for outcome in outcomes:
        lab.finished(outcome, runs=2, checkpoint=True)


# Files


@case("closed:", of=["stdin", "stdout", "stderr", "all"])
def closed_streams(lab, which):
    names = ["stdin", "stdout", "stderr"] if which == "all" else [which]

    def close():
        for name in names:
            os.close(("stdin", "stdout", "stderr").index(name))
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)

    lab.finished(lab.run({"before": close}, save_model=True), checkpoint=True)


@case("runs is", of=["a file", "read-only", "a link to nowhere"])
def bad_runs(lab, which):
    if which == "a file":
        lab.runs.write_text("mine")
        outcome = lab.run(limit=SILENCE)
        lab.expect(lab.runs.read_text() == "mine", "the file has changed")
    elif which == "read-only":
        with mounted(lab.runs, "ro,size=64k"):
            outcome = lab.run(limit=SILENCE)
    else:
        lab.runs.symlink_to("/nowhere/at/all")
        outcome = lab.run(limit=SILENCE)
    if lab.ended(outcome):
        lab.expect_failure(outcome)
        lab.expect_lines(outcome, "runs")


@contextlib.contextmanager
def mounted(path: Path, options: str):
    """A file system of its own, which only root can mount."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "hostile", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        raise pytest.skip.Exception("only root can mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> None:
    """Leaves no byte on the file system."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        for size in (4096, 512, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


@case("full disk:", of=["at the start", "at a checkpoint", "before Ctrl-C", "at the end"])
def full_disk(lab, when):
    with mounted(lab.runs, "size=256m"):
        if when == "at the start":
            fill(lab.runs / "filler")
            process = lab.start(total_timesteps=256)
        elif when == "at a checkpoint":
            process = lab.endless()
            fill(lab.runs / "filler")
        else:
            total = 10**8 if when == "before Ctrl-C" else 6400
            process = lab.start(total_timesteps=total)
            wait_until(lambda: list(lab.runs.glob("*/events*")), LIMIT)
            fill(lab.runs / "filler")
            if when == "before Ctrl-C":
                process.signal_group(signal.SIGINT)
        outcome = process.wait()
        if lab.ended(outcome):
            lab.expect_failure(outcome)
            if lab.script.name.find("async") < 0 or len(outcome.lines()) != 2:  # one each
                lab.expect_lines(outcome, "No space|full")
        for path in lab.runs.rglob("*"):
            lab.expect("partial" not in path.name, f"left behind: {path.name}")
            if path.suffix == ".json":
                try:
                    json.loads(path.read_text())
                except ValueError:
                    size = path.stat().st_size
                    lab.expect(False, f"{path.name} of {size} bytes cannot be read")
            if path.name == "checkpoint.pt":
                lab.expect(not fault_of(path), f"checkpoint.pt: {fault_of(path)}")


@case("video without OpenGL:", lambda s: s.gym or s.worlds, of=["none", "osmesa", "nonsense"])
def no_opengl(lab, backend):
    if lab.script.worlds and backend != "none":
        pytest.skip("MuJoCo's own import fails, whatever the script")
    if backend == "osmesa" and ctypes.util.find_library("OSMesa"):
        pytest.skip("OSMesa is there")
    env = {"DISPLAY": None, "WAYLAND_DISPLAY": None, "PYOPENGL_PLATFORM": None}
    env["MUJOCO_GL"] = None if backend == "none" else backend
    how = {"own_python": True, "env": env}
    outcome = lab.run(how, capture_video=True, env_id="HalfCheetah-v5")
    lab.refused(outcome, "capture-video|MUJOCO_GL|glGetError")


# The program


def examine(script: Script, names: list[str], folder: Path, quiet: bool) -> list:
    """Runs these cases of a script; prints a row of the table for each, or for those at fault."""
    rows = []
    for name in names:
        lab = Lab(script, folder / f"{len(rows)}")
        begin = time.monotonic()
        verdict = None
        try:
            CASES[name][1](lab)
        except pytest.skip.Exception as reason:
            verdict = f"skipped: {reason}"
        except Exception as error:
            first, *others = str(error).splitlines() or [""]
            what = f"the case itself: {type(error).__name__}: {first}"
            lab.wrong.append((what, [line[:200] for line in others[-8:]]))
        lab.end()
        if lab.wrong:
            verdict = "; ".join(what for what, _ in lab.wrong)
        row = f"{script.name:42} {name:38} {verdict or 'ok'}"
        row += f"  ({time.monotonic() - begin:.1f} s)"
        tails = []
        for _, tail in lab.wrong:
            tails += [f"        | {line}" for line in tail if f"        | {line}" not in tails]
        if lab.wrong or not quiet:
            print("\n".join([row, *tails]), flush=True)
        rows.append((script.name, name, bool(lab.wrong), verdict or "ok"))
        shutil.rmtree(lab.folder, ignore_errors=True)
    return rows


def prepare() -> None:
    """Imports what all scripts need, and does not compute: threads would not survive a fork."""
    os.environ["PYTHONPATH"] = str(TESTS)  # where gym.make finds hostile_envs
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(TESTS))
    import gymnasium  # noqa: F401
    import torch
    import torch._dynamo  # which optimizers import when they are made
    import torch.distributed
    import torch.utils.tensorboard
    import tqdm  # noqa: F401
    import tyro  # noqa: F401

    for name in ("envpool", "mujoco", "gymnasium.envs.mujoco", "multiprocessing.spawn"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a fork would copy all that it looks at


def matches(name: str, globs: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, glob) for glob in globs)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description="Start every script with every hostile case.")
    parser.add_argument("--only", metavar="GLOB", nargs="+", default="*", help="of 'SCRIPT CASE'")
    parser.add_argument("--jobs", type=int, default=1, help="scripts examined side by side")
    parser.add_argument("--quiet", action="store_true", help="print what is wrong and no more")
    parser.add_argument("--list", action="store_true", help="print the cases and do nothing")
    args = parser.parse_args(arguments)
    work = []
    for script in find_scripts():
        names = [name for name, (scripts, _) in CASES.items() if scripts(script)]
        names = [name for name in names if matches(f"{script.name} {name}", args.only)]
        if names:
            work.append((script, names))
    if args.list:
        for script, names in work:
            for name in names:
                print(f"{script.name:42} {name}")
        return 0
    prepare()
    work.sort(key=lambda each: -each[0].workers)  # whose processes start anew: the longest first
    queue = iter(work)
    running, results = {}, []
    folder = tempfile.mkdtemp(prefix="hostile-")  # TemporaryDirectory's end would run in forks, too
    try:
        while True:
            while len(running) < max(args.jobs, 1) and (item := next(queue, None)):
                script, names = item
                place = Path(folder, script.name)
                place.mkdir()
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    rows = examine(script, names, place, args.quiet)
                    Path(folder, f"{script.name}.json").write_text(json.dumps(rows))
                    os._exit(0)
                running[pid] = script
            if not running:
                break
            pid, status = os.wait()
            script = running.pop(pid)
            path = Path(folder, f"{script.name}.json")
            if path.exists():
                results += json.loads(path.read_text())
            else:
                results.append((script.name, "", True, f"ended with status {status}"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = [row for row in results if row[2]]
    skipped = [row for row in results if row[3].startswith("skipped")]
    print(f"\n{len(results)} cases, {len(wrong)} wrong, {len(skipped)} skipped")
    for name in CASES:
        of = [row[0] for row in wrong if row[1] == name]
        if of:
            print(f"  {name:40} {len(of):3}: {', '.join(of)}")
    return int(bool(wrong))


@pytest.mark.slow
@pytest.mark.parametrize("script", [script.name for script in find_scripts()])
def test_hostile_cases_end_in_one_line_or_well(script):
    command = [sys.executable, __file__, "--quiet", "--only", f"{script} *"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


if __name__ == "__main__":
    sys.exit(main())
