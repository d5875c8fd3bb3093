"""Calls of functions that their peer may define in a moment.

A program that calls ``listen`` and then ``define`` can be called in between. moolink's answer is
NoSuchFunction at once; here such a call is made again until the time of grace is over.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from moolink import _core
from moolink._core import Lock
from moolink.errors import (
    CancelledError,
    Error,
    NoSuchFunction,
    PeerLost,
    RemoteError,
    TimeoutError,
)
from moolink.internal import forks
from moolink.internal.exceptions import copied

if TYPE_CHECKING:
    from moolink._core import Future as CoreFuture

GRACE = 1.0  # seconds from a peer's first answer in which it may define its functions
_PAUSE = 0.02  # seconds until such a call is made again


class Future(abc.ABC):
    """The outcome of a call: :class:`moolink.Future`, or a call that may be made again."""

    @abc.abstractmethod
    def result(self, timeout: float | None = None) -> Any:
        """Waits and returns the result, or raises the error."""

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end; returns whether it came within `timeout` seconds."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the call has ended."""

    @abc.abstractmethod
    def exception(self) -> BaseException | None:
        """The error, or None."""

    @abc.abstractmethod
    def cancel(self) -> bool:
        """Gives the call up; returns False if it had ended already."""


Future.register(_core.Future)


class Met:
    """The functions of its peers that an Rpc knows."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()
        self._since: dict[str, float] = {}

    def knows(self, peer: str, function: str) -> bool:
        """Whether the peer is known to have the function."""
        return (peer, function) in self._known

    def is_early(self, peer: str, function: str, error: BaseException | None) -> bool:
        """Takes note of how a call ended; returns whether it came before the definition."""
        if isinstance(error, NoSuchFunction):
            now = time.monotonic()
            return now < self._since.setdefault(peer, now) + GRACE
        if isinstance(error, PeerLost | TimeoutError):
            self._since.pop(peer, None)  # The next peer of this name is unknown.
        elif error is None or isinstance(error, RemoteError):  # Others say nothing of the peer's.
            self._known.add((peer, function))
        return False

    def forget(self, peer: str) -> None:
        """Takes note that the peer lacks a function that it had: it was restarted, for example."""
        self._since.pop(peer, None)
        self._known = {known for known in self._known if known[0] != peer}


class EarlyCall(Future):
    """A call that is made again while the peer lacks the function and may define it."""

    def __init__(
        self, start: Callable[[], CoreFuture], is_early: Callable[[BaseException | None], bool]
    ) -> None:
        self._start = start
        self._is_early = is_early
        self._lock = Lock()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[EarlyCall], object]] = []
        self._cancelled = False
        self._error: Error | None = None  # why it could not be made again
        self._call = start()
        forks.changes_in_children(self)
        self._call.add_done_callback(self._look)

    def _forked(self) -> None:
        """In a forked child no event ends the call: it ends at once, with the error of `_call`."""
        self._lock = Lock()
        self._ended = threading.Event()
        self._ended.set()

    def _look(self, call: CoreFuture) -> None:
        early = self._is_early(call.exception())
        with self._lock:
            if early and not self._cancelled:
                _core.call_later(_PAUSE, self._again)
                return
        self._end(None)

    def _again(self) -> None:
        try:
            with self._lock:
                if self._cancelled:
                    raise CancelledError(f"{self._call!r} was cancelled")
                self._call = self._start()
        except Error as error:  # Such as Closed: this peer was closed meanwhile.
            self._end(copied(error))
        else:
            self._call.add_done_callback(self._look)

    def _end(self, error: Error | None) -> None:
        with self._lock:
            del self._start  # and with it the arguments
            self._error = error
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        with contextlib.ExitStack() as calls:  # all are called, even if one raises
            for callback in reversed(callbacks):
                calls.callback(callback, self)

    def wait(self, timeout: float | None = None) -> bool:
        if self._ended.is_set():
            return True
        with _core.LentSlot():
            return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        if not self.wait(timeout):
            raise TimeoutError(f"{self._call!r} was not done within {timeout:g} s")
        return self._outcome()

    def _outcome(self) -> Any:
        if self._error is not None:
            raise copied(self._error)
        return self._call.result()

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        if not self.done():
            return None
        return self._call.exception() if self._error is None else copied(self._error)

    def cancel(self) -> bool:
        with self._lock:
            if self._ended.is_set():
                return False
            self._cancelled = True
            return self._call.cancel() or not self._ended.is_set()

    def add_done_callback(self, callback: Callable[[EarlyCall], object]) -> None:
        """Calls `callback(future)` once the call has ended."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    async def _wait_async(self) -> Any:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell(_: EarlyCall) -> None:
            with contextlib.suppress(RuntimeError):  # The event loop was closed.
                loop.call_soon_threadsafe(_resolve, ended)

        self.add_done_callback(tell)
        await ended
        return self._outcome()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_async().__await__()

    __iter__ = __await__

    def __repr__(self) -> str:
        return repr(self._call)


def _resolve(ended: asyncio.Future[None]) -> None:
    if not ended.done():  # The waiting task may have been cancelled.
        ended.set_result(None)
