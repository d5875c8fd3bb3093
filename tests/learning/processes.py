"""Processes of the examples: how tests start them, read what they say, and end them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.processes import ROOT, kill_group
from tests.waiting import PROCESS_LIMIT


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A Python process of its own process group, whose output is one text."""
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("cwd", ROOT)
    return subprocess.Popen(
        [sys.executable, *arguments],
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


def finish(process: subprocess.Popen[str], timeout: float = PROCESS_LIMIT) -> str:
    """Its output. Nothing of it is left behind, however it ends."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        kill_group(process.pid)
        process.wait()
    return output


def run(*arguments: str, timeout: float = PROCESS_LIMIT, **options: Any) -> tuple[int, str]:
    """Exit status and output."""
    process = start(*arguments, **options)
    output = finish(process, timeout)
    return process.returncode, output


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Reads the output up to the line that contains `text`."""
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"no {text!r} in the output:\n" + "".join(lines))


@contextmanager
def broker() -> Iterator[str]:
    """A broker in a process of its own: its address."""
    process = start("-m", "moolink.broker", "127.0.0.1:0")
    try:
        found = re.search(r"127\.0\.0\.1:\d+", read_until(process, "127.0.0.1:")[-1])
        assert found is not None
        yield found[0]
    finally:
        process.kill()
        process.communicate()
