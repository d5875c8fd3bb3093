"""The README's examples run as they stand and pass a type checker; its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.examples import ROOT, examples_of, run_example

RPC, GROUPS, TRAINING = examples_of("README.md")

TORCH = "--untyped-calls-exclude=torch"  # Tensor.backward has no types

# The training loop is an excerpt of a learner: its names are the reader's.
LEARNER = """
from collections.abc import Iterator

import torch

import moolink

def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    group: moolink.Group,
    batches: Iterator[torch.Tensor],
) -> None:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch)
        return result.sum()

"""


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


@pytest.mark.timeout(600)
def test_examples_pass_a_type_checker(tmp_path: Path) -> None:
    (tmp_path / "rpc.py").write_text(RPC)
    (tmp_path / "groups.py").write_text(GROUPS)
    (tmp_path / "training.py").write_text(LEARNER + textwrap.indent(TRAINING, "    "))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", TORCH, *tmp_path.glob("*.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


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
