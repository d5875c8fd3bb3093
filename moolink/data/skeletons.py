"""Trees of arrays: their leaves, and a skeleton with a leaf's number in each one's place.

A skeleton has the nodes of the tree (see :mod:`moolink.data.nodes`), so it can be compared, and
sent if their types can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from moolink import _core
from moolink._core import check_array
from moolink.data import nodes
from moolink.data.frameworks import is_jax, is_torch
from moolink.internal.shown import cut

Skeleton = Any
_Numbers = (bool, int, float)


def flatten(tree: Any) -> tuple[list[Any], Skeleton]:
    """Returns the leaves of a tree, and its skeleton."""
    leaves: list[Any] = []
    return leaves, _walk(tree, leaves)


def _walk(value: Any, leaves: list[Any]) -> Skeleton:
    if type(value) is dict:
        return {key: _walk(part, leaves) for key, part in value.items()}
    node = nodes.apart(value)
    if node is None:
        leaves.append(value)
        return len(leaves) - 1
    return node.rebuild([_walk(part, leaves) for part in node.parts])


def unflatten(skeleton: Skeleton, leaves: list[Any]) -> Any:
    """Builds the tree again."""
    return _build(skeleton, leaves.__getitem__)


def _build(skeleton: Skeleton, leaf: Callable[[int], Any]) -> Any:
    node = nodes.apart(skeleton)
    if node is None:
        return leaf(skeleton)
    return node.rebuild([_build(part, leaf) for part in node.parts])


def leaves_like(tree: Any, skeleton: Skeleton) -> list[Any] | None:
    """The leaves of a tree of this skeleton in order; None: it has another one."""
    leaves: list[Any] = []
    return leaves if _collect(tree, skeleton, leaves) else None


def _collect(value: Any, skeleton: Skeleton, leaves: list[Any]) -> bool:
    if isinstance(skeleton, int):
        if not _is_array(value) and nodes.apart(value) is not None:
            return False
        leaves.append(value)
        return True
    if isinstance(skeleton, dict):  # a loop, since this runs for every step of a writer
        if not isinstance(value, dict) or len(value) != len(skeleton):
            return False
        for key, part in skeleton.items():
            if key not in value:
                return False
            if isinstance(part, int) and _is_array(value[key]):
                leaves.append(value[key])
            elif not _collect(value[key], part, leaves):
                return False
        return True
    wanted, given = nodes.apart(skeleton), nodes.apart(value)
    if wanted is None or given is None or (given.kind, given.keys) != (wanted.kind, wanted.keys):
        return False
    return all(_collect(a, b, leaves) for a, b in zip(given.parts, wanted.parts, strict=True))


def _is_array(value: Any) -> bool:
    return type(value) is np.ndarray or isinstance(value, _Numbers)


def paths(skeleton: Skeleton, root: str = "") -> list[str]:
    """Each leaf's name, in order: obs.image, rewards[0]."""
    return list(_paths(skeleton, root))


def _paths(skeleton: Skeleton, path: str) -> Iterator[str]:
    node = nodes.apart(skeleton)
    if node is None:
        yield path or "the step"
        return
    for key, part in zip(node.keys, node.parts, strict=True):
        if isinstance(skeleton, dict) or isinstance(key, str):
            yield from _paths(part, f"{path}.{key}" if path else str(key))
        else:
            yield from _paths(part, f"{path}[{key}]")


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
        TypeError: it is an array whose elements cannot be read as plain memory.
        ValueError: the number is of a wider kind than `dtype`; the messages name the path.
    """
    if type(leaf) is np.ndarray:
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
    if check_array(leaf, path or "an array") and not hasattr(leaf, "dtype"):
        return _core.as_array(leaf)  # a producer of DLPack that moolink does not know
    return leaf


def arrays_of(leaves: list[Any], skeleton: Skeleton) -> list[Any]:
    """The leaves of a tree of this skeleton as arrays.

    Raises:
        TypeError: one is no array and no number; the message names its path.
    """
    named = zip(leaves, paths(skeleton), strict=True)
    arrays = [as_array(leaf, path=path) for leaf, path in named]
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
