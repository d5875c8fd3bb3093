"""Forks of a process whose threads receive."""

from __future__ import annotations

from tests.processes import killed_at_the_end, start_python
from tests.waiting import PROCESS_LIMIT


def test_no_child_of_a_process_that_receives_hangs() -> None:
    """In short: tests/nightly has two thousand of them."""
    with killed_at_the_end() as processes:
        processes.append(start_python("-m", "tests.fork_storm", 60))
        output, errors = processes[0].communicate(timeout=PROCESS_LIMIT)
        assert processes[0].returncode == 0, output + errors
