"""Names of peers in calls."""

from __future__ import annotations

import re

from moolink.rpc import serving

_BETWEEN = "\x1f"  # as in cpp/base/names.cc: a control character, so no name contains it


def in_group(group: str, name: str) -> str:
    """Returns the name of a peer of a group for a call, if several groups have a peer of that name.

    It is for the calls of an `Rpc`, as ``rpc.sync(in_group("pong", "server"), "f")``, and for
    ``rpc.explain``. Subscribers and the clients of replays and of inference take it, too, but give
    up at the peer's time limit even where a plain name would be waited for. It means the peer
    of that name that holds the group's key, or if no connected peer of the whole job knows one, the
    peer of the whole job that has the name, the caller too. Without it, a peer
    that holds the token calls a peer with a group's key only if no other group has a peer of the
    name; otherwise the call fails with an error that names the groups.

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
    return f"{group}{_BETWEEN}{name}"


def split(name: str) -> tuple[str, str]:
    """Returns the group ("": none) and the name in a name for calls."""
    group, _, alone = name.rpartition(_BETWEEN)
    return group, alone


def text(name: str) -> str:
    """Returns a name for calls as users are shown it: ``group/name``."""
    return name.replace(_BETWEEN, "/")
