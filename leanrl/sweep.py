"""Sweeps: many variants of a script with one command, on this machine or on a Ray cluster.

    python leanrl/sweep.py run leanrl/sweeps/gae_lambda.py --dry-run
    python leanrl/sweep.py run leanrl/sweeps/gae_lambda.py --workers 2 [--gpus-per-run 0.25]
    python leanrl/sweep.py run leanrl/sweeps/gae_lambda.py --launcher ray --address auto
    python leanrl/sweep.py jobs                     what has run, runs, waits and failed
    python leanrl/sweep.py logs [-f] NAME           what a variant has printed
    python leanrl/sweep.py stop PREFIX              ends what is called so; asks first
    python leanrl/sweep.py sync GROUP --storage S   fetches what a cluster has left in storage

A sweep is a Python file of assignments, and every combination of its parameters is a variant:

    script = "leanrl/ppo_continuous_action_torchcompile.py"     # a list of several varies, too
    group = "gae_lambda"                            # folder in runs/; the file's name by default
    params = dict(
        num_steps=[1024, 2048],
        num_minibatches=lambda num_steps: [num_steps // 64],    # depends on another parameter
        compile=[True],
    )

A parameter is the script's flag of that name: 0.9 becomes --gae-lambda=0.9, True --compile, False
--no-compile. No shell sees the values; a file or folder that exists is given by its absolute path,
for a run works in its own. A variant is known by a hash of its script and parameters.
In runs/GROUP/ID/ it leaves variant.json (script, parameters, command), status.json (state, times),
stdout.log, runs/ (the run itself) and attempts/ (what former attempts have left). A run gets its
share of the cores as OMP_NUM_THREADS and, unless torch_threads is a parameter, as --torch-threads
if its script has this flag.

A second launch skips what is finished, starts what waits, was stopped or lost with its launcher;
what failed is named, and runs again with --retry-failed; with --again all run again, for instance
after a change of the script. One failure stops no other, nor does a reader of the output who leaves
(`| head`). Exit status 0 if all variants are finished, 1 if one is not, 2 if the sweep makes no
sense or runs/ cannot be written, 130 after Ctrl-C, which ends all runs on this machine first.

With --launcher ray the sweep becomes one job of the cluster, which asks for no resources, and every
variant a task of it, which waits for --cpus-per-run and --gpus-per-run. Ray ships the code. If the
cluster sees runs/ at the same path, all commands work as they do here. If it does not, name a
--storage that both reach (s3://bucket/runs, gs://bucket/runs): tasks leave their folders there, the
launcher or `sync` fetches them, and `ray job stop JOB` stops. The job goes on without its launcher:
Ctrl-C leaves it alone, and the same command, without --again, follows it. Runs never see Ray's
RAY_AUTH_TOKEN.
"""

import argparse
import asyncio
import ctypes
import graphlib
import hashlib
import inspect
import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs")
GRACE = 20  # seconds that a run has to close its files
POLL = 0.05  # seconds between two looks at the running ones
INTERRUPTS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # `main` takes each for Ctrl-C
# Bytes of a value: Linux takes 128 KiB in one argument, 2 MiB in all of them together.
LONGEST = 10_000
LEAST = {"workers": 1, "max_variants": 1, "gpus_per_run": 0, "cpus_per_run": 0}
MOST = 100_000  # of each of these options


class SweepError(Exception):
    """Something the user can mend, in one line."""


def say(text: str, end: str = "\n", file=None) -> bool:
    """Prints `text` -> whether that worked. A reader who has gone or a full disk ends no run."""
    file = file or sys.stdout
    try:
        print(text, end=end, file=file, flush=True)
    except OSError as error:
        # What Python still holds back goes there at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        if not isinstance(error, BrokenPipeError):  # a full disk
            say(f"error: output is lost: {error}", file=sys.stderr)
        return False
    return True


