"""Parts of arrays that several publishers hold, and the plan which part to fetch from which."""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from moolink.data import nodes
from moolink.internal.integers import integer_of
from moolink.rpc.serving import tuples_of

Region: TypeAlias = tuple[tuple[int, int], ...]
"""For each dimension the first index and the one after the last."""

Where: TypeAlias = Callable[[str, tuple[int, ...]], tuple[slice, ...] | None]

_MOST_CELLS = 1 << 20  # of the grid on which coverage is checked


@nodes.leaf
@dataclasses.dataclass(frozen=True)
class Shard:
    """A leaf of a tree to publish: a part of an array that several publishers hold together.

    For a sharded `jax.Array` and a process with one device, set
    ``s = array.addressable_shards[0]`` and make
    ``Shard(s.data, [part.start or 0 for part in s.index], array.shape)``.

    Attributes:
        array: the part, an array of any framework.
        start: the index of its first element in the whole array, one integer a dimension.
        shape: the shape of the whole array.

    Raises:
        TypeError: the part is no array.
        ValueError: the part is not inside the whole array.
    """

    array: Any
    start: Sequence[int]
    shape: Sequence[int]

    def __post_init__(self) -> None:
        """Checks that the part is inside the whole array."""
        if not hasattr(self.array, "shape"):
            raise TypeError(f"a part must be an array, got a {type(self.array).__qualname__}")
        part = tuple(self.array.shape)
        start, shape = (tuple(map(operator.index, given)) for given in (self.start, self.shape))
        fits = len(part) == len(start) == len(shape) and all(
            first >= 0 and first + size <= whole
            for first, size, whole in zip(start, part, shape, strict=True)
        )
        if not fits:
            raise ValueError(f"a part of shape {part} at {start} is not in an array of {shape}")
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "shape", shape)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A region of the `field`-th array, to be fetched from one publisher."""

    field: int
    region: Region


def region_of(start: Sequence[int], shape: Sequence[int]) -> Region:
    """The region of a part."""
    return tuple((first, first + size) for first, size in zip(start, shape, strict=True))


def pieces_given(given: Any) -> list[Piece]:
    """The pieces that a peer has sent, as pairs of an array's number and a region.

    Raises:
        TypeError, ValueError: `given` has another form; the message names the wrong part.
    """
    pairs = tuples_of(given, 2, "pieces must be pairs of an array and a region")
    return [Piece(integer_of(array, "array"), _region_given(region)) for array, region in pairs]


def _region_given(given: Any) -> Region:
    pairs = tuples_of(given, 2, "a region must be pairs of indices")
    return tuple((integer_of(a, "index", least=0), integer_of(b, "index", a)) for a, b in pairs)


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - first for first, stop in region)


def wanted_region(where: Where, path: str, shape: tuple[int, ...]) -> Region:
    """The region of an array that a subscriber wants.

    Raises:
        ValueError: `where` returns something else than slices of the array's dimensions.
    """
    index = where(path, shape)
    index = () if index is None else index
    if not isinstance(index, tuple) or len(index) > len(shape):
        raise ValueError(f"{path}: {index!r} is no part of an array of shape {shape}")
    index += (slice(None),) * (len(shape) - len(index))
    region = []
    for part, size in zip(index, shape, strict=True):
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise ValueError(f"{path}: a part is made of slices without a step, got {part!r}")
        first, stop, _ = part.indices(size)
        region.append((first, max(first, stop)))
    return tuple(region)


def intersection(a: Region, b: Region) -> Region | None:
    """The overlap of two regions of one array; None: they have none."""
    common = tuple(
        (max(one[0], other[0]), min(one[1], other[1])) for one, other in zip(a, b, strict=True)
    )
    return None if any(first >= stop for first, stop in common) else common


def relative(region: Region, to: Region) -> tuple[slice, ...]:
    """The index of a region in an array that holds the region `to`."""
    return tuple(
        slice(first - base, stop - base)
        for (first, stop), (base, _) in zip(region, to, strict=True)
    )


def contains(outer: Region, inner: Region) -> bool:
    return len(outer) == len(inner) and all(
        a <= first and stop <= b for (a, b), (first, stop) in zip(outer, inner, strict=True)
    )


def plan(
    wanted: Sequence[Region], held: Sequence[Sequence[Region]], paths: Sequence[str]
) -> list[list[Piece]]:
    """For each publisher, the pieces to fetch from it.

    An array that several publishers hold whole comes from one of them, in turn.

    Args:
        wanted: the region of each array.
        held: for each publisher, the region of each array that it holds.
        paths: the arrays' paths, for errors.

    Raises:
        ValueError: no publisher holds some elements of an array.
    """
    pieces: list[list[Piece]] = [[] for _ in held]
    for field, region in enumerate(wanted):
        found = [
            (publisher, common)
            for publisher, regions in enumerate(held)
            if (common := intersection(region, regions[field])) is not None
        ]
        found = found[field % len(found) :] + found[: field % len(found)] if found else []
        for publisher, part in _cover(region, found, paths[field]):
            pieces[publisher].append(Piece(field, part))
    return pieces


def _cover(region: Region, found: list[tuple[int, Region]], path: str) -> list[tuple[int, Region]]:
    """The parts that together cover a region."""
    if any(first == stop for first, stop in region):
        return []
    edges = [
        sorted({*bounds, *(edge for _, part in found for edge in part[dim])})
        for dim, bounds in enumerate(region)
    ]
    sizes = [len(edge) - 1 for edge in edges]
    if np.prod(sizes, dtype=np.float64) > _MOST_CELLS:
        raise ValueError(f"{path}: its publishers' parts are too irregular")
    covered = np.zeros(sizes, np.bool_)
    chosen = []
    for publisher, part in found:
        cells = tuple(
            slice(bisect.bisect_left(edge, first), bisect.bisect_left(edge, stop))
            for edge, (first, stop) in zip(edges, part, strict=True)
        )
        if not covered[cells].all():
            covered[cells] = True
            chosen.append((publisher, part))
    if not covered.all():
        raise ValueError(f"{path}: no publisher has all of {region}")
    return chosen
