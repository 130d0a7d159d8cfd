"""The pairs of scripts that are one algorithm: how their agents are made, fed and compared."""

import importlib
import re
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import CPU, read_checkpoint, read_scalars, spaces
from torch import Tensor

OBS, A, B = 17, 6, 64  # HalfCheetah's observations and actions; transitions of an update
ACTION_SPACE = gym.spaces.Box(-1, 1, (A,), np.float32)
WORLDS = spaces(OBS, ACTION_SPACE)
UNSHARED = {"charts/SPS", "charts/cpu_seconds", "charts/gpu_percent", "charts/eval_return"}


class Pair(NamedTuple):
    """A baseline, its variant, and what differs between algorithms."""

    script: str  # the baseline's name
    agent: str  # its class
    space: tuple  # what an agent is told of its environment
    draw: Callable  # (pair, reference, device) -> the arguments of `update`
    update: str = "learn"  # the method that `draw` is for
    flags: dict = {}
    wrong: dict = {}  # settings that an update has to show
    annealed: dict = {}  # numbers that may change from update to update, and to what
    bounds: dict = {}  # those that compiled code keeps: it compiles again for each value
    run: dict = {}  # flags of a whole run

    @property
    def baseline(self) -> ModuleType:
        return importlib.import_module(f"leanrl.{self.script}")

    @property
    def variant(self) -> ModuleType:
        return importlib.import_module(f"leanrl.{self.script}_torchcompile")

    def make(self, module: ModuleType, device=CPU, **flags):
        """An agent with the weights of seed 0."""
        torch.manual_seed(0)
        args = module.Args(**self.flags | flags)
        return getattr(module, self.agent)(args, *self.space, device)

    def make_both(self, device=CPU, **flags) -> tuple:
        """Both agents; the variant's gets the flags. They begin alike, and are then moved alike.

        Ones, zeros, and targets that are the networks would hide a mix-up.
        """
        reference, agent = (
            self.make(self.baseline, device),
            self.make(self.variant, device, **flags),
        )
        assert_same_weights(reference, agent, 0.0)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        agent.load_state_dict(stacked(reference.state_dict()))
        return reference, agent


# What updates take


def transitions(pair: Pair, reference, device) -> tuple:
    """Columns of one tensor, as in the variant's replay buffer; one in ten terminates."""
    rows = torch.randn(B, 2 * OBS + A + 2, device=device)
    obs, actions, next_obs, rewards, last = rows.split((OBS, A, OBS, 1, 1), dim=1)
    actions.tanh_()
    last.copy_(last > 1.3)
    name = "terminated"
    if pair.script == "sac_mujoco_worlds":
        name = "discounts"
        last.mul_(-0.97).add_(0.97)
    batch = pair.variant.Batch(
        obs=obs,
        actions=actions,
        next_obs=next_obs,
        rewards=rewards.squeeze(1),
        **{name: last.squeeze(1)},
    )
    due = (True,) if pair.agent == "TD3" else (True, True)
    return batch, *due


def images(size: int, device) -> Tensor:
    return torch.randint(0, 256, (size, 4, 84, 84), dtype=torch.uint8, device=device)


def policy_steps(pair: Pair, reference, obs: Tensor, noise: Tensor) -> tuple:
    """Steps of the reference's policy, and an order in which to learn from them."""
    size, device = len(obs), obs.device
    with torch.no_grad():
        actions, log_probs = reference.act(obs, noise)[:2]
    values = 0.3 * torch.randn(size, device=device)
    columns = {
        "obs": obs,
        "actions": actions,
        "log_probs": log_probs + 0.1 * torch.randn(size, device=device),
        "values": values,
        "advantages": torch.randn(size, device=device),
        "returns": values + torch.randn(size, device=device),
        "importance": torch.rand(size, device=device),
    }
    batch = pair.variant.Batch(**{name: columns[name] for name in pair.variant.Batch._fields})
    return batch, torch.randperm(size, device=device)


