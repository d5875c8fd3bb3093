"""Hosts on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.network.hosts import Hosts, why_not


@pytest.fixture(scope="session")
def _allowed() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def make_hosts(_allowed: None) -> Iterator[Callable[..., Hosts]]:
    """Returns a function like :class:`Hosts`; what it makes is removed after the test."""
    made: list[Hosts] = []

    def make(count: int, rate: str | None = None) -> Hosts:
        made.append(Hosts(count, rate))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()
