"""Peers in processes of their own that keep to the protocol, and then lie in one number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

import moolink
from tests.faults.liar import lying, program
from tests.waiting import until

HUGE = 2**64 - 64
BEYOND = 2**40  # bytes: more than any segment here has
LARGE, SMALL = 5_000_000, 50_000  # float64: by a grant, in a frame

# A client that sends arrays to "honest", until that lets it down.
CLIENT = """
    import sys, numpy as np, moolink
    kind, count = sys.argv[2], int(sys.argv[3])
    rpc = moolink.Rpc("liar", timeout=2, transports=sys.argv[4].split(","))
    rpc.connect(sys.argv[1])
    rpc.sync("honest", "hello")
    if "shm" in sys.argv[4]:
        while rpc.explain("honest")["path"] != "shm":
            pass
    array = moolink.empty(count) if kind == "lent" else np.empty(count)
    array[:] = 1
    print("ready", flush=True)
    for _ in range(3):
        try:
            rpc.sync("honest", "total", moolink.lend(array) if kind == "lent" else array)
            print("answered", flush=True)
        except moolink.Error as e:
            print(type(e).__name__, flush=True)
    """

# A server that is sent arrays by "honest".
SERVER = """
    import sys, moolink
    rpc = moolink.Rpc("liar", transports=sys.argv[1].split(","))
    rpc.define("total", lambda array: float(array.sum()))
    print(rpc.listen("127.0.0.1:0")[0], flush=True)
    sys.stdin.read()
    """


class Honest:
    """A peer, a friend of it, and the sums of the arrays of ones that came."""

    def __init__(self, rpc: moolink.Rpc, friend: moolink.Rpc) -> None:
        self.rpc, self.friend = rpc, friend
        self.sums: list[float] = []
        rpc.define("total", self.total)
        rpc.define("hello", lambda: None)
        self.address = rpc.listen("127.0.0.1:0")[0]
        friend.connect(self.address)
        self.serves_its_friend()

    def total(self, array: np.ndarray) -> float:
        self.sums.append(float(array.sum()))
        return self.sums[-1]

    def serves_its_friend(self) -> None:
        assert self.friend.sync("honest", "total", np.ones(7)) == 7


@pytest.fixture
def honest() -> Iterator[Honest]:
    with moolink.Rpc("honest", timeout=20) as rpc, moolink.Rpc("friend", timeout=20) as friend:
        yield Honest(rpc, friend)


@pytest.mark.parametrize(
    ("lie", "kind", "count", "transports"),
    [
        (f"loan.segment={HUGE}", "lent", LARGE, "shm,tcp"),
        ("loan.segment=77", "lent", LARGE, "shm,tcp"),
        (f"loan.offset={HUGE}", "lent", LARGE, "shm,tcp"),
        (f"loan.offset={BEYOND}", "lent", LARGE, "shm,tcp"),
        (f"loan.bytes={HUGE}", "lent", LARGE, "shm,tcp"),
        (f"loan.bytes={BEYOND}", "lent", LARGE, "shm,tcp"),
        ("loan.part=9", "lent", LARGE, "shm,tcp"),
        (f"placed.grant={HUGE}", "own", LARGE, "shm,tcp"),
        ("placed.grant=1", "own", LARGE, "shm,tcp"),
        (f"placed.bytes={BEYOND}", "own", LARGE, "shm,tcp"),
        (f"wanted.bytes={HUGE}", "own", LARGE, "shm,tcp"),
        (f"want.bytes={BEYOND}", "own", LARGE, "shm,tcp"),
        ("want.part=9", "own", LARGE, "shm,tcp"),
        ("done.grant=77", "own", LARGE, "shm,tcp"),
        (f"inline.bytes={HUGE}", "own", SMALL, "shm,tcp"),
        (f"inline.bytes={BEYOND}", "own", SMALL, "tcp"),
        (f"stream.bytes={HUGE}", "own", LARGE, "tcp"),
        ("stream.bytes=8", "own", LARGE, "tcp"),
        ("part.align=3", "own", LARGE, "tcp"),
        (f"part.align={2**31}", "own", LARGE, "tcp"),
        (f"chunk.offset={HUGE}", "own", LARGE, "tcp"),
        (f"chunk.offset={BEYOND}", "own", LARGE, "tcp"),
        (f"chunk.bytes={BEYOND}", "own", LARGE, "tcp"),
        ("chunk.part=9", "own", LARGE, "tcp"),
        (f"message.lane_prev={HUGE}", "own", SMALL, "tcp"),
    ],
)
def test_a_client_that_lies_harms_nobody(
    honest: Honest, lie: str, kind: str, count: int, transports: str
) -> None:
    client = program(CLIENT, honest.address, kind, str(count), transports)
    with lying(lie, client) as liar:
        assert liar.next_line() == "ready"
        while liar.runs():
            honest.serves_its_friend()
        outcomes = [liar.next_line() for _ in range(3)]
    assert set(outcomes) <= {"PeerLost", "TimeoutError", "WireError", "answered"}
    # A call may have got through on another path: then it brought what was sent.
    assert set(honest.sums) - {7.0} <= {float(count)}
    until(lambda: not honest.rpc.explain("liar")["connected"], "the end of the connection")
    honest.serves_its_friend()


@pytest.mark.parametrize(
    "lie",
    [
        f"grant.segment={HUGE}",
        "grant.segment=77",
        f"grant.offset={HUGE}",
        f"grant.offset={BEYOND}",
        f"grant.bytes={HUGE}",
        "grant.bytes=8",
        "grant.seq=123456",
    ],
)
def test_a_server_that_lies_of_its_memory_harms_nobody(honest: Honest, lie: str) -> None:
    with lying(lie, program(SERVER, "shm,tcp")) as liar:
        honest.rpc.connect(liar.next_line())
        until(lambda: honest.rpc.explain("liar").get("path") == "shm", "the shared memory path")
        for _ in range(3):
            with contextlib.suppress(moolink.PeerLost):  # it is found out
                assert honest.rpc.sync("liar", "total", np.ones(LARGE)) == LARGE
            honest.serves_its_friend()


@pytest.mark.parametrize("lie", [f"found.instance={HUGE}", "found.addresses=100000"])
def test_who_lies_about_where_a_peer_is_keeps_nobody_from_it(lie: str) -> None:
    with (
        lying(lie, program(SERVER, "tcp")) as liar,
        moolink.Rpc("seeker", timeout=2) as seeker,
        moolink.Rpc("sought") as sought,
    ):
        sought.define("double", lambda x: 2 * x)
        address = sought.listen("127.0.0.1:0")[0]
        acquaintance = liar.next_line()
        seeker.connect(acquaintance)
        sought.connect(acquaintance)
        with contextlib.suppress(TimeoutError):  # it may look in vain
            assert seeker.sync("sought", "double", 2) == 4
        seeker.connect(address)
        assert seeker.sync("sought", "double", 3) == 6
