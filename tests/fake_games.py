"""Games in EnvPool's interface that keep an account of what they were asked, and end in every way.

EnvPool's own games hardly ever end by the limit of frames, and never by both kinds of end at once.
"""

from typing import NamedTuple

import gymnasium as gym
import numpy as np

A = 4  # actions
ENDS = {  # what may happen in a step: the loss of a life, the end of the game, the limit of frames
    (True, False, False): 0.08,
    (True, True, False): 0.05,
    (False, True, False): 0.05,
    (False, False, True): 0.05,
    (True, False, True): 0.05,
    (True, True, True): 0.05,
    (False, False, False): 0.67,
}


class Played(NamedTuple):
    """A step of a game, as the agent has to see it."""

    obs: np.ndarray  # (4, 84, 84), which the action answers
    action: int
    reward: float  # for learning
    score: float  # of the game
    terminated: bool
    truncated: bool  # and not terminated
    whole: bool  # whether the game is over, and not only a life
    final_obs: np.ndarray  # (4, 84, 84), what follows, before any reset


class FakeGames:
    """N games; game i draws from `seed + i` what happens in it, whatever is done.

    As in EnvPool, the step after an end resets, its action and reward count for nothing, and the
    limit hides that the episode was over as well: `infos["terminated"]` tells.
    """

    def __init__(self, env_id, num_envs, seed, episodic_life=False, reward_clip=False, **options):
        self.made = {"env_id": env_id, "num_envs": num_envs, "seed": seed} | options
        self.made |= {"episodic_life": episodic_life, "reward_clip": reward_clip}
        self.action_space = gym.spaces.Discrete(A)
        self.episodic_life, self.reward_clip = episodic_life, reward_clip
        self.draws = [np.random.default_rng(seed + i) for i in range(num_envs)]
        self.ended = np.zeros(num_envs, dtype=bool)  # whether the next step resets
        self.played = [[] for _ in range(num_envs)]
        self.current = np.stack([self.frame(i) for i in range(num_envs)])
        self.closed = False
        self.sent = None  # actions, until what they lead to is received

    def frame(self, i) -> np.ndarray:
        """An image, brighter or darker than the one before: the network has to see a difference."""
        brightest = self.draws[i].integers(2, 257)
        return self.draws[i].integers(0, brightest, (4, 84, 84), dtype=np.uint8)

    def reset(self):
        return self.current.copy(), {}

    def close(self):
        self.closed = True

    def send(self, actions):
        assert self.sent is None
        self.sent = np.array(actions)

    def recv(self):
        actions, self.sent = self.sent, None
        return self.step(actions)

    def step(self, actions, env_id=None):
        env_id = np.arange(len(self.played)) if env_id is None else env_id
        assert len(actions) == len(env_id) and not self.closed
        rows = [self.step_one(i, action) for i, action in zip(env_id, actions, strict=True)]
        obs, rewards, terminated, truncated, scores, over = map(np.array, zip(*rows, strict=True))
        infos = {"reward": scores, "terminated": over.astype(np.int32), "env_id": env_id}
        return obs, rewards, terminated, truncated, infos

    def step_one(self, i, action):
        nothing = np.float32(0)
        if self.ended[i]:
            self.ended[i] = False
            self.current[i] = self.frame(i)
            return self.current[i].copy(), nothing, False, False, nothing, False
        kinds = list(ENDS)
        life, over, limit = kinds[self.draws[i].choice(len(kinds), p=list(ENDS.values()))]
        if not self.reward_clip and self.draws[i].random() < 0.7:  # longer and shorter games
            life = over = limit = False
        score = np.float32(self.draws[i].integers(-2, 8))
        reward = np.sign(score) if self.reward_clip else score
        done = over or limit or (life and self.episodic_life)
        final_obs = self.frame(i)
        step = Played(
            obs=self.current[i].copy(),
            action=int(action),
            reward=reward,
            score=score,
            terminated=done and (over or not limit),
            truncated=limit and not over,
            whole=over or limit,
            final_obs=final_obs,
        )
        self.played[i].append(step)
        self.current[i] = final_obs
        self.ended[i] = done
        return final_obs, reward, done and not limit, limit, score, over


def whole_games(games: list) -> list[tuple[int, float, int]]:
    """(number of the step, score, length) of each game that is over, in the order of their ends."""
    found = []
    for i, steps in enumerate(games):
        score = length = 0
        for t, step in enumerate(steps):
            score, length = score + step.score, length + 1
            if step.whole:
                found.append((t, i, score, length))
                score = length = 0
    return [(t, score, length) for t, _, score, length in sorted(found)]
