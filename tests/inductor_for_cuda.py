"""What Inductor and Triton make of SAC's compiled updates for a GPU that is not here.

    pip install triton==3.8.0
    python tests/inductor_for_cuda.py [compute capability, otherwise 90]

The updates are traced on the CPU, then every tensor of the graph becomes a fake one on CUDA. Of
that Inductor writes Triton kernels, and Triton compiles them with the ptxas that it brings along:
for each kernel the first configuration's registers and bytes of stack, where spills go. None is
run. First HalfCheetah's sizes, then Pendulum's in small batches, with which torch 2.11 fails if
`loop_ordering_after_fusion` is true. To be started by hand: it takes a minute and the place of
functions of torch and of Triton that are not public, as they are in torch 2.11 and 2.13, triton 3.6
and 3.8.
"""

import copy
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
import torch.utils._triton
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parents[1]))
from leanrl import sac_continuous_action_torchcompile as script  # noqa: E402

CUDA = torch.device("cuda", 0)
SIZES = {"HalfCheetah": (17, 6, 256), "Pendulum": (3, 1, 32)}  # observation, action, batch


def trace(task: str) -> dict[str, tuple]:
    """The graphs of SAC's updates as they are on a CPU, and example inputs of each."""
    obs_dim, action_dim, batch_size = SIZES[task]
    traced, real_compile = [], torch.compile

    def keep(graph, inputs):
        traced.append((copy.deepcopy(graph), inputs))
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, decompositions=select_decomp_table())
    torch.compile = lambda *args, **kwargs: real_compile(*args, **kwargs | {"backend": backend})
    bound = np.ones(action_dim, np.float32)
    space = gym.spaces.Box(-bound, bound)
    agent = script.SAC(script.Args(), obs_dim, space, torch.device("cpu"))
    script.compile_agent(agent)
    torch._inductor.config.cpp_wrapper = False  # as the script has it on a GPU
    sizes = obs_dim, obs_dim, action_dim, action_dim
    obs, next_obs, noise, actions = (torch.rand(batch_size, size) for size in sizes)
    rows = {"obs": obs, "next_obs": next_obs, "actions": actions}
    zeros = torch.zeros(batch_size)
    batch = script.Batch(**{name: rows.get(name, zeros) for name in script.Batch._fields})
    agent.update_critic(batch, noise)
    agent.update_actor(obs, noise)
    torch.compile = real_compile
    torch._dynamo.reset()  # else sizes of the next task become symbols
    return dict(zip(("update_critic", "update_actor"), traced, strict=True))


def pretend(capability: int) -> None:
    """A GPU, to what asks for one while code is generated."""
    properties = SimpleNamespace(
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=132,
        regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        **dict.fromkeys(("name", "gcnArchName"), "none"),
    )
    answers = {"is_available": True, "device_count": 1, "current_device": 0}
    answers |= {"get_device_properties": properties, "_lazy_init": None}
    answers |= {"_exchange_device": 0, "_maybe_exchange_device": 0, "current_stream": None}
    answers |= {"get_device_capability": (properties.major, properties.minor)}
    answers |= {"get_rng_state": torch.zeros(1), "set_rng_state": None, "synchronize": None}
    for name, value in answers.items():

        def answer(*_, value=value, **__):
            return value

        setattr(torch.cuda, name, answer)
        if hasattr(CudaInterface, name) and name != "is_available":
            setattr(CudaInterface, name, staticmethod(answer))
    torch.utils._triton.has_triton.cache_clear()
    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None
    fake_tensor.init_gpu_context = lambda *_: None


def generate(graph: torch.fx.GraphModule, inputs: list) -> str:
    """What Inductor writes for the graph, on fake tensors of CUDA instead of those of the CPU."""

    def move(x):
        return CUDA if isinstance(x, torch.device) else x

    for node in graph.graph.nodes:
        node.args, node.kwargs = tree_map(move, (node.args, node.kwargs))
    graph.recompile()
    written = []

    def stop(self):
        written.append(self.codegen()[0].value)
        raise InterruptedError

    GraphLowering._compile_to_module = stop
    with FakeTensorMode() as mode:
        layouts = [(x.shape, x.stride(), x.dtype) for x in inputs]
        inputs = [torch.empty_strided(*xy, dtype=t, device=CUDA) for *xy, t in layouts]
    with torch._C._AutoDispatchBelowAutograd(), V.set_fake_mode(mode):  # a CPU's autograd
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
        try:
            compile_fx_inner(graph, inputs)
        except torch._inductor.exc.InductorError:
            if not written:  # another error than the one above
                raise
    return written[0]


def report(code: str) -> None:
    """A line per kernel: its registers, bytes of stack and shared memory."""
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S):
        kernel = getattr(PyCodeCache.load(source), name)
        result = kernel._precompile_config(kernel.configs[0])
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(result.kernel.asm["cubin"])
            file.flush()
            command = [dump, "--dump-resource-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", said))
        print(f"{name:60}", *(f"{usage[key]:>6} {key}" for key in ("REG", "STACK", "SHARED")))


if __name__ == "__main__":
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.use_static_triton_launcher = False
    traced = {task: trace(task) for task in SIZES}
    pretend(int(sys.argv[1]) if len(sys.argv) > 1 else 90)
    for task, graphs in traced.items():
        for name, (graph, inputs) in graphs.items():
            code = generate(graph, inputs)
            print(f"{task}, {name}: {code.count('extern_kernels.')} calls of libraries")
            report(code)
