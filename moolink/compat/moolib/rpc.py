"""moolib's Rpc."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import moolink
from moolink import _core, tokens
from moolink.compat.moolib.arguments import with_runtime_errors
from moolink.compat.moolib.futures import EarlyCall, Met
from moolink.compat.moolib.handlers import without_circle
from moolink.errors import Closed, NoSuchFunction
from moolink.internal.pickles import AllowPickle

if TYPE_CHECKING:
    from moolink.rpc.batch_replies import BatchRules
    from moolink.tokens import Identity, Key


@with_runtime_errors(
    "async_",
    "async_callback",
    "connect",
    "define",
    "define_deferred",
    "define_queue",
    "listen",
    "set_name",
    "set_timeout",
    "set_transports",
    "sync",
    "undefine",
)
class Rpc(moolink.Rpc):
    """A peer, as :class:`moolink.Rpc`, with moolib's habits.

    Args:
        allow_pickle: as of moolink.Rpc; None: True at a peer with a token, False at one without.
        others: as of moolink.Rpc. moolib's constructor takes none.

    Calls by ``within`` are moolink's: they are not repeated, and their errors are its own.
    """

    __module__ = "moolib"

    def __init__(
        self,
        name: str | None = None,
        *,
        allow_pickle: AllowPickle | None = None,
        token: str | os.PathLike[str] | Key | Identity | None = None,
        token_file: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        **options: Any,
    ) -> None:
        proof = tokens.identity(token, token_file, insecure)
        if allow_pickle is None:
            allow_pickle = bool(proof.keys)
        self._met = Met()
        super().__init__(name, token=proof, allow_pickle=allow_pickle, **options)

    def async_(self, peer: str, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of a peer; returns a Future of its result."""
        if self._met.knows(peer, function):
            return super().async_(peer, function, *args, **kwargs)
        return self._early_call(peer, function, args, kwargs)

    def sync(self, peer: str, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of a peer, waits for the result and returns it."""
        if self._met.knows(peer, function):
            try:
                return super().sync(peer, function, *args, **kwargs)
            except NoSuchFunction:
                self._met.forget(peer)
        return self._early_call(peer, function, args, kwargs).result()

    def async_callback(
        self,
        peer: str,
        function: str,
        callback: Callable[[Any, Any], object],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Calls a function of a peer and then `callback(result, error)`: error is None or a str."""

        def ended(future: Any) -> None:
            error = future.exception()
            callback(*((future.result(), None) if error is None else (None, str(error))))

        self.async_(peer, function, *args, **kwargs).add_done_callback(ended)

    def _early_call(
        self, peer: str, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # The caller may change its tensors once this returns, and the call may be made again.
        try:
            copied = _core.encode((args, kwargs), allow_pickle=True)
        except TypeError:  # It cannot be sent, which the call says, or is lent, and not copied.
            return super().async_(peer, function, *args, **kwargs)
        given = [(args, kwargs)]  # Sent as they are at first, without the cost of the copy.
        own, met = weakref.ref(self), self._met  # A call without an end keeps no peer alive.

        def start() -> _core.Future:
            if (rpc := own()) is None:
                raise Closed("this peer was closed while the call was under way", peer=peer)
            now = given.pop() if given else _core.decode(*copied, allow_pickle=True)
            return moolink.Rpc.async_(rpc, peer, function, *now[0], **now[1])

        return EarlyCall(start, lambda error: met.is_early(peer, function, error))

    def define(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Lets peers call `function` by `name`; see :meth:`moolink.Rpc.define`."""
        super().define(name, without_circle(self, function), *args, **options)

    def define_deferred(
        self, name: str, function: Callable[..., Any], *args: Any, **options: Any
    ) -> None:
        """Like define; `function` gets the way back of the call as its first argument."""
        super().define_deferred(name, without_circle(self, function), *args, **options)

    def debug_info(self) -> None:
        """Prints stats, addresses and peers."""
        print(f"Rpc {self.get_name()!r} at {', '.join(self.addresses()) or 'no address'}")
        print("  " + ", ".join(f"{key} {value}" for key, value in self.stats().items()))
        for peer in self.peers():
            print("  peer " + ", ".join(f"{key} {value}" for key, value in peer.items()))

    def _batch_rules(self, dynamic: bool) -> BatchRules:
        from moolink.rpc.batch_replies import BatchRules

        if dynamic:
            return BatchRules(list_has_entries=False)
        return BatchRules("first", list_has_entries=False, tuple_has_entries=False)
