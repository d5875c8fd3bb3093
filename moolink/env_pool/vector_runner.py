"""Carrying out the requests of a pool on vector environments, each of which has several rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from moolink.data.frameworks import as_numpy
from moolink.env_pool import channel
from moolink.env_pool.environment import Environment, EnvironmentFailed
from moolink.env_pool.fitting import assign
from moolink.env_pool.memory import Array, PoolMemory, PoolShape
from moolink.env_pool.observations import writer
from moolink.env_pool.runner import Failed
from moolink.env_pool.spaces import Leaf, Tree, leaves, map_tree, parts
from moolink.env_pool.vector_infos import add, by_row, of_row
from moolink.internal.shown import shown

_FINAL = "final_obs"
_HAVE = "the observations have"


class VectorRunner:
    """Steps, resets and calls vector environments, as `Runner` does single ones.

    A request is for whole vector environments. They reset themselves in the pool's autoreset mode.

    Attributes:
        environments: by first row.
        results: the results of the last request that have no place in the shared memory.
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
        self.environments = environments
        self._memory = memory
        self._behaviour = behaviour
        self._current = current
        self._failed = failed
        self._tree: Tree = shape.observation
        self._write_final = writer(self._tree, memory.final_obs) if shape.final_obs else None

    def step(self, first: int, count: int, given: dict[int, Any] | None) -> None:
        """Steps the vector environments that have `count` rows from `first`."""
        del given  # Their actions are in the shared memory: `Layouts` requires it.
        for environment in self._of(range(first, first + count)):
            try:
                with environment.reporting():
                    self._step(environment)
                environment.failures = 0
            except EnvironmentFailed as error:
                self._failed(environment, error)
                with environment.reporting():
                    self._cut_off(environment)

    def reset(self, rows: range, arguments: channel.Arguments) -> None:
        """Resets the rows among `rows` that have a seed and options in `arguments`."""
        for environment in self._of(rows):
            given = {
                row - environment.index: arguments.of_row[row]
                for row in _rows(environment)
                if row in arguments.of_row
            }
            if given:
                with environment.reporting():
                    self._begun(environment, *_reset(environment, given))

    def call(self, rows: range, arguments: channel.Arguments) -> None:
        """Calls a function of `calls` once with each vector environment; each of its rows gets
        the answer."""
        function, name = arguments.shared
        for environment in self._of(rows):
            asked = [row for row in _rows(environment) if row in arguments.of_row]
            if not asked:
                continue
            environment.doing = name
            try:
                positional, keywords = arguments.of_row[asked[0]]
                answer = function(environment.env, name, *positional, **keywords)
                if os.getpid() != environment.pid:
                    environment.end_forked_child()
                self.results.answers |= dict.fromkeys(asked, answer)
            except Exception as error:  # noqa: BLE001 - the caller is told, and the pool goes on
                self.results.errors[asked[0]] = environment.failed(error).report
            environment.doing = "step"

    def _of(self, rows: range) -> Iterator[Environment]:
        row = rows.start
        while row < rows.stop:
            environment = self.environments[row]
            self._current[0] = row + 1
            yield environment
            row = _rows(environment).stop

    def _step(self, environment: Environment) -> None:
        if environment.interrupted:
            self._cut_off(environment)
            return
        if environment.due:
            self._begin(environment)
            return
        environment.doing = "step"
        part, memory = _part(environment), self._memory
        actions = map_tree(lambda array: array[part].copy(), memory.action)
        observations, *outcome, infos = environment.env.step(actions)
        self._write(environment, observations)
        outcomes = ("reward", "terminated", "truncated")
        for name, values in zip(outcomes, outcome, strict=True):
            array = as_numpy(values)
            if array.shape != (environment.rows,):
                raise ValueError(
                    f"step() gave {name} of shape {array.shape}, for {environment.rows} rows"
                )
            if array.dtype.kind not in "biuf":
                raise TypeError(f"step() gave {name} of dtype {array.dtype}: {shown(values)}")
            getattr(memory, name)[part] = array
        self._take_infos(environment, infos)

    def _take_infos(self, environment: Environment, infos: dict[str, Any]) -> None:
        """Keeps the infos for the pool, and puts last observations in the shared memory."""
        part, memory = _part(environment), self._memory
        ended = np.logical_or(memory.terminated[part], memory.truncated[part])
        if self._behaviour.autoreset == "same" and ended.any():
            infos = dict(infos)
            last = infos.pop(_FINAL, None)
            infos.pop(f"_{_FINAL}", None)
            if last is None:
                raise ValueError(
                    f"an episode ended, and infos have no {_FINAL!r}, which SAME_STEP asks for"
                )
            if self._write_final is not None:
                for i in np.flatnonzero(ended).tolist():
                    self._write_final(environment.index + i, _at(last, i))
        if infos and self._behaviour.infos:
            rows = len(_rows(environment))
            self.results.vector_infos[environment.index] = by_row(infos, rows)

    def _begin(self, environment: Environment) -> None:
        observations, infos = environment.begin()
        self._begun(environment, observations, infos)

    def _begun(self, environment: Environment, observations: Any, infos: dict[str, Any]) -> None:
        environment.due = environment.interrupted = False
        part, memory = _part(environment), self._memory
        memory.begun[part] = True
        self._write(environment, observations)
        memory.reward[part], memory.terminated[part], memory.truncated[part] = 0.0, False, False
        if infos and self._behaviour.infos:
            rows = len(_rows(environment))
            self.results.vector_infos[environment.index] = by_row(infos, rows)

    def _cut_off(self, environment: Environment) -> None:
        """Ends the episodes that a crash or an error has cut off at their last observations."""
        part, memory = _part(environment), self._memory
        environment.interrupted = False
        if self._behaviour.autoreset == "same":
            if memory.final_obs is not None:

                def keep(observation: Array, final: Array) -> None:
                    final[part] = observation[part]

                map_tree(keep, memory.observation, memory.final_obs)
            self._begin(environment)
        else:
            environment.due = self._behaviour.autoreset == "next"
        memory.reward[part], memory.terminated[part], memory.truncated[part] = 0.0, False, True

    def _write(self, environment: Environment, observations: Any) -> None:
        part = _part(environment)
        given = parts(self._tree, observations, "obs")
        arrays = leaves(self._memory.observation)
        for leaf, array, value in zip(leaves(self._tree), arrays, given, strict=True):
            batch = as_numpy(value)
            _require_batch(batch, leaf, environment, array.dtype)
            assign(array, part, batch, leaf, _HAVE)


