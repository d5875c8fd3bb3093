"""A replay's table: any options, any order of inserts, samples, removals and restarts."""

from __future__ import annotations

from typing import Any

REACHED = {
    "a sample waits",
    "an insert waits",
    "below min_size again",
    "full",
    "priority of an item that is gone",
    "removed after its last sample",
    "restart",
    "withdrawn insert of a part",
    "withdrawn sample of a part",
}


def test_invariants_hold(simulation: Any) -> None:
    result = simulation("replay").run("0..299")
    assert result["failures"] == 0, result["stderr"]
    assert {what for what, times in result["coverage"].items() if times > 0} >= REACHED


def test_same_seed_same_trace(simulation: Any) -> None:
    replay = simulation("replay")
    first = replay.run("0..20")["trace_hash"]
    assert first == replay.run("0..20")["trace_hash"]
    assert first != replay.run("1..21")["trace_hash"]


def test_every_mutant_is_caught(simulation: Any) -> None:
    replay = simulation("replay")
    assert len(replay.mutants()) >= 16
    assert replay.survivors() == []
