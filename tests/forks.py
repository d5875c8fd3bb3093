"""Children of os.fork, in tests."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from tests import waiting


def start(run: Callable[[], None]) -> int:
    """Forks a child that runs `run`; its exit status is 0 unless that raises. Returns its pid."""
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        run()
        status = 0
    except BaseException:  # noqa: BLE001 - the exit status tells
        traceback.print_exc()
        sys.stderr.flush()
        status = 1
    os._exit(status)


def exit_status(pid: int) -> int:
    """Waits for the end of a child; it is negative if a signal ended it."""
    status = []

    def has_ended() -> bool:
        ended, how = os.waitpid(pid, os.WNOHANG)
        if ended:
            status.append(os.waitstatus_to_exitcode(how))
        return bool(ended)

    waiting.until(has_ended, f"the end of the child {pid}", poll=0.002)
    return status[0]


class Event:
    """Something that one process tells the other, once."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def set(self) -> None:
        """Called in one of the processes."""
        os.write(self._write, b"!")

    def wait(self) -> None:
        """Called in the other one."""
        assert os.read(self._read, 1) == b"!"

    def close(self) -> None:
        """Both ends, in this process."""
        os.close(self._read)
        os.close(self._write)
