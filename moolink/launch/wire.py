"""Messages between a launcher and the agent on a host, over the agent's stdin and stdout.

The launcher writes one JSON object a line. The agent writes a line that says what it is, and then
frames: a kind, the number of a process, a length, and so many bytes. These are what a process
wrote, or a JSON object. Both say every second that they are alive.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

GREETING = b"moolink-agent 1"  # with the protocol's version
HEARTBEAT = 1.0  # seconds

_HEADER = struct.Struct(">cII")
_MOST = 1 << 24  # bytes of a frame, or of a line
_MOST_NOISE, _LONGEST_NOISE = 100, 1000  # lines, and bytes of one, that are kept
_STREAMS = {"stdout": b"o", "stderr": b"e"}
_NAMES = {kind: name for name, kind in _STREAMS.items()}
_CONTROL = b"c"


class WireFormatError(ValueError):
    """The other side does not keep to the protocol."""


def line(**message: Any) -> bytes:
    """A message of the launcher."""
    return json.dumps(message).encode() + b"\n"


def control(**message: Any) -> bytes:
    """A message of the agent."""
    data = json.dumps(message).encode()
    return _HEADER.pack(_CONTROL, 0, len(data)) + data


def output(number: int, stream: str, data: bytes) -> bytes:
    """Output of a process."""
    return _HEADER.pack(_STREAMS[stream], number, len(data)) + data


class Lines:
    """Cuts the launcher's output into messages."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[Mapping[str, Any]]:
        """Takes the next bytes; yields the messages that are whole."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MOST:
            raise WireFormatError("a line without an end")
        for text in lines:
            yield _object(text)


class Frames:
    """Cuts the agent's output into output of processes, and messages."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self.noise: list[bytes] = []  # lines before the greeting: of the login shell's files
        self.is_greeted = False

    def feed(self, data: bytes) -> Iterator[tuple[int, str, bytes] | Mapping[str, Any]]:
        """Takes the next bytes; yields (number, stream, bytes) or a message."""
        self._pending += data
        while not self.is_greeted:
            text, newline, rest = self._pending.partition(b"\n")
            if not newline:
                if len(text) > _MOST:
                    raise WireFormatError("a line without an end")
                return
            self._pending = rest
            self.is_greeted = text == GREETING
            if not self.is_greeted:
                self.noise.append(bytes(text[:_LONGEST_NOISE]))
                del self.noise[:-_MOST_NOISE]
        while len(self._pending) >= _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._pending)
            if length > _MOST or (kind not in _NAMES and kind != _CONTROL):
                raise WireFormatError("no frame")
            end = _HEADER.size + length
            if len(self._pending) < end:
                return
            payload = bytes(self._pending[_HEADER.size : end])
            del self._pending[:end]
            yield (number, _NAMES[kind], payload) if kind in _NAMES else _object(payload)


def check(message: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raises WireFormatError unless the message has these fields, of these types."""
    for name, kind in fields.items():
        if not isinstance(message.get(name), kind):
            raise WireFormatError(f"{name} is {message.get(name)!r:.100}")


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireFormatError("no JSON") from error
    if not isinstance(message, dict):
        raise WireFormatError("no JSON object")
    return message
