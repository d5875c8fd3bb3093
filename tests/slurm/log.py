"""What the peers of tests/slurm have said."""

from __future__ import annotations

import re
from pathlib import Path

from tests.waiting import until


class Log:
    """What the peers of a job have said: lines of a time, a name and words."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, *words: str) -> list[tuple[float, str, list[str]]]:
        """The lines whose words begin with these."""
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        # The launcher writes the role and the index before it.
        said = [re.match(r"(?:\[[^]]*\] )?peer (.*)", line) for line in whole]
        split = [match[1].split() for match in said if match is not None]
        found = [(float(time), name, rest) for time, name, *rest in split]
        return [line for line in found if line[2][: len(words)] == list(words)]

    def until(self, *words: str, count: int = 1) -> list[tuple[float, str, list[str]]]:
        """Waits until so many lines begin with these words."""
        what = f"{count} times {words} in {self.path}"
        until(lambda: len(self.lines(*words)) >= count, what, poll=0.05, timeout=60)
        return self.lines(*words)

    def longest_wait(self, name: str) -> float:
        """Checks that nothing of a peer's work was lost; returns its longest wait for a round."""
        ((_, _, (_, sent, counted, longest, _)),) = [x for x in self.until("end") if x[1] == name]
        assert 0 <= int(sent) - int(counted) <= 1, "each contribution is in a round or the next"
        return float(longest)
