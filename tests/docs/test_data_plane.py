"""The examples of docs/data-plane.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data-plane.md"
EXAMPLES = dict(
    zip(
        ("env_pool", "batcher"),
        re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL),
        strict=True,
    )
)
PRINTED = {
    "env_pool": r"random returns: \d+\.\d\n",
    "batcher": r"\{'frame': \(5, 8, 84, 84\), 'reward': \(5, 8\)\}\n",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[name]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED[name], done.stdout)
