"""Checks the steps and items that a writer sends in a turn. Without I/O."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.internal.integers import integer_of
from moolink.internal.shown import shown
from moolink.replay.layout import floats_of
from moolink.replay.writer import Item
from moolink.rpc.serving import tuples_of

_WIDEST = (1 << 32) - 1  # steps of an item


@dataclasses.dataclass(frozen=True)
class Group:
    """Items of one layout for one table, each given by its first step."""

    item: Item
    table: str | None
    firsts: list[int]
    priorities: npt.NDArray[np.float64]


def steps_given(given: Any) -> list[tuple[int, Any]]:
    """The pairs of a number of steps and their stacked arrays that a peer has sent.

    Raises:
        TypeError, ValueError: `given` has another form; the message names the wrong part.
    """
    return [
        (integer_of(count, "a number of steps", least=1), arrays)
        for count, arrays in tuples_of(given, 2, "steps must be pairs of a number and arrays")
    ]


def groups_given(given: Any) -> list[Group]:
    """The items that a peer has sent.

    Raises:
        TypeError, ValueError: as `steps_given`.
    """
    return [_group(*group) for group in tuples_of(given, 6, "items must be groups of six parts")]


def _group(
    skeleton: Any, width: Any, pieces: Any, table: Any, firsts: Any, priorities: Any
) -> Group:
    width = integer_of(width, "width", least=1, most=_WIDEST)
    if not isinstance(firsts, list | tuple):
        raise TypeError(f"the items' first steps must be a list, got {shown(firsts)}")
    numbers = [integer_of(first, "an item's first step") for first in firsts]
    of_each = floats_of(priorities)
    if of_each.shape != (len(numbers),):
        raise ValueError(
            f"expected one priority for each item, {len(numbers)}, got shape {of_each.shape}"
        )
    parts = tuples_of(
        pieces, 3, "pieces must be triples of a column, its first step and the number of steps"
    )
    return Group(Item(skeleton, width, [_piece(width, *p) for p in parts]), table, numbers, of_each)


def _piece(width: int, column: Any, first: Any, count: Any) -> tuple[int, int, int]:
    begin = integer_of(first, "a piece's first step", least=0, most=width - 1)
    return (
        integer_of(column, "a column", least=0),
        begin,
        integer_of(count, "a piece's steps", least=0, most=width - begin),
    )
