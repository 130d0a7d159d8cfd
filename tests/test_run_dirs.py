"""Run directories and their records as plots/ reads them, and what its programs have in common."""

import ast
import graphlib
import json
import subprocess
import sys

import ablation
import curves
import numpy as np
import pytest
import record
import run_dirs
import speedup
import tables
from conftest import ROOT
from fake_runs import (
    add_part,
    config,
    learning,
    machine,
    make_run,
    read_record,
    report,
    stages,
    trace_events,
    write_events,
)
from traces import CPU_LAYERS, reduce_trace

# Reading a run


def test_layers_are_scaled_to_the_untraced_seconds():
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


def test_kernels_are_not_scaled():
    trace = reduce_trace(trace_events(gpu=True)) | {"env_steps": 10}
    found = run_dirs.per_step(report(gpu=True), trace)["backpropagation"]
    assert found["gpu_s"] == pytest.approx(0.066)
    assert found["gpu_overlap_s"] == pytest.approx(0.033)  # of the CPU's time: scaled with it


def test_a_traced_run_ends_with_its_last_row(tmp_path):
    """Its report ends where the trace begins, and says nothing of the steps after that."""
    for last, missing in ((1000, ""), (500, "stopped after 500 of 1000 steps")):
        path = make_run(tmp_path, last, config(stopwatch="trace"), stages(80, steps=700))
        write_events(path, [("charts/SPS", step, step, 1.0) for step in (100, last)])
        assert run_dirs.read_run(path, whole=False).missing == missing


NOTHING = stages(None, None, steps=0)
RESUMED = {  # reports of both parts; steps before, and in all; the speed of the run, or why none
    "nothing-left": (stages(80), NOTHING, 1000, 1000, [80], ""),
    "killed-on-the-way-to-more": (stages(80), None, 1000, 2000, [80], ""),
    "short-rest": (stages(80, steps=990), stages(None, None, steps=10), 990, 1000, [80], ""),
    "halves": (stages(80, steps=500), stages(90, steps=500), 500, 1000, [90], ""),
    "killed": (stages(80, steps=500), None, 500, 1000, [], "has no stages_500.json"),
    "stopped": (stages(80, steps=500), stages(90, steps=100), 500, 1000, [], "stopped after 600"),
}


@pytest.mark.parametrize("first, rest, before, total, speeds, why", RESUMED.values(), ids=RESUMED)
def test_parts_of_a_resumed_run(tmp_path, first, rest, before, total, speeds, why):
    path = make_run(tmp_path, 1, config(), first)
    add_part(path, before, rest, total_timesteps=total)
    runs, skipped = run_dirs.read_runs([path])
    assert [run.stages["sps_steady"] for run in runs] == speeds and why in " ".join(skipped)


REPORT, CONFIG = "stages.json", "config.json"
UNUSABLE = {  # a file of a run that holds something else: what is said
    "no-report": (REPORT, "", "stages.json is damaged: killed or still running"),
    "stopped": (REPORT, stages(90, steps=500), "stopped after 500 of 1000 steps"),
    "no-window": (REPORT, stages(None), "no steady steps/s"),
    "foreign": (REPORT, {"some": 3}, "some other program"),
    "no-warm-up": (REPORT, stages(90, None), "some other program"),
    "endless": (REPORT, stages(float("inf")), "some other program"),
    "text": (REPORT, stages(90) | {"sps": "fast"}, "some other program"),
    "list": (CONFIG, [1], "config.json is damaged"),
    "empty": (CONFIG, {}, "some other program"),
    "args": (CONFIG, {"args": 3}, "some other program"),
    "versions": (CONFIG, config() | {"versions": 3}, "some other program"),
    "task": (CONFIG, config(env_id=None), "some other program"),
    "machine": ("machine.json", None, "machine.json is damaged"),
    "cut": (CONFIG, '{"args":', "config.json is damaged"),
    "deep": (CONFIG, "[" * 10**5, "config.json is damaged"),
}


