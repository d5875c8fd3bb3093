"""Handlers that are coroutine functions: each call of one is a task of an event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import os
import selectors
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Literal

from moolink._core import Lock
from moolink.errors import CancelledError, Error
from moolink.internal import deadlines, forks
from moolink.internal.locks import condition
from moolink.rpc.batch_replies import Return

if TYPE_CHECKING:
    from moolink._core import RpcStreamReturn
    from moolink.rpc.batch_stacking import Call

Replies = Literal["result", "itself", "items"]

_EXIT_TIMEOUT = 1.0  # seconds that tasks have to end when the interpreter exits
_LOOK_AGAIN = 0.05  # seconds; an event loop that was stopped says nothing


def handlers_loop() -> asyncio.AbstractEventLoop:
    """The loop that runs here now, else one on a thread of moolink's own."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _background.loop()


class AsyncHandler:
    """Runs calls of a coroutine function as tasks of an event loop, and answers them.

    A task whose caller has stopped waiting is cancelled.

    Args:
        name: of the function, for messages.
        function: the coroutine function, or async generator function.
        replies: the source of the replies. "result": the function's return value; "itself": the
            function, through its first argument; "items": the items of an async generator.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        replies: Replies = "result",
    ) -> None:
        self._name = name
        self._function = function
        self._replies = replies
        self._loop = handlers_loop()
        self._changed = condition()
        self._started: set[_Started] = set()  # not ended
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds them weakly
        self._loop_over = False
        # Closed by asyncio when the loop ends: the only notice there is.
        self._loop_guard = _until_loop_ends(weakref.WeakMethod(self._fail_all))
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._loop.call_soon_threadsafe(_begin_guard, self._loop_guard)
        else:
            _begin_guard(self._loop_guard)

    def __call__(self, reply: Return, /, *args: Any, **kwargs: Any) -> None:
        """Starts a task for a call; from any thread."""
        self._start(_Started(reply, None), args, kwargs)

    def start_batch(self, batch: Call, done: Callable[[], None]) -> bool:
        """Starts a task for a batch of calls; ``done`` is called when it ends.

        Returns True if the batch has failed already, because the event loop is closed.
        """
        return not self._start(_Started(batch.reply, done), batch.args, batch.kwargs)

    def _start(self, started: _Started, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        with self._changed:
            over = self._loop_over
            if not over:
                self._started.add(started)
        if not over:
            try:
                self._loop.call_soon_threadsafe(self._begin, started, args, kwargs)
                return True
            except RuntimeError:
                with self._changed:
                    self._started.discard(started)
        self._fail_for_want_of_a_loop(started)
        return False

    def wait(self, timeout: float | None = None) -> None:
        """Waits until no call runs; not on the loop itself, nor once the loop has stopped."""
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                return
        deadline = deadlines.after(timeout)
        with self._changed:
            while self._started and self._loop.is_running() and deadlines.left(deadline) != 0:
                self._changed.wait(_LOOK_AGAIN)

    def _begin(self, started: _Started, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._loop_over:
            return
        task = self._loop.create_task(self._run(started.reply, args, kwargs))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._forget, started))
        started.reply.add_cancel_callback(functools.partial(_cancel, self._loop, task))

    def _fail_all(self) -> None:
        """The event loop ends; on its thread."""
        with self._changed:
            self._loop_over = True
            left = list(self._started)
        for task in self._tasks:
            task.cancel()
        for started in left:
            self._fail_for_want_of_a_loop(started)
            self._end(started)

    def _fail_for_want_of_a_loop(self, started: _Started) -> None:
        _give_up(
            started.reply,
            RuntimeError(
                f"the event loop that ran {self._name!r} is closed: define the function where "
                "a loop runs for as long as it is served, or where none runs"
            ),
        )

    async def _run(self, reply: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            match self._replies:
                case "result":
                    with forks.ChildEnds():
                        result = await self._function(*args, **kwargs)
                    reply(result)
                case "itself":
                    with forks.ChildEnds():
                        await self._function(reply, *args, **kwargs)
                case "items":
                    with forks.ChildEnds():
                        await self._send_items(reply, self._function(*args, **kwargs))
                    reply()
        except asyncio.CancelledError:
            raise  # The task's end tells the caller: it may come before the first step.
        except KeyboardInterrupt as interrupt:
            _fail(reply, interrupt)
            raise  # It is the loop's.
        except BaseException as raised:
            if not _fail(reply, raised):
                raise  # The caller has its reply: the loop reports the error.

    async def _send_items(self, reply: RpcStreamReturn, items: AsyncGenerator[Any, None]) -> None:
        async with contextlib.aclosing(items):
            async for item in items:
                if reply.item(item):
                    continue
                room = asyncio.Event()
                reply.when_room(functools.partial(_set, self._loop, room))
                await room.wait()

    def _forget(self, started: _Started, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and not started.reply.cancelled():
            _give_up(started.reply, CancelledError(f"the task of {self._name!r} was cancelled"))
        self._end(started)

    def _end(self, started: _Started) -> None:
        with self._changed:
            if started not in self._started:
                return
            self._started.remove(started)
            self._changed.notify_all()
        if started.done is not None:
            started.done()


@dataclasses.dataclass(frozen=True, eq=False)
class _Started:
    """A call, or a batch of calls, that is to become a task."""

    reply: Return
    done: Callable[[], None] | None  # called when it has ended


async def _until_loop_ends(
    end: weakref.WeakMethod[Callable[[], None]],
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        if (fail_all := end()) is not None:
            fail_all()


def _begin_guard(guard: AsyncGenerator[None, None]) -> None:
    """Takes the first step, with which the running event loop comes to know it."""
    with contextlib.suppress(StopIteration):
        guard.__anext__().__await__().__next__()


def _fail(reply: Return, wrong: BaseException) -> bool:
    """Sends the caller the error; False: it has its reply already."""
    try:
        reply.error(wrong)
    except Error:
        return False
    return True


# The calls that moolink's own loop leaves unanswered as the interpreter exits. They are kept until
# the peers are closed, a moment later: their callers then get that error.
_unanswered: list[Return] = []


def _give_up(reply: Return, wrong: BaseException) -> None:
    """Tells the caller that its task ended too early."""
    if _background.exiting:
        _unanswered.append(reply)
    else:
        _fail(reply, wrong)


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.suppress(RuntimeError):  # A loop that was closed runs no task.
        loop.call_soon_threadsafe(task.cancel)


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)


class _Background:
    """An event loop on a thread of its own, made at first use, ended at exit."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._selector: selectors.BaseSelector | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.exiting = False

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._selector = selectors.DefaultSelector()
                self._loop = asyncio.SelectorEventLoop(self._selector)
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name="moolink-asyncio", daemon=True
                )
                self._thread.start()
                atexit.register(self.stop)
            return self._loop

    def stop(self) -> None:
        """Cancels the tasks; does not wait long for those that do not end."""
        self.exiting = True
        if self._loop is not None and self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_EXIT_TIMEOUT)

    def abandon(self) -> None:
        """In a forked child: closes the descriptors and leaves the rest unchanged."""
        atexit.unregister(self.stop)
        if self._selector is None or self._loop is None:
            return
        # Not by closing the loop, which would take them out of the parent's epoll set, too.
        self._selector.close()
        for end in ("_ssock", "_csock"):
            getattr(self._loop, end).close()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


_background = _Background()


def _forget_parent() -> None:
    # The thread does not exist in a forked child.
    global _background
    _background.abandon()
    _background = _Background()


os.register_at_fork(after_in_child=_forget_parent)
