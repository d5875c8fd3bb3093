"""The benchmark of rounds during backward() runs; its figures are not checked."""

from __future__ import annotations

import pytest

from tests.network.hosts import why_not
from tests.tools.benchmark_runs import run_benchmark

pytest.importorskip("torch")


def test_a_quick_run_prints_all_ways() -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = ["-m", "benchmarks.backward", "--width", "300", "--layers", "3", "--trials", "1"]
    output = run_benchmark(*command)
    for text in ("1.0 MB of gradients", "backward ", "link ", "after ", "during ", "ddp "):
        assert text in output
