"""What a step costs when there is more work in it: CartPole with 1 to 256 substeps.

    python plots/measure/env_work.py            minutes
    python plots/measure/env_work.py --quick    a few points, short samples

After figures 5 and 6 of "Increasing Sample Throughput for RL Environments" (CS267, Berkeley). Work
is the number of Euler's steps into which the 0.02 s of a step are divided, so that the motion stays
the same and only the arithmetic grows. It is a parameter of every arm that is not closed: in the
processes of Stable-Baselines3, one environment after another in Gymnasium, tensors, tensors that
are compiled, the kernel. EnvPool's CartPole is compiled without such a parameter.

Measured as in env_scaling.py: seconds of a step of all environments, the median of five samples.
Two questions are answered: how the time grows with the work at a number of environments, and how
the turning point (from where on more environments cost more time) moves with the work.

Written to --out: env_work.md and .json, and the figure env_work.
"""

from dataclasses import replace
from functools import partial

import env_scaling
import gymnasium as gym
import processes
import run_dirs
import torch
from env_scaling import Arm
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from leanrl.ppo_cartpole_gpu import CartPole

WORK = (1, 4, 16, 64, 256)
NUMBERS = (1, 16, 256, 4096, 65_536, 1_048_576)
THREADS = 256  # per block, on a GPU
ENV_ID = "FineCartPole-v1"


class FineCartPoleEnv(CartPoleEnv):
    """Gymnasium's, in substeps, of which those after the end are left out."""

    def __init__(self, work: int):
        super().__init__()
        self.work = work
        self.tau /= work

    def step(self, action):
        for _ in range(self.work):
            result = super().step(action)
            if result[2]:
                break
        return result


class FineCartPole(CartPole):
    """That of the scripts, in substeps."""

    def __init__(self, num_envs: int, device: torch.device, work: int):
        super().__init__(num_envs, device)
        self.work = work
        self.tau = self.tau / work

    def dynamics(self, state, actions):
        for _ in range(self.work):
            state = super().dynamics(state, actions)
        return state


gym.register(ENV_ID, FineCartPoleEnv, max_episode_steps=500)


# Arms: those of env_scaling.py, of so much work


def of_stable_baselines3(work: int, num_envs: int):
    return env_scaling.of_stable_baselines3(num_envs, partial(FineCartPoleEnv, work))


def of_gymnasium(work: int, num_envs: int):
    return env_scaling.of_gymnasium("sync", num_envs, ENV_ID, work=work)


def of_tensors(device_type: str, compiled: bool, work: int, num_envs: int):
    make = partial(FineCartPole, work=work)
    return env_scaling.of_tensors(device_type, compiled, num_envs, make)


def of_kernel(device_type: str, work: int, num_envs: int):
    return env_scaling.of_kernel(device_type, THREADS, num_envs, work)


CUDA = ("cuda",)
ARMS = {  # arm -> the most work: 64 substeps and more take the compiler minutes
    Arm("SB3 SubprocVecEnv", of_stable_baselines3, 16, ("stable_baselines3",)): 256,
    Arm("Gymnasium sync", of_gymnasium, 256): 256,
    Arm("tensors, CPU", partial(of_tensors, "cpu", False), 2**20): 256,
    Arm("tensors compiled, CPU", partial(of_tensors, "cpu", True), 2**20): 16,
    Arm("kernel, CPU threads", partial(of_kernel, "cpu"), 2**20): 256,
    Arm("tensors, GPU", partial(of_tensors, "cuda", False), 2**20, CUDA): 256,
    Arm("tensors compiled, GPU", partial(of_tensors, "cuda", True), 2**20, CUDA): 16,
    Arm(f"kernel, TPB {THREADS}", partial(of_kernel, "cuda"), 2**20, CUDA): 256,
}


def measure(numbers: list[int], works: list[int], seconds: float, slowest: float = 2.0) -> dict:
    """All points, but of an arm and work none after one whose step took `slowest` seconds."""
    rows = []
    skipped = {}
    for arm, most in ARMS.items():
        for work in [work for work in works if work <= most]:
            print(f"{work} substeps")
            one = replace(arm, make=partial(arm.make, work))
            found = env_scaling.measure_steps([one], numbers, seconds, slowest)
            rows += [row | {"work": work} for row in found["rows"]]
            skipped |= found["skipped"]
            if arm.name in skipped:
                break
    return {"rows": rows, "skipped": skipped}


def main(arguments: list[str] | None = None) -> int:
    parser = run_dirs.make_parser(__doc__, "--out")
    parser.add_argument("--quick", action="store_true", help="few points, short samples")
    options = parser.parse_args(arguments)
    record = {
        "schema": 1,
        "command": processes.call("env_work.py", options, "quick"),
        "machine": run_dirs.measured_here(torch.get_num_threads(), env_scaling.PACKAGES),
    }
    if options.quick:
        record |= measure([1, 256, 4096], [1, 16], seconds=0.05, slowest=0.2)
    else:
        record |= measure(list(NUMBERS), list(WORK), seconds=0.2)
    import work_report  # which draws, so that --help need not wait for that

    work_report.write(record, options.out / "env_work")
    return 0


if __name__ == "__main__":
    run_dirs.start(main)
