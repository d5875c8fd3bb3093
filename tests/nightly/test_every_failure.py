"""Each allocation and each system call of the library fails once, in every scenario."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("MOOLINK_BUILD_DIR", "build/dev") / "tests/injection/injection"
SCENARIOS = [
    "calls_over_tcp",
    "calls_over_shm",
    "group_over_shm",
    "group_over_tcp",
    "rounds_over_shm",
    "rounds_over_tcp",
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_failure_point(scenario: str) -> None:
    done = subprocess.run([PROGRAM, "--scenario", scenario], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
