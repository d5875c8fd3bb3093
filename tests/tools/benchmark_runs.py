"""Runs a benchmark for its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import PROCESS_LIMIT

ROOT = Path(__file__).resolve().parents[2]


def run_benchmark(*command: str) -> str:
    """Runs Python with these arguments from the root of the sources; returns its output."""
    run = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
