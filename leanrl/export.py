"""Writes the policy of a run as one ONNX file, for a robot, a browser or a game engine.

    python leanrl/export.py runs/RUN                      # runs/RUN/policy.onnx, of its checkpoint
    python leanrl/export.py runs/RUN --script my_copy.py  # of a copy, or a run with --exp-name
    python leanrl/export.py runs/RUN --out walk.onnx

The file takes raw observations, N at a time, and gives actions in the environment's units, without
noise: normalization, squashing, scaling and clipping are inside.

    input   obs (N, O) float32, flat, without what only a critic sees; Atari (N, 4, 84, 84) uint8
    output  action (N, A) float32; of discrete actions (N,) int64, the likeliest or best one, and
            scores (N, A), log-probabilities or Q-values, for who masks invalid ones
    LSTM    also takes state (2, N, H), zero where an episode begins, and gives next_state

Its metadata say env_id, script, the bounds of actions, if any, and, of a MuJoCo model, the control
rate in Hz and the names of joints and actuators, as JSON. Needs requirements/onnx.txt.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import torch
import tyro
from gymnasium.spaces import Box
from torch import Tensor, nn

CPU = torch.device("cpu")


@dataclass
class Args:
    run_dir: tyro.conf.Positional[Path]  # a run's directory, with a checkpoint.pt
    script: Path | None = None  # the file that made it; by default the one of the run's name
    out: Path | None = None  # where to; by default policy.onnx beside the checkpoint


# Policies: raw observations -> actions


class Normalize(nn.Module):
    """Observations by the running statistics of a checkpoint: (O,), or a row per environment."""

    def __init__(self, statistics: dict[str, Tensor]):
        super().__init__()
        means = torch.atleast_2d(statistics["obs_rms_mean"])
        variances = torch.atleast_2d(statistics["obs_rms_var"])
        variance = means.var(dim=0, correction=0) + variances.mean(dim=0)
        self.register_buffer("mean", means.mean(dim=0).float())
        self.register_buffer("std", (variance + 1e-8).sqrt().float())

    def forward(self, obs: Tensor) -> Tensor:
        return ((obs - self.mean) / self.std).clamp(-10, 10)


class ClippedMean(nn.Module):
    """The mean of Gaussian actions that are clipped to their box."""

    def __init__(self, module: ModuleType, space: Box):
        super().__init__()
        self.clipped_mean = module.clipped_mean
        self.register_buffer("low", torch.as_tensor(space.low).float())
        self.register_buffer("high", torch.as_tensor(space.high).float())

    def forward(self, mean: Tensor, log_std: Tensor) -> Tensor:
        actions = self.clipped_mean(mean, log_std, self.low, self.high)
        return actions.clamp(self.low, self.high)  # against rounding


class Squashed(nn.Module):
    """SAC and TD3, whose actions fill their box."""

    def __init__(self, agent: nn.Module):
        super().__init__()
        self.agent = agent

    def forward(self, obs: Tensor) -> Tensor:
        actor = self.agent.actor
        if hasattr(actor, "perturbed"):
            return actor(obs)
        if hasattr(self.agent, "normalize"):
            obs = self.agent.normalize(obs)
        actions, _ = actor.sample(obs, torch.zeros_like(actor.action_bias))
        return actions


class Gaussian(nn.Module):
    """PPO, by the mean of its clipped actions."""

    def __init__(self, agent: nn.Module, clip: ClippedMean, statistics: dict[str, Tensor] | None):
        super().__init__()
        self.normalize = Normalize(statistics) if statistics else nn.Identity()
        self.model = agent.model
        self.clip = clip

    def forward(self, obs: Tensor) -> Tensor:
        mean, log_std, *_ = self.model(self.normalize(obs))
        return self.clip(mean, log_std)


class Best(nn.Module):
    """The likeliest or best of discrete actions."""

    def __init__(self, agent: nn.Module):
        super().__init__()
        self.agent = agent

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.agent.model(obs)
        scores = scores[0] if isinstance(scores, tuple) else scores
        return scores.argmax(dim=-1), scores


class Recurrent(nn.Module):
    """PPO with an LSTM, a step at a time."""

    def __init__(self, agent: nn.Module, clip: ClippedMean | None, statistics: dict[str, Tensor]):
        super().__init__()
        self.observed = list(agent.args.observed)
        self.normalize = Normalize(statistics)
        self.model = agent.model
        self.clip = clip

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        obs = obs[:, self.observed] if self.observed else obs
        actor = self.model.actor
        x = actor.encoder(self.normalize(obs)).tanh()
        features, state = actor.lstm(x[None], (state[:1], state[1:]))
        outputs = actor.head(features[0])
        next_state = torch.cat(state)
        if self.clip:
            return self.clip(outputs, self.model.actor_logstd), next_state
        scores = outputs.log_softmax(dim=-1)
        return scores.argmax(dim=-1), scores, next_state


# From a checkpoint to a file


def load_script(path: Path) -> ModuleType:
    """The file as a module; what it imports may stand beside it."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def agent_class(module: ModuleType) -> type:
    """The class of a script's agent."""
    return next(getattr(module, x) for x in ("SAC", "TD3", "PQN", "PPO") if hasattr(module, x))


