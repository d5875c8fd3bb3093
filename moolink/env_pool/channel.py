"""Messages between a pool, its fork server and its workers: pickles on a pipe of our own.

These bytes never leave the processes that one program started itself; nothing here is reachable
from outside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, Literal

from moolink.env_pool.memory import PoolShape
from moolink.env_pool.spaces import Tree

_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """How the workers treat their environments; the faces of the pool differ in it.

    Attributes:
        autoreset: "same" step, "next" step or "never": when an ended episode is followed by the
            next one.
        first_step_resets: whether an environment's first step resets it, whatever the action.
        infos: whether infos are sent to the pool.
        infer: whether an environment's first observation decides where it does not fit its space.
        any_space: whether spaces without a fixed layout are allowed; their values are pickled.
        compare: which part must be equal in all environments: their "spaces", or only the "layout".
        numpy_numbers: whether the action of a Discrete space is a numpy integer of its dtype, as
            in Gymnasium's vector environments, instead of a Python int.
    """

    autoreset: Literal["same", "next", "never"]
    first_step_resets: bool
    infos: bool
    infer: bool
    any_space: bool
    compare: Literal["spaces", "layout"]
    numpy_numbers: bool


@dataclasses.dataclass(frozen=True)
class Setup:
    """Pool to server: all that a worker needs to make its environments.

    Attributes:
        create_env: pickle of the user's function; empty for a server that is a fork.
        main: `multiprocessing.spawn`'s preparation data if the pickle refers to ``__main__``.
        passes_index: whether the function takes the environment's index.
        workers, batches, batch_size: as in `PoolShape`.
        seed: the pool's seed, or None.
        behaviour: how environments are treated.
        recreates: whether an environment that raised is made anew (on_crash="restart").
        memory, doorbells, bells, channels: descriptors; one doorbell and one channel a worker, one
            bell a batch.
    """

    create_env: bytes
    main: dict[str, Any] | None
    passes_index: bool
    workers: int
    batches: int
    batch_size: int
    seed: int | None
    behaviour: Behaviour
    recreates: bool
    memory: int
    doorbells: list[int]
    bells: list[int]
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
    """Worker to pool: the environments exist.

    Attributes:
        pid: of the worker.
        observation, action: the layout of their values, None where there is no fixed one.
        face: pickle of the first environment's `Face`; empty if it cannot be pickled.
        spaces: pickle of a list of (observation space, action space), one an environment, or only
            one if all are equal.
        warning: a warning for the user about the layout; empty if there is none.
        rows: how many rows each environment has, all of them vector environments; None: each is a
            single one.
    """

    pid: int
    observation: Tree | None
    action: Tree | None
    face: bytes
    spaces: bytes
    warning: str
    rows: int | None


@dataclasses.dataclass(frozen=True)
class Face:
    """The attributes that a vector environment takes over from one of its environments."""

    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any


@dataclasses.dataclass(frozen=True)
class Mapped:
    """Pool to worker: the segment has its size and this layout; begin to serve."""

    shape: PoolShape


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Pool to worker: the arguments of the next request that is no step of shared actions.

    Attributes:
        of_row: a reset's (seed, options), a step's action, or a call's arguments, for each row
            concerned; the request's other rows are left alone.
        shared: for a call, the function of `calls` and the name that it gets.
    """

    of_row: dict[int, Any]
    shared: Any


@dataclasses.dataclass
class Results:
    """Worker to pool: a request's results that have no place in shared memory, by row."""

    observations: dict[int, Any] = dataclasses.field(default_factory=dict)
    final_obs: dict[int, Any] = dataclasses.field(default_factory=dict)
    infos: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    final_infos: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    # Of vector environments, by their first rows: arrays of all their rows.
    vector_infos: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    answers: dict[int, Any] = dataclasses.field(default_factory=dict)
    errors: dict[int, Raised] = dataclasses.field(default_factory=dict)

    def add(self, other: Results) -> None:
        """Takes over the results in `other`."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).update(getattr(other, field.name))

    def take(self, rows: Iterable[int]) -> Results:
        """Removes and returns the results of `rows`."""
        taken = Results()
        for field in dataclasses.fields(self):
            ours = getattr(self, field.name)
            if ours:
                found = {row: ours.pop(row) for row in rows if row in ours}
                setattr(taken, field.name, found)
        return taken

    def __bool__(self) -> bool:
        return bool(
            self.observations
            or self.infos
            or self.final_obs
            or self.final_infos
            or self.vector_infos
            or self.answers
            or self.errors
        )


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


def encode(message: object) -> bytes:
    """Returns the bytes of one message; raises pickle's error if it cannot be pickled."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


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
        self._socket.sendall(encode(message))

    def send_encoded(self, message: bytes, full: Callable[[], bool]) -> None:
        """Sends a result of `encode`; without room it calls `full`: whether to go on."""
        unsent = memoryview(message)
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if not full():
                    return

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

    def discard_unread(self) -> None:
        """Drops the data that have arrived and were not received."""
        with contextlib.suppress(BlockingIOError, EOFError):
            while True:
                self._read(socket.MSG_DONTWAIT)
        self._received.clear()

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
