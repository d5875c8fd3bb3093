"""What friends of a server notice of attacks on it.

    python benchmarks/attacks.py [--path tcp|shm]

A friend calls `echo` one after the other, from a process of its own, while the server is attacked
as in tests/security. A line for each attack: calls, seconds that half of them, 99 of 100 and all
took at most, new connections of the friend, and by how much the server's resident memory has grown.
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
        "quiet": lambda: time.sleep(5),
        **{name: partial(attack, connect, unix) for name, attack in attacks.ATTACKS.items()},
        "quiet again": lambda: time.sleep(5),
    }


def main() -> None:
    """Runs all of them, one after the other."""
    parser = argparse.ArgumentParser(description="What friends notice of attacks on a server.")
    parser.add_argument("--path", choices=("tcp", "shm"), default="tcp")
    path = parser.parse_args().path
    server = Server()
    try:
        with server.serving(path):
            time.sleep(1)  # its first friend's memory is no growth
        before = server.resident()
        print(f"{'attack':26} {'calls':>7} {'p50 ms':>8} {'p99 ms':>8} {'most ms':>8} "
              f"{'connected':>9} {'grown MB':>8}")  # fmt: skip
        for name, attack in attacks_on(server, path).items():
            with server.serving(path) as under:
                attack()
            if under.errors or not server.lives():
                raise SystemExit(f"{name}: {under.errors[:3]}, server lives: {server.lives()}")
            p50, p99, most = (1e3 * under.percentile(share) for share in (0.5, 0.99, 1.0))
            grown = (server.resident() - before) / 1e6
            print(f"{name:26} {len(under.seconds):7} {p50:8.3f} {p99:8.3f} {most:8.1f} "
                  f"{under.connections:9} {grown:8.1f}", flush=True)  # fmt: skip
    finally:
        server.kill()


if __name__ == "__main__":
    main()
