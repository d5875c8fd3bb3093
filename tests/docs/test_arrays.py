"""The examples of docs/arrays.md and docs/jax-programs.md run as they stand."""

from __future__ import annotations

import pytest

from tests.docs.examples import examples_of, run_example

pytest.importorskip("jax")


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("docs/arrays.md", "jaxlib\n5000.0\n5000.0\n1\n"),
        ("docs/jax-programs.md", "[3.0, 3.0]\n"),
    ],
)
def test_example_runs(page: str, printed: str) -> None:
    (example,) = examples_of(page)
    assert run_example(example).stdout == printed