def expand(params: dict, scripts: int = 1, most: float = math.inf) -> list[dict]:
    """Every combination of `params` {name: list, or function of others -> list}, in their order.

    Raises SweepError, before any is made, if `scripts` times their number exceeds `most`.
    """
    if not isinstance(params, dict) or not params:
        raise SweepError("params must be a dict with at least one parameter")
    needs = {}
    number = scripts
    for name, values in params.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise SweepError(f"{name!r} is no name of a parameter")
        needs[name] = []
        if callable(values):
            needs[name] += inspect.signature(values).parameters
        else:
            number *= len(values_of(name, values, {}))
        for need in needs[name]:
            if need not in params:
                raise SweepError(f"{name} needs {need!r}, which is no parameter")
    try:
        order = list(graphlib.TopologicalSorter(needs).static_order())
    except graphlib.CycleError as error:
        circle = " needs ".join(reversed(error.args[1]))
        raise SweepError(f"parameters in a circle: {circle}") from None
    variants = [dict.fromkeys(params)]  # keeps their order
    for name in order:
        longer = []
        for variant in variants:
            inputs = {need: variant[need] for need in needs[name]}
            values = values_of(name, params[name], inputs)
            if scripts * (len(longer) + len(values)) > most:
                if any(map(callable, params.values())):
                    number = f"more than {most}"
                raise SweepError(f"{number} variants, {most} at most; --max-variants allows more")
            longer += [variant | {name: value} for value in values]
        variants = longer
    return variants


def values_of(name: str, values, inputs: dict) -> list:
    """The list that `values` is or, called with `inputs`, returns."""
    if callable(values):
        try:
            values = values(**inputs)
        except (Exception, SystemExit) as error:
            raise SweepError(f"{name}: its function fails: {error!r}") from None
    if not isinstance(values, list) or not values:
        raise SweepError(f"{name} is {values!r}, not a list with at least one value")
    values = [value.item() if hasattr(value, "item") else value for value in values]  # NumPy's
    seen = set()
    for value in values:
        if not isinstance(value, bool | int | float | str | None):
            raise SweepError(f"{name} has {value!r}: only numbers, text, True, False and None")
        try:
            word = str(value).encode()
        except ValueError as error:  # half of a surrogate pair, thousands of digits
            raise SweepError(f"{name} has a value that is no text: {error}") from None
        if len(word) > LONGEST:
            raise SweepError(f"{name} has a value of {len(word)} bytes, {LONGEST} at most")
        infinite = isinstance(value, float) and not math.isfinite(value)
        if infinite or b"\0" in word:
            raise SweepError(f"{name} has {value!r}, which is not finite or has a zero byte")
        if repr(value) in seen:  # True, 1 and 1.0 are three values
            raise SweepError(f"{name} has {value!r} twice")
        seen.add(repr(value))
    return values


def load(path: Path, most: int) -> list["Variant"]:
    """The variants of the sweep in the file at `path`, `most` of them at most."""
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # sys.exit(0) would look like success
        raise SweepError(f"{path}: {type(error).__name__}: {error}") from None
    if not {"script", "params"} <= names.keys():
        raise SweepError(f"{path} must assign script and params")
    group = names.get("group", path.stem)
    if not isinstance(group, str) or not re.fullmatch(r"\w[\w.-]*", group):
        raise SweepError(f"group {group!r}: only letters, digits, _, - and .")
    scripts = names["script"]
    if not isinstance(scripts, list):
        scripts = [scripts]
    for script in values_of("script", scripts, {}):
        file = Path(os.path.realpath(f"{ROOT}/{script}"))  # behind all links
        if ROOT not in file.parents or not file.is_file():
            raise SweepError(f"script {script!r}: no such file in the repository {ROOT}")
    combinations = expand(names["params"], len(scripts), most)
    return [Variant(group, script, params) for script in scripts for params in combinations]


class Record:
    """A variant as its folder in runs/ shows it, whatever has become of the files there."""

    def __init__(self, folder: Path):
        self.id = folder.name
        self.name = f"{folder.parent.name}/{self.id}"
        self.folder = folder.resolve()
        path = folder / "variant.json"
        self.command = read_json(path, command=str).get("command", f"damaged: {path}")

    @property
    def status(self) -> dict:
        return read_json(self.folder / "status.json", state=str, started=float, ended=float)

    @property
    def state(self) -> str:
        """waiting, running, stopping, finished, failed, stopped, or lost with its launcher.

        With --storage, on the cluster until `sync` has fetched it. Without a status.json, unknown;
        with one that cannot be read, damaged and the file's name.
        """
        state = self.status.get("state", "unknown")
        if state in ("running", "stopping"):  # who gets the lock sees that no launcher holds it
            with suppress(SweepError, OSError), lock(self.folder.parent, shared=True):
                return "lost"
        return state

    def update(self, **changes) -> None:
        write_json(self.folder / "status.json", self.status | changes)


