"""A dashboard for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moolink import tokens
from tests.dashboard.dashboards import Served


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


@pytest.fixture
def guarded() -> Iterator[Served]:
    """A dashboard of a job with a token, whose groups have keys of their own."""
    one = Served(tokens.new())
    yield one
    one.close()
