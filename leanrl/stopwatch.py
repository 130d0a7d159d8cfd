"""The region that every script carries: a stopwatch, and the run around a training.

    python leanrl/stopwatch.py --stamp      copy the fenced region into every script beside this one
    python leanrl/stopwatch.py --check      say which copies differ; exit status 1 if one does

Every script carries the region between the two fences, byte for byte, so that one file still runs
alone. Edit it here, never in a script, then stamp. What it imports stands at the top of a script.

The run, as a script sees it
    args = parse_args(Args)                 the flags; with --resume those of the checkpoint stay
    run = Run(args, device, steps_per_iteration, steady_after)
                                            counts run.step of run.total_steps
    run.restore(agent)["replay"]            what the checkpoint of args.resume holds besides the
                                            agent, its optimizers and the random generators
    run.open()                              makes run.dir and opens its records, which are written
                                            whatever ends the process, but for SIGKILL. From here on
                                            the first Ctrl-C or SIGTERM ends the run after its
                                            iteration, a second one the process
    while not run.ending:
        run.stage("simulation")             lasts until the next stage
        run.step += N                       environment steps, by the script
        run.tick()                          the end of an iteration
        run.log({"losses/qf_loss": loss})   a row: tensors of shape () or numbers, and the speed;
                                            raises FloatingPointError if one is not finite
        run.write({"charts/x": 1.0}, step)  numbers alone, at any step
        run.due(every, at_end)              whether it passed a multiple of `every` steps (0: never)
                                            or, if every > 0 or at_end, whether this is the end
        run.save(agent, replay=state)       checkpoint.pt, replaced as a whole; FloatingPointError,
                                            and the old one stays, if a number in it is not finite
    run.close()                             writes stages.json and prints it

The stopwatch alone, for any other program
    from stopwatch import Stopwatch         # or copy the class, and what it imports
    watch = Stopwatch(torch.device("cpu"), warmup_steps=1000)
    while env_steps < 10**6:
        watch.stage("simulation")
        ...
        watch.tick(env_steps)               # end of one iteration
    print(watch.measure())

Stages, the same in every script: simulation, inference, replay (rollout or replay storage,
sampling), backpropagation (all updates), logging, checkpoint (writing it) and evaluation;
`untracked` is what none of them covers. Others may be added: a name is enough. Evaluation is no
part of training: its time counts neither for the steady window nor for the warm-up. Begin stages on
the main thread, outside of compiled or captured callables.

The first tick with `env_steps >= warmup_steps` ends the warm-up (compilation, graph capture,
random exploration) and begins the steady window, which lasts until the end of the run or, with
--stopwatch trace, until the trace begins. That is after `trace_after` iterations of the window:
one takes the profiler's start, then `trace_iterations` are written in Chrome's format to
trace.json.gz, with a range "stopwatch:NAME" per stage and a range "ProfilerStep#N" per iteration.
plots/cross_stack.py reads it. With CUDA every 61st iteration has an event wherever a stage begins,
and ends with a wait for the device; nothing else in the loop waits for it, except where a row of
metrics is read.

What stages.json says; null is "not measured"
    sps               environment steps per second since construction, as CleanRL's charts/SPS
    sps_steady        environment steps per second of the steady window
    warmup_seconds    construction to the steady window; wall_seconds: construction to the end
    env_steps, iterations, seconds
                      of the steady window or, if the warm-up did not end (warmup_seconds is null),
                      of the run so far; without evaluation
    stages            seconds of them on the CPU. A wait for the GPU shows in the stage that waits,
                      so metrics are read in the stage whose work they report
    gpu_stages        seconds between CUDA events, from the samples to all iterations: the work that
                      a stage has launched, gaps included. Empty without CUDA

TensorBoard has the rest over time: charts/cpu_seconds is the processor time of the process so far,
user and system time of all its threads; charts/gpu_percent NVML's share of time with any kernel
running, 100 of which may be 1% of the chip. plots/utilization.py draws both.

After RL-Scope (Gleeson et al., "RL-Scope: Cross-Stack Profiling for Deep Reinforcement Learning
Workloads", MLSys 2021).
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

OPENING = b"# >>> run: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>\n"
CLOSING = b"# <<< run <<<\n"
NOT_SCRIPTS = ("export.py", "mujoco_worlds.py", "stopwatch.py", "sweep.py")


def find_region(source):
    """(begin, end) of the fenced region in the bytes `source`, both fences included.

    Raises ValueError unless there is one opening fence and, after it, one closing fence.
    """
    lines = source.splitlines(keepends=True)
    opens = [i for i, line in enumerate(lines) if line == OPENING]
    closes = [i for i, line in enumerate(lines) if line == CLOSING]
    if len(opens) != 1 or len(closes) != 1:
        raise ValueError(
            f"{len(opens)} opening and {len(closes)} closing fences instead of one each"
        )
    if opens[0] > closes[0]:
        raise ValueError("the closing fence stands before the opening one")
    return sum(map(len, lines[: opens[0]])), sum(map(len, lines[: closes[0] + 1]))


def write_atomically(path, content):
    """Replace the file at `path` by the bytes `content`; a crash leaves the old file or the new."""
    temporary = path.with_name(f".{path.name}.stamping")
    try:
        temporary.write_bytes(content)
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def stamp(folder, write=True):
    """Bring the region of `folder`/stopwatch.py into the scripts beside it; `write=False` compares.

    Returns {path: verdict}, a verdict being "same", "stamped", "differs" or "broken: why"; a broken
    script is left alone. Raises ValueError if the region of stopwatch.py itself is broken.
    """
    source = (Path(folder) / "stopwatch.py").read_bytes()
    region = slice(*find_region(source))
    verdicts = {}
    for path in sorted(Path(folder).glob("*.py")):
        if path.name in NOT_SCRIPTS:
            continue
        script = path.read_bytes()
        try:
            begin, end = find_region(script)
        except ValueError as problem:
            verdicts[path] = f"broken: {problem}"
            continue
        if script[begin:end] == source[region]:
            verdicts[path] = "same"
        elif write:
            write_atomically(path, script[:begin] + source[region] + script[end:])
            verdicts[path] = "stamped"
        else:
            verdicts[path] = "differs"
    return verdicts


def main(arguments=None, folder=Path(__file__).parent):
    """The command: 0 if every script carries the region afterwards, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Keep the region identical in every script.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--stamp", action="store_true", help="copy the region into every script")
    action.add_argument("--check", action="store_true", help="compare; exit 1 if a script differs")
    verdicts = stamp(folder, write=parser.parse_args(arguments).stamp)
    for path, verdict in verdicts.items():
        print(f"{path.name}: {verdict}")
    return int(any(verdict not in ("same", "stamped") for verdict in verdicts.values()))


