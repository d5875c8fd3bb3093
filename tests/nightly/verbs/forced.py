"""A group that has nothing but RDMA, its broker included: calls, reductions, rounds.

    python -m tests.nightly.verbs.forced ADDRESS other      on one machine
    python -m tests.nightly.verbs.forced ADDRESS tells      on either, with the address
    python -m tests.nightly.verbs.forced ADDRESS both       as two processes of one machine

Prints one JSON object with what was seen by the one that tells. On two machines both need a common
token, or MOOLINK_INSECURE=1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import numpy as np

import moolink
from tests.network.member import Member, elements
from tests.network.members import BROKER_PORT
from tests.nightly.verbs.reductions import COUNT, REDUCTIONS, reduced_right
from tests.waiting import TIMEOUT, until

VERBS = ["verbs"]
NAMES = ("a", "b")
# Bytes of the arguments of calls: in a message, in several, in chunks, in a grant, in its pieces.
SIZES = (0, 1, 100, 4_096, 16_384, 70_000, 1 << 20, 4 << 20)
SMALL_CALLS = 200
ROUNDS = 4


class ForcedMember(Member):
    """A member that is reached by RDMA alone."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(f"verbs://{address}:{BROKER_PORT}", name, transports=VERBS)
        self.over = threading.Event()
        for order in ("formed", "join_training", "train", "written", "call", "reduce_all"):
            self.rpc.define(order, getattr(self, order))
        self.rpc.define("end", self.over.set)

    def call(self, peer: str) -> int:
        """Calls a member with arrays of all sizes and with many integers at once; returns how many
        answers were the right ones."""
        generator = np.random.default_rng(1)
        right = 0
        for size in SIZES:
            sent = generator.integers(0, 256, size, dtype=np.uint8)
            right += np.array_equal(self.rpc.sync(peer, "echo", sent), sent)
        calls = [self.rpc.async_(peer, "echo", number) for number in range(SMALL_CALLS)]
        return right + sum(call.result() == number for number, call in enumerate(calls))

    def reduce_all(self) -> dict[str, Any]:
        """Takes part in all of REDUCTIONS; returns what :meth:`Member.reduce` does, by name."""
        return {name: self.reduce(name, **options) for name, options in REDUCTIONS.items()}


def _trained_right(answers: list[dict[str, Any]]) -> bool:
    expected = np.zeros(8)
    for times in answers[0]["contributions"]:
        of_all = [n * elements(name, COUNT, "float32")[:8] for name, n in times.items()]
        expected += np.sum(of_all, axis=0) / sum(times.values())
    same = len({answer["digest"] for answer in answers}) == 1
    return same and np.allclose(answers[0]["head"], expected, rtol=1e-4, atol=1e-5)


def tell(address: str) -> dict[str, Any]:
    """Is the broker and the first member, and has both do all; returns what was seen."""
    with (
        moolink.Rpc("broker", transports=VERBS) as rpc,
        moolink.Broker(rpc, first=True) as broker,
    ):
        broker.listen(f"verbs://{address}:{BROKER_PORT}")
        member, other = ForcedMember(address, NAMES[0]), NAMES[1]
        with member.rpc:

            def both(order: str, *arguments: Any) -> list[Any]:
                there = member.rpc.async_(other, order, *arguments)
                return [getattr(member, order)(*arguments), there.result()]

            member.formed([*NAMES])
            both("formed", [*NAMES])
            calls = [member.call(other), member.rpc.sync(other, "call", NAMES[0])]
            reductions = both("reduce_all")
            both("join_training", COUNT, len(NAMES))
            rounds = both("train", ROUNDS)
            seen = {
                "calls": calls,
                "reductions": {
                    name: reduced_right(
                        [one[name] for one in reductions], NAMES, **REDUCTIONS[name]
                    )
                    for name in REDUCTIONS
                },
                "rounds": [len(one["contributions"]) for one in rounds],
                "trained": _trained_right(rounds),
                "written": both("written"),
            }
            member.rpc.sync(other, "end")
            until(lambda: not member.rpc.explain(other)["connected"], "the other one to end")
    return seen


def be_other(address: str) -> None:
    """Does what the first one tells, until that is all."""
    member = ForcedMember(address, NAMES[1])
    with member.rpc:
        member.over.wait()


def main(address: str, what: str) -> None:
    """Is one of the two, or both."""
    if what == "other":
        return be_other(address)
    if what == "tells":
        return print(json.dumps(tell(address)), flush=True)
    command = [sys.executable, "-m", "tests.nightly.verbs.forced", address, "other"]
    with subprocess.Popen(command) as other:
        try:
            print(json.dumps(tell(address)), flush=True)
            assert other.wait(TIMEOUT) == 0
        finally:
            other.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
