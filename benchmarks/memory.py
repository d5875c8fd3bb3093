"""Peak memory of two peers that train a large torch model, without parameters and gradients.

Each peer is a process of this host. The benchmark reads its memory 20 times a second, once as
resident pages (RSS: a page that both peers map counts twice) and once with each page divided by the
number of processes that map it (PSS). The start is the time before round 6: one peer trains alone,
needs a bucket for each of the two contributions to a round, and copies its model for the other.
The bar applies to each process, during the whole run: its PSS is at most 1.2 times the model's
size, without parameters and gradients.

    python benchmarks/memory.py --megabytes 1024 --views
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from process_tree import rss_and_pss

import moolink
import moolink.torch

PARAMETERS = 8
START_ROUNDS = 6
BAR = 1.2  # times the model's size, without parameters and gradients


def peer(args: argparse.Namespace) -> None:
    """Trains once its parent has read the memory that the parameters take."""
    torch.set_num_threads(1)
    count = args.megabytes * (1 << 20) // (4 * PARAMETERS)
    leaves = [torch.ones(count, requires_grad=True) for _ in range(PARAMETERS)]
    # Imports modules whose memory must not count as the model's.
    optimizer = torch.optim.SGD(leaves, lr=1e-3, foreach=False)
    print("ready", flush=True)
    sys.stdin.readline()
    with moolink.Rpc() as rpc, moolink.Group(rpc, "memory") as group:
        rpc.connect(args.broker)
        accumulator = moolink.torch.Accumulator(
            "model", leaves, group=group, gradient_as_bucket_view=args.views
        )
        accumulator.set_virtual_batch_size(2)
        settled = False
        for step in accumulator.steps(optimizer, until=lambda t: t.get("turns", 0) >= args.rounds):
            for leaf in leaves:
                leaf.sum().backward()
            step.reduce(batch_size=1, counters={"turns": 1})
            if not settled and accumulator.model_version() >= START_ROUNDS:
                settled = True
                print(time.monotonic(), flush=True)


def main() -> None:
    """Starts a broker and two peers, and prints the peaks as multiples of the model's size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256, help="size of the model")
    parser.add_argument("--rounds", type=int, default=40, help="contributions of both peers")
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("--broker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.broker:
        peer(args)
        return
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0]
        command = [sys.executable, __file__, *sys.argv[1:], "--broker", address]
        pipe = subprocess.PIPE
        peers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
        for child in peers:
            assert child.stdout.readline() == "ready\n"
        before = [rss_and_pss(child.pid) for child in peers]
        for child in peers:
            print(file=child.stdin, flush=True)
        samples: list[list[tuple[float, int, int]]] = [[] for _ in peers]
        while all(child.poll() is None for child in peers):
            for child, seen in zip(peers, samples, strict=True):
                seen.append((time.monotonic(), *rss_and_pss(child.pid)))
            time.sleep(0.05)
        settled = [float(child.communicate(timeout=60)[0].split()[-1]) for child in peers]
    for at, seen in enumerate(samples):
        report(at, seen, before[at], settled[at], args.megabytes << 20)


def report(
    peer: int,
    seen: list[tuple[float, int, int]],
    before: tuple[int, int],
    settled: float,
    model: int,
) -> None:
    """Prints one peer's peaks and its verdict.

    Args:
        seen: samples: time, RSS and PSS in bytes.
        before: RSS and PSS in bytes with only the parameters.
        settled: the time at which the start ended.
        model: bytes of the parameters.
    """
    peak = 0.0
    for name, samples in (
        ("start", [s for s in seen if s[0] < settled]),
        ("rounds", [s for s in seen if s[0] >= settled]),
    ):
        rss, pss = (
            (max(s[which + 1] for s in samples) - before[which]) / model - 1 for which in (0, 1)
        )
        peak = max(peak, pss)
        print(
            f"peer {peer}, {name}: without parameters and gradients "
            f"RSS {rss:.2f}, PSS {pss:.2f} models"
        )
    verdict = "met" if peak <= BAR else "MISSED"
    print(f"bar: peer {peer}: PSS {peak:.2f} models at its peak, at most {BAR}: {verdict}")


if __name__ == "__main__":
    main()