def continuous_steps(pair: Pair, reference, device) -> tuple:
    obs, noise = (torch.randn(2 * B, width, device=device) for width in (OBS, A))
    return policy_steps(pair, reference, obs, noise)


def sequences(pair: Pair, reference, device) -> tuple:
    """Rollouts of 4 environments from some state, with episodes that begin in them."""
    shape = 16, 4
    obs = torch.randn(*shape, OBS, device=device)
    starts = (torch.rand(shape, device=device) < 0.1).to(obs)
    states = 0.5 * torch.randn(2, 2, 4, pair.variant.HIDDEN, device=device)
    noise = torch.randn(*shape, A, device=device)
    with torch.no_grad():
        outputs, values, _ = reference.model(obs, starts, states)
        policy = reference.model.policy(outputs, None)
        actions = policy.sample(noise)
        log_probs = policy.log_prob(actions)
    batch = pair.variant.Batch(
        obs=obs,
        starts=starts,
        masks=torch.ones(*shape, A, dtype=torch.bool, device=device),
        actions=actions,
        log_probs=log_probs + 0.1 * torch.randn(shape, device=device),
        values=values + 0.3 * torch.randn(shape, device=device),
        advantages=torch.randn(shape, device=device),
        returns=values + torch.randn(shape, device=device),
    )
    return batch, states, torch.randperm(4, device=device)


def cartpole_steps(pair: Pair, reference, device) -> tuple:
    noise = torch.empty(2 * B, 2, device=device).exponential_()
    return policy_steps(pair, reference, torch.randn(2 * B, 4, device=device), noise)


def atari_steps(pair: Pair, reference, device) -> tuple:
    noise = torch.empty(8, 4, device=device).exponential_()
    return policy_steps(pair, reference, images(8, device), noise)


def shared_atari_steps(pair: Pair, reference, device) -> tuple:
    """As the only process of a run has them."""
    batch, order = atari_steps(pair, reference, device)
    return batch, torch.randn(1, 8, device=device), order[None]


def q_steps(pair: Pair, reference, device) -> tuple:
    actions = torch.randint(0, 4, (8,), device=device)
    returns = torch.randn(8, device=device)
    batch = pair.variant.Batch(obs=images(8, device), actions=actions, returns=returns)
    return batch, torch.randperm(8, device=device)


# The pairs

