"""Calls that are served together."""

from __future__ import annotations

import asyncio
import collections
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import moolink
from tests.rpc.conftest import Pair
from tests.waiting import PATIENCE, until

Observation = collections.namedtuple("Observation", ["image", "reward"])
moolink.register(Observation)


def calls(client: moolink.Rpc, name: str, arguments: list[Any]) -> list[moolink.Future]:
    return [client.async_("server", name, x) for x in arguments]


def waiting(queue: moolink.Queue, count: int) -> None:
    until(lambda: queue.size() == count, f"{count} calls")


def error_of(future: moolink.Future) -> moolink.RemoteError:
    with pytest.raises(moolink.RemoteError) as caught:
        future.result()
    return caught.value


# --- batches of a fixed size


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_are_stacked_and_replies_split(pair: Pair, framework: str) -> None:
    client, server = pair
    seen: list[Any] = []

    def double(x: Any, *, scale: Any) -> Any:
        seen.append((x, scale))
        return {"doubled": x * 2, "sum": x.sum(1)}

    server.define("double", double, batch_size=4)
    rows = [np.full(3, i, np.float32) for i in range(8)]
    sent = [torch.from_numpy(row) for row in rows] if framework == "torch" else rows
    futures = [client.async_("server", "double", x, scale=i) for i, x in enumerate(sent)]
    for row, future in zip(rows, futures, strict=True):
        result = future.result()
        assert type(result["doubled"]) is type(sent[0])
        np.testing.assert_array_equal(result["doubled"], row * 2)
        assert float(result["sum"]) == row.sum()
    assert len(seen) == 2
    for x, scale in seen:
        assert type(x) is type(sent[0])
        assert tuple(x.shape) == (4, 3)
        assert [float(s) for s in x[:, 0]] == scale


def test_nests_are_kept(pair: Pair) -> None:
    client, server = pair
    seen: list[Any] = []
    server.define("see", lambda x: seen.append(x), batch_size=2)
    items = [
        {
            "obs": (np.full((2, 2), i, np.uint8), [np.float32(i), "label"]),
            "state": {"h": torch.full((3,), i, dtype=torch.bfloat16)},
            "done": bool(i),
            "none": None,
        }
        for i in range(2)
    ]
    assert [f.result() for f in calls(client, "see", items)] == [None, None]
    (batch,) = seen
    image, (scalar, label) = batch["obs"]
    assert type(batch["obs"]) is tuple
    assert image.shape == (2, 2, 2)
    assert image.dtype == np.uint8
    assert scalar.dtype == np.float32
    assert sorted(scalar.tolist()) == [0, 1]
    assert label == ["label", "label"]
    assert batch["state"]["h"].shape == (2, 3)
    assert batch["state"]["h"].dtype == torch.bfloat16
    assert sorted(batch["done"]) == [False, True]
    assert batch["none"] == [None, None]


def test_deferred_batches(pair: Pair) -> None:
    client, server = pair
    given: list[Any] = []

    def later(reply: Any, x: np.ndarray) -> None:
        assert len(reply) == len(x) == 3
        given.append((reply, x))

    server.define_deferred("later", later, batch_size=3)
    futures = calls(client, "later", [np.array(i) for i in range(3)])
    until(lambda: len(given) == 1, "the batch")
    assert not any(f.done() for f in futures)
    reply, x = given[0]
    reply(x + 10)
    assert [int(f.result()) for f in futures] == [10, 11, 12]
    with pytest.raises(moolink.Error, match="already"):
        reply(x)


def test_coroutine_functions_serve_batches(pair: Pair) -> None:
    client, server = pair

    async def square(x: np.ndarray) -> np.ndarray:
        await asyncio.sleep(0)
        return x * x

    server.define("square", square, batch_size=2)
    assert [int(f.result()) for f in calls(client, "square", [np.array(3), np.array(4)])] == [9, 16]


def test_queues_of_batches(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=3)
    futures = calls(client, "q", [np.array(i) for i in range(7)])
    for start in (0, 3):
        reply, (x,), kwargs = queue.get(PATIENCE)
        assert x.tolist() == [start, start + 1, start + 2]
        assert kwargs == {}
        reply(x + 1)
    assert [int(f.result()) for f in futures[:6]] == [1, 2, 3, 4, 5, 6]
    waiting(queue, 1)
    with pytest.raises(moolink.TimeoutError):
        queue.get(0.01)


