"""A host that is reached by SSH: its connection, and the processes that its agent runs."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from moolink.internal.processes import describe_exit
from moolink.internal.shown import cut, printable
from moolink.launch import wire
from moolink.launch.host import Host, HostWatcher, Running, Task
from moolink.launch.local_processes import LocalProcess, Machine
from moolink.launch.loop import Loop, Outbox, Timer
from moolink.launch.output import PrefixedStream, Screen

_SSH_TIMEOUT = 10  # seconds of ssh itself
CONNECT_TIMEOUT = 45.0  # seconds; key exchange, login and imports included
_PAUSES = (1.0, 2.0, 5.0)  # seconds before attempts to reach a lost host; the last one repeats
_SHOWN = 5  # lines of ssh's output
_KEPT_BYTES = 65536  # bytes of it that are kept
# The fields that the agent's messages must have; the host may be hostile.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "up": {"cores": int, "gpus": list, "launcher": (str, NoneType), "host": (str, NoneType)},
    "started": {"number": int, "pid": int},
    "announced": {"number": int, "text": str},
    "refused": {"number": int, "why": str},
    "ended": {"number": int, "code": int, "notes": dict},
}

# Messages of ssh, and remedies. The text is that of OpenSSH.
_REMEDIES = {
    "cannot execute": "install an SSH client, or name it with --ssh",
    "Permission denied": "add your key to the authorized_keys there, or name another with --ssh "
    "'ssh -i FILE'; the launcher cannot ask for passwords",
    "Could not resolve hostname": "check the host's name",
    "Host key verification failed": "run `ssh` to the host once and confirm its key",
    "Connection refused": "check that sshd runs there, and its port (--ssh 'ssh -p PORT')",
    "timed out": "check that the host runs and can be reached",
    "No route to host": "check that the host runs and can be reached",
    "No module named": "install moolink there, or name its interpreter with --python",
    "not found": "name the interpreter there with --python",
    "No such file": "name the directory there with --directory, or the interpreter with --python",
    "can't cd": "name the directory there with --directory",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """How hosts are reached.

    Attributes:
        ssh: the command, with its options.
        python: the interpreter there.
        directory: the working directory there.
        lost_after: seconds after which a host that is not heard of is lost.
    """

    ssh: tuple[str, ...]
    python: str
    directory: str
    lost_after: float


def _quoted(path: str) -> str:
    """Quotes a path for a shell, which still finds the user's home for ``~`` and ``~user``."""
    home, slash, rest = path.partition("/")
    if not re.fullmatch(r"~[\w.-]*", home):
        return shlex.quote(path)
    return home + slash + (shlex.quote(rest) if rest else "")


class RemoteProcess:
    """A process on the host."""

    def __init__(self, host: RemoteHost, number: int, watcher: HostWatcher) -> None:
        self._host = host
        self._number = number
        self.watcher = watcher
        self.has_ended = False
        self.pid = 0

    def terminate(self) -> None:
        """Asks the agent to send SIGTERM."""
        self._host.send(do="terminate", number=self._number)

    def kill(self) -> None:
        """Asks the agent to kill it."""
        self._host.send(do="kill", number=self._number)


class _Connection:
    """One run of ssh: passes its output to the host."""

    def __init__(self, host: RemoteHost, screen: Screen) -> None:
        self._host = host
        self.frames = wire.Frames()
        self.stderr = PrefixedStream(screen, "stderr", f"[{host.label}] ".encode())
        self.said: list[bytes] = []  # before the host was up
        self.process: LocalProcess | None = None
        self.outbox: Outbox | None = None
        self.has_begun = False  # the agent was sent the first message
        self.how = ""

    def output(self, stream: str, data: bytes) -> None:
        if stream == "stdout":
            self._host.received(self, data)
        elif self._host.is_up:
            self.stderr.feed(data)
        elif sum(map(len, self.said)) < _KEPT_BYTES:
            self.said.append(data)

    def announced(self, text: str) -> None:
        """Nothing is announced by ssh."""

    def ended(self, returncode: int) -> None:
        self.how = f"ssh {describe_exit(returncode)}"
        if self.outbox is not None:
            self.outbox.stop()

    def drained(self) -> None:
        self.stderr.close()
        self._host.disconnected(self)

    def words(self) -> str:
        """The output before the host was up, for an error."""
        lines = b"".join(self.said).decode(errors="replace").split("\n")
        lines += [line.decode(errors="replace") for line in self.frames.noise]
        shown = [cut(printable(line.strip())) for line in lines if line.strip()]
        return "; ".join(shown[-_SHOWN:])


