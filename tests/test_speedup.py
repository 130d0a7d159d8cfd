"""The speed-up table and what makes runs, with stand-ins for the scripts; the stopwatch's cost."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time

import overhead
import processes
import pytest
import run_dirs
import speedup
from conftest import ROOT
from fake_runs import (
    SCRIPT,
    config,
    machine,
    make_run,
    read_record,
    report,
    stages,
    write_events,
)


@pytest.fixture
def runs(tmp_path):
    """A folder with two runs each of three rows; the order of the numbers is that of the runs."""
    folder = tmp_path / "runs"
    for round_, factor in ((0, 1.0), (1, 1.5)):
        seed = round_ + 1
        make_run(folder, 9 + round_ * 90, config("baseline", seed), stages(80 * factor))
        make_run(folder, 10 + round_ * 90, config("eager", seed), stages(100 * factor))
        warmup = 30.0 - 20 * round_
        make_run(folder, 11 + round_ * 90, config("compile", seed), stages(200 * factor, warmup))
    return folder


def report_of(folder):
    """Of the runs in a folder."""
    out = folder.parent / "out"
    given = {
        "quick": False,
        "full": True,
        "only": None,
        "seeds": None,
        "steps": None,
        "limit": None,
    }
    options = argparse.Namespace(out=out, tiny=False, **given)
    found, _ = run_dirs.read_runs([folder])
    return speedup.report(found, [], options)


def tabulate(folder):
    """The rows of the table, by name."""
    assert report_of(folder) == 0
    return {row["row"]: row for row in read_record(folder.parent / "out/speedup")["rows"]}


# The table


def test_table_has_means_ranges_and_speedups(runs, capsys):
    rows = tabulate(runs)
    assert list(rows) == list(run_dirs.ROWS)
    steady = {"mean": 250.0, "median": 250.0, "min": 200.0, "max": 300.0}
    assert rows["compile"]["sps_steady"] == steady and rows["compile"]["seeds"] == [1, 2]
    assert [rows[row]["speedup"] for row in ("baseline", "eager", "compile")] == [1, 1.25, 2.5]
    assert rows["compile"]["sps"]["mean"] == 50 and len(rows["compile"]["runs"]) == 2
    printed = capsys.readouterr().out
    assert "2.50x" in printed and "Abacus" in printed and "c0ffee" in printed
    assert printed.count("skipped: no CUDA device") == 2
    line = f"| {SCRIPT} | compile | 250.0 | 200.0-300.0 | 2.50x | 30.0 | 10.0 | 50.0 | 2 |"
    assert line in (runs.parent / "out/speedup.md").read_text()


def test_rows_that_cannot_run_or_did_not_are_skipped(runs, tmp_path):
    rows = tabulate(runs)
    assert rows["cudagraphs"]["skipped"] == rows["compile+cudagraphs"]["skipped"]
    assert rows["cudagraphs"]["skipped"] == "no CUDA device"
    for number, row in enumerate(("baseline", "cudagraphs", "compile+cudagraphs")):
        make_run(tmp_path / "gpu", number, config(row, gpu="H"), stages(10 * (number + 1)))
    rows = tabulate(tmp_path / "gpu")
    assert rows["compile+cudagraphs"]["speedup"] == 3
    assert rows["eager"]["skipped"] == "no finished run"


def test_the_first_warm_up_is_that_of_the_first_run(tmp_path):
    for number, warmup in enumerate((20.0, 10.0, 30.0)):
        make_run(tmp_path / "runs", number, config("compile", number + 1), stages(10, warmup))
    rows = tabulate(tmp_path / "runs")
    assert rows["compile"]["warmup_seconds"] == {"first": 20.0, "best": 10.0}


def test_a_speedup_is_of_the_rounds_that_both_have(tmp_path):
    """In the third the machine was half as fast, and compile failed there: 2.4 without it."""
    speeds = {"baseline": (100, 100, 50), "compile": (200, 200)}
    for row, mine in speeds.items():
        for seed, speed in enumerate(mine, start=1):
            make_run(tmp_path / "runs", 10 * seed, config(row, seed), stages(speed))
    make_run(tmp_path / "runs", 40, config("eager", 4), stages(100))  # without a baseline
    rows = tabulate(tmp_path / "runs")
    found = [rows[row]["speedup"] for row in ("baseline", "eager", "compile")]
    assert found == [1, None, 2]


def test_speed_comes_from_runs_that_were_not_traced(runs):
    """Those that were traced are shorter."""
    traced = config("eager", 1, stopwatch="trace", total_timesteps=10)
    write_events(make_run(runs, 500, traced, stages(1)), [("charts/SPS", 10, 0.1, 1.0)])
    assert tabulate(runs)["eager"]["sps_steady"]["min"] == 100


def test_speedups_are_drawn(tmp_path, runs):
    found, _ = run_dirs.read_runs([runs])
    speedup.draw_speedups(speedup.summarize(found, list(run_dirs.ROWS)), found, tmp_path)
    drawn = (tmp_path / "speedup.svg").read_text()
    assert "2.50x" in drawn and "SAC" in drawn and (tmp_path / "speedup.png").exists()


# Making the runs, with stand-ins for the scripts

STAND_IN = """
import json, shutil, sys, time
from pathlib import Path
row, seed = "compile" if "--compile" in sys.argv else ROW, sys.argv[2]
if row == "compile" and seed == "2":
    print("what went wrong", file=sys.stderr)
    sys.exit(3)
