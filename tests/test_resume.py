"""A run you can trust: what a checkpoint holds, what a resumed run repeats, what a crash leaves."""

import dataclasses
import http.server
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_sac import read_scalars, run

from leanrl import sac_continuous_action as baseline
from leanrl import sac_continuous_action_torchcompile as variant

SCRIPTS = pytest.mark.parametrize("module", [baseline, variant], ids=["baseline", "variant"])
SMALL = {"env_id": "Pendulum-v1", "batch_size": 32, "learning_starts": 100, "buffer_size": 5000}
CLOCK = {"charts/SPS", "charts/SPS_steady", "charts/warmup_seconds"}  # differ from run to run


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def same_precision():
    """The variant's main changes torch's setting; each test starts from the default."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def train(module, **flags) -> Path:
    if "resume" in flags:
        time.sleep(1)  # readers order event files by name, and the name has the second
    return module.main(module.Args(**SMALL | flags))


def read_checkpoint(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, without what tells time."""
    return {tag: rows for tag, rows in read_scalars(run_dir).items() if tag not in CLOCK}


def assert_same(one, other, path="checkpoint", tolerance=0.0):
    """Equal through dicts, lists and tensors; the error names the place."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one.keys() - {"args"}:
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


# Resuming


@SCRIPTS
@pytest.mark.parametrize(
    ("stop", "flags"),
    [
        (250, {}),  # in the middle of an episode of 200 steps
        (400, {}),  # between two episodes
        (60, {}),  # still exploring at random
        (153, {"num_envs": 3, "policy_frequency": 3}),  # within everything that has a period
        (450, {"buffer_size": 200}),  # the ring has wrapped around
        (250, {"env_id": "HalfCheetah-v5"}),
    ],
    ids=["in-episode", "between", "random", "vector", "wrapped", "mujoco"],
)
def test_a_resumed_run_is_the_uninterrupted_run(module, stop, flags):
    """Bitwise, on the CPU: rows of metrics, parameters, optimizers, replay buffer, generators."""
    flags = {"total_timesteps": 600, "utd_ratio": 0.3, "save_model": True} | flags
    whole = train(module, **flags, exp_name="whole")
    part = train(module, **flags | {"total_timesteps": stop}, exp_name="part")
    assert read_checkpoint(part)["global_step"] == stop
    config = (part / "config.json").read_text()
    again = train(module, **flags, resume=str(part))
    assert again.samefile(part) and (part / "config.json").read_text() == config
    assert_same(read_checkpoint(whole), read_checkpoint(part))
    assert scalars(whole) == scalars(part)
    stages = json.loads((part / f"stages_{stop}.json").read_text())
    assert json.loads((part / f"config_{stop}.json").read_text())["args"]["resume"] == str(part)
    assert stages["sps_inclusive"] * stages["wall_seconds"] == pytest.approx(600 - stop, rel=0.01)


def test_the_comparison_notices_a_difference():
    """A run that forgets its random generators on the way is another run."""
    flags = {"total_timesteps": 300, "utd_ratio": 0.3, "save_model": True}
    whole = train(baseline, **flags, exp_name="whole")
    part = train(baseline, **flags | {"total_timesteps": 150}, exp_name="part")
    checkpoint = read_checkpoint(part)
    torch.manual_seed(5)
    checkpoint["rng"]["torch"] = torch.get_rng_state()
    torch.save(checkpoint, part / "checkpoint.pt")
    train(baseline, **flags, resume=str(part))
    with pytest.raises(AssertionError):
        assert_same(read_checkpoint(whole), read_checkpoint(part))
    assert scalars(whole) != scalars(part)


def test_checkpoints_and_evaluations_leave_no_trace_in_training():
    flags = {"total_timesteps": 500, "utd_ratio": 0.3, "save_model": True}
    plain = train(baseline, **flags, exp_name="plain")
    busy = train(baseline, **flags, exp_name="busy", checkpoint_every=70, eval_every=90)
    assert_same(read_checkpoint(plain), read_checkpoint(busy))
    expected, found = scalars(plain), scalars(busy)
    assert [step for step, _ in found.pop("charts/eval_return")] == [90, 180, 270, 360, 450, 500]
    assert expected == found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_compiled_run_resumes_like_an_eager_one(compiled):
    """From one checkpoint, eager on one side: only rounding may differ, and it must not grow."""
    start = train(variant, total_timesteps=140, save_model=True)
    shutil.copytree(start, "eager")
    shutil.copytree(start, "other")
    flags = {"total_timesteps": 170, "save_model": True}
    train(variant, **flags, resume="eager")
    torch._dynamo.reset()
    train(variant, **flags, resume="other", compile=compiled)
    one, other = (read_checkpoint(Path(name)) for name in ("eager", "other"))
    assert_same(one, other, tolerance=1e-4 if compiled else 0.0)
    before = read_checkpoint(start)["agent"]["actor"]["fc1.weight"]
    assert (one["agent"]["actor"]["fc1.weight"] - before).abs().max() > 1e-3, "nothing was learned"


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["graphs", "compiled-graphs"])
def test_a_graphed_run_resumes_like_an_eager_one(compiled):
    start = train(variant, total_timesteps=140, save_model=True)
    shutil.copytree(start, "eager")
    shutil.copytree(start, "other")
    flags = {"total_timesteps": 170, "save_model": True}
    train(variant, **flags, resume="eager")
    train(variant, **flags, resume="other", cudagraphs=True, compile=compiled)
    one, other = (read_checkpoint(Path(name))["agent"] for name in ("eager", "other"))
    assert_same(one, other, tolerance=1e-3)


class Forgetful(gym.Env):
    """Counts over all episodes, so no episode can be repeated in another process."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Box(-1, 1, (1,))
    total = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.full(1, -1, np.float32), {}

    def step(self, action):
        self.steps, Forgetful.total = self.steps + 1, Forgetful.total + 1
        return np.full(1, Forgetful.total, np.float32), 1.0, False, self.steps == 50, {}


