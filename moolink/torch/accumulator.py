"""The gradient accumulator for torch modules."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import _unflatten_dense_tensors

from moolink._core import TensorLayouts
from moolink.accumulator import AccumulatorBase
from moolink.group import Group
from moolink.training_steps import TrainingStep


class Accumulator(AccumulatorBase):
    """moolib's accumulator for torch parameters; see :class:`moolink.accumulator.AccumulatorBase`.

    Args:
        name: name of the model within the group.
        parameters: the model's parameters, in the same order and of the same shapes and dtypes at
            every peer. Frozen ones (``requires_grad=False``) travel with the state only.
        buffers: tensors that newcomers receive beside the parameters.
        group: the group to reduce in. Without one the accumulator makes an ``Rpc`` and a ``Group``
            called ``name``; then call :meth:`connect`.
        options: ``role``, ``checksum_every``, ``on_divergence``, ``max_grad_norm`` and
            ``on_nonfinite`` of the base class.

    Gradients of float16 and bfloat16 are summed, sent and scaled as float32, and rounded once, when
    they are shown.

    While :meth:`has_gradients` is true, ``.grad`` of each parameter is the round's mean, where
    parameters lie in host memory without gaps without another copy; afterwards it is the tensor
    that it was before, zeroed.

    Raises:
        TypeError: a parameter or buffer is not a tensor, or not a dense one.
        ValueError: no parameter requires a gradient, or one is given twice.
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
        if len({id(p) for p in self._parameters}) < len(self._parameters):
            raise ValueError("a parameter is given twice")
        # A bucket's sections hold one dtype each, so that a section is one kernel call.
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self._parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(_summed_in(parameter.dtype), []).append(parameter)
        self._made_with = [(p.shape, p.dtype, p.requires_grad) for p in self._parameters]
        if not by_dtype:
            raise ValueError("none of the parameters requires a gradient: nothing to reduce")
        self._sections = _sections(by_dtype)
        self._reduced = [p for section in self._sections for p in section.parameters]
        # What can be taken as it is, looked at in one go.
        self._usual_parameters = TensorLayouts(
            [(tuple(p.shape), _name(p.dtype)) for p in self._parameters]
        )
        self._usual_gradients = TensorLayouts(
            [(tuple(p.shape), _name(s.dtype)) for s in self._sections for p in s.parameters]
        )
        self._set_aside: list[torch.Tensor] | None = None  # the user's .grad while a round is shown
        super().__init__(
            name,
            [(_name(s.dtype), sum(s.counts)) for s in self._sections],
            _layout(self._parameters, self._buffers),
            group,
            **options,
        )

    def steps(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        state: Callable[[], Any] | None = None,
        load_state: Callable[[Any], None] | None = None,
        until: Callable[[dict[str, int]], bool] | None = None,
        totals: Mapping[str, int] | None = None,
    ) -> Iterator[TrainingStep]:
        """Iterates over the turns of a training loop in which gradients are wanted::

            for step in accumulator.steps(optimizer):
                loss = compute_loss(model, next(batches))
                loss.backward()
                step.reduce(batch_size=32, counters={"samples": 32})

        Between two turns rounds are applied with ``optimizer.step()``, and then
        ``scheduler.step()``; the states of both travel to newcomers with the model. The rest is
        as in :meth:`~moolink.accumulator.AccumulatorBase.training_steps`.

        Args:
            optimizer: of this accumulator's parameters; the same at every member.
            scheduler: one of ``torch.optim.lr_scheduler``, stepped once a round, without
                arguments.
            state: returns what newcomers need besides.
            load_state: takes it.
            until: ends the iteration when true of the counters' totals.
            totals: those of a checkpoint.

        Raises:
            TypeError: ``scheduler.step`` needs an argument, as ``ReduceLROnPlateau``'s does.
        """
        if scheduler is not None:
            _require_plain_step(scheduler)

        def apply() -> None:
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

        def capture() -> Any:
            schedule = None if scheduler is None else scheduler.state_dict()
            users = None if state is None else state()
            return _plain_tree(optimizer.state_dict()), _plain_tree(schedule), users

        def install(received: Any) -> None:
            optimizer_state, schedule, users = received
            optimizer.load_state_dict(optimizer_state)
            if scheduler is not None:
                scheduler.load_state_dict(_tree_like(scheduler.state_dict(), schedule))
            if load_state is not None:
                load_state(users)

        return self.training_steps(
            apply, state=capture, load_state=install, until=until, totals=totals
        )

    def _gradient_addresses(self) -> list[int] | None:
        """Where the gradients lie, 0 for ``None``; ``None`` unless all can be taken as they are."""
        return self._usual_gradients.addresses([p.grad for p in self._reduced])

    def _validate(self) -> None:
        usual = self._usual_parameters.addresses(self._parameters)
        if usual is not None and self._gradient_addresses() is not None:
            return
        for index, (parameter, made_with) in enumerate(
            zip(self._parameters, self._made_with, strict=True)
        ):
            shape, dtype, reduced = made_with
            if parameter.shape != shape or parameter.dtype != dtype:
                now = _described(parameter.shape, parameter.dtype)
                raise ValueError(
                    f"parameters[{index}] is {now} now and "
                    f"was {_described(shape, dtype)} when the accumulator was made: make another "
                    "one for another model"
                )
            gradient = parameter.grad if reduced else None
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise TypeError(
                    f"the gradient of parameters[{index}] is {gradient.layout}: only dense ones "
                    "can be reduced (sparse=False, or grad.to_dense())"
                )
            if gradient.shape != shape:
                raise ValueError(
                    f"the gradient of parameters[{index}] is of shape {tuple(gradient.shape)}, "
                    f"and the parameter of shape {tuple(shape)}"
                )

    def _gather(self, batch_size: int, clear: bool) -> bool:
        usual = self._gradient_addresses()
        copies: list[torch.Tensor] = []  # alive until they are gathered
        elsewhere: list[torch.Tensor] = []  # what they are copies of
        addresses = iter(self._addresses_of_copies(copies, elsewhere) if usual is None else usual)
        finite = True
        for section in self._sections:
            pieces = [(next(addresses), count, offset) for count, offset in section.places]
            finite &= self._core.gather(_name(section.dtype), pieces, float(batch_size), clear)
        if clear and elsewhere:
            _zero(elsewhere)
        return finite

    def _addresses_of_copies(
        self, copies: list[torch.Tensor], elsewhere: list[torch.Tensor]
    ) -> list[int]:
        addresses = []
        for section in self._sections:
            for parameter in section.parameters:
                gradient = parameter.grad
                if gradient is not None and not _is_plain(gradient, section.dtype):
                    elsewhere.append(gradient)
                    copies.append(_plain_copy(gradient, section.dtype))
                    gradient = copies[-1]
                addresses.append(0 if gradient is None else gradient.data_ptr())
        return addresses

    def _show(self, result: npt.NDArray[np.uint8]) -> None:
        memory = torch.from_numpy(result)
        usual = self._usual_gradients.addresses(self._reduced) is not None
        self._set_aside = []
        for section in self._sections:
            values = memory[section.begin : section.end].view(section.dtype)
            means = _unflatten_dense_tensors(values, section.parameters)  # type: ignore[no-untyped-call]
            for parameter, mean in zip(section.parameters, means, strict=True):
                gradient = parameter.grad
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                self._set_aside.append(gradient)
                if usual or _is_plain(parameter, section.dtype):
                    parameter.grad = mean
                else:
                    parameter.grad = gradient.copy_(mean)

    def _clear(self) -> None:
        if self._set_aside is not None:
            for parameter, gradient in zip(self._reduced, self._set_aside, strict=True):
                parameter.grad = gradient
            self._set_aside = None
        _zero([p.grad for p in self._reduced if p.grad is not None])

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


