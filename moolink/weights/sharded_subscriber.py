"""ShardedSubscriber: has the newest version that all of several publishers have published."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moolink.data import skeletons
from moolink.errors import Error, TimeoutError
from moolink.internal import deadlines
from moolink.internal.keywords import names_keywords
from moolink.reports import ShardedSubscriberStats
from moolink.rpc import lending, naming, serving
from moolink.weights import blob, names, shards
from moolink.weights.agreement import ASK_AGAIN, Agreement
from moolink.weights.blob import Arrays, Bytes, FloatType, Layout
from moolink.weights.copies import Weights
from moolink.weights.shards import Piece, Region, Where
from moolink.weights.source_choice import Key, key_of
from moolink.weights.subscriber_base import Following

if TYPE_CHECKING:
    from moolink._core import Future
    from moolink.rpc import Rpc


_LATER_WITHIN = 1.0  # seconds for a version that is later than those that publishers have
_numbers = itertools.count()  # one for each subscriber of the process


def _everything(path: str, shape: tuple[int, ...]) -> None:
    """Wants all of each array."""


@names_keywords
class ShardedSubscriber(Following):
    """Follows several :class:`Publisher` that hold a tree together, each array in parts
    (:class:`Shard`) or whole. Has a part of each array, or all of it, and fetches only the bytes
    of these parts.

    A version becomes current once all publishers have published it and all parts have arrived.
    Versions never go back. Publishers must publish the same versions. A publisher that is ahead
    keeps one version for each subscriber until the others reach it.

    Args:
        rpc: this peer, connected to the publishers or to a peer that knows them.
        name: of the weights.
        publishers: the names of the publishers' peers.
        where: called with each array's path ("layers[0].weight") and its whole shape; returns the
            part that is wanted as a tuple of slices, or None for all of the array, the default.
            The part has all of the last dimensions for which there is no slice.
        arrays, dtype: as for :class:`Subscriber`. Numpy arrays and tensors are writable copies.

    Raises:
        ValueError: there are no publishers, or one is there twice; `arrays` or `dtype` is unknown.
    """

    def __init__(
        self,
        rpc: Rpc,
        name: str,
        publishers: Sequence[str],
        where: Where = _everything,
        *,
        arrays: Arrays = "same",
        dtype: FloatType | None = None,
    ) -> None:
        if isinstance(publishers, str) or not publishers or len({*publishers}) < len(publishers):
            raise ValueError(f"publishers must be the names of different peers, got {publishers!r}")
        self._publishers = [serving.text_of(one, "a publisher") for one in publishers]
        super().__init__(rpc, name, ", ".join(map(naming.quoted, publishers)), arrays, dtype)
        self._number = next(_numbers)
        self._where = where
        self._weights: Weights | None = None
        self._agreement = Agreement()
        self._layouts: list[Layout] = []  # for which the plan was made
        self._counts = {"versions": 0, "pieces": 0, "bytes": 0}
        self._thread.start()

    def latest(self) -> Weights | None:
        with self._changed:
            return self._weights

    def stats(self) -> ShardedSubscriberStats:
        """Returns the current version, counts of received data, and why the subscriber waits."""
        with self._changed:
            return {
                "version": self._current(),
                "versions": self._counts["versions"],
                "pieces": self._counts["pieces"],
                "bytes": self._counts["bytes"],
                "waiting_for": self._reason,
            }

    def __repr__(self) -> str:
        return (
            f"<moolink.weights.ShardedSubscriber of {self._name!r} at {self._source}, "
            f"version {self.version}>"
        )

    def _peers(self) -> list[str]:
        return self._publishers

    def _current(self) -> int | None:
        return None if self._weights is None else self._weights.version

    def _withdraw(self) -> None:
        function = names.PARTS_END.format(self._name)
        for peer in self._publishers:
            with contextlib.suppress(Error):  # one that is lost, or does not hear it, forgets it
                self._rpc.async_(peer, function, self._rpc.get_name(), self._number)

    # The thread

    def _follow_once(self) -> None:
        offers = self._offers()
        if offers is None:
            return
        layouts = [layout for _, layout in offers]
        if layouts != self._layouts:
            self._make_plan(layouts)
        versions = [key[1] for key, _ in offers]
        version = min(versions)
        keys = [(key[0], version, key[2]) for key, _ in offers]
        block = self._fetch(keys)
        if block is None:
            self._agreement.missed(versions)
            self._reason = f"a publisher no longer keeps version {version}"
            return
        self._agreement.took(version)
        weights = Weights(version, blob.unpack(self._wanted, block, self._arrays))
        with self._changed:
            self._weights = weights
            self._counts["versions"] += 1
            self._reason = "there is no newer version of all publishers"
            self._changed.notify_all()

    def _offers(self) -> list[tuple[Key, Layout]] | None:
        """Waits until each publisher has a newer version; None: the time has run out."""
        held = self._current()
        above = self._agreement.above
        deadline = deadlines.after(
            _LATER_WITHIN if self._agreement.asks_for_a_later_one else ASK_AGAIN
        )
        function = names.PARTS_NEXT.format(self._name)
        question = (self._rpc.get_name(), self._number, held, above, self._dtype)
        calls = [self._rpc.async_(peer, function, *question) for peer in self._publishers]
        offers = []
        try:
            for peer, call in zip(self._publishers, calls, strict=True):
                offer = self._next(call, peer, deadline)
                if offer is None:
                    self._agreement.late()
                    return None
                key = key_of(offer["key"])
                if key[1] <= above:
                    raise ValueError(f"{naming.quoted(peer)} offers version {key[1]} after {above}")
                offers.append((key, Layout.from_wire(offer["layout"])))
        except TimeoutError as error:
            self._reason = str(error)
            return None
        finally:
            _cancel(calls)
        return offers

    def _make_plan(self, layouts: list[Layout]) -> None:
        first = layouts[0]
        for peer, layout in zip(self._publishers, layouts, strict=True):
            same = layout.skeleton == first.skeleton and all(
                (a.dtype, a.whole) == (b.dtype, b.whole)
                for a, b in zip(layout.fields, first.fields, strict=True)
            )
            if not same:
                pair = f"{naming.quoted(peer)} and {naming.quoted(self._publishers[0])}"
                raise ValueError(f"{pair} publish trees of other arrays as {self._name!r}")
        paths = skeletons.paths(first.skeleton)
        self._regions: list[Region] = [
            shards.wanted_region(self._where, path, field.whole)
            for path, field in zip(paths, first.fields, strict=True)
        ]
        held = [[field.region for field in layout.fields] for layout in layouts]
        self._plan = shards.plan(self._regions, held, paths)
        self._wanted = blob.of_parts(first, self._regions)
        self._layouts = layouts

    def _fetch(self, keys: list[Key]) -> Bytes | None:
        """Fetches all pieces of a version; None: a publisher no longer has it."""
        function = names.PARTS.format(self._name)
        block = lending.empty(self._wanted.size, "uint8")
        calls: list[tuple[list[Piece], Future]] = []
        try:
            for peer, key, pieces in zip(self._publishers, keys, self._plan, strict=True):
                if pieces:
                    asked = [(piece.field, piece.region) for piece in pieces]
                    calls.append((pieces, self._rpc.async_(peer, function, key, asked)))
            for pieces, call in calls:
                parts = self._result(call)
                if parts is None:
                    return None
                for piece, part in zip(pieces, parts, strict=True):
                    self._put(block, piece, np.asarray(part))
        finally:
            _cancel([call for _, call in calls])
        return block

    def _put(self, block: Bytes, piece: Piece, part: Any) -> None:
        place = blob.part(self._wanted, block, piece.field, piece.region)
        if part.shape != place.shape or part.dtype != place.dtype:
            raise ValueError(
                f"a piece of {place.shape} {place.dtype} came as {part.shape} {part.dtype}"
            )
        place[...] = part
        with self._changed:
            self._counts["pieces"] += 1
            self._counts["bytes"] += part.nbytes


def _cancel(calls: list[Future]) -> None:
    for call in calls:
        call.cancel()
