"""The benchmark of a newcomer's state runs; its figures are not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.network.hosts import why_not
from tests.waiting import PROCESS_LIMIT

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", ["shm", "link"])
def test_a_quick_run_prints_the_speed_and_the_verdict(path: str) -> None:
    if path == "link" and (reason := why_not()):
        pytest.skip(reason)
    command = [sys.executable, "-m", "benchmarks.newcomer", "--path", path]
    run = subprocess.run(
        [*command, "--megabytes", "16", "--trials", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    beside = "memcpy" if path == "shm" else "the link"
    for text in ("16 MB, 1 newcomers", f"{beside} ", "rounds during a transfer", "bar: "):
        assert text in run.stdout
