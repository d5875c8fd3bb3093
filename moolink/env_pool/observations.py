"""Copies observations into rows of shared arrays, whatever their strides; checks other values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from moolink.env_pool.fitting import fitted, put
from moolink.env_pool.memory import Array
from moolink.env_pool.spaces import Leaf, Tree, map_tree
from moolink.internal.shown import shown

Write: TypeAlias = Callable[[int, Any], None]

_HAS = "the observation has"


def writer(tree: Tree, arrays: Tree, path: str = "obs") -> Write:
    """Makes the function that copies an observation into a row, checking it on the way.

    Where `tree` and `arrays` have None, a value is neither copied nor checked; where only `arrays`
    has None, it is checked.
    """
    if isinstance(tree, dict):
        parts = {key: writer(part, arrays[key], f"{path}.{key}") for key, part in tree.items()}
        return _dict_writer(parts, path)
    if isinstance(tree, tuple):
        pairs = enumerate(zip(tree, arrays, strict=True))
        return _tuple_writer([writer(*pair, f"{path}[{i}]") for i, pair in pairs], path)
    if tree is None:
        return lambda row, value: None
    return _leaf_checker(tree) if arrays is None else _leaf_writer(tree, arrays)


def checker(tree: Tree) -> Write:
    """Makes the function that checks the parts of an observation that have a layout."""
    return writer(tree, map_tree(lambda leaf: None, tree))


def _leaf_checker(leaf: Leaf) -> Write:
    dtype = np.dtype(leaf.dtype)

    def check(row: int, value: Any) -> None:
        del row
        fitted(value, leaf, dtype, _HAS)

    return check


def _leaf_writer(leaf: Leaf, array: Array) -> Write:
    dtype, shape = array.dtype, leaf.shape

    def write(row: int, value: Any) -> None:
        if type(value) is np.ndarray and value.dtype is dtype and value.shape == shape:
            array[row] = value
        else:
            put(array, row, value, leaf, _HAS)

    return write


def _dict_writer(writers: dict[Any, Write], path: str) -> Write:
    items = list(writers.items())

    def write(row: int, value: Any) -> None:
        if not isinstance(value, Mapping) or value.keys() != writers.keys():
            got = list(value) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(
                f"{path}: the observation should be a dict of {list(writers)}, got {got}"
            )
        for key, write_part in items:
            write_part(row, value[key])

    return write


def _tuple_writer(writers: list[Write], path: str) -> Write:
    def write(row: int, value: Any) -> None:
        if not isinstance(value, Sequence) or len(value) != len(writers):
            raise ValueError(
                f"{path}: the observation should be a tuple of {len(writers)}, got {shown(value)}"
            )
        for write_part, part in zip(writers, value, strict=True):
            write_part(row, part)

    return write
