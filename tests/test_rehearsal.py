"""The CUDA paths without a GPU: what cuda_rehearsal.py notices, and the scripts under it.

It changes torch for good, so this file is also the program that is rehearsed, in a process of its
own for each group of scripts. What it finds there is a file of JSON, which the tests read.
"""

import ctypes
import functools
import importlib
import json
import linecache
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT
from helpers import assert_same, read_checkpoint
from tensordict.nn import CudaGraphModule
from torch.utils import cpp_extension
from torch.utils._python_dispatch import _disable_current_modes

REHEARSAL = str(ROOT / "tests" / "cuda_rehearsal.py")
N = 4
SAMPLED = 61  # iterations, in one of which the stopwatch waits

# Each of these works on a CPU; on a GPU the line that ends in `# bug` does not.
# What they return is captured and called eight times.

BUGS = {}  # function -> what must be said of it


def bug(says):
    return lambda function: BUGS.setdefault(function, says) and function


@bug("the host waits during a capture")
def item_in_an_update():
    weights = torch.ones(N, device="cuda")
    return lambda: weights.mul_(1 / weights.norm().item())  # bug


@bug("sub_ in the graph keeps 0.6561, Python now has 0.59049")
def number_that_changes():
    weights, step = torch.ones(N, device="cuda"), 0

    def update():
        nonlocal step
        step += 1
        weights.sub_(weights, alpha=0.9**step)  # bug

    return update


@bug("the graph calls neg_, Python would now call mul_")
def branch_on_a_count():
    weights, step = torch.ones(N, device="cuda"), 0

    def update():
        nonlocal step
        step += 1
        if step % 2 == 0:
            weights.neg_()  # bug
        weights.mul_(2)

    return update


@bug("add in the graph keeps a tensor at")
def state_bound_anew():
    total, ones = torch.zeros(N, device="cuda"), torch.ones(N, device="cuda")

    def update():
        nonlocal total
        total = total + ones  # bug

    return update


@bug("mul_ in the graph keeps 5.0 from the CPU, Python now has 6.0")
def host_constant():
    weights, scale = torch.ones(N, device="cuda"), torch.tensor(1.0)

    def update():
        scale.add_(1)
        weights.mul_(scale)  # bug

    return update


@bug("the generator is not registered")
def unregistered_generator():
    generator = torch.Generator("cuda").manual_seed(1)
    return lambda: torch.rand(N, device="cuda", generator=generator)  # bug


@bug("a copy from the CPU during a capture")
def upload_in_a_graph():
    data = torch.zeros(N, device="cuda")
    return lambda: data.copy_(torch.ones(N))  # bug


@bug("expected a generator of CUDA")
def generator_of_the_cpu():
    torch.rand(N, device="cuda", generator=torch.Generator())  # bug


@bug("pinned memory was overwritten before this copy was over")
def pinned_memory_overwritten_early():
    host, data = torch.zeros(N).pin_memory(), torch.zeros(N, device="cuda")
    for step in range(2):
        host.fill_(step)
        data.copy_(host, non_blocking=True)  # bug
    torch.cuda.synchronize()


@bug("numpy: the tensor is on CUDA")
def forgotten_cpu():
    torch.ones(N, device="cuda").numpy()  # bug


@bug("expected all tensors to be on the same device")
def buffer_on_the_cpu():
    torch.ones(N, device="cuda") + torch.ones(N)  # bug


@bug("stack: expected all tensors to be on the same device")
def number_of_the_cpu():
    torch.stack([torch.ones((), device="cuda"), torch.ones(())])  # bug


# Each of these is so on a GPU, too


def gradient_of_other_strides():
    """Autograd makes memory of its own for a gradient that is transposed."""
    weights = torch.ones(N, N, device="cuda", requires_grad=True)
    (weights.t().contiguous() * torch.ones(N, N, device="cuda")).sum().backward()
    torch._foreach_add_([weights.grad], [weights.detach()])


def number_copied():
    learning_rate = torch.ones((), device="cuda")
    learning_rate.copy_(0.5)
    assert learning_rate.item() == 0.5


def copied_when_waited_for():
    ones = torch.ones(N, device="cuda").to("cpu", non_blocking=True)
    assert ones.isnan().all()
    torch.cuda.synchronize()
    assert ones.eq(1).all()


