"""The race: its moments and minutes, what is kept of it, and the table."""

import importlib
import json
import os
from types import SimpleNamespace

import gymnasium
import processes
import pytest
import race


class Clock(race.Clock):
    """One that the test turns on."""

    now = 0.0

    def seconds(self):
        return Clock.now - self.left_out


def script_of(steps, seconds_per_step, warmup_steps):
    """A script of ours as far as `train` looks at it; an evaluation takes 1,000 seconds."""

    class Run:
        total_steps, ending, step = steps, False, 0

        def __init__(self, args):
            self.flags = vars(args)
            self.watch = SimpleNamespace(warmup_seconds=None)

        def write(self, row, step=None):
            pass

        def due(self, every, at_end=False):
            return every == 100  # rows of metrics are due as ever

    def main(args):
        run = script.Run(args)
        while not run.ending:
            run.step += 1
            Clock.now += seconds_per_step
            run.write({"charts/episodic_return": 1.0})
            run.ending = run.step == steps
            assert not run.due(0) and run.due(100)
            if run.due(args.eval_every):
                Clock.now += 1000
                run.write({"charts/eval_return": 10.0 * run.step})
            if run.step == warmup_steps:
                run.watch.warmup_seconds = 1.0

    script = SimpleNamespace(Run=Run, main=main)
    return script


@pytest.mark.parametrize(
    ("script", "moments", "expected"),
    [
        ((100, 30, 4), [1, 2, 4], [[1, 2, 20], [2, 4, 40], [4, 8, 80]]),
        ((9, 90, 1), [1, 2, 3], [[1.5, 1, 10], [3, 2, 20]]),  # a step passes two moments
        ((3, 30, 1), [1, 9], [[1, 2, 20], [1.5, 3, 30]]),
    ],
    ids=["moments", "long-steps", "all-steps-made"],
)
def test_evaluations_come_at_their_minutes(
    monkeypatch, capsys, tmp_path, script, moments, expected
):
    monkeypatch.setattr(race, "Clock", Clock)
    monkeypatch.setattr(Clock, "now", 0.0)
    race.train_and_evaluate(script_of(*script), SimpleNamespace(eval_every=1), moments)
    log = tmp_path / "log"
    log.write_text(capsys.readouterr().out)
    assert race.read(log)["evaluations"] == expected


def test_a_clock_counts_this_process_and_its_children():
    clock = race.Clock()
    begin = clock.seconds()
    pid = os.fork()
    if pid == 0:
        while sum(os.times()[:2]) < 0.3:
            pass
        os._exit(0)
    os.waitpid(pid, 0)
    assert clock.seconds() - begin >= 0.25


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The runs that are made: PPO's have a return, SAC's fail, and TD3's are interrupted."""
    runs = []

    def run_logged(command, log, progress, environment):
        progress(log)
        *_, worker, name, _, task, _, seed, _, minutes, pacing, pace = command
        assert worker == "--worker" and command[:2] == ["taskset", "-c"]
        assert (pacing, pace) == ("--pace", "0.5")
        assert environment["OMP_NUM_THREADS"] == "1"
        assert not os.listdir(environment["TMPDIR"])  # each start is cold
        runs.append((name, task, int(seed)))
        log.parent.mkdir(exist_ok=True)
        log.write_text(f'versions {{"jax": "9"}}\nafter {minutes}.01 min: 5 steps, return 7.0\n')
        if name == "TD3":
            raise KeyboardInterrupt
        return int(name == "SAC")

    monkeypatch.setattr(processes, "run_logged", run_logged)
    return runs


def make(folder, *wanted, minutes=3):
    """What is in the file then, and the failures."""
    options = SimpleNamespace(out=folder, minutes=minutes, pace=0.5, field_python="python")
    runs, failures = race.make(list(wanted), options)
    assert json.loads((folder / "race.json").read_text())["runs"] == runs
    return runs, failures


PPO, SAC = ("PPO", "Walker2d-v5", 1), ("SAC", "Walker2d-v5", 1)


def test_what_fails_is_named_and_what_is_not_yet_there_is_made(made, tmp_path):
    (run,), (said,) = make(tmp_path, PPO, SAC)
    assert run["evaluations"] == [[3.01, 5, 7.0]] and run["machine"]["versions"]["jax"] == "9"
    assert "SAC, Walker2d-v5, seed 1 ended with exit status 1" in said
    made.clear()
    runs, _ = make(tmp_path, PPO, PPO[:2] + (2,))
    assert made == [PPO[:2] + (2,)] and len(runs) == 2
    runs, _ = make(tmp_path, PPO, minutes=4)  # another run
    assert [run["minutes"] for run in runs] == [3, 3, 4]
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, *(("TD3", "Walker2d-v5", seed) for seed in range(9)))
    assert json.loads((tmp_path / "race.json").read_text())["runs"] == runs


