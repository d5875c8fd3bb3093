"""Sums by communicators among processes that are killed at any moment or stopped."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.group.sum_processes import Member, by_communicator

pytest.importorskip("torch")  # The members' processes import it.

Start = Callable[..., Member]


@pytest.fixture
def start(broker_address: str, tmp_path: Path) -> Iterator[Start]:
    started: list[Member] = []

    def start_(name: str, moment: str = "never") -> Member:
        started.append(Member(name, broker_address, tmp_path, moment))
        return started[-1]

    yield start_
    for member in started:
        member.process.kill()
        member.process.wait()


@pytest.mark.parametrize(
    ("moment", "place"),
    [("asked", 2), ("connect", 0), ("before", 0), ("before", 2), ("after", 2)],
)
def test_a_member_may_die_at_any_step(start: Start, moment: str, place: int) -> None:
    names = ["a", "b", "c"]
    mortal = names.pop(place)
    first = [start(mortal, moment)] if place == 0 else []
    others = [start(name) for name in names]
    dying = first[0] if first else start(mortal, moment)
    assert dying.process.wait(60) == -signal.SIGKILL
    by_communicator(others)
    assert all(member.has_right_results() for member in [*others, dying])


def test_a_member_that_stops_at_the_decision_holds_it_up_until_its_eviction(
    start: Start,
) -> None:
    others = [start(name) for name in ("a", "b")]
    by_communicator(others)
    start("c", "stops")
    by_communicator(others)


@pytest.mark.parametrize(
    "deaths", [3, pytest.param(40, marks=[pytest.mark.nightly, pytest.mark.timeout(1500)])]
)
def test_members_die_at_random_and_others_come(start: Start, deaths: int) -> None:
    chance = random.Random(deaths)
    members = [start(name) for name in ("a", "b", "c")]
    gone = []
    for number in range(deaths):
        by_communicator(members)
        killed = members.pop(chance.randrange(len(members)))
        time.sleep(chance.random() / 50)  # any moment of a sum
        killed.process.kill()
        gone.append(killed)
        members.append(start(f"new {number}"))
    by_communicator(members)
    assert all(member.has_right_results() for member in [*members, *gone])


def test_a_stopped_member_holds_up_the_others_until_it_is_evicted(start: Start) -> None:
    """gloo itself would wait for it for 600 s."""
    members = [start(name) for name in ("a", "b", "c")]
    by_communicator(members)
    stopped = members.pop(1)
    stopped.process.send_signal(signal.SIGSTOP)
    by_communicator(members)
    stopped.process.send_signal(signal.SIGCONT)
    members.append(stopped)
    by_communicator(members)
    assert all(member.has_right_results() for member in members)
