"""The form of a script: anatomy, flags, and that what scripts share is the same to the letter.

A script joins by itself: by its name, and by having a function or class of a shared name. Baselines
are compared with baselines and variants with variants; what a pair has in common is the business of
test_parity.py. It is also why the tests of one script need no repetition for the others.
"""

import ast
import dataclasses
import difflib
import importlib
import inspect
import re
from functools import cache

import pytest
from conftest import ROOT

from leanrl.stopwatch import NOT_SCRIPTS

FUNCTIONS = [  # the beginning of a script's name, and what all of them share that have it
    (r"", "gradient_step Adam reverse_scan"),
    (r"(sac|td3)_", "mlp TwinQ kept_guards"),
    (r"sac_", "alpha_loss"),
    (r"sac_continuous", "Actor critic_loss actor_loss"),  # on worlds there are more flags
    (r"(sac|td3)_continuous", "make_envs Batch ReplayBuffer"),
    (r"(sac|td3|ppo)_continuous", "Copying"),
    (r"ppo_", "mlp compute_gae policy_loss value_loss explained_variance"),
    (r"ppo_(atari|cartpole)", "ppo_loss"),  # of a categorical policy
    (r"ppo_(continuous|mujoco)", "gaussian_log_prob"),  # of a Gaussian one
    (r"ppo_(continuous|mujoco|lstm)", "clipped_mean mean_of_positive"),
    (r"ppo_(continuous_action|mujoco_worlds)(_torchcompile)?$", "Batch"),
    (r"ppo_continuous", "make_envs ActorCritic"),  # with and without more processes
    (r"ppo_atari", "ActorCritic Batch Rollout evaluate"),
    (r"(ppo|pqn)_atari", "layer_init AtariEnvs"),
]
SCRIPTS = {
    path.stem: path.read_text()
    for path in sorted((ROOT / "leanrl").glob("*.py"))
    if path.name not in NOT_SCRIPTS
}


@cache
def definitions() -> dict[str, dict[str, str]]:
    """{name: {stem: source}} of the functions and classes at top level."""
    found = {}
    for stem, text in SCRIPTS.items():
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.setdefault(node.name, {})[stem] = ast.get_source_segment(text, node)
    return found


@pytest.mark.parametrize(
    ("pattern", "name"),
    [(pattern, name) for pattern, names in FUNCTIONS for name in names.split()],
    ids=lambda value: value or "all",
)
def test_functions_and_classes(pattern, name):
    having = {stem: text for stem, text in definitions()[name].items() if re.match(pattern, stem)}
    assert len(having) > 1, "fewer than two scripts have it: nothing is shared"
    differences = []
    for is_variant in (False, True):
        kind = {stem: text for stem, text in having.items() if ("_torch" in stem) == is_variant}
        for stem in list(kind)[1:]:
            first, other = (kind[x].splitlines() for x in (next(iter(kind)), stem))
            names = next(iter(kind)), stem
            differences += difflib.unified_diff(first, other, *names, lineterm="", n=0)
    assert not differences, "\n".join(differences)


# Anatomy

HEADINGS = ["Environment", "Networks", "Storage", "Losses", "Agent", "Training"]
OF_WORLDS = [*HEADINGS[1:], "Evaluation"]  # whose environment is in a module of its own
LAST = "What a reader may"


@pytest.mark.parametrize("stem", SCRIPTS)
def test_algorithm_comes_first(stem):
    text = SCRIPTS[stem]
    headings = OF_WORLDS if "mujoco" in stem else [*HEADINGS, LAST]
    end = '\n\nif __name__ == "__main__":\n    main(parse_args(Args))\n'
    marks = ["class Args:", *(f"\n# {heading}" for heading in headings)]
    marks += ["\ndef evaluate(", "\n# >>> run: ", "\n# <<< run <<<", end]
    places = [text.find(mark) for mark in marks]
    assert min(places) > 0 and places == sorted(places), dict(zip(marks, places, strict=True))
    assert text.endswith(end)
    training = text[text.index("\n# Training") : text.index(f"\n# {headings[-1]}")]
    main = training[training.index("\ndef main(") + 1 :]
    longer = any(name in stem for name in ("async", "multi", "mujoco", "lstm"))
    limit = 96 + 23 * ("_torch" in stem) + 15 * longer
    assert main.rstrip().count("\n") < limit


@pytest.mark.parametrize("path", sorted((ROOT / "leanrl").glob("*.py")), ids=lambda path: path.stem)
def test_nothing_at_import_needs_unix(path):
    of_unix = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
            assert not of_unix & names


