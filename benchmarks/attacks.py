"""The latency of a client's calls while their server is attacked.

    python benchmarks/attacks.py [--path tcp|shm]

A client in a process of its own calls `echo` again and again, while the server is attacked as in
tests/security. Each attack has a line: the number of calls, their latency (median, 99th percentile
and maximum), how often the client had to connect, and the growth of the server's resident memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.security import attacks
from tests.security.server import Server


def attacks_on(server: Server, path: str) -> dict[str, Callable[[], None]]:
    """Each attack by its name."""
    unix = path == "shm"
    connect = attacks.to_unix(server.unix_name) if unix else attacks.to_tcp(server.port)
    return {
        "no attack": lambda: time.sleep(5),
        **{name: partial(attack, connect, unix) for name, attack in attacks.ATTACKS.items()},
        "no attack, again": lambda: time.sleep(5),
    }


def main() -> None:
    """Runs all of them, one after the other."""
    parser = argparse.ArgumentParser(description="The latency of calls under attack.")
    parser.add_argument("--path", choices=("tcp", "shm"), default="tcp")
    path = parser.parse_args().path
    server = Server()
    try:
        with server.serving(path):
            time.sleep(1)  # the memory for the first client is no growth
        before = server.resident()
        print(f"{'attack':26} {'calls':>7} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} "
              f"{'connects':>9} {'MB more':>8}")  # fmt: skip
        for name, attack in attacks_on(server, path).items():
            with server.serving(path) as under:
                attack()
            if under.errors or not server.lives():
                raise SystemExit(f"{name}: {under.errors[:3]}, server lives: {server.lives()}")
            p50, p99, largest = (1e3 * under.percentile(share) for share in (0.5, 0.99, 1.0))
            grown = (server.resident() - before) / 1e6
            print(f"{name:26} {len(under.seconds):7} {p50:8.3f} {p99:8.3f} {largest:8.1f} "
                  f"{under.connections:9} {grown:8.1f}", flush=True)  # fmt: skip
    finally:
        server.kill()


if __name__ == "__main__":
    main()
