"""The table of seeded bugs describes the scripts as they are; with --slow all of them are tried."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import seeded_bugs
from conftest import ROOT

COUNTING = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TESTS = """
import pytest
from leanrl import counting

def test_double():
    assert counting.double(3) == 6

def test_half():
    assert counting.half(0) == 0

def test_elsewhere():
    pytest.skip("not here")

def test_broken():
    assert False
"""
THERE = "leanrl/co*.py"
VERDICTS = [  # files, old, new, test, verdict, why
    (THERE, "2 * x", "x", "double", "caught", "test_counting.py::test_double: assert 3 == 6"),
    (THERE, "x / 2", "x / 3", "half", "not caught", "1 passed"),
    (THERE, "x / 2", "x / 4", "elsewhere", "not caught", "1 skipped"),
    (THERE, "x / 2", "x / 5", "broken", "not caught", "without a bug, test_counting.py::test_br"),
    (THERE, "x / 2", "(", "half", "not caught", "test_counting.py cannot be imported"),
    (THERE, "x", "y", "half", "stale", "copied.py has the old text 4 times, not 1"),
    (THERE, "gone", "", "half", "stale", "copied.py has the old text 0 times, not 1"),
    ("gone.py", "x / 2", "", "half", "stale", "no file is called gone.py"),
    (THERE, "x / 2", "1", "gone", "stale", "there is no test test_counting.py::test_gone"),
    (THERE, "x / 2", "x / 2", "half", "stale", "old and new are the same"),
]


def test_no_entry_is_stale():
    lines = [f"{bug}: {why}" for bug in seeded_bugs.read_table() if (why := seeded_bugs.stale(bug))]
    assert not lines, "\n".join(lines)


@pytest.fixture
def repository(tmp_path):
    """Two scripts that share a text, and their tests."""
    for path, text in {
        "leanrl/counting.py": COUNTING,
        "leanrl/copied.py": COUNTING,
        "tests/test_counting.py": TESTS,
        "tests/seeded_bugs.py": (ROOT / "tests/seeded_bugs.py").read_text(),
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_verdicts(repository):
    before = {path: path.read_bytes() for path in repository.glob("*/*.py")}
    table = [
        {"files": files, "old": old, "new": new, "test": f"test_counting.py::test_{test}"}
        for files, old, new, test, *_ in VERDICTS
    ]
    (repository / "bugs.json").write_text(json.dumps(table))
    code = "import sys; sys.path.insert(0, 'tests'); import seeded_bugs\n"
    code += "seeded_bugs.IMPORTS = 'pytest'; sys.exit(seeded_bugs.main())"
    command = [sys.executable, "-B", "-c", code, "--table", "bugs.json", "--jobs", "4"]
    how = {"cwd": repository, "capture_output": True, "text": True}

    done = subprocess.run(command, **how)
    assert not done.stderr and done.returncode == 1
    for files, old, new, _, verdict, why in VERDICTS:
        assert f"{verdict:10}  {files}: {old!r} -> {new!r}\n{'':12}{why}" in done.stdout
    assert done.stdout.endswith("\n1 caught, 4 not caught, 5 stale of 10\n")

    done = subprocess.run([*command, "--only", "2 [*] x"], **how)
    assert done.returncode == 0
    assert done.stdout.endswith("\n1 caught, 0 not caught, 0 stale of 1\n")
    assert {path: path.read_bytes() for path in repository.glob("*/*.py")} == before


@pytest.mark.slow
def test_all_bugs_are_caught():
    command = [sys.executable, "tests/seeded_bugs.py", "--jobs", str(len(os.sched_getaffinity(0)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
