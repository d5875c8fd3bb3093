"""Several agents with one policy: each agent of a parallel environment is a row of a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.common.observations import MASK, Observation, Parts, say_left_out
from examples.common.options import OptionError


def as_parallel(env: Any) -> Any:
    """An AEC environment of PettingZoo as a parallel one; a parallel environment as it is."""
    if not hasattr(env, "agent_iter"):
        return env
    from moolink.pettingzoo import parallel  # which needs PettingZoo for this alone

    return parallel(env)


class ParallelEnvs:
    """Parallel environments of PettingZoo's form as a vector with a row for each agent of each.

    All agents have one observation space and one action space. An agent that is done before the
    others sees zeros, terminated, until the episode is over; what it does is ignored.

    Raises:
        OptionError: the agents' spaces differ, or no network takes their observations.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        self._envs = list(envs)
        self._agents: list[Any] = list(envs[0].possible_agents)
        first = self._agents[0]
        observed, acted = envs[0].observation_space, envs[0].action_space
        for agent in self._agents:
            if observed(agent) != observed(first) or acted(agent) != acted(first):
                raise OptionError(
                    f"agents need the same spaces to have one policy: {agent!r} has "
                    f"{observed(agent)} and {acted(agent)}, {first!r} has {observed(first)} and "
                    f"{acted(first)}; SuperSuit's pad_observations_v0 and pad_action_space_v0 "
                    "make them equal"
                )
        _, infos = envs[0].reset()
        masked = MASK in infos.get(first, {})
        self._parts = Parts(observed(first), acted(first), masked)
        say_left_out(self._parts)
        self.num_envs = len(envs) * len(self._agents)
        self.single_observation_space = self._parts.boxes
        self.single_action_space = acted(first)

    def reset(self, *, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        rows = self._rows()
        for index, env in enumerate(self._envs):
            observations, infos = env.reset(seed=None if seed is None else seed + index)
            self._write(rows, index, observations, infos)
        return rows, {}

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        rows, last = self._rows(), self._rows()
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.ones(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for index, env in enumerate(self._envs):
            own = range(index * len(self._agents), (index + 1) * len(self._agents))
            alive = {a: actions[row] for a, row in zip(self._agents, own, strict=True)}
            alive = {agent: action for agent, action in alive.items() if agent in env.agents}
            observations, rewards, ended, cut_off, infos = env.step(alive)
            for agent, row in zip(self._agents, own, strict=True):
                if agent in alive:
                    reward[row] = rewards[agent]
                    terminated[row] = ended[agent]
                    truncated[row] = cut_off[agent] and not ended[agent]
            self._write(last, index, observations, infos)
            if not env.agents:
                observations, infos = env.reset()
            self._write(rows, index, observations, infos)
        return rows, reward, terminated, truncated, {"final_obs": last}

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _rows(self) -> Observation:
        return {
            name: np.full((self.num_envs, *box.shape), name == MASK, box.dtype)
            for name, box in self._parts.boxes.items()
        }

    def _write(self, rows: Observation, index: int, observations: Any, infos: Any) -> None:
        for offset, agent in enumerate(self._agents):
            if agent in observations:
                parts = self._parts.of(observations[agent], infos.get(agent, {}))
                for name, value in parts.items():
                    rows[name][index * len(self._agents) + offset] = value
