"""Calls and groups through a relay that delays, loses and parts connections."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

import moolink
from tests.network.relay import Relay
from tests.waiting import TIMEOUT, formed

DELAY = 0.05


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of an address that ``listen`` returned."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """A peer that knows itself by no other address than the relay's."""
    with moolink.Rpc("server", transports=["tcp"]) as rpc:
        rpc.define("echo", lambda x: x)
        host, port = host_and_port(rpc.listen("127.0.0.1:0")[0])
        yield host, port


def test_a_delay_is_seen_and_calls_come_through(server: tuple[str, int]) -> None:
    with Relay(*server, delay=DELAY) as relay, moolink.Rpc("c", transports=["tcp"]) as client:
        client.connect(relay.address)
        client.sync("server", "echo", 0)
        begin = time.monotonic()
        assert client.sync("server", "echo", 7) == 7
        assert time.monotonic() - begin >= 2 * DELAY  # what a byte takes at least


def test_calls_outlive_lost_connections(server: tuple[str, int]) -> None:
    with Relay(*server, delay=0.01) as relay, moolink.Rpc("c", transports=["tcp"]) as client:
        client.connect(relay.address)
        data = np.arange(1 << 18)
        for _ in range(5):
            futures = [client.async_("server", "echo", data) for _ in range(4)]
            relay.drop_connections()
            for future in futures:
                np.testing.assert_array_equal(future.result(TIMEOUT), data)
        # Through the relay again, or at the server's own address, which it has told.
        assert client.stats()["connections_opened"] > 1


def test_calls_wait_for_the_end_of_a_partition(server: tuple[str, int]) -> None:
    with Relay(*server) as relay, moolink.Rpc("c", transports=["tcp"]) as client:
        client.connect(relay.address)
        client.sync("server", "echo", 0)
        relay.cut()
        future = client.async_("server", "echo", 7)
        assert not future.wait(0.5), "nothing passes"
        relay.mend()
        assert future.result(TIMEOUT) == 7


def test_a_group_reduces_through_a_slow_network() -> None:
    with moolink.Broker(first=True) as broker:
        host, port = host_and_port(broker.listen("127.0.0.1:0")[0])
        with (
            Relay(host, port, delay=0.02, rate=50e6) as relay,
            moolink.Rpc("a", transports=["tcp"]) as a,
            moolink.Rpc("b", transports=["tcp"]) as b,
        ):
            a.connect(relay.address)
            b.connect(relay.address)
            with moolink.Group(a, "g") as left, moolink.Group(b, "g") as right:
                formed([left, right])
                relay.drop_connections()
                x = np.ones(100_000, np.float32)
                futures = [g.all_reduce("x", x) for g in (left, right)]
                assert all((f.result(TIMEOUT) == 2).all() for f in futures)
