"""The examples of docs/accumulator.md run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.examples import examples_of, run_example

WANTED = ["100\n", "640\n", "10\n", "5 lines\n", "[1. 2. 3.]\n"]


@pytest.mark.parametrize("number", range(len(WANTED)))
def test_example_runs(number: int, tmp_path: Path) -> None:
    if number == 3:
        pytest.importorskip("tensorboard")
    examples = examples_of("docs/accumulator.md")
    assert len(examples) == len(WANTED)
    assert run_example(examples[number], tmp_path).stdout == WANTED[number]
