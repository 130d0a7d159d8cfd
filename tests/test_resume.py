"""A run you can trust: what a resumed run takes up, what a crash leaves, how a run ends.

Most of it is about the region that all scripts share to the letter, and is tested on SAC.
"""

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
import pytest
import torch
from helpers import (
    CPU,
    PATIENCE,
    SMALL,
    Scripted,
    read_checkpoint,
    read_scalars,
    run,
    script,
    train,
    wait_until,
)

from leanrl import sac_continuous_action as baseline
from leanrl import sac_continuous_action_torchcompile as variant

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)


def the_run() -> Path:
    """The only run directory."""
    (run_dir,) = Path("runs").iterdir()
    return run_dir


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture
def scripted():
    """A function from `on_step` to the id of its environment."""

    def register(on_step=lambda step, obs: (obs, 1.0)) -> str:
        gym.register("Scripted-v0", lambda **_: Scripted(on_step), disable_env_checker=True)
        return "Scripted-v0"

    yield register
    gym.registry.pop("Scripted-v0", None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 110 steps, ten of them with an update."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("saved"))
        flags = {"seed": 7, "gamma": 0.9, "tau": 0.1, "cuda": False}
        return train(baseline, **flags, total_timesteps=110, save_model=True).absolute()


@pytest.fixture
def part(saved, tmp_path):
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / "part")


def command_line(monkeypatch, module, words: str) -> None:
    """`python SCRIPT WORDS` in this process."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *words.split()])
    runpy.run_path(module.__file__, run_name="__main__")


# Resuming


def test_each_part_keeps_its_records(part):
    """And its speed is that of its own steps."""
    files = {path.name: path.read_bytes() for path in part.iterdir()}
    assert train(baseline, total_timesteps=210, resume=str(part)) == part
    for name, content in files.items():
        assert name == "checkpoint.pt" or (part / name).read_bytes() == content
    stages = read_json(part / "stages_110.json")
    assert stages["sps"] * stages["wall_seconds"] == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(
    ("starts", "resumed", "warmup"), [(100, False, 150), (100, True, 50), (130, True, 70)]
)
def test_random_steps_of_before_are_no_warm_up(starts, resumed, warmup, part):
    flags = SMALL | {"learning_starts": starts, "resume": str(part) if resumed else None}
    run = baseline.Run(baseline.Args(**flags), CPU, 1, steady_after=50)
    assert run.watch.warmup_steps == warmup


@SCRIPTS
def test_flags_that_are_not_given_stay(module, monkeypatch):
    """Also learning rates that are given count."""
    flags = {"total_timesteps": 110, "save_model": True, "seed": 7, "gamma": 0.9, "tau": 0.1}
    part = train(module, **flags)
    before = read_checkpoint(part)
    words = f"--resume {part} --total-timesteps 120 --tau 0.2 --policy-lr 0"
    command_line(monkeypatch, module, words)
    flags |= {"total_timesteps": 120, "tau": 0.2, "policy_lr": 0.0, "resume": str(part)}
    after, args = read_checkpoint(part), read_json(part / "config_110.json")["args"]
    assert args == after["args"] | {"exp_name": args["exp_name"]}
    assert args == vars(module.Args(**SMALL | flags))
    for name, tensor in after["agent"].items():
        assert torch.equal(tensor, before["agent"][name]) == name.startswith("actor."), name


def test_rows_after_the_checkpoint_are_purged(scripted, monkeypatch):
    """An episode ends every 50 steps; the run is interrupted 60 steps after its checkpoint."""

    def on_step(step, obs):
        if step == 180:
            raise RuntimeError("the simulator's own words")
        return obs, 1.0

    flags, at_exit = {"env_id": scripted(on_step), "checkpoint_every": 120}, []
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="^the simulator's own"):
        patch.setattr(baseline.atexit, "register", at_exit.append)
        train(baseline, **flags, total_timesteps=1000)
    at_exit[0]()
    run_dir, found = the_run(), [read_scalars(the_run())]
    train(baseline, **flags, total_timesteps=240, resume=str(run_dir))
    found.append(read_scalars(run_dir))
    steps = [[step for step, _ in scalars["charts/episodic_return"]] for scalars in found]
    assert steps == [[50, 100, 150], [50, 100, 170, 220]]


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


@pytest.mark.usefixtures("backend")
def test_a_compiled_run_resumes_like_an_eager_one(smooth):
    assert_resumes_like_an_eager_run({"compile": True}, smooth)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graphed_run_resumes_like_an_eager_one(compiled, smooth):
    assert_resumes_like_an_eager_run({"compile": compiled, "cudagraphs": True}, smooth)


@pytest.mark.gpu
def test_the_gpus_generator_goes_on(monkeypatch):
    found, load = {}, baseline.ReplayBuffer.load_state_dict

    def noted(self, state):
        found.update(cpu=torch.get_rng_state(), cuda=torch.cuda.get_rng_state())
        load(self, state)

    run_dir = train(baseline, total_timesteps=110, save_model=True)
    saved = read_checkpoint(run_dir)["generators"]
    monkeypatch.setattr(baseline.ReplayBuffer, "load_state_dict", noted)
    train(baseline, total_timesteps=120, resume=str(run_dir))
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_the_checkpoint_of_other_optimizers_is_refused(part):
    checkpoint = read_checkpoint(part)
    torch.save(checkpoint | {"optimizers": checkpoint["optimizers"][:1]}, part / "checkpoint.pt")
    with pytest.raises(ValueError, match="shorter"):
        train(baseline, total_timesteps=200, resume=str(part))
    assert not list(part.glob("*_110.json"))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_the_checkpoint_is_let_go_when_it_has_been_restored(scripted):
    """Its file would be mapped until the end of the run, replay buffer and all."""
    run_dir = train(baseline, env_id=scripted(), total_timesteps=110, save_model=True)

    def on_step(step, obs):
        assert "checkpoint.pt" not in Path("/proc/self/maps").read_text()
        return obs, 1.0

    train(baseline, env_id=scripted(on_step), total_timesteps=120, resume=str(run_dir))


# Flags and directories


@pytest.mark.parametrize(
    "words",
    [
        "--gamma 1.5",
        "--tau -0.1",
        "--total-timesteps 5000",
        "--stopwatch off",
        "--batch-size many",
    ],
)
def test_a_wrong_flag_is_named_without_a_traceback(words, capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        command_line(monkeypatch, baseline, words)
    assert end.value.code
    assert words.partition(" ")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "flags"), [("moviepy", {"capture_video": True}), ("wandb", {"track": True})]
)
def test_a_missing_package_is_named_at_once(module, flags, monkeypatch):
    """Not after hours, at the first evaluation."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=module):
        train(baseline, **flags)


