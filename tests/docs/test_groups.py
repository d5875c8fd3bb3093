"""The example of docs/groups.md runs as it stands."""

from __future__ import annotations

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    (code,) = examples_of("docs/groups.md")
    done = run_example(code)
    assert done.stdout.splitlines() == [
        "{'steps': 1280, 'return': array([3., 3.])}",
        "[[0, 0, 0], [1, 1, 1]]",
        "[0.0, 1.0, 2.0, 3.0]",
    ]
