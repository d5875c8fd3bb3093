"""A dashboard for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboard.dashboards import Served


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()
