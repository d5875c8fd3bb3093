"""Clipping, what is not finite, divergence, staleness, and whose memory a result is in."""

from __future__ import annotations

import math

import pytest
import torch

from tests.accumulator.loops import Make, connect, failed, parameters, pump, reduce_round
from tests.waiting import until

NAN = float("nan")


def two(make: Make, **options: object) -> tuple[list, list[list[torch.Tensor]]]:
    models = [parameters(), parameters()]
    peers = [make(f"peer-{i}", m, **options) for i, m in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    return peers, models


def fill(model: list[torch.Tensor], value: float) -> None:
    for p in model:
        p.grad = torch.full_like(p, value)


def next_turn(peers: list) -> None:
    def wanted() -> bool:
        pump(peers)
        return all(p.wants_gradients() for p in peers)

    until(wanted, "the next turn")


def test_a_round_is_scaled_to_the_norm_as_torch_does_it(make: Make) -> None:
    peers, models = two(make, max_grad_norm=0.5)
    for model, value in zip(models, (1.0, 3.0), strict=True):
        fill(model, value)
    reduce_round(peers, [(m, 1) for m in models])
    wanted = [torch.full_like(p, 2.0) for p in models[0]]
    for p in wanted:
        p.grad = p.clone()
    norm = torch.nn.utils.clip_grad_norm_(wanted, 0.5)
    for peer, model in zip(peers, models, strict=True):
        assert peer.get_gradient_stats()["grad_norm"] == pytest.approx(norm.item())
        for p, w in zip(model, wanted, strict=True):
            torch.testing.assert_close(p.grad, w.grad)
    for a, b in zip(*models, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_small_round_keeps_its_bits(make: Make) -> None:
    model = parameters()
    peer = make("alone", model, max_grad_norm=100.0)
    connect([peer])
    fill(model, 0.1)
    reduce_round([peer], [(model, 1)])
    assert all(torch.equal(p.grad, torch.full_like(p, 0.1)) for p in model)
    assert peer.get_gradient_stats()["grad_norm"] == pytest.approx(math.sqrt(10 * 0.01))


def test_the_norm_is_over_all_dtypes(make: Make) -> None:
    model = [
        torch.zeros(3, dtype=dtype, requires_grad=True)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    ]
    peer = make("alone", model, max_grad_norm=1.0)
    connect([peer])
    fill(model, 2.0)
    reduce_round([peer], [(model, 3)])
    norm = math.sqrt(5 * 3 * 4)
    assert peer.get_gradient_stats()["grad_norm"] == pytest.approx(norm)
    for p in model:
        torch.testing.assert_close(p.grad, torch.full_like(p, 2.0 / norm), rtol=1e-2, atol=0)


def test_members_must_agree_on_the_norm(make: Make) -> None:
    peers = [make("a", parameters(), max_grad_norm=1.0), make("b", parameters())]
    errors: list[str] = []
    until(lambda: failed(peers, errors), "the error")
    assert "max_grad_norm=1.0" in errors[0]


def test_a_contribution_that_is_not_finite_is_skipped(make: Make) -> None:
    peers, models = two(make, on_nonfinite="skip")
    fill(models[0], NAN)
    fill(models[1], 1.0)
    peers[0].reduce_gradients(1, counters={"steps": 5})
    peers[1].reduce_gradients(1, counters={"steps": 7})
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in models[0])
    fill(models[0], 3.0)
    next_turn(peers[:1])
    peers[0].reduce_gradients(1, counters={"steps": 11})

    def delivered() -> bool:
        pump(peers)
        return all(p.has_gradients() for p in peers)

    until(delivered, "a round")
    assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in models[1])
    stats = peers[0].get_gradient_stats()
    assert stats["counters"] == {"steps": 23}
    assert stats["skipped_contributions"] == 1
    assert stats["num_skipped"] == 1


def test_a_round_that_is_not_finite_is_applied_by_nobody(make: Make) -> None:
    peers, models = two(make, on_nonfinite="skip")
    largest = torch.finfo(torch.float32).max
    for model in models:
        fill(model, largest)  # finite, but their sum is not
    for peer in peers:
        peer.reduce_gradients(1, counters={"steps": 1})

    def skipped() -> bool:  # the next turn may come before the round is shown, and left out
        pump(peers)
        return all(p.model_version() == 1 and p.wants_gradients() for p in peers)

    until(skipped, "the skipped round")
    for model in models:
        fill(model, 1.0)
    reduce_round(peers, [(m, 1) for m in models])
    for peer, model in zip(peers, models, strict=True):
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model)
        stats = peer.get_gradient_stats()
        assert stats["skipped_rounds"] == 1
        assert stats["counters"] == {"steps": 2 + 20}  # of both rounds
        assert peer.model_version() == 2


