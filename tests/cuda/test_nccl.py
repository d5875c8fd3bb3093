"""Sums of CUDA tensors by NCCL in an elastic group; tests/group has the same tests with gloo."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.group.sum_processes import Member, by_communicator
from tests.waiting import until

StartMember = Callable[[int], Member]


@pytest.fixture
def start(torch: Any, broker_address: str, tmp_path: Path) -> Iterator[StartMember]:
    """Returns a function that starts a member on the device of that number."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    started: list[Member] = []

    def start_(device: int) -> Member:
        name = f"member {len(started)}"
        started.append(Member(name, broker_address, tmp_path, device=f"cuda:{device}"))
        return started[-1]

    yield start_
    for member in started:
        member.process.kill()
        member.process.wait()


def require_two_devices(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a device for each member, and this host has one")


def test_members_sum_by_nccl(torch: Any, start: StartMember) -> None:
    require_two_devices(torch)
    members = [start(0), start(1)]
    by_communicator(members)
    assert all(member.has_right_results() for member in members)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_dies_or_stops_does_not_hold_up_the_others(
    torch: Any, start: StartMember, number: signal.Signals
) -> None:
    require_two_devices(torch)
    members = [start(0), start(1)]
    by_communicator(members)
    gone = members.pop()
    gone.process.send_signal(number)
    since = len(members[0].results())
    until(lambda: [1, 1] in [x[:2] for x in members[0].results()[since:]], "sums of one member")
    gone.process.kill()
    members.append(start(1))
    by_communicator(members)
    assert all(member.has_right_results() for member in [*members, gone])


def test_members_that_share_a_device_sum_as_without_nccl(torch: Any, start: StartMember) -> None:
    members = [start(0), start(0)]

    def summed() -> bool:
        assert all(member.process.poll() is None for member in members)
        return all(sum(count == 2 for count, *_ in member.results()) > 20 for member in members)

    until(summed, "twenty sums")
    assert all(member.has_right_results() for member in members)
