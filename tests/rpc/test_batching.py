"""Calls that are served together: batches of a fixed size."""

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
        assert tuple(float(s) for s in x[:, 0]) == scale


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
    assert label == ("label", "label")
    assert batch["state"]["h"].shape == (2, 3)
    assert batch["state"]["h"].dtype == torch.bfloat16
    assert sorted(batch["done"]) == [False, True]
    assert batch["none"] == (None, None)


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
        reply, (x,), kwargs = queue.get(TIMEOUT)
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
    reply, (x, label, t), _ = queue.get(TIMEOUT)
    assert x.tolist() == [[7, 7], [0, 0], [0, 0], [0, 0]]
    assert label == ("label", None, None, None)
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
            reply, (x,), _ = await asyncio.wait_for(queue, TIMEOUT)
            assert x == (i,)
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
        refused = "the call of 'f' was refused: it does not fit into the batch: args"
        assert str(caught.value).startswith(refused)
        assert caught.value.remote_type == "ValueError"
        assert caught.value.ran == "no"
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
    reply, (x,), _ = queue.get(TIMEOUT)
    assert x == (1, 2, 3)
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
        queue.get(TIMEOUT)


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
        thread.join(TIMEOUT)
    assert not wrong
