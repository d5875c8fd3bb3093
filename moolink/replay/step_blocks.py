"""The steps that a writer keeps, stacked in blocks."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import numpy as np

from moolink.data import skeletons

_BLOCK_BYTES = 1 << 20  # of an array in a block, unless one step has more

Column = tuple[str, str, tuple[int, ...]]
"""The name, dtype and shape of an array of a step."""


@dataclasses.dataclass(slots=True)
class _Block:
    first: int  # the number of its first step
    size: int
    arrays: list[Any]
    used: int = 0


class StepBlocks:
    """Steps by number. Consecutive steps lie side by side in memory, and are sent as they are.

    Args:
        columns: the arrays of a step.
        size: the number of steps that are usually sent together.
    """

    def __init__(self, columns: list[Column], size: int) -> None:
        self._columns = columns
        self._size = size
        self._dtypes: list[Any] = [None] * len(columns)  # of the last step's arrays
        self._blocks: collections.deque[_Block] = collections.deque()
        self.end = 0
        """The number of the next step."""

    def arrays_of(self, leaves: list[Any]) -> list[Any]:
        """Returns the leaves of a step as arrays.

        Raises:
            TypeError, ValueError: they differ from the columns.
        """
        arrays = []
        for i, (leaf, (path, dtype, shape)) in enumerate(zip(leaves, self._columns, strict=True)):
            array = skeletons.as_array(leaf, dtype, path)
            arrays.append(array)
            if getattr(array, "dtype", None) is self._dtypes[i] and array.shape == shape:
                continue  # finding the name of a dtype is slow
            given = skeletons.layout_of(array)
            if given != (dtype, shape):
                raise ValueError(f"{path}: expected {dtype} {shape}, got {given[0]} {given[1]}")
            if type(array.dtype) is not type(self._dtypes[i]) and self._blocks:
                self._blocks[-1].size = self._blocks[-1].used  # it is another library's
            self._dtypes[i] = array.dtype
        return arrays

    def append(self, arrays: list[Any]) -> None:
        """Copies a step to the end."""
        if not self._blocks or self._blocks[-1].used == self._blocks[-1].size:
            self._blocks.append(self._new_block(arrays))
        block = self._blocks[-1]
        place = block.used
        for array, rows in zip(arrays, block.arrays, strict=True):
            rows[place] = array.detach() if hasattr(array, "detach") else array
        block.used = place + 1
        self.end += 1

    def _new_block(self, arrays: list[Any]) -> _Block:
        largest = max(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
        size = max(1, min(self._size, _BLOCK_BYTES // max(1, largest)))
        made = [
            array.new_empty((size, *array.shape))
            if hasattr(array, "new_empty")
            else np.empty((size, *array.shape), array.dtype)
            for array in arrays
        ]
        return _Block(self.end, size, made)

    def between(self, begin: int, end: int) -> list[tuple[int, list[Any]]]:
        """Returns the steps from `begin` up to `end`: for each block, the number of steps and their
        stacked arrays."""
        parts = []
        for block in self._blocks:
            first = max(begin - block.first, 0)
            last = min(end - block.first, block.used)
            if first < last:
                parts.append((last - first, [array[first:last] for array in block.arrays]))
        return parts

    def gives_up(self, first: int) -> bool:
        """Returns whether forgetting the steps before `first` frees memory."""
        return bool(self._blocks) and self._blocks[0].first + self._blocks[0].size <= first

    def forget(self, first: int) -> None:
        """Frees the blocks in which all steps are before `first`."""
        while self.gives_up(first):
            self._blocks.popleft()
