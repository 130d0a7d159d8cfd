"""The command line of the programs here: types of arguments, common options, and `start`."""

import argparse
import functools
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from run_dirs import ROOT, read_and_tell, real, shown


def count(text: str, most: int = 10**12) -> int:
    """How many of something."""
    with suppress(ValueError):
        if 0 < int(text) <= most:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {most:,}")


few = functools.partial(count, most=1000)


def folder(text: str | Path) -> Path:
    """A folder to write to: whether one can shows now and not after hours of measurements."""
    path = real(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"{text}: {problem.strerror}") from None
    return path


def stem(text: str) -> Path:
    """What the names of files to write begin with."""
    path = Path(text)
    if not path.name:
        raise argparse.ArgumentTypeError(f"{text!r} names no file")
    return folder(path.parent) / path.name


OPTIONS = {  # of several programs; a default that is text is converted as well
    "runs": {"type": real, "nargs": "+"},
    "--out": {"type": folder, "default": str(ROOT / "plots/out"), "help": "folder of the report"},
    "--field-python": {"default": ".venv-field/bin/python", "help": "the other libraries'"},
    "--rounds": {"type": few, "default": 3},
    "--seed": {"type": int, "default": 1, "help": "internal: of the worker"},
    "--seeds": {"type": few, "help": "runs per row"},
    "--steps": {"type": count, "help": "environment steps per run"},
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line; the usage, which may be ten, is in --help."""
        self.exit(2, f"{self.prog}: {message}\n")


def make_parser(doc: str, *options: str) -> Parser:
    """A parser whose --help is the program's docstring, with these of `OPTIONS`."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in options:
        parser.add_argument(name, **OPTIONS[name])
    return parser


def start(main: Callable[[], int], interrupted: str = "interrupted") -> None:
    """Calls `main` and exits; SIGTERM and SIGHUP end it as Ctrl-C does; a full disk is one line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # SIGHUP is ignored under nohup
            signal.signal(number, signal.default_int_handler)
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        status = 130
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        if not isinstance(problem, BrokenPipeError):  # then nobody reads on, as in "| head -1"
            print(f"error: {problem}", file=sys.stderr)
        status = 1
    sys.exit(status)


def draw_runs(doc: str, name: str, write: Callable, arguments: list[str] | None = None) -> int:
    """A program that makes figures NAME of runs by write(runs, folder, name) -> files."""
    parser = make_parser(doc, "runs")
    default = str(ROOT / "plots/out" / name)
    parser.add_argument("--out", type=stem, default=default, help="NAME")
    options = parser.parse_args(arguments)
    runs = read_and_tell(options.runs)
    files = write(runs, options.out.parent, options.out.name)
    for path in files:
        print(f"figure: {shown(path)}")
    return int(not files)
