"""The examples of docs/data-plane.md run as they stand."""

from __future__ import annotations

import re

import pytest

from tests.docs.examples import examples_of, run_example

EXAMPLES = dict(
    zip(
        ("env_pool", "vector_env", "native", "batcher"),
        examples_of("docs/data-plane.md"),
        strict=True,
    )
)
PRINTED = {
    "env_pool": r"random returns: \d+\.\d\n",
    "vector_env": r"200 results of \d environments\n",
    "native": r"\(256, 4\)\n",
    "batcher": r"\{'frame': \(5, 8, 84, 84\), 'reward': \(5, 8\)\}\n",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    done = run_example(EXAMPLES[name])
    assert re.fullmatch(PRINTED[name], done.stdout)
