"""What each trick buys: a variant against itself with one trick taken away, side by side.

    python plots/measure/ablation.py --algorithm ppo            minutes; files in plots/out/

HalfCheetah-v5: the variant with --compile (on a GPU --cudagraphs too), and without one trick after
the other, with what one would do otherwise in its place. Where torch.compile cannot follow that, it
compiles what is around it. The speed of a shared machine may double within a minute: therefore on a
CPU all processes of a round are there at once, and each runs for half a second, by one thread,
while the others stand still; seconds are those of the processor. On a GPU they run one after the
other.

    of whole        median over the rounds of steps/s divided by the whole script's in that round
    worth           microseconds that the trick saves per environment step, median over the rounds
    warm-up s       without the seconds of the C++ compiler
"""

import argparse
import importlib
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import numpy as np
import processes
import program
import rounds
import run_dirs
import torch
import torch._inductor
import tqdm
from torch import nn

WHOLE = "all tricks"
SLICE = None if torch.cuda.is_available() else 0.5  # seconds that one runs before the next
SETTINGS = {
    "sac": {"learning_starts": 500, "total_timesteps": 2_500},
    "td3": {"learning_starts": 500, "total_timesteps": 2_500},
    "ppo": {"total_timesteps": 20 * 2048},
}


def baseline_of(module):
    """What a variant would do otherwise stands in its baseline."""
    return importlib.import_module(module.__name__.removesuffix(run_dirs.VARIANT))


def once_compiled(change):
    """A patch that calls `change(agent)` when `compile_agent` is done."""

    def patch(module) -> None:
        compile_agent = module.compile_agent

        def compile_and_change(agent) -> None:
            compile_agent(agent)
            change(agent)

        module.compile_agent = compile_and_change

    return patch


def uncompiled(name: str):
    """A patch that leaves this method of the agent as it is: that of the class is not compiled."""
    return once_compiled(lambda agent: vars(agent).pop(name))


def outside_of_graphs(module, function):
    """`function` for the place of one that torch.compile could follow."""
    compile_agent = module.compile_agent

    def compile_around(agent) -> None:
        compile = torch.compile
        torch.compile = lambda method, fullgraph, **others: compile(method, **others)
        try:
            compile_agent(agent)
        finally:
            torch.compile = compile

    module.compile_agent = compile_around
    return torch.compiler.disable(function)


def call_from_python(agent) -> None:
    """A compiled program for each kernel and Python between them."""
    torch._inductor.config.cpp_wrapper = False


# SAC and TD3


def patch_stacking(module) -> None:
    """Two networks, one after the other."""
    module.TwinQ = baseline_of(module).TwinQ
    module.actor_loss = baseline_of(module).actor_loss


def patch_columns(module) -> None:
    """Weights by rows, where their gradients come by columns."""

    class TwinQ(module.TwinQ):
        def __init__(self, networks):
            super().__init__(networks)
            for parameter in self.parameters():
                parameter.data = parameter.data.contiguous()

    module.TwinQ = TwinQ


def patch_guards(module) -> None:
    """Every guard of compiled code is checked."""
    module.kept_guards = lambda guards: [True] * len(guards)


def patch_replay(module) -> None:
    """Five tensors, five copies, five gathers."""

    class ReplayBuffer(module.ReplayBuffer):
        def __init__(self, args, obs_dim, action_dim, device):
            super().__init__(args, obs_dim, action_dim, device)
            self.batch = module.Batch._make(part.clone() for part in self.batch)
            self.columns = []
            for part in self.batch:
                shape = self.capacity, *part.shape[1:]
                self.columns.append(torch.empty(shape, device=device))

        def add(self, transitions):
            end = self.position + self.args.num_envs
            for column, new in zip(self.columns, transitions, strict=True):
                column[self.position : end] = torch.as_tensor(new, dtype=torch.float32)
            self.size = max(self.size, end)
            self.position = end % self.capacity
            self.device_size.fill_(self.size)

        def store(self):
            """Nothing is staged."""

        def draw(self):
            uniform = torch.rand(len(self.rows), dtype=torch.float64, device=self.data.device)
            index = (uniform * self.device_size).long()
            for column, part in zip(self.columns, self.batch, strict=True):
                torch.index_select(column, 0, index, out=part)

    module.ReplayBuffer = ReplayBuffer


