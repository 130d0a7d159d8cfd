"""A task of one's own: an ant that is steered by a joystick, on mujoco_worlds.py.

    PYTHONPATH=leanrl/tasks python leanrl/ppo_mujoco_worlds_torchcompile.py --compile \
        --env-id joystick:AntJoystick-v0 --randomize 0.2 --num-steps 64 --desired-kl 0.02 \
        --total-timesteps 3000000 --eval-every 250000

The command is a speed forward, 0 to 2 m/s, and a rate of turning, -1 to 1 rad/s; it changes every
three seconds. The policy sees what a robot's sensors tell, with errors: velocities, which way is
up, joints, its last actions, and the command. Its critic also sees all of that without errors, and
the pushes, of which there is one a second. A step is rewarded by up to 2.
"""

from mujoco_worlds import Task, join, register, sum_squares, uniform_like

ERRORS = 3 * [0.1] + 3 * [0.2] + 3 * [0.05] + 8 * [0.02] + 8 * [0.5]  # of the sensors, at most


class AntJoystick(Task):
    model = "ant.xml"
    frame_skip = 5  # 0.05 s
    reads = ("xmat",)
    memory = {"command": 2, "smooth": 3, "last_actions": 8, "errors": 25, "qfrc_applied": 14}
    noise = 0.1

    def torso(self, s):
        """Rotation matrices (N, 3, 3), whose columns are the torso's axes in the world."""
        return s.xmat[:, 1].view(-1, 3, 3)

    def velocity(self, s):
        """Of the torso in its own axes: forward, left and up, in m/s (N, 3)."""
        return (self.torso(s) * s.qvel[:, :3, None]).sum(1)

    def observe(self, s):
        up = self.torso(s)[:, 2]
        sensors = join(self.velocity(s), s.qvel[:, 3:6], up, s.qpos[:, 7:], s.qvel[:, 6:])
        policy = join(sensors + s.errors, s.actions, s.command)
        return policy, join(sensors, s.smooth, s.qpos[:, 2:3], s.qfrc_applied[:, :2])

    def reward(self, s):
        forward, left, turning = s.smooth.unbind(1)
        speed, rate = s.command.unbind(1)
        errors = (forward - speed).abs() + 0.5 * left.abs() + 0.5 * (turning - rate).abs()
        costs = 0.01 * sum_squares(s.actions - s.last_actions) + 0.005 * sum_squares(s.actions)
        return 2 - errors - costs

    def terminated(self, s):
        height = s.qpos[:, 2]
        return (self.torso(s)[:, 2, 2] < 0) | (height < 0.2) | (height > 1)

    def begin(self, s, mask, generator):
        command = uniform_like(s.command, generator)
        command[:, 0] += 1
        s.command.copy_(command.where(mask[:, None], s.command))
        s.last_actions.masked_fill_(mask[:, None], 0)
        s.smooth.masked_fill_(mask[:, None], 0)

    def advance(self, s, generator):
        command = uniform_like(s.command, generator)
        command[:, 0] += 1
        s.command.copy_(command.where((s.steps % 60 == 0)[:, None], s.command))
        now = join(self.velocity(s)[:, :2], s.qvel[:, 5:6])
        s.smooth.lerp_(now, 0.1)  # a gait swings: what counts are the means of half a second
        s.last_actions.copy_(s.actions)
        s.errors.copy_(uniform_like(s.errors, generator) * s.errors.new_tensor(ERRORS))
        pushes = 5 * uniform_like(s.qfrc_applied, generator)  # in N, for one step
        pushed = uniform_like(s.steps, generator) > 0.9
        s.qfrc_applied[:, :2] = pushes[:, :2] * pushed[:, None]


register("AntJoystick-v0", AntJoystick())
