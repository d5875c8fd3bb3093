"""Gradients that a torch accumulator contributes while backward() computes them."""

from __future__ import annotations

import math

import pytest
import torch

import moolink
from moolink.accumulate import AccumulatorBase
from tests.accumulator.loops import Make, connect, pump
from tests.waiting import until


def model(width: int = 300, layers: int = 4) -> torch.nn.Sequential:
    """A model of more than 1 MB, so that a reduction has several chunks."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])


def loss_of(net: torch.nn.Module, seed: int, width: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return net(torch.randn(8, width, generator=generator)).square().mean()


def shown(accumulators: list) -> bool:
    pump(accumulators)
    return all(a.has_gradients() for a in accumulators)


def gradients_of(net: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in net.parameters()]


def two(make: Make, **options: object) -> tuple[list, list[torch.nn.Sequential]]:
    nets = [model(), model()]
    peers = [
        make(name, list(net.parameters()), **options) for name, net in zip("ab", nets, strict=True)
    ]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    return peers, nets


def alone(make: Make) -> tuple[torch.nn.Sequential, AccumulatorBase]:
    """A small model and its only peer, which wants gradients."""
    net = model(4)
    peer = make("alone", list(net.parameters()))
    connect([peer])
    return net, peer


def expected(seeds: list[int]) -> list[torch.Tensor]:
    """The mean of the gradients of these losses."""
    net = model()
    for seed in seeds:
        (loss_of(net, seed) / len(seeds)).backward()
    return gradients_of(net)


@pytest.mark.parametrize("views", [False, True])
def test_a_round_has_the_same_mean_as_with_reduce_gradients(make: Make, views: bool) -> None:
    peers, nets = two(make, gradient_as_bucket_view=views)
    for turn in range(3):
        losses = [loss_of(net, 2 * turn + i) for i, net in enumerate(nets)]
        # The reduction of the first begins while the other computes.
        with (
            peers[0].reduce_during_backward(1, {"steps": 3}),
            peers[1].reduce_during_backward(1, {"steps": 4}),
        ):
            for loss in losses:
                loss.backward()
        until(lambda: shown(peers), "the round")
        for peer, net in zip(peers, nets, strict=True):
            for mean, wanted in zip(
                gradients_of(net), expected([2 * turn, 2 * turn + 1]), strict=True
            ):
                torch.testing.assert_close(mean, wanted)
            assert peer.get_gradient_stats()["counters"] == {"steps": 7}
            peer.zero_gradients()
        until(lambda: pump(peers) or all(p.wants_gradients() for p in peers), "the next turn")
        assert not any(p.grad is not None and p.grad.any() for n in nets for p in n.parameters())


def test_earlier_gradients_and_parameters_without_one_are_included(make: Make) -> None:
    """Only the last backward() of several micro-batches is in the block."""
    peers, nets = two(make)
    unused = [nets[0][0].weight, nets[0][0].bias]
    loss_of(nets[0], 5).backward()
    with peers[0].reduce_during_backward(1):
        for parameter in unused:
            parameter.requires_grad_(False)
        loss_of(nets[0], 6).backward()
    for parameter in unused:
        parameter.requires_grad_(True)
    with peers[1].reduce_during_backward(1):
        loss_of(nets[1], 7).backward()
    until(lambda: shown(peers), "the round")
    by_seed = {seed: expected([seed]) for seed in (5, 6, 7)}
    for number, mean in enumerate(gradients_of(nets[1])):
        later = 0 if number < 2 else by_seed[6][number]
        torch.testing.assert_close(mean, (by_seed[5][number] + later + by_seed[7][number]) / 2)


def test_dtypes_and_memory_formats_of_gradients(make: Make) -> None:
    leaves = [
        torch.zeros(2, 3, 4, 4, requires_grad=True),
        torch.zeros(5, dtype=torch.float64, requires_grad=True),
        torch.zeros(3, dtype=torch.bfloat16, requires_grad=True),
        torch.zeros(7, dtype=torch.complex64, requires_grad=True),
        torch.zeros(0, requires_grad=True),
    ]
    peer = make("alone", leaves)
    connect([peer])
    wanted = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    wanted += [torch.full_like(leaf.detach(), 0.5) for leaf in leaves[1:]]
    with peer.reduce_during_backward(3):
        torch.autograd.backward(leaves, wanted)
    until(lambda: shown([peer]), "the round")
    for leaf, gradient in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_an_exception_withdraws_the_contribution(make: Make) -> None:
    peers, nets = two(make)
    with (
        pytest.raises(ZeroDivisionError),
        peers[0].reduce_during_backward(1),
    ):
        loss_of(nets[0], 1).backward()
        raise ZeroDivisionError
    assert not any(p.grad.any() for p in nets[0].parameters())
    with peers[1].reduce_during_backward(1):
        loss_of(nets[1], 2).backward()
    # The round of the two contributions cannot end. The group begins another epoch without it.
    until(lambda: pump(peers) or peers[0].wants_gradients(), "another turn")
    with peers[0].reduce_during_backward(1, {"steps": 1}):
        loss_of(nets[0], 3).backward()
    until(lambda: shown(peers), "the round")
    for net, peer in zip(nets, peers, strict=True):
        for mean, wanted in zip(gradients_of(net), expected([2, 3]), strict=True):
            torch.testing.assert_close(mean, wanted)
        assert peer.get_gradient_stats()["contributions"] == {"a": 1, "b": 1}


def test_misuse_is_refused(make: Make) -> None:
    net, peer = alone(make)
    for call, message in (
        (lambda: loss_of(net, 2, 4).backward(), "second backward"),
        (peer.update, r"update\(\) was called in"),
        (lambda: peer.reduce_gradients(1), "block has not ended"),
        (lambda: peer.skip_gradients(), "block has not ended"),
    ):
        until(lambda: pump([peer]) or peer.wants_gradients(), "a turn")
        with (
            pytest.raises(RuntimeError, match=message),
            peer.reduce_during_backward(1),
        ):
            assert not peer.wants_gradients()
            loss_of(net, 1, 4).backward()
            call()
    until(lambda: pump([peer]) or peer.wants_gradients(), "a turn")
    with pytest.raises(ValueError, match="at least 1"), peer.reduce_during_backward(0):
        pass
    with peer.reduce_during_backward(1):
        loss_of(net, 1, 4).backward()
    with (
        pytest.raises(RuntimeError, match="while wants_gradients"),
        peer.reduce_during_backward(1),
    ):
        pass
    until(lambda: shown([peer]), "the round")


def test_a_sparse_gradient_is_refused(make: Make) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    peer = make("alone", list(table.parameters()))
    connect([peer])
    with (
        pytest.raises(TypeError, match=r"of layout torch\.sparse_coo"),
        peer.reduce_during_backward(1),
    ):
        table(torch.tensor([1])).sum().backward()


def test_a_closed_accumulator_ends_the_block_with_an_error(make: Make) -> None:
    net, peer = alone(make)
    with pytest.raises(moolink.errors.Closed), peer.reduce_during_backward(1):
        loss_of(net, 1, 4).backward()
        peer.close()


def test_no_member_applies_a_round_that_is_not_finite(make: Make) -> None:
    peers, nets = two(make, on_nonfinite="skip")
    for i, (peer, net) in enumerate(zip(peers, nets, strict=True)):
        with peer.reduce_during_backward(1, {"steps": 1}):
            (loss_of(net, i) * (math.nan if i == 0 else 1.0)).backward()

    def skipped() -> bool:
        pump(peers)
        return all(p.model_version() == 1 and p.wants_gradients() for p in peers)

    until(skipped, "the skipped round")


def test_a_block_without_backward_logs_a_warning(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    _, peer = alone(make)
    with peer.reduce_during_backward(1):
        pass
    until(lambda: shown([peer]), "the round")
    assert "no parameter has a gradient" in caplog.text


def test_a_turn_of_steps_allows_one_block(make: Make) -> None:
    net = model(4)
    peer = make("alone", list(net.parameters()))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    turns = 0
    for step in peer.steps(optimizer, until=lambda totals: totals["steps"] >= 3):
        with pytest.raises(ZeroDivisionError), step.reduce_during_backward(1):
            raise ZeroDivisionError  # a block that raises has contributed nothing
        until(lambda: peer.update() or peer.wants_gradients(), "another contribution")
        with step.reduce_during_backward(1, {"steps": 1}):
            loss_of(net, turns, 4).backward()
        with (
            pytest.raises(RuntimeError, match="has contributed before"),
            step.reduce_during_backward(1),
        ):
            pass
        turns += 1
    assert turns >= 3


@pytest.mark.parametrize("views", [False, True])
def test_a_gradient_that_changes_after_it_was_sent_is_refused(make: Make, views: bool) -> None:
    net = model(4)
    peer = make("alone", list(net.parameters()), gradient_as_bucket_view=views)
    connect([peer])

    def replace(parameter: torch.Tensor) -> None:
        parameter.grad = torch.ones_like(parameter)

    changes = [replace] if views else [replace, lambda parameter: parameter.grad.mul_(0.5)]
    for change in changes:
        with (
            pytest.raises(RuntimeError, match=r"parameters\[1\] was changed"),
            peer.reduce_during_backward(1),
        ):
            loss_of(net, 1, 4).backward()
            change(net[0].bias)
        until(lambda: pump([peer]) or peer.wants_gradients(), "another turn")


def test_a_view_of_the_bucket_is_no_gradient_once_others_read_it(make: Make) -> None:
    net = model()
    peer = make("alone", list(net.parameters()), gradient_as_bucket_view=True)
    connect([peer])
    with peer.reduce_during_backward(7):
        loss_of(net, 1).backward()
        net.zero_grad(set_to_none=False)
    until(lambda: shown([peer]), "the round")
    for mean, wanted in zip(gradients_of(net), expected([1]), strict=True):
        torch.testing.assert_close(mean, wanted)


def test_gradients_from_before_alone_are_not_forgotten(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    net, peer = alone(make)
    loss_of(net, 1, 4).backward()
    wanted = gradients_of(net)
    with peer.reduce_during_backward(1):
        pass
    until(lambda: shown([peer]), "the round")
    torch.testing.assert_close(gradients_of(net), wanted)
    assert "no parameter has a gradient" not in caplog.text


def test_the_user_gets_an_exception_of_a_block_that_closes_the_accumulator(make: Make) -> None:
    _, peer = alone(make)
    with pytest.raises(ZeroDivisionError), peer.reduce_during_backward(1):
        peer.close()
        raise ZeroDivisionError
