"""The layout of the steps of one store."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink import _core
from moolink.data import skeletons
from moolink.data.skeletons import Skeleton
from moolink.internal.shown import shown


@dataclasses.dataclass
class Layout:
    """The arrays of steps, which lie in one store."""

    store: int
    skeleton: Skeleton
    columns: list[tuple[str, str, tuple[int, ...]]]  # name, dtype and shape of each
    framework: str

    def leaves(self, tree: Any) -> list[Any]:
        """The arrays of a step in order.

        Raises:
            ValueError: the step is another tree.
        """
        leaves = skeletons.leaves_like(tree, self.skeleton)
        if leaves is None:
            difference = skeletons.difference(tree, self.skeleton)
            raise ValueError(f"a step differs from the first one: it is {difference}")
        return [
            skeletons.as_array(leaf, column[1], column[0])
            for leaf, column in zip(leaves, self.columns, strict=True)
        ]


def step_bytes(column: tuple[str, str, tuple[int, ...]]) -> int:
    """The bytes of one step in a column."""
    return int(_core.item_size(column[1]) * np.prod(column[2], dtype=np.int64))


def floats_of(priorities: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Priorities as an array of the given shape.

    Raises:
        TypeError: they are not numbers.
    """
    try:
        return np.asarray(priorities, np.float64, order="C")
    except (TypeError, ValueError, OverflowError):
        # Not chained: numpy's error has all of the value in its text.
        raise TypeError(f"priorities must be numbers, got {shown(priorities)}") from None


def priorities_of(count: int, priorities: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The priority of each of `count` items: its own, or one for all.

    Raises:
        TypeError: they are not numbers.
        ValueError: there are neither one nor `count` of them.
    """
    given = floats_of(priorities)
    if given.shape not in ((), (count,)):
        raise ValueError(f"expected one priority, or {count}, got an array of shape {given.shape}")
    return np.array(np.broadcast_to(given, count))


def keys_of(keys: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The keys that a program gives.

    Raises:
        TypeError: they are not integers.
        ValueError: they do not have one dimension.
    """
    given = np.asarray(keys)
    if given.dtype.kind not in "iu" and given.size > 0:
        raise TypeError(f"keys must be integers, got {shown(keys)}")
    if given.ndim != 1:
        raise ValueError(f"keys must have one dimension, got shape {given.shape}")
    return np.ascontiguousarray(given, np.int64)
