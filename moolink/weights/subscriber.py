"""Subscriber: has the newest version that a publisher has made."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from moolink._core import host_key
from moolink.errors import CancelledError, Closed, Error, TimeoutError
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.metrics import sources
from moolink.metrics.sources import Value
from moolink.reports import SubscriberStats
from moolink.rpc import lending, naming, serving
from moolink.weights import names
from moolink.weights.blob import CHUNK, Arrays, Bytes, FloatType, Layout
from moolink.weights.copies import Copy, Weights
from moolink.weights.source_choice import Key, key_of
from moolink.weights.subscriber_base import Following

if TYPE_CHECKING:
    from moolink._core import Future, RpcDeferredReturn
    from moolink.rpc import Rpc

_TIMEOUT = 10.0  # seconds without a chunk, after which another source is asked for
# Chunks requested at once. They arrive in parallel, so each hop of a chain adds a window's time.
_WINDOW = 8


@names_keywords
class Subscriber(Following):
    """Follows a :class:`Publisher`: a thread fetches each new version, which becomes the current
    one when it is whole. Versions never go back, also if the publisher is restarted.

    Args:
        rpc: this peer, connected to the publisher or to a peer that knows it.
        name: of the weights.
        publisher: the publisher's peer.
        arrays: the trees' framework: "numpy", "torch", "jax", or "same": the published one.
            Numpy's and JAX's share memory with the publisher on one host, torch's are copies.
        dtype: the type to which the publisher converts floating-point numbers, once for all that
            ask for it ("float32", "float16", "bfloat16"); None: they stay.

    Raises:
        ValueError: this peer subscribes to that name already, or `arrays` or `dtype` is unknown.
    """

    def __init__(
        self,
        rpc: Rpc,
        name: str,
        publisher: str,
        *,
        arrays: Arrays = "same",
        dtype: FloatType | None = None,
    ) -> None:
        self._publisher = serving.text_of(publisher, "publisher")
        super().__init__(rpc, name, naming.quoted(publisher), arrays, dtype)
        self._host = host_key()
        self._held: Copy | None = None  # the current version
        self._fetched: Copy | None = None  # the next one, while it is fetched
        self._early: list[tuple[Key, int | None, RpcDeferredReturn]] = []
        self._counts = {"versions": 0, "chunks": 0, "bytes_fetched": 0, "bytes_mapped": 0}
        with serving.only_one(f"a subscriber of {name!r}"):
            rpc.define_deferred(names.COPY_CHUNK.format(name), self._on_chunk)
        rpc.define_deferred(names.COPY.format(name), self._on_copy)
        sources.add(self, rpc)
        self._thread.start()

    def latest(self) -> Weights | None:
        with self._changed:
            copy = self._held
        return None if copy is None else copy.weights(self._arrays)

    def stats(self) -> SubscriberStats:
        """Returns the current version, counts of received data, and why the subscriber waits."""
        with self._changed:
            return {
                "version": self._current(),
                "versions": self._counts["versions"],
                "chunks": self._counts["chunks"],
                "bytes_fetched": self._counts["bytes_fetched"],
                "bytes_mapped": self._counts["bytes_mapped"],
                "waiting_for": self._reason,
            }

    def _metrics(self) -> Iterator[Value]:
        if self._held is not None:
            yield "moolink_subscribed_version", {"name": self._name}, self._held.key[1]

    def _withdraw(self) -> None:
        sources.remove(self)
        for function in (names.COPY_CHUNK, names.COPY):
            serving.undefine(self._rpc, function.format(self._name))

    def __repr__(self) -> str:
        return f"<moolink.Subscriber of {self._name!r} at {self._source}, version {self.version}>"

    def _peers(self) -> list[str]:
        return [self._publisher]

    def _current(self) -> int | None:
        return None if self._held is None else self._held.key[1]

    # The thread

    def _follow_once(self) -> None:
        """Waits for the next version and fetches it; a TimeoutError of the call is no error."""
        held = None if self._held is None else self._held.key
        try:
            call = self._rpc.async_(
                self._publisher,
                names.NEXT.format(self._name),
                self._rpc.get_name(),
                self._host,
                held,
                self._dtype,
            )
            offer = self._next(call, self._publisher)
        except TimeoutError as error:
            if naming.connected(self._rpc, [self._publisher]):
                what = "nothing" if held is None else "nothing newer"
                self._reason = f"it has published {what}, or does not answer"
            else:
                self._reason = str(error)
            return
        layout = Layout.from_wire(offer["layout"])
        key = key_of(offer["key"])
        if held is not None and key[1] <= held[1]:
            raise ValueError(f"{self._source} offers version {key[1]} after {held[1]}")
        if offer["block"] is not None:
            copy = self._mapped(key, layout, offer["block"])
        else:
            fetched = self._fetch(key, layout, offer["source"], set(offer["unchanged"]))
            if fetched is None:
                return
            copy = fetched
        with self._changed:
            self._held, self._fetched = copy, None
            self._counts["versions"] += 1
            self._reason = "there is no newer version"
            self._changed.notify_all()
        self._answer_early(copy)

    def _fetch(
        self, key: Key, layout: Layout, source: tuple[str | None, bool], unchanged: set[int]
    ) -> Copy | None:
        """Fetches a version from its sources. None: no source has it any more."""
        copy: Copy | None = None
        whole: Copy | None = None
        try:
            while whole is None:
                peer, borrows = source
                try:
                    if borrows and peer is not None:
                        whole = self._borrow(peer, key, layout)
                    else:
                        copy = copy or self._begin(key, layout, unchanged)
                        whole = copy if self._fetch_chunks(peer, key, copy) else None
                except (CancelledError, Closed):
                    raise
                except (Error, TypeError, ValueError) as error:  # the reply is no chunk
                    self._note(error)
                if whole is None:
                    other = self._other_source(peer)
                    if other is None:
                        return None
                    source = other
        finally:
            if copy is not None and copy is not whole:
                copy.abandon()
        return whole

    def _begin(self, key: Key, layout: Layout, unchanged: set[int]) -> Copy:
        block = lending.empty(layout.size, "uint8")
        held = self._held
        if unchanged and held is not None and held.layout == layout:
            np.copyto(block, held.block)
        else:
            unchanged = set()
        copy = Copy(key, layout, block, unchanged)
        with self._changed:
            self._fetched = copy
        self._answer_early(copy)
        return copy

    def _borrow(self, peer: str, key: Key, layout: Layout) -> Copy | None:
        """Maps a copy of this host; None: the peer has it no more."""
        reply = self._result(self._rpc.async_(peer, names.COPY.format(self._name), key))
        return None if reply is None else self._mapped(key, layout, reply)

    def _mapped(self, key: Key, layout: Layout, block: Any) -> Copy:
        block = _as_bytes(block)
        if block.shape != (layout.size,):
            raise ValueError(f"a version of {layout.size} bytes came as {block.shape}")
        self._count(bytes_mapped=layout.size)
        return Copy(key, layout, block, set(range(layout.chunks)))

    def _other_source(self, failed: str | None) -> tuple[str | None, bool] | None:
        function = names.SOURCE.format(self._name)
        call = self._rpc.async_(self._publisher, function, self._rpc.get_name(), failed)
        source: tuple[str | None, bool] | None = self._result(call)
        return source

    def _fetch_chunks(self, peer: str | None, key: Key, copy: Copy) -> bool:
        """Asks for the missing chunks, some ahead; returns False if the peer has them no more."""
        to = self._publisher if peer is None else peer
        function = (names.CHUNK if peer is None else names.COPY_CHUNK).format(self._name)
        wanted = collections.deque(copy.missing)
        asked: collections.deque[tuple[int, Future]] = collections.deque()
        try:
            while wanted or asked:
                while wanted and len(asked) < _WINDOW:
                    index = wanted.popleft()
                    asked.append((index, self._rpc.async_(to, function, key, index)))
                index, future = asked[0]
                data = self._result(future, _TIMEOUT)
                asked.popleft()
                if data is None:
                    return False
                data = _as_bytes(data)
                if data.shape != copy.block[index * CHUNK : (index + 1) * CHUNK].shape:
                    raise ValueError(f"{naming.quoted(to)} gave a chunk of {data.shape} bytes")
                copy.put(index, data)
                self._count(chunks=1, bytes_fetched=len(data))
        finally:
            for _, future in asked:
                future.cancel()
        return True

    def _count(self, **counts: int) -> None:
        with self._changed:
            for name, count in counts.items():
                self._counts[name] += count

    def _end(self) -> None:
        super()._end()
        with self._changed:
            early, self._early = self._early, []
            fetched, self._fetched = self._fetched, None
        if fetched is not None:
            fetched.abandon()
        for _, _, reply in early:
            reply(None)

    # Calls of other subscribers

    def _on_chunk(self, reply: RpcDeferredReturn, key: Any, index: int) -> None:
        self._give(reply, key_of(key), integer_of(index, "chunk", least=0))

    def _on_copy(self, reply: RpcDeferredReturn, key: Any) -> None:
        self._give(reply, key_of(key), None)

    def _give(self, reply: RpcDeferredReturn, key: Key, index: int | None) -> None:
        with self._changed:
            copy = next((c for c in (self._held, self._fetched) if c and c.key == key), None)
            if copy is None and not self._closed and self._will_fetch(key):
                self._early = [one for one in self._early if not one[2].cancelled()]
                self._early.append((key, index, reply))
                return
        _give(reply, copy, index)

    def _will_fetch(self, key: Key) -> bool:
        """Whether it is newer than all that is here: the publisher told the asker before us."""
        newest = self._fetched or self._held
        return newest is None or newest.key[0] != key[0] or newest.key[1] < key[1]

    def _answer_early(self, copy: Copy) -> None:
        with self._changed:
            answered = [
                (key, index, reply) for key, index, reply in self._early if key[1] <= copy.key[1]
            ]
            self._early = [one for one in self._early if one not in answered]
        for key, index, reply in answered:
            _give(reply, copy if key == copy.key else None, index)


def _give(reply: RpcDeferredReturn, copy: Copy | None, index: int | None) -> None:
    if copy is None:
        reply(None)
    elif index is None:
        copy.give(reply)
    elif index >= copy.layout.chunks:
        reply.error(ValueError(f"chunk must be at most {copy.layout.chunks - 1}, got {index}"))
    else:
        copy.give_chunk(reply, index)


def _as_bytes(array: Any) -> Bytes:
    """A reply as numpy's: the peer may ask for another framework's arrays."""
    return array if isinstance(array, np.ndarray) else np.asarray(array)
