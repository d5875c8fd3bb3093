"""Environments on the learner's device: the simulation, and the path of its tensors to a round."""

import csv

import gymnasium
import numpy as np
import pytest
import torch

import moolink
from examples.common.options import defaults
from examples.torch import on_device
from examples.torch.cartpole import CartPole
from tests.learning.processes import run
from tests.learning.stays_there import StaysThere

SMALL = {"num_envs": 6, "rollout_length": 5, "minibatches": 2, "epochs": 2, "hidden_size": 16}


def options(**given):
    o = defaults(on_device.OnDeviceOptions, {}, num_peers=1)
    for name, value in {**SMALL, **given}.items():
        assert hasattr(o, name), name
        setattr(o, name, value)
    return o


# The simulation


def test_states_equal_those_of_gymnasiums_cartpole():
    theirs = gymnasium.make("CartPole-v1").unwrapped
    mine = CartPole(1)
    mine.reset()
    mine._state = torch.from_numpy(theirs.reset(seed=3)[0])[None]
    random = np.random.default_rng(0)
    for _ in range(1000):
        action = int(random.integers(2))
        observation, reward, terminated, _, _ = theirs.step(action)
        before = mine._state
        push = torch.tensor([[2.0 * action - 1.0]])
        _, rewards, ended, truncated, _ = mine.step(push)
        if terminated:
            break
        np.testing.assert_allclose(mine._state[0], observation, rtol=1e-5, atol=1e-6)
        assert rewards.tolist() == [reward]
        assert not torch.equal(before, mine._state)
    assert terminated
    assert ended.tolist() == [True]
    assert truncated.tolist() == [False]


def test_the_force_is_proportional_up_to_its_limit():
    mine = CartPole(4)
    mine.reset()
    mine._state = torch.zeros(4, 4)
    observation, *_ = mine.step(torch.tensor([[0.0], [0.5], [1.0], [7.0]]))
    speed = observation["policy"][:, 1]
    assert speed[0] == 0
    assert speed[2] == pytest.approx(2 * speed[1].item())
    assert speed[3] == speed[2]


def test_environments_that_end_are_reset_in_the_same_step():
    envs = CartPole(200, max_steps=30)
    observation, extras = envs.reset()
    assert observation["policy"].abs().max() <= 0.05
    assert extras == {}
    age = torch.zeros(200, dtype=torch.int64)
    ends = torch.zeros(2, dtype=torch.int64)
    for _ in range(100):
        observation, _, terminated, truncated, _ = envs.step(2 * torch.rand(200, 1) - 1)
        age += 1
        assert (truncated == ((age == 30) & ~terminated)).all()
        over = terminated | truncated
        assert (observation["policy"][over].abs() <= 0.05).all()
        age[over] = 0
        ends += torch.stack([terminated.sum(), truncated.sum()])
    assert (ends > 10).all()


# The path of its tensors


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.to("meta"),
    ],
)
def test_the_guard_notices_reads_and_copies(read):
    x = torch.rand(3)
    with StaysThere("cpu") as guard, pytest.raises(AssertionError):
        read(x * 2)
    assert guard.seen


@pytest.mark.parametrize(
    "read",
    [lambda x: x.cpu(), lambda x: x.numpy(), lambda x: x.tolist(), lambda x: np.asarray(x)],
)
def test_tensors_without_elements_cannot_be_read(read):
    errors = (NotImplementedError, RuntimeError, TypeError, AssertionError)
    with StaysThere("meta"), pytest.raises(errors):
        read(torch.rand(3, device="meta"))


def test_rollouts_and_gradients_read_no_elements():
    """Tensors on torch's meta device have no elements: code that runs with them reads none."""
    o = options(device="meta")
    envs, net = on_device.make(o, o.num_envs, None)
    player = on_device.Player(envs, net, o, torch.device("meta"))
    with StaysThere("meta") as guard:
        batches = on_device.minibatches(player, o)
        for number in range(2 * o.epochs * o.minibatches):
            rows, new_steps = next(batches)
            first = number % (o.epochs * o.minibatches) == 0
            assert new_steps == (o.num_envs * o.rollout_length if first else 0)
            assert rows["observation"].shape == (15, 4)
            loss, _ = on_device.ppo_loss(net, rows, o)
            loss.backward()
    assert all(p.grad.device.type == "meta" for p in net.parameters())
    assert guard.seen > 1000


class Watched(CartPole):
    """Records actions; returns each observation in the memory of the first."""

    def reset(self):
        observation, extras = super().reset()
        self.memory = observation["policy"]
        self.actions = []
        return {"policy": self.memory}, extras

    def step(self, actions):
        self.actions.append(actions)
        observation, *rest = super().step(actions)
        self._state = observation["policy"].clone()
        self.memory.copy_(observation["policy"])
        return {"policy": self.memory}, *rest


