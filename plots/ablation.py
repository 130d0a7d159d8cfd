"""What each trick buys: a script against itself with one trick taken away, side by side.

    python plots/ablation.py --algorithm ppo            minutes; files in plots/out/
    python plots/ablation.py --algorithm td3 --rounds 3
    python plots/ablation.py --algorithm sac --row baseline     what plain eager code gains by

HalfCheetah-v5: the variant with --compile (on a GPU --cudagraphs too), the variant eager or the
baseline. In rounds: the whole script, then without one trick after the other, with what one would
do otherwise in its place, each in a process of its own; round n with seed n. A trick that others
rest on (one row per transition in PPO, gradients as values) cannot be taken away alone and is not
in the table.

    steps/s         median over the rounds, and range, of the stopwatch's steady window
    of whole        median over the rounds of steps/s divided by the whole script's in that round
    worth           microseconds that the trick saves per environment step, median over the rounds
    warm-up s       median seconds until that window

Written to plots/out/: ablation_ALGORITHM_ROW.md, .json, and logs/. Exit status 1 if a run failed.
"""

import argparse
import importlib
import shlex
import signal
import statistics
import sys
from pathlib import Path

import run_dirs

ROOT = run_dirs.ROOT
WHOLE = "all tricks"
SETTINGS = {
    "sac": {"learning_starts": 500, "total_timesteps": 2_500},
    "td3": {"learning_starts": 500, "total_timesteps": 2_500},
    "ppo": {"total_timesteps": 20 * 2048},
}


def uncompiled(*names: str):
    """A patch that leaves these methods of the agent as they are."""

    def patch(module) -> None:
        compile_agent = module.compile_agent

        def compile_others(agent) -> None:
            compile_agent(agent)
            for name in names:
                vars(agent).pop(name, None)  # the method of the class is not compiled

        module.compile_agent = compile_others

    return patch


def patch_precision(module) -> None:
    module.keeps_float32 = lambda precision: False


def patch_replay(module) -> None:
    """Five tensors, five gathers, a batch made anew."""
    baseline = importlib.import_module(module.__name__.removesuffix("_torchcompile"))
    module.ReplayBuffer = baseline.ReplayBuffer


def patch_target(module) -> None:
    """A call per tensor."""
    import torch

    def update_target(self) -> None:
        with torch.no_grad():
            for target, parameter in zip(self.target_parameters, parameters(self), strict=True):
                target.lerp_(parameter, self.args.tau)

    if hasattr(module, "SAC"):
        owner, parameters = module.SAC, lambda agent: agent.q_parameters
    else:
        owner, parameters = module.TD3, lambda agent: agent.parameters
    owner.update_target = update_target


def patch_vector_env(module) -> None:
    import gymnasium as gym

    module.LeanVectorEnv = gym.vector.SyncVectorEnv


def patch_acting(module) -> None:
    """One call of the network's policy head in PyTorch."""
    import torch

    def act(self, obs, noise):
        with torch.no_grad():
            mean = self.model.actor_mean(torch.from_numpy(obs))
            return (mean + self.model.actor_logstd.exp() * torch.from_numpy(noise)).numpy()

    module.PPO.act = act


def patch_acting_whole(module) -> None:
    """Actions, log-probabilities and values at each step, in PyTorch, as the baseline has them."""
    import torch

    def act(self, obs, noise):
        with torch.no_grad():
            mean, log_std, _ = self.model(torch.from_numpy(obs))
            actions = mean + log_std.exp() * torch.from_numpy(noise)
            module.gaussian_log_prob(actions, mean, log_std)
            return actions.numpy()

    module.PPO.act = act


def patch_rewards(module) -> None:
    import numpy as np

    def reward_all(self, rewards, terminated):
        return np.stack([self.reward(*step) for step in zip(rewards, terminated, strict=True)])

    module.Normalizer.reward_all = reward_all


def patch_advantages(module) -> None:
    """The recurrence, step by step; compiled it would be unrolled for minutes, so it is not."""
    baseline = importlib.import_module(module.__name__.removesuffix("_torchcompile"))
    module.compute_gae = baseline.compute_gae
    uncompiled("prepare")(module)


