"""A worker process of an EnvPool: makes its environments and steps them when its doorbell rings."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from moolink.env_pool import channel
from moolink.env_pool.environment import (
    Environment,
    EnvironmentFailed,
    derive_seed,
    describe_spaces,
    require_five,
    require_same_spaces,
)
from moolink.env_pool.memory import Array, BatchArrays, PoolMemory, PoolShape, rows_of
from moolink.env_pool.observations import writer
from moolink.env_pool.spaces import Leaf, Tree, map_tree

RECREATIONS = 3  # times in a row that an environment is made anew without a step in between


Current: TypeAlias = memoryview  # Its first word: 1 + the environment being run, 0 if none.


class Batch:
    """The worker's rows of one batch."""

    def __init__(
        self, shape: PoolShape, arrays: BatchArrays, rows: range, environments: list[Environment]
    ) -> None:
        self._rows = rows
        self._environments = environments
        self._part = slice(rows.start, rows.stop)
        self._arrays = arrays
        self._action_tree = shape.action
        self._write = writer(shape.observation, arrays.observation)
        final = arrays.final_observation
        self._write_final = None if final is None else writer(shape.observation, final)
        self._returns = np.zeros(len(rows), np.float64)
        self._steps = np.zeros(len(rows), np.int64)

    def reset(self, current: Current, *, interrupted: bool) -> None:
        """Resets every environment: at first, or after a crash that `interrupted` the episodes."""
        for row, environment in zip(self._rows, self._environments, strict=True):
            current[0] = environment.index + 1
            if interrupted:
                self._keep_as_final(row)
            with environment.reporting():
                self._write(row, environment.reset())
        count = len(self._rows)
        self._finish([0.0] * count, [False] * count, [interrupted] * count)

    def step(
        self, current: Current, failed: Callable[[Environment, EnvironmentFailed], None]
    ) -> None:
        """Steps every environment, and resets those whose episode ends.

        `failed` is told of an environment that raised, and makes it anew unless it raises itself.
        """
        rewards, terminations, truncations = [], [], []
        actions = self._actions()
        for row, environment, action in zip(self._rows, self._environments, actions, strict=True):
            current[0] = environment.index + 1
            environment.doing = "step"
            try:
                result = environment.env.step(action)
                if os.getpid() != environment.pid:
                    environment.end_forked_child()
                if type(result) is not tuple or len(result) != 5:
                    require_five(result)
                observation, reward, terminated, truncated, _ = result
                reward, terminated, truncated = float(reward), bool(terminated), bool(truncated)
                if terminated or truncated:
                    if self._write_final is not None:
                        self._write_final(row, observation)
                    observation = environment.reset()
                self._write(row, observation)
                environment.failures = 0
            except BaseException as error:  # noqa: BLE001 - `failed` reports or raises it
                failed(environment, environment.failed(error))
                self._keep_as_final(row)
                with environment.reporting():
                    self._write(row, environment.reset())
                reward, terminated, truncated = 0.0, False, True
            rewards.append(reward)
            terminations.append(terminated)
            truncations.append(truncated)
        self._steps += 1
        self._returns += rewards
        self._finish(rewards, terminations, truncations)

    def _actions(self) -> list[Any]:
        """Returns each row's action as the environment expects it; arrays are copies."""

        def per_row(leaf: Leaf, array: Array) -> list[Any]:
            part = array[self._part]
            return part.tolist() if leaf.scalar else [row.copy() for row in part]

        columns = map_tree(per_row, self._action_tree, self._arrays.action)
        if isinstance(columns, list):
            return columns
        return [
            map_tree(lambda _, column, row=row: column[row], self._action_tree, columns)
            for row in range(len(self._rows))
        ]

    def _finish(
        self, rewards: list[float], terminations: list[bool], truncations: list[bool]
    ) -> None:
        """Writes rewards, ends and the episodes' statistics."""
        results, part = self._arrays.results, self._part
        done = np.logical_or(terminations, truncations)
        results["reward"][part] = rewards
        results["terminated"][part] = terminations
        results["truncated"][part] = truncations
        results["done"][part] = done
        results["episode_return"][part] = self._returns
        results["episode_step"][part] = self._steps
        self._returns[done] = 0.0
        self._steps[done] = 0

    def _keep_as_final(self, row: int) -> None:
        """Before a reset after a crash: what is in the row is the last observation there was."""
        if self._arrays.final_observation is None:
            return

        def keep(observation: Array, final: Array) -> None:
            final[row] = observation[row]

        map_tree(keep, self._arrays.observation, self._arrays.final_observation)