# Flags


def load(stem: str):
    if "atari" in stem:
        pytest.importorskip("envpool", reason="needs requirements/envpool.txt")
    return importlib.import_module(f"leanrl.{stem}")


@pytest.mark.parametrize("stem", SCRIPTS)
def test_flags_are_explained(stem):
    """By the comments behind the fields, which --help shows."""
    args = load(stem).Args
    said = re.findall(r"^    (\w+): .*?  # \w+", inspect.getsource(args), re.MULTILINE)
    assert said == [field.name for field in dataclasses.fields(args)]


@pytest.mark.parametrize("stem", SCRIPTS)
def test_wrong_settings_are_refused_by_their_flag(stem):
    args = load(stem).Args
    names = {"gamma", "end_gamma", "gae_lambda", "q_lambda", "tau"} & set(args.__dataclass_fields__)
    wrong = [("total_timesteps", 1), *((name, x) for name in names for x in (-0.001, 1.001))]
    assert len(wrong) > 2
    for name, value in wrong:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            args(**{name: value})


# Defaults that are not CleanRL's

ON_POLICY = {"anneal_lr": True, "gamma": 0.99, "gae_lambda": 0.95, "norm_adv": True}
ON_POLICY |= {"clip_vloss": True, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None}
GAMES = {"learning_rate": 2.5e-4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
PQN = GAMES | {"total_timesteps": 10_000_000, "num_envs": 8, "anneal_lr": True, "gamma": 0.99}
PQN |= {"max_grad_norm": 10.0, "start_e": 1.0, "end_e": 0.01, "exploration_fraction": 0.1}
PQN |= {"q_lambda": 0.65}
GAMES |= ON_POLICY | {"ent_coef": 0.01}
ATARI = GAMES | {"total_timesteps": 10_000_000, "num_envs": 8, "clip_coef": 0.1}
PPO = {"total_timesteps": 1_000_000, "learning_rate": 3e-4, "num_envs": 1, "num_steps": 2048}
PPO |= ON_POLICY | {"num_minibatches": 32, "update_epochs": 10, "clip_coef": 0.2, "ent_coef": 0.0}
OFF_POLICY = {"total_timesteps": 1_000_000, "num_envs": 1, "buffer_size": 1_000_000, "gamma": 0.99}
OFF_POLICY |= {"tau": 0.005, "batch_size": 256, "policy_frequency": 2}
SAC = OFF_POLICY | {"learning_starts": 5_000, "policy_lr": 3e-4, "q_lr": 1e-3, "alpha": 0.2}
SAC |= {"target_network_frequency": 1, "autotune": True}
TD3 = OFF_POLICY | {"learning_starts": 25_000, "learning_rate": 3e-4, "policy_noise": 0.2}
TD3 |= {"exploration_noise": 0.1, "noise_clip": 0.5}
COMMON = {"seed": 1, "torch_deterministic": True, "cuda": True, "track": False}
COMMON |= {"capture_video": False, "save_model": False}
CLEANRL = {  # the defaults of its script of the same name or, for worlds and CartPole, task
    "sac_": SAC,
    "td3_": TD3,
    "ppo_continuous": PPO,
    "ppo_mujoco": PPO,
    "ppo_lstm": PPO,
    "ppo_atari": ATARI,
    "pqn_atari": PQN,
    "ppo_cartpole": GAMES | {"total_timesteps": 500_000, "num_envs": 4, "clip_coef": 0.2},
}


@pytest.mark.parametrize("stem", SCRIPTS)
def test_defaults_unlike_cleanrls_are_in_the_docstring(stem):
    """As `name value`; nothing else is said to be a default. A variant's are its baseline's."""
    defaults = {field.name: field.default for field in dataclasses.fields(load(stem).Args)}
    (theirs,) = (table for start, table in CLEANRL.items() if stem.startswith(start))
    theirs = theirs | COMMON
    lacking = {"norm_adv", "clip_vloss", "target_kl"} if "ppo_mujoco" in stem else set()
    assert theirs.keys() - defaults.keys() == lacking
    names = theirs.keys() - lacking
    changed = {name: defaults[name] for name in names if defaults[name] != theirs[name]}
    doc = load(stem.removesuffix("_torchcompile")).__doc__
    said = dict(re.findall(rf"\b({'|'.join(names)}) (True|False|None|[\d.,e-]*\d)", doc))
    assert {name: ast.literal_eval(x.replace(",", "")) for name, x in said.items()} == changed
