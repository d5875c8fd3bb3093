"""The JAX learner computes what the torch learner does."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

import moolink.torch
from examples.torch import impala as in_torch
from examples.torch.common import to_device
from examples.torch.networks import Net
from examples.torch.vtrace import vtrace as torch_vtrace
from tests.learning.stubs import Spaces, arrays, filled, images, options

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

import moolink.jax  # noqa: E402
from examples.jax import impala as in_jax  # noqa: E402
from examples.jax.common import parameters_of  # noqa: E402
from examples.jax.networks import Net as JaxNet  # noqa: E402
from examples.jax.vtrace import vtrace as jax_vtrace  # noqa: E402

LENGTH, ENVS = 20, 8
BOTH = spaces.Dict({"image": images(48, 40, 3), "body": spaces.Box(-1, 1, (5,))})
# Observations, actions, and whether there is a memory
CASES = {
    "small": (images(4, 42, 42), spaces.Discrete(4), False),
    "large": (images(4, 84, 84), spaces.Discrete(6), False),
    "dense": (spaces.Box(-1, 1, (10,)), spaces.MultiDiscrete([3, 2]), False),
    "memory": (spaces.Box(-1, 1, (4,)), spaces.Discrete(3), True),
    "continuous": (BOTH, spaces.Box(-2, 2, (3,)), False),
}


class Case:
    """A network in both frameworks."""

    def __init__(self, kind, **given):
        observation, action, lstm = CASES[kind]
        self.options = options(unroll_length=LENGTH, lstm=lstm, hidden_size=64, **given)
        self.envs = Spaces(observation, action, ENVS)
        random = np.random.default_rng(3)
        means = {
            name: random.uniform(0, 200, space.shape).astype(np.float32)
            for name, space in self.envs.observation_spaces.items()
            if space.dtype == np.uint8
        }
        torch.manual_seed(0)
        self.torch = Net(self.envs, means, self.options)
        saved = {"parameters": {k: x.numpy() for k, x in self.torch.state_dict().items()}}
        self.jax = JaxNet(self.envs, self.options)
        self.p, self.buffers = parameters_of(self.jax, self.envs, self.options, saved)

    def batch(self, seed=1, length=LENGTH, envs=ENVS):
        """What torch and what JAX learn from."""
        o = options(unroll_length=length, lstm=self.options.lstm, hidden_size=64)
        batch = filled(arrays(self.envs, o, seed)).data(slice(0, envs))
        return to_device(batch, "cpu"), batch

    def smooth_batches(self):
        """Batches on which every ReLU is further from its kink than rounding reaches: nearer, each
        framework may rightly take another side of it."""
        for seed in itertools.count():
            batch, steps = self.batch(seed, length=4, envs=2)
            if self.distance_to_kinks(batch) > 1e-5:
                yield batch, steps

    def distance_to_kinks(self, batch):
        """The smallest magnitude of what goes into a ReLU."""
        nearest = []
        layers = [x for x in self.torch.encoders.modules() if isinstance(x, torch.nn.Conv2d)]
        hooks = [
            layer.register_forward_hook(lambda *call: nearest.append(call[-1].abs().min().item()))
            for layer in [*layers, self.torch.hidden]
        ]
        with torch.no_grad():
            self.torch(batch["observation"], batch["first"], batch["state"])
        for hook in hooks:
            hook.remove()
        return min(nearest)

    def assert_close(self, p, tolerance=1e-5):
        for name, mine in self.torch.named_parameters():
            theirs = np.asarray(p[name])
            np.testing.assert_allclose(
                theirs, mine.detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=name
            )


@pytest.mark.parametrize("kind", CASES)
def test_parameters_have_one_layout(kind):
    case = Case(kind)
    named = dict(case.torch.named_parameters())
    mine = case.jax.init(seed=5)
    assert list(mine) == list(named)
    assert [x.shape for x in jax.tree.leaves(mine)] == [tuple(x.shape) for x in named.values()]
    assert set(case.buffers) == {name for name, _ in case.torch.named_buffers()}
    for name, leaf in mine.items():
        if name.endswith(".weight") and leaf.size > 1000:  # the same distribution
            assert np.std(leaf) == pytest.approx(named[name].std().item(), rel=0.1)
            assert np.abs(leaf).max() <= leaf[0].size ** -0.5


def test_float_images_may_have_their_channels_last():
    envs = Spaces(spaces.Box(0, 1, (48, 40, 3)), spaces.Discrete(2), ENVS)
    net = JaxNet(envs, options(hidden_size=64))
    p, buffers = net.init(0), net.buffers({})  # there is no mean of random play
    (name,) = envs.observation_spaces
    observation = {name: jnp.ones((1, ENVS, 48, 40, 3))}
    policy, *_ = net(p, buffers, observation, jnp.zeros((1, ENVS), bool), net.no_memory(ENVS))
    assert policy.shape == (1, ENVS, 2)


@pytest.mark.parametrize("kind", CASES)
def test_forward_pass(kind):
    case = Case(kind)
    batch, steps = case.batch()
    with torch.no_grad():
        *wanted, state = case.torch(batch["observation"], batch["first"], batch["state"])
    forward = jax.jit(case.jax)
    inputs = steps["observation"], steps["first"], steps["state"]
    *got, theirs = forward(case.p, case.buffers, *inputs)
    for mine, want in zip([*got, *theirs], [*wanted, *state], strict=True):
        np.testing.assert_allclose(mine, want.numpy(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("lambda_", "clip_rho", "clip_c"), [(1.0, 1.0, 1.0), (0.9, 2.0, 1.3)])
@pytest.mark.parametrize("length", [1, 20])
def test_vtrace(length, lambda_, clip_rho, clip_c):
    random = np.random.default_rng(0)
    inputs = [
        random.normal(size=(length, 4)),
        0.99 * (random.random((length, 4)) >= 0.1),
        random.normal(size=(length, 4)),
        random.normal(size=(length, 4)),
        random.normal(size=4),
    ]
    inputs = [x.astype(np.float32) for x in inputs]
    given = {"lambda_": lambda_, "clip_rho": clip_rho, "clip_c": clip_c}
    wanted = torch_vtrace(*map(torch.from_numpy, inputs), **given)
    for got, want in zip(jax_vtrace(*inputs, **given), wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["small", "dense", "memory", "continuous"])
def test_losses_and_gradients(kind, loss):
    case = Case(kind, loss=loss, vtrace_lambda=0.9, entropy_cost=0.03)
    o = case.options
    batch, steps = next(case.smooth_batches())
    wanted = in_torch.impala_loss(case.torch, batch, o)
    wanted.total.backward()
    learn = jax.value_and_grad(partial(in_jax.impala_loss, case.jax, o), has_aux=True)
    (total, entropy), gradients = jax.jit(learn)(case.p, case.buffers, steps)
    assert float(total) == pytest.approx(wanted.total.item(), rel=1e-5)
    assert float(entropy) == pytest.approx(wanted.entropy.item(), rel=1e-5)
    for name, want in case.torch.named_parameters():
        scale = want.grad.abs().max().item()
        np.testing.assert_allclose(gradients[name], want.grad.numpy(), rtol=1e-4, atol=1e-5 * scale)


def optimizers_of(case):
    """The same optimizer in both frameworks, and JAX' state of it."""
    theirs, mine = (
        in_torch.make_optimizer(case.torch, case.options),
        in_jax.make_optimizer(case.options),
    )
    return theirs, mine, mine.init(case.p)


