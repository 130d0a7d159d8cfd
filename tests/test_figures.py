"""What is drawn and said about runs: curves, breakdowns, the scaling study's figures, records."""

import json
import math
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import ablation
import breakdown
import cross_stack
import curves
import devices
import env_report
import env_scaling
import field
import growth
import matplotlib.pyplot as plt
import numpy as np
import overhead
import physics
import pytest
import race
import readme
import record
import returns
import run_dirs
import speedup
import utilization
from conftest import ROOT
from fake_runs import (
    SCRIPT,
    config,
    machine,
    make_run,
    make_traced_run,
    report,
    stages,
    trace_events,
    usage,
    write_events,
)
from matplotlib.colors import to_rgb
from traces import CPU_LAYERS, reduce_trace


def image_size(path):
    """(width, height) of a PNG."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.fixture
def runs(tmp_path):
    """Two seeds each of baseline and compile with events, one of them on a longer clock."""
    folder = tmp_path / "runs"
    for seed in (1, 2):
        for i, row in enumerate(("baseline", "compile")):
            made = report(steady=(1 + i) * 10.0 * seed)
            made_by = config(row, seed, total_timesteps=1000)
            path = make_traced_run(folder, 10 * seed + i, made_by, made)
            write_events(path, events(seed, 1 + i))
    return folder


def events(seed, speed):
    """20 returns, the last one of 20 seed, in 20 / speed seconds."""
    rows = [("charts/SPS", 0, 0, 0.0)]
    for k in range(1, 21):
        rows.append(("charts/episodic_return", 50 * k, k / speed, float(k * seed)))
        rows.append(("charts/SPS", 50 * k, k / speed, 50.0 * speed))
    return rows


# Reading


def test_a_stage_has_its_untraced_seconds_and_its_traced_shares():
    """Tracing slowed inference down twofold and the backpropagation not: each is scaled alone."""
    found = run_dirs.per_step(report(), reduce_trace(trace_events()) | {"env_steps": 10})
    assert found["inference"]["total"] == 0.02 and found["backpropagation"]["total"] == 0.06
    assert found["inference"]["python_s"] == pytest.approx(0.015)
    assert found["inference"]["backend_s"] == pytest.approx(0.005)
    assert found["backpropagation"]["backend_s"] == pytest.approx(0.04)
    assert found["backpropagation"]["backend_calls"] == 200  # calls are not scaled
    layers = [sum(fields.get(x, 0) for x in CPU_LAYERS) for fields in found.values()]
    assert layers == pytest.approx([fields["total"] for fields in found.values()])
    assert run_dirs.per_step(report(), None)["inference"] == {"total": 0.02}
    on_gpu = reduce_trace(trace_events(gpu=True)) | {"env_steps": 10}
    found = run_dirs.per_step(report(gpu=True), on_gpu)["backpropagation"]
    assert found["gpu_s"] == pytest.approx(0.066)  # as traced: kernels are no slower for that
    assert found["gpu_overlap_s"] == pytest.approx(0.033)  # of the CPU's time: scaled with it


def test_a_traced_run_has_ended_when_its_last_row_says_so(tmp_path):
    """Its report ends where the trace begins, and says nothing of the steps after that."""
    for last, missing in ((1000, ""), (500, "stopped after 500 of 1000 steps")):
        path = make_run(tmp_path, last, config(stopwatch="trace"), stages(80, steps=700))
        write_events(path, [("charts/SPS", step, step, 1.0) for step in (100, last)])
        assert run_dirs.read_run(path, whole=False).missing == missing


def add_part(path, before, found, **args):
    """What --resume adds to the run in `path` after `before` steps; `found` None: it was killed."""
    made = json.loads((path / "config.json").read_text())
    made["args"] |= {"resume": str(path)} | args
    (path / f"config_{before}.json").write_text(json.dumps(made))
    if found:
        (path / f"stages_{before}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("first", "before", "rest", "total", "speed"),
    [
        (stages(80), 1000, stages(None, None, steps=0), 1000, 80),  # nothing was left to do
        (stages(80), 1000, None, 2000, 80),  # killed on the way to more
        (stages(80, steps=990), 990, stages(None, None, steps=10), 1000, 80),
        (stages(80, steps=500), 500, stages(90, steps=500), 1000, 90),
    ],
    ids=["nothing-left", "killed", "short-rest", "halves"],
)
def test_a_finished_run_stays_after_a_resume(runs, tmp_path, first, before, rest, total, speed):
    path = make_run(runs, 500, config(seed=3), first)
    write_events(path, [("charts/episodic_return", 50 * k, k, float(k)) for k in range(1, 21)])
    add_part(path, before, rest, total_timesteps=total)
    run = run_dirs.read_run(path)
    assert run.stages["sps_steady"] == speed
    assert curves.main([str(runs), "--where", "seed=3", "--out", str(tmp_path / "c")]) == 0
    (lines,) = curves.groups(run_dirs.read_runs([runs])[0]).values()
    assert len(lines["baseline"]) == 3


def test_a_resumed_run_that_did_not_end_says_why(tmp_path):
    path = make_run(tmp_path, 1, config(), stages(80, steps=500))
    add_part(path, 500, None)
    with pytest.raises(ValueError, match="has no stages_500.json"):
        run_dirs.read_run(path)
    add_part(path, 500, stages(90, steps=100))
    with pytest.raises(ValueError, match="stopped after 600 of 1000 steps"):
        run_dirs.read_run(path)


def test_a_folder_of_runs_is_searched_for_runs(sweep_runs, tmp_path):
    """Also where it lies in another folder; what a former attempt has left does not count."""
    variant = sweep_runs / "id0"
    make_run(variant / "attempts/1/runs", 99, config(), report())
    (tmp_path / ".hidden").mkdir()
    for path, count in ((tmp_path, 6), (sweep_runs, 6), (variant, 1)):
        runs, skipped = run_dirs.read_runs([path])
        assert len(runs) == count and not skipped
    assert run_dirs.find_runs([tmp_path / "gone"]) == []


def test_what_the_machine_was_stands_beside_the_run(tmp_path, monkeypatch):
    path = make_run(tmp_path, 1, config(gpu="H"), stages(80))
    run = run_dirs.read_run(path)
    cpu = {"model": "Abacus", "vectors": "AVX2", "cores": 2, "threads": 2}
    assert run.config["cpu"] == cpu and run.config["gpu"] == "H"  # what the run had comes first
    (path / "machine.json").unlink()
    known = run_dirs.read_run(path)
    assert known.config["git_commit"] is known.config["cpu"]["model"] is None
    assert run_dirs.incomparable([run, known]) is None  # what is unknown is no difference
    record = run_dirs.machine([known.config])
    assert record["load_average_1min"] is None and record["git_commits"] == [None]
    lines = run_dirs.describe(record)
    assert "CPU: unknown processor, 2 torch threads" in lines
    assert "Python unknown, torch 2.13.0" in lines
    former = config() | {"processor": "Babbage", "threads": 4}  # by themselves, no flag of theirs
    del former["args"]["torch_threads"]
    (path / "config.json").write_text(json.dumps(former))
    run = run_dirs.read_run(path)
    (line,) = run_dirs.describe(run_dirs.machine([run.config]))[:1]
    assert line == "CPU: Babbage, 4 torch threads" and run.settings["torch_threads"] == 4
    here = run_dirs.this_machine()
    assert here["cpu"].keys() == {"model", "vectors", "cores"} and len(here["load_average"]) == 3
    assert here["versions"].keys() == {"torch", "gymnasium"}


@pytest.mark.parametrize(
    ("torch", "vectors"), [("2.13.0", None), ("2.14.0", None), ("2.13.0", "AVX512")]
)
def test_a_record_takes_this_machine_for_that_of_a_run_if_it_can_be(
    tmp_path, monkeypatch, torch, vectors
):
    path = make_run(tmp_path, 1, config() | {"vectors": vectors}, stages(80))
    (path / "machine.json").unlink()
    write_events(path, [("charts/episodic_return", 50 * k, k, float(k)) for k in range(1, 21)])
    here = machine()
    here["versions"]["torch"] = torch
    monkeypatch.setattr(run_dirs, "this_machine", lambda: here)
    record.main([str(tmp_path / "r.json"), str(path)])
    (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    same = torch == "2.13.0" and vectors is None
    assert run["config"]["cpu"]["model"] == ("Abacus" if same else None)
    assert run["config"]["cpu"]["vectors"] == ("AVX2" if same else vectors)
    assert run["config"]["versions"]["torch"] == "2.13.0"
    assert run["config"]["load_average"] is None, "nobody knows what it was then"
    assert run["mean_return_last_10"] == 15.5
    assert run["eval_returns"] == [] and run["stages"] == stages(80)
    (first, *_, last) = run["episodic_returns"]
    assert first[:2] == [50, 1.0] and last[:2] == [1000, 20.0]
    assert last[2] - first[2] == pytest.approx(19) and first[2] < 100  # seconds, of the run


def test_what_is_no_run_makes_no_record(tmp_path):
    """The line names the run and its file; named twice, and by a link, a run is there once."""
    path = make_run(tmp_path, 1, config(), stages(80))

    def lines(*runs):
        with pytest.raises(SystemExit) as end:
            record.main([str(tmp_path / "new/r.json"), *map(str, runs)])
        return end.value.code

    assert lines(path) == f"error: {path} has logged no episodic return"
    write_events(path, [("charts/episodic_return", 50, 1, 1.0)])
    for file in ("config.json", "stages.json", "machine.json"):
        whole = (path / file).read_bytes()
        for content in (b"", whole[:30], b"[1]", b"null", b"\xff", b"[" * 10**5):
            (path / file).write_bytes(content)
            said = lines(path)
            assert said.startswith(f"error: {path} {file} is damaged") and "\n" not in said
        (path / file).write_bytes(whole)
    for broken in (
        {},
        {"args": 3},
        config() | {"versions": 3},
        config(env_id=None),
        config(seed=""),
    ):
        (path / "config.json").write_text(json.dumps(broken))
        assert lines(path) == f"error: {path} holds the files of some other program"
    (path / "config.json").unlink()
    assert lines(path) == f"error: {path} has no config.json"
    (path / "config.json").write_text(json.dumps(config()))
    (tmp_path / "link").symlink_to(path)
    assert record.main([str(tmp_path / "new/r.json"), str(path), str(tmp_path / "link")]) == 0
    (run,) = json.loads((tmp_path / "new/r.json").read_text())["runs"]
    assert run["run"] == path.name


def test_worlds_have_the_name_of_the_environment_in_which_they_are_evaluated(tmp_path):
    """And their scripts one name, also in records of before they had it."""
    before = config(script="ppo_mujoco_gpu")
    now = config(script="ppo_mujoco_worlds", env_id="worlds/HalfCheetah-v5")
    for number, made_by in enumerate((before, now)):
        make_run(tmp_path, number, made_by, stages(50.0))
    runs, _ = run_dirs.read_runs([tmp_path])
    names = [(run.script, run.env_id) for run in runs]
    assert names == 2 * [("ppo_mujoco_worlds", "HalfCheetah-v5")]
    assert run_dirs.incomparable(runs) is None


def test_what_was_learned_is_the_last_return():
    def made(value, **more):
        run = {
            "mean_return_last_10": value,
            "config": config(),
            "episodic_returns": [[9, 1.0, 2.0]],
        }
        return readme.reached(run | more)

    assert readme.learned([made(7.0), made(8.0)]) == "7, 8 in training"
    evaluated = made(7.0, eval_returns=[[5, 1.0, 2.0], [9, 3.0, 4.0]])
    assert readme.learned([evaluated]) == "3" and evaluated.steps == 9
    assert readme.learned([made(float(k)) for k in range(5)]).startswith("2 (")


RECORDS = {  # region: a record of it, and what that may lack
    "race": ("race_cpu", "rows"),
    "physics": ("physics_cpu", "rows"),
    "speedup": ("speedup_cpu", "rows"),
    "field": ("td3_field_cpu", "rounds"),
    "learning": ("ppo_halfcheetah_1m_baseline_cpu", "runs"),
    "worlds": ("ppo_mujoco_ant_cpu", "runs"),
    "gpu": ("speedup_h200", "rows"),
    "overhead": ("overhead_cpu", "rows"),
    "environments": ("env_scaling_cpu", "bytes_per_second"),
    "devices": ("devices_continuous_cpu", "machine"),
}


def test_a_damaged_record_is_named(tmp_path, monkeypatch):
    """In one line, as the one that is not there, and nothing is written."""
    assert RECORDS.keys() == readme.REGIONS.keys()
    shutil.copytree(ROOT / "plots/results", tmp_path / "r", ignore=shutil.ignore_patterns("*.png"))
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "r")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    for region, (name, key) in RECORDS.items():
        text = f"<!-- record: {region} -->\n<!-- end -->"
        (tmp_path / "README.md").write_text(text)
        path = tmp_path / f"r/{name}.json"
        whole = path.read_text()
        lacking = json.loads(whole)
        del lacking[key]
        contents = ["", whole[:-100], "[1]", json.dumps(lacking), None]
        for content in (*contents, json.dumps(lacking | {key: None})):
            path.unlink() if content is None else path.write_text(content)
            with pytest.raises(SystemExit) as end:
                readme.main([])
            said = end.value.code
            assert f"{name}.json" in said and said.startswith("error: ") and "\n" not in said
        path.write_text(whole)
        assert (tmp_path / "README.md").read_text() == text
    path = tmp_path / "r/env_scaling_cpu.json"
    for content in ("", "{", "[]", "{}", '{"rows": 3}', json.dumps(lacking)):
        path.write_text(content)
        with pytest.raises(SystemExit, match="error: .*env_scaling_cpu.json is"):
            env_report.main([str(path)])


def one_line(capsys, main, *arguments):
    """What a program says to these arguments, which it refuses."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status in (1, 2) and said.count("\n") == 1, said
    return said


