"""Allreduce over several hosts: any numbers of hosts and members, any order of delivery."""

from __future__ import annotations

from typing import Any

REACHED = {
    "many chains",
    "one host",
    "several hosts",
    "no power of two",
    "small",
    "large",
    "compressed",
    "hosts without contributors",
    "several leaders of a host",
    "star",
}


def test_invariants_hold(simulation: Any) -> None:
    result = simulation("exchange").run("0..299")
    assert result["failures"] == 0, result["stderr"]
    assert {what for what, times in result["coverage"].items() if times > 0} >= REACHED


def test_same_seed_same_trace(simulation: Any) -> None:
    exchange = simulation("exchange")
    first = exchange.run("0..20")["trace_hash"]
    assert first == exchange.run("0..20")["trace_hash"]
    assert first != exchange.run("1..21")["trace_hash"]


def test_every_mutant_is_caught(simulation: Any) -> None:
    exchange = simulation("exchange")
    assert len(exchange.mutants()) >= 6
    assert exchange.survivors() == []
