"""The race and what it shares with returns: moments, minutes, what is kept, and the table."""

import json
import os
import sys
from types import SimpleNamespace

import processes
import pytest
import race
import run_dirs
import timed


class Clock(timed.Clock):
    """One that the test turns on."""

    now = 0.0

    def seconds(self):
        return Clock.now - self.left_out


def script_of(steps, seconds_per_step, warmup_steps):
    """A script of ours as far as `train` looks at it; an evaluation takes 1,000 seconds."""

    class Run:
        def __init__(self, args):
            self.flags = vars(args)
            self.step = 0
            self.total_steps = steps
            self.ending = False
            self.watch = SimpleNamespace(warmup_seconds=None)

        def write(self, row, step=None):
            pass

        def due(self, every, at_end=False):
            return every == 100  # rows of metrics are due as ever

    script = SimpleNamespace(Run=Run)

    def main(args):
        run = script.Run(args)
        while not run.ending:
            run.step += 1
            Clock.now += seconds_per_step
            run.write({"charts/episodic_return": 1.0})
            run.ending = run.step == run.total_steps
            assert not run.due(0) and run.due(100)
            if run.due(args.eval_every):
                Clock.now += 1000
                run.write({"charts/eval_return": 10.0 * run.step})
            if run.step == warmup_steps:
                run.watch.warmup_seconds = 1.0

    script.main = main
    return script


def test_evaluations_come_at_their_minutes_and_do_not_count(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(timed, "Clock", Clock)

    def told(*arguments, **settings):
        Clock.now = 0.0
        timed.train(*arguments, **settings)
        log = tmp_path / "log"
        log.write_text(capsys.readouterr().out)
        return timed.read(log)["evaluations"]

    args = SimpleNamespace(eval_every=1)
    found = told(script_of(100, 30, 4), args, [1, 2, 4])
    assert found == [[1, 2, 20], [2, 4, 40], [4, 8, 80]]
    # the warm-up of four steps, 2 minutes, is left out; one step may pass several moments
    found = told(script_of(100, 30, 4), args, [1, 2, 4], warmup=False)
    assert found == [[1, 6, 60], [2, 8, 80], [4, 12, 120]]
    assert told(script_of(9, 90, 1), args, [1, 2, 3]) == [[1.5, 1, 10], [3, 2, 20]]
    # whose steps are made is evaluated at its end; updates instead of steps
    found = told(script_of(3, 30, 1), args, [1, 9], count=lambda run: 7 * run.step, unit="updates")
    assert found == [[1, 14, 20], [1.5, 21, 30]]
    with pytest.raises(SystemExit, match="wrong"):
        timed.train(SimpleNamespace(Run=object, main=lambda args: sys.exit("wrong")), args, [1])


def test_a_clock_counts_this_process_and_its_children():
    clock = timed.Clock()
    begin = clock.seconds()
    pid = os.fork()
    if pid == 0:
        while sum(os.times()[:2]) < 0.3:
            pass
        os._exit(0)
    os.waitpid(pid, 0)
    passed = clock.seconds() - begin
    assert passed >= 0.25
    clock.go_back(begin)
    assert clock.seconds() - begin < passed / 2


def test_what_is_made_is_kept_and_what_fails_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["plots/measure/race.py"])
    made = []

    def run_logged(command, log, progress, environment):
        progress(log)
        *_, worker, name, _, task, _, seed, _, minutes = command
        assert worker == "--worker" and command[:2] == ["taskset", "-c"]
        assert environment["OMP_NUM_THREADS"] == "1"
        assert not os.listdir(environment["TMPDIR"])  # each start is cold
        made.append((name, task, int(seed)))
        log.parent.mkdir(exist_ok=True)
        bad = name == "SAC"
        line = f"after {minutes}.01 min: 5 steps, return 7.0\n"
        log.write_text("no" if bad else 'versions {"jax": "9"}\n' + line)
        return int(bad)

    monkeypatch.setattr(processes, "run_logged", run_logged)
    options = SimpleNamespace(out=tmp_path, minutes=3)
    wanted = [("PPO", "Ant-v5", 1), ("SAC", "Ant-v5", 1)]
    runs, failures = timed.make("entrant", wanted, options)
    assert [run["evaluations"] for run in runs] == [[[3.01, 5, 7.0]]]
    assert runs[0]["machine"]["versions"]["jax"] == "9"
    assert len(failures) == 1 and "SAC, Ant-v5, seed 1 ended with exit status 1" in failures[0]
    made.clear()
    runs, _ = timed.make("entrant", [*wanted, ("PPO", "Ant-v5", 2)], options)
    assert sorted(made) == [("PPO", "Ant-v5", 2), ("SAC", "Ant-v5", 1)]  # in either order
    assert len(runs) == 2 == len(json.loads((tmp_path / "race.json").read_text())["runs"])
    options.minutes = 4  # other runs
    runs, _ = timed.make("entrant", wanted[:1], options)
    assert [run["minutes"] for run in runs] == [3, 3, 4]
    table = [["task", "entrant", "x"], ["Ant-v5", "PPO", "7"]]
    told = [run for run in runs if run["minutes"] == 3]
    timed.report("entrant", "T", runs, told, 3, table, [], tmp_path / "race")
    record = json.loads((tmp_path / "race.json").read_text())
    words = "python plots/measure/race.py --minutes 3 --seeds 2 --entrants PPO --tasks Ant-v5"
    assert record["command"] == words and record["runs"] == runs and record["table"] == table

    def interrupt(command, log, progress, environment):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "run_logged", interrupt)
    with pytest.raises(KeyboardInterrupt):
        timed.make("entrant", [("TD3", "Ant-v5", seed) for seed in range(9)], options)
    assert len(json.loads((tmp_path / "race.json").read_text())["runs"]) == 3


