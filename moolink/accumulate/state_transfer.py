"""The state that a leader gives to newcomers, and that a newcomer takes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moolink._core import AccumulatorCore
from moolink.accumulate.checksums import Checksums
from moolink.accumulate.left_out_rounds import LeftOutRounds, checked_carried
from moolink.accumulate.parameter_sync import ParameterSync
from moolink.errors import Closed, StateError
from moolink.internal import logs
from moolink.internal.shown import shown


class StateTransfer:
    """One member's part: the user's state, with the model and all that belongs to its version.

    Args:
        capture: returns the model as a tree that can be sent.
        install: puts such a tree into the model, and drops gradients, which belong to the model
            before.
    """

    def __init__(
        self,
        core: AccumulatorCore,
        sync: ParameterSync,
        checksums: Checksums,
        left_out: LeftOutRounds,
        capture: Callable[[], Any],
        install: Callable[[Any], None],
    ) -> None:
        self._core = core
        self._sync = sync
        self._checksums = checksums
        self._left_out = left_out
        self._capture = capture
        self._install = install
        self._state: Any = None
        self.has_new = False
        """Whether a state has arrived that the user has not taken yet."""

    def give(self, state: Any) -> None:
        """Gives newcomers the model, and the user's state.

        Raises:
            RuntimeError, TypeError: as ``set_state`` of the core.
        """
        carried = self._left_out.carried()
        self._core.set_state(self._capture(), (state, *carried, self._sync.version))

    def give_if_overdue(self) -> None:
        """Gives newcomers the model without the user's state, for which they have waited 5 s."""
        if self._core.state_overdue():
            logs.logger.warning(
                "wants_state() has been true for 5 s: newcomers get parameters and buffers only"
            )
            self.give(None)

    def receive(self) -> bool:
        """Takes over the state that has arrived; returns False if it was given up meanwhile.

        Raises:
            StateError: it cannot be taken over; another one will be asked for.
        """
        try:
            if (arrived := self._core.new_state()) is None:
                return False
            self._take_over(*arrived)
        except Closed:
            raise
        except Exception as error:
            raise StateError(
                f"the state that leader '{self._core.leader()}' has sent cannot be taken over, and "
                f"this peer will ask for another: {error}"
            ) from error
        return True

    def _take_over(self, number: int, model: Any, rest: Any) -> None:
        try:
            state, carried, lost, version = rest
            if type(version) is not int:
                raise TypeError(f"its version is {shown(version)}")
            counters, contributions = checked_carried(carried, lost)
            self._install(model)
        except Exception:
            self._core.refuse_state(number)
            raise
        self._left_out.take_over(counters, contributions)
        self._core.state_installed(number)
        self._sync.received_state(version)
        self._checksums.forget()
        self._state, self.has_new = state, True

    def take(self) -> Any:
        """Returns the user's state that has arrived, once.

        Raises:
            RuntimeError: there is none.
        """
        if not self.has_new:
            raise RuntimeError(
                "no new state has arrived: call state() when has_new_state() is true"
            )
        state, self._state, self.has_new = self._state, None, False
        return state
