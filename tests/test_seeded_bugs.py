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


def test_no_entry_is_stale():
    lines = []
    for bug in seeded_bugs.BUGS:
        if why := seeded_bugs.stale(bug):
            lines.append(f"{seeded_bugs.shown(bug)}: {why}")
    assert not lines, "\n".join(lines)
    assert len({bug[:3] for bug in seeded_bugs.BUGS}) == len(seeded_bugs.BUGS) >= 60


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_command_tells_what_is_caught(tmp_path):
    """In a repository of two scripts that share a text; it leaves every file as it was."""
    for path, text in {
        "leanrl/counting.py": COUNTING,
        "leanrl/copied.py": COUNTING,
        "tests/test_counting.py": TESTS,
        "tests/seeded_bugs.py": (ROOT / "tests/seeded_bugs.py").read_text(),
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*.py")}
    there, test = "leanrl/co*.py", "test_counting.py::test_"
    expected = {  # files, old, new, test: kind, why
        (there, "2 * x", "x", f"{test}double"): ("caught", f"{test}double: assert 3 == 6"),
        (there, "x / 2", "x / 3", f"{test}half"): ("not caught", "1 tests pass"),
        (there, "x / 2", "x / 4", f"{test}elsewhere"): ("not caught", "1 tests were skipped"),
        (there, "x / 2", "x / 5", f"{test}broken"): ("not caught", f"tests/{test}broken fails wit"),
        (there, "x / 2", "(", f"{test}half"): ("not caught", "tests/test_counting.py cannot be"),
        (there, "x", "y", f"{test}half"): ("stale", "copied.py has the old text 4 times, not 1"),
        (there, "gone", "", f"{test}half"): ("stale", "copied.py has the old text 0 times, not"),
        ("gone.py", "x / 2", "", f"{test}half"): ("stale", "no file is called gone.py"),
        (there, "x / 2", "1", f"{test}gone"): ("stale", f"there is no test {test}gone"),
        (there, "x / 2", "x / 2", f"{test}half"): ("stale", "old and new are the same"),
        (there, "x / 2", "2", "test_shared.py::test_x"): ("stale", "test_shared.py::test_x comp"),
    }

    def call(bugs, *words):
        """Exit status, {files and change: (kind, why)} and the last line."""
        some = [dict(zip(("files", "old", "new", "test"), bug, strict=True)) for bug in bugs]
        (tmp_path / "bugs.json").write_text(json.dumps(some))
        code = "import sys; sys.path.insert(0, 'tests'); import seeded_bugs\n"
        code += "seeded_bugs.IMPORTS = 'pytest'; sys.exit(seeded_bugs.main())"
        command = [sys.executable, "-B", "-c", code, "--table", "bugs.json", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert not done.stderr
        *lines, last = done.stdout.splitlines()
        found = {}
        for head, why in zip(lines, lines[1:], strict=False):
            if not head.startswith((" ", "without")):
                found[head[12:]] = head[:12].strip(), why.strip()
        return done.returncode, found, last

    status, found, last = call(expected, "--jobs", "4")
    assert status == 1 and last == "1 caught, 4 not caught, 6 stale of 11"
    for (files, old, new, _), (kind, why) in expected.items():
        said = found.pop(f"{files}: {old!r} -> {new!r}")
        assert said[0] == kind and said[1].startswith(why), said
    assert not found
    assert call(list(expected)[:1])[0] == 0
    status, found, _ = call(list(expected)[1:3], "--only", "*x / 3", "--all-tests")
    assert status == 0 and len(found) == 1  # test_broken fails, which is one of all tests
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*.py")} == before


@pytest.mark.slow
def test_every_bug_is_caught():
    command = [sys.executable, "tests/seeded_bugs.py", "--jobs", str(len(os.sched_getaffinity(0)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
