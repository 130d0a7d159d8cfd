"""A whole run of every script that is one process (and of one that is three).

What a script trains on, and how, is seen in test_off_policy, test_on_policy and test_mujoco_runs;
here, that `main` takes its flags, enters its stages, writes its records, goes on from them and
ends. A script has one run, and one that goes on from it; a test looks at one rule of them.
"""

import importlib
import importlib.util
import inspect
import io
import math
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import Scripted, note, read_checkpoint, read_run, read_scalars, run

STAGES = set("simulation inference replay backpropagation logging checkpoint evaluation".split())
STAGES |= {"untracked"}
Q_LOSSES = "qf1_loss qf2_loss qf_loss qf1_values qf2_values actor_loss"
SAC_LOSSES = f"{Q_LOSSES} alpha_loss alpha entropy"
PPO_LOSSES = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac explained_variance"
HAS_MOVIEPY = importlib.util.find_spec("moviepy") is not None


class Script(NamedTuple):
    """What a short run of it has to show; numbers are environment steps."""

    name: str
    flags: dict
    each: int  # of an iteration
    row: int  # of a row of metrics
    first: int  # row with losses
    steady: int  # before the steady window
    losses: str
    charts: str = ""  # besides those that all have
    stages: set = STAGES
    notices: int = 0  # of flags without effect

    @property
    def module(self):
        if "atari" in self.name:
            pytest.importorskip("envpool", reason="needs requirements/envpool.txt")
        return importlib.import_module(f"leanrl.{self.name}")

    def train(self, **more) -> Path:
        return self.module.main(self.module.Args(**self.flags | more))

    @property
    def steps(self) -> int:
        return self.flags["total_timesteps"] // self.each * self.each

    @property
    def evaluated(self) -> list[int]:
        return [*range(self.flags["eval_every"], self.steps, self.flags["eval_every"]), self.steps]


COMMON = {"eval_episodes": 2, "save_model": True, "cuda": False}
PENDULUM = {"env_id": "Pendulum-v1", "num_envs": 2}
OFF_POLICY = COMMON | {"learning_starts": 100, "batch_size": 32, "buffer_size": 5000}
OFF_POLICY |= {"policy_frequency": 3}
SAC = {"target_network_frequency": 2}
PPO = PENDULUM | {"num_steps": 64, "num_minibatches": 4, "update_epochs": 2, "clip_coef": 0.02}
CARTPOLE = {"num_envs": 64, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
ATARI = {"num_envs": 4, "num_steps": 32, "update_epochs": 1, "eval_episodes": 1, "eval_every": 768}
FILMED = {"capture_video": HAS_MOVIEPY}
QUIET = {"eval_every": 0, "capture_video": False}
WORLDS = {"env_id": "worlds/InvertedPendulum-v5", "physics": "c"}
BF16 = {"bf16": True, "channels_last": True}


def off_policy(name, flags, losses, steady, **rest):
    """On Pendulum; the first row comes before the first update."""
    flags = OFF_POLICY | PENDULUM | {"total_timesteps": 501, "eval_every": 300} | flags
    shape = {"each": 2, "row": 100, "first": 200} | rest
    return Script(name, flags, steady=steady, losses=losses, **shape)


def on_policy(name, flags, losses=PPO_LOSSES, first=1, charts="learning_rate", **rest):
    """Seven rollouts, the first three of which are the warm-up; losses are in all rows but so."""
    size = flags["num_envs"] * flags["num_steps"]
    flags = COMMON | {"total_timesteps": 8 * size - 1, "eval_every": 3 * size} | flags
    return Script(name, flags, size, size, first * size, 3 * size, losses, charts, **rest)


SAC_WORLDS = {"num_envs": 4, "utd_ratio": 0.25, "total_timesteps": 1602, "eval_every": 600}
BASELINES = [
    off_policy("sac_continuous_action", SAC | FILMED, SAC_LOSSES, 100 + 50 * 6),
    off_policy("td3_continuous_action", {}, Q_LOSSES, 100 + 50 * 3),
    off_policy(
        "sac_mujoco_worlds",
        SAC | WORLDS | SAC_WORLDS,
        SAC_LOSSES,
        100 + 50 * 6 * 4,
        each=4,
        row=400,
        first=400,
        charts="broken_worlds overflows",
    ),
    on_policy("ppo_continuous_action", PPO),
    on_policy("ppo_lstm", PPO | {"num_minibatches": 2}),
    on_policy("ppo_cartpole_gpu", CARTPOLE | FILMED),
    on_policy("ppo_atari_envpool", ATARI | FILMED),
    on_policy(
        "pqn_atari_envpool",
        ATARI | FILMED,
        losses="td_loss q_values",
        charts="learning_rate epsilon",
    ),
    on_policy(
        "ppo_mujoco_worlds",
        WORLDS | {"num_envs": 8, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2},
        first=2,  # the first rollout only measures
        charts="learning_rate broken_worlds overflows",
    ),
]
ASYNC = on_policy(
    "ppo_continuous_action_async_torchcompile",
    PPO | {"cudagraphs": True},
    charts="learning_rate staleness learner_waits_seconds collector_waits_seconds",
    stages=STAGES - {"simulation", "inference"},  # which are the collector's
    notices=1,
)


def variant(baseline: Script) -> Script:
    """Its flags have no effect here, and say so; steps of CartPole are one function."""
    flags = {"cudagraphs": True} | (BF16 if "atari" in baseline.name else {})
    fused = {"simulation", "replay"} if "cartpole" in baseline.name else set()
    return baseline._replace(
        name=f"{baseline.name}_torchcompile",
        flags=baseline.flags | flags,
        stages=baseline.stages - fused,
        notices=1 + ("bf16" in flags),
    )


SCRIPTS = {each.name: each for each in [*BASELINES, *map(variant, BASELINES), ASYNC]}


ALONE = "(?!.*async)"  # runs of several processes go on in test_async


def names(pattern="") -> list[str]:
    return [name for name in SCRIPTS if re.match(pattern, name)]


def each(pattern=""):
    """A test for each script whose name begins so."""
    return pytest.mark.parametrize("done", names(pattern), indirect=True)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)


