"""Names, addresses and transports of peers, and how peers find one another."""

from __future__ import annotations

import pytest

import moolink
from tests.rpc.conftest import Pair


def test_unknown_function(pair: Pair) -> None:
    client, _ = pair
    with pytest.raises(moolink.NoSuchFunction, match="nothing") as caught:
        client.sync("server", "nothing")
    assert caught.value.ran == "no"


def test_unknown_peer_times_out() -> None:
    with moolink.Rpc("alone", timeout=0.2) as rpc:
        with pytest.raises(moolink.TimeoutError, match="stranger") as caught:
            rpc.sync("stranger", "f")
        assert caught.value.ran == "no"


def test_names_are_defined_once(pair: Pair) -> None:
    _, server = pair
    server.define("f", lambda: 1)
    with pytest.raises(ValueError, match="defined already"):
        server.define("f", lambda: 2)
    with pytest.raises(TypeError):
        server.define("g", lambda: 1, batchsize=3)  # type: ignore[call-arg]


def test_set_name_before_connecting() -> None:
    with moolink.Rpc() as server, moolink.Rpc() as client:
        assert len(server.get_name()) == 32
        server.set_name("renamed")
        client.connect(server.listen("127.0.0.1:0")[0])
        server.define("f", lambda: 1)
        assert client.sync("renamed", "f") == 1
        with pytest.raises(ValueError):
            server.set_name("too late")


def test_transports_by_moolibs_names() -> None:
    with moolink.Rpc() as rpc:
        rpc.set_transports(["TCP/IP", "shared memory", "ipc"])
        with pytest.raises(ValueError, match="infiniband"):
            rpc.set_transports(["infiniband"])
        rpc.set_transports(["tcp"])
        rpc.listen("127.0.0.1:0")
        assert all(a.startswith("tcp://") for a in rpc.addresses())
        with pytest.raises(ValueError, match="before"):
            rpc.set_transports(["shm"])


def test_path_is_explained(pair: Pair) -> None:
    client, server = pair
    server.define("f", lambda: 1)
    client.sync("server", "f")
    explained = client.explain("server")
    assert explained["connected"]
    assert explained["path"] in ("tcp", "shm")
    assert [p["name"] for p in client.peers() if p["connected"]] == ["server"]
    assert not client.explain("nobody")["connected"]


def test_peers_find_one_another_through_a_third() -> None:
    with moolink.Rpc("broker") as broker, moolink.Rpc("a") as a, moolink.Rpc("b") as b:
        address = broker.listen("127.0.0.1:0")[0]
        a.define("who", lambda: "a")
        a.connect(address)
        b.connect(address)
        b.set_timeout(20)
        assert b.sync("a", "who") == "a"


def test_duplicate_name_is_refused_while_the_holder_answers() -> None:
    with moolink.Rpc("broker") as broker, moolink.Rpc("same") as first:
        address = broker.listen("127.0.0.1:0")[0]
        broker.define("f", lambda: 1)
        first.connect(address)
        assert first.sync("broker", "f") == 1
        with moolink.Rpc("same", timeout=2) as second:
            second.connect(address)
            with pytest.raises(moolink.Error):
                second.sync("broker", "f")
        assert first.sync("broker", "f") == 1


def test_addresses() -> None:
    with moolink.Rpc() as rpc, moolink.Rpc() as other:
        for wrong in ("nonsense", "127.0.0.1:99999", "[::1", "tcp://"):
            with pytest.raises(ValueError, match="malformed"):
                rpc.connect(wrong)
            with pytest.raises(ValueError, match="malformed"):
                rpc.listen(wrong)
        (address,) = rpc.listen("127.0.0.1:0")
        assert address in rpc.addresses()
        with pytest.raises(moolink.Error, match="in use"):
            other.listen(address)


def test_connecting_before_anybody_listens() -> None:
    with moolink.Rpc("probe") as probe:
        (address,) = probe.listen("127.0.0.1:0")
    with moolink.Rpc("early", timeout=20) as early:
        early.connect(address)
        future = early.async_("late", "f")
        with moolink.Rpc("late") as late:
            late.define("f", lambda: "met")
            late.listen(address)
            assert future.result() == "met"


def test_an_unreachable_address_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with moolink.Rpc() as probe:
        (address,) = probe.listen("127.0.0.1:0")
    with caplog.at_level("INFO", "moolink"), moolink.Rpc("lonely", timeout=1) as rpc:
        rpc.connect(address)
        with pytest.raises(moolink.TimeoutError):
            rpc.sync("nobody", "f")  # several tries to connect fit into its second
    records = [r for r in caplog.records if address in r.getMessage()]
    assert len(records) == 1
