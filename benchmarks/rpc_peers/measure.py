"""What is measured of a peer, in the process of its client."""

from __future__ import annotations

import collections
import time
from typing import Any

import numpy as np

from rpc_peers import Client

SIZES = {"1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
MODES = ("one way", "echo", "pipelined")
ARRAYS_IN_FLIGHT = 4  # pipelined
IN_FLIGHT = (64, 1000)


def cpu_seconds(client: Client) -> float:
    server: float = client.call("cpu", None)
    return time.process_time() + server


def latency(client: Client, seconds: float) -> dict[str, float]:
    for i in range(100):
        client.call("echo", i)
    samples = []
    before = cpu_seconds(client)
    start = time.perf_counter()
    deadline = start + seconds
    while (at := time.perf_counter()) < deadline or len(samples) < 100:
        client.call("echo", len(samples))
        samples.append(time.perf_counter() - at)
    elapsed = time.perf_counter() - start
    spent = cpu_seconds(client) - before
    count = len(samples)
    samples.sort()
    return {
        "p50 us": samples[count // 2] * 1e6,
        "p99 us": samples[count * 99 // 100] * 1e6,
        "cpu us/call": spent / count * 1e6,
        "1 in flight, calls/s": count / elapsed,
    }


def rate(client: Client, function: str, value: Any, in_flight: int, seconds: float) -> float:
    """Calls a second with so many under way at any time."""
    pending: collections.deque[Any] = collections.deque()
    count = 0
    start = time.perf_counter()
    deadline = start + seconds
    while time.perf_counter() < deadline:
        while len(pending) < in_flight:
            pending.append(client.start(function, value))
            count += 1
        # As many again as leave room for a batch of new ones, as a busy caller would.
        for _ in range(max(1, in_flight // 16)):
            client.finish(pending.popleft())
    while pending:
        client.finish(pending.popleft())
    return count / (time.perf_counter() - start)


def throughput(client: Client, in_flight: int, seconds: float) -> dict[str, float]:
    before = cpu_seconds(client)
    start = time.perf_counter()
    calls = rate(client, "echo", 1, in_flight, seconds)
    elapsed = time.perf_counter() - start
    spent = cpu_seconds(client) - before
    return {
        f"{in_flight} in flight, calls/s": calls,
        f"{in_flight} in flight, cpu us/call": spent / (calls * elapsed) * 1e6,
    }


def bandwidth(client: Client, name: str, size: int, seconds: float) -> dict[str, float]:
    """GB/s of payload; an echo's counts both ways."""
    array = client.array(np.ones(size // 4, np.float32))
    for function in ("drop", "echo"):
        client.call(function, array)
    one_way = rate(client, "drop", array, 1, seconds)
    echo = rate(client, "echo", array, 1, seconds)
    pipelined = rate(client, "drop", array, ARRAYS_IN_FLIGHT, seconds)
    figures = zip(MODES, (one_way, 2 * echo, pipelined), strict=True)
    return {f"{name} {mode}, GB/s": calls * size / 1e9 for mode, calls in figures}


def one_round(client: Client, seconds: float) -> dict[str, float]:
    figures = latency(client, seconds)
    for in_flight in IN_FLIGHT:
        figures |= throughput(client, in_flight, seconds)
    for name, size in SIZES.items():
        figures |= bandwidth(client, name, size, seconds)
    return figures
