"""Environments under way, taken first ready, first served."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from moolink.env_pool import channel
from moolink.env_pool.board import Command
from moolink.env_pool.memory import PoolShape, rows_of
from moolink.env_pool.requests import Requests
from moolink.errors import Error
from moolink.internal import deadlines


class Ready:
    """Requests of a few environments each. A worker serves its own in order: its count tells which.

    A request is of neighbours of one worker, at most of a worker's share of a `take`:
    they are ready together, and a message is for all of them.

    Attributes:
        under_way: how many environments were asked and not received.
    """

    def __init__(
        self, requests: Requests, shape: PoolShape, batch_size: int, together: int
    ) -> None:
        """`together`: rows of each vector environment, which are asked and ready together."""
        self._requests = requests
        self._batch_size = batch_size
        self._worker_of = [
            worker
            for worker in range(shape.workers)
            for _ in rows_of(worker, shape.workers, shape.batch_size)
        ]
        self._together = together
        self._share = max(1, batch_size // shape.workers // together) * together
        self._asked: list[collections.deque[range]] = [
            collections.deque() for _ in range(shape.workers)
        ]
        self._served = [0] * shape.workers  # Of each worker's requests, those that were looked at.
        self._ready: collections.deque[int] = collections.deque()
        self._idle = np.ones(shape.num_envs, np.bool_)
        self._last: list[int] = []
        self.under_way = 0

    def checked(self, env_ids: Any) -> list[int]:
        """Returns the ids, by default those taken last, as a list; none may be under way."""
        if env_ids is None:
            rows = self._last
        else:
            rows = np.asarray(env_ids).astype(np.intp, casting="same_kind").tolist()
        for row in rows:
            if not 0 <= row < len(self._idle):
                raise IndexError(f"there is no environment {row}: num_envs is {len(self._idle)}")
        if len(set(rows)) != len(rows):
            raise ValueError(f"an environment is there twice: {rows}")
        if self._together > 1:
            self._require_whole(rows)
        if not self._idle[rows].all():
            busy = [row for row in rows if not self._idle[row]]
            raise Error(f"the environments {busy} are under way: receive their results first")
        return rows

    def _require_whole(self, rows: list[int]) -> None:
        step = self._together
        firsts = rows[::step]
        whole = [first + i for first in firsts for i in range(step)]
        if rows != whole or any(first % step for first in firsts):
            raise ValueError(
                f"the rows of a vector environment are stepped together, {step} of them in order "
                f"from a multiple of {step}; got {rows}"
            )

    def request(
        self, rows: list[int], arguments: channel.Arguments | None, command: Command
    ) -> None:
        """Has some environments stepped or reset."""
        runs = self._runs(rows)
        self._requests.of_runs(runs, arguments, command)
        for worker, first, count in runs:
            self._asked[worker].append(range(first, first + count))
        self._idle[rows] = False
        self.under_way += len(rows)

    def take(self, timeout: float | None) -> list[int] | None:
        """Waits for `batch_size` environments and returns them; None if they were not in time."""
        if self.under_way < self._batch_size:
            raise Error(
                f"recv gives {self._batch_size} environments, but only {self.under_way} are under "
                "way: send actions to more first"
            )
        deadline = deadlines.after(timeout)
        while (missing := self._batch_size - len(self._ready)) > 0:
            # All that were served before are looked at; as few more as can be enough.
            goal = sum(self._served) + -(-missing // self._share)
            if not self._requests.wait(goal, deadlines.left(deadline)):
                return None
            self._look()
        taken = [self._ready.popleft() for _ in range(self._batch_size)]
        self._idle[taken] = True
        self._last = taken
        self.under_way -= len(taken)
        return taken

    def forget(self) -> None:
        """Requests about all environments were made: ignores their part of the counts."""
        self._served = [self._requests.made_of(worker) for worker in range(len(self._served))]

    def _look(self) -> None:
        """Collects the environments that have become ready, of all workers in turn.

        So a batch is of several workers, which then have its next step to do at the same time.
        """
        news = [self._requests.served_by(worker) for worker in range(len(self._asked))]
        while self._served != news:
            for worker, asked in enumerate(self._asked):
                if self._served[worker] < news[worker]:
                    self._ready.extend(asked.popleft())
                    self._served[worker] += 1

    def _runs(self, rows: list[int]) -> list[tuple[int, int, int]]:
        """Joins neighbours in `rows`, in its order: (worker, first row, number of rows)."""
        runs: list[tuple[int, int, int]] = []
        worker, first, count = -1, 0, 0
        step = self._together
        for row in rows[::step]:
            if row == first + count and self._worker_of[row] == worker and count < self._share:
                count += step
                continue
            if count:
                runs.append((worker, first, count))
            worker, first, count = self._worker_of[row], row, step
        if count:
            runs.append((worker, first, count))
        return runs
