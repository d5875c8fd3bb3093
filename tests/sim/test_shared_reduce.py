"""The shared-memory allreduce under any interleaving of its stores, with deaths at any of them."""

from __future__ import annotations

from typing import Any

REACHED = {
    "asleep",
    "died in an operation",
    "results",
    "results kept at the end",
    "sleep given up",
    "started early",
    "woken",
    "zeros",
}


def test_invariants_hold(simulation: Any) -> None:
    result = simulation("shared_reduce").run("0..999")
    assert result["failures"] == 0, result["stderr"]
    assert {what for what, times in result["coverage"].items() if times > 0} >= REACHED


def test_same_seed_same_trace(simulation: Any) -> None:
    shared_reduce = simulation("shared_reduce")
    first = shared_reduce.run("0..50")["trace_hash"]
    assert first == shared_reduce.run("0..50")["trace_hash"]
    assert first != shared_reduce.run("1..51")["trace_hash"]


def test_every_mutant_is_caught(simulation: Any) -> None:
    shared_reduce = simulation("shared_reduce")
    assert len(shared_reduce.mutants()) >= 10
    assert shared_reduce.survivors() == []
