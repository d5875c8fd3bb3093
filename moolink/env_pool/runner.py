"""Carrying out the requests of a pool on the environments of one worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from moolink._core import EnvironmentRows
from moolink.env_pool import channel
from moolink.env_pool.environment import Environment, EnvironmentFailed, as_five
from moolink.env_pool.memory import Array, PoolMemory, PoolShape
from moolink.env_pool.observations import Write, checker, writer
from moolink.env_pool.spaces import Leaf, Tree, describe, map_tree
from moolink.internal.shown import shown

Failed = Callable[[Environment, EnvironmentFailed], None]


class Runner:
    """Steps, resets and calls environments, and writes their results into the shared memory.

    Attributes:
        environments: by row.
        results: those of the last request that have no place in the shared memory.
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
        self._failing: set[int] = set()  # Rows whose environments have failures to forget.
        self._rows = EnvironmentRows(
            environments,
            memory.observation if isinstance(shape.observation, Leaf) else None,
            memory.reward,
            memory.terminated,
            memory.truncated,
            current,
            behaviour.infos,
        )
        self._action_tree = shape.action
        # Discrete actions, the usual case, are one array of numbers.
        scalar = isinstance(shape.action, Leaf) and shape.action.scalar
        self._numbers: Array | None = memory.action if scalar else None
        # Environments call methods of numpy integers, which Gymnasium's and SB3's classes give.
        self._listed: Callable[[Array], list[Any]] = (
            list if behaviour.numpy_numbers else np.ndarray.tolist
        )
        self._write = self._writer(shape.observation, memory.observation, "observations")
        self._write_final: Write | None = None
        if shape.final_obs:
            self._write_final = self._writer(shape.observation, memory.final_obs, "final_obs")

    def _writer(self, tree: Tree | None, arrays: Tree | None, kind: str) -> Write:
        if tree is not None:
            return writer(tree, arrays)
        checks = {
            row: checker(describe(environment.space("observation"), "obs", others=True))
            for row, environment in self.environments.items()
        }

        def write(row: int, observation: Any) -> None:
            checks[row](row, observation)
            getattr(self.results, kind)[row] = observation

        return write

    def step(self, first: int, count: int, given: dict[int, Any] | None) -> None:
        """Steps `count` environments from `first`; `given` are their actions if not shared."""
        row, stop = first, first + count
        actions = (
            self._actions(first, count) if given is None else [given[i] for i in range(row, stop)]
        )
        while row < stop:
            try:
                left = actions if row == first else actions[row - first :]
                self._rows.step(row, left, self._take, self._begin)
                row = stop
            except BaseException as error:  # noqa: BLE001 - `_recover` reports or raises it
                failed = self._current[0] - 1
                self._succeeded(row, failed)
                self._recover(self.environments[failed], error)
                self._write_outcome(failed, 0.0, False, True)
                row = failed + 1
            else:
                self._succeeded(first, stop)

    def reset(self, rows: range, arguments: channel.Arguments) -> None:
        """Resets the environments among `rows` that have a seed and options in `arguments`."""
        for row in rows:
            if row not in arguments.of_row:
                continue
            environment = self.environments[row]
            self._current[0] = row + 1
            with environment.reporting():
                observation, info = environment.reset(*arguments.of_row[row])
                self._write(row, observation)
            self._started(environment, info)
            self._write_outcome(row, 0.0, False, False)

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

    def _take(self, row: int, result: Any) -> None:
        """Takes a step's result, if it is more than an array within an episode."""
        if type(result) is not tuple or len(result) != 5 or type(result[4]) is not dict:
            result = as_five(result)
        observation, reward, terminated, truncated, info = result
        terminated, truncated = bool(terminated), bool(truncated)
        if terminated or truncated:
            self._end(self.environments[row], observation, info)
        else:
            self._write(row, observation)
            if info and self._behaviour.infos:
                self.results.infos[row] = info
        if isinstance(reward, str | bytes):  # float() would parse it
            raise TypeError(f"step() gave {shown(reward)} as the reward, which is no number")
        self._write_outcome(row, float(reward), terminated, truncated)

    def _begin(self, row: int) -> None:
        """Begins an episode in place of a step, which may cut off another one."""
        environment = self.environments[row]
        interrupted = environment.interrupted
        if interrupted:
            self._cut_off(environment)
        else:
            observation, info = environment.begin()
            self._write(row, observation)
            self._started(environment, info)
        self._write_outcome(row, 0.0, False, interrupted)

    def _cut_off(self, environment: Environment) -> None:
        """Ends the episode that a crash has cut off, at the last observation that there was."""
        row = environment.index
        environment.interrupted = False
        if self._behaviour.autoreset != "same":
            environment.due = self._behaviour.autoreset == "next"
            return
        if self._memory.final_obs is not None:

            def keep(observation: Array, final: Array) -> None:
                final[row] = observation[row]

            map_tree(keep, self._memory.observation, self._memory.final_obs)
        observation, info = environment.begin()
        self._write(row, observation)
        self._started(environment, info)

    def _started(self, environment: Environment, info: dict[str, Any]) -> None:
        environment.due = environment.interrupted = False
        self._memory.begun[environment.index] = True
        if info and self._behaviour.infos:
            self.results.infos[environment.index] = info

    def _succeeded(self, first: int, stop: int) -> None:
        """Forgets the failures of environments that have taken a step since."""
        if not self._failing:
            return
        for row in [row for row in self._failing if first <= row < stop]:
            self.environments[row].failures = 0
            self._failing.discard(row)

    def _recover(self, environment: Environment, error: BaseException) -> None:
        """An environment raised: has it reported, which may raise, and begins another episode."""
        self._failing.add(environment.index)
        self._failed(environment, environment.failed(error))
        with environment.reporting():
            self._cut_off(environment)

    # Shared arrays.

    def _actions(self, first: int, count: int) -> list[Any]:
        """Returns each row's action as the environment expects it; arrays are copies."""
        if self._numbers is not None:
            return self._listed(self._numbers[first : first + count])
        part = slice(first, first + count)

        def per_row(leaf: Leaf, array: Array) -> list[Any]:
            values = array[part]
            return self._listed(values) if leaf.scalar else [row.copy() for row in values]

        columns: Any = map_tree(per_row, self._action_tree, self._memory.action)
        if isinstance(columns, list):
            return columns
        return [
            map_tree(lambda _, column, row=row: column[row], self._action_tree, columns)
            for row in range(count)
        ]

    def _write_outcome(self, row: int, reward: float, terminated: bool, truncated: bool) -> None:
        memory = self._memory
        memory.reward[row] = reward
        memory.terminated[row] = terminated
        memory.truncated[row] = truncated
