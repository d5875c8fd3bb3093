"""The place of one process of a job whose hosts a scheduler chooses: Slurm, or Ray."""

from __future__ import annotations

from collections.abc import Mapping

from moolink.launch.description import Role
from moolink.launch.host import Host, HostWatcher


class ScheduledHost(Host):
    """The node that the scheduler chooses for a process.

    Args:
        label: the scheduler's name.
        role: the process's.
    """

    def __init__(self, label: str, role: Role) -> None:
        self.label = label
        self.cores = role.cores or 1
        self.gpus = [str(number) for number in range(role.gpus)]
        self.is_up = True
        self.role = role.name
        self._is_elastic = role.elastic
        self._has_ended_well = False

    def finish(self, watcher: HostWatcher, returncode: int) -> None:
        """Tells that the process has ended and all of its output has come."""
        self._has_ended_well = self._has_ended_well or returncode == 0
        watcher.ended(returncode)
        watcher.drained()

    def note(self, notes: Mapping[str, str]) -> None:
        """Does nothing: nodes need not have a folder in common."""

    @property
    def notes(self) -> Mapping[str, str]:
        """A process that the job waits for ends well when its role's work has finished."""
        return {self.role: ""} if self._has_ended_well and not self._is_elastic else {}

    def close(self) -> None:
        """Does nothing: its processes have ended."""

    @property
    def is_closed(self) -> bool:
        return True
