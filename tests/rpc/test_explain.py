"""What a peer tells of its paths, its searches, its events, and of who waits for whom."""

from __future__ import annotations

import os
import socket
import subprocess
import threading

import pytest

import moolink
from tests.rpc.conftest import Pair, Start
from tests.waiting import PROCESS_LIMIT, until


def listening(*, transports: list[str] | None = None, name: str = "server") -> moolink.Rpc:
    rpc = moolink.Rpc(name, transports=transports, timeout=20)
    rpc.define("f", lambda: 1)
    return rpc


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# --- paths


def test_the_path_in_use_has_a_latency(pair: Pair, request: pytest.FixtureRequest) -> None:
    client, server = pair
    server.define("f", lambda: 1)
    client.sync("server", "f")

    def settled() -> bool:
        known = client.explain("server")
        return known["path"] == best and known["latency"] is not None

    best = request.node.callspec.params["pair"]
    until(settled, "the best path, and a PONG over it")
    known = client.explain("server")
    assert known["connected"]
    assert not known["suspected"]
    assert known["same_host"]
    (used,) = [path for path in known["paths"] if path["state"] == "in use"]
    assert used["path"] == known["path"]
    assert used["reason"] == ""
    for latency in (known["latency"], known["last_latency"], used["latency"]):
        assert latency is not None
        assert 0 < latency < 20
    (info,) = client.peers()
    assert info["instance"] == known["instance"]
    assert info["path"] == known["path"] == info["paths"][0]
    assert info["latency"] is not None
    assert info["silent"] < 20


@pytest.mark.parametrize(
    ("client_has", "server_has", "reason"),
    [
        (["tcp"], ["shm", "tcp"], "not enabled here"),
        (["shm", "tcp"], ["tcp"], "the peer does not offer it"),
    ],
)
def test_a_better_path_that_is_not_in_use_has_its_reason(
    client_has: list[str],
    server_has: list[str],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        listening(transports=server_has) as server,
        moolink.Rpc("client", transports=client_has, timeout=20) as client,
    ):
        client.connect(server.listen("127.0.0.1:0")[0])
        client.sync("server", "f")
        known = client.explain("server")
        assert [path["path"] for path in known["paths"]] == ["shm", "tcp"]
        assert known["path"] == "tcp"
        assert known["paths"][0]["reason"] == reason
        assert known["paths"][0]["state"] == "unused"
        assert known["paths"][0]["latency"] is None
        assert known["tried"] == []
    assert "cannot be used" not in caplog.text  # it was chosen so: nothing fell back


def test_the_path_behind_a_better_one_is_ready() -> None:
    with listening() as server, moolink.Rpc("client", timeout=20) as client:
        client.connect(server.listen("127.0.0.1:0")[0])
        client.sync("server", "f")
        until(lambda: client.explain("server")["path"] == "shm", "shared memory")
        shm, tcp = client.explain("server")["paths"]
        assert (shm["state"], tcp["state"]) == ("in use", "ready")
        assert tcp["reason"] == "ready: a better path is in use"
        assert tcp["address"].startswith("tcp://127.0.0.1:")


def test_stats_count_by_path(pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda x: x)
    release = threading.Event()
    server.define("wait", release.wait)
    client.sync("server", "echo", b"x" * 100_000)
    pending = client.async_("server", "wait")
    stats = client.stats()
    assert stats["calls_pending"] == 1
    release.set()
    pending.result()
    stats = client.stats()
    assert stats["calls_pending"] == 0
    assert stats["peers"] == 1
    assert stats["peers_lost"] == 0
    assert stats["connections_opened"] >= stats["connections"] >= 1
    assert "tcp" in stats["paths"]
    paths = stats["paths"].values()
    assert stats["bytes_written"] == sum(path["bytes_written"] for path in paths) > 100_000


# --- absence


