"""Compiled functions as a GPU gets them: Triton's code of each, interpreted, beside the baseline.

triton_on_cpu.py changes torch for good, so this file is also the program that compares a script's
functions, in a process of its own: `python tests/test_triton.py NAME [BUG]` prints what it found.
"""

import copy
import json
import os
import re
import subprocess
import sys
import time
import types
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import gymnasium as gym
import pytest
import torch

if __name__ == "__main__":
    from triton_on_cpu import AsyncCompile, CachingAutotuner, launches, ran

from conftest import ROOT

CPU = torch.device("cpu")
BF16 = 0.02  # between the eager variant and kernels that round to 8 bits in fewer places
SLOW_TEST = pytest.mark.slow
HAS_TRITON = find_spec("triton") is not None and version("triton").startswith("3.8.")
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="needs requirements/triton.txt")


def assert_same(found, expected, error=1e-5):
    torch.testing.assert_close(found, expected, atol=error, rtol=error, equal_nan=True)


def same_call(reference, agent, name, *inputs, error=1e-5):
    """The method gives the same, on copies of its inputs, which it may change."""
    expected, found = (getattr(x, name)(*copy.deepcopy(inputs)) for x in (reference, agent))
    assert_same(found, expected, error)


def fill(rollout, like=None):
    """Random numbers, few ends and no final values elsewhere; or those of another rollout."""
    for name, tensor in vars(rollout).items():
        if isinstance(tensor, torch.Tensor):
            if like:
                tensor.copy_(getattr(like, name))
            elif tensor.is_floating_point():
                tensor.normal_()
    if not like:
        rollout.ended.copy_(rollout.ended > 1)
        rollout.final_values *= rollout.ended
    return rollout


def load_small(name):
    """The pair with 16 features for 512, whose weights would be 1,600 blocks."""
    for full_name in (f"leanrl.{name}", f"leanrl.{name}_torchcompile"):
        path = ROOT / f"{full_name.replace('.', '/')}.py"
        module = types.ModuleType(full_name)
        module.__file__ = str(path)
        sys.modules[full_name] = module
        text = path.read_text()
        assert "512" in text
        exec(compile(text.replace("512", "16"), path, "exec"), vars(module))


# Scripts


def sac_continuous_action():
    import test_sac_parity as tests

    tests.B = 16
    reference, agent = tests.make_pair()
    tests.variant.compile_agent(agent)
    same_call(reference, agent, "act", torch.randn(1, tests.OBS), torch.randn(1, tests.A))
    tests.run_updates(reference, agent, 1, 1e-5)


def td3_continuous_action():
    import test_td3 as tests

    tests.B = 16
    reference, agent = tests.make_pair()
    tests.variant.compile_agent(agent)
    same_call(reference, agent, "act", torch.randn(1, tests.OBS), torch.randn(1, tests.A))
    tests.run_updates(reference, agent, 2, 1e-5)


def ppo_continuous_action():
    import test_ppo as tests

    reference, agent = tests.make_pair()
    tests.variant.compile_agent(agent)
    tests.run_epochs(reference, agent, 1, 1e-5)


def ppo_continuous_action_async():
    import test_async as tests

    torch.manual_seed(0)
    args = tests.SMALL | {"num_steps": 16}
    reference = tests.baseline.PPO(tests.baseline.Args(**args), tests.OBS, tests.A, CPU)
    agent = tests.variant.PPO(tests.variant.Args(**args), tests.OBS, tests.A, CPU)
    agent.model.load_state_dict(reference.model.state_dict())
    tests.variant.compile_agent(agent)
    rollout = fill(tests.baseline.Rollout(reference.args, tests.OBS, tests.A, CPU))
    other = fill(tests.variant.Rollout(agent.args, tests.OBS, tests.A, CPU), like=rollout)
    batches = reference.prepare(rollout, stale=True), agent.prepare(other)
    order = torch.randperm(32)
    metrics = [x.learn(batch, order) for x, batch in zip((reference, agent), batches, strict=True)]
    assert_same(metrics[1], metrics[0])
    assert_same(agent.model.state_dict(), reference.model.state_dict())


def ppo_atari_envpool():
    load_small("ppo_atari_envpool")
    import test_atari as tests

    reference, agent = tests.make_pair()
    tests.variant.compile_agent(agent)
    obs = tests.make_batch(4).obs
    same_call(reference, agent, "act", obs, torch.empty(4, tests.A).exponential_())
    rollout = fill(tests.baseline.Rollout(13, 3, CPU))
    same_call(reference, agent, "prepare", rollout, torch.randn(3))
    tests.run_updates(reference, agent, 1, 1e-5, size=8)


