"""Whether a value can be stored in the array for it: by shape, by dtype, and by value for integers.

numpy would broadcast and wrap silently. All values of environments and all actions are checked
here, except those that already have the dtype and shape of the array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.data.frameworks import as_numpy
from moolink.env_pool.spaces import Leaf, Tree, leaves, parts
from moolink.internal.shown import shown

Array = npt.NDArray[Any]


def fitted(value: Any, leaf: Leaf, dtype: np.dtype[Any], what: str) -> Array:
    """Returns an environment's value as an array that `leaf`'s row of `dtype` can take.

    Args:
        what: the kind of value, for messages: "the observation has".

    Raises:
        ValueError: the shape differs, or a value is outside of the dtype.
        TypeError: the dtype cannot stand for the space's.
    """
    try:
        source = as_numpy(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise TypeError(f"{leaf.path}: {shown(value)} is no array: {error}") from error
    if source.shape != leaf.shape:
        raise ValueError(
            f"{leaf.path}: {what} shape {source.shape}, its space has {leaf.shape} ({leaf.space}): "
            f"{shown(value)} of dtype {source.dtype} for dtype {dtype}"
        )
    return converted(source, dtype, f"{leaf.path}: {what}", leaf.space)


def fits(tree: Tree, value: Any) -> bool:
    """Tells whether `value` has the structure of `tree`, and its parts can be stored."""
    try:
        found = parts(tree, value, "")
        for leaf, part in zip(leaves(tree), found, strict=True):
            fitted(part, leaf, np.dtype(leaf.dtype), "it has")
    except (ValueError, TypeError):
        return False
    return True


def converted(source: Array, dtype: np.dtype[Any], what: str, space: str) -> Array:
    """Returns an array that can be assigned to one of `dtype`; raises as `fitted` does."""
    if source.dtype is dtype:
        return source
    bad: Array | None = None
    kinds = source.dtype.kind + dtype.kind
    if kinds[0] in "iub" and kinds[1] in "iub":
        bad = _outside(source, dtype)
        error: type[Exception] = ValueError
    elif kinds[0] in "biufc" and np.can_cast(source.dtype, dtype, "same_kind"):
        if kinds[1] in "iub" or np.can_cast(source.dtype, dtype, "safe"):
            return source
        source, bad = _narrowed(source, dtype)
        error = ValueError
    else:
        bad, error = np.ones(source.shape, np.bool_), TypeError
    if bad is None:
        return source
    at = tuple(np.argwhere(bad)[0].tolist()) if bad.size else None
    value = "no value" if at is None else shown(source.item(*at))
    place = f" at {list(at)}" if at else ""
    raise error(
        f"{what} dtype {source.dtype}, its space has {dtype} ({space}), which cannot hold "
        f"{value}{place}"
    )


def _outside(source: Array, dtype: np.dtype[Any]) -> Array | None:
    """Marks the integers that `dtype` cannot hold; None if there are none."""
    if source.size == 0 or np.can_cast(source.dtype, dtype, "safe"):
        return None
    if dtype.kind == "b":
        low, high = 0, 1
    else:
        limits = np.iinfo(dtype)
        low, high = int(limits.min), int(limits.max)
    if low <= int(source.min()) and int(source.max()) <= high:  # no temporary arrays
        return None
    bad: Array = (source < low) | (source > high)
    return bad


def _narrowed(source: Array, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    """Converts numbers to floats that may hold less, and marks those that would be infinite."""
    try:
        with np.errstate(over="raise"):
            return source.astype(dtype), None
    except FloatingPointError:
        with np.errstate(over="ignore"):
            return source, np.isinf(source.astype(dtype)) & ~np.isinf(source)
