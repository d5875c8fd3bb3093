"""Pytrees as plain values, which can be sent and which other frameworks understand, and back.

A state of optax is made of types of its own, which a receiver would have to know. As a plain tree
its named fields are the keys of dicts; `tree_like` puts a received tree back into such types.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from moolink.data import nodes
from moolink.jax import arrays


def plain_tree(tree: Any) -> Any:
    """The same of dicts, lists, tuples, arrays, numbers and None.

    A node of another type becomes a dict of its children: by the names of its fields where it has
    some (namedtuples, dataclasses), else by their numbers, as text. Typed random keys become their
    data.
    """
    nodes = _children(tree)
    if nodes is None:
        return jax.random.key_data(tree) if _is_key(tree) else tree
    if tree is None:
        return None
    children = [plain_tree(child) for _, child in nodes[0]]
    if type(tree) in (list, tuple):
        return type(tree)(children)
    keys = [key for key, _ in nodes[0]]
    if not isinstance(tree, dict):
        keys = [str(key) for key in keys]
    return dict(zip(keys, children, strict=True))


def tree_like(template: Any, plain: Any, what: str = "state") -> Any:
    """A pytree of the structure, shapes and dtypes of ``template`` with the values of ``plain``.

    Args:
        template: such as ``optimizer.init(parameters)``.
        plain: the result of ``plain_tree`` for another one of that structure.
        what: its name in errors.

    Raises:
        ValueError: structures, shapes or dtypes differ; the message says where.
    """
    nodes = _children(template)
    if nodes is None:
        return _leaf_like(template, plain, what)
    keyed, treedef = nodes
    if template is None:
        if plain is not None:
            raise ValueError(f"{what} has come, and this peer has none there")
        return None
    names = [key for key, _ in keyed]
    if isinstance(plain, dict):
        theirs = {str(key): value for key, value in plain.items()}
    elif isinstance(plain, list | tuple):
        theirs = {str(index): value for index, value in enumerate(plain)}
    else:
        raise ValueError(f"{what} is a {type(plain).__qualname__}, not a tree of {names}")
    if set(theirs) != {str(name) for name in names}:
        raise ValueError(f"{what} has {sorted(theirs)}, and this peer's has {names}")
    children = [tree_like(child, theirs[str(name)], f"{what}[{name!r}]") for name, child in keyed]
    return tree_util.tree_unflatten(treedef, children)


def _leaf_like(template: Any, value: Any, what: str) -> Any:
    if _is_key(template):
        data = arrays.received(value, jax.random.key_data(template), what)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(template))
    if isinstance(template, jax.Array | jax.ShapeDtypeStruct):
        return arrays.received(value, template, what)
    if isinstance(template, np.ndarray | np.generic):
        return arrays.alike(value, template, what)[()]
    return value


def _children(node: Any) -> tuple[list[tuple[Any, Any]], Any] | None:
    """(key, child) of each child and the structure without them; None: a leaf."""
    keyed, treedef = tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and not keyed[0][0]:
        return None
    return [(nodes.name_of(path[0]), child) for path, child in keyed], treedef


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
