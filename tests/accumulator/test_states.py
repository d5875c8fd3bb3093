"""A leader's state whose parts do not all fit this peer's model: nothing of it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from moolink.accumulate import AccumulatorBase
from moolink.errors import StateError
from tests.accumulator.loops import Make, connect, pump
from tests.waiting import until


@dataclass
class Framework:
    full: Callable[[int, float], Any]  # so many elements of a value
    values: Callable[[AccumulatorBase], tuple[list[float], list[float]]]


def of_torch() -> Framework:
    def values(peer: AccumulatorBase) -> tuple[list[float], list[float]]:
        return peer._parameters[0].tolist(), peer._buffers[0].tolist()

    return Framework(lambda size, value: torch.full((size,), value), values)


def of_jax() -> Framework:
    jnp = pytest.importorskip("jax.numpy")

    def values(peer: AccumulatorBase) -> tuple[list[float], list[float]]:
        return peer.parameters()[0].tolist(), peer.buffers()[0].tolist()

    return Framework(lambda size, value: jnp.full(size, value), values)


@contextmanager
def gives(leader: AccumulatorBase, model: Any) -> Iterator[None]:
    """The leader has another model to hand out meanwhile."""
    own = leader._transfer._capture
    leader._transfer._capture = lambda: model
    yield
    leader._transfer._capture = own


@pytest.mark.parametrize("framework", [of_torch, of_jax], ids=["torch", "jax"])
@pytest.mark.parametrize("misfit", ["a buffer", "a parameter", "no buffer"])
def test_a_state_is_installed_whole_or_not_at_all(
    framework: Callable[[], Framework], misfit: str, make: Make
) -> None:
    tensors = framework()

    def peer(name: str, value: float) -> AccumulatorBase:
        parameters = tensors.full(3, value)
        if isinstance(parameters, torch.Tensor):
            parameters.requires_grad_()
        return make(name, [parameters], [tensors.full(2, value)])

    leader = peer("leader", 7.0)
    connect([leader])
    newcomer = peer("newcomer", 1.0)
    said: list[str] = []

    def turn() -> None:
        pump([leader])
        try:
            pump([newcomer])
        except StateError as error:
            said.append(str(error))

    def refused() -> bool:
        turn()
        return bool(said)

    bad = {
        "a buffer": ([np.full(3, 9, np.float32)], [np.full(5, 9, np.float32)]),
        "a parameter": ([np.full(5, 9, np.float32)], [np.full(2, 9, np.float32)]),
        "no buffer": ([np.full(3, 9, np.float32)], []),
    }[misfit]
    with gives(leader, bad):
        until(refused, "a refused state")
        assert "leader 'leader'" in said[0]
        assert tensors.values(newcomer) == ([1.0] * 3, [1.0] * 2)

    def connected() -> bool:
        turn()
        return newcomer.connected()

    until(connected, "another state, which fits")
    assert tensors.values(newcomer) == ([7.0] * 3, [7.0] * 2)


def test_members_share_neither_the_model_nor_the_state(make: Make) -> None:
    leader = make("leader", [torch.full((1000,), 7.0, requires_grad=True)])
    connect([leader])
    newcomers = [make(name, [torch.zeros(1000, requires_grad=True)]) for name in ("a", "b")]
    moments = torch.ones(1000)
    states: list[torch.Tensor] = []

    def arrived() -> bool:
        for peer in (leader, *newcomers):
            peer.update()
        if leader.wants_state():
            leader.set_state({"moments": moments})
        for peer in newcomers:
            if peer.has_new_state():
                states.append(peer.state()["moments"])
                states[-1] += 1  # the state is the user's
        return len(states) == 2

    until(arrived, "states of both newcomers")
    assert moments.eq(1).all()
    assert all(state.eq(2).all() for state in states)
    models = [peer._parameters[0].detach() for peer in (leader, *newcomers)]
    assert all(model.eq(7).all() for model in models)
    for value, model in enumerate(models):
        model.fill_(value)
    assert [model.unique().tolist() for model in models] == [[0.0], [1.0], [2.0]]


def test_a_state_is_limited_as_a_whole(make: Make) -> None:
    leader = make("leader", [torch.zeros(17, requires_grad=True) for _ in range(3)])
    connect([leader])
    newcomer = make("newcomer", [torch.zeros(17, requires_grad=True) for _ in range(3)])

    def wanted() -> bool:
        leader.update()
        newcomer.update()
        return leader.wants_state()

    until(wanted, "a question for the state")
    with pytest.raises(ValueError, match=r"the state's arrays exceed the limit of 65536 arrays"):
        leader.set_state([np.zeros(17, np.float32)] * 65_534)
    connect([leader, newcomer])
