"""The shared memory of a pool: its layout, and numpy views of it.

One sealed memfd segment of the contents' size. Both sides compute the same layout from the same
`PoolShape`. An environment's row is its number in the pool; a batch is a slice of rows. Actions are
written before the request that uses them, outputs before the request is served: see `Board`.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.env_pool.board import Board
from moolink.env_pool.spaces import Leaf, Tree, map_tree

Array = npt.NDArray[Any]

_LINE = 64  # bytes; every array starts on a cache line of its own
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """Everything that determines the layout.

    Attributes:
        workers: number of worker processes.
        batches: number of batches (moolib's num_batches).
        batch_size: environments of one batch.
        observation, action: trees of `Leaf`; None where the space has no fixed layout, and values
            are sent in messages instead.
        final_obs: whether final observations are kept.
        reward: dtype of the rewards.
    """

    workers: int
    batches: int
    batch_size: int
    observation: Tree | None
    action: Tree | None
    final_obs: bool
    reward: str

    @property
    def num_envs(self) -> int:
        """Environments in all batches."""
        return self.batches * self.batch_size


def rows_of(worker: int, workers: int, batch_size: int) -> range:
    """Returns the rows of every batch whose environments `worker` runs."""
    return range(worker * batch_size // workers, (worker + 1) * batch_size // workers)


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
    """Views of a pool's segment; the first dimension of each array is the environment.

    Attributes:
        board: the requests, and the counts of those served.
        observation, final_obs, action: trees of arrays, None if there are none.
        reward, terminated, truncated: the results of each environment's last step.
        begun: whether an episode of the environment was ever begun; survives its worker.
    """

    def __init__(self, shape: PoolShape, descriptor: int, *, create: bool) -> None:
        """Map the segment behind `descriptor`, after giving it its size if it is to be created."""
        layout = _Layout()
        count = shape.num_envs
        words = layout.slot((Board.words(shape.workers, shape.batches, count),), np.uint64)

        def slots(leaf: Leaf) -> _Slot:
            return layout.slot((count, *leaf.shape), leaf.dtype)

        def tree(described: Tree | None) -> Tree | None:
            return None if described is None else map_tree(slots, described)

        observation, action = tree(shape.observation), tree(shape.action)
        final = tree(shape.observation) if shape.final_obs else None
        reward = layout.slot((count,), shape.reward)
        flags = [layout.slot((count,), np.bool_) for _ in range(3)]
        if create:
            os.ftruncate(descriptor, layout.size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(descriptor, layout.size)

        def views(placed: Tree | None) -> Tree | None:
            return None if placed is None else map_tree(lambda slot: slot.view(memory), placed)

        self.board = Board(words.view(memory), shape.workers, shape.batches, count)
        self.observation = views(observation)
        self.final_obs = views(final)
        self.action = views(action)
        self.reward = reward.view(memory)
        self.terminated, self.truncated, self.begun = (flag.view(memory) for flag in flags)
