"""What the users of several accumulators in one process do."""

from __future__ import annotations

from collections.abc import Callable

import torch

import moolink
from moolink.accumulate.accumulator import AccumulatorBase
from tests.waiting import until

Make = Callable[..., AccumulatorBase]


def parameters(value: float = 0.0) -> list[torch.Tensor]:
    return [torch.full(shape, value, requires_grad=True) for shape in ((2, 3), (4,))]


def pump(accumulators: list, states: list | None = None) -> None:
    """One turn of the user's loop at every peer, without rounds."""
    for accumulator in accumulators:
        accumulator.update()
        if accumulator.wants_state():
            accumulator.set_state({"from": accumulator.get_leader()})
        if accumulator.has_new_state():
            state = accumulator.state()
            if states is not None:
                states.append(state)


def failed(accumulators: list, errors: list[str]) -> bool:
    """Whether a turn of the loop raised at some peer; the text is appended to ``errors``."""
    for accumulator in accumulators:
        try:
            pump([accumulator])
        except (moolink.Error, ValueError, FloatingPointError) as error:
            errors.append(str(error))
    return bool(errors)


def connect(accumulators: list, states: list | None = None) -> None:
    def ready() -> bool:
        pump(accumulators, states)
        return (
            all(a.connected() and a.wants_gradients() for a in accumulators)
            and len({a.get_leader() for a in accumulators}) == 1
        )

    until(ready, "connected accumulators")


def reduce_round(accumulators: list, given: list[tuple[list[torch.Tensor], int]]) -> None:
    """Every peer contributes its gradients; returns when all have the result.

    Args:
        given: for each peer its leaves (none: not torch's, or on a device), which are zeroed by
            the contribution, and its batch size.
    """
    for accumulator, (leaves, batch) in zip(accumulators, given, strict=True):
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        accumulator.reduce_gradients(batch, counters={"steps": 10 * batch})
        assert not any(gradient.any() for gradient in gradients)

    def delivered() -> bool:
        pump(accumulators)
        return all(a.has_gradients() for a in accumulators)

    until(delivered, "a round")