def test_a_peer_that_is_not_there_is_explained() -> None:
    address = f"127.0.0.1:{free_port()}"
    with listening() as server, moolink.Rpc("client") as client:
        client.connect(server.listen("127.0.0.1:0")[0])
        client.sync("server", "f")
        client.set_timeout(0.5)
        assert "no call has asked" in client.explain("nobody")["reason"]
        client.connect(address)
        with pytest.raises(moolink.TimeoutError):
            client.sync("nobody", "f")
        known = client.explain("nobody")
        assert not known["connected"]
        assert known["path"] == "none"
        assert known["instance"] is None
        assert known["asked"] == ["server"]
        (tried,) = known["tried"]
        assert tried["address"] == f"tcp://{address}"
        assert tried["tries"] >= 1
        assert "refused" in tried["error"]
        assert "this very peer" in client.explain("client")["reason"]


def test_a_peer_that_was_lost_is_explained(start: Start) -> None:
    process = start(
        """
        import moolink, sys
        server = moolink.Rpc("server")
        server.define("f", int)
        print(server.listen("127.0.0.1:0")[0], flush=True)
        sys.stdin.read()
        """
    )
    assert process.stdout is not None
    with moolink.Rpc("client", timeout=20) as client:
        client.connect(process.stdout.readline().strip())
        client.sync("server", "f")
        process.kill()
        until(lambda: not client.explain("server")["connected"], "the loss")
        until(lambda: client.explain("server")["reason"].startswith("lost: "), "its reason")
        assert client.stats()["peers_lost"] == 1


# --- addresses


def test_others_are_told_what_is_advertised() -> None:
    with listening(transports=["tcp"]) as server:
        (told,) = server.listen("127.0.0.1:0", advertise="localhost")
        assert told.startswith("tcp://localhost:")
        assert server.addresses() == [told]
        port = told.rsplit(":", 1)[1]
        with (
            listening(transports=["tcp"], name="hub") as hub,
            moolink.Rpc("client", transports=["tcp"], timeout=20) as client,
        ):
            address = hub.listen("127.0.0.1:0")[0]
            server.connect(address)
            client.connect(address)
            assert client.sync("server", "f") == 1
            assert client.explain("server")["addresses"] == [told]
            assert client.explain("server")["paths"][1]["address"] == f"tcp://localhost:{port}"


@pytest.mark.parametrize("advertise", ["*", "a b", ":80", "[zz]:1"])
def test_a_malformed_advertisement_is_refused_before_anything_is_bound(advertise: str) -> None:
    with moolink.Rpc() as rpc:
        with pytest.raises(ValueError, match="malformed"):
            rpc.listen("127.0.0.1:0", advertise=advertise)
        assert not [a for a in rpc.addresses() if a.startswith("tcp")]
        with pytest.raises(ValueError, match="tcp addresses only"):
            rpc.listen("shm://", advertise="localhost")


INTERFACE = """
    import moolink
    with moolink.Rpc(transports=["tcp"]) as rpc:
        try:
            print(*rpc.listen(":0"))
        except (moolink.Error, ValueError) as error:
            print(type(error).__name__, error)
    """


@pytest.mark.parametrize(
    ("chosen", "printed"),
    [
        ("lo", "tcp://127.0.0.1:"),
        ("127.0.0.0/8", "tcp://127.0.0.1:"),
        ("no-such-interface", "Error MOOLINK_INTERFACE is 'no-such-interface', but this host"),
        ("10.0.0.0/99", "ValueError MOOLINK_INTERFACE: '10.0.0.0/99' is no range"),
    ],
)
def test_interfaces_are_chosen_by_the_environment(
    start: Start, monkeypatch: pytest.MonkeyPatch, chosen: str, printed: str
) -> None:
    monkeypatch.setenv("MOOLINK_INTERFACE", chosen)
    output, errors = start(INTERFACE).communicate(timeout=PROCESS_LIMIT)
    assert output.startswith(printed), errors
    addresses = [word for word in output.split() if word.startswith("tcp://")]
    assert all("//127." in address or "//[::1]" in address for address in addresses)


# --- events, and who waits for whom