def test_what_is_not_finite_raises_at_its_owner_and_nothing_is_lost(make: Make) -> None:
    peers, models = two(make, on_nonfinite="raise")
    fill(models[0], NAN)
    with pytest.raises(FloatingPointError, match="nothing was contributed"):
        peers[0].reduce_gradients(1)
    assert all(torch.isnan(p.grad).all() for p in models[0])  # to be looked at
    assert peers[0].wants_gradients()
    for model in models:
        fill(model, torch.finfo(torch.float32).max)
    for peer in peers:
        peer.reduce_gradients(1)
    for peer in peers:
        errors: list[str] = []
        until(lambda peer=peer, errors=errors: failed([peer], errors), "the error")
        assert "round 1" in errors[0]
        assert peer.has_gradients()
        peer.zero_gradients()
    next_turn(peers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_divergence": "ignore"}, "on_divergence must be one of"),
        ({"on_nonfinite": "zero"}, "on_nonfinite must be one of"),
        ({"role": "leader"}, "role must be one of"),
        ({"checksum_every": -1}, "checksum_every must be at least 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"max_grad_norm": NAN}, "max_grad_norm must be positive"),
    ],
)
def test_options_are_checked(make: Make, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("alone", parameters(), **options)


def test_a_parameter_given_twice_is_refused(make: Make) -> None:
    (first, _) = parameters()
    with pytest.raises(ValueError, match="given twice"):
        make("alone", [first, first])


def test_a_member_that_diverged_takes_the_leaders_state_anew(make: Make) -> None:
    peers, models = two(make, checksum_every=1, on_divergence="resync")
    states: list[object] = []
    leads = [p.is_leader() for p in peers]
    leader, other = leads.index(True), leads.index(False)
    for model in models:
        fill(model, 1.0)
    reduce_round(peers, [(m, 1) for m in models])
    with torch.no_grad():
        models[other][0].add_(1.0)  # one peer's optimiser goes its own way
    for peer in peers:
        peer.zero_gradients()

    def resynced() -> bool:
        pump(peers, states)
        return bool(states) and all(p.wants_gradients() for p in peers)

    until(resynced, "the state")
    assert states == [{"from": peers[leader].get_leader()}]
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))
    reduce_round(peers, [(m, 1) for m in models])
    for peer in peers:
        peer.zero_gradients()
    next_turn(peers)  # nobody differs any more
    assert len(states) == 1


def test_staleness_is_told(make: Make) -> None:
    model = parameters()
    peer = make("alone", model)
    peer.set_parallel_gradients(2)
    connect([peer])
    for _ in range(2):  # the second one before the round of the first was applied
        assert peer.wants_gradients()
        peer.reduce_gradients(1)
    seen = []
    for _ in range(2):
        until(lambda: pump([peer]) or peer.has_gradients(), "a round")
        seen.append(peer.get_gradient_stats()["staleness"])
        peer.zero_gradients()
    assert seen == [[0], [1]]


def test_a_result_is_the_users_own_memory(make: Make) -> None:
    peers, models = two(make)
    kept = []
    for round_ in range(1, 8):  # more rounds than a segment has places
        for model in models:
            fill(model, float(round_))
        mine = [p.grad for p in models[0]]
        reduce_round(peers, [(m, 1) for m in models])
        for model in models:
            for p in model:
                assert torch.equal(p.grad, torch.full_like(p, float(round_)))
        kept.append(models[0][0].grad)
        for p in models[0]:
            p.grad.mul_(2.0)  # what one does with it is nobody else's affair
        assert all(torch.equal(p.grad, torch.full_like(p, round_)) for p in models[1])
        for peer in peers:
            peer.zero_gradients()
        assert all(p.grad is g and not g.any() for p, g in zip(models[0], mine, strict=True))
        next_turn(peers)
    assert [k[0, 0].item() for k in kept] == [2.0 * r for r in range(1, 8)]


def test_gradients_with_gaps_are_gathered_and_zeroed(make: Make) -> None:
    model = [torch.zeros(3, 2, requires_grad=True), torch.zeros(4, requires_grad=True)]
    peer = make("alone", model)
    connect([peer])
    model[0].grad = torch.arange(6.0).view(2, 3).t()
    model[1].grad = torch.arange(8.0)[::2]
    gradients = [p.grad for p in model]
    peer.reduce_gradients(2)
    assert not any(g.any() for g in gradients)
    until(lambda: pump([peer]) or peer.has_gradients(), "a round")
    assert torch.equal(model[0].grad, torch.arange(6.0).view(2, 3).t())
    assert torch.equal(model[1].grad, torch.arange(8.0)[::2])


def test_counters_of_a_skipped_round_come_to_newcomers(make: Make) -> None:
    models = [parameters(), parameters()]
    peers = [make("first", models[0], on_nonfinite="skip")]
    connect(peers)
    fill(models[0], torch.finfo(torch.float32).max)
    peers[0].reduce_gradients(4, counters={"steps": 100})  # times 4: not finite
    until(lambda: pump(peers) or peers[0].model_version() == 1, "the skipped round")
    peers.append(make("second", models[1], on_nonfinite="skip"))
    connect(peers)
    fill(models[0], 1.0)
    peers[0].reduce_gradients(1, counters={"steps": 1})
    until(lambda: pump(peers) or all(p.has_gradients() for p in peers), "a round")
    assert [p.get_gradient_stats()["counters"] for p in peers] == [{"steps": 101}] * 2