def environments(module) -> tuple:
    """The class that `main` trains on, and the method that is told the seed."""
    if hasattr(module, "AtariEnvs"):
        return module.AtariEnvs, "__init__"
    if "worlds" in module.__name__:
        return importlib.import_module("mujoco_worlds").MuJoCoWorlds, "reset"
    for name in ("CartPole", "NormalizedVectorEnv", "NormalizedEnvs"):
        if hasattr(module, name):
            return getattr(module, name), "reset"
    return gym.vector.SyncVectorEnv, "reset"


@pytest.fixture(scope="module")
def done(request, tmp_path_factory):
    """The run of a script, and all that it has left."""
    script, folder = SCRIPTS[request.param], tmp_path_factory.mktemp("run")
    learned, out, err = [], io.StringIO(), io.StringIO()

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(torch.cpu, "get_capabilities", dict, raising=False)  # an old processor
        if "ppo" in script.name:
            note(
                patch,
                script.module.PPO,
                "learn",
                lambda metrics, *_: learned.append(deepcopy(metrics)),
            )
        script.train()
    run_dir, config, stages, scalars = read_run(folder)
    return SimpleNamespace(
        script=script,
        dir=run_dir,
        out=out.getvalue(),
        err=err.getvalue(),
        config=config,
        stages=stages,
        scalars=scalars,
        checkpoint=read_checkpoint(run_dir),
        learned=learned,
    )


@pytest.fixture(scope="module")
def resumed(done, tmp_path_factory):
    """An iteration more, with other flags of the process, and what it begins with."""
    script, found = done.script, SimpleNamespace(seeds=[])
    found.dir = shutil.copytree(done.dir, tmp_path_factory.mktemp("resumed") / "run")
    module, (envs, method) = script.module, environments(script.module)
    signature = inspect.signature(getattr(envs, method))

    def look(_, run):
        states = [optimizer.state_dict()["state"] for optimizer in found.agent.optimizers]
        found.begun = deepcopy((dict(found.agent.state_dict()), states))
        found.generator = torch.get_rng_state()
        flushed = (torch.tensor(1e-39) * 0.5).item() == 0
        found.process = torch.get_num_threads(), torch.get_float32_matmul_precision(), flushed
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")

    def begin(_, *arguments, **options):
        found.seeds.append(signature.bind(*arguments, **options).arguments["seed"])

    more = QUIET | {"total_timesteps": script.steps + script.each, "resume": str(found.dir)}
    more |= {"torch_threads": 2, "matmul_precision": "high"}
    if "_torchcompile" in script.name:
        more["compile"] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)  # for its settings
        note(patch, module.Run, "restore", lambda _, run, agent: setattr(found, "agent", agent))
        note(patch, module.Run, "open", look)
        note(patch, envs, method, begin)
        assert script.train(**more) == found.dir
    found.checkpoint = read_checkpoint(found.dir)
    return found


# What is left of it


