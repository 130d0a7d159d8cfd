"""A run you can trust: what a resumed run takes up, what a crash leaves, how a run ends."""

import dataclasses
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import (
    CPU,
    SMALL,
    Scripted,
    assert_same,
    read_checkpoint,
    read_scalars,
    script,
    train,
)
from test_sac_parity import backend, smooth  # noqa: F401

from leanrl import sac_continuous_action as baseline
from leanrl import sac_continuous_action_torchcompile as variant
from leanrl import td3_continuous_action as td3_baseline

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def interrupted(module, **flags) -> str:
    """What a run says that a signal ends; its exit status is 1."""
    with pytest.raises(SystemExit) as end:
        train(module, **flags)
    return end.value.code


def the_run() -> Path:
    """The only run directory."""
    (run_dir,) = Path("runs").iterdir()
    return run_dir


@pytest.fixture
def scripted():
    """A function from `on_step` to the id of its environment."""

    def register(on_step) -> str:
        gym.register("Scripted-v0", lambda **_: Scripted(on_step), disable_env_checker=True)
        return "Scripted-v0"

    yield register
    gym.registry.pop("Scripted-v0", None)


# Resuming


@SCRIPTS
@pytest.mark.parametrize("ring", [5000, 200], ids=["growing", "wrapped"])
def test_a_resumed_run_goes_on_from_all_it_had(module, ring, monkeypatch):
    """A step without an update shows what was restored; then the run goes on and ends."""
    flags = {"num_envs": 2, "buffer_size": ring, "utd_ratio": 0.2, "save_model": True, "seed": 7}
    flags |= {"cuda": False}  # another device has a generator of its own
    run_dir = train(module, **flags, total_timesteps=251)  # 250 are whole steps of both
    files = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    before = read_checkpoint(run_dir)

    assert train(module, **flags, total_timesteps=252, resume=str(run_dir)) == run_dir
    after = read_checkpoint(run_dir)
    assert after["global_step"] == 252
    assert_same(before["agent"], after["agent"])
    assert_same(before["optimizers"], after["optimizers"])
    agent = module.SAC(module.Args(), 3, gym.spaces.Box(-2, 2, (1,), np.float32), CPU)
    agent.load_state_dict(before["agent"])
    obs, actions, size = *new_rows(before["replay"], after["replay"]), min(ring, 252)
    assert len(stored(after["replay"])) == size
    torch.set_rng_state(before["generators"][0])
    noise = torch.randn(2, 1)
    torch.testing.assert_close(agent.act(obs, noise), actions, rtol=0, atol=1e-5)
    starts = module.make_envs("Pendulum-v1", 2).reset(seed=7 + 250)[0]
    torch.testing.assert_close(obs, torch.tensor(starts))

    ticks, tick = [], module.Stopwatch.tick
    spy = lambda watch, steps: ticks.append(steps) or tick(watch, steps)  # noqa: E731
    monkeypatch.setattr(module.Stopwatch, "tick", spy)
    train(module, **flags, total_timesteps=500, resume=str(run_dir))
    assert ticks[-1] == 500 - 252  # its speed is that of its own steps
    end = read_checkpoint(run_dir)
    assert end["global_step"] == 500
    updates = [optimizer_steps(checkpoint) for checkpoint in (before, end)]
    assert updates == [30, 80]  # 0.2 per step after the first 100
    for name, content in files.items():  # the first part keeps its own
        assert name == "checkpoint.pt" or (run_dir / name).read_bytes() == content
    stages = json.loads((run_dir / "stages_252.json").read_text())
    assert stages["sps"] * stages["wall_seconds"] == pytest.approx(500 - 252, rel=0.01)
    config = json.loads((run_dir / "config_252.json").read_text())
    assert config["args"]["resume"] == str(run_dir)

    with pytest.raises(ValueError, match=rf"--buffer-size: the checkpoint has {ring:,}"):
        train(module, **flags | {"buffer_size": 100}, total_timesteps=530, resume=str(run_dir))
    flags |= {"num_envs": 5}  # the next row of 5 begins at a multiple of 5
    train(module, **flags, total_timesteps=530, resume=str(run_dir))
    assert read_checkpoint(run_dir)["replay"]["position"] % 5 == 0


def stored(replay: dict) -> torch.Tensor:
    """The rows of either script's replay buffer."""
    tensors = [x for x in replay.values() if isinstance(x, torch.Tensor)]
    return torch.cat([x.reshape(len(x), -1) for x in tensors], dim=1)


