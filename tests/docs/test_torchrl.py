"""The examples of docs/torchrl.md run as they stand, if TorchRL is installed."""

from __future__ import annotations

import re

import pytest

from tests.docs.examples import examples_of, run_example

EXAMPLES = examples_of("docs/torchrl.md")
PRINTED = [
    r"100 torch\.int64 torch\.Size\(\[32\]\)\n",
    r"torch\.Size\(\[2, 20, 1\]\) True\n",
]


@pytest.mark.parametrize("example", range(len(PRINTED)))
def test_example_runs(example: int) -> None:
    pytest.importorskip("torchrl", reason="needs torchrl: make test-interop")
    assert len(EXAMPLES) == len(PRINTED)
    assert re.fullmatch(PRINTED[example], run_example(EXAMPLES[example]).stdout)
