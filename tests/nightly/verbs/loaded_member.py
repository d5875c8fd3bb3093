"""A member under load: calls another one and reduces with it, and counts what was run.

    python -m tests.nightly.verbs.loaded_member BROKER NAME

Takes the same orders as ``tests.network.member``, and those of :class:`LoadedMember`.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
from typing import Any

import numpy as np

import moolink
from tests.network.member import Member, serve
from tests.waiting import TIMEOUT, until

CALLERS = 2
# Bytes of the arguments of calls: in a message, in several, in chunks, in a grant.
SIZES = (10, 5_000, 70_000, 1 << 20)
REDUCED = 20_000


class LoadedMember(Member):
    """A member whose threads call and reduce until they are told to stop."""

    def __init__(self, broker: str, name: str) -> None:
        super().__init__(broker, name)
        self._ran: collections.Counter[str] = collections.Counter()
        self._calls: list[tuple[float, float]] = []  # begun, ended
        self._failed: list[str] = []
        self._reductions = 0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.rpc.define("count", self._count)

    def _count(self, call: str, value: np.ndarray) -> np.ndarray:
        self._ran[call] += 1
        return value

    def begin_load(self, peer: str) -> None:
        """Begins to call the peer and to reduce with it."""
        self.begin_calls(peer)
        self._threads.append(threading.Thread(target=self._reduce))
        self._threads[-1].start()

    def begin_calls(self, peer: str) -> None:
        """Begins to call the peer; a thread ends with its first call that fails."""
        bodies = [lambda number=number: self._call(peer, number) for number in range(CALLERS)]
        self._threads = [threading.Thread(target=body) for body in bodies]
        for thread in self._threads:
            thread.start()

    def _call(self, peer: str, caller: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            sent = np.full(SIZES[number % len(SIZES)], number % 251, np.uint8)
            begin = time.monotonic()
            try:
                got = self.rpc.sync(peer, "count", f"{self.name} {caller} {number}", sent)
            except moolink.Error as error:
                self._failed.append(f"call {number}: {error}")
                return
            self._calls.append((begin, time.monotonic()))
            if not np.array_equal(got, sent):
                self._failed.append(f"call {number}: the answer is another")

    def _reduce(self) -> None:
        for number in range(sys.maxsize):
            mine = np.full(REDUCED, number % 1000, np.int32)
            mine[0] = self._stop.is_set()
            try:
                total = self.group.all_reduce(f"load {number}", mine, on_change="retry").result(
                    TIMEOUT
                )
            except moolink.Error as error:
                self._failed.append(f"reduction {number}: {error}")
                return
            self._reductions += 1
            if not np.all(total[1:] == 2 * (number % 1000)):
                self._failed.append(f"reduction {number}: the result is another")
            if total[0] != 0:  # one of the two is to stop: both do, here
                return

    def calls_done(self, after: float, count: int = 1) -> float:
        """Waits until so many calls that began after this time have ended; returns when."""

        def ended() -> list[float]:
            return sorted(end for begin, end in self._calls[-100:] if begin > after)

        until(lambda: len(ended()) >= count, "calls to end", poll=0.001)
        return ended()[count - 1]

    def end_load(self) -> None:
        """Tells the threads to stop."""
        self._stop.set()

    def loaded(self) -> dict[str, Any]:
        """Waits for the end of the load; returns what was seen.

        Returns:
            How many calls and reductions ended, what failed, and how often this member ran each
            call: the greatest number, and how many there were.
        """
        for thread in self._threads:
            thread.join(TIMEOUT)
            if thread.is_alive():
                self._failed.append(f"{thread.name} hangs: {self.rpc.explain('a')}")
        return {
            "calls": len(self._calls),
            "reductions": self._reductions,
            "failed": self._failed,
            "ran": len(self._ran),
            "most_often": max(self._ran.values(), default=0),
        }


if __name__ == "__main__":
    serve(LoadedMember(sys.argv[1], sys.argv[2]))
