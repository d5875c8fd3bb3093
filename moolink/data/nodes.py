"""The nodes of trees: the values that are taken apart, their parts, and how to rebuild a node.

All walks over trees of arrays follow this rule. A node is None (without parts), a dict, a list, a
tuple or namedtuple, a dataclass, or of a type that is registered as a pytree with JAX. Arrays,
tensors and all other values are leaves.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moolink.data.frameworks import is_jax, is_torch

_SIMPLE = (np.ndarray, np.generic, int, float, complex, str, bytes, bytearray)


_LEAVES: set[type] = set()
T = TypeVar("T")


class Node(NamedTuple):
    """A node taken apart.

    Attributes:
        keys: the keys of a dict, numbers, or names of fields; one for each part.
        parts: the parts, in the order of `keys`.
        rebuild: makes a node like this one of other parts.
        kind: compares equal for nodes that differ in their parts only.
    """

    keys: list[Any]
    parts: list[Any]
    rebuild: Callable[[list[Any]], Any]
    kind: Any


def leaf(kind: type[T]) -> type[T]:
    """A decorator for a dataclass of this package that stands for an array: makes it a leaf."""
    _LEAVES.add(kind)
    return kind


def apart(value: Any) -> Node | None:
    """Takes a node apart; None: it is a leaf."""
    if isinstance(value, dict):
        keys = list(value)
        return Node(keys, list(value.values()), lambda parts: _dict(keys, parts), dict)
    if isinstance(value, list | tuple):
        kind = type(value)
        fields = getattr(kind, "_fields", None)
        names = list(range(len(value))) if fields is None else list(fields)
        return Node(names, list(value), maker(kind), kind)
    if value is None:
        return Node([], [], lambda parts: None, None)
    if isinstance(value, _SIMPLE) or is_torch(value) or is_jax(value) or isinstance(value, type):
        return None
    return _registered(value) or _dataclass(value)


def _dict(keys: list[Any], parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, parts, strict=True))


def maker(kind: type) -> Callable[[list[Any]], Any]:
    """The function that makes a list or tuple of this type of its parts."""
    # A namedtuple takes its parts as arguments, and a subclass's own __new__ others.
    make: Callable[[list[Any]], Any] = getattr(kind, "_make", kind)
    return make


def _registered(value: Any) -> Node | None:
    """A node of JAX's registry."""
    util = sys.modules.get("jax.tree_util")
    if util is None or type(value).__module__ in ("builtins", "collections"):
        return None
    keyed, structure = util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    if len(keyed) == 1 and not keyed[0][0]:
        return None
    keys = [name_of(path[0]) for path, _ in keyed]
    return Node(
        keys,
        [part for _, part in keyed],
        lambda parts: util.tree_unflatten(structure, parts),
        structure,
    )


def name_of(key: Any) -> Any:
    """The key, name or number in an entry of JAX's path."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _dataclass(value: Any) -> Node | None:
    kind = type(value)
    # Another __new__ may keep data outside of the fields.
    if kind in _LEAVES or not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return None
    names = [field.name for field in dataclasses.fields(kind)]
    if not all(hasattr(value, name) for name in names):  # a field that is not set yet
        return None

    def rebuild(parts: list[Any]) -> Any:
        made = object.__new__(kind)  # without its __init__, which may expect other values
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)
        return made

    return Node(names, [getattr(value, name) for name in names], rebuild, kind)
