"""Calls with a time limit of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moolink.internal import deadlines

if TYPE_CHECKING:
    from moolink._core import Future, Stream
    from moolink.rpc.peer import Rpc


class TimedCalls:
    """Calls with a time limit of their own, made by :meth:`moolink.Rpc.within`.

    It may be reused, also by several threads at once.
    """

    __module__ = "moolink.rpc"  # the name that users know
    __slots__ = ("_rpc", "_seconds")

    def __init__(self, rpc: Rpc, seconds: float | None) -> None:
        deadlines.check(seconds)
        self._rpc = rpc
        self._seconds = -1.0 if seconds is None else float(seconds)  # below zero: no limit

    def async_(self, peer: str, function: str, /, *args: Any, **kwargs: Any) -> Future:
        """See :meth:`moolink.Rpc.async_`."""
        return self._rpc._async_within(self._seconds, peer, function, *args, **kwargs)

    def async_many(
        self, peers: Sequence[str], function: str, /, *args: Any, **kwargs: Any
    ) -> dict[str, Future]:
        """See :meth:`moolink.Rpc.async_many`."""
        return self._rpc._async_many_within(self._seconds, peers, function, *args, **kwargs)

    def sync(self, peer: str, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`moolink.Rpc.sync`."""
        return self.async_(peer, function, *args, **kwargs).result()

    def stream(self, peer: str, function: str, /, *args: Any, **kwargs: Any) -> Stream:
        """See :meth:`moolink.Rpc.stream`. The time limit is that of each item."""
        return self._rpc._stream_within(self._seconds, peer, function, *args, **kwargs)

    def __repr__(self) -> str:
        limit = "no time limit" if self._seconds < 0 else f"{self._seconds:g} s"
        return f"<{type(self).__module__}.{type(self).__qualname__} of {self._rpc!r}: {limit}>"
