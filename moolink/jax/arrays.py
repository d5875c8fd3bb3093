"""Arrays between JAX and the memory of others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from moolink.data import trees

WIDE = ("int64", "uint64", "float64", "complex128")


def as_numpy(value: Any) -> npt.NDArray[Any]:
    """A received array, tensor or number as numpy, without a copy where it is in host memory."""
    ((leaf,), _) = trees.flatten([value])
    if leaf.array.dtype.name == leaf.dtype:
        return leaf.array
    return leaf.array.view(jnp.dtype(leaf.dtype))  # numpy's own knows no bfloat16


def alike(value: Any, like: Any, what: str) -> npt.NDArray[Any]:
    """A received value as numpy, of the shape and dtype of ``like``.

    Raises:
        ValueError: it has others; the message begins with ``what``.
    """
    if isinstance(value, dict | list | tuple):
        raise ValueError(f"{what} is a {type(value).__qualname__}, and this model's an array")
    array = as_numpy(value)
    if array.shape != like.shape or array.dtype != like.dtype:
        raise ValueError(f"{what} is {described(array)}, and this model's is {described(like)}")
    return array


def received(value: Any, like: Any, what: str) -> jax.Array:
    """A JAX array of a received value, placed as ``like`` is; the memory received is not kept.

    Raises:
        ValueError: as :func:`alike`.
    """
    return placed(jnp.array(alike(value, like, what)), like)


def require_whole(what: str, array: Any) -> None:
    """Raises ``TypeError`` if JAX would keep half of the bits of an array of any framework."""
    dtype = getattr(array, "dtype", None)
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name in WIDE and jax.dtypes.canonicalize_dtype(name).name != name:
        raise TypeError(
            f"{what} is {name}, of which JAX without x64 would keep half of the bits: call "
            'jax.config.update("jax_enable_x64", True), or convert it yourself'
        )


def lent(memory: npt.NDArray[Any]) -> jax.Array:
    """A JAX array over memory that is not written any more, kept as long as the array is."""
    array: jax.Array = jax.dlpack.from_dlpack(memory)
    return array


def placed(array: jax.Array, like: Any) -> jax.Array:
    """``array`` on the devices of ``like``."""
    sharding = getattr(like, "sharding", None)
    if sharding is None or sharding == array.sharding:
        return array
    moved: jax.Array = jax.device_put(array, sharding)
    return moved


def described(array: Any) -> str:
    """Its dtype and shape in words."""
    return f"{np.dtype(array.dtype).name}{tuple(array.shape)}"
