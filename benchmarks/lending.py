"""How long a tensor is on its way to another process of this host: lent, and sent as ever.

    python benchmarks/lending.py

One way: from before the call to the beginning of the handler, which has the array then; both
processes read the same monotonic clock. Lent arrays lie in memory of `moolink.empty`; each is
released before the next call. All sizes and kinds take their turns in every round, so that other
load on the machine hits all alike; a turn is a few calls in a row, of which the first is not
counted: it wakes the peer, and brings the code back that a large copy has driven out of the caches.
The table has the medians. Calls without an array stand beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import moolink

SIZES = {
    "1 KB": 1 << 10,
    "16 KB": 1 << 14,
    "64 KB": 1 << 16,
    "256 KB": 1 << 18,
    "1 MB": 1 << 20,
    "16 MB": 16 << 20,
    "64 MB": 64 << 20,
    "256 MB": 256 << 20,
}


def serve() -> None:
    def arrived(sent: int, array: np.ndarray[Any, Any] | None) -> int:
        now = time.monotonic_ns()
        if array is not None and array[0] != array[-1]:
            raise ValueError("wrong bytes")
        return now - sent

    with moolink.Rpc("server") as rpc:
        rpc.define("arrived", arrived)
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        sys.stdin.read()


def measure(rpc: moolink.Rpc, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds, by size and kind."""
    lendable = {name: moolink.empty(size >> 2) for name, size in SIZES.items()}
    ordinary = {name: np.empty(size >> 2, np.float32) for name, size in SIZES.items()}

    def send(array: Any) -> float:
        future = rpc.async_("server", "arrived", time.monotonic_ns(), array)
        took = future.result() / 1e3
        future.released.result()
        return took

    kinds: dict[str, Callable[[str], float]] = {
        "no array": lambda _: send(None),
        "lent": lambda name: send(moolink.lend(lendable[name])),
        "ordinary": lambda name: send(ordinary[name]),
    }
    samples: dict[str, dict[str, list[float]]] = {n: {k: [] for k in kinds} for n in SIZES}
    for i in range(rounds):
        for name, size in SIZES.items():
            lendable[name].fill(i)
            ordinary[name].fill(i)
            for kind, run in kinds.items():
                calls = 3 if kind == "ordinary" and size > 1 << 22 else 11
                samples[name][kind] += [run(name) for _ in range(calls)][1:]
    return {
        name: {kind: statistics.median(took) for kind, took in by_kind.items()}
        for name, by_kind in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="a file for the medians in microseconds")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve()
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        with moolink.Rpc("client", timeout=60) as rpc:
            rpc.connect(server.stdout.readline().strip())
            rpc.sync("server", "arrived", 0, None)
            deadline = time.monotonic() + 5
            while rpc.explain("server")["path"] != "shm":
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no shm path: {rpc.explain('server')}")
                time.sleep(0.01)
            results = measure(rpc, arguments.rounds)
    finally:
        server.kill()
        server.wait()
    print(f"{'one way, µs':>12} {'no array':>10} {'lent':>10} {'ordinary':>10}")
    for name, row in results.items():
        print(f"{name:>12} {row['no array']:10.1f} {row['lent']:10.1f} {row['ordinary']:10.1f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
