"""The examples of docs/ray.md run as they stand, if Ray is installed."""

from __future__ import annotations

import pytest

from tests.docs.examples import examples_of, run_example


def test_examples_run() -> None:
    pytest.importorskip("ray", reason="needs ray: make test-interop")
    tensors, job = examples_of("docs/ray.md")
    assert run_example(tensors).stdout == "[1000000.0, 1000000.0]\n"
    lines = [line for line in run_example(job).stdout.splitlines() if "learner" in line]
    assert sorted(lines) == [f"[{n}] learner {n} of 2: 100 steps" for n in (0, 1)]