OFF_POLICY = {"env_id": "Smooth-v0", "batch_size": B, "learning_starts": 100, "buffer_size": 130}
Q_WRONG = {"gamma": 0.9, "tau": 0.01}
Q_ANNEALED = {"gamma": (0.9, 0.8), "tau": (0.1, 0.2)}
ON_POLICY = {"num_minibatches": 2, "update_epochs": 2}
ATARI = ON_POLICY | {"env_id": "Breakout-v5", "num_envs": 4, "num_steps": 32}
PPO_WRONG = {"clip_coef": 0.01, "max_grad_norm": 0.01, "ent_coef": 0.1, "vf_coef": 1.0}
PPO_ANNEALED = {"ent_coef": (0.3, 0.2), "vf_coef": (0.6, 0.7)}
NORMS = {"max_grad_norm": (0.4, 0.3)}
PPO_BOUNDS = {"clip_coef": (0.01,)}
PPO = {"wrong": PPO_WRONG, "annealed": PPO_ANNEALED | NORMS, "bounds": PPO_BOUNDS}
# Where gradients and optimizer are compiled apart: Dynamo keeps the only number of a function
PPO_IN_PARTS = {"wrong": PPO_WRONG, "annealed": PPO_ANNEALED, "bounds": PPO_BOUNDS | NORMS}
PAIRS = {
    "sac": Pair(
        script="sac_continuous_action",
        agent="SAC",
        space=(OBS, ACTION_SPACE),
        draw=transitions,
        update="update",
        flags=OFF_POLICY,
        wrong=Q_WRONG | {"policy_lr": 1e-3, "q_lr": 2e-3},
        annealed=Q_ANNEALED,
        run={"total_timesteps": 140, "policy_frequency": 3, "target_network_frequency": 2},
    ),
    "td3": Pair(
        script="td3_continuous_action",
        agent="TD3",
        space=(OBS, ACTION_SPACE),
        draw=transitions,
        update="update",
        flags=OFF_POLICY,
        wrong=Q_WRONG | {"policy_noise": 0.3, "noise_clip": 0.3},
        annealed=Q_ANNEALED | {"policy_noise": (0.3, 0.4)},
        bounds={"noise_clip": (0.1,)},
        run={"total_timesteps": 140},
    ),
    "sac_worlds": Pair(
        script="sac_mujoco_worlds",
        agent="SAC",
        space=(WORLDS,),
        draw=transitions,
        update="update",
        flags={"num_envs": 8, "batch_size": 16, "learning_starts": 200, "buffer_size": 500},
        wrong={"tau": 0.01},  # gamma is in the batch
        annealed={"tau": (0.1, 0.2)},
        run={
            "env_id": "worlds/InvertedPendulum-v5",
            "physics": "c",
            "total_timesteps": 560,  # in more the differences of the last bits grow
            "tau": 0.1,
            "utd_ratio": 0.25,
        },
    ),
    "ppo": Pair(
        script="ppo_continuous_action",
        agent="PPO",
        space=(OBS, A),
        draw=continuous_steps,
        flags=ON_POLICY | {"env_id": "Smooth-v0", "num_envs": 3, "num_steps": 32},
        run={"total_timesteps": 3 * 32 * 4, "gamma": 0.9},
        **PPO,
    ),
    "ppo_lstm": Pair(
        script="ppo_lstm",
        agent="PPO",
        space=(OBS, ACTION_SPACE),
        draw=sequences,
        flags=ON_POLICY | {"env_id": "Smooth-v0", "num_envs": 4, "num_steps": 16},
        run={"total_timesteps": 4 * 16 * 5, "gamma": 0.9},
        **PPO_IN_PARTS,
    ),
    "ppo_async": Pair(
        script="ppo_continuous_action_async",
        agent="PPO",
        space=(OBS, A),
        draw=continuous_steps,
        flags=ON_POLICY | {"env_id": "Smooth-v0", "num_envs": 3, "num_steps": 32},
        **PPO,
    ),
    "ppo_cartpole": Pair(
        script="ppo_cartpole_gpu",
        agent="PPO",
        space=(4, 2),
        draw=cartpole_steps,
        flags=ON_POLICY | {"num_envs": 64, "num_steps": 16},
        run={"total_timesteps": 64 * 16 * 4},
        **PPO_IN_PARTS,
    ),
    "ppo_worlds": Pair(
        script="ppo_mujoco_worlds",
        agent="PPO",
        space=(WORLDS,),
        draw=continuous_steps,
        flags=ON_POLICY | {"num_envs": 8, "num_steps": 16},
        run={
            "env_id": "worlds/Hopper-v5",
            "physics": "c",
            "total_timesteps": 1024,
            "gamma": 0.9,
            "end_gamma": 0.95,
            "gae_lambda": 0.95,
        },
        **PPO,
    ),
    "ppo_atari": Pair(
        script="ppo_atari_envpool",
        agent="PPO",
        space=(4,),
        draw=atari_steps,
        flags=ATARI,
        run={"total_timesteps": 3 * 128, "update_epochs": 1},
        **PPO,
    ),
    "ppo_multigpu": Pair(
        script="ppo_atari_envpool_multigpu",
        agent="PPO",
        space=(4,),
        draw=shared_atari_steps,
        flags=ATARI,
        **PPO_IN_PARTS,
    ),
    "pqn_atari": Pair(
        script="pqn_atari_envpool",
        agent="PQN",
        space=(4,),
        draw=q_steps,
        flags=ATARI,
        wrong={"max_grad_norm": 0.01, "learning_rate": 1e-3},
        annealed={"max_grad_norm": (0.1, 0.2)},
        run={"total_timesteps": 3 * 128, "update_epochs": 1},
    ),
}
NEED_ENVPOOL = {"ppo_atari", "ppo_multigpu", "pqn_atari"}


