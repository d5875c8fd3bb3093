"""Arrays that are lent to peers instead of being copied to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from moolink import _core
from moolink.internal.integers import integer_of

if TYPE_CHECKING:
    import torch

Shape = int | Sequence[int]


def lend(value: Any, on_release: Callable[[], object] | None = None) -> _core.Lent:
    """Lends the arrays in `value` where this is sent: an argument of a call, a reply, an item.

    The arrays are not captured: they must not be written before they are released. A peer of this
    host maps those that lie in memory of :func:`empty` and reads them where they are, whatever
    their size; other memory, and other hosts, are sent the bytes, without the copy at the call.
    The received array cannot be written (numpy), or is a copy (torch, JAX).

    They are released when the last reference at the receiver has gone, when it has died, or when
    its session has ended. `Future.released` of the call tells so, and `on_release`.

    Args:
        value: an array or anything that holds some, such as a dict of them. Arrays of at most 64
            bytes and those with gaps (strided views) are copied all the same.
        on_release: called without arguments, on a worker thread, once for each time that this was
            sent, when the loan is released.

    Raises:
        TypeError: `on_release` is not callable; or, where the value is sent, it is sent by
            something else than calls, replies and streams.
    """
    return _core.Lent(value, on_release)


@overload
def empty(
    shape: Shape, dtype: npt.DTypeLike = "float32", arrays: Literal["numpy"] = "numpy"
) -> npt.NDArray[Any]: ...
@overload
def empty(
    shape: Shape, dtype: npt.DTypeLike | torch.dtype = "float32", *, arrays: Literal["torch"]
) -> torch.Tensor: ...
def empty(
    shape: Shape,
    dtype: Any = "float32",
    arrays: Literal["numpy", "torch"] = "numpy",
) -> Any:
    """A new array, not initialised, in memory that can be lent to peers of this host.

    It is used like any other, and is 64-byte aligned. Its memory is freed when the last reference
    to it and the last loan of it have gone. It is shared with children of `os.fork`: each process
    sees the other's writes, and the memory is used for nothing else while either may.

    Args:
        shape: its dimensions, or a single one.
        dtype: a number's: a name ("float32", "bfloat16"), or numpy's or torch's dtype.
        arrays: the kind to return, a numpy array or a torch tensor.

    Raises:
        TypeError: arrays of this dtype cannot be sent.
        ValueError: no array has this shape, or `arrays` is something else.
        MemoryError: the system refuses the memory.
    """
    dimensions = [integer_of(one, "shape") for one in _sizes(shape)]
    return _core.empty(dimensions, _dtype_name(dtype), arrays)


def _sizes(shape: Any) -> Sequence[Any]:
    return shape if isinstance(shape, Sequence) and not isinstance(shape, str) else [shape]


def _dtype_name(dtype: Any) -> str:
    """The name that numpy, ml_dtypes and torch have for it."""
    if isinstance(dtype, str):
        return dtype
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    name: str = np.dtype(dtype).name
    return name
