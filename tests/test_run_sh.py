"""run.sh, .ci/run and requirements/. Nothing here is installed or needs a network."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT


def bash(*command, cwd=ROOT, **environment):
    how = {"cwd": cwd, "env": os.environ | environment, "stdin": subprocess.DEVNULL}
    return subprocess.run(["bash", *map(str, command)], **how, capture_output=True, text=True)


def test_help_names_commands(tmp_path):
    done = bash(ROOT / "run.sh", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("--full", "field", "race", "study", "figures", "gpu", "test", "--help"):
        assert f"bash run.sh {command}" in done.stdout


@pytest.mark.parametrize("arguments", ["bogus", "--full extra", "--seeds", "--full --only"])
def test_unknown_arguments_are_refused(arguments):
    done = bash("run.sh", *arguments.split())
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("\n") == 1 and arguments.split()[-1] in done.stderr


@pytest.fixture
def clone(tmp_path):
    """run.sh and what it reads, at a path with spaces."""
    root = tmp_path / "a clone"
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    shutil.copy(ROOT / "run.sh", root)
    return root


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def activate(clone, missing="", pip_status=0) -> dict:
    """The variables of an environment that lacks `missing` and prints what it is called with."""
    python = f"""case "$*" in
    "-m pip --version" | -c*) exit 0 ;;
    "-m pip install"*) echo "pip got $(cat)"; exit {pip_status} ;;
    "- requirements"*) printf "%s" "{missing}" ;;
    *) echo "called: $* in $PWD"; exit 7 ;;
esac"""
    write_program(clone / "active env/bin/python", python)
    return {"VIRTUAL_ENV": str(clone / "active env")}


@pytest.mark.parametrize("script", ["run.sh test", ".ci/run"])
def test_active_environment_is_used(clone, tmp_path, script):
    file, *arguments = script.split()
    done = bash(clone / file, *arguments, "-k", "two words", cwd=tmp_path, **activate(clone))
    assert done.returncode == 7  # pytest's status, which comes through
    workers = "-n auto --maxprocesses 4 --dist loadfile"
    assert done.stdout == f"called: -m pytest -q {workers} tests -k two words in {clone}\n"
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(
    ("pip_status", "status", "then"), [(0, 7, "called: -m pytest"), (1, 1, "pip install failed")]
)
def test_only_missing_packages_are_installed(clone, pip_status, status, then):
    done = bash(clone / "run.sh", "test", **activate(clone, "tyro==1.0.17", pip_status))
    assert done.returncode == status and done.stdout.startswith("pip got tyro==1.0.17\n")
    assert then in done.stdout + done.stderr


def test_links_lead_to_the_checkout(clone, tmp_path):
    """A link to a link to run.sh, and a linked folder."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/run").symlink_to(clone / "run.sh")
    (tmp_path / "run").symlink_to("elsewhere/run")
    (tmp_path / "folder").symlink_to(clone)
    for script in ("run", "folder/run.sh"):
        done = bash(script, "test", cwd=tmp_path, **activate(clone))
        assert done.stdout.endswith(f" in {clone}\n"), done.stderr


NO_ENSUREPIP = 'case "$*" in *ensurepip*) exit 1 ;; esac'
NO_VENV = 'case "$*" in *ensurepip*) exit 0 ;; *venv*) exit 1 ;; esac'


@pytest.mark.parametrize(
    ("program", "text", "said"),
    [
        ("mkdir", "exit 1", "cannot write to"),  # no permissions: the tests may run as root
        ("python3", NO_ENSUREPIP, "apt install python3-venv"),
        ("python3", NO_VENV, "the reason is above"),
    ],
    ids=["read-only", "no ensurepip", "a full disk"],
)
def test_environment_that_cannot_be_made(clone, tmp_path, program, text, said):
    write_program(tmp_path / "tools" / program, text)
    path = f"{tmp_path / 'tools'}:{os.environ['PATH']}"
    done = bash(clone / "run.sh", "test", VIRTUAL_ENV="", CONDA_PREFIX="", PATH=path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("run.sh: ") and said in last


def test_environment_without_python(tmp_path):
    done = bash("run.sh", "test", VIRTUAL_ENV=str(tmp_path / "gone"))
    assert done.returncode == 1 and str(tmp_path / "gone") in done.stderr


def test_requirements_are_pinned_alike():
    pins = {}
    for file in (ROOT / "requirements").glob("*.txt"):
        for line in re.findall("^[^#\n].*", file.read_text(), re.MULTILINE):
            assert re.fullmatch(r"[\w-]+(\[\w+\])?==[\w.]+", line), f"{file.name}: {line}"
            name, _, number = line.partition("==")
            assert pins.setdefault(name, number) == number, f"{file.name}: {line}"
    assert "torch" in pins
