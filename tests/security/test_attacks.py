"""Strangers that do what they can to a server: it lives, runs nothing of theirs, holds nothing for
them, and serves its friends meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moolink
from tests.security import attacks
from tests.security.server import Process, Server, wait_for

MOST_GROWTH = 10 << 20


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.kill()


def endure(server: Server, path: str, attack: Callable[[], None]) -> None:
    """Attacks while a friend calls, and looks at what is left of it."""
    with server.serving(path) as first:
        pass  # what a first friend costs is there already
    assert not first.errors
    quiet, descriptors = server.resident(), server.descriptors()
    with server.serving(path) as under:
        attack()
    assert server.lives()
    assert not under.errors
    assert under.seconds
    assert under.connections >= 1
    wait_for(lambda: server.descriptors() <= descriptors, "the end of the strangers' connections")
    assert server.resident() - quiet < MOST_GROWTH
    with moolink.Rpc("witness", timeout=20) as witness:
        witness.connect(server.tcp)
        assert witness.sync("server", "ran") == 0


@pytest.mark.parametrize("path", ["tcp", "shm"])
@pytest.mark.parametrize("attack", attacks.ATTACKS)
def test_an_attack_of_strangers(server: Server, attack: str, path: str) -> None:
    connect = attacks.to_tcp(server.port) if path == "tcp" else attacks.to_unix(server.unix_name)
    endure(server, path, lambda: attacks.ATTACKS[attack](connect, path == "shm"))


# A peer that is let in, and sends an object whose unpickling runs a program.
BOMBER = """
    import sys, moolink
    class Bomb:
        def __reduce__(self):
            return (open, (sys.argv[2], "w"))
    with moolink.Rpc("bomber", timeout=20, allow_pickle=True) as rpc:
        rpc.connect(sys.argv[1])
        for function in ("note", "echo"):
            try:
                print(rpc.sync("server", function, Bomb()))
            except moolink.Error as e:
                print(type(e).__name__)
    """


def test_a_pickle_bomb_is_refused(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "opened"

    def attack() -> None:
        bomber = Process(BOMBER, server.tcp, str(target))
        outcomes = [bomber.first_line, *bomber.stop().split()]
        assert len(outcomes) == 2
        assert set(outcomes) <= {"WireError", "RemoteError", "Error"}

    endure(server, "tcp", attack)
    assert not target.exists()
