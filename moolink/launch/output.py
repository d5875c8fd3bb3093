"""Output of several peers on one screen: whole lines, each with its peer's prefix."""

from __future__ import annotations

import collections
import os
import re
import shutil
from typing import BinaryIO

# Colours are kept. Other control characters become "?": they come from a remote program, and the
# user's terminal might obey them.
_CONTROL = re.compile(rb"(\x1b\[[0-9;:]*m)|[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
_CLEAR_LINE = b"\r\x1b[K"
_MAX_LINE = 64 * 1024
_TAIL_LINES = 200


class Screen:
    """Where the lines go: the launcher's stdout and stderr.

    On a terminal, one live line at the bottom shows the newest progress update (text that a peer
    ended with a carriage return); elsewhere updates are dropped and only finished lines remain.
    """

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._terminal = stdout if stdout.isatty() else None
        self._live = b""

    @property
    def is_terminal(self) -> bool:
        return self._terminal is not None

    def line(self, stream: str, text: bytes) -> None:
        """Writes one finished line (without its newline) to "stdout" or "stderr"."""
        self._clear_live()
        to = self._streams[stream]
        self._write(to, (_harmless(text) if to.isatty() else text) + b"\n")
        self._draw_live()

    def update(self, text: bytes) -> None:
        """Shows `text` as the live line; an empty one removes it."""
        self._clear_live()
        self._live = _harmless(text)
        self._draw_live()

    def _clear_live(self) -> None:
        if self._terminal is not None and self._live:
            self._write(self._terminal, _CLEAR_LINE)

    def _draw_live(self) -> None:
        if self._terminal is not None and self._live:
            columns = shutil.get_terminal_size().columns
            self._write(self._terminal, self._live[: columns - 1])

    @staticmethod
    def _write(stream: BinaryIO, data: bytes) -> None:
        # A reader that went away (moolink run ... | head) must not stop the job's clean-up.
        try:
            stream.write(data)
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class PrefixedStream:
    """Cuts one stream of a peer into lines and puts them, prefixed, on the screen."""

    def __init__(self, screen: Screen, stream: str, prefix: bytes) -> None:
        self._screen = screen
        self._stream = stream
        self._prefix = prefix
        self._pending = b""
        self._live = b""
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes the peer wrote."""
        *lines, rest = (self._pending + data).split(b"\n")
        for line in lines:
            self._finish(line)
        *updates, unfinished = rest.split(b"\r")
        newest = _last_text(updates)
        if newest:
            # Kept, because "\n" may still follow and make this update the finished line.
            rest = newest + b"\r" + unfinished
            if newest != self._live:
                self._live = newest
                self._screen.update(self._prefix + newest)
        self._pending = rest
        if len(self._pending) > _MAX_LINE:
            self.close()

    def close(self) -> None:
        """Writes the peer's unfinished line as a line of its own."""
        pending, self._pending = self._pending, b""
        if pending:
            self._finish(pending)

    def _finish(self, line: bytes) -> None:
        text = _last_text(line.split(b"\r"))
        if self._live:
            self._live = b""
            self._screen.update(b"")
        self.tail.append(text)
        self._screen.line(self._stream, self._prefix + text)


def _harmless(text: bytes) -> bytes:
    return _CONTROL.sub(lambda found: found[1] or b"?", text)


def _last_text(parts: list[bytes]) -> bytes:
    """Returns the text on a terminal after `parts` overwrote each other: the last non-empty one."""
    return next((part for part in reversed(parts) if part), b"")
