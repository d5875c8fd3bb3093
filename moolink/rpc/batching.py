"""Calls that are served together: which, how many, and their handler."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from moolink._core import LentSlot, Lock, RpcDeferredReturn, call_later
from moolink.errors import Closed, Error
from moolink.internal.locks import condition
from moolink.rpc.batch_stacking import BatchOptions, Call, Misfit, Stacker, rows_of
from moolink.rpc.queue import NOTHING, Queue


class CallQueue(Queue):
    """A queue of calls that come out one by one; beside them, items of the program's own."""

    def enqueue(self, item: Any) -> None:
        """Adds an item, which may be a call that was taken before.

        Raises:
            QueueFull: ``max_size`` items wait.
            Closed: the queue is closed.
        """
        super().enqueue(_call_of(item) or item)

    def put_call(
        self, reply: RpcDeferredReturn, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Adds a call; errors are those of :meth:`enqueue`, but that a misfit is answered."""
        try:
            self.enqueue(Call(reply, args, kwargs))
        except Misfit as misfit:
            reply.reject(str(misfit))

    def _require_room(self) -> None:
        if self._max_size is not None and len(self._items) >= self._max_size:
            self._forget_cancelled()
        super()._require_room()

    def _forget_cancelled(self) -> None:
        waiting = [item for item in self._items if not _is_cancelled(item)]
        if len(waiting) < len(self._items):
            self._lock.drop_later(self._items)
            self._items = collections.deque(waiting)

    def _ready(self) -> bool:
        while self._items and _is_cancelled(self._items[0]):
            self._lock.drop_later(self._items.popleft())
        return bool(self._items)


def _call_of(item: Any) -> Call | None:
    """The item as a call if it is one: a triple of reply, args and kwargs."""
    if isinstance(item, Call):
        return item
    if type(item) is tuple and len(item) == 3 and isinstance(item[0], RpcDeferredReturn):
        return Call(*item)
    return None


def _is_cancelled(item: Any) -> bool:
    return isinstance(item, Call) and item.reply.cancelled()


class BatchQueue(CallQueue):
    """A queue of calls that come out in batches.

    Args:
        options: how they are batched.
        max_size: how many calls may wait.
        on_due: called when a batch that is not full has waited for ``max_latency``; default:
            a waiter is woken.
    """

    def __init__(
        self,
        options: BatchOptions,
        max_size: int | None = None,
        on_due: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(max_size)
        never_due = not options.dynamic and options.max_latency is None
        if never_due and max_size is not None and max_size < (options.batch_size or 1):
            raise ValueError(
                f"{max_size=} leaves no room for a batch of batch_size={options.batch_size} calls"
            )
        self._options = options
        self._on_due = on_due
        self._stacker = Stacker(options)
        self._items: collections.deque[tuple[float, Call]]  # with the time of arrival
        self._timer_set = False

    def enqueue(self, item: Any) -> None:
        """Adds a call.

        Raises:
            TypeError: the item is none.
            ValueError: it does not fit into a batch.
            QueueFull: ``max_size`` calls wait.
            Closed: the queue is closed.
        """
        call = _call_of(item)
        if call is None:
            raise TypeError(
                "a queue of batches takes calls only, triples of reply, arguments and keyword "
                f"arguments; got {item!r}"
            )
        self._stacker.require_fit(call)
        with self._lock:
            self._require_room()
            self._items.append((time.monotonic(), call))
            if self._ready():
                self._wake_one()
            elif self._options.max_latency is not None:
                self._set_timer(self._options.max_latency)

    def take_now(self) -> Call | None:
        """Returns a batch if there is one."""
        while (taken := self._take_or_wait(None)) is not NOTHING:
            batch = self._finish(taken)
            if batch is not NOTHING:
                return Call(*batch)
        return None

    def close(self) -> None:
        """As for every queue; calls that are too few for a batch fail."""
        super().close()
        with self._lock:
            too_few = len(self._items) % (self._options.batch_size or 1)
            self._fail_newest(0 if self._options.dynamic else too_few)

    def _fail_newest(self, count: int) -> None:
        for _ in range(count):
            entry = self._items.pop()
            self._lock.drop_later(entry)
            entry[1].reply.error(Closed("the function was withdrawn before the batch was full"))

    def _ready(self) -> bool:
        if self._options.dynamic:
            return bool(self._items)
        size = self._options.batch_size or 1
        if len(self._items) >= size:
            self._forget_cancelled()
        ready = len(self._items) >= size or self._overdue() <= 0
        if self._closed and not ready:
            self._fail_newest(len(self._items))
        return ready

    def _overdue(self) -> float:
        """Seconds until the oldest call has waited for long enough."""
        if not self._items or self._options.max_latency is None:
            return float("inf")
        return self._items[0][0] + self._options.max_latency - time.monotonic()

    def _take(self) -> Any:
        limit = self._options.limit
        taken: list[tuple[float, Call]] = []
        rows = 0
        while self._items:
            entry = self._items[0]
            if entry[1].reply.cancelled():
                self._lock.drop_later(self._items.popleft())
                continue
            rows += rows_of(entry[1]) if self._options.mode == "cat" else 1
            if taken and limit is not None and rows > limit:
                break
            taken.append(self._items.popleft())
        if self._items and self._options.max_latency is not None:
            self._set_timer(self._overdue())
        return taken

    def _finish(self, taken: list[tuple[float, Call]]) -> Any:
        calls = [call for _, call in taken]
        with self._stacker.lock:
            try:
                if not self._is_batch(taken, calls):
                    return NOTHING
                batch = self._stacker.try_stack(calls)
                if batch is None:
                    calls = self._stacker.sift(calls)
                    if not self._is_batch(taken, calls):
                        return NOTHING
                    batch = self._stacker.stack(calls)
                return batch
            except Exception as wrong:  # noqa: BLE001 - such as no memory on the device
                for call in calls:
                    with contextlib.suppress(Error):  # It was answered before that.
                        call.reply.error(wrong)
                return NOTHING

    def _is_batch(self, taken: list[tuple[float, Call]], calls: list[Call]) -> bool:
        """Whether there are enough; else they are put back, to wait for others."""
        options = self._options
        if not calls:
            return False
        if options.dynamic or options.batch_size == len(calls):
            return True
        latency = options.max_latency
        if latency is not None and taken[0][0] + latency <= time.monotonic():
            return True
        fit = {id(call) for call in calls}
        with self._lock:
            self._items.extendleft(reversed([entry for entry in taken if id(entry[1]) in fit]))
            if latency is not None:
                self._set_timer(self._overdue())
        return False

    def _forget_cancelled(self) -> None:
        waiting = [entry for entry in self._items if not entry[1].reply.cancelled()]
        if len(waiting) < len(self._items):
            self._lock.drop_later(self._items)
            self._items = collections.deque(waiting)

    # Batches that are not full in time; the caller holds the lock.

    def _set_timer(self, seconds: float) -> None:
        if self._timer_set:
            return
        self._timer_set = True
        queue = weakref.ref(self)

        def due() -> None:
            if (alive := queue()) is not None:
                alive._timer_ended()

        call_later(max(0.0, seconds), due)

    def _timer_ended(self) -> None:
        with self._lock:
            self._timer_set = False
            ready = self._ready()
            if ready and self._on_due is None:
                self._wake_one()
            elif self._items and not ready:  # they came later than those it was set for
                self._set_timer(self._overdue())
        if ready and self._on_due is not None:
            self._on_due()


class BatchHandler:
    """Serves batches of calls on the threads that bring the calls; dynamic ones one at a time, so
    that others gather meanwhile.

    Args:
        options: how they are batched.
        serve: serves a batch; returns whether it is done with it, else calls its second argument
            when it is.
    """

    def __init__(
        self, options: BatchOptions, serve: Callable[[Call, Callable[[], None]], bool]
    ) -> None:
        serve_due = weakref.WeakMethod(self._serve_due)
        self.queue = BatchQueue(options, on_due=lambda: _call(serve_due))
        self._serve = serve
        self._one_at_a_time = options.dynamic
        self._lock = Lock()
        self._busy = False
        self._changed = condition()
        self._due: list[int] = []  # the threads that serve batches that were not full in time

    def __call__(self, reply: RpcDeferredReturn, /, *args: Any, **kwargs: Any) -> None:
        """Takes a call."""
        self.queue.put_call(reply, args, kwargs)
        self.serve_all()

    def serve_all(self) -> None:
        """Serves the batches that are there."""
        while (batch := self._next()) is not None:
            done = True
            try:
                done = self._serve(batch, self._done)
            finally:
                if done:
                    self._free()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until no batch is served that was not full in time; others the core waits for."""
        here = threading.get_ident()
        with LentSlot(), self._changed:
            self._changed.wait_for(lambda: all(thread == here for thread in self._due), timeout)

    def _serve_due(self) -> None:
        here = threading.get_ident()
        with self._changed:
            self._due.append(here)
        try:
            self.serve_all()
        finally:
            with self._changed:
                self._due.remove(here)
                self._changed.notify_all()

    def _next(self) -> Call | None:
        if not self._one_at_a_time:
            return self._take()
        with self._lock:
            batch = None if self._busy else self._take()
            self._busy = self._busy or batch is not None
            return batch

    def _take(self) -> Call | None:
        try:
            return self.queue.take_now()
        except Closed:
            return None  # Withdrawn; those that waited have been told.

    def _done(self) -> None:
        self._free()
        self.serve_all()

    def _free(self) -> None:
        with self._lock:
            self._busy = False


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (alive := method()) is not None:
        alive()
