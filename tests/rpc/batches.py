"""What the tests of batched calls have in common."""

from __future__ import annotations

from typing import Any

import pytest

import moolink
from tests.waiting import until


def calls(client: moolink.Rpc, name: str, arguments: list[Any]) -> list[moolink.Future]:
    """Sends a call of the server for each argument."""
    return [client.async_("server", name, x) for x in arguments]


def waiting(queue: moolink.rpc.Queue, count: int) -> None:
    """Waits until so many items are in the queue."""
    until(lambda: queue.size() == count, f"{count} calls")


def error_of(future: moolink.Future) -> moolink.RemoteError:
    with pytest.raises(moolink.RemoteError) as caught:
        future.result()
    return caught.value
