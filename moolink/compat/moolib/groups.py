"""moolib's Group and Broker."""

from __future__ import annotations

import moolink
from moolink.compat.moolib.arguments import with_runtime_errors

_LEAST_TIMEOUT = 1.0  # seconds: moolink notices a death at once, and other silence not earlier


@with_runtime_errors("__init__", "all_reduce", "set_sort_order", "set_timeout", "update")
class Group(moolink.Group):
    """An elastic set of peers, as :class:`moolink.Group`."""

    def set_timeout(self, seconds: float) -> None:
        """Sets how long a peer may be silent, at least 1 s."""
        super().set_timeout(max(seconds, _LEAST_TIMEOUT))


@with_runtime_errors("__init__", "listen", "set_name")
class Broker(moolink.Broker):
    """Where the peers of groups meet, as :class:`moolink.Broker`."""

    __module__ = "moolib"
