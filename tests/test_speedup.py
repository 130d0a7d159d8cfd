"""The speed-up table: what it reads, skips, keeps and runs, with stand-ins for the scripts."""

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import breakdown
import curves
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
    make_traced_run,
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


def tabulate(tmp_path, *folders):
    """Exit status of --table-only and the record it wrote."""
    out = tmp_path / "out"
    status = speedup.main(["--table-only", *map(str, folders), "--out", str(out)])
    return status, json.loads((out / "speedup.json").read_text())


# The speed-up table


def test_table_has_means_ranges_and_speedups(runs, tmp_path, capsys):
    status, record = tabulate(tmp_path, runs)
    rows = {row["row"]: row for row in record["rows"]}
    assert status == 0 and list(rows) == list(run_dirs.ROWS)
    steady = {"mean": 250.0, "median": 250.0, "min": 200.0, "max": 300.0}
    assert rows["compile"]["sps_steady"] == steady and rows["compile"]["seeds"] == [1, 2]
    assert [rows[row]["speedup"] for row in ("baseline", "eager", "compile")] == [1, 1.25, 2.5]
    assert rows["compile"]["warmup_seconds"] == {"first": 30.0, "best": 10.0}
    assert rows["compile"]["sps"]["mean"] == 50
    assert len(rows["compile"]["runs"]) == 2
    assert record["machine"]["load_average_1min"] == {"min": 0.5, "max": 1.0}
    printed = capsys.readouterr().out
    assert "2.50x" in printed and "Abacus" in printed and "c0ffee" in printed
    markdown = (tmp_path / "out/speedup.md").read_text()
    assert (
        f"| {SCRIPT} | compile | 250.0 | 200.0-300.0 | 2.50x | 30.0 | 10.0 | 50.0 | 2 |" in markdown
    )


def test_rows_without_cuda_are_named_as_skipped(runs, tmp_path, capsys):
    _, record = tabulate(tmp_path, runs)
    skipped = {row["row"]: row["skipped"] for row in record["rows"] if "skipped" in row}
    assert skipped == dict.fromkeys(("cudagraphs", "compile+cudagraphs"), "no CUDA device")
    assert capsys.readouterr().out.count("skipped: no CUDA device") == 2


def test_rows_with_cuda(tmp_path):
    for number, row in enumerate(("baseline", "cudagraphs", "compile+cudagraphs")):
        make_run(tmp_path, number, config(row, gpu="H"), stages(10 * (number + 1)))
    status, record = tabulate(tmp_path, tmp_path)
    rows = {row["row"]: row for row in record["rows"]}
    assert status == 0 and rows["compile+cudagraphs"]["speedup"] == 3
    assert rows["eager"]["skipped"] == "no finished run"


def test_the_first_warm_up_is_that_of_the_first_run(tmp_path):
    for number, warmup in enumerate((20.0, 10.0, 30.0)):
        make_run(tmp_path, number, config("compile", number + 1), stages(10, warmup))
    _, record = tabulate(tmp_path, tmp_path)
    (row,) = (row for row in record["rows"] if "runs" in row)
    assert row["warmup_seconds"] == {"first": 20.0, "best": 10.0}


def test_cudagraphs_without_a_device_counts_as_what_it_ran(tmp_path):
    path = make_run(tmp_path, 1, config("compile+cudagraphs"), stages(10))
    assert run_dirs.read_run(path).row == "compile"


def test_no_speedup_without_a_baseline(tmp_path, capsys):
    make_run(tmp_path, 1, config("eager"), stages(10))
    _, record = tabulate(tmp_path, tmp_path)
    assert [row["speedup"] for row in record["rows"] if "speedup" in row] == [None]


def test_a_speedup_is_of_the_rounds_that_both_have(tmp_path):
    """In the third the machine was half as fast, and compile failed there: 2.4 without it."""
    speeds = {"baseline": (100, 100, 50), "compile": (200, 200)}
    for row, mine in speeds.items():
        for seed, speed in enumerate(mine, start=1):
            make_run(tmp_path, 10 * seed, config(row, seed), stages(speed))
    make_run(tmp_path, 40, config("eager", 4), stages(100))  # in a round without a baseline
    _, record = tabulate(tmp_path, tmp_path)
    speedups = {row["row"]: row["speedup"] for row in record["rows"] if "speedup" in row}
    assert speedups == {"baseline": 1, "eager": None, "compile": 2}


