"""The benchmark of the ways of an array runs, and each call goes the way that it is counted as."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.waiting import PROCESS_LIMIT

ROOT = Path(__file__).resolve().parents[2]


def test_a_quick_run_has_every_way(tmp_path: Path) -> None:
    medians = tmp_path / "parts.json"
    command = [sys.executable, "benchmarks/parts.py", "--rounds", "5", "--json", str(medians)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_LIMIT, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
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
