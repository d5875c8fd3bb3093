"""The all_reduce benchmark runs; its figures are not looked at."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PROCESS_LIMIT

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


def test_a_quick_run_prints_every_figure_and_draws_them(tmp_path: Path) -> None:
    picture = tmp_path / "allreduce.png"
    command = [sys.executable, "benchmarks/allreduce.py", "--quick", "--png", str(picture)]
    run = subprocess.run(
        [*command, "--systems", "moolink", "gloo", "copy"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for text in ("2 processes, float32", "2 processes, bfloat16", "of gloo", "1 MB"):
        assert text in run.stdout
    assert picture.stat().st_size > 0
    with picture.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        seen = {(row["system"], row["dtype"], row["bytes"]) for row in csv.DictReader(file)}
    assert ("moolink", "bfloat16", "1048576") in seen, run.stdout + run.stderr