def test_an_incomplete_batch_is_served_in_time(pair: Pair) -> None:
    client, server = pair
    shapes: list[tuple[int, ...]] = []

    def see(x: np.ndarray, label: list[str]) -> np.ndarray:
        shapes.append((*x.shape, len(label)))
        return x + 1

    server.define("short", see, batch_size=4, max_latency=0.02)
    server.define("padded", see, batch_size=4, max_latency=0.02, pad=True)
    for name in ("short", "padded"):
        futures = [client.async_("server", name, np.full(2, i), "a") for i in range(3)]
        assert [f.result().tolist() for f in futures] == [[1, 1], [2, 2], [3, 3]]
    short, padded = shapes[0], shapes[-1]
    assert short[0] == short[2] <= 3
    assert padded == (4, 2, 4)


def test_padding_is_zero(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=4, max_latency=0, pad=True)
    future = client.async_("server", "q", np.full(2, 7, np.int32), "label", torch.ones(1))
    reply, (x, label, t), _ = queue.get(PATIENCE)
    assert x.tolist() == [[7, 7], [0, 0], [0, 0], [0, 0]]
    assert label == ["label", None, None, None]
    assert t.tolist() == [[1], [0], [0], [0]]
    assert len(reply) == 1
    reply(x[:, 0])
    assert future.result() == 7


def test_a_queue_wakes_for_an_incomplete_batch(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=4, max_latency=0.01)

    async def main() -> None:
        for i in range(3):
            future = client.async_("server", "q", i)
            reply, (x,), _ = await asyncio.wait_for(queue, PATIENCE)
            assert x == [i]
            reply(x)
            assert await future == i

    asyncio.run(main())


def test_the_first_batch_served_settles_what_calls_look_like(pair: Pair) -> None:
    client, server = pair
    server.define("f", lambda x: x, batch_size=2)
    for f in calls(client, "f", [np.zeros(3), np.ones(3)]):
        f.result()
    future = client.async_("server", "f", np.zeros(3))
    for wrong, text in [
        (np.zeros(4), r"args\[0\]: expected \(3,\) float64, got \(4,\) float64"),
        (np.zeros(3, np.float32), r"args\[0\]: expected \(3,\) float64, got \(3,\) float32"),
        ({"x": np.zeros(3)}, r"args\[0\]: expected"),
        (torch.zeros(3), r"args\[0\]: expected"),
    ]:
        with pytest.raises(moolink.RemoteError, match=text) as caught:
            client.sync("server", "f", wrong)
        assert "does not fit into the batch" in str(caught.value)
        assert caught.value.remote_type == "ValueError"
    with pytest.raises(moolink.RemoteError, match="args"):
        client.sync("server", "f", np.zeros(3), np.zeros(3))
    with pytest.raises(moolink.RemoteError, match="kwargs"):
        client.sync("server", "f", np.zeros(3), y=1)
    client.sync("server", "f", np.ones(3))
    assert future.result().tolist() == [0, 0, 0]


def test_a_wrong_call_does_not_settle_it(pair: Pair) -> None:
    client, server = pair

    def only_vectors(x: np.ndarray) -> np.ndarray:
        if x.ndim != 2:
            raise TypeError("no vectors")
        return x

    server.define("f", only_vectors, batch_size=3)
    queue_less = calls(client, "f", [np.zeros(()), np.zeros(3), np.ones(3), np.full(3, 2.0)])
    assert "expected (3,) float64" in str(error_of(queue_less[0]))
    assert [f.result()[0] for f in queue_less[1:]] == [0, 1, 2]
    server.define("g", only_vectors, batch_size=1)
    assert error_of(client.async_("server", "g", np.zeros(()))).remote_type == "TypeError"
    assert client.sync("server", "g", np.zeros(3)).tolist() == [0, 0, 0]


def test_calls_nobody_waits_for_leave_their_batch(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=3)
    futures = calls(client, "q", [0, 1])
    waiting(queue, 2)
    futures[0].cancel()
    until(lambda: queue._items[0][1].reply.cancelled(), "the cancellation")
    futures += calls(client, "q", [2, 3])
    reply, (x,), _ = queue.get(PATIENCE)
    assert x == [1, 2, 3]
    reply(x)
    assert [f.result() for f in futures[1:]] == [1, 2, 3]


