"""A worker process of an EnvPool: makes its environments and steps them when its doorbell rings."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.env_pool import channel
from moolink.env_pool.memory import BatchArrays, PoolMemory, PoolShape
from moolink.env_pool.spaces import Leaf, Tree, describe, keys, leaves, map_tree, parts

Array = npt.NDArray[Any]

OLD_GYM = "EnvPool needs the Gymnasium API: wrap the environment (for example with shimmy)"
RECREATIONS = 3  # times in a row that an environment is made anew without a step in between


class EnvironmentFailed(Exception):
    """An environment raised; `report` is what the pool is told."""

    def __init__(self, report: channel.Raised) -> None:
        super().__init__(report.error)
        self.report = report


class Environment:
    """One environment and its episode."""

    def __init__(self, create: Callable[[], Any], index: int, seed: int | None) -> None:
        self.index = index
        self.failures = 0
        self._create = create
        self._seed = seed
        self.env = self.call("create_env", create)

    def call(self, doing: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call user code; raise `EnvironmentFailed` with its traceback if it raises."""
        try:
            return function(*arguments, **named)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            summary = traceback.format_exception_only(error)[-1].strip()
            raise EnvironmentFailed(channel.Raised(self.index, doing, summary, text)) from error

    def reset(self) -> Any:
        """Begin an episode, the first one with the environment's seed; return its observation."""
        if self._seed is None:
            result = self.env.reset()
        else:
            seed, self._seed = self._seed, None
            result = self.env.reset(seed=seed)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise TypeError(f"reset() must return (observation, info). {OLD_GYM}")
        return result[0]

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        """Step; return observation, reward, terminated, truncated."""
        result = self.env.step(action)
        try:
            observation, reward, terminated, truncated, _ = result
        except (TypeError, ValueError):
            count = len(result) if isinstance(result, tuple) else type(result).__name__
            raise TypeError(
                "step() must return (observation, reward, terminated, truncated, info), "
                f"got {count} values. {OLD_GYM}"
            ) from None
        return observation, float(reward), bool(terminated), bool(truncated)

    def recreate(self) -> None:
        """Throw the environment away and make it anew."""
        self.close()
        self.env = self.call("create_env", self._create)

    def close(self) -> None:
        """Close the environment; what it raises now concerns nobody any more."""
        if hasattr(self.env, "close"):
            try:
                self.env.close()
            except Exception:  # noqa: BLE001 - the user's code; it is reported and left behind
                traceback.print_exc()


