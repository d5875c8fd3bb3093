"""A random program: threads make objects of the library, use them and close them in random orders.

    python -m tests.storms.random_program SEED [LIMIT]

Each operation ends with a result or an error of the library, and the program ends by itself. One
that does not end in LIMIT seconds (300) prints the stacks of its threads and ends with status 1. A
seed decides what each thread does; how the threads interleave differs from run to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import itertools
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import moolink
from moolink.replay import Fifo, Table
from tests.env_pool.pool_environments import Counter
from tests.numpy_accumulator import NumpyAccumulator

THREADS = 3
STEPS = 40  # of each thread
CALL_LIMIT = 3.0  # seconds: `Rpc.set_timeout`
WAIT = 0.3  # seconds that an operation waits
KEPT = 6  # objects of a kind; the program closes one before it makes another

# Of a closed or missing peer, a taken name, an argument of a closed object.
EXPECTED = (moolink.Error, ValueError)

step = itertools.count()


class Program:
    """The objects of all threads, and the operations of a thread on them."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Any]] = {}
        self.addresses: list[str] = []
        self.unexpected: list[str] = []

    def some(self, chance: random.Random, kind: str) -> Any:
        """One of the objects of a kind, or None."""
        objects = list(self.objects.get(kind, ()))
        return chance.choice(objects) if objects else None

    def keep(self, kind: str, made: Any) -> None:
        self.objects.setdefault(kind, []).append(made)

    def give_up(self, chance: random.Random, kind: str) -> None:
        """Closes an object, or only drops it, in a thread of its own or here."""
        objects = self.objects.get(kind, [])
        try:
            given_up = objects.pop(chance.randrange(len(objects)))
        except (ValueError, IndexError):  # there is none, or another thread was faster
            return
        if chance.random() < 0.3 or not hasattr(given_up, "close"):
            return
        if chance.random() < 0.2:
            threading.Thread(target=self.attempt, args=(given_up.close,)).start()
        else:
            given_up.close()

    def attempt(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except EXPECTED:
            pass
        except Exception:  # noqa: BLE001 - reported at the end
            self.unexpected.append(traceback.format_exc())

    def run(self, seed: int, thread: int) -> None:
        chance = random.Random(f"{seed} {thread}")
        for _ in range(STEPS):
            kind, make, use = chance.choice(KINDS)
            action = chance.random()
            if action < 0.35:
                if len(self.objects.get(kind, ())) >= KEPT:
                    self.attempt(lambda kind=kind: self.give_up(chance, kind))  # type: ignore[misc]
                self.attempt(lambda kind=kind, make=make: self.keep(kind, make(self, chance)))  # type: ignore[misc]
            elif action < 0.85:
                it = self.some(chance, kind)
                if it is not None:
                    self.attempt(lambda use=use, it=it: use(self, chance, it))  # type: ignore[misc]
                del it
            elif action < 0.97:
                self.attempt(lambda kind=kind: self.give_up(chance, kind))  # type: ignore[misc]
            else:
                gc.collect()


def need(it: Any) -> Any:
    """An object that this operation needs: raises an expected error if there is none."""
    if it is None:
        raise ValueError("the program has none yet")
    return it


# Peers, their calls, and futures.


def make_rpc(program: Program, chance: random.Random) -> moolink.Rpc:
    transports = chance.choice([["shm", "tcp"], ["tcp"]])
    rpc = moolink.Rpc(f"p{next(step)}", transports=transports, timeout=CALL_LIMIT)
    waiting: list[moolink.rpc.RpcDeferredReturn] = []

    def relay(name: str, value: Any) -> Any:
        return rpc.sync(name, "echo", value)

    def items(count: int) -> Any:
        yield from range(count)

    async def sleeper(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    rpc.define("echo", lambda value: value)
    rpc.define("relay", relay)
    rpc.define("items", items)
    rpc.define("sleep", time.sleep)
    rpc.define("async", sleeper)
    rpc.define("batch", lambda value: value, batch_size=4)
    rpc.define_deferred("later", lambda deferred: waiting.append(deferred))
    for address in chance.sample(program.addresses, min(3, len(program.addresses))):
        rpc.connect(address)
    program.addresses.append(rpc.listen("127.0.0.1:0")[0])
    return rpc


def use_rpc(program: Program, chance: random.Random, rpc: moolink.Rpc) -> None:
    other = need(program.some(chance, "rpc"))
    name = other.get_name() if chance.random() < 0.9 else "nobody"
    value = chance.choice([7, "text", np.ones(10), np.ones(300_000, np.float32), [None, {}]])
    if chance.random() < 0.2:
        lent = moolink.empty((20_000,), np.float32)
        value = moolink.lend(lent)
    calls: list[tuple[Any, ...]] = [
        ("echo", value),
        ("relay", name, value),
        ("sleep", 0.05),
        ("async", 0.05),
        ("batch", np.ones(3)),
        ("later",),
        ("missing",),
    ]
    way = chance.randrange(5)
    if way == 0:
        for item in rpc.stream(name, "items", 30):
            if item == 20 and chance.random() < 0.5:
                break
    elif way == 1:
        names = [o.get_name() for o in list(program.objects["rpc"])]
        next(iter(rpc.async_many(names, "echo", value).values())).wait(WAIT)
    elif way == 2:
        rpc.async_callback(name, "echo", lambda result, error: None, value)
    else:
        for call in chance.choices(calls, k=3):
            program.keep("future", rpc.async_(name, *call))
        if chance.random() < 0.2:
            rpc.connect(chance.choice(program.addresses))


def use_future(program: Program, chance: random.Random, future: moolink.Future) -> None:
    way = chance.randrange(5)
    if way == 0:
        future.result(WAIT)
    elif way == 1:
        future.wait(WAIT)
    elif way == 2:
        future.cancel()
    elif way == 3:
        future.add_done_callback(lambda ended: ended.exception())
    else:

        async def wait() -> None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(future, WAIT)

        asyncio.run(wait())


def make_future(program: Program, chance: random.Random) -> moolink.Future:
    rpc = need(program.some(chance, "rpc"))
    return rpc.async_(need(program.some(chance, "rpc")).get_name(), "echo", chance.random())


def make_queue(program: Program, chance: random.Random) -> moolink.rpc.Queue:
    if chance.random() < 0.3:
        return moolink.rpc.Queue(max_size=2)
    return need(program.some(chance, "rpc")).define_queue("queue", max_size=3)


def use_queue(program: Program, chance: random.Random, queue: moolink.rpc.Queue) -> None:
    caller, owner = program.some(chance, "rpc"), program.some(chance, "rpc")
    if caller is not None and owner is not None:
        program.keep("future", caller.async_(owner.get_name(), "queue", 1))
    taken = queue.get(WAIT)
    if isinstance(taken, tuple) and callable(taken[0]):
        taken[0](1)


# Groups.


def make_broker(program: Program, chance: random.Random) -> moolink.Broker:
    rpc = moolink.Rpc("broker", timeout=CALL_LIMIT)
    for address in chance.sample(program.addresses, min(3, len(program.addresses))):
        rpc.connect(address)
    program.addresses.append(rpc.listen("127.0.0.1:0")[0])
    return moolink.Broker(rpc)


def make_group(program: Program, chance: random.Random) -> moolink.Group:
    group = moolink.Group(need(program.some(chance, "rpc")), chance.choice("gh"))
    group.set_timeout(CALL_LIMIT)
    return group


def use_group(program: Program, chance: random.Random, group: moolink.Group) -> None:
    group.update()
    size = chance.choice([3, 50_000])
    future = group.all_reduce(chance.choice("xyz"), np.ones(size, np.float32))
    if chance.random() < 0.3:
        future.cancel()
    future.wait(WAIT)


def make_accumulator(program: Program, chance: random.Random) -> NumpyAccumulator:
    return NumpyAccumulator("model", np.zeros(100, np.float32), need(program.some(chance, "group")))


def use_accumulator(program: Program, chance: random.Random, it: NumpyAccumulator) -> None:
    it.update()
    if it.wants_gradients():
        it.gradients[:] = 1
        it.reduce_gradients(1)
    elif it.has_gradients():
        it.zero_gradients()


# The data plane.


def make_replay(program: Program, chance: random.Random) -> moolink.Replay:
    return moolink.Replay(Table("t", 50, Fifo()))


def use_replay(program: Program, chance: random.Random, replay: Any) -> None:
    for _ in range(5):
        replay.insert({"x": np.ones(100, np.float32)}, timeout=WAIT)
    replay.sample(3, timeout=WAIT)


def make_replay_server(program: Program, chance: random.Random) -> moolink.ReplayServer:
    replay = need(program.some(chance, "replay"))
    return moolink.ReplayServer(need(program.some(chance, "rpc")), replay)


def make_replay_client(program: Program, chance: random.Random) -> moolink.ReplayClient:
    server = need(program.some(chance, "rpc")).get_name()
    return moolink.ReplayClient(need(program.some(chance, "rpc")), server=server)


def make_writer(program: Program, chance: random.Random) -> Any:
    return need(program.some(chance, "replay")).writer(keep=4)


def use_writer(program: Program, chance: random.Random, writer: Any) -> None:
    with alone(writer):
        writer.append({"x": np.ones(100, np.float32)})


def make_publisher(program: Program, chance: random.Random) -> moolink.Publisher:
    return moolink.Publisher(need(program.some(chance, "rpc")), "weights")


def use_publisher(program: Program, chance: random.Random, it: moolink.Publisher) -> None:
    it.publish({"w": np.ones(50_000, np.float32)})


def make_subscriber(program: Program, chance: random.Random) -> moolink.Subscriber:
    publisher = need(program.some(chance, "rpc")).get_name()
    return moolink.Subscriber(need(program.some(chance, "rpc")), "weights", publisher)


def use_subscriber(program: Program, chance: random.Random, it: moolink.Subscriber) -> None:
    it.latest()
    it.wait(1, WAIT)


def make_batcher(program: Program, chance: random.Random) -> moolink.Batcher:
    return moolink.Batcher(3, max_batches=2)


def use_batcher(program: Program, chance: random.Random, it: moolink.Batcher) -> None:
    for _ in range(2):
        it.stack({"x": np.ones(10)}, timeout=WAIT)
    it.get(WAIT)


def make_envs(program: Program, chance: random.Random) -> moolink.VectorEnv:
    if program.objects.get("envs"):
        raise ValueError("one is enough: its processes take long to start")
    return moolink.VectorEnv(Counter, 2, num_workers=1)


def use_envs(program: Program, chance: random.Random, envs: moolink.VectorEnv) -> None:
    with alone(envs):
        envs.reset()
        for _ in range(3):
            envs.step(np.zeros(2, np.int64))


def make_server(program: Program, chance: random.Random) -> moolink.InferenceServer:
    def model(batch: moolink.inference.InferenceBatch) -> Any:
        return {"y": batch.inputs["x"] + 1}

    return moolink.InferenceServer(need(program.some(chance, "rpc")), "policy", model)


def use_server(program: Program, chance: random.Random, it: moolink.InferenceServer) -> None:
    repr(it)


def make_client(program: Program, chance: random.Random) -> moolink.InferenceClient:
    server = need(program.some(chance, "rpc")).get_name()
    return moolink.InferenceClient(need(program.some(chance, "rpc")), "policy", [server])


def use_client(program: Program, chance: random.Random, it: moolink.InferenceClient) -> None:
    with alone(it):
        it.infer({"x": np.ones((2, 3), np.float32)}, timeout=WAIT)


_busy: dict[int, threading.Lock] = {}


@contextlib.contextmanager
def alone(it: Any) -> Any:
    """For objects that one thread may use at a time. (Any thread may close them.)"""
    lock = _busy.setdefault(id(it), threading.Lock())
    if not lock.acquire(blocking=False):
        raise ValueError("another thread uses it")
    try:
        yield
    finally:
        lock.release()


def use_nothing(program: Program, chance: random.Random, it: Any) -> None:
    repr(it)


KINDS: list[tuple[str, Callable[..., Any], Callable[..., None]]] = [
    ("rpc", make_rpc, use_rpc),
    ("rpc", make_rpc, use_rpc),
    ("future", make_future, use_future),
    ("future", make_future, use_future),
    ("queue", make_queue, use_queue),
    ("broker", make_broker, use_nothing),
    ("group", make_group, use_group),
    ("accumulator", make_accumulator, use_accumulator),
    ("replay", make_replay, use_replay),
    ("replay server", make_replay_server, use_nothing),
    ("replay client", make_replay_client, use_replay),
    ("writer", make_writer, use_writer),
    ("publisher", make_publisher, use_publisher),
    ("subscriber", make_subscriber, use_subscriber),
    ("batcher", make_batcher, use_batcher),
    ("environments", make_envs, use_envs),
    ("server", make_server, use_server),
    ("client", make_client, use_client),
]


def main(seed: int, limit: float = 300) -> int:
    faulthandler.dump_traceback_later(limit, exit=True)
    moolink.set_log_level("error")
    program = Program()
    chance = random.Random(seed)
    program.attempt(lambda: program.keep("broker", make_broker(program, chance)))
    for _ in range(2):
        program.attempt(lambda: program.keep("rpc", make_rpc(program, chance)))
    threads = [threading.Thread(target=program.run, args=(seed, i)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while chance.random() < 0.95 and any(program.objects.values()):
        kind = chance.choice([kind for kind, objects in program.objects.items() if objects])
        program.attempt(lambda kind=kind: program.give_up(chance, kind))  # type: ignore[misc]
    for text in program.unexpected:
        print(text, file=sys.stderr)
    return int(bool(program.unexpected))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *map(float, sys.argv[2:])))
