"""Shared by all tests: the scripts as modules, the markers `slow` and `gpu`, the flag --slow."""

import atexit
import functools
import gc
import signal
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from tensorboard.summary.writer import event_file_writer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / x) for x in (".", "leanrl", "plots", "plots/measure")]


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the learning tests (minutes)")


def pytest_configure(config):
    # an agent that is collected during another one's capture would end it; see torch.cuda.graph
    torch.compiler.config.force_cudagraph_gc = True
    # Files of a second are read in the order of their numbers as text, where 10 is before 9
    event_file_writer._global_uid = event_file_writer.AtomicCounter(1000)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if started in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and so by what tests start


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="runs with --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def no_gpu(request, monkeypatch):
    """But for the tests of one: others compare with the CPU, also in processes that they start."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def no_old_graphs(request):
    """Nor would Warp's capture outlive the collection of a graph of a test before."""
    if "gpu" in request.keywords:
        gc.collect()


@pytest.fixture(autouse=True)
def failed_runs_end_with_their_test(monkeypatch):
    """A run that an error has ended keeps its signals, and writes its records at the exit."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    register = atexit.register

    def register_unless_run(function, *rest, **options):
        if type(getattr(function, "__self__", None)).__name__ != "Run":
            register(function, *rest, **options)

    monkeypatch.setattr(atexit, "register", register_unless_run)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def kernels_called_from_python():
    """What compiled scripts set for their whole process: each test file starts without."""
    yield
    if config := sys.modules.get("torch._inductor.config"):
        config.cpp_wrapper = False
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)


@pytest.fixture
def one_thread():
    """PyTorch computes with one, and afterwards with as many as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def float64():
    """Long comparisons need it: in float32 even an algorithm and itself drift apart.

    Where a hidden unit is about to switch, its last bit decides whether Adam moves its weights by a
    whole learning rate: the baseline and itself, one rounding away, can end 1e-3 apart.
    """
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def smooth(tmp_path, monkeypatch):
    """The id of `helpers.Smooth`, whose runs go to tmp_path."""
    monkeypatch.chdir(tmp_path)
    gym.register("Smooth-v0", entry_point="helpers:Smooth")
    yield "Smooth-v0"
    gym.registry.pop("Smooth-v0")


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request, monkeypatch):
    """What runs compiled functions: the operations that were traced, or code generated for them.

    Generating it takes half a minute of the compiler's time for a script.
    """
    compiler = functools.partial(torch.compile, backend=request.param)
    monkeypatch.setattr(torch, "compile", compiler)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return request.param


@pytest.fixture
def registry(monkeypatch):
    """What a test registers with Gymnasium is forgotten."""
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))


@pytest.fixture
def joystick(monkeypatch, registry):
    """The environment of leanrl/tasks/joystick.py, not yet registered."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "leanrl/tasks")
    monkeypatch.delitem(sys.modules, "joystick", raising=False)
    return "joystick:AntJoystick-v0"
