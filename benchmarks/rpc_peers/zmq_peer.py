"""pyzmq: pickles with the arrays' bytes out of band, as its documentation recommends."""

from __future__ import annotations

import pickle
from typing import Any

import zmq

from rpc_peers import FUNCTIONS, Server, exit_with_client


class ZmqClient:
    def __init__(self, transport: str) -> None:
        self._server = Server("zmq_peer", transport)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(self._server.address())

    def call(self, function: str, value: Any) -> Any:
        self.start(function, value)
        return self.finish(None)

    def start(self, function: str, value: Any) -> None:
        self._socket.send_multipart(pack((function, value)), copy=False)

    def finish(self, _: None) -> Any:
        return unpack(self._socket.recv_multipart(copy=False))

    def array(self, array: Any) -> Any:
        return array

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
        self._server.close()


def pack(value: Any) -> list[Any]:
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [body, *[b.raw() for b in buffers]]


def unpack(frames: list[Any]) -> Any:
    return pickle.loads(frames[0].buffer, buffers=[f.buffer for f in frames[1:]])


def connect(transport: str) -> ZmqClient:
    return ZmqClient(transport)


def serve(transport: str, folder: str) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.set_hwm(0)
    if transport == "tcp":
        address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    else:
        address = f"ipc://{folder}/socket"
        socket.bind(address)
    print(address, flush=True)
    exit_with_client()
    while True:
        identity, *frames = socket.recv_multipart(copy=False)
        function, value = unpack(frames)
        socket.send_multipart([identity, *pack(FUNCTIONS[function](value))], copy=False)
