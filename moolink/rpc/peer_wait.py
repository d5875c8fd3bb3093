"""Waits for another peer, which may have ended."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from moolink.errors import TimeoutError
from moolink.internal import deadlines
from moolink.rpc import naming

if TYPE_CHECKING:
    from moolink.rpc import Rpc

_LOOK = 1.0  # seconds between two looks at whether a peer is connected


class PeerWait(deadlines.Wait):
    """A wait for one of several peers, or with `every` for all. It ends at its time limit. Without
    one it ends when the peers have been away for the time limit of the `Rpc`.

    Raises:
        ValueError: `timeout` is no time limit.
    """

    def __init__(
        self, rpc: Rpc, peers: Collection[str], timeout: float | None, *, every: bool = False
    ) -> None:
        super().__init__(timeout)
        self._rpc = rpc
        self._peers = peers
        self._least = len(peers) if every else 1
        self.timed = timeout is not None
        """Whether it has a time limit of its own."""
        self._looked = self._begun
        self._failing = False  # a call has failed, and no peer was found since
        self.reason = ""
        """Why the last call failed."""
        if timeout is None:
            self._deadline = self._begun + rpc.get_timeout()

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        self._look()
        return super().over

    def connected(self) -> bool:
        """Whether the peers are connected."""
        return len(naming.connected(self._rpc, self._peers)) >= self._least

    def answered(self) -> None:
        """A peer has answered a call."""
        self._failing = False
        self._is_there()

    def failed(self, why: object) -> None:
        """A call has failed, since no peer is there or the peer does not serve its function. For a
        second after that, a connection does not count as a sign that the peer is there."""
        self.reason = str(why)
        self._failing = True
        self._looked = time.monotonic()

    def turn(self, why: str) -> float:
        """As :meth:`deadlines.Wait.turn`; a call is under way meanwhile."""
        self._look()
        return min(super().turn(why), _LOOK)

    def late(self, what: str, advice: str = "") -> TimeoutError:
        """The error of a wait that is over; `what` says which event did not happen."""
        reason = self.reason
        if not reason and not self.connected():
            missing = sorted(set(self._peers) - naming.connected(self._rpc, self._peers))
            reason = f"not connected: {', '.join(map(naming.quoted, missing))}"
        seconds = time.monotonic() - self._begun
        why = "".join(f": {part}" for part in (reason, advice) if part)
        peer = naming.text(next(iter(self._peers)))
        return TimeoutError(f"{what} within {seconds:.3g} s{why}", peer=peer)

    def _look(self) -> None:
        if self.timed:
            return
        now = time.monotonic()
        if now >= self._looked + _LOOK or (super().over and not self._failing):
            self._looked, self._failing = now, False
            if self.connected():
                self._is_there()

    def _is_there(self) -> None:
        if not self.timed:
            self._deadline = time.monotonic() + self._rpc.get_timeout()
