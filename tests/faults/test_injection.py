"""Each allocation and system call of the library fails once: a sample; all in tests/nightly."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("MOOLINK_BUILD_DIR", "build/dev") / "tests/injection/injection"


@pytest.mark.parametrize("scenario", ["calls_over_tcp", "calls_over_shm"])
def test_a_failure_ends_what_it_belongs_to(scenario: str) -> None:
    done = subprocess.run(
        [PROGRAM, "--scenario", scenario, "--sample", "40"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("scenario", ["group_over_shm", "rounds_over_shm"])
def test_a_failure_ends_one_part_in_a_group(scenario: str) -> None:
    done = subprocess.run(
        [PROGRAM, "--scenario", scenario, "--sample", "10"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
