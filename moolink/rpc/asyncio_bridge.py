"""Awaiting moolink's futures and streams from asyncio.

The thread that completes an operation, usually the reactor, writes to a descriptor that the
event loop watches: no other thread and no lock of Python's is involved.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from moolink._core import Completions

if TYPE_CHECKING:
    from moolink._core import Future, Stream

_Ended = asyncio.Future[None]

# Tokens are weak references, so that an event loop that was closed with operations pending is not
# kept alive by them.
_completions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Completions] = (
    weakref.WeakKeyDictionary()
)


def wait_for(future: Future) -> Generator[Any, None, Any]:
    """Waits for a future in the running event loop, as ``await future`` does.

    Any number of tasks, on any loops, may await one future. A task that is cancelled stops waiting;
    the operation goes on.
    """
    if not future.done():
        yield from _ready(future)
    return future.result()


async def next_item(stream: Stream) -> Any:
    """Waits for the next item of a stream in the running event loop.

    Raises:
        StopAsyncIteration: there are no more.
    """
    while True:
        item, has_come = stream._poll()
        if has_come:
            return item
        await _Ready(stream)


class _Ready:
    def __init__(self, awaitable: Stream) -> None:
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, None, None]:
        yield from _ready(self._awaitable)


def _ready(awaitable: Future | Stream) -> Generator[Any, None, None]:
    loop = asyncio.get_running_loop()
    completions = _completions.get(loop)
    if completions is None:
        completions = _completions[loop] = Completions()
        loop.add_reader(completions.fileno(), _wake, completions)
    ended: _Ended = loop.create_future()
    number = completions.watch(awaitable, weakref.ref(ended))
    try:
        yield from ended
    finally:
        completions.forget(awaitable, number)  # The task was cancelled, or this does nothing.


def _wake(completions: Completions) -> None:
    for token in completions.take():
        ended = token()
        if ended is not None and not ended.done():  # The waiting task may have been cancelled.
            ended.set_result(None)
