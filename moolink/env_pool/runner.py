"""Carrying out the requests of a pool on the environments of one worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from moolink.env_pool import channel
from moolink.env_pool.environment import Environment, EnvironmentFailed, as_five
from moolink.env_pool.memory import Array, PoolMemory, PoolShape
from moolink.env_pool.observations import Write, writer
from moolink.env_pool.spaces import Leaf, Tree, map_tree

Failed = Callable[[Environment, EnvironmentFailed], None]


class Runner:
    """Steps, resets and calls environments, and writes what they give into the shared memory.

    Attributes:
        environments: by row.
        results: what the last request gave that has no place in the shared memory.
    """

    def __init__(
        self,
        shape: PoolShape,
        memory: PoolMemory,
        behaviour: channel.Behaviour,
        environments: dict[int, Environment],
        current: memoryview,
        failed: Failed,
    ) -> None:
        self.results = channel.Results()
        self._memory = memory
        self._behaviour = behaviour
        self.environments = environments
        self._current = current
        self._failed = failed
        for environment in environments.values():
            environment.doing = "step"
        self._action_tree = shape.action
        self._write = self._writer(shape.observation, memory.observation, "observations")
        self._write_final: Write | None = None
        if shape.terminal_observation:
            self._write_final = self._writer(
                shape.observation, memory.final_observation, "final_observations"
            )

    def _writer(self, tree: Tree | None, arrays: Tree | None, kind: str) -> Write:
        if tree is not None:
            return writer(tree, arrays)

        def write(row: int, observation: Any) -> None:
            getattr(self.results, kind)[row] = observation

        return write

    def step(self, first: int, count: int, given: dict[int, Any] | None) -> None:
        """Steps `count` environments from `first`; `given` are their actions if not shared."""
        rewards: list[float] = []
        ended: list[tuple[int, bool, bool]] = []
        rows = range(first, first + count)
        actions = self._actions(first, count) if given is None else [given[row] for row in rows]
        current, write, environments = self._current, self._write, self.environments
        keep_infos = self._behaviour.infos
        for row, action in zip(rows, actions, strict=True):
            environment = environments[row]
            current[0] = row + 1
            try:
                if environment.due:
                    reward, terminated, truncated = 0.0, False, self._begin(environment)
                    if truncated:
                        ended.append((row, False, True))
                else:
                    result = environment.env.step(action)
                    if os.getpid() != environment.pid:
                        environment.end_forked_child()
                    if type(result) is not tuple or len(result) != 5:
                        result = as_five(result)
                    observation, reward, terminated, truncated, info = result
                    if terminated or truncated:
                        ended.append((row, bool(terminated), bool(truncated)))
                        self._end(environment, observation, info)
                    else:
                        write(row, observation)
                        if info and keep_infos:
                            self.results.infos[row] = info
                    environment.failures = 0
                rewards.append(float(reward))
            except BaseException as error:  # noqa: BLE001 - `_recover` reports or raises it
                self._recover(environment, error)
                rewards.append(0.0)
                ended = [end for end in ended if end[0] != row] + [(row, False, True)]
        self._finish(first, count, rewards, ended)

    def reset(self, rows: range, arguments: channel.Arguments) -> None:
        """Resets the environments among `rows` that have a seed, be it None, in `arguments`."""
        for row in rows:
            if row not in arguments.of_row:
                continue
            environment = self.environments[row]
            self._current[0] = row + 1
            with environment.reporting():
                observation, info = environment.reset(arguments.of_row[row], arguments.shared)
                self._write(row, observation)
            self._started(environment, info)
            self._finish(row, 1, [0.0], [])

    def call(self, rows: range, arguments: channel.Arguments) -> None:
        """Calls a function of `calls` with each environment among `rows` that has arguments."""
        function, name = arguments.shared
        for row in rows:
            if row not in arguments.of_row:
                continue
            environment = self.environments[row]
            self._current[0] = row + 1
            environment.doing = name
            try:
                positional, keywords = arguments.of_row[row]
                answer = function(environment.env, name, *positional, **keywords)
                if os.getpid() != environment.pid:
                    environment.end_forked_child()
                self.results.answers[row] = answer
            except Exception as error:  # noqa: BLE001 - the caller is told, and the pool goes on
                self.results.errors[row] = environment.failed(error).report
            environment.doing = "step"

    # An episode's end and beginning.

    def _end(self, environment: Environment, observation: Any, info: dict[str, Any]) -> None:
        """An episode has ended with `observation`: goes on as the mode of the pool says."""
        row, infos = environment.index, self._behaviour.infos
        if self._behaviour.autoreset != "same":
            environment.due = self._behaviour.autoreset == "next"
            self._write(row, observation)
            if info and infos:
                self.results.infos[row] = info
            return
        if self._write_final is not None:
            self._write_final(row, observation)
        if info and infos:
            self.results.final_infos[row] = info
        observation, info = environment.begin()
        self._write(row, observation)
        self._started(environment, info)

    def _begin(self, environment: Environment) -> bool:
        """Begins an episode in place of a step; returns whether that cut off another one."""
        if environment.interrupted:
            self._cut_off(environment)
            return True
        observation, info = environment.begin()
        self._write(environment.index, observation)
        self._started(environment, info)
        return False

    def _cut_off(self, environment: Environment) -> None:
        """Ends the episode that a crash has cut off, at the last observation that there was."""
        row = environment.index
        environment.interrupted = False
        if self._behaviour.autoreset != "same":
            environment.due = self._behaviour.autoreset == "next"
            return
        if self._memory.final_observation is not None:

            def keep(observation: Array, final: Array) -> None:
                final[row] = observation[row]

            map_tree(keep, self._memory.observation, self._memory.final_observation)
        observation, info = environment.begin()
        self._write(row, observation)
        self._started(environment, info)

    def _started(self, environment: Environment, info: dict[str, Any]) -> None:
        environment.due = environment.interrupted = False
        self._memory.begun[environment.index] = True
        if info and self._behaviour.infos:
            self.results.infos[environment.index] = info

    def _recover(self, environment: Environment, error: BaseException) -> None:
        """An environment raised: has it reported, which may raise, and begins another episode."""
        self._failed(environment, environment.failed(error))
        with environment.reporting():
            self._cut_off(environment)

    # Shared arrays.

    def _actions(self, first: int, count: int) -> Sequence[Any]:
        """Returns each row's action as the environment expects it; arrays are copies."""
        part = slice(first, first + count)

        def per_row(leaf: Leaf, array: Array) -> list[Any]:
            values = array[part]
            return values.tolist() if leaf.scalar else [row.copy() for row in values]

        columns = map_tree(per_row, self._action_tree, self._memory.action)
        if isinstance(columns, list):
            return columns
        return [
            map_tree(lambda _, column, row=row: column[row], self._action_tree, columns)
            for row in range(count)
        ]

    def _finish(
        self, first: int, count: int, rewards: list[float], ended: list[tuple[int, bool, bool]]
    ) -> None:
        memory, part = self._memory, slice(first, first + count)
        memory.reward[part] = rewards
        memory.terminated[part] = False
        memory.truncated[part] = False
        for row, terminated, truncated in ended:
            memory.terminated[row] = terminated
            memory.truncated[row] = truncated