class Variant(Record):
    """One combination: a script and its parameters."""

    def __init__(self, group: str, script: str, params: dict, runs: Path = RUNS):
        self.group = group
        self.script = script
        self.params = params
        self.flags = []  # each a single word, whatever the value holds
        for name, value in params.items():
            flag = name.replace("_", "-")
            if isinstance(value, str) and "/" in value and os.path.exists(value):
                value = os.path.abspath(value)  # a run works in a folder of its own
            if isinstance(value, bool):
                self.flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                self.flags.append(f"--{flag}={value}")
        text = json.dumps([script, sorted(params.items())])
        super().__init__(runs / group / hashlib.sha256(text.encode()).hexdigest()[:10])
        self.command = shlex.join(["python", script, *self.flags])

    def enqueue(self) -> None:
        put_away(self.folder)
        about = {"script": self.script, "params": self.params, "command": self.command}
        write_json(self.folder / "variant.json", about)
        write_json(self.folder / "status.json", {"state": "waiting"})


def read_json(path: Path, **kinds: type) -> dict:
    """The object in the file, {} if there is no file; if it is damaged, a state that names it.

    What the object has under the names of `kinds` must be of these types.
    """
    try:
        content = json.loads(path.read_text())
        for name, kind in kinds.items():
            if not isinstance(content.get(name, kind()), kind):
                raise ValueError(name)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError):
        return {"state": f"damaged: {path}"}
    return content


def write_json(path: Path, content: dict) -> None:
    """All or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def put_away(folder: Path) -> None:
    """Moves what a former attempt has left into attempts/N, the first N that is free."""
    if not (folder / "stdout.log").exists():
        return
    number = 1
    while (folder / f"attempts/{number}").exists():
        number += 1
    there = folder / f"attempts/{number}"
    there.mkdir(parents=True)
    for name in ("runs", "status.json", "stdout.log"):
        with suppress(FileNotFoundError):
            (folder / name).replace(there / name)


def lock(folder: Path, shared: bool = False):
    """The open file that holds the lock of a group's folder; SweepError if a launcher has it."""
    import fcntl  # which Windows lacks

    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+")  # NFSv4 shares a lock only on a file open for reading
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SweepError(f"{folder.name} has a launcher at work already") from None
    return file


def start(variant: Variant, environment: dict, root: Path) -> subprocess.Popen:
    """A process, leader of its own group, that runs `variant` in its folder, from `root`'s code."""
    put_away(variant.folder)
    script = os.path.relpath(root / variant.script, variant.folder)
    flags = share_of_cores(variant, environment, root) + variant.flags
    inherited = dict(os.environ)
    inherited.pop("RAY_AUTH_TOKEN", None)
    if paths := inherited.get("PYTHONPATH"):
        paths = [os.path.abspath(path) for path in paths.split(os.pathsep)]
        inherited["PYTHONPATH"] = os.pathsep.join(paths)
    libc = ctypes.CDLL(None)

    def begin():
        if sys.platform == "linux":
            libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a launcher's death ends its runs
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)

    # Before the process begins, so that a `stop` that comes while it does is not written over.
    variant.update(state="running", started=time.time())
    try:
        with (variant.folder / "stdout.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-u", script, *flags],
                cwd=variant.folder,
                env=inherited | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=begin,
            )
    except BaseException:  # Ctrl-C, too
        variant.update(state="stopped", ended=time.time())
        raise


def share_of_cores(variant: Variant, environment: dict, root: Path) -> list[str]:
    """The flag that tells a script its share, if its Args have one that `params` do not set."""
    threads = environment.get("OMP_NUM_THREADS")
    if not threads or "torch_threads" in variant.params:
        return []
    with suppress(OSError):  # it has been deleted, as Python is about to say
        if b"torch_threads:" in (root / variant.script).read_bytes():
            return [f"--torch-threads={threads}"]
    return []


