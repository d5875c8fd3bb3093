"""moolink over shared memory and over TCP."""

from __future__ import annotations

import threading
import time
from typing import Any

import moolink
from rpc_peers import FUNCTIONS, Server, exit_with_client


def transports(transport: str) -> list[str]:
    return ["tcp"] if transport == "tcp" else ["shm", "tcp"]


class MoolinkClient:
    def __init__(self, transport: str) -> None:
        self._server = Server("moolink_peer", transport)
        self._rpc = moolink.Rpc(transports=transports(transport), insecure=True)
        self._rpc.connect(self._server.address())
        self._rpc.sync("server", "cpu", None)
        # The connection over shared memory is made once the two have met.
        deadline = time.monotonic() + 5
        while self._rpc.explain("server")["path"] != transport:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no path {transport}: {self._rpc.explain('server')}")
            time.sleep(0.01)

    def call(self, function: str, value: Any) -> Any:
        return self._rpc.sync("server", function, value)

    def start(self, function: str, value: Any) -> moolink.Future:
        return self._rpc.async_("server", function, value)

    def finish(self, started: moolink.Future) -> Any:
        return started.result()

    def array(self, array: Any) -> Any:
        return array

    def close(self) -> None:
        self._rpc.close()
        self._server.close()


def connect(transport: str) -> MoolinkClient:
    return MoolinkClient(transport)


def serve(transport: str, _: str) -> None:
    with moolink.Rpc("server", transports=transports(transport), insecure=True) as rpc:
        for name, function in FUNCTIONS.items():
            rpc.define(name, function)
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        exit_with_client()
        threading.Event().wait()
