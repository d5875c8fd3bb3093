"""The choice of the source from which each subscriber fetches a version: a machine without I/O.

Its states and rules: docs/design/protocol/publication.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from moolink.internal.integers import integer_of
from moolink.internal.shown import shown
from moolink.rpc import naming

Key = tuple[str, int, str]
"""A version to fetch: the publisher's instance, the number, the floating-point type."""


def key_of(given: Any) -> Key:
    """The key that a peer has sent.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise TypeError(f"{shown(given)} is not a key of a version")
    instance, version, dtype = given
    if not isinstance(instance, str) or not isinstance(dtype, str):
        raise TypeError(f"{shown(given)} is not a key of a version")
    return instance, integer_of(version, "version", least=0), dtype


@dataclasses.dataclass
class Member:
    """A subscriber, and the version that it fetches or has."""

    host: str
    key: Key
    complete: bool = False
    source: str | None = None  # None: the publisher
    borrows: bool = False  # has no copy of its own that others could borrow
    avoided: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a subscriber fetches a version: from a peer, or from the publisher (None). From a peer
    of its own host it takes the whole block, once that is complete; else chunk by chunk."""

    peer: str | None
    whole: bool


def _may_meet(one: str, other: str) -> bool:
    """Whether two subscribers have a key in common. Names of those with a group's key are as from
    :func:`moolink.in_group`."""
    groups = {naming.split(one)[0], naming.split(other)[0]}
    return len(groups) == 1 or "" in groups


class SourceChoice:
    """Keeps the publisher's link free: of each host one subscriber takes a version from another
    host, in a chain, and the others of the host take it from that one."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._members: dict[str, Member] = {}

    @property
    def members(self) -> dict[str, Member]:
        return self._members

    def begin(self, name: str, host: str, key: Key, alive: Collection[str]) -> Source:
        """A subscriber begins to fetch; `alive` are the subscribers that can be asked."""
        self._members.pop(name, None)  # so that it becomes the newest
        self._members[name] = Member(host, key)
        return self._assign(name, alive)

    def again(self, name: str, failed: str | None, alive: Collection[str]) -> Source | None:
        """A subscriber's source failed; returns another. None: it must ask for the next
        version instead."""
        member = self._members.get(name)
        if member is None or member.complete or failed is None:
            return None
        member.avoided.add(failed)
        return self._assign(name, alive)

    def done(self, name: str) -> None:
        """A subscriber has its whole version."""
        member = self._members.get(name)
        if member is not None:
            member.complete = True
            member.source = None

    def forget(self, name: str) -> None:
        """A subscriber has ended."""
        self._members.pop(name, None)

    @property
    def fetched(self) -> set[int]:
        """The versions that subscribers of other hosts fetch now."""
        return {
            it.key[1] for it in self._members.values() if not it.complete and it.host != self._host
        }

    def _assign(self, name: str, alive: Collection[str]) -> Source:
        member = self._members[name]
        member.source = None
        member.borrows = member.host == self._host
        if member.borrows:
            return Source(None, whole=True)
        holders = [
            other
            for other, it in self._members.items()
            if other != name
            and other in alive
            and it.key == member.key
            and not it.borrows
            and other not in member.avoided
            and _may_meet(other, name)
            and not self._depends_on(other, name)
        ]
        near = [other for other in holders if self._members[other].host == member.host]
        far = [other for other in holders if other not in near]
        member.borrows = bool(near)
        if near or far:
            member.source = self._least_asked(near or far)
        return Source(member.source, whole=member.borrows)

    def _depends_on(self, name: str, other: str) -> bool:
        """Whether a subscriber fetches from another one, directly or not."""
        source = self._members[name].source
        while source is not None and source != other:
            source = self._members[source].source if source in self._members else None
        return source == other

    def _least_asked(self, names: list[str]) -> str:
        asked = dict.fromkeys(names, 0)
        for member in self._members.values():
            if not member.complete and member.source in asked:
                asked[member.source] += 1
        return min(names, key=lambda name: (asked[name], not self._members[name].complete))
