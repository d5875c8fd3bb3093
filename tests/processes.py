"""Processes that a test starts, and that end with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