def test_arguments_that_cannot_be_meant_are_one_line(runs, tmp_path, capsys):
    """Before anything is read or run; what is made is a folder at most."""
    (tmp_path / "file").write_text("")
    logged = "but charts/SPS, charts/episodic_return"
    for flags, said in {
        ("--metric", "no/such"): f"no figure: no run has logged 'no/such', {logged}",
        ("--x", "no/such"): f"no figure: no run has logged 'no/such', {logged}",
        ("--metric", "charts/SPS", "--x", ""): f"no figure: no run has logged '', {logged}",
        ("--last", "-1"): "--last: '-1' is no whole number from 1",
        ("--last", "0"): "--last: '0' is no whole number from 1",
        ("--band", "no"): "--band: invalid choice",
        ("--where", "seed=9"): "error: no such runs in",
    }.items():
        assert said in one_line(capsys, curves.main, runs, "--out", tmp_path / "c", *flags)
    measure = (ablation, devices, env_scaling, field, growth, overhead, physics, race, returns)
    measure += (speedup,)
    for program in (curves, breakdown, *measure):
        first = ("--quick",) if program is speedup else ()
        first = (runs,) if program in (curves, breakdown) else first
        for out in ("", tmp_path / "file/x/y", "/proc/x/y"):
            assert "argument --out: " in one_line(capsys, program.main, *first, "--out", out)
        for flag in {ablation: ("--steps", "--rounds"), speedup: ("--seeds",)}.get(program, ()):
            for value in ("0", "-1", "x", 10**13):
                said = one_line(capsys, program.main, *first, flag, value)
                assert f"{flag}: '{value}' is no whole number from 1 to" in said
    assert "--only ''" in one_line(capsys, speedup.main, "--quick", "--only", "")
    assert "record: " in one_line(capsys, record.main, tmp_path / "file/r.json", runs)
    for program in (curves, breakdown, cross_stack):
        assert "runs: is empty" in one_line(capsys, program.main, "")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "file"}


