"""ReplayServer: gives other processes the tables of a replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moolink._core import Lock
from moolink.data import skeletons
from moolink.internal import deadlines, forks
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.internal.shown import shown
from moolink.replay import names, turns
from moolink.replay.layout import keys_of
from moolink.replay.local import Replay
from moolink.replay.local_steps import LocalSteps
from moolink.replay.tables import Tables
from moolink.replay.turns import Group
from moolink.replay.writer import Item
from moolink.reports import ReplayServerStats
from moolink.rpc import lending, naming, serving

if TYPE_CHECKING:
    from moolink._core import RpcDeferredReturn
    from moolink.rpc import Rpc


@names_keywords
class ReplayServer(Closing):
    """Serves a :class:`Replay` to any number of :class:`ReplayClient`. The replay can be used here
    as well, and is not closed with the server.

    Args:
        rpc: the peer that clients know as `server`.
        replay: the tables.
        name: its name at clients; one of a name at a peer.

    Raises:
        TypeError: an argument is of another type.
        ValueError: this peer serves a replay of the name already.
    """

    def __init__(self, rpc: Rpc, replay: Replay, name: str = "replay") -> None:
        if not isinstance(replay, Replay):
            raise TypeError(f"replay must be a moolink.Replay, got {shown(replay)}")
        self._rpc = serving.peer_of(rpc)
        self._replay = replay
        self._tables = replay._tables
        self._name = serving.text_of(name, "name")
        self._writers: dict[str, _RemoteWriter] = {}
        self._closed = False
        self._forked()
        handlers: dict[str, Callable[..., Any]] = {
            names.UPDATE: self._update,
            names.REMOVE: self._remove,
            names.RESET: self._reset,
            names.STATS: self.stats,
            names.ITEMS: self._items,
            names.END: self._end,
        }
        with serving.only_one(f"a replay server of {name!r}"):
            rpc.define(names.DESCRIBE.format(name), self._describe)
        for function, handler in handlers.items():
            rpc.define(function.format(name), handler)
        waiting: dict[str, Callable[..., Any]] = {
            names.EXTEND: self._extend,
            names.SAMPLE: self._sample,
            names.WRITE: self._write,
        }
        for function, handler in waiting.items():
            rpc.define_deferred(function.format(name), handler)
        forks.changes_in_children(self)

    def stats(self) -> ReplayServerStats:
        """Returns the replay's, and the number of writers."""
        with self._lock:
            return {**self._replay.stats(), "writers": len(self._writers)}

    def close(self) -> None:
        """Ends it; clients wait for a server of the name."""
        if self._closed:
            return
        self._closed = True
        for function in names.ALL:
            serving.undefine(self._rpc, function.format(self._name))
        self._drop(set(self._writers))

    def __repr__(self) -> str:
        tables = ", ".join(table.name for table in self._replay.tables())
        return f"<moolink.ReplayServer {self._name!r} of {tables}>"

    def _forked(self) -> None:
        self._lock = Lock()

    def _describe(self) -> list[dict[str, Any]]:
        return [table.describe() for table in self._replay.tables()]

    def _update(
        self, table: str | None, keys: npt.NDArray[Any], priorities: npt.NDArray[Any]
    ) -> int:
        return self._replay.update_priorities(keys, priorities, table=table)

    def _remove(self, table: str | None, keys: npt.NDArray[Any]) -> int:
        return self._replay.remove(keys, table=table)

    def _reset(self, table: str | None) -> None:
        self._replay.reset(table=table)

    def _items(self, table: str | None, keys: Any) -> Any:
        there, items = self._replay._items(keys if keys is None else keys_of(keys), table)
        return there, dataclasses.astuple(items)

    # These wait for limiter or room.

    def _extend(
        self,
        reply: RpcDeferredReturn,
        table: str | None,
        items: Any,
        priorities: npt.NDArray[np.float64],
        timeout: float,
    ) -> None:
        def extend() -> npt.NDArray[np.int64]:
            of = self._tables.find(table)
            stop = self._stop(reply)
            return self._tables.extend_until(of, items, priorities, timeout, stop)[0]

        self._answer(reply, extend)

    def _sample(
        self,
        reply: RpcDeferredReturn,
        table: str | None,
        count: int,
        timeout: float,
        lend: bool,
    ) -> None:
        def sample() -> Any:
            of = self._tables.find(table)
            core = self._tables.core
            stop = self._stop(reply)
            size = integer_of(count, "batch_size", least=1)
            deadlines.check(timeout)
            if not isinstance(lend, bool):
                raise TypeError(f"lend must be True or False, got {shown(lend)}")
            sampled = core.sample(of.index, size, timeout, "numpy", lend, stop)
            if sampled is None:
                return None
            arrays, *numbers = sampled
            data = lending.lend(arrays) if lend else arrays
            return data, of.skeleton, of.framework, of.options.name, *numbers

        self._answer(reply, sample)

    def _write(
        self,
        reply: RpcDeferredReturn,
        writer: str,
        turn: int,
        forgotten: int,
        steps: list[Any],
        items: list[Any],
    ) -> None:
        def write() -> int | None:
            name = serving.text_of(writer, "writer")
            number = integer_of(turn, "turn", least=0)
            last = integer_of(forgotten, "forgotten", least=0)
            parts, groups = turns.steps_given(steps), turns.groups_given(items)
            of = self._writer(name, number)
            if of is None:
                return None  # this server has restarted since the writer began
            return of.write(last, parts, groups, self._stop(reply))

        self._answer(reply, write)

    def _writer(self, name: str, turn: int) -> _RemoteWriter | None:
        """The writer of this name, if `turn` is its next one; turn 0 makes it."""
        with self._lock:
            if turn == 0:
                self._drop_dead()
                self._writers[name] = _RemoteWriter(self._tables)
            of = self._writers.get(name)
        return of if of is not None and of.turn == turn else None

    def _stop(self, reply: RpcDeferredReturn) -> Callable[[], bool]:
        """Whether a wait is to end: the caller has given up, or the server ends."""
        return lambda: self._closed or reply.cancelled()

    def _answer(self, reply: RpcDeferredReturn, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except (ValueError, TypeError, KeyError) as wrong:
            result = wrong  # raised at the caller
        serving.answer(reply, result)

    def _end(self, writer: str) -> None:
        self._drop({serving.text_of(writer, "writer")})

    def _drop_dead(self) -> None:
        """Writers whose processes are gone; the caller holds the lock."""
        for name in naming.gone(self._rpc, self._writers):
            self._writers.pop(name).close()

    def _drop(self, writers: set[str]) -> None:
        with self._lock:
            dropped = [self._writers.pop(name) for name in writers & self._writers.keys()]
        for writer in dropped:
            writer.close()


class _RemoteWriter:
    """The steps of a client's writer, from which it makes items."""

    def __init__(self, tables: Tables) -> None:
        self.turn = 0
        self._tables = tables
        self._steps: LocalSteps | None = None
        self._columns: dict[int, int] = {}  # the store's by the client's
        self._lock = Lock()

    def write(
        self,
        forgotten: int,
        steps: list[tuple[int, Any]],
        groups: list[Group],
        stop: Callable[[], bool],
    ) -> int:
        """Appends steps, which come stacked in parts, makes items of the last ones, and forgets
        the steps before `forgotten`. Returns the number of items that were inserted before one
        found no room for some seconds."""
        deadline = deadlines.after(names.TURN)
        with self._lock:
            self.turn += 1
            for count, part in steps:
                if self._steps is None:
                    self._steps = self._open(part)
                self._steps.extend(part, count)
            done = 0
            for group in groups:
                if not group.firsts:
                    continue  # or the group's tree would be the table's
                kept = self._kept(group.firsts, group.item.width)
                item = self._own(group.item)
                left = deadlines.left(deadline)
                of_each = group.priorities
                keys = kept.insert_until(item, group.firsts, of_each, group.table, left, stop)
                done += len(keys)
                if len(keys) < len(group.firsts):
                    break
            if self._steps is not None:
                self._kept([forgotten], 0).forget(forgotten)
            return done

    def _open(self, steps: Any) -> LocalSteps:
        opened = LocalSteps(self._tables, steps, stacked=True)
        # The client numbers arrays in the order of its own dicts.
        order = skeletons.leaves_like(skeletons.flatten(steps)[1], opened.skeleton)
        assert order is not None
        self._columns = {theirs: ours for ours, theirs in enumerate(order)}
        return opened

    def _own(self, item: Item) -> Item:
        """The item with the column numbers of this server."""
        most = len(self._columns) - 1
        columns = [integer_of(piece[0], "a column", most=most) for piece in item.pieces]
        pieces = zip(columns, item.pieces, strict=True)
        return Item(item.skeleton, item.width, [(self._columns[c], *p[1:]) for c, p in pieces])

    def _kept(self, firsts: list[int], width: int) -> LocalSteps:
        """The steps, if `width` of them are kept from each of `firsts` on."""
        steps = self._steps
        if steps is None:
            raise ValueError("the writer has sent no steps")
        for first in firsts:
            if not steps.oldest <= first <= first + width <= steps.end:
                raise ValueError(
                    f"steps {first} to {first + width} are not among the writer's steps "
                    f"{steps.oldest} to {steps.end}"
                )
        return steps

    def close(self) -> None:
        with self._lock:
            self._steps = None
