"""The ant of leanrl/tasks/joystick.py: how it learns to follow a joystick, and a film of it.

    python plots/measure/steering.py                        files in plots/out/

PPO on worlds, the variant with --compile, learns the task in randomized worlds. Then the last
checkpoint plays in randomized worlds that it has not seen, without noise: how far the means
of each command's last two seconds are from the command. The film follows a list of commands in one
such world; a line says what is commanded and what the ant does.

Written to --out: joystick.json, joystick.png and .svg, and joystick.gif, where OpenGL can draw.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import processes
import program
import robot
import run_dirs
import tables

SCRIPT = "ppo_mujoco_worlds_torchcompile"
ENV_ID = "joystick:AntJoystick-v0"
WORLDS = 64
FLAGS = ["--randomize", "0.2", "--num-steps", "64", "--desired-kl", "0.02"]
COMMANDS = [  # m/s forward, rad/s of turning, of three seconds each
    (2.0, 0.0),
    (1.0, 1.0),
    (1.0, -1.0),
    (0.0, 0.0),
    (0.0, 1.0),
    (1.5, 0.0),
]
STEPS_EACH = 60  # of a command: three seconds
FRAMES_PER_SECOND = 10


def load(checkpoint: Path, num_envs: int):
    """A policy without noise, obs (N, O) -> actions (N, A), and worlds that it has not seen."""
    sys.path[:0] = [str(run_dirs.ROOT / x) for x in ("leanrl", "leanrl/tasks")]
    os.environ.setdefault("MUJOCO_GL", "egl")
    import gymnasium as gym
    import torch

    script = importlib.import_module(SCRIPT)
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    envs = gym.make_vec(ENV_ID, num_envs=num_envs, randomize=0.2, seed=1000)
    agent = script.PPO(script.Args(**saved["args"]), envs, torch.device("cpu"))
    agent.load_state_dict(saved["agent"])

    def act(obs):
        with torch.no_grad():
            return script.clipped_mean(*agent.model(obs), envs.low, envs.high)

    return act, envs


def measured(envs):
    """Speed forward and rate of turning (N, 2)."""
    import torch

    forward = envs.task.velocity(envs.state)[:, 0]
    return torch.stack([forward, envs.state.qvel[:, 5]], dim=1)


def follow(checkpoint: Path) -> dict:
    """Mean absolute errors of speed and turning under random commands, and falls."""
    import torch

    act, envs = load(checkpoint, WORLDS)
    obs, _ = envs.reset(seed=1)
    errors, commands, found, falls = [], [], [], 0
    for step in range(1, 1001):
        obs, _, terminated, _, _ = envs.step(act(obs))
        falls += int(terminated.sum())
        found.append(measured(envs))
        commands.append(envs.state.command.clone())
        if step % STEPS_EACH == STEPS_EACH - 1:  # before the next command
            late = torch.stack(found[-40:]).mean(0)
            same = (envs.state.steps >= STEPS_EACH - 1) & (commands[-1] == commands[-40]).all(1)
            errors.append((late - commands[-1])[same].abs())
    errors = torch.cat(errors)
    return {
        "mean_absolute_error": [round(x, 3) for x in errors.mean(0).tolist()],
        "error_of_standing_still": [
            round(x, 3) for x in torch.cat(commands).abs().mean(0).tolist()
        ],
        "commands": len(errors),
        "falls": falls,
        "seconds": 1000 * envs.dt * WORLDS,
    }


def film(checkpoint: Path, path: Path) -> None:
    """COMMANDS one after the other, seen by a camera that follows."""
    import torch
    from PIL import Image, ImageDraw, ImageFont

    act, envs = load(checkpoint, 1)
    envs.reset(seed=3)
    font = ImageFont.load_default(16)
    pictures = []
    for step in range(len(COMMANDS) * STEPS_EACH):
        command = COMMANDS[step // STEPS_EACH]
        envs.state.command.copy_(torch.tensor([command]))  # instead of the task's
        envs.state.qfrc_applied.zero_()  # nobody pushes
        envs.step(act(envs.look()))
        if step % round(1 / envs.dt / FRAMES_PER_SECOND) == 0:
            picture = Image.fromarray(envs.render()[0]).resize((280, 280))
            draw = ImageDraw.Draw(picture)
            now = envs.state.smooth[0, ::2].tolist()  # means of half a second
            for y, (word, row) in enumerate((("command", command), ("ant", now))):
                said = f"{word}: {row[0]:.1f} m/s, {row[1]:+.1f} rad/s"
                draw.text((8, 6 + 20 * y), said, "white", font, stroke_width=2, stroke_fill="black")
            pictures.append(picture)
    robot.save_film(pictures, path, FRAMES_PER_SECOND)


def draw(record: dict, stem: Path) -> None:
    """Return over environment steps and over minutes."""
    import curves
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    seconds, steps, returns = zip(*record["evaluations"], strict=True)
    for ax, x, label in (
        (panels[0], [x / 1e6 for x in steps], "million environment steps"),
        (panels[1], [x / 60 for x in seconds], "minutes since the start, of which all count"),
    ):
        ax.plot(x, returns, "o-", color=curves.COLOURS["compile"])
        ax.set(xlabel=label, xlim=(0, None), ylim=(0, 2000))
    panels[0].set_ylabel("return, of 2,000 at most")
    figure.suptitle("AntJoystick-v0: ten episodes in randomized worlds, without noise of actions")
    curves.save(figure, stem)


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out", "--steps")
    parser.set_defaults(steps=3_000_000)
    options = parser.parse_args(arguments)
    os.environ["PYTHONPATH"] = str(run_dirs.ROOT / "leanrl/tasks")
    rollout = 64 * 64
    command = [sys.executable, f"leanrl/{SCRIPT}.py", "--compile", "--env-id", ENV_ID]
    command += [*FLAGS, "--total-timesteps", str(options.steps)]
    command += ["--eval-every", str(max(options.steps // 16 // rollout, 1) * rollout)]
    command += ["--save-model", "--exp-name", "joystick"]

    def progress(log: Path) -> None:
        done, said = processes.progress_in(log)
        print(f"\r{done / options.steps:4.0%} {said or '':60.60}", end="", file=sys.stderr)

    log = options.out / "logs/joystick.log"
    run = processes.run_and_read(command, log, progress, "the run")
    print(file=sys.stderr)
    found = run_dirs.read_metric(run.path, "charts/eval_return")
    rows = zip(found.seconds, found.steps, found.values, strict=True)
    record = {
        "schema": 1,
        "command": run.config["command"],
        "machine": run_dirs.machine([run.config]),
        "evaluations": [[float(x) for x in row] for row in rows],
        "following": follow(run.path / "checkpoint.pt"),
    }
    stem = options.out / "joystick"
    tables.write_json(stem.with_suffix(".json"), record)
    print(json.dumps(record["following"], indent=2))
    draw(record, stem)
    film(run.path / "checkpoint.pt", stem.with_suffix(".gif"))
    print(f"figure and film: {run_dirs.shown(stem)}.png, .gif")
    return 0


if __name__ == "__main__":
    program.start(main)
