"""Recurrent states by actor: rows of arrays, gathered for a batch and scattered after it."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink._core import check_array
from moolink.data import skeletons
from moolink.data.frameworks import is_jax, is_torch

Actor = tuple[str, int]
"""A client's name, and the row of its requests."""

_FIRST_CAPACITY = 64


class States:
    """The state of each actor, of which the one that was used least recently makes room.

    Args:
        initial: the state at the start of an episode: a tree of arrays without a batch dimension.
        most: actors whose states are kept.

    Raises:
        TypeError: a leaf of the initial state is no array and no number.
    """

    def __init__(self, initial: Any, most: int) -> None:
        leaves, self._skeleton = skeletons.flatten(initial)
        paths = skeletons.paths(self._skeleton, "state")
        leaves = [
            leaf if _is_key(leaf) else skeletons.as_array(leaf, path=path)
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        for path, leaf in zip(paths, leaves, strict=True):
            if not hasattr(leaf, "dtype"):
                raise TypeError(f"{path}: a {type(leaf).__qualname__} is no array and no number")
        self._initial = [leaf[None] for leaf in leaves]
        self._most = most
        self._capacity = min(_FIRST_CAPACITY, most)
        # The row after the last one is that of the batch's padding.
        self._arrays = [_repeated(leaf, self._capacity + 1) for leaf in self._initial]
        self._slots: collections.OrderedDict[Actor, int] = collections.OrderedDict()
        self._free = list(range(self._capacity))

    def __len__(self) -> int:
        return len(self._slots)

    def slots(self, actors: list[Actor | None]) -> npt.NDArray[np.int64]:
        """A slot for each row of a batch, None is padding. New actors begin with the initial state.

        Raises:
            ValueError: the batch has more actors than states are kept.
        """
        if sum(actor is not None for actor in actors) > self._most:
            raise ValueError(
                f"a batch of {len(actors)} rows does not fit into {self._most} states: "
                "make max_actors larger"
            )
        for actor in actors:  # first, so that none of them makes room for a new one
            if actor is not None and actor in self._slots:
                self._slots.move_to_end(actor)
        new = []
        for actor in actors:
            if actor is not None and actor not in self._slots:
                self._slots[actor] = self._take()
                new.append(self._slots[actor])
        self.reset(np.array(new, np.int64))
        # The row of padding is known only now that the arrays have grown.
        slots = [self._capacity if actor is None else self._slots[actor] for actor in actors]
        return np.array(slots, np.int64)

    def reset(self, slots: npt.NDArray[np.int64]) -> None:
        """Puts the initial state there."""
        if len(slots):
            self._put(slots, [_repeated(leaf, len(slots)) for leaf in self._initial])

    def gather(self, slots: npt.NDArray[np.int64]) -> Any:
        """The tree of the states, with the slots as the arrays' first dimension; copies."""
        leaves = [array[_index(array, slots)] for array in self._arrays]
        return skeletons.unflatten(self._skeleton, leaves)

    def scatter(self, slots: npt.NDArray[np.int64], states: Any) -> None:
        """Puts a batch's new states there.

        Raises:
            ValueError: they are another tree, or of other shapes.
        """
        leaves = skeletons.leaves_like(states, self._skeleton)
        if leaves is None:
            difference = skeletons.difference(states, self._skeleton)
            raise ValueError(f"the new state differs from the initial one: it is {difference}")
        for leaf, initial in zip(leaves, self._initial, strict=True):
            if not _is_key(leaf):
                check_array(leaf, "the new state")
            expected = (len(slots), *initial.shape[1:])
            if tuple(leaf.shape) != expected:
                raise ValueError(f"the new state has shape {tuple(leaf.shape)}, not {expected}")
        self._put(slots, leaves)

    def forget(self, client: str) -> None:
        """A client has ended."""
        for actor in [actor for actor in self._slots if actor[0] == client]:
            self._free.append(self._slots.pop(actor))

    def _take(self) -> int:
        if not self._free and self._capacity < self._most:
            self._grow()
        if self._free:
            return self._free.pop()
        return self._slots.popitem(last=False)[1]

    def _grow(self) -> None:
        before = self._capacity
        self._capacity = min(2 * before, self._most)
        old = self._arrays
        self._arrays = [_repeated(leaf, self._capacity + 1) for leaf in self._initial]
        kept = np.arange(before)
        self._put(kept, [array[_index(array, kept)] for array in old])
        self._free += range(before, self._capacity)

    def _put(self, slots: npt.NDArray[np.int64], leaves: list[Any]) -> None:
        for i, (array, leaf) in enumerate(zip(self._arrays, leaves, strict=True)):
            if hasattr(array, "at"):  # JAX's cannot be written
                self._arrays[i] = array.at[slots].set(leaf)
            elif isinstance(array, np.ndarray):
                array[slots] = leaf
            else:
                array[_index(array, slots)] = leaf.detach().to(array.device)


def _is_key(leaf: Any) -> bool:
    """Whether this is a typed random key of JAX, which JAX itself copies."""
    return is_jax(leaf) and not isinstance(leaf.dtype, np.dtype)


def _index(array: Any, slots: npt.NDArray[np.int64]) -> Any:
    if is_torch(array):
        import torch

        return torch.from_numpy(slots).to(array.device)
    return slots


def _repeated(leaf: Any, count: int) -> Any:
    """An array of one row, that often."""
    if is_torch(leaf):
        return leaf.detach().repeat(count, *[1] * (leaf.dim() - 1))
    if isinstance(leaf, np.ndarray):
        return np.repeat(leaf, count, 0)
    import jax

    return jax.numpy.repeat(leaf, count, 0)
