"""Publishing weights to subscribers of this host, beside one copy of them in memory.

    python -m benchmarks.weights --megabytes 64 --subscribers 4 --turns 15

Each turn publishes a version and waits until every subscriber, a process of its own, has it and
has read one element of every array; the copy that it is compared with is made in the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np

import moolink

_SUBSCRIBER = """
import sys, moolink
peer = moolink.Rpc(sys.argv[2])
peer.connect(sys.argv[1])
with moolink.Subscriber(peer, "benchmark", "publisher") as subscriber:
    version = 0
    while True:
        weights = subscriber.wait(version)
        sum(array.flat[0] for array in weights.tree)
        version = weights.version + 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--subscribers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()

    arrays = [np.ones(1 << 20, np.uint8) for _ in range(options.megabytes)]
    copies = [np.zeros_like(array) for array in arrays]
    peer = moolink.Rpc("publisher")
    address = peer.listen("127.0.0.1:0")[0]
    started = [
        subprocess.Popen([sys.executable, "-c", _SUBSCRIBER, address, f"subscriber-{i}"])
        for i in range(options.subscribers)
    ]
    publishing, copying = [], []
    try:
        with moolink.Publisher(peer, "benchmark") as publisher:
            for turn in range(options.turns + 3):  # the first ones make memory warm
                begin = time.perf_counter()
                for source, target in zip(arrays, copies, strict=True):
                    np.copyto(target, source)
                copied = time.perf_counter()
                version = publisher.publish(arrays)
                publisher.wait_acknowledged(version, options.subscribers, 60)
                if turn >= 3:
                    copying.append(copied - begin)
                    publishing.append(time.perf_counter() - copied)
    finally:
        for process in started:
            process.kill()
            process.wait()
        peer.close()
    ratio = statistics.median(publishing) / statistics.median(copying)
    print(
        f"{options.megabytes} MB to {options.subscribers} subscribers: "
        f"{1e3 * statistics.median(publishing):.1f} ms; one copy: "
        f"{1e3 * statistics.median(copying):.1f} ms; ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
