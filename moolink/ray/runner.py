"""The actor that runs one process of a job, on whatever node Ray gives it."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from pathlib import Path
from typing import Any

from moolink.internal import tokens
from moolink.launch.host import Task
from moolink.launch.loop import READ, Loop
from moolink.launch.machine import Machine

_MOST_WAITING = 256  # pieces of output; the process waits while the launcher reads none


class Runner:
    """Runs a process as soon as it is made, and ends with it; Ray makes it an actor.

    Args:
        task: what is run.
        token: the text of the job's token, or ``None``.
        directory: the process's working directory, if the node has it.
    """

    def __init__(self, task: Task, token: str | None, directory: str) -> None:
        self._events: queue.Queue[tuple[Any, ...]] = queue.Queue(_MOST_WAITING)
        self._read_fd, self._write_fd = os.pipe()
        self._is_over = False
        with contextlib.suppress(OSError):  # the programs may lie elsewhere here, as modules do
            os.chdir(directory)
        # Processes end with the thread that starts them, so this one lives as long as they do.
        threading.Thread(target=self._serve, args=(task, token), daemon=True).start()

    def next(self) -> list[tuple[Any, ...]]:
        """Waits for something to tell of the process; returns names and arguments of a watcher's
        methods. The last one is ``drained``, or ``refused``."""
        events = [self._events.get()]
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def terminate(self) -> None:
        """Sends SIGTERM to the process."""
        os.write(self._write_fd, b"t")

    def _serve(self, task: Task, token: str | None) -> None:
        loop = Loop()
        machine = Machine(loop)
        try:
            own = {}
            if token is not None:
                path = Path(machine.directory) / "token"
                path.touch(0o600)
                path.write_text(token, encoding="utf-8")
                own[tokens.FILE_VARIABLE] = str(path)
            process = machine.start(task.command, task.variables(own), self)
        except OSError as error:
            self._events.put(("refused", str(error)))
        else:
            self._events.put(("started", process.pid))

            def terminate() -> None:
                os.read(self._read_fd, 1)
                process.terminate()

            loop.watch(self._read_fd, READ, terminate)
            while not self._is_over:
                loop.turn()
            self._events.put(("drained",))
        machine.close()
        loop.close()

    # What the machine tells of the process.

    def output(self, stream: str, data: bytes) -> None:
        """It wrote something."""
        self._events.put(("output", stream, data))

    def announced(self, text: str) -> None:
        """Peers announce nothing."""

    def ended(self, returncode: int) -> None:
        """It ended."""
        self._events.put(("ended", returncode))

    def drained(self) -> None:
        """Nothing more comes from it."""
        self._is_over = True