@each()
def test_records(done):
    script, checkpoint = done.script, done.checkpoint
    assert done.config["args"].items() >= script.flags.items() and done.config["versions"]["torch"]
    assert checkpoint["args"] == done.config["args"] and checkpoint["global_step"] == script.steps
    assert not (done.dir / "checkpoint.partial").exists()


@each()
def test_what_is_said(done):
    assert not done.out
    assert done.err.count("it has no effect") == done.script.notices
    assert "us/step" in done.err and f"steps/s, runs/{done.dir.name}" in done.err
    found = re.findall(r"evaluation at ([\d,]+): -?\d", done.err)
    assert found == [f"{step:,}" for step in done.script.evaluated]


@each()
def test_all_stages_are_entered_and_add_up(done):
    script, report = done.script, done.stages
    assert report["stages"].keys() >= script.stages
    assert all(report["stages"][name] > 0 for name in script.stages)
    training = sum(report["stages"].values()) - report["stages"]["evaluation"]
    assert training == pytest.approx(report["seconds"], rel=0.01)


@each()
def test_the_window_is_steady(done):
    script, report = done.script, done.stages
    steps = script.steps - script.steady
    assert (report["env_steps"], report["iterations"]) == (steps, steps // script.each)
    assert report["sps_steady"] > 0 and report["warmup_seconds"] > 0


@each()
def test_rows_are_regular(done):
    script = done.script
    losses = {f"losses/{name}" for name in script.losses.split()}
    charts = "SPS cpu_seconds episodic_return episodic_length eval_return".split()
    charts = {f"charts/{name}" for name in (*charts, *script.charts.split())}
    assert done.scalars.keys() == losses | charts
    steps = {tag: [step for step, _ in rows] for tag, rows in done.scalars.items()}
    for tag in ("charts/SPS", "charts/cpu_seconds"):
        assert steps[tag] == list(range(script.row, script.steps + 1, script.row))
    for tag in losses - {"losses/explained_variance"}:
        assert steps[tag] == list(range(script.first, script.steps + 1, script.row)), tag
    assert steps["charts/eval_return"] == script.evaluated


@each()
def test_losses_are_finite_and_change(done):
    for tag, rows in done.scalars.items():
        values = [value for _, value in rows]
        assert np.isfinite(values).all(), tag
        learns = tag.startswith("losses/") and tag != "losses/clipfrac"
        assert not learns or len(set(values)) > 1, f"{tag} never changed: no update happened"


@each(".*continuous_action")
def test_episodes_are_of_the_environment(done):
    """Of 200 steps each in Pendulum; neither rewards nor lengths are normalized."""
    ends = [step for step in range(400, done.script.steps + 1, 400) for _ in range(2)]
    assert done.scalars["charts/episodic_length"] == [(step, 200) for step in ends]
    returns = done.scalars["charts/episodic_return"]
    assert [step for step, _ in returns] == ends
    assert all(value < -100 for _, value in returns)


@each("ppo_continuous_action(_torchcompile)?$")
def test_losses_are_of_the_last_minibatch(done):
    """Clipping of all."""
    for tag in done.learned[0]:
        minibatches = torch.stack([metrics[tag] for metrics in done.learned]).view(7, 2, 4)
        expected = minibatches[:, -1, -1]
        if tag == "losses/clipfrac":
            expected = minibatches.mean(dim=(1, 2))
            assert expected.any()
        values = [value for _, value in done.scalars[tag]]
        assert values == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.skipif(not HAS_MOVIEPY, reason="needs requirements/video.txt")
@each("sac_continuous|.*(cartpole|atari)")
def test_videos_of_evaluations(done):
    for step in done.script.evaluated:
        (video,) = (done.dir / f"videos/step-{step}").glob("*.mp4")
        assert video.stat().st_size > 1000


def test_trace(tmp_path):
    """Of a rollout after three that warm up and three that are timed."""
    script = SCRIPTS["ppo_continuous_action"]
    run_dir = script.train(total_timesteps=9 * script.each, eval_every=0, stopwatch="trace")
    assert (run_dir / "trace.json.gz").stat().st_size > 1000


# Going on


@each(ALONE)
def test_networks_and_optimizers_are_restored(done, resumed):
    saved = dict(done.checkpoint["agent"]), done.checkpoint["optimizers"]
    torch.testing.assert_close(resumed.begun, saved, atol=0, rtol=0)


@each(ALONE)
def test_the_generator_goes_on(done, resumed):
    assert torch.equal(resumed.generator, done.checkpoint["generators"]["cpu"])


@each(ALONE)
def test_episodes_are_new(done, resumed):
    assert (
        resumed.seeds[0] == 1 + done.script.steps
    )  # of the first games, where they have two pools


@each(ALONE)
def test_steps_go_on(done, resumed):
    assert resumed.checkpoint["global_step"] == done.script.steps + done.script.each
    assert (resumed.dir / f"stages_{done.script.steps}.json").exists()


@each("sac|td3")
def test_the_replay_is_kept(done, resumed):
    before, after = (each.checkpoint["replay"] for each in (done, resumed))
    assert after["position"] == done.script.steps + done.script.each
    stored = [name for name, value in before.items() if torch.is_tensor(value)]
    assert stored
    for name in stored:
        assert torch.equal(after[name][: len(before[name])], before[name]), name


@each("ppo_continuous_action(_torchcompile)?$")
def test_statistics_go_on(done, resumed):
    """Of a rollout of 64 steps, and of its first observation."""
    before, after = (each.checkpoint["statistics"]["obs_rms_count"] for each in (done, resumed))
    torch.testing.assert_close(after, before + 65)


@each("(?!.*(worlds|async))p")
def test_rates_fall_over_all_steps(done, resumed):
    """Those of the longer run when it goes on."""
    rate = done.script.flags.get("learning_rate", done.script.module.Args.learning_rate)
    rows = sorted(read_scalars(resumed.dir)["charts/learning_rate"])
    expected = [*(1 - i / 7 for i in range(7)), 1 - 7 / 8]
    assert [value for _, value in rows] == pytest.approx([rate * share for share in expected])


@each(ALONE)
def test_a_process_computes_as_its_flags_say(done, resumed):
    """Compiled or not: no variant has threads or a precision of its own."""
    assert resumed.process == (2, "high", True)


# What is not finite


@each(ALONE)
def test_a_nan_ends_the_run_and_spares_the_checkpoint(done, tmp_path, monkeypatch):
    script, run_dir = done.script, shutil.copytree(done.dir, tmp_path / "run")
    before, (envs, _) = (run_dir / "checkpoint.pt").read_bytes(), environments(script.module)
    name = "recv" if hasattr(envs, "recv") else "step"  # where a step may end apart
    step = getattr(envs, name)

    def spoiled(*arguments):
        obs, rewards, *rest = step(*arguments)
        return obs, rewards * math.nan, *rest

    monkeypatch.setattr(envs, name, spoiled)
    flags = QUIET | {"total_timesteps": script.steps + 3 * script.each, "resume": str(run_dir)}
    flags |= {"checkpoint_every": script.each}
    words = rf"^step {script.steps + script.each:,}: \S+ is (nan|not finite)$"
    with pytest.raises(FloatingPointError, match=words):
        script.train(**flags)
    assert (run_dir / "checkpoint.pt").read_bytes() == before


FAULTS = {  # what an environment's step makes of its observation and reward
    "nan observation": lambda obs: (obs * math.nan, 1.0),
    "infinite observation": lambda obs: (obs + math.inf, 1.0),
    "nan reward": lambda obs: (obs, math.nan),
    "infinite reward": lambda obs: (obs, -math.inf),
    "beyond float32": lambda obs: (obs, 1e300),
    "infinite gradients": lambda obs: (obs, 2.9e38),
}
FAULTY = [("sac_continuous_action", fault) for fault in FAULTS]
FAULTY.append(("sac_continuous_action_torchcompile", "infinite gradients"))
FAULTY += [
    (name, x) for name in names("ppo_continuous_action(_torch.*)?$") for x in list(FAULTS)[:4]
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "fault"), FAULTY)
def test_what_is_not_finite_is_not_saved(name, fault, monkeypatch):
    """Where an environment of its own spoils observations or rewards, normalized or not."""

    def on_step(step, obs):
        return FAULTS[fault](obs) if step > 220 else (obs, 1.0)

    spec = gym.envs.registration.EnvSpec("Faulty-v0", lambda **_: Scripted(on_step))
    monkeypatch.setitem(gym.registry, "Faulty-v0", spec)
    flags = QUIET | {"env_id": "Faulty-v0", "num_envs": 1}
    with pytest.raises(FloatingPointError, match="^step 256: .* is (nan|inf|-inf|not finite)$"):
        SCRIPTS[name].train(**flags, total_timesteps=1000, checkpoint_every=64)
    (run_dir,) = Path("runs").iterdir()
    checkpoint = read_checkpoint(run_dir)
    assert checkpoint["global_step"] == 192
    for part in ("agent", "replay", "statistics"):
        for value in checkpoint.get(part, {}).values():
            assert torch.as_tensor(value).isfinite().all()


