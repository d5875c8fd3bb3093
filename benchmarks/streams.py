"""Large arrays between two hosts whose connections, or whose link, have a limited rate.

    python -m benchmarks.streams --flow 400 --link 500

Each host is a namespace (tests/network/hosts.py; needs root). The limits, in Mbit/s, apply to each
direction: of each connection in the first part, of the link in the second. Plain sockets, first one
and then four at once, carry as many bytes as moolink; their trials alternate with those of moolink
without streams and with four. moolink sends each array in a call, two calls at a time, in plain and
in TLS. "small" is the median time of an empty call while arrays arrive at its caller.

The bars: if each connection is limited, moolink with streams carries at least 3 times as much as
without; if the link is limited, at least 0.95 times as much.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

import moolink
from tests.network.hosts import LISTENER_PORTS, Hosts, why_not
from tests.network.member import serve

PORT = LISTENER_PORTS.start
# argv: 0 to listen or the other's address, port, connections, bytes of each. Prints the seconds.
PLAIN = """
import socket, sys, threading, time
peer, port, count, size = sys.argv[1], *map(int, sys.argv[2:])
if peer == "0":
    listener = socket.create_server(("0.0.0.0", port))
    print("listening", flush=True)
    sockets = [listener.accept()[0] for _ in range(count)]
else:
    sockets = [socket.create_connection((peer, port)) for _ in range(count)]
def take(one):
    buffer, left = bytearray(1 << 20), size
    while left > 0:
        left -= one.recv_into(buffer, min(left, len(buffer)))