def copied_when_its_event_is_waited_for():
    event = torch.cuda.Event()
    ones = torch.ones(N, device="cuda").to("cpu", non_blocking=True)
    event.record()
    twos = torch.full((N,), 2.0, device="cuda").to("cpu", non_blocking=True)
    event.synchronize()
    assert ones.eq(1).all() and twos.isnan().all()


RIGHT = (gradient_of_other_strides, number_copied, copied_when_waited_for)
RIGHT += (copied_when_its_event_is_waited_for,)

# Scripts, flags, and where the host may wait: {start of the line: times per iteration}. Rollouts
# and updates go on for a while after all graphs are captured


def row(rate: float, count: int) -> dict:
    """Of metrics; before the first is read, and in an iteration that is a sample, it waits."""
    waits = rate if rate == 1 else 2 * rate
    return {"row = {tag: float(value)": rate * count, "self.backend.synchronize()": waits}


OFF_POLICY = {"env_id": "Pendulum-v1", "batch_size": 32, "learning_starts": 40}
OFF_POLICY |= {"buffer_size": 1000, "total_timesteps": 130}
ON_POLICY = {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
PPO = ON_POLICY | {"env_id": "Pendulum-v1", "total_timesteps": 16 * 8}
TENSORS = ON_POLICY | {"num_envs": 64, "total_timesteps": 64 * 16 * 8}
ATARI = ON_POLICY | {"num_envs": 4, "total_timesteps": 4 * 16 * 6}
WORLDS = {"env_id": "worlds/InvertedPendulum-v5", "physics": "c", "num_envs": 8}
WORLDS |= {"batch_size": 32, "utd_ratio": 0.25, "learning_starts": 200, "buffer_size": 1000}
WORLDS |= {"total_timesteps": 1200}
HOPPER = {"env_id": "worlds/Hopper-v5", "physics": "c"}
BF16 = {"bf16": True, "channels_last": True}

ACTIONS = {"acted.synchronize()": 1}
DIVERGENCE = {"if args.target_kl is not None": 1}
PPO_WAITS = row(1, 7) | {
    "self.std = log_std.exp().cpu()": 1,
    "self.arrays = [tensor.cpu()": 12,
    "tensors[name] = torch.as_tensor(": 5,
}
CARTPOLE_WAITS = {
    "row = dict(zip(row, torch.stack(": 1,
    "mean_return = returns.nanmean().item()": 1,
    "self.backend.synchronize()": 1,
}
EACH_ROLLOUT = {
    "last_values = agent.value(torch.as_tensor(obs": 1,
    "columns = {name: column.to(": 3,  # once per rollout: rewards, ended, final_values
    "self.backend.synchronize()": 2,  # the first iteration of the window is a sample
}
EACH_STEP = EACH_ROLLOUT | {"actions = sample.cpu()": 16}
EACH_HALF = EACH_ROLLOUT | {"envs.pool.send(sample.cpu()": 2 * 16}
COPIES = {"return nn.utils.parameters_to_vector(": 1, "tensor.copy_(": 6}
SAC, TD3 = "sac_continuous_action", "td3_continuous_action"
GROUPS = {
    "fast": {
        "SAC": (SAC, OFF_POLICY, ACTIONS | row(1 / SAMPLED, 9)),
        "TD3": (TD3, OFF_POLICY, ACTIONS | row(1 / SAMPLED, 6)),
        "PPO": ("ppo_continuous_action", PPO, PPO_WAITS),
        "CartPole": ("ppo_cartpole_gpu", TENSORS, CARTPOLE_WAITS),
    },
    "slow": {
        "SAC, late policy": (
            SAC,
            OFF_POLICY | {"policy_frequency": 3, "num_envs": 3, "total_timesteps": 180},
            ACTIONS,
        ),
        "TD3, late policy": (TD3, OFF_POLICY | {"policy_frequency": 5, "utd_ratio": 0.5}, None),
        "PPO, --target-kl": (
            "ppo_continuous_action",
            PPO | {"num_envs": 3, "total_timesteps": 384, "target_kl": 1e-9},
            PPO_WAITS | DIVERGENCE,
        ),
        "CartPole, --target-kl": (
            "ppo_cartpole_gpu",
            TENSORS | {"target_kl": 1e-9},
            CARTPOLE_WAITS | DIVERGENCE,
        ),
        "LSTM": ("ppo_lstm", PPO | {"num_envs": 4, "total_timesteps": 4 * 16 * 8}, None),
        "MuJoCo": ("ppo_mujoco_worlds", TENSORS | HOPPER, None),
        "SAC, MuJoCo": ("sac_mujoco_worlds", WORLDS, None),
        "Atari": ("ppo_atari_envpool", ATARI, row(1, 7) | EACH_HALF),
        "Atari, --bf16": ("ppo_atari_envpool", ATARI | BF16, None),
        "PQN": ("pqn_atari_envpool", ATARI, row(1, 3) | EACH_STEP),
        "PQN, --bf16": ("pqn_atari_envpool", ATARI | BF16, None),
        "multi-process": ("ppo_atari_envpool_multigpu", ATARI, row(1, 7) | EACH_STEP),
        "asynchronous": (
            "ppo_continuous_action_async",
            PPO | {"collector_device": "cpu"},
            row(1, 7) | COPIES,
        ),
    },
    "compiled": {
        "SAC": (SAC, OFF_POLICY | {"compile": True}, None),
        "PPO": ("ppo_continuous_action", PPO | {"compile": True}, None),
    },
}
MPS = {  # baselines on another accelerator than CUDA, a Mac's
    "mps": {
        "SAC": (SAC, OFF_POLICY),
        "PPO": ("ppo_continuous_action", PPO),
        "MuJoCo": ("ppo_mujoco_worlds", TENSORS | HOPPER | {"total_timesteps": 64 * 16 * 2}),
    },
    "mps, slow": {
        "TD3": (TD3, OFF_POLICY),
        "LSTM": ("ppo_lstm", PPO | {"num_envs": 4, "total_timesteps": 4 * 16 * 2}),
        "CartPole": ("ppo_cartpole_gpu", TENSORS),
        "SAC, MuJoCo": ("sac_mujoco_worlds", WORLDS | {"total_timesteps": 400}),
        "Atari": ("ppo_atari_envpool", ATARI | {"total_timesteps": 4 * 16 * 2}),
        "PQN": ("pqn_atari_envpool", ATARI | {"total_timesteps": 4 * 16 * 2}),
    },
}


# What runs in the rehearsal


def accuse(function) -> list[str]:
    """What is said of it."""
    from cuda_rehearsal import problems

    problems.clear()
    try:
        if update := function():
            update = CudaGraphModule(update, warmup=3)
            for _ in range(8):
                update()
    except (AssertionError, RuntimeError) as error:
        problems[str(error)] += 1
    return list(problems)


def difference(plain: Path, rehearsed: Path, tolerance: float) -> str | None:
    """The first one between two checkpoints."""
    expected, computed = read_checkpoint(plain), read_checkpoint(rehearsed)
    del expected["args"], computed["args"]
    computed["generators"] = {"cpu": computed["generators"]["cpu"]}  # not the device's
    try:
        return assert_same(computed, expected, tolerance=tolerance)
    except AssertionError as error:
        return str(error)


def rehearse(name: str, script: str, flags: dict) -> dict:
    """A run on the CPU and one "on CUDA" with the same seed: what differs, what was noticed."""
    from cuda_rehearsal import counts, problems, waits

    module = importlib.import_module(f"leanrl.{script}_torchcompile")
    module.LOG_EVERY = SAMPLED
    seen = []

    class Stopwatch(module.Stopwatch):
        def tick(self, env_steps):
            seen.append(dict(waits))
            super().tick(env_steps)

    flags = flags | {"save_model": True}
    torch.cpu.get_capabilities = lambda: {"avx512_bf16": True}  # else --bf16 has no effect there
    with _disable_current_modes():
        plain = module.main(module.Args(**flags, cuda=False, exp_name=name))
    for counter in (counts, problems, waits):
        counter.clear()
    with mock.patch.object(module, "Stopwatch", Stopwatch):
        run_dir = module.main(module.Args(**flags, cudagraphs=True, exp_name=f"{name}, rehearsed"))
    tolerance = 1e-5 if "lstm" in script else 0.0  # on a CPU many steps are one call
    differs = difference(plain, run_dir, tolerance)
    if "learning_starts" in flags and not differs:  # graphs, captured anew, and what is stored
        flags["total_timesteps"] += 20 * flags.get("num_envs", 1)
        with _disable_current_modes():
            plain = module.main(module.Args(**flags, cuda=False, resume=str(plain)))
        resumed = module.main(module.Args(**flags, cudagraphs=True, resume=str(run_dir)))
        differs = difference(plain, resumed, tolerance)
    # the end of the run is no usual iteration, nor is what comes before the steady window
    first, last = (-11 - SAMPLED, -11) if len(seen) > 11 + SAMPLED else (-3, -2)
    rates = []  # the line, and how often an iteration waits there
    for text, count in seen[last].items():
        if more := count - seen[first].get(text, 0):
            file, number = text.split()[0].split(":")
            path = str(Path(module.__file__).with_name(file))
            rates.append((linecache.getline(path, int(number)).strip(), more / (last - first)))
    return {
        "differs": differs,
        "problems": list(problems),
        "replays": counts["replays"],
        "waits": rates,
    }


def rehearse_mps(name: str, script: str, flags: dict) -> dict:
    """As above, of a baseline "on MPS", without graphs; evaluated and resumed, too."""
    from cuda_rehearsal import counts, problems

    module = importlib.import_module(f"leanrl.{script}")
    counts.clear()
    problems.clear()
    flags = flags | {"save_model": True, "eval_every": 10**6, "eval_episodes": 1}
    run_dirs = []
    for device, mode in ("cpu", _disable_current_modes()), ("mps", nullcontext()):
        with mode:
            run_dir = module.main(module.Args(**flags, device=device, exp_name=f"{name}, {device}"))
            more = flags | {"total_timesteps": flags["total_timesteps"] * 3 // 2}
            module.main(module.Args(**more, device=device, resume=str(run_dir)))
        run_dirs.append(run_dir)
    differs = difference(*run_dirs, 0.0)
    return {"differs": differs, "problems": list(problems), "launches": counts["launches"] > 0}


# What was found there


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the rehearsal of a group of scripts has found."""
    folder = tmp_path_factory.mktemp("rehearsed")

    @functools.cache
    def run(group: str) -> dict:
        options = ("--backend", "aot_eager") if group == "compiled" else ()
        options = ("--accelerator", "mps") if group in MPS else options
        command = [sys.executable, REHEARSAL, *options, __file__, group, f"{group}.json"]
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr
        file = folder / f"{group}.json"
        return json.loads(file.read_text()) if file.exists() else said[-3000:]

    def found(group: str) -> dict:
        result = run(group)
        assert isinstance(result, dict), result
        return result

    return found


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_bug_is_named_by_its_line(bug, found):
    said, *_ = found("fast")["bugs"][bug.__name__]
    file, number, text = said.split(":", 2)
    assert linecache.getline(__file__, int(number)).endswith("# bug\n") and file in __file__
    assert BUGS[bug] in text


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.__name__)
def test_right_code_is_not_accused(right, found):
    assert found("fast")["bugs"][right.__name__] == []


SCRIPTS, WAITING = [], []
for its_group, runs in GROUPS.items():
    its_marks = () if its_group == "fast" else (pytest.mark.slow,)
    for its_name, (*_, its_waits) in runs.items():
        SCRIPTS.append(pytest.param(its_group, its_name, marks=its_marks))
        if its_waits:
            WAITING.append(SCRIPTS[-1])


@pytest.mark.parametrize(("group", "name"), SCRIPTS)
def test_cuda_computes_what_the_cpu_does(group, name, found):
    """Every bit of the checkpoint, through warm-up, captures and replays."""
    assert found(group)[name]["problems"] == []
    assert found(group)[name]["differs"] is None
    assert found(group)[name]["replays"] >= 10


ON_MPS = [pytest.param("mps", name) for name in MPS["mps"]]
ON_MPS += [pytest.param("mps, slow", name, marks=pytest.mark.slow) for name in MPS["mps, slow"]]


@pytest.mark.parametrize(("group", "name"), ON_MPS)
def test_another_accelerator_computes_what_the_cpu_does(group, name, found):
    """All is where --device says, nothing asks for CUDA, and no float64 is needed."""
    assert found(group)[name] == {"differs": None, "problems": [], "launches": True}


@pytest.mark.parametrize(("group", "name"), WAITING)
def test_host_waits_no_more_than_it_has_to(group, name, found):
    expected, waits = GROUPS[group][name][-1], found(group)[name]["waits"]
    assert all(line.startswith(tuple(expected)) for line, _ in waits), waits
    for start, rate in expected.items():
        found_rate = sum(r for line, r in waits if line.startswith(start))
        assert found_rate == pytest.approx(rate), waits


# The tests for GPUs, but for those of the kernel, of Kineto, of Warp, and of CUDA elsewhere

OF_ELSEWHERE = ("test_async", "test_env_kernel", "test_mujoco", "test_profile", Path(__file__).stem)
WITH_GPUS = []
for its_path in sorted(Path(__file__).parent.glob("test_*.py")):
    if "mark.gpu" in its_path.read_text() and not its_path.stem.startswith(OF_ELSEWHERE):
        WITH_GPUS.append([its_path.name])
for its_how in ("eager", "graphs"):
    its_test = f"test_devices_do_not_change_what_is_learned[{its_how}-('cuda', 'cpu')]"
    WITH_GPUS.append([f"test_async.py::{its_test}"])
SHORT = [
    f"test_parity.py::test_captured_updates_agree[{case}]" for case in ("eager-sac", "eager-ppo")
]


@pytest.mark.parametrize(
    "tests",
    [SHORT, *(pytest.param(tests, marks=pytest.mark.slow) for tests in WITH_GPUS)],
    ids=" ".join,
)
def test_tests_for_gpus_pass(tests):
    """Nothing is compiled there, so what is called compiled would be the same again."""
    command = [sys.executable, REHEARSAL, *"-m pytest -q -p no:cacheprovider -m gpu".split()]
    command += ["-k", "not compiled", *(f"tests/{test}" for test in tests)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


# The study's kernel


class Nvrtc:
    """NVRTC from the package nvidia-cuda-nvrtc; keeps what ptxas has said."""

    def __init__(self):
        spec = find_spec("nvidia")
        folders = map(Path, spec.submodule_search_locations if spec else ())
        paths = [path for folder in folders for path in sorted(folder.glob("*/lib/libnvrtc*.so.*"))]
        if not paths:
            pytest.skip("needs the package nvidia-cuda-nvrtc")
        *_, self.library = (ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths)

    def __getattr__(self, name):
        return getattr(self.library, name)

    def nvrtcDestroyProgram(self, program):
        text = ctypes.create_string_buffer(100_000)
        self.library.nvrtcGetProgramLog(program._obj, text)
        self.log = text.value.decode()
        return self.library.nvrtcDestroyProgram(program)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)], ids=str)
def test_kernel_compiles_for_gpus_that_are_not_here(capability, monkeypatch):
    """By torch's own way to NVRTC, without a CUDA toolkit, and all variables fit in registers."""
    import env_kernel  # found by way of conftest.py, which the rehearsal has not loaded yet

    nvrtc, utils, loaded = Nvrtc(), torch.cuda._utils, []
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(utils, "_get_gpu_rtc_library", lambda: nvrtc)
    monkeypatch.setattr(utils, "_get_gpu_rtc_compatible_flags", lambda: ["--ptxas-options=-v"])
    monkeypatch.setattr(utils, "_cuda_load_module", lambda *x: loaded.append(x) or {"step": None})
    for substeps in (1, 64):
        env_kernel.build_kernel.__wrapped__("cuda", substeps)  # not the cached one of another GPU
        cubin, names = loaded.pop()
        assert cubin.startswith(b"\x7fELF") and names == ["step"]
        assert "0 bytes spill stores, 0 bytes spill loads" in nvrtc.log


if __name__ == "__main__":
    group, out = sys.argv[1:]
    torch.set_num_threads(1)  # as --compile does for good: the number is part of what is computed
    if group in MPS:
        found = {name: rehearse_mps(name, *run) for name, run in MPS[group].items()}
    else:
        found = {name: rehearse(name, *run[:2]) for name, run in GROUPS[group].items()}
        found["bugs"] = {function.__name__: accuse(function) for function in (*BUGS, *RIGHT)}
    Path(out).write_text(json.dumps(found))
