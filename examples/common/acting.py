"""Acting of the IMPALA learners of both frameworks: unrolls, and the thread that fills them."""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from examples.common.environments import Environments, make_envs
from examples.common.options import ImpalaOptions

B = TypeVar("B")


class Unroll:
    """T steps of E environments, in arrays that are filled again and again.

    Attributes:
        state: the memory of the policy before the first observation, as the framework has it.
        unread: batches that the learner has not released.
    """

    def __init__(self, envs: Environments, o: ImpalaOptions, action_dtype: npt.DTypeLike) -> None:
        T, E = o.unroll_length, envs.num_envs
        self.observation = {
            key: np.empty((T + 1, E, *space.shape), space.dtype)
            for key, space in envs.observation_spaces.items()
        }
        self.first = np.empty((T + 1, E), np.bool_)
        self.action = np.empty((T, E, envs.actions.size), action_dtype)
        self.log_prob, self.reward, self.discount, self.bootstrap = (
            np.empty((T, E), np.float32) for _ in range(4)
        )
        self.state: Any
        self.unread = 0

    def parts(self, size: int) -> list[slice]:
        """The environments of each batch; the learner has to release as many batches."""
        starts = range(0, self.first.shape[1], size)
        self.unread = len(starts)
        return [slice(start, start + size) for start in starts]


class ActingThread(threading.Thread, abc.ABC, Generic[B]):
    """Acts in groups of environments in turn: while those of one group step, the network infers for
    another."""

    def __init__(self, o: ImpalaOptions, envs: Environments) -> None:
        """`envs` is the first group of environments; the thread makes the others."""
        super().__init__(name="actor", daemon=True)
        self.o, self.envs = o, [envs]
        self.full: queue.SimpleQueue[B | BaseException] = queue.SimpleQueue()
        self.released, self.stopped = threading.Event(), False

    @abc.abstractmethod
    def play(self, envs: Environments, group: int) -> Iterator[bool]:
        """Plays for ever, and puts batches into `full`. Yields True while the environments step,
        and False while the learner still reads the group's unroll: so memory and the lag of the
        policy are bounded."""

    def run(self) -> None:
        try:
            groups = [self.play(self.envs[0], 0)]
            while not self.stopped:
                self.released.clear()
                stepping = [next(group) for group in groups]
                if len(groups) < self.o.num_groups and self.full.qsize():
                    # Making environments takes a moment, in which there is something to learn.
                    self.envs.append(make_envs(self.o, self.o.envs_per_group))
                    groups.append(self.play(self.envs[-1], len(groups)))
                elif not any(stepping):
                    self.released.wait(0.1)
        except BaseException as error:  # noqa: BLE001 - raised again by next_batch
            self.full.put(error)

    def next_batch(self, timeout: float) -> B | None:
        """The oldest one; None if there is none in time. Raises the thread's exception."""
        try:
            batch = self.full.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def release(self, unroll: Unroll) -> None:
        """Says that a batch of it is read."""
        unroll.unread -= 1
        self.released.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        if self.is_alive():
            self.join()
        for envs in self.envs:
            envs.close()
