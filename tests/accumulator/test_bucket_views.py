"""Gradients of a torch accumulator that are views of the bucket that is sent."""

from __future__ import annotations

import math
import os
import random
import resource
from pathlib import Path

import pytest
import torch

import moolink
from tests import forks
from tests.accumulator.loops import Make, connect, parameters, pump
from tests.waiting import until


def shown(accumulators: list) -> bool:
    pump(accumulators)
    return all(a.has_gradients() for a in accumulators)


def wanted(accumulators: list) -> bool:
    pump(accumulators)
    return all(a.wants_gradients() for a in accumulators)


def test_rounds_have_the_bits_of_those_without_views(make: Make) -> None:
    leaves = {name: parameters() for name in ("views", "copies")}
    peers = [
        make("views", leaves["views"], gradient_as_bucket_view=True),
        make("copies", leaves["copies"]),
    ]
    for peer in peers:
        peer.set_virtual_batch_size(5)
    connect(peers)
    draw = random.Random(1)
    for round_ in range(6):
        until(lambda: wanted(peers), "wanted gradients")
        ours = leaves["views"]
        assert all(p.grad is not None and not p.grad.any() for p in ours), round_
        start = ours[0].grad.data_ptr()
        for name, batch, peer in zip(leaves, (2, 3), peers, strict=True):
            weights = [draw.uniform(-1, 1) for _ in leaves[name]]
            loss = sum(
                w * (p + 1).square().sum() for w, p in zip(weights, leaves[name], strict=True)
            )
            loss.backward()
            assert name == "copies" or ours[0].grad.data_ptr() == start
            peer.reduce_gradients(batch)
        assert all(p.grad is None for p in ours)
        until(lambda: shown(peers), "a round")
        for mine, theirs in zip(*leaves.values(), strict=True):
            assert mine.grad.equal(theirs.grad)
            assert mine.grad.any()
            for p in (mine, theirs):
                p.data.sub_(p.grad, alpha=0.1)
        for peer in peers:
            peer.zero_gradients()
    for mine, theirs in zip(*leaves.values(), strict=True):
        assert mine.equal(theirs)


def test_the_mean_is_exact_for_views_copies_and_gradients_of_both_kinds(make: Make) -> None:
    leaves = parameters()
    peer = make("alone", leaves, gradient_as_bucket_view=True)
    connect([peer])
    for round_ in range(3):
        until(lambda: wanted([peer]), "wanted gradients")
        if round_ > 0:
            leaves[0].grad = None  # as zero_grad() of a part of the model
        if round_ == 2:
            leaves[0].grad = leaves[1].grad.new_full(leaves[0].shape, 7.0)
        else:
            (3.0 * leaves[0]).sum().backward()
        leaves[1].grad += 0.1
        peer.reduce_gradients(3)
        until(lambda: shown([peer]), "a round")
        assert leaves[0].grad.eq(7.0 if round_ == 2 else 3.0).all()
        assert leaves[1].grad.sub(0.1).abs().max() < 1e-7
        peer.zero_gradients()


def test_a_gradient_that_is_another_parameters_view_is_gathered_as_it_was(make: Make) -> None:
    leaves = [torch.zeros(4, requires_grad=True) for _ in range(2)]
    peer = make("alone", leaves, gradient_as_bucket_view=True)
    connect([peer])
    until(lambda: wanted([peer]), "wanted gradients")
    leaves[0].grad += 2.0
    leaves[1].grad = leaves[0].grad
    peer.reduce_gradients(3)
    until(lambda: shown([peer]), "a round")
    assert all(leaf.grad.eq(2.0).all() for leaf in leaves)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_views_that_are_not_finite(make: Make, policy: str) -> None:
    leaves = parameters()
    peer = make("alone", leaves, gradient_as_bucket_view=True, on_nonfinite=policy)
    peer.set_virtual_batch_size(3)
    connect([peer])
    until(lambda: wanted([peer]), "wanted gradients")
    leaves[0].grad += 0.1
    leaves[1].grad[0] = math.nan
    if policy == "raise":
        with pytest.raises(FloatingPointError, match="nothing was contributed"):
            peer.reduce_gradients(3)
        assert leaves[0].grad.equal(torch.full_like(leaves[0], 0.1))  # not scaled
        leaves[1].grad.zero_()
    else:
        peer.reduce_gradients(3)
        assert leaves[0].grad is None
        until(lambda: wanted([peer]), "wanted gradients")
        assert not any(leaf.grad.any() for leaf in leaves)
        leaves[0].grad += 0.1
    peer.reduce_gradients(3)
    until(lambda: shown([peer]), "a round")
    assert leaves[0].grad.sub(0.1).abs().max() < 1e-7


def test_a_dtype_that_is_summed_in_another_has_gradients_of_its_own(make: Make) -> None:
    leaves = [torch.zeros(3, dtype=torch.bfloat16, requires_grad=True), *parameters()]
    peer = make("alone", leaves, gradient_as_bucket_view=True)
    connect([peer])
    until(lambda: wanted([peer]), "wanted gradients")
    assert leaves[0].grad is None
    assert leaves[1].grad is not None
    sum((2 * leaf).sum() for leaf in leaves).backward()
    peer.reduce_gradients(4)
    until(lambda: shown([peer]), "a round")
    assert all(leaf.grad.eq(2.0).all() for leaf in leaves)
    peer.zero_gradients()


