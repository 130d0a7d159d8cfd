"""What Triton makes of a variant's kernels for a GPU that is not here.

    pip install triton==3.8.0
    python tests/inductor_for_cuda.py [NAME in tests/pairs.py, otherwise sac] [compute capability]

test_triton.py lets Inductor write the kernels; Triton compiles them with the ptxas that it brings
along. For each kernel the first configuration's registers, bytes of stack, where spills go, and of
shared memory. None is run. To be started by hand, with torch 2.13.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget

COMPARISON = Path(__file__).with_name("test_triton.py")
DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def write_kernels(pair: str, folder: str) -> dict[str, str]:
    """The source of each kernel that the pair's variant would launch, by name."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
    command = [sys.executable, COMPARISON, pair, "keep_sizes"]
    subprocess.run(command, env=environment, check=True)
    sources = {}
    for path in sorted(Path(folder).rglob("*.py")):
        found = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", path.read_text(), re.S)
        sources.update(found)
    return sources


def pretend(capability: int) -> str:
    """A GPU, to what asks for one while kernels are compiled -> its properties in a source."""
    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None
    torch._inductor.config.use_static_triton_launcher = False
    return f"DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc={capability})"


def usage(kernel) -> dict[str, str]:
    """REG, STACK, SHARED and so on of its first configuration."""
    result = kernel._precompile_config(kernel.configs[0])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.kernel.asm["cubin"])
        file.flush()
        command = [DUMP, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"(\w+):(\d+)", said))


def main(pair: str = "sac", capability: str = "90") -> None:
    with tempfile.TemporaryDirectory() as folder:
        sources = write_kernels(pair, folder)
    properties = pretend(int(capability))
    for name, source in sources.items():
        source = re.sub(r"DeviceProperties\([^)]*\)", properties, source)
        used = usage(getattr(PyCodeCache.load(source), name))
        print(f"{name:60}", *(f"{used[key]:>6} {key}" for key in ("REG", "STACK", "SHARED")))


if __name__ == "__main__":
    main(*sys.argv[1:])
