"""Bytes made to break a server: greetings at random and bent, silence, slowness, lying lengths.

Each attack returns when the server has done with it: it has closed every connection.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import moolink
from tests.mutation import bent

HEADER = struct.Struct("<BBHIQQI")  # of a frame, before its checksum
AT_ONCE = 16  # connections of an attack
TIMEOUT = 60.0  # seconds after which a server that does not close a connection counts as stuck

Connect = Callable[[], socket.socket]


def crc32c(data: bytes) -> int:
    """The checksum of frames' headers."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def frame(kind: int, control: bytes, length: int | None = None, flags: int = 0) -> bytes:
    """A frame with a right checksum, whatever else it says."""
    length = len(control) if length is None else length
    header = HEADER.pack(kind, flags, 0, length, 0, 0, min(length, len(control)))
    return header + struct.pack("<I", crc32c(header)) + control


def seal(stream: bytes) -> bytes:
    """The same bytes with the right checksum of a first frame's header."""
    if len(stream) < 32:
        return stream
    return stream[:28] + struct.pack("<I", crc32c(stream[:28])) + stream[32:]


def to_tcp(port: int) -> Connect:
    """How to reach a server's port."""
    return lambda: socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)


def to_unix(name: str) -> Connect:
    """How to reach a server's Unix socket."""

    def connect() -> socket.socket:
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unix.connect(name)  # waits for room in the backlog, as no socket with a time-out does
        unix.settimeout(TIMEOUT)
        return unix

    return connect


def gone(connection: socket.socket) -> None:
    """Waits until the server has closed a connection, whatever it says before."""
    with connection, suppress(ConnectionError):
        while connection.recv(65536):
            pass


def say(connect: Connect, words: bytes, descriptors: Sequence[int] = ()) -> socket.socket:
    """Sends something to a new connection and says no more; it is to be gone() soon."""
    connection = connect()
    with suppress(ConnectionError):
        if descriptors:
            socket.send_fds(connection, [words], descriptors)
        elif words:
            connection.sendall(words)
        connection.shutdown(socket.SHUT_WR)
    return connection


def say_all(connect: Connect, sayings: Iterable[tuple[bytes, Sequence[int]]]) -> None:
    """Says each to a connection of its own, a few at a time, and waits for their ends."""
    left = iter(sayings)
    while batch := list(itertools.islice(left, AT_ONCE)):
        for connection in [say(connect, *saying) for saying in batch]:
            gone(connection)


@contextmanager
def _listener(unix: bool) -> Iterator[tuple[socket.socket, str]]:
    if unix:
        name = f"moolink-recorder-{random.randrange(1 << 40)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + name)
            listener.listen()
            yield listener, f"shm:///{name}"
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def recorded_greeting(unix: bool) -> Iterator[tuple[bytes, list[int]]]:
    """What a peer says first to whom it dials, with the descriptors that it passes."""
    with (
        _listener(unix) as (listener, address),
        moolink.Rpc("recorded", transports=["shm" if unix else "tcp"]) as rpc,
    ):
        rpc.connect(address)
        listener.settimeout(TIMEOUT)
        with listener.accept()[0] as connection:
            connection.settimeout(TIMEOUT)
            if unix:
                words, descriptors, _, _ = socket.recv_fds(connection, 65536, 16)
            else:
                words, descriptors = connection.recv(65536), []
            try:
                yield words, descriptors
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)


def random_greetings(connect: Connect, count: int, seed: int = 1) -> None:
    """Connections that say anything."""
    dice = random.Random(seed)

    def words() -> bytes:
        any_bytes = dice.randbytes(dice.randrange(1, 2000))
        return seal(any_bytes) if dice.random() < 0.5 else any_bytes

    say_all(connect, ((words(), ()) for _ in range(count)))


def bent_greetings(connect: Connect, count: int, unix: bool, seed: int = 2) -> None:
    """Connections that begin as peers do, but for some bits, a length or the end."""
    dice = random.Random(seed)

    def greeting(good: bytes) -> bytes:
        words = bytearray(bent(good, dice))
        if len(words) >= 8 and dice.random() < 0.4:  # a frame's length
            struct.pack_into("<I", words, 4, dice.choice((0, 1, len(good), 1 << 31)))
        return seal(bytes(words)) if dice.random() < 0.8 else bytes(words)

    with recorded_greeting(unix) as (good, descriptors):
        some = (descriptors[: dice.randrange(len(descriptors) + 1)] for _ in range(count))
        say_all(connect, ((greeting(good), passed) for passed in some))


def idle_connections(connect: Connect, count: int) -> None:
    """Connections that say nothing, all at once."""
    with _all_closed() as connections:
        for _ in range(count):
            with suppress(ConnectionError):
                connections.append(connect())


def unfinished_handshakes(connect: Connect, count: int) -> None:
    """Handshakes of TLS whose first message is said to go on after its record, all at once."""
    with _all_closed() as connections:
        for _ in range(count):
            connection = connect()
            with suppress(ConnectionError):
                connection.sendall(b"\x16\x03\x01\x00\x28\x01\x01\xff\xb8" + bytes(36))
            connections.append(connection)


def slow_loris(connect: Connect, count: int, unix: bool) -> None:
    """Connections that say a greeting a byte at a time, for as long as they are heard."""
    with recorded_greeting(unix) as (good, _):
        left = [connect() for _ in range(count)]
        for byte in good:
            left = [connection for connection in left if not _has_ended(connection)]
            if not left:
                return
            for connection in left:
                with suppress(ConnectionError):
                    connection.send(bytes([byte]))
            # The next byte a second later, or as soon as the server has had enough of one.
            ended = select.poll()
            for connection in left:
                ended.register(connection, select.POLLIN)
            ended.poll(1000)
        for connection in left:
            gone(connection)


def lying_lengths(connect: Connect) -> None:
    """Lengths and counts as large as numbers can be."""
    huge = b"\xff" * 9 + b"\x01"  # 2^64 - 1, as a number is written
    greeting = b"\xeb\xdc\xb1\xeb\x06" + b"\x01\x01\x00" + b"\x05\x06"  # magic, versions, instance
    lies = (
        frame(1, b"", length=0xFFFFFFFF),
        frame(1, b"x" * 100, length=16 << 20),
        frame(4, b"", length=0xFFFFFFFF),
        frame(1, greeting + huge + b"name"),
        frame(1, greeting + b"\x04name\x01\x01\x00\x01" + huge),
        frame(2, greeting + huge),
        frame(3, b"\x01" + huge),
    )
    say_all(connect, ((words, ()) for words in lies))


# What can be done to a path; the second argument: whether it is the Unix socket.
ATTACKS: dict[str, Callable[[Connect, bool], None]] = {
    "1,000 random greetings": lambda connect, _: random_greetings(connect, 1000),
    "1,000 malformed greetings": lambda connect, unix: bent_greetings(connect, 1000, unix),
    "2,000 idle connections": lambda connect, _: idle_connections(connect, 2000),
    "256 unfinished handshakes": lambda connect, _: unfinished_handshakes(connect, 256),
    "200 slow connections": lambda connect, unix: slow_loris(connect, 200, unix),
    "false lengths": lambda connect, _: lying_lengths(connect),
}


@contextmanager
def _all_closed() -> Iterator[list[socket.socket]]:
    connections: list[socket.socket] = []
    yield connections
    for connection in connections:
        gone(connection)


def _has_ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    connection.close()
    return True
