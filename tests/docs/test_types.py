"""The Python examples of the pages for users pass `mypy --strict`."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.examples import ROOT, examples_of

NOT_FOR_USERS = {"design", "results"}
PAGES = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    if not NOT_FOR_USERS & set(path.relative_to(ROOT).parts)
]

# An example that another one of its page imports has the name that the page gives it.
MODULES = {("docs/tutorials/two-peers.md", 0): "walk"}

# The cells of a notebook are one program, in which cells may await.
NOTEBOOK = "docs/tutorials/notebooks.md"

# README's training loop is an excerpt of a learner: its names are the reader's.
EXCERPT = ("README.md", 2)
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

# Only what is wrong in an example is reported. Libraries that not every installation has are never
# read, so that it is the same everywhere; Ray's decorators have no types then. optax has none, and
# torch none for Tensor.backward.
CONFIG = """
[mypy]
strict = true
python_version = 3.11
mypy_path = {root}
explicit_package_bases = true
cache_dir = {cache}
untyped_calls_exclude = torch

[mypy-moolink.*,examples.*]
follow_imports = silent

[mypy-cupy.*,envpool.*,minigrid.*,pettingzoo.*,pufferlib.*,ray.*,stable_baselines3.*,tensordict.*,torchrl.*]
ignore_missing_imports = true
follow_imports = skip

[mypy-docs_ray_0]
disallow_untyped_decorators = false

[mypy-optax.*]
ignore_missing_imports = true
"""


def write_examples(directory: Path) -> dict[str, tuple[str, int]]:
    """Writes each example as a module; returns the page and the index of each file."""
    files = {}
    for page in PAGES:
        for index, code in enumerate(examples_of(page)):
            if (page, index) == EXCERPT:
                code = LEARNER + textwrap.indent(code, "    ")
            if page == NOTEBOOK:
                cells = "".join(examples_of(page)) if index == 0 else ""
                code = cells and "async def cells() -> None:\n" + textwrap.indent(cells, "    ")
            name = re.sub(r"\W", "_", page.removesuffix(".md")) + f"_{index}"
            file = MODULES.get((page, index), name) + ".py"
            (directory / file).write_text(code, encoding="utf-8")
            files[file] = page, index
    return files


@pytest.mark.timeout(600)
def test_examples_pass_a_type_checker(tmp_path: Path) -> None:
    for library in ("mypy", "torch", "jax"):
        pytest.importorskip(library, reason=f"needs {library}")
    modules = tmp_path / "modules"
    modules.mkdir()
    files = write_examples(modules)
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    assert len(files) == sum(text.count("```python") for text in texts) >= 65
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG.format(root=ROOT, cache=tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(config), *files],
        cwd=modules,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout
    for file, (page, index) in files.items():
        said = re.sub(rf"^{file}:(\d+)", rf"{page}, example {index}, line \1", said, flags=re.M)
    assert done.returncode == 0, said + done.stderr
