"""Calls with wrong arguments, as a faulty peer makes them. Each must be an error that names the
argument, and must take little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

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


def values(given: list[Any]) -> st.SearchStrategy[Any]:
    """Values of any kind and trees of them, with those of `given`, which a function may expect."""
    return st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), 1 << 64)
        | st.floats()
        | st.text(max_size=3)
        | st.sampled_from(given),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=6,
    )


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kilobytes) * 1024


def refused(caller: moolink.Rpc, peer: str, function: str, says: str, *arguments: Any) -> None:
    """Asserts that a call is an error whose first line contains `says`, and takes little memory."""
    with little_memory(), pytest.raises(moolink.RemoteError) as raised:
        caller.async_(peer, function, *arguments).result(20)
    assert says in str(raised.value).partition("\n")[0], str(raised.value)[:500]
