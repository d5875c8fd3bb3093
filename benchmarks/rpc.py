"""RPC between two processes: moolink beside pyzmq, interleaved in one run.

    python benchmarks/rpc.py

An echo of an int: latency of single calls (p50, p99), calls a second with 64 and 1,000 in flight,
and the CPU time of both processes together a call. A float32 array sent to the server, which
replies with its first element: GB/s. Each figure is the median over the rounds; in every round each
peer gets its turn, so that other load on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

import moolink

SIZES = {"1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}


class Client(Protocol):
    def call(self, function: str, value: Any) -> Any: ...
    def calls(self, count: int, in_flight: int) -> None: ...
    def close(self) -> None: ...


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "echo": lambda x: x,
    "first": lambda x: float(x[0]),
    "cpu": lambda _: time.process_time(),
}


# --- moolink


class MoolinkClient:
    def __init__(self, transport: str, address: str) -> None:
        self._rpc = moolink.Rpc(transports=moolink_transports(transport))
        self._rpc.connect(address)
        self._rpc.sync("server", "cpu", None)
        if transport == "shm":
            # The connection over shared memory is made once the two have met.
            deadline = time.monotonic() + 5
            while self._rpc.explain("server")["path"] != "shm":
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no shm path: {self._rpc.explain('server')}")
                time.sleep(0.01)

    def call(self, function: str, value: Any) -> Any:
        return self._rpc.sync("server", function, value)

    def calls(self, count: int, in_flight: int) -> None:
        futures: collections.deque[moolink.Future] = collections.deque()
        for i in range(count):
            if len(futures) == in_flight:
                futures.popleft().result()
            futures.append(self._rpc.async_("server", "echo", i))
        for future in futures:
            future.result()

    def close(self) -> None:
        self._rpc.close()


def moolink_transports(transport: str) -> list[str]:
    return ["tcp"] if transport == "tcp" else ["shm", "tcp"]


def serve_moolink(transport: str) -> None:
    with moolink.Rpc("server", transports=moolink_transports(transport)) as rpc:
        for name, function in FUNCTIONS.items():
            rpc.define(name, function)
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        sys.stdin.read()


# --- pyzmq: pickles with the array's bytes out of band, as its documentation recommends


class ZmqClient:
    def __init__(self, _: str, address: str) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def _send(self, function: str, value: Any) -> None:
        self._socket.send_multipart(pack((function, value)), copy=False)

    def _receive(self) -> Any:
        return unpack(self._socket.recv_multipart(copy=False))

    def call(self, function: str, value: Any) -> Any:
        self._send(function, value)
        return self._receive()

    def calls(self, count: int, in_flight: int) -> None:
        sent = 0
        for received in range(count):
            while sent < count and sent - received < in_flight:
                self._send("echo", sent)
                sent += 1
            self._receive()

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def pack(value: Any) -> list[Any]:
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [body, *[b.raw() for b in buffers]]


def unpack(frames: list[Any]) -> Any:
    return pickle.loads(frames[0].buffer, buffers=[f.buffer for f in frames[1:]])


def serve_zmq(transport: str) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.ROUTER)
    socket.set_hwm(0)
    if transport == "tcp":
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        print(f"tcp://127.0.0.1:{port}", flush=True)
    else:
        address = f"ipc://{tempfile.mkdtemp()}/socket"
        socket.bind(address)
        print(address, flush=True)
    while True:
        identity, *frames = socket.recv_multipart(copy=False)
        function, value = unpack(frames)
        socket.send_multipart([identity, *pack(FUNCTIONS[function](value))], copy=False)


PEERS: dict[str, tuple[Callable[[str, str], Client], Callable[[str], None], str]] = {
    "moolink-shm": (MoolinkClient, serve_moolink, "shm"),
    "moolink-tcp": (MoolinkClient, serve_moolink, "tcp"),
    "pyzmq-ipc": (ZmqClient, serve_zmq, "ipc"),
    "pyzmq-tcp": (ZmqClient, serve_zmq, "tcp"),
}


# --- measuring


def cpu_seconds(client: Client) -> float:
    server: float = client.call("cpu", None)
    return time.process_time() + server


def measure_latency(client: Client, calls: int) -> dict[str, float]:
    samples = []
    for i in range(calls // 10):
        client.call("echo", i)
    before = cpu_seconds(client)
    for i in range(calls):
        start = time.perf_counter()
        client.call("echo", i)
        samples.append(time.perf_counter() - start)
    spent = cpu_seconds(client) - before
    samples.sort()
    return {
        "p50 us": samples[calls // 2] * 1e6,
        "p99 us": samples[calls * 99 // 100] * 1e6,
        "cpu us/call": spent / calls * 1e6,
    }


def measure_throughput(client: Client, calls: int, in_flight: int) -> dict[str, float]:
    before = cpu_seconds(client)
    start = time.perf_counter()
    client.calls(calls, in_flight)
    elapsed = time.perf_counter() - start
    spent = cpu_seconds(client) - before
    return {
        f"{in_flight} in flight, calls/s": calls / elapsed,
        f"{in_flight} in flight, cpu us/call": spent / calls * 1e6,
    }


def measure_bandwidth(client: Client, name: str, size: int, seconds: float) -> dict[str, float]:
    array = np.ones(size // 4, np.float32)
    client.call("first", array)
    sent = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        client.call("first", array)
        sent += size
    return {f"{name}, GB/s": sent / elapsed / 1e9}


def one_round(client: Client, options: argparse.Namespace) -> dict[str, float]:
    figures = measure_latency(client, options.calls)
    for in_flight in (64, 1000):
        figures |= measure_throughput(client, options.calls * 4, in_flight)
    for name, size in SIZES.items():
        figures |= measure_bandwidth(client, name, size, options.seconds)
    return figures


def print_table(figures: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'median (best)':32}" + "".join(f"{name:>24}" for name in figures))
    for what in next(iter(figures.values()))[0]:
        higher = what.endswith("/s")
        cells = []
        for rounds in figures.values():
            values = [figure[what] for figure in rounds]
            best = max(values) if higher else min(values)
            cells.append(f"{statistics.median(values):.4g} ({best:.4g})")
        print(f"{what:32}" + "".join(f"{cell:>24}" for cell in cells))
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=2000, help="of one latency measurement")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one bandwidth measurement")
    parser.add_argument("--serve", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _, serve, transport = PEERS[options.serve]
        serve(transport)
        return
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in options.peers}
    servers, clients = [], {}
    for name in options.peers:
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        servers.append(server)
        assert server.stdout is not None
        make, _, transport = PEERS[name]
        clients[name] = make(transport, server.stdout.readline().strip())
    try:
        for _ in range(options.rounds):
            for name, client in clients.items():
                figures[name].append(one_round(client, options))
        print_table(figures)
    finally:
        for client in clients.values():
            client.close()
        for server in servers:
            server.kill()
            server.communicate()


if __name__ == "__main__":
    main()