@pytest.mark.parametrize(
    "found, why",
    [
        (None, "has no stages.json"),
        (stages(90, steps=500), "stopped after 500 of 1000 steps"),
        (stages(None), "no steady steps/s"),
        ({"some": 3}, "some other program"),
        (stages(90) | {"warmup_seconds": None}, "some other program"),
    ],
)
def test_an_unfinished_run_is_named_and_does_not_count(runs, tmp_path, capsys, found, why):
    bad = make_run(runs, 500, config("eager", 3), found)
    status, record = tabulate(tmp_path, runs)
    assert status == 0
    error = capsys.readouterr().err
    assert f"skipped: {bad} {why}" in error or (bad.name in error and why in error)
    assert all(row["speedup"] in (1, 1.25, 2.5) for row in record["rows"] if "speedup" in row)


@pytest.mark.parametrize("file", ["config.json", "stages.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"null", b"\xff\x00\xfe", b'{"args": 3}']
)
def test_damaged_files_are_named_and_do_not_count(runs, tmp_path, capsys, file, content):
    bad = make_run(runs, 500, config("eager", 3), stages(90))
    (bad / file).write_bytes(content)
    status, record = tabulate(tmp_path, runs)
    error = capsys.readouterr().err
    assert status == 0 and error.count("skipped:") == 1 and bad.name in error
    assert all(row["speedup"] in (1, 1.25, 2.5) for row in record["rows"] if "speedup" in row)


def test_what_lies_beside_the_runs_is_named_and_does_not_count(runs, tmp_path, capsys):
    (runs / "empty").mkdir()
    (runs / "foreign").mkdir()
    (runs / "foreign/model.zip").write_bytes(b"PK")
    (runs / "stray.txt").write_text("no directory")
    (runs / "loop").symlink_to(runs / "loop")
    status, _ = tabulate(tmp_path, runs, tmp_path / "gone")
    error = capsys.readouterr().err
    assert status == 0 and error.count("skipped:") == 3
    assert all(name in error for name in ("empty has no", "foreign has no", "gone does not exist"))


def test_no_runs_at_all_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        speedup.main(["--table-only", str(tmp_path / "gone")])
    assert "no finished runs" in capsys.readouterr().err


def test_speed_comes_from_runs_that_were_not_traced(runs, tmp_path):
    """A row's traced runs, which are shorter, count only where it has no others."""
    traced = config("eager", 1, stopwatch="trace", total_timesteps=10)
    write_events(make_run(runs, 500, traced, stages(1)), [("charts/SPS", 10, 0.1, 1.0)])
    make_run(runs, 501, config("cudagraphs", 1, gpu=None), stages(7))  # eager, in fact
    status, record = tabulate(tmp_path, runs)
    rows = {row["row"]: row for row in record["rows"]}
    assert status == 0 and rows["eager"]["sps_steady"]["min"] == 7
    assert len(rows["eager"]["runs"]) == 3


def test_runs_that_cannot_be_compared_are_refused(runs, capsys):
    make_run(runs, 500, config("eager", 3, batch_size=512), stages(90))
    with pytest.raises(SystemExit) as stopped:
        speedup.main(["--table-only", str(runs)])
    assert stopped.value.code == 2 and "batch_size" in capsys.readouterr().err


def former(threads, *given, **args):
    """A config.json of scripts that had no flag for their threads."""
    made = config(*given, **args) | {"threads": threads}
    del made["args"]["torch_threads"]
    return made


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (config("eager"), config("eager", 2, torch_threads=1), "threads 2,"),
        (config("baseline"), config("compile", torch_threads=1), "torch_threads 2,"),
        (former(2, "eager"), former(1, "eager", 2), "threads 2,"),
    ],
    ids=["a-row", "a-pair", "a-former-row"],
)
def test_runs_with_other_threads_are_refused(one, other, said, tmp_path, capsys):
    make_run(tmp_path, 1, one, stages(100))
    make_run(tmp_path, 2, other, stages(90))
    with pytest.raises(SystemExit):
        speedup.main(["--table-only", str(tmp_path)])
    assert f" has {said}" in capsys.readouterr().err


