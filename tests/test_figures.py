"""What is drawn and said about runs: curves, breakdowns, profiles, the stopwatch's overhead."""

import copy
import json
import math
import runpy
import shutil
import subprocess
import sys

import breakdown
import curves
import numpy as np
import overhead
import pytest
import run_dirs
from conftest import ROOT
from fake_runs import SCRIPT, config, make_run, report, stages, write_events

from leanrl.stopwatch import CPU_FIELDS, TRACE_FIELDS

profile = runpy.run_path(str(ROOT / "plots/profile.py"))  # imported it would be Python's own


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
            path = make_run(folder, 10 * seed + i, config(row, seed, total_timesteps=1000), made)
            rows = [("charts/SPS", 0, 0, 0.0)]
            for k in range(1, 21):
                rows.append(("charts/episodic_return", 50 * k, k / (1 + i), float(k * seed)))
                rows.append(("charts/SPS", 50 * k, k / (1 + i), 50.0 * (1 + i)))
            write_events(path, rows)
    return folder


# Reading


def test_the_reports_of_the_stopwatch_are_understood():
    assert set(run_dirs.CPU_LAYERS) == set(CPU_FIELDS) == set(breakdown.LAYERS)
    assert set(report(gpu=True)["trace"]["stages"]["inference"]) == set(TRACE_FIELDS)


def test_a_stage_has_its_untraced_seconds_and_its_traced_shares():
    """Tracing slowed inference down twofold and the backpropagation not: each is scaled alone."""
    found = run_dirs.per_step(report())
    assert found["inference"]["total"] == 0.02 and found["backpropagation"]["total"] == 0.06
    assert found["inference"]["python_s"] == pytest.approx(0.015)
    assert found["inference"]["backend_s"] == pytest.approx(0.005)
    assert found["backpropagation"]["backend_s"] == pytest.approx(0.04)
    assert found["backpropagation"]["backend_calls"] == 200  # calls are not scaled
    layers = [sum(fields.get(x, 0) for x in run_dirs.CPU_LAYERS) for fields in found.values()]
    assert layers == pytest.approx([fields["total"] for fields in found.values()])
    untraced = run_dirs.per_step(report() | {"trace": None})
    assert untraced["inference"] == {"total": 0.02}


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
    low, high = curves.bootstrap(values)
    assert np.isfinite([low[0], high[0]]).all() and np.isnan([*low[1:], *high[1:]]).all()
    assert np.isnan(curves.bootstrap(values[:1])).all()


def test_speed_between_two_rows():
    series = run_dirs.Series(*np.array([[0, 100, 300], [0, 2, 4], [0, 0, 0]], dtype=float))
    found = curves.steps_per_second(series, 0.0)
    assert found.values.tolist() == [50, 100] and found.seconds.tolist() == [2, 4]


def test_labels_do_not_cover_each_other():
    placed = curves.spread_labels([0.5, 0.5, 0.9], 0.1)
    assert min(np.diff(sorted(placed))) >= 0.1 - 1e-9 and np.mean(placed) == pytest.approx(1.9 / 3)


def test_the_area_under_the_utilization():
    assert curves.area(np.array([2.0, 4, 6]), np.array([0.0, 100, 50])) == pytest.approx(1 + 1.5)


def test_curves_of_real_files(runs, tmp_path, capsys):
    out = tmp_path / "out/name"
    assert curves.main([str(runs), "--out", str(out)]) == 0
    made = sorted(path.name for path in out.parent.iterdir())
    kinds = [f"name_{kind}.{end}" for kind in ("learning", "speed") for end in ("png", "svg")]
    assert made == kinds  # no GPU: no figure of one, and a line that says so
    assert "not measured, no run had a GPU" in capsys.readouterr().err
    assert min(image_size(out.parent / "name_learning.png")) > 300
    text = (out.parent / "name_learning.svg").read_text()
    for word in ("SAC: HalfCheetah-v5, 2 seeds", "environment steps", "wall-clock", "compile"):
        assert word in text
    again = tmp_path / "again/name"
    curves.main([str(runs), "--out", str(again)])
    assert (again.parent / "name_learning.svg").read_text() == text


def test_gpu_utilization_is_drawn_with_its_area(runs, tmp_path):
    for i, row in enumerate(("baseline", "compile+cudagraphs")):
        make_run(tmp_path / "gpu", i, config(row, gpu="H"), report(gpu=True))
    curves.main([str(tmp_path / "gpu"), "--out", str(tmp_path / "out/c")])
    text = (tmp_path / "out/c_gpu.svg").read_text()
    assert text.count("2.5 GPU-seconds") == 2
    assert not (tmp_path / "out/c_learning.png").exists()  # these runs have no events


# Breakdown