def test_series_end_where_the_file_is_damaged(tmp_path):
    rows = [("charts/SPS", step, step, float(step)) for step in range(100)]
    write_events(tmp_path / "whole", rows)
    (whole,) = (tmp_path / "whole").iterdir()
    read = run_dirs.read_series(tmp_path / "whole", ["charts/SPS", "no/such"])
    assert list(read) == ["charts/SPS"] and len(read["charts/SPS"].values) == 100
    assert read["charts/SPS"].steps[-1] == 99 and read["charts/SPS"].values[-1] == 99
    for name, content in {
        "cut": whole.read_bytes()[:-300],
        "noise": whole.read_bytes()[:1000] + bytes(range(256)) * 8,
        "empty": b"",
        "text": b"no events at all",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / whole.name).write_bytes(content)
        left = run_dirs.read_series(tmp_path / name, ["charts/SPS"])
        count = len(left["charts/SPS"].values) if left else 0
        assert count < 100 and (count > 10 or name in ("empty", "text"))
    assert run_dirs.read_series(tmp_path / "gone", ["charts/SPS"]) == {}
    assert len(run_dirs.read_metric(tmp_path / "whole", "charts/SPS").values) == 100
    with pytest.raises(ValueError, match="has logged no no/such"):
        run_dirs.read_metric(tmp_path / "whole", "no/such")


def test_a_pause_before_a_run_is_resumed_is_none_of_its_seconds(tmp_path):
    day = 86_400
    for part in range(3):
        rows = []
        for step in range(10 * part, 10 * part + 10):
            rows.append(("charts/SPS", step, part * day + step, 1.0))
        write_events(tmp_path / f"{part}", rows)
        (file,) = (tmp_path / f"{part}").iterdir()
        kind, name, _, began, *rest = file.name.split(".")
        began = int(began) + part * day + 10 * part  # when its first row was written
        file.rename(tmp_path / ".".join([kind, name, "tfevents", str(began), *rest]))
    seconds = run_dirs.read_series(tmp_path, ["charts/SPS"])["charts/SPS"].seconds
    assert len(seconds) == 30 and np.diff(seconds).max() < 5 and np.diff(seconds).min() >= 0


def test_no_number_is_written_with_an_exponent():
    for x, said in (
        (12.34, "12.3"),
        (999.7, "1,000"),
        (1234.5, "1.23 k"),
        (999_600, "1,000 k"),
        (2.5e12, "2,500 G"),
    ):
        assert run_dirs.in_units(x) == said


# Curves


def test_running_means_and_grids():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(curves.running_mean(values, 2), [1, 1.5, 2.5, 3.5])
    found = curves.on_grid(np.array([0.0, 1.0, 1.5, 4.0, 5.0]), np.arange(1.0, 5.0), values)
    np.testing.assert_allclose(found, [np.nan, 1, 1.5, 4, np.nan])


def test_the_interval_is_the_bootstraps():
    """Against its definition: the mean of seeds drawn with replacement, all draws counted."""
    seeds = np.array([[1.0], [2.0], [6.0]])
    draws = [np.mean([a, b, c]) for a in seeds for b in seeds for c in seeds]
    expected = np.percentile(draws, (2.5, 97.5), method="inverted_cdf")
    np.testing.assert_allclose(np.ravel(curves.bootstrap(seeds)), expected)
    many = np.random.default_rng(1).normal(size=(200, 1))
    low, high = curves.bootstrap(many)
    assert (high - low)[0] == pytest.approx(2 * 1.96 * many.std() / math.sqrt(200), rel=0.1)


def test_where_one_seed_is_left_there_is_a_mean_and_no_interval():
    values = np.array([[1.0, 2.0, np.nan], [3.0, np.nan, np.nan]])
    np.testing.assert_array_equal(curves.mean_of_known(values), [2, 2, np.nan])
    low, high = curves.band("bootstrap", values)
    assert np.isfinite([low[0], high[0]]).all() and np.isnan([*low[1:], *high[1:]]).all()
    assert np.isnan(curves.band("bootstrap", values[:1])).all()


