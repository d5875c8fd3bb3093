"""The example of docs/trajectories.md runs as it stands."""

from __future__ import annotations

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    (example,) = examples_of("docs/trajectories.md")
    assert run_example(example).stdout == "(20, 2, 4) [2 3]\n2\n"
