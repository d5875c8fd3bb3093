"""Functions of a peer that answer for an object, which lives no longer because of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from moolink._core import RpcDeferredReturn
from moolink.errors import Closed
from moolink.group import Group


def define_owned(
    group: Group, name: str, method: weakref.WeakMethod[Callable[..., None]]
) -> Callable[[], None]:
    """Lets members of the group call the method, with an ``RpcDeferredReturn`` before their own
    arguments, under ``name``. Peers with another group's key cannot call it.

    Returns:
        A function that takes the definition back; it may be called when the peer is closed.
    """

    def answer(deferred: RpcDeferredReturn, *arguments: Any) -> None:
        owners = method()
        if owners is None:
            deferred.refuse("its owner is gone")
        else:
            owners(deferred, *arguments)

    rpc = group.rpc  # `undefine` must not keep the group alive

    def undefine() -> None:
        with contextlib.suppress(Closed, ValueError):  # the peer may be closed already
            rpc.undefine(name)

    try:
        rpc._define_confined(name, answer, group.name())
    except ValueError:  # of an owner before that was dropped and not closed
        rpc.undefine(name)
        rpc._define_confined(name, answer, group.name())
    return undefine