# Seeds


@pytest.mark.parametrize(
    "name", names("(sac|td3)_continuous_action$|ppo_continuous_action(_torch.*)?$")
)
def test_a_seed_decides_and_evaluating_or_saving_changes_nothing(name):
    """In an environment that draws from the generators that all share."""
    flags = QUIET | {"env_id": "envs_for_workers:Drawing-v0", "total_timesteps": 192}
    flags |= {"num_steps": 32} if "ppo" in name else {}
    busy = {"eval_every": 64, "checkpoint_every": 70}
    found = []
    for seed, more in ((1, busy), (1, {}), (2, {})):
        checkpoint = read_checkpoint(SCRIPTS[name].train(**flags | more, seed=seed))
        experience = checkpoint.get("replay") or checkpoint["statistics"]
        found.append((experience, checkpoint["generators"], dict(checkpoint["agent"])))
    one, other, another = found
    torch.testing.assert_close(one[:2], other[:2], atol=0, rtol=0)
    torch.testing.assert_close(one[2], other[2], atol=1e-5, rtol=0)
    name = next(name for name, value in one[0].items() if torch.is_tensor(value))
    assert not torch.equal(one[0][name], another[0][name])


# Flags

REFUSED = [  # scripts, settings, the flag that is named
    ("(sac|td3)", {"learning_starts": 0}, "learning-starts"),
    ("(sac|td3)", {"learning_starts": 1_000_000}, "learning-starts"),
    ("(sac|td3)", {"tau": math.nan}, "gamma and --tau"),
    ("sac_mujoco", {"nstep": 0}, "nstep"),
    ("ppo_mujoco", {"end_gamma": 1.0}, "end-gamma"),
    ("ppo_mujoco", {"end_gamma": 0.98}, "end-gamma"),
    ("p", {"gamma": math.nan}, "gamma and --"),
    ("p", {"num_minibatches": 3}, "num-minibatches"),
    ("ppo", {"num_minibatches": 128, "num_envs": 2, "num_steps": 64}, "num-minibatches"),
    ("(?!.*worlds)p", {"num_envs": 2, "num_steps": 64, "total_timesteps": 127}, "total-timesteps"),
    (".*async", {"max_staleness": -1}, "max-staleness"),
]


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [(name, *rest) for pattern, *rest in REFUSED for name in names(pattern)],
)
def test_settings_that_would_train_wrongly_are_refused(name, flags, said):
    with pytest.raises(ValueError, match=f"^--{said}"):
        SCRIPTS[name].train(**flags)