def test_curves_of_real_files(runs, tmp_path, capsys):
    """One folder: runs of CleanRL, one with a single episode, one with none, broken ones."""
    make_traced_run(runs, 40, config("compile+cudagraphs", 3, gpu="H"))
    single = make_run(runs, 50, config(script="td3_continuous_action"), stages(10.0))
    write_events(single, [("charts/episodic_return", 900, 5, 3.0)])
    for seed in (1, 2):
        write_events(runs / f"HalfCheetah-v5__{SCRIPT}__{seed}__170000000{seed}", events(seed, 0.5))
    wrong = {
        60: (report() | {"sps_steady": float("inf")}, "stages.json: sps_steady inf"),
        61: (report() | {"wall_seconds": float("nan")}, "stages.json: wall_seconds nan"),
        62: (report() | {"sps": "fast"}, "stages.json: sps 'fast'"),
        63: (report() | {"sps_steady": [1.0]}, "some other program"),
        64: (report() | {"stages": 5}, "some other program"),
    }
    for number, (broken, _) in wrong.items():
        make_run(runs, number, config(), broken)
    (runs / "notes").mkdir()
    out = tmp_path / "out/name"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert curves.main([str(runs), "--last", "10", "--out", str(out)]) == 0
    said = capsys.readouterr()
    for number, (_, reason) in wrong.items():
        (line,) = (line for line in said.err.splitlines() if f"__{number} " in line)
        assert reason in line
    assert "notes has no config.json" in said.err and said.err.count("skipped") == len(wrong) + 1
    kinds = ("learning", "scores")
    files = [f"name_{kind}.{end}" for kind in kinds for end in ("png", "svg")]
    assert sorted(path.name for path in out.parent.iterdir()) == sorted(
        [*files, "name_scores.json"]
    )
    assert min(image_size(out.parent / "name_learning.png")) > 300
    text = {kind: (out.parent / f"name_{kind}.svg").read_text() for kind in kinds}
    for words in ("SAC: HalfCheetah-v5", "TD3: HalfCheetah-v5", "environment steps", "wall-clock"):
        assert words in text["learning"]
    for line in ("baseline (n=2)", "compile (n=2)", "CleanRL (n=2)", "baseline (n=1)"):
        assert line in text["learning"]
    assert "unknown for CleanRL" in text["learning"] and "mean of the last 10" in text["learning"]
    assert "compile+cudagraphs" not in text["learning"]  # it has no curve
    rows = {
        row["line"]: row["iqm"] for row in json.loads(out.with_name("name_scores.json").read_text())
    }
    assert rows == {line: (15.5 + 31) / 2 for line in ("baseline", "compile", "CleanRL")}


def test_interrupted_runs_have_curves_and_no_scores(runs, tmp_path, capsys, monkeypatch):
    """Named, counted apart, and with a cross at their ends; kill -9 leaves no stages.json."""
    found = (stages(80, steps=500), stages(None, None, steps=100), None, stages(80))
    for seed, made in enumerate(found, start=3):
        path = make_run(runs, 10 * seed, config(seed=seed), made)
        write_events(path, events(seed, 1)[:10])
        if seed == 4:
            add_part(path, 100, None)  # resumed, then killed
    (path / "stages.json").write_text("")  # the disk was full
    drawn = []
    save = curves.save
    monkeypatch.setattr(curves, "save", lambda *given: drawn.append(given[0]) or save(*given))
    assert curves.main([str(runs), "--out", str(tmp_path / "c")]) == 0
    said = capsys.readouterr().err.splitlines()
    reasons = {
        30: "stopped after 500 of 1000 steps",
        40: "has no stages_100.json: killed or still running",
        50: "has no stages.json: killed or still running",
        60: "stages.json is damaged: killed or still running",
    }
    assert len(said) == len(reasons)
    for line, (number, reason) in zip(said, reasons.items(), strict=True):
        assert line.startswith("interrupted: ") and line.endswith(f"__{number} {reason}")
    text = (tmp_path / "c_learning.svg").read_text()
    assert "baseline (n=6, 4 interrupted)" in text and "compile (n=2)" in text
    steps, seconds = drawn[0].axes
    crosses = [line for line in steps.lines if line.get_marker() == "x"]
    assert [line.get_xdata()[-1] for line in crosses] == [250] * 4
    assert sum(line.get_marker() == "x" for line in seconds.lines) == 4
    rows = json.loads((tmp_path / "c_scores.json").read_text())
    assert [row["runs"] for row in rows] == [2, 2]
    whole, skipped = run_dirs.read_runs([runs])
    assert len(whole) == 4 and len(skipped) == 4, "no table counts them"


def test_a_run_of_cleanrl_that_stopped_before_others_was_interrupted(tmp_path, capsys):
    """It has neither a config.json that says how long it should be nor one that says it ended."""
    for seed, count in ((1, 41), (2, 41), (3, 21)):
        path = tmp_path / f"HalfCheetah-v5__{SCRIPT}__{seed}__170000000{seed}"
        write_events(path, events(seed, 1)[:count])
    assert curves.main([str(tmp_path), "--out", str(tmp_path / "c")]) == 0
    said = capsys.readouterr().err
    assert said == f"interrupted: {path} stopped after 500 steps, others after 1000\n"
    assert "CleanRL (n=3, 1 interrupted)" in (tmp_path / "c_learning.svg").read_text()


def test_a_run_counts_once_whatever_leads_to_it(runs, tmp_path, monkeypatch, capsys):
    """Links to folders above and to runs, a path written in two ways, a folder and its run."""
    one = min(runs.iterdir())
    (runs / "again").symlink_to(runs)
    (runs / "best").symlink_to(one)
    (tmp_path / "linked").symlink_to(runs)
    monkeypatch.chdir(tmp_path)
    ways = [runs, "runs", "linked", "linked/again/best", one, tmp_path / "runs/../linked"]
    found, skipped = run_dirs.read_runs([*map(Path, ways)])
    assert len(found) == 4 and not skipped
    assert curves.main([*map(str, ways), "--out", str(tmp_path / "c")]) == 0
    text = (tmp_path / "c_learning.svg").read_text()
    assert "baseline (n=2)" in text and "compile (n=2)" in text


def test_a_reader_who_leaves_early_sees_no_traceback(runs, tmp_path):
    """As in `| head -1`; one run of CleanRL alone is enough, named by its own directory."""
    path = runs / "Hopper-v4__sac_continuous_action__1__1700000000"
    write_events(path, events(1, 1))
    command = [sys.executable, "-u", "plots/curves.py", path, "--out", tmp_path / "out/c"]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert "Traceback" not in said and "BrokenPipe" not in said
    assert "Hopper-v4" in (tmp_path / "out/c_learning.svg").read_text()


def test_short_runs_are_drawn_as_they_are_and_long_ones_as_a_running_mean():
    """Of a tenth of the values, 10 at most: the mean of all would hide what a run has learned."""
    for count, expected in ((1, 0.0), (8, 7.0), (20, 18.5), (100, 94.5), (500, 494.5)):
        values = np.arange(count, dtype=float)
        series = {"x": run_dirs.Series(values, values, values)}
        assert curves.curve(series, "x", "steps", None)[1][-1] == expected
        assert curves.curve(series, "x", "steps", 1)[1][-1] == count - 1