def new_rows(before: dict, after: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Observations and actions of the two rows by which `after` differs from `before`."""
    old, new, begin = stored(before), stored(after), before["position"]
    assert after["position"] == begin + 2
    rest = [i for i in range(len(old)) if not begin <= i < begin + 2]
    assert torch.equal(old[rest], new[rest])
    return new[begin : begin + 2, :3], new[begin : begin + 2, 3:4]


def optimizer_steps(checkpoint: dict) -> int:
    """How many updates the critics' optimizer says that there were."""
    state = checkpoint["optimizers"][0]
    if isinstance(state, dict):
        return int(state[0]["step"])
    return round(math.log(state[-1]) / math.log(0.999))


def command_line(monkeypatch, module, *flags) -> None:
    """`python SCRIPT FLAGS` in this process."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *flags])
    runpy.run_path(module.__file__, run_name="__main__")


@SCRIPTS
def test_flags_that_are_not_given_stay_and_a_new_learning_rate_counts(module, monkeypatch):
    part = train(module, total_timesteps=110, save_model=True, seed=7, gamma=0.9, tau=0.1)
    before = read_checkpoint(part)
    words = f"--resume {part} --total-timesteps 120 --tau 0.2 --policy-lr 0"
    command_line(monkeypatch, module, *words.split())
    after, given = read_checkpoint(part), {"seed": 7, "gamma": 0.9, "tau": 0.2, "policy_lr": 0.0}
    given |= {"total_timesteps": 120, "save_model": True, "resume": str(part)}
    expected = vars(module.Args(**SMALL | given))
    args = json.loads((part / "config_110.json").read_text())["args"]
    assert args == after["args"] | {"exp_name": args["exp_name"]} == expected
    for name, tensor in after["agent"].items():
        stays = name.startswith("actor.")
        assert torch.equal(tensor, before["agent"][name]) == stays, name


def test_checkpoints_and_evaluations_leave_no_trace_in_training():
    flags = {"total_timesteps": 300, "utd_ratio": 0.3, "save_model": True}
    plain = train(baseline, **flags, exp_name="plain")
    more = {"checkpoint_every": 70, "eval_every": 90, "eval_episodes": 2}
    busy = train(baseline, **flags, **more, exp_name="busy")
    one, other = map(read_checkpoint, (plain, busy))
    assert_same(one.pop("generators"), other.pop("generators"))
    for name, x in one["agent"].items():  # a product of matrices can end in other bits each time
        assert (x - other["agent"][name]).abs().mean() < 1e-4, name
    expected, found = map(read_scalars, (plain, busy))
    assert [step for step, _ in found.pop("charts/eval_return")] == [90, 180, 270, 300]
    assert expected.keys() == found.keys()
    assert json.loads((busy / "stages.json").read_text())["stages"]["evaluation"] > 0


def test_what_came_after_the_checkpoint_is_not_drawn_any_more(scripted, monkeypatch):
    """An episode ends every 50 steps; the run is interrupted 60 steps after its checkpoint."""

    def on_step(step, obs):
        if step == 180:
            raise RuntimeError("the simulator's own words")
        return obs, 1.0

    flags = {"env_id": scripted(on_step), "checkpoint_every": 120}
    at_exit = []
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="^the simulator's own"):
        patch.setattr(baseline.atexit, "register", at_exit.append)
        train(baseline, **flags, total_timesteps=1000)
    at_exit[0]()
    run_dir = the_run()
    episodes = read_scalars(run_dir)["charts/episodic_return"]
    assert [step for step, _ in episodes] == [50, 100, 150]
    train(baseline, **flags, total_timesteps=240, resume=str(run_dir))
    episodes = read_scalars(run_dir)["charts/episodic_return"]
    assert [step for step, _ in episodes] == [50, 100, 170, 220]


@pytest.mark.usefixtures("backend")
def test_a_compiled_run_resumes_like_an_eager_one(smooth):  # noqa: F811
    assert_resumes_like_an_eager_run({"compile": True}, smooth)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graphed_run_resumes_like_an_eager_one(compiled, smooth):  # noqa: F811
    assert_resumes_like_an_eager_run({"compile": compiled, "cudagraphs": True}, smooth)


@pytest.mark.gpu
@SCRIPTS
def test_a_resumed_run_draws_on_from_the_gpus_generator(module, monkeypatch):
    found = []
    load = module.ReplayBuffer.load_state_dict

    def noted(self, state):
        found.extend([torch.get_rng_state(), *torch.cuda.get_rng_state_all()])
        load(self, state)

    run_dir = train(module, total_timesteps=110, save_model=True, cuda=True)
    saved = read_checkpoint(run_dir)["generators"]
    monkeypatch.setattr(module.ReplayBuffer, "load_state_dict", noted)
    train(module, total_timesteps=120, resume=str(run_dir), cuda=True)
    assert len(saved) > 1 and all(map(torch.equal, found, saved))


def assert_resumes_like_an_eager_run(flags, env_id):
    """From one checkpoint, eager on one side: only rounding may differ, and it must not grow."""
    common = {"env_id": env_id, "batch_size": 256, "save_model": True}
    start = train(variant, **common, total_timesteps=140)
    shutil.copytree(start, "eager")
    shutil.copytree(start, "other")
    train(variant, **common, total_timesteps=170, resume="eager")
    train(variant, **common, total_timesteps=170, resume="other", **flags)
    first, one, other = (
        read_checkpoint(path)["agent"] for path in (start, Path("eager"), Path("other"))
    )
    same_draws = "cudagraphs" not in flags  # a graph's generator is another's
    for name in one:
        learned = (one[name] - first[name]).abs().mean()
        assert learned > 1e-4 or "action_" in name, f"{name}: nothing was learned"
        error = (one[name] - other[name]).abs().mean()
        assert error <= (1e-5 if same_draws else learned / 10), f"{name} differs by {error:.1e}"


@SCRIPTS
def test_what_cannot_be_resumed_is_an_error_that_says_so(module, monkeypatch):
    run_dir = train(module, total_timesteps=110, save_model=True)
    path = run_dir / "checkpoint.pt"
    checkpoint, content = read_checkpoint(run_dir), path.read_bytes()
    wider = {name: torch.zeros(1, 1) for name in checkpoint["agent"]}
    damaged = {
        "unexpected keyword argument 'new'": {"args": checkpoint["args"] | {"new": 1}},
        "size mismatch for log_alpha": {"agent": wider},
        "optimizers": {"optimizers": None},
        "PytorchStreamReader": content[:-100],
        "checkpoint.pt": None,  # as a run leaves it that was not asked for a checkpoint
    }
    for words, change in damaged.items():
        if isinstance(change, dict):
            torch.save({name: x for name, x in (checkpoint | change).items() if x}, path)
        elif change:
            path.write_bytes(change)
        else:
            path.unlink()
        with pytest.raises(Exception, match=re.escape(words)):
            command_line(monkeypatch, module, "--resume", str(run_dir), "--total-timesteps", "200")
    assert not list(run_dir.glob("*110*")), "it was not resumed"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_the_checkpoint_is_let_go_when_it_has_been_restored(scripted):
    """Its file was mapped until the end of the run, replay buffer and all."""
    env_id = scripted(lambda step, obs: (obs, 1.0))
    run_dir = train(baseline, env_id=env_id, total_timesteps=110, save_model=True)

    def on_step(step, obs):
        assert "checkpoint.pt" not in Path("/proc/self/maps").read_text()
        return obs, 1.0

    scripted(on_step)
    train(baseline, env_id="Scripted-v0", total_timesteps=230, resume=str(run_dir))


def test_the_random_steps_of_before_are_no_warm_up_again(monkeypatch):
    """A resumed run's warm-up is as long as its updates need."""
    made = []
    init = baseline.Stopwatch.__init__
    spy = lambda watch, *given: made.append(given[1]) or init(watch, *given)  # noqa: E731
    monkeypatch.setattr(baseline.Stopwatch, "__init__", spy)
    run_dir = train(baseline, total_timesteps=150, save_model=True)
    train(baseline, total_timesteps=160, resume=str(run_dir))
    train(baseline, total_timesteps=200, learning_starts=180, resume=str(run_dir))
    assert made == [100 + 100, 100, 30 + 100]


def test_flags_that_do_not_fit_are_refused_by_their_name(capsys, monkeypatch):
    for words, flag in (
        ("--gamma 1.5", "--gamma"),
        ("--tau -0.1", "--tau"),
        ("--total-timesteps 5000", "--total-timesteps"),
        ("--stopwatch off", "--stopwatch"),
        ("--batch-size many", "--batch-size"),
    ):
        with pytest.raises(SystemExit):
            command_line(monkeypatch, baseline, *words.split())
        assert flag in capsys.readouterr().err
    for flags, words in (
        ({"env_id": "Pendulumm-v1"}, "Pendulumm"),
        ({"env_id": "CartPole-v1"}, "--env-id: needs continuous actions"),
        ({"buffer_size": -1}, "negative dimension"),
    ):
        with pytest.raises(Exception, match=words):
            train(baseline, **flags)
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="moviepy"):
        patch.setitem(sys.modules, "moviepy", None)  # not after hours, at the first evaluation
        train(baseline, capture_video=True)
    assert not Path("runs").exists()


