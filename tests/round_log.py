"""What member processes write of each version of their model, and whether it is the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """Of a member's log: one version of its model.

    Attributes:
        gradients: hash of the round's gradients.
        parameters: hash of the parameters if they ought to be the leader's, else ``-``.
        contributors: names of the round's, sorted, with commas between them.
        time: when it was written, of the monotonic clock.
    """

    version: int
    gradients: str
    parameters: str
    contributors: str
    time: float


def lines(log: Path) -> list[Line]:
    """Those that are complete."""
    if not log.exists():
        return []
    complete = log.read_text().rpartition("\n")[0].splitlines()
    rows = [line.split() for line in complete]
    return [Line(int(v), g, p, c, float(t)) for v, g, p, c, t in rows]


def rounds_of_both(first: Path, second: Path) -> list[tuple[Line, Line]]:
    """What two members say of the versions that both have had."""
    one, other = ({line.version: line for line in lines(log)} for log in (first, second))
    return [(one[v], other[v]) for v in sorted(one.keys() & other.keys())]


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


def alone_since(log: Path, name: str, moment: float) -> list[float]:
    """Seconds from a moment to each round of that member alone."""
    return [
        line.time - moment
        for line in lines(log)
        if line.time > moment and line.contributors == name
    ]
