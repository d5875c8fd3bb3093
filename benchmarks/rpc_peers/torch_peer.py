"""torch.distributed.rpc with its TensorPipe backend; arrays are sent as tensors."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import torch
from torch.distributed import rpc

from rpc_peers import FUNCTIONS, Server, exit_with_client


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(name: str, rank: int, port: str) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"  # else it asks the name service for this machine
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        rpc_timeout=600,
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


class TorchClient:
    def __init__(self) -> None:
        port = str(free_port())
        self._server = Server("torch_peer", "default", port)
        join("client", 1, port)

    def call(self, function: str, value: Any) -> Any:
        return rpc.rpc_sync("server", FUNCTIONS[function], (value,))

    def start(self, function: str, value: Any) -> Any:
        return rpc.rpc_async("server", FUNCTIONS[function], (value,))

    def finish(self, started: Any) -> Any:
        return started.wait()

    def array(self, array: Any) -> Any:
        return torch.from_numpy(array)

    def close(self) -> None:
        rpc.shutdown(graceful=False)
        self._server.close()


def connect(_: str) -> TorchClient:
    return TorchClient()


def serve(_: str, port: str) -> None:
    exit_with_client()
    join("server", 0, port)
    threading.Event().wait()
