"""A subscriber in a process of its own: python -m tests.weights.subscribing ADDRESS HOST."""

from __future__ import annotations

import sys

import moolink
from moolink.weights import subscriber

if __name__ == "__main__":
    address, host = sys.argv[1:]
    subscriber.host_key = lambda: host  # type: ignore[attr-defined]
    peer = moolink.Rpc("dying")
    peer.connect(address)
    one = moolink.Subscriber(peer, "w", "learner")
    sys.stdin.read()  # until the test ends
