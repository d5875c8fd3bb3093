"""Gymnasium spaces as trees of array descriptions.

A tree is a dict (Dict space) or a tuple (Tuple space) of trees, or a `Leaf`. Spaces are recognised
by the names of their classes: the pool's process need not have gymnasium imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Tree: TypeAlias = Any  # Leaf | dict[Any, Tree] | tuple[Tree, ...], or the same with other leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """One array of an observation or action.

    Attributes:
        path: where it is, such as ``obs.image`` or ``action[1]``.
        shape: of one environment's value.
        dtype: name of its numpy dtype.
        low, high: inclusive bounds, broadcastable to `shape`; None where there are none.
        scalar: whether the environment expects an integer (Discrete) instead of an array.
        space: the space in words, for messages.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    low: npt.NDArray[Any] | None
    high: npt.NDArray[Any] | None
    scalar: bool
    space: str

    def key(self, *, bounds: bool) -> tuple[Any, ...]:
        """Returns a key, equal in all environments of a pool, with or without `bounds`."""
        limits = (self.low, self.high) if bounds else ()
        found = [None if limit is None else limit.tobytes() for limit in limits]
        return (self.path, self.shape, self.dtype, *found, self.scalar)


def describe(space: Any, path: str, *, others: bool = False) -> Tree:
    """Describes `space`, found at `path`.

    Raises TypeError for kinds that are no arrays; with `others` they are None in the tree.
    """
    kinds = {base.__name__ for base in type(space).__mro__}
    if "Dict" in kinds:
        return {
            key: describe(part, f"{path}.{key}", others=others)
            for key, part in space.spaces.items()
        }
    if "Tuple" in kinds:
        return tuple(
            describe(part, f"{path}[{i}]", others=others) for i, part in enumerate(space.spaces)
        )
    if "Discrete" in kinds:
        low = np.asarray(space.start, np.int64)
        return _leaf(space, path, low, low + space.n - 1, scalar=True)
    if "MultiDiscrete" in kinds:
        low = np.asarray(getattr(space, "start", np.zeros_like(space.nvec)))
        return _leaf(space, path, low, low + space.nvec - 1)
    if "MultiBinary" in kinds:
        return _leaf(space, path, np.zeros((), np.int8), np.ones((), np.int8))
    if "Box" in kinds:
        bounded_below = np.any(space.low > _least(space.dtype))
        bounded_above = np.any(space.high < _greatest(space.dtype))
        return _leaf(
            space, path, space.low if bounded_below else None, space.high if bounded_above else None
        )
    if others:
        return None
    raise TypeError(
        f"{path}: {type(space).__name__} spaces are not supported: wrap the environment so that it "
        "uses Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple spaces"
    )


def infer(value: Any, path: str) -> Tree:
    """Describes a value of an environment whose space is not known: no bounds, no structure more.

    Raises:
        TypeError: a part of it is no array of numbers.
    """
    if isinstance(value, Mapping):
        return {key: infer(part, f"{path}.{key}") for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(infer(part, f"{path}[{i}]") for i, part in enumerate(value))
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{path}: {value!r} is no array of numbers")
    words = f"{array.dtype.name} {array.shape}, as in the first observation"
    return Leaf(path, array.shape, array.dtype.str, None, None, False, words)


# The action where the environment declares no space: moolib's.
UNDECLARED_ACTION = Leaf("action", (), "<i8", None, None, True, "int64, as no space is declared")


def _leaf(
    space: Any,
    path: str,
    low: npt.NDArray[Any] | None,
    high: npt.NDArray[Any] | None,
    scalar: bool = False,
) -> Leaf:
    text = str(space)
    if len(text) > 80:
        text = f"{type(space).__name__}{tuple(space.shape)}"
    shape = () if scalar else tuple(space.shape)
    return Leaf(path, shape, np.dtype(space.dtype).str, low, high, scalar, text)


def _least(dtype: npt.DTypeLike) -> Any:
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _greatest(dtype: npt.DTypeLike) -> Any:
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Applies `function` to the leaves of `tree` and those at the same places of `others`."""
    if isinstance(tree, dict):
        return {
            key: map_tree(function, part, *(other[key] for other in others))
            for key, part in tree.items()
        }
    if isinstance(tree, tuple):
        return tuple(
            map_tree(function, part, *(other[index] for other in others))
            for index, part in enumerate(tree)
        )
    return function(tree, *others)


def leaves(tree: Tree) -> list[Any]:
    """Returns the leaves of `tree`, in a fixed order."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def parts(tree: Tree, value: Any, path: str) -> list[Any]:
    """Returns the values in `value` at the places of `tree`'s leaves.

    Raises:
        ValueError: `value` has another structure.
    """
    if isinstance(tree, dict):
        if not isinstance(value, Mapping) or value.keys() != tree.keys():
            got = str(list(value)) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"{path}: expected a dict with keys {list(tree)}, got {got}")
        return [p for key, part in tree.items() for p in parts(part, value[key], f"{path}.{key}")]
    if isinstance(tree, tuple):
        if not isinstance(value, Sequence) or len(value) != len(tree):
            got = str(len(value)) if isinstance(value, Sequence) else type(value).__name__
            raise ValueError(f"{path}: expected a tuple of {len(tree)} parts, got {got}")
        return [
            p
            for index, part in enumerate(tree)
            for p in parts(part, value[index], f"{path}[{index}]")
        ]
    return [value]


def keys(tree: Tree | None, *, bounds: bool = True) -> list[tuple[Any, ...]] | None:
    """Returns the keys that must be equal in all environments, leaf by leaf; None for no tree."""
    return None if tree is None else [leaf.key(bounds=bounds) for leaf in leaves(tree)]
