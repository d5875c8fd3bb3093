"""Probabilities of a prioritised table after as many updates as a long training makes."""

from __future__ import annotations

from tests.replay.drift import check_probabilities


def test_probabilities_are_exact_after_a_hundred_million_updates() -> None:
    check_probabilities(100_000_000)
