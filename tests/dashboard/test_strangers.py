"""Clients without the dashboard's key cannot lock others out, nor fill the log."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from moolink.dashboard import connections
from moolink.dashboard.faults import AT_ONCE, Limit
from tests import waiting
from tests.dashboard.dashboards import NotLocal, Served

PROBE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /healthz HTTP/1.1\r\n"
SLOW = (
    b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\nkey="
)
BAD = {
    "gzip": b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\nnot gzip!",
    "chunks": b"POST /login HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\nzz\r\nabc\r\n",
    "chunks of a page": b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "header": b"GET / HTTP/1.1\r\nHost: x\r\n\x1b[2J: \x00\r\n\r\n",
    "length": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
    "version": b"GET / HTTP/9.x\r\n\r\n",
    "long line": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
}


@pytest.fixture
def of() -> Iterator[NotLocal]:
    made = NotLocal()
    yield made
    made.dashboard.close()
    made.broker.close()


def port_of(dashboard: NotLocal | Served) -> int:
    return int(dashboard.url.rpartition(":")[2])


def connected(port: int, source: str = "127.0.0.1", send: bytes = b"") -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), waiting.TIMEOUT, (source, 0))
    one.sendall(send)
    return one


def asked(port: int, source: str, key: str, path: str = "/api/v1/job") -> int:
    user = http.client.HTTPConnection(
        "127.0.0.1", port, timeout=waiting.TIMEOUT, source_address=(source, 0)
    )
    user.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    status = user.getresponse().status
    user.close()
    return status


def is_closed(one: socket.socket) -> bool:
    """Reads to the end; the socket's time limit bounds a hang."""
    try:
        while one.recv(4096):
            pass
    except ConnectionResetError:
        pass
    finally:
        one.close()
    return True


@pytest.mark.parametrize("send", [b"", PROBE, HALF, SLOW])
@pytest.mark.parametrize("sources", [1, 40])
def test_strangers_who_keep_connections_lock_no_one_out(
    of: NotLocal, send: bytes, sources: int
) -> None:
    port, count = port_of(of), 200
    kept = [connected(port, f"127.0.0.{2 + i % sources}", send) for i in range(count)]
    for i in range(20):
        # Also from the clients' own address, and repeatedly.
        assert asked(port, "127.0.0.2", of.key) == 200
        assert asked(port, "127.0.0.1", of.key, "/metrics") == 200
        kept.append(connected(port, f"127.0.0.{2 + i % sources}", send))
    strangers = of.dashboard._connections._strangers
    assert len(strangers) <= (connections.OF_SOURCE if sources == 1 else connections.STRANGERS)
    for one in kept:
        one.close()


def test_strangers_who_renew_their_connections_lock_no_one_out(of: NotLocal) -> None:
    port, over = port_of(of), threading.Event()

    def renew(source: str) -> None:
        kept: list[socket.socket] = []
        while not over.is_set():
            kept.append(connected(port, source, PROBE))
            if len(kept) > 100:
                kept.pop(0).close()
        for one in kept:
            one.close()

    attackers = [threading.Thread(target=renew, args=[f"127.0.0.{i}"]) for i in (1, 2, 3)]
    for attacker in attackers:
        attacker.start()
    try:
        answers = [asked(port, "127.0.0.9", of.key) for _ in range(50)]
    finally:
        over.set()
        for attacker in attackers:
            attacker.join()
    assert answers == [200] * 50


@pytest.mark.parametrize("send", [b"", PROBE, HALF, SLOW, SLOW + b"x" * 50])
def test_a_connection_without_the_key_ends_soon(
    send: bytes, of: NotLocal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WITHOUT_KEY", 0.2)
    assert is_closed(connected(port_of(of), send=send))


def test_a_connection_with_the_key_is_kept(of: NotLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WITHOUT_KEY", 0.5)
    port = port_of(of)
    user = http.client.HTTPConnection("127.0.0.1", port, timeout=waiting.TIMEOUT)
    for _ in range(2):
        user.request("GET", "/api/v1/job", headers={"Authorization": f"Bearer {of.key}"})
        assert user.getresponse().read()
        kept = user.sock
        assert is_closed(connected(port))  # in the meantime
    assert user.sock is kept


def test_key_holders_give_way_to_each_other(of: NotLocal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST", 4)
    port, given = port_of(of), f"Authorization: Bearer {of.key}\r\n\r\n".encode()
    busy = connected(port, send=b"GET /api/v1/stream HTTP/1.1\r\nHost: x\r\n" + given)
    assert busy.recv(4096)
    idle = []
    for _ in range(10):  # each keeps its connection
        idle.append(connected(port, send=b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + given))
        assert idle[-1].recv(4096).startswith(b"HTTP/1.1 200")
    assert len(of.dashboard._connections._holders) == 4
    assert busy.recv(4096), "a request under way is not ended"
    for one in (busy, *idle):
        one.close()


@pytest.mark.parametrize("request_", BAD.values(), ids=BAD.keys())
def test_requests_that_are_wrong_fill_no_log(
    request_: bytes,
    of: NotLocal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Time stands still: each second that passes would allow another line.
    limit = of.dashboard._log._limit
    limit._last = time.monotonic() + 1e6
    with caplog.at_level(logging.WARNING, "moolink"):
        for _ in range(3 * AT_ONCE):
            one = connected(port_of(of), send=request_)
            one.shutdown(socket.SHUT_WR)
            is_closed(one)
    records = [r for r in caplog.records if "dashboard" in r.getMessage() or r.exc_info]
    assert len(records) <= AT_ONCE
    for record in records:
        assert record.exc_info is None
        assert record.getMessage().isprintable()
        assert len(record.getMessage()) < 500


def test_lines_of_the_log_are_limited_and_counted() -> None:
    limit = Limit()
    start = limit._last
    assert [limit.line("x", start) for _ in range(AT_ONCE)] == ["x"] * AT_ONCE
    assert [limit.line("x", start + 0.5) for _ in range(3)] == [None] * 3
    assert limit.line("x", start + 1.5) == "x (3 before it are not logged)"
    assert limit.line("x", start + 1.6) is None
    assert [limit.line("x", start + 100) is None for _ in range(AT_ONCE + 1)].count(True) == 1


def test_a_fault_of_the_dashboard_has_its_traceback(
    of: NotLocal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(of.dashboard, "_read", broken)
    with caplog.at_level(logging.WARNING, "moolink"):
        assert asked(port_of(of), "127.0.0.1", of.key) == 500
    (record,) = (r for r in caplog.records if "a fault" in r.getMessage())
    assert record.exc_info is not None
