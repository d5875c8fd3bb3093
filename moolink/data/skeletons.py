"""Trees of arrays: their leaves, and a skeleton with a leaf's number in each one's place.

A skeleton is made of dicts, lists and tuples like the tree, so it can be compared and sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from moolink.data.frameworks import is_jax, is_torch
from moolink.internal.shown import cut

Skeleton = Any
_Numbers = (bool, int, float)
_CONTAINERS = (dict, list, tuple)


def flatten(tree: Any) -> tuple[list[Any], Skeleton]:
    """Returns the leaves of a tree of dicts, lists and tuples, and its skeleton."""
    leaves: list[Any] = []
    return leaves, _walk(tree, leaves)


def _walk(node: Any, leaves: list[Any]) -> Skeleton:
    if isinstance(node, dict):
        return {key: _walk(child, leaves) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return _rebuilt(node, [_walk(child, leaves) for child in node])
    leaves.append(node)
    return len(leaves) - 1


def _rebuilt(node: Any, children: list[Any]) -> Any:
    """A sequence like `node`; a namedtuple takes its children as arguments."""
    kind = type(node)
    return kind(*children) if hasattr(node, "_fields") else kind(children)


def unflatten(skeleton: Skeleton, leaves: list[Any]) -> Any:
    """Builds the tree again."""
    return _build(skeleton, leaves.__getitem__)


def _build(node: Skeleton, leaf: Callable[[int], Any]) -> Any:
    if isinstance(node, dict):
        return {key: _build(child, leaf) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return _rebuilt(node, [_build(child, leaf) for child in node])
    return leaf(node)


def leaves_like(tree: Any, skeleton: Skeleton) -> list[Any] | None:
    """The leaves of a tree of this skeleton in order; None: it has another one."""
    leaves: list[Any] = []
    return leaves if _collect(tree, skeleton, leaves) else None


def _collect(node: Any, skeleton: Skeleton, leaves: list[Any]) -> bool:
    if isinstance(skeleton, int):
        if isinstance(node, _CONTAINERS):
            return False
        leaves.append(node)
        return True
    if type(node) is not type(skeleton) or len(node) != len(skeleton):
        return False
    if isinstance(skeleton, dict):
        for key, child in skeleton.items():  # a loop, as this runs for every step of a writer
            if key not in node:
                return False
            value = node[key]
            if isinstance(child, int) and not isinstance(value, _CONTAINERS):
                leaves.append(value)
            elif not _collect(value, child, leaves):
                return False
        return True
    return all(_collect(a, b, leaves) for a, b in zip(node, skeleton, strict=True))


def paths(skeleton: Skeleton, root: str = "") -> list[str]:
    """Each leaf's name, in order: obs.image, rewards[0]."""
    return list(_paths(skeleton, root))


def _paths(node: Skeleton, path: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _paths(child, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from _paths(child, f"{path}[{i}]")
    else:
        yield path or "the step"


def difference(tree: Any, skeleton: Skeleton) -> str:
    """The leaves that a tree has more or less than one of this skeleton, in words."""
    given, wanted = paths(flatten(tree)[1]), paths(skeleton)
    missing = ", ".join(sorted(set(wanted) - set(given)))
    extra = ", ".join(sorted(set(given) - set(wanted)))
    parts = [f"without {missing}"] * bool(missing) + [f"with {extra}"] * bool(extra)
    return cut(" and ".join(parts), 1000) or "in other containers"


def as_array(leaf: Any, dtype: str | None = None, path: str = "") -> Any:
    """The leaf itself if it is an array; a number as one of `dtype`, by default float32, int64 or
    bool.

    Raises:
        ValueError: the number is of a wider kind than `dtype`; the message names the path.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    if isinstance(leaf, _Numbers):
        own = "bool" if isinstance(leaf, bool) else "int64" if isinstance(leaf, int) else "float32"
        narrower = {"bool": ("int64", "float32"), "int64": ("float32",)}
        if own in narrower.get("int64" if dtype and "int" in dtype else str(dtype), ()):
            raise ValueError(
                f"{path}: expected {dtype}, got the number {leaf}; the first item fixes the type"
            )
        return np.asarray(leaf, dtype or own)
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    return leaf


def arrays_of(leaves: list[Any]) -> list[Any]:
    """The leaves as arrays.

    Raises:
        TypeError: one is no array and no number.
    """
    arrays = [as_array(leaf) for leaf in leaves]
    for array in arrays:
        layout_of(array)
    return arrays


def framework_of(leaves: list[Any]) -> str:
    """ "torch" or "jax" if the first array that is no numpy's is of it, else "numpy"."""
    for leaf in leaves:
        if is_torch(leaf):
            return "torch"
        if is_jax(leaf):
            return "jax"
    return "numpy"


def layout_of(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """The names of dtype and shape of an array.

    Raises:
        TypeError: it is no array.
    """
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        raise TypeError(
            f"a {type(leaf).__qualname__} is in a step: only arrays, tensors and numbers are stored"
        )
    name = str(dtype).removeprefix("torch.") if hasattr(leaf, "data_ptr") else np.dtype(dtype).name
    return name, tuple(leaf.shape)