def test_the_batcher_copies_each_observation_once_and_environments_get_the_policys_actions():
    o = options()
    _, net = on_device.make(o, o.num_envs, None)
    player = on_device.Player(Watched(o.num_envs), net, o, torch.device("cpu"))
    envs = player.envs._envs
    assert player.observation is envs.memory
    first = envs.memory.clone()
    rows = player.rollout()
    assert player.observation is envs.memory
    T, E = o.rollout_length, o.num_envs
    assert torch.equal(rows["observation"].unflatten(0, (T, E))[0], first)
    assert torch.equal(rows["action"].unflatten(0, (T, E)), torch.stack(envs.actions))
    # The rows are views of the batch's memory.
    assert rows["observation"]._base is not None
    assert rows["action"]._base is not None


def test_only_gradients_reach_the_group(broker_address):
    o = options(total_steps=200)
    envs, net = on_device.make(o, o.num_envs, None)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    batches = on_device.minibatches(on_device.Player(envs, net, o, torch.device("cpu")), o)
    with (
        moolink.Rpc("peer") as rpc,
        moolink.Group(rpc, "on device") as group,
        moolink.Accumulator("model", net.parameters(), group=group) as accumulator,
    ):
        rpc.connect(broker_address)
        accumulator.set_virtual_batch_size(o.round_size)
        for step in accumulator.steps(optimizer, until=lambda totals: totals["steps"] >= 100):
            with StaysThere("cpu"):
                rows, new_steps = next(batches)
                on_device.ppo_loss(net, rows, o)[0].backward()
            step.reduce(len(rows["advantage"]), {"steps": new_steps})
        assert accumulator.model_version() > o.epochs * o.minibatches
        copies = rpc.stats()["copies"]
        assert set(copies.values()) == {0}, copies


# The learner


def test_advantages_are_the_papers_sums():
    random = np.random.default_rng(0)
    reward, value = random.normal(size=(6, 3)), random.normal(size=(7, 3))
    discount = 0.9 * (random.random((6, 3)) > 0.2)
    delta = reward + discount * value[1:] - value[:-1]
    wanted = np.zeros((6, 3))
    for t in range(6):
        for k in range(t, 6):
            wanted[t] += np.prod(0.8 * discount[t:k], axis=0) * delta[k]
    got = on_device.advantages(*map(torch.from_numpy, (reward, discount, value)), 0.8)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_a_cut_off_episode_is_bootstrapped_and_a_terminated_one_is_not():
    o = options(discount=0.5)
    envs, net = on_device.make(o, o.num_envs, None)
    player = on_device.Player(envs, net, o, torch.device("cpu"))
    terminated = [True, False, False, True, False, False]
    truncated = [False, True, False, True, True, False]  # the fourth ends at its limit
    flags = torch.tensor([terminated, truncated])
    rewards = torch.arange(6.0)
    player.envs._envs.step = lambda actions: (envs.reset()[0], rewards, *flags, {})
    player.step(torch.zeros(6, 1), torch.full((6,), 8.0))
    assert player.reward.tolist() == [0, 1 + 4, 2, 3, 4 + 4, 5]
    assert player.discount.tolist() == [0, 0, 0.5, 0, 0, 0.5]
    assert [x.item() for x in player.take()] == [4, 0 + 1 + 3 + 4]
    player.step(torch.zeros(6, 1), torch.zeros(6))
    assert [x.item() for x in player.take()] == [4, 0 + 1 + 3 + 4]
    assert player.running.tolist() == [0, 0, 4, 0, 0, 10]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--lstm", []),
        ("--normalize", []),
        ("--normalize-reward", []),
        ("--clip-reward", []),
        ("--seed-envs", []),
        ("--env-processes", ["2"]),
    ],
)
def test_unsupported_options_are_refused(option, value):
    status, output = run("-m", "examples.torch.on_device", option, *value)
    assert status == 1
    assert output == f"error: this learner does not support {option}: leave it out\n"


def test_two_peers_learn_and_resume_and_the_checkpoint_is_evaluated(tmp_path):
    learner = ["-m", "examples.torch.on_device"]
    arguments = ["--save-dir", str(tmp_path), "--log-interval", "0.2"]
    for steps in ("50000", "60000"):
        command = ["-m", "moolink", "run", "-n", "2", *learner, *arguments]
        status, output = run(*command, "--total-steps", steps)
        assert status == 0, output
    assert "resumed from" in output
    with (tmp_path / "learning_curve.csv").open(newline="") as file:
        returns = [float(row["mean_return"] or 0) for row in csv.DictReader(file)]
    assert max(returns) > 100  # at first: 22
    status, output = run(*learner, *arguments, "--mode", "evaluate", "--episodes", "20")
    assert status == 0, output
    assert " of 20 episodes" in output
