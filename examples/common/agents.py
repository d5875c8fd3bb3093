"""Several agents with one policy: each agent of a parallel environment is a row of a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class ParallelEnvs:
    """Parallel environments of PettingZoo's form as a vector with a row for each agent of each.

    All agents have one observation space, a Box, and one action space. An agent that is done before
    the others sees zeros, terminated, until the episode is over; what it does is ignored.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        self._envs = list(envs)
        self._agents: list[str] = list(envs[0].possible_agents)
        first = self._agents[0]
        observation = envs[0].observation_space(first)
        self._dtype = np.uint8 if observation.dtype == np.uint8 else np.float32
        self.num_envs = len(envs) * len(self._agents)
        self.single_observation_space = spaces.Box(
            observation.low.astype(self._dtype),
            observation.high.astype(self._dtype),
            dtype=self._dtype,
        )
        self.single_action_space = envs[0].action_space(first)

    def reset(self, *, seed: int | None = None) -> tuple[NDArray[Any], dict[str, Any]]:
        rows = self._rows()
        for index, env in enumerate(self._envs):
            observations, _ = env.reset(seed=None if seed is None else seed + index)
            self._write(rows, index, observations)
        return rows, {}

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        rows, last = self._rows(), self._rows()
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.ones(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for index, env in enumerate(self._envs):
            own = range(index * len(self._agents), (index + 1) * len(self._agents))
            alive = {a: actions[row] for a, row in zip(self._agents, own, strict=True)}
            alive = {agent: action for agent, action in alive.items() if agent in env.agents}
            observations, rewards, ended, cut_off, _ = env.step(alive)
            for agent, row in zip(self._agents, own, strict=True):
                if agent in alive:
                    reward[row] = rewards[agent]
                    terminated[row] = ended[agent]
                    truncated[row] = cut_off[agent] and not ended[agent]
            self._write(last, index, observations)
            if not env.agents:
                observations, _ = env.reset()
            self._write(rows, index, observations)
        return rows, reward, terminated, truncated, {"final_obs": last}

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _rows(self) -> NDArray[Any]:
        return np.zeros((self.num_envs, *self.single_observation_space.shape), self._dtype)

    def _write(self, rows: NDArray[Any], index: int, observations: dict[str, Any]) -> None:
        for offset, agent in enumerate(self._agents):
            if agent in observations:
                rows[index * len(self._agents) + offset] = observations[agent]
