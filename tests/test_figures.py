"""What is drawn and said about runs: curves, breakdowns, utilization, and README's regions."""

import io
import shutil
import warnings
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import breakdown
import curves
import matplotlib.pyplot as plt
import numpy as np
import pytest
import readme
import record
import run_dirs
import utilization
from fake_runs import (
    SCRIPT,
    add_part,
    config,
    learning,
    make_run,
    make_traced_run,
    read_record,
    report,
    stages,
    usage,
    write_events,
)


def image_size(path):
    """(width, height) of a PNG."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def draw(main, source, stem, *flags):
    """What a program leaves: status, files, said, told (as errors), rows and the figures."""
    said, told = io.StringIO(), io.StringIO()
    figures = []
    save = curves.save
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(told):
        patch.setattr(curves, "save", lambda *given: figures.append(given[0]) or save(*given))
        status = main([str(source), *flags, "--out", str(stem)])
    return SimpleNamespace(
        status=status,
        names={path.name for path in stem.parent.glob(f"{stem.name}*")},
        said=said.getvalue(),
        told=told.getvalue().splitlines(),
        figures=figures,
    )


# Curves: values


def test_a_running_mean_by_hand():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(curves.running_mean(values, 2), [1, 1.5, 2.5, 3.5])


def test_a_running_mean_is_of_a_tenth_and_of_10_at_most():
    for count, expected in ((1, 0.0), (8, 7.0), (20, 18.5), (100, 94.5), (500, 494.5)):
        values = np.arange(count, dtype=float)
        series = {"x": run_dirs.Series(values, values, values)}
        assert curves.curve(series, "x", "steps", None)[1][-1] == expected
        assert curves.curve(series, "x", "steps", 1)[1][-1] == count - 1


def test_the_interval_is_the_bootstraps():
    """Against its definition: the mean of seeds drawn with replacement, all draws counted."""
    seeds = np.array([[1.0], [2.0], [6.0]])
    draws = [np.mean([a, b, c]) for a in seeds for b in seeds for c in seeds]
    expected = np.percentile(draws, (2.5, 97.5), method="inverted_cdf")
    np.testing.assert_allclose(np.ravel(curves.bootstrap(seeds)), expected)


def test_one_seed_has_no_interval():
    values = np.array([[1.0, 2.0], [3.0, 5.0]])
    assert np.isfinite(curves.band("bootstrap", values)).all()
    assert np.isnan(curves.band("bootstrap", values[:1])).all()


def test_the_band_of_deviations():
    values = np.random.default_rng(0).normal(size=(7, 5))
    mean, deviation = np.mean(values, 0), np.std(values, 0, ddof=1)
    np.testing.assert_allclose(curves.band("std", values), [mean - deviation, mean + deviation])


def test_the_grid_has_all_points_where_all_runs_have_values():
    grid = curves.common_grid([np.array([1.0, 3.0, 5.0]), np.array([2.0, 3.0, 4.0])])
    assert grid.tolist() == [2, 3, 4]
    assert not len(curves.common_grid([np.array([1.0, 2.0]), np.array([6.0, 7.0])]))
    many = curves.common_grid([np.arange(5000.0)])
    assert len(many) == curves.POINTS and many[[0, -1]].tolist() == [0, 4999]


def test_the_mean_ends_with_the_first_finished_run():
    """Afterwards it would be that of others, and jump; an interrupted run is not in it."""
    ends = ((4, 1, ""), (3, 3, ""), (2, 9, "interrupted"))
    lines = [(np.arange(float(end)), np.full(end, y), missing) for end, y, missing in ends]
    figure, ax = plt.subplots()
    curves.draw_line(ax, lines, "std", "a", {"color": "k"})
    (mean,) = (line for line in ax.get_lines() if line.get_label() == "a (n=3, 1 interrupted)")
    assert mean.get_xdata().max() == 2 and set(mean.get_ydata()) == {2}
    plt.close(figure)


def test_interquartile_mean_is_of_the_middle_half():
    assert curves.iqm(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == np.mean([2, 3, 4, 5])
    assert curves.iqm(np.array([1.0, 2, 9])) == 4  # nothing to cut below four
    scores = np.random.default_rng(0).normal(size=101)
    assert curves.iqm(scores) == pytest.approx(np.sort(scores)[25:-25].mean())


def test_the_interval_of_the_middle_half_is_the_bootstraps():
    scores, other = np.random.default_rng(0).normal(size=50), np.random.default_rng(1)
    draws = [curves.iqm(other.choice(scores, 50)) for _ in range(2000)]
    expected = np.percentile(draws, (2.5, 97.5))
    np.testing.assert_allclose(curves.iqm_interval(scores), expected, atol=0.05)


SCORE = {"script": "sac_continuous_action", "environment": "Ant", "line": "baseline"}
SCORE |= {"iqm": 1.0, "low": 0.0, "high": 2.0, "finals": [1.0, 2.0]}


def test_the_median_is_never_where_half_never_arrive():
    for times, said in (
        ([300.0, 100.0, None, 200.0], ["250", "1"]),
        ([300.0, None], ["never", "1"]),
        ([None, None], ["never", "2"]),
    ):
        row = SCORE | {"times": times}
        assert curves.score_cells([row], 5.0)[1][-2:] == said


def test_scores_of_other_tasks_are_named_by_them():
    """Those of one task in their colours, since a row has the same in every figure."""
    other = SCORE | {"line": "compile", "finals": [3.0, 4.0]}
    figure = curves.draw_scores([SCORE, other], "return")
    left, right = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["baseline", "compile"]
    colours = [curves.COLOURS[row] for row in ("baseline", "compile")]
    assert [line.get_color() for line in right.lines] == colours
    plt.close(figure)
    figure = curves.draw_scores([SCORE, other | {"environment": "Hopper"}], "return")
    names = [line.get_label() for line in figure.axes[1].lines]
    assert names == ["SAC: Ant, baseline", "SAC: Hopper, compile"]
    plt.close(figure)


# Curves: a folder of all kinds of runs


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Two whole runs of a line; interrupted ones, one episode, none, no run."""
    runs = tmp_path_factory.mktemp("all") / "runs"
    for seed in (1, 2):
        for i, row in enumerate(("baseline", "compile")):
            made = make_run(runs, 10 * seed + i, config(row, seed), stages(80))
            write_events(made, learning(seed, 1 + i))
    parts = (stages(80, steps=500), stages(None, None, steps=100), None, stages(80))
    for seed, part in enumerate(parts, start=3):
        made = make_run(runs, 10 * seed, config(seed=seed), part)
        write_events(made, learning(seed, count=5))
    (made / "stages.json").write_text("")  # the disk was full
    add_part(made.with_name(made.name.replace("60", "40")), 100, None)  # resumed, then killed
    made = make_run(runs, 70, config(script="td3_continuous_action"), stages(10.0))
    write_events(made, [("charts/episodic_return", 900, 5, 3.0)])
    make_run(runs, 71, config("compile+cudagraphs", 3, gpu="H"), stages(10.0))
    (runs / "notes").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return draw(curves.main, runs, runs.parent / "out/c", "--last", "10"), runs.parent


