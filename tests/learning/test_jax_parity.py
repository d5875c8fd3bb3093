"""The JAX learner computes what the torch learner does."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from examples.common.config import LearnerConfig, default_config
from examples.common.networks import parameter_names
from examples.common.unrolls import Batch, Unroll
from examples.torch import impala as in_torch
from examples.torch.net import Net
from examples.torch.optimizers import make_optimizer

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
jnp = jax.numpy

from examples.jax import impala as in_jax  # noqa: E402
from examples.jax import net as nets  # noqa: E402
from examples.jax import optimizers  # noqa: E402

LENGTH, ENVS = 20, 8
CASES = {"small": ((4, 42, 42), 4), "shallow": ((4, 84, 84), 6), "mlp": ((1, 10, 5), 3)}


def make_nets(kind):
    """The same network in both frameworks."""
    shape, actions = CASES[kind]
    torch.manual_seed(0)
    mean = np.random.default_rng(3).uniform(0, 200, shape[1:]).astype(np.float32)
    net = Net(kind, shape, actions, mean)
    arrays = {name: x.numpy() for name, x in net.state_dict().items()}
    like = nets.init(kind, shape, actions, 0)
    return net, nets.from_arrays(kind, like, arrays), jnp.array(arrays["pixel_mean"])


def make_batch(kind, seed=1, length=LENGTH, envs=ENVS):
    shape, actions = CASES[kind]
    random = np.random.default_rng(seed)
    unroll = Unroll(length, envs, shape)
    unroll.observation[:] = random.integers(0, 256, unroll.observation.shape)
    unroll.action[:] = random.integers(0, actions, unroll.action.shape)
    unroll.log_prob[:] = np.log(random.uniform(0.1, 0.5, unroll.log_prob.shape))
    unroll.reward[:] = random.integers(-3, 4, unroll.reward.shape)
    unroll.done[:] = random.random(unroll.done.shape) < 0.2
    return Batch(unroll, slice(0, envs))


def distance_to_kinks(net, observation):
    """The smallest magnitude of what goes into a ReLU."""
    nearest = []
    hooks = [
        layer.register_forward_hook(lambda *call: nearest.append(call[-1].abs().min().item()))
        for layer in [*net.torso, net.hidden]
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)
    ]
    with torch.no_grad():
        net(torch.from_numpy(observation))
    for hook in hooks:
        hook.remove()
    return min(nearest)


def smooth_batches(kind, net):
    """Batches on which, when they are drawn, every ReLU is further from its kink than rounding
    reaches: nearer, each framework may rightly take another side of it."""
    batches = (make_batch(kind, seed, length=4, envs=2) for seed in itertools.count())
    return (batch for batch in batches if distance_to_kinks(net, batch.observation) > 1e-5)


def steps_of(batch):
    return in_jax.Steps(*(getattr(batch, name) for name in in_jax.Steps._fields))


def assert_close(net, tree, tolerance=1e-5):
    for (name, mine), theirs in zip(net.named_parameters(), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(
            np.asarray(theirs), mine.detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize("kind", CASES)
def test_parameters_have_one_layout(kind):
    net, tree, _ = make_nets(kind)
    assert [name for name, _ in net.named_parameters()] == parameter_names(kind)
    shape, actions = CASES[kind]
    mine = nets.init(kind, shape, actions, seed=5)
    assert jax.tree.map(jnp.shape, mine) == jax.tree.map(jnp.shape, tree)
    for name, leaf, parameter in zip(
        parameter_names(kind), jax.tree.leaves(mine), net.parameters(), strict=True
    ):
        fan_in = {".weight": leaf[0].size}.get(name[name.rindex(".") :])
        if fan_in and leaf.size > 1000:  # the same distribution
            assert np.std(leaf) == pytest.approx(parameter.std().item(), rel=0.1)
            assert np.abs(leaf).max() <= fan_in**-0.5


@pytest.mark.parametrize("kind", CASES)
def test_forward_pass(kind):
    net, tree, mean = make_nets(kind)
    observation = make_batch(kind).observation
    with torch.no_grad():
        wanted = net(torch.from_numpy(observation))
    forward = jax.jit(partial(nets.forward, kind, "float32"))
    for got, want in zip(forward(tree, mean, observation), wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-5)


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
    options = {"lambda_": lambda_, "clip_rho": clip_rho, "clip_c": clip_c}
    wanted = in_torch.vtrace(*map(torch.from_numpy, inputs), **options)
    for got, want in zip(in_jax.vtrace(*inputs, **options), wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["small", "mlp"])
def test_losses_and_gradients(kind, loss):
    config = LearnerConfig(net=kind, loss=loss, vtrace_lambda=0.9, entropy_cost=0.03)
    net, tree, mean = make_nets(kind)
    batch = next(smooth_batches(kind, net))
    wanted = in_torch.impala_loss(net, batch, config)
    wanted.total.backward()
    learn = jax.jit(jax.value_and_grad(partial(in_jax.impala_loss, config), has_aux=True))
    (total, entropy), gradients = learn(tree, mean, steps_of(batch))
    assert float(total) == pytest.approx(wanted.total.item(), rel=1e-5)
    assert float(entropy) == pytest.approx(wanted.entropy.item(), rel=1e-5)
    for want, got in zip(net.parameters(), jax.tree.leaves(gradients), strict=True):
        scale = want.grad.abs().max().item()
        np.testing.assert_allclose(got, want.grad.numpy(), rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_optimizers_step_alike_and_take_each_others_state(kind):
    config = LearnerConfig(optimizer=kind)
    net, tree, _ = make_nets("mlp")
    theirs, mine = make_optimizer(net.parameters(), config), optimizers.make_optimizer(config)
    state = mine.init(tree)
    step = jax.jit(partial(in_jax.apply_gradients, mine, 0.5))
    for number in range(20):
        random = np.random.default_rng(number)
        values = [random.normal(size=p.shape).astype(np.float32) for p in net.parameters()]
        for p, value in zip(net.parameters(), values, strict=True):
            p.grad = torch.from_numpy(value.copy())
        gradients = jax.tree.unflatten(jax.tree.structure(tree), values)
        wanted = in_torch.apply_gradients(net, theirs, 1e-3, 0.5)
        tree, state, norm = step(tree, state, gradients, 1e-3, 1.0)
        assert float(norm) == pytest.approx(wanted, rel=1e-5)
        if number % 5 == 4:  # hand the states over
            neutral = optimizers.to_neutral(state)
            state = optimizers.from_neutral(state, theirs.state())
            theirs.load_state(jax.tree.map(np.array, neutral))
    assert_close(net, tree)


@pytest.mark.parametrize("kind", ["mlp", "small"])
def test_ten_updates(kind):
    config = default_config("catch" if kind == "mlp" else "pong", 1, {}).learner
    config.optimizer, config.learning_rate = "rmsprop", 1e-3
    net, tree, mean = make_nets(kind)
    theirs, mine = make_optimizer(net.parameters(), config), optimizers.make_optimizer(config)
    state = mine.init(tree)
    learn = jax.jit(jax.value_and_grad(partial(in_jax.impala_loss, config), has_aux=True))
    step = jax.jit(partial(in_jax.apply_gradients, mine, config.max_grad_norm))
    for batch in itertools.islice(smooth_batches(kind, net), 10):
        net.zero_grad()
        in_torch.impala_loss(net, batch, config).total.backward()
        in_torch.apply_gradients(net, theirs, 1e-3, config.max_grad_norm)
        _, gradients = learn(tree, mean, steps_of(batch))
        tree, state, _ = step(tree, state, gradients, 1e-3, 1.0)
    assert_close(net, tree)


def test_the_policy_samples_from_the_nets_distribution():
    _, tree, mean = make_nets("small")
    observation = make_batch("small").observation[0, :1]
    policy = nets.ActingPolicy("small", "float32", tree, mean, seed=0)
    actions, log_probs = policy(observation.repeat(2000, 0))
    logits, _ = nets.forward("small", "float32", tree, mean, observation[None])
    log_pi = np.asarray(jax.nn.log_softmax(logits[0, 0]))
    np.testing.assert_allclose(log_probs, log_pi[actions], rtol=1e-3)
    frequencies = np.bincount(actions, minlength=len(log_pi)) / len(actions)
    np.testing.assert_allclose(frequencies, np.exp(log_pi), atol=0.05)
    assert actions.dtype == np.int64


def test_bfloat16_is_close_to_float32():
    _, tree, mean = make_nets("small")
    steps = steps_of(make_batch("small"))
    single, half = (
        in_jax.impala_loss(LearnerConfig(precision=precision), tree, mean, steps)[0]
        for precision in ("float32", "bfloat16")
    )
    assert float(half) == pytest.approx(float(single), rel=0.05, abs=0.02)


def test_gradients_that_are_not_finite_show_in_the_norm():
    _, tree, _ = make_nets("mlp")
    optimizer = optimizers.make_optimizer(LearnerConfig())
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), tree)
    state = optimizer.init(tree)
    *_, norm = in_jax.apply_gradients(optimizer, 0.5, tree, state, bad, 1e-3, 1.0)
    assert not np.isfinite(norm)
