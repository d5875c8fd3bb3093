"""The functions by which publishers and subscribers call each other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from moolink.errors import Closed

if TYPE_CHECKING:
    from moolink.rpc import Rpc

# Of a publisher.
NEXT = "moolink.weights/{}/next"
SOURCE = "moolink.weights/{}/source"
CHUNK = "moolink.weights/{}/chunk"
# Of a subscriber, for others.
COPY_CHUNK = "moolink.weights/{}/copy/chunk"
COPY = "moolink.weights/{}/copy"


def undefine(rpc: Rpc, function: str) -> None:
    """Withdraws a function; of a peer that is closed there is nothing to withdraw."""
    with contextlib.suppress(Closed):
        rpc.undefine(function)
