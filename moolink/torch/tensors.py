"""Tensors of a torch accumulator: their layout in the bucket, checks and copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors

from moolink._core import check_array
from moolink.accumulate.buckets import Description, Section
from moolink.data import trees
from moolink.data.device_arrays import torch_on_device
from moolink.group import Group

_HOST = torch.device("cpu")


def unflatten(values: torch.Tensor, parameters: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of a section, one for each of its parameters."""
    parts: Sequence[torch.Tensor] = _unflatten_dense_tensors(values, parameters)  # type: ignore[no-untyped-call]
    return parts


def means_by_device(values: torch.Tensor, parameters: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same, except that a parameter on a CUDA device gets a view of a copy there: each device
    receives the section as a whole, once."""
    by_device: dict[torch.device | None, Sequence[torch.Tensor]] = {}
    for index, parameter in enumerate(parameters):
        device = parameter.device if parameter.is_cuda else None
        if device not in by_device:
            there = values if device is None else torch_on_device(values, device)
            by_device[device] = unflatten(there, parameters)
        yield by_device[device][index]


def is_plain(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device = _HOST) -> bool:
    """Whether its elements lie one after another on the device, as in the bucket."""
    return (
        tensor.device == device
        and tensor.dtype is dtype
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (dtype.is_complex and tensor.is_conj())
        and not tensor.is_neg()
    )


def plain_copy(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    copy = gradient.detach().to("cpu", dtype).resolve_conj().resolve_neg()
    return copy.clone(memory_format=torch.contiguous_format)


def zero_all(tensors: list[torch.Tensor]) -> None:
    # _foreach_zero_ does not support conjugate and negative views.
    views = [t for t in tensors if t.is_conj() or t.is_neg()]
    others = [t for t in tensors if not (t.is_conj() or t.is_neg())]
    with torch.no_grad():
        for view in views:
            view.zero_()
        if others:
            torch._foreach_zero_(others)


def writes(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    """The tensor's id and its number of writes, which tell whether it has changed since."""
    if gradient is None:
        return None
    return id(gradient), -1 if gradient.is_inference() else gradient._version


def shape_text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)}{tuple(shape)}"


def checked_tensors(what: str, values: Iterable[Any]) -> list[torch.Tensor]:
    if isinstance(values, torch.nn.Module):
        raise TypeError(f"give {what} as model.{what}(), not the model")
    if isinstance(values, Group):
        raise TypeError("give the group as group=")
    tensors = list(values)
    for index, value in enumerate(tensors):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{what}[{index}] is a {type(value).__qualname__}, not a torch.Tensor")
    require_plain(what, tensors)
    return tensors


def require_plain(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ``TypeError`` unless each tensor has its elements in memory of its own."""
    for index, tensor in enumerate(tensors):
        check_array(tensor, f"{what}[{index}]")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(section: Section) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, section.dtype)
    return dtype


def describe(tensor: torch.Tensor, reduced: bool) -> Description:
    return Description(dtype_name(tensor.dtype), tuple(tensor.shape), reduced)


def as_torch(value: Any) -> torch.Tensor:
    """A received array of any framework."""
    if isinstance(value, torch.Tensor):
        return value
    array = np.asarray(value)
    if not array.flags.writeable:  # JAX's are read-only
        array = array.copy()
    tensor: torch.Tensor = trees.as_torch(array)
    return tensor


def fitting(mine: Sequence[torch.Tensor], values: Sequence[Any]) -> list[torch.Tensor]:
    """The values as tensors; raises ``ValueError`` unless they fit this model's."""
    if len(mine) != len(values):
        raise ValueError(f"{len(values)} tensors came for the {len(mine)} of this model")
    tensors = [as_torch(value) for value in values]
    for index, (old, new) in enumerate(zip(mine, tensors, strict=True)):
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ValueError(
                f"tensor {index} that came is {shape_text(new.shape, new.dtype)}, and "
                f"this model's {shape_text(old.shape, old.dtype)}"
            )
    return tensors


def copy_all(to: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for mine, theirs in zip(to, tensors, strict=True):
            mine.copy_(theirs)