def ppo_atari_envpool_multigpu():
    load_small("ppo_atari_envpool_multigpu")
    import test_multigpu as tests

    torch.manual_seed(0)
    reference = tests.baseline.PPO(tests.baseline.Args(**tests.SMALL), 4, CPU)
    agent = tests.variant.PPO(tests.variant.Args(**tests.SMALL), 4, CPU)
    agent.load_state_dict(reference.state_dict())
    tests.variant.compile_agent(agent)
    rollout = fill(tests.baseline.Rollout(13, 3, CPU))
    same_call(reference, agent, "act", rollout.obs[0], torch.empty(3, 4).exponential_())
    same_call(reference, agent, "prepare", rollout, torch.randn(3))
    batch = reference.prepare(rollout, torch.randn(3))
    index = torch.randperm(39)[:5]
    same_call(reference, agent, "gradient", batch, index, torch.randn(5))
    vector, _ = reference.gradient(batch, index, torch.randn(5))
    reference.step(vector)
    agent.step(vector)
    assert_same(agent.state_dict(), reference.state_dict())


def compile_with_layer_norm(variant, agent):
    """With the decompositions of it that PQN's variant takes away on a CPU."""
    from torch._inductor.decomposition import decompositions

    of_a_gpu = dict(decompositions)
    variant.compile_agent(agent)
    decompositions.update(of_a_gpu)


def pqn_atari_envpool():
    load_small("pqn_atari_envpool")
    import test_pqn as tests

    reference, agent = tests.make_pair()
    compile_with_layer_norm(tests.variant, agent)
    draws = torch.tensor([1, 0, 0, 1]).bool(), torch.tensor([3, 2, 1, 0])
    same_call(reference, agent, "act", tests.make_batch(4).obs, *draws)
    rollout = fill(tests.baseline.Rollout(13, 3, CPU))
    same_call(reference, agent, "prepare", rollout, torch.randn(3))
    tests.run_updates(reference, agent, 1, 1e-5, size=8)


def update_in_bf16(eager, agent, batch):
    """The metrics of an update, and the direction in which it goes."""
    same_call(eager, agent, "update", batch, torch.randperm(8)[:4], error=BF16)
    moments = []
    for each in (eager, agent):
        moments.append(torch.cat([moment.flatten() for moment in each.optimizer.exp_avgs]))
    assert torch.cosine_similarity(*moments, dim=0) > 1 - BF16


def ppo_atari_envpool_bf16():
    load_small("ppo_atari_envpool")
    import test_atari as tests

    _, agent = tests.make_pair(bf16=True, channels_last=True)
    eager = copy.deepcopy(agent)
    tests.variant.compile_agent(agent)
    obs = tests.make_batch(4).obs
    same_call(eager, agent, "act", obs, torch.empty(4, tests.A).exponential_(), error=BF16)
    rollout = fill(tests.variant.Rollout(13, 3, CPU))
    same_call(eager, agent, "prepare", rollout, torch.randn(3), error=BF16)
    update_in_bf16(eager, agent, tests.make_batch(8, eager.model))


def pqn_atari_envpool_bf16():
    load_small("pqn_atari_envpool")
    import test_pqn as tests

    _, agent = tests.make_pair(bf16=True, channels_last=True)
    eager = copy.deepcopy(agent)
    compile_with_layer_norm(tests.variant, agent)
    draws = torch.tensor([1, 0, 0, 1]).bool(), torch.tensor([3, 2, 1, 0])
    same_call(eager, agent, "act", tests.make_batch(4).obs, *draws, error=BF16)
    rollout = fill(tests.variant.Rollout(13, 3, CPU))
    same_call(eager, agent, "prepare", rollout, torch.randn(3), error=BF16)
    update_in_bf16(eager, agent, tests.make_batch(8))


def ppo_cartpole_gpu():
    import test_cartpole as tests

    reference, agent = tests.make_pair()
    eager = copy.deepcopy(agent)
    tests.variant.compile_agent(agent)
    agent.prepare = torch.compile(agent.prepare, fullgraph=True)  # as on a GPU
    envs = tests.variant.CartPole(33, CPU)
    envs.reset(seed=1)
    envs.state[::3, 2] = 0.2  # falls soon
    others = copy.deepcopy(envs)
    rows = []
    for _ in range(3):
        draws = torch.empty(33, 2).exponential_(), 0.05 * torch.rand(33, 4)
        rows.append(agent.step(envs, *draws))
        assert_same(rows[-1], eager.step(others, *draws))
        assert_same(vars(envs)["state"], vars(others)["state"])
    assert torch.stack([row.ended for row in rows]).any()
    columns = zip(*rows, strict=True)
    rollout = tests.variant.Rollout._make([torch.stack(column) for column in columns])
    same_call(reference, agent, "prepare", rollout)
    tests.run_updates(reference, agent, 1, 1e-5)


def compare_worlds():
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


