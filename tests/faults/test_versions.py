"""Peers of other versions of the protocol (MOOLINK_LIE): see docs/compatibility.md."""

from __future__ import annotations

import numpy as np
import pytest

import moolink
from tests.faults.liar import lying, program

# A member that greets as a later version does, and takes part in a call and all-reduces.
MEMBER = """
    import sys, numpy as np, moolink
    with moolink.Rpc("other", timeout=20) as rpc, moolink.Group(rpc, "mixed") as group:
        rpc.define("double", lambda x: 2 * x)
        rpc.connect(sys.argv[1])
        group.wait_for_members(3, 20)
        for turn in range(3):
            total = group.all_reduce(f"sum {turn}", np.full(1000, 1.0)).result(20)
            assert (total == 6).all()
        print(rpc.sync("first", "double", 21), flush=True)
        sys.stdin.read()
    """

# A broker that greets so.
BROKER = """
    import sys, moolink
    with moolink.Broker(first=True) as broker:
        print(broker.listen("127.0.0.1:0")[0], flush=True)
        sys.stdin.read()
    """

CALLER = """
    import sys, moolink
    with moolink.Rpc("other", timeout=20) as rpc:
        rpc.connect(sys.argv[1])
        try:
            rpc.sync("server", "double", 1)
        except moolink.Error as error:
            print(error, flush=True)
        sys.stdin.read()
    """


def _take_part(address: str) -> None:
    with (
        moolink.Rpc("first", timeout=20) as first,
        moolink.Rpc("second", timeout=20) as second,
        moolink.Group(first, "mixed") as of_first,
        moolink.Group(second, "mixed") as of_second,
    ):
        for rpc in (first, second):
            rpc.define("double", lambda x: 2 * x)
            rpc.connect(address)
        for group in (of_first, of_second):
            group.wait_for_members(3, 20)
        for turn in range(3):
            sums = [
                of_first.all_reduce(f"sum {turn}", np.full(1000, 2.0)),
                of_second.all_reduce(f"sum {turn}", np.full(1000, 3.0)),
            ]
            assert all((one.result(20) == 6).all() for one in sums)
        large = np.arange(1_000_000, dtype=np.float32)  # in grants or chunks
        assert np.array_equal(first.sync("other", "double", large), 2 * large)


def test_a_member_of_the_next_version_is_in_a_group_with_this_one() -> None:
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0]
        with lying("hello.next=1", program(MEMBER, address)) as other:
            _take_part(address)
            assert other.next_line() == "42"


def test_a_broker_of_the_next_version_serves_this_one() -> None:
    with lying("hello.next=1", program(BROKER)) as broker:
        address = broker.next_line()
        with lying("hello.next=1", program(MEMBER, address)) as other:
            _take_part(address)
            assert other.next_line() == "42"


@pytest.mark.parametrize(("version", "outdated"), [(0, "other"), (9, "server")])
def test_peers_without_a_common_version_say_which_each_speaks(version: int, outdated: str) -> None:
    with moolink.Rpc("server") as server:
        server.define("double", lambda x: 2 * x)
        address = server.listen("127.0.0.1:0")[0]
        with lying(f"hello.version={version}", program(CALLER, address)) as caller:
            said = caller.next_line()
    assert f"peer 'other' speaks version {version} of the protocol" in said
    assert "peer 'server' speaks version 1 of the protocol" in said
    assert f"update moolink where peer '{outdated}' runs" in said
