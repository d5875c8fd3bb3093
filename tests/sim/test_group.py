"""The group machines on a simulated network: their invariants hold, named mistakes are caught."""

from __future__ import annotations

from typing import Any

import pytest

REACHED = {
    "evictions",
    "frames ahead of their view",
    "frames applied",
    "frames of a pending epoch",
    "frames refused",
    "views: a peer died",
    "views: a peer fell silent",
    "views: a peer joined",
    "views: a peer left",
    "views: a peer was made a newcomer",
    "views: the members' views had come apart",
    "views: the group formed",
    "views: the sort order changed",
}


def test_invariants_hold(simulation: Any) -> None:
    result = simulation("group").run("0..1499")
    assert result["failures"] == 0, result["stderr"]
    assert {what for what, times in result["coverage"].items() if times > 0} >= REACHED


# Brokers that hear of two lineages (the first seed), and a proof of death that comes so late
# that the dead peer has a successor: chains of faults that few seeds have.
@pytest.mark.parametrize("seed", [18863, 31511, 35153])
def test_rare_chains_of_faults(simulation: Any, seed: int) -> None:
    result = simulation("group").run(f"{seed}..{seed}")
    assert result["failures"] == 0, result["stderr"]


def test_same_seed_same_trace(simulation: Any) -> None:
    group = simulation("group")
    first = group.run("0..40")["trace_hash"]
    assert first == group.run("0..40")["trace_hash"]
    assert first != group.run("1..41")["trace_hash"]


def test_every_mutant_is_caught(simulation: Any) -> None:
    group = simulation("group")
    assert len(group.mutants()) >= 12
    assert group.survivors(2000, no_stride_after_restart=2000) == []