if __name__ == "__main__":  # above the region, so that stamping needs no torch
    sys.exit(main())

# What the region needs, as every script imports it at its top.
import atexit  # noqa: E402
import copy  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import time  # noqa: E402
from collections import Counter  # noqa: E402
from contextlib import nullcontext, suppress  # noqa: E402
from itertools import count, pairwise  # noqa: E402
from time import perf_counter  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import tqdm  # noqa: E402
import tyro  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402


# >>> run: edit leanrl/stopwatch.py, then: python leanrl/stopwatch.py --stamp >>>
class Stopwatch:
    """Seconds per stage and steady steps/s; with CUDA also the GPU's seconds per stage, sampled."""

    def __init__(self, device, warmup_steps=0, trace=False, trace_after=500, trace_iterations=20):
        self.on_cuda = device.type == "cuda"
        self.backend = torch.get_device_module(device)
        self.warmup_steps = warmup_steps
        self.trace_after = trace_after if trace else 0  # iterations of the window
        self.plan = torch.profiler.schedule(wait=0, warmup=1, active=trace_iterations, repeat=1)
        self.warmup_seconds = self.profiler = self.sampling = None
        self.annotation = nullcontext()  # the profiler's, of the current stage
        self.current = "untracked"
        self.steps = 0
        self.born = self.last = perf_counter()
        self.begin_window()

    def begin_window(self):
        self.start = self.last
        self.first_step = self.steps
        self.seconds = Counter()
        self.gpu_seconds = Counter()
        self.iterations = self.samples = 0

    def stage(self, name):
        """Ends the current stage; this one lasts until the next one or the tick."""
        now = perf_counter()
        self.seconds[self.current] += now - self.last
        self.last = now
        if self.sampling:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((self.current, event))
        if self.profiler:
            self.annotation.__exit__(None, None, None)
            self.annotation = torch.profiler.record_function("stopwatch:" + name)
            self.annotation.__enter__()
        self.current = name

    def tick(self, steps):
        """Ends an iteration; `steps` counts the environment steps since construction."""
        self.stage("untracked")
        if self.sampling:
            self.backend.synchronize()
            self.samples += 1
            for (_, begin), (name, end) in pairwise(self.events):
                self.gpu_seconds[name] += begin.elapsed_time(end) / 1e3
        self.steps = steps
        self.iterations += 1
        if self.warmup_seconds is None and steps >= self.warmup_steps:
            self.warmup_seconds = self.measure()["seconds"]
            self.begin_window()
        elif self.profiler:
            self.profiler.step()
        elif self.warmup_seconds and self.iterations == self.trace_after:
            self.untraced = self.measure()
            self.profiler = torch.profiler.profile(schedule=self.plan)
            self.profiler.start()
        self.sampling = self.on_cuda and self.iterations % 61 == 0
        self.events = []

    def measure(self):
        """Of the steady window or, until the warm-up has ended, of the run so far."""
        if self.profiler:
            return self.untraced
        self.backend.synchronize()  # what is still queued belongs to it
        self.stage(self.current)
        steps = self.steps - self.first_step
        seconds = self.last - self.start - self.seconds["evaluation"]
        wall_seconds = self.last - self.born
        scale = self.iterations / max(self.samples, 1)  # a sample stands for so many iterations
        return {
            "sps": self.steps / wall_seconds,
            "sps_steady": self.warmup_seconds and steps / seconds,
            "warmup_seconds": self.warmup_seconds,
            "wall_seconds": wall_seconds,
            "env_steps": steps,
            "iterations": self.iterations,
            "seconds": seconds,
            "stages": dict(self.seconds),
            "gpu_stages": {name: scale * spent for name, spent in self.gpu_seconds.items()},
        }