# Sweeps


@pytest.fixture
def sweep_runs(tmp_path):
    """Two lambdas, the minibatches they bring along, three seeds; returns of 100 lambda + seed."""
    folder = tmp_path / "sweep"
    for i, (gae_lambda, seed) in enumerate((g, s) for g in (0.9, 1.0) for s in (1, 2, 3)):
        settings = {"gae_lambda": gae_lambda, "num_minibatches": int(10 * gae_lambda)}
        variant = folder / f"id{i}"
        path = make_run(
            variant / "runs", i, config("baseline", seed, script="ppo", **settings), report()
        )
        (variant / "variant.json").write_text("{}")
        rows = []
        for k in range(1, 41):
            value = (100 * gae_lambda + seed) * min(1, k / 20)
            rows.append(("charts/episodic_return", 10 * k * (1 + seed % 2), k, value))
            rows.append(("losses/entropy", 10 * k * (1 + seed % 2), k, float(k)))
        write_events(path, rows)
    return folder


def test_lines_are_what_varies(sweep_runs):
    runs, skipped = run_dirs.read_runs([sweep_runs])
    assert len(runs) == 6 and not skipped
    (lines,) = curves.groups(runs).values()
    # the number of minibatches follows from lambda, so it need not be in the name; seeds never are
    assert {line: len(mine) for line, mine in lines.items()} == {
        "gae_lambda=0.9": 3,
        "gae_lambda=1": 3,
    }
    (lines,) = curves.groups(runs, ["num_minibatches"]).values()
    assert list(lines) == ["num_minibatches=9", "num_minibatches=10"]  # by size, not by text
    assert [len(curves.matching(runs, w)) for w in (["seed=1"], ["seed=1", "seed=2"])] == [2, 4]
    assert len(curves.matching(runs, ["--gae-lambda=0.9", "seed=3"])) == 1
    tasks = [f"env_id={name}" for name in ("Hopper-v5", runs[0].env_id, "Ant-v5")]
    assert len(curves.matching(runs, tasks)) == 6 and not curves.matching(runs, tasks[::2])
    for run in runs[:2]:
        run.config["args"]["target_kl"] = None
    assert curves.matching(runs, ["target_kl=None", "target_kl=0.1"]) == runs[:2]
    with pytest.raises(ValueError, match="no run has a setting 'no_such'"):
        curves.matching(runs, ["no_such=1"])
    with pytest.raises(ValueError, match="--where seed: no NAME=VALUE"):
        curves.matching(runs, ["seed"])