def patch_optimizer(module) -> None:
    """PyTorch's own Adam in its fastest form, which torch.compile cannot trace."""

    def step(self, gradients) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.adam.step()

    class Adam:
        def __init__(self, parameters, lr, **settings):
            self.parameters = list(parameters)
            settings |= {"fused": True, "capturable": self.parameters[0].is_cuda}
            self.lr = torch.tensor(lr, device=self.parameters[0].device)
            self.adam = torch.optim.Adam(self.parameters, self.lr, **settings)

    Adam.step = outside_of_graphs(module, step)
    module.Adam = Adam


# PPO


def patch_vector_env(module) -> None:
    """Gymnasium's vector environment and its wrappers for normalization."""
    for name in ("make_envs", "get_statistics", "set_statistics"):
        setattr(module, name, getattr(baseline_of(module), name))


def patch_acting(module) -> None:
    """One call of the network's policy head in PyTorch."""

    def act(self, obs, noise):
        with torch.no_grad():
            mean = self.model.actor_mean(torch.as_tensor(obs).to(self.flat.device))
            noise = torch.as_tensor(noise).to(self.flat.device)
            return (mean + self.model.actor_logstd.exp() * noise).cpu().numpy()

    module.PPO.act = act


def patch_acting_whole(module) -> None:
    """Actions, log-probabilities and values at each step, in PyTorch, as the baseline has them."""

    def act(self, obs, noise):
        obs = torch.as_tensor(obs).to(self.flat.device)
        noise = torch.as_tensor(noise).to(self.flat.device)
        actions, _, _ = baseline_of(module).PPO.act(self, obs, noise)
        return actions.cpu().numpy()

    module.PPO.act = act


def patch_rollout(module) -> None:
    """Storing by PyTorch."""

    class Column(np.ndarray):
        def __setitem__(self, where, new):
            self.tensor[where] = torch.as_tensor(new)

    class Rollout(module.Rollout):
        def __init__(self, *given):
            super().__init__(*given)
            for name, array in vars(self).items():
                column = array.view(Column)
                column.tensor = torch.from_numpy(array)
                setattr(self, name, column)

    module.Rollout = Rollout


def patch_advantages(module) -> None:
    """The recurrence, step by step."""
    module.compute_gae = baseline_of(module).compute_gae


def patch_vector(module) -> None:
    """A gradient, a norm and a step per parameter."""
    make = module.PPO.__init__

    def make_with_list(self, args, *given) -> None:
        make(self, args, *given)
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()
        self.optimizer = module.Adam(self.parameters(), lr=args.learning_rate, eps=1e-5)
        self.optimizers = (self.optimizer,)

    def update(self, batch, index):
        minibatch = module.Batch._make(column[index] for column in batch)
        loss, metrics = module.ppo_loss(self.model, minibatch, self.args)
        gradients = torch.autograd.grad(loss, self.optimizer.parameters)
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        scale = self.args.max_grad_norm / (norm + 1e-6)
        self.optimizer.step(torch._foreach_mul(gradients, scale.clamp(max=1)))
        return metrics

    module.PPO.__init__ = make_with_list
    module.PPO.update = update


def patch_layers(module) -> None:
    """A product per layer and network, from the same vector."""

    def stacked_model(self, obs):
        parts = self.flat.split([math.prod(shape) for shape in self.shapes])
        parts = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        *hidden, critic, actor, critic_bias, actor_bias, log_std = parts
        heads = ((critic, critic_bias), (actor, actor_bias))
        found = []
        for i, head in enumerate(heads):
            weight1, bias1, weight2, bias2 = (part[i] for part in hidden)
            x = nn.functional.linear(obs, weight1, bias1[0]).tanh()
            x = nn.functional.linear(x, weight2, bias2[0]).tanh()
            found.append(nn.functional.linear(x, *head))
        return found[1], log_std, found[0].squeeze(-1)

    module.PPO.stacked_model = stacked_model


OFF_POLICY = {
    "critics stacked by vmap": patch_stacking,
    "stacked weights by columns": patch_columns,
    "replay in one tensor, one gather": patch_replay,
    "an Adam that compiles": patch_optimizer,
}
ON_POLICY = {
    "acting in NumPy": patch_acting,
    "acting in NumPy; log-probabilities and values later": patch_acting_whole,
    "rollout stored by NumPy": patch_rollout,
    "lean vector environment": patch_vector_env,
    "advantages in log2(T) steps": patch_advantages,
    "parameters in one vector": patch_vector,
    "critic and actor stacked": patch_layers,
    "an Adam that compiles": patch_optimizer,
}
# tricks that change nothing without --compile
COMPILED_OFF_POLICY = {
    "critic update compiled": uncompiled("update_critic"),
    "actor update compiled": uncompiled("update_actor"),
    "few guards": patch_guards,
}
COMPILED_SAC = COMPILED_OFF_POLICY | {"acting compiled": uncompiled("act")}
COMPILED_ON_POLICY = {"update compiled": uncompiled("update")}
if not torch.cuda.is_available():
    COMPILED_ON_POLICY["kernels called from C++"] = once_compiled(call_from_python)