class Run:
    """Directory, metrics, checkpoints and stopwatch of a training, which goes on until `ending`."""

    def __init__(self, args, device, steps_per_iteration, steady_after, **trace):
        """`steady_after`: environment steps from the first update until all is compiled."""
        # As they were given, for a loop may anneal them, and without NumPy's numbers
        self.flags = json.loads(json.dumps(vars(args), default=np.generic.item))
        self.steps_per_iteration = steps_per_iteration
        self.checkpoint = load_checkpoint(args.resume)
        self.start_step = self.step = self.checkpoint.get("global_step", 0)
        self.total_steps = args.total_timesteps // steps_per_iteration * steps_per_iteration
        warmup_steps = max(getattr(args, "learning_starts", 0) - self.step, 0) + steady_after
        self.watch = Stopwatch(device, warmup_steps, args.stopwatch == "trace", **trace)
        self.stage = self.watch.stage
        self.backends = {device.type: self.watch.backend, "cpu": torch}
        self.stopped = False
        self.ending = self.step >= self.total_steps

    def stop(self, number, frame):
        """The first signal ends the run after its iteration, a second one the process."""
        self.stopped = True
        signal.signal(number, signal.SIG_DFL)

    def open(self):
        """Makes the run directory; whatever ends the process, it leaves records there."""
        args = argparse.Namespace(**self.flags)
        if args.capture_video:
            import moviepy  # noqa: F401  # missing, it would end the first evaluation
        self.dir = Path(args.resume) if args.resume else make_directory(args)
        self.suffix = f"_{self.step}.json" if args.resume else ".json"
        config = {"args": self.flags, "command": " ".join(sys.argv)}
        config["versions"] = {"torch": torch.__version__}
        config["gpu"] = torch.cuda.get_device_name() if self.watch.on_cuda else None
        (self.dir / f"config{self.suffix}").write_text(json.dumps(config, indent=2))
        if args.track:
            import wandb

            wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                id=self.dir.name,
                resume="allow",
                config=config,
                sync_tensorboard=True,
            )
        self.writer = SummaryWriter(self.dir, purge_step=self.step + 1)
        self.bar = tqdm.tqdm(total=self.total_steps, initial=self.step, unit="step", leave=False)
        atexit.register(self.close)
        self.handlers = {}
        with suppress(ValueError):  # signals belong to the main thread
            for number in signal.SIGINT, signal.SIGTERM:
                self.handlers[number] = signal.signal(number, self.stop)

    def tick(self):
        """Ends an iteration; what comes after it knows whether it was the last one."""
        self.watch.tick(self.step - self.start_step)
        self.ending = self.stopped or self.step >= self.total_steps

    def due(self, every, at_end=False):
        """Whether the iteration passed a multiple of `every` steps (0: never), or was the last."""
        if self.ending:
            return at_end or every > 0
        return every > 0 and self.step % every < self.steps_per_iteration

    def log(self, metrics):
        """{tag: number or tensor ()} and the speed; a metric that is not finite ends the run."""
        self.stage("backpropagation")  # reading a tensor waits for the updates that are queued
        row = {tag: float(value) for tag, value in metrics.items()}
        self.stage("logging")
        for tag, value in row.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"step {self.step:,}: {tag} is {value}")
        row["charts/SPS"] = self.watch.measure()["sps"]
        row["charts/cpu_seconds"] = time.process_time()
        with suppress(Exception):  # without a GPU, or without nvidia-ml-py, which is optional
            row["charts/gpu_percent"] = torch.cuda.utilization()
        self.write(row)
        with suppress(OSError):  # nobody reads any more
            self.bar.update(self.step - self.bar.n)

    def write(self, row, step=None):
        """{tag: number} to TensorBoard; the progress bar shows the last return."""
        for tag, value in row.items():
            self.writer.add_scalar(tag, value, step or self.step)
            if tag.endswith("_return"):
                self.bar.set_postfix_str(f"{tag} {value:,.5g}", refresh=False)

    def save(self, agent, **state):
        """checkpoint.pt, with the dictionaries of tensors or numbers that are given by name."""
        for part in agent.state_dict(), *state.values():
            for name, value in part.items():
                if not torch.as_tensor(value).isfinite().all():
                    raise FloatingPointError(f"step {self.step:,}: {name} is not finite")
        state |= {"args": self.flags, "global_step": self.step, "agent": agent.state_dict()}
        state["optimizers"] = [optimizer.state_dict()["state"] for optimizer in agent.optimizers]
        state["generators"] = {name: x.get_rng_state() for name, x in self.backends.items()}
        partial = self.dir / "checkpoint.partial"
        torch.save(state, partial)
        partial.replace(self.dir / "checkpoint.pt")  # a crash leaves the old one or the new one

    def restore(self, agent):
        """Networks, optimizers and generators; learning rates stay flags -> the checkpoint."""
        checkpoint, self.checkpoint = self.checkpoint, None  # or its file would stay in memory
        agent.load_state_dict(checkpoint["agent"])
        for optimizer, state in zip(agent.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": copy.deepcopy(state)})
        for name in self.backends.keys() & checkpoint["generators"]:
            self.backends[name].set_rng_state(checkpoint["generators"][name])
        return checkpoint

    def close(self):
        """Writes the records, and prints the speed unless an error has ended the run."""
        atexit.unregister(self.close)
        report = self.watch.measure()
        steps = report["env_steps"] or 1
        (self.dir / f"stages{self.suffix}").write_text(json.dumps(report, indent=2))
        if self.watch.profiler:
            self.watch.profiler.stop()
            self.watch.profiler.export_chrome_trace(f"{self.dir}/trace.json.gz")
        self.writer.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if not self.ending:
            return
        with suppress(OSError):  # nobody reads any more
            self.bar.close()
            for name, seconds in report["stages"].items():
                print(f"{name:16}{1e6 * seconds / steps:12,.1f} us/step", file=sys.stderr)
            print(f"{report['sps_steady'] or math.nan:,.1f} steps/s, {self.dir}", file=sys.stderr)
        if self.stopped:
            raise SystemExit(f"interrupted after {self.step:,} steps")


def parse_args(kind):
    """The flags; with --resume, those that are not given are the checkpoint's."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--resume")
    resume = parser.parse_known_args()[0].resume
    return tyro.cli(kind, default=kind(**load_checkpoint(resume).get("args", {})))


def load_checkpoint(run_dir):
    return torch.load(f"{run_dir}/checkpoint.pt", map_location="cpu", mmap=True) if run_dir else {}


def make_directory(args):
    """runs/ENVIRONMENT__EXPERIMENT__SEED__SECOND, the first one that is free."""
    for second in count(int(time.time())):
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{second}"
        path = Path("runs", re.sub(r"[^\w.-]", "_", name))
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path


# <<< run <<<
