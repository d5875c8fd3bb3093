"""sail-sg's EnvPool, driven as it is."""

import re

import numpy as np
import pytest

import moolink
from tests.interop_libraries.learner import train
from tests.learning.processes import run

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


def cart_poles(num_envs):
    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=num_envs)


def test_an_example_learns_in_it(tmp_path):
    arguments = ["-m", "examples.torch.impala", "--save-dir", str(tmp_path), "--num-envs", "16"]
    arguments += ["--env-id", "tests.interop_libraries.test_envpool:cart_poles"]
    status, output = run(*arguments, "--learning-rate", "3e-3", "--total-steps", "40000")
    assert status == 0, output
    status, output = run(*arguments, "--mode", "evaluate", "--episodes", "16")
    assert status == 0, output
    found = re.search(r"mean return ([\d.]+) of 16 episodes", output)
    assert found, output
    assert float(found[1]) > 100  # random play: 22
