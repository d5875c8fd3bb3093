"""CuPy arrays on a CUDA device through RPC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import moolink
from tests.cuda.conftest import both

Pair = tuple[moolink.Rpc, moolink.Rpc]

INTEGERS = ["bool", "int8", "int32", "int64", "uint8", "uint64"]
FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_arrays_arrive_as_numpy(cupy: Any, pair: Pair, dtype: str) -> None:
    client, server = pair
    server.define("echo", lambda value: value)
    for shape in [(), (0, 3), (7,), (300, 1001)]:
        sent = (cupy.arange(int(np.prod(shape)) or 1) % 2).astype(dtype)
        sent = sent.reshape(shape) if int(np.prod(shape)) else cupy.empty(shape, dtype)
        received = client.sync("server", "echo", sent)
        assert isinstance(received, np.ndarray)
        assert (received.dtype, received.shape) == (np.dtype(dtype), shape)
        assert (received == cupy.asnumpy(sent)).all()


def test_views_arrive_as_their_elements(cupy: Any, pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda value: value)
    whole = cupy.arange(60_000).reshape(200, 300)
    for view in (whole[::2], whole.T, whole[:, ::-1], cupy.asfortranarray(whole)):
        assert (client.sync("server", "echo", view) == cupy.asnumpy(view)).all()


@pytest.mark.parametrize("size", [3, 3_000_000])
def test_pending_work_comes_first(cupy: Any, pair: Pair, size: int) -> None:
    client, server = pair
    server.define("ends", lambda value: (int(value[0]), int(value[-1])))
    sleep = cupy.RawKernel(
        'extern "C" __global__ void wait(long long n) { long long s = clock64(); '
        "while (clock64() - s < n) {} }",
        "wait",
    )
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            array = cupy.zeros(size, np.int32)
            sleep((1,), (1,), (100_000_000,))
            array.fill(7)
            future = client.async_("server", "ends", array)
            array.fill(9)
            assert future.result() == (7, 7)


def test_arrays_arrive_on_the_device_that_was_asked_for(cupy: Any) -> None:
    with (
        moolink.Rpc("server", device="cuda:0", timeout=20) as server,
        moolink.Rpc("client", device="same", timeout=20) as client,
    ):
        client.connect(server.listen("127.0.0.1:0")[0])
        kept: list[Any] = []
        server.define("echo", lambda value: kept.append(value) or value)
        for sent in (cupy.arange(5), cupy.arange(1_000_000.0).reshape(1000, 1000)):
            result = client.sync("server", "echo", sent)
            for received in (kept.pop(), result):
                assert isinstance(received, cupy.ndarray)
                assert (received == sent).all()


def test_collectives(cupy: Any, two: list[moolink.Group]) -> None:
    data = [cupy.full(1000, rank + 1, np.float32) for rank in range(2)]
    for result in both(two, lambda group, rank: group.all_reduce("x", data[rank])):
        assert isinstance(result, cupy.ndarray)
        assert (result == 3).all()
    both(two, lambda group, rank: group.all_reduce("y", data[rank], inplace=True))
    assert all((array == 3).all() for array in data)
