"""The first seconds of a soak; `python tests/soak.py --minutes 20` tells what grows."""

from __future__ import annotations

from tests.soak import soak


def test_half_a_minute_of_everything() -> None:
    job = soak(seconds=25, seed=3, warm_up=10, every=1.5)
    assert job.faults == []
    assert sum(job.events.values()) >= 5
    deeds = job.deeds()
    assert {"small", "large", "lent", "stream", "cancelled", "short_life"} <= deeds.keys()
