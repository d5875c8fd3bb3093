"""The README's complete examples run as they stand, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.examples import ROOT, examples_of, run_example

# The training loop is an excerpt of a learner: its names are the reader's.
COMPLETE = [code for code in examples_of("README.md") if "import" in code]


@pytest.mark.parametrize("code", COMPLETE, ids=range(len(COMPLETE)))
def test_example_runs(code: str) -> None:
    assert run_example(code).stdout


def test_there_are_examples() -> None:
    assert len(COMPLETE) == 2


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path} links to {target}"
