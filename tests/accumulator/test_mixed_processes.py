"""A torch and a JAX process train one model; each is killed once.

`python -m tests.accumulator.test_mixed_processes SECONDS` runs it for longer and prints figures.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import moolink
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Line:
    """Of a member's log: one version of its model."""

    version: int
    gradients: str
    parameters: str
    contributors: str
    time: float


class Members:
    """Member processes of one group."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, framework: str, name: str, pause: float = 0.0) -> None:
        command = ["-m", "tests.accumulator.mixed_member", framework, self._address, name]
        self._processes[name] = subprocess.Popen(
            [sys.executable, *command, str(self._log(name)), "--pause", str(pause)], cwd=ROOT
        )

    def lines(self, name: str) -> list[Line]:
        if not self._log(name).exists():
            return []
        complete = self._log(name).read_text().rpartition("\n")[0].splitlines()
        rows = [line.split() for line in complete]
        return [Line(int(v), g, p, c, float(t)) for v, g, p, c, t in rows]

    def rounds_of_both(self, names: tuple[str, str]) -> list[tuple[Line, Line]]:
        """What both say of the versions that both have had, since the later one came."""
        first, second = ({line.version: line for line in self.lines(name)} for name in names)
        return [(first[v], second[v]) for v in sorted(first.keys() & second.keys())]

    def contribute_together(self, names: tuple[str, str], rounds: int) -> None:
        wanted = ",".join(sorted(names))

        def enough() -> bool:
            assert all(self._processes[name].poll() is None for name in names), "a member ended"
            both = [a for a, _ in self.rounds_of_both(names) if a.contributors == wanted]
            return len(both) >= rounds

        until(enough, f"{rounds} rounds of both", poll=0.1)

    def kill(self, name: str) -> float:
        killed = time.monotonic()
        self._processes[name].kill()
        self._processes.pop(name).wait()
        return killed

    def goes_on(self, name: str, killed: float) -> float:
        """Seconds from the other's death to the first round of this one alone."""

        def alone() -> list[float]:
            return [
                line.time - killed
                for line in self.lines(name)
                if line.time > killed and line.contributors == name
            ]

        until(lambda: bool(alone()), "a round of the survivor", poll=0.05)
        return alone()[0]

    def _log(self, name: str) -> Path:
        return self._directory / name


@contextlib.contextmanager
def members(directory: Path) -> Iterator[Members]:
    with moolink.Broker(first=True) as broker:
        made = Members(broker.listen("127.0.0.1:0")[0], directory)
        try:
            yield made
        finally:
            for name in list(made._processes):
                made.kill(name)


def check_equal(rounds: list[tuple[Line, Line]], killed: float) -> int:
    """Returns in how many rounds both had the leader's parameters.

    What a leader that was killed had not published yet is gone with it: its successor's count.
    """
    compared = 0
    for a, b in rounds:
        assert a.gradients == b.gradients, (a, b)
        assert a.contributors == b.contributors, (a, b)
        if "-" not in (a.parameters, b.parameters) and max(a.time, b.time) < killed:
            assert a.parameters == b.parameters, (a, b)
            compared += 1
    return compared


@pytest.mark.parametrize(("first", "second"), [("torch", "jax"), ("jax", "torch")])
def test_same_bits_in_every_round_and_either_goes_on_alone(
    tmp_path: Path, first: str, second: str
) -> None:
    pytest.importorskip("jax")
    with members(tmp_path) as made:
        made.start(first, "first")
        until(lambda: len(made.lines("first")) > 5, "the first member")
        made.start(second, "second")
        made.contribute_together(("first", "second"), 50)
        killed = made.kill("first")  # the leader
        made.goes_on("second", killed)
        assert check_equal(made.rounds_of_both(("first", "second")), killed) >= 25
        made.start(first, "third")
        made.contribute_together(("second", "third"), 50)
        killed = made.kill("third")
        made.goes_on("second", killed)
        assert check_equal(made.rounds_of_both(("second", "third")), killed) >= 25


def main() -> None:
    pytest.importorskip("jax")
    seconds = float(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory, members(Path(directory)) as made:
        for first, second in (("torch", "jax"), ("jax", "torch")):
            pair = (f"{first}-leads", f"{second}-follows")
            made.start(first, pair[0], pause=0.04)
            until(lambda name=pair[0]: len(made.lines(name)) > 5, "the first member")
            made.start(second, pair[1], pause=0.04)
            made.contribute_together(pair, 50)
            time.sleep(seconds / 2)
            before = made.lines(pair[0])[-1].version
            killed = made.kill(pair[0])
            alone = made.goes_on(pair[1], killed)
            rounds = made.rounds_of_both(pair)
            equal = check_equal(rounds, killed)
            both = sum("," in a.contributors for a, _ in rounds)
            print(
                f"{first} leads, {second} follows: {before} rounds, {len(rounds)} at both, all "
                f"with equal gradients, {equal} with the leader's parameters at both, equal in all "
                f"of them; {both} with contributions of both; the other one went on {alone:.3f} s "
                "after SIGKILL of the leader",
                flush=True,
            )
            made.kill(pair[1])


if __name__ == "__main__":
    main()
