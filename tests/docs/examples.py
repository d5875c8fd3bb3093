"""The examples of a page, and running one as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.waiting import PROCESS_LIMIT

ROOT = Path(__file__).resolve().parents[2]


def examples_of(page: str) -> list[str]:
    """Returns the Python examples of a page, given by its path from the root, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_example(code: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs an example in an interpreter of its own; it must end without an error. `folder`: the
    working directory of one that writes files."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done
