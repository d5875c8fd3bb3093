"""Checksums of the parameters, by which members find out that theirs differ from the leader's."""

from __future__ import annotations

from collections.abc import Callable

from moolink._core import AccumulatorCore
from moolink.accumulate.parameter_sync import ParameterSync


class Checksums:
    """The checksum of a version is reported once it is known that the parameters ought to have the
    bits of the leader's.

    Args:
        every: versions between two checksums; 0: there are none.
        checksum: of the parameters as they are now.
    """

    def __init__(
        self, core: AccumulatorCore, sync: ParameterSync, every: int, checksum: Callable[[], int]
    ) -> None:
        self._core = core
        self._sync = sync
        self._every = every
        self._checksum = checksum
        self._unreported: tuple[int, int] | None = None  # a version and its checksum

    def note(self, version: int) -> None:
        """The parameters are of this version."""
        due = self._every and version % self._every == 0
        if due and self._sync.comparable() is not False:
            self._unreported = (version, self._checksum())

    def report(self) -> None:
        """Reports the last checksum to the leader, if it is known that it ought to be equal."""
        if self._unreported is None or (comparable := self._sync.comparable()) is None:
            return
        (version, value), self._unreported = self._unreported, None
        if comparable:
            self._core.checksum(version, value)

    def forget(self) -> None:
        """The parameters are others now: a state has arrived."""
        self._unreported = None
