"""Sweeps: many variants of a script with one command, on this machine or on a Ray cluster.

    python leanrl/sweep.py run leanrl/sweeps/gae_lambda.py --dry-run
    python leanrl/sweep.py run leanrl/sweeps/gae_lambda.py --workers 2
    python leanrl/sweep.py run leanrl/sweeps/packed_gpu.py --gpus-per-run 0.25 --workers 4
    python leanrl/sweep.py run leanrl/sweeps/gae_lambda.py --launcher ray --address auto --yes
    python leanrl/sweep.py jobs                     what has run, runs and failed
    python leanrl/sweep.py logs [-f] NAME           what a variant printed, or a job of the cluster
    python leanrl/sweep.py stop PREFIX              ends what runs and is called so; asks first
    python leanrl/sweep.py sync GROUP --address A   fetches what a cluster has kept of a group
    python leanrl/sweep.py doctor --address A       would a sweep run there? What is missing?

A sweep is a Python file of assignments:

    script = "leanrl/ppo_continuous_action_torchcompile.py"     # a list of several varies, too
    group = "gae_lambda"                            # folder in runs/; the file's name by default
    params = dict(
        gae_lambda=[0.0, 0.9, 1.0],
        num_steps=[1024, 2048],
        num_minibatches=lambda num_steps: [num_steps // 64],    # depends on another parameter
        compile=[True],
        seed=[1, 2, 3],
    )

Every combination is a variant. A function's argument names are other parameters, in any order; it
returns a list, like those that are written out. A parameter is the script's flag of that name: 0.9
becomes --gae-lambda=0.9, True --compile, False --no-compile, None --target-kl=None. No shell sees
the values.

A variant is known by a hash of its script and parameters. In runs/GROUP/ID/ it leaves

    variant.json    script, parameters, command
    status.json     state (running, finished, failed, stopped), exit status, times, process, attempt
    stdout.log      all that it printed
    runs/           the run itself: config.json, stages.json, TensorBoard, checkpoint
    attempts/       what former attempts have left

A second launch goes on: what is finished is skipped, what was stopped or lost with its launcher
starts again, what failed is named, and runs again with --retry-failed. One failure stops no other.
Exit status 0 if all variants are finished, 1 if one is not, 2 if the sweep makes no sense, 130
after Ctrl-C, which ends all runs on this machine first.

With --launcher ray the same file makes the same folders. The sweep becomes one job of the cluster,
which asks for no resources, and every variant a task of it, which waits for --cpus-per-run and
--gpus-per-run. Where the cluster sees this file system the runs appear here as they go on; where it
does not (--ship), the head keeps them and `sync` fetches them. The job goes on without its
launcher: Ctrl-C leaves it alone, the same command follows it again, `stop` ends it. --address is
as for ray.init: auto for a head on this machine. Ray keeps its own secrets (RAY_AUTH_MODE=token),
and runs do not get to see them.
"""

import argparse
import base64
import ctypes
import fcntl
import graphlib
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = "runs"
MOST_VARIANTS = 20
GRACE = 20  # seconds that a run has to close its files, and a head to answer
POLL = 0.05  # seconds between two looks at the running ones
RETRIES = 2  # of a task whose worker process died
NOT_FOR_RUNS = ("RAY_AUTH_TOKEN", "LEANRL_SWEEP")  # in the environment of what starts them


class SweepError(Exception):
    """Something the user can mend, in one line."""


# What is in a sweep


def expand(params: dict) -> list[dict]:
    """Every combination of `params` {name: list, or function of other parameters -> list}.

    Each variant has its names in the order of `params`. SweepError for names that are none, unknown
    or in a circle, and for values that are no lists, empty, repeated or no flag could carry.
    """
    if not isinstance(params, dict) or not params:
        raise SweepError("params must be a dict with at least one parameter")
    needs = {}
    for name, values in params.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise SweepError(f"{name!r} is no name of a parameter")
        needs[name] = arguments(name, values, params) if callable(values) else []
    try:
        order = list(graphlib.TopologicalSorter(needs).static_order())
    except graphlib.CycleError as error:
        raise SweepError(f"parameters in a circle: {' needs '.join(error.args[1])}") from None
    variants = [{}]
    for name in order:
        variants = [
            variant | {name: value}
            for variant in variants
            for value in values_of(name, params[name], [variant[need] for need in needs[name]])
        ]
    return [{name: variant[name] for name in params} for variant in variants]


