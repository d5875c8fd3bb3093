"""Processes that a test starts, and that end with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import TIMEOUT

ROOT = Path(__file__).resolve().parents[1]


def start_python(*arguments: object) -> subprocess.Popen[str]:
    """Python with these arguments, in the project's folder; its streams are the test's to use."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@contextmanager
def killed_at_the_end() -> Iterator[list[subprocess.Popen[str]]]:
    """A list for processes; those that have not ended by the end are killed."""
    processes: list[subprocess.Popen[str]] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def kill(pid: int) -> None:
    """Kills a process that may have ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kills the processes of a group, if any are left."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def wait_until_gone(pids: Iterable[int]) -> None:
    """Waits until these processes have ended, whichever process has started them."""
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            ready, _, _ = select.select([descriptor], [], [], TIMEOUT)
            os.close(descriptor)
            assert ready, f"process {pid} survived"
