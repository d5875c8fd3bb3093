"""The examples of docs/jax.md and docs/torch.md run as they stand."""

from __future__ import annotations

import pytest

from tests.docs.examples import examples_of, run_example

IN_JAX = ["[0. 2. 4.]\n", "500 [1. 1. 1. 1.]\n", "[3. 3. 3.]\n", "True 2\n", "1280 [3. 3.]\n"]
IN_TORCH = ["torch.Size([100]) torch.int64\n", "100 True\n", "1.5 torch.Size([3, 2])\n"]


@pytest.mark.parametrize("number", range(len(IN_JAX)))
def test_example_for_jax_runs(number: int) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    examples = examples_of("docs/jax.md")
    assert len(examples) == len(IN_JAX)
    assert run_example(examples[number]).stdout == IN_JAX[number]


@pytest.mark.parametrize("number", range(len(IN_TORCH)))
def test_example_for_torch_runs(number: int) -> None:
    examples = examples_of("docs/torch.md")
    assert len(examples) == len(IN_TORCH)
    assert run_example(examples[number]).stdout == IN_TORCH[number]
