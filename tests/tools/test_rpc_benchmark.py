"""The RPC benchmark runs; its figures are not looked at."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.tools.benchmark_runs import run_benchmark

pytest.importorskip("matplotlib")


def test_a_quick_run_prints_every_figure_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "rpc.png"
    command = ["benchmarks/rpc.py", "--quick", "--no-limits", "--png", str(picture)]
    output = run_benchmark(*command, "--peers", "moolink-shm")
    for text in ("p50", "1000 in flight", "one way", "echo", "pipelined", "moolink-shm"):
        assert text in output
    assert picture.stat().st_size > 0
    with picture.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        seen = {(row["name"], row["figure"]) for row in csv.DictReader(file)}
    assert ("moolink-shm", "64 MB pipelined, GB/s") in seen
