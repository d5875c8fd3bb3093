"""The benchmark of TCP runs; its figures are not looked at."""

from __future__ import annotations

import pytest

from moolink._core import openssl_info
from tests.tools.benchmark_runs import run_benchmark

pytest.importorskip("zmq")


@pytest.mark.skipif(not openssl_info()["usable"], reason=openssl_info()["reason"])
def test_a_quick_run_prints_every_peer_and_a_verdict_for_each_size() -> None:
    command = ["benchmarks/tcp.py", "--parts", "bulk", "--rounds", "1"]
    output = run_benchmark(*command, "--seconds", "0.02")
    for text in ("moolink-tls", "/pyzmq", openssl_info()["version"]):
        assert text in output
    for size in ("1 MB", "16 MB", "64 MB"):
        assert f"bar: TLS, {size}: " in output
