"""Torch and JAX beside each other, step by step: what acting records (masks, rewards, statistics of
the normaliser, memory), targets, losses and updates are the same numbers in both."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from examples.common.options import ImpalaOptions, PpoOptions, defaults
from examples.torch import impala as torch_impala
from examples.torch import ppo as torch_ppo
from examples.torch.common import make_net, to_device
from examples.torch.networks import Choices as TorchChoices
from tests.learning.stubs import Counting, run_of
from tests.learning.test_normalizer import Alone

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

from examples.jax import impala as jax_impala  # noqa: E402
from examples.jax import ppo as jax_ppo  # noqa: E402
from examples.jax.common import parameters_of  # noqa: E402
from examples.jax.networks import Choices as JaxChoices  # noqa: E402

MODULES = {"impala": (torch_impala, jax_impala), "ppo": (torch_ppo, jax_ppo)}
ENVS, LENGTH, ROUNDS = 4, 6, 6
RATE = 1e-3


def options(algorithm):
    kind = ImpalaOptions if algorithm == "impala" else PpoOptions
    o = defaults(kind, {}, env_id="none", num_peers=1)
    o.hidden_size, o.lstm, o.normalize, o.normalize_reward = 16, True, True, True
    if algorithm == "impala":
        o.unroll_length, o.batch_size, o.num_groups = LENGTH, ENVS, 1
    else:
        o.rollout_length = LENGTH
    return o


class Torch:
    def __init__(self, algorithm, o):
        self.module, self.o = MODULES[algorithm][0], o
        self.run = run_of(o, envs := Counting(ENVS))
        self.net = make_net(self.module.Net, envs, o, None)
        self.optimizer = torch.optim.Adam(self.net.parameters(), RATE, eps=o.adam_eps)
        if algorithm == "impala":
            self.actor = self.module.Actor(o, envs, self.net, self.run)
            self.group = self.actor.begin(0)
        else:
            self.player = self.module.Player(envs, self.net, self.run, o)

    def acted(self, version):
        if self.module is torch_ppo:
            return self.player.rollout()
        self.actor.take_parameters(self.net.state_dict().values(), version)
        while (batch := self.actor.next_batch(timeout=0)) is None:
            self.actor.go_on(self.group)
        self.actor.release(batch)  # it is read before the group goes on
        return to_device(batch.data, "cpu")

    def learn(self, batch):
        loss = getattr(self.module, f"{self.module.__name__.rpartition('.')[2]}_loss")
        total, entropy = loss(self.net, batch, self.o)
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        return total.item(), entropy.item()

    def parameters(self):
        return {name: x.detach().numpy() for name, x in self.net.named_parameters()}


class Jax:
    def __init__(self, algorithm, o, parameters):
        self.module, self.o = MODULES[algorithm][1], o
        self.run = run_of(o, envs := Counting(ENVS))
        saved = {"parameters": parameters}
        self.net = self.module.Net(envs, o)
        self.p, self.buffers = parameters_of(self.net, envs, o, saved)
        self.optimizer = optax.adam(RATE, eps=o.adam_eps)
        self.state = self.optimizer.init(self.p)
        loss = getattr(self.module, f"{algorithm}_loss")
        self.gradients = jax.jit(jax.value_and_grad(partial(loss, self.net, o), has_aux=True))
        if algorithm == "impala":
            self.actor = self.module.Actor(o, envs, self.net, self.run)
            self.group = self.actor.begin(0)
        else:
            self.actor = self.module.Player(envs, self.net, self.run, o)

    def acted(self, version):
        self.actor.parameters = self.p, self.buffers
        if self.module is jax_ppo:
            return self.actor.rollout()
        while (batch := self.actor.next_batch(timeout=0)) is None:
            self.actor.go_on(self.group)
        self.actor.release(batch)  # it is read before the group goes on
        return batch.data

    def learn(self, batch):
        (total, entropy), gradients = self.gradients(self.p, self.buffers, batch)
        change, self.state = self.optimizer.update(gradients, self.state, self.p)
        self.p = optax.apply_updates(self.p, change)
        return float(total), float(entropy)

    def parameters(self):
        return self.p


def named(batch):
    return batch if isinstance(batch, dict) else batch._asdict()


def assert_equal(got, want, what):
    """Within the rounding of float32; masks and actions exactly."""
    if isinstance(want, dict):
        for name, x in want.items():
            assert_equal(got[name], x, f"{what}.{name}")
    elif isinstance(want, tuple):
        for number, (mine, x) in enumerate(zip(got, want, strict=True)):
            assert_equal(mine, x, f"{what}.{number}")
    else:
        got, want = np.asarray(got), np.asarray(want)
        exact = want.dtype.kind in "biu"
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-4, "atol": 2e-5}
        np.testing.assert_allclose(got, want, err_msg=what, **tolerance)


@pytest.mark.parametrize("algorithm", MODULES)
def test_acting_and_learning_step_by_step(algorithm, monkeypatch):
    """With the likeliest actions in place of samples, for each framework draws others."""
    monkeypatch.setattr(TorchChoices, "sample", lambda self, *_: self.mode())
    monkeypatch.setattr(JaxChoices, "sample", lambda self, key: self.mode())
    o = options(algorithm)
    theirs = Torch(algorithm, o)
    mine = Jax(algorithm, o, {k: x.numpy() for k, x in theirs.net.state_dict().items()})
    group = Alone()
    group.failures = 0
    seen = {"first": 0, "discount": 0}
    for version in range(ROUNDS):
        want, got = theirs.acted(version), mine.acted(version)
        assert_equal(named(got), named(want), f"round {version}")
        if algorithm == "impala":
            seen["discount"] += int((want["discount"] == 0).sum())
        seen["first"] += int(named(want)["first"].sum())
        assert mine.run.episodes.take() == theirs.run.episodes.take()
        assert mine.learn(got) == pytest.approx(theirs.learn(want), rel=2e-4, abs=2e-5)
        for run in (theirs.run, mine.run):
            for _ in range(9):  # some turns: an exchange begins, and ends
                run.normalizer.exchange(group)
        assert_equal(mine.run.normalizer.state(), theirs.run.normalizer.state(), "statistics")
    assert_equal(mine.parameters(), theirs.parameters(), "parameters")
    assert seen["first"] > ENVS, "no episode ended"
    assert np.all(mine.run.normalizer.state()["return"][0] > 0)