def test_two_runs_of_one_second_have_a_directory_each(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)
    args = baseline.Args()
    found = [baseline.make_directory(args) for _ in range(2)]
    assert [path.name[-10:] for path in found] == ["1000000000", "1000000001"]


def test_a_copys_flags_are_saved_as_they_were_given(monkeypatch):
    """Also those that its loop anneals, or that it adds; one may be less than zero."""

    @dataclasses.dataclass
    class Args(baseline.Args):
        shift: float = -1.0

    monkeypatch.setattr(sys, "argv", ["copy.py", "--env-id", "Plain-v0"])
    args = baseline.parse_args(Args)
    assert args.shift == -1.0
    run = baseline.Run(args, CPU, 1, 0)
    run.dir = Path()
    args.alpha = 0.1
    agent = torch.nn.Linear(1, 1)
    agent.optimizers = []
    run.save(agent)
    assert read_checkpoint(run.dir)["args"]["alpha"] == baseline.Args.alpha


# How a run ends


def start(*flags, name="sac_continuous_action.py", **options) -> subprocess.Popen:
    small = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    return subprocess.Popen(script(name, *small, *flags), stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_run_after_its_iteration(number, scripted):
    """With all records; here one that comes while an environment swallows every exception."""

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
    with pytest.raises(SystemExit, match="^interrupted after 130 steps$"):
        train(baseline, **flags, **more)
    run_dir = the_run()
    assert read_checkpoint(run_dir)["global_step"] == 130
    assert read_json(run_dir / "stages.json")["sps"] > 0
    assert [step for step, _ in read_scalars(run_dir)["charts/SPS"]] == [100, 130]
    assert "charts/eval_return" not in read_scalars(run_dir)  # it would take its time
    assert signal.getsignal(number) == before


def test_a_second_signal_ends_the_process():
    """At once, here while an update is being compiled."""
    process = start("--compile", name="sac_continuous_action_torchcompile.py")
    wait_until(lambda: list(Path("runs").glob("*/events*")))
    time.sleep(3)  # most of the way into the compiler
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT


def test_a_reader_that_ends_first_takes_nothing_away():
    """`2>&1 | tee log`: Ctrl-C ends tee as well."""
    process = start("--save-model", "--checkpoint-every=110")
    wait_until(lambda: list(Path("runs").glob("*/checkpoint.pt")))
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=PATIENCE)
    assert read_checkpoint(the_run())["global_step"] > 0
    assert read_json(the_run() / "stages.json")["sps"] > 0