GAMES = ("Breakot-v5", "CartPole-v1", "D1Basic-v1")  # EnvPool has the last two


@pytest.mark.parametrize(
    ("name", "env_id", "said"),
    [
        *((name, "CartPole-v1", "needs continuous actions$") for name in names(".*continuous")),
        *(("ppo_atari_envpool", game, f"EnvPool has no Atari game {game};") for game in GAMES),
    ],
)
def test_environments_that_do_not_fit_are_refused(name, env_id, said):
    """Before there is a run directory."""
    with pytest.raises(ValueError, match=f"^--env-id: {said}"):
        SCRIPTS[name].train(env_id=env_id)
    assert not Path("runs").exists()


# Learning

PENDULUM_TASK = "--env-id=Pendulum-v1 --total-timesteps=10000 --learning-starts=1000"
PENDULUM_TASK = f"{PENDULUM_TASK} --eval-every=10000", -700, -250
BALANCE_TASK = "--env-id=InvertedPendulum-v5 --total-timesteps=100000 --eval-every=100000"
TASKS = {  # flags, what the first episodes do not reach, and what the last evaluation does
    "sac_continuous_action": PENDULUM_TASK,
    "td3_continuous_action": PENDULUM_TASK,
    "ppo_continuous_action": (BALANCE_TASK, 30, 700),
    # 475 is where Gymnasium calls CartPole-v1 solved
    "ppo_cartpole_gpu": ("--eval-every=5000000 --eval-episodes=100", 60, 475),
}
SEEDS = [(name, seed) for name in TASKS for seed in range(1, 6 if "cartpole" in name else 2)]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [(".py",), ("_torchcompile.py", "--compile")], ids=str)
@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_tasks_are_learned(name, seed, ending, tmp_path):
    flags, unsolved, solved = TASKS[name]
    run(tmp_path, name + ending[0], *ending[1:], f"--seed={seed}", *flags.split())
    scalars = read_run(tmp_path)[3]
    returns = [value for _, value in scalars["charts/episodic_return"]]
    assert returns[0] < unsolved
    assert scalars["charts/eval_return"][-1][1] > solved
