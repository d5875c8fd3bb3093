"""Groups at the broker that may be meant to be one: peers wait in each for those of the other."""

from __future__ import annotations

from moolink.group.broker_peer import GROUPS
from moolink.rpc import Rpc

_PATIENCE = 1.0  # seconds for the broker's answer
_MOST_SHOWN = 3


def other_groups(rpc: Rpc, broker: str, name: str, count: int) -> str:
    """Names the other groups at the broker that have fewer members than this one waits for; "":
    there are none, or the broker does not tell.

    Args:
        broker: name of the broker.
        name: of this group.
        count: of the members that it waits for.
    """
    if not any(peer["name"] == broker and peer["connected"] for peer in rpc.peers()):
        return ""
    answer = rpc.async_(broker, GROUPS)
    if not answer.wait(_PATIENCE):
        answer.cancel()
        return ""
    sizes = {} if answer.exception() is not None else answer.result()
    if not isinstance(sizes, dict):
        return ""
    others = [
        f"{other!r} with {size} member{'' if size == 1 else 's'}"
        for other, size in sizes.items()
        if other != name and isinstance(size, int) and 0 < size < count
    ]
    if not others:
        return ""
    return (
        f"the broker also has group {', '.join(others[:_MOST_SHOWN])}: give all peers of a job the "
        "same group's name"
    )
