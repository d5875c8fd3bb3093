"""What a jax.Array costs beside the same numpy array, and all-reduces inside of jit beside calls.

    python benchmarks/jax_arrays.py [--rounds 200]

Sending: one call of 16 MB to another process of this host, whose handler takes what the receiver's
arrays= says; the time is that of the call until its reply. The numpy array is of the same memory as
the jax.Array, and one of numpy's own, which asks the kernel for huge pages.

In jit: two processes all-reduce in a compiled function and with the group's own all_reduce, in
turns; donated operands are reduced in place, others into memory that XLA gets afresh, as does the
compiled function that only adds 1. Beside them JAX's own psum among the same two processes, with
gloo (jax.distributed). "alone" is the same in a group of one, where nothing is waited
for: what the call itself costs, when it is done again and again; "beside two, alone" is that again,
in the processes that reduce with each other: before each turn these meet, and a processor that has
slept runs what JAX does for a dispatch several times slower.

Turns are mixed in each round, so that other load hits all alike. Microseconds: the median, and the
tenth from the best.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
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
    array = jnp.ones(LARGE, jnp.float32)
    given = {
        "jax.Array": array,
        "numpy, same memory": np.asarray(array),
        "numpy, its own": np.ones(LARGE, np.float32),
    }
    times: dict[str, list[float]] = {}
    for receiver in ("numpy", "jax"):
        server = start("--serve", receiver)
        assert server.stdout is not None
        with moolink.Rpc("client") as rpc:
            rpc.connect(server.stdout.readline().strip())
            for i in range(rounds + 5):
                for kind in sorted(given, key=lambda kind: hash((kind, i))):
                    time_ = took(lambda kind=kind: rpc.sync("server", "take", given[kind]))
                    if i >= 5:  # memory is warm then
                        times.setdefault(f"{kind} -> {receiver}", []).append(time_)
        server.kill()
        server.wait()
    return times


def turns_of(
    group: moolink.Group, size: int, alone: moolink.Group | None = None
) -> dict[str, Callable[[], Any]]:
    """What is measured for arrays of one size; also in a group of one, if it is given."""
    x, y = jnp.ones(size, jnp.float32), np.ones(size, np.float32)
    turns = turns_in(group, x, y)
    add = jax.jit(lambda x: x + 1)
    turns["jit(x + 1)"] = lambda: add(x).block_until_ready()
    if alone is not None:
        turns |= {f"alone, {kind}": turn for kind, turn in turns_in(alone, x, y).items()}
    return turns


def turns_in(group: moolink.Group, x: jax.Array, y: Any) -> dict[str, Callable[[], Any]]:
    """The all-reduces of one group."""
    kept = [x + 0]
    in_jit = jax.jit(lambda x: mj.all_reduce(group, "x", x, op="mean"))
    donated = jax.jit(
        lambda x: mj.all_reduce(group, "x", x, op="mean", donate=True), donate_argnums=0
    )

    def in_place() -> None:
        kept[0] = donated(kept[0]).block_until_ready()

    return {
        "in jit": lambda: in_jit(x).block_until_ready(),
        "in jit, donated": in_place,
        "group.all_reduce": lambda: group.all_reduce("x", y, op="mean").result(),
    }


def psum_of(size: int) -> Callable[[], Any]:
    """JAX's own sum of one array of each process."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("peers",))
    spec = jax.sharding.PartitionSpec("peers")
    psum = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "peers"),
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.sharding.PartitionSpec(),
        )
    )
    array = jax.make_array_from_process_local_data(
        jax.sharding.NamedSharding(mesh, spec), np.ones((1, size), np.float32)
    )
    return lambda: psum(array).block_until_ready()


def joined(rpc: moolink.Rpc, broker: str, name: str, members: int) -> moolink.Group:
    """A group that has so many members."""
    rpc.connect(broker)
    group = moolink.Group(rpc, name)
    group.wait_for_members(members)
    return group


def measure_turns(
    group: moolink.Group, alone: moolink.Group | None, rounds: int, where: str
) -> dict[str, list[float]]:
    """Times by size and kind; all members run the same turns."""
    times: dict[str, list[float]] = {}
    for label, size in SIZES.items():
        series = [turns_of(group, size, alone)]
        if jax.process_count() > 1:  # by itself, for gloo's threads go on a while
            series.append({"psum, gloo": psum_of(size)})
        for turns in series:
            for i in range(rounds + 20):
                # What comes after what is different each time, and the same at all members.
                for kind in random.Random(i).sample(list(turns), len(turns)):
                    group.barrier("turn").result()
                    time_ = took(turns[kind])
                    if i >= 20:
                        times.setdefault(f"{where}, {label}, {kind}", []).append(time_)
    group.barrier("end").result()
    return times


def member(broker: str, rank: int, meet: str, rounds: int) -> dict[str, list[float]]:
    """Times of one of two members, or of one that is alone."""
    if meet:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(meet, 2, rank)
    where = "two" if meet else "alone"
    with moolink.Rpc(f"{where}-{rank}") as rpc:
        group = joined(rpc, broker, where, 2 if meet else 1)
        alone = joined(rpc, broker, f"alone beside it, {rank}", 1) if meet else None
        return measure_turns(group, alone, rounds, where)


def measure_in_jit(rounds: int) -> dict[str, list[float]]:
    """Times at one of two members, and at one that is alone."""
    times: dict[str, list[float]] = {}
    with moolink.Broker(first=True) as broker, socket.socket() as probe:
        address = broker.listen("127.0.0.1:0")[0]
        probe.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        for meeting, members in ((meet, 2), ("", 1)):
            started = [
                start(
                    "--member",
                    address,
                    "--rank",
                    str(rank),
                    "--meet",
                    meeting,
                    "--rounds",
                    str(rounds),
                )
                for rank in range(members)
            ]
            printed = [process.communicate(timeout=600)[0] for process in started]
            times |= json.loads(printed[0].splitlines()[-1])
    return times


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if options.member:
        times = member(options.member, options.rank, options.meet, options.rounds)
        print(json.dumps(times))
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
        print(f"{kind:<32} median {row['median']:>9.1f}   tenth {row['tenth']:>9.1f}")
    for receiver in ("numpy", "jax"):
        for other in ("same memory", "its own"):
            sent = [table[f"{k} -> {receiver}"] for k in ("jax.Array", f"numpy, {other}")]
            ratios = [sent[0][which] / sent[1][which] for which in ("median", "tenth")]
            print(f"16 MB to {receiver}: {ratios[0]:.2f} ({ratios[1]:.2f}) of numpy, {other}")
    for where in ("two", "alone"):
        for label in SIZES:
            plain = table[f"{where}, {label}, group.all_reduce"]
            for kind in ("in jit", "in jit, donated"):
                row = table[f"{where}, {label}, {kind}"]
                added = [row[which] - plain[which] for which in ("median", "tenth")]
                print(f"{where}, {label}, {kind}: adds {added[0]:.1f} ({added[1]:.1f}) us")
                if where == "two":
                    row = table[f"two, {label}, alone, {kind}"]
                    its = table[f"two, {label}, alone, group.all_reduce"]
                    added = [row[which] - its[which] for which in ("median", "tenth")]
                    print(f"    beside two, alone: adds {added[0]:.1f} ({added[1]:.1f}) us")


if __name__ == "__main__":
    main()