def make_policy(module: ModuleType, checkpoint: dict) -> tuple[nn.Module, tuple, gym.Env | None]:
    """The policy of a checkpoint, inputs of two rows, and the environment that it is for."""
    args = module.Args(**checkpoint["args"])
    weights, statistics = checkpoint["agent"], checkpoint.get("statistics")
    Agent = agent_class(module)
    if hasattr(module, "AtariEnvs"):
        name = "model.actor.weight" if "model.actor.weight" in weights else "model.head.weight"
        agent = Agent(args, len(weights[name]), CPU)
        agent.load_state_dict(weights)
        return Best(agent), (torch.zeros(2, *module.OBS_SHAPE, dtype=torch.uint8),), None

    env = gym.wrappers.FlattenObservation(gym.make(args.env_id))
    obs_dim = seen = env.observation_space.shape[0]
    if hasattr(module, "mujoco_worlds"):
        envs = gym.make_vec(args.env_id, num_envs=1)
        seen = envs.actor_dim
        dims = (envs,)
    elif hasattr(module, "Memory"):
        dims = (len(args.observed) or obs_dim, env.action_space)
    elif Agent.__name__ == "PPO":
        dims = (obs_dim, gym.spaces.flatdim(env.action_space))
    else:
        dims = (obs_dim, env.action_space)
    agent = Agent(args, *dims, CPU)
    agent.load_state_dict(weights)
    obs = torch.zeros(2, seen)
    is_gaussian = isinstance(env.action_space, Box) and Agent.__name__ == "PPO"
    clip = ClippedMean(module, env.action_space) if is_gaussian else None
    if hasattr(module, "Memory"):
        policy = Recurrent(agent, clip, statistics)
        return policy, (obs, torch.zeros(2, 2, module.HIDDEN)), env
    if hasattr(agent, "actor"):
        policy = Squashed(agent)
    elif clip:
        policy = Gaussian(agent, clip, statistics)
    else:
        policy = Best(agent)
    if seen < obs_dim:  # the rest is the critic's
        policy = nn.Sequential(nn.ZeroPad1d((0, obs_dim - seen)), policy)
    return policy, (obs,), env


def describe(module: ModuleType, checkpoint: dict, env: gym.Env | None) -> dict:
    """What whoever runs the file needs to know."""
    metadata = {"env_id": checkpoint["args"]["env_id"], "script": module.__name__}
    metadata["environment_steps"] = checkpoint["global_step"]
    if env is None:
        return metadata
    if isinstance(env.action_space, Box) and env.action_space.is_bounded():
        metadata["action_low"] = env.action_space.low.tolist()
        metadata["action_high"] = env.action_space.high.tolist()
    robot = getattr(env.unwrapped, "worlds", env.unwrapped)
    model = getattr(robot, "model", None)
    if hasattr(model, "actuator") and hasattr(robot, "dt"):  # MuJoCo's
        metadata["control_hz"] = 1 / robot.dt
        metadata["joints"] = [model.joint(i).name for i in range(model.njnt)]
        metadata["actuators"] = [model.actuator(i).name for i in range(model.nu)]
    return metadata


def main(args: Args) -> Path:
    """Exports and returns the file."""
    import onnx

    path = args.run_dir / "checkpoint.pt"
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    script = args.script or Path(__file__).with_name(f"{checkpoint['args']['exp_name']}.py")
    module = load_script(script)
    policy, inputs, env = make_policy(module, checkpoint)
    metadata = describe(module, checkpoint, env)
    names = ["obs", "state"][: len(inputs)]
    outputs = ["action", "scores"]
    if env and isinstance(env.action_space, Box):
        outputs.remove("scores")
    shapes = ({0: "N"}, {1: "N"})[: len(inputs)]
    outputs += ["next_state"] * (len(inputs) - 1)
    out = args.out or args.run_dir / "policy.onnx"
    torch.onnx.export(
        policy.eval(),
        inputs,
        out,
        input_names=names,
        output_names=outputs,
        dynamic_shapes=shapes,
        external_data=False,
        dynamo=True,
        verbose=False,
    )
    model = onnx.load(out)
    onnx.helper.set_model_props(model, {name: json.dumps(x) for name, x in metadata.items()})
    onnx.save(model, out)
    print(f"{out}: {out.stat().st_size:,} bytes, {', '.join(names)} -> {', '.join(outputs)}")
    return out


if __name__ == "__main__":
    main(tyro.cli(Args))
