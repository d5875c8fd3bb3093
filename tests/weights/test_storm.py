"""SIGKILLs of the processes that publish and receive weights, at random points."""

from __future__ import annotations

from tests.storms import data_plane


def test_no_tree_is_torn_and_no_version_goes_back_whoever_is_killed() -> None:
    """A short run; tests/nightly has a thousand kills."""
    counts = data_plane.run(data_plane.CASTS["weights"], kills=20)
    assert counts["kills"] >= 20
    assert counts["versions"] > 20
