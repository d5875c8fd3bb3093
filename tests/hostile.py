"""Calls with wrong arguments, as a faulty peer makes them. Each must be an error that names the
argument, and must take little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import moolink

HUGE = 1 << 40
MOST = 64 << 20  # bytes that memory may grow by: other threads of the process allocate, too


@contextmanager
def little_memory() -> Iterator[None]:
    """Asserts that the process takes less than MOST bytes more memory inside the block."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
    before = _status("VmRSS")
    yield
    peak = _status("VmHWM")
    assert peak - before < MOST, f"{peak - before:,} bytes were taken"


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kilobytes) * 1024


def refused(caller: moolink.Rpc, peer: str, function: str, says: str, *arguments: Any) -> None:
    """Asserts that a call is an error whose first line contains `says`, and takes little memory."""
    with little_memory(), pytest.raises(moolink.RemoteError) as raised:
        caller.async_(peer, function, *arguments).result(20)
    assert says in str(raised.value).partition("\n")[0], str(raised.value)[:500]
