"""Checks a policy's actions and copies them into the memory that the workers read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moolink import _core
from moolink.data.frameworks import as_numpy, is_torch
from moolink.env_pool.fitting import converted
from moolink.env_pool.spaces import Leaf, Tree, leaves, parts

Array = npt.NDArray[Any]


class ActionWriter:
    """Copies one batch's actions into its shared arrays, whatever their strides and framework."""

    def __init__(self, tree: Tree, arrays: Tree, *, check: bool) -> None:
        self._tree = tree
        self._single = isinstance(tree, Leaf)
        self._check = check
        self._leaves: list[Leaf] = leaves(tree)
        self._arrays: list[Array] = leaves(arrays)
        limits = _range(tree, check=check)
        self._numbers = None if limits is None else _core.ActionNumbers(self._arrays[0], *limits)

    def write(self, action: Any) -> bool:
        """Copies the actions of all rows; returns whether they are torch tensors.

        Raises:
            ValueError: structure or shape are wrong, or a value is outside of its space.
            TypeError: the dtype cannot stand for the space's.
        """
        if self._numbers is not None and self._numbers.write(action):
            return False  # The usual case in one call; other actions are checked below.
        values, sources = self._checked(action, None)
        for array, source in zip(self._arrays, sources, strict=True):
            array[...] = source
        return bool(values) and all(is_torch(value) for value in values)

    def write_rows(self, action: Any, rows: npt.NDArray[np.intp]) -> None:
        """Copies the actions of some rows; raises as `write` does."""
        _, sources = self._checked(action, len(rows))
        for array, source in zip(self._arrays, sources, strict=True):
            array[rows] = source

    def _checked(self, action: Any, count: int | None) -> tuple[list[Any], list[Array]]:
        """Returns the arrays of an action for `count` rows, as given and as they are stored."""
        values = [action] if self._single else parts(self._tree, action, "action")
        named = zip(self._leaves, values, strict=True)
        sources = [as_numpy(value, leaf.path) for leaf, value in named]
        fitting = []
        for leaf, array, source in zip(self._leaves, self._arrays, sources, strict=True):
            shape = array.shape if count is None else (count, *array.shape[1:])
            if source.shape != shape:
                raise ValueError(f"{leaf.path}: expected shape {shape}, got {source.shape}")
            if self._check and source.dtype.kind in "biuf":
                _require_bounds(leaf, source)
            fitting.append(converted(source, array.dtype, leaf, "the actions have"))
        return values, fitting


def _range(tree: Tree, *, check: bool) -> tuple[int, int] | None:
    """Returns the least and the greatest action if actions are int64 numbers, else None."""
    if not isinstance(tree, Leaf) or not tree.scalar or tree.dtype != np.dtype(np.int64).str:
        return None
    limits = np.iinfo(np.int64)
    low = limits.min if not check or tree.low is None else int(tree.low)
    high = limits.max if not check or tree.high is None else int(tree.high)
    return int(low), int(high)


def _require_bounds(leaf: Leaf, source: Array) -> None:
    if source.size == 0:
        return
    if (
        leaf.scalar
        and leaf.low is not None
        and leaf.low <= source.min()
        and source.max() <= leaf.high
    ):
        return  # The usual case, Discrete: two passes without temporaries.
    good = np.ones(source.shape, np.bool_)
    if source.dtype.kind == "f":
        good &= ~np.isnan(source)
    if leaf.low is not None:
        good &= source >= leaf.low
    if leaf.high is not None:
        good &= source <= leaf.high
    if not good.all():
        index = tuple(int(i) for i in np.argwhere(~good)[0])
        raise ValueError(
            f"{leaf.path}{list(index)} is {source[index]}, which is outside of {leaf.space}"
        )
