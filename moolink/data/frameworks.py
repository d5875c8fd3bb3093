"""Arrays of frameworks that this process may not have imported; nothing here imports one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink import _core


def is_torch(value: object) -> bool:
    """Whether it is a torch tensor."""
    # Another thread may be importing torch: then it has no Tensor yet.
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_jax(value: object) -> bool:
    """Whether it is a JAX array."""
    return isinstance(value, getattr(sys.modules.get("jax"), "Array", ()))


def check_copied(value: Any, name: str, device: str) -> None:
    """Raises TypeError, as `check_array` does, for an array that cannot be copied to ``device``.

    Within a device that moolink does not read (mps, xpu, meta) torch copies its own tensors.
    """
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and type(value) is torch.Tensor
        and value.device.type not in ("cpu", "cuda")
        and value.device.type == torch.device(device).type
    ):
        return
    _core.check_array(value, name)


def as_numpy(value: Any, name: str = "an array") -> npt.NDArray[Any]:
    """A numpy view of an array of any framework; of one on a device, a copy on the host.

    Raises:
        TypeError: its elements cannot be read as plain memory; the message begins with ``name``.
    """
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return np.asarray(value)
    _core.check_array(value, name)
    if is_torch(value):
        array: npt.NDArray[Any] = value.detach().cpu().numpy()
        return array
    if hasattr(value, "__array__") or not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    return _core.as_array(value)
