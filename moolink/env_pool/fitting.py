"""Whether a value can be stored in the array for it: by shape, by dtype, and by value for integers.

numpy would broadcast and wrap silently. All values of environments and all actions are checked
here, except those that already have the dtype and shape of the array.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from moolink.data.frameworks import as_numpy
from moolink.env_pool.spaces import Leaf, Tree, leaves, parts
from moolink.internal.shown import shown

Array = npt.NDArray[Any]

How: TypeAlias = Literal["any value", "integers", "floats", "no value"]


class _Trap(threading.local):
    """`run` calls a function of numpy so that an overflow raises FloatingPointError.

    The setting is in a context of its own: entering np.errstate takes longer than small copies.
    """

    def __init__(self) -> None:
        self.run: Callable[..., Any] = _in_errstate
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, settings were a thread's
            self.run = contextvars.Context().run
            self.run(functools.partial(np.seterr, all="ignore", over="raise"))


def _in_errstate(function: Callable[..., Any], *arguments: Any) -> Any:
    with np.errstate(all="ignore", over="raise"):
        return function(*arguments)


_trap = _Trap()


def fitted(value: Any, leaf: Leaf, dtype: np.dtype[Any], what: str) -> Array:
    """Returns an environment's value as an array that `leaf`'s row of `dtype` can take.

    Args:
        what: the kind of value, for messages: "the observation has".

    Raises:
        ValueError: the shape differs, or a value is outside of the dtype.
        TypeError: the dtype cannot stand for the space's.
    """
    return converted(_shaped(value, leaf, dtype, what), dtype, leaf, what)


def put(array: Array, row: int, value: Any, leaf: Leaf, what: str) -> None:
    """Copies an environment's value into a row of `array`; raises as `fitted` does."""
    assign(array, row, _shaped(value, leaf, array.dtype, what), leaf, what)


def _shaped(value: Any, leaf: Leaf, dtype: np.dtype[Any], what: str) -> Array:
    try:
        source = as_numpy(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise TypeError(f"{leaf.path}: {shown(value)} is no array: {error}") from error
    if source.shape != leaf.shape:
        raise ValueError(
            f"{leaf.path}: {what} shape {source.shape}, its space has {leaf.shape} ({leaf.space}): "
            f"{shown(value)} of dtype {source.dtype} for dtype {dtype}"
        )
    return source


def fits(tree: Tree, value: Any) -> bool:
    """Tells whether `value` has the structure of `tree`, and its parts can be stored."""
    try:
        found = parts(tree, value, "")
        for leaf, part in zip(leaves(tree), found, strict=True):
            fitted(part, leaf, np.dtype(leaf.dtype), "it has")
    except (ValueError, TypeError):
        return False
    return True


def converted(source: Array, dtype: np.dtype[Any], leaf: Leaf, what: str) -> Array:
    """Returns an array that can be assigned to one of `dtype`; raises as `fitted` does."""
    if source.dtype is dtype:
        return source
    how = _how(source.dtype, dtype)
    if how == "any value" or (how == "integers" and _in_range(source, dtype)):
        return source
    if how == "floats":
        try:
            narrowed: Array = _trap.run(source.astype, dtype)
            return narrowed
        except FloatingPointError:
            pass  # reported below, with the number
    raise _misfit(source, dtype, leaf, what)


def assign(array: Array, index: int | slice, source: Array, leaf: Leaf, what: str) -> None:
    """Does ``array[index] = source``, of the same shape, without a copy on the way.

    Raises:
        ValueError, TypeError: as `fitted`; floats that are too great are infinite in `array` then.
    """
    dtype = array.dtype
    if source.dtype is dtype or _how(source.dtype, dtype) != "floats":
        array[index] = converted(source, dtype, leaf, what)
        return
    try:
        _trap.run(operator.setitem, array, index, source)
    except FloatingPointError:
        raise _misfit(source, dtype, leaf, what) from None


@functools.lru_cache(256)
def _how(source: np.dtype[Any], dtype: np.dtype[Any]) -> How:
    """Tells which values of one dtype another one can hold; others are checked by value."""
    if source.kind not in "biufc":
        return "no value"
    if np.can_cast(source, dtype, "safe"):
        return "any value"
    if source.kind in "iub" and dtype.kind in "iub":
        return "integers"
    return "floats" if np.can_cast(source, dtype, "same_kind") else "no value"


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _in_range(source: Array, dtype: np.dtype[Any]) -> bool:
    low, high = _limits(dtype)  # no temporary arrays
    return source.size == 0 or (low <= int(source.min()) and int(source.max()) <= high)


def _misfit(source: Array, dtype: np.dtype[Any], leaf: Leaf, what: str) -> Exception:
    """The error for an array with a value that `dtype` cannot hold."""
    how = _how(source.dtype, dtype)
    if how == "integers":
        low, high = _limits(dtype)
        bad = (source < low) | (source > high)
    elif how == "floats":
        with np.errstate(over="ignore"):
            bad = np.isinf(source.astype(dtype)) & ~np.isinf(source)
    else:
        bad = np.ones(source.shape, np.bool_)
    at = tuple(np.argwhere(bad)[0].tolist()) if bad.size else None
    value = "no value" if at is None else shown(source.item(*at))
    place = f" at {list(at)}" if at else ""
    kind = TypeError if how == "no value" else ValueError
    return kind(
        f"{leaf.path}: {what} dtype {source.dtype}, its space has {dtype} ({leaf.space}), which "
        f"cannot hold {value}{place}"
    )
