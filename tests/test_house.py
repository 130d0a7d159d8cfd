"""The house around the scripts: run.sh, the requirements, the speed-up table, paths that are named.

Nothing here trains, installs or needs a network: the runs are files that the tests write, or come
from stand-in scripts that write them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "plots"))
import ablation  # noqa: E402
import field  # noqa: E402
import speedup  # noqa: E402

SCRIPT = "sac_continuous_action"
PIN = re.compile(r'[\w-]+(\[\w+\])?==[\w.]+(; python_version (<|>=) "3\.\d+")?')


def config(row="baseline", seed=1, gpu=None, **args):
    """A config.json as a script of that row writes it."""
    variant = (
        {f: f in row.split("+") for f in ("compile", "cudagraphs")} if row != "baseline" else {}
    )
    name = SCRIPT + (speedup.VARIANT if variant else "")
    args = {"total_timesteps": 1000, "env_id": "HalfCheetah-v5", **args}
    return {
        "args": {"exp_name": name, "seed": seed, **variant, **args},
        "command": f"leanrl/{name}.py --seed {seed}",
        "git_commit": "c0ffee",
        "cpu": {"model": "Abacus", "cores": 2, "threads": 2},
        "gpu": gpu,
        "gpu_driver": "1.0" if gpu else None,
        "load_average": [0.5 * seed, 0, 0],
        "python": "3.11.0",
        "versions": {"torch": "2.13.0"},
    }


def stages(steady, warmup=4.0, steps=1000):
    """A stages.json: `steps` in 20 seconds, `steady` steps per second after the warm-up."""
    return {
        "sps_steady": steady,
        "warmup_seconds": warmup,
        "sps_inclusive": steps / 20,
        "wall_seconds": 20.0,
    }


def make_run(folder, number, config, stages):
    path = folder / f"HalfCheetah-v5__{config['args']['exp_name']}__1__{number}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if stages:
        (path / "stages.json").write_text(json.dumps(stages))
    return path


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


def test_table_has_medians_ranges_and_speedups(runs, tmp_path, capsys):
    status, record = tabulate(tmp_path, runs)
    rows = {row["row"]: row for row in record["rows"]}
    assert status == 0 and list(rows) == list(speedup.ROWS)
    assert rows["compile"]["sps_steady"] == {"median": 250.0, "min": 200.0, "max": 300.0}
    assert [rows[row]["speedup"] for row in ("baseline", "eager", "compile")] == [1, 1.25, 2.5]
    assert rows["compile"]["warmup_seconds"] == {"first": 30.0, "best": 10.0}
    assert rows["compile"]["sps_inclusive"]["median"] == 50
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


def test_cudagraphs_without_a_device_counts_as_what_it_ran(tmp_path):
    path = make_run(tmp_path, 1, config("compile+cudagraphs"), stages(10))
    assert speedup.read_run(path).row == "compile"


def test_no_speedup_without_a_baseline(tmp_path, capsys):
    make_run(tmp_path, 1, config("eager"), stages(10))
    _, record = tabulate(tmp_path, tmp_path)
    assert [row["speedup"] for row in record["rows"] if "speedup" in row] == [None]


@pytest.mark.parametrize(
    "found, why",
    [
        (None, "has no stages.json"),
        (stages(90, steps=500), "stopped after 500 of 1000 steps"),
        (stages(None), "no steady steps/s"),
    ],
)
def test_an_unfinished_run_fails_and_does_not_count(runs, tmp_path, capsys, found, why):
    bad = make_run(runs, 500, config("eager", 3), found)
    status, record = tabulate(tmp_path, runs)
    assert status == 1 and len(record["failures"]) == 1
    error = capsys.readouterr().err
    assert bad.name in error and why in error
    assert all(row["speedup"] in (1, 1.25, 2.5) for row in record["rows"] if "speedup" in row)


def test_runs_that_cannot_be_compared_are_refused(runs, capsys):
    make_run(runs, 500, config("eager", 3, batch_size=512), stages(90))
    with pytest.raises(SystemExit) as stopped:
        speedup.main(["--table-only", str(runs)])
    assert stopped.value.code == 2 and "batch_size" in capsys.readouterr().err


def test_flags_and_threads_of_the_variant_alone_do_not_matter(tmp_path):
    runs = tmp_path / "runs"
    make_run(runs, 1, config("baseline"), stages(100))
    one = config("compile", env_backend="kernel")
    one["cpu"]["threads"] = 1
    make_run(runs, 2, one, stages(300))
    status, record = tabulate(tmp_path, runs)
    assert status == 0 and {row.get("speedup") for row in record["rows"]} >= {1, 3}


# Making the runs, with stand-ins for the scripts

STAND_IN = """
import json, sys, time
from pathlib import Path
import tqdm
row, seed = sys.argv[-1].lstrip("-") if sys.argv[-1] == "--compile" else ROW, sys.argv[2]
if row == "compile" and seed == "2":
    print("what went wrong", file=sys.stderr)
    sys.exit(3)
