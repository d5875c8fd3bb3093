"""The example of docs/metrics.md runs as it stands."""

from __future__ import annotations

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    (code,) = examples_of("docs/metrics.md")
    lines = run_example(code).stdout.splitlines()
    assert "mean_return {} 21.0" in lines
    assert "episodes_total {'env': 'Pong'} 1.0" in lines
