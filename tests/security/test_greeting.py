"""Who may connect: wrong tokens, one insecure side, tokens that are being replaced."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import moolink
from moolink import tokens
from tests.security.attacks import frame
from tests.security.server import Server
from tests.waiting import until

PATHS = ["shm", "tcp"]


def address_for(rpc: moolink.Rpc, path: str) -> str:
    return rpc.listen("127.0.0.1:0" if path == "tcp" else "shm://")[0]


def key_id(key: tokens.Key) -> str:
    return key.describe().split()[1]


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_token_is_said_at_once_to_both_sides(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    server_key, client_key = tokens.new(), tokens.new()
    with (
        caplog.at_level(logging.WARNING, "moolink"),
        moolink.Rpc("server", transports=[path], token=server_key) as server,
        moolink.Rpc("client", transports=[path], token=client_key.text()) as client,
    ):
        server.define("f", lambda: 1)
        address = address_for(server, path)
        client.connect(address)
        # Not when its time is up: that would be TimeoutError.
        with pytest.raises(moolink.AuthError) as caught:
            client.sync("server", "f")
        until(lambda: caplog.text.count("refuse") >= 2, "the other side's warning")
        for text in (str(caught.value), caplog.text):
            assert key_id(server_key) in text
            assert key_id(client_key) in text
        # A dialler that fails in TLS has not said its name.
        assert "'server'" in str(caught.value)
        assert path == "tcp" or "'client'" in caplog.text
        assert address in str(caught.value)
        assert "the token given as token" in str(caught.value)
        assert server.peers() == client.peers() == []
        assert server_key.text() not in caplog.text
        assert server_key.secret.hex() not in caplog.text


def test_a_call_of_who_is_dialled_ends_too() -> None:
    with (
        moolink.Rpc("server", transports=["shm"], token=tokens.new()) as server,
        moolink.Rpc("client", transports=["shm"], token=tokens.new()) as client,
    ):
        address = address_for(server, "shm")
        call = server.async_("client", "f")
        client.connect(address)
        with pytest.raises(moolink.AuthError, match="'client'"):
            call.result()


def said_of_insecure(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The different refusals that were logged."""
    said = (record.getMessage() for record in caplog.records)
    return {text for text in said if "insecure=True" in text or "encrypted" in text}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("insecure_dials", [True, False])
def test_one_insecure_side_is_named(
    path: str, insecure_dials: bool, caplog: pytest.LogCaptureFixture
) -> None:
    key = tokens.new()
    with (
        caplog.at_level(logging.WARNING, "moolink"),
        moolink.Rpc("secure", transports=[path], token=key) as secure,
        moolink.Rpc("open", transports=[path], insecure=True) as open_,
    ):
        dialler, acceptor = (open_, secure) if insecure_dials else (secure, open_)
        dialler.connect(address_for(acceptor, path))
        with pytest.raises(moolink.AuthError, match="insecure=True") as caught:
            dialler.sync(acceptor.get_name(), "f")
        # Who dials hears the other's name; the other, of the dialler's address at least.
        assert f"'{acceptor.get_name()}'" in str(caught.value) or path == "tcp"
        until(lambda: len(said_of_insecure(caplog)) >= 2, "both sides' warnings")
        if path == "tcp" and not insecure_dials:
            assert "the one that listens was made with insecure=True" in str(caught.value)


NOBODY = 65534


@contextmanager
def another_user() -> Iterator[None]:
    """The kernel tells whom this process connects to meanwhile that it is nobody's."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def first_message(unix_name: str) -> tuple[bytes, int]:
    """What a listening peer sends to who connects, before it has heard anything; descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(unix_name)
        data, descriptors, _, _ = socket.recv_fds(connection, 1024, 16)
        for descriptor in descriptors:
            os.close(descriptor)
        return data, len(descriptors)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_processes_of_another_user_get_nothing_on_the_unix_socket() -> None:
    server = Server()
    try:
        assert first_message(server.unix_name)[1] == 2  # a ring and its bell
        with moolink.Rpc("client", transports=["shm"], insecure=True) as client, another_user():
            assert first_message(server.unix_name) == (b"", 0)
            # It would not talk to that server either, which could be anybody's.
            client.connect(server.shm)
            with pytest.raises(moolink.AuthError) as caught:
                client.sync("server", "echo", 1)
        assert f"is of user 0, this one of {NOBODY}" in str(caught.value)
        assert server.lives()
    finally:
        server.kill()


def test_what_a_stranger_says_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Else it could write lines in our name."""
    text = b"no\nERROR all is lost\x1b[2J"
    refusal = frame(3, bytes([0, len(text)]) + text + b"\x01s")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        moolink.Rpc("client", transports=["tcp"], insecure=True) as client,
    ):
        client.connect(f"127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        with connection:
            connection.sendall(refusal)
            until(lambda: "all is lost" in caplog.text, "the refusal")
    (said,) = [r.getMessage() for r in caplog.records if "all is lost" in r.getMessage()]
    assert "no?ERROR all is lost?[2J" in said


@pytest.mark.parametrize("path", PATHS)
def test_friends_meet(path: str, tmp_path: Path) -> None:
    key = tokens.new()
    tokens.write(tmp_path / "token", [key])
    ways: list[Callable[[str], moolink.Rpc]] = [
        lambda name: moolink.Rpc(name, transports=[path], token=key),
        lambda name: moolink.Rpc(name, transports=[path], token=key.text()),
        lambda name: moolink.Rpc(name, transports=[path], token=tmp_path / "token"),
        lambda name: moolink.Rpc(name, transports=[path], token_file=str(tmp_path / "token")),
    ]
    with ways[0]("server") as server:
        server.define("f", lambda x: x + 1)
        address = address_for(server, path)
        for i, way in enumerate(ways):
            with way(f"client {i}") as client:
                client.connect(address)
                assert client.sync("server", "f", i) == i + 1


def test_a_token_is_replaced_while_peers_run(tmp_path: Path) -> None:
    """As docs/security.md tells it: below, above, out."""
    old, new = tokens.new(), tokens.new()
    rings = {"old": [old], "below": [old, new], "above": [new, old], "new": [new]}
    for name, keys in rings.items():
        tokens.write(tmp_path / name, keys)

    def meet(server_file: str, client_file: str) -> bool:
        with (
            moolink.Rpc("server", token_file=tmp_path / server_file) as server,
            moolink.Rpc("client", token_file=tmp_path / client_file) as client,
        ):
            server.define("f", lambda: True)
            client.connect(server.listen("127.0.0.1:0")[0])
            try:
                return bool(client.sync("server", "f"))
            except moolink.AuthError:
                return False

    order = list(rings)
    for before, after in itertools.pairwise(order):
        assert meet(before, after)
        assert meet(after, before)
    assert not meet("old", "new")
