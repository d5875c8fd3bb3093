"""Contributions on their way: over changes of membership, and while the next one is computed."""

from __future__ import annotations

import torch

from tests.accumulator.loops import Make, connect, parameters, pump
from tests.waiting import until


def contribute(peer, model: list[torch.Tensor], value: float) -> None:
    for p in model:
        p.grad = torch.full_like(p, value)
    peer.reduce_gradients(1, counters={"n": 1})


def leave(peer) -> None:
    peer.close()
    peer._group.close()


def wait_for_result(peers: list) -> None:
    def delivered() -> bool:
        pump(peers)
        return all(p.has_gradients() for p in peers)

    until(delivered, "a round")


def wait_until_wanted(peers: list) -> None:
    def wanted() -> bool:
        pump(peers)
        return all(p.wants_gradients() for p in peers)

    until(wanted, "gradients to be wanted")


def test_contributions_outlive_a_join_and_a_leave(make: Make) -> None:
    models = [parameters() for _ in range(4)]
    peers = [make(f"peer-{i}", models[i]) for i in range(3)]
    for peer in peers:
        peer.set_virtual_batch_size(4)
    connect(peers)
    for i in (0, 1):  # less than a round: they wait
        contribute(peers[i], models[i], float(i + 1))
    joined = make("peer-3", models[3])
    joined.set_virtual_batch_size(4)

    def has_joined() -> bool:
        pump([*peers, joined])
        return joined.wants_gradients() and peers[2].wants_gradients()

    until(has_joined, "the newcomer")
    leave(peers[2])  # and another one leaves, which had contributed nothing
    present = [peers[0], peers[1], joined]

    def has_left() -> bool:
        pump(present)
        joined._group.update()
        return len(joined._group.members()) == 3 and joined.wants_gradients()

    until(has_left, "the leave")
    contribute(joined, models[3], 3.0)
    wait_until_wanted([peers[0]])
    contribute(peers[0], models[0], 6.0)
    wait_for_result(present)
    for peer, model in ((peers[0], models[0]), (peers[1], models[1]), (joined, models[3])):
        stats = peer.get_gradient_stats()
        assert stats["counters"] == {"n": 4}
        assert stats["num_gradients"] == 4
        assert sorted(stats["contributors"]) == ["peer-0", "peer-1", "peer-3"]
        assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in model)  # (1+2+3+6) / 4


def test_the_leaders_death_loses_no_contribution_of_the_others(make: Make) -> None:
    models = [parameters() for _ in range(3)]
    peers = [make(f"peer-{i}", models[i]) for i in range(3)]
    for peer in peers:
        peer.set_virtual_batch_size(3)
    connect(peers)
    leader = next(i for i, p in enumerate(peers) if p.is_leader())
    others = [i for i in range(3) if i != leader]
    for i in others:
        contribute(peers[i], models[i], float(i + 1))
    leave(peers[leader])
    present = [peers[i] for i in others]
    wait_until_wanted(present[:1])
    contribute(present[0], models[others[0]], 9.0)
    wait_for_result(present)
    mean = (sum(i + 1 for i in others) + 9.0) / 3
    for i in others:
        assert all(torch.allclose(p.grad, torch.full_like(p, mean)) for p in models[i])
        assert peers[i].get_gradient_stats()["counters"] == {"n": 3}


def test_the_next_gradient_is_computed_while_a_round_is_reduced(make: Make) -> None:
    models = [parameters(), parameters()]
    peers = [make(f"peer-{i}", m) for i, m in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(2)
        peer.set_parallel_gradients(2)
    connect(peers)
    for turn in (1.0, 2.0):  # nobody looks at the first round before contributing to the second
        for peer, model in zip(peers, models, strict=True):
            assert peer.wants_gradients()
            contribute(peer, model, turn)
    sums = [torch.zeros_like(models[0][0]) for _ in peers]
    for turn in (1, 2):
        wait_for_result(peers)
        for peer, model, total in zip(peers, models, sums, strict=True):
            assert peer.model_version() == turn
            assert peer.get_gradient_stats()["staleness"] == [turn - 1] * 2
            total += model[0].grad
            peer.zero_gradients()
    # Which two of the four made the first round depends on the order of their arrival.
    assert all(torch.equal(total, torch.full_like(total, 3.0)) for total in sums)
