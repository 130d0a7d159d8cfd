"""The CUDA paths without a GPU: what cuda_rehearsal.py notices, and the scripts under it.

It changes torch for good, so this file is also the program that is rehearsed, in a process of its
own for each group of scripts. What it finds there is a file of JSON, which the tests read.
"""

import ctypes
import functools
import importlib
import inspect
import json
import linecache
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from helpers import assert_same
from torch.utils import cpp_extension

REHEARSAL = str(ROOT / "tests" / "cuda_rehearsal.py")
N = 4


# Each of these works on a CPU; on a GPU the line that ends in `# bug` does not


def graphed(function):
    """A CUDA graph, wrapped as in the scripts."""
    from tensordict.nn import CudaGraphModule

    return CudaGraphModule(function, warmup=3)


def item_in_an_update():
    weights = torch.ones(N, device="cuda")

    def update():
        weights.mul_(1 / weights.norm().item())  # bug

    update = graphed(update)
    for _ in range(8):
        update()


def size_as_int():
    data, size = torch.ones(100, device="cuda"), 0

    def draw():
        return data[(torch.rand(N, device="cuda") * size).long()]  # bug

    draw = graphed(draw)
    for _ in range(8):
        size += 1
        draw()


def learning_rate_as_float():
    weights, learning_rate = torch.ones(N, device="cuda"), 0.5

    def update():
        weights.sub_(weights, alpha=learning_rate)  # bug

    update = graphed(update)
    for _ in range(8):
        learning_rate /= 2
        update()


def step_count_as_int():
    weights, step = torch.ones(N, device="cuda"), 0

    def update():
        nonlocal step
        step += 1
        weights.div_(1 - 0.9**step)  # bug

    update = graphed(update)
    for _ in range(8):
        update()


def branch_on_a_count():
    weights, step = torch.ones(N, device="cuda"), 0

    def update():
        if step % 2:
            weights.neg_()  # bug
        weights.mul_(2)

    update = graphed(update)
    for step in range(9):  # noqa: B007 which update reads
        update()


def state_bound_anew():
    total, ones = torch.zeros(N, device="cuda"), torch.ones(N, device="cuda")

    def update(x):
        nonlocal total
        total = total + x  # bug

    update = graphed(update)
    for _ in range(8):
        update(ones)


def host_constant():
    weights, scale = torch.ones(N, device="cuda"), torch.tensor(1.0)

    def update():
        weights.mul_(scale)  # bug

    update = graphed(update)
    for _ in range(8):
        scale += 1
        update()


def unregistered_generator():
    generator = torch.Generator("cuda").manual_seed(1)

    def draw():
        return torch.rand(N, device="cuda", generator=generator)  # bug

    draw = graphed(draw)
    for _ in range(8):
        draw()


def generator_of_the_cpu():
    torch.rand(N, device="cuda", generator=torch.Generator())  # bug


def pinned_memory_overwritten_early():
    host, data = torch.zeros(N).pin_memory(), torch.zeros(N, device="cuda")
    for step in range(2):
        host.fill_(step)
        data.copy_(host, non_blocking=True)  # bug
    torch.cuda.synchronize()


def upload_in_a_graph():
    data = torch.zeros(N, device="cuda")
    update = graphed(lambda: data.copy_(torch.ones(N)))  # bug
    for _ in range(8):
        update()


def forgotten_cpu():
    torch.ones(N, device="cuda").numpy()  # bug


def buffer_on_the_cpu():
    torch.ones(N, device="cuda") + torch.ones(N)  # bug


def number_of_the_cpu():
    torch.stack([torch.ones((), device="cuda"), torch.ones(())])  # bug


def read_too_early():
    ones = torch.ones(N, device="cuda").to("cpu", non_blocking=True)
    assert not ones.isnan().any(), "the copy is not over"  # bug


