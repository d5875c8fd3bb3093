"""What a group of many members costs, in messages: `sim_members` reports CPU time, too."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PROCESS_LIMIT

MEMBERS = 200
ROUNDS = 5
DEATHS = 20  # at once


@pytest.fixture(scope="module")
def report(simulator: Callable[[str], Path]) -> Callable[[int], dict[str, Any]]:
    """Returns a function from a bucket's elements, of 8 bytes, to what 200 members report."""

    def run(elements: int) -> dict[str, Any]:
        program = str(simulator("members"))
        arguments = ["--members", MEMBERS, "--deaths", DEATHS]
        arguments += ["--rounds", ROUNDS, "--elements", elements]
        done = subprocess.run(
            [program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
            check=True,
        )
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


def test_messages_of_a_member_do_not_grow_with_the_group(
    report: Callable[[int], dict[str, Any]],
) -> None:
    costs = report(16)
    # OFFER and HAVE of each; CUT and STABLE to each; the PORTIONs of the hosts; an announcement now
    # and then, and another HAVE of a member that applies the round after it has reported it.
    assert costs["round"]["messages"] <= 8
    assert costs["round"]["broker_sent"] == 0
    # ANNOUNCE twice and the view; FLUSH, RESUME, READY and GO, SETTINGS, and HAVE in the new epoch.
    assert costs["death"]["messages"] <= 9
    # The same, with MOVE and the snapshot's messages.
    assert costs["join"]["messages"] <= 12
    assert costs["form"]["messages"] <= 24
    # The broker tells each member of a view once, and is told every 250 ms that it lives.
    assert costs["death"]["broker_sent"] <= MEMBERS
    assert costs["join"]["broker_sent"] <= MEMBERS + 1
    assert costs["deaths"]["broker_sent"] <= MEMBERS  # one view for all
    assert costs["idle_second"]["messages"] <= 4
    assert costs["idle_second"]["broker_sent"] == 0


def test_a_large_bucket_crosses_hosts_and_no_connection_within_one(
    report: Callable[[int], dict[str, Any]],
) -> None:
    costs = report(16384)
    portions = costs["round"]["by_service"]["collective"]
    # Two chunks of 64 KB. The last host has one member, so one member of each host exchanges: a
    # chunk goes up and down a tree of hosts once.
    hosts = math.ceil((MEMBERS + 1) / 8)
    assert portions == pytest.approx(2 * 2 * (hosts - 1) / MEMBERS)
    assert costs["round"]["messages"] - portions <= 8