class RemoteHost(Host):
    """A host.

    Args:
        loop: in which all of this happens.
        screen: for ssh's output.
        machine: which runs ssh.
        target: ``HOST`` or ``user@HOST``.
        options: how it is reached.
        begin: the first message to the agent: the job's id, token and grace.
        on_up: called each time it can be used.
        on_notes: called with the jobs that have finished.

    Attributes:
        failure: why it could not be reached the first time; ``""`` before that is known.
        launcher_address: this machine's address as the host sees it.
        own_address: the host's address as this machine sees it.
    """

    def __init__(
        self,
        loop: Loop,
        screen: Screen,
        machine: Machine,
        target: str,
        options: Options,
        begin: Mapping[str, Any],
        on_up: Callable[[RemoteHost], None],
        on_notes: Callable[[RemoteHost, Mapping[str, str]], None],
    ) -> None:
        self.label = target
        self.cores, self.gpus, self.is_up = 1, [], False
        self.failure = ""
        self.launcher_address: str | None = None
        self.own_address: str | None = None
        self._loop, self._screen, self._machine = loop, screen, machine
        self._options, self._begin = options, begin
        self._on_up, self._on_notes = on_up, on_notes
        self._connection: _Connection | None = None
        self._open: set[_Connection] = set()  # whose ssh has not ended
        self._processes: dict[int, RemoteProcess] = {}
        self._numbers = itertools.count(1)
        self._notes: dict[str, str] = {}
        self._was_up = False
        self._attempts = 0
        self._timer: Timer | None = None  # of the next attempt, or the time limit of this one
        self._heard_at = 0.0
        self._is_closing = False

    # The connection.

    def connect(self) -> None:
        """Starts ssh; `on_up` or `failure` reports the result."""
        connection = _Connection(self, self._screen)
        directory, python = map(_quoted, (self._options.directory, self._options.python))
        command = [
            *self._options.ssh,
            *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_TIMEOUT}"),
            *("--", self.label.replace("[", "").replace("]", "")),
            f"cd {directory} && exec {python} -m moolink.launch.agent",
        ]
        self._connection = connection
        try:
            process = self._machine.start(command, os.environ, connection, has_stdin=True)
        except OSError as error:  # too many files or processes here
            self._lose(connection, f"ssh cannot be started: {error}")
            return
        self._open.add(connection)
        self._timer = self._loop.after(
            CONNECT_TIMEOUT, lambda: self._drop(connection, "it did not answer in time")
        )
        assert process.popen.stdin is not None
        connection.process = process
        connection.outbox = Outbox(self._loop, process.popen.stdin.fileno(), lambda: None)

    def received(self, connection: _Connection, data: bytes) -> None:
        """Takes the agent's output."""
        if connection is not self._connection:
            return
        self._heard_at = time.monotonic()
        try:
            for item in connection.frames.feed(data):
                if connection is not self._connection:
                    return  # an earlier message has ended it
                if isinstance(item, tuple):
                    number, stream, written = item
                    self._processes[number].watcher.output(stream, written)
                else:
                    self._take(connection, item)
            # Only after the greeting: another program may answer, and show the token to others.
            if connection.frames.is_greeted and not connection.has_begun:
                connection.has_begun = True
                self.send(do="begin", **self._begin)
        except (wire.WireFormatError, KeyError, TypeError) as error:
            self._drop(connection, f"its agent is not understood ({error!r})")

    def _take(self, connection: _Connection, message: Mapping[str, Any]) -> None:
        what = message["is"]
        wire.check(message, _FIELDS.get(what, {}))
        for each in [*message.get("gpus", ()), *message.get("notes", {}).values()]:
            wire.check({"text": each}, {"text": str})
        if what == "alive":
            return
        if what == "up":
            if not self.is_up:
                self._take_up(connection, message)
            return
        number = message["number"]
        process = self._processes[number]
        if what == "started":
            process.pid = message["pid"]
            process.watcher.started(process.pid)
        elif what == "announced":
            process.watcher.announced(message["text"])
        elif what == "refused":
            del self._processes[number]
            process.watcher.refused(message["why"])
        elif what == "ended":
            if process.has_ended:
                raise wire.WireFormatError(f"process {number} has ended twice")
            if new := {k: v for k, v in message["notes"].items() if k not in self._notes}:
                self._notes |= new
                self._on_notes(self, new)
            process.has_ended = True
            process.watcher.ended(message["code"])
        elif what == "drained":
            if not process.has_ended:
                raise wire.WireFormatError(f"process {number} has not ended")
            del self._processes[number]
            process.watcher.drained()

    def _take_up(self, connection: _Connection, message: Mapping[str, Any]) -> None:
        self.cores, self.gpus = message["cores"], message["gpus"]
        self.launcher_address, self.own_address = message["launcher"], message["host"]
        self._cancel_timer()
        self.is_up, self._was_up, self._attempts = True, True, 0
        self._loop.after(wire.HEARTBEAT, lambda: self._beat(connection))
        self._on_up(self)

    def _beat(self, connection: _Connection) -> None:
        if connection is not self._connection:
            return
        silent = time.monotonic() - self._heard_at
        if silent > self._options.lost_after:
            self._drop(connection, f"nothing was heard of it for {silent:.0f} s")
            return
        self.send(do="alive")
        self._loop.after(wire.HEARTBEAT, lambda: self._beat(connection))

    def _drop(self, connection: _Connection, why: str) -> None:
        """Gives a connection up."""
        if connection is self._connection and connection.process is not None:
            connection.how = why
            connection.process.kill()
            self._lose(connection, why)

    def disconnected(self, connection: _Connection) -> None:
        """The connection's ssh has ended, and all that came over it was taken."""
        self._open.discard(connection)
        self._lose(connection, connection.how)

    def _lose(self, connection: _Connection, why: str) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        self._cancel_timer()
        was_up, self.is_up = self.is_up, False
        if not self._was_up:
            self.failure = self._explain(connection, why)
            return
        lost, self._processes = self._processes, {}
        if not self._is_closing:
            pause = _PAUSES[min(self._attempts, len(_PAUSES) - 1)]
            self._attempts += 1
            self._timer = self._loop.after(pause, self.connect)
        if was_up:
            for process in lost.values():
                if process.has_ended:
                    process.watcher.drained()
                else:
                    process.watcher.lost(why)

    def _explain(self, connection: _Connection, why: str) -> str:
        words = connection.words()
        remedy = next((help_ for text, help_ in _REMEDIES.items() if text in words), "")
        said = f": {words}" if words else ""
        return f"host {self.label} cannot be used: {why}{said}" + (remedy and f" ({remedy})")

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # A host of the job.

    def send(self, **message: Any) -> None:
        """Sends a message to the agent; if there is none, nothing is sent."""
        if self._connection is not None and self._connection.outbox is not None:
            self._connection.outbox.put(wire.line(**message))

    def start(self, task: Task, watcher: HostWatcher) -> Running | None:
        number = next(self._numbers)
        process = RemoteProcess(self, number, watcher)
        self._processes[number] = process
        self.send(do="start", number=number, **dataclasses.asdict(task))
        return process

    def note(self, notes: Mapping[str, str]) -> None:
        if notes:
            self.send(do="note", notes=dict(notes))

    @property
    def notes(self) -> Mapping[str, str]:
        return self._notes

    def close(self) -> None:
        self._cancel_timer()
        connection = self._connection
        if connection is None or connection.process is None:
            self._is_closing = True
            return
        stdin = connection.process.popen.stdin
        if self._is_closing or not self.is_up:
            self._is_closing = True
            self._drop(connection, "it was given up")
        elif stdin is not None and connection.outbox is not None:
            self._is_closing = True
            connection.outbox.flush()  # it may have been told to kill
            connection.outbox.stop()
            stdin.close()  # the agent ends

    @property
    def is_closed(self) -> bool:
        return self._is_closing and not self._open
