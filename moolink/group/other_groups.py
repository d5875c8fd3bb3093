"""Groups at the broker that may be meant to be one: peers wait in each for those of the other."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from moolink.group.broker_peer import GROUPS
from moolink.rpc import Rpc, naming

if TYPE_CHECKING:
    from moolink._core import Future

_LOOK_AROUND = 5.0  # seconds without enough members between two questions to the broker
_PATIENCE = 1.0  # seconds for the broker's answer
_TURN = 0.1  # seconds between two looks for it
_MOST_SHOWN = 3


class OtherGroups:
    """The other groups at the broker that have fewer members than this one waits for. The broker
    is asked while the group waits for its members, so the answer delays nothing.

    Args:
        rpc: this peer.
        broker: name of the broker.
        name: of this group.
        count: of the members that it waits for.
        deadline: of the wait, in monotonic time; None: it has none.
    """

    def __init__(
        self, rpc: Rpc, broker: str, name: str, count: int, deadline: float | None
    ) -> None:
        self._rpc = rpc
        self._broker = broker
        self._name = name
        self._count = count
        self._deadline = math.inf if deadline is None else deadline
        self._answer: Future | None = None
        self._gives_up = 0.0  # when the answer is no longer waited for
        now = time.monotonic()
        self._last = max(now, self._deadline - _PATIENCE)  # the last time to ask
        self._asks = min(now + _LOOK_AROUND, self._last)
        self.hint = ""
        """Names these groups; empty: there are none, or the broker has not answered."""

    def turn(self) -> float | None:
        """Seconds for which to wait before `look` is called; None: no limit."""
        now = time.monotonic()
        until = math.inf if self.hint else self._asks if self._answer is None else now + _TURN
        until = min(until, self._deadline)
        return None if until == math.inf else max(0.0, until - now)

    def look(self) -> bool:
        """Asks the broker if that is due, or takes its answer if it is there. Returns whether it
        has named such groups."""
        now = time.monotonic()
        if self._answer is not None and self._answer.done():
            self.hint = self._hint(self._answer)
            self._answer = None
            return self.hint != ""
        if self._answer is not None and now >= self._gives_up:
            self.close()
        elif not self.hint and self._asks <= now < self._deadline:
            self._gives_up = now + _PATIENCE
            self._asks = now + _LOOK_AROUND
            if now < self._last:
                self._asks = min(self._asks, self._last)
            if naming.connected(self._rpc, [self._broker]):
                self._answer = self._rpc.async_(self._broker, GROUPS)
        return False

    def close(self) -> None:
        """Gives up a question without an answer."""
        if self._answer is not None:
            self._answer.cancel()
        self._answer = None

    def _hint(self, answer: Future) -> str:
        sizes: Any = {} if answer.exception() is not None else answer.result()
        if not isinstance(sizes, dict):
            return ""
        others = [
            f"{other!r} with {size} member{'' if size == 1 else 's'}"
            for other, size in sizes.items()
            if other != self._name and isinstance(size, int) and 0 < size < self._count
        ]
        if not others:
            return ""
        return (
            f"the broker also has group {', '.join(others[:_MOST_SHOWN])}: give all peers of a "
            "job the same group's name"
        )
