"""A robot that learns to run: its return over time, and a film of it on the way.

    python plots/measure/robot.py            HalfCheetah, for minutes; files in plots/out/
    python plots/measure/robot.py --tasks HalfCheetah-v5 Humanoid-v5 --minutes 10 --film 0 2 10

PPO on worlds, the variant with --compile, learns one task after the other with all cores: --steps
environment steps or, with --minutes, those that one core makes in that time. It is evaluated in
Gymnasium's own environment, and its checkpoints of the minutes --film are kept: those of the first
rollout and of the end, if nothing else is said. The film shows the first seconds of an episode of
each without noise, and says what return the whole episode had.

Written to --out: robot.png and .svg with the returns; robot.gif with the film, where OpenGL can
draw; robot.json and checkpoints. Exit status 1 if a run failed.
"""

import argparse
import importlib
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import processes
import program
import race
import run_dirs
import tables

SCRIPT = "ppo_mujoco_worlds_torchcompile"
STEPS = 900_000  # with which HalfCheetah gets beyond a return of 5,000
EVALUATED = "charts/eval_return"
PANEL = (240, 180)  # width and height of a robot's picture
FRAMES_PER_SECOND = 12
SECONDS = 4  # of film


def is_kept(minutes: list[float], kept: list[dict], elapsed: float) -> bool:
    """Whether a checkpoint of now is the one of the next minute to keep."""
    return len(kept) < len(minutes) and elapsed >= 60 * minutes[len(kept)]


