"""Copies that a user may not have thought of: counted by reason, and logged once each."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

import moolink
from tests.waiting import until

Peers = tuple[moolink.Rpc, moolink.Rpc]


@pytest.fixture
def peers() -> Iterator[Peers]:
    with moolink.Rpc("server", timeout=20) as server, moolink.Rpc("client", timeout=20) as client:
        client.connect(server.listen("127.0.0.1:0")[0])
        # Over tcp, on the way there, what is lent is copied.
        until(lambda: client.explain("server")["path"] == "shm", "the shared memory path")
        server.define("take", lambda value: None)
        yield client, server


def test_nothing_is_counted_for_plain_arrays(peers: Peers) -> None:
    client, server = peers
    client.sync("server", "take", [np.zeros(5), np.zeros((1000, 100)), np.float32(3)])
    for rpc in (client, server):
        assert not any(rpc.stats()["copies"].values())


def test_reasons(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    client, _ = peers
    array = np.zeros((100, 100), np.float32)
    with caplog.at_level(logging.INFO, "moolink"):
        for _ in range(3):
            client.sync("server", "take", array[:, ::2])
        client.sync("server", "take", array.T)
        client.sync("server", "take", array.astype(">f4"))
        logged = "moolink.*copied"
        until(
            lambda: sum("copied" in r.getMessage() for r in caplog.records) >= 2, f"{logged} twice"
        )
    copies = client.stats()["copies"]
    assert copies["gaps"] == 4
    assert copies["byte_order"] == 1
    assert copies["bytes"] == 3 * 100 * 50 * 4 + 2 * 100 * 100 * 4
    messages = [r.getMessage() for r in caplog.records if "copied" in r.getMessage()]
    assert len([m for m in messages if "contiguous" in m]) == 1
    assert len([m for m in messages if "big-endian" in m]) == 1


def test_views_of_torch_that_must_be_computed(peers: Peers) -> None:
    torch = pytest.importorskip("torch")
    client, _ = peers
    client.sync("server", "take", torch.ones(100, dtype=torch.complex64).conj())
    assert client.stats()["copies"]["lazy_view"] == 1


def test_lent_arrays_that_become_copies(peers: Peers) -> None:
    torch = pytest.importorskip("torch")
    client, server = peers
    lent = moolink.empty(100_000, "float32", arrays="torch")
    lent.fill_(1)
    assert torch.equal(lent, torch.ones(100_000))
    client.sync("server", "take", moolink.lend(lent))
    assert server.stats()["copies"]["lent"] == 1


def test_collectives_count_too(groups: tuple[moolink.Group, moolink.Group]) -> None:
    a, _ = groups
    future = a.all_reduce("x", np.zeros((300, 300), np.float32)[:, ::3])
    copies = a.rpc.stats()["copies"]
    assert copies["gaps"] == 1
    assert copies["bytes"] == 300 * 100 * 4
    future.cancel()
    with pytest.raises(moolink.CancelledError):
        future.result()
