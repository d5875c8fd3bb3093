"""The example of docs/slurm.md runs as it stands; tests/slurm runs its script in Slurm."""

from __future__ import annotations

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    (example,) = examples_of("docs/slurm.md")
    assert run_example(example).stdout == "task 0 of 1\n"
