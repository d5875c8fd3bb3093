"""VectorEnv: Gymnasium's three modes, infos, and first ready, first served."""

import functools

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import moolink
from tests.env_pool import pool_environments as environments

LONG = 60.0
make = functools.partial(environments.Informed, length=2)


def test_same_step_gives_the_next_episode_and_keeps_the_last_ones_end():
    with_final = moolink.VectorEnv(make, 3, num_workers=2)
    observations, infos = with_final.reset(seed=1)
    assert infos["episode"].tolist() == [0, 0, 0]
    with_final.step([4, 5, 6])
    observations, rewards, terminated, truncated, infos = with_final.step([7, 8, 9])
    assert rewards.tolist() == [7, 8, 9]
    assert terminated.tolist() == [True, False, True]
    assert truncated.tolist() == [False, True, False]
    np.testing.assert_array_equal(observations[:, 1:], [[1, 0, -1]] * 3)
    np.testing.assert_array_equal(np.stack(infos["final_obs"])[:, 3], [7, 8, 9])
    assert infos["final_info"]["action"].tolist() == [7, 8, 9]
    assert infos["episode"].tolist() == [1, 1, 1]
    with_final.close()


def test_next_step_ignores_the_action_of_the_reset():
    envs = moolink.VectorEnv(make, 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    envs.reset()
    envs.step([1, 1])
    observations, _, terminated, truncated, _ = envs.step([2, 2])
    assert (terminated | truncated).all()
    assert observations[:, 2].tolist() == [2, 2]
    observations, rewards, terminated, truncated, _ = envs.step([3, 3])
    assert observations[:, 2].tolist() == [0, 0]
    assert rewards.tolist() == [0, 0]
    assert not (terminated | truncated).any()
    envs.close()


def test_disabled_resets_whom_the_mask_names():
    envs = moolink.VectorEnv(make, 2, autoreset_mode="Disabled")
    envs.reset()
    envs.step([1, 1])
    observations, _ = envs.reset(options={"reset_mask": np.array([True, False])})
    assert observations[:, 2].tolist() == [0, 1]
    envs.close()


def test_a_slow_environment_holds_up_nobody_of_another_worker():
    envs = moolink.VectorEnv(environments.Informed, 3, num_workers=3, batch_size=2)
    envs.async_reset()
    *_, infos = envs.recv(LONG)
    envs.send([99 if row == 0 else 1 for row in infos["env_id"]])
    for _ in range(5):
        *_, infos = envs.recv(LONG)
        if 0 not in infos["env_id"]:
            assert sorted(infos["env_id"]) == [1, 2]
        envs.send(np.ones(2, np.int64), infos["env_id"])
    envs.close()


def test_attributes_and_errors_of_calls_leave_the_pool_usable():
    envs = moolink.VectorEnv(environments.Informed, 2)
    envs.reset()
    envs.set_attr("length", [3, 4])
    assert envs.get_attr("length") == (3, 4)
    with pytest.raises(moolink.EnvError, match="environment 0 raised in missing: AttributeError"):
        envs.call("missing")
    envs.step([0, 0])
    envs.close()
