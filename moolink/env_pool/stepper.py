"""Stepping one batch of a pool: actions in, a future of the outputs back."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import select
import threading
from collections.abc import Generator
from typing import Any, Literal, TypeAlias

from moolink import deadlines
from moolink.env_pool.actions import ActionWriter
from moolink.env_pool.memory import FINAL_OBSERVATION, Array
from moolink.env_pool.spaces import Tree, map_tree
from moolink.env_pool.supervisor import Supervisor
from moolink.errors import Error, TimeoutError
from moolink.warm_memory import WarmMemory

Outputs: TypeAlias = dict[str, Any]
Framework: TypeAlias = Literal["auto", "numpy", "torch"]


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
            if not self._stepper._wait(self._step, timeout):
                raise TimeoutError(
                    f"{self._stepper} was not finished within {timeout:g} s: "
                    f"{self._stepper._unfinished(self._step)}"
                )
            self._outputs = self._stepper._collect(self._step, self._torch)
        return self._outputs

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, good or bad; returns whether it came within `timeout` seconds."""
        if self._outputs is not None:
            return True
        try:
            return self._stepper._wait(self._step, timeout)
        except Error:
            return True  # result() and exception() say what happened.

    def done(self) -> bool:
        """Tells whether `result` would return or raise at once."""
        return self.wait(0.0)

    def exception(self) -> BaseException | None:
        """Returns what went wrong, or None if nothing did or the step has not ended."""
        try:
            if self._outputs is None:
                self._stepper._wait(self._step, 0.0)
        except Error as error:
            return error
        return None

    def __await__(self) -> Generator[Any, None, Outputs]:
        """Waits in an event loop; several tasks may await one future."""
        return self._result_async().__await__()

    async def _result_async(self) -> Outputs:
        if self._outputs is None:
            await self._stepper._wait_async(self._step)
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
        self._lock = threading.Lock()
        self._pending = 0  # The step whose outputs have not been taken, 0 if none.
        arrays = supervisor.memory.batches[batch]
        self._actions = ActionWriter(
            supervisor.shape.action, arrays.action, check=options.check_actions
        )
        observation = arrays.observation
        self._outputs: dict[str, Tree] = (
            dict(observation) if isinstance(observation, dict) else {"state": observation}
        )
        self._outputs |= arrays.results
        if arrays.final_observation is not None:
            self._outputs[FINAL_OBSERVATION] = arrays.final_observation
        self._copies = map_tree(lambda _: WarmMemory(), self._outputs)
        self._tensors: Outputs | None = None

    def step(self, action: Any) -> EnvStepperFuture:
        """Has each environment take its action; see `EnvPool.step`."""
        with self._lock:
            self._supervisor.raise_failure()
            if self._pending:
                raise Error(
                    f"batch {self._batch} is being stepped: take the result of its last step "
                    "before the next one"
                )
            torch = self._actions.write(action)
            self._pending = self._supervisor.request(self._batch)
            wants_torch = self._options.arrays == "torch" or (
                self._options.arrays == "auto" and torch
            )
            return EnvStepperFuture(self, self._pending, wants_torch)

    def __str__(self) -> str:
        return f"batch {self._batch}"

    def _unfinished(self, step: int) -> str:
        return self._supervisor.unfinished(self._batch, step)

    def _wait(self, step: int, timeout: float | None) -> bool:
        """Waits for `step`; returns whether it was finished in time, or raises what went wrong."""
        supervisor = self._supervisor
        if supervisor.finished(self._batch, step):
            return True
        deadline = deadlines.after(timeout)
        bell = supervisor.duplicate_bell(self._batch)
        try:
            poll = select.poll()
            poll.register(bell, select.POLLIN)
            poll.register(supervisor.alarms, select.POLLIN)
            while not supervisor.finished(self._batch, step):
                remaining = deadlines.left(deadline)
                ready = poll.poll(None if remaining is None else math.ceil(remaining * 1000))
                if any(descriptor == supervisor.alarms for descriptor, _ in ready):
                    supervisor.handle_alarms()
                elif remaining == 0.0:
                    return supervisor.finished(self._batch, step)
            return True
        finally:
            os.close(bell)

    async def _wait_async(self, step: int) -> None:
        supervisor = self._supervisor
        if supervisor.finished(self._batch, step):
            return
        loop = asyncio.get_running_loop()
        # Duplicates: a loop knows one reader a descriptor, and they survive the pool's close.
        bell = supervisor.duplicate_bell(self._batch)
        alarms = os.dup(supervisor.alarms)
        rung = asyncio.Event()
        try:
            loop.add_reader(bell, rung.set)
            loop.add_reader(alarms, rung.set)
            while not supervisor.finished(self._batch, step):
                await rung.wait()
                rung.clear()
                supervisor.handle_alarms()
        finally:
            for descriptor in (bell, alarms):
                loop.remove_reader(descriptor)
                os.close(descriptor)

    def _collect(self, step: int, torch: bool) -> Outputs:
        with self._lock:
            if self._pending == step:
                self._pending = 0
            if self._options.copy:
                outputs: Outputs = map_tree(_copy, self._outputs, self._copies)
                return _tensors(outputs) if torch else outputs
            if not torch:
                return map_tree(lambda array: array, self._outputs)  # type: ignore[no-any-return]
            if self._tensors is None:
                self._tensors = _tensors(self._outputs)
            return map_tree(lambda tensor: tensor, self._tensors)  # type: ignore[no-any-return]


def _copy(array: Array, memory: WarmMemory) -> Array:
    copy = memory.empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def _tensors(outputs: Outputs) -> Outputs:
    import torch

    return map_tree(torch.from_numpy, outputs)  # type: ignore[no-any-return]
