"""Compiled functions as a GPU gets them: Triton's code of each, interpreted, beside the baseline.

triton_on_cpu.py changes torch for good, so this file is also the program that compares a pair, in a
process of its own: `python tests/test_triton.py NAME [CHANGE]` prints what it found.
"""

import copy
import json
import os
import re
import subprocess
import sys
import types
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import gymnasium as gym
import pytest
import torch

if __name__ == "__main__":
    from triton_on_cpu import AsyncCompile, CachingAutotuner, launches, ran

import pairs
from conftest import ROOT
from helpers import CPU
from pairs import PAIRS

BF16 = 0.02  # between the eager variant and kernels that round to 8 bits in fewer places
FAST = {"ppo_cartpole", "sac"}
IN_BF16 = "ppo_atari", "pqn_atari"
HAS_TRITON = find_spec("triton") is not None and version("triton").startswith("3.8.")
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs requirements/triton.txt")


def assert_same(found, expected, error=1e-5):
    torch.testing.assert_close(found, expected, atol=error, rtol=error, equal_nan=True)


def same_call(reference, agent, name, *inputs, error=1e-5):
    """The method gives the same, on copies of its inputs, which it may change."""
    expected, found = (getattr(x, name)(*copy.deepcopy(inputs)) for x in (reference, agent))
    assert_same(found, expected, error)


def make_smaller(pair):
    """Networks and batches, which in their full size are many blocks each."""
    pairs.B = 16
    for module in (f"leanrl.{pair.script}", f"leanrl.{pair.script}_torchcompile"):
        path = ROOT / f"{module.replace('.', '/')}.py"
        sys.modules[module] = types.ModuleType(module)
        sys.modules[module].__file__ = str(path)
        text = re.sub(r"\b(256|512)\b", "19", path.read_text())
        exec(compile(text, path, "exec"), vars(sys.modules[module]))


def compile_as_on_a_gpu(pair, agent):
    from torch._inductor.decomposition import decompositions

    of_a_gpu = dict(decompositions)
    pair.variant.compile_agent(agent)
    decompositions.update(of_a_gpu)  # PQN takes those of a layer norm away on a CPU
    if pair.script == "ppo_cartpole_gpu":
        agent.prepare = torch.compile(agent.prepare, fullgraph=True)


# What is compared


def act(pair, reference, agent, error):
    obs = pair.draw(pair, pair.make(pair.baseline), CPU)[0].obs
    count = len(obs)
    noise = (torch.randn(count, pairs.A),)
    if "atari" in pair.script:
        noise = (torch.empty(count, 4).exponential_(),)
    if pair.agent == "PQN":
        noise = torch.arange(count) % 3 == 0, torch.arange(count) % 4
    same_call(reference, agent, "act", obs, *noise, error=error)


def observe(pair, reference, agent, error):
    for _ in range(2):
        obs = torch.randn(8, pairs.OBS)
        same_call(reference, agent, "update_statistics", obs, torch.randn(8), torch.rand(8) < 0.5)


def step_cartpole(pair, reference, agent, error):
    """Steps in which episodes end, and what is prepared of them."""
    eager = pair.make(pair.variant)
    eager.load_state_dict(reference.state_dict())
    envs = pair.variant.CartPole(33, CPU)
    envs.reset(seed=1)
    envs.state[::3, 2] = 0.2  # falls soon
    others = copy.deepcopy(envs)
    draws = torch.empty(3, 33, 2).exponential_(), 0.05 * torch.rand(3, 33, 4)
    rollout = agent.roll_out(envs, *draws)
    assert_same(rollout, eager.roll_out(others, *draws))
    assert_same(envs.state, others.state)
    assert rollout.ended.any()
    same_call(reference, agent, "prepare", rollout)


def step_worlds(pair, reference, agent, error):
    """Both halves of a step, in which an episode ends."""
    groups = [gym.make_vec("worlds/Hopper-v5", num_envs=5) for _ in range(2)]
    groups[1].compile()
    for envs in groups:
        envs.reset(seed=1)
        envs.state.steps[0] = 999
    for _ in range(2):
        actions = torch.randn(5, 3)
        expected, found = (envs.step(actions) for envs in groups)
        assert_same(found, expected)
        assert_same(groups[1].returns, groups[0].returns)


MORE = {
    "sac": [act],
    "sac_worlds": [observe, act, step_worlds],
    "ppo_cartpole": [step_cartpole],
    "ppo_worlds": [act, step_worlds],
    "ppo_atari": [act],
    "ppo_multigpu": [act],
    "pqn_atari": [act],
}