def test_the_report_names_its_command(made, tmp_path):
    runs, _ = make(tmp_path, PPO, PPO[:2] + (2,))
    race.report(runs, runs, 3, [], tmp_path)
    words = "python plots/measure/race.py --minutes 3 --seeds 2 --pace 0.5 --entrants PPO"
    words += " --tasks Walker2d-v5"
    assert json.loads((tmp_path / "race.json").read_text())["command"] == words


@pytest.fixture
def runs():
    """Two seeds of TD3 for 10 minutes and one of SAC for 5."""
    machines = [{"cpu": {"vectors": vectors}} for vectors in ("AVX512", "AVX2")]
    found = []
    for seed, values in ((1, [1000, 8500, 9000]), (2, [2000, 4000, 7000])):
        rows = list(zip([1.02, 5.1, 10.2], [10, 50, 100], values, strict=True))
        run = {"entrant": "TD3", "task": "HalfCheetah-v5", "seed": seed, "evaluations": rows}
        found.append(run | {"minutes": 10, "machine": machines[seed - 1]})
    only = {"entrant": "SAC", "task": "Walker2d-v5", "seed": 1, "evaluations": [(1.0, 9, 4600)]}
    return [*found, only | {"minutes": 5, "machine": machines[1]}]


def test_the_longest_run_that_is_not_too_long_counts(runs):
    others = [runs[-1] | {"minutes": 3}, runs[0] | {"minutes": 20}]
    assert race.longest([*runs, *others], 10) == runs


def test_the_table_has_returns_at_moments_and_minutes_to_a_level(runs, tmp_path):
    assert race.moments(7) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert race.moments(30)[-4:] == [24, 26, 28, 30] and race.moments(40)[-3:] == [30, 35, 40]
    heading = ["task", "entrant", "processor", "seeds", "after 5 min", "after 10 min"]
    returns = ["6,250 (4,000 to 8,500)", "8,000 (7,000 to 9,000)", "8,000: 5.1 (1 of 2)"]
    assert race.cells(race.summarize(runs, 10)) == [
        [*heading, "minutes to"],
        ["HalfCheetah-v5", "TD3", "AVX512, AVX2", "2", *returns],
        ["Walker2d-v5", "SAC", "AVX2", "1", "4,600", "-", "4,500: 1.0"],
    ]
    assert "not in 10" in race.cells(race.summarize(runs[1:2], 10))[1][-1]
    assert race.after(runs[0]["evaluations"], 0.5) is None
    race.draw(runs, 10, tmp_path / "race")
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}


def test_what_is_told_of_a_run_suits_its_library(monkeypatch):
    """Zoo's settings are those of the tasks that it has tuned; flags are flags of our scripts."""
    for (entrant, task), flags in race.FLAGS.items():
        assert entrant in race.OURS and task in race.LEVELS
        script = importlib.import_module(f"leanrl.{race.OURS[entrant]}_torchcompile")
        script.Args(**flags)
    assert race.ZOO.keys() == race.LEVELS.keys() - {*race.ON_WORLDS}
    assert all(set(steps) <= set(race.LEVELS) for steps in race.STEPS.values())
    for task in race.LEVELS:
        racing = race.racers(task)
        assert (task in race.ON_WORLDS) == (racing == ["PPO on worlds", "SAC on worlds"])
        hidden = task in race.NO_VELOCITIES
        assert hidden == ("PPO with memory" in racing) == ("zoo's RecurrentPPO" in racing)
        assert all(task in race.STEPS[entrant] for entrant in racing if entrant in race.STEPS)
    told = []
    monkeypatch.setattr(
        race,
        "train_and_evaluate",
        lambda script, args, moments: told.append((args.env_id, args.total_timesteps)),
    )
    for entrant in race.racers("Walker2d-v5"):
        if entrant in race.OURS:
            race.train_ours(entrant, "Walker2d-v5", 1, 5, pace=0.5)
    assert [env_id for env_id, _ in told] == 2 * ["worlds/Walker2d-v5"] + 3 * ["Walker2d-v5"]
    assert told[0][1] == 2.5 * race.STEPS["PPO on worlds"]["Walker2d-v5"]


def test_velocities_are_not_seen():
    for hidden, (env_id, seen) in race.NO_VELOCITIES.items():
        env, whole = gymnasium.make(hidden), gymnasium.make(env_id)
        expected, _ = whole.reset(seed=3)
        obs, _ = env.reset(seed=3)
        assert obs.shape == env.observation_space.shape and obs in env.observation_space
        assert (obs == expected[seen]).all()
        env.action_space.seed(3)
        for _ in range(1000):
            action = env.action_space.sample()
            (obs, *told), (expected, *others) = env.step(action), whole.step(action)
            assert (obs == expected[seen]).all() and told == others
            if told[1] or told[2]:
                break
        assert told[1] or told[2], "its time limit is the environment's"
