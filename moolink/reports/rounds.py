"""Types of the reports of accumulators: `Accumulator.get_gradient_stats`."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class RoundPhases(TypedDict):
    """How long a round took at this peer.

    Attributes:
        gather: seconds from this peer's last contribution to the cut; None: it made none.
        reduce: seconds from the cut to the result.
        deliver: seconds from the result to the update() that showed it.
    """

    gather: float | None
    reduce: float
    deliver: float


class GradientStats(TypedDict):
    """The statistics of a round of gradients; see ``Accumulator.get_gradient_stats``.

    Attributes:
        batch_size: the virtual batch: the sum over the contributions.
        num_gradients: contributions with gradients.
        num_skipped: contributions without.
        contributors: the names of their peers.
        contributions: those with gradients, by the name of the peer.
        staleness: of each contribution with gradients: how many updates its parameters were older
            than the newest.
        counters: exact sums over all contributions.
        phase_seconds: how long the round took here.
        waiting_for: now: the peers that hold up the group.
        lost: contributions (peer, k) of dead peers that turned out, since the round before, to be
            in no round.
        grad_norm: before ``max_grad_norm`` was applied; None unless that or ``on_nonfinite`` asks
            for it.
        skipped_rounds: left out at this peer by ``on_nonfinite="skip"``.
        skipped_contributions: left out at this peer by ``on_nonfinite="skip"``.
        moved_units: of an accumulator with ``units``: the units that had not exactly one gradient
            of the newest parameters, or that had one of another member than in the round before.
            A run is repeatable as long as it is empty.
    """

    batch_size: int
    num_gradients: int
    num_skipped: int
    contributors: list[str]
    contributions: dict[str, int]
    staleness: list[int]
    counters: dict[str, int]
    phase_seconds: RoundPhases
    waiting_for: list[str]
    lost: list[tuple[str, int]]
    grad_norm: NotRequired[float | None]
    skipped_rounds: NotRequired[int]
    skipped_contributions: NotRequired[int]
    moved_units: NotRequired[list[int]]
