"""The README's complete examples run as they stand, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The training loop is an excerpt of a learner: its names are the reader's.
COMPLETE = [code for code in re.findall(r"```python\n(.*?)```", README, re.S) if "import" in code]


@pytest.mark.parametrize("code", COMPLETE, ids=range(len(COMPLETE)))
def test_example_runs(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_examples() -> None:
    assert len(COMPLETE) == 2


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path} links to {target}"
