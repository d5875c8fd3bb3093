"""The gradients that the torch accumulator takes: all kinds, those forgotten, those refused."""

from __future__ import annotations

import pytest
import torch

import moolink
from moolink.internal import repeated
from moolink.metrics import rounds
from tests.accumulator.loops import Make, connect, failed, parameters, pump, reduce_round
from tests.waiting import until


def test_missing_and_frozen_gradients(make: Make) -> None:
    frozen = torch.ones(3)
    model = [torch.zeros(2, requires_grad=True), frozen, torch.zeros(2, 2, requires_grad=True)]
    peer = make("alone", model)
    connect([peer])
    model[0].grad = torch.ones(2)
    peer.reduce_gradients(1)
    until(lambda: pump([peer]) or peer.has_gradients(), "a round")
    assert torch.equal(model[0].grad, torch.ones(2))
    assert torch.equal(model[2].grad, torch.zeros(2, 2))
    assert frozen.grad is None


def test_several_dtypes_and_memory_formats(make: Make) -> None:
    model = [
        torch.zeros(2, 3, 4, 4, requires_grad=True),
        torch.zeros(5, dtype=torch.float64, requires_grad=True),
        torch.zeros(3, dtype=torch.bfloat16, requires_grad=True),
    ]
    peer = make("alone", model)
    connect([peer])
    gradient = torch.randn(2, 3, 4, 4)
    model[0].grad = gradient.clone().to(memory_format=torch.channels_last)
    model[1].grad = torch.full((5,), 0.1, dtype=torch.float64)
    model[2].grad = torch.full((3,), 0.5, dtype=torch.bfloat16)
    peer.reduce_gradients(2)
    until(lambda: pump([peer]) or peer.has_gradients(), "a round")
    torch.testing.assert_close(model[0].grad, gradient)
    torch.testing.assert_close(model[1].grad, torch.full((5,), 0.1, dtype=torch.float64))
    assert torch.equal(model[2].grad, torch.full((3,), 0.5, dtype=torch.bfloat16))


def test_nan_gradients_travel_as_they_are(make: Make) -> None:
    model = parameters()
    peer = make("alone", model)
    connect([peer])
    for p in model:
        p.grad = torch.full_like(p, float("nan"))
    reduce_round([peer], [(model, 1)])
    assert all(torch.isnan(p.grad).all() for p in model)


def test_nan_gradients_are_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    model = parameters()
    peer = make("alone", model)
    for _ in range(2):
        connect([peer])
        for p in model:
            p.grad = torch.full_like(p, float("inf"))
        reduce_round([peer], [(model, 1)])
        peer.zero_gradients()
    connect([peer])
    with peer.reduce_during_backward(1):
        (model[0].sum() * float("nan")).backward()
    (told,) = [record.message for record in caplog.records if "infinite" in record.message]
    assert told.startswith("gradients of version 0 are NaN or infinite, and are averaged like")


