"""Functions that moolink's own objects serve at a peer, and the objects that call them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moolink import _core
from moolink.errors import Closed, Error
from moolink.internal.shown import shown

if TYPE_CHECKING:
    from moolink.rpc import Rpc


def peer_of(rpc: Any) -> Rpc:
    """The peer that a program has given as `rpc`.

    Raises:
        TypeError: it is no Rpc.
    """
    from moolink.rpc import Rpc

    if not isinstance(rpc, Rpc):
        raise TypeError(f"rpc must be a moolink.Rpc, got {shown(rpc)}")
    return rpc


@contextlib.contextmanager
def only_one(what: str) -> Iterator[None]:
    """Wraps the definition of an object's first function at a peer: a second such object is refused
    by its own name.

    Raises:
        ValueError: the peer has `what` already.
    """
    try:
        yield
    except ValueError:
        raise ValueError(f"this peer has {what} already: close it first") from None


def undefine(rpc: Rpc, function: str) -> None:
    """Withdraws a function; a peer that is closed has none."""
    with contextlib.suppress(Closed):
        rpc.undefine(function)


def answer(reply: _core.RpcDeferredReturn, value: Any) -> None:
    """Replies with a value, or with its error; a caller that has given up gets none."""
    try:
        reply(value)
    except Error as error:
        if not reply.cancelled():
            reply.error(error)


def text_of(value: Any, name: str) -> str:
    """The str that a peer or a program has given as an argument.

    Raises:
        TypeError: it is not a str; the message names the argument.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {shown(value)}")
    return value


def tuples_of(given: Any, size: int, text: str) -> list[tuple[Any, ...]]:
    """The tuples of `size` parts each that a peer has given as an argument.

    Raises:
        TypeError: they have another form; the message begins with `text`.
    """
    valid = isinstance(given, list | tuple) and all(
        isinstance(one, list | tuple) and len(one) == size for one in given
    )
    if not valid:
        raise TypeError(f"{text}, got {shown(given)}")
    return [tuple(one) for one in given]
