"""The example of docs/lending.md runs as it stands."""

from __future__ import annotations

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    (code,) = examples_of("docs/lending.md")
    done = run_example(code)
    assert done.stdout == "0.0\n1.0\n2.0\n"