def arguments(name: str, function, params: dict) -> list[str]:
    """The parameters that `function` depends on."""
    found = []
    for argument in inspect.signature(function).parameters.values():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            raise SweepError(f"{name}: its function takes *{argument.name}; name the parameters")
        if argument.name in params:
            found.append(argument.name)
        else:
            raise SweepError(f"{name} needs {argument.name!r}, which is no parameter")
    return found


def values_of(name: str, values, inputs: list) -> list:
    """The list that `values` is or, called with `inputs`, returns."""
    if callable(values):
        try:
            values = values(*inputs)
        except Exception as error:
            raise SweepError(f"{name}: its function fails: {one_line(error)}") from None
    if not isinstance(values, list):
        raise SweepError(f"{name} is {values!r}, not a list")
    if not values:
        raise SweepError(f"{name} is an empty list")
    for i, value in enumerate(values):
        if not isinstance(value, bool | int | float | str | None):
            raise SweepError(f"{name} has {value!r}: only numbers, text, True, False and None")
        if isinstance(value, float) and not math.isfinite(value):
            raise SweepError(f"{name} has {value!r}: not a finite number")
        if isinstance(value, str) and "\0" in value:
            raise SweepError(f"{name} has {value!r}: no command line can carry a zero byte")
        if any(type(value) is type(other) and value == other for other in values[:i]):
            raise SweepError(f"{name} has {value!r} twice")
    return values


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass
class Variant:
    """One combination: a script and its parameters."""

    group: str
    script: str
    params: dict
    folder: Path = field(init=False)  # runs/GROUP/ID
    id: str = field(init=False)

    def __post_init__(self):
        text = json.dumps([self.script, sorted(self.params.items())], ensure_ascii=True)
        self.id = hashlib.sha256(text.encode()).hexdigest()[:10]
        self.folder = Path(RUNS, self.group, self.id).resolve()

    @property
    def name(self) -> str:
        return f"{self.group}/{self.id}"

    @property
    def flags(self) -> list[str]:
        """Each a single word, whatever the value holds."""
        found = []
        for name, value in self.params.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                found.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                found.append(f"--{flag}={value}")
        return found

    @property
    def command(self) -> list[str]:
        """As from the repository."""
        return ["python", self.script, *self.flags]

    def describe(self, varying: list[str]) -> str:
        """What tells it from the others."""
        values = {"script": Path(self.script).stem} | self.params
        return ", ".join(f"{name}={values[name]!r}" for name in varying) or "the only one"

    @property
    def status(self) -> dict:
        """status.json; what is missing or damaged has no state."""
        with suppress(OSError, ValueError):
            found = json.loads((self.folder / "status.json").read_text())
            if isinstance(found, dict):
                return found
        return {}

    def set_status(self, **status) -> None:
        write_json(self.folder / "status.json", status)


@dataclass
class Sweep:
    group: str
    variants: list[Variant]
    varying: list[str]  # parameters with more than one value


