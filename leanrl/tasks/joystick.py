"""A task of one's own: an ant that follows a joystick, on mujoco_worlds.py.

    PYTHONPATH=leanrl/tasks python leanrl/ppo_mujoco_worlds_torchcompile.py --compile \
        --env-id joystick:AntJoystick-v0 --randomize 0.2 --eval-every 500000

The command is a velocity forward, one to the left and a rate of turning, each between -1 and 1; it
changes every three seconds. The policy sees what a robot's sensors tell, with noise: which way is
down, the gyroscope, joints, its last actions, and the command. Its critic also sees the velocities
and the pushes, of which there is one in two seconds. A step is rewarded by up to 1.5.
"""

import torch
from mujoco_worlds import Task, join, register, sum_squares, uniform_like


class AntJoystick(Task):
    model = "ant.xml"
    frame_skip = 5  # 0.05 s
    reads = ("xmat",)
    memory = {"command": 3, "last_actions": 8, "qfrc_applied": 14}
    noise = 0.1
    obs_noise = 3 * [0.05] + 3 * [0.2] + 8 * [0.02] + 8 * [0.5] + 11 * [0.0]

    def torso(self, s):
        """Rotation matrices (N, 3, 3), whose columns are the torso's axes in the world."""
        return s.xmat[:, 1].view(-1, 3, 3)

    def velocities(self, s):
        """What is commanded (N, 3): forward and left in m/s, turning in rad/s."""
        linear = (self.torso(s) * s.qvel[:, :3, None]).sum(1)
        return join(linear[:, :2], s.qvel[:, 5:6])

    def observe(self, s):
        up = self.torso(s)[:, 2]
        policy = join(up, s.qvel[:, 3:6], s.qpos[:, 7:], s.qvel[:, 6:], s.actions, s.command)
        return policy, join(self.velocities(s), s.qpos[:, 2:3], s.qfrc_applied[:, :2])

    def reward(self, s):
        errors = (self.velocities(s) - s.command).square()
        moving = torch.exp(-errors[:, :2].sum(1) / 0.25)
        turning = torch.exp(-errors[:, 2] / 0.25)
        costs = 0.01 * sum_squares(s.actions - s.last_actions) + 0.005 * sum_squares(s.actions)
        return moving + 0.5 * turning - costs

    def terminated(self, s):
        height = s.qpos[:, 2]
        return (self.torso(s)[:, 2, 2] < 0) | (height < 0.2) | (height > 1)

    def begin(self, s, mask, generator):
        command = uniform_like(s.command, generator)
        s.command.copy_(command.where(mask[:, None], s.command))
        s.last_actions.masked_fill_(mask[:, None], 0)

    def advance(self, s, generator):
        self.begin(s, s.steps % 60 == 0, generator)
        s.last_actions.copy_(s.actions)
        pushes = 5 * uniform_like(s.qfrc_applied, generator)  # in N, for one step
        pushed = uniform_like(s.steps, generator) > 0.95
        s.qfrc_applied[:, :2] = pushes[:, :2] * pushed[:, None]


register("AntJoystick-v0", AntJoystick())
