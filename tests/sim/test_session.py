"""The session machine on a simulated network: its invariants hold, named mistakes are caught."""

from __future__ import annotations

from typing import Any

REACHED = {
    "chunks over streams",
    "grants asked",
    "later attempts",
    "loans mapped",
    "loans sent as bytes",
    "messages delivered",
    "messages lost",
    "parts placed",
    "segments not passed",
    "sessions lost",
    "standing grants released unused",
    "window full",
}


def test_invariants_hold(simulation: Any) -> None:
    result = simulation("session").run("0..299")
    assert result["failures"] == 0, result["stderr"]
    assert {what for what, times in result["coverage"].items() if times > 0} >= REACHED


def test_same_seed_same_trace(simulation: Any) -> None:
    session = simulation("session")
    first = session.run("0..20")["trace_hash"]
    assert first == session.run("0..20")["trace_hash"]
    assert first != session.run("1..21")["trace_hash"]


def test_every_mutant_is_caught(simulation: Any) -> None:
    session = simulation("session")
    assert len(session.mutants()) >= 10
    assert session.survivors() == []
