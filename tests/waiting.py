"""Waiting, in tests, for what other threads and processes bring about."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import moolink

# Seconds until something that should take a moment is called a hang; emulated machines need more.
TIMEOUT = float(os.environ.get("MOOLINK_TEST_TIMEOUT", "60"))
# Seconds for a process that a test starts: less than pytest's limit for the whole test (300 s).
PROCESS_LIMIT = 280


def until(
    done: Callable[[], bool], what: str, poll: float = 0.01, timeout: float = TIMEOUT
) -> None:
    """Waits for a condition that other threads bring about."""
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(poll)


def until_timeout_says(text: str, call: Callable[[], object]) -> None:
    """Repeats a call that times out until its error has this text: a reason takes a moment to come
    from another peer."""

    def says() -> bool:
        try:
            call()
        except moolink.TimeoutError as error:
            return text in str(error)
        raise AssertionError("the call did not time out")

    until(says, f"a time-out with {text!r}", poll=0)


def formed(groups: list[moolink.Group], size: int | None = None) -> None:
    """Waits until all have a common view of `size` members (default: themselves)."""

    def common() -> bool:
        for group in groups:
            group.update()
        views = {(group.epoch(), tuple(group.members())) for group in groups}
        return len(views) == 1 and len(groups[0].members()) == (size or len(groups))

    until(common, f"a common view of {[g.members() for g in groups]}")
