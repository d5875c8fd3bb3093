"""The loss of a contribution, how contributions add up, and the network in torch."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from examples.torch.common import to_device
from examples.torch.impala import Actor, impala_loss
from examples.torch.networks import Gaussian, Net
from examples.torch.vtrace import vtrace
from tests.learning import stubs
from tests.learning.stays_there import StaysThere
from tests.learning.stubs import Spaces, filled, images, run_of

LENGTH, ENVS = 5, 6
ENVIRONMENTS = Spaces(images(4, 42, 42), spaces.Discrete(4), ENVS)
MEAN = {"obs": np.full((4, 42, 42), 100.0, np.float32)}


def options(**given):
    return stubs.options(unroll_length=LENGTH, clip_reward=True, **given)


def make_net(envs=ENVIRONMENTS, seed=0, **given):
    torch.manual_seed(seed)
    return Net(envs, MEAN, options(**given))


@pytest.fixture(scope="module")
def net():
    return make_net()


def make_batch(columns=slice(0, ENVS), envs=ENVIRONMENTS, o=None, **changes):
    o = o or options(discount=0.9)
    contents = stubs.arrays(envs, o) | changes
    return to_device(filled(contents).data(columns), "cpu")


def gradients(net, batch, o):
    net.zero_grad()
    impala_loss(net, batch, o).total.backward()
    return [p.grad.clone() for p in net.parameters()]


def test_is_the_sum_of_its_three_terms(net):
    o = options(baseline_cost=0.7, entropy_cost=0.03, discount=0.9, vtrace_lambda=0.8)
    batch = make_batch()
    losses = impala_loss(net, batch, o)
    with torch.no_grad():
        policy, value, _ = net(batch["observation"], batch["first"], batch["state"])
        logits, value = policy.double(), value.double()
    log_pi = logits[:-1] - logits[:-1].exp().sum(-1, keepdim=True).log()
    rows = [[log_pi[t, b, batch["action"][t, b, 0]] for b in range(ENVS)] for t in range(LENGTH)]
    log_pi_a = torch.stack([torch.stack(row) for row in rows])
    targets = vtrace(
        log_pi_a - batch["log_prob"],
        batch["discount"].double(),
        batch["reward"].sign().double() + 0.9 * batch["bootstrap"],
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
def test_weighted_mean_of_contributions_is_the_whole_batch(net, loss):
    """What makes a round's gradients independent of how many peers it is shared out among."""
    o = options(loss=loss)
    whole = gradients(net, make_batch(slice(0, 6)), o)
    small = gradients(net, make_batch(slice(0, 2)), o)
    large = gradients(net, make_batch(slice(2, 6)), o)
    for all_, two, four in zip(whole, small, large, strict=True):
        torch.testing.assert_close(all_, (2 * two + 4 * four) / 6, rtol=1e-3, atol=1e-6)


def test_sum_is_the_mean_times_length_and_round(net):
    batch = make_batch(slice(0, 4))
    mean = gradients(net, batch, options(loss="mean"))
    total = gradients(net, batch, options(loss="sum", virtual_batch_size=3))
    for m, s in zip(mean, total, strict=True):
        torch.testing.assert_close(s, LENGTH * 3 * m, rtol=1e-3, atol=1e-5)


def test_rewards_count_by_their_sign_where_told_so(net):
    reward = make_batch()["reward"].numpy()

    def loss(clip_reward, reward):
        o = options()
        o.clip_reward = clip_reward
        return impala_loss(net, make_batch(reward=reward), o).total.item()

    signs = np.sign(reward)
    assert loss(True, reward) == loss(True, signs) == loss(False, signs)
    assert loss(False, reward) != loss(True, reward)


def test_what_a_limit_hides_counts_as_reward(net):
    """The value of what would have followed, discounted; not clipped as rewards are."""
    o, batch = options(), make_batch()
    o.clip_reward = False
    bootstrapped = impala_loss(net, batch, o).total
    reward = (batch["reward"] + o.discount * batch["bootstrap"]).numpy()
    rewarded = impala_loss(net, make_batch(reward=reward, bootstrap=0 * reward), o).total
    none = impala_loss(net, make_batch(bootstrap=0 * reward), o).total
    assert bootstrapped.item() == pytest.approx(rewarded.item(), rel=1e-5)
    assert bootstrapped.item() != pytest.approx(none.item(), rel=1e-3)


def test_v_trace_reads_no_elements():
    """Tensors on torch's meta device have no elements: code that runs with them reads none."""
    arrays = [torch.rand(LENGTH, ENVS, device="meta") for _ in range(4)]
    with StaysThere("meta") as guard:
        targets = vtrace(*arrays, arrays[0][0], lambda_=0.9, clip_rho=1.0, clip_c=1.0)
    assert guard.seen > 5 * LENGTH
    assert targets.vs.shape == (LENGTH, ENVS)


