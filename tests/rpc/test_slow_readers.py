"""A peer that asks for more than it reads."""

from __future__ import annotations

import itertools
import signal
import threading

import numpy as np

import moolink
from tests.rpc.conftest import Start
from tests.waiting import until

CALLS = 60
RESULT = 64 << 20

CLIENT = f"""
    import sys
    import moolink

    with moolink.Rpc("client", transports=["tcp"], timeout=60) as client:
        client.connect(sys.stdin.readline().strip())
        results = [client.async_("server", "make") for _ in range({CALLS})]
        for result in results:
            assert result.result().nbytes == {RESULT}
            result = None
        print("done", flush=True)
"""


def test_calls_of_a_peer_that_does_not_read_wait_before_their_handlers_run(start: Start) -> None:
    array = np.zeros(RESULT, np.uint8)  # lent: all results are this memory
    stopped = threading.Event()
    begun = itertools.count()

    def make() -> object:
        next(begun)
        stopped.wait()
        return moolink.lend(array)

    with moolink.Rpc("server", transports=["tcp"], timeout=60) as server:
        server.define("make", make)
        server.define("ping", lambda: "pong")
        client = start(CLIENT)
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(server.listen("127.0.0.1:0")[0] + "\n")
        client.stdin.flush()
        until(lambda: server.stats()["calls_received"] == CALLS, "all calls")
        client.send_signal(signal.SIGSTOP)
        stopped.set()
        held = "waits until its caller takes the results that wait for it"
        until(lambda: held in moolink.dump(), "calls that wait for their caller")
        # 16 results make 1 GB. Those of the other workers may follow, as may those on their way.
        assert 16 <= next(begun) < CALLS - 10
        with moolink.Rpc("other", transports=["tcp"], timeout=20) as other:
            other.connect(server.addresses()[0])
            assert other.sync("server", "ping") == "pong"
        client.send_signal(signal.SIGCONT)
        assert client.stdout.readline() == "done\n"
    assert next(begun) == CALLS + 1  # this count and the one above among them


def test_close_ends_an_undefine_that_waits_for_held_calls(start: Start) -> None:
    array = np.zeros(RESULT, np.uint8)
    stopped = threading.Event()

    def make() -> object:
        stopped.wait()
        return moolink.lend(array)

    server = moolink.Rpc("server", transports=["tcp"], timeout=60)
    server.define("make", make)
    client = start(CLIENT)
    assert client.stdin is not None
    client.stdin.write(server.listen("127.0.0.1:0")[0] + "\n")
    client.stdin.flush()
    until(lambda: server.stats()["calls_received"] == CALLS, "all calls")
    client.send_signal(signal.SIGSTOP)
    stopped.set()
    held = "waits until its caller takes the results that wait for it"
    until(lambda: held in moolink.dump(), "calls that wait for their caller")
    undefining = threading.Thread(target=server.undefine, args=("make",))
    undefining.start()
    server.close()
    undefining.join(60)
    assert not undefining.is_alive()
    client.kill()