@contextmanager
def uninterrupted():
    """Ctrl-C and its like count afterwards."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def finish(variant: Variant, child: subprocess.Popen, deadline: float | None = None) -> str:
    """Records how a run ended -> its state.

    With a `deadline` it was told to stop: it has until then, and is killed.
    """
    if deadline is not None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # helpers that it has left, too
    status = child.wait()
    state = "failed" if status else "finished"
    if status and deadline is not None:  # with 0 it had finished before
        state = "stopped"
    variant.update(state=state, exit_status=status, ended=time.time())
    return state


def run_all(todo: list[Variant], environments: list[dict], root: Path) -> None:
    """Runs `todo`, one at a time in each of `environments`; whatever ends this ends them."""
    queue = list(todo)
    running = {}
    try:
        while queue or running:
            for slot, environment in enumerate(environments):
                while queue and slot not in running:
                    variant = queue.pop(0)
                    if variant.status.get("state") != "stopped":  # before its turn
                        with uninterrupted():  # or a process that is not in `running` yet goes on
                            running[slot] = variant, start(variant, environment, root)
            for slot, (variant, child) in list(running.items()):
                deadline = None
                # as the command `stop` has asked, which may have seen it wait
                if variant.status.get("state") in ("stopping", "stopped"):
                    child.terminate()  # the scripts take it like Ctrl-C
                    deadline = time.monotonic() + GRACE
                if deadline or child.poll() is not None:
                    state = finish(variant, child, deadline)
                    del running[slot]  # no sooner: a Ctrl-C while it ends must find it there
                    say(f"{state}: {variant.name}")
            if running:
                time.sleep(POLL)
    except BaseException:
        for number in INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)  # the second Ctrl-C must not prevent this
        told = [child for _, child in running.values() if child.poll() is None]
        for child in told:
            child.terminate()
        deadline = time.monotonic() + GRACE
        for variant, child in running.values():
            with suppress(OSError):  # a full disk must not save the others
                finish(variant, child, deadline if child in told else None)
        raise


def gpus() -> list[str]:
    """The names by which CUDA_VISIBLE_DEVICES knows this machine's GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    command = ["nvidia-smi", "-L"]
    with suppress(OSError, subprocess.CalledProcessError):
        listed = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
        return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)
    return []


