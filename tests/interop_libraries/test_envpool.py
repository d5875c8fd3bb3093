"""sail-sg's EnvPool, driven as it is."""

import numpy as np
import pytest

import moolink
from tests.interop_libraries.learner import train

envpool = pytest.importorskip("envpool", reason="needs envpool: make test-interop")


def make(**options):
    return moolink.drive(
        envpool.make("CartPole-v1", env_type="gymnasium", num_envs=8, seed=1, **options)
    )


def test_rows_come_first_ready_first_served():
    envs = make(batch_size=4, num_threads=2)
    envs.async_reset()
    seen = np.zeros(8, np.int64)
    for _ in range(40):
        observations, rewards, _, _, infos = envs.recv()
        assert observations.shape == (4, 4)
        assert rewards.shape == (4,)
        seen[infos["env_id"]] += 1
        envs.send(np.zeros(4, np.int64), infos["env_id"])
    assert seen.sum() == 160
    assert (seen > 0).all()
    envs.close()


def test_a_seed_belongs_to_make():
    envs = make()
    with pytest.raises(ValueError, match=r"envpool\.make"):
        envs.async_reset(seed=1)
    envs.close()


def test_a_learner_plays_well_after_100_updates():
    envs = make(batch_size=4, num_threads=2)
    assert train(envs, 100) > 100  # random play: 22
    envs.close()
