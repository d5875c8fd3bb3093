"""The RPC benchmark runs; its figures are not looked at."""

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
    picture = tmp_path / "rpc.png"
    command = [sys.executable, "benchmarks/rpc.py", "--quick", "--no-limits", "--png", str(picture)]
    run = subprocess.run(
        [*command, "--peers", "moolink-shm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for text in ("p50", "1000 in flight", "one way", "echo", "pipelined", "moolink-shm"):
        assert text in run.stdout
    assert picture.stat().st_size > 0
    with picture.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        seen = {(row["name"], row["figure"]) for row in csv.DictReader(file)}
    assert ("moolink-shm", "64 MB pipelined, GB/s") in seen
