"""The examples of docs/rpc.md run as they stand."""

from __future__ import annotations

import pytest

from tests.docs.examples import examples_of, run_example

EXAMPLES = dict(
    zip(
        ("within", "async_handler", "pickles", "stream", "queue", "batch", "dynamic"),
        examples_of("docs/rpc.md"),
        strict=True,
    )
)
PRINTED = {
    "within": "no answer within 0.1 s\n",
    "async_handler": "[1, 2, 3]\n",
    "pickles": "0.2\n",
    "stream": "{'batch': 3}\n",
    "queue": "144\n",
    "batch": "(84, 84) tuple\nhello actor 3\n",
    "dynamic": "[0, 3, 6, 9, 12]\n",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    done = run_example(EXAMPLES[name])
    assert done.stdout == PRINTED[name]
    warned = "pickles from peers are allowed" in done.stderr
    assert warned == (name == "pickles")
    assert warned or done.stderr == ""
