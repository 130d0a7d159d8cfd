"""Do the tests still bite? Bugs that were put in on purpose, each with the test that must fail.

    python tests/seeded_bugs.py                      all of tests/seeded_bugs.toml
    python tests/seeded_bugs.py --jobs 2             two at a time
    python tests/seeded_bugs.py --only ppo_atari     those of files, tests or texts like *GLOB*
    python tests/seeded_bugs.py --table FILE         those of another table, TOML or JSON

Each bug is written into every file that shares its text, in a copy of the repository: that twins
differ cannot show it, only what the code does. First all named tests run without a bug, because a
test that fails anyway shows nothing. Then each bug has a process of its own, in which its test runs
until the first failure. A line says what came of it:

    caught       by that test, with the error
    not caught   the test passes, was skipped here, did not end, or the script cannot be imported
    stale        the old text is not found as often as said: whoever changed it mends the entry

The exit status is 0 if all are caught and 1 otherwise.
"""

import argparse
import fnmatch
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 600  # seconds per test, however busy the machine
IMPORTS = "gymnasium matplotlib.pyplot mujoco pytest tensordict.nn torch torch._dynamo"
IMPORTS += " torch.utils.tensorboard tqdm tyro"


class Bug(NamedTuple):
    """A change of `old` to `new` in all `files`, which `test` must notice."""

    files: str  # patterns below the repository, separated by spaces
    old: str
    new: str
    test: str  # pytest's name of it below tests/
    times: int = 1  # how often the old text stands in each of the files

    def paths(self, root: Path = ROOT) -> list[Path]:
        return [path for pattern in self.files.split() for path in sorted(root.glob(pattern))]

    def __str__(self):
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.files}: {old!r} -> {new!r}"


def read_table(path: Path = ROOT / "tests/seeded_bugs.toml") -> list[Bug]:
    text = path.read_text()
    entries = tomllib.loads(text)["bug"] if path.suffix == ".toml" else json.loads(text)
    return [Bug(**entry) for entry in entries]


def stale(bug: Bug) -> str | None:
    """Why the table does not describe the files any more, or None if it does."""
    if bug.old == bug.new:
        return "old and new are the same"
    if not bug.paths():
        return f"no file is called {bug.files}"
    for path in bug.paths():
        count = path.read_text().count(bug.old)
        if count != bug.times:
            return f"{path.name} has the old text {count} times, not {bug.times}"
    file, _, name = bug.test.partition("::")
    path = ROOT / "tests" / file
    definition = rf"^def {name.partition('[')[0]}\("
    if not path.is_file() or not re.search(definition, path.read_text(), re.MULTILINE):
        return f"there is no test {bug.test}"
    return None


def matches(bug: Bug, glob: str) -> bool:
    """Whether a file, a text or the test of `bug` does."""
    names = [str(path.relative_to(ROOT)) for path in bug.paths()]
    return any(fnmatch.fnmatchcase(text, glob) for text in (*names, *bug[1:4]))