def test_breakdown_sums_to_the_untraced_time(runs):
    found, skipped = run_dirs.read_runs([runs])
    rows = breakdown.newest(found)
    assert not skipped and [row["row"] for row in rows] == ["baseline", "compile"]
    for row in rows:
        assert row["seconds_per_step"] == pytest.approx(0.1)
        cells = row["cells"]
        assert sum(sum(stage.values()) for stage in cells.values()) == pytest.approx(0.1)
        assert cells["simulation"] == {"simulator_s CPU": pytest.approx(0.01)}
        assert cells["rest"] == {"python_s CPU": pytest.approx(0.01)}  # untracked
        assert row["simulation_share"] == pytest.approx(0.1)
        counts = {"to_simulator": 1, "to_backend": 200, "to_cuda": None}
        assert row["transitions_per_iteration"] == counts
        assert row["cpu_share"] is None and row["gpu_busy"] is None


def test_an_iteration_is_a_step_of_all_environments(tmp_path):
    path = make_run(tmp_path, 1, config(num_envs=8), report())
    counts = breakdown.reduce(run_dirs.read_run(path))["transitions_per_iteration"]
    assert counts["to_backend"] == 1600 and counts["to_simulator"] == 1


def test_breakdown_on_a_gpu(tmp_path):
    """Waiting beside a busy GPU is the GPU's time; all else beside it is both's."""
    path = make_run(tmp_path, 1, config("compile", gpu="H"), report(gpu=True))
    row = breakdown.reduce(run_dirs.read_run(path))
    update = row["cells"]["backpropagation"]
    assert update["cuda_wait_s GPU"] == pytest.approx(0.03) and "cuda_wait_s CPU" not in update
    assert update["backend_s CPU + GPU"] == pytest.approx(0.0015)
    assert update["backend_s CPU"] == pytest.approx(0.0135)
    assert sum(update.values()) == pytest.approx(0.06)
    assert row["cpu_share"] == pytest.approx(0.7) and row["gpu_busy"] == 0.35
    assert row["transitions_per_iteration"]["to_cuda"] == 40


@pytest.mark.parametrize("gpu", [None, "H"])
def test_figures_and_headlines_of_breakdown(tmp_path, capsys, gpu):
    number = 0
    for script, env_id in ((SCRIPT, "HalfCheetah-v5"), ("ppo_cartpole_gpu", "CartPole-v1")):
        for row in ("baseline", "compile"):
            number += 1
            made = copy.deepcopy(report(gpu=gpu is not None))
            if row == "compile":
                made["trace"]["stages"]["backpropagation"]["backend_calls"] = 10
            arguments = config(row, gpu=gpu, script=script, env_id=env_id)
            make_run(tmp_path / "runs", number, arguments, made)
    make_run(tmp_path / "runs", 9, config("eager", gpu=gpu), stages(5))  # not traced
    out = tmp_path / "out/b"
    assert breakdown.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    for name in ("stages", "algorithms", "simulators"):
        assert min(image_size(out.with_name(f"b_{name}.png"))) > 300
        assert "CartPole" in out.with_name(f"b_{name}.svg").read_text()
    record = json.loads(out.with_suffix(".json").read_text())
    said = "\n".join(record["headlines"])
    assert "off-policy, baselines: 10%" in said and "on-policy, variants" in said
    assert "baseline to compile: 200 to 1, 200 times fewer" in said
    assert ("CPU at work (RL-Scope: about 90%): 70%" in said) == (gpu is not None)
    assert ("not measured" in said) == (gpu is None)
    assert len(record["rows"]) == 4 and "eager" not in {row["row"] for row in record["rows"]}


def test_no_trace_is_one_line(tmp_path, capsys):
    make_run(tmp_path, 1, config(), stages(5))
    assert breakdown.main([str(tmp_path), "--out", str(tmp_path / "b")]) == 1
    assert "no run was traced" in capsys.readouterr().err


# Profile


