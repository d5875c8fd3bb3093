"""The actor that runs one process of a job, on the node that Ray chooses."""

from __future__ import annotations

import os
import queue
import threading
from contextlib import closing, suppress
from typing import Any

from moolink.errors import AuthError
from moolink.launch.host import Task
from moolink.launch.local_processes import Machine
from moolink.launch.loop import READ, Loop
from moolink.launch.settings import write_token

_MOST_WAITING = 16  # pieces of output of 64 KB; the process waits while the launcher reads none


class Runner:
    """Runs a process as soon as it is made, and ends with it; Ray makes it an actor.

    Args:
        task: the task to run.
        token: the text of the job's token, or ``None``.
        directory: the process's working directory, if the node has it.
    """

    def __init__(self, task: Task, token: str | None, directory: str) -> None:
        self._events: queue.Queue[tuple[Any, ...]] = queue.Queue(_MOST_WAITING)
        self._read_fd, self._write_fd = os.pipe()
        self._is_over = False
        with suppress(OSError):  # the programs may lie elsewhere here, as modules do
            os.chdir(os.path.expanduser(directory))
        # Processes end with the thread that starts them, so this one lives as long as they do.
        threading.Thread(target=self._serve, args=(task, token), daemon=True).start()

    def next(self) -> list[tuple[Any, ...]]:
        """Waits for something to tell of the process; returns names and arguments of a watcher's
        methods. The last one is ``ended``, when all output has come, or ``refused``."""
        events = [self._events.get()]
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def terminate(self) -> None:
        """Sends SIGTERM to the process."""
        os.write(self._write_fd, b"t")

    def _serve(self, task: Task, token: str | None) -> None:
        try:
            with closing(Loop()) as loop, closing(Machine(loop)) as machine:
                own = write_token(token, machine.directory)
                process = machine.start(task.command, task.variables(own), self)
                self._events.put(("started", process.pid))

                def terminate() -> None:
                    os.read(self._read_fd, 1)
                    process.terminate()

                loop.watch(self._read_fd, READ, terminate)
                while not self._is_over:
                    loop.turn()
        except (OSError, AuthError) as error:
            self._events.put(("refused", str(error)))
        else:
            self._events.put(("ended", self._returncode))

    # Events of the process.

    def output(self, stream: str, data: bytes) -> None:
        """It wrote something."""
        self._events.put(("output", stream, data))

    def announced(self, text: str) -> None:
        """Peers announce nothing."""

    def ended(self, returncode: int) -> None:
        """It ended."""
        self._returncode = returncode

    def drained(self) -> None:
        """Nothing more comes from it."""
        self._is_over = True
