"""The example of docs/weights.md runs as it stands."""

from __future__ import annotations

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    (example,) = examples_of("docs/weights.md")
    assert run_example(example).stdout == "2 [3. 3. 3. 3.] 3\n{'actor': 2}\n"
