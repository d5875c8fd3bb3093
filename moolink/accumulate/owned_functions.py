"""Functions of a peer that answer for an object, which lives no longer because of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from moolink._core import RpcDeferredReturn
from moolink.errors import Closed
from moolink.group import Group

# For each peer, the functions that it has, by name.
_owned: weakref.WeakKeyDictionary[Any, dict[str, weakref.WeakMethod[Callable[..., None]]]]
_owned = weakref.WeakKeyDictionary()


def define_owned(
    group: Group, kind: str, names: Sequence[str], method: weakref.WeakMethod[Callable[..., None]]
) -> tuple[str, Callable[[], None]]:
    """Lets members of the group call the method, with an ``RpcDeferredReturn`` before their own
    arguments. Peers with another group's key cannot call it.

    Args:
        names: the group's name and, if there is one, that of the object in the group.

    Returns:
        A name for the function that is unique to ``kind`` and ``names``, even if these contain
        separators, and a callable that removes the definition. It may be called after the peer was
        closed.

    Raises:
        ValueError: an owner with these names still exists.
    """
    name = ":".join([f"moolink.{kind}", *map(repr, names)])

    def answer(deferred: RpcDeferredReturn, *arguments: Any) -> None:
        owners = method()
        if owners is None:
            deferred.refuse("its owner is gone")
        else:
            owners(deferred, *arguments)

    rpc = group.rpc  # `undefine` must not keep the group alive
    owned = _owned.setdefault(rpc, {})
    taken = ValueError(
        f"this Rpc already has a group or accumulator called '{'/'.join(names)}': close it first"
    )
    if name in owned:
        if owned[name]() is not None:
            raise taken
        rpc.undefine(name)  # its owner was dropped and not closed
    try:
        rpc._define_confined(name, answer, group.name())
    except ValueError:  # another thread has defined it meanwhile
        raise taken from None
    owned[name] = method

    def undefine() -> None:
        if owned.get(name) is method:
            del owned[name]
            with contextlib.suppress(Closed, ValueError):  # the peer may be closed already
                rpc.undefine(name)

    return name, undefine
