"""Calls that are served together: whatever waits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

import moolink
from tests.rpc.batches import calls, error_of, waiting
from tests.rpc.conftest import Pair
from tests.waiting import TIMEOUT, until


def test_dynamic_batches_take_what_waits(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=4, dynamic_batching=True)
    futures = calls(client, "q", [np.full(2, i) for i in range(6)])
    waiting(queue, 6)
    for size in (4, 2):
        reply, (x,), _ = queue.get(TIMEOUT)
        assert x.shape == (size, 2)
        assert len(reply) == size
        reply(x * 10)
    assert [f.result().tolist() for f in futures] == [[10 * i] * 2 for i in range(6)]
    future = client.async_("server", "q", np.zeros((7, 7)))  # another shape, in its own batch
    reply, (x,), _ = queue.get(TIMEOUT)
    assert x.shape == (1, 7, 7)
    reply(x)
    assert future.result().shape == (7, 7)


def test_dynamic_batches_without_a_limit(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", dynamic_batching=True)
    for count in (1, 100):
        futures = calls(client, "q", [np.array(i) for i in range(count)])
        waiting(queue, count)
        reply, (x,), _ = queue.get(TIMEOUT)
        # Calls start in order, but two that run at once may come to the queue in either order.
        assert sorted(x.tolist()) == list(range(count))
        reply(x)
        assert [int(f.result()) for f in futures] == list(range(count))


def test_a_consumer_that_waits_gets_the_first_call_at_once(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=4, dynamic_batching=True)

    async def main() -> None:
        task = asyncio.ensure_future(queue)
        await asyncio.sleep(0)
        assert not task.done()
        future = client.async_("server", "q", 5)
        reply, (x,), _ = await asyncio.wait_for(task, TIMEOUT)
        assert x == (5,)
        reply(x)
        assert await future == 5

    asyncio.run(main())


def test_buckets(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", dynamic_batching=True, bucket_sizes=(1, 2, 4, 8))
    for count, size in [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (11, 8)]:
        futures = calls(client, "q", [np.full(2, i + 1) for i in range(count)])
        waiting(queue, count)
        reply, (x,), _ = queue.get(TIMEOUT)
        assert x.shape == (size, 2)
        assert not x[count:].any()
        reply(x * 2)
        if count > 8:
            reply, (x,), _ = queue.get(TIMEOUT)
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
        release.wait(TIMEOUT)
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
    assert started.wait(TIMEOUT)
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
        reply, (x, label), _ = queue.get(TIMEOUT)
        assert reply.sizes == expected
        assert x.shape == (sum(expected), 2)
        assert label == tuple(str(row[0]) for row in x)
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
    reply, (x,), _ = queue.get(TIMEOUT)
    assert tuple(x.shape) == (8, 3)
    assert float(x.sum()) == 15
    reply(x)
    assert [tuple(f.result().shape) for f in futures] == [(2, 3), (3, 3)]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_call_of_more_rows_than_the_largest_bucket_fails(
    pair: Pair, batch_size: int | None
) -> None:
    client, server = pair
    queue = server.define_queue(
        "q", batch_size, dynamic_batching=True, mode="cat", bucket_sizes=(2, 4)
    )
    too_many = client.async_("server", "q", np.ones((5, 3)))
    as_many = client.async_("server", "q", np.ones((4, 3)))
    reply, (x,), _ = queue.get(TIMEOUT)
    assert x.shape == (4, 3)
    reply(x)
    assert as_many.result().shape == (4, 3)
    error = error_of(too_many)
    assert "the call of 'q' was refused: it brings 5 rows" in str(error)
    assert "at most 4 (bucket_sizes=(2, 4))" in str(error)
    assert error.ran == "no"


def test_a_call_of_very_many_rows_of_nothing_is_refused(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=8, dynamic_batching=True, mode="cat")
    nothing = client.async_("server", "q", np.empty((10**6, 0)), 0.5)
    something = client.async_("server", "q", np.ones((2, 3)), 0.5)
    reply, (x, _), _ = queue.get(TIMEOUT)
    assert x.shape == (2, 3)
    reply(x)
    assert something.result().shape == (2, 3)
    assert "it brings 1000000 rows without elements" in str(error_of(nothing))


def test_a_call_that_does_not_fit_fails_alone(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=8, dynamic_batching=True)
    futures = calls(client, "q", [np.zeros(4), np.zeros(3), np.ones(3), {"a": 1}, np.ones(3)])
    waiting(queue, 5)
    reply, (x,), _ = queue.get(TIMEOUT)
    assert x.shape == (3, 3)
    reply(x)
    assert [futures[i].result()[0] for i in (1, 2, 4)] == [0, 1, 1]
    misfit = error_of(futures[0])
    assert "the call of 'q' was refused" in str(misfit)
    assert "args[0]: expected (3,) float64, got (4,) float64" in str(misfit)
    assert misfit.ran == "no"
    assert "args[0]: expected (3,) float64 (numpy), got a dict" in str(error_of(futures[3]))


def test_what_a_batch_holds_is_the_consumers_own(pair: Pair) -> None:
    client, server = pair
    queue = server.define_queue("q", batch_size=2, dynamic_batching=True)
    batches = []
    for i in range(4):
        client.async_("server", "q", np.full(50_000, i))
        reply, (x,), _ = queue.get(TIMEOUT)
        reply(None)
        batches.append(x)
    assert [int(x[0, 0]) for x in batches] == [0, 1, 2, 3]
