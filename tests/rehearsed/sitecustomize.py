"""With this folder in PYTHONPATH every Python process has the CUDA of cuda_rehearsal.py.

So a program and all that it starts can be rehearsed. What a process gets wrong is a line of its
file in $REHEARSED_PROBLEMS. Threads are told apart by PyTorch: only the first one is watched.
"""

import atexit
import os
import sys
from pathlib import Path

folder = Path(__file__).resolve().parents[1]
sys.path.append(str(folder))
import cuda_rehearsal  # noqa: E402


def report():
    if cuda_rehearsal.problems:
        path = Path(os.environ["REHEARSED_PROBLEMS"], f"{os.getpid()}.txt")
        lines = [f"{' '.join(sys.argv)}: {problem}\n" for problem in cuda_rehearsal.problems]
        path.write_text("".join(lines))


def compile_kernel(source, name):
    """Stands in for NVRTC: the study's kernel, compiled for the CPU; a graph does not record it."""
    import env_kernel

    launch = env_kernel.compile_for_cpu(source)

    def kernel(grid, block, args):
        _, threads, *tensors = args
        launch(threads, tensors)

    return kernel


if "REHEARSED_PROBLEMS" in os.environ:
    cuda_rehearsal.install("aot_eager")
    cuda_rehearsal.torch.cuda._compile_kernel = compile_kernel
    cuda_rehearsal.Rehearsal().__enter__()
    atexit.register(report)
