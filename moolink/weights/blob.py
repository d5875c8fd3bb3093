"""A tree of arrays as one block of bytes, which peers can map or fetch in chunks."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moolink import _core
from moolink.data import skeletons, trees
from moolink.data.device_arrays import numpy_dtype
from moolink.data.skeletons import Skeleton
from moolink.rpc import lending
from moolink.weights import shards
from moolink.weights.shards import Region, Shard

Bytes = npt.NDArray[np.uint8]
Arrays = Literal["same", "numpy", "torch", "jax"]
FloatType = Literal["float32", "float16", "bfloat16"]

CHUNK = 512 << 10  # bytes
_ALIGNMENT = 64
FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Field:
    """An array in a block, or a part of one: of an array of shape `whole`, that from `start`."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    framework: str  # of the published array: "numpy", "torch", "jax" or "number"
    start: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def region(self) -> Region:
        return shards.region_of(self.start, self.shape)

    @property
    def wire(self) -> tuple[Any, ...]:
        return self.dtype, self.shape, self.offset, self.framework, self.start, self.whole


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a tree lie in a block."""

    skeleton: Skeleton
    fields: tuple[Field, ...]
    size: int

    def to_wire(self) -> tuple[Any, ...]:
        return self.skeleton, [field.wire for field in self.fields], self.size

    @classmethod
    def from_wire(cls, wire: tuple[Any, ...]) -> Layout:
        skeleton, fields, size = wire
        return cls(skeleton, tuple(_field(*field) for field in fields), size)

    @property
    def chunks(self) -> int:
        return -(-self.size // CHUNK)


def pack(tree: Any, *, allow_pickle: bool = False) -> tuple[Layout, Bytes]:
    """Copies a tree into a new block. `allow_pickle`: as of the peer that sends its containers.

    Raises:
        TypeError: a leaf is no array, tensor or number, or a container cannot be sent.
    """
    given, skeleton = skeletons.flatten(tree)
    _require_sendable(skeleton, allow_pickle)
    values = [value.array if isinstance(value, Shard) else value for value in given]
    _check(values, skeleton)
    leaves, _ = trees.flatten(values, "weights")
    parts = []
    for value, leaf in zip(given, leaves, strict=True):
        shape = tuple(leaf.array.shape)
        start, whole = (
            (value.start, value.shape) if isinstance(value, Shard) else ((0,) * len(shape), shape)
        )
        parts.append(_Part(leaf.dtype, shape, leaf.kind, tuple(start), tuple(whole)))
    layout = _layout(skeleton, parts)
    block = lending.empty(layout.size, "uint8")
    _core.fill_block(
        block, [leaf.array for leaf in leaves], [field.offset for field in layout.fields]
    )
    return layout, block


def _require_sendable(skeleton: Skeleton, allow_pickle: bool) -> None:
    # Else subscribers would wait for a version that cannot be sent.
    try:
        _core.encode(skeleton, allow_pickle=allow_pickle)
    except TypeError as error:
        raise TypeError(f"weights: {error}") from None


def _check(values: list[Any], skeleton: Skeleton) -> None:
    for value, path in zip(values, skeletons.paths(skeleton, "weights"), strict=True):
        dtype = getattr(skeletons.as_array(value, path=path), "dtype", None)
        if dtype is None or getattr(dtype, "hasobject", False):
            what = f"a {type(value).__qualname__}" if dtype is None else "an array of object"
            hint = "; publish its state_dict() instead" if hasattr(value, "state_dict") else ""
            raise TypeError(
                f"{path}: {what} cannot be published; only arrays, tensors and numbers can{hint}"
            )


def converted(layout: Layout, block: Bytes, dtype: FloatType) -> tuple[Layout, Bytes]:
    """A block in which the floating-point numbers are of another type, rounded to nearest even."""
    parts = [_part_of(field) for field in layout.fields]
    parts = [part._replace(dtype=dtype) if part.dtype in FLOATS else part for part in parts]
    result = _layout(layout.skeleton, parts)
    target = lending.empty(result.size, "uint8")
    for old, new in zip(layout.fields, result.fields, strict=True):
        source = _place(block, old, _seen_as(old.dtype))
        place = _place(target, new, _seen_as(new.dtype))
        if old.dtype == new.dtype:
            np.copyto(place, source)
        elif new.dtype == "bfloat16":
            np.copyto(place, _narrow(_as_float(source, old.dtype)))
        else:
            np.copyto(place, _as_float(source, old.dtype), casting="same_kind")
    return result, target


def unpack(layout: Layout, block: Bytes, arrays: Arrays) -> Any:
    """The tree in a block. Numpy's and JAX's arrays are views of it, numbers and torch's tensors
    copies; a framework that is not imported here is replaced by numpy."""
    leaves = [_restored(block, field, arrays) for field in layout.fields]
    return skeletons.unflatten(layout.skeleton, leaves)


def equal_chunks(old: Bytes, new: Bytes) -> list[int]:
    """The chunks that two blocks of one layout have in common."""
    size = len(new)
    return [
        i
        for i in range(-(-size // CHUNK))
        if np.array_equal(
            _words(old[i * CHUNK : (i + 1) * CHUNK]), _words(new[i * CHUNK : (i + 1) * CHUNK])
        )
    ]


def _words(chunk: Bytes) -> npt.NDArray[Any]:
    return chunk.view(np.uint64) if len(chunk) % 8 == 0 else chunk


class _Part(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    framework: str
    start: tuple[int, ...]
    whole: tuple[int, ...]


def _part_of(field: Field) -> _Part:
    return _Part(field.dtype, field.shape, field.framework, field.start, field.whole)


def _field(dtype: str, shape: Any, offset: int, framework: str, start: Any, whole: Any) -> Field:
    return Field(dtype, tuple(shape), offset, framework, tuple(start), tuple(whole))


def _layout(skeleton: Skeleton, parts: Sequence[_Part]) -> Layout:
    fields: list[Field] = []
    end = 0
    for part in parts:
        dtype, shape, framework, start, whole = part
        fields.append(Field(dtype, shape, end, framework, start, whole))
        size = math.prod(shape) * _seen_as(dtype).itemsize
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return Layout(skeleton, tuple(fields), max(end, _ALIGNMENT))


def of_parts(layout: Layout, regions: Sequence[Region]) -> Layout:
    """The layout of a block of these regions of the whole arrays."""
    parts = [
        _part_of(field)._replace(
            shape=shards.shape_of(region), start=tuple(first for first, _ in region)
        )
        for field, region in zip(layout.fields, regions, strict=True)
    ]
    return _layout(layout.skeleton, parts)


def part(layout: Layout, block: Bytes, index: int, region: Region) -> npt.NDArray[Any]:
    """A view of a region of the `index`-th array, as numpy sees its elements.

    Raises:
        ValueError: the block does not have all of it.
    """
    if not 0 <= index < len(layout.fields):
        raise ValueError(f"there is no array {index}: the tree has {len(layout.fields)}")
    field = layout.fields[index]
    if not shards.contains(field.region, region):
        raise ValueError(f"{region} is not in {field.region}, which this publisher has")
    whole = _place(block, field, _seen_as(field.dtype))
    part: Any = (*shards.relative(region, field.region), ...)  # an array also of a number
    view: npt.NDArray[Any] = whole[part]
    return view


@functools.cache
def _seen_as(dtype: str) -> np.dtype[Any]:
    """Numpy's dtype for the bytes of a dtype, which it may not have itself."""
    return np.dtype(trees.seen_as(dtype, _core.item_size(dtype)))


