"""What a jax.Array costs beside the same numpy array, and all-reduces inside of jit beside calls.

    python benchmarks/jax_arrays.py [--rounds 200]

Sending: one call of 16 MB to another process of this host, whose handler takes what the receiver's
arrays= says; the time is that of the call until its reply. In jit: two processes all-reduce 1 KB,
64 KB and 4 MB, in a compiled function and with the group's own all_reduce, in turns; and the
compiled function's own cost, without the group: one that adds 1. Turns are mixed in each round, so
that other load hits all alike. Microseconds, medians and tenths from the best.
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

import jax
import jax.numpy as jnp
import numpy as np

import moolink
import moolink.jax as mj

LARGE = 4 << 20  # elements, float32: 16 MB
SIZES = {"1 KB": 256, "64 KB": 16 << 10, "4 MB": 1 << 20}


def serve(arrays: str) -> None:
    """Takes arrays until its standard input ends."""
    with moolink.Rpc("server", arrays=arrays) as rpc:
        rpc.define("take", lambda array: None)
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        sys.stdin.read()


def start(*arguments: str) -> subprocess.Popen[str]:
    """This program, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def took(function: Callable[[], Any]) -> float:
    """Microseconds."""
    begin = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - begin) / 1e3


def measure_sending(rounds: int) -> dict[str, list[float]]:
    """Times of calls with 16 MB, by what is sent and what it is received as."""
    given = {"numpy": np.ones(LARGE, np.float32), "jax.Array": jnp.ones(LARGE, jnp.float32)}
    times: dict[str, list[float]] = {}
    for receiver in ("numpy", "jax"):
        server = start("--serve", receiver)
        assert server.stdout is not None
        with moolink.Rpc("client") as rpc:
            rpc.connect(server.stdout.readline().strip())
            for i in range(rounds + 5):
                for kind in sorted(given, reverse=i % 2 == 1):
                    time_ = took(lambda kind=kind: rpc.sync("server", "take", given[kind]))
                    if i >= 5:  # memory is warm then
                        times.setdefault(f"{kind} -> {receiver}", []).append(time_)
        server.kill()
        server.wait()
    return times


def member(broker: str, name: str, rounds: int) -> dict[str, list[float]]:
    """Times of all-reduces, by size and kind; both members run the same turns."""
    times: dict[str, list[float]] = {}
    with moolink.Rpc(name) as rpc:
        rpc.connect(broker)
        group = moolink.Group(rpc, "group")
        while len(group.members()) < 2:
            group.update()
        add = jax.jit(lambda x: x + 1)
        for label, size in SIZES.items():
            x = jnp.ones(size, jnp.float32)
            y = np.ones(size, np.float32)
            in_jit = jax.jit(lambda x: mj.all_reduce(group, "x", x))
            turns: dict[str, Callable[[], Any]] = {
                "in jit": lambda x=x, f=in_jit: f(x).block_until_ready(),
                "group.all_reduce": lambda y=y: group.all_reduce("x", y).result(),
                "jit(x + 1)": lambda x=x: add(x).block_until_ready(),
            }
            for i in range(rounds + 20):
                for kind, turn in turns.items():
                    group.barrier("turn").result()
                    time_ = took(turn)
                    if i >= 20:
                        times.setdefault(f"{label}, {kind}", []).append(time_)
        group.barrier("end").result()
    return times


def measure_in_jit(rounds: int) -> dict[str, list[float]]:
    """Times at one of two members."""
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0]
        other = start("--member", address, "--rounds", str(rounds))
        times = member(address, "here", rounds)
        other.wait(60)
    return times


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.member:
        member(options.member, "there", options.rounds)
        return
    times = measure_sending(max(20, options.rounds // 4)) | measure_in_jit(options.rounds)
    table = {
        kind: {"median": statistics.median(values), "tenth": sorted(values)[len(values) // 10]}
        for kind, values in times.items()
    }
    if options.json:
        print(json.dumps(table, indent=1))
        return
    for kind, row in table.items():
        print(f"{kind:<28} median {row['median']:>9.1f}   tenth {row['tenth']:>9.1f}")
    for receiver in ("numpy", "jax"):
        ratio = (
            table[f"jax.Array -> {receiver}"]["median"] / table[f"numpy -> {receiver}"]["median"]
        )
        print(f"16 MB to {receiver}: a jax.Array costs {ratio:.2f} of a numpy array")
    for label in SIZES:
        added = table[f"{label}, in jit"]["median"] - table[f"{label}, group.all_reduce"]["median"]
        print(f"{label}: in jit adds {added:.1f} us to the group's all_reduce")


if __name__ == "__main__":
    main()
