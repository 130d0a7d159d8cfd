"""A run you can trust: what a resumed run takes up, what a crash leaves, how a run ends."""

import dataclasses
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT
from test_sac import BASELINE, CPU, SMALL, read_scalars, script
from test_sac_parity import backend, smooth  # noqa: F401
from torch.utils.tensorboard import SummaryWriter

from leanrl import sac_continuous_action as baseline
from leanrl import sac_continuous_action_torchcompile as variant
from leanrl import td3_continuous_action as td3_baseline
from leanrl import td3_continuous_action_torchcompile as td3_variant

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def same_handlers():
    """`main` changes what signals do; each test starts from the default."""
    numbers = signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def train(module, **flags) -> Path:
    return module.main(module.Args(**SMALL | flags))


def stopped(module, **flags) -> str:
    """The one line with which a run ends before its time; its exit status is 1."""
    with pytest.raises(SystemExit) as end:
        train(module, **flags)
    assert isinstance(end.value.code, str) and "\n" not in end.value.code
    return end.value.code


def read_checkpoint(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def assert_same(one, other, path="checkpoint", tolerance=0.0):
    """Equal through dicts, lists and tensors; the error names the place."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}", tolerance)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (x, y) in enumerate(zip(one, other, strict=True)):
            assert_same(x, y, f"{path}[{i}]", tolerance)
    elif isinstance(one, torch.Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype, path
        if not torch.equal(one, other):
            error = (one.double() - other.double()).abs().max().item()
            assert error <= tolerance, f"{path} differs by {error:.1e}"
    else:
        assert one == other, path


class Scripted(gym.Env):
    """Episodes of 50 steps; `on_step(step, obs)` makes observation and reward of every one.

    `on_reset(step, obs)` makes the first observation of an episode.
    """

    observation_space, action_space = gym.spaces.Box(-9, 9, (2,)), gym.spaces.Box(-1, 1, (1,))
    total = 0

    def __init__(self, on_step, on_reset=lambda step, obs: obs):
        self.on_step = on_step
        self.on_reset = on_reset

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.on_reset(self.total, self.np_random.normal(size=2).astype(np.float32)), {}

    def step(self, action):
        self.total += 1
        obs, reward = self.on_step(self.total, self.np_random.normal(size=2).astype(np.float32))
        return obs, reward, False, self.total % 50 == 0, {}


@pytest.fixture
def scripted():
    """A function from `on_step` (and `on_reset`) to the id of its environment."""

    def register(*functions) -> str:
        gym.register("Scripted-v0", lambda **_: Scripted(*functions), disable_env_checker=True)
        return "Scripted-v0"

    yield register
    gym.registry.pop("Scripted-v0", None)


# Resuming


@SCRIPTS
@pytest.mark.parametrize("ring", [5000, 200], ids=["growing", "wrapped"])
def test_a_resumed_run_goes_on_from_all_it_had(module, ring, capsys, monkeypatch):
    """A step without an update shows what was restored; then the run goes on and ends."""
    flags = {"num_envs": 2, "buffer_size": ring, "utd_ratio": 0.2, "save_model": True, "seed": 7}
    flags |= {"cuda": False}  # another device has a generator of its own
    run_dir = train(module, **flags, total_timesteps=251)  # 250 are whole steps of both
    files = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    before = read_checkpoint(run_dir)
    assert "fresh" not in capsys.readouterr().err

    assert train(module, **flags, total_timesteps=252, resume=str(run_dir)) == run_dir
    assert "resumed at step 250, with fresh episodes" in capsys.readouterr().err
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

    measured, measure = [], module.Stopwatch.measure
    spy = lambda watch, steps: measured.append(steps) or measure(watch, steps)  # noqa: E731
    monkeypatch.setattr(module.Stopwatch, "measure", spy)
    train(module, **flags, total_timesteps=500, resume=str(run_dir))
    assert max(measured) == 500 - 252  # its speed is that of its own steps
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

    flags |= {"num_envs": 3, "buffer_size": 100}  # a smaller ring keeps what fits, in whole steps
    train(module, **flags, total_timesteps=530, resume=str(run_dir))
    smaller = read_checkpoint(run_dir)["replay"]
    assert len(stored(smaller)) == 99 and smaller["position"] % 3 == 0


def stored(replay: dict) -> torch.Tensor:
    """The rows of either script's replay buffer."""
    data = replay["data"]
    if isinstance(data, torch.Tensor):
        return data
    return torch.cat([x.reshape(len(x), -1) for x in data.values()], dim=1)


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
    more = {"checkpoint_every": 70, "eval_every": 90, "stopwatch": "off", "eval_episodes": 2}
    busy = train(baseline, **flags, **more, exp_name="busy")
    one, other = map(read_checkpoint, (plain, busy))
    assert_same(one.pop("generators"), other.pop("generators"))
    for name, x in one["agent"].items():  # a product of matrices can end in other bits each time
        assert (x - other["agent"][name]).abs().mean() < 1e-4, name
    expected, found = map(read_scalars, (plain, busy))
    assert [step for step, _ in found.pop("charts/eval_return")] == [90, 180, 270, 300]
    assert expected.keys() == found.keys()
    stages = json.loads((busy / "stages.json").read_text())["stages"]
    assert stages.keys() == {"untracked", "evaluation"} and stages["evaluation"] > 0


def test_what_came_after_the_checkpoint_is_not_drawn_any_more(scripted):
    """An episode ends every 50 steps; the run is interrupted 60 steps after its checkpoint."""

    def on_step(step, obs):
        if step == 180:
            raise KeyboardInterrupt
        return obs, 1.0

    flags = {"env_id": scripted(on_step), "checkpoint_every": 120}
    assert stopped(baseline, **flags, total_timesteps=1000) == "interrupted after 179 steps"
    (run_dir,) = Path("runs").iterdir()
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
def test_what_cannot_be_resumed_is_said_in_one_line(module, monkeypatch):
    run_dir = train(module, total_timesteps=110, save_model=True)
    files = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    message = stopped(module, total_timesteps=110, resume=str(run_dir))
    assert message == "--total-timesteps: no iteration is left after 110 steps"
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == files

    path = run_dir / "checkpoint.pt"
    none = f"--resume: there is no {path} of this version"
    checkpoint, content = read_checkpoint(run_dir), path.read_bytes()
    of_before = {name: x for name, x in checkpoint.items() if name != "made_by"}
    of_before["script"] = Path(module.__file__).name  # as it was called in earlier versions
    of_other_flags = {"args": checkpoint["args"] | {"new": 1}}
    without_tau = {name: x for name, x in checkpoint["args"].items() if name != "tau"}
    changes = {
        "was made by another.py": {"made_by": "another.py"},
        "is of other flags: new": of_other_flags,
        "is of other flags: tau": {"args": without_tau},
    }
    expected = [
        (checkpoint | change, f"--resume: {path} {says}") for says, change in changes.items()
    ]
    damaged = of_before, content[:-100], content[100:], b"", b"text", None
    for change, message in (*expected, *((change, none) for change in damaged)):
        if isinstance(change, dict):
            torch.save(change, path)
        elif change is not None:
            path.write_bytes(change)
        else:  # as a run leaves it that was not asked for a checkpoint
            path.unlink()
        assert stopped(module, total_timesteps=200, resume=str(run_dir)) == message
        with pytest.raises(SystemExit, match=re.escape(message)):
            command_line(monkeypatch, module, "--resume", str(run_dir))
    assert len(list(run_dir.iterdir())) == len(files) - 1
    wider = {name: torch.zeros(1, 1) for name in checkpoint["agent"]}
    does_not_fit = "Error(s) in loading state_dict for SAC: size mismatch for log_alpha"
    for change, words in (({"agent": wider}, does_not_fit), ({"optimizers": None}, "'optimizers'")):
        torch.save({name: x for name, x in (checkpoint | change).items() if x}, path)
        message = stopped(module, total_timesteps=200, resume=str(run_dir))
        assert message.startswith(f"--resume: {words}"), message


HOLD_THE_LOCK = """
import os, sys
file = open(sys.argv[1], "w")
os.lockf(file.fileno(), os.F_LOCK, 0)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_that_is_at_work_is_left_alone():
    """Until the process that holds its lock has ended, however that ends."""
    run_dir = train(baseline, total_timesteps=110, save_model=True)
    names = {path.name for path in run_dir.iterdir()}
    command = [sys.executable, "-c", HOLD_THE_LOCK, run_dir / ".lock"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    message = stopped(baseline, total_timesteps=120, resume=str(run_dir))
    assert message == f"--resume: the run in {run_dir} is still at work"
    assert {path.name for path in run_dir.iterdir()} == names
    holder.kill()
    holder.communicate()
    assert train(baseline, total_timesteps=120, resume=str(run_dir)) == run_dir


def test_what_a_run_cannot_begin_with_takes_one_line(scripted, monkeypatch):
    """Before any directory is made; two runs that begin in the same second both have one."""
    message = stopped(baseline, total_timesteps=110, resume="")  # as of a shell's unset variable
    assert "is no checkpoint" in message
    with pytest.raises(SystemExit, match="is no checkpoint"):
        command_line(monkeypatch, baseline, "--resume", "")
    for steps in (99, 100):  # SMALL has 100 random ones
        message = stopped(baseline, total_timesteps=steps)
        assert message == "--total-timesteps: no iteration is left after 100 steps"
    message = stopped(baseline, buffer_size=10**15)  # more than addresses reach
    assert message.startswith("--buffer-size: ")
    for env_id in ("Pendulumm-v1", "Pendulum-v9", "no_such_module:X-v0", "X/Y-v0", "a b"):
        assert stopped(baseline, env_id=env_id).startswith("--env-id: ")
    scripted(lambda step, obs: (obs, 1.0))  # it draws nothing
    message = stopped(baseline, env_id="Scripted-v0", capture_video=True)
    assert message.startswith("--capture-video: ")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "moviepy", None)
        assert "moviepy" in stopped(baseline, env_id="Pendulum-v1", capture_video=True)
    assert not Path("runs").exists()
    Path("runs").write_text("")
    assert stopped(baseline) == "runs: [Errno 17] File exists: 'runs'"
    Path("runs").unlink()
    Path("runs").symlink_to("nowhere")
    assert stopped(baseline).startswith("runs: ")
    Path("runs").unlink()
    assert "File name too long" in stopped(baseline, exp_name="x" * 300)

    monkeypatch.setattr(sys, "stderr", None)  # as when it is closed
    monkeypatch.setattr(time, "time", lambda: 1e9)
    runs = [train(baseline, total_timesteps=110, save_model=True) for _ in range(2)]
    assert [path.name[-10:] for path in runs] == ["1000000000", "1000000001"]
    message = stopped(baseline, env_id="Scripted-v0", resume=str(runs[0]), total_timesteps=200)
    assert message == "--env-id: the checkpoint is of Pendulum-v1"


def test_what_a_copy_adds_and_anneals(monkeypatch):
    """Its flags may be zero or less, its environment need not render; flags are saved as given."""

    @dataclasses.dataclass
    class Args(baseline.Args):
        shift: float = -1.0
        last_alpha: float = 0.0

    def make_env():  # takes no render_mode
        return Scripted(lambda step, obs: (obs, 1.0))

    gym.register("Plain-v0", make_env, disable_env_checker=True)
    monkeypatch.setattr(sys, "argv", ["copy.py", "--env-id", "Plain-v0"])
    args = baseline.parse_args(Args)
    assert (args.shift, args.last_alpha) == (-1.0, 0.0)
    baseline.check_env(args)
    gym.registry.pop("Plain-v0")
    run = baseline.Run(args, CPU, 1, 0)
    run.dir = Path()
    args.alpha = 0.1  # as a loop that anneals it
    agent = torch.nn.Linear(1, 1)
    agent.optimizers = []
    run.save(agent)
    assert read_checkpoint(run.dir)["args"]["alpha"] == baseline.Args.alpha


# How a run ends


PATIENCE = 300  # seconds that only a test which fails takes, however busy the machine


def wait_for(condition, process) -> None:
    """Until `condition`, while the process runs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.is_alive(), "the run ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def train_until_killed(args, in_writing: bool) -> None:
    """A run that, if told so, is killed in the middle of its second checkpoint."""
    fsync, written = os.fsync, []

    def killed(number):
        written.append(number)
        if in_writing and len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(number)

    os.fsync = killed
    baseline.main(args)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_can_always_go_on(monkeypatch):
    """kill -9, every other time while a checkpoint is being written."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    context = multiprocessing.get_context("forkserver")  # imports once, then forks
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    rng, run_dir, flags = random.Random(0), None, SMALL | {"checkpoint_every": 50}

    def start(total_timesteps, in_writing=False):
        args = baseline.Args(**flags, total_timesteps=total_timesteps, resume=run_dir)
        process = context.Process(target=train_until_killed, args=(args, in_writing))
        process.start()
        return process

    for kill in range(20):
        process = start(10**9, in_writing=kill % 2 == 1)
        if run_dir is None:
            wait_for(lambda: list(Path("runs").glob("*/checkpoint.pt")), process)
            (run_dir,) = map(str, Path("runs").iterdir())
        elif kill % 2 == 0:
            step = read_checkpoint(Path(run_dir))["global_step"]
            wait_for(Path(run_dir, f"config_{step}.json").exists, process)
        if kill % 2 == 0:
            time.sleep(rng.uniform(0, 0.5))
            process.kill()
        process.join(PATIENCE)
        assert process.exitcode is not None
        partial = Path(run_dir, "checkpoint.partial")
        assert partial.exists() or kill % 2 == 0, "not killed in the middle of writing"
        assert read_checkpoint(Path(run_dir))["global_step"] % 50 == 0
    step = read_checkpoint(Path(run_dir))["global_step"]
    process = start(step + 120)
    process.join(PATIENCE)
    assert process.exitcode == 0 and not partial.exists()
    assert read_checkpoint(Path(run_dir))["global_step"] == step + 120


@pytest.mark.parametrize("moment", ["writing", "fsync", "replace"])
def test_a_full_disk_leaves_the_last_checkpoint_and_one_line(moment, monkeypatch):
    """At each step of the write, so that no step relies on the one after it; it is no success."""
    part = train(baseline, total_timesteps=110, save_model=True)
    before = (part / "checkpoint.pt").read_bytes()

    def crash(*_):
        monkeypatch.undo()  # the records that follow are written
        monkeypatch.chdir(part.parents[1])
        raise OSError(28, "No space left on device")

    part = part.absolute()
    target = {"writing": (torch, "save"), "fsync": (os, "fsync"), "replace": (Path, "replace")}
    monkeypatch.setattr(*target[moment], crash)
    message = stopped(baseline, total_timesteps=120, save_model=True, resume=str(part))
    target = "config_110.json" if moment in ("fsync", "replace") else "checkpoint.pt"
    assert message == f"{part / target}: [Errno 28] No space left on device"
    assert (part / "checkpoint.pt").read_bytes() == before
    assert not list(part.glob("*.partial"))
    assert (part / "stages_110.json").exists() == (moment == "writing")


FAULTS = {  # what an environment's step makes of its observation and reward, and the run's end
    "nan reward": (lambda obs: (obs, math.nan), "220: action, obs or reward is not finite"),
    "infinite reward": (lambda obs: (obs, -math.inf), "220: action, obs or reward is not finite"),
    "nan observation": (
        lambda obs: (obs * math.nan, 1.0),
        "220: action, obs or reward is not finite",
    ),
    "infinite observation": (lambda obs: (obs + math.inf, 1.0), "220: action, obs or"),
    "beyond float32": (lambda obs: (obs, 1e300), "220: action, obs or reward is not finite"),
    "infinite gradients": (
        lambda obs: (obs, 2.9e38),
        "2[234].: action, obs or reward is not finite",
    ),
}


@pytest.mark.parametrize(
    ("module", "fault"),
    [*((baseline, fault) for fault in FAULTS), (variant, "infinite gradients")],
    ids=lambda value: value if isinstance(value, str) else value.__name__.removeprefix("leanrl."),
)
def test_what_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(module, fault, scripted):
    change, words = FAULTS[fault]
    env_id = scripted(lambda step, obs: change(obs) if step > 220 else (obs, 1.0))
    message = stopped(module, env_id=env_id, total_timesteps=1000, checkpoint_every=50)
    assert re.match(f"step {words}", message), message
    (run_dir,) = Path("runs").iterdir()
    checkpoint = read_checkpoint(run_dir)
    assert checkpoint["global_step"] == 200
    assert all(tensor.isfinite().all() for tensor in checkpoint["agent"].values())
    assert json.loads((run_dir / "stages.json").read_text())["stages"]["simulation"] > 0


def test_losses_and_weights_that_are_not_finite_end_the_run(scripted, monkeypatch):
    """Also where actions stay finite: at the next row of metrics, or when they would be saved."""
    rewards = [1e30]
    env_id = scripted(lambda step, obs: (obs, rewards[-1]))
    message = stopped(baseline, env_id=env_id, total_timesteps=1000)
    assert message == "step 200: losses/qf1_loss is not finite: inf"
    rewards.append(1.0)

    def spoil(agent):
        agent.qf[1][0].weight.data[3, 1] = math.nan

    monkeypatch.setattr(baseline.SAC, "update_target", spoil)
    flags = {"total_timesteps": 1000, "utd_ratio": 0.01, "checkpoint_every": 10}
    message = stopped(baseline, env_id=env_id, **flags, exp_name="weights")
    assert message == "step 200: weights are not finite; the checkpoint stays"
    (run_dir,) = Path("runs").glob("*weights*")
    assert read_checkpoint(run_dir)["global_step"] == 190


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_run_in_one_line_but_those_that_are_ignored(number, scripted):
    """As under nohup, which ignores SIGHUP for the program that it starts."""

    def on_step(step, obs):
        if step == 130:
            os.kill(os.getpid(), number)
        return obs, 1.0

    flags = {"env_id": scripted(on_step), "total_timesteps": 200, "save_model": True}
    assert stopped(baseline, **flags) == "interrupted after 129 steps"
    (run_dir,) = Path("runs").iterdir()
    assert json.loads((run_dir / "stages.json").read_text())["sps"] > 0
    assert read_scalars(run_dir)["charts/SPS"][-1][0] == 100
    before = signal.signal(number, signal.SIG_IGN)
    try:
        run_dir = train(baseline, **flags, exp_name="ignored")
    finally:
        signal.signal(number, before)
    assert read_checkpoint(run_dir)["global_step"] == 200


def test_an_environment_that_ends_the_program_is_no_success(scripted):
    def on_step(step, obs):
        if step == 130:
            sys.exit(0)
        return obs, 1.0

    message = stopped(baseline, env_id=scripted(on_step), total_timesteps=200)
    assert message == "interrupted after 129 steps"


@pytest.mark.parametrize("module", [baseline, variant, td3_baseline, td3_variant])
def test_a_first_observation_that_is_not_finite_is_not_stored(module, scripted):
    """The episodes end after 50 steps: the third begins with it, during random exploration."""

    def on_reset(step, obs):
        return obs * math.nan if step == 100 else obs

    env_id = scripted(lambda step, obs: (obs, 1.0), on_reset)
    flags = {"env_id": env_id, "total_timesteps": 300, "learning_starts": 200}
    message = stopped(module, **flags, checkpoint_every=50)
    assert message == "step 100: action, obs or reward is not finite"
    (run_dir,) = Path("runs").iterdir()
    assert stored(read_checkpoint(run_dir)["replay"]).isfinite().all()


def test_records_are_written_though_nobody_reads_or_ctrl_c_comes_twice(scripted, monkeypatch):
    """As when it goes to `tee` as well, which ends first; the second one comes among the records.

    `head` ends on its own: then the next refresh of the bar ends the run, as it ends any program.
    """
    reader, writer = os.pipe()

    def on_step(step, obs):
        if step == 130:
            os.close(reader)
            os.kill(os.getpid(), signal.SIGINT)
        return obs, 1.0

    def close(self, own=SummaryWriter.close):
        os.kill(os.getpid(), signal.SIGINT)
        own(self)

    with monkeypatch.context() as patch, pytest.raises(BaseException) as end:
        patch.setattr(SummaryWriter, "close", close)
        patch.setattr(sys, "stderr", os.fdopen(writer, "w", buffering=1))
        train(baseline, env_id=scripted(on_step), total_timesteps=200)
    assert end.type in (SystemExit, BrokenPipeError)
    (run_dir,) = Path("runs").iterdir()
    assert json.loads((run_dir / "stages.json").read_text())["sps"] > 0
    assert read_scalars(run_dir)["charts/SPS"][-1][0] == 100
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_ctrl_c_while_a_row_is_written_counts_afterwards(monkeypatch):
    """In the middle it would leave a lock of TensorBoard's queue locked, and the end would hang."""
    tags = []

    def add_scalar(self, tag, value, step, own=SummaryWriter.add_scalar):
        if step == 200 and tag.startswith("losses"):
            os.kill(os.getpid(), signal.SIGINT)
        tags.append(tag)
        own(self, tag, value, step)

    monkeypatch.setattr(SummaryWriter, "add_scalar", add_scalar)
    assert stopped(baseline, total_timesteps=300) == "interrupted after 200 steps"
    assert tags[-1].startswith("charts/SPS") and signal.getsignal(signal.SIGINT) == (
        signal.default_int_handler
    )


def test_ctrl_c_before_the_run_begins_leaves_no_traceback(tmp_path):
    """While libraries are loading, of which the first one here never ends."""
    endless = "import pathlib, time\npathlib.Path('loading').touch()\ntime.sleep(600)\n"
    (tmp_path / "gymnasium.py").write_text(endless)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(script(BASELINE), stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + PATIENCE
    while not Path("loading").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == -signal.SIGINT and err == ""


@pytest.mark.slow
def test_a_hang_up_ends_a_process(tmp_path):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = script(BASELINE, *flags, "--checkpoint-every=200")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    while not list(Path("runs").glob("*/checkpoint.pt")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGHUP)
    err = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1 and "Traceback" not in err, err
    assert re.search("^interrupted after [0-9,]+ steps$", err, re.MULTILINE), err
    assert "us/step" in err and "steps/s, runs/Pendulum-v1__sac" in err
    assert len(list(Path("runs").glob("*/stages.json"))) == 1


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
    with pytest.raises(SystemExit, match="^--track: import of wandb halted"):
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
    command = script(BASELINE, *flags, "--total-timesteps=200", "--track")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run_dir,), (folder,) = Path("runs").iterdir(), tmp_path.glob("wandb/offline-run-*")
    assert folder.name.endswith(run_dir.name)
    stored = next(folder.glob("*.wandb")).read_bytes()
    for word in (b"charts/episodic_return", b"losses/qf1_loss", b"learning_starts"):
        assert word in stored, word
