"""A peer of a soak (soak.py): does something at random, again and again, and says what it holds.

    python -m tests.soak_peer NAME BROKER SEED

Writes a line of JSON each second: calls and errors by kind, resident bytes, descriptors, threads,
mapped segments. Goes on until its standard input is closed.
"""

from __future__ import annotations

import collections
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import moolink

MAIN_GROUP = "soak"
LARGE = 1 << 18  # float64: 2 MB
PAUSE = 0.005  # seconds between two deeds, so that a soak leaves the machine to others


def held() -> dict[str, float]:
    """What this process holds of what could leak."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = [line for line in maps if "/memfd:moolink" in line]
    status = Path("/proc/self/status").read_text()
    threads = int(status.split("Threads:")[1].split()[0])
    resident = int(status.split("VmRSS:")[1].split()[0]) / 1024
    return {
        "resident_mb": resident,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threads,
        "segments": len(segments),
    }


class Peer:
    """An Rpc with something to call, a member of a group."""

    def __init__(self, name: str, broker: str, seed: int) -> None:
        self.broker = broker
        self.dice = random.Random(seed)
        self.numbers = itertools.count()
        self.rpc = moolink.Rpc(name, timeout=5)
        self.rpc.define("echo", lambda value: value)
        self.rpc.define("total", lambda array: float(array.sum()))
        self.rpc.define("slow", self._slow)
        self.rpc.define("count", self._count)
        self.rpc.listen("127.0.0.1:0")
        self.rpc.connect(broker)
        self.group = moolink.Group(self.rpc, MAIN_GROUP)
        self.group.set_timeout(5)
        self.stopping = threading.Event()
        self.done: collections.Counter[str] = collections.Counter()
        self.deeds: list[Callable[[], None]] = [
            self.small, self.small, self.large, self.lent, self.stream, self.left_stream,
            self.cancelled, self.late, self.unknown, self.reduced, self.gathered, self.side_group,
            self.short_life,
        ]  # fmt: skip

    def _slow(self) -> None:
        self.stopping.wait(0.2)

    @staticmethod
    def _count(items: int, size: int) -> Iterator[np.ndarray]:
        for number in range(items):
            yield np.full(size, number)

    def other(self) -> str:
        """The name of some peer that answers, its own if there is no other."""
        names = [p["name"] for p in self.rpc.peers() if p["connected"]]
        names = [name for name in names if not name.startswith("broker")]
        return self.dice.choice(sorted(names) or [self.rpc.get_name()])

    # --- deeds

    def small(self) -> None:
        value = {"n": next(self.numbers), "of": ["a", 1.5, None], "x": np.arange(9)}
        assert self.rpc.sync(self.other(), "echo", value)["n"] == value["n"]

    def large(self) -> None:
        size = self.dice.randrange(1, LARGE)
        assert self.rpc.sync(self.other(), "total", np.ones(size)) == size

    def lent(self) -> None:
        size = self.dice.randrange(1, LARGE)
        array = moolink.empty(size)
        array[:] = 1
        assert self.rpc.sync(self.other(), "total", moolink.lend(array)) == size

    def stream(self) -> None:
        items = list(self.rpc.stream(self.other(), "count", 20, self.dice.choice((3, 9000))))
        assert len(items) == 20

    def left_stream(self) -> None:
        for item in self.rpc.stream(self.other(), "count", 1000, 9):
            if item[0] >= 3:
                break

    def cancelled(self) -> None:
        futures = [self.rpc.async_(self.other(), "slow") for _ in range(3)]
        for future in futures:
            future.cancel()

    def late(self) -> None:
        with_time_limit = self.rpc.async_(self.other(), "slow")
        try:
            with_time_limit.result(0.01)
        except moolink.TimeoutError:
            with_time_limit.cancel()

    def unknown(self) -> None:
        self.rpc.async_(f"nobody-{next(self.numbers)}", "echo", 0).cancel()

    def reduced(self) -> None:
        if self.group.active():
            size = self.dice.choice((1, 1000, 100_000))
            # Members come to different operations, as their dice fall: most are given up.
            self._give_it(self.group.all_reduce(f"sum {size}", np.ones(size)), 0.2)

    def gathered(self) -> None:
        if self.group.active():
            self._give_it(self.group.all_gather("who", np.ones(3)), 0.2)

    def _give_it(self, future: Any, seconds: float) -> None:
        try:
            future.result(seconds)
        except moolink.TimeoutError:
            future.cancel()

    def side_group(self) -> None:
        with moolink.Group(self.rpc, f"side {self.dice.randrange(3)}") as group:
            group.set_timeout(2)
            for _ in range(5):
                group.update()
                if group.active():
                    self._give_it(group.all_reduce(f"n {next(self.numbers)}", np.ones(10)), 0.2)
                    return
                self.stopping.wait(0.02)

    def short_life(self) -> None:
        name = f"{self.rpc.get_name()} for a moment {next(self.numbers)}"
        with moolink.Rpc(name, timeout=5) as rpc:
            rpc.connect(self.broker)
            assert rpc.sync(self.rpc.get_name(), "echo", 7) == 7

    # --- life

    def run(self) -> None:
        """Until stopping is set; what a peer may hear of others' deaths is counted."""
        while not self.stopping.is_set():
            deed = self.dice.choice(self.deeds)
            self.group.update()
            try:
                deed()
                self.done[deed.__name__] += 1
            except moolink.Error as e:
                self.done[type(e).__name__] += 1
            self.stopping.wait(PAUSE)

    def report(self) -> None:
        """A line each second."""
        begun = time.monotonic()
        while not self.stopping.wait(1.0):
            gc.collect()
            line = {"at": time.monotonic() - begun, "done": dict(self.done), **held()}
            print(json.dumps(line), flush=True)

    def close(self) -> None:
        self.group.close()
        self.rpc.close()


def main() -> None:
    name, broker, seed = sys.argv[1:4]
    peer = Peer(name, broker, int(seed))
    reporter = threading.Thread(target=peer.report)
    reporter.start()
    listener = threading.Thread(target=lambda: (sys.stdin.read(), peer.stopping.set()))
    listener.start()
    try:
        peer.run()
    finally:
        peer.stopping.set()
        reporter.join()
    peer.close()


if __name__ == "__main__":
    main()
