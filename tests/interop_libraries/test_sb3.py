"""moolink.sb3: the rules of Stable-Baselines3's vector environments, and its own PPO."""

import functools

import gymnasium
import numpy as np
import pytest

import moolink
from tests.env_pool import pool_environments as environments

pytest.importorskip("stable_baselines3", reason="needs stable-baselines3: make test-interop")

from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from moolink.sb3 import VecEnv


class Optioned(environments.Informed):
    """Shows its seed and its option in the info of a reset."""

    render_mode = None

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"seed": seed, "option": (options or {}).get("x")}


def of(make, count=3, **options):
    return VecEnv(moolink.VectorEnv(make, count, num_workers=2, **options))


def monitored():
    return Monitor(gymnasium.make("CartPole-v1"))


def test_steps_are_those_of_sb3s_own_vector_environment():
    ours, theirs = of(monitored, 4), DummyVecEnv([monitored] * 4)
    ours.seed(5)
    theirs.seed(5)
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    ended = 0
    for number in range(120):
        actions = (np.arange(4) + number // 3) % 2
        got, expected = ours.step(actions), theirs.step(actions)
        for a, b in zip(got[:3], expected[:3], strict=True):
            assert a.dtype == b.dtype
            if not ended:  # The next episodes have seeds of their own.
                np.testing.assert_allclose(a[~expected[2]], b[~expected[2]])
        if ended:
            continue
        for a, b in zip(got[3], expected[3], strict=True):
            assert a.keys() == b.keys()
            assert a["TimeLimit.truncated"] == b["TimeLimit.truncated"]
            if "episode" in a:
                ended += 1
                assert a["episode"]["l"] == b["episode"]["l"]
                np.testing.assert_allclose(a["terminal_observation"], b["terminal_observation"])
    assert ended
    ours.close()


def test_a_time_limit_is_told_from_an_end():
    envs = of(functools.partial(environments.Informed, length=2))
    envs.reset()
    envs.step(np.array([1, 1, 1]))
    observations, rewards, dones, infos = envs.step(np.array([7, 8, 9]))
    assert dones.all()
    assert rewards.dtype == np.float32
    assert [info["TimeLimit.truncated"] for info in infos] == [False, True, False]
    assert [info["action"] for info in infos] == [7, 8, 9]
    assert [info["terminal_observation"][3] for info in infos] == [7, 8, 9]
    assert observations[:, 2].tolist() == [0, 0, 0]
    assert [info["episode"] for info in envs.reset_infos] == [1, 1, 1]
    envs.close()


def test_seeds_and_options_reach_the_next_reset_only():
    envs = of(Optioned)
    envs.seed(10)
    envs.set_options([{"x": 1}, {"x": 2}, {"x": 1}])
    envs.reset()
    assert [info["seed"] for info in envs.reset_infos] == [10, 11, 12]
    assert [info["option"] for info in envs.reset_infos] == [1, 2, 1]
    assert [info["episode"] for info in envs.reset_infos] == [0, 0, 0]
    envs.reset()
    assert [info["seed"] for info in envs.reset_infos] == [None] * 3
    assert [info["option"] for info in envs.reset_infos] == [None] * 3
    envs.close()


def test_attributes_and_methods_of_some_environments():
    envs = of(monitored)
    envs.reset()
    envs.set_attr("note", "x", indices=[0, 2])
    assert envs.get_attr("note", indices=[2, 0]) == ["x", "x"]
    assert not envs.has_attr("note")
    assert envs.has_attr("action_space")
    with pytest.raises(AttributeError, match="note"):
        envs.get_attr("note")
    assert envs.env_method("get_wrapper_attr", "render_mode", indices=1) == [None]
    assert envs.env_is_wrapped(Monitor) == [True] * 3
    assert envs.env_is_wrapped(gymnasium.wrappers.FrameStackObservation, -1) == [False]
    envs.close()


def test_another_mode_of_autoreset_is_refused():
    envs = moolink.VectorEnv(environments.Informed, 2, autoreset_mode="NextStep")
    with pytest.raises(ValueError, match="SAME_STEP"):
        VecEnv(envs)
    envs.close()


def test_ppo_learns_cartpole():
    envs = VecMonitor(of(functools.partial(gymnasium.make, "CartPole-v1"), 8))
    model = PPO("MlpPolicy", envs, n_steps=64, batch_size=128, seed=0, device="cpu")
    model.learn(512)
    before = np.mean([episode["r"] for episode in model.ep_info_buffer])
    model.learn(10_000, reset_num_timesteps=False)
    after = np.mean([episode["r"] for episode in model.ep_info_buffer])
    assert after > 2 * before
    envs.close()
