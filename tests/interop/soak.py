"""Whether memory stays flat while arrays go from each framework to each.

    python -m tests.interop.soak [--small 1000000] [--large 10000] [--from numpy] [--to jax]

A client sends arrays of 64 numbers and arrays of 16 MB to a server in a process of its own, which
takes them as the framework says. A line for each pair: calls a second, and the resident memory of
both processes after the first tenth and at the end. Exits with status 1 if any grew by 8 MB over
the small ones or by four arrays over the large ones.
"""

from __future__ import annotations

import argparse
import collections
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import moolink

FRAMEWORKS = ("numpy", "torch", "jax")
SMALL = 64  # elements, float32
LARGE = 4 << 20
ALLOWED = {SMALL: 8, LARGE: 68}  # MB
IN_FLIGHT = 32


def resident(pid: int | str = "self") -> float:
    """MB of a process's memory that are in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def array_of(framework: str, size: int) -> Any:
    """An array of ones."""
    if framework == "numpy":
        import numpy

        return numpy.ones(size, numpy.float32)
    if framework == "torch":
        import torch

        return torch.ones(size)
    import jax.numpy

    return jax.numpy.ones(size, "float32")


def serve(arrays: str) -> None:
    """Takes arrays until its standard input ends."""
    with moolink.Rpc("server", arrays=arrays) as rpc:

        def take(array: Any) -> None:
            kind = type(array).__module__.partition(".")[0]
            if kind.removesuffix("lib") != arrays or array[-1] != 1:
                raise ValueError(f"a {kind} array")

        rpc.define("take", take)
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        sys.stdin.read()


def send(rpc: moolink.Rpc, array: Any, count: int, in_flight: int) -> None:
    """Sends it that often."""
    calls: collections.deque[Any] = collections.deque()
    for _ in range(count):
        calls.append(rpc.async_("server", "take", array))
        if len(calls) == in_flight:
            calls.popleft().result()
    while calls:
        calls.popleft().result()


def soak(sender: str, receiver: str, small: int, large: int) -> bool:
    """Sends arrays from one framework to another; returns whether memory stayed flat."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.interop.soak", "--serve", receiver],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        with moolink.Rpc("client") as rpc:
            rpc.connect(server.stdout.readline().strip())
            flat = True
            for size, count, in_flight in ((SMALL, small, IN_FLIGHT), (LARGE, large, 2)):
                array = array_of(sender, size)
                send(rpc, array, count - count * 9 // 10, in_flight)
                before = resident(), resident(server.pid)
                begin = time.monotonic()
                send(rpc, array, count * 9 // 10, in_flight)
                rate = count * 9 // 10 / (time.monotonic() - begin)
                after = resident(), resident(server.pid)
                grown = max(b - a for a, b in zip(before, after, strict=True))
                flat = flat and grown < ALLOWED[size]
                print(
                    f"{sender:>5} -> {receiver:<5} {count:>8} x {size * 4:>8} B {rate:>8.0f}/s   "
                    f"sender {before[0]:.0f} -> {after[0]:.0f} MB, "
                    f"receiver {before[1]:.0f} -> {after[1]:.0f} MB",
                    flush=True,
                )
            return flat
    finally:
        server.kill()
        server.wait()


def main() -> int:
    """Soaks the pairs asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, default=1_000_000)
    parser.add_argument("--large", type=int, default=10_000)
    parser.add_argument("--from", dest="sender", choices=FRAMEWORKS)
    parser.add_argument("--to", dest="receiver", choices=FRAMEWORKS)
    parser.add_argument("--serve", choices=FRAMEWORKS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    flat = True
    for sender in [options.sender] if options.sender else FRAMEWORKS:
        for receiver in [options.receiver] if options.receiver else FRAMEWORKS:
            flat = soak(sender, receiver, options.small, options.large) and flat
    return int(not flat)


if __name__ == "__main__":
    sys.exit(main())
