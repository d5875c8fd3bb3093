"""Gradients that travel while ``backward()`` still computes others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from moolink._core import Lock, check_array
from moolink.accumulate import training_steps
from moolink.accumulate.buckets import Section
from moolink.accumulate.checks import checked_batch_size, checked_counters
from moolink.accumulate.totals import Means, with_means
from moolink.errors import Closed
from moolink.internal.keywords import names_keywords
from moolink.torch.tensors import writes

if TYPE_CHECKING:
    from moolink.torch.accumulator import Accumulator

_LEAST_REPORTED = 512 << 10  # bytes that are worth a call into the core: a chunk of the reduction


class BackwardGather:
    """Fills the bucket of one contribution, each gradient as soon as ``backward()`` has it.

    The bucket begins with the last parameter, whose gradient is the first to be complete. The other
    members read as much of its beginning as is filled.
    """

    def __init__(self, accumulator: Accumulator, batch_size: int) -> None:
        self._accumulator = accumulator
        self._batch_size = batch_size
        self._places: list[tuple[Section, tuple[int, int, int]]] = [
            (section, place) for section in accumulator._sections for place in section.places
        ]
        self._viewed = {id(parameter) for parameter in accumulator._viewed}
        self._filled = [False] * len(self._places)
        self._writes: list[tuple[int, int] | None] = [None] * len(self._places)  # when filled
        self._next = 0  # the first place that is not filled
        self._told = 0  # bytes
        self._lock = Lock()  # backward() calls from several threads
        self.any_computed = False  # a gradient, on any device
        self.finite = True  # all gradients so far

    def watch(self, hooks: contextlib.ExitStack) -> None:
        """Has autograd call this object for each parameter, until the stack is closed."""
        for number, (_, (index, _, _)) in enumerate(self._places):
            parameter = self._accumulator._parameters[index]
            if parameter.requires_grad:
                hook = partial(self._complete, number)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)

    def _complete(self, number: int, parameter: torch.Tensor) -> None:
        with self._lock:
            self._fill(number, parameter)

    def _fill(self, number: int, parameter: torch.Tensor) -> None:
        if self._filled[number]:
            raise RuntimeError(
                "a second backward() in reduce_during_backward(): the gradients of the first are "
                "with the other members already. Add the losses and call backward() once, or call "
                "it for all but the last before the block"
            )
        gradient = parameter.grad
        self.any_computed |= gradient is not None
        if gradient is None or gradient.is_cuda:
            return  # finish() waits for a device once
        check_array(gradient, f"the gradient of parameters[{self._places[number][1][0]}]")
        section, place = self._places[number]
        self.finite &= self._gather(section, [place])
        self._filled[number] = True
        if id(parameter) in self._viewed:
            parameter.grad = None  # the other members read the bucket
        self._writes[number] = writes(parameter.grad)
        self._tell()

    def _gather(self, section: Section, places: list[tuple[int, int, int]]) -> bool:
        return self._accumulator._gather_places(section, places, self._batch_size, clear=False)

    def _tell(self) -> None:
        while self._next < len(self._places) and self._filled[self._next]:
            self._next += 1
        if self._next == 0:
            return
        section, (_, count, offset) = self._places[self._next - 1]
        written = offset + count * section.itemsize
        if self._told + _LEAST_REPORTED <= written < self._accumulator._sections[-1].end:
            self._accumulator._core.written(written)
            self._told = written

    def _require_unchanged(self) -> None:
        for (_, (index, _, _)), filled, then in zip(
            self._places, self._filled, self._writes, strict=True
        ):
            now = writes(self._accumulator._parameters[index].grad)
            if filled and now is not None and now != then:
                raise RuntimeError(
                    f"the gradient of parameters[{index}] was changed in reduce_during_backward() "
                    "after backward() had computed it: the other members have it as it was. Change "
                    "gradients in a hook (register_hook), or the round's mean"
                )

    def finish(self) -> None:
        """Fills the rest, from the gradients as they are, and ends the contribution."""
        self._require_unchanged()
        for section in self._accumulator._sections:
            rest = [
                place
                for (its_section, place), filled in zip(self._places, self._filled, strict=True)
                if its_section is section and not filled
            ]
            if rest:
                self.finite &= self._gather(section, rest)
        self._accumulator._core.written(self._accumulator._sections[-1].end)


@contextlib.contextmanager
def reduce_during_backward(
    accumulator: Accumulator, batch_size: int, counters: Mapping[str, int] | None
) -> Iterator[None]:
    """See :meth:`moolink.torch.Accumulator.reduce_during_backward`."""
    batch_size, sums = checked_batch_size(batch_size), checked_counters(counters)
    accumulator._require_wanted("reduce_during_backward")
    accumulator._validate()
    gather = BackwardGather(accumulator, batch_size)
    try:
        accumulator._in_backward = True
        accumulator._core.offer_unwritten(batch_size, sums)
        with contextlib.ExitStack() as hooks:
            gather.watch(hooks)
            yield
        accumulator._validate()
        if not gather.any_computed and not accumulator._any_gradient():
            accumulator._warn_without_gradients(written=False)
        gather.finish()
        accumulator._rounds.contributed(batch_size, sums)
        if not gather.finite:
            accumulator._tell_of_nonfinite()
    except BaseException:
        with contextlib.suppress(Closed):  # a closed accumulator contributes nothing
            accumulator._core.withdraw()
        raise
    finally:
        accumulator._in_backward = False
        accumulator._drop_views()  # the other members read the bucket
        accumulator._clear()


@names_keywords
class TrainingStep(training_steps.TrainingStep):
    """One turn; see :class:`moolink.accumulate.training_steps.TrainingStep`."""

    _accumulator: Accumulator

    @contextlib.contextmanager
    def reduce_during_backward(
        self,
        batch_size: int,
        counters: Mapping[str, int] | None = None,
        means: Means | None = None,
    ) -> Iterator[None]:
        """Contributes the gradients that ``backward()`` computes in the block, each as soon as it
        is there, once a turn; as the accumulator's
        :meth:`~moolink.torch.Accumulator.reduce_during_backward`, with ``means`` as in
        :meth:`reduce`."""
        self._require_first("reduce_during_backward")
        with self._accumulator.reduce_during_backward(batch_size, with_means(counters, means)):
            yield
        self._reduced = True
