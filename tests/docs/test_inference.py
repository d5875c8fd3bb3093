"""The example of docs/inference.md runs as it stands."""

from __future__ import annotations

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    (example,) = examples_of("docs/inference.md")
    assert run_example(example).stdout == "[0 1 2] [2 1 2]\n"