def test_runs_that_do_not_count_are_told_of(drawn):
    told = [line.rpartition("__")[2] for line in drawn[0].told if "notes" not in line]
    assert told == [
        "30 stopped after 500 of 1000 steps",
        "40 has no stages_100.json: killed or still running",
        "50 has no stages.json: killed or still running",
        "60 stages.json is damaged: killed or still running",
    ]
    assert sum("skipped: " in line and "notes has no config" in line for line in drawn[0].told) == 1


def test_curves_name_tasks_axes_and_lines(drawn):
    text = (drawn[1] / "out/c_learning.svg").read_text()
    for words in ("SAC: HalfCheetah-v5", "TD3: HalfCheetah-v5", "environment steps", "wall-clock"):
        assert words in text
    for line in ("baseline (n=6, 4 interrupted)", "compile (n=2)"):
        assert line in text
    assert "baseline (n=1)" in text
    assert "mean of the last 10" in text
    assert min(image_size(drawn[1] / "out/c_learning.png")) > 300
    assert "compile+cudagraphs" not in text  # it has no curve


def test_interrupted_curves_end_with_a_cross(drawn):
    steps, seconds, *_ = drawn[0].figures[0].axes
    for ax in (steps, seconds):
        crosses = [line for line in ax.lines if line.get_marker() == "x"]
        assert len(crosses) == 4
        assert ax is seconds or {line.get_xdata()[-1] for line in crosses} == {250}


