"""Arrays of a batch as the framework that is wanted, on its device."""

from __future__ import annotations

from typing import Any, Literal, get_args

from moolink.data import trees

Arrays = Literal["same", "numpy", "torch", "jax"]


def kind_of(arrays: Arrays) -> Arrays:
    """Checks the kind of arrays that batches are made of.

    Raises:
        ValueError: it is no such kind.
    """
    if arrays not in get_args(Arrays):
        raise ValueError(f"arrays must be one of {', '.join(get_args(Arrays))}, got {arrays!r}")
    return arrays


def convert(arrays: list[Any], kind: str, device: Any) -> list[Any]:
    """Numpy's arrays, which are not written elsewhere, as torch's or JAX's, without a copy where
    they stay on the host.

    Raises:
        ValueError: numpy's arrays are wanted on a device.
    """
    if kind == "torch":
        tensors = [trees.as_torch(array) for array in arrays]
        return tensors if device is None else [tensor.to(device) for tensor in tensors]
    if kind == "jax":
        import jax

        if device is None:
            return [jax.numpy.asarray(array) for array in arrays]
        return [jax.device_put(array, device) for array in arrays]
    if device is not None and str(device) != "cpu":
        raise ValueError(f'numpy\'s arrays are on the host: ask for arrays="torch" for {device}')
    return arrays