def test_a_run_in_a_thread():
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
    assert read_json(the_run() / "stages.json")["stages"]["simulation"] > 0
    assert read_scalars(the_run())["charts/SPS"]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_can_always_go_on():
    """kill -9; a checkpoint of 200 kB is written every 20 steps, so that some hit its writing."""
    rng, run_dir, steps = random.Random(0), None, 0
    for _ in range(10):
        resume = [f"--resume={run_dir}"] if run_dir else []
        config = f"*/config_{steps}.json" if run_dir else "*/checkpoint.pt"
        process = start("--checkpoint-every=20", "--total-timesteps=1000000", *resume)
        wait_until(lambda config=config: list(Path("runs").glob(config)))
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
def test_a_full_disk_leaves_the_last_checkpoint(moment, part, monkeypatch):
    before = (part / "checkpoint.pt").read_bytes()

    def fail(_, path):
        if moment == "writing":
            Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    owner, name = (torch, "save") if moment == "writing" else (Path, "replace")
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="No space left on device"):
        train(baseline, total_timesteps=120, save_model=True, resume=str(part))
    assert (part / "checkpoint.pt").read_bytes() == before


def test_an_infinite_loss_ends_the_run(scripted):
    """At the next row of metrics, also where actions stay finite."""
    env_id = scripted(lambda step, obs: (obs, 1e30))
    with pytest.raises(FloatingPointError, match="^step 200: losses/qf1_loss is inf$"):
        train(baseline, env_id=env_id, total_timesteps=1000)


def test_weights_that_are_not_finite_are_not_saved(scripted, monkeypatch):
    def spoil(agent):
        agent.qf[1][0].weight.data[3, 1] = math.nan

    monkeypatch.setattr(baseline.SAC, "update_target", spoil)
    flags = {"total_timesteps": 1000, "utd_ratio": 0.01, "checkpoint_every": 10}
    with pytest.raises(FloatingPointError, match="^step 200: qf.1.0.weight is not finite$"):
        train(baseline, env_id=scripted(), **flags)
    assert read_checkpoint(the_run())["global_step"] == 190


# Tracking


def test_tracking_gets_the_run_by_the_name_of_its_directory(monkeypatch, scripted):
    """Also where the environment's id names a module; a stand-in for wandb notes its call."""
    calls = []
    fake = SimpleNamespace(init=lambda **given: calls.append(given))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    scripted()
    flags = {"env_id": "json:Scripted-v0", "exp_name": "a b/c", "track": True}
    run_dir = train(baseline, **flags, total_timesteps=101, wandb_entity="team")
    assert re.fullmatch(r"runs/json_Scripted-v0__a_b_c__1__\d+", str(run_dir))
    expected = {"id": run_dir.name, "project": "leanRL", "entity": "team", "resume": "allow"}
    expected |= {"config": read_json(run_dir / "config.json"), "sync_tensorboard": True}
    assert calls == [expected]


@pytest.mark.slow
def test_tracking_without_a_network(tmp_path):
    """With the real package, in a process of its own."""
    pytest.importorskip("wandb", reason="needs requirements/wandb.txt")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    env = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run(tmp_path, "sac_continuous_action.py", *flags, "--total-timesteps=200", "--track", env=env)
    (run_dir,), (folder,) = Path("runs").iterdir(), tmp_path.glob("wandb/offline-run-*")
    assert folder.name.endswith(run_dir.name)
    stored = next(folder.glob("*.wandb")).read_bytes()
    for word in (b"charts/episodic_return", b"losses/qf1_loss", b"learning_starts"):
        assert word in stored, word
