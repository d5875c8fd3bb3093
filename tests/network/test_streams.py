"""Streams of a tcp connection between two hosts, with a rate limit for each connection."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable

import pytest

import moolink
from tests.network.hosts import LISTENER_PORTS, Hosts
from tests.waiting import PROCESS_LIMIT, until

MakeHosts = Callable[..., Hosts]
RATE = "200mbit"
BYTES = 4 << 20

SERVER = """
    import sys
    import numpy as np
    import moolink

    rpc = moolink.Rpc("server")
    data = np.random.default_rng(1).integers(0, 256, int(sys.argv[2]), np.uint8)
    rpc.define("put", lambda there: bool((there == data).all()))
    rpc.define("get", lambda: data)
    rpc.listen(sys.argv[1])
    print("listening", flush=True)
    sys.stdin.read()
"""
# Prints a line after each transfer, and ends with its input.
CLIENT = """
    import sys
    import numpy as np
    import moolink

    rpc = moolink.Rpc("client")
    rpc.connect(sys.argv[1])
    data = np.random.default_rng(1).integers(0, 256, int(sys.argv[2]), np.uint8)
    for line in sys.stdin:
        if line.strip() == "put":
            assert rpc.sync("server", "put", data)
        else:
            assert (rpc.sync("server", "get") == data).all()
        print("done", flush=True)
"""


class Pair:
    """A server on host 0 and a client on host 1.

    Args:
        client: its environment.
    """

    def __init__(self, hosts: Hosts, client: dict[str, str]) -> None:
        self.hosts = hosts
        address = f"{hosts.address(0)}:{LISTENER_PORTS.start}"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        programs = [("-c", textwrap.dedent(text), address, str(BYTES)) for text in (SERVER, CLIENT)]
        self._server = hosts.start_python(0, *programs[0], **pipes)
        assert self._server.stdout.readline() == "listening\n"
        self._client = hosts.start_python(1, *programs[1], **pipes, env=client)

    def transfer(self, what: str) -> int:
        """Moves the array ("put" or "get"); returns the number of connections afterwards."""
        self._client.stdin.write(what + "\n")
        self._client.stdin.flush()
        assert self._client.stdout.readline() == "done\n"
        return self.hosts.connections(1)

    def end(self) -> None:
        """Ends the client."""
        self._client.stdin.close()
        assert self._client.wait(timeout=PROCESS_LIMIT) == 0
        self._client.stdin = None


def widths(streams: int) -> tuple[int, int]:
    """Numbers of tcp connections of two peers with so many streams: both peers may have dialled."""
    return (1 + streams, 2 + streams)


def until_wide(pair: Pair, what: str, streams: int) -> None:
    """Moves arrays until the peers have so many streams: a connection gets them after a wait."""
    for _ in range(50):
        if pair.transfer(what) in widths(streams):
            return
    raise AssertionError(f"the peers do not have {streams} streams after 50 transfers")


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("what", ["put", "get"])
def test_large_arrays_get_streams_whichever_side_sends(
    make_hosts: MakeHosts, monkeypatch: pytest.MonkeyPatch, what: str, encrypted: bool
) -> None:
    if not encrypted:
        monkeypatch.setenv("MOOLINK_INSECURE", "1")
    hosts = make_hosts(2)
    hosts.set_flow_rate(RATE)
    pair = Pair(hosts, {})
    until_wide(pair, what, 4)
    for direction in ("put", "get"):
        assert pair.transfer(direction) in widths(4)
    pair.end()
    until(lambda: hosts.connections(0) == 0, "the end of all connections")


def test_a_variable_limits_the_streams(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    hosts.set_flow_rate(RATE)
    pair = Pair(hosts, {"MOOLINK_TCP_STREAMS": "2"})
    until_wide(pair, "put", 2)
    for direction in ("put", "get") * 3:
        assert pair.transfer(direction) in widths(2)


@pytest.mark.parametrize("variable", ["MOOLINK_TCP_STREAMS=0", "MOOLINK_LIE=hello.features=0"])
def test_no_streams_if_one_peer_refuses_them_or_is_older(
    make_hosts: MakeHosts, variable: str
) -> None:
    hosts = make_hosts(2)
    hosts.set_flow_rate(RATE)
    name, _, value = variable.partition("=")
    pair = Pair(hosts, {name: value})
    for direction in ("put", "get") * 3:
        assert pair.transfer(direction) in widths(0)


def test_the_variable_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("-1", "17", "many"):
        monkeypatch.setenv("MOOLINK_TCP_STREAMS", wrong)
        with pytest.raises(ValueError, match=f"'{wrong}', not a number from 0 to 16"):
            moolink.Rpc("x")
