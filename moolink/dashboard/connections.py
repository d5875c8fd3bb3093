"""Limits the dashboard's connections, to keep file descriptors free for the broker.

A client without the key cannot keep key holders out. Its connection is closed after a short time,
or earlier if more come: then the oldest from the address with the most is closed. Key holders have
connections of their own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Iterator
from typing import NamedTuple, cast

from aiohttp import web

MOST = 100  # connections of key holders
MOST_STREAMS = 80  # of MOST; the rest are for probes and Prometheus
STRANGERS = 128  # connections on which the key has not been given
OF_SOURCE = 64  # of them, from one address
WITHOUT_KEY = 5.0  # seconds until such a connection is closed, even in the middle of a request


class _Stranger(NamedTuple):
    source: str
    timer: asyncio.TimerHandle


class Connections:
    """Creates the protocols of an aiohttp server, for `loop.create_server`."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._strangers: dict[web.RequestHandler, _Stranger] = {}  # the oldest is the first
        self._holders: dict[web.RequestHandler, int] = {}  # requests under way; as above

    def __call__(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        return _Arriving(self)

    def arrived(self, transport: asyncio.Transport) -> None:
        """A connection has come: gives it to the server."""
        self._forget_closed()
        source = str((transport.get_extra_info("peername") or ("",))[0])
        sources = collections.Counter(one.source for one in self._strangers.values())
        if sources[source] >= OF_SOURCE:
            self._close_oldest_of(source)
        elif len(self._strangers) >= STRANGERS:
            self._close_oldest_of(sources.most_common(1)[0][0])
        handler = self._server()
        timer = asyncio.get_running_loop().call_later(WITHOUT_KEY, self._close, handler)
        self._strangers[handler] = _Stranger(source, timer)
        transport.set_protocol(handler)
        handler.connection_made(transport)

    @contextlib.contextmanager
    def serving(self, request: web.Request, has_key: bool) -> Iterator[None]:
        """A context in which a request is answered.

        Raises:
            web.HTTPServiceUnavailable: requests are under way on all connections of key holders.
        """
        handler = request.protocol
        if has_key and handler in self._strangers:
            self._make_room()
            self._strangers.pop(handler).timer.cancel()
            self._holders[handler] = 0
        if handler not in self._holders:
            yield
            return
        self._holders[handler] += 1
        try:
            yield
        finally:
            if handler in self._holders:
                self._holders[handler] -= 1

    def _make_room(self) -> None:
        """Makes room for a key holder: closes the oldest connection without a request."""
        self._forget_closed()
        if len(self._holders) < MOST:
            return
        idle = next((handler for handler, busy in self._holders.items() if not busy), None)
        if idle is None:
            raise web.HTTPServiceUnavailable(text=f"{MOST} requests are under way\n")
        del self._holders[idle]
        _abort(idle)

    def _close_oldest_of(self, source: str) -> None:
        self._close(next(h for h, one in self._strangers.items() if one.source == source))

    def _close(self, handler: web.RequestHandler) -> None:
        self._strangers.pop(handler).timer.cancel()
        _abort(handler)

    def _forget_closed(self) -> None:
        for handler in [one for one in self._strangers if one.transport is None]:
            self._strangers.pop(handler).timer.cancel()
        self._holders = {h: busy for h, busy in self._holders.items() if h.transport is not None}


class _Arriving(asyncio.Protocol):
    """A connection until its address is known."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.arrived(cast(asyncio.Transport, transport))


def _abort(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()
