"""Replay: tables of this process."""

from __future__ import annotations

import functools
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from moolink._core import ReplayCore
from moolink.data import skeletons
from moolink.data.skeletons import Skeleton
from moolink.errors import QueueFull, TimeoutError
from moolink.internal import deadlines, forks
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.shown import shown
from moolink.metrics import sources
from moolink.metrics.sources import Value
from moolink.replay import array_conversion
from moolink.replay.array_conversion import Arrays
from moolink.replay.batch import Batch, Batches
from moolink.replay.layout import Layout, floats_of, keys_of, priorities_of
from moolink.replay.local_steps import LocalSteps
from moolink.replay.open_table import OpenTable
from moolink.replay.options import Table
from moolink.replay.writer import Item, Writer

Stop = Callable[[], bool]


class Replay(Closing):
    """Tables of items, from which batches are sampled.

    An item is a tree of arrays with a key and a priority. Any number of threads may insert, sample
    and change priorities. Served to other processes by :class:`ReplayServer`.

    Args:
        tables: a table, or several of different names. Methods take the name of the one that is
            meant, which may be left out where there is one only.
        seed: of all choices; None: another one each time.
        arrays: the batches' framework: "numpy", "torch", "jax", or "same": that of the table's
            first item.
        spill: a directory; the steps are kept in a file in it. None: they are kept in memory.

    Raises:
        OSError: there can be no file in the directory.
        ValueError: there is no table, or two have one name.
    """

    def __init__(
        self,
        tables: Table | Sequence[Table],
        *,
        seed: int | None = None,
        arrays: Arrays = "same",
        spill: str | os.PathLike[str] | None = None,
    ) -> None:
        options = [tables] if isinstance(tables, Table) else list(tables)
        for table in options:
            if not isinstance(table, Table):
                raise TypeError(f"expected a Table or several, got a {type(table).__name__}")
        if len({table.name for table in options}) != len(options) or not options:
            raise ValueError("a replay needs tables, each with a name of its own")
        directory = None if spill is None else os.fsdecode(spill)
        if directory == "":
            raise ValueError("spill is an empty text: name a directory")
        self._core = ReplayCore(directory)
        self._arrays = array_conversion.kind_of(arrays)
        self._forked()
        self._layouts: dict[str, Layout] = {}
        self._pattern_numbers: dict[str, int] = {}
        self._patterns: list[dict[str, Any]] = []  # by number
        self._tables: dict[str, OpenTable] = {}
        seed = secrets.randbits(63) if seed is None else seed
        for i, table in enumerate(options):
            index = self._core.add_table(
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
        sources.add(self)

    def _forked(self) -> None:
        self._lock = threading.Lock()

    @property
    def tables(self) -> list[Table]:
        """The tables' options."""
        return [table.options for table in self._tables.values()]

    def insert(
        self,
        item: Any,
        priority: float = 1.0,
        *,
        table: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Inserts an item of one step: a tree of arrays, which are copied. Returns its key.

        The first item fixes tree, shapes and dtypes. Python's numbers are float32, int64 and bool,
        or the first item's types in their place.

        Args:
            priority: finite and not negative.
            timeout: seconds to wait for limiter and room, 0: do not wait, None: for ever.

        Raises:
            QueueFull: with a time-out of 0, the item would have to wait.
            TimeoutError: it was not inserted in time.
            OSError: with `spill`, the disk is full.
            TypeError, ValueError: its arrays are not like those of the first item.
        """
        of = self.open_table(table)
        if of.steps is None:
            # The first one fixes the layout of the others only if it is valid.
            leaves, skeleton = skeletons.flatten(item)
            stacked = [array[None] for array in skeletons.arrays_of(leaves)]
            items = skeletons.unflatten(skeleton, stacked)
            return int(self.extend(items, priority, table=table, timeout=timeout)[0])
        layout, pattern = of.steps
        key = self._core.insert_step(
            of.index, pattern, layout.store, layout.leaves(item), priority, timeout
        )
        if key is None:
            raise self._late("insert", of.options.name, timeout)
        return key

    def extend(
        self,
        items: Any,
        priorities: npt.ArrayLike = 1.0,
        *,
        table: str | None = None,
        timeout: float | None = None,
    ) -> npt.NDArray[np.int64]:
        """Inserts many items: as insert, the items stacked along the arrays' first dimension.

        Args:
            priorities: of each item, or one for all.

        Returns:
            The items' keys.

        Raises:
            QueueFull, TimeoutError: some were not inserted in time; the others stay.
            TypeError, ValueError: as :meth:`insert`.
        """
        of = self.open_table(table)
        keys, asked = self.extend_until(of, items, priorities, timeout, None)
        self.raise_if_late(len(keys), asked, of.options.name, timeout)
        return keys

    def sample(
        self,
        batch_size: int,
        *,
        table: str | None = None,
        timeout: float | None = None,
        device: Any = None,
    ) -> Batch:
        """Samples items as the table's sampler chooses them, and copies them into one tree.

        Args:
            timeout: seconds to wait for the limiter, 0: do not wait, None: for ever.
            device: where the arrays are wanted: torch's or JAX's; None: the host.

        Returns:
            A batch, smaller than asked for where time was up before the limiter had granted all.

        Raises:
            QueueFull: with a time-out of 0, no item can be sampled now.
            TimeoutError: no item could be sampled in time.
            TypeError, ValueError: `batch_size` is not an integer, is below 1, or needs more than
                4 GB.
        """
        of = self.open_table(table)
        batch = self._sample(of, integer_of(batch_size, "batch_size", least=1), timeout, device)
        if batch is None:
            raise self._late("sample", of.options.name, timeout)
        return batch

    def batches(
        self,
        batch_size: int,
        *,
        table: str | None = None,
        prefetch: int = 2,
        device: Any = None,
    ) -> Batches:
        """An iterator over batches without end, of which `prefetch` are sampled ahead."""
        of = self.open_table(table)
        size = integer_of(batch_size, "batch_size", least=1)
        return Batches(lambda stop: self._sample(of, size, None, device, stop), prefetch)

    def update_priorities(
        self,
        keys: npt.ArrayLike,
        priorities: npt.ArrayLike,
        *,
        table: str | None = None,
    ) -> int:
        """Sets the priorities of items; returns how many of them are still there.

        Raises:
            TypeError: keys are not integers, or priorities are not numbers.
            ValueError: a priority is negative, not finite, or too large for a table's exponent;
                nothing has changed.
        """
        which, of_each = keys_of(keys), floats_of(priorities)
        if of_each.ndim != 1:
            raise ValueError(f"priorities must have one dimension, got shape {of_each.shape}")
        return self._core.update(self.open_table(table).index, which, of_each)

    def remove(self, keys: npt.ArrayLike, *, table: str | None = None) -> int:
        """Removes items; returns how many of them were still there."""
        return self._core.remove(self.open_table(table).index, keys_of(keys))

    def reset(self, *, table: str | None = None) -> None:
        """Removes all items, and lets the limiter count anew."""
        self._core.reset(self.open_table(table).index)

    def writer(self, keep: int) -> Writer:
        """A writer of steps, from whose last `keep` ones items are made. For one thread."""
        return Writer(functools.partial(LocalSteps, self), keep)

    def stats(self) -> dict[str, Any]:
        """Of each table its size, counts and waiters; of the stores, steps and bytes."""
        return {
            "tables": {
                name: self._core.table_stats(table.index) for name, table in self._tables.items()
            },
            "stores": self._core.store_stats(),
        }

    def _metrics(self) -> Iterator[Value]:
        for table, stats in self.stats()["tables"].items():
            labels = {"table": table}
            yield "moolink_replay_items", labels, stats["size"]
            for count in ("inserts", "samples", "removals"):
                yield f"moolink_replay_{count}_total", labels, stats[count]
            for waiting in ("waiting_inserts", "waiting_samples"):
                yield f"moolink_replay_{waiting}", labels, stats[waiting]

    def checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes all tables, as they are at one moment, to a file, which is there whole or not at
        all. Inserts and samples go on meanwhile; steps of which a writer has made no item are
        not in it."""
        from moolink.replay import checkpoint

        checkpoint.save(self, os.fspath(path))

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        tables: Table | Sequence[Table],
        *,
        arrays: Arrays = "same",
        spill: str | os.PathLike[str] | None = None,
    ) -> Self:
        """A replay of these tables with a checkpoint's contents: items, keys, priorities, and the
        limiters' counts.

        Raises:
            ValueError: the file is no checkpoint, or one of other tables; the message names each
                option that differs.
            OSError: the checkpoint cannot be read, or its steps cannot be spilled.
        """
        from moolink.replay import checkpoint

        replay = cls(tables, arrays=arrays, spill=spill)
        checkpoint.load(replay, os.fspath(path))
        return replay

    def close(self) -> None:
        """Waiting inserts and samples raise moolink.Closed."""
        sources.remove(self)
        self._core.close()

    # For writers, servers and checkpoints.

    @property
    def core(self) -> ReplayCore:
        return self._core

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

    def open_table(self, name: str | None) -> OpenTable:
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
        leaves = [skeletons.as_array(leaf) for leaf in leaves]
        columns = []
        for name, leaf in zip(skeletons.paths(skeleton), leaves, strict=True):
            dtype, shape = skeletons.layout_of(leaf)
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
                store = self._core.add_store(columns)
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
        rows = self._core.extend(layout.store, leaves, shape[0])
        try:
            _, pattern = of.steps or self._open_steps(of, layout, of_each)
            return self.insert_rows(pattern, rows, of_each, of, timeout, stop), len(rows)
        finally:
            self._core.release(layout.store, rows)

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
        stop = self._telling(f"an insert of {len(priorities)} items", table.options.name, stop)
        return self._core.insert(table.index, pattern, rows, priorities, timeout, stop)

    def _telling(self, what: str, table: str, stop: Stop | None) -> Stop:
        """`stop`, which also tells the log of a wait that is long."""
        wait = deadlines.Wait()

        def look() -> bool:
            wait.turn(f"{what} waits for table {table!r}: its limiter or its size keeps it back")
            return stop is not None and stop()

        return look

    def raise_if_late(self, inserted: int, asked: int, table: str, timeout: float | None) -> None:
        """Raises unless as many items were inserted as were asked for."""
        if inserted < asked:
            raise self._late("insert", table, timeout, f"; {inserted} of {asked} items are in")

    def _add_pattern(self, pattern: dict[str, Any]) -> int:
        number = self._core.add_pattern(pattern["store"], pattern["width"], pattern["pieces"])
        self._patterns.append(pattern)
        return number

    def _check_priorities(self, table: OpenTable, priorities: npt.ArrayLike) -> None:
        of_each = np.atleast_1d(floats_of(priorities))
        self._core.update(table.index, np.full(len(of_each), -1), of_each)  # -1 is no item's key

    def _open_steps(
        self, table: OpenTable, layout: Layout, priorities: npt.ArrayLike
    ) -> tuple[Layout, int]:
        pieces = [(column, 0, 0) for column in range(len(layout.columns))]
        item = Item(layout.skeleton, 1, pieces)
        pattern = self.add_pattern(table, layout, item, priorities)
        table.steps = (layout, pattern)
        return table.steps

    def _sample(
        self,
        table: OpenTable,
        batch_size: int,
        timeout: float | None,
        device: Any,
        stop: Stop | None = None,
    ) -> Batch | None:
        # Until the table's first item is there "same" is not determined.
        stop = self._telling(f"a sample of {batch_size} items", table.options.name, stop)
        sampled = self._core.sample(table.index, batch_size, timeout, "numpy", False, stop)
        if sampled is None:
            return None
        arrays, keys, probabilities, priorities, times_sampled = sampled
        kind = table.framework if self._arrays == "same" else self._arrays
        data = skeletons.unflatten(table.skeleton, array_conversion.convert(arrays, kind, device))
        return Batch(data, keys, probabilities, priorities, times_sampled, table.options.name)

    def _late(
        self, what: str, table: str, timeout: float | None, more: str = ""
    ) -> QueueFull | TimeoutError:
        stats = self._core.table_stats(self._tables[table].index)
        why = (
            f"table {table!r} has {stats['size']} items after {stats['inserts']} inserts and "
            f"{stats['samples']} samples{more}"
        )
        if timeout == 0:
            return QueueFull(f"an item would have to wait to {what}: {why}")
        return TimeoutError(f"nothing to {what} for {timeout} s: {why}")