TRICKS = {
    "sac": OFF_POLICY | COMPILED_SAC,
    "td3": OFF_POLICY | COMPILED_OFF_POLICY,
    "ppo": ON_POLICY | COMPILED_ON_POLICY,
}


def work(algorithm: str, trick: str, seed: int, steps: int) -> None:
    """The worker: trains once, without `trick`."""
    module = importlib.import_module(f"leanrl.{algorithm}_continuous_action{run_dirs.VARIANT}")
    if trick != WHOLE:
        TRICKS[algorithm][trick](module)
    settings = SETTINGS[algorithm] | {"total_timesteps": steps, "seed": seed, "compile": True}
    settings["torch_threads"] = 1
    settings["cudagraphs"] = torch.cuda.is_available()
    settings["exp_name"] = f"ablation-{algorithm}-without-{trick}"  # no run of the script
    if SLICE:
        module.perf_counter = time.process_time  # the stopwatch's clock
    module.main(module.Args(**settings))


def run_round(seed: int, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """A run without each trick -> {trick: its numbers}, and what went wrong with the others."""
    runs = []
    results = {}
    failures = []
    with ExitStack() as stack:
        for number, trick in enumerate([WHOLE, *TRICKS[options.algorithm]]):
            command = [sys.executable, "plots/measure/ablation.py", "--worker", trick]
            command += ["--algorithm", options.algorithm, "--seed", str(seed)]
            command += ["--steps", str(options.steps)]
            log = options.out / f"logs/ablation-{options.algorithm}-{number}-seed-{seed}.log"
            child = stack.enter_context(processes.logged(command, log))
            os.killpg(child.pid, signal.SIGSTOP)
            stack.callback(child.send_signal, signal.SIGCONT)  # or it could not end
            runs.append((trick, command, log, child))
        bar = stack.enter_context(tqdm.tqdm(total=len(runs) * options.steps, unit="step"))
        while any(child.poll() is None for *_, child in runs):
            for child in (child for *_, child in runs if child.returncode is None):
                os.killpg(child.pid, signal.SIGCONT)
                try:
                    child.wait(SLICE)
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGSTOP)
            bar.update(sum(processes.progress_in(log)[0] for _, _, log, _ in runs) - bar.n)
    for trick, command, log, child in runs:
        try:
            run = processes.read_log(child.returncode, log, f"{trick!r} round {seed}")
            results[trick] = processes.numbers(run, command)
        except ValueError as failure:
            failures.append(str(failure))
    return results, failures


def summarize(results: list[dict], tricks: list[str]) -> list[dict]:
    return rounds.summarize(results, "without", "of_whole", dict.fromkeys(tricks, WHOLE))


def cells(rows: list[dict]) -> list[list[str]]:
    worth = {"worth us/step": lambda row: rounds.middle(row["worth_us"])}
    return rounds.cells(rows, "without", {"of whole": rounds.ratio("of_whole"), **worth})


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, *rounds.OPTIONS, "--seed")
    parser.add_argument("--algorithm", choices=SETTINGS, default="ppo")
    parser.add_argument("--worker", help="internal: one run, without this trick")
    options = parser.parse_args(arguments)
    options.steps = options.steps or SETTINGS[options.algorithm]["total_timesteps"]
    if options.worker:
        work(options.algorithm, options.worker, options.seed, options.steps)
        return 0
    tricks = [WHOLE, *TRICKS[options.algorithm]]
    results = []
    failures = []
    for seed in range(1, options.rounds + 1):
        found, failed = run_round(seed, options)
        results.append(found)
        failures += failed
    rows = summarize(results, tricks)
    command = processes.call("ablation.py", options, "algorithm", "rounds", "steps")
    record = {"command": command, "rows": rows, "rounds": results, "failures": failures}
    above = ["Tricks taken away one at a time", f"HalfCheetah-v5, {options.steps:,} steps per run"]
    name = f"ablation_{options.algorithm}"
    return rounds.report(name, above, cells(rows), record, options)


if __name__ == "__main__":
    program.start(main)
