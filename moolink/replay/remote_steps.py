"""The last steps of a writer, on their way to the replay's server."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from moolink.data import skeletons
from moolink.errors import CancelledError, Closed, Error, NoSuchFunction, PeerLost, TimeoutError
from moolink.internal import deadlines, logs
from moolink.replay import names
from moolink.replay.step_blocks import StepBlocks
from moolink.replay.writer import Item, Steps
from moolink.rpc import naming
from moolink.rpc.peer_wait import PeerWait

if TYPE_CHECKING:
    from moolink._core import Future
    from moolink.rpc import Rpc

_PAUSE = 0.1  # seconds before a server that is lost is called again


@dataclasses.dataclass
class _Kind:
    """The layout and the table of consecutive items."""

    item: Item
    table: str | None


@dataclasses.dataclass(slots=True)
class _Made:
    """An item that the server has not confirmed yet."""

    kind: _Kind
    first: int  # the number of its first step
    priority: float


class RemoteSteps(Steps):
    """One call is under way; steps and items that are added meanwhile go with the next one.

    A server that was restarted is sent the steps that are kept again. The items that were under way
    then may be lost; they are counted, and a warning says so.
    """

    def __init__(self, rpc: Rpc, server: str, name: str, chunk: int, first: Any) -> None:
        leaves, self.skeleton = skeletons.flatten(first)
        self.columns = []
        for path, leaf in zip(skeletons.paths(self.skeleton), leaves, strict=True):
            dtype, shape = skeletons.layout_of(skeletons.as_array(leaf, path=path))
            self.columns.append((path, dtype, shape))
        self._rpc = rpc
        self._server = server
        self._name = name
        self._write_function = names.WRITE.format(name)
        self._end_function = names.END.format(name)
        self._chunk = chunk
        self._steps = StepBlocks(self.columns, chunk)
        self._told = 0  # the steps before this one were sent
        self.oldest = 0
        self._kind: _Kind | None = None  # of the last item
        self._gathered: list[_Made] = []  # items for the next call
        self._sent: list[_Made] = []  # items of the call under way
        self._call: Future | None = None
        self._begin()
        self.lost = 0
        """Items that may not be in their tables, because a server was lost."""

    @property
    def end(self) -> int:
        return self._steps.end

    def append(self, step: Any) -> None:
        leaves = skeletons.leaves_like(step, self.skeleton)
        if leaves is None:
            difference = skeletons.difference(step, self.skeleton)
            raise ValueError(f"a step differs from the first one: it is {difference}")
        arrays = self._steps.arrays_of(leaves)
        # An earlier error is raised before the step is taken.
        self._settle(self._has_many_steps, None)
        self._steps.append(arrays)
        self._send()

    def forget(self, first: int) -> None:
        self.oldest = first
        self._trim()

    def insert(
        self, item: Item, first: int, priority: float, table: str | None, timeout: float | None
    ) -> None:
        if timeout == 0:
            raise ValueError("over a network a writer cannot insert without waiting")
        if not 0 <= priority < math.inf:  # the server would refuse all that goes with it
            raise ValueError(f"a priority must be finite and not negative, got {priority}")
        self._settle(self._has_many_items, timeout)
        if self._kind is None or self._kind.item is not item or self._kind.table != table:
            self._kind = _Kind(item, table)
        self._gathered.append(_Made(self._kind, first, float(priority)))
        self._send()

    def flush(self, timeout: float | None = None) -> None:
        wait = self._new_wait(timeout)
        while self._call is not None or self._gathered:
            self._send()
            self._take_reply(wait)

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = None
        self._gathered, self._sent = [], []
        self._end_at_server()
        self._begin()

    def _end_at_server(self) -> None:
        with contextlib.suppress(Error):  # a server that is lost has forgotten the writer
            self._rpc.async_(self._server, self._end_function, self._id)

    def _begin(self) -> None:
        """A writer anew, at the server's side."""
        self._id = naming.make_id(self._rpc)
        self._turn = 0
        self._base = self._steps.end  # the number of the server's first step

    def _has_many_steps(self) -> bool:
        return self._steps.end - self._told >= self._chunk

    def _has_many_items(self) -> bool:
        gathered = len(self._gathered)
        return gathered >= self._chunk or gathered + len(self._sent) >= 2 * self._chunk

    def _settle(self, is_full: Callable[[], bool], timeout: float | None) -> None:
        """Takes the reply to the call under way; waits for it, and for later ones, while the writer
        is full."""
        deadlines.check(timeout)
        if self._call is None or not (self._call.done() or is_full()):
            return
        wait = self._new_wait(timeout)
        self._take_reply(wait)
        while is_full():
            self._send()
            if is_full():
                self._take_reply(wait)

    def _new_wait(self, timeout: float | None) -> PeerWait:
        return PeerWait(self._rpc, [self._server], timeout)

    def _take_reply(self, wait: PeerWait) -> None:
        """Waits for the reply to the call under way."""
        assert self._call is not None
        if not wait.for_call(self._call, f"a writer waits: {wait.reason or 'for the replay'}"):
            count = len(self._sent) + len(self._gathered)
            raise wait.late(
                f"{count} items were not delivered to the replay {self._name!r} at "
                f"{naming.quoted(self._server)}",
                "flush() or close() once more delivers them when it is back",
            )
        self._finish(wait)

    def _send(self) -> None:
        """Calls the server, unless a call is under way."""
        if self._call is not None:
            return
        if not self._gathered and not self._has_many_steps():
            return  # steps alone are in no hurry
        self._sent, self._gathered = self._gathered, []
        arguments = self._arguments(self._sent)
        limit = names.TURN + self._rpc.get_timeout()
        self._call = self._rpc.within(limit).async_(self._server, self._write_function, *arguments)

    def _arguments(self, items: list[_Made]) -> tuple[Any, ...]:
        needed = min([self.oldest, *(item.first for item in items)])
        if self._turn == 0:
            self._base = self._told = needed
        steps = [
            (count, skeletons.unflatten(self.skeleton, arrays))
            for count, arrays in self._steps.between(self._told, self._steps.end)
        ]
        self._told = self._steps.end
        groups = []
        for kind, group in itertools.groupby(items, lambda item: item.kind):
            made = list(group)
            firsts = [item.first - self._base for item in made]
            priorities = np.array([item.priority for item in made])
            what = kind.item
            groups.append((what.skeleton, what.width, what.pieces, kind.table, firsts, priorities))
        number = self._turn
        self._turn += 1
        return self._id, number, max(0, needed - self._base), steps, groups

    def _trim(self) -> None:
        """Keeps the steps of which items may be made, here or, once more, at another server."""
        needed = min(self.oldest, self._told)
        if not self._steps.gives_up(needed):
            return
        for item in itertools.chain(self._gathered, self._sent):
            needed = min(needed, item.first)
        self._steps.forget(needed)

    def _finish(self, wait: PeerWait) -> None:
        """Takes the outcome of the call under way, which has ended."""
        call, sent = self._call, self._sent
        assert call is not None
        try:
            done = call.result()
        except (Closed, CancelledError):
            raise
        except (PeerLost, NoSuchFunction, TimeoutError) as lost:
            if lost.ran != "no":
                self._lose(sent, str(lost))
                sent = []
            wait.failed(lost)
            time.sleep(min(_PAUSE, wait.turn(f"a writer waits: {lost}")))
            done = None
        except Error:
            # How much of the turn was done is not known: the writer begins anew at the server.
            self._call, self._sent = None, []
            self._end_at_server()
            self._begin()
            raise
        else:
            wait.answered()
        self._call, self._sent = None, []
        self._gathered = sent[done or 0 :] + self._gathered
        self._trim()
        if done is None:
            self._begin()

    def _lose(self, items: list[_Made], why: str) -> None:
        self.lost += len(items)
        if items:
            logs.logger.warning("a writer may have lost items, %d: %s", len(items), why)

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None:
            call.cancel()