def test_flags_and_former_threads_of_the_variant_alone_do_not_matter(tmp_path):
    runs = tmp_path / "runs"
    make_run(runs, 1, former(2, "baseline"), stages(100))
    make_run(runs, 2, former(1, "compile", env_backend="kernel"), stages(300))
    status, record = tabulate(tmp_path, runs)
    assert status == 0 and {row.get("speedup") for row in record["rows"]} >= {1, 3}


# Making the runs, with stand-ins for the scripts

STAND_IN = """
import json, shutil, sys, time
from pathlib import Path
import tqdm
row, seed = "compile" if "--compile" in sys.argv else ROW, sys.argv[2]
if row == "compile" and seed == "2":
    print("what went wrong", file=sys.stderr)
    sys.exit(3)
with tqdm.tqdm(total=1000) as bar:
    bar.update(1000)
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
    rows = ("baseline", "eager", "compile")
    configs = {row: config(row) for row in rows}
    write_events(tmp_path / "events", [("charts/SPS", 500, 5, 1.0)])
    for row, suffix in (("baseline", ""), ("eager", run_dirs.VARIANT)):
        file = root / "leanrl" / f"{SCRIPT}{suffix}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        constants = f"ROW, CONFIGS, STAGES = {row!r}, {configs!r}, {stages(80.0)!r}\n"
        constants += f"EVENTS = {str(tmp_path / 'events')!r}"
        file.write_text(f"{constants}\ntotal_timesteps: int = 1_000\n{STAND_IN}")
    for module in (speedup, processes):
        monkeypatch.setattr(module, "ROOT", root)
        monkeypatch.setattr(module, "this_machine", machine)
    monkeypatch.setattr(speedup, "draw_figures", lambda runs, rows, out, learned: None)
    return root


@pytest.mark.parametrize("protocol", ["--quick", "--full"])
def test_a_failing_run_is_named_and_the_others_count(stand_ins, tmp_path, capsys, protocol):
    out = tmp_path / "out"
    assert speedup.main([protocol, "--seeds", "2", "--out", str(out)]) == 1
    record = json.loads((out / "speedup.json").read_text())
    counts = {row["row"]: len(row["runs"]) for row in record["rows"] if "runs" in row}
    others = {} if protocol == "--quick" else {"eager": 2}
    assert counts == {"baseline": 2, **others, "compile": 1}
    paths = {path for row in record["rows"] for path in row.get("runs", ())}
    if protocol == "--quick":  # SAC's window before the trace is long enough
        assert paths == set(record["traced"])
    else:
        assert len(record["traced"]) == len(counts)  # a run of its own for each row
        assert not paths & set(record["traced"])
    assert record["command"] == f"python plots/measure/speedup.py {protocol} --seeds 2"
    error = capsys.readouterr().err
    assert f"FAILED: {SCRIPT} compile seed 2" in error and "exit status 3" in error
    assert "what went wrong" in error
    assert record["machine"]["git_commits"] == ["c0ffee"]  # config.json does not have it
    assert record["machine"]["load_average_1min"] == {"min": 0.5, "max": 0.5}
    assert len(list((out / "logs").glob(f"{SCRIPT}-compile-seed-2*.log"))) == 1


def test_the_full_protocol_goes_on_where_it_stopped(stand_ins, tmp_path, capsys):
    """Only what failed runs again, and what a changed script has made."""
    call = ["--full", "--seeds", "2", "--out", str(tmp_path / "out")]

    def counts():
        return len(list((stand_ins / "runs").iterdir())), capsys.readouterr().out.count("kept:")

    assert speedup.main(call) == 1 and counts() == (8, 0)  # 5 of 6 and a traced one per row
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
    for other in ({"gpu": "H"}, {"cpu": {"model": "X"}}):
        assert not speedup.finished(jobs, machine() | other)
    assert not speedup.finished(jobs, machine() | {"versions": {"torch": "2.14"}})


def test_a_run_on_worlds_is_not_kept_when_the_worlds_have_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    (tmp_path / "leanrl").mkdir()
    for name in ("ppo_mujoco_worlds", "mujoco_worlds"):
        (tmp_path / f"leanrl/{name}.py").touch()
    made_by = config(script="ppo_mujoco_worlds")
    make_run(tmp_path / "runs", 1, made_by, stages(50.0))
    runs, _ = run_dirs.read_runs([tmp_path / "runs"])
    commands = {"PPO": made_by["command"].split()}
    later = time.time() + 3600
    os.utime(runs[0].path / "config.json", (later, later))
    assert processes.find_made(commands, runs, config() | machine()) == {"PPO": runs[0]}
    os.utime(tmp_path / "leanrl/mujoco_worlds.py", (later + 1, later + 1))
    assert not processes.find_made(commands, runs, config() | machine())


def test_only_narrows_and_refuses_what_matches_nothing(stand_ins, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert speedup.main(["--quick", "--seeds", "1", "--only", "sac* [be]*", *out]) == 0
    assert len(list((stand_ins / "runs").iterdir())) == 2  # baseline and eager, both traced
    with pytest.raises(SystemExit):
        speedup.main(["--full", "--only", "dqn*", *out])
    assert "matches no 'SCRIPT ROW'" in capsys.readouterr().err


def test_rows_take_turns(stand_ins):
    jobs = speedup.make_jobs([SCRIPT], ["baseline", "eager", "compile"], 2, "full")
    assert [job.row for job in jobs] == ["baseline", "eager", "compile"] * 2
    assert [job.seed for job in jobs] == [1] * 3 + [2] * 3
    assert {job.steps for job in jobs} == {1000}


def test_the_protocols_find_every_pair():
    scripts = {
        path.stem.removesuffix(run_dirs.VARIANT)
        for path in (ROOT / "leanrl").glob(f"*{run_dirs.VARIANT}.py")
    }
    assert scripts <= set(speedup.SCRIPTS) and set(speedup.QUICK) < scripts
    for script in scripts:
        (full,) = speedup.make_jobs([script], ["baseline"], 1, "full")
        quick = speedup.make_jobs([script], ["baseline"], 1, "quick")
        (traced,) = speedup.make_jobs([script], ["baseline"], 1, "traced")
        assert (ROOT / full.command[1]).exists() and full.name != traced.name
        sizes = [full.steps, *(job.steps for job in quick), traced.steps]
        assert sizes == sorted(sizes, reverse=True) and traced.steps > 0
        (compiled,) = speedup.make_jobs([script], ["compile"], 1, "traced")
        short = "continuous" in script and script.startswith("ppo")  # of whose trace files are long
        assert ("--num-steps" in traced.command) == short and "--num-steps" not in compiled.command
        assert bool(quick) == (speedup.SCRIPTS[script].quick is not None)
    (job,) = speedup.make_jobs(["ppo_continuous_action"], ["baseline"], 1, "quick", steps=70)
    assert job.steps == 70 and job.command[-2:] == ["--total-timesteps", "70"]


def test_the_quick_runs_are_longer_on_a_gpu():
    quick = {"quick": True, "full": False, "only": None, "seeds": None, "steps": None}
    options = argparse.Namespace(**quick, tiny=False)
    steps = []
    for cuda in (False, True):
        found = {}
        for job in speedup.plan(options, cuda):
            if speedup.TRACED[0] not in job.command:
                found.setdefault(job.row, {})[job.script] = job.steps
        steps.append(found)
    on_cpu, on_gpu = steps
    assert on_cpu.keys() == {"baseline", "compile"}
    assert on_gpu.keys() == {*on_cpu, "cudagraphs", "compile+cudagraphs"}
    for rows, scripts in ((on_cpu, {*speedup.QUICK[1:]}), (on_gpu, {*speedup.QUICK})):
        assert all(found.keys() == scripts for found in rows.values())  # SAC's trace is enough
    assert on_gpu["baseline"]["ppo_cartpole_gpu"] > 4 * on_cpu["baseline"]["ppo_cartpole_gpu"]
    options.tiny = True
    tiny = {job.steps for job in speedup.plan(options, cuda=True)}
    assert max(tiny) < 50_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
        "import signal, processes, run_dirs; from pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"command, log = [sys.executable, '-c', {child!r}], Path({str(log)!r})\n"
        "run_dirs.start(lambda: processes.run_logged(command, log, print))\n"
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

    def measure(progress):
        log.write_text("| 300/1000 [00:03<00:07, 98.70step/s, return 1,024.5]")
        progress(log)
        return "done"

    def fail(progress):
        raise ValueError("what went wrong")

    turns = [processes.Turn("one", 1000, 5.0, measure), processes.Turn("two", 10, 1.0, fail)]
    assert processes.make_all(turns) == ({"one": "done"}, ["what went wrong"])
    bar = capsys.readouterr().err
    assert "1/2 one: 98.70step/s, return 1,024.5" in bar and "25% |" in bar  # 0.3 of 5 of 6
    assert "2/2 two" in bar and "left" in bar and "100% |" in bar.rpartition("\r")[2]


def test_a_closed_pipe_is_no_traceback():
    """More than a pipe holds, and as little as Python flushes only at its end."""
    for length in (10**6, 10):
        code = f"import processes, run_dirs; run_dirs.start(lambda: print('x' * {length}))"
        command = f'"{sys.executable}" -c "{code}" | true; echo ${{PIPESTATUS[0]}}'
        folder = ROOT / "plots/measure"
        done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("open('gone/x', 'w')", "error: [Errno 2] No such file or directory: 'gone/x'"),
        ("print('x')", "error: [Errno 28] No space left on device"),
    ],
)
def test_what_cannot_be_written_is_one_line(code, said):
    command = [sys.executable, "-c", f"import run_dirs; run_dirs.start(lambda: {code})"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT / "plots", stdout=full, stderr=-1, text=True)
    assert (done.returncode, done.stderr) == (1, f"{said}\n")


class Unread:
    """A standard output of which nobody reads anything."""

    def write(self, text):
        raise BrokenPipeError

    flush = write


def test_where_nobody_reads_all_is_written_first(runs, tmp_path, monkeypatch):
    """As in `| head -1`: hours of runs are not in vain."""
    traced = make_traced_run(runs, 900, config("compile", 3, stopwatch="trace"))
    for path in runs.iterdir():
        write_events(path, [("charts/episodic_return", k, k, 1.0 + k) for k in (500, 1000)])
    write_events(traced, [("charts/SPS", 1000, 1, 1.0)])

    def save(figure, stem):
        stem.with_name(f"{stem.name}.png").touch()
        return [stem]

    monkeypatch.setattr(curves, "save", save)  # to draw takes seconds
    monkeypatch.setattr(sys, "stdout", Unread())
    with pytest.raises(BrokenPipeError):
        speedup.main(["--table-only", str(runs), "--out", str(tmp_path / "out")])
    names = ["speedup.json", "speedup.png", "curves_learning.png", "curves_scores.json"]
    names += ["breakdown.json", "breakdown_stages.png"]
    assert {name: (tmp_path / "out" / name).exists() for name in names} == dict.fromkeys(
        names, True
    )
    with pytest.raises(BrokenPipeError):
        breakdown.main([str(traced), "--out", str(tmp_path / "b")])
    assert (tmp_path / "b_stages.png").exists()


def test_a_run_that_was_killed_has_no_speed(tmp_path):
    """Also where it might have been interrupted, as those are that end by time."""
    path = make_run(tmp_path, 1, config(), None)
    (tmp_path / "log").write_text(f"1.0 steps/s, {path}\n")
    with pytest.raises(ValueError, match="has no stages.json: killed or still running"):
        processes.read_logged(tmp_path / "log", whole=False)


def test_speedups_are_drawn(tmp_path, runs):
    found = [run_dirs.read_run(path) for path in run_dirs.find_runs([runs])]
    rows = speedup.summarize(found, list(run_dirs.ROWS))
    speedup.draw_speedups(rows, found, tmp_path)
    drawn = (tmp_path / "speedup.svg").read_text()
    assert "2.50x" in drawn and "SAC" in drawn and (tmp_path / "speedup.png").exists()


def test_modules_import_one_another_in_one_direction():
    """plots/ nothing of plots/measure/, and no two modules each other, directly or by others."""
    files = {path.stem: path for path in (ROOT / "plots").rglob("*.py")}
    imports: dict = {}
    for name, path in files.items():
        imports[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names} & set(files)
            elif isinstance(node, ast.ImportFrom):
                imports[name] |= {node.module} & set(files)
    for name, path in files.items():
        reached: set = set()
        todo = [name]
        while todo:
            found = imports[todo.pop()] - reached
            reached |= found
            todo += found
        assert name not in reached, f"{name} imports itself through {sorted(reached)}"
        if path.parent.name == "plots":
            assert all(files[other].parent == path.parent for other in reached), path


# The stopwatch's overhead


def test_every_script_is_measured():
    options = argparse.Namespace(seeds=1, only="*")
    jobs = overhead.plan(options, cuda=False)
    assert {(job.script, job.row) for job in jobs} == {
        (script, row) for script in speedup.SCRIPTS for row in ("baseline", "compile")
    }
    for job in jobs:  # a trace would cost more than the stopwatch
        assert all("trace" not in command for command in overhead.commands(job).values())


def test_a_call_names_switches_and_lists():
    options = argparse.Namespace(
        quick=True, full=False, only=None, tasks=["A-v5", "B v5"], rounds=2
    )
    names = ("quick", "full", "only", "tasks", "rounds")
    said = "python plots/measure/x.py --quick --tasks A-v5 'B v5' --rounds 2"
    assert processes.call("x.py", options, *names) == said


def test_bias_is_what_the_stopwatch_costs(monkeypatch, tmp_path):
    job = overhead.Job(SCRIPT, "baseline", 1, ["python", "x.py", "--total-timesteps", "18"], 18, 9)
    pair = overhead.commands(job)
    flags = {arm: words[words.index("x.py") :] for arm, words in pair.items()}
    assert flags["off"][:3] == flags["on"][:3] == ["x.py", "--total-timesteps", "18"]
    assert pair["off"].index("off") == pair["on"].index("on")
    folder = tmp_path / "runs"
    off = make_run(folder, 1, config(), stages(100.0))
    on = make_run(folder, 2, config(), report(100 / 1.04))
    code = "print('1,234.5 steps/s, {}')"
    words = {path: [sys.executable, "-c", code.format(path)] for path in (off, on)}
    pair = {"off": words[off], "on": words[on]}
    monkeypatch.setattr(overhead, "commands", lambda job: dict(pair))
    result = overhead.measure(job, side_by_side=False, logs=tmp_path / "logs")
    assert result["bias"] == pytest.approx(0.04)
    (row,) = overhead.summarize([result, result | {"bias": -0.01}])
    assert row["bias"]["min"] == -0.01 and row["seeds"] == 2
    assert len({len(line) for line in overhead.cells([row])}) == 1
    if shutil.which("taskset") and len(os.sched_getaffinity(0)) > 1:
        assert overhead.measure(job, True, tmp_path / "logs")["off_seconds"] == 0.01
    pair["on"] = [sys.executable, "-c", "raise SystemExit('what went wrong')"]
    with pytest.raises(ValueError, match="(?s)stopwatch on, ended with exit status 1.*what went"):
        overhead.measure(job, side_by_side=False, logs=tmp_path / "logs")


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


@pytest.mark.parametrize("build", ["no driver", "torch without CUDA", "GPU"])
def test_the_gpus_records_need_a_gpu(tmp_path, build):
    """One line before anything is installed; with a GPU the program that runs all steps."""
    root, tools = tmp_path / "clone", tmp_path / "tools"
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copy(ROOT / "run.sh", root)
    probe = "exit 0" if build == "torch without CUDA" else "exit 1"
    answers = f'*"assert not"*) {probe} ;; -c*) exit 0 ;; "-m pip"* | -\\ *) ;; *) echo "$*" ;;'
    driver = "exit 9" if build == "no driver" else "exit 0"
    fakes = {"python": f'case "$*" in {answers} esac', "nvidia-smi": driver}
    (tools / "bin").mkdir(parents=True)
    for name, script in fakes.items():
        (tools / "bin" / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tools / "bin" / name).chmod(0o755)
    environment = os.environ | {"VIRTUAL_ENV": str(tools)}
    environment["PATH"] = f"{tools / 'bin'}:{environment['PATH']}"
    command = ["bash", "run.sh", "gpu", "--out", "somewhere"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if build == "GPU":
        said = "plots/measure/gpu.py --out somewhere\n"
        assert (done.returncode, done.stdout) == (0, said)
    else:
        assert done.returncode == 1 and done.stdout == ""
        assert "no CUDA device" in done.stderr and done.stderr.count("\n") == 1