def patch_tanh(module) -> None:
    import torch

    compile_agent = module.compile_agent

    def compile_with_default(agent) -> None:
        compile_agent(agent)
        torch._inductor.config.cpp.use_decompose_tanh = False

    module.compile_agent = compile_with_default


def patch_threads(module) -> None:
    module.torch.set_num_threads = lambda threads: None


def patch_adam(module) -> None:
    """The optimizer's default: a few operators on lists of tensors."""
    fused = module.Adam
    module.Adam = lambda parameters, **settings: fused(parameters, **settings | {"fused": False})


def patch_gradients(module) -> None:
    """Backward through the policy's loss computes the critics' gradients too."""

    def gradient_step(loss, parameters, optimizer) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    module.gradient_step = gradient_step


def patch_temperature(module) -> None:
    """The temperature's loss looks at the policy again."""
    import torch

    alpha_loss, update_actor = module.alpha_loss, module.SAC.update_actor

    def update(self, obs, noise):
        def loss_of_its_own(log_alpha, log_probs, target_entropy):
            with torch.no_grad():
                _, log_probs = self.actor.sample(obs, noise)
            return alpha_loss(log_alpha, log_probs, target_entropy)

        module.alpha_loss = loss_of_its_own
        return update_actor(self, obs, noise)

    module.SAC.update_actor = update


OFF_POLICY = {
    "oneDNN's matrix products on AMD": patch_precision,
    "critic update compiled": uncompiled("update_critic"),
    "actor update compiled": uncompiled("update_actor"),
    "acting compiled": uncompiled("act"),
    "replay in one tensor, one gather": patch_replay,
    "targets in one call": patch_target,
}
ON_POLICY = {
    "update compiled": uncompiled("update"),
    "preparation compiled": uncompiled("prepare"),
    "advantages in log2(T) steps": patch_advantages,
    "acting in NumPy": patch_acting,
    "acting in NumPy; log-probabilities and values later": patch_acting_whole,
    "rewards normalized by rollout": patch_rewards,
    "lean vector environment": patch_vector_env,
    "tanh by exp": patch_tanh,
    "one thread": patch_threads,
}
OF_COMPILER = ("compiled", "tanh by exp")  # what eager code cannot do without


def of_eager(tricks: dict) -> dict:
    return {name: p for name, p in tricks.items() if not any(word in name for word in OF_COMPILER)}


BASELINE = {
    "fused Adam": patch_adam,
    "no gradients of the critics in the policy's": patch_gradients,
}
TRICKS = {  # (algorithm, row of the speed-up table)
    ("sac", "compile"): OFF_POLICY,
    ("td3", "compile"): OFF_POLICY,
    ("ppo", "compile"): ON_POLICY,
    ("sac", "eager"): of_eager(OFF_POLICY),
    ("td3", "eager"): of_eager(OFF_POLICY),
    ("ppo", "eager"): of_eager(ON_POLICY),
    ("sac", "baseline"): BASELINE | {"temperature by the policy's sample": patch_temperature},
    ("td3", "baseline"): BASELINE,
    ("ppo", "baseline"): {"fused Adam": patch_adam},
}


def work(algorithm: str, row: str, trick: str, seed: int, steps: int) -> None:
    """The worker: trains once, without `trick`."""
    import torch

    suffix = "" if row == "baseline" else run_dirs.VARIANT
    module = importlib.import_module(f"leanrl.{algorithm}_continuous_action{suffix}")
    if trick != WHOLE:
        TRICKS[algorithm, row][trick](module)
    settings = SETTINGS[algorithm] | {"total_timesteps": steps, "seed": seed}
    settings |= {"exp_name": f"ablation-{algorithm}-{row}-without-{trick}"}  # no run of the script
    if row == "compile":
        settings |= {"compile": True, "cudagraphs": torch.cuda.is_available()}
    module.main(module.Args(**settings))


