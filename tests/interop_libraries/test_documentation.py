"""The examples of docs/environments.md run as they stand, where their library is installed."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.docs.examples import examples_of, run_example

EXAMPLES = examples_of("docs/environments.md")
PRINTED = {
    "stable_baselines3": r"1024 steps\n",
}


def test_every_library_has_one_example() -> None:
    assert [needed(example) for example in EXAMPLES] == list(PRINTED)


@pytest.mark.parametrize("library", PRINTED)
def test_example_runs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: make test-interop")
    example = EXAMPLES[list(PRINTED).index(library)]
    assert re.fullmatch(PRINTED[library], run_example(example).stdout)


def needed(example: str) -> str:
    """Returns the library that an example names in its first line."""
    return example.splitlines()[0].removeprefix("# needs: ")
