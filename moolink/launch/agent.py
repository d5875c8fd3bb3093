"""A host's share of a job: ``python -m moolink.launch.agent``, run by ``moolink launch`` over SSH.

It starts the processes that the launcher asks for, sends what they write, and ends all of them when
its input ends or the launcher is not heard of any more. The messages are those of wire.py.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from moolink.accumulate import run_record
from moolink.internal.processes import available_cores
from moolink.launch import wire
from moolink.launch.description import GRACE
from moolink.launch.host import Task
from moolink.launch.local_processes import LocalProcess, Machine, visible_gpus
from moolink.launch.loop import READ, Loop, Outbox, Signals
from moolink.launch.settings import write_token

_MOST_PENDING = 1 << 20  # bytes; processes that write more wait until the launcher has read them
_LOCK_TIMEOUT = 30.0  # seconds for the agent before this one to end its processes
_LOCK_PAUSE = 0.1


class _Forward:
    """Tells the launcher of a process."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent = agent
        self._number = number

    def output(self, stream: str, data: bytes) -> None:
        self._agent.send(wire.output(self._number, stream, data))

    def announced(self, text: str) -> None:
        self._agent.tell("announced", self._number, text=text)

    def ended(self, returncode: int) -> None:
        self._agent.ended(self._number, returncode)

    def drained(self) -> None:
        self._agent.drained(self._number)


class Agent:
    """The processes of one host."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._loop = Loop()
        self._read_fd = read_fd
        self._lines = wire.Lines()
        self._outbox = Outbox(self._loop, write_fd, self._stop)
        self._machine: Machine | None = None
        self._processes: dict[int, LocalProcess] = {}
        self._open: set[int] = set()  # processes whose output may still come
        self._security: dict[str, str] = {}
        self._grace = GRACE
        self._lost_after = 10.0
        self._heard_at = time.monotonic()
        self._is_stopping = False
        self._lock: socket.socket | None = None

    def run(self) -> int:
        """Serves until the launcher has gone and all processes have ended."""
        os.set_blocking(self._read_fd, False)
        self.send(b"\n" + wire.GREETING + b"\n")
        self._loop.watch(self._read_fd, READ, self._read)
        self._loop.after(wire.HEARTBEAT, self._beat)
        with Signals(self._loop, lambda number: self._stop()):
            while not self._is_stopping or self._open:
                self._loop.turn()
                if self._machine is not None:
                    self._machine.pause(len(self._outbox) > _MOST_PENDING)
        if self._machine is not None:
            self._machine.close()
        return 0

    def send(self, data: bytes) -> None:
        """Sends bytes to the launcher."""
        self._outbox.put(data)

    def tell(self, what: str, number: int, **more: Any) -> None:
        """Sends the launcher a message on a process."""
        self.send(wire.control(**{"is": what, "number": number, **more}))

    def ended(self, number: int, returncode: int) -> None:
        """A process ended."""
        assert self._machine is not None
        del self._processes[number]
        notes = run_record.read_all(self._machine.directory)
        self.tell("ended", number, code=returncode, notes=notes)

    def drained(self, number: int) -> None:
        """All of its output was sent."""
        self._open.discard(number)
        self.tell("drained", number)

    # Messages of the launcher.

    def _read(self) -> None:
        try:
            data = os.read(self._read_fd, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._stop()
            return
        self._heard_at = time.monotonic()
        try:
            for message in self._lines.feed(data):
                self._obey(message)
        except (wire.WireFormatError, KeyError, TypeError) as error:
            self._fail(f"the agent does not understand the launcher ({error!r})")

    def _obey(self, message: Mapping[str, Any]) -> None:
        what = message["do"]
        if what == "begin":
            self._begin(message)
        elif what == "start" and not self._is_stopping:
            self._start(message)
        elif what == "note" and self._machine is not None:
            run_record.add(self._machine.directory, message["notes"])
        elif what in ("terminate", "kill"):
            process = self._processes.get(message["number"])
            if process is not None:  # else it has ended, and the launcher is being told
                process.terminate() if what == "terminate" else process.kill()

    def _begin(self, message: Mapping[str, Any]) -> None:
        self._grace, self._lost_after = message["grace"], message["lost_after"]
        if not self._take_lock(message["job"]):
            self._fail("an earlier agent of this job has not ended its processes yet")
            return
        self._machine = Machine(self._loop)
        self._security = write_token(message["token"], self._machine.directory)
        # "CLIENT PORT SERVER PORT", as sshd saw them: addresses that have been shown to work.
        connection = os.environ.get("SSH_CONNECTION", "").split()
        self.send(
            wire.control(
                **{"is": "up", "cores": available_cores(), "gpus": visible_gpus()},
                launcher=connection[0] if len(connection) == 4 else None,
                host=connection[2] if len(connection) == 4 else None,
            )
        )

    def _take_lock(self, job: str) -> bool:
        """Waits for the end of an agent that lost its launcher: its processes must be gone first.

        The lock is an abstract socket, which goes with its process and leaves no file.
        """
        lock = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while True:
            try:
                lock.bind(f"\0moolink-agent-{os.getuid()}-{job}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    lock.close()
                    return False
                time.sleep(_LOCK_PAUSE)
                continue
            self._lock = lock
            return True

    def _start(self, message: Mapping[str, Any]) -> None:
        assert self._machine is not None
        number = message["number"]
        task = Task(message["command"], message["defaults"], message["environment"])
        own = {run_record.DIRECTORY: self._machine.directory, **self._security}
        forward = _Forward(self, number)
        try:
            process = self._machine.start(
                task.command, task.variables(own), forward, announces=message["announces"]
            )
        except OSError as error:
            self.tell("refused", number, why=str(error))
            return
        self._processes[number] = process
        self._open.add(number)
        self.tell("started", number, pid=process.pid)

    # The end.

    def _beat(self) -> None:
        if self._is_stopping:
            return
        if time.monotonic() - self._heard_at > self._lost_after:
            self._stop()
            return
        self.send(wire.control(**{"is": "alive"}))
        self._loop.after(wire.HEARTBEAT, self._beat)

    def _fail(self, why: str) -> None:
        print(f"moolink.launch.agent: {why}", file=sys.stderr, flush=True)
        self._stop()

    def _stop(self) -> None:
        """Ends all processes: the launcher has gone, or is not heard of."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._loop.unwatch(self._read_fd)
        self._outbox.stop()
        for process in self._processes.values():
            process.terminate()
        self._loop.after(self._grace, self._kill_all)

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()


def main() -> int:
    """Serves over stdin and stdout, which nothing else may use."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return Agent(read_fd, write_fd).run()


if __name__ == "__main__":
    sys.exit(main())
