"""Communicators of torch.distributed over a group's own messages, one for each epoch."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch._C._distributed_c10d import Store

from moolink._core import Lock
from moolink.errors import Closed, Error
from moolink.internal.exceptions import copied

EXIT_LIMIT = 5.0  # seconds that the interpreter waits for sums that it aborts at its exit


class Backend(Protocol):
    """A library of collectives, through torch's process group for it."""

    def available(self) -> bool:
        """Whether this process can use the library."""

    def device_of(self, data: Any) -> torch.device:
        """The device of a tensor; for other data, the thread's current device."""

    def make(self, store: Store, rank: int, size: int, device: torch.device) -> Any:
        """Returns a process group, whose members need not be connected yet."""

    def connect(self, group: Any) -> None:
        """Returns once all members are connected."""

    def mark(self, tensor: torch.Tensor) -> Any:
        """Marks the point in the current stream of the tensor's device."""

    def wait(self, mark: Any) -> None:
        """Waits until the device has reached the mark."""

    def sum(self, group: Any, tensor: torch.Tensor, mark: Any, divisor: int) -> torch.Tensor:
        """Waits for the sum of the members' tensors, each as it was at its mark, and returns the
        sum over `divisor` in new memory."""

    def abort(self, group: Any) -> None:
        """Ends a sum that runs in another thread."""


