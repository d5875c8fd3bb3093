"""A program whose garbage calls the library: python -m tests.rpc.destructors WHAT THREADS.

Its threads use objects of the library, while the collector runs at each of the first allocations of
a call in turn, and calls destructors that use the same objects, and others, and wait for other
threads. Prints "done".
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np

import moolink
from tests.waiting import PROCESS_LIMIT

Act = Callable[[], object]
TURNS = 60  # each has its collection an allocation later


class Noisy:
    """Calls the library from its destructor; a cycle, so that only the collector ends it."""

    silent = False

    def __init__(self, act: Act) -> None:
        self.act, self.me = act, self

    def __del__(self) -> None:
        if not Noisy.silent:
            with contextlib.suppress(moolink.Error):
                self.act()


@contextlib.contextmanager
def pair() -> Iterator[tuple[moolink.Rpc, moolink.Rpc]]:
    with moolink.Rpc("server", timeout=60) as server, moolink.Rpc("client", timeout=60) as client:
        server.define("echo", lambda x: x)
        client.connect(server.listen("127.0.0.1:0")[0])
        yield server, client


# Each returns the calls that the threads make in turn, and those that the destructors make.


def queues(server: moolink.Rpc, client: moolink.Rpc) -> list[Act]:
    queue, calls = moolink.rpc.Queue(), server.define_queue("calls", batch_size=2, max_latency=0.01)

    def serve() -> None:
        for reply, arguments, _ in calls:
            with contextlib.suppress(moolink.Error):  # it was cancelled
                reply(arguments[0])

    threading.Thread(target=serve, daemon=True).start()
    numbers = itertools.count()
    return [
        lambda: queue.enqueue(next(numbers)),
        lambda: queue.get(0),
        lambda: (queue.size(), queue.empty(), repr(queue)),
        # Without a wait: the thread that serves them may be in a destructor.
        lambda: client.async_("server", "calls", np.zeros(2)),
        lambda: client.async_("server", "calls", np.zeros(2)).cancel(),
    ]


def batchers(server: moolink.Rpc, client: moolink.Rpc) -> list[Act]:
    stacked, joined = moolink.Batcher(4), moolink.Batcher(3)
    return [
        lambda: stacked.stack({"x": np.ones(2), "name": "n"}),
        lambda: stacked.get(0),
        lambda: joined.cat(np.ones((5, 2))),
        lambda: joined.get(0),
        lambda: (stacked.size(), stacked.empty(), repr(joined)),
    ]


def one_batcher(server: moolink.Rpc, client: moolink.Rpc) -> list[Act]:
    batcher = moolink.Batcher(2)
    return [lambda: batcher.stack(np.ones(2))]


def replays(server: moolink.Rpc, client: moolink.Rpc) -> list[Act]:
    replay = moolink.Replay(moolink.replay.Table("t", 50))
    moolink.ReplayServer(server, replay, "remote")
    remote = moolink.ReplayClient(client, "remote", server="server")
    keys: list[int] = []

    def sample() -> None:
        batch = replay.sample(2, timeout=1)
        keys[:] = batch.keys.tolist()

    return [
        lambda: replay.insert({"x": 1.0}, timeout=1),
        lambda: remote.insert({"x": 2.0}, timeout=5),
        sample,
        lambda: remote.sample(2, timeout=5),
        lambda: replay.update_priorities(keys[:2], [1.0] * len(keys[:2])),
        lambda: (replay.stats(), remote.stats()),
    ]


def streams_of_weights(server: moolink.Rpc, client: moolink.Rpc) -> list[Act]:
    publisher = moolink.Publisher(server, "w")
    publisher.publish(np.zeros(4), 1)
    subscriber = moolink.Subscriber(client, "w", "server")
    subscriber.wait(timeout=30)
    versions = itertools.count(2)
    lock = threading.Lock()

    def publish() -> None:
        if lock.acquire(blocking=False):  # the program's own order of versions
            try:
                publisher.publish(np.zeros(4), next(versions))
            finally:
                lock.release()

    return [
        publish,
        subscriber.latest,
        lambda: subscriber.wait(1, timeout=5),
        lambda: (publisher.stats(), subscriber.stats()),
    ]


def trajectories(server: moolink.Rpc, client: moolink.Rpc) -> list[Act]:
    queue = moolink.TrajectoryQueue(server, "unrolls", max_size=8)
    writer = moolink.TrajectoryWriter(client, "unrolls", "server", ahead=4)
    putting = threading.Lock()

    def put() -> None:
        if putting.acquire(blocking=False):  # a writer is for one thread at a time
            try:
                writer.put({"x": np.zeros(3)}, 0, timeout=5)
            finally:
                putting.release()

    return [put, lambda: queue.get(1, timeout=0.05), queue.stats, lambda: repr(writer)]


def models(server: moolink.Rpc, client: moolink.Rpc) -> list[Act]:
    serving = moolink.InferenceServer(
        server, "policy", lambda batch: (batch.inputs, batch.state), state=np.zeros(2)
    )
    mine = moolink.InferenceClient(client, "policy", "server")

    def infer() -> None:
        with contextlib.suppress(ValueError):  # one request at a time
            mine.infer(np.zeros((2, 3)))

    return [infer, serving.stats, lambda: client.sync("server", "echo", 1)]


def reports(server: moolink.Rpc, client: moolink.Rpc) -> list[Act]:
    counter = moolink.metrics.counter("noisy_total")
    return [
        lambda: counter.inc(),
        moolink.metrics.collect,
        lambda: (client.stats(), server.peers(), client.explain("server")),
        lambda: moolink.dump(),
    ]


KINDS = [queues, batchers, one_batcher, replays, streams_of_weights, trajectories, models, reports]


def churn(acts: list[Act], rpc: moolink.Rpc) -> None:
    others: list[Act] = [
        lambda: rpc.async_("server", "echo", 1),
        lambda: rpc.sync("server", "echo", 2),
    ]
    for turn in range(TURNS):
        for number, act in enumerate(acts):
            for _ in range(2):
                Noisy((acts + others)[(turn + number) % (len(acts) + len(others))])
                gc.set_threshold(gc.get_count()[0] + 1 + turn, 2, 2)
                with contextlib.suppress(moolink.Error):
                    act()


def main(what: str, count: int) -> None:
    faulthandler.dump_traceback_later(PROCESS_LIMIT - 20, exit=True)
    with pair() as (server, client):
        acts = next(kind for kind in KINDS if kind.__name__ == what)(server, client)
        threads = [threading.Thread(target=churn, args=(acts, client)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        Noisy.silent = True
        gc.set_threshold(700, 10, 10)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
