"""Copying observations into rows of shared arrays, whatever their strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from moolink.env_pool.memory import Array
from moolink.env_pool.spaces import Leaf, Tree

Write: TypeAlias = Callable[[int, Any], None]


def writer(tree: Tree, arrays: Tree) -> Write:
    """Makes the function that copies an observation into a row, checking it on the way."""
    if isinstance(tree, dict):
        return _dict_writer({key: writer(part, arrays[key]) for key, part in tree.items()})
    if isinstance(tree, tuple):
        return _tuple_writer([writer(*pair) for pair in zip(tree, arrays, strict=True)])
    return _leaf_writer(tree, arrays)


def _leaf_writer(leaf: Leaf, array: Array) -> Write:
    dtype, shape = array.dtype, leaf.shape

    def write(row: int, value: Any) -> None:
        if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
            # Checked here because numpy would broadcast and cast without a word.
            value = np.asarray(value)
            what = f"{leaf.path}: the observation has"
            if value.shape != shape:
                raise ValueError(
                    f"{what} shape {value.shape}, its space has {shape} ({leaf.space})"
                )
            if not np.can_cast(value.dtype, dtype, "same_kind"):
                raise TypeError(f"{what} dtype {value.dtype}, its space has {dtype} ({leaf.space})")
        array[row] = value

    return write


def _dict_writer(writers: dict[str, Write]) -> Write:
    items = list(writers.items())

    def write(row: int, value: Any) -> None:
        if not isinstance(value, Mapping) or value.keys() != writers.keys():
            got = list(value) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"the observation should be a dict of {list(writers)}, got {got}")
        for key, write_part in items:
            write_part(row, value[key])

    return write


def _tuple_writer(writers: list[Write]) -> Write:
    def write(row: int, value: Any) -> None:
        if not isinstance(value, Sequence) or len(value) != len(writers):
            raise ValueError(f"the observation should be a tuple of {len(writers)}, got {value!r}")
        for write_part, part in zip(writers, value, strict=True):
            write_part(row, part)

    return write
