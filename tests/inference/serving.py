"""A server in a process of its own: python -m tests.inference.serving ADDRESS NAME.

Its model counts the steps of each row; an input of 0.5 makes it take half a second.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import moolink


def model(batch: moolink.inference.InferenceBatch) -> tuple[Any, Any]:
    if (batch.inputs == 0.5).any():
        time.sleep(0.5)
    return batch.state + 1, batch.state + 1


if __name__ == "__main__":
    peer = moolink.Rpc(sys.argv[2])
    peer.listen("127.0.0.1:0")
    server = moolink.InferenceServer(peer, "policy", model, state=np.zeros((), np.int64))
    peer.connect(sys.argv[1])
    sys.stdin.read()  # until the test ends