class Values:
    """The keys and values of the store of one epoch, at the member of rank 0."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Callable[[bytes], object]]] = {}

    def serve(self, reply: Callable[[Any], object], what: str, *given: Any) -> None:
        """Replies to a request of a `GroupStore`; to "get" once the key has a value."""
        if what == "put":
            self._change(given[0], lambda _: given[1])
            reply(None)
        elif what == "get":
            self._when_there(given[0], reply)
        elif what == "add":
            reply(int(self._change(given[0], lambda total: b"%d" % (int(total) + given[1]))))
        elif what == "has":
            with self._lock:
                reply(all(key in self._values for key in given[0]))
        else:
            raise ValueError(f"unknown request {what!r}")

    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        with self._lock:
            value = self._values[key] = change(self._values.get(key, b"0"))
            waiting = self._waiting.pop(key, [])
        for reply in waiting:
            reply(value)
        return value

    def _when_there(self, key: str, reply: Callable[[bytes], object]) -> None:
        with self._lock:
            if key not in self._values:
                self._waiting.setdefault(key, []).append(reply)
                return
            value = self._values[key]
        reply(value)


class GroupStore(Store):
    """torch's store for the members of one epoch, without a port. `ask` calls the member of rank 0
    and returns the future of the answer."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        super().__init__()
        self._ask = ask
        self._lock = Lock()
        self._pending: set[Any] = set()
        self._closed = False

    def _answer(self, what: str, *arguments: Any, timeout: float | None = None) -> Any:
        future = self._ask(what, *arguments)
        with self._lock:
            if self._closed:
                raise Error("the epoch of this communicator has ended")
            self._pending.add(future)
        try:
            return future.result(timeout)
        finally:
            with self._lock:
                self._pending.discard(future)

    def close(self) -> None:
        """Ends waiting and later calls with an error."""
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        for future in pending:
            future.cancel()

    # torch calls these by name.

    def set(self, key: str, value: bytes | str) -> None:
        self._answer("put", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return bytes(self._answer("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._answer("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._answer("has", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = None if timeout is None else timeout.total_seconds()
        for key in keys:
            self._answer("get", key, timeout=seconds)

    def delete_key(self, key: str) -> bool:
        return False

    def clone(self) -> GroupStore:
        return self


class Communicator:
    """The communicator of one epoch. Its own thread makes and uses the backend's process group, so
    that other threads can stop waiting.

    Attributes:
        device: the device of the tensors that it sums.
        ready: whether all members are connected.
        broken: whether it failed or was aborted; a broken communicator is not used again.
    """

    def __init__(
        self, backend: Backend, store: GroupStore, rank: int, size: int, device: torch.device
    ) -> None:
        self._backend, self._store, self.device = backend, store, device
        self._group: Any = None
        self.ready = self.broken = False
        self._lock = Lock()
        self._running: concurrent.futures.Future[torch.Tensor] | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs.put(lambda: self._connect(rank, size))
        self._thread = threading.Thread(target=self._serve, name="communicator", daemon=True)
        self._thread.start()
        _living.add(self)

    def sum(
        self, tensor: torch.Tensor, mark: Any, divisor: int
    ) -> concurrent.futures.Future[torch.Tensor]:
        """Begins a sum; all members must begin their sums in the same order. The future ends with
        the sum, or with :meth:`abort`."""
        future: concurrent.futures.Future[torch.Tensor] = concurrent.futures.Future()

        def run() -> None:
            try:
                result = self._backend.sum(self._group, tensor, mark, divisor)
            except Exception as error:  # noqa: BLE001  the other members must learn of it
                self._running = None
                self._end(future, error)
            else:
                self._running = None
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # aborted
                    future.set_result(result)

        with self._lock:
            aborted = self.broken
            self._running = None if aborted else future
        if aborted:
            self._end(future, Error("the communicator was aborted"))
        else:
            self._jobs.put(run)
        return future

    def abort(self, reason: BaseException) -> None:
        """Ends the running sum and the thread."""
        with self._lock:
            if self.broken:
                return
            self.broken, running, group = True, self._running, self._group
        self._store.close()
        self._jobs.put(None)
        if running is not None:
            self._end(running, reason)
        if group is not None:
            self._backend.abort(group)

    @staticmethod
    def _end(future: concurrent.futures.Future[torch.Tensor], error: BaseException) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has ended
            future.set_exception(copied(error))

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # frees its tensor
        self._group = None

    def _connect(self, rank: int, size: int) -> None:
        try:
            group = self._backend.make(self._store, rank, size, self.device)
            with self._lock:
                self._group, late = group, self.broken
            if late:  # abort() found no group to abort
                self._backend.abort(group)
                return
            self._backend.connect(group)
        except Exception as error:  # noqa: BLE001  then there is no communicator
            self.abort(error)
        else:
            self.ready = True


_living: weakref.WeakSet[Communicator] = weakref.WeakSet()
os.register_at_fork(after_in_child=_living.clear)  # they are the parent's


@atexit.register
def _end_all() -> None:
    """Ends the threads: one that returned from C++ after the interpreter's end would abort the
    process."""
    ended = list(_living)
    for communicator in ended:
        communicator.abort(Closed("the interpreter is shutting down"))
    for communicator in ended:
        communicator._thread.join(EXIT_LIMIT)


class Nccl:
    """NVIDIA's NCCL. A group is a pair: torch's process group, and the CUDA stream of its sums.
    This class is unproven on hardware."""

    _making = Lock()

    def available(self) -> bool:
        return torch.distributed.is_nccl_available() and torch.cuda.is_available()

    def device_of(self, data: Any) -> torch.device:
        if isinstance(data, torch.Tensor) and data.is_cuda:
            return data.device
        return torch.device("cuda", torch.cuda.current_device())

    def make(self, store: Store, rank: int, size: int, device: torch.device) -> Any:
        torch.cuda.set_device(device)  # for this thread
        options = torch.distributed.ProcessGroupNCCL.Options()
        options.config.blocking = 0  # else abort() waits for a connection that never completes
        with self._making, _without_teardown():
            group = torch.distributed.ProcessGroupNCCL(store, rank, size, options)
        return group, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def connect(self, group: Any) -> None:
        nccl, stream = group
        nccl.eager_connect_single_device(stream.device)
        first = torch.zeros(1, device=stream.device)
        self.sum(group, first, self.mark(first), 1)

    def mark(self, tensor: torch.Tensor) -> Any:
        stream = torch.cuda.current_stream(tensor.device)
        return stream, stream.record_event()

    def wait(self, mark: Any) -> None:
        _, event = mark
        event.synchronize()

    def sum(self, group: Any, tensor: torch.Tensor, mark: Any, divisor: int) -> torch.Tensor:
        (nccl, stream), (users, event) = group, mark
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            total = tensor.clone()
            nccl.allreduce([total]).wait()  # the stream waits, not this thread
            if divisor > 1:
                total.div_(divisor)
            stream.record_event().synchronize()
        total.record_stream(users)
        return total

    def abort(self, group: Any) -> None:
        nccl, _ = group
        nccl.abort()


@contextlib.contextmanager
def _without_teardown() -> Iterator[None]:
    """By default, torch ends the process when NCCL reports that a member is gone. torch reads this
    variable when it makes a process group, so the program's own process groups do not change."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
