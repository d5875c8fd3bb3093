"""Calls with wrong arguments, such as a faulty peer makes: each is an error that names the
argument, and costs no memory to speak of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import moolink

HUGE = 1 << 40
MOST = 64 << 20  # bytes that a refusal may take: the process has other threads, too


@contextmanager
def little_memory() -> Iterator[None]:
    """Within, the process never has much more memory than at the beginning."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _status("VmRSS")
    yield
    peak = _status("VmHWM")
    assert peak - before < MOST, f"{peak - before:,} bytes were taken"


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kilobytes) * 1024


def refused(caller: moolink.Rpc, peer: str, function: str, says: str, *arguments: Any) -> None:
    """The call is an error whose message says which argument is wrong."""
    with little_memory(), pytest.raises(moolink.RemoteError) as raised:
        caller.async_(peer, function, *arguments).result(20)
    assert says in str(raised.value).partition("\n")[0], str(raised.value)[:500]
