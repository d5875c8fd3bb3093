"""Requests to the workers of a pool, and waiting for them to be served."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import select
import weakref
from collections.abc import Iterable

from moolink.env_pool import channel
from moolink.env_pool.board import Command
from moolink.env_pool.memory import rows_of
from moolink.env_pool.supervisor import Supervisor
from moolink.errors import Error
from moolink.internal import deadlines


class Requests:
    """Makes requests about one batch of a pool.

    The batch has a bell, an eventfd. A worker rings it when as many requests are served as the
    waiters want, and the pool when it fails or closes. It may ring too early: the board decides.
    It stays rung, so that all waiters see it, until one waits for more.

    Attributes:
        rows: the rows of the batch.
        made: how many requests about the batch were made.
    """

    def __init__(self, supervisor: Supervisor, batch: int) -> None:
        self._supervisor = supervisor
        self._batch = batch
        self._board = supervisor.memory.board
        self._bell = supervisor.bells[batch]
        self._waited = os.dup(self._bell)  # Stays valid when the pool closes.
        weakref.finalize(self, os.close, self._waited)
        self._rung = [(self._waited, select.POLLIN)]  # poll()'s result if only the bell rang.
        shape = supervisor.shape
        size = shape.batch_size
        self.rows = range(batch * size, (batch + 1) * size)
        self.made = 0
        self._parts = [
            (worker, self.rows[rows.start], len(rows))
            for worker in range(shape.workers)
            if (rows := rows_of(worker, shape.workers, size))
        ]

    def of_all(
        self, command: Command = Command.STEP, arguments: channel.Arguments | None = None
    ) -> int:
        """Makes a request about all rows; returns the number of served ones that ends it."""
        self._push(self._parts, command, arguments)
        return self.made

    def of_runs(
        self,
        runs: list[tuple[int, int, int]],
        arguments: channel.Arguments | None,
        command: Command,
    ) -> None:
        """Makes requests about some rows, in order: (worker, first row, number of rows) of each."""
        self._push(runs, command, arguments)

    def _push(
        self,
        parts: list[tuple[int, int, int]],
        command: Command,
        arguments: channel.Arguments | None,
    ) -> None:
        """Makes one request for each (worker, first row, number of rows), or none if it raises."""
        supervisor = self._supervisor
        encoded = [] if arguments is None else [_encoded(arguments, *part[1:]) for part in parts]
        with supervisor.lock:
            supervisor.raise_failure()
            if arguments is None:
                supervisor.push(parts, command)
            else:
                for part, data in zip(parts, encoded, strict=True):
                    supervisor.push_with(part, command, data)
            self.made += len(parts)

    def served_by(self, worker: int) -> int:
        """Returns how many of a worker's requests are served."""
        return self._board.served_by(worker, self._batch)

    def made_of(self, worker: int) -> int:
        """Returns how many requests were made of a worker, of a pool of one batch."""
        return self._board.pushed(worker)

    def results(self, rows: Iterable[int] | None = None) -> channel.Results:
        """Takes the workers' messages about `rows`, by default the batch's."""
        return self._supervisor.results(self.rows if rows is None else rows)

    def wait(self, goal: int, timeout: float | None) -> bool:
        """Waits until `goal` requests are served; returns whether they were in time."""
        if self._ask(goal):
            return True
        supervisor = self._supervisor
        deadline = deadlines.after(timeout)
        poll = select.poll()
        poll.register(self._waited, select.POLLIN)
        poll.register(supervisor.alarms, select.POLLIN)
        while True:
            remaining = deadlines.left(deadline)
            ready = poll.poll(None if remaining is None else math.ceil(remaining * 1000))
            if ready != self._rung:
                supervisor.handle_alarms()
            if self._ask(goal):
                return True
            if remaining == 0.0:
                return False

    async def wait_async(self, goal: int) -> None:
        """Waits in an event loop until `goal` requests are served."""
        if self._ask(goal):
            return
        supervisor = self._supervisor
        loop = asyncio.get_running_loop()
        # Duplicates: a loop knows one reader a descriptor, and they survive the pool's close.
        bell, alarms = os.dup(self._waited), os.dup(supervisor.alarms)
        rung = asyncio.Event()
        try:
            loop.add_reader(bell, rung.set)
            loop.add_reader(alarms, rung.set)
            while not self._ask(goal):
                await rung.wait()
                rung.clear()
                supervisor.handle_alarms()
        finally:
            for descriptor in (bell, alarms):
                loop.remove_reader(descriptor)
                os.close(descriptor)

    def unfinished(self) -> str:
        """Says which workers have requests that they have not served."""
        supervisor, parts = self._supervisor, []
        for worker, _, _ in self._parts:
            if self._board.position(worker) != self._board.pushed(worker):
                row = self._board.current(worker)
                what = "has not begun" if row is None else f"is in environment {row}"
                parts.append(f"worker {worker} (pid {supervisor.pid(worker)}) {what}")
        return ", ".join(parts)

    def _ask(self, goal: int) -> bool:
        """Wants the bell to ring at `goal`; returns whether it is reached already."""
        with self._supervisor.lock:
            self._supervisor.raise_failure()
            return self._board.ask(self._batch, goal, self._bell)


def _encoded(arguments: channel.Arguments, first: int, count: int) -> bytes:
    """Returns the message with the arguments for some rows."""
    of_row = arguments.of_row
    part = {row: of_row[row] for row in range(first, first + count) if row in of_row}
    try:
        return channel.encode(channel.Arguments(part, arguments.shared))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Error(
            "seeds, options, actions or arguments for environments "
            f"{first} to {first + count - 1} cannot be sent to the worker processes: {error}"
        ) from error
