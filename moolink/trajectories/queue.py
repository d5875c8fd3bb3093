"""TrajectoryQueue: the learner's side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from moolink._core import Lock
from moolink.data import batch_layout, skeletons
from moolink.data.batch_layout import Nest, Node, Spec
from moolink.errors import Closed, TimeoutError
from moolink.internal import deadlines, forks
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.internal.locks import condition
from moolink.internal.shown import shown
from moolink.metrics import sources
from moolink.metrics.sources import Value
from moolink.reports import TrajectoryQueueStats
from moolink.rpc import serving
from moolink.trajectories import names
from moolink.trajectories.backlog import Backlog, Item

if TYPE_CHECKING:
    from moolink._core import RpcDeferredReturn
    from moolink.rpc import Rpc

Late = Literal["drop", "mask"]


@dataclasses.dataclass(frozen=True)
class TrajectoryBatch:
    """Items that were taken together; `len` is their number.

    Attributes:
        data: the items' tree, whose arrays have the items along `dim`. The batch is the taker's.
        begin: int64 [items], the version of the weights at each item's first step.
        end: int64 [items], at its last step.
        version: the learner's, when the batch was taken.
        fresh: bool [items], whether version - begin is at most `max_lag`.
    """

    data: Any
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    version: int
    fresh: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.begin)


@dataclasses.dataclass(eq=False)
class _Put:
    """An item with its writer's call."""

    tree: Nest
    reply: RpcDeferredReturn


