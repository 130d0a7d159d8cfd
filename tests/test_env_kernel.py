"""The study's kernel: all that holds for the tensors, and what only a kernel can break."""

import os
import subprocess
import sys

import env_kernel
import pytest
import test_cartpole
import torch
from conftest import ROOT
from env_kernel import KernelCartPole
from helpers import CPU

from leanrl.ppo_cartpole_gpu import CartPole


def make_both(num_envs):
    """Tensors and kernel in the same state."""
    both = CartPole(num_envs, CPU), KernelCartPole(num_envs, CPU)
    for envs in both:
        envs.reset(seed=1)
    both[1].state.copy_(both[0].state)
    return both


@pytest.mark.parametrize(
    "check",
    [
        test_cartpole.test_a_step_is_gymnasiums,
        test_cartpole.test_resets_are_uniform_and_independent,
        test_cartpole.test_actions_of_another_count_are_refused,
    ],
    ids=lambda check: check.__name__,
)
def test_what_holds_for_tensors_holds_for_the_kernel(check):
    check(KernelCartPole)


@pytest.mark.parametrize("falls", [False, True], ids=["stands", "falls"])
def test_the_limit_truncates_whether_the_pole_stands_or_falls(falls):
    test_cartpole.test_the_limit_truncates_whether_the_pole_stands_or_falls(KernelCartPole, falls)


def test_the_seed_decides_and_a_reset_without_one_goes_on():
    def roll(envs, seed):
        envs.reset(seed=seed)
        actions = torch.zeros(20, dtype=torch.int64)  # all fall within 11 steps or so
        return torch.stack([envs.step(actions)[0] for _ in range(60)])

    envs, again = KernelCartPole(20, CPU), KernelCartPole(20, CPU)
    first = roll(envs, 1)
    assert torch.equal(first, roll(again, 1)) and not torch.equal(first, roll(again, 2))
    assert not torch.equal(first, roll(envs, None)) and torch.equal(first, roll(envs, 1))


def test_kernel_and_tensors_agree_for_whole_episodes():
    """From one state, step after step, until chaos or a reset parts them."""
    both = make_both(500)
    going_on = torch.ones(500, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        actions = torch.randint(0, 2, (500,), generator=generator)
        (_, _, *ends, infos), (_, _, *other_ends, others) = (e.step(actions) for e in both)
        for one, other in zip(ends, other_ends, strict=True):
            assert one.dtype == other.dtype and torch.equal(one[going_on], other[going_on])
        difference = infos["final_obs"][going_on] - others["final_obs"][going_on]
        assert difference.abs().max() < 1e-5
        for key, value in infos["episode"].items():
            assert value.dtype == others["episode"][key].dtype
            assert torch.equal(value[going_on], others["episode"][key][going_on])
        going_on &= ~infos["_final_obs"]
    assert 100 < going_on.sum() < 450


@pytest.mark.parametrize("count", [1, 255])
def test_the_kernel_stays_within_its_tensors(count):
    """Under the address sanitizer."""
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "plots/measure")!r}]
import torch
from env_kernel import KernelCartPole
envs = KernelCartPole({count}, "cpu")
envs.reset(seed=1)
for _ in range(30):
    envs.step(torch.zeros({count}, dtype=torch.int64))
print("done")
"""
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
    if not os.path.isabs(asan.stdout.strip()):
        pytest.skip("g++ has no address sanitizer here")
    environment = {
        "CXX": "g++ -fsanitize=address",
        "LD_PRELOAD": asan.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [1, 32, 1000, 1024])
def test_the_kernel_on_the_gpu_is_the_one_on_the_cpu(threads):
    one, other = (KernelCartPole(1001, d, threads_per_block=threads) for d in ("cpu", "cuda"))
    for envs in (one, other):
        envs.reset(seed=1)
    other.state.copy_(one.state)
    for _ in range(10):
        actions = torch.randint(0, 2, (1001,))
        found, expected = other.step(actions.cuda()), one.step(actions)
        torch.testing.assert_close(found[0].cpu(), expected[0], atol=1e-5, rtol=0)


def test_a_missing_compiler_is_one_line(monkeypatch):
    for compiler in ("no-such-compiler", "g++ --no-such-flag"):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(ValueError, match="no kernel for cpu: .*") as error:
            env_kernel.build_kernel.__wrapped__("cpu")
        assert compiler.split()[0] in str(error.value) and "\n" not in str(error.value)


def test_the_gpus_compiler_needs_no_cuda_toolkit(monkeypatch):
    """torch asks for one to include from, and raises where there is none."""
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    compiled = []

    def compile_kernel(source, name):
        compiled.append(cpp_extension.include_paths("cuda"))

    monkeypatch.setattr(torch.cuda, "_compile_kernel", compile_kernel, raising=False)
    env_kernel.build_kernel.__wrapped__("cuda")
    assert len(compiled) == 1