def updated(mine, p, gradients, state, rate):
    """As `accumulator.steps()` does it."""
    updates, state = mine.update(gradients, state, p)
    return optax.apply_updates(p, jax.tree.map(lambda x: x * rate, updates)), state


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_optimizers_step_alike_and_take_each_others_state(kind):
    case = Case("dense", optimizer=kind, learning_rate=1e-3)
    theirs, mine, state = optimizers_of(case)
    p, step = case.p, jax.jit(partial(updated, mine))
    for number in range(20):
        random = np.random.default_rng(number)
        gradients = {k: random.normal(size=x.shape).astype(np.float32) for k, x in p.items()}
        for name, parameter in case.torch.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name].copy())
        theirs.step()
        p, state = step(p, type(p)(gradients), state, 1e-3)
        if number % 5 == 4:  # hand the states over
            of_torch = jax.tree.map(np.array, moolink.torch.optimizer_state(theirs))
            of_jax = jax.tree.map(np.array, moolink.jax.optimizer_state(state))
            state = moolink.jax.load_optimizer_state(state, of_torch)
            moolink.torch.load_optimizer_state(theirs, of_jax)
    case.assert_close(p)


@pytest.mark.parametrize("kind", ["dense", "small", "memory"])
def test_ten_updates(kind):
    case = Case(kind, optimizer="rmsprop", learning_rate=1e-3)
    theirs, mine, state = optimizers_of(case)
    learn = jax.value_and_grad(partial(in_jax.impala_loss, case.jax, case.options), has_aux=True)
    learn, p, step = jax.jit(learn), case.p, jax.jit(partial(updated, mine))
    for batch, steps in itertools.islice(case.smooth_batches(), 10):
        case.torch.zero_grad()
        in_torch.impala_loss(case.torch, batch, case.options).total.backward()
        theirs.step()
        _, gradients = learn(p, case.buffers, steps)
        p, state = step(p, gradients, state, 1e-3)
    case.assert_close(p, tolerance=2e-5)


def test_the_policy_samples_from_the_nets_distribution():
    case = Case("small")
    _, steps = case.batch()
    frames = {"obs": np.repeat(steps["observation"]["obs"][0, :1], 2000, 0)}
    first, state = np.zeros(2000, bool), case.jax.no_memory(2000)
    key = jax.random.key(0)
    act = partial(in_jax.act, case.jax, case.p, case.buffers, key)
    actions, log_probs, *_ = act(np.uint32(1), frames, first, state)
    policy, *_ = case.jax(
        case.p, case.buffers, {"obs": frames["obs"][None, :1]}, first[None, :1], state
    )
    log_pi = np.asarray(jax.nn.log_softmax(policy[0, 0]))
    actions = np.asarray(actions)[:, 0]
    np.testing.assert_allclose(log_probs, log_pi[actions], rtol=1e-3)
    frequencies = np.bincount(actions, minlength=len(log_pi)) / len(actions)
    np.testing.assert_allclose(frequencies, np.exp(log_pi), atol=0.05)


def test_bfloat16_is_close_to_float32():
    totals = []
    for precision in ("float32", "bfloat16"):
        case = Case("small", precision=precision)
        _, steps = case.batch()
        loss = in_jax.impala_loss(case.jax, case.options, case.p, case.buffers, steps)[0]
        totals.append(float(loss))
    assert totals[1] == pytest.approx(totals[0], rel=0.05, abs=0.02)
