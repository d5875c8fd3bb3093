"""Allreduce over several hosts, beside what the links can carry: namespaces of one machine.

    python -m benchmarks.hosts --hosts 2 --members 2 --rate 1000 --megabytes 64 [--gloo]

Each host is a namespace with a link of so many Mbit/s in each direction (tests/network/hosts.py;
needs root); with a rate of 0 the links are as fast as the machine. The link's time is that of the
bytes which every host must send at least, 2 (n - 1) / n of the payload, at the link's rate, without
headers. The bare sockets send as much in both directions at once, and gloo reduces as much with as
many ranks on each host; their trials alternate with moolink's. An operation's time is its slowest
member's, from a common start, with ordinary numpy arrays.

The bars apply to float32 without compression. Two hosts with two members each must take at most
half of gloo's time for 1 MB and more, and with a rate at most 1.2 times the link's time. Four hosts
with one member each must take at most half of gloo's time for up to 4 KB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

from tests.network.hosts import Hosts, why_not
from tests.network.members import RemoteMember, all_do, members_on

# argv: 0 to listen or the other's address, bytes. Prints the seconds until all has gone both ways.
BARE = """
import socket, sys, threading, time
peer, size = sys.argv[1], int(sys.argv[2])
if peer == "0":
    listener = socket.create_server(("0.0.0.0", 7000))
    print("listening", flush=True)
    connection, _ = listener.accept()
else:
    connection = socket.create_connection((peer, 7000))
buffer = bytearray(1 << 20)
connection.sendall(b"x"), connection.recv(1)
begin = time.monotonic()
sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
sender.start()
left = size
while left > 0:
    left -= connection.recv_into(buffer, min(left, len(buffer)))