with tqdm.tqdm(total=1000) as bar:
    bar.update(1000)
path = Path("runs", f"{row}-{seed}__{time.time_ns()}")
path.mkdir(parents=True)
(path / "config.json").write_text(json.dumps(CONFIGS[row]))
(path / "stages.json").write_text(json.dumps(STAGES))
print(f"run directory: {path}")
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """A repository whose scripts only write a run directory, and `compile` fails in round 2."""
    root = tmp_path / "a place with spaces"
    configs = {row: config(row) for row in ("baseline", "eager", "compile")}
    for row, suffix in (("baseline", ""), ("eager", speedup.VARIANT)):
        file = root / "leanrl" / f"{SCRIPT}{suffix}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        constants = f"ROW, CONFIGS, STAGES = {row!r}, {configs!r}, {stages(80.0)!r}"
        file.write_text(f"{constants}\ntotal_timesteps: int = 1_000\n{STAND_IN}")
    monkeypatch.setattr(speedup, "ROOT", root)
    monkeypatch.setattr(speedup, "has_cuda", lambda: False)
    return root


@pytest.mark.parametrize("protocol", ["--quick", "--full"])
def test_a_failing_run_is_named_and_the_others_count(stand_ins, tmp_path, capsys, protocol):
    out = tmp_path / "out"
    assert speedup.main([protocol, "--rounds", "2", "--out", str(out)]) == 1
    record = json.loads((out / "speedup.json").read_text())
    counts = {row["row"]: len(row["runs"]) for row in record["rows"] if "runs" in row}
    assert counts == {"baseline": 2, "eager": 2, "compile": 1}
    error = capsys.readouterr().err
    assert f"FAILED: {SCRIPT} compile seed 2 ended with exit status 3" in error
    assert "what went wrong" in error
    assert (out / "logs" / f"{SCRIPT}-compile-seed-2.log").exists()


def test_rows_take_turns(stand_ins):
    jobs = speedup.make_jobs([SCRIPT], ["baseline", "eager", "compile"], 2, [])
    assert [job.row for job in jobs] == ["baseline", "eager", "compile"] * 2
    assert [job.seed for job in jobs] == [1] * 3 + [2] * 3
    assert {job.steps for job in jobs} == {1000}


def test_the_full_protocol_finds_every_pair():
    for variant in (ROOT / "leanrl").glob(f"*{speedup.VARIANT}.py"):
        script = variant.stem.removesuffix(speedup.VARIANT)
        [job] = speedup.make_jobs([script], ["baseline"], 1, [])
        assert (ROOT / job.command[1]).exists() and job.steps > 0


