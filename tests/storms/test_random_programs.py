"""Random programs of the library's objects (a thousand: tests/nightly)."""

from __future__ import annotations

import pytest

from tests.storms import random_programs


@pytest.mark.timeout(900)
def test_random_programs_end() -> None:
    failures = random_programs.run(range(4), at_once=2, limit=300)
    assert not failures, "\n".join(f"seed {seed}: {told}" for seed, told in failures.items())
