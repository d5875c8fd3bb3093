"""From the reply to a batch to those of its calls."""

from __future__ import annotations

import asyncio
import collections
import threading
from typing import Any

import numpy as np
import pytest
import torch

import moolink
from tests.rpc.batches import calls, error_of, waiting
from tests.rpc.conftest import Pair
from tests.waiting import TIMEOUT

Observation = collections.namedtuple("Observation", ["image", "reward"])
moolink.register(Observation)


def reply_to(pair: Pair, count: int, value: Any) -> list[moolink.Future]:
    """Has `count` calls answered with one reply; returns their futures, all done."""
    client, server = pair
    queue = server.define_queue("reply", dynamic_batching=True)
    futures = calls(client, "reply", list(range(count)))
    waiting(queue, count)
    reply, _, _ = queue.get(TIMEOUT)
    reply(value)
    for future in futures:
        future.wait(TIMEOUT)
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
    assert started.wait(TIMEOUT)
    futures[0].cancel()
    futures[1].cancel()
    assert cancelled.wait(TIMEOUT)
