"""Publishing weights to subscribers of this host, beside one copy of them in memory.

    python -m benchmarks.weights --megabytes 64 --subscribers 4 --turns 15

Each turn publishes a version and waits until every subscriber, a process of its own, has it and
has read one element of every array; the copy that it is compared with is made in the same turn.

    python -m benchmarks.weights --hosts 3 --rate 1000 --megabytes 64

publishes to subscribers on other hosts instead. The hosts are network namespaces whose links carry
`--rate` Mbit/s in each direction (tests/network/hosts.py; needs root). In the same turn, a plain
socket sends as many bytes from the publisher's host to one of them. All bytes of the weights change
each turn. Then two subscribers join late, one on a host that has a subscriber, one on another host.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

import moolink
from tests.network.hosts import Hosts, why_not

_PORT = 4431
_SUBSCRIBER = """
import sys, moolink
peer = moolink.Rpc(sys.argv[2])
peer.connect(sys.argv[1])
with moolink.Subscriber(peer, "benchmark", "publisher") as subscriber:
    version = 0
    while True:
        weights = subscriber.wait(version)
        sum(int(array.flat[0]) for array in weights.tree)
        version = weights.version + 1
"""

# argv: address, megabytes. Each line of input is a number of subscribers. Publishes a version and
# waits until so many have it; after "wait" only waits. Prints the seconds.
_PUBLISHER = """
import sys, time, numpy as np, moolink
arrays = [np.zeros(1 << 20, np.uint8) for _ in range(int(sys.argv[2]))]
peer = moolink.Rpc("publisher")
peer.listen(sys.argv[1])
with moolink.Publisher(peer, "benchmark") as publisher:
    print("listens", flush=True)
    version = 0
    for line in sys.stdin:
        *wait, count = line.split()
        for array in arrays:
            array += 1
        begin = time.perf_counter()
        if not wait:
            version = publisher.publish(arrays)
        publisher.wait_acknowledged(version, int(count), 60)
        print(time.perf_counter() - begin, flush=True)
"""

# argv: bytes, and the address to send them to. Without an address, receives them.
_SOCKET = """
import socket, sys, time
size = int(sys.argv[1])
if len(sys.argv) == 2:
    listener = socket.create_server(("0.0.0.0", 7000))
    print("listens", flush=True)
    connection, _ = listener.accept()
    buffer = bytearray(1 << 20)
    while size > 0:
        size -= connection.recv_into(buffer, min(size, len(buffer)))
    connection.sendall(b"x")
else:
    connection = socket.create_connection((sys.argv[2], 7000))
    data = bytes(size)
    begin = time.perf_counter()
    connection.sendall(data)
    connection.recv(1)
    print(time.perf_counter() - begin)
"""


class OnHosts:
    """A publisher on host 0 and subscribers on others."""

    def __init__(self, hosts: Hosts, megabytes: int) -> None:
        self._hosts = hosts
        self._size = megabytes << 20
        self._address = f"{hosts.address(0)}:{_PORT}"
        self._subscribers = 0
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        arguments = ("-c", _PUBLISHER, self._address, str(megabytes))
        self._publisher = hosts.start_python(0, *arguments, **pipes)
        assert self._publisher.stdout.readline() == "listens\n"

    def subscribe(self, host: int) -> None:
        """Starts a subscriber, and waits until it has the version."""
        arguments = ("-c", _SUBSCRIBER, self._address, f"subscriber-{self._subscribers}")
        self._hosts.start_python(host, *arguments)
        self._subscribers += 1
        self.tell(f"wait {self._subscribers}")

    def publish(self) -> float:
        """Publishes; returns the seconds until all subscribers have the new version."""
        return self.tell(str(self._subscribers))

    def tell(self, line: str) -> float:
        self._publisher.stdin.write(line + "\n")
        self._publisher.stdin.flush()
        return float(self._publisher.stdout.readline())

    def socket(self) -> float:
        """The seconds that a plain socket takes to send as many bytes to one host."""
        listener = self._hosts.start_python(
            1, "-c", _SOCKET, str(self._size), stdout=subprocess.PIPE
        )
        listener.stdout.readline()
        command = [sys.executable, "-c", _SOCKET, str(self._size), self._hosts.address(1)]
        sent = subprocess.run(
            self._hosts.command(0, command), check=True, text=True, stdout=subprocess.PIPE
        )
        listener.wait()
        return float(sent.stdout)

    def sent(self) -> float:
        """Copies of the weights that the publisher's link has carried so far."""
        return self._hosts.bytes_sent(0) / self._size


def _on_hosts(options: argparse.Namespace) -> None:
    if reason := why_not():
        raise SystemExit(reason)
    os.environ["MOOLINK_INSECURE"] = "1"  # the plain socket does not encrypt either
    with Hosts(options.hosts + 2, f"{options.rate:g}mbit") as hosts:
        on = OnHosts(hosts, options.megabytes)
        on.publish()
        for host in range(options.hosts):
            on.subscribe(1 + host)
        publishing, sockets, copies = [], [], []
        for _ in range(options.turns + 3):  # the first three warm up memory
            sockets.append(on.socket())
            before = on.sent()
            publishing.append(on.publish())
            copies.append(on.sent() - before)
        link, whole = statistics.median(sockets[3:]), statistics.median(publishing[3:])
        print(
            f"{options.megabytes} MB to {options.hosts} hosts: {1e3 * whole:.0f} ms (best "
            f"{1e3 * min(publishing[3:]):.0f}); a socket to one: {1e3 * link:.0f} ms (best "
            f"{1e3 * min(sockets[3:]):.0f}); ratio {whole / link:.2f}; the publisher's link "
            f"carried {statistics.median(copies[3:]):.2f} copies"
        )
        for where, host in (("a host that has one", 1), ("another host", options.hosts + 1)):
            before = on.sent()
            on.subscribe(host)
            cost = on.sent() - before
            print(f"late joiner on {where}: {100 * cost:.2f} % of a copy over the publisher's link")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--subscribers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--hosts", type=int, default=0, help="other hosts, a subscriber each")
    parser.add_argument("--rate", type=float, default=1000, help="of each host's link, Mbit/s")
    options = parser.parse_args()
    if options.hosts:
        _on_hosts(options)
    else:
        _on_this_host(options)


def _on_this_host(options: argparse.Namespace) -> None:
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(options.megabytes)]
    copies = [np.zeros_like(array) for array in arrays]
    peer = moolink.Rpc("publisher")
    address = peer.listen("127.0.0.1:0")[0]
    started = [
        subprocess.Popen([sys.executable, "-c", _SUBSCRIBER, address, f"subscriber-{i}"])
        for i in range(options.subscribers)
    ]
    publishing, copying = [], []
    try:
        with moolink.Publisher(peer, "benchmark") as publisher:
            for turn in range(options.turns + 3):  # the first three warm up memory
                begin = time.perf_counter()
                for source, target in zip(arrays, copies, strict=True):
                    np.copyto(target, source)
                copied = time.perf_counter()
                version = publisher.publish(arrays)
                publisher.wait_acknowledged(version, options.subscribers, 60)
                if turn >= 3:
                    copying.append(copied - begin)
                    publishing.append(time.perf_counter() - copied)
    finally:
        for process in started:
            process.kill()
            process.wait()
        peer.close()
    ratio = statistics.median(publishing) / statistics.median(copying)
    print(
        f"{options.megabytes} MB to {options.subscribers} subscribers: "
        f"{1e3 * statistics.median(publishing):.1f} ms; one copy: "
        f"{1e3 * statistics.median(copying):.1f} ms; ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