sender.join()
connection.sendall(b"x"), connection.recv(1)
print(time.monotonic() - begin)
"""


LINK_BAR = 1.2
GLOO_BAR = 0.5
KB = 1 / 1024  # in MB
TEXT = (
    "{hosts} hosts x {members}, {size}, {compress}: link {link_ms:.1f} ms, sockets "
    "{sockets_ms:.1f} ms, moolink {moolink_ms:.1f} ms (best {moolink_best_ms:.1f}), "
    "{of_the_link:.2f} x the link's, CPU {cpu_ms:.0f} ms, gloo {gloo_ms:.1f} ms, CPU "
    "{gloo_cpu_ms:.0f} ms, {of_gloo:.2f} x gloo's"
)


def bare(hosts: Hosts, size: int) -> float:
    """Seconds in which bare sockets bring so many bytes from host 0 to 1 and back at once."""
    command = ["python3", "-c", BARE]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    listener = subprocess.Popen(hosts.command(1, [*command, "0", str(size)]), **pipes)
    assert listener.stdout is not None
    listener.stdout.readline()
    dialler = subprocess.run(
        hosts.command(0, [*command, hosts.address(1), str(size)]), check=True, **pipes
    )
    return max(float(dialler.stdout), float(listener.communicate()[0]))


def trial(members: Sequence[RemoteMember], **arguments: Any) -> dict[str, float]:
    """One operation of all members: seconds of the slowest, and of all on the processors."""
    answers = all_do(list(members), "reduce", **arguments)
    assert len({answer["digest"] for answer in answers}) == 1
    return {
        "wall": max(answer["seconds"] for answer in answers),
        "cpu": sum(answer["cpu_seconds"] for answer in answers),
    }


def median(trials: Sequence[dict[str, float]], what: str) -> float:
    """Milliseconds; nan without trials. The first trial warmed pages up."""
    return 1e3 * statistics.median(row[what] for row in trials[1:]) if trials else math.nan


def main() -> None:
    """Sets the hosts up, measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--members", type=int, default=2, help="of each host")
    parser.add_argument(
        "--rate", type=float, default=1000, help="of each link, Mbit/s; 0: no limit"
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        nargs="+",
        help="default: 4 KB, 1, 16 and 64 MB; with one member on each host also 1 KB",
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compress", nargs="*", default=["none"], help="none, bf16, int8")
    parser.add_argument("--gloo", action="store_true", help="torch.distributed's gloo, too")
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    args = parser.parse_args()
    if args.megabytes is None:
        args.megabytes = [*([KB] if args.members == 1 else []), 4 * KB, 1, 16, 64]
    if reason := why_not():
        raise SystemExit(reason)
    os.environ["MOOLINK_INSECURE"] = "1"  # neither the bare sockets nor gloo encrypt
    places = {f"{h}-{m}": h for h in range(args.hosts) for m in range(args.members)}
    with Hosts(args.hosts, f"{args.rate:g}mbit" if args.rate else None) as hosts:
        members = members_on(hosts, places)
        ranks = gloo_on(hosts, list(places.values())) if args.gloo else []
        for megabytes in args.megabytes:
            measure(args, hosts, members, ranks, megabytes)


def gloo_on(hosts: Hosts, places: list[int]) -> list[RemoteMember]:
    """A rank of gloo on each of these hosts."""
    return [
        RemoteMember(hosts, host, f"{rank}/{len(places)}", "benchmarks.gloo_member")
        for rank, host in enumerate(places)
    ]


def measure(
    args: argparse.Namespace,
    hosts: Hosts,
    members: list[RemoteMember],
    ranks: list[RemoteMember],
    megabytes: float,
) -> None:
    """Measures one size, and prints a row for each compression."""
    count = int(megabytes * (1 << 20)) // 4
    least = int(2 * (args.hosts - 1) / args.hosts * count * 4)
    link = least * 8 / (args.rate * 1e6) if args.rate else math.nan
    sockets: list[float] = []
    gloo: list[dict[str, float]] = []
    rows: dict[str, list[dict[str, float]]] = {how: [] for how in args.compress}
    for _ in range(args.trials + 1):
        sockets.append(bare(hosts, least))
        what = {"count": count, "dtype": args.dtype}
        if ranks:
            gloo.append(trial(ranks, name="", **what))
        for how in args.compress:
            options = {} if how == "none" else {"compress": how}
            rows[how].append(trial(members, name=f"{megabytes} {how}", **what, **options))
    for how, trials in rows.items():
        wall = median(trials, "wall")
        row = {
            "hosts": args.hosts,
            "members": args.members,
            "megabytes": megabytes,
            "size": f"{megabytes:g} MB" if megabytes >= 1 else f"{1024 * megabytes:.4g} KB",
            "compress": how,
            "link_ms": 1e3 * link,
            "sockets_ms": 1e3 * statistics.median(sockets[1:]),
            "moolink_ms": wall,
            "moolink_best_ms": 1e3 * min(row["wall"] for row in trials),
            "cpu_ms": median(trials, "cpu"),
            "of_the_link": wall / (1e3 * link),
            "gloo_ms": median(gloo, "wall"),
            "gloo_cpu_ms": median(gloo, "cpu"),
            "of_gloo": wall / median(gloo, "wall"),
        }
        verdicts = [] if args.dtype != "float32" or how != "none" else verdicts_of(row)
        text = "\n".join([TEXT.format(**row), *verdicts])
        print(json.dumps(row) if args.json else text, flush=True)


def verdicts_of(row: dict[str, Any]) -> list[str]:
    """Returns a line for each bar that applies to the row and for which the run has figures."""
    place, megabytes = (row["hosts"], row["members"]), row["megabytes"]
    bars = []
    if place == (2, 2) and megabytes >= 1:
        bars = [("the link's", row["of_the_link"], LINK_BAR), ("gloo's", row["of_gloo"], GLOO_BAR)]
    elif place == (4, 1) and megabytes <= 0.004:
        bars = [("gloo's", row["of_gloo"], GLOO_BAR)]
    return [
        f"bar: {row['size']}: {quotient:.2f} of {whose} time, at most {bar}: "
        + ("met" if quotient <= bar else "MISSED")
        for whose, quotient, bar in bars
        if not math.isnan(quotient)
    ]


if __name__ == "__main__":
    main()
