"""JAX arrays on a CUDA device through RPC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import moolink
from tests.cuda.conftest import both

Pair = tuple[moolink.Rpc, moolink.Rpc]

INTEGERS = ["bool", "int8", "int32", "int64", "uint8"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64"]


def device_of(array: Any) -> str:
    """The platform of the one device that holds the array."""
    (device,) = array.devices()
    return str(device.platform)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_arrays_arrive(jax: Any, pair: Pair, dtype: str) -> None:
    client, server = pair
    server.define("bytes", lambda value: np.asarray(value).tobytes())
    for shape in [(), (0, 3), (7,), (300, 1001)]:
        values = np.arange(int(np.prod(shape))).reshape(shape) % 2
        sent = jax.device_put(jax.numpy.asarray(values, dtype), jax.devices("cuda")[0])
        assert client.sync("server", "bytes", sent) == np.asarray(sent).tobytes()


def test_work_that_is_dispatched_comes_first(jax: Any, pair: Pair) -> None:
    client, server = pair
    server.define("host", lambda value: np.asarray(value))

    @jax.jit
    def slow(x: Any) -> Any:
        return jax.lax.fori_loop(0, 200, lambda _, y: y @ y / 2000.0 + 0.5, x)

    x = jax.device_put(np.full((1000, 1000), 0.5, np.float32), jax.devices("cuda")[0])
    expected = np.asarray(slow(x))
    for _ in range(3):
        assert (client.sync("server", "host", slow(x)) == expected).all()


def test_arrays_arrive_on_the_device_that_was_asked_for(jax: Any) -> None:
    with (
        moolink.Rpc("server", arrays="jax", device="cuda:0", timeout=20) as server,
        moolink.Rpc("client", device="same", timeout=20) as client,
    ):
        client.connect(server.listen("127.0.0.1:0")[0])
        kept: list[Any] = []
        server.define("echo", lambda value: kept.append(value) or value)
        for values in (np.arange(5), np.ones((1000, 1000), np.float32), np.float32(3)):
            sent = jax.device_put(values, jax.devices("cuda")[0])
            result = client.sync("server", "echo", sent)
            for received in (kept.pop(), result):
                assert isinstance(received, jax.Array)
                assert device_of(received) == "gpu"
                assert (received == sent).all()


def test_collectives(jax: Any, two: list[moolink.Group]) -> None:
    device = jax.devices("cuda")[0]
    data = [jax.device_put(np.full(1000, rank + 1, np.float32), device) for rank in range(2)]
    for result in both(two, lambda group, rank: group.all_reduce("x", data[rank])):
        assert result.devices() == {device}
        assert (result == 3).all()
