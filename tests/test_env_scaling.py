"""The scaling study: what its arms step, its reductions and its report."""

from types import SimpleNamespace

import env_report
import env_scaling
import numpy as np
import pytest
import run_dirs
import torch
from conftest import ROOT
from fake_runs import config, machine, read_record
from helpers import CPU
from matplotlib.colors import to_rgb

ON_CPU = [arm for arm in env_scaling.ARMS if arm.missing() is None]


# Arms


@pytest.mark.parametrize("arm", ON_CPU, ids=lambda arm: arm.name)
def test_an_arm_steps(arm):
    with arm.make(3) as stepper:
        for _ in range(3):
            stepper.step()
        stepper.wait()
    assert stepper.steps >= 1


def test_an_arm_that_cannot_run_says_why():
    missing = {arm.name: arm.missing() for arm in env_scaling.ARMS}
    assert missing["kernel, TPB 64"] == missing["tensors, GPU"] == "no CUDA device"
    assert missing["kernel, CPU threads"] is None
    arm = env_scaling.Arm("nothing", None, 1, ("no_such_package",))
    assert "no_such_package" in arm.missing() and "requirements/study.txt" in arm.missing()


# Reductions


def test_the_turning_point_is_found():
    numbers = [4**k for k in range(11)]
    generator = np.random.default_rng(0)
    seconds = [(2e-5 + 1e-9 * n) * generator.uniform(0.95, 1.05) for n in numbers]
    points = dict(zip(numbers, seconds, strict=True))
    flat, per_env = env_report.fit_line(points)
    assert flat == pytest.approx(2e-5, rel=0.1)
    assert per_env == pytest.approx(1e-9, rel=0.1)
    turning = env_report.turning_point(points)
    assert turning == pytest.approx(20_000, rel=0.2)
    assert env_report.describe_turning(points) == f"{turning:,.0f}"


def test_flat_and_linear_times_have_no_turning_point():
    numbers = [1, 10, 100, 1000]
    for seconds in ([5.0] * 4, [0.1 * n for n in numbers]):
        points = dict(zip(numbers, seconds, strict=True))
        assert env_report.describe_turning(points) in ("none", "below 1", "above 1,000")


