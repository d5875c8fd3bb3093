"""How a model's parameters lie in a bucket, and the line of text by which peers compare models.

Shared by the adapters, so that a model is the same to the group whatever framework it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod


@dataclass(frozen=True)
class Description:
    """One parameter or buffer, as all frameworks would describe it.

    Args:
        dtype: name of the element type, as numpy spells it (``bfloat16`` as ml_dtypes does).
        reduced: whether gradients of it are reduced; otherwise it travels with the state only.
    """

    dtype: str
    shape: tuple[int, ...]
    reduced: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape)) + ("," if len(self.shape) == 1 else "")
        return f"{self.dtype}({shape})" + ("" if self.reduced else " fixed")


@dataclass(frozen=True)
class Section:
    """The parameters whose gradients are summed in one dtype, and where they lie in the bucket.

    Args:
        indices: of the parameters, among all of the model's.
        counts: their elements.
        begin: bytes, a multiple of 64; ``itemsize``: bytes.
    """

    dtype: str
    itemsize: int
    indices: tuple[int, ...]
    counts: tuple[int, ...]
    begin: int

    @property
    def count(self) -> int:
        """Elements of the section."""
        return sum(self.counts)

    @property
    def end(self) -> int:
        """Where it ends in the bucket, in bytes."""
        return self.begin + self.count * self.itemsize

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """(index of the parameter, elements, offset in the bucket in bytes) of each."""
        ends = accumulate(self.counts)
        return [
            (index, count, self.begin + (end - count) * self.itemsize)
            for index, count, end in zip(self.indices, self.counts, ends, strict=True)
        ]


def summed_in(dtype: str) -> str:
    """A half times a batch size need not be finite, and a sum of many is not exact enough."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def sections(parameters: Sequence[Description]) -> list[Section]:
    """Returns a section for each dtype, so that a section is one kernel call. The bucket begins
    with the last parameters, because a backward pass computes their gradients first."""
    by_dtype: dict[str, list[int]] = {}
    for index, parameter in reversed(list(enumerate(parameters))):
        if parameter.reduced:
            by_dtype.setdefault(summed_in(parameter.dtype), []).append(index)
    result: list[Section] = []
    begin = 0
    for dtype, indices in by_dtype.items():
        counts = tuple(parameters[i].size for i in indices)
        result.append(Section(dtype, _itemsize(dtype), tuple(indices), counts, begin))
        begin = -(-result[-1].end // 64) * 64
    return result


def layout(parameters: Iterable[Description], buffers: Iterable[Description]) -> str:
    """A readable line of dtypes and shapes, by which peers find out that their models differ."""
    return " ".join(map(str, [*parameters, *buffers]))


def _itemsize(dtype: str) -> int:
    """Of those that gradients are summed in, all of which say it in their names."""
    return int("".join(c for c in dtype if c.isdigit())) // 8
