"""TCP over loopback: moolink without encryption and in TLS, beside plain pyzmq and sockets in C.

They take turns in one run.

    python benchmarks/tcp.py

One way: an array of so many bytes is sent and answered with a few, GB/s; the socket loop does the
same with one buffer at each side. Small calls: an echo of an int, alone, 64 and 1,000 in flight,
and from another thread while a call with a large array is on its way there, or a reply with one on
its way back. Each figure is the median over the rounds, in each of which every peer gets its turn;
the quotients are medians of the quotients of each round. The bar applies to moolink in TLS: one
way, it must reach 0.8 times the speed of pyzmq, which does not encrypt.
"""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import moolink
from moolink import _core

PAUSE = 0.001  # seconds between two small calls beside a large one
SIZES = {"1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
TLS_BAR = 0.8  # times pyzmq's speed, one way

# argv: bytes of a message, seconds. Prints bytes a second, CPU seconds of both processes a byte.
BARE_LOOP = r"""
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static double cpu(int who) {
  struct rusage u;
  getrusage(who, &u);
  return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}
static int take(int fd, char *data, size_t size) {
  while (size > 0) {
    ssize_t n = recv(fd, data, size, 0);
    if (n <= 0) return 0;
    data += n, size -= (size_t)n;
  }
  return 1;
}
static void give(int fd, const char *data, size_t size) {
  while (size > 0) {
    ssize_t n = send(fd, data, size, 0);
    if (n <= 0) exit(1);
    data += n, size -= (size_t)n;
  }
}
int main(int argc, char **argv) {
  if (argc != 3) return 2;
  const size_t size = strtoull(argv[1], 0, 10);
  const double seconds = atof(argv[2]);
  struct sockaddr_in a = {.sin_family = AF_INET};
  socklen_t length = sizeof a;
  const int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listener, (void *)&a, sizeof a) || listen(listener, 1)) return 1;
  getsockname(listener, (void *)&a, &length);
  char *data = aligned_alloc(4096, size);
  memset(data, 1, size);
  char answer[8] = {0};
  if (fork() == 0) {
    const int fd = accept(listener, 0, 0);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    while (take(fd, data, size)) give(fd, answer, sizeof answer);
    _exit(0);
  }
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, (void *)&a, sizeof a)) return 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  double start = 0, bytes = 0;
  for (int i = 0; i < 2 || now() - start < seconds; ++i) {
    if (i == 1) start = now(), bytes = 0;  // the first one warms the memory
    give(fd, data, size);
    if (!take(fd, answer, sizeof answer)) return 1;
    bytes += (double)size;
  }
  const double elapsed = now() - start;
  close(fd);
  wait(0);
  printf("%g %g\n", bytes / elapsed, (cpu(RUSAGE_SELF) + cpu(RUSAGE_CHILDREN)) / bytes);
}
"""


def compile_bare_loop() -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp())
    source, program = folder / "bare.c", folder / "bare"
    source.write_text(BARE_LOOP)
    subprocess.run([compiler, "-O2", "-o", program, source], check=True)
    return program


def bare_figures(program: Path, seconds: float) -> dict[str, float]:
    figures = {}
    for name, size in SIZES.items():
        text = subprocess.run(
            [program, str(size), str(seconds)], check=True, capture_output=True, text=True
        ).stdout
        speed, cpu = map(float, text.split())
        figures[f"{name}, GB/s"] = speed / 1e9
        figures[f"{name}, cpu ms/GB"] = cpu * 1e12
    return figures


LARGE = np.ones(0, np.uint8)


def large(size: int) -> np.ndarray[Any, Any]:
    global LARGE
    if LARGE.nbytes != size:
        LARGE = np.ones(size, np.uint8)
    return LARGE


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "echo": lambda x: x,
    "first": lambda x: float(x[0]),
    "large": large,
    "cpu": lambda _: time.process_time(),
}


