"""What the tests of sweeps share: a repository with a script that says what it was given."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from conftest import ROOT
from helpers import PATIENCE

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
flags = dict(w[2:].split("=", 1) if "=" in w else (w[2:], True) for w in sys.argv[1:])
signal.signal(signal.SIGTERM, signal.default_int_handler)
print("started", flush=True)
if "dies" in flags:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(float(flags.get("sleep", 0)))
while "until" in flags and not Path(flags["until"]).exists():
    time.sleep(0.02)
if "fails" in flags and not Path(flags["fails"]).exists():
    raise SystemExit("what went wrong")
names = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "RAY_AUTH_TOKEN", "PYTHONPATH"
keep = {k: v for k, v in os.environ.items() if k in names}
Path("runs/the_run").mkdir(parents=True)
Path("runs/the_run/found.json").write_text(json.dumps({"flags": flags, "environment": keep}))
"""


def make_place(tmp_path: Path) -> Path:
    """A repository with sweep.py and the stand-in."""
    root = tmp_path / "a place"
    (root / "leanrl").mkdir(parents=True)
    shutil.copy(ROOT / "leanrl/sweep.py", root / "leanrl")
    (root / "leanrl/x.py").write_text(STAND_IN)
    return root


def write_sweep(root: Path, params: dict, name="study") -> Path:
    path = root / f"{name}.py"
    path.write_text(f"script = 'leanrl/x.py'\nparams = {params}\n")
    return path


def start(*words, **options) -> subprocess.Popen:
    """`sweep.py WORDS` in the current folder."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "leanrl/sweep.py", *map(str, words)]
    return subprocess.Popen(command, **pipes | options)


def call(*words, check: int, stdin="", **options) -> subprocess.CompletedProcess:
    """It again, with the exit status that it must have."""
    process = start(*words, stdin=subprocess.PIPE, **options)
    out, error = process.communicate(stdin, timeout=PATIENCE)
    assert "Traceback" not in error, error
    assert process.returncode == check, out + error
    return subprocess.CompletedProcess(words, check, out, error)


def found_in(root: Path, group="study") -> dict:
    """{id: what the stand-in wrote}"""
    return {
        path.parts[-4]: json.loads(path.read_text())
        for path in (root / "runs" / group).glob("*/runs/the_run/found.json")
    }


def states(root: Path, group="study") -> list[str]:
    files = (root / "runs" / group).glob("*/status.json")
    return sorted(json.loads(path.read_text())["state"] for path in files)


def attempts(root: Path, group="study") -> list[Path]:
    """The logs of former attempts."""
    return sorted((root / "runs" / group).glob("*/attempts/*/stdout.log"))


def alive(root: Path) -> list[int]:
    """Processes of runs: each works in its variant's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            where = Path(os.readlink(path / "cwd"))
            # not a fork that has yet to become the run
            is_run = b"x.py" in (path / "cmdline").read_bytes()
            if is_run and where.is_relative_to(root / "runs"):
                found.append(int(path.name))
    return found
