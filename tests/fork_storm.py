"""Forks again and again while threads receive: no child hangs, and none sees another's data.

python -m tests.fork_storm COUNT ends with status 0 if all went well.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import moolink

SIZES = (300 << 10, 1 << 20, 4 << 20)
A_HANG = 60  # seconds


class Receiver(threading.Thread):
    """Keeps the last few arrays of those that it receives, each full of one number."""

    def __init__(self, receive: Callable[[int], Any]) -> None:
        super().__init__(daemon=True)
        self._receive = receive
        self.kept: collections.deque[Any] = collections.deque(maxlen=3)
        self.wrong: list[str] = []
        self.done = False

    def run(self) -> None:
        n = 0
        while not self.done:
            n += 1
            array = self._receive(n)
            self.check(array)
            self.kept.append(array)

    def check(self, array: Any) -> None:
        if not (array == array[0]).all():
            self.wrong.append(f"an array holds {np.unique(array)}")


class Child:
    """What a child does with everything of its parent's."""

    def __init__(self, rpcs: list[moolink.Rpc], receivers: list[Receiver], future: Any) -> None:
        self._rpcs = rpcs
        self._receivers = receivers
        self._future = future

    def run(self) -> None:
        for receiver in self._receivers:
            for array in list(receiver.kept):
                receiver.check(array)
                if array.flags.writeable:
                    array[:] = 255
            receiver.kept.clear()
            assert not receiver.wrong, receiver.wrong
        for rpc in self._rpcs:
            try:
                rpc.sync("server", "echo", np.zeros(1 << 20, np.uint8))
            except moolink.Closed:
                pass
            else:
                raise AssertionError("a call of the parent's peer was not refused")
        with contextlib.suppress(moolink.Closed):  # another thread was reading it
            assert self._future.result() == 1
        for rpc in self._rpcs:
            rpc.close()
        with moolink.Rpc("own") as own:
            own.define("echo", lambda x: x)
            assert own.sync("own", "echo", 2) == 2


def fork(child: Child) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    signal.alarm(A_HANG)
    status = 0
    try:
        child.run()
    except BaseException:  # noqa: BLE001 - the exit status tells
        traceback.print_exc()
        sys.stderr.flush()
        status = 1
    os._exit(status)


def main(count: int) -> None:
    """Forks `count` children, one after the other."""
    server, client = moolink.Rpc("server", timeout=60), moolink.Rpc("client", timeout=60)
    server.define("echo", lambda x: x)
    server.define("stack", lambda x: x, batch_size=4, max_latency=0.001)
    client.connect(server.listen("127.0.0.1:0")[0])
    borrowed: collections.deque[Any] = collections.deque(maxlen=1)
    server.define("borrow", borrowed.append)

    def echo(n: int) -> Any:
        return client.sync("server", "echo", np.full(SIZES[n % 3], n % 250, np.uint8))

    def stack(n: int) -> Any:
        rows = [client.async_("server", "stack", np.full(1 << 20, n % 250, np.uint8))] * 4
        return rows[-1].result()

    def lend(n: int) -> Any:
        array = moolink.empty(SIZES[n % 3], "uint8")
        array[:] = n % 250
        client.sync("server", "borrow", moolink.lend(array))
        return borrowed.pop()

    receivers = [Receiver(receive) for receive in (echo, stack, lend)]
    for receiver in receivers:
        receiver.start()
    for n in range(count):
        future = client.async_("server", "echo", 1)
        future.wait()
        reader = threading.Thread(target=future.result)
        reader.start()
        status = os.waitstatus_to_exitcode(
            os.waitpid(fork(Child([client, server], receivers, future)), 0)[1]
        )
        reader.join()
        assert status == 0, f"child {n} ended with {status}"
        for receiver in receivers:
            assert not receiver.wrong, receiver.wrong
            assert receiver.is_alive()
    for receiver in receivers:
        receiver.done = True
        receiver.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))
