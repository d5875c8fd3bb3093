"""Reads a table's items without sampling them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moolink.replay.layout import step_bytes

if TYPE_CHECKING:
    from moolink.replay.open_table import OpenTable
    from moolink.replay.tables import Tables


@dataclasses.dataclass
class Items:
    """Items as bytes; `columns` has the bytes of each array of all items, its dtype and its shape,
    [items, ...]."""

    keys: npt.NDArray[np.int64]
    priorities: npt.NDArray[np.float64]
    skeleton: Any
    columns: list[tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]]


def read(
    tables: Tables, of: OpenTable, keys: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.int64], Items]:
    """The keys of all items, the oldest first, and the items with `keys`, in their order; None: all
    items. Lists the items of all tables, which takes time in proportion to their number.

    Raises:
        KeyError: an item is not there.
    """
    states, held = tables.core.snapshot()
    try:
        state = states[of.index]
        there = state["keys"]
        order = np.argsort(there)
        wanted = there if keys is None else keys
        places = np.searchsorted(there, wanted, sorter=order)
        found = order[np.minimum(places, max(0, len(there) - 1))] if len(there) else places
        gone = wanted != there[found] if len(there) else np.ones(len(wanted), bool)
        if gone.any():
            raise KeyError(f"no item of table {of.options.name!r} has key {wanted[gone][0]}")
        columns = _columns(tables, state, found) if len(found) else []
        return there, Items(wanted, state["priorities"][found], of.skeleton, columns)
    finally:
        for layout, rows in zip(tables.layouts, held, strict=False):
            tables.core.release(layout.store, rows)


def _columns(
    tables: Tables, state: dict[str, npt.NDArray[Any]], found: npt.NDArray[np.intp]
) -> list[tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]]:
    """Items of one table have arrays of one layout, in the rows of one store."""
    widths = state["widths"].astype(np.int64)
    begins = (np.cumsum(widths) - widths)[found]
    of_each = state["patterns"][found]
    patterns = {int(number): tables.patterns[number] for number in np.unique(of_each)}
    first = next(iter(patterns.values()))
    layout = next(one for one in tables.layouts if one.store == first["store"])
    made = []
    for place, (shown, _, count) in enumerate(first["pieces"]):
        _, dtype, shape = layout.columns[shown]
        steps = max(1, count)
        data = np.empty((len(found), steps * step_bytes(layout.columns[shown])), np.uint8)
        for number, pattern in patterns.items():
            column, begin, _ = pattern["pieces"][place]
            those = of_each == number
            places = begins[those, None] + (begin + np.arange(steps))
            rows = state["rows"][places.reshape(-1)]
            read = tables.core.read(layout.store, column, rows)
            data[those] = read.reshape(len(places), -1)
        made.append((data, dtype, (len(found), *((count,) if count else ()), *shape)))
    return made
