"""One of the processes that torchrun starts for test_multigpu.py: a script, and what a test asks.

Its argument is JSON: `module`, `flags` of its Args, and of these what is wanted: `out`, a folder
for what this process ends with; `kill`, [rank, minibatch], once; `apart`, without averaging.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))


def use_float64(script) -> None:
    """Where rounding decides whether a unit switches, even a run and itself drift apart.

    It is for the process's life, or until a test's monkeypatch of `script.Rollout` is undone.
    """
    torch.set_default_dtype(torch.float64)

    class Rollout(script.Rollout):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for name, tensor in vars(self).items():
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                    setattr(self, name, tensor.double())

    script.Rollout = Rollout


def main(module: str, flags: dict, out: str = "", kill: tuple = (-1, -1), apart: bool = False):
    script = importlib.import_module(f"leanrl.{module}")
    use_float64(script)
    rank, agents, counts, games = int(os.environ["RANK"]), [], [], []
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    init, average, gather = script.PPO.__init__, script.PPO.average, script.gather

    def made(self, *arguments):
        init(self, *arguments)
        agents.append(self)
        for parameter in self.parameters:  # which rank 0's are to replace
            parameter.data.add_(0.01 * rank)

    def averaged(self):
        counters = torch._dynamo.utils.counters
        counts.append((counters["stats"]["unique_graphs"], len(counters["graph_break"])))
        if first and list(kill) == [rank, len(counts)]:
            os.kill(os.getpid(), signal.SIGKILL)
        if not apart:
            average(self)

    def gathered(rows):
        games.extend(rows)
        return gather(rows)

    script.PPO.__init__, script.PPO.average, script.gather = made, averaged, gathered
    run_dir = script.main(script.Args(**flags))
    if out:
        found = {"model": agents[0].model.state_dict(), "counts": counts, "games": len(games)}
        torch.save(found | {"run_dir": str(run_dir)}, Path(out, f"rank{rank}.pt"))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
