"""The optimisers against torch's own, and the schedule of the learning rate."""

import copy

import pytest
import torch
from torch import nn

from examples.common.config import Config, LearnerConfig
from examples.common.learner import learning_rate
from examples.torch.impala import apply_gradients
from examples.torch.optimizers import Adam, RMSProp, make_optimizer


def make_parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]


def set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (LearnerConfig(optimizer="adam", adam_eps=1e-5), lambda p: torch.optim.Adam(p, eps=1e-5)),
        (
            LearnerConfig(optimizer="rmsprop", rmsprop_decay=0.9, rmsprop_eps=0.1),
            lambda p: torch.optim.RMSprop(p, alpha=0.9, eps=0.1),
        ),
    ],
    ids=["adam", "rmsprop"],
)
def test_steps_like_torchs(config, reference):
    ours, theirs = make_parameters(), make_parameters()
    optimizer, torchs = make_optimizer(ours, config), reference(theirs)
    for step in range(100):
        rate = 1e-2 * (1 - step / 100)
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step(rate)
        torchs.param_groups[0]["lr"] = rate
        torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_state_carries_on_bit_for_bit(kind):
    config = LearnerConfig(optimizer=kind)
    first = make_parameters()
    optimizer = make_optimizer(first, config)
    for step in range(3):
        set_gradients(first, step)
        optimizer.step(1e-2)
    second = copy.deepcopy(first)
    successor = make_optimizer(second, config)
    successor.load_state(copy.deepcopy(optimizer.state()))
    for parameters, opt in ((first, optimizer), (second, successor)):
        set_gradients(parameters, 9)
        opt.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_missing_gradient_counts_as_zero():
    for optimizer_class, arguments in ((Adam, ((0.9, 0.999), 1e-8)), (RMSProp, (0.99, 0.01))):
        parameters = make_parameters()
        before = [p.detach().clone() for p in parameters]
        set_gradients(parameters[:1], 0)
        optimizer_class(parameters, *arguments).step(1e-2)
        assert not torch.equal(before[0], parameters[0])
        assert torch.equal(before[1], parameters[1])


def test_gradients_are_clipped_to_their_norm():
    net = nn.Linear(3, 2)
    for p in net.parameters():
        p.grad = torch.full_like(p, 10.0)
    norm = apply_gradients(net, make_optimizer(net.parameters(), LearnerConfig()), 0.0, 0.5)
    assert norm == pytest.approx((8 * 100.0) ** 0.5)
    clipped = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
    assert clipped.item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_change_nothing(bad):
    net = nn.Linear(3, 2)
    before = copy.deepcopy(net.state_dict())
    for p in net.parameters():
        p.grad = torch.full_like(p, bad)
    with pytest.raises(FloatingPointError, match="norm of the gradients"):
        apply_gradients(net, make_optimizer(net.parameters(), LearnerConfig()), 1e-3, 0.5)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_learning_rate_follows_the_steps():
    config = Config()
    config.job.total_steps = 1000
    config.learner.learning_rate = 0.5
    rates = [learning_rate(config, steps) for steps in (0, 250, 1000, 1500)]
    assert rates == [0.5, 0.375, 0.0, 0.0]
