"""Functions that moolink's own objects define at their peers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from moolink.errors import Closed

if TYPE_CHECKING:
    from moolink.rpc import Rpc


def undefine(rpc: Rpc, function: str) -> None:
    """Withdraws a function; a peer that is closed has none."""
    with contextlib.suppress(Closed):
        rpc.undefine(function)
