"""States of optax in a form that members in other frameworks understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moolink.data import nodes
from moolink.internal.optimizer_kinds import require_same_kind
from moolink.jax import arrays

# Names of the running means in optax' states, and here.
MOMENTS = {"mu": "mean", "nu": "mean_of_squares", "trace": "momentum"}


def optimizer_state(state: Any) -> dict[str, Any] | None:
    """Returns the state of ``optax.adam``, ``rmsprop`` or ``sgd`` for members of any framework.

    ``count`` is the number of updates, and ``moments`` has ``mean``, ``mean_of_squares`` or
    ``momentum``: lists of arrays in the order of the parameters. ``keeps`` is the list of the
    names in ``moments``. None: the state holds more than these, such as hyperparameters.
    """
    portable: dict[str, Any] = {"count": 0, "moments": {}}
    return portable | {"keeps": list(portable["moments"])} if _take(state, portable) else None


def load_optimizer_state(like: Any, state: Mapping[str, Any]) -> Any:
    """Returns a state as ``like``, of the same optimizer, with the values from
    :func:`optimizer_state` of this or another framework.

    Raises:
        ValueError: the state is that of another optimizer, or of other parameters.
    """
    mine = optimizer_state(like)
    if mine is None:
        raise ValueError(
            f"the state that came has {sorted(state['moments'])}, and this peer's optimizer has "
            "other values: use the same optimizer at every member"
        )
    require_same_kind(state, mine["moments"], "this peer's optimizer")
    return _put(like, state)


def _take(node: Any, portable: dict[str, Any]) -> bool:
    """Adds the node's values; false if one has no name here."""
    if not isinstance(node, tuple):
        return not jax.tree.leaves(node)
    for field, child in zip(_fields(node), node, strict=True):
        if field in MOMENTS and MOMENTS[field] not in portable["moments"]:
            portable["moments"][MOMENTS[field]] = jax.tree.leaves(child)
        elif field == "count":
            portable["count"] = int(child)
        elif not _take(child, portable):
            return False
    return True


def _put(node: Any, state: Mapping[str, Any]) -> Any:
    if not isinstance(node, tuple):
        return node
    children = [
        _moment(child, state, MOMENTS[field])
        if field in MOMENTS
        else jnp.asarray(state["count"], child.dtype)
        if field == "count"
        else _put(child, state)
        for field, child in zip(_fields(node), node, strict=True)
    ]
    return nodes.maker(type(node))(children)


def _moment(like: Any, state: Mapping[str, Any], name: str) -> Any:
    leaves, structure = jax.tree.flatten(like)
    values = state["moments"].get(name, [jnp.zeros_like(leaf) for leaf in leaves])
    if len(values) != len(leaves):
        raise ValueError(f"{name} that came is not of {len(leaves)} parameters")
    taken = [
        arrays.received(value, leaf, f"{name}[{i}]")
        for i, (value, leaf) in enumerate(zip(values, leaves, strict=True))
    ]
    return jax.tree.unflatten(structure, taken)


def _fields(node: tuple[Any, ...]) -> tuple[str, ...]:
    return getattr(node, "_fields", ("",) * len(node))
