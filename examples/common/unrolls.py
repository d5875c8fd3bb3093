"""Unrolls: T steps of a group of environments, in arrays that are used again and again.

The actor fills unrolls, the learner reads them in batches of some of their environments. Their
number is fixed, so an actor that is ahead of its learner waits, and memory and policy lag are
bounded.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class UnrollsClosed(Exception):
    """The job is ending: there are no more unrolls to fill."""


class Unroll:
    """T steps of E environments.

    Entry t of `action`, `log_prob`, `reward` and `done` belongs to the step that leads from
    observation t to observation t + 1.
    """

    def __init__(self, length: int, num_envs: int, observation_shape: tuple[int, int, int]) -> None:
        self.observation = np.empty((length + 1, num_envs, *observation_shape), np.uint8)
        self.action = np.empty((length, num_envs), np.int64)
        self.log_prob = np.empty((length, num_envs), np.float32)
        self.reward = np.empty((length, num_envs), np.float32)
        self.done = np.empty((length, num_envs), np.bool_)
        self.batches_unread = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """B environments of an unroll, as views of its arrays: valid until it is released."""

    unroll: Unroll
    columns: slice

    @property
    def observation(self) -> NDArray[np.uint8]:
        """[T + 1, B, channels, height, width]."""
        return self.unroll.observation[:, self.columns]

    @property
    def action(self) -> NDArray[np.int64]:
        """[T, B]."""
        return self.unroll.action[:, self.columns]

    @property
    def log_prob(self) -> NDArray[np.float32]:
        """[T, B]: of the action, under the policy that took it."""
        return self.unroll.log_prob[:, self.columns]

    @property
    def reward(self) -> NDArray[np.float32]:
        """[T, B]: not clipped."""
        return self.unroll.reward[:, self.columns]

    @property
    def done(self) -> NDArray[np.bool_]:
        """[T, B]: the return ended with this step."""
        return self.unroll.done[:, self.columns]


class UnrollQueue:
    """Hands unrolls from the actor's thread to the learner's, and back when they are read."""

    def __init__(
        self,
        count: int,
        length: int,
        num_envs: int,
        observation_shape: tuple[int, int, int],
        batch_size: int,
    ) -> None:
        """`count` unrolls of `length` steps of `num_envs` environments, a multiple of
        `batch_size`."""
        self._batch_size = batch_size
        self._num_envs = num_envs
        self._changed = threading.Condition()
        self._free = deque(Unroll(length, num_envs, observation_shape) for _ in range(count))
        self._ready: deque[Batch] = deque()
        self.released = False  # whether any batch was
        self._closed = False
        self._error: BaseException | None = None

    def take(self, wait: bool) -> Unroll | None:
        """An unroll to fill, or None if there is none and the caller does not wait.

        Raises UnrollsClosed when the job ends.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise UnrollsClosed
            return self._free.popleft() if self._free else None

    def put(self, unroll: Unroll) -> None:
        """Gives a full unroll to the learner."""
        with self._changed:
            for start in range(0, self._num_envs, self._batch_size):
                self._ready.append(Batch(unroll, slice(start, start + self._batch_size)))
                unroll.batches_unread += 1
            self._changed.notify_all()

    def get(self, timeout: float) -> Batch | None:
        """The oldest batch, or None if there is none within `timeout` seconds.

        Raises the actor's exception if the actor failed: a job without an actor ends at once.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None, timeout)
            if self._error is not None:
                raise self._error
            return self._ready.popleft() if self._ready else None

    def release(self, batch: Batch) -> None:
        """Says that the learner will not look at the batch again."""
        with self._changed:
            self.released = True
            batch.unroll.batches_unread -= 1
            if batch.unroll.batches_unread == 0:
                self._free.append(batch.unroll)
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Says that the actor has ended with `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the actor at its next `take`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
