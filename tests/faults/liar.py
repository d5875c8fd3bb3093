"""A process that keeps to the protocol but for one number, and is seen to lie."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator


class Liar:
    """Runs Python with `arguments`, and tells the lie `NAME=VALUE`, until kill()."""

    def __init__(self, lie: str, arguments: list[str]) -> None:
        self.lie = lie
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "MOOLINK_LIE": lie},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def runs(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """What it wrote to stderr."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode()

    def has_lied(self) -> bool:
        return f"lies about {self.lie.partition('=')[0]}\n" in self.said()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def lying(lie: str, arguments: list[str]) -> Iterator[Liar]:
    """A liar until the end of the block, which must have seen it lie."""
    liar = Liar(lie, arguments)
    try:
        yield liar
    finally:
        liar.kill()
    assert liar.has_lied(), liar.said()


def program(text: str, *arguments: str) -> list[str]:
    return ["-c", textwrap.dedent(text), *arguments]