def ppo_mujoco_worlds():
    import test_mujoco as tests

    reference, agent = tests.make_pair()
    tests.variant.compile_agent(agent)
    obs = torch.randn(13, 3, tests.OBS)
    same_call(reference, agent, "act", obs[0], torch.randn(3, tests.A))
    numbers = torch.randn(13, 3)
    rollout = tests.baseline.Rollout(
        obs=obs,
        actions=torch.randn(13, 3, tests.A),
        log_probs=numbers,
        rewards=numbers.sin(),
        final_obs=obs.cos(),
        terminated=numbers > 2,
        ended=numbers > 1,
        episode_returns=numbers,
        episode_lengths=numbers.long(),
    )
    same_call(reference, agent, "prepare", rollout)
    tests.run_updates(reference, agent, 1, 1e-5)
    compare_worlds()


def sac_mujoco_worlds():
    import test_mujoco as tests

    baseline, variant = tests.sac_baseline, tests.sac_variant
    agents = []
    for module in (baseline, variant):
        torch.manual_seed(0)
        agents.append(module.SAC(module.Args(num_envs=8), tests.spaces(tests.OBS, tests.A), CPU))
    variant.compile_agent(agents[1])
    noise = torch.randn(8, tests.A)
    obs = torch.randn(8, tests.OBS)
    for _ in range(2):
        same_call(*agents, "observe", obs, torch.randn(8), torch.rand(8) < 0.5)
        same_call(*agents, "act", obs, noise)
    batch = baseline.Batch(
        obs=obs,
        actions=noise.tanh(),
        next_obs=torch.randn(8, tests.OBS),
        rewards=torch.randn(8),
        terminated=torch.zeros(8),
    )
    same_call(*agents, "update_critic", batch, noise)
    same_call(*agents, "update_actor", obs, noise)
    reference, agent = agents
    critics = tests.stack_twins(list(reference.qf.parameters()))
    assert_same(list(agent.qf.parameters()), critics)
    assert_same(agent.actor.state_dict(), reference.actor.state_dict())
    compare_worlds()


# Bugs that a compiler might have, one at a time


def change_sources(change):
    """Each kernel's text from now on."""
    compile_kernel = AsyncCompile.triton

    def compile_changed(self, name, source, *args, **kwargs):
        return compile_kernel(self, name, change(source), *args, **kwargs)

    AsyncCompile.triton = compile_changed


def without_masks(source):
    """What lies behind the end of a row counts in its sum."""
    source = source.replace("other=0.0", "other=1.0")
    return re.sub(r"tl\.where\((?:r0_mask|xmask)[^,]*, (\w+), 0\)", r"\1", source)


def drop_masks():
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


BUGS = {  # and where they must be noticed
    "drop_masks": "ppo_mujoco_worlds",
    "keep_a_stale_constant": "ppo_cartpole_gpu",
    "read_too_early": "ppo_cartpole_gpu",
}


def main(name, bug=None):
    """One line of JSON: seconds, launches of each kernel, which compiled functions have run."""
    torch.set_num_threads(1)
    torch._inductor.config.fx_graph_cache = False
    if bug:
        globals()[bug]()
    found = {"launches": launches, "ran": ran}
    start = time.perf_counter()
    try:
        globals()[name]()
    except AssertionError as error:
        found["error"] = str(error)
    found["seconds"] = time.perf_counter() - start
    print(json.dumps(found))


# Tests

FAST = "ppo_cartpole_gpu", "ppo_mujoco_worlds", "sac_continuous_action"
SLOW = (
    "pqn_atari_envpool",
    "ppo_atari_envpool",
    "ppo_atari_envpool_multigpu",
    "ppo_continuous_action",
    "ppo_continuous_action_async",
    "sac_mujoco_worlds",
    "td3_continuous_action",
)
IN_BF16 = "ppo_atari_envpool_bf16", "pqn_atari_envpool_bf16"


def compare(*command, folder):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    result = subprocess.run(
        [sys.executable, __file__, *command],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


@NEEDS_TRITON
@pytest.mark.parametrize(
    "name", [*FAST, *[pytest.param(name, marks=SLOW_TEST) for name in SLOW + IN_BF16]]
)
def test_kernels_do_what_the_baseline_does(name, tmp_path):
    found = compare(name, folder=tmp_path)
    assert "error" not in found, found["error"]
    compiled = found["ran"]
    assert compiled and all(compiled.values()), f"not called: {compiled}"
    assert len(found["launches"]) > 10


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize(("bug", "name"), BUGS.items())
def test_a_wrong_kernel_is_noticed(bug, name, tmp_path):
    found = compare(name, bug, folder=tmp_path)
    assert "error" in found


def test_all_variants_are_compared():
    scripts = {path.stem for path in (ROOT / "leanrl").glob("*_torchcompile.py")}
    assert {f"{name}_torchcompile" for name in FAST + SLOW} == scripts


if __name__ == "__main__":
    main(*sys.argv[1:])