def copy_of_the_repository(folder: Path) -> Path:
    """What git tracks or would track, as it is now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


class Attempt:
    """Tests at work on a copy of the repository, which has the bug if there is one."""

    def __init__(self, tests: list[str], bug: Bug | None = None):
        self.tests = tests
        self.bug = bug
        self.folder = Path(tempfile.mkdtemp(prefix="seeded_bug_")).resolve()
        self.copy = copy_of_the_repository(self.folder / "repository")
        for path in bug.paths(self.copy) if bug else ():
            path.write_text(path.read_text().replace(bug.old, bug.new))
        self.deadline = time.monotonic() + LIMIT * len(tests)
        sys.stdout.flush()
        self.pid = os.fork()  # this process has imported PyTorch, which takes as long as a test
        if self.pid == 0:
            self.run()

    def run(self) -> None:
        """In the new process."""
        status = 3
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            output = os.open(self.folder / "output.txt", os.O_CREAT | os.O_WRONLY)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.copy)
            os.environ["COLUMNS"] = "200"
            here = str(Path(__file__).resolve().parent)
            sys.path[:] = [path for path in sys.path if path not in (here, str(ROOT))]
            sys.argv = ["pytest"]
            options = ["-q", "-rfE", "-p", "no:cacheprovider", f"--basetemp={self.folder / 'tmp'}"]
            if self.bug:
                options.append("-x")
            status = importlib.import_module("pytest").main([*options, *self.tests])
        finally:
            sys.stdout.flush()
            os._exit(status)

    def ended(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() < self.deadline:
            return False
        self.status = os.waitstatus_to_exitcode(status) if pid else None
        self.output = (self.folder / "output.txt").read_text(errors="replace")
        self.clear()
        return True

    def clear(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # also what the tests have left
        shutil.rmtree(self.folder, ignore_errors=True)

    def failed(self) -> dict[str, str]:
        """{test: error} from pytest's summary; a file that cannot be imported counts as a test."""
        return dict(re.findall(r"^(?:FAILED|ERROR) tests/(.*?)(?: - (.*))?$", self.output, re.M))

    def verdict(self) -> tuple[str, str]:
        """(caught or not caught, by what or why not)."""
        for test, error in self.failed().items():
            if "::" not in test:
                return "not caught", f"{test} cannot be imported, which is no bug to seed"
            return "caught", f"{test}: {error}"
        if self.status != 0:
            return "not caught", f"the tests died, or did not end within {LIMIT} s"
        return "not caught", self.output.splitlines()[-1]


def run_all(waiting: list, jobs: int):
    """Yields the ended ones of `waiting`, functions that start an Attempt, `jobs` at a time."""
    running = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0)())
            for attempt in [each for each in running if each.ended()]:
                running.remove(attempt)
                yield attempt
            time.sleep(0.05)
    finally:
        for attempt in running:
            attempt.clear()


def failing_without_a_bug(bugs: list[Bug], jobs: int) -> dict[str, str]:
    """{test: error} of the named tests, which run file by file."""
    files = {}
    for name in sorted({f"tests/{bug.test}" for bug in bugs}):
        files.setdefault(name.partition("::")[0], []).append(name)
    found = {}
    for attempt in run_all([lambda names=names: Attempt(names) for names in files.values()], jobs):
        found |= attempt.failed()
        if attempt.status not in (0, 1):
            why = (re.findall("^ERROR: .*", attempt.output, re.M) or ["no end"])[0]
            found |= {name.removeprefix("tests/"): why for name in attempt.tests}
    return found


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", metavar="GLOB", help="bugs with a file, test or text like that")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--table", type=Path, metavar="FILE", help="another table of bugs")
    options = parser.parse_args()
    bugs = read_table(options.table) if options.table else read_table()
    bugs = [bug for bug in bugs if matches(bug, f"*{options.only or ''}*")]
    counts = {"caught": 0, "not caught": 0, "stale": 0}

    def say(kind: str, bug: Bug, why: str) -> None:
        counts[kind] += 1
        print(f"{kind:10}  {bug}\n{'':12}{why}", flush=True)

    fresh = []
    for bug in bugs:
        if why := stale(bug):
            say("stale", bug, why)
        else:
            fresh.append(bug)
    for name in IMPORTS.split():  # once, not in each process
        with suppress(ImportError):
            importlib.import_module(name)
    anyway = failing_without_a_bug(fresh, options.jobs)
    starts = []
    for bug in fresh:
        broken = [name for name in anyway if bug.test in (name, name.partition("[")[0])]
        if broken:
            say("not caught", bug, f"without a bug, {broken[0]} fails: {anyway[broken[0]]}")
        else:
            starts.append(lambda bug=bug: Attempt([f"tests/{bug.test}"], bug))
    for attempt in run_all(starts, options.jobs):
        kind, why = attempt.verdict()
        say(kind, attempt.bug, why)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"of {len(bugs)}")
    return int(not bugs or counts["caught"] < len(bugs))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what is at work, too
    sys.exit(main())
