"""V-trace against the paper's sums, written out in float64."""

import numpy as np
import pytest
import torch

from examples.torch.vtrace import vtrace


def vtrace_sums(log_rho, discount, reward, value, bootstrap, lambda_, clip_rho, clip_c):
    """Equation 1 and section 4.2 of arXiv 1802.01561, term by term, without its recursion."""
    length, batch = reward.shape
    rho = np.minimum(clip_rho, np.exp(log_rho))
    c = lambda_ * np.minimum(clip_c, np.exp(log_rho))
    values = np.vstack([value, bootstrap[None]])
    vs = np.empty((length + 1, batch))
    vs[length] = bootstrap
    for s in range(length):
        vs[s] = value[s]
        for t in range(s, length):
            weight = np.prod(discount[s:t] * c[s:t], axis=0)
            vs[s] += weight * rho[t] * (reward[t] + discount[t] * values[t + 1] - values[t])
    return vs[:-1], rho * (reward + discount * vs[1:] - value)


def random_inputs(seed, length=20, batch=4, dones=0.1, off_policy=1.0):
    random = np.random.default_rng(seed)
    return (
        off_policy * random.normal(size=(length, batch)),
        0.99 * (random.random((length, batch)) >= dones),
        random.normal(size=(length, batch)),
        random.normal(size=(length, batch)),
        random.normal(size=batch),
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("lambda_", "clip_rho", "clip_c"), [(1.0, 1.0, 1.0), (0.95, 1.0, 1.0), (0.5, 2.0, 1.3)]
)
@pytest.mark.parametrize("length", [1, 2, 20])
def test_equals_the_sums_of_the_paper(seed, lambda_, clip_rho, clip_c, length):
    inputs = random_inputs(seed, length)
    vs, advantages = vtrace_sums(*inputs, lambda_, clip_rho, clip_c)
    result = vtrace(
        *map(torch.from_numpy, inputs), lambda_=lambda_, clip_rho=clip_rho, clip_c=clip_c
    )
    np.testing.assert_allclose(result.vs, vs, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.pg_advantages, advantages, rtol=1e-12, atol=1e-12)


def test_float32_is_close_to_float64():
    inputs = random_inputs(7)
    vs, advantages = vtrace_sums(*inputs, 0.95, 1.0, 1.0)
    single = [torch.from_numpy(x).float() for x in inputs]
    result = vtrace(*single, lambda_=0.95, clip_rho=1.0, clip_c=1.0)
    assert result.vs.dtype == torch.float32
    np.testing.assert_allclose(result.vs, vs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.pg_advantages, advantages, rtol=1e-5, atol=1e-5)


def test_on_policy_targets_are_discounted_returns():
    inputs = random_inputs(3, dones=0.2, off_policy=0.0)
    _, discount, reward, _, bootstrap = inputs
    result = vtrace(*map(torch.from_numpy, inputs), lambda_=1.0, clip_rho=1.0, clip_c=1.0)
    expected, returns = bootstrap, []
    for t in reversed(range(len(reward))):
        expected = reward[t] + discount[t] * expected
        returns.append(expected)
    np.testing.assert_allclose(result.vs, returns[::-1], rtol=1e-12)


def test_nothing_after_the_end_of_an_episode_counts():
    log_rho, discount, reward, value, bootstrap = random_inputs(4, length=10, batch=1)
    discount[4] = 0.0
    options = {"lambda_": 0.95, "clip_rho": 1.0, "clip_c": 1.0}
    before = vtrace(
        *map(torch.from_numpy, (log_rho, discount, reward, value, bootstrap)), **options
    )
    reward[5:] += 100.0
    value[5:] -= 100.0
    after = vtrace(*map(torch.from_numpy, (log_rho, discount, reward, value, bootstrap)), **options)
    assert torch.equal(before.vs[:5], after.vs[:5])
    assert torch.equal(before.pg_advantages[:5], after.pg_advantages[:5])
    assert not torch.allclose(before.vs[5:], after.vs[5:])