@SCRIPTS
def test_an_episode_that_cannot_be_repeated_starts_afresh_and_says_so(module, capsys):
    gym.register("Forgetful-v0", entry_point=lambda: Forgetful())
    flags = {"env_id": "Forgetful-v0", "num_envs": 2, "utd_ratio": 0.1, "save_model": True}
    try:
        part = train(module, **flags, total_timesteps=140)
        assert "fresh" not in capsys.readouterr().err
        train(module, **flags, total_timesteps=300, resume=str(part))
    finally:
        gym.registry.pop("Forgetful-v0")
    warnings = [line for line in capsys.readouterr().err.splitlines() if "fresh episode" in line]
    assert len(warnings) == 1 and "2 of 2 environments" in warnings[0]
    # both environments were in step 20 of an episode; two whole ones follow within 160 / 2 steps
    steps = [step for step, _ in scalars(part)["charts/episodic_length"]]
    assert steps == [100, 100, 240, 240]


def command_line(module, *flags, **kwargs):
    """Runs a script; its own lines (no progress bar) of standard error."""
    done = run(Path.cwd(), Path(module.__file__).name, *flags, check=False, **kwargs)
    lines = done.stderr.replace("\r", "\n").splitlines()
    return done, [line for line in lines if re.match("error|warning|Traceback|check|eval", line)]


def test_flags_that_are_not_given_stay_as_they_were():
    part = train(baseline, total_timesteps=200, save_model=True, seed=7, gamma=0.9)
    done, lines = command_line(
        baseline, "--resume", str(part / "checkpoint.pt"), "--total-timesteps", "300", "--tau", "1"
    )
    assert done.returncode == 0 and len(lines) == 1 and "checkpoint at step 300" in lines[0], lines
    args = json.loads((part / "config_200.json").read_text())["args"]
    expected = dataclasses.asdict(baseline.Args(**SMALL)) | {"seed": 7, "gamma": 0.9, "tau": 1.0}
    expected |= {"total_timesteps": 300, "save_model": True, "resume": str(part / "checkpoint.pt")}
    assert args == expected


