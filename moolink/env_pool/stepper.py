"""Stepping one batch of a pool: actions in, a future of the outputs back."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any, Literal, TypeAlias

import numpy as np

from moolink._core import EpisodeCounts, Lock
from moolink.data.warm_memory import WarmMemory
from moolink.env_pool.actions import ActionWriter
from moolink.env_pool.memory import Array
from moolink.env_pool.requests import Requests
from moolink.env_pool.spaces import Tree, map_tree
from moolink.env_pool.supervisor import Supervisor
from moolink.errors import Error, TimeoutError
from moolink.internal import forks

Outputs: TypeAlias = dict[str, Any]
Framework: TypeAlias = Literal["auto", "numpy", "torch"]

# A step's outputs beside the observation, for each environment of the batch.
RESULTS = ("reward", "done", "terminated", "truncated", "episode_return", "episode_step")
FINAL_OBS = "final_obs"


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """How outputs are given to the user; see EnvPool."""

    copy: bool
    arrays: Framework
    check_actions: bool


class EnvStepperFuture:
    """The outputs of one step, when all environments of the batch have taken it."""

    def __init__(self, stepper: EnvStepper, step: int, torch: bool) -> None:
        self._stepper = stepper
        self._step = step
        self._torch = torch
        self._outputs: Outputs | None = None

    def result(self, timeout: float | None = None) -> Outputs:
        """Waits for the step to be finished and returns its outputs; may be called again.

        Raises:
            TimeoutError: it was not finished within `timeout` seconds; ask again if you like.
            EnvError: an environment raised, or its worker process died.
            Closed: the pool was closed.
        """
        if self._outputs is None:
            requests = self._stepper._requests
            if not requests.wait(self._step, timeout):
                raise TimeoutError(
                    f"{self._stepper} was not finished within {timeout:g} s: "
                    f"{requests.unfinished()}"
                )
            self._outputs = self._stepper._collect(self._step, self._torch)
        return self._outputs

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, good or bad; returns whether it came within `timeout` seconds."""
        if self._outputs is not None:
            return True
        try:
            return self._stepper._requests.wait(self._step, timeout)
        except Error:
            return True  # result() and exception() give the error.

    def done(self) -> bool:
        """Tells whether `result` would return or raise at once."""
        return self.wait(0.0)

    def exception(self) -> BaseException | None:
        """Returns the error, or None if there is none or the step has not ended."""
        try:
            if self._outputs is None:
                self._stepper._requests.wait(self._step, 0.0)
        except Error as error:
            return error
        return None

    def __await__(self) -> Generator[Any, None, Outputs]:
        """Waits in an event loop; several tasks may await one future."""
        return self._result_async().__await__()

    async def _result_async(self) -> Outputs:
        if self._outputs is None:
            await self._stepper._requests.wait_async(self._step)
        return self.result()


class EnvStepper:
    """Steps the environments of one batch of an EnvPool, with at most one step under way."""

    def __init__(self) -> None:
        raise TypeError("an EnvPool makes its EnvSteppers: use EnvPool.step")

    @classmethod
    def _of(cls, supervisor: Supervisor, batch: int, options: OutputOptions) -> EnvStepper:
        stepper = cls.__new__(cls)
        stepper._prepare(supervisor, batch, options)
        return stepper

    def _prepare(self, supervisor: Supervisor, batch: int, options: OutputOptions) -> None:
        self._supervisor = supervisor
        self._batch = batch
        self._options = options
        self._requests = Requests(supervisor, batch)
        self._lock = Lock()
        self._pending = 0  # The step whose outputs have not been taken, 0 if none.
        memory, rows = supervisor.memory, self._requests.rows
        part = slice(rows.start, rows.stop)

        def of_batch(array: Array) -> Array:
            return array[part]

        self._actions = ActionWriter(
            supervisor.shape.action, map_tree(of_batch, memory.action), check=options.check_actions
        )
        observation = map_tree(of_batch, memory.observation)
        self._outputs: dict[str, Tree] = (
            observation if isinstance(observation, dict) else {"state": observation}
        )
        self._episodes = Episodes(
            *map(of_batch, (memory.reward, memory.terminated, memory.truncated))
        )
        self._outputs |= self._episodes.outputs
        if memory.final_obs is not None:
            self._outputs[FINAL_OBS] = map_tree(of_batch, memory.final_obs)
        self._nested = any(isinstance(part, (dict, tuple)) for part in self._outputs.values())
        self._copies = map_tree(lambda _: WarmMemory(), self._outputs)
        self._tensors: Outputs | None = None
        forks.changes_in_children(self)

    def _forked(self) -> None:
        self._lock = Lock()

    def step(self, action: Any) -> EnvStepperFuture:
        """Has each environment take its action; see `EnvPool.step`."""
        with self._lock:
            if self._pending:
                self._supervisor.raise_failure()
                raise Error(
                    f"batch {self._batch} is being stepped: take the result of its last step "
                    "before the next one"
                )
            torch = self._actions.write(action)
            self._pending = self._requests.of_all()
            wants_torch = self._options.arrays == "torch" or (
                self._options.arrays == "auto" and torch
            )
            return EnvStepperFuture(self, self._pending, wants_torch)

    def __str__(self) -> str:
        return f"batch {self._batch}"

    def _collect(self, step: int, torch: bool) -> Outputs:
        with self._lock:
            if self._pending == step:
                self._pending = 0
                self._episodes.count_step()
            if self._options.copy:
                outputs: Outputs = map_tree(_copy, self._outputs, self._copies)
                return _tensors(outputs) if torch else outputs
            if torch and self._tensors is None:
                self._tensors = _tensors(self._outputs)
            arrays = self._tensors if torch else self._outputs
            assert arrays is not None
            # The same arrays, in new dicts that the user may change.
            return map_tree(lambda array: array, arrays) if self._nested else arrays.copy()


class Episodes:
    """The results of a batch's steps, and their sums.

    Attributes:
        outputs: arrays by the names of `RESULTS`.
    """

    def __init__(self, reward: Array, terminated: Array, truncated: Array) -> None:
        size = len(reward)
        self.outputs = {
            "reward": reward,
            "done": np.zeros(size, np.bool_),
            "terminated": terminated,
            "truncated": truncated,
            "episode_return": np.zeros(size, np.float32),
            "episode_step": np.zeros(size, np.int64),
        }
        self._counts = EpisodeCounts(
            reward,
            terminated,
            truncated,
            self.outputs["done"],
            self.outputs["episode_return"],
            self.outputs["episode_step"],
            np.zeros(size, np.float64),
        )

    def count_step(self) -> None:
        """Counts a step whose results are in the arrays; a batch's first one is a reset."""
        self._counts.count_step()


def _copy(array: Array, memory: WarmMemory) -> Array:
    copy = memory.empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def _tensors(outputs: Outputs) -> Outputs:
    import torch

    return map_tree(torch.from_numpy, outputs)  # type: ignore[no-any-return]
