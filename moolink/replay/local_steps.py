"""The last steps of a writer, in the replay's own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moolink.internal import deadlines
from moolink.replay.writer import Item, Steps

if TYPE_CHECKING:
    from moolink.replay.tables import Tables


class LocalSteps(Steps):
    """The last steps of a writer of this process, or of a client's.

    Args:
        first: a step, or several, stacked, which fixes the layout of all; it is not appended.
    """

    def __init__(self, tables: Tables, first: Any, stacked: bool = False) -> None:
        self._layout = tables.layout_of(first, stacked)
        self._tables = tables
        self.oldest = 0
        self._rows: list[int] = []
        self.skeleton = self._layout.skeleton
        self.columns = self._layout.columns

    @property
    def end(self) -> int:
        return self.oldest + len(self._rows)

    def append(self, step: Any) -> None:
        core, layout = self._tables.core, self._layout
        self._rows.append(core.append(layout.store, layout.leaves(step)))

    def extend(self, steps: Any, count: int) -> None:
        """Copies many steps, stacked."""
        core, layout = self._tables.core, self._layout
        self._rows += core.extend(layout.store, layout.leaves(steps), count).tolist()

    def forget(self, first: int) -> None:
        count = first - self.oldest
        rows = self._rows[:count]
        self._rows, self.oldest = self._rows[count:], first
        self._tables.core.release(self._layout.store, np.array(rows, np.uint32))

    def insert(
        self, item: Item, first: int, priority: float, table: str | None, timeout: float | None
    ) -> int:
        keys = self.insert_until(item, [first], np.array([priority]), table, timeout, None)
        name = self._tables.find(table).options.name
        self._tables.raise_if_late(len(keys), 1, name, timeout)
        return int(keys[0])

    def insert_until(
        self,
        item: Item,
        firsts: list[int],
        priorities: npt.NDArray[np.float64],
        table: str | None,
        timeout: float | None,
        stop: Callable[[], bool] | None,
    ) -> npt.NDArray[np.int64]:
        """Inserts an item of one layout from each of `firsts`, until the time is up or `stop`
        returns True. Returns the keys of the inserted items."""
        deadlines.check(timeout)
        of = self._tables.find(table)
        pattern = self._tables.add_pattern(of, self._layout, item, priorities)
        places = [first - self.oldest for first in firsts]
        steps = [self._rows[place : place + item.width] for place in places]
        rows = np.array(steps, np.uint32).reshape(-1)
        return self._tables.insert_rows(pattern, rows, priorities, of, timeout, stop)

    def __del__(self) -> None:
        if hasattr(self, "_rows"):
            self.forget(self.end)
