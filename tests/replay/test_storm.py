"""SIGKILLs of the processes of a replay and a trajectory queue, at random points."""

from __future__ import annotations

from tests.storms import data_plane


def test_a_writer_that_is_killed_loses_only_what_it_has_not_flushed() -> None:
    """A short run; tests/nightly has a thousand kills."""
    counts = data_plane.run(data_plane.CASTS["items"], kills=20)
    assert counts["kills"] >= 20
    assert counts["taken"] > 20
    assert counts["flushed"] > 20