def test_names_of_experiments_tell_lines_apart(tmp_path, capsys):
    """Three seeds before a change and two after it; in a sweep, where each run has a name, not."""
    for i, (name, seed) in enumerate(
        [("before", s) for s in (1, 2, 3)] + [("after", 1), ("after", 2)]
    ):
        settings = config("baseline", seed, script="ppo", exp_name=name)
        write_events(make_run(tmp_path / "named", i, settings, report()), events(1, 1))
    runs, _ = run_dirs.read_runs([tmp_path / "named"])
    (lines,) = curves.groups(runs).values()
    names = {line: len(mine) for line, mine in lines.items()}
    assert names == {"exp_name=after": 2, "exp_name=before": 3}
    (lines,) = curves.groups([runs[0], runs[3]]).values()
    assert list(lines) == ["exp_name=after", "exp_name=before"]  # same settings, same seed
    for i, run in enumerate(runs):
        run.config["args"] |= {"exp_name": f"id{i}", "seed": i}
    (lines,) = curves.groups(runs).values()
    assert list(lines) == ["baseline"] and len(lines["baseline"]) == 5
    twice = config("baseline", 1, script="ppo", exp_name="before")
    write_events(make_run(tmp_path / "named", 9, twice, report()), events(1, 1))
    runs, _ = run_dirs.read_runs([tmp_path / "named"])
    curves.write(runs, tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("another run has its settings and seed") and "__1__" in line


def test_small_returns_keep_their_digits(tmp_path):
    path = make_run(tmp_path, 1, config("baseline", 1), report())
    rows = [("charts/episodic_return", 10 * k, k, value) for k, value in ((1, 0.0035), (2, 5e-4))]
    write_events(path, rows)
    record.main([str(tmp_path / "small.json"), str(path)])
    (run,) = json.loads((tmp_path / "small.json").read_text())["runs"]
    assert [value for _, value, _ in run["episodic_returns"]] == [0.0035, 0.0005]


def test_a_seed_counts_once(sweep_runs, tmp_path):
    """Three copies of a run are no three runs: the newest whole one counts, not the record."""
    for number in (100, 200, 300):
        path = make_run(tmp_path / "more", number, config("baseline", 1, gae_lambda=0.9), stages(9))
        write_events(path, events(1, 1))
        if number == 100:
            record.main([str(tmp_path / "100.json"), str(path)])
            shutil.rmtree(path)
    (path / "stages.json").unlink()  # of the newest, which was killed
    runs, skipped = run_dirs.read_runs([tmp_path / "more", tmp_path / "100.json"], whole=False)
    assert len(runs) == 3 and not skipped
    (lines,) = curves.groups(runs).values()
    assert [run.path.name.rpartition("__")[2] for run in lines["baseline"]] == ["200"]
    whole, _ = run_dirs.read_runs([sweep_runs])
    assert curves.groups(whole + whole) == curves.groups(whole)


def test_bands_are_what_they_say():
    values = np.random.default_rng(0).normal(size=(7, 5))
    values[0, 1] = np.nan
    known = [values[~np.isnan(values[:, g]), g] for g in range(5)]
    means = np.array([k.mean() for k in known])
    deviations = np.array([k.std(ddof=1) for k in known])
    low, high = curves.band("std", values)
    np.testing.assert_allclose(low, means - deviations)
    np.testing.assert_allclose(high, means + deviations)


def test_curves_are_compared_wherever_one_has_a_value():
    grid = curves.union_grid([np.array([1.0, 3.0]), np.array([2.0, 3.0, 4.0])])
    assert grid.tolist() == [1, 1.5, 2, 2.5, 3, 3.5, 4]
    many = curves.union_grid([np.arange(5000.0)])
    assert len(many) == 2 * curves.POINTS - 1 and many[[0, -1]].tolist() == [0, 4999]


def test_no_line_joins_two_runs_with_a_gap_between_them():
    grid = curves.union_grid([np.array([1.0, 2.0]), np.array([6.0, 7.0])])
    both = [([1.0, 2.0], [5.0, 6.0]), ([6.0, 7.0], [5.0, 6.0])]
    values = np.array([curves.on_grid(grid, np.array(x), np.array(y)) for x, y in both])
    np.testing.assert_array_equal(curves.mean_of_known(values), [5, 5.5, 6, np.nan, 5, 5.5, 6])


def test_any_metric_is_an_axis(sweep_runs):
    (path,) = list(sweep_runs.glob("id0/runs/*"))
    series = run_dirs.read_series(path, ["charts/episodic_return", "losses/entropy"])
    x, y = curves.curve(series, "charts/episodic_return", "losses/entropy", 1)
    assert x.tolist() == list(range(1, 41)) and y[-1] == pytest.approx(91)
    assert curves.curve(series, "charts/episodic_return", "no/such", 1) is None
    assert curves.curve(series, "no/such", "steps", 1) is None


def test_interquartile_mean_is_of_the_middle_half():
    assert curves.iqm(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == np.mean([2, 3, 4, 5])
    assert curves.iqm(np.array([1.0, 2, 9])) == 4  # nothing to cut below four
    scores = np.random.default_rng(0).normal(size=101)
    ordered = np.sort(scores)[25:-25]
    assert curves.iqm(scores) == pytest.approx(ordered.mean())


def test_the_stratified_bootstrap_draws_within_each_task():
    """Between two tasks lies a gulf: drawn from both alike, half of the runs would be of one."""
    rng = np.random.default_rng(0)
    low, high = curves.stratified([rng.normal(0, 1, 50), rng.normal(1000, 1, 50)])
    assert 400 < low < high < 600 and high - low < 100
    scores, other = rng.normal(size=50), np.random.default_rng(1)
    draws = [curves.iqm(other.choice(scores, 50)) for _ in range(2000)]
    expected = np.percentile(draws, (2.5, 97.5))
    np.testing.assert_allclose(curves.stratified([scores]), expected, atol=0.05)


def test_where_half_of_the_runs_never_arrive_the_median_is_never():
    row = {"script": "s", "line": "l", "runs": 4, "iqm": 1.0, "low": 0.0, "high": 2.0}
    row["finals"] = {}
    for times, said in (
        ([300.0, 100.0, None, 200.0], ["250", "1"]),
        ([300.0, None], ["never", "1"]),
        ([None, None], ["never", "2"]),
    ):
        assert curves.score_cells([row | {"times": times}], 5.0)[1][-2:] == said


def test_lines_of_other_tasks_are_named_by_them():
    """In their colours, since a row has the same in every figure."""
    row = {"script": "s", "runs": 2, "iqm": 1.0, "low": 0.0, "high": 2.0}
    one = row | {"line": "baseline", "finals": {"Ant": [1.0, 2.0]}}
    both = row | {"line": "compile", "finals": {"Ant": [1.0, 2.0], "Hopper": [3.0, 4.0]}}
    heading, *table = curves.score_cells([one, both], None)
    assert [line[heading.index("tasks")] for line in table] == ["Ant", "Ant, Hopper"]
    same = both | {"finals": one["finals"]}
    for other, names in (
        (both, ["baseline (Ant)", "compile (Ant, Hopper)"]),
        (same, ["baseline", "compile"]),
    ):
        figure = curves.draw_scores([one, other], "return")
        left, right = figure.axes
        assert [text.get_text() for text in left.get_yticklabels()] == names
        assert [line.get_label() for line in right.lines] == names
        colours = [curves.COLOURS[row] for row in ("baseline", "compile")]
        assert [line.get_color() for line in right.lines] == colours
        plt.close(figure)


def test_scores_count_who_never_arrives(sweep_runs, tmp_path, capsys):
    out = tmp_path / "out/s"
    assert curves.main([str(sweep_runs), "--last", "1", "--target", "92", "--out", str(out)]) == 0
    rows = json.loads(out.with_name("s_scores.json").read_text())
    assert [row["line"] for row in rows] == ["gae_lambda=0.9", "gae_lambda=1"]
    assert rows[0]["times"] == [None, 200.0, 400.0]  # seed 1 ends at 91
    assert None not in rows[1]["times"]
    assert rows[1]["iqm"] == pytest.approx(102) and rows[1]["runs"] == 3
    assert rows[1]["low"] < 102 < rows[1]["high"]
    text = out.with_name("s_scores.svg").read_text()
    assert "interquartile mean" in text and "gae_lambda=0.9" in text
    figure = curves.draw_scores(rows, "episodic return, each value")
    assert curves.save(figure, tmp_path / "s_scores")[1].read_text() == text  # bytes repeat
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "gae_lambda=0.9" in line)
    assert line.split()[-2:] == ["400", "1"]  # median and never: the latter is the last of three


def test_a_record_has_the_curves_and_scores_of_its_runs(sweep_runs, tmp_path, monkeypatch, capsys):
    """One that was made before records had seconds has those over steps."""
    path = tmp_path / "record.json"
    assert record.main([str(path), *map(str, sorted(sweep_runs.glob("*/runs/*")))]) == 0
    drawn = []
    save = curves.save
    monkeypatch.setattr(curves, "save", lambda *given: drawn.append(given[0]) or save(*given))

    def curves_of(source):
        drawn.clear()
        stem = tmp_path / "out/c"
        assert curves.main([str(source), "--last", "1", "--target", "92", "--out", str(stem)]) == 0
        points = [[line.get_xydata() for line in ax.lines] for ax in drawn[0].axes]
        return *points, json.loads(stem.with_name("c_scores.json").read_text())

    steps, seconds, scores = curves_of(sweep_runs)
    capsys.readouterr()
    steps_again, seconds_again, scores_again = curves_of(path)
    assert "interrupted" not in capsys.readouterr().err and scores_again == scores
    for one, other in zip(steps, steps_again, strict=True):
        np.testing.assert_allclose(one, other, atol=0.01)
    for one, other in zip(seconds, seconds_again, strict=True):  # rounded, so the grid differs
        np.testing.assert_allclose(one[-1], other[-1], atol=0.01)
    whole = json.loads(path.read_text())
    for run in whole["runs"]:
        run["episodic_returns"] = [row[:2] for row in run["episodic_returns"]]
    path.write_text(json.dumps(whole))
    steps_again, seconds_again, scores_again = curves_of(path)
    assert len(steps_again) == len(steps) and not seconds_again and scores_again == scores
    (tmp_path / "other.json").write_text(json.dumps({"runs": [{}]}))
    found, skipped = run_dirs.read_runs([tmp_path / "other.json", path, path])
    assert len(found) == 6 and len(skipped) == 1 and "is no record of runs" in skipped[0]
    assert len(run_dirs.read_runs([sweep_runs, path])[0]) == 6, "a run counts once"
    for run in whole["runs"][:2]:
        run["config"]["args"]["total_timesteps"] = 2000
    path.write_text(json.dumps(whole))
    found, skipped = run_dirs.read_runs([path])
    assert len(found) == 4 and all("of 2000 steps" in line for line in skipped)


def test_the_mean_ends_with_the_first_finished_run():
    """Afterwards it would be that of others, and jump; an interrupted run is not in it."""
    ends = ((4, 1, ""), (3, 3, ""), (2, 9, "interrupted"))
    lines = [(np.arange(float(end)), np.full(end, y), missing) for end, y, missing in ends]
    figure, ax = plt.subplots()
    curves.draw_line(ax, lines, "std", "a", {"color": "k"})
    (mean,) = (line for line in ax.get_lines() if line.get_label() == "a (n=3, 1 interrupted)")
    assert mean.get_xdata().max() == 2 and set(mean.get_ydata()) == {2}
    plt.close(figure)


def test_choices_of_the_command(sweep_runs, tmp_path, capsys):
    out = tmp_path / "out/s"
    flags = ["--x", "seconds", "--band", "std", "--by", "num-minibatches"]
    assert curves.main([str(sweep_runs), *flags, "--out", str(out)]) == 0
    text = out.with_name("s_learning.svg").read_text()
    assert "num_minibatches=10" in text and "standard deviation" in text
    assert "wall-clock" in text and "environment steps" not in text
    for words, why in (("seed=9", "no such runs"), ("a=1", "no run has a setting 'a'")):
        assert curves.main([str(sweep_runs), "--where", words, "--out", str(out)]) == 2
        assert why in capsys.readouterr().err


# Breakdown


def test_breakdown_sums_to_the_untraced_time(runs):
    found, skipped = run_dirs.read_runs([runs])
    chosen, rows = zip(*breakdown.reduce_all(found), strict=True)
    assert not skipped and [row["row"] for row in rows] == ["baseline", "compile"]
    assert [run.config["args"]["seed"] for run in chosen] == [2, 2], "the newest of each row"
    for row in rows:
        assert row["seconds_per_step"] == pytest.approx(0.1)
        cells = row["cells"]
        assert sum(sum(stage.values()) for stage in cells.values()) == pytest.approx(0.1)
        assert cells["simulation"] == {"simulator_s CPU": pytest.approx(0.01)}
        assert cells["rest"] == {"python_s CPU": pytest.approx(0.01)}  # untracked
        counts = {"to_simulator": 1, "to_backend": 201, "to_cuda": None}
        assert row["transitions_per_iteration"] == counts
        assert row["cpu_share"] is None and row["gpu_busy"] is None


def test_utilization_is_the_area_under_the_curve(tmp_path, capsys):
    """Processor seconds 1, 4, 5 at 2, 4, 6 s: 150%, then 50%; NVML at 3, 4, 6 s: 0, 100, 50."""
    path = make_run(tmp_path / "gpu", 1, config("baseline", gpu="H"), report(gpu=True))
    write_events(path, usage((2, 1, 99), (3, 2.5, 0), (4, 4, 100), (6, 5, 50)))
    path = make_run(tmp_path / "cpu", 2, config("compile"), report() | {"sps_steady": None})
    write_events(path, usage((2, 1), (4, 4), (6, 5)))
    path = make_run(tmp_path / "cpu", 3, config("eager", env_id="Hopper-v5"), report())
    write_events(path, usage((2, 1), (2.25, 1.125), (2.5, 1.25)))
    path = make_run(tmp_path / "cpu", 4, config("eager", env_id="Ant-v5"), report())
    write_events(path, usage((2, 1)))
    path = make_run(tmp_path / "cpu", 5, config("cudagraphs"), report())
    write_events(path, usage((2, 1), (4, 4)))
    add_part(path, 500, report())  # two processes: whose seconds are these?
    write_events(make_run(tmp_path / "cpu", 6, config("compile"), None), usage((2, 1), (4, 4)))

    def rows(name):
        assert utilization.main([str(tmp_path / name), "--out", str(tmp_path / "u")]) == 0
        assert image_size(tmp_path / "u.png")[0] > 400
        return json.loads((tmp_path / "u.json").read_text())["rows"]

    (on_gpu,) = rows("gpu")
    assert "| 50 | 200 | 100 | 400 |" in (tmp_path / "u.md").read_text()
    on_cpu, hopper = rows("cpu")
    assert "| - | - | - | 100 | 400 |" in (tmp_path / "u.md").read_text()

    def same(found, expected):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)

    same(on_gpu["lines"]["GPU"], [[2, 3, 0], [3, 4, 100], [4, 6, 50]])
    assert on_gpu["GPU"] == pytest.approx({"area": 100 + 2 * 50, "mean": 200 / 4}, rel=1e-4)
    for row in (on_gpu, on_cpu):
        assert row["processor"] == pytest.approx({"area": 400, "mean": 100}, rel=1e-4)
    same(on_gpu["lines"]["processor"], [[2, 3, 150], [3, 4, 150], [4, 6, 50]])
    same(on_cpu["lines"]["processor"], [[2, 4, 150], [4, 6, 50]])
    same([on_gpu["window"], hopper["window"]], [4, 0.5])
    assert hopper["processor"] == pytest.approx({"area": 25, "mean": 50}, rel=1e-4)
    same(hopper["lines"]["processor"], [[2, 2.5, 50]])
    assert (on_gpu["row"], on_cpu["row"]) == ("baseline", "compile")
    assert on_cpu["lines"].keys() == hopper["lines"].keys() == {"processor"}
    assert utilization.main([str(tmp_path / "none"), "--out", str(tmp_path / "n")]) == 1
    assert "no utilization" in capsys.readouterr().err


