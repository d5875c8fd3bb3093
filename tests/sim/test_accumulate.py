"""The accumulator with its group, on a simulated network: invariants hold, mistakes are caught."""

from __future__ import annotations

from typing import Any

REACHED = {
    "broker crashes",
    "contributions counted",
    "crashes between messages",
    "demotions asked for",
    "drops",
    "evictions",
    "hard views",
    "losses named",
    "resyncs",
    "snapshots installed",
    "soft views",
    "unwritten contributions",
    "withdrawn contributions",
}


def test_invariants_hold(simulation: Any) -> None:
    result = simulation("accumulate").run("0..199")
    assert result["failures"] == 0, result["stderr"]
    assert {what for what, times in result["coverage"].items() if times > 0} >= REACHED


def test_same_seed_same_trace(simulation: Any) -> None:
    accumulate = simulation("accumulate")
    first = accumulate.run("0..9")["trace_hash"]
    assert first == accumulate.run("0..9")["trace_hash"]
    assert first != accumulate.run("1..10")["trace_hash"]


def test_every_mutant_is_caught(simulation: Any) -> None:
    accumulate = simulation("accumulate")
    assert len(accumulate.mutants()) >= 10
    assert accumulate.survivors() == []