def test_an_interrupt_ends_the_running_child(tmp_path):
    mark, log = tmp_path / "ended cleanly", tmp_path / "log"
    child = (
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "try:\n    print('ready', flush=True); time.sleep(60)\n"
        f"finally:\n    pathlib.Path({str(mark)!r}).touch()\n"
    )
    parent = (
        f"import sys; sys.path.append({str(ROOT / 'plots')!r})\n"
        "import signal, speedup; from pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"speedup.run_logged([sys.executable, '-c', {child!r}], Path({str(log)!r}), print)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.DEVNULL)
    deadline = time.time() + 60
    while not (log.exists() and "ready" in log.read_text()) and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert mark.exists()


def test_progress_and_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        " 10%|#| 100/1000 [00:01<00:09]\r 20%|#| 200/1000 [00:02<00:08]\nTraceback\nboom\n"
    )
    assert speedup.steps_done(log) == 200
    assert speedup.last_lines(log) == "    Traceback\n    boom"


# The field benchmark


def test_field_ratios_are_within_a_round():
    def result(sps):
        return {"sps_steady": sps, "warmup_seconds": 1.0}

    ours, sb3 = "LeanRL compile", "Stable-Baselines3"
    rounds = [{sb3: result(10), ours: result(20)}, {sb3: result(40), ours: result(120)}]
    rounds.append({ours: result(1000)})
    rows = {row["entrant"]: row for row in field.summarize(rounds)}
    assert rows[ours]["ratio_to_sb3"] == 2.5
    assert rows[ours]["sps_steady"] == {"median": 120, "min": 20, "max": 1000}
    assert rows["SBX"]["skipped"] == "no finished run"
    assert len({len(line) for line in field.cells(list(rows.values()))}) == 1


# What each trick is worth


def test_worth_is_measured_within_a_round():
    def result(steps_per_second):
        return {"sps_steady": steps_per_second, "warmup_seconds": 1.0}

    whole, trick = ablation.WHOLE, "acting in NumPy"
    rounds = [
        {whole: result(1000), trick: result(500)},
        {whole: result(2000), trick: result(1000)},
        {trick: result(1)},  # the whole one failed: this round compares nothing
    ]
    rows = ablation.summarize(rounds, [whole, trick, "one thread"])
    assert rows[1]["of_whole"] == 0.5 and rows[0]["of_whole"] == 1.0
    assert rows[1]["worth_us"] == {"median": 750, "min": 500, "max": 1000}
    assert rows[2]["skipped"] == "no finished run"
    assert len({len(line) for line in ablation.cells(rows)}) == 1


