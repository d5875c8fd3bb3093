"""Serves one of each object until a line comes, and then closes the objects or all of it."""

from __future__ import annotations

import sys

import numpy as np

import moolink
from moolink.replay import Table
from moolink.weights import ParameterServer


def main() -> None:
    rpc = moolink.Rpc("server")
    rpc.define("answers", lambda: 1)
    calls = rpc.define_queue("queue")
    replay = moolink.Replay(Table("t", 100))
    publisher = moolink.Publisher(rpc, "weights")
    publisher.publish({"w": np.ones(2)}, 0)
    served = [
        moolink.ReplayServer(rpc, replay),
        moolink.TrajectoryQueue(rpc, "unroll", max_size=1),
        publisher,
        ParameterServer(rpc, "parameters", {"w": np.ones(2)}, lambda tree, pushed: tree),
        moolink.InferenceServer(rpc, "policy", lambda batch: batch.inputs),
    ]
    print(rpc.listen("127.0.0.1:0")[0], flush=True)
    how = sys.stdin.readline().strip()
    for one in served:
        one.close()
    rpc.undefine("answers")
    del calls
    rpc.undefine("queue")
    if how == "objects":
        print("closed", flush=True)
        sys.stdin.readline()
    rpc.close()


if __name__ == "__main__":
    main()