BUGS = {
    item_in_an_update: "the host waits during a capture",
    size_as_int: "mul in the graph keeps 3, Python now has 4",
    learning_rate_as_float: "sub_ in the graph keeps 0.0625, Python now has 0.03125",
    step_count_as_int: "div_ in the graph keeps 0.3439, Python now has 0.4095",
    branch_on_a_count: "the graph calls mul_, Python would now call neg_",
    state_bound_anew: "add in the graph keeps a tensor at",
    host_constant: "mul_ in the graph keeps 4.0 from the CPU, Python now has 5.0",
    unregistered_generator: "the generator is not registered",
    generator_of_the_cpu: "expected a generator of CUDA",
    pinned_memory_overwritten_early: "pinned memory was overwritten before this copy was over",
    upload_in_a_graph: "a copy from the CPU during a capture",
    forgotten_cpu: "numpy: the tensor is on CUDA",
    buffer_on_the_cpu: "expected all tensors to be on the same device",
    number_of_the_cpu: "stack: expected all tensors to be on the same device",
    read_too_early: "the copy is not over",
}

# Each of these is right on a GPU, too


def gradient_of_other_strides():
    """Autograd makes memory of its own for a gradient that is transposed."""
    weights = torch.ones(N, N, device="cuda", requires_grad=True)
    (weights.t().contiguous() * torch.ones(N, N, device="cuda")).sum().backward()
    torch._foreach_add_([weights.grad], [weights.detach()])


def number_copied():
    learning_rate = torch.ones((), device="cuda")
    learning_rate.copy_(0.5)
    assert learning_rate.item() == 0.5


RIGHT = (gradient_of_other_strides, number_copied)

# Scripts and flags. Rollouts and updates go on for a while after all graphs are captured

