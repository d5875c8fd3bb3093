"""Replay: tables of this process."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from moolink.data import skeletons
from moolink.internal import deadlines
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.metrics import sources
from moolink.metrics.sources import Value
from moolink.replay import array_conversion, reading
from moolink.replay.array_conversion import Arrays
from moolink.replay.batch import Batch, Batches
from moolink.replay.layout import floats_of, keys_of
from moolink.replay.local_steps import LocalSteps
from moolink.replay.open_table import OpenTable
from moolink.replay.options import Table
from moolink.replay.reading import Items
from moolink.replay.tables import Stop, Tables
from moolink.replay.writer import Writer
from moolink.reports import ReplayStats


@names_keywords
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
        TypeError: a table is no Table, or `seed` no integer.
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
        if seed is not None:
            seed = integer_of(seed, "seed")
        self._tables = Tables(options, seed, directory)
        self._arrays = array_conversion.kind_of(arrays)
        sources.add(self)

    def tables(self) -> list[Table]:
        """Returns the tables' options."""
        return [table.options for table in self._tables.opened]

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
        of = self._tables.find(table)
        if of.steps is None:
            # The first one fixes the layout of the others only if it is valid.
            leaves, skeleton = skeletons.flatten(item)
            stacked = [array[None] for array in skeletons.arrays_of(leaves, skeleton)]
            items = skeletons.unflatten(skeleton, stacked)
            return int(self.extend(items, priority, table=table, timeout=timeout)[0])
        layout, pattern = of.steps
        leaves = layout.leaves(item)
        try:
            key = self._tables.core.insert_step(
                of.index, pattern, layout.store, leaves, priority, timeout
            )
        except TypeError:  # of the core's own function: names the argument instead
            deadlines.check(timeout)
            floats_of(priority)
            raise
        if key is None:
            raise self._tables.late("insert", of.options.name, timeout)
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
        of = self._tables.find(table)
        keys, asked = self._tables.extend_until(of, items, priorities, timeout, None)
        self._tables.raise_if_late(len(keys), asked, of.options.name, timeout)
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
        of = self._tables.find(table)
        batch = self._sample(of, integer_of(batch_size, "batch_size", least=1), timeout, device)
        if batch is None:
            raise self._tables.late("sample", of.options.name, timeout)
        return batch

    def batches(
        self,
        batch_size: int,
        *,
        table: str | None = None,
        prefetch: int = 2,
        device: Any = None,
    ) -> Batches:
        """Returns an iterator over batches without end, which a thread samples ahead.

        Args:
            batch_size: items of a batch.
            table: the table's name; may be left out if there is only one.
            prefetch: batches that are sampled ahead, at least 1.
            device: as for :meth:`sample`.

        Raises:
            TypeError, ValueError: `batch_size` or `prefetch` is not an integer, or below 1, or
                there is no such table.
        """
        of = self._tables.find(table)
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

        Args:
            keys: [n], as in :attr:`Batch.keys`; those of removed items are ignored.
            priorities: [n], finite and not negative.

        Raises:
            TypeError: keys are not integers, or priorities are not numbers.
            ValueError: a priority is negative, not finite, or too large for a table's exponent;
                nothing has changed.
        """
        which, of_each = keys_of(keys), floats_of(priorities)
        if of_each.ndim != 1:
            raise ValueError(f"priorities must have one dimension, got shape {of_each.shape}")
        return self._tables.core.update(self._tables.find(table).index, which, of_each)

    def remove(self, keys: npt.ArrayLike, *, table: str | None = None) -> int:
        """Removes items; returns how many of them were still there."""
        return self._tables.core.remove(self._tables.find(table).index, keys_of(keys))

    def reset(self, *, table: str | None = None) -> None:
        """Removes all items of a table, and lets its limiter count anew."""
        self._tables.core.reset(self._tables.find(table).index)

    def writer(self, keep: int) -> Writer:
        """Returns a writer of steps, from which items are made. For one thread.

        Args:
            keep: the steps of the episode of which items can be made, from the last one back.

        Raises:
            TypeError, ValueError: `keep` is not an integer, or below 1.
        """
        return Writer(functools.partial(LocalSteps, self._tables), keep)

    def stats(self) -> ReplayStats:
        """Returns the counts of each table, and the memory of steps."""
        return {
            "tables": {
                table.options.name: self._tables.core.table_stats(table.index)
                for table in self._tables.opened
            },
            "stores": self._tables.core.store_stats(),
        }

    def _metrics(self) -> Iterator[Value]:
        for table, stats in self.stats()["tables"].items():
            labels = {"table": table}
            yield "moolink_replay_items", labels, stats["size"]
            for count in ("inserts", "samples", "removals"):
                yield f"moolink_replay_{count}_total", labels, stats[count]
            for waiting in ("waiting_inserts", "waiting_samples"):
                yield f"moolink_replay_{waiting}", labels, stats[waiting]

    def checkpoint(self, path: str | os.PathLike[str], *, keep_previous: bool = False) -> None:
        """Writes all tables, as they are at one moment, to a file, which is there whole or not at
        all. Inserts and samples go on meanwhile; steps of which a writer has made no item are
        not in it.

        Args:
            keep_previous: whether an existing file is kept as ``PATH.previous``, and replaces the
                file of that name. The disk then needs space for three checkpoints while one is
                written, and for two afterwards; otherwise for two, and for one.

        Raises:
            OSError: it cannot be written. An existing file stays.
        """
        from moolink.replay import checkpoint

        checkpoint.save(self._tables, os.fsdecode(path), keep_previous)

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
            FileError: the file is no checkpoint, is damaged, is of another version, or of other
                tables. The message names each option that differs, or the damage, and the previous
                checkpoint if there is one.
            OSError: the checkpoint cannot be read, or its steps cannot be spilled.
        """
        from moolink.replay import checkpoint

        replay = cls(tables, arrays=arrays, spill=spill)
        try:
            checkpoint.load(replay._tables, os.fsdecode(path))
        except BaseException:
            replay.close()
            raise
        return replay

    def _items(
        self, keys: npt.NDArray[np.int64] | None, table: str | None
    ) -> tuple[npt.NDArray[np.int64], Items]:
        """All keys, and the items that have `keys`: see :func:`reading.read`."""
        return reading.read(self._tables, self._tables.find(table), keys)

    def close(self) -> None:
        """Waiting inserts and samples raise moolink.Closed."""
        sources.remove(self)
        self._tables.core.close()

    def _sample(
        self,
        table: OpenTable,
        batch_size: int,
        timeout: float | None,
        device: Any,
        stop: Stop | None = None,
    ) -> Batch | None:
        # Until the table's first item is there "same" is not determined.
        stop = self._tables.telling(f"a sample of {batch_size} items", table.options.name, stop)
        sampled = self._tables.core.sample(table.index, batch_size, timeout, "numpy", False, stop)
        if sampled is None:
            return None
        arrays, keys, probabilities, priorities, times_sampled = sampled
        kind = table.framework if self._arrays == "same" else self._arrays
        data = skeletons.unflatten(table.skeleton, array_conversion.convert(arrays, kind, device))
        return Batch(data, keys, probabilities, priorities, times_sampled, table.options.name)