path = Path("runs", f"{row}-{seed}__{time.time_ns()}")
path.mkdir(parents=True)
config = CONFIGS[row] | {"command": " ".join(sys.argv)}
if "trace" in sys.argv:
    config["args"] |= {"total_timesteps": 500}
    config["args"]["stopwatch"] = "trace"
    shutil.copytree(EVENTS, path, dirs_exist_ok=True)
(path / "config.json").write_text(json.dumps(config))
(path / "stages.json").write_text(json.dumps(STAGES))
print(f"80.0 steps/s, {path}")
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """A repository whose scripts only write a run directory, and `compile` fails in round 2."""
    root = tmp_path / "a place with spaces"
    (root / "leanrl").mkdir(parents=True)
    configs = {row: config(row) for row in ("baseline", "eager", "compile")}
    write_events(tmp_path / "events", [("charts/SPS", 500, 5, 1.0)])
    for row, suffix in (("baseline", ""), ("eager", run_dirs.VARIANT)):
        constants = f"ROW, CONFIGS, STAGES = {row!r}, {configs!r}, {stages(80.0)!r}\n"
        constants += f"EVENTS = {str(tmp_path / 'events')!r}"
        file = root / "leanrl" / f"{SCRIPT}{suffix}.py"
        file.write_text(f"{constants}\ntotal_timesteps: int = 1_000\n{STAND_IN}")
    for module in (speedup, processes):
        monkeypatch.setattr(module, "ROOT", root)
        monkeypatch.setattr(module, "this_machine", machine)
    monkeypatch.setattr(speedup, "draw_figures", lambda runs, rows, out, quick: None)
    return root


def counted(out):
    """The record, how many runs each row has, and their paths."""
    found = read_record(out / "speedup")
    rows = {row["row"]: row["runs"] for row in found["rows"] if "runs" in row}
    return found, {row: len(paths) for row, paths in rows.items()}, set(sum(rows.values(), []))


def test_a_failing_run_is_named_and_the_others_count(stand_ins, tmp_path, capsys):
    out = tmp_path / "out"
    assert speedup.main(["--quick", "--seeds", "2", "--out", str(out)]) == 1
    found, counts, paths = counted(out)
    assert counts == {"baseline": 2, "compile": 1}
    assert not found["traced"] and len(paths) == 3
    assert found["command"] == "python plots/measure/speedup.py --quick --seeds 2"
    assert found["machine"]["git_commits"] == ["c0ffee"]  # config.json does not have it
    assert found["machine"]["load_average_1min"] == {"min": 0.5, "max": 0.5}
    error = capsys.readouterr().err
    assert f"FAILED: {SCRIPT} compile seed 2" in error and "exit status 3" in error
    assert "what went wrong" in error
    assert len(list((out / "logs").glob(f"{SCRIPT}-compile-seed-2*.log"))) == 1


