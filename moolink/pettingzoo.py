"""PettingZoo's parallel environments: agents as rows of a vector environment, with a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.env_pool.driving import Step
from moolink.env_pool.observations import writer
from moolink.env_pool.spaces import describe, map_tree
from moolink.env_pool.vector_env import VectorEnv
from moolink.internal.extras import needed_by

with needed_by("moolink.pettingzoo", "pettingzoo"):
    import gymnasium
    from gymnasium import spaces

Array = npt.NDArray[Any]


def parallel(env: Any) -> Any:
    """An AEC environment of PettingZoo as a parallel one; a parallel environment as it is.

    Where PettingZoo's `aec_to_parallel` does not take it because its agents act in turn, each step
    is that of the agent whose turn it is, and the actions of the others are ignored.
    """
    if not hasattr(env, "agent_iter"):
        return env
    with needed_by("moolink.pettingzoo", "pettingzoo"):
        from pettingzoo.utils import conversions
    if env.metadata.get("is_parallelizable", False):
        return conversions.aec_to_parallel(env)
    return conversions.turn_based_aec_to_parallel(env)


class Agents(gymnasium.Env[Any, Any]):
    """A PettingZoo environment as one environment that a `moolink.VectorEnv` can run.

    Observes a dict of arrays whose first dimension are `possible_agents`: "observation", zeros for
    agents that are not there; "mask", bool, those that live and are to act; "reward", float32,
    "terminated" and "truncated", bool, of the last step. An episode ends when no agent is left.

    Args:
        create: makes the parallel environment, or an AEC environment, which `parallel` converts;
            its agents share one observation and one action space, of kinds that are arrays.

    Raises:
        ValueError: the agents' spaces differ.
    """

    def __init__(self, create: Callable[[], Any]) -> None:
        self._env = parallel(create())
        self.possible_agents: list[Any] = list(self._env.possible_agents)
        observed, acted = self._env.observation_space, self._env.action_space
        first, count = self.possible_agents[0], len(self.possible_agents)
        for agent in self.possible_agents:
            if observed(agent) != observed(first) or acted(agent) != acted(first):
                raise ValueError(
                    f"agents need the same spaces to be rows: {agent!r} has {observed(agent)} and "
                    f"{acted(agent)}, {first!r} has {observed(first)} and {acted(first)}"
                )
        self._space: Any = gymnasium.vector.utils.batch_space(observed(first), count)
        flags = spaces.MultiBinary(count)
        self.observation_space = spaces.Dict(
            {
                "observation": self._space,
                "mask": flags,
                "reward": spaces.Box(-np.inf, np.inf, (count,), np.float32),
                "terminated": flags,
                "truncated": flags,
            }
        )
        self.action_space = gymnasium.vector.utils.batch_space(acted(first), count)
        self.metadata = dict(getattr(self._env, "metadata", {}))
        self.single = (observed(first), acted(first))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode; infos are by the agents' names."""
        observations, infos = self._env.reset(seed=seed, options=options)
        return self._observed(observations, {}, {}, {}), _named(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Has the living agents take their rows' actions; the reward is the sum of theirs."""
        each = dict(
            zip(
                self.possible_agents,
                gymnasium.vector.utils.iterate(self.action_space, action),
                strict=True,
            )
        )
        observations, rewards, terminated, truncated, infos = self._env.step(
            {agent: each[agent] for agent in self._env.agents}
        )
        over = not self._env.agents
        ended = over and any(terminated.values())
        return (
            self._observed(observations, rewards, terminated, truncated),
            float(sum(rewards.values())),
            ended,
            over and not ended,
            _named(infos),
        )

    def close(self) -> None:
        """Closes the parallel environment."""
        self._env.close()

    def _observed(self, observations: Any, rewards: Any, terminated: Any, truncated: Any) -> Any:
        agents, living = self.possible_agents, set(self._env.agents)
        single, _ = self.single
        stacked: Any = gymnasium.vector.utils.create_empty_array(single, len(agents))
        write = writer(describe(single, "obs"), stacked)
        for row, agent in enumerate(agents):
            if agent in observations:
                try:
                    write(row, observations[agent])
                except (ValueError, TypeError) as error:
                    raise type(error)(f"agent {agent!r}: {error}") from error
        return {
            "observation": stacked,
            "mask": np.array([agent in living for agent in agents], np.int8),
            "reward": np.array([rewards.get(agent, 0.0) for agent in agents], np.float32),
            "terminated": np.array([terminated.get(agent, False) for agent in agents], np.int8),
            "truncated": np.array([truncated.get(agent, False) for agent in agents], np.int8),
        }


def _named(infos: dict[Any, Any]) -> dict[str, Any]:
    return {str(agent): info for agent, info in infos.items() if info}


class Rows:
    """The agents of a `moolink.VectorEnv` of `Agents` as rows, driven as `moolink.drive` says.

        make = functools.partial(moolink.pettingzoo.Agents, make_parallel_env)
        rows = moolink.pettingzoo.Rows(moolink.VectorEnv(make, num_envs=16))

    Row e x A + a is agent a of environment e, A being the number of possible agents.
    ``infos["mask"]`` tells which rows have a living agent that acts next; actions of the others are
    ignored. `terminated` and `truncated` are an agent's own. In the step that ends an episode the
    observation and the mask are those of the next one.

    Args:
        envs: with autoreset mode SAME_STEP. It is closed with this object.
    """

    def __init__(self, envs: VectorEnv) -> None:
        if envs.autoreset_mode != gymnasium.vector.AutoresetMode.SAME_STEP:
            raise ValueError(f"autoreset_mode must be SAME_STEP, not {envs.autoreset_mode}")
        self._envs = envs
        singles = envs.get_attr("single")
        self.single_observation_space, self.single_action_space = singles[0]
        self.agents: int = envs.single_observation_space["mask"].shape[0]  # type: ignore[index]
        self.num_envs = envs.num_envs * self.agents
        self._last: Array = np.arange(envs.num_envs)

    def async_reset(self, seed: int | None = None) -> None:
        """Resets all environments, environment e from seed + e."""
        self._envs.async_reset(seed)

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Has rows take their actions: all those of the environments of the last `recv`."""
        if env_ids is not None and not np.array_equal(env_ids, self._rows(self._last)):
            raise ValueError("agents act together: send actions for the rows of the last recv")

        def of_environments(array: Any) -> Any:
            return array.reshape(len(self._last), self.agents, *array.shape[1:])

        self._envs.send(map_tree(of_environments, actions), self._last)

    def recv(self, timeout: float | None = None) -> Step:
        """Waits for environments that are ready; see `moolink.env_pool.driving.Driven`."""
        observed, _, terminated, truncated, infos = self._envs.recv(timeout)
        self._last = infos["env_id"]
        for place in np.flatnonzero(terminated | truncated).tolist():
            for name in ("reward", "terminated", "truncated"):
                observed[name][place] = infos["final_obs"][place][name]
        flat = map_tree(lambda array: array.reshape(-1, *array.shape[2:]), observed)
        infos["env_id"] = self._rows(self._last)
        infos["mask"] = flat["mask"].view(np.bool_)
        return (
            flat["observation"],
            flat["reward"],
            flat["terminated"].view(np.bool_),
            flat["truncated"].view(np.bool_),
            infos,
        )

    def close(self) -> None:
        """Closes the VectorEnv."""
        self._envs.close()

    def _rows(self, environments: Array) -> Array:
        rows: Array = environments[:, None] * self.agents + np.arange(self.agents)
        return rows.ravel()
