"""Nodes that call each other on a simulated network: invariants hold, mistakes are caught."""

from __future__ import annotations

from typing import Any

REACHED = {
    "attacks",
    "attacks refused",
    "calls cancelled",
    "calls failed by loss",
    "calls of a name that several bear",
    "calls succeeded",
    "calls to a group that has the caller's name",
    "calls timed out",
    "connections dropped silently",
    "dials refused in another's name",
    "loans mapped",
    "names taken",
    "peers down",
    "service messages",
}


def test_invariants_hold(simulation: Any) -> None:
    result = simulation("rpc").run("0..299")
    assert result["failures"] == 0, result["stderr"]
    assert {what for what, times in result["coverage"].items() if times > 0} >= REACHED


# Faults in a row keep a peer from being heard for as long as it takes to lose its name.
def test_a_name_is_lost_to_an_imposter_after_several_faults(simulation: Any) -> None:
    result = simulation("rpc").run("101438..101438")
    assert result["failures"] == 0, result["stderr"]
    assert result["coverage"]["peers down"] > 0


# A holder of the token is lost and back while it is asked about namesakes.
def test_a_question_that_is_lost_with_a_session_is_asked_again(simulation: Any) -> None:
    result = simulation("rpc").run("9681..9681")
    assert result["failures"] == 0, result["stderr"]


def test_same_seed_same_trace(simulation: Any) -> None:
    node = simulation("rpc")
    first = node.run("0..20")["trace_hash"]
    assert first == node.run("0..20")["trace_hash"]
    assert first != node.run("1..21")["trace_hash"]


def test_every_mutant_is_caught(simulation: Any) -> None:
    node = simulation("rpc")
    assert len(node.mutants()) >= 10
    assert node.survivors() == []