def test_an_interrupted_run_has_a_breakdown_if_it_has_a_trace(tmp_path):
    make_traced_run(tmp_path, 1, config(), report() | stages(10.0, steps=500))
    make_run(tmp_path, 2, config("compile"), report() | stages(10.0, steps=500))
    assert breakdown.main([str(tmp_path), "--out", str(tmp_path / "out/b")]) == 0
    (row,) = json.loads((tmp_path / "out/b.json").read_text())["rows"]
    assert row["row"] == "baseline"


def test_a_finished_run_counts_before_a_newer_one_that_was_interrupted(tmp_path, capsys):
    """Which is named; a quarter of the seconds would be a quarter of the area."""
    write_events(make_run(tmp_path, 1, config(), report()), usage((2, 1), (4, 4), (6, 5)))
    path = make_run(tmp_path, 2, config(seed=2), report() | stages(10.0, steps=250))
    write_events(path, usage((2, 1), (3, 2), first=150))
    assert utilization.main([str(tmp_path), "--out", str(tmp_path / "u")]) == 0
    (row,) = json.loads((tmp_path / "u.json").read_text())["rows"]
    assert row["processor"]["area"] == pytest.approx(400, rel=1e-4)
    said = capsys.readouterr().err
    assert said == f"interrupted: {path} stopped after 250 of 1000 steps\n"


