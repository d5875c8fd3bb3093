"""Rounds that ``on_nonfinite="skip"`` leaves out, and the part that belongs to the next round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moolink.internal import logs

if TYPE_CHECKING:
    from moolink.reports import GradientStats


class LeftOutRounds:
    """Counters and lost contributions of rounds that no member applies come with the next one.

    Attributes:
        rounds: that were left out at this peer.
        contributions: of this peer that were skipped.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.contributions = 0
        self._counters: dict[str, int] = {}  # of rounds left out since the one shown last
        self._lost: list[tuple[str, int]] = []  # likewise
        self._shown_counters: dict[str, int] = {}  # those that the round shown last brought along
        self._shown_lost: list[tuple[str, int]] = []

    def add_contribution(self) -> None:
        """A contribution of this peer is left out."""
        logs.logger.warning("the gradients are not finite: this contribution is skipped")
        self.contributions += 1

    def add(self, version: int, stats: GradientStats) -> None:
        """The round that led to this version is left out."""
        logs.logger.warning(
            "round %d, of %s, is not finite and is skipped", version, stats["contributors"]
        )
        self.rounds += 1
        _add(self._counters, stats["counters"])
        self._lost += stats["lost"]

    def show(self) -> None:
        """A round is shown."""
        self._shown_counters, self._counters = self._counters, {}
        self._shown_lost, self._lost = self._lost, []

    def complete(self, stats: GradientStats) -> GradientStats:
        """The statistics of the round that is shown, with those carried over to it."""
        _add(stats["counters"], self._shown_counters)
        stats["lost"] = self._shown_lost + stats["lost"]
        stats["skipped_rounds"] = self.rounds
        stats["skipped_contributions"] = self.contributions
        return stats

    def carried(self) -> tuple[dict[str, int], list[list[str | int]]]:
        """The state that a newcomer needs: it is part of the model's history."""
        return self._counters, [list(contribution) for contribution in self._lost]

    def take_over(self, counters: dict[str, int], lost: list[tuple[str, int]]) -> None:
        """At a newcomer: takes the result of ``checked_carried``."""
        self._counters, self._lost = counters, lost


def checked_carried(counters: Any, lost: Any) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """A leader's ``carried()``, as received.

    Raises:
        TypeError: no leader that keeps to the protocol sends it.
        ValueError: likewise.
    """
    counters, lost = dict(counters), [(peer, k) for peer, k in lost]
    if not all(type(name) is str and type(value) is int for name, value in counters.items()):
        raise TypeError("counters that are none")
    if not all(type(peer) is str and type(k) is int for peer, k in lost):
        raise TypeError("lost contributions that are none")
    return counters, lost


def _add(totals: dict[str, int], counters: Mapping[str, int]) -> None:
    for name, value in counters.items():
        totals[name] = totals.get(name, 0) + value