def test_two_runs_of_one_second_have_a_directory_each(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)
    runs = [train(baseline, total_timesteps=110) for _ in range(2)]
    assert [path.name[-10:] for path in runs] == ["1000000000", "1000000001"]


def test_what_a_copy_adds_and_anneals(monkeypatch):
    """Its flags may be zero or less; flags are saved as they were given."""

    @dataclasses.dataclass
    class Args(baseline.Args):
        shift: float = -1.0

    monkeypatch.setattr(sys, "argv", ["copy.py", "--env-id", "Plain-v0"])
    args = baseline.parse_args(Args)
    assert args.shift == -1.0
    run = baseline.Run(args, CPU, 1, 0)
    run.dir = Path()
    args.alpha = 0.1  # as a loop that anneals it
    agent = torch.nn.Linear(1, 1)
    agent.optimizers = []
    run.save(agent)
    assert read_checkpoint(run.dir)["args"]["alpha"] == baseline.Args.alpha


# Random generators


class Dice(Scripted):
    """Draws from Python's and NumPy's global generators."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs + np.float32(random.random() + np.random.random()), info


@pytest.mark.parametrize("module", [baseline, td3_baseline])
def test_the_seed_is_of_every_generator_and_evaluation_draws_from_none(module):
    gym.register("Dice-v0", lambda **_: Dice(lambda step, obs: (obs, random.random())))
    flags = {"env_id": "Dice-v0", "total_timesteps": 160, "save_model": True, "eval_episodes": 2}
    try:
        runs = [train(module, **flags) for _ in range(2)]
        runs.append(train(module, **flags, eval_every=40))
        other = read_checkpoint(train(module, **flags, seed=2))
    finally:
        gym.registry.pop("Dice-v0")
    first, *others = map(read_checkpoint, runs)
    for checkpoint in others:
        assert_same(first["replay"], checkpoint["replay"])
        assert_same(first["agent"], checkpoint["agent"], tolerance=1e-5)
    assert not torch.equal(first["replay"]["rewards"], other["replay"]["rewards"])
    values = read_scalars(runs[-1])["charts/eval_return"]
    again = read_scalars(train_dice_again(module, flags))["charts/eval_return"]
    assert values == again


def train_dice_again(module, flags):
    gym.register("Dice-v0", lambda **_: Dice(lambda step, obs: (obs, random.random())))
    try:
        return train(module, **flags, eval_every=40)
    finally:
        gym.registry.pop("Dice-v0")


# How a run ends


PATIENCE = 300  # seconds that only a test which fails takes, however busy the machine


def wait_for(condition, process) -> None:
    """Until `condition`, while the process runs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start(*flags, name="sac_continuous_action.py", **options) -> subprocess.Popen:
    small = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    return subprocess.Popen(script(name, *small, *flags), stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_run_after_its_iteration_with_all_records(number, scripted):
    """Also one that comes while an environment swallows every exception, or within a row."""

    def on_step(step, obs):
        try:
            if step == 130:
                os.kill(os.getpid(), number)
        except:  # noqa: E722
            pass
        return obs, 1.0

    before = signal.getsignal(number)
    flags = {"env_id": scripted(on_step), "total_timesteps": 200, "save_model": True}
    more = {"eval_every": 1000, "stopwatch": "trace"}
    assert interrupted(baseline, **flags, **more) == "interrupted after 130 steps"
    run_dir = the_run()
    assert read_checkpoint(run_dir)["global_step"] == 130
    assert json.loads((run_dir / "stages.json").read_text())["sps"] > 0
    assert [step for step, _ in read_scalars(run_dir)["charts/SPS"]] == [100, 130]
    assert "charts/eval_return" not in read_scalars(run_dir)  # it would take its time
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_the_process():
    """At once, here while an update is being compiled."""
    process = start("--compile", name="sac_continuous_action_torchcompile.py")
    wait_for(lambda: list(Path("runs").glob("*/events*")), process)
    time.sleep(3)  # most of the way into the compiler
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT


def test_a_reader_that_ends_first_takes_nothing_away():
    """`2>&1 | tee log`: Ctrl-C ends tee as well."""
    process = start("--save-model", "--checkpoint-every=110")
    wait_for(lambda: list(Path("runs").glob("*/checkpoint.pt")), process)
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=PATIENCE)
    assert read_checkpoint(the_run())["global_step"] > 0
    assert json.loads((the_run() / "stages.json").read_text())["sps"] > 0


