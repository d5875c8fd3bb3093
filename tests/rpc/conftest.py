"""Two connected peers of this process, and peers in processes of their own."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable, Iterator

import pytest

import moolink
from tests.processes import killed_at_the_end, start_python

Pair = tuple[moolink.Rpc, moolink.Rpc]
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A client, connected to a server, over each transport."""
    # A client that dials tcp meets the server over shm too, if both have it.
    transports = ["tcp"] if request.param == "tcp" else ["shm", "tcp"]
    server = moolink.Rpc("server", transports=transports, timeout=20)
    client = moolink.Rpc("client", transports=transports, timeout=20)
    with server, client:
        client.connect(server.listen("127.0.0.1:0")[0])
        yield client, server


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program in a process of its own, which is killed with the test."""
    with killed_at_the_end() as processes:

        def start_one(program: str) -> subprocess.Popen[str]:
            processes.append(start_python("-c", textwrap.dedent(program)))
            return processes[-1]

        yield start_one