def load(path: Path, most: int) -> Sweep:
    """The sweep in the file at `path`, of `most` variants at most."""
    try:
        names = runpy.run_path(str(path))
    except OSError as error:
        raise SweepError(f"cannot read {path}: {error.strerror}") from None
    except SyntaxError as error:
        raise SweepError(f"{path}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        raise SweepError(f"{path} fails: {one_line(error)}") from None
    for name in ("script", "params"):
        if name not in names:
            raise SweepError(f"{path} assigns no {name!r}")
    group = names.get("group", path.stem)
    if not isinstance(group, str) or not re.fullmatch(r"\w[\w.-]*", group):
        raise SweepError(f"group {group!r}: only letters, digits, _, - and .")
    scripts = names["script"] if isinstance(names["script"], list) else [names["script"]]
    for script in values_of("script", scripts, []):
        if not isinstance(script, str) or not (ROOT / script).is_file():
            raise SweepError(f"script {script!r}: no such file in the repository")
    found = expand(names["params"])
    variants = [Variant(group, script, params) for script in scripts for params in found]
    if len(variants) > most:
        raise SweepError(f"{len(variants)} variants, {most} at most; --max-variants allows more")
    columns = {"script": scripts} | {name: [p[name] for p in found] for name in names["params"]}
    varying = [name for name, values in columns.items() if len({repr(v) for v in values}) > 1]
    return Sweep(group, variants, varying)


# Running a variant


def write_json(path: Path, content: dict) -> None:
    """All or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def put_away(variant: Variant) -> int:
    """Moves what a former attempt has left into attempts/N -> the number of the next one."""
    attempts = variant.folder / "attempts"
    number = len(list(attempts.glob("*"))) + 1
    left = [variant.folder / name for name in (RUNS, "stdout.log", "status.json")]
    if any(path.exists() for path in left[:2]):
        (attempts / str(number)).mkdir(parents=True)
        for path in left:
            with suppress(FileNotFoundError):
                path.replace(attempts / str(number) / path.name)
        number += 1
    return number


def start(variant: Variant, environment: dict, root: Path = ROOT) -> subprocess.Popen:
    """A process, leader of its own group, that runs `variant` in its folder, from `root`'s code."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # before the fork
    parent = os.getpid()

    def die_with_parent() -> None:
        """A launcher or worker that is killed takes its runs along."""
        if libc:
            libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:  # too late
                os._exit(1)

    attempt = put_away(variant)
    (variant.folder / "stop").unlink(missing_ok=True)
    variant.folder.mkdir(parents=True, exist_ok=True)
    about = {"script": variant.script, "params": variant.params}
    write_json(variant.folder / "variant.json", about | {"command": shlex.join(variant.command)})
    script = os.path.relpath(root / variant.script, variant.folder)
    inherited = {k: v for k, v in os.environ.items() if k not in NOT_FOR_RUNS}
    with (variant.folder / "stdout.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, script, *variant.flags],
            cwd=variant.folder,
            env={**inherited, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    started = {"state": "running", "pid": child.pid, "started": time.time(), "attempt": attempt}
    variant.set_status(**started, host=os.uname().nodename)
    return child


def finish(variant: Variant, exit_status: int, stopped: bool = False) -> str:
    """Records how a run ended -> its state."""
    stopped = stopped or (variant.folder / "stop").exists()  # what the command `stop` leaves
    state = "stopped" if stopped else "failed" if exit_status else "finished"
    ended = {"state": state, "exit_status": exit_status, "ended": time.time()}
    variant.set_status(**variant.status | ended)
    return state


def fail(variant: Variant, error: Exception) -> None:
    """Records that a run could not even start, or that nobody knows how it ended."""
    failed = {"state": "failed", "ended": time.time(), "reason": one_line(error)[:500]}
    variant.set_status(**variant.status | failed)


def end_group(child: subprocess.Popen, seconds: float) -> None:
    """Ends the group of `child`: asked for so many seconds, then by force."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=max(0.0, seconds))
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def last_line(variant: Variant) -> str:
    """The last thing that a run said, without its progress bar."""
    with suppress(OSError):
        text = (variant.folder / "stdout.log").read_bytes()[-4096:].decode(errors="replace")
        lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
        lines = [line for line in lines if line and "it/s]" not in line and "step/s" not in line]
        return lines[-1] if lines else ""
    return ""


# On this machine


def gpus() -> list[str]:
    """The names by which CUDA_VISIBLE_DEVICES knows this machine's GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    with suppress(OSError, subprocess.CalledProcessError):
        listed = subprocess.check_output(["nvidia-smi", "-L"], text=True, stderr=subprocess.DEVNULL)
        return [str(i) for i, _ in enumerate(re.findall("^GPU ", listed, re.MULTILINE))]
    return []


def check_share(gpus_per_run: float | None) -> None:
    """SweepError unless it is a part of a GPU or a whole number of them."""
    if gpus_per_run is not None and not (
        0 < gpus_per_run <= 1 or gpus_per_run > 1 and gpus_per_run == int(gpus_per_run)
    ):
        raise SweepError(f"--gpus-per-run {gpus_per_run}: a part of one, or a whole number")


def slots(workers: int | None, gpus_per_run: float | None, found: list[str]) -> list[dict]:
    """The environment of each of `workers` runs side by side: its share of cores and GPUs.

    GPUs are handed out in turns. With `gpus_per_run` below 1 so many runs share one, with 1 or more
    each has so many for itself. There are no more runs than that allows, and that many by default.
    """
    check_share(gpus_per_run)
    if gpus_per_run is None:
        workers = workers or max(1, len(found))
        shares = [[gpu] for gpu in found]
        shares = list(itertools.islice(itertools.cycle(shares), workers)) if found else []
    elif len(found) < gpus_per_run:
        raise SweepError(f"--gpus-per-run {gpus_per_run}: this machine has {len(found)} GPUs")
    elif gpus_per_run < 1:
        shares = [[gpu] for _ in range(int(1 / gpus_per_run + 1e-9)) for gpu in found]
    else:
        size = int(gpus_per_run)
        shares = [found[i : i + size] for i in range(0, len(found) - size + 1, size)]
    count = min(workers or len(shares), len(shares)) if shares else workers
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    threads = str(max(1, cores // count))
    return [
        {"OMP_NUM_THREADS": threads} | ({"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {})
        for share in (shares[:count] or [[]] * count)
    ]


def launcher_of(group: str) -> int | None:
    """The process that holds the group's lock."""
    with suppress(OSError, ValueError), Path(RUNS, group, ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return int(file.read())
    return None


@contextmanager
def locked(group: str):
    """Only one launcher at a time works on a group; its process id is in the lock."""
    path = Path(RUNS, group, ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise SweepError(f"{group} is being launched by process {file.read()}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def end_leftover(variant: Variant) -> None:
    """A run that has outlived its launcher, if it still is that run."""
    if pid := process_of(variant):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + GRACE
        while process_of(variant) and time.monotonic() < deadline:
            time.sleep(POLL)


def process_of(variant: Variant) -> int | None:
    """The process on this machine that runs `variant` now; ids are used again, so it looks."""
    status = variant.status
    pid = status.get("pid")
    if status.get("state") != "running" or status.get("host") != os.uname().nodename:
        return None
    try:
        if sys.platform != "linux":
            os.kill(pid, 0)
        elif Path(os.readlink(f"/proc/{pid}/cwd")) != variant.folder:
            return None
        return pid
    except (OSError, TypeError):
        return None


def run_local(sweep: Sweep, todo: list[Variant], workers: list[dict]) -> None:
    """Runs `todo`, as many at a time as there are workers; whatever ends this ends them."""
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # a thread beside fork
    queue, running = list(todo), {}
    finished = len(sweep.variants) - len(todo)
    with tqdm.tqdm(total=len(sweep.variants), initial=finished, unit="variant") as bar:
        try:
            while queue or running:
                for slot, environment in enumerate(workers):
                    if queue and slot not in running:
                        variant = queue.pop(0)
                        try:
                            running[slot] = variant, start(variant, environment)
                        except (OSError, ValueError) as error:  # no disk, no memory, no such words
                            fail(variant, error)
                            bar.write(f"failed: {variant.name}, {one_line(error)}")
                            bar.update()
                for slot, (variant, child) in list(running.items()):
                    if child.poll() is not None:
                        end_group(child, 0)  # helpers that it has left
                        state = finish(variant, child.returncode)
                        del running[slot]
                        if state != "finished":
                            bar.write(f"{state}: {variant.name}, {variant.describe(sweep.varying)}")
                        bar.update()
                time.sleep(POLL)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # the second Ctrl-C must not prevent this
            for _, child in running.values():
                with suppress(ProcessLookupError):
                    child.terminate()  # the scripts take it like Ctrl-C
            deadline = time.monotonic() + GRACE
            for variant, child in running.values():
                end_group(child, deadline - time.monotonic())
                finish(variant, child.returncode, stopped=True)


# On a Ray cluster


def job_server(address: str | None):
    """Ray's client for jobs at `address`; SweepError if there is no Ray, here or there."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise SweepError("no Ray here: pip install -r requirements/requirements-ray.txt") from None
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):  # Ray obeys them rather than us
        if os.environ.get(name, address) != address and address != "auto":
            raise SweepError(f"{name} is set to another cluster than --address")
    if found := re.search(r"^(?:\w+://)?([\w.-]+):(\d+)", address or ""):
        try:  # Ray would ask again and again, for a minute
            socket.create_connection((found[1], int(found[2])), timeout=5).close()
        except OSError as error:
            raise SweepError(f"no Ray cluster at {address}: {error.strerror or error}") from None
    try:
        return JobSubmissionClient(address)
    except Exception as error:  # ConnectionError, ValueError, its own: all say that nobody answers
        raise SweepError(f"no Ray cluster at {address}: {one_line(error)}") from None


def is_over(job) -> bool:
    return job.status.is_terminal()


def ray_jobs(client, prefix: str = "") -> list:
    """The cluster's sweeps that are called so, oldest first."""
    found = [job for job in client.list_jobs() if (job.metadata or {}).get("sweep")]
    found = [job for job in found if job.submission_id.startswith(prefix)]
    return sorted(found, key=lambda job: job.start_time or 0)


def run_ray(sweep: Sweep, todo: list[Variant], options: argparse.Namespace) -> str:
    """Hands `todo` to the cluster and follows it to its end -> the job's state.

    The job itself asks for no resources: it starts at once and its tasks, a variant each, wait for
    theirs. It holds the group's lock and outlives this process, which may then follow it again.
    """
    check_share(options.gpus_per_run)
    client = job_server(options.address)
    mine = [job for job in ray_jobs(client) if job.metadata["sweep"] == sweep.group]
    alive = [job for job in mine if not is_over(job)]
    if alive:
        name = alive[-1].submission_id
        print(f"{name} is at work already: following it")
        return follow_job(client, name)
    question = f"Launch {len(todo)} variants on {client.get_address()}?"
    if not (options.yes or confirm(question)):
        raise SweepError("nothing launched")
    here = Path(RUNS).resolve()
    name = f"{sweep.group}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    token = here / sweep.group / f".{name}"  # whoever sees it works on this file system
    spec = {"group": sweep.group, "runs": str(here), "token": str(token), "root": str(ROOT)}
    spec |= {"gpus": options.gpus_per_run or 0, "cpus": options.cpus_per_run}
    spec["variants"] = [[variant.script, variant.params] for variant in todo]
    program, runtime = [sys.executable, str(ROOT / "leanrl/sweep.py")], {}
    with tempfile.TemporaryDirectory() as parcel:
        if options.ship:
            spec["token"] = ""
            shutil.copytree(
                ROOT / "leanrl",
                Path(parcel, "leanrl"),
                ignore=shutil.ignore_patterns("__pycache__", "runs"),
            )
            program, runtime = ["python", "leanrl/sweep.py"], {"working_dir": parcel}
        else:
            token.parent.mkdir(parents=True, exist_ok=True)
            token.touch()
        packed = base64.b64encode(zlib.compress(json.dumps(spec).encode())).decode()
        deadline = time.monotonic() + GRACE
        while True:
            try:
                client.submit_job(
                    entrypoint=shlex.join([*program, "drive"]),
                    submission_id=name,
                    metadata={"sweep": sweep.group, "variants": str(len(todo))},
                    runtime_env=runtime | {"env_vars": {"LEANRL_SWEEP": packed}},
                )
                break
            except Exception as error:
                if "try again later" not in str(error) or time.monotonic() > deadline:
                    token.unlink(missing_ok=True)
                    reason = one_line(error)
                    raise SweepError(f"the cluster refuses the job: {reason}") from None
                time.sleep(1)  # a head that has just started
    print(f"job {name}; python leanrl/sweep.py logs -f {name} --address {options.address}")
    return follow_job(client, name)


def follow_job(client, name: str) -> str:
    """Prints what the job prints until it ends -> its state."""
    printed, misses = 0, 0
    while True:
        try:
            job = client.get_job_info(name)  # before the last look at what it says
            said = client.get_job_logs(name)
        except Exception as error:  # a hiccup of the network, or the end of the cluster
            misses += 1
            if misses > 10:
                raise SweepError(f"{name}: the cluster is silent: {one_line(error)}") from None
        else:
            misses = 0
            print(said[printed:], end="", flush=True)
            printed = len(said)
            if is_over(job):
                return job.status.value
        time.sleep(1)


def drive(options: argparse.Namespace) -> int:
    """On the cluster: the job, which hands out a task per variant and takes in what it leaves."""
    import ray

    if "LEANRL_SWEEP" not in os.environ:
        raise SweepError("drive is what a job on a cluster does; you want: run --launcher ray")
    spec = json.loads(zlib.decompress(base64.b64decode(os.environ.pop("LEANRL_SWEEP"))))
    shared = sees(spec["token"])
    runs = Path(spec["runs"]) if shared else kept_runs()
    runs.mkdir(parents=True, exist_ok=True)
    os.chdir(runs.parent)  # where RUNS is
    ray.init(address="auto", log_to_driver=False)
    found = ray.cluster_resources().get("GPU", 0)
    if spec["gpus"] > found:  # an autoscaler may bring some
        print(f"the cluster has {found:g} GPUs now: runs wait for {spec['gpus']:g}", flush=True)
    task = ray.remote(num_cpus=spec["cpus"], num_gpus=spec["gpus"], max_retries=RETRIES)(run_task)
    variants = [Variant(spec["group"], script, params) for script, params in spec.pop("variants")]
    with locked(spec["group"]):
        variants = [v for v in variants if v.status.get("state") != "finished"]  # by now
        waiting = {task.remote(spec, v.script, v.params): v for v in variants}
        states = []
        while waiting:
            (ended,), _ = ray.wait(list(waiting))
            variant = waiting.pop(ended)
            try:
                state, archive = ray.get(ended)
                if archive:
                    unpack(archive, variant)
            except (ray.exceptions.RayError, OSError, tarfile.TarError) as error:
                state = "failed"  # its worker died, again and again, or its files do not fit in
                fail(variant, error)
            states.append(state)
            print(f"{len(states)}/{len(variants)} {state}: {variant.name}", flush=True)
    if shared:
        Path(spec["token"]).unlink(missing_ok=True)
    return int(states.count("finished") < len(states))


def sees(token: str) -> bool:
    """Whether this process works on the file system of the launcher."""
    return bool(token) and Path(token).exists()


def kept_runs() -> Path:
    """Where a head keeps runs/ of sweeps that were launched elsewhere."""
    return Path.home() / "leanrl" / RUNS


def run_task(spec: dict, script: str, params: dict) -> tuple[str, bytes | None]:
    """A task: runs a variant on whatever machine this is -> its state and, if needed, its files."""
    variant, shared = Variant(spec["group"], script, params), sees(spec["token"])
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(spec["runs"]) if shared else Path(scratch).resolve()
        variant.folder = base / variant.group / variant.id
        end_leftover(variant)  # of the worker that died before this one
        environment = {} if spec["gpus"] else {"CUDA_VISIBLE_DEVICES": ""}  # no one's share
        child = start(variant, environment, Path(spec["root"]) if shared else Path.cwd())
        state = finish(variant, child.wait())
        end_group(child, 0)
        return state, None if shared else pack(variant.folder)


def pack(folder: Path) -> bytes:
    """The files below `folder` as a compressed archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    return content.getvalue()


def unpack(archive: bytes, variant: Variant) -> None:
    """What `pack` made, into the variant's folder; nothing can land outside of it."""
    put_away(variant)
    variant.folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as content:
        content.extractall(variant.folder, filter="data")


# Commands


def confirm(question: str) -> bool:
    """Asks; Enter and y mean yes, the end of input means no."""
    try:
        return input(f"{question} [Y/n] ").strip().lower() in ("", "y", "yes")
    except EOFError:
        print()
        return False


def run(options: argparse.Namespace) -> int:
    sweep = load(options.sweep, options.max_variants)
    if options.dry_run:
        print(f"{len(sweep.variants)} variants")
        for variant in sweep.variants:
            print(shlex.join(variant.command))
        return 0
    if options.launcher == "ray":
        todo = left(sweep, options)
        state = run_ray(sweep, todo, options) if todo else "SUCCEEDED"
        if not (todo and options.ship):
            return report(sweep, options)
        print(f"{state}; python leanrl/sweep.py sync {sweep.group} --address {options.address}")
        print("when nothing else runs there: ray down leanrl/sweeps/cluster.yaml")
        return int(state != "SUCCEEDED")
    workers = slots(options.workers, options.gpus_per_run, gpus())
    with locked(sweep.group):
        todo = left(sweep, options)
        for variant in todo:
            end_leftover(variant)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, signal.default_int_handler)
        if todo:
            run_local(sweep, todo, workers)
    return report(sweep, options)


def left(sweep: Sweep, options: argparse.Namespace) -> list[Variant]:
    """The variants that are to run now."""
    again = (None, "stopped", "running") + (("failed",) if options.retry_failed else ())
    todo = [v for v in sweep.variants if v.status.get("state") in again]
    done = len(sweep.variants) - len(todo)
    print(f"{len(sweep.variants)} variants, {done} done before, in {RUNS}/{sweep.group}/")
    return todo


def report(sweep: Sweep, options: argparse.Namespace) -> int:
    """Says what is not finished; the exit status."""
    states = {v.id: v.status.get("state", "not started") for v in sweep.variants}
    counts = Counter(states.values())
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    for variant in sweep.variants:
        if states[variant.id] != "finished":
            print(f"{states[variant.id]}: {variant.name}, {variant.describe(sweep.varying)}")
            if line := last_line(variant):
                print(f"    {line}")
    if "failed" in counts and not options.retry_failed:
        print(f"once more: python leanrl/sweep.py run {options.sweep} --retry-failed")
    return int(set(counts) != {"finished"})


def known() -> list[Variant]:
    """Every variant in runs/, in the order in which they started."""
    found = []
    for path in Path(RUNS).glob("*/*/variant.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads(path.read_text())
            variant = Variant(path.parts[-3], about["script"], dict(about["params"]))
            variant.folder, variant.id = path.parent.resolve(), path.parent.name
            found.append(variant)
    return sorted(found, key=lambda variant: variant.status.get("started", 0))


def named(name: str) -> list[Variant]:
    """The variants whose GROUP/ID, or ID alone, starts with `name`."""
    return [v for v in known() if v.name.startswith(name) or v.id.startswith(name)]


def state_of(variant: Variant) -> str:
    """The state in status.json, unless the process is gone."""
    status = variant.status
    state, here = status.get("state", "unknown"), status.get("host") == os.uname().nodename
    return "lost" if state == "running" and here and not process_of(variant) else state


def jobs(options: argparse.Namespace) -> int:
    for variant in known():
        status = variant.status
        seconds = status.get("ended", time.time()) - status.get("started", time.time())
        values = " ".join(variant.flags)
        script = Path(variant.script).stem
        print(f"{variant.name}  {state_of(variant):8}  {seconds:8.0f} s  {script} {values}")
    if options.address:
        for job in ray_jobs(job_server(options.address)):
            count = job.metadata.get("variants", "?")
            print(f"{job.submission_id}  {job.status.value.lower():8}  {count} variants, on Ray")
    return 0


def logs(options: argparse.Namespace) -> int:
    if options.address:
        client = job_server(options.address)
        found = ray_jobs(client, options.name)
        if len(found) == 1 and options.follow:
            follow_job(client, found[0].submission_id)
        elif len(found) == 1:
            print(client.get_job_logs(found[0].submission_id), end="")
        if len(found) == 1:
            return 0
    found = named(options.name)
    if len(found) != 1:
        names = ", ".join(variant.name for variant in found) or "none"
        raise SweepError(f"{options.name!r} must name one variant; it names {names}")
    (variant,) = found
    try:
        with (variant.folder / "stdout.log").open("rb") as log:
            while True:
                over = state_of(variant) != "running"  # before the last look at the file
                shutil.copyfileobj(log, sys.stdout.buffer)
                sys.stdout.flush()
                if over or not options.follow:
                    return 0
                time.sleep(0.2)
    except FileNotFoundError:
        raise SweepError(f"{variant.name} has printed nothing") from None


def stop(options: argparse.Namespace) -> int:
    client = job_server(options.address) if options.address else None
    on_ray = [j for j in ray_jobs(client, options.prefix) if not is_over(j)] if client else []
    groups = {job.metadata["sweep"] for job in on_ray}
    found = {v.name: v for v in named(options.prefix) if process_of(v)}
    found |= {v.name: v for v in known() if v.group in groups and state_of(v) == "running"}
    if not found and not on_ray:
        raise SweepError(f"nothing that runs on this machine is called {options.prefix!r}...")
    for job in on_ray:
        print(f"{job.submission_id}  a job on Ray, {job.metadata.get('variants', '?')} variants")
    for variant in found.values():
        print(f"{variant.name}  {Path(variant.script).stem} {' '.join(variant.flags)}")
    if not (options.yes or confirm(f"Stop {len(on_ray) or len(found)}?")):
        print("nothing stopped")
        return 1
    for variant in found.values():
        (variant.folder / "stop").touch()
    for group in {variant.group for variant in found.values()} - groups:
        if group.startswith(options.prefix):  # the whole sweep: what still waits, too
            if launcher := launcher_of(group):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(launcher, signal.SIGTERM)
    for variant in found.values():
        if variant.group not in groups and (pid := process_of(variant)):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
    for job in on_ray:
        client.stop_job(job.submission_id)
    for job in on_ray:
        while not is_over(client.get_job_info(job.submission_id)):
            time.sleep(POLL)
    deadline = time.monotonic() + GRACE
    for variant in (v for v in found.values() if v.group in groups):
        while process_of(variant) and time.monotonic() < deadline:
            time.sleep(POLL)  # its worker is gone: nobody else will say that it was stopped
        end_leftover(variant)
        if variant.status.get("state") == "running":
            variant.set_status(**variant.status | {"state": "stopped", "ended": time.time()})
    return 0


def sync(options: argparse.Namespace) -> int:
    """Fetches what the head of a cluster has kept of a group; what is finished here stays."""
    if "://" in options.address and not options.address.startswith("ray://"):
        raise SweepError("sync talks to Ray itself; with a forwarded port use: ray rsync-down")
    job_server(options.address)  # says in one line that there is none
    import ray

    ray.init(address=options.address, log_to_driver=False)
    on_head = ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})
    kept, fetched = ray.get(on_head(kept_variants).remote(options.group)), 0
    if not kept:
        raise SweepError(f"the head of {options.address} has kept nothing of {options.group!r}")
    for script, params in kept:
        variant = Variant(options.group, script, params)
        if variant.status.get("state") != "finished":
            unpack(ray.get(on_head(pack_kept).remote(options.group, variant.id)), variant)
            fetched += 1
            print(variant.name)
    print(f"{fetched} fetched, {len(kept) - fetched} were here")
    return 0


def kept_variants(group: str) -> list[tuple[str, dict]]:
    """On the head: script and parameters of what it has kept of a group."""
    files = sorted((kept_runs() / group).glob("*/variant.json"))
    found = [json.loads(file.read_text()) for file in files]
    return [(about["script"], about["params"]) for about in found]


def pack_kept(group: str, name: str) -> bytes:
    return pack(kept_runs() / group / name)


def doctor(options: argparse.Namespace) -> int:
    """Says of each thing that a sweep needs whether it is there."""
    problems = 0

    def check(what: str, look) -> object:
        nonlocal problems
        try:
            found = look()
            print(f"ok       {what}: {found}")
            return found
        except Exception as error:
            problems += 1
            reason = str(error) if isinstance(error, SweepError) else one_line(error)
            print(f"problem  {what}: {reason}")

    check("Python", lambda: sys.version.split()[0])
    check("GPUs here", lambda: ", ".join(gpus()) or "none")
    if options.address is None:
        print("Ray is not asked for: --address auto looks for a head on this machine")
        return 0

    def ray_version():
        try:
            import ray
        except ImportError:
            raise SweepError("none: pip install -r requirements/requirements-ray.txt") from None
        pin = (ROOT / "requirements/requirements-ray.txt").read_text()
        if f"=={ray.__version__}" not in pin:
            raise SweepError(f"{ray.__version__}, not the one of requirements-ray.txt")
        return ray.__version__

    def authentication():
        mode = os.environ.get("RAY_AUTH_MODE", "")
        if mode != "token":
            raise SweepError("RAY_AUTH_MODE is not token: whoever reaches the head can use it")
        return "RAY_AUTH_MODE=token"

    def resources():
        import ray

        ray.init(address=options.address, log_to_driver=False)
        found = ray.cluster_resources()
        ray.shutdown()
        return f"{found.get('CPU', 0):g} CPUs, {found.get('GPU', 0):g} GPUs"

    if check("Ray", ray_version):
        check("authentication", authentication)
        if check("job server", lambda: job_server(options.address).get_address()):
            check("jobs", lambda: f"{len(job_server(options.address).list_jobs())} known")
            check("resources", resources)
    return int(problems > 0)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("run", help="make all runs of a sweep, or those that are left")
    one.add_argument("sweep", type=Path, help="a Python file, see leanrl/sweeps/")
    one.add_argument("--dry-run", action="store_true", help="print the number and the commands")
    one.add_argument("--retry-failed", action="store_true", help="run what failed once more")
    one.add_argument("--max-variants", type=int, default=MOST_VARIANTS, help="refuse more")
    one.add_argument("--gpus-per-run", type=float, help="0.25: four runs share a GPU")
    one.add_argument("--workers", type=int, help="runs side by side (default: one per GPU, or 1)")
    one.add_argument("--launcher", choices=("local", "ray"), default="local")
    one.add_argument("--address", default="auto", help="Ray: of the cluster")
    one.add_argument("--cpus-per-run", type=float, default=1, help="Ray: cores of a run")
    one.add_argument("--ship", action="store_true", help="Ray: the cluster has its own files")
    one.add_argument("--yes", action="store_true", help="Ray: do not ask")
    one.set_defaults(call=run)
    one = commands.add_parser("jobs", help="all variants in runs/ and their states")
    one.add_argument("--address", help="also the jobs of this Ray cluster")
    one.set_defaults(call=jobs)
    one = commands.add_parser("logs", help="what a variant has printed")
    one.add_argument("--address", help="NAME may be a job of this Ray cluster")
    one.add_argument("name", help="GROUP/ID or the beginning of either")
    one.add_argument("-f", "--follow", action="store_true", help="and prints, until it ends")
    one.set_defaults(call=logs)
    one = commands.add_parser("stop", help="end runs")
    one.add_argument("prefix", help="beginning of GROUP/ID")
    one.add_argument("--yes", action="store_true", help="do not ask")
    one.add_argument("--address", help="also jobs of this Ray cluster")
    one.set_defaults(call=stop)
    one = commands.add_parser("sync", help="fetch what a Ray cluster has kept of a group")
    one.add_argument("group")
    one.add_argument("--address", default="auto", help="of the cluster, as ray.init takes it")
    one.set_defaults(call=sync)
    one = commands.add_parser("doctor", help="check Python, GPUs and, with --address, Ray")
    one.add_argument("--address")
    one.set_defaults(call=doctor)
    one = commands.add_parser("drive")  # what a job on the cluster does
    one.set_defaults(call=drive)
    options = parser.parse_args(words)
    if getattr(options, "workers", None) is not None and options.workers < 1:
        parser.error(f"--workers {options.workers}: at least 1")
    try:
        return options.call(options)
    except SweepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
