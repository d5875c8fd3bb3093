"""JAX arrays in and out: nothing is copied on the way in, and memory lives as long as it must."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moolink
from moolink import _core
from tests.interop.conftest import together
from tests.waiting import until

jax = pytest.importorskip("jax")
jnp = jax.numpy

Peers = tuple[moolink.Rpc, moolink.Rpc]


@pytest.fixture(params=["shm", "tcp"])
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    """A client, and a server whose received arrays become JAX's."""
    transports = ["tcp"] if request.param == "tcp" else ["shm", "tcp"]
    with (
        moolink.Rpc("server", arrays="jax", transports=transports, timeout=20) as server,
        moolink.Rpc("client", transports=transports, timeout=20) as client,
    ):
        client.connect(server.listen("127.0.0.1:0")[0])
        until(lambda: client.explain("server")["path"] == request.param, request.param)
        yield client, server


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Addresses of the memory that JAX was given and of the array that came of it."""
    pairs = []
    plain = jax.dlpack.from_dlpack

    def from_dlpack(owner: Any) -> Any:
        array = plain(owner)
        pairs.append((np.frombuffer(owner, np.uint8).ctypes.data, array.unsafe_buffer_pointer()))
        return array

    monkeypatch.setattr(jax.dlpack, "from_dlpack", from_dlpack)
    return pairs


@pytest.mark.parametrize("size", [20, 1000, 100_000, 4 << 20])
def test_receiving_copies_nothing(
    peers: Peers, handed_over: list[tuple[int, int]], size: int
) -> None:
    client, server = peers
    sums = []
    server.define("take", lambda x: sums.append((type(x), float(x.sum()))))
    array = np.ones(size, np.float32)
    for given in (array, jnp.asarray(array)):
        client.sync("server", "take", given)
    assert [total for _, total in sums] == [size] * 2
    assert all(issubclass(kind, jax.Array) for kind, _ in sums)
    assert len(handed_over) == 2
    for given_to_jax, used_by_jax in handed_over:
        assert given_to_jax == used_by_jax
    assert not any(server.stats()["copies"].values())


def test_memory_is_not_used_again_before_jax_has_done_with_it(peers: Peers) -> None:
    """References go while computations on XLA's threads still read the memory."""
    client, server = peers
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: jnp.sin(y) + x, x))
    results = []
    server.define("take", lambda x: results.append(slow(x)))
    expected = {}
    for i in range(20):
        array = np.full(200_000, i, np.float32)
        if i % 5 == 0:
            expected[i] = np.asarray(slow(jnp.asarray(array)))
        client.sync("server", "take", array)
    for i, result in enumerate(results):
        values = np.asarray(result)
        assert (values == values[0]).all()
        if i in expected:
            assert np.array_equal(values, expected[i])


def test_arrays_that_end_on_other_threads(peers: Peers) -> None:
    client, server = peers
    kept: list[Any] = []
    server.define("take", kept.append)
    for _ in range(50):
        client.sync("server", "take", np.ones(50_000, np.float32))

    def drop() -> None:
        while kept:
            kept.pop()

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    client.sync("server", "take", np.ones(50_000, np.float32))
    assert kept[0].sum() == 50_000


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_wide_numbers_are_refused_not_halved(peers: Peers, dtype: str) -> None:
    client, server = peers
    server.define("take", lambda x: None)
    with pytest.raises(moolink.Error, match=f"{dtype} would lose half of its bits.*enable_x64"):
        client.sync("server", "take", np.ones(1000, dtype))


def test_sub_byte_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="int4"):
        _core.encode(jnp.ones(100, jnp.int4))


def test_collectives_return_jax_arrays(groups: tuple[moolink.Group, moolink.Group]) -> None:
    a, b = groups
    for array in (jnp.arange(5.0), jnp.ones((300, 300), jnp.bfloat16), jnp.ones((), jnp.complex64)):
        x, y = together(
            lambda array=array: a.all_reduce("x", array).result(),
            lambda array=array: b.all_reduce("x", array).result(),
        )
        assert isinstance(x, jax.Array)
        assert x.dtype == array.dtype
        assert jnp.array_equal(x, array * 2)
        assert jnp.array_equal(y, array * 2)


def test_batches_and_actions_take_jax_arrays() -> None:
    from moolink.data.frameworks import as_numpy

    batcher = moolink.Batcher(2)
    for i in range(2):
        batcher.stack({"x": jnp.full(3, i)})
    assert np.array_equal(batcher.get()["x"], [[0, 0, 0], [1, 1, 1]])
    assert np.array_equal(as_numpy(jnp.arange(3)), [0, 1, 2])


def test_traced_values_name_the_way_out(groups: tuple[moolink.Group, moolink.Group]) -> None:
    a, _ = groups

    def traced(x: Any) -> Any:
        return a.all_reduce("x", x).result()

    with pytest.raises(TypeError, match=r"moolink\.jax\.all_reduce"):
        jax.jit(traced)(jnp.ones(3))
