"""A sampled batch, and batches that are sampled ahead."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink._core import Lock
from moolink.errors import Closed
from moolink.internal.closing import Closing
from moolink.internal.exceptions import copied
from moolink.internal.integers import integer_of
from moolink.internal.locks import condition


@dataclasses.dataclass(frozen=True)
class Batch:
    """Items that were sampled together; `len` is their number.

    Attributes:
        data: the items' tree, whose leaves have the items as their first dimension.
        keys: int64, to be given to `update_priorities`.
        probabilities: float64, with which each was chosen.
        priorities: float64, of then.
        times_sampled: uint32, this time included.
        table: the table's name.
    """

    data: Any
    keys: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    priorities: npt.NDArray[np.float64]
    times_sampled: npt.NDArray[np.uint32]
    table: str

    def __len__(self) -> int:
        return len(self.keys)

    def weights(self, beta: float = 1.0) -> npt.NDArray[np.float32]:
        """Importance weights, (size * probability) ** -beta, divided by the batch's largest; the
        table's size cancels out."""
        least = self.probabilities.min()
        weights: npt.NDArray[np.float32] = (self.probabilities / least) ** -beta
        return weights.astype(np.float32)


class Batches(Closing):
    """Batches without end, which a thread samples ahead. Close it, use it in a `with` statement, or
    drop it; a replay that is closed ends it with moolink.Closed.

    Items that are sampled ahead count as sampled, whether they are taken or not.
    """

    def __init__(self, sample: Callable[[Callable[[], bool]], Batch | None], prefetch: int) -> None:
        self._stopped = threading.Event()
        size = integer_of(prefetch, "prefetch", least=1)
        self._ready: queue.Queue[Batch | BaseException] = _Ready(size)
        self._failed: BaseException | None = None
        self._thread = threading.Thread(
            target=_fill, args=(sample, self._ready, self._stopped), name="moolink-replay"
        )
        self._thread.daemon = True
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._failed is not None:
            raise copied(self._failed)
        if self._stopped.is_set():
            raise Closed("the batches were closed")
        ready = self._ready.get()
        if not isinstance(ready, BaseException):
            return ready
        self._failed = copied(ready)
        self._ready.put(self._failed)  # for other waiters; nothing follows it
        try:
            raise ready
        finally:
            del ready  # it refers to this frame

    def close(self) -> None:
        """Ends the thread that samples."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # it may wait for room
            except queue.Empty:
                self._thread.join(0.01)
        with contextlib.suppress(queue.Full):  # full: no thread waits for it
            self._ready.put_nowait(Closed("the batches were closed"))

    def __del__(self) -> None:
        self._stopped.set()


class _Ready(queue.Queue[Any]):
    """A queue whose lock is the library's: destructors may call it."""

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        mutex = Lock()
        self.mutex = mutex  # type: ignore[assignment]
        self.not_empty = condition(mutex)
        self.not_full = condition(mutex)
        self.all_tasks_done = condition(mutex)


def _fill(
    sample: Callable[[Callable[[], bool]], Batch | None],
    ready: queue.Queue[Batch | BaseException],
    stopped: threading.Event,
) -> None:
    # Not a method: a thread that refers to the iterator would keep it alive.
    while not stopped.is_set():
        batch: Batch | BaseException | None
        try:
            batch = sample(stopped.is_set)
        except BaseException as raised:  # noqa: BLE001 - the taker of the batch gets it
            batch = raised
        while batch is not None and not stopped.is_set():
            try:
                ready.put(batch, timeout=0.2)
                break
            except queue.Full:
                continue
        if isinstance(batch, BaseException):
            del batch  # it refers to this frame
            return
