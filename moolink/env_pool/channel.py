"""Messages between a pool, its fork server and its workers: pickles on a pipe of our own.

These bytes never leave the processes that one program started itself; nothing here is reachable
from outside.
"""

from __future__ import annotations

import dataclasses
import pickle
import socket
import struct
from typing import Any

from moolink.env_pool.memory import PoolShape
from moolink.env_pool.spaces import Tree

_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Setup:
    """Pool to server: all that a worker needs to make its environments.

    Attributes:
        create_env: pickle of the user's function.
        main: `multiprocessing.spawn`'s preparation data if the pickle refers to ``__main__``.
        passes_index: whether the function takes the environment's index.
        workers, batches, batch_size: as in `PoolShape`.
        seed: the pool's seed, or None.
        recreate: whether an environment that raised is made anew (on_crash="restart").
        memory, doorbells, bells, tokens, channels: descriptors; one doorbell and one channel a
            worker, one bell and one stock of tokens a batch.
    """

    create_env: bytes
    main: dict[str, Any] | None
    passes_index: bool
    workers: int
    batches: int
    batch_size: int
    seed: int | None
    recreate: bool
    memory: int
    doorbells: list[int]
    bells: list[int]
    tokens: list[int]
    channels: list[int]


@dataclasses.dataclass(frozen=True)
class Unusable:
    """Server to pool: the user's function could not be loaded."""

    traceback: str


@dataclasses.dataclass(frozen=True)
class Start:
    """Pool to server: start worker `worker`, for the `life`-th time (0, 1, ...)."""

    worker: int
    life: int


@dataclasses.dataclass(frozen=True)
class Died:
    """Server to pool: a worker ended; `returncode` is negative for a signal, as in subprocess."""

    worker: int
    pid: int
    returncode: int


@dataclasses.dataclass(frozen=True)
class Close:
    """Pool to server: end the workers, killing those still there after `grace` s, and yourself."""

    grace: float


@dataclasses.dataclass(frozen=True)
class Making:
    """Worker to pool: it begins to make this environment."""

    pid: int
    environment: int


@dataclasses.dataclass(frozen=True)
class Made:
    """Worker to pool: the environments exist; these are their spaces (and their pickles)."""

    pid: int
    observation: Tree
    action: Tree
    spaces: bytes


@dataclasses.dataclass(frozen=True)
class Mapped:
    """Pool to worker: the segment has its size and this layout; begin to serve."""

    shape: PoolShape


@dataclasses.dataclass(frozen=True)
class Raised:
    """Worker to pool: an environment raised, and the worker has ended its work."""

    environment: int
    doing: str
    error: str
    traceback: str


@dataclasses.dataclass(frozen=True)
class Recreated:
    """Worker to pool: an environment raised and was made anew."""

    environment: int
    doing: str
    traceback: str


class Channel:
    """One end of a stream socket that carries messages."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def fileno(self) -> int:
        """Returns the socket's descriptor."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Sends one message, waiting for room if need be."""
        data = pickle.dumps(message)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """Waits for one message; raises EOFError if the other side closed."""
        while (message := self._next()) is None:
            self._read(0)
        return message

    def receive_available(self) -> list[Any]:
        """Returns the messages that have arrived, without waiting.

        Raises EOFError if there is none, nor will there be.
        """
        closed = False
        try:
            while True:
                self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # All that has arrived is read.
        except EOFError:
            closed = True
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        if closed and not messages:
            raise EOFError("the other side of the channel closed")
        return messages

    def discard_partial(self) -> None:
        """Forgets the beginning of a message whose sender died before its end."""
        self._received.clear()

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()

    def _read(self, flags: int) -> None:
        data = self._socket.recv(1 << 16, flags)
        if not data:
            raise EOFError("the other side of the channel closed")
        self._received += data

    def _next(self) -> Any:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        message = pickle.loads(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message
