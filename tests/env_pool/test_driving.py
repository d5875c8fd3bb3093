"""drive: vector environments of other libraries behind one face."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import moolink
from tests.env_pool import pool_environments as environments

make = functools.partial(gymnasium.make, "CartPole-v1")


class Simulator:
    """The contract of Isaac Lab's environments, whose tensors stay on their device."""

    num_envs = 3
    device = torch.device("cpu")
    single_observation_space = gymnasium.spaces.Dict(
        {"policy": gymnasium.spaces.Box(-np.inf, np.inf, (2,))}
    )
    single_action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self):
        self.state = torch.zeros(3, 2)
        self.given = None

    def reset(self):
        self.state.zero_()
        return {"policy": self.state}, {"log": {}}

    def step(self, action):
        self.given = action
        self.state += action
        over = self.state[:, 0] > 1
        return {"policy": self.state}, action[:, 0], over, torch.zeros_like(over), {"log": {}}

    def close(self):
        self.state = None


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_gymnasiums_environments_step_as_by_themselves(kind):
    envs, own = moolink.drive(kind([make] * 2)), SyncVectorEnv([make] * 2)
    assert envs.num_envs == 2
    assert envs.single_action_space == own.single_action_space
    envs.async_reset(seed=3)
    observations, rewards, terminated, _, infos = envs.recv()
    np.testing.assert_array_equal(observations, own.reset(seed=3)[0])
    assert rewards.tolist() == [0, 0]
    assert rewards.dtype == np.float32
    assert not terminated.any()
    assert infos["env_id"].tolist() == [0, 1]
    for number in range(20):
        actions = np.array([number % 2, 1])
        envs.send(torch.from_numpy(actions))
        for a, b in zip(envs.recv()[:4], own.step(actions)[:4], strict=True):
            np.testing.assert_array_equal(a, b)
    envs.send(actions)
    assert envs.recv()[1].dtype == np.float32  # As the first one, or no Batcher takes it.
    envs.close()


def test_a_simulators_tensors_are_not_copied():
    simulator = Simulator()
    envs = moolink.drive(simulator)
    envs.async_reset()
    observations, rewards, terminated, truncated, infos = envs.recv()
    assert observations["policy"] is simulator.state
    assert rewards.tolist() == [0, 0, 0]
    assert terminated.dtype == truncated.dtype == torch.bool
    assert infos["log"] == {}
    action = torch.ones(3, 1)
    envs.send(action)
    assert simulator.given is action
    envs.recv()
    array = np.ones((3, 1), np.float32)
    envs.send(array)
    assert simulator.given.data_ptr() == array.ctypes.data
    observations, rewards, terminated, _, _ = envs.recv()
    assert observations["policy"] is simulator.state
    assert terminated.all()


def test_a_batcher_takes_what_a_simulator_gives():
    envs, batches = moolink.drive(Simulator()), moolink.Batcher(2)
    envs.async_reset()
    for _ in range(2):
        observations, rewards, *_ = envs.recv()
        batches.stack({"policy": observations["policy"], "reward": rewards})
        envs.send(torch.full((3, 1), 0.5))
    batch = batches.get()
    assert batch["policy"].shape == (2, 3, 2)
    assert batch["policy"][:, 0, 0].tolist() == [0, 0.5]


def test_a_vector_environment_of_moolink_needs_nothing():
    envs = moolink.VectorEnv(environments.Informed, 2)
    assert moolink.drive(envs) is envs
    envs.close()


def test_what_is_no_vector_environment_is_refused():
    with pytest.raises(TypeError, match="Counter has no num_envs"):
        moolink.drive(environments.Counter(0))


def test_results_need_a_request_and_actions_belong_to_the_last_rows():
    envs = moolink.drive(SyncVectorEnv([make] * 2))
    with pytest.raises(moolink.Error, match="nothing is under way"):
        envs.recv()
    envs.async_reset()
    envs.recv()
    with pytest.raises(ValueError, match=r"which are \[0, 1\], not for \[1\]"):
        envs.send(np.array([0]), [1])
    envs.close()