def test_a_new_learning_rate_counts_from_the_checkpoint_on():
    for module in (baseline, variant):
        part = train(module, total_timesteps=120, save_model=True)
        before = read_checkpoint(part)["agent"]["actor"]
        train(module, total_timesteps=130, save_model=True, policy_lr=0.0, resume=str(part))
        assert_same(before, read_checkpoint(part)["agent"]["actor"])


def test_resuming_a_finished_run_changes_nothing():
    part = train(baseline, total_timesteps=150, save_model=True)
    files = {path.name: path.read_bytes() for path in part.iterdir()}
    train(baseline, total_timesteps=150, save_model=True, resume=str(part))
    assert all((part / name).read_bytes() == content for name, content in files.items())


# What cannot be resumed


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of the baseline with its checkpoint."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("finished"))
    run_dir = train(baseline, total_timesteps=150, save_model=True).resolve()
    os.chdir(before)
    return run_dir


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: b"not a checkpoint",
        lambda content: random.Random(0).randbytes(10_000),
        lambda content: b"PK\x03\x04" + random.Random(0).randbytes(10_000),
        flip_a_bit,
    ],
    ids=["half", "a byte short", "empty", "text", "noise", "zip-like noise", "flipped bit"],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(damage, finished, tmp_path, capsys):
    shutil.copytree(finished, "run")
    path = tmp_path / "run/checkpoint.pt"
    path.write_bytes(damage(path.read_bytes()))
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(SystemExit) as stopped:
        train(baseline, total_timesteps=200, resume="run")
    assert stopped.value.code == 2
    assert (
        capsys.readouterr().err == "error: run/checkpoint.pt is damaged or was never a checkpoint\n"
    )
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def pickled_code(path):
    """A pickle that would run code when it is read without weights_only."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, ("trapped",)

    torch.save({"script": "sac_continuous_action.py", "trap": Trap()}, path)


@pytest.mark.parametrize(
    ("write", "flags", "words"),
    [
        (None, {"env_id": "MountainCarContinuous-v0"}, ["Pendulum-v1", "MountainCarContinuous-v0"]),
        (None, {"num_envs": 2}, ["num_envs 1", "2"]),
        (None, {"buffer_size": 400}, ["buffer_size 5000", "400"]),
        (lambda path: torch.save({"weights": torch.ones(3)}, path), {}, ["something else"]),
        (lambda path: torch.save([1, 2], path), {}, ["damaged or was never a checkpoint"]),
        (pickled_code, {}, ["damaged or was never a checkpoint"]),
        (Path.unlink, {}, ["cannot read", "No such file"]),
    ],
    ids=["environment", "num-envs", "buffer", "state dict", "list", "code", "missing"],
)
def test_a_foreign_checkpoint_is_refused_by_both_names(write, flags, words, finished, capsys):
    shutil.copytree(finished, "run")
    if write:
        write(Path("run/checkpoint.pt"))
    with pytest.raises(SystemExit) as stopped:
        train(baseline, total_timesteps=200, resume="run", **flags)
    error = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("warning")]
    assert stopped.value.code == 2 and len(error) == 1
    assert error[0].startswith("error: ") and all(word in error[0] for word in words), error
    assert not Path("trapped").exists()


def test_a_checkpoint_of_the_other_script_is_refused(finished):
    done, lines = command_line(variant, "--resume", str(finished))
    assert done.returncode == 2 and len(lines) == 1
    assert "sac_continuous_action.py" in lines[0] and Path(variant.__file__).name in lines[0]


def test_networks_of_another_shape_are_refused(finished, capsys):
    shutil.copytree(finished, "run")
    checkpoint = torch.load("run/checkpoint.pt", weights_only=True)
    checkpoint["agent"]["actor"]["fc1.weight"] = torch.ones(128, 3)
    torch.save(checkpoint, "run/checkpoint.pt")
    with pytest.raises(SystemExit):
        train(baseline, total_timesteps=200, resume="run")
    error = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
    assert len(error) == 1 and "[128, 3]" in error[0] and "[256, 3]" in error[0]


# Crashes and disks


def wait_for(condition, process, seconds=120):
    """Until `condition`, without a pause: what it waits for may last milliseconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("kills", "total_timesteps"),
    [(4, 1500), pytest.param(20, 8000, marks=pytest.mark.slow)],
    ids=["short", "full"],
)
def test_a_run_killed_at_random_moments_reaches_the_same_end(kills, total_timesteps):
    """kill -9, every other time while a checkpoint is being written: nothing is lost or doubled."""
    flags = {"total_timesteps": total_timesteps, "utd_ratio": 0.5, "checkpoint_every": 50}
    whole = train(baseline, **flags, exp_name="whole")
    flags |= SMALL
    command = [sys.executable, baseline.__file__, "--exp-name", "killed"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    rng, in_writing, run_dir = random.Random(0), 0, None
    for kill in range(kills):
        process = subprocess.Popen(
            [*command, f"--resume={run_dir}"] if run_dir else command, **quiet
        )
        if run_dir is None:
            wait_for(lambda: list(Path("runs").glob("*__killed__*/checkpoint.pt")), process)
            (run_dir,) = Path("runs").glob("*__killed__*")
        else:
            step = read_checkpoint(run_dir)["global_step"]
            wait_for((run_dir / f"config_{step}.json").exists, process)
        time.sleep(rng.uniform(0, 1.5))
        if kill % 2:
            wait_for((run_dir / "checkpoint.partial").exists, process)
        assert process.poll() is None, "the run ended before it was killed"
        process.kill()
        process.wait()
        in_writing += (run_dir / "checkpoint.partial").exists()
        assert read_checkpoint(run_dir)["global_step"] % 50 == 0
    assert in_writing, "no kill hit a checkpoint that was being written"
    subprocess.run([*command, f"--resume={run_dir}"], check=True, **quiet)
    assert_same(read_checkpoint(whole), read_checkpoint(run_dir))
    assert scalars(whole) == scalars(run_dir)
    assert not (run_dir / "checkpoint.partial").exists()


@pytest.mark.parametrize("moment", ["writing", "fsync", "replace"])
def test_a_crash_inside_a_write_leaves_the_last_checkpoint(moment, monkeypatch):
    """At each step of the write, so that no step relies on the one after it."""
    part = train(baseline, total_timesteps=120, save_model=True)
    before = (part / "checkpoint.pt").read_bytes()

    def crash(*_):
        raise SystemError("power cut")

    target = {"writing": (torch, "save"), "fsync": (os, "fsync"), "replace": (Path, "replace")}
    with monkeypatch.context() as patch, pytest.raises(SystemError):
        patch.setattr(*target[moment], crash)
        train(baseline, total_timesteps=150, save_model=True, resume=str(part))
    assert (part / "checkpoint.pt").read_bytes() == before
    assert not (part / "checkpoint.partial").exists()


def quota(size):
    """In the child process: no file may become larger than `size` bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


SHORT = ("--env-id=Pendulum-v1", "--batch-size=32", "--learning-starts=100", "--utd-ratio=0.1")


@SCRIPTS
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(module):
    """The networks fit into the quota only while the replay buffer is small."""
    part = train(module, total_timesteps=200, save_model=True, utd_ratio=0.1, buffer_size=100_000)
    size = (part / "checkpoint.pt").stat().st_size
    flags = ["--resume", str(part), "--total-timesteps=2000", "--checkpoint-every=500"]
    done, lines = command_line(module, *flags, preexec_fn=quota(size + 15_000))
    assert done.returncode == 0 and "run directory" in done.stdout
    assert lines[0].startswith("checkpoint at step 500") and len(lines) == 4
    assert all(line.startswith("warning: no checkpoint at step") for line in lines[1:])
    assert all("File too large" in line for line in lines[1:])
    assert read_checkpoint(part)["global_step"] == 500
    assert not (part / "checkpoint.partial").exists()
    assert scalars(part)["losses/alpha"][-1][0] == 2000


def test_a_disk_that_takes_no_metrics_ends_the_run_in_one_line():
    part = train(baseline, total_timesteps=120, save_model=True, utd_ratio=0.1)
    before = (part / "checkpoint.pt").read_bytes()
    done, lines = command_line(
        baseline, "--resume", str(part), "--total-timesteps=100000", preexec_fn=quota(10_000)
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert lines == ["error: the run stops: [Errno 27] File too large"]
    assert (part / "checkpoint.pt").read_bytes() == before


def test_a_read_only_place_is_refused_in_one_line(tmp_path):
    """Root may write everywhere, so that the test gives up root's powers where it has them."""
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    if powerless and shutil.which("setpriv") is None:
        pytest.skip("runs as root, without setpriv to change that")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o555)
    done = subprocess.run(
        [*powerless, sys.executable, baseline.__file__, *SHORT, "--total-timesteps=200"],
        capture_output=True,
        text=True,
    )
    (tmp_path / "runs").chmod(0o755)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error"))
    assert "Permission denied: 'runs/Pendulum-v1__" in line


