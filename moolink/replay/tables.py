"""The tables of a replay, with the layouts and patterns of their items."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink._core import Lock, ReplayCore
from moolink.data import skeletons
from moolink.data.skeletons import Skeleton
from moolink.errors import QueueFull, TimeoutError
from moolink.internal import deadlines, forks
from moolink.internal.shown import shown
from moolink.replay.layout import Layout, floats_of, priorities_of
from moolink.replay.open_table import OpenTable
from moolink.replay.options import Table
from moolink.replay.writer import Item
from moolink.reports import ReplayTableStats

Stop = Callable[[], bool]


class Tables:
    """The state that a replay shares with its writers, servers and checkpoints."""

    def __init__(self, options: Sequence[Table], seed: int | None, directory: str | None) -> None:
        self.core = ReplayCore(directory)
        self._forked()
        self._layouts: dict[str, Layout] = {}
        self._pattern_numbers: dict[str, int] = {}
        self._patterns: list[dict[str, Any]] = []  # by number
        self._tables: dict[str, OpenTable] = {}
        seed = secrets.randbits(63) if seed is None else seed
        for i, table in enumerate(options):
            index = self.core.add_table(
                table.sampler.arguments,
                None if table.remover is None else table.remover.arguments,
                table.max_size,
                table.max_times_sampled,
                (
                    table.limiter.samples_per_insert,
                    table.limiter.min_size,
                    table.limiter.min_diff,
                    table.limiter.max_diff,
                ),
                (seed + i) % (1 << 64),
            )
            self._tables[table.name] = OpenTable(index, table)
        forks.changes_in_children(self)

    def _forked(self) -> None:
        self._lock = Lock()

    @property
    def layouts(self) -> list[Layout]:
        """By store."""
        return list(self._layouts.values())

    @property
    def opened(self) -> list[OpenTable]:
        """By index."""
        return list(self._tables.values())

    @property
    def patterns(self) -> list[dict[str, Any]]:
        """Store, width and pieces of each pattern, by number."""
        return list(self._patterns)

    @patterns.setter
    def patterns(self, patterns: list[dict[str, Any]]) -> None:
        """Those of a checkpoint, before any other."""
        for pattern in patterns:
            self._add_pattern(pattern)

    def find(self, name: str | None) -> OpenTable:
        """The table of this name, or the only one.

        Raises:
            ValueError: there is none.
        """
        if name is None and len(self._tables) == 1:
            return next(iter(self._tables.values()))
        if not isinstance(name, str) or name not in self._tables:
            known = ", ".join(self._tables)
            raise ValueError(f"there is no table {shown(name)}; the tables are {known}")
        return self._tables[name]

    def layout_of(self, tree: Any, stacked: bool = False) -> Layout:
        """The layout of steps like this one, or of many that are stacked.

        Raises:
            TypeError: a part of it cannot be stored.
        """
        dropped = int(stacked)
        for layout in self.layouts:
            leaves = skeletons.leaves_like(tree, layout.skeleton)
            if leaves is None:
                continue
            given = [skeletons.layout_of(skeletons.as_array(leaf)) for leaf in leaves]
            if [(dtype, shape[dropped:]) for dtype, shape in given] == [
                column[1:] for column in layout.columns
            ]:
                return layout
        leaves, skeleton = skeletons.flatten(tree)
        named = zip(skeletons.paths(skeleton), leaves, strict=True)
        columns = []
        for name, leaf in named:
            dtype, shape = skeletons.layout_of(skeletons.as_array(leaf, path=name))
            columns.append((name, dtype, shape[dropped:]))
        return self.add_layout(skeleton, columns, skeletons.framework_of(leaves))

    def add_layout(
        self,
        skeleton: Skeleton,
        columns: list[tuple[str, str, tuple[int, ...]]],
        framework: str,
    ) -> Layout:
        """The layout of steps of these arrays."""
        if not columns:
            raise ValueError("a step has no arrays")
        name = repr((skeleton, [column[1:] for column in columns]))
        with self._lock:
            if name not in self._layouts:
                store = self.core.add_store(columns)
                self._layouts[name] = Layout(store, skeleton, columns, framework)
            return self._layouts[name]

    def add_pattern(
        self, table: OpenTable, layout: Layout, item: Item, priorities: npt.ArrayLike
    ) -> int:
        """The core's number of a pattern of items for a table. The first one fixes the tree of the
        table's items, if the items that it is for can be inserted.

        Raises:
            ValueError: the table has items of another tree, or a priority is out of range.
        """
        name = repr((table.index, layout.store, item.width, item.pieces, item.skeleton))
        with self._lock:
            if name in self._pattern_numbers:
                return self._pattern_numbers[name]
            # The item's arrays in the order of the table's, whose dicts may be in another one.
            numbers, skeleton = skeletons.flatten(item.skeleton)
            if table.skeleton is None:
                self._check_priorities(table, priorities)
            elif (found := skeletons.leaves_like(item.skeleton, table.skeleton)) is not None:
                numbers = found
            else:
                raise ValueError(
                    f"the items of table {table.options.name!r} are another tree: one has "
                    f"{', '.join(skeletons.paths(table.skeleton))}"
                )
            if any(type(number) is not int for number in numbers) or (
                sorted(numbers) != list(range(len(item.pieces)))
            ):
                raise ValueError("an item has an array for each leaf of its tree")
            pieces = [item.pieces[number] for number in numbers]
            pattern = {"store": layout.store, "width": item.width, "pieces": pieces}
            number = self._add_pattern(pattern)
            if table.skeleton is None:
                table.skeleton, table.framework = skeleton, layout.framework
            self._pattern_numbers[name] = number
            return number

    def extend_until(
        self,
        of: OpenTable,
        items: Any,
        priorities: npt.ArrayLike,
        timeout: float | None,
        stop: Stop | None,
    ) -> tuple[npt.NDArray[np.int64], int]:
        """As extend, until the time is up or `stop` returns True: the keys of the items that are
        in, and how many were given."""
        layout = of.steps[0] if of.steps else self.layout_of(items, stacked=True)
        leaves = layout.leaves(items)
        shape = skeletons.layout_of(leaves[0])[1] if leaves else ()
        if not shape:
            raise ValueError("all arrays must have the items as their first dimension")
        of_each = priorities_of(shape[0], priorities)
        deadlines.check(timeout)
        rows = self.core.extend(layout.store, leaves, shape[0])
        try:
            _, pattern = of.steps or self._open_steps(of, layout, of_each)
            return self.insert_rows(pattern, rows, of_each, of, timeout, stop), len(rows)
        finally:
            self.core.release(layout.store, rows)

    def insert_rows(
        self,
        pattern: int,
        rows: npt.NDArray[np.uint32],
        priorities: npt.NDArray[np.float64],
        table: OpenTable,
        timeout: float | None,
        stop: Stop | None = None,
    ) -> npt.NDArray[np.int64]:
        """Inserts items of rows that the caller holds; returns the keys of those that are in."""
        stop = self.telling(f"an insert of {len(priorities)} items", table.options.name, stop)
        return self.core.insert(table.index, pattern, rows, priorities, timeout, stop)

    def telling(self, what: str, table: str, stop: Stop | None) -> Stop:
        """`stop`, which also tells the log of a wait that is long."""
        wait = deadlines.Wait()

        def look() -> bool:
            wait.turn(f"{what} waits for table {table!r}: its limiter or its size keeps it back")
            return stop is not None and stop()

        return look

    def raise_if_late(self, inserted: int, asked: int, table: str, timeout: float | None) -> None:
        """Raises unless as many items were inserted as were asked for."""
        if inserted < asked:
            raise self.late("insert", table, timeout, f"; {inserted} of {asked} items are in")

    def _add_pattern(self, pattern: dict[str, Any]) -> int:
        number = self.core.add_pattern(pattern["store"], pattern["width"], pattern["pieces"])
        self._patterns.append(pattern)
        return number

    def _check_priorities(self, table: OpenTable, priorities: npt.ArrayLike) -> None:
        of_each = np.atleast_1d(floats_of(priorities))
        self.core.update(table.index, np.full(len(of_each), -1), of_each)  # -1 is no item's key

    def _open_steps(
        self, table: OpenTable, layout: Layout, priorities: npt.ArrayLike
    ) -> tuple[Layout, int]:
        pieces = [(column, 0, 0) for column in range(len(layout.columns))]
        item = Item(layout.skeleton, 1, pieces)
        pattern = self.add_pattern(table, layout, item, priorities)
        table.steps = (layout, pattern)
        return table.steps

    def late(
        self, what: str, table: str, timeout: float | None, more: str = ""
    ) -> QueueFull | TimeoutError:
        """The error of an insert or a sample whose time is up."""
        stats = self.core.table_stats(self._tables[table].index)
        return late(what, f"table {table!r}", stats, timeout, more)


def late(
    what: str, where: str, stats: ReplayTableStats, timeout: float | None, more: str = ""
) -> QueueFull | TimeoutError:
    """The error of an insert or a sample whose time is up, at a table of these counts."""
    why = (
        f"{where} has {stats['size']} items after {stats['inserts']} inserts and "
        f"{stats['samples']} samples{more}"
    )
    if timeout == 0:
        return QueueFull(f"an item would have to wait to {what}: {why}")
    return TimeoutError(f"nothing to {what} for {timeout} s: {why}")
