"""The infos of vector environments: arrays of the rows of each, joined into arrays of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.data.frameworks import as_numpy

Array = npt.NDArray[Any]

_NUMBERS = frozenset("biufc")  # kinds of dtypes that numpy converts into each other


def by_row(infos: dict[str, Any], rows: int) -> dict[str, Any]:
    """Infos as arrays of `rows`; every row gets a value that is not one for each row."""
    result: dict[str, Any] = {}
    for key, value in infos.items():
        if isinstance(value, dict):
            result[key] = by_row(value, rows)
        elif tuple(getattr(value, "shape", ())[:1]) == (rows,):
            result[key] = as_numpy(value)
        elif isinstance(value, list | tuple) and len(value) == rows:
            result[key] = _array_of(value)
        else:
            result[key] = _array_of([value] * rows)
    return result


def merge(infos: dict[str, Any], info: dict[str, Any], position: int, size: int) -> None:
    """Puts the infos of a vector environment, from `by_row`, at its rows' position in `size`."""
    for key, value in info.items():
        if isinstance(value, dict):
            merge(infos.setdefault(key, {}), value, position, size)
            continue
        part = slice(position, position + len(value))
        infos[key] = array = _with_room(infos.get(key), value, size)
        array[part] = value if array.ndim == value.ndim else _objects(value)
        mask = f"_{key}"
        if not key.startswith("_") and mask not in info:
            infos.setdefault(mask, np.zeros(size, np.bool_))[part] = True


def _with_room(array: Array | None, values: Array, size: int) -> Array:
    """An array of `size` rows, with those of `array`, whose dtype and shape hold `values` too."""
    if array is None:
        shape = (size, *values.shape[1:])
        empty = None if values.dtype == object else np.zeros((), values.dtype)
        return np.full(shape, empty, values.dtype)
    kinds = {array.dtype.kind, values.dtype.kind}
    if array.shape[1:] == values.shape[1:] and (len(kinds) == 1 or kinds <= _NUMBERS):
        return array.astype(np.promote_types(array.dtype, values.dtype), copy=False)
    return _objects(array)


def _array_of(values: Sequence[Any]) -> Array:
    plain = all(isinstance(value, bool | int | float | np.number | np.bool_) for value in values)
    return np.asarray(values) if plain else _objects(values)


def _objects(values: Sequence[Any] | Array) -> Array:
    """An array of one object a row."""
    array = np.empty(len(values), object)
    for row, value in enumerate(values):
        array[row] = value
    return array
