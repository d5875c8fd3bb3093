"""The README's examples run as they stand; its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.examples import ROOT, examples_of, run_example

RPC, GROUPS, _ = examples_of("README.md")


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (RPC, "[0. 2. 4.]\n42\n"),
        (GROUPS, "['alice']\n{'steps': 640, 'return': array([1., 1.])}\n"),
    ],
    ids=["rpc", "groups"],
)
def test_example_runs(code: str, printed: str) -> None:
    assert run_example(code).stdout == printed


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


FOLDERS = "benchmarks|cpp|docs|examples|moolink|tests|tools"


# Results name files as they were when they were measured.
@pytest.mark.parametrize(
    "path", [page for page in PAGES if "results" not in page.parts], ids=lambda path: path.name
)
def test_files_that_a_page_names_exist(path: Path) -> None:
    for named in re.findall(rf"`((?:{FOLDERS})/[\w/.*]+)`", path.read_text(encoding="utf-8")):
        assert list(ROOT.glob(named)), f"{path} names {named}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path} links to {target}"
