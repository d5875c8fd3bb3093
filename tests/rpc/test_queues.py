"""Queues of calls, and queues of the user's own items."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import moolink
from tests.rpc.conftest import Pair, Start
from tests.waiting import PROCESS_LIMIT, TIMEOUT, until


def in_thread(function: object) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(TIMEOUT)
    assert not thread.is_alive()


# --- of the user's own items


def test_items_come_out_in_order() -> None:
    queue = moolink.rpc.Queue()
    assert queue.empty()
    for i in range(5):
        queue.enqueue(i)
    assert queue.size() == 5
    assert [queue.get() for _ in range(5)] == list(range(5))
    assert queue.empty()


def test_get_waits_and_gives_up() -> None:
    queue = moolink.rpc.Queue()
    for timeout in (0, 0.01):
        with pytest.raises(moolink.TimeoutError, match="no item"):
            queue.get(timeout)
    got: list[object] = []
    thread = in_thread(lambda: got.append(queue.get()))
    until(lambda: len(queue._waiters) == 1, "the waiter")
    queue.enqueue("late")
    joined(thread)
    assert got == ["late"]


def test_a_full_queue_refuses() -> None:
    queue = moolink.rpc.Queue(max_size=2)
    queue.enqueue(1)
    queue.enqueue(2)
    with pytest.raises(moolink.QueueFull, match="max_size=2"):
        queue.enqueue(3)
    assert queue.get() == 1
    queue.enqueue(3)
    with pytest.raises(ValueError, match="at least 1"):
        moolink.rpc.Queue(max_size=0)


def test_a_closed_queue_is_emptied_first() -> None:
    queue = moolink.rpc.Queue()
    queue.enqueue(1)
    queue.close()
    queue.close()
    with pytest.raises(moolink.Closed):
        queue.enqueue(2)
    assert queue.get() == 1
    with pytest.raises(moolink.Closed):
        queue.get()
    assert list(queue) == []


def test_close_wakes_all_who_wait() -> None:
    queue = moolink.rpc.Queue()
    outcomes: list[str] = []

    def blocking() -> None:
        with pytest.raises(moolink.Closed):
            queue.get()
        outcomes.append("blocking")

    def iterating() -> None:
        outcomes.append(f"iterated {list(queue)}")

    async def awaiting() -> None:
        async def one() -> None:
            with pytest.raises(moolink.Closed):
                await queue
            outcomes.append("awaiting")

        async def several() -> None:
            outcomes.append(f"iterated {[item async for item in queue]}")

        await asyncio.gather(one(), several())

    threads = [in_thread(f) for f in (blocking, iterating, lambda: asyncio.run(awaiting()))]
    until(lambda: len(queue._waiters) == 4, "all four to wait")
    queue.close()
    for thread in threads:
        joined(thread)
    assert sorted(outcomes) == ["awaiting", "blocking", "iterated []", "iterated []"]


def test_every_item_goes_to_one_of_many_takers() -> None:
    queue = moolink.rpc.Queue()
    taken: list[int] = []

    async def tasks() -> None:
        async def take() -> None:
            async for item in queue:
                taken.append(item)

        await asyncio.gather(*(take() for _ in range(4)))

    def blocking() -> None:
        taken.extend(queue)

    takers = [in_thread(f) for f in [blocking] * 3 + [lambda: asyncio.run(tasks())] * 2]

    def put(start: int) -> None:
        for i in range(start, start + 1000):
            queue.enqueue(i)

    putters = [in_thread(lambda i=i: put(1000 * i)) for i in range(3)]
    for thread in putters:
        joined(thread)
    queue.close()
    for thread in takers:
        joined(thread)
    assert sorted(taken) == list(range(3000))


def test_a_cancelled_awaiter_eats_no_item() -> None:
    queue = moolink.rpc.Queue()

    async def main() -> None:
        async def take() -> object:
            return await queue

        for woken_first in (False, True):
            cancelled, other = asyncio.create_task(take()), asyncio.create_task(take())
            await asyncio.sleep(0)
            if woken_first:
                queue.enqueue("item")  # the first one is woken, and cancelled before it runs
                cancelled.cancel()
            else:
                cancelled.cancel()
                await asyncio.sleep(0)
                queue.enqueue("item")
            assert await asyncio.wait_for(other, TIMEOUT) == "item"
            assert cancelled.cancelled()
        assert queue.empty()

    asyncio.run(main())


def test_waiters_of_a_loop_that_was_closed_harm_nobody() -> None:
    queue = moolink.rpc.Queue()
    loop = asyncio.new_event_loop()
    gone = asyncio.ensure_future(queue, loop=loop)
    loop.run_until_complete(asyncio.sleep(0))
    assert not gone.done()
    loop.close()
    got: list[object] = []
    thread = in_thread(lambda: got.append(queue.get()))
    until(lambda: len(queue._waiters) == 2, "the second waiter")
    queue.enqueue("item")
    joined(thread)
    assert got == ["item"]
    gone._log_destroy_pending = False  # type: ignore[attr-defined]


def test_ctrl_c_ends_a_blocking_get(start: Start) -> None:
    child = start(
        """
        import moolink
        queue = moolink.rpc.Queue()
        print("ready", flush=True)
        try:
            queue.get()
        except KeyboardInterrupt:
            queue.enqueue("still there")
            print(queue.get(), len(queue._waiters), flush=True)
        """
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.05)  # Earlier, the signal may arrive before the wait; it is no less an interrupt.
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "still there 0\n"
    assert child.wait(TIMEOUT) == 0


# --- of calls


def serve(queue: moolink.rpc.Queue) -> threading.Thread:
    """Answers each call with its arguments, until the queue is closed."""

    def loop() -> None:
        for reply, args, kwargs in queue:
            reply((args, kwargs))

    return in_thread(loop)


def test_calls_are_answered_from_a_thread(pair: Pair) -> None:
    client, server = pair
    thread = serve(server.define_queue("q"))
    futures = [client.async_("server", "q", i, x=-i) for i in range(100)]
    assert [f.result() for f in futures] == [((i,), {"x": -i}) for i in range(100)]
    server.undefine("q")
    joined(thread)
    with pytest.raises(moolink.NoSuchFunction):
        client.sync("server", "q")


def test_calls_are_answered_from_asyncio(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q")

    async def main() -> None:
        futures = [client.async_("server", "q", i) for i in range(10)]

        async def answer() -> None:
            async for reply, (x,), _ in queue:
                reply(x * x)

        server_task = asyncio.create_task(answer())
        assert [await f for f in futures] == [i * i for i in range(10)]
        server.undefine("q")
        await asyncio.wait_for(server_task, TIMEOUT)

    asyncio.run(main())


def test_a_reply_may_be_an_error(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q")
    future = client.async_("server", "q")
    reply, _, _ = queue.get(TIMEOUT)
    reply.error(LookupError("not here"))
    with pytest.raises(moolink.RemoteError, match="not here") as caught:
        future.result()
    assert caught.value.remote_type == "LookupError"
    with pytest.raises(moolink.Error, match="already"):
        reply(1)


def test_a_queue_is_no_stream(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q")
    with pytest.raises(moolink.RemoteError, match="replies once"):
        list(client.stream("server", "q"))
    assert queue.empty()


def test_a_dropped_call_is_an_error_at_once(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q")
    future = client.async_("server", "q")
    queue.get(TIMEOUT)
    with pytest.raises(moolink.RemoteError, match="without a reply"):
        future.result()


def test_a_batch_can_be_refused(pair: Pair) -> None:
    client, server = pair
    server.define_deferred("busy", lambda reply, x: reply.refuse("no room"), batch_size=2)
    calls = [client.async_("server", "busy", np.zeros(1)) for _ in range(2)]
    for call in calls:
        with pytest.raises(moolink.QueueFull, match="no room") as caught:
            call.result(20)
        assert caught.value.ran == "no"


def test_queues_and_batchers_close_themselves() -> None:
    with moolink.rpc.Queue() as queue, moolink.Batcher(1) as batcher:
        queue.enqueue(1)
        batcher.stack(np.zeros(1))
    for closed in (lambda: queue.enqueue(2), lambda: batcher.stack(np.zeros(1))):
        with pytest.raises(moolink.Closed):
            closed()


def test_calls_beyond_max_size_are_refused(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", max_size=2)
    first = [client.async_("server", "q", i) for i in range(2)]
    with pytest.raises(moolink.QueueFull, match=r"queue of 'q' is full: max_size=2") as caught:
        client.sync("server", "q")
    assert caught.value.ran == "no"
    assert caught.value.function == "q"
    first[0].cancel()  # What nobody waits for makes room.
    until(lambda: queue._items[0].reply.cancelled(), "the cancellation")
    third = client.async_("server", "q", 2)
    until(lambda: queue.size() == 2 and not queue._items[0].reply.cancelled(), "the third call")
    serve(queue)
    assert first[1].result() == ((1,), {})
    assert third.result() == ((2,), {})


def test_calls_nobody_waits_for_are_left_out(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q")
    futures = [client.async_("server", "q", i) for i in range(3)]
    until(lambda: queue.size() == 3, "the calls")
    futures[0].cancel()
    futures[1].cancel()
    until(lambda: queue._items[1].reply.cancelled(), "the cancellation")
    reply, args, _ = queue.get(TIMEOUT)
    assert args == (2,)
    reply("served")
    assert futures[2].result() == "served"
    with pytest.raises(moolink.TimeoutError):
        queue.get(0)


def test_undefine_leaves_calls_that_wait_to_their_takers(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q")
    future = client.async_("server", "q", 1)
    until(lambda: queue.size() == 1, "the call")
    server.undefine("q")
    reply, args, _ = queue.get(TIMEOUT)
    reply(args)
    assert future.result() == (1,)
    with pytest.raises(moolink.Closed):
        queue.get(TIMEOUT)


def test_a_queue_that_goes_answers_its_calls(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q")
    future = client.async_("server", "q", 1)
    waiting = queue.get(TIMEOUT)
    queue.enqueue(waiting)
    server.undefine("q")
    del queue, waiting
    with pytest.raises(moolink.RemoteError, match="without a reply"):
        future.result()


def test_a_closed_queue_answers_its_callers(pair: Pair) -> None:
    client, server = pair
    server.define_queue("q").close()
    with pytest.raises(moolink.RemoteError, match="closed") as caught:
        client.sync("server", "q")
    assert caught.value.remote_type == "moolink.errors.Closed"


@pytest.mark.parametrize("how", ["close", "collect"])
def test_the_end_of_the_peer_closes_its_queues(how: str) -> None:
    rpc = moolink.Rpc()
    queue = rpc.define_queue("q")
    batches = rpc.define_queue("b", batch_size=2)
    threads = [serve(queue), serve(batches)]
    until(lambda: bool(queue._waiters and batches._waiters), "the consumers")
    if how == "close":
        rpc.close()
    else:
        del rpc
        gc.collect()
    for thread in threads:
        joined(thread)
    with pytest.raises(moolink.Closed):
        queue.get()


def test_a_name_is_defined_once(pair: Pair) -> None:
    _, server = pair
    server.define_queue("q")
    with pytest.raises(ValueError, match="defined already"):
        server.define_queue("q")
    with pytest.raises(ValueError, match="defined already"):
        server.define("q", print)
    server.undefine("q")
    assert not server.define_queue("q")._closed


def test_a_handler_that_waits_in_a_queue_lends_its_slot(start: Start) -> None:
    child = start(
        """
        import moolink
        moolink.set_max_threads(1)
        with moolink.Rpc("server") as server, moolink.Rpc("client", timeout=20) as client:
            client.connect(server.listen("127.0.0.1:0")[0])
            queue = moolink.rpc.Queue()
            server.define("take", queue.get)
            server.define("put", queue.enqueue)
            taken = client.async_("server", "take")
            client.sync("server", "put", "item")
            print(taken.result())
        """
    )
    out, err = child.communicate(timeout=PROCESS_LIMIT)
    assert out == "item\n", err


def test_queues_leave_nothing_behind() -> None:
    def sent() -> list[weakref.ref[object]]:
        with moolink.Rpc("server") as server, moolink.Rpc("client", timeout=20) as client:
            client.connect(server.listen("127.0.0.1:0")[0])
            queue = server.define_queue("q")
            thread = serve(queue)
            assert client.sync("server", "q", 1) == ((1,), {})
            server.undefine("q")
            joined(thread)
            return [weakref.ref(server), weakref.ref(queue)]

    sent()
    threads = threading.active_count()
    references = sent()
    gc.collect()
    assert [r() for r in references] == [None, None]
    assert threading.active_count() == threads


def test_a_forked_child_gets_an_error(start: Start) -> None:
    process = start(
        """
        import asyncio, os
        import moolink

        with moolink.Rpc("server") as server:
            queue = server.define_queue("f")
            queue._lock.acquire()  # as if another thread did
            child = os.fork()
            if child == 0:
                async def take():
                    await queue

                for ask in (queue.get, lambda: asyncio.run(take())):
                    try:
                        ask()
                    except moolink.Closed as error:
                        print("forked" in str(error), flush=True)
                queue.close()
                os._exit(0)
            os.waitpid(child, 0)
            queue._lock.release()
            print(queue.empty())
        """
    )
    assert process.communicate(timeout=PROCESS_LIMIT)[0] == "True\nTrue\nTrue\n"


def test_items_of_the_programs_own_beside_calls(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("f", max_size=4)
    own: list[object] = [None, (), ("a", 1, {}), (1, 2)]
    for item in own:
        queue.enqueue(item)
    with pytest.raises(moolink.QueueFull):
        queue.enqueue("one too many")
    with pytest.raises(moolink.QueueFull):
        client.sync("server", "f")
    assert [queue.get(TIMEOUT) for _ in own] == own
    future = client.async_("server", "f", 5)
    call = queue.get(TIMEOUT)
    queue.enqueue(call)  # for another consumer
    reply, (x,), kwargs = queue.get(TIMEOUT)
    queue.enqueue((reply, (x,), kwargs))
    reply, (x,), kwargs = queue.get(TIMEOUT)
    reply(x + 1)
    assert future.result() == 6


def test_a_queue_of_batches_takes_calls_only(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("f", 2)
    for item in (None, (1, 2, 3), ("a", (), {})):
        with pytest.raises(TypeError, match="takes calls only"):
            queue.enqueue(item)
    assert queue.empty()
    single = server.define_queue("g")
    futures = [client.async_("server", "g", i) for i in range(2)]
    for _ in futures:
        queue.enqueue(single.get(TIMEOUT))
    reply, (x,), _ = queue.get(TIMEOUT)
    reply(x)
    assert [f.result() for f in futures] == [0, 1]
