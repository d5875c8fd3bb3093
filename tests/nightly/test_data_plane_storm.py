"""A thousand SIGKILLs of publishers, subscribers, servers and clients, at random points."""

from __future__ import annotations

import pytest

from tests.storms import data_plane


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cast", ["weights", "items"])
def test_a_thousand_kills_of_anybody(cast: str) -> None:
    counts = data_plane.run(data_plane.CASTS[cast], kills=1000, seed=22)
    assert counts["kills"] >= 1000
    assert counts["versions"] + counts["taken"] > 1000
