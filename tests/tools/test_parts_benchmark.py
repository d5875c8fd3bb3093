"""The benchmark of the ways of an array runs, and each call goes the way that it is counted as."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tools.benchmark_runs import run_benchmark


def test_a_quick_run_has_every_way(tmp_path: Path) -> None:
    medians = tmp_path / "parts.json"
    command = ["benchmarks/parts.py", "--rounds", "5", "--json", str(medians)]
    run_benchmark(*command)
    sizes = {way: set(row) for way, row in json.loads(medians.read_text("utf-8")).items()}
    everywhere = {"64 KB", "1 MB", "16 MB"}
    assert sizes == {
        "chunks, tcp": everywhere,
        "chunks, shm": {"64 KB"},
        "first call": everywhere,
        "grant asked for": {"1 MB", "16 MB"},
        "standing grant": everywhere,
        "loan": everywhere,
    }
