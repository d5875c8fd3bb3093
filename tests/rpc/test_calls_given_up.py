"""Calls that nobody waits for any more, at a peer whose workers are all busy."""

from __future__ import annotations

import contextlib

import numpy as np

import moolink
from tests.security.server import Process, wait_for

# Its handlers end when it does.
BUSY = """
    import sys, threading, moolink
    rpc = moolink.Rpc("busy", transports=["tcp"])
    ended = threading.Event()
    rpc.define("wait", lambda array: ended.wait())
    print(rpc.listen("127.0.0.1:0")[0], flush=True)
    sys.stdin.read()
    ended.set()
    """

CALLS, AT_ONCE, BYTES = 300, 20, 1 << 20


def test_calls_whose_time_is_up_hold_no_memory() -> None:
    busy = Process(BUSY)
    try:
        with moolink.Rpc("caller", timeout=0.05, transports=["tcp"]) as caller:
            caller.connect(busy.first_line)
            for _ in range(CALLS // AT_ONCE):
                calls = [caller.async_("busy", "wait", np.ones(BYTES // 8)) for _ in range(AT_ONCE)]
                for call in calls:
                    with contextlib.suppress(moolink.TimeoutError):
                        call.result()
            wait_for(lambda: busy.resident() < CALLS * BYTES // 2, "memory that is given back", 20)
    finally:
        busy.kill()
