"""Two machines on one wire that is bad, or of which one goes away: calls and reductions by RDMA.

    python -m tests.nightly.verbs.two_machines ADDRESS other [NAME]             on one machine
    python -m tests.nightly.verbs.two_machines ADDRESS lossy|parted|killed|reset   on the other

ADDRESS is that of the second one, where the broker is; both need MOOLINK_VERBS=1 and a common
token, or MOOLINK_INSECURE=1 alone. The second one prints one JSON object with what was seen; its
times are in seconds. RDMA and tcp share the wire, so neither stands in for the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import moolink
from tests.network.members import BROKER_PORT
from tests.nightly.verbs.loaded_member import LoadedMember
from tests.waiting import TIMEOUT, until

INTERFACE = "eth0"
# Of each member, before and after each fault.
CALLS_BETWEEN = 8
SILENCE = 3.0  # seconds, after which a session is lost
SHORT, LONG = 1.0, 8.0  # shorter than that, and longer
LARGE = 1 << 20


def _lose(percent: float, seconds: float) -> None:
    """Loses so many of the packets that this machine sends, for so long."""
    queue = ["tc", "qdisc", "replace", "dev", INTERFACE, "root", "netem", "loss", f"{percent}%"]
    subprocess.run(queue, check=True)
    time.sleep(seconds)
    subprocess.run(["tc", "qdisc", "del", "dev", INTERFACE, "root"], check=True)


class MemberOnWire(LoadedMember):
    """A member that can be told by the other one what to do, and what to suffer."""

    def __init__(self, broker: str, name: str) -> None:
        super().__init__(broker, name)
        self.over = threading.Event()
        self._standstill = 0.0
        threading.Thread(target=self._watch_machine, daemon=True).start()
        orders = ("formed", "formed_path", "begin_load", "end_load", "loaded", "written")
        for order in (*orders, "standstill"):
            self.rpc.define(order, getattr(self, order))
        self.rpc.define("some_calls_done", lambda count: self.some_calls_done(count))
        self.rpc.define("reduce_once", self.reduce_once)
        self.rpc.define("lose", self.begin_to_lose)
        self.rpc.define("end", self.over.set)
        self.rpc.define("forever", threading.Event().wait)
        self.rpc.define("die", lambda: os.kill(os.getpid(), signal.SIGKILL))
        self.rpc.define("reset", lambda: Path("/proc/sysrq-trigger").write_text("b"))

    def _watch_machine(self) -> None:
        while True:
            begin = time.monotonic()
            time.sleep(0.05)
            self._standstill = max(self._standstill, time.monotonic() - begin)

    def standstill(self) -> float:
        """The longest time, in seconds, for which this machine ran no thread of this process."""
        return self._standstill

    def some_calls_done(self, count: int) -> float:
        """Waits until so many calls that begin from now on have ended; returns when."""
        return self.calls_done(after=time.monotonic(), count=count)

    def reduce_once(self, name: str) -> float:
        """Reduces one element of 1; returns the sum."""
        one = np.ones(1, np.float32)
        return float(self.group.all_reduce(name, one, on_change="retry").result(TIMEOUT)[0])

    def begin_to_lose(self, percent: float, seconds: float) -> None:
        """Loses packets from now on, for so long."""
        threading.Thread(target=_lose, args=(percent, seconds)).start()


class Wire:
    """The member that tells, ``a``, and what it knows of the other one."""

    def __init__(self, address: str) -> None:
        self.other = "b"
        self._broker = moolink.Broker(first=True)
        self._broker.listen(f"{address}:{BROKER_PORT}")
        self.member = MemberOnWire(f"{address}:{BROKER_PORT}", "a")
        self.together()

    def ask(self, order: str, *arguments: Any) -> Any:
        """Tells the other one to do something; returns its answer."""
        return self.member.rpc.sync(self.other, order, *arguments)

    def both(self, order: str, *arguments: Any) -> list[Any]:
        """Both do something at the same time; returns their answers."""
        there = self.member.rpc.async_(self.other, order, *arguments)
        here = getattr(self.member, order)(*arguments)
        return [here, there.result()]

    def together(self) -> None:
        """Waits until the two are a group and reach one another by RDMA."""
        self.member.formed(["a", self.other])
        until(self._answers, f"an answer of {self.other}: {self.member.rpc.explain(self.other)}")
        self.both("formed", ["a", self.other])
        self.by_rdma()

    def _answers(self) -> bool:
        try:
            return bool(self.ask("echo", 1) == 1)
        except moolink.Error:
            return False

    def by_rdma(self) -> None:
        """Waits until each reaches the other one by RDMA."""
        self.member.formed_path(self.other, "verbs")
        self.ask("formed_path", "a", "verbs")

    def lose(self, percent: float, seconds: float) -> None:
        """Loses packets both ways, for so long."""
        there = self.member.rpc.async_("b", "lose", percent, seconds)
        _lose(percent, seconds)
        with contextlib.suppress(moolink.PeerLost):  # with the session its answer may be lost
            there.result()


def lossy(wire: Wire) -> dict[str, Any]:
    """Load over a wire that loses 1 %, and for moments all."""
    wire.ask("begin_load", "a")
    wire.member.begin_load("b")
    stood_still = []
    for percent, seconds in ((1, 10), (100, SHORT), (100, SHORT)):
        wire.both("some_calls_done", CALLS_BETWEEN)
        wire.lose(percent, seconds)
        mended = time.monotonic()
        stood_still.append(round(wire.both("some_calls_done", CALLS_BETWEEN)[0] - mended, 2))
        wire.by_rdma()
    wire.ask("end_load")
    wire.member.end_load()
    loads = wire.both("loaded")
    return {
        "calls": [load["calls"] for load in loads],
        "ran": [load["ran"] for load in reversed(loads)],
        "most_often": max(load["most_often"] for load in loads),
        "reductions": [load["reductions"] for load in loads],
        "failed": [text for load in loads for text in load["failed"]],
        "written": wire.member.written(),
        "went_on_after": stood_still,
        "standstill": max(wire.both("standstill")),
    }


def parted(wire: Wire) -> dict[str, Any]:
    """Calls while the wire loses all for longer than a session is kept; and after it."""
    wire.member.begin_calls("b")
    wire.member.some_calls_done(CALLS_BETWEEN)
    wire.lose(100, LONG)
    mended = time.monotonic()
    load = wire.member.loaded()  # its calls have failed
    wire.together()
    sums = wire.both("reduce_once", "after")
    calls = [wire.ask("count", f"after {number}", np.ones(LARGE, np.uint8)) for number in range(3)]
    there = wire.ask("loaded")
    return {
        "failed": load["failed"],
        "calls": load["calls"] + len(calls),
        "ran": there["ran"],
        "most_often": there["most_often"],
        "sums": sums,
        "together_after": round(time.monotonic() - mended, 2),
    }


def _ends(what: Callable[[], Any], into: list[dict[str, Any]]) -> threading.Thread:
    """Begins something that can only fail; how it does is told."""

    def run() -> None:
        try:
            what()
        except moolink.Error as error:
            into.append({"error": type(error).__name__, "ran": error.ran, "at": time.monotonic()})

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def _has(member: MemberOnWire, name: str) -> bool:
    member.group.update()
    return name in member.group.members()


def _gone(wire: Wire, order: str) -> dict[str, Any]:
    """What was on its way to a member that goes away, and the group after it."""
    ended: list[dict[str, Any]] = []
    member = wire.member

    def call_on() -> None:
        while True:
            member.rpc.sync("b", "echo", np.ones(LARGE, np.uint8))

    alone = member.group.all_reduce("alone", 1)  # the other one never comes to it
    threads = [
        _ends(lambda: member.rpc.sync("b", "forever"), ended),
        _ends(call_on, ended),
        _ends(lambda: alone.result(TIMEOUT), ended),
    ]
    wire.ask("echo", 1)
    begin = time.monotonic()
    lost = member.rpc.async_("b", order)
    _ends(lost.result, ended).join()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    until(lambda: not _has(member, "b"), "the group to be without it")
    return {
        "ended": sorted({(one["error"], one["ran"]) for one in ended}),
        "count": len(ended),
        "lost_after": round(max(one["at"] for one in ended) - begin, 2),
    }


def killed(wire: Wire) -> dict[str, Any]:
    """The other one's process dies; another one takes its place."""
    seen = _gone(wire, "die")
    wire.other = "c"
    wire.together()
    return {**seen, "sums": wire.both("reduce_once", "after")}


def reset(wire: Wire) -> dict[str, Any]:
    """The other machine begins anew without a word."""
    seen = _gone(wire, "reset")
    return {**seen, "sums": [wire.member.reduce_once("after")]}


def be_other(address: str, name: str = "b") -> None:
    """Does what the first one tells, until that is all."""
    member = MemberOnWire(f"{address}:{BROKER_PORT}", name)
    with member.rpc:
        member.formed(["a", name])
        member.over.wait()


def main(address: str, what: str, *arguments: str) -> None:
    """Is one of the two."""
    if what == "other":
        return be_other(address, *arguments)
    wire = Wire(address)
    seen = {"lossy": lossy, "parted": parted, "killed": killed, "reset": reset}[what](wire)
    if what != "reset":
        wire.ask("end")
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
