"""Members on two machines with one wire between them: what its losses and their ends do."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import pytest

from tests.nightly.verbs.conftest import ADDRESS_OF_A, TIMEOUT, InRdma, told
from tests.nightly.verbs.two_machines import SHORT, SILENCE

pytestmark = pytest.mark.timeout(TIMEOUT)


def _seen(on_two_machines: InRdma, what: str, names: str = "b") -> dict[str, Any]:
    program = f"{shlex.quote(sys.executable)} -m tests.nightly.verbs.two_machines {ADDRESS_OF_A}"
    done = on_two_machines(
        f"{program} {what}",
        "; ".join(f"{program} other {name}" for name in names),
        MOOLINK_INSECURE="1",  # a token that each machine made for itself would not fit
        MOOLINK_TEST_TIMEOUT="100",
    )
    return told(done, "[a] ")


def test_lost_packets_lose_nothing_and_run_nothing_twice(on_two_machines: InRdma) -> None:
    seen = _seen(on_two_machines, "lossy")
    if seen["failed"] and seen["standstill"] > SILENCE - SHORT:
        pytest.skip(f"an emulated machine stood still for {seen['standstill']:.1f} s")
    assert seen["failed"] == []
    assert seen["ran"] == seen["calls"]
    assert seen["most_often"] == 1
    assert seen["reductions"][0] == seen["reductions"][1] > 0
    assert seen["written"]["verbs"] > 0


def test_members_that_were_parted_for_long_meet_again(on_two_machines: InRdma) -> None:
    seen = _seen(on_two_machines, "parted")
    assert len(seen["failed"]) > 0
    assert all("was lost" in text for text in seen["failed"])
    assert seen["most_often"] == 1
    # What was on its way may have been run, and the answer lost.
    assert seen["calls"] <= seen["ran"] <= seen["calls"] + len(seen["failed"])
    assert seen["sums"] == [2, 2]


@pytest.mark.parametrize(("what", "names", "sums"), [("killed", "bc", [2, 2]), ("reset", "b", [1])])
def test_what_was_on_its_way_to_one_that_is_gone_ends(
    on_two_machines: InRdma, what: str, names: str, sums: list[int]
) -> None:
    seen = _seen(on_two_machines, what, names)
    assert seen["count"] == 4
    assert {error for error, _ in seen["ended"]} == {"PeerLost", "GroupChanged"}
    assert seen["sums"] == sums
