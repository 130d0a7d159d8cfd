"""One of the processes that torchrun starts for test_multigpu.py: a script, and what a test asks.

Without torchrun, it starts two of them, faster: what both import is imported once.
Its argument is JSON: `module`; `flags` of its Args; `totals`, the lengths of runs, of which
torchrun restarts all but the first; and of these what is wanted: `out`, a folder for what this
process ends with; `fake`, games of fake_games.py; `strike`, [rank, method, call, signal], once:
which process gets which signal in which call of `update`, or of `all_gather_object` at its end.
"""

import importlib
import json
import os
import socket
import sys
from collections import Counter
from pathlib import Path

import envpool
import torch
import torch.distributed
from fake_games import FakeGames

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(module, flags, totals, out="", fake=False, strike=(-1, "", -1, 0)):
    script = importlib.import_module(f"leanrl.{module}")
    torch.set_default_dtype(torch.float64)  # in float32 even a run and itself drift apart
    rank, agents, counts, games, seeds, firsts = int(os.environ["RANK"]), [], [], [], [], []
    first, calls, run_dir = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", Counter(), None
    init, update, gather = script.PPO.__init__, script.PPO.update, script.dist.all_gather_object

    def made(self, *arguments):
        init(self, *arguments)
        agents.append(self)
        for parameter in self.parameters():  # which rank 0's are to replace
            parameter.data.add_(0.01 * rank)

    def updated(self, *arguments):
        counters = torch._dynamo.utils.counters
        counts.append((counters["stats"]["unique_graphs"], len(counters["graph_break"])))
        called("update")
        return update(self, *arguments)

    def gathered(wishes_of_all, wishes):
        games.extend(wishes[-1])
        gather(wishes_of_all, wishes)
        called("all_gather_object")

    def called(name):
        calls[name] += 1
        if first and list(strike[:3]) == [rank, name, calls[name]]:
            os.kill(os.getpid(), strike[3])

    def play(env_id, num_envs, seed, **options):
        seeds.append(seed)
        return FakeGames(env_id, num_envs, seed, **options)

    script.PPO.__init__, script.PPO.update = made, updated
    script.dist.all_gather_object = gathered
    if fake:
        envpool.make_gymnasium = play
    if rank > 0:  # which rank 0's are to replace
        flags |= {"seed": 99, "learning_rate": 0.1, "exp_name": "other"}
    try:
        for restart, total in enumerate(totals):
            if restart:
                os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart)
            run_dir = script.main(script.Args(**flags | {"total_timesteps": total}))
            firsts.append(agents[-1].state_dict())
    finally:
        if out:
            states = [optimizer.state_dict()["state"] for optimizer in agents[-1].optimizers]
            found = {"agent": agents[-1].state_dict(), "optimizers": states, "firsts": firsts}
            found |= {"counts": counts, "games": len(games), "seeds": seeds}
            torch.save(found | {"run_dir": str(run_dir)}, Path(out, f"rank{rank}.pt"))


def start_two(wishes: dict) -> int:
    """As torchrun does, whose store outlives its processes -> how many of them have failed."""
    for name in ("leanrl.ppo_atari_envpool", "torch._dynamo"):  # the latter is the optimizer's
        importlib.import_module(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]), "WORLD_SIZE": "2"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for rank in range(2):
        if os.fork() == 0:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            main(**wishes)
            return 0
    store = torch.distributed.TCPStore(*address, is_master=True, wait_for_workers=False)
    failed = sum(os.wait()[1] != 0 for _ in range(2))
    del store
    return failed


if __name__ == "__main__":
    wishes = json.loads(sys.argv[1])
    if "RANK" in os.environ:
        main(**wishes)
    else:
        sys.exit(start_two(wishes))