def test_the_table_is_worked_out_by_hand(tmp_path):
    assert race.moments(7) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert race.moments(30)[-4:] == [24, 26, 28, 30] and race.moments(40)[-3:] == [30, 35, 40]
    runs = []
    for seed, values in ((1, [1000, 8500, 9000]), (2, [2000, 4000, 7000])):
        rows = list(zip([1.02, 5.1, 10.2], [10, 50, 100], values, strict=True))
        run = {"entrant": "TD3", "task": "HalfCheetah-v5", "seed": seed, "evaluations": rows}
        machine = {"cpu": {"vectors": ("AVX512", "AVX2")[seed - 1]}}
        runs.append(run | {"minutes": 10, "machine": machine})
    only = {"entrant": "SAC", "task": "Ant-v5", "seed": 1, "evaluations": [(1.0, 9, 3600)]}
    only |= {"minutes": 5, "machine": machine}
    others = [only | {"minutes": 3}, runs[0] | {"minutes": 20}]  # a shorter one, and a longer one
    assert race.longest([*runs, only, *others], 10) == [*runs, only]
    rows = race.summarize([*runs, only], 10)
    assert race.cells(rows) == [
        ["task", "entrant", "processor", "seeds", "after 5 min", "after 10 min", "minutes to"],
        [
            "HalfCheetah-v5",
            "TD3",
            "AVX512, AVX2",
            "2",
            "6,250 (4,000 to 8,500)",
            "8,000 (7,000 to 9,000)",
            "8,000: 5.1 (1 of 2)",
        ],
        ["Ant-v5", "SAC", "AVX2", "1", "3,600", "-", "3,500: 1.0"],
    ]
    assert "not in 10" in race.cells(race.summarize(runs[1:], 10))[1][-1]
    assert race.after(runs[0]["evaluations"], 0.5) is None
    race.draw([*runs, only], 10, tmp_path / "race")
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}


def test_what_is_told_of_a_run_suits_its_library(monkeypatch):
    """Zoo's settings are those of the tasks that it has tuned; flags are flags of our scripts."""
    from leanrl import ppo_mujoco_worlds_torchcompile as ppo

    for entrant, task in race.FLAGS:
        assert entrant in race.OURS and task in race.LEVELS
        ppo.Args(**race.FLAGS[entrant, task])
    assert set(race.ZOO) < set(race.LEVELS)
    assert all(set(steps) == set(race.LEVELS) for steps in race.STEPS.values())
    assert all(
        run_dirs.ROOT.joinpath(f"leanrl/{s}_torchcompile.py").exists() for s in race.OURS.values()
    )
    told = []
    monkeypatch.setattr(timed, "train", lambda script, args, moments: told.append(args.env_id))
    for entrant in race.OURS:
        race.train_ours(entrant, "Ant-v5", 1, 5)
    assert told == 2 * ["worlds/Ant-v5"] + 3 * ["Ant-v5"]
