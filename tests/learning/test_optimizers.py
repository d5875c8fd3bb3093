"""States of torch's optimizers, as they travel to members of any framework."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from moolink.torch import load_optimizer_state, optimizer_state

KINDS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, alpha=0.9),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
}


def make_parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]


def step(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_carries_on_bit_for_bit(kind, steps):
    first = make_parameters()
    optimizer = KINDS[kind](first)
    for seed in range(steps):
        step(optimizer, seed)
    second = [nn.Parameter(p.detach().clone()) for p in first]
    successor = KINDS[kind](second)
    load_optimizer_state(successor, copy.deepcopy(optimizer_state(optimizer)))
    for one in (optimizer, successor):
        step(one, 9)
        step(one, 10)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_hyperparameters_travel_between_torchs():
    optimizer, successor = (KINDS["adam"](make_parameters()) for _ in range(2))
    optimizer.param_groups[0]["lr"] = 0.5
    load_optimizer_state(successor, optimizer_state(optimizer))
    assert successor.param_groups[0]["lr"] == 0.5


def test_a_state_of_numpy_arrays_is_taken_by_value():
    """As a checkpoint or a member of another framework gives it."""
    optimizer, successor = (KINDS["adam"](make_parameters()) for _ in range(2))
    step(optimizer, 0)
    moments = {
        name: [x.numpy().copy() for x in moment]
        for name, moment in optimizer_state(optimizer)["moments"].items()
    }
    load_optimizer_state(successor, {"count": 1, "moments": moments})
    moments["mean"][0][:] = np.nan
    taken = optimizer_state(successor)
    assert taken["count"] == 1
    assert torch.isfinite(taken["moments"]["mean"][0]).all()


def test_one_that_keeps_more_has_no_common_state():
    parameters = make_parameters()
    for optimizer in (torch.optim.Adam(parameters, amsgrad=True), torch.optim.Adagrad(parameters)):
        step(optimizer, 0)
        assert optimizer_state(optimizer) is None


def test_the_state_of_another_optimizer_is_refused():
    optimizer = KINDS["adam"](make_parameters())
    step(optimizer, 0)
    with pytest.raises(ValueError, match=r"RMSprop .*use the same optimizer"):
        load_optimizer_state(KINDS["rmsprop"](make_parameters()), optimizer_state(optimizer))
    with pytest.raises(ValueError, match="not of 1 parameters"):
        load_optimizer_state(KINDS["adam"](make_parameters()[:1]), optimizer_state(optimizer))


def test_a_state_without_moments_is_of_its_optimizer():
    plain = torch.optim.SGD(make_parameters(), lr=0.1)  # without momentum it keeps none
    step(plain, 0)
    assert not optimizer_state(plain)["moments"]
    load_optimizer_state(torch.optim.SGD(make_parameters(), 0.1, 0.9), optimizer_state(plain))
    with pytest.raises(ValueError, match=r"Adam .*use the same optimizer"):
        load_optimizer_state(KINDS["adam"](make_parameters()), optimizer_state(plain))
    new = optimizer_state(KINDS["adam"](make_parameters()))  # which has made no update
    load_optimizer_state(KINDS["adam"](make_parameters()), new)
    with pytest.raises(ValueError, match=r"SGD .*use the same optimizer"):
        load_optimizer_state(plain, new)
    load_optimizer_state(plain, {"count": 0, "moments": {}})  # of an earlier version


def test_a_state_without_moments_is_of_its_optimizer_in_jax_too():
    optax = pytest.importorskip("optax")
    from moolink import jax

    plain, adam = (o.init({"w": np.ones(2, np.float32)}) for o in (optax.sgd(0.1), optax.adam(0.1)))
    torchs = optimizer_state(torch.optim.SGD(make_parameters(), lr=0.1))
    jax.load_optimizer_state(plain, torchs)
    for state in (torchs, jax.optimizer_state(plain)):
        with pytest.raises(ValueError, match="use the same optimizer"):
            jax.load_optimizer_state(adam, state)
        with pytest.raises(ValueError, match="use the same optimizer"):
            load_optimizer_state(KINDS["adam"](make_parameters()), state)
    load_optimizer_state(torch.optim.SGD(make_parameters(), lr=0.1), jax.optimizer_state(plain))