def measure(trick: str, seed: int, options: argparse.Namespace, progress) -> dict:
    """One run without `trick` -> its numbers; ValueError says what went wrong."""
    import speedup

    number = [WHOLE, *TRICKS[options.algorithm, options.row]].index(trick)
    stem = f"ablation-{options.algorithm}-{options.row}-{number}-seed-{seed}"
    log = options.out / "logs" / f"{stem}.log"
    command = [sys.executable, "plots/ablation.py", "--algorithm", options.algorithm]
    command += ["--row", options.row, "--worker", trick]
    command += ["--seed", str(seed), "--steps", str(options.steps)]
    run = speedup.run_and_read(command, log, progress, f"{trick!r} round {seed}")
    result = {key: run.stages[key] for key in ("sps_steady", "warmup_seconds")}
    return result | {"command": shlex.join(["python", *command[1:]]), "config": run.config}


def summarize(rounds: list[dict], tricks: list[str]) -> list[dict]:
    """One dict per trick from rounds {trick: result}, in which a failed one is missing."""
    rows = []
    for trick in tricks:
        pairs = [(r[trick], r[WHOLE]) for r in rounds if trick in r and WHOLE in r]
        if not pairs:
            rows.append({"without": trick, "skipped": "no finished run"})
            continue
        speeds = [(one["sps_steady"], whole["sps_steady"]) for one, whole in pairs]
        rows.append(
            {
                "without": trick,
                "sps_steady": run_dirs.spread([one for one, _ in speeds]),
                "of_whole": statistics.median(one / whole for one, whole in speeds),
                "worth_us": run_dirs.spread([1e6 / one - 1e6 / whole for one, whole in speeds]),
                "warmup_seconds": run_dirs.spread([one["warmup_seconds"] for one, _ in pairs]),
            }
        )
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    table = [["without", "steps/s", "min-max", "of whole", "worth us/step", "warm-up s"]]
    for row in rows:
        if "skipped" in row:
            table.append([row["without"], f"skipped: {row['skipped']}", *[""] * 4])
            continue
        steady = row["sps_steady"]
        table.append(
            [
                row["without"] if row["without"] != WHOLE else "(nothing)",
                f"{steady['median']:,.0f}",
                f"{steady['min']:,.0f}-{steady['max']:,.0f}",
                f"{row['of_whole']:.2f}x",
                f"{row['worth_us']['median']:,.0f}" if row["without"] != WHOLE else "",
                f"{row['warmup_seconds']['median']:.1f}",
            ]
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=SETTINGS, default="ppo")
    parser.add_argument("--row", choices=("compile", "eager", "baseline"), default="compile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="environment steps per run")
    parser.add_argument("--out", type=Path, default=ROOT / "plots/out", help="folder of the report")
    parser.add_argument("--worker", help="internal: one run, without this trick")
    parser.add_argument("--seed", type=int, default=1, help="internal: of the worker")
    options = parser.parse_args(arguments)
    options.steps = options.steps or SETTINGS[options.algorithm]["total_timesteps"]
    if options.worker:
        work(options.algorithm, options.row, options.worker, options.seed, options.steps)
        return 0

    import speedup

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tricks = [WHOLE, *TRICKS[options.algorithm, options.row]]
    try:
        rounds, failures = speedup.take_turns(tricks, options, measure)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130

    configs = [result["config"] for results in rounds for result in results.values()]
    if configs:
        hardware, rows = run_dirs.machine(configs), summarize(rounds, tricks)
        command = f"python plots/ablation.py --algorithm {options.algorithm} "
        command += f"--row {options.row} --rounds {options.rounds} --steps {options.steps}"
        above = [f"Tricks taken away one at a time: {command}", *run_dirs.describe(hardware)]
        above.append(f"HalfCheetah-v5, {options.steps:,} environment steps per run")
        record = {"schema": 1, "command": command, "machine": hardware, "rows": rows}
        record |= {"rounds": rounds, "failures": failures}
        below = [f"logs: {run_dirs.shown(options.out / 'logs')}/"]
        report = options.out / f"ablation_{options.algorithm}_{options.row}"
        run_dirs.write_report(report, above, cells(rows), below, record, labels=1)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
