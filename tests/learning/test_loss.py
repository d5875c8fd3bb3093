"""The loss of a contribution, and how contributions add up."""

import numpy as np
import pytest
import torch

from examples.common.config import LearnerConfig
from examples.common.unrolls import Batch, Unroll
from examples.torch.impala import impala_loss, vtrace
from examples.torch.net import ActingPolicy, Net

SHAPE, ACTIONS, LENGTH, ENVS = (4, 42, 42), 4, 5, 6


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net("small", SHAPE, ACTIONS, np.full(SHAPE[1:], 100.0, np.float32))


@pytest.fixture(scope="module")
def unroll():
    random = np.random.default_rng(1)
    unroll = Unroll(LENGTH, ENVS, SHAPE)
    unroll.observation[:] = random.integers(0, 256, unroll.observation.shape)
    unroll.action[:] = random.integers(0, ACTIONS, unroll.action.shape)
    unroll.log_prob[:] = np.log(random.uniform(0.1, 0.5, unroll.log_prob.shape))
    unroll.reward[:] = random.integers(-3, 4, unroll.reward.shape)
    unroll.done[:] = random.random(unroll.done.shape) < 0.2
    return unroll


def gradients(net, batch, config):
    net.zero_grad()
    impala_loss(net, batch, config).total.backward()
    return [p.grad.clone() for p in net.parameters()]


def test_is_the_sum_of_its_three_terms(net, unroll):
    config = LearnerConfig(baseline_cost=0.7, entropy_cost=0.03, discount=0.9, vtrace_lambda=0.8)
    losses = impala_loss(net, Batch(unroll, slice(0, ENVS)), config)
    with torch.no_grad():
        logits, value = (x.double() for x in net(torch.from_numpy(unroll.observation)))
    log_pi = logits[:-1] - logits[:-1].exp().sum(-1, keepdim=True).log()
    log_pi_a = torch.stack(
        [
            torch.stack([log_pi[t, b, unroll.action[t, b]] for b in range(ENVS)])
            for t in range(LENGTH)
        ]
    )
    targets = vtrace(
        log_pi_a - torch.from_numpy(unroll.log_prob),
        torch.from_numpy(np.where(unroll.done, 0.0, 0.9)),
        torch.from_numpy(np.sign(unroll.reward)).double(),
        value[:-1],
        value[-1],
        lambda_=0.8,
        clip_rho=1.0,
        clip_c=1.0,
    )
    entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
    policy = -(targets.pg_advantages * log_pi_a).mean()
    baseline = 0.5 * (targets.vs - value[:-1]).square().mean()
    expected = policy + 0.7 * baseline - 0.03 * entropy
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-4)
    assert losses.entropy.item() == pytest.approx(entropy.item(), rel=1e-5)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_weighted_mean_of_contributions_is_the_whole_batch(net, unroll, loss):
    """What makes a round's gradients independent of how many peers it is shared out among."""
    config = LearnerConfig(loss=loss)
    whole = gradients(net, Batch(unroll, slice(0, 6)), config)
    small = gradients(net, Batch(unroll, slice(0, 2)), config)
    large = gradients(net, Batch(unroll, slice(2, 6)), config)
    for all_, two, four in zip(whole, small, large, strict=True):
        torch.testing.assert_close(all_, (2 * two + 4 * four) / 6, rtol=1e-3, atol=1e-6)


def test_sum_is_the_mean_times_the_length(net, unroll):
    batch = Batch(unroll, slice(0, 4))
    mean = gradients(net, batch, LearnerConfig(loss="mean"))
    total = gradients(net, batch, LearnerConfig(loss="sum"))
    for m, s in zip(mean, total, strict=True):
        torch.testing.assert_close(s, LENGTH * m, rtol=1e-3, atol=1e-6)


def test_rewards_count_by_their_sign_unless_told_otherwise(net, unroll):
    signs = Unroll(LENGTH, ENVS, SHAPE)
    for name in ("observation", "action", "log_prob", "done"):
        setattr(signs, name, getattr(unroll, name))
    signs.reward = np.sign(unroll.reward)
    columns = slice(0, ENVS)

    def loss(source, clip_reward):
        config = LearnerConfig(clip_reward=clip_reward)
        return impala_loss(net, Batch(source, columns), config).total.item()

    assert loss(unroll, True) == loss(signs, True) == loss(signs, False)
    assert loss(unroll, False) != loss(unroll, True)


def test_bfloat16_is_close_to_float32(net, unroll):
    batch = Batch(unroll, slice(0, ENVS))
    single = impala_loss(net, batch, LearnerConfig()).total.item()
    half = impala_loss(net, batch, LearnerConfig(precision="bfloat16")).total
    half.backward()
    assert half.item() == pytest.approx(single, rel=0.05, abs=0.02)
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


def test_input_is_standardised_per_pixel(net):
    observation = np.zeros((1, 2, *SHAPE), np.uint8)
    observation[0, 0] = 132  # one unit above the mean of 100
    observation[0, 1] = 255  # more than four units above it
    x = net.standardise(torch.from_numpy(observation))
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x[0], torch.ones(SHAPE))
    assert torch.equal(x[1], torch.full(SHAPE, 4.0))


def test_the_acting_policy_samples_from_the_nets_distribution(net):
    observation = np.random.default_rng(2).integers(0, 256, (1, *SHAPE)).astype(np.uint8)
    many = observation.repeat(2000, 0)
    with torch.no_grad():
        log_pi = net(torch.from_numpy(observation)[None])[0][0, 0].log_softmax(-1).numpy()
    actions, log_probs = ActingPolicy(net, seed=0)(many)
    np.testing.assert_allclose(log_probs, log_pi[actions], rtol=1e-3)
    frequencies = np.bincount(actions, minlength=ACTIONS) / len(actions)
    np.testing.assert_allclose(frequencies, np.exp(log_pi), atol=0.05)  # 4.5 deviations


def test_the_acting_policy_takes_new_parameters_over(net):
    observation = np.random.default_rng(2).integers(0, 256, (3, *SHAPE)).astype(np.uint8)
    torch.manual_seed(5)
    other = Net("small", SHAPE, ACTIONS, np.full(SHAPE[1:], 50.0, np.float32))
    for dtype in (torch.float32, torch.bfloat16):
        policy, expected = ActingPolicy(net, 0, dtype), ActingPolicy(other, 0, dtype)
        policy.update(other)
        for got, wanted in zip(policy(observation), expected(observation), strict=True):
            np.testing.assert_array_equal(got, wanted)
