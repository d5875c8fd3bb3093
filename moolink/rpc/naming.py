"""Names of peers in calls, and which of them are connected."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moolink import _core
from moolink.rpc import serving

if TYPE_CHECKING:
    from moolink.rpc import Rpc

_BETWEEN = "\x1f"  # as in cpp/base/names.cc: a control character, so no name contains it


def in_group(group: str, name: str) -> str:
    """Returns the name of a peer of a group for a call, if several groups have a peer of that name.

    It is for the calls of an `Rpc`, as ``rpc.sync(in_group("pong", "server"), "f")``, for
    ``rpc.explain``, and for subscribers, writers and clients, which take names of peers. It means
    the peer of that name that holds the group's key. If no connected holder of the token knows one,
    it means the holder of the token of that name, which may be the caller. Without ``in_group``, a
    peer that holds the token calls a peer with a group's key only if no other group has a peer of
    the name; otherwise the call fails with an error that names the groups.

    Args:
        group: the group's name.
        name: the peer's name.

    Raises:
        TypeError: one of them is not a str.
        ValueError: one of them is not a name: it is empty or contains control characters.
    """
    for what, value in (("group", group), ("name", name)):
        text = serving.text_of(value, what)
        if not text or re.search(r"[\x00-\x1f\x7f-\x9f]", text):
            raise ValueError(f"{what} {text!r} is not a name: empty, or with control characters")
    return joined(group, name)


def joined(group: str, name: str) -> str:
    """As :func:`in_group`, for arguments that are known to be names, or without a group ("")."""
    return f"{group}{_BETWEEN}{name}" if group else name


def split(name: str) -> tuple[str, str]:
    """Returns the group ("": none) and the name in a name for calls."""
    group, _, alone = name.rpartition(_BETWEEN)
    return group, alone


def text(name: str) -> str:
    """Returns a name for calls as users are shown it: ``group/name``."""
    return name.replace(_BETWEEN, "/")


def quoted(name: str) -> str:
    """Returns a name for calls as users are shown it, in quotes."""
    return repr(text(name))


def without_group(name: str, what: str) -> str:
    """Returns the name; refuses one from :func:`in_group`.

    Raises:
        TypeError: it is not a str.
        ValueError: it is from in_group.
    """
    if split(serving.text_of(name, "name"))[0]:
        raise ValueError(f"{what} must be a name alone, got {quoted(name)}, which names a group")
    return name


def of_peer(rpc: Rpc, group: str, name: str) -> str:
    """Returns the name for calls that means one peer among all that `rpc` may meet.

    Args:
        rpc: the peer that calls.
        group: the group whose key the other peer has shown ("": none), as `Rpc.peers` tells it.
        name: the other peer's name.
    """
    return joined("" if group == rpc.key_group else group, name)


def all_connected(rpc: Rpc) -> set[str]:
    """The connected peers and this one, as :func:`of_peer` names them."""
    there = {of_peer(rpc, peer["group"], peer["name"]) for peer in rpc.peers() if peer["connected"]}
    return there | {rpc.get_name()}


def connected(rpc: Rpc, names: Iterable[str]) -> set[str]:
    """Those of the names for calls that mean a connected peer or this one. A name with a group
    means that group's peer, else one with the job's token; a plain name means any peer."""
    there = {(peer["group"], peer["name"]) for peer in rpc.peers() if peer["connected"]}
    there.add((rpc.key_group, rpc.get_name()))
    plain = {name for _, name in there}

    def means_one(name: str) -> bool:
        group, alone = split(name)
        if not group:
            return alone in plain
        return (group, alone) in there or ("", alone) in there

    return {name for name in names if means_one(name)}


def make_id(rpc: Rpc) -> str:
    """A name for an object of this peer, under which another peer keeps something for it."""
    return f"{joined(rpc.key_group, rpc.get_name())}/{_core.create_uid()}"


def gone(rpc: Rpc, ids: Iterable[str]) -> list[str]:
    """The ids from :func:`make_id` whose peers are not connected."""
    there = all_connected(rpc)
    return [one for one in ids if of_peer(rpc, *split(one.rpartition("/")[0])) not in there]
