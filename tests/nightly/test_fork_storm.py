"""Thousands of forks of a process whose threads receive."""

from __future__ import annotations

from tests.processes import killed_at_the_end, start_python


def test_no_child_of_two_thousand_hangs() -> None:
    with killed_at_the_end() as processes:
        processes.append(start_python("-m", "tests.fork_storm", 2000))
        output, errors = processes[0].communicate(timeout=3600)
        assert processes[0].returncode == 0, output + errors
