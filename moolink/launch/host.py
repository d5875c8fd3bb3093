"""Where processes of a job run, as its supervisor sees it; and this machine as such a place."""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Mapping
from typing import Protocol

from moolink.accumulate import run_record
from moolink.errors import Error
from moolink.internal.processes import available_cores
from moolink.launch.local_processes import Machine, Watcher, visible_gpus
from moolink.launch.loop import Loop


class JobError(Error):
    """The job cannot run or go on; the text gives the cause and a remedy."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The program that a process runs.

    Attributes:
        command: the program and its arguments.
        defaults: environment variables where the host has not set them.
        environment: environment variables in any case.
        announces: whether the process is told of a descriptor to which it writes a line.
    """

    command: list[str]
    defaults: Mapping[str, str]
    environment: Mapping[str, str]
    announces: bool = False

    def variables(self, own: Mapping[str, str]) -> dict[str, str]:
        """All of its environment, with those of the host itself, which win."""
        return {**self.defaults, **os.environ, **self.environment, **own}


class Running(Protocol):
    """A process that runs."""

    pid: int

    def terminate(self) -> None:
        """Sends SIGTERM to it alone."""

    def kill(self) -> None:
        """Kills it with all that it started."""


class HostWatcher(Watcher, Protocol):
    """The events of a process that may be on another host."""

    def started(self, pid: int) -> None:
        """It runs."""

    def refused(self, why: str) -> None:
        """It could not be started; nothing else comes after this."""

    def lost(self, why: str) -> None:
        """Its host was lost, and ends it; nothing else comes after this."""


class Host(abc.ABC):
    """A machine on which processes of the job run.

    Attributes:
        label: the user's name for it; ``""``: this machine.
        cores: how many may be shared out there.
        gpus: those there, as ``CUDA_VISIBLE_DEVICES`` names them.
        is_up: whether processes can be started there now.
        role: the name of the only role of which its notes speak; ``""``: they speak of the job.
    """

    label: str
    cores: int
    gpus: list[str]
    is_up: bool
    role: str = ""

    @abc.abstractmethod
    def start(self, task: Task, watcher: HostWatcher) -> Running | None:
        """Starts a process; ``None``: the watcher was told why not."""

    @abc.abstractmethod
    def note(self, notes: Mapping[str, str]) -> None:
        """Tells the host which jobs have finished; see moolink/accumulate/run_record.py."""

    @abc.abstractmethod
    def close(self) -> None:
        """Called when all of its processes have ended, or to give them up. May be repeated."""

    @property
    @abc.abstractmethod
    def is_closed(self) -> bool:
        """Whether nothing of it is left, after :meth:`close`."""

    @property
    @abc.abstractmethod
    def notes(self) -> Mapping[str, str]:
        """Returns the finished jobs that the host knows."""


class LocalHost(Host):
    """This machine."""

    def __init__(self, loop: Loop, cores: int | None = None) -> None:
        self.label = ""
        self.cores = cores or available_cores()
        self.gpus = visible_gpus()
        self.is_up = True
        self._machine: Machine | None = Machine(loop)
        self.machine = self._machine

    def start(self, task: Task, watcher: HostWatcher) -> Running | None:
        own = {run_record.DIRECTORY: self.machine.directory}
        try:
            process = self.machine.start(
                task.command, task.variables(own), watcher, announces=task.announces
            )
        except OSError as error:
            watcher.refused(str(error))
            return None
        watcher.started(process.pid)
        return process

    def note(self, notes: Mapping[str, str]) -> None:
        run_record.add(self.machine.directory, notes)

    def close(self) -> None:
        if self._machine is not None:
            self._machine.close()
            self._machine = None

    @property
    def is_closed(self) -> bool:
        return self._machine is None

    @property
    def notes(self) -> Mapping[str, str]:
        return run_record.read_all(self.machine.directory)
