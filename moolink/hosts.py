"""Which processes share a host, and so can share memory."""

from __future__ import annotations

import functools
import os
import pathlib
import uuid


@functools.cache
def host_key() -> str:
    """The same text in all processes that can reach each other over shared memory: those of one
    boot of one kernel, in one network namespace. Where that cannot be read it is unique."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return uuid.uuid4().hex