OFF_POLICY = {"env_id": "Pendulum-v1", "batch_size": 32, "learning_starts": 100}
OFF_POLICY |= {"buffer_size": 1000, "total_timesteps": 330}
ON_POLICY = {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
PPO = ON_POLICY | {"env_id": "Pendulum-v1", "total_timesteps": 16 * 8}
TENSORS = ON_POLICY | {"num_envs": 64, "total_timesteps": 64 * 16 * 8}
ATARI = ON_POLICY | {"num_envs": 4, "total_timesteps": 4 * 16 * 6}
WORLDS = {"env_id": "worlds/InvertedPendulum-v5", "physics": "c", "num_envs": 8}
WORLDS |= {"batch_size": 32, "utd_ratio": 0.25, "learning_starts": 200, "buffer_size": 1000}
WORLDS |= {"total_timesteps": 1200}
HOPPER = {"env_id": "worlds/Hopper-v5", "physics": "c"}
SAC, TD3 = "sac_continuous_action", "td3_continuous_action"
GROUPS = {
    "fast": {
        "SAC": (SAC, OFF_POLICY),
        "TD3": (TD3, OFF_POLICY),
        "PPO": ("ppo_continuous_action", PPO),
        "CartPole": ("ppo_cartpole_gpu", TENSORS),
    },
    "slow": {
        "SAC, late policy": (SAC, OFF_POLICY | {"policy_frequency": 3, "num_envs": 3}),
        "TD3, late policy": (TD3, OFF_POLICY | {"policy_frequency": 5, "utd_ratio": 0.5}),
        "PPO, 3 environments": (
            "ppo_continuous_action",
            PPO | {"num_envs": 3, "total_timesteps": 384},
        ),
        "PPO, --target-kl": ("ppo_continuous_action", PPO | {"target_kl": 1e-9}),
        "CartPole, --target-kl": ("ppo_cartpole_gpu", TENSORS | {"target_kl": 1e-9}),
        "MuJoCo": ("ppo_mujoco_worlds", TENSORS | HOPPER),
        "SAC, MuJoCo": ("sac_mujoco_worlds", WORLDS),
        "Atari": ("ppo_atari_envpool", ATARI),
        "Atari, --bf16": ("ppo_atari_envpool", ATARI | {"bf16": True}),
        "Atari, --channels-last": ("ppo_atari_envpool", ATARI | {"channels_last": True}),
        "PQN": ("pqn_atari_envpool", ATARI),
        "PQN, --bf16": ("pqn_atari_envpool", ATARI | {"bf16": True, "channels_last": True}),
        "multi-process": ("ppo_atari_envpool_multigpu", ATARI),
        "asynchronous": ("ppo_continuous_action_async", PPO | {"collector_device": "cpu"}),
    },
    "compiled": {
        "SAC": (SAC, OFF_POLICY | {"compile": True}),
        "TD3": (TD3, OFF_POLICY | {"compile": True}),
        "PPO": ("ppo_continuous_action", PPO | {"compile": True}),
    },
}


# What runs in the rehearsal


def try_bug(bug) -> list[str]:
    """What it is accused of."""
    from cuda_rehearsal import problems

    problems.clear()
    try:
        bug()
    except (AssertionError, RuntimeError) as error:
        problems[str(error)] += 1
    return list(problems)


def rehearse(name: str, script: str, flags: dict) -> dict:
    """A run on the CPU and one "on CUDA" with the same seed: what differs, what was noticed."""
    from cuda_rehearsal import counts, problems, waits

    module = importlib.import_module(f"leanrl.{script}_torchcompile")
    real_stopwatch, seen = module.Stopwatch, []

    class Stopwatch(real_stopwatch):
        def tick(self, env_steps):
            seen.append(dict(waits))
            super().tick(env_steps)

    flags = flags | {"save_model": True}
    torch.cpu.get_capabilities = lambda: {"avx512_bf16": True}  # else --bf16 has no effect there
    plain = module.main(module.Args(**flags, cuda=False, exp_name=name))
    for counter in (counts, problems, waits):
        counter.clear()
    module.Stopwatch = Stopwatch
    run_dir = module.main(module.Args(**flags, cudagraphs=True, exp_name=f"{name}, rehearsed"))
    module.Stopwatch = real_stopwatch
    checkpoints = [torch.load(path / "checkpoint.pt") for path in (plain, run_dir)]
    for checkpoint in checkpoints:
        del checkpoint["args"]
    try:
        assert_same(*checkpoints)
        differs = None
    except AssertionError as error:
        differs = str(error)
    found = {"differs": differs, "problems": list(problems), "replays": counts["replays"]}
    # the end of the run is no usual iteration, nor is what comes before the steady window
    first, last = (-111, -11) if len(seen) > 111 else (-3, -2)
    found["waits"] = []  # the line, and how often an iteration waits there
    for text, count in seen[last].items():
        if count > seen[first].get(text, 0):
            file, number = text.split()[0].split(":")
            path = str(Path(module.__file__).with_name(file))
            rate = (count - seen[first].get(text, 0)) / (last - first)
            found["waits"].append((linecache.getline(path, int(number)).strip(), rate))
    return found


# What was found there


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the rehearsal of a group of scripts has found."""

    folder = tmp_path_factory.mktemp("rehearsed")

    @functools.cache
    def run(group: str) -> str:
        options = ("--backend", "aot_eager") if group == "compiled" else ()
        command = [sys.executable, REHEARSAL, *options, __file__, group, f"{group}.json"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr

    def found(group: str) -> dict:
        said, file = run(group), folder / f"{group}.json"
        assert file.exists(), said[-3000:]
        return json.loads(file.read_text())

    return found


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_named_by_its_line(bug, found):
    lines, first = inspect.getsourcelines(bug)
    line = first + next(i for i, text in enumerate(lines) if text.rstrip().endswith("# bug"))
    said = found("fast")["bugs"][bug.__name__]
    here = "" if bug is read_too_early else f"{Path(__file__).name}:{line}"
    assert any(here in text and BUGS[bug] in text for text in said), said


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.__name__)
def test_what_is_right_is_not_accused(right, found):
    assert found("fast")["bugs"][right.__name__] == []


def scripts(names=None):
    for group in GROUPS:
        marks = () if group == "fast" else (pytest.mark.slow,)
        chosen = [name for name in GROUPS[group] if names is None or name in names]
        yield from (pytest.param(group, name, marks=marks) for name in chosen)


@pytest.mark.parametrize(("group", "name"), list(scripts()))
def test_a_script_on_cuda_computes_what_it_computes_on_the_cpu(group, name, found):
    """Every bit of the checkpoint, through warm-up, captures and replays."""
    assert found(group)[name]["problems"] == []
    assert found(group)[name]["differs"] is None
    assert found(group)[name]["replays"] >= 10


# Per step of SAC and TD3, otherwise per rollout: for what acts elsewhere, and for rows of metrics,
# of which the first read waits and the others find what they want
def row(rate: float, count: int) -> dict:
    waits = rate if rate == 1 else 2 * rate  # many short iterations: one of them is a sample
    return {"row = {tag: float(value)": rate * count, "torch.cuda.synchronize()": waits}


ACTIONS = {"actions = agent.act(inputs, noise).cpu()": 1}
DIVERGENCE = {"if args.target_kl is not None": 1}
PARAMETERS = {"self.std = log_std.exp().cpu()": 1, "self.arrays = [tensor.cpu()": 12}
PPO_WAITS = row(1, 7) | PARAMETERS | {"tensors[name] = torch.as_tensor(": 5}
CARTPOLE_WAITS = row(1, 7) | {"mean_return = returns.nanmean().item()": 1}
EACH_STEP = {"actions = sample.cpu()": 16, "last_values = agent.value(torch.as_tensor(obs": 1}
EACH_STEP |= {"columns = {name: column.to(": 3}  # once per rollout: rewards, ended, final_values
EACH_STEP |= {"torch.cuda.synchronize()": 2}  # the first iteration of the window is a sample
WAITS = {
    "SAC": ACTIONS | row(0.01, 9),
    "TD3": ACTIONS | row(0.01, 6),
    "PPO": PPO_WAITS,
    "CartPole": CARTPOLE_WAITS,
    "SAC, late policy": ACTIONS,
    "PPO, 3 environments": PPO_WAITS,
    "PPO, --target-kl": PPO_WAITS | DIVERGENCE,
    "CartPole, --target-kl": CARTPOLE_WAITS | DIVERGENCE,
    "Atari": row(1, 7) | EACH_STEP,
    "PQN": row(1, 3) | EACH_STEP,
    "multi-process": row(1, 7) | EACH_STEP,
    "asynchronous": row(1, 7) | {"return nn.utils.parameters_to_vector(": 1, "tensor.copy_(": 6},
}


@pytest.mark.parametrize(("group", "name"), list(scripts(WAITS)))
def test_the_host_waits_no_more_than_it_has_to(group, name, found):
    expected, waits = WAITS[name], found(group)[name]["waits"]
    assert all(line.startswith(tuple(expected)) for line, _ in waits), waits
    for start, rate in expected.items():
        found_rate = sum(r for line, r in waits if line.startswith(start))
        assert found_rate == pytest.approx(rate), waits


# The tests for GPUs, but for those of the kernel, of Kineto, and of CUDA in another process

LEARNER_ON_CUDA = [
    f"test_async.py::test_devices_do_not_change_what_is_learned[{how}-('cuda', 'cpu')]"
    for how in ("eager", "graphs")
]
WORLDS_ON_C = ["test_mujoco.py::test_graphed_runs_agree_with_eager"]  # Warp needs a real GPU


@pytest.mark.parametrize(
    "files",
    [
        ("test_ppo.py", "test_sac_parity.py"),
        pytest.param(("test_td3.py", "test_cartpole.py", "test_resume.py"), marks=pytest.mark.slow),
        pytest.param(("test_sac.py", "test_atari.py", "test_pqn.py"), marks=pytest.mark.slow),
        pytest.param(("test_multigpu.py",), marks=pytest.mark.slow),
        pytest.param(LEARNER_ON_CUDA, marks=pytest.mark.slow),
        pytest.param(WORLDS_ON_C, marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_what_is_tested_on_a_gpu_passes_in_a_rehearsal(files):
    command = [sys.executable, REHEARSAL, *"-m pytest -q -p no:cacheprovider -m gpu".split()]
    command += [f"tests/{file}" for file in files]
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
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(program._obj, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(program._obj, text)
        self.log = text.value.decode()
        return self.library.nvrtcDestroyProgram(program)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("substeps", [1, 64])
def test_the_kernel_compiles_for_gpus_that_are_not_here(substeps, capability, monkeypatch):
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
    env_kernel.build_kernel.__wrapped__("cuda", substeps)  # not the cached one of another GPU
    ((cubin, names),) = loaded
    assert cubin.startswith(b"\x7fELF") and names == ["step"]
    assert "0 bytes spill stores, 0 bytes spill loads" in nvrtc.log
    print(nvrtc.log)


if __name__ == "__main__":
    group, out = sys.argv[1:]
    torch.set_num_threads(1)  # as --compile does for good: the number is part of what is computed
    found = {name: rehearse(name, *script) for name, script in GROUPS.get(group, {}).items()}
    found["bugs"] = {bug.__name__: try_bug(bug) for bug in (*BUGS, *RIGHT)}
    Path(out).write_text(json.dumps(found))
