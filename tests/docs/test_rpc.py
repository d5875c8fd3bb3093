"""The examples of docs/rpc.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rpc.md"
EXAMPLES = dict(
    zip(
        ("async_handler", "stream", "queue", "batch", "dynamic"),
        re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL),
        strict=True,
    )
)
PRINTED = {
    "async_handler": "[1, 2, 3]\n",
    "stream": "{'batch': 3}\n",
    "queue": "144\n",
    "batch": "(84, 84) list\nhello actor 3\n",
    "dynamic": "[0, 3, 6, 9, 12]\n",
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
    assert done.stdout == PRINTED[name]
    assert done.stderr == ""
