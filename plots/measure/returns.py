"""What a change to SAC on worlds brings in the same minutes: the script as it is, and changed.

    python plots/measure/returns.py                              hours; files in plots/out/
    python plots/measure/returns.py --minutes 4 --changes "3 steps"

The variant with --compile trains on each task with each change, and without, each seed for the same
minutes of one core: processor time, so that what else the machine does matters less, of training
alone, without compilation and evaluations. As many runs as there are cores are made at the same
time, a core each. What is in the file of results is not made again. The policy is evaluated in
Gymnasium's own environments.

    return          mean of the evaluations in the second half of a run, of which a single one may
                    be off by half; mean over the seeds, and range
    updates         of the Q-networks in these minutes, mean over the seeds

Written to --out: returns.md, returns.json and logs/. Exit status 1 if a run failed.
"""

import importlib
import statistics
from functools import partial

import processes
import run_dirs
import timed
import torch
from run_dirs import short, spread
from torch import nn

MODULE = "leanrl.sac_mujoco_worlds_torchcompile"
TASKS = ("HalfCheetah-v5", "Walker2d-v5", "Humanoid-v5")
AS_IT_IS = "as it is"
WIDTH = 256  # of the script's hidden layers
ATOMS = 101  # of a categorical critic
LARGEST = 5.0  # return that it can tell, in standard deviations, as SimbaV2's


# Normalized layers


class RMSNorm(nn.Module):
    """Zhang and Sennrich, 2019, arXiv:1910.07467: FlashSAC's. Written out, so that it compiles."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        mean_square = x.square().mean(-1, keepdim=True)
        return x * (mean_square + 1e-5).rsqrt() * self.weight


def normalize_layers(norm, module) -> None:
    """Before each ReLU of the policy and of the Q-networks, as in BRO (arXiv:2405.16158)."""

    def mlp(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(inputs, WIDTH),
            norm(WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            norm(WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, outputs),
        )

    module.mlp = mlp


def normalize_critics(module) -> None:
    """The Q-networks alone (as in CrossQ and DroQ)."""
    plain = module.mlp
    normalize_layers(nn.LayerNorm, module)
    normalized = module.mlp

    def mlp(inputs: int, outputs: int) -> nn.Sequential:
        make = normalized if outputs == 1 else plain
        return make(inputs, outputs)

    module.mlp = mlp


class Block(nn.Module):
    """x + f(x), of one layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.layer(x.relu())


def add_blocks(module) -> None:
    """Two residual blocks between the first and the last layer (SimBa, arXiv:2410.09754)."""

    def mlp(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(inputs, WIDTH),
            Block(),
            Block(),
            nn.Linear(WIDTH, outputs),
        )

    module.mlp = mlp


# Scales


def take_raw_observations(module) -> None:
    """Observations in their own units."""
    module.SAC.normalize = lambda self, obs: obs


def take_raw_rewards(module) -> dict:
    """Rewards in their own units, and the temperature of SAC's paper at first."""
    module.SAC.scale = lambda self, rewards: rewards
    return {"alpha": 1.0}


# Targets


def categorical_critic(module) -> None:
    """A distribution over 101 values (C51, arXiv:1707.06887)."""
    values_of = torch.linspace(-LARGEST, LARGEST, ATOMS)
    make = module.mlp
    module.mlp = lambda inputs, outputs: make(inputs, ATOMS if outputs == 1 else outputs)

    def expected(logits):
        return (logits.softmax(-1) * values_of).sum(-1)

    def critic_loss(agent, batch, noise, gamma):
        with torch.no_grad():
            next_actions, next_log_probs = agent.actor.sample(batch.next_obs, noise)
            logits = agent.qf_target(batch.next_obs, next_actions)  # (2, B, ATOMS)
            first, second = expected(logits)
            probs = logits.softmax(-1)
            probs = probs[0].where((first < second)[:, None], probs[1])
            bonus = -agent.log_alpha.exp() * next_log_probs
            discounts = gamma * (1 - batch.terminated)
            values = batch.rewards + discounts * bonus
            values = values[:, None] + discounts[:, None] * values_of
            values = values.clamp(-LARGEST, LARGEST)
            places = (values + LARGEST) * (ATOMS - 1) / (2 * LARGEST)
            lower = places.floor().clamp(max=ATOMS - 2)
            share = places - lower
            index = lower.long()
            targets = torch.zeros_like(probs)
            targets = targets.scatter_add(1, index, probs * (1 - share))
            targets = targets.scatter_add(1, index + 1, probs * share)
        logits = agent.qf(batch.obs, batch.actions)
        losses = -(targets * logits.log_softmax(-1)).sum(-1)
        return losses.mean(dim=1), expected(logits)

    def actor_loss(agent, obs, noise):
        actions, log_probs = agent.actor.sample(obs, noise)
        values = expected(agent.qf(obs, actions)).amin(dim=0)
        alpha = agent.log_alpha.exp().detach()
        return (alpha * log_probs - values).mean(), log_probs

    module.critic_loss = critic_loss
    module.actor_loss = actor_loss


