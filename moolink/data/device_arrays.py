"""Arrays in the memory of CUDA devices, made by their frameworks.

The core calls these functions; ``empty_of_...`` return the array, its address, and the stream whose
queued work may still use that memory (``None``: there is none).
"""

from __future__ import annotations

import functools
from typing import Any

from moolink._core import copy_to_device


@functools.cache
def _allocation_stream(device: int) -> Any:
    """Received tensors are allocated for a stream on which nothing ever runs."""
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def empty_of_torch(shape: tuple[int, ...], dtype: str, device: int) -> tuple[Any, int, None]:
    """Allocates a tensor whose memory no queued work uses.

    Work that is queued on the current stream, such as a training step, may still use the memory
    that torch allocates there, and the copy would have to wait for it. Blocks of another stream
    come back once the work of all streams that they were recorded for has ended.
    """
    import torch

    with torch.cuda.stream(_allocation_stream(device)):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{device}")
    tensor.record_stream(torch.cuda.current_stream(device))
    return tensor, tensor.data_ptr(), None


def torch_on_device(host: Any, device: Any) -> Any:
    """Returns a copy on the device of a torch tensor without gaps in host memory.

    It is complete when this returns, and waits for nothing that is queued on the device.
    """
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    dtype = str(host.dtype).removeprefix("torch.")
    tensor, address, _ = empty_of_torch(tuple(host.shape), dtype, index)
    if host.numel():
        copy_to_device(host, address, index)
    return tensor


def empty_of_cupy(shape: tuple[int, ...], dtype: str, device: int) -> tuple[Any, int, int]:
    """Allocates an array on the device's current stream."""
    import cupy

    with cupy.cuda.Device(device):
        array = cupy.empty(shape, numpy_dtype(dtype))
        return array, array.data.ptr, cupy.cuda.get_current_stream().ptr


def cupy_contiguous(array: Any) -> Any:
    """Returns the array without gaps, in row-major order."""
    import cupy

    with array.device:
        return cupy.ascontiguousarray(array)


def put_by_jax(array: Any, device: int) -> Any:
    """Copies a host array, which is not written any more, to the device.

    Raises:
        ValueError: JAX would make the elements narrower, or sees no such device.
    """
    import jax

    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:  # without x64
        raise ValueError(
            f"a received array of {array.dtype} would lose half of its bits in JAX: call "
            'jax.config.update("jax_enable_x64", True), or ask for arrays="numpy"'
        )
    devices = jax.local_devices(backend="cuda")
    if device >= len(devices):
        raise ValueError(f"JAX sees {len(devices)} CUDA devices, and no cuda:{device}")
    return jax.device_put(array, devices[device])


def numpy_dtype(name: str) -> Any:
    """Numpy's dtype of a name, or that of ml_dtypes."""
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
