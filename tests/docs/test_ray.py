"""The example of docs/ray.md runs as it stands, if Ray is installed."""

from __future__ import annotations

import pytest

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    pytest.importorskip("ray", reason="needs ray: make test-interop")
    (example,) = examples_of("docs/ray.md")
    assert run_example(example).stdout == "[1000000.0, 1000000.0]\n"
