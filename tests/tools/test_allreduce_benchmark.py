"""The all_reduce benchmark runs; its figures are not looked at."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.tools.benchmark_runs import run_benchmark

pytest.importorskip("matplotlib")


def test_a_quick_run_prints_every_figure_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "allreduce.png"
    command = ["benchmarks/allreduce.py", "--quick", "--png", str(picture)]
    output = run_benchmark(*command, "--systems", "moolink", "gloo", "copy")
    for text in ("2 processes, float32", "2 processes, bfloat16", "of gloo", "1 MB"):
        assert text in output
    assert picture.stat().st_size > 0
    with picture.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        seen = {(row["system"], row["dtype"], row["bytes"]) for row in csv.DictReader(file)}
    assert ("moolink", "bfloat16", "1048576") in seen, output
