"""Rpc: a peer. The core makes calls; batches, queues and tasks of handlers are here."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsFloat

from moolink import tokens
from moolink._core import RpcCore, RpcDeferredReturn
from moolink.errors import Error, QueueFull
from moolink.internal import deadlines, forks, logs, pickles
from moolink.internal.keywords import names_keywords
from moolink.internal.pickles import AllowPickle
from moolink.metrics import sources
from moolink.metrics.sources import Value
from moolink.rpc import report, serving
from moolink.rpc.timed_calls import TimedCalls

# They import asyncio and numpy, which start threads and take time: loaded when first needed.
if TYPE_CHECKING:
    from moolink.data.batch_layout import Mode
    from moolink.rpc.async_handlers import AsyncHandler
    from moolink.rpc.batch_replies import BatchRules
    from moolink.rpc.batch_stacking import BatchOptions, Call
    from moolink.rpc.batching import BatchHandler, CallQueue
    from moolink.rpc.queue import Queue
    from moolink.tokens import Identity, Key

Arrays = Literal["same", "numpy", "torch", "jax"]

_FINISH = 0.5  # seconds that tasks have to end when their peer is closed


@names_keywords
class Rpc(RpcCore):
    __doc__ = RpcCore.__doc__
    __module__ = "moolink"  # the name that users know

    _served: dict[str, _Closing]  # made when first needed

    def __init__(
        self,
        name: str | None = None,
        *,
        arrays: Arrays = "same",
        device: str = "cpu",
        allow_pickle: AllowPickle = False,
        transports: list[str] | None = None,
        timeout: float = 120.0,
        token: str | os.PathLike[str] | Key | Identity | None = None,
        token_file: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        if not isinstance(name, str | None):
            raise TypeError(f"name must be a str, got {name!r}")
        if isinstance(transports, str):
            raise TypeError(f'transports must be a list, such as ["tcp"], got {transports!r}')
        if not isinstance(timeout, SupportsFloat):
            raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
        proof = tokens.identity(token, token_file, insecure)
        pickles.check(allow_pickle, proof)
        super().__init__(
            name,
            arrays=arrays,
            device=str(device),
            allow_pickle=bool(allow_pickle),
            transports=transports,
            timeout=timeout,
            keys=[(key.secret, key.group) for key in proof.keys],
            key_origin=proof.origin,
        )
        self.key_group = proof.keys[0].group if proof.keys else ""
        """The group whose key this peer holds, and to which it is confined; "": none."""
        self.allows_pickle = bool(allow_pickle)
        """Whether this peer sends and takes pickles."""
        self.was_connected = False
        """Whether :meth:`connect` has been called."""
        sources.add(self, self)

    def connect(self, address: str) -> None:
        """Connects to the peer that listens at "host:port", and keeps trying, now and whenever the
        connection is lost. Returns at once.

        Raises:
            ValueError: the address is malformed.
        """
        if address is None:
            raise TypeError(
                "connect() got None for the address of a broker or peer (HOST:PORT): if it is "
                "place().broker, no launcher has set it: start the script with `moolink run`, or "
                "connect to place().start_broker()"
            )
        super().connect(serving.text_of(address, "address"))
        self.was_connected = True
        report.serve(self)

    def within(self, seconds: float | None) -> TimedCalls:
        """Calls with a time limit of their own: `rpc.within(2.0).sync("server", "f", x)`.

        Args:
            seconds: the time limit of each call. None: no limit; a call waits until its peer is
                lost.

        Raises:
            ValueError: `seconds` is negative or not a number.
        """
        return TimedCalls(self, seconds)

    def define(
        self,
        name: str,
        function: Callable[..., Any],
        batch_size: int | None = None,
        device: str = "cpu",
        dynamic_batching: bool = False,
        *,
        max_latency: float | None = None,
        pad: bool = False,
        mode: Mode = "stack",
        bucket_sizes: Iterable[int] | None = None,
    ) -> None:
        """Lets peers call `function` by `name`.

        It runs on a worker thread with the caller's arguments; its return value is the reply. An
        exception that it raises or returns is raised at the caller as moolink.RemoteError,
        with type, text and traceback. It may make blocking calls itself.

        A coroutine function runs as a task of the event loop that runs now, else of one on a thread
        of moolink's. The task is cancelled once its caller does not wait any more.

        A generator, async or not, is called with stream: it yields the items.

        With `batch_size`, the function gets that many calls at once. Arrays are stacked along a new
        first dimension; dicts, lists and tuples keep their structure; a value that is not an array
        becomes a tuple with the value of each call. The function's reply is split: see BatchReturn.
        The first batch that was served fixes the calls' layout; a call that differs fails alone.

        With `dynamic_batching`, the function gets the calls that came while it served the batch
        before: at least one, of any layout. A call that differs from most of a batch fails alone.

        Args:
            name: the function's name.
            function: the handler.
            batch_size: the calls of a batch (`mode="cat"`: its rows); of a dynamic batch, the most.
                None: each call is served by itself; a dynamic batch has no limit.
            device: where batches are made; any but "cpu" gives torch tensors.
            dynamic_batching: take the waiting calls instead of waiting for a full batch.
            max_latency: seconds after which a batch that is not full is served; None: never.
            pad: fill such a batch up with zeros (values with None), whose replies are dropped;
                otherwise it is shorter.
            mode: "stack": arrays are stacked along a new first dimension. "cat", for dynamic
                batches: arrays are joined along their first dimension, whose size may differ from
                call to call, and a value is repeated for each row.
            bucket_sizes: rising sizes. A dynamic batch is filled up to the next one with zeros
                (values with None), so that code compiled for a shape is compiled a few times only.
                The largest is the default of batch_size; a call with more rows fails.

        Raises:
            TypeError: `function` is not callable.
            ValueError: the name is defined already, the options contradict one another, or no
                batch can be made on `device`.
        """
        options = self._batch_options(
            batch_size, device, dynamic_batching, mode, max_latency, pad, bucket_sizes
        )
        self._define(name, function, False, options)

    def define_deferred(
        self,
        name: str,
        function: Callable[..., Any],
        batch_size: int | None = None,
        device: str = "cpu",
        dynamic_batching: bool = False,
        *,
        max_latency: float | None = None,
        pad: bool = False,
        mode: Mode = "stack",
        bucket_sizes: Iterable[int] | None = None,
    ) -> None:
        """Like define, but `function` gets an RpcDeferredReturn as its first argument, to reply
        later and from any thread: `deferred(value)` or `deferred.error(exception)`. Dropped without
        a reply, the caller is told so at once. For a batch, it is a BatchReturn.
        """
        options = self._batch_options(
            batch_size, device, dynamic_batching, mode, max_latency, pad, bucket_sizes
        )
        self._define(name, function, True, options)

    def define_queue(
        self,
        name: str,
        batch_size: int | None = None,
        device: str = "cpu",
        dynamic_batching: bool = False,
        *,
        max_size: int | None = None,
        max_latency: float | None = None,
        pad: bool = False,
        mode: Mode = "stack",
        bucket_sizes: Iterable[int] | None = None,
    ) -> Queue:
        """Puts the calls of a function into a queue, from which the program takes them.

        An item is a triple: the return callback, the arguments as a tuple, and the keyword
        arguments as a dict. Reply with `callback(value)` or `callback.error(exception)`, from any
        thread. Calls whose callers have stopped waiting are left out. Items that the program
        `enqueue`s come out unchanged; a queue of batches takes calls only.

        With `batch_size` or `dynamic_batching` an item is a batch of calls, as in define, and its
        callback a BatchReturn. A dynamic batch has the calls that wait when it is taken.

        Args:
            name: the function's name.
            max_size: how many calls may wait; those beyond fail with QueueFull at their callers.
            others: as in define.

        Raises:
            ValueError: the name is defined already, the options contradict one another, or no
                batch can be made on `device`.
        """
        from moolink.rpc.batching import BatchQueue, CallQueue

        serving.text_of(name, "name")
        options = self._batch_options(
            batch_size, device, dynamic_batching, mode, max_latency, pad, bucket_sizes
        )
        queue: CallQueue = BatchQueue(options, max_size) if options else CallQueue(max_size)
        served = _Closing(queue)
        self._serve(name, functools.partial(_enqueue, name, queue), served)
        # No call comes there once the peer is gone.
        served.guard = weakref.finalize(self, _close, weakref.ref(queue))
        served.guard.atexit = False
        return queue

    def undefine(self, name: str) -> None:
        """Withdraws a function and waits until no call of it runs.

        Calls that wait in its queue can still be taken, waiters for others get
        moolink.Closed; calls that wait for a batch that is not full fail. Called on the event loop
        that runs the function's tasks, it does not wait for them.

        Raises:
            ValueError: it is not defined.
        """
        serving.text_of(name, "name")
        served = self.__dict__.get("_served", {}).pop(name, None)
        try:
            super().undefine(name)
        finally:
            if served is not None:
                served.close()
                served.finish(None)

    def close(self) -> None:
        """Flushes replies for a moment, tells the peers that it is closing, fails pending calls
        with moolink.Closed and closes the queues. More calls of it do nothing."""
        sources.remove(self)
        all_served = list(self.__dict__.get("_served", {}).values())
        deadline = deadlines.after(_FINISH)
        for served in all_served:
            served.finish(deadlines.left(deadline))
        super().close()
        for served in all_served:
            served.close()

    def _metrics(self) -> Iterator[Value]:
        stats = self.stats()
        yield "moolink_calls_sent_total", {}, stats["calls_sent"]
        yield "moolink_calls_succeeded_total", {}, stats["calls_succeeded"]
        yield "moolink_calls_failed_total", {}, stats["calls_failed"]
        yield "moolink_calls_received_total", {}, stats["calls_received"]
        yield "moolink_calls_pending", {}, stats["calls_pending"]
        yield "moolink_calls_running", {}, stats["calls_running"]
        yield "moolink_connections", {}, stats["connections"]
        yield "moolink_connections_opened_total", {}, stats["connections_opened"]
        yield "moolink_dials_failed_total", {}, stats["dials_failed"]
        yield "moolink_peers", {}, stats["peers"]
        yield "moolink_peers_lost_total", {}, stats["peers_lost"]
        for path, traffic in stats["paths"].items():
            yield "moolink_received_bytes_total", {"path": path}, traffic["bytes_received"]
            yield "moolink_sent_bytes_total", {"path": path}, traffic["bytes_written"]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a moolink.Rpc cannot be pickled: make one in each process")

    def _define(
        self,
        name: str,
        function: Callable[..., Any],
        deferred: bool,
        options: BatchOptions | None,
    ) -> None:
        serving.text_of(name, "name")
        if not callable(function):
            raise TypeError(f"the handler of {name!r} is not callable: {function!r}")
        tasks = _tasks_of(name, function, deferred)
        yields = inspect.isasyncgenfunction(_unwrapped(function))
        if yields and (deferred or options is not None):
            raise ValueError(f"{name!r} is a generator, which can be neither deferred nor batched")
        if tasks is not None and yields:
            self._serve(name, tasks, _Closing(tasks=tasks), super()._define_streamed)
        elif options is not None:
            from moolink.rpc.batching import BatchHandler

            answer = functools.partial(_answer, function)
            serve = functools.partial(_defer, name, function) if deferred else answer
            handler = BatchHandler(options, serve if tasks is None else tasks.start_batch)
            self._serve(name, handler, _Closing(handler.queue, tasks, handler))
        elif tasks is not None:
            self._serve(name, tasks, _Closing(tasks=tasks))
        elif deferred:
            super().define_deferred(name, function)
        else:
            super().define(name, function)

    def _batch_options(
        self,
        batch_size: int | None,
        device: str,
        dynamic: bool,
        mode: Mode,
        max_latency: float | None,
        pad: bool,
        bucket_sizes: Iterable[int] | None,
    ) -> BatchOptions | None:
        """Returns None if calls are not batched."""
        asked = batch_size is not None or dynamic or max_latency is not None or pad
        if not asked and mode == "stack" and bucket_sizes is None:
            return None
        from moolink.rpc.batch_stacking import BatchOptions

        buckets = None if bucket_sizes is None else tuple(bucket_sizes)
        return BatchOptions(
            batch_size,
            str(device),
            dynamic,
            mode,
            max_latency,
            pad,
            buckets,
            self._batch_rules(dynamic),
        )

    def _batch_rules(self, dynamic: bool) -> BatchRules:
        from moolink.rpc.batch_replies import BatchRules

        return BatchRules()

    def _serve(
        self,
        name: str,
        receive: Callable[..., object],
        served: _Closing,
        define: Callable[[str, Callable[..., object]], None] | None = None,
    ) -> None:
        (define or super().define_deferred)(name, receive)
        self.__dict__.setdefault("_served", {})[name] = served


class _Closing:
    """The parts of a function to end beside the core: its queue, the tasks that serve it."""

    def __init__(
        self,
        queue: Queue | None = None,
        tasks: AsyncHandler | None = None,
        batches: BatchHandler | None = None,
    ) -> None:
        self._process = os.getpid()
        self._queue = queue
        self._tasks = tasks
        self._batches = batches
        if queue is not None:
            queue.end_in_children()
        self.guard: weakref.finalize[..., Any] | None = None  # closes the queue with the peer

    def finish(self, timeout: float | None) -> None:
        """Waits for tasks and batches that run, for at most ``timeout`` seconds each."""
        if os.getpid() != self._process:
            return  # They run in the process that this one was forked from.
        if self._batches is not None:
            self._batches.wait(timeout)
        if self._tasks is not None:
            self._tasks.wait(timeout)

    def close(self) -> None:
        """Closes the queue."""
        if self.guard is not None:
            self.guard.detach()
        if self._queue is not None:
            self._queue.close()


def _tasks_of(name: str, function: Callable[..., Any], deferred: bool) -> AsyncHandler | None:
    called = _unwrapped(function)
    yields = inspect.isasyncgenfunction(called)
    if not (yields or inspect.iscoroutinefunction(called)):
        return None
    from moolink.rpc.async_handlers import AsyncHandler

    return AsyncHandler(name, function, "items" if yields else "itself" if deferred else "result")


def _unwrapped(function: Callable[..., Any]) -> Any:
    """The function itself: of a partial application, or of an object that is called."""
    called: Any = function
    while isinstance(called, functools.partial):
        called = called.func
    if inspect.isfunction(called) or inspect.ismethod(called) or inspect.isclass(called):
        return called
    return getattr(called, "__call__", called)  # noqa: B004 - an object's may be async


def _close(queue: weakref.ref[Queue]) -> None:
    if (alive := queue()) is not None:
        alive.close()


def _enqueue(
    name: str, queue: CallQueue, reply: RpcDeferredReturn, /, *args: Any, **kwargs: Any
) -> None:
    try:
        queue.put_call(reply, args, kwargs)
    except QueueFull as full:
        reply.refuse(f"the queue of {name!r} is full: {full}; call again later")


def _answer(function: Callable[..., Any], batch: Call, done: Callable[[], None]) -> bool:
    try:
        with forks.ChildEnds():
            result = function(*batch.args, **batch.kwargs)
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is the callers'
        batch.reply.error(raised)
    else:
        batch.reply(result)
    return True


def _defer(name: str, function: Callable[..., Any], batch: Call, done: Callable[[], None]) -> bool:
    try:
        with forks.ChildEnds():
            function(batch.reply, *batch.args, **batch.kwargs)
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is the callers'
        try:
            batch.reply.error(raised)
        except Error:
            logs.raised_after_reply(name, raised)
    return True
