"""The benchmark of TCP runs; its figures are not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moolink._core import openssl_info
from tests.waiting import PROCESS_LIMIT

pytest.importorskip("zmq")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not openssl_info()["usable"], reason=openssl_info()["reason"])
def test_a_quick_run_prints_every_peer_and_a_verdict_for_each_size() -> None:
    command = [sys.executable, "benchmarks/tcp.py", "--parts", "bulk", "--rounds", "1"]
    run = subprocess.run(
        [*command, "--seconds", "0.02"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for text in ("moolink-tls", "/pyzmq", openssl_info()["version"]):
        assert text in run.stdout
    for size in ("1 MB", "16 MB", "64 MB"):
        assert f"bar: TLS, {size}: " in run.stdout