def train(task: str, options: argparse.Namespace, bar) -> dict:
    """Learns a task -> {task, evaluations, shots}; ValueError says what went wrong."""
    steps = options.steps
    if options.minutes:
        steps = race.steps_of("PPO on worlds", task, options.minutes)
    rollout = 64 * 128
    name = f"robot-{time.time_ns()}"
    command = [sys.executable, f"leanrl/{SCRIPT}.py", "--compile"]
    command += ["--env-id", f"worlds/{task}", "--total-timesteps", str(steps), "--exp-name", name]
    command += ["--eval-every", str(max(steps // 10 // rollout, 1) * rollout)]
    command += ["--checkpoint-every", str(rollout), "--save-model"]
    for flag, value in race.FLAGS.get(("PPO on worlds", task), {}).items():
        command += [f"--{flag.replace('_', '-')}", str(value)]
    shots = []
    born = time.monotonic()
    started = time.time()
    folder = options.out / "robot"
    folder.mkdir(exist_ok=True)

    def keep(checkpoint: Path) -> None:
        minutes = (time.monotonic() - born) / 60
        copy = folder / f"{task}-{len(shots)}.pt"
        shutil.copy(checkpoint, copy)
        shots.append({"minutes": minutes, "checkpoint": run_dirs.shown(copy)})

    def progress(log: Path) -> None:
        done, said = processes.progress_in(log)
        bar(task, done / steps, said or "starts and compiles, about half a minute")
        for checkpoint in (run_dirs.ROOT / "runs").glob(f"*__{name}__*/checkpoint.pt"):
            if is_kept(options.film, shots, time.monotonic() - born):
                keep(checkpoint)

    limit = 60 * options.minutes * 1.5 if options.minutes else math.inf
    log = options.out / f"logs/robot-{task}.log"
    run = processes.run_and_read(command, log, progress, "the run", limit=limit)
    if len(shots) < len(options.film):
        keep(run.path / "checkpoint.pt")
    found = run_dirs.read_metric(run.path, EVALUATED)
    imports = max(int(run.path.name.rpartition("__")[2]) - started, 0)  # before the first event
    rows = zip(found.seconds + imports, found.steps, found.values, strict=True)
    evaluations = [[float(x) for x in row] for row in rows]
    return {"task": task, "command": run.config["command"], "evaluations": evaluations} | {
        "shots": shots,
        "machine": run_dirs.machine([run.config]),
    }


def draw(robots: list[dict], stem: Path) -> None:
    """Return over seconds, a panel per robot."""
    import curves
    import matplotlib.pyplot as plt

    size = (5 * len(robots), 3.4)
    figure, panels = plt.subplots(1, len(robots), figsize=size, squeeze=False, layout="constrained")
    for ax, robot in zip(panels[0], robots, strict=True):
        seconds, _, returns = np.array(robot["evaluations"]).T
        ax.plot(seconds, returns, "o-", color=curves.COLOURS["compile"], clip_on=False)
        title = f"{robot['task']}: {returns[-1]:,.0f} after {seconds[-1]:.0f} s"
        ax.set(title=title, xlabel="seconds since the start, of which all count")
        ax.set(xlim=(0, None), ylim=(min(0, *returns), 1.05 * max(returns)))
    panels[0][0].set_ylabel("return of ten episodes without noise")
    curves.save(figure, stem)


# The film, in a process of its own: MuJoCo asks for OpenGL when it is imported


def play(task: str, checkpoint: Path) -> tuple[list[np.ndarray], float]:
    """Pictures of the first seconds of an episode without noise, and its whole return."""
    import gymnasium as gym
    import torch

    script = importlib.import_module(f"leanrl.{SCRIPT}")
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    width, height = PANEL
    size = {"width": width, "height": height}
    env = gym.make(task, render_mode="rgb_array", camera_name="track", **size)
    args = script.Args(**saved["args"])
    worlds = gym.make_vec(f"worlds/{task}", num_envs=1)
    agent = script.PPO(args, worlds, torch.device("cpu"))
    agent.load_state_dict(saved["agent"])
    pictures = []
    obs, _ = env.reset(seed=1)
    total = 0.0
    at = 0.0  # seconds of the episode
    ended = False
    while not ended:
        if len(pictures) < FRAMES_PER_SECOND * SECONDS and at >= len(pictures) / FRAMES_PER_SECOND:
            pictures.append(env.render())
        with torch.no_grad():
            mean, log_std = agent.model(torch.tensor(obs)[None].float())
            actions = script.clipped_mean(mean, log_std, worlds.low, worlds.high)
        obs, reward, terminated, truncated, _ = env.step(actions[0].numpy())
        total += reward
        at += env.unwrapped.dt
        ended = terminated or truncated
    missing = FRAMES_PER_SECOND * SECONDS - len(pictures)
    pictures += missing * [env.render()]  # it has fallen
    env.close()
    return pictures, total


def save_film(pictures: list, path: Path, frames_per_second: int) -> None:
    """Pillow's images as a GIF of 64 colours, those of the last one."""
    palette = pictures[-1].quantize(64)
    first, *others = [picture.quantize(palette=palette, dither=0) for picture in pictures]
    duration = 1000 // frames_per_second
    first.save(path, save_all=True, append_images=others, duration=duration, loop=0, optimize=True)


def shoot(robots: list[dict], path: Path) -> None:
    """The film: a row per robot, a column per shot, which learns what its episode returned."""
    from PIL import Image, ImageDraw, ImageFont

    width, height = PANEL
    columns = max(len(robot["shots"]) for robot in robots)
    sheets = []
    for _ in range(FRAMES_PER_SECOND * SECONDS):
        sheets.append(Image.new("RGB", (width * columns, height * len(robots))))
    font = ImageFont.load_default(14)
    for row, robot in enumerate(robots):
        for column, shot in enumerate(robot["shots"]):
            checkpoint = run_dirs.ROOT / shot["checkpoint"]
            pictures, shot["return"] = play(robot["task"], checkpoint)
            name = robot["task"].partition("-")[0]
            said = f"{name}, {shot['minutes']:.0f} min: {shot['return']:,.0f}"
            for sheet, picture in zip(sheets, pictures, strict=True):
                panel = Image.fromarray(picture)
                ImageDraw.Draw(panel).text(
                    (8, 6), said, "white", font, stroke_width=2, stroke_fill="black"
                )
                sheet.paste(panel, (width * column, height * row))
    save_film(sheets, path, FRAMES_PER_SECOND)


def try_to_shoot(record: Path) -> str:
    """Makes the film by the first OpenGL that there is -> a line about it."""
    given = os.environ.get("MUJOCO_GL")
    command = [sys.executable, __file__, "--shoot", str(record)]
    for system in [given] if given else ["egl", "osmesa"]:
        environment = os.environ | {"MUJOCO_GL": system}
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
        if done.returncode == 0:
            return f"film: {run_dirs.shown(record.with_suffix('.gif'))}"
        *_, reason = done.stderr.strip().splitlines() or ["it does not say why"]
    return f"no film: {reason} (MuJoCo draws by OpenGL; Debian, Ubuntu: apt install libegl1)"


def main(arguments: list[str] | None = None) -> int:
    parser = program.make_parser(__doc__, "--out", "--steps")
    parser.set_defaults(steps=STEPS)
    parser.add_argument(
        "--tasks", nargs="+", choices=race.STEPS["PPO on worlds"], default=["HalfCheetah-v5"]
    )
    parser.add_argument("--minutes", type=program.few, help="instead of --steps")
    parser.add_argument("--film", nargs="+", type=float, default=[0, math.inf], help="minutes")
    parser.add_argument("--shoot", type=Path, help="internal: the film of this record")
    options = parser.parse_args(arguments)
    if options.shoot:
        record = run_dirs.read_json(options.shoot)
        shoot(record["robots"], options.shoot.with_suffix(".gif"))
        tables.write_json(options.shoot, record)  # now with the returns that the film shows
        return 0
    robots = []
    failures = []
    begun = time.monotonic()

    def bar(task: str, share: float, said: str) -> None:
        seconds = time.monotonic() - begun
        print(f"\r{task} {share:4.0%}, {seconds:3.0f} s: {said:60.60}", end="", file=sys.stderr)

    for task in options.tasks:
        try:
            robots.append(train(task, options, bar))
        except (ValueError, OSError) as failure:  # also: its time was up before a checkpoint
            failures.append(f"{task}: {failure}")
        print(file=sys.stderr)
    if robots:
        stem = options.out / "robot"
        draw(robots, stem)
        path = stem.with_name("robot.json")
        tables.write_json(path, {"schema": 1, "robots": robots})
        for robot in robots:
            seconds, _, last = robot["evaluations"][-1]
            print(f"{robot['task']}: a return of {last:,.0f} after {seconds:.0f} s")
        print(f"figure: {run_dirs.shown(stem.with_name('robot.png'))}")
        print(try_to_shoot(path), flush=True)
    return processes.say_failures(failures)


if __name__ == "__main__":
    program.start(main)
