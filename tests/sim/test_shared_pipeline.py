"""Collectives through shared memory under any interleaving of their stores, with deaths at any."""

from __future__ import annotations

from typing import Any

REACHED = {
    "abandoned",
    "abandoned, yet whole elsewhere",
    "all_gather",
    "all_reduce",
    "asleep",
    "broadcast",
    "closed in an operation",
    "died in an operation",
    "ended by one that woke",
    "gather",
    "lent, in place",
    "lent, the input",
    "of several chunks",
    "of some ranks",
    "reduce_scatter",
    "results",
    "scatter",
    "several inputs",
    "sleep given up",
    "started early",
    "woken",
    "unwritten inputs",
}


def test_invariants_hold(simulation: Any) -> None:
    result = simulation("shared_pipeline").run("0..999")
    assert result["failures"] == 0, result["stderr"]
    assert {what for what, times in result["coverage"].items() if times > 0} >= REACHED


def test_same_seed_same_trace(simulation: Any) -> None:
    shared_pipeline = simulation("shared_pipeline")
    first = shared_pipeline.run("0..50")["trace_hash"]
    assert first == shared_pipeline.run("0..50")["trace_hash"]
    assert first != shared_pipeline.run("1..51")["trace_hash"]


def test_every_mutant_is_caught(simulation: Any) -> None:
    shared_pipeline = simulation("shared_pipeline")
    assert len(shared_pipeline.mutants()) >= 10
    assert shared_pipeline.survivors(seeds=4000) == []
