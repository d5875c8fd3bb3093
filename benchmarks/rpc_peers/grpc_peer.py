"""grpcio: unary calls of bytes, which pickle makes; over TCP and over a Unix socket."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from rpc_peers import FUNCTIONS, Server, exit_with_client

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def dumps(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


# Values are sent in a tuple: grpcio takes a None for a message that could not be read.


class GrpcClient:
    def __init__(self, transport: str) -> None:
        self._server = Server("grpc_peer", transport)
        self._channel = grpc.insecure_channel(self._server.address(), OPTIONS)
        self._calls = {
            name: self._channel.unary_unary(
                f"/benchmark/{name}", request_serializer=dumps, response_deserializer=pickle.loads
            )
            for name in FUNCTIONS
        }

    def call(self, function: str, value: Any) -> Any:
        return self._calls[function]((value,))[0]

    def start(self, function: str, value: Any) -> Any:
        return self._calls[function].future((value,))

    def finish(self, started: Any) -> Any:
        return started.result()[0]

    def array(self, array: Any) -> Any:
        return array

    def close(self) -> None:
        self._channel.close()
        self._server.close()


def connect(transport: str) -> GrpcClient:
    return GrpcClient(transport)


def handler(function: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        lambda request, _: (function(*request),),
        request_deserializer=pickle.loads,
        response_serializer=dumps,
    )


def serve(transport: str, folder: str) -> None:
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    handlers = {name: handler(function) for name, function in FUNCTIONS.items()}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("benchmark", handlers)])
    if transport == "tcp":
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        address = f"unix:{folder}/socket"
        server.add_insecure_port(address)
    server.start()
    print(address, flush=True)
    exit_with_client()
    server.wait_for_termination()
