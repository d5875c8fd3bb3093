"""PPO in both frameworks: advantages, minibatches, the loss, and rollouts."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from examples.common.options import PpoOptions, defaults
from examples.torch import ppo as in_torch
from tests.learning.stubs import Counting, Spaces, images, run_of

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

from examples.jax import ppo as in_jax  # noqa: E402
from examples.jax.common import parameters_of  # noqa: E402

BOTH = spaces.Dict({"image": images(48, 40, 3), "body": spaces.Box(-1, 1, (5,))})
# Observations, actions, and whether there is a memory
CASES = {
    "dense": (spaces.Box(-1, 1, (4,)), spaces.MultiDiscrete([3, 2]), False),
    "memory": (spaces.Box(-1, 1, (4,)), spaces.Discrete(3), True),
    "continuous": (BOTH, spaces.Box(-2, 2, (3,)), False),
    "frames": (images(4, 42, 42), spaces.Discrete(4), False),
}


def options(**given):
    o = defaults(PpoOptions, {}, env_id="none", num_peers=1)
    for name, value in given.items():
        assert hasattr(o, name), name
        setattr(o, name, value)
    return o


def test_the_first_deviation_of_actions_is_an_option():
    o, envs = options(initial_std=0.25), Spaces(spaces.Box(-1, 1, (4,)), spaces.Box(-2, 2, (3,)))
    np.testing.assert_allclose(in_torch.Net(envs, {}, o).log_std.detach().exp(), [0.25] * 3)
    np.testing.assert_allclose(np.exp(in_jax.Net(envs, o).init(0)["log_std"]), [0.25] * 3)


def test_advantages_are_the_papers_sums():
    random = np.random.default_rng(0)
    reward, value = random.normal(size=(2, 6, 3))
    discount = 0.9 * (random.random((6, 3)) > 0.2)
    last_value = random.normal(size=3)
    values = np.vstack([value, last_value[None]])
    delta = reward + discount * values[1:] - value
    wanted = np.zeros((6, 3))
    for t in range(6):
        for k in range(t, 6):
            wanted[t] += np.prod(0.8 * discount[t:k], axis=0) * delta[k]
    got = in_jax.advantages(reward, discount, value, last_value, 0.8)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)
    tensors = map(torch.from_numpy, (reward, discount, value, last_value))
    np.testing.assert_allclose(in_torch.advantages(*tensors, 0.8), wanted, rtol=1e-12)


class Case:
    """A network in both frameworks, and steps to learn from."""

    def __init__(self, kind):
        observation, action, lstm = CASES[kind]
        self.options, self.envs = options(lstm=lstm), Spaces(observation, action)
        parts = self.envs.observation_spaces.items()
        random = np.random.default_rng(3)
        means = {
            k: np.float32(random.uniform(0, 200, s.shape)) for k, s in parts if s.dtype == np.uint8
        }
        torch.manual_seed(0)
        self.torch = in_torch.Net(self.envs, means, self.options)
        self.torch.policy[4].weight.data.mul_(100)  # so that the probabilities differ
        saved = {"parameters": {k: x.numpy() for k, x in self.torch.state_dict().items()}}
        self.jax = in_jax.Net(self.envs, self.options)
        self.p, self.buffers = parameters_of(self.jax, self.envs, self.options, saved)

    def batches(self, length=5):
        """What torch and what JAX learn from."""
        random, envs, shape = np.random.default_rng(1), self.envs, (length, self.envs.num_envs)
        observation = {
            k: (
                random.integers(0, 256, (*shape, *s.shape)).astype(np.uint8)
                if s.dtype == np.uint8
                else np.float32(random.normal(size=(*shape, *s.shape)))
            )
            for k, s in envs.observation_spaces.items()
        }
        chosen = [random.integers(n, size=shape) for n in envs.actions.choices]
        action = np.stack(chosen, -1) if chosen else random.normal(size=(*shape, envs.actions.size))
        first = random.random(shape) < 0.2
        log_prob = np.log(random.uniform(0.1, 0.5, shape))
        advantage, target = random.normal(size=(2, *shape))
        floats = [np.float32(x) for x in (log_prob, advantage, target)]
        width = self.options.hidden_size if self.options.lstm else 0
        state = tuple(np.float32(random.normal(size=(2, shape[1], width))))
        batch = in_jax.Batch(observation, first, action.astype(envs.actions.dtype), *floats, state)
        return in_torch.Batch(*jax.tree.map(torch.from_numpy, tuple(batch))), batch


@pytest.mark.parametrize("kind", CASES)
def test_both_frameworks_have_one_layout_loss_and_gradient(kind):
    case = Case(kind)
    o, (batch, steps) = case.options, case.batches()
    named = dict(case.torch.named_parameters())
    new = case.jax.init(seed=5)
    assert list(new) == list(named)
    assert [x.shape for x in new.values()] == [tuple(x.shape) for x in named.values()]
    assert set(case.buffers) == {name for name, _ in case.torch.named_buffers()}
    wanted = in_torch.ppo_loss(case.torch, batch, o)
    wanted.total.backward()
    learn = jax.value_and_grad(partial(in_jax.ppo_loss, case.jax, o), has_aux=True)
    (total, entropy), gradients = jax.jit(learn)(case.p, case.buffers, steps)
    assert float(total) == pytest.approx(wanted.total.item(), rel=1e-4)
    assert float(entropy) == pytest.approx(wanted.entropy.item(), rel=1e-4)
    for name, want in named.items():
        scale = want.grad.abs().max().item()
        np.testing.assert_allclose(
            gradients[name], want.grad.numpy(), rtol=1e-3, atol=1e-4 * scale, err_msg=name
        )


def test_new_dense_layers_are_orthogonal():
    p = Case("dense").jax.init(seed=0)
    weight = np.asarray(p["value.2.weight"])
    np.testing.assert_allclose(weight @ weight.T, 2 * np.eye(len(weight)), atol=1e-4)
    assert np.linalg.norm(p["policy.4.weight"], axis=1) == pytest.approx(0.01)


def test_the_policy_is_pushed_no_further_than_the_clip():
    """Beyond 1 + clip the ratio of a good action has no gradient any more."""
    case = Case("dense")
    batch, _ = case.batches()
    with torch.no_grad():
        pi, _, _ = case.torch(batch.observation, batch.first, batch.state)
        now = pi.log_prob(batch.action)
    good = batch.advantage > batch.advantage.mean()
    # As though good actions had become likelier by half, and the others less likely by half.
    before = torch.where(good, now - np.log(1.5), now - np.log(0.5))
    o = options(entropy_cost=0.0, baseline_cost=0.0)
    in_torch.ppo_loss(case.torch, batch._replace(log_prob=before), o).total.backward()
    assert all(p.grad.abs().max() == 0 for p in case.torch.policy.parameters())
    in_torch.ppo_loss(case.torch, batch._replace(log_prob=now), o).total.backward()
    assert all(p.grad.abs().max() > 0 for p in case.torch.policy.parameters())


def rollout_of(module, o, envs=None):
    envs = envs or Counting(2)
    run = run_of(o, envs)
    if module is in_torch:
        torch.manual_seed(0)
        net = in_torch.Net(envs, {}, o)
        player = in_torch.Player(envs, net, run, o)
        return player, lambda x: net({"obs": torch.from_numpy(x)[None]}, torch.zeros(1, 2), None)[1]
    net = in_jax.Net(envs, o)
    p, buffers = parameters_of(net, envs, o, None)
    player = in_jax.Player(envs, net, run, o)
    player.parameters = p, buffers
    first, state = np.zeros((1, 2), bool), net.no_memory(2)
    return player, lambda x: net(p, buffers, {"obs": x[None]}, first, state)[1]


@pytest.mark.parametrize("module", [in_torch, in_jax], ids=["torch", "jax"])
def test_a_rollout_goes_on_and_bootstraps_at_limits(module):
    """With lambda 0 the target is r + gamma V of what follows, also where a limit hides it."""
    o = options(rollout_length=4, gae_lambda=0.0, discount=0.9)
    player, value_of = rollout_of(module, o)
    for start in (0, 4, 8):
        batch = player.rollout()
        count = np.arange(start, start + 4)
        seen = np.asarray(batch.observation["obs"])
        assert (seen[:, 0, 1] == count).all()
        first = (count % 5 == 0) | (count % 7 == 0)
        assert (np.asarray(batch.first)[:, 0] == first).all()
        for t, after in enumerate(count + 1):
            action = np.asarray(batch.action)[t, :, 0]
            reward = action * 10.0 + after
            following = np.float32([[0, after], [1, after]])
            value = np.asarray(value_of(following).tolist())[0] if after % 7 else 0.0
            wanted = reward + 0.9 * value
            np.testing.assert_allclose(np.asarray(batch.target)[t], wanted, rtol=1e-4)


class OneCutOff(Counting):
    """A time limit ends environment 0 only; the other row of the last observation is undefined."""

    def recv(self):
        step = super().recv()
        if step.last_observation is not None:
            step.last_observation["obs"][1] = np.nan
            step.truncated[1] = step.episode_over[1] = False
        return step


@pytest.mark.parametrize("module", [in_torch, in_jax], ids=["torch", "jax"])
def test_undefined_rows_of_the_last_observation_change_nothing(module):
    o = options(rollout_length=8, gae_lambda=0.0, discount=0.9)
    batch = rollout_of(module, o, OneCutOff(2))[0].rollout()
    assert np.isfinite(np.asarray(batch.target)).all()
    assert np.isfinite(np.asarray(batch.advantage)).all()


@pytest.mark.parametrize("module", [in_torch, in_jax], ids=["torch", "jax"])
@pytest.mark.parametrize("lstm", [False, True])
def test_each_epoch_has_each_step_once(module, lstm):
    o = options(rollout_length=6, epochs=3, minibatches=2, lstm=lstm, hidden_size=8)
    player, _ = rollout_of(module, o)
    contributions = module.minibatches(player, o)
    for rollout in range(2):
        for epoch in range(3):
            parts = [next(contributions) for _ in range(2)]
            new_steps = [steps for _, steps in parts]
            assert new_steps == ([12, 0] if epoch == 0 else [0, 0])
            counts = [np.asarray(batch.observation["obs"])[..., 1].ravel() for batch, _ in parts]
            assert sorted(np.concatenate(counts)) == sorted(
                [*range(6 * rollout, 6 * rollout + 6)] * 2
            )
            assert {np.asarray(b.first).shape for b, _ in parts} == {(6, 1) if lstm else (1, 6)}
