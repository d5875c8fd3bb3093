"""Queue: items from any thread, for threads and for tasks of any event loop."""

from __future__ import annotations

import abc
import asyncio
import collections
import threading
from collections.abc import Generator
from typing import Any

from moolink._core import LentSlot, Lock
from moolink.errors import Closed, QueueFull, TimeoutError
from moolink.internal import deadlines, forks
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords

NOTHING: Any = object()  # there is nothing to take now


@names_keywords
class Queue(Closing):
    """A queue that threads and tasks share: every item goes to one of the waiters.

    Take with ``await queue``, ``async for item in queue``, ``queue.get(timeout)`` or ``for item in
    queue``; the loops end when the queue is closed and empty. A waiter that stops (a cancelled
    task, a time-out, Ctrl-C) takes no item.

    :meth:`Rpc.define_queue` makes queues of calls.

    Args:
        max_size: how many items may wait; ``None``: no bound.
    """

    def __init__(self, max_size: int | None = None) -> None:
        if max_size is not None:
            max_size = integer_of(max_size, "max_size", least=1)
        self._max_size = max_size
        # Reentrant: a collection of garbage at any point below may close this queue.
        self._lock = Lock()
        self._items: collections.deque[Any] = collections.deque()
        self._waiters: collections.deque[_Waiter] = collections.deque()
        self._closed = False
        self._why_closed = "the queue is closed"

    def enqueue(self, item: Any) -> None:
        """Adds an item; does not block.

        Raises:
            QueueFull: ``max_size`` items wait.
            Closed: the queue is closed.
        """
        with self._lock:
            self._require_room()
            self._items.append(item)
            self._wake_one()

    def get(self, timeout: float | None = None) -> Any:
        """Takes the oldest item, waiting for one for at most ``timeout`` seconds.

        Raises:
            TimeoutError: there was none in time.
            Closed: the queue is closed and no item is left.
        """
        deadline = deadlines.after(timeout)
        while True:
            item = self._take_or_wait(_WaitingThread)
            if isinstance(item, _WaitingThread):
                item = self._await_wake_up(item, deadline)
                if item is NOTHING:
                    raise TimeoutError(f"no item came within {timeout:g} s")
            item = self._finish(item)
            if item is not NOTHING:
                return item

    def __repr__(self) -> str:
        bound = "" if self._max_size is None else f" of at most {self._max_size}"
        return f"<moolink.rpc.Queue, {self.size()}{bound} waiting{', closed' * self._closed}>"

    def __await__(self) -> Generator[Any, None, Any]:
        """Takes the oldest item; several tasks, of several event loops, may await."""
        return self._get_async().__await__()

    def __iter__(self) -> Queue:
        return self

    def __next__(self) -> Any:
        try:
            return self.get()
        except Closed:
            raise StopIteration from None

    def __aiter__(self) -> Queue:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self
        except Closed:
            raise StopAsyncIteration from None

    def empty(self) -> bool:
        """Tells whether no item waits."""
        return not self._items

    def size(self) -> int:
        """Returns the number of items that wait."""
        return len(self._items)

    def close(self) -> None:
        """Refuses further items; waiters get Closed once the present items are taken."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, collections.deque()
            for waiter in waiters:
                waiter.wake()

    def end_in_children(self) -> None:
        """Closes it in forked children: the peer whose calls come here is not there."""
        forks.changes_in_children(self)

    def _forked(self) -> None:
        """In a forked child, where no call comes: another thread may have held the lock."""
        self._lock = Lock()
        self._closed = True
        self._why_closed = "this process was forked: the peer whose calls came here is the parent's"
        self._items.clear()
        self._waiters.clear()

    # Overridden by kinds of queues; the caller of the first three holds the lock.

    def _require_room(self) -> None:
        if self._closed:
            raise Closed(self._why_closed)
        if self._max_size is not None and len(self._items) >= self._max_size:
            raise QueueFull(f"max_size={self._max_size} items wait already")

    def _ready(self) -> bool:
        """Whether there is something to take now."""
        return bool(self._items)

    def _take(self) -> Any:
        """Takes it; called only if there is something."""
        return self._items.popleft()

    def _finish(self, taken: Any) -> Any:
        """Makes the taker's item, without the lock; NOTHING: look again."""
        return taken

    # Waiting

    def _take_or_wait(self, kind: type[_Waiter] | None) -> Any:
        """Takes an item, or returns a waiter that will be woken, or NOTHING if `kind` is None."""
        with self._lock:
            if self._ready():
                return self._take()
            if self._closed:
                raise Closed(self._why_closed)
            if kind is None:
                return NOTHING
            waiter = kind()
            self._waiters.append(waiter)
            return waiter

    def _await_wake_up(self, waiter: _WaitingThread, deadline: float | None) -> Any:
        """Blocks until there is something, and takes it; NOTHING: the deadline passed."""
        while True:
            try:
                with LentSlot():
                    woken = waiter.wait(deadlines.left(deadline))
                item = self._take_or_wait(_WaitingThread if woken else None)
            except BaseException:
                self._leave(waiter)
                raise
            if not woken:
                self._leave(waiter)
            if not isinstance(item, _WaitingThread):
                return item
            waiter = item  # Another waiter was faster.

    def _leave(self, waiter: _Waiter) -> None:
        """Ends a wait; if it was woken in vain, wakes another one."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif self._ready():
                self._wake_one()

    def _wake_one(self) -> None:
        while self._waiters:
            if self._waiters.popleft().wake():
                return

    async def _get_async(self) -> Any:
        while True:
            item = self._take_or_wait(_WaitingTask)
            if isinstance(item, _WaitingTask):
                try:
                    await item.woken
                except BaseException:
                    self._leave(item)
                    raise
                continue
            item = self._finish(item)
            if item is not NOTHING:
                return item


class _Waiter(abc.ABC):
    """A waiting thread or task; woken once at most, with the queue's lock held."""

    @abc.abstractmethod
    def wake(self) -> bool:
        """Returns False if it does not wait any more."""


class _WaitingThread(_Waiter):
    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wait(self, timeout: float | None) -> bool:
        if timeout is None:
            return self._asleep.acquire()
        return self._asleep.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))

    def wake(self) -> bool:
        self._asleep.release()
        return True


class _WaitingTask(_Waiter):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.woken: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> bool:
        if self.woken.cancelled():
            return False
        try:
            self._loop.call_soon_threadsafe(_resolve, self.woken)
        except RuntimeError:
            return False  # The event loop was closed.
        return True


def _resolve(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
