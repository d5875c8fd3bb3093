"""The gradient accumulator for torch modules."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Unpack
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from moolink._core import TensorLayouts, check_array, copy_to_host
from moolink.accumulate import AccumulatorBase
from moolink.accumulate.buckets import Section, layout, sections
from moolink.accumulate.options import AccumulatorOptions
from moolink.accumulate.totals import Totals
from moolink.accumulate.training_steps import (
    LoopOptions,
    OwnState,
    Until,
    checked_loop_state,
    training_steps,
)
from moolink.group import Group
from moolink.internal import logs
from moolink.internal.keywords import names_keywords
from moolink.internal.repeated import Repeated
from moolink.metrics.run_log import RunLog
from moolink.torch.backward import TrainingStep, reduce_during_backward
from moolink.torch.optimizers import (
    load_optimizer_state,
    optimizer_state,
    plain_tree,
    tree_like,
)
from moolink.torch.tensors import (
    checked_tensors,
    copy_all,
    describe,
    dtype_name,
    dtype_of,
    fitting,
    is_plain,
    means_by_device,
    plain_copy,
    require_plain,
    shape_text,
    unflatten,
    writes,
    zero_all,
)

_LOOK_EVERY = 64  # contributions

_with_views: WeakSet[Accumulator] = WeakSet()


def _forget_views() -> None:
    """In a forked child: the bucket belongs to the parent, and other members read it."""
    for accumulator in _with_views:
        accumulator._drop_views()


os.register_at_fork(after_in_child=_forget_views)


@names_keywords
class Accumulator(AccumulatorBase):
    """moolib's accumulator for torch parameters; see :class:`moolink.accumulate.AccumulatorBase`.

    Args:
        name: name of the model within the group.
        parameters: the model's parameters, in the same order and of the same shapes and dtypes at
            every peer. Frozen ones (``requires_grad=False``) travel with the state only.
        buffers: tensors that newcomers receive beside the parameters.
        group: the group to reduce in. Without one the accumulator makes an ``Rpc`` and a ``Group``
            called ``name``; then call :meth:`connect`.
        gradient_as_bucket_view: creates gradients as views of the bucket that the accumulator
            sends, as in ``DistributedDataParallel``, which saves their memory and a copy. It
            applies to parameters without gaps in host memory whose dtype is the one in which
            gradients are summed. When :meth:`wants_gradients` returns true, each ``.grad`` that was
            ``None`` is such a view, zeroed. :meth:`reduce_gradients` sets ``.grad`` to ``None``,
            because the other members read the memory from then on: clone gradients that you want
            to keep. Do not call ``optimizer.zero_grad()``: with ``set_to_none=True``
            (torch's default) it discards the views. In a forked child ``.grad`` is ``None``.
        options: ``role``, ``checksum_every``, ``on_divergence``, ``max_grad_norm``,
            ``on_nonfinite``, ``sync_every`` and ``units`` of the base class.

    Gradients of float16 and bfloat16 are summed, sent and scaled as float32, and rounded once, when
    they are shown.

    While :meth:`has_gradients` is true, ``.grad`` of each parameter is the round's mean, where
    parameters lie in host memory without gaps without another copy; afterwards it is the tensor
    that it was before, zeroed, or with ``gradient_as_bucket_view`` its earlier values.

    Raises:
        TypeError: a parameter or buffer is not a tensor, or one without plain memory of its own: a
            ``DTensor`` (if each member has the same shards, give its local shard, ``to_local()``),
            another subclass that wraps tensors, a sparse, quantized, nested or meta
            tensor, or one whose storage was freed. The message names it.
        ValueError: no parameter requires a gradient, or one is given twice.
    """

    framework = "torch"
    _kind_of_step = TrainingStep

    def __init__(
        self,
        name: str,
        parameters: Iterable[torch.Tensor],
        buffers: Iterable[torch.Tensor] = (),
        group: Group | None = None,
        *,
        gradient_as_bucket_view: bool = False,
        **options: Unpack[AccumulatorOptions],
    ) -> None:
        self._viewed: list[torch.Tensor] = []  # parameters whose gradients can be views
        self._parameters = checked_tensors("parameters", parameters)
        self._buffers = checked_tensors("buffers", buffers)
        if len({id(p) for p in self._parameters}) < len(self._parameters):
            raise ValueError("a parameter is given twice")
        self._made_with = [(p.shape, p.dtype, p.requires_grad) for p in self._parameters]
        described = [describe(p, p.requires_grad) for p in self._parameters]
        self._sections = sections(described)
        if not self._sections:
            raise ValueError("none of the parameters requires a gradient: nothing to reduce")
        self._reduced = [self._parameters[i] for s in self._sections for i in s.indices]
        if gradient_as_bucket_view:
            of_sections = ((self._parameters[i], s) for s in self._sections for i in s.indices)
            self._viewed = [p for p, section in of_sections if is_plain(p, dtype_of(section))]
            _with_views.add(self)
        # Tensors that need no conversion, checked in one call.
        self._usual_parameters = TensorLayouts(
            [(tuple(p.shape), dtype_name(p.dtype)) for p in self._parameters]
        )
        self._usual_gradients = TensorLayouts(
            [(tuple(self._parameters[i].shape), s.dtype) for s in self._sections for i in s.indices]
        )
        # The user's .grad while a round is shown.
        self._set_aside: list[torch.Tensor | None] | None = None
        self._ends_left = self._ends_gradients()  # after this class last wrote gradients
        self._gathered = 0  # contributions
        self._without_gradients = Repeated()
        super().__init__(
            name,
            [(section.dtype, section.count) for section in self._sections],
            layout(described, [describe(b, False) for b in self._buffers]),
            group,
            **options,
        )

    def steps(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        learning_rate: Callable[[Totals], float] | None = None,
        state: Callable[[], Any] | None = None,
        load_state: Callable[[Any], None] | None = None,
        until: Until | None = None,
        totals: Mapping[str, int] | None = None,
        idle: Callable[[], None] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: float = 60.0,
        log: str | os.PathLike[str] | RunLog | None = None,
    ) -> Iterator[TrainingStep]:
        """Iterates over the turns of a training loop in which gradients are wanted::

            for step in accumulator.steps(optimizer):
                loss = compute_loss(model, next(batches))
                loss.backward()
                step.reduce(batch_size=32, counters={"samples": 32})

        Between two turns rounds are applied with ``optimizer.step()``, and then
        ``scheduler.step()``; the states of both travel to newcomers with the model. Members in
        other frameworks understand the state of the optimizers that
        :func:`moolink.torch.optimizer_state` knows. The rest is as in
        :meth:`~moolink.accumulate.AccumulatorBase.training_steps`.

        Args:
            optimizer: of this accumulator's parameters; the same at every member.
            scheduler: one of ``torch.optim.lr_scheduler``, stepped once a round, without
                arguments.
            learning_rate: returns that of a round, of all parameters, from the totals of the
                rounds before it, which are equal at every member.
            state: returns the newcomers' further state.
            load_state: takes it.
            until: ends the iteration when true of the counters' totals; or totals, such as
                ``{"steps": 1_000_000}``, of which one has to be reached.
            totals: those of a checkpoint; None: those of this accumulator's loop before.
            idle: called while the loop waits; an exception of it ends the loop.
            checkpoint: path of a file in which the leader keeps the model, the optimizer, the
                totals and ``state()``. If there is one, this call takes them over, so call it
                before ``connect()``.
            every: seconds between two times that it is written; it is also written at the end.
            log: where ``step.log()`` writes: a folder, for ``log.csv``, or a
                :class:`moolink.metrics.RunLog`.

        Raises:
            TypeError: ``scheduler.step`` needs an argument, as ``ReduceLROnPlateau``'s does.
            ValueError: the optimizer has none of this accumulator's parameters, or ``totals`` is
                given beside ``checkpoint``, which has its own.
            moolink.FileError: the checkpoint is damaged, or of another model or loop; nothing has
                changed. Exceptions of ``load_state`` come as they are.
            OSError: in the loop, at its end: the checkpoint cannot be written. Before that, this is
                a warning, and the leader tries again after ``every`` seconds.
            RuntimeError: ``connect()`` was called before, with ``checkpoint``.
        """
        self._check_optimizer(optimizer)
        if scheduler is not None:
            _require_plain_step(scheduler)

        def apply(totals: Totals) -> None:
            if learning_rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(totals)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()

        def capture() -> Any:
            schedule = None if scheduler is None else scheduler.state_dict()
            users = None if state is None else state()
            common = optimizer_state(optimizer)
            own = optimizer.state_dict() if common is None else None
            return {
                "optimizer": plain_tree(common),
                "torch": plain_tree(own),
                "scheduler": plain_tree(schedule),
                "users": users,
            }

        def install(received: Any) -> None:
            received = checked_loop_state(received, self.framework)
            if received["optimizer"] is not None:
                load_optimizer_state(optimizer, received["optimizer"])
            else:
                optimizer.load_state_dict(received["torch"])
            if scheduler is not None and received.get("scheduler") is not None:
                schedule = tree_like(scheduler.state_dict(), received["scheduler"])
                scheduler.load_state_dict(schedule)

        def keep() -> Callable[[], None]:
            before = copy.deepcopy(optimizer.state_dict())
            schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())

            def bring_back() -> None:
                optimizer.load_state_dict(before)
                if schedule is not None:
                    scheduler.load_state_dict(schedule)

            return bring_back

        own = OwnState(install, keep)
        options = LoopOptions(
            capture, load_state, until, totals, idle, checkpoint, every, log, own=own
        )
        return training_steps(self, apply, options)

    def reduce_during_backward(
        self, batch_size: int, counters: Mapping[str, int] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Contributes the gradients that ``backward()`` computes in a ``with`` block, each as soon
        as it is there, so that the round's reduction runs beside the rest of ``backward()``::

            loss = compute_loss(model, batch)
            with accumulator.reduce_during_backward(batch_size=32):
                loss.backward()

        It takes the place of :meth:`reduce_gradients` and leaves the gradients zeroed. A gradient
        on a device, or one that ``backward()`` does not compute in the block, counts as it is at
        the end of the block. The others must not change once ``backward()`` has computed them: do
        not clip or unscale them in the block. With ``gradient_as_bucket_view`` they are ``None``
        from then on. An exception in the block withdraws the contribution: the group begins
        another membership, in which no member has anything of it.

        The first gradients are with the other members before the last ones can be checked. So
        ``on_nonfinite`` applies to the round: with ``"skip"`` no member applies it, with
        ``"raise"`` :meth:`update` raises at every member.

        Args:
            batch_size: the weight of this contribution in the mean, at least 1.
            counters: integers summed exactly over the round's contributions.

        Raises:
            RuntimeError: ``wants_gradients()`` is false, :meth:`update` is called in the block,
                ``backward()`` is called in it twice, or a gradient has changed after ``backward()``
                had computed it.
            ValueError, TypeError: as for :meth:`reduce_gradients`.
        """
        return reduce_during_backward(self, batch_size, counters)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        given = [p for group in optimizer.param_groups for p in group["params"]]
        theirs = {id(p) for p in given if p.requires_grad}
        mine = {id(p) for p in self._reduced}
        if not mine & theirs:
            raise ValueError(
                "the optimizer has none of the accumulator's parameters, so no round would change "
                "the model: make it of the same model.parameters(). (If it keeps copies of them, "
                "apply the rounds yourself: training_steps(apply))"
            )
        if missing := len(mine - theirs):
            logs.logger.warning(
                "the optimizer does not change %d of the accumulator's %d parameters",
                missing,
                len(mine),
            )
        if others := len(theirs - {id(p) for p in self._parameters}):
            logs.logger.warning(
                "the optimizer has %d parameters that the accumulator does not reduce: they become "
                "different at each member",
                others,
            )

    def _gradients(self) -> list[torch.Tensor | None]:
        """The gradients of the reduced parameters. The list owns them, so other threads may replace
        `.grad` from now on. torch itself allows no replacement while `.grad` is read."""
        return [parameter.grad for parameter in self._reduced]

    def _validate(self) -> None:
        self._require_parameters()
        if self._usual_gradients.fit(self._gradients()):
            return
        for index, (parameter, made_with) in enumerate(
            zip(self._parameters, self._made_with, strict=True)
        ):
            shape, _, reduced = made_with
            gradient = parameter.grad if reduced else None
            if gradient is None:
                continue
            check_array(gradient, f"the gradient of parameters[{index}]")
            if gradient.shape != shape:
                raise ValueError(
                    f"the gradient of parameters[{index}] is of shape {tuple(gradient.shape)}, "
                    f"and the parameter of shape {tuple(shape)}"
                )

    def _require_parameters(self) -> None:
        """Raises unless the parameters are as they were when the accumulator was made."""
        if self._usual_parameters.fit(self._parameters):
            return
        for index, (parameter, made_with) in enumerate(
            zip(self._parameters, self._made_with, strict=True)
        ):
            shape, dtype, _ = made_with
            check_array(parameter, f"parameters[{index}]")
            if parameter.shape != shape or parameter.dtype != dtype:
                now = shape_text(parameter.shape, parameter.dtype)
                raise ValueError(
                    f"parameters[{index}] is {now} now and "
                    f"was {shape_text(shape, dtype)} when the accumulator was made: make another "
                    "one for another model"
                )

    def _prepare(self) -> None:
        if all(p.grad is not None for p in self._viewed[:1] + self._viewed[-1:]):
            return
        with torch.inference_mode(False):  # where actors act: backward() writes to these tensors
            memory = torch.from_numpy(self._core.bucket())
            for section, values in self._of_sections(memory):
                parameters = [self._parameters[i] for i in section.indices]
                views = unflatten(values, parameters)
                for parameter, view in zip(parameters, views, strict=True):
                    if parameter.grad is None and is_plain(parameter, view.dtype):
                        parameter.grad = view.zero_()
        self._ends_left = self._ends_gradients()

    def _drop_views(self) -> None:
        for parameter in self._viewed:
            parameter.grad = None

    def _of_sections(self, memory: torch.Tensor) -> Iterator[tuple[Section, torch.Tensor]]:
        """Yields each section with its elements in a bucket's memory."""
        for section in self._sections:
            yield section, memory[section.begin : section.end].view(dtype_of(section))

    def _gather(self, batch_size: int, clear: bool) -> bool:
        if self._may_be_forgotten() and not self._any_gradient():
            ends = self._ends_gradients()
            self._warn_without_gradients(ends != self._ends_left and any(ends))
        if self._viewed and not clear and not self._gather_all(1, clear):
            return False  # found before gradients are scaled in their places
        try:
            finite = self._gather_all(batch_size, clear)
        finally:
            # The other members read the bucket now. After an error, a part of it may be scaled.
            self._drop_views()
        self._ends_left = self._ends_gradients()
        return finite

    def _warn_without_gradients(self, written: bool) -> None:
        """All gradients are zero or missing. `written`: since the last round, by backward() or by
        zero_grad()."""
        if written:
            what = "all gradients are zero: does the loss depend on the parameters (or is it "
            what += "constant, detached, times 0), or was backward() forgotten? Call "
        else:
            what = "no parameter has a gradient since the last round, so zeros are contributed: "
            what += "call backward() before step.reduce() (reduce_gradients()), or "
        self._without_gradients.warn(f"{what}step.skip() (skip_gradients()) to contribute nothing")

    def _may_be_forgotten(self) -> bool:
        """Whether to search for a gradient. backward() nearly always writes to the gradient of the
        first or the last parameter. So search if both have no gradient, or the gradients that this
        class left there. Also search at every 64th contribution, because
        zero_grad(set_to_none=False) writes to these gradients, too."""
        self._gathered += 1
        ends = self._ends_gradients()
        return (
            ends == self._ends_left
            or all(end is None for end in ends)
            or self._gathered % _LOOK_EVERY == 1
        )

    def _ends_gradients(self) -> list[tuple[int, int] | None]:
        """For the first and the last parameter: the id of the gradient tensor, and its number of
        writes."""
        return [writes(self._reduced[0].grad), writes(self._reduced[-1].grad)]

    def _any_gradient(self) -> bool:
        return any(g is not None and bool(g.any()) for g in self._gradients())

    def _gather_all(self, batch_size: int, clear: bool) -> bool:
        gradients = self._gradients()
        if not self._usual_gradients.fit(gradients):
            whole = [self._gather_places(s, s.places, batch_size, clear) for s in self._sections]
            return all(whole)
        remaining = iter(gradients)
        finite = True
        for section in self._sections:
            pieces = [(next(remaining), count, offset) for _, count, offset in section.places]
            finite &= self._core.gather(section.dtype, pieces, float(batch_size), clear)
        return finite

    def _gather_places(
        self, section: Section, places: list[tuple[int, int, int]], batch_size: int, clear: bool
    ) -> bool:
        """The same of some parameters of a section, whose gradients need not lie in host memory as
        they do in the bucket."""
        elsewhere: list[torch.Tensor] = []  # the sources of the copies
        dtype = dtype_of(section)
        pieces: list[tuple[torch.Tensor | None, int, int]] = []
        on_devices: list[tuple[torch.Tensor, int, int]] = []
        for index, count, offset in places:
            gradient = self._parameters[index].grad
            if gradient is not None and gradient.is_cuda:
                elsewhere.append(gradient)
                on_devices.append((gradient.detach().to(dtype), count, offset))
                continue
            if gradient is not None and not is_plain(gradient, dtype):
                elsewhere.append(gradient)
                gradient = plain_copy(gradient, dtype)
            pieces.append((gradient, count, offset))
        finite = True
        if on_devices:
            finite = self._gather_staged(section.dtype, on_devices, batch_size)
        finite &= self._core.gather(section.dtype, pieces, float(batch_size), clear)
        if clear:
            zero_all(elsewhere)
        return finite

    def _gather_staged(
        self, dtype: str, gradients: list[tuple[torch.Tensor, int, int]], batch_size: int
    ) -> bool:
        """Copies (gradient, elements, offset) to the bucket, waits once, and scales them there."""
        bucket = self._core.bucket()
        places = [bucket[offset:][: gradient.nbytes] for gradient, _, offset in gradients]
        copy_to_host([gradient for gradient, _, _ in gradients], places)
        staged = [
            (place.view(dtype), count, offset)
            for place, (_, count, offset) in zip(places, gradients, strict=True)
        ]
        # Not to be cleared: they lie where they are gathered.
        return self._core.gather(dtype, staged, float(batch_size), False)

    def _show(self, result: npt.NDArray[np.uint8]) -> None:
        memory = torch.from_numpy(result)
        self._require_parameters()
        usual = self._usual_gradients.fit(self._reduced)
        self._set_aside = []
        for section, values in self._of_sections(memory):
            parameters = [self._parameters[i] for i in section.indices]
            means = unflatten(values, parameters) if usual else means_by_device(values, parameters)
            for parameter, mean in zip(parameters, means, strict=True):
                gradient = parameter.grad
                replace = usual or is_plain(parameter, values.dtype, mean.device)
                if gradient is None and not (replace and self._viewed):
                    gradient = torch.zeros_like(parameter)
                self._set_aside.append(gradient)
                if replace or gradient is None:
                    parameter.grad = mean
                else:
                    parameter.grad = gradient.copy_(mean)

    def _clear(self) -> None:
        if self._set_aside is not None:
            for parameter, gradient in zip(self._reduced, self._set_aside, strict=True):
                parameter.grad = gradient
            self._set_aside = None
        zero_all([gradient for gradient in self._gradients() if gradient is not None])
        self._ends_left = self._ends_gradients()

    def _capture_model(self) -> Any:
        return (
            [p.detach() for p in self._parameters],
            [b.detach() for b in self._buffers],
        )

    def _install_model(self, model: Any) -> None:
        parameters, buffers = model
        received = fitting(self._buffers, buffers)
        require_plain("buffers", self._buffers)
        self._install_parameters(parameters)
        copy_all(self._buffers, received)

    def _capture_parameters(self) -> list[Any]:
        self._require_parameters()
        return [p.detach().clone() for p in self._parameters]

    def _install_parameters(self, parameters: list[Any]) -> None:
        self._require_parameters()
        copy_all(self._parameters, fitting(self._parameters, parameters))

    def _checksum(self) -> int:
        self._require_parameters()
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self._parameters:
            logical = parameter.detach().cpu().contiguous()
            digest.update(logical.reshape(-1).view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest(), "little")


def _require_plain_step(scheduler: Any) -> None:
    for parameter in inspect.signature(scheduler.step).parameters.values():
        optional = parameter.default is not parameter.empty
        if not optional and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"{type(scheduler).__qualname__}.step needs {parameter.name!r}, which steps() does "
                "not know: step it in the loop, and hand its state on with state= and load_state="
            )
