"""Members of one group that compute in torch and in JAX."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moolink.accumulate import AccumulatorBase
from tests.accumulator.loops import Make, connect, pump
from tests.waiting import until

jax = pytest.importorskip("jax")
jnp = jax.numpy

SHAPES = ((2, 3), (4,))


def torch_model(value: float = 0.0) -> list[torch.Tensor]:
    return [torch.full(shape, value, requires_grad=True) for shape in SHAPES]


def jax_model(value: float = 0.0) -> tuple[jax.Array, ...]:
    return tuple(jnp.full(shape, value) for shape in SHAPES)


def gradients(value: float) -> list[np.ndarray]:
    """Gradients that differ from element to element, so that a wrong order gives a wrong mean."""
    return [
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 10 * number + value
        for number, shape in enumerate(SHAPES)
    ]


class Member:
    """A member of either framework; JAX's optimiser differs from torch's in the last bits."""

    def __init__(self, accumulator: AccumulatorBase, error: float | None = None) -> None:
        self.accumulator = accumulator
        self.is_torch = accumulator.framework == "torch"
        self.error = error if error is not None else 0.0 if self.is_torch else 1e-6

    def parameters(self) -> list[np.ndarray]:
        if self.is_torch:
            return [p.detach().numpy() for p in self.accumulator._parameters]
        return [np.asarray(p) for p in self.accumulator.parameters()]

    def contribute(self, value: float, batch: int) -> None:
        if self.is_torch:
            for p, gradient in zip(self.accumulator._parameters, gradients(value), strict=True):
                p.grad = torch.from_numpy(gradient)
            self.accumulator.reduce_gradients(batch)
        else:
            self.accumulator.reduce_gradients(tuple(map(jnp.asarray, gradients(value))), batch)

    def mean(self) -> list[np.ndarray]:
        if self.is_torch:
            return [p.grad.numpy() for p in self.accumulator._parameters]
        return [np.asarray(gradient) for gradient in self.accumulator.gradients()]

    def apply(self) -> None:
        if self.is_torch:
            with torch.no_grad():
                for p in self.accumulator._parameters:
                    p.sub_(p.grad * (0.1 + self.error))
        else:
            parameters = jax.tree.map(
                lambda p, g: p - g * (0.1 + self.error),
                self.accumulator.parameters(),
                self.accumulator.gradients(),
            )
            self.accumulator.set_parameters(parameters)
        self.accumulator.zero_gradients()


def equal_parameters(members: list[Member]) -> bool:
    first = members[0].parameters()
    return all(
        all(np.array_equal(a, b) for a, b in zip(first, m.parameters(), strict=True))
        for m in members[1:]
    )


def turn(members: list[Member]) -> None:
    """One round, applied by all."""
    accumulators = [m.accumulator for m in members]

    def in_step() -> bool:  # a new leader's framework is asked for, which takes a moment
        pump(accumulators)
        return all(a.wants_gradients() for a in accumulators) and equal_parameters(members)

    until(in_step, "equal parameters")
    for number, member in enumerate(members):
        member.contribute(1.0 + number, 1)
    apply_round(members, (1 + len(members)) / 2)


def apply_round(members: list[Member], mean: float) -> None:
    """Each applies the next round as soon as it has it: one may wait for the leader to do so."""
    left = list(members)

    def applied() -> bool:
        pump([m.accumulator for m in members])
        for member in [m for m in left if m.accumulator.has_gradients()]:
            for shown, expected in zip(member.mean(), gradients(mean), strict=True):
                np.testing.assert_allclose(shown, expected)
            member.apply()
            left.remove(member)
        return not left

    until(applied, "a round")


def made(make: Make, leader: str, count: int, **options: object) -> list[Member]:
    """The first is of the framework given, and leads; then they take turns."""
    others = {"torch": "jax", "jax": "torch"}
    members, framework = [], leader
    for number in range(count):
        model = torch_model() if framework == "torch" else jax_model()
        peer = make(f"peer-{number}", model, checksum_every=1, **options)
        peer.set_virtual_batch_size(count)
        members.append(Member(peer))
        connect([m.accumulator for m in members])
        framework = others[framework]
    assert members[0].accumulator.is_leader()
    return members


@pytest.mark.parametrize("leader", ["torch", "jax"])
def test_all_have_the_leaders_parameters_after_each_round(make: Make, leader: str) -> None:
    members = made(make, leader, 3)
    for _ in range(6):
        turn(members)
    assert members[0].accumulator.model_version() == 6
    accumulators = [m.accumulator for m in members]
    until(lambda: pump(accumulators) or all(a.wants_gradients() for a in accumulators), "the end")
    assert equal_parameters(members)


@pytest.mark.parametrize("leader", ["torch", "jax"])
def test_leadership_passes_to_the_other_framework(make: Make, leader: str) -> None:
    members = made(make, leader, 3)
    for _ in range(3):
        turn(members)
    gone = members.pop(0)
    gone.accumulator.close()
    gone.accumulator._group.close()
    for m in members:
        m.accumulator.set_virtual_batch_size(2)
    accumulators = [m.accumulator for m in members]
    until(
        lambda: (
            pump(accumulators)
            or (
                all(a.connected() for a in accumulators)
                and accumulators[0].get_leader() != "peer-0"
            )
        ),
        "the other leader",
    )
    for _ in range(3):
        turn(members)
    assert members[0].accumulator.model_version() == 6


def test_every_few_rounds_if_it_is_wanted_so(make: Make) -> None:
    members = made(make, "torch", 2, sync_every=3)
    accumulators = [m.accumulator for m in members]
    seen = []
    for round_ in range(1, 7):
        ready = lambda: pump(accumulators) or all(a.wants_gradients() for a in accumulators)  # noqa: E731
        until(ready, "the turn")
        for member in members:
            member.contribute(1.0, 1)
        apply_round(members, 1.0)
        until(ready, "the parameters")
        seen.append(equal_parameters(members))
        assert members[0].accumulator.model_version() == round_
    assert seen == [False, False, True, False, False, True]


def test_one_framework_publishes_nothing(make: Make) -> None:
    peers = [make(f"peer-{i}", torch_model()) for i in range(2)]
    members = [Member(peer) for peer in peers]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    for _ in range(3):
        turn(members)
        assert not any(peer.awaits_parameters() for peer in peers)


def test_who_is_behind_takes_the_newest_and_holds_nobody_up(make: Make) -> None:
    members = made(make, "jax", 2)
    leader, late = members
    leader.accumulator.set_virtual_batch_size(1)
    turn_of_one = [leader.accumulator]
    version = 0
    for _ in range(2):  # as many as a member may leave unread
        until(lambda: pump(turn_of_one) or turn_of_one[0].wants_gradients(), "the turn")
        leader.contribute(1.0, 1)
        until(lambda: pump(turn_of_one) or turn_of_one[0].has_gradients(), "a round")
        leader.apply()
        version += 1

    def caught_up() -> bool:
        pump([m.accumulator for m in members])
        if late.accumulator.has_gradients():
            late.apply()
        return late.accumulator.model_version() == version and late.accumulator.wants_gradients()

    until(caught_up, "the late member")
    assert equal_parameters(members)


def test_a_member_is_in_step_once_it_has_the_leaders_parameters(make: Make) -> None:
    members = made(make, "torch", 2)
    leader, other = members
    for _ in range(3):
        turn(members)
    accumulators = [m.accumulator for m in members]
    until(lambda: pump(accumulators) or all(a.wants_gradients() for a in accumulators), "the turn")
    for member in members:
        member.contribute(1.0, 1)
    until(lambda: pump(accumulators[:1]) or accumulators[0].has_gradients(), "a round")
    leader.apply()
    assert leader.accumulator.in_step()
    until(lambda: pump(accumulators[1:]) or accumulators[1].has_gradients(), "a round")
    other.apply()
    assert other.accumulator.awaits_parameters()
    assert not other.accumulator.in_step()
    until(lambda: pump(accumulators) or not accumulators[1].awaits_parameters(), "the parameters")
    assert other.accumulator.in_step()


def test_states_and_halves_travel_between_frameworks(make: Make) -> None:
    first = make("first", [torch.full((3,), 1.5, dtype=torch.bfloat16, requires_grad=True)])
    connect([first])
    second = make("second", {"w": jnp.zeros(3, jnp.bfloat16)})
    states: list[object] = []
    connect([first, second], states)
    assert states == [{"from": "first"}]
    assert second.parameters()["w"].tolist() == [1.5] * 3
    third = make("third", [torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)])
    first.close()
    first._group.close()
    connect([second, third])
    assert third._parameters[0].tolist() == [1.5] * 3


def test_another_layout_is_refused(make: Make) -> None:
    peers = [make("a", torch_model()), make("b", {"w": jnp.zeros(9)})]
    with pytest.raises(ValueError, match=r"float32\(9,\)"):
        until(lambda: pump(peers), "the error")
