"""Runs random programs, several at a time, each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from collections.abc import Iterable

from tests.processes import ROOT, kill_group


def run(seeds: Iterable[int], at_once: int, limit: float) -> dict[int, str]:
    """Runs a program for each seed; returns those that failed, with what they have printed.

    Args:
        limit: seconds after which a program prints the stacks of its threads and fails.
    """

    def failure(seed: int) -> str:
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.storms.random_program", str(seed), str(limit)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            # Longer than the program's own limit, in case it cannot print its stacks.
            printed, _ = program.communicate(timeout=2 * limit)
        except subprocess.TimeoutExpired:
            kill_group(program.pid)
            printed, _ = program.communicate()
            return f"it has not ended, and printed:\n{printed}"
        return "" if program.returncode == 0 else f"status {program.returncode}:\n{printed}"

    ordered = list(seeds)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        failures = dict(zip(ordered, pool.map(failure, ordered), strict=True))
    return {seed: printed for seed, printed in failures.items() if printed}