def slots(workers: int | None, gpus_per_run: float | None, found: list[str]) -> list[dict]:
    """The environment of each of `workers` runs side by side: its share of cores and GPUs.

    GPUs are handed out in turns. With `gpus_per_run` below 1 so many runs share one, else each has
    so many for itself. There are no more runs than that allows, and that many by default.
    """
    if gpus_per_run is None:
        shares = found or [""]
        if workers:
            shares = shares * workers
    elif not 0 < gpus_per_run <= len(found) or gpus_per_run > 1 and gpus_per_run % 1:
        allowed = f"below 1 or whole, of the {len(found)} GPUs here"
        raise SweepError(f"--gpus-per-run {gpus_per_run}: {allowed}")
    elif gpus_per_run < 1:
        shares = found * int(1 / gpus_per_run + 1e-9)
    else:
        size = int(gpus_per_run)
        starts = range(0, len(found) - size + 1, size)
        shares = [",".join(found[i : i + size]) for i in starts]
    shares = shares[:workers]
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # Linux's
        cores = len(os.sched_getaffinity(0))  # that this process may use
    threads = max(1, cores // len(shares))
    environments = []
    for share in shares:
        environment = {"OMP_NUM_THREADS": str(threads)}
        if share:
            environment["CUDA_VISIBLE_DEVICES"] = share
        environments.append(environment)
    return environments


def launch_on_ray(todo: list[Variant], options: argparse.Namespace) -> None:
    """Hands `todo` to the cluster as one job, or finds that job at work, and follows it.

    The job itself asks for no resources: it starts at once and its tasks, a variant each, wait for
    theirs. It outlives this process, which may then follow it again.
    """
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(options.address)
    except Exception as error:  # Ray raises many kinds
        raise SweepError(f"--address {options.address}: {error}") from None
    for job in client.list_jobs():
        sweep = (job.metadata or {}).get("sweep")
        if sweep == options.group and not job.status.is_terminal():
            say(f"job {job.submission_id} is at work already: following it")
            return follow(client, job.submission_id)
    if not options.yes and not confirm(f"Launch {len(todo)} variants on {client.get_address()}?"):
        raise SweepError("nothing launched")
    # A launcher on this machine may run the same variants: their files are its. `drive` takes the
    # lock for itself, so it must be free again.
    with lock(RUNS / options.group):
        for variant in todo:
            variant.enqueue()
            if options.storage:  # or `sync` would take a former attempt for this one
                empty_in_storage(options.storage, variant)
                variant.update(state="on the cluster")
    spec = {
        "runs": str(RUNS.resolve()),
        "storage": options.storage,
        "resources": {"num_cpus": options.cpus_per_run, "num_gpus": options.gpus_per_run or 0},
        "variants": [
            {"group": each.group, "script": each.script, "params": each.params} for each in todo
        ],
    }
    runtime_env = {"working_dir": str(ROOT), "excludes": [".git", "runs"]}
    if paths := os.environ.get("PYTHONPATH"):
        runtime_env["env_vars"] = {"PYTHONPATH": paths}
    with tempfile.NamedTemporaryFile("w", dir=ROOT, prefix="sweep_", suffix=".json") as file:
        json.dump(spec, file)  # shipped with the code: many variants are too long for a command
        file.flush()
        command = ["python", "leanrl/sweep.py", "drive", Path(file.name).name]
        name = client.submit_job(
            entrypoint=shlex.join(command),
            metadata={"sweep": options.group},
            runtime_env=runtime_env,
        )
    say(f"job {name}, on {client.get_address()}")
    follow(client, name)


def follow(client, name: str) -> None:
    """Prints what the job prints until it ends, and how it ended."""

    async def tail():
        async for said in client.tail_job_logs(name):
            say(said, end="")

    asyncio.run(tail())
    job = client.get_job_info(name)
    say(f"job {name} {job.status.value.lower()}: {job.message}")


def drive(options: argparse.Namespace) -> int:
    """On the cluster: the job, which makes a task of every variant and waits for them."""
    import ray

    spec = json.loads(Path(options.spec).read_text())
    variants = [Variant(**each, runs=Path(spec["runs"])) for each in spec["variants"]]
    ray.init(address="auto")
    task = ray.remote(**spec["resources"], max_retries=2)(run_task)
    with nullcontext() if spec["storage"] else lock(variants[0].folder.parent):
        waiting = {task.remote(variant, spec): variant for variant in variants}
        while waiting:
            ended, _ = ray.wait(list(waiting), timeout=1)
            for each in ended:
                name = waiting.pop(each).name
                try:
                    state = ray.get(each)
                except ray.exceptions.TaskCancelledError:
                    state = "stopped"
                except ray.exceptions.RayError as error:  # its worker died, again and again
                    state = f"lost ({getattr(error, 'cause', error)!r})"
                say(f"{len(variants) - len(waiting)}/{len(variants)} {state}: {name}")
            for each, variant in waiting.items():
                # What has not begun may wait for a GPU that costs. Ray would interrupt a run.
                if variant.status == {"state": "stopped"}:
                    ray.cancel(each)
    return 0


def run_task(variant: Variant, spec: dict) -> str:
    """A task: runs a variant on whatever machine this is -> its state."""
    code = Path.cwd()  # where Ray has put the code
    environment = {"OMP_NUM_THREADS": str(max(1, int(spec["resources"]["num_cpus"])))}
    if not spec["resources"]["num_gpus"]:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # no one's share
    if not spec["storage"]:
        run_all([variant], [environment], code)
        return variant.status["state"]
    from pyarrow import fs

    storage, there = empty_in_storage(spec["storage"], variant)
    with tempfile.TemporaryDirectory() as scratch:
        variant.folder = Path(scratch).resolve()
        variant.enqueue()
        run_all([variant], [environment], code)
        copy_folder(str(variant.folder), there, fs.LocalFileSystem(), storage)
        return variant.status["state"]


def empty_in_storage(storage: str, variant: Variant) -> tuple:
    """The file system of `storage` and the variant's folder there, without a former attempt."""
    from pyarrow import fs

    system, there = fs.FileSystem.from_uri(f"{storage}/{variant.name}")
    system.create_dir(there)
    system.delete_dir_contents(there)
    return system, there


def copy_folder(source: str, target: str, source_fs, target_fs) -> None:
    """Copies status.json last: who sees it at `target` sees all files, even if a copy fails."""
    from pyarrow import fs

    found = source_fs.get_file_info(fs.FileSelector(source))
    for each in sorted(found, key=lambda each: each.base_name == "status.json"):
        fs.copy_files(each.path, f"{target}/{each.base_name}", source_fs, target_fs)


def confirm(question: str) -> bool:
    """Asks; Enter and y mean yes, the end of input means no."""
    say(f"{question} [Y/n] ", end="")
    try:
        answer = input()
    except EOFError:
        return False
    return answer.strip().lower() in ("", "y", "yes")


def run(options: argparse.Namespace) -> int:
    for name, least in LEAST.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= MOST:
            flag = name.replace("_", "-")
            raise SweepError(f"--{flag} {value}: it must be at least {least}, at most {MOST}")
    variants = load(options.sweep, options.max_variants)
    options.group = variants[0].group
    if options.dry_run:
        say(f"{len(variants)} variants")
        for variant in variants:
            say(variant.command)
        return 0
    if options.storage:
        sync(options)
    on_ray = options.launcher == "ray"
    with nullcontext() if on_ray else lock(RUNS / options.group):
        over = {"finished", "failed"}
        if options.retry_failed:
            over = {"finished"}
        if options.again:
            over = set()
        todo = [variant for variant in variants if variant.status.get("state") not in over]
        say(f"{len(variants)} variants, {len(variants) - len(todo)} done before")
        for variant in todo:
            if "damaged" in variant.state:
                say(f"{variant.state}; it runs again")
        if on_ray and todo:
            launch_on_ray(todo, options)
        elif not on_ray:
            environments = slots(options.workers, options.gpus_per_run, gpus())
            for variant in todo:
                variant.enqueue()
            run_all(todo, environments, ROOT)
    if options.storage:
        sync(options)
    states = [variant.state for variant in variants]
    again = "; --retry-failed runs what failed once more" if "failed" in states else ""
    counts = [f"{count} {state}" for state, count in Counter(states).items()]
    say(", ".join(counts) + again)
    for variant, state in zip(variants, states, strict=True):
        if state != "finished":
            say(f"{state}: {variant.name}  {variant.command}")
            with suppress(OSError, IndexError):  # it has said nothing
                say(f"    {last_words(variant.folder / 'stdout.log')}")
    return int(set(states) != {"finished"})


def last_words(log: Path) -> str:
    """The last line with words; tyro says what is wrong with a flag in a box, above a hint."""
    text = log.read_text(errors="replace").partition("│ For full helptext")[0]
    lines = [line.strip("│ ") for line in text.splitlines()]
    return [line for line in lines if re.search(r"\w", line)][-1]


def known(prefix: str) -> list[Record]:
    """The variants in runs/ whose GROUP/ID or ID starts so."""
    found = []
    for path in sorted(RUNS.glob("*/*/variant.json")):
        record = Record(path.parent)
        if record.name.startswith(prefix) or record.id.startswith(prefix):
            found.append(record)
    return found


def jobs(options: argparse.Namespace) -> int:
    for variant in known(""):
        status = variant.status
        state = variant.state
        started = status.get("started", 0)
        last = time.time() if state in ("running", "stopping") else started  # unknown if lost
        seconds = status.get("ended", last) - started
        say(f"{variant.name}  {state:8} {seconds:8.0f} s  {variant.command}")
    return 0


def logs(options: argparse.Namespace) -> int:
    found = [v for v in known(options.name) if (v.folder / "stdout.log").exists()]
    if len(found) != 1:
        names = [variant.name for variant in found]
        raise SweepError(f"{options.name!r} must name one variant that ran; it names {names}")
    with (found[0].folder / "stdout.log").open(errors="replace", newline="") as log:
        while True:
            over = found[0].state not in ("running", "stopping")  # before the last look at it
            heard = say(log.read(), end="")
            if over or not options.follow or not heard:
                return int(not heard)
            time.sleep(POLL)


def stop(options: argparse.Namespace) -> int:
    """Tells those who run them, by status.json, and waits until they have ended."""
    told = {"waiting": "stopped", "running": "stopping", "stopping": "stopping"}
    found = []
    for variant in known(""):  # not by an ID alone: `stop a` would end some runs of every group
        if variant.name.startswith(options.prefix) and variant.state in told:
            found.append(variant)
    if not found:
        raise SweepError(f"nothing that runs or waits is called {options.prefix!r}...")
    for variant in found:
        say(f"{variant.name}  {variant.command}")
    if not options.yes and not confirm(f"Stop {len(found)}?"):
        say("nothing stopped")
        return 1
    for variant in found:
        state = variant.state
        if state in told:  # it has not ended meanwhile
            variant.update(state=told[state])
    while any(variant.state == "stopping" for variant in found):
        time.sleep(POLL)
    return 0


def sync(options: argparse.Namespace) -> int:
    """Fetches from storage what is not finished here."""
    from pyarrow import fs

    try:
        storage, there = fs.FileSystem.from_uri(f"{options.storage}/{options.group}")
    except ValueError as error:
        raise SweepError(f"--storage {options.storage}: {error}") from None
    for each in storage.get_file_info(fs.FileSelector(there, allow_not_found=True)):
        name = f"{options.group}/{each.base_name}"
        if Record(RUNS / name).state != "finished":
            (RUNS / name).mkdir(parents=True, exist_ok=True)
            copy_folder(each.path, str(RUNS / name), storage, fs.LocalFileSystem())
            say(f"fetched {name}")
    return 0


def main(words: list[str] | None = None) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("run", help="make all runs of a sweep, or those that are left")
    one.add_argument("sweep", type=Path, help="a Python file, see leanrl/sweeps/")
    one.add_argument("--dry-run", action="store_true", help="print the number and the commands")
    one.add_argument("--retry-failed", action="store_true", help="run what failed once more")
    one.add_argument("--again", action="store_true", help="run all, also what is finished")
    one.add_argument("--max-variants", type=int, default=20, help="refuse more")
    one.add_argument("--gpus-per-run", type=float, help="0.25: four runs share a GPU")
    one.add_argument("--workers", type=int, help="at a time")
    one.add_argument("--launcher", choices=("local", "ray"), default="local")
    one.add_argument("--address", default="auto", help="Ray: of the cluster")
    one.add_argument("--cpus-per-run", type=float, default=1, help="Ray: cores of a run")
    one.add_argument("--storage", help="Ray: where runs go if the cluster does not see runs/")
    one.add_argument("--yes", action="store_true", help="Ray: do not ask")
    commands.add_parser("jobs", help="all variants in runs/ and their states")
    one = commands.add_parser("logs", help="what a variant has printed")
    one.add_argument("name", help="GROUP/ID or the beginning of either")
    one.add_argument("-f", "--follow", action="store_true", help="and prints, until it ends")
    one = commands.add_parser("stop", help="end runs")
    one.add_argument("prefix", help="beginning of GROUP/ID")
    one.add_argument("--yes", action="store_true", help="do not ask")
    one = commands.add_parser("sync", help="fetch what a Ray cluster has left in storage")
    one.add_argument("group")
    one.add_argument("--storage", required=True, help="as of the command run")
    commands.add_parser("drive").add_argument("spec")  # what the job on a cluster does
    options = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup, SIGHUP is ignored
            signal.signal(number, signal.default_int_handler)
    functions = (run, jobs, logs, stop, sync, drive)
    calls = {function.__name__: function for function in functions}
    try:
        return calls[options.command](options)
    # runs/ is read-only, nobody is at --address, Ray is not there or hangs up
    except (SweepError, OSError, ImportError, RuntimeError) as error:
        say(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("interrupted; the same command, without --again, goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
