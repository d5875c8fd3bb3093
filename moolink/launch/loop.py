"""The event loop of one thread: descriptors that get ready, timers, signals that end a job."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from moolink.internal.signals import not_ignored

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Timer:
    """A call that is due at some time, unless it is cancelled before."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        """Takes the call back."""
        self.is_cancelled = True


class Loop:
    """Descriptors and timers with their callbacks."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def watch(self, descriptor: int, event: int, call: Callable[[], None]) -> None:
        """Calls `call` whenever the descriptor is ready for the event."""
        self._selector.register(descriptor, event, call)

    def unwatch(self, descriptor: int) -> None:
        """Calls nothing for this descriptor any more; it may not be watched at all."""
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Calls `call` once, after this time."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), timer))
        return timer

    def turn(self) -> None:
        """Waits until a call is due, and makes those that are."""
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, _ in self._selector.select(timeout):
            # A call before this one may have closed the descriptor, or given it another's place.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        while self._timers and (self._timers[0][0] <= now or self._timers[0][2].is_cancelled):
            timer = heapq.heappop(self._timers)[2]
            if not timer.is_cancelled:
                timer.is_cancelled = True
                timer.call()

    def close(self) -> None:
        """Forgets everything."""
        self._timers.clear()
        self._selector.close()


class Signals:
    """Turns the signals that end a job into calls from the loop.

    In a thread that is not the main one it does nothing: signals are the main thread's. A signal
    that is ignored stays so.
    """

    def __init__(self, loop: Loop, on_signal: Callable[[int], None]) -> None:
        self._loop = loop
        self._on_signal = on_signal
        self._is_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._is_main:
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)
            self._old_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            ending = not_ignored(ENDING_SIGNALS)
            self._old = {number: signal.signal(number, _nothing) for number in ending}
            self._loop.watch(self._read_fd, READ, self._dispatch)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_main:
            for number, handler in self._old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._old_wakeup)
            self._loop.unwatch(self._read_fd)
            os.close(self._read_fd)
            os.close(self._write_fd)

    def _dispatch(self) -> None:
        for number in os.read(self._read_fd, 64):
            if number in ENDING_SIGNALS:
                self._on_signal(number)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing for a signal: only the byte in the wake-up pipe counts."""


class Outbox:
    """Bytes for a descriptor that are written as it takes them, without ever blocking."""

    def __init__(self, loop: Loop, descriptor: int, on_broken: Callable[[], None]) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._on_broken = on_broken
        self._pending = bytearray()
        self._is_broken = False
        os.set_blocking(descriptor, False)

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, data: bytes) -> None:
        """Appends; drops data that is put after the other side has gone."""
        if self._is_broken:
            return
        if not self._pending:
            self._loop.watch(self._descriptor, WRITE, self._write)
        self._pending += data

    def _write(self) -> None:
        try:
            written = os.write(self._descriptor, self._pending[:65536])
        except BlockingIOError:
            return
        except OSError:
            self.stop()
            self._on_broken()
            return
        del self._pending[:written]
        if not self._pending:
            self._loop.unwatch(self._descriptor)

    def flush(self) -> None:
        """Writes as much as the descriptor takes now."""
        before = -1
        while self._pending and len(self._pending) != before:
            before = len(self._pending)
            self._write()

    def stop(self) -> None:
        """Drops all pending and later data."""
        self._is_broken = True
        self._pending.clear()
        self._loop.unwatch(self._descriptor)
