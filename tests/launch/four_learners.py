"""IMPALA on four hosts, one of which is lost and comes back: the same for all launchers."""

from __future__ import annotations

import csv
import itertools
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

EVICT_AFTER = 3.0  # seconds: the default of groups
COMMAND = [
    *("-m", "examples.torch.impala", "--env-id", "CartPole-v1", "--total-steps", "400000"),
    *("--torch-threads", "1", "--log-interval", "0.2"),
]


def learn(
    launcher: subprocess.Popen[str],
    folder: Path,
    lose: Callable[[int], None],
    bring_back: Callable[[], None],
) -> None:
    """Checks that four peers learn, that three go on while a host is away, and that it comes back.

    Args:
        launcher: of COMMAND, with its output in a pipe.
        folder: the learners' ``--save-dir``.
        lose: kills the host of a peer, given its index.
        bring_back: starts that host again; called once the launcher misses it.
    """
    output, rounds, happened = "", list[float](), ["started"]
    for now, line in timed_lines(launcher):
        output += line
        if found := re.match(r"\[(\d)\] .* of (\d) peers? \|", line):
            leader, peers = map(int, found.groups())
            if happened[-1] != "started":
                rounds.append(now)
            if happened[-1] == "started" and peers == 4:
                happened.append("lost")
                lose((leader + 1) % 4)
            elif happened[-1] == "lost" and peers < 4:
                happened.append("others learned")
            elif happened[-1] == "missed" and peers == 4:
                happened.append("all learned again")
        elif "is lost with its host" in line and happened[-1] == "others learned":
            happened.append("missed")
            bring_back()
    assert launcher.wait() == 0, output
    assert happened == ["started", "lost", "others learned", "missed", "all learned again"], output
    longest = max(later - now for now, later in itertools.pairwise(rounds))
    assert longest < EVICT_AFTER + 1, output
    with (folder / "learning_curve.csv").open() as file:
        returns = [float(row["mean_return"]) for row in csv.DictReader(file) if row["mean_return"]]
    assert max(returns) > 400
    print(f"at most {longest:.2f} s between two reports")


def timed_lines(process: subprocess.Popen[str]) -> Iterator[tuple[float, str]]:
    """Yields the lines of a process with the times at which they came."""
    lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put((time.monotonic(), line))
        lines.put((0.0, ""))

    threading.Thread(target=read, daemon=True).start()
    while (item := lines.get())[1]:
        yield item
