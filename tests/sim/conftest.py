"""Runs the simulators; see tests/sim/common/program.h for their command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PROCESS_LIMIT


class Simulator:
    """One simulation program."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def run(self, seeds: str, mutant: str = "") -> dict[str, Any]:
        """Runs the seeds `A..B`; the program's JSON line, and its complaint as `stderr`."""
        arguments = [str(self.program), "--seeds", seeds]
        if mutant:
            arguments += ["--mutant", mutant]
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=PROCESS_LIMIT, check=False
        )
        assert done.returncode in (0, 1), done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert (done.returncode == 1) == (result["failures"] > 0)
        return {**result, "stderr": done.stderr}

    def live(self, scenario: str, mutant: str = "") -> str:
        """Runs a scenario (tests/sim/stack/scenario.h); what was violated, "" if nothing was."""
        arguments = [str(self.program), "--scenario"]
        if mutant:
            arguments += ["--mutant", mutant]
        done = subprocess.run(
            arguments,
            input=scenario,
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        return done.stderr if done.returncode else ""

    def mutants(self) -> list[str]:
        done = subprocess.run(
            [str(self.program), "--list-mutants"],
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
            check=True,
        )
        return done.stdout.split()

    def survivors(
        self, seeds: int = 1000, *, besides: Collection[str] = (), **first: int
    ) -> list[str]:
        """The mutants that none of `seeds` seeds catches, without those in `besides`.

        The seeds begin with 0, or with `first[mutant]`, which is known to catch that mutant.
        """

        def caught(mutant: str) -> bool:
            begin = first.get(mutant, 0)
            return self.run(f"{begin}..{begin + seeds - 1}", mutant)["failures"] > 0

        return [name for name in self.mutants() if name not in besides and not caught(name)]


@pytest.fixture(scope="session")
def simulation(simulator: Callable[[str], Path]) -> Callable[[str], Simulator]:
    """Returns a function from a simulation's name to its Simulator."""
    return lambda name: Simulator(simulator(name))