def test_the_full_protocol_goes_on_where_it_stopped(stand_ins, tmp_path, capsys):
    """Only what failed runs again, and what a changed script has made."""
    out = tmp_path / "out"
    call = ["--full", "--seeds", "2", "--out", str(out)]

    def counts():
        return len(list((stand_ins / "runs").iterdir())), capsys.readouterr().out.count("kept:")

    assert speedup.main(call) == 1 and counts() == (8, 0)  # 5 of 6 and a traced one per row
    found, rows, paths = counted(out)
    assert rows == {"baseline": 2, "eager": 2, "compile": 1}
    assert len(found["traced"]) == 3 and not paths & set(found["traced"])
    assert speedup.main(call) == 1 and counts() == (8, 8)
    variant = stand_ins / "leanrl" / f"{SCRIPT}{run_dirs.VARIANT}.py"
    variant.write_text(variant.read_text().replace("sys.exit(3)", "pass"))
    later = time.time() + 3600
    os.utime(variant, (later, later))
    assert speedup.main(call) == 0 and counts() == (14, 3)  # the baseline's three are kept
    assert speedup.main(call) == 0 and counts()[1] == 3  # still older than the script's new date


def test_runs_of_other_machines_and_versions_are_not_kept(stand_ins, tmp_path):
    call = ["--full", "--seeds", "1", "--only", "*baseline", "--out", str(tmp_path / "out")]
    assert speedup.main(call) == 0
    jobs = speedup.make_jobs([SCRIPT], ["baseline"], 1, "full")
    assert list(speedup.finished(jobs, machine())) == [jobs[0].name]
    for other in ({"gpu": "H"}, {"cpu": {"model": "X"}}, {"versions": {"torch": "2.14"}}):
        assert not speedup.finished(jobs, machine() | other)


def test_a_run_on_worlds_is_not_kept_when_the_worlds_have_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    (tmp_path / "leanrl").mkdir()
    for name in ("ppo_mujoco_worlds", "mujoco_worlds"):
        (tmp_path / f"leanrl/{name}.py").touch()
    made_by = config(script="ppo_mujoco_worlds")
    run = run_dirs.read_run(make_run(tmp_path / "runs", 1, made_by, stages(50.0)))
    commands = {"PPO": made_by["command"].split()}
    later = time.time() + 3600
    os.utime(run.path / "config.json", (later, later))
    assert processes.find_made(commands, [run], config() | machine()) == {"PPO": run}
    os.utime(tmp_path / "leanrl/mujoco_worlds.py", (later + 1, later + 1))
    assert not processes.find_made(commands, [run], config() | machine())


# The plan


def plan(cuda=False, **options):
    given = {
        "quick": True,
        "full": False,
        "only": None,
        "seeds": None,
        "steps": None,
        "limit": None,
    }
    return speedup.plan(argparse.Namespace(**given | {"tiny": False} | options), cuda)


def test_only_narrows_and_refuses_what_matches_nothing(tmp_path, capsys):
    found = plan(only=["sac_cont* [be]*"], seeds=1)
    assert {(job.script, job.row) for job in found} == {(SCRIPT, "baseline"), (SCRIPT, "eager")}
    with pytest.raises(SystemExit):
        speedup.main(["--full", "--only", "dqn*", "--out", str(tmp_path)])
    assert "matches no 'SCRIPT ROW'" in capsys.readouterr().err


def test_rows_take_turns():
    jobs = speedup.make_jobs([SCRIPT], ["baseline", "eager", "compile"], 2, "full")
    assert [job.row for job in jobs] == ["baseline", "eager", "compile"] * 2
    assert [job.seed for job in jobs] == [1] * 3 + [2] * 3


def test_the_protocols_find_every_pair():
    files = (ROOT / "leanrl").glob(f"*{run_dirs.VARIANT}.py")
    scripts = {path.stem.removesuffix(run_dirs.VARIANT) for path in files}
    assert scripts <= set(speedup.SCRIPTS) and set(run_dirs.SHOWN) < scripts
    for script in scripts:
        (full,) = speedup.make_jobs([script], ["baseline"], 1, "full")
        (quick,) = speedup.make_jobs([script], ["baseline"], 1, "quick")
        (traced,) = speedup.make_jobs([script], ["baseline"], 1, "traced")
        assert (ROOT / full.command[1]).exists() and full.name != traced.name
        assert full.steps > quick.steps > 0 and full.steps > traced.steps > 0


def test_traces_of_many_operators_are_short():
    """Those of PPO's epochs on a CPU, where they are not compiled."""
    scripts = sorted(speedup.SCRIPTS)
    jobs = speedup.make_jobs(scripts, ["baseline", "compile"], 1, "traced")
    found = [(job.script, job.row) for job in jobs if "--num-steps" in job.command]
    names = ("ppo_continuous_action", "ppo_continuous_action_async")
    assert found == [(name, "baseline") for name in names]