def test_samples_are_per_step(monkeypatch):
    """A stepper that makes 10 steps per call, each of 2 ms by a clock of the test's."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(env_scaling, "time", clock)
    stepper = env_scaling.Stepper(lambda: setattr(clock, "now", clock.now + 0.02), 10)
    assert env_scaling.time_steps(stepper, 0.1, 3) == [pytest.approx(0.002)] * 3


def test_a_copy_reads_and_writes_and_the_best_one_counts(monkeypatch):
    """256 MB each: what takes 0.5 s moves a GB per second."""
    monkeypatch.setattr(env_scaling, "time_steps", lambda *_, **__: [1.0, 0.5, 2.0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert env_scaling.measure_limits() == {"cpu": 2**30}


def test_the_bytes_per_step():
    """Of the tensors that the kernel is given, but the count of ended episodes, seldom touched."""
    envs, seen = env_scaling.KernelCartPole(1000, CPU), []
    envs.reset(seed=1)
    envs.launch = lambda threads, tensors: seen.extend(tensors)
    envs.step(torch.zeros(1000, dtype=torch.int64))
    state, lengths = envs.state, envs.lengths  # read as well as written
    found = sum(x.nbytes for x in (*seen, state, lengths) if x is not envs.episodes) - 8
    assert found == 1000 * env_report.STEP_BYTES


# The report


def fail(num_envs):
    raise ValueError("no kernel for cpu: no compiler")


def test_a_study_from_end_to_end(tmp_path, monkeypatch, capsys):
    """Of an arm that runs here, one for a GPU and one whose kernel does not compile."""
    names = ["kernel, CPU threads", "kernel, TPB 64", "tensors, CPU"]
    arms = [arm for arm in env_scaling.ARMS if arm.name in names]
    monkeypatch.setattr(env_scaling, "ARMS", [*arms, env_scaling.Arm("broken", fail, 64)])
    monkeypatch.setattr(env_scaling, "NUMBERS", [1, 64, 4096])
    flags = ["--only", "*ke*", "--seconds", "0.05"]
    assert env_scaling.main([*flags, "--out", str(tmp_path)]) == 0
    assert "skipped: kernel, TPB 64: no CUDA device" in capsys.readouterr().out
    record = read_record(tmp_path / "env_scaling")
    assert record["bytes_per_second"]["cpu"] > 1e8
    assert record["command"].endswith("--only '*ke*' --seconds 0.05")
    *rows, one, other = record["rows"]
    assert {row["num_envs"] for row in rows if row["arm"] == names[0]} == {1, 64, 4096}
    assert {len(row["seconds"]) for row in rows} == {env_scaling.SAMPLES}
    assert one["failed"] == other["failed"] == "no kernel for cpu: no compiler"
    report = (tmp_path / "env_scaling.md").read_text()
    assert "turning" in report and names[0] in report and str(ROOT) not in report
    (figure,) = tmp_path.glob("*.png")
    assert figure.name == "env_scaling_throughput.png"


def test_the_table_says_what_the_record_says():
    rows = [{"arm": "A", "num_envs": n, "seconds": [1e-3, 2e-3 + 1e-6 * n, 1.0]} for n in (1, 64)]
    cells = env_report.cells({"rows": rows, "skipped": {"B": "no CUDA device"}})
    assert cells[1] == ["A", "500", "31 k", "-", "-", "-"]  # two points are no fit
    assert cells[2] == ["B", "skipped: no CUDA device", "", "", "", ""]


def test_the_search_over_block_sizes_by_hand():
    """A step is 1 us and 10 us per block of 1,024, or twice that in blocks of less than 64."""
    rows = []
    for threads, factor in ((16, 2), (64, 1), (1024, 1.04)):
        for n in (1, 1024, 65_536, 5):  # 5 has no column, and no line
            row = {"arm": f"kernel, TPB {threads}", "num_envs": n}
            rows.append(row | {"seconds": [(1 + n / 1024 * 10) * 1e-6 * factor]})
    rows.append({"arm": "tensors, GPU", "num_envs": 1, "seconds": [1.0]})
    found = env_report.by_threads(rows)
    assert list(found) == [1, 1024, 65_536] and found[1024][16] == pytest.approx(22e-6)
    lines = env_report.describe_threads(rows)
    said = "kernel at 1,024: fastest with 64 threads per block, 11.0 us; within 5%: 64, 1024"
    assert len(lines) == 3 and lines[1] == said
    (ax,) = env_report.blocks({"rows": rows, "machine": {"gpu": "a GPU"}}).axes
    assert [line.get_label() for line in ax.lines] == ["1", "1,024", "65,536"]
    assert env_report.blocks({"rows": rows[-1:], "machine": {"gpu": None}}) is None


def test_the_figure_of_all_arms(tmp_path):
    """A made-up record, because not all were measured on one machine."""
    arms = [arm.name for arm in env_scaling.ARMS]
    rows = []
    for i, arm in enumerate(arms):
        for n in (1, 1000, 1_000_000):
            rows.append({"arm": arm, "num_envs": n, "seconds": [1e-5 * (1 + i) + 1e-9 * n]})
    rows.append({"arm": arms[0], "num_envs": 10**7, "failed": "out of memory"})
    here = machine() | config(gpu="H200") | {"cpu": machine()["cpu"] | {"threads": 2}}
    study = {"command": "python env_scaling.py", "machine": run_dirs.machine([here])}
    study |= {"rows": rows, "skipped": {}, "bytes_per_second": {"cpu": 3e10, "cuda": 4e12}}
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
    assert (tmp_path / "s_throughput.png").exists()
