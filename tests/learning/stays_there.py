"""A guard: operations of torch that would bring data from the tensors' device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = (
    "aten::_local_scalar_dense",  # item(), float(), int(), tolist()
    "aten::is_nonzero",  # bool()
    "aten::nonzero",  # the size of the result is known on the device only
    "aten::masked_select",
    "aten::equal",
)
_INDEXES = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")


class StaysThere(TorchDispatchMode):
    """Inside the block, an operation raises if it has tensors on other devices or reads elements.

    Attributes:
        seen: the number of operations.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self._device = torch.device(device).type
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        name = func.name()
        kind = name.partition(".")[0]
        masks = [x for x in args[1] if x is not None] if kind in _INDEXES else []
        if kind in _READS or any(mask.dtype is torch.bool for mask in masks):
            raise AssertionError(f"{name} reads elements of a tensor")
        result = func(*args, **(kwargs or {}))
        self.seen += 1
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if elsewhere := {x.device.type for x in tensors} - {self._device}:
            raise AssertionError(f"{name} has tensors on {', '.join(elsewhere)}")
        return result