data = bytes(size)
work = take if peer == "0" else lambda one: one.sendall(data)
threads = [threading.Thread(target=work, args=(one,)) for one in sockets]
begin = time.monotonic()
for thread in threads: thread.start()
for thread in threads: thread.join()
print(time.monotonic() - begin)
if peer != "0": sockets[0].recv(1)
"""
BARS = {"flow": 3.0, "link": 0.95}


class Peer:
    """The server on host 0, or the client on host 1, which takes commands."""

    def __init__(self, name: str, address: str) -> None:
        self.rpc = moolink.Rpc(name)
        self.rpc.define("take", lambda data: None)
        self.rpc.define("give", lambda size: self._array(size))
        self.rpc.define("nothing", lambda: None)
        self._data = np.zeros(0, np.uint8)
        if name == "server":
            self.rpc.listen(address)
        else:
            self.rpc.connect(address)

    def _array(self, size: int) -> np.ndarray:
        if self._data.size != size:
            self._data = np.ones(size, np.uint8)
        return self._data

    def send(self, size: int, times: int) -> float:
        """Sends arrays to the server, two at a time; returns the seconds."""
        data = self._array(size)
        begin = time.monotonic()
        calls: list[Any] = []
        for _ in range(times):
            calls.append(self.rpc.async_("server", "take", data))
            if len(calls) > 1:
                calls.pop(0).result(120)
        for call in calls:
            call.result(120)
        return time.monotonic() - begin

    def small(self, size: int, times: int) -> float:
        """The median time of empty calls while arrays arrive here, in seconds."""
        taken: list[float] = []
        done = threading.Event()

        def receive() -> None:
            for _ in range(times):
                self.rpc.sync("server", "give", size)
            done.set()

        thread = threading.Thread(target=receive)
        thread.start()
        while not done.wait(0.002):
            begin = time.monotonic()
            self.rpc.sync("server", "nothing")
            taken.append(time.monotonic() - begin)
        thread.join()
        return statistics.median(taken)


class Pair:
    """A server and a client, one on each host, both with this environment."""

    def __init__(self, hosts: Hosts, environment: dict[str, str]) -> None:
        address = f"{hosts.address(0)}:{PORT}"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
        self._peers = [
            hosts.start(host, "benchmarks.streams", "peer", name, address, **pipes)
            for host, name in enumerate(("server", "client"))
        ]
        self.ask("send", size=1, times=1)

    def ask(self, do: str, size: int, times: int) -> float:
        """Calls this method of the client; returns its seconds."""
        client = self._peers[1]
        client.stdin.write(f'{{"do": "{do}", "size": {size}, "times": {times}}}\n')
        client.stdin.flush()
        return float(client.stdout.readline())

    def close(self) -> None:
        """Ends the peers."""
        for peer in reversed(self._peers):
            peer.communicate()


def plain(hosts: Hosts, connections: int, size: int) -> float:
    """Returns the seconds in which plain sockets send `size` bytes from host 1 to host 0."""
    command = ["python3", "-c", PLAIN]
    rest = [str(PORT), str(connections), str(size // connections)]
    listener = subprocess.Popen(
        hosts.command(0, [*command, "0", *rest]), stdout=subprocess.PIPE, text=True
    )
    assert listener.stdout is not None
    listener.stdout.readline()
    dialler = subprocess.Popen(
        hosts.command(1, [*command, hosts.address(0), *rest]), stdout=subprocess.DEVNULL
    )
    seconds = float(listener.communicate()[0])
    dialler.wait()
    return seconds


def measure(args: argparse.Namespace, limit: str, rate: float) -> None:
    """Measures under one limit, and prints a table and the verdict."""
    size = int(args.megabytes * (1 << 20))
    total = size * args.times
    kinds = {
        f"moolink, {security}, {streams}": {
            "MOOLINK_TCP_STREAMS": count,
            **({"MOOLINK_INSECURE": "1"} if security == "plain" else {}),
        }
        for security in ("plain", "TLS")
        for streams, count in (("no streams", "0"), ("streams", "4"))
    }
    rows: dict[str, list[float]] = {}
    small: dict[str, list[float]] = {}
    for _ in range(args.trials):
        with Hosts(2) as hosts:
            if limit == "flow":
                hosts.set_flow_rate(f"{rate:g}mbit")
            else:
                hosts.set_rate(f"{rate:g}mbit")
            for count in (1, 4):
                seconds = plain(hosts, count, total)
                rows.setdefault(f"plain sockets, {count}", []).append(total * 8e-6 / seconds)
            for kind, environment in kinds.items():
                pair = Pair(hosts, environment)
                pair.ask("send", size, args.times)  # the streams join meanwhile
                seconds = pair.ask("send", size, args.times)
                rows.setdefault(kind, []).append(total * 8e-6 / seconds)
                small.setdefault(kind, []).append(1e3 * pair.ask("small", size, args.times))
                pair.close()
    what = "each connection" if limit == "flow" else "the link"
    print(f"{what} has {rate:g} Mbit/s:")
    for kind, values in rows.items():
        text = f"  {kind}: {statistics.median(values):.0f} Mbit/s (best {max(values):.0f})"
        if kind in small:
            text += f", small {statistics.median(small[kind]):.2f} ms"
        print(text)
    for security in ("plain", "TLS"):
        of = [
            statistics.median(rows[f"moolink, {security}, {one}"])
            for one in ("streams", "no streams")
        ]
        quotient, bar = of[0] / of[1], BARS[limit]
        verdict = "met" if quotient >= bar else "MISSED"
        print(f"  bar: {security}: {quotient:.2f} times, at least {bar}: {verdict}", flush=True)


def main() -> None:
    """Measures under both limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flow", type=float, default=400, help="Mbit/s of a connection; 0: skip")
    parser.add_argument("--link", type=float, default=500, help="Mbit/s of the link; 0: skip")
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--times", type=int, default=6, help="arrays in a trial")
    parser.add_argument("--trials", type=int, default=3)
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    os.environ.pop("MOOLINK_INSECURE", None)
    for limit in ("flow", "link"):
        if rate := getattr(args, limit):
            measure(args, limit, rate)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        serve(Peer(*sys.argv[2:]))
    else:
        main()
