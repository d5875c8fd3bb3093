"""Gradient rounds during backward(), of moolink and of DistributedDataParallel in turns.

    python -m benchmarks.backward --rate 1000 --width 1000 --layers 8 --rows 64

The two hosts are namespaces with a link of `rate` Mbit/s (tests/network/hosts.py; needs root). Each
has one learner, which uses one thread. The time is the slower learner's, from the start of
backward() until the mean is in the gradients. `backward` is backward() alone; `link` is the time
that the link needs for the gradients; `after` is moolink's reduce_gradients() after backward();
`during` is reduce_during_backward(); `ddp` is DistributedDataParallel with gloo. The output has the
medians of all trials except the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

from tests.network.hosts import Hosts, why_not
from tests.network.members import BROKER_PORT, RemoteMember, all_do

WAYS = ("backward", "after", "during", "ddp")


def main() -> None:
    """Measures and prints a line, or a JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=1000, help="Mbit/s; 0: no limit")
    parser.add_argument("--width", type=int, default=1000, help="features of each layer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    os.environ["MOOLINK_INSECURE"] = "1"  # gloo does not encrypt either
    rows: dict[str, list[float]] = {way: [] for way in WAYS}
    with Hosts(2, f"{args.rate:g}mbit" if args.rate else None) as hosts:
        hosts.start(0, "moolink.broker", f"{hosts.address(0)}:{BROKER_PORT}", "--first")
        shape = [str(n) for n in (args.width, args.layers, args.rows)]
        learners = [
            RemoteMember(hosts, host, f"{host}/2", "benchmarks.backward_member", shape)
            for host in range(2)
        ]
        size = all_do(learners, "formed", members=[])[0]
        for _ in range(args.trials + 1):
            for way in WAYS:
                rows[way].append(max(all_do(learners, "step", way=way)))
    row = {way: 1e3 * statistics.median(trials[1:]) for way, trials in rows.items()}
    row["link"] = 8e3 * size / (args.rate * 1e6) if args.rate else 0.0
    row["megabytes"] = size / 2**20
    if args.json:
        print(json.dumps(row))
        return
    print(
        "{megabytes:.1f} MB of gradients: backward {backward:.0f} ms, link {link:.0f} ms; after "
        "{after:.0f} ms, during {during:.0f} ms, ddp {ddp:.0f} ms".format(**row)
        + f"; during is {row['during'] / row['after']:.2f} of after and "
        f"{row['during'] / row['ddp']:.2f} of ddp"
    )


if __name__ == "__main__":
    main()