class Worker:
    """The process: its environments in all batches, and the loop that serves the pool."""

    def __init__(
        self,
        setup: channel.Setup,
        start: channel.Start,
        create_env: Callable[..., Any],
        link: channel.Channel,
    ) -> None:
        self._setup = setup
        self._index = start.worker
        self._life = start.life
        self._create_env = create_env
        self._link = link
        self._doorbell = setup.doorbells[start.worker]
        self._rows = rows_of(start.worker, setup.workers, setup.batch_size)

    def run(self) -> None:
        """Makes the environments, tells the pool, serves until it closes."""
        environments: list[Environment] = []
        try:
            self._make(environments)
            observation, action = self._describe(environments)
            spaces = self._pickle_spaces(environments[0].env)
            self._tell(channel.Made(os.getpid(), observation, action, spaces))
            mapped = self._link.receive()
            self._serve(mapped.shape, environments)
        except EnvironmentFailed as error:
            self._tell(error.report)
        except EOFError:
            return  # The pool closed before we were ready.
        finally:
            for environment in environments:
                environment.close()

    def _tell(self, message: object) -> None:
        # A pool that has closed does not listen any more.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._link.send(message)

    def _make(self, environments: list[Environment]) -> None:
        setup = self._setup
        for batch in range(setup.batches):
            for row in self._rows:
                index = batch * setup.batch_size + row
                seed = None if setup.seed is None else derive_seed(setup.seed, index, self._life)

                self._tell(channel.Making(os.getpid(), index))

                def create(index: int = index) -> Any:
                    return self._create_env(*([index] if setup.passes_index else []))

                environments.append(Environment(create, index, seed))

    def _describe(self, environments: list[Environment]) -> tuple[Tree, Tree]:
        """Describes the spaces, which all environments of this worker must share."""
        first = environments[0]
        with first.reporting():
            trees = describe_spaces(first.env)
        for environment in environments[1:]:
            with environment.reporting():
                require_same_spaces(trees, describe_spaces(environment.env), first.index)
        return trees

    @staticmethod
    def _pickle_spaces(env: Any) -> bytes:
        try:
            return pickle.dumps((env.observation_space, env.action_space))
        except (pickle.PicklingError, AttributeError, TypeError):
            return b""  # Only pool.observation_space and pool.action_space need it.

    def _serve(self, shape: PoolShape, environments: list[Environment]) -> None:
        memory = PoolMemory(shape, self._setup.memory, create=False)
        size = len(self._rows)
        batches = [
            Batch(shape, arrays, self._rows, environments[i * size : (i + 1) * size])
            for i, arrays in enumerate(memory.batches)
        ]
        current = memory.current.data[self._index :]
        requested, served = memory.requested, memory.served[self._index]
        # In a later life, episodes of which the pool has seen a step have been cut off.
        interrupted = [self._life > 0 and step > 0 for step in served.tolist()]
        begun = [False] * len(batches)
        while not memory.closing[0]:
            pairs = zip(requested.tolist(), served.tolist(), strict=True)
            due = [(step, i) for i, (step, last) in enumerate(pairs) if step != last]
            if not due:
                os.read(self._doorbell, 8)  # eventfd_read would end with a signal
                continue
            step, index = min(due)
            if begun[index]:
                batches[index].step(current, self._failed)
            else:
                batches[index].reset(current, interrupted=interrupted[index])
                begun[index] = True
            current[0] = 0
            served[index] = step
            self._report_served(index)

    def _report_served(self, batch: int) -> None:
        """Rings the batch's bell if every other worker has taken a token, and so has finished."""
        try:
            os.read(self._setup.tokens[batch], 8)
        except BlockingIOError:
            os.eventfd_write(self._setup.bells[batch], 1)

    def _failed(self, environment: Environment, error: EnvironmentFailed) -> None:
        environment.failures += 1
        if not self._setup.recreate or environment.failures > RECREATIONS:
            raise error
        report = error.report
        self._tell(channel.Recreated(report.environment, report.doing, report.traceback))
        environment.recreate()


def main(
    setup: channel.Setup,
    start: channel.Start,
    create_env: Callable[..., Any],
    link: channel.Channel,
) -> None:
    """Runs a worker in this process, which was forked for it, and ends the process."""
    status = 1
    try:
        Worker(setup, start, create_env, link).run()
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here; the pool reports its death
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: exit handlers of the server's modules belong to the server.
        os._exit(status)
