"""Sweeps on a Ray cluster: a real head on loopback, started and stopped by these tests alone."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import run_dirs
from conftest import ROOT
from test_sweep import PATIENCE, STAND_IN, alive, found_in, states, wait_until, write_sweep

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
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "HOME": folder}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # every node is 127.0.0.1
    programs = Path(sys.executable).parent
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = [str(programs / "ray"), "start", "--head", "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2", "--num-gpus=0"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--ray-client-server-port={client}", f"--temp-dir={folder}/ray"]
    command += ["--object-store-memory=100000000", "--disable-usage-stats"]
    log = open(f"{folder}/head.log", "wb")
    process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline, Path(log.name).read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", dashboard)) == 0:
                    break
            time.sleep(0.2)
        yield {"address": f"127.0.0.1:{port}", "environment": environment, "pid": process.pid}
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def place(tmp_path, monkeypatch):
    root = tmp_path / "a place"
    (root / "leanrl").mkdir(parents=True)
    shutil.copy(ROOT / "leanrl/sweep.py", root / "leanrl")
    (root / "leanrl/x.py").write_text(STAND_IN)
    monkeypatch.chdir(root)
    return root


def call(head, *words, stdin="", check=None):
    done = subprocess.run(
        [sys.executable, "leanrl/sweep.py", *map(str, words)],
        input=stdin,
        env=head["environment"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "Traceback" not in done.stderr, done.stderr
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


def on_ray(head, *words):
    return [*words, "--launcher", "ray", "--address", head["address"]]


def launch(head, path, *words):
    return subprocess.Popen(
        [sys.executable, "leanrl/sweep.py", *on_ray(head, "run", path, "--yes"), *words],
        env=head["environment"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ray_makes_what_the_launcher_here_makes(head, place):
    """Same variants, folders and files; what failed is named; nothing finished runs again."""
    params = {"n": [1, 2], "exp_name": ["a b", "$(x); 'y'\n--z"], "fails": [f"{place}/mended", "/"]}
    path = write_sweep(place, params)
    done = call(head, *on_ray(head, "run", path, "--yes"), check=1)
    assert "8 variants, 0 done before" in done.stdout and "8/8" in done.stdout
    assert states(place) == ["failed"] * 4 + ["finished"] * 4
    assert "what went wrong" in done.stdout and "4 failed" in done.stdout
    with_ray = found_in(place)

    (place / "runs").rename(place / "with ray")
    call(head, "run", path, "--workers", 2, check=1)
    locally = found_in(place)
    assert {k: v["flags"] for k, v in locally.items()} == {
        k: v["flags"] for k, v in with_ray.items()
    }
    for folder in ("with ray/study", "runs/study"):
        names = {p.name for p in (place / folder).glob("*/*")}
        assert names == {"variant.json", "status.json", "stdout.log", "runs"}

    (place / "mended").touch()
    done = call(head, *on_ray(head, "run", path, "--yes"), check=1)
    assert "8 done before" in done.stdout and "8/8" not in done.stdout
    done = call(head, *on_ray(head, "run", path, "--yes", "--retry-failed"), check=0)
    assert "4/4" in done.stdout and states(place) == ["finished"] * 8


def test_real_runs_are_the_same_here_and_there(head, tmp_path, monkeypatch):
    """Four short PPO runs, one of which cannot work: same folders, returns and losses."""
    monkeypatch.chdir(tmp_path)
    Path("ppo.py").write_text(
        "script = 'leanrl/ppo_continuous_action.py'\n"
        "params = dict(seed=[1, 2, 3, 4], env_id=['Pendulum-v1'], num_steps=[256],\n"
        "    num_minibatches=lambda seed: [4 if seed < 4 else 7], total_timesteps=[1280])\n"
    )
    program, found = [sys.executable, str(ROOT / "leanrl/sweep.py"), "run", "ppo.py"], {}
    for place, words in (
        ("here", ["--workers", "2"]),
        ("there", ["--launcher", "ray", "--address", head["address"], "--yes"]),
    ):
        done = subprocess.run(
            [*program, *words], env=head["environment"], capture_output=True, text=True
        )
        assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
        runs, skipped = run_dirs.read_runs([Path("runs/ppo")])
        assert len(runs) == 3 and len(skipped) == 1
        tags = ["charts/episodic_return", "losses/policy_loss", "losses/value_loss"]
        found[place] = {
            run.path.parts[-3]: {
                tag: (series.steps.tolist(), series.values.tolist())
                for tag, series in run_dirs.read_series(run.path, tags).items()
            }
            for run in runs
        }
        Path("runs").rename(place)
    assert found["here"] == found["there"]
    assert all(len(metrics) == 3 for metrics in found["here"].values())


def test_it_asks_before_it_launches(head, place):
    path = write_sweep(place, {"n": [1]})
    for answer in ("n\n", "", "what\n"):
        assert "nothing launched" in call(head, *on_ray(head, "run", path), stdin=answer).stderr
    assert not states(place)
    call(head, *on_ray(head, "run", path), stdin="Y\n", check=0)


def test_a_killed_launcher_is_followed_again(head, place):
    path = write_sweep(place, {"n": [1, 2, 3], "until": [f"{place}/now"]})
    launcher = launch(head, path)
    wait_until(lambda: len(alive(place)) == 2)
    launcher.kill()
    launcher.communicate()
    again = launch(head, path)
    assert any("at work already" in line for line in again.stdout)  # reads up to there
    assert len(alive(place)) == 2  # the job went on
    (place / "now").touch()
    out, error = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0 and "3/3" in out, out + error
    assert not list((place / "runs/study").glob("*/attempts"))


def test_a_killed_worker_loses_no_run(head, place):
    path = write_sweep(place, {"n": [1, 2], "until": [f"{place}/now"]})
    launcher = launch(head, path)
    wait_until(lambda: len(alive(place)) == 2)
    victim = alive(place)[0]
    with open(f"/proc/{victim}/stat") as file:
        worker = int(file.read().rpartition(")")[2].split()[1])
    os.kill(worker, signal.SIGKILL)
    (place / "now").touch()
    out, error = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, out + error
    assert len(list((place / "runs/study").glob("*/attempts/1"))) == 1
    assert not list((place / "runs/study").glob("*/attempts/2"))
    assert len(found_in(place)) == 2


def test_jobs_logs_and_stop(head, place):
    path = write_sweep(place, {"n": [1, 2, 3], "sleep": [600.0]}, name="long")
    launcher = launch(head, path)
    wait_until(lambda: len(alive(place)) == 2)
    said = call(head, "jobs", check=0).stdout
    assert said.count("long/") == 3 and said.count("running") == 2 and "waiting" in said

    one = next(line.split()[0] for line in said.splitlines() if "running" in line)
    following = subprocess.Popen(
        [sys.executable, "leanrl/sweep.py", "logs", "-f", one],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout.readline() == "started\n"
    for answer in ("n\n", ""):
        assert "nothing stopped" in call(head, "stop", "long", stdin=answer, check=1).stdout
    assert len(alive(place)) == 2
    call(head, "stop", "long", stdin="y\n", check=0)
    assert not alive(place) and states(place, "long") == ["stopped"] * 3
    assert following.wait(timeout=PATIENCE) == 0
    out, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1 and "3 stopped" in out
    assert "nothing that runs" in call(head, "stop", "long", stdin="y\n", check=2).stderr


def test_ray_stops_a_job_and_its_runs(head, place):
    path = write_sweep(place, {"n": [1], "sleep": [600.0]}, name="ended")
    launcher = launch(head, path)
    wait_until(lambda: alive(place))
    job = next(line.split()[1].strip(",") for line in launcher.stdout if line.startswith("job "))
    ray = str(Path(sys.executable).parent / "ray")
    words = [ray, "job", "stop", "--address", head["address"], job]
    subprocess.run(words, env=head["environment"], check=True, capture_output=True)
    out, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1 and f"{job} stopped" in out
    wait_until(lambda: not alive(place))
    state = call(head, "jobs").stdout.split()[1]
    assert state in ("stopped", "lost")  # whether its end could still be written down


def test_a_cluster_with_files_of_its_own(head, place):
    """Tasks leave their folders in storage, and launcher and sync fetch them, once."""
    pytest.importorskip("pyarrow")
    bucket, mended = place.parent / "bucket", place.parent / "mended"
    storage = ["--storage", f"file://{bucket}"]
    path = write_sweep(place, {"n": [1, 2], "fails": [str(mended), ""]}, name="kept")
    done = call(head, *on_ray(head, "run", path, "--yes", *storage), check=1)
    assert "2 finished" in done.stdout and "what went wrong" in done.stdout
    assert states(place, "kept") == ["failed"] * 2 + ["finished"] * 2
    (place / "runs").rename(place / "lost")
    done = call(head, "sync", "kept", *storage, check=0)
    assert done.stdout.count("fetched") == 4 and len(found_in(place, "kept")) == 2
    done = call(head, "sync", "kept", *storage, check=0)
    assert done.stdout.count("fetched") == 2  # but for what is finished

    mended.touch()
    done = call(head, *on_ray(head, "run", path, "--yes", "--retry-failed", *storage), check=0)
    assert "2 done before" in done.stdout and "2/2" in done.stdout
    assert states(place, "kept") == ["finished"] * 4
    attempts = list((place / "runs/kept").glob("*/attempts/*/stdout.log"))
    assert len(attempts) == 2 and "what went wrong" in attempts[0].read_text()
    again = call(head, *on_ray(head, "run", path, "--yes", *storage), check=0)
    assert "4 done before" in again.stdout and "fetched" not in again.stdout


def test_runs_that_wait_for_gpus_can_be_stopped(head, place):
    launcher = launch(head, write_sweep(place, {"n": [1]}, name="gpus"), "--gpus-per-run", "0.5")
    said = ""
    while "GPU" not in said:  # Ray says that there is none
        line = launcher.stdout.readline()
        assert line, said
        said += line
    assert "waiting" in call(head, "jobs", check=0).stdout
    call(head, "stop", "gpus", "--yes", check=0)
    out, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1 and "1 stopped" in out


def test_nobody_at_the_address_is_one_line(head, place):
    (port,) = free_ports(1)
    nobody = {"address": f"http://127.0.0.1:{port}"}
    done = call(head, *on_ray(nobody, "run", write_sweep(place, {"n": [1]}), "--yes"), check=2)
    assert f"127.0.0.1:{port}" in done.stderr and not states(place)


def test_nothing_listens_beyond_loopback(head):
    """Every port that the head and its descendants listen on is loopback's."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int(
                (process / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
    mine, sockets = {head["pid"]}, set()
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    for pid in mine:
        try:
            sockets |= {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # listens
                addresses.append(fields[1].split(":")[0])
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert len(addresses) > 3 and set(addresses) <= loopback
