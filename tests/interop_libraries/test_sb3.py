"""moolink.sb3: the rules of Stable-Baselines3's vector environments, and its own PPO."""

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

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


class Taking(gymnasium.Env):
    """Takes actions of a space; reports the action that it took and its reset options."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    render_mode = None
    taken = began = None

    def __init__(self, space, index=0):
        self.action_space = space
        self.index = index

    def reset(self, *, seed=None, options=None):
        self.began = options
        return np.zeros(2, np.float32), {"index": self.index, "list": [self.index] * self.index}

    def step(self, action):
        self.taken = action
        return np.zeros(2, np.float32), 0.0, False, False, {"mixed": [1, "a", None][self.index]}


def making(space):
    return [functools.partial(Taking, space, index) for index in range(3)]


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


NUMBER = gymnasium.spaces.Discrete(10)
PAIR = gymnasium.spaces.Tuple((NUMBER, NUMBER))
TRIPLE = gymnasium.spaces.Tuple((NUMBER, NUMBER, NUMBER))
TEXT = gymnasium.spaces.Text(3)
VECTOR = gymnasium.spaces.Box(0, 9, (2,), np.float32)


def plain(value):
    """As Python's numbers."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return np.asarray(value).tolist()


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (NUMBER, [1, 2, 3]),
        (NUMBER, (1, np.int64(2), 3)),
        (NUMBER, np.array([1, 2, 3])),
        (VECTOR, [np.ones(2, np.float32), np.zeros(2), [2, 3]]),
        (VECTOR, np.arange(6.0).reshape(3, 2)),
        (TRIPLE, [(1, 2, 3), (4, 5, 6), (7, 8, 9)]),
        (TRIPLE, ((1, 2, 3), (4, 5, 6), [7, 8, 9])),
        (PAIR, np.array([[1, 2], [3, 4], [5, 6]])),
        (gymnasium.spaces.Dict(a=NUMBER, b=PAIR), [{"a": i, "b": (i, 9 - i)} for i in range(3)]),
        (gymnasium.spaces.Tuple((PAIR, VECTOR)), [((1, i), np.ones(2)) for i in range(3)]),
        (gymnasium.spaces.Dict(t=TEXT, n=NUMBER), [{"t": "xy", "n": i} for i in range(3)]),
        (gymnasium.spaces.Tuple((TEXT, NUMBER)), [("xy", i) for i in range(3)]),
        (gymnasium.spaces.MultiBinary(2), [[0, 1], [1, 0], [1, 1]]),
        (gymnasium.spaces.MultiBinary(2), np.ones((3, 2), np.float32)),
    ],
)  # fmt: skip
def test_actions_are_indexed_by_environment(space, actions):
    envs = VecEnv(moolink.VectorEnv(making(space)))
    envs.reset()
    envs.step(actions)
    got = [plain(taken) for taken in envs.get_attr("taken")]
    envs.close()
    parts = isinstance(space, gymnasium.spaces.Tuple)
    assert got == [plain(tuple(each) if parts else each) for each in actions]


@pytest.mark.parametrize(
    ("space", "actions", "message"),
    [
        (NUMBER, [1, 2], "one action for each of the 3 environments, got 2"),
        (NUMBER, 1, "expected actions for 3 environments"),
        (NUMBER, [1, 2, 0.5], "have dtype float64, its space has int64"),
        (TRIPLE, (np.arange(3), np.arange(3), np.arange(3)), "may be a part of all environments"),
        (TRIPLE, [(1, 2), (3, 4), (5, 6)], "expected a tuple of 3 parts, got 2"),
        (PAIR, [(1, 2), (3, 4)], "one action for each of the 3 environments"),
        (VECTOR, [np.ones(2), np.ones(1), np.ones(2)], r"environment 1 has shape \(1,\)"),
        (gymnasium.spaces.Dict(a=NUMBER), [{"a": 1}, {"b": 1}, {}], r"environment 1: .*\['a'\]"),
    ],
)  # fmt: skip
def test_actions_that_are_not_one_for_each_environment_are_refused(space, actions, message):
    envs = VecEnv(moolink.VectorEnv(making(space)))
    envs.reset()
    with pytest.raises((ValueError, TypeError), match=message):
        envs.step(actions)
    envs.close()


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (NUMBER, np.array([1, 2, 3])),
        (VECTOR, np.arange(6.0).reshape(3, 2)),
        (gymnasium.spaces.MultiBinary(2), np.ones((3, 2), np.float32)),
    ],
)
def test_an_array_of_all_actions_is_not_taken_apart(space, actions, monkeypatch):
    envs = VecEnv(moolink.VectorEnv(making(space)))
    envs.reset()
    monkeypatch.setattr(moolink.sb3, "_batched", None)
    envs.step(actions)
    assert [plain(taken) for taken in envs.get_attr("taken")] == actions.tolist()
    envs.close()


def test_equal_options_reset_rows_of_vector_environments():
    single = functools.partial(gymnasium.make, "CartPole-v1")
    make = functools.partial(SyncVectorEnv, [single] * 2, autoreset_mode="SameStep")
    envs = of(make, 4)
    envs.set_options([{"low": -0.01, "high": 0.01} for _ in range(4)])
    assert np.abs(envs.reset()).max() <= 0.01
    envs.set_options([{}, {}, {"low": 0.5, "high": 0.6}, {}])
    assert (np.abs(envs.reset()).max(axis=1) > 0.1).tolist() == [False, False, True, False]
    envs.close()


def test_options_and_infos_are_each_environments_own():
    envs = VecEnv(moolink.VectorEnv(making(NUMBER)))
    envs.reset()
    assert envs.get_attr("began") == [None] * 3
    assert envs.reset_infos == [{"index": i, "list": [i] * i} for i in range(3)]
    options = [{"goal": np.zeros(2)}, {}, {"goal": np.ones(2)}]
    envs.set_options(options)
    envs.reset()
    began = envs.get_attr("began")
    assert began[1] is None
    np.testing.assert_array_equal(began[2]["goal"], [1, 1])
    envs.reset()
    assert envs.get_attr("began") == [None] * 3
    infos = envs.step([0, 0, 0])[3]
    assert [info["mixed"] for info in infos] == [1, "a", None]
    envs.close()
    envs.close()


def test_indices_attributes_and_images_are_as_in_sb3():
    envs = VecEnv(moolink.VectorEnv(making(NUMBER)))
    assert envs.get_attr("index", [-1, 0, 0]) == [2, 0, 0]
    for indices in (3, [-4]):
        with pytest.raises(IndexError, match="there is no environment"):
            envs.get_attr("index", indices)
    assert envs.has_attr("index")
    assert not envs.has_attr("absent")
    with pytest.raises(AttributeError, match="absent"):
        envs.get_attr("absent")
    with pytest.warns(UserWarning, match="only 'rgb_array' gives images"):
        assert envs.get_images() == [None] * 3
    envs.close()
    with pytest.raises(ValueError, match="leave copy=True"):
        of(monitored, copy=False)
