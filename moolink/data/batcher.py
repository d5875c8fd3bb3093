"""Batcher: nests of arrays in, batches of a fixed size out."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Generator
from typing import Any

from moolink._core import BatchRows, LentSlot, Lock
from moolink.data import batch_layout
from moolink.data.batch_layout import Mode, Nest, Node, Values
from moolink.errors import Closed, QueueFull, TimeoutError
from moolink.internal import deadlines, forks
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.internal.locks import condition

_COPYING = 0.001  # seconds between two looks at a producer that copies


@names_keywords
class Batcher(Closing):
    """Collects items into batches, each copied once, straight into the batch's memory.

    An item is a nest of dicts, lists, tuples, namedtuples, dataclasses and types registered as
    pytrees with JAX. Its leaves are numpy arrays, torch tensors or other arrays (batched as numpy).
    A leaf that is none of these, such as a Python number, a string or None, appears in the batch as
    a list with each row's value. The first item fixes structure, shapes and dtypes. Any thread may
    add and take; a batch holds items in the order in which they were added.

    Args:
        size: items (`stack`) or rows (`cat`) of a batch.
        device: where the batches are made; anything but "cpu" gives torch tensors.
        dim: for `stack`, the new dimension; for `cat`, the dimension along which rows lie.
        max_batches: how many finished batches may wait. When as many do, an item that would finish
            another one has to wait too. None: no bound.
    """

    _values: Values = "list"  # a batch's value in place of a leaf that is no array

    def __init__(
        self, size: int, device: str = "cpu", dim: int = 0, *, max_batches: int | None = None
    ) -> None:
        self._size = integer_of(size, "size", least=1)
        if max_batches is not None:
            max_batches = integer_of(max_batches, "max_batches", least=1)
        self._device = str(device)
        self._dim = integer_of(dim, "dim")
        self._max_batches = max_batches
        self._make_locks()
        self._layout: Node | None = None
        self._mode: Mode | None = None
        # The batch being filled: whether it has its memory, and the copier of plain items.
        self._begun = False
        self._rows: BatchRows | None = None
        self._plain = True
        self._filled = 0
        # Guarded by _changed:
        self._batches: collections.deque[tuple[Nest, Any]] = collections.deque()
        self._awaiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._closed = False
        self._stalled = False  # a producer waits for room
        forks.changes_in_children(self)

    def _make_locks(self) -> None:
        # Producers hold this one for a whole item; it guards the batch being filled. See _enter.
        self._filling = Lock()
        # Never held while copying.
        self._changed = condition()

    def _forked(self) -> None:
        self._make_locks()
        self._stalled = False

    def stack(self, item: Nest, *, block: bool = True, timeout: float | None = None) -> None:
        """Adds `item` as one entry along a new dimension.

        Args:
            item: the nest to copy; its arrays may change as soon as this returns.
            block: wait while `max_batches` batches wait to be taken.
            timeout: seconds to wait at most.

        Raises:
            ValueError: structure, shape or dtype differ from the first item's, or `cat` was used.
            QueueFull: there was no room; the item was not added.
            Closed: the batcher is closed.
        """
        deadline = _deadline(block, timeout)
        self._enter(deadline)
        try:
            # A row that is not counted in the end is overwritten by the next one.
            rows = self._rows
            if rows is None or self._closed or not rows.put(item, self._filled):
                self._prepare("stack", item).put_row(item, self._filled)
            if self._filled + 1 == self._size:
                self._wait_for_room(1, deadline)
            self._count(1)
        finally:
            self._filling.release()

    def cat(self, item: Nest, *, block: bool = True, timeout: float | None = None) -> None:
        """Adds the rows of `item`'s arrays along `dim`, split over several batches if need be.

        Every array of `item` has the same number of rows; a value that is no array goes with each
        of them. Arguments and errors are as for `stack`. With a limit on the wait, either all rows
        are added or none; without one, they are added as room appears.
        """
        deadline = _deadline(block, timeout)
        self._enter(deadline)
        try:
            layout = self._prepare("cat", item)
            layout.check(item)
            count = batch_layout.count_rows(layout.rows(item))
            if deadline is not None:
                self._wait_for_room((self._filled + count) // self._size, deadline)
            offset = 0
            while offset < count:
                part = min(count - offset, self._size - self._filled)
                if deadline is None:
                    self._wait_for_room((self._filled + part) // self._size, None)
                if not self._begun:
                    self._begin()
                layout.put_rows(item, self._filled, part, offset)
                self._count(part)
                offset += part
        finally:
            self._filling.release()

    def empty(self) -> bool:
        """Tells whether no finished batch waits."""
        return not self._batches

    def size(self) -> int:
        """Returns the number of finished batches that wait."""
        return len(self._batches)

    def get(self, timeout: float | None = None) -> Nest:
        """Takes the oldest finished batch, waiting for one for at most `timeout` seconds.

        Raises:
            TimeoutError: none was finished in time.
            Closed: the batcher is closed and no finished batch is left.
        """
        with self._changed:
            with LentSlot():
                finished = self._changed.wait_for(lambda: self._batches or self._closed, timeout)
            if not finished:
                raise TimeoutError(
                    f"no batch of {self._size} was finished within {timeout:g} s; "
                    f"the next one holds {self._filled} so far"
                )
            return self._take()

    def __repr__(self) -> str:
        filling = f"{self._filled} of {self._size} rows in the next one"
        closed = ", closed" * self._closed
        return f"<moolink.Batcher, {self.size()} batches waiting, {filling}{closed}>"

    def __await__(self) -> Generator[Any, None, Nest]:
        """Takes the oldest finished batch; several tasks, of several event loops, may await."""
        return self._get_async().__await__()

    def close(self) -> None:
        """Refuses further items and wakes all waiters; finished batches can still be taken."""
        with self._changed:
            self._closed = True
            self._wake()

    def _enter(self, deadline: float | None) -> None:
        """Takes _filling. Another producer holds it for a moment while it copies, but longer while
        it waits for room: then this one waits until its own deadline at most."""
        if self._filling._is_owned():
            raise RuntimeError(
                "this thread is adding an item to the batcher already: the conversion of an item "
                "to arrays, and a signal handler, must not add another one"
            )
        if self._filling.acquire(blocking=False):
            return
        while True:
            left = deadlines.left(deadline)
            if self._filling.acquire(timeout=-1 if left is None else max(left, _COPYING)):
                return
            if self._stalled:
                raise QueueFull("another item waits for room: take some batches first")

    # Filling; the caller holds _filling.

    def _prepare(self, mode: Mode, item: Nest) -> Node:
        if self._mode == mode and self._layout is not None and self._begun and not self._closed:
            return self._layout
        if self._closed:
            raise Closed("the batcher is closed")
        if self._layout is None:
            spec = batch_layout.Spec(mode, self._size, self._dim, self._device, self._values)
            self._layout, self._mode = batch_layout.build(item, spec), mode
        if self._mode == mode:
            self._begin()
            return self._layout
        raise ValueError(f"a batcher used with {self._mode} cannot be used with {mode}")

    def _begin(self) -> None:
        """Begins a batch: not before its first item, so that the last one's memory may be free."""
        assert self._layout is not None
        self._layout.allocate()
        self._begun = True
        if self._mode == "stack" and self._dim == 0 and self._plain:
            try:
                self._rows = BatchRows(self._layout.take())
            except ValueError:  # it has other leaves, as all batches will
                self._plain = False
                self._layout.allocate()  # take() has given the last one away

    def _wait_for_room(self, finished: int, deadline: float | None) -> None:
        """Waits until `finished` more batches may be put beside those that wait."""
        bound = self._max_batches
        if bound is None or finished == 0:
            return
        if finished > bound:
            raise ValueError(
                f"the item finishes {finished} batches, and only max_batches={bound} may wait: "
                "add fewer rows at a time, or do not limit the wait"
            )
        with self._changed:
            self._stalled = True
            try:
                with LentSlot():
                    room = self._changed.wait_for(
                        lambda: len(self._batches) + finished <= bound or self._closed,
                        deadlines.left(deadline),
                    )
            finally:
                self._stalled = False
            if self._closed:
                raise Closed("the batcher was closed while an item waited for room")
            if not room:
                waiting = len(self._batches)
                raise QueueFull(f"{waiting} of max_batches={bound} batches wait: take some first")

    def _count(self, rows: int) -> None:
        """Counts rows that were put; a batch that is full by them is finished."""
        self._filled += rows
        if self._filled < self._size:
            return
        assert self._layout is not None
        batch = (self._layout.take(), self._record_event())
        self._filled = 0
        self._rows = None
        self._begun = False
        with self._changed:
            self._batches.append(batch)
            self._wake()

    def _record_event(self) -> Any:
        """Marks the point in the device's stream at which the batch's copies are done."""
        if not self._device.startswith("cuda"):
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    # Taking; the caller holds _changed.

    def _take(self) -> Nest:
        if not self._batches:
            raise Closed("the batcher is closed")
        batch, event = self._batches.popleft()
        self._changed.notify_all()  # A producer may wait for room.
        if event is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_event(event)
        return batch

    async def _get_async(self) -> Nest:
        while True:
            with self._changed:
                if self._batches or self._closed:
                    return self._take()
                loop = asyncio.get_running_loop()
                woken: asyncio.Future[None] = loop.create_future()
                self._awaiters.append((loop, woken))
            await woken

    def _wake(self) -> None:
        """Wakes all waiters: each looks for itself, so no wake-up can be lost."""
        self._changed.notify_all()
        awaiters, self._awaiters = self._awaiters, []
        for loop, woken in awaiters:
            try:
                loop.call_soon_threadsafe(_resolve, woken)
            except RuntimeError:
                continue  # Its event loop was closed; no task waits there any more.


def _resolve(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def _deadline(block: bool, timeout: float | None) -> float | None:
    return deadlines.after(timeout if block else 0.0)
