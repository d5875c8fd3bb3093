"""The example of docs/repeatable.md runs as it stands."""

from __future__ import annotations

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    (code,) = examples_of("docs/repeatable.md")
    assert run_example(code).stdout == "True\n"
