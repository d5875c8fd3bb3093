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
from pathlib import Path

import pytest

import moolink
from tests.round_log import Line, alone_since, check_equal, lines, rounds_of_both
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


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
        return lines(self._log(name))

    def rounds_of_both(self, names: tuple[str, str]) -> list[tuple[Line, Line]]:
        return rounds_of_both(*map(self._log, names))

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
            return alone_since(self._log(name), name, killed)

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
