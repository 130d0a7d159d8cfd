"""The pages: what they name exists, commands parse, examples work, numbers are recorded."""

import contextlib
import importlib
import io
import re
import shlex
import sys

import gymnasium as gym
import mujoco
import mujoco_worlds  # noqa: F401  # registers the worlds
import numpy as np
import pytest
import readme
import torch
import tyro
from conftest import ROOT
from helpers import CPU, read_checkpoint, read_scalars

from leanrl.stopwatch import NOT_SCRIPTS

FILES = [ROOT / "README.md", *ROOT.glob("[lp]*/README.md"), *ROOT.glob(".github/*.md")]
PAGES = {path: path.read_text() for path in FILES}
ALL_PAGES = "\n".join(PAGES.values())
SCRIPTS = [path for path in ROOT.glob("leanrl/*.py") if path.name not in NOT_SCRIPTS]
SET_UP = [ROOT / "run.sh", ROOT / ".pre-commit-config.yaml", *ROOT.glob(".github/workflows/*")]
FOREIGN_FLAGS = {  # torchrun's, Ray's, TensorBoard's
    *("--standalone", "--nproc-per-node", "--max-restarts", "--nnodes", "--node-rank"),
    *("--master-addr", "--generate", "--head", "--node-ip-address", "--dashboard-host", "--logdir"),
}


def load(stem: str):
    if "atari" in stem:
        pytest.importorskip("envpool", reason="needs requirements/envpool.txt")
    return importlib.import_module(f"leanrl.{stem}")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", ALL_PAGES, re.DOTALL)


def block_with(word: str) -> str:
    (block,) = (block for block in blocks("python") if word in block)
    return block


# What is named exists


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    """A file, and there a heading, by its name as GitHub makes it."""
    for link in re.findall(r'(?:\]\(|src=")(?!https?://)([^)\s"]+)', PAGES[path]):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        headings = re.findall("^#+ (.*)", target.read_text(), re.MULTILINE) if anchor else [""]
        names = [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings]
        assert anchor in names, link


def test_named_paths_exist():
    text = "\n".join([ALL_PAGES, *(path.read_text() for path in SET_UP)])
    folders = r"leanrl|plots|tests|requirements|\.ci|\.github"
    named = set(re.findall(rf"(?<![\w./])(?:{folders})/(?!SCRIPT)[\w./-]*+(?![*{{<])", text))
    made = "plots/out"  # by the first measurement
    missing = {x for x in named if not x.startswith(made) and not (ROOT / x.rstrip(".")).exists()}
    assert not missing


def test_scripts_are_named():
    """Variants by their suffix."""
    names = {path.name.replace("_torchcompile", "") for path in SCRIPTS}
    assert not [name for name in names if f"leanrl/{name}" not in PAGES[ROOT / "README.md"]]


def test_flags_exist():
    programs = [*ROOT.glob("leanrl/*.py"), *ROOT.glob("plots/**/*.py"), *ROOT.glob("tests/*.py")]
    sources = [path.read_text() for path in (*programs, ROOT / "run.sh")]
    known = set(re.findall(r"--[a-z][a-z0-9-]+", "\n".join(sources))) | FOREIGN_FLAGS
    for path in SCRIPTS:
        fields = re.findall(r"^    (\w+): .* = ", path.read_text(), re.MULTILINE)
        known |= {f"--{name.replace('_', '-')}" for name in fields}
    unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", ALL_PAGES)) - known
    assert not unknown


# Commands and code


def commands() -> list[str]:
    """`SCRIPT FLAGS` of the pages and the scripts' docstrings, by python or torchrun."""
    texts = [*PAGES.values(), *(path.read_text().split('"""')[1] for path in SCRIPTS)]
    joined = "\n".join(texts).replace("\\\n", " ")
    scripts = r"leanrl/((?!stopwatch|sweep|SCRIPT)\w+)\.py([^\n`#|;&]*)"
    found = re.findall(rf"(?:python|torchrun [^\n`]*) (?:CLONE/)?{scripts}", joined)
    return sorted({f"{script} {' '.join(flags.split())}".strip() for script, flags in found})


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line):
    script, *flags = shlex.split(line)
    tyro.cli(load(script).Args, args=flags)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[0])
def test_python_compiles(block):
    compile(block, "page", "exec")


# Numbers


def test_numbers_are_those_of_the_records():
    """As plots/readme.py writes them."""
    regions = list(readme.REGION.finditer(ALL_PAGES))
    assert {region[2] for region in regions} == set(readme.REGIONS)
    for region in regions:
        assert region[3] == readme.REGIONS[region[2]](), f"{region[2]}: run plots/readme.py"


def test_flags_of_worlds_are_named_beside_todays_defaults():
    args = importlib.import_module("leanrl.ppo_mujoco_worlds").Args
    assert readme.DEFAULTS == {name: getattr(args, name) for name in readme.DEFAULTS}


def test_numbers_of_sentences_are_in_a_table():
    """But for what a program prints, which is indented."""
    prose = readme.REGION.sub("", PAGES[ROOT / "README.md"])
    prose = re.sub(r"^    .*$", "", prose, flags=re.MULTILINE)
    claims = r"\d[\d,.]*x\b|\d[\d,.]*(?: [kM])? steps/s|\d[\d,.]* (?:us|ms|MB|GB)\b|\d[\d.]*%"
    tables = "\n".join(region[3] for region in readme.REGION.finditer(ALL_PAGES))
    found = set(re.findall(claims, prose))
    assert found and found <= set(re.findall(claims, tables))


# Examples


