"""A thousand random programs that use the library's objects; each ends by itself."""

from __future__ import annotations

import time

import pytest

from tests.storms import random_programs

PROGRAMS = 1000


@pytest.mark.timeout(4 * 3600)
def test_a_thousand_random_programs_end() -> None:
    first = int(time.time()) // 86400 * PROGRAMS  # seeds that no night before had
    failures = random_programs.run(range(first, first + PROGRAMS), at_once=8, limit=300)
    assert not failures, "\n".join(f"seed {seed}: {told}" for seed, told in failures.items())
