"""The example of docs/debugging.md runs as it stands."""

from __future__ import annotations

import re

from tests.docs.examples import examples_of, run_example


def test_example_runs() -> None:
    (code,) = examples_of("docs/debugging.md")
    done = run_example(code)
    assert re.search(r"^(shm|tcp) .* connected over ", done.stdout)
    assert "in use" in done.stdout
