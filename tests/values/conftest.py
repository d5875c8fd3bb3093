"""Ways for a value to travel: through the codec alone, and between peers over every path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import moolink
from moolink import _core
from tests.values.strategies import canonical
from tests.waiting import until

Echo = Callable[[Any], Any]


def through_codec(value: Any) -> Any:
    return _core.decode(*_core.encode(value))


@pytest.fixture(scope="module", params=["codec", "shm", "tcp", "self"])
def echo(request: pytest.FixtureRequest) -> Iterator[Echo]:
    """Sends a value to a handler and back; the handler must have seen what was sent."""
    if request.param == "codec":
        yield through_codec
        return
    seen: list[Any] = []

    def handler(value: Any) -> Any:
        seen.append(canonical(value))
        return value

    transports = ["tcp"] if request.param == "tcp" else ["shm", "tcp"]
    with (
        moolink.Rpc("server", transports=transports, timeout=20) as server,
        moolink.Rpc("client", transports=transports, timeout=20) as client,
    ):
        client.connect(server.listen("127.0.0.1:0")[0])
        to = "client" if request.param == "self" else "server"
        (client if to == "client" else server).define("echo", handler)
        if request.param != "self":
            path = request.param
            until(lambda: client.explain("server")["path"] == path, f"the path {path}")

        def call(value: Any) -> Any:
            again = client.sync(to, "echo", value)
            assert seen.pop() == canonical(value)
            return again

        yield call
