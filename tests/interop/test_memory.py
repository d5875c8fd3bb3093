"""Resident memory stays flat while arrays go from framework to framework: a short soak.py."""

from __future__ import annotations

import pytest

from tests.interop import soak


@pytest.mark.parametrize("receiver", soak.FRAMEWORKS)
@pytest.mark.parametrize("sender", soak.FRAMEWORKS)
def test_memory_is_flat(sender: str, receiver: str) -> None:
    for framework in {sender, receiver} - {"numpy"}:
        pytest.importorskip(framework)
    # A leak of one array, large or small, or of a kilobyte a call, would show.
    assert soak.soak(sender, receiver, small=20_000, large=100)
