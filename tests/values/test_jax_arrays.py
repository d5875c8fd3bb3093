"""JAX arrays: immutable here and there, whatever their capsules say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moolink import _core
from moolink.errors import WireError

jax = pytest.importorskip("jax")
jnp = jax.numpy


def round_trip(value: Any, **options: Any) -> Any:
    return _core.decode(*_core.encode(value), **options)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64", "float8_e5m2"],
)
@pytest.mark.parametrize("shape", [(), (3,), (40, 5), (0, 3)])
def test_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = jnp.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    again = round_trip(array)
    assert isinstance(again, jax.Array)
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert np.asarray(again).tobytes() == np.asarray(array).tobytes()


def test_the_receiver_may_choose_the_framework() -> None:
    array = round_trip(jnp.ones(100, jnp.bfloat16), arrays="numpy")
    assert isinstance(array, np.ndarray)
    assert array.dtype == jnp.bfloat16
    assert array.flags.writeable
    assert isinstance(round_trip(np.ones(100, np.float32), arrays="jax"), jax.Array)


def test_wide_numbers_are_not_halved_in_silence() -> None:
    with pytest.raises(WireError, match="jax_enable_x64"):
        round_trip(np.ones(100), arrays="jax")


def test_arrays_outlive_the_message() -> None:
    body, parts = _core.encode(jnp.arange(1000.0))
    received = _core.decode(body, parts)
    doubled = jax.jit(lambda x: x * 2)(received)
    del received, body, parts
    assert doubled.tolist() == [2.0 * i for i in range(1000)]


def test_traced_values_are_refused() -> None:
    def traced(x: Any) -> Any:
        _core.encode(x)
        return x

    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(traced)(jnp.ones(3))


def test_keys_are_refused() -> None:
    with pytest.raises(TypeError):
        _core.encode(jax.random.key(0))


def test_arrays_are_read_only_to_the_library() -> None:
    assert not _core.as_array(jnp.ones(3)).flags.writeable
