"""Sweeps on a Ray cluster: a real head on loopback, started and stopped by these tests alone."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from fake_sweeps import alive, attempts, call, found_in, make_place, start, states, write_sweep
from helpers import PATIENCE, wait_until

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
TOKEN = "0123456789abcdef" * 4


def free_ports(count):
    """Where the system gives nobody one by itself, nor Ray its workers (10,002 to 19,999)."""
    sockets = []
    while len(sockets) < count:
        sockets.append(socket.socket())
        try:
            sockets[-1].bind(("127.0.0.1", random.randrange(20_000, 32_000)))
        except OSError:
            sockets.pop().close()
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def head():
    """A head with two cores; its processes are a group, which ends with the tests."""
    port, dashboard, client = free_ports(3)
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets want short paths
    programs = Path(sys.executable).parent
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every node is 127.0.0.1
        "HOME": folder,
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    command = [str(programs / "ray"), "start", "--head", "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2", "--num-gpus=0"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--ray-client-server-port={client}", f"--temp-dir={folder}/ray"]
    command += ["--object-store-memory=100000000", "--disable-usage-stats"]
    log = open(f"{folder}/head.log", "wb")
    process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, start_new_session=True
    )

    def listens():
        assert process.poll() is None, Path(log.name).read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", dashboard)) == 0

    try:
        wait_until(listens)
        yield {"address": f"127.0.0.1:{port}", "environment": environment}
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def place(tmp_path, monkeypatch, head):
    """The current folder, for programs that know the head."""
    root = make_place(tmp_path)
    monkeypatch.chdir(root)
    for name, value in head["environment"].items():
        monkeypatch.setenv(name, value)
    return root


@pytest.fixture
def on_ray(head):
    """The words of a launch there."""
    there = ["--launcher", "ray", "--yes", "--address", head["address"]]
    return lambda path, *words: ["run", path, *there, *words]


def test_ray_makes_what_the_launcher_here_makes(place, on_ray):
    """Same variants, folders and files; what failed is named; nothing finished runs again."""
    params = {"n": [1, 2], "exp_name": ["a b", "$(x); 'y'\n--z"], "fails": [f"{place}/mended", "/"]}
    path = write_sweep(place, params)
    said = call(*on_ray(path), check=1).stdout
    for words in ("8 variants, 0 done before", "8/8", "what went wrong", "4 failed"):
        assert words in said
    assert states(place) == ["failed"] * 4 + ["finished"] * 4
    with_ray = found_in(place)

    (place / "runs").rename(place / "with ray")
    call("run", path, "--workers", 2, check=1)
    flags = [{k: v["flags"] for k, v in found.items()} for found in (with_ray, found_in(place))]
    assert flags[0] == flags[1]
    for folder in ("with ray/study", "runs/study"):
        names = {p.name for p in (place / folder).glob("*/*")}
        assert names == {"variant.json", "status.json", "stdout.log", "runs"}

    (place / "mended").touch()
    said = call(*on_ray(path), check=1).stdout
    assert "8 done before" in said and "8/8" not in said
    said = call(*on_ray(path, "--retry-failed"), check=0).stdout
    assert "4/4" in said and states(place) == ["finished"] * 8


def test_a_killed_launcher_is_followed_again(place, on_ray):
    path = write_sweep(place, {"n": [1, 2, 3], "until": [f"{place}/now"]})
    launcher = start(*on_ray(path))
    wait_until(lambda: len(alive(place)) == 2)
    launcher.kill()
    launcher.communicate()
    again = start(*on_ray(path))
    assert any("at work already" in line for line in again.stdout)  # reads up to there
    assert len(alive(place)) == 2  # the job went on
    (place / "now").touch()
    out, error = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0 and "3/3" in out, out + error
    assert not attempts(place)


def test_a_killed_worker_loses_no_run(place, on_ray):
    launcher = start(*on_ray(write_sweep(place, {"n": [1, 2], "until": [f"{place}/now"]})))
    wait_until(lambda: len(alive(place)) == 2)
    stat = Path(f"/proc/{alive(place)[0]}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)  # its parent
    (place / "now").touch()
    out, error = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, out + error
    assert [log.parent.name for log in attempts(place)] == ["1"]
    assert len(found_in(place)) == 2


def test_jobs_logs_and_stop(place, on_ray):
    launcher = start(*on_ray(write_sweep(place, {"n": [1, 2, 3], "sleep": [600.0]}, name="long")))
    wait_until(lambda: len(alive(place)) == 2)
    said = call("jobs", check=0).stdout
    assert said.count("long/") == 3 and said.count("running") == 2 and "waiting" in said
    one = next(line.split()[0] for line in said.splitlines() if "running" in line)
    following = start("logs", "-f", one)
    assert following.stdout.readline() == "started\n"
    call("stop", "long", "--yes", check=0)
    assert not alive(place) and states(place, "long") == ["stopped"] * 3
    following.communicate(timeout=PATIENCE)
    assert following.returncode == 0
    out, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1 and "3 stopped" in out


def test_ray_stops_a_job_and_its_runs(head, place, on_ray):
    launcher = start(*on_ray(write_sweep(place, {"n": [1], "sleep": [600.0]}, name="ended")))
    wait_until(lambda: alive(place))
    job = next(line.split()[1].strip(",") for line in launcher.stdout if line.startswith("job "))
    ray = str(Path(sys.executable).parent / "ray")
    words = [ray, "job", "stop", "--address", head["address"], job]
    subprocess.run(words, check=True, capture_output=True)
    out, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1 and f"{job} stopped" in out
    wait_until(lambda: not alive(place))
    state = call("jobs", check=0).stdout.split()[1]
    assert state in ("stopped", "lost")  # whether its end could still be written down


def test_a_cluster_with_files_of_its_own(place, on_ray):
    """Tasks leave their folders in storage, and launcher and sync fetch them, once."""
    pytest.importorskip("pyarrow")
    bucket, mended = place.parent / "bucket", place.parent / "mended"
    storage = ["--storage", f"file://{bucket}"]
    path = write_sweep(place, {"n": [1, 2], "fails": [str(mended), ""]}, name="kept")
    said = call(*on_ray(path, *storage), check=1).stdout
    assert "2 finished" in said and "what went wrong" in said
    assert states(place, "kept") == ["failed"] * 2 + ["finished"] * 2
    (place / "runs").rename(place / "lost")
    for count in (4, 2):  # all, and then what is not finished
        assert call("sync", "kept", *storage, check=0).stdout.count("fetched") == count
        assert len(found_in(place, "kept")) == 2

    mended.touch()
    said = call(*on_ray(path, "--retry-failed", *storage), check=0).stdout
    assert "2 done before" in said and "2/2" in said
    assert states(place, "kept") == ["finished"] * 4
    logs = attempts(place, "kept")
    assert len(logs) == 2 and "what went wrong" in logs[0].read_text()
    said = call(*on_ray(path, *storage), check=0).stdout
    assert "4 done before" in said and "fetched" not in said


def test_runs_that_wait_for_gpus_can_be_stopped(place, on_ray):
    path = write_sweep(place, {"n": [1]}, name="gpus")
    launcher = start(*on_ray(path, "--gpus-per-run", "0.5"))
    assert any("GPU" in line for line in launcher.stdout)  # Ray says that there is none
    assert "waiting" in call("jobs", check=0).stdout
    call("stop", "gpus", "--yes", check=0)
    out, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1 and "1 stopped" in out