class Writer:
    """Writes observations into the rows of a tree of arrays, checking shape and dtype."""

    def __init__(self, tree: Tree, arrays: Tree) -> None:
        self._tree = tree
        self._leaves: list[Leaf] = leaves(tree)
        self._arrays: list[Array] = leaves(arrays)

    def write(self, row: int, observation: Any) -> None:
        """Copy `observation`, whatever its strides, into `row`."""
        values = parts(self._tree, observation, "observation")
        for leaf, array, value in zip(self._leaves, self._arrays, values, strict=True):
            part = np.asarray(value)
            # Checked here because numpy would broadcast and cast without a word.
            if part.shape != leaf.shape:
                raise ValueError(
                    f"{leaf.path}: the observation has shape {part.shape}, "
                    f"its space has {leaf.shape} ({leaf.space})"
                )
            if part.dtype is not array.dtype and not np.can_cast(
                part.dtype, array.dtype, "same_kind"
            ):
                raise TypeError(
                    f"{leaf.path}: the observation has dtype {part.dtype}, "
                    f"its space has {array.dtype} ({leaf.space})"
                )
            array[row] = part


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
        self._observation = Writer(shape.observation, arrays.observation)
        self._final = (
            None
            if arrays.final_observation is None
            else Writer(shape.observation, arrays.final_observation)
        )
        self._returns = np.zeros(len(rows), np.float64)
        self._steps = np.zeros(len(rows), np.int64)

    def reset(self, *, interrupted: bool, mark: Callable[[int], None]) -> None:
        """Reset every environment: at first, or after a crash that `interrupted` the episodes."""
        if interrupted and self._arrays.final_observation is not None:
            # The last observation seen before the crash is still in place.
            map_tree(self._keep_as_final, self._arrays.observation, self._arrays.final_observation)
        for row, environment in zip(self._rows, self._environments, strict=True):
            mark(environment.index + 1)
            self._begin_episode(row, environment)
        self._finish([0.0] * len(self._rows), [False] * len(self._rows), None, interrupted)

    def step(
        self, mark: Callable[[int], None], failed: Callable[[Environment, EnvironmentFailed], None]
    ) -> None:
        """Step every environment; reset those whose episode ends."""
        rewards, terminations, truncations = [], [], []
        for row, environment, action in zip(
            self._rows, self._environments, self._actions(), strict=True
        ):
            mark(environment.index + 1)
            try:
                reward, terminated, truncated = self._step_one(row, environment, action)
                environment.failures = 0
            except EnvironmentFailed as error:
                failed(environment, error)  # Makes it anew, or raises.
                reward, terminated, truncated = 0.0, False, True
                if self._arrays.final_observation is not None:
                    self._keep_row_as_final(row)
                self._begin_episode(row, environment)
            rewards.append(reward)
            terminations.append(terminated)
            truncations.append(truncated)
        self._finish(rewards, terminations, truncations, False)

    def _step_one(
        self, row: int, environment: Environment, action: Any
    ) -> tuple[float, bool, bool]:
        observation, reward, terminated, truncated = environment.call(
            "step", environment.step, action
        )
        if terminated or truncated:
            if self._final is not None:
                environment.call("step", self._final.write, row, observation)
            self._begin_episode(row, environment)
        else:
            environment.call("step", self._observation.write, row, observation)
        return reward, terminated, truncated

    def _begin_episode(self, row: int, environment: Environment) -> None:
        observation = environment.call("reset", environment.reset)
        environment.call("reset", self._observation.write, row, observation)

    def _actions(self) -> list[Any]:
        """Return each row's action as the environment expects it; arrays are copies."""
        count = len(self._rows)

        def per_row(leaf: Leaf, array: Array) -> list[Any]:
            part = array[self._part]
            return part.tolist() if leaf.scalar else [row.copy() for row in part]

        columns = map_tree(per_row, self._action_tree, self._arrays.action)
        if isinstance(columns, list):
            return columns
        return [
            map_tree(lambda _, column, row=row: column[row], self._action_tree, columns)
            for row in range(count)
        ]

    def _finish(
        self,
        rewards: list[float],
        terminations: list[bool],
        truncations: list[bool] | None,
        interrupted: bool,
    ) -> None:
        """Write rewards, ends and the episodes' statistics. `truncations` is None at a reset."""
        results, part = self._arrays.results, self._part
        results["reward"][part] = rewards
        results["terminated"][part] = terminations
        results["truncated"][part] = interrupted if truncations is None else truncations
        done = results["done"][part]
        np.logical_or(results["terminated"][part], results["truncated"][part], out=done)
        if truncations is not None:
            self._returns += rewards
            self._steps += 1
        results["episode_return"][part] = self._returns
        results["episode_step"][part] = self._steps
        if done.any():
            self._returns[done] = 0.0
            self._steps[done] = 0

    def _keep_as_final(self, observation: Array, final: Array) -> None:
        final[self._part] = observation[self._part]

    def _keep_row_as_final(self, row: int) -> None:
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
        size, workers = setup.batch_size, setup.workers
        self._rows = range(start.worker * size // workers, (start.worker + 1) * size // workers)

    def run(self) -> None:
        """Make the environments, tell the pool, serve until it closes."""
        environments: list[Environment] = []
        try:
            self._make(environments)
            observation, action = self._describe(environments)
            spaces = self._pickle_spaces(environments[0].env)
            self._link.send(channel.Made(os.getpid(), observation, action, spaces))
            mapped = self._link.receive()
            self._serve(mapped.shape, environments)
        except EnvironmentFailed as error:
            self._link.send(error.report)
        except EOFError:
            return  # The pool closed before we were ready.
        finally:
            for environment in environments:
                environment.close()

    def _make(self, environments: list[Environment]) -> None:
        setup = self._setup
        for batch in range(setup.batches):
            for row in self._rows:
                index = batch * setup.batch_size + row
                seed = None if setup.seed is None else derive_seed(setup.seed, index, self._life)

                def create(index: int = index) -> Any:
                    return self._create_env(*([index] if setup.passes_index else []))

                environments.append(Environment(create, index, seed))

    def _describe(self, environments: list[Environment]) -> tuple[Tree, Tree]:
        """Describe the spaces, which all environments of this worker must share."""
        first = environments[0]
        trees = first.call("create_env", describe_spaces, first.env)
        for environment in environments[1:]:
            other = environment.call("create_env", describe_spaces, environment.env)
            environment.call("create_env", require_same_spaces, trees, other, first.index)
        return trees  # type: ignore[no-any-return]

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
        current, requested = memory.current, memory.requested
        served = memory.served[self._index]
        # In a later life, episodes of which the pool has seen a step have been cut off.
        interrupted = [self._life > 0 and number > 0 for number in served.tolist()]
        begun = [False] * len(batches)

        def mark(value: int) -> None:
            current[self._index] = value

        while not memory.closing[0]:
            due = [(n, i) for i, n in enumerate(requested.tolist()) if n != served[i]]
            if not due:
                os.eventfd_read(self._doorbell)
                continue
            number, index = min(due)
            if begun[index]:
                batches[index].step(mark, self._failed)
            else:
                batches[index].reset(interrupted=interrupted[index], mark=mark)
                begun[index] = True
            mark(0)
            served[index] = number
            self._report_served(index)

    def _report_served(self, batch: int) -> None:
        """Ring the batch's bell if every other worker has taken a token, and so has finished."""
        try:
            os.eventfd_read(self._setup.tokens[batch])
        except BlockingIOError:
            os.eventfd_write(self._setup.bells[batch], 1)

    def _failed(self, environment: Environment, error: EnvironmentFailed) -> None:
        environment.failures += 1
        if not self._setup.recreate or environment.failures > RECREATIONS:
            raise error
        report = error.report
        self._link.send(channel.Recreated(report.environment, report.doing, report.traceback))
        environment.recreate()


def derive_seed(seed: int, index: int, life: int) -> int:
    """Derive an environment's seed: independent of how environments are spread over workers."""
    return int(np.random.SeedSequence([seed, index, life]).generate_state(1)[0])


def describe_spaces(env: Any) -> tuple[Tree, Tree]:
    """Describe an environment's observation and action space."""
    for name in ("observation_space", "action_space", "reset", "step"):
        if not hasattr(env, name):
            raise TypeError(f"create_env returned {env!r}, which has no {name}. {OLD_GYM}")
    return describe(env.observation_space, "obs"), describe(env.action_space, "action")


def require_same_spaces(first: tuple[Tree, Tree], other: tuple[Tree, Tree], index: int) -> None:
    """Raise unless two environments' spaces are alike."""
    for a, b in zip(first, other, strict=True):
        if keys(a) != keys(b):
            spaces = [", ".join(leaf.space for leaf in leaves(tree)) for tree in (a, b)]
            raise ValueError(
                f"all environments of a pool need the same spaces: environment {index} has "
                f"{spaces[0]}, this one has {spaces[1]}"
            )


def main(
    setup: channel.Setup,
    start: channel.Start,
    create_env: Callable[..., Any],
    link: channel.Channel,
) -> None:
    """Run a worker in this process, which was forked for it, and end the process."""
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