def test_scores_are_of_whole_runs(drawn):
    rows = {row["line"]: row for row in read_record(drawn[1] / "out/c_scores")}
    assert rows.keys() == {"baseline", "compile"}
    assert {(row["iqm"], len(row["finals"])) for row in rows.values()} == {((15.5 + 31) / 2, 2)}


# Curves: sweeps


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two lambdas, the minibatches they bring along, three seeds; returns of 100 lambda + seed."""
    folder = tmp_path_factory.mktemp("sweep") / "runs"
    for i, (gae_lambda, seed) in enumerate((g, s) for g in (0.9, 1.0) for s in (1, 2, 3)):
        settings = {"gae_lambda": gae_lambda, "num_minibatches": int(10 * gae_lambda)}
        path = make_run(folder, i, config(seed=seed, script="ppo", **settings), report())
        rows = []
        for k in range(1, 41):
            value = (100 * gae_lambda + seed) * min(1, k / 20)
            for tag, y in (("charts/episodic_return", value), ("charts/SPS", float(k))):
                rows.append((tag, 10 * k * (1 + seed % 2), k, y))
        write_events(path, rows)
    return folder


SCORED = ("--last", "1", "--target", "92")


@pytest.fixture(scope="module")
def scored(sweep):
    return draw(curves.main, sweep, sweep.parent / "out/s", *SCORED), sweep.parent / "out/s_scores"


def lines_of(runs, by=None):
    """{line: number of runs} of the only figure."""
    (lines,) = curves.groups(runs, by).values()
    return {line: len(mine) for line, mine in lines.items()}


def test_lines_are_what_varies(sweep):
    """Minibatches follow from lambda, so they need not be in the name; seeds never are."""
    runs, _ = run_dirs.read_runs([sweep])
    assert lines_of(runs) == {"gae_lambda=0.9": 3, "gae_lambda=1": 3}
    by_size = ["num_minibatches=9", "num_minibatches=10"]
    assert list(lines_of(runs, ["num_minibatches"])) == by_size


def test_a_seed_counts_once(tmp_path, capsys):
    """Copies of a run are no runs: the newest whole one counts, not the record; others are told."""
    for number in (100, 200, 300):
        path = make_run(tmp_path / "more", number, config(), stages(9))
        write_events(path, learning())
        if number == 100:
            record.main([str(tmp_path / "100.json"), str(path)])
            shutil.rmtree(path)
    (path / "stages.json").unlink()  # of the newest, which was killed
    runs, _ = run_dirs.read_runs([tmp_path / "more", tmp_path / "100.json"], whole=False)
    assert len(runs) == 3
    (lines,) = curves.groups(runs).values()
    assert [run.path.name.rpartition("__")[2] for run in lines["baseline"]] == ["200"]
    assert curves.groups(runs + runs) == curves.groups(runs)
    curves.write(runs, tmp_path)
    assert capsys.readouterr().err.count("another run has its settings and seed") == 2


def test_scores_count_who_never_arrives(scored):
    one, other = read_record(scored[1])
    assert [one["line"], other["line"]] == ["gae_lambda=0.9", "gae_lambda=1"]
    assert one["times"] == [None, 200.0, 400.0]  # seed 1 ends at 91
    assert None not in other["times"] and len(other["finals"]) == 3
    assert other["iqm"] == pytest.approx(102) and other["low"] < 102 < other["high"]
    (line,) = (line for line in scored[0].said.splitlines() if "gae_lambda=0.9" in line)
    assert line.split()[-2:] == ["400", "1"]  # median and never: the latter is the last of three


def test_a_record_has_the_curves_and_scores_of_its_runs(sweep, scored, tmp_path):
    path = tmp_path / "record.json"
    assert record.main([str(path), *map(str, sorted(sweep.iterdir()))]) == 0
    again = draw(curves.main, path, tmp_path / "s", *SCORED)
    assert again.told == scored[0].told == []
    assert read_record(tmp_path / "s_scores") == read_record(scored[1])
    assert (tmp_path / "s_scores.svg").read_text() == scored[1].with_suffix(".svg").read_text()
    steps = [[ax.lines for ax in made.figures[0].axes][0] for made in (again, scored[0])]
    for one, other in zip(*steps, strict=True):
        np.testing.assert_allclose(one.get_xydata(), other.get_xydata(), atol=0.01)


def test_choices_of_the_command(sweep, tmp_path):
    flags = ["--x", "seconds", "--band", "std", "--by", "num-minibatches"]
    draw(curves.main, sweep, tmp_path / "s", *flags)
    text = (tmp_path / "s_learning.svg").read_text()
    for words in ("num_minibatches=10", "standard deviation", "wall-clock"):
        assert words in text
    assert "environment steps" not in text


def test_scripts_are_lines_of_one_panel(tmp_path):
    """Without a mean, which would be that of the whole run alone."""
    for number, (script, steps) in enumerate([("ppo", 1000), ("ppo", 500), ("pqn", 1000)]):
        made = config(seed=number, script=f"{script}_atari_envpool", env_id="Pong-v5")
        write_events(make_run(tmp_path, number, made, stages(80, steps=steps)), learning(number))
    found = draw(curves.main, tmp_path, tmp_path / "p", "--by", "script", "--band", "none")
    steps, _ = found.figures[0].axes
    assert steps.get_title(loc="left") == "Pong-v5"
    drawn = [line for line in steps.lines if len(line.get_xdata()) > 1]
    assert len(drawn) == 3 and len({line.get_color() for line in drawn}) == 2
    named = [line.get_label() for line in steps.lines if not line.get_label().startswith("_")]
    assert named == ["PPO Atari (n=2, 1 interrupted)", "PQN Atari (n=1)"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--metric", "a/b"], "no figure: no run has a/b over steps or seconds, but charts/SPS, "),
        (["--by", "seeds"], "error: no run has a setting 'seeds'"),
    ],
)
def test_curves_of_nothing_are_one_line(sweep, tmp_path, flags, said):
    found = draw(curves.main, sweep, tmp_path / "s", *flags)
    (line,) = found.told
    assert found.status in (1, 2) and line.startswith(said) and not found.names


# Breakdown


def reduce_one(tmp_path, config, **changes):
    """A row of the breakdown: of a traced run, whose report has these changes."""
    gpu = bool(config["gpu"])
    return breakdown.reduce(
        run_dirs.read_run(make_traced_run(tmp_path, 1, config, report(gpu=gpu) | changes))
    )


def test_breakdown_sums_to_the_untraced_time(tmp_path):
    row = reduce_one(tmp_path, config())
    cells = row["cells"]
    assert row["seconds_per_step"] == pytest.approx(0.1)
    assert sum(sum(stage.values()) for stage in cells.values()) == pytest.approx(0.1)
    assert cells["simulation"] == {"simulator_s CPU": pytest.approx(0.01)}
    assert cells["rest"] == {"python_s CPU": pytest.approx(0.01)}  # untracked
    counts = {"to_simulator": 1, "to_backend": 201, "to_cuda": None}
    assert row["transitions_per_iteration"] == counts
    assert row["cpu_share"] is None and row["gpu_busy"] is None


def test_breakdown_on_a_gpu(tmp_path):
    """Waiting beside a busy GPU is the GPU's time; all else beside it is both's."""
    row = reduce_one(tmp_path, config("compile", gpu="H"))
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


def test_what_is_inside_a_compiled_call_has_no_share(tmp_path):
    row = reduce_one(tmp_path, config(), stages=report()["stages"] | {"simulation": 0.0})
    assert not row["cells"]["simulation"] and row["transitions_per_iteration"]["to_simulator"] == 0
    assert "the backend takes" in breakdown.limits(row) and "simulator" not in breakdown.limits(row)
    heading, line = breakdown.cells([row])
    assert line[heading.index("simulation")] == "-" and line[heading.index("to simulator")] == "0"


def test_an_iteration_is_a_step_of_all_environments(tmp_path):
    counts = reduce_one(tmp_path, config(num_envs=8))["transitions_per_iteration"]
    assert counts["to_backend"] == 8 * 201 and counts["to_simulator"] == 1


def test_the_newest_whole_run_of_a_row_counts(tmp_path, capsys):
    """An interrupted one where there is no other; what is damaged or elsewhere is named."""
    half = report() | stages(10.0, steps=500)
    make_traced_run(tmp_path, 1, config(seed=1))
    make_traced_run(tmp_path, 2, config(seed=2))
    make_traced_run(tmp_path, 3, config(seed=3), half)
    make_traced_run(tmp_path, 4, config("compile"), half)
    make_run(tmp_path, 5, config("compile"), half)  # not traced
    other = make_traced_run(tmp_path, 0, config("eager", gpu="other"))
    broken = make_run(tmp_path, 6, config("eager"), report())
    (broken / "trace.json.gz").write_bytes(b"no gzip")
    lacking = make_traced_run(tmp_path, 7, config("eager"), report() | {"iterations": 0})
    runs, _ = run_dirs.read_runs([tmp_path], whole=False)
    chosen = [run.path.name.rpartition("__")[2] for run, _ in breakdown.reduce_all(runs)]
    assert chosen == ["2", "4"]
    said = capsys.readouterr().err
    assert f"{broken} trace.json.gz is damaged" in said
    assert f"{lacking} has a report that lacks something" in said
    assert f"{other} is of another machine" in said


@pytest.mark.parametrize("gpu", [None, "H"])
def test_figures_of_breakdown(tmp_path, gpu):
    make_traced_run(tmp_path, 1, config(gpu=gpu), operators=10)
    other = config("compile", gpu=gpu, script="ppo_cartpole_gpu", env_id="CartPole-v1")
    make_traced_run(tmp_path, 2, other)
    found = draw(breakdown.main, tmp_path, tmp_path / "out/b")
    assert found.names == {"b.json", "b.md"} | {
        f"b{name}.{end}" for name in ("", "_stages") for end in ("png", "svg")
    }
    assert "201" in found.said and min(image_size(tmp_path / "out/b_stages.png")) > 300
    text = (tmp_path / "out/b_stages.svg").read_text()
    assert "PPO CartPole: CartPole-v1" in text and "per step" in text
    assert [row["row"] for row in read_record(tmp_path / "out/b")["rows"]] == [
        "compile",
        "baseline",
    ]


def test_bars_are_percent_of_the_baselines_step(tmp_path):
    """The baseline's step of 0.1 s has 10% of simulation; the variant's is 0.05 s."""
    for number, (row, speed) in enumerate((("baseline", 10.0), ("compile", 20.0))):
        made = report(speed) | {"stages": {"simulation": 1.0, "logging": 2.0}}
        make_run(tmp_path, number, config(row), made)
    found = draw(breakdown.main, tmp_path, tmp_path / "b")
    (said,) = found.told
    assert "no run has a complete trace" in said and found.names == {"b.png", "b.svg"}
    (ax,) = found.figures[0].axes
    widths = [bar.get_width() for bar in ax.patches]
    rest = [80 + 10, 30 + 10]  # what is logged, and what no stage covers
    expected = [10, 0, 0, 0, rest[0], 10, 0, 0, 0, rest[1]]
    assert widths == pytest.approx(expected, abs=1e-6)


# Utilization


def utilized(path):
    """Its lines as arrays, and its row."""
    row = utilization.reduce(run_dirs.read_run(path))
    return {name: np.array(line) for name, line in row["lines"].items()}, row


def test_utilization_is_the_area_under_the_curve(tmp_path):
    """Processor seconds 1, 4, 5 at 2, 4, 6 s: 150%, then 50%; NVML at 3, 4, 6 s: 0, 100, 50."""
    path = make_run(tmp_path, 1, config(gpu="H"), report(gpu=True))
    write_events(path, usage((2, 1, 99), (3, 2.5, 0), (4, 4, 100), (6, 5, 50)))
    lines, row = utilized(path)
    expected = np.array([[2, 3, 0], [3, 4, 100], [4, 6, 50]])
    assert lines["GPU"] == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert row["GPU"] == pytest.approx({"area": 200, "mean": 50}, rel=1e-4)
    expected[:, 2] = [150, 150, 50]
    assert lines["processor"] == pytest.approx(expected, rel=1e-4)
    assert row["processor"] == pytest.approx({"area": 400, "mean": 100}, rel=1e-4)
    assert row["window"] == pytest.approx(4, rel=1e-4)


def test_utilization_without_a_gpu_joins_samples_of_a_moment(tmp_path):
    path = make_run(tmp_path, 1, config(), report())
    write_events(path, usage((2, 1), (2.25, 1.125), (2.5, 1.25)))
    lines, _ = utilized(path)
    assert lines["processor"] == pytest.approx(np.array([[2, 2.5, 50]]), rel=1e-4)
    assert lines.keys() == {"processor"}


def test_runs_without_samples_have_no_utilization(tmp_path):
    make_run(tmp_path, 1, config(), stages(5))
    found = draw(utilization.main, tmp_path, tmp_path / "b")
    (line,) = found.told
    assert found.status == 1 and "no utilization: " in line


def test_figure_of_utilization(tmp_path):
    """Without runs of one sample or two processes; a finished one counts before a newer half."""
    whole = make_run(tmp_path, 1, config(gpu="H"), report(gpu=True))
    half = make_run(tmp_path, 2, config(gpu="H"), report(gpu=True) | stages(10.0, steps=250))
    for path in (whole, half):
        write_events(path, usage((2, 1, 0), (4, 4, 100), (6, 5, 50)))
    single = make_run(tmp_path, 3, config("compile", gpu="H"), report(gpu=True))
    write_events(single, usage((2, 1, 0)))
    resumed = make_run(tmp_path, 4, config("cudagraphs", gpu="H"), report(gpu=True))
    write_events(resumed, usage((2, 1, 0), (4, 4, 0)))
    add_part(resumed, 500, report())
    found = draw(utilization.main, tmp_path, tmp_path / "u")
    assert found.told == [f"interrupted: {half} stopped after 250 of 1000 steps"]
    assert found.names == {"u.json", "u.md", "u.png", "u.svg"}
    assert image_size(tmp_path / "u.png")[0] > 400
    (row,) = read_record(tmp_path / "u")["rows"]
    assert row["processor"]["area"] == pytest.approx(400, rel=1e-4)
    assert "| 75 | 300 | 100 | 400 |" in (tmp_path / "u.md").read_text()


def test_utilization_is_drawn_of_some_scripts_and_told_of_all(tmp_path, monkeypatch):
    for number, script in enumerate(("ppo_continuous_action", SCRIPT)):
        path = make_run(tmp_path, number, config(script=script), report())
        write_events(path, usage((2, 1), (4, 4)))
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, stem: figures.append(figure) or [])
    utilization.write(run_dirs.read_runs([tmp_path])[0], tmp_path, scripts=(SCRIPT,))
    assert [ax.get_title() for ax in figures[0].axes] == ["SAC: HalfCheetah-v5"]
    legend = figures[0].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["baseline: area 300 %s"]
    assert len(read_record(tmp_path / "utilization")["rows"]) == 2


# README


def test_what_was_learned_is_the_last_return():
    ends = 100.0, 3.0, 0.0, 2.0, 1.0
    runs = [{"eval_returns": [[5, 1.0, 2.0], [9, end, 4.0]]} for end in ends]
    assert readme.learned(runs[3:]) == "2, 1" and readme.learned([]) == "-"
    assert readme.learned(runs).startswith("2 (")


@pytest.mark.parametrize("content", ["", "{}"])
def test_readme_names_a_damaged_record(tmp_path, monkeypatch, content):
    page = tmp_path / "README.md"
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    monkeypatch.setattr(readme, "PAGES", [page])
    text = "<!-- record: overhead -->\n<!-- end -->"
    page.write_text(text)
    (tmp_path / "overhead").mkdir()
    (tmp_path / "overhead/all__epyc__2026-11-27.json").write_text(content)
    with pytest.raises(SystemExit, match=r"^error: .*all__epyc__2026-11-27\.json.*$"):
        readme.main([])
    assert page.read_text() == text
