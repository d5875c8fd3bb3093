"""Elastic groups of peers, found through a broker, and their collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, SupportsFloat

import numpy as np

from moolink._core import GroupCore
from moolink.data.trees import note_written
from moolink.errors import AuthError, Closed, TimeoutError
from moolink.group.collectives import Collective, GroupFuture, Kind
from moolink.group.device_sums import device_sums
from moolink.group.other_groups import OtherGroups
from moolink.internal import deadlines, logs
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.metrics import sources
from moolink.metrics.sources import Value
from moolink.rpc import Rpc, naming

__all__ = ["Group", "GroupFuture"]

Reduction = Literal["sum", "mean", "min", "max", "prod", "and", "or", "xor"]
Op = Reduction | Callable[[Any, Any], Any]


@names_keywords
class Group(Closing):
    """An elastic set of peers with a common view of its members.

    Each membership has a number. The user's view changes only in :meth:`update`, and needs no
    pumping: the reactor keeps membership, liveness and operations going while the user computes.

    Args:
        rpc: this process's peer; it must be connected to a broker, or be told so later.
        name: the group's name; peers that give the same name to the same broker meet.

    Raises:
        AuthError: the peer holds the key of another group.
        TypeError: `rpc` is no Rpc.
    """

    def __init__(self, rpc: Rpc, name: str) -> None:
        if not isinstance(rpc, Rpc):
            raise TypeError(f"a Group is made of a moolink.Rpc and a name, not of {rpc!r}")
        if not isinstance(name, str):
            raise TypeError(f"a group's name must be a str, got {name!r}")
        if rpc.key_group not in ("", name):
            raise AuthError(
                f"peer {rpc.get_name()!r} holds the key of group {rpc.key_group!r}, with which it "
                f"cannot join group {name!r}: give it that group's key, or the job's token"
            )
        make_device_sums = device_sums()
        self._core = GroupCore(rpc, name)
        self._rpc = rpc
        self._name = name
        self._device_sums = None if make_device_sums is None else make_device_sums(self)
        self._broker_name = "broker"
        self._callbacks: list[Callable[[Group], None]] = []
        self._is_updated = False  # by the user
        self._is_untold = False  # a change that follow() has taken over
        sources.add(self, rpc)

    def update(self) -> bool:
        """Takes over the newest view; returns whether the membership changed.

        Raises:
            AuthError: this peer is in no view, and its key was refused where it looks for the
                broker. It goes on looking: the broker may be given the same token.
            Error: this peer is in no view, and its name has been refused there for a second and a
                half, because a peer that answers has it. It goes on looking: that peer may end.
        """
        self._is_updated = True
        return self._update()

    def _update(self) -> bool:
        changed = self._take_over() or self._is_untold
        self._is_untold = False
        if changed:
            # All callbacks are called, in their order, even if one raises.
            with contextlib.ExitStack() as calls:
                for callback in reversed(self._callbacks):
                    calls.callback(callback, self)
        return changed

    def _take_over(self) -> bool:
        return (self._core if self._device_sums is None else self._device_sums).update()

    def wait_for_members(self, count: int, timeout: float | None = None) -> None:
        """Blocks, without the GIL, until the group has at least ``count`` members.

        Takes over the newest view, as :meth:`update` does, so :meth:`members` returns them. The
        group stays elastic: a member may leave at any time. If a peer restarts after the other
        members have ended, it waits until ``timeout``.

        Args:
            count: number of members, including this peer; at least 1.
            timeout: seconds; None: no limit.

        Raises:
            TimeoutError: the group still has fewer members after ``timeout``.
            ValueError: ``count`` is below 1, or ``timeout`` is negative.
            AuthError, Error: as in :meth:`update`.
            Closed: the group is closed.
        """
        count = integer_of(count, "count", least=1)
        deadlines.check(timeout)
        deadline = deadlines.after(timeout)
        others = OtherGroups(self._rpc, self._broker_name, self._name, count, deadline)
        self._update()
        with contextlib.closing(others):
            while (there := len(self.members())) < count:
                if not self._core.wait_for_members(count, others.turn()):
                    if others.look():
                        logs.logger.warning(
                            "group %r has %d of %d members: %s",
                            self._name,
                            there,
                            count,
                            others.hint,
                        )
                    if deadlines.left(deadline) == 0:
                        why = self.waiting_for() or others.hint or "start the others"
                        raise TimeoutError(
                            f"group {self._name!r} had {there} of {count} members after "
                            f"{timeout:g} s: {why}"
                        )
                self._update()

    def follow(self) -> None:
        """Takes over the newest view for an accumulator whose user does not call :meth:`update`."""
        if not self._is_updated and self._take_over():
            self._is_untold = True

    def on_change(self, callback: Callable[[Group], None]) -> None:
        """Calls ``callback(group)`` from :meth:`update` whenever the membership has changed.

        All callbacks are called, in the order in which they were given; :meth:`update` raises
        the exception of one when the others have been called, too.
        """
        self._callbacks.append(callback)

    def members(self) -> list[str]:
        """Names of the members in the order of their ranks; empty while there is no view.

        As of the last :meth:`update`; before the first, as of an accumulator's last update.
        """
        return self._core.members()

    def rank(self) -> int | None:
        """This peer's place in :meth:`members`, or ``None`` while it is not among them."""
        return self._core.rank()

    def epoch(self) -> int:
        """Number of the membership, rising with every change; 0 while there is none. It has nothing
        to do with epochs of training."""
        return self._core.epoch()

    def name(self) -> str:
        """The group's name."""
        return self._name

    @property
    def rpc(self) -> Rpc:
        """This process's peer, as it was given."""
        return self._rpc

    def active(self) -> bool:
        """Whether this peer is in a view and operations can be started."""
        return self._core.active()

    def waiting_for(self) -> str:
        """One sentence on the reason why the group waits; empty when it does not."""
        return self._core.waiting_for()

    def set_timeout(self, seconds: float) -> None:
        """Sets how long this peer may be silent before it is evicted, and how long operations last.

        Args:
            seconds: less than 1 is taken for 1. A proof of death always acts at once.
        """
        if not isinstance(seconds, SupportsFloat):
            raise TypeError(f"seconds must be a number, got {seconds!r}")
        self._core.set_timeout(seconds)

    def set_sort_order(self, order: int) -> None:
        """Sets this peer's place in the ranks: lower comes first, then order of joining."""
        self._core.set_sort_order(integer_of(order, "order"))

    def set_broker_name(self, name: str) -> None:
        """Sets the name of the peer that is this group's broker (default ``"broker"``).

        Raises:
            ValueError: the name is from `moolink.in_group`: a broker has no group.
        """
        self._core.set_broker_name(naming.without_group(name, "a broker's name"))
        self._broker_name = name

    def all_reduce(
        self,
        name: str,
        data: Any,
        op: Op | None = None,
        *,
        inplace: bool = False,
        out: Any = None,
        on_change: Literal["raise", "retry"] = "raise",
        compress: Literal["bf16", "int8"] | None = None,
    ) -> GroupFuture:
        """Combines ``data`` of all members; every member gets the same bits.

        All members start operations of the same names; several may be in flight. ``data`` must not
        be written before the operation has ended (arrays below 64 KB are copied at the call), and
        is not written by it unless ``inplace``.

        Args:
            name: tells operations apart; the n-th start of a name meets the others' n-th start.
            data: without a callable ``op``: an array, a tensor, a number, or a tree (dict, list,
                tuple) of them, of the same structure, shapes and dtypes at all members. With one:
                any value that the typed codec knows.
            op: ``"sum"`` (default), ``"mean"``, ``"min"``, ``"max"``, ``"prod"``, ``"and"``,
                ``"or"``, ``"xor"`` (bitwise, of integers and booleans), or a callable
                ``op(a, b) -> c``, run on rank 0 in rank order, whose result is sent to all.
            inplace: the result is written into the arrays of ``data``, and is ``data``.
            out: the result is written into this tree of arrays, and is ``out``. An array of it is
                the one of ``data`` in its place, or overlaps none of ``data``. Its contents
                after an error are undefined, with ``inplace`` too.
            on_change: the reaction when the members change before all have the result, or have
                changed since :meth:`update`: ``"raise"`` :class:`moolink.GroupChanged`, or
                ``"retry"`` among the newest members, with ``data`` of one dtype only.
            compress: how float32 elements travel between hosts; other dtypes, payloads of up to 64
                KB and data in the shared memory of a host are not compressed. ``"bf16"`` halves the
                bytes, ``"int8"`` (blocks of 256 with a scale each) quarters them. The error is
                added to the next operation of the same name, so that means over many operations
                converge: give operations that follow one another one name. Non-finite elements stay
                so under ``"bf16"``, and those beyond 3.39e38 become infinite; under ``"int8"``
                their block becomes NaN.

        Returns:
            A future; its result has the structure, shapes, dtypes and array types of ``data``.

        Raises:
            moolink.Closed: this peer is not in an active view of the group.
            moolink.GroupChanged: the members are others than at the last :meth:`update`.
            ValueError: ``op`` is unknown or not defined for a dtype, the result cannot be written
                into ``out``, or ``compress`` is given with another ``op`` than sum and mean.
                Nothing was sent then.
            TypeError: ``data`` holds something that cannot be reduced.
        """
        retry = _is_retry("all_reduce", name, on_change)
        if compress not in (None, "bf16", "int8"):
            raise ValueError(f"all_reduce '{name}': compress {compress!r} is not bf16 or int8")
        if callable(op):
            if inplace or out is not None or compress is not None:
                raise ValueError("inplace, out and compress are not for a callable op")
            return GroupFuture([self._core.all_reduce_value(name, data, op, retry)], _only)
        if compress is not None and op not in (None, "sum", "mean"):
            raise ValueError(f"all_reduce '{name}': compress is for sum and mean, not for {op}")
        reduction = _named("all_reduce", name, op)
        if self._device_sums is not None and compress is None and not retry:
            by_device = self._device_sums.all_reduce(name, data, reduction, inplace, out)
            if by_device is not None:
                return by_device
        if compress is None and data is not None and not (inplace and out is not None):
            target = data if inplace else out
            future = self._core.all_reduce(name, reduction, data, target, retry)
            if future is not None:
                return GroupFuture([future], _only if target is None else _written)
        return self._collective(
            "all_reduce", name, data, reduction, None, inplace, out, retry, compress
        )

    def reduce_scatter(
        self, name: str, data: Any, *, op: Reduction | None = None, out: Any = None
    ) -> GroupFuture:
        """Combines ``data`` of all members as :meth:`all_reduce` does; each gets a part of it.

        Args:
            name: as for :meth:`all_reduce`.
            data: arrays of shape ``(n * k, ...)`` with n members; see :meth:`all_reduce`.
            op: as for :meth:`all_reduce`, but no callable.
            out: the result is written into this tree of arrays of shape ``(k, ...)``, which do not
                overlap those of ``data``, and is ``out``.

        Returns:
            A future of rows ``rank * k`` to ``(rank + 1) * k``: arrays of shape ``(k, ...)``.

        Raises:
            ValueError: the first dimension does not divide by the number of members, ``op`` is
                unknown or not defined for a dtype, or the result cannot be written into ``out``.
            moolink.Closed, moolink.GroupChanged, TypeError: as :meth:`all_reduce`.
        """
        reduction = _named("reduce_scatter", name, op)
        return self._collective("reduce_scatter", name, data, reduction, None, False, out)

    def all_gather(self, name: str, data: Any, *, out: Any = None) -> GroupFuture:
        """Gives every member the ``data`` of all.

        Args:
            name: as for :meth:`all_reduce`.
            data: arrays, tensors, numbers or a tree of them, of the same shapes and dtypes at all
                members; see :meth:`all_reduce`.
            out: the result is written into this tree of arrays of shape ``(n, *shape)``, which do
                not overlap those of ``data``, and is ``out``.

        Returns:
            A future of arrays of shape ``(n, *shape)``, in the order of ranks; a number becomes a
            numpy array of shape ``(n,)``.

        Raises:
            ValueError: the result cannot be written into ``out``.
            moolink.Closed, moolink.GroupChanged, TypeError: as :meth:`all_reduce`.
        """
        return self._collective("all_gather", name, data, "sum", None, False, out)

    def broadcast(
        self,
        name: str,
        data: Any,
        *,
        root: int | str = 0,
        inplace: bool = False,
        out: Any = None,
    ) -> GroupFuture:
        """Gives every member the ``data`` of one.

        Args:
            name: as for :meth:`all_reduce`.
            data: at the root arrays to send; elsewhere arrays of the same shapes and dtypes, whose
                contents do not matter.
            root: a rank, or a member's name.
            inplace, out: as for :meth:`all_reduce`.

        Returns:
            A future of the root's ``data``.

        Raises:
            ValueError: there is no such root, or the result cannot be written into ``out``.
            moolink.Closed, moolink.GroupChanged, TypeError: as :meth:`all_reduce`.
        """
        return self._collective("broadcast", name, data, "sum", root, inplace, out)

    def gather(self, name: str, data: Any, *, root: int | str = 0, out: Any = None) -> GroupFuture:
        """Gives one member the ``data`` of all.

        Args:
            name: as for :meth:`all_reduce`.
            data: as for :meth:`all_gather`.
            root: a rank, or a member's name.
            out: at the root, as for :meth:`all_gather`; elsewhere it is ignored.

        Returns:
            A future: at the root of arrays of shape ``(n, *shape)``, elsewhere of ``None``.

        Raises:
            ValueError: there is no such root, or the result cannot be written into ``out``.
            moolink.Closed, moolink.GroupChanged, TypeError: as :meth:`all_reduce`.
        """
        return self._collective("gather", name, data, "sum", root, False, out)

    def scatter(self, name: str, data: Any, *, root: int | str = 0, out: Any = None) -> GroupFuture:
        """Gives every member its entry of one member's ``data``.

        Args:
            name: as for :meth:`all_reduce`.
            data: at the root arrays of shape ``(n, *shape)``, an entry for each rank; elsewhere
                arrays of shape ``shape`` and the same dtype, whose contents do not matter.
            root: a rank, or a member's name.
            out: the result is written into this tree of arrays of shape ``shape``, which do not
                overlap those of ``data``, and is ``out``.

        Returns:
            A future of arrays of shape ``shape``.

        Raises:
            ValueError: there is no such root, its data has another number of entries, or the result
                cannot be written into ``out``.
            moolink.Closed, moolink.GroupChanged, TypeError: as :meth:`all_reduce`.
        """
        return self._collective("scatter", name, data, "sum", root, False, out)

    def barrier(self, name: str, *, on_change: Literal["raise", "retry"] = "raise") -> GroupFuture:
        """Ends when all members have started it; the result is ``None``.

        Args:
            name: as for :meth:`all_reduce`.
            on_change: as for :meth:`all_reduce`.

        Raises:
            moolink.Closed, moolink.GroupChanged: as :meth:`all_reduce`.
        """
        future = self._core.collective(
            name,
            "all_reduce",
            0,
            "sum",
            "uint8",
            "a barrier",
            0,
            np.empty(0, np.uint8),
            None,
            _is_retry("barrier", name, on_change),
        )
        return GroupFuture([future], _nothing)

    def _collective(
        self,
        kind: Kind,
        name: str,
        data: Any,
        op: str,
        root: int | str | None,
        inplace: bool,
        out: Any,
        retry: bool = False,
        compress: str | None = None,
    ) -> GroupFuture:
        _require_name(kind, name)
        if inplace and out is not None:
            raise ValueError(f"{kind} '{name}': inplace and out exclude one another")
        members = self._core.members()
        if not members and not retry:
            raise Closed(
                f"{kind} '{name}': update() of group '{self._name}' has shown no members yet",
                function=self._name,
            )
        return Collective(
            self._core,
            kind,
            name,
            len(members),
            self._core.rank() or 0,
            op,
            self._root(kind, name, root, members),
            data if inplace else out,
            retry,
            compress,
        ).begin(data)

    def _root(self, kind: str, name: str, root: int | str | None, members: list[str]) -> int:
        if root is None or not members:  # without members nothing can be started
            return 0
        rank = members.index(root) if root in members else root
        if not isinstance(rank, int) or not 0 <= rank < len(members):
            raise ValueError(
                f"{kind} '{name}': root {root!r} is no rank below {len(members)} and none of "
                f"{', '.join(members)}"
            )
        return rank

    def close(self) -> None:
        """Leaves the group; the others go on at once."""
        sources.remove(self)
        self._core.close()  # first: at the others, the membership ends before the sums fail
        if self._device_sums is not None:
            self._device_sums.close()

    def _metrics(self) -> Iterator[Value]:
        if not self._core.closed():
            labels = {"group": self._name}
            yield "moolink_group_epoch", labels, self.epoch()
            yield "moolink_group_members", labels, len(self.members())

    def __repr__(self) -> str:
        try:
            closed = self._core.closed()
        except Closed:  # this process was forked
            closed = True
        members = f"membership {self.epoch()}, members {', '.join(self.members())}"
        state = "closed" if closed else members if self.active() else "no view yet"
        return f"<moolink.Group {self._name!r}, {state}>"


def _require_name(kind: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{kind}: the operation's name must be a str, got {name!r}")


def _named(kind: str, name: str, op: Any) -> str:
    if op is None:
        return "sum"
    if not isinstance(op, str):
        raise TypeError(f"{kind} '{name}': op must be a str, got {op!r}")
    return op


def _is_retry(kind: str, name: str, on_change: str) -> bool:
    _require_name(kind, name)
    if on_change not in ("raise", "retry"):
        raise ValueError(f"{kind} '{name}': on_change {on_change!r} is not raise or retry")
    return on_change == "retry"


def _only(results: list[Any]) -> Any:
    return results[0]


def _written(results: list[Any]) -> Any:
    note_written(results[0])
    return results[0]


def _nothing(results: list[Any]) -> None:
    return None
