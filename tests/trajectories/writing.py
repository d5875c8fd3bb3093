"""A writer in a process of its own: python -m tests.trajectories.writing ADDRESS."""

from __future__ import annotations

import sys

import numpy as np

import moolink

if __name__ == "__main__":
    peer = moolink.Rpc("dying")
    peer.connect(sys.argv[1])
    writer = moolink.TrajectoryWriter(peer, "unrolls", "learner", ahead=3)
    for begin in range(3):
        item = {"obs": np.zeros((3, 4), np.uint8), "reward": np.zeros(3)}
        writer.put(item, begin=begin)
    sys.stdin.read()  # until the test ends
