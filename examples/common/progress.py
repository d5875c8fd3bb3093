"""A learner's terminal output: one line now and then, and a bar on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

REPEAT_AFTER = 3.0  # seconds of waiting before each message that says why nothing happens


class Terminal:
    """Lines on stdout. On a terminal, also a bar at the bottom; in a pipe, lines alone."""

    def __init__(self, total_steps: int) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.percentage:3.0f} %"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=2,
            )
            self._task = self._bar.add_task("starting", total=total_steps)
        self._last_wait = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self._bar is not None:
            self._console.print(text, markup=False)
        else:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Prints a line that stays, on stderr unless a bar is in the way."""
        if self._bar is not None:
            self._console.print(f"warning: {text}", markup=False)
        else:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def wait(self, reason: str) -> None:
        """Says every few seconds why the learner waits."""
        now = time.monotonic()
        if now - self._last_wait > REPEAT_AFTER:
            self._last_wait = now
            self.say(reason)

    def advance(self, steps: int, description: str) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=steps, description=description)


def process_start() -> float:
    """When this process was started, on the clock of `time.monotonic`: before Python's imports."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def progress_line(row: Mapping[str, float | int | None], total_steps: int, of_whom: str) -> str:
    """The line for one row of the learning curve. Steps are of the whole job, made by `of_whom`."""
    mean = row["mean_return"]
    score = (
        "no episode over yet" if mean is None else f"return {mean:.2f} ({row['episodes']} episodes)"
    )
    entropy = f"entropy {row['entropy']:.3f} | " if "entropy" in row else ""
    return (
        f"{row['steps']:,}/{total_steps:,} steps | {row['steps_per_second']:,.0f} steps/s of "
        f"{of_whom} | {score} | update {row['updates']} | {entropy}lr {row['learning_rate']:.1e}"
    )
