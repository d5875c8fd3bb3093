"""Small tasks that learners are tried on, registered with Gymnasium under `moolink/`.

`moolink/Catch-v0` is learned within seconds, `moolink/Recall-v0` by a network with a memory only,
and `Meet` by two agents with one policy.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

Infos = dict[str, Any]


class Catch(VectorEnv):
    """A ball falls through a grid of 10 x 5; a paddle in the last row must be under it.

    Actions: left, stay, right. The reward, +1 or -1, comes with the ball's last move. All games are
    rows of a few arrays.
    """

    ROWS, COLUMNS = 10, 5
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 255, (self.ROWS, self.COLUMNS), np.uint8)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._row = np.zeros(num_envs, np.int64)
        self._ball = np.zeros(num_envs, np.int64)
        self._paddle = np.zeros(num_envs, np.int64)
        self._random = np.random.default_rng()

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], Infos]:
        self._random = np.random.default_rng(seed)
        self._restart(np.ones(self.num_envs, np.bool_))
        return self._render(), {}

    def step(self, actions: NDArray[np.int64]) -> tuple[Any, Any, Any, Any, Infos]:
        self._row += 1
        self._paddle = np.clip(self._paddle + actions - 1, 0, self.COLUMNS - 1)
        over = self._row == self.ROWS - 1
        reward = np.where(over, np.where(self._paddle == self._ball, 1.0, -1.0), 0.0)
        self._restart(over)
        return self._render(), reward, over, np.zeros_like(over), {}

    def _restart(self, which: NDArray[np.bool_]) -> None:
        count = int(which.sum())
        self._row[which] = 0
        self._ball[which] = self._random.integers(self.COLUMNS, size=count)
        self._paddle[which] = self.COLUMNS // 2

    def _render(self) -> NDArray[np.uint8]:
        grid = np.zeros((self.num_envs, self.ROWS, self.COLUMNS), np.uint8)
        index = np.arange(self.num_envs)
        grid[index, self._row, self._ball] = 255
        grid[index, self.ROWS - 1, self._paddle] = 255
        return grid


class Recall(gymnasium.Env[NDArray[np.float32], int]):
    """One of four cues is shown at the first step, and asked for at the last one.

    The reward is 1 if the last action names it. Without a memory the mean return is 1/4 at most.
    """

    CUES, STEPS = 4, 8

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 1, (self.CUES + 1,), np.float32)
        self.action_space = spaces.Discrete(self.CUES)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], Infos]:
        super().reset(seed=seed)
        self._cue, self._step = int(self.np_random.integers(self.CUES)), 0
        observation = np.zeros(self.CUES + 1, np.float32)
        observation[self._cue] = 1.0
        return observation, {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, Infos]:
        over = self._step == self.STEPS - 1
        self._step += 1
        observation = np.zeros(self.CUES + 1, np.float32)
        observation[self.CUES] = self._step == self.STEPS - 1  # it is being asked for
        return observation, float(over and action == self._cue), over, False, {}


class Meet:
    """Two agents on a line of 21 cells, who see the place of each other, are to meet.

    A parallel environment of PettingZoo's form. Actions: left, stay, right. Both get 1 when they
    are in one cell, which ends the episode, and -0.02 for each step before; 50 steps cut it off.
    """

    CELLS, STEPS = 21, 50
    possible_agents = ("left", "right")

    def __init__(self) -> None:
        self.agents: list[str] = []
        self._random = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 1, (2 * self.CELLS,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], Infos]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._places = self._random.choice(self.CELLS, size=2, replace=False)
        self._step = 0
        self.agents = list(self.possible_agents)
        return self._observations(), {}

    def step(self, actions: dict[str, int]) -> tuple[Any, Any, Any, Any, Infos]:
        moves = [int(actions[agent]) - 1 for agent in self.possible_agents]
        before = self._places
        self._places = np.clip(before + moves, 0, self.CELLS - 1)
        crossed = (before[0] - before[1]) * (self._places[0] - self._places[1]) <= 0
        self._step += 1
        cut_off = not crossed and self._step == self.STEPS
        self.agents = [] if crossed or cut_off else self.agents

        def each(value: Any) -> dict[str, Any]:
            return dict.fromkeys(self.possible_agents, value)

        reward = 1.0 if crossed else -0.02
        return self._observations(), each(reward), each(bool(crossed)), each(cut_off), {}

    def close(self) -> None:
        """Nothing to end."""

    def _observations(self) -> dict[str, NDArray[np.float32]]:
        cells = np.eye(self.CELLS, dtype=np.float32)
        own, other = cells[self._places]
        return {
            "left": np.concatenate([own, other]),
            "right": np.concatenate([other, own]),
        }


gymnasium.register("moolink/Catch-v0", vector_entry_point=Catch)
gymnasium.register("moolink/Recall-v0", entry_point=Recall)
