"""The package `moolib` of compat/moolib, importable as programs import it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "compat" / "moolib"
sys.path.insert(0, str(PACKAGE))

import moolib  # noqa: E402

Peers = tuple[moolib.Rpc, moolib.Rpc]


@pytest.fixture
def peers() -> Iterator[Peers]:
    """A host and a client, connected."""
    with moolib.Rpc("host", timeout=20) as host, moolib.Rpc("client", timeout=20) as client:
        client.connect(host.listen("127.0.0.1:0")[0])
        yield host, client