@pytest.mark.parametrize("algorithm", ablation.TRICKS)
def test_every_trick_can_be_taken_away(algorithm, tmp_path):
    """Each patch fits the script as it is today: a short run goes on without the trick."""
    settings = {"env_id": "Pendulum-v1", "total_timesteps": 64}
    if algorithm == "ppo":
        settings |= {"num_steps": 32, "num_minibatches": 2, "update_epochs": 1}
    else:
        settings |= {"learning_starts": 16, "batch_size": 8}
    code = f"""
import importlib, sys
sys.path.append({str(ROOT / "plots")!r})
import ablation
name = "leanrl.{algorithm}_continuous_action_torchcompile"
for i, patch in enumerate(ablation.TRICKS[{algorithm!r}].values()):
    module = importlib.reload(importlib.import_module(name))
    patch(module)
    module.main(module.Args(exp_name=str(i), **{settings!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("run directory") == len(ablation.TRICKS[algorithm])


# run.sh, .ci/run, requirements


def bash(*arguments, cwd=ROOT, **environment):
    command = ["bash", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@pytest.mark.parametrize("script", ["run.sh", ".ci/run"])
def test_shell_scripts_parse(script):
    assert bash("-n", script).returncode == 0


def test_help_names_every_command(tmp_path):
    done = bash(ROOT / "run.sh", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("--full", "field", "test", "--help"):
        assert f"bash run.sh {command}" in done.stdout


@pytest.mark.parametrize("arguments", [["bogus"], ["--fulll"], ["--full", "extra"]])
def test_unknown_arguments_are_refused_in_one_line(arguments):
    done = bash("run.sh", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and arguments[-1] in done.stderr


@pytest.fixture
def clone(tmp_path):
    """run.sh and what it reads, at a path with spaces, with an environment that logs its calls."""
    root = tmp_path / "a clone"
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    shutil.copy(ROOT / "run.sh", root)
    python = root / "active env/bin/python"
    python.parent.mkdir(parents=True)
    return root, python


def fake_python(python, missing, pip_status=0):
    """An interpreter that lacks `missing`, fails in pip as told, and prints any other call."""
    python.write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in\n'
        f'    "-m pip --version" | -c*) exit 0 ;;\n'
        f'    "-m pip install"*) echo "pip got $(cat)"; exit {pip_status} ;;\n'
        f'    "- requirements"*) printf "%s" "{missing}" ;;\n'
        '    *) echo "called: $*"; exit 7 ;;\n'
        "esac\n"
    )
    python.chmod(0o755)


def test_an_active_environment_is_used(clone, tmp_path):
    root, python = clone
    fake_python(python, missing="")
    for script in ("run.sh", ".ci/run"):
        arguments = ["test"] if script == "run.sh" else []
        env = {"VIRTUAL_ENV": str(python.parents[1])}
        done = bash(root / script, *arguments, "-k", "two words", cwd=tmp_path, **env)
        assert done.returncode == 7  # pytest's status, which comes through
        assert done.stdout == "called: -m pytest -q tests -k two words\n"
    assert not (root / ".venv").exists()


def test_only_missing_packages_are_installed(clone, tmp_path):
    root, python = clone
    fake_python(python, missing="tyro==1.0.17")
    done = bash(root / "run.sh", "test", cwd=tmp_path, VIRTUAL_ENV=str(python.parents[1]))
    assert "pip got tyro==1.0.17\ncalled: -m pytest" in done.stdout


def test_a_failing_step_stops_with_the_reason(clone, tmp_path):
    root, python = clone
    fake_python(python, missing="tyro==1.0.17", pip_status=1)
    done = bash(root / "run.sh", "test", cwd=tmp_path, VIRTUAL_ENV=str(python.parents[1]))
    assert done.returncode == 1 and "pip install failed" in done.stderr
    assert "called" not in done.stdout


def test_an_environment_without_python_is_named(tmp_path):
    done = bash("run.sh", "test", VIRTUAL_ENV=str(tmp_path / "gone"))
    assert done.returncode == 1 and str(tmp_path / "gone") in done.stderr


@pytest.mark.parametrize(
    "file", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda f: f.name
)
def test_requirements_are_pinned(file):
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    assert lines and all(PIN.fullmatch(line) for line in lines), lines


def test_requirements_agree_and_markers_leave_one_pin_each():
    pins = {}
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        for line in file.read_text().splitlines():
            if "==" in line and not line.startswith("#"):
                name, _, rest = line.partition("==")
                number, _, marker = rest.partition("; ")
                assert pins.setdefault((name, marker), number) == number, line
    for name, marker in pins:
        if marker:
            assert {m for n, m in pins if n == name} == {
                'python_version >= "3.11"',
                'python_version < "3.11"',
            }


# What is named exists

NAMING = ["run.sh", ".ci/run", ".github/CONTRIBUTING.md", ".github/workflows/ci.yml"]
NAMING += [".pre-commit-config.yaml"]
FOLDERS = "leanrl|plots|tests|requirements|\\.ci|\\.github"
MADE = ("plots/out", "plots/results")  # by the first measurement


@pytest.mark.parametrize("file", NAMING)
def test_paths_that_are_named_exist(file):
    text = (ROOT / file).read_text()
    named = set(re.findall(rf"(?<![\w./])(?:{FOLDERS})/[\w./-]+", text))
    named |= set(re.findall(r"(?<![\w./])(?:run\.sh|\.ruff\.toml)", text))
    named = {path.rstrip("./") for path in named if not path.startswith(MADE)}
    assert named and all((ROOT / path).exists() for path in named), named