def test_the_training_loop_needs_no_change(make: Make) -> None:
    leaves = parameters(1.0)
    peer = make("alone", leaves, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(leaves, lr=0.25)
    rounds = 0
    for step in peer.steps(optimizer, until=lambda totals: totals["rounds"] >= 4):
        sum(leaf.square().sum() for leaf in leaves).backward()
        step.reduce(batch_size=2, counters={"rounds": 1})
        rounds += 1
    assert rounds == 4
    assert all(leaf.eq(0.5**4).all() for leaf in leaves)


def test_a_forked_child_has_no_part_in_a_contribution(make: Make) -> None:
    models = [parameters(), parameters()]
    peers = [make(f"peer-{i}", m, gradient_as_bucket_view=True) for i, m in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    for _ in range(2):  # the second bucket is memory that both members map
        until(lambda: wanted(peers), "wanted gradients")
        for leaf in (*models[0], *models[1]):
            leaf.grad += 1.0

        def child() -> None:
            assert all(leaf.grad is None for leaf in models[0])

        assert forks.exit_status(forks.start(child)) == 0
        for peer in peers:
            peer.reduce_gradients(1)
        until(lambda: shown(peers), "a round")
        assert all(leaf.grad.eq(1.0).all() for leaf in models[0])
        for peer in peers:
            peer.zero_gradients()


def test_a_contribution_that_fails_midway_is_lost_as_a_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [torch.zeros(3, requires_grad=True), torch.zeros(3, dtype=torch.float64)]
    leaves[1].requires_grad_()
    peer = make("alone", leaves, gradient_as_bucket_view=True)
    connect([peer])
    until(lambda: wanted([peer]), "wanted gradients")
    gather = peer._core.gather

    class Interrupted:
        def __getattr__(self, name: str) -> object:
            return getattr(core, name)

        def gather(self, dtype: str, *arguments: object) -> bool:
            if dtype == "float64":
                raise KeyboardInterrupt
            return gather(dtype, *arguments)

    core = peer._core
    for leaf in leaves:
        leaf.grad += 1.0
    with monkeypatch.context() as patched:
        patched.setattr(peer, "_core", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            peer.reduce_gradients(4)
    until(lambda: wanted([peer]), "wanted gradients")
    for leaf in leaves:
        leaf.grad += 1.0
    peer.reduce_gradients(4)
    until(lambda: shown([peer]), "a round")
    assert all(leaf.grad.eq(1.0).all() for leaf in leaves)


def test_views_made_in_inference_mode_take_a_backward(make: Make) -> None:
    leaves = parameters(1.0)
    peer = make("alone", leaves, gradient_as_bucket_view=True)
    connect([peer])
    for leaf in leaves:
        leaf.grad = None
    with torch.inference_mode():
        until(lambda: wanted([peer]), "wanted gradients")
    sum(leaf.square().sum() for leaf in leaves).backward()
    peer.reduce_gradients(1)
    with torch.inference_mode():
        until(lambda: shown([peer]), "a round")
    assert all(leaf.grad.eq(2.0).all() for leaf in leaves)


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_closing_gives_the_bucket_back(make: Make) -> None:
    size = 600 << 20  # more than the pool keeps of free memory
    leaves = [torch.empty(size // 4).requires_grad_()]  # whose pages nothing touches
    peer = make("alone", leaves, gradient_as_bucket_view=True)
    connect([peer])
    until(lambda: wanted([peer]), "wanted gradients")
    before = resident()
    leaves[0].grad = None
    assert resident() > before - size // 2
    peer.close()
    assert resident() < before - size // 2


@pytest.mark.parametrize("views", [False, True])
def test_without_descriptors_for_a_segment_rounds_go_on(make: Make, views: bool) -> None:
    models = [[torch.zeros(1 << 20, requires_grad=True)] for _ in range(2)]
    peers = [make(f"peer-{i}", m, gradient_as_bucket_view=views) for i, m in enumerate(models)]
    for peer in peers:
        peer.set_virtual_batch_size(2)

    def rounds(count: int) -> None:
        for _ in range(count):
            until(lambda: wanted(peers), "wanted gradients")
            for (leaf,) in models:
                leaf.grad = torch.ones_like(leaf) if leaf.grad is None else leaf.grad.fill_(1.0)
            for peer in peers:
                peer.reduce_gradients(1)
            until(lambda: shown(peers), "a round")
            assert all(leaf.grad.eq(1.0).all() for (leaf,) in models)
            for peer in peers:
                peer.zero_gradients()

    connect(peers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 1
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        rounds(3)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    rounds(2)


def test_a_misspelt_option_is_told_with_its_name(broker_address: str) -> None:
    with (
        moolink.Rpc("peer") as rpc,
        moolink.Group(rpc, "group") as group,
        pytest.raises(TypeError, match=r"did you mean 'gradient_as_bucket_view'\? It has .*role"),
    ):
        moolink.Accumulator("model", parameters(), group=group, gradients_as_bucket_view=True)
