"""Hosts with SSH servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import sshd
from tests.network import hosts


@pytest.fixture(scope="session")
def _allowed() -> None:
    if reason := sshd.why_not() or hosts.why_not():
        pytest.skip(reason)


@pytest.fixture
def make_ssh_hosts(_allowed: None, tmp_path: Path) -> Iterator[sshd.MakeSshHosts]:
    """Returns a function that makes so many hosts with servers, removed after the test."""
    made: list[tuple[hosts.Hosts, sshd.SshHosts]] = []

    def make(count: int) -> sshd.SshHosts:
        namespaces = hosts.Hosts(count + 1)
        servers = sshd.SshHosts(namespaces, count, tmp_path)
        made.append((namespaces, servers))
        return servers

    yield make
    for namespaces, servers in made:
        servers.close()
        namespaces.close()
