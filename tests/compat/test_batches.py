"""Batches of calls, and of a Batcher, as moolib makes and splits them."""

from __future__ import annotations

import asyncio
from typing import Any

import moolib
import pytest
import torch

from tests.compat.conftest import Peers
from tests.waiting import TIMEOUT, until


async def served(queue: moolib.Queue, function: Any) -> None:
    reply, args, kwargs = await queue
    reply(function(*args, **kwargs))


def test_a_dynamic_batch_that_is_echoed_gives_each_call_its_own(peers: Peers) -> None:
    host, client = peers
    queue = host.define_queue("echo", batch_size=10, dynamic_batching=True)
    sent = [
        (torch.full((2,), i), {"index": [i, [i + 1]], "pair": (i, str(i)), "flag": None})
        for i in range(2)
    ]
    futures = [client.async_("host", "echo", x, info=info) for x, info in sent]
    until(lambda: queue.size() == 2, "the calls")
    seen: list[Any] = []

    def echo(x: Any, info: Any) -> Any:
        seen.append(info)
        return x, info

    asyncio.run(asyncio.wait_for(served(queue, echo), TIMEOUT))
    first = seen[0]["index"][0]
    assert type(first) is tuple  # values are tuples, lists are structure
    assert sorted(first) == [0, 1]
    for (x, info), future in zip(sent, futures, strict=True):
        got_x, got_info = future.result()
        assert got_x.tolist() == x.tolist()
        assert got_info == info


def test_a_static_batch_has_the_first_calls_constants(peers: Peers) -> None:
    host, client = peers
    shapes: list[Any] = []

    def greet(message: str, x: torch.Tensor, pair: tuple[str, str]) -> Any:
        shapes.append(tuple(x.shape))
        return "re: " + message, x.sum(1), [pair, {"n": 1}]

    host.define("greet", greet, batch_size=3)
    futures = [
        client.async_("host", "greet", "hello", torch.full((2,), i), ("a", "b")) for i in range(3)
    ]
    for i, future in enumerate(futures):
        message, total, rest = future.result()
        assert message == "re: hello"
        assert int(total) == 2 * i
        assert rest == [("a", "b"), {"n": 1}]  # what is no tensor goes to all
    assert shapes == [(3, 2)]


def test_static_batches_of_deferred_calls_and_of_queues(peers: Peers) -> None:
    host, client = peers
    host.define_deferred("deferred", lambda reply, text, x: reply((text, x)), batch_size=2)
    queue = host.define_queue("queue", batch_size=2)
    for name in ("deferred", "queue"):
        futures = [client.async_("host", name, "text", torch.tensor([i])) for i in range(2)]
        if name == "queue":
            asyncio.run(asyncio.wait_for(served(queue, lambda text, x: (text, x)), TIMEOUT))
        assert [(text, int(x)) for text, x in (f.result() for f in futures)] == [
            ("text", 0),
            ("text", 1),
        ]


@pytest.mark.parametrize("add", ["stack", "cat"])
def test_a_batcher_keeps_the_first_items_constants(add: str) -> None:
    batcher = moolib.Batcher(2, "cpu")
    for i in range(2):
        getattr(batcher, add)({"x": torch.full((1,), i), "name": "first" if i == 0 else "second"})
    batch = batcher.get()
    assert batch["x"].flatten().tolist() == [0, 1]
    assert batch["name"] == "first"
    with pytest.raises(RuntimeError):
        getattr(batcher, add)({"x": torch.zeros(3, 3), "name": ""})