def read_out(path, *flags):
    done = subprocess.run(
        [sys.executable, "plots/profile.py", path, *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_profile_reads_a_run_out(tmp_path):
    status, said, _ = read_out(make_run(tmp_path, 1, config(), report()))
    assert status == 0
    assert max(map(len, said.splitlines()[1:])) <= 100
    table = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.strip()}
    assert table["backpropagation"][:4] == ["0", "20,000", "40,000", "60,000"]
    assert table["total"][:5] == ["10,000", "45,000", "45,000", "100,000", "100%"]
    assert "1. backpropagation computes on the CPU 40% of the time" in said
    assert "1.67x at most" in said  # Amdahl's law for 40%
    assert "simulation takes 10% of the time" in said and "GPU:" not in said


def test_short_operators_are_called_overhead(tmp_path):
    made = report()
    made["trace"]["stages"]["backpropagation"]["backend_calls"] = 100_000
    _, said, _ = read_out(make_run(tmp_path, 1, config(), made))
    assert "backpropagation takes 60% of the time for 10,000 operators per step of 4 us each" in (
        " ".join(said.split())
    )
    assert "torch.compile" in said


def test_profile_on_a_gpu_names_synchronizations_and_what_the_gpu_waits_for(tmp_path):
    status, said, _ = read_out(make_run(tmp_path, 1, config(), report(gpu=True)), "--top", "9")
    said = " ".join(said.split())
    assert status == 0 and "backpropagation waits for the GPU 30% of the time" in said
    assert "380 launches" not in said and "38 launches and 1 replays per step" in said
    assert "CUDA graph" in said and ".item()" in said
    assert "the GPU works 35% of the time; the rest it waits, mostly for" in said


def test_profile_of_a_script_of_your_own(tmp_path):
    """A copied region, no config.json, no TensorBoard: the report alone is enough."""
    source = (ROOT / "leanrl/stopwatch.py").read_text()
    region = source[source.index("\n# >>> stopwatch") :]
    (tmp_path / "mine.py").write_text(
        region
        + """
import json
watch = Stopwatch(torch.device("cpu"), "trace", trace_after=20, trace_iterations=5)
weight = torch.zeros(8, 8, requires_grad=True)
for step in range(1, 40):
    with watch.stage("simulation"):
        sum(range(20_000))
    with watch.stage("backpropagation"):
        for _ in range(20):
            (weight @ weight).sum().backward()
    watch.tick(step)
json.dump(watch.report(), open("stages.json", "w"))
"""
    )
    subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, check=True, capture_output=True)
    status, said, _ = read_out(tmp_path / "stages.json")
    assert status == 0 and "simulation takes" in said and "operators" in said
    assert "backpropagation takes" in said and "torch.compile the whole function" in (
        " ".join(said.split())
    )


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"sps_steady": 1, "stages": 3, "window": {}, "gpu": {}}', None],
)
def test_profile_of_something_else_is_one_line(tmp_path, content):
    path = tmp_path / "stages.json"
    if content is not None:
        path.write_text(content)
    for place in (path, tmp_path):
        status, said, error = read_out(place)
        assert status == 1 and said == "" and len(error.splitlines()) == 1
    made = report()
    del made["trace"]["stages"]["inference"]["python_s"], made["window"]["seconds"]
    path.write_text(json.dumps(made))
    status, said, error = read_out(path)
    assert status in (0, 1) and "Traceback" not in error


def test_profile_without_a_trace_or_stages(tmp_path):
    _, said, _ = read_out(make_run(tmp_path, 1, config(), report() | {"trace": None}))
    assert "--stopwatch trace" in said and "backpropagation takes 60% of the time" in said
    off = report() | {"trace": None, "stages": {}}
    status, _, error = read_out(make_run(tmp_path, 2, config(), off))
    assert status == 1 and "the stopwatch was off" in error


def test_python_finds_its_own_profile_module():
    """torch.compile imports cProfile, which imports `profile`."""
    code = "import sys; sys.path.insert(0, 'plots'); import run_dirs, cProfile, profile; "
    code += "assert hasattr(profile, 'runctx')"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# Overhead


def test_bias_is_of_the_corrected_time(monkeypatch, tmp_path):
    """Instrumented 4% slower, half of which it knows of: 2% are left."""
    job = overhead.Job(SCRIPT, "baseline", 1, ["python", "x.py", "--total-timesteps", "9"], 9)
    job.command += overhead.TRACED
    monkeypatch.setattr(overhead, "WINDOW", {SCRIPT: 5})
    assert overhead.without(job)[2:4] == ["--total-timesteps", "5"]
    assert overhead.without(job)[-2:] == ["--stopwatch", "off"]
    folder = tmp_path / "runs"
    off = make_run(folder, 1, config(stopwatch="off"), stages(100.0))
    on = make_run(folder, 2, config(stopwatch="trace"), report(100 / 1.04) | {"overhead_pct": 2})
    code = "print('run directory: {}')"
    words = {path: [sys.executable, "-c", code.format(path)] for path in (off, on)}
    monkeypatch.setattr(overhead, "without", lambda job: words[off])
    job.command = words[on]
    result = overhead.measure(job, side_by_side=False, logs=tmp_path / "logs")
    assert result["bias"] == pytest.approx(1.04 * 0.98 - 1)
    rows = overhead.summarize({(SCRIPT, "baseline"): [result, result | {"bias": -0.01}]})
    assert rows[0]["bias"]["min"] == -0.01 and rows[0]["seeds"] == 2
    assert len({len(line) for line in overhead.cells(rows)}) == 1
    if shutil.which("taskset"):
        assert overhead.measure(job, True, tmp_path / "logs")["off_seconds"] == 0.01
    job.command = [sys.executable, "-c", "raise SystemExit('what went wrong')"]
    with pytest.raises(ValueError, match="(?s)stopwatch on, ended with exit status 1.*what went"):
        overhead.measure(job, side_by_side=False, logs=tmp_path / "logs")


def test_overhead_knows_every_script_and_where_its_trace_begins():
    assert set(overhead.WINDOW) == set(overhead.SHORT)
    for script, steps in overhead.WINDOW.items():
        assert steps < overhead.SHORT[script]["--total-timesteps"]
