"""The collectives of a group on pytrees of JAX arrays, outside of compiled functions; `all_reduce`,
which works inside of them as well, is in `programs`.

They block, without the GIL, and return pytrees of JAX arrays. Members that call the group's own
methods, with trees of numpy arrays or torch tensors, take part in the same operations, as long as
the tree is made of dicts, lists and tuples of arrays: numbers are taken as JAX's, of 32 bits unless
it has x64. Arrays of 64 bits raise ``TypeError`` without it. For futures, and operations that go on
while one computes, call the group's own methods, which know JAX arrays, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moolink._core import check_array
from moolink.data import nodes
from moolink.group import Group
from moolink.group.collectives import GroupFuture
from moolink.group.group import Reduction
from moolink.jax import arrays


def reduce_scatter(
    group: Group, name: str, tree: Any, *, op: Reduction = "sum", timeout: float | None = None
) -> Any:
    """Combines a pytree of all members, and gives each its rows.

    Args:
        tree: arrays of shape ``(n * k, ...)``, n being the number of members.

    Returns:
        A pytree of JAX arrays of shape ``(k, ...)``.

    Raises:
        As :meth:`moolink.Group.reduce_scatter`.
    """
    return _run(tree, lambda data: group.reduce_scatter(name, data, op=op), timeout)


def all_gather(group: Group, name: str, tree: Any, *, timeout: float | None = None) -> Any:
    """Gives every member the pytrees of all.

    Returns:
        A pytree of JAX arrays of shape ``(n, *shape)``, in the order of ranks.

    Raises:
        As :meth:`moolink.Group.all_gather`.
    """
    return _run(tree, lambda data: group.all_gather(name, data), timeout)


def broadcast(
    group: Group, name: str, tree: Any, *, root: int | str = 0, timeout: float | None = None
) -> Any:
    """Gives every member the pytree of one.

    Args:
        tree: at the root arrays to send; elsewhere arrays of the same shapes and dtypes.
        root: a rank, or a member's name.

    Raises:
        As :meth:`moolink.Group.broadcast`.
    """
    return _run(tree, lambda data: group.broadcast(name, data, root=root), timeout)


def gather(
    group: Group, name: str, tree: Any, *, root: int | str = 0, timeout: float | None = None
) -> Any:
    """Gives one member the pytrees of all.

    Returns:
        At the root as for :func:`all_gather`, elsewhere None.

    Raises:
        As :meth:`moolink.Group.gather`.
    """
    return _run(tree, lambda data: group.gather(name, data, root=root), timeout)


def scatter(
    group: Group, name: str, tree: Any, *, root: int | str = 0, timeout: float | None = None
) -> Any:
    """Gives every member its entry of one member's pytree.

    Args:
        tree: at the root arrays of shape ``(n, *shape)``, elsewhere of shape ``shape``.

    Raises:
        As :meth:`moolink.Group.scatter`.
    """
    return _run(tree, lambda data: group.scatter(name, data, root=root), timeout)


def _run(tree: Any, begin: Callable[[Any], GroupFuture], timeout: float | None) -> Any:
    """The result of a group's operation with leaves of JAX; None where there is none."""
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(key) for key, _ in keyed]
    given = [_operand(f"tree{name}", leaf) for name, (_, leaf) in zip(names, keyed, strict=True)]
    plain = _is_plain(tree)
    # Of a tree of other nodes the group knows the paths to its leaves only.
    data = jax.tree.unflatten(structure, given) if plain else dict(zip(names, given, strict=True))
    result = begin(data).result(timeout)
    if result is None:
        return None
    # Not by their order: the group's dicts are plain ones, and JAX sorts no OrderedDict.
    leaves = [_at(result, key) for key, _ in keyed] if plain else [result[name] for name in names]
    return jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])


def _operand(what: str, leaf: Any) -> Any:
    """A leaf as the group takes it; a number as JAX would have it, not as numpy would."""
    if not check_array(leaf, what) and nodes.apart(leaf) is not None:
        raise TypeError(
            f"{what} is a {type(leaf).__qualname__}, which JAX does not take apart: register it "
            "as a pytree (jax.tree_util.register_dataclass), or use the group's own method"
        )
    if isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic):
        return jnp.asarray(leaf)
    arrays.require_whole(what, leaf)
    return leaf


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    """The leaf of a tree of dicts, lists and tuples to which JAX's path leads."""
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            tree = getattr(tree, key.name)
        else:
            tree = tree[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
    return tree


def _is_plain(tree: Any) -> bool:
    """Whether the group takes the tree apart as JAX does: None, for one, is a leaf to the group."""
    if isinstance(tree, dict):
        return all(map(_is_plain, tree.values()))
    if isinstance(tree, list | tuple):
        return all(map(_is_plain, tree))
    return tree is not None and jax.tree_util.all_leaves([tree])