def ends(transitions, next_transitions):
    """Where an episode ended, also by its time limit: the next step is from another observation."""
    return (transitions.next_obs != next_transitions.obs).any(1)


def sum_steps(count: int, module) -> None:
    """Rewards of `count` steps before the value that is bootstrapped, or to the episode's end."""
    waiting = []  # transitions, the oldest first, and where their episodes go on
    add = module.ReplayBuffer.add

    def add_later(self, transitions) -> None:
        new = module.Batch._make(x.clone().float() for x in transitions)
        goes_on = torch.ones(len(new.rewards), dtype=torch.bool)
        if waiting:
            newest, _ = waiting[-1]
            goes_on = ~ends(newest, new)
        for age, (old, alive) in zip(range(len(waiting), 0, -1), waiting, strict=True):
            alive &= goes_on
            discount = self.args.gamma**age
            old.rewards.add_(discount * new.rewards * alive)
            old.next_obs.copy_(new.next_obs.where(alive[:, None], old.next_obs))
            # critic_loss discounts once more; what it is to discount besides is told as an end
            terminated = 1 - discount * (1 - new.terminated)
            old.terminated.copy_(terminated.where(alive, old.terminated))
        waiting.append((new, torch.ones_like(goes_on)))
        if len(waiting) == count:
            oldest, _ = waiting.pop(0)
            add(self, oldest)

    module.ReplayBuffer.add = add_later


CHANGES = {  # a patch of the module, which may return other flags, or these
    AS_IT_IS: {},
    "LayerNorm": partial(normalize_layers, nn.LayerNorm),
    "LayerNorm in the critics": normalize_critics,
    "RMSNorm": partial(normalize_layers, RMSNorm),
    "residual blocks": add_blocks,
    "raw observations": take_raw_observations,
    "raw rewards": take_raw_rewards,
    "categorical critic": categorical_critic,
    "3 steps": partial(sum_steps, 3),
    "batches of 256, a quarter of the updates per step": {"batch_size": 256, "utd_ratio": 1 / 16},
    "batches of 32, twice the updates per step": {"batch_size": 32, "utd_ratio": 1 / 2},
    "half of the updates per step": {"utd_ratio": 1 / 8},
    "a third of the rates": {"q_lr": 3e-4, "policy_lr": 1e-4},
    "buffer of 3 M": {"buffer_size": 3_000_000},
}


# Runs


def work(change: str, task: str, seed: int, minutes: int) -> None:
    """The worker: trains once, evaluates after each minute of training and says so."""
    script = importlib.import_module(MODULE)
    settings = CHANGES[change]
    if callable(settings):
        settings = settings(script) or {}
    args = script.Args(
        exp_name=f"returns-{change}",  # so that no table of the script takes it in
        env_id=f"worlds/{task}",
        seed=seed,
        total_timesteps=10**9,
        eval_every=1,
        cuda=False,
        compile=True,
        **settings,
    )

    def updates(run) -> int:
        return int((run.step - args.learning_starts) * args.utd_ratio)

    moments = list(range(1, minutes + 1))
    timed.train(script, args, moments, warmup=False, count=updates, unit="updates")


def summarize(runs: list[dict]) -> list[dict]:
    """One dict per change, with what it reached per task."""
    rows = []
    for change in CHANGES:
        row = {"change": change}
        for task in TASKS:
            mine = [run for run in runs if (run["change"], run["task"]) == (change, task)]
            if mine:
                returns = []
                for run in mine:
                    late = run["evaluations"][len(run["evaluations"]) // 2 :]
                    returns.append(statistics.fmean(reached for _, _, reached in late))
                made = [run["evaluations"][-1][1] for run in mine]
                row[task] = {
                    "return": spread(returns),
                    "updates": statistics.fmean(made),
                    "seeds": len(mine),
                }
        if len(row) > 1:
            rows.append(row)
    return rows


def cells(rows: list[dict]) -> list[list[str]]:
    heading = ["change"]
    for task in TASKS:
        heading += [task, "updates"]
    table = [heading]
    for row in rows:
        line = [row["change"]]
        for task in TASKS:
            if task in row:
                found = row[task]["return"]
                line += [run_dirs.with_range(found), short(row[task]["updates"])]
            else:
                line += ["-", "-"]
        table.append(line)
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = run_dirs.make_parser(__doc__, "--out", "--seeds", "--seed")
    parser.set_defaults(seeds=2)
    parser.add_argument("--minutes", type=run_dirs.few, default=10, help="of training, per run")
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--worker", choices=CHANGES, help="internal: one run with this change")
    options = parser.parse_args(arguments)
    if options.worker:
        timed.say_versions()
        work(options.worker, *options.tasks, options.seed, options.minutes)
        return 0
    wanted = timed.plan(options.changes, options)
    runs, failures = timed.make("change", wanted, options)
    told = [run for run in runs if run["minutes"] == options.minutes]
    rows = summarize(told)
    title = "Changes of SAC on worlds"
    stem = options.out / "returns"
    timed.report("change", title, runs, told, options.minutes, cells(rows), rows, stem)
    return processes.say_failures(failures)


if __name__ == "__main__":
    run_dirs.start(main, processes.GOES_ON)