def _rows(environment: Environment) -> range:
    return range(environment.index, environment.index + (environment.rows or 1))


def _part(environment: Environment) -> slice:
    rows = _rows(environment)
    return slice(rows.start, rows.stop)


def _reset(environment: Environment, given: dict[int, tuple[Any, Any]]) -> tuple[Any, Any]:
    """Resets the rows in `given`, once for all that have equal options; observations and infos.

    Args:
        given: (seed, options) of rows, counted from the environment's first.
    """
    count = len(_rows(environment))
    seeds = _seed([given.get(row, (None, None))[0] for row in range(count)])
    groups = _groups(given)
    together: dict[str, Any] = {}
    for options, rows in groups:
        mask = np.isin(np.arange(count), rows)
        if not mask.all():
            options = (options or {}) | {"reset_mask": mask}
        observations, infos = environment.reset(seeds, options)
        if len(groups) == 1:
            return observations, infos
        batch = by_row(infos, count)
        for row in rows:
            add(together, of_row(batch, row), row, count)
    return observations, together


def _groups(given: dict[int, tuple[Any, Any]]) -> list[tuple[Any, list[int]]]:
    """The rows that have equal options: usually one group."""
    groups: list[tuple[Any, list[int]]] = []
    for row, (_, options) in given.items():
        for known, rows in groups:
            if _equal(options, known):
                rows.append(row)
                break
        else:
            groups.append((options, [row]))
    return groups


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):  # arrays in them: they are reset apart
        return False


def _seed(seeds: list[int | None]) -> Any:
    """The first seed if the others follow it by ones, as not every environment takes a list."""
    first = seeds[0]
    if first is None:
        return None if all(seed is None for seed in seeds) else seeds
    return first if seeds == list(range(first, first + len(seeds))) else seeds


def _at(batch: Any, index: int) -> Any:
    """A row of a batched observation, or an element of an array of observations."""
    if isinstance(batch, dict):
        return {key: _at(part, index) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_at(part, index) for part in batch)
    return batch[index]


def _require_batch(batch: Array, leaf: Leaf, environment: Environment, dtype: Any) -> None:
    shape = (environment.rows, *leaf.shape)
    if batch.shape != shape:
        raise ValueError(
            f"{leaf.path}: {_HAVE} shape {batch.shape}, not {shape} ({leaf.space}): {shown(batch)} "
            f"of dtype {batch.dtype} for dtype {dtype}"
        )
