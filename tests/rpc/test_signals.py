"""Signals and the programs that handlers start."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.rpc.conftest import Pair, Start
from tests.waiting import PROCESS_LIMIT


def test_a_program_that_a_handler_starts_can_be_terminated(pair: Pair) -> None:
    client, server = pair

    def run_and_terminate() -> int:
        program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        with program:
            program.terminate()
            return program.wait(20)

    server.define("run", run_and_terminate)
    assert client.sync("server", "run") == -signal.SIGTERM


def test_a_crash_in_a_handler_leaves_a_traceback(start: Start) -> None:
    process = start(
        """
        import ctypes, faulthandler
        import moolink

        def crashing_handler():
            ctypes.string_at(0)

        faulthandler.enable()
        rpc = moolink.Rpc("peer", timeout=20)
        rpc.define("crash", crashing_handler)
        rpc.sync("peer", "crash")
        """
    )
    _, errors = process.communicate(timeout=PROCESS_LIMIT)
    assert process.returncode == -signal.SIGSEGV
    assert "in crashing_handler" in errors
