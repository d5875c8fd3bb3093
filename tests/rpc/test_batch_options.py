"""Options of batching that make no sense, and the ends of batched functions."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from tests.rpc.batches import calls
from tests.rpc.conftest import Pair
from tests.waiting import TIMEOUT, until


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

    def serve(x: tuple[int, ...]) -> tuple[int, ...]:
        started.set()
        release.wait(TIMEOUT)
        ended.append(x)
        return x

    server.define("f", serve, batch_size=4, max_latency=0.01)
    future = client.async_("server", "f", 1)
    assert started.wait(TIMEOUT)
    threading.Timer(0.1, release.set).start()
    server.undefine("f")
    assert ended == [(1,)]
    assert future.result() == 1


def test_a_batch_that_was_due_can_undefine_its_function(pair: Pair) -> None:
    client, server = pair

    def serve(x: list[int]) -> list[int]:
        server.undefine("f")
        return x

    server.define("f", serve, batch_size=4, max_latency=0.01)
    assert client.sync("server", "f", 1) == 1


@pytest.mark.parametrize("device", ["cdua", "cpu:x", "cuda:4096"])
def test_a_device_that_is_none_is_refused_at_the_definition(pair: Pair, device: str) -> None:
    _, server = pair
    with pytest.raises(ValueError, match=f"no batch can be made on device='{device}': "):
        server.define("f", print, batch_size=2, device=device)
    with pytest.raises(ValueError, match="no batch can be made"):
        server.define_queue("f", 2, device)
    server.define("f", print, batch_size=2, device="meta")


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"dynamic_batching": True}])
def test_a_handler_that_cannot_be_called_is_refused(pair: Pair, options: dict[str, Any]) -> None:
    _, server = pair
    define: Any
    for define in (server.define, server.define_deferred):
        with pytest.raises(TypeError, match="the handler of 'f' is not callable: 5"):
            define("f", 5, **options)
    server.define("f", print)
