"""TLS on tcp: what others see of it, what it says, and what happens without OpenSSL."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import moolink
from moolink import tokens
from moolink.cli.main import main
from tests.network.relay import Relay
from tests.waiting import until

CIPHER = "TLS_AES_128_GCM_SHA256"
SECRET = b"what only the two of them may read. " * 2000

# A peer that says at which address it listens, or how its call to "here" ended.
PEER = """
import sys
import moolink
do, name, address = sys.argv[1:]
rpc = moolink.Rpc(name, transports=["tcp"], timeout=60)
rpc.define("f", lambda: "called without TLS")
if do == "listen":
    try:
        print(rpc.listen(address)[0], flush=True)
    except moolink.Error as error:
        print(error, flush=True)
    sys.stdin.read()
else:
    rpc.connect(address)
    try:
        print(rpc.sync("here", "f"), flush=True)
    except moolink.AuthError as error:
        print(error, flush=True)
"""


def other(*arguments: str, openssl: str | None = None) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if openssl is not None:
        environment["MOOLINK_OPENSSL"] = openssl
    return subprocess.Popen(
        [sys.executable, "-c", PEER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def here() -> Iterator[moolink.Rpc]:
    with moolink.Rpc("here", transports=["tcp"], timeout=60) as rpc:
        rpc.define("f", lambda: "called")
        yield rpc


class Wire(Relay):
    """A relay that keeps what it carries."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        super().__init__(host, int(port))
        self.seen = b""

    def carried(self, piece: bytes) -> None:
        self.seen += piece


@pytest.mark.parametrize("insecure", [False, True])
def test_nobody_on_the_way_reads_what_is_sent(insecure: bool) -> None:
    key = None if insecure else tokens.new()
    with (
        moolink.Rpc("server", transports=["tcp"], token=key, insecure=insecure) as server,
        moolink.Rpc("client", transports=["tcp"], token=key, insecure=insecure) as client,
    ):
        server.define("echo", lambda x: x)
        with Wire(server.listen("127.0.0.1:0")[0]) as wire:
            client.connect(wire.address)
            assert client.sync("server", "echo", SECRET) == SECRET
            array = np.frombuffer(SECRET, np.uint8)
            assert (client.sync("server", "echo", array) == array).all()
            known = client.explain("server")
            # The sniffer sees what there is to see: it finds the bytes where there is no token.
            assert (SECRET[:40] in wire.seen) == insecure
            assert (b"echo" in wire.seen) == insecure
            assert len(wire.seen) > 2 * len(SECRET)
            if key is not None:
                assert key.secret not in wire.seen
    assert known["path"] == "tcp"
    assert known["cipher"] == (None if insecure else CIPHER)
    assert ("TLS 1.3" in known["reason"]) != insecure


@pytest.fixture(params=["0", "1"], ids=["alone", "in turns"])
def two(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[moolink.Rpc, moolink.Rpc]]:
    """A server that sends back what it gets, and a client; with and without a thread for TLS."""
    monkeypatch.setenv("MOOLINK_TLS_THREAD", request.param)
    with (
        moolink.Rpc("server", transports=["tcp"], timeout=60) as server,
        moolink.Rpc("client", transports=["tcp"], timeout=60) as client,
    ):
        server.define("back", lambda x: x)
        client.connect(server.listen("127.0.0.1:0")[0])
        yield server, client


def some_arrays() -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(0, 255, 5_000_000 + i) for i in range(3)]


def test_large_arrays_arrive_whole_while_small_calls_go_on(
    two: tuple[moolink.Rpc, moolink.Rpc],
) -> None:
    _, client = two
    arrays = some_arrays()
    large = [client.async_("server", "back", array) for array in arrays]
    assert [client.sync("server", "back", i) for i in range(50)] == list(range(50))
    for array, future in zip(arrays, large, strict=True):
        np.testing.assert_array_equal(array, future.result())


def test_a_fork_during_transfers_leaves_them_alone(two: tuple[moolink.Rpc, moolink.Rpc]) -> None:
    _, client = two
    arrays = some_arrays()
    large = [client.async_("server", "back", array) for array in arrays]
    child = os.fork()
    if child == 0:
        with moolink.Rpc("child", transports=["tcp"]) as rpc:
            rpc.listen("127.0.0.1:0")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for array, future in zip(arrays, large, strict=True):
        np.testing.assert_array_equal(array, future.result())


def test_a_peer_closes_in_the_middle_of_transfers(two: tuple[moolink.Rpc, moolink.Rpc]) -> None:
    server, client = two
    large = [client.async_("server", "back", array) for array in some_arrays()]
    client.sync("server", "back", 1)
    server.close()
    client.close()
    for future in large:
        with contextlib.suppress(moolink.Error):
            assert future.result().size >= 5_000_000


def test_the_choice_of_a_thread_for_tls_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOOLINK_TLS_THREAD", "yes")
    with pytest.raises(
        ValueError, match="MOOLINK_TLS_THREAD is 'yes': 1 turns it on, 0 turns it off"
    ):
        moolink.Rpc("here")


def test_without_openssl_two_peers_of_one_host_meet_and_others_are_refused() -> None:
    with contextlib.ExitStack() as stack:

        def started(*arguments: str) -> subprocess.Popen[str]:
            process = other(*arguments, openssl="none")
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        address = first_line(started("listen", "here", "127.0.0.1:0"))
        assert first_line(started("call", "there", address)) == "called without TLS"
        text = first_line(started("listen", "here", "0.0.0.0:0"))
        assert "MOOLINK_OPENSSL is 'none'" in text
        assert "install OpenSSL 3" in text
        assert "insecure=True" in text


def test_one_side_without_openssl_is_told_so_at_once(
    here: moolink.Rpc, caplog: pytest.LogCaptureFixture
) -> None:
    address = here.listen("127.0.0.1:0")[0]
    caller = other("call", "there", address, openssl="none")
    assert "finds no OpenSSL" in first_line(caller)
    caller.communicate()
    until(lambda: "finds no OpenSSL" in caplog.text, "the acceptor's warning")
    listener = other("listen", "there", "127.0.0.1:0", openssl="none")
    try:
        here.connect(first_line(listener))
        with pytest.raises(moolink.AuthError, match="finds no OpenSSL"):
            here.sync("there", "f")
    finally:
        listener.kill()
        listener.communicate()


def test_who_has_the_token_meets_who_has_a_groups_key_from_either_side() -> None:
    job = tokens.new()
    for server_key, client_key in ((job, job.of_group("a")), (job.of_group("a"), job)):
        with (
            moolink.Rpc("server", transports=["tcp"], token=server_key) as server,
            moolink.Rpc("client", transports=["tcp"], token=client_key, timeout=60) as client,
        ):
            server.define("f", lambda: 1)
            client.connect(server.listen("127.0.0.1:0")[0])
            assert client.sync("server", "f") == 1
            assert client.explain("server")["cipher"] == CIPHER


def test_doctor_says_what_encrypts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--json"])
    found = {item["topic"]: item for item in json.loads(capsys.readouterr().out)}["OpenSSL"]
    assert found["state"] == "ok"
    assert "OpenSSL 3." in found["text"]
    assert "ssl" in found["text"].partition(" at ")[2]
    text = subprocess.run(
        [sys.executable, "-m", "moolink", "doctor"],
        env={**os.environ, "MOOLINK_OPENSSL": "/no/such/libssl.so.3"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (line,) = [line for line in text.splitlines() if " OpenSSL " in line]
    assert line.startswith("absent")
    assert "/no/such/libssl.so.3" in line
