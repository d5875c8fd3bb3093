"""A broker for the accumulators of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import moolink


@pytest.fixture
def broker_address() -> Iterator[str]:
    with moolink.Broker(first=True) as broker:
        yield broker.listen("127.0.0.1:0")[0]
