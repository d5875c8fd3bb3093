"""The infos of vector environments: arrays of the rows of each, joined into arrays of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
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


def add(infos: dict[str, Any], info: dict[str, Any], row: int, size: int) -> None:
    """Puts an environment's info at its row in `size`, as Gymnasium's vector environments do.

    An array whose dtype or shape cannot hold a later value changes to one that can.
    """
    for key, value in info.items():
        batch = infos.get(key)
        if isinstance(value, dict) and isinstance(batch, dict | NoneType) and key != "final_obs":
            batch = {} if batch is None else batch
            add(batch, value, row, size)
        else:
            if isinstance(batch, dict):
                batch = _objects([of_row(batch, i) for i in range(size)])
            one = _objects([value]) if key == "final_obs" else _one(value)
            batch = _with_room(batch, one, size)
            batch[row] = value
        infos[key] = batch
        infos.setdefault(f"_{key}", np.zeros(size, np.bool_))[row] = True


def _one(value: Any) -> Array:
    """An array of one row, of the dtype and shape that a batch with the value has."""
    if type(value) in (int, float, bool) or isinstance(value, np.number):
        number = np.asarray([value])
        if number.dtype != object:  # the dtype of an integer with too many bits
            return number
    elif isinstance(value, np.ndarray):
        return value[None]
    return _objects([value])


def of_row(infos: dict[str, Any], row: int) -> dict[str, Any]:
    """A row's info out of a batch from `by_row`, where "_key" masks the rows that have a key."""
    found = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        masks_another = key.startswith("_") and key[1:] in infos
        if masks_another or (mask is not None and not mask[row]):
            continue
        found[key] = of_row(values, row) if isinstance(values, dict) else values[row]
    return found


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
