"""A learner's terminal output."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

REPEAT_AFTER = 3.0  # seconds of waiting before each message that says why nothing happens
MANY = 10_000_000  # steps, from which on they are said in millions
SHORTEST_BAR, LONGEST_BAR = 4, 24  # columns


class Terminal:
    """What a learner says: lines that stay, and its progress.

    On a terminal, the progress is one line at the bottom that changes in place. The same under
    `moolink run` on a terminal, which shows text that ends with a carriage return at its bottom.
    Elsewhere each progress is a line.
    """

    def __init__(self, total_steps: int) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._total, self._live = total_steps, Live(console=self._console, transient=True)
        self._launcher_has_terminal = os.environ.get("MOOLINK_TERMINAL") == "1"
        self._last_wait = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self._console.is_terminal:
            self._console.print(text, markup=False)
        else:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Prints a line that stays, on stderr unless a line that changes is in the way."""
        if self._console.is_terminal:
            self.say(f"warning: {text}")
        else:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def wait(self, reason: str) -> None:
        """Says every few seconds why the learner waits."""
        now = time.monotonic()
        if now - self._last_wait > REPEAT_AFTER:
            self._last_wait = now
            self.say(reason)

    def progress(self, steps: int, text: str, *, leads: bool) -> None:
        """Shows the progress. Of the peers whose output is in one place, the leader alone does."""
        if self._console.is_terminal:
            self._live.update(_bar(steps, self._total, text, self._console.width))
        elif leads and self._launcher_has_terminal:
            print(text, end="\r", flush=True)
        elif leads:
            print(text, flush=True)


def _bar(steps: int, total: int, text: str, width: int) -> Table:
    """One line: how much is done, as a number and, where there is room, as a bar; and the text."""
    share = f"{min(100, 100 * steps // total):3d} %"
    room = min(LONGEST_BAR, width - len(f"{share}  {text}"))
    line = Table.grid(padding=(0, 1, 0, 0))
    bar = [ProgressBar(total, min(steps, total), width=room)] if room >= SHORTEST_BAR else []
    cells = [share, *bar, Text(text, no_wrap=True, overflow="crop")]
    line.add_row(*cells)
    return line


def process_start() -> float:
    """When this process was started, on the clock of `time.monotonic`: before Python's imports."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def progress_line(
    row: Mapping[str, float | int | None], total_steps: int, of_whom: str, seconds_left: float
) -> str:
    """The line for one row of the learning curve, within 75 columns. Steps are of the whole job,
    made by `of_whom`."""
    steps, mean = row["steps"] or 0, row["mean_return"]
    if total_steps < MANY:
        done = f"{steps:,}/{total_steps:,} steps"
    else:
        done = f"{steps / 1e6:.2f}/{total_steps / 1e6:.4g} M steps"
    score = "no episode yet" if mean is None else f"return {mean:.2f}"
    speed = f"{row['steps_per_second']:,.0f}/s of {of_whom}"
    return f"{done} | {score} | {speed} | {_clock(seconds_left)} left"


def _clock(seconds: float) -> str:
    """As minutes and seconds, with hours where there are any."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
