"""Awaiting moolink's futures from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moolink._core import Future


def wait_for(future: Future) -> Generator[Any, None, Any]:
    """Waits for a future in the running event loop; what ``await future`` does.

    Any number of tasks, on any loops, may await one future. A task that is cancelled stops waiting;
    the operation goes on.
    """
    if not future.done():
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def set_ended() -> None:
            if not ended.done():  # The waiting task may have been cancelled.
                ended.set_result(None)

        def wake(_: Future) -> None:
            # On a worker thread. A loop that was closed meanwhile has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(set_ended)

        future.add_done_callback(wake)
        yield from ended
    return future.result()