@pytest.fixture
def balance(tmp_path, monkeypatch, registry):
    """The manual's own task, in a folder that is not the current one."""
    (xml,) = blocks("xml")
    (tmp_path / "balance.xml").write_text(xml)
    (tmp_path / "balance.py").write_text(block_with("class Balance"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "balance", raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return mujoco.MjModel.from_xml_path(str(tmp_path / "balance.xml"))


@pytest.mark.parametrize(
    ("physics", "engine"),
    [("c", "mujoco"), pytest.param("warp", "mujoco_warp", marks=pytest.mark.slow)],
)
def test_own_task_is_what_mujoco_says(physics, engine, balance):
    pytest.importorskip(engine)
    envs = gym.make_vec("balance:Balance-v0", num_envs=3, physics=physics)
    obs, _ = envs.reset(seed=1, options={"stagger": True})
    assert obs.abs().max() < 0.02 and obs.unique().numel() == 12
    states = [mujoco.MjData(balance) for _ in range(3)]
    begins = [True] * 3
    ends = 0
    for _ in range(100):
        for data, row, anew in zip(states, obs, begins, strict=True):
            if anew:
                mujoco.mj_resetData(balance, data)
                data.qpos, data.qvel = row.numpy().reshape(2, 2)
        actions = torch.rand(3, 1) * 2 - 1
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for i, data in enumerate(states):
            x = data.qpos[0]
            data.ctrl[0] = actions[i].item()
            mujoco.mj_step(balance, data, 2)
            final, height = [*data.qpos, *data.qvel], data.site_xpos[0, 2]
            np.testing.assert_allclose(infos["final_obs"][i], final, atol=1e-3)
            expected = height - 1 - 0.1 * abs(data.qpos[0] - x) / 0.02
            assert rewards[i].item() == pytest.approx(expected, abs=1e-3)
            assert terminated[i].item() == (height < 1.3)
        begins = (terminated | truncated).tolist()
        ends += terminated.sum().item()
    assert ends > 3 and envs.state.steps.max() < 200


@pytest.mark.parametrize(
    ("script", "kind", "flags"),
    [
        ("ppo_mujoco_worlds", "PPO", {"num_steps": 8, "num_minibatches": 2}),
        ("sac_mujoco_worlds_torchcompile", "SAC", {"learning_starts": 40}),
    ],
)
def test_joysticks_policy_sees_sensors_alone(script, kind, flags, monkeypatch, joystick, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = load(script)
    flags = flags | {"env_id": joystick, "num_envs": 4, "total_timesteps": 96}
    flags |= {"randomize": 0.2, "eval_every": 96, "eval_episodes": 2, "save_model": True}
    run_dir = module.main(module.Args(**flags))
    assert np.isfinite(read_scalars(run_dir)["charts/eval_return"][-1][1])
    envs = gym.make_vec("AntJoystick-v0", num_envs=4)
    agent = getattr(module, kind)(module.Args(**flags), envs, CPU)
    agent.load_state_dict(read_checkpoint(run_dir)["agent"])
    obs, noise = torch.randn(4, 66), torch.zeros(4, 8)
    acted = agent.act(obs, noise)
    obs[:, 35:] += 1
    torch.testing.assert_close(agent.act(obs, noise), acted)
    obs[:, :35] += 1
    with pytest.raises(AssertionError):
        torch.testing.assert_close(agent.act(obs, noise), acted)


@pytest.fixture
def adapters(registry):
    """The names that the manual's adapters to other libraries define."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    names = {"gym": gym, "stable_baselines3": sys.modules["stable_baselines3"], "vec_env": vec_env}
    exec(block_with("class SB3Worlds"), names)
    exec(block_with("class CleanRLWorlds"), names)
    return names


ZEROS = np.zeros((3, 2), np.float32)


def test_stable_baselines_steps_worlds(adapters):
    """Episodes of the right length, which end by their time."""
    worlds = adapters["SB3Worlds"](gym.make_vec("worlds/Reacher-v5", num_envs=3))
    envs = adapters["vec_env"].VecMonitor(worlds)
    envs.reset()
    for _ in range(50):
        obs, _, ended, infos = envs.step(ZEROS)
    assert ended.all() and {info["episode"]["l"] for info in infos} == {50}
    assert all(info["TimeLimit.truncated"] for info in infos)
    assert not np.allclose([info["terminal_observation"] for info in infos], obs)


def test_cleanrl_steps_worlds(adapters):
    envs = adapters["CleanRLWorlds"](gym.make_vec("worlds/Reacher-v5", num_envs=3))
    envs.reset(seed=1)
    for _ in range(50):
        obs, _, _, truncated, infos = envs.step(ZEROS)
    assert isinstance(obs, np.ndarray) and truncated.all()
    assert [info["episode"]["l"] for info in infos["final_info"]] == [50] * 3


@pytest.mark.parametrize("name", ["sac_continuous_action", "sac_continuous_action_torchcompile"])
def test_policy_of_a_checkpoint_acts(name, tmp_path, monkeypatch):
    """By the lines that play an episode, as they are but for the names of script and run."""
    monkeypatch.chdir(tmp_path)
    module = load(name)
    settings = {"env_id": "Pendulum-v1", "batch_size": 16, "learning_starts": 20}
    run_dir = module.main(module.Args(**settings, total_timesteps=30, save_model=True))
    code = block_with("no_noise = ").replace("sac_continuous_action import", f"{name} import")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code.replace("runs/RUN", str(run_dir)), {})
    assert -2000 < float(printed.getvalue()) < 0
