"""The gradient accumulator for torch modules."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moolink.accumulator import AccumulatorBase
from moolink.group import Group


class Accumulator(AccumulatorBase):
    """moolib's accumulator for torch parameters; see :class:`moolink.accumulator.AccumulatorBase`.

    Args:
        name: name of the model within the group.
        parameters: the model's parameters, in the same order and of the same shapes and dtypes at
            every peer. Frozen ones (``requires_grad=False``) travel with the state only.
        buffers: tensors that newcomers receive beside the parameters.
        group: the group to reduce in. Without one the accumulator makes an ``Rpc`` and a ``Group``
            called ``name``; then call :meth:`connect`.
        options: ``role``, ``checksum_every`` and ``on_divergence`` of the base class.

    Raises:
        TypeError: a parameter or buffer is not a tensor, or not a dense one.
        ValueError: no parameter requires a gradient.
    """

    def __init__(
        self,
        name: str,
        parameters: Iterable[torch.Tensor],
        buffers: Iterable[torch.Tensor] = (),
        group: Group | None = None,
        **options: Any,
    ) -> None:
        self._parameters = _tensors("parameters", parameters)
        self._buffers = _tensors("buffers", buffers)
        # A bucket's sections hold one dtype each, so that a section is one kernel call.
        self._sections: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._sections.setdefault(parameter.dtype, []).append(parameter)
        if not self._sections:
            raise ValueError("none of the parameters requires a gradient: nothing to reduce")
        super().__init__(
            name,
            [(_name(dtype), _count(group_)) for dtype, group_ in self._sections.items()],
            _layout(self._parameters, self._buffers),
            group,
            **options,
        )

    def _gather(self, bucket: npt.NDArray[np.uint8], batch_size: int) -> None:
        with torch.no_grad():
            for views, parameters in self._views(bucket):
                for view, parameter in zip(views, parameters, strict=True):
                    if parameter.grad is None:
                        view.zero_()
                    else:
                        view.copy_(parameter.grad)
                torch._foreach_mul_(views, batch_size)
        self._clear()

    def _scatter(self, result: npt.NDArray[np.uint8]) -> None:
        with torch.no_grad():
            for views, parameters in self._views(result):
                for parameter in parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                torch._foreach_copy_([p.grad for p in parameters if p.grad is not None], views)

    def _clear(self) -> None:
        gradients = [
            p.grad for group in self._sections.values() for p in group if p.grad is not None
        ]
        if gradients:
            with torch.no_grad():
                torch._foreach_zero_(gradients)

    def _capture_model(self) -> Any:
        return (
            [p.detach() for p in self._parameters],
            [b.detach() for b in self._buffers],
        )

    def _install_model(self, model: Any) -> None:
        parameters, buffers = model
        with torch.no_grad():
            for mine, theirs in zip(self._parameters, parameters, strict=True):
                mine.copy_(_as_torch(theirs))
            for mine, theirs in zip(self._buffers, buffers, strict=True):
                mine.copy_(_as_torch(theirs))

    def _checksum(self) -> int:
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self._parameters:
            logical = parameter.detach().cpu().contiguous()
            digest.update(logical.reshape(-1).view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest(), "little")

    def _views(
        self, flat: npt.NDArray[np.uint8]
    ) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Yields each section's (slices of the flat bytes shaped as the parameters, parameters)."""
        offset = 0
        memory = torch.from_numpy(flat)
        for dtype, parameters in self._sections.items():
            size = _count(parameters) * dtype.itemsize
            section = memory[offset : offset + size].view(dtype)
            pieces = torch.split(section, [p.numel() for p in parameters])
            yield [s.view(p.shape) for s, p in zip(pieces, parameters, strict=True)], parameters
            offset += _aligned(size)


def _tensors(what: str, values: Iterable[Any]) -> list[torch.Tensor]:
    tensors = list(values)
    for index, value in enumerate(tensors):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{what}[{index}] is a {type(value).__qualname__}, not a torch.Tensor")
        if value.layout != torch.strided:
            raise TypeError(f"{what}[{index}] is {value.layout}: only dense tensors can be reduced")
    return tensors


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _aligned(size: int) -> int:
    """Sections of a bucket start at multiples of 64 bytes."""
    return -(-size // 64) * 64


def _layout(parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> str:
    """A readable line of dtypes and shapes, by which peers find out that their models differ."""

    def describe(tensor: torch.Tensor, reduced: bool) -> str:
        shape = ",".join(map(str, tensor.shape)) + ("," if tensor.ndim == 1 else "")
        return f"{_name(tensor.dtype)}({shape})" + ("" if reduced else " fixed")

    return " ".join(
        [
            *(describe(p, p.requires_grad) for p in parameters),
            *(describe(b, False) for b in buffers),
        ]
    )


def _as_torch(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
