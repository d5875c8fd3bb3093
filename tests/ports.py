"""Ports for programs that must be told theirs."""

from __future__ import annotations

import moolink


def unused_port() -> str:
    """A port of loopback that nobody listens on."""
    with moolink.Rpc() as rpc:
        return rpc.listen("127.0.0.1:0")[0].rpartition(":")[2]