@pytest.mark.parametrize(("file", "content", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_run_is_named(tmp_path, file, content, reason):
    make_run(tmp_path, 1, config(), stages(80))
    bad = make_run(tmp_path, 2, config(), stages(90))
    text = content if isinstance(content, str) else json.dumps(content)
    (bad / file).write_text(text)
    runs, (said,) = run_dirs.read_runs([tmp_path])
    assert len(runs) == 1 and said.startswith(f"{bad} ") and reason in said


def test_runs_are_found_below_a_folder(tmp_path):
    """What a former attempt of a sweep's variant has left does not count."""
    variant = tmp_path / "sweep/id0"
    make_run(variant / "runs", 1, config(), report())
    make_run(variant / "attempts/1/runs", 99, config(), report())
    (variant / "variant.json").write_text("{}")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "empty").mkdir()
    for path in (variant.parent, variant):
        runs, skipped = run_dirs.read_runs([path])
        assert len(runs) == 1 and not skipped
    runs, skipped = run_dirs.read_runs([tmp_path, tmp_path / "gone"])
    told = [f"{tmp_path}/empty has no config.json", f"{tmp_path}/gone does not exist"]
    assert len(runs) == 1 and skipped == told


def test_a_run_counts_once_whatever_leads_to_it(tmp_path, monkeypatch):
    """Links to folders above and to runs, a path written in two ways, a folder and its run."""
    runs = tmp_path / "runs"
    one = make_run(runs, 1, config(), stages(80))
    make_run(runs, 2, config(seed=2), stages(80))
    (runs / "again").symlink_to(runs)
    (runs / "best").symlink_to(one)
    (tmp_path / "linked").symlink_to(runs)
    ways = [runs, one, *(tmp_path / way for way in ("linked/again/best", "runs/../linked"))]
    found, skipped = run_dirs.read_runs(ways)
    assert len(found) == 2 and not skipped


def test_worlds_have_the_names_of_today(tmp_path):
    """The environment that of their evaluation, and the script one, also in older records."""
    made_by = config(script="ppo_mujoco_gpu", env_id="worlds/Ant-v5")
    run = run_dirs.read_run(make_run(tmp_path, 1, made_by, stages(50.0)))
    assert (run.script, run.env_id) == ("ppo_mujoco_worlds", "Ant-v5")


def test_cudagraphs_without_a_device_count_as_what_ran(tmp_path):
    path = make_run(tmp_path, 1, config("compile+cudagraphs"), stages(10))
    assert run_dirs.read_run(path).row == "compile"


# The machine of a run


def test_the_machine_stands_beside_the_run(tmp_path):
    run = run_dirs.read_run(make_run(tmp_path, 1, config(gpu="H"), stages(80)))
    cpu = {"model": "Abacus", "vectors": "AVX2", "cores": 2, "threads": 2}
    assert run.config["cpu"] == cpu and run.config["gpu"] == "H"  # what the run had comes first


def test_an_unknown_machine_is_no_difference(tmp_path):
    path = make_run(tmp_path, 1, config(), stages(80))
    run = run_dirs.read_run(path)
    (path / "machine.json").unlink()
    unknown = run_dirs.read_run(path)
    assert not run_dirs.differences(run.config, unknown.config)
    lines = run_dirs.describe(run_dirs.machine([unknown.config]))
    assert "CPU: unknown processor, 2 torch threads" in lines
    assert "Python unknown, torch 2.13.0" in lines


# Records


def record_of(path):
    stem = path.parent / "record"
    assert record.main([f"{stem}.json", str(path)]) == 0
    (run,) = read_record(stem)["runs"]
    return run


def test_a_record_has_report_and_returns_of_a_run(tmp_path):
    path = make_run(tmp_path, 1, config(), stages(80))
    write_events(path, [*learning(), ("charts/eval_return", 1000, 20, 0.0035)])
    run = record_of(path)
    assert run["run"] == path.name and run["stages"] == stages(80)
    assert run["mean_return_last_10"] == 15.5
    assert [row[:2] for row in run["eval_returns"]] == [[1000, 0.0035]]  # small, with all digits
    (first, *_, last) = run["episodic_returns"]
    assert first[:2] == [50, 1.0] and last[:2] == [1000, 20.0]
    assert last[2] - first[2] == pytest.approx(19) and first[2] < 100  # seconds, of the run


@pytest.mark.parametrize(
    ("here", "model"),
    [({}, "Abacus"), ({"gpu": "H"}, None), ({"versions": {"torch": "2.14.0"}}, None)],
    ids=["same", "other-gpu", "other-torch"],
)
def test_a_record_guesses_the_machine_if_it_can_be_this(tmp_path, monkeypatch, here, model):
    path = make_run(tmp_path, 1, config(), stages(80))
    (path / "machine.json").unlink()
    write_events(path, learning())
    monkeypatch.setattr(run_dirs, "this_machine", lambda: machine() | here)
    found = record_of(path)["config"]
    assert found["cpu"]["model"] == model and found["versions"]["torch"] == "2.13.0"
    assert found["load_average"] is None, "nobody knows what it was then"


def test_a_run_without_returns_makes_no_record(tmp_path):
    path = make_run(tmp_path, 1, config(), stages(80))
    with pytest.raises(SystemExit, match="has logged no episodic return"):
        record.main([str(tmp_path / "r.json"), str(path)])


def test_runs_of_a_record_are_read_as_the_runs(tmp_path):
    """Each once; and what did not end, or is no record, is named."""
    path = make_run(tmp_path, 1, config(), stages(80))
    write_events(path, learning())
    record_of(path)
    (tmp_path / "other.json").write_text(json.dumps({"runs": [{}]}))
    files = [tmp_path / f"{name}.json" for name in ("other", "record", "record")]
    (run,), (said,) = run_dirs.read_runs(files)
    assert run.path.name == path.name and "is no record of runs" in said
    assert len(run_dirs.read_runs([path, files[1]])[0]) == 1
    files[1].write_text(files[1].read_text().replace('timesteps": 1000', 'timesteps": 2000'))
    runs, (said,) = run_dirs.read_runs(files[1:2])
    assert not runs and "of 2000 steps" in said


# Series


def test_series_end_where_their_file_is_damaged(tmp_path):
    write_events(tmp_path, [("charts/SPS", step, step, float(step)) for step in range(100)])
    (file,) = tmp_path.iterdir()
    read = run_dirs.read_series(tmp_path, ["charts/SPS", "no/such"])
    assert list(read) == ["charts/SPS"] and read["charts/SPS"].values.tolist() == [*range(100)]
    file.write_bytes(file.read_bytes()[:1000] + bytes(range(256)) * 8)
    assert 10 < len(run_dirs.read_series(tmp_path)["charts/SPS"].values) < 100
    file.write_bytes(b"no events at all")
    assert run_dirs.read_series(tmp_path) == {}


def test_the_pause_before_a_resume_has_no_seconds(tmp_path):
    day = 86_400
    for part in range(3):
        steps = range(10 * part, 10 * part + 10)
        write_events(tmp_path / f"{part}", [("charts/SPS", x, part * day + x, 1.0) for x in steps])
        (file,) = (tmp_path / f"{part}").iterdir()
        kind, name, _, began, *rest = file.name.split(".")
        began = int(began) + part * day + 10 * part  # when its first row was written
        file.rename(tmp_path / ".".join([kind, name, "tfevents", str(began), *rest]))
    seconds = run_dirs.read_series(tmp_path, ["charts/SPS"])["charts/SPS"].seconds
    assert len(seconds) == 30 and np.diff(seconds).max() < 5 and np.diff(seconds).min() >= 0


# What all programs have


def test_numbers_have_units_and_no_exponent():
    numbers = (12.34, 999.7, 1234.5, 999_600, 2.5e12)
    said = ["12.3", "1,000", "1.23 k", "1,000 k", "2,500 G"]
    assert [tables.in_units(x) for x in numbers] == said


ARGUMENTS = [
    (curves, ["runs", "--last", "0"], "--last: '0' is no whole number from 1"),
    (curves, ["runs", "--out", ""], "--out: '' names no file"),
    (curves, [""], "runs: is empty"),
    (record, ["file/r.json", "runs"], "record: file: "),
    (ablation, ["--rounds", "10000"], "--rounds: '10000' is no whole number from 1 to 1,000"),
    (ablation, ["--out", "file/x"], "--out: file/x: Not a directory"),
    (speedup, ["--quick", "--only", ""], "--only ''"),
]


@pytest.mark.parametrize(("program", "flags", "said"), ARGUMENTS)
def test_wrong_arguments_are_one_line(program, flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        sys.exit(program.main(flags))
    error = capsys.readouterr().err
    assert end.value.code in (1, 2) and said in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_closed_pipe_is_no_traceback():
    """More than a pipe holds, and as little as Python flushes only at its end."""
    for length in (10**6, 10):
        code = f"import program; program.start(lambda: print('x' * {length}))"
        command = f'"{sys.executable}" -c "{code}" | true; echo ${{PIPESTATUS[0]}}'
        folder = ROOT / "plots"
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
    command = [sys.executable, "-c", f"import program; program.start(lambda: {code})"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT / "plots", stdout=full, stderr=-1, text=True)
    assert (done.returncode, done.stderr) == (1, f"{said}\n")


def test_modules_import_one_another_in_one_direction():
    """plots/ nothing of plots/measure/, and no two modules each other, directly or by others."""
    files = {path.stem: path for path in (ROOT / "plots").rglob("*.py")}
    assert not files.keys() & sys.stdlib_module_names, "one hides a module of Python"
    imports = {}
    for name, path in files.items():
        imports[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom):
                imports[name] |= {node.module} & files.keys()
    tuple(graphlib.TopologicalSorter(imports).static_order())  # raises where there is a circle
    for name in (path.stem for path in (ROOT / "plots").glob("*.py")):
        assert all(files[other].parent.name == "plots" for other in imports[name]), name


def test_programs_find_their_modules():
    """Also those of plots/, from plots/measure/, and as Python starts them."""
    code = """
import importlib, pathlib, sys
plain = sys.path[1:]
for path in sorted(pathlib.Path("plots").rglob("*.py")):
    sys.path[:] = [str(path.parent.resolve()), *plain]
    importlib.import_module(path.stem)
    for name, module in list(sys.modules.items()):
        if "/plots/" in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
