"""PufferLib 3: its vector environments and its native ones, driven as they are."""

import functools

import gymnasium
import numpy as np
import pytest

import moolink
from tests.interop_libraries.learner import train

pytest.importorskip("pufferlib", reason="needs pufferlib: make test-interop")

import pufferlib
import pufferlib.emulation
import pufferlib.vector


class Native(pufferlib.PufferEnv):
    """Pays two agents for choosing their own number; writes into PufferLib's buffers."""

    def __init__(self, buf=None, seed=0):
        self.single_observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.num_agents = 2
        super().__init__(buf)

    def reset(self, seed=None):
        self.observations[:] = np.eye(2)
        self.steps = 0
        return self.observations, []

    def step(self, actions):
        self.steps += 1
        self.rewards[:] = actions == np.arange(2)
        self.terminals[:] = self.steps % 5 == 0
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def close(self):
        pass


def emulated(buf=None, seed=0):
    return pufferlib.emulation.GymnasiumPufferEnv(gymnasium.make("CartPole-v1"), buf=buf, seed=seed)


def test_a_native_environments_arrays_are_not_copied():
    native = Native()
    envs = moolink.drive(native)
    envs.async_reset(seed=1)
    observations, *_, infos = envs.recv()
    assert observations is native.observations
    assert infos["env_id"].tolist() == [0, 1]
    assert infos["mask"].tolist() == [True, True]
    envs.send(np.array([0, 0]))
    _, rewards, terminated, _, _ = envs.recv()
    assert rewards.tolist() == [1, 0]
    assert not terminated.any()
    with pytest.raises(ValueError, match="for the rows of the last recv"):
        envs.send(np.array([0]), [1])
    envs.close()


@pytest.mark.parametrize(
    ("backend", "options"),
    [("Serial", {}), ("Multiprocessing", {"num_workers": 2, "batch_size": 8})],
)
@pytest.mark.parametrize(
    ("make", "batch_size", "good"),
    [(Native, 64, 4.5), (emulated, 512, 100)],  # random play: 2.5 and 22
    ids=["native", "emulated"],
)
def test_a_learner_plays_well_after_100_updates(make, batch_size, good, backend, options):
    envs = moolink.drive(
        pufferlib.vector.make(
            functools.partial(make),
            num_envs=16,
            backend=getattr(pufferlib.vector, backend),
            **options,
        )
    )
    assert train(envs, 100, batch_size) > good
    envs.close()
