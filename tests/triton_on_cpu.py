"""torch.compile gets Triton's code as for a GPU (sm_90), and Triton's interpreter runs it.

    python tests/test_triton.py sac

Inductor takes the CPU's tensors for those of a GPU and writes the kernels that a GPU would get; the
interpreter runs them, block by block, in NumPy. Products and convolutions go to ATen, as on a GPU
they go to cuBLAS and cuDNN. Importing this changes torch and Triton for the whole process, in
places that are not public, as they are in torch 2.13 and triton 3.8.

It cannot show races between blocks, which run one after another, nor shared memory, nor speed.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
import torch._inductor.config as inductor
import triton
import triton.language as tl
from torch._inductor.async_compile import AsyncCompile  # noqa: F401 the tests'
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

BLOCKS = {  # of an axis: its name in size_hints, and the most that we take, which Inductor allows
    "R0_BLOCK": ("r0_", 4096),
    "XBLOCK": ("x", 4096),
    "YBLOCK": ("y", 1024),
}
launches = Counter()  # of each kernel, by its name
ran = {}  # compiled function -> whether it has been called

# Functions of NVIDIA's library that Inductor's code calls. They look `tl` up in each call, since
# the interpreter puts its own functions there.
LIBDEVICE = SimpleNamespace(
    tanh=lambda x: 2 * tl.sigmoid(2 * x) - 1,
    exp=lambda x: tl.exp(x),
    log=lambda x: tl.log(x),
    log1p=lambda x: tl.log(1 + x),
    pow=lambda x, y: tl.exp(y * tl.log(x)),  # of what is above 0
    sqrt=lambda x: tl.sqrt(x),
    rsqrt=lambda x: 1 / tl.sqrt(x),
    sin=lambda x: tl.sin(x),
    cos=lambda x: tl.cos(x),
    isnan=lambda x: x != x,
    isinf=lambda x: tl.abs(x) == float("inf"),
)


def patch_once(patch):
    """The interpreter puts its functions into `tl` once per kernel, not for each helper."""
    patched = set()

    def patch_what_is_not(function):
        modules = set()
        for value in function.__globals__.values():
            if value is tl or value is tl.core:
                modules.add(value.__name__)
        if modules <= patched:
            return SimpleNamespace(restore=lambda: None)
        patched.update(modules)
        scope = patch(function)

        def restore():
            patched.difference_update(modules)
            scope.restore()

        return SimpleNamespace(restore=restore)

    return patch_what_is_not


def convert(convert_others, value):
    """Inductor hands over a CPU tensor of one number as a float, which the interpreter forgets."""
    if isinstance(value, float):
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.block_type(tl.float32, [1]))
    return convert_others(value)


def enlarge(sizes: dict, hints: dict) -> None:
    """Blocks as large as Triton allows: each block costs the interpreter milliseconds.

    A reduction that one block takes whole has a size hint, but no block size.
    """
    blocks = {}
    for name, (axis, _) in BLOCKS.items():
        blocks[name] = sizes.get(name, hints.get(axis, 1))
    for name, (axis, most) in BLOCKS.items():
        if name in sizes:
            others = math.prod(blocks.values()) // blocks[name]
            room = tl.TRITON_MAX_TENSOR_NUMEL // others
            blocks[name] = sizes[name] = max(sizes[name], min(most, room, hints[axis]))


def launch(run, kernel, *args, **kwargs):
    kernel.configs = kernel.configs[:1]
    if kernel.size_hints:  # which one over a list of tensors has not
        enlarge(kernel.configs[0].kwargs, kernel.size_hints)
    launches[kernel.fn.__name__] += 1
    return run(kernel, *args, **kwargs)


def compile_for_gpu(compile_function, function, **kwargs):
    inductor.cpp_wrapper = False  # as the scripts have it on a GPU
    compiled = compile_function(function, **kwargs)
    name = getattr(function, "__qualname__", str(function))  # a module has none
    ran[name] = False

    def call(*inputs, **named):
        ran[name] = True
        return compiled(*inputs, **named)

    return call


target = GPUTarget("cuda", 90, 32)
driver = SimpleNamespace(
    get_current_target=lambda: target,
    get_current_device=lambda: 0,
    get_active_torch_device=lambda: torch.device("cpu"),
)
triton.runtime.driver.set_active(driver)
inductor.cpu_backend = "triton"
inductor.compile_threads = 1
triton_helpers.libdevice = LIBDEVICE
interpreter._patch_lang = patch_once(interpreter._patch_lang)
interpreter._implicit_cvt = partial(convert, interpreter._implicit_cvt)
run_kernel = CachingAutotuner.run
CachingAutotuner.run = lambda kernel, *args, **kwargs: launch(run_kernel, kernel, *args, **kwargs)
torch.compile = partial(compile_for_gpu, torch.compile)
