"""Collectives of processes, of which one is killed and one is stopped and goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PROCESS_LIMIT, until

MEMBER = Path(__file__).with_name("collective_member.py")


class Member:
    """A process of collective_member.py."""

    def __init__(self, name: str, broker: str, folder: Path) -> None:
        self.path = folder / name
        self.path.touch()
        self.process = subprocess.Popen([sys.executable, MEMBER, name, broker, self.path])

    def results(self) -> list[list[float]]:
        whole = self.path.read_text().rpartition("\n")[0]
        return [[float(word) for word in line.split()] for line in whole.splitlines()]

    def has_reduced_among(self, members: int, since: int) -> bool:
        """Whether its last results, at least five of them, are those of so many members."""
        recent = self.results()[since:][-5:]
        return len(recent) == 5 and all(values == [members] * 3 for values in recent)


@pytest.fixture
def members(broker_address: str, tmp_path: Path) -> Iterator[list[Member]]:
    started = [Member(name, broker_address, tmp_path) for name in ("a", "b", "c")]
    yield started
    for member in started:
        member.process.kill()
        member.process.wait()


def test_a_killed_and_a_stopped_member_spoil_no_result(members: list[Member]) -> None:
    def all_reduce_among(count: int, which: list[Member]) -> None:
        since = {member: len(member.results()) for member in which}

        def reached() -> bool:
            assert all(member.process.poll() is None for member in which)
            return all(member.has_reduced_among(count, since[member]) for member in which)

        until(reached, f"{count} members to reduce together")

    first, second, third = members
    all_reduce_among(3, members)
    third.process.kill()
    all_reduce_among(2, [first, second])
    second.process.send_signal(signal.SIGSTOP)
    all_reduce_among(1, [first])
    second.process.send_signal(signal.SIGCONT)
    all_reduce_among(2, [first, second])
    for member in members:
        for _, smallest, largest in member.results():
            assert smallest == largest, "a result is of one operation"
            assert smallest in (1, 2, 3)


def test_members_that_end_after_an_operation_fail_nobody(broker_address: str) -> None:
    program = """
        import sys, moolink, numpy as np
        rpc = moolink.Rpc(sys.argv[1])
        rpc.connect(sys.argv[2])
        group = moolink.Group(rpc, sys.argv[3])
        group.wait_for_members(3)
        group.all_reduce("x", np.ones(200_000, np.float32)).result(20)
        group.barrier("end").result(20)
        if len(sys.argv) > 4:
            group.close()
    """
    for attempt in range(4):  # every other time they end without a word
        command = [sys.executable, "-c", textwrap.dedent(program)]
        arguments = [broker_address, f"group-{attempt}", *(["close"] if attempt % 2 else [])]
        members = [subprocess.Popen([*command, name, *arguments]) for name in ("a", "b", "c")]
        assert [member.wait(timeout=PROCESS_LIMIT) for member in members] == [0, 0, 0]
