"""The last steps of a writer, on their way to the replay's server."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from moolink import deadlines, logs, serving, skeletons
from moolink.errors import CancelledError, Closed, Error, NoSuchFunction, PeerLost, TimeoutError
from moolink.replay import names
from moolink.replay.writer import Item, Steps

if TYPE_CHECKING:
    from moolink._core import Future
    from moolink.rpc import Rpc

_PAUSE = 0.1  # seconds before a server that is lost is called again


@dataclasses.dataclass
class _Turn:
    """What one call tells the server: steps, and items of the steps up to these."""

    steps: list[list[Any]] = dataclasses.field(default_factory=list)
    items: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)


class RemoteSteps(Steps):
    """One call is under way; what is appended and inserted meanwhile goes with the next one.

    A server that was restarted is sent the steps that are kept again. The items that were under way
    then may be lost; they are counted, and a warning says so.
    """

    def __init__(self, rpc: Rpc, server: str, name: str, chunk: int, first: Any) -> None:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        leaves, self.skeleton = skeletons.flatten(first)
        self.columns = []
        for path, leaf in zip(skeletons.paths(self.skeleton), leaves, strict=True):
            dtype, shape = skeletons.layout_of(skeletons.as_array(leaf))
            self.columns.append((path, dtype, shape))
        self._rpc = rpc
        self._server = server
        self._function = names.WRITE.format(name)
        self._end = names.END.format(name)
        self._chunk = chunk
        self._kept: collections.deque[list[Any]] = collections.deque()  # up to the next
        self._next = 0  # the number of the next step
        self._oldest = 0  # that an item may be made of
        self._gathered = _Turn()
        self._sent: _Turn | None = None
        self._call: Future | None = None
        self._away = deadlines.Wait()  # since a call succeeded
        self._begin()
        self.lost = 0
        """Items that may not be in their tables, because a server was lost."""

    def append(self, step: Any) -> None:
        leaves = skeletons.leaves_like(step, self.skeleton)
        if leaves is None:
            difference = skeletons.difference(step, self.skeleton)
            raise ValueError(f"a step differs from the first one: it is {difference}")
        copied = []
        for leaf, (path, dtype, shape) in zip(leaves, self.columns, strict=True):
            array = skeletons.as_array(leaf, dtype, path)
            if skeletons.layout_of(array) != (dtype, shape):
                given = skeletons.layout_of(array)
                raise ValueError(f"{path}: expected {dtype} {shape}, got {given[0]} {given[1]}")
            copied.append(array.clone() if hasattr(array, "clone") else np.array(array))
        # What went wrong before is raised before the step is taken.
        self._settle(wait=len(self._gathered.steps) >= self._chunk)
        self._kept.append(copied)
        self._gathered.steps.append(copied)
        self._next += 1
        self._send()

    def forget(self, count: int) -> None:
        self._oldest += count
        self._trim()

    def insert(
        self, item: Item, first: int, priority: float, table: str | None, timeout: float | None
    ) -> None:
        if timeout == 0:
            raise ValueError("over a network a writer cannot insert without waiting")
        self._settle(wait=len(self._gathered.items) >= self._chunk)
        number = self._oldest + first
        pieces = [list(piece) for piece in item.pieces]
        row = (item.skeleton, item.width, pieces, number, float(priority), table)
        self._gathered.items.append(row)
        self._send()

    def flush(self) -> None:
        while self._call is not None or self._gathered.items:
            self._settle(wait=True)
            self._send()

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = self._sent = None
        self._gathered = _Turn()
        self._end_at_server()
        self._begin()

    def _end_at_server(self) -> None:
        with contextlib.suppress(Error):  # a server that is lost has forgotten the writer
            self._rpc.async_(self._server, self._end, self._id)

    def _begin(self) -> None:
        """A writer anew, at the server's side."""
        self._id = serving.make_id(self._rpc)
        self._turn = 0
        self._base = self._next  # the number of the server's first step

    def _settle(self, wait: bool) -> None:
        """Takes the reply to the call under way; `wait` for it if need be."""
        if self._call is not None and (wait or self._call.done()):
            self._finish()

    def _send(self) -> None:
        """Calls the server, unless a call is under way."""
        if self._call is not None:
            return
        if not self._gathered.items and len(self._gathered.steps) < self._chunk:
            return  # steps alone are in no hurry
        turn, self._gathered = self._gathered, _Turn()
        self._sent = turn
        self._call = self._rpc.async_(self._server, self._function, *self._arguments(turn))

    def _arguments(self, turn: _Turn) -> tuple[Any, ...]:
        if self._turn == 0:
            turn.steps = list(self._kept)
            self._base = self._next - len(turn.steps)
        items = [
            (skeleton, width, pieces, first - self._base, priority, table)
            for skeleton, width, pieces, first, priority, table in turn.items
        ]
        steps = None
        if turn.steps:
            columns = [_stacked(column) for column in zip(*turn.steps, strict=True)]
            steps = skeletons.unflatten(self.skeleton, columns)
        needed = min([self._oldest, *(item[3] for item in turn.items)])
        forgotten = max(0, needed - self._base)
        number = self._turn
        self._turn += 1
        return self._id, number, forgotten, steps, len(turn.steps), items

    def _trim(self) -> None:
        """Keeps the steps of which items may be made, here or, once more, at another server."""
        items = self._gathered.items + (self._sent.items if self._sent else [])
        needed = min([self._oldest, *(item[3] for item in items)])
        for _ in range(needed - (self._next - len(self._kept))):
            self._kept.popleft()

    def _finish(self) -> None:
        """Waits for the call under way."""
        call, turn = self._call, self._sent
        assert call is not None
        assert turn is not None
        try:
            done = call.result()
        except (Closed, CancelledError):
            raise
        except (PeerLost, NoSuchFunction, TimeoutError) as lost:
            if lost.ran != "no":
                self._lose(turn.items, str(lost))
                turn.items = []
            time.sleep(min(_PAUSE, self._away.turn(f"a writer waits: {lost}")))
            done = None
        except Error:
            # How much of the turn was done is not known: the writer begins anew at the server.
            self._call = self._sent = None
            self._end_at_server()
            self._begin()
            raise
        else:
            self._away = deadlines.Wait()
        self._call = self._sent = None
        self._gathered.items = turn.items[done or 0 :] + self._gathered.items
        self._trim()
        if done is None:
            self._begin()

    def _lose(self, items: list[tuple[Any, ...]], why: str) -> None:
        self.lost += len(items)
        if items:
            logs.logger.warning("a writer may have lost items, %d: %s", len(items), why)

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None:
            call.cancel()


def _stacked(column: tuple[Any, ...]) -> Any:
    if hasattr(column[0], "clone"):
        import torch

        return torch.stack(column)
    return np.stack(column)