def test_a_run_in_a_thread(scripted):
    """Where no signal arrives, as in a notebook's server."""
    done = []
    thread = threading.Thread(target=lambda: done.append(train(baseline, total_timesteps=110)))
    thread.start()
    thread.join(PATIENCE)
    assert done == [the_run()]


def test_an_error_keeps_its_traceback_and_leaves_records(tmp_path):
    """Its message is the last line."""
    (tmp_path / "broken_env.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import PendulumEnv\n"
        "class Broken(PendulumEnv):\n"
        "    def step(self, action):\n"
        "        self.steps = getattr(self, 'steps', 0) + 1\n"
        "        if self.steps == 120:\n"
        "            raise MemoryError('the simulator is out of memory')\n"
        "        return super().step(action)\n"
        "gym.register('Broken-v0', Broken)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = start("--env-id=broken_env:Broken-v0", env=environment, text=True)
    err = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1
    assert "Traceback" in err and "broken_env.py" in err
    assert err.strip().splitlines()[-1] == "MemoryError: the simulator is out of memory"
    assert json.loads((the_run() / "stages.json").read_text())["stages"]["simulation"] > 0
    assert read_scalars(the_run())["charts/SPS"]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_can_always_go_on():
    """kill -9; a checkpoint of 200 kB is written every 20 steps, so that some hit its writing."""
    rng, run_dir, steps = random.Random(0), None, 0
    for _ in range(10):
        resume = [f"--resume={run_dir}"] if run_dir else []
        config = f"*/config_{steps}.json" if run_dir else "*/checkpoint.pt"
        process = start("--checkpoint-every=20", "--total-timesteps=1000000", *resume)
        wait_for(lambda config=config: list(Path("runs").glob(config)), process)
        run_dir = the_run()
        time.sleep(rng.uniform(0, 3))
        process.kill()
        process.communicate()
        steps = read_checkpoint(run_dir)["global_step"]
        assert steps % 20 == 0
    end = start(f"--resume={run_dir}", f"--total-timesteps={steps + 120}")
    end.communicate(timeout=PATIENCE)
    assert end.returncode == 0
    assert read_checkpoint(run_dir)["global_step"] == steps + 120


@pytest.mark.parametrize("moment", ["writing", "replacing"])
def test_a_full_disk_leaves_the_last_checkpoint(moment, monkeypatch):
    part = train(baseline, total_timesteps=110, save_model=True)
    before = (part / "checkpoint.pt").read_bytes()

    def half(state, path):
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    def whole(path, target):
        raise OSError(28, "No space left on device")

    target = {"writing": (torch, "save", half), "replacing": (Path, "replace", whole)}
    monkeypatch.setattr(*target[moment])
    with pytest.raises(OSError, match="No space left on device"):
        train(baseline, total_timesteps=120, save_model=True, resume=str(part))
    assert (part / "checkpoint.pt").read_bytes() == before


FAULTS = {  # what an environment's step makes of its observation and reward
    "nan reward": lambda obs: (obs, math.nan),
    "infinite reward": lambda obs: (obs, -math.inf),
    "nan observation": lambda obs: (obs * math.nan, 1.0),
    "beyond float32": lambda obs: (obs, 1e300),
    "infinite gradients": lambda obs: (obs, 2.9e38),
}


@pytest.mark.parametrize(
    ("module", "fault"),
    [*((baseline, fault) for fault in FAULTS), (variant, "infinite gradients")],
    ids=lambda value: value if isinstance(value, str) else value.__name__.removeprefix("leanrl."),
)
def test_what_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(module, fault, scripted):
    change = FAULTS[fault]
    env_id = scripted(lambda step, obs: change(obs) if step > 220 else (obs, 1.0))
    with pytest.raises(FloatingPointError, match="^step [23].0: .* is (nan|inf|-inf|not finite)$"):
        train(module, env_id=env_id, total_timesteps=1000, checkpoint_every=50)
    checkpoint = read_checkpoint(the_run())
    assert checkpoint["global_step"] == 200
    assert all(tensor.isfinite().all() for tensor in checkpoint["agent"].values())
    assert stored(checkpoint["replay"]).isfinite().all()


@pytest.mark.parametrize("module", [baseline, variant, td3_baseline])
def test_a_number_that_is_not_finite_is_not_saved_while_actions_are_random(module, scripted):
    """Nothing is learned yet that would show it."""
    env_id = scripted(lambda step, obs: (obs, math.nan if step == 120 else 1.0))
    flags = {"env_id": env_id, "total_timesteps": 300, "learning_starts": 200}
    with pytest.raises(FloatingPointError, match="^step 150: re?[ws]a?r?ds? is not finite$|rows"):
        train(module, **flags, checkpoint_every=50)
    assert stored(read_checkpoint(the_run())["replay"]).isfinite().all()


def test_losses_and_weights_that_are_not_finite_end_the_run(scripted, monkeypatch):
    """Also where actions stay finite: at the next row of metrics, or when they would be saved."""
    rewards = [1e30]
    env_id = scripted(lambda step, obs: (obs, rewards[-1]))
    with pytest.raises(FloatingPointError, match="^step 200: losses/qf1_loss is inf$"):
        train(baseline, env_id=env_id, total_timesteps=1000)
    rewards.append(1.0)

    def spoil(agent):
        agent.qf[1][0].weight.data[3, 1] = math.nan

    monkeypatch.setattr(baseline.SAC, "update_target", spoil)
    flags = {"total_timesteps": 1000, "utd_ratio": 0.01, "checkpoint_every": 10}
    with pytest.raises(FloatingPointError, match="^step 200: qf.1.0.weight is not finite$"):
        train(baseline, env_id=env_id, **flags, exp_name="weights")
    (run_dir,) = Path("runs").glob("*weights*")
    assert read_checkpoint(run_dir)["global_step"] == 190


# Watching, tracking


class Drawn(Scripted):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def render(self):
        return np.full((64, 64, 3), self.total, np.uint8)


def test_video_of_the_first_episode_of_each_evaluation():
    pytest.importorskip("moviepy", reason="needs requirements/video.txt")
    from moviepy import VideoFileClip

    gym.register("Drawn-v0", entry_point=lambda **_: Drawn(lambda step, obs: (obs, 1.0)))
    flags = {"total_timesteps": 120, "capture_video": True, "eval_every": 60, "eval_episodes": 2}
    try:
        run_dir = train(baseline, **flags, env_id="Drawn-v0", utd_ratio=0.1)
    finally:
        gym.registry.pop("Drawn-v0")
    names = sorted(str(path.relative_to(run_dir)) for path in run_dir.glob("videos/*/*"))
    assert names == [f"videos/step-{step}/rl-video-episode-0.mp4" for step in (120, 60)]
    with VideoFileClip(str(run_dir / names[0])) as clip:
        assert clip.size == [64, 64] and clip.fps == 10
        assert clip.duration == pytest.approx(5.1, abs=0.15)  # the whole episode


@SCRIPTS
def test_tracking_gets_the_run_by_the_name_of_its_directory(module, monkeypatch, scripted):
    """Also where the environment's id names a module; a stand-in for wandb notes its call."""
    calls = []
    fake = SimpleNamespace(init=lambda **given: calls.append(given))
    scripted(lambda step, obs: (obs, 1.0))
    more = {"env_id": "json:Scripted-v0", "exp_name": "a b/c", "track": True}
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="^import of wandb halted"):
        train(module, **more, total_timesteps=110)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run_dir = train(module, **more, total_timesteps=110, wandb_entity="team")
    (call,) = calls
    assert run_dir.parent == Path("runs") and re.fullmatch(
        r"json_Scripted-v0__a_b_c__1__\d+", run_dir.name
    )
    config = json.loads((run_dir / "config.json").read_text())
    expected = {"id": run_dir.name, "project": "leanRL", "entity": "team", "config": config}
    assert call == expected | {"resume": "allow", "sync_tensorboard": True}


@pytest.mark.slow
def test_tracking_without_a_network(tmp_path):
    """With the real package, in a process of its own."""
    pytest.importorskip("wandb", reason="needs requirements/wandb.txt")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    env = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = script("sac_continuous_action.py", *flags, "--total-timesteps=200", "--track")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run_dir,), (folder,) = Path("runs").iterdir(), tmp_path.glob("wandb/offline-run-*")
    assert folder.name.endswith(run_dir.name)
    stored = next(folder.glob("*.wandb")).read_bytes()
    for word in (b"charts/episodic_return", b"losses/qf1_loss", b"learning_starts"):
        assert word in stored, word