def test_undefine_fails_calls_that_wait_for_others(pair: Pair) -> None:
    client, server = pair
    server.define("f", lambda x: x, batch_size=2)
    queue = server.define_queue("q", batch_size=2)
    futures = [client.async_("server", "f", 1), client.async_("server", "q", 1)]
    waiting(queue, 1)
    until(lambda: server.stats()["calls_running"] == 0, "the other call")
    server.undefine("f")
    server.undefine("q")
    for future in futures:
        assert error_of(future).remote_type == "moolink.errors.Closed"
    with pytest.raises(moolink.Closed):
        queue.get(PATIENCE)


def test_max_size_counts_calls(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=4, max_size=2, max_latency=1000)
    futures = calls(client, "q", [0, 1])
    waiting(queue, 2)
    with pytest.raises(moolink.QueueFull):
        client.sync("server", "q", 2)
    futures[0].cancel()
    until(lambda: queue._items[0][1].reply.cancelled(), "the cancellation")
    client.async_("server", "q", 3)
    until(lambda: [c.args for _, c in queue._items] == [(1,), (3,)], "the room")


def test_many_threads_fill_batches(pair: Pair) -> None:
    client, server = pair
    server.define("f", lambda x: x + 1, batch_size=5)
    wrong: list[Any] = []

    def call(start: int) -> None:
        futures = calls(client, "f", [np.full(100, start + i) for i in range(100)])
        results = [int(f.result()[0]) for f in futures]
        if results != list(range(start + 1, start + 101)):
            wrong.append(results)

    threads = [threading.Thread(target=call, args=(1000 * i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong


# --- dynamic batches


def test_dynamic_batches_take_what_waits(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=4, dynamic_batching=True)
    futures = calls(client, "q", [np.full(2, i) for i in range(6)])
    waiting(queue, 6)
    for size in (4, 2):
        reply, (x,), _ = queue.get(PATIENCE)
        assert x.shape == (size, 2)
        assert len(reply) == size
        reply(x * 10)
    assert [f.result().tolist() for f in futures] == [[10 * i] * 2 for i in range(6)]
    future = client.async_("server", "q", np.zeros((7, 7)))  # another shape, in its own batch
    reply, (x,), _ = queue.get(PATIENCE)
    assert x.shape == (1, 7, 7)
    reply(x)
    assert future.result().shape == (7, 7)


def test_dynamic_batches_without_a_limit(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", dynamic_batching=True)
    for count in (1, 100):
        futures = calls(client, "q", [np.array(i) for i in range(count)])
        waiting(queue, count)
        reply, (x,), _ = queue.get(PATIENCE)
        assert x.tolist() == list(range(count))
        reply(x)
        assert [int(f.result()) for f in futures] == list(range(count))


def test_a_consumer_that_waits_gets_the_first_call_at_once(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=4, dynamic_batching=True)

    async def main() -> None:
        task = asyncio.ensure_future(queue)
        await asyncio.sleep(0)
        assert len(queue._waiters) == 1
        future = client.async_("server", "q", 5)
        reply, (x,), _ = await asyncio.wait_for(task, PATIENCE)
        assert x == [5]
        reply(x)
        assert await future == 5

    asyncio.run(main())


def test_buckets(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", dynamic_batching=True, bucket_sizes=(1, 2, 4, 8))
    for count, size in [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (11, 8)]:
        futures = calls(client, "q", [np.full(2, i + 1) for i in range(count)])
        waiting(queue, count)
        reply, (x,), _ = queue.get(PATIENCE)
        assert x.shape == (size, 2)
        assert not x[count:].any()
        reply(x * 2)
        if count > 8:
            reply, (x,), _ = queue.get(PATIENCE)
            assert x.shape == (4, 2)
            reply(x * 2)
        assert [f.result().tolist() for f in futures] == [[2 * i + 2] * 2 for i in range(count)]


@pytest.mark.parametrize("kind", ["plain", "async", "deferred"])
def test_handlers_get_what_came_while_they_served(pair: Pair, kind: str) -> None:
    client, server = pair
    started, release = threading.Event(), threading.Event()
    sizes: list[int] = []
    running: list[int] = []

    def plain(x: np.ndarray) -> np.ndarray:
        running.append(1)
        assert len(running) == 1, "two batches at once"
        sizes.append(len(x))
        started.set()
        release.wait(PATIENCE)
        running.pop()
        return x * 2

    async def as_task(x: np.ndarray) -> np.ndarray:
        return await asyncio.to_thread(plain, x)

    options: dict[str, Any] = {"batch_size": 4, "dynamic_batching": True}
    if kind == "deferred":
        server.define_deferred("f", lambda reply, x: reply(plain(x)), **options)
    else:
        server.define("f", plain if kind == "plain" else as_task, **options)
    futures = calls(client, "f", [np.array(0)])
    assert started.wait(PATIENCE)
    futures += calls(client, "f", [np.array(i) for i in range(1, 8)])
    until(lambda: server.stats()["calls_received"] == 8, "the calls")
    until(lambda: server.stats()["calls_running"] <= 1, "them to gather")
    release.set()
    assert [int(f.result()) for f in futures] == [2 * i for i in range(8)]
    assert sizes == [1, 4, 3]


def test_a_dynamic_handler_that_raises_goes_on(pair: Pair) -> None:
    client, server = pair

    def invert(x: list[int]) -> list[float]:
        return [1 / value for value in x]

    server.define("f", invert, dynamic_batching=True)
    assert error_of(client.async_("server", "f", 0)).remote_type == "ZeroDivisionError"
    assert client.sync("server", "f", 4) == 0.25


def test_batches_are_made_on_the_device(pair: Pair) -> None:
    client, server = pair
    seen: list[Any] = []
    server.define("f", lambda *x: seen.extend(x), batch_size=2, device="meta", max_latency=0)
    client.sync("server", "f", torch.zeros(3), np.zeros((2, 2), np.float32))
    assert [x.device.type for x in seen] == ["meta", "meta"]
    assert [tuple(x.shape) for x in seen] == [(1, 3), (1, 2, 2)]


def test_cat(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=6, dynamic_batching=True, mode="cat")
    sizes = [2, 0, 3, 1, 9, 1]
    futures = [
        client.async_("server", "q", np.full((n, 2), i), str(i)) for i, n in enumerate(sizes)
    ]
    waiting(queue, 6)
    for expected in ([2, 0, 3, 1], [9], [1]):
        reply, (x, label), _ = queue.get(PATIENCE)
        assert reply.sizes == expected
        assert x.shape == (sum(expected), 2)
        assert label == [str(row[0]) for row in x]
        reply((x + 1, [f"call of {n}" for n in expected]))
    for i, (n, future) in enumerate(zip(sizes, futures, strict=True)):
        rows, text = future.result()
        assert rows.tolist() == [[i + 1, i + 1]] * n
        assert text == f"call of {n}"
    for wrong, text in [
        ((np.zeros(()), "x"), "out of range"),
        ((1, "x"), "holds no array"),
    ]:
        future = client.async_("server", "q", *wrong)
        waiting(queue, 1)
        with pytest.raises(moolink.TimeoutError):
            queue.get(0)
        assert text in str(error_of(future))


def test_cat_pads_rows(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", dynamic_batching=True, mode="cat", bucket_sizes=(4, 8))
    futures = calls(client, "q", [torch.ones(2, 3), torch.ones(3, 3)])
    waiting(queue, 2)
    reply, (x,), _ = queue.get(PATIENCE)
    assert tuple(x.shape) == (8, 3)
    assert float(x.sum()) == 15
    reply(x)
    assert [tuple(f.result().shape) for f in futures] == [(2, 3), (3, 3)]


def test_a_call_that_does_not_fit_fails_alone(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=8, dynamic_batching=True)
    futures = calls(client, "q", [np.zeros(4), np.zeros(3), np.ones(3), {"a": 1}, np.ones(3)])
    waiting(queue, 5)
    reply, (x,), _ = queue.get(PATIENCE)
    assert x.shape == (3, 3)
    reply(x)
    assert [futures[i].result()[0] for i in (1, 2, 4)] == [0, 1, 1]
    assert "args[0]: expected (3,) float64, got (4,) float64" in str(error_of(futures[0]))
    assert "args[0]: expected (3,) float64 (numpy), got a dict" in str(error_of(futures[3]))


def test_what_a_batch_holds_is_the_consumers_own(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=2, dynamic_batching=True)
    batches = []
    for i in range(4):
        client.async_("server", "q", np.full(50_000, i))
        reply, (x,), _ = queue.get(PATIENCE)
        reply(None)
        batches.append(x)
    assert [int(x[0, 0]) for x in batches] == [0, 1, 2, 3]


# --- replies


def reply_to(pair: Pair, count: int, value: Any) -> list[moolink.Future]:
    """Has `count` calls answered with one reply; returns their futures, all done."""
    client, server = pair
    queue = server.define_queue("reply", dynamic_batching=True)
    futures = calls(client, "reply", list(range(count)))
    waiting(queue, count)
    reply, _, _ = queue.get(PATIENCE)
    reply(value)
    for future in futures:
        future.wait(PATIENCE)
    server.undefine("reply")
    return futures


def values(futures: list[moolink.Future]) -> list[Any]:
    return [f.result() for f in futures]


def test_values_go_to_all(pair: Pair) -> None:
    for value in (None, 5, "text", (), {}, b"bytes", np.float32(2)):
        assert values(reply_to(pair, 2, value)) == [value, value]


def test_lists_go_entry_by_entry(pair: Pair) -> None:
    assert values(reply_to(pair, 3, [1, "two", None])) == [1, "two", None]
    assert values(reply_to(pair, 3, (1, "two", None))) == [1, "two", None]
    arrays = values(reply_to(pair, 2, [np.zeros((2, 2)), np.ones(3)]))
    assert [a.shape for a in arrays] == [(2, 2), (3,)]
    assert values(reply_to(pair, 2, [[1, 2], {"x": 3}])) == [[1, 2], {"x": 3}]


def test_structures_of_arrays_are_split(pair: Pair) -> None:
    reply = (np.arange(2), Observation(torch.arange(4).reshape(2, 2), [0.5, 1.5]), {"all": None})
    for i, (number, observation, rest) in enumerate(values(reply_to(pair, 2, reply))):
        assert number == i
        image, reward = observation
        assert image.tolist() == [2 * i, 2 * i + 1]
        assert reward == i + 0.5
        assert rest == {"all": None}


def test_exceptions_are_raised_at_their_calls_alone(pair: Pair) -> None:
    for reply in (
        [1, ValueError("bad"), 3],
        (1, ValueError("bad"), 3),
    ):
        futures = reply_to(pair, 3, reply)
        assert [futures[0].result(), futures[2].result()] == [1, 3]
        assert "bad" in str(error_of(futures[1]))
    futures = reply_to(pair, 2, {"x": np.arange(2), "y": [LookupError("gone"), "here"]})
    assert error_of(futures[0]).remote_type == "LookupError"
    assert futures[1].result() == {"x": 1, "y": "here"}
    for future in reply_to(pair, 2, ValueError("all")):
        assert "all" in str(error_of(future))


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (np.zeros((3, 2)), r"the reply: an array has one row .* expected 2, got shape \(3, 2\)"),
        ([1, 2, 3], "the reply: a list has one entry .* expected 2, got 3"),
        ({"x": (np.zeros(2), [1])}, r"the reply\['x'\]\[1\]: a list has one entry .* expected 2"),
    ],
)
def test_replies_that_cannot_be_split_fail_all(pair: Pair, reply: Any, text: str) -> None:
    for future in reply_to(pair, 2, reply):
        with pytest.raises(moolink.RemoteError, match=text):
            future.result()


def test_what_the_handler_raises_is_raised_at_all(pair: Pair) -> None:
    client, server = pair

    def fail(x: Any) -> None:
        raise LookupError("no")

    async def fail_later(x: Any) -> None:
        raise LookupError("no")

    def fail_deferred(reply: Any, x: Any) -> None:
        raise LookupError("no")

    server.define("a", fail, batch_size=2)
    server.define("b", fail_later, batch_size=2)
    server.define_deferred("c", fail_deferred, batch_size=2)
    for name in "abc":
        for future in calls(client, name, [1, 2]):
            error = error_of(future)
            assert error.remote_type == "LookupError"
            assert "in fail" in error.remote_traceback


def test_a_dropped_batch_is_an_error_at_all(pair: Pair) -> None:
    client, server = pair
    server.define_deferred("drop", lambda reply, x: None, batch_size=2)
    for future in calls(client, "drop", [1, 2]):
        assert "without a reply" in str(error_of(future))


def test_a_batch_nobody_waits_for_is_cancelled(pair: Pair) -> None:
    client, server = pair
    started, cancelled = threading.Event(), threading.Event()

    async def sleep(x: Any) -> None:
        started.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server.define("sleep", sleep, batch_size=2)
    futures = calls(client, "sleep", [1, 2])
    assert started.wait(PATIENCE)
    futures[0].cancel()
    futures[1].cancel()
    assert cancelled.wait(PATIENCE)


# --- options and ends


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "at least 1"),
        ({"max_latency": 1.0}, "batch_size"),
        ({"pad": True}, "batch_size"),
        ({"batch_size": 2, "pad": True}, "max_latency"),
        ({"batch_size": 2, "max_latency": -1}, "negative"),
        ({"batch_size": 2.5}, "an int, got 2.5"),
        ({"batch_size": True}, "an int, got True"),
        ({"dynamic_batching": True, "bucket_sizes": (1.5, 3)}, "an int, got 1.5"),
    ],
)
def test_options_that_make_no_sense(pair: Pair, options: dict[str, Any], text: str) -> None:
    _, server = pair
    with pytest.raises(ValueError, match=text):
        server.define("f", print, **options)
    with pytest.raises(ValueError, match=text):
        server.define_queue("f", **options)
    server.define("f", print)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "cat"}, "dynamic_batching"),
        ({"bucket_sizes": (1, 2)}, "dynamic_batching"),
        ({"batch_size": 4, "max_size": 3}, "no room"),
        ({"batch_size": 2, "mode": "cat"}, "dynamic_batching"),
        ({"batch_size": 2, "bucket_sizes": (1, 2)}, "dynamic_batching"),
        ({"dynamic_batching": True, "mode": "pile"}, "stack"),
        ({"dynamic_batching": True, "bucket_sizes": ()}, "rise"),
        ({"dynamic_batching": True, "bucket_sizes": (2, 1)}, "rise"),
        ({"dynamic_batching": True, "bucket_sizes": (1, 2), "batch_size": 3}, "does not fit"),
        ({"dynamic_batching": True, "max_latency": 1}, "fixed size"),
    ],
)
def test_queue_options_that_make_no_sense(pair: Pair, options: dict[str, Any], text: str) -> None:
    _, server = pair
    with pytest.raises(ValueError, match=text):
        server.define_queue("f", **options)


