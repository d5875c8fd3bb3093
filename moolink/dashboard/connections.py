"""Limits the dashboard's connections, to keep file descriptors free for the broker."""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web

MOST = 100
MOST_STREAMS = 80  # of MOST; the rest are for probes and Prometheus
FIRST_REQUEST = 10.0  # seconds, after which a connection without a request is closed


class Connections:
    """Creates the protocols of an aiohttp server, for `loop.create_server`."""

    def __init__(self, server: web.Server, most: int = MOST) -> None:
        self._server = server
        self._most = most
        self._new: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}  # no request yet

    def __call__(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        if len(self._server.connections) >= self._most:
            return _Refused()
        protocol = self._server()
        loop = asyncio.get_running_loop()
        self._new[protocol] = loop.call_later(FIRST_REQUEST, self._expire, protocol)
        return protocol

    def asks(self, request: web.Request) -> None:
        """Notes that a request has arrived."""
        if (timer := self._new.pop(request.protocol, None)) is not None:
            timer.cancel()

    def _expire(self, protocol: web.RequestHandler) -> None:
        del self._new[protocol]
        if protocol.transport is not None:
            protocol.transport.abort()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()