@functools.cache
def _named(dtype: str) -> np.dtype[Any]:
    named: np.dtype[Any] = numpy_dtype(dtype)
    return named


def _place(block: Bytes, field: Field, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns a view of a field's elements, which is read-only if the block is."""
    return np.ndarray(field.shape, dtype, block, field.offset)


def _as_float(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    if dtype != "bfloat16":
        return array.astype(np.float32) if dtype == "float16" else array
    return (array.astype(np.uint32) << 16).view(np.float32)


def _narrow(array: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """float32 as bfloat16: to nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    quiet = bits | 0x400000
    return (np.where(np.isnan(array), quiet, rounded) >> 16).astype(np.uint16)


def _restored(block: Bytes, field: Field, arrays: Arrays) -> Any:
    framework = field.framework if arrays == "same" else arrays
    if field.framework == "numpy" == framework:
        return _place(block, field, _named(field.dtype))
    view = _place(block, field, _seen_as(field.dtype))
    if field.framework == "number":
        number = _as_float(view, field.dtype) if field.dtype == "bfloat16" else view
        return number.item() if number.ndim == 0 else number.copy()
    if framework == "torch" and (arrays == "torch" or "torch" in sys.modules):
        return trees.as_torch(view.copy(), field.dtype)
    named = view.view(_named(field.dtype))
    if framework == "jax" and (arrays == "jax" or "jax" in sys.modules):
        import jax

        return jax.numpy.asarray(named)
    return named