@names_keywords
class TrajectoryQueue(Closing):
    """Items of actors, for a learner that must not learn from weights that are too old.

    Items are trees of arrays, such as unrolls, put by any number of :class:`TrajectoryWriter`.
    Each is taken once while both processes live. The first item fixes tree, shapes and dtypes; one
    that differs is an error at its writer.

    Args:
        rpc: the peer that writers know as `learner`.
        name: the queue's name; one of a name at a peer.
        max_size: items that may wait; writers of more wait for room.
        dim: the dimension of a batch's arrays along which the items lie: 1 for unrolls whose first
            dimension is time.
        device: where batches are made; any but "cpu" gives torch tensors.

    Raises:
        ValueError: this peer has a queue of the name already, or `max_size` is below 1.
    """

    def __init__(
        self, rpc: Rpc, name: str, *, max_size: int = 64, dim: int = 0, device: str = "cpu"
    ) -> None:
        max_size = integer_of(max_size, "max_size", least=1)
        self._rpc = serving.peer_of(rpc)
        self._name = serving.text_of(name, "name")
        self._dim = integer_of(dim, "dim")
        self._device = str(device)
        self._max_size = max_size
        self._backlog: Backlog[_Put] = Backlog(max_size)
        self._expected: Node | None = None
        self._layouts: dict[int, Node] = {}  # by the size of batches
        self._closed = False
        self._forked()
        with serving.only_one(f"a trajectory queue of {name!r}"):
            rpc.define_deferred(names.PUT.format(name), self._on_put)
        forks.changes_in_children(self)
        sources.add(self, rpc)

    @property
    def version(self) -> int:
        """The version of the learner's weights."""
        return self._backlog.version

    @version.setter
    def version(self, version: int) -> None:
        """Sets it, after each update of the weights; items count their age by it.

        Raises:
            ValueError: it is below the one before.
        """
        version = integer_of(version, "version")
        with self._changed:
            self._backlog.advance(version)
            self._changed.notify_all()

    def get(
        self,
        count: int,
        *,
        max_lag: int | None = None,
        late: Late = "drop",
        timeout: float | None = None,
        at_least: int | None = None,
    ) -> TrajectoryBatch:
        """Takes the `count` oldest items as a batch, waiting until there are as many. For any
        thread.

        Args:
            max_lag: versions that the learner's weights may be ahead of an item's first step.
            late: the treatment of an item that is too old: "drop" it, and wait for others, or
                return it with False in `fresh` ("mask").
            timeout: seconds to wait at most.
            at_least: items that are enough once the time is up; by default all.

        Raises:
            TimeoutError: there were fewer than `at_least`; none was taken.
            moolink.Closed: the queue was closed, and has not enough items.
            TypeError, ValueError: an argument is no integer, or out of range.
        """
        count = integer_of(count, "count", least=1)
        if max_lag is not None:
            max_lag = integer_of(max_lag, "max_lag", least=0)
        enough = count if at_least is None else integer_of(at_least, "at_least", 1, count)
        if count > self._max_size:
            raise ValueError(f"{count} items are more than max_size, {self._max_size}")
        if late not in ("drop", "mask"):
            raise ValueError(f'late must be "drop" or "mask", got {late!r}')
        drop = max_lag if late == "drop" else None
        wait = deadlines.Wait(timeout)
        with self._changed:
            while True:
                self._settle(drop)
                if len(self._backlog) >= count:
                    break
                if wait.over or self._closed:
                    if len(self._backlog) >= enough:
                        break
                    self._require_open()
                    raise TimeoutError(
                        f"{len(self._backlog)} of {enough} items of {self._name!r} came within "
                        f"{timeout:g} s; {self._backlog.counts.dropped} were dropped so far"
                    )
                wait.for_change(
                    self._changed,
                    f"the queue {self._name!r} waits for {count} items; {len(self._backlog)} are "
                    f"there, {self._backlog.counts.dropped} were dropped",
                )
            items = self._backlog.take(count)
            version = self._backlog.version
            self._settle(None)
        with self._copying:  # a layout makes one batch at a time
            return self._batch(items, count, version, max_lag)

    def stats(self) -> TrajectoryQueueStats:
        """Returns the items that wait, counts, and how old the items were that were taken."""
        with self._changed:
            counts = self._backlog.counts
            taken = max(1, counts.taken)
            return {
                "size": len(self._backlog),
                "waiting_for_room": self._backlog.in_line,
                "put": counts.put,
                "taken": counts.taken,
                "dropped": counts.dropped,
                "withdrawn": counts.withdrawn,
                "largest_lag": counts.largest_lag,
                "mean_lag": {
                    "acting": counts.lag_acting / taken,
                    "in_flight": counts.lag_in_flight / taken,
                    "in_queue": counts.lag_in_queue / taken,
                },
            }

    def _metrics(self) -> Iterator[Value]:
        stats, labels = self.stats(), {"name": self._name}
        yield "moolink_queue_items", labels, stats["size"]
        yield "moolink_queue_taken_total", labels, stats["taken"]
        yield "moolink_queue_dropped_total", labels, stats["dropped"]
        yield "moolink_queue_largest_lag", labels, stats["largest_lag"]

    def close(self) -> None:
        """Refuses further items, also those that wait for room; those in the queue can still be
        taken."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            withdrawn = list(self._backlog.withdraw_all())
            self._lock.drop_later(withdrawn)
            for put in withdrawn:
                put.reply.reject(self._refusal())
            self._changed.notify_all()
        sources.remove(self)
        serving.undefine(self._rpc, names.PUT.format(self._name))

    def __repr__(self) -> str:
        return f"<moolink.TrajectoryQueue {self._name!r}, {len(self._backlog)} items waiting>"

    def _forked(self) -> None:
        self._lock = Lock()
        self._changed = condition(self._lock)
        self._copying = Lock()

    def _on_put(self, reply: RpcDeferredReturn, tree: Nest, begin: int, end: int) -> None:
        put = _Put(tree, reply)
        with self._changed:
            try:
                self._require_open()
                begin, end = names.versions_of(begin, end)
                self._check(tree)
            except (Closed, ValueError, TypeError) as refused:
                reply.reject(str(refused))
                return
            has_room = self._backlog.put(put, begin, end)
            version = self._backlog.version
            self._changed.notify_all()
        if has_room:
            serving.answer(reply, version)
        else:
            reply.add_cancel_callback(lambda: self._withdraw(put))

    def _withdraw(self, put: _Put) -> None:
        with self._changed:
            self._backlog.withdraw(put)

    # The caller of the next ones holds the lock.

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(self._refusal())

    def _refusal(self) -> str:
        return f"the queue {self._name!r} was closed"

    def _check(self, tree: Nest) -> None:
        if self._expected is None:
            if not any(batch_layout.is_array(leaf) for leaf in skeletons.flatten(tree)[0]):
                raise ValueError(f"an item must have an array, got {shown(tree)}")
            self._expected = batch_layout.build(tree, Spec("stack", 1, self._dim, self._device))
        self._expected.check(tree)

    def _settle(self, max_lag: int | None) -> None:
        """Drops items that are too old, and lets in those that wait for room."""
        answered = [] if max_lag is None else self._backlog.expire(max_lag)
        answered += self._backlog.admit()
        self._lock.drop_later(answered)
        for item in answered:
            serving.answer(item.payload.reply, self._backlog.version)

    def _batch(
        self, items: list[Item[_Put]], size: int, version: int, max_lag: int | None
    ) -> TrajectoryBatch:
        layout = self._layouts.get(size)
        if layout is None:
            spec = Spec("stack", size, self._dim, self._device)
            layout = self._layouts[size] = batch_layout.build(items[0].payload.tree, spec)
        layout.allocate()
        for row, item in enumerate(items):
            layout.put_row(item.payload.tree, row)
        begin = np.array([item.begin for item in items], np.int64)
        fresh = np.ones(len(items), bool) if max_lag is None else version - begin <= max_lag
        return TrajectoryBatch(
            layout.take(len(items) if len(items) < size else None),
            begin,
            np.array([item.end for item in items], np.int64),
            version,
            fresh,
        )