class MoolinkClient:
    def __init__(self, address: str, insecure: bool = True) -> None:
        self.rpc = moolink.Rpc(transports=["tcp"], insecure=insecure)
        self.rpc.connect(address)
        self.rpc.sync("server", "cpu", None)
        cipher = self.rpc.explain("server")["cipher"]
        assert (cipher is None) == insecure, cipher

    def call(self, function: str, value: Any) -> Any:
        return self.rpc.sync("server", function, value)

    def calls(self, count: int, in_flight: int) -> None:
        futures: collections.deque[moolink.Future] = collections.deque()
        for i in range(count):
            if len(futures) == in_flight:
                futures.popleft().result()
            futures.append(self.rpc.async_("server", "echo", i))
        for future in futures:
            future.result()

    def close(self) -> None:
        self.rpc.close()


def serve_moolink(insecure: bool = True) -> None:
    with moolink.Rpc("server", transports=["tcp"], insecure=insecure) as rpc:
        for name, function in FUNCTIONS.items():
            rpc.define(name, function)
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        sys.stdin.read()


class ZmqClient:
    def __init__(self, address: str) -> None:
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


def serve_zmq() -> None:
    import zmq

    socket = zmq.Context().socket(zmq.ROUTER)
    socket.set_hwm(0)
    print(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", flush=True)
    while True:
        identity, *frames = socket.recv_multipart(copy=False)
        function, value = unpack(frames)
        socket.send_multipart([identity, *pack(FUNCTIONS[function](value))], copy=False)


PEERS: dict[str, tuple[Callable[[str], Any], Callable[[], None]]] = {
    "moolink": (MoolinkClient, serve_moolink),
    "moolink-tls": (partial(MoolinkClient, insecure=False), partial(serve_moolink, insecure=False)),
    "pyzmq": (ZmqClient, serve_zmq),
}


# --- measuring


def cpu_seconds(client: Any) -> float:
    server: float = client.call("cpu", None)
    return time.process_time() + server


def echo_figures(client: Any, calls: int) -> dict[str, float]:
    for i in range(calls // 10):
        client.call("echo", i)
    before = cpu_seconds(client)
    samples = sorted(t for _, t in echo_times(client, lambda done: done >= calls))
    spent = cpu_seconds(client) - before
    return {
        "echo p50, us": samples[calls // 2] * 1e6,
        "echo p99, us": samples[calls * 99 // 100] * 1e6,
        "echo cpu, us/call": spent / calls * 1e6,
    }


def echo_times(
    client: Any, stop: Callable[[int], bool], pause: float = 0
) -> Iterator[tuple[float, float]]:
    """When each call began, and how long it took."""
    done = 0
    while not stop(done):
        time.sleep(pause)
        start = time.perf_counter()
        client.call("echo", done)
        yield start, time.perf_counter() - start
        done += 1


def rate_figures(client: Any, calls: int, in_flight: int) -> dict[str, float]:
    before = cpu_seconds(client)
    start = time.perf_counter()
    client.calls(calls, in_flight)
    elapsed = time.perf_counter() - start
    spent = cpu_seconds(client) - before
    return {
        f"{in_flight} in flight, calls/s": calls / elapsed,
        f"{in_flight} in flight, cpu us/call": spent / calls * 1e6,
    }


def one_way_figures(client: Any, name: str, size: int, seconds: float) -> dict[str, float]:
    array = np.ones(size, np.uint8)
    client.call("first", array)
    before = cpu_seconds(client)
    sent = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        client.call("first", array)
        sent += size
    spent = cpu_seconds(client) - before
    return {f"{name}, GB/s": sent / elapsed / 1e9, f"{name}, cpu ms/GB": spent / sent * 1e12}


def beside_figures(client: MoolinkClient, size: int, rounds: int) -> dict[str, float]:
    """Small calls of another thread that begin while a large array is on its way."""
    array = np.ones(size, np.uint8)
    # Evenly spread in time: else most of the calls would fall where they are fast.
    alone = statistics.median(t for _, t in echo_times(client, lambda done: done >= 200, PAUSE))
    figures = {"beside nothing: p50, us": alone * 1e6}
    for what, function, value in (("call", "first", array), ("reply", "large", size)):
        client.call(function, value)  # warms the memory
        stop = threading.Event()
        seen: list[tuple[float, float]] = []
        thread = threading.Thread(target=collect, args=(client, stop, seen))
        thread.start()
        flights = []
        for _ in range(rounds):
            future = client.rpc.async_("server", function, value)
            start = time.perf_counter()
            future.result()
            flights.append((start, time.perf_counter()))
        stop.set()
        thread.join()
        samples = sorted(t for at, t in seen if any(a <= at < b for a, b in flights))
        added = statistics.median(samples) - alone
        figures[f"beside a large {what}: added p50, us"] = added * 1e6
        figures[f"beside a large {what}: p90, us"] = samples[len(samples) * 9 // 10] * 1e6
        figures[f"beside a large {what}: small calls"] = len(samples)
        seconds = sum(b - a for a, b in flights)
        figures[f"beside a large {what}: GB/s"] = size * rounds / seconds / 1e9
    return figures


def collect(client: Any, stop: threading.Event, into: list[tuple[float, float]]) -> None:
    into.extend(echo_times(client, lambda _: stop.is_set(), PAUSE))


def one_round(client: Any, options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    if "echo" in options.parts:
        figures |= echo_figures(client, options.calls)
    if "rate" in options.parts:
        for in_flight in (64, 1000):
            figures |= rate_figures(client, options.calls * 5, in_flight)
    if "bulk" in options.parts:
        for name, size in SIZES.items():
            figures |= one_way_figures(client, name, size, options.seconds)
    if "beside" in options.parts and isinstance(client, MoolinkClient):
        figures |= beside_figures(client, options.large << 20, 4)
    return figures


def print_table(figures: dict[str, list[dict[str, float]]]) -> None:
    names = [name for name, rounds in figures.items() if rounds]
    others = [name for name in names if name != "moolink"]
    print(f"{'median':44}" + "".join(f"{n:>13}" for n in names), end="")
    print("".join(f"{'/' + n:>13}" for n in others))
    mine = figures["moolink"]
    for what in dict.fromkeys(k for name in names for k in figures[name][0]):
        line = f"{what:44}"
        for name in names:
            values = [r[what] for r in figures[name] if what in r]
            line += f"{statistics.median(values):13.4g}" if values else f"{'':13}"
        for name in others:
            pair = quotient(mine, figures[name], what)
            line += f"{'':13}" if pair is None else f"{pair:13.3g}"
        print(line)
    print(
        f"{_core.openssl_info()['version']}; load average {os.getloadavg()[0]:.1f}, "
        f"{os.cpu_count()} cores"
    )


def quotient(
    mine: list[dict[str, float]], others: list[dict[str, float]], what: str
) -> float | None:
    """Returns the median of the rounds' quotients. None: no round has both figures."""
    pairs = zip(mine, others, strict=False)
    quotients = [m[what] / o[what] for m, o in pairs if what in m and what in o]
    return statistics.median(quotients) if quotients else None


def print_verdicts(figures: dict[str, list[dict[str, float]]]) -> None:
    for size in SIZES:
        of_zmq = quotient(figures["moolink-tls"], figures["pyzmq"], f"{size}, GB/s")
        if of_zmq is not None:
            verdict = "met" if of_zmq >= TLS_BAR else "MISSED"
            print(f"bar: TLS, {size}: {of_zmq:.2f} of pyzmq, at least {TLS_BAR}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("echo", "rate", "bulk", "beside"),
        default=["echo", "rate", "bulk", "beside"],
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=2000, help="of one latency measurement")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one bandwidth measurement")
    parser.add_argument("--large", type=int, default=256, help="MB of the array beside small calls")
    parser.add_argument("--serve", choices=PEERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        PEERS[options.serve][1]()
        return
    bare = compile_bare_loop() if "bulk" in options.parts else None
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in (*options.peers, "bare")}
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
        clients[name] = PEERS[name][0](server.stdout.readline().strip())
    try:
        for _ in range(options.rounds):
            for name, client in clients.items():
                figures[name].append(one_round(client, options))
            if bare:
                figures["bare"].append(bare_figures(bare, options.seconds))
        print_table(figures)
        if {"moolink-tls", "pyzmq"} <= set(options.peers):
            print_verdicts(figures)
    finally:
        for client in clients.values():
            client.close()
        for server in servers:
            server.kill()
            server.communicate()


if __name__ == "__main__":
    main()
