"""The examples of docs/weights.md run as they stand."""

from __future__ import annotations

import pytest

from tests.docs.examples import examples_of, run_example

WHOLE, SHARDED, SERVER = examples_of("docs/weights.md")


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        (WHOLE, "2 [3. 3. 3. 3.] 3\n{'actor': 2}\n"),
        (SHARDED, "(40, 8) [0. 1. 2.]\n"),
        (SERVER, "50 True\n"),
    ],
)
def test_the_example_runs(example: str, printed: str) -> None:
    assert run_example(example).stdout == printed