def test_the_flight_recorder_has_the_last_events(pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda x: x)
    client.sync("server", "echo", 1)
    with pytest.raises(moolink.NoSuchFunction):
        client.sync("server", "missing")
    mine, theirs = client.flight_recorder(), server.flight_recorder()
    for line in ("call 1  server  echo", "result 1", "peer up 0  server", "opened", "sent"):
        assert any(line in event for event in mine), (line, mine)
    assert any("no function 'missing'" in event for event in mine)
    for line in ("handler 1  client  echo", "reply 1  client", "received"):
        assert any(line in event for event in theirs), (line, theirs)
    assert all("  client  " in event for event in mine)
    for number in range(1200):
        client.sync("server", "echo", number)
    assert len(client.flight_recorder()) + len(server.flight_recorder()) <= 1000


@pytest.mark.parametrize("limited", ["call", "wait"])
def test_a_time_out_tells_who_waits_for_whom(pair: Pair, limited: str) -> None:
    client, server = pair
    started, release = threading.Event(), threading.Event()
    server.define("stuck", lambda: (started.set(), release.wait(20))[1])
    try:
        other = client.async_("server", "stuck")
        assert started.wait(20)
        if limited == "call":
            client.set_timeout(0.3)
        late = client.async_("server", "stuck")
        with pytest.raises(moolink.TimeoutError) as caught:
            late.result(timeout=None if limited == "call" else 0.3)
        detail = caught.value.detail
        assert "peer 'client': call 1 of 'stuck' at 'server' waits for" in detail
        assert "peer 'server': handler of 'stuck' for 'client' (its call 1)" in detail
        assert "runs since" in detail
        assert len(str(caught.value)) < 200
    finally:
        release.set()
    assert other.result() is True


def test_a_deferred_reply_and_an_abandoned_handler_are_told(pair: Pair) -> None:
    client, server = pair
    kept: list[moolink.rpc.RpcDeferredReturn] = []
    server.define_deferred("later", kept.append)
    future = client.async_("server", "later")
    until(lambda: "returned, its reply is deferred" in moolink.dump(), "the handler's return")
    kept.pop()(1)
    assert future.result() == 1
    assert "handler of 'later'" not in moolink.dump()

    release = threading.Event()
    server.define("stuck", lambda: release.wait(20))
    abandoned = client.async_("server", "stuck")
    # A call that is cancelled before its handler begins is not run at all.
    until(lambda: "runs since" in moolink.dump(), "the handler")
    abandoned.cancel()
    until(lambda: "its caller does not wait any more" in moolink.dump(), "the cancel")
    release.set()
    until(lambda: "handler of 'stuck'" not in moolink.dump(), "the handler's end")


def test_a_dump_shows_groups_threads_and_calls(broker_address: str) -> None:
    with moolink.Rpc("alice", timeout=20) as rpc:
        rpc.connect(broker_address)
        with moolink.Group(rpc, "pong") as group:
            until(group.update, "the group")
            release = threading.Event()
            rpc.define("wait", lambda: release.wait(20))
            waiting = rpc.async_("alice", "wait")
            thread = threading.Thread(target=waiting.result)
            thread.start()
            until(lambda: "waits for call " in moolink.dump(), "the thread")
            text = moolink.dump()
            release.set()
            thread.join()
    for words in (
        f"moolink in process {os.getpid()}",
        "peer 'alice' (",
        "peer 'broker': connected over",
        "group 'pong' of peer 'alice': membership",
        "broker 'broker' connected",
        "call 1 of 'wait' at 'alice' waits for",
        "handler of 'wait' for 'alice'",
        "events\n",
        "view ",
    ):
        assert words in text, (words, text)


def test_nothing_is_dumped_where_moolink_is_not_in_use(start: Start) -> None:
    process: subprocess.Popen[str] = start("import moolink; print(moolink.dump())")
    output, errors = process.communicate(timeout=PROCESS_LIMIT)
    assert "moolink is not in use in this process" in output, errors
