"""SIGKILLs at random points, of a replay's and a trajectory queue's processes."""

from __future__ import annotations

from tests.storms import data_plane


def test_a_writer_that_is_killed_loses_only_what_it_has_not_flushed() -> None:
    """In short: tests/nightly has a thousand kills."""
    counts = data_plane.run(data_plane.CASTS["items"], kills=20)
    assert counts["kills"] >= 20
    assert counts["taken"] > 20
    assert counts["flushed"] > 20
