"""A subscriber's copy of a version, complete or being fetched, which it gives to others."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from moolink._core import Lock
from moolink.rpc import lending
from moolink.weights import blob
from moolink.weights.blob import CHUNK, Arrays, Bytes, Layout
from moolink.weights.source_choice import Key

if TYPE_CHECKING:
    from moolink._core import RpcDeferredReturn


@dataclasses.dataclass(frozen=True)
class Weights:
    """A version, whole.

    Attributes:
        version: its number.
        tree: the arrays as they were published. Those of numpy cannot be written: they may lie in
            memory that other processes read. Copy an array before you change it.
    """

    version: int
    tree: Any


class Copy:
    """A block that fills up with chunks; a request for a missing chunk waits.

    For any thread.
    """

    def __init__(self, key: Key, layout: Layout, block: Bytes, has: set[int]) -> None:
        self.key = key
        self.layout = layout
        self.block = block
        self._lock = Lock()
        self._missing = set(range(layout.chunks)) - has
        self._waiting: dict[int, list[RpcDeferredReturn]] = {}  # by chunk
        self._waiting_for_all: list[RpcDeferredReturn] = []
        self._abandoned = False
        self._weights: Weights | None = None  # once they were asked for

    @property
    def missing(self) -> list[int]:
        with self._lock:
            return sorted(self._missing)

    def put(self, index: int, data: Bytes) -> None:
        """A chunk has come."""
        self.block[index * CHUNK : (index + 1) * CHUNK] = data
        with self._lock:
            self._missing.discard(index)
            waiting = self._waiting.pop(index, [])
            for_all: list[RpcDeferredReturn] = []
            if not self._missing:
                for_all, self._waiting_for_all = self._waiting_for_all, []
        for reply in waiting:
            reply(self._chunk(index))
        for reply in for_all:
            reply(lending.lend(self.block))

    def weights(self, arrays: Arrays) -> Weights:
        """The block's contents once it is complete; the same object each time."""
        with self._lock:
            if self._weights is None:
                tree = blob.unpack(self.layout, self.block, arrays)
                self._weights = Weights(self.key[1], tree)
            return self._weights

    def give_chunk(self, reply: RpcDeferredReturn, index: int) -> None:
        """Replies with a chunk, now or when it has come; with None if it never will."""
        with self._lock:
            if not self._abandoned and index in self._missing:
                self._waiting.setdefault(index, []).append(reply)
                return
        reply(None if self._abandoned else self._chunk(index))

    def give(self, reply: RpcDeferredReturn) -> None:
        """Replies with the whole block, now or when it is complete."""
        with self._lock:
            if not self._abandoned and self._missing:
                self._waiting_for_all.append(reply)
                return
        reply(None if self._abandoned else lending.lend(self.block))

    def abandon(self) -> None:
        """It will not be completed: requests that wait get None."""
        with self._lock:
            self._abandoned = True
            waiting = [reply for replies in self._waiting.values() for reply in replies]
            waiting += self._waiting_for_all
            self._waiting.clear()
            self._waiting_for_all.clear()
        for reply in waiting:
            reply(None)

    def _chunk(self, index: int) -> Any:
        return lending.lend(self.block[index * CHUNK : (index + 1) * CHUNK])