def move(each, before):
    """How far all weights have come, those of twins in the variant's order."""
    after = pairs.stacked(each.state_dict())
    return torch.cat([(after[name] - tensor).flatten() for name, tensor in before.items()])


def update(pair, reference, agent, error):
    """Adam makes much of the last bit of a tiny gradient, here and there."""
    inputs = pair.draw(pair, reference, CPU)
    before = copy.deepcopy(agent.state_dict())
    metrics = []
    for each in (reference, agent):
        torch.manual_seed(1)  # the same noise
        metrics.append(getattr(each, pair.update)(*inputs))
    assert_same(metrics[1], metrics[0], error)
    likeness = torch.cosine_similarity(move(reference, before), move(agent, before), dim=0)
    assert likeness > 1 - 10 * error, likeness.item()


def compare(name):
    name, *bf16 = name.split()
    pair = PAIRS[name]
    make_smaller(pair)
    if name == "ppo_multigpu":
        for module in (pair.baseline, pair.variant):
            module.dist = types.SimpleNamespace(all_reduce=lambda tensor: None)  # with nobody
    reference, agent = pair.make_both()
    error = 1e-5
    if bf16:
        agent = pair.make(pair.variant, bf16=True, channels_last=True)
        reference, error = copy.deepcopy(agent), BF16
    compile_as_on_a_gpu(pair, agent)
    for comparison in (*MORE.get(name, []), update):
        comparison(pair, reference, agent, error)


# Bugs that a compiler might have, one at a time


def change_sources(change):
    """Each kernel's text from now on."""
    compile_kernel = AsyncCompile.triton

    def compile_changed(self, name, source, *args, **kwargs):
        return compile_kernel(self, name, change(source), *args, **kwargs)

    AsyncCompile.triton = compile_changed


def without_masks(source):
    source = source.replace("other=0.0", "other=1.0")
    return re.sub(r"tl\.where\((?:r0_mask|xmask)[^,]*, (\w+), 0\)", r"\1", source)


def drop_masks():
    """What lies behind the end of a row counts in its sum."""
    change_sources(without_masks)


def keep_a_stale_constant():
    """Gamma as it was in another run."""
    change_sources(lambda source: source.replace("0.99,", "0.98,"))


def read_too_early():
    """What a kernel writes in place is there only after the next kernel."""
    run = CachingAutotuner.run
    waiting = []

    def run_late(kernel, *args, **kwargs):
        late = partial(run, kernel, *args, **kwargs)
        if kernel.mutated_arg_names and not waiting:
            waiting.append(late)
            return
        late()
        while waiting:
            waiting.pop()()

    CachingAutotuner.run = run_late


def keep_sizes():
    """No bug: for inductor_for_cuda.py."""
    globals()["make_smaller"] = lambda pair: None


BUGS = {  # and where they must be noticed
    "drop_masks": "ppo_worlds",
    "keep_a_stale_constant": "ppo_cartpole",
    "read_too_early": "ppo_cartpole",
}


def main(name, change=None):
    """One line of JSON: launches of each kernel, which compiled functions have run, any error."""
    torch.set_num_threads(1)
    torch._inductor.config.fx_graph_cache = False
    if change:
        globals()[change]()
    found = {"launches": launches, "ran": ran}
    try:
        compare(name)
    except AssertionError as error:
        found["error"] = str(error)
    print(json.dumps(found))


# Tests


def find(*command, folder):
    done = subprocess.run(
        [sys.executable, __file__, *command],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


NAMES = []
for its_name in (*PAIRS, *(f"{name} bf16" for name in IN_BF16)):
    NAMES.append(pytest.param(its_name, marks=() if its_name in FAST else pytest.mark.slow))


@NEEDS_TRITON
@pytest.mark.parametrize("name", NAMES)
def test_kernels_do_what_the_baseline_does(name, tmp_path):
    found = find(name, folder=tmp_path)
    assert "error" not in found, found["error"]
    assert found["ran"] and all(found["ran"].values()), f"not called: {found['ran']}"
    assert len(found["launches"]) > 10


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize(("bug", "name"), BUGS.items())
def test_a_wrong_kernel_is_noticed(bug, name, tmp_path):
    assert "error" in find(name, bug, folder=tmp_path)


def test_all_variants_are_compared():
    scripts = {path.stem for path in (ROOT / "leanrl").glob("*_torchcompile.py")}
    assert {f"{pair.script}_torchcompile" for pair in PAIRS.values()} == scripts


if __name__ == "__main__":
    main(*sys.argv[1:])
