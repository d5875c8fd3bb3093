"""The dashboard's HTTP server: the page, the JSON interface, and /metrics."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web

import moolink
from moolink.dashboard import prometheus
from moolink.dashboard.access import COOKIE, Access
from moolink.dashboard.connections import MOST_STREAMS, WITHOUT_KEY, Connections
from moolink.dashboard.faults import ServerLog
from moolink.dashboard.poller import Poller
from moolink.errors import Error
from moolink.internal.addresses import is_loopback
from moolink.internal.shown import shown
from moolink.rpc import naming

if TYPE_CHECKING:
    from moolink.group.broker_peer import Broker

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_FILES = {
    "": ("index.html", "text/html"),
    "app.js": ("app.js", "text/javascript"),
    "style.css": ("style.css", "text/css"),
    "login": ("login.html", "text/html"),
    "login.js": ("login.js", "text/javascript"),
}
_OPEN = ("/login", "/login.js", "/style.css", "/healthz")  # without the key
_YEAR = 365 * 24 * 3600


class Dashboard:
    """Serves a broker's dashboard from threads of its own until it is closed.

    Args:
        broker: the broker whose groups are shown.
        address: host:port; port 0 takes a free one.
        key: asked for, unless only this machine reaches the address; None: the job has no token.

    Raises:
        ValueError: the address has no port, or others reach it and the job has no token.
        OSError: the address cannot be listened on.
    """

    def __init__(self, broker: Broker, address: str, key: str | None) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) >= 1 << 16:
            raise ValueError(f"an address is HOST:PORT, such as 127.0.0.1:4480, got {address!r}")
        loopback = is_loopback(host)
        if not loopback and key is None:
            raise ValueError(
                f"{address} can be reached from other machines, and without a token any process "
                "could read the dashboard: serve it on 127.0.0.1, or give the broker a token"
            )
        self.needs_key = not loopback
        self._access = Access(key if self.needs_key else None)
        self._poller = Poller(broker, self._on_turn)
        self._turn = 0  # of the poller
        self._json = (-1, b"")  # of which turn it is, and the job
        self._loop = asyncio.new_event_loop()
        self._log = ServerLog()
        self._loop.set_exception_handler(self._log.of_loop)
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            logger=self._log,
            shutdown_timeout=1.0,
            keepalive_timeout=30.0,
        )
        self._explains = ThreadPoolExecutor(2, "moolink-explain")  # /metrics does not wait for it
        self._changed = asyncio.Condition()
        self._closing = False
        self._streams = 0
        try:
            port_taken = self._loop.run_until_complete(self._begin(host, int(port)))
        except BaseException:
            self._loop.close()
            raise
        self.address = f"{f'[{host}]' if ':' in host else host}:{port_taken}"
        """host:port that is listened on."""
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="moolink-dashboard-http", daemon=True
        )
        self._thread.start()
        self._poller.start()

    def close(self) -> None:
        """Ends the server."""
        if self._closing:
            return
        self._closing = True
        self._poller.close()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _begin(self, host: str, port: int) -> int:
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server)
        self._listener = await self._loop.create_server(self._connections, host, port)
        return int(self._listener.sockets[0].getsockname()[1])

    async def _end(self) -> None:
        self._listener.close()
        async with self._changed:
            self._changed.notify_all()
        await self._runner.cleanup()
        self._explains.shutdown(wait=False, cancel_futures=True)

    def _on_turn(self) -> None:
        """On the poller's thread."""
        asyncio.run_coroutine_threadsafe(self._tell(), self._loop)

    async def _tell(self) -> None:
        async with self._changed:
            self._turn += 1
            self._changed.notify_all()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard])
        for path in _FILES:
            application.router.add_get(f"/{path}", self._file)
        application.router.add_post("/login", self._login)
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/api/v1/job", self._job)
        application.router.add_get("/api/v1/stream", self._stream)
        application.router.add_get("/api/v1/explain", self._explain)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._access.accepts_host(request.host):
            raise web.HTTPForbidden(text="this dashboard is served to localhost only\n")
        is_open = request.path in _OPEN
        authorization = request.headers.get("Authorization", "")
        has_key = self._access.accepts(authorization, request.cookies.get(COOKIE, ""))
        if not is_open and not has_key:
            if request.path == "/":
                raise web.HTTPSeeOther("/login")
            raise web.HTTPUnauthorized(
                text="send the key as `Authorization: Bearer KEY`; `moolink-broker token "
                "dashboard` prints it\n",
                headers={"WWW-Authenticate": "Bearer"},
            )
        with self._connections.serving(request, has_key):
            response = await handler(request)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = _FILES[request.path[1:]]
        body = resources.files("moolink.dashboard").joinpath("page", name).read_bytes()
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _login(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(WITHOUT_KEY):
                key = str((await request.post()).get("key", ""))
        except (
            *(ValueError, LookupError, UnicodeError, AssertionError, TimeoutError),
            web.RequestPayloadError,
        ):
            raise web.HTTPBadRequest(text="this is no form\n") from None
        if not self._access.is_key(key):
            await asyncio.sleep(0.5)  # guesses take time
            raise web.HTTPSeeOther("/login?wrong")
        answer = web.HTTPSeeOther("/")
        answer.set_cookie(
            COOKIE, key.strip(), max_age=_YEAR, httponly=True, samesite="Strict", path="/"
        )
        raise answer

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=await asyncio.to_thread(lambda: prometheus.text(self._poller.families())),
            headers={"Content-Type": prometheus.CONTENT_TYPE},
        )

    async def _job(self, request: web.Request) -> web.Response:
        return web.Response(body=self._read(), content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the job, once a second."""
        if self._streams >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(text="too many pages are open\n")
        self._streams += 1
        try:
            return await self._send_turns(request)
        finally:
            self._streams -= 1

    async def _send_turns(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_HEADERS})
        await response.prepare(request)
        turn = -1
        while not self._closing:
            async with self._changed:
                await self._changed.wait_for(lambda: self._turn != turn or self._closing)  # noqa: B023
                turn = self._turn
            try:
                await response.write(b"data: " + self._read() + b"\n\n")
            except ConnectionError:
                break
        return response

    def _read(self) -> bytes:
        """The job as JSON, made once a turn."""
        if self._json[0] != self._turn:
            told = {"version": moolink.__version__, **self._poller.snapshot()}
            self._json = (
                self._turn,
                json.dumps(told, separators=(",", ":"), allow_nan=False).encode(),
            )
        return self._json[1]

    async def _explain(self, request: web.Request) -> web.Response:
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise web.HTTPForbidden(text="this is for the dashboard's own page\n")
        member, peer = _named(request, "member", "group"), _named(request, "peer", "peer_group")
        if not self._poller.has(member):
            return web.json_response(
                {"error": f"there is no member {naming.quoted(member)}"}, status=404
            )
        try:
            told = await self._loop.run_in_executor(
                self._explains, self._poller.explain, member, peer
            )
            text = json.dumps(told, allow_nan=False)
        except (Error, TypeError, ValueError, RecursionError) as error:  # the reply is not JSON
            return web.json_response({"error": shown(error)}, status=502)
        return web.Response(text=text, content_type="application/json")


def _named(request: web.Request, name: str, group: str) -> str:
    """The name for calls of the peer that a query names, perhaps with its group."""
    return naming.joined(request.query.get(group, ""), request.query.get(name, ""))
