"""Publisher: gives versions of a tree of arrays to subscribers."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from moolink import _core
from moolink.errors import Closed, TimeoutError
from moolink.internal import deadlines, forks
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.internal.locks import condition
from moolink.internal.shown import shown
from moolink.metrics import sources
from moolink.metrics.sources import Value
from moolink.reports import PublisherStats
from moolink.rpc import lending, naming, serving
from moolink.weights import agreement, blob, names
from moolink.weights.agreement import Holds
from moolink.weights.blob import Bytes, Layout
from moolink.weights.shards import pieces_given
from moolink.weights.source_choice import Key, Source, SourceChoice, key_of

if TYPE_CHECKING:
    from moolink._core import RpcDeferredReturn
    from moolink.rpc import Rpc


# The largest version that a peer may have from another publisher: those above it must be valid,
# too.
_LARGEST_OF_OTHERS = 1 << 61


@dataclasses.dataclass
class _Snapshot:
    """A version, in the floating-point types in which it was asked for; "": as it was published."""

    version: int
    forms: dict[str, tuple[Layout, Bytes]]
    unchanged: dict[tuple[int, str], list[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Request:
    """A subscriber that waits for a version newer than the one it has."""

    reply: RpcDeferredReturn
    subscriber: str  # see _known_as
    host: str
    held: Key | None
    dtype: str
    above: int  # the version that it has or has heard of
    sharded: agreement.Subscriber | None = None  # which fetches pieces of arrays


@names_keywords
class Publisher(Closing):
    """Gives versions of a tree of arrays to any number of :class:`Subscriber`.

    A subscriber takes a version over whole or not at all, whichever process dies. Subscribers of
    this host map one copy. Of each other host one subscriber fetches a version, from the publisher
    or from another host's that has it; so the publisher's link carries each version about once.

    Args:
        rpc: the peer that subscribers know as `publisher`.
        name: of the weights; one publisher of a name at a peer.
        keep: number of newest versions that can be fetched, at least 1. Older versions are kept
            while a subscriber of another host fetches them, and one for each
            :class:`ShardedSubscriber`.

    Raises:
        ValueError: this peer publishes that name already, or `keep` is below 1.
    """

    def __init__(self, rpc: Rpc, name: str, *, keep: int = 2) -> None:
        self._rpc = serving.peer_of(rpc)
        self._name = serving.text_of(name, "name")
        self._keep = integer_of(keep, "keep", least=1)
        self._instance = _core.create_uid()
        self._snapshots: dict[int, _Snapshot] = {}  # by version, the oldest first
        self._version: int | None = None
        self._least = 0  # versions below were seen at subscribers
        self._acknowledged: dict[str, int] = {}
        self._requests: list[_Request] = []
        self._sources = SourceChoice(_core.host_key())
        self._holds = Holds()
        self._closed = False
        self._forked()
        with serving.only_one(f"a publisher or parameter server of {name!r}"):
            rpc.define_deferred(names.NEXT.format(name), self._on_next)
        rpc.define_deferred(names.SOURCE.format(name), self._on_source)
        rpc.define(names.CHUNK.format(name), self._on_chunk)
        rpc.define_deferred(names.PARTS_NEXT.format(name), self._on_parts_next)
        rpc.define(names.PARTS.format(name), self._on_parts)
        rpc.define_deferred(names.PARTS_END.format(name), self._on_parts_end)
        forks.changes_in_children(self)
        sources.add(self, rpc)
        self._thread = threading.Thread(
            target=self._serve, name=f"moolink-publisher-{name}", daemon=True
        )
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The newest version; None: nothing was published."""
        return self._version

    def publish(self, tree: Any, version: int | None = None) -> int:
        """Copies a tree of arrays and makes the copy the newest version; returns its number.

        Does not wait for subscribers. One that is slow skips versions.

        Args:
            tree: arrays of any framework, :class:`Shard` and numbers, in dicts, lists, tuples and
                registered namedtuples.
            version: its number, above those before; None: the next one, above those that
                subscribers have from a publisher before this one.

        Raises:
            TypeError: a leaf is no array, tensor or number, a container is of a type that is not
                registered (and this peer has not `allow_pickle`), or `version` is no integer.
            ValueError: `version` is not above the last one, or negative.
            moolink.Closed: the publisher is closed.
        """
        if version is not None:
            version = integer_of(version, "version", least=0)
        packed = blob.pack(tree, allow_pickle=self._rpc.allows_pickle)
        with self._changed:
            self._require_open()
            last = self._least - 1 if self._version is None else self._version
            if version is None:
                version = max(last + 1, self._least)
            elif self._version is not None and version <= self._version:
                raise ValueError(f"version {version} is not above the last one, {self._version}")
            self._version = version
            self._snapshots[version] = _Snapshot(version, {"": packed})
            waiting = [
                (request.sharded, request.above)
                for request in self._requests
                if request.sharded is not None and not request.reply.cancelled()
            ]
            self._holds.published(version, waiting, time.monotonic())
            self._drop_old()
            self._changed.notify_all()
        return version

    def _drop_old(self) -> None:
        """Drops the versions that no subscriber needs; the caller holds the lock."""
        old = set(list(self._snapshots)[: -self._keep])
        if old & (self._sources.fetched | self._holds.versions):
            self._forget_the_dead()
        for version in old - self._sources.fetched - self._holds.versions:
            del self._snapshots[version]

    def acknowledged(self) -> dict[str, int]:
        """The version that each connected subscriber has, by its peer's name ("group/name" if that
        holds a group's key, and this peer the token). Subscribers of one peer share an entry: the
        version of the one that asked last."""
        with self._changed:
            self._forget_the_dead()
            return {naming.text(peer): version for peer, version in self._acknowledged.items()}

    def wait_acknowledged(
        self, version: int, count: int = 1, timeout: float | None = None
    ) -> dict[str, int]:
        """Waits until at least `count` subscribers have `version` or a newer one; returns
        `acknowledged()`.

        Raises:
            TimeoutError: fewer have it after `timeout` seconds; the message lists their versions.
            moolink.Closed: the publisher was closed.
        """
        version, count = integer_of(version, "version"), integer_of(count, "count")
        wait = deadlines.Wait(timeout)
        with self._changed:
            while True:
                self._require_open()
                there = self.acknowledged()
                ready = sum(v >= version for v in there.values())
                if ready >= count:
                    return there
                if wait.over:
                    raise TimeoutError(
                        f"{ready} of {count} subscribers of {self._name!r} have version "
                        f"{version} after {timeout:g} s; {_versions(there)}"
                    )
                wait.for_change(
                    self._changed,
                    f"the publisher of {self._name!r} waits for {count} subscribers that have "
                    f"version {version}; {_versions(there)}",
                )

    def stats(self) -> PublisherStats:
        """Returns the versions that are there, and each subscriber's."""
        with self._changed:
            acknowledged = self.acknowledged()
            newest = self._snapshots.get(-1 if self._version is None else self._version)
            return {
                "version": self._version,
                "bytes": 0 if newest is None else newest.forms[""][0].size,
                "kept": list(self._snapshots),
                "waiting": len(self._requests),
                "subscribers": {
                    naming.text(peer): {
                        "version": acknowledged.get(naming.text(peer)),
                        "host": member.host,
                        "source": naming.text(member.source or ""),
                    }
                    for peer, member in self._sources.members.items()
                },
            }

    def _metrics(self) -> Iterator[Value]:
        labels = {"name": self._name}
        if self._version is not None:
            yield "moolink_published_version", labels, self._version
            yield "moolink_subscribers", labels, len(self.acknowledged())

    def close(self) -> None:
        """Ends it. Subscribers keep their weights, and wait for a publisher of this name."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            requests, self._requests = self._requests, []
            self._changed.notify_all()
        sources.remove(self)
        for request in requests:
            request.reply.reject(f"the publisher of {self._name!r} was closed")
        for function in names.OF_PUBLISHER:
            serving.undefine(self._rpc, function.format(self._name))
        self._thread.join()

    def __repr__(self) -> str:
        return f"<moolink.Publisher of {self._name!r}, version {self._version}>"

    def _forked(self) -> None:
        self._changed = condition()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed(f"the publisher of {self._name!r} was closed")

    # Calls of subscribers

    def _on_next(
        self,
        reply: RpcDeferredReturn,
        subscriber: str,
        host: str,
        held: Any,
        dtype: str,
    ) -> None:
        serving.text_of(host, "host")
        held = None if held is None else key_of(held)
        has = None if held is None else held[1]
        if held is not None and held[0] == self._instance and held[1] > (self._version or 0):
            raise ValueError(f"version {has} was never made: the newest is {self._version}")
        subscriber = _known_as(reply, subscriber)
        self._ask(_Request(reply, subscriber, host, held, dtype, -1 if has is None else has), has)

    def _on_parts_next(
        self,
        reply: RpcDeferredReturn,
        subscriber: str,
        number: int,
        held: Any,
        above: int,
        dtype: str,
    ) -> None:
        subscriber = _known_as(reply, subscriber)
        sharded = _sharded(subscriber, number)
        above = integer_of(above, "above", least=-1)
        has = None if held is None else integer_of(held, "version", least=0)
        self._ask(_Request(reply, subscriber, "", None, dtype, above, sharded), has)

    def _on_parts_end(self, reply: RpcDeferredReturn, subscriber: str, number: int) -> None:
        sharded = _sharded(_known_as(reply, subscriber), number)
        with self._changed:
            self._holds.ended(sharded)
            self._drop_old()
        serving.answer(reply, None)

    def _ask(self, request: _Request, has: int | None) -> None:
        """A subscriber that has a version waits for a newer one."""
        subscriber = request.subscriber
        if not isinstance(request.dtype, str) or request.dtype not in ("", *blob.FLOATS):
            raise TypeError(f"{shown(request.dtype)} is not a type to convert to")
        if has is not None:
            integer_of(has, "version", most=max(_LARGEST_OF_OTHERS, self._version or 0))
        with self._changed:
            if self._closed:
                request.reply.reject(f"the publisher of {self._name!r} was closed")
                return
            if has is None:
                self._acknowledged.pop(subscriber, None)
            else:
                self._acknowledged[subscriber] = has
                self._least = max(self._least, has + 1)
            if request.sharded is not None:
                now = time.monotonic()
                self._holds.asked(request.sharded, request.above, self._version, now)
            elif has is not None:
                self._sources.done(subscriber)
            self._requests.append(request)
            self._changed.notify_all()

    def _on_parts(self, key: Any, pieces: Any) -> list[Any] | None:
        wanted = pieces_given(pieces)
        form = self._form(key_of(key))
        if form is None:
            return None
        return [lending.lend(blob.part(*form, piece.field, piece.region)) for piece in wanted]

    def _on_source(self, reply: RpcDeferredReturn, subscriber: str, failed: str | None) -> None:
        subscriber = _known_as(reply, subscriber)
        connected = self._connected()
        with self._changed:
            if failed is not None and (of_group := _known_as(reply, failed, "failed")) in connected:
                failed = of_group
            source = self._sources.again(subscriber, failed, connected)
        serving.answer(reply, None if source is None else _told(subscriber, source))

    def _on_chunk(self, key: Any, index: int) -> Any:
        index = integer_of(index, "chunk", least=0)
        form = self._form(key_of(key))
        if form is None:
            return None
        integer_of(index, "chunk", most=form[0].chunks - 1)
        return lending.lend(form[1][index * blob.CHUNK : (index + 1) * blob.CHUNK])

    def _form(self, key: Key) -> tuple[Layout, Bytes] | None:
        instance, version, dtype = key
        with self._changed:
            snapshot = self._snapshots.get(version)
            if instance != self._instance or snapshot is None:
                return None
        return self._converted(snapshot, dtype)

    def _converted(self, snapshot: _Snapshot, dtype: str) -> tuple[Layout, Bytes]:
        """The version in a floating-point type; converts it when first asked for it."""
        if dtype not in snapshot.forms:
            if dtype not in blob.FLOATS:
                raise TypeError(f"{shown(dtype)} is not a type to convert to")
            made = blob.converted(*snapshot.forms[""], dtype)  # type: ignore[arg-type]
            with self._changed:
                snapshot.forms.setdefault(dtype, made)
        return snapshot.forms[dtype]

    # The thread that answers the requests

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (due := self._due()) and not self._closed:
                    self._changed.wait(1.0 if self._requests else None)
                    self._requests = [r for r in self._requests if not r.reply.cancelled()]
                if self._closed:
                    return
                self._requests = [request for request in self._requests if request not in due]
                self._forget_the_dead()
                answers = [(request, self._snapshot_for(request)) for request in due]
            connected = self._connected()
            for request, snapshot in answers:
                try:
                    serving.answer(request.reply, self._offer(request, snapshot, connected))
                except Exception as error:  # noqa: BLE001 - such as no memory: others are served
                    request.reply.error(error)

    def _snapshot_for(self, request: _Request) -> _Snapshot:
        assert self._version is not None
        if request.sharded is None:
            return self._snapshots[self._version]
        version = self._holds.offer(request.sharded, request.above, self._version)
        return self._snapshots[version]

    def _forget_the_dead(self) -> None:
        """Subscribers that are not connected, and do not wait; the caller holds the lock."""
        alive = self._connected()
        alive |= {r.subscriber for r in self._requests if not r.reply.cancelled()}
        for peer in self._acknowledged.keys() - alive:
            del self._acknowledged[peer]
        for peer in self._sources.members.keys() - alive:
            self._sources.forget(peer)
        self._holds.forget(alive, time.monotonic())

    def _connected(self) -> set[str]:
        """The peers that are connected, and this one, as _known_as names them."""
        return naming.all_connected(self._rpc)

    def _due(self) -> list[_Request]:
        """The requests for which there is a newer version."""
        if self._version is None:
            return []
        return [request for request in self._requests if request.above < self._version]

    def _offer(
        self, request: _Request, snapshot: _Snapshot, connected: Collection[str]
    ) -> dict[str, Any]:
        layout, block = self._converted(snapshot, request.dtype)
        key = (self._instance, snapshot.version, request.dtype)
        if request.sharded is not None:
            return {"key": key, "layout": layout.to_wire()}
        with self._changed:
            source = self._sources.begin(request.subscriber, request.host, key, connected)
        mapped = source == Source(None, whole=True)
        return {
            "key": key,
            "layout": layout.to_wire(),
            "source": _told(request.subscriber, source),
            "block": lending.lend(block) if mapped else None,
            "unchanged": [] if mapped else self._unchanged(request, snapshot),
        }

    def _unchanged(self, request: _Request, snapshot: _Snapshot) -> list[int]:
        """The chunks that the subscriber has from its version."""
        if request.held is None or request.held[0] != self._instance:
            return []
        of = (request.held[1], request.dtype)
        if of not in snapshot.unchanged:
            held = self._form(request.held)
            layout, block = snapshot.forms[request.dtype]
            same = held is not None and held[0] == layout
            snapshot.unchanged[of] = blob.equal_chunks(held[1], block) if held and same else []
        return snapshot.unchanged[of]


def _versions(acknowledged: dict[str, int]) -> str:
    return f"they have {acknowledged}" if acknowledged else "no subscriber has any version"


def _sharded(subscriber: Any, number: Any) -> agreement.Subscriber:
    """The sharded subscriber that a peer has named."""
    return serving.text_of(subscriber, "subscriber"), integer_of(number, "number", least=0)


def _known_as(caller: RpcDeferredReturn, name: Any, argument: str = "subscriber") -> str:
    """A peer that a caller names: among peers with a group's key, those of its own group are meant.

    Raises:
        TypeError, ValueError: it is no name.
    """
    name, group = serving.text_of(name, argument), caller._caller_group()
    return naming.in_group(group, name) if group else name


def _told(subscriber: str, source: Source) -> tuple[str | None, bool]:
    """A source, named as the subscriber calls it: to a peer with a group's key, only its own group
    exists."""
    peer = source.peer
    if peer is not None and naming.split(subscriber)[0]:
        peer = naming.split(peer)[1]
    return peer, source.whole
