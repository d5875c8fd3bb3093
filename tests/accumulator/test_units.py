"""Rounds of one gradient of each unit of data have the same bits for any number of members."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import moolink
from moolink.accumulate import ordered_sum
from tests.accumulator.loops import Make, connect, failed, parameters, pump, reduce_round
from tests.waiting import TIMEOUT, until

ROUNDS = 6


class Peer:
    """A learner in a thread, as it is otherwise in a process."""

    def __init__(self, make: Make, name: str, units: int, **options: Any) -> None:
        torch.manual_seed(3)  # one model in every run
        self.model = torch.nn.Sequential(
            torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.accumulator = make(name, list(self.model.parameters()), units=units, **options)
        self.bits: list[bytes] = []  # of the parameters after each round
        self.units: dict[int, list[int]] = {}  # of the contributions, by version
        self.moved: list[list[int]] = []
        self.error: Exception | None = None
        self.last = ROUNDS
        self.thread: threading.Thread

    def start(self, members: int) -> None:
        self.thread = threading.Thread(target=self._run, args=(members,), daemon=True)
        self.thread.start()

    def _run(self, members: int) -> None:
        try:
            self.accumulator._group.wait_for_members(members, TIMEOUT)
            self._train()
        except Exception as error:  # noqa: BLE001 - told by join()
            self.error = error

    def _train(self) -> None:
        for step in self.accumulator.steps(
            self.optimizer, until=lambda totals: totals["rounds"] >= self.last * units_of(self)
        ):
            assert step.unit is not None
            self.units.setdefault(step.version, []).append(step.unit)
            if step.stats is not None and len(self.units[step.version]) == 1:
                self.moved.append(step.stats["moved_units"])
            if len(self.bits) <= step.version:
                self.bits.append(bits(self.model))
            batch, x = data(step.unit, step.version)
            (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            step.reduce(batch, {"rounds": 1})
            self.contributed(step)
        self.bits.append(bits(self.model))

    def contributed(self, step: Any) -> None:
        """Called after each contribution."""

    def join(self) -> None:
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive(), moolink.dump()
        if self.error is not None:
            raise self.error


def units_of(peer: Peer) -> int:
    return peer.accumulator._core._units


def data(unit: int, version: int) -> tuple[int, torch.Tensor]:
    """Batch size and inputs of a unit; the inputs of units differ in magnitude."""
    generator = torch.Generator().manual_seed(1000 * unit + version)
    return 2 + unit % 3, torch.randn(5, 7, generator=generator) * 10.0 ** (unit % 4)


def bits(model: torch.nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def close(peer: Peer) -> None:
    peer.accumulator.close()
    peer.accumulator._group.close()


@pytest.mark.parametrize("units", [4, 5])
def test_rounds_have_the_same_bits_for_any_number_of_members(make: Make, units: int) -> None:
    alone: list[bytes] = []
    for members in (1, 2, 3, 4):
        peers = [Peer(make, f"{i} of {members}", units) for i in range(members)]
        for peer in peers:
            peer.start(members)
        for peer in peers:
            peer.join()
            close(peer)
            alone = alone or peer.bits
            assert peer.bits == alone
            assert not any(peer.moved)
        for version in range(ROUNDS):
            taken = [unit for peer in peers for unit in peer.units[version]]
            assert sorted(taken) == list(range(units))
    assert len(set(alone)) == ROUNDS + 1


def test_a_round_is_the_weighted_mean_of_the_units(make: Make) -> None:
    leaves = parameters()
    peer = make("peer", leaves, units=3, max_grad_norm=1e6)
    connect([peer])
    assert (peer.unit, peer.get_gradient_stats()["batch_size"]) == (0, 0)
    for unit, batch in enumerate((1, 2, 5)):
        assert peer.unit == unit
        for leaf in leaves:
            leaf.grad = torch.full_like(leaf, 10.0 * unit)
        if unit < 2:
            peer.skip_gradients({"skips": 1})  # counters alone: the unit is still wanted
            peer.reduce_gradients(batch, {"units": 1})
            assert not peer.has_gradients()
        else:
            reduce_round([peer], [(leaves, batch)])
    for leaf in leaves:
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, torch.full_like(leaf, (2 * 10 + 5 * 20) / 8))
    stats = peer.get_gradient_stats()
    assert stats["batch_size"] == 8
    assert stats["counters"] == {"units": 2, "skips": 2, "steps": 50}
    assert stats["moved_units"] == []
    assert stats["grad_norm"] == pytest.approx(15 * 10**0.5)
    assert peer.unit is None
    peer.zero_gradients()
    assert peer.unit == 0


def test_a_round_with_a_unit_twice_is_the_weighted_mean_too(make: Make, monkeypatch: Any) -> None:
    """While the membership changes, two members may take a unit for theirs."""
    leaves = [parameters(), parameters()]
    peers = [make(f"peer-{i}", leaves[i], units=2) for i in range(2)]
    connect(peers)
    leader = next(i for i in range(2) if peers[i].is_leader())
    core: Any = peers[leader]._core
    monkeypatch.setattr(core, "own_units", lambda: [0, 1])
    other = 1 - leader
    unit = peers[other].unit
    for leaf in leaves[other]:
        leaf.grad = torch.full_like(leaf, 4.0)
    peers[other].reduce_gradients(1)
    until(lambda: "a batch of 1 of 2" in moolink.dump(), "the first contribution")
    for value in (1.0, 2.0):
        for leaf in leaves[leader]:
            leaf.grad = torch.full_like(leaf, value)
        peers[leader].reduce_gradients(1)
    until(lambda: pump(peers) or all(peer.has_gradients() for peer in peers), "a round")
    for peer, own in zip(peers, leaves, strict=True):
        stats = peer.get_gradient_stats()
        assert (stats["batch_size"], stats["moved_units"]) == (3, [unit])
        for leaf in own:
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, torch.full_like(leaf, 7 / 3))


def test_a_unit_that_is_not_finite_is_left_out_with_its_round(make: Make) -> None:
    leaves = parameters()
    peer = make("peer", leaves, units=2, on_nonfinite="skip")
    connect([peer])
    for value in (float("nan"), 1.0):
        leaves[0].grad = torch.full_like(leaves[0], value)
        peer.reduce_gradients(1)
    until(lambda: pump([peer]) or peer.model_version() == 1, "a round")
    assert not peer.has_gradients()
    assert peer.unit == 0
    for _ in range(2):
        leaves[0].grad = torch.ones_like(leaves[0])
        peer.reduce_gradients(1)
    until(lambda: pump([peer]) or peer.has_gradients(), "a round")
    assert torch.equal(leaves[0].grad, torch.ones_like(leaves[0]))


class Leaving(Peer):
    """Leaves after a contribution that others need for the round."""

    def contributed(self, step: Any) -> None:
        if step.version == 3:
            close(self)

    def _run(self, members: int) -> None:
        try:
            super()._run(members)
        finally:
            if isinstance(self.error, moolink.Closed):
                self.error = None


def test_the_units_of_a_member_that_leaves_move_to_the_others(make: Make) -> None:
    stays, leaves = Peer(make, "stays", 4), Leaving(make, "leaves", 4)
    for peer in (stays, leaves):
        peer.start(2)
    for peer in (stays, leaves):
        peer.join()
    assert len(stays.bits) == ROUNDS + 1
    assert sorted(stays.units[ROUNDS - 1]) == [0, 1, 2, 3]
    others = sorted(leaves.units[0])
    moved = [units for units in stays.moved if units]
    assert moved == [others]  # said once, in the round in which it happened
    # The data depends on unit and version only, so the bits are those of a run alone.
    close(stays)
    alone = Peer(make, "alone", 4)
    alone.start(1)
    alone.join()
    assert stays.bits == alone.bits


def test_a_member_that_joins_gets_units(make: Make) -> None:
    first = Peer(make, "first", 4)
    first.last = 200
    first.start(1)
    until(lambda: len(first.bits) > 3, "rounds")
    second = Peer(make, "second", 4)
    second.last = 200
    second.start(2)
    for peer in (first, second):
        peer.join()
    assert first.bits[-1] == second.bits[-1]
    assert sorted(first.units[199] + second.units[199]) == [0, 1, 2, 3]
    assert [2, 3] in first.moved
    assert sum(map(bool, first.moved)) <= 2  # the transfer of the state may cost a round


def test_a_unit_that_moves_within_a_turn_is_not_taken_for_another(
    make: Make, monkeypatch: Any
) -> None:
    leaves = parameters()
    peer = make("peer", leaves, units=2)
    core: Any = peer._core
    for step in peer.training_steps(lambda: None):
        assert step.unit == 0
        # As after group.update(), if the membership has changed.
        monkeypatch.setattr(core, "own_units", lambda: [1])
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)
        with pytest.raises(RuntimeError, match="unit 0, which has moved"):
            step.reduce(1)
        assert not core._given
        break


def test_counters_of_units_that_move_away_come_with_the_next_gradient(
    make: Make, monkeypatch: Any
) -> None:
    leaves = parameters()
    peer = make("peer", leaves, units=2)
    connect([peer])
    core: Any = peer._core

    def contribute() -> None:
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)
        peer.reduce_gradients(1, {"episodes": 1})

    contribute()
    with monkeypatch.context() as moved:
        moved.setattr(core, "own_units", list)
        assert not peer.wants_gradients()
    contribute()
    contribute()
    until(lambda: pump([peer]) or peer.has_gradients(), "a round")
    assert peer.get_gradient_stats()["counters"]["episodes"] == 3


def test_an_observer_has_no_units(make: Make) -> None:
    leaves, others = parameters(), parameters()
    member = make("member", leaves, units=2)
    observer = make("observer", others, units=2, role="observer")
    until(lambda: pump([member, observer]) or observer.connected(), "the observer")
    until(lambda: pump([member, observer]) or member.wants_gradients(), "a turn")
    assert (member.unit, observer.unit) == (0, None)
    for _ in range(2):
        leaves[0].grad = torch.ones_like(leaves[0])
        member.reduce_gradients(1)
    until(
        lambda: pump([member, observer]) or all(a.has_gradients() for a in (member, observer)),
        "a round",
    )
    assert torch.equal(others[0].grad, torch.ones_like(others[0]))


def test_members_have_the_same_number_of_units(make: Make) -> None:
    peers = [make("first", parameters(), units=2), make("second", parameters(), units=3)]
    errors: list[str] = []
    until(lambda: failed(peers, errors), "a refusal")
    assert "units=2" in errors[0]
    assert "units=3" in errors[0]


def test_settings_without_a_fixed_order_are_refused(make: Make) -> None:
    leaves = parameters()
    peer = make("peer", leaves, units=2)
    connect([peer])
    with pytest.raises(ValueError, match="units= a round is one contribution of each unit"):
        peer.set_virtual_batch_size(4)
    with pytest.raises(ValueError, match="one round is under way at once, not 2"):
        peer.set_parallel_gradients(2)
    peer.set_parallel_gradients(1)
    with (
        pytest.raises(RuntimeError, match="no fixed order of sums"),
        peer.reduce_during_backward(1),
    ):
        pass
    for units in (0, 129):
        with pytest.raises(ValueError, match="units"):
            make(f"peer of {units}", parameters(), units=units)


def test_gradients_may_be_views_of_the_bucket(make: Make) -> None:
    leaves = parameters()
    peer = make("peer", leaves, units=2, gradient_as_bucket_view=True)
    connect([peer])
    for value in (1.0, 3.0):
        assert peer.wants_gradients()
        for leaf in leaves:
            leaf.grad += value
        peer.reduce_gradients(1)
    until(lambda: pump([peer]) or peer.has_gradients(), "a round")
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.full_like(leaf, 2.0))


def test_ordered_sum_adds_neighbours_first() -> None:
    rows = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    a, b, c, d, e, f, g = rows
    expected = ((a + b) + (c + d)) + ((e + f) + g)
    before = rows.copy()
    assert np.array_equal(ordered_sum(rows), expected)
    assert np.array_equal(rows, before)
    # The sums of parts that are whole branches of the tree may be made first.
    parts = np.stack([ordered_sum(rows[:4]), ordered_sum(rows[4:])])
    assert np.array_equal(ordered_sum(parts), expected)
    assert not np.signbit(ordered_sum(np.full((2, 1), -0.0))).any()
    assert ordered_sum([1, 2, 3]) == 6
    # The layout in memory does not matter.
    cubes = np.random.default_rng(1).standard_normal((4, 3, 2))
    for laid in (np.asfortranarray(cubes), cubes.transpose(0, 2, 1).copy().transpose(0, 2, 1)):
        assert np.array_equal(ordered_sum(laid), ordered_sum(cubes.tolist()))
    with pytest.raises(ValueError, match="at least one row"):
        ordered_sum(np.empty((0, 3)))
