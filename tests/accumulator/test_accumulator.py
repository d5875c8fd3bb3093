"""The accumulator's semantics, several peers in one process."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

import moolink
from tests import descriptors
from tests.accumulator.loops import Make, connect, failed, parameters, pump, reduce_round
from tests.waiting import formed, until


def test_mean_is_weighted_by_batch_size(make: Make) -> None:
    models = [parameters(), parameters()]
    peers = [make(f"peer-{i}", m) for i, m in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(4)
    connect(peers)
    for model, value in zip(models, (1.0, 5.0), strict=True):
        for p in model:
            p.grad = torch.full_like(p, value)
    reduce_round(peers, [(models[0], 1), (models[1], 3)])
    for peer, model in zip(peers, models, strict=True):
        assert all(torch.equal(p.grad, torch.full_like(p, 4.0)) for p in model)  # (1 + 15) / 4
        stats = peer.get_gradient_stats()
        assert stats["batch_size"] == 4
        assert stats["num_gradients"] == 2
        assert sorted(stats["contributors"]) == ["peer-0", "peer-1"]
        assert stats["counters"] == {"steps": 40}
        assert stats["lost"] == []
        assert peer.model_version() == 1
        peer.zero_gradients()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model)
        assert not peer.has_gradients()


def test_counters_do_not_wrap_around(make: Make) -> None:
    models = [parameters(), parameters()]
    peers = [make(f"peer-{i}", m) for i, m in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    for peer, model in zip(peers, models, strict=True):
        for p in model:
            p.grad = torch.ones_like(p)
        peer.reduce_gradients(1, counters={"up": 2**62, "down": -(2**63), "few": -1})

    def delivered() -> bool:
        pump(peers)
        return all(peer.has_gradients() for peer in peers)

    until(delivered, "a round")
    for peer in peers:
        counters = peer.get_gradient_stats()["counters"]
        assert counters == {"up": 2**63, "down": -(2**64), "few": -2}


def test_newcomer_gets_the_model_and_the_state(make: Make) -> None:
    first = parameters(7.0)
    buffer = torch.arange(3.0)
    veteran = make("veteran", first, [buffer])
    connect([veteran])
    for p in first:
        p.grad = torch.ones_like(p)
    reduce_round([veteran], [(first, 1)])
    veteran.zero_gradients()
    second, other = parameters(0.0), torch.zeros(3)
    states: list[dict[str, str]] = []
    newcomer = make("newcomer", second, [other])
    connect([veteran, newcomer], states)
    assert states == [{"from": "veteran"}]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(other, buffer)
    assert newcomer.model_version() == veteran.model_version() == 1


def test_the_highest_version_leads(make: Make) -> None:
    old, new = parameters(1.0), parameters(2.0)
    a, b = make("a", old, version=10), make("b", new, version=20)
    connect([a, b])
    assert a.model_version() == b.model_version() == 20
    assert all(torch.equal(p, torch.full_like(p, 2.0)) for p in [*old, *new])


def test_a_model_of_another_layout_is_refused_with_both_layouts(make: Make) -> None:
    peers = [make("a", parameters()), make("b", [torch.zeros(9, requires_grad=True)])]

    errors: list[str] = []
    until(lambda: failed(peers, errors), "the error")
    assert "float32(9,)" in errors[0]
    assert "float32(2,3)" in errors[0]


def test_skips_count_and_are_not_needed(make: Make) -> None:
    models = [parameters(), parameters()]
    peers = [make(f"peer-{i}", m) for i, m in enumerate(models)]
    connect(peers)
    peers[1].skip_gradients(counters={"steps": 5})
    for p in models[1]:
        p.grad = torch.ones_like(p)
    peers[1].reduce_gradients(1, counters={"steps": 1})
    until(lambda: pump(peers) or all(p.has_gradients() for p in peers), "a round")
    for peer in peers:
        stats = peer.get_gradient_stats()
        assert (stats["num_gradients"], stats["num_skipped"]) == (1, 1)
        assert stats["contributors"] == ["peer-1"]  # the other one has not skipped, nor need it
        assert stats["counters"] == {"steps": 6}
        assert stats["batch_size"] == 1


def test_an_observer_follows_and_holds_nobody_up(make: Make) -> None:
    models = [parameters(1.0), parameters(1.0), parameters(7.0)]
    peers = [make(f"peer-{i}", m) for i, m in enumerate(models[:2])]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    observer = make("observer", models[2], role="observer")

    def follows() -> bool:
        pump([*peers, observer])
        return observer.connected()

    until(follows, "the observer to have the state")
    assert all(torch.equal(p, torch.ones_like(p)) for p in models[2])
    for _ in range(8):  # more rounds than a member may leave unread
        until(lambda: pump(peers) or all(p.wants_gradients() for p in peers), "the next turn")
        reduce_round(peers, [(models[0], 1), (models[1], 1)])
        for peer in peers:
            peer.zero_gradients()
    assert not observer.wants_gradients()
    with pytest.raises(RuntimeError, match="an observer does not contribute"):
        observer.reduce_gradients(1)
    with pytest.raises(moolink.Closed, match="it is an observer"):
        observer._group.all_reduce("of members", 1, on_change="retry")
    versions = []

    def catches_up() -> bool:
        pump([observer])
        if observer.has_gradients():
            versions.append(observer.model_version())
            observer.zero_gradients()
        return observer.model_version() == peers[0].model_version()

    until(catches_up, "the observer to have all rounds")
    assert versions == list(range(1, 9))


def test_a_group_lives_on_without_its_accumulator(broker_address: str) -> None:
    with moolink.Rpc("first") as rpc, moolink.Rpc("second") as other_rpc:
        for peer in (rpc, other_rpc):
            peer.connect(broker_address)
        group = moolink.Group(rpc, "group")
        accumulator = moolink.Accumulator("model", parameters(), group=group)
        connect([accumulator])
        formed([group])
        with pytest.raises(ValueError, match="all be members or all observers"):
            moolink.Accumulator("other", parameters(), group=group, role="observer")
        accumulator.close()
        other = moolink.Group(other_rpc, "group")
        formed([group, other])
        futures = [g.all_reduce("x", 1) for g in (group, other)]
        assert [f.result(10) for f in futures] == [2, 2]


def test_gradients_of_a_model_that_was_replaced_are_gone(make: Make) -> None:
    leader, model = parameters(1.0), parameters(2.0)
    first = make("first", leader)
    connect([first])
    late = make("late", model)
    for p in model:
        p.grad = torch.full_like(p, 5.0)  # of the parameters before the state came

    def has_state() -> bool:
        pump([first])
        late.update()
        return late.has_new_state()

    until(has_state, "the state")
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model)


def test_the_leader_is_asked_for_the_state_before_its_timeout_ends(make: Make) -> None:
    leader, model = parameters(1.0), parameters(2.0)
    first = make("first", leader)
    connect([first])
    late = make("late", model)
    deadline = time.monotonic() + 6.0  # more than the library waits for set_state
    while time.monotonic() < deadline:  # the leader's user is busy elsewhere
        late.update()
        late.wait(0.1)
    states: list[object] = []

    def has_state() -> bool:
        pump([first, late], states)
        return bool(states)

    until(has_state, "the state")
    assert states == [{"from": "first"}]


def test_a_forked_child_holds_no_descriptors_of_rounds(make: Make) -> None:
    # Of an earlier test's gloo, too, which has no eventfd.
    others = {each for each in descriptors.of_moolink() if "eventfd" not in each}
    models = [parameters(), parameters()]
    peers = [make(f"peer-{i}", m) for i, m in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    reduce_round(peers, [(m, 1) for m in models])  # the segment is there, or on its way
    before = descriptors.of_moolink() - others
    assert any("eventfd" in descriptor for descriptor in before)
    assert descriptors.are_gone_in_a_forked_child(before)


def test_divergence_is_noticed(make: Make) -> None:
    models = [parameters(), parameters()]
    peers = [make(f"peer-{i}", m, checksum_every=1) for i, m in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    reduce_round(peers, [(m, 1) for m in models])
    with torch.no_grad():
        models[1][0].add_(1.0)  # one peer's optimiser goes its own way
    for peer in peers:
        peer.zero_gradients()

    errors: list[str] = []
    until(lambda: failed(peers, errors), "the divergence")
    assert "differ" in errors[0]


def test_misuse(make: Make) -> None:
    peer = make("alone", parameters())
    with pytest.raises(RuntimeError, match="wants_gradients"):
        peer.reduce_gradients(1)
    connect([peer])
    with pytest.raises(ValueError, match="at least 1"):
        peer.reduce_gradients(0)
    with pytest.raises(ValueError, match=r"at most 2\*\*40"):
        peer.reduce_gradients(2**41)
    with pytest.raises(TypeError, match="integer"):
        peer.reduce_gradients(1.5)
    with pytest.raises(TypeError, match="counter 'loss' must be an integer"):
        peer.reduce_gradients(1, counters={"loss": 0.5})
    with pytest.raises(ValueError, match="64 bits"):
        peer.skip_gradients(counters={"steps": 2**63})
    assert peer.wants_gradients()
    with pytest.raises(RuntimeError, match="wants_state"):
        peer.set_state({})
    with pytest.raises(RuntimeError, match="has_new_state"):
        peer.state()
    with pytest.raises(RuntimeError, match="given a group"):
        peer.connect("127.0.0.1:1")
    with pytest.raises(ValueError, match="requires a gradient"):
        moolink.Accumulator("other", [torch.zeros(1)])
    with pytest.raises(TypeError, match="torch"):
        moolink.Accumulator("other", ["text"])
    with pytest.raises(ValueError, match="'other' has no parameters"):
        moolink.Accumulator("other", iter(()))
    with pytest.raises(ValueError, match="'other' have no elements"):
        moolink.Accumulator("other", [torch.zeros(0, requires_grad=True)])
    peer.close()
    with pytest.raises(moolink.Closed):
        peer.update()


def test_the_leaders_virtual_batch_size_counts_for_all(make: Make) -> None:
    models = [parameters(), parameters()]
    peers = [make("leader", models[0], version=1), make("other", models[1])]
    peers[0].set_virtual_batch_size(6)
    peers[1].set_virtual_batch_size(2)  # others for so short a time are none of its business
    connect(peers)
    assert peers[0].is_leader()
    given = [0, 0]

    def delivered() -> bool:
        pump(peers)
        for i, peer in enumerate(peers):
            if peer.wants_gradients():
                for p in models[i]:
                    p.grad = torch.ones_like(p)
                peer.reduce_gradients(1)
                given[i] += 1
        return all(peer.has_gradients() for peer in peers)

    until(delivered, "a round")
    assert peers[1].get_gradient_stats()["batch_size"] == 6
    assert given[1] >= 3  # its share of the leader's


def test_a_loop_of_accumulator_updates_sees_the_members(broker_address: str) -> None:
    with (
        moolink.Rpc("alone") as rpc,
        moolink.Group(rpc, "group") as group,
        moolink.Accumulator("model", parameters(), group=group) as accumulator,
    ):
        rpc.connect(broker_address)
        connect([accumulator])
        assert group.members() == ["alone"]
        assert group.update()  # the change is still told of
        assert not group.update()


@pytest.mark.parametrize("first", [0, 1])
def test_an_accumulator_made_after_its_group_suspects_nobody(
    broker_address: str, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        rpcs = [stack.enter_context(moolink.Rpc(f"peer-{i}")) for i in range(2)]
        groups = [stack.enter_context(moolink.Group(rpc, "group")) for rpc in rpcs]
        for rpc in rpcs:
            rpc.connect(broker_address)
        formed(groups)
        made = [
            stack.enter_context(moolink.Accumulator("model", parameters(), group=groups[first]))
        ]
        # Until its FLUSH is on its way, and more.
        until(lambda: pump(made) or made[0].get_gradient_stats()["waiting_for"], "the other one")
        made[0].wait(0.3)
        made.append(
            stack.enter_context(moolink.Accumulator("model", parameters(), group=groups[1 - first]))
        )
        connect(made)
        assert "becomes a newcomer" not in caplog.text


def test_an_accumulator_of_a_name_that_is_taken_leaves_nothing_behind(broker_address: str) -> None:
    def accumulator(group: moolink.Group) -> moolink.Accumulator:
        return moolink.Accumulator("a", [torch.zeros(2, requires_grad=True)], group=group)

    with contextlib.ExitStack() as stack:
        rpc = stack.enter_context(moolink.Rpc("first"))
        plain = stack.enter_context(moolink.Group(rpc, "g"))
        taken = accumulator(plain)
        with pytest.raises(ValueError, match="g/a"):
            accumulator(plain)
        taken.close()
        rpc.connect(broker_address)
        other = stack.enter_context(moolink.Rpc("second", timeout=20))
        joined = stack.enter_context(moolink.Group(other, "g"))
        peer = stack.enter_context(accumulator(joined))
        other.connect(broker_address)
        deadline = time.monotonic() + 30
        while len(joined.members()) < 2 or len(plain.members()) < 2:
            assert time.monotonic() < deadline
            plain.update()
            joined.update()
            peer.update()
        # The first peer still answers: no message went to what was given up.
        rpc.define("alive", lambda: True)
        assert other.sync("first", "alive")