def test_batches_leave_nothing_behind(pair: Pair) -> None:
    client, server = pair

    class Handler:
        def __call__(self, x: np.ndarray) -> np.ndarray:
            batches.append(weakref.ref(x))
            return x

    batches: list[weakref.ref[np.ndarray]] = []
    handler = Handler()
    seen = weakref.ref(handler)
    server.define("f", handler, batch_size=2, max_latency=60)
    for f in calls(client, "f", [np.zeros(3), np.ones(3)]):
        f.result()
    server.undefine("f")
    del handler
    gc.collect()
    until(lambda: seen() is None and batches[0]() is None, "the handler and its batch", poll=0.05)


def test_undefine_waits_for_a_batch_that_was_due(pair: Pair) -> None:
    client, server = pair
    started, release = threading.Event(), threading.Event()
    ended: list[object] = []

    def serve(x: list[int]) -> list[int]:
        started.set()
        release.wait(PATIENCE)
        ended.append(x)
        return x

    server.define("f", serve, batch_size=4, max_latency=0.01)
    future = client.async_("server", "f", 1)
    assert started.wait(PATIENCE)
    threading.Timer(0.1, release.set).start()
    server.undefine("f")
    assert ended == [[1]]
    assert future.result() == 1


def test_a_batch_that_was_due_can_undefine_its_function(pair: Pair) -> None:
    client, server = pair

    def serve(x: list[int]) -> list[int]:
        server.undefine("f")
        return x

    server.define("f", serve, batch_size=4, max_latency=0.01)
    assert client.sync("server", "f", 1) == 1
