"""What scripts share is the same to the letter, so that a repair in one reaches all the others.

A script joins by itself: by its name, and by having a function or class of a shared name. Baselines
are compared with baselines and variants with variants; what a pair has in common is the business of
assert_hunks_are_marked. It is also why the tests of one script need no repetition for the others.
"""

import ast
import difflib
import importlib
import re
from functools import cache

import pytest
import torch
from conftest import ROOT

ONE_PROCESS = r"(?!.*_(async|multigpu))"  # the others start theirs and share their devices
FUNCTIONS = [  # the beginning of a script's name, and what all of them share that have it
    (r"", "save load gradient_step Adam"),
    (r"(sac|td3)_", "mlp TwinQ Batch"),
    (r"((sac|td3)_continuous|sac_mujoco_gpu$)", "ReplayBuffer"),  # a variant's is for one device
    (r"sac_", "Actor critic_loss actor_loss alpha_loss SAC compile_agent"),
    (r"(sac|td3)_continuous", "make_envs"),
    (r"ppo_", "mlp compute_gae policy_loss value_loss"),
    (r"ppo_(atari|cartpole)", "ppo_loss"),  # of a categorical policy
    (r"ppo_(continuous|mujoco)", "gaussian_log_prob"),  # of a Gaussian one
    (r"ppo_(continuous_action|mujoco_gpu)(_torchcompile)?$", "Batch"),
    (r"ppo_continuous", "make_envs ActorCritic"),  # with and without more processes
    (r"(ppo|sac)_mujoco", "CPhysics WarpPhysics MuJoCoEnvs half_cheetah hopper walker2d ant"),
    (r"(ppo|sac)_mujoco", "humanoid inverted_pendulum double_pendulum"),
    (r"ppo_atari", "layer_init AtariEnvs ActorCritic Batch Rollout evaluate"),
]
BLOCKS = [  # of SAC's text: the scripts that have it, its first words, what follows it
    (r"", "    exp_name: str", "\n    env_id: str"),
    (r"", "    for name, x in asdict(", "\n\ndef make_envs"),
    (r"", 'if __name__ == "__main__":', None),
    (ONE_PROCESS, "    for number in (signal.SIGTERM", "    if start_step >="),
    (ONE_PROCESS, '    device = torch.device("cuda"', "    warmup_steps ="),
    (ONE_PROCESS, "    torch.manual_seed(", "\n    envs = "),
    (ONE_PROCESS, "        agent.load_state_dict(", "        rb.load_state_dict"),
    (ONE_PROCESS, "        torch.set_rng_state(", "    del checkpoint"),
    (ONE_PROCESS, "    run_dir = Path(", "    config["),  # not what versions it names
    (ONE_PROCESS, '    config["cpu"]', "    bar = "),
    (ONE_PROCESS, "    def due(", "        last ="),
    (ONE_PROCESS, "            if due(args.checkpoint_every)", "                    save("),
    (ONE_PROCESS, "            if due(args.eval_every)", "                    eval_return = "),
    (ONE_PROCESS, '                    writer.add_scalar("charts/eval_return"', "\n\nif __name__"),
    (r"(sac|td3)_continuous", "    if checkpoint:\n", "                    actor_due"),
    (r"(sac|td3)_continuous", "            # 3. Step the environments.", "\n\nif __name__"),
]


def sources() -> dict[str, str]:
    """{stem: text} of all scripts."""
    return {path.stem: path.read_text() for path in sorted((ROOT / "leanrl").glob("*_*.py"))}


@cache
def definitions() -> dict[str, dict[str, str]]:
    """{name: {stem: source}} of the functions and classes at top level."""
    found = {}
    for stem, text in sources().items():
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


@pytest.mark.parametrize(
    ("pattern", "begin", "end"), BLOCKS, ids=[begin.strip() for _, begin, _ in BLOCKS]
)
def test_blocks(pattern, begin, end):
    text = sources()["sac_continuous_action"]
    block = text[text.index(begin) :]
    block = block[: block.index(end)] if end else block
    having = {stem: text for stem, text in sources().items() if re.match(pattern, stem)}
    missing = [stem for stem, text in having.items() if block not in text]
    assert not missing, f"{missing} lack\n{block}"


@pytest.mark.parametrize("stem", [stem for stem in sources() if stem.endswith("_torchcompile")])
def test_no_compiled_method_has_guards(stem, monkeypatch):
    """torch.compile takes the filter out of the options it is given: each call needs its own."""

    def compile(method, fullgraph, options):
        filters.append(options.pop("guard_filter_fn"))

    filters = []
    monkeypatch.setattr(torch, "compile", compile)
    if "atari" in stem:
        pytest.importorskip("envpool", reason="needs requirements/envpool.txt")
    module = importlib.import_module(f"leanrl.{stem}")
    kind = next(getattr(module, name) for name in ("PPO", "SAC", "TD3") if hasattr(module, name))
    agent = kind.__new__(kind)
    torch.nn.Module.__init__(agent)
    agent.weight = torch.nn.Parameter(torch.zeros(1))  # which tells the device
    module.compile_agent(agent)
    assert filters and all(not any(keep([object()] * 3)) for keep in filters)
