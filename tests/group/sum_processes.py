"""Processes of device_sum_member.py, and checks of their results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT
from tests.waiting import until


class Member:
    """A process of device_sum_member.py."""

    def __init__(
        self, name: str, broker: str, folder: Path, moment: str = "never", device: str = "cpu"
    ) -> None:
        self.path = folder / name
        self.path.touch()
        command = [sys.executable, "-m", "tests.group.device_sum_member"]
        self.process = subprocess.Popen(
            [*command, name, broker, self.path, moment, device],
            cwd=ROOT,
            env=os.environ | {"MOOLINK_NCCL": str(int(device != "cpu"))},
        )

    def results(self) -> list[list[float]]:
        whole = self.path.read_text().rpartition("\n")[0]
        return [[float(word) for word in line.split()] for line in whole.splitlines()]

    def sums_by_communicator(self, members: int, since: int) -> bool:
        """Whether its last five results are sums of so many members by the communicator."""
        recent = self.results()[since:][-5:]
        return (
            len(recent) == 5
            and all(values[:3] == [members] * 3 for values in recent)
            and recent[-1][3] - recent[0][3] == 4
        )

    def has_right_results(self) -> bool:
        """Whether each result is of one operation among members of one epoch."""
        return all(
            smallest == largest == members for members, smallest, largest, _ in self.results()
        )


def by_communicator(members: list[Member]) -> None:
    """Waits until all sum by a communicator of exactly these members."""
    since = {member: len(member.results()) for member in members}

    def reached() -> bool:
        assert all(member.process.poll() is None for member in members)
        count = len(members)
        return all(member.sums_by_communicator(count, since[member]) for member in members)

    until(reached, f"{len(members)} members to sum by a communicator")