def test_what_is_inside_a_compiled_call_has_no_share(tmp_path):
    path = make_traced_run(tmp_path, 1, config())
    stages_file = path / "stages.json"
    whole = json.loads(stages_file.read_text())
    whole["stages"]["simulation"] = 0.0
    stages_file.write_text(json.dumps(whole))
    row = breakdown.reduce(run_dirs.read_run(path))
    assert not row["cells"]["simulation"] and row["transitions_per_iteration"]["to_simulator"] == 0
    assert "the backend takes" in breakdown.limits(row) and "simulator" not in breakdown.limits(row)
    heading, line = breakdown.cells([row])
    assert line[heading.index("simulation")] == "-" and line[heading.index("to simulator")] == "0"


def test_an_iteration_is_a_step_of_all_environments(tmp_path):
    path = make_traced_run(tmp_path, 1, config(num_envs=8))
    counts = breakdown.reduce(run_dirs.read_run(path))["transitions_per_iteration"]
    assert counts["to_backend"] == 8 * 201 and counts["to_simulator"] == 1


def test_breakdown_on_a_gpu(tmp_path):
    """Waiting beside a busy GPU is the GPU's time; all else beside it is both's."""
    path = make_traced_run(tmp_path, 1, config("compile", gpu="H"))
    row = breakdown.reduce(run_dirs.read_run(path))
    update = row["cells"]["backpropagation"]
    assert update["cuda_wait_s GPU"] == pytest.approx(0.03) and "cuda_wait_s CPU" not in update
    assert update["backend_s CPU + GPU"] == pytest.approx(0.0015)
    assert update["backend_s CPU"] == pytest.approx(0.0135)
    assert sum(update.values()) == pytest.approx(0.06)
    assert row["cpu_share"] == pytest.approx(0.7)
    # 66 ms of kernels in a traced step of 200 ms, which are 66 of 100 ms of one that is not traced:
    # the profiler slows the CPU down and no kernel, although here it waits for them twice as long
    assert row["gpu_busy"] == pytest.approx(0.66)
    assert row["transitions_per_iteration"]["to_cuda"] == 40


@pytest.mark.parametrize("gpu", [None, "H"])
def test_figures_of_breakdown(tmp_path, capsys, gpu):
    number = 0
    for script, env_id in ((SCRIPT, "HalfCheetah-v5"), ("ppo_cartpole_gpu", "CartPole-v1")):
        for row in ("baseline", "compile"):
            number += 1
            arguments = config(row, gpu=gpu, script=script, env_id=env_id)
            make_traced_run(
                tmp_path / "runs", number, arguments, operators=2000 if row == "baseline" else 10
            )
    broken = make_run(tmp_path / "runs", 8, config("compile", gpu=gpu), report())
    (broken / "trace.json.gz").write_bytes(b"no gzip")
    made = report() | {"iterations": 0}
    lacking = make_traced_run(tmp_path / "runs", 7, config("compile", gpu=gpu), made)
    make_run(tmp_path / "runs", 9, config("eager", gpu=gpu), stages(5))  # not traced
    other = make_traced_run(tmp_path / "runs", 0, config("cudagraphs", gpu="other"))
    write_events(tmp_path / f"runs/HalfCheetah-v5__{SCRIPT}__1__10", events(1, 1))  # CleanRL's
    out = tmp_path / "out/b"
    assert breakdown.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert f"{broken} trace.json.gz is damaged" in said.err
    assert f"{lacking} has a report that lacks something" in said.err
    assert f"{other} is of another machine" in said.err and "201" in said.out
    assert sorted(path.name for path in out.parent.iterdir()) == [
        *("b.json", "b.md", "b_stages.png", "b_stages.svg")
    ]
    assert min(image_size(out.with_name("b_stages.png"))) > 300
    text = out.with_name("b_stages.svg").read_text()
    assert "PPO CartPole: CartPole-v1" in text and "per step" in text
    record = json.loads(out.with_suffix(".json").read_text())
    shares = {row["cpu_share"] and round(row["cpu_share"], 2) for row in record["rows"]}
    assert shares == ({0.7} if gpu else {None})
    assert len(record["rows"]) == 4 and "eager" not in {row["row"] for row in record["rows"]}


def test_no_trace_is_one_line(tmp_path, capsys):
    make_run(tmp_path, 1, config(), stages(5))
    assert breakdown.main([str(tmp_path), "--out", str(tmp_path / "b")]) == 1
    assert "no run has a complete trace" in capsys.readouterr().err


def test_no_module_here_hides_one_of_python():
    names = {path.stem for path in (ROOT / "plots").rglob("*.py")}
    assert not names & sys.stdlib_module_names


# The scaling study


def test_figures_of_the_study_show_arms_on_a_gpu(tmp_path):
    """A made-up record, because none was measured on a GPU."""
    blocks = (1, 16, 32, 64, 256, 1024)
    arms = [f"{name}, TPB {threads}" for name in ("kernel", "Numba-CUDA") for threads in blocks]
    arms += [
        f"{name}, {where}" for name in ("tensors", "tensors compiled") for where in ("CPU", "GPU")
    ]
    arms += ["kernel, CPU threads", "SB3 SubprocVecEnv", "Gymnasium sync", "EnvPool"]
    rows = [
        {"arm": arm, "num_envs": n, "seconds": [1e-5 * (1 + i) + 1e-9 * n]}
        for i, arm in enumerate(arms)
        for n in (1, 1000, 1_000_000)
    ]
    rows.append({"arm": arms[0], "num_envs": 10**7, "failed": "out of memory"})
    here = config(gpu="H200") | machine() | {"gpu": "H200"}
    here["cpu"] = here["cpu"] | {"threads": 2}
    here = run_dirs.machine([here])
    study = {"command": "python env_scaling.py", "machine": here, "rows": rows, "skipped": {}}
    study["bytes_per_second"] = {"cpu": 3e10, "cuda": 4e12}
    (ax,) = env_report.throughput(study).axes
    lines = {line.get_label(): line for line in ax.lines}
    assert set(arms) < set(lines) and "H200" in ax.get_title()
    assert len({to_rgb(lines[arm].get_color()) for arm in arms}) == len(arms)
    assert lines[arms[0]].get_xdata().tolist() == [1, 1000, 1_000_000]
    for memory, bytes_per_second in (("CPU", 3e10), ("CUDA", 4e12)):
        (limit,) = (line for label, line in lines.items() if f"limit of {memory}" in label)
        assert limit.get_ydata()[0] == bytes_per_second / 95
    diamonds = [line for line in ax.lines if line.get_marker() == "D" and len(line.get_xdata())]
    assert len(diamonds) == len(arms), "a turning point each"
    env_report.write(study, tmp_path / "s")
    assert min(image_size(tmp_path / "s_throughput.png")) > 300
    assert "Numba-CUDA, TPB 1024" in (tmp_path / "s.md").read_text()
