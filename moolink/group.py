"""Elastic groups of peers, found through a broker, and what they compute together."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Literal

import numpy as np

from moolink import deadlines
from moolink._core import Future, GroupCore
from moolink.rpc import Rpc
from moolink.trees import flatten, layout, unflatten

Op = Literal["sum", "mean", "min", "max"] | Callable[[Any, Any], Any]


class AllReduce:
    """The future of an :meth:`Group.all_reduce`: result as often as wanted, awaited by many."""

    def __init__(self, futures: list[Future], finish: Callable[[list[Any]], Any]) -> None:
        self._futures = futures
        self._finish = finish

    def result(self, timeout: float | None = None) -> Any:
        """Returns the result, waiting for it.

        Args:
            timeout: seconds to wait; ``None`` waits until the operation itself ends.

        Raises:
            moolink.GroupChanged: the members changed before all had started the operation.
            moolink.TimeoutError: not ended within ``timeout``.
            moolink.RemoteError: the Python operation raised at the peer of rank 0.
            moolink.Error: the members' data differ in structure, shapes or dtypes.
        """
        deadline = deadlines.after(timeout)
        try:
            return self._finish(
                [future.result(deadlines.left(deadline)) for future in self._futures]
            )
        except Exception:
            if self.exception() is not None:  # a part has failed: the others come to nothing
                self.cancel()
            raise

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the operation, good or bad; returns whether it came in time."""
        deadline = deadlines.after(timeout)
        return all(future.wait(deadlines.left(deadline)) for future in self._futures)

    def done(self) -> bool:
        """Whether the operation has ended."""
        return all(future.done() for future in self._futures)

    def exception(self) -> BaseException | None:
        """Returns what went wrong, or ``None``."""
        return next((e for f in self._futures if (e := f.exception()) is not None), None)

    def cancel(self) -> None:
        """Gives the operation up, here and at the other members."""
        for future in self._futures:
            future.cancel()

    def __await__(self) -> Generator[Any, Any, Any]:
        parts = []
        for future in self._futures:
            parts.append((yield from future.__await__()))
        return self._finish(parts)


class Group:
    """An elastic set of peers with a common view of who is in it.

    The view is numbered by an epoch, changes only in :meth:`update`, and needs no pumping: the
    reactor keeps membership, liveness and operations going while the user computes.

    Args:
        rpc: this process's peer; it must be connected to a broker, or be told so later.
        name: the group's name; peers that give the same name to the same broker meet.
    """

    def __init__(self, rpc: Rpc, name: str) -> None:
        self.core = GroupCore(rpc, name)
        self._name = name
        self._callbacks: list[Callable[[Group], None]] = []

    def update(self) -> bool:
        """Takes over the newest view; returns whether the membership changed."""
        changed = self.core.update()
        if changed:
            for callback in self._callbacks:
                callback(self)
        return changed

    def on_change(self, callback: Callable[[Group], None]) -> None:
        """Calls ``callback(group)`` from :meth:`update` whenever the membership has changed."""
        self._callbacks.append(callback)

    def members(self) -> list[str]:
        """Names of the members in the order of their ranks; empty while there is no view."""
        return self.core.members()

    def rank(self) -> int | None:
        """This peer's place in :meth:`members`, or ``None`` while it is not among them."""
        return self.core.rank()

    def epoch(self) -> int:
        """Number of the view, rising with every change; 0 while there is none."""
        return self.core.epoch()

    def sync_id(self) -> int:
        """moolib's name of :meth:`epoch`."""
        return self.core.epoch()

    def name(self) -> str:
        """The group's name."""
        return self._name

    def active(self) -> bool:
        """Whether this peer is in a view and operations can be started."""
        return self.core.active()

    def waiting_for(self) -> str:
        """One sentence on what the group waits for; empty when for nothing."""
        return self.core.waiting_for()

    def set_timeout(self, seconds: float) -> None:
        """Sets how long this peer may be silent before it is evicted, and how long operations last.

        Args:
            seconds: at least 1; a proof of death always acts at once.
        """
        self.core.set_timeout(seconds)

    def set_sort_order(self, order: int) -> None:
        """Sets this peer's place in the ranks: lower comes first, then order of joining."""
        self.core.set_sort_order(order)

    def set_broker_name(self, name: str) -> None:
        """Sets the name of the peer that is this group's broker (default ``"broker"``)."""
        self.core.set_broker_name(name)

    def all_reduce(
        self,
        name: str,
        data: Any,
        *,
        op: Op | None = None,
        on_change: Literal["raise", "retry"] = "raise",
        num_trees: int | None = None,
    ) -> AllReduce:
        """Combines ``data`` of all members; every member gets the same bits.

        All members start operations of the same names; several may be in flight. The inputs are
        copied before this returns and never written.

        Args:
            name: tells operations apart; the n-th start of a name meets the others' n-th start.
            data: without a callable ``op``: an array, a tensor, a number, or a tree (dict, list,
                tuple) of them, of the same structure, shapes and dtypes at all members. With one:
                any value that the typed codec knows.
            op: ``"sum"`` (default), ``"mean"``, ``"min"``, ``"max"``, or a callable
                ``op(a, b) -> c``, run on rank 0 in rank order, whose result is sent to all.
            on_change: what to do when the members change before all have started: ``"raise"``
                :class:`moolink.GroupChanged`, or ``"retry"`` among the new members.
            num_trees: accepted for moolib's sake, without effect.

        Raises:
            moolink.Closed: this peer is not in an active view of the group.
            ValueError: ``op`` is unknown or ``data`` holds something that cannot be reduced.
        """
        retry = on_change == "retry"
        if callable(op):
            return AllReduce([self.core.all_reduce_value(name, data, op, retry)], _only)
        kind = op or "sum"
        leaves, structure = flatten(data)
        by_dtype: dict[str, list[int]] = {}
        arrays = [leaf.array for leaf in leaves]
        for index, leaf in enumerate(leaves):
            by_dtype.setdefault(leaf.dtype, []).append(index)
        what = layout(leaves)  # compared between the members, with every part
        futures = []
        for number, (dtype, indices) in enumerate(by_dtype.items()):
            flat = np.concatenate([arrays[i].reshape(-1) for i in indices])
            part = name if number == 0 else f"{name}, part {number + 1}"
            futures.append(self.core.all_reduce(part, kind, dtype, what, flat, retry))

        def finish(results: list[Any]) -> Any:
            reduced: list[Any] = [None] * len(leaves)
            for indices, result in zip(by_dtype.values(), results, strict=True):
                ends = np.cumsum([arrays[i].size for i in indices])
                for i, piece in zip(indices, np.split(result, ends[:-1]), strict=True):
                    reduced[i] = leaves[i].restore(piece.reshape(arrays[i].shape))
            return unflatten(structure, reduced)

        return AllReduce(futures, finish)

    def close(self) -> None:
        """Leaves the group; the others go on at once."""
        self.core.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _only(results: list[Any]) -> Any:
    return results[0]
