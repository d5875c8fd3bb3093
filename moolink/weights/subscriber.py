"""Subscriber: has the newest version that a publisher has made."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from moolink import deadlines, forks, lending, logs, serving
from moolink._core import LentSlot, host_key
from moolink.closing import Closing
from moolink.errors import CancelledError, Closed, Error, TimeoutError
from moolink.keywords import names_keywords
from moolink.weights import names
from moolink.weights.blob import CHUNK, Arrays, Bytes, FloatType, Layout
from moolink.weights.copies import Copy, Weights
from moolink.weights.spread import Key, key_of

if TYPE_CHECKING:
    from moolink._core import Future, RpcDeferredReturn
    from moolink.rpc import Rpc

_WINDOW = 8  # chunks asked for at once
_TURN = 2.0  # seconds between two looks at whether the publisher is connected
_PATIENCE = 10.0  # seconds without a chunk, after which another source is asked for
_PAUSES = (0.05, 2.0)  # seconds between attempts: the first, the longest


class Subscriber(Closing):
    """Follows a :class:`Publisher`: a thread fetches each new version, which becomes the current
    one when it is whole. Versions never go back, also if the publisher is restarted.

    Args:
        rpc: this peer, connected to the publisher or to a peer that knows it.
        name: what is published.
        publisher: the publisher's peer.
        arrays: what trees are made of: "numpy", "torch", "jax", or "same": what was published.
            Numpy's and JAX's share memory with the publisher on one host, torch's are copies.
        dtype: the type to which the publisher converts floating-point numbers, once for all that
            ask for it ("float32", "float16", "bfloat16"); None: they stay.

    Raises:
        ValueError: this peer subscribes to that name already, or `arrays` or `dtype` is unknown.
    """

    @names_keywords
    def __init__(
        self,
        rpc: Rpc,
        name: str,
        publisher: str,
        *,
        arrays: Arrays = "same",
        dtype: FloatType | None = None,
    ) -> None:
        if dtype not in (None, "float32", "float16", "bfloat16"):
            raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype!r}")
        if arrays not in get_args(Arrays):
            raise ValueError(f"arrays must be one of {', '.join(get_args(Arrays))}, got {arrays!r}")
        self._rpc = rpc
        self._name = name
        self._publisher = publisher
        self._arrays: Arrays = arrays
        self._dtype = dtype or ""
        self._host = host_key()
        self._held: Copy | None = None  # the current version
        self._fetched: Copy | None = None  # the next one, while it is fetched
        self._early: list[tuple[Key, int | None, RpcDeferredReturn]] = []
        self._call: Future | None = None  # that the thread waits for
        self._reason = "it has not answered yet"
        self._closed = False
        self._counts = {"versions": 0, "chunks": 0, "bytes_fetched": 0, "bytes_mapped": 0}
        self._forked()
        rpc.define_deferred(names.COPY_CHUNK.format(name), self._on_chunk)
        rpc.define_deferred(names.COPY.format(name), self._on_copy)
        forks.changes_in_children(self)
        self._thread = threading.Thread(
            target=self._run, name=f"moolink-subscriber-{name}", daemon=True
        )
        self._thread.start()

    def latest(self) -> Weights | None:
        """The current version, without waiting; None: there was none yet. The same object until
        the next version is whole."""
        with self._changed:
            copy = self._held
        return None if copy is None else copy.weights(self._arrays)

    @property
    def version(self) -> int | None:
        """The current version's number."""
        with self._changed:
            return None if self._held is None else self._held.key[1]

    def wait(self, min_version: int = 0, timeout: float | None = None) -> Weights:
        """Waits for a version of at least `min_version`, and returns the current one.

        Raises:
            TimeoutError: there was none in `timeout` seconds; the message says why.
            moolink.Closed: the subscriber or its peer was closed.
        """
        wait = deadlines.Wait(timeout)
        with self._changed:
            while self._held is None or self._held.key[1] < min_version:
                if self._closed:
                    raise Closed(f"the subscriber of {self._name!r} was closed")
                if wait.over:
                    has = "none" if self._held is None else f"version {self._held.key[1]}"
                    raise TimeoutError(
                        f"no version {min_version} of {self._name!r} came from "
                        f"{self._publisher!r} within {timeout:g} s; there is {has}: {self._reason}",
                        peer=self._publisher,
                    )
                turn = wait.turn(
                    f"the subscriber of {self._name!r} waits for version {min_version} from "
                    f"{self._publisher!r}: {self._reason}"
                )
                with LentSlot():
                    self._changed.wait(turn)
        weights = self.latest()
        assert weights is not None
        return weights

    def stats(self) -> dict[str, Any]:
        """The current version, and what came so far: versions, chunks, bytes that were fetched and
        bytes that were mapped from a process of this host."""
        with self._changed:
            version = None if self._held is None else self._held.key[1]
            return {"version": version, **self._counts, "waiting_for": self._reason}

    def close(self) -> None:
        """Ends it. Trees that it has given out stay valid."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        self._thread.join()
        for function in (names.COPY_CHUNK, names.COPY):
            serving.undefine(self._rpc, function.format(self._name))

    def __repr__(self) -> str:
        return (
            f"<moolink.Subscriber of {self._name!r} at {self._publisher!r}, version {self.version}>"
        )

    def _forked(self) -> None:
        self._changed = threading.Condition()

    # The thread

    def _run(self) -> None:
        pause = _PAUSES[0]
        try:
            while True:
                try:
                    self._follow_once()
                    pause = _PAUSES[0]
                except CancelledError:
                    pass  # by close()
                except Closed as closed:
                    self._reason = str(closed)
                    return
                except Exception as error:  # noqa: BLE001 - a peer may send anything
                    self._note(error)
                    self._pause(pause)
                    pause = min(2 * pause, _PAUSES[1])
                with self._changed:
                    if self._closed:
                        return
        finally:
            self._end()

    def _follow_once(self) -> None:
        """Waits for the next version and fetches it; a TimeoutError of the call is no error."""
        held = None if self._held is None else self._held.key
        try:
            offer = self._next(held)
        except TimeoutError as error:
            self._reason = str(error)
            return
        layout = Layout.from_wire(offer["layout"])
        key = key_of(offer["key"])
        if held is not None and key[1] <= held[1]:
            raise ValueError(f"{self._publisher!r} offers version {key[1]} after {held[1]}")
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

    def _next(self, held: Key | None) -> Any:
        call = self._rpc.async_(
            self._publisher,
            names.NEXT.format(self._name),
            self._rpc.get_name(),
            self._host,
            held,
            self._dtype,
        )
        away = deadlines.Wait()
        with self._under_way(call):
            # In turns of which the log does not tell: there may be no newer version for long.
            while not call.wait(_TURN):
                if self._publisher not in serving.connected(self._rpc):
                    away.turn(
                        f"the subscriber of {self._name!r} waits for the peer "
                        f"{self._publisher!r}, which is not connected: is its name right?"
                    )
            return call.result()

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
                except (Error, TypeError, ValueError) as error:  # what came is no chunk
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
        """Asks for what is missing, some chunks ahead; returns False if the peer has it no more."""
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
                data = self._result(future, _PATIENCE)
                asked.popleft()
                if data is None:
                    return False
                data = _as_bytes(data)
                if data.shape != copy.block[index * CHUNK : (index + 1) * CHUNK].shape:
                    raise ValueError(f"{to!r} gave a chunk of {data.shape} bytes")
                copy.put(index, data)
                self._count(chunks=1, bytes_fetched=len(data))
        finally:
            for _, future in asked:
                future.cancel()
        return True

    def _result(self, future: Future, timeout: float | None = None) -> Any:
        """Waits for a call, which close() cancels."""
        with self._under_way(future):
            return future.result(timeout)

    @contextlib.contextmanager
    def _under_way(self, call: Future) -> Iterator[None]:
        with self._changed:
            self._call = call
            closed = self._closed
        if closed:
            call.cancel()
        try:
            yield
        finally:
            with self._changed:
                self._call = None

    def _count(self, **counts: int) -> None:
        with self._changed:
            for name, count in counts.items():
                self._counts[name] += count

    def _note(self, error: Exception) -> None:
        self._reason = str(error) if isinstance(error, Error) else repr(error)
        level = logging.INFO if isinstance(error, Error) else logging.WARNING
        logs.logger.log(level, "subscriber of %r: %s", self._name, self._reason)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            early, self._early = self._early, []
            fetched, self._fetched = self._fetched, None
            self._changed.notify_all()
        if fetched is not None:
            fetched.abandon()
        for _, _, reply in early:
            reply(None)

    # Calls of other subscribers

    def _on_chunk(self, reply: RpcDeferredReturn, key: Any, index: int) -> None:
        self._give(reply, key_of(key), index)

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
    else:
        copy.give_chunk(reply, index)


def _as_bytes(array: Any) -> Bytes:
    """What came, as numpy's: the peer may ask for another framework's arrays."""
    return array if isinstance(array, np.ndarray) else np.asarray(array)