def test_nan_gradients_of_a_backward_are_told(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    model = parameters()
    peer = make("alone", model)
    connect([peer])
    with peer.reduce_during_backward(1):
        (model[1].sum() * float("nan")).backward()
    assert "gradients of version 0 are NaN or infinite" in caplog.text


def test_gradients_that_are_all_zero_are_called_that(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = parameters()
    peer = make("alone", model)
    connect([peer])
    sum(0.0 * p.sum() for p in model).backward()
    reduce_round([peer], [(model, 1)])
    assert "all gradients are zero: does the loss depend on the parameters" in caplog.text
    assert "no parameter has a gradient" not in caplog.text


@pytest.mark.parametrize("leads", [True, False])
def test_a_virtual_batch_size_that_is_not_reached_is_told(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    now = 1000.0
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now)
    models = [parameters(), parameters()]
    peers = [make(f"peer-{i}", model) for i, model in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(1_000_000)
    connect(peers)
    (index,) = [i for i, peer in enumerate(peers) if peer.is_leader() is leads]
    peer, model = peers[index], models[index]
    told = []
    for seconds in (0, 9, 2, 11, 20):
        now += seconds
        until(lambda: pump(peers) or peer.wants_gradients(), "the next turn")
        model[0].grad = torch.ones_like(model[0])
        caplog.clear()
        peer.reduce_gradients(1000)
        told.append([r.message for r in caplog.records if "virtual batch" in r.message])
    report = peer._rounds.report()
    assert report is not None
    assert report["still"] == 42
    assert report["awaited"].startswith(  # the page puts "waits for" before it
        "the virtual batch size to be reached: this peer has contributed 5,000 of 1,000,000"
    )
    until(
        lambda: ", a batch of 5,000 of 1,000,000 for round " in moolink.dump(),
        "all contributions to be at the leader",
    )
    if leads:
        assert [len(lines) for lines in told] == [0, 0, 1, 0, 1]
        assert told[2][0].startswith(
            "the virtual batch size is not reached for 11 s: this peer has contributed 3,000 of "
            "1,000,000; "
        )
    else:
        assert not any(told), "the leader says it"


def test_a_round_ends_the_wait_for_the_virtual_batch_size(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now)
    model = parameters()
    peer = make("alone", model)
    peer.set_virtual_batch_size(2)
    connect([peer])
    peer.reduce_gradients(1)
    now += 60
    until(lambda: pump([peer]) or peer.wants_gradients(), "the next turn")
    reduce_round([peer], [(model, 1)])
    report = peer._rounds.report()
    assert report is not None
    assert "virtual batch" not in report["awaited"]


def test_zeros_of_a_model_without_gradients_are_told(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = parameters()
    peer = make("alone", model)
    connect([peer])
    reduce_round([peer], [(model, 1)])
    assert not any(p.grad.any() for p in model)
    assert "no parameter has a gradient" in caplog.text
    assert "call backward()" in caplog.text
    peer.zero_gradients()
    connect([peer])
    caplog.clear()
    model[0].grad = torch.ones_like(model[0])
    reduce_round([peer], [(model, 1)])
    assert "no parameter has a gradient" not in caplog.text


@pytest.mark.parametrize("to_none", [True, False])
def test_a_forgotten_backward_beside_zero_grad(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, to_none: bool
) -> None:
    now = 1000.0
    monkeypatch.setattr(repeated.time, "monotonic", lambda: now)
    model = [torch.nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD(model, 0.1)
    peer = make("alone", model)
    connect([peer])
    told = 0
    for _ in range(130):
        until(lambda: pump([peer]) or peer.wants_gradients(), "the next turn")
        optimizer.zero_grad(set_to_none=to_none)
        caplog.clear()
        reduce_round([peer], [(model, 1)])
        peer.zero_gradients()
        now += 1000
        told += "to contribute nothing" in caplog.text
    assert told == (130 if to_none else 3), "each time, or as often as is looked"


def test_a_forgotten_backward_is_told_again_and_again(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are zeros, and no longer None, after the first round."""
    now = 1000.0
    monkeypatch.setattr(repeated.time, "monotonic", lambda: now)
    model = parameters()
    peer = make("alone", model)
    connect([peer])

    def round_with(value: float | None) -> int:
        if value is not None:
            for p in model:
                p.grad = torch.full_like(p, value) if p.grad is None else p.grad.add_(value)
        caplog.clear()
        until(lambda: pump([peer]) or peer.wants_gradients(), "the next turn")
        reduce_round([peer], [(model, 1)])
        peer.zero_gradients()
        return caplog.text.count("no parameter has a gradient since the last round")

    assert round_with(1.0) == 0
    assert round_with(None) == 1
    assert round_with(None) == 0, "it was told just now"
    now += 4
    assert round_with(None) == 1
    assert round_with(2.0) == 0
    now += 100
    assert round_with(None) == 1


def test_a_parameter_of_another_shape_is_refused_by_name(make: Make) -> None:
    model = parameters()
    peer = make("alone", model)
    connect([peer])
    before = model[1].data
    model[0].grad = torch.ones(2, 3)
    model[1].data = torch.zeros(2)
    with pytest.raises(ValueError, match=r"parameters\[1\] is float32\(2,\) now and was"):
        peer.reduce_gradients(1)
    model[1].data = before
    assert model[0].grad.all()  # nothing was taken
    model[1].grad = torch.ones(4)
    model[1].grad.resize_(2)
    with pytest.raises(ValueError, match=r"gradient of parameters\[1\] is of shape \(2,\)"):
        peer.reduce_gradients(1)
    model[1].grad = None
    peer.reduce_gradients(1)
    model[1].data = torch.zeros(2)
    errors: list[str] = []
    until(lambda: failed([peer], errors), "the error")
    assert "parameters[1]" in errors[0]
    model[1].data = before
    until(lambda: pump([peer]) or peer.has_gradients(), "the round, which has waited")
    assert torch.equal(model[0].grad, torch.ones(2, 3))


def test_a_sparse_gradient_is_refused_by_name(make: Make) -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    peer = make("alone", list(table.parameters()))
    connect([peer])
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(TypeError, match=r"gradient of parameters\[0\].*torch.sparse_coo"):
        peer.reduce_gradients(1)
    table.weight.grad = table.weight.grad.to_dense()
    peer.reduce_gradients(1)


def test_a_conjugated_gradient_is_gathered(make: Make) -> None:
    model = [torch.zeros(2, dtype=torch.complex64, requires_grad=True)]
    peer = make("alone", model)
    connect([peer])
    model[0].grad = torch.full((2,), 1 + 2j, dtype=torch.complex64).conj()
    peer.reduce_gradients(1)
    until(lambda: pump([peer]) or peer.has_gradients(), "a round")
    assert torch.equal(model[0].grad, torch.full((2,), 1 - 2j, dtype=torch.complex64))


def test_gradients_with_memory_in_common_are_gathered_before_they_are_zeroed(make: Make) -> None:
    model = [torch.zeros(4, requires_grad=True) for _ in range(3)]
    peer = make("alone", model)
    connect([peer])
    values = torch.arange(1.0, 7.0)
    for parameter, gradient in zip(model, (values[:4], values[:4], values[2:]), strict=True):
        parameter.grad = gradient
    peer.reduce_gradients(1)
    assert not values.any()
    until(lambda: pump([peer]) or peer.has_gradients(), "a round")
    means = [parameter.grad.tolist() for parameter in model if parameter.grad is not None]
    assert means == [[1, 2, 3, 4], [1, 2, 3, 4], [3, 4, 5, 6]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32(make: Make, dtype: torch.dtype) -> None:
    models = [[torch.zeros(3, dtype=dtype, requires_grad=True)] for _ in range(2)]
    peers = [make(f"peer-{i}", m, on_nonfinite="raise") for i, m in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(2000)
    connect(peers)
    for (p,) in models:
        p.grad = torch.full_like(p, 60000.0)  # times 1000 beyond float16
    wanted = models[0][0].grad.clone()
    reduce_round(peers, [(m, 1000) for m in models])
    for (p,) in models:
        assert p.grad.dtype == dtype
        assert torch.equal(p.grad, wanted)