def params(*names: str) -> list:
    """Pairs of these names, or all, for pytest."""
    found = []
    missing = importlib.util.find_spec("envpool") is None
    reason = "needs requirements/envpool.txt"
    for name in names or PAIRS:
        marks = pytest.mark.skipif(missing and name in NEED_ENVPOOL, reason=reason)
        found.append(pytest.param(PAIRS[name], id=name, marks=marks))
    return found


def others_than(*names: str) -> list:
    """`params` without these."""
    return params(*(name for name in PAIRS if name not in names))


# Comparisons


def stacked(named: dict) -> dict:
    """Weights by name, both Q-networks' as one tensor in the place of the first one's."""
    found = {}
    for name, tensor in named.items():
        if re.match(r"qf\w*\.1\.", name):
            continue
        if re.match(r"qf\w*\.0\.", name) and (twin := name.replace(".0.", ".1.", 1)) in named:
            tensor = torch.stack([tensor, named[twin]])
        found[name] = tensor
    return found


def assert_same_weights(reference, agent, tolerance: float) -> None:
    expected, found = stacked(reference.state_dict()), agent.state_dict()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def run_updates(pair: Pair, reference, agent, count: int, tolerance=1e-9, device=CPU) -> None:
    """The same updates on both; every loss and, at the end, every weight must agree."""
    for number in range(count):
        torch.manual_seed(number)
        inputs = pair.draw(pair, reference, device)
        metrics = []
        for each in (reference, agent):
            torch.manual_seed(number)  # the same noise
            found = getattr(each, pair.update)(*inputs)
            metrics.append({name: value.clone() for name, value in found.items()})
        torch.testing.assert_close(*metrics, atol=tolerance, rtol=tolerance)
    assert_same_weights(reference, agent, tolerance)


def assert_runs_agree(one, other) -> None:
    """Rows of metrics and checkpoints of two run directories."""
    expected, found = read_scalars(one), read_scalars(other)
    assert found.keys() == expected.keys()
    for tag in expected.keys() - UNSHARED:
        np.testing.assert_allclose(found[tag], expected[tag], rtol=1e-2, atol=2e-3, err_msg=tag)
    expected, found = read_checkpoint(one), read_checkpoint(other)
    assert found["global_step"] == expected["global_step"]
    for name, tensor in stacked(expected["agent"]).items():
        # Adam makes much of the last bit of a tiny gradient, here and there
        error = (found["agent"][name] - tensor).abs().double().mean().item()
        assert error < 1e-4, f"{name} differs by {error:.1e}"
    if "replay" in expected:
        rows = [x.reshape(len(x), -1) for x in expected["replay"].values() if torch.is_tensor(x)]
        rows = torch.cat(rows, dim=1)
        torch.testing.assert_close(found["replay"]["rows"], rows, rtol=1e-2, atol=2e-2)
        assert found["replay"]["position"] == expected["replay"]["position"]
    else:
        assert torch.equal(found["generators"]["cpu"], expected["generators"]["cpu"])
    for name, tensor in expected.get("statistics", {}).items():  # counts differ in shape alone
        tensor = torch.atleast_1d(tensor)
        mine = found["statistics"][name].double().reshape(len(tensor), -1)
        tensor = tensor.double().reshape(len(tensor), -1)
        width = min(mine.shape[1], tensor.shape[1])
        torch.testing.assert_close(mine[:, :width], tensor[:, :width], rtol=1e-3, atol=1e-3)
