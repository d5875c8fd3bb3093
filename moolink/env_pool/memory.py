"""The shared memory of a pool: what lies where, and numpy views of it.

One sealed memfd segment, sized by what it holds. Both sides compute the same layout from the same
`PoolShape`. Actions are written before the workers' doorbells ring, outputs before the `served`
word and the batch's bell; ringing and hearing a bell (an eventfd) orders memory accesses.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.env_pool.spaces import Leaf, Tree, map_tree

Array = npt.NDArray[Any]

_LINE = 64  # bytes; every array starts on a cache line of its own
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# What a step returns beside the observation, for each environment of the batch.
RESULTS = {
    "reward": np.dtype(np.float32),
    "done": np.dtype(np.bool_),
    "terminated": np.dtype(np.bool_),
    "truncated": np.dtype(np.bool_),
    "episode_return": np.dtype(np.float32),
    "episode_step": np.dtype(np.int64),
}
FINAL_OBSERVATION = "final_observation"


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """Everything that determines the layout.

    Attributes:
        workers: number of worker processes.
        batches: number of batches (moolib's num_batches).
        batch_size: environments of one batch.
        observation, action: trees of `Leaf`.
        terminal_observation: whether terminal observations are kept.
    """

    workers: int
    batches: int
    batch_size: int
    observation: Tree
    action: Tree
    terminal_observation: bool


def rows_of(worker: int, workers: int, batch_size: int) -> range:
    """Returns the rows of every batch whose environments `worker` runs."""
    return range(worker * batch_size // workers, (worker + 1) * batch_size // workers)


@dataclasses.dataclass(frozen=True)
class BatchArrays:
    """Views of one batch; the first dimension of each array is the batch."""

    observation: Tree
    final_observation: Tree | None
    action: Tree
    results: dict[str, Array]


@dataclasses.dataclass(frozen=True)
class _Slot:
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def view(self, memory: mmap.mmap) -> Array:
        return np.ndarray(self.shape, self.dtype, memory, self.offset)


class _Layout:
    """Gives out slots one after the other."""

    def __init__(self) -> None:
        self.size = 0

    def slot(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> _Slot:
        offset = -(-self.size // _LINE) * _LINE
        slot = _Slot(offset, shape, np.dtype(dtype))
        self.size = offset + int(np.prod(shape, dtype=np.int64)) * slot.dtype.itemsize
        return slot


class PoolMemory:
    """Views of a pool's segment.

    Attributes:
        closing: one word, non-zero when the workers are to end.
        requested: [batches] the number of the newest step of each batch; numbers are unique in the
            pool and grow, 0 means none yet. Written by the pool only.
        served: [workers, batches] the newest step each worker has finished.
        current: [workers] 1 + the environment a worker is running, 0 if none.
        batches: the arrays of each batch.
    """

    def __init__(self, shape: PoolShape, descriptor: int, *, create: bool) -> None:
        """Map the segment behind `descriptor`, after giving it its size if it is to be created."""
        layout = _Layout()
        words = np.uint64
        closing = layout.slot((1,), words)
        requested = layout.slot((shape.batches,), words)
        served = layout.slot((shape.workers, shape.batches), words)
        current = layout.slot((shape.workers,), words)
        batches = [_batch_slots(layout, shape) for _ in range(shape.batches)]
        if create:
            os.ftruncate(descriptor, layout.size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(descriptor, layout.size)
        self.size = layout.size
        self.closing = closing.view(memory)
        self.requested = requested.view(memory)
        self.served = served.view(memory)
        self.current = current.view(memory)
        self.batches = [_view_batch(slots, memory) for slots in batches]


def _batch_slots(layout: _Layout, shape: PoolShape) -> BatchArrays:
    def slot(leaf: Leaf) -> _Slot:
        return layout.slot((shape.batch_size, *leaf.shape), leaf.dtype)

    final = map_tree(slot, shape.observation) if shape.terminal_observation else None
    results: dict[str, Any] = {
        name: layout.slot((shape.batch_size,), dtype) for name, dtype in RESULTS.items()
    }
    return BatchArrays(
        map_tree(slot, shape.observation), final, map_tree(slot, shape.action), results
    )


def _view_batch(slots: BatchArrays, memory: mmap.mmap) -> BatchArrays:
    def view(slot: _Slot) -> Array:
        return slot.view(memory)

    final = slots.final_observation
    return BatchArrays(
        map_tree(view, slots.observation),
        None if final is None else map_tree(view, final),
        map_tree(view, slots.action),
        map_tree(view, slots.results),
    )
