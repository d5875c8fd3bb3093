"""The examples of docs/replay.md run as they stand."""

from __future__ import annotations

import pytest

from tests.docs.examples import examples_of, run_example

WANTED = [
    "(32, 84, 84) float32\n32\n",
    "(2, 3) 10\n",
    "[1.75 1.75 1.5  1.  ]\n[0.125 0.125 0.25  0.5  ]\n[3. 4. 4. 4.]\n",
    "(16, 2) 8\n",
]


@pytest.mark.parametrize("number", range(len(WANTED)))
def test_example_runs(number: int) -> None:
    examples = examples_of("docs/replay.md")
    assert len(examples) == len(WANTED)
    assert run_example(examples[number]).stdout == WANTED[number]
