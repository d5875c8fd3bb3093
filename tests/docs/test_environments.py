"""The examples of docs/environments.md run as they stand, where their library is installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.examples import ROOT, examples_of, run_example

EXAMPLES = {
    example.splitlines()[0].removeprefix("# needs: "): example
    for example in examples_of("docs/environments.md")
}
PRINTED = {
    "gymnasium": r"\(4, 4\)\n\(4, 4\)\n",
    "stable_baselines3": r"1024 steps\n",
    "torchrl": r"\(8, 10, 4\)\n",
    "pettingzoo": r"8 rows, 8 of them live\n",
    "pufferlib": r"\(4, 4\) True\n",
    "envpool": r"\(4, 4\)\n",
    "ale_py": r"\(3, 4, 4, 84, 84\)\n",
    "torch": r"True \[1.0, 1.0, 1.0\]\n",
}
# Beside libraries with pins of their own: what an environment of theirs does not have.
NEEDS_VECTOR_ENV = {"gymnasium"}


def test_every_row_of_the_table_has_an_example() -> None:
    page = Path(ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.*\]\(#(.*?)\)", page, re.MULTILINE)
    sections = re.findall(r"^## (.*)\n\n```python\n", page, re.MULTILINE)
    assert [section.lower().replace(" ", "-") for section in sections] == rows
    assert list(EXAMPLES) == list(PRINTED)


@pytest.mark.parametrize("library", PRINTED)
def test_example_runs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: make test-interop")
    if library in NEEDS_VECTOR_ENV and not hasattr(
        importlib.import_module("gymnasium.vector"), "AutoresetMode"
    ):
        pytest.skip("this gymnasium is older than VectorEnv needs")
    assert re.fullmatch(PRINTED[library], run_example(EXAMPLES[library]).stdout)
