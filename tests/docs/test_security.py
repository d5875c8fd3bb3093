"""The examples of docs/security.md run as they stand."""

from __future__ import annotations

from tests.docs.examples import examples_of, run_example


def test_examples_run() -> None:
    own, groups = examples_of("docs/security.md")
    assert run_example(own).stdout.splitlines() == ["42"]
    assert run_example(groups).stdout.splitlines() == ["['alice']", "['bob']", "refused: True"]
