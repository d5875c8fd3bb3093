"""The systems that benchmarks/rpc.py compares, one module each.

A module has `connect(transport)`, which starts a server in another process and returns a Client,
and (where the system does not start its servers itself) `serve(transport, place)`, which runs in
that other process.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moolink.internal.processes import tethered

SCRIPT = Path(__file__).resolve().parents[1] / "rpc.py"


class Client(Protocol):
    """What is measured: calls of the functions below, one after another or several in flight."""

    def call(self, function: str, value: Any) -> Any: ...
    def start(self, function: str, value: Any) -> Any: ...
    def finish(self, started: Any) -> Any:
        """Waits for the call; calls are finished in the order in which they were started."""

    def array(self, array: Any) -> Any:
        """A numpy array as the system's users would send it."""

    def close(self) -> None: ...


def echo(value: Any) -> Any:
    return value


def drop(_: Any) -> None:
    """One way: the reply says only that the value has arrived."""


def cpu(_: Any) -> float:
    return time.process_time()


FUNCTIONS = {"echo": echo, "drop": drop, "cpu": cpu}


@dataclass(frozen=True)
class Peer:
    module: str
    transport: str
    needs: str = ""  # what must be importable
    package: str = ""  # where it comes from

    def missing(self) -> str:
        """Why this peer cannot run here; empty when it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed: pip install {self.package}"
        return ""

    def load(self) -> Any:
        return importlib.import_module(f"rpc_peers.{self.module}")


PEERS = {
    "moolink-shm": Peer("moolink_peer", "shm"),
    "moolink-tcp": Peer("moolink_peer", "tcp"),
    "pyzmq-ipc": Peer("zmq_peer", "ipc", "zmq", "'moolink[bench]'"),
    "pyzmq-tcp": Peer("zmq_peer", "tcp", "zmq", "'moolink[bench]'"),
    "grpc-unix": Peer("grpc_peer", "unix", "grpc", "'moolink[bench]'"),
    "grpc-tcp": Peer("grpc_peer", "tcp", "grpc", "'moolink[bench]'"),
    "torch.rpc": Peer("torch_peer", "default", "torch", "'moolink[torch]'"),
    "ray": Peer("ray_peer", "default", "ray", "'moolink[bench-ray]'"),
}


class Server:
    """A process that serves, and ends with this one whatever happens to it.

    It is told where to be, or a folder in which it may make a socket.
    """

    def __init__(self, module: str, transport: str, place: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory()
        where = [module, transport, place or self._folder.name]
        self._process = subprocess.Popen(
            tethered([sys.executable, str(SCRIPT), "--serve", *where]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def address(self) -> str:
        assert self._process.stdout is not None
        address = self._process.stdout.readline().strip()
        if not address:
            raise RuntimeError("the server ended before it told its address")
        return address

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


def exit_with_client() -> None:
    """In a server: ends the process when the client's end of stdin is gone."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
