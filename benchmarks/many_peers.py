"""Many peers of one process that all call one other: nothing may be lost; memory a peer.

    python benchmarks/many_peers.py

A server in a process of its own; the peers share one context of this one. All make their calls, so
many in flight each, and the replies are checked. Memory is what a peer adds to the resident memory
of both processes together (PSS: shared pages count once), connected and after its calls.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import psutil

import moolink

SERVER = """
import moolink, sys
with moolink.Rpc("server", transports=[sys.argv[1]], insecure=True) as server:
    server.define("echo", lambda x: x)
    print(server.listen(sys.argv[2])[0], flush=True)
    sys.stdin.read()
"""


def memory(processes: list[psutil.Process]) -> int:
    """Returns the resident bytes of all of them; what they share is counted once."""
    return sum(process.memory_full_info().pss for process in processes)


def main() -> None:
    """Prints the figures of one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=1000, help="of each peer")
    parser.add_argument("--in-flight", type=int, default=10, help="of each peer")
    parser.add_argument("--transport", choices=["tcp", "shm"], default="tcp")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    address = "127.0.0.1:0" if args.transport == "tcp" else "ipc://many-peers"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, args.transport, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    bound = server.stdout.readline().strip()
    both = [psutil.Process(), psutil.Process(server.pid)]
    before = memory(both)
    began = time.monotonic()
    peers = [
        moolink.Rpc(f"peer-{i}", transports=[args.transport], timeout=300, insecure=True)
        for i in range(args.peers)
    ]
    for peer in peers:
        peer.connect(bound)
    for i, future in enumerate([peer.async_("server", "echo", i) for i, peer in enumerate(peers)]):
        assert future.result() == i
    connected = memory(both)
    print(f"{args.peers} peers over {args.transport} connected in {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    done = 0
    while done < args.calls:
        batch = range(done, min(done + args.in_flight, args.calls))
        futures = [(n, peer.async_("server", "echo", n)) for n in batch for peer in peers]
        for n, future in futures:
            assert future.result() == n
        done = batch.stop
    seconds = time.monotonic() - began
    after = memory(both)
    total = args.peers * args.calls
    print(f"{total} calls, all answered, in {seconds:.1f} s: {total / seconds:,.0f} calls/s")
    print(
        f"memory a peer, both processes: {(connected - before) / args.peers / 1024:.0f} KB", end=""
    )
    print(f" connected, {(after - before) / args.peers / 1024:.0f} KB after its calls")
    for peer in peers:
        peer.close()
    server.stdin.close()
    server.wait()


if __name__ == "__main__":
    main()
