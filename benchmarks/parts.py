"""The ways to send an array to another process of this host: in chunks, in a grant, or lent.

    python benchmarks/parts.py

A call sends an array and gets an empty reply. The table has the median time of a call. Every round
measures all ways and sizes; a turn is a few consecutive calls, of which the first is not counted.
docs/design/design.md counts the copies of each way:

chunks, tcp: over loopback, not encrypted.
chunks, shm: through the ring. Parts below 256 KB use it until a larger one has been sent.
first call: of a new peer, in new memory. The array is captured, then copied into a requested grant;
    below 256 KB it is sent in chunks.
grant asked for: without the capture, in used memory. An ordinary array is lent (`moolink.lend`);
    from 256 KB.
standing grant: a later call. The array is captured into the receiver's memory.
loan: an array of `moolink.empty` is lent. The receiver maps it.

The number of frames that a call writes shows its way: one, and one more for each chunk; three with
a requested grant; one with a standing grant or a loan. A run with other medians fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

import moolink

SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20}
SMALLEST_GRANT = 256 << 10
WAYS = ("chunks, tcp", "chunks, shm", "first call", "grant asked for", "standing grant", "loan")
CALLS = 6  # of a turn; the first is not counted

Array = np.ndarray[Any, Any]
Sample = tuple[float, int]  # seconds, frames


def serve() -> None:
    def take(array: Array) -> None:
        if array[0] != array[-1]:
            raise ValueError("wrong bytes")

    with moolink.Rpc("server", insecure=True) as rpc:
        rpc.define("take", take)
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        sys.stdin.read()


class Client:
    """A peer that calls the server over one kind of path."""

    def __init__(self, address: str, path: Literal["shm", "tcp"]) -> None:
        self._path = path
        transports = ["tcp"] if path == "tcp" else None
        self._rpc = moolink.Rpc(transports=transports, insecure=True, timeout=60)
        self._rpc.connect(address)
        deadline = time.monotonic() + 5
        small = np.zeros(1, np.uint8)
        self._rpc.sync("server", "take", small)
        while self._rpc.explain("server")["path"] != path:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {path} path: {self._rpc.explain('server')}")
            time.sleep(0.001)
        self._rpc.sync("server", "take", small)  # over this path

    def call(self, value: Any) -> Sample:
        frames = self._frames()
        begin = time.perf_counter()
        future = self._rpc.async_("server", "take", value)
        future.result()
        seconds = time.perf_counter() - begin
        future.released.result()
        return seconds, self._frames() - frames

    def turn(self, value: Callable[[], Any]) -> list[Sample]:
        return [self.call(value()) for _ in range(CALLS)][1:]

    def _frames(self) -> int:
        frames: int = self._rpc.stats()["paths"][self._path]["frames_written"]
        return frames

    def close(self) -> None:
        self._rpc.close()


class Ways:
    """Runs a turn of each way that an array of one size can take."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._tcp = Client(address, "tcp")
        self._ring = Client(address, "shm")  # never requests a grant
        self._shm = Client(address, "shm")

    def close(self) -> None:
        for client in (self._tcp, self._ring, self._shm):
            client.close()

    def turns(self, ordinary: Array, lendable: Array) -> dict[str, list[Sample]]:
        has_grants = ordinary.nbytes >= SMALLEST_GRANT
        samples = {"chunks, tcp": self._tcp.turn(lambda: ordinary)}
        if not has_grants:
            samples["chunks, shm"] = self._ring.turn(lambda: ordinary)
        samples["first call"] = [self._first(ordinary)]
        if has_grants:
            samples["grant asked for"] = self._shm.turn(lambda: moolink.lend(ordinary))
        else:  # a larger part, after which smaller ones have standing grants
            self._shm.call(np.zeros(SMALLEST_GRANT, np.uint8))
        samples["standing grant"] = self._shm.turn(lambda: ordinary)
        samples["loan"] = self._shm.turn(lambda: moolink.lend(lendable))
        return samples

    def _first(self, array: Array) -> Sample:
        client = Client(self._address, "shm")
        try:
            return client.call(array)
        finally:
            client.close()


def is_way(way: str, size: int, frames: float) -> bool:
    """Whether calls of this way write this number of frames."""
    if way in ("standing grant", "loan"):
        return frames == 1
    if way.startswith("chunks") or size < SMALLEST_GRANT:
        return frames >= 2
    return 3 <= frames <= 5  # a new peer may write one or two more


def measure(address: str, rounds: int) -> dict[str, dict[str, float]]:
    """Returns medians in microseconds, by way and size."""
    ordinary = {name: np.empty(size, np.uint8) for name, size in SIZES.items()}
    lendable = {name: moolink.empty(size, "uint8") for name, size in SIZES.items()}
    samples: dict[str, dict[str, list[Sample]]] = {}
    ways = Ways(address)
    for i in range(rounds):
        for name in SIZES:
            ordinary[name].fill(i % 256)
            lendable[name].fill(i % 256)
            for way, turn in ways.turns(ordinary[name], lendable[name]).items():
                samples.setdefault(way, {}).setdefault(name, []).extend(turn)
    ways.close()
    medians: dict[str, dict[str, float]] = {}
    for way, by_size in samples.items():
        for name, turn in by_size.items():
            frames = statistics.median(frames for _, frames in turn)
            if not is_way(way, SIZES[name], frames):
                raise RuntimeError(f"{way}, {name}: {frames:g} frames a call are of another way")
            medians.setdefault(way, {})[name] = 1e6 * statistics.median(took for took, _ in turn)
    return medians


@contextmanager
def server() -> Iterator[str]:
    """Runs a server in its own process; yields its address."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="a file for the medians in microseconds")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve()
    with server() as address:
        medians = measure(address, arguments.rounds)
    print(f"{'a call, µs':16}" + "".join(f"{name:>12}" for name in SIZES))
    for way in WAYS:
        row = medians[way]
        cells = [f"{row[name]:12.1f}" if name in row else f"{'-':>12}" for name in SIZES]
        print(f"{way:16}" + "".join(cells))
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(medians, file, indent=1)


if __name__ == "__main__":
    main()