# Evaluating, watching, tracking


@SCRIPTS
def test_evaluation_is_the_mean_action_in_fixed_episodes(module):
    """Against a loop over single environments without any of the script's machinery."""
    args = module.Args(**SMALL, eval_episodes=3, seed=4)
    torch.manual_seed(0)
    actor = module.Actor(3, gym.spaces.Box(-2, 2, (1,), np.float32))
    returns = []
    for episode in range(3):
        env = gym.make("Pendulum-v1")
        obs, _ = env.reset(seed=4 + module.EVAL_SEED + episode)
        total, truncated = 0.0, False
        while not truncated:
            mean, _ = actor(torch.tensor(obs)[None])
            obs, reward, _, truncated, _ = env.step(2 * mean[0].tanh().detach().numpy())
            total += reward
        returns.append(total)
    for _ in range(2):  # the same again: evaluations can be compared
        found = module.evaluate(actor, args, torch.device("cpu"), None)
        assert found == pytest.approx(np.mean(returns), rel=1e-4)


class Long(gym.Env):
    """Episodes of 5, 9, 13, ... steps with a reward of 1 per step, by the seed."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5 + 4 * (seed % 10) if seed is not None else 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


def test_every_episode_of_an_evaluation_counts_once():
    """Short episodes must not be favoured: the first of each environment, however long."""
    gym.register("Long-v0", entry_point=lambda: Long())
    try:
        args = baseline.Args(env_id="Long-v0", eval_episodes=4, seed=0)
        actor = baseline.Actor(1, gym.spaces.Box(-1, 1, (1,), np.float32))
        found = baseline.evaluate(actor, args, torch.device("cpu"), None)
    finally:
        gym.registry.pop("Long-v0")
    assert found == np.mean([5, 9, 13, 17])


@SCRIPTS
def test_evaluation_has_a_stage_outside_of_the_steady_window(module, monkeypatch):
    """An evaluation of two seconds leaves steps/s alone."""
    evaluate = module.evaluate

    def slow(*args):
        time.sleep(2)
        return evaluate(*args)

    monkeypatch.setattr(module, "evaluate", slow)
    run_dir = train(module, total_timesteps=500, utd_ratio=1.0, eval_every=300, eval_episodes=2)
    stages = json.loads((run_dir / "stages.json").read_text())
    assert stages["stages"]["evaluation"]["count"] == 2
    assert stages["stages"]["evaluation"]["seconds"] > 4
    inside = [stage["seconds"] for name, stage in stages["stages"].items() if name != "evaluation"]
    assert sum(inside) == pytest.approx(stages["window"]["seconds"], rel=0.01)
    assert stages["wall_seconds"] > stages["window"]["seconds"] + 4
    steps = stages["window"]["env_steps"]
    assert stages["sps_steady"] == pytest.approx(steps / stages["window"]["seconds"], rel=0.01)


class Drawn(Long):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return np.full((64, 64, 3), self.left, np.uint8)


@pytest.fixture
def drawn():
    gym.register("Drawn-v0", entry_point=lambda render_mode=None: Drawn(render_mode))
    yield "Drawn-v0"
    gym.registry.pop("Drawn-v0")


@pytest.mark.parametrize("every", [0, 60], ids=["at the end", "each evaluation"])
def test_video_of_the_first_episode(every, drawn, capsys):
    pytest.importorskip("moviepy", reason="needs requirements/video.txt")
    from moviepy import VideoFileClip

    flags = {"total_timesteps": 120, "capture_video": True, "eval_every": every}
    run_dir = train(baseline, **flags, env_id=drawn, utd_ratio=0.1, seed=8)
    names = sorted(path.name for path in (run_dir / "videos").iterdir())
    assert names == [f"step-{s}-episode-0.mp4" for s in ([120, 60] if every else [120])]
    with VideoFileClip(str(run_dir / "videos" / names[0])) as clip:
        assert clip.size == [64, 64] and clip.fps == 10
        assert clip.duration == pytest.approx((5 + 4 * 8 + 1) / 10, abs=0.15)  # the whole episode
    assert "warning" not in capsys.readouterr().err


def test_a_machine_that_cannot_render_trains_without_video(drawn, capsys, monkeypatch):
    pytest.importorskip("moviepy", reason="needs requirements/video.txt")

    def no_display(self):
        raise RuntimeError("no display\nof any kind")

    monkeypatch.setattr(Drawn, "render", no_display)
    run_dir = train(baseline, env_id=drawn, total_timesteps=120, utd_ratio=0.1, capture_video=True)
    warnings = [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning")]
    assert warnings == [
        "warning: no video, Drawn-v0 cannot be rendered here: no display of any kind"
    ]
    assert "charts/eval_return" in scalars(run_dir) and not (run_dir / "videos").exists()


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_tracking_without_a_network(mode, tmp_path):
    pytest.importorskip("wandb", reason="needs requirements/wandb.txt")
    env = os.environ | {"WANDB_MODE": mode, "WANDB_SILENT": "true"}
    command = [baseline.__file__, *SHORT, "--total-timesteps=300", "--track", "--save-model"]
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    (run_dir,) = Path("runs").iterdir()
    assert (run_dir / "checkpoint.pt").exists()
    folders = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(folders) == (mode == "offline")
    for folder in folders:
        assert folder.name.endswith(run_dir.name)
        code = folder / "files" / Path(baseline.__file__).name
        assert code.read_text() == Path(baseline.__file__).read_text()
        (log,) = folder.glob("*.wandb")
        stored = log.read_bytes()
        for word in (b"charts/episodic_return", b"losses/qf1_loss", b"learning_starts"):
            assert word in stored, word


class WandbServer(http.server.BaseHTTPRequestHandler):
    """As much of wandb's service as a run needs to start; counts the metrics that reach it."""

    protocol_version, received = "HTTP/1.1", b""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = {}
        if self.path == "/graphql":
            variables = json.loads(body).get("variables") or {}
            user = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": None}
            files = [{"name": f, "uploadUrl": None} for f in variables.get("files") or []]
            project = {"id": "1", "name": "leanRL", "entity": {"id": "1", "name": "me"}}
            bucket = {"id": "1", "name": variables.get("name"), "project": project}
            bucket |= {"displayName": "run", "config": "{}", "historyLineCount": 0}
            answer = {"viewer": user, "model": None, "serverInfo": None, "entity": None}
            answer |= {"upsertBucket": {"bucket": bucket, "inserted": True}}
            answer |= {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
            answer = {"data": answer}
        elif self.path.endswith("file_stream"):
            WandbServer.received += body
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_a_network_that_fails_in_the_middle_does_not_stop_the_run():
    pytest.importorskip("wandb", reason="needs requirements/wandb.txt")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0" * 40}
    env |= {"WANDB_MODE": "online", "WANDB_FINISH_TIMEOUT": "2", "WANDB_INIT_TIMEOUT": "20"}
    command = [sys.executable, baseline.__file__, *SHORT, "--total-timesteps=6000", "--track"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: WandbServer.received, process)
    server.shutdown()
    server.server_close()
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err.decode()
    assert b"run directory" in out and b"Traceback" not in err
    (run_dir,) = Path("runs").iterdir()
    assert scalars(run_dir)["losses/alpha"][-1][0] == 6000