def test_bfloat16_is_close_to_float32(net):
    batch = make_batch()
    single = impala_loss(net, batch, options()).total.item()
    half_net = make_net(precision="bfloat16")
    half = impala_loss(half_net, batch, options()).total
    half.backward()
    assert half.item() == pytest.approx(single, rel=0.05, abs=0.02)
    assert all(p.grad.dtype == torch.float32 for p in half_net.parameters())


def test_input_is_standardised_per_pixel():
    encoder = make_net().encoders["obs"]
    encoder.layers = nn.Identity()
    observation = torch.zeros(1, 2, 4, 42, 42, dtype=torch.uint8)
    observation[0, 0] = 132  # one unit above the mean of 100
    observation[0, 1] = 255  # more than four units above it
    x = encoder(observation)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x[0], torch.ones(4, 42, 42))
    assert torch.equal(x[1], torch.full((4, 42, 42), 4.0))


def test_images_may_have_their_channels_last():
    first, last = (
        Spaces(images(*shape), spaces.Discrete(2)) for shape in ((3, 48, 40), (48, 40, 3))
    )
    mean = np.random.default_rng(0).uniform(0, 200, (3, 48, 40)).astype(np.float32)
    torch.manual_seed(0)
    one = Net(first, {"obs": mean}, options())
    torch.manual_seed(0)
    other = Net(last, {"obs": mean.transpose(1, 2, 0)}, options())
    x = torch.randint(0, 256, (2, 3, 3, 48, 40), dtype=torch.uint8)
    flags, state = torch.zeros(2, 3, dtype=torch.bool), one.no_memory(3)
    with torch.no_grad():
        wanted = one({"obs": x}, flags, state)[0]
        got = other({"obs": x.permute(0, 1, 3, 4, 2)}, flags, state)[0]
    torch.testing.assert_close(got, wanted)


def test_memory_goes_on_through_unrolls_and_starts_anew_at_first_observations():
    envs = Spaces(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 2)
    torch.manual_seed(0)
    net = Net(envs, {}, options(lstm=True))
    x, first = torch.randn(6, 2, 3), torch.zeros(6, 2, dtype=torch.bool)
    first[3, 1] = True
    with torch.no_grad():
        whole, _, end = net({"obs": x}, first, net.no_memory(2))
        early, _, middle = net({"obs": x[:2]}, first[:2], net.no_memory(2))
        late, _, same_end = net({"obs": x[2:]}, first[2:], middle)
        anew, _, _ = net({"obs": x[3:, 1:]}, first[3:, 1:], net.no_memory(1))
    torch.testing.assert_close(torch.cat([early, late]), whole)
    torch.testing.assert_close(same_end, end)
    torch.testing.assert_close(anew[:, 0], whole[3:, 1])
    assert not torch.equal(whole[3, 0], net({"obs": x[3:4]}, first[3:4], net.no_memory(2))[0][0, 0])


def test_a_gaussian_policy_has_the_density_it_says():
    mean, log_std = torch.tensor([0.5, -1.0]), torch.tensor([0.2, -0.7])
    pi, action = Gaussian(mean, log_std), torch.tensor([0.1, -0.3])
    var = log_std.exp() ** 2
    densities = torch.exp(-((action - mean) ** 2) / (2 * var)) / (2 * torch.pi * var).sqrt()
    assert pi.log_prob(action).item() == pytest.approx(densities.log().sum().item(), rel=1e-5)
    wanted = (0.5 * (2 * torch.pi * torch.e * var).log()).sum().item()
    assert pi.entropy().item() == pytest.approx(wanted, rel=1e-5)


def make_actor(net, envs=ENVIRONMENTS):
    return Actor(options(), envs, net, run_of(options(), envs))


def infer(actor, observation):
    """The policy."""
    first = np.zeros(count := len(observation["obs"]), bool)
    return actor.infer(observation, first, actor.net.no_memory(count))[0]


def test_the_actor_samples_from_the_nets_distribution(net):
    frame = torch.randint(0, 256, (1, 4, 42, 42), dtype=torch.uint8)
    pi = infer(make_actor(net), {"obs": frame.expand(2000, -1, -1, -1)})
    actions = pi.sample()
    log_pi = infer(make_actor(net), {"obs": frame}).log_pis[0][0]
    torch.testing.assert_close(pi.log_prob(actions), log_pi[actions[:, 0]], rtol=1e-3, atol=1e-3)
    frequencies = np.bincount(actions[:, 0], minlength=4) / 2000
    np.testing.assert_allclose(frequencies, log_pi.exp(), atol=0.05)  # 4.5 deviations


def test_the_actor_takes_new_parameters_over(net):
    frames = {"obs": torch.randint(0, 256, (3, 4, 42, 42), dtype=torch.uint8)}
    other, actor = make_net(seed=5), make_actor(net)
    wanted = infer(make_actor(other), frames).log_pis[0]
    assert not torch.equal(infer(actor, frames).log_pis[0], wanted)
    actor.take_parameters(other.state_dict().values(), version=1)
    assert torch.equal(infer(actor, frames).log_pis[0], wanted)
