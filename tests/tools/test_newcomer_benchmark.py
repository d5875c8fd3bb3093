"""The benchmark of a newcomer's state runs; its figures are not looked at."""

from __future__ import annotations

import pytest

from tests.network.hosts import why_not
from tests.tools.benchmark_runs import run_benchmark

pytest.importorskip("torch")


@pytest.mark.parametrize("path", ["shm", "link"])
def test_a_quick_run_prints_the_speed_and_the_verdict(path: str) -> None:
    if path == "link" and (reason := why_not()):
        pytest.skip(reason)
    command = ["-m", "benchmarks.newcomer", "--path", path]
    output = run_benchmark(*command, "--megabytes", "16", "--trials", "1")
    beside = "memcpy" if path == "shm" else "the link"
    for text in ("16 MB, 1 newcomers", f"{beside} ", "rounds during a transfer", "bar: "):
        assert text in output