def test_steps_can_be_given():
    jobs = plan(only=["*baseline"], steps=70)
    assert all(job.steps == 70 and "70" in job.command for job in jobs)


def test_quick_runs_are_longer_on_a_gpu():
    on_cpu, on_gpu = (
        {(x.row, x.script): x.steps for x in plan(cuda) if "trace" not in x.command}
        for cuda in (False, True)
    )
    assert len(plan(True)) == 2 * len(on_gpu), "each row also has a trace, on a GPU only"
    assert len(plan(False)) == len(on_cpu)
    rows = ("baseline", "compile")
    assert on_cpu.keys() == {(row, script) for row in rows for script in run_dirs.SHOWN}
    rows = (*rows, "cudagraphs", "compile+cudagraphs")
    assert on_gpu.keys() == {(row, script) for row in rows for script in run_dirs.SHOWN}
    cartpole = "baseline", "ppo_cartpole_gpu"
    assert on_gpu[cartpole] > 4 * on_cpu[cartpole]
    assert max(job.steps for job in plan(cuda=True, tiny=True)) < 50_000


# Processes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_running_child(number, tmp_path):
    mark, log = tmp_path / "ended cleanly", tmp_path / "log"
    child = (
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "try:\n    print('ready', flush=True); time.sleep(60)\n"
        f"finally:\n    pathlib.Path({str(mark)!r}).touch()\n"
    )
    parent = (
        f"import sys; sys.path.append({str(ROOT / 'plots/measure')!r})\n"
        "import signal, processes, program; from pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"command, log = [sys.executable, '-c', {child!r}], Path({str(log)!r})\n"
        "program.start(lambda: processes.run_logged(command, log, print))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.DEVNULL)
    deadline = time.time() + 60
    while not (log.exists() and "ready" in log.read_text()) and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=60) == 130
    assert mark.exists()


def test_progress_and_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        " 10%|#| 100/1000 [00:01<00:09]\r 20%|#| 200/1000 [00:02<00:08]\nTraceback\nboom\n"
    )
    assert processes.progress_in(log) == (200, "")
    log.write_text(log.read_text() + "| 300/1000 [00:03<00:07, 98.70step/s, return 1,024.5]")
    assert processes.progress_in(log) == (300, "98.70step/s, return 1,024.5")
    assert processes.last_lines(log) == "    Traceback\n    boom"