@dataclass
class _Section:
    """The parameters of one dtype, and where their gradients lie in the bucket."""

    dtype: torch.dtype
    parameters: list[torch.Tensor]
    counts: list[int]
    begin: int  # bytes

    @property
    def end(self) -> int:
        return self.begin + sum(self.counts) * self.dtype.itemsize

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """(elements, offset in the bucket in bytes) of each gradient."""
        offsets = itertools.accumulate(self.counts, initial=0)
        return [
            (count, self.begin + offset * self.dtype.itemsize)
            for count, offset in zip(self.counts, offsets, strict=False)
        ]


def _sections(by_dtype: dict[torch.dtype, list[torch.Tensor]]) -> list[_Section]:
    sections: list[_Section] = []
    begin = 0
    for dtype, parameters in by_dtype.items():
        sections.append(_Section(dtype, parameters, [p.numel() for p in parameters], begin))
        begin = _aligned(sections[-1].end)
    return sections


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether its elements lie one after another in host memory, as in the bucket."""
    return (
        tensor.is_cpu
        and tensor.dtype is dtype
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (dtype.is_complex and tensor.is_conj())
        and not tensor.is_neg()
    )


def _plain_copy(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    copy = gradient.detach().to("cpu", dtype).resolve_conj().resolve_neg()
    return copy.clone(memory_format=torch.contiguous_format)


def _zero(tensors: list[torch.Tensor]) -> None:
    views = [t for t in tensors if t.is_conj() or t.is_neg()]  # _foreach_zero_ knows none
    others = [t for t in tensors if not (t.is_conj() or t.is_neg())]
    with torch.no_grad():
        for view in views:
            view.zero_()
        if others:
            torch._foreach_zero_(others)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """A half times a batch size need not be finite, and a sum of many is not exact enough."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{_name(dtype)}{tuple(shape)}"


def _require_plain_step(scheduler: Any) -> None:
    for parameter in inspect.signature(scheduler.step).parameters.values():
        optional = parameter.default is not parameter.empty
        if not optional and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"{type(scheduler).__qualname__}.step needs {parameter.name!r}, which steps() does "
                "not know: step it in the loop, and hand its state on with state= and load_state="
            )


def _plain_tree(tree: Any) -> Any:
    """The same of plain dicts, lists and tuples: what the codec knows."""
    if isinstance(tree, Mapping):
        return {key: _plain_tree(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_plain_tree(v) for v in tree) if type(tree) in (list, tuple) else tree
    return tree


def _tree_like(mine: Any, plain: Any) -> Any:
    """The plain tree with the kinds of mapping that this peer's has (such as ``Counter``)."""
    if isinstance(mine, dict) and isinstance(plain, dict):
        values = {k: _tree_like(mine.get(k), v) for k, v in plain.items()}
        if type(mine) is dict:
            return values
        same_kind = copy.copy(mine)
        same_kind.clear()
        same_kind.update(values)
        return same_kind
    if isinstance(mine, list) and isinstance(plain, list) and len(mine) == len(plain):
        return [_tree_like(m, p) for m, p in zip(mine, plain, strict=True)]
    return plain


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