def test_one_bar_names_run_speed_and_return_and_ends_full(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text("| 300/1000 [00:03<00:07, 98.70step/s, return 1,024.5]")

    def fail(progress):
        raise ValueError("what went wrong")

    turns = [processes.Turn("one", 1000, 5.0, lambda progress: progress(log) or "done")]
    turns.append(processes.Turn("two", 10, 1.0, fail))
    assert processes.make_all(turns) == ({"one": "done"}, ["what went wrong"])
    bar = capsys.readouterr().err
    assert "1/2 one: 98.70step/s, return 1,024.5" in bar and "25% |" in bar  # 0.3 of 5 of 6
    assert "2/2 two" in bar and "left" in bar and "100% |" in bar.rpartition("\r")[2]


def test_a_run_that_was_killed_has_no_speed(tmp_path):
    """Also where it might have been interrupted, as those are that end by time."""
    path = make_run(tmp_path, 1, config(), None)
    (tmp_path / "log").write_text(f"1.0 steps/s, {path}\n")
    with pytest.raises(ValueError, match="has no stages.json: killed or still running"):
        processes.read_logged(tmp_path / "log", whole=False)


def test_a_call_names_switches_and_lists():
    options = argparse.Namespace(quick=True, full=False, only=None, tasks=["A", "B v5"], rounds=2)
    said = processes.call("x.py", options, *vars(options))
    assert said == "python plots/measure/x.py --quick --tasks A 'B v5' --rounds 2"


# The stopwatch's overhead


def test_overhead_of_every_script_is_measured_without_traces():
    jobs = overhead.plan(argparse.Namespace(seeds=1, only="*"), cuda=False)
    rows = {(script, row) for script in speedup.SCRIPTS for row in ("baseline", "compile")}
    assert {(job.script, job.row) for job in jobs} == rows
    for job in jobs:  # a trace would cost more than the stopwatch
        assert all("trace" not in command for command in overhead.commands(job).values())


def test_bias_is_what_the_stopwatch_costs(monkeypatch, tmp_path):
    job = overhead.Job(SCRIPT, "baseline", 1, [], 18, 9)
    off = make_run(tmp_path / "runs", 1, config(), stages(100.0))
    on = make_run(tmp_path / "runs", 2, config(), report(100 / 1.04))
    code = "print('1,234.5 steps/s, {}')"
    pair = {
        arm: [sys.executable, "-c", code.format(path)] for arm, path in (("off", off), ("on", on))
    }
    monkeypatch.setattr(overhead, "commands", lambda job: dict(pair))
    result = overhead.measure(job, side_by_side=False, logs=tmp_path / "logs")
    assert result["bias"] == pytest.approx(0.04)
    (row,) = overhead.summarize([result, result | {"bias": -0.01}])
    assert row["bias"]["min"] == -0.01 and row["seeds"] == 2
    assert len({len(line) for line in overhead.cells([row])}) == 1
    pair["on"] = [sys.executable, "-c", "raise SystemExit('what went wrong')"]
    with pytest.raises(ValueError, match="(?s)stopwatch on, ended with exit status 1.*what went"):
        overhead.measure(job, side_by_side=False, logs=tmp_path / "logs")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_pair_runs_side_by_side(monkeypatch, tmp_path):
    path = make_run(tmp_path, 1, config(), stages(100.0))
    command = [sys.executable, "-c", f"print('1 steps/s, {path}')"]
    monkeypatch.setattr(overhead, "commands", lambda job: {"off": command, "on": command})
    job = overhead.Job(SCRIPT, "baseline", 1, [], 18, 9)
    assert overhead.measure(job, True, tmp_path / "logs")["off_seconds"] == 0.01


def test_the_uninstrumented_arm_keeps_the_clock_alone(tmp_path, monkeypatch):
    """And runs of both arms are of no script, so that no table takes them in."""
    from leanrl import sac_continuous_action as script

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(script, "Stopwatch", type("Stopwatch", (script.Stopwatch,), {}))
    flags = "--env-id Pendulum-v1 --learning-starts 20 --batch-size 8 --total-timesteps 140"
    runs = {}
    for arm in ("on", "off"):
        job = overhead.Job(SCRIPT, "baseline", 1, ["python", "x.py", *flags.split()], 140, 9)
        words = overhead.commands(job)[arm]
        overhead.work(arm, f"leanrl/{SCRIPT}.py", *words[words.index("x.py") + 1 :])
        (path,) = (tmp_path / "runs").glob(f"*__{overhead.ARMS[arm]}__*")
        runs[arm] = run_dirs.read_run(path)
        assert runs[arm].script == overhead.ARMS[arm] and runs[arm].row == "baseline"
        assert runs[arm].stages["sps_steady"] > 0 and runs[arm].stages["iterations"] == 20
    assert {"simulation", "backpropagation"} < runs["on"].stages["stages"].keys()
    (seconds,) = runs["off"].stages["stages"].values()
    assert seconds == pytest.approx(runs["off"].stages["seconds"])
    assert "sampling" in vars(script.Stopwatch), "no samples of a GPU are taken either"


# run.sh gpu


@pytest.mark.parametrize(
    ("driver", "torch", "status", "output", "error"),
    [
        (9, 1, 1, "", "no CUDA device"),
        (0, 0, 1, "", "no CUDA device for torch"),  # a build without CUDA
        (0, 1, 0, "plots/measure/gpu.py --out somewhere\n", ""),
    ],
    ids=["no-driver", "no-cuda", "gpu"],
)
def test_the_gpus_records_need_a_gpu(tmp_path, driver, torch, status, output, error):
    """One line before anything is installed; with a GPU the program that runs all steps."""
    root, programs = tmp_path / "clone", tmp_path / "tools/bin"
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copy(ROOT / "run.sh", root)
    programs.mkdir(parents=True)
    answers = f'*"assert not"*) exit {torch} ;; -c*) ;; "-m pip"* | -\\ *) ;; *) echo "$*" ;;'
    fakes = {"python": f'case "$*" in {answers} esac', "nvidia-smi": f"exit {driver}"}
    for name, text in fakes.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = os.environ | {"VIRTUAL_ENV": str(programs.parent)}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    command = ["bash", "run.sh", "gpu", "--out", "somewhere"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, output)
    assert error in done.stderr and done.stderr.count("\n") == status
